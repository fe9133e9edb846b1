"""A bot behind the HTTP API: reads the feed of events, answers who writes to it or mentions it. Python alone.

    TOKEN="$(.venv/bin/plato token bots --scope server)" .venv/bin/python examples/bot/bot.py helper

It keeps its place in the feed in a file, written after the answers of a page: stopped and started again it goes on there,
and what it answered before a crash it sends again under the same client_msg_id, which Plato stores once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

ANSWERS = uuid.uuid5(uuid.NAMESPACE_URL, "https://plato.example/bot")


def ask(method: str, url: str, body: Any = None, acts_for: str = "") -> Any:
    """One request, repeated while the answer says that it is worth it. Raises urllib.error.HTTPError for a refusal."""
    headers = {"Authorization": f"Bearer {os.environ['TOKEN']}", "Content-Type": "application/json"}
    if acts_for:
        headers["Plato-User"] = acts_for
    data = json.dumps(body).encode() if body is not None else None
    while True:
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, data, headers, method=method), timeout=60
            ) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as e:
            if e.code not in (429, 503):
                raise
            wait_s = float(e.headers.get("Retry-After", "1"))
        except OSError:
            wait_s = 1.0
        time.sleep(wait_s)


def answer(text: str) -> str:
    """What the bot says."""
    return f"You said: {text}"


def main() -> None:
    """Reads and answers for ever."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("user", help="who the bot is")
    parser.add_argument("--api", default="http://127.0.0.1:8903")
    parser.add_argument("--place", type=Path, default=Path("bot.cursor"))
    asked = parser.parse_args()
    cursor = asked.place.read_text() if asked.place.exists() else "now"
    kinds: dict[str, str] = {}
    print(f"{asked.user} answers; Ctrl-C ends it", flush=True)
    while True:
        page = ask("GET", f"{asked.api}/v1/events?after={cursor}&wait_s=30")
        for event in page["events"]:
            conversation, text = event["conversation_id"], event.get("text")
            if not text or event["from"] == asked.user:
                continue
            meant = asked.user in event.get("mentions", [])
            if not meant and conversation.startswith("d:"):
                if conversation not in kinds:  # a dialogue is somebody's with the bot, or none of its business
                    kinds[conversation] = "mine" if is_member(asked.api, asked.user, conversation) else "others'"
                meant = kinds[conversation] == "mine"
            if meant:
                reply = {"text": answer(text), "reply_to": event["msg_id"]}
                key = str(uuid.uuid5(ANSWERS, event["msg_id"]))
                said = {"conversation_id": conversation, "rich": reply, "client_msg_id": key}
                try:
                    ask("POST", f"{asked.api}/v1/messages", said, acts_for=asked.user)
                except urllib.error.HTTPError as e:  # it was recalled meanwhile, or the bot is no member
                    print(f"not answered: {e.read().decode()}", file=sys.stderr)
        cursor = page["cursor"]
        temporary = asked.place.with_suffix(".new")
        temporary.write_text(cursor)
        temporary.replace(asked.place)


def is_member(api: str, user: str, conversation: str) -> bool:
    """Whether that is one of the user's conversations."""
    try:
        ask("GET", f"{api}/v1/conversations/{conversation}", acts_for=user)
    except urllib.error.HTTPError as e:
        if e.code == 404:
            return False
        raise
    return True


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
