"""Execs a program that must not outlive its parent, where wanted under another user id. Runs as a script, alone.

    python -I -S launch.py --parent PID --signal N [--map UID | --become UID:GID] -- PROGRAM ARGUMENT …

In this order: the user id changes first (a change of credentials clears the parent-death signal), then the signal is
asked for, then the parent is looked at once more (it may be gone already), then the program replaces this process.

PostgreSQL refuses to run as root. `--map UID` gives the program its own user namespace in which our id has the number UID;
files stay owned by us. `--become UID:GID` is the way where user namespaces are refused: a plain setuid. Only the standard
library is imported here, and little of it: each child pays for it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

_CLONE_NEWUSER = 0x1000_0000
_PR_SET_PDEATHSIG = 1

EXIT_CANNOT = 126
"""Exit code when the program could not be executed; the reason stands on stderr."""


def _call(libc: ctypes.CDLL, name: str, *arguments: int) -> None:
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:  # noqa: PTH123 (pathlib would double the start-up time)
        file.write(text)


def enter_user_namespace(libc: ctypes.CDLL, uid: int) -> None:
    """A new user namespace in which our user and group have the number `uid`. Raises OSError where it is refused."""
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    _call(libc, "unshare", _CLONE_NEWUSER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {outer_uid} 1")
    _write("/proc/self/gid_map", f"{uid} {outer_gid} 1")


def main(arguments: Sequence[str]) -> int:
    """Changes ids, asks for the signal, execs. Returns only on failure."""
    split = list(arguments).index("--")
    options = dict(zip(arguments[:split:2], arguments[1:split:2], strict=True))
    program = list(arguments[split + 1 :])
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if "--map" in options:
            enter_user_namespace(libc, int(options["--map"]))
        elif "--become" in options:
            uid, gid = (int(part) for part in options["--become"].split(":"))
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
        _call(libc, "prctl", _PR_SET_PDEATHSIG, int(options["--signal"]), 0, 0, 0)
        if os.getppid() != int(options["--parent"]):
            return EXIT_CANNOT
        os.execv(program[0], program)
    except OSError as e:
        print(f"cannot start {program[0]}: {e.strerror}", file=sys.stderr)
    return EXIT_CANNOT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
