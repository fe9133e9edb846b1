"""Tokens of the embedded cluster, signed by its generated development key."""

from __future__ import annotations

from plato.local.folder import DataFolder, LocalError
from plato.runtime.settings import AuthSettings, SettingsError


def ensure_key(folder: DataFolder) -> None:
    """Makes the development key at the first start. Raises LocalError."""
    from plato.adapters.tokens import make_dev_key

    try:
        make_dev_key(folder.keys)
    except OSError as e:
        raise LocalError(f"the development key in {folder.keys} cannot be written: {e.strerror}") from e


def make_token(folder: DataFolder, auth: AuthSettings, user: str, ttl_s: int, scope: str = "") -> str:
    """A token for `user`. scope: "server" for an application server. Raises LocalError: an impossible user, no key yet."""
    from plato.adapters.tokens import DEV_KID, issue

    try:
        return issue(folder.keys, DEV_KID, user, auth.issuer, auth.audience, ttl_s, scope)
    except SettingsError as e:
        raise LocalError(str(e)) from e
