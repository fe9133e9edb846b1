"""The client's machine: every transition of a connection, from the first attempt to the last code.

                        ┌───────────── no gateway left: back-off ─────────────┐
                        v                                                     │
    start ──> WAITING ──> LISTING ──> TOKEN ──> CONNECTING ──> HELLO ──> COMMITTING ──> LIVE
                 ^        (ipconfig)  (no session)   │  ^        │  ^        │           │
                 │                                   │  └ next ──┘  └ try again / log in ┤
                 └──── random delay told by the server ── the socket is gone ────────────┘
    any ──> STOPPED at a code of the range "stop" in a Kick or an Error, at logout, at close
    LIVE ── Redirect: a second link commits elsewhere meanwhile (moving.py) ──> LIVE, on that link

CONNECTING races over the round's gateways (race.py). HELLO sends ReConn if a session is known, else Login. COMMITTING has
sent the first Sync, which commits (R2); its answer makes the session the one that a later ReConn names. LIVE sends the
outbox, pulls gaps, acknowledges pushes, beats.
Only answers, frames and ticks move the machine; each call gets the clock's reading (monotonic, ms) and adds to one
`Effects`, which the edge takes when its round ends and makes durable before it sends or tells anything of it.

What flows on a committed connection is traffic.py's. Memory: see there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from google.protobuf.message import DecodeError

from plato.client.api import State, Stopped
from plato.client.core import wire
from plato.client.core.backoff import Backoff
from plato.client.core.gateways import Gateways
from plato.client.core.heartbeat import Heartbeat
from plato.client.core.inbox import Thread
from plato.client.core.model import Effects, Entry, Session, Snapshot, StateChanged
from plato.client.core.moving import Move, Outcome, polls, ways
from plato.client.core.moving import Step as MoveStep
from plato.client.core.race import Race
from plato.client.core.repeats import Chance, Request, Timing
from plato.client.core.shared import SharedState
from plato.client.core.steps import LINKED, PHASES, Step
from plato.client.core.traffic import Traffic
from plato.core.codes import Action, Code, action
from plato.core.errors import PeerError
from plato.wire.v1 import client_pb2 as pb

FRESH_LIST_MS: Final = 5_000
"""A list that is asked for as a wait of this length begins is still fresh at its end."""
HURRY_MS: Final = 1_000
"""Rounds that `hurry` begins are at least so far apart, however often it is called."""
HELLOS_PER_LINK: Final = 3
VERSION: Final = "plato-python/1"
CONNECTION_STOP_MAX: Final = 419
"""STOP codes up to this one concern the connection, those above it a message or a request."""
_TOKEN_CODES: Final = frozenset({Code.TOKEN_EXPIRED, Code.TOKEN_NOT_YET_VALID, Code.TOKEN_INVALID, Code.GUESTS_OFF})
_NUMBERED: Final = frozenset({pb.PUSH, pb.NOTIFY, pb.RECEIPT, pb.STATE})


class Machine:
    """One device of one user. Not thread-safe; `take` ends a round."""

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        gateways: Sequence[str],
        listing: bool,
        chance: Chance,
        platform: str = "python",
        transport: str = "tcp",
        network: str = "",
    ) -> None:
        """gateways: addresses that the user named. listing: there is an ipconfig to ask. chance: gives [0, 1). transport:
        what an address without a scheme means. network: the kind of network, as the application names it."""
        self.timing = Timing()
        self.device_id = snapshot.device_id
        self.link_no = 0
        """The link that may speak, or the newest attempt at one."""
        self.moves = 0
        """How often this client went over to a second link, by a Redirect or back from polls; it was ONLINE all the time."""
        self._last_link_no = 0
        self._move: Move | None = None
        self._first_gone = False  # the link that stood is gone, the move's commit may come any moment
        self._synced_elsewhere = False  # a second link's Sync is unanswered: it may have replaced the first
        self._told_replaced = False  # it has, or somebody else
        self._chance = chance
        self._listing = listing
        self._platform = platform
        self._transport = transport
        self._way = ""  # how the link goes, see links.py
        self._heartbeat = Heartbeat(snapshot.learnt, network, self.timing, chance)
        self._traffic = Traffic(snapshot, self.timing, chance)
        self._requests = self._traffic.requests
        self._session = snapshot.session
        self._candidate: Session | None = None  # of this link, until its Sync is answered
        self._token: str | None = None
        self._token_refused = False  # since the last commit
        self._book = Gateways(gateways, snapshot.gateways, snapshot.last_gateway)
        self._race = Race(self._book, self.timing)
        self._list: Sequence[str] | None = None  # a fresh one, until a round takes it
        self._list_asked = False
        self._step = Step.WAITING
        self._until_ms = 0  # WAITING: when it is over
        self._address: str | None = None
        self._backoff = Backoff(chance)
        self._round_ms = -HURRY_MS  # when the last round began
        self._live_since_ms = 0
        self._hellos = 0  # on this link
        self._beat_ms = 0  # when the next heartbeat is due
        self._logging_out = False
        self._code: int | None = None
        self._detail = ""  # what the code's own words do not say
        self._list_trouble: tuple[int | None, str] = (None, "")  # why no list came: the code, words
        self._token_trouble = ""  # why the provider gave none
        self._shown: State | None = None

    # ── the edge's calls ─────────────────────────────────────────────────────────────────────────────────

    @property
    def user(self) -> str | None:
        """Who this client is, once known."""
        return self._traffic.user

    @property
    def state(self) -> State:
        """The connection's state for the application."""
        return State(PHASES[self._step], self._code, self._address, self.user, self._detail)

    @property
    def next_round_ms(self) -> int | None:
        """When the next round begins; None: one runs, or a connection stands, or there will be none."""
        return self._until_ms if self._step is Step.WAITING else None

    def threads(self) -> list[Thread]:
        """Every known conversation's reading side."""
        return self._traffic.inbox.threads()

    def thread(self, conversation_id: str) -> Thread | None:
        """One conversation's reading side."""
        return self._traffic.inbox.find(conversation_id)

    def unsettled(self, conversation_id: str) -> list[Entry]:
        """The outbox of one conversation, by client_id."""
        return self._traffic.outbox.entries(conversation_id)

    def start(self, now_ms: int) -> None:
        """Begin the first round."""
        self._begin_round(now_ms)

    def named(self, user: str) -> None:
        """The user is known before the server said so (by the token that the edge holds)."""
        if self._traffic.user is None:
            self._traffic.user = user
            self._out.writes.meta["user"] = user

    def listed(self, addresses: Sequence[str] | None, now_ms: int, code: int | None = None, detail: str = "") -> None:
        """The answer to `want_list`: addresses, best first, or None if none came, and then why."""
        self._list_asked = False
        self._list_trouble = (code, detail)
        if addresses and tuple(addresses) != self._book.listed:
            self._out.writes.meta["gateways"] = "\n".join(addresses)
        if self._step is Step.WAITING:
            self._list = addresses
        elif self._step is Step.LISTING:
            self._list = addresses
            self._open_round(now_ms)
        elif self._move is not None and not self._move.running:
            self._move.more(addresses or self._book.known)
            self._next_way(now_ms)

    def tokened(self, token: str | None, now_ms: int, detail: str = "") -> None:
        """The answer to `want_token`; None: the provider failed, for the reason in `detail`."""
        self._token = token
        self._token_trouble = detail
        if self._step is Step.TOKEN:
            if token is None:
                self._wait_longer(now_ms)
            else:
                self._next_gateway(now_ms)
        elif self._step is Step.HELLO and not len(self._requests):
            if token is None:
                self._drop(now_ms)
            else:
                self._hello(now_ms)

    def opened(self, link_no: int, now_ms: int, way: str = "tcp") -> bool:
        """The link is open. False: it is not wanted any more, close it."""
        if self._move is not None and link_no == self._move.link_no:
            self._move.opened(now_ms, way)
            return True
        address = self._race.won(link_no)
        if address is None:
            return False
        self.link_no, self._address, self._way = link_no, address, way
        self._out.give_up += self._race.cancel()
        self._step = Step.HELLO
        self._hellos = 1
        self._hello(now_ms)
        return True

    def closed(self, link_no: int, now_ms: int) -> None:
        """The link could not be opened, or is gone."""
        if self._move is not None and link_no == self._move.link_no:
            self._way_failed(now_ms)
        elif self._race.failed(link_no, now_ms):
            self._run_race(now_ms)
        elif link_no == self.link_no and self._step in LINKED:
            self._heartbeat.lost(silent=True)
            self._lost(now_ms)

    def frames(self, link_no: int, payloads: Iterable[bytes], now_ms: int) -> None:
        """Frames came, in order. A frame that cannot be read ends the link: its content would be missed in silence."""
        for payload in payloads:
            if self._move is not None and link_no == self._move.link_no:
                self._moving(self._move.frame(payload, now_ms), now_ms)
                if link_no != self.link_no:
                    continue
            if self._first_gone or link_no != self.link_no or self._step not in LINKED:
                return
            self._heartbeat.heard(now_ms)
            try:
                self._frame(payload, now_ms)
            except (PeerError, DecodeError):
                self._note_code(int(Code.MALFORMED))
                self._drop(now_ms)

    def network_changed(self, network: str, now_ms: int) -> None:
        """The device is in another kind of network: the connection of the one before is gone, said or not."""
        if self._heartbeat.move(network):
            if self._step in LINKED:
                self._drop(now_ms)
            self.hurry(now_ms)

    def hurry(self, now_ms: int) -> None:
        """The user is waiting: the next round begins now, or HURRY_MS after the last one."""
        if self._step is Step.WAITING:
            self._until_ms = min(self._until_ms, max(now_ms, self._round_ms + HURRY_MS))

    def tick(self, now_ms: int) -> None:
        """Time passed. To be called once the input at hand is handed in."""
        if self._step is Step.WAITING:
            if now_ms >= self._until_ms:
                self._begin_round(now_ms)
        elif self._step is Step.CONNECTING:
            self._run_race(now_ms)
        elif self._first_gone and self._move is not None:
            self._moving(self._move.tick(now_ms), now_ms)
        elif self._step in LINKED:
            if self._move is not None and self._move.running:
                self._moving(self._move.tick(now_ms), now_ms)
            again = self._requests.expire(now_ms)
            if again is None or (self._step is Step.LIVE and not self._traffic.outbox.expire(now_ms)):
                self._book.avoid(self._address)
                self._heartbeat.lost(silent=True)
                self._drop(now_ms)
                return
            self._out.frames += again
            if self._step is Step.LIVE:
                self._traffic.spread(now_ms)
            if self._step is Step.LIVE and now_ms >= self._beat_ms:
                self._beat_ms = self._heartbeat.next_ms(now_ms)
                self._traffic.beat(now_ms, self._heartbeat.wish())

    def deadline_ms(self) -> int | None:
        """When `tick` has something to do next; None: time decides nothing now."""
        if self._step is Step.WAITING:
            return self._until_ms
        if self._step is Step.CONNECTING:
            return self._race.deadline_ms()
        if self._step not in LINKED:
            return None
        moments = [] if self._first_gone else [self._requests.deadline_ms()]
        if self._move is not None and self._move.running:
            moments.append(self._move.deadline_ms())
        if self._step is Step.LIVE and not self._first_gone:
            moments += [self._traffic.outbox.deadline_ms(), self._traffic.spread_ms(), self._beat_ms]
            moments.append(self._traffic.shared.deadline_ms())
        return min((m for m in moments if m is not None), default=None)

    def send(self, conversation_id: str, client_msg_id: bytes, to_user: str, msg_type: int, body: bytes) -> Entry:
        """Puts a message into the outbox. to_user: a dialogue's other user, else "". Raises OutboxFull, Stopped."""
        if self._step is Step.STOPPED:
            raise Stopped(self._code, self._detail)
        return self._traffic.send(conversation_id, client_msg_id, to_user, msg_type, body)

    @property
    def shared(self) -> SharedState:
        """What this user's devices share."""
        return self._traffic.shared

    def read(self, conversation_id: str, seq: int) -> None:
        """The user has read up to here, or to the end of what is stored, on this device."""
        thread = self.thread(conversation_id)
        if thread is not None:
            self.shared.read(conversation_id, min(seq, thread.cursor), self._out)

    def typing(self, conversation_id: str, stopped: bool, now_ms: int) -> None:
        """The user writes, or stopped to; without a connection nobody is told."""
        if self._step is Step.LIVE:
            self.shared.write(conversation_id, stopped, now_ms, self._out)

    def history(self, conversation_id: str, before: int | None, limit: int, now_ms: int) -> int | None:
        """Asks for the newest rows below `before`; the answer is a HistoryPage of the ref returned. None: not now."""
        return self._traffic.history(conversation_id, before, limit, now_ms)

    def forget_history(self, ref: int) -> None:
        """Its asker does not wait any more."""
        self._traffic.forget_history(ref)

    def logout(self, now_ms: int) -> None:
        """Ends the session on the platform as soon as a connection is live, then stops."""
        self._logging_out = True
        if self._move is not None and (self._first_gone or self._move.step is MoveStep.COMMITTING):
            return  # the session is about to be the second link's: it is ended there
        if self._step is Step.LIVE:
            self._stay()
            self._out.frames.append(self._requests.ask(pb.LOGOUT, 0, wire.logout(), now_ms))

    def stop(self, code: int | None, detail: str = "") -> None:
        """No further attempt. With a final code the session is forgotten, else (None) it waits for the next start.

        detail: says more than the code's own words.
        """
        if self._step is Step.STOPPED:
            return
        self._end_session()
        self._out.give_up += self._race.cancel()
        self._out.connects = []
        self._out.want_list = self._out.want_token = False
        self._out.close = True
        self._step = Step.STOPPED
        self._code, self._detail = code, detail
        self._address = None
        if code is not None:
            self._forget_session()

    def take(self, now_ms: int) -> Effects:
        """Ends the round: what is to be done now."""
        self._traffic.flush(now_ms)
        if self._out.frames:
            self._heartbeat.spoke(now_ms)
        if (learnt := self._heartbeat.take()) is not None:
            self._out.writes.meta["learnt"] = learnt
        state = self.state
        if state != self._shown:
            self._shown = state
            self._out.notices.append(StateChanged(state))
        out = self._out
        out.link_no = self.link_no
        if self._move is not None:
            out.second_frames, self._move.frames = self._move.frames, []
        self._traffic.out = Effects()
        return out

    @property
    def _out(self) -> Effects:
        return self._traffic.out

    # ── rounds: which gateway, when ──────────────────────────────────────────────────────────────────────

    def _begin_round(self, now_ms: int) -> None:
        self._round_ms = now_ms
        self._backoff.begin_round()
        if self._listing and self._list is None:
            self._step = Step.LISTING
            self._ask_list()
        else:
            self._open_round(now_ms)

    def _ask_list(self) -> None:
        if self._listing and not self._list_asked:
            self._list_asked = self._out.want_list = True

    def _open_round(self, now_ms: int) -> None:
        self._book.begin_round(self._list, self._chance)
        self._list = None
        self._next_gateway(now_ms)

    def _next_gateway(self, now_ms: int) -> None:
        self._address = None
        if self._session is None and self._token is None:
            self._step = Step.TOKEN
            self._ask_token()
            return
        self._step = Step.CONNECTING
        self._run_race(now_ms)

    def _run_race(self, now_ms: int) -> None:
        """Gives up what took too long, begins what is due."""
        self._out.give_up += self._race.expire(now_ms)
        while (address := self._race.next(now_ms)) is not None:
            self.link_no, self._address = self._new_link_no(), address
            self._race.started(self.link_no, address, now_ms)
            self._out.connects.append((self.link_no, address))
        if self._race.lost:
            self._wait_longer(now_ms)

    def _new_link_no(self) -> int:
        self._last_link_no += 1
        return self._last_link_no

    def _wait_longer(self, now_ms: int) -> None:
        """A round failed: exponential back-off, then a fresh list."""
        if not self._backoff.told:  # an older code is not why
            self._code, self._detail = (None, self._token_trouble) if self._token_trouble else self._list_trouble
        self._wait(now_ms, self._backoff.failed_ms())

    def _wait(self, now_ms: int, delay_ms: int) -> None:
        self._step = Step.WAITING
        self._address = None
        self._until_ms = now_ms + delay_ms
        self._list = None
        if delay_ms <= FRESH_LIST_MS:
            self._ask_list()  # so that it is there when the wait ends; after a longer one it would be old

    def _drop(self, now_ms: int) -> None:
        """Close the link ourselves and go on elsewhere."""
        self._out.close = True
        self._lost(now_ms)

    def _lost(self, now_ms: int) -> None:
        """The link is gone. A committed one resumes after the random delay; an attempt goes on with the next gateway."""
        was = self._step
        if was is Step.LIVE and self._move is not None and self._move.running:
            self._first_gone = True
            return
        self._heartbeat.lost(silent=False)
        self._end_session()
        if self._logging_out:
            self.stop(int(Code.LOGGED_OUT))
        elif was is not Step.LIVE:
            self._next_gateway(now_ms)
        else:
            stood_ms = now_ms - self._live_since_ms
            self._wait(now_ms, self._backoff.lost_ms(stood_ms, self.timing.reconnect_delay_ms))

    def _end_session(self) -> None:
        self._stay()
        self._candidate = None
        self._traffic.end()

    # ── login, resume, commit ────────────────────────────────────────────────────────────────────────────

    def _ask_token(self) -> None:
        self._out.want_token = True
        self._out.fresh_token = self._token_refused

    def _hello(self, now_ms: int) -> None:
        self._heartbeat.enter(self._way)
        if self._session is not None:
            frame = self._reconn(self._session)
            self._out.frames.append(self._requests.ask(pb.RECONN, 0, frame, now_ms))
        elif self._token is not None:
            beat = self._heartbeat
            frame = wire.login(self.device_id, self._token, self._platform, beat.network, VERSION, beat.wish())
            self._out.frames.append(self._requests.ask(pb.LOGIN, 0, frame, now_ms))
        else:
            self._ask_token()

    def _reconn(self, session: Session) -> bytes:
        return wire.reconn(session.conn_id, session.secret, self._heartbeat.network, self._heartbeat.wish())

    def _hello_again(self, now_ms: int) -> None:
        """Login or ReConn anew on this socket; a socket on which that does not help is left."""
        self._end_session()
        self._step = Step.HELLO
        self._hellos += 1
        if self._hellos > HELLOS_PER_LINK:
            self._drop(now_ms)
        else:
            self._hello(now_ms)

    def _log_in_again(self, code: int, now_ms: int) -> None:
        """A code of the range "log in": the session is done. A token refused twice in a row waits for better times."""
        if self._told_replaced and code == Code.SECRET_WRONG:
            self.stop(int(Code.REPLACED))  # by somebody else: to log in would be to take turns with them for ever
            return
        self._note_code(code)
        self._forget_session()
        if code in _TOKEN_CODES:
            self._token = None
            if self._token_refused:
                self._end_session()
                self._out.close = True
                self._wait_longer(now_ms)
                return
            self._token_refused = True
        self._hello_again(now_ms)

    def _welcomed(self, ack: pb.ACKMsg, now_ms: int) -> None:
        """Login or ReConn was answered with OK: now the Sync that commits."""
        self._tune(ack)
        if ack.user_id and ack.user_id != self.user:
            if self.user is not None:  # the store is another user's: mixing the two would be worse than stopping
                self.stop(int(Code.TOKEN_INVALID), f"the token belongs to {ack.user_id!r}, not to {self.user!r}")
                return
            self.named(ack.user_id)
        secret = ack.secret or (self._session.secret if self._session else b"")
        self._candidate = Session(ack.ConnID, secret)
        self._step = Step.COMMITTING
        self._traffic.start_sync(now_ms)

    def _committed(self, run: int, push_no: int, now_ms: int) -> None:
        """The first Sync was answered: this session is the one to resume, and the outbox goes out again, in order."""
        self._heartbeat.begin(now_ms, at_once=self._backoff.clean)
        self._stands(now_ms)
        self._traffic.begin(run, push_no)
        if self._logging_out:
            self.logout(now_ms)

    def _stands(self, now_ms: int) -> None:
        """The candidate's session is the one that a later ReConn names."""
        self._step = Step.LIVE
        self._live_since_ms = now_ms
        self._code, self._detail = None, ""
        self._token_refused = self._synced_elsewhere = self._told_replaced = False
        if self._candidate is not None and self._candidate != self._session:
            self._session = self._candidate
            self._out.writes.meta["session"] = f"{self._session.conn_id} {self._session.secret.hex()}"
        if self._address is not None and self._book.served(self._address):
            self._out.writes.meta["last_gateway"] = self._address
        self._beat_ms = self._heartbeat.next_ms(now_ms)

    # ── going over to another gateway ────────────────────────────────────────────────────────────────────

    def _redirected(self, redirect: pb.RedirectMsg, now_ms: int) -> None:
        """This gateway is about to close: go on through another one, and leave it when that stands."""
        if self._address is not None:
            self._out.polls |= polls(redirect, self._address, self._transport)
            found = ways(redirect, self._address, self._transport, self._chance)
            self._begin_move(self._address, found, now_ms)

    def reopen(self, now_ms: int) -> bool:
        """Goes over to a second link to the present gateway, if that one commits: there may be a better way to it now.
        False: no connection stands, or it is going elsewhere."""
        if self._address is None or not self._begin_move("", [self._address], now_ms):
            return False
        if self._move is not None:
            self._move.listed = True  # this way or none
        return True

    def _begin_move(self, current: str, addresses: Sequence[str], now_ms: int) -> bool:
        if self._step is not Step.LIVE or self._move is not None or self._logging_out or self._session is None:
            return False
        frame = self._reconn(self._session)
        self._move = Move(self._session, frame, current, addresses, self._traffic, self.timing, self._chance)
        self._next_way(now_ms)
        return True

    def _next_way(self, now_ms: int) -> None:
        move = self._move
        if move is None:
            return
        if move.next_way(self._new_link_no(), now_ms):
            self._out.second = (move.link_no, move.address)
        elif move.listed:
            self._move = None  # we stay; the Redirect comes again
        else:
            move.listed = True
            if self._listing:
                self._ask_list()
            else:
                move.more(self._book.known)
                self._next_way(now_ms)

    def _way_failed(self, now_ms: int) -> None:
        """The second link is of no use. Without a first one this is a lost connection as any other."""
        move = self._move
        if move is None:
            return
        self._out.second_close = True
        self._out.second = None
        if move.code == Code.REPLACED or (move.code == Code.SECRET_WRONG and self._told_replaced):
            self.stop(int(Code.REPLACED))
        elif self._first_gone:
            self._stay()
            self._lost(now_ms)
        elif self._logging_out:
            self._stay()
            self.logout(now_ms)
        else:
            self._next_way(now_ms)

    def _moving(self, outcome: Outcome, now_ms: int) -> None:
        if self._move is not None and self._move.step is MoveStep.COMMITTING:
            self._synced_elsewhere = True
        if outcome is Outcome.FAILED:
            self._way_failed(now_ms)
        elif outcome is Outcome.COMMITTED:
            self._went_over(now_ms)

    def _went_over(self, now_ms: int) -> None:
        """The second link's Sync was answered: from now on it is the client's only one."""
        move, self._move, self._first_gone = self._move, None, False
        assert move is not None
        assert move.sync is not None  # a commit answers our Sync
        self._heartbeat.lost(silent=False)
        self._heartbeat.enter(move.way)
        if move.welcome is not None:
            self._tune(move.welcome)
        self._heartbeat.begin(now_ms, at_once=False)
        self.moves += 1
        self.link_no, self._address, self._candidate = move.link_no, move.address, move.candidate
        self._stands(now_ms)
        self._traffic.go_over(move.sync, *move.committed, now_ms)
        self._out.go_over, self._out.close, self._out.second, self._out.second_close = True, False, None, False
        if self._logging_out:
            self.logout(now_ms)

    def _stay(self) -> None:
        """No second link."""
        if self._move is not None and self._move.running:
            self._out.second_close = True
            self._out.second = None
        self._move, self._first_gone = None, False

    def _note_code(self, code: int) -> None:
        self._code, self._detail = code, ""
        self._backoff.told = True

    def _forget_session(self) -> None:
        if self._session is not None:
            self._session = None
            self._out.writes.meta["session"] = ""

    def _tune(self, ack: pb.ACKMsg) -> None:
        self.timing.tune(ack)
        self._heartbeat.granted()

    # ── frames and codes ─────────────────────────────────────────────────────────────────────────────────

    def _frame(self, payload: bytes, now_ms: int) -> None:
        cmd = wire.open_cmd(payload)
        numbered = bool(cmd.run) and cmd.Type in _NUMBERED
        if numbered and not self._traffic.arrived(cmd, now_ms):
            return
        match cmd.Type:
            case pb.PUSH:
                self._traffic.pushed(pb.PushMsg.FromString(cmd.Payload), numbered, now_ms)
            case pb.RECEIPT:
                self._traffic.receipt(pb.ReceiptMsg.FromString(cmd.Payload), numbered, now_ms)
            case pb.NOTIFY:
                self._traffic.notified(pb.NotifyMsg.FromString(cmd.Payload), numbered, now_ms)
            case pb.ACK:
                self._ack(pb.ACKMsg.FromString(cmd.Payload), now_ms)
            case pb.SYNCED:
                self._synced(pb.SyncedMsg.FromString(cmd.Payload), now_ms)
            case pb.PULLED:
                self._pulled(pb.PulledMsg.FromString(cmd.Payload), now_ms)
            case pb.STATE | pb.READ | pb.TYPING:
                self._traffic.told(cmd.Type, cmd.Payload, now_ms)
            case pb.REDIRECT:
                self._redirected(pb.RedirectMsg.FromString(cmd.Payload), now_ms)
            case pb.KICK:
                self._ended(pb.KickMsg.FromString(cmd.Payload).code, now_ms)
            case pb.ERROR:
                self._error(pb.ErrorMsg.FromString(cmd.Payload), now_ms)
            case _:
                pass  # a type of a newer server

    def _ack(self, ack: pb.ACKMsg, now_ms: int) -> None:
        if ack.Type == pb.UP:
            if not self._traffic.up_answered(ack, now_ms) and self._step is Step.LIVE:
                if ack.Code == Code.SYNC_FIRST:
                    self._traffic.resync(now_ms)
                else:
                    self._ended(ack.Code, now_ms)
            return
        if ack.Type == pb.READ:
            self._traffic.shared.answered(ack, now_ms, self._out)
            return
        request = self._requests.find(ack.Type, ack.ref)
        if request is None:
            return
        if ack.Code or ack.Type == pb.PULL:
            self._coded(request, ack.Code, now_ms, ack.retry_ms)
        elif ack.Type in (pb.LOGIN, pb.RECONN):
            self._requests.done(ack.Type, ack.ref)
            self._welcomed(ack, now_ms)
        elif ack.Type == pb.SYNC:
            self._requests.pending(request, now_ms)  # its page follows
            if self._step is Step.COMMITTING:
                self._committed(ack.run, ack.push_no, now_ms)
        elif ack.Type == pb.HEARTBEAT:
            self._requests.done(ack.Type, ack.ref)
            if ack.heartbeat_ms and ack.heartbeat_ms != self.timing.heartbeat_ms:
                self.timing.heartbeat_ms = ack.heartbeat_ms
                self._beat_ms = self._heartbeat.next_ms(now_ms)
            self._heartbeat.granted()
            self._traffic.newest(ack.run, ack.push_no, now_ms)
        elif ack.Type == pb.LOGOUT:
            self.stop(int(Code.LOGGED_OUT))

    def _synced(self, page: pb.SyncedMsg, now_ms: int) -> None:
        request = self._requests.find(pb.SYNC, page.ref)
        if request is None:
            return
        if page.code:
            self._coded(request, page.code, now_ms, page.retry_ms)
            return
        if self._step is Step.COMMITTING:
            self._committed(0, 0, now_ms)  # its ACK was lost
        self._traffic.synced(page, request, now_ms)

    def _pulled(self, page: pb.PulledMsg, now_ms: int) -> None:
        request = self._requests.find(pb.PULL, page.ref)
        if request is None:
            return
        if page.code:
            self._coded(request, page.code, now_ms, page.retry_ms)
        else:
            self._traffic.pulled(page, request, now_ms)

    def _coded(self, request: Request, code: int, now_ms: int, retry_ms: int = 0) -> None:
        """A request was answered with something else than its result."""
        act = action(code)
        if act is Action.NONE:
            self._requests.pending(request, now_ms)
        elif act in (Action.RECONNECT, Action.LOGIN):
            self._ended(code, now_ms)
        elif act is Action.STOP:
            if request.kind == pb.PULL:
                self._traffic.pull_refused(request)
            elif request.kind in (pb.LOGIN, pb.RECONN) or code <= CONNECTION_STOP_MAX:
                self.stop(code)
            else:
                self._requests.later(request, now_ms)
        elif code == Code.TRY_AGAIN and request.kind == pb.SYNC and self._step is Step.COMMITTING:
            self._hello_again(now_ms)
        else:
            self._requests.later(request, now_ms, retry_ms)
            if code == Code.SYNC_FIRST and request.kind != pb.SYNC:
                self._traffic.resync(now_ms)

    def _error(self, error: pb.ErrorMsg, now_ms: int) -> None:
        """A refusal that belongs to no other frame, or the reason of a close that follows."""
        request = self._requests.find(error.type, error.ref)
        if request is None and not error.ref:
            request = self._requests.only(error.type)
        act = action(error.code)
        if error.retry_ms:
            self._backoff.stay_away(error.retry_ms)
        if act is Action.LOGIN and request is None and self._step is not Step.LIVE:
            return  # it answers what was sent before our Login or ReConn and says nothing about that
        if act in (Action.RECONNECT, Action.LOGIN) or (act is Action.STOP and error.code <= CONNECTION_STOP_MAX):
            self._ended(error.code, now_ms)
        elif request is not None:
            self._coded(request, error.code, now_ms)
        elif self._step is Step.LIVE and error.code == Code.SYNC_FIRST:
            self._traffic.resync(now_ms)
        elif self._step is Step.LIVE and error.type == pb.UP and act is Action.RETRY:
            self._traffic.outbox.later(now_ms)

    def _ended(self, code: int, now_ms: int) -> None:
        """A code that is about the session or the socket."""
        if code == Code.REPLACED and self._synced_elsewhere:
            self._told_replaced = True  # most likely by our own Sync, whose answer is on its way
            self._drop(now_ms)
            return
        self._note_code(code)
        act = action(code)
        if act is Action.STOP:
            self.stop(code)
        elif act is Action.LOGIN:
            self._log_in_again(code, now_ms)
        else:
            if code in (Code.GATEWAY_CLOSING, Code.GATEWAY_FULL, Code.ADDRESS_BUSY):
                self._book.avoid(self._address)
            self._drop(now_ms)
