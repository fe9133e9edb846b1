"""The certificate that clients are shown: `tls.client_dir`, for the gateways' ports and for the HTTP API's.

Its files are looked at again and again; a new pair is used from the next handshake on, one that does not fit is passed
over, and the old one serves.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

from plato.runtime.process import StartError

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"


class Certificates:
    """The context of new connections, made again when its folder's files change; while those are bad the old one serves."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError or ssl.SSLError if there is no usable pair."""
        self._folder = folder
        self._seen = self._stamp()
        self.context = self._load()
        self.failure = ""
        """Why the newest files are not used; "" if they are."""

    def renew(self) -> bool:
        """Looks for new files; True: they are used from now on."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return False
            self.context = self._load()
        except (OSError, ssl.SSLError) as e:
            self.failure = f"{self._folder}: {e}"
            return False
        self._seen = stamp
        self.failure = ""
        return True

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        found = [(self._folder / name).stat() for name in (CERTIFICATE, KEY)]
        return tuple((s.st_mtime_ns, s.st_ino, s.st_size) for s in found)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
        context.load_cert_chain(self._folder / CERTIFICATE, self._folder / KEY)
        return context


class NewestCertificate:
    """Certificates for a server that keeps the context of its start: each handshake takes the newest."""

    def __init__(self, certificates: Certificates) -> None:
        self._newest = certificates

    def serve(self) -> ssl.SSLContext:
        """The context for the server."""
        context = self._newest.context

        def take_newest(handshake: ssl.SSLObject, _name: str, _context: ssl.SSLContext) -> None:
            handshake.context = self._newest.context

        context.sni_callback = take_newest  # called without a name, too
        return context

    def look(self) -> str:
        """Looks for a new certificate; returns what there is to say about it, "" for nothing."""
        before = self._newest.failure
        if self._newest.renew():
            return "a new certificate is used"
        return self._newest.failure if self._newest.failure != before else ""


def load(folder: Path) -> Certificates:
    """The certificates of tls.client_dir. Raises StartError."""
    try:
        return Certificates(folder)
    except (OSError, ssl.SSLError) as e:
        raise StartError(
            f"tls.client_dir: {folder} has no usable {CERTIFICATE} and {KEY}: {e}; put a certificate and its key there,"
            " or unset it for plain text"
        ) from e


def newest(folder: Path | None) -> NewestCertificate | None:
    """The certificates for a server; None: plain text. Raises StartError."""
    return NewestCertificate(load(folder)) if folder is not None else None
