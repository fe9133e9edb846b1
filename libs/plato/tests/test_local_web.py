"""Who gets a token from the chat page's server: its own page, on loopback, and nobody else."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from plato.client.access import subject
from plato.local import tokens, web
from plato.local.folder import DataFolder, LocalError
from plato.local.ports import plan, web_origins
from plato.runtime.settings import load

ORIGIN = "http://127.0.0.1:8915"


@pytest.fixture
async def page(tmp_path: Path) -> httpx.AsyncClient:
    folder = DataFolder(tmp_path)
    folder.prepare()
    tokens.ensure_key(folder)
    settings = load(environ={})
    application = web.application(settings, folder, plan(settings))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=application), base_url=ORIGIN)


async def test_a_name_is_all_that_a_sign_in_needs(page: httpx.AsyncClient) -> None:
    said = (await page.post("/sign-in", json={"name": " alice "}, headers={"Origin": ORIGIN})).json()
    assert (said["user"], subject(said["token"])) == ("alice", "alice")
    assert said["attachment_bytes_max"] == load(environ={}).attachments.bytes_max
    assert said["ipconfig_url"] == "http://127.0.0.1:8904"
    assert said["msg_urls"] == ["http://127.0.0.1:8903", "http://127.0.0.1:8913"]


@pytest.mark.parametrize("tls", [False, True])
async def test_the_page_is_told_the_apis_own_port_where_there_is_one(tmp_path: Path, tls: bool) -> None:
    folder = DataFolder(tmp_path)
    folder.prepare()
    tokens.ensure_key(folder)
    settings = load(environ={}, flags={"msg.api_port": 8933} | ({"tls.client_dir": str(tmp_path)} if tls else {}))
    application = web.application(settings, folder, plan(settings))
    scheme = "https" if tls else "http"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=application), base_url=ORIGIN) as page:
        said = (await page.post("/sign-in", json={"name": "alice"}, headers={"Origin": ORIGIN})).json()
        assert said["msg_urls"] == [f"{scheme}://127.0.0.1:8933", f"{scheme}://127.0.0.1:8943"]
        allowed = (await page.get("/")).headers["content-security-policy"]
        assert ("https://127.0.0.1:*" in allowed) == tls


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, '{"name": "a"}', 403),
        ({"Origin": "https://evil.example"}, '{"name": "a"}', 403),
        ({"Origin": ORIGIN, "Host": "evil.example:8915"}, '{"name": "a"}', 403),
        ({"Origin": ORIGIN, "Content-Type": "text/plain"}, '{"name": "a"}', 415),
        ({"Origin": ORIGIN}, '{"name": "a\\n"', 400),
        ({"Origin": ORIGIN}, '{"name": 7}', 400),
        ({"Origin": ORIGIN}, "[" * 4_000, 400),
        ({"Origin": ORIGIN}, '{"name": "guest:1"}', 400),
        ({"Origin": ORIGIN}, f'{{"name": "{"x" * 5000}"}}', 413),
    ],
)
async def test_other_pages_and_bad_names_get_no_token(
    page: httpx.AsyncClient, headers: dict[str, str], body: str, status: int
) -> None:
    answer = await page.post("/sign-in", content=body, headers={"Content-Type": "application/json", **headers})
    assert answer.status_code == status
    assert "token" not in answer.json()
    assert answer.json()["error"]


async def test_the_page_loads_nothing_from_elsewhere(page: httpx.AsyncClient) -> None:
    answer = await page.get("/")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in answer.text.replace("http-equiv", "")
    for path in ("/page.js", "/page.css", "/icon.svg"):
        assert (await page.get(path)).status_code == 200
    assert (await page.get("/../web.py")).status_code == 404
    for odd in (
        "%01",
        "%00",
        "%0A",
        "%0D%0A",
        "%09",
        "%3F",
        "%3Fx",
        "%23",
        "%FF",
        "page.js%0A",
        "page.js%3F",
        "%E2%80%A8",
    ):
        answer = await page.get(f"/{odd}")
        assert (answer.status_code, "no such file" in answer.text) == (404, True), odd
    assert (await page.get("/", headers={"Host": "evil.example"})).status_code == 403


def test_a_page_that_was_not_built_says_how(tmp_path: Path) -> None:
    settings = load(environ={})
    with pytest.raises(LocalError, match="make web"):
        web.application(settings, DataFolder(tmp_path), plan(settings), pages=tmp_path)
    off = load(environ={}, flags={"local.web_port": 0})
    assert web_origins(off) == ()
    assert "web" not in plan(off)
