"""Decisions → frames and who gets them. One shared Push encoding per message for every device of every member; the sending
device gets a Receipt instead, found by (user, device_id), since its connection may have changed. A guest's device knows no
Receipt: it gets the Push. On a refusal its shard gets the Receipt, and keeps it: else that shard would hold what was refused
for work that msg never comes to, and turn everybody away (`plato_state.core.admission`). An operation is stored otherwise
than it was sent, so its sending device gets the Push too, in front of the Receipt. A record without a device (0) came from
no connection: no Receipt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from plato.core.codes import Code, text
from plato.core.ids import slot_of
from plato.ports import Delivery, Payload, Route
from plato.topology.record import Topology
from plato.wire.v1 import client_pb2 as wire

from plato_msg.core.batch import Decision
from plato_msg.core.operations import is_operation

MAX_SESSION_ID = (1 << 64) - 1
NOWHERE = Route(0, 0)


@dataclass(slots=True)
class Part:
    """What one shard is to be handed. entries[i] belongs to device addressees[i] = (user, device_id)."""

    payloads: list[Payload] = field(default_factory=list)
    entries: list[Delivery] = field(default_factory=list)
    addressees: list[tuple[str, int]] = field(default_factory=list)
    size_bytes: int = 0
    """Of the payloads' frames."""

    def add(self, payload: Payload, conn_id: int, addressee: tuple[str, int]) -> None:
        """One entry. The same payload for entries in a row is held once."""
        if not self.payloads or self.payloads[-1] is not payload:
            self.payloads.append(payload)
            self.size_bytes += len(payload.frame)
        self.entries.append(Delivery(conn_id, len(self.payloads) - 1))
        self.addressees.append(addressee)


def users(decisions: Iterable[Decision]) -> list[str]:
    """Everybody whose routes the fan-out needs, each once."""
    found: dict[str, None] = {}
    for d in decisions:
        if d.outcome.seq and not d.repeated:
            found.update(dict.fromkeys(d.members))
        if d.uplink.device_id:
            found[d.uplink.from_user] = None
    return list(found)


def parts(
    decisions: Iterable[Decision], routes: Mapping[str, Mapping[int, Route]], topology: Topology, part_bytes: int
) -> list[tuple[str, Part]]:
    """(shard, part) in the order in which each shard is to be handed them; parts hold at most `part_bytes` of frames, or one
    frame. Within a shard the order is that of the decisions."""
    done: list[tuple[str, Part]] = []
    filling: dict[str, Part] = {}

    def add(payload: Payload, conn_id: int, addressee: tuple[str, int]) -> None:
        shard = topology.owner(slot_of(conn_id)).shard
        part = filling.get(shard)
        if part is None or (part.entries and part.size_bytes + len(payload.frame) > part_bytes):
            part = filling[shard] = Part()
            done.append((shard, part))
        part.add(payload, conn_id, addressee)

    for d in decisions:
        u, outcome = d.uplink, d.outcome
        push = None
        if outcome.seq and (not d.repeated or u.guest or d.row is not None):
            push = Payload(push_frame(d), u.trace_id)
        if push is not None and not d.repeated:
            for user, joined_seq in d.members.items():
                if joined_seq >= outcome.seq:
                    continue
                for device_id, route in routes.get(user, {}).items():
                    sender = user == u.from_user and device_id == u.device_id
                    if route.conn_id and (u.guest or not sender):
                        add(push, route.conn_id, (user, device_id))
        route = routes.get(u.from_user, {}).get(u.device_id, NOWHERE) if u.device_id else NOWHERE
        if not route.conn_id:
            continue
        if push is not None and (d.repeated if u.guest else is_operation(u.msg_type)):
            add(push, route.conn_id, (u.from_user, u.device_id))
        if not u.guest or push is None:
            add(Payload(receipt_frame(d), u.trace_id), route.conn_id, (u.from_user, u.device_id))
    return done


def push_frame(d: Decision) -> bytes:
    """MsgCmd{Push} of an accepted record, without run and push_no."""
    u = d.uplink
    push = wire.PushMsg(
        MsgID=d.outcome.msg_id,
        SessionID=session_id(u.conversation_id),
        Content=d.body,
        conversation_id=u.conversation_id,
        seq=d.outcome.seq,
        prev_seq=d.outcome.prev_seq,
        from_user=u.from_user,
        msg_type=d.msg_type,
        client_msg_id=u.client_msg_id,
        server_at_ms=d.outcome.server_at_ms,
        trace_id=u.trace_id,
        changed_seq=d.row.changed_seq if d.row is not None else 0,
        recalled=d.row is not None and d.row.recalled,
    )
    return wire.MsgCmd(Type=wire.PUSH, Payload=push.SerializeToString()).SerializeToString()


def notify_frame(conversation_id: str, seq: int, within_ms: int) -> bytes:
    """MsgCmd{Notify} for the members of a large conversation, without run and push_no."""
    newest = [wire.Cursor(conversation_id=conversation_id, seq=seq)]
    notify = wire.NotifyMsg(newest=newest, within_ms=within_ms)
    return wire.MsgCmd(Type=wire.NOTIFY, Payload=notify.SerializeToString()).SerializeToString()


def receipt_frame(d: Decision) -> bytes:
    """MsgCmd{Receipt}, without run and push_no: the first outcome's numbers; of a repetition with the code DUPLICATE, of a
    refusal with its code."""
    u, outcome = d.uplink, d.outcome
    code = Code.DUPLICATE if d.repeated and outcome.code == Code.OK else outcome.code
    receipt = wire.ReceiptMsg(
        code=code,
        msg=outcome.words or (text(code) if code else ""),
        conversation_id=u.conversation_id,
        client_msg_id=u.client_msg_id,
        client_id=u.client_id,
        msg_id=outcome.msg_id,
        seq=outcome.seq,
        prev_seq=outcome.prev_seq,
        server_at_ms=outcome.server_at_ms,
        trace_id=u.trace_id,
    )
    return wire.MsgCmd(Type=wire.RECEIPT, Payload=receipt.SerializeToString()).SerializeToString()


def session_id(conversation_id: str) -> int:
    """The public client's numeric SessionID: the conversation_id where that is a number, else 0."""
    if conversation_id.isascii() and conversation_id.isdigit() and len(conversation_id) <= 20:
        number = int(conversation_id)
        return number if number <= MAX_SESSION_ID else 0
    return 0
