"""The topology in a ConfigMap of Kubernetes: the operator writes it, every pod watches that one object.

    list ─▸ record, or gone ─▸ watch from there: ADDED, MODIFIED ─▸ record · DELETED ─▸ gone · BOOKMARK ─▸ go on from it
      ▲                          │ ended by the server's timeout: watch again          410: the version is too old
      └── back-off with jitter ◂─┴ refused, cut, silent, or no JSON

A record is taken only if its epoch is greater than every one before, so a restored or older object changes nothing. The
newest one is kept in a file, and a start begins with it: an API server that is away keeps nobody from working. Token and
CA are files that the kubelet replaces; both are read again for each round. Memory: one record, one line of the watch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from plato.adapters.topology_file import write
from plato.core.errors import Unavailable
from plato.runtime import logs
from plato.runtime.settings import SettingsError
from plato.topology.record import Topology, TopologyError, loads
from plato.topology.stored import unpack

ACCOUNT_DIR: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LINE_BYTES: Final = 4 * 1024 * 1024
"""A watch's line, and a list's answer, at most: several times a record of the greatest size."""


class ApiError(Exception):
    """The API server refused, or what it said is no answer. `status`: HTTP's, or that of an ERROR event; 0: neither."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach the API server: `base` is https://host:port; the token is read for each request, the CA each round."""

    base: str
    namespace: str
    token_file: Path
    ca_file: Path | None

    @classmethod
    def in_cluster(cls, namespace: str, environ: Mapping[str, str] | None = None, folder: Path = ACCOUNT_DIR) -> Access:
        """As a pod's service account has it; namespace "": the pod's own. Raises SettingsError outside of a pod."""
        env = os.environ if environ is None else environ
        host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise SettingsError(
                "topology.config_map: is set, but this process runs in no pod: KUBERNETES_SERVICE_HOST is not set;"
                " leave it empty to read topology.path"
            )
        try:
            namespace = namespace or (folder / "namespace").read_text(encoding="utf-8").strip()
        except OSError as e:
            raise SettingsError(
                f"topology.namespace: not set, and {folder / 'namespace'} cannot be read: {e.strerror}; set it, or give the"
                " pod its service account"
            ) from e
        shown = f"[{host}]" if ":" in host else host
        return cls(f"https://{shown}:{port}", namespace, folder / "token", folder / "ca.crt")


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take. A watch ends by the server after watch_s, and by us silence_s after that; tcp_s: how long a
    connection may stay without an acknowledgement of its probes."""

    watch_s: float = 50.0
    silence_s: float = 5.0
    answer_s: float = 10.0
    backoff_min_s: float = 0.2
    backoff_max_s: float = 10.0
    tcp_s: int = 10


class KubeTopology:
    """TopologySource on a ConfigMap. `run` follows it, until cancelled."""

    def __init__(self, config_map: str, access: Access, path: Path, pace: Pace = Pace()) -> None:
        """path: where the newest record is kept."""
        self._name = config_map
        self._access = access
        self._path = path
        self._pace = pace
        self._log = logs.get("topology")
        self._topology: Topology | None = None
        self._newer = asyncio.Event()
        """Set, and replaced by a new one, when a record is taken."""
        self._gone = False
        self._trouble = f"ConfigMap {config_map} was not read yet"
        self._start()

    # ── the port ─────────────────────────────────────────────────────────────────────────────────────────────

    def current(self) -> Topology:
        """See the port."""
        if self._topology is None:
            raise Unavailable(self._trouble)
        return self._topology

    async def changed(self, after_epoch: int) -> Topology:
        """See the port."""
        while self._topology is None or self._topology.epoch <= after_epoch:
            await self._newer.wait()
        return self._topology

    @property
    def gone(self) -> bool:
        """See the port: the API server's last word was that there is no record, or that we may not see it."""
        return self._gone

    # ── following ────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Lists, watches, and begins again after whatever happens; until cancelled."""
        backoff_s = self._pace.backoff_min_s
        while True:
            begun = time.monotonic()
            try:
                await self._round()
            except ApiError as e:
                why = str(e)
                if e.status in (403, 404):
                    self._set_gone(why)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as e:
                why = f"{self._access.base}: {str(e) or type(e).__name__}"
            self._complain(why)
            if time.monotonic() - begun > self._pace.backoff_max_s:
                backoff_s = self._pace.backoff_min_s  # it worked for a while
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, self._pace.backoff_max_s)

    async def _round(self) -> None:
        """One list, and watches from there. Ends by an exception only."""
        pace = self._pace
        connector = aiohttp.TCPConnector(ssl=self._tls(), socket_factory=self._socket, limit=2)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=pace.answer_s, connect=pace.answer_s)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=LINE_BYTES) as session:
            version = await self._list(session)
            while True:
                begun = time.monotonic()
                version = await self._watch(session, version)
                if time.monotonic() - begun < 1.0:
                    raise ApiError("a watch ended at once")

    async def _list(self, session: aiohttp.ClientSession) -> str:
        """Takes what is there; returns the version to watch from."""
        async with asyncio.timeout(self._pace.answer_s), self._get(session, {}) as answer:
            body = b""
            async for part in answer.content.iter_any():
                body += part
                if len(body) > LINE_BYTES:
                    raise ApiError(f"a list of one object has more than {LINE_BYTES} bytes")
        try:
            found = json.loads(body)
            version, items = found["metadata"]["resourceVersion"], found.get("items") or []
            mine = [item for item in items if item["metadata"]["name"] == self._name]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
            raise ApiError(f"a list cannot be read: {e!r}") from e
        if mine:
            await self._take(mine[0])
        else:
            self._set_gone(f"there is no ConfigMap {self._name} in namespace {self._access.namespace}")
        return str(version)

    async def _watch(self, session: aiohttp.ClientSession, version: str) -> str:
        """Follows until the server ends it; returns the version to go on from."""
        watch_s = max(1, round(self._pace.watch_s * random.uniform(0.8, 1.2)))  # else all pods come back at once
        parameters = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(watch_s),
        }
        async with (
            asyncio.timeout(watch_s + self._pace.silence_s),
            self._get(session, parameters) as answer,
        ):
            async for line in answer.content:
                if line.strip():
                    version = await self._event(line) or version
        return version

    async def _event(self, line: bytes) -> str:
        """Does what one line of a watch says; returns the version that it names."""
        try:
            event = json.loads(line)
            kind, found = event["type"], event["object"]
            version = str((found.get("metadata") or {}).get("resourceVersion") or "")
            name = (found.get("metadata") or {}).get("name")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
            raise ApiError(f"a watch's line cannot be read: {e!r}") from e
        if kind == "ERROR":
            code = found.get("code")
            raise ApiError(f"the watch ended: {found.get('message')}", code if isinstance(code, int) else 0)
        if kind == "BOOKMARK":
            return version
        if name == self._name:
            if kind in ("ADDED", "MODIFIED"):
                await self._take(found)
            elif kind == "DELETED":
                self._set_gone(f"ConfigMap {self._name} was deleted")
        return version

    @contextlib.asynccontextmanager
    async def _get(
        self, session: aiohttp.ClientSession, parameters: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        token = self._access.token_file.read_text(encoding="utf-8").strip()
        async with (
            session.get(
                f"{self._access.base}/api/v1/namespaces/{self._access.namespace}/configmaps",
                params={"fieldSelector": f"metadata.name={self._name}", **parameters},
                headers={"Authorization": f"Bearer {token}", "Accept": "application/json"},
                allow_redirects=False,
            ) as answer,
        ):
            if answer.status != 200:
                words = (await answer.content.read(2_000)).decode(errors="replace")
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    words = str(json.loads(words)["message"])
                raise ApiError(f"{self._access.base} answers {answer.status}: {words[:300]}", answer.status)
            yield answer

    def _tls(self) -> ssl.SSLContext | bool:
        if self._access.ca_file is None:
            return True
        return ssl.create_default_context(cafile=self._access.ca_file)

    def _socket(self, address: tuple[Any, Any, int, str, Any]) -> socket.socket:
        """A connection to a machine that vanished ends after tcp_s, not with the watch."""
        family, kind, protocol, *_ = address
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, self._pace.tcp_s // 2))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, self._pace.tcp_s // 5))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._pace.tcp_s * 1_000)
        return sock

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        """Begins with what the process before us kept."""
        try:
            self._topology = loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except (OSError, TopologyError, UnicodeDecodeError) as e:
            self._log.warning("the kept record cannot be read", path=str(self._path), error=str(e))
            return
        self._log.info("begins with the kept record", epoch=self._topology.epoch)

    async def _take(self, config_map: Mapping[str, Any]) -> None:
        """Takes the record of an object that is there."""
        self._gone = False
        try:
            read = unpack(config_map)
        except TopologyError as e:
            self._complain(f"ConfigMap {self._name}: {e}")
            return
        except (AttributeError, TypeError) as e:
            self._complain(f"ConfigMap {self._name} has another form: {e!r}")
            return
        self._trouble = ""
        if self._topology is not None and read.epoch <= self._topology.epoch:
            if read.epoch < self._topology.epoch:
                self._log.warning("an older record is passed over", epoch=read.epoch, newest=self._topology.epoch)
            return
        self._topology = read
        self._newer.set()
        self._newer = asyncio.Event()
        try:
            await asyncio.to_thread(self._keep, read)
        except OSError as e:
            self._log.warning("the record could not be kept for the next start", path=str(self._path), error=str(e))

    def _keep(self, topology: Topology) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write(self._path, topology)

    def _set_gone(self, why: str) -> None:
        if not self._gone:
            self._log.warning("the record is gone; the newest one stands", reason=why)
        self._gone = True
        self._trouble = why

    def _complain(self, trouble: str) -> None:
        """Once per kind of trouble."""
        if trouble != self._trouble:
            epoch = self._topology.epoch if self._topology is not None else None
            self._log.warning("the topology is not followed now; it is tried again", reason=trouble, epoch=epoch)
        self._trouble = trouble
