"""A process of its own: looks at one picture, writes its thumbnail, and ends. `python -P thumbnail.py SOURCE THUMBNAIL`

    stdout   one line of JSON per step that is done: {"width", "height", "thumbnail": its media type or ""}; the last counts
    exit     0; 3: no picture

A picture may claim any size in a few bytes: what would take more than PIXELS_MAX pixels in memory gets no thumbnail, and the
limits of the process hold for what Pillow does all the same. Imports nothing of Plato: it starts once per picture.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Final

from PIL import Image, ImageOps

FORMATS: Final = ("JPEG", "PNG", "GIF", "WEBP")
SIDE_PX: Final = 320
PIXELS_MAX: Final = 25_000_000
MEMORY_BYTES: Final = 512 << 20
CPU_S: Final = 20
FILE_BYTES: Final = 1 << 20
NO_PICTURE: Final = 3
_ORIENTATION: Final = 0x0112


def main(source: str, thumbnail: str) -> int:
    """Entry point; returns the exit code."""
    os.nice(10)  # messages go first
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    Image.MAX_IMAGE_PIXELS = None  # ours holds
    try:
        picture = Image.open(source, formats=FORMATS)
    except Exception:  # whatever Pillow raises on bytes that are none
        return NO_PICTURE
    with picture:
        width, height = picture.size
        if picture.format in ("JPEG", "WEBP") and _turned(picture):
            width, height = height, width
        _say(width, height, "")
        picture.draft("RGB", (2 * SIDE_PX, 2 * SIDE_PX))  # JPEG is read at a fraction of its size
        if picture.width * picture.height > PIXELS_MAX:
            return 0
        picture.load()
        if picture.format == "PNG" and _turned(picture):
            width, height = height, width
        media_type = _write(picture, Path(thumbnail))
        _say(width, height, media_type)
    return 0


def _write(picture: Image.Image, target: Path) -> str:
    """Writes the thumbnail: upright, and with nothing of what else the file says."""
    shown = ImageOps.exif_transpose(picture)
    see_through = shown.mode in ("RGBA", "LA", "PA") or "transparency" in shown.info
    shown = shown.convert("RGBA" if see_through else "RGB")
    shown.thumbnail((SIDE_PX, SIDE_PX))
    bare = Image.new(shown.mode, shown.size)
    bare.paste(shown)
    if see_through:
        bare.save(target, "WEBP", quality=80)
        return "image/webp"
    bare.save(target, "JPEG", quality=80, optimize=True)
    return "image/jpeg"


def _turned(picture: Image.Image) -> bool:
    """Shown lying on its side."""
    try:
        return int(picture.getexif().get(_ORIENTATION, 1)) in (5, 6, 7, 8)
    except Exception:  # metadata that cannot be read turn nothing
        return False


def _say(width: int, height: int, thumbnail: str) -> None:
    print(json.dumps({"width": width, "height": height, "thumbnail": thumbnail}), flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
