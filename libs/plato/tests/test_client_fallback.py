"""When a client polls, and when it goes back to sockets: decided from how links ended, on a clock of the test."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from plato.client.core import fallback
from plato.client.core.fallback import KILLED_MAX, QUIET_MS, RETURN_MIN_MS, SOON_MS, Fallback, Way

SOCKET, POLL = Way.SOCKET, Way.POLL


def made() -> Fallback:
    return Fallback(lambda: 0.0)


def killed(core: Fallback, now_ms: int = 0, times: int = 1) -> None:
    """Sockets that open and are killed by the network a moment later."""
    for _ in range(times):
        core.opened(SOCKET, now_ms)
        core.heard(SOCKET)
        core.ended(SOCKET, now_ms, 200, 0, ours=False)


def polling(now_ms: int = 0) -> Fallback:
    """It fell back, and a poll stands."""
    core = made()
    killed(core, now_ms, KILLED_MAX)
    core.opened(POLL, now_ms)
    return core


def test_sockets_that_are_killed_soon_lead_to_polls_where_there_are_some() -> None:
    core = made()
    killed(core, times=KILLED_MAX - 1)
    assert core.choose(can_poll=True) is SOCKET
    killed(core)
    assert core.choose(can_poll=True) is POLL
    assert core.choose(can_poll=False) is SOCKET


def test_sockets_that_cannot_be_opened_lead_to_polls_and_polls_that_cannot_lead_back() -> None:
    core = made()
    for _ in range(KILLED_MAX):
        core.failed(SOCKET, 0, 5_000, given_up=True)
    assert core.choose(can_poll=True) is POLL
    core.failed(POLL, 0, 10, given_up=False)  # no network at all
    assert core.choose(can_poll=True) is SOCKET


def test_a_socket_that_falls_silent_counts_and_one_that_is_left_after_a_word_does_not() -> None:
    core = made()
    for _ in range(KILLED_MAX):
        core.ended(SOCKET, 0, 15_000, 100, ours=True)  # a code, a REDIRECT
        core.failed(SOCKET, 0, 50, given_up=True)  # another one was faster
    assert core.choose(can_poll=True) is SOCKET
    for _ in range(KILLED_MAX):
        core.ended(SOCKET, 0, 15_000, QUIET_MS, ours=True)
    assert core.choose(can_poll=True) is POLL


def test_a_socket_that_stood_long_clears_what_was_counted() -> None:
    core = made()
    killed(core, times=KILLED_MAX - 1)
    core.ended(SOCKET, 0, SOON_MS, 0, ours=False)
    killed(core, times=KILLED_MAX - 1)
    assert core.choose(can_poll=True) is SOCKET


def test_a_trial_that_stands_leads_back_to_sockets() -> None:
    core = polling()
    assert core.trial_ms() == RETURN_MIN_MS
    core.try_socket()
    assert core.trial_ms() is None
    assert core.choose(can_poll=True) is SOCKET
    core.opened(SOCKET, RETURN_MIN_MS)
    core.heard(SOCKET)
    core.ended(POLL, RETURN_MIN_MS, 1, 0, ours=True)
    assert core.choose(can_poll=True) is SOCKET
    core.ended(SOCKET, 10**6, SOON_MS, 0, ours=False)
    assert (core.choose(can_poll=True), core.trial_ms()) == (SOCKET, None)


def test_a_trial_that_is_killed_leads_to_polls_at_once_and_the_next_waits_twice_as_long() -> None:
    core = polling()
    now_ms, waits = RETURN_MIN_MS, []
    for _ in range(3):
        core.try_socket()
        killed(core, now_ms)
        assert core.choose(can_poll=True) is POLL
        due_ms = core.trial_ms()
        assert due_ms is not None
        waits.append(due_ms - now_ms)
        now_ms = due_ms
    assert waits == [2 * RETURN_MIN_MS, 4 * RETURN_MIN_MS, 8 * RETURN_MIN_MS]
    for _ in range(20):
        core.try_socket()
        core.failed(SOCKET, 0, 10, given_up=False)
    assert core.trial_ms() == fallback.RETURN_MAX_MS


def test_another_network_is_met_with_sockets() -> None:
    core = polling()
    core.forget()
    assert core.choose(can_poll=True) is SOCKET
    core.ended(POLL, 0, 1, 0, ours=True)
    assert core.trial_ms() is None


EVENT = st.one_of(
    st.tuples(st.just("opened"), st.sampled_from(Way)),
    st.tuples(st.just("failed"), st.sampled_from(Way), st.booleans()),
    st.tuples(
        st.just("ended"), st.sampled_from(Way), st.integers(0, 2 * SOON_MS), st.integers(0, 9_000), st.booleans()
    ),
    st.tuples(st.just("heard"), st.sampled_from(Way)),
    st.tuples(st.just("try")),
    st.tuples(st.just("put_off")),
)


@given(st.lists(EVENT, max_size=40))
def test_whatever_happened_bad_sockets_lead_to_polls_and_standing_polls_to_a_trial(
    events: list[tuple[object, ...]],
) -> None:
    core, stand = made(), 0
    for kind, *given_ in events:
        if kind == "opened":
            core.opened(given_[0], 0)  # type: ignore[arg-type]  # as drawn
            stand += given_[0] is POLL
        elif kind == "failed":
            core.failed(given_[0], 0, 2_000, given_[1])  # type: ignore[arg-type]  # as drawn
        elif kind == "ended" and (given_[0] is SOCKET or stand):
            core.ended(given_[0], 0, *given_[1:])  # type: ignore[arg-type]  # as drawn
            stand -= given_[0] is POLL
        elif kind == "heard":
            core.heard(given_[0])  # type: ignore[arg-type]  # as drawn
        elif kind == "try" and core.trial_ms() is not None:
            core.try_socket()
        elif kind == "put_off":
            core.put_off(0)
    killed(core, times=KILLED_MAX)
    assert core.choose(can_poll=True) is POLL
    core.opened(POLL, 0)
    assert core.trial_ms() is not None
