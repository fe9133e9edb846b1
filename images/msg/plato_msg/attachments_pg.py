"""SQL of attachments: their rows, who may read them (gates_pg.READABLE), and what nobody uses any more.

Memory: one row, or one page of what is to be removed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from plato_msg.gates_pg import READABLE
from plato_msg.store_reads import Database

_ROW: Final = (
    "attachment_id, owner, name, media_type, size_bytes, sha256, width, height, thumbnail_type, thumbnail_size"
)


class Stored(NamedTuple):
    """A row of im_attachment. thumbnail_type: "" where there is none."""

    attachment_id: str
    owner: str
    name: str
    media_type: str
    size_bytes: int
    sha256: bytes
    width: int = 0
    height: int = 0
    thumbnail_type: str = ""
    thumbnail_size: int = 0


class PgAttachments:
    """Rows of attachments. Every method raises Unavailable, and begin Unstorable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def unused_bytes(self, owner: str) -> int:
        """What a user has uploaded and not sent."""
        async with self._database.connection() as connection:
            found = await connection.fetchval(
                "SELECT coalesce(sum(size_bytes), 0)::bigint FROM im_attachment"
                " WHERE owner = $1 AND unused_since IS NOT NULL",
                owner,
            )
        return int(found)

    async def begin(self, row: Stored) -> None:
        """Before the first byte is stored: nobody finds it yet."""
        async with self._database.connection() as connection:
            await connection.execute(
                f"INSERT INTO im_attachment ({_ROW}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)", *row
            )

    async def finish(self, attachment_id: str) -> None:
        """All its bytes are stored."""
        async with self._database.connection() as connection:
            await connection.execute("UPDATE im_attachment SET stored = true WHERE attachment_id = $1", attachment_id)

    async def find(self, attachment_id: str, reader: str | None) -> Stored | None:
        """The attachment, if that user may read it; None: anybody may (authority)."""
        rule = "true" if reader is None else READABLE.format(reader="$2")
        async with self._database.connection() as connection:
            row = await connection.fetchrow(
                f"SELECT {_ROW} FROM im_attachment a WHERE a.attachment_id = $1 AND a.stored AND {rule}",
                attachment_id,
                *([] if reader is None else [reader]),
            )
        return Stored(*row) if row is not None else None

    async def unused(self, older_than_s: float, limit: int) -> list[str]:
        """Attachments that nobody uses for so long."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT attachment_id FROM im_attachment"
                " WHERE unused_since < now() - make_interval(secs => $1) ORDER BY unused_since LIMIT $2",
                older_than_s,
                limit,
            )
        return [row[0] for row in rows]

    async def forget(self, attachment_ids: Collection[str], older_than_s: float) -> list[str]:
        """Hides those of them that still are unused, for good: a message that comes now is refused. Returns them. One that
        another message uses still counts as used again."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                # FOR UPDATE: not while a batch that references it holds it.
                "WITH held AS MATERIALIZED (SELECT attachment_id FROM im_attachment WHERE attachment_id = ANY ($1)"
                "   AND unused_since < now() - make_interval(secs => $2) FOR UPDATE SKIP LOCKED),"
                " judged AS (SELECT h.attachment_id, EXISTS (SELECT FROM im_attachment_use u"
                "   WHERE u.attachment_id = h.attachment_id) AS used FROM held h)"
                " UPDATE im_attachment a SET stored = a.stored AND j.used,"
                "   unused_since = CASE WHEN j.used THEN NULL ELSE a.unused_since END"
                " FROM judged j WHERE a.attachment_id = j.attachment_id RETURNING a.attachment_id, j.used",
                list(attachment_ids),
                older_than_s,
            )
        return [row[0] for row in rows if not row[1]]

    async def remove(self, attachment_ids: Sequence[str]) -> None:
        """Their blobs are gone: the rows go too."""
        async with self._database.connection() as connection, connection.transaction():
            await connection.execute(
                "DELETE FROM im_attachment_use WHERE attachment_id = ANY ($1)", list(attachment_ids)
            )
            await connection.execute("DELETE FROM im_attachment WHERE attachment_id = ANY ($1)", list(attachment_ids))
