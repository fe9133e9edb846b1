"""What a line of a chat may do instead of being sent: it begins with a slash and one of these words.

A message is named by its number, as in `#12`; without one the newest that fits is meant. Another word behind a slash is
a mistake and not sent; a path as /etc/hosts is text, and so is what `//` begins: `//help` says /help. Nothing here draws or
prints.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from plato.cli.transcript import conversation_words, printable
from plato.client import Client, ClientError, Message, Rich, Role, Sent
from plato.client.content import is_operation
from plato.core.conversations import dialogue_id, is_user_id

HELP: Final = (
    "/reply [#N] TEXT · /edit [#N] TEXT · /recall [#N] · /hide [#N] · /list · /open NAME · /new TITLE USER … · /members ·"
    " /add USER … · /remove USER … · /role USER member|administrator|owner · /rename TITLE · /leave ·"
    " /pin · /unpin · /mute · /unmute"
)
BACK: Final = 500
"""How far back a message is looked for."""
_ROLES: Final = {role.name.lower(): role for role in Role}


class Mistake(Exception):
    """What was typed cannot be done; says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which conversation is shown. to: a dialogue's other user, else None."""

    conversation_id: str
    to: str | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """What a command came to: words for its user, messages on their way, and where to go."""

    words: Sequence[str] = ()
    sent: Sequence[Sent] = ()
    go: Place | None = None


class Commands:
    """The commands of one chat."""

    def __init__(self, client: Client, me: str) -> None:
        self._client = client
        self._me = me
        self._known: dict[str, Callable[[Place, str], Awaitable[Done]]] = {
            "help": self._help, "reply": self._reply, "edit": self._edit, "recall": self._recall, "hide": self._hide,
            "list": self._list, "open": self._open, "new": self._new, "members": self._members, "add": self._add,
            "remove": self._remove, "role": self._role, "rename": self._rename, "leave": self._leave,
            "pin": self._pin, "unpin": self._unpin, "mute": self._mute, "unmute": self._unmute,
        }  # fmt: skip

    def split(self, line: str) -> tuple[str, str]:
        """(the command's word or "", the rest or the text to send)."""
        word, _, rest = line.partition(" ")
        if word[:1] == "/" and word[1:2].isalpha() and "/" not in word[1:]:
            return word[1:], rest.strip()
        escaped = word[:2] == "//" and word[2:3].isalpha()
        return "", line[1:] if escaped else line

    def unknown(self, word: str) -> str:
        """Why a word is no command, in words; "" if it is one."""
        if word in self._known:
            return ""
        shown = printable(word[:40])
        return f"/{shown} is no command and was not sent; /help lists them, //{shown} says it as text"

    async def run(self, place: Place, word: str, rest: str) -> Done:
        """Does it. Raises Mistake, ClientError, ValueError."""
        if fault := self.unknown(word):
            raise Mistake(fault)
        return await self._known[word](place, rest)

    async def _help(self, place: Place, rest: str) -> Done:
        return Done(HELP.split("\n"))

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────

    async def _reply(self, place: Place, rest: str) -> Done:
        found, text = self._target(place, rest, mine=None)
        rich = Rich(self._text(text), reply=found.quote())
        if place.to is not None:
            return Done(sent=[await self._client.send(rich, to=place.to)])
        return Done(sent=[await self._client.send(rich, conversation_id=place.conversation_id)])

    async def _edit(self, place: Place, rest: str) -> Done:
        found, text = self._target(place, rest, mine=True)
        return Done(sent=[await self._client.edit(found.msg_id, self._text(text))])

    async def _recall(self, place: Place, rest: str) -> Done:
        found, _ = self._target(place, rest, mine=True)
        return Done(sent=[await self._client.recall(found.msg_id)])

    async def _hide(self, place: Place, rest: str) -> Done:
        found, _ = self._target(place, rest, mine=None)
        await self._client.http.hide(found.msg_id)
        return Done([f"#{found.seq} is hidden on your devices; the others keep it"])

    def _target(self, place: Place, rest: str, mine: bool | None) -> tuple[Message, str]:
        """The message that is meant, and what stands behind its number. mine: without a number, whose newest one; None: of
        somebody else."""
        number, _, behind = rest.partition(" ")
        if number[:1] == "#" and number[1:].isdecimal():
            found = self._client.message(place.conversation_id, int(number[1:]))
            if found is None or is_operation(found.msg_type):
                raise Mistake(f"there is no message {number} here")
            return found, behind.strip()
        known = self._client.conversation(place.conversation_id)
        newest = known.cursor if known is not None else 0
        for seq in range(newest, max(0, newest - BACK), -1):
            found = self._client.message(place.conversation_id, seq)
            if found is None or found.recalled or found.hidden or is_operation(found.msg_type):
                continue
            if found.mine is bool(mine):
                return found, rest
        raise Mistake("there is no message to do that with; name one by its number, as in #12")

    def _text(self, text: str) -> str:
        if not text.strip():
            raise Mistake("and the text?")
        return text

    # ── conversations ────────────────────────────────────────────────────────────────────────────────────

    async def _list(self, place: Place, rest: str) -> Done:
        return Done([conversation_words(c) for c in self._client.conversations() if c.newest_seq] or ["nothing yet"])

    async def _open(self, place: Place, rest: str) -> Done:
        go = self.find(rest)
        if go is None:
            raise Mistake(f"no conversation is called {printable(rest)!r}; /list shows them")
        return Done(go=go)

    def find(self, name: str) -> Place | None:
        """The conversation of a group's title, an id, or a user."""
        known = self._client.conversations()
        for c in known:
            if name and name in (c.title, c.conversation_id):
                return Place(c.conversation_id, c.peer or None)
        if is_user_id(name) and name != self._me and not name.startswith("g:"):
            there = dialogue_id(self._me, name)
            if any(c.conversation_id == there for c in known):
                return Place(there, name)
        return None

    async def _new(self, place: Place, rest: str) -> Done:
        title, *users = rest.split()
        sent = await self._client.create_group(title, users)
        return Done([f"{title} is made"], [sent], Place(sent.conversation_id))

    async def _members(self, place: Place, rest: str) -> Done:
        found = self._client.members(place.conversation_id)
        if not found and place.to is not None:
            return Done([f"{self._me}, {place.to}"])
        known = self._client.conversation(place.conversation_id)
        words = ", ".join(u if role is Role.MEMBER else f"{u} ({role.name.lower()})" for u, role in found.items())
        more = known.members - len(found) if known is not None else 0
        return Done([printable(words) + (f" and {more} who were in before you" if more > 0 else "")])

    async def _add(self, place: Place, rest: str) -> Done:
        return Done(sent=[await self._client.add(place.conversation_id, rest.split())])

    async def _remove(self, place: Place, rest: str) -> Done:
        return Done(sent=[await self._client.remove(place.conversation_id, rest.split())])

    async def _role(self, place: Place, rest: str) -> Done:
        user, _, name = rest.partition(" ")
        if name.strip() not in _ROLES:
            raise Mistake(f"/role USER {'|'.join(_ROLES)}")
        return Done(sent=[await self._client.give_role(place.conversation_id, user, _ROLES[name.strip()])])

    async def _rename(self, place: Place, rest: str) -> Done:
        return Done(sent=[await self._client.rename(place.conversation_id, self._text(rest))])

    async def _leave(self, place: Place, rest: str) -> Done:
        return Done(sent=[await self._client.leave(place.conversation_id)])

    async def _pin(self, place: Place, rest: str) -> Done:
        await self._client.http.pin(place.conversation_id)
        return Done(["pinned, on all your devices"])

    async def _unpin(self, place: Place, rest: str) -> Done:
        await self._client.http.pin(place.conversation_id, False)
        return Done(["not pinned any more"])

    async def _mute(self, place: Place, rest: str) -> Done:
        await self._client.http.mute(place.conversation_id)
        return Done(["muted, on all your devices"])

    async def _unmute(self, place: Place, rest: str) -> Done:
        await self._client.http.mute(place.conversation_id, 0)
        return Done(["not muted any more"])


async def try_command(commands: Commands, place: Place, word: str, rest: str) -> Done:
    """The same, with every refusal in words."""
    try:
        return await commands.run(place, word, rest)
    except (Mistake, ClientError, ValueError) as e:
        return Done([str(e) if commands.unknown(word) else f"/{word}: {e}"])
