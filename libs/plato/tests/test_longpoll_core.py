"""Long polling's numbers: whatever requests and answers are lost, late or doubled, each frame arrives once and in order."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plato.core import longpoll
from plato.core.codes import Code
from plato.core.errors import PeerError
from plato.core.frames import pack
from plato.core.longpoll import HEAD_BYTES, Body, Incoming, Outgoing, decode

LIMIT = 100
PAYLOAD = st.binary(min_size=1, max_size=LIMIT)


class Side:
    """One end: what it says, what it got, and the bodies that the network holds of it."""

    def __init__(self) -> None:
        self.outgoing, self.incoming = Outgoing(), Incoming(LIMIT)
        self.said: list[bytes] = []
        self.got: list[bytes] = []
        self.on_the_way: list[bytes] = []

    def say(self, payload: bytes) -> None:
        self.said.append(payload)
        self.outgoing.put(pack(payload))

    def post(self, most_bytes: int) -> None:
        first, run = self.outgoing.page(most_bytes)
        self.on_the_way.append(Body(received=self.incoming.received, first=first, run=run).encode())

    def hear(self, data: bytes) -> None:
        body = decode(data)
        assert self.outgoing.confirmed(body.received)
        self.got += self.incoming.take(body.first, body.run)


STEP = st.one_of(
    st.tuples(st.just("say"), st.integers(0, 1), PAYLOAD),
    st.tuples(st.just("post"), st.integers(0, 1), st.integers(1, 300)),
    st.tuples(st.just("arrive"), st.integers(0, 1), st.integers(0, 9)),
    st.tuples(st.just("double"), st.integers(0, 1), st.integers(0, 9)),
    st.tuples(st.just("lose"), st.integers(0, 1), st.integers(0, 9)),
)


@given(st.lists(STEP, max_size=60))
def test_each_frame_arrives_once_and_in_order_over_any_network(steps: list[tuple[str, int, object]]) -> None:
    sides = Side(), Side()
    for what, who, value in steps:
        one, other = sides[who], sides[1 - who]
        if what == "say":
            assert isinstance(value, bytes)
            one.say(value)
        elif what == "post":
            assert isinstance(value, int)
            one.post(value)
        elif one.on_the_way:
            assert isinstance(value, int)
            at = value % len(one.on_the_way)  # any of them: the network keeps no order
            body = one.on_the_way[at] if what == "double" else one.on_the_way.pop(at)
            if what != "lose":
                other.hear(body)
        for a, b in (sides, sides[::-1]):
            assert b.got == a.said[: len(b.got)]
    for _ in range(len(steps)):  # the network works again: everything arrives, and nothing is kept
        for one, other in (sides, sides[::-1]):
            one.on_the_way.clear()
            one.post(1)
            other.hear(one.on_the_way.pop())
    for one, other in (sides, sides[::-1]):
        assert other.got == one.said
        one.hear(Body(received=other.incoming.received).encode())
        assert len(one.outgoing) == one.outgoing.size_bytes == 0


def test_a_page_keeps_its_bound_but_holds_one_frame_at_least() -> None:
    outgoing = Outgoing()
    for payload in (b"a" * 50, b"b" * 10, b"c" * 10):
        outgoing.put(pack(payload))
    assert outgoing.page(1) == (1, pack(b"a" * 50))
    assert outgoing.page(54 + 14) == (1, pack(b"a" * 50) + pack(b"b" * 10))
    assert outgoing.confirmed(1)
    assert outgoing.page(1) == (2, pack(b"b" * 10))
    assert outgoing.confirmed(1)  # an older answer, late
    assert not outgoing.confirmed(4)
    assert outgoing.page() == (2, pack(b"b" * 10) + pack(b"c" * 10))


@given(st.binary(max_size=120), st.integers(0, 3))
def test_only_peer_errors_escape_whatever_comes(data: bytes, first: int) -> None:
    with suppress(PeerError):
        body = decode(data)
        Incoming(LIMIT).take(body.first, body.run)
    with suppress(PeerError):
        Incoming(LIMIT).take(first, data)


def test_a_bad_frame_takes_nothing_with_it() -> None:
    incoming = Incoming(LIMIT)
    good = pack(b"x")
    for bad, code in (
        (pack(b"y")[:-1], Code.MALFORMED),
        (b"\0\0\0\0", Code.FRAME_SIZE),
        (pack(b"y" * 101), Code.FRAME_SIZE),
    ):
        with pytest.raises(PeerError) as refused:
            incoming.take(1, good + bad)
        assert (refused.value.code, incoming.received) == (code, 0)
    assert incoming.take(1, good) == [b"x"]


def test_a_body_is_read_back_and_another_version_is_refused() -> None:
    body = Body(longpoll.OPEN, b"s" * 16, 1, 2, 3, 4, pack(b"x"))
    assert decode(body.encode()) == body
    assert len(Body().encode()) == HEAD_BYTES == 42
    with pytest.raises(PeerError):
        decode(b"\x02" + body.encode()[1:])
