"""The table of connections: the same by conn_id and by slot, whatever is put in and taken out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from plato.core.ids import slot_of
from plato_state.core.answers import Told
from plato_state.core.session import Connection, Rules
from plato_state.core.table import Table

RULES = Rules(1, 1, 1, 1, guests=False, told=Told(1, 1, 1, 1, 1))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 3))))
def test_slots_hold_what_the_table_holds(steps: list[tuple[bool, int, int]]) -> None:
    table = Table()
    for puts, stamp, slot in steps:
        conn_id = stamp << 22 | slot
        if puts:
            table[conn_id] = Connection(conn_id, RULES)
        elif conn_id in table:
            del table[conn_id]
    for slot in range(4):
        assert {c.conn_id for c in table.of_slots([slot])} == {c for c in table if slot_of(c) == slot}
    assert len(list(table.of_slots(range(4)))) == len(table)


def test_who_is_taken_out_while_a_slot_is_gone_through_is_left_out() -> None:
    table = Table()
    for stamp in range(3):
        table[stamp << 22] = Connection(stamp << 22, RULES)
    seen = []
    for connection in table.of_slots([0]):
        seen.append(connection.conn_id)
        for conn_id in list(table):
            del table[conn_id]
    assert len(seen) == 1
