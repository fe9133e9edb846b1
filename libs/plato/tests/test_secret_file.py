"""Secrets in files: the newest that fits, without a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from plato.adapters.blobs_s3 import S3Blobs
from plato.runtime.secret_file import LOOK_S, SecretFile
from plato.runtime.settings import AttachmentSettings, SettingsError


def short(found: bytes) -> str:
    return "" if len(found) >= 4 else "is too short"


def test_a_changed_file_is_read_again_and_what_does_not_fit_is_passed_over(tmp_path: Path) -> None:
    path, now = tmp_path / "secret", [0.0]
    path.write_bytes(b" first\n")
    secret = SecretFile(path, short, lambda: now[0])
    assert secret() == b"first"
    path.write_bytes(b"second")
    assert secret() == b"first", "looked at once a second at most"
    for contents, value in ((b"second", b"second"), (b"no", b"second"), (b"third", b"third")):
        path.write_bytes(contents)
        now[0] += LOOK_S
        assert secret() == value
    path.unlink()
    now[0] += LOOK_S
    assert secret() == b"third"
    path.write_bytes(b"fourth")
    now[0] += LOOK_S
    assert secret() == b"fourth"


def test_one_that_cannot_be_used_at_the_start_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(OSError, match="No such file"):
        SecretFile(path)
    path.write_bytes(b"no")
    with pytest.raises(ValueError, match="is too short"):
        SecretFile(path, short)


def test_both_keys_of_the_attachments_store_may_lie_in_files(tmp_path: Path) -> None:
    access, secret = tmp_path / "access-key", tmp_path / "secret-key"
    access.write_text("who\n")
    secret.write_text("word\n")
    settings = AttachmentSettings(
        s3_url="https://store.example/files", s3_access_key_file=access, s3_secret_key_file=secret
    )
    found = S3Blobs.of(settings)._keys()
    assert (found.access, found.secret, found.region) == ("who", "word", "us-east-1")
    access.write_text("")
    with pytest.raises(SettingsError, match=r"attachments\.s3_access_key_file: .* is empty"):
        S3Blobs.of(settings)
    with pytest.raises(ValueError, match="both set"):
        AttachmentSettings(s3_access_key="a", s3_access_key_file=access)
