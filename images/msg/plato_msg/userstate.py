"""What a user's devices share: read positions, pins, mutes, deletions for oneself; and what is told of them.

    read, pin, mute, clear, hide ─▸ [MERGE_S] ─▸ one transaction (userstate_pg) ─▸ routes, read after the commit
         ─▸ STATE to every device of the user, numbered as any push, by the lanes of the downlink
         ─▸ READ to the authors of what was newly read, once, not numbered (hints)
         ─▸ the caller's answer

For the HTTP API and the gRPC service, `service.states` (UserStates) and plato_msg.devices.Devices, made in __main__:

    UserStates
      read(reads: Sequence[Reading]) -> list[Position]                        positions that stand, in order
      pin(user, conversation_id, pinned: bool) -> Stands
      mute(user, conversation_id, until_ms: int) -> Stands                    0: not muted; FOREVER_MS: until it is lifted
      clear(user, conversation_id, upto_seq: int = 0) -> Stands               delete from my list; 0: all that is there
      hide(user, conversation_id, seqs: Sequence[int]) -> Stands              delete for me, 1 to 100 messages
      since(user, version: int, limit: int = 500) -> StateMsg                 for Sync and for GET /v1/state
      conversations(user, cursor: str = "", limit: int = 50) -> Page | None   None: the cursor is not one of ours
      conversation(user, conversation_id) -> Item | None                      None: not a member, or there is none
      unread(user) -> int                                                     of all unmuted conversations, COUNT_MAX at most
      readers(user, conversation_id, seq, after: str = "", limit: int = 100) -> list[str] | None   None: not a member now
      read_counts(user, conversation_id, seqs) -> dict[int, int] | None       at most 100 seqs; None: not a member now
      typing(signals: Sequence[Typing]) -> None
      changed(told: Mapping[str, Sequence[StateMsg]]) -> None                 another module's committed changes (friends)

    Devices
      of(user) -> list[Device]                                                device_id, platform, network, since_ms
      kick(user, device_id: int | None = None, keep: int | None = None) -> list[int]   the device_ids whose sessions ended
      online(user, others) -> dict[str, bool]                                 who shares no conversation is left out

Every method raises Unavailable: repeat. Refusals are codes: NOT_A_MEMBER for a stranger and where there is no such
conversation, BAD_CONVERSATION, BAD_RANGE. Whoever left a conversation keeps it in the list until it is cleared.
Whoever changes something of its own that the user's devices share raises versions with userstate_pg.raise_versions in its
transaction, hands what holds now to `changed` after the commit, and gives `since` a source (userstate_pg.Source).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from plato.core.codes import Code
from plato.core.conversations import is_conversation_id, is_user_id
from plato.core.errors import Unavailable, Unstorable
from plato.core.ids import MAX_ID
from plato.ports import Position, Reading, Route, Typing
from plato.runtime import logs
from plato.wire.v1 import client_pb2 as wire

from plato_msg import metrics
from plato_msg.downlink import Downlink, RouteReader
from plato_msg.lists_pg import COUNTS, Item, Page, PgLists
from plato_msg.store_pg import Database
from plato_msg.telling import Teller
from plato_msg.userstate_pg import ENTRIES, ENTRY_BYTES, Access, Change, Key, PgUserStates, Read, Source

MERGE_S: Final = 0.02
BATCH: Final = 1_000
"""Changes in one transaction."""
WAITING: Final = 20_000
"""Changes that wait; past it they are refused as unavailable."""
UNTOLD: Final = 8
"""Batches that are committed and whose routes are not read yet; past it the next commit waits."""
TOLD: Final = 20_000
"""Rows that this process knows to be told: what asks for no change is told again only where it is not among them."""
READS_HEARD: Final = 20
"""READs of one batch that an author is told of a conversation: thousands who open a group at once are told by counts."""
ROUTES: Final = 500
SINCE_MAX: Final = 500
FRAME_ROOM_BYTES: Final = 1_024
"""Kept free in a frame for what is no entry."""
LIST_MAX: Final = 100
READERS_MAX: Final = 500
TYPERS: Final = 200
"""Typing signals of one call that are told; the rest is lost."""
FOREVER_MS: Final = 253_402_300_799_000
"""The end of the year 9999."""


class Stands(NamedTuple):
    """What became of a change. state: what holds now; None for a refusal."""

    code: int
    state: wire.ConversationState | None = None


@dataclass(slots=True)
class _Asked:
    """One change, from its question to its answer. judge: says what is to be written, of what stands."""

    kind: str
    key: Key
    judge: Callable[[Access], Change]
    answer: asyncio.Future[Stands]


@dataclass(slots=True)
class _Committed:
    """What is to be told: of one batch, or of another module."""

    told: Mapping[str, Sequence[wire.StateMsg]]
    rose: list[Read] = field(default_factory=list)
    done: Callable[[], None] = lambda: None


class UserStates:
    """What users' devices share. `run` makes the changes; everything that only reads works without it."""

    def __init__(
        self,
        database: Database,
        downlink: Downlink,
        routes: RouteReader,
        *,
        push_members_max: int,
        max_frame_bytes: int = 65_536,
        sources: Sequence[Source] = (),
        merge_s: float = MERGE_S,
        lists: Database | None = None,
    ) -> None:
        """push_members_max: in larger conversations nobody is told who types. lists: for what only HTTP reads; None: as
        database."""
        self._state_bytes = (max_frame_bytes - FRAME_ROOM_BYTES) // 2
        self._entries = min(ENTRIES, self._state_bytes // ENTRY_BYTES - 1)
        self._store = PgUserStates(database, self._entries)
        self._lists = PgLists(lists or database)
        self._routes = routes
        self._downlink = downlink
        self._teller = Teller(downlink)
        self._sources = list(sources)
        self._push_members_max = push_members_max
        self._merge_s = merge_s
        self._asked: deque[_Asked] = deque()
        self._work = asyncio.Event()
        self._committed: asyncio.Queue[_Committed] = asyncio.Queue(UNTOLD)
        self._told: dict[Key, int] = {}
        self._typing = False
        self._ended = False
        self._log = logs.get("states")

    # ── changes ──────────────────────────────────────────────────────────────────────────────────────────────

    async def read(self, reads: Sequence[Reading]) -> list[Position]:
        """Raises read positions: each to what was asked, but never above the newest message that its user may read."""
        codes, asked = [], []
        for reading in reads:
            code = _check(reading.user, reading.conversation_id)
            if code is Code.OK and reading.seq < 1:
                code = Code.BAD_RANGE
            codes.append(code)
            if code is Code.OK:
                asked.append(self._ask("read", reading.user, reading.conversation_id, _read(reading.seq)))
            else:
                metrics.STATE_CHANGES.labels("read", code.name.lower()).inc()
        answers = iter(await asyncio.gather(*asked))
        stands = [next(answers) if code is Code.OK else Stands(code) for code in codes]
        return [Position(s.code, s.state.read_seq if s.state is not None else 0) for s in stands]

    async def pin(self, user: str, conversation_id: str, pinned: bool) -> Stands:
        """Pins a conversation to the top of the list, or no more. One that is pinned keeps its place."""
        return await self._change("pin", user, conversation_id, lambda _: Change(pinned=pinned))

    async def mute(self, user: str, conversation_id: str, until_ms: int) -> Stands:
        """Until then (Unix ms) it counts in no total, and a client makes no noise. 0: no more."""
        if not 0 <= until_ms <= FOREVER_MS:
            return Stands(Code.BAD_RANGE)
        return await self._change("mute", user, conversation_id, lambda _: Change(muted_until_ms=until_ms))

    async def clear(self, user: str, conversation_id: str, upto_seq: int = 0) -> Stands:
        """Deletes a conversation from this user's list: rows up to there are hidden. 0: everything that is there by now."""
        if not 0 <= upto_seq <= MAX_ID:
            return Stands(Code.BAD_RANGE)
        return await self._change("clear", user, conversation_id, lambda a: _cleared(a, upto_seq))

    async def hide(self, user: str, conversation_id: str, seqs: Sequence[int]) -> Stands:
        """Deletes messages for this user only."""
        if not 1 <= len(seqs) <= self._entries or any(not 1 <= seq <= MAX_ID for seq in seqs):
            return Stands(Code.BAD_RANGE)
        hidden = set(seqs)
        return await self._change(
            "hide",
            user,
            conversation_id,
            lambda a: Change(hidden={s for s in hidden if a.joined_seq < s <= a.last_seq}),
        )

    async def changed(self, told: Mapping[str, Sequence[wire.StateMsg]]) -> None:
        """Tells what another module committed, {user: STATEs, in order}. Returns when each device's shard has it, or is
        marked dirty."""
        done = asyncio.Event()
        await self._committed.put(_Committed(told, done=done.set))
        await done.wait()

    # ── reads ────────────────────────────────────────────────────────────────────────────────────────────────

    async def since(self, user: str, version: int, limit: int = SINCE_MAX) -> wire.StateMsg:
        """What holds and changed after `version`: ask again with the answer's version while there is `more`. A version that
        this user never had is answered as 0. It fits into half a frame."""
        limit = min(max(limit, self._entries + 1), SINCE_MAX)
        return await self._store.since(user, min(version, MAX_ID), limit, self._state_bytes, self._sources)

    async def conversations(self, user: str, cursor: str = "", limit: int = 50) -> Page | None:
        """A page of the list: pinned ones first, the latest pin first, then by the newest message."""
        return await self._lists.page(user, cursor, min(max(limit, 1), LIST_MAX))

    async def conversation(self, user: str, conversation_id: str) -> Item | None:
        """One of the list, also where it is cleared."""
        return await self._lists.one(user, conversation_id) if is_conversation_id(conversation_id) else None

    async def unread(self, user: str) -> int:
        """Unread messages of all conversations that are not muted; COUNT_MAX means so many or more."""
        return await self._lists.unread(user)

    async def readers(
        self, user: str, conversation_id: str, seq: int, after: str = "", limit: int = 100
    ) -> list[str] | None:
        """Members who have read a message, without its author, by id after `after`. [] where there is no such message that
        the user may read."""
        if not is_conversation_id(conversation_id) or not 1 <= seq <= MAX_ID:
            return None if not is_conversation_id(conversation_id) else []
        return await self._lists.readers(user, conversation_id, seq, after, min(max(limit, 1), READERS_MAX))

    async def read_counts(self, user: str, conversation_id: str, seqs: Sequence[int]) -> dict[int, int] | None:
        """How many members have read each message, without its author. Messages that the user may not read are left out, and
        all but the first COUNTS of them."""
        if not is_conversation_id(conversation_id):
            return None
        wanted = sorted({seq for seq in list(seqs)[:COUNTS] if 1 <= seq <= MAX_ID})
        return await self._lists.read_counts(user, conversation_id, wanted)

    # ── typing ───────────────────────────────────────────────────────────────────────────────────────────────

    async def typing(self, signals: Sequence[Typing]) -> None:
        """Tells the other members who are online. At most once: what comes while others are on their way is lost."""
        keys = {
            (t.user, t.conversation_id): t.stopped
            for t in signals[:TYPERS]
            if _check(t.user, t.conversation_id) is Code.OK
        }
        if self._typing or not keys:
            return
        self._typing = True
        try:
            audiences = await self._store.audiences(keys, self._push_members_max)
            frames = [
                (frame, other)
                for key, others in audiences.items()
                for frame in [typing_frame(*key, stopped=keys[key])]
                for other in others
            ]
            names = list({other for _, other in frames})
            for at in range(0, len(names), ROUTES):
                some = names[at : at + ROUTES]
                routes = dict(zip(some, await self._routes.read_many(some), strict=True))
                self._teller.hint([f for f in frames if f[1] in routes], routes)
        except Unavailable as e:
            self._log.debug("typing could not be told", reason=str(e))
        finally:
            self._typing = False

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Makes the changes and tells them, until cancelled. After the downlink was begun."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._commit_all(), name="commit")
                tasks.create_task(self._tell_all(), name="tell")
        finally:
            self._ended = True
            await self._teller.stop()
            _fail(self._asked, Unavailable("this process ends"))

    async def _change(self, kind: str, user: str, conversation_id: str, judge: Callable[[Access], Change]) -> Stands:
        code = _check(user, conversation_id)
        if code is not Code.OK:
            metrics.STATE_CHANGES.labels(kind, code.name.lower()).inc()
            return Stands(code)
        return await self._ask(kind, user, conversation_id, judge)

    def _ask(
        self, kind: str, user: str, conversation_id: str, judge: Callable[[Access], Change]
    ) -> asyncio.Future[Stands]:
        answer: asyncio.Future[Stands] = asyncio.get_running_loop().create_future()
        if self._ended or len(self._asked) >= WAITING:
            answer.set_exception(Unavailable("this process ends" if self._ended else "too many changes wait"))
        else:
            self._asked.append(_Asked(kind, (user, conversation_id), judge, answer))
            self._work.set()
        return answer

    async def _commit_all(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            await asyncio.sleep(self._merge_s)
            while self._asked:
                batch = _take(self._asked)
                try:
                    committed = await self._commit(batch)
                except (Unavailable, Unstorable) as e:
                    _fail(batch, Unavailable(str(e)))
                except BaseException:
                    _fail(batch, Unavailable("the change was broken off"))
                    raise
                else:
                    await self._committed.put(committed)

    async def _commit(self, batch: Sequence[_Asked]) -> _Committed:
        """One transaction, of what stands when it begins."""
        found = await self._store.access({asked.key for asked in batch})
        changes = _merged(
            (asked.key, found[asked.key], asked.judge(found[asked.key])) for asked in batch if asked.key in found
        )
        metrics.STATE_BATCH.inc()
        told, rose = await self._store.write(changes)
        stands = {
            (user, c.conversation_id): (state.version, c)
            for user, states in told.items()
            for state in states
            for c in state.conversations
        }
        unchanged = {key: a for key, a in found.items() if key not in stands and a.version}
        stands |= await self._store.state_of(unchanged)
        # Repeats, most likely: whoever made the change may have died before anybody was told. A version is told whole or not
        # at all, so this frame only says which one there is: a device that has an older one syncs.
        doubtful = [(key[0], a.peer) for key, a in unchanged.items() if self._told.get(key, 0) < a.version]
        again = {user for pair in doubtful for user in pair if user} - told.keys()
        for user, version in (await self._store.versions(again)).items():
            told[user] = [wire.StateMsg(version=version, prev_version=version)]

        def done() -> None:
            for key, (version, _) in stands.items():
                self._told.pop(key, None)
                self._told[key] = version
            while len(self._told) > TOLD:
                del self._told[next(iter(self._told))]
            for asked in batch:
                code = Code.OK if asked.key in found else Code.NOT_A_MEMBER
                metrics.STATE_CHANGES.labels(asked.kind, code.name.lower()).inc()
                if not asked.answer.done():
                    _, entry = stands.get(asked.key, (0, wire.ConversationState(conversation_id=asked.key[1])))
                    asked.answer.set_result(Stands(code, entry if code is Code.OK else None))

        return _Committed(told, rose, done)

    async def _tell_all(self) -> None:
        """In the order of the commits: routes, then STATE on the shards' lanes; READ beside them."""
        while True:
            committed = await self._committed.get()
            frames = {user: [state_frame(state) for state in states] for user, states in committed.told.items()}
            routes: dict[str, Mapping[int, Route]] = {}
            hints: list[tuple[bytes, str]] = []
            try:
                authors = await self._store.authors(committed.rose)
            except Unavailable:
                authors = []  # READ is a hint
            heard: Counter[Key] = Counter()
            for read, theirs in zip(committed.rose, authors, strict=False):
                frame = read_frame(read.user, read.conversation_id, read.new)
                for author in theirs:
                    heard[author, read.conversation_id] += 1
                    if heard[author, read.conversation_id] <= READS_HEARD:
                        hints.append((frame, author))
            names = list(dict.fromkeys([*frames, *(author for _, author in hints)]))
            for at in range(0, len(names), ROUTES):
                routes.update(await self._downlink.read_routes(names[at : at + ROUTES]))
            self._teller.tell(frames, routes, committed.done)
            self._teller.hint(hints, routes)


def state_frame(state: wire.StateMsg) -> bytes:
    """MsgCmd{State}, without run and push_no."""
    return wire.MsgCmd(Type=wire.STATE, Payload=state.SerializeToString()).SerializeToString()


def read_frame(user: str, conversation_id: str, seq: int) -> bytes:
    """MsgCmd{Read}: not numbered."""
    read = wire.ReadMsg(conversation_id=conversation_id, seq=seq, user=user)
    return wire.MsgCmd(Type=wire.READ, Payload=read.SerializeToString()).SerializeToString()


def typing_frame(user: str, conversation_id: str, *, stopped: bool) -> bytes:
    """MsgCmd{Typing}: not numbered."""
    typing = wire.TypingMsg(conversation_id=conversation_id, user=user, stopped=stopped)
    return wire.MsgCmd(Type=wire.TYPING, Payload=typing.SerializeToString()).SerializeToString()


def _read(seq: int) -> Callable[[Access], Change]:
    return lambda a: Change(read_seq=min(seq, a.last_seq))


def _cleared(a: Access, upto_seq: int) -> Change:
    return Change(cleared_seq=min(upto_seq or a.last_seq, a.last_seq))


def _take(asked: deque[_Asked]) -> list[_Asked]:
    """The next batch: at most one deletion of messages per user and conversation, so that a version keeps its bound."""
    batch: list[_Asked] = []
    hiding: set[Key] = set()
    while asked and len(batch) < BATCH:
        if asked[0].kind == "hide":
            if asked[0].key in hiding:
                break
            hiding.add(asked[0].key)
        batch.append(asked.popleft())
    return batch


def _merged(wanted: Iterable[tuple[Key, Access, Change]]) -> dict[Key, Change]:
    """What is to be written: changes joined per user and conversation, the later ones' marks, without what stands already;
    and what it means for a dialogue's other user."""
    joined: dict[Key, tuple[Access, Change]] = {}
    for key, a, change in wanted:
        _, whole = joined.setdefault(key, (a, Change()))
        whole.read_seq = max(whole.read_seq, change.read_seq)
        whole.cleared_seq = max(whole.cleared_seq, change.cleared_seq)
        whole.hidden |= change.hidden
        whole.pinned = whole.pinned if change.pinned is None else change.pinned
        whole.muted_until_ms = whole.muted_until_ms if change.muted_until_ms is None else change.muted_until_ms
    changes: dict[Key, Change] = {}
    for key, (a, whole) in joined.items():
        whole.read_seq = whole.read_seq if whole.read_seq > a.read_seq else 0
        whole.cleared_seq = whole.cleared_seq if whole.cleared_seq > a.cleared_seq else 0
        whole.pinned = whole.pinned if whole.pinned != a.pinned else None
        whole.muted_until_ms = whole.muted_until_ms if whole.muted_until_ms != a.muted_until_ms else None
        if whole != Change():
            changes[key] = whole
    for key, change in list(changes.items()):
        peer = joined[key][0].peer
        if change.read_seq and peer:
            theirs = changes.setdefault((peer, key[1]), Change())
            theirs.peer_read_seq = max(theirs.peer_read_seq, change.read_seq)
    return changes


def _check(user: str, conversation_id: str) -> Code:
    """OK, or why the form is wrong."""
    return Code.OK if is_user_id(user) and is_conversation_id(conversation_id) else Code.BAD_CONVERSATION


def _fail(asked: Collection[_Asked], why: Unavailable) -> None:
    for one in asked:
        if not one.answer.done():
            one.answer.set_exception(why)
