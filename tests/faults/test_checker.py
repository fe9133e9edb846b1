"""The checker passes a good history and fails, with the right word, on each kind of bad one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.faults import doctored
from tests.faults.checker import Client, Finding, History, Kind, Row, Sent, check, summary


def good() -> History:
    """Three users, two conversations (one with a legal hole), ten messages each, alice with two devices."""
    sent: list[Sent] = []
    rows: list[Row] = []
    for number, (conversation, users, step) in enumerate(
        (("d:ab", ("alice", "bob"), 1), ("d:bc", ("bob", "carol"), 3))
    ):
        prev = 0
        for n in range(1, 11):
            user = users[n % 2]
            device_id = 70 + n // 2 % 2 if user == "alice" else 7
            key = bytes([number, n]) * 8
            order = 1 + sum(
                m.device_id == device_id and m.user == user and m.conversation_id == conversation for m in sent
            )
            sent.append(Sent(user, device_id, conversation, key, b"body %d" % n, order))
            seq = prev + step if n == 5 else prev + 1
            rows.append(Row(conversation, seq, prev, 1000 * number + n, user, key, b"body %d" % n))
            prev = seq
    clients = []
    for user, device_id in (("alice", 70), ("alice", 71), ("bob", 7), ("carol", 7)):
        its = frozenset(c for c in ("d:ab", "d:bc") if user[0] in c[2:])
        copy = tuple(r for r in rows if r.conversation_id in its)
        clients.append(Client(user, device_id, its, copy, copy[::-1]))
    return History(tuple(sent), tuple(rows), tuple(clients))


def kinds(history: History) -> set[Kind]:
    return {f.kind for f in check(history)}


def test_a_good_history_passes() -> None:
    assert check(good()) == []


def test_an_empty_history_passes() -> None:
    assert check(History((), ())) == []


@pytest.mark.parametrize("place", doctored.PLACES)
def test_one_lost(place: str) -> None:
    findings = check(doctored.lose(good(), place))
    assert [f.kind for f in findings] == [Kind.LOST], findings


@pytest.mark.parametrize("place", doctored.PLACES)
def test_one_doubled(place: str) -> None:
    findings = check(doctored.double(good(), place))
    assert findings[0].kind is Kind.DOUBLED, findings
    assert {f.kind for f in findings} <= {Kind.DOUBLED, Kind.LOST}, "the second row is unknown to the clients"


@pytest.mark.parametrize(
    ("place", "kind"),
    [("database", Kind.UPLINK_ORDER), ("stream", Kind.OUT_OF_ORDER), ("sqlite", Kind.OUT_OF_ORDER)],
)
def test_one_swapped(place: str, kind: Kind) -> None:
    findings = check(doctored.swap(good(), place))
    assert kind in {f.kind for f in findings}, findings


def in_row(n: int, change: Callable[[Row], Row]) -> History:
    """The good history, seen alike by everybody, with row n changed everywhere."""
    history = good()
    old = history.rows[n]
    new = change(old)

    def put(rows: tuple[Row, ...]) -> tuple[Row, ...]:
        return tuple(new if r == old else r for r in rows)

    clients = tuple(replace(c, shown=put(c.shown), stored=put(c.stored)) for c in history.clients)
    return replace(history, rows=put(history.rows), clients=clients)


def test_a_wrong_body_in_the_database() -> None:
    assert kinds(in_row(3, lambda r: replace(r, body=b"other"))) == {Kind.WRONG}


def test_a_message_stored_in_another_conversation() -> None:
    history = good()
    moved = replace(history.sent[3], conversation_id="d:bc")
    assert Kind.WRONG in kinds(replace(history, sent=(*history.sent[:3], moved, *history.sent[4:])))


@pytest.mark.parametrize("place", ["stream", "sqlite"])
def test_a_wrong_body_at_a_client(place: str) -> None:
    history = good()
    client = history.clients[0]
    rows = (replace(client.shown[0], body=b"other"), *client.shown[1:])
    bad = replace(client, shown=rows) if place == "stream" else replace(client, stored=rows)
    findings = check(replace(history, clients=(bad, *history.clients[1:])))
    assert [f.kind for f in findings] == [Kind.WRONG]


def test_a_row_that_nobody_sent() -> None:
    assert Kind.PHANTOM in kinds(in_row(3, lambda r: replace(r, client_msg_id=b"x" * 16)))


def test_a_row_of_a_refused_message() -> None:
    history = good()
    refused = replace(history.sent[3], refused=True)
    findings = check(replace(history, sent=(*history.sent[:3], refused, *history.sent[4:])))
    assert [f.kind for f in findings] == [Kind.PHANTOM]


def test_a_message_shown_that_the_database_lacks() -> None:
    history = good()
    client = history.clients[2]
    ghost = replace(client.shown[-1], msg_id=999_999, seq=50)
    bad = replace(client, shown=(*client.shown, ghost))
    findings = check(replace(history, clients=(*history.clients[:2], bad, history.clients[3])))
    assert [f.kind for f in findings] == [Kind.PHANTOM]


def test_a_message_shown_to_somebody_else() -> None:
    history = good()
    carol = history.clients[3]
    bad = replace(carol, shown=(*carol.shown, history.rows[0]))
    assert kinds(replace(history, clients=(*history.clients[:3], bad))) == {Kind.PHANTOM}


def test_a_hole_that_prev_seq_does_not_jump() -> None:
    assert Kind.CHAIN in kinds(in_row(3, lambda r: replace(r, prev_seq=r.prev_seq - 1)))


def test_a_chain_that_does_not_begin_at_zero() -> None:
    assert Kind.CHAIN in kinds(in_row(0, lambda r: replace(r, prev_seq=7, seq=8)))


def test_a_seq_given_twice() -> None:
    first = good().rows[0]
    assert Kind.CHAIN in kinds(in_row(1, lambda r: replace(r, seq=first.seq, prev_seq=first.prev_seq)))


def test_a_msg_id_given_twice() -> None:
    assert Kind.CHAIN in kinds(in_row(15, lambda r: replace(r, msg_id=good().rows[0].msg_id)))


def test_a_uplink_out_of_its_devices_order() -> None:
    history = good()
    a, b = (m for m in history.sent if m.user == "carol" and m.order in (1, 2))
    traded = [
        replace(m, order=3 - m.order) if m in (a, b) else m  # as if the second had been sent first
        for m in history.sent
    ]
    assert kinds(replace(history, sent=tuple(traded))) == {Kind.UPLINK_ORDER}


def test_two_devices_of_one_user_may_overtake_each_other() -> None:
    history = good()
    one = [m for m in history.sent if (m.user, m.device_id) == ("alice", 70)]
    other = [m for m in history.sent if (m.user, m.device_id) == ("alice", 71)]
    assert one
    assert other
    assert check(replace(history, sent=tuple(sorted(history.sent, key=lambda m: -m.device_id)))) == []


def test_the_summary_names_every_kind() -> None:
    counts = summary([Finding(Kind.LOST, "database", "x"), Finding(Kind.LOST, "database", "y")])
    assert counts["lost"] == 2
    assert set(counts) == {k.value for k in Kind}
    assert sum(counts.values()) == 2
