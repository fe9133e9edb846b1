"""The HTTP API as a caller sees it: requests by urllib, in threads, with nothing of Plato's between."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plato.local.cluster import LocalCluster


@dataclass(frozen=True)
class Answer:
    """What came back. raw: the body's bytes; body: the same, read, where it is JSON."""

    status: int
    raw: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> Any:
        """Its JSON."""
        return json.loads(self.raw)


class Api:
    """One caller: a token, and for a server whom it acts for."""

    def __init__(self, base: str, token: str = "", acts_for: str = "") -> None:
        self.base = base
        self.token = token
        self.acts_for = acts_for

    def at_once(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, timeout_s: float = 75
    ) -> Answer:
        """One request; blocks. OSError: no answer."""
        said = {"Content-Type": "application/json"} if body is not None else {}
        if self.token:
            said["Authorization"] = f"Bearer {self.token}"
        if self.acts_for:
            said["Plato-User"] = self.acts_for
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.base + path, data, {**said, **(headers or {})}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return Answer(answer.status, answer.read(), {k.lower(): v for k, v in answer.headers.items()})
        except urllib.error.HTTPError as e:
            with e:
                return Answer(e.code, e.read(), {k.lower(): v for k, v in e.headers.items()})
        except http.client.HTTPException as e:  # its process died between head and body
            raise ConnectionError(str(e)) from e

    async def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, timeout_s: float = 75
    ) -> Answer:
        """One request."""
        return await asyncio.to_thread(self.at_once, method, path, body, headers, timeout_s)

    async def told(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """`ask`, and again under the same key while it says 202: on its way, and undecided for two seconds."""
        named = method == "GET" or (isinstance(body, dict) and "client_msg_id" in body)
        key = {} if named else {"Idempotency-Key": uuid.uuid4().hex}
        while (found := await self.ask(method, path, body, {**key, **(headers or {})})).status == 202:
            pass
        return found

    async def ok(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON of an answer that must be no refusal."""
        found = await self.told(method, path, body, headers)
        assert 200 <= found.status < 300, f"{method} {path}: {found.status} {found.raw.decode()}"
        return found.body

    async def refused(self, status: int, code: int, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """A refusal: problem+json with this status and code."""
        found = await self.told(method, path, body)
        assert found.headers.get("content-type") == "application/problem+json", found
        said: dict[str, Any] = found.body
        assert (found.status, said["status"], said["code"]) == (status, status, code), said
        return said


def person(cluster: LocalCluster, user: str) -> Api:
    """A person with the cluster's own token."""
    return Api(cluster.api_url, cluster.token(user))


def server(cluster: LocalCluster, acts_for: str = "") -> Api:
    """An application server."""
    return Api(cluster.api_url, cluster.token("shop", scope="server"), acts_for)


def quoted(conversation_id: str) -> str:
    """An id in a path."""
    return urllib.parse.quote(conversation_id, safe="")
