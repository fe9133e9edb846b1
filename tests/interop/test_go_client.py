"""A client that was written in Go after docs/protocol.md alone keeps what the page promises, on a real cluster.

Go ⇄ gateway ⇄ Python, both ways, while sockets break, frames get lost, workers and the client itself die. The history
checker then compares what both sent, what is stored and what each was shown.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from plato.core.conversations import dialogue_id
from plato.local.cluster import LocalCluster
from plato.wire.v1 import client_pb2 as pb

from tests.faults import checker, looking, relay
from tests.faults.load import Person
from tests.faults.people import person
from tests.faults.relay import Relay
from tests.faults.waiting import until
from tests.interop import go_client
from tests.interop.go_client import GoClient, Lists

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "state.heartbeat_ms": 1_000,
    "state.resume_window_ms": 30_000,
    "state.reconnect_delay_ms": 100,
    "state.repeat_min_ms": 300,
    "state.repeat_max_ms": 2_000,
}
pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(bool(go_client.missing()), reason=go_client.missing())]


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return go_client.build(tmp_path_factory.mktemp("go"))


@pytest.fixture(scope="module")
def cluster(new_cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    made = new_cluster(SETTINGS)
    yield made
    made.down()


class Talk:
    """Two who write to each other, one in Go and one in Python."""

    def __init__(self, cluster: LocalCluster, gopher: GoClient, snake: Person) -> None:
        self.cluster, self.gopher, self.snake = cluster, gopher, snake
        self.earlier: list[checker.Row] = []
        self.sent: list[checker.Sent] = []

    async def say(self, count: int, pause_s: float = 0.0) -> None:
        """Each sends so many, in turns; nobody waits for an answer."""
        for _ in range(count):
            order = len(self.sent) + 1
            await self.gopher.say(f"go {order}")
            body = f"py {order}".encode()
            ticket = await self.snake.client.send(body, to=self.gopher.user)
            conversation = dialogue_id(self.snake.user, self.gopher.user)
            self.sent.append(checker.Sent(self.snake.user, 0, conversation, ticket.client_msg_id, body, order))
            await asyncio.sleep(pause_s)

    def shown(self) -> list[checker.Row]:
        return self.earlier + self.gopher.shown()

    async def rest(self, within_s: float = 30.0) -> None:
        """Waits until everything reached both, then has the history checked."""
        total = 2 * len(self.sent)

        def quiet() -> bool:
            return (
                {r.client_msg_id for r in self.shown()} >= {s.client_msg_id for s in self.sent + self.gopher.sent()}
                and len(self.shown()) >= total
                and len(self.snake.shown) >= total
                and self.gopher.settled() == len(self.gopher.sent())
            )

        try:
            await until(quiet, within_s)
        except TimeoutError:
            pass  # the checker says what lacks
        assert [s.body.decode() for s in self.gopher.sent()] == [f"go {n + 1}" for n in range(len(self.sent))]
        conversation = frozenset({dialogue_id(self.snake.user, self.gopher.user)})
        rows = [row for row in await looking.rows(self.cluster) if row.conversation_id in conversation]
        clients = (
            checker.Client(self.gopher.user, 0, conversation, tuple(self.shown()), tuple(self.gopher.stored())),
            checker.Client(
                self.snake.user, 0, conversation, tuple(self.snake.shown), tuple(looking.stored(self.snake.store))
            ),
        )
        found = checker.check(checker.History((*self.sent, *self.gopher.sent()), tuple(rows), clients))
        assert found == [], "\n".join(map(str, found[:20]))
        assert self.gopher.settled() == len(self.gopher.sent())


async def talk(
    stack: AsyncExitStack, cluster: LocalCluster, binary: Path, folder: Path, name: str, list_url: str = ""
) -> Talk:
    """Both are online; the Go client may be at a relay."""
    users = f"{name}-go", f"{name}-py"
    snake = await stack.enter_async_context(person(cluster, users[1], folder / "py.sqlite"))
    gopher = GoClient(binary, list_url or cluster.ipconfig_url, users[0], folder / "go", cluster.token(users[0]))
    await stack.enter_async_context(await gopher.start("-to", users[1], "-listen"))
    await gopher.online()
    return Talk(cluster, gopher, snake)


def test_the_source_is_formatted_vetted_and_its_own_tests_pass() -> None:
    gofmt = shutil.which("gofmt")
    if gofmt is not None:
        run = subprocess.run([gofmt, "-l", "."], cwd=go_client.SOURCE, capture_output=True, text=True, check=False)
        assert (run.returncode, run.stdout) == (0, "")
    for command in ("vet", "test"):
        done = go_client.go(command, "./...")
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_commands_of_the_page(cluster: LocalCluster, tmp_path: Path) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "go-client.md").read_text(encoding="utf-8"), re.DOTALL)
    script = "\n".join(blocks).replace("http://127.0.0.1:8904", cluster.ipconfig_url)
    for made, here in (("-o ../../plato-go", f"-o {tmp_path}/plato-go"), ("./plato-go", f"{tmp_path}/plato-go")):
        assert made in script
        script = script.replace(made, here)
    offline = {"GOPROXY": "off", "GOTOOLCHAIN": "local", "GOFLAGS": "-buildvcs=false"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script.replace("-state plato-state", f"-state {tmp_path}/plato-state")],
        cwd=ROOT,
        env={**os.environ, **offline, "PLATO_LOCAL__DATA_DIR": str(cluster.data_dir)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    said = ["#1 alice: hello from Go", "#2 bob: hello Alice", "#3 bob: nice to read you"]
    assert [line for line in said if line not in shown] == []


async def test_both_ways(cluster: LocalCluster, binary: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        both = await talk(stack, cluster, binary, tmp_path, "both")
        await both.say(200)
        await both.rest()
        assert len(both.gopher.told("live")) == 1
        # Three heartbeats and more: it is not closed for silence, and acknowledged is what it stored.
        await asyncio.sleep(3.5)
        assert both.gopher.told("lost") == []


async def test_one_message_from_the_command_line(cluster: LocalCluster, binary: Path, tmp_path: Path) -> None:
    async with person(cluster, "line-py", tmp_path / "py.sqlite") as snake:
        gopher = GoClient(binary, cluster.ipconfig_url, "line-go", tmp_path / "go", cluster.token("line-go"))
        async with await gopher.start("-to", "line-py", "-send", "hello", "-logout"):
            assert await gopher.wait() == 0
        await until(lambda: [row.body for row in snake.shown] == [b"hello"])
        # It logged out, so the next run logs in; it knows what was said and goes on counting.
        async with await gopher.start("-to", "line-py", "-send", "again"):
            assert await gopher.wait() == 0
        await until(lambda: [row.body for row in snake.shown] == [b"hello", b"again"])
        assert [e.get("resumed", False) for e in gopher.told("live")] == [False, False]
        assert [row.seq for row in gopher.stored()] == [1, 2]


async def test_a_socket_that_breaks_is_resumed(cluster: LocalCluster, binary: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        line = await stack.enter_async_context(Relay("127.0.0.1", cluster.ports["edge-0.tcp"]))
        lists = await stack.enter_async_context(Lists(cluster, [line]))
        both = await talk(stack, cluster, binary, tmp_path, "reset", lists.url)
        for n in range(1, 6):
            talking = asyncio.create_task(both.say(40, 0.005))
            await asyncio.sleep(0.03 * n)
            line.split_bytes = n  # frames come in pieces
            line.reset()
            await talking
            await both.gopher.online(n + 1)
        await both.rest()
        live = both.gopher.told("live")
        assert [e.get("resumed", False) for e in live] == [False] + [True] * (len(live) - 1)
        assert len({e["conn_id"] for e in live}) == len(live)


async def test_a_line_that_swallows_everything_is_noticed(cluster: LocalCluster, binary: Path, tmp_path: Path) -> None:
    """No FIN, no reset: only that nothing is answered. The other relay of the list is the way out."""
    async with AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(Relay("127.0.0.1", cluster.ports[f"edge-{n}.tcp"])) for n in (0, 1)]
        lists = await stack.enter_async_context(Lists(cluster, lines))
        both = await talk(stack, cluster, binary, tmp_path, "cut", lists.url)
        await both.say(10)
        lines[0].refuse = True
        assert lines[0].cut() == 1
        await both.say(10)
        await both.gopher.online(2)
        assert both.gopher.told("live")[1]["resumed"]
        await both.rest()
        assert lines[1].live == 1


LOSSES = {
    "the UP": ("up", lambda c: c.Type == pb.UP),
    "its ACK": ("down", relay.is_ack_of(pb.UP)),
    "its RECEIPT": ("down", lambda c: c.Type == pb.RECEIPT),
    "a PUSH": ("down", lambda c: c.Type == pb.PUSH),
    "PULLED": ("down", lambda c: c.Type == pb.PULLED),
    "ACKs of pushes": ("up", relay.is_ack_of(pb.PUSH)),
    "heartbeats": ("up", lambda c: c.Type == pb.HEARTBEAT),
    "SYNCED": ("down", lambda c: c.Type == pb.SYNCED),
    "the ACK of SYNC": ("down", relay.is_ack_of(pb.SYNC)),
    "the ACK of LOGIN": ("down", relay.is_ack_of(pb.LOGIN)),
    "the ACK of RECONN": ("down", relay.is_ack_of(pb.RECONN)),
}


@pytest.mark.parametrize("what", LOSSES)
async def test_lost_frames_are_healed(cluster: LocalCluster, binary: Path, tmp_path: Path, what: str) -> None:
    """Two of a kind get lost while the socket stands, from the first frame on, and two more after a resume."""
    way, wanted = LOSSES[what]

    def lose() -> None:
        rule = relay.drop_first(2, wanted)
        line.up_rule, line.down_rule = (rule, None) if way == "up" else (None, rule)

    async with AsyncExitStack() as stack:
        line = await stack.enter_async_context(Relay("127.0.0.1", cluster.ports["edge-0.tcp"]))
        lists = await stack.enter_async_context(Lists(cluster, [line]))
        lose()
        both = await talk(stack, cluster, binary, tmp_path, f"lost{list(LOSSES).index(what)}", lists.url)
        await both.say(20, 0.01)
        await both.rest()
        lose()
        line.reset()
        await both.gopher.online(2)
        await both.say(20, 0.01)
        await both.rest()


async def test_a_worker_that_dies(cluster: LocalCluster, binary: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        both = await talk(stack, cluster, binary, tmp_path, "kill")
        for n in range(2, 5):
            talking = asyncio.create_task(both.say(30, 0.01))
            await asyncio.sleep(0.1)
            cluster.kill("worker")
            await talking
            await both.gopher.online(n)
        await both.rest()
        assert all(e["resumed"] for e in both.gopher.told("live")[1:])
    await until(cluster.ready, 30.0)


async def test_a_client_that_dies_goes_on_where_it_was(cluster: LocalCluster, binary: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of sending; the next process resumes the session and sends what was not settled."""
    async with AsyncExitStack() as stack:
        both = await talk(stack, cluster, binary, tmp_path, "dead")
        for _ in range(4):
            await both.say(30)
            await until(lambda: len(both.gopher.sent()) == len(both.sent))  # it took what it read
            both.gopher.kill()
            await both.gopher.wait()
            # What was stored but not shown when it died comes from the journal.
            await both.gopher.start("-to", both.snake.user, "-listen")
            await both.gopher.online(len(both.gopher.told("live")) + 1)
        # A user is shown what is stored; the stream of a process that dies ends somewhere before.
        both.gopher.kill()
        await both.gopher.wait()  # all that it said is read: nothing of it comes behind this
        both.gopher.events.clear()
        await both.gopher.start("-to", both.snake.user, "-listen", "-history")
        await both.gopher.online()
        assert both.gopher.told("live")[0]["resumed"]
        await both.rest()


async def test_a_redirect_is_followed_before_the_close(cluster: LocalCluster, binary: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        both = await talk(stack, cluster, binary, tmp_path, "drain")
        first = both.gopher.told("live")[0]["gateway"]
        talking = asyncio.create_task(both.say(150, 0.02))
        cluster.drain(first, pace_per_s=100, settle_s=0, deadline_s=20)
        try:
            await both.gopher.online(2)
            await talking
            await both.rest()
        finally:
            cluster.undrain(first)
        assert [e["kind"] for e in both.gopher.events if e["kind"] in ("live", "lost")] == ["live", "live"]
        assert both.gopher.told("live")[1]["gateway"] != first
        assert both.gopher.told("live")[1]["resumed"]
    await until(cluster.ready, 30.0)


async def test_a_stopped_process_catches_up(cluster: LocalCluster, binary: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        both = await talk(stack, cluster, binary, tmp_path, "froze")
        both.gopher.freeze()
        await both.say(50)
        await asyncio.sleep(4)  # longer than the platform waits for a heartbeat
        both.gopher.thaw()
        await both.rest()


async def test_codes_are_honoured(cluster: LocalCluster, binary: Path, tmp_path: Path) -> None:
    # A message is refused for good; the client says so, and its store is as before.
    gopher = GoClient(binary, cluster.ipconfig_url, "codes-go", tmp_path / "go", cluster.token("codes-go"))
    async with await gopher.start("-to", "codes\x01py", "-send", "hello"):
        assert await gopher.wait() == 1
    (outcome,) = gopher.told("settled")
    assert outcome["code"] >= 420
    # Another process with the same device and session takes over: the first one stops by itself.
    async with await gopher.start("-listen"):
        await gopher.online(len(gopher.told("live")) + 1)
        shutil.copytree(tmp_path / "go", tmp_path / "copy")
        twin = GoClient(binary, cluster.ipconfig_url, "codes-go", tmp_path / "copy", cluster.token("codes-go"))
        async with await twin.start("-listen"):
            await twin.online()
            assert await gopher.wait() == 1
            assert "402" in gopher.log[-1]
            await asyncio.sleep(1)
            assert len(twin.told("live")) == 1
    # A token that nobody knows: ipconfig refuses it, and so does the gateway; it waits longer and longer between attempts.
    stranger = GoClient(binary, cluster.ipconfig_url, "codes-who", tmp_path / "who", cluster.token("codes-who") + "x")
    async with await stranger.start("-listen"):
        await until(lambda: sum("305" in line for line in stranger.log) >= 2, 30.0)
        await asyncio.sleep(2)
        assert stranger.told("live") == []
        assert stranger.process.returncode is None
        assert len(stranger.log) < 20
