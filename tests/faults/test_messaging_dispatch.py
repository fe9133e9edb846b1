"""M15 on real processes: a gateway that comes takes the new clients, and `plato rebalance` moves the surplus of the others
to it, under clients that stay connected. `plato explain` shows what a list rests on; `plato override` overrules it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from plato.client import Client
from plato.local.cluster import LocalCluster

from tests.faults.load import Person
from tests.faults.raw import Raw
from tests.faults.waiting import until

FAULT_SETTINGS = {
    "local.gateways": 3,
    "local.shards": 1,
    "local.msgs": 1,
    "gateway.workers": 1,
    "gateway.poll_port": 0,
    "gateway.drain_pace_per_s": 100,
    "auth.guests": True,
}
OLD, NEW = 18, 3
NEWCOMER = "edge-2"
pytestmark = pytest.mark.timeout(150)


def online(one: Person) -> bool:
    return bool(one.onlines)


@asynccontextmanager
async def clients(
    cluster: LocalCluster, folder: Path, users: Sequence[str], heard: Sequence[str]
) -> AsyncIterator[list[Person]]:
    """People who go where the list says, one after the other, all online. heard: the gateways that must be heard when each
    of them asks: on a machine that is busy one may fall silent meanwhile, and is not listed then."""

    def all_heard() -> bool:
        found = groups(cluster)
        return all(found[name] == "room" for name in heard)

    async with AsyncExitStack() as stack:
        made: list[Person] = []
        for user in users:
            await until(all_heard, 40.0, "a gateway is not heard")
            store = folder / f"{user}.sqlite"
            client = Client(cluster.token(user), store, ipconfig_url=cluster.ipconfig_url, user=user)
            one = Person(user, store, "tcp", client)
            await stack.enter_async_context(client)
            await one.watch()
            stack.push_async_callback(one.unwatch)
            made.append(one)
            await until(partial(online, one), 40.0, f"{user} did not come online")
        yield made


def at(cluster: LocalCluster, people: Sequence[Person]) -> Counter[str]:
    """How many are connected to each gateway."""
    names = {cluster.ports[f"edge-{n}.tcp"]: f"edge-{n}" for n in range(3)}
    return Counter(names.get(p.port, "nowhere") for p in people)


async def plato(cluster: LocalCluster, *words: str) -> tuple[int, str]:
    """(exit code, output) of a command, as a person calls it."""
    command = [sys.executable, "-P", "-m", "plato.cli", *words, "--data-dir", str(cluster.data_dir)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def groups(cluster: LocalCluster) -> dict[str, str]:
    """How ipconfig sees each gateway."""
    return {g["name"]: g["group"] for g in cluster.ask_ipconfig("GET", "/explain")["gateways"]}


async def test_m15_a_gateway_that_comes_takes_the_new_ones_and_a_rebalance_evens_the_rest(
    fault_cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = fault_cluster
    cluster.stop_processes(NEWCOMER)
    left = {"edge-0": "room", "edge-1": "room", NEWCOMER: "silent"}
    await until(lambda: groups(cluster) == left, 40.0, "a dead gateway is not dropped")
    async with clients(cluster, tmp_path, [f"o{n:02}" for n in range(OLD)], ["edge-0", "edge-1"]) as old:
        await until(lambda: "nowhere" not in at(cluster, old), 40.0, "somebody is on the way")
        spread = at(cluster, old)
        # How evenly is tried without processes: on a busy machine the second of a list may answer first.
        assert spread.keys() <= {"edge-0", "edge-1"}, f"a dead one is not listed: {groups(cluster)}"
        cluster.start_processes(NEWCOMER)
        await until(lambda: groups(cluster)[NEWCOMER] == "room", 40.0, "the gateway that came is not seen")
        async with clients(cluster, tmp_path, [f"n{n:02}" for n in range(NEW)], [NEWCOMER]) as new:
            assert at(cluster, new)[NEWCOMER] >= NEW / 4, (at(cluster, new), await plato(cluster, "explain"))
            before = at(cluster, [*old, *new])
            share = sum(before.values()) // 3
            surplus = sum(max(0, count - share) for count in before.values())
            assert surplus > 2, "there is something to even out"
            # Guests know no REDIRECT: they stay.
            fullest = max(before, key=lambda name: before[name])
            async with await Raw.open("127.0.0.1", cluster.ports[f"{fullest}.tcp"]) as guest:
                assert (await guest.login("")).Code == 0
                assert (await guest.heartbeat()).Code == 0

                def counted() -> bool:
                    found = cluster.ask_ipconfig("POST", "/rebalance", json.dumps({"dry_run": True}))["gateways"]
                    return bool(sum(g["connections"] for g in found.values()) == OLD + NEW + 1)

                await until(counted, 30.0, "not everybody is counted")
                code, said = await plato(cluster, "rebalance", "--least", "1")
                assert code == 0, said

                def even() -> bool:
                    now = at(cluster, [*old, *new])
                    return set(now) <= {f"edge-{n}" for n in range(3)} and max(now.values()) - min(now.values()) <= 2

                await until(even, 40.0, f"not even: {before} became {at(cluster, [*old, *new])}")
                assert [p.user for p in [*old, *new] if len(p.onlines) != 1] == [], "nobody went offline for it"
                assert (await guest.heartbeat()).Code == 0
                moved = sum(p.client.moves for p in [*old, *new])
                assert 2 <= moved <= surplus, "the surplus, and no more"
                after = at(cluster, [*old, *new])
    with capsys.disabled():
        print(f"\nM15: {dict(sorted(before.items()))} → {dict(sorted(after.items()))}, {moved} moved, 0 reconnects")


def placed(cluster: LocalCluster) -> list[str]:
    """The gateways that would be listed, in their order."""
    listed = [g for g in cluster.ask_ipconfig("GET", "/explain")["gateways"] if g["place"]]
    return [g["name"] for g in sorted(listed, key=lambda g: int(g["place"]))]


async def test_explain_and_override_as_a_person_uses_them(fault_cluster: LocalCluster) -> None:
    cluster = fault_cluster
    await until(lambda: set(groups(cluster).values()) == {"room"}, 40.0, "a gateway is not heard")

    async def explained() -> bool:
        code, said = await plato(cluster, "explain", "--zone", "here")
        assert code == 0, said
        return said.count("connections left") == 3

    # On a busy machine one of them may fall silent for a moment.
    await until(explained, 40.0, "not all three are explained")
    code, said = await plato(cluster, "override", "--first", NEWCOMER, "--never", "edge-0", "--reason", "a try")
    assert (code, "because: a try" in said) == (0, True), said
    try:
        await until(lambda: placed(cluster) == [NEWCOMER, "edge-1"], 40.0, f"not so: {placed(cluster)}")
        pid = cluster.pids("plato-ipconfig-0")
        cluster.kill("plato-ipconfig-0")
        await until(lambda: cluster.pids("plato-ipconfig-0") not in ([], pid) and cluster.ready("ipconfig"), 30.0)
        assert cluster.ask_ipconfig("GET", "/override")["override"]["never"] == ["edge-0"], "it outlives a restart"
        code, said = await plato(cluster, "override", "--never", "edge-9")
        assert (code, "edge-9 is no gateway" in said) == (1, True), said
    finally:
        code, said = await plato(cluster, "override", "--clear")
    assert (code, said.strip()) == (0, "override: none")
