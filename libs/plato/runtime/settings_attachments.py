"""The section `attachments` of the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from plato.runtime.section import Section


class AttachmentSettings(Section):
    """Files that people send. They lie in a folder that every msg process sees, or in a bucket of a store that speaks S3."""

    folder: Path | None = Field(None, description="Folder of the files; unset, and no s3_url: attachments are off.")
    s3_url: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="The bucket's address, https://store.example/bucket or https://bucket.store.example.",
    )
    s3_region: str = Field("us-east-1", min_length=1, description="Region that requests are signed for.")
    s3_access_key: str = Field("", description="Who we are to the store.")
    s3_access_key_file: Path | None = Field(
        None, description="Instead: file that holds it, read again when it changes, as s3_secret_key_file is."
    )
    s3_secret_key_file: Path | None = Field(None, description="File that holds the secret key.")
    bytes_max: int = Field(26_214_400, ge=1, le=1_073_741_824, description="Largest file.")
    types: tuple[str, ...] = Field(
        (
            "image/jpeg",
            "image/png",
            "image/gif",
            "image/webp",
            "audio/*",
            "video/*",
            "text/plain",
            "text/csv",
            "application/pdf",
            "application/zip",
            "application/octet-stream",
        ),
        description="Media types that are taken; audio/* stands for all of that kind. A picture's is told by its bytes.",
    )
    keep_unused_s: int = Field(
        86_400, ge=60, description="A file that no message references, or none any more, is removed after this."
    )
    unused_bytes_max: int = Field(
        268_435_456,
        ge=1,
        description="Files of one user that no message references; past it: no upload. Disks are finite.",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        known = bool(self.s3_access_key) + (self.s3_access_key_file is not None)
        if self.s3_url and not (known and self.s3_secret_key_file):
            raise ValueError(
                "s3_url needs attachments.s3_access_key or s3_access_key_file, and attachments.s3_secret_key_file"
            )
        if known > 1:
            raise ValueError("s3_access_key and s3_access_key_file are both set; leave one of them out")
        if self.s3_url and self.folder is not None:
            raise ValueError("folder and s3_url are both set; leave one of them out")
        return self
