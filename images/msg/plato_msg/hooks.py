"""The before-hook: the application is asked about new messages before they are stored, once per batch.

    a batch's records ─▸ which of them have no outcome yet ─▸ one signed POST {"messages": […]}
        ─▸ {"refuse": {"0": "words"}, "replace": {"1": "text"}} by the messages' index ─▸ the batch's transaction

Asked are messages of people, not operations, and not what has an outcome already. What is asked may be asked again: after a
crash before the commit, or when the database was away. The pipeline waits for the answer, so the order stays and nothing
overtakes. Without an answer in hook_timeout_ms, msg.hook_on_failure decides; a breaker then spares further batches the wait.
Answers are bound to ANSWER_BYTES. Memory: one batch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
from google.protobuf.message import DecodeError
from plato.core.codes import Code
from plato.core.errors import Unavailable
from plato.core.webhooks import HEADER, sign
from plato.guards import Guard
from plato.runtime import logs
from plato.runtime.secret_file import SecretFile
from plato.runtime.settings import MsgSettings, SettingsError
from plato.wire.v1 import content_pb2 as content

from plato_msg import metrics
from plato_msg.api import render
from plato_msg.core import operations
from plato_msg.core.batch import Decision, Plan, Uplink

ANSWER_BYTES: Final = 4 << 20
MIN_SECRET_BYTES: Final = 32
WORDS_CHARACTERS: Final = 256
Secret = Callable[[], bytes]
"""Gives the shared secret of the moment."""
Place = tuple[int, int]
"""(partition, position)."""


class Judgement(NamedTuple):
    """What the application said of a batch."""

    refused: Mapping[Place, str]
    """Its words; "" where it said none."""
    bodies: Mapping[Place, bytes]
    """What stands in a message's place."""


NOTHING: Final = Judgement({}, {})


class Post:
    """Signed POSTs to one URL. Raises Unavailable for everything that is no 2xx."""

    def __init__(self, url: str, secret: Secret, timeout_s: float, clock: Callable[[], float] = time.time) -> None:
        self._url = url
        self._secret = secret
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    async def send(self, said: Mapping[str, Any]) -> bytes:
        """Posts JSON; returns the answer's body."""
        body = json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode()
        headers = {"Content-Type": "application/json", HEADER: sign(self._secret(), int(self._clock()), body)}
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout)
        try:
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as answer:
                if not 200 <= answer.status < 300:
                    raise Unavailable(f"{self._url} answered {answer.status}")
                found = await answer.content.read(ANSWER_BYTES + 1)
                while len(found) <= ANSWER_BYTES and not answer.content.at_eof():
                    found += await answer.content.read(ANSWER_BYTES + 1 - len(found))
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise Unavailable(f"{self._url} does not answer: {e!r}") from e
        if len(found) > ANSWER_BYTES:
            raise Unavailable(f"{self._url} answered more than {ANSWER_BYTES} bytes")
        return found

    async def close(self) -> None:
        """Closes its connections."""
        if self._session is not None:
            await self._session.close()


class BeforeHook:
    """Asks about batches. accept: what happens to messages without an answer."""

    def __init__(self, post: Post, *, accept: bool, body_max_bytes: int, guard: Guard | None = None) -> None:
        self._post = post
        self._accept = accept
        self._body_max_bytes = body_max_bytes
        self._guard = guard or Guard("the hook", lambda: metrics.HOOKS.labels("before", "spared").inc())
        self._log = logs.get("hook")

    async def ask(self, uplinks: Sequence[Uplink]) -> Judgement:
        """Of records that are new. Never raises for the hook's sake."""
        uplinks = [u for u in uplinks if _concerns(u)]
        if not uplinks:
            return NOTHING
        asked = {"messages": [{"index": n, **_shown(uplink)} for n, uplink in enumerate(uplinks)]}
        try:
            with self._guard.call():
                answer = _read(await self._post.send(asked))
        except Unavailable as e:
            metrics.HOOKS.labels("before", "failed").inc()
            self._log.warning("no answer", reason=str(e), messages=len(uplinks), accepted=self._accept)
            if self._accept:
                return NOTHING
            return Judgement({(u.partition, u.position): "" for u in uplinks}, {})
        metrics.HOOKS.labels("before", "answered").inc()
        refused = {
            (uplinks[n].partition, uplinks[n].position): words[:WORDS_CHARACTERS]
            for n, words in answer.refused.items()
            if n < len(uplinks)
        }
        bodies = {}
        for n, text in answer.replaced.items():
            if n < len(uplinks) and (body := _replaced(uplinks[n].msg_type, uplinks[n].body, text)) is not None:
                if len(body) > self._body_max_bytes:
                    self._log.warning("a replacement is larger than a message may be, and is left out", bytes=len(body))
                else:
                    bodies[uplinks[n].partition, uplinks[n].position] = body
        return Judgement(refused, bodies)

    async def close(self) -> None:
        """Closes its connections."""
        await self._post.close()


def secret(path: Path | None) -> Secret:
    """The shared secret, the newest that the file had; b"" without a file. Raises SettingsError."""
    if path is None:
        return bytes
    try:
        return SecretFile(path, _too_short)
    except OSError as e:
        raise SettingsError(f"msg.hook_secret_file: {path}: {e.strerror}; name a readable file") from e
    except ValueError as e:
        raise SettingsError(f"msg.hook_secret_file: {path} {e}") from e


def _too_short(found: bytes) -> str:
    enough = len(found) >= MIN_SECRET_BYTES
    return "" if enough else f"has {len(found)} bytes; a secret needs at least {MIN_SECRET_BYTES}"


def build(settings: MsgSettings, shared: Secret, body_max_bytes: int) -> BeforeHook | None:
    """As the settings say."""
    if not settings.hook_url:
        return None
    post = Post(settings.hook_url, shared, settings.hook_timeout_ms / 1_000)
    return BeforeHook(post, accept=settings.hook_on_failure == "accept", body_max_bytes=body_max_bytes)


def replaced(uplink: Uplink, said: Judgement) -> Uplink:
    """The record with what stands in its body's place."""
    body = said.bodies.get((uplink.partition, uplink.position))
    if body is None:
        return uplink
    operation = uplink.operation
    if operation is not None:
        operation = operations.read(uplink.msg_type, body, uplink.authority)
    return uplink._replace(body=body, operation=operation)


def worded(plan: Plan, said: Judgement) -> Plan:
    """The plan, whose refusals have the application's words."""

    def one(d: Decision) -> Decision:
        words = said.refused.get((d.uplink.partition, d.uplink.position), "")
        refused = words and d.outcome.code == Code.REFUSED_BY_HOOK
        return d._replace(outcome=d.outcome._replace(words=words)) if refused else d

    plan.decisions = [one(d) for d in plan.decisions]
    plan.outcomes = [one(d) for d in plan.outcomes]
    return plan


def _concerns(uplink: Uplink) -> bool:
    """People's messages, and what they make of them by an edit; not what the application itself does."""
    edit = uplink.msg_type == content.EDIT
    return not uplink.authority and (edit or not operations.is_operation(uplink.msg_type))


class _Answer(NamedTuple):
    refused: dict[int, str]
    replaced: dict[int, str]


def _read(raw: bytes) -> _Answer:
    """Reads an answer. Raises Unavailable for one that cannot be read: it is as good as none."""
    try:
        said = json.loads(raw) if raw.strip() else {}
    except (ValueError, RecursionError) as e:
        raise Unavailable("the hook's answer is no JSON") from e
    refused = said.get("refuse", {}) if isinstance(said, dict) else None
    replaced = said.get("replace", {}) if isinstance(said, dict) else None
    if not isinstance(refused, dict) or not isinstance(replaced, dict):
        raise Unavailable('the hook\'s answer must be {"refuse": {index: words}, "replace": {index: text}}')
    for given in (*refused.items(), *replaced.items()):
        if not (given[0].isascii() and given[0].isdecimal() and len(given[0]) < 10 and isinstance(given[1], str)):
            raise Unavailable("the hook's answer must have indexes as keys and text as values")
    return _Answer({int(n): _storable(w) for n, w in refused.items()}, {int(n): t for n, t in replaced.items()})


def _storable(words: str) -> str:
    """Without what neither UTF-8 nor the database can hold."""
    return words.encode(errors="replace").decode().replace("\x00", "")


def _shown(uplink: Uplink) -> dict[str, Any]:
    """A message that has no place yet, in JSON."""
    return {
        "conversation_id": uplink.conversation_id,
        "from": uplink.from_user,
        "to": uplink.to_user,
        "type": uplink.msg_type,
        "client_msg_id": uplink.client_msg_id.hex(),
        **render.body(uplink.msg_type, uplink.body),
    }


def _replaced(msg_type: int, body: bytes, text: str) -> bytes | None:
    """The body with another text; None where it has none."""
    try:
        if msg_type == content.TEXT:
            return text.encode()
        if msg_type == content.RICH:
            rich = content.Rich.FromString(body)
            rich.text = text
            return rich.SerializeToString()
        if msg_type == content.EDIT:
            edit = content.Operation.FromString(body)
            inner = _replaced(edit.msg_type, edit.body, text) if edit.msg_type != content.EDIT else None
            if inner is not None:
                edit.body = inner
                return edit.SerializeToString()
    except (DecodeError, ValueError):
        pass
    return None
