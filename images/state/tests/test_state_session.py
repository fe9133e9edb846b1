"""The connection machine alone: each transition, and what it asks the caller to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from plato.core.codes import Code
from plato.ports import Route, Session
from plato.wire.v1.client_pb2 import (
    ACK,
    ERROR,
    HEARTBEAT,
    KICK,
    LOGIN,
    PULL,
    SYNC,
    UP,
    ACKMsg,
    ErrorMsg,
    KickMsg,
    MsgCmd,
)
from plato_state.core import actions as s
from plato_state.core.answers import Told
from plato_state.core.session import MAX_REQUESTS, Connection, Phase, Rules

ME = 5 << 12 | 1
OLD = 3 << 12 | 2
T = TypeVar("T")


def rules(guests: bool = False) -> Rules:
    return Rules(1_000, 2_000, 60_000, 64, guests, Told(60_000, 500, 100, 200, 1_000))


def one(actions: list[s.Action], kind: type[T]) -> T:
    found = [a for a in actions if isinstance(a, kind)]
    assert len(found) == 1, actions
    return found[0]


def none(actions: list[s.Action], kind: type) -> None:
    assert not [a for a in actions if isinstance(a, kind)], actions


def said(frame: bytes) -> Any:
    command = MsgCmd.FromString(frame)
    kinds: dict[int, Any] = {ACK: ACKMsg, ERROR: ErrorMsg, KICK: KickMsg}
    return kinds[command.Type].FromString(command.Payload)


def code(frame: bytes) -> int:
    message = said(frame)
    return int(message.Code if isinstance(message, ACKMsg) else message.code)


def answered(route: Route | None = None, user: str = "alice", guests: bool = False) -> Connection:
    c = Connection(ME, rules(guests))
    c.opened()
    ask = one(c.login(user, 9, b"secret"), s.AskRoute)
    c.route_read(ask.serial, route)
    assert c.phase is Phase.ANSWERED
    return c


def live(route: Route | None = None, user: str = "alice", guests: bool = False) -> Connection:
    c = answered(route, user, guests)
    if user:
        c.sync(1, b"")
    else:
        c.guest_frame(b"frame", HEARTBEAT)
    c.committed(True, 1_000)
    assert c.phase is Phase.LIVE
    return c


def test_a_login_reads_the_route_answers_and_changes_nothing() -> None:
    c = Connection(ME, rules())
    assert c.opened() == [s.Arm(1_000)]
    actions = c.login("alice", 9, b"secret")
    ask = one(actions, s.AskRoute)
    assert (ask.user, ask.device_id) == ("alice", 9)
    assert one(actions, s.Await).kind == LOGIN
    actions = c.route_read(ask.serial, Route(OLD, 4))
    assert [type(a) for a in actions] == [s.Send], "no timer is moved, nothing is written, nobody is told"
    ack = said(one(actions, s.Send).frame)
    assert (ack.Code, ack.Type, ack.ConnID, ack.secret, ack.user_id) == (0, LOGIN, ME, b"secret", "alice")
    assert (ack.heartbeat_ms, ack.resume_window_ms, ack.max_body_bytes) == (2_000, 60_000, 1_000)


def test_only_the_newest_login_is_answered_and_a_repeat_keeps_the_secret() -> None:
    c = Connection(ME, rules())
    first = one(c.login("alice", 9, b"one"), s.AskRoute)
    second = one(c.login("alice", 9, b"two"), s.AskRoute)
    assert c.route_read(first.serial, None) == []
    assert said(one(c.route_read(second.serial, None), s.Send).frame).secret == b"one"
    third = one(c.login("bob", 9, b"three"), s.AskRoute)
    assert said(one(c.route_read(third.serial, None), s.Send).frame).secret == b"three"


def test_a_refused_token_is_told() -> None:
    c = Connection(ME, rules())
    assert code(one(c.login(Code.TOKEN_EXPIRED, 9, b""), s.Send).frame) == Code.TOKEN_EXPIRED
    assert code(one(c.login("", 9, b""), s.Send).frame) == Code.GUESTS_OFF
    assert c.phase is Phase.NEW


def test_a_store_that_is_away_is_told() -> None:
    c = Connection(ME, rules())
    ask = one(c.login("alice", 9, b"s"), s.AskRoute)
    assert c.awaits(LOGIN, 0)
    assert code(one(c.unavailable(ask.serial), s.Send).frame) == Code.UNAVAILABLE
    assert not c.awaits(LOGIN, 0)
    assert c.phase is Phase.NEW


@pytest.mark.parametrize("kind", [UP, PULL])
def test_before_the_commit_other_frames_are_sent_to_login_or_sync(kind: Any) -> None:
    c = Connection(ME, rules())
    assert code(one(c.out_of_place(kind), s.Send).frame) == Code.LOGIN_FIRST
    c = answered()
    assert code(one(c.out_of_place(kind), s.Send).frame) == Code.SYNC_FIRST
    c.sync(1, b"")
    assert code(one(c.out_of_place(kind), s.Send).frame) == Code.SYNC_FIRST


def test_a_heartbeat_before_the_commit_is_answered_and_prolongs_nothing() -> None:
    for c in (Connection(ME, rules()), answered()):
        actions = c.heartbeat(0, 0)
        assert said(one(actions, s.Send).frame).Type == HEARTBEAT
        none(actions, s.Arm)


def test_a_connection_known_by_name_alone_is_sent_to_login_by_its_heartbeat() -> None:
    c = Connection(ME, rules())
    c.named_only = True
    assert code(one(c.heartbeat(0, 0), s.Send).frame) == Code.LOGIN_FIRST


def test_the_first_sync_commits_what_was_read() -> None:
    c = answered(Route(OLD, 4))
    actions = c.sync(7, b"request")
    commit = one(actions, s.Commit)
    assert commit.session == Session(ME, "alice", 9, b"secret", 5, False)
    assert commit.seen == Route(OLD, 4)
    assert c.awaits(SYNC, 7)
    none(actions, s.Send)
    actions = c.committed(True, 1_000)
    assert [type(a) for a in actions] == [s.TellReplaced, s.Arm, s.Send, s.AskSync]
    ack = said(one(actions, s.Send).frame)
    assert (ack.Type, ack.ref, ack.run, ack.push_no) == (SYNC, 7, 1_000, 0)
    assert one(actions, s.TellReplaced).conn_id == OLD
    assert one(actions, s.AskSync).request == b"request"
    assert not c.awaits(SYNC, 7)


@pytest.mark.parametrize("route", [None, Route(0, 3), Route(ME, 3)])
def test_a_commit_that_took_nobodys_place_tells_nobody(route: Route | None) -> None:
    c = answered(route)
    c.sync(1, b"")
    none(c.committed(True, 1), s.TellReplaced)


def test_a_commit_that_came_second_goes_back_to_login_on_the_same_socket() -> None:
    c = answered(Route(OLD, 4))
    c.sync(7, b"")
    actions = c.committed(False, 1)
    assert code(one(actions, s.Send).frame) == Code.TRY_AGAIN
    assert said(one(actions, s.Send).frame).ref == 7
    assert one(actions, s.Remove).session.conn_id == ME
    assert c.phase is Phase.NEW
    assert c.session is None
    ask = one(c.login("alice", 9, b"x"), s.AskRoute)
    c.route_read(ask.serial, Route(4711, 5))
    assert one(c.sync(8, b""), s.Commit).session.gen == 6


def test_an_unknown_commit_may_be_repeated_by_the_next_sync() -> None:
    c = answered(Route(OLD, 4))
    first = one(c.sync(7, b""), s.Commit)
    assert code(one(c.committed(None, 1), s.Send).frame) == Code.UNAVAILABLE
    assert c.phase is Phase.ANSWERED
    assert one(c.sync(7, b""), s.Commit) == first


def test_a_socket_that_goes_while_a_commit_is_unknown_leaves_a_session_that_can_be_resumed() -> None:
    c = answered(Route(OLD, 4))
    c.sync(7, b"")
    c.committed(None, 1)
    assert c.closed() == [s.Arm(60_000)]
    assert c.phase is Phase.WAITING
    assert one(c.expired(None, 0), s.End).session.gen == 5


@pytest.mark.parametrize(("done", "after"), [(True, Phase.WAITING), (None, Phase.WAITING), (False, Phase.ENDED)])
def test_a_socket_that_goes_during_the_commit(done: bool | None, after: Phase) -> None:
    c = answered()
    c.sync(1, b"")
    assert c.closed() == []
    actions = c.committed(done, 1)
    assert c.phase is after
    none(actions, s.Send)
    if after is Phase.ENDED:
        one(actions, s.Forget)


def test_syncs_that_come_during_the_commit_are_all_answered() -> None:
    c = answered()
    c.sync(1, b"one")
    c.sync(1, b"one")
    c.sync(2, b"two")
    actions = c.committed(True, 1)
    assert [a.ref for a in actions if isinstance(a, s.AskSync)] == [1, 2]


def test_a_later_sync_only_reads() -> None:
    c = live()
    actions = c.sync(2, b"")
    assert [type(a) for a in actions] == [s.Send, s.AskSync]


def test_requests_under_way_are_bounded() -> None:
    c = live()
    for ref in range(2, 2 + MAX_REQUESTS - 1):
        one(c.pull(ref, b"", "c"), s.AskPull)
    assert code(one(c.pull(9, b"", "c"), s.Send).frame) == Code.BUSY
    assert code(one(c.sync(9, b""), s.Send).frame) == Code.BUSY
    c.request_done()
    one(c.pull(9, b"", "c"), s.AskPull)


SESSION = Session(OLD, "alice", 9, b"secret", 4, False)
NEWER = Session(4711, "alice", 9, b"secret", 5, False)


@pytest.mark.parametrize(
    ("old", "route", "current", "secret", "expected"),
    [
        (SESSION, Route(OLD, 4), SESSION, b"secret", Code.OK),
        (SESSION, Route(4711, 5), NEWER, b"secret", Code.OK),
        (SESSION, Route(4711, 5), Session(4711, "alice", 9, b"other", 5, False), b"secret", Code.SECRET_WRONG),
        (SESSION, Route(OLD, 4), SESSION, b"Secret", Code.SECRET_WRONG),
        (SESSION, Route(OLD, 4), SESSION, b"", Code.SECRET_WRONG),
        (None, None, None, b"secret", Code.SESSION_UNKNOWN),
        (SESSION, None, None, b"secret", Code.SESSION_UNKNOWN),
        (SESSION, Route(0, 5), None, b"secret", Code.SESSION_UNKNOWN),
        (SESSION, Route(4711, 5), None, b"secret", Code.SESSION_UNKNOWN),
    ],
)
def test_a_resume_is_compared_with_the_session_that_the_route_names(
    old: Session | None, route: Route | None, current: Session | None, secret: bytes, expected: Code
) -> None:
    c = Connection(ME, rules())
    ask = one(c.reconn(OLD, secret), s.AskSession)
    assert ask.conn_id == OLD
    actions = c.session_found(ask.serial, old, route, current)
    assert code(one(actions, s.Send).frame) == expected
    if expected is Code.OK:
        assert said(one(actions, s.Send).frame).secret == b"secret", "a resume keeps the secret"
        assert one(c.sync(1, b""), s.Commit).seen == route
    else:
        assert c.phase is Phase.NEW


def test_a_guests_resume_needs_no_secret_and_only_a_guests() -> None:
    guest = Session(OLD, f"guest:{OLD}", 123, b"secret", 1, True)
    c = Connection(ME, rules(guests=True))
    ask = one(c.reconn(OLD, b""), s.AskSession)
    assert code(one(c.session_found(ask.serial, guest, Route(OLD, 1), guest), s.Send).frame) == Code.OK
    assert c.guest
    assert c.owns(OLD)
    assert not c.owns(4711)
    assert one(c.guest_frame(b"f", UP) or [], s.Commit).session.user == f"guest:{OLD}"
    c = Connection(ME, rules(guests=False))
    ask = one(c.reconn(OLD, b""), s.AskSession)
    assert code(one(c.session_found(ask.serial, guest, Route(OLD, 1), guest), s.Send).frame) == Code.GUESTS_OFF


def test_a_guests_first_frame_commits_and_waits_for_it_with_the_others() -> None:
    c = answered(user="", guests=True)
    assert one(c.guest_frame(b"one", UP) or [], s.Commit).session.user == f"guest:{ME}"
    assert c.guest_frame(b"two", UP) == []
    actions = c.committed(True, 1)
    assert one(actions, s.Replay).frames == (b"one", b"two")
    none(actions, s.Send)
    assert c.guest_frame(b"three", UP) is None


def test_no_type_above_five_goes_to_a_guest() -> None:
    def kinds(actions: list[s.Action]) -> set[int]:
        return {MsgCmd.FromString(a.frame).Type for a in actions if isinstance(a, s.Send | s.Close)}

    assert kinds(answered(user="", guests=True).logout()) <= {ACK}
    acts: list[Callable[[Connection], list[s.Action]]] = [
        lambda c: c.replaced(Code.REPLACED),
        lambda c: c.logout(),
        lambda c: c.malformed(UP),
        lambda c: c.foreign(UP),
        lambda c: c.sync(1, b""),
        lambda c: c.pull(1, b"", "c"),
        lambda c: c.expired(None, 0),
        lambda c: c.heartbeat(0, 0),
    ]
    for act in acts:
        actions = act(live(user="", guests=True))
        assert kinds(actions) <= {ACK}
        none(actions, s.AskSync)
        none(actions, s.AskPull)


def test_a_lost_socket_waits_for_resume_then_ends() -> None:
    c = live()
    assert c.closed() == [s.Arm(60_000)]
    assert (c.phase, c.uplinks, c.pushes) == (Phase.WAITING, None, None)
    assert c.expired(None, 700) == [s.Arm(700)], "a new owner still ends nobody"
    one(c.expired(None, 0), s.End)
    assert c.phase is Phase.ENDED


def test_a_silent_socket_is_closed_with_the_reason_and_its_session_waits() -> None:
    c = live()
    actions = c.expired(None, 0)
    assert code(one(actions, s.Close).frame) == Code.HEARTBEAT_TIMEOUT
    assert one(actions, s.Arm).after_ms == 60_000
    assert c.phase is Phase.WAITING
    assert code(one(c.out_of_place(UP), s.Close).frame) == Code.HEARTBEAT_TIMEOUT


def test_a_session_does_not_age_while_nobody_can_speak_for_it() -> None:
    c = live()
    assert c.expired(20_000, 0) == [s.Arm(40_000)]
    assert c.phase is Phase.LIVE
    one(c.expired(60_000, 0), s.End)


def test_a_login_that_takes_too_long_is_closed_with_the_reason() -> None:
    for c in (Connection(ME, rules()), answered()):
        actions = c.expired(None, 0)
        assert code(one(actions, s.Close).frame) == Code.LOGIN_TIMEOUT
        one(actions, s.Forget)


def test_a_login_time_out_during_the_commit_leaves_its_end_to_the_commit() -> None:
    c = answered()
    c.sync(1, b"")
    actions = c.expired(None, 0)
    assert code(one(actions, s.Close).frame) == Code.LOGIN_TIMEOUT
    none(actions, s.Forget)
    c.committed(True, 1)
    assert c.phase is Phase.WAITING


def test_logout_ends_the_session_at_once() -> None:
    c = live()
    actions = c.logout()
    assert code(one(actions, s.Close).frame) == Code.LOGGED_OUT
    one(actions, s.End)
    assert c.closed() == []


def test_a_replaced_connection_is_remembered_and_answered_until_it_is_removed() -> None:
    c = live()
    actions = c.replaced(Code.REPLACED)
    assert code(one(actions, s.Close).frame) == Code.REPLACED
    assert MsgCmd.FromString(one(actions, s.Close).frame).Type == KICK
    assert code(one(c.out_of_place(UP), s.Close).frame) == Code.REPLACED
    assert code(one(c.login("alice", 9, b""), s.Close).frame) == Code.REPLACED
    assert c.closed() == []
    assert [type(a) for a in c.expired(None, 0)] == [s.Remove, s.Forget]


def test_a_replacement_that_is_told_before_our_own_commit_ended_counts_after_it() -> None:
    c = answered()
    c.sync(1, b"")
    assert c.replaced(Code.REPLACED) == []
    assert code(one(c.committed(True, 1), s.Close).frame) == Code.REPLACED
    assert c.phase is Phase.REPLACED


def test_only_a_committed_session_can_be_replaced() -> None:
    assert answered().replaced(Code.REPLACED) == []
    assert Connection(ME, rules()).replaced(Code.REPLACED) == []


def test_what_a_heartbeats_look_at_the_route_means() -> None:
    c = live(Route(OLD, 4))
    assert c.route_checked(Route(ME, 5)) == []
    assert one(c.route_checked(None), s.RestoreRoute).seen is None
    assert one(c.route_checked(Route(OLD, 4)), s.RestoreRoute).seen == Route(OLD, 4), "the store went back"
    assert code(one(c.route_checked(Route(4711, 6)), s.Close).frame) == Code.REPLACED
    kicked = live(Route(OLD, 4))
    assert code(one(kicked.route_checked(Route(0, 6)), s.Close).frame) == Code.KICKED, "nobody took its place"
    assert code(one(kicked.out_of_place(UP), s.Close).frame) == Code.KICKED
    assert code(one(live(Route(OLD, 4)).route_checked(Route(4711, 5)), s.Close).frame) == Code.REPLACED


def test_a_waiting_session_whose_socket_is_named_lives_again() -> None:
    c = live()
    c.closed()
    one(c.named(), s.Arm)
    assert c.phase is Phase.LIVE
    assert c.pushes is not None


def test_a_loaded_session_is_live_until_its_silence_or_its_worker_says_otherwise() -> None:
    c = Connection(ME, rules())
    assert c.loaded(SESSION, 77) == [s.Arm(5_000)]
    assert c.phase is Phase.LIVE
    assert c.pushes is not None
    assert c.pushes.run == 77
    assert c.closed() == [s.Arm(60_000)]


def test_a_broken_frame_costs_the_socket_and_leaves_the_session() -> None:
    c = live()
    actions = c.malformed(UP)
    assert code(one(actions, s.Close).frame) == Code.MALFORMED
    assert c.phase is Phase.WAITING
    one(Connection(ME, rules()).malformed(UP), s.Forget)


def test_a_login_on_a_live_connection_is_answered_again_for_the_same_device_only() -> None:
    c = live()
    ack = said(one(c.login("alice", 9, b"new"), s.Send).frame)
    assert (ack.Code, ack.secret) == (0, b"secret")
    assert c.phase is Phase.LIVE
    one(c.login("bob", 9, b"new"), s.Close)
