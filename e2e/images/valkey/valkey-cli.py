#!/usr/bin/env python3
"""The little of valkey-cli that probes and scripts use: `valkey-cli [-h HOST] [-p PORT] [-a PASSWORD] WORD …`."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from typing import BinaryIO


def _answer(file: BinaryIO) -> str:
    line = file.readline().decode().rstrip("\r\n")
    kind, rest = line[:1], line[1:]
    if kind == "$":
        return "(nil)" if rest == "-1" else file.read(int(rest) + 2)[:-2].decode(errors="replace")
    if kind == "*":
        return "\n".join(_answer(file) for _ in range(int(rest)))
    if kind == "-":
        raise ValueError(rest)
    return rest


def main() -> int:
    """Send one command, print its answer; 1 when there is none or an error."""
    parser = argparse.ArgumentParser(prog="valkey-cli", add_help=False)
    parser.add_argument("-h", dest="host", default="127.0.0.1")
    parser.add_argument("-p", dest="port", type=int, default=6379)
    parser.add_argument("-a", "--pass", dest="password")
    parser.add_argument("--user", default="default")
    parser.add_argument("--no-auth-warning", action="store_true")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    told = parser.parse_args()
    password = told.password or os.environ.get("VALKEYCLI_AUTH") or os.environ.get("REDISCLI_AUTH")
    commands = [["AUTH", told.user, password]] if password else []
    try:
        with (
            socket.create_connection((told.host, told.port), timeout=5) as connection,
            connection.makefile("rb") as file,
        ):
            answer = ""
            for words in [*commands, told.words or ["PING"]]:
                parts = [word.encode() for word in words]
                body = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
                connection.sendall(b"*%d\r\n" % len(parts) + body)
                answer = _answer(file)
            print(answer)
    except (OSError, ValueError) as error:
        print(f"valkey-cli: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
