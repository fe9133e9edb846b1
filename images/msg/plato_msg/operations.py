"""What the HTTP API writes: a message, or an operation on a conversation, on behalf of a user or of the application itself.

    send → one record on the bus, as an uplink's → the partition's owner decides → its outcome, if it comes within WAIT_S

The key of a record is (conversation_id, user, client_msg_id): sent again with the same one it is done once, and the first
outcome is answered, as for frames. Such a record has no device, so every device of the user gets the push, and nobody a
receipt. Any msg process takes it. All who wait share one question to the database per POLL_S.
Memory: one entry per record that is waited for.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Final, NamedTuple

from plato.api import names
from plato.core.codes import Code
from plato.core.conversations import partition_of
from plato.core.errors import Unavailable
from plato.ports import BusProducer
from plato.wire.v1 import content_pb2 as content
from plato.wire.v1.bus_pb2 import Record

from plato_msg.core.batch import Key, Outcome
from plato_msg.store_pg import PgMsgStore

ADMIN: Final = names.ADMIN_USER
"""from_user of what administrators do. A person of this name would be taken for them, and by a record of his with the key of
an order to come that order would be answered: so no token and no header names it."""
WAIT_S: Final = 2.0
POLL_S: Final = 0.02
_NAMESPACE: Final = uuid.UUID("6f1c3d0e-6f0a-5b0e-9d0c-2f6b8b0c7a51")


class Sent(NamedTuple):
    """What became of a record. code: OK, a refusal, or PENDING: it is on the bus, undecided. Numbers: of OK only."""

    code: int
    msg_id: int = 0
    seq: int = 0
    server_at_ms: int = 0
    words: str = ""
    """What the application said when it refused."""


def client_msg_id_of(user: str, key: str) -> bytes:
    """16 bytes for a key that a caller chose: the same key of the same user is the same message, in each conversation."""
    return uuid.uuid5(_NAMESPACE, f"{user}\n{key}").bytes


class Operations:
    """Writes through one msg process."""

    def __init__(self, bus: BusProducer, store: PgMsgStore, *, wait_s: float = WAIT_S) -> None:
        self._bus = bus
        self._store = store
        self._wait_s = wait_s
        self._waiting: dict[Key, asyncio.Future[Outcome]] = {}
        self._asking: asyncio.Task[None] | None = None

    async def send(
        self,
        user: str,
        conversation_id: str,
        msg_type: int,
        body: bytes,
        client_msg_id: bytes,
        *,
        to_user: str = "",
        authority: bool = False,
    ) -> Sent:
        """One message, or one operation (msg_type 1000 to 1999, body: content.proto Operation) as bytes.

        client_msg_id: 16 bytes. to_user: the other one, where it may be a dialogue's first message. authority: of operations
        only; roles and time limits do not bind it, and the user need not be a member. Raises Unavailable: it may be on the
        bus or not; the same again, with the same client_msg_id, is safe.
        """
        record = Record(
            conversation_id=conversation_id,
            from_user=user,
            client_msg_id=client_msg_id,
            to_user=to_user,
            msg_type=msg_type,
            body=body,
            trace_id=uuid.uuid4().bytes,
            authority=authority,
        )
        partition = partition_of(conversation_id, self._bus.partitions)
        await self._bus.append({partition: [record.SerializeToString()]})
        outcome = await self._outcome((conversation_id, user, client_msg_id))
        if outcome is None:
            return Sent(int(Code.PENDING))
        return _sent(outcome)

    async def operate(
        self,
        user: str,
        conversation_id: str,
        msg_type: int,
        operation: content.Operation,
        client_msg_id: bytes,
        *,
        authority: bool = False,
    ) -> Sent:
        """`send` of an operation. A person's GROUP_CREATE goes to plato.core.conversations.group_id(user, client_msg_id)."""
        return await self.send(
            user, conversation_id, msg_type, operation.SerializeToString(), client_msg_id, authority=authority
        )

    async def first(self, user: str, conversation_id: str, client_msg_id: bytes) -> Sent | None:
        """What was decided on a record of this key; None: there is none that was. For what is sent again and would be
        refused by what holds now. Whatever made it so came behind that record, in the same partition, so its outcome is
        there."""
        key = conversation_id, user, client_msg_id
        outcome = (await self._store.outcomes([key])).get(key)
        return _sent(outcome) if outcome is not None else None

    async def _outcome(self, key: Key) -> Outcome | None:
        """What was decided; None: nothing yet."""
        future = self._waiting.setdefault(key, asyncio.get_running_loop().create_future())
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(), name="outcomes")
        try:
            async with asyncio.timeout(self._wait_s):
                # Shielded: another one may wait for the same record.
                return await asyncio.shield(future)
        except TimeoutError:
            if self._waiting.get(key) is future:
                del self._waiting[key]
            return None

    async def _ask(self) -> None:
        """Question after question, as long as somebody waits."""
        try:
            while self._waiting:
                await asyncio.sleep(POLL_S)
                try:
                    found = await self._store.outcomes(list(self._waiting))
                except Unavailable:
                    continue  # who waits gives up in time
                for key, outcome in found.items():
                    future = self._waiting.pop(key, None)
                    if future is not None and not future.done():
                        future.set_result(outcome)
        finally:
            self._asking = None


def _sent(outcome: Outcome) -> Sent:
    return Sent(outcome.code, outcome.msg_id, outcome.seq, outcome.server_at_ms, outcome.words)
