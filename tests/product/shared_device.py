"""A device that keeps what its user's devices share, by docs/protocol.md alone: raw frames, no client library.

It stays connected (logs in again whenever its socket ends), acknowledges pushes, syncs with want_state where versions or
push numbers jump, and repeats a READ until it is answered. `state` is what it would show.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any, Final

from plato.core.codes import Action, Code, action
from plato.local.cluster import LocalCluster
from plato.wire.v1 import client_pb2 as wire

from tests.faults.raw import Raw

REPEAT_S: Final = 0.3
AGAIN_S: Final = 0.2
SILENT_S: Final = 2.5


class Device:
    """Use as `async with Device(cluster, user, device_id) as device:`."""

    def __init__(self, cluster: LocalCluster, user: str, device_id: int) -> None:
        self._cluster = cluster
        self.user = user
        self.device_id = device_id
        self.version = 0
        self.told = 0
        """The greatest version that a STATE named: one that comes while a Sync is under way may be newer than its page."""
        self.state: dict[str, wire.ConversationState] = {}
        self.hidden: set[tuple[str, int]] = set()
        self.heard: list[wire.ReadMsg] = []
        """READs of others."""
        self.typing: list[wire.TypingMsg] = []
        self.syncs = 0
        """Syncs that were asked because something was missing."""
        self.kicked = 0
        """The code of the KICK that ended the session; it stays away then."""
        self.raw: Raw | None = None
        self.live = asyncio.Event()
        self._refs = itertools.count(1)
        self._answers: dict[int, asyncio.Future[wire.ACKMsg]] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Device:
        self._task = asyncio.create_task(self._run())
        async with asyncio.timeout(30):
            await self.live.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """The network is gone."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.live.clear()

    def come_back(self) -> None:
        """… and back."""
        self._task = asyncio.create_task(self._run())

    def shown(self) -> dict[str, Any]:
        """What the user sees of it."""
        return {
            c: (s.read_seq, s.peer_read_seq, s.cleared_seq, bool(s.pinned_at_ms), s.muted_until_ms)
            for c, s in self.state.items()
        } | {"hidden": frozenset(self.hidden), "version": self.version}

    async def read(self, conversation_id: str, seq: int, within_s: float = 60.0) -> wire.ACKMsg:
        """READ, repeated until its answer is final."""
        ref = next(self._refs)
        async with asyncio.timeout(within_s):
            while True:
                answer = self._answers[ref] = asyncio.get_running_loop().create_future()
                with contextlib.suppress(OSError):
                    if self.raw is not None and self.live.is_set():
                        self.raw.post(wire.READ, wire.ReadMsg(ref=ref, conversation_id=conversation_id, seq=seq))
                done, _ = await asyncio.wait([answer], timeout=REPEAT_S)
                if done:
                    ack: wire.ACKMsg = answer.result()
                    if action(ack.Code) is not Action.RETRY and ack.Code != Code.PENDING:
                        del self._answers[ref]
                        return ack

    async def type(self, conversation_id: str) -> None:
        """TYPING."""
        assert self.raw is not None
        await self.raw.send(wire.TYPING, wire.TypingMsg(conversation_id=conversation_id))

    async def _run(self) -> None:
        token = self._cluster.token(self.user)
        while not self.kicked:
            with contextlib.suppress(OSError, EOFError, TimeoutError, AssertionError):
                host, _, port = self._cluster.gateways[self.device_id % len(self._cluster.gateways)].rpartition(":")
                async with await Raw.open(host, int(port)) as raw:
                    ack = await raw.login(token, self.device_id)
                    assert ack.Code == 0, ack
                    self.raw = raw
                    await self._live(raw)
            self.raw = None
            self.live.clear()
            await asyncio.sleep(AGAIN_S)

    async def _live(self, raw: Raw) -> None:
        newest = (0, 0)
        heard: set[tuple[int, int]] = set()
        asked = await self._sync(raw)
        while True:
            try:
                cmd = await raw.receive(SILENT_S / 2)
            except TimeoutError:
                await raw.send(wire.HEARTBEAT, wire.HeartbeatMsg())
                cmd = await raw.receive(SILENT_S)
            if cmd is None:
                return
            if cmd.push_no:
                jump = (cmd.run, cmd.push_no) > (newest[0], newest[1] + 1) and newest != (0, 0)
                newest = max(newest, (cmd.run, cmd.push_no))
                await raw.send(wire.ACK, wire.ACKMsg(Type=wire.PUSH, run=newest[0], push_no=newest[1]))
                if jump and not asked:
                    asked = await self._sync(raw)
            if cmd.Type == wire.ACK:
                ack = wire.ACKMsg.FromString(cmd.Payload)
                if ack.Type == wire.SYNC and ack.Code == 0:
                    newest = (ack.run, ack.push_no)
                elif ack.Type == wire.SYNC and ack.Code != Code.PENDING:
                    return  # log in again
                elif ack.Type == wire.READ and ack.ref in self._answers and not self._answers[ack.ref].done():
                    self._answers[ack.ref].set_result(ack)
                elif ack.Type == wire.HEARTBEAT and (ack.run, ack.push_no) > newest and not asked:
                    newest = (ack.run, ack.push_no)
                    asked = await self._sync(raw)
            elif cmd.Type == wire.SYNCED:
                page = wire.SyncedMsg.FromString(cmd.Payload)
                if page.code:
                    await asyncio.sleep(AGAIN_S)
                    asked = await self._sync(raw)
                    continue
                asked = False
                self._take(page.state)
                if page.state.more or self.version < self.told:
                    asked = await self._sync(raw)
                else:
                    self.live.set()
            elif cmd.Type == wire.STATE:
                state = wire.StateMsg.FromString(cmd.Payload)
                self.told = max(self.told, state.version)
                if state.version > self.version and not asked:
                    if state.prev_version == self.version:
                        self._take(state)
                    else:
                        self.syncs += 1
                        asked = await self._sync(raw)
            elif cmd.Type in (wire.READ, wire.TYPING) and cmd.push_no and (cmd.run, cmd.push_no) in heard:
                continue  # repeated: its ACK came late
            elif cmd.Type == wire.READ:
                heard.add((cmd.run, cmd.push_no))
                self.heard.append(wire.ReadMsg.FromString(cmd.Payload))
            elif cmd.Type == wire.TYPING:
                heard.add((cmd.run, cmd.push_no))
                self.typing.append(wire.TypingMsg.FromString(cmd.Payload))
            elif cmd.Type == wire.NOTIFY and not wire.NotifyMsg.FromString(cmd.Payload).newest and not asked:
                asked = await self._sync(raw)
            elif cmd.Type == wire.KICK:
                self.kicked = wire.KickMsg.FromString(cmd.Payload).code

    async def _sync(self, raw: Raw) -> bool:
        sync = wire.SyncMsg(ref=next(self._refs), want_state=True, state_version=self.version)
        await raw.send(wire.SYNC, sync)
        return True

    def _take(self, state: wire.StateMsg) -> None:
        for entry in state.conversations:
            self.state[entry.conversation_id] = entry
        self.hidden |= {(h.conversation_id, h.seq) for h in state.hidden}
        self.version = state.version
