"""ERROR frames, encoded beforehand, for closes that a gateway worker makes: it knows no protobuf.

Each is the payload of one frame: MsgCmd{Type=ERROR, Payload=ErrorMsg{code, msg}}. A test compares them with protobuf's own
encoding and with the words in plato.core.codes, which this layer does not import.
"""

from __future__ import annotations

from typing import Final

from .suffix import varint

_ERROR_TYPE: Final = 16
_ADDRESS_BUSY: Final = "too many connections come from your address; try the next gateway, this one after the time told"


def _error(code: int, words: str, more: bytes = b"") -> bytes:
    text = words.encode()
    error = b"\x08" + varint(code) + b"\x12" + varint(len(text)) + text + more
    return b"\x08" + varint(_ERROR_TYPE) + b"\x12" + varint(len(error)) + error


def address_busy(retry_ms: int) -> bytes:
    """ADDRESS_BUSY: it alone holds a number that is not known beforehand, ErrorMsg.retry_ms."""
    return _error(207, _ADDRESS_BUSY, b"\x28" + varint(retry_ms))


GATEWAY_FULL: Final = _error(200, "this gateway is full; try the next one")
GATEWAY_CLOSING: Final = _error(204, "this gateway is closing; resume through another one")
SLOW_READER: Final = _error(201, "you read more slowly than you were sent; resume and sync")
LOGIN_TIMEOUT: Final = _error(202, "no login within the time-out")
FRAME_SIZE: Final = _error(401, "the frame is empty or larger than the limit")
MALFORMED: Final = _error(400, "the frame could not be read")

ERRORS: Final[dict[int, bytes]] = {
    200: GATEWAY_FULL,
    204: GATEWAY_CLOSING,
    201: SLOW_READER,
    202: LOGIN_TIMEOUT,
    401: FRAME_SIZE,
    400: MALFORMED,
}
"""Code → payload, for each code that a worker closes with."""
