"""The chat's full screen: who and how connected above, the conversation with its ticks in the middle, the draft below.

… waits in this device's outbox   ✓ the platform holds it   ✓✓ it has its place   ✗ refused, with the reason

    keys ─▸ Draft ─▸ lines to send, in order ─▸ the client's outbox
    the client's messages, states and ticks ─▸ what is drawn

Enter takes the draft away at once, so that what is typed next is another message; sending waits for the disk. Memory: the
transcript's, and what was typed and is not in the outbox yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import date
from typing import ClassVar, Final

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.scrollbar import ScrollDown, ScrollTo, ScrollUp
from textual.widgets import Footer, Static, TextArea
from textual.worker import WorkerFailed

from plato.cli.transcript import Transcript, new_days, printable, state_words
from plato.client import Client, ClientError, Phase, Stopped

LOOK_S: Final = 0.2
"""How often the ticks of what is on its way, and the time to the next attempt, are looked at."""
LEAVE_S: Final = 2.0
"""How long leaving waits until what was typed is in the outbox."""
PAGE: Final = 50
_COLOURS: Final = {Phase.ONLINE: "green", Phase.STOPPED: "red"}
_INDENT: Final = " " * 9 + "│ "
"""Before each further line of one message, so that no message looks like two."""


class Talk(VerticalScroll, can_focus=False):
    """The conversation. It stays at its end until the user scrolls up, whatever comes and whatever size the terminal has.

    What the user does decides, against the end that they see; where the view happens to stand does not, for it lags behind
    what was drawn last.
    """

    def __init__(self, *children: Static, changed: Callable[[], None], id: str) -> None:
        """changed: called when `following` is another one."""
        super().__init__(*children, id=id)
        self.following = True
        self._changed = changed

    def follow(self, following: bool = True) -> None:
        """To the end, and stay there; or stay where we are."""
        if following != self.following:
            self.following = following
            self._changed()
        self.pin()

    def pin(self) -> None:
        """Something changed size: the end is elsewhere."""
        if self.following:
            self.scroll_end(animate=False)

    def page(self, down: bool) -> None:
        """The user turns a page."""
        height = self.scrollable_content_region.height
        self._moves(height if down else -height)
        if down:
            self.scroll_page_down(animate=False)
        else:
            self.scroll_page_up(animate=False)

    def on_resize(self, event: events.Resize) -> None:
        """textual's call."""
        self.pin()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """textual's call."""
        self._moves(-self.app.scroll_sensitivity_y)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """textual's call."""
        self._moves(self.app.scroll_sensitivity_y)

    def on_scroll_up(self, event: ScrollUp) -> None:
        """textual's call: a click above the scrollbar's handle."""
        self._moves(-self.scrollable_content_region.height)

    def on_scroll_down(self, event: ScrollDown) -> None:
        """textual's call: a click below it."""
        self._moves(self.scrollable_content_region.height)

    def on_scroll_to(self, event: ScrollTo) -> None:
        """textual's call: the handle is dragged."""
        if event.y is not None:
            self._moves(event.y - self.scroll_target_y)

    def _moves(self, by: float) -> None:
        if self.max_scroll_y <= 0 or not by:
            return
        following = by > 0 and self.scroll_target_y + by >= self.max_scroll_y
        if following != self.following:
            self.following = following
            self._changed()


class Lines(Static):
    """What is said; tells its Talk when that takes more or less room."""

    def on_resize(self, event: events.Resize) -> None:
        """textual's call."""
        if isinstance(self.parent, Talk):
            self.parent.pin()


class Draft(TextArea):
    """What is being typed: Enter sends it; a paste may have many lines."""

    def __init__(self, placeholder: str, submit: Callable[[str], None], touched: Callable[[], None]) -> None:
        """submit: called with what Enter took away. touched: called at each key and paste."""
        super().__init__(placeholder=Content(placeholder), highlight_cursor_line=False)
        self._submit = submit
        self._touched = touched

    def on_key(self, event: events.Key) -> None:
        """textual's call. ctrl+j is the Enter of a line that was typed before the screen was up: the terminal's own
        editing made a newline of it."""
        self._touched()
        if event.key in ("enter", "ctrl+j"):
            event.prevent_default()
            event.stop()
            words = self.text
            self.load_text("")
            if words.strip():
                self._submit(words)

    async def on_paste(self, event: events.Paste) -> None:
        """textual's call. Terminals paste the end of a line as a return."""
        event.prevent_default()
        event.stop()
        self._touched()
        if not self.read_only:
            self.insert(event.text.replace("\r\n", "\n").replace("\r", "\n"))

    def put_back(self, words: str) -> None:
        """What could not be sent, before what was typed since."""
        self.load_text(f"{words}\n{self.text}" if self.text else words)
        self.move_cursor(self.document.end)


class ChatScreen(App[int]):
    """One conversation on the whole terminal. Returns 0, or 1 if a final code ended it."""

    CSS = """
    #head { height: 1; background: $panel; padding: 0 1; }
    #talk { height: 1fr; padding: 0 1; scrollbar-size-vertical: 1; }
    #note { height: 1; color: $text-muted; padding: 0 1; }
    Draft { height: auto; min-height: 3; max-height: 8; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c,ctrl+q", "leave", "Leave", priority=True),
        Binding("pageup", "older", "Older", priority=True),
        Binding("pagedown", "newer", "Newer", priority=True),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, client: Client, conversation_id: str, me: str, to: str | None) -> None:
        super().__init__()
        self.failure: Exception | None = None
        """What nobody expected and what ended the screen; the caller tells it."""
        self._client = client
        self._conversation_id = conversation_id
        self._me = me
        self._to = to
        self._transcript = Transcript()
        self._typed: asyncio.Queue[str] = asyncio.Queue()
        self._words = ""  # of the note
        self._unseen = False  # something came below what is shown
        self._today = date.today()

    def compose(self) -> ComposeResult:
        """textual's call."""
        yield Static(id="head")
        yield Talk(Lines(id="lines"), changed=self._followed, id="talk")
        yield Static(id="note")
        yield Draft(f"to {self._to or self._conversation_id}", self._typed.put_nowait, self._client.hurry)
        yield Footer()

    def on_mount(self) -> None:
        """textual's call. Keys of before wait in the terminal; the first of them finds the draft focused."""
        self.screen.set_focus(self.query_one(Draft))
        self._head()
        for work in (self._read(), self._states(), self._send()):
            self.run_worker(work)
        self.set_interval(LOOK_S, self._look)

    def action_leave(self) -> None:
        """Ends the chat, once the draft has seen the keys that came before this one."""
        self.query_one(Draft).call_later(self._leave)

    async def action_older(self) -> None:
        """Scrolls up; at the top, older messages are fetched."""
        talk = self.query_one(Talk)
        first = self._transcript.first_seq
        if talk.scroll_y <= 0 and first is not None:
            if self._transcript.add(await self._client.history(self._conversation_id, before=first, limit=PAGE)):
                talk.follow(False)
                self._draw()
        else:
            talk.page(down=False)

    def action_newer(self) -> None:
        """Scrolls down."""
        self.query_one(Talk).page(down=True)

    async def _leave(self) -> None:
        try:
            await asyncio.wait_for(self._typed.join(), LEAVE_S)
        except TimeoutError:
            pass  # the disk does not answer
        self.exit(1 if self._client.state.phase is Phase.STOPPED else 0)

    async def _send(self) -> None:
        while True:
            words = await self._typed.get()
            try:
                if self._to is not None:
                    await self._client.send(words, to=self._to)
                else:
                    await self._client.send(words, conversation_id=self._conversation_id)
            except (ClientError, ValueError) as e:  # ValueError: characters that are no text
                taken = [words]
                while not self._typed.empty():  # what stands behind it keeps its place
                    taken.append(self._typed.get_nowait())
                    self._typed.task_done()
                self.query_one(Draft).put_back("\n".join(taken))
                self._note(f"not sent: {e}")
            else:
                self._note("")
                self.query_one(Talk).follow()
                self._look()
            finally:
                self._typed.task_done()

    async def _read(self) -> None:
        try:
            self._transcript.add(await self._client.history(self._conversation_id, limit=PAGE))
            self._look(changed=True)
            async for message in self._client.messages():
                if message.conversation_id == self._conversation_id:
                    if self._transcript.add([message]) and not self.query_one(Talk).following:
                        self._unseen = True
                        self._note(self._words)
                    self._look(changed=True)
                elif not message.mine:
                    self._note(f"{message.from_user} wrote elsewhere: {printable(message.text)[:60]}")
        except Stopped:
            pass  # the head says why

    async def _states(self) -> None:
        async for state in self._client.states():
            self._head()
            if state.phase is Phase.STOPPED:
                self.query_one(Draft).disabled = True

    def _look(self, changed: bool = False) -> None:
        """Looks at what is on its way and what time it is, and draws if anything is different."""
        if self._client.state.phase is Phase.OFFLINE:
            self._head()
        waiting = self._client.unsettled(self._conversation_id), self._client.refused(self._conversation_id)
        today = date.today()
        if self._transcript.waiting(*waiting) or changed or today != self._today:
            self._today = today
            self._draw()

    def _head(self) -> None:
        state = self._client.state
        head = Text.assemble(
            (f"{self._me} → {self._to or self._conversation_id}", "bold"),
            "   ",
            ("● ", _COLOURS.get(state.phase, "yellow")),
            state_words(state, self._client.next_try_s),
        )
        self.query_one("#head", Static).update(head)

    def _draw(self) -> None:
        drawn = Text()
        lines = self._transcript.lines()
        for line, day in zip(lines, new_days(lines, self._today), strict=True):
            if day is not None:
                drawn.append(f"── {day:%A, %d %B %Y} ──\n", "dim bold")
            drawn.append(f"{line.time or '        '} ", "dim")
            drawn.append(line.who, "bold cyan" if line.mine else "bold magenta")
            drawn.append(": " + line.text.replace("\n", f"\n{_INDENT}"))
            if line.tick:
                drawn.append(f"  {line.tick}", "red" if line.tick[0] == "✗" else "green")
            drawn.append("\n")
        self.query_one(Lines).update(drawn)
        self.query_one(Talk).pin()

    def _followed(self) -> None:
        """The user scrolled up, or is at the end again."""
        if self.query_one(Talk).following:
            self._unseen = False
        self._note(self._words)

    def _note(self, words: str) -> None:
        self._words = words
        note = Text("↓ new messages  ", "bold yellow") if self._unseen else Text()
        self.query_one("#note", Static).update(note.append(words, "not bold"))

    def _handle_exception(self, error: Exception) -> None:
        """textual's call, for whatever nobody caught: the chat's caller tells it in its own way."""
        if self.failure is None:
            self.failure = (
                error.error if isinstance(error, WorkerFailed) and isinstance(error.error, Exception) else error
            )
        super()._handle_exception(error)

    def _print_error_renderables(self) -> None:
        """textual's call at the end; it would print a traceback."""
        if self._exit_renderables and self.failure is None:  # its input thread died
            self.failure = RuntimeError("the terminal's input could not be read")
        self._exit_renderables.clear()
