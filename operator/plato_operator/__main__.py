"""`python -m plato_operator`: waits for the Lease, then watches and reconciles every PlatoCluster of its namespaces.

What acts lives for one term of the Lease. When a term lapses all of it ends, and another term begins with nothing
remembered, as another process would; only the watches, which never write, go on.
"""

from __future__ import annotations

import plato.runtime.early  # isort: skip  # noqa: F401  # first, and for what its import does

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import aiohttp
from kubernetes.aio.config import ConfigException
from plato.runtime import logs
from plato.runtime.admin import HttpServer, app
from plato.runtime.process import StartError, forever, run, until_stopped
from plato.runtime.settings import OperatorSettings, Settings

from plato_operator.handlers import WatchEnded, follow
from plato_operator.kube import Kube, KubeError, Refused, credentials, own_namespace
from plato_operator.lease import Lease, LeaseLapsed, LeaseLost, holder
from plato_operator.probes import Health
from plato_operator.reconcile import Clusters, Means

_log = logs.get("operator")


async def main(settings: Settings) -> int:
    """Runs until it is stopped, or the Lease is lost. Returns the exit code."""
    own = settings.operator
    home = own.lease_namespace or own_namespace()
    if not home:
        raise StartError("operator.lease_namespace: not in a pod, so name the namespace of the Lease")
    namespaces = _listed(own.namespaces) or (home,)
    try:
        found = await credentials()
    except (ConfigException, OSError) as e:
        raise StartError(
            f"no way to the API server: {e}; set KUBECONFIG, or run in a pod with a service account"
        ) from e
    health = Health()
    health.trouble("lease", "waiting for the Lease")
    server = HttpServer(app(health.not_ready, ill=health.ill), own.admin_host, own.port)
    try:
        await server.start()
    except OSError as e:
        raise StartError(
            f"operator.port: cannot listen on {own.admin_host}:{own.port}: {e.strerror}; set another one"
        ) from e
    kube = Kube(found)
    lease = Lease(kube, home, holder(settings.process.name, settings.process.uid))
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=128)) as session:
            work = _work(own, namespaces, kube, session, lease, health)
            return await until_stopped([asyncio.create_task(work, name="operator")])
    finally:
        if lease.valid():
            await lease.release()
        await kube.close()
        await server.stop()


async def _work(
    own: OperatorSettings, namespaces: tuple[str, ...], kube: Kube, session: aiohttp.ClientSession, lease: Lease,
    health: Health,
) -> None:  # fmt: skip
    """Everything after the start."""
    nodes = await _reads_nodes(own.nodes, kube)
    await lease.acquire()
    try:
        means = Means(kube, session, lease, health, nodes, _listed(own.node_cidrs))
        bell = Bell()
        async with asyncio.TaskGroup() as group:
            _spawn(group, "watch", follow(kube, namespaces, bell.ring, nodes=nodes))
            _spawn(group, "terms", terms(means, namespaces, bell))
    except* LeaseLost as lost:
        _log.error("the Lease is lost, so this process ends", why=_first(lost))
    except* WatchEnded as ended:
        _log.error("a watch ended, so this process ends", why=_first(ended))


class Bell:
    """What watches ring: the clusters of the present term, if there is one. Their first look needs no ring."""

    def __init__(self) -> None:
        self.clusters: Clusters | None = None

    def ring(self, namespace: str, name: str) -> None:
        """See Clusters.ring."""
        if self.clusters is not None:
            self.clusters.ring(namespace, name)


async def terms(means: Means, namespaces: Sequence[str], bell: Bell) -> None:
    """Term after term, the first one with the Lease that was acquired. Raises LeaseLost when another process has it."""
    while True:
        means.health.trouble("lease", "")
        bell.clusters = Clusters(means, namespaces)
        _log.info("serves", me=means.lease.me, namespaces=list(namespaces), nodes=means.nodes)
        try:
            async with asyncio.TaskGroup() as group:
                _spawn(group, "lease", means.lease.keep())
                _spawn(group, "clusters", bell.clusters.run())
        except* LeaseLapsed as lapsed:
            _log.warning("the Lease has lapsed: everything stops until it is ours again", why=_first(lapsed))
        finally:
            bell.clusters = None
        means.health.trouble("lease", "waiting for the Lease")
        means.lease.lapsed()
        await means.lease.acquire()


def _first(group: BaseExceptionGroup[BaseException]) -> str:
    """The words of the first error, however deep."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return str(found)


def _spawn(group: asyncio.TaskGroup, name: str, work: Any) -> None:
    group.create_task(forever(name, work), name=name)


async def _reads_nodes(said: str, kube: Kube) -> bool:
    """Whether nodes are read: as the setting says, or if the API server lets us."""
    if said != "auto":
        return said == "true"
    while True:
        try:
            await kube.call("GET", "/api/v1/nodes", params={"limit": "1"})
            return True
        except Refused as e:
            if e.status == 403:
                return False
            _log.warning("nodes: not known whether they may be read", why=str(e))
        except KubeError as e:
            _log.warning("nodes: not known whether they may be read", why=str(e))
        await asyncio.sleep(2)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


if __name__ == "__main__":
    sys.exit(run("plato-operator", main))
