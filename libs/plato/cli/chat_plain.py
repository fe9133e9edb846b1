"""A chat in lines, for scripts: each message of the conversation is one line on standard output, each line of standard
input one message to send. What is no message (the connection's state, refusals, news of other conversations) goes to
standard error.

Memory: `AHEAD` lines of at most `LINE_BYTES` read ahead; everything else is the client's.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Final, TextIO

from plato.cli.chat_commands import Commands, Place, try_command
from plato.cli.transcript import (
    conversation_name,
    message_words,
    one_line,
    operation_words,
    quote_words,
    state_words,
    where_words,
)
from plato.client import Client, ClientError, Message, MsgType, OutboxFull, Phase, Quote, Refused, Sent, Stopped
from plato.client.content import is_operation, text_of

AHEAD: Final = 256
LINE_BYTES: Final = 1_048_576
"""A longer line is cut; no platform takes half of that as one message."""
HERE: Final = 10
"""Lines of a conversation that the chat goes to."""
LINGER_S: Final = 30.0
"""How long the end of the input waits for what was sent to be settled."""


def format_line(message: Message, reply: Quote | None = None) -> str:
    """`[seq] user: text`; an operation in words, an answer with what it answers: `[9] bob: (to [7] alice: hello) hi`. reply:
    the latter, as it may be shown."""
    if is_operation(message.msg_type):
        edit = message.operation
        words = f": {text_of(edit.msg_type, edit.body)}" if edit is not None and edit.kind is MsgType.EDIT else ""
        return f"[{message.seq}] {one_line(operation_words(message) + words)}"
    quote = f"(to [{reply.seq}] {quote_words(reply)}) " if reply is not None else ""
    words = message_words(message) if message.recalled or message.rich is not None else message.text
    return f"[{message.seq}] {message.from_user}: {one_line(quote + words)}"


def elsewhere(message: Message) -> str:
    """A message of another conversation, in short."""
    return one_line(operation_words(message) if is_operation(message.msg_type) else message_words(message))


class PlainChat:
    """One chat in lines."""

    def __init__(self, client: Client, conversation_id: str, to: str | None, out: TextIO, err: TextIO) -> None:
        self._client = client
        self._conversation_id = conversation_id
        self._to = to
        self._commands = Commands(client, client.user or "")
        self._out = out
        self._err = err
        self._shown_seq = 0
        self._settled_seq = 0
        self._moved = False  # to another conversation, whose last lines were printed
        self._refused = False  # something that was typed will never be sent
        self._following: set[asyncio.Task[None]] = set()  # messages whose outcome is not known yet

    async def run(self, lines: AsyncIterator[str], stop: asyncio.Event) -> int:
        """Until `stop`, the end of the input, or a final code.

        Returns 0; or 1: a final code ended it, or the input ended and not all of it has its place.
        """
        writing = asyncio.create_task(self._write(lines))
        ending = [writing, asyncio.create_task(self._show()), asyncio.create_task(stop.wait())]
        telling = asyncio.create_task(self._tell_states())
        try:
            done, _ = await asyncio.wait((*ending, telling), return_when=asyncio.FIRST_COMPLETED)
            if done == {telling} and telling.exception() is None:  # it has told that the client stopped
                done, _ = await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # what nobody expected ends the chat, and is told
            if stop.is_set():
                return 0
            if self._client.state.phase is Phase.STOPPED:
                return 1
            return writing.result() if writing.done() else 0
        finally:
            for task in (*ending, telling):
                task.cancel()
            await asyncio.gather(*ending, telling, return_exceptions=True)

    async def _show(self) -> None:
        try:
            async for message in self._client.messages():
                if message.conversation_id == self._conversation_id:
                    if not self._moved or message.seq > self._shown_seq:
                        self._print([message])
                elif not message.mine:
                    there = message.conversation_id
                    where = where_words(there, self._client.conversation(there))
                    self._note(f"{message.from_user} wrote {where}: {elsewhere(message)}")
        except Stopped:
            pass  # the state said why

    def _print(self, messages: Sequence[Message]) -> None:
        """What is printed is read."""
        for message in messages:
            self._shown_seq = message.seq
            if message.hidden:
                continue
            print(format_line(message, self._client.reply_of(message)), file=self._out, flush=True)
            if not message.mine:
                self._client.read(message.conversation_id, message.seq)

    async def _tell_states(self) -> None:
        told, offline = "", False
        async for state in self._client.states():
            if state.phase is Phase.OFFLINE:
                if self._client.next_try_s is None:
                    continue  # it tries already
                offline = True
            elif offline and state.phase in (Phase.CONNECTING, Phase.LOGGING_IN):
                continue  # one line says that an outage began, one that it is over
            else:
                offline = False
            words = state_words(state, None)
            if words != told:
                told = words
                self._note(told)

    async def _write(self, lines: AsyncIterator[str]) -> int:
        try:
            async for typed in lines:
                word, line = self._commands.split(typed)
                if word:
                    await self._command(word, line)
                    self._refused |= bool(self._commands.unknown(word))
                    continue
                while True:
                    try:
                        if self._to is not None:
                            sent = await self._client.send(line, to=self._to)
                        else:
                            sent = await self._client.send(line, conversation_id=self._conversation_id)
                    except OutboxFull:
                        await asyncio.sleep(0.2)  # the input waits; what waits to be sent is durable
                        continue
                    except Refused as e:
                        self._note(f"not sent: {e}")
                        self._refused = True
                        break
                    except Stopped:
                        return 1
                    self._watch(sent, line)
                    break
            return await self._settle()
        finally:
            for task in list(self._following):
                task.cancel()
            await asyncio.gather(*self._following, return_exceptions=True)

    async def _command(self, word: str, rest: str) -> None:
        done = await try_command(self._commands, Place(self._conversation_id, self._to), word, rest)
        for words in done.words:
            self._note(words)
        for sent in done.sent:
            self._watch(sent, f"/{word} {rest}")
        if done.go is not None:
            await self._go(done.go)

    async def _go(self, place: Place) -> None:
        """To another conversation: its last lines, then what comes."""
        here = await self._client.history(place.conversation_id, limit=HERE)
        self._conversation_id, self._to, self._moved = place.conversation_id, place.to, True
        self._shown_seq = self._settled_seq = 0
        known = self._client.conversation(self._conversation_id)
        name = conversation_name(known) if known is not None else self._conversation_id
        self._note(f"here is {self._to or name} now")
        self._print(here)
        known = self._client.conversation(self._conversation_id)
        for seq in range(self._shown_seq + 1, known.cursor + 1 if known is not None and here else 0):
            came = self._client.message(self._conversation_id, seq)  # while we looked
            self._print([came] if came is not None and not came.hidden else [])

    def _watch(self, sent: Sent, line: str) -> None:
        task = asyncio.create_task(self._follow(sent, line))
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def _follow(self, sent: Sent, line: str) -> None:
        try:
            seq = (await sent.settled()).seq
            if sent.conversation_id == self._conversation_id:
                self._settled_seq = max(self._settled_seq, seq)
        except Refused as e:
            self._note(f"refused: {e}: {one_line(line)}")
            self._refused = True
        except ClientError:
            pass  # the state said why, and the outbox keeps it

    async def _settle(self) -> int:
        """The input ended: what was sent gets a while to be settled."""
        deadline = asyncio.get_running_loop().time() + LINGER_S
        while True:
            left = len(self._client.unsettled(self._conversation_id))
            # The outbox is empty a moment before the outcome of its last message is told.
            if not left and not self._following and self._shown_seq >= self._settled_seq:
                return 1 if self._refused else 0
            if asyncio.get_running_loop().time() > deadline:
                self._note(f"{left} messages are not settled yet; the next chat goes on with them")
                return 1
            await asyncio.sleep(0.02)

    def _note(self, words: str) -> None:
        print(f"# {words}", file=self._err, flush=True)


async def stdin_lines() -> AsyncIterator[str]:
    """The lines of standard input, without their end. A thread reads the bare descriptor: it may be a file or a pipe, and
    may block while the process ends."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | None] = asyncio.Queue(AHEAD)
    room = threading.Semaphore(AHEAD)

    def put(line: bytes | None) -> None:
        room.acquire()
        try:
            loop.call_soon_threadsafe(queue.put_nowait, line)
        except RuntimeError:
            pass  # the loop is closed: nobody reads any more

    def read() -> None:
        rest = b""
        while data := os.read(sys.stdin.fileno(), 65_536):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                put(line)
            if len(rest) > LINE_BYTES:
                put(rest)
                rest = b""
        if rest:
            put(rest)
        put(None)

    threading.Thread(target=read, daemon=True, name="plato-stdin").start()
    while (line := await queue.get()) is not None:
        room.release()
        if text := line.decode("utf-8", "replace").rstrip("\r"):
            yield text
