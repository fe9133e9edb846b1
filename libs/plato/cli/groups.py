"""`plato group …`: groups of the embedded cluster, by orders to the admin port of msg."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

PATH = "/admin/v1/groups"
MEMBERS_PATH = "/admin/v1/groups/members"

Name = Annotated[str, typer.Argument(help="The group. Its conversation_id is g:NAME.")]
Members = Annotated[list[str] | None, typer.Option("--member", "-m", help="A user_id; may be repeated.")]
MembersFile = Annotated[
    Path | None, typer.Option("--members-file", "-f", help="A file with a user_id in each line.", show_default=False)
]


def body(name: str, key: str, **members: Iterable[str]) -> str:
    """The JSON of an order. key: names the order; empty: each one is new."""
    said: dict[str, Any] = {"name": name, **{field: list(users) for field, users in members.items()}}
    return json.dumps({**said, "key": key} if key else said)


def show_path(name: str, after: str, limit: int) -> str:
    """What to ask for a page of a group's members."""
    return f"{PATH}?{urlencode({'name': name, 'after': after, 'limit': limit})}"


def named(members: Sequence[str] | None, file: Path | None) -> list[str]:
    """Those of the options and of the file, each once. Raises LocalError: nobody, or who can be no member."""
    from plato.core.conversations import why_no_person
    from plato.local.folder import LocalError

    found = list(members or ())
    if file is not None:
        try:
            found += [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as e:
            raise LocalError(f"{file} cannot be read: {e}") from e
    if not found:
        raise LocalError("nobody is named; give --member USER, or --members-file FILE with a user_id in each line")
    for user in found:
        if why := why_no_person(user):
            raise LocalError(f"member {user!r}: it {why}")
    return list(dict.fromkeys(found))


def done(found: dict[str, Any], what: str) -> str:
    """The answer of an order in words."""
    if found["pending"]:
        return f"{found['conversation_id']}: accepted, and not done yet; `plato group show` tells"
    return f"{found['conversation_id']}: {what}"


def shown(found: dict[str, Any]) -> list[str]:
    """A group for people."""
    first = f"{found['conversation_id']}: {found['count']:,} members, {found['last_seq']:,} messages"
    return [first, *found["members"]]
