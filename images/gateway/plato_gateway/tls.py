"""TLS of client connections, over a worker's bare descriptors: OpenSSL works on memory, the loop moves the bytes.

    socket ─ciphertext→ Session.receive ─▸ plaintext        plaintext ─▸ Session.seal ─ciphertext→ socket

A session decrypts all of what one read brought, so nothing readable stays inside but what a pause left; `again` in
Sockets names those. What waits for a full socket waits as plaintext and is sealed when its turn comes, since a sealed
record must never be dropped. Memory: about 20 KB per connection, of OpenSSL's.
"""

from __future__ import annotations

import ssl
from typing import Final

READ_BYTES: Final = 16_384


class TlsError(Exception):
    """The peer broke the protocol, or ended it; `last` is what should still be written to it."""

    def __init__(self, reason: str, last: bytes = b"") -> None:
        super().__init__(reason)
        self.last = last


class Sealed(bytes):
    """Ciphertext: it goes to the wire whole and in order, or the connection is lost."""


class Session:
    """One connection's TLS."""

    __slots__ = ("_in", "_out", "_tls")

    def __init__(self, context: ssl.SSLContext) -> None:
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)

    def feed(self, data: bytes) -> None:
        """Takes ciphertext of the peer."""
        self._in.write(data)

    def shake(self) -> bool:
        """Goes on with the handshake; True when it is done. Raises TlsError."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as e:
            raise TlsError(e.reason or str(e), self._out.read()) from e
        return True

    def open(self) -> bytes:
        """The plaintext of everything that was fed; b"": none is whole yet. Raises TlsError at the peer's end."""
        found = []
        try:
            while data := self._tls.read(READ_BYTES):
                found.append(data)
        except ssl.SSLWantReadError:
            return b"".join(found)
        except ssl.SSLError as e:  # its end included; what came before it is worth taking, the end is found again
            if found:
                return b"".join(found)
            raise TlsError(e.reason or str(e), self._out.read()) from e
        if found:
            return b"".join(found)
        raise TlsError("closed by the peer")

    def seal(self, data: bytes) -> Sealed:
        """Ciphertext of `data`, with whatever the protocol itself has to say before it. Raises TlsError."""
        view = memoryview(data)
        try:
            while view:
                view = view[self._tls.write(view) :]
        except ssl.SSLError as e:
            raise TlsError(e.reason or str(e)) from e
        return Sealed(self._out.read())

    def own(self) -> Sealed:
        """What the protocol itself has to say now (handshake, tickets, key updates)."""
        return Sealed(self._out.read()) if self._out.pending else Sealed()

    def bye(self) -> Sealed:
        """The end of what we say: a peer knows by it that nothing was cut off."""
        try:
            self._tls.unwrap()
        except (ssl.SSLError, ValueError):
            pass  # the peer's own end has not come; ours is written all the same
        return Sealed(self._out.read())
