"""TLS between the parts: mutual on gRPC, shown on admin ports, read again when the files change."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import trustme
from grpc import aio
from plato.adapters.grpc_peers import Peers
from plato.core.errors import Unavailable
from plato.runtime import admin, tls
from plato.runtime.process import StartError

from tests.ports import free_port

METHOD = "/test.Echo/Say"


def write(folder: Path, authority: trustme.CA, name: str = tls.INTERNAL_NAME) -> Path:
    folder.mkdir(exist_ok=True)
    made = authority.issue_cert(name)
    (folder / tls.KEY).write_bytes(made.private_key_pem.bytes())
    (folder / tls.CERTIFICATE).write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    authority.cert_pem.write_to_path(str(folder / tls.CA))
    return folder


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(autouse=True)
def looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "LOOK_S", 0.0)


class _Echo(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # it takes none at run time
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def say(request: bytes, _: Any) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(say) if handler_call_details.method == METHOD else None


@pytest.fixture
async def echo() -> AsyncIterator[Callable[[tls.InternalTls], Any]]:
    servers: list[aio.Server] = []

    async def start(own: tls.InternalTls) -> str:
        server = aio.server()
        server.add_generic_rpc_handlers((_Echo(),))
        port = tls.add_port(own, server, "127.0.0.1:0")
        await server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        await server.stop(None)


async def say(channel: aio.Channel) -> bytes:
    call: Any = channel.unary_unary(METHOD)  # type: ignore[call-arg]  # the stubs do not know that bytes may stay bytes
    answer: bytes = await call(b"hello", timeout=5)
    return answer


async def test_both_sides_with_the_same_authority_talk(echo: Any, authority: trustme.CA, tmp_path: Path) -> None:
    own = tls.InternalTls(write(tmp_path / "a", authority))
    async with tls.channel(own, await echo(own), ()) as channel:
        assert await say(channel) == b"hello"


@pytest.mark.parametrize("case", ["plain", "no certificate", "another authority", "another name"])
async def test_whoever_is_none_of_ours_is_refused(echo: Any, authority: trustme.CA, tmp_path: Path, case: str) -> None:
    own = tls.InternalTls(write(tmp_path / "a", authority))
    addr = await echo(own)
    name = [("grpc.ssl_target_name_override", tls.INTERNAL_NAME)]
    if case == "plain":
        channel = tls.channel(None, addr, ())
    elif case == "no certificate":
        channel = aio.secure_channel(addr, grpc.ssl_channel_credentials(own.files()[0]), options=name)
    elif case == "another authority":
        channel = tls.channel(tls.InternalTls(write(tmp_path / "b", trustme.CA())), addr, ())
    else:
        other = tls.InternalTls(write(tmp_path / "c", authority, "somebody.example"))
        channel = tls.channel(own, await echo(other), ())
    async with channel:
        with pytest.raises(aio.AioRpcError):
            await say(channel)


async def test_new_files_are_used_on_both_sides(echo: Any, authority: trustme.CA, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", authority)
    own = tls.InternalTls(folder)
    addr = await echo(own)
    peers = Peers("shard", own)
    first = peers.channel("s0", addr, "u")
    assert await say(first) == b"hello"
    assert peers.channel("s0", addr, "u") is first
    write(folder, trustme.CA())  # another authority altogether: only new files on both sides fit
    second = peers.channel("s0", addr, "u")
    assert second is not first
    assert await say(second) == b"hello"
    old = aio.secure_channel(addr, grpc.ssl_channel_credentials(authority.cert_pem.bytes()))
    async with old:
        with pytest.raises(aio.AioRpcError):
            await say(old)
    await peers.close()


async def test_files_that_do_not_fit_are_passed_over(authority: trustme.CA, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", authority)
    own = tls.InternalTls(folder)
    before, version = own.files(), own.version
    (folder / tls.KEY).write_bytes(authority.issue_cert("other").private_key_pem.bytes())
    assert own.files() == before
    assert own.version == version
    assert str(folder) in own.failure
    write(folder, authority)
    assert own.files() != before
    assert own.version == version + 1
    assert not own.failure


@pytest.mark.parametrize("missing", [tls.CA, tls.CERTIFICATE, tls.KEY])
def test_a_missing_file_is_said_at_the_start(authority: trustme.CA, tmp_path: Path, missing: str) -> None:
    folder = write(tmp_path / "a", authority)
    (folder / missing).unlink()
    with pytest.raises(StartError, match=rf"tls\.internal_dir: .*{missing}"):
        tls.internal(folder)


async def test_an_admin_port_shows_its_certificate_and_asks_for_none(
    authority: trustme.CA, tmp_path: Path, unused_port: int
) -> None:
    folder = write(tmp_path / "a", authority)
    own = tls.InternalTls(folder)
    server = admin.HttpServer(admin.app(str), "127.0.0.1", unused_port, own.serve())
    await server.start()
    url = f"https://127.0.0.1:{unused_port}/readyz"
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(url, ssl=own.ask(), server_hostname=tls.INTERNAL_NAME) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(url, ssl=own.ask(), server_hostname="other.example")
        fresh = write(folder, trustme.CA())
        # Nobody looks but the port itself: at its next handshake, which shows what the one before it found.
        await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", unused_port))
        shown = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", unused_port))
        assert shown.partition("-----END")[0] in (fresh / tls.CERTIFICATE).read_text()
    finally:
        await server.stop()


@pytest.fixture
def unused_port() -> int:
    return free_port()


async def test_a_refused_peer_is_unavailable_and_says_why(echo: Any, authority: trustme.CA, tmp_path: Path) -> None:
    addr = await echo(tls.InternalTls(write(tmp_path / "a", authority)))
    peers = Peers("shard", tls.InternalTls(write(tmp_path / "b", trustme.CA())))
    channel = peers.channel("s0", addr, "u")
    with pytest.raises(Unavailable, match="shard s0"):
        await peers.answer("s0", channel, say(channel))
    await peers.close()
