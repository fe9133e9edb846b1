"""The chat's full screen: who and how connected above, the conversation with its ticks in the middle, the draft below.

… waits in this device's outbox   ✓ the platform holds it   ✓✓ it has its place (and who has read it)   ✗ refused, with the
reason. A line that begins with a slash is a command (chat_commands.py); the messages' numbers show while one is typed.

    keys ─▸ Draft ─▸ lines to send, in order ─▸ the client's outbox
    the client's messages, states and ticks ─▸ what is drawn

Enter takes the draft away at once, so that what is typed next is another message; sending waits for the disk. Memory: the
transcript's, and what was typed and is not in the outbox yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import date
from typing import ClassVar, Final

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.scrollbar import ScrollDown, ScrollTo, ScrollUp
from textual.widgets import Footer, OptionList, Static, TextArea
from textual.worker import WorkerFailed

from plato.cli.chat_commands import Commands, Place, try_command
from plato.cli.transcript import (
    Transcript,
    conversation_words,
    in_order,
    line_of,
    new_days,
    printable,
    state_words,
    where_words,
)
from plato.client import (
    Client,
    ClientError,
    Conversation,
    ConversationChanged,
    Message,
    MessageChanged,
    Overflowed,
    Phase,
    ReadBy,
    Refused,
    Sent,
    Stopped,
    Typing,
)
from plato.client.content import is_operation

LOOK_S: Final = 0.2
"""How often the ticks of what is on its way, and the time to the next attempt, are looked at."""
LEAVE_S: Final = 2.0
"""How long leaving waits until what was typed is in the outbox."""
PAGE: Final = 50
QUOTED: Final = 72
"""Characters of what is answered."""
WRITING_S: Final = 6.0
"""Who has not said so again for so long does not write any more."""
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


class Chats(ModalScreen["Conversation | None"]):
    """The list of conversations; Enter chooses, Escape goes back."""

    CSS = "Chats { align: center middle; } OptionList { width: 60%; max-height: 80%; border: round $primary; }"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,ctrl+g", "back", "Back", priority=True)]

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        super().__init__()
        self._conversations = conversations

    def compose(self) -> ComposeResult:
        """textual's call."""
        yield OptionList(*(Text(conversation_words(c)) for c in self._conversations))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """textual's call."""
        self.dismiss(self._conversations[event.option_index])

    def action_back(self) -> None:
        """Nothing was chosen."""
        self.dismiss(None)


class ChatScreen(App[int]):
    """One conversation on the whole terminal. Returns 0, or 1 if a final code ended it."""

    CSS = """
    #head { height: 1; background: $panel; padding: 0 1; }
    #talk { height: 1fr; padding: 0 1; scrollbar-size-vertical: 1; }
    #note { height: auto; min-height: 1; max-height: 8; color: $text-muted; padding: 0 1; }
    Draft { height: auto; min-height: 3; max-height: 8; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c,ctrl+q", "leave", "Leave", priority=True),
        Binding("ctrl+g", "chats", "Chats", priority=True),
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
        self._commands = Commands(client, me)
        self._transcript = Transcript(client.reply_of)
        self._writing: dict[str, float] = {}  # who writes here → until when that is believed
        self._unread = 0  # elsewhere
        self._numbers = False  # a command is being typed
        self._typed: asyncio.Queue[str] = asyncio.Queue()
        self._words = ""  # of the note
        self._unseen = False  # something came below what is shown
        self._today = date.today()

    def compose(self) -> ComposeResult:
        """textual's call."""
        self._bar, self._lines, self._below = Static(id="head"), Lines(id="lines"), Static(id="note")
        self._talk = Talk(self._lines, changed=self._followed, id="talk")
        self._draft = Draft(f"to {self._called()}", self._typed.put_nowait, self._touched)
        yield from (self._bar, self._talk, self._below, self._draft)
        yield Footer()

    def on_mount(self) -> None:
        """textual's call. Keys of before wait in the terminal; the first of them finds the draft focused."""
        self.screen.set_focus(self._draft)
        self._head()
        for work in (self._read(), self._states(), self._send(), self._changes()):
            self.run_worker(work)
        self.set_interval(LOOK_S, self._look)

    def action_leave(self) -> None:
        """Ends the chat, once the draft has seen the keys that came before this one."""
        self._draft.call_later(self._leave)

    async def action_older(self) -> None:
        """Scrolls up; at the top, older messages are fetched."""
        talk = self._talk
        first = self._transcript.first_seq
        if talk.scroll_y <= 0 and first is not None:
            if self._transcript.add(await self._client.history(self._conversation_id, before=first, limit=PAGE)):
                talk.follow(False)
                self._draw()
        else:
            talk.page(down=False)

    def action_newer(self) -> None:
        """Scrolls down."""
        self._talk.page(down=True)

    def action_chats(self) -> None:
        """Shows the conversations; Enter goes to one."""
        self.push_screen(Chats(in_order(c for c in self._client.conversations() if c.newest_seq)), self._chosen)

    def _chosen(self, found: Conversation | None) -> None:
        if found is not None:
            self.run_worker(self._go(Place(found.conversation_id, found.peer or None)))

    async def _go(self, place: Place) -> None:
        """To another conversation."""
        self._conversation_id, self._to = place.conversation_id, place.to
        self._transcript, self._unseen = Transcript(self._client.reply_of), False
        self._writing.clear()
        self._draft.placeholder = Content(f"to {self._called()}")
        self._talk.follow()
        self._transcript.add(await self._client.history(self._conversation_id, limit=PAGE))
        self._seen_by_peer()
        self._count()
        self._look(changed=True)
        self._head()

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._typed.join()
        except TimeoutError:
            pass  # the disk does not answer
        self.exit(1 if self._client.state.phase is Phase.STOPPED else 0)

    async def _send(self) -> None:
        while True:
            typed = await self._typed.get()
            word, words = self._commands.split(typed)
            if word:
                if self._commands.unknown(word):
                    self._draft.put_back(typed)  # to be mended
                await self._command(word, words)
                continue
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
                self._draft.put_back("\n".join(taken))
                self._note(f"not sent: {e}")
            else:
                self._note("")
                self._talk.follow()
                self._look()
            finally:
                self._typed.task_done()

    async def _command(self, word: str, rest: str) -> None:
        try:
            done = await try_command(self._commands, Place(self._conversation_id, self._to), word, rest)
            self._note(" · ".join(done.words))
            for sent in done.sent:
                self.run_worker(self._outcome(word, sent))
            if done.go is not None:
                await self._go(done.go)
        finally:
            self._typed.task_done()

    async def _outcome(self, word: str, sent: Sent) -> None:
        try:
            await sent.settled()
        except Refused as e:
            self._note(f"/{word}: {e}")
        except ClientError:
            pass  # the head says why; the outbox keeps it

    async def _changes(self) -> None:
        """What happens to what is shown already; and who reads, who writes."""
        try:
            async for change in self._client.changes():
                match change:
                    case MessageChanged() if change.conversation_id == self._conversation_id:
                        found = self._client.message(change.conversation_id, change.seq)
                        if found is not None and self._transcript.first_seq is not None:
                            self._look(
                                changed=found.seq >= self._transcript.first_seq and self._transcript.add([found])
                            )
                    case ReadBy() if change.conversation_id == self._conversation_id:
                        self._look(changed=self._transcript.read_by(change.user, change.seq))
                    case Typing() if change.conversation_id == self._conversation_id:
                        self._writing.pop(change.user, None)
                        if not change.stopped:
                            self._writing[change.user] = self._loop_s() + WRITING_S
                        self._head()
                    case ConversationChanged():
                        known = self._client.conversation(self._conversation_id)
                        cleared = known is not None and self._transcript.clear(known.cleared_seq)
                        self._look(changed=self._seen_by_peer() or cleared)
                        self._count()
                    case Overflowed():
                        self._transcript.add(await self._client.history(self._conversation_id, limit=PAGE))
                        self._look(changed=True)
        except Stopped:
            pass  # the head says why

    def _touched(self) -> None:
        """A key, or a paste."""
        self._client.hurry()
        words = self._draft.text
        if words.strip() and not words.startswith("/"):
            self._client.typing(self._conversation_id)

    def _seen_by_peer(self) -> bool:
        known = self._client.conversation(self._conversation_id)
        return known is not None and bool(known.peer) and self._transcript.read_by(known.peer, known.peer_read_seq)

    def _count(self) -> None:
        """What is unread elsewhere, muted conversations apart."""
        others = [c for c in self._client.conversations() if c.conversation_id != self._conversation_id]
        self._unread = sum(c.unread for c in others if not c.muted_until_ms)
        self._head()

    def _here(self) -> None:
        """What is shown at the end of the conversation, while its user is there, is read."""
        newest = self._transcript.last_seq
        if newest is not None and self._talk.following and self.app_focus:
            self._client.read(self._conversation_id, newest)

    def _where(self, message: Message) -> str:
        return where_words(message.conversation_id, self._client.conversation(message.conversation_id))

    def _called(self) -> str:
        known = self._client.conversation(self._conversation_id)
        if known is None or not known.title:
            return self._to or self._conversation_id
        return f"{printable(known.title)} ({known.members})"

    def _loop_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def _read(self) -> None:
        try:
            self._transcript.add(await self._client.history(self._conversation_id, limit=PAGE))
            self._seen_by_peer()
            self._look(changed=True)
            self._count()
            async for message in self._client.messages():
                if message.conversation_id == self._conversation_id:
                    if self._transcript.add([message]) and not self._talk.following:
                        self._unseen = True
                        self._note(self._words)
                    self._writing.pop(message.from_user, None)
                    self._look(changed=True)
                    self._head()
                elif not message.mine:
                    what = line_of(message).text[:60]
                    self._note(
                        what
                        if is_operation(message.msg_type)
                        else f"{message.from_user} wrote {self._where(message)}: {what}"
                    )
                    self._count()
        except Stopped:
            pass  # the head says why

    async def _states(self) -> None:
        async for state in self._client.states():
            self._head()
            if state.phase is Phase.STOPPED:
                self._draft.disabled = True

    def _look(self, changed: bool = False) -> None:
        """Looks at what is on its way and what time it is, and draws if anything is different."""
        gone = [user for user, until_s in self._writing.items() if until_s < self._loop_s()]
        for user in gone:
            del self._writing[user]
        if self._client.state.phase is Phase.OFFLINE or gone:
            self._head()
        numbers = self._draft.text.startswith("/")
        changed, self._numbers = changed or numbers != self._numbers, numbers
        self._here()
        waiting = self._client.unsettled(self._conversation_id), self._client.refused(self._conversation_id)
        today = date.today()
        if self._transcript.waiting(*waiting) or changed or today != self._today:
            self._today = today
            self._draw()

    def _head(self) -> None:
        state = self._client.state
        head = Text.assemble(
            (f"{self._me} → {self._called()}", "bold"),
            "   ",
            ("● ", _COLOURS.get(state.phase, "yellow")),
            state_words(state, self._client.next_try_s),
            f"   {self._unread} unread elsewhere" if self._unread else "",
            (f"   {', '.join(map(printable, self._writing))} writes …" if self._writing else "", "italic"),
        )
        self._bar.update(head)

    def _draw(self) -> None:
        drawn = Text()
        lines = self._transcript.lines()
        for line, day in zip(lines, new_days(lines, self._today), strict=True):
            if day is not None:
                drawn.append(f"── {day:%A, %d %B %Y} ──\n", "dim bold")
            drawn.append(f"{line.time or '        '} ", "dim")
            if self._numbers and line.seq:
                drawn.append(f"#{line.seq} ", "bold yellow")
            if line.event:
                drawn.append(f"· {line.text}", "italic dim")
            else:
                drawn.append(line.who, "bold cyan" if line.mine else "bold magenta")
                if line.quote:
                    drawn.append(f" > {line.quote}"[:QUOTED].replace("\n", " ") + f"\n{_INDENT[:-2]}", "dim")
                drawn.append(": " + line.text.replace("\n", f"\n{_INDENT}"))
            if line.tick:
                drawn.append(f"  {line.tick}", "red" if line.tick[0] == "✗" else "green")
            drawn.append("\n")
        self._lines.update(drawn)
        self._talk.pin()

    def _followed(self) -> None:
        """The user scrolled up, or is at the end again."""
        if self._talk.following:
            self._unseen = False
        self._note(self._words)

    def _note(self, words: str) -> None:
        self._words = words
        note = Text("↓ new messages  ", "bold yellow") if self._unseen else Text()
        self._below.update(note.append(words, "not bold"))

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
