"""How a gateway's address is reached: by a socket, or by long polling where the network lets sockets not live.

The machine knows addresses; which way a link to one is opened is chosen here (core/fallback.py), from how the links before
it ended. Where a gateway takes polls comes from the list, from REDIRECTs and from what the application said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from plato.api.names import POLL_PATH
from plato.client.core.fallback import Fallback, Way
from plato.client.core.repeats import Chance
from plato.client.links import Link, OnClosed, OnFrames, TlsOptions, open_link, parse
from plato.client.longpoll import open_poll


class Ways:
    """The ways of one client."""

    def __init__(
        self,
        transport: str,
        tls: TlsOptions | None,
        poll_port: int,
        now_ms: Callable[[], int],
        chance: Chance,
        try_socket: Callable[[], bool],
    ) -> None:
        """poll_port: of every gateway of which nothing else is known; 0: none. try_socket: opens a link beside the one that
        stands, to take its place; False: not now."""
        self.fallback = Fallback(chance)
        self._transport = transport
        self._tls = tls
        self._poll_port = poll_port
        self._now_ms = now_ms
        self._try_socket = try_socket
        self._polls: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def learn(self, polls: Mapping[str, int]) -> None:
        """Ports of long polling, by a gateway's address."""
        self._polls.update({_place(address): port for address, port in polls.items()})

    async def open(self, address: str, on_frames: OnFrames, on_closed: OnClosed) -> Link:
        """Opens a link, see open_link. Raises OSError."""
        url = self._poll_url(address)
        if url is not None and (address.startswith(("http://", "https://")) or self._transport == "poll"):
            return await open_poll(url, on_frames, on_closed, self._tls)  # there is no other way
        way = self.fallback.choose(url is not None)
        link = _Watched(self, way, on_frames, on_closed)
        began_ms = self._now_ms()
        try:
            if way is Way.POLL and url is not None:
                link.inner = await open_poll(url, link.frames, link.gone, self._tls)
            else:
                link.inner = await open_link(address, self._transport, link.frames, link.gone, self._tls)
        except (OSError, asyncio.CancelledError) as e:
            if not self._closed:
                now_ms = self._now_ms()
                given_up = isinstance(e, asyncio.CancelledError)
                self.fallback.failed(way, now_ms, now_ms - began_ms, given_up)
                self.plan()
            raise
        self.fallback.opened(way, self._now_ms())
        self.plan()
        return link

    def plan(self) -> None:
        """Sets the timer of the next trial."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ms = self.fallback.trial_ms()
        if due_ms is not None and not self._closed:
            delay_s = max(0, due_ms - self._now_ms()) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._trial)

    def _trial(self) -> None:
        self.fallback.try_socket()
        if not self._try_socket():
            self.fallback.put_off(self._now_ms())
        self.plan()

    def forget(self) -> None:
        """The network is another one."""
        self.fallback.forget()
        self.plan()

    def ended(self, way: Way, stood_ms: int, quiet_ms: int, ours: bool) -> None:
        """A link is gone."""
        if not self._closed:
            self.fallback.ended(way, self._now_ms(), stood_ms, quiet_ms, ours)
            self.plan()

    def close(self) -> None:
        """Nothing that ends from now on tells anything."""
        self._closed = True
        self.plan()

    @property
    def now_ms(self) -> Callable[[], int]:
        """The clock."""
        return self._now_ms

    def _poll_url(self, address: str) -> str | None:
        """Where polls to this gateway go; None: it is not known to take any."""
        try:
            scheme, rest, host, port = parse(address, self._transport)
        except ValueError:
            return None  # opening it says so
        secure = "https" if self._tls else "http"
        if scheme in ("http", "https"):
            return f"{secure if scheme == 'http' else scheme}://{rest}" + ("" if "/" in rest else POLL_PATH)
        port = self._polls.get(_place(address), self._poll_port)
        return f"{secure}://{f'[{host}]' if ':' in host else host}:{port}{POLL_PATH}" if port else None


def _place(address: str) -> str:
    """host:port, which two spellings of one address share."""
    return address.rpartition("://")[2].partition("/")[0]


class _Watched:
    """A link, and how it fares."""

    inner: Link

    def __init__(self, ways: Ways, way: Way, on_frames: OnFrames, on_closed: OnClosed) -> None:
        self._ways = ways
        self._way = way
        self._on_frames = on_frames
        self._on_closed = on_closed
        self._since_ms = self._heard_ms = ways.now_ms()
        self._heard = False
        self._over = False

    @property
    def way(self) -> str:
        """See Link."""
        return self.inner.way

    def frames(self, payloads: list[bytes]) -> None:
        """They came."""
        self._heard_ms = self._ways.now_ms()
        if not self._heard:
            self._heard = True
            self._ways.fallback.heard(self._way)
        self._on_frames(payloads)

    def gone(self) -> None:
        """The other side or the network ended it."""
        self._end(ours=False)
        self._on_closed()

    def send(self, payloads: Sequence[bytes]) -> None:
        """See Link."""
        self.inner.send(payloads)

    def close(self) -> None:
        """See Link."""
        self._end(ours=True)
        self.inner.close()

    def pause(self, paused: bool) -> None:
        """See Link."""
        self.inner.pause(paused)

    async def ended(self) -> None:
        """See Link."""
        await self.inner.ended()

    def _end(self, ours: bool) -> None:
        if not self._over:
            self._over = True
            now_ms = self._ways.now_ms()
            self._ways.ended(self._way, now_ms - self._since_ms, now_ms - self._heard_ms, ours)
