"""`python -m plato_ipconfig.ask METHOD PATH [BODY]`: asks the internal port of the ipconfig in the same pod.

`kubectl plato` runs it inside of a pod: the settings and the token that it takes lie there. Prints the answer; exit code 1
when it is a refusal.
"""

from __future__ import annotations

import plato.runtime.early  # isort: skip  # noqa: F401  # first, and for what its import does

import asyncio
import sys
from typing import Any

import aiohttp
from plato.runtime import tls
from plato.runtime.settings import Settings, SettingsError, load

TIMEOUT_S = 20.0


async def ask(settings: Settings, method: str, path: str, body: str) -> tuple[int, str]:
    """(status, body) of the answer. Raises OSError, aiohttp.ClientError."""
    headers = {"Content-Type": "application/json"} if body else {}
    folder = settings.process.admin_tokens_dir
    if folder is not None:
        tokens = [p for p in sorted(folder.iterdir()) if not p.name.startswith(".")]
        if tokens:
            headers["Authorization"] = f"Bearer {tokens[0].read_text(encoding='utf-8').strip()}"
    own_tls = tls.internal(settings.tls.internal_dir)
    secure: dict[str, Any] = {} if own_tls is None else {"ssl": own_tls.ask(), "server_hostname": tls.INTERNAL_NAME}
    url = f"{'http' if own_tls is None else 'https'}://127.0.0.1:{settings.ipconfig.internal_port}{path}"
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session,
        session.request(method, url, headers=headers, data=body or None, **secure) as answer,
    ):
        return answer.status, await answer.text()


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    if not 2 <= len(arguments) <= 3:
        print("usage: python -m plato_ipconfig.ask METHOD PATH [BODY]", file=sys.stderr)
        return 2
    method, path, body = (*arguments, "")[:3]
    try:
        status, text = asyncio.run(ask(load(), method, path, body))
    except (SettingsError, OSError, aiohttp.ClientError, TimeoutError) as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    print(text, file=sys.stderr if status >= 400 else sys.stdout)
    return 0 if status < 400 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
