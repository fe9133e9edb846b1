"""Runs that went wrong on paper: a good one, and one thing on one device changed. The checker must see each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from plato.client import MsgType

from tests.faults import checker
from tests.product.family_checker import Device, Family, Kind, Row, Seen


def all_of(family: Family) -> Iterator[tuple[str, Family, Kind]]:
    """(what was done, the run with it, the kind of finding that must come of it)."""
    for n, device in enumerate(family.devices):
        name = f"{device.user}/{device.number}"
        edited = next(i for i, r in enumerate(device.stored) if r.changed_seq and not r.recalled)
        recalled = next(i for i, r in enumerate(device.stored) if r.recalled)
        yield f"{name}: an edit was missed", _row(family, n, edited, body=b"as it was"), Kind.CONTENT
        yield f"{name}: a recall was missed", _row(family, n, recalled, body=b"there"), Kind.CONTENT
        yield f"{name}: a message is doubled", _shown(family, n, (*device.shown, device.shown[-1])), Kind.MESSAGES
        yield f"{name}: two are swapped", _shown(family, n, _swapped(device)), Kind.MESSAGES
        conversation_id, seen = next((c, s) for c, s in device.seen.items() if s.title)
        late = replace(seen, shared=replace(seen.shared, read_seq=seen.shared.read_seq + 1))
        yield f"{name}: a read position differs", _seen(family, n, conversation_id, late), Kind.SHARED
        more = replace(seen, unread=seen.unread + 1)
        yield f"{name}: an unread count differs", _seen(family, n, conversation_id, more), Kind.UNREAD
        pinned = replace(seen, shared=replace(seen.shared, pinned_at_ms=seen.shared.pinned_at_ms + 1))
        yield f"{name}: a pin differs", _seen(family, n, conversation_id, pinned), Kind.SHARED
        title = replace(seen, title="of yesterday")
        yield f"{name}: a title differs", _seen(family, n, conversation_id, title), Kind.GROUP
        alone = replace(seen, members={device.user: 0})
        yield f"{name}: members differ", _seen(family, n, conversation_id, alone), Kind.GROUP
        hidden = replace(device, hidden=device.hidden ^ {(conversation_id, 1)})
        yield f"{name}: a deletion differs", _with(family, n, hidden), Kind.SHARED
    undone = tuple(
        replace(r, recalled=False, changed_seq=0) if r.recalled and r.msg_type < MsgType.GROUP_CREATE else r
        for r in family.rows
    )
    yield "database: recalls are not done", replace(family, rows=undone), Kind.OPERATION


def lose(family: Family) -> Family:
    """One message is nowhere."""
    gone = next(r.row.msg_id for r in family.rows if not r.changed_seq and r.msg_type == MsgType.TEXT)
    return replace(family, rows=tuple(r for r in family.rows if r.row.msg_id != gone))


def _with(family: Family, n: int, device: Device) -> Family:
    return replace(family, devices=(*family.devices[:n], device, *family.devices[n + 1 :]))


def _row(family: Family, n: int, at: int, body: bytes) -> Family:
    device = family.devices[n]
    old: Row = device.stored[at]
    row = replace(old, row=replace(old.row, body=body))
    return _with(family, n, replace(device, stored=(*device.stored[:at], row, *device.stored[at + 1 :])))


def _shown(family: Family, n: int, shown: tuple[checker.Row, ...]) -> Family:
    return _with(family, n, replace(family.devices[n], shown=shown))


def _swapped(device: Device) -> tuple[checker.Row, ...]:
    shown = list(device.shown)
    where = [r.conversation_id for r in shown]
    last = max(where, key=where.count)
    first, second = [i for i, r in enumerate(shown) if r.conversation_id == last][-2:]
    shown[first], shown[second] = shown[second], shown[first]
    return tuple(shown)


def _seen(family: Family, n: int, conversation_id: str, seen: Seen) -> Family:
    device = family.devices[n]
    return _with(family, n, replace(device, seen={**device.seen, conversation_id: seen}))
