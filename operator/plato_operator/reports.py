"""What the processes of one cluster say of themselves: GET /v1/report of gateways, state shards and msg.

Parties to a drain or a move, and who does not serve yet, are asked at each pass, the others every QUIET_S. Each pod is asked
by a task of its own, MOST_AT_ONCE of them at a time; a pass waits for them GRACE_S at most, so one that hangs delays
nobody. While the tokens are not known nobody is asked. No answer, or one of another uid (a reused host port), is unknown:
the older one is dropped, but for the number of connections, which may be told. Bounded by one report and one request per
pod.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from plato.runtime import logs
from plato.runtime.tls import INTERNAL_NAME
from plato.topology.record import SLOTS, WORKER_IDS
from plato.topology.slots import Span

from plato_operator import metrics
from plato_operator.core.snapshot import DrainReport, Report

PATH: Final = "/v1/report"
QUIET_S: Final = 9.0
TIMEOUT_S: Final = 2.0
GRACE_S: Final = 0.5
STALE_S: Final = 30.0
MOST_AT_ONCE: Final = 64
"""Requests under way in a cluster: 500 pods that all hang are through in 16 s, before an answer of the others is stale."""
MOST_BYTES: Final = 1 << 20
MOST_CONNECTIONS: Final = 100_000_000
MOST_EPOCH: Final = 1 << 48
"""Far beyond any clock; the store's scripts count exactly to 2**53."""

_log = logs.get("reports")


@dataclass(frozen=True, slots=True)
class Target:
    """A process to ask: the uid that its answer must carry, host:port of its admin port, and the Secret by whose CA it
    speaks TLS there, empty for plain text: while spec.tls.internal is set, changed or taken away, both kinds run, and
    a roll goes by what they report."""

    uid: str
    at: str
    tls: str = ""


@dataclass(frozen=True, slots=True)
class Access:
    """How to ask: bearer tokens to try in turn, none while they are not known, and the contexts of internal TLS by the
    name of the Secret whose CA is known."""

    tokens: Sequence[str] = ()
    tls: Mapping[str, ssl.SSLContext] = field(default_factory=dict)


@dataclass(slots=True)
class _Seen:
    """One target: when it was asked last, its newest report and when that came, the connections in the last one that came,
    the request under way."""

    target: Target
    asked_at: float = float("-inf")
    report: Report | None = None
    at: float = 0.0
    connections: int | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    failing: str = ""


class Reports:
    """The newest reports of one cluster."""

    def __init__(
        self, session: aiohttp.ClientSession, namespace: str, cluster: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session, self._clock = session, clock
        self._labels = (namespace, cluster)
        self._seen: dict[str, _Seen] = {}
        self._free = asyncio.Semaphore(MOST_AT_ONCE)

    async def refresh(
        self, targets: Mapping[str, Target], urgent: Collection[str], access: Access
    ) -> dict[str, Report]:
        """Asks who is due and returns what is known now, by pod name."""
        now = self._clock()
        for name in [n for n, seen in self._seen.items() if targets.get(n) != seen.target]:
            self._forget(name)
        for name, target in targets.items():
            seen = self._seen.setdefault(name, _Seen(target))
            due = name in urgent or now - seen.asked_at >= QUIET_S
            if due and seen.task is None and access.tokens:
                seen.asked_at = now
                seen.task = asyncio.create_task(self._ask(name, seen, access))
        asked = [seen.task for seen in self._seen.values() if seen.task is not None]
        if asked:
            await asyncio.wait(asked, timeout=GRACE_S)
        now = self._clock()
        return {n: s.report for n, s in self._seen.items() if s.report is not None and now - s.at < STALE_S}

    def last_connections(self) -> dict[str, int]:
        """{uid: connections} of the last report of each process that was ever known, however old."""
        return {s.target.uid: s.connections for s in self._seen.values() if s.connections is not None}

    def close(self) -> None:
        """Ends what is under way."""
        for name in list(self._seen):
            self._forget(name)

    def _forget(self, name: str) -> None:
        task = self._seen.pop(name).task
        if task is not None:
            task.cancel()

    async def _ask(self, name: str, seen: _Seen, access: Access) -> None:
        try:
            async with self._free:
                raw = await self._fetch(seen.target, access)
            seen.report = parsed(raw)
            if seen.report.uid != seen.target.uid:
                raise ValueError(f"answered by process {seen.report.uid or '?'}, not {seen.target.uid}")
            seen.at, seen.failing, seen.connections = self._clock(), "", seen.report.connections
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, TypeError, RecursionError) as e:
            seen.report = None
            metrics.REPORTS_FAILED.labels(*self._labels).inc()
            words = str(e) or type(e).__name__
            if words != seen.failing:
                _log.info("no report", pod=name, at=seen.target.at, why=words)
                seen.failing = words
        finally:
            seen.task = None

    async def _fetch(self, target: Target, access: Access) -> Any:
        context = access.tls.get(target.tls)
        if target.tls and context is None:
            raise ValueError(
                f"not asked: ca.crt of Secret {target.tls} is not known, and in plain text others would read the token"
            )
        url = f"{'https' if target.tls else 'http'}://{target.at}{PATH}"
        status = 0
        for token in access.tokens:
            async with self._session.get(
                url, headers={"Authorization": f"Bearer {token}"}, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
                allow_redirects=False, ssl=context or True, server_hostname=INTERNAL_NAME if target.tls else None,
            ) as answer:  # fmt: skip
                status = answer.status
                if status == 200:
                    body = await answer.content.read(MOST_BYTES)
                    while not answer.content.at_eof() and len(body) < MOST_BYTES:
                        body += await answer.content.read(MOST_BYTES - len(body))
                    return json.loads(body)
                if status != 401:
                    break
        raise ValueError(f"HTTP {status}")


def parsed(raw: Any) -> Report:
    """A Report of its JSON; absent fields are unknown. Raises ValueError or TypeError for what is none, or what no
    process can mean: one that is broken, or taken, must not stop the passes, nor drive the record's epoch out of range."""
    if not isinstance(raw, dict) or not isinstance(raw.get("uid"), str):
        raise ValueError("the report is no object with a uid")
    slots, drain = raw.get("slots"), raw.get("drain")
    slots = slots if isinstance(slots, dict) else {}
    told = None
    if isinstance(drain, dict) and drain.get("id") is not None:
        remaining, cut = (_number(drain.get(key) or 0, MOST_CONNECTIONS) for key in ("remaining", "cut"))
        told = DrainReport(_number(drain["id"], MOST_EPOCH), str(drain.get("phase", "")), remaining, cut)
    worker_id, lease = raw.get("worker_id"), raw.get("lease")
    return Report(
        uid=raw["uid"], epoch_seen=_number(raw.get("epoch_seen") or 0, MOST_EPOCH),
        worker_id=_number(worker_id, WORKER_IDS - 1) if worker_id is not None else None,
        lease=lease if isinstance(lease, bool) else None,
        acquired=_spans(slots.get("acquired")), outbid=_spans(slots.get("outbid")), deserted=_spans(slots.get("deserted")),
        fence=_number(slots.get("fence") or 0, MOST_EPOCH), drain=told,
        connections=_number(raw.get("connections") or 0, MOST_CONNECTIONS),
    )  # fmt: skip


def _spans(raw: Any) -> tuple[Span, ...]:
    return tuple((_number(first, SLOTS - 1), _number(last, SLOTS - 1)) for first, last in raw or ())


def _number(value: Any, most: int) -> int:
    try:
        number = int(value)
    except OverflowError as e:
        raise ValueError(f"the report has {value} where a number belongs") from e
    if not 0 <= number <= most:
        raise ValueError(f"the report has {number} where 0 to {most} can be")
    return number
