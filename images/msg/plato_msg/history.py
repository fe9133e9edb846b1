"""Sync and Pull: what a client asks to end with every message of its conversations. Reads only, always from the primary.

    Sync   (after_id, upto_id] of the user's conversations, by id, those newer than the client's cursors → pages
    Pull   a range of one conversation → rows, and exactly which range they cover, so that pulling over any range ends

Pages are bound by count and by bytes: an answer fits into one frame. Rows are committed by rising seq, so a read up to
last_seq, taken first, misses nothing. Who left reads up to the leave. Rows that retention removed are covered as any others.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, Protocol

from plato.core.codes import Code, text
from plato.core.conversations import is_conversation_id
from plato.core.ids import MAX_ID
from plato.wire.v1 import client_pb2 as wire

from plato_msg import metrics
from plato_msg.core.fanout import session_id
from plato_msg.hot import HotConversations
from plato_msg.store_pg import ROW_BYTES, Access, Message, PgMsgStore

PAGE: Final = 100
MAX_PAGE: Final = 500
MAX_CURSORS: Final = 500
HOT_PULLS_PER_S: Final = 50
FRAME_ROOM_BYTES: Final = 1_024
"""Kept free in a frame for what is not a row."""
_ITEM_BYTES: Final = 312
"""What an item of Synced takes at most: two ids of 64 bytes, a title of 128, numbers, tags."""


class StateReader(Protocol):
    """What a user's devices share (plato_msg.userstate.UserStates)."""

    async def since(self, user: str, version: int) -> wire.StateMsg:
        """What changed after `version`, at most half a frame. Raises Unavailable."""


class History:
    """Answers Sync and Pull for one user at a time. Raises Unavailable; refusals are codes in the answers."""

    def __init__(self, store: PgMsgStore, *, max_frame_bytes: int, hot_pulls_per_s: int = HOT_PULLS_PER_S) -> None:
        """hot_pulls_per_s: pulls of one conversation that make it hot; see plato_msg.hot."""
        self._store = store
        self._hot = HotConversations(store, hot_pulls_per_s)
        self._page_bytes = max_frame_bytes - FRAME_ROOM_BYTES
        self.states: StateReader | None = None
        """What users' devices share, for a Sync that wants it; set by service."""

    async def sync(self, user: str, sync: wire.SyncMsg) -> wire.SyncedMsg:
        """One page of the conversations that are newer than the client's cursors."""
        code = check_sync(sync)
        if code != Code.OK:
            metrics.READS.labels("sync", code.name.lower()).inc()
            return wire.SyncedMsg(ref=sync.ref, code=code, msg=text(code))
        wanted = self.states if sync.want_state else None
        page_bytes = self._page_bytes if wanted is None else self._page_bytes // 2
        limit = min(sync.limit or PAGE, MAX_PAGE, page_bytes // _ITEM_BYTES)
        cursors = {c.conversation_id: min(c.seq, MAX_ID) for c in sync.cursors}
        found = await self._store.conversations(user, sync.after_id, sync.upto_id, cursors, limit + 1)
        page, more = found[:limit], len(found) > limit
        metrics.READS.labels("sync", "ok").inc()
        state = None
        if wanted is not None:
            state = await wanted.since(user, sync.state_version)
        return wire.SyncedMsg(
            ref=sync.ref,
            state=state,
            items=[
                wire.SyncedItem(
                    conversation_id=listed.conversation_id,
                    newest_seq=listed.newest_seq,
                    first_cursor=listed.joined_seq,
                    peer=listed.peer,
                    title=listed.title,
                    members=listed.members,
                    left=listed.left,
                )
                for listed in page
            ],
            more=more,
            covered_id=page[-1].conversation_id if more else sync.upto_id,
        )

    async def pull(self, user: str, pull: wire.PullMsg) -> wire.PulledMsg:
        """Rows of one conversation, from the old or the new end of the range."""
        answer = wire.PulledMsg(ref=pull.ref, conversation_id=pull.conversation_id)
        code = check_pull(pull)
        hot = code == Code.OK and self._hot.seen(pull.conversation_id)
        access: Access | None = None
        if code == Code.OK:
            access = await (self._hot if hot else self._store).membership(user, pull.conversation_id)
        if code == Code.OK and access is None:
            code = Code.NOT_A_MEMBER  # also where there is no such conversation: nothing is revealed
        metrics.READS.labels("pull", code.name.lower()).inc()
        if access is None:
            answer.code, answer.msg = code, text(code)
            return answer
        newest = access.newest_seq
        first = max(1, min(pull.from_seq, MAX_ID))
        last = min(pull.to_seq or newest, newest)
        answer.newest_seq = newest
        answer.covered_from, answer.covered_to = first, max(last, first - 1)
        if last < first:
            return answer  # an empty range: what is not there yet is not covered
        limit = pull.limit or PAGE
        begin, newest_first = max(first, access.joined_seq + 1), pull.newest_first
        rows = None
        if hot:
            rows = self._hot.rows(
                pull.conversation_id, begin, last, limit + 1, access.changed_seq, newest_first=newest_first
            )
        if rows is None:
            rows = await self._store.messages(
                pull.conversation_id, begin, last, limit + 1, self._page_bytes, newest_first=newest_first
            )
        page = self._fitting(rows[:limit])
        if len(page) < len(rows):
            if pull.newest_first:
                answer.covered_from = page[-1].seq
            else:
                answer.covered_to = page[-1].seq
        page.sort(key=lambda row: row.seq)
        answer.rows.extend(
            wire.PushMsg(
                MsgID=row.msg_id,
                SessionID=session_id(pull.conversation_id),
                Content=row.body,
                conversation_id=pull.conversation_id,
                seq=row.seq,
                prev_seq=row.prev_seq,
                from_user=row.from_user,
                msg_type=row.msg_type,
                client_msg_id=row.client_msg_id,
                server_at_ms=row.server_at_ms,
                changed_seq=row.changed_seq,
                recalled=row.recalled,
            )
            for row in page
        )
        return answer

    def hot_conversations(self) -> list[str]:
        """The conversations that are hot now."""
        return self._hot.hot()

    def _fitting(self, rows: list[Message]) -> list[Message]:
        """The first rows that fit into a frame together; always one."""
        size = 0
        for count, row in enumerate(rows):
            size += len(row.body) + ROW_BYTES
            if count and size > self._page_bytes:
                return rows[:count]
        return rows


def check_sync(sync: wire.SyncMsg) -> Code:
    """OK, or why this Sync is refused."""
    ids = [c.conversation_id.encode() for c in sync.cursors]
    if len(ids) > MAX_CURSORS or any(a >= b for a, b in pairwise(ids)):
        return Code.TOO_MANY_CURSORS
    bounds = [bound for bound in (sync.after_id, sync.upto_id) if bound]
    if not all(map(is_conversation_id, [*bounds, *(c.conversation_id for c in sync.cursors)])):
        return Code.BAD_CONVERSATION
    return Code.BAD_RANGE if sync.limit > MAX_PAGE else Code.OK


def check_pull(pull: wire.PullMsg) -> Code:
    """OK, or why this Pull is refused."""
    if not is_conversation_id(pull.conversation_id):
        return Code.BAD_CONVERSATION
    if pull.limit > MAX_PAGE or (pull.to_seq and pull.to_seq < pull.from_seq):
        return Code.BAD_RANGE
    return Code.OK
