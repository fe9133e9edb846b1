"""The record as a ConfigMap holds it: plain text while it is small, gzip above, refused when no watcher should carry it.

Bounds what each write costs the API server: some 640 processes watch the object, so its size counts that often.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import zlib
from collections.abc import Mapping
from typing import Any, Final

from plato.topology.record import Topology, TopologyError, dumps, loads

PLAIN_BYTES: Final = 64 * 1024
MOST_BYTES: Final = 512 * 1024
"""Of the object as stored, that is after gzip and base64."""
_UNPACKED_BYTES: Final = 8 * 1024 * 1024
KEY: Final = "topology.json"
PACKED_KEY: Final = "topology.json.gz"


class TooLargeError(TopologyError):
    """The record does not fit; reason TooLarge of the condition TopologyHealthy."""


def pack(topology: Topology) -> dict[str, dict[str, str]]:
    """`data` or `binaryData` of the ConfigMap. The same record gives the same bytes. Raises TooLargeError."""
    text = dumps(topology, indent=None)
    raw = text.encode()
    if len(raw) <= PLAIN_BYTES:
        return {"data": {KEY: text}}
    packed = base64.b64encode(gzip.compress(raw, compresslevel=6, mtime=0)).decode("ascii")
    if len(packed) > MOST_BYTES:
        raise TooLargeError(f"the record is {len(packed)} bytes, more than {MOST_BYTES}")
    return {"binaryData": {PACKED_KEY: packed}}


def unpack(config_map: Mapping[str, Any]) -> Topology:
    """The record in a ConfigMap object. Raises TopologyError."""
    plain = (config_map.get("data") or {}).get(KEY)
    if isinstance(plain, str):
        return loads(plain)
    packed = (config_map.get("binaryData") or {}).get(PACKED_KEY)
    if not isinstance(packed, str):
        raise TopologyError(f"the ConfigMap has neither {KEY} nor {PACKED_KEY}")
    try:
        unpacker = zlib.decompressobj(wbits=31)
        raw = unpacker.decompress(base64.b64decode(packed, validate=True), _UNPACKED_BYTES)
        if not unpacker.eof:
            raise TopologyError(f"{PACKED_KEY} is cut short, or larger than {_UNPACKED_BYTES} bytes")
        return loads(raw.decode())
    except (binascii.Error, zlib.error, UnicodeDecodeError) as e:
        raise TopologyError(f"{PACKED_KEY} cannot be read: {e}") from e
