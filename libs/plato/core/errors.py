"""The error tree. Our fault and the peer's are different branches.

    PlatoError
    ├── PeerError            the other side's fault; carries the wire code that it is answered with
    └── DependencyError      a part that we need did not do its work
        ├── Unavailable      away, or the outcome is unknown; repeating is right
        ├── Fenced           a newer owner exists; step down, repeating is wrong
        ├── Unstorable       the data themselves were refused; the same again would be refused again
        └── OutOfRange       the bus does not hold the position any more, or not yet; its partition stops (R11)

A setting that cannot work is plato.runtime.settings.SettingsError: it ends the process before anything else began.
"""

from __future__ import annotations

from plato.core.codes import Code, text


class PlatoError(Exception):
    """Root of what Plato raises."""


class PeerError(PlatoError):
    """The peer sent something that is refused with `code`."""

    def __init__(self, code: Code, detail: str = "") -> None:
        super().__init__(f"{text(code)}{': ' + detail if detail else ''}")
        self.code = code


class DependencyError(PlatoError):
    """A dependency (database, store, bus, another service) failed."""


class Unavailable(DependencyError):
    """It is away or its answer is unknown. Repeat the same with back-off."""


class Fenced(DependencyError):
    """A newer fence or epoch stands. The caller lost its ownership and must step down."""


class OutOfRange(DependencyError):
    """A partition's log does not hold the position that is next. Whoever reads it stops there: nothing may be skipped."""


class Unstorable(DependencyError):
    """The database refused the data themselves (SQLSTATE class 22 or 23), and nothing was written."""
