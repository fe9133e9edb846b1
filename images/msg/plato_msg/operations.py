"""What the HTTP API writes: a message, or an operation on a conversation, on behalf of a user or of the application itself.

    send → one record on the bus, as an uplink's → the partition's owner decides → its outcome, if it comes within WAIT_S

The key of a record is (conversation_id, user, client_msg_id): sent again with the same one it is done once, and the first
outcome is answered, as for frames. Such a record has no device, so every device of the user gets the push, and nobody a
receipt. Any msg process takes it. Memory: one entry per record that is waited for.
"""

from __future__ import annotations

import uuid
from typing import Final, NamedTuple

from plato.ports import BusProducer
from plato.wire.v1 import content_pb2 as content

from plato_msg.store_pg import PgMsgStore

ADMIN: Final = "admin"
"""from_user of what administrators do. Whoever issues tokens gives nobody this name."""
WAIT_S: Final = 2.0
_NAMESPACE: Final = uuid.UUID("6f1c3d0e-6f0a-5b0e-9d0c-2f6b8b0c7a51")


class Sent(NamedTuple):
    """What became of a record. code: OK, a refusal, or PENDING: it is on the bus and will be decided; then, and for a refusal,
    the numbers are 0."""

    code: int
    msg_id: int = 0
    seq: int = 0
    server_at_ms: int = 0


def client_msg_id_of(user: str, key: str) -> bytes:
    """16 bytes for a key that a caller chose: the same key of the same user is the same message, in each conversation."""
    return uuid.uuid5(_NAMESPACE, f"{user}\n{key}").bytes


class Operations:
    """Writes through one msg process."""

    def __init__(self, bus: BusProducer, store: PgMsgStore, *, wait_s: float = WAIT_S) -> None:
        self._bus = bus
        self._store = store
        self._wait_s = wait_s

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

        client_msg_id: 16 bytes. to_user: the other one, where it may be a dialogue's first message. authority: roles and time
        limits do not bind it; the user need not be a member for operations. Raises Unavailable: not known whether it is on the
        bus; the same again, with the same client_msg_id, is safe.
        """
        raise NotImplementedError

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
        """`send` of an operation. A person's GROUP_CREATE goes to group_id(user, client_msg_id) of plato.core.conversations."""
        return await self.send(
            user, conversation_id, msg_type, operation.SerializeToString(), client_msg_id, authority=authority
        )
