"""Terms of the Lease: one that lapsed is followed by another one of the same process, unless somebody else has begun his."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import aiohttp
import pytest
from plato_operator import __main__ as operator
from plato_operator import lease as lease_module
from plato_operator.kube import Kube, Refused, Unreachable
from plato_operator.lease import DURATION_S, RENEW_S, VALID_S, Lease, LeaseLost
from plato_operator.probes import Health
from plato_operator.reconcile import Means


class Store:
    """One Lease, which can be silent."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.silent = False

    async def get(self, kind: str, namespace: str, name: str) -> Any:
        if self.silent:
            raise Unreachable("silent")
        return self.lease

    async def create(self, kind: str, namespace: str, body: Any) -> Any:
        if self.lease is not None:
            raise Refused(409, "AlreadyExists", "", "create")
        self.lease = body
        return body

    async def replace(self, kind: str, namespace: str, name: str, body: Any) -> Any:
        self.lease = body
        return body

    @property
    def holder(self) -> str:
        return str(self.lease["spec"]["holderIdentity"]) if self.lease else ""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Term:
    """Stands for Clusters: acts for as long as the Lease is valid, as its loops do."""

    begun: list[str]
    running = 0

    def __init__(self, means: Means, namespaces: object) -> None:
        self.means = means

    async def run(self) -> None:
        Term.begun.append(self.means.lease.me)
        Term.running += 1
        try:
            while True:
                self.means.lease.check()
                await asyncio.sleep(0)
        finally:
            Term.running -= 1


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RENEW_S", "AGAIN_S", "WAIT_S"):
        monkeypatch.setattr(lease_module, name, 0.001)
    monkeypatch.setattr(operator, "Clusters", Term)
    Term.begun, Term.running = [], 0


async def until(met: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + 10
    while not met():
        assert loop.time() < end_s
        await asyncio.sleep(0.001)


def test_the_periods_are_those_of_client_go() -> None:
    """15 s, 10 s, 2 s: what a cluster's other controllers are tuned for."""
    assert (DURATION_S, VALID_S, RENEW_S) == (15, 10, 2)


async def test_a_term_that_lapsed_ends_whole_and_the_next_one_begins_as_another_holder(quick: None) -> None:
    """The API server was silent for longer than a Lease is valid: nothing acts meanwhile, and the same process goes on. The
    new name makes the next pass a claim, so what the old term still had under way meets a conflict."""
    store, clock, health = Store(), Clock(), Health()
    lease = Lease(store, "ns", "pod/uid/1", clock)
    await lease.acquire()
    bell = operator.Bell()
    async with aiohttp.ClientSession() as session:
        means = Means(cast(Kube, store), session, lease, health, False)
        running = asyncio.create_task(operator.terms(means, ("ns",), bell))
        await until(lambda: Term.running == 1)
        store.silent = True
        clock.now += VALID_S
        await until(lambda: Term.running == 0 and lease.me != "pod/uid/1")
        assert (bell.clusters, health.not_ready()) == (None, "starting")
        assert not lease.valid()
        bell.ring("ns", "demo")  # the watches go on
        store.silent = False
        await until(lambda: Term.running == 1)
        assert Term.begun == ["pod/uid/1", lease.me]
        assert store.holder == lease.me != "pod/uid/1"
        assert lease.me.startswith("pod/uid/")
        assert lease.valid()
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=10)
        assert done, "a cancellation was lost"
    assert Term.running == 0


@pytest.mark.planner
async def test_o05_after_a_term_that_lapsed_the_process_ends_if_another_one_has_begun(quick: None) -> None:
    """Whoever slept through it finds the other: there is nothing to wait for."""
    store, clock, health = Store(), Clock(), Health()
    lease = Lease(store, "ns", "pod/uid/1", clock)
    await lease.acquire()
    async with aiohttp.ClientSession() as session:
        means = Means(cast(Kube, store), session, lease, health, False)
        running = asyncio.create_task(operator.terms(means, ("ns",), operator.Bell()))
        await until(lambda: Term.running == 1)
        assert store.lease is not None
        store.lease = {**store.lease, "spec": {**store.lease["spec"], "holderIdentity": "other/uid/9"}}
        clock.now += VALID_S
        with pytest.raises((LeaseLost, BaseExceptionGroup)) as ended:
            await running
    assert "other/uid/9 holds the Lease" in (
        operator._first(ended.value) if isinstance(ended.value, BaseExceptionGroup) else str(ended.value)
    )
    assert store.holder == "other/uid/9"
    assert len(Term.begun) == 1
