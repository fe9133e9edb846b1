"""The client's machine: what it does on each frame, code and timer; a hand-made connection, no network."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plato.client import ConversationChanged, Phase
from plato.client.core.model import Effects, RefusedMessage, Session, Snapshot
from plato.client.core.session import Machine
from plato.client.store import Store
from plato.core.codes import Code, text
from plato.core.conversations import dialogue_id
from plato.fakes.platform import Platform
from plato.wire.v1 import client_pb2 as pb

C = dialogue_id("alice", "bob")


def never() -> float:
    """Chance that takes nothing off."""
    return 0.0


def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


class Line:
    """A machine that is connected, logged in and committed by hand."""

    def __init__(self, session: Session | None = None, live: bool = True) -> None:
        snapshot = Snapshot(device_id=5, user="alice", session=session)
        self.machine = Machine(snapshot, gateways=["here", "there"], listing=False, chance=never)
        self.now_ms = 1_000
        self.machine.start(self.now_ms)
        effects = self.take()
        if effects.want_token:
            self.machine.tokened("token", self.now_ms)
            effects = self.take()
        assert effects.connects
        assert self.machine.opened(effects.connects[0][0], self.now_ms)
        self.hello = self.sent()
        if live:
            self.welcome()
            (sync,) = self.sent(pb.SYNC)
            self.receive(pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=sync.ref, run=9))
            self.receive(pb.SYNCED, pb.SyncedMsg(ref=sync.ref))
            assert self.phase is Phase.ONLINE

    @property
    def phase(self) -> Phase:
        return self.machine.state.phase

    def welcome(self) -> None:
        kind = self.hello[0][0]
        self.receive(pb.ACK, pb.ACKMsg(Type=kind, ConnID=77, secret=b"s", user_id="alice"))

    def take(self) -> Effects:
        return self.machine.take(self.now_ms)

    def receive(self, kind: pb.CmdType.ValueType, body: Any, run: int = 0, push_no: int = 0) -> None:
        cmd = pb.MsgCmd(Type=kind, Payload=body.SerializeToString(), run=run, push_no=push_no)
        self.machine.frames(self.machine.link_no, [cmd.SerializeToString()], self.now_ms)

    def sent(self, kind: int | None = None) -> list[Any]:
        """What is sent now: [(type, body)], or the bodies of one type."""
        into: dict[int, Any] = {
            pb.LOGIN: pb.LoginMsg, pb.RECONN: pb.ReConnMsg, pb.SYNC: pb.SyncMsg, pb.PULL: pb.PullMsg, pb.UP: pb.UPMsg,
            pb.ACK: pb.ACKMsg, pb.HEARTBEAT: pb.HeartbeatMsg, pb.LOGOUT: pb.LogoutMsg,
        }  # fmt: skip
        cmds = [pb.MsgCmd.FromString(f) for f in self.take().frames]
        found = [(cmd.Type, into[cmd.Type].FromString(cmd.Payload)) for cmd in cmds]
        return found if kind is None else [body for which, body in found if which == kind]

    def wait(self) -> None:
        due_ms = self.machine.deadline_ms()
        assert due_ms is not None
        self.now_ms = max(self.now_ms, due_ms)
        self.machine.tick(self.now_ms)


def test_r2_the_first_sync_commits_and_only_then_the_session_is_kept() -> None:
    line = Line(live=False)
    assert line.hello[0][0] == pb.LOGIN
    line.machine.send(C, key(1), "", 0, b"x")
    line.welcome()
    effects = line.take()
    assert [pb.MsgCmd.FromString(f).Type for f in effects.frames] == [pb.SYNC], "no uplink before the commit"
    assert "session" not in effects.writes.meta
    line.receive(pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=1, run=9))
    effects = line.take()
    assert effects.writes.meta["session"] == "77 73"
    assert [pb.MsgCmd.FromString(f).Type for f in effects.frames] == [pb.UP]


def test_r2_try_again_begins_at_the_hello_on_the_same_socket() -> None:
    line = Line(Session(70, b"s"), live=False)
    (kind, reconn) = line.hello[0]
    assert (kind, reconn.Head.ConnID, reconn.secret) == (pb.RECONN, 70, b"s")
    for _ in range(2):
        line.welcome()
        (sync,) = line.sent(pb.SYNC)
        line.receive(pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=sync.ref, Code=Code.TRY_AGAIN))
        line.hello = line.sent()
        assert (line.hello[0][0], line.hello[0][1].Head.ConnID) == (pb.RECONN, 70)
    line.welcome()
    (sync,) = line.sent(pb.SYNC)
    line.receive(pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=sync.ref, Code=Code.TRY_AGAIN))
    effects = line.take()
    assert effects.close, "a socket on which it does not help is left"
    assert effects.connects


def test_r2_a_page_says_that_the_sync_committed_when_its_ack_was_lost() -> None:
    line = Line(live=False)
    line.welcome()
    line.sent()
    line.receive(pb.SYNCED, pb.SyncedMsg(ref=1))
    assert line.phase is Phase.ONLINE


@pytest.mark.parametrize("code", [Code.SESSION_UNKNOWN, Code.SECRET_WRONG, Code.LOGIN_FIRST])
def test_a_dead_session_becomes_a_login_on_the_same_socket(code: Code) -> None:
    line = Line(Session(70, b"s"), live=False)
    line.receive(pb.ACK, pb.ACKMsg(Type=pb.RECONN, Code=code))
    effects = line.take()
    assert effects.want_token
    assert not effects.fresh_token
    assert effects.writes.meta["session"] == ""
    line.machine.tokened("token", line.now_ms)
    (login,) = line.sent(pb.LOGIN)
    assert (login.token, login.Head.DeviceID) == ("token", 5)


def test_codes_of_the_session_reach_a_live_connection() -> None:
    line = Line()
    line.machine.send(C, key(1), "", 0, b"x")
    line.sent()
    line.receive(pb.ERROR, pb.ErrorMsg(code=Code.LOGIN_FIRST, type=pb.UP))
    line.receive(pb.ERROR, pb.ErrorMsg(code=Code.LOGIN_FIRST, type=pb.UP))  # of a second UP: says nothing new
    line.hello = line.sent()
    assert [kind for kind, _ in line.hello] == [pb.LOGIN]
    line.welcome()
    (sync,) = line.sent(pb.SYNC)
    line.receive(pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=sync.ref))
    assert [up.client_msg_id for up in line.sent(pb.UP)] == [key(1)]


@pytest.mark.parametrize("code", [Code.REPLACED, Code.KICKED, Code.LOGGED_OUT, Code.MALFORMED, 417, 999])
@pytest.mark.parametrize("how", ["kick", "error"])
def test_a_final_code_stops_the_client_for_good(code: int, how: str) -> None:
    line = Line()
    if how == "kick":
        line.receive(pb.KICK, pb.KickMsg(code=code))
    elif code == 999:
        return  # in an ERROR this may be about a request
    else:
        line.receive(pb.ERROR, pb.ErrorMsg(code=code))
    effects = line.take()
    assert (line.phase, line.machine.state.code) == (Phase.STOPPED, code)
    assert effects.close
    assert effects.writes.meta["session"] == ""
    assert line.machine.deadline_ms() is None
    line.machine.closed(line.machine.link_no, line.now_ms)
    assert not line.take()


@pytest.mark.parametrize("code", [Code.SLOW_READER, Code.HEARTBEAT_TIMEOUT, Code.GATEWAY_CLOSING, Code.SLOT_LOST, 250])
def test_a_reconnect_code_resumes_with_the_session(code: int) -> None:
    line = Line()
    before = line.machine.state.gateway
    line.receive(pb.ERROR, pb.ErrorMsg(code=code))
    assert line.take().close
    assert line.phase is Phase.OFFLINE
    line.wait()
    effects = line.take()
    assert effects.connects
    assert (effects.connects[0][1] == before) is (code != Code.GATEWAY_CLOSING)
    assert line.machine.opened(effects.connects[0][0], line.now_ms)
    (reconn,) = line.sent(pb.RECONN)
    assert (reconn.Head.ConnID, reconn.secret) == (77, b"s")


def test_a_full_gateway_is_left_at_once() -> None:
    line = Line(live=False)
    first = line.machine.state.gateway
    line.receive(pb.ERROR, pb.ErrorMsg(code=Code.GATEWAY_FULL))
    effects = line.take()
    assert effects.connects
    assert effects.connects[0][1] != first
    line.machine.closed(effects.connects[0][0], line.now_ms)
    assert line.phase is Phase.OFFLINE, "none is left: back-off"
    assert line.machine.deadline_ms() == line.now_ms + 250


def test_failed_rounds_back_off_exponentially() -> None:
    line = Line(live=False)
    waits = []
    for _ in range(10):
        while line.phase is not Phase.OFFLINE:
            line.machine.closed(line.machine.link_no, line.now_ms)
        before = line.now_ms
        line.wait()
        waits.append(line.now_ms - before)
    assert waits == [250, 500, 1_000, 2_000, 4_000, 5_000, 5_000, 5_000, 5_000, 5_000]


def test_rounds_that_a_code_ended_back_off_further() -> None:
    """Full gateways answer: they are spared more than silence, whose code is forgotten once it is not the reason."""
    line = Line(live=False)
    waits = []
    for _ in range(9):
        while line.phase is not Phase.OFFLINE:
            line.receive(pb.KICK, pb.KickMsg(code=Code.GATEWAY_FULL))
            if line.phase is Phase.CONNECTING:
                assert line.machine.opened(line.machine.link_no, line.now_ms)
        assert line.machine.state.code == Code.GATEWAY_FULL
        before = line.now_ms
        line.wait()
        waits.append(line.now_ms - before)
        line.machine.opened(line.machine.link_no, line.now_ms)
    assert waits == [250, 500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000]
    while line.phase is not Phase.OFFLINE:
        line.machine.closed(line.machine.link_no, line.now_ms)
    assert line.machine.state.code is None
    assert line.machine.next_round_ms == line.now_ms + 5_000


def test_a_user_who_waits_ends_the_back_off_once_a_second() -> None:
    line = Line(live=False)
    for n in range(6):
        while line.phase is not Phase.OFFLINE:
            line.machine.closed(line.machine.link_no, line.now_ms)
        if n < 5:
            line.wait()
    assert line.machine.next_round_ms == line.now_ms + 5_000
    line.machine.hurry(line.now_ms)
    assert line.machine.next_round_ms == line.now_ms + 1_000, "a round has just begun"
    line.now_ms += 400
    line.machine.hurry(line.now_ms)
    assert line.machine.deadline_ms() == line.now_ms + 600
    line.wait()
    assert line.phase is Phase.CONNECTING
    line.machine.hurry(line.now_ms)
    assert line.machine.next_round_ms is None
    while line.phase is not Phase.OFFLINE:
        line.machine.closed(line.machine.link_no, line.now_ms)
    line.now_ms += 3_000
    line.machine.hurry(line.now_ms)
    assert line.machine.deadline_ms() == line.now_ms, "the last round is long ago"


def test_a_connection_that_does_not_stay_makes_no_storm() -> None:
    """Accepted, committed, cut, again and again: a few are nobody's fault, then each loss waits longer."""
    line = Line()
    waits = []
    for _ in range(9):
        line.machine.closed(line.machine.link_no, line.now_ms)
        before = line.now_ms
        line.wait()
        waits.append(line.now_ms - before)
        effects = line.take()
        assert effects.connects
        line.machine.opened(effects.connects[0][0], line.now_ms)
        line.hello = line.sent()
        line.welcome()
        (sync,) = line.sent(pb.SYNC)
        line.receive(pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=sync.ref))
    assert waits == [0, 0, 0, 0, 250, 500, 1_000, 2_000, 4_000]
    line.now_ms += 5_000
    line.machine.closed(line.machine.link_no, line.now_ms)
    before = line.now_ms
    line.wait()
    assert line.now_ms == before, "it stayed for a while: only the random delay, which is none here"


def test_heartbeats_beat_and_carry_what_is_stored() -> None:
    line = Line()
    line.receive(pb.PUSH, push(1), run=9, push_no=1)
    assert [(a.run, a.push_no) for a in line.sent(pb.ACK)] == [(9, 1)]
    line.wait()
    assert line.now_ms == 31_000
    (beat,) = line.sent(pb.HEARTBEAT)
    assert (beat.run, beat.push_no) == (9, 1)
    line.receive(pb.ACK, pb.ACKMsg(Type=pb.HEARTBEAT, run=9, push_no=3, heartbeat_ms=10_000))
    assert len(line.sent(pb.SYNC)) == 1, "two pushes were lost"
    line.wait()
    assert line.machine.timing.heartbeat_ms == 10_000


def test_a_heartbeat_that_stays_unanswered_three_times_is_the_end() -> None:
    line = Line()
    here = line.machine.state.gateway
    while line.phase is Phase.ONLINE:
        line.wait()
    assert line.now_ms == 31_000 + 14_000
    line.take()
    line.wait()
    effects = line.take()
    assert effects.connects
    assert effects.connects[0][1] != here


def push(seq: int, prev_seq: int | None = None, conversation_id: str = C, from_user: str = "bob", **more: Any) -> Any:
    prev = seq - 1 if prev_seq is None else prev_seq
    return pb.PushMsg(MsgID=seq, conversation_id=conversation_id, seq=seq, prev_seq=prev, from_user=from_user, **more)


def pulled(pull: Any, rows: list[Any], first: int, last: int, newest: int) -> Any:
    return pb.PulledMsg(
        ref=pull.ref,
        conversation_id=pull.conversation_id,
        rows=rows,
        covered_from=first,
        covered_to=last,
        newest_seq=newest,
    )


def test_r4_an_early_push_is_acknowledged_after_its_gap_is_stored() -> None:
    line = Line()
    line.receive(pb.PUSH, push(1), run=9, push_no=1)
    line.receive(pb.PUSH, push(4), run=9, push_no=2)
    effects = line.take()
    assert [r.seq for r in effects.writes.rows] == [1]
    types = [pb.MsgCmd.FromString(f).Type for f in effects.frames]
    assert sorted(types) == [pb.ACK, pb.PULL]
    ack = next(pb.ACKMsg.FromString(pb.MsgCmd.FromString(f).Payload) for f in effects.frames if f[1] == pb.ACK)
    assert ack.push_no == 1
    rows = [push(2), push(3)]
    line.receive(
        pb.PULLED, pb.PulledMsg(ref=2, conversation_id=C, rows=rows, covered_from=2, covered_to=3, newest_seq=4)
    )
    effects = line.take()
    assert [r.seq for r in effects.writes.rows] == [2, 3, 4]
    assert effects.writes.places[C].cursor == 4
    (ack,) = [pb.ACKMsg.FromString(pb.MsgCmd.FromString(f).Payload) for f in effects.frames]
    assert ack.push_no == 2


def test_r4_a_jump_syncs_and_asks_again_for_what_is_accepted() -> None:
    line = Line()
    line.machine.send(C, key(1), "", 0, b"x")
    line.sent()
    line.receive(pb.ACK, pb.ACKMsg(Type=pb.UP, client_msg_id=key(1), ClientID=1, conversation_id=C))
    line.receive(pb.NOTIFY, pb.NotifyMsg(), run=9, push_no=3)  # a receipt, a refusal, was among the lost ones
    (sync,) = line.sent(pb.SYNC)
    line.receive(pb.SYNCED, pb.SyncedMsg(ref=sync.ref))
    sent = line.sent()
    assert [kind for kind, _ in sent] == [pb.UP, pb.ACK]
    line.receive(pb.RECEIPT, pb.ReceiptMsg(code=Code.NOT_STORABLE, client_msg_id=key(1), conversation_id=C), 9, 4)
    effects = line.take()
    assert [(e.client_id, code) for e, code, _ in effects.writes.refused] == [(1, Code.NOT_STORABLE)]
    assert effects.writes.unqueued


@pytest.mark.parametrize(
    ("said", "kept"),
    [("no links here", "no links here"), (text(Code.REFUSED_BY_HOOK), ""), ("", ""), ("x" * 900, "x" * 500)],
)
def test_the_words_of_a_refusal_are_kept_where_they_say_more_than_the_code(said: str, kept: str) -> None:
    line = Line()
    line.machine.send(C, key(1), "", 0, b"x")
    line.sent()
    told = pb.ReceiptMsg(code=Code.REFUSED_BY_HOOK, msg=said, client_msg_id=key(1), conversation_id=C)
    line.receive(pb.RECEIPT, told, 9, 1)
    effects = line.take()
    assert RefusedMessage(key(1), Code.REFUSED_BY_HOOK, kept) in effects.notices
    store = Store(":memory:", 1)
    store.apply(effects.writes)
    assert [(e.client_msg_id, code, detail) for e, code, detail in store.refused(C)] == [
        (key(1), Code.REFUSED_BY_HOOK, kept)
    ]
    store.close()


def test_r4_losses_during_a_sync_bring_one_more() -> None:
    line = Line()
    line.receive(pb.PUSH, push(1), run=9, push_no=2)
    (first,) = line.sent(pb.SYNC)
    line.receive(pb.PUSH, push(2), run=9, push_no=4)
    line.receive(pb.PUSH, push(3), run=9, push_no=6)
    assert line.sent(pb.SYNC) == []
    line.receive(pb.SYNCED, pb.SyncedMsg(ref=first.ref))
    assert line.machine.thread(C)
    sent = line.sent()
    assert [kind for kind, _ in sent] == [pb.SYNC], "and nothing is acknowledged yet"
    line.receive(pb.SYNCED, pb.SyncedMsg(ref=sent[0][1].ref))
    assert [a.push_no for a in line.sent(pb.ACK)] == [6]


def test_m19_a_repeated_receipt_settles_once() -> None:
    line = Line()
    line.machine.send(C, key(1), "", 0, b"x")
    line.sent()
    receipt = pb.ReceiptMsg(client_msg_id=key(1), conversation_id=C, msg_id=8, seq=1, client_id=1)
    line.receive(pb.RECEIPT, receipt, 9, 1)  # overtakes the ACK, and implies it
    effects = line.take()
    assert [(r.seq, r.body, r.from_user) for r in effects.writes.rows] == [(1, b"x", "alice")]
    assert len(effects.writes.unqueued) == 1
    line.receive(pb.RECEIPT, receipt, 9, 2)
    line.receive(pb.ACK, pb.ACKMsg(Type=pb.UP, client_msg_id=key(1), ClientID=1, conversation_id=C))
    effects = line.take()
    assert not effects.writes.rows
    assert not effects.writes.unqueued


def test_an_own_row_in_a_pull_settles_its_message() -> None:
    line = Line()
    line.machine.send(C, key(1), "", 0, b"x")
    line.sent()
    line.receive(pb.PUSH, push(2), run=9, push_no=1)
    line.receive(pb.SYNCED, pb.SyncedMsg(ref=99))  # of nothing that is asked
    (sync,) = line.sent(pb.SYNC)
    item = pb.SyncedItem(conversation_id=C, newest_seq=2)
    line.receive(pb.SYNCED, pb.SyncedMsg(ref=sync.ref, items=[item]))
    (pull,) = line.sent(pb.PULL)
    own = push(1, from_user="alice", client_msg_id=key(1), Content=b"x")
    line.receive(
        pb.PULLED, pb.PulledMsg(ref=pull.ref, rows=[own], conversation_id=C, covered_from=1, covered_to=1, newest_seq=2)
    )
    effects = line.take()
    assert [r.seq for r in effects.writes.rows] == [1, 2]
    assert [e.client_id for e in effects.writes.unqueued] == [1]


def test_a_row_of_somebody_else_with_our_key_settles_nothing() -> None:
    line = Line()
    line.machine.send(C, key(1), "", 0, b"x")
    line.receive(pb.PUSH, push(1, client_msg_id=key(1)), run=9, push_no=1)
    assert not line.take().writes.unqueued


def test_an_unreadable_conversation_ends_its_gap() -> None:
    line = Line()
    line.receive(pb.NOTIFY, pb.NotifyMsg(newest=[pb.Cursor(conversation_id=C, seq=5)]), 9, 1)
    (sync,) = line.sent(pb.SYNC)
    line.receive(pb.SYNCED, pb.SyncedMsg(ref=sync.ref))
    (pull,) = line.sent(pb.PULL)
    line.receive(pb.PULLED, pb.PulledMsg(ref=pull.ref, code=Code.NOT_A_MEMBER, conversation_id=C))
    assert [a.push_no for a in line.sent(pb.ACK)] == [1]


def test_whom_a_dialogue_is_with_is_asked_where_only_own_rows_came() -> None:
    """Another device of this user began it, and nobody answered yet: the rows do not say with whom."""
    line = Line()
    line.receive(pb.PUSH, push(1, from_user="alice"), run=9, push_no=1)
    (sync,) = line.sent(pb.SYNC)
    assert list(sync.cursors) == [pb.Cursor(conversation_id=C, seq=0)], (
        "one too low: it is listed though nothing is newer"
    )
    line.receive(pb.PUSH, push(2, from_user="alice"), run=9, push_no=2)
    assert line.sent(pb.SYNC) == []
    line.receive(
        pb.SYNCED, pb.SyncedMsg(ref=sync.ref, items=[pb.SyncedItem(conversation_id=C, newest_seq=2, peer="bob")])
    )
    effects = line.take()
    assert effects.writes.places[C].peer == "bob"
    assert ConversationChanged(C) in effects.notices
    kinds = [pb.MsgCmd.FromString(f).Type for f in effects.frames]
    assert pb.SYNC in kinds, "the second row came while the first Sync ran"
    line.receive(pb.PUSH, push(3, from_user="alice"), run=9, push_no=3)
    line.receive(pb.SYNCED, pb.SyncedMsg(ref=sync.ref + 1))
    assert line.sent(pb.SYNC) == []


def test_what_the_other_one_writes_says_whom_a_dialogue_is_with() -> None:
    line = Line()
    line.receive(pb.PUSH, push(1), run=9, push_no=1)
    effects = line.take()
    assert effects.writes.places[C].peer == "bob"
    assert pb.SYNC not in [pb.MsgCmd.FromString(f).Type for f in effects.frames]
    me = dialogue_id("alice", "alice")
    line.receive(pb.PUSH, push(1, from_user="alice", conversation_id=me), run=9, push_no=2)
    assert line.take().writes.places[me].peer == "alice"


def test_what_many_are_told_at_once_is_pulled_once_at_a_random_moment() -> None:
    line = Line()
    line.machine._traffic._chance = lambda: 0.5
    line.receive(pb.PUSH, push(1), run=9, push_no=1)
    line.sent()

    def told(seq: int, push_no: int) -> None:
        newest = [pb.Cursor(conversation_id=C, seq=seq)]
        line.receive(pb.NOTIFY, pb.NotifyMsg(newest=newest, within_ms=400), 9, push_no)

    told(3, 2)
    line.now_ms += 100
    told(5, 3)
    assert line.sent() == [], "neither pulled nor acknowledged"
    line.wait()
    assert line.now_ms == 1_200, "the second one did not put it off"
    (pull,) = line.sent(pb.PULL)
    line.receive(pb.PULLED, pulled(pull, [push(n) for n in range(2, 6)], 2, 5, 5))
    assert [a.push_no for a in line.sent(pb.ACK)] == [3]
    told(6, 4)
    line.receive(pb.PUSH, push(7), run=9, push_no=5)  # shows the gap by itself
    assert len(line.sent(pb.PULL)) == 1


def test_a_new_member_of_a_large_group_syncs_at_a_random_moment_too() -> None:
    line = Line()
    line.machine._traffic._chance = lambda: 0.5
    line.receive(pb.NOTIFY, pb.NotifyMsg(newest=[pb.Cursor(conversation_id=C, seq=9)], within_ms=1_000), 9, 1)
    assert line.sent() == []
    line.wait()
    assert line.now_ms == 1_500
    assert len(line.sent(pb.SYNC)) == 1


def test_a_pull_that_moves_nothing_is_asked_later() -> None:
    line = Line()
    line.receive(pb.PUSH, push(1), run=9, push_no=1)
    line.receive(pb.PUSH, push(5), run=9, push_no=2)
    (pull,) = line.sent(pb.PULL)
    empty = pb.PulledMsg(ref=pull.ref, conversation_id=C, covered_from=2, covered_to=1, newest_seq=1)
    line.receive(pb.PULLED, empty)
    assert line.sent() == []
    line.wait()
    assert [p.ref for p in line.sent(pb.PULL)] == [pull.ref]
    assert line.now_ms == 1_250


def test_pulls_stay_few() -> None:
    line = Line()
    newest = [pb.Cursor(conversation_id=f"c{n}", seq=5) for n in range(50)]
    items = [pb.SyncedItem(conversation_id=c.conversation_id, newest_seq=5) for c in newest]
    line.receive(pb.NOTIFY, pb.NotifyMsg(newest=newest), 9, 1)
    (sync,) = line.sent(pb.SYNC)
    line.receive(pb.SYNCED, pb.SyncedMsg(ref=sync.ref, items=items))
    done, pulls = 0, line.sent(pb.PULL)
    while pulls:
        assert len(pulls) <= 2
        for pull in pulls:
            done += 1
            rows = [push(n, conversation_id=pull.conversation_id) for n in range(1, 6)]
            line.receive(pb.PULLED, pulled(pull, rows, 1, 5, 5))
        sent = line.sent()
        pulls = [body for kind, body in sent if kind == pb.PULL]
    assert done == 50
    assert [a.push_no for kind, a in sent if kind == pb.ACK] == [1]


@pytest.mark.parametrize(
    "broken",
    [
        b"\xff\xff\xff",
        pb.MsgCmd(Type=pb.PUSH, Payload=b"\xff").SerializeToString(),
        pb.MsgCmd(Type=pb.PUSH, Payload=pb.PushMsg(seq=1 << 63).SerializeToString()).SerializeToString(),
        pb.MsgCmd(Type=pb.PUSH, Payload=pb.PushMsg(seq=3, prev_seq=3).SerializeToString()).SerializeToString(),
    ],
)
def test_an_unreadable_frame_ends_the_link_not_the_client(broken: bytes) -> None:
    line = Line()
    line.machine.frames(line.machine.link_no, [broken], line.now_ms)
    assert line.take().close
    assert line.phase is Phase.OFFLINE


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_no_bytes_break_the_machine(frames: list[bytes]) -> None:
    line = Line()
    line.machine.frames(line.machine.link_no, frames, line.now_ms)
    line.take()


COUNTS = st.integers(0, 2**64 - 1)
FIELDS: dict[str, Any] = {
    "code": st.sampled_from(list(Code)),
    "Code": st.sampled_from(list(Code)),
    "type": st.integers(0, 16),
    "Type": st.integers(0, 16),
    "ref": st.integers(0, 3),
    "more": st.booleans(),
    "covered_id": st.text(max_size=3),
    "conversation_id": st.just(C),
    "client_msg_id": st.just(key(1)),
    "heartbeat_ms": st.integers(0, 2**32 - 1),
}


def any_of(into: Any, *fields: str, **fixed: Any) -> Any:
    """A strategy of messages in which these fields say anything."""
    return st.builds(into, **{name: FIELDS.get(name, COUNTS) for name in fields}, **fixed)


def list_of(made: Any) -> Any:
    return st.lists(made, max_size=2)


ANYTHING = st.one_of(
    st.tuples(st.just(pb.ACK), any_of(pb.ACKMsg, "Code", "Type", "ref", "run", "push_no", "heartbeat_ms")),
    st.tuples(st.just(pb.ERROR), any_of(pb.ErrorMsg, "code", "type", "ref")),
    st.tuples(st.just(pb.NOTIFY), any_of(pb.NotifyMsg, newest=list_of(any_of(pb.Cursor, "conversation_id", "seq")))),
    st.tuples(
        st.just(pb.SYNCED),
        any_of(
            pb.SyncedMsg,
            "ref",
            "more",
            "covered_id",
            items=list_of(any_of(pb.SyncedItem, "conversation_id", "newest_seq", "first_cursor")),
        ),
    ),
    st.tuples(
        st.just(pb.PULLED),
        any_of(
            pb.PulledMsg,
            "ref",
            "covered_from",
            "covered_to",
            "newest_seq",
            rows=list_of(any_of(pb.PushMsg, "conversation_id", "MsgID", seq=st.integers(1, 50))),
        ),
    ),
    st.tuples(
        st.just(pb.RECEIPT),
        any_of(pb.ReceiptMsg, "code", "client_msg_id", "conversation_id", "msg_id", "seq", "prev_seq"),
    ),
    st.tuples(st.just(pb.PUSH), any_of(pb.PushMsg, "conversation_id", "MsgID", "seq", "prev_seq")),
)


@given(st.data())
def test_no_server_breaks_the_machine_or_its_store(data: st.DataObject) -> None:
    """Well-formed frames that say anything: what is to be written fits the store, and the machine goes on or stops."""
    line = Line()
    line.machine.send(C, key(1), "", 0, b"x")
    store = Store(":memory:", 5)
    try:
        for kind, body in data.draw(st.lists(ANYTHING, max_size=6)):
            line.receive(kind, body, data.draw(st.integers(0, 10)), data.draw(COUNTS))
            effects = line.take()
            if effects.writes:
                store.apply(effects.writes)
            due_ms = line.machine.deadline_ms()
            assert due_ms is None or due_ms < 1 << 62
    finally:
        store.close()


def test_the_model_platform_refuses_what_the_real_one_does() -> None:
    """The fake that the client's tests lean on: order, duplicates, commits."""
    platform = Platform()
    conn_id = platform.open()

    def ask(kind: pb.CmdType.ValueType, body: Any) -> list[pb.MsgCmd]:
        platform.frame(conn_id, pb.MsgCmd(Type=kind, Payload=body.SerializeToString()).SerializeToString())
        out, platform.out = platform.out, []
        return [pb.MsgCmd.FromString(payload) for _, payload in out if payload is not None]

    (cmd,) = ask(pb.UP, pb.UPMsg())
    assert pb.ErrorMsg.FromString(cmd.Payload).code == Code.LOGIN_FIRST
    ask(pb.LOGIN, pb.LoginMsg(token="alice"))
    (cmd,) = ask(pb.UP, pb.UPMsg())
    assert pb.ErrorMsg.FromString(cmd.Payload).code == Code.SYNC_FIRST
    ask(pb.SYNC, pb.SyncMsg(ref=1))
    conversation_id = dialogue_id("alice", "bob")

    def up(client_id: int, n: int, acked: int = 0) -> list[Any]:
        head = pb.UPMsgHead(ClientID=client_id, SessionId=conversation_id)
        found = ask(pb.UP, pb.UPMsg(Head=head, client_msg_id=key(n), to_user="bob", acked=acked))
        return [(pb.ACKMsg if c.Type == pb.ACK else pb.ReceiptMsg).FromString(c.Payload) for c in found]

    (ack,) = up(2, 2)
    assert (ack.Code, ack.expected) == (Code.EXPECTED, 1)
    ack, receipt = up(1, 1)
    assert (ack.Code, receipt.seq) == (Code.OK, 1)
    ack, receipt = up(1, 1)
    assert (ack.Code, receipt.seq) == (Code.OK, 1)
    platform.restart_state()
    platform.out.clear()
    (ack,) = up(3, 3)
    assert (ack.Code, ack.expected) == (Code.EXPECTED, 1)
    ack, receipt = up(3, 3, acked=2)
    assert (ack.Code, receipt.seq, receipt.prev_seq) == (Code.OK, 2, 1)
