"""A chat client that only listens, as a process: `python listener.py '{"token": …, "store": …, "gateways": […]}'`.

Prints {"online": true} once it is online, then {"body": …} for each message, one JSON object per line.
"""

from __future__ import annotations

import asyncio
import json
import sys

from plato.client import Client, Phase


async def main() -> None:
    """Listens until it is killed."""
    given = json.loads(sys.argv[1])
    async with Client(given["token"], given["store"], given["gateways"]) as client:
        async for state in client.states():
            if state.phase is Phase.ONLINE:
                break
        print(json.dumps({"online": True}), flush=True)
        async for message in client.messages():
            print(json.dumps({"body": message.text}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
