"""Reports asked from real HTTP servers: who is asked when, what counts as unknown."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from plato_operator.core.snapshot import DrainReport, Report
from plato_operator.reports import MOST_AT_ONCE, QUIET_S, STALE_S, Access, Reports, Target, parsed


class Process:
    """A process with an admin port."""

    def __init__(self) -> None:
        self.body: object = {"uid": "u1", "epoch_seen": 7, "connections": 3}
        self.tokens = {"secret"}
        self.asked = 0
        self.hangs: asyncio.Event | None = None
        self.at = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        if self.hangs is not None:
            await self.hangs.wait()
        if request.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            return web.Response(status=401)
        return web.Response(text=self.body if isinstance(self.body, str) else json.dumps(self.body))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def process() -> AsyncIterator[Process]:
    made = Process()
    application = web.Application()
    application.router.add_get("/v1/report", made.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.at = f"127.0.0.1:{runner.addresses[0][1]}"
    yield made
    if made.hangs is not None:
        made.hangs.set()
    await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


ACCESS = Access(("secret",))
PATIENT_S = 20.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who answers is waited for, also on a machine that stands still for a while."""
    monkeypatch.setattr("plato_operator.reports.GRACE_S", PATIENT_S)
    monkeypatch.setattr("plato_operator.reports.TIMEOUT_S", PATIENT_S)


@pytest.fixture
def hasty(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look waits a moment only."""
    monkeypatch.setattr("plato_operator.reports.GRACE_S", 0.2)


async def asked(process: Process, times: int) -> None:
    """Waits until the process was asked so often; not more."""
    async with asyncio.timeout(PATIENT_S):
        while process.asked < times:  # noqa: ASYNC110 - of another task
            await asyncio.sleep(0.01)
    assert process.asked == times


async def test_parties_are_asked_each_time_and_others_seldom(process: Process, session: aiohttp.ClientSession) -> None:
    """Between two times the last answer stands."""
    clock = Clock()
    reports = Reports(session, "ns", "demo", clock)
    targets = {"g-0": Target("u1", process.at)}
    assert (await reports.refresh(targets, (), ACCESS))["g-0"].connections == 3
    clock.now += 1
    assert "g-0" in await reports.refresh(targets, (), ACCESS)
    assert process.asked == 1
    await reports.refresh(targets, {"g-0"}, ACCESS)
    assert process.asked == 2
    clock.now += QUIET_S
    await reports.refresh(targets, (), ACCESS)
    assert process.asked == 3


@pytest.mark.parametrize("body", [{"uid": "other"}, "garbage", "[]", {"uid": "u1", "slots": {"acquired": [[1]]}}])
async def test_what_is_no_answer_of_this_process_is_unknown(
    process: Process, session: aiohttp.ClientSession, body: object
) -> None:
    """Another uid (a reused port), no JSON, no report: the older report goes too."""
    reports = Reports(session, "ns", "demo", Clock())
    targets = {"g-0": Target("u1", process.at)}
    assert await reports.refresh(targets, {"g-0"}, ACCESS)
    process.body = body
    assert await reports.refresh(targets, {"g-0"}, ACCESS) == {}


async def test_a_hanging_process_delays_nobody_and_is_unknown_in_time(
    process: Process, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look waits a moment only; the request is not doubled, and the old report counts no longer than STALE_S."""
    clock = Clock()
    reports = Reports(session, "ns", "demo", clock)
    targets = {"g-0": Target("u1", process.at)}
    await reports.refresh(targets, (), ACCESS)
    process.hangs = asyncio.Event()
    monkeypatch.setattr("plato_operator.reports.GRACE_S", 0.2)
    started = asyncio.get_running_loop().time()
    await reports.refresh(targets, {"g-0"}, ACCESS)
    await reports.refresh(targets, {"g-0"}, ACCESS)
    assert asyncio.get_running_loop().time() - started < PATIENT_S / 2
    await asked(process, 2)
    clock.now += STALE_S
    assert await reports.refresh(targets, (), ACCESS) == {}
    reports.close()


async def test_a_second_token_is_tried_while_tokens_rotate(process: Process, session: aiohttp.ClientSession) -> None:
    """The Secret holds two for that time."""
    reports = Reports(session, "ns", "demo", Clock())
    process.tokens = {"new"}
    assert await reports.refresh({"g-0": Target("u1", process.at)}, (), Access(("old", "new")))
    assert await reports.refresh({"g-0": Target("u1", process.at)}, {"g-0"}, Access(("old",))) == {}


async def test_without_tokens_nobody_is_asked(process: Process, session: aiohttp.ClientSession) -> None:
    """The Secret is not there yet: each answer would be 401, and the pod's log would tell of an intruder."""
    reports = Reports(session, "ns", "demo", Clock())
    targets = {"g-0": Target("u1", process.at)}
    assert await reports.refresh(targets, {"g-0"}, Access()) == {}
    assert process.asked == 0
    assert await reports.refresh(targets, {"g-0"}, ACCESS)


async def test_many_that_hang_are_asked_a_few_at_a_time(
    process: Process, session: aiohttp.ClientSession, hasty: None
) -> None:
    """500 pods that are not ready are asked at each pass: no burst of 500 connections, and each gets its turn."""
    reports = Reports(session, "ns", "demo", Clock())
    process.hangs = asyncio.Event()
    targets = {f"g-{i}": Target("u1", process.at) for i in range(500)}
    assert await reports.refresh(targets, targets, ACCESS) == {}
    await asked(process, MOST_AT_ONCE)
    assert await reports.refresh(targets, targets, ACCESS) == {}
    assert process.asked == MOST_AT_ONCE
    process.hangs.set()
    async with asyncio.timeout(20):
        while len(await reports.refresh(targets, (), ACCESS)) < len(targets):
            pass
    assert process.asked == len(targets)
    reports.close()


async def test_a_replaced_pod_is_asked_anew(process: Process, session: aiohttp.ClientSession) -> None:
    """The report of the pod before it is forgotten at once."""
    reports = Reports(session, "ns", "demo", Clock())
    await reports.refresh({"g-0": Target("u1", process.at)}, (), ACCESS)
    assert await reports.refresh({"g-0": Target("u2", process.at)}, (), ACCESS) == {}
    assert await reports.refresh({}, (), ACCESS) == {}


async def test_the_last_count_of_connections_outlives_its_report(
    process: Process, session: aiohttp.ClientSession
) -> None:
    """Whoever falls silent had so many; a successor's uid knows nothing of them."""
    clock = Clock()
    reports = Reports(session, "ns", "demo", clock)
    targets = {"g-0": Target("u1", process.at)}
    await reports.refresh(targets, (), ACCESS)
    process.body = "no report"
    clock.now += STALE_S
    assert await reports.refresh(targets, (), ACCESS) == {}
    assert reports.last_connections() == {"u1": 3}
    await reports.refresh({"g-0": Target("u2", process.at)}, (), ACCESS)
    assert reports.last_connections() == {}


def test_a_report_is_read_with_what_it_has() -> None:
    """Absent is unknown; lease is three-valued."""
    assert parsed({"uid": "u"}) == Report("u")
    full = {
        "uid": "u", "boot": "b", "epoch_seen": 9, "worker_id": 17, "lease": False, "connections": 2, "new": [1],
        "slots": {"acquired": [[0, 3]], "loading": [[4, 9]], "released": [], "outbid": [[4, 5]],
                  "deserted": [[5, 5]], "fence": 12},
        "drain": {"id": 9, "phase": "drained", "remaining": 0, "cut": 1},
    }  # fmt: skip
    drain = DrainReport(9, "drained", 0, 1)
    assert parsed(full) == Report("u", 9, 17, False, ((0, 3),), drain, 2, ((4, 5),), 12, ((5, 5),))
    assert parsed({"uid": "u", "lease": None, "drain": None, "slots": None, "worker_id": None}) == Report("u")


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch_seen": 1 << 60}, {"epoch_seen": -1}, {"epoch_seen": float("inf")}, {"worker_id": 1024},
        {"connections": -1}, {"connections": 1 << 63}, {"slots": {"acquired": [[0, 10**12]]}},
        {"slots": {"acquired": [[-1, 3]]}}, {"slots": {"outbid": [[0, 1024]]}}, {"slots": {"fence": 1 << 60}},
        {"drain": {"id": 1, "remaining": -5}}, {"drain": {"id": float("inf")}},
    ],
)  # fmt: skip
def test_what_no_process_can_mean_is_no_report(wrong: dict[str, object]) -> None:
    """A gateway faces the internet. What it says must not take the operator's memory, push the record's epoch out of the
    store's range, or make a status that the API server refuses."""
    with pytest.raises(ValueError, match=r"the report has"):
        parsed({"uid": "u", **wrong})


async def test_nonsense_drops_the_report_before_it(process: Process, session: aiohttp.ClientSession) -> None:
    """As every answer that cannot be read: unknown, at once."""
    reports = Reports(session, "ns", "demo", Clock())
    targets = {"g-0": Target("u1", process.at)}
    for nonsense in ("[" * 100_000, '{"uid": "u1", "epoch_seen": Infinity}'):
        process.body = {"uid": "u1", "epoch_seen": 7}
        assert await reports.refresh(targets, {"g-0"}, ACCESS)
        process.body = nonsense
        assert await reports.refresh(targets, {"g-0"}, ACCESS) == {}


async def test_a_token_is_not_said_in_plain_text_where_tls_is_meant(
    process: Process, session: aiohttp.ClientSession
) -> None:
    """The Secret of tls.internal is missing, or its ca.crt is none. Pods of before, without TLS, are asked as they are."""
    reports = Reports(session, "ns", "demo", Clock())
    targets = {"g-0": Target("u1", process.at, tls="inside")}
    assert await reports.refresh(targets, {"g-0"}, ACCESS) == {}
    assert process.asked == 0
    context = ssl.create_default_context()
    assert await reports.refresh({"g-1": Target("u1", process.at)}, {"g-1"}, Access(ACCESS.tokens, {"other": context}))
