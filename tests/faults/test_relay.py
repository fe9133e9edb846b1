"""The relay does to a stream what the fault tests say it does: otherwise they would prove nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from plato.core.frames import FrameReader, pack
from plato.wire.v1 import client_pb2 as wire

from tests.faults import relay as relays
from tests.faults.relay import Relay
from tests.faults.waiting import until


class Target:
    """A server that keeps what it reads and when it saw an end."""

    def __init__(self) -> None:
        self.reads: list[bytes] = []
        self.ends = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            while data := await reader.read(65_536):
                self.reads.append(data)
        except ConnectionError:
            pass
        self.ends += 1
        writer.close()

    @property
    def data(self) -> bytes:
        return b"".join(self.reads)


@pytest.fixture
async def target() -> AsyncIterator[tuple[Target, int]]:
    made = Target()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    yield made, server.sockets[0].getsockname()[1]
    server.close()
    for writer in made.writers:
        writer.close()


def frame(cmd_type: wire.CmdType.ValueType, payload: bytes = b"") -> bytes:
    return pack(wire.MsgCmd(Type=cmd_type, Payload=payload).SerializeToString())


async def test_bytes_pass_both_ways_and_a_close_too(target: tuple[Target, int]) -> None:
    made, port = target
    async with Relay("127.0.0.1", port) as relay:
        reader, writer = await asyncio.open_connection(relay.host, relay.port)
        writer.write(b"hello")
        await until(lambda: made.data == b"hello")
        made.writers[0].write(b"there")
        assert await reader.readexactly(5) == b"there"
        writer.close()
        await until(lambda: made.ends == 1)


async def test_pause_holds_and_resume_lets_go(target: tuple[Target, int]) -> None:
    made, port = target
    async with Relay("127.0.0.1", port) as relay:
        _, writer = await asyncio.open_connection(relay.host, relay.port)
        await until(lambda: relay.live == 1)
        relay.pause()
        writer.write(b"held")
        with pytest.raises(TimeoutError):
            await until(lambda: made.data != b"", 0.2)
        relay.resume()
        await until(lambda: made.data == b"held")
        writer.close()


async def test_cut_is_silent_on_both_sides(target: tuple[Target, int]) -> None:
    made, port = target
    async with Relay("127.0.0.1", port) as relay:
        reader, writer = await asyncio.open_connection(relay.host, relay.port)
        writer.write(b"before")
        await until(lambda: made.data == b"before")
        assert relay.cut() == 1
        writer.write(b"after")
        made.writers[0].write(b"answer")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(100), 0.2)
        assert made.data == b"before"
        writer.close()
        with pytest.raises(TimeoutError):
            await until(lambda: made.ends == 1, 0.2)
        assert relay.live == 0
        await until(lambda: relay.ended == ["up"])
        _, other = await asyncio.open_connection(relay.host, relay.port)
        other.write(b"new")
        await until(lambda: made.data == b"beforenew")
        other.close()


async def test_reset_breaks_both_sides(target: tuple[Target, int]) -> None:
    made, port = target
    async with Relay("127.0.0.1", port) as relay:
        reader, writer = await asyncio.open_connection(relay.host, relay.port)
        await until(lambda: relay.live == 1 and len(made.writers) == 1)
        relay.reset()
        with pytest.raises(ConnectionError):
            await reader.readexactly(1)
        await until(lambda: made.ends == 1)
        writer.close()


async def test_close_delay_holds_the_end_back(target: tuple[Target, int]) -> None:
    made, port = target
    async with Relay("127.0.0.1", port) as relay:
        relay.close_delay_s = 0.4
        _, writer = await asyncio.open_connection(relay.host, relay.port)
        writer.write(b"x")
        await until(lambda: made.data == b"x")
        loop = asyncio.get_running_loop()
        at = loop.time()
        writer.close()
        await until(lambda: made.ends == 1)
        assert loop.time() - at >= 0.4


async def test_rules_drop_and_delay_whole_frames(target: tuple[Target, int]) -> None:
    made, port = target
    async with Relay("127.0.0.1", port) as relay:
        relay.up_rule = relays.drop_first(1, lambda cmd: cmd.Type == wire.UP)
        _, writer = await asyncio.open_connection(relay.host, relay.port)
        sent = [frame(wire.LOGIN, b"login"), frame(wire.UP, b"first"), frame(wire.UP, b"second")]
        joined = b"".join(sent)
        for at in range(len(joined)):  # frames cut anywhere are still judged whole
            writer.write(joined[at : at + 1])
            await writer.drain()
        await until(lambda: made.data == sent[0] + sent[2])
        assert [way for way, _ in relay.frames] == ["up"] * 3
        writer.close()


def test_is_ack_of_looks_at_the_answered_type() -> None:
    wanted: Callable[[wire.MsgCmd], bool] = relays.is_ack_of(wire.UP)
    assert wanted(wire.MsgCmd(Type=wire.ACK, Payload=wire.ACKMsg(Type=wire.UP).SerializeToString()))
    assert not wanted(wire.MsgCmd(Type=wire.ACK, Payload=wire.ACKMsg(Type=wire.LOGIN).SerializeToString()))
    assert not wanted(wire.MsgCmd(Type=wire.UP))


async def test_split_writes_pieces(target: tuple[Target, int]) -> None:
    made, port = target
    async with Relay("127.0.0.1", port) as relay:
        relay.split_bytes = 1
        _, writer = await asyncio.open_connection(relay.host, relay.port)
        data = frame(wire.UP, b"body") * 20
        writer.write(data)
        await until(lambda: made.data == data)
        assert len(made.reads) > 1
        assert len(FrameReader().feed(made.data)) == 20
        writer.close()


async def test_refuse_resets_new_connections(target: tuple[Target, int]) -> None:
    _, port = target
    async with Relay("127.0.0.1", port) as relay:
        relay.refuse = True
        reader, writer = await asyncio.open_connection(relay.host, relay.port)
        with pytest.raises(ConnectionError):
            await reader.readexactly(1)
        writer.close()


async def test_an_error_of_a_rule_is_raised_at_the_end(target: tuple[Target, int]) -> None:
    _, port = target

    def broken(_: bytes) -> float:
        raise LookupError("broken rule")

    relay = Relay("127.0.0.1", port)
    await relay.__aenter__()
    relay.up_rule = broken
    reader, writer = await asyncio.open_connection(relay.host, relay.port)
    writer.write(frame(wire.UP, b"x"))
    assert await reader.read() == b""
    writer.close()
    with pytest.raises(LookupError):
        await relay.__aexit__(None, None, None)
