"""Tokens: JWTs signed with a key that this platform knows, and the folder of these keys.

    <kid>.key   HS256, a secret of at least 32 bytes (the file's bytes, without white space around them)
    <kid>.pem   a public key: Ed25519 → EdDSA, RSA → RS256, P-256 → ES256

The key named by the token's `kid` decides the algorithm, never the token: an HS256 signature made with a public key's
text finds no HS256 key. The folder is looked at once a second at most; while a changed one cannot be read, the last
good keys stand.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from plato.core.codes import Code
from plato.core.conversations import why_no_person
from plato.core.errors import PeerError
from plato.ports import Claims
from plato.runtime import logs
from plato.runtime.settings import SettingsError

LEEWAY_S: Final = 5
MIN_SECRET_BYTES: Final = 32
MAX_TOKEN_BYTES: Final = 8_192
DEV_KID: Final = "dev"
_LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Key:
    algorithm: str
    key: Any  # bytes, or a public key of cryptography


class JwtVerifier:
    """TokenVerifier on a folder of keys. Raises SettingsError at once if the folder or a key cannot be used."""

    def __init__(self, keys_dir: Path, issuer: str, audience: str) -> None:
        self._keys_dir = keys_dir
        self._issuer = issuer
        self._audience = audience
        self._stamp = _stamp(keys_dir)
        self._keys = _read_keys(keys_dir)
        self._looked_at = time.monotonic()

    def verify(self, token: str) -> str:
        """See the port."""
        return self.claims(token).user

    def claims(self, token: str) -> Claims:
        """See the port. `scope` is text of words with blanks between (RFC 8693), or a list of words."""
        self._look()
        if len(token) > MAX_TOKEN_BYTES:
            raise PeerError(Code.TOKEN_INVALID, "longer than a token may be")
        try:
            kid = jwt.get_unverified_header(token).get("kid")
            key = self._keys.get(kid) if isinstance(kid, str) else None
            if key is None:
                raise PeerError(Code.TOKEN_INVALID, "its kid names no key of this platform")
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[key.algorithm],
                audience=self._audience,
                issuer=self._issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.ExpiredSignatureError as e:
            raise PeerError(Code.TOKEN_EXPIRED) from e
        except jwt.ImmatureSignatureError as e:
            raise PeerError(Code.TOKEN_NOT_YET_VALID) from e
        # Whatever else hostile bytes provoke in the parser is the token's fault too.
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError, OverflowError) as e:
            raise PeerError(Code.TOKEN_INVALID, str(e)) from e
        user = claims["sub"]
        if why := why_no_person(user) if isinstance(user, str) else "is no text":
            raise PeerError(Code.TOKEN_INVALID, f"its sub {why}")
        scope = claims.get("scope", "")
        words = scope.split() if isinstance(scope, str) else scope
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise PeerError(Code.TOKEN_INVALID, "its scope is neither text nor a list of words")
        return Claims(user, frozenset(words))

    def _look(self) -> None:
        """Reads the folder again if it changed."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        try:
            stamp = _stamp(self._keys_dir)
            if stamp != self._stamp:
                self._keys = _read_keys(self._keys_dir)
                self._stamp = stamp
        except SettingsError as e:
            logs.get("tokens").warning("the last good keys stand", reason=str(e))


def issue(keys_dir: Path, kid: str, user: str, issuer: str, audience: str, ttl_s: int, scope: str = "") -> str:
    """A token for `user`, valid from now for `ttl_s`, signed with the secret <kid>.key. scope: "server" for an application
    server, which may act for anybody. Raises SettingsError."""
    if why := why_no_person(user):
        raise SettingsError(f"user {user!r} cannot have a token: it {why}")
    secret = _read_secret(keys_dir / f"{kid}.key")
    now = int(time.time())
    claims: dict[str, Any] = {"sub": user, "iss": issuer, "aud": audience, "iat": now, "exp": now + ttl_s}
    if scope:
        claims["scope"] = scope
    return jwt.encode(claims, secret, algorithm="HS256", headers={"kid": kid})


def make_dev_key(keys_dir: Path) -> Path:
    """The development key <keys_dir>/dev.key, readable by us only; made if it is not there. Raises OSError."""
    keys_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = keys_dir / f"{DEV_KID}.key"
    temporary = path.with_name(path.name + ".new")
    if not path.exists():
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    return path


def _stamp(keys_dir: Path) -> tuple[tuple[str, int, int, int], ...]:
    """What tells one state of the folder from another. Raises SettingsError."""
    try:
        found = [(path.name, path.stat()) for path in _files(keys_dir)]
    except OSError as e:
        raise SettingsError(f"auth.keys_dir: {keys_dir}: {e.strerror}; name a readable folder of keys") from e
    return tuple((name, facts.st_ino, facts.st_mtime_ns, facts.st_size) for name, facts in found)


def _files(keys_dir: Path) -> list[Path]:
    return sorted(path for path in keys_dir.iterdir() if path.suffix in (".key", ".pem"))


def _read_keys(keys_dir: Path) -> dict[str, _Key]:
    keys: dict[str, _Key] = {}
    try:
        files = _files(keys_dir)
    except OSError as e:
        raise SettingsError(f"auth.keys_dir: {keys_dir}: {e.strerror}; name a readable folder of keys") from e
    for path in files:
        if path.stem in keys:
            raise SettingsError(f"auth.keys_dir: {path} and another file have the kid {path.stem!r}; rename one")
        keys[path.stem] = _Key("HS256", _read_secret(path)) if path.suffix == ".key" else _read_public(path)
    if not keys:
        raise SettingsError(f"auth.keys_dir: {keys_dir} holds no key; put <kid>.key or <kid>.pem there")
    return keys


def _read_secret(path: Path) -> bytes:
    secret = _read(path).strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise SettingsError(
            f"auth.keys_dir: {path} has {len(secret)} bytes; an HS256 secret needs at least {MIN_SECRET_BYTES}"
        )
    return secret


def _read_public(path: Path) -> _Key:
    try:
        key = load_pem_public_key(_read(path))
    except (ValueError, UnsupportedAlgorithm) as e:
        raise SettingsError(f"auth.keys_dir: {path} is no public key in PEM form; write one there") from e
    if isinstance(key, Ed25519PublicKey):
        return _Key("EdDSA", key)
    if isinstance(key, RSAPublicKey) and key.key_size >= 2048:
        return _Key("RS256", key)
    if isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1):
        return _Key("ES256", key)
    raise SettingsError(f"auth.keys_dir: {path} is of no known kind; use Ed25519, RSA of 2,048 bits or more, or P-256")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise SettingsError(f"auth.keys_dir: {path}: {e.strerror}; make it readable") from e
