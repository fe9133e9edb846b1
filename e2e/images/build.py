"""Building by buildah, into one OCI folder.

The context is copied before it is built, from the very bytes that were hashed: an edit meanwhile belongs to the next
build. A layer lies in the OCI folder once, however many images have it. Buildah's own storage keeps the steps of the
last builds, so that changed sources install no package again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from e2e.images import base
from e2e.images.recipes import Recipe, hash_of
from e2e.testbed.layout import Layout, TestbedError
from e2e.testbed.processes import run

KEPT: Final = 4
"""Builds of an image that stay in the OCI folder."""
STAGES: Final = 40
"""Last steps of stages that stay in buildah's storage, with the steps below them."""
CA_BUNDLE: Final = Path("/etc/ssl/certs/ca-certificates.crt")
_LOCAL: Final = "localhost/plato-build"


@dataclass(frozen=True)
class Store:
    """The cache folder of the images."""

    cache: Path

    @classmethod
    def of(cls, layout: Layout) -> Store:
        """Beside the testbed's binaries."""
        return cls(layout.cache.parent / "images")

    @property
    def oci(self) -> Path:
        """The OCI image layout that holds every built image."""
        return self.cache / "oci"

    def blob(self, digest: str) -> Path:
        """The file of `sha256:…`."""
        return self.oci / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def json(self, digest: str) -> dict[str, Any]:
        """The manifest or configuration of that digest."""
        parsed: dict[str, Any] = json.loads(self.blob(digest).read_bytes())
        return parsed

    def blobs(self, manifest: str) -> list[str]:
        """Digests of all that an image consists of, its manifest included."""
        parsed = self.json(manifest)
        return [manifest, parsed["config"]["digest"], *(layer["digest"] for layer in parsed["layers"])]

    def provide(self, recipe: Recipe) -> str:
        """The digest of the image's manifest, built first if its sources changed; raises TestbedError."""
        files = recipe.files()
        name = f"{recipe.service}-{hash_of(files, base.key())}"
        with self._alone():
            found = self._index().get(name)
            if found is None:
                self._build(recipe, name, files)
                found = self._index()[name]
            (self.cache / "used" / name).touch()
            self._forget(recipe.service)
        return found

    # ── the OCI folder ───────────────────────────────────────────────────────────────────────────────────────

    def _index(self) -> dict[str, str]:
        """{name: digest of its manifest}."""
        file = self.oci / "index.json"
        if not file.exists():
            return {}
        manifests = json.loads(file.read_bytes())["manifests"]
        return {each["annotations"]["org.opencontainers.image.ref.name"]: each["digest"] for each in manifests}

    def _forget(self, service: str) -> None:
        """Keep the newest builds; then only the blobs that some image names."""
        used = sorted((self.cache / "used").glob(f"{service}-*"), key=lambda file: file.stat().st_mtime, reverse=True)
        old = {file.name for file in used[KEPT:]}
        if not old:
            return
        file = self.oci / "index.json"
        index = json.loads(file.read_bytes())
        index["manifests"] = [
            each for each in index["manifests"] if each["annotations"]["org.opencontainers.image.ref.name"] not in old
        ]
        new = file.with_suffix(".new")
        new.write_text(json.dumps(index))
        new.rename(file)
        named = {digest for each in index["manifests"] for digest in self.blobs(each["digest"])}
        for blob in (self.oci / "blobs" / "sha256").iterdir():
            if f"sha256:{blob.name}" not in named:
                blob.unlink()
        for name in old:
            (self.cache / "used" / name).unlink()
            self._buildah("rmi", f"{_LOCAL}:{name}", quiet=True)  # it may have gone with an older storage
        # Newest first. What others are built on is refused, and stays.
        stages = self._buildah("images", "--filter", "dangling=true", "--quiet", "--no-trunc").split()
        for stage in stages[STAGES:]:
            self._buildah("rmi", stage, quiet=True)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One build at a time on this machine."""
        (self.cache / "used").mkdir(parents=True, exist_ok=True)
        with (self.cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # ── buildah ──────────────────────────────────────────────────────────────────────────────────────────────

    def _buildah(self, *words: str | Path, quiet: bool = False) -> str:
        if shutil.which("buildah") is None:
            raise TestbedError("there is no buildah; `make testbed-up` installs it (Debian: apt-get install buildah)")
        places: list[str | Path] = [
            "--root",
            self.cache / "storage",
            "--runroot",
            self.cache / "run",
            "--storage-driver",
            "overlay",
        ]
        return run(["buildah", *places, *words], quiet=quiet)

    def _build(self, recipe: Recipe, name: str, files: dict[str, bytes]) -> None:
        if os.geteuid() != 0:
            raise TestbedError("the images are built as root, as the testbed runs: use sudo")
        began = time.monotonic()
        print(f"{recipe.service}: building …", flush=True)
        self._buildah("rm", "--all")  # what a killed build left, and its context
        for left in self.cache.glob("context-*"):
            shutil.rmtree(left)
        runs, builds = self._bases()
        with tempfile.TemporaryDirectory(dir=self.cache, prefix="context-") as temporary:
            context = Path(temporary, "context")
            _write(context, files)
            words: list[str | Path] = ["bud", "--quiet", "--layers", "--isolation", "chroot", "--network", "host"]
            words += ["--build-arg", f"BASE={runs}", "--build-arg", f"BUILD_BASE={builds}", "--pull-never"]
            words += _secrets(Path(temporary))
            words += ["--tag", f"{_LOCAL}:{name}", "--file", context / recipe.folder / "Dockerfile", context]
            self._buildah(*words)
        self._buildah("push", "--quiet", f"{_LOCAL}:{name}", f"oci:{self.oci}:{name}")
        size = sum(self.blob(digest).stat().st_size for digest in self.blobs(self._index()[name]))
        print(f"{recipe.service}: built in {time.monotonic() - began:.0f} s, {size >> 20} MB", flush=True)

    def _bases(self) -> tuple[str, str]:
        """References in buildah's storage of the bases to run and to build in."""
        names = f"{_LOCAL}:base-{base.key()}", f"{_LOCAL}:build-base-{base.key()}"
        there = self._buildah("images", "--format", "{{.Name}}:{{.Tag}}").split()
        missing = [(number, name) for number, name in enumerate(names) if name not in there]
        if missing:
            tars = base.tars(self.cache)
            for number, name in missing:
                container = self._buildah("from", "scratch").strip()
                try:
                    self._buildah("add", "--quiet", container, tars[number], "/")
                    self._buildah("config", *base.config(), container)
                    self._buildah("commit", "--quiet", container, name)
                finally:
                    self._buildah("rm", container)
        return names


def _write(context: Path, files: dict[str, bytes]) -> None:
    """Same modes and times each time, so that buildah knows an unchanged step by its content."""
    for name, content in files.items():
        path = context / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for path in context.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.utime(path, (0, 0))


def _secrets(folder: Path) -> list[str | Path]:
    """This machine's way to a package index, for RUN steps only: pip's settings and the certificates it trusts."""
    words: list[str | Path] = []
    if CA_BUNDLE.exists():
        words += ["--secret", f"id=ca,src={CA_BUNDLE}"]
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    settings: dict[str, str] = {}
    for line in told.stdout.splitlines():
        if found := re.fullmatch(r"(?:global|install|:env:)\.([\w-]+)='(.*)'", line):
            settings[found[1]] = found[2]
    if "cert" in settings:
        settings["cert"] = str(CA_BUNDLE)  # where the other secret lies in the step
    # A folder of this machine is not there in the step.
    kept = {key: value for key, value in settings.items() if key != "find-links" or "://" in value}
    config = folder / "pip.conf"
    config.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in kept.items()))
    return [*words, "--secret", f"id=pip,src={config}"]
