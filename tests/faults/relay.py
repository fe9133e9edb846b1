"""A TCP relay that knows frames: what stands between a client and a gateway when the network misbehaves.

    client ⇄ Relay (listens on a loopback port of its own) ⇄ target

Bytes go through in order, both ways. On the way a test may hold them (`pause`), swallow them without a FIN on either side
(`cut`: what a phone in a tunnel looks like), forget connections that stood idle, in the same way (`idle_drop_s`: what a
mobile network's address translation does), break both sockets with a reset (`reset`), hold back a close
(`close_delay_s`), write in pieces of n bytes (`split_bytes`), or judge each whole frame (`up_rule`, `down_rule`: pass, drop,
delay). Rules need TCP frames; everything else works on any TCP stream. Memory: one read and one frame per direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Final

from plato.core.frames import FrameReader, pack
from plato.wire.v1 import client_pb2 as wire

Rule = Callable[[bytes], float]
"""Judges one payload: PASS, DROP, or the seconds to hold it (and all behind it) back."""

PASS: Final = 0.0
DROP: Final = -1.0
_READ_BYTES: Final = 65_536


def command(payload: bytes) -> wire.MsgCmd:
    """The MsgCmd of a payload."""
    return wire.MsgCmd.FromString(payload)


def drop_first(count: int, wanted: Callable[[wire.MsgCmd], bool]) -> Rule:
    """A rule that drops the first `count` frames that `wanted` says yes to."""
    left = [count]

    def rule(payload: bytes) -> float:
        if left[0] and wanted(command(payload)):
            left[0] -= 1
            return DROP
        return PASS

    return rule


def is_ack_of(cmd_type: wire.CmdType.ValueType) -> Callable[[wire.MsgCmd], bool]:
    """Says yes to ACK frames that answer a frame of `cmd_type`."""

    def wanted(cmd: wire.MsgCmd) -> bool:
        return cmd.Type == wire.ACK and wire.ACKMsg.FromString(cmd.Payload).Type == cmd_type

    return wanted


class Relay:
    """Use as `async with Relay(host, port) as relay:` and connect to (`relay.host`, `relay.port`)."""

    def __init__(self, target_host: str, target_port: int) -> None:
        self.target = (target_host, target_port)
        self.host, self.port = "127.0.0.1", 0
        self.up_rule: Rule | None = None
        self.down_rule: Rule | None = None
        self.split_bytes = 0
        self.close_delay_s = 0.0
        self.kill_after_bytes = 0
        """A connection that carried so many bytes, both ways together, is reset: a network that kills sockets. 0: none."""
        self.killed = 0
        self.idle_drop_s = 0.0
        """Above 0: a connection on which no byte went either way for so long is cut when the next one comes."""
        self.idle_drops = 0
        """Connections that were cut so."""
        self.refuse = False
        """True: new connections are reset at once."""
        self.accepted = 0
        """Connections taken since the start."""
        self.frames: list[tuple[str, bytes]] = []
        """("up" or "down", payload) of each frame that a rule saw, in the order of passing."""
        self.ended: list[str] = []
        """Whose end was seen, in order: "up" (the client's) or "down" (the target's); on cut connections too."""
        self.errors: list[Exception] = []
        """What a rule raised, or frames that no rule can judge; leaving the relay raises the first."""
        self._open = asyncio.Event()
        self._open.set()
        self._pairs: set[_Pair] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._accept, self.host, 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for pair in list(self._pairs):
            pair.stop()
        while self._pairs:
            await asyncio.wait([p.task for p in self._pairs])
        if self.errors:
            raise self.errors[0]

    @property
    def live(self) -> int:
        """Connections that are passed on now; cut ones do not count."""
        return sum(not p.is_cut for p in self._pairs)

    def pause(self) -> None:
        """Holds all bytes, both ways, until `resume`. Nothing is lost: TCP's buffers fill."""
        self._open.clear()

    def resume(self) -> None:
        """Lets the held bytes go on."""
        self._open.set()

    def cut(self) -> int:
        """Stops passing bytes on the connections of now, for ever, and closes neither side. Returns how many."""
        cut = [p for p in self._pairs if not p.is_cut]
        for pair in cut:
            pair.is_cut = True
        return len(cut)

    def reset(self) -> None:
        """Ends the connections of now with a RST to both sides."""
        for pair in list(self._pairs):
            pair.reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        pair = _Pair(self, reader, writer)
        self._pairs.add(pair)
        try:
            await pair.run()
        finally:
            self._pairs.discard(pair)


class _Pair:
    """One client's connection and its twin to the target."""

    def __init__(self, relay: Relay, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.is_cut = False
        self._active_s = asyncio.get_running_loop().time()
        self._relay = relay
        self._carried_bytes = 0
        self._client = (reader, writer)
        self._writers = [writer]
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        relay = self._relay
        if relay.refuse:
            self.reset()
            return
        try:
            far = await asyncio.open_connection(*relay.target)
        except OSError:
            self.reset()
            return
        self._writers.append(far[1])
        for writer in self._writers:
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pumps = [
            asyncio.ensure_future(self._pump("up", self._client[0], far[1])),
            asyncio.ensure_future(self._pump("down", far[0], self._client[1])),
            asyncio.ensure_future(self._stopped.wait()),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if relay.close_delay_s and not self._stopped.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), relay.close_delay_s)
        finally:
            for pump in pumps:
                pump.cancel()
            ends = await asyncio.gather(*pumps, return_exceptions=True)
            relay.errors += [e for e in ends if isinstance(e, Exception)]
            for writer in self._writers:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def _pump(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes bytes one way until their end. While cut it goes on reading, so that no side sees a full window."""
        relay = self._relay
        frames = FrameReader(1 << 30)
        with contextlib.suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                await relay._open.wait()
                self._forget_idle()
                rule = relay.up_rule if way == "up" else relay.down_rule
                if rule is None:
                    await self._write(writer, data)
                    continue
                for payload in frames.feed(data):
                    relay.frames.append((way, payload))
                    verdict = rule(payload)
                    if verdict > 0:
                        await asyncio.sleep(verdict)
                    if verdict >= 0:
                        await self._write(writer, pack(payload))
        relay.ended.append(way)
        if self.is_cut:  # nobody hears of this end
            await self._stopped.wait()

    def _forget_idle(self) -> None:
        now_s = asyncio.get_running_loop().time()
        idle_s, self._active_s = now_s - self._active_s, now_s
        if 0 < self._relay.idle_drop_s < idle_s and not self.is_cut:
            self._relay.idle_drops += 1
            self.is_cut = True

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        size = self._relay.split_bytes or len(data)
        for at in range(0, len(data), size):
            if self.is_cut:
                return
            self._carried_bytes += len(data[at : at + size])
            if 0 < self._relay.kill_after_bytes < self._carried_bytes:
                self._relay.killed += 1
                self.reset()
                return
            writer.write(data[at : at + size])
            await writer.drain()

    def stop(self) -> None:
        self._stopped.set()

    def reset(self) -> None:
        for writer in self._writers:
            # A linger time of zero makes close() send RST instead of FIN.
            sock = writer.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._stopped.set()
