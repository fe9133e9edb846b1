"""Who gives seqs: one port for every kind of allocator. R9's max(allocated, last_seq + 1) stands behind each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from plato_msg.core.batch import Known


class Allocator(Protocol):
    """Gives runs of consecutive seqs. May leave holes, may be wrong after a fault; never decides alone."""

    async def allocate(self, wanted: Mapping[str, int], known: Known) -> dict[str, int]:
        """Per conversation the first of `wanted[conversation]` consecutive seqs. Raises Unavailable."""

    def forget(self) -> None:
        """Drops what it holds in memory; called after an error and whenever an ownership changed."""


class SingleWriter:
    """The default: counts from the database, which nobody but the partition's owner moves. No holes, no memory."""

    async def allocate(self, wanted: Mapping[str, int], known: Known) -> dict[str, int]:
        """See the port."""
        return {
            conversation: known.conversations[conversation].last_seq + 1 if conversation in known.conversations else 1
            for conversation in wanted
        }

    def forget(self) -> None:
        """See the port: there is nothing to forget."""
