"""A running embedded cluster, seen from outside its supervisor: what the commands, the tests and the bench hold in hand.

Everything is read anew from the data folder: status.json for processes, the effective settings for addresses. Orders go
through the control socket; kill goes past the supervisor, on purpose.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from plato.local import control, tokens
from plato.local.child import launch_command
from plato.local.folder import DataFolder, LocalError
from plato.local.ports import api_door, free_offset, gateway_name, msg_name, release_offset, shard_name
from plato.runtime.settings import PREFIX, Settings, load

_POLL_S = 0.02


class LocalCluster:
    """A handle. Makes no process and holds none open, unless it came from `launch`."""

    def __init__(self, data_dir: Path) -> None:
        self.folder = DataFolder(data_dir.absolute())
        self._launched: subprocess.Popen[bytes] | None = None
        self._settings: Settings | None = None
        self._offset = 0  # that nobody else takes while this one runs

    @classmethod
    def launch(
        cls,
        data_dir: Path,
        settings: Mapping[str, Any] | None = None,
        port_offset: int | None = None,
        output: Path | None = None,
    ) -> LocalCluster:
        """Spawns `plato up` and returns at once; see `wait_ready`. It stops in order when the calling thread or process
        ends, however that ends. settings: {"section.key": value}.

        port_offset: by default one that is free. output: the file that gets what the supervisor prints (default:
        <data_dir>.log, beside the folder). Raises SettingsError, LocalError.
        """
        cluster = cls(data_dir)
        if port_offset is None:
            port_offset = cluster._offset = free_offset(load(flags=settings, environ={}))
        data_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        env = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
        for key, value in {**(settings or {}), "local.data_dir": data_dir, "local.port_offset": port_offset}.items():
            env[PREFIX + key.replace(".", "__").upper()] = str(value)
        cluster.output = output or cluster.data_dir.with_name(f"{cluster.data_dir.name}.log")
        with cluster.output.open("ab") as out:
            cluster._launched = subprocess.Popen(
                launch_command([sys.executable, "-P", "-m", "plato.cli", "up"], death_signal=signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=env,
                cwd=data_dir,
                start_new_session=True,
            )
        return cluster

    output: Path
    """What a launched supervisor prints."""

    # ── what it is ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def data_dir(self) -> Path:
        """The data folder."""
        return self.folder.root

    def status(self) -> dict[str, Any]:
        """status.json. Raises LocalError when no cluster runs here."""
        status = self.folder.read_status()
        if status is None:
            if self.folder.running() is not None:
                raise LocalError(f"Plato in {self.folder.root} is just starting or stopping; try again")
            raise LocalError(f"Plato is not running in {self.folder.root}; start it with `plato up`")
        return status

    @property
    def running(self) -> bool:
        """Whether a supervisor lives here."""
        return self.folder.running() is not None

    @property
    def settings(self) -> Settings:
        """The effective settings (those of ipconfig's process). Raises LocalError before the first start."""
        if self._settings is None:
            path = self.folder.run / "plato-ipconfig-0.yaml"
            if not path.exists():
                raise LocalError(f"Plato was never up in {self.folder.root}; start it with `plato up`")
            self._settings = load(path, environ={})
        return self._settings

    def in_force(self) -> Settings:
        """The settings of the running processes: of each service the section of its first one, ports as they are.

        Raises LocalError before the first start.
        """
        found = self.settings
        for section, name in (("gateway", gateway_name(0)), ("state", shard_name(0)), ("msg", msg_name(0))):
            own = load(self.folder.run / f"{name}.yaml", environ={})
            found = found.model_copy(update={section: getattr(own, section)})
        return found

    @property
    def ports(self) -> dict[str, int]:
        """{"edge-0.tcp": 8900, …}."""
        return {str(key): int(port) for key, port in self.status()["ports"].items()}

    def gateway_addresses(self, transport: Literal["tcp", "ws"] = "tcp") -> list[str]:
        """ "host:port" of each gateway."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.gateway.host, self.settings.gateway.host)
        return [
            f"{host}:{port}" for key, port in self.ports.items() if key.startswith("edge-") and key.endswith(transport)
        ]

    @property
    def gateways(self) -> list[str]:
        """ "host:port" of each gateway's TCP listener."""
        return self.gateway_addresses("tcp")

    @property
    def ipconfig_url(self) -> str:
        """http://host:port of ipconfig."""
        return f"http://{self.settings.ipconfig.host}:{self.settings.ipconfig.port}"

    def ask_ipconfig(self, method: str, path: str, body: str = "", timeout_s: float = 10.0) -> dict[str, Any]:
        """The JSON that ipconfig's internal port answers. Raises LocalError, with its words where it refuses."""
        self.status()  # not running: says so
        own = self.settings.ipconfig
        return self._ask(f"http://{own.internal_host}:{own.internal_port}", "ipconfig", method, path, body, timeout_s)

    def ask_msg(self, method: str, path: str, body: str = "", timeout_s: float = 30.0) -> dict[str, Any]:
        """The JSON that the admin port of a msg process answers, of the first one that serves. Raises LocalError, with its
        words where it refuses."""
        msgs = [entry["name"] for entry in self.status()["processes"] if entry["name"] in self._msgs()]
        ready = [entry["name"] for entry in self.status()["processes"] if entry["ready"] and entry["name"] in msgs]
        name = (ready or msgs)[0]
        base = f"http://{self.settings.msg.http_host}:{self.ports[f'{name}.http']}"
        return self._ask(base, name, method, path, body, timeout_s)

    def _msgs(self) -> list[str]:
        return [msg_name(n) for n in range(self.settings.local.msgs)]

    def _ask(self, base: str, who: str, method: str, path: str, body: str, timeout_s: float) -> dict[str, Any]:
        url = base + path
        headers = {"Content-Type": "application/json"} if body else {}
        request = urllib.request.Request(url, body.encode() or None, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except urllib.error.HTTPError as e:
            with e:
                words = e.read().decode(errors="replace")
            with contextlib.suppress(ValueError, KeyError, TypeError):
                words = json.loads(words)["error"]
            raise LocalError(words) from e
        except (OSError, ValueError) as e:
            raise LocalError(f"{who} does not answer at {url}: {e}") from e

    @property
    def database_uri(self) -> str:
        """The cluster's database, as its processes open it."""
        return self.settings.database.uri

    @property
    def store_url(self) -> str:
        """The cluster's store, as its processes open it."""
        return self.settings.store.url

    def token(self, user: str, ttl_s: int = 3_600, scope: str = "") -> str:
        """A token for `user`, signed by the generated development key. scope: "server" for an application server."""
        return tokens.make_token(self.folder, self.settings.auth, user, ttl_s, scope)

    @property
    def api_url(self) -> str:
        """http://host:port of the HTTP API, at the first msg process; https where it shows a certificate."""
        msg = self.settings.msg
        scheme, key = api_door(self.settings, msg_name(0))
        return f"{scheme}://{msg.api_host if msg.api_port else msg.http_host}:{self.ports[key]}"

    # ── its processes ────────────────────────────────────────────────────────────────────────────────────────

    def processes(self, target: str) -> list[dict[str, Any]]:
        """Entries of status.json by name or kind."""
        return [entry for entry in self.status()["processes"] if target in (entry["name"], entry["kind"])]

    def pids(self, target: str) -> list[int]:
        """Running processes by name or kind."""
        return [int(entry["pid"]) for entry in self.processes(target) if entry["pid"] is not None]

    def kill(self, target: str, number: int = signal.SIGKILL) -> list[int]:
        """Signals every process of that name or kind; returns their pids. Raises LocalError when there is none."""
        pids = self.pids(target)
        if not pids:
            raise LocalError(f"no process {target} runs")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def stop_processes(self, target: str) -> list[str]:
        """`plato stop`: ends them and keeps them ended. Returns when they are gone."""
        names = control.send(self.folder.control, "stop", target)
        self._until(lambda: not any(self.pids(name) for name in names), 15, f"{names} did not end")
        return names

    def start_processes(self, target: str, timeout_s: float = 30.0) -> list[str]:
        """`plato start`: starts them again. Returns when they serve."""
        names = control.send(self.folder.control, "start", target)
        self._until(lambda: all(self.ready(name) for name in names), timeout_s, f"{names} do not serve")
        return names

    def move(self, slots: str, shard: str) -> list[int]:
        """`plato move`: gives slots ("0-15,20") of one shard to another. Returns those that were not there already, at once:
        the data path does the rest. Raises LocalError."""
        return [int(slot) for slot in control.send(self.folder.control, "move", f"{slots} {shard}")]

    def drain(
        self, gateway: str, *, pace_per_s: int | None = None, settle_s: int | None = None, deadline_s: int | None = None
    ) -> None:
        """`plato drain`: moves a gateway's clients to the others; by default as gateway.drain_* say. Returns at once;
        /readyz says "draining". Raises LocalError."""
        own = self.settings.gateway
        figures = (
            own.drain_pace_per_s if pace_per_s is None else pace_per_s,
            own.drain_settle_s if settle_s is None else settle_s,
            own.drain_deadline_s if deadline_s is None else deadline_s,
        )
        control.send(self.folder.control, "drain", f"{gateway} {' '.join(map(str, figures))}")

    def undrain(self, gateway: str) -> None:
        """Takes a drain back: the gateway serves again. Raises LocalError."""
        control.send(self.folder.control, "undrain", gateway)

    def ready(self, target: str = "") -> bool:
        """Whether every process of that name or kind (of all) serves."""
        status = self.status()
        entries = [e for e in status["processes"] if not target or target in (e["name"], e["kind"])]
        return bool(entries) and all(e["ready"] for e in entries) and (bool(target) or status["phase"] == "up")

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Waits until everything serves. Raises LocalError, with what does not, or with what `plato up` printed last."""

        def serving() -> bool:
            self._check_launched()
            with contextlib.suppress(LocalError):
                return self.ready()
            return False

        self._until(serving, timeout_s, "it is not up")

    def down(self, timeout_s: float = 40.0) -> None:
        """Stops the cluster in order; returns when it is gone. Nothing to do where none runs."""
        if self.running:
            control.send(self.folder.control, "down")
            self._until(lambda: not self.running, timeout_s, "the supervisor does not end")
        self.reap()

    def kill_supervisor(self) -> int:
        """kill -9 of the supervisor; returns its pid."""
        pid = self.folder.running()
        if pid is None:
            raise LocalError(f"Plato is not running in {self.folder.root}")
        os.kill(pid, signal.SIGKILL)
        self.reap()
        return pid

    def reap(self, timeout_s: float = 10.0) -> int | None:
        """Waits for the end of a launched supervisor; returns its exit code."""
        code = self._launched.wait(timeout_s) if self._launched is not None else None
        release_offset(self._offset)
        return code

    def _check_launched(self) -> None:
        if self._launched is not None and self._launched.poll() is not None:
            last = self.output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise ClusterEnded(f"plato up ended with {self._launched.returncode}: {last[-1] if last else ''}")

    def _until(self, condition: Callable[[], bool], timeout_s: float, why: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                with contextlib.suppress(LocalError):
                    late = [f"{e['name']}: {e['reason']}" for e in self.status()["processes"] if not e["ready"]]
                    why = f"{why} ({'; '.join(late)})"
                raise LocalError(f"{why} within {timeout_s:.0f} s")
            time.sleep(_POLL_S)


class ClusterEnded(Exception):
    """A launched supervisor ended while somebody waited for it."""
