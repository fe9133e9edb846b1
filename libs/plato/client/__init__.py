"""The Python client: never loses, doubles or re-orders a message, never needs its user after a disconnect."""

from plato.client.access import TokenProvider
from plato.client.api import (
    ClientError,
    Conversation,
    Delivery,
    Message,
    OutboxFull,
    Phase,
    Receipt,
    Refused,
    State,
    Stopped,
    StoreError,
    StoreForeign,
    StoreInUse,
)
from plato.client.client import Client
from plato.client.sent import Sent

__all__ = [
    "Client",
    "ClientError",
    "Conversation",
    "Delivery",
    "Message",
    "OutboxFull",
    "Phase",
    "Receipt",
    "Refused",
    "Sent",
    "State",
    "Stopped",
    "StoreError",
    "StoreForeign",
    "StoreInUse",
    "TokenProvider",
]
