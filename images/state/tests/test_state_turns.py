"""Turns at login: a crowd comes in at the pace of the shard, each of it asks twice, and nobody is forgotten."""

from __future__ import annotations

from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plato.core.codes import Code
from plato.core.frames import pack
from plato.wire.v1 import client_pb2 as pb
from plato_state import metrics
from plato_state.core.session import Phase
from plato_state.core.turns import BURST_MS, KEPT_MS, TURNS_AHEAD_MS, Turns
from state_harness import DATA, OPENED, Client, Link, World, command, passed, time_stands_still


def let_in(turns: Turns, asks: list[tuple[int, int]]) -> tuple[list[int], dict[int, int]]:
    """Plays clients (at_ms, conn_id) that come again when they were told to. Returns when each was let in, and how often
    each asked."""
    queue = sorted(asks)
    entered, asked = [], dict[int, int]()
    while queue:
        now, conn_id = queue.pop(0)
        asked[conn_id] = asked.get(conn_id, 0) + 1
        wait = turns.ask(conn_id, now)
        if wait:
            again = (now + wait, conn_id)
            queue.insert(bisect_right(queue, again), again)
        else:
            entered.append(now)
    return entered, asked


def most_within(moments: list[int], window_ms: int) -> int:
    """The greatest number of moments in any window of this length."""
    return max(bisect_right(moments, m + window_ms - 1) - n for n, m in enumerate(moments))


def test_who_comes_alone_never_waits() -> None:
    turns = Turns(100)
    assert [turns.ask(n, n * 10) for n in range(500)] == [0] * 500
    assert len(turns) == 0


def test_a_crowd_comes_in_at_the_pace_and_asks_twice() -> None:
    turns = Turns(500)
    entered, asked = let_in(turns, [(1_000, n) for n in range(5_000)])
    assert len(entered) == 5_000
    assert entered[-1] <= 1_000 + 10_000
    assert most_within(entered, 1_000) <= 500 + 500 * BURST_MS // 1_000
    assert max(asked.values()) == 2
    assert len(turns) == 0


def test_beyond_the_turns_nobody_holds_memory_and_all_get_in() -> None:
    turns = Turns(10)
    crowd = [(0, n) for n in range(1, 1_000)]
    for now, conn_id in crowd:
        turns.ask(conn_id, now)
    assert len(turns) <= 10 * TURNS_AHEAD_MS // 1_000 + 1
    entered, asked = let_in(Turns(10), crowd)
    assert len(entered) == 999
    assert most_within(entered, 1_000) <= 10 + 10 * BURST_MS // 1_000 + 1
    assert max(asked.values()) <= 12, "each time that it comes the line is shorter"


def test_a_turn_that_nobody_takes_lapses() -> None:
    turns = Turns(10)
    for n in range(50):
        turns.ask(n, 0)
    waiting = len(turns)
    assert waiting > 40
    turns.forget(49)
    assert len(turns) == waiting - 1
    turns.ask(1_000, TURNS_AHEAD_MS + KEPT_MS)
    assert len(turns) == 0


def test_who_asks_before_its_turn_keeps_it() -> None:
    turns = Turns(10)
    waits = [turns.ask(n, 0) for n in range(20)]
    last = waits[-1]
    assert turns.ask(19, last - 7) == 7
    assert turns.ask(19, last) == 0


@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(1, 60)), max_size=200), st.integers(1, 200))
def test_never_more_than_the_pace_comes_in(asks: list[tuple[int, int]], per_s: int) -> None:
    entered, _ = let_in(Turns(per_s), asks)
    assert len(entered) == len(asks)
    for window_ms in (100, 1_000, 2_500):
        if entered:
            room = (window_ms + BURST_MS) * per_s / 1_000
            assert most_within(entered, window_ms) <= room + 2 + len(asks) - len({c for _, c in asks})


@pytest.mark.parametrize("kind", [pb.LOGIN, pb.RECONN])
async def test_a_shard_tells_a_crowd_when_to_come_and_then_lets_it_in(kind: pb.CmdType.ValueType) -> None:
    world, put_off = World(), metrics.PUT_OFF._value.get()
    login = pb.LoginMsg(Head=pb.LoginMsgHead(DeviceID=5), token="fake:alice")
    resume = pb.ReConnMsg(Head=pb.ReConnMsgHead(ConnID=1), secret=b"none")
    hello = command(kind, login if kind == pb.LOGIN else resume)
    async with world.shard(state__logins_per_s=4, state__login_timeout_ms=200) as state, Link(state) as link:
        crowd = [Client(link, world.conn_id()) for _ in range(5)]
        with time_stands_still(state):  # all come at one time, whatever the machine needs for it
            await link.events([(OPENED, client.conn_id, b"t127.0.0.1") for client in crowd])
            await link.events([(DATA, client.conn_id, pack(hello)) for client in crowd])
        answers = [await client.ack(kind) for client in crowd]
        last, told = crowd[-1], answers[-1]
        assert told.code == Code.LOGIN_LATER
        assert told.message.retry_ms >= 400
        assert metrics.PUT_OFF._value.get() > put_off
        connection = state.shard.connections[last.conn_id]
        await passed(state, told.message.retry_ms + 50)
        with time_stands_still(state):
            assert connection.phase is Phase.NEW
            assert connection.socket, "its login time-out begins after its turn"
            await last.send(hello)
            assert (await last.ack(kind)).code == (Code.OK if kind == pb.LOGIN else Code.SESSION_UNKNOWN)
