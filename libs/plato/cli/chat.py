"""The chat terminal: one conversation, on a full screen, or in lines where standard input or output is no terminal."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from plato.cli.chat_plain import PlainChat, stdin_lines
from plato.client import Client, StoreError
from plato.core.conversations import dialogue_id


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
) -> int:
    """Runs one chat until its user leaves; returns the exit code.

    to or conversation: whom it is with. 0: left in good order. 1: a final code ended it, or the input ended with messages
    unsettled. 2: the store cannot be used, said in one line.
    """
    if (to is None) == (conversation is None):
        raise ValueError("name either `to` or `conversation`")
    conversation_id = dialogue_id(user, to) if to is not None else conversation
    assert conversation_id is not None
    client = Client(
        token, store_path, gateways, ipconfig_url=ipconfig_url, user=user, transport=transport, platform="chat"
    )
    try:
        async with client:
            if plain:
                return await _in_lines(PlainChat(client, conversation_id, to, sys.stdout, sys.stderr))
            from plato.cli.chat_screen import ChatScreen  # textual takes its time; lines need none of it

            return await ChatScreen(client, conversation_id, user, to).run_async() or 0
    except StoreError as e:
        print(f"plato chat: {e}", file=sys.stderr)
        return 2


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
