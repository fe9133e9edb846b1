"""What a person writes into an owner's row is followed (docs/kafka.md), on a store of the test's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from plato.fakes.topology import FakeTopology
from plato.topology.record import Msg, SlotRange, Topology
from plato_msg.core.allocator import SingleWriter
from plato_msg.owner import Ownership
from plato_msg.store_pg import Owner, PgMsgStore


class Rows:
    """bus_owner, as PgMsgStore shows it."""

    def __init__(self) -> None:
        self.rows = {p: Owner(p, "", 0, 700, 700) for p in range(2)}
        self.beats = 0

    async def beat(self, uid: str) -> dict[str, int]:
        self.beats += 1
        return {uid: self.beats}

    async def owners(self) -> tuple[list[Owner], dict[int, int]]:
        return list(self.rows.values()), dict.fromkeys(self.rows, 0)

    async def take(self, uid: str, seen_epochs: Mapping[int, int]) -> list[Owner]:
        for partition, epoch in seen_epochs.items():
            if self.rows[partition].epoch == epoch:
                self.rows[partition] = self.rows[partition]._replace(owner=uid, epoch=epoch + 1)
        return [self.rows[p] for p, epoch in seen_epochs.items() if self.rows[p][1:3] == (uid, epoch + 1)]


async def test_a_stopped_partition_goes_on_where_its_row_says_though_nothing_is_committed() -> None:
    rows = Rows()
    topology = FakeTopology(Topology("c", 1, (SlotRange(0, 1023, "a", 1),), msgs={"msg-0": Msg("me", 3, "m:1")}))
    owners = Ownership(cast(PgMsgStore, rows), topology, SingleWriter(), "msg-0", "me", stale_ms=5_000)
    await owners.tick()
    before = owners.held[0]
    assert (before.position, set(owners.held)) == (700, {0, 1})
    # as the page says: UPDATE … SET position = 1200, fanned_out = 1200, epoch = epoch + 1, owner = ''
    rows.rows[0] = Owner(0, "", before.epoch + 1, 1_200, 1_200)
    other = owners.held[1]
    await owners.tick()
    assert (owners.held[0].position, owners.held[0].epoch) == (1_200, before.epoch + 2)
    assert owners.held[1] is other, "who is not concerned stays"
