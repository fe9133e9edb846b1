"""`python -m plato_operator`: waits for the Lease, then watches and reconciles every PlatoCluster of its namespaces."""

from __future__ import annotations

import plato.runtime.early  # isort: skip  # noqa: F401  # first, and for what its import does

import asyncio
import sys
from typing import Any

import aiohttp
from kubernetes.aio.config import ConfigException
from plato.runtime import logs
from plato.runtime.admin import HttpServer, app
from plato.runtime.process import StartError, forever, run, until_stopped
from plato.runtime.settings import OperatorSettings, Settings

from plato_operator.handlers import WatchEnded, watch
from plato_operator.kube import Kube, KubeError, Refused, credentials, own_namespace
from plato_operator.lease import Lease, LeaseLost, holder
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
    await lease.acquire()
    health.trouble("lease", "")
    try:
        async with asyncio.TaskGroup() as group:
            _spawn(group, "lease", lease.keep())
            nodes = await _reads_nodes(own.nodes, kube)
            _log.info("serves", me=lease.me, namespaces=list(namespaces), nodes=nodes)
            means = Means(kube, session, lease, health, nodes, _listed(own.node_cidrs))
            clusters = Clusters(means, namespaces)
            _spawn(group, "clusters", clusters.run())
            _spawn(group, "watch", watch(namespaces, clusters.ring, nodes=nodes))
    except* LeaseLost as lost:
        _log.error("the Lease is lost, so this process ends", why=str(lost.exceptions[0]))
    except* WatchEnded as ended:
        _log.error("a watch ended, so this process ends", why=str(ended.exceptions[0]))


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
