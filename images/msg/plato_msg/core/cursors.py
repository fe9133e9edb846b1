"""The cursor of the events feed: one bus position per partition, as text that callers keep and do not read.

base64url of: 1, the number of partitions (2 bytes), the positions as varints (7 bits each, the low ones first)
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Final

from plato.core.ids import MAX_ID

_VERSION: Final = 1
_HEAD_BYTES: Final = 3


def encode(positions: Sequence[int]) -> str:
    """The cursor of these positions, one per partition."""
    out = bytearray((_VERSION,)) + len(positions).to_bytes(2, "big")
    for position in positions:
        left = position
        while left > 0x7F:
            out.append(left & 0x7F | 0x80)
            left >>= 7
        out.append(left)
    return base64.urlsafe_b64encode(out).rstrip(b"=").decode()


def decode(cursor: str, partitions: int) -> list[int] | None:
    """The positions; None: this is no cursor of a bus of so many partitions."""
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    if len(raw) < _HEAD_BYTES or raw[0] != _VERSION or int.from_bytes(raw[1:_HEAD_BYTES], "big") != partitions:
        return None
    positions, value, shift = [], 0, 0
    for byte in raw[_HEAD_BYTES:]:
        value |= (byte & 0x7F) << shift
        if value > MAX_ID:
            return None
        if byte & 0x80:
            shift += 7
            continue
        positions.append(value)
        value, shift = 0, 0
    return positions if len(positions) == partitions and not shift else None
