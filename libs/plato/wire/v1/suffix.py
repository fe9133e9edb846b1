"""The few bytes that differ per connection in a fan-out: MsgCmd's run and push_no, appended to one shared encoding."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """protobuf's base-128 varint of an unsigned value."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def push_suffix(run: int, push_no: int) -> bytes:
    """Fields 3 (run) and 4 (push_no) of MsgCmd; ≤ 22 bytes."""
    return b"\x18" + varint(run) + b"\x20" + varint(push_no)
