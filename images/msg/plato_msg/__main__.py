"""`python -m plato_msg --settings F`: checks the database, wires the adapters, serves until a signal."""

from __future__ import annotations

import plato.runtime.early  # isort: skip  # noqa: F401  # first, and for what its import does

import asyncio
import contextlib
import sys
import time
from functools import partial

from plato.adapters import bus as buses
from plato.adapters import owner as owners
from plato.adapters.blobs import blob_store
from plato.adapters.pg import Database
from plato.adapters.shards_grpc import GrpcShards
from plato.adapters.tokens import JwtVerifier
from plato.adapters.topology import topology_source
from plato.adapters.valkey import ValkeyStore
from plato.core.codes import Code
from plato.core.errors import PeerError, Unavailable
from plato.ports import Claims, TokenVerifier
from plato.router import Router
from plato.runtime import admin, client_tls, logs, process, report, tls
from plato.runtime.settings import Settings, SettingsError
from starlette.routing import Mount
from starlette.types import ASGIApp

from plato_msg import allocators, group_http, hooks, metrics, server, webhooks
from plato_msg.api import app, auth, port, routes
from plato_msg.attachments import Attachments, Limits
from plato_msg.attachments_pg import PgAttachments
from plato_msg.conversations import Conversations
from plato_msg.core.policy import Rules
from plato_msg.devices import Devices
from plato_msg.groups import Groups
from plato_msg.operations import Operations
from plato_msg.search import Search
from plato_msg.service import MsgService, Options
from plato_msg.store_pg import PgMsgStore
from plato_msg.texts_pg import PgTexts

PIPELINE_CONNECTIONS = 4
READ_CONNECTIONS = 4
"""For what clients' frames ask, and for what HTTP writes."""
HTTP_CONNECTIONS = 3
"""For what is read by HTTP, so that lists and pages of history wait for each other and no client waits for them."""
SEARCH_CONNECTIONS = 2
TEXT_CONNECTIONS = 1
"""For searches and for their index, so that neither takes one from anybody else."""
HEAD_ROOM_BYTES = 2_048
"""What a frame keeps free for what is not the body, as the state shards have it."""
_WAIT_S = 0.5


async def main(settings: Settings) -> int:
    """Runs a msg process. Raises SettingsError for what waiting does not help."""
    log = logs.get("msg")
    if not settings.process.name or not settings.process.uid:
        raise SettingsError(
            "process.name and process.uid: must say who this process is; whoever starts it sets PLATO_PROCESS__NAME and"
            " PLATO_PROCESS__UID (plato up and the operator do)"
        )
    secret = hooks.secret(settings.msg.hook_secret_file)
    uri, schema = settings.database.uri, settings.database.schema_name
    why = ["starting"]
    checked = asyncio.Event()
    info: dict[str, str] = {}
    database = Database(uri, schema, size=PIPELINE_CONNECTIONS)
    reads = Database(uri, schema, size=READ_CONNECTIONS)
    asked = Database(uri, schema, size=HTTP_CONNECTIONS)
    searches = Database(uri, schema, size=SEARCH_CONNECTIONS)
    texts = Database(uri, schema, size=TEXT_CONNECTIONS)
    topology = topology_source(settings.topology)
    bus = buses.reader(settings, database)
    orders = buses.producer(settings, reads)
    store = await ValkeyStore.connect(settings.store.url, settings.store.key_prefix)
    own_tls = tls.internal(settings.tls.internal_dir)
    shards = GrpcShards(topology, own_tls)
    router = Router(store.routes)
    body_max_bytes = settings.gateway.max_frame_bytes - HEAD_ROOM_BYTES
    before = hooks.build(settings.msg, secret, body_max_bytes)
    service = MsgService(
        Options(
            name=settings.process.name,
            uid=settings.process.uid,
            partitions=settings.bus.partitions,
            rules=Rules(
                guests=settings.auth.guests,
                group_members=settings.msg.group_members_max,
                recall_limit_ms=1_000 * settings.msg.recall_limit_s,
                edit_limit_ms=1_000 * settings.msg.edit_limit_s,
                friends_only=settings.msg.friends_only,
            ),
            batch_records=settings.msg.batch_records,
            member_stale_ms=settings.msg.member_stale_ms,
            bus_retention_s=settings.msg.bus_retention_s,
            max_frame_bytes=settings.gateway.max_frame_bytes,
            hot_pulls_per_s=settings.msg.hot_pulls_per_s,
            read_calm_ms=settings.msg.read_calm_ms,
            push_members_max=settings.msg.push_members_max,
            notify_window_ms=settings.msg.notify_window_ms,
            notify_window_max_ms=settings.msg.notify_window_max_ms,
            message_retention_days=settings.msg.message_retention_days,
            events_retention_s=3_600 * settings.msg.events_retention_h if settings.msg.keeps_events else 0,
        ),
        topology,
        bus,
        database,
        reads,
        router,
        shards,
        store.reservations,
        allocators.choose(settings.msg.allocator, PgMsgStore(database), store.counters),
        before,
        texts if settings.msg.search else None,
        asked,
    )
    told = webhooks.build(settings.msg, secret, service, reads, router)
    groups = Groups(orders, PgMsgStore(reads))
    blobs = blob_store(settings.attachments)
    files = Attachments(PgAttachments(asked), blobs, Limits.of(settings.attachments))

    def not_ready() -> str:
        return why[0] or service.not_ready()

    def not_serving() -> str:
        # Reads are answered though nothing can be written, so the gRPC port goes by the first alone.
        return not_ready() or service.owners.not_serving() or service.stopped()

    verifier, no_keys = _verifier(settings)
    door = auth.Door(
        verifier,
        settings.msg.api_user_per_s,
        settings.msg.api_server_per_s,
        lambda: time.monotonic() * 1_000,
    )
    parts = routes.Parts(
        pulls=service.http_reads,
        states=service.states,
        operations=Operations(orders, PgMsgStore(reads)),
        conversations=Conversations(PgMsgStore(asked)),
        devices=Devices(asked, router, store.sessions, shards, topology),
        friends=service.friends,
        attachments=files,
        search=Search(PgTexts(searches), within_ms=settings.msg.search_ms) if settings.msg.search else None,
        feed=service.feed if settings.msg.events else None,
        body_max_bytes=body_max_bytes,
    )
    api = app.application(door, routes.routers(parts), not_ready, settings.msg.http_origins)
    own_port = _own_port(settings, api)
    http = admin.HttpServer(
        admin.app(
            not_serving,
            [
                report.route(settings, service.report),
                *group_http.routes(settings, groups, lambda: why[0]),
                *([] if own_port is not None else [Mount("", api)]),
            ],
            # No reason to be unready: without the bus nothing new is stored, but people read what is.
            info=lambda: {**info, **buses.away(bus)},
        ),
        settings.msg.http_host,
        settings.msg.http_port,
        own_tls.serve() if own_tls is not None else None,
    )
    await _open("http", settings.msg.http_host, settings.msg.http_port, http)
    if own_port is not None:
        await _open("api", settings.msg.api_host, settings.msg.api_port, own_port)
    grpc, _ = await server.start(
        server.MsgServicer(service.reads, service.states, not_ready), settings.msg.host, settings.msg.grpc_port, own_tls
    )

    async def serve() -> None:
        await _wait_for_dependencies(settings, store, why, info)
        checked.set()
        if no_keys:
            log.warning("the HTTP API refuses every token until the next start", reason=no_keys)
        await told.begin()
        await service.run()

    async def sweep() -> None:
        await checked.wait()  # until then the database may be another cluster's
        await files.run()

    try:
        tasks = {"topology": topology.run(), "msg": serve(), "attachments": sweep(), "hooks": told.run()}
        settle = None
        if own_port is not None:
            tasks["api"] = own_port.run()
            settle = partial(own_port.settle, settings.msg.api_settle_ms / 1_000)
        code = await process.until_stopped(
            [asyncio.create_task(process.forever(name, part), name=name) for name, part in tasks.items()], settle
        )
    finally:
        await service.leave()
        await grpc.stop(server.STOP_GRACE_S)
        if service.feed is not None:
            service.feed.close()
        if own_port is not None:
            await own_port.stop()
        await http.stop()
        await told.close()
        if before is not None:
            await before.close()
        await shards.close()
        await bus.close()
        await orders.close()
        await database.close()
        for pool in (reads, asked, searches, texts):
            await pool.close()
        if blobs is not None:
            await blobs.close()
        with contextlib.suppress(Unavailable):
            await store.close()
    log.info("stopped", code=code)
    return code


def _own_port(settings: Settings, api: ASGIApp) -> port.ApiPort | None:
    """The API's own port; None: it is on the HTTP port. Raises StartError."""
    own = settings.msg
    if not own.api_port:
        return None
    bounds = port.Bounds(own.api_connections, own.api_head_ms / 1_000, own.api_body_ms / 1_000)
    certificates = client_tls.newest(settings.tls.client_dir)
    return port.ApiPort(api, own.api_host, own.api_port, bounds, certificates, own.http_origins)


async def _open(key: str, host: str, number: int, server: admin.HttpServer | port.ApiPort) -> None:
    """Raises SettingsError."""
    try:
        await server.start()
    except OSError as e:
        raise SettingsError(
            f"msg.{key}_port: {number} cannot be used on {host}: {e.strerror}; free it or choose another one"
        ) from e


async def _wait_for_dependencies(settings: Settings, store: ValkeyStore, why: list[str], info: dict[str, str]) -> None:
    """Checks what we depend on and waits for what is away; raises SettingsError for what waiting does not help;
    NotAlone where one of them is another PlatoCluster's, before anything is written there."""
    log = logs.get("msg")
    own = owners.of_environment()
    while True:
        try:
            found = await buses.check(settings, own)
            durability = found.durability
            await store.check(own)
            break
        except Unavailable as e:
            if why[0] != str(e):
                log.warning("waits", reason=str(e))
            why[0] = str(e)
            await asyncio.sleep(_WAIT_S)
    for level in ("none", "process", "node"):
        metrics.DURABILITY.labels(level).set(level == durability.level)
    info["durability"] = durability.promise
    (log.info if durability.level == "node" else log.warning)(durability.promise, durability=durability.level)
    for warning in found.warnings:
        log.warning(warning)
    why[0] = ""


class _NoKeys:
    """Knows no token."""

    def verify(self, token: str) -> str:
        """See the port."""
        return self.claims(token).user

    def claims(self, token: str) -> Claims:
        """See the port."""
        raise PeerError(Code.TOKEN_INVALID, "this server has no keys")


def _verifier(settings: Settings) -> tuple[TokenVerifier, str]:
    """Who knows tokens, and why he knows none. Without keys nobody can ask here; messages are stored all the same."""
    try:
        return JwtVerifier(settings.auth.keys_dir, settings.auth.issuer, settings.auth.audience), ""
    except SettingsError as e:
        return _NoKeys(), str(e)


if __name__ == "__main__":
    sys.exit(process.run("plato-msg", main))
