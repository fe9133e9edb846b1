"""How to reach Kafka: the section `bus` of the settings, and a file of client properties as other Kafka clients take it.

    settings.bus ─┐
                  ├─▸ KafkaConfig.read() ─▸ arguments of aiokafka's clients
    properties ───┘   each time a client is made, so that a changed password or certificate is met at the next connection

What the settings say wins over the file. A property that is not known here is refused by name: one that silently did nothing
would be looked for in vain.
"""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiokafka.errors import (
    AuthenticationFailedError,
    AuthenticationMethodNotSupported,
    ClusterAuthorizationFailedError,
    KafkaConnectionError,
    KafkaError,
    TopicAuthorizationFailedError,
)

from plato.core.errors import Unavailable
from plato.runtime.settings import BusSettings, SettingsError

PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")

# Each key of a properties file, and the word that it is kept under here. The names of Java clients and of librdkafka.
_KNOWN: Final = {
    "bootstrap.servers": "servers",
    "metadata.broker.list": "servers",
    "security.protocol": "protocol",
    "sasl.mechanism": "mechanism",
    "sasl.mechanisms": "mechanism",
    "sasl.username": "username",
    "sasl.password": "password",
    "sasl.jaas.config": "jaas",
    "ssl.ca.location": "ca_file",
    "ssl.ca.pem": "ca_pem",
    "ssl.truststore.certificates": "ca_pem",
    "ssl.truststore.location": "ca_file",
    "ssl.truststore.type": "truststore_type",
    "ssl.certificate.location": "cert_file",
    "ssl.key.location": "key_file",
    "ssl.key.password": "key_password",
    "ssl.keystore.location": "cert_file",
    "ssl.keystore.type": "keystore_type",
    "ssl.endpoint.identification.algorithm": "identification",
    "client.id": "client_id",
}
_JAAS: Final = re.compile(r'(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')


class _Heard(logging.Handler):
    """What aiokafka said last of a connection: it logs why a broker does not let us in, and raises that none does.

    Its lines go no further: each fault comes out as an error of ours, with what is done about it.
    """

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.filename == "client.py":
            self.last = " ".join(record.getMessage().split())[:300]


_heard = _Heard(logging.ERROR)
logging.getLogger("aiokafka").propagate = False
logging.getLogger("aiokafka").addHandler(_heard)


class TopicGone(Unavailable):
    """The topic is not there."""


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Faults of aiokafka and the network become Unavailable, with `what` was being done."""
    try:
        yield
    except TimeoutError as e:
        raise Unavailable(f"{what}: Kafka did not answer in time") from e
    except (AuthenticationFailedError, AuthenticationMethodNotSupported) as e:
        raise Unavailable(f"{what}: Kafka refuses our name or password: {_text(e)}") from e
    except (TopicAuthorizationFailedError, ClusterAuthorizationFailedError) as e:
        raise Unavailable(f"{what}: Kafka does not allow it to us: {_text(e)}") from e
    except KafkaConnectionError as e:
        raise Unavailable(f"{what}: no broker lets us in: {_heard.last or _text(e)}") from e
    except (KafkaError, OSError) as e:
        raise Unavailable(f"{what}: {_text(e)}") from e


def _text(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__


def properties(text: str) -> dict[str, str]:
    """Keys and values of a properties file: `key=value` or `key: value`; `#` and `!` begin comments, a last `\\` goes on."""
    found: dict[str, str] = {}
    lines = iter(text.splitlines())
    for line in lines:
        line = line.strip()
        if not line or line[0] in "#!":
            continue
        while line.endswith("\\") and not line.endswith("\\\\"):
            line = line[:-1] + next(lines, "").strip()
        match = re.match(r"([^=:\s]+)\s*[=:\s]\s*(.*)$", line)
        if match is None:
            raise ValueError(f"{line.split('=')[0][:40]!r} has no value")
        found[match[1]] = match[2].replace("\\n", "\n").replace("\\\\", "\\")
    return found


@dataclass(frozen=True, slots=True)
class KafkaConfig:
    """Where Kafka is and who we are there. Holds no secret itself: `options` reads the files anew."""

    settings: BusSettings

    @property
    def topic(self) -> str:
        """The topic of the uplinks."""
        return self.settings.topic

    def options(self) -> dict[str, Any]:
        """Arguments for each of aiokafka's clients. Raises SettingsError: unreadable file, unknown or missing property."""
        said = self._said()
        if not said.get("servers"):
            raise SettingsError(
                "bus.servers: empty; name Kafka's bootstrap servers, as in kafka-1:9092,kafka-2:9092, or give"
                " bootstrap.servers in the file that bus.properties_file names"
            )
        protocol = said.get("protocol", "PLAINTEXT").upper()
        if protocol not in PROTOCOLS:
            raise SettingsError(f"bus.security_protocol: {protocol!r} cannot be used: must be {_or(PROTOCOLS)}")
        options: dict[str, Any] = {
            "bootstrap_servers": [s.strip() for s in said["servers"].split(",") if s.strip()],
            "security_protocol": protocol,
            "client_id": said.get("client_id", "plato"),
        }
        if protocol.endswith("SSL"):
            options["ssl_context"] = _context(said)
        if protocol.startswith("SASL"):
            mechanism = said.get("mechanism", "PLAIN").upper()
            if mechanism not in MECHANISMS:
                raise SettingsError(f"bus.sasl_mechanism: {mechanism!r} cannot be used: must be {_or(MECHANISMS)}")
            if not said.get("username") or "password" not in said:
                raise SettingsError(
                    f"bus.username, bus.password_file: {protocol} needs both; set them, or sasl.username and sasl.password"
                    " (or sasl.jaas.config) in the file that bus.properties_file names"
                )
            options |= {
                "sasl_mechanism": mechanism,
                "sasl_plain_username": said["username"],
                "sasl_plain_password": said["password"],
            }
        return options

    def options_again(self) -> dict[str, Any]:
        """As `options`, for a process that runs: what was right at its start is waited for. Raises Unavailable."""
        try:
            return self.options()
        except SettingsError as e:
            raise Unavailable(str(e)) from e

    def where(self) -> str:
        """Kafka in words, without secrets."""
        try:
            return f"Kafka at {self._said().get('servers', '?')}"
        except SettingsError:
            return "Kafka"

    def _said(self) -> dict[str, str]:
        bus = self.settings
        said = self._from_file(bus.properties_file) if bus.properties_file is not None else {}
        own = {
            "servers": bus.servers,
            "protocol": bus.security_protocol,
            "mechanism": bus.sasl_mechanism,
            "username": bus.username,
            "ca_file": str(bus.ca_file or ""),
            "cert_file": str(bus.cert_file or ""),
            "key_file": str(bus.key_file or ""),
        }
        said |= {key: value for key, value in own.items() if value}
        if bus.password_file is not None:
            said["password"] = _read(bus.password_file, "bus.password_file").strip("\r\n")
        return said

    def _from_file(self, path: Path) -> dict[str, str]:
        try:
            pairs = properties(_read(path, "bus.properties_file"))
        except ValueError as e:
            raise SettingsError(f"bus.properties_file: {path} cannot be used: {e}; write key=value") from e
        said: dict[str, str] = {}
        for key, value in pairs.items():
            if key not in _KNOWN:
                raise SettingsError(
                    f"bus.properties_file: {path} cannot be used: {key} is not known here; known: {', '.join(_KNOWN)}"
                )
            said[_KNOWN[key]] = value
        for kind in ("truststore_type", "keystore_type"):
            if said.pop(kind, "PEM").upper() != "PEM":
                raise SettingsError(f"bus.properties_file: {path} cannot be used: only PEM stores can be read, not JKS")
        if "jaas" in said:
            fields = {k: re.sub(r"\\(.)", r"\1", v) for k, v in _JAAS.findall(said.pop("jaas"))}
            if not {"username", "password"} <= fields.keys():
                raise SettingsError(
                    f'bus.properties_file: {path} cannot be used: sasl.jaas.config must hold username="…" password="…"'
                )
            said = {"username": fields["username"], "password": fields["password"]} | said
        return said


def _context(said: dict[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=said.get("ca_file"), cadata=said.get("ca_pem"))
        if said.get("cert_file"):
            context.load_cert_chain(said["cert_file"], said.get("key_file"), said.get("key_password"))
    except (OSError, ssl.SSLError, ValueError) as e:
        raise SettingsError(
            f"bus.ca_file, bus.cert_file, bus.key_file: cannot be used: {e}; name readable PEM files"
        ) from e
    if "identification" in said and not said["identification"]:
        context.check_hostname = False  # as with other clients: an empty value means that the name is not compared
    return context


def _read(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "is no UTF-8 text"
        raise SettingsError(f"{key}: {path} cannot be used: {reason}; name a readable file") from e


def _or(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
