"""What this user's devices share, as this device knows it: read positions, pins, mutes, deletions, friends; and who writes.

    STATE        of the version that follows ours: taken; of a later one: something was missed, Sync with want_state
    SYNCED.state of a version above ours: taken, as what holds now. Below the one that its Sync named: the platform was set
                 back, and this is the beginning of all that it holds; what this device knew besides is forgotten
    quiet        a Sync is wished for until a page brings us to every version that we heard of, or until no STATE came
                 between its Sync and its page: then that page is right, whatever was heard before
    read()       noted durably, then READ until the platform has answered it; later positions of a conversation take the
                 place of earlier ones that were not sent yet

A version is of one user; each change raises it by one or more and names the version it follows. Read positions only rise, so
whichever of two is heard first, the greater one stands.

Memory: some words per conversation that was ever read, pinned or muted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from plato.client.api import (
    ConversationChanged,
    Friend,
    FriendChanged,
    FriendStatus,
    MessageChanged,
    Overflowed,
    ReadBy,
    Typing,
)
from plato.client.core import wire
from plato.client.core.model import Effects, Shared
from plato.client.core.outbox import TOLD_MAX_MS
from plato.client.core.repeats import Chance, Timing
from plato.core.codes import Action, action
from plato.wire.v1 import client_pb2 as pb

READS: Final = 8
"""READ frames on their way at a time."""
READ_EVERY_MS: Final = 200
"""A conversation's next position is sent so long after the last one was: who scrolls reads many."""
TYPING_EVERY_MS: Final = 3_000
"""Who goes on writing says so again after so long."""
TYPED: Final = 100
ASKED: Final = 8
_VERSION: Final = "state_version"


@dataclass(slots=True)
class _Read:
    """One conversation's position that the platform has not answered. ref 0: not sent on this connection."""

    ref: int
    seq: int
    due_ms: int
    times: int = 0


class SharedState:
    """All of it, of one device. `out` is the round's; the caller hands it in."""

    def __init__(self, version: int, shared: Iterable[Shared], timing: Timing, chance: Chance) -> None:
        self.version = version
        self.wanted = True
        """The next Sync is to bring what is newer than `version`."""
        self._known = {s.conversation_id: s for s in shared}
        self._timing = timing
        self._chance = chance
        self._reads = {s.conversation_id: _Read(0, 0, 0) for s in self._known.values() if s.wanted_seq > s.read_seq}
        self._dirty: dict[str, None] = {}  # to be written
        self._told_version = version
        self._heard = 0  # STATEs, how many came
        self._newest = 0  # the greatest version of a STATE; 0: no page can be older than what was heard
        self._floor = 0  # the version that the last answered Sync named: older STATEs are not on their way any more
        self._asked: dict[
            int, tuple[int, int]
        ] = {}  # Syncs that wanted the state, by ref → (the version named, _heard)
        self._typed: dict[str, int] = {}  # conversation → when this device said that its user writes

    def of(self, conversation_id: str) -> Shared:
        """What is shared of a conversation."""
        return self._known.get(conversation_id) or Shared(conversation_id)

    # ── down ─────────────────────────────────────────────────────────────────────────────────────────────

    def stated(self, state: pb.StateMsg, out: Effects) -> bool:
        """A STATE came. False: changes are missing before it, or the platform was set back; nothing was taken."""
        self._heard += 1
        self._newest = max(self._newest, min(state.version, wire.MAX_SEQ))
        if state.prev_version == self.version < state.version:
            self._take(state, out)
        elif not self._floor <= state.version <= self.version:
            self.wanted = True
            return False
        return True

    def ask(self, ref: int) -> int | None:
        """A Sync of this ref is made: the version it names, None where it does not want the state."""
        if not self.wanted:
            return None
        self._asked[ref] = self.version, self._heard
        while len(self._asked) > ASKED:
            del self._asked[next(iter(self._asked))]
        return self.version

    def synced(self, page: pb.SyncedMsg, out: Effects) -> None:
        """The page of a Sync. If it wanted the state, the wish ends, unless there is more of it or newer was heard of."""
        if page.ref not in self._asked:
            self.wanted = self.wanted or page.HasField("state")  # of a Sync that was forgotten: another one tells
            return
        named, heard = self._asked.pop(page.ref)
        quiet = heard == self._heard
        if quiet:
            self._newest = 0
        back = page.HasField("state") and page.state.version < named
        newer = min(page.state.version, wire.MAX_SEQ) > self.version
        self._floor = 0 if back else named
        if back:
            self._forget(out)
        if back or newer:
            self._take(page.state, out)
        more = page.state.more and (
            back or page.state.version > named
        )  # also where a STATE brought us as far as this page
        self.wanted = self._newest > self.version or more or (back and not quiet)

    def _forget(self, out: Effects) -> None:
        """The platform was set back: what is shared begins anew, by this page. What this device has yet to tell stays."""
        self._asked.clear()
        self._newest = 0
        for known in self._known.values():
            known.read_seq = known.peer_read_seq = known.pinned_at_ms = known.muted_until_ms = known.cleared_seq = 0
            self._changed(known, out)
        out.writes.forget_shared()
        out.notices.append(Overflowed())

    def _take(self, state: pb.StateMsg, out: Effects) -> None:
        self.version = min(state.version, wire.MAX_SEQ)
        for told in state.conversations:
            known = self._get(told.conversation_id)
            before = replace(known)
            known.read_seq = max(known.read_seq, min(told.read_seq, wire.MAX_SEQ))
            known.peer_read_seq = max(known.peer_read_seq, min(told.peer_read_seq, wire.MAX_SEQ))
            known.pinned_at_ms = min(told.pinned_at_ms, wire.MAX_SEQ)
            known.muted_until_ms = min(told.muted_until_ms, wire.MAX_SEQ)
            known.cleared_seq = min(told.cleared_seq, wire.MAX_SEQ)
            self._settle(known)
            if known != before:
                self._changed(known, out)
        for message in state.hidden:
            if 0 < message.seq <= wire.MAX_SEQ:
                out.writes.hidden[message.conversation_id, message.seq] = None
                out.notices.append(MessageChanged(message.conversation_id, message.seq))
        for told_friend in state.friends:
            friend = _friend(told_friend)
            out.writes.friends[friend.user] = friend
            out.notices.append(FriendChanged(friend))

    def read_by(self, told: pb.ReadMsg, mine: str | None, dialogue: bool, out: Effects) -> None:
        """Somebody has read. dialogue: then it is the other side."""
        seq = min(told.seq, wire.MAX_SEQ)
        if dialogue and told.user != mine:
            known = self._get(told.conversation_id)
            if seq > known.peer_read_seq:
                known.peer_read_seq = seq
                self._changed(known, out)
        out.notices.append(ReadBy(told.conversation_id, told.user, seq))

    def typing(self, told: pb.TypingMsg, out: Effects) -> None:
        """Somebody writes."""
        out.notices.append(Typing(told.conversation_id, told.user, told.stopped))

    # ── up ───────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, conversation_id: str, seq: int, out: Effects) -> bool:
        """This user has read up to here, on this device. False: that was known."""
        if seq <= self.of(conversation_id).position:
            return False
        known = self._get(conversation_id)
        known.wanted_seq = seq
        self._changed(known, out)
        self._reads.setdefault(conversation_id, _Read(0, 0, 0))
        return True

    def write(self, conversation_id: str, stopped: bool, now_ms: int, out: Effects) -> None:
        """This user writes, or stopped to; told at once, or not at all."""
        last_ms = self._typed.pop(conversation_id, None)
        if stopped and last_ms is None:
            return
        if not stopped:
            again = last_ms is None or now_ms >= last_ms + TYPING_EVERY_MS
            if len(self._typed) >= TYPED:
                self._typed.clear()
            self._typed[conversation_id] = now_ms if again or last_ms is None else last_ms
            if not again:
                return
        out.frames.append(wire.typing(conversation_id, stopped))

    def flush(self, live: bool, next_ref: int, now_ms: int, out: Effects) -> int:
        """The end of a round: positions to send (again), what is to be written. Returns how many refs it took."""
        taken = 0
        if live:
            flying = sum(read.ref != 0 for read in self._reads.values())
            for conversation_id, read in list(self._reads.items()):
                if read.due_ms > now_ms or (not read.ref and flying >= READS):
                    continue
                if read.ref:
                    read.times += 1
                else:
                    flying += 1
                read.ref, read.seq = next_ref + taken, self._known[conversation_id].wanted_seq
                taken += 1
                read.due_ms = now_ms + self._timing.backoff_ms(read.times, self._chance)
                out.frames.append(wire.read(read.ref, conversation_id, read.seq))
        for conversation_id in self._dirty:
            out.writes.shared[conversation_id] = replace(self._known[conversation_id])
        self._dirty.clear()
        if self._told_version != self.version:
            self._told_version = self.version
            out.writes.meta[_VERSION] = str(self.version)
        return taken

    def answered(self, ack: pb.ACKMsg, now_ms: int, out: Effects) -> None:
        """An ACK to a READ. expected: the position that stands."""
        found = next(((c, r) for c, r in self._reads.items() if r.ref and r.ref == ack.ref), None)
        if found is None:
            return
        conversation_id, read = found
        known = self._known[conversation_id]
        act = action(ack.Code)
        if act is Action.RETRY:
            read.ref = 0
            wait_ms = ack.retry_ms or self._timing.later_ms(read.times, self._chance)
            read.due_ms = now_ms + min(wait_ms, TOLD_MAX_MS)
            read.times += 1
        elif act is Action.STOP:  # no member any more, or never: nobody will know
            del self._reads[conversation_id]
            known.wanted_seq = 0
            self._changed(known, out)
        elif act is Action.NONE and ack.Code == 0:
            known.read_seq = max(known.read_seq, min(ack.expected, wire.MAX_SEQ))
            if known.wanted_seq <= read.seq:  # else more was read meanwhile
                known.wanted_seq = 0
                del self._reads[conversation_id]
            else:
                read.ref, read.times, read.due_ms = 0, 0, now_ms + READ_EVERY_MS
            self._changed(known, out)

    def end(self) -> None:
        """The connection is gone: what is unanswered goes out on the next one."""
        for read in self._reads.values():
            read.ref = read.due_ms = read.times = 0
        self._typed.clear()

    def deadline_ms(self) -> int | None:
        """When `flush` has something to send next, as far as time decides it."""
        if not self._reads:
            return None
        flying = [read.due_ms for read in self._reads.values() if read.ref]
        waiting = [read.due_ms for read in self._reads.values() if not read.ref]
        return min(flying if len(flying) >= READS else flying + waiting)

    def _settle(self, known: Shared) -> None:
        """The platform holds what this device wanted: by another device, or by a READ whose answer was lost."""
        if known.wanted_seq and known.wanted_seq <= known.read_seq:
            known.wanted_seq = 0
            self._reads.pop(known.conversation_id, None)

    def _get(self, conversation_id: str) -> Shared:
        known = self._known.get(conversation_id)
        if known is None:
            known = self._known[conversation_id] = Shared(conversation_id)
        return known

    def _changed(self, known: Shared, out: Effects) -> None:
        self._dirty[known.conversation_id] = None
        out.notices.append(ConversationChanged(known.conversation_id))


def _friend(told: pb.FriendState) -> Friend:
    try:
        status = FriendStatus(told.status)
    except ValueError:  # of a newer platform
        status = FriendStatus.NONE
    return Friend(told.user, status, told.words)
