"""Connections by conn_id, and by slot: what happens to a slot costs what lives there, not what lives in the shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from plato.core.ids import slot_of

from plato_state.core.session import Connection


class Table(dict[int, Connection]):
    """Changed by `table[conn_id] = connection` and `del table[conn_id]` only. Memory: one set entry per connection more."""

    def __init__(self) -> None:
        super().__init__()
        self._slots: dict[int, set[int]] = {}

    def __setitem__(self, conn_id: int, connection: Connection) -> None:
        """Adds or replaces one."""
        super().__setitem__(conn_id, connection)
        self._slots.setdefault(slot_of(conn_id), set()).add(conn_id)

    def __delitem__(self, conn_id: int) -> None:
        """Takes one out. Raises KeyError."""
        super().__delitem__(conn_id)
        slot = slot_of(conn_id)
        self._slots[slot].discard(conn_id)
        if not self._slots[slot]:
            del self._slots[slot]

    def of_slots(self, slots: Iterable[int]) -> Iterator[Connection]:
        """Those of these slots; the table may be changed meanwhile."""
        for slot in slots:
            for conn_id in list(self._slots.get(slot, ())):
                if (connection := self.get(conn_id)) is not None:
                    yield connection
