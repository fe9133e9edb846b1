"""What a live load found: the checker's findings and the figures, whole and per step. Pure: records in, report out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from e2e.live.history import Connected, Records, Spoken
from e2e.live.plan import Plan
from tests.faults import checker
from tests.faults.load import quantile

ACK_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Mark:
    """From `at` on (time.monotonic()), things belong to `name`."""

    name: str
    at: float


@dataclass(slots=True)
class Excuse:
    """Connections to `host` may break between `began` and `ended` (time.monotonic()), because `why`."""

    host: str
    why: str
    began: float
    ended: float = float("inf")

    def ends(self, at: float) -> None:
        """From then on a break is no longer excused."""
        self.ended = at

    def covers(self, lost: str, at: float) -> bool:
        """Whether it excuses that a connection to the address `lost` broke at that time."""
        place = lost.rpartition("://")[2].partition("/")[0]
        return self.host in (place, place.rpartition(":")[0]) and self.began <= at <= self.ended


@dataclass(frozen=True, slots=True)
class Part:
    """One step's figures. longest_gap_s: the longest time that one client had no connection."""

    name: str
    seconds: float
    messages: int
    late: int
    slowest_ack_s: float
    reconnects: Mapping[str, int]
    longest_gap_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """The whole run."""

    clients: int
    gateways: tuple[str, ...]
    """Hosts that clients were connected to."""
    seconds: float
    """How long they talked."""
    wanted_per_s: float
    messages: int
    late: int
    """Acknowledged later than ACK_WITHIN_S, or never."""
    refused: int
    unsettled: int
    acks_s: tuple[float, ...]
    """Sorted; infinite: never."""
    reconnects: Mapping[str, int]
    excused: int
    unannounced: tuple[Connected, ...]
    """Reconnects that no Redirect announced and no killed process explains."""
    offline: tuple[str, ...]
    """Who was offline at the end."""
    longest_gap_s: float
    slowest_delivery_s: float
    """From the handing over to the showing at the other side."""
    worst_lag_s: float
    """Of the workers' own loops."""
    parts: tuple[Part, ...]
    history: checker.History
    findings: tuple[checker.Finding, ...] = field(default=())

    @property
    def per_s(self) -> float:
        """Messages per second while they talked."""
        return self.messages / max(self.seconds, 0.001)

    @property
    def in_time(self) -> float:
        """Share of the messages that were acknowledged within ACK_WITHIN_S."""
        return 1 - self.late / self.messages if self.messages else 0.0

    def __str__(self) -> str:
        """Some lines for people."""
        found = checker.summary(self.findings)
        lines = [
            f"live load: {self.clients} clients on {len(self.gateways)} gateways, {self.messages} messages in "
            f"{self.seconds:.0f} s ({self.per_s:.1f}/s)",
            f"  acknowledged: p50 {quantile(self.acks_s, 0.5) * 1000:.0f} ms, "
            f"p99 {quantile(self.acks_s, 0.99) * 1000:.0f} ms, max {self.acks_s[-1] if self.acks_s else 0:.1f} s; "
            f"within {ACK_WITHIN_S:.0f} s: {self.in_time:.2%}",
            f"  reconnects: {_counts(self.reconnects)}; excused {self.excused}, unannounced {len(self.unannounced)}; "
            f"longest gap {self.longest_gap_s:.1f} s",
            f"  slowest delivery {self.slowest_delivery_s:.1f} s; refused {self.refused}, unsettled {self.unsettled}, "
            f"offline at the end {len(self.offline)}; the load's own worst lag {self.worst_lag_s:.1f} s",
            "  " + ", ".join(f"{name} {n}" for name, n in found.items()),
        ]
        width = max((len(part.name) for part in self.parts), default=0)
        lines += [
            f"  {part.name:<{width}} {part.seconds:6.1f} s {part.messages:6} messages, late {part.late:3}, "
            f"slowest {part.slowest_ack_s:5.1f} s, gap {part.longest_gap_s:4.1f} s, reconnects {_counts(part.reconnects)}"
            for part in self.parts
        ]
        return "\n".join(lines)


def make_report(
    plan: Plan,
    records: Records,
    rows: Sequence[checker.Row],
    stored: Mapping[str, Sequence[checker.Row]],
    marks: Sequence[Mark],
    excuses: Sequence[Excuse],
    now: float,
) -> Report:
    """rows: of the database; stored: per user, of its client's store; now: time.monotonic()."""
    spoken = sorted(records.spoken.values(), key=lambda s: s.at)
    history = _history(plan, records, rows, stored)
    again = [c for c in records.connected if c.cause != "start"]
    excused = [c for c in again if c.cause != "redirect" and any(e.covers(c.lost, c.at - c.gap_s) for e in excuses)]
    unannounced = [c for c in again if c.cause != "redirect" and c not in excused]
    began = marks[0].at if marks else now
    talked_until = next((m.at for m in marks if m.name == "silence"), now)
    gaps = [c.gap_s for c in again] + [now - at for at in records.offline.values()]
    return Report(
        clients=plan.users,
        gateways=tuple(sorted({_host(c.gateway) for c in records.connected})),
        seconds=talked_until - began,
        wanted_per_s=plan.rate_per_s,
        messages=len(spoken),
        late=sum(_wait_s(s) > ACK_WITHIN_S for s in spoken),
        refused=sum(s.refused for s in spoken),
        unsettled=sum(s.settled is None and not s.refused for s in spoken),
        acks_s=tuple(sorted(map(_wait_s, spoken))),
        reconnects=Counter(c.cause for c in again),
        excused=len(excused),
        unannounced=tuple(unannounced),
        offline=tuple(sorted(records.offline)),
        longest_gap_s=max(gaps, default=0.0),
        slowest_delivery_s=_slowest_delivery_s(records),
        worst_lag_s=max(records.lags_s, default=0.0),
        parts=tuple(_parts(spoken, again, marks, now)),
        history=history,
        findings=tuple(checker.check(history)),
    )


def _history(
    plan: Plan, records: Records, rows: Sequence[checker.Row], stored: Mapping[str, Sequence[checker.Row]]
) -> checker.History:
    sent = tuple(
        checker.Sent(s.user, 0, s.conversation_id, s.client_msg_id, s.body, s.order, s.refused)
        for s in records.spoken.values()
    )
    mine: dict[str, set[str]] = {plan.user(n): set() for n in range(plan.users)}
    for s in records.spoken.values():
        mine[s.user].add(s.conversation_id)
        mine[s.to].add(s.conversation_id)
    clients = tuple(
        checker.Client(
            user,
            0,
            frozenset(conversations),
            tuple(row for _, row in records.shown.get(user, ())),
            tuple(stored.get(user, ())),
        )
        for user, conversations in mine.items()
    )
    return checker.History(sent, tuple(rows), clients)


def _parts(spoken: Sequence[Spoken], again: Sequence[Connected], marks: Sequence[Mark], now: float) -> list[Part]:
    made = []
    for mark, until in zip(marks, [*(m.at for m in marks[1:]), now], strict=True):
        its = [s for s in spoken if mark.at <= s.at < until]
        came = [c for c in again if mark.at <= c.at < until]
        made.append(
            Part(
                mark.name,
                until - mark.at,
                len(its),
                sum(_wait_s(s) > ACK_WITHIN_S for s in its),
                max(map(_wait_s, its), default=0.0),
                Counter(c.cause for c in came),
                max((c.gap_s for c in came), default=0.0),
            )
        )
    return made


def _wait_s(spoken: Spoken) -> float:
    """From the handing over to the acknowledgement. A refusal is an answer, too: the checker counts it."""
    if spoken.accepted is None:
        return 0.0 if spoken.refused else float("inf")
    return spoken.accepted - spoken.at


def _slowest_delivery_s(records: Records) -> float:
    return max(
        (
            at - spoken.at
            for user, shown in records.shown.items()
            for at, row in shown
            if row.from_user != user and (spoken := records.spoken.get((row.from_user, row.client_msg_id)))
        ),
        default=0.0,
    )


def _host(address: str) -> str:
    return address.rpartition("://")[2].partition("/")[0].rpartition(":")[0]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "none"
