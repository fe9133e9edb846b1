"""TokenVerifier: fake and JWT; then every bad token by name."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st
from plato.adapters.tokens import JwtVerifier, issue, make_dev_key
from plato.core.codes import Code
from plato.core.errors import PeerError
from plato.fakes.tokens import FakeTokens
from plato.ports import TokenVerifier
from plato.runtime.settings import SettingsError

SECRET = b"0123456789abcdef0123456789abcdef"


@dataclass
class Issued:
    verifier: TokenVerifier
    issue: Callable[[str], str]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    make_dev_key(folder)
    return folder


@pytest.fixture(params=["fake", "jwt"])
def issued(request: pytest.FixtureRequest, keys: Path) -> Issued:
    if request.param == "fake":
        fake = FakeTokens()
        return Issued(fake, fake.issue)
    verifier = JwtVerifier(keys, "plato", "plato")
    return Issued(verifier, lambda user: issue(keys, "dev", user, "plato", "plato", 60))


@pytest.mark.parametrize("user", ["alice", "жук", "a:b", "x" * 64, "guest"])
def test_a_good_token_names_its_user(issued: Issued, user: str) -> None:
    assert issued.verifier.verify(issued.issue(user)) == user


@pytest.mark.parametrize(
    "token",
    [
        "",
        "fake:",
        "fake:guest:7",
        "fake:admin",
        "fake+server:admin",
        "fake:" + "x" * 65,
        "fake:a\x00",
        "alice",
        "a.b.c",
        "жук",
    ],
)
def test_what_is_no_token_is_refused(issued: Issued, token: str) -> None:
    with pytest.raises(PeerError) as caught:
        issued.verifier.verify(token)
    assert caught.value.code == Code.TOKEN_INVALID


def test_the_fake_refuses_as_it_is_told() -> None:
    fake = FakeTokens()
    fake.refuse(fake.issue("alice"), Code.TOKEN_EXPIRED)
    with pytest.raises(PeerError) as caught:
        fake.verify(fake.issue("alice"))
    assert caught.value.code == Code.TOKEN_EXPIRED
    assert fake.verify(fake.issue("bob")) == "bob"


# ── JWT ──────────────────────────────────────────────────────────────────────────────────────────────────────


def claims(**changes: Any) -> dict[str, Any]:
    now = int(time.time())
    plain = {"sub": "alice", "iss": "plato", "aud": "plato", "iat": now, "exp": now + 60}
    return {name: value for name, value in {**plain, **changes}.items() if value is not None}


@pytest.fixture
def verifier(keys: Path) -> JwtVerifier:
    (keys / "main.key").write_bytes(SECRET + b"\n")
    return JwtVerifier(keys, "plato", "plato")


def signed(
    payload: dict[str, Any], *, kid: str | None = "main", secret: bytes = SECRET, algorithm: str = "HS256"
) -> str:
    return jwt.encode(payload, secret, algorithm=algorithm, headers={"kid": kid} if kid is not None else None)


def unsigned(header: object, payload: object, signature: bytes = b"") -> str:
    parts = [json.dumps(header).encode(), json.dumps(payload).encode(), signature]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


def now() -> int:
    return int(time.time())


BAD: dict[str, tuple[Callable[[], str], Code]] = {
    "expired": (lambda: signed(claims(exp=now() - 60)), Code.TOKEN_EXPIRED),
    "not-yet-valid": (lambda: signed(claims(nbf=now() + 600)), Code.TOKEN_NOT_YET_VALID),
    "issued-in-the-future": (lambda: signed(claims(iat=now() + 600)), Code.TOKEN_NOT_YET_VALID),
    "another-key": (lambda: signed(claims(), secret=b"x" * 32), Code.TOKEN_INVALID),
    "expired-and-another-key": (lambda: signed(claims(exp=now() - 60), secret=b"x" * 32), Code.TOKEN_INVALID),
    "alg-none": (lambda: unsigned({"alg": "none", "typ": "JWT", "kid": "main"}, claims()), Code.TOKEN_INVALID),
    "alg-None": (lambda: unsigned({"alg": "None", "typ": "JWT", "kid": "main"}, claims()), Code.TOKEN_INVALID),
    "no-alg": (lambda: unsigned({"typ": "JWT", "kid": "main"}, claims()), Code.TOKEN_INVALID),
    "another-alg-of-the-same-kind": (
        lambda: signed(claims(), secret=SECRET * 2, algorithm="HS512"),
        Code.TOKEN_INVALID,
    ),
    "no-kid": (lambda: signed(claims(), kid=None), Code.TOKEN_INVALID),
    "unknown-kid": (lambda: signed(claims(), kid="other"), Code.TOKEN_INVALID),
    "kid-is-a-path": (lambda: signed(claims(), kid="../keys/main"), Code.TOKEN_INVALID),
    "kid-is-a-number": (lambda: unsigned({"alg": "HS256", "kid": 7}, claims()), Code.TOKEN_INVALID),
    "kid-is-a-list": (lambda: unsigned({"alg": "HS256", "kid": ["main"]}, claims()), Code.TOKEN_INVALID),
    "wrong-issuer": (lambda: signed(claims(iss="other")), Code.TOKEN_INVALID),
    "issuer-is-a-part": (lambda: signed(claims(iss="pla")), Code.TOKEN_INVALID),
    "wrong-audience": (lambda: signed(claims(aud="other")), Code.TOKEN_INVALID),
    "audience-is-a-part": (lambda: signed(claims(aud="pla")), Code.TOKEN_INVALID),
    "no-exp": (lambda: signed(claims(exp=None)), Code.TOKEN_INVALID),
    "no-iss": (lambda: signed(claims(iss=None)), Code.TOKEN_INVALID),
    "no-aud": (lambda: signed(claims(aud=None)), Code.TOKEN_INVALID),
    "no-sub": (lambda: signed(claims(sub=None)), Code.TOKEN_INVALID),
    "exp-is-text": (lambda: signed(claims(exp="soon")), Code.TOKEN_INVALID),
    "exp-is-huge-text": (lambda: signed(claims(exp="1e999")), Code.TOKEN_INVALID),
    "nbf-is-a-list": (lambda: signed(claims(nbf=[1])), Code.TOKEN_INVALID),
    "sub-is-a-guest": (lambda: signed(claims(sub="guest:7")), Code.TOKEN_INVALID),
    "sub-is-an-administrators": (lambda: signed(claims(sub="admin")), Code.TOKEN_INVALID),
    "sub-is-an-administrators-of-a-server": (lambda: signed(claims(sub="admin", scope="server")), Code.TOKEN_INVALID),
    "sub-is-empty": (lambda: signed(claims(sub="")), Code.TOKEN_INVALID),
    "sub-is-long": (lambda: signed(claims(sub="é" * 33)), Code.TOKEN_INVALID),
    "sub-has-nul": (lambda: signed(claims(sub="a\x00b")), Code.TOKEN_INVALID),
    "sub-is-a-lone-surrogate": (lambda: signed(claims(sub="\ud800")), Code.TOKEN_INVALID),
    "header-is-a-list": (lambda: unsigned([1], claims()), Code.TOKEN_INVALID),
    "payload-is-a-list": (lambda: unsigned({"alg": "HS256", "kid": "main"}, [1]), Code.TOKEN_INVALID),
    "too-long": (lambda: signed(claims(more="x" * 9_000)), Code.TOKEN_INVALID),
    "deep": (lambda: ".".join([base64.urlsafe_b64encode(b"[" * 5_000).decode(), "", ""]), Code.TOKEN_INVALID),
    "unknown-critical-header": (
        lambda: jwt.encode(claims(), SECRET, headers={"kid": "main", "crit": ["x"], "x": 1}),
        Code.TOKEN_INVALID,
    ),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_token_is_refused_with_its_code(verifier: JwtVerifier, name: str) -> None:
    make, code = BAD[name]
    with pytest.raises(PeerError) as caught:
        verifier.verify(make())
    assert caught.value.code == code


def test_clocks_may_differ_by_the_leeway(verifier: JwtVerifier) -> None:
    now = int(time.time())
    assert verifier.verify(signed(claims(exp=now - 3))) == "alice"
    assert verifier.verify(signed(claims(nbf=now + 3, iat=now + 3))) == "alice"


def test_an_audience_may_be_one_of_several(verifier: JwtVerifier) -> None:
    assert verifier.verify(signed(claims(aud=["x", "plato"]))) == "alice"


@given(token=st.one_of(st.text(), st.from_regex(r"[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*", fullmatch=True)))
def test_any_text_is_refused_with_a_code(tmp_path_factory: pytest.TempPathFactory, token: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-text"
    make_dev_key(folder)
    with pytest.raises(PeerError) as caught:
        JwtVerifier(folder, "plato", "plato").verify(token)
    assert caught.value.code == Code.TOKEN_INVALID


def pem(private: Any) -> bytes:
    made: bytes = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return made


def make_private() -> dict[str, Any]:
    return {
        "EdDSA": ed25519.Ed25519PrivateKey.generate(),
        "RS256": rsa.generate_private_key(public_exponent=65_537, key_size=2_048),
        "ES256": ec.generate_private_key(ec.SECP256R1()),
    }


PRIVATE = make_private()


@pytest.mark.parametrize("algorithm", list(PRIVATE))
def test_a_public_key_verifies_its_own_algorithm_only(keys: Path, algorithm: str) -> None:
    private = PRIVATE[algorithm]
    (keys / "app.pem").write_bytes(pem(private))
    verifier = JwtVerifier(keys, "plato", "plato")
    good = jwt.encode(claims(), private, algorithm=algorithm, headers={"kid": "app"})
    assert verifier.verify(good) == "alice"
    bad = [
        # The classic confusion: the public key's text as an HMAC secret. PyJWT refuses to make it, so it is made by hand.
        _hs256_by_hand(pem(private)),
        _hs256_by_hand(pem(private).strip()),
        jwt.encode(claims(), make_private()[algorithm], algorithm, {"kid": "app"}),
        unsigned({"alg": "none", "kid": "app"}, claims()),
    ]
    for token in bad:
        with pytest.raises(PeerError) as caught:
            verifier.verify(token)
        assert caught.value.code == Code.TOKEN_INVALID


def _hs256_by_hand(secret: bytes) -> str:
    import hashlib
    import hmac

    head = unsigned({"alg": "HS256", "typ": "JWT", "kid": "app"}, claims()).rpartition(".")[0]
    mac = hmac.new(secret, head.encode(), hashlib.sha256).digest()
    return head + "." + base64.urlsafe_b64encode(mac).rstrip(b"=").decode()


BAD_KEYS: dict[str, tuple[str, bytes, str]] = {
    "short": ("app.key", b"x" * 31 + b"\n", "has 31 bytes"),
    "empty": ("app.key", b"", "has 0 bytes"),
    "same-kid": ("dev.pem", pem(PRIVATE["EdDSA"]), "kid 'dev'"),
    "no-pem": ("app.pem", b"hello", "no public key"),
    "private": (
        "app.pem",
        PRIVATE["EdDSA"].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        "no public key",
    ),
    "small-rsa": (
        "app.pem",
        pem(rsa.generate_private_key(public_exponent=65_537, key_size=1_024)),
        "no known kind",
    ),
    "another-curve": ("app.pem", pem(ec.generate_private_key(ec.SECP384R1())), "no known kind"),
}


@pytest.mark.parametrize("name", list(BAD_KEYS))
def test_a_bad_key_is_a_settings_error_in_one_line(keys: Path, name: str) -> None:
    file, content, words = BAD_KEYS[name]
    (keys / file).write_bytes(content)
    with pytest.raises(SettingsError, match=words) as caught:
        JwtVerifier(keys, "plato", "plato")
    assert str(caught.value).startswith("auth.keys_dir: ")
    assert "\n" not in str(caught.value)


def test_a_missing_or_empty_folder_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="name a readable folder"):
        JwtVerifier(tmp_path / "none", "plato", "plato")
    with pytest.raises(SettingsError, match="holds no key"):
        JwtVerifier(tmp_path, "plato", "plato")


def test_keys_are_read_again_when_the_folder_changes(
    keys: Path, verifier: JwtVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.monotonic()
    monkeypatch.setattr("plato.adapters.tokens.time.monotonic", lambda: clock)
    new = b"n" * 32
    (keys / "new.key").write_bytes(new)
    clock += 0.5
    with pytest.raises(PeerError):
        verifier.verify(signed(claims(), kid="new", secret=new))
    clock += 2
    assert verifier.verify(signed(claims(), kid="new", secret=new)) == "alice"
    (keys / "main.key").unlink()
    clock += 2
    with pytest.raises(PeerError):
        verifier.verify(signed(claims()))
    (keys / "new.key").write_bytes(b"short")
    clock += 2
    assert verifier.verify(signed(claims(), kid="new", secret=new)) == "alice"  # the last good keys stand
    newest = b"m" * 33  # of another length: two writes may fall into one tick of the file system's clock
    (keys / "new.key").write_bytes(newest)
    clock += 2
    assert verifier.verify(signed(claims(), kid="new", secret=newest)) == "alice"
    with pytest.raises(PeerError):
        verifier.verify(signed(claims(), kid="new", secret=new))


def test_the_development_key_is_made_once_for_us_only(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "keys"
    path = make_dev_key(folder)
    assert path == folder / "dev.key"
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    assert make_dev_key(folder).read_bytes() == before
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize("user", ["", "guest:1", "admin", "x" * 65, "a\n"])
def test_issue_refuses_what_verify_would(keys: Path, user: str) -> None:
    with pytest.raises(SettingsError, match="cannot have a token"):
        issue(keys, "dev", user, "plato", "plato", 60)


def test_issue_names_a_missing_key(keys: Path) -> None:
    with pytest.raises(SettingsError, match=r"other\.key"):
        issue(keys, "other", "alice", "plato", "plato", 60)
