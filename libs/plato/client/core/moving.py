"""The way to another gateway while the connection stands: a second link, from a REDIRECT to its own commit.

    REDIRECT ──> CONNECTING ──> HELLO (ReConn) ──> COMMITTING (first Sync) ──> committed: the machine goes over to it
                     ^  └───── the next way, then those of a fresh list ─┘         none left: stay where we are

Nothing here touches the connection that stands: it sends and receives until the Sync is answered. The machine owns both
links, hands in what comes on this one, and takes `frames` for it. Once a Sync went out here, a REPLACED on the first link
is most likely our own commit's, ahead of its ACK; that it was another's shows by SECRET_WRONG at the next ReConn.

Memory: two requests, and the addresses of one REDIRECT or list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final

from google.protobuf.message import DecodeError

from plato.api.names import POLL_PATH, WS_PATH
from plato.client.core import wire
from plato.client.core.model import Session
from plato.client.core.repeats import Chance, Request, Requests, Timing
from plato.client.core.traffic import FirstSync, Traffic
from plato.core.codes import Action, Code, action
from plato.core.errors import PeerError
from plato.wire.v1 import client_pb2 as pb

HELLOS_PER_LINK: Final = 3
FIRST: Final = 3
"""A client begins at one of so many first ways, by chance: not all go to one gateway."""


class Step(Enum):
    """Where the second link stands."""

    LISTING = "listing"
    CONNECTING = "connecting"
    HELLO = "hello"
    COMMITTING = "committing"


class Outcome(Enum):
    """What became of the second link."""

    GOES_ON = "goes on"
    COMMITTED = "committed"
    FAILED = "failed"


def ways(redirect: pb.RedirectMsg, current: str, transport: str, chance: Chance) -> list[str]:
    """The addresses to try for a REDIRECT that came on a link to `current`, in their order. They are reached as that one is.

    transport: what an address without a scheme means.
    """
    scheme = _scheme(current, transport)
    found = [address for gateway in redirect.gateways if (address := _address(gateway, scheme))]
    if len(found) > 1:
        found.insert(0, found.pop(int(chance() * min(FIRST, len(found)))))
    return found


def polls(redirect: pb.RedirectMsg, current: str, transport: str) -> dict[str, int]:
    """{address as `ways` gives it: port of long polling}."""
    scheme = _scheme(current, transport)
    return {_address(g, scheme): g.poll_port for g in redirect.gateways if g.poll_port}


def _scheme(current: str, transport: str) -> str:
    found = current.partition("://")[0] if "://" in current else transport
    return "http" if found == "poll" else found


def _address(gateway: pb.RedirectGateway, scheme: str) -> str:
    """As the present gateway is reached; "" where this one cannot be."""
    host = f"[{gateway.ip}]" if ":" in gateway.ip else gateway.ip
    port, path = gateway.port, ""
    if scheme in ("ws", "wss"):
        port, path = gateway.ws_port, WS_PATH
    elif scheme in ("http", "https"):
        port, path = gateway.poll_port, POLL_PATH
    return f"{scheme}://{host}:{port}{path}" if host and port else ""


def _place(address: str) -> str:
    """host:port, which two spellings of one address share."""
    return address.rpartition("://")[2].partition("/")[0]


class Move:
    """One attempt to go over. `link_no` is 0 while no link is wanted."""

    def __init__(
        self,
        session: Session,
        reconn: bytes,
        current: str,
        addresses: Iterable[str],
        traffic: Traffic,
        timing: Timing,
        chance: Chance,
    ) -> None:
        """session: the one that stands; reconn: the frame that resumes it. current: where it stands now."""
        self._session = session
        self._reconn = reconn
        self.link_no = 0
        self.address = ""
        self.way = ""
        self.step = Step.LISTING
        self.frames: list[bytes] = []
        """To send on the second link; the machine takes them."""
        self.listed = False
        """A fresh list was asked for; after it there is nothing more to try."""
        self.code = 0
        """Why it failed, where a code said so."""
        self.welcome: pb.ACKMsg | None = None
        self.committed = (0, 0)
        """(run, push_no) of the commit."""
        self.sync: FirstSync | None = None
        self.candidate: Session | None = None
        self._traffic = traffic
        self._timing = timing
        self._requests = Requests(timing, chance)
        self._tried = {_place(current)}
        self._ways = list(addresses)
        self._until_ms = 0
        self._hellos = 0

    @property
    def running(self) -> bool:
        """Whether a second link is open or opening."""
        return self.link_no != 0

    def more(self, addresses: Sequence[str]) -> None:
        """The fresh list."""
        self._ways += addresses

    def next_way(self, link_no: int, now_ms: int) -> bool:
        """Tries the next address, by this number. False: there is none left."""
        self.cancel()
        while self._ways:
            address = self._ways.pop(0)
            if _place(address) not in self._tried:
                self._tried.add(_place(address))
                self.link_no, self.address = link_no, address
                self.step = Step.CONNECTING
                self._until_ms = now_ms + self._timing.connect_timeout_ms
                self._hellos = self.code = 0
                return True
        return False

    def cancel(self) -> None:
        """The second link is not wanted any more."""
        self.link_no, self.address, self.step = 0, "", Step.LISTING
        self._forget()

    def _forget(self) -> None:
        self._requests.clear()
        self.frames.clear()
        self.sync = self.welcome = self.candidate = None

    def opened(self, now_ms: int, way: str) -> None:
        """The second link is open, in this way."""
        self.way = way
        self._hello(now_ms)

    def tick(self, now_ms: int) -> Outcome:
        """Time passed."""
        if self.step is Step.CONNECTING and now_ms >= self._until_ms:
            return Outcome.FAILED
        again = self._requests.expire(now_ms)
        if again is None:
            return Outcome.FAILED
        self.frames += again
        return Outcome.GOES_ON

    def deadline_ms(self) -> int | None:
        """When `tick` has something to do next."""
        return self._until_ms if self.step is Step.CONNECTING else self._requests.deadline_ms()

    def frame(self, payload: bytes, now_ms: int) -> Outcome:
        """A frame came on the second link. After COMMITTED it, and all that follow, are the machine's to handle."""
        try:
            cmd = wire.open_cmd(payload)
            match cmd.Type:
                case pb.ACK:
                    return self._ack(pb.ACKMsg.FromString(cmd.Payload), now_ms)
                case pb.SYNCED:
                    page = pb.SyncedMsg.FromString(cmd.Payload)
                    ours = self.sync is not None and page.ref == self.sync.ref
                    return Outcome.COMMITTED if ours else Outcome.GOES_ON  # the commit's ACK was lost
                case pb.KICK:
                    return self._failed(pb.KickMsg.FromString(cmd.Payload).code)
                case pb.ERROR:
                    return self._error(pb.ErrorMsg.FromString(cmd.Payload), now_ms)
        except (PeerError, DecodeError):
            return self._failed(int(Code.MALFORMED))
        return Outcome.GOES_ON

    def _hello(self, now_ms: int) -> None:
        self._forget()
        self._hellos += 1
        self.step = Step.HELLO
        self.frames.append(self._requests.ask(pb.RECONN, 0, self._reconn, now_ms))

    def _ack(self, ack: pb.ACKMsg, now_ms: int) -> Outcome:
        request = self._requests.find(ack.Type, ack.ref)
        if request is None:
            return Outcome.GOES_ON
        if ack.Code:
            return self._coded(request, ack.Code, now_ms, ack.retry_ms)
        if ack.Type == pb.SYNC:
            self.committed = ack.run, ack.push_no
            return Outcome.COMMITTED
        self._requests.done(ack.Type, ack.ref)
        if ack.user_id and ack.user_id != self._traffic.user:
            return self._failed(int(Code.TOKEN_INVALID))
        self.welcome = ack
        self.candidate = Session(ack.ConnID, ack.secret or self._session.secret)
        self.sync = self._traffic.first_sync()
        self.step = Step.COMMITTING
        self.frames.append(self._requests.ask(pb.SYNC, self.sync.ref, self.sync.frame, now_ms))
        return Outcome.GOES_ON

    def _error(self, error: pb.ErrorMsg, now_ms: int) -> Outcome:
        request = self._requests.find(error.type, error.ref) or self._requests.only(error.type)
        if request is not None:
            return self._coded(request, error.code, now_ms)
        if action(error.code) in (Action.RECONNECT, Action.STOP):
            return self._failed(error.code)
        return Outcome.GOES_ON

    def _coded(self, request: Request, code: int, now_ms: int, retry_ms: int = 0) -> Outcome:
        act = action(code)
        if act is Action.NONE:
            self._requests.pending(request, now_ms)
        elif act is not Action.RETRY:
            return self._failed(code)
        elif code == Code.TRY_AGAIN and request.kind == pb.SYNC:
            if self._hellos >= HELLOS_PER_LINK:
                return self._failed(code)
            self._hello(now_ms)
        else:
            self._requests.later(request, now_ms, retry_ms)
        return Outcome.GOES_ON

    def _failed(self, code: int) -> Outcome:
        self.code = code
        return Outcome.FAILED
