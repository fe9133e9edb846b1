"""Signatures of what Plato posts to an application: HMAC-SHA256 over the time and the body, with a shared secret.

    Plato-Signature: t=1790000000,v1=<hex of HMAC-SHA256(secret, "1790000000." + body)>

The receiver checks it before it believes a word, and refuses what is older than some minutes, so that nobody who once saw
a request can send it again later.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

HEADER: Final = "Plato-Signature"
TOLERANCE_S: Final = 300


def sign(secret: bytes, at_s: int, body: bytes) -> str:
    """The header's value. at_s: Unix time."""
    return f"t={at_s},v1={_digest(secret, at_s, body)}"


def verify(secret: bytes, header: str, body: bytes, now_s: int, tolerance_s: int = TOLERANCE_S) -> bool:
    """Whether who made this header knew the secret, not longer ago than the tolerance."""
    fields = dict(part.strip().partition("=")[::2] for part in header.split(","))
    at, given = fields.get("t", ""), fields.get("v1", "")
    if not (at.isascii() and at.isdecimal() and len(at) <= 16) or abs(now_s - int(at)) > tolerance_s:
        return False
    return hmac.compare_digest(_digest(secret, int(at), body).encode(), given.encode())


def _digest(secret: bytes, at_s: int, body: bytes) -> str:
    return hmac.new(secret, f"{at_s}.".encode() + body, hashlib.sha256).hexdigest()
