"""Which pages may read an answer: those of the origins that the settings name; of none, those of loopback."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

LOOPBACK: Final = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
ANY: Final = "*"


def told(headers: Iterable[tuple[bytes, bytes]], origins: Sequence[str]) -> bytes:
    """The lines that an answer written by hand needs so that the page which asked may read it; b"": none. headers: of the
    request, names in lower case."""
    origin = next((value for name, value in headers if name == b"origin"), b"").decode("latin-1")
    known = ANY in origins or origin in origins if origins else re.fullmatch(LOOPBACK, origin) is not None
    if not origin or not known:
        return b""
    return f"Access-Control-Allow-Origin: {origin}\r\nVary: Origin\r\n".encode("latin-1")
