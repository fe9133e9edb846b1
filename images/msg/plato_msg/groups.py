"""Orders of an administrator about groups: who is in them. An order becomes operations with authority, messages of the
conversation like those of people, so it stands in one order with them, and membership is as of the record (design §8).

    order → records of at most RECORD_USERS users, each with a client_msg_id of its own → the bus, BATCH records at a time
          → whoever owns the partition decides → their outcomes are read here until all are there, or WAIT_S passed

An order with the same key is the same order: what it did already is answered again. Any msg process takes it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from plato.core.codes import Code
from plato.core.conversations import partition_of
from plato.core.errors import Unavailable
from plato.ports import BusProducer
from plato.wire.v1 import content_pb2 as content
from plato.wire.v1.bus_pb2 import Record

from plato_msg.core.operations import MAX_USERS
from plato_msg.operations import ADMIN
from plato_msg.store_pg import PgMsgStore

ChangeKind: TypeAlias = Literal["create", "add", "remove"]
RECORD_USERS: Final = MAX_USERS
BATCH: Final = 4
WAIT_S: Final = 10.0
POLL_S: Final = 0.05
_KINDS: Final = {"create": content.GROUP_CREATE, "add": content.GROUP_ADD, "remove": content.GROUP_REMOVE}
_NAMESPACE: Final = uuid.UUID("6f1c3d0e-6f0a-5b0e-9d0c-2f6b8b0c7a51")


@dataclass(frozen=True, slots=True)
class Done:
    """What became of an order: how many of its records have which code, and how many none yet."""

    codes: dict[int, int]
    pending: int

    @property
    def code(self) -> int:
        """OK, or the first refusal."""
        return next((code for code in sorted(self.codes) if code != Code.OK), int(Code.OK))


class Groups:
    """Orders through one msg process."""

    def __init__(self, bus: BusProducer, store: PgMsgStore, *, wait_s: float = WAIT_S) -> None:
        self._bus = bus
        self._store = store
        self._wait_s = wait_s

    async def order(self, conversation_id: str, kind: ChangeKind, users: Sequence[str], key: str) -> Done:
        """Carries it out. Raises Unavailable: the same order with the same key, later, ends what was begun."""
        parts = [users[at : at + RECORD_USERS] for at in range(0, len(users), RECORD_USERS)]
        if kind == "create":
            parts = parts or [()]
        partition = partition_of(conversation_id, self._bus.partitions)
        records = {}
        for n, part in enumerate(parts):
            client_msg_id = uuid.uuid5(_NAMESPACE, f"{conversation_id}\n{key}\n{n}").bytes
            # Only the first one makes the group: the others add to it.
            record = Record(
                conversation_id=conversation_id,
                from_user=ADMIN,
                client_msg_id=client_msg_id,
                msg_type=_KINDS[kind if not n or kind != "create" else "add"],
                body=content.Operation(users=part).SerializeToString(),
                authority=True,
            )
            records[client_msg_id] = record.SerializeToString()
        values = list(records.values())
        for at in range(0, len(values), BATCH):
            await self._bus.append({partition: values[at : at + BATCH]})
        found: list[int] = []
        keys = [(conversation_id, ADMIN, client_msg_id) for client_msg_id in records]
        try:
            async with asyncio.timeout(self._wait_s):
                while len(found) < len(records):
                    await asyncio.sleep(POLL_S)
                    found = [outcome.code for outcome in (await self._store.outcomes(keys)).values()]
        except (TimeoutError, Unavailable):
            pass
        return Done(dict(Counter(found)), len(records) - len(found))

    async def show(self, conversation_id: str, after: str, limit: int) -> tuple[int, int, list[str]] | None:
        """(members, last_seq, a page of the members); None: there is no such group. Raises Unavailable."""
        group = await self._store.group(conversation_id)
        if group is None:
            return None
        return *group, await self._store.members(conversation_id, after, limit)
