"""A client follows a REDIRECT: a second connection commits elsewhere, the first stands until then; nothing of it shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from plato.client import Phase
from plato.client.core.model import Effects, Session, Snapshot
from plato.client.core.moving import ways
from plato.client.core.session import Machine
from plato.core.codes import Code
from plato.wire.v1 import client_pb2 as pb

C = "d:conversation"
HERE = "127.0.0.1:8900"
FIRST, SECOND = Session(77, b"s"), Session(88, b"s")


def never() -> float:
    """Chance that takes nothing off."""
    return 0.0


def redirect(*ports: int) -> pb.RedirectMsg:
    return pb.RedirectMsg(gateways=[pb.RedirectGateway(ip="127.0.0.1", port=p, ws_port=p + 1) for p in ports])


class Line:
    """A machine that is live at HERE, and the far ends of its links."""

    def __init__(self, *, listing: bool = False) -> None:
        snapshot = Snapshot(device_id=5, user="alice", session=FIRST)
        self.machine = Machine(snapshot, gateways=[HERE], listing=listing, chance=never, transport="tcp")
        self.now_ms = 1_000
        self.states: list[Phase] = []
        self.machine.start(self.now_ms)
        if listing:
            self.take()
            self.machine.listed([HERE], self.now_ms)
        effects = self.take()
        assert effects.connects
        self.first = effects.connects[0][0]
        self.machine.opened(self.first, self.now_ms)
        self.take()
        self.receive(self.first, pb.ACK, pb.ACKMsg(Type=pb.RECONN, ConnID=77, user_id="alice", heartbeat_ms=60_000))
        (sync,) = bodies(self.take().frames, pb.SYNC, pb.SyncMsg)
        self.receive(self.first, pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=sync.ref, run=9))
        self.receive(self.first, pb.SYNCED, pb.SyncedMsg(ref=sync.ref))
        self.take()
        assert self.at(Phase.ONLINE)
        self.states.clear()

    def at(self, phase: Phase) -> bool:
        return self.machine.state.phase is phase

    def take(self) -> Effects:
        effects = self.machine.take(self.now_ms)
        self.states += [n.state.phase for n in effects.notices if hasattr(n, "state")]
        return effects

    def receive(self, link_no: int, kind: pb.CmdType.ValueType, body: Any, run: int = 0, push_no: int = 0) -> None:
        cmd = pb.MsgCmd(Type=kind, Payload=body.SerializeToString(), run=run, push_no=push_no)
        self.machine.frames(link_no, [cmd.SerializeToString()], self.now_ms)

    def redirect(self, *ports: int) -> Effects:
        self.receive(self.first, pb.REDIRECT, redirect(*ports))
        return self.take()

    def hello(self, effects: Effects) -> int:
        """The second link opens and says ReConn; returns its number."""
        assert effects.second is not None
        link_no = effects.second[0]
        assert self.machine.opened(link_no, self.now_ms)
        (reconn,) = bodies(self.take().second_frames, pb.RECONN, pb.ReConnMsg)
        assert (reconn.Head.ConnID, reconn.secret) == (FIRST.conn_id, FIRST.secret)
        return link_no

    def sync(self, link_no: int) -> int:
        """ReConn is answered on the second link; returns the ref of the Sync that follows."""
        self.receive(link_no, pb.ACK, pb.ACKMsg(Type=pb.RECONN, ConnID=88, user_id="alice"))
        (sync,) = bodies(self.take().second_frames, pb.SYNC, pb.SyncMsg)
        return int(sync.ref)

    def wait(self) -> Effects:
        due_ms = self.machine.deadline_ms()
        assert due_ms is not None
        self.now_ms = max(self.now_ms, due_ms)
        self.machine.tick(self.now_ms)
        return self.take()


def bodies(frames: Sequence[bytes], kind: int, into: Any) -> list[Any]:
    cmds = [pb.MsgCmd.FromString(f) for f in frames]
    return [into.FromString(cmd.Payload) for cmd in cmds if cmd.Type == kind]


def up_ids(effects: Effects) -> list[int]:
    return [up.Head.ClientID for up in bodies(effects.frames, pb.UP, pb.UPMsg)]


def test_a_redirect_moves_the_client_and_its_state_stays_online() -> None:
    line = Line()
    line.machine.send(C, bytes(15) + b"1", "", 0, b"before")
    assert up_ids(line.take()) == [1]
    effects = line.redirect(8910, 8920)
    assert effects.second == (line.first + 1, "tcp://127.0.0.1:8910")
    assert not effects.close
    second = line.hello(effects)
    ref = line.sync(second)
    line.machine.send(C, bytes(15) + b"2", "", 0, b"meanwhile")
    meanwhile = line.take()
    assert (meanwhile.link_no, up_ids(meanwhile)) == (line.first, [2]), "the first link is used until the other stands"
    line.receive(second, pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=ref, run=11))
    effects = line.take()
    assert effects.go_over
    assert effects.writes.meta["session"] == "88 73", "written before the first link is closed"
    assert effects.writes.meta["last_gateway"] == "tcp://127.0.0.1:8910"
    assert (effects.link_no, up_ids(effects)) == (second, [1, 2]), "what has no place is sent again there, in order"
    line.receive(second, pb.SYNCED, pb.SyncedMsg(ref=ref))
    line.take()
    assert line.machine.moves == 1
    assert set(line.states) == {Phase.ONLINE}
    assert line.machine.state.gateway == "tcp://127.0.0.1:8910"
    line.receive(line.first, pb.KICK, pb.KickMsg(code=Code.REPLACED))
    line.machine.closed(line.first, line.now_ms)
    assert line.at(Phase.ONLINE), "what the first link still says is of no interest"


def test_replaced_on_the_first_link_may_overtake_the_commit_on_the_second() -> None:
    line = Line()
    second = line.hello(line.redirect(8910))
    ref = line.sync(second)
    line.receive(line.first, pb.KICK, pb.KickMsg(code=Code.REPLACED))
    line.machine.closed(line.first, line.now_ms)
    assert line.take().close
    assert line.at(Phase.ONLINE)
    line.receive(second, pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=ref, run=11))
    effects = line.take()
    assert effects.go_over
    assert not effects.close, "it would close the new one"
    assert line.at(Phase.ONLINE)
    assert set(line.states) <= {Phase.ONLINE}


def test_a_page_says_that_the_second_link_committed_when_its_ack_was_lost() -> None:
    line = Line()
    second = line.hello(line.redirect(8910))
    line.receive(second, pb.SYNCED, pb.SyncedMsg(ref=line.sync(second)))
    assert line.take().go_over
    assert line.machine.deadline_ms() is not None


def test_replaced_before_our_own_sync_is_another_login() -> None:
    line = Line()
    line.hello(line.redirect(8910))
    line.receive(line.first, pb.KICK, pb.KickMsg(code=Code.REPLACED))
    effects = line.take()
    assert effects.second_close
    assert line.at(Phase.STOPPED)
    assert line.machine.state.code == Code.REPLACED


def test_replaced_by_somebody_else_meanwhile_is_found_by_the_wrong_secret() -> None:
    line = Line()
    second = line.hello(line.redirect(8910))
    ref = line.sync(second)
    line.receive(line.first, pb.KICK, pb.KickMsg(code=Code.REPLACED))
    line.take()
    line.receive(second, pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=ref, Code=Code.TRY_AGAIN))
    assert bodies(line.take().second_frames, pb.RECONN, pb.ReConnMsg), "it may have been an own one that was late"
    line.receive(second, pb.ACK, pb.ACKMsg(Type=pb.RECONN, Code=Code.SECRET_WRONG))
    line.take()
    assert line.at(Phase.STOPPED)
    assert line.machine.state.code == Code.REPLACED
    assert line.machine.deadline_ms() is None


def test_an_own_commit_whose_answer_was_lost_is_resumed_not_taken_for_another() -> None:
    line = Line()
    second = line.hello(line.redirect(8910))
    line.sync(second)
    line.machine.closed(second, line.now_ms)  # after it committed
    effects = line.take()
    assert effects.second_close
    assert effects.second is None
    assert line.at(Phase.ONLINE), "nothing is left to try, and the first link stands"
    line.receive(line.first, pb.KICK, pb.KickMsg(code=Code.REPLACED))
    line.take()
    assert line.at(Phase.OFFLINE)
    effects = line.wait()
    assert effects.connects
    line.machine.opened(effects.connects[0][0], line.now_ms)
    (reconn,) = bodies(line.take().frames, pb.RECONN, pb.ReConnMsg)
    assert reconn.Head.ConnID == FIRST.conn_id


@pytest.mark.parametrize("code", [Code.GATEWAY_FULL, Code.SESSION_UNKNOWN, Code.MALFORMED])
def test_a_way_that_fails_costs_nothing_and_the_next_is_tried(code: Code) -> None:
    line = Line()
    second = line.hello(line.redirect(8910, 8920))
    line.receive(second, pb.ACK, pb.ACKMsg(Type=pb.RECONN, Code=code))
    effects = line.take()
    assert effects.second_close
    assert effects.second == (second + 1, "tcp://127.0.0.1:8920")
    assert not effects.close
    assert "session" not in effects.writes.meta
    third = line.hello(effects)
    line.receive(third, pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=line.sync(third)))
    assert line.take().go_over
    assert set(line.states) == {Phase.ONLINE}


def test_without_a_way_the_list_is_asked_then_the_client_stays_until_the_next_redirect() -> None:
    line = Line(listing=True)
    effects = line.redirect(8910)
    assert effects.second is not None
    line.machine.closed(effects.second[0], line.now_ms)
    assert line.take().want_list
    line.machine.listed(["tcp://127.0.0.1:8900", "tcp://127.0.0.1:8910", "tcp://127.0.0.1:8930"], line.now_ms)
    effects = line.take()
    assert effects.second is not None
    assert effects.second[1] == "tcp://127.0.0.1:8930", "neither where it is nor where it was"
    line.machine.closed(effects.second[0], line.now_ms)
    effects = line.take()
    assert not effects.want_list
    assert effects.second is None
    assert line.at(Phase.ONLINE)
    assert line.redirect(8910).second is not None


def test_a_mute_gateway_is_given_up_after_three_unanswered() -> None:
    line = Line()
    second = line.hello(line.redirect(8910, 8920))
    again = 0
    while (effects := line.wait()).second is None:
        again += len(bodies(effects.second_frames, pb.RECONN, pb.ReConnMsg))
        assert line.now_ms < 60_000
    assert again == 2
    assert effects.second[0] > second
    line.now_ms += 10_000
    line.machine.tick(line.now_ms)
    assert line.take().second_close, "nor is one that does not even open"
    assert line.at(Phase.ONLINE)


def test_the_first_link_lost_on_the_way_is_no_gap_unless_the_second_fails_too() -> None:
    line = Line()
    second = line.hello(line.redirect(8910))
    line.machine.closed(line.first, line.now_ms)
    line.take()
    assert line.at(Phase.ONLINE)
    line.machine.closed(second, line.now_ms)
    line.take()
    assert line.at(Phase.OFFLINE)
    assert line.machine.moves == 0


def test_a_second_redirect_on_the_way_changes_nothing() -> None:
    line = Line()
    second = line.hello(line.redirect(8910))
    effects = line.redirect(8920)
    assert effects.second is None
    assert not effects.second_close
    line.receive(second, pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=line.sync(second)))
    assert line.take().go_over


def test_logout_ends_the_session_where_it_is() -> None:
    line = Line()
    second = line.hello(line.redirect(8910))
    line.machine.logout(line.now_ms)
    effects = line.take()
    assert effects.second_close
    assert bodies(effects.frames, pb.LOGOUT, pb.LogoutMsg)
    line = Line()
    second = line.hello(line.redirect(8910))
    ref = line.sync(second)
    line.machine.logout(line.now_ms)
    assert not bodies(line.take().frames, pb.LOGOUT, pb.LogoutMsg), "the Sync is out: the session may be there already"
    line.receive(second, pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=ref))
    effects = line.take()
    assert effects.link_no == second
    assert bodies(effects.frames, pb.LOGOUT, pb.LogoutMsg)


def test_close_closes_both_links() -> None:
    line = Line()
    line.hello(line.redirect(8910))
    line.machine.stop(None)
    effects = line.take()
    assert effects.close
    assert effects.second_close


def test_a_history_request_is_asked_again_where_the_client_went() -> None:
    line = Line()
    second = line.hello(line.redirect(8910))
    ref = line.machine.history(C, None, 10, line.now_ms)
    line.take()
    line.receive(second, pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=line.sync(second), run=3))
    effects = line.take()
    assert [pull.ref for pull in bodies(effects.frames, pb.PULL, pb.PullMsg)] == [ref]
    line.receive(second, pb.PULLED, pb.PulledMsg(ref=ref or 0, conversation_id=C))
    assert [n.ref for n in line.take().notices if hasattr(n, "ref")] == [ref]


def test_what_is_pushed_behind_the_commit_in_one_packet_is_read_as_the_new_links() -> None:
    line = Line()
    second = line.hello(line.redirect(8910))
    ref = line.sync(second)
    push = pb.PushMsg(MsgID=5, Content=b"yo", conversation_id=C, seq=1, from_user="bob")
    packet = [
        pb.MsgCmd(Type=pb.ACK, Payload=pb.ACKMsg(Type=pb.SYNC, ref=ref, run=11).SerializeToString()),
        pb.MsgCmd(Type=pb.PUSH, Payload=push.SerializeToString(), run=11, push_no=1),
        pb.MsgCmd(Type=pb.SYNCED, Payload=pb.SyncedMsg(ref=ref).SerializeToString()),
    ]
    line.machine.frames(second, [cmd.SerializeToString() for cmd in packet], line.now_ms)
    effects = line.take()
    assert [row.body for row in effects.writes.rows] == [b"yo"]
    (ack,) = bodies(effects.frames, pb.ACK, pb.ACKMsg)
    assert (ack.run, ack.push_no) == (11, 1)


@pytest.mark.parametrize(
    ("current", "transport", "found"),
    [
        ("127.0.0.1:8900", "tcp", "tcp://127.0.0.1:8910"),
        ("127.0.0.1:8900", "ws", "ws://127.0.0.1:8911/ws"),
        ("wss://chat.example/ws", "tcp", "wss://127.0.0.1:8911/ws"),
    ],
)
def test_ways_are_reached_as_the_present_one(current: str, transport: str, found: str) -> None:
    assert ways(redirect(8910), current, transport, never) == [found]


def test_clients_spread_over_the_first_ways_and_keep_the_order_of_the_others() -> None:
    def first(chance: float) -> list[int]:
        found = ways(redirect(1, 2, 3, 4, 5), "h:1", "tcp", lambda: chance)
        return [int(a.rpartition(":")[2]) for a in found]

    assert [first(c) for c in (0.0, 0.34, 0.99)] == [[1, 2, 3, 4, 5], [2, 1, 3, 4, 5], [3, 1, 2, 4, 5]]


def test_ipv6_and_what_cannot_be_used() -> None:
    message = pb.RedirectMsg(
        gateways=[
            pb.RedirectGateway(ip="::1", port=8900),
            pb.RedirectGateway(ip="", port=1),
            pb.RedirectGateway(ip="h"),
        ]
    )
    assert ways(message, "h:1", "tcp", never) == ["tcp://[::1]:8900"]


def test_each_told_timer_counts_by_itself() -> None:
    line = Line()
    assert line.machine.timing.repeat_min_ms == 2_000
    second = line.hello(line.redirect(8910))
    line.receive(second, pb.ACK, pb.ACKMsg(Type=pb.RECONN, ConnID=88, repeat_min_ms=70, max_body_bytes=9))
    (sync,) = bodies(line.take().second_frames, pb.SYNC, pb.SyncMsg)
    line.receive(second, pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=sync.ref))
    timing = line.machine.timing
    assert (timing.repeat_min_ms, timing.max_body_bytes) == (70, 9)
    assert (timing.heartbeat_ms, timing.reconnect_delay_ms) == (60_000, 0), "as the first answer said"
