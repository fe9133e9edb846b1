"""The Lease `plato-operator`: who of several operators acts. Duration, deadline and period are those of client-go.

    waiting ─ acquire ─▸ leading ─ not renewed for VALID_S: LeaseLapsed ─▸ everything of the term ends ─▸ waiting, as another
                            │                                                                             holder, until
                            └─ somebody else holds it: LeaseLost ─▸ the process ends ◂─ somebody else holds it ┘

Clocks are compared with themselves only: another holder's Lease is over when it did not change for its duration by *our*
monotonic clock; our own counts from before the request that renewed it. That it is over early on our side and late on
theirs is the safety margin; what a sleeper, or a term of ours that lapsed, still has under way is refused by the record's
resourceVersion: each term has a holder name of its own, so it begins with a claim.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from plato.runtime import logs

from plato_operator import metrics
from plato_operator.kube import KubeError, Refused

NAME: Final = "plato-operator"
DURATION_S: Final = 15
VALID_S: Final = 10.0
"""How long we act after the last renewal that we know of; 5 s before anybody may take over."""
RENEW_S: Final = 2.0
ANSWER_S: Final = 4.0
"""How long one renewal may take, so that within VALID_S there is a second try."""
AGAIN_S: Final = 1.0
"""From a renewal that failed to the next try."""
WAIT_S: Final = 2.0

_log = logs.get("lease")


class LeaseLost(Exception):
    """We may not act any more: another process holds the Lease, and this one must end."""


class LeaseLapsed(LeaseLost):
    """We may not act any more: ours was not renewed in time. Nobody else is known to hold it, so it may be taken again."""


class Store(Protocol):
    """What of the API server a Lease needs; `Kube` is one."""

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None: ...  # noqa: D102  # see Kube

    async def create(self, kind: str, namespace: str, body: dict[str, Any]) -> dict[str, Any]: ...  # noqa: D102  # see Kube

    async def replace(self, kind: str, namespace: str, name: str, body: dict[str, Any]) -> dict[str, Any]: ...  # noqa: D102  # see Kube


def holder(name: str, uid: str) -> str:
    """A holder name that no other start of any process has."""
    return f"{name or NAME}/{uid}/{uuid.uuid4().hex[:12]}"


def _pod(name: str) -> str:
    """What of a holder name stays over its starts and terms."""
    return name.rsplit("/", 1)[0]


class Lease:
    """Our side of the Lease. `me` is the holder name of the present term."""

    def __init__(self, store: Store, namespace: str, me: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._namespace, self.me, self._clock = store, namespace, me, clock
        self._until = float("-inf")
        self._seen: tuple[str, str] = ("", "")
        self._seen_at = 0.0
        self._former: set[str] = set()
        """Our names of terms that lapsed."""
        self.held_by = ""
        """Whom we wait for."""

    def valid(self) -> bool:
        """Whether we may act now."""
        return self._clock() < self._until

    def check(self) -> None:
        """Raises LeaseLapsed unless we may act now."""
        if not self.valid():
            raise LeaseLapsed(f"the Lease was not renewed for {VALID_S:.0f} s: another operator may act")

    async def acquire(self) -> None:
        """Waits until the Lease is ours. Errors of the API server are waited out. After a term that lapsed it is somebody
        else's as soon as another one is seen: raises LeaseLost."""
        told = ""
        while True:
            try:
                if await self.try_acquire():
                    metrics.LEASE_HELD.set(1)
                    return
                words = f"{self.held_by or 'somebody else'} holds the Lease {self._namespace}/{NAME}"
                if self._former and self.held_by:
                    raise LeaseLost(words)
            except KubeError as e:
                words = str(e)
            if words != told:
                _log.info("waiting for the Lease", why=words)
                told = words
            await asyncio.sleep(WAIT_S)

    def lapsed(self) -> None:
        """Ends a term, after everything that acted in it: from now on this is another holder, who has to acquire."""
        self._until = float("-inf")
        self._former.add(self.me)
        self.me = f"{_pod(self.me)}/{uuid.uuid4().hex[:12]}"

    async def try_acquire(self) -> bool:
        """One try. Raises KubeError, but a conflict with another one's try is False."""
        started = self._clock()
        self.held_by = ""
        found = await self._store.get("Lease", self._namespace, NAME)
        try:
            if found is None:
                await self._store.create("Lease", self._namespace, self._body(None))
            else:
                spec = found.get("spec") or {}
                other = str(spec.get("holderIdentity") or "")
                if other and other != self.me and not self._over(other, spec):
                    self.held_by = other
                    return False
                await self._store.replace("Lease", self._namespace, NAME, self._body(found))
        except Refused as e:
            if e.status == 409:
                return False
            raise
        self._until = started + VALID_S
        return True

    def _over(self, other: str, spec: dict[str, Any]) -> bool:
        """Whether another holder's Lease is over: it did not move for its duration, it was an earlier term of ours, or an
        earlier process of this very pod left it (containers of a pod never overlap)."""
        mine = _pod(self.me)
        if other in self._former or (mine == _pod(other) and not mine.endswith("/")):
            return True
        seen = (other, str(spec.get("renewTime") or ""))
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._clock()
            return False
        return self._clock() - self._seen_at >= float(spec.get("leaseDurationSeconds") or DURATION_S)

    async def keep(self) -> None:
        """Renews for as long as it goes; never returns. Raises LeaseLost."""
        wait_s = RENEW_S
        try:
            while True:
                await asyncio.sleep(wait_s)
                wait_s = RENEW_S
                try:
                    async with asyncio.timeout(max(0.1, min(ANSWER_S, self._until - self._clock()))):
                        await self.renew()
                except (KubeError, TimeoutError) as e:
                    _log.warning("the Lease was not renewed", why=str(e) or "no answer")
                    wait_s = AGAIN_S
                self.check()
        finally:
            metrics.LEASE_HELD.set(0)

    async def renew(self) -> None:
        """One renewal. Raises LeaseLost if another one holds it, KubeError if it is not known."""
        started = self._clock()
        found = await self._store.get("Lease", self._namespace, NAME)
        other = str(((found or {}).get("spec") or {}).get("holderIdentity") or "")
        if found is not None and other != self.me:
            self._until = float("-inf")
            raise LeaseLost(f"{other or 'nobody'} holds the Lease now")
        if found is None:
            await self._store.create("Lease", self._namespace, self._body(None))
        else:
            await self._store.replace("Lease", self._namespace, NAME, self._body(found))
        self._until = started + VALID_S

    async def release(self) -> None:
        """Gives it back, so that the next one need not wait. Best effort."""
        self._until = float("-inf")
        try:
            found = await self._store.get("Lease", self._namespace, NAME)
            if found is not None and (found.get("spec") or {}).get("holderIdentity") == self.me:
                body = self._body(found)
                body["spec"] = {**body["spec"], "holderIdentity": ""}
                await self._store.replace("Lease", self._namespace, NAME, body)
        except KubeError as e:
            _log.warning("the Lease was not released", why=str(e))

    def _body(self, found: dict[str, Any] | None) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old = (found or {}).get("spec") or {}
        mine = old.get("holderIdentity") == self.me
        meta: dict[str, Any] = {"name": NAME, "namespace": self._namespace}
        if found is not None:
            meta = {**found["metadata"]}
            meta.pop("managedFields", None)
        meta["labels"] = {
            **(meta.get("labels") or {}),
            "app.kubernetes.io/name": "plato",
        }  # kubectl plato report looks for it
        return {
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta,
            "spec": {
                "holderIdentity": self.me, "leaseDurationSeconds": DURATION_S, "renewTime": now,
                "acquireTime": old.get("acquireTime") or now if mine else now,
                "leaseTransitions": (old.get("leaseTransitions") or 0) + (0 if mine or found is None else 1),
            },
        }  # fmt: skip
