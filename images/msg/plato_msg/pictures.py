"""What a picture's bytes say of it, and its thumbnail. Pillow reads what strangers sent, so it does that in a
process of its own.

    first bytes → is it one of TYPES? → [child: dimensions, thumbnail; bounded in memory, time and file size] → Picture

Memory: PROCESSES children, each bounded by plato_msg.thumbnail.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Final, NamedTuple

from plato.core.errors import Unavailable
from plato.runtime import logs

PROCESSES: Final = 2
TIMEOUT_S: Final = 30.0
_CHILD: Final = Path(__file__).with_name("thumbnail.py")
SNIFFED_BYTES: Final = 16
TYPES: Final = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})


class Picture(NamedTuple):
    """width, height: as it is shown; 0 where nothing could tell. thumbnail: its media type; "" where there is none."""

    width: int
    height: int
    thumbnail: str


class NoPicture(Exception):
    """The bytes begin as a picture does, and are none."""


def media_type(first: bytes) -> str:
    """The media type of a picture that begins with these bytes; "" for anything else."""
    if first.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if first.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if first.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if first[:4] == b"RIFF" and first[8:12] == b"WEBP":
        return "image/webp"
    return ""


class Pictures:
    """Looks at pictures, some at a time."""

    def __init__(self, processes: int = PROCESSES, timeout_s: float = TIMEOUT_S) -> None:
        self._turns = asyncio.Semaphore(processes)
        self._timeout_s = timeout_s
        self._log = logs.get("pictures")

    async def look(self, source: Path, thumbnail: Path) -> Picture:
        """What `source` is; writes its thumbnail. Raises NoPicture, and Unavailable where no process can be started."""
        async with self._turns:
            try:
                child = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", str(_CHILD), str(source), str(thumbnail),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env={key: os.environ[key] for key in ("PATH", "PYTHONPATH", "TMPDIR") if key in os.environ},
                )  # fmt: skip
            except OSError as e:
                raise Unavailable(f"no process for thumbnails: {e}") from e
            try:
                async with asyncio.timeout(self._timeout_s):
                    out, err = await child.communicate()
            except TimeoutError:
                out, err = b"", b"it took too long"
            finally:
                if child.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        child.kill()
                    await child.wait()
        # Each line replaces the one before: the dimensions are known before the thumbnail is tried.
        said = [json.loads(line) for line in out.splitlines() if line.endswith(b"}")]
        if not said:
            if child.returncode == 3:
                raise NoPicture
            self._log.warning("a picture could not be looked at", reason=err.decode("utf-8", "replace")[-500:])
            return Picture(0, 0, "")
        return Picture(**said[-1])
