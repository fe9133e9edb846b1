"""Who may read /v1/report: tokens in files, several at once, read again when they change; without a folder loopback only."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from plato.runtime import report
from plato.runtime.admin import HttpServer, app
from plato.runtime.report import BearerTokens, ranges
from plato.runtime.settings import load


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class Served:
    """The route on a port, as a process has it."""

    def __init__(self, folder: Path | None, port: int) -> None:
        flags: dict[str, Any] = {"process.name": "edge-0", "process.uid": "uid-0", "process.admin_tokens_dir": folder}
        settings = load(None, environ={}, flags=flags)
        self.url = f"http://127.0.0.1:{port}/v1/report"
        self.server = HttpServer(
            app(lambda: "", [report.route(settings, lambda: {"epoch_seen": 7})]), "127.0.0.1", port
        )

    async def __aenter__(self) -> Served:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop()


async def test_only_a_valid_token_is_answered(
    tmp_path: Path, unused_tcp_port: int, client: aiohttp.ClientSession
) -> None:
    (tmp_path / "one").write_text("first-token\n")
    (tmp_path / "two").write_text("second-token")
    async with Served(tmp_path, unused_tcp_port) as served:
        for wrong in (
            {},
            {"Authorization": "first-token"},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer first-toke"},
            {"Authorization": "Bearer first-token2"},
            {"Authorization": "Basic first-token"},
            {"Authorization": "Bearer \u00fc"},
        ):
            async with client.get(served.url, headers=wrong) as answer:
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer"), wrong
                assert "epoch_seen" not in await answer.text()
        boots = set()
        for token in ("first-token", "second-token"):
            async with client.get(served.url, headers={"Authorization": f"bearer {token}"}) as answer:
                said = await answer.json()
                assert (said["name"], said["uid"], said["epoch_seen"]) == ("edge-0", "uid-0", 7)
                boots.add(said["boot"])
        assert len(boots) == 1


async def test_without_a_folder_loopback_is_answered(unused_tcp_port: int, client: aiohttp.ClientSession) -> None:
    async with Served(None, unused_tcp_port) as served, client.get(served.url) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    ("host", "status"), [("10.0.0.7", 404), ("127.0.0.1", 200), ("::1", 200), ("::ffff:10.0.0.7", 404), ("odd", 404)]
)
async def test_without_a_folder_others_find_nothing(host: str, status: int) -> None:
    route = report.route(load(None, environ={}), dict)
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    scope = {
        "type": "http",
        "method": "GET",
        "path": report.PATH,
        "root_path": "",
        "headers": [],
        "query_string": b"",
        "client": (host, 1),
    }
    await route.handle(scope, receive, send)
    assert sent[0]["status"] == status


def test_tokens_change_without_a_restart_and_survive_a_folder_that_is_away(tmp_path: Path) -> None:
    now = [0.0]
    folder = tmp_path / "admin"
    tokens = BearerTokens(folder, lambda: now[0])
    assert not tokens.valid("a"), "no folder yet"
    assert not tokens.valid("")
    # As the kubelet mounts a Secret: files are links into a folder that is replaced whole.
    (folder / "..one").mkdir(parents=True)
    (folder / "..one" / "current").write_text("a")
    (folder / "..data").symlink_to("..one")
    (folder / "current").symlink_to("..data/current")
    assert not tokens.valid("a"), "it is looked at once a second"
    now[0] += 1
    assert tokens.valid("a")
    (folder / "..two").mkdir()
    (folder / "..two" / "current").write_text("b")
    (folder / "..two" / "previous").write_text("a")
    (folder / "..data_tmp").symlink_to("..two")
    (folder / "..data_tmp").rename(folder / "..data")
    (folder / "previous").symlink_to("..data/previous")
    now[0] += 1
    assert tokens.valid("a")
    assert tokens.valid("b")
    (folder / "previous").unlink()
    now[0] += 1
    assert not tokens.valid("a")
    assert tokens.valid("b")
    shutil.rmtree(folder)
    now[0] += 1
    assert tokens.valid("b"), "the last good ones stand"


def test_an_empty_or_endless_file_is_no_token(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "endless").write_text("x" * 5_000)
    tokens = BearerTokens(tmp_path)
    assert not tokens.valid("")
    assert not tokens.valid("x" * 5_000)
    assert not tokens.valid("x" * 4_097)


def test_ranges() -> None:
    assert ranges([]) == []
    assert ranges([5, 1, 2, 3, 9, 8]) == [[1, 3], [5, 5], [8, 9]]
    assert ranges(range(1024)) == [[0, 1023]]
