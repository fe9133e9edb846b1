"""How the pod's first process asks the link for a drain before it ends: a file, so that a link that starts again knows too.

    SIGTERM ─▸ pod writes <run_dir>/term ─▸ link drains ─▸ SIGUSR1 ─▸ pod ends the workers and the link

The file holds the moment, in ms of the machine's monotonic clock, so that the deadline is one, whoever counts it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

NAME: Final = "term"


def ask(run_dir: Path, now_ms: int) -> None:
    """SIGTERM came at `now_ms` of the machine's monotonic clock. Raises OSError."""
    fresh = run_dir / f"{NAME}.new"
    fresh.write_text(f"{now_ms}\n", encoding="ascii")
    fresh.replace(run_dir / NAME)


def asked_ms(run_dir: Path) -> int | None:
    """When SIGTERM came; None: it did not."""
    try:
        return int((run_dir / NAME).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def forget(run_dir: Path) -> None:
    """A new pod begins: what one before it was asked is over. Raises OSError."""
    (run_dir / NAME).unlink(missing_ok=True)
