"""Which uplinks are let in: rates of one connection and user, and what bus and msg bear; each refusal names a time."""

from __future__ import annotations

import asyncio

from plato.core.codes import Code
from plato.core.limiter import Limiter
from plato.wire.v1 import client_pb2 as pb
from plato_state.core.admission import MAX_PROBES, PROBE_EACH_MS, Admission
from plato_state.core.checks import guest_message_id
from state_harness import Client, Link, Received, World, command, passed, until, up


def door(**changes: int) -> Admission:
    settings = {"connection_per_s": 10, "user_per_s": 20, "bus_calm_ms": 400, "receipt_calm_ms": 5_000, "floor": 8}
    return Admission(**{**settings, **changes})


def offer(
    admission: Admission, count: int, now_ms: int, conn_id: int = 1, user: str = "a", chance: float = 0.99
) -> int:
    """How many of so many uplinks are let in."""
    let_in = 0
    for _ in range(count):
        if admission.refusal(conn_id, user, now_ms, chance) is None:
            admission.begin(conn_id, user, now_ms)
            let_in += 1
    return let_in


# ── the pure part ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_connection_and_a_user_have_their_rates_and_each_refusal_its_time() -> None:
    admission = door()
    assert offer(admission, 100, 0) == 40
    assert admission.refusal(1, "a", 0, 0.99) == (Code.TOO_FAST, 100, "connection")
    assert offer(admission, 100, 0, conn_id=2) == 40, "another device of the same user"
    assert admission.refusal(3, "a", 0, 0.99) == (Code.TOO_FAST, 50, "user")
    assert offer(admission, 100, 0, conn_id=4, user="b") == 40, "another user is not concerned"
    assert offer(admission, 1, 100) == 1, "who waits as told is let in"


def test_a_bus_that_hangs_is_given_no_more_than_it_bears() -> None:
    admission = door(connection_per_s=10_000, user_per_s=10_000)
    for now in range(0, 1_000, 25):
        assert offer(admission, 10, now) == 10
        admission.appended(10, now)
        admission.probe(1, b"x" * 16, now)
        admission.arrived(1, b"x" * 16, now)
    assert offer(admission, 100, 1_000) == 100, "it is not late yet"
    refusal = admission.refusal(1, "a", 1_401, 0.99)
    assert refusal is not None
    assert (refusal.code, refusal.why) == (Code.BUSY, "bus")
    assert refusal.retry_ms >= 250
    admission.dropped(95)
    assert offer(admission, 100, 1_402) == 3, "up to the floor"
    admission.appended(8, 1_500)
    assert offer(admission, 1, 1_500) == 1, "once it answers"


def test_appends_that_fail_for_long_throttle_what_comes() -> None:
    admission = door(connection_per_s=10_000, user_per_s=10_000, floor=1_000)
    assert offer(admission, 10, 0) == 10
    for now in range(50, 2_000, 50):
        admission.append_failed(now)
    assert admission.refusal(1, "a", 399, 0.0) is None, "for a moment it is only repeated"
    refused = sum(admission.refusal(1, "a", 2_000, i / 100) is not None for i in range(100))
    assert refused >= 90
    for now in range(2_000, 2_010):
        admission.appended(1, now)
    assert offer(admission, 10, 2_010, chance=0.0) == 10


def test_what_the_bus_has_and_msg_does_not_work_off_refuses_new_ones() -> None:
    admission = door(connection_per_s=10_000, user_per_s=10_000)
    for now in range(0, 6_000, 25):
        if now > 5_000:
            trickle = offer(admission, 2, now)
            assert trickle == (now % 100 == 25)
            admission.appended(trickle, now)
        else:
            assert offer(admission, 2, now) == 2
        if now <= 5_000:
            admission.appended(2, now)
            if not now:
                assert admission.wants_probe(now)
                admission.probe(1, b"first".ljust(16), now)
    refusal = admission.refusal(1, "a", 6_000, 0.99)
    assert refusal is not None
    assert (refusal.code, refusal.why) == (Code.BUSY, "msg")
    admission.probe(2, b"last".ljust(16), 6_000)
    admission.arrived(1, b"another frame", 6_000)
    assert admission.msg.in_flight == 2 * 201 + 10
    admission.arrived(1, b"a receipt of " + b"first".ljust(16), 6_000)
    assert admission.msg.in_flight == 2 * 200 + 10, "it was the last of the first two"
    admission.arrived(2, b"last".ljust(16), 6_000)
    assert admission.msg.in_flight == 0
    assert not admission.probes
    assert offer(admission, 2, 6_001) == 2


def test_lost_receipts_stop_nobody() -> None:
    """All frames of a moment were lost (a shard was marked dirty): the next uplink shows that msg is not late."""
    admission = door(connection_per_s=10_000, user_per_s=10_000)
    for now in range(0, 1_000, 25):
        assert offer(admission, 50, now) == 50
        admission.appended(50, now)
        admission.probe(1, b"lost%12d" % now, now)
    assert admission.msg.in_flight == 2_000
    assert offer(admission, 50, 7_000) == 1, "nothing came by for seconds"
    admission.appended(1, 7_010)
    assert admission.wants_probe(7_010)
    admission.probe(1, b"the next".ljust(16), 7_010)  # of the same connection
    admission.arrived(1, b"the next".ljust(16), 7_060)
    assert admission.msg.in_flight == 0
    assert not admission.probes
    assert offer(admission, 50, 7_061) == 50


def test_one_connection_s_probes_reach_back_for_seconds() -> None:
    admission = door()
    for now in range(0, 20_000, 25):
        admission.appended(1, now)
        if admission.wants_probe(now):
            admission.probe(1, b"%16d" % now, now)
        sent = now - 5_000
        if sent >= 0:
            if 1 in admission.probes:
                admission.arrived(1, b"%16d" % sent, now)
            assert admission.msg.oldest_ms(now) <= 5_500, "each comes back after five seconds"


def test_a_probe_whose_receipt_goes_elsewhere_is_covered_by_the_next_and_all_are_bounded() -> None:
    admission = door()
    for number in range(2 * MAX_PROBES):
        admission.appended(1, number)
        admission.probe(number, b"%16d" % number, number)
    assert len(admission.probes) == MAX_PROBES
    admission.arrived(2 * MAX_PROBES - 1, b"%16d" % (2 * MAX_PROBES - 1), 1_000)
    assert admission.msg.in_flight == 0
    admission.arrived(2 * MAX_PROBES - 2, b"%16d" % (2 * MAX_PROBES - 2), 1_001)
    assert admission.msg.in_flight == 0, "what was covered counts once"


# ── on the wire ──────────────────────────────────────────────────────────────────────────────────────────────


async def acks(client: Client, count: int) -> list[pb.ACKMsg]:
    def found() -> list[Received] | None:
        answered = [r for r in client.of(pb.ACK) if r.message.Type == pb.UP and r.code != Code.PENDING]
        return answered if len(answered) >= count else None

    return [r.message for r in await until(found)]


async def test_r1_too_fast_is_told_with_a_time_and_the_same_is_taken_after_it() -> None:
    world = World()
    async with world.shard(state__connection_uplinks_per_s=1) as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        n, last = 0, pb.ACKMsg()
        while last.Code == Code.OK and n < 100:
            n += 1
            await client.send(up("c", n))
            last = (await acks(client, n))[-1]
        assert n > 4
        assert (last.Code, last.ClientID, last.expected) == (Code.TOO_FAST, n, 0)
        assert 0 < last.retry_ms <= 1_000
        await client.send(up("c", n + 1))
        behind = (await acks(client, n + 1))[-1]
        assert (behind.Code, behind.expected) == (Code.EXPECTED, n), "nothing overtakes what was put off"
        await passed(state, last.retry_ms + 25)
        await client.send(up("c", n))
        assert (await acks(client, n + 2))[-1].Code == Code.OK
        assert [r.client_id for r in await world.bus.records()] == list(range(1, n + 1))


async def test_the_sender_s_own_receipt_tells_that_msg_dealt_with_it() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await client.send(up("c", 1))
        await acks(client, 1)
        assert state.shard.admission.msg.in_flight == 1
        ((_, client_msg_id, _),) = state.shard.admission.probes[client.conn_id]
        receipt = command(pb.RECEIPT, pb.ReceiptMsg(client_msg_id=client_msg_id, seq=1))
        assert state.downlink.deliver([receipt], [client.conn_id], [0]) == []
        assert state.shard.admission.msg.in_flight == 0


async def test_a_guest_s_refused_uplinks_hold_no_place_of_others_and_it_is_told_nothing() -> None:
    """As many as the limiter bears, and all refused: msg's receipts say that they are done, and go no further."""
    world = World()
    async with world.shard(auth__guests=True) as state, Link(state) as link:
        guest = await link.connect(world.conn_id())
        await guest.login(token="")
        admission = state.shard.admission
        for n in range(1, 4):
            await guest.send(up("lobby", n))
            await acks(guest, n)
            assert (admission.msg.in_flight, list(admission.probes)) == (1, [guest.conn_id])
            refused = pb.ReceiptMsg(code=Code.NOT_A_MEMBER, client_msg_id=guest_message_id(guest.conn_id, "lobby", n))
            assert state.downlink.deliver([command(pb.RECEIPT, refused)], [guest.conn_id], [0]) == []
            assert admission.msg.in_flight == 0
            await passed(state, PROBE_EACH_MS)
        assert {r.kind for r in guest.got} == {pb.ACK}


async def test_uplinks_of_a_lost_slot_wait_for_nothing() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        world.bus.gate = asyncio.Event()
        for n in range(1, 11):
            await client.send(up("c", n))
        await until(lambda: state.shard.admission.bus.in_flight == 10)
        in_flight = sum(map(len, world.bus.calls[0].values()))
        state.shard.lose(range(1024))
        assert state.shard.admission.bus.in_flight == in_flight, "what is on its way to the bus may land"
        world.bus.gate.set()
        await until(lambda: not state.shard.admission.bus.in_flight)


async def test_reads_that_msg_does_not_answer_refuse_new_ones_with_a_time() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        world.msg.gate = asyncio.Event()
        state.shard.admission.reads = Limiter(calm_ms=100, floor=1)
        await client.send(command(pb.PULL, pb.PullMsg(ref=1, conversation_id="c")))
        await passed(state, 200)
        await client.send(command(pb.PULL, pb.PullMsg(ref=2, conversation_id="c")))
        await client.send(command(pb.SYNC, pb.SyncMsg(ref=3)))
        pulled = (await until(lambda: client.of(pb.PULLED)))[0].message
        synced = (await until(lambda: [r for r in client.of(pb.SYNCED) if r.message.ref == 3]))[0].message
        assert (pulled.ref, pulled.code) == (2, Code.BUSY)
        assert (synced.ref, synced.code) == (3, Code.BUSY)
        assert 250 <= pulled.retry_ms < synced.retry_ms <= 10_000, "each its own turn"
        world.msg.gate.set()
        await until(lambda: any(r.message.ref == 1 for r in client.of(pb.PULLED)))
        await client.send(command(pb.PULL, pb.PullMsg(ref=4, conversation_id="c")))
        again = await until(lambda: [r.message for r in client.of(pb.PULLED) if r.message.ref == 4])
        assert again[0].code == Code.OK
        assert state.shard.admission.reads.in_flight == 0
