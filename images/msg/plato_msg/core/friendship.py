"""What two people are to each other, and what each sees of it. A pair is judged as it stands, under both users' locks.

    relation   one thing, told from either side: none; asked ⇄ waiting; friends
    blocked    each side's own: it hides the relation from this side, and from the other side it hides itself

So who is blocked asks, waits and is a friend as before, as far as he can see, and unblocking shows what came of it
meanwhile. Two requests that cross make friends, in whichever order they come; each act is done once, however often it is
asked for.

    act       none            asked       waiting     friends
    request   asked           asked       friends     friends
    accept    –               –           friends     friends
    refuse    none            –           none        –
    remove    none            none        none        none
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

Act: TypeAlias = Literal["request", "accept", "refuse", "remove", "block", "unblock"]
ACTS: Final[tuple[Act, ...]] = ("request", "accept", "refuse", "remove", "block", "unblock")

NONE, ASKED, WAITING, FRIENDS, BLOCKED = range(5)
"""As FriendState.Status; a relation is never BLOCKED."""
COUNTERPART: Final = (NONE, WAITING, ASKED, FRIENDS)
"""The same relation, from the other side."""

_AFTER: Final[dict[Act, dict[int, int]]] = {
    "request": {NONE: ASKED, ASKED: ASKED, WAITING: FRIENDS, FRIENDS: FRIENDS},
    "accept": {WAITING: FRIENDS, FRIENDS: FRIENDS},
    "refuse": {NONE: NONE, WAITING: NONE},
    "remove": {NONE: NONE, ASKED: NONE, WAITING: NONE, FRIENDS: NONE},
}


class Side(NamedTuple):
    """One user's row. words: of the request, on both sides."""

    relation: int = NONE
    blocked: bool = False
    words: str = ""

    @property
    def seen(self) -> tuple[int, str]:
        """The status and the words that this side is told."""
        return (BLOCKED, "") if self.blocked else (self.relation, self.words)


class Refused(NamedTuple):
    """Why an act is not possible; in words, since the fix is another act."""

    why: str


def judge(act: Act, own: Side, other: Side, words: str = "") -> tuple[Side, Side] | Refused:
    """Both sides after an act of the owner of `own`. other.blocked changes nothing that he is told."""
    if act in ("block", "unblock"):
        return own._replace(blocked=act == "block"), other
    if own.blocked and act != "remove":
        return Refused("you block this user; unblock first")
    after = _AFTER[act].get(own.relation)
    if after is None:
        return Refused(
            "you are friends; remove the friend instead"
            if own.relation == FRIENDS
            else "there is no request of this user to you"
        )
    if after == own.relation:
        return own, other
    kept = words if after == ASKED else ""
    return Side(after, own.blocked, kept), Side(COUNTERPART[after], other.blocked, kept)
