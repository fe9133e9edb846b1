"""Gateways that the scheduler finds no node for: why, by its own words, and what would give them one."""

from __future__ import annotations

import re
from typing import Final

from plato_operator.core.snapshot import ENDED, Pod, Pool
from plato_operator.core.work import Work

_TAKEN: Final = re.compile(r"(\d+) node\(s\) didn't have free ports")
_LACKING: Final = re.compile(r"\d+ (?:Insufficient ([\w./-]+)|(Too many pods))")
"""The scheduler's words; it gives one reason per node."""


def unplaced(work: Work, pool: Pool, stuck: list[Pod]) -> tuple[str, str]:
    """(reason, message) of gateways without a node: what to do, then the scheduler's own words."""
    said, ports = stuck[0].unschedulable, pool.spec.ports
    told = said.partition("preemption:")[0]
    taken, lacking = sum(int(n) for n in _TAKEN.findall(told)), sorted({a or b for a, b in _LACKING.findall(told)})
    foreign = taken - len(_nodes_with(work, {ports.tcp, ports.ws, ports.admin}))
    if foreign > 0:
        reason = "PortTaken"
        words = (
            f"on {foreign} node(s) a pod that is none of these gateways has one of the ports: move it, or set others"
        )
    elif lacking:
        reason, words = "NoRoom", f"nodes lack {', '.join(lacking)}: lower spec.resources, or add nodes"
    elif taken:
        reason, words = (
            "TooFewNodes",
            "each node that could take one has its gateway: add nodes, or lower spec.replicas",
        )
    else:
        reason, words = "Unschedulable", "no node may take it: look at spec.placement and at the nodes' taints"
    text = f"{', '.join(p.name for p in stuck)}: {words}; the scheduler says: {said}"
    if pool.spec.network == "Host":
        nodes = len(work.snap.nodes) if work.snap.nodes is not None else None
        text += f" (each gateway takes ports {ports.tcp}, {ports.ws} and {ports.admin} of its node"
        text += f"; {pool.spec.replicas} are wanted on {nodes} nodes)" if nodes is not None else ")"
    return reason, text


def _nodes_with(work: Work, ports: set[int]) -> set[str]:
    """Nodes on which a gateway of this cluster has one of these ports, less those that the scheduler does not count among
    the taken ones: of one that is cordoned or away it says that, and nothing else."""
    nodes = work.snap.nodes or {}
    closed = {name for name, node in nodes.items() if node.unschedulable or node.not_ready_since_ms}
    pods = (pod for pod in work.gateway_pods().values() if pod.node and pod.phase not in ENDED)
    return {pod.node for pod in pods if (at := pod.endpoint) is not None and {at.tcp, at.ws} & ports} - closed
