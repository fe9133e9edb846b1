"""The supervisor of the embedded cluster: starts everything in order, keeps it alive, stops it in order.

Start: folder and ports are looked at before anything begins, then PostgreSQL and Valkey, the schema, the topology record,
then every service at once. Stop: ipconfig and gateways (clients are told), state (releases its slots), msg, the servers.
All of it hangs on this one process: its children ask the kernel to end with it, so kill -9 leaves no orphans.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from plato import __version__
from plato.core.errors import Unavailable
from plato.local import database, logs, specs, tokens, web
from plato.local.bus_watch import BusWatch
from plato.local.control import ControlServer
from plato.local.deaths import Deaths
from plato.local.folder import DataFolder, LocalError, data_dir
from plato.local.keeper import Keeper, ServerKeeper, ServiceKeeper
from plato.local.pods import PodWatch
from plato.local.ports import PortUse, check_free, plan
from plato.local.registry import Registry, parse_slots
from plato.local.servers import PostgresServer, Server, ServerError, ValkeyServer
from plato.local.specs import Spec
from plato.runtime.admin import HttpServer
from plato.runtime.settings import Settings, SettingsError

_READY_TIMEOUT_S: Final = 60.0
_STATUS_EVERY_S: Final = 1.0
_BUS_WAIT_S: Final = 30.0
"""A Kafka that is starting beside us is waited for; one that is not there is said."""
_STOP_ORDER: Final = (("ipconfig", "gateway"), ("state",), ("msg",), ("valkey", "postgres"))
_STOP_TIMEOUT_S: Final = 5.0
_MOST_FILES: Final = 1_048_576

Say = Callable[[str], None]


async def _all_started(*servers: Server) -> None:
    """Starts them side by side. Raises the first fault once all are through, so that no start runs on unseen."""
    results = await asyncio.gather(*(server.start() for server in servers), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _allow_many_files() -> None:
    """Raises our limit of open files, and so our children's, as far as it goes: a gateway holds a descriptor per client."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Supervisor:
    """One embedded cluster in one data folder."""

    def __init__(self, settings: Settings, say: Say, how_to_chat: Callable[[], str]) -> None:
        """say: prints one line of progress. how_to_chat: the text shown once everything serves."""
        self._settings = settings
        self._print = say
        self._how_to_chat = how_to_chat
        self._folder = DataFolder(data_dir(settings))
        self._keepers: dict[str, Keeper] = {}
        self._pods: list[PodWatch] = []
        self._ports: dict[str, PortUse] = {}
        self._registry: Registry | None = None
        self._web: HttpServer | None = None
        self._phase = "starting"
        self._durability = "not known yet"
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._deaths = Deaths()
        self._status_fails = False
        self._bus = BusWatch()

    async def run(self) -> int:
        """Runs until a signal or `plato down`. Returns the exit code. Raises LocalError or ServerError at a start that
        cannot work."""
        self._catch_signals()
        _allow_many_files()
        self._ports = plan(self._settings)
        cluster_uid = self._folder.prepare()
        with self._folder.locked():
            check_free(self._ports.values())
            control = ControlServer(self._folder.control, self._command)
            await control.start()
            status = asyncio.create_task(self._keep_status())
            try:
                await self._start(cluster_uid)
                await self._stop.wait()
            finally:
                self._phase = "stopping"
                await self._end()
                status.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await status
                await control.stop()
                self._folder.status.unlink(missing_ok=True)
        return 0

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _start(self, cluster_uid: str) -> None:
        settings, folder, ports = self._settings, self._folder, self._ports
        self._say(f"Plato {__version__}; data in {folder.root}")
        if overruled := specs.overruled(settings):
            self._say(
                f"  not used here: {', '.join(overruled)}; the embedded cluster decides that itself "
                "(its own PostgreSQL and Valkey, its own folders)"
            )
        postgres = PostgresServer(folder.postgres, ports["postgres"].port, log=folder.logs / "postgres.log")
        valkey = ValkeyServer(folder.valkey, ports["valkey"].port, log=folder.logs / "valkey.log")
        keepers = [ServerKeeper(server, self._say, self._mark, self._died) for server in (postgres, valkey)]
        for keeper in keepers:
            self._keepers[keeper.name] = keeper
            logs.rotate(keeper.server.log)
        late = asyncio.get_running_loop().call_later(_READY_TIMEOUT_S, self._say_late, (postgres, valkey))
        try:
            if await self._or_stop(_all_started(postgres, valkey)):
                return
        finally:
            late.cancel()
        for keeper in keepers:
            keeper.child = keeper.server.child
            keeper.begin()
        self._say(f"  PostgreSQL on port {postgres.port}, Valkey on port {valkey.port}")
        uri = await database.prepare(postgres, folder)
        version = await database.migrate(uri, settings.database.schema_name, settings.bus.partitions)
        tokens.ensure_key(folder)
        base = specs.effective(settings, folder, uri, valkey.url)
        if await self._or_stop(self._ask_bus(base)):
            return
        self._say(f"  database schema {version}; {self._durability}")
        registry = self._registry = Registry(folder.topology, cluster_uid, settings, ports)
        self._begin_services(specs.write_all(base, folder, ports), registry)
        local = settings.local
        if local.web_port:
            try:
                application = web.application(base, folder, ports)
            except LocalError as e:
                self._say(f"  no chat page: {e}")
            else:
                self._web = HttpServer(application, ports["web"].host, ports["web"].port, proxies=False)
                await self._web.start()
        self._say(f"  starting {local.shards} state, {local.gateways} gateway, {local.msgs} msg, ipconfig …")
        await self._until_ready()

    async def _ask_bus(self, settings: Settings) -> None:
        try:
            if stands := await database.prepare_bus(settings, _BUS_WAIT_S, lambda line: self._say(f"  {line}")):
                self._say(f"  {stands}")
        except (SettingsError, Unavailable) as e:
            raise LocalError(str(e)) from e
        self._durability = await database.durability(settings)

    def _say_late(self, servers: tuple[Server, ...]) -> None:
        for server in servers:
            last = (server.child.output() if server.child is not None else "").strip().splitlines()[-1:]
            self._say(f"  waiting for {server.name} since {_READY_TIMEOUT_S:.0f} s; it says last: {' '.join(last)}")

    def _begin_services(self, found: list[Spec], registry: Registry) -> None:
        uids = registry.renew([spec.name for spec in found])
        for spec in found:
            keeper = ServiceKeeper(spec, registry, self._say, self._mark, self._died)
            keeper.name_first(uids[spec.name])
            self._keepers[spec.name] = keeper
            if spec.pids is not None:
                self._pods.append(PodWatch(spec.name, spec.pids, self._died, self._say))
            keeper.begin()

    async def _or_stop(self, coroutine: Coroutine[Any, Any, None]) -> bool:
        """Waits for it or for the order to stop; returns whether the order came. Raises what it raises."""
        work = asyncio.create_task(coroutine)
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError, ServerError, LocalError):
                    await work
        finally:
            stop.cancel()
        return self._stop.is_set()

    async def _until_ready(self) -> None:
        """Waits until everything serves, then says how to chat. Says after 60 s what does not serve and why, and goes on."""
        loop = asyncio.get_running_loop()
        begun, told = loop.time(), False
        while not self._stop.is_set():
            missing = [k for k in self._keepers.values() if k.wanted and not k.ready]
            if not missing:
                self._phase = "up"
                self._mark()
                self._say(f"  everything serves after {loop.time() - begun:.1f} s")
                self._say(self._how_to_chat())
                return
            if not told and loop.time() - begun > _READY_TIMEOUT_S:
                told = True
                for keeper in missing:
                    log = self._folder.logs / f"{keeper.name}.log"
                    self._say(f"  {keeper.name} does not serve after {_READY_TIMEOUT_S:.0f} s: {keeper.why}; see {log}")
            await asyncio.sleep(0.05)

    # ── while it runs ────────────────────────────────────────────────────────────────────────────────────────

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
                loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            # A second Ctrl-C: leave now; the kernel ends the children, whose data stand as after kill -9.
            self._folder.status.unlink(missing_ok=True)
            sys.stdout.flush()
            os._exit(130)
        self._say("stopping; the data stay")
        self._stop.set()

    def _command(self, command: str, target: str) -> list[str]:
        if command == "down":
            if not self._stop.is_set():
                self._say("stopping, as `plato down` asked; the data stay")
            self._stop.set()
            return []
        if command == "move":
            return self._move(target)
        if command in ("drain", "undrain"):
            return self._drain(command, target)
        if command not in ("stop", "start"):
            raise LocalError(f"{command} is no command; known: stop, start, move, drain, undrain, down")
        found = [k for k in self._keepers.values() if target in (k.name, k.kind)]
        if not found:
            if target in ("worker", "link", "poller") or any(target.startswith(f"{pod.name}/") for pod in self._pods):
                raise LocalError(f"{target} belongs to a gateway: {command} the gateway (edge-0, edge-1, … or gateway)")
            known = ", ".join(dict.fromkeys([*sorted({k.kind for k in self._keepers.values()}), *self._keepers]))
            raise LocalError(f"{target or 'nothing'} is not known here; known: {known}")
        for keeper in found:
            if command == "stop":
                keeper.pause()
            else:
                keeper.begin()
        self._say(f"{command}: {', '.join(k.name for k in found)}")
        return [k.name for k in found]

    def _move(self, order: str) -> list[str]:
        slots, _, shard = order.partition(" ")
        if self._registry is None:
            raise LocalError("the topology is not written yet; try again")
        moved = self._registry.move(parse_slots(slots), shard)
        if moved:
            self._say(f"move: {len(moved)} slots to {shard}")
        return [str(slot) for slot in moved]

    def _drain(self, command: str, order: str) -> list[str]:
        name, *figures = order.split()
        if self._registry is None:
            raise LocalError("the topology is not written yet; try again")
        if command == "undrain":
            self._registry.serve(name)
            self._say(f"drain of {name}: taken back, it serves")
            return [name]
        pace_per_s, settle_s, deadline_s = map(int, figures)
        self._registry.drain(name, pace_per_s, settle_s, deadline_s)
        self._say(
            f"drain of {name}: {pace_per_s} clients a second go to the other gateways, for at most {deadline_s} s"
        )
        return [name]

    def _mark(self) -> None:
        self._changed.set()

    def _died(self, name: str, how: str) -> None:
        if not self._stop.is_set() and (line := self._deaths.told(name, how, asyncio.get_running_loop().time())):
            self._say(line)

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a closed terminal or pipe must not end the cluster
            self._print(line)

    async def _keep_status(self) -> None:
        """Writes status.json at each change and each second; keeps the logs of long runs small."""
        while True:
            self._changed.clear()
            for pod in self._pods:
                pod.look()
            if not self._stop.is_set() and (
                line := self._bus.look({k.name: k.bus for k in self._keepers.values()}, time.monotonic())
            ):
                self._say(line)
            self._write_status()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STATUS_EVERY_S / 5 if self._pods else _STATUS_EVERY_S):
                    await self._changed.wait()
            for keeper in self._keepers.values():
                logs.cut(self._folder.logs / f"{keeper.name}.log")

    def _write_status(self) -> None:
        processes: list[dict[str, Any]] = []
        for keeper in self._keepers.values():
            processes.append(
                {
                    "name": keeper.name,
                    "kind": keeper.kind,
                    "pid": keeper.pid,
                    "ready": keeper.ready,
                    "restarts": keeper.restarts,
                    "since": round(keeper.since, 3),
                    "reason": keeper.why,
                    "bus": keeper.bus,
                }
            )
            for pod in self._pods:
                if pod.name == keeper.name:
                    processes += pod.processes(keeper.ready, keeper.why, not keeper.wanted)
        status = {
            "supervisor_pid": os.getpid(),
            "version": __version__,
            "phase": self._phase,
            "data_dir": str(self._folder.root),
            "at": round(time.time(), 3),
            "ports": {use.key: use.port for use in self._ports.values()},
            "durability": self._durability,
            "processes": processes,
        }
        text = json.dumps(status, indent=1)
        new = self._folder.status.with_suffix(".new")
        try:
            new.write_text(text, encoding="utf-8")
            new.replace(self._folder.status)
            self._status_fails = False
        except OSError as e:  # a full disk must not end the cluster, nor leave a status of better times standing
            if not self._status_fails:
                self._say(f"{self._folder.status} cannot be written: {e.strerror}")
            self._status_fails = True
            with contextlib.suppress(OSError):
                new.unlink()
            with contextlib.suppress(OSError), self._folder.status.open("r+", encoding="utf-8") as old:
                old.write(text)
                old.truncate()

    # ── stop ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _end(self) -> None:
        if self._web is not None:
            await self._web.stop()
        for kinds in _STOP_ORDER:
            group = [k for k in self._keepers.values() if k.kind in kinds]
            for keeper in group:
                if isinstance(keeper, ServerKeeper):
                    keeper.child = keeper.server.child or keeper.child
            await asyncio.gather(*(keeper.end(_STOP_TIMEOUT_S) for keeper in group))
        self._say("stopped")
