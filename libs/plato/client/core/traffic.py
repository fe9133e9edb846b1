"""What flows on a committed connection: uplinks out, rows in, gaps pulled, losses healed by Sync, pushes acknowledged.

Down: a pushed frame's number is checked (numbers.py), its row offered to the inbox; what is readable is written together
with the cursor; a gap is pulled, and holds the acknowledgement. A lost number starts a Sync, which finds the gaps. Up: the
outbox says what to send; a receipt, an own row or a refusal settles it. All of it only adds to `out`.

Memory: see inbox.py and outbox.py; `PULLS` pulls, one Sync and `HISTORIES` history requests at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from plato.client.api import ConversationChanged, MessageChanged
from plato.client.content import is_operation
from plato.client.core import groups, wire
from plato.client.core.inbox import Inbox, Thread
from plato.client.core.model import (
    Accepted,
    Effects,
    Entry,
    HistoryPage,
    Place,
    RefusedMessage,
    Row,
    Settled,
    Snapshot,
)
from plato.client.core.numbers import Arrival, PushLine
from plato.client.core.outbox import Outbox, Verdict
from plato.client.core.repeats import Chance, Request, Requests, Timing
from plato.client.core.shared import SharedState
from plato.client.core.syncwalk import SyncWalk
from plato.core.codes import Action, action, text
from plato.core.conversations import DIALOGUE_PREFIX, dialogue_id
from plato.wire.v1 import client_pb2 as pb

PULLS: Final = 2
PULL_ROWS: Final = 100
WITHIN_MAX_MS: Final = 60_000
DETAIL_CHARS: Final = 500
"""Of the words with which a message was refused so many are kept."""
HISTORIES: Final = 1
"""With one Sync these stay within the four requests that a connection may have open; a fifth is answered "busy"."""


@dataclass(frozen=True, slots=True)
class FirstSync:
    """The Sync that commits a connection: its walk, the id of its first page's request, and that request."""

    walk: SyncWalk
    ref: int
    frame: bytes


class Traffic:
    """The messages of one device. `live`: the connection is committed; the machine sets it by `begin` and `end`."""

    def __init__(self, snapshot: Snapshot, timing: Timing, chance: Chance) -> None:
        self.out = Effects()
        self.user = snapshot.user
        self._chance = chance
        self.requests = Requests(timing, chance)
        self.inbox = Inbox(
            Thread(
                p.conversation_id,
                p.peer,
                p.cursor,
                p.newest_seq,
                title=p.title,
                members=p.members,
                left=p.left,
                group_seq=p.group_seq,
            )
            for p in snapshot.places
        )
        self.shared = SharedState(snapshot.state_version, snapshot.shared, timing, chance)
        numbers = {p.conversation_id: p.next_client_id for p in snapshot.places}
        self.outbox = Outbox(snapshot.outbox, numbers, timing, chance)
        self.live = False
        self._line = PushLine()
        self._walk: SyncWalk | None = None
        self._walk_unsent = False  # the running Sync began in this round, so it covers what this round learns
        self._walk_again = False  # something was lost after the running Sync began
        self._walk_heals = False  # the running Sync follows a loss on this connection
        self._pulls: dict[str, int] = {}  # conversation → ref
        self._wanted: dict[str, None] = {}  # conversations with a gap, in turn
        self._later: dict[str, int] = {}  # conversations with a gap that many were told of at once → when to pull
        self._histories: dict[int, None] = {}  # refs
        self._ref = 0
        self._dirty: dict[str, None] = {}  # conversations whose Place is to be written
        self._untold = False  # a Sync is due, that tells what a group is like now, or whom a dialogue is with
        self._placed: dict[bytes, pb.ReceiptMsg] = {}  # own operations with a place whose rows are still to be pulled

    # ── the life of a connection ─────────────────────────────────────────────────────────────────────────

    def begin(self, run: int, push_no: int) -> None:
        """The first Sync committed; (run, push_no) are the numbers at that moment, 0 if they were not told."""
        self.live = True
        if run:
            self._line.adopt(run, push_no)
            self._walk_again = False  # the Sync that committed reads after it, so it covers what came before
        self.outbox.rewind_all()
        self._later.clear()
        self._wanted.update(dict.fromkeys(self.inbox.behind()))

    def first_sync(self) -> FirstSync:
        """The Sync that is to commit another connection while this one goes on."""
        walk, ref = SyncWalk(), self._next_ref()
        self.shared.wanted = True
        return FirstSync(walk, ref, wire.sync(ref, *walk.ask(self.inbox.cursors()), self.shared.ask(ref)))

    def go_over(self, sync: FirstSync, run: int, push_no: int, now_ms: int) -> None:
        """`sync` was answered on another connection, with these numbers (0: not told): everything goes on there. What was
        on its way here is asked or sent again; the page of `sync` is still to come, or comes next."""
        asked = [self.requests.find(pb.PULL, ref) for ref in self._histories]
        histories, self._histories = self._histories, {}
        self.end()
        self._histories = histories
        self._walk = sync.walk
        self.requests.ask(pb.SYNC, sync.ref, sync.frame, now_ms)  # sent already, there
        self.begin(run, push_no)
        for request in asked:
            if request is not None:
                self.out.frames.append(self.requests.ask(pb.PULL, request.ref, request.frame, now_ms))

    def end(self) -> None:
        """The connection, or its session, is gone: forget all that lives no longer."""
        self.live = False
        self.out.frames.clear()
        self.requests.clear()
        self.out.notices += [HistoryPage(ref, None) for ref in self._histories]
        self._histories.clear()
        self._pulls.clear()
        self._later.clear()
        self.shared.end()
        self._walk = None
        self._walk_again = self._walk_heals = False
        self._line = PushLine()

    def flush(self, now_ms: int) -> None:
        """The end of a round: ask for gaps, send what is ready, acknowledge what is stored, note changed conversations."""
        if self.live and self._untold:
            self.resync(now_ms)
        self._walk_unsent = self._untold = False
        if self.live:
            self._ask_pulls(now_ms)
            for entry, acked in self.outbox.take_ready(now_ms):
                self.out.frames.append(wire.up(entry, acked))
            stored = self._line.acknowledgement()
            if stored is not None:
                self.out.frames.append(wire.push_ack(*stored))
        self._ref += self.shared.flush(self.live, self._ref + 1, now_ms, self.out)
        for conversation_id in self._dirty:
            self.out.writes.places[conversation_id] = self._place(conversation_id)
        self._dirty.clear()

    def beat(self, now_ms: int, wish_ms: int = 0) -> None:
        """A heartbeat, unless one is unanswered: that one is repeated anyway. wish_ms: the interval to keep; 0: any."""
        if self.requests.find(pb.HEARTBEAT, 0) is None:
            frame = wire.heartbeat(*self._line.stored, wish_ms)
            self.out.frames.append(self.requests.ask(pb.HEARTBEAT, 0, frame, now_ms))

    def arrived(self, cmd: pb.MsgCmd, now_ms: int) -> bool:
        """A numbered frame. False: it is of a lower run, ignore it."""
        arrival = self._line.arrive(cmd.run, cmd.push_no)
        if arrival is Arrival.JUMP:
            self.resync(now_ms)
        return arrival is not Arrival.STALE

    def newest(self, run: int, push_no: int, now_ms: int) -> None:
        """The server's newest numbers, by an answered heartbeat."""
        if run and self._line.hint(run, push_no):
            self.resync(now_ms)

    # ── the application's calls ──────────────────────────────────────────────────────────────────────────

    def send(self, conversation_id: str, client_msg_id: bytes, to_user: str, msg_type: int, body: bytes) -> Entry:
        """Puts a message into the outbox. to_user: a dialogue's other user, else "". Raises OutboxFull."""
        thread = self.inbox.get(conversation_id)
        thread.peer = thread.peer or to_user
        entry = self.outbox.add(conversation_id, client_msg_id, to_user or thread.peer, msg_type, body)
        self.out.writes.queued[client_msg_id] = entry
        self._dirty[conversation_id] = None
        return entry

    def history(self, conversation_id: str, before: int | None, limit: int, now_ms: int) -> int | None:
        """Asks for the newest rows below `before`; the answer is a HistoryPage of the ref returned. None: not now."""
        if not self.live or len(self._histories) >= HISTORIES:
            return None
        ref = self._next_ref()
        frame = wire.pull(ref, conversation_id, 1, 0 if before is None else before - 1, limit, newest_first=True)
        self._histories[ref] = None
        self.out.frames.append(self.requests.ask(pb.PULL, ref, frame, now_ms))
        return ref

    def forget_history(self, ref: int) -> None:
        """Its asker does not wait any more."""
        if self._histories.pop(ref, 0) is None:
            self.requests.done(pb.PULL, ref)

    def told(self, kind: pb.CmdType.ValueType, payload: bytes, now_ms: int) -> None:
        """READ, TYPING or STATE."""
        if kind == pb.STATE:
            if not self.shared.stated(pb.StateMsg.FromString(payload), self.out):
                self._line.sync_due()
                self.resync(now_ms)
        elif kind == pb.READ:
            read = pb.ReadMsg.FromString(payload)
            dialogue = bool(self.user) and read.conversation_id == dialogue_id(self.user or "", read.user)
            self.shared.read_by(read, self.user, dialogue, self.out)
        else:
            self.shared.typing(pb.TypingMsg.FromString(payload), self.out)

    # ── uplink ───────────────────────────────────────────────────────────────────────────────────────────

    def up_answered(self, ack: pb.ACKMsg, now_ms: int) -> bool:
        """An ACK to an UP. False: its code is about the connection, not about the message."""
        entry = self.outbox.entry(ack.client_msg_id) if ack.client_msg_id else None
        conversation_id, client_id = ack.conversation_id, ack.ClientID
        if entry is not None:
            conversation_id, client_id = entry.conversation_id, entry.client_id
        verdict = self.outbox.answer(conversation_id, client_id, ack.Code, ack.expected, now_ms, ack.retry_ms)
        if verdict is Verdict.ACCEPTED:
            self.out.notices.append(Accepted(self.outbox.at(conversation_id, client_id).client_msg_id))
        elif verdict is Verdict.REFUSED:
            self._refuse(self.outbox.at(conversation_id, client_id), ack.Code)
        return verdict is not Verdict.ELSEWHERE

    def receipt(self, receipt: pb.ReceiptMsg, numbered: bool, now_ms: int) -> None:
        """The outcome of an UP. It moves the cursor as a push would: its row is the entry's body at the receipt's place."""
        entry = self.outbox.entry(receipt.client_msg_id)
        act = action(receipt.code)
        if act is Action.STOP:
            if entry is not None:
                self._refuse(entry, receipt.code, receipt.msg)
            return
        if act is not Action.NONE or not receipt.seq:
            return
        if entry is None:
            # Settled before: its row is stored, or a pull brings it.
            thread = self.inbox.get(receipt.conversation_id)
            if receipt.seq > thread.cursor:
                self.inbox.hint(thread, min(receipt.seq, wire.MAX_SEQ))
                self._touched(thread, numbered, now_ms)
            return
        if is_operation(entry.msg_type):
            # The platform adds to what we sent; every device is to hold the same, so its row is pulled.
            self._placed[entry.client_msg_id] = receipt
            thread = self.inbox.get(entry.conversation_id)
            if not receipt.prev_seq:
                self._read(self.inbox.place(thread, 0))
            self.inbox.hint(thread, min(receipt.seq, wire.MAX_SEQ))
            self._settle_placed(thread)
            self._touched(thread, numbered, now_ms)
            return
        push = pb.PushMsg(
            MsgID=receipt.msg_id,
            Content=entry.body,
            conversation_id=entry.conversation_id,
            seq=receipt.seq,
            prev_seq=receipt.prev_seq,
            from_user=self.user or "",
            msg_type=entry.msg_type,
            client_msg_id=entry.client_msg_id,
            server_at_ms=receipt.server_at_ms,
        )
        self.pushed(push, numbered, now_ms)

    def _settle(self, row: Row) -> None:
        """A row with its place: if it is ours, its entry leaves the outbox."""
        entry = self.outbox.entry(row.client_msg_id)
        if entry is None or entry.conversation_id != row.conversation_id or row.from_user != (self.user or ""):
            return
        self.outbox.settle(row.client_msg_id)
        self._placed.pop(row.client_msg_id, None)
        self.out.writes.unqueued.append(entry)
        self.out.notices.append(Settled(row.conversation_id, row.client_msg_id, row.msg_id, row.seq))

    def _settle_placed(self, thread: Thread, unread: bool = False) -> None:
        """Own operations whose rows will not come are settled by their receipts: they stand where this device has read, yet
        may not look (it was no member in between), or, `unread`, nothing may be read any more."""
        for entry in self.outbox.entries(thread.conversation_id) if self._placed else ():
            receipt = self._placed.get(entry.client_msg_id)
            if receipt is not None and (unread or receipt.seq <= thread.cursor):
                del self._placed[entry.client_msg_id]
                self.outbox.settle(entry.client_msg_id)
                self.out.writes.unqueued.append(entry)
                self.out.notices.append(
                    Settled(entry.conversation_id, entry.client_msg_id, receipt.msg_id, receipt.seq)
                )

    def _refuse(self, entry: Entry, code: int, words: str = "") -> None:
        detail = "" if words == text(code) else words[:DETAIL_CHARS]
        self.outbox.settle(entry.client_msg_id)
        self.out.writes.unqueued.append(entry)
        self.out.writes.refused.append((entry, code, detail))
        self.out.notices.append(RefusedMessage(entry.client_msg_id, code, detail))

    # ── downlink ─────────────────────────────────────────────────────────────────────────────────────────

    def pushed(self, push: pb.PushMsg, numbered: bool, now_ms: int) -> None:
        """One message. Raises PeerError(MALFORMED)."""
        row = wire.row_of(push)
        thread = self.inbox.get(row.conversation_id)
        self._read(self.inbox.offer(thread, row))
        self._settle(row)
        self._touched(thread, numbered, now_ms)

    def notified(self, notify: pb.NotifyMsg, numbered: bool, now_ms: int) -> None:
        """How far conversations reach; an empty one says: look for yourself."""
        if not notify.newest:
            self._line.sync_due()
            self.resync(now_ms)
        for cursor in notify.newest:
            thread = self.inbox.get(cursor.conversation_id)
            self.inbox.hint(thread, min(cursor.seq, wire.MAX_SEQ))
            self._touched(thread, numbered, now_ms, notify.within_ms)

    def spread(self, now_ms: int) -> None:
        """Pulls what its moment came for."""
        for conversation_id in [c for c, due_ms in self._later.items() if due_ms <= now_ms]:
            self._touched(self.inbox.get(conversation_id), False, now_ms)

    def spread_ms(self) -> int | None:
        """When `spread` has something to do next."""
        return min(self._later.values(), default=None)

    def _read(self, rows: Iterable[Row]) -> None:
        """Rows became readable: they and the cursor that passed them are one transaction."""
        for row in rows:
            self.out.writes.rows.append(row)
            self._dirty[row.conversation_id] = None
            self._meet(row)
            if is_operation(row.msg_type):
                self._operate(row)

    def _meet(self, row: Row) -> None:
        """Whom a dialogue is with is known from what the other one writes; else a Sync has to tell it."""
        thread = self.inbox.get(row.conversation_id)
        if thread.peer or not row.conversation_id.startswith(DIALOGUE_PREFIX):
            return
        if self.user and row.conversation_id == dialogue_id(self.user, row.from_user):
            thread.peer = row.from_user
        else:
            self._untold = True

    def _operate(self, row: Row) -> None:
        """An operation became readable: what it changes is changed in the same transaction."""
        revision = groups.revision_of(row)
        if revision is not None:
            self.out.writes.revisions.append(revision)
            self.out.notices.append(MessageChanged(row.conversation_id, revision.seq))
            return
        self.out.writes.memberships += groups.memberships_of(row)
        thread = self.inbox.get(row.conversation_id)
        if groups.operate(thread, row, self.user):
            self._untold = self._untold or thread.untold
            self.out.notices.append(ConversationChanged(row.conversation_id))

    def _touched(self, thread: Thread, numbered: bool, now_ms: int, within_ms: int = 0) -> None:
        """After any news of a conversation: is there a gap, and what is to be done about it. within_ms: not at once, but
        at a random moment of that time."""
        if not thread.behind:
            self._later.pop(thread.conversation_id, None)
            self._line.release(thread.conversation_id)
            return
        self._dirty[thread.conversation_id] = None
        if numbered:
            self._line.hold(thread.conversation_id)
        if within_ms:
            moment_ms = now_ms + int(self._chance() * min(within_ms, WITHIN_MAX_MS))
            self._later.setdefault(thread.conversation_id, moment_ms)
            return
        self._later.pop(thread.conversation_id, None)
        if thread.placed:
            self._wanted[thread.conversation_id] = None
        else:
            self.resync(now_ms)  # only a Sync tells where its reader starts

    def _ask_pulls(self, now_ms: int) -> None:
        while self._wanted and len(self._pulls) < PULLS:
            conversation_id = next(iter(self._wanted))
            del self._wanted[conversation_id]
            thread = self.inbox.get(conversation_id)
            if conversation_id in self._pulls or not thread.behind or not thread.placed:
                continue  # a pull that ends looks again, and so does a Sync that places
            ref = self._pulls[conversation_id] = self._next_ref()
            first = thread.cursor + 1
            frame = wire.pull(ref, conversation_id, first, 0, PULL_ROWS)
            self.out.frames.append(self.requests.ask(pb.PULL, ref, frame, now_ms, conversation_id, first))

    def pulled(self, pulled: pb.PulledMsg, request: Request, now_ms: int) -> None:
        """The page that `request` asked for. Raises PeerError(MALFORMED)."""
        rows = wire.rows_of(pulled)
        for row in rows:
            self._settle(row)
        if not request.subject:
            self._histories.pop(request.ref, None)
            self.requests.done(pb.PULL, request.ref)
            self.out.notices.append(HistoryPage(request.ref, tuple(rows)))
            return
        thread = self.inbox.get(request.subject)
        upto, newest = min(pulled.covered_to, wire.MAX_SEQ), min(pulled.newest_seq, wire.MAX_SEQ)
        readable, moved = self.inbox.page(thread, rows, pulled.covered_from, upto, newest)
        self._read(readable)
        self._settle_placed(thread)
        self._dirty[thread.conversation_id] = None
        if not moved and request.from_seq == thread.cursor + 1:
            self.requests.later(request, now_ms)  # the gap is there, its rows are not: not yet
            return
        # Also when the cursor passed this request meanwhile: the next one asks from where it stands now.
        self.requests.done(pb.PULL, request.ref)
        self._pulls.pop(request.subject, None)
        self._touched(thread, False, now_ms)

    def pull_refused(self, request: Request) -> None:
        """For good: the conversation may not be read (any more)."""
        self.requests.done(pb.PULL, request.ref)
        if not request.subject:
            self._histories.pop(request.ref, None)
            self.out.notices.append(HistoryPage(request.ref, None))
            return
        self._pulls.pop(request.subject, None)
        thread = self.inbox.get(request.subject)
        self._settle_placed(thread, unread=True)
        self.inbox.give_up(thread)
        self._line.release(request.subject)
        self._dirty[request.subject] = None

    # ── sync ─────────────────────────────────────────────────────────────────────────────────────────────

    def resync(self, now_ms: int) -> None:
        """Something may have been lost on this connection. While a Sync runs, one more follows it."""
        if self._walk is not None:
            self._walk_again = self._walk_again or not self._walk_unsent
        elif self.live:
            self._walk_heals = True
            self.start_sync(now_ms)

    def start_sync(self, now_ms: int) -> None:
        """A Sync from the first page on; the first one of a connection commits it."""
        self._walk = SyncWalk()
        self._walk_unsent = True
        self._walk_again = False
        self.shared.wanted = True
        self._ask_sync(self._walk, now_ms)

    def _ask_sync(self, walk: SyncWalk, now_ms: int) -> None:
        ref = self._next_ref()
        frame = wire.sync(ref, *walk.ask(self.inbox.cursors()), self.shared.ask(ref))
        self.out.frames.append(self.requests.ask(pb.SYNC, ref, frame, now_ms))

    def synced(self, page: pb.SyncedMsg, request: Request, now_ms: int) -> None:
        """The page that `request` asked for."""
        walk = self._walk
        if walk is None:
            return
        self.shared.synced(page, self.out)
        for item in page.items:
            thread = self.inbox.get(item.conversation_id)
            met = thread.untold and bool(item.peer)
            thread.peer = thread.peer or item.peer
            if groups.told(thread, item, min(item.newest_seq, wire.MAX_SEQ)) or met:
                self.out.notices.append(ConversationChanged(item.conversation_id))
            self._untold = self._untold or (thread.untold and item.newest_seq < thread.group_seq)
            self._read(self.inbox.place(thread, min(item.first_cursor, wire.MAX_SEQ)))
            self.inbox.hint(thread, min(item.newest_seq, wire.MAX_SEQ))
            self._dirty[item.conversation_id] = None
            self._touched(thread, False, now_ms)
        way = walk.answered(page.more, page.covered_id)
        if way is None:
            self.requests.later(request, now_ms)
            return
        self.requests.done(pb.SYNC, request.ref)
        if way:
            self._ask_sync(walk, now_ms)
        else:
            self._walk_ended(now_ms)

    def _walk_ended(self, now_ms: int) -> None:
        self._walk = None
        if self._walk_again or self.shared.wanted:  # more of what is shared than a page holds
            self._walk_heals = self._walk_heals or self._walk_again
            self.start_sync(now_ms)
            return
        for thread in self.inbox.threads():
            if thread.behind and not thread.placed:  # no Sync lists it: its reader starts at the beginning
                self._read(self.inbox.place(thread, 0))
                self._wanted[thread.conversation_id] = None
        self._line.synced(self.inbox.behind())
        if self._walk_heals:
            self._walk_heals = False
            self.outbox.rewind_accepted()

    def _next_ref(self) -> int:
        self._ref += 1
        return self._ref

    def _place(self, conversation_id: str) -> Place:
        thread = self.inbox.get(conversation_id)
        number = self.outbox.next_client_id(conversation_id)
        return Place(
            conversation_id,
            thread.peer,
            thread.cursor,
            thread.newest_seq,
            number,
            thread.title,
            thread.members,
            thread.left,
            thread.group_seq,
        )
