"""The pure parts of overload control: rates, the adaptive limiter (by simulation), the breaker, the top-k sketch."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque

from hypothesis import given
from hypothesis import strategies as st
from plato.core.breaker import PROBE_MS, Breaker
from plato.core.limiter import RETRY_MAX_MS, RETRY_MIN_MS, Limiter
from plato.core.rates import Buckets
from plato.core.topk import Hot, SpaceSaving

# ── rates ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_bucket_gives_its_burst_at_once_and_then_its_rate() -> None:
    buckets: Buckets[str] = Buckets(10, 5)
    for _ in range(5):
        assert buckets.wait_ms("a", 1_000) == 0
        buckets.charge("a", 1_000)
    assert buckets.wait_ms("a", 1_000) == 100
    assert buckets.wait_ms("a", 1_060) == 40
    assert buckets.wait_ms("b", 1_060) == 0, "each key has its own"
    assert buckets.wait_ms("a", 1_100) == 0
    assert buckets.wait_ms("a", 1_100, 3) == 200


@given(st.lists(st.tuples(st.integers(0, 400), st.sampled_from("abc")), max_size=300))
def test_no_key_gets_more_than_burst_and_rate_whatever_the_times(asked: list[tuple[int, str]]) -> None:
    """Also over the rounds by which entries are forgotten; and who waits as told is let in."""
    buckets: Buckets[str] = Buckets(20, 8)
    now, given_at = 0, {k: deque[int]() for k in "abc"}
    for step, key in asked:
        now += step
        wait = buckets.wait_ms(key, now)
        assert buckets.wait_ms(key, now + wait) == 0
        if not wait:
            buckets.charge(key, now)
            given_at[key].append(now)
            times = list(given_at[key])
            assert all(len(times) - i <= 8 + (now - t) * 20 / 1_000 + 1e-6 for i, t in enumerate(times))


def test_full_buckets_take_no_memory() -> None:
    buckets: Buckets[int] = Buckets(10, 10)
    for now in range(0, 100_000, 10):
        buckets.charge(now, now)
    assert len(buckets) <= 2 * 1_000 / 10 + 2


# ── the limiter, by simulation ───────────────────────────────────────────────────────────────────────────────

DEADLINE_MS = 1_000
"""What is done later than this after it was let in is of no use to anybody."""
SECONDS = 20
PERIOD_MS = 1_000.0
"""A client wants something each so often, if the one before is done."""


class Bus:
    """A dependency that works in batches of 40 at most, one at a time: 20 ms and 1.5 ms a piece, so 500 a second."""

    FIXED_MS, EACH_MS, MOST, REFUSAL_MS = 20.0, 1.5, 40, 0.25
    PEAK_PER_S = 1_000 * MOST / (FIXED_MS + EACH_MS * MOST)


def simulate(times: float, limiter: Limiter | None, honours: bool = True) -> Counter[str]:
    """Clients that together want `times` what the bus can do, each one thing at a time. Who is refused comes again when
    told to, or after 250 ms; refusing costs an eighth of doing. Counts what became of the last two thirds, a second."""
    rng = random.Random(6)
    arrivals = [(rng.random() * PERIOD_MS, client) for client in range(int(times * Bus.PEAK_PER_S * PERIOD_MS / 1_000))]
    heapq.heapify(arrivals)
    queue: deque[tuple[float, int]] = deque()
    batch: list[tuple[float, int]] = []
    counts: Counter[str] = Counter()
    busy_until, refusing_ms, now = 0.0, 0.0, 0.0
    while now < SECONDS * 1_000:
        if batch and (not arrivals or busy_until <= arrivals[0][0]):
            now = busy_until
            for let_in, client in batch:
                if limiter is not None:
                    limiter.done(int(now))
                if now > SECONDS * 1_000 / 3:
                    counts["in time" if now - let_in <= DEADLINE_MS else "late"] += 1
                heapq.heappush(arrivals, (max(now, let_in + PERIOD_MS * (0.5 + rng.random())), client))
            batch = []
        else:
            now, client = heapq.heappop(arrivals)
            if limiter is None or limiter.admits(int(now)):
                if limiter is not None:
                    limiter.begin(int(now))
                queue.append((now, client))
            else:
                refusing_ms += Bus.REFUSAL_MS
                if now > SECONDS * 1_000 / 3:
                    counts["refused"] += 1
                retry_ms = limiter.retry_ms(int(now)) if honours else RETRY_MIN_MS
                heapq.heappush(arrivals, (now + retry_ms * (1 + rng.random() / 2), client))
        if not batch and queue:
            batch = [queue.popleft() for _ in range(min(len(queue), Bus.MOST))]
            busy_until = now + Bus.FIXED_MS + Bus.EACH_MS * len(batch) + refusing_ms
            refusing_ms = 0.0
    return Counter({what: int(count / (SECONDS * 2 / 3)) for what, count in counts.items()})


def limiter() -> Limiter:
    return Limiter(calm_ms=400, floor=50)


def test_below_its_peak_nothing_is_refused() -> None:
    counts = simulate(0.9, limiter())
    assert counts["refused"] == counts["late"] == 0
    assert counts["in time"] > 0.75 * Bus.PEAK_PER_S


def test_at_three_times_its_peak_goodput_stays() -> None:
    counts = simulate(3, limiter())
    assert counts["in time"] >= 0.9 * Bus.PEAK_PER_S
    assert counts["late"] == 0
    assert counts["refused"] <= counts["in time"]


def test_what_goodput_at_three_times_the_peak_is_owed_to() -> None:
    """Without a limiter nothing is done in time; and clients that do not wait as told cost what they are refused."""
    assert simulate(3, None)["in time"] < 0.1 * Bus.PEAK_PER_S
    assert simulate(3, limiter(), honours=False)["in time"] < 0.8 * Bus.PEAK_PER_S


def test_a_dependency_that_hangs_is_left_with_what_it_used_to_bear() -> None:
    lim = limiter()
    now = 0
    for now in range(0, 2_000, 10):  # 1,000 a second, 20 ms each
        for _ in range(10):
            assert lim.admits(now)
            lim.begin(now)
        if now >= 20:
            lim.done(now, 10)
    let_in = 0
    waits = []
    for now in range(2_000, 30_000, 10):  # it hangs; 1,000 a second go on to come
        for _ in range(10):
            if lim.admits(now):
                lim.begin(now)
                let_in += 1
            else:
                waits.append(lim.retry_ms(now))
    assert let_in <= 450, "400 ms of the usual, then the limit"
    assert waits[0] < 2 * RETRY_MIN_MS
    assert max(waits) <= RETRY_MAX_MS
    assert waits[-1] >= RETRY_MAX_MS - 1
    lim.done(now, lim.in_flight)
    assert lim.admits(now), "once it answers, all are let in"
    assert lim.oldest_ms(now) == 0


def test_the_refused_have_turns_at_a_share_of_what_is_done() -> None:
    lim = Limiter(calm_ms=10, floor=1)
    for now in range(0, 1_000, 10):  # 1,000 a second
        lim.begin(now, 10)
        lim.done(now + 9, 10)
    turns = [lim.retry_ms(1_000) for _ in range(1_000)]
    assert turns == sorted(turns)
    assert RETRY_MIN_MS <= turns[0] < RETRY_MIN_MS + 10
    assert 4_900 <= turns[-1] - turns[0] <= 5_100, "1,000 at 200 a second"
    assert lim.retry_ms(9_000) < RETRY_MIN_MS + 10, "their turns have passed"


def test_work_that_is_given_up_is_no_sign_of_latency_and_lost_work_is_forgotten() -> None:
    lim = Limiter(calm_ms=100, floor=2, lost_ms=1_000)
    lim.begin(0, 3)
    lim.begin(50, 4)
    lim.cancel(5)
    assert lim.in_flight == 2
    assert lim.oldest_ms(80) == 80
    assert lim.oldest_ms(1_001) == 0
    assert lim.in_flight == 0
    lim.done(2_000, 7)
    assert lim.in_flight == 0


# ── the breaker ──────────────────────────────────────────────────────────────────────────────────────────────


def ask(
    breaker: Breaker, begin_ms: int, end_ms: int, answers: float, rng: random.Random, step_ms: int = 1
) -> tuple[int, int]:
    """(sent, refused) of one request per step; a share `answers` of the sent ones is accepted."""
    sent = refused = 0
    for now in range(begin_ms, end_ms, step_ms):
        if not breaker.admits(now, rng.random()):
            refused += 1
            continue
        sent += 1
        if rng.random() < answers:
            breaker.accepted(now)
        else:
            breaker.failed(now)
    return sent, refused


def test_a_dependency_that_answers_is_never_throttled() -> None:
    assert ask(Breaker(), 0, 30_000, 1.0, random.Random(1))[1] == 0
    assert ask(Breaker(), 0, 30_000, 0.6, random.Random(1))[1] < 300, "nor one that answers more than half"


def test_one_that_answers_nothing_is_asked_a_few_times_a_second() -> None:
    breaker = Breaker()
    ask(breaker, 0, 5_000, 1.0, random.Random(2))
    ask(breaker, 5_000, 15_000, 0.0, random.Random(2))
    sent, refused = ask(breaker, 15_000, 25_000, 0.0, random.Random(2))
    assert 10_000 / PROBE_MS * 0.9 <= sent <= 10_000 / PROBE_MS * 1.5
    assert refused > 9_700


def test_a_few_requests_are_all_sent() -> None:
    assert ask(Breaker(), 0, 60_000, 0.0, random.Random(3), step_ms=PROBE_MS)[1] == 0


def test_a_crowd_in_flight_says_nothing_against_a_dependency() -> None:
    breaker, rng = Breaker(), random.Random(6)
    for now in range(0, 5_000, 50):
        for _ in range(100):  # all ask before the first is answered
            assert breaker.admits(now, rng.random())
        for _ in range(100):
            breaker.accepted(now + 20)


def test_it_recovers_within_a_second() -> None:
    breaker, rng = Breaker(), random.Random(4)
    ask(breaker, 0, 30_000, 0.0, rng)
    ask(breaker, 30_000, 31_000, 1.0, rng)
    assert ask(breaker, 31_000, 32_000, 1.0, rng)[1] == 0


def test_it_sends_what_a_dependency_at_its_limit_can_take_times_k() -> None:
    """The book's claim: of a dependency that accepts 100 a second, about twice that are sent, however many come."""
    breaker, rng = Breaker(), random.Random(5)
    sent = accepted = 0
    tokens = 0.0
    for now in range(60_000):
        tokens = min(10.0, tokens + 0.1)
        for _ in range(3):
            if breaker.admits(now, rng.random()):
                sent += now >= 30_000
                if tokens >= 1:
                    tokens -= 1
                    breaker.accepted(now)
                    accepted += now >= 30_000
                else:
                    breaker.failed(now)
    assert accepted >= 0.95 * 3_000
    assert sent <= 3 * accepted


# ── the sketch ───────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers(0, 40), max_size=400), st.integers(1, 20))
def test_counts_err_upward_and_by_their_error_at_most(stream: list[int], size: int) -> None:
    sketch: SpaceSaving[int] = SpaceSaving(size)
    for key in stream:
        sketch.add(key)
    true = Counter(stream)
    kept = {key: (count, error) for key, count, error in sketch.top()}
    assert len(kept) <= size
    for key, (count, error) in kept.items():
        assert count - error <= true[key] <= count
        assert sketch.least(key) == count - error
    assert {key for key, count in true.items() if count > len(stream) / size} <= set(kept)


def test_the_hot_ones_of_a_long_tail_are_found_and_forgotten() -> None:
    rng = random.Random(7)
    hot: Hot[str] = Hot(times=50)
    for now in range(1_000):
        for _ in range(5):
            hot.seen(f"c{rng.randrange(100_000)}", now)
        hot.seen(f"hot{now % 3}", now)
    assert set(hot.hot(999)) == {"hot0", "hot1", "hot2"}
    assert hot.seen("hot0", 1_500), "of the last round"
    assert hot.hot(3_500) == []
