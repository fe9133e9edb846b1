"""The hooks that are told afterwards: the after-hook, which gets the feed, and pushes for who is not online. Both read
the feed behind a cursor of their own, each process for the partitions that it owns, so the pipeline knows nothing of them.

    after   rows behind the cursor ─▸ POST {"events": […]} until 2xx ─▸ the cursor moves
    push    rows behind the cursor ─▸ members without a live route, not muted, who have not read it ─▸ one transaction: rows
            of im_push, and the cursor where it still is the expected one
            rows of im_push, claimed for a time ─▸ POST {"pushes": […]} until 2xx ─▸ the rows go

One POST of a kind is on its way per process, so a conversation's events come in order; they are told at least once: a crash
between the answer and the cursor repeats them. A push is decided on exactly once per message and user, and handed over until
it was answered; push_id tells a repeated one. Memory: one page each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from google.protobuf.message import DecodeError
from plato.core.conversations import is_user_id
from plato.core.errors import Unavailable
from plato.ports import Route
from plato.runtime import logs
from plato.runtime.process import forever
from plato.runtime.settings import MsgSettings
from plato.wire.v1 import content_pb2 as content

from plato_msg import metrics
from plato_msg.api import render
from plato_msg.core.operations import is_operation
from plato_msg.feed import Event, Feed, merged
from plato_msg.hooks import Post, Secret
from plato_msg.owner import Ownership
from plato_msg.service import MsgService
from plato_msg.store_pg import PgMsgStore
from plato_msg.store_reads import Database

AFTER: Final = "after"
PUSH: Final = "push"
PAGE: Final = 100
LOOK_S: Final = 0.2
BACK_OFF_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
CLAIM_S: Final = 60
POST_S: Final = 10.0
"""How long an answer is waited for."""
ROUTES: Final = 500


class Routes(Protocol):
    """Where devices are (plato.router.Router)."""

    async def read_many(self, users: Sequence[str]) -> list[dict[int, Route]]:
        """Per user, in order. Raises Unavailable."""


class Cursors:
    """How far the hooks have come. Every method raises Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin(self, hooks: Collection[str]) -> None:
        """A hook that is new here begins with what is stored from now on. Before the first batch of this process."""
        async with self._database.connection() as connection:
            await connection.execute(
                "INSERT INTO im_hook_cursor (hook, partition, position)"
                " SELECT h, o.partition, o.position FROM unnest($1::text[]) h CROSS JOIN bus_owner o"
                " ON CONFLICT DO NOTHING",
                list(hooks),
            )

    async def of(self, hook: str, partitions: Collection[int]) -> dict[int, int]:
        """{partition: position}."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT partition, position FROM im_hook_cursor WHERE hook = $1 AND partition = ANY ($2)",
                hook,
                list(partitions),
            )
        return {row[0]: row[1] for row in rows}

    async def move(self, hook: str, positions: Mapping[int, int]) -> None:
        """Up to these; never back."""
        async with self._database.connection() as connection:
            await connection.execute(
                "UPDATE im_hook_cursor h SET position = p.position"
                " FROM unnest($2::integer[], $3::bigint[]) AS p(partition, position)"
                " WHERE h.hook = $1 AND h.partition = p.partition AND h.position < p.position",
                hook,
                list(positions.keys()),
                list(positions.values()),
            )


class AfterHook:
    """Posts the feed."""

    def __init__(self, feed: Feed, cursors: Cursors, owners: Ownership, post: Post) -> None:
        self._feed = feed
        self._cursors = cursors
        self._owners = owners
        self._post = post

    async def run(self) -> None:
        """Until cancelled."""
        await _repeated("after", self.step)

    async def step(self) -> bool:
        """Tells one page; False: there was nothing. Raises Unavailable."""
        after = await self._cursors.of(AFTER, list(self._owners.held))
        keys = merged(await self._feed.keys(after, PAGE), PAGE) if after else []
        if not keys:
            return False
        events, done = await self._feed.messages(keys)
        if events:
            await self._post.send({"events": [render.stored(e.conversation_id, e.message) for e in events]})
            metrics.HOOKS.labels("after", "answered").inc()
        await self._cursors.move(AFTER, {key.partition: key.position for key in done})
        return True


class Wanted(NamedTuple):
    """A push to be handed over."""

    event: Event
    user: str


class Pushes:
    """Finds out who is to be pushed to, and hands it over. unread: a user's unread messages, for the badge."""

    def __init__(
        self,
        feed: Feed,
        cursors: Cursors,
        owners: Ownership,
        database: Database,
        routes: Routes,
        post: Post,
        unread: Callable[[str], Awaitable[int]],
        *,
        push_members_max: int,
    ) -> None:
        """push_members_max: in larger groups only who is mentioned gets one."""
        self._feed = feed
        self._cursors = cursors
        self._owners = owners
        self._database = database
        self._store = PgMsgStore(database)
        self._routes = routes
        self._post = post
        self._unread = unread
        self._push_members_max = push_members_max

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_repeated("push", self.find))
            tasks.create_task(_repeated("push", self.hand_over))

    # ── who ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def find(self) -> bool:
        """Decides on one page of the feed; False: there was nothing. Raises Unavailable."""
        after = await self._cursors.of(PUSH, list(self._owners.held))
        keys = merged(await self._feed.keys(after, PAGE), PAGE) if after else []
        if not keys:
            return False
        events, done = await self._feed.messages(keys)
        wanted: list[Wanted] = []
        for event in events:
            wanted += [Wanted(event, user) for user in await self.addressees(event)]
        await self._decide(after, {key.partition: key.position for key in done}, await self._away(wanted))
        return True

    async def addressees(self, event: Event) -> list[str]:
        """Who is told of a message, if not online."""
        message = event.message
        if is_operation(message.msg_type) or message.recalled:
            return []
        many = self._push_members_max + 1
        members = await self._store.members(event.conversation_id, "", many, message.seq)
        if len(members) == many:
            mentions = _mentions(message.msg_type, message.body)
            found = await self._store.memberships(event.conversation_id, mentions) if mentions else {}
            members = [u for u, at in found.items() if not at.left and at.joined_seq < message.seq]
        others = [user for user in members if user != message.from_user]
        if not others:
            return []
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT user_id FROM im_user_state WHERE conversation_id = $1 AND user_id = ANY ($2)"
                " AND (muted_until > now() OR read_seq >= $3)",
                event.conversation_id,
                others,
                message.seq,
            )
        quiet = {row[0] for row in rows}
        return [user for user in others if user not in quiet]

    async def _away(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Those whose user has no live route now."""
        users = list(dict.fromkeys(one.user for one in wanted))
        online: set[str] = set()
        for at in range(0, len(users), ROUTES):
            part = users[at : at + ROUTES]
            for user, devices in zip(part, await self._routes.read_many(part), strict=True):
                if any(route.conn_id for route in devices.values()):
                    online.add(user)
        return [one for one in wanted if one.user not in online]

    async def _decide(self, after: Mapping[int, int], upto: Mapping[int, int], wanted: Sequence[Wanted]) -> None:
        """Writes the pushes and moves the cursors together; nothing where another owner was first."""
        async with self._database.connection() as connection, connection.transaction():
            moved = await connection.fetch(
                "UPDATE im_hook_cursor h SET position = p.upto"
                " FROM unnest($2::integer[], $3::bigint[], $4::bigint[]) AS p(partition, after, upto)"
                " WHERE h.hook = $1 AND h.partition = p.partition AND h.position = p.after RETURNING h.partition",
                PUSH,
                list(upto.keys()),
                [after[partition] for partition in upto],
                list(upto.values()),
            )
            ours = {row[0] for row in moved}
            rows = [
                (e.message.msg_id, user, e.conversation_id, e.message.seq, e.partition, e.position)
                for e, user in wanted
                if e.partition in ours
            ]
            if rows:
                await connection.execute(
                    "INSERT INTO im_push (msg_id, user_id, conversation_id, seq, partition, position)"
                    " SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[], $5::integer[],"
                    " $6::bigint[]) ON CONFLICT DO NOTHING",
                    *map(list, zip(*rows, strict=True)),
                )

    # ── handing over ─────────────────────────────────────────────────────────────────────────────────────────

    async def hand_over(self) -> bool:
        """Hands one page over; False: there was nothing. Raises Unavailable; then its rows are free again."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "UPDATE im_push p SET claimed_until = now() + make_interval(secs => $2) FROM ("
                "   SELECT msg_id, user_id FROM im_push WHERE partition = ANY ($1) AND claimed_until < now()"
                "   ORDER BY partition, position LIMIT $3 FOR UPDATE SKIP LOCKED) free"
                " WHERE p.msg_id = free.msg_id AND p.user_id = free.user_id"
                " RETURNING p.partition, p.position, p.msg_id, p.user_id, p.conversation_id, p.seq",
                list(self._owners.held),
                CLAIM_S,
                PAGE,
            )
        if not rows:
            return False
        rows.sort(key=tuple)
        claimed = [(row[2], row[3]) for row in rows]
        try:
            pushes = await self._shown([(row[2], row[3], row[4], row[5]) for row in rows])
            if pushes:
                await self._post.send({"pushes": pushes})
                metrics.HOOKS.labels("push", "answered").inc()
        except Unavailable:
            await self._each(claimed, "UPDATE im_push p SET claimed_until = '-infinity'")
            raise
        await self._each(claimed, "DELETE FROM im_push p USING")
        return True

    async def _each(self, claimed: Iterable[tuple[int, str]], statement: str) -> None:
        given = "unnest($1::bigint[], $2::text[]) AS c(msg_id, user_id)"
        glue = given if statement.endswith("USING") else f"FROM {given}"
        async with self._database.connection() as connection:
            await connection.execute(
                f"{statement} {glue} WHERE p.msg_id = c.msg_id AND p.user_id = c.user_id",
                *map(list, zip(*claimed, strict=True)),
            )

    async def _shown(self, rows: Sequence[tuple[int, str, str, int]]) -> list[dict[str, Any]]:
        """What a push service needs, without messages that are gone by now."""
        places = list(dict.fromkeys((conversation_id, seq) for _, _, conversation_id, seq in rows))
        messages = {}
        for event in await self._feed.look_up(places):
            messages[event.conversation_id, event.message.seq] = event.message
        async with self._database.connection() as connection:
            found = await connection.fetch(
                "SELECT conversation_id, kind, title FROM im_conversation WHERE conversation_id = ANY ($1)",
                list({conversation_id for conversation_id, _ in places}),
            )
        names = {row[0]: {"kind": row[1], "title": row[2]} for row in found}
        unread = {user: await self._unread(user) for user in dict.fromkeys(row[1] for row in rows)}
        shown = []
        for msg_id, user, conversation_id, seq in rows:
            message = messages.get((conversation_id, seq))
            if message is None or message.recalled:
                continue
            shown.append(
                {
                    "push_id": f"{msg_id}:{user}",
                    "user": user,
                    "unread": unread[user],
                    "conversation": {"conversation_id": conversation_id, **names.get(conversation_id, {})},
                    "message": render.stored(conversation_id, message),
                }
            )
        return shown


class Webhooks:
    """The hooks that are told afterwards, together. posts: whom each of them asks; closed with them."""

    def __init__(self, cursors: Cursors, told: Sequence[AfterHook | Pushes], posts: Sequence[Post]) -> None:
        self._cursors = cursors
        self._told = told
        self._posts = posts
        self._begun = asyncio.Event()

    async def begin(self) -> None:
        """Before the first batch; waits for the database."""
        hooks = [PUSH if isinstance(one, Pushes) else AFTER for one in self._told]
        while hooks:
            try:
                await self._cursors.begin(hooks)
                break
            except Unavailable:
                await asyncio.sleep(BACK_OFF_S[0])
        self._begun.set()

    async def run(self) -> None:
        """Tells, once it has begun; until cancelled."""
        await self._begun.wait()
        async with asyncio.TaskGroup() as tasks:
            for one in self._told:
                tasks.create_task(forever("hook", one.run()))
            tasks.create_task(forever("hook", asyncio.Event().wait()))  # where none is set

    async def close(self) -> None:
        """Closes their connections."""
        for post in self._posts:
            await post.close()


def build(settings: MsgSettings, shared: Secret, service: MsgService, database: Database, routes: Routes) -> Webhooks:
    """As the settings say."""
    cursors = Cursors(database)
    told: list[AfterHook | Pushes] = []
    posts: list[Post] = []
    if settings.after_url and service.feed is not None:
        posts.append(Post(settings.after_url, shared, POST_S))
        told.append(AfterHook(service.feed, cursors, service.owners, posts[-1]))
    if settings.push_url and service.feed is not None:
        posts.append(Post(settings.push_url, shared, POST_S))
        told.append(
            Pushes(
                service.feed,
                cursors,
                service.owners,
                database,
                routes,
                posts[-1],
                service.states.unread,
                push_members_max=settings.push_members_max,
            )
        )
    return Webhooks(cursors, told, posts)


async def _repeated(hook: str, step: Callable[[], Awaitable[bool]]) -> None:
    """Steps for ever; backs off while it fails."""
    log = logs.get("hook")
    failures = 0
    while True:
        try:
            wait_s = 0.0 if await step() else LOOK_S
            failures = 0
        except Unavailable as e:
            metrics.HOOKS.labels(hook, "failed").inc()
            log.warning("will be tried again", hook=hook, reason=str(e))
            wait_s = BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)]
            failures += 1
        await asyncio.sleep(wait_s)


def _mentions(msg_type: int, body: bytes) -> list[str]:
    if msg_type != content.RICH:
        return []
    try:
        # The sender's words: what is no name is nobody's, and the database may be unable to look it up.
        return [user for user in dict.fromkeys(content.Rich.FromString(body).mentions) if is_user_id(user)]
    except DecodeError:
        return []
