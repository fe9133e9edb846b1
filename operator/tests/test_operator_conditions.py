"""What a resource says of itself when something cannot be: in words, in the condition that operator.md names for it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from plato.api.names import EXIT_NOT_ALONE
from plato.api.pool import DrainSpec
from plato.api.shared import Condition, Ref
from plato.topology.record import Rest
from plato_operator.core import children
from plato_operator.core.conditions import MOST_WORDS
from plato_operator.core.orders import Apply, Gate, Plan, Remove, Scale
from plato_operator.core.plan import one_pass
from plato_operator.core.rebuild import rebuilt
from plato_operator.core.snapshot import GATEWAY, MSG, STATE, Child, Pod, Pool, Snapshot
from world import POOL, World


@pytest.fixture(scope="module")
def settled() -> Snapshot:
    """A cluster that serves. Frozen, so the tests may share it."""
    world = World()
    world.settle()
    return world.snapshot(world.leader)


def by_type(found: Iterable[Condition]) -> dict[str, tuple[str, str]]:
    """{type: (status, reason)}."""
    return {c.type: (c.status, c.reason) for c in found}


def words(found: Iterable[Condition], type_: str) -> str:
    return next(c.message for c in found if c.type == type_)


def of_cluster(plan: Plan) -> tuple[Condition, ...]:
    assert plan.cluster_status is not None
    return plan.cluster_status.conditions


def child(snap: Snapshot, kind: str, name: str, **fields: Any) -> Mapping[tuple[str, str], Any]:
    return {**snap.children, (kind, name): replace(snap.children[kind, name], **fields)}


def job(snap: Snapshot) -> str:
    (name,) = [n for kind, n in snap.children if kind == "Job"]
    return name


ALL = {"Ready", "Reconciling", "Stalled", "ConfigurationWarning"}


def test_each_resource_has_the_conditions_that_are_promised(settled: Snapshot) -> None:
    pool_resource = settled.pools[POOL]
    calm = replace(pool_resource, spec=replace(pool_resource.spec, drain=DrainSpec()))
    plan = one_pass(replace(settled, pools={POOL: calm}))
    cluster = by_type(of_cluster(one_pass(settled)))  # the other pass changes the pool's template
    pool, shard = by_type(plan.pool_status[POOL].conditions), by_type(plan.shard_status["demo-s0"].conditions)
    assert cluster.keys() == ALL | {
        "SlotsAcquired", "Resharding", "WorkerIdsAvailable", "TopologyHealthy", "DependenciesReady", "Paused",
    }  # fmt: skip
    assert pool.keys() == ALL | {"Draining", "DrainBlocked", "Unschedulable", "Degraded", "NodeLost"}
    assert shard.keys() == ALL | {"SlotsAcquired", "Evacuating", "NodeLost"}
    good = {"Ready", "SlotsAcquired", "WorkerIdsAvailable", "TopologyHealthy", "DependenciesReady"}
    for found in (cluster, pool, shard):
        assert {type_ for type_, (status, _) in found.items() if status == "True"} == good & found.keys()
    everything = [*of_cluster(plan), *plan.pool_status[POOL].conditions, *plan.shard_status["demo-s0"].conditions]
    assert {c.observed_generation for c in everything} == {1}
    assert all(c.message and c.reason for c in everything)


@pytest.mark.parametrize(
    "reason", ["InvalidOverlay", "QuotaExceeded", "Forbidden", "CRDTooOld", "NameTaken", "ApplyRefused"]
)
def test_a_refusal_stalls_its_resource_and_the_cluster_and_no_other(settled: Snapshot, reason: str) -> None:
    snap = replace(settled, refusals={("StatefulSet", POOL): (reason, "the words")})
    plan = one_pass(snap)
    for found in (of_cluster(plan), plan.pool_status[POOL].conditions):
        assert by_type(found)["Stalled"] == ("True", reason)
        assert by_type(found)["Ready"] == ("False", reason)
        assert words(found, "Ready") == words(found, "Stalled") == f"StatefulSet {POOL}: the words"
    shard = by_type(plan.shard_status["demo-s0"].conditions)
    assert (shard["Stalled"][0], shard["Ready"][0]) == ("False", "True")


def test_a_message_is_never_longer_than_a_condition_may_be(settled: Snapshot) -> None:
    """It quotes what somebody wrote into a podOverlay, or what an admission policy said of it."""
    snap = replace(settled, refusals={("StatefulSet", POOL): ("InvalidOverlay", "podOverlay.spec is " + "x" * 100_000)})
    plan = one_pass(snap)
    for conditions in (of_cluster(plan), plan.pool_status[POOL].conditions):
        assert max(len(c.message) for c in conditions) == MOST_WORDS
        assert words(conditions, "Stalled").endswith("…")


def test_a_refusal_of_a_shards_object_stalls_that_shard(settled: Snapshot) -> None:
    plan = one_pass(replace(settled, refusals={("StatefulSet", "demo-s1"): ("Odd", "x")}))
    assert by_type(plan.shard_status["demo-s1"].conditions)["Stalled"] == ("True", "ApplyRefused")
    assert by_type(plan.shard_status["demo-s0"].conditions)["Stalled"][0] == "False"
    assert by_type(plan.pool_status[POOL].conditions)["Stalled"][0] == "False"


def test_a_refusal_of_the_clusters_own_object_stalls_the_cluster_only(settled: Snapshot) -> None:
    plan = one_pass(replace(settled, refusals={("Service", "demo-msg"): ("Forbidden", "no")}))
    assert by_type(of_cluster(plan))["Stalled"] == ("True", "Forbidden")
    assert by_type(plan.pool_status[POOL].conditions)["Stalled"][0] == "False"


@pytest.mark.parametrize("name", ["demo-s0", "demo-s7", "demo-state", "demo-msg", "demo-ipconfig"])
def test_a_pool_that_is_named_like_the_clusters_own_objects_says_so_and_touches_none(
    settled: Snapshot, name: str
) -> None:
    """Else both would render one Service or StatefulSet, by turns, and the pool's replicas be a shard's."""
    pool = Pool(name, "pu", 1, replace(settled.pools[POOL].spec, replicas=3))
    plan = one_pass(replace(settled, pools={**settled.pools, name: pool}))
    assert [o for o in plan.applies if o.__class__ is not Gate] == []
    assert plan.act is None
    told = by_type(plan.pool_status[name].conditions)
    assert told["Ready"] == ("False", "NameTaken")
    assert told["Stalled"] == ("True", "NameTaken")
    assert "use another name" in words(plan.pool_status[name].conditions, "Stalled")


def test_a_refused_podmonitor_is_a_warning_of_its_own_and_the_cluster_stays_ready(settled: Snapshot) -> None:
    """Nobody is served by it; the words say how to come out of it. Beside it another refusal still stalls."""
    refusals = {("PodMonitor", "demo"): ("ApplyRefused", "the API server does not know this kind")}
    found = of_cluster(one_pass(replace(settled, refusals=refusals)))
    assert by_type(found)["ConfigurationWarning"] == ("True", "PodMonitorRefused")
    assert "install its CRD" in words(found, "ConfigurationWarning")
    assert (by_type(found)["Ready"][0], by_type(found)["Stalled"][0]) == ("True", "False")
    both = {**refusals, ("Service", "demo-msg"): ("Forbidden", "no")}
    assert by_type(of_cluster(one_pass(replace(settled, refusals=both))))["Ready"] == ("False", "Forbidden")


def test_keys_whose_names_say_no_kid_are_named(settled: Snapshot) -> None:
    """Processes pass them over, and whoever has a token of that key is refused: it must be said somewhere."""
    spec = replace(settled.cluster.spec, auth=replace(settled.cluster.spec.auth, keys=Ref("jwt")))
    cluster = replace(settled.cluster, spec=spec)
    found = of_cluster(one_pass(replace(settled, cluster=cluster, odd_keys=("public.key.txt", "a"))))
    assert by_type(found)["ConfigurationWarning"] == ("True", "KeysPassedOver")
    told = words(found, "ConfigurationWarning")
    assert "Secret jwt must be named <kid>.pem or <kid>.key; passed over: a, public.key.txt" in told


def test_slots_that_have_nowhere_to_go_are_told_of(settled: Snapshot) -> None:
    """Fewer shards are wanted, and the one that stays was evacuated before: nothing moves, and not in silence."""
    of = replace(
        settled.cluster, spec=replace(settled.cluster.spec, state=replace(settled.cluster.spec.state, shards=1))
    )
    first = settled.shards["demo-s0"]
    empty = {**settled.shards, "demo-s0": replace(first, spec=replace(first.spec, weight=0))}
    told = by_type(of_cluster(one_pass(replace(settled, cluster=of, shards=empty))))
    assert told["ConfigurationWarning"] == ("True", "NoWeight")
    assert by_type(of_cluster(one_pass(settled)))["ConfigurationWarning"] == ("False", "None")


def test_what_was_left_behind_as_an_orphan_is_owned_again(settled: Snapshot) -> None:
    """`kubectl delete --cascade=orphan`, then the same PlatoCluster: without an owner it would outlive that one."""
    snap = replace(settled, children=child(settled, "Deployment", "demo-msg", orphan=True))
    assert [(o.kind, o.name) for o in one_pass(snap).applies if isinstance(o, Apply)] == [("Deployment", "demo-msg")]


def test_a_record_that_is_too_large_is_not_written_and_the_old_one_stays(settled: Snapshot) -> None:
    assert settled.topology is not None
    # Digits that gzip cannot make small.
    uids = {i: hashlib.shake_256(bytes(str(i), "ascii")).hexdigest(4000) for i in range(900, 1024)}
    resting = {i: Rest(uid, settled.now_ms + 10**9) for i, uid in uids.items()}
    topology = replace(settled.topology, resting=resting)
    newcomer = replace(settled.pods[f"{POOL}-1"], uid="u-new", name=f"{POOL}-2", ordinal=2, gate=None, ready=False)
    pool = settled.pools[POOL]
    snap = replace(
        settled, topology=topology, pods={**settled.pods, newcomer.name: newcomer},
        pools={POOL: replace(pool, spec=replace(pool.spec, replicas=3))},
        children=child(settled, "StatefulSet", POOL, replicas=3),
    )  # fmt: skip
    plan = one_pass(snap)
    assert plan.write is None
    assert not [order for order in plan.applies if isinstance(order, Gate)]
    assert not plan.events  # nothing happened
    assert by_type(of_cluster(plan))["TopologyHealthy"] == ("False", "TooLarge")
    assert "bytes" in words(of_cluster(plan), "TopologyHealthy")
    fits = one_pass(replace(snap, topology=settled.topology))
    assert fits.write is not None
    assert by_type(of_cluster(fits))["TopologyHealthy"] == ("True", "Written")


def test_msg_and_state_wait_for_the_migration_of_a_new_cluster() -> None:
    world = World()
    world.migrates = False
    for _ in range(5):
        world.act()
        world.tick()
    kinds = {(kind, name) for kind, name in world.api.children}
    assert ("Deployment", "demo-ipconfig") in kinds
    assert ("StatefulSet", POOL) in kinds
    assert ("Deployment", "demo-msg") not in kinds
    assert ("StatefulSet", "demo-s0") not in kinds
    assert by_type(of_cluster(world.plan()))["DependenciesReady"] == ("Unknown", "Migrating")
    world.migrates = True
    world.settle()


def test_no_pod_is_made_before_the_account_that_it_would_run_under_is_ours() -> None:
    """One of that name may be another program's, such as an operator's: its rights would be every gateway's."""
    snap = World().snapshot("me")
    snap = replace(snap, topology=replace(rebuilt(snap), writer="me"))
    tokens = {("Secret", "demo-admin"): Child("Secret", "demo-admin", "u")}
    foreign = replace(snap, children=tokens, refusals={("ServiceAccount", "demo"): ("NameTaken", "words")})
    plan = one_pass(foreign)
    assert not [o for o in plan.applies if isinstance(o, Apply) and (o.template_hash or o.kind == "Job")]
    assert by_type(of_cluster(plan))["Stalled"] == ("True", "NameTaken")
    ours = replace(snap, children={**tokens, ("ServiceAccount", "demo"): Child("ServiceAccount", "demo", "u")})
    assert [o for o in one_pass(ours).applies if isinstance(o, Apply) and o.kind == "Job"]


def test_a_new_version_rolls_nothing_before_its_migration_is_done() -> None:
    world = World()
    world.settle()
    old = {n: (p.uid, p.template_hash) for n, p in world.api.pods.items()}
    templates = {k: c.template_hash for k, c in world.api.children.items()}
    first = [n for kind, n in world.api.children if kind == "Job"]
    world.migrates = False
    world.respec(version="2")
    for _ in range(10):
        plan = world.act()
        world.tick()
    assert {n: (p.uid, p.template_hash) for n, p in world.api.pods.items()} == old
    assert {k: c.template_hash for k, c in world.api.children.items() if k in templates} == templates
    status = plan.cluster_status
    assert status is not None
    assert (status.version, status.phase) == ("1", "Progressing")
    world.migrates = True
    world.settle()
    assert {p.version for p in world.api.pods.values()} == {"2"}
    jobs = [n for kind, n in world.api.children if kind == "Job"]
    assert len(jobs) == 1
    assert jobs != first


def test_a_failed_migration_says_so_and_where_its_words_are(settled: Snapshot) -> None:
    name = job(settled)
    plan = one_pass(replace(settled, children=child(settled, "Job", name, succeeded=0, failed=3)))
    found = of_cluster(plan)
    assert by_type(found)["DependenciesReady"] == by_type(found)["Ready"] == ("False", "MigrationFailed")
    assert f"kubectl logs -n ns job/{name}" in words(found, "Ready")
    assert "3 times" in words(found, "Ready")


def failed_try(settled: Snapshot, exit_code: int, said: str, created_ms: int = 1, of: str = "") -> dict[str, Pod]:
    """One pod of the migration's Job, or of another one."""
    name = f"{of or job(settled)}-{created_ms}"
    return {
        name: Pod(
            name, f"u{created_ms}", "migrate", of or job(settled), phase="Failed", running=False, created_ms=created_ms,
            exit_code=exit_code, trouble=said,
        )
    }  # fmt: skip


def test_a_schema_or_store_of_another_cluster_is_a_condition_in_the_migrations_own_words(settled: Snapshot) -> None:
    """And nothing is rolled meanwhile: the pods that run keep what they run, with another spec too."""
    words_ = "store redis://kv:6379/0, key prefix 'p:', belongs to PlatoCluster im/demo, and more " + "x" * 400
    children = child(settled, "Job", job(settled), succeeded=0, failed=2)
    pods = {
        **settled.pods,
        **failed_try(settled, 1, "plato: database plato does not answer", 1),
        **failed_try(settled, EXIT_NOT_ALONE, f"plato: {words_}", 2),
        **failed_try(settled, 1, "plato: of an earlier Job", 3, of="demo-migrate-0"),
    }
    spec = replace(
        settled.cluster.spec, msg=replace(settled.cluster.spec.msg, replicas=3, pod_overlay={"spec": {"x": 1}})
    )
    refused = replace(settled, children=children, pods=pods, cluster=replace(settled.cluster, spec=spec))
    plan = one_pass(refused)
    found = of_cluster(plan)
    for type_, status in (("Ready", "False"), ("DependenciesReady", "False"), ("Stalled", "True")):
        assert by_type(found)[type_] == (status, "NotAlone")
        assert words(found, type_).startswith(f"{words_}; ")
        assert f"`kubectl delete job -n ns {job(settled)}`" in words(found, type_), "the Job gives up after some tries"
    assert not [o for o in plan.applies if isinstance(o, Apply) and o.template_hash]
    assert plan.act is None
    later = replace(refused, pods={**pods, **failed_try(settled, 1, "plato: no answer", 4)})
    assert by_type(of_cluster(one_pass(later)))["Ready"] == ("False", "MigrationFailed")
    assert "no answer" in words(of_cluster(one_pass(later)), "Ready")
    done = replace(refused, children=child(settled, "Job", job(settled), succeeded=1, failed=2))
    assert by_type(of_cluster(one_pass(done)))["Stalled"] == ("False", "NotStalled")


@pytest.mark.parametrize("part", [MSG, STATE])
@pytest.mark.parametrize("migrated", [True, False])
def test_a_pod_that_a_secret_led_to_another_cluster_is_a_condition_in_its_own_words(
    settled: Snapshot, part: str, migrated: bool
) -> None:
    """It restarted before the Job had looked, or another cluster took the place over since. Told while it does not run: what
    it ended with once says nothing of a pod that runs again."""
    words_ = "database plato at db:5432, schema 'plato', belongs to PlatoCluster im/demo, and more " + "x" * 400
    said = f"CrashLoopBackOff: back-off 40s restarting failed container={part} pod=x(y): plato-{part}: {words_}"
    name = min(n for n, p in settled.pods.items() if p.component == part)
    gone = replace(settled.pods[name], ready=False, running=False, exit_code=EXIT_NOT_ALONE, trouble=said)
    jobs = settled.children if migrated else child(settled, "Job", job(settled), succeeded=0)
    strayed = replace(settled, pods={**settled.pods, name: gone}, children=jobs)
    found = of_cluster(one_pass(strayed))
    for type_, status in (("Ready", "False"), ("DependenciesReady", "False"), ("Stalled", "True")):
        assert by_type(found)[type_] == (status, "NotAlone")
        assert words(found, type_) == f"{name} found, when it was started last: {words_}"
    for other in ({"running": True}, {"running": True, "ready": True}, {"exit_code": 4}, {"deleting": True}):
        mended = replace(strayed, pods={**settled.pods, name: replace(gone, **other)})
        assert by_type(of_cluster(one_pass(mended)))["Stalled"] == ("False", "NotStalled")
    silent = replace(strayed, pods={**settled.pods, name: replace(gone, trouble="CrashLoopBackOff")})
    assert words(of_cluster(one_pass(silent)), "Stalled").endswith("the mark of another PlatoCluster; its log names it")


def test_a_missing_secret_is_named(settled: Snapshot) -> None:
    found = of_cluster(one_pass(replace(settled, missing_secrets=("db/uri",))))
    assert by_type(found)["DependenciesReady"] == by_type(found)["Ready"] == ("False", "SecretMissing")
    assert "db/uri" in words(found, "Ready")


def test_the_version_is_the_one_before_until_every_pod_runs_the_new_one() -> None:
    world = World()
    world.settle()
    world.respec(version="2")
    seen: list[tuple[str, set[str]]] = []
    for _ in range(120):
        plan = world.act()
        assert plan.cluster_status is not None
        seen.append((plan.cluster_status.version, {p.version for p in world.snapshot(world.leader).pods.values()}))
        world.tick()
    assert seen[0][0] == "1"
    assert seen[-1] == ("2", {"2"})
    assert [v for v, _ in seen] == sorted(v for v, _ in seen), "it goes from one to the other, once"


def test_a_pool_with_a_version_of_its_own_does_not_count(settled: Snapshot) -> None:
    canary = {n: replace(p, version="9") if p.component == GATEWAY else p for n, p in settled.pods.items()}
    pool = settled.pools[POOL]
    snap = replace(settled, pods=canary, pools={POOL: replace(pool, spec=replace(pool.spec, version="9"))})
    status = one_pass(snap).cluster_status
    assert status is not None
    assert status.version == "1"


def without(snap: Snapshot, component: str, **fields: Any) -> dict[str, Pod]:
    """Pods where those of a component are not ready, and say why."""
    return {n: replace(p, ready=False, **fields) if p.component == component else p for n, p in snap.pods.items()}


def test_ready_quotes_what_kubernetes_says_of_a_pod_that_does_not_run(settled: Snapshot) -> None:
    said = 'CrashLoopBackOff: back-off: database.uri: "x" cannot be used'
    found = of_cluster(one_pass(replace(settled, pods=without(settled, MSG, trouble=said))))
    assert by_type(found)["Ready"] == ("False", "MsgDown")
    assert said in words(found, "Ready")
    plan = one_pass(replace(settled, pods=without(settled, STATE, unschedulable="0/3 nodes are available")))
    assert "demo-s0-0: 0/3 nodes are available" in words(plan.shard_status["demo-s0"].conditions, "Ready")
    assert "0/3 nodes" in words(of_cluster(plan), "Ready")
    plan = one_pass(replace(settled, pods=without(settled, GATEWAY, trouble="ErrImagePull: no such image")))
    assert "ErrImagePull: no such image" in words(plan.pool_status[POOL].conditions, "Ready")


def test_unschedulable_names_the_ports_and_the_nodes(settled: Snapshot) -> None:
    name = f"{POOL}-1"
    stuck = replace(settled.pods[name], node="", ready=False, running=False, unschedulable="0/5 nodes are available")
    plan = one_pass(replace(settled, pods={**settled.pods, name: stuck}))
    found = plan.pool_status[POOL].conditions
    assert by_type(found)["Unschedulable"] == ("True", "Unschedulable")
    for part in (name, "0/5 nodes are available", "8900, 8901 and 8909", "2 are wanted on 5 nodes"):
        assert part in words(found, "Unschedulable")


def test_a_drain_that_cannot_end_in_time_is_warned_of(settled: Snapshot) -> None:
    pool = settled.pools[POOL]
    spec = replace(pool.spec, drain=replace(pool.spec.drain, pace_per_second=100, deadline_seconds=300))
    found = one_pass(replace(settled, pools={POOL: replace(pool, spec=spec)})).pool_status[POOL].conditions
    assert by_type(found)["ConfigurationWarning"] == ("True", "DrainTooSlow")
    assert "needs 500 s" in words(found, "ConfigurationWarning")


def test_nothing_is_judged_while_a_lost_record_is_gathered(settled: Snapshot) -> None:
    silent = {n: r for n, r in settled.reports.items() if n != f"{POOL}-0"}
    found = of_cluster(one_pass(replace(settled, topology=None, version="", reports=silent)))
    assert by_type(found)["Ready"] == ("Unknown", "TopologyMissing")


def test_optional_objects_go_when_the_spec_drops_them() -> None:
    world = World()
    world.respec(network_policy=True, monitoring=replace(world.cluster.spec.monitoring, pod_monitor=True))
    world.settle()
    assert ("NetworkPolicy", "demo") in world.api.children
    uids = {world.api.children[kind, "demo"].uid for kind in ("NetworkPolicy", "PodMonitor")}
    world.respec(network_policy=False, monitoring=replace(world.cluster.spec.monitoring, pod_monitor=False))
    plan = world.plan()
    assert {o.uid for o in plan.applies if isinstance(o, Remove)} == uids
    assert not [o for o in plan.applies if isinstance(o, Apply)]
    world.settle()
    assert not {kind for kind, _ in world.api.children} & {"NetworkPolicy", "PodMonitor"}


def test_replicas_of_msg_follow_the_spec_without_another_render(settled: Snapshot) -> None:
    spec = replace(settled.cluster.spec, msg=replace(settled.cluster.spec.msg, replicas=5))
    plan = one_pass(replace(settled, cluster=replace(settled.cluster, spec=spec)))
    assert plan.applies == (Scale("demo-msg", settled.children["Deployment", "demo-msg"].uid, 5),)
    plan = one_pass(replace(settled, children=child(settled, "Deployment", "demo-ipconfig", replicas=9)))
    assert plan.applies == (Scale("demo-ipconfig", settled.children["Deployment", "demo-ipconfig"].uid, 2),)


def test_counting_a_rendering_up_applies_it_again_and_rolls_its_pods(
    settled: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "RENDERING", {"StatefulSet/gateway": 1, "Service/msg": 1})
    old = settled.children["StatefulSet", POOL]
    found = {(o.kind, o.name): o for o in one_pass(settled).applies if isinstance(o, Apply)}
    assert found.keys() == {("StatefulSet", POOL), ("Service", "demo-msg")}
    assert found["StatefulSet", POOL].template_hash != old.template_hash
