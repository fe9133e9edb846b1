"""The race for a gateway: the first connection that stands wins, the others are given up, and only on it a login is sent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plato.client import Client, Phase
from plato.client.core.model import Effects, Session, Snapshot, Writes
from plato.client.core.session import Machine
from plato.client.store import Store
from plato.core.codes import Code
from plato.fakes.platform import Platform
from plato.fakes.platform_server import PlatformServer
from plato.wire.v1 import client_pb2 as pb

HELLOS = (pb.LOGIN, pb.RECONN)


class Racer:
    """A machine with a session to resume, and whatever its attempts come to."""

    def __init__(self, *gateways: str) -> None:
        snapshot = Snapshot(device_id=5, user="alice", session=Session(70, b"s"))
        self.machine = Machine(snapshot, gateways=gateways, listing=False, chance=lambda: 0.0)
        self.now_ms = 1_000
        self.machine.start(self.now_ms)

    def take(self) -> Effects:
        return self.machine.take(self.now_ms)

    def addresses(self) -> list[str]:
        return [address for _, address in self.take().connects]

    def wait(self) -> int:
        """Until there is something to do; returns how long that was."""
        due_ms = self.machine.deadline_ms()
        assert due_ms is not None
        waited, self.now_ms = max(0, due_ms - self.now_ms), max(self.now_ms, due_ms)
        self.machine.tick(self.now_ms)
        return waited

    def receive(self, kind: pb.CmdType.ValueType, body: Any) -> None:
        frame = pb.MsgCmd(Type=kind, Payload=body.SerializeToString()).SerializeToString()
        self.machine.frames(self.machine.link_no, [frame], self.now_ms)


def kinds(effects: Effects) -> list[int]:
    return [pb.MsgCmd.FromString(frame).Type for frame in effects.frames]


def test_the_next_gateway_is_tried_beside_one_that_is_silent() -> None:
    racer = Racer("a", "b", "c", "d")
    assert racer.addresses() == ["a"]
    assert racer.wait() == 250
    assert racer.addresses() == ["b"]
    assert racer.wait() == 250
    assert racer.addresses() == ["c"]
    assert racer.wait() == 4_500, "three at once are enough: the next one when the first is given up"
    effects = racer.take()
    assert effects.give_up == [1]
    assert effects.connects == [(4, "d")]


def test_a_gateway_that_refuses_is_not_waited_for() -> None:
    racer = Racer("a", "b", "c")
    racer.take()
    racer.machine.closed(1, racer.now_ms)
    assert racer.take().connects == [(2, "b")]
    racer.machine.closed(2, racer.now_ms)
    assert racer.take().connects == [(3, "c")]
    racer.machine.closed(3, racer.now_ms)
    assert racer.machine.state.phase is Phase.OFFLINE


def test_the_first_that_opens_wins_and_is_the_only_one_that_hears_of_us() -> None:
    racer = Racer("a", "b")
    racer.take()
    racer.wait()
    racer.take()
    assert racer.machine.opened(2, racer.now_ms)
    effects = racer.take()
    assert (effects.link_no, kinds(effects)) == (2, [pb.RECONN])
    assert effects.give_up == [1]
    assert racer.machine.state.gateway == "b"
    assert not racer.machine.opened(1, racer.now_ms), "it opened a moment later: nobody wants it"
    racer.machine.closed(1, racer.now_ms)
    assert racer.machine.state.phase is Phase.LOGGING_IN
    assert not racer.take().frames


def test_who_was_given_up_comes_first_when_the_winner_is_of_no_use() -> None:
    racer = Racer("a", "b", "c")
    racer.take()
    racer.wait()
    racer.take()
    racer.machine.opened(2, racer.now_ms)
    racer.take()
    racer.receive(pb.ERROR, pb.ErrorMsg(code=Code.GATEWAY_FULL))
    effects = racer.take()
    assert effects.close
    assert [address for _, address in effects.connects] == ["a"]
    racer.wait()
    assert racer.addresses() == ["c"]


def test_the_times_are_the_ones_that_the_server_told() -> None:
    racer = Racer("a", "b", "c")
    racer.take()
    racer.machine.opened(1, racer.now_ms)
    told = pb.ACKMsg(Type=pb.RECONN, ConnID=71, connect_delay_ms=40, connect_timeout_ms=900, heartbeat_ms=30_000)
    racer.receive(pb.ACK, told)
    racer.receive(pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=1, run=1))
    racer.take()
    assert racer.machine.state.phase is Phase.ONLINE
    racer.machine.closed(1, racer.now_ms)
    assert racer.wait() == 0
    assert racer.addresses() == ["a"], "the one that served last, if it lives"
    assert racer.wait() == 40
    assert racer.addresses() == ["b"]
    racer.wait()
    racer.take()
    assert racer.wait() == 900 - 2 * 40


def test_a_client_that_stops_gives_every_attempt_up() -> None:
    racer = Racer("a", "b")
    racer.take()
    racer.wait()
    racer.take()
    racer.machine.stop(None)
    effects = racer.take()
    assert effects.give_up == [1, 2]
    assert not effects.connects
    assert not racer.machine.opened(2, racer.now_ms)
    assert racer.machine.deadline_ms() is None


@pytest.mark.parametrize("kind", ["first link", "second link"])
def test_who_is_told_its_turn_waits_for_it_on_the_same_socket(kind: str) -> None:
    racer = Racer("a")
    racer.take()
    racer.machine.opened(1, racer.now_ms)
    assert kinds(racer.take()) == [pb.RECONN]
    if kind == "second link":
        racer.receive(pb.ACK, pb.ACKMsg(Type=pb.RECONN, ConnID=71, heartbeat_ms=60_000))
        racer.receive(pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=1, run=1))
        racer.receive(pb.SYNCED, pb.SyncedMsg(ref=1))
        racer.receive(pb.REDIRECT, pb.RedirectMsg(gateways=[pb.RedirectGateway(ip="10.0.0.9", port=1)]))
        effects = racer.take()
        assert effects.second is not None
        racer.machine.opened(effects.second[0], racer.now_ms)
        racer.take()
        link_no = effects.second[0]
    else:
        link_no = 1
    later = pb.ACKMsg(Type=pb.RECONN, Code=Code.LOGIN_LATER, retry_ms=7_000)
    frame = pb.MsgCmd(Type=pb.ACK, Payload=later.SerializeToString()).SerializeToString()
    racer.machine.frames(link_no, [frame], racer.now_ms)
    effects = racer.take()
    assert not effects.close
    assert not effects.second_close
    assert racer.wait() == 7_000
    effects = racer.take()
    again = effects.frames if kind == "first link" else effects.second_frames
    assert [pb.MsgCmd.FromString(f).Type for f in again] == [pb.RECONN]


def test_gateways_that_name_a_time_are_not_asked_before_the_least_of_them() -> None:
    racer = Racer("a", "b")
    for retry_ms in (9_000, 4_000):
        (link_no, _), *_ = racer.take().connects
        racer.machine.opened(link_no, racer.now_ms)
        racer.receive(pb.ERROR, pb.ErrorMsg(code=Code.ADDRESS_BUSY, retry_ms=retry_ms))
    assert racer.machine.state.phase is Phase.OFFLINE
    assert racer.machine.state.code == Code.ADDRESS_BUSY
    assert racer.wait() == 4_000


def test_no_told_time_keeps_a_client_away_for_ever() -> None:
    racer = Racer("a")
    racer.take()
    racer.machine.opened(1, racer.now_ms)
    racer.take()
    racer.receive(pb.ACK, pb.ACKMsg(Type=pb.RECONN, Code=Code.LOGIN_LATER, retry_ms=2**32 - 1))
    assert racer.wait() == 600_000
    racer.receive(pb.ERROR, pb.ErrorMsg(code=Code.ADDRESS_BUSY, retry_ms=2**32 - 1))
    assert racer.wait() == 600_000


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_however_a_race_goes_one_link_says_hello_at_a_time(data: st.DataObject) -> None:
    racer = Racer("a", "b", "c", "d", "e")
    running: dict[int, str] = {}
    standing = 0
    for _ in range(40):
        effects = racer.take()
        for link_no in effects.give_up:
            running.pop(link_no, None)
        if effects.close:
            standing = 0
        running |= dict(effects.connects)
        assert len(running) <= 3
        hellos = [kind for kind in kinds(effects) if kind in HELLOS]
        assert len(hellos) <= 1
        if hellos:
            assert effects.link_no == standing
            assert not running, "the others are given up in the same round"
        what = data.draw(st.sampled_from(["opens", "fails", "time", "late", "lost"]))
        if what == "time":
            racer.wait()
        elif what == "lost" and standing:
            racer.machine.closed(standing, racer.now_ms)
            standing = 0
        elif what == "late":
            assert not racer.machine.opened(1_000, racer.now_ms)
        elif running:
            link_no = data.draw(st.sampled_from(sorted(running)))
            del running[link_no]
            if what == "opens":
                assert racer.machine.opened(link_no, racer.now_ms)
                standing = link_no
            else:
                racer.machine.closed(link_no, racer.now_ms)


async def test_a_mute_gateway_is_overtaken_and_its_socket_closed(tmp_path: Path) -> None:
    """On real sockets: the first one accepts and never answers the upgrade to WebSocket."""
    ended = asyncio.Event()
    asked: list[bytes] = []

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            asked.append(data)
        ended.set()
        writer.close()

    listener = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    platform = Platform()
    store = Store(tmp_path / "a.db", 5)
    async with PlatformServer(platform) as server:
        names = [f"ws://127.0.0.1:{port}/ws", server.ws_address]
        store.apply(Writes(meta={"last_gateway": names[0]}))  # the one that served last comes first
        store.close()
        async with Client("alice", tmp_path / "a.db", names, user="alice", transport="ws") as client:
            async for state in client.states():
                if state.phase is Phase.ONLINE:
                    break
            assert client.state.gateway == server.ws_address
            await asyncio.wait_for(ended.wait(), 10)
    listener.close()
    await listener.wait_closed()
    assert len(asked) == 1
    assert platform.logins == 1
    assert server.accepted == 1
