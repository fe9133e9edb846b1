"""docs/protocol.md says of long polling what the code does: the head's fields, its examples, the figures."""

from __future__ import annotations

import re

from plato.api import names
from plato.client import longpoll as link
from plato.client.core import fallback
from plato.core import longpoll
from plato.core.longpoll import Body, decode
from plato.runtime.settings import Settings
from plato_gateway import longpoll_http

from tests.repo.tracked import text

PART = text("docs/protocol.md").split("\n### Long polling\n")[1].split("\n## 3. Frames\n")[0]


def test_the_head_has_these_fields_at_these_places() -> None:
    rows = re.findall(r"^\| (\d+) \| \w+ \| (u\d+|\d+ bytes|bytes) \|", PART, re.MULTILINE)
    at, sizes = 0, {"u8": 1, "u32": 4, "u64": 8, "16 bytes": longpoll.SESSION_BYTES}
    for place, kind in rows[:-1]:
        assert int(place) == at
        at += sizes[kind]
    assert rows[-1] == (str(longpoll.HEAD_BYTES), "bytes")
    assert at == longpoll.HEAD_BYTES
    assert f"{longpoll.OPEN} OPEN, {longpoll.CLOSE} CLOSE | {longpoll.END} END" in PART


def test_the_examples_are_what_is_said_and_understood() -> None:
    bodies = [
        bytes.fromhex(line) for block in re.findall(r"```\n(.*?)```", PART, re.DOTALL) for line in block.splitlines()
    ]
    gateway, name = Settings().gateway, bodies[1][2:18]
    assert [decode(body) for body in bodies] == [
        Body(longpoll.OPEN),
        Body(0, name, a=gateway.poll_wait_ms, b=gateway.poll_silent_ms),
        Body(0, name, gateway.poll_wait_ms, longpoll.PAGE_BYTES, received=2),
        Body(0, name, a=gateway.poll_wait_ms, b=gateway.poll_silent_ms, received=1, first=3, run=b"\0\0\0\2hi"),
    ]
    assert [decode(body).encode() for body in bodies] == bodies


def test_the_figures_are_the_codes() -> None:
    words = " ".join(PART.split())
    assert f"{names.GATEWAY_POLL_PORT} is usual, path `{names.POLL_PATH}`" in words
    assert f"at most {longpoll.PAGE_BYTES:,} bytes of them or one frame" in words
    assert f"({link.BACKOFF_MIN_S * 1000:.0f} ms, doubling to {link.BACKOFF_MAX_S:.0f} s)" in words
    assert f"nothing gets through for {link.PATIENCE_S:.0f} s" in words
    assert f"({longpoll_http.HEAD_BYTES // 1024} KiB for the head)" in words
    assert (fallback.KILLED_MAX, fallback.SOON_MS) == (3, 60_000)
    assert "three sockets in a row could not be opened, were reset within a minute" in words
    assert (fallback.RETURN_MIN_MS, fallback.RETURN_MAX_MS) == (30_000, 1_800_000)
    assert "after 30 s, then twice as long each time it failed, up to half an hour" in words
