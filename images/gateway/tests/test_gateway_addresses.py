"""Bounds per address: what one may have and how fast, and that nobody else's share is touched."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from plato.core.codes import Code, text
from plato.runtime.client_tls import CERTIFICATE, KEY, load
from plato.wire.v1 import canned, client_pb2
from plato_gateway import listeners
from plato_gateway.core import lanes
from plato_gateway.core.addresses import BURST_S, FULL_RETRY_MS, Addresses, key_of, part_of
from plato_gateway.listeners import Listeners
from plato_gateway.sockets import Sockets


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("203.0.113.7", "203.0.113.8", False),
        ("203.0.113.7", "::ffff:203.0.113.7", True),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("fe80::1%eth0", "fe80::1%eth1", True),
        ("", "what is this", False),
    ],
)
def test_what_counts_as_one_address(one: str, other: str, same: bool) -> None:
    assert (key_of(one) == key_of(other)) is same


def test_an_address_has_so_many_connections_and_gets_one_when_one_ends() -> None:
    addresses = Addresses(2, 0)
    assert [addresses.came("a", 0) for _ in range(4)] == [0, 0, FULL_RETRY_MS, FULL_RETRY_MS]
    assert addresses.came("b", 0) == 0
    addresses.gone("a")
    assert addresses.came("a", 1) == 0
    assert addresses.came("a", 1) == FULL_RETRY_MS


@pytest.mark.parametrize(("most", "workers"), [(2, 2), (20, 2), (100, 8), (1_000, 4), (7, 1)])
def test_an_address_below_its_bound_is_not_refused_for_how_chance_spreads_it_over_workers(
    most: int, workers: int
) -> None:
    chance, refused = random.Random(7), 0
    for _ in range(100):
        parts = [Addresses(part_of(most, workers), 0) for _ in range(workers)]
        refused += sum(parts[chance.randrange(workers)].came("a", 0) > 0 for _ in range(most))
    assert refused <= most, "one in a hundred at most"
    assert part_of(most, workers) * workers <= 2 * most + 4 * workers, "a bound it is all the same"
    assert part_of(0, workers) == 0


def test_connects_have_a_burst_then_a_pace_and_are_told_when() -> None:
    addresses = Addresses(0, 2.0)
    answers = [addresses.came("a", 50_000) for _ in range(BURST_S * 2 + 1)]
    assert answers[:-1] == [0] * BURST_S * 2
    assert 0 < answers[-1] <= 501
    assert addresses.came("b", 50_000) == 0
    assert addresses.came("a", 50_000 + answers[-1]) == 0, "then it may"
    assert addresses.came("a", 50_000 + answers[-1]) > 0


def test_a_slow_pace_lets_the_first_one_in_at_once() -> None:
    assert Addresses(0, 0.05).came("a", 0) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4_000)), max_size=300), st.integers(1, 5))
def test_whatever_comes_the_bounds_hold_and_nothing_is_left(steps: list[tuple[str, int]], per_s: int) -> None:
    addresses = Addresses(7, float(per_s))
    now_ms, here, entered = 0, dict.fromkeys("abc", 0), dict[str, list[int]](a=[], b=[], c=[])
    for key, wait_ms in steps:
        now_ms += wait_ms
        if here[key] and wait_ms % 2:
            addresses.gone(key)
            here[key] -= 1
        elif addresses.came(key, now_ms) == 0:
            here[key] += 1
            entered[key].append(now_ms)
        assert max(here.values()) <= 7
        for moments in entered.values():
            recent = [m for m in moments if m > now_ms - 20_000]
            assert len(recent) <= per_s * (BURST_S + 20) + 1
    for key, count in here.items():
        for _ in range(count):
            addresses.gone(key)
    addresses.came("d", now_ms + 100_000)
    assert len(addresses) == 2, "d's connection and d's pace"


def test_the_refusal_is_what_protobuf_would_write() -> None:
    error = client_pb2.ErrorMsg(code=Code.ADDRESS_BUSY, msg=text(Code.ADDRESS_BUSY), retry_ms=30_000)
    frame = client_pb2.MsgCmd(Type=client_pb2.ERROR, Payload=error.SerializeToString())
    assert canned.address_busy(30_000) == frame.SerializeToString()


def test_what_is_refused_in_a_flood_of_handshakes_does_not_count_for_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would ever count it out again: the address would be refused for good, long after the flood."""
    made = trustme.CA().issue_cert("chat.example")
    (tmp_path / CERTIFICATE).write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    (tmp_path / KEY).write_bytes(made.private_key_pem.bytes())
    monkeypatch.setattr(listeners, "MAX_SHAKING", 0)
    sockets, stats = Sockets(), lanes.Stats()
    sockets.addresses = Addresses(1, 0)
    downlink, uplink = Mock(), Mock()
    listening = Listeners(
        sockets,
        uplink,
        downlink,
        stats,
        max_connections=9,
        login_timeout_ms=1_000,
        ws_origins=(),
        certificates=load(tmp_path),
    )
    for _ in range(3):
        ours, theirs = socket.socketpair()
        with theirs:
            listening._accepted(ours.detach(), ord("t"), b"t203.0.113.7:40000")
            assert theirs.recv(1) == b""
    assert stats.refused == 3
    assert len(sockets.addresses) == 0
