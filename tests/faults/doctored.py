"""Histories made wrong on purpose: the proof that the checker sees what it is there to see.

Each function takes a good History and returns one with a single fault of its kind, at a place that is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tests.faults.checker import Client, History, Row

PLACES = ("database", "stream", "sqlite")
_Change = Callable[[tuple[Row, ...]], tuple[Row, ...]]


def lose(history: History, place: str) -> History:
    """One message less: its row, or one client's showing or copy of it."""
    if place == "database":
        # Everywhere, and without a trace in the chain: as if it had been acknowledged and then never stored.
        gone = history.rows[len(history.rows) // 2]

        def without(rows: tuple[Row, ...]) -> tuple[Row, ...]:
            after = (gone.conversation_id, gone.seq)
            return tuple(
                replace(r, prev_seq=gone.prev_seq) if (r.conversation_id, r.prev_seq) == after else r
                for r in rows
                if r.msg_id != gone.msg_id
            )

        clients = tuple(replace(c, shown=without(c.shown), stored=without(c.stored)) for c in history.clients)
        return replace(history, rows=without(history.rows), clients=clients)
    return _at_client(history, place, lambda rows: rows[: len(rows) // 2] + rows[len(rows) // 2 + 1 :])


def double(history: History, place: str) -> History:
    """One message twice: a second row under a new seq and msg_id, or one client's second showing or copy of it."""
    if place == "database":
        first = history.rows[0]
        last_seq = max(r.seq for r in history.rows if r.conversation_id == first.conversation_id)
        top = max(r.msg_id for r in history.rows)
        again = replace(first, seq=last_seq + 1, prev_seq=last_seq, msg_id=top + 1)
        return replace(history, rows=(*history.rows, again))
    return _at_client(history, place, lambda rows: (*rows, rows[0]))


def swap(history: History, place: str) -> History:
    """Two messages of one conversation in each other's place: two of one device in the database, or at one client."""
    if place == "database":
        first, second = _pair_of_one_device(history)
        moved = {
            first.msg_id: replace(first, seq=second.seq, prev_seq=second.prev_seq),
            second.msg_id: replace(second, seq=first.seq, prev_seq=first.prev_seq),
        }
        return replace(history, rows=tuple(moved.get(r.msg_id, r) for r in history.rows))

    def swapped(rows: tuple[Row, ...]) -> tuple[Row, ...]:
        conversation = Counter(r.conversation_id for r in rows).most_common(1)[0][0]
        i, j = [n for n, r in enumerate(rows) if r.conversation_id == conversation][:2]
        made = list(rows)
        if place == "sqlite":  # a table has no order but its seqs: the messages trade theirs
            made[i] = replace(rows[i], seq=rows[j].seq, prev_seq=rows[j].prev_seq)
            made[j] = replace(rows[j], seq=rows[i].seq, prev_seq=rows[i].prev_seq)
        else:
            made[i], made[j] = rows[j], rows[i]
        return tuple(made)

    return _at_client(history, place, swapped)


def _at_client(history: History, place: str, change: _Change) -> History:
    clients = list(history.clients)
    n, client = max(enumerate(clients), key=lambda c: len(c[1].shown))
    made: Client = (
        replace(client, shown=change(client.shown))
        if place == "stream"
        else replace(client, stored=change(client.stored))
    )
    clients[n] = made
    return replace(history, clients=tuple(clients))


def _pair_of_one_device(history: History) -> tuple[Row, Row]:
    """Two rows that one device sent one after the other in one conversation."""
    row_of = {(r.from_user, r.client_msg_id): r for r in history.rows}
    lanes: dict[tuple[str, int, str], Row] = {}
    for message in sorted(history.sent, key=lambda m: m.order):
        lane = (message.user, message.device_id, message.conversation_id)
        row = row_of[message.user, message.client_msg_id]
        if lane in lanes:
            return lanes[lane], row
        lanes[lane] = row
    raise ValueError("no device sent two messages in one conversation")
