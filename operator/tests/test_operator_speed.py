"""A pass over the largest cluster: 500 gateways, 64 shards, every slot its own range, all ids used or resting."""

from __future__ import annotations

import time
from dataclasses import replace

from plato.api.pool import GatewayPoolSpec
from plato.api.shard import StateShardSpec
from plato.api.shared import Ref
from plato.topology.record import Gateway, Msg, Rest, Shard, SlotRange, Topology
from plato.topology.stored import pack, unpack
from plato_operator.core.orders import Apply
from plato_operator.core.plan import one_pass
from plato_operator.core.snapshot import Child, Cluster, Endpoint, Node, Pod, Pool, Report, Snapshot
from plato_operator.core.snapshot import Shard as ShardResource
from world import START_MS, cluster_spec

GATEWAYS, SHARDS, WORKERS = 500, 64, 8
NAMES = [f"demo-s{i}" for i in range(SHARDS)]
ENDPOINT = Endpoint("10.0.0.1", 8900, 8901, "10.0.0.1:8909", WORKERS)


def largest(*, settled: bool) -> Snapshot:
    """A settled cluster, or one where every shard restarted, half of the gateways are new and slots have to move."""
    slots = tuple(SlotRange(s, s, NAMES[s * 7 % SHARDS], 1_000 + s) for s in range(1024))
    have = GATEWAYS if settled else GATEWAYS // 2
    homes = [tuple(NAMES[(i + k) % SHARDS] for k in range(1)) for i in range(GATEWAYS)]
    gateways = {
        f"demo-edge-{i}": Gateway(f"g{i}", i, WORKERS, homes[i], "10.0.0.1", 8900, 8901, "10.0.0.1:8909", node=f"n{i}")
        for i in range(have)
    }
    msgs = {f"demo-msg-{i}": Msg(f"m{i}", 600 + i, "10.0.0.1:8907") for i in range(2)}
    resting = {i: Rest(f"r{i}", START_MS + 10**6) for i in range(602, 1024)}
    shards = {n: Shard(f"{n}:1", f"s-{n}") for n in NAMES}
    topology = Topology("cluster-uid", 2_000, slots, shards, gateways, msgs, "op", resting)
    pods = {
        f"demo-edge-{i}": Pod(
            f"demo-edge-{i}",
            f"g{i}",
            "gateway",
            "demo-edge",
            i,
            f"n{i}",
            ip="10.0.0.1",
            ready=i < have,
            template_hash="t",
            gate=True if i < have else None,
            endpoint=ENDPOINT,
        )
        for i in range(GATEWAYS)
    } | {
        f"{n}-0": Pod(f"{n}-0", f"s-{n}", "state", n, 0, "n1", ip="10.0.0.1", ready=True, template_hash="t")
        for n in NAMES
    }
    pods |= {n: Pod(n, m.uid, "msg", ip="10.0.0.1", ready=True) for n, m in msgs.items()}
    by_shard: dict[str, list[tuple[int, int]]] = {n: [] for n in NAMES}
    for r in slots:
        by_shard[r.shard].append((r.first, r.last))
    reports = {n: Report(p.uid, 2_000, connections=40_000) for n, p in pods.items() if p.component == "gateway"}
    reports |= {f"{n}-0": Report(f"s-{n}", 2_000, acquired=tuple(by_shard[n]) if settled else ()) for n in NAMES}
    weights = [100 if settled or i % 2 else 50 for i in range(SHARDS)]
    snap = Snapshot(
        START_MS, "op", Cluster("demo", "ns", "cluster-uid", 1, cluster_spec(shards=SHARDS)),
        {"demo-edge": Pool("demo-edge", "p", 1, GatewayPoolSpec(cluster_ref=Ref("demo"), replicas=GATEWAYS))},
        {n: ShardResource(n, n, 1, StateShardSpec(Ref("demo"), w)) for n, w in zip(NAMES, weights, strict=True)},
        topology, "7", pods, {}, {f"n{i}": Node(f"n{i}") for i in range(GATEWAYS)}, reports,
    )  # fmt: skip
    orders = one_pass(snap).applies
    children = {
        (a.kind, a.name): Child(a.kind, a.name, a.name, a.input_hash, "t" if a.kind == "StatefulSet" else a.template_hash,
                                replicas=a.replicas or 0, ready=a.replicas or 0, updated=a.replicas or 0)
        for a in orders if isinstance(a, Apply)
    }  # fmt: skip
    return replace(snap, children=children)


def best_of_three(snap: Snapshot) -> float:
    took = []
    for _ in range(3):
        began = time.process_time()
        one_pass(snap)
        took.append(time.process_time() - began)
    return min(took)


def test_a_quiet_pass_over_500_gateways_takes_less_than_a_second() -> None:
    snap = largest(settled=True)
    assert best_of_three(snap) < 1.0


def test_a_busy_pass_over_500_gateways_takes_less_than_a_second() -> None:
    snap = largest(settled=False)
    plan = one_pass(snap)
    assert plan.write is not None
    written = plan.write.topology
    assert len(written.gateways) == GATEWAYS
    assert written.move is not None
    assert all(g.homes for g in written.gateways.values())
    assert best_of_three(snap) < 1.0


def test_the_largest_record_is_packed_and_read_back() -> None:
    topology = largest(settled=True).topology
    assert topology is not None
    stored = pack(topology)
    assert sum(len(v) for part in stored.values() for v in part.values()) < 64 * 1024
    assert unpack(stored) == topology
