"""Hop 2: what workers say and clients send, in batches of columns; uplinks on to the bus, their ACKs back.

    LinkBatch ─▸ events of each worker, in order ─▸ frames, decoded in two steps (MsgCmd, then its payload)
        OPENED, CLOSED, NAMED … ─▸ the connection machine            UP ─▸ checks ─▸ order (R1) ─▸ batcher (R8)
        Login, Sync, … ─▸ the connection machine                                bus.append ─▸ ACKs, one batch per gateway

One pass over a batch, no task per frame, with a pause for everybody else after each SLICE_S; the batch counts as taken
when all of it is done. A broken frame costs its sender its socket and nobody else anything, and so does a flood of them:
`core/pace` says how many of a connection's frames are served, `core/admission` which uplinks are let in. Memory: the
batches in hand (≤ 2 untaken per stream) and what `batcher` bounds.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from google.protobuf.message import DecodeError
from plato.core.codes import Code
from plato.core.conversations import is_conversation_id, partition_of
from plato.core.errors import PeerError, Unavailable
from plato.core.frames import split
from plato.core.ids import slot_of
from plato.ports import BusProducer, Session, TokenVerifier
from plato.runtime import logs
from plato.wire.v1.bus_pb2 import Record
from plato.wire.v1.client_pb2 import (
    ACK,
    HEARTBEAT,
    LOGIN,
    LOGOUT,
    PULL,
    READ,
    RECONN,
    SYNC,
    TYPING,
    UP,
    ACKMsg,
    CmdType,
    HeartbeatMsg,
    LoginMsg,
    MsgCmd,
    PullMsg,
    ReConnMsg,
    SyncMsg,
    UPMsg,
)
from plato.wire.v1.state_pb2 import LinkBatch, WorkerEvents

from plato_state import metrics
from plato_state.core import answers, checks
from plato_state.core.admission import Refusal
from plato_state.core.answers import Kind
from plato_state.core.attaches import Announced, Attach, Attaches, slots_of_bitmap
from plato_state.core.pace import PIECE_BYTES, PIECE_FRAMES, VERIFY_FRAMES, Paces, pieces
from plato_state.core.session import Connection, Phase
from plato_state.core.uplinks import Append, Busy, Expected, Joined, Stage, Ticket, Uplinks
from plato_state.downlink import Downlink
from plato_state.sessions import Sessions
from plato_state.shard import Shard, pending_ticks
from plato_state.signals import Signals
from plato_state.stream import SEND, SEND_AND_CLOSE, LinkStream, u32_column, u64_column

OPENED: Final = 1
DATA: Final = 2
CLOSED: Final = 3
BEGIN: Final = 4
NAMED: Final = 5
END: Final = 6

APPEND_BACKOFF_MIN_S: Final = 0.05
APPEND_BACKOFF_MAX_S: Final = 1.0
SECRET_BYTES: Final = 16
SLICE_S: Final = 0.003
"""How long one batch is worked off in a row."""
_SMALL_BYTES: Final = min(PIECE_BYTES, 5 * PIECE_FRAMES)
"""A run up to this is one piece, whatever is in it: a frame has five bytes at least."""


def unix_ms() -> int:
    """The clock, for display only."""
    return time.time_ns() // 1_000_000


class Uplink:
    """Handles LinkBatches. `main()` is the loop that appends."""

    def __init__(
        self,
        shard: Shard,
        downlink: Downlink,
        sessions: Sessions,
        signals: Signals,
        bus: BusProducer,
        tokens: TokenVerifier,
    ) -> None:
        self._shard = shard
        self._downlink = downlink
        self._sessions = sessions
        self._bus = bus
        self._tokens = tokens
        self._log = logs.get("uplink").bind()
        self._something = asyncio.Event()
        self._pending: deque[tuple[int, Ticket]] = deque()
        self._pending_ticks = pending_ticks(shard.settings.pending_ms)
        self._codes = {code: metrics.UPLINKS.labels(code.name.lower()) for code in Code}
        self._paces = Paces()
        self._unknown = metrics.FRAMES.labels("unknown")
        self._too_many = metrics.DROPPED.labels("flooding")
        self._types = {kind: metrics.FRAMES.labels(CmdType.Name(kind).lower()) for kind in CmdType.values()}
        self._handlers: dict[int, Callable[[Connection, bytes], None]] = {
            LOGIN: self._login,
            HEARTBEAT: self._heartbeat,
            RECONN: self._reconn,
            ACK: self._ack,
            UP: self._up,
            SYNC: self._sync,
            PULL: self._pull,
            READ: signals.read,
            TYPING: signals.type,
            LOGOUT: self._logout,
        }
        sessions.replay = self.frames
        self.redirect: Callable[[LinkStream, LinkBatch], None] = lambda _, __: None
        """Handles the connections that a gateway would have elsewhere; set by service."""

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────

    async def handle(self, link: LinkStream, batch: LinkBatch) -> None:
        """One LinkBatch, whole unless its stream ends. Nothing in it can hurt more than the connection that it speaks of.

        The caller hands in a stream's batches one after the other. Others run within; each event looks everything up anew.
        """
        link.taken(batch.taken)
        begun = time.perf_counter()
        for events in batch.events:
            for attach, kind, conn_id, chunk in self._events(link, events):
                try:
                    self._event(link, attach, kind, conn_id, chunk)
                except Exception:
                    # A fault of ours while one connection's event was handled must stay with that connection.
                    metrics.ERRORS.inc()
                    self._log.exception("an event could not be handled", conn_id=conn_id, kind=kind)
                if time.perf_counter() - begun > SLICE_S:
                    await asyncio.sleep(0)
                    if link.closed_why:
                        return
                    begun = time.perf_counter()
        if batch.redirect or batch.HasField("shed"):
            self.redirect(link, batch)
        if batch.batch_no:
            link.handled_batch(batch.batch_no)

    def _events(self, link: LinkStream, events: WorkerEvents) -> Iterator[tuple[Attach, int, int, bytes]]:
        """Events in order: (attach, kind, conn_id, data); a long run of frames comes in pieces."""
        kinds = events.kinds
        begins = bool(kinds) and kinds[0] == BEGIN
        attach = self._shard.attaches.accept(link.worker_id, events.worker, events.boot, events.attach, begins)
        if attach is None:
            metrics.DROPPED.labels("older_attach").inc(len(kinds))
            return
        try:
            conn_ids, lengths = u64_column(events.conn_ids), u32_column(events.lengths)
        except ValueError:
            metrics.ERRORS.inc()
            return
        data, at = events.data, 0
        for kind, conn_id, length in zip(kinds, conn_ids, lengths, strict=False):
            chunk = data[at : at + length]
            at += length
            if length <= _SMALL_BYTES or kind != DATA:
                yield attach, kind, conn_id, chunk
            else:
                for piece in pieces(chunk):
                    yield attach, kind, conn_id, piece

    def _event(self, link: LinkStream, attach: Attach, kind: int, conn_id: int, chunk: bytes) -> None:
        if kind == BEGIN:
            Attaches.begin(attach, slots_of_bitmap(chunk))
            return
        if kind == END:
            self._end(link, attach)
            return
        number = slot_of(conn_id)
        slot = self._shard.slots.get(number)
        if slot is None and number not in self._shard.assigned:
            link.not_owner(self._shard.topology_epoch)
            metrics.DROPPED.labels("not_owner").inc()
            return
        loaded = slot is not None and slot.loaded
        if kind == DATA:
            if loaded:
                self._data(attach, conn_id, chunk)
            else:
                self._not_ready(link, conn_id, chunk)
        elif kind in (OPENED, NAMED):
            Attaches.lives(attach, conn_id, loaded)
            if loaded and kind == OPENED:
                self._opened(attach, conn_id)
        elif kind == CLOSED:
            Attaches.closed(attach, conn_id)
            if loaded:
                connection = self._shard.connections.get(conn_id)
                if connection is not None:
                    self._sessions.run(connection, connection.closed())

    def _opened(self, attach: Attach, conn_id: int) -> None:
        if conn_id in self._shard.connections:
            return
        self._new(attach.boot, attach.worker, conn_id)

    def _new(self, boot: int, worker: int, conn_id: int) -> Connection:
        connection = Connection(conn_id, self._shard.rules)
        connection.boot, connection.worker = boot, worker
        self._shard.connections[conn_id] = connection
        self._sessions.run(connection, connection.opened())
        return connection

    def _end(self, link: LinkStream, attach: Attach) -> None:
        slots = self._shard.slots
        announced = Attaches.end(attach, lambda s: s in slots and slots[s].loaded)
        if announced is None:
            return
        link.announced.add(attach.worker)
        self.announced(announced)

    def announced(self, said: Announced) -> None:
        """A worker said completely what lives in some loaded slots (R6)."""
        shard, sessions = self._shard, self._sessions
        gone = [
            c
            for c in shard.connections.of_slots(said.slots)
            if c.boot == said.boot and c.worker == said.worker and c.conn_id not in said.named
        ]
        for connection in gone:
            sessions.run(connection, connection.closed())
        for conn_id in said.named:
            known = shard.connections.get(conn_id)
            if known is None:
                self._new(said.boot, said.worker, conn_id).named_only = True
            else:
                known.boot, known.worker = said.boot, said.worker
                sessions.run(known, known.named())
                self._downlink.named(known)
        self._log.info(
            "a worker announced itself",
            worker_id=said.worker_id,
            worker=said.worker,
            named=len(said.named),
            gone=len(gone),
            slots=len(said.slots),
        )

    # ── frames ───────────────────────────────────────────────────────────────────────────────────────────────

    def _data(self, attach: Attach, conn_id: int, chunk: bytes) -> None:
        connection = self._shard.connections.get(conn_id)
        if connection is None:
            connection = Connection(conn_id, self._shard.rules)  # in no table: only a Login or ReConn makes it known
        elif connection.phase is Phase.LIVE:
            connection.socket = True  # a loaded session may speak before it is named
            self._shard.heard(connection)
        connection.boot, connection.worker = attach.boot, attach.worker
        try:
            payloads = list(split(chunk))
        except PeerError:
            self._sessions.run(connection, connection.malformed(LOGIN))
            return
        served = self._paces.charge(conn_id, len(payloads), self._shard.now)
        if served == len(payloads):
            self.frames(connection, payloads)
            return
        self.frames(connection, payloads[:served])
        self._too_many.inc(len(payloads) - served)
        if connection.socket:  # else it was told already
            floods = self._paces.floods(conn_id, self._shard.now)
            self._sessions.run(connection, connection.too_fast(_kind_of(payloads[served]), floods=floods))
            if floods:
                self._log.info("closed: it floods", conn_id=conn_id)

    def frames(self, connection: Connection, payloads: Iterable[bytes]) -> None:
        """Handles frames of one connection, in order, until one of them ends its socket."""
        for payload in payloads:
            try:
                command = MsgCmd.FromString(payload)
            except DecodeError:
                self._sessions.run(connection, connection.malformed(LOGIN))
                return
            kind = command.Type
            handler = self._handlers.get(kind)
            if handler is None:
                self._unknown.inc()
                continue  # unknown types do no harm
            self._types[kind].inc()
            if connection.phase is not Phase.LIVE and self._before_live(connection, kind, payload):
                continue
            try:
                handler(connection, command.Payload)
            except DecodeError:
                self._sessions.run(connection, connection.malformed(kind))
                return
            if not connection.socket:
                return

    def _before_live(self, connection: Connection, kind: Kind, payload: bytes) -> bool:
        """True if the frame was dealt with: its connection is unknown, or a guest's that waits for its commit."""
        if kind in (LOGIN, RECONN):
            if connection.phase is Phase.NEW and connection.conn_id not in self._shard.connections:
                # Its OPENED was lost with a stream; what it says is as good.
                self._shard.connections[connection.conn_id] = connection
                self._sessions.run(connection, connection.opened())
            return False
        if connection.phase is Phase.NEW and connection.conn_id not in self._shard.connections:
            self._downlink.send(connection.conn_id, answers.error(Code.LOGIN_FIRST, kind))
            return True
        waiting = connection.guest_frame(payload, kind)
        if waiting is None:
            return False
        self._sessions.run(connection, waiting)
        return True

    def _not_ready(self, link: LinkStream, conn_id: int, chunk: bytes) -> None:
        """The slot is ours and still loads: each frame is answered, so that its client repeats it."""
        try:
            payloads = list(split(chunk))
            served = self._paces.charge(conn_id, len(payloads), self._shard.now)
            for payload in payloads[:served]:
                kind = MsgCmd.FromString(payload).Type
                if kind != ACK and not link.add(conn_id, answers.error(Code.NOT_READY, kind)):
                    metrics.DROPPED.labels("answer").inc()
            if served < len(payloads):
                self._too_many.inc(len(payloads) - served)
                floods = self._paces.floods(conn_id, self._shard.now)
                said = answers.error(Code.FLOODING if floods else Code.BUSY, _kind_of(payloads[served]))
                link.add(conn_id, said, SEND_AND_CLOSE if floods else SEND)
        except (DecodeError, PeerError):
            metrics.DROPPED.labels("malformed").inc()

    def _login(self, connection: Connection, payload: bytes) -> None:
        login = LoginMsg.FromString(payload)
        who: str | Code | None = checks.login_refusal(login)
        if who is not None:
            self._sessions.run(connection, connection.malformed(LOGIN))
            return
        if self._put_off(connection, LOGIN, login.token):
            return
        who = ""
        if login.token:
            digest = hashlib.blake2b(login.token.encode(), digest_size=16).digest()
            known = connection.verified
            # A live connection that says the same once more (it did not read the answer) costs no signature check.
            if known is not None and known[0] == digest and connection.phase in (Phase.COMMITTING, Phase.LIVE):
                who = known[1]
            else:
                self._paces.charge(connection.conn_id, VERIFY_FRAMES, self._shard.now)
                try:
                    who = self._tokens.verify(login.token)
                    connection.verified = digest, who
                except PeerError as e:
                    who = e.code
        actions = connection.login(
            who,
            login.Head.DeviceID,
            secrets.token_bytes(SECRET_BYTES),
            checks.label(login.platform),
            checks.label(login.network),
            login.heartbeat_ms,
        )
        self._sessions.run(connection, actions)

    def _reconn(self, connection: Connection, payload: bytes) -> None:
        message = ReConnMsg.FromString(payload)
        if self._put_off(connection, RECONN, message.secret):
            return
        network = checks.label(message.network)
        actions = connection.reconn(message.Head.ConnID, message.secret, network, message.heartbeat_ms)
        self._sessions.run(connection, actions)

    def _put_off(self, connection: Connection, kind: Kind, credential: str | bytes) -> bool:
        """True if a Login or ReConn was told to come later: before anything is spent on it. The public client, which has no
        credential, would not understand that."""
        if not connection.at_the_door or (self._shard.rules.guests and not credential):
            return False
        wait_ms = self._shard.turn_ms(connection)
        if wait_ms:
            metrics.PUT_OFF.inc()
            self._sessions.run(connection, connection.put_off(kind, wait_ms))
        return wait_ms > 0

    def _heartbeat(self, connection: Connection, payload: bytes) -> None:
        message = HeartbeatMsg.FromString(payload)
        self._sessions.run(connection, connection.heartbeat(message.run, message.push_no, message.heartbeat_ms))

    def _sync(self, connection: Connection, payload: bytes) -> None:
        message = SyncMsg.FromString(payload)
        self._sessions.run(connection, connection.sync(message.ref, payload))

    def _pull(self, connection: Connection, payload: bytes) -> None:
        message = PullMsg.FromString(payload)
        if not is_conversation_id(message.conversation_id) and connection.phase is Phase.LIVE:
            refusal = answers.pulled_refusal(Code.BAD_CONVERSATION, message.ref, message.conversation_id)
            self._downlink.send(connection.conn_id, refusal)
            return
        self._sessions.run(connection, connection.pull(message.ref, payload, message.conversation_id))

    def _logout(self, connection: Connection, _: bytes) -> None:
        self._sessions.run(connection, connection.logout())

    def _ack(self, connection: Connection, payload: bytes) -> None:
        message = ACKMsg.FromString(payload)
        if not connection.owns(message.ConnID):
            self._sessions.run(connection, connection.foreign(ACK))
        elif connection.phase is Phase.LIVE:
            self._downlink.acknowledged(connection, message.run, message.push_no)
        elif connection.phase >= Phase.WAITING:
            self._sessions.run(connection, connection.out_of_place(ACK))

    # ── uplinks ──────────────────────────────────────────────────────────────────────────────────────────────

    def _up(self, connection: Connection, payload: bytes) -> None:
        if connection.phase is not Phase.LIVE or connection.session is None:
            UPMsg.FromString(payload)
            self._sessions.run(connection, connection.out_of_place(UP))
            return
        up = UPMsg.FromString(payload)
        head, shard, guest = up.Head, self._shard, connection.session.guest
        conversation, client_id = head.SessionId, head.ClientID
        uplinks = connection.uplinks
        if uplinks is None:
            uplinks = connection.uplinks = Uplinks(connection.conn_id, shard.rules.max_uplinks, guest)
        code: Code | None = Code.FOREIGN_CONN_ID
        if connection.owns(head.ConnID):
            code = checks.refusal(up, shard.body_limit_bytes, guest)
        if code is not None:
            if code is not Code.BAD_CONVERSATION and code is not Code.BAD_CLIENT_ID:
                uplinks.refused(conversation, client_id, up.acked)
            self._answer_up(connection, code, conversation, client_id, up.client_msg_id)
            return
        client_msg_id = up.client_msg_id
        if guest:
            client_msg_id = checks.guest_message_id(connection.conn_id, conversation, client_id)
        decision = uplinks.offer(conversation, client_id, up.acked, client_msg_id)
        refusal: Refusal | None = None
        if isinstance(decision, Append):
            ticket, user = decision.ticket, connection.session.user
            refusal = shard.admission.refusal(connection.conn_id, user, shard.now_ms, random.random())
            if refusal is None:
                if self._queue(ticket, connection.session, up):
                    return
                refusal = shard.admission.full(shard.now_ms)
            metrics.REFUSED.labels(refusal.why).inc()
            decision = uplinks.busy(ticket)
        match decision:
            case Joined():
                self._arm(decision.ticket)
            case Expected():
                self._answer_up(
                    connection, Code.EXPECTED, conversation, client_id, client_msg_id, expected=decision.number
                )
            case Busy():
                code, retry_ms = (refusal.code, refusal.retry_ms) if refusal is not None else (Code.BUSY, 0)
                self._answer_up(connection, code, conversation, client_id, client_msg_id, retry_ms=retry_ms)
                for behind in decision.behind:
                    shard.drop(behind)
                    self._answer_ticket(connection, behind, Code.BUSY)

    def _queue(self, ticket: Ticket, session: Session, up: UPMsg) -> bool:
        """Puts an uplink's record behind the others of its partition. False: there is no room."""
        shard = self._shard
        trace_id = up.trace_id if len(up.trace_id) == checks.TRACE_ID_BYTES else secrets.token_bytes(16)
        record = Record(
            conversation_id=ticket.conversation,
            from_user=session.user,
            device_id=session.device_id,
            client_id=ticket.client_id,
            client_msg_id=ticket.client_msg_id,
            to_user=up.to_user,
            msg_type=up.msg_type,
            body=up.UPMsgBody,
            trace_id=trace_id,
            accepted_at_ms=unix_ms(),
            guest=session.guest,
        ).SerializeToString()
        ticket.trace_id = trace_id
        if not shard.batcher.add(ticket, partition_of(ticket.conversation, self._bus.partitions), record):
            return False
        shard.admission.begin(ticket.conn_id, session.user, shard.now_ms)
        self._arm(ticket)
        self._something.set()
        return True

    def _arm(self, ticket: Ticket) -> None:
        """This copy is answered in time, by its outcome or by PENDING (R3)."""
        if not ticket.armed:
            ticket.armed = True
            self._pending.append((self._shard.now + self._pending_ticks, ticket))

    def pend(self) -> None:
        """One tick: uplinks that are not settled in time are answered PENDING."""
        now = self._shard.now
        while self._pending and self._pending[0][0] <= now:
            ticket = self._pending.popleft()[1]
            ticket.armed = False
            if ticket.stage is Stage.QUEUED or ticket.stage is Stage.IN_FLIGHT:
                connection = self._owner(ticket)
                if connection is not None:
                    self._answer_up(
                        connection, Code.PENDING, ticket.conversation, ticket.client_id, ticket.client_msg_id
                    )

    async def main(self) -> None:
        """Appends batch after batch, one in flight; what failed is repeated, by partition (R8). Until cancelled."""
        batcher = self._shard.batcher
        async with asyncio.TaskGroup() as repeats:
            while True:
                await self._something.wait()
                self._something.clear()
                while (batches := batcher.take()) is not None:
                    begun = time.perf_counter()
                    try:
                        await self._bus.append(batches)
                    except Unavailable as e:
                        self._log.warning("an append failed; it is repeated", error=str(e))
                        self._append_failed()
                        for partition in batcher.split():
                            repeats.create_task(self._repeat(partition), name=f"append again {partition}")
                        continue
                    metrics.APPEND_SECONDS.observe(time.perf_counter() - begun)
                    self._appended(batcher.done())

    async def _repeat(self, partition: int) -> None:
        """Appends again what failed of one partition, until it is known."""
        batcher, backoff_s = self._shard.batcher, APPEND_BACKOFF_MIN_S
        while True:
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, APPEND_BACKOFF_MAX_S)
            try:
                await self._bus.append({partition: batcher.again(partition)})
                break
            except Unavailable:
                self._append_failed()
        self._appended(batcher.done(partition))
        self._something.set()  # what queued behind it

    def _append_failed(self) -> None:
        metrics.APPEND_FAILURES.inc()
        self._shard.admission.append_failed(self._shard.now_ms)

    def _appended(self, tickets: list[Ticket]) -> None:
        metrics.APPEND_RECORDS.inc(len(tickets))
        admission, now_ms = self._shard.admission, self._shard.now_ms
        admission.appended(len(tickets), now_ms)
        if tickets and admission.wants_probe(now_ms):
            admission.probe(tickets[-1].conn_id, tickets[-1].client_msg_id, now_ms)
        for ticket in tickets:
            ticket.owner.settled(ticket)
            connection = self._owner(ticket)
            if connection is not None:
                self._answer_ticket(connection, ticket, Code.OK)
                self._log.debug("uplink accepted", conn_id=ticket.conn_id, trace_id=ticket.trace_id)

    def _owner(self, ticket: Ticket) -> Connection | None:
        """The live connection that sent it, if it still is one."""
        connection = self._shard.connections.get(ticket.conn_id)
        if connection is not None and connection.uplinks is ticket.owner and connection.phase is Phase.LIVE:
            return connection
        return None

    def _answer_ticket(self, connection: Connection, ticket: Ticket, code: Code) -> None:
        for _ in range(ticket.copies):
            self._answer_up(connection, code, ticket.conversation, ticket.client_id, ticket.client_msg_id)

    def _answer_up(
        self,
        connection: Connection,
        code: Code,
        conversation: str,
        client_id: int,
        client_msg_id: bytes,
        expected: int = 0,
        retry_ms: int = 0,
    ) -> None:
        self._codes[code].inc()
        frame = answers.up_ack(code, connection.conn_id, conversation, client_id, client_msg_id, expected, retry_ms)
        self._downlink.send(connection.conn_id, frame)


def _kind_of(payload: bytes) -> Kind:
    """A frame's type; LOGIN where it has none to read."""
    try:
        return MsgCmd.FromString(payload).Type
    except DecodeError:
        return LOGIN
