"""Who gives seqs: one port for every kind of allocator. R9's max(allocated, last_seq + 1) stands behind each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from plato_msg.core.batch import Known

SEGMENT: Final = 1_000
"""Numbers that are reserved in the database at once."""
JUMP: Final = 1_000
"""What a counter skips when it was lost: more than it can have given since its number was last kept (design §8)."""


class Allocator(Protocol):
    """Gives runs of consecutive seqs. May leave holes, may be wrong after a fault; never decides alone."""

    async def allocate(self, wanted: Mapping[str, int], known: Known) -> dict[str, int]:
        """Per conversation the first of `wanted[conversation]` consecutive seqs. Raises Unavailable."""

    def forget(self) -> None:
        """Drops what it holds in memory; called after an error and whenever an ownership changed."""


class SeqLedger(Protocol):
    """What is reserved of each conversation's seqs, in the database; commits at once, apart from the batch: a reservation
    whose batch fails is a hole, and never a number that comes again."""

    async def reserved(self, conversations: Iterable[str]) -> dict[str, int]:
        """{conversation: the greatest number that may have been given}; absent: nothing was ever reserved."""

    async def reserve(self, above: Mapping[str, int], count: int) -> dict[str, int]:
        """Of each conversation the last of `count` numbers that are ours alone: greater than `above[conversation]` and than
        all that was reserved before."""


class SingleWriter:
    """The default: counts from the database, which nobody but the partition's owner moves. No holes, no memory."""

    async def allocate(self, wanted: Mapping[str, int], known: Known) -> dict[str, int]:
        """See the port."""
        return {conversation: last_seq(known, conversation) + 1 for conversation in wanted}

    def forget(self) -> None:
        """See the port: there is nothing to forget."""


def last_seq(known: Known, conversation: str) -> int:
    """The newest committed seq; 0 of a conversation that does not exist yet."""
    held = known.conversations.get(conversation)
    return held.last_seq if held is not None else 0
