"""The one or two connections of a client: the first one stands; a second one, to another gateway, may take its place.

What comes goes to the machine with its link's number, so that it knows which one speaks; what the machine wants sent, opened
or closed is done here at once. A link that was closed is released in the background.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from plato.client.links import Link, OnClosed, OnFrames

_log = logging.getLogger("plato.client")

Open = Callable[[str, OnFrames, OnClosed], Coroutine[Any, Any, Link]]
"""Opens a link to an address. Raises OSError."""


class Machine(Protocol):
    """What is told of links."""

    def opened(self, link_no: int, now_ms: int, way: str) -> bool:
        """The link is open. False: it is not wanted any more."""

    def closed(self, link_no: int, now_ms: int) -> None:
        """The link could not be opened, or is gone."""

    def frames(self, link_no: int, payloads: Iterable[bytes], now_ms: int) -> None:
        """Frames came."""


class _Place:
    """Room for one link. link_no: of the link; 0: none. opening: attempts at it by their numbers."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.link_no = 0
        self.opening: dict[int, asyncio.Task[None]] = {}


class LinkPair:
    """`first` and `second`. After each call of the machine `poke` is called: a round is due."""

    def __init__(self, machine: Machine, open_link: Open, now_ms: Callable[[], int], poke: Callable[[], None]) -> None:
        self._machine = machine
        self._open_link = open_link
        self._now_ms = now_ms
        self._poke = poke
        self._first = _Place()
        self._second = _Place()
        self._paused = False
        self._endings: set[asyncio.Task[None]] = set()

    def connect(self, link_no: int, address: str) -> None:
        """Begins to open the first link, beside other attempts at it. The first that the machine takes is it."""
        self._connect(self._first, link_no, address)
        self._paused = False

    def give_up(self, link_no: int) -> None:
        """An attempt at the first link is not wanted any more."""
        if (opening := self._first.opening.pop(link_no, None)) is not None:
            opening.cancel()

    def connect_second(self, link_no: int, address: str) -> None:
        """Opens the second link; one that stood is closed."""
        self._close(self._second)
        self._connect(self._second, link_no, address)

    def send(self, link_no: int, frames: Sequence[bytes]) -> None:
        """Sends on the first link, if it is still that one."""
        if self._first.link is not None and self._first.link_no == link_no:
            self._first.link.send(frames)

    def send_second(self, frames: Sequence[bytes]) -> None:
        """Sends on the second link."""
        if self._second.link is not None:
            self._second.link.send(frames)

    def pause(self, paused: bool) -> None:
        """Has the first link read no further, or again."""
        if self._first.link is not None and self._paused != paused:
            self._paused = paused
            self._first.link.pause(paused)

    def go_over(self) -> None:
        """The second link becomes the first, which is closed."""
        self.close()
        self._first, self._second = self._second, self._first
        self._paused = False

    def close(self) -> None:
        """Closes the first link, and gives all attempts at it up."""
        self._close(self._first)

    def close_second(self) -> None:
        """Closes the second link, or gives its attempt up."""
        self._close(self._second)

    async def ended(self) -> None:
        """Waits, after the closes, until everything is released."""
        attempts = [task for place in (self._first, self._second) for task in place.opening.values()]
        await asyncio.gather(*attempts, *self._endings, return_exceptions=True)

    def _connect(self, place: _Place, link_no: int, address: str) -> None:
        place.opening[link_no] = opening = asyncio.get_running_loop().create_task(self._open(link_no, address))
        self._endings.add(opening)
        opening.add_done_callback(self._endings.discard)

    async def _open(self, link_no: int, address: str) -> None:
        def on_frames(payloads: list[bytes]) -> None:
            self._machine.frames(link_no, payloads, self._now_ms())
            self._poke()

        def on_closed() -> None:
            place = self._place(link_no)
            if place is not None and place.link is not None and place.link_no == link_no:
                self._release(place.link)
                place.link = None
            self._machine.closed(link_no, self._now_ms())
            self._poke()

        try:
            link = await self._open_link(address, on_frames, on_closed)
        except OSError as e:
            _log.debug("no connection to %s: %s", address, e)
            place = self._place(link_no)
            if place is not None:
                place.opening.pop(link_no, None)
            self._machine.closed(link_no, self._now_ms())
            self._poke()
            return
        place = self._place(link_no)
        if place is not None:
            place.opening.pop(link_no, None)
        if place is None or not self._machine.opened(link_no, self._now_ms(), link.way):
            link.close()
            self._release(link)
            return
        place.link, place.link_no = link, link_no
        self._poke()

    def _place(self, link_no: int) -> _Place | None:
        for place in (self._first, self._second):
            if place.link_no == link_no or link_no in place.opening:
                return place
        return None

    def _close(self, place: _Place) -> None:
        for opening in place.opening.values():
            opening.cancel()
        place.opening.clear()
        if place.link is not None:
            link, place.link = place.link, None
            link.close()
            self._release(link)
        place.link_no = 0

    def _release(self, link: Link) -> None:
        task = asyncio.get_running_loop().create_task(link.ended())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
