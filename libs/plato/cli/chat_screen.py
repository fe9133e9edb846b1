"""The chat's full screen: who and how connected above, the conversation with its ticks in the middle, the input below.

… waits in this device's outbox   ✓ the platform holds it   ✓✓ it has its place   ✗ refused, with the reason
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Input, Static

from plato.cli.transcript import Transcript, printable
from plato.client import Client, ClientError, Phase, State, Stopped

LOOK_S: Final = 0.2
"""How often the ticks of what is on its way are looked at."""
PAGE: Final = 50
_COLOURS: Final = {Phase.ONLINE: "green", Phase.STOPPED: "red"}


class ChatScreen(App[int]):
    """One conversation on the whole terminal. Returns 0, or 1 if a final code ended it."""

    CSS = """
    #head { height: 1; background: $panel; padding: 0 1; }
    #talk { height: 1fr; padding: 0 1; scrollbar-size-vertical: 1; }
    #note { height: 1; color: $text-muted; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c,ctrl+q", "leave", "Leave", priority=True),
        Binding("pageup", "older", "Older", priority=True),
        Binding("pagedown", "newer", "Newer", priority=True),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, client: Client, conversation_id: str, me: str, to: str | None) -> None:
        super().__init__()
        self._client = client
        self._conversation_id = conversation_id
        self._me = me
        self._to = to
        self._transcript = Transcript()
        self._tasks: list[asyncio.Task[None]] = []

    def compose(self) -> ComposeResult:
        """textual's call."""
        yield Static(id="head")
        with VerticalScroll(id="talk", can_focus=False):
            yield Static(id="lines")
        yield Static(id="note")
        yield Input(placeholder=f"to {self._to or self._conversation_id}")
        yield Footer()

    async def on_mount(self) -> None:
        """textual's call."""
        self._transcript.add(await self._client.history(self._conversation_id, limit=PAGE))
        self._look()
        self._draw(stick=True)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._states())]
        self.set_interval(LOOK_S, self._look)
        self.query_one(Input).focus()

    async def on_unmount(self) -> None:
        """textual's call."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        """textual's call: a line was typed."""
        words = event.value
        if not words.strip():
            return
        try:
            if self._to is not None:
                await self._client.send(words, to=self._to)
            else:
                await self._client.send(words, conversation_id=self._conversation_id)
        except ClientError as e:
            self._note(f"not sent: {e}")
            return
        event.input.value = ""
        self._look()

    def action_leave(self) -> None:
        """Ends the chat."""
        self.exit(1 if self._client.state.phase is Phase.STOPPED else 0)

    async def action_older(self) -> None:
        """Scrolls up; at the top, older messages are fetched."""
        talk = self.query_one("#talk", VerticalScroll)
        first = self._transcript.first_seq
        if talk.scroll_y <= 0 and first is not None:
            if self._transcript.add(await self._client.history(self._conversation_id, before=first, limit=PAGE)):
                self._draw(stick=False)
        else:
            talk.scroll_page_up(animate=False)

    def action_newer(self) -> None:
        """Scrolls down."""
        self.query_one("#talk", VerticalScroll).scroll_page_down(animate=False)

    async def _read(self) -> None:
        try:
            async for message in self._client.messages():
                if message.conversation_id == self._conversation_id:
                    self._transcript.add([message])
                    self._look(changed=True)
                elif not message.mine:
                    self._note(f"{message.from_user} wrote elsewhere: {printable(message.text)[:60]}")
        except Stopped:
            pass  # the head says why

    async def _states(self) -> None:
        async for state in self._client.states():
            self._head(state)
            if state.phase is Phase.STOPPED:
                self.query_one(Input).disabled = True

    def _look(self, changed: bool = False) -> None:
        """Looks at what is on its way, and draws if anything is different."""
        waiting = self._client.unsettled(self._conversation_id), self._client.refused(self._conversation_id)
        if self._transcript.waiting(*waiting) or changed:
            self._draw(stick=True)

    def _head(self, state: State) -> None:
        peer = self._to or self._conversation_id
        head = Text.assemble(
            (f"{self._me} → {peer}", "bold"), "   ", ("● ", _COLOURS.get(state.phase, "yellow")), str(state)
        )
        self.query_one("#head", Static).update(head)

    def _draw(self, stick: bool) -> None:
        """Draws the conversation; stick: stay at the end if the reader is there."""
        talk = self.query_one("#talk", VerticalScroll)
        at_end = talk.scroll_y >= talk.max_scroll_y - 1
        drawn = Text()
        for line in self._transcript.lines():
            drawn.append(f"{line.time or '        '} ", "dim")
            drawn.append(line.who, "bold cyan" if line.mine else "bold magenta")
            drawn.append(f": {line.text}")
            if line.tick:
                drawn.append(f"  {line.tick}", "red" if line.tick[0] == "✗" else "green")
            drawn.append("\n")
        self.query_one("#lines", Static).update(drawn)
        if stick and at_end:
            talk.scroll_end(animate=False)

    def _note(self, words: str) -> None:
        self.query_one("#note", Static).update(Text(words))
