"""A receiver of Plato's hooks: refuses a word before it is stored, prints what is told afterwards. Python alone.

    SECRET_FILE=hook.secret .venv/bin/python examples/bot/hook.py --port 9000 --refuse spam

Every request is checked by its signature before a word of it is believed.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOLERANCE_S = 300


def is_signed(secret: bytes, header: str, body: bytes) -> bool:
    """Plato-Signature: t=<Unix time>,v1=<hex of HMAC-SHA256 over "<time>." and the body>."""
    fields = dict(part.partition("=")[::2] for part in header.split(","))
    at, given = fields.get("t", ""), fields.get("v1", "")
    if not at.isdecimal() or abs(time.time() - int(at)) > TOLERANCE_S:
        return False
    wanted = hmac.new(secret, f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return hmac.compare_digest(wanted.encode(), given.encode())


def before(said: Any, refused_word: str) -> Any:
    """Which of these messages are not to be stored."""
    refuse = {}
    for message in said["messages"]:
        # An edit comes as the operation that it is, with the new text.
        text = message.get("text") or message.get("operation", {}).get("text", "")
        if refused_word in text:
            refuse[str(message["index"])] = f"we do not say {refused_word} here"
    return {"refuse": refuse}


def main() -> None:
    """Receives for ever."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--refuse", default="spam")
    asked = parser.parse_args()
    if not os.environ.get("SECRET_FILE"):
        sys.exit("no secret: set SECRET_FILE to the file that msg.hook_secret_file names")
    secret = Path(os.environ["SECRET_FILE"]).read_bytes().strip()

    class Receiver(BaseHTTPRequestHandler):
        """POST /before, /after, /push."""

        def do_POST(self) -> None:
            """One hook."""
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if not is_signed(secret, self.headers.get("Plato-Signature", ""), body):
                self.send_error(403)
                return
            said, answer = json.loads(body), {}
            if self.path == "/before":
                answer = before(said, asked.refuse)
            for event in said.get("events", []):
                print(f"{event['from']}: {event.get('text', event.get('operation'))}", flush=True)
            for push in said.get("pushes", []):
                print(f"to {push['user']} ({push['unread']} unread): {push['message'].get('text')}", flush=True)
            raw = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            """Says nothing of each request."""

    with ThreadingHTTPServer(("127.0.0.1", asked.port), Receiver) as server:
        print(f"receives on port {asked.port}; Ctrl-C ends it", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    try:
        main()
    except OSError as e:  # no such file, or the port is taken
        sys.exit(str(e))
    except KeyboardInterrupt:
        pass
