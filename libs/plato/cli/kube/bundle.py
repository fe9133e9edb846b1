"""The bundle of `kubectl plato report`: what somebody who helps needs to see, and nothing that is secret.

Secrets are never read. Passwords in URIs, bearer tokens and values of variables named like secrets are struck out of
everything before it is written, logs included.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

STRUCK: Final = "[struck out]"
_QUOTE_INSIDE: Final = r"""["'](?!\s*[,:}\]])"""
"""A quote that ends no text of JSON: passwords may hold one."""
_URI_PASSWORD = re.compile(rf"(\b[a-z][a-z0-9+.-]*://[^\s:/@\"']*):(?:[^\s\"']|{_QUOTE_INSIDE})+@", re.IGNORECASE)
_NAMED_PASSWORD = re.compile(
    r"""((?:(?:password|passwd|passphrase)["']?\s*[=:]|(?:secret|token|api[_-]?key|access[_-]?key|[?&]pass)"""
    r"""(?:["']?\s*=|["']\s*:))\s*)("[^"]*"|'[^']*'|[^\s&,;"'}\]]+)""",
    re.IGNORECASE,
)
"""Of a URI's query, of Kafka's properties, of a connection string, of a log line in JSON."""
_BEARER = re.compile(
    r"(\bbearer\s+|\bauthorization[\"']?\s*[=:]\s*[\"']?basic\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE
)
_JWT = re.compile(r"\beyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]*")
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_SECRET_NAME = re.compile(
    r"pass$|password|passwd|passphrase|secret|token|api_?key|access_?key|private|credential|_auth$", re.IGNORECASE
)
_SECRET_KEY = re.compile(r"password|passphrase", re.IGNORECASE)
_SECRET_FLAG = re.compile(r"--?[\w-]*(password|passphrase|pass|secret|token|key)", re.IGNORECASE)
_DROPPED = ("kubectl.kubernetes.io/last-applied-configuration",)


def struck(text: str) -> str:
    """The text without passwords of URIs, bearer tokens, JWTs and private keys."""
    text = _PEM.sub(STRUCK, text)
    text = _URI_PASSWORD.sub(rf"\1:{STRUCK}@", text)
    text = _NAMED_PASSWORD.sub(rf"\1{STRUCK}", text)
    text = _BEARER.sub(rf"\1{STRUCK}", text)
    return _JWT.sub(STRUCK, text)


def cleaned(value: Any) -> Any:
    """An object without managedFields, applied copies and what looks secret. A Secret keeps its key names only."""
    if isinstance(value, Mapping):
        if value.get("kind") == "Secret":
            return {**{k: cleaned(v) for k, v in value.items() if k not in ("data", "stringData")}, "data": STRUCK}
        found = {}
        for key, inner in value.items():
            if key == "managedFields" or key in _DROPPED:
                continue
            found[key] = STRUCK if isinstance(inner, str) and _SECRET_KEY.search(str(key)) else cleaned(inner)
        name = value.get("name")
        if isinstance(name, str) and isinstance(value.get("value"), str) and _SECRET_NAME.search(name):
            found["value"] = STRUCK
        return found
    if isinstance(value, list):
        before = ["", *value]
        return [
            STRUCK if isinstance(inner, str) and _SECRET_FLAG.fullmatch(str(flag)) else cleaned(inner)
            for flag, inner in zip(before, value, strict=False)
        ]
    return struck(value) if isinstance(value, str) else value


def lines_about(log: str, namespace: str, cluster: str) -> str:
    """An operator's log without the lines that it wrote about other PlatoClusters, and how many those were.

    A line is JSON, maybe behind kubectl's time; its `cluster` and `namespace` say whom it is about. What names none is about
    the operator itself, and stays, as do lines that are no JSON.
    """
    kept = []
    others = 0
    for line in log.splitlines(keepends=True):
        try:
            said = json.loads(line[line.index("{") :])
        except ValueError:
            said = {}
        about = said.get("cluster", cluster), said.get("namespace", namespace)
        if about == (cluster, namespace):
            kept.append(line)
        else:
            others += 1
    head = f"# {others} lines about other PlatoClusters are left out\n" if others else ""
    return head + "".join(kept)


def write(path: Path, files: Iterable[tuple[str, object]], mtime_s: int) -> list[str]:
    """Writes a .tar.gz of (name, text or object) and returns the names. Everything passes `struck` or `cleaned`.

    Raises OSError. The file is for its owner only: messages of an outage are nobody else's.
    """
    written = []
    partial = path.with_name(path.name + ".partial")
    partial.touch(mode=0o600)
    with tarfile.open(partial, "w:gz") as tar:
        for name, content in files:
            text = struck(content) if isinstance(content, str) else json.dumps(cleaned(content), indent=1)
            raw = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/{name}")
            entry.size, entry.mode, entry.mtime = len(raw), 0o600, mtime_s
            tar.addfile(entry, io.BytesIO(raw))
            written.append(name)
    partial.replace(path)
    return written
