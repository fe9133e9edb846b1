"""The client's machine and store against a platform in memory, on a network that loses, repeats, delays and cuts.

A history is a list of steps; whatever they were, once the faults stop everything settles: each outbox is empty, each store
holds the conversations as the platform does, and the application was shown every row once and in order.
"""

from __future__ import annotations

import random
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plato.client import MsgType, Phase, Role
from plato.client.content import Operation, is_operation
from plato.client.core.model import Effects, Row, Writes
from plato.client.core.session import Machine
from plato.client.store import Store
from plato.core.codes import Code
from plato.core.conversations import dialogue_id, group_id
from plato.fakes.platform import REFUSED_BODY, Platform
from plato.fakes.platform_product import Conversation
from plato.wire.v1 import client_pb2 as pb

FAST = Path("/dev/shm")


class Net:
    """One connection's two queues."""

    def __init__(self, conn_id: int, link_no: int) -> None:
        self.conn_id = conn_id
        self.link_no = link_no
        self.up: deque[bytes] = deque()
        self.down: deque[bytes | None] = deque()


class Device:
    """A client without an edge: the test is its loop, its disk, its network and its application."""

    def __init__(self, world: World, user: str, device_id: int, path: Path) -> None:
        self.world = world
        self.user = user
        self.path = path
        self.device_id = device_id
        self.shown: list[Row] = []
        self.sent: list[tuple[str, bytes]] = []  # (conversation, client_msg_id) in order, once durable
        self.refused: set[bytes] = set()
        self.settled: set[bytes] = set()
        self.net: Net | None = None
        self.second: Net | None = None
        """To another gateway, after a Redirect."""
        self.start()

    def start(self) -> None:
        self.store = Store(self.path, self.device_id)
        self.taken = self.store.delivered()
        self.machine = Machine(
            self.store.load(), gateways=["here"], listing=False, chance=self.world.chance.random, platform="model"
        )
        self.machine.named(self.user)
        self.net = self.second = None
        self.machine.start(self.world.now_ms)
        self.round()

    def rows(self, conversation_id: str) -> list[Row]:
        """All that the store holds of a conversation, hidden or not, by seq."""
        thread = self.machine.thread(conversation_id)
        found = [self.store.at(conversation_id, seq) for seq in range(1, thread.cursor + 1 if thread else 0)]
        return [one[0] for one in found if one is not None]

    def round(self, crash: str = "") -> None:
        """Takes the effects and acts, as the edge does; a crash comes before or after they are durable."""
        effects = self.machine.take(self.world.now_ms)
        if crash == "before":
            self.crash()
            return
        if effects.writes:
            self.store.apply(effects.writes)
        for entry in effects.writes.queued.values():
            self.sent.append((entry.conversation_id, entry.client_msg_id))
        for entry, _, _ in effects.writes.refused:
            self.refused.add(entry.client_msg_id)
        for entry in effects.writes.unqueued:
            assert entry.client_msg_id not in self.settled
            self.settled.add(entry.client_msg_id)
        if crash == "after":
            self.crash()
            return
        self.release(effects)

    def release(self, effects: Effects) -> None:
        if effects.go_over:
            self.cut(tell=False)
            self.net, self.second = self.second, None
        if self.net is not None and effects.frames and effects.link_no == self.net.link_no:
            self.net.up += effects.frames
        if effects.close:
            self.cut(tell=False)
        if effects.connects:
            self.cut(tell=False)
            link_no, _ = effects.connects[0]
            self.net = Net(self.world.platform.open(), link_no)
            assert self.machine.opened(link_no, self.world.now_ms)
            self.round()
        if effects.second_close:
            self.cut_second(tell=False)
        if effects.second is not None:
            self.cut_second(tell=False)
            link_no, _ = effects.second
            self.second = Net(self.world.platform.open(), link_no)
            assert self.machine.opened(link_no, self.world.now_ms)
            self.round()
        elif effects.second_frames and self.second is not None:
            self.second.up += effects.second_frames
        if effects.want_token:
            self.machine.tokened(self.user, self.world.now_ms)
            self.round()

    def crash(self) -> None:
        self.cut(tell=False)
        self.cut_second(tell=False)
        self.store.close()
        self.start()

    def cut(self, tell: bool = True) -> None:
        if self.net is None:
            return
        net, self.net = self.net, None
        self.world.platform.close(net.conn_id)
        if tell:
            self.machine.closed(net.link_no, self.world.now_ms)
            self.round()

    def cut_second(self, tell: bool = True) -> None:
        if self.second is None:
            return
        net, self.second = self.second, None
        self.world.platform.close(net.conn_id)
        if tell:
            self.machine.closed(net.link_no, self.world.now_ms)
            self.round()

    def arrive_second(self, crash: str = "") -> None:
        """The next frame on the second connection."""
        net = self.second
        if net is None or not net.down:
            return
        payload = net.down.popleft()
        if payload is None:
            self.cut_second()
        else:
            self.machine.frames(net.link_no, [payload], self.world.now_ms)
            self.round(crash)

    def arrive(self, crash: str = "") -> None:
        """The next frame from the platform."""
        if self.net is None or not self.net.down:
            return
        payload = self.net.down.popleft()
        if payload is None:
            self.cut()
        else:
            self.machine.frames(self.net.link_no, [payload], self.world.now_ms)
            self.round(crash)

    def show(self, crash: bool = False) -> None:
        """The application takes what is there, a few at a time."""
        for number, row, _ in self.store.after(self.taken, 3):
            self.shown.append(row)
            self.taken = number
        self.store.apply(Writes(delivered=self.taken))
        if crash:
            self.crash()


class World:
    """A platform, some devices, a clock."""

    def __init__(self, folder: Path, seed: int, page_rows: int = 100, page_conversations: int = 100) -> None:
        self.now_ms = 1_000
        self.chance = random.Random(seed)
        self.platform = Platform(page_rows=page_rows, page_conversations=page_conversations)
        self.count = 0
        self.devices = [
            Device(self, user, 10 + n, folder / f"{n}.db") for n, user in enumerate(("alice", "alice", "bob", "carol"))
        ]

    def close(self) -> None:
        for device in self.devices:
            device.store.close()

    def send(self, n: int, to: str, body: bytes | None = None, crash: str = "") -> None:
        device = self.devices[n]
        if device.user == to or device.machine.state.phase is Phase.STOPPED:
            return
        self.count += 1
        conversation_id = dialogue_id(device.user, to)
        key = self.count.to_bytes(16, "big")
        device.machine.send(conversation_id, key, to, 0, body or b"%d" % self.count)
        device.round(crash)

    def group(self, n: int) -> None:
        """One more group, of everybody or of two."""
        device = self.devices[n]
        if device.machine.state.phase is Phase.STOPPED:
            return
        self.count += 1
        key = self.count.to_bytes(16, "big")
        others = tuple(self.chance.sample(["alice", "bob", "carol"], self.chance.randint(1, 3)))
        body = Operation(MsgType.GROUP_CREATE, title=f"group {self.count}", users=others).encode()
        device.machine.send(group_id(device.user, key), key, "", MsgType.GROUP_CREATE, body)
        device.round()

    def operate(self, n: int, what: str, crash: str = "") -> None:
        """An operation on something that this device knows, allowed or not."""
        device = self.devices[n]
        known = [t for t in device.machine.threads() if t.cursor > 0 or t.conversation_id.startswith("g:")]
        if device.machine.state.phase is Phase.STOPPED or not known:
            return
        conversation_id = self.chance.choice(known).conversation_id
        users = (self.chance.choice(["alice", "bob", "carol"]),)
        rows = device.rows(conversation_id)
        row = self.chance.choice(rows) if rows else None
        self.count += 1
        operation: Operation | None = None
        match what:
            case "say" if conversation_id.startswith("g:"):
                device.machine.send(
                    conversation_id, self.count.to_bytes(16, "big"), "", 0, b"%d to the group" % self.count
                )
            case "recall" if row is not None:
                operation = Operation(MsgType.RECALL, msg_id=row.msg_id)
            case "edit" if row is not None:
                operation = Operation(MsgType.EDIT, msg_id=row.msg_id, body=b"edited by %d" % self.count)
            case "add":
                operation = Operation(MsgType.GROUP_ADD, users=users)
            case "remove":
                operation = Operation(MsgType.GROUP_REMOVE, users=users)
            case "leave":
                operation = Operation(MsgType.GROUP_LEAVE)
            case "rename":
                operation = Operation(MsgType.GROUP_RENAME, title=f"title {self.count}")
            case "role":
                operation = Operation(MsgType.GROUP_ROLE, users=users, role=self.chance.choice(list(Role)))
            case "read":
                device.machine.read(conversation_id, self.chance.randint(1, 20))
            case "typing":
                device.machine.typing(conversation_id, self.chance.random() < 0.5, self.now_ms)
        if operation is not None:
            key = self.count.to_bytes(16, "big")
            device.machine.send(conversation_id, key, "", operation.kind, operation.encode())
        device.round(crash)

    def arrange(self, n: int, what: str) -> None:
        """A change of what a user's devices share that is made elsewhere, over HTTP."""
        user = self.devices[n].user
        mine = [i for i, c in self.platform.conversations.items() if c.range_of(user)]
        if not mine:
            return
        self.count += 1
        conversation_id = self.chance.choice(sorted(mine))
        state, last = self.platform.user(user), self.platform.conversations[conversation_id].last_seq
        match what:
            case "pin":
                told = state.change(conversation_id, pinned_at_ms=self.count)
            case "clear":
                told = state.change(conversation_id, cleared_seq=self.chance.randint(0, last))
            case "hide":
                told = state.hide(conversation_id, self.chance.randint(1, max(1, last)))
            case _:
                told = state.befriend(pb.FriendState(user="dora", status=pb.FriendState.FRIENDS, words=what))
        self.platform.tell_state(user, told)
        self.carry()

    def carry(self) -> None:
        """What the platform sent reaches the connections' queues."""
        nets = {net.conn_id: net for d in self.devices for net in (d.net, d.second) if net is not None}
        for conn_id, payload in self.platform.out:
            if conn_id in nets:
                nets[conn_id].down.append(payload)
        self.platform.out.clear()

    def deliver_up(self, n: int) -> None:
        net = self.devices[n].net
        if net is not None and net.up:
            self.platform.frame(net.conn_id, net.up.popleft())
            self.carry()

    def deliver_up_second(self, n: int) -> None:
        net = self.devices[n].second
        if net is not None and net.up:
            self.platform.frame(net.conn_id, net.up.popleft())
            self.carry()

    def tick(self, n: int) -> None:
        device = self.devices[n]
        due = device.machine.deadline_ms()
        if due is not None:
            self.now_ms = max(self.now_ms, due)
            device.machine.tick(self.now_ms)
            device.round()

    def settle(self) -> None:
        """The faults stop: everything flows until nothing moves any more."""
        self.platform.msg_away = self.platform.busy = self.platform.pending_only = False
        self.platform.answer_late()
        self.platform.run_msg()
        self.carry()
        for _ in range(400):
            busy = True
            while busy:
                busy = False
                for n, device in enumerate(self.devices):
                    while device.net is not None and device.net.up:
                        self.deliver_up(n)
                        busy = True
                    while device.net is not None and device.net.down:
                        device.arrive()
                        busy = True
                    while device.second is not None and (device.second.up or device.second.down):
                        self.deliver_up_second(n)
                        device.arrive_second()
                        busy = True
            if self.done():
                return
            for n in range(len(self.devices)):
                self.tick(n)
        raise AssertionError(f"not settled: {[(d.machine.state, d.machine.threads()) for d in self.devices]}")

    def done(self) -> bool:
        for device in self.devices:
            if device.machine.state.phase is not Phase.ONLINE or device.machine.deadline_ms() is None:
                return False
            shared = device.machine.shared
            if shared.version != self.platform.user(device.user).version or shared.deadline_ms() is not None:
                return False
            for conversation_id, conversation in self.platform.conversations.items():
                thread = device.machine.thread(conversation_id)
                allowed = conversation.range_of(device.user) or (0, 0)
                if allowed[1] and (thread is None or thread.cursor < allowed[1]):
                    return False
                if device.machine.unsettled(conversation_id):
                    return False
            if any(device.machine.unsettled(t.conversation_id) for t in device.machine.threads()):
                return False
        return True

    def check(self) -> None:
        """The invariants 2, 3 and 5, as a client sees them."""
        for device in self.devices:
            while device.store.after(device.taken, 1):
                device.show()
            for conversation_id, conversation in self.platform.conversations.items():
                allowed = conversation.range_of(device.user)
                stored = device.rows(conversation_id)
                if allowed is None:
                    assert stored == []
                    continue
                # Who was in before may hold what they saw then; their other devices may not. Who left hears of no later
                # operation, yet pulls rows as they are now.
                later = {r.seq for r in conversation.rows if r.changed_seq > allowed[1]}
                want = [_seen(r) for r in conversation.rows if allowed[0] < r.seq <= allowed[1]]
                have = [_held(r) for r in stored if allowed[0] < r.seq <= allowed[1]]
                assert [w[:2] for w in want] == [h[:2] for h in have]
                assert [w for w in want if w[0] not in later] == [h for h in have if h[0] not in later]
                shown = [r for r in device.shown if r.conversation_id == conversation_id]
                assert [r.seq for r in shown] == [r.seq for r in stored]
                self.check_group(device, conversation_id, conversation)
            self.check_shared(device)
            assert not device.store._load().outbox
            # Each sent message has one row, in the order of sending; the refused ones have none.
            for conversation_id in {c for c, _ in device.sent}:
                sent = [key for c, key in device.sent if c == conversation_id and key not in device.refused]
                mine = set(sent)
                rows = self.platform.conversations[conversation_id].rows
                assert [r.client_msg_id for r in rows if r.client_msg_id in mine] == sent

    def check_group(self, device: Device, conversation_id: str, conversation: Conversation) -> None:
        """Title, who left, and, for who saw all of it, who is in and what they are."""
        if not conversation_id.startswith("g:") or not conversation.last_seq:
            return
        thread = device.machine.thread(conversation_id)
        assert thread is not None
        assert thread.left is (device.user not in conversation.members)
        if not thread.left:
            assert thread.title == conversation.title
            if conversation.joined[device.user] == 0:
                roles = {user: conversation.roles.get(user, 0) for user in conversation.members}
                assert device.store.members(conversation_id) == roles

    def check_shared(self, device: Device) -> None:
        """What the user's devices share, in memory and on the disk, and what follows from it."""
        state = self.platform.user(device.user)
        kept = {s.conversation_id: s for s in device.store._load().shared}
        assert device.store._load().state_version == state.version
        for conversation_id, (_, told) in state.conversations.items():
            mine = device.machine.shared.of(conversation_id)
            assert mine == kept[conversation_id]
            assert mine.wanted_seq == 0
            for name in ("read_seq", "pinned_at_ms", "muted_until_ms", "peer_read_seq", "cleared_seq"):
                assert getattr(mine, name) == getattr(told, name), name
        assert {f.user: f.words for f in device.store.friends()} == {u: f.words for u, (_, f) in state.friends.items()}
        hidden = set()
        for _, row, gone in device.store.after(0, 100_000):
            place = row.conversation_id, row.seq
            assert gone is (place in state.hidden or row.seq <= state.of(row.conversation_id).cleared_seq)
            if gone:
                hidden.add(place)
        for conversation_id in self.platform.conversations:
            read_seq = device.machine.shared.of(conversation_id).position
            unread = [
                row
                for row in device.rows(conversation_id)
                if row.seq > read_seq and row.from_user != device.user and not is_operation(row.msg_type)
                if not row.recalled and (conversation_id, row.seq) not in hidden
            ]
            assert device.store.unread(conversation_id, device.user, read_seq) == len(unread)


def _seen(row: pb.PushMsg) -> tuple[object, ...]:
    return row.seq, row.MsgID, row.Content, row.from_user, row.msg_type, row.changed_seq, row.recalled


def _held(row: Row) -> tuple[object, ...]:
    return row.seq, row.msg_id, row.body, row.from_user, row.msg_type, row.changed_seq, row.recalled


OPERATIONS = ["say", "say", "recall", "edit", "add", "remove", "leave", "rename", "role", "read", "typing"]
ARRANGED = ["pin", "clear", "hide", "friend"]
N = st.integers(0, 3)
STEPS = st.one_of(
    st.tuples(
        st.just("send"), N, st.sampled_from(["alice", "bob", "carol"]), st.sampled_from(["", "", "", "before", "after"])
    ),
    st.tuples(st.just("group"), N),
    st.tuples(st.just("operate"), N, st.sampled_from(OPERATIONS), st.sampled_from(["", "", "", "before", "after"])),
    st.tuples(st.just("arrange"), N, st.sampled_from(ARRANGED)),
    st.tuples(st.just("refused"), N, st.sampled_from(["alice", "bob"])),
    st.tuples(st.sampled_from(["up", "up", "up", "drop_up"]), N),
    st.tuples(st.sampled_from(["down", "down", "down", "drop_down", "double_down", "swap_down"]), N),
    st.tuples(st.just("down_crash"), N, st.sampled_from(["before", "after"])),
    st.tuples(st.sampled_from(["up2", "up2", "down2", "down2", "drop_up2", "drop_down2", "cut2", "flow2"]), N),
    st.tuples(st.just("down2_crash"), N, st.sampled_from(["before", "after"])),
    st.tuples(st.sampled_from(["redirect"])),
    st.tuples(st.sampled_from(["tick", "cut", "show", "show_crash", "crash", "flow", "flow"]), N),
    st.tuples(st.sampled_from(["restart", "repeat", "busy", "pending", "late", "msg_away", "msg", "sessions", "hole"])),
)


def step(world: World, what: tuple[str, ...]) -> None:
    name, *rest = what
    platform = world.platform
    n = int(rest[0]) if rest else 0
    device = world.devices[n]
    net = device.net
    match name:
        case "send":
            world.send(n, rest[1], crash=rest[2])
        case "group":
            world.group(n)
        case "operate":
            world.operate(n, rest[1], rest[2])
        case "arrange":
            world.arrange(n, rest[1])
        case "refused":
            world.send(n, rest[1], REFUSED_BODY)
        case "up":
            world.deliver_up(n)
        case "drop_up" if net is not None and net.up:
            net.up.popleft()
        case "down":
            device.arrive()
        case "down_crash":
            device.arrive(crash=rest[1])
        case "drop_down" if net is not None and net.down and net.down[0] is not None:
            net.down.popleft()
        case "double_down" if net is not None and net.down and net.down[0] is not None:
            net.down.appendleft(net.down[0])
        case "swap_down" if net is not None and len(net.down) > 1 and None not in net.down:
            # A late frame: hops are first-in first-out, but a receipt may overtake, and a repeat comes late.
            net.down.rotate(1)
        case "up2":
            world.deliver_up_second(n)
        case "down2":
            device.arrive_second()
        case "down2_crash":
            device.arrive_second(crash=rest[1])
        case "drop_up2" if device.second is not None and device.second.up:
            device.second.up.popleft()
        case "drop_down2" if device.second is not None and device.second.down and device.second.down[0] is not None:
            device.second.down.popleft()
        case "cut2":
            device.cut_second()
        case "flow2":
            for _ in range(4):
                world.deliver_up_second(n)
                device.arrive_second()
        case "redirect":
            platform.redirect([("there", 1), ("yonder", 2)])
        case "tick":
            world.tick(n)
        case "cut":
            device.cut()
        case "show":
            device.show()
        case "show_crash":
            device.show(crash=True)
        case "crash":
            device.crash()
        case "flow":
            for _ in range(4):
                world.deliver_up(n)
                device.arrive()
        case "restart":
            platform.restart_state()
        case "repeat":
            platform.repeat_newest()
        case "busy":
            platform.busy = not platform.busy
        case "pending":
            platform.pending_only = not platform.pending_only
        case "late":
            platform.answer_late()
        case "msg_away":
            platform.msg_away = True
        case "msg":
            platform.msg_away = False
            platform.run_msg()
        case "sessions":
            platform.end_sessions()
        case "hole":
            platform.skip_seqs = 5
    world.carry()


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=FAST if FAST.is_dir() else None) as name:
        yield Path(name)


@settings(max_examples=90, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEPS, max_size=60), st.integers(0, 2**32), st.sampled_from([1, 2, 3, 100]))
def test_whatever_happens_nothing_is_lost_doubled_or_swapped(
    steps: list[tuple[str, ...]], seed: int, page: int
) -> None:
    with folder() as where:
        world = World(where, seed, page_rows=page, page_conversations=page)
        try:
            for what in steps:
                step(world, what)
            world.settle()
            world.check()
        finally:
            world.close()


@pytest.mark.parametrize("seed", range(6))
def test_long_histories(seed: int) -> None:
    """Thousands of steps at random: deeper than what hypothesis finds room for."""
    chance = random.Random(seed)
    names = ["up", "down"] * 12 + ["flow"] * 12 + ["tick", "show", "drop_up", "drop_down", "double_down"]
    names += ["redirect", "redirect"] + ["flow2", "up2", "down2"] * 3 + ["drop_up2", "drop_down2", "cut2"]
    names += ["cut", "crash", "restart", "repeat", "busy", "msg_away", "msg", "msg", "show_crash", "hole"]
    with folder() as where:
        world = World(where, seed, page_rows=chance.choice([2, 5, 100]), page_conversations=2)
        try:
            for _ in range(1_500):
                n = chance.randrange(4)
                roll = chance.random()
                if roll < 0.12:
                    world.send(n, chance.choice(["alice", "bob", "carol"]))
                elif roll < 0.13:
                    world.group(n)
                elif roll < 0.2:
                    world.operate(n, chance.choice(OPERATIONS))
                elif roll < 0.21:
                    world.arrange(n, chance.choice(ARRANGED))
                else:
                    step(world, (chance.choice(names), n))  # type: ignore[arg-type]  # as the strategy's tuples
            world.settle()
            world.check()
            assert world.count > 100
            assert any(device.machine.moves for device in world.devices)
        finally:
            world.close()


def test_a_replaced_device_stays_away(tmp_path: Path) -> None:
    world = World(tmp_path, 1)
    try:
        world.settle()
        first = world.devices[2]
        twin = Device(world, "bob", first.device_id, tmp_path / "twin.db")
        world.devices.append(twin)
        for _ in range(20):
            world.deliver_up(4)
            twin.arrive()
            first.arrive()
        assert twin.machine.state.phase is Phase.ONLINE
        assert (first.machine.state.phase, first.machine.state.code) == (Phase.STOPPED, Code.REPLACED)
        assert first.machine.deadline_ms() is None
        assert world.platform.logins == 5
    finally:
        world.close()


def test_r1_a_client_never_renumbers(tmp_path: Path) -> None:
    """Expected, busy, commits, restarts: a message keeps the client_id it got, and `acked` names settled ones only."""
    world = World(tmp_path, 1)
    seen: dict[bytes, int] = {}
    try:
        world.settle()
        device = world.devices[2]
        for n in range(8):
            world.send(2, "alice")
            for payload in device.net.up if device.net else ():
                cmd = pb.MsgCmd.FromString(payload)
                if cmd.Type == pb.UP:
                    up = pb.UPMsg.FromString(cmd.Payload)
                    assert seen.setdefault(up.client_msg_id, up.Head.ClientID) == up.Head.ClientID
                    assert up.acked < up.Head.ClientID
            if n % 3 == 0 and device.net is not None:
                device.net.up.clear()  # lost: the next one is answered "expected"
            world.platform.busy = n % 4 == 1
            for _ in range(3):
                world.deliver_up(2)
                device.arrive()
            if n == 5:
                device.crash()
        world.settle()
        world.check()
        assert sorted(seen.values()) == sorted(set(seen.values()))
    finally:
        world.close()
