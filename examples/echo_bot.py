"""A bot that answers each message with its own words, by `plato.client`.

    .venv/bin/python examples/echo_bot.py echo "$(.venv/bin/plato token echo)"

Then `.venv/bin/plato chat alice --to echo`. Stop it and start it again: it answers what came meanwhile, once. After a crash
the last messages are shown again; so each answer's key (client_msg_id) is a UUIDv5 of its question's msg_id, and what was
answered before is not answered twice.
"""

from __future__ import annotations

import argparse
import asyncio
import uuid
from pathlib import Path

from plato.client import Client, Stopped

ANSWERS = uuid.uuid5(uuid.NAMESPACE_URL, "https://plato.example/echo_bot")


async def main() -> None:
    """Reads every message of every conversation and answers those of others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("user")
    parser.add_argument("token")
    parser.add_argument("--gateway", default="127.0.0.1:8900")
    parser.add_argument("--store", type=Path, default=Path("echo_bot.db"))
    asked = parser.parse_args()
    async with Client(asked.token, asked.store, [asked.gateway], user=asked.user) as client:
        print(f"{asked.user} answers; Ctrl-C ends it", flush=True)
        try:
            async for message in client.messages():
                if message.text and not message.mine:  # operations (somebody joins, an edit) have no text
                    print(f"{message.from_user}: {message.text}", flush=True)
                    key = uuid.uuid5(ANSWERS, str(message.msg_id))
                    await client.send(message.text, conversation_id=message.conversation_id, client_msg_id=key)
        except Stopped as e:
            print(e)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        pass
