"""The Lease against a store in memory: one holder, loss is final, nothing is asked of another machine's clock."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from plato_operator.kube import Refused, Unreachable
from plato_operator.lease import DURATION_S, VALID_S, Lease, LeaseLost, holder


class Store:
    """One Lease with optimistic locking, which can be silent."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.silent = False

    def _set(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        if self.silent:
            raise Unreachable("silent")
        return copy.deepcopy(self.lease)

    async def create(self, kind: str, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.lease is not None:
            raise Refused(409, "AlreadyExists", "", "create")
        return self._set(body)

    async def replace(self, kind: str, namespace: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.lease is None or body["metadata"].get("resourceVersion") != self.lease["metadata"]["resourceVersion"]:
            raise Refused(409, "Conflict", "", "replace")
        return self._set(body)


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def made(store: Store, clock: Clock, me: str) -> Lease:
    return Lease(store, "ns", me, clock)


async def test_the_lease_is_found_by_its_label() -> None:
    """`kubectl plato report` asks for it in all namespaces; others' labels stay."""
    store = Store()
    lease = made(store, Clock(), "a/uid/1")
    await lease.acquire()
    assert store.lease is not None
    assert store.lease["metadata"]["labels"] == {"app.kubernetes.io/name": "plato"}
    store.lease["metadata"]["labels"] = {"team": "chat"}
    await lease.renew()
    assert store.lease["metadata"]["labels"] == {"team": "chat", "app.kubernetes.io/name": "plato"}


def test_each_start_has_another_name() -> None:
    """A claim of the record shows by it, also for the same pod."""
    assert holder("op-0", "uid") != holder("op-0", "uid")


async def test_one_of_two_holds_it_until_it_was_silent_for_its_duration() -> None:
    """The waiter counts by its own clock from when it saw the last renewal; the holder stops earlier than that."""
    store, clock = Store(), Clock()
    a, b = made(store, clock, "a//1"), made(store, clock, "b//1")
    assert await a.try_acquire()
    assert not await b.try_acquire()
    assert b.held_by == "a//1"
    clock.now += VALID_S
    assert not a.valid()  # 5 s before anybody else may act
    clock.now += DURATION_S - VALID_S - 0.1
    assert not await b.try_acquire()
    clock.now += 0.2
    assert await b.try_acquire()
    assert b.valid()
    with pytest.raises(LeaseLost, match="b//1 holds"):
        await a.renew()
    assert not a.valid()


async def test_a_renewal_starts_the_wait_anew_whatever_the_clocks_in_it_say() -> None:
    """Times written in the Lease are compared with nothing."""
    store, clock = Store(), Clock()
    a, b = made(store, clock, "a//1"), made(store, clock, "b//1")
    await a.try_acquire()
    await b.try_acquire()
    assert store.lease is not None
    store.lease["spec"]["renewTime"] = "1999-01-01T00:00:00.000000Z"
    for _ in range(5):
        clock.now += DURATION_S - 1
        await a.renew()
        assert store.lease is not None
        store.lease["spec"]["renewTime"] = f"1999-01-01T00:00:{clock.now:.0f}Z"
        assert not await b.try_acquire()


async def test_without_an_answer_it_ends_before_another_may_begin() -> None:
    """No renewal is known for VALID_S: check() refuses, whatever the store says later."""
    store, clock = Store(), Clock()
    a = made(store, clock, "a//1")
    await a.try_acquire()
    store.silent = True
    clock.now += VALID_S - 1
    with pytest.raises(Unreachable):
        await a.renew()
    a.check()
    clock.now += 1
    with pytest.raises(LeaseLost):
        a.check()


async def test_the_validity_counts_from_before_the_request() -> None:
    """An answer that took long is worth less."""
    store, clock = Store(), Clock()

    class Slow(Store):
        async def replace(self, *args: Any, **more: Any) -> dict[str, Any]:
            clock.now += VALID_S
            return await store.replace(*args, **more)

    slow = Slow()
    a = Lease(slow, "ns", "a//1", clock)
    await store.create("Lease", "ns", a._body(None))
    slow.lease = store.lease
    await a.renew()
    assert not a.valid()


async def test_a_restarted_container_of_the_same_pod_waits_for_nobody() -> None:
    """Its earlier process is surely gone; one of another pod, or of no pod, may live."""
    store, clock = Store(), Clock()
    await made(store, clock, holder("op-0", "uid-1")).try_acquire()
    assert not await made(store, clock, holder("op-0", "uid-2")).try_acquire()
    assert await made(store, clock, holder("op-0", "uid-1")).try_acquire()
    await made(store, clock, holder("op-0", "uid-1")).release()  # not the holder: nothing happens
    outside = Store()
    await made(outside, clock, holder("", "")).try_acquire()
    assert not await made(outside, clock, holder("", "")).try_acquire()


async def test_a_released_lease_is_taken_at_once_and_counted() -> None:
    """A good end needs no wait; transitions count the changes of hands."""
    store, clock = Store(), Clock()
    a, b = made(store, clock, "a//1"), made(store, clock, "b//1")
    await a.try_acquire()
    await a.release()
    assert not a.valid()
    assert await b.try_acquire()
    assert store.lease is not None
    assert store.lease["spec"]["holderIdentity"] == "b//1"
    assert store.lease["spec"]["leaseTransitions"] == 1


async def test_of_two_that_take_an_old_lease_one_is_refused() -> None:
    """By the resourceVersion."""
    store, clock = Store(), Clock()
    a, b = made(store, clock, "a//1"), made(store, clock, "b//1")
    await made(store, clock, "old//1").try_acquire()
    for lease in (a, b):
        assert not await lease.try_acquire()
    clock.now += DURATION_S
    seen = copy.deepcopy(store.lease)
    assert await a.try_acquire()

    class Stale(Store):
        async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
            return seen

        async def replace(self, *args: Any, **more: Any) -> dict[str, Any]:
            return await store.replace(*args, **more)

    b._store = Stale()
    assert not await b.try_acquire()
    assert not b.valid()
