"""Ports for servers that a test starts."""

from __future__ import annotations

import socket
from collections import deque
from typing import Final

HELD: Final = 60
"""Ports held at most, of the newest: long after the test of the oldest; one descriptor each."""
_held: deque[socket.socket] = deque()


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports of an address that nobody else is given: they stay bound, so that neither an outgoing connection nor a server
    that takes any port gets them, while a server that sets SO_REUSEADDR, as all do here, listens on them when it likes, and
    again after its death. Until then a connection to them is refused."""
    made = [socket.socket() for _ in range(count)]
    for sock in made:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, 0))
    _held.extend(made)
    while len(_held) > HELD:
        _held.popleft().close()
    return [int(sock.getsockname()[1]) for sock in made]


def free_port(host: str = "127.0.0.1") -> int:
    """One of them."""
    return free_ports(1, host)[0]
