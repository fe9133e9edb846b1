"""The topology record and its JSON (design §9). Written by the operator or the local supervisor, read by all.

A gateway's `state` goes serving → draining → leaving, and to lost while its node is; only a draining one may return to
serving. `poll` and fields that only the operator uses (writer, node, drain, resting, move) are left out of the JSON while
empty, so a record without them is the same text for readers of either age.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

FORMAT: Final = 1
SLOTS: Final = 1024
WORKER_IDS: Final = 1024

SERVING: Final = "serving"
DRAINING: Final = "draining"
LEAVING: Final = "leaving"
LOST: Final = "lost"


class TopologyError(ValueError):
    """The record cannot be read, or breaks a rule; says which."""


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots first..last (inclusive) belong to `shard` since `epoch` (the fencing token of that assignment)."""

    first: int
    last: int
    shard: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A state shard: where it serves (host:port) and which process is it now.

    ip is where that process was seen last, empty if unknown. Names of replaced pods may lead to the old address for as long
    as a cache keeps them (30 s are usual), so peers try `at` first, and the name when nobody answers there: it may be newer
    than the record.
    """

    addr: str
    uid: str
    ip: str = ""

    @property
    def at(self) -> str:
        """host:port to try first."""
        if not self.ip:
            return self.addr
        return f"{f'[{self.ip}]' if ':' in self.ip else self.ip}:{self.addr.rpartition(':')[2]}"


@dataclass(frozen=True, slots=True)
class Drain:
    """An order to a gateway to move its clients away.

    id is the epoch of the write that gave it, so it never repeats; deadline_ms is Unix ms, when the gateway closes what
    is left. within_ms: how long that is from the order on, by which a gateway goes whose clock is another one; 0: not
    said. reason: NodeCordoned, ScaleDown, Rollout, Manual or Evicted.
    """

    id: int
    reason: str
    pace_per_s: int
    settle_s: int
    deadline_ms: int
    within_ms: int = 0


@dataclass(frozen=True, slots=True)
class Rest:
    """Why a worker_id may not be given yet: pod `uid` had it, and until `until_ms` (Unix ms) something may mint under it."""

    uid: str
    until_ms: int


@dataclass(frozen=True, slots=True)
class Move:
    """The one open move of slots (ranges first..last). The ranges name the new owner already.

    id is the epoch of the write that opened it; epoch that of the present assignment, greater after an undo. source and
    target keep their meaning in an undo: the slots then belong to source again.
    """

    id: int
    slots: tuple[tuple[int, int], ...]
    source: str
    target: str
    epoch: int
    undo: bool = False

    @property
    def owner(self) -> str:
        """The shard that should acquire the slots now."""
        return self.source if self.undo else self.target


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway pod. worker_id mints; homes are the shards in whose slots it mints; ip and ports face clients; poll is the
    port of long polling, 0 for none.

    drain is given while draining and leaving, and kept by a lost one that was draining.
    """

    uid: str
    worker_id: int
    workers: int
    homes: tuple[str, ...]
    ip: str
    tcp: int
    ws: int
    admin: str
    state: str = SERVING
    zone: str = ""
    node: str = ""
    drain: Drain | None = None
    poll: int = 0


@dataclass(frozen=True, slots=True)
class Msg:
    """A msg process: worker_id mints msg_ids; addr is its gRPC host:port."""

    uid: str
    worker_id: int
    addr: str


@dataclass(frozen=True, slots=True)
class Topology:
    """One version of the record. Immutable; `epoch` rises with every write.

    writer is who holds the operator's lease (empty: the local supervisor); resting is {worker_id: Rest}.
    """

    cluster_uid: str
    epoch: int
    slots: tuple[SlotRange, ...]
    shards: Mapping[str, Shard] = field(default_factory=dict)
    gateways: Mapping[str, Gateway] = field(default_factory=dict)
    msgs: Mapping[str, Msg] = field(default_factory=dict)
    writer: str = ""
    resting: Mapping[int, Rest] = field(default_factory=dict)
    move: Move | None = None
    _owners: tuple[SlotRange, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        owners: list[SlotRange | None] = [None] * SLOTS
        for r in self.slots:
            if not 0 <= r.first <= r.last < SLOTS:
                raise TopologyError(f"slot range {r.first}-{r.last} is outside 0-{SLOTS - 1}")
            for slot in range(r.first, r.last + 1):
                if owners[slot] is not None:
                    raise TopologyError(f"slot {slot} has two owners")
                owners[slot] = r
        if None in owners:
            raise TopologyError(f"slot {owners.index(None)} has no owner")
        object.__setattr__(self, "_owners", tuple(owners))
        minters: dict[int, str] = {}
        gateways = [(name, gateway.worker_id) for name, gateway in self.gateways.items()]
        for name, worker_id in gateways + [(name, msg.worker_id) for name, msg in self.msgs.items()]:
            if not 0 <= worker_id < WORKER_IDS:
                raise TopologyError(f"worker_id {worker_id} of {name} is outside 0-{WORKER_IDS - 1}")
            if worker_id in minters:
                raise TopologyError(f"worker_id {worker_id} belongs to {minters[worker_id]} and to {name}")
            minters[worker_id] = name
            if worker_id in self.resting:
                raise TopologyError(f"worker_id {worker_id} of {name} is resting")

    @property
    def owners(self) -> tuple[SlotRange, ...]:
        """The range that holds each slot, by slot."""
        return self._owners

    def owner(self, slot: int) -> SlotRange:
        """The range that holds `slot`: its shard and the epoch of the assignment."""
        return self._owners[slot]

    def slots_of(self, shard: str) -> dict[int, int]:
        """{slot: epoch of its assignment} of one shard."""
        return {s: r.epoch for s, r in enumerate(self._owners) if r.shard == shard}

    def gateway_by_worker_id(self, worker_id: int) -> tuple[str, Gateway] | None:
        """The gateway that minted a conn_id, by its worker_id bits."""
        for name, gateway in self.gateways.items():
            if gateway.worker_id == worker_id:
                return name, gateway
        return None


def even_ranges(shards: Iterable[str], epoch: int) -> tuple[SlotRange, ...]:
    """All slots spread evenly over the shards, in name order given."""
    names = list(shards)
    if not names:
        raise TopologyError("a topology needs at least one shard")
    cuts = [SLOTS * i // len(names) for i in range(len(names) + 1)]
    return tuple(SlotRange(cuts[i], cuts[i + 1] - 1, n, epoch) for i, n in enumerate(names))


def with_process(
    topology: Topology,
    epoch: int,
    *,
    shards: Mapping[str, Shard] | None = None,
    gateways: Mapping[str, Gateway] | None = None,
    msgs: Mapping[str, Msg] | None = None,
) -> Topology:
    """A newer version with some records replaced or added."""
    return replace(
        topology,
        epoch=epoch,
        shards={**topology.shards, **(shards or {})},
        gateways={**topology.gateways, **(gateways or {})},
        msgs={**topology.msgs, **(msgs or {})},
    )


def next_epoch(last: int, unix_s: int) -> int:
    """max(last + 1, unix seconds)."""
    return max(last + 1, unix_s)


def dumps(t: Topology, *, indent: int | None = 1) -> str:
    """The record as JSON text; indent None writes it on one line."""
    only_operator: dict[str, Any] = {}
    if t.writer:
        only_operator["writer"] = t.writer
    if t.resting:
        only_operator["resting"] = {str(i): [r.uid, r.until_ms] for i, r in t.resting.items()}
    if (m := t.move) is not None:
        only_operator["move"] = {
            "id": m.id,
            "slots": [list(span) for span in m.slots],
            "from": m.source,
            "to": m.target,
            "epoch": m.epoch,
            "undo": m.undo,
        }
    return json.dumps(
        {
            "format": FORMAT,
            "cluster_uid": t.cluster_uid,
            "epoch": t.epoch,
            "slots": [[r.first, r.last, r.shard, r.epoch] for r in t.slots],
            "shards": {
                n: {"addr": s.addr, "uid": s.uid, **({"ip": s.ip} if s.ip else {})} for n, s in t.shards.items()
            },
            "gateways": {
                n: {
                    "uid": g.uid,
                    "worker_id": g.worker_id,
                    "workers": g.workers,
                    "homes": list(g.homes),
                    "ip": g.ip,
                    "tcp": g.tcp,
                    "ws": g.ws,
                    "admin": g.admin,
                    "state": g.state,
                    "zone": g.zone,
                    **({"node": g.node} if g.node else {}),
                    **({"drain": asdict(g.drain)} if g.drain is not None else {}),
                    **({"poll": g.poll} if g.poll else {}),
                }
                for n, g in t.gateways.items()
            },
            "msgs": {n: {"uid": m.uid, "worker_id": m.worker_id, "addr": m.addr} for n, m in t.msgs.items()},
            **only_operator,
        },
        indent=indent,
        separators=None if indent is not None else (",", ":"),
    )


def loads(text: str) -> Topology:
    """Reads the record. Raises TopologyError, which says what is wrong."""
    try:
        raw: Any = json.loads(text)
        if raw["format"] != FORMAT:
            raise TopologyError(f"topology format {raw['format']} is not {FORMAT}: this process is of another version")
        return Topology(
            cluster_uid=_text(raw["cluster_uid"]),
            epoch=_number(raw["epoch"]),
            slots=tuple(SlotRange(_number(a), _number(b), _text(n), _number(e)) for a, b, n, e in raw["slots"]),
            shards={
                n: Shard(_text(s["addr"]), _text(s["uid"]), _text(s.get("ip", ""))) for n, s in raw["shards"].items()
            },
            gateways={
                n: Gateway(
                    uid=_text(g["uid"]),
                    worker_id=_number(g["worker_id"]),
                    workers=_number(g["workers"]),
                    homes=tuple(_text(h) for h in g["homes"]),
                    ip=_text(g["ip"]),
                    tcp=_number(g["tcp"]),
                    ws=_number(g["ws"]),
                    admin=_text(g["admin"]),
                    state=_text(g.get("state", "serving")),
                    zone=_text(g.get("zone", "")),
                    node=_text(g.get("node", "")),
                    drain=_drain(g["drain"]) if g.get("drain") is not None else None,
                    poll=_number(g.get("poll", 0)),
                )
                for n, g in raw["gateways"].items()
            },
            msgs={n: Msg(_text(m["uid"]), _number(m["worker_id"]), _text(m["addr"])) for n, m in raw["msgs"].items()},
            writer=_text(raw.get("writer", "")),
            resting={int(i): Rest(_text(u), _number(until)) for i, (u, until) in raw.get("resting", {}).items()},
            move=_move(raw["move"]) if raw.get("move") is not None else None,
        )
    except TopologyError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise TopologyError(f"the topology record cannot be read: {e!r}") from e


def _drain(raw: Any) -> Drain:
    return Drain(
        id=_number(raw["id"]),
        reason=_text(raw["reason"]),
        pace_per_s=_number(raw["pace_per_s"]),
        settle_s=_number(raw["settle_s"]),
        deadline_ms=_number(raw["deadline_ms"]),
        within_ms=_number(raw.get("within_ms", 0)),
    )


def _move(raw: Any) -> Move:
    if not isinstance(raw["undo"], bool):
        raise TypeError(f"{raw['undo']!r} is neither true nor false")
    return Move(
        id=_number(raw["id"]),
        slots=tuple((_number(a), _number(b)) for a, b in raw["slots"]),
        source=_text(raw["from"]),
        target=_text(raw["to"]),
        epoch=_number(raw["epoch"]),
        undo=raw["undo"],
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no whole number")
    return value
