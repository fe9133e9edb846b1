"""A store that speaks S3, to test on: moto's server, in an environment of its own, since what it needs does not fit beside
what Plato needs. It checks signatures with botocore, and keeps everything in memory: a restart forgets it.

The environment is made once, outside of the checkout, from requirements.lock; `missing` says why that cannot be.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

HERE: Final = Path(__file__).resolve().parent
LOCK: Final = HERE / "requirements.lock"
START_S: Final = 60.0
_POLICY: Final = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"*"}]}'
_OPEN_ACTIONS: Final = 4
"""Requests that need no signature, after a start: those of `_prepare`."""


class ServerError(Exception):
    """The server cannot be had or does not start: one line."""


def environment() -> Path:
    """The Python that has it, made first where it is not there. Raises ServerError."""
    cache = Path(os.environ.get("PLATO_CACHE") or "~/.cache/plato").expanduser() / "s3"
    key = hashlib.sha256(LOCK.read_bytes() + sys.version.encode()).hexdigest()[:16]
    place = cache / key
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "done").exists():
            shutil.rmtree(place, ignore_errors=True)
            pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            for command in (
                [sys.executable, "-m", "venv", str(place)],
                [*pip, "--require-hashes", "--only-binary", ":all:", "-r", str(LOCK)],
            ):
                run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
                if run.returncode != 0:
                    said = (run.stderr.strip() or run.stdout.strip() or f"code {run.returncode}").splitlines()[-1]
                    raise ServerError(f"no S3 server can be had here: {said}")
            (place / "done").touch()
    return place / "bin" / "python"


class S3Server:
    """A server with one bucket, on loopback. access_key and secret_key are new after each start."""

    def __init__(self, port: int, log: Path, bucket: str = "files", *, checked: bool = True) -> None:
        """checked False: any keys will do, so that they are good after a restart."""
        self.port = port
        self.url = f"http://127.0.0.1:{port}/{bucket}"
        self.access_key = self.secret_key = ""
        self._bucket = bucket
        self._log = log
        self._checked = checked
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it and makes the bucket. Raises ServerError."""
        python = environment()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": str(_OPEN_ACTIONS if self._checked else 1 << 30)},
            )
        deadline = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/moto-api/", timeout=5).close()
                break
            except (urllib.error.URLError, OSError) as e:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise ServerError(f"the S3 server does not start; see {self._log}") from e
                time.sleep(0.1)
        self._prepare()

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _prepare(self) -> None:
        self._iam("CreateUser")
        keys = self._iam("CreateAccessKey")
        self.access_key = re.findall("<AccessKeyId>(.*?)</AccessKeyId>", keys)[0]
        self.secret_key = re.findall("<SecretAccessKey>(.*?)</SecretAccessKey>", keys)[0]
        self._iam("PutUserPolicy", PolicyName="all", PolicyDocument=_POLICY)
        self._send(urllib.request.Request(self.url, method="PUT", data=b""))

    def _iam(self, action: str, **values: str) -> str:
        form = urlencode({"Action": action, "Version": "2010-05-08", "UserName": "plato", **values}).encode()
        headers = {
            "Content-Type": "application/x-www-form-urlencoded",
            # The scope says which service is meant; the signature is not looked at yet.
            "Authorization": "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/iam/aws4_request,"
            " SignedHeaders=host, Signature=0",
        }
        return self._send(urllib.request.Request(f"http://127.0.0.1:{self.port}/", data=form, headers=headers))

    @staticmethod
    def _send(request: urllib.request.Request) -> str:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as e:
            raise ServerError(f"the S3 server refuses to be set up: {e.code} {e.read()[:300]!r}") from e
