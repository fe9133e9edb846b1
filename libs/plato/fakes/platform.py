"""A whole platform in one object, as its clients see it: frames in, frames out, nothing on the way but rules.

    frame ─▸ login, commit ─▸ order (R1) ─▸ bus ─▸ store (R9) ─▸ receipt and pushes

It keeps the contract of docs/protocol.md by the shortest means: no shards, no processes, no clock. It is what the client's
own tests talk to, and an application's tests may. Memory: everything that was ever sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from plato.core.codes import Code
from plato.core.conversations import dialogue_id, is_open_id
from plato.fakes.platform_product import OPERATIONS, Conversation, UserState, operate
from plato.wire.v1 import client_pb2 as pb

REFUSED_BODY: Final = b"refuse this"
"""A body that the message service refuses as NOT_STORABLE."""


@dataclass(slots=True)
class _Session:
    user: str
    device_id: int
    secret: bytes
    gen: int = 0


@dataclass(slots=True)
class _Conn:
    """One open connection. session: after Login or ReConn. seen_gen: the route's gen when that was answered."""

    session: _Session | None = None
    seen_gen: int = 0
    committed: bool = False
    run: int = 0
    push_no: int = 0
    newest: pb.MsgCmd | None = None
    known: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Record:
    """One uplink on the bus."""

    conversation_id: str
    user: str
    device_id: int
    to_user: str
    up: pb.UPMsg


class Platform:
    """Feed it with `open`, `frame`, `close`; take what it sends from `out`: (conn_id, payload), None closes."""

    def __init__(
        self,
        verify: Callable[[str], str | Code] = lambda token: token or Code.TOKEN_INVALID,
        *,
        page_rows: int = 100,
        page_conversations: int = 100,
        told: pb.ACKMsg | None = None,
    ) -> None:
        """verify: a token's user, or the code that refuses it. told: the timers that Login and ReConn are answered with."""
        self.out: list[tuple[int, bytes | None]] = []
        self.conversations: dict[str, Conversation] = {}
        self.bus: list[_Record] = []
        self.msg_away = False
        """Records stay on the bus until `run_msg`."""
        self.busy = False
        """Uplinks are answered "busy"."""
        self.pending_only = False
        """Appended, but answered "pending" first; `answer_late` sends the ACKs."""
        self.skip_seqs = 0
        """The next message leaves a hole of so many numbers."""
        self.logins = 0
        self.told = told or pb.ACKMsg()
        self._verify = verify
        self._page_rows = page_rows
        self._page_conversations = page_conversations
        self.users: dict[str, UserState] = {}
        self._conns: dict[int, _Conn] = {}
        self._sessions: dict[int, _Session] = {}
        self._routes: dict[tuple[str, int], tuple[int, int]] = {}  # (user, device_id) → (conn_id, gen)
        self._late: list[tuple[int, bytes]] = []
        self._next_conn_id = 0
        self._run = 1

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> int:
        """A new connection; returns its conn_id."""
        self._next_conn_id += 1
        self._conns[self._next_conn_id] = _Conn()
        return self._next_conn_id

    def close(self, conn_id: int) -> None:
        """The connection is gone; its session waits for resume."""
        self._conns.pop(conn_id, None)

    def frame(self, conn_id: int, payload: bytes) -> None:
        """One payload of a connection."""
        conn = self._conns.get(conn_id)
        if conn is None:
            return
        cmd = pb.MsgCmd.FromString(payload)
        match cmd.Type:
            case pb.LOGIN:
                self._login(conn_id, conn, pb.LoginMsg.FromString(cmd.Payload))
            case pb.RECONN:
                self._reconn(conn_id, conn, pb.ReConnMsg.FromString(cmd.Payload))
            case pb.HEARTBEAT:
                self._heartbeat(conn_id, conn)
            case _ if conn.session is None:
                self._error(conn_id, cmd.Type, Code.LOGIN_FIRST)
            case pb.SYNC:
                self._sync(conn_id, conn, pb.SyncMsg.FromString(cmd.Payload))
            case _ if not conn.committed:
                self._error(conn_id, cmd.Type, Code.SYNC_FIRST)
            case pb.UP:
                self._up(conn_id, conn, pb.UPMsg.FromString(cmd.Payload))
            case pb.PULL:
                self._pull(conn_id, conn, pb.PullMsg.FromString(cmd.Payload))
            case pb.READ:
                self._read(conn_id, conn, pb.ReadMsg.FromString(cmd.Payload))
            case pb.TYPING:
                self._typing(conn, pb.TypingMsg.FromString(cmd.Payload))
            case pb.LOGOUT:
                self._logout(conn_id, conn)
            case _:
                pass

    def live(self, user: str) -> list[int]:
        """The conn_ids of a user's committed connections."""
        return [c for c, conn in self._conns.items() if conn.committed and conn.session and conn.session.user == user]

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────

    def restart_state(self) -> None:
        """State forgets what it holds in memory and begins a new run; committed sessions are told by an empty Notify."""
        self._run += 1
        for conn_id, conn in list(self._conns.items()):
            conn.known.clear()
            if conn.committed:
                conn.run, conn.push_no, conn.newest = self._run, 0, None
                self._numbered(conn_id, conn, pb.NOTIFY, pb.NotifyMsg().SerializeToString())
            else:
                conn.session = None

    def repeat_newest(self) -> None:
        """State repeats the newest numbered frame of every connection."""
        for conn_id, conn in self._conns.items():
            if conn.committed and conn.newest is not None:
                self.out.append((conn_id, conn.newest.SerializeToString()))

    def redirect(self, gateways: Iterable[tuple[str, int]]) -> None:
        """Every gateway drains: each committed connection is told to go on through these, (ip, port)."""
        named = [pb.RedirectGateway(ip=ip, port=port, ws_port=port) for ip, port in gateways]
        for conn_id, conn in self._conns.items():
            if conn.committed:
                self._send(conn_id, pb.REDIRECT, pb.RedirectMsg(gateways=named).SerializeToString())

    def kick(self, user: str, code: Code = Code.KICKED) -> None:
        """An administrator ends a user's sessions, or something else does."""
        for conn_id in self.live(user):
            self._kick(conn_id, code)

    def end_sessions(self) -> None:
        """The resume window of every session passed."""
        self._sessions.clear()

    def run_msg(self) -> None:
        """msg takes what is on the bus."""
        records, self.bus = self.bus, []
        for record in records:
            self._store(record)

    def answer_late(self) -> None:
        """The ACKs that `pending_only` held back."""
        late, self._late = self._late, []
        self.out += late

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────

    def _login(self, conn_id: int, conn: _Conn, login: pb.LoginMsg) -> None:
        self.logins += 1
        user = self._verify(login.token)
        if isinstance(user, Code):
            self._ack(conn_id, pb.LOGIN, user)
            return
        secret = b"secret %d" % conn_id
        conn.session = _Session(user, login.Head.DeviceID, secret)
        self._welcome(conn_id, conn, pb.LOGIN)

    def _reconn(self, conn_id: int, conn: _Conn, reconn: pb.ReConnMsg) -> None:
        old = self._sessions.get(reconn.Head.ConnID)
        route = self._routes.get((old.user, old.device_id)) if old else None
        named = self._sessions.get(route[0]) if route else None
        if old is None or named is None:
            self._ack(conn_id, pb.RECONN, Code.SESSION_UNKNOWN)
        elif named.secret != reconn.secret:
            self._ack(conn_id, pb.RECONN, Code.SECRET_WRONG)
        else:
            conn.session = _Session(old.user, old.device_id, named.secret)
            self._welcome(conn_id, conn, pb.RECONN)

    def _welcome(self, conn_id: int, conn: _Conn, kind: pb.CmdType.ValueType) -> None:
        assert conn.session is not None
        session = conn.session
        conn.seen_gen = self._routes.get((session.user, session.device_id), (0, 0))[1]
        conn.committed = False
        ack = pb.ACKMsg(Type=kind, ConnID=conn_id, user_id=session.user)
        ack.MergeFrom(self.told)
        if kind == pb.LOGIN:
            ack.secret = session.secret
        self._send(conn_id, pb.ACK, ack.SerializeToString())

    def _sync(self, conn_id: int, conn: _Conn, sync: pb.SyncMsg) -> None:
        assert conn.session is not None
        session = conn.session
        if not conn.committed:
            key = (session.user, session.device_id)
            before, gen = self._routes.get(key, (0, 0))
            if gen != conn.seen_gen:
                conn.session = None
                self._send(
                    conn_id, pb.ACK, pb.ACKMsg(Type=pb.SYNC, ref=sync.ref, Code=Code.TRY_AGAIN).SerializeToString()
                )
                return
            self._sessions[conn_id] = session
            session.gen = gen + 1
            self._routes[key] = (conn_id, session.gen)
            conn.committed, conn.run, conn.push_no, conn.newest = True, self._run, 0, None
            if before != conn_id and before in self._conns:
                self._kick(before, Code.REPLACED)
            ack = pb.ACKMsg(Type=pb.SYNC, ref=sync.ref, ConnID=conn_id, run=conn.run, push_no=conn.push_no)
            self._send(conn_id, pb.ACK, ack.SerializeToString())
        self._send(conn_id, pb.SYNCED, self._synced(session.user, sync).SerializeToString())

    def _synced(self, user: str, sync: pb.SyncMsg) -> pb.SyncedMsg:
        page = pb.SyncedMsg(ref=sync.ref)
        if len(sync.cursors) > 500 or [c.conversation_id.encode() for c in sync.cursors] != sorted(
            c.conversation_id.encode() for c in sync.cursors
        ):
            page.code = Code.TOO_MANY_CURSORS
            return page
        cursors = {c.conversation_id: c.seq for c in sync.cursors}
        low, high = sync.after_id.encode(), sync.upto_id.encode()
        mine = sorted(
            (i for i, c in self.conversations.items() if c.range_of(user) and i.encode() > low),
            key=lambda i: i.encode(),
        )
        mine = [i for i in mine if not high or i.encode() <= high]
        ranges = {i: self.conversations[i].range_of(user) or (0, 0) for i in mine}
        newer = [i for i in mine if ranges[i][1] > cursors.get(i, -1)]
        for conversation_id in newer[: self._page_conversations]:
            conversation = self.conversations[conversation_id]
            others = sorted(conversation.members - {user})
            page.items.add(
                conversation_id=conversation_id,
                newest_seq=ranges[conversation_id][1],
                first_cursor=ranges[conversation_id][0],
                peer=others[0] if others and conversation_id.startswith("d:") else "",
                title=conversation.title,
                members=len(conversation.members) if conversation_id.startswith("g:") else 0,
                left=user not in conversation.members,
            )
        if sync.want_state:
            page.state.CopyFrom(self.user(user).newer(sync.state_version, self._page_conversations))
        page.more = len(newer) > self._page_conversations
        page.covered_id = page.items[-1].conversation_id if page.more else sync.upto_id
        return page

    def _heartbeat(self, conn_id: int, conn: _Conn) -> None:
        if conn.session is None:
            self._error(conn_id, pb.HEARTBEAT, Code.LOGIN_FIRST)
            return
        ack = pb.ACKMsg(Type=pb.HEARTBEAT, run=conn.run, push_no=conn.push_no, heartbeat_ms=self.told.heartbeat_ms)
        self._send(conn_id, pb.ACK, ack.SerializeToString())

    def _logout(self, conn_id: int, conn: _Conn) -> None:
        assert conn.session is not None
        key = (conn.session.user, conn.session.device_id)
        self._routes[key] = (0, self._routes[key][1] + 1)
        self._kick(conn_id, Code.LOGGED_OUT)

    # ── uplinks ──────────────────────────────────────────────────────────────────────────────────────────

    def _up(self, conn_id: int, conn: _Conn, up: pb.UPMsg) -> None:
        assert conn.session is not None
        conversation_id, client_id = up.Head.SessionId, up.Head.ClientID
        known = conn.known.get(conversation_id, 0)
        expected = max(known, up.acked) + 1
        ack = pb.ACKMsg(
            Type=pb.UP,
            ConnID=conn_id,
            ClientID=client_id,
            conversation_id=conversation_id,
            client_msg_id=up.client_msg_id,
        )
        if client_id > expected:
            ack.Code, ack.expected = Code.EXPECTED, expected
        elif self.busy:
            ack.Code = Code.BUSY
            conn.known[conversation_id] = min(known, client_id - 1)
        else:
            conn.known[conversation_id] = max(known, client_id)
            self.bus.append(_Record(conversation_id, conn.session.user, conn.session.device_id, up.to_user, up))
            if self.pending_only:
                self._late.append((conn_id, _cmd(pb.ACK, ack.SerializeToString())))
                ack.Code = Code.PENDING
        self._send(conn_id, pb.ACK, ack.SerializeToString())
        if not self.msg_away:
            self.run_msg()

    def _store(self, record: _Record) -> None:
        up, user = record.up, record.user
        conversation = self.conversations.setdefault(record.conversation_id, Conversation())
        key = (user, up.client_msg_id)
        receipt = conversation.outcomes.get(key)
        if receipt is not None:
            self._receipt(record, receipt)
            return
        receipt = pb.ReceiptMsg(
            conversation_id=record.conversation_id, client_msg_id=up.client_msg_id, client_id=up.Head.ClientID
        )
        conversation.outcomes[key] = receipt
        if is_open_id(record.conversation_id):
            conversation.members.add(user)
        elif not conversation.members and record.conversation_id == dialogue_id(user, record.to_user):
            conversation.members |= {user, record.to_user}
        body, told = up.UPMsgBody, set(conversation.members)
        if up.msg_type in OPERATIONS:
            seq = conversation.last_seq + 1 + self.skip_seqs
            done = operate(conversation, record.conversation_id, user, up, seq)
            if isinstance(done, Code):
                receipt.code = done
            else:
                body, told = done.body, told | conversation.members
        elif user not in conversation.members:
            receipt.code = Code.NOT_A_MEMBER
        if receipt.code:
            pass
        elif up.UPMsgBody == REFUSED_BODY:
            receipt.code = Code.NOT_STORABLE
        else:
            seq = conversation.last_seq + 1 + self.skip_seqs
            self.skip_seqs = 0
            receipt.msg_id = sum(len(c.rows) for c in self.conversations.values()) + 1
            receipt.seq, receipt.prev_seq, conversation.last_seq = seq, conversation.last_seq, seq
            row = pb.PushMsg(
                MsgID=receipt.msg_id,
                Content=body,
                conversation_id=record.conversation_id,
                seq=seq,
                prev_seq=receipt.prev_seq,
                from_user=user,
                msg_type=up.msg_type,
                client_msg_id=up.client_msg_id,
                server_at_ms=seq,
            )
            conversation.rows.append(row)
            for (member, device_id), (conn_id, _) in self._routes.items():
                sender = (member, device_id) == (user, record.device_id)
                conn = self._conns.get(conn_id)
                if member in told and not sender and conn is not None and conn.committed:
                    self._numbered(conn_id, conn, pb.PUSH, row.SerializeToString())
        self._receipt(record, receipt)

    def _receipt(self, record: _Record, receipt: pb.ReceiptMsg) -> None:
        conn_id = self._routes.get((record.user, record.device_id), (0, 0))[0]
        conn = self._conns.get(conn_id)
        if conn is not None and conn.committed:
            self._numbered(conn_id, conn, pb.RECEIPT, receipt.SerializeToString())

    def _pull(self, conn_id: int, conn: _Conn, pull: pb.PullMsg) -> None:
        assert conn.session is not None
        page = pb.PulledMsg(ref=pull.ref, conversation_id=pull.conversation_id)
        conversation = self.conversations.get(pull.conversation_id)
        allowed = conversation.range_of(conn.session.user) if conversation is not None else None
        if conversation is None or allowed is None:
            page.code = Code.NOT_A_MEMBER
        else:
            low = max(1, pull.from_seq)
            high = min(pull.to_seq or allowed[1], allowed[1])
            limit = min(pull.limit or 100, self._page_rows)
            rows = [row for row in conversation.rows if max(low, allowed[0] + 1) <= row.seq <= high]
            cut = rows[-limit:] if pull.newest_first else rows[:limit]
            page.rows.extend(cut)
            page.newest_seq = allowed[1]
            page.covered_from, page.covered_to = low, high
            if len(cut) < len(rows) and pull.newest_first:
                page.covered_from = cut[0].prev_seq + 1
            elif len(cut) < len(rows):
                page.covered_to = cut[-1].seq
        self._send(conn_id, pb.PULLED, page.SerializeToString())

    # ── what a user's devices share ──────────────────────────────────────────────────────────────────────

    def user(self, user: str) -> UserState:
        """What a user's devices share; what is changed there by hand goes out by `tell_state`."""
        return self.users.setdefault(user, UserState())

    def tell_state(self, user: str, state: pb.StateMsg | None) -> None:
        """A change of that goes to the user's devices."""
        if state is not None:
            for conn_id in self.live(user):
                self._numbered(conn_id, self._conns[conn_id], pb.STATE, state.SerializeToString())

    def _read(self, conn_id: int, conn: _Conn, read: pb.ReadMsg) -> None:
        assert conn.session is not None
        user = conn.session.user
        ack = pb.ACKMsg(Type=pb.READ, ref=read.ref)
        conversation = self.conversations.get(read.conversation_id)
        allowed = conversation.range_of(user) if conversation is not None else None
        if self.msg_away:
            ack.Code = Code.UNAVAILABLE
        elif conversation is None or allowed is None:
            ack.Code = Code.NOT_A_MEMBER
        else:
            seq = min(read.seq, allowed[1])
            changed = self.user(user).change(read.conversation_id, read_seq=seq)
            self.tell_state(user, changed)
            ack.expected = self.user(user).of(read.conversation_id).read_seq
            for other in conversation.members - {user} if changed is not None else ():
                if read.conversation_id.startswith("d:"):
                    self.tell_state(other, self.user(other).change(read.conversation_id, peer_read_seq=ack.expected))
                told = pb.ReadMsg(conversation_id=read.conversation_id, seq=ack.expected, user=user)
                for conn_of_other in self.live(other):
                    self._send(conn_of_other, pb.READ, told.SerializeToString())
        self._send(conn_id, pb.ACK, ack.SerializeToString())

    def _typing(self, conn: _Conn, typing: pb.TypingMsg) -> None:
        assert conn.session is not None
        conversation = self.conversations.get(typing.conversation_id)
        if conversation is None or conn.session.user not in conversation.members:
            return
        typing.user = conn.session.user
        for other in conversation.members - {conn.session.user}:
            for conn_id in self.live(other):
                self._send(conn_id, pb.TYPING, typing.SerializeToString())

    # ── frames ───────────────────────────────────────────────────────────────────────────────────────────

    def _numbered(self, conn_id: int, conn: _Conn, kind: pb.CmdType.ValueType, inner: bytes) -> None:
        conn.push_no += 1
        conn.newest = pb.MsgCmd(Type=kind, Payload=inner, run=conn.run, push_no=conn.push_no)
        self.out.append((conn_id, conn.newest.SerializeToString()))

    def _send(self, conn_id: int, kind: pb.CmdType.ValueType, inner: bytes) -> None:
        self.out.append((conn_id, _cmd(kind, inner)))

    def _ack(self, conn_id: int, kind: pb.CmdType.ValueType, code: Code) -> None:
        self._send(conn_id, pb.ACK, pb.ACKMsg(Type=kind, Code=code, ConnID=conn_id).SerializeToString())

    def _error(self, conn_id: int, kind: pb.CmdType.ValueType, code: Code) -> None:
        self._send(conn_id, pb.ERROR, pb.ErrorMsg(code=code, type=kind).SerializeToString())

    def _kick(self, conn_id: int, code: Code) -> None:
        self._send(conn_id, pb.KICK, pb.KickMsg(code=code).SerializeToString())
        self.out.append((conn_id, None))
        self._conns.pop(conn_id, None)


def _cmd(kind: pb.CmdType.ValueType, inner: bytes) -> bytes:
    return pb.MsgCmd(Type=kind, Payload=inner).SerializeToString()
