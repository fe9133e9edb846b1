"""Entry point: `plato`, `python -m plato.cli`."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command line; returns the exit code."""
    from plato.cli.app import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
