"""M25: a large group beside dialogues, on real processes: its members are notified and pull, the dialogues do not wait."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from plato.client import Client
from plato.core.codes import Code
from plato.local.cluster import LocalCluster
from plato.local.folder import LocalError
from plato.wire.v1 import client_pb2 as wire

from tests.faults import looking
from tests.faults.load import Crowd, latencies_s, quantile
from tests.faults.people import person
from tests.faults.raw import Raw
from tests.faults.town import Member
from tests.faults.waiting import until

FAULT_SETTINGS = {
    "local.gateways": 2,
    "local.shards": 2,
    "local.msgs": 1,
    "gateway.workers": 1,
    "gateway.poll_port": 0,
}
pytestmark = pytest.mark.timeout(120)
MEMBERS, ONLINE = 1_000, 100
MADE = 2
"""Operations that made it: one for 500 members."""
BURSTS, BURST = 3, 20
TOWN = "g:town"
P90_S, WORST_S = 1.5, 5.0
"""A dialogue's acceptance; some ten ms here, and a busy machine may stand still for once, which the few slowest show."""


async def plato(cluster: LocalCluster, what: str, *arguments: str) -> str:
    """What `plato group …` prints about the town."""
    command = [
        sys.executable,
        "-m",
        "plato.cli",
        "group",
        what,
        "town",
        *arguments,
        "--data-dir",
        str(cluster.data_dir),
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode()


async def test_m25_a_large_group_beside_dialogues(fault_cluster: LocalCluster, tmp_path: Path) -> None:
    names = [f"town-{n:04}" for n in range(MEMBERS)]
    (tmp_path / "names").write_text("\n".join(names))
    assert await plato(fault_cluster, "create", "-f", str(tmp_path / "names")) == f"{TOWN}: made, with 1,000 members\n"
    with pytest.raises(LocalError, match="exists"):
        fault_cluster.ask_msg("POST", "/admin/v1/groups", json.dumps({"name": "town", "members": ["eve"]}))
    gateways = [address.rsplit(":", 1) for address in fault_cluster.gateways]

    async def enter(name: str, n: int) -> Raw:
        host, port = gateways[n % 2]
        raw = await stack.enter_async_context(await Raw.open(host, int(port)))
        await raw.enter(fault_cluster.token(name))
        return raw

    async with AsyncExitStack() as stack:
        raws = [await enter(name, n) for n, name in enumerate(names[:ONLINE])]
        members = [Member(raw, TOWN, n, MADE) for n, raw in enumerate(raws)]
        tasks = [asyncio.create_task(member.run()) for member in members]
        speaker = await stack.enter_async_context(person(fault_cluster, names[ONLINE], tmp_path / "speaker"))
        reader = await stack.enter_async_context(person(fault_cluster, names[ONLINE + 1], tmp_path / "reader"))
        crowd = await stack.enter_async_context(
            Crowd(
                [f"dialogue-{n}" for n in range(4)],
                tmp_path,
                lambda user, store, _: Client(fault_cluster.token(user), store, fault_cluster.gateways, user=user),
                ws_every=0,
            )
        )
        said, total = 0, BURSTS * BURST

        async def speak() -> None:
            nonlocal said

            def everywhere() -> bool:
                return all(member.seq == MADE + said for member in members)

            for _ in range(BURSTS):
                tickets = [await speaker.client.send(f"{said + n}", conversation_id=TOWN) for n in range(BURST)]
                said += BURST
                await asyncio.wait_for(asyncio.gather(*(ticket.settled() for ticket in tickets)), 30)
                await until(everywhere, 30)

        speaking = asyncio.create_task(speak())
        await crowd.talk(20, speaking.done, seed=25)
        await speaking
        assert await crowd.rest(30), "a dialogue's message lacks"
        took = latencies_s(crowd.flights)
        assert quantile(took, 0.9) < P90_S, f"p50 {quantile(took, 0.5)}, worst {took[-1]}"
        assert took[-1] < WORST_S, f"p50 {quantile(took, 0.5)}, worst {took[-1]}"

        bodies = [f"{n}".encode() for n in range(total)]
        for member in members:
            assert [row.Content for row in member.rows] == bodies, "complete, in order, each once"
            assert member.pushes == 0
            assert len(member.notices) <= total // 2, "one notice stands for several messages"
            assert all(notice.within_ms for notice in member.notices)
        await until(lambda: len(reader.shown) == MADE + total, 30)
        assert [row.body for row in reader.shown[MADE:]] == bodies, "the client follows the notices"
        name = "plato_msg_notices_total"
        assert looking.metric(fault_cluster, "plato-msg-0", name, "http") <= total // 2

        late = await enter(names[-1], 0)
        await late.send(wire.PULL, wire.PullMsg(ref=7, conversation_id=TOWN, from_seq=MADE + 1, limit=500))
        page = await late.until(wire.PULLED, wire.PulledMsg, ref=7)
        assert [row.Content for row in page.rows] == bodies, "who was offline reads all of it"
        outsider = await enter("outsider", 1)
        await outsider.up(TOWN, 1, b"let me in")
        assert (await outsider.until(wire.RECEIPT, wire.ReceiptMsg)).code == Code.NOT_A_MEMBER
        await outsider.send(wire.PULL, wire.PullMsg(ref=8, conversation_id=TOWN, from_seq=1))
        assert (await outsider.until(wire.PULLED, wire.PulledMsg, ref=8)).code == Code.NOT_A_MEMBER
        await plato(fault_cluster, "remove", "--member", names[1])
        await plato(fault_cluster, "add", "--member", "outsider")
        shown = await plato(fault_cluster, "show", "--limit", "2")
        assert shown == f"{TOWN}: 1,000 members, {MADE + total + 2} messages\noutsider\n{names[0]}\n"
        await outsider.send(wire.PULL, wire.PullMsg(ref=9, conversation_id=TOWN, from_seq=1))
        pulled = await outsider.until(wire.PULLED, wire.PulledMsg, ref=9)
        newest = MADE + total + 2
        assert (pulled.code, [row.seq for row in pulled.rows], pulled.newest_seq) == (0, [newest], newest), (
            "what was said before is not theirs"
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
