"""Which gateway next: the one that served last, if it is still listed, then the list's own order, best first.

A round tries each address once; after it the caller waits with back-off and looks the list up again.
"""

from __future__ import annotations

from collections.abc import Sequence

from plato.client.core.repeats import Chance


class Gateways:
    """The addresses of one client. given: those that its user named. listed: the last list heard, best first."""

    def __init__(self, given: Sequence[str], listed: Sequence[str], last: str | None) -> None:
        self._given = tuple(given)
        self.listed = tuple(listed)
        self.last = last
        self._avoid: str | None = None
        self._round: list[str] = []

    @property
    def known(self) -> list[str]:
        """Every address, the last list's first."""
        return [*self.listed, *(a for a in self._given if a not in self.listed)]

    def avoid(self, address: str | None) -> None:
        """This gateway is closing, full or dead: in the next round it comes after the others."""
        self._avoid = address

    def begin_round(self, listed: Sequence[str] | None, chance: Chance) -> None:
        """Orders the addresses for one round. listed: a fresh list; None: there is none, the last one and the given ones
        serve. Given addresses have no order of merit, so each client begins at another of them."""
        if listed:
            self.listed = tuple(listed)
            order = list(self.listed)
        else:
            order = list(self.listed)
            at = int(chance() * len(self._given)) if self._given else 0
            order += [a for a in self._given[at:] + self._given[:at] if a not in order]
        if self.last in order:
            order.remove(self.last)
            order.insert(0, self.last)
        if self._avoid in order:
            order.remove(self._avoid)
            order.append(self._avoid)
        self._avoid = None
        self._round = order

    def take(self) -> str | None:
        """The next address of this round; None: all were tried."""
        return self._round.pop(0) if self._round else None

    @property
    def left(self) -> int:
        """How many addresses of this round were not taken."""
        return len(self._round)

    def put_back(self, addresses: Sequence[str]) -> None:
        """These were taken and given up for another: they come first in what is left of this round."""
        self._round[:0] = addresses

    def served(self, address: str) -> bool:
        """A session was committed through this address. True: it is another one than before."""
        changed = address != self.last
        self.last = address
        return changed
