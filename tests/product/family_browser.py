"""Browsers in the family: people at the chat page, who do through it what it offers, while processes are killed.

Window      one person's browser: writes, answers, edits, recalls, deletes, pins and mutes in the group and with the others
seen()      what its store (IndexedDB) and its list hold, for the checker
reads_as()  whether each conversation, opened, shows what the platform holds

A step that the page does not let happen in time (a message moved away under the pointer) is counted as missed.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from plato.client.content import is_operation, text_of
from plato.core.conversations import dialogue_id
from playwright.async_api import Error, Locator

from tests.faults import checker
from tests.faults.waiting import until
from tests.product import family_checker
from tests.product.browser import WAIT_MS, Person

STEP_MS: Final = 4_000
UNREAD_MOST: Final = 100
"""How far the page counts."""
GONE: Final = ("You recalled this message", "This message was recalled")
_STORE: Final = """
async user => {
  const asked = r => new Promise((yes, no) => { r.onsuccess = () => yes(r.result); r.onerror = () => no(r.error); });
  const db = await asked(indexedDB.open(`plato:${user}`));
  const names = ["conversation", "message", "outbox", "refused", "hidden"];
  const tx = db.transaction(names, "readonly");
  const found = await Promise.all(names.map(name => asked(tx.objectStore(name).getAll())));
  db.close();
  const hex = bytes => [...bytes].map(b => b.toString(16).padStart(2, "0")).join("");
  const plain = entry => ({ ...entry, body: hex(entry.body) });
  const [places, messages, outbox, refused, hidden] = found;
  return {
    places, hidden, messages: messages.map(plain), outbox: outbox.map(plain), refused: refused.map(r => plain(r.entry)),
  };
}
"""
_UNREAD: Final = """
() => Object.fromEntries([...document.querySelectorAll("nav .line")].map(line => [
  line.querySelector("b").textContent, parseInt(line.querySelector(".count")?.getAttribute("aria-label") ?? "0"),
]))
"""


@dataclass(frozen=True, slots=True)
class Written:
    """What a browser put into its outbox. client_id: its place there, from 1; 0 of what has its place in the conversation.
    refused: the platform said "stop" for good."""

    conversation_id: str
    client_msg_id: bytes
    body: bytes
    client_id: int
    refused: bool


class Window:
    """One person's browser. group: its id, once there is one."""

    def __init__(self, person: Person, number: int, others: tuple[str, ...]) -> None:
        self.person = person
        self.user = person.name
        self.number = number
        self.group = ""
        self.acts: dict[str, int] = {}
        self.missed = 0
        self._others = others
        self._page = person.page
        self._page.set_default_timeout(STEP_MS)
        self._at = ""
        self._said = 0

    # ── what its person does ─────────────────────────────────────────────────────────────────────────────

    async def act(self, chance: random.Random) -> None:
        """One step."""
        steps = [self._say] * 6 + [self._answer] * 2 + [self._edit] * 2
        steps += [self._recall, self._hide, self._pin, self._mute]
        # What must have been done comes soon: on a busy machine there are few steps.
        owed = [s for s in (self._say, self._edit, self._recall) if s.__name__.strip("_") in self.owed()]
        step: Callable[[random.Random], Any] = chance.choice(owed if owed and chance.random() < 0.5 else steps)
        try:
            if not self._at or chance.random() < 0.3:
                await self._turn(chance)
            await step(chance)
            name = step.__name__.strip("_")
            self.acts[name] = self.acts.get(name, 0) + 1
        except (Error, AssertionError):
            self.missed += 1
            self._at = ""
            with contextlib.suppress(Error):
                for _ in range(2):
                    await self._page.keyboard.press("Escape")

    def owed(self) -> set[str]:
        """What each browser must have done, and this one has not."""
        return {"say", "edit", "recall"} - set(self.acts)

    async def _turn(self, chance: random.Random) -> None:
        """To the group, or to a dialogue."""
        if chance.random() < 0.7:
            await self._line(self.group).click()
            self._at = self.group
            return
        other = chance.choice(self._others)
        line = self._line(dialogue_id(self.user, other), other)
        if await line.count():
            await line.click()
        else:
            await self.person.write_to(other)
        await self._page.get_by_role("main", name=f"Conversation with {other}").wait_for()
        self._at = dialogue_id(self.user, other)

    def _line(self, conversation_id: str, peer: str = "") -> Locator:
        name = re.compile(f"^{re.escape(peer)}$") if peer else re.compile("^family")
        return self._page.locator("nav .line", has=self._page.locator("b", has_text=name))

    async def _say(self, chance: random.Random) -> None:
        self._said += 1
        await self.person.say(f"window {self._said} of {self.user} {'y' * chance.randrange(100)}")

    async def _answer(self, chance: random.Random) -> None:
        bubble = self._page.locator("article.theirs").last
        await bubble.hover()
        await bubble.get_by_role("button", name="Reply").click()
        await self._say(chance)

    async def _edit(self, chance: random.Random) -> None:
        field = self._page.get_by_placeholder("Message")
        await field.press("ArrowUp")
        await self._page.get_by_text("Edit message").wait_for()
        await self._say(chance)

    async def _recall(self, chance: random.Random) -> None:
        await self._choose(self._page.locator("article.mine"), "Recall for everybody")

    async def _hide(self, chance: random.Random) -> None:
        await self._choose(self._page.locator("article"), "Delete for me")

    async def _choose(self, bubbles: Locator, choice: str) -> None:
        bubble = bubbles.last
        await bubble.hover()
        await bubble.get_by_role("button", name="Message", exact=True).click()
        await self._page.get_by_role("menuitem", name=choice).click()

    async def _pin(self, chance: random.Random) -> None:
        await self._of_conversation(re.compile("^(Pin to the top|Unpin)$"))

    async def _mute(self, chance: random.Random) -> None:
        await self._of_conversation(re.compile("^(Mute|Unmute)$"))

    async def _of_conversation(self, choice: re.Pattern[str]) -> None:
        await self._page.get_by_role("main").get_by_role("button", name="Conversation", exact=True).click()
        await self._page.get_by_role("menuitem", name=choice).click()

    # ── what became of it ────────────────────────────────────────────────────────────────────────────────

    async def written(self) -> list[Written]:
        """What it or another device of its person has written, in order of a conversation."""
        store = await self._store()
        found = [_written(m) for m in store["messages"] if m["fromUser"] == self.user]
        return found + [_written(e, name == "refused") for name in ("refused", "outbox") for e in store[name]]

    async def unsettled(self) -> int:
        """How many wait in its outbox."""
        return len((await self._store())["outbox"])

    async def seen(self) -> family_checker.Device:
        """What its store holds, and what its list says."""
        store = await self._store()
        counts: Mapping[str, int] = await self._page.evaluate(_UNREAD)
        stored = tuple(_row(m) for m in store["messages"])
        seen = {}
        for place in store["places"]:
            shared = family_checker.Shared(
                place["readSeq"],
                place["pinnedAtMs"],
                place["mutedUntilMs"],
                place["peerReadSeq"],
                place["clearedSeq"],
            )
            name = place["peer"] or place["title"]
            seen[place["conversationId"]] = family_checker.Seen(
                shared, counts.get(name, 0), place["title"], None, place["members"]
            )
        hidden = frozenset((h["conversationId"], h["seq"]) for h in store["hidden"])
        shown = tuple(r.row for r in stored)
        return family_checker.Device(self.user, self.number, shown, stored, hidden, seen, UNREAD_MOST)

    async def reads_as(self, family: family_checker.Family) -> None:
        """Opens each conversation and compares its end, as it can be read, with the database. Raises TimeoutError."""
        for other in ("", *self._others):
            conversation_id = dialogue_id(self.user, other) if other else self.group
            want = _texts(family, self.user, conversation_id)
            line = self._line(conversation_id, other)
            if not want and not await line.count():
                continue
            await self.person.page.keyboard.press("Escape")
            await line.click(timeout=WAIT_MS)
            shown: list[str] = []

            async def same(want: list[str] = want, shown: list[str] = shown) -> bool:
                shown[:] = [text.strip() for text in await self.person.shown()]
                return bool(shown) == bool(want) and shown == want[len(want) - len(shown) :]

            try:
                await until(same, 60.0)
            except TimeoutError:
                words = f"{self.user}'s page shows of {conversation_id} {shown[-5:]}, not {want[-5:]}"
                raise TimeoutError(words) from None

    async def _store(self) -> dict[str, Any]:
        found: dict[str, Any] = await self._page.evaluate(_STORE, self.user)
        return found


def _texts(family: family_checker.Family, user: str, conversation_id: str) -> list[str]:
    """What of a conversation its reader sees, by the database."""
    hidden = family.hidden.get(user, frozenset())
    cleared = family.shared.get((user, conversation_id), family_checker.Shared()).cleared_seq
    rows = sorted(
        (r for r in family.rows if r.row.conversation_id == conversation_id and r.row.seq > cleared),
        key=lambda r: r.row.seq,
    )
    return [
        GONE[r.row.from_user != user] if r.recalled else text_of(r.msg_type, r.row.body).strip()
        for r in rows
        if not is_operation(r.msg_type) and (conversation_id, r.row.seq) not in hidden
    ]


def _written(entry: Mapping[str, Any], refused: bool = False) -> Written:
    key, body = bytes.fromhex(entry["clientMsgId"]), bytes.fromhex(entry["body"])
    return Written(entry["conversationId"], key, body, int(entry.get("clientId", 0)), refused)


def _row(message: Mapping[str, Any]) -> family_checker.Row:
    row = checker.Row(
        message["conversationId"],
        message["seq"],
        message["prevSeq"],
        int(message["msgId"]),
        message["fromUser"],
        bytes.fromhex(message["clientMsgId"]),
        bytes.fromhex(message["body"]),
    )
    return family_checker.Row(row, message["msgType"], message["changedSeq"], message["recalled"])
