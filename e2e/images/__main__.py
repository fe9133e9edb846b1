"""`python -m e2e.images build|load|save`: build the images, put them onto the testbed's nodes, write them to a file.

Run it from the checkout's root. Exit code 0 when it is as asked, 1 with a reason in words when not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from e2e.images import TAG, provide
from e2e.images.build import Store
from e2e.images.nodes import write_archive
from e2e.images.recipes import DEVELOPMENT, SERVICES, recipe
from e2e.testbed.layout import TestbedError, layout


def main() -> int:
    """Do what the command line says."""
    arguments = _parser().parse_args()
    here = layout(arguments.state)
    services = arguments.services or [*SERVICES, *DEVELOPMENT]
    try:
        if arguments.command == "load":
            for reference in provide(here, arguments.tag, services).values():
                print(reference)
            return 0
        store = Store.of(here)
        images = {recipe(service).reference(arguments.tag): store.provide(recipe(service)) for service in services}
        for reference, digest in images.items():
            print(f"{reference} {digest}")
        if arguments.command == "save":
            with arguments.to.open("wb") as file:
                write_archive(file, store, images)
    except TestbedError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m e2e.images", description="Plato's images, without Docker.")
    parser.add_argument(
        "--state", help="folder of the testbed's run, default PLATO_TESTBED_STATE or /var/lib/plato-testbed"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("build", "build what changed"),
        ("load", "build what changed, and put it onto the testbed's nodes"),
        ("save", "build what changed, and write one OCI archive, such as for `kind load image-archive`"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument("--tag", default=TAG, help=f"default {TAG}")
        if name == "save":
            command.add_argument("--to", type=Path, required=True, help="the archive's file")
        command.add_argument("services", nargs="*", help=f"of {', '.join((*SERVICES, *DEVELOPMENT))}; default all")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
