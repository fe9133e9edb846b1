"""`python -m plato_state --settings F`: one state shard over Valkey, PostgreSQL and gRPC."""

from __future__ import annotations

import plato.runtime.early  # isort: skip  # noqa: F401  # first, and for what its import does

import asyncio
import sys

from plato.adapters import bus as buses
from plato.adapters import owner as owners
from plato.adapters.msg_grpc import GrpcMsgs
from plato.adapters.pg import Database
from plato.adapters.shards_grpc import GrpcShards
from plato.adapters.tokens import JwtVerifier
from plato.adapters.topology import topology_source
from plato.adapters.valkey import ValkeyStore
from plato.core.errors import Unavailable
from plato.runtime import admin, logs, process, report, tls
from plato.runtime.settings import Settings, SettingsError

from plato_state.service import Ports, StateShard

WAIT_S = 0.5
POSTGRES_CONNECTIONS = 2


async def main(settings: Settings) -> int:
    """Runs the shard until a signal or a failed part. Raises SettingsError or StartError for what waiting does not mend."""
    log = logs.get("main")
    if not settings.process.name or not settings.process.uid:
        raise SettingsError(
            "process.name and process.uid: not set; whoever starts this process sets PLATO_PROCESS__NAME and"
            " PLATO_PROCESS__UID (plato up and the operator do)"
        )
    tokens = JwtVerifier(settings.auth.keys_dir, settings.auth.issuer, settings.auth.audience)
    store = await ValkeyStore.connect(settings.store.url, settings.store.key_prefix)
    database = Database(settings.database.uri, settings.database.schema_name, size=POSTGRES_CONNECTIONS)
    topology = topology_source(settings.topology)
    own_tls = tls.internal(settings.tls.internal_dir)
    shards, msgs = GrpcShards(topology, own_tls), GrpcMsgs(topology, own_tls)
    bus = buses.producer(settings, database)
    state = StateShard(
        settings,
        Ports(
            sessions=store.sessions,
            routes=store.routes,
            reservations=store.reservations,
            bus=bus,
            tokens=tokens,
            topology=topology,
            shards=shards,
            msg=msgs,
        ),
        tls=own_tls,
    )
    info: dict[str, str] = {}
    waiting_for = ["the database and the store were not asked yet"]
    http = admin.HttpServer(
        admin.app(
            lambda: waiting_for[0] if waiting_for else state.not_ready(),
            [report.route(settings, state.report)],
            info=lambda: {**info, **buses.away(bus)},
        ),
        settings.state.admin_host,
        settings.state.admin_port,
        own_tls.serve() if own_tls is not None else None,
    )
    try:
        state.bind()
    except OSError as e:
        port = settings.state.port
        raise process.StartError(
            f"state.port: {port} cannot be used: {e.strerror or e}; end what uses it or choose another one"
        ) from e
    try:
        await http.start()
    except OSError as e:
        port = settings.state.admin_port
        raise process.StartError(
            f"state.admin_port: {port} cannot be used: {e.strerror}; end what uses it or choose another one"
        ) from e

    log.info("state starts", port=state.port, admin_port=settings.state.admin_port, uid=settings.process.uid)

    async def serve() -> None:
        await _check(settings, store, waiting_for, info)
        await state.main()

    try:
        parts = {"topology": topology.run(), "state": serve()}
        code = await process.until_stopped(
            [asyncio.create_task(process.forever(name, part), name=name) for name, part in parts.items()]
        )
    finally:
        await state.stop()
        await http.stop()
        await shards.close()
        await msgs.close()
        await store.close()
        await bus.close()
        await database.close()
    log.info("stopped", code=code)
    return code


async def _check(settings: Settings, store: ValkeyStore, waiting_for: list[str], info: dict[str, str]) -> None:
    """Waits until the store and the database answer and fit; says what an ACK promises (R11). Raises SettingsError;
    NotAlone where one of them is another PlatoCluster's, before anything is written there."""
    log = logs.get("main")
    own = owners.of_environment()
    while waiting_for:
        try:
            await store.check(own)
            found = await buses.check(settings, own)
            info["durability"] = found.durability.promise
            log.info(found.durability.promise, durability=found.durability.level)
            for warning in found.warnings:
                log.warning(warning)
            waiting_for.clear()
        except Unavailable as e:
            if waiting_for[0] != str(e):
                log.warning("a part that is needed is away", error=str(e))
            waiting_for[0] = str(e)
            await asyncio.sleep(WAIT_S)


if __name__ == "__main__":
    sys.exit(process.run("plato-state", main))
