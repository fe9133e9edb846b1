"""TLS between the parts of a cluster: every process holds one pair and one CA, and each side wants the other's.

gRPC is mutual; the admin ports show their certificate and ask for none, since a kubelet that probes has none. Every
certificate names INTERNAL_NAME, which is what is checked: addresses change with each pod. The files are read again when
they change; what is open stays open. A pair that does not fit is passed over until it does.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from plato.runtime.process import StartError

if TYPE_CHECKING:  # not every image holds gRPC
    from grpc import aio

INTERNAL_NAME: Final = "plato-internal"
CA: Final = "ca.crt"
CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
LOOK_S: Final = 1.0
"""How often the files are looked at, at most."""

Options = Sequence[tuple[str, Any]]


class InternalTls:
    """The certificates of `tls.internal_dir`. Raises StartError when they cannot be used at the start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamp: tuple[tuple[int, int, int], ...] = ()
        self._files: tuple[bytes, bytes, bytes] = (b"", b"", b"")
        self._version = 0
        self._looked_s = 0.0
        self.failure = ""
        """Why the newest files are not used; "" if they are."""
        self._served: list[ssl.SSLContext] = []
        self._look()
        if self.failure:
            raise StartError(
                f"tls.internal_dir: {self.failure}; it needs {CERTIFICATE}, {KEY} and {CA}, with {INTERNAL_NAME} among the"
                " certificate's names, or unset it for plain text"
            )

    @property
    def version(self) -> int:
        """Rises when other files are used: what was made before is made again."""
        self._refresh()
        return self._version

    def files(self) -> tuple[bytes, bytes, bytes]:
        """(CA, certificate chain, key) as PEM, the newest that fit."""
        self._refresh()
        return self._files

    def serve(self) -> ssl.SSLContext:
        """A context for an HTTP server; it looks for new files at its handshakes, and takes them on."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._folder / CERTIFICATE, self._folder / KEY)

        def at_a_handshake(*_: object) -> None:
            # OpenSSL calls this in each, named or not: a server that makes no channels has no other reason to look. The
            # pair of this handshake was drawn before, so the next one is the first to show what is found here.
            self._refresh()

        context.sni_callback = at_a_handshake
        self._served.append(context)
        return context

    def ask(self) -> ssl.SSLContext:
        """A context for an HTTP client of an admin port; ask for the server name INTERNAL_NAME."""
        ca, _, _ = self.files()
        return ssl.create_default_context(cadata=ca.decode("ascii", "replace"))

    def _refresh(self) -> None:
        if time.monotonic() - self._looked_s >= LOOK_S:
            self._look()

    def _look(self) -> None:
        self._looked_s = time.monotonic()
        paths = [self._folder / name for name in (CA, CERTIFICATE, KEY)]
        try:
            stamp = tuple((s.st_mtime_ns, s.st_ino, s.st_size) for s in (path.stat() for path in paths))
            if stamp == self._stamp:
                return
            files = tuple(path.read_bytes() for path in paths)
            # What OpenSSL takes, gRPC takes: it would only refuse every handshake, without a word.
            trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            trial.load_cert_chain(paths[1], paths[2])
            trial.load_verify_locations(cadata=files[0].decode("ascii", "replace"))
        except OSError as e:  # ssl.SSLError is one
            self.failure = f"{self._folder}: {e.strerror or e}" + (f": {e.filename}" if e.filename else "")
            return
        for context in self._served:
            context.load_cert_chain(paths[1], paths[2])
        self._stamp, self._files = stamp, (files[0], files[1], files[2])
        self._version += 1
        self.failure = ""


def internal(folder: Path | None) -> InternalTls | None:
    """The cluster's TLS, None for plain text. Raises StartError."""
    return InternalTls(folder) if folder is not None else None


def channel(tls: InternalTls | None, addr: str, options: Options) -> aio.Channel:
    """A gRPC channel to a part of the cluster."""
    import grpc
    from grpc import aio

    if tls is None:
        return aio.insecure_channel(addr, options=options)
    ca, chain, key = tls.files()
    credentials = grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=chain)
    return aio.secure_channel(addr, credentials, options=[*options, ("grpc.ssl_target_name_override", INTERNAL_NAME)])


def add_port(tls: InternalTls | None, server: aio.Server, address: str) -> int:
    """Binds a gRPC server's port; returns it, 0 for none. Raises RuntimeError as gRPC does."""
    import grpc

    if tls is None:
        return server.add_insecure_port(address)
    known = tls

    def configuration() -> Any:
        ca, chain, key = known.files()
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=ca)

    credentials = grpc.dynamic_ssl_server_credentials(
        configuration(), configuration, require_client_authentication=True
    )
    return server.add_secure_port(address, credentials)
