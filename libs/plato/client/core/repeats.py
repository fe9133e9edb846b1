"""Requests that wait for an answer: Login, ReConn, Sync, Pull, Heartbeat, Logout. Each is sent again by timer with back-off;
an answer "pending" or "later" begins its count anew; a third unanswered one means that the connection is dead (R3).

Bounded by what is outstanding: one login, one Sync, one heartbeat and a handful of pulls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from plato.wire.v1 import client_pb2 as pb

UNANSWERED_MAX: Final = 3
LATER_MIN_MS: Final = 250
"""First back-off after an answer "later": who answers is alive, so this is shorter than the repeat of what is unanswered."""
RETRY_MAX_MS: Final = 600_000
"""No told time is waited for longer: a server that says more is mistaken."""

Chance = Callable[[], float]
"""Gives [0, 1): the caller's source of jitter."""


@dataclass(slots=True)
class Timing:
    """What the server tells at login, with defaults until then. Milliseconds."""

    heartbeat_ms: int = 30_000
    resume_window_ms: int = 300_000
    reconnect_delay_ms: int = 1_000
    repeat_min_ms: int = 2_000
    repeat_max_ms: int = 30_000
    max_body_bytes: int = 61_440
    heartbeat_floor_ms: int = 15_000
    heartbeat_ceiling_ms: int = 240_000
    connect_delay_ms: int = 250
    connect_timeout_ms: int = 5_000

    def tune(self, ack: pb.ACKMsg) -> None:
        """Takes over what the answer to Login or ReConn told. 0 tells nothing; but beside an interval a delay of 0 is a
        time, too, and no bounds mean that the interval stands as it is."""
        if ack.heartbeat_ms or ack.reconnect_delay_ms:
            self.reconnect_delay_ms = ack.reconnect_delay_ms
        if ack.heartbeat_ms:
            self.heartbeat_ms = ack.heartbeat_ms
            self.heartbeat_ceiling_ms = ack.heartbeat_ceiling_ms or ack.heartbeat_ms
            self.heartbeat_floor_ms = ack.heartbeat_floor_ms or ack.heartbeat_ms
        self.resume_window_ms = ack.resume_window_ms or self.resume_window_ms
        self.repeat_min_ms = ack.repeat_min_ms or self.repeat_min_ms
        self.repeat_max_ms = max(ack.repeat_max_ms or self.repeat_max_ms, self.repeat_min_ms)
        self.max_body_bytes = ack.max_body_bytes or self.max_body_bytes
        self.connect_delay_ms = ack.connect_delay_ms or self.connect_delay_ms
        self.connect_timeout_ms = ack.connect_timeout_ms or self.connect_timeout_ms

    def backoff_ms(self, times: int, chance: Chance) -> int:
        """repeat_min × 2^times, at most repeat_max, less up to a quarter by chance."""
        return jittered_ms(self.repeat_min_ms, self.repeat_max_ms, times, chance)

    def later_ms(self, times: int, chance: Chance) -> int:
        """LATER_MIN_MS × 2^times, at most repeat_max, less up to a quarter by chance."""
        return jittered_ms(min(LATER_MIN_MS, self.repeat_max_ms), self.repeat_max_ms, times, chance)


def jittered_ms(first_ms: int, most_ms: int, times: int, chance: Chance) -> int:
    """first × 2^times, at most `most`, less up to a quarter by chance; at least 1."""
    whole = min(most_ms, first_ms << min(times, 20))
    return max(1, int(whole * (1 - chance() / 4)))


@dataclass(slots=True)
class Request:
    """One frame that waits for its answer. key: (type, ref). subject, from_seq: a gap's conversation and first seq."""

    kind: pb.CmdType.ValueType
    ref: int
    frame: bytes
    due_ms: int
    subject: str = ""
    from_seq: int = 0
    unanswered: int = 0  # sends since the last sign that it was received
    later: int = 0  # answers "later" in a row


class Requests:
    """Everything outstanding on one connection."""

    def __init__(self, timing: Timing, chance: Chance) -> None:
        self._timing = timing
        self._chance = chance
        self._open: dict[tuple[int, int], Request] = {}

    def __len__(self) -> int:
        return len(self._open)

    def ask(
        self,
        kind: pb.CmdType.ValueType,
        ref: int,
        frame: bytes,
        now_ms: int,
        subject: str = "",
        from_seq: int = 0,
    ) -> bytes:
        """Registers a request as sent now; returns its frame."""
        due_ms = now_ms + self._timing.backoff_ms(0, self._chance)
        self._open[kind, ref] = Request(kind, ref, frame, due_ms, subject, from_seq, unanswered=1)
        return frame

    def find(self, kind: pb.CmdType.ValueType, ref: int) -> Request | None:
        """The open request of this key."""
        return self._open.get((kind, ref))

    def only(self, kind: pb.CmdType.ValueType) -> Request | None:
        """The open request of this type, if there is one and no second: what an answer without a ref must mean."""
        found = [r for r in self._open.values() if r.kind == kind]
        return found[0] if len(found) == 1 else None

    def done(self, kind: pb.CmdType.ValueType, ref: int) -> Request | None:
        """Takes the request out: it is answered, or not wanted any more."""
        return self._open.pop((kind, ref), None)

    def pending(self, request: Request, now_ms: int) -> None:
        """It was received: the count begins anew."""
        request.unanswered = 1
        request.due_ms = now_ms + self._timing.backoff_ms(0, self._chance)

    def later(self, request: Request, now_ms: int, told_ms: int = 0) -> None:
        """It was answered "later": the same again after the time told, else after a back-off."""
        request.unanswered = 0
        request.due_ms = now_ms + (min(told_ms, RETRY_MAX_MS) or self._timing.later_ms(request.later, self._chance))
        request.later += 1

    def expire(self, now_ms: int) -> list[bytes] | None:
        """The frames to send again now; None: one of them was unanswered for the third time."""
        frames = []
        for request in self._open.values():
            if request.due_ms > now_ms:
                continue
            if request.unanswered >= UNANSWERED_MAX:
                return None
            request.due_ms = now_ms + self._timing.backoff_ms(request.unanswered, self._chance)
            request.unanswered += 1
            frames.append(request.frame)
        return frames

    def deadline_ms(self) -> int | None:
        """When `expire` has something to do next."""
        return min((r.due_ms for r in self._open.values()), default=None)

    def clear(self) -> list[Request]:
        """Forgets all, as the connection is gone; returns them."""
        gone = list(self._open.values())
        self._open.clear()
        return gone
