"""The chat terminal: one conversation, on a full screen, or in lines where standard input or output is no terminal."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Literal

from plato.cli.chat_commands import Commands
from plato.cli.chat_plain import PlainChat, stdin_lines
from plato.client import Client, StoreError, StoreInUse
from plato.core.conversations import dialogue_id, is_conversation_id, why_unreachable

GROUP_S: Final = 10.0
"""How long a group that is not known here is waited for."""
LOOK_S: Final = 0.05


async def run_chat(
    *,
    user: str,
    to: str | None,
    conversation: str | None,
    token: Callable[[], Awaitable[str]],
    store_path: Path,
    ipconfig_url: str | None,
    gateways: list[str],
    transport: Literal["tcp", "ws"],
    plain: bool,
    group: str | None = None,
    api_url: str = "",
) -> int:
    """Runs one chat until its user leaves; returns the exit code.

    to, conversation or group (its title or id, of one that this user is in): whom it is with. 0: left in good order. 1: a
    final code ended it, or the input ended with messages unsettled or refused. 2: the store cannot be used, or there is no
    such group, said in one line. Raises ValueError before anything else happened; whatever nobody expected, when the
    terminal is as it was.
    """
    if fault := peer_fault(to, conversation, group):
        raise ValueError(fault)
    conversation_id = dialogue_id(user, to) if to is not None else conversation
    client = Client(
        token,
        store_path,
        gateways,
        ipconfig_url=ipconfig_url,
        user=user,
        transport=transport,
        platform="chat",
        api_url=api_url,
    )
    try:
        async with client:
            if conversation_id is None:
                conversation_id = await _group(client, user, group or "")
                if conversation_id is None:
                    print(f"plato chat: {user} is in no group {group!r}; /list in a chat shows which", file=sys.stderr)
                    return 2
            if plain:
                return await _in_lines(PlainChat(client, conversation_id, to, sys.stdout, sys.stderr))
            from plato.cli.chat_screen import ChatScreen  # textual takes its time; lines need none of it

            screen = ChatScreen(client, conversation_id, user, to)
            code = await screen.run_async()
            if screen.failure is not None:
                raise screen.failure
            return code or 0
    except StoreInUse:
        print(
            f"plato chat: {user} chats on this device already, in another process; end it, or make this one another device"
            " with --device NAME",
            file=sys.stderr,
        )
        return 2
    except StoreError as e:
        print(f"plato chat: {e}", file=sys.stderr)
        return 2


async def _group(client: Client, user: str, name: str) -> str | None:
    """The id of the group of this title or id; a new device is told its groups first. None: there is none."""
    commands = Commands(client, user)
    deadline = asyncio.get_running_loop().time() + GROUP_S
    while asyncio.get_running_loop().time() < deadline:
        if (found := commands.find(name)) is not None and found.to is None:
            return found.conversation_id
        await asyncio.sleep(LOOK_S)
    return None


def peer_fault(to: str | None, conversation: str | None, group: str | None = None) -> str:
    """What is wrong with the one that a chat is to be with, in words; "" if nothing is."""
    if sum(one is not None for one in (to, conversation, group)) != 1:
        return "name either --to USER or --group NAME or --conversation ID"
    if to is not None and (why := why_unreachable(to)):
        return f"--to {to!r}: it {why}"
    if conversation is not None and not is_conversation_id(conversation):
        return f"--conversation {conversation!r}: an id is 1 to 64 bytes of UTF-8 without control characters"
    return ""


async def _in_lines(chat: PlainChat) -> int:
    """Ctrl-C and SIGTERM end it in good order, so that the store is closed."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        return await chat.run(stdin_lines(), stop)
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
