"""SQL of friends. One transaction per act: both users' rows of im_user are locked in the order of user_ids, both rows of the
relation are read, judged and written, and the version of each user who sees a change is raised.

Memory: one page of a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, cast

from plato.core.codes import Code
from plato.core.errors import PeerError
from plato.wire.v1 import client_pb2 as wire

from plato_msg.core import friendship
from plato_msg.core.friendship import Act, Refused, Side
from plato_msg.store_pg import Connection, Database
from plato_msg.userstate_pg import Entry, raise_versions

MOST: Final = 5_000
"""Relations of one user: friends, requests of either side, and blocked users."""


class Friend(NamedTuple):
    """What a user sees of another one. status: of FriendState."""

    user: str
    status: int
    words: str
    version: int = 0

    def state(self) -> wire.FriendState:
        """As STATE tells it."""
        # The numbers are the wire's own.
        status = cast("wire.FriendState.Status.ValueType", self.status)
        return wire.FriendState(user=self.user, status=status, words=self.words)


class Impossible(PeerError):
    """The act does not fit what the two are to each other; says what does."""

    def __init__(self, why: str) -> None:
        super().__init__(Code.NOT_ALLOWED, why)
        self.why = why


class PgFriends:
    """Relations and who may write to whom. Every method raises Unavailable. A Source of what a user's devices share."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def act(self, act: Act, user: str, other: str, words: str = "") -> dict[str, Friend]:
        """Does it; {user: what he sees of the other now} of the user himself, and of the other where he sees a change. The
        version of what did not change is 0. Raises Impossible."""
        async with self._database.connection() as connection, connection.transaction():
            done = await _act(connection, act, user, other, words)
        if isinstance(done, Refused):  # not within the block: what is raised there breaks the connection
            raise Impossible(done.why)
        return done

    async def friend(self, user: str, other: str) -> Friend | None:
        """What the user sees of one other; None: nothing."""
        async with self._database.connection() as connection:
            row = await connection.fetchrow(
                "SELECT relation, blocked, words, version FROM im_friend WHERE user_id = $1 AND other_id = $2",
                user,
                other,
            )
        if row is None:
            return None
        status, words = Side(*tuple(row)[:3]).seen
        return Friend(other, status, words, row[3]) if status != friendship.NONE else None

    async def page(self, user: str, status: int | None, after: str, limit: int) -> list[Friend]:
        """Whom the user sees behind `after`, by id, at most `limit`; status None: all that are anything to him."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT other_id, relation, blocked, words, version FROM im_friend WHERE user_id = $1 AND other_id > $2"
                " AND CASE WHEN blocked THEN $5 ELSE relation END"
                "   = ANY (CASE WHEN $3::integer IS NULL THEN ARRAY[1, 2, 3, 4] ELSE ARRAY[$3::integer] END)"
                " ORDER BY other_id LIMIT $4",
                user,
                after,
                status,
                limit,
                friendship.BLOCKED,
            )
        return [Friend(row[0], *Side(*tuple(row)[1:4]).seen, row[4]) for row in rows]

    async def since(self, connection: Connection, user: str, version: int, limit: int) -> Sequence[Entry]:
        """See plato_msg.userstate_pg.Source."""
        rows = await connection.fetch(
            "SELECT other_id, relation, blocked, words, version FROM im_friend WHERE user_id = $1 AND version > $2"
            " ORDER BY version LIMIT $3",
            user,
            version,
            limit,
        )
        return [Entry(row[4], Friend(row[0], *Side(*tuple(row)[1:4]).seen).state()) for row in rows]

    async def friends_only(self, user: str) -> bool | None:
        """What the user chose; None: nothing."""
        async with self._database.connection() as connection:
            chosen: bool | None = await connection.fetchval("SELECT friends_only FROM im_user WHERE user_id = $1", user)
        return chosen

    async def set_friends_only(self, user: str, chosen: bool | None) -> None:
        """Who may write to him from now on; None: as the platform says."""
        async with self._database.connection() as connection:
            await connection.execute(
                "INSERT INTO im_user (user_id, friends_only) VALUES ($1, $2)"
                " ON CONFLICT (user_id) DO UPDATE SET friends_only = EXCLUDED.friends_only",
                user,
                chosen,
            )


async def _act(connection: Connection, act: Act, user: str, other: str, words: str) -> dict[str, Friend] | Refused:
    await raise_versions(connection, dict.fromkeys(sorted((user, other)), 0))  # the locks
    rows = await connection.fetch(
        "SELECT user_id, relation, blocked, words FROM im_friend WHERE (user_id, other_id) IN (($1, $2), ($2, $1))",
        user,
        other,
    )
    found = {row[0]: Side(*tuple(row)[1:]) for row in rows}
    before = {user: found.get(user, Side()), other: found.get(other, Side())}
    judged = friendship.judge(act, before[user], before[other], words)
    if isinstance(judged, Refused):
        return judged
    after = dict(zip((user, other), judged, strict=True))
    if before[user] == Side() != after[user] and await _count(connection, user) >= MOST:
        return Refused(f"you have {MOST} friends, requests and blocked users; remove some")
    changed = [name for name in (user, other) if after[name].seen != before[name].seen]
    versions = await raise_versions(connection, dict.fromkeys(changed, 1))
    for name, peer in ((user, other), (other, user)):
        if after[name] != before[name]:
            await connection.execute(
                "INSERT INTO im_friend AS f (user_id, other_id, version, relation, blocked, words)"
                " VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (user_id, other_id) DO UPDATE SET"
                " version = greatest(f.version, EXCLUDED.version), relation = EXCLUDED.relation,"
                " blocked = EXCLUDED.blocked, words = EXCLUDED.words",
                name,
                peer,
                versions.get(name, 0),
                *after[name],
            )
    told = {user: Friend(other, *after[user].seen, versions.get(user, 0))}
    if other in versions:
        told[other] = Friend(user, *after[other].seen, versions[other])
    return told


async def _count(connection: Connection, user: str) -> int:
    return int(
        await connection.fetchval(
            "SELECT count(*) FROM im_friend WHERE user_id = $1 AND (relation > 0 OR blocked)", user
        )
    )
