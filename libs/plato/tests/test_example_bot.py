"""examples/bot/bot.py toward a server that refuses: it tells the server's words in one line, and gets itself a new token."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BOT = Path(__file__).resolve().parents[3] / "examples" / "bot" / "bot.py"
Answer = tuple[int, dict[str, object]]


@contextlib.contextmanager
def api(*answers: Answer) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A server that gives these answers, the last one again and again; its URL, and (token, path) of each request."""
    asked: list[tuple[str, str]] = []

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers[min(len(asked), len(answers) - 1)]
            asked.append((self.headers["Authorization"].removeprefix("Bearer "), self.path))
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_receiver_without_a_secret_says_what_to_give_it(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "SECRET_FILE"}
    for given in ({}, {"SECRET_FILE": "nowhere"}):
        command = [sys.executable, "-I", str(BOT.with_name("hook.py"))]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment | given, capture_output=True, text=True, timeout=30, check=False
        )
        (line,) = done.stderr.strip().splitlines()
        assert done.returncode == 1
        assert given.get("SECRET_FILE", "SECRET_FILE") in line


def bot(folder: Path, *arguments: str, **variables: str) -> tuple[int, str, list[str]]:
    """Runs it until it ends: (code, output, lines of standard error)."""
    environment = {k: v for k, v in os.environ.items() if k != "TOKEN"} | variables
    command = [sys.executable, "-I", str(BOT), "helper", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stdout, done.stderr.strip().splitlines()


def problem(status: int, code: int, detail: str) -> Answer:
    return status, {"status": status, "code": code, "title": "a title", "detail": detail, "retry_ms": 0}


def test_without_a_token_it_says_what_to_give_it(tmp_path: Path) -> None:
    code, out, (line,) = bot(tmp_path)
    assert (code, out) == (1, "")
    assert "--token-command" in line
    assert "TOKEN" in line


def test_a_refusal_is_one_line_with_the_server_s_words(tmp_path: Path) -> None:
    with api(problem(403, 433, "this path is for tokens with scope: server")) as (url, _):
        code, out, (line,) = bot(tmp_path, "--api", url, TOKEN="one")
    assert (code, out) == (1, ""), "it answers nobody yet"
    assert "403: this path is for tokens with scope: server (code 433)" in line


def counting(folder: Path) -> str:
    """A command that prints another token each time."""
    (folder / "tokens.py").write_text(
        "from pathlib import Path\n"
        "n = Path('n')\n"
        "n.write_text(str(int(n.read_text() if n.exists() else 0) + 1))\n"
        "print('token-' + n.read_text())\n",
        encoding="utf-8",
    )
    return f"{sys.executable} tokens.py"


def test_an_expired_token_is_renewed_and_the_request_said_again(tmp_path: Path) -> None:
    page: Answer = (200, {"events": [], "cursor": "c1"})
    expired, gone = problem(401, 303, "the token is expired"), problem(410, 440, "the cursor is older than the feed")
    with api(page, expired, page, gone) as (url, asked):
        code, out, (line,) = bot(tmp_path, "--api", url, "--token-command", counting(tmp_path))
    assert (code, out) == (1, "helper answers; Ctrl-C ends it\n")
    assert "410: the cursor is older than the feed" in line
    assert [token for token, _ in asked] == ["token-1", "token-1", "token-2", "token-2"]
    assert asked[1][1] == asked[2][1] == "/v1/events?after=c1&wait_s=30"


def test_a_token_that_expires_while_the_server_is_away_is_renewed_too(tmp_path: Path) -> None:
    """However often: only one that is refused right after it was got ends the bot."""
    expired, away = problem(401, 303, "the token is expired"), problem(503, 104, "a part of the platform is away")
    with api(expired, away, expired, expired) as (url, asked):
        code, _, (line,) = bot(tmp_path, "--api", url, "--token-command", counting(tmp_path))
    assert code == 1
    assert "401: the token is expired" in line
    assert [token for token, _ in asked] == ["token-1", "token-2", "token-2", "token-3"]
