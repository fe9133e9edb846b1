"""One connection and its session: every transition, and what the caller must do next.

              Login/ReConn,           first Sync           route set            socket gone,
              route read              (guest: any frame)                        no heartbeat
    ○ ─▸ NEW ────────────▸ ANSWERED ────────────▸ COMMITTING ────────▸ LIVE ────────────────▸ WAITING ─▸ ENDED
          ▴                                           │                 │  ◂──── named ────────┘   window over
          └───────────── another commit came first ◂──┘                 │ a newer commit
                                                                        ▾
                                                                     REPLACED ─▸ forgotten

R2. Login and ReConn read the route and answer; nothing else changes, so as many of them as a client likes may be under
way. The first Sync commits: the session is written under its slot's fence, then the route is set from what was read to
(this connection, gen + 1). Only that replaces, and only that lets anything but Login, ReConn, heartbeat and Sync in.
Commit first, then read the page: what is pushed between the two is counted and not sent, since the page holds it.

R3. What came in gets an answer: a frame now, or an action whose end brings one. A close carries its last frame.

A replaced session stays in the store for one resume window: its client may not have heard the commit's answer and
resume by the older conn_id, from which its user and device are found.

The end of a session sets the route to (none, gen + 1) where it still names this one, then removes the session: after a
crash between the two nothing points at a session that is not there.

Times are ms from now; the caller counts them in ticks (R10). Nothing here reads a clock or draws a number.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from hmac import compare_digest

from plato.api.names import GUEST_PREFIX
from plato.core.codes import Code
from plato.ports import Route, Session
from plato.wire.v1.client_pb2 import HEARTBEAT, LOGIN, PULL, RECONN, SYNC

from plato_state.core import answers
from plato_state.core.actions import (
    Action,
    Arm,
    AskPull,
    AskRoute,
    AskSession,
    AskSync,
    Await,
    CheckRoute,
    Close,
    Commit,
    End,
    Forget,
    Remove,
    Replay,
    RestoreRoute,
    Send,
    TellReplaced,
)
from plato_state.core.answers import Kind, Told
from plato_state.core.pushes import GuestPushes, Pushes
from plato_state.core.uplinks import Uplinks

MAX_REQUESTS = 4
"""Syncs and pulls of one connection under way; past it: busy."""
MAX_HELD = 32
"""Frames of a guest that wait for its commit; past it they are dropped, as a hop may (R3)."""


class Phase(IntEnum):
    """Where a connection is."""

    NEW = 0
    ANSWERED = 1
    COMMITTING = 2
    LIVE = 3
    WAITING = 4
    REPLACED = 5
    ENDED = 6


@dataclass(frozen=True, slots=True)
class Rules:
    """What every connection of a shard lives by; ms."""

    login_timeout_ms: int
    heartbeat_ms: int
    resume_window_ms: int
    max_uplinks: int
    guests: bool
    told: Told

    @property
    def longest_ms(self) -> int:
        """The longest interval that a client may keep."""
        return self.told.heartbeat_ceiling_ms or self.heartbeat_ms

    def granted_ms(self, wish_ms: int) -> int:
        """The interval that a client gets which wishes for this one; 0: it has no wish."""
        if not wish_ms:
            return self.heartbeat_ms
        return min(max(wish_ms, self.told.heartbeat_floor_ms or self.heartbeat_ms), self.longest_ms)


@dataclass(slots=True)
class Candidate:
    """What was answered and is not committed yet."""

    kind: Kind
    user: str
    device_id: int
    secret: bytes
    guest: bool
    platform: str = ""
    network: str = ""
    seen: Route | None = None
    """The route as it was read; the commit's compare-and-set starts from it."""
    resumed: int = 0
    """ReConn: the conn_id that the client named."""


@dataclass(slots=True)
class _Asked:
    """What waits for the commit."""

    syncs: list[tuple[int, bytes]] = field(default_factory=list)
    held: list[bytes] = field(default_factory=list)
    first: Kind = SYNC


class Connection:
    """A connection and, once committed, its session. Lives until `Forget`."""

    __slots__ = (
        "_asked",
        "_awaited",
        "_rules",
        "_serial",
        "boot",
        "candidate",
        "conn_id",
        "doubtful",
        "guest_pushes",
        "heartbeat_ms",
        "named_only",
        "phase",
        "pushes",
        "replaced_by",
        "replaced_early",
        "requests",
        "session",
        "socket",
        "typed",
        "unsure",
        "uplinks",
        "verified",
        "worker",
    )

    def __init__(self, conn_id: int, rules: Rules) -> None:
        self.conn_id = conn_id
        self._rules = rules
        self.phase = Phase.NEW
        self.heartbeat_ms = 0
        """The interval that its client keeps, as last told to it; 0: not known, its session was loaded."""
        self.socket = True
        """False once its end was reported, or we asked for it."""
        self.boot = 0
        """Boot of the worker it was last heard through; 0: not heard since this process knows it."""
        self.worker = -1
        """That worker's number."""
        self.named_only = False
        """True: known by an announcement alone, so its client believes itself logged in."""
        self.candidate: Candidate | None = None
        self.session: Session | None = None
        """The session that is committed, or may be (`unsure`, COMMITTING)."""
        self.unsure = False
        """True: a commit's outcome is unknown."""
        self.replaced_early: Code | None = None
        """A newer commit was told before our own commit's outcome was."""
        self.replaced_by = Code.REPLACED
        """REPLACED: why it was, as a client that still speaks here is told."""
        self.typed: dict[str, tuple[int, bool]] | None = None
        """{conversation: (tick, stopped)} of the last TYPING let in; written by the edge that counts ticks. None: none."""
        self.requests = 0
        """Syncs and pulls under way at msg."""
        self.uplinks: Uplinks | None = None
        """Made by the first UP."""
        self.pushes: Pushes | None = None
        """From the commit's beginning; None for guests."""
        self.guest_pushes: GuestPushes | None = None
        self.doubtful = False
        """True: an empty Notify of the run is owed; written by the edge that paces them."""
        self.verified: tuple[bytes, str] | None = None
        """Digest of the last token that was verified here, and its user; written by the edge that verifies."""
        self._serial = 0
        self._asked: _Asked | None = None
        self._awaited: Kind | None = None

    @property
    def guest(self) -> bool:
        """True for a guest, from the answer to its Login on."""
        if self.session is not None:
            return self.session.guest
        return self.candidate is not None and self.candidate.guest

    @property
    def silence_ms(self) -> int:
        """How long it may say nothing while it lives: two heartbeats and a half, so that one may get lost."""
        return (self.heartbeat_ms or self._rules.heartbeat_ms) * 5 // 2

    @property
    def at_the_door(self) -> bool:
        """True where a Login or ReConn that comes now would begin work: none was let in that goes on."""
        return self.phase is Phase.NEW and self._awaited is None

    @property
    def takes_pushes(self) -> bool:
        """True if a push for it is in the right place, even where it is only counted or covered by a later Sync."""
        return self.phase is not Phase.NEW and self.phase is not Phase.ENDED

    def owns(self, conn_id: int) -> bool:
        """True if a frame of this connection may name `conn_id`: none or its own. A guest that has not read its
        ReConn's answer still names the one it resumed."""
        if conn_id in (0, self.conn_id):
            return True
        return self.guest and self.candidate is not None and self.candidate.resumed == conn_id

    # ── the socket ───────────────────────────────────────────────────────────────────────────────────────────

    def opened(self) -> list[Action]:
        """The connection is new here."""
        return [Arm(self._rules.login_timeout_ms)]

    def named(self) -> list[Action]:
        """Its worker says that the socket lives."""
        self.socket = True
        if self.phase is Phase.WAITING:
            if self.unsure:
                return []
            self.phase = Phase.LIVE
            self._renew()
            return [Arm(self.silence_ms)]
        if self.phase is Phase.LIVE:
            return [Arm(self.silence_ms)]
        if self.phase is Phase.REPLACED:
            return [Close(answers.kick(self.replaced_by))]
        return []

    def closed(self) -> list[Action]:
        """The socket is gone."""
        self.socket = False
        return self._socket_gone()

    # ── login and resume ─────────────────────────────────────────────────────────────────────────────────────

    def put_off(self, kind: Kind, wait_ms: int) -> list[Action]:
        """Too many log in now: the same again after so long, on this socket; the login time-out begins after it."""
        later = answers.login_later(kind, self.conn_id, wait_ms)
        return [Send(later), Arm(wait_ms + self._rules.login_timeout_ms)]

    def login(
        self,
        who: str | Code,
        device_id: int,
        fresh_secret: bytes,
        platform: str = "",
        network: str = "",
        wish_ms: int = 0,
    ) -> list[Action]:
        """A Login whose token says `who`: a user_id, "" for a guest without token, or the code of its refusal.
        wish_ms: the heartbeat interval that the client has learnt; 0: none."""
        if not isinstance(who, str):
            return [Send(answers.ack(LOGIN, who, self.conn_id))]
        guest = not who
        if guest and not self._rules.guests:
            return [Send(answers.ack(LOGIN, Code.GUESTS_OFF, self.conn_id))]
        user = who or f"{GUEST_PREFIX}{self.conn_id}"
        mine = self.session or self.candidate
        same = mine is not None and (mine.user, mine.device_id) == (user, device_id)
        if self.phase in (Phase.COMMITTING, Phase.LIVE):
            if not same or mine is None:
                return self._broken(LOGIN)
            return [Send(self._login_ack(LOGIN, user, mine.secret))]
        if refusal := self._not_here():
            return refusal
        # A repeated Login keeps its secret: the client may have read the first answer only.
        secret = mine.secret if same and mine is not None else fresh_secret
        self.candidate = Candidate(LOGIN, user, device_id, secret, guest, platform, network)
        self.heartbeat_ms = self._rules.granted_ms(wish_ms)
        return [*self._ask(LOGIN), AskRoute(user, device_id, self._serial)]

    def reconn(self, conn_id: int, secret: bytes, network: str = "", wish_ms: int = 0) -> list[Action]:
        """A ReConn that names session `conn_id`. network: "" where it is as it was. wish_ms: as in `login`."""
        if self.phase in (Phase.COMMITTING, Phase.LIVE):
            mine = self.candidate
            if mine is None or mine.resumed != conn_id or not (mine.guest or compare_digest(secret, mine.secret)):
                return self._broken(RECONN)
            return [Send(self._login_ack(RECONN, mine.user, mine.secret))]
        if refusal := self._not_here():
            return refusal
        self.candidate = Candidate(RECONN, "", 0, secret, False, network=network, resumed=conn_id)
        self.heartbeat_ms = self._rules.granted_ms(wish_ms)
        return [*self._ask(RECONN), AskSession(conn_id, self._serial)]

    def route_read(self, serial: int, route: Route | None) -> list[Action]:
        """The answer to AskRoute. An older serial was superseded by a newer Login or ReConn."""
        candidate = self.candidate
        if serial != self._serial or candidate is None or self.phase > Phase.ANSWERED:
            return []
        candidate.seen = route
        return self._answered(candidate)

    def crowded(self, serial: int) -> list[Action]:
        """The answer to AskRoute: the device has no route, and its user as many live ones as may be."""
        candidate = self.candidate
        if serial != self._serial or candidate is None or self.phase > Phase.ANSWERED:
            return []
        return self._refused(candidate.kind, Code.TOO_MANY_DEVICES)

    def session_found(
        self, serial: int, old: Session | None, route: Route | None, current: Session | None
    ) -> list[Action]:
        """The answer to AskSession: the named session, the route of its device, and the session that the route names."""
        candidate = self.candidate
        if serial != self._serial or candidate is None or self.phase > Phase.ANSWERED:
            return []
        if old is None or route is None or not route.conn_id or current is None:
            return self._refused(RECONN, Code.SESSION_UNKNOWN)
        if current.guest:
            if not self._rules.guests:
                return self._refused(RECONN, Code.GUESTS_OFF)
            fits = not candidate.secret or compare_digest(candidate.secret, current.secret)
        else:
            fits = compare_digest(candidate.secret, current.secret)
        if not fits:
            return self._refused(RECONN, Code.SECRET_WRONG)
        candidate.user, candidate.device_id = current.user, current.device_id
        candidate.secret, candidate.guest = current.secret, current.guest
        candidate.platform, candidate.network = current.platform, candidate.network or current.network
        candidate.seen = route
        return self._answered(candidate)

    def unavailable(self, serial: int) -> list[Action]:
        """The store did not answer AskRoute or AskSession."""
        candidate = self.candidate
        if serial != self._serial or candidate is None or self.phase > Phase.ANSWERED:
            return []
        return self._refused(candidate.kind, Code.UNAVAILABLE)

    # ── commit ───────────────────────────────────────────────────────────────────────────────────────────────

    def sync(self, ref: int, request: bytes) -> list[Action]:
        """A Sync: the first one commits, later ones only read."""
        if self.phase is Phase.ANSWERED:
            return self._commit(_Asked(syncs=[(ref, request)]))
        if self.phase is Phase.COMMITTING and self._asked is not None:
            syncs = self._asked.syncs
            if len(syncs) < MAX_REQUESTS and all(known != ref for known, _ in syncs):
                syncs.append((ref, request))
            return [Await(SYNC, ref)]
        if self.phase is Phase.LIVE:
            return self._synced(ref, request)
        return self.out_of_place(SYNC, ref)

    def guest_frame(self, encoded: bytes, kind: Kind) -> list[Action] | None:
        """Any frame but Login and ReConn of a guest that is not live yet: the first one commits, the others wait for it.
        None: not such a case, handle it as usual."""
        if self.phase is Phase.ANSWERED and self.guest:
            return self._commit(_Asked(held=[encoded], first=kind))
        if self.phase is Phase.COMMITTING and self.guest and self._asked is not None:
            if len(self._asked.held) < MAX_HELD:
                self._asked.held.append(encoded)
            return []
        return None

    def first_statement(self, gen: int) -> Session | None:
        """The session that is being committed, with the gen of a route that has none before it: greater than any that
        was given before the store lost it."""
        if self.phase is not Phase.COMMITTING or self.session is None:
            return None
        self.session = replace(self.session, gen=gen)
        return self.session

    def committed(self, done: bool | None, run: int) -> list[Action]:
        """The end of Commit. True: the route names this connection; False: another commit came first; None: unknown.
        run: the first run of a session that is committed now."""
        if self.phase is not Phase.COMMITTING or self.session is None:
            return []
        asked, self._asked = self._asked or _Asked(), None
        candidate = self.candidate
        if done is None:
            self.unsure = True
            if not self.socket:
                return self._wait()
            self.phase = Phase.ANSWERED
            return self._commit_refused(asked, Code.UNAVAILABLE)
        self.unsure = False
        if not done:
            session, self.session = self.session, None
            self.phase, self.candidate = Phase.NEW, None
            out: list[Action] = [Remove(session)]
            if not self.socket:
                self.phase = Phase.ENDED
                return [*out, Forget()]
            return [*out, *self._commit_refused(asked, Code.TRY_AGAIN)]
        out = []
        if candidate is not None and candidate.seen is not None and candidate.seen.conn_id not in (0, self.conn_id):
            out.append(TellReplaced(candidate.seen.conn_id))
        if self.pushes is not None:
            self.pushes.begin(run)
        if not self.socket:
            return [*out, *self._wait()]
        self.phase = Phase.LIVE
        if self.replaced_early is not None:
            return [*out, *self.replaced(self.replaced_early)]
        out.append(Arm(self.silence_ms))
        for ref, request in asked.syncs:
            out += self._synced(ref, request)
        if asked.held:
            out.append(Replay(tuple(asked.held)))
        return out

    # ── living ───────────────────────────────────────────────────────────────────────────────────────────────

    def loaded(self, session: Session, run: int) -> list[Action]:
        """The session was found in the store by a new owner of its slot. Whether its socket lives is not known yet."""
        self.session = session
        self.phase = Phase.LIVE
        self.socket = False
        self._renew()
        if self.pushes is not None:
            self.pushes.begin(run)
        return [Arm(self.silence_ms)]

    def heartbeat(self, run: int, push_no: int, wish_ms: int = 0) -> list[Action]:
        """A heartbeat, with what the client has stored, and the interval that it wishes for (0: none)."""
        interval_ms = self._rules.granted_ms(wish_ms)
        if self.phase is Phase.LIVE:
            newest = (0, 0)
            self.heartbeat_ms = interval_ms
            if self.pushes is not None:
                self.pushes.acknowledged(run, push_no)
                newest = (self.pushes.run, self.pushes.push_no)
            return [
                Arm(self.silence_ms),
                Send(answers.heartbeat_ack(self.conn_id, interval_ms, *newest)),
                CheckRoute(),
            ]
        if self.phase <= Phase.COMMITTING and not (self.named_only and self.phase is Phase.NEW):
            return [Send(answers.heartbeat_ack(self.conn_id, interval_ms, 0, 0))]
        return self.out_of_place(HEARTBEAT)

    def pull(self, ref: int, request: bytes, conversation: str) -> list[Action]:
        """A Pull."""
        if self.phase is not Phase.LIVE:
            return self.out_of_place(PULL, ref)
        if self.guest:  # its answer would be a type above 5
            return []
        if self.requests >= MAX_REQUESTS:
            return [Send(answers.ack(PULL, Code.BUSY, self.conn_id, ref))]
        self.requests += 1
        return [AskPull(request, ref, conversation)]

    def request_done(self) -> None:
        """A Sync's or Pull's answer was sent."""
        self.requests -= 1

    def logout(self) -> list[Action]:
        """The client ends its session now."""
        bye = answers.ack(LOGIN, Code.LOGGED_OUT, self.conn_id) if self.guest else answers.kick(Code.LOGGED_OUT)
        self.socket = False
        if self.phase is Phase.LIVE and self.session is not None:
            self.phase = Phase.ENDED
            return [Close(bye), End(self.session)]
        return [Close(bye), *self._socket_gone()]

    def route_checked(self, route: Route | None) -> list[Action]:
        """The route as it was read at a heartbeat."""
        session = self.session
        if self.phase is not Phase.LIVE or session is None:
            return []
        if route is None:
            return [RestoreRoute(session, None)]
        if route.conn_id == self.conn_id:
            return []
        if route.gen >= session.gen:
            return self.replaced(Code.REPLACED if route.conn_id else Code.KICKED)
        return [RestoreRoute(session, route)]

    def replaced(self, code: Code) -> list[Action]:
        """A newer commit of this device stands, or its session was ended from outside (KICKED): the route says so."""
        if self.phase is Phase.COMMITTING:
            self.replaced_early = code
            return []
        if self.phase not in (Phase.LIVE, Phase.WAITING):
            return []
        out: list[Action] = []
        if self.phase is Phase.LIVE:
            out.append(self._kicked(code))
        self.socket = False
        self.phase = Phase.REPLACED
        self.replaced_by = code
        self._rest()
        return [*out, Arm(self._rules.resume_window_ms)]

    def expired(self, stream_down_ms: int | None, grace_ms: int) -> list[Action]:
        """The life timer fired. stream_down_ms: how long the gateway's stream has been down (None: it is up).
        grace_ms: how long the slot's new owner still ends no session."""
        rules = self._rules
        if self.phase <= Phase.COMMITTING:
            self.socket = False
            return [Close(self._error(Code.LOGIN_TIMEOUT, LOGIN)), *self._socket_gone()]
        if self.phase is Phase.LIVE:
            if stream_down_ms is not None:
                left = rules.resume_window_ms - stream_down_ms
                if left > 0:
                    return [Arm(left)]
                return self._window_over(grace_ms)
            if not self.heartbeat_ms:  # it may keep a longer interval than the usual one, and did not say so here yet
                so_far_ms, self.heartbeat_ms = self.silence_ms, rules.longest_ms
                if self.silence_ms > so_far_ms:
                    return [Arm(self.silence_ms - so_far_ms)]
            self.socket = False
            return [Close(self._error(Code.HEARTBEAT_TIMEOUT, HEARTBEAT)), *self._wait()]
        if self.phase is Phase.WAITING:
            return self._window_over(grace_ms)
        if self.phase is Phase.REPLACED and self.session is not None:
            self.phase = Phase.ENDED
            return [Remove(self.session), Forget()]
        return []

    def awaits(self, kind: Kind, ref: int) -> bool:
        """True while a Login or ReConn, or the Sync `ref` that waits for its commit, has no answer."""
        if kind == SYNC:
            return self._asked is not None and any(known == ref for known, _ in self._asked.syncs)
        return self._awaited == kind

    def redirected(self, frame: bytes) -> list[Action]:
        """Its gateway drains: a session is told where else to go and stays meanwhile. frame: the REDIRECT; b"": there is
        nowhere to go now. Whoever has no session here, or would not know the frame, is closed and comes back elsewhere."""
        if self.phase is Phase.COMMITTING:
            return []  # its gateway names it again
        if self.phase is Phase.LIVE and not self.guest:
            return [Send(frame)] if frame else []
        if refusal := self._not_here():
            return refusal
        self.socket = False
        return [Close(self._error(Code.GATEWAY_CLOSING, LOGIN)), *self._socket_gone()]

    def invited(self, frame: bytes) -> list[Action]:
        """Another gateway has more left: a session is told, and may go. frame: the REDIRECT. Nobody else is asked."""
        return [Send(frame)] if self.phase is Phase.LIVE and not self.guest and self.socket else []

    # ── frames in the wrong place ────────────────────────────────────────────────────────────────────────────

    def out_of_place(self, kind: Kind, ref: int = 0) -> list[Action]:
        """A frame that this phase does not let in."""
        if refusal := self._not_here():
            return refusal
        code = Code.LOGIN_FIRST if self.phase is Phase.NEW else Code.SYNC_FIRST
        return [Send(self._error(code, kind, ref))]

    def malformed(self, kind: Kind) -> list[Action]:
        """A frame that could not be read: its sender is told, and its socket closed. The session may resume."""
        return self._broken(kind)

    def too_fast(self, kind: Kind, *, floods: bool) -> list[Action]:
        """Frames came faster than they are served, and are dropped: the first one's type is told. floods: for too long."""
        if floods:
            return self._broken(kind, Code.FLOODING)
        return [Send(self._error(Code.BUSY, kind))]

    def foreign(self, kind: Kind) -> list[Action]:
        """A frame that names another connection."""
        return [Send(self._error(Code.FOREIGN_CONN_ID, kind))]

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _ask(self, kind: Kind) -> list[Action]:
        self._serial += 1
        self.phase = Phase.NEW
        self._awaited = kind
        return [Await(kind, 0)]

    def _answered(self, candidate: Candidate) -> list[Action]:
        self._awaited = None
        self.phase = Phase.ANSWERED
        return [Send(self._login_ack(candidate.kind, candidate.user, candidate.secret))]

    def _refused(self, kind: Kind, code: Code) -> list[Action]:
        self._awaited = None
        self.candidate = None
        return [Send(answers.ack(kind, code, self.conn_id))]

    def _login_ack(self, kind: Kind, user: str, secret: bytes) -> bytes:
        return answers.login_ack(kind, self.conn_id, user, secret, self.heartbeat_ms, self._rules.told)

    def _commit(self, asked: _Asked) -> list[Action]:
        candidate = self.candidate
        if candidate is None:
            return self.out_of_place(asked.first)
        gen = candidate.seen.gen + 1 if candidate.seen is not None else 0
        self.session = Session(
            self.conn_id,
            candidate.user,
            candidate.device_id,
            candidate.secret,
            gen,
            candidate.guest,
            candidate.platform,
            candidate.network,
        )
        self.phase = Phase.COMMITTING
        self.replaced_early = None
        self._asked = asked
        self._renew()
        return [*(Await(SYNC, ref) for ref, _ in asked.syncs), Commit(self.session, candidate.seen)]

    def _commit_refused(self, asked: _Asked, code: Code) -> list[Action]:
        out: list[Action] = [Send(answers.ack(SYNC, code, self.conn_id, ref)) for ref, _ in asked.syncs]
        return out or [Send(answers.ack(asked.first, code, self.conn_id))]

    def _synced(self, ref: int, request: bytes) -> list[Action]:
        if self.requests >= MAX_REQUESTS:
            return [Send(answers.ack(SYNC, Code.BUSY, self.conn_id, ref))]
        run, push_no = (self.pushes.run, self.pushes.push_no) if self.pushes is not None else (0, 0)
        self.doubtful = False  # the page is read from now on: it holds what an empty Notify would have hinted at
        out: list[Action] = [Send(answers.sync_ack(self.conn_id, ref, run, push_no))]
        if self.guest:  # types above 5 never go to a guest
            return out
        self.requests += 1
        return [*out, AskSync(request, ref)]

    def _renew(self) -> None:
        """Push state of a session that begins to count."""
        if self.session is not None and self.session.guest:
            self.guest_pushes, self.pushes = GuestPushes(), None
        else:
            self.guest_pushes, self.pushes = None, Pushes(0)

    def _rest(self) -> None:
        """Nothing is sent or ordered any more: give the memory back."""
        self.uplinks = self.pushes = self.guest_pushes = None
        self.typed = None
        self.doubtful = False

    def _wait(self) -> list[Action]:
        self.phase = Phase.WAITING
        self._rest()
        return [Arm(self._rules.resume_window_ms)]

    def _window_over(self, grace_ms: int) -> list[Action]:
        if grace_ms > 0:
            return [Arm(grace_ms)]
        session = self.session
        self.phase = Phase.ENDED
        return [End(session)] if session is not None else [Forget()]

    def _socket_gone(self) -> list[Action]:
        if self.phase is Phase.LIVE:
            return self._wait()
        if self.phase in (Phase.NEW, Phase.ANSWERED):
            if self.unsure:  # the commit may have landed: then a resume must find the session
                return self._wait()
            self.phase = Phase.ENDED
            return [Forget()]
        return []  # COMMITTING: its outcome decides; WAITING, REPLACED, ENDED: their timers run

    def _broken(self, kind: Kind, code: Code = Code.MALFORMED) -> list[Action]:
        self.socket = False
        return [Close(self._error(code, kind)), *self._socket_gone()]

    def _not_here(self) -> list[Action]:
        """The answer to any frame in a phase that has no socket any more; [] where frames are right."""
        if self.phase is Phase.REPLACED:
            return [self._kicked(self.replaced_by)]
        if self.phase is Phase.WAITING:
            return [Close(self._error(Code.HEARTBEAT_TIMEOUT, HEARTBEAT))]
        if self.phase is Phase.ENDED:
            return [Close(self._error(Code.LOGGED_OUT, LOGIN))]
        return []

    def _kicked(self, code: Code) -> Close:
        return Close(answers.ack(LOGIN, code, self.conn_id) if self.guest else answers.kick(code))

    def _error(self, code: Code, kind: Kind, ref: int = 0) -> bytes:
        return answers.ack(kind, code, self.conn_id, ref) if self.guest else answers.error(code, kind, ref)

    def refuse_up(
        self, code: Code, conversation: str, client_id: int, client_msg_id: bytes, expected: int = 0
    ) -> bytes:
        """The ACK of an UP with this code."""
        return answers.up_ack(code, self.conn_id, conversation, client_id, client_msg_id, expected)
