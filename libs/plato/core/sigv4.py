"""AWS Signature Version 4 for requests to a store that speaks S3: the canonical request, the string to sign, the header.

The rules are those of "Authenticating Requests (AWS Signature Version 4)" of the Amazon S3 API reference.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlsplit

NOTHING: Final = hashlib.sha256(b"").hexdigest()
"""Hash of a request without a body."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Who we are to the store."""

    access: str
    secret: str
    region: str


def path_of(key: str) -> str:
    """A key as it stands in a URL's path."""
    return quote(key, safe="/-_.~")


def signed(
    keys: Keys, method: str, url: str, body_sha256: str, at: str, headers: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The headers of a request: the caller's, and those that the signature adds.

    url: with its path encoded by `path_of`, and no query. body_sha256: hex. at: UTC as 20261130T042246Z.
    """
    parts = urlsplit(url)
    given = {name.lower(): value.strip() for name, value in (headers or {}).items()}
    given |= {"host": parts.netloc, "x-amz-content-sha256": body_sha256, "x-amz-date": at}
    names = sorted(given)
    canonical = "\n".join(
        [
            method,
            parts.path or "/",
            "",
            *(f"{name}:{given[name]}" for name in names),
            "",
            ";".join(names),
            body_sha256,
        ]
    )
    scope = f"{at[:8]}/{keys.region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", at, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{keys.secret}".encode()
    for part in (at[:8], keys.region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    given["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={keys.access}/{scope}, SignedHeaders={';'.join(names)}, Signature={signature}"
    )
    return given
