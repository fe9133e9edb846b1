"""Old messages go, whatever refers to them goes with them, and a pull over them is answered as covered."""

from __future__ import annotations

import pytest
from msg_harness import PARTITIONS, cluster, until, up
from plato.core.codes import Code
from plato.core.conversations import dialogue_id, partition_of
from plato.wire.v1 import client_pb2 as wire
from plato.wire.v1 import content_pb2 as content
from plato.wire.v1.bus_pb2 import Record
from plato_msg import retention
from plato_msg.retention import BATCH, Retention

PAIR = dialogue_id("ann", "ben")


async def test_what_is_too_old_goes_and_the_range_counts_as_covered(
    postgres_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "RESTS", 0)
    async with cluster(postgres_uri) as c:
        await c.start()
        store, history = c.nodes[0].service.store, c.nodes[0].service.history
        old = BATCH + 20
        first = up("ann", "ben", b"0")
        await c.send(first, *(up("ann", "ben", b"%d" % n) for n in range(1, old + 5)), up("cid", "dan"))
        await until(c.settled)
        (msg_id,) = await c.fetch("SELECT msg_id FROM im_message WHERE conversation_id = $1 AND seq = 1", PAIR)
        body = content.Operation(msg_id=msg_id, body=b"edited").SerializeToString()
        edit = Record(conversation_id=PAIR, from_user="ann", client_msg_id=bytes(16), msg_type=content.EDIT, body=body)
        await c.send(edit)
        await until(c.settled)
        newest = old + 6
        await c.execute(f"UPDATE im_message SET server_at = now() - interval '8 days' WHERE seq <= {old}")

        theirs = Retention(
            c._database, lambda: set(range(PARTITIONS)) - {partition_of(PAIR, PARTITIONS)}, PARTITIONS, 7
        )
        removed = await theirs.walk()
        assert removed == (partition_of(dialogue_id("cid", "dan"), PARTITIONS) != partition_of(PAIR, PARTITIONS))
        ours = Retention(c._database, lambda: range(PARTITIONS), PARTITIONS, 7)
        assert removed + await ours.walk() == old + 1
        assert await ours.walk() == 0
        assert await c.fetch("SELECT * FROM im_edit") == []

        whole = await history.pull("ben", wire.PullMsg(conversation_id=PAIR, from_seq=1, limit=3))
        assert (whole.code, whole.newest_seq) == (Code.OK, newest)
        assert [row.seq for row in whole.rows] == [old + 1, old + 2, old + 3]
        assert (whole.covered_from, whole.covered_to) == (1, old + 3)
        gone = await history.pull("ben", wire.PullMsg(conversation_id=PAIR, from_seq=1, to_seq=old))
        assert (gone.code, list(gone.rows), gone.covered_from, gone.covered_to) == (Code.OK, [], 1, old)
        back = await history.pull("ben", wire.PullMsg(conversation_id=PAIR, from_seq=1, newest_first=True))
        assert (back.covered_from, back.covered_to, len(back.rows)) == (1, newest, 6)
        assert await store.message("ben", msg_id) is None
        await c.send(first, up("ben", "ann", b"after"))
        await until(c.settled)
        assert await c.fetch("SELECT last_seq FROM im_conversation WHERE conversation_id = $1", PAIR) == [newest + 1]
