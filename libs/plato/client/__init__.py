"""The Python client: never loses, doubles or re-orders a message, never needs its user after a disconnect.

    import asyncio
    import sys

    from plato.client import Client


    async def main() -> None:
        async with Client(sys.argv[1], "alice.db", ["127.0.0.1:8900"]) as client:
            sent = await client.send("hello", to="bob")  # durable here; it goes out whenever there is a connection
            print("its place is", (await sent.settled()).seq)
            async for message in client.messages():  # of every conversation, own ones included; without an end
                print(f"{message.from_user}: {message.text}")
                break


    asyncio.run(main())

Run it with `"$(plato token alice)"` as its argument. examples/echo_bot.py shows a client that reads for ever.
"""

from plato.client.access import TokenProvider
from plato.client.api import (
    Change,
    ClientError,
    Conversation,
    ConversationChanged,
    Delivery,
    Friend,
    FriendChanged,
    FriendStatus,
    Message,
    MessageChanged,
    OutboxFull,
    Overflowed,
    Phase,
    ReadBy,
    Receipt,
    Refused,
    State,
    Stopped,
    StoreError,
    StoreForeign,
    StoreInUse,
    Typing,
    Unreachable,
)
from plato.client.client import Client
from plato.client.content import Attachment, MsgType, Operation, Quote, Rich, Role
from plato.client.sent import Sent

__all__ = [
    "Attachment",
    "Change",
    "Client",
    "ClientError",
    "Conversation",
    "ConversationChanged",
    "Delivery",
    "Friend",
    "FriendChanged",
    "FriendStatus",
    "Message",
    "MessageChanged",
    "MsgType",
    "Operation",
    "OutboxFull",
    "Overflowed",
    "Phase",
    "Quote",
    "ReadBy",
    "Receipt",
    "Refused",
    "Rich",
    "Role",
    "Sent",
    "State",
    "Stopped",
    "StoreError",
    "StoreForeign",
    "StoreInUse",
    "TokenProvider",
    "Typing",
    "Unreachable",
]
