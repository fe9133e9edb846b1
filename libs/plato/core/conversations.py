"""Names of users and conversations, and which are well formed."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Final
from zlib import crc32

from plato.api import names
from plato.core.visible import is_plain

MAX_ID_BYTES: Final = 64
MAX_TITLE_BYTES: Final = 128
DIALOGUE_PREFIX: Final = "d:"
GROUP_PREFIX: Final = "g:"
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]").search  # asked for each name of each message


def dialogue_id(a: str, b: str) -> str:
    """The conversation_id of two users: "d:" + base64url(SHA-256 of both, sorted, each length-prefixed). 45 bytes."""
    digest = hashlib.sha256()
    for user in sorted((a.encode(), b.encode())):
        digest.update(len(user).to_bytes(2, "big") + user)
    return DIALOGUE_PREFIX + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def group_id(creator: str, client_msg_id: bytes) -> str:
    """The conversation_id of a group that a person makes: "g:" + base64url(SHA-256 of the creator, length-prefixed, and the
    16 bytes of the creating message's client_msg_id). 45 bytes. Nobody else can have made it."""
    user = creator.encode()
    digest = hashlib.sha256(len(user).to_bytes(2, "big") + user + client_msg_id).digest()
    return GROUP_PREFIX + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def is_user_id(user: str) -> bool:
    """1 to 64 bytes of UTF-8, plain (plato.core.visible): no two of them look alike but for their letters."""
    return _fits(user) and is_plain(user)


def why_no_person(user: str) -> str:
    """Why nobody may speak as this user; "": a person may."""
    if not is_user_id(user):
        return "is no user_id: 1 to 64 bytes of UTF-8 without what is not seen or turns the direction of text"
    if user.startswith(names.GUEST_PREFIX):
        return f"begins with {names.GUEST_PREFIX}, as only guests do"
    if user == names.ADMIN_USER:
        return f"is {names.ADMIN_USER}, which is kept for what administrators do"
    return ""


def why_unreachable(user: str) -> str:
    """Why nobody can ever read what is sent to this user; "": somebody may."""
    return "" if user.startswith(names.GUEST_PREFIX) and is_user_id(user) else why_no_person(user)


def is_conversation_id(conversation: str) -> bool:
    """1 to 64 bytes of UTF-8 without a control character."""
    return _fits(conversation) and _CONTROL(conversation) is None


def is_title(title: str) -> bool:
    """At most 128 bytes of UTF-8, plain (plato.core.visible); may be empty, but not look so."""
    try:
        size = len(title.encode())
    except UnicodeEncodeError:
        return False
    return size <= MAX_TITLE_BYTES and is_plain(title) and (not title or not title.isspace())


def is_open_id(conversation: str) -> bool:
    """True for the id of an open conversation: neither a dialogue's nor a group's."""
    return not conversation.startswith((DIALOGUE_PREFIX, GROUP_PREFIX))


def partition_of(conversation: str, partitions: int) -> int:
    """The bus partition, 0..partitions-1."""
    return crc32(conversation.encode()) % partitions


def _fits(name: str) -> bool:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return 1 <= size <= MAX_ID_BYTES
