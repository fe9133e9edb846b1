"""Where the machine stands, and what an application is shown of it."""

from __future__ import annotations

from enum import Enum
from typing import Final

from plato.client.api import Phase


class Step(Enum):
    """Where the machine stands; session.py draws it."""

    WAITING = "waiting"
    LISTING = "listing"
    TOKEN = "token"
    CONNECTING = "connecting"
    HELLO = "hello"
    COMMITTING = "committing"
    LIVE = "live"
    STOPPED = "stopped"


PHASES: Final = {
    Step.WAITING: Phase.OFFLINE,
    Step.LISTING: Phase.CONNECTING,
    Step.TOKEN: Phase.CONNECTING,
    Step.CONNECTING: Phase.CONNECTING,
    Step.HELLO: Phase.LOGGING_IN,
    Step.COMMITTING: Phase.LOGGING_IN,
    Step.LIVE: Phase.ONLINE,
    Step.STOPPED: Phase.STOPPED,
}
LINKED: Final = (Step.HELLO, Step.COMMITTING, Step.LIVE)
