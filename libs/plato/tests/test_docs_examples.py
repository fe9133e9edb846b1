"""What the pages for application developers say is true: their programs run, and what they print is taken."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import jwt
import pytest
from plato.adapters import tokens
from plato.adapters.tokens import JwtVerifier
from plato.core.codes import Code
from plato.core.errors import PeerError

ROOT = Path(__file__).resolve().parents[3]


def programs(page: str) -> list[str]:
    """The Python blocks of a page of docs/."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)


def ran(program: str, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_key_and_the_token_of_the_page_let_their_user_in(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    make_key, sign = programs("tokens.md")
    ran(make_key, tmp_path)
    verifier = JwtVerifier(tmp_path / "keys", "plato", "plato")
    token = ran(sign, tmp_path, "alice")
    assert verifier.verify(token) == "alice"
    assert (tmp_path / "app-1.private.pem").stat().st_mode & 0o077 == 0, "readable by its owner alone"
    header = json.loads(base64.urlsafe_b64decode(token.split(".")[0] + "=="))
    assert (header["kid"], header["alg"]) == ("app-1", "EdDSA")


def test_rotation_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_LOOK_S", 0.0)
    keys = tmp_path / "keys"
    keys.mkdir()
    make_key, sign = programs("tokens.md")
    ran(make_key, tmp_path)
    verifier = JwtVerifier(keys, "plato", "plato")
    old = ran(sign, tmp_path, "alice")
    ran(make_key.replace("app-1", "app-2"), tmp_path)
    new = ran(sign.replace("app-1", "app-2"), tmp_path, "alice")
    assert verifier.verify(old) == verifier.verify(new) == "alice"
    (keys / "app-1.pem").unlink()
    assert verifier.verify(new) == "alice"
    with pytest.raises(PeerError) as refused:
        verifier.verify(old)
    assert refused.value.code is Code.TOKEN_INVALID


def test_the_claims_are_those_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tokens.md").read_text(encoding="utf-8")
    secret = b"x" * tokens.MIN_SECRET_BYTES
    (tmp_path / "dev.key").write_bytes(secret)
    verifier = JwtVerifier(tmp_path, "plato", "plato")
    now = int(time.time())
    whole = {"sub": "a", "iss": "plato", "aud": ["other", "plato"], "exp": now + 60, "nbf": now + tokens.LEEWAY_S - 3}

    def answer(claims: dict[str, object]) -> Code | str:
        try:
            return verifier.verify(jwt.encode(claims, secret, algorithm="HS256", headers={"kid": "dev"}))
        except PeerError as e:
            return e.code

    assert answer(whole) == "a"
    required = re.findall(r"^\| `(\w+)` \| required", page, re.MULTILINE)
    assert set(required) == {"sub", "exp", "iss", "aud"}
    for claim in required:
        assert answer({k: v for k, v in whole.items() if k != claim}) is Code.TOKEN_INVALID
    assert answer(whole | {"exp": now - 60}) is Code.TOKEN_EXPIRED
    assert answer(whole | {"nbf": now + 60}) is Code.TOKEN_NOT_YET_VALID
    assert answer(whole | {"sub": "guest:1"}) is Code.TOKEN_INVALID
    assert f"differ by {tokens.LEEWAY_S} seconds" in page
    assert f"at least {tokens.MIN_SECRET_BYTES} bytes" in page
    assert f"at most {tokens.MAX_TOKEN_BYTES:,} bytes" in page


def test_the_page_shows_the_echo_bot_as_it_is() -> None:
    bot = (ROOT / "examples" / "echo_bot.py").read_text(encoding="utf-8")
    assert programs("client.md")[0].strip() == bot.strip(), "copy examples/echo_bot.py into docs/client.md"
