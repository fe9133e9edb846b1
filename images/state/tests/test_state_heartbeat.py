"""The heartbeat interval: a client wishes, the shard says what stands, and allows two and a half of that."""

from __future__ import annotations

import pytest
from plato.core.codes import Code
from plato.ports import Route, Session
from plato.runtime.settings import SettingsError, load
from plato.wire.v1.client_pb2 import ACKMsg, MsgCmd
from plato_state.core import actions as do
from plato_state.core.actions import Action
from plato_state.core.answers import Told
from plato_state.core.session import Connection, Phase, Rules

TOLD = Told(300_000, 1_000, 2_000, 30_000, 61_440, 15_000, 240_000, 250, 5_000)
RULES = Rules(10_000, 30_000, 300_000, 64, False, TOLD)
ME = 5 << 12 | 1


def ack(actions: list[Action]) -> ACKMsg:
    (frame,) = [a.frame for a in actions if isinstance(a, do.Send)]
    return ACKMsg.FromString(MsgCmd.FromString(frame).Payload)


def armed(actions: list[Action]) -> int:
    (after_ms,) = [a.after_ms for a in actions if isinstance(a, do.Arm)]
    return after_ms


def live(wish_ms: int = 0, rules: Rules = RULES) -> Connection:
    connection = Connection(ME, rules)
    connection.opened()
    (ask,) = [a for a in connection.login("alice", 9, b"s", wish_ms=wish_ms) if isinstance(a, do.AskRoute)]
    told = ack(connection.route_read(ask.serial, None))
    assert told.heartbeat_ms == connection.heartbeat_ms
    connection.sync(1, b"")
    assert armed(connection.committed(True, 1_000)) == connection.heartbeat_ms * 5 // 2
    return connection


def test_a_login_tells_the_times_that_a_client_goes_by() -> None:
    connection = Connection(ME, RULES)
    (ask,) = [a for a in connection.login("alice", 9, b"s") if isinstance(a, do.AskRoute)]
    told = ack(connection.route_read(ask.serial, None))
    assert (told.heartbeat_ms, told.heartbeat_floor_ms, told.heartbeat_ceiling_ms) == (30_000, 15_000, 240_000)
    assert (told.connect_delay_ms, told.connect_timeout_ms) == (250, 5_000)


@pytest.mark.parametrize(
    ("wish_ms", "stands_ms"), [(0, 30_000), (1, 15_000), (45_000, 45_000), (240_000, 240_000), (2**32 - 1, 240_000)]
)
def test_a_wish_stands_within_floor_and_ceiling(wish_ms: int, stands_ms: int) -> None:
    assert live(wish_ms).heartbeat_ms == stands_ms
    connection = live()
    actions = connection.heartbeat(0, 0, wish_ms)
    assert ack(actions).heartbeat_ms == stands_ms
    assert armed(actions) == connection.silence_ms == stands_ms * 5 // 2


def test_a_resume_brings_its_network_and_its_interval() -> None:
    connection = Connection(ME, RULES)
    (ask,) = [a for a in connection.reconn(7, b"s", "wifi", 60_000) if isinstance(a, do.AskSession)]
    old = Session(7, "alice", 9, b"s", 3, False, "python", "cellular")
    told = ack(connection.session_found(ask.serial, old, Route(7, 3), old))
    assert (told.Code, told.heartbeat_ms) == (Code.OK, 60_000)
    (commit,) = [a for a in connection.sync(1, b"") if isinstance(a, do.Commit)]
    assert (commit.session.platform, commit.session.network) == ("python", "wifi")


def test_who_says_no_more_what_it_keeps_is_given_the_usual_interval_again() -> None:
    connection = live(120_000)
    assert ack(connection.heartbeat(0, 0)).heartbeat_ms == 30_000
    assert connection.silence_ms == 75_000


def test_without_bounds_every_client_keeps_the_usual_interval() -> None:
    connection = live(120_000, Rules(10_000, 30_000, 300_000, 64, False, Told(300_000, 1_000, 2_000, 30_000, 61_440)))
    assert connection.heartbeat_ms == 30_000
    assert ack(connection.heartbeat(0, 0, 5_000)).heartbeat_ms == 30_000


def test_a_loaded_session_may_keep_the_longest_interval_and_is_closed_only_after_it() -> None:
    connection = Connection(ME, RULES)
    session = Session(ME, "alice", 9, b"s", 3, False)
    assert armed(connection.loaded(session, 1_000)) == 75_000
    connection.named()
    assert armed(connection.expired(None, 0)) == 600_000 - 75_000, "it did not say yet what it keeps"
    assert connection.phase is Phase.LIVE
    assert any(isinstance(a, do.Close) for a in connection.expired(None, 0))
    again = Connection(ME, RULES)
    again.loaded(session, 1_000)
    again.named()
    again.heartbeat(0, 0, 45_000)
    assert any(isinstance(a, do.Close) for a in again.expired(None, 0)), "it said: 45 s"


@pytest.mark.parametrize("flags", [{"floor_ms": 40_000}, {"ceiling_ms": 20_000}])
def test_bounds_that_leave_the_usual_interval_out_are_refused(flags: dict[str, int]) -> None:
    with pytest.raises(SettingsError, match="must lie between"):
        load(None, environ={}, flags={f"state.heartbeat_{name}": value for name, value in flags.items()})
