"""What of a change is still to come, and what of it a person holds back by the spec.

What is held back is not on its way: Reconciling is False then, with a reason that names the hold, as with spec.paused, and
as `kubectl rollout status` and kstatus call a StatefulSet done whose partition is. So a wait for it ends, which else it
never would.
"""

from __future__ import annotations

from plato.api.names import shard_name

from plato_operator.core.children import hashes, wanted
from plato_operator.core.snapshot import Pod, Pool
from plato_operator.core.work import Work, record_of


def rolling(work: Work, pool: Pool) -> bool:
    """Whether pods of the pool are on their way from one template or number to another."""
    ordered = any(not _kept_back(pool, pod) for pod in _older(work, pool))
    drains = (r.drain for pod in _of(work, pool) if (r := record_of(work, pod)) is not None)
    return ordered or any(drain is not None for drain in drains)


def behind(work: Work, pool: Pool) -> bool:
    """Whether the pool's StatefulSet is still to get the template that is asked for now. One that is refused is told
    elsewhere, and may be so for ever."""
    key = ("StatefulSet", pool.name)
    sts = work.snap.children.get(key)
    asked = next((hashes(child)[1] for child in wanted(work) if (child.kind, child.name) == key), "")
    return sts is not None and bool(asked) and asked != sts.template_hash and key not in work.snap.refusals


def of_pool(work: Work, pool: Pool) -> tuple[str, str] | None:
    """(reason, message) of what keeps pods of the pool at an older template; None: nothing does."""
    kept = sum(_kept_back(pool, pod) for pod in _older(work, pool))
    if not kept:
        return None
    rollout = pool.spec.rollout
    if rollout.paused:
        return "RolloutPaused", f"{kept} pods of {pool.name} keep an older template until spec.rollout.paused is false"
    words = f"{kept} pods of {pool.name} keep an older template since spec.rollout.partition is {rollout.partition}"
    return "Partitioned", f"{words}: lower it to go on"


def of_slots(work: Work, to_move: int) -> tuple[str, str] | None:
    """(reason, message) of slots that wait for a person; None: none, or they wait for a shard yet."""
    state = work.snap.cluster.spec.state
    names = [shard_name(work.snap.cluster.name, i) for i in range(state.shards)]
    if not to_move or not state.reshard_paused or work.topology.move is not None:
        return None
    if not all(work.shard_ready(name) for name in names):
        return None
    return "ReshardPaused", f"{to_move} slots wait for spec.state.reshardPaused to be false"


def of_cluster(work: Work, to_move: int) -> tuple[str, str] | None:
    """(reason, message) of everything that is held back, the slots first; None: nothing is."""
    pools = (of_pool(work, pool) for _, pool in sorted(work.snap.pools.items()) if not pool.deleting)
    found = [hold for hold in (of_slots(work, to_move), *pools) if hold is not None]
    return (found[0][0], "; ".join(words for _, words in found)) if found else None


def _of(work: Work, pool: Pool) -> list[Pod]:
    return [pod for pod in work.gateway_pods().values() if pod.owner == pool.name]


def _older(work: Work, pool: Pool) -> list[Pod]:
    """Pods that do not run what the StatefulSet's template says now."""
    sts = work.snap.children.get(("StatefulSet", pool.name))
    if sts is None:
        return []
    now = (sts.template_hash, sts.restarted_at)
    return [pod for pod in _of(work, pool) if (pod.template_hash, pod.restarted_at) != now]


def _kept_back(pool: Pool, pod: Pod) -> bool:
    return pool.spec.rollout.paused or pod.ordinal < pool.spec.rollout.partition
