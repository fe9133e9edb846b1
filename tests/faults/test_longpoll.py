"""A network that resets every TCP flow after a few kilobytes: the client goes on by short HTTP requests, and comes back to
sockets by itself when the network lets them live. Nothing is lost or doubled on the way there, there, or on the way back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from plato.client import Client, Phase
from plato.client.core import fallback
from plato.client.core.fallback import Way
from plato.local.cluster import LocalCluster

from tests.faults.relay import Relay
from tests.faults.waiting import until

FAULT_SETTINGS = {"gateway.poll_port": 8914, "local.shards": 1, "local.msgs": 1, "state.reconnect_delay_ms": 100}
KILL_AFTER_BYTES = 3_000
pytestmark = pytest.mark.timeout(150)


class Talker:
    """A client that counts: what it says is "<user> <n>", what it hears is kept."""

    def __init__(self, client: Client, user: str, peer: str) -> None:
        self.client, self.user, self.peer = client, user, peer
        self.said = 0
        self.heard: list[str] = []
        self._task = asyncio.create_task(self._hear())

    async def _hear(self) -> None:
        async for message in self.client.messages():
            self.heard.append(message.body.decode())

    async def say(self, count: int) -> None:
        """Says so many more, one after another was accepted."""
        for _ in range(count):
            sent = await self.client.send(f"{self.user} {self.said}" + "." * 100, to=self.peer)
            self.said += 1
            await asyncio.wait_for(sent.settled(), 60)

    def order(self, user: str) -> list[int]:
        """The numbers heard of a user."""
        return [int(body.rstrip(".").split()[1]) for body in self.heard if body.startswith(f"{user} ")]

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_a_network_that_kills_sockets_is_survived_by_polls_and_left_for_sockets_again(
    fault_cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback, "RETURN_MIN_MS", 1_500)
    cluster = fault_cluster
    ports = cluster.ports
    async with Relay("127.0.0.1", ports["edge-0.tcp"]) as sockets, Relay("127.0.0.1", ports["edge-0.poll"]) as polls:
        sockets.kill_after_bytes = polls.kill_after_bytes = KILL_AFTER_BYTES
        alice_client = Client(
            cluster.token("alice"),
            tmp_path / "alice",
            [f"127.0.0.1:{sockets.port}"],
            poll_port=polls.port,
            user="alice",
        )
        bob_client = Client(cluster.token("bob"), tmp_path / "bob", cluster.gateways, user="bob")
        async with alice_client, bob_client:
            alice, bob = Talker(alice_client, "alice", "bob"), Talker(bob_client, "bob", "alice")
            core = alice_client._ways.fallback

            # Sockets die under her; after some of them she polls, and both sides go on talking.
            while core.choose(True) is Way.SOCKET or alice_client.state.phase is not Phase.ONLINE:
                await asyncio.gather(alice.say(3), bob.say(3))
            assert sockets.killed  # one that fell silent or could not be opened counts for her, too
            await asyncio.gather(alice.say(8), bob.say(8))
            assert polls.killed == 0 or polls.accepted > polls.killed
            assert polls.accepted > 0

            # A trial in between that is killed leads back to polls; when sockets live, she stays on one.
            killed = sockets.killed
            while sockets.killed == killed:
                await asyncio.gather(alice.say(3), bob.say(3))
            sockets.kill_after_bytes = 0
            await until(lambda: core.trial_ms() is None and sockets.live == 1, 60.0, "no way back")
            await until(lambda: core._standing == 0, 30.0, "polls go on")
            asked = polls.accepted
            await asyncio.gather(alice.say(8), bob.say(8))
            assert (core._standing, core.choose(True), sockets.live) == (0, Way.SOCKET, 1)
            # Each request has a socket of its own by now: a poll and a write that were on their way when the link was closed
            # may be accepted after that, and the word that it is closed. Polls that went on would be sixteen and more.
            assert polls.accepted <= asked + 3

            await until(lambda: len(alice.heard) == len(bob.heard) == alice.said + bob.said, 30.0, "not all came")
            for one in (alice, bob):
                assert one.order("alice") == list(range(alice.said))
                assert one.order("bob") == list(range(bob.said))
            await asyncio.gather(alice.stop(), bob.stop())


async def test_who_polls_hears_a_redirect_and_goes_on_through_the_other_gateway(
    fault_cluster: LocalCluster, tmp_path: Path
) -> None:
    cluster = fault_cluster
    ports = cluster.ports
    first = f"127.0.0.1:{ports['edge-0.poll']}"
    carol_client = Client(cluster.token("carol"), tmp_path / "carol", [first], user="carol", transport="poll")
    async with carol_client:
        carol = Talker(carol_client, "carol", "dave")
        await carol.say(3)
        cluster.drain("edge-0", pace_per_s=100, settle_s=0, deadline_s=60)
        try:
            there = f"http://127.0.0.1:{ports['edge-1.poll']}/poll"
            await until(lambda: carol_client.state.gateway == there, 30.0, "she was not moved")
            assert carol_client.moves == 1
            await carol.say(3)
        finally:
            cluster.undrain("edge-0")
        await until(lambda: carol.order("carol") == list(range(6)), 20.0, "her own messages")
        await carol.stop()
