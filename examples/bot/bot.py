"""A bot behind the HTTP API: reads the feed of events, answers who writes to it or mentions it. Python alone.

    .venv/bin/python examples/bot/bot.py helper --token-command ".venv/bin/plato token bots --scope server"

Tokens expire: the command is run at the start and whenever the server takes its token no more. A token in the variable
TOKEN does for a try, until it expires. What the server refuses is told in its own words, and ends the bot.

It keeps its place in the feed in a file, written after the answers of a page: stopped and started again it goes on there,
and what it answered before a crash it sends again under the same client_msg_id, which Plato stores once.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

ANSWERS = uuid.uuid5(uuid.NAMESPACE_URL, "https://plato.example/bot")


class Refused(Exception):
    """The server's answer is no; says why, in its words. status: of HTTP."""

    def __init__(self, method: str, url: str, error: urllib.error.HTTPError) -> None:
        raw = error.read()
        try:
            problem = json.loads(raw)
            why = f"{problem['detail']} (code {problem['code']})"
        except (ValueError, TypeError, KeyError):  # something between answered, not Plato
            why = raw[:200].decode("utf-8", "replace")
        super().__init__(" ".join(f"{method} {url}: {error.code}: {why}".split()))
        self.status = error.code


class Tokens:
    """Where the token comes from: a command that prints one, or the variable TOKEN."""

    def __init__(self, command: str) -> None:
        self._command = shlex.split(command)
        self.current = ""
        self.renew()

    def renew(self) -> bool:
        """Gets one; False: there is none but the old one. Exits where there is none at all."""
        if not self._command:
            if not os.environ.get("TOKEN"):
                sys.exit("no token: give --token-command, a command that prints one, or set TOKEN")
            renewed, self.current = not self.current, os.environ["TOKEN"]
            return renewed
        try:
            done = subprocess.run(
                self._command, stdout=subprocess.PIPE, text=True, check=True
            )  # it tells itself what fails
        except (OSError, subprocess.CalledProcessError) as e:
            sys.exit(f"no token: {e}")
        self.current = done.stdout.strip()
        return bool(self.current)


def ask(tokens: Tokens, method: str, url: str, body: Any = None, acts_for: str = "") -> Any:
    """One request, repeated while the answer says that it is worth it, and with another token, unless that one is refused at
    once. Raises Refused."""
    data = json.dumps(body).encode() if body is not None else None
    silent = renewed = False
    while True:
        headers = {"Authorization": f"Bearer {tokens.current}", "Content-Type": "application/json"}
        if acts_for:
            headers["Plato-User"] = acts_for
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, data, headers, method=method), timeout=90
            ) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as e:
            if e.code == 401 and not renewed:
                renewed = True
                if tokens.renew():
                    continue
            if e.code not in (429, 503):
                raise Refused(method, url, e) from None
            wait_s = float(e.headers.get("Retry-After", "1"))
        except (OSError, http.client.HTTPException) as e:
            if not silent:
                print(f"no answer from {url}: {e}; trying again", file=sys.stderr, flush=True)
            silent, wait_s = True, 1.0
        renewed = False
        time.sleep(wait_s)


def answer(text: str) -> str:
    """What the bot says."""
    return f"You said: {text}"


def main() -> None:
    """Reads and answers for ever."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("user", help="who the bot is")
    parser.add_argument("--api", default="http://127.0.0.1:8903")
    parser.add_argument("--token-command", default="", help="prints a token with scope server, as `plato token` does")
    parser.add_argument("--place", type=Path, default=Path("bot.cursor"))
    asked = parser.parse_args()
    tokens = Tokens(asked.token_command)
    cursor = asked.place.read_text() if asked.place.exists() else "now"
    kinds: dict[str, str] = {}
    page = ask(tokens, "GET", f"{asked.api}/v1/events?after={cursor}")
    print(f"{asked.user} answers; Ctrl-C ends it", flush=True)
    while True:
        for event in page["events"]:
            conversation, text = event["conversation_id"], event.get("text")
            if not text or event["from"] == asked.user:
                continue
            meant = asked.user in event.get("mentions", [])
            if not meant and conversation.startswith("d:"):
                if conversation not in kinds:  # a dialogue is somebody's with the bot, or none of its business
                    kinds[conversation] = (
                        "mine" if is_member(tokens, asked.api, asked.user, conversation) else "others'"
                    )
                meant = kinds[conversation] == "mine"
            if meant:
                reply = {"text": answer(text), "reply_to": event["msg_id"]}
                key = str(uuid.uuid5(ANSWERS, event["msg_id"]))
                said = {"conversation_id": conversation, "rich": reply, "client_msg_id": key}
                try:
                    ask(tokens, "POST", f"{asked.api}/v1/messages", said, acts_for=asked.user)
                except Refused as e:
                    if e.status == 401:
                        raise
                    print(f"not answered: {e}", file=sys.stderr)  # it was recalled meanwhile, or the bot is no member
        cursor = page["cursor"]
        temporary = asked.place.with_suffix(".new")
        temporary.write_text(cursor)
        temporary.replace(asked.place)
        page = ask(tokens, "GET", f"{asked.api}/v1/events?after={cursor}&wait_s=30")


def is_member(tokens: Tokens, api: str, user: str, conversation: str) -> bool:
    """Whether that is one of the user's conversations."""
    try:
        ask(tokens, "GET", f"{api}/v1/conversations/{conversation}", acts_for=user)
    except Refused as e:
        if e.status == 404:
            return False
        raise
    return True


if __name__ == "__main__":
    try:
        main()
    except Refused as e:
        sys.exit(str(e))
    except KeyboardInterrupt:
        pass
