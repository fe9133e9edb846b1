"""The worker's end of the lane: a Unix socket to the link, tried again every RETRY_MS while the link is away.

Messages that a round made are joined and written at its end. What the socket does not take waits here; credits bound it.
When the lane breaks, what waits is dropped (R3): the next link is told what lives.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

from .core import lanes

RETRY_MS: Final = 50
SOCKET_NAME: Final = "link.sock"
BUFFER_BYTES: Final = 1_048_576
READ_BYTES: Final = 262_144
_MAX_PATH_BYTES: Final = 107  # sun_path has 108 bytes, the last is NUL


def poll_socket(index: int) -> str:
    """Name of the socket on which worker `index` takes connections by long polling."""
    return f"poll-{index}.sock"


def address(run_dir: Path, name: str = SOCKET_NAME) -> tuple[str, int]:
    """(address, fd) of a socket in run_dir, the lane's or `name`; the fd (-1: none) must stay open while it is used.

    A path that is too long for a Unix socket is reached through the folder's descriptor under /proc.
    """
    path = run_dir.absolute() / name
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        return str(path), -1
    fd = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{fd}/{name}", fd


class Lane:
    """A non-blocking connection to the link, or none."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._sock: socket.socket | None = None
        self._reader = lanes.LaneReader()
        self._out: list[bytes] = []
        self._rest = b""

    @property
    def fd(self) -> int:
        """Its file descriptor; -1: the link is away."""
        return -1 if self._sock is None else self._sock.fileno()

    @property
    def waits(self) -> bool:
        """Whether bytes wait for the socket."""
        return bool(self._rest or self._out)

    def connect(self) -> bool:
        """Tries once; True: connected."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            where, folder = address(self._run_dir)
            try:
                sock.connect(where)
            finally:
                if folder >= 0:
                    os.close(folder)
        except OSError:
            sock.close()
            return False
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._sock, self._reader, self._rest = sock, lanes.LaneReader(), b""
        self._out.clear()
        return True

    def close(self) -> None:
        """Ends the connection and drops what waits."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self._out.clear()
        self._rest = b""

    def send(self, message: bytes) -> None:
        """Keeps a message for the round's end."""
        if self._sock is not None:
            self._out.append(message)

    def flush(self) -> bool:
        """Writes what the socket takes. False: the lane broke."""
        if self._sock is None:
            return True
        while self._rest or self._out:
            if not self._rest:
                self._rest = b"".join(self._out)
                self._out.clear()
            try:
                n = self._sock.send(self._rest)
            except BlockingIOError:
                return True
            except OSError:
                return False
            self._rest = self._rest[n:]
        return True

    def read(self) -> list[lanes.Message] | None:
        """What came; None: the lane broke. Raises LaneError."""
        if self._sock is None:
            return None
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self._reader.feed(data) if data else None
