"""What must be right on this machine before a gateway starts, each failure told in one line."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

from plato.runtime.process import StartError
from plato.runtime.settings import GatewaySettings

__all__ = ["CANNOT_START", "StartError", "check", "port_error", "run_dir_error"]

CANNOT_START: Final = 3
"""Exit code: a port, a folder or another thing of this machine is not as the settings say."""


def check(gateway: GatewaySettings) -> None:
    """Tries the ports and the folder. Raises StartError."""
    try:
        gateway.run_dir.mkdir(parents=True, exist_ok=True)
        probe = gateway.run_dir / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise StartError(run_dir_error(gateway, e)) from e
    for key, host, port in (
        ("tcp_port", gateway.host, gateway.tcp_port),
        ("ws_port", gateway.host, gateway.ws_port),
        ("admin_port", gateway.admin_host, gateway.admin_port),
        ("poll_port", gateway.host, gateway.poll_port),
    ):
        if not port:
            continue  # no long polling
        # Without SO_REUSEPORT, which the workers set: another gateway on this port must not share it unseen.
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port))
                sock.listen(1)
            except OSError as e:
                raise StartError(port_error(key, host, port, e)) from e


def port_error(key: str, host: str, port: int, e: OSError) -> str:
    """A line for a port that cannot be opened. `key` is its setting within gateway."""
    why = "is in use" if e.errno == errno.EADDRINUSE else f"cannot be opened ({e.strerror})"
    return f"gateway.{key}: port {port} on {host} {why}; stop what listens there or set gateway.{key} to a free port"


def run_dir_error(gateway: GatewaySettings, e: OSError) -> str:
    """A line for a run_dir that cannot be used."""
    return f"gateway.run_dir: {gateway.run_dir} cannot be used ({e.strerror}); make it writable or name another folder"
