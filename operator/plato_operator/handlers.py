"""kopf's part: it watches what a cluster consists of, and each event rings for the cluster. Nothing else is decided here.

kopf runs in a thread and loop of its own: it takes over the signals of a main thread and cancels every task of its loop at
its end. Raw event handlers only: kopf then writes nothing (no finalizers, no annotations, no events, no peering). A watch
that hears nothing for INACTIVE_S is opened again; one that may not be opened, or whose stream is garbage, ends kopf, and
with it the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import kopf
from plato.api.names import GROUP, LABEL_CLUSTER, VERSION
from plato.runtime import logs

from plato_operator import reading
from plato_operator.kube import Kube, KubeError, Refused

SERVER_TIMEOUT_S: Final = 50
"""A whole number: the API server refuses others."""
INACTIVE_S: Final = 70.0
CONNECT_S: Final = 5.0
REQUEST_S: Final = 20.0
JOIN_S: Final = 2.0
LOOK_S: Final = 10.0
"""How often several namespaces are asked whether they still let us look."""
RECONNECT_S: Final = 1.0
RETRIES_S: Final = (1.0, 2.0, 4.0)
"""kopf's own are minutes, also while it ends: a dead watch would go unnoticed for so long."""

Ring = Callable[[str, str], None]
"""Looks at the cluster (namespace, name) soon; empty texts mean all of them."""

_OWN: Final = (("PlatoCluster", "platoclusters"), ("GatewayPool", "gatewaypools"), ("StateShard", "stateshards"))
_CHILDREN: Final = (
    ("", "v1", "pods"), ("", "v1", "configmaps"), ("", "v1", "services"), ("apps", "v1", "statefulsets"),
    ("apps", "v1", "deployments"), ("batch", "v1", "jobs"),
)  # fmt: skip

_log = logs.get("watch")


class WatchEnded(Exception):
    """kopf ended though nobody asked it to."""


def registry(ring: Ring, *, nodes: bool) -> kopf.OperatorRegistry:
    """The handlers of everything that is watched."""
    found = kopf.OperatorRegistry()

    async def login(**kwargs: Any) -> Any:
        return kopf.login_via_client(**kwargs)

    kopf.on.login(registry=found)(login)
    for kind, plural in _OWN:
        kopf.on.event(GROUP, VERSION, plural, registry=found)(_handler(kind, ring))
    for group, version, plural in _CHILDREN:
        kopf.on.event(group, version, plural, registry=found)(_handler(plural, ring))
    if nodes:
        kopf.on.event("", "v1", "nodes", registry=found)(_nodes(ring))
    return found


def _handler(kind: str, ring: Ring) -> Any:
    async def event(body: Any, **_: Any) -> None:
        name = reading.named(kind, body)
        if name:
            ring(reading.meta(body)["namespace"], name)

    return event


def _nodes(ring: Ring) -> Any:
    """Rings for what the planner looks at; the heartbeats of many nodes would ring all the time."""
    seen: dict[str, object] = {}

    async def event(body: Any, type: str | None, **_: Any) -> None:
        name = reading.meta(body)["name"]
        if type == "DELETED":
            seen.pop(name, None)
            ring("", "")
            return
        now = (reading.node(body), reading.addresses({name: body}), dict(reading.notes(body)))
        if seen.get(name) != now:
            seen[name] = now
            ring("", "")

    return event


def settings() -> kopf.OperatorSettings:
    """kopf's settings: silent, never writing, with watches that end."""
    found = kopf.OperatorSettings()
    found.posting.enabled = False
    found.scanning.disabled = True
    found.watching.server_timeout = SERVER_TIMEOUT_S
    found.watching.client_timeout = SERVER_TIMEOUT_S + 10
    found.watching.inactivity_timeout = INACTIVE_S
    found.watching.connect_timeout = CONNECT_S
    found.watching.reconnect_backoff = RECONNECT_S
    found.networking.request_timeout = REQUEST_S
    found.networking.error_backoffs = RETRIES_S
    for group, version, plural in _CHILDREN:
        found.watching.label_selectors[group, version, plural] = LABEL_CLUSTER
    return found


async def follow(kube: Kube, namespaces: Sequence[str], ring: Ring, *, nodes: bool) -> None:
    """Watches until it is cancelled; of several namespaces those that let us list their PlatoClusters. One that was deleted
    took our role with it, and must not end the watches of the others; one that is back is watched again. Raises WatchEnded
    when what ended has another reason, or nothing is left to watch."""
    watched = await _open(kube, namespaces, ()) or tuple(namespaces)
    while True:
        running = asyncio.create_task(watch(watched, ring, nodes=nodes), name="kopf")
        try:
            now = watched
            while now == watched and not running.done():
                await asyncio.wait([running], timeout=LOOK_S)
                if len(namespaces) > 1:
                    now = await _open(kube, namespaces, watched) or watched
            if now == watched:
                await running
        finally:
            running.cancel()
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # asked for, whether it is raised or not
        _log.warning("watches other namespaces from now on", namespaces=list(now), before=list(watched))
        watched = now
        ring("", "")  # what happened meanwhile rang for nobody


async def _open(kube: Kube, namespaces: Sequence[str], before: Sequence[str]) -> tuple[str, ...]:
    """The namespaces whose PlatoClusters we may list; where that is not known, as it was before."""
    found = []
    for namespace in namespaces:
        try:
            await kube.list("PlatoCluster", "" if namespace == "*" else namespace)
            known = True
        except KubeError as e:
            forbidden = isinstance(e, Refused) and e.status == 403
            known = not forbidden and (not before or namespace in before)
        if known:
            found.append(namespace)
    return tuple(found)


async def watch(namespaces: Sequence[str], ring: Ring, *, nodes: bool) -> None:
    """Watches until it is cancelled. Raises WatchEnded, from kopf's error."""
    ours, ended = asyncio.get_running_loop(), asyncio.Event()
    errors: list[BaseException] = []
    stop: list[Callable[[], object]] = []
    logging.getLogger("kopf._core.reactor.running").setLevel(
        logging.ERROR
    )  # it warns that signals are not its own here

    def rung(namespace: str, name: str) -> None:
        _tell(ours, lambda: ring(namespace, name))

    async def serve() -> None:
        theirs, stopped = asyncio.get_running_loop(), asyncio.Event()
        stop.append(lambda: _tell(theirs, stopped.set))
        everywhere = "*" in namespaces
        tasks = await kopf.spawn_tasks(
            registry=registry(rung, nodes=nodes), settings=settings(), standalone=True, clusterwide=everywhere,
            namespaces=() if everywhere else tuple(namespaces),
        )  # fmt: skip
        # kopf's own way to end waits for tasks that wait for others which ended before: it never comes to its end.
        waiter = asyncio.create_task(stopped.wait())
        done, _ = await asyncio.wait([waiter, *tasks], return_when=asyncio.FIRST_COMPLETED)
        errors.extend(e for task in done - {waiter} if not task.cancelled() and (e := task.exception()) is not None)
        _tell(ours, ended.set)

    def work() -> None:
        try:
            asyncio.run(serve())
        except Exception as e:
            errors.append(e)
        finally:
            _tell(ours, ended.set)

    thread = threading.Thread(target=work, name="kopf", daemon=True)
    thread.start()
    try:
        await ended.wait()
    finally:
        for call in stop:
            call()
        await asyncio.to_thread(thread.join, JOIN_S)
    raise WatchEnded(str(errors[0]) if errors else "kopf ended") from (errors[0] if errors else None)


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Calls in another thread's loop; not at all if that is closed, since then its side ends."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
