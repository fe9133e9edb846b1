"""The testbed's two bases: Debian's own Python, one to build in (with venv), one to run in (without, and without docs).

`debootstrap` makes the first, removing packages the second. Each becomes a buildah image and, as a tar in the cache,
survives a wiped buildah storage. A production build takes the public Python image instead: docs/images.md.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Final

from e2e.testbed.layout import TestbedError
from e2e.testbed.processes import run

SUITE: Final = "bookworm"
INCLUDED: Final = "python3,python3-venv,ca-certificates,tzdata"
PURGED: Final = (
    "python3-venv",
    "python3.11-venv",
    "python3-pip-whl",
    "python3-setuptools-whl",
    "python3-distutils",
    "python3-lib2to3",
)
UNUSED: Final = (
    "var/cache/apt",
    "var/lib/apt",
    "var/log",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/lintian",
)
"""Folders that no process reads; they are emptied."""

_ENVIRONMENT: Final = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def key() -> str:
    """Names the content: 12 hex digits of what it is made from."""
    recipe = "\0".join(("1", SUITE, INCLUDED, *PURGED, *UNUSED, platform.machine()))
    return hashlib.sha256(recipe.encode()).hexdigest()[:12]


def tars(cache: Path) -> tuple[Path, Path]:
    """The root file systems (to run in, to build in) as tar files in the cache, made first if they are not there."""
    runs, builds = cache / f"base-{key()}.tar", cache / f"build-base-{key()}.tar"
    if runs.exists() and builds.exists():
        return runs, builds
    if shutil.which("debootstrap") is None:
        raise TestbedError(
            "there is no debootstrap; `make testbed-up` installs it (Debian: apt-get install debootstrap)"
        )
    print(f"base: Debian {SUITE} by debootstrap into {runs}", flush=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="unfinished-base-") as temporary:
        top = Path(temporary, "root")
        run(["nice", "debootstrap", "--variant=minbase", f"--include={INCLUDED}", SUITE, top])
        for folder in UNUSED:
            _empty(top / folder)
        _pack(top, builds)
        # No word of dpkg's about folders that we emptied is of use; a failure is.
        run(["chroot", top, "dpkg", "--purge", "--force-depends", *PURGED])
        _pack(top, runs)
    return runs, builds


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _pack(top: Path, tar: Path) -> None:
    unfinished = tar.with_suffix(".new")
    run(["tar", "--create", "--file", unfinished, "--directory", top, "--numeric-owner", "--exclude=./dev/*", "."])
    unfinished.rename(tar)


def config() -> list[str]:
    """What `buildah config` sets on either: the variables that a public base sets too."""
    return ["--env", _ENVIRONMENT, "--env", "LANG=C.UTF-8", "--cmd", "python3"]
