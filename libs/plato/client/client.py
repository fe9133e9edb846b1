"""The client: one device of one user. Its machine decides (plato.client.core), this edge acts.

A round: frames, timers and calls of the application go into the machine; when the loop has handed over all it had, the
round's effects are taken, made durable (writer.py), and released: frames to the link, outcomes to their waiters, rows to
`messages()`. Per client there is a timer handle and a socket, and no task while the connection stands (two for a WebSocket).

Memory: the outbox (10,000 messages, 64 MiB), the reorder buffer (1,000 rows, 4 MiB), one page of messages for the
application; reading stops while the disk lags behind.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import ssl
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

from plato.client.access import Access, TokenProvider, subject
from plato.client.api import (
    ClientError,
    Message,
    Phase,
    Refused,
    State,
    Stopped,
    StoreForeign,
)
from plato.client.content import MsgType, Rich, is_operation
from plato.client.core.model import (
    Accepted,
    Effects,
    HistoryPage,
    Notice,
    RefusedMessage,
    Row,
    Settled,
    StateChanged,
    Writes,
)
from plato.client.core.session import Machine
from plato.client.http import Http
from plato.client.linkpair import LinkPair
from plato.client.links import TlsOptions, parse
from plato.client.operations import Operations
from plato.client.sent import Handles, Sent
from plato.client.store import Store
from plato.client.stream import MessageStream
from plato.client.views import Views
from plato.client.ways import Ways
from plato.client.writer import Writer
from plato.core.codes import Action, Code, action
from plato.core.conversations import dialogue_id, is_conversation_id, is_user_id, why_unreachable

HISTORY_S: Final = 5.0
LOGOUT_S: Final = 5.0
CLOSE_S: Final = 5.0
DELIVERED_S: Final = 0.5
"""How long what the application took may go unwritten; after a crash at most that is shown again."""
_log = logging.getLogger("plato.client")


class Client(Views, Operations):
    """One device of one user; use it as `async with Client(…) as client:`.

    It connects in the background and is usable at once, also offline: what is sent waits in the durable outbox. It comes
    back by itself after whatever happens to its connection, until a final code stops it (see `state`).
    """

    def __init__(
        self,
        token: TokenProvider | str,
        store_path: Path | str,
        gateways: Sequence[str] = (),
        *,
        ipconfig_url: str | None = None,
        device_id: int | None = None,
        user: str | None = None,
        transport: Literal["tcp", "ws", "poll"] = "tcp",
        poll_port: int = 0,
        platform: str = "python",
        network: str = "",
        tls: ssl.SSLContext | None = None,
        tls_name: str = "",
        api_url: str = "",
    ) -> None:
        """token: the user's token, or who gives one (TokenProvider); asked again when the platform refuses the last.

        store_path: the SQLite file of this device, made if missing, or ":memory:". gateways: a list of "host:port",
        "tcp://host:port" or "ws://host:port/ws", tried when there is no list. ipconfig_url: where the list is asked.
        poll_port: of long polling at the named gateways (lists tell it), which the client uses by itself in a network
        that kills sockets; transport "poll" uses nothing else, and gateways are then addresses of that port.
        device_id: of a new store, else checked; by default drawn once. user: known before the first login, so that
        `send(to=…)` works before it; by default read from the store or from the token. network: the kind of
        network that this device is in now, as the application names it ("wifi", "cellular"); heartbeats are learnt for
        each. tls: the certificates that are trusted, for gateways that speak TLS (`ssl.create_default_context()`);
        tls_name: the name in theirs, since lists name gateways by address. api_url: of the HTTP API, for `http`.
        Raises ValueError.
        """
        super().__init__()
        if isinstance(gateways, str):
            raise ValueError(f"gateways {gateways!r}: a list of addresses, not one")
        for address in gateways:
            parse(address, transport)
        if not gateways and ipconfig_url is None:
            raise ValueError("name gateways, or an ipconfig_url, or both")
        if user is not None and not is_user_id(user):
            raise ValueError(f"user {user!r}: 1 to 64 bytes of UTF-8 without control or invisible characters")
        self._token = token
        self._store_path = store_path
        self._gateways = tuple(gateways)
        self._listing = ipconfig_url is not None
        self._access = Access(token, ipconfig_url, transport)
        self._http = Http(api_url, self._access) if api_url else None
        self._device_id = device_id
        self._given_user = user
        self._transport = transport
        if tls_name and tls is None:
            raise ValueError("tls_name without tls: give an SSLContext, such as ssl.create_default_context()")
        self._tls = TlsOptions(tls, tls_name) if tls is not None else None
        self._platform = platform
        self._network = network
        self._writer: Writer
        self._loop: asyncio.AbstractEventLoop
        self._entered = False
        self._closed = False
        self._links: LinkPair
        self._poll_port = poll_port
        self._ways: Ways
        self._tasks: set[asyncio.Task[None]] = set()
        self._round: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0
        self._handles: Handles
        self._pages: dict[int, asyncio.Future[tuple[Row, ...] | None]] = {}  # history requests by ref
        self._state = State(Phase.OFFLINE)
        self._warned: set[int | str] = set()
        self._state_changed = asyncio.Event()
        self._rows_came = asyncio.Event()
        self._stream: MessageStream | None = None
        self._delivered = 0  # number of the last message that the application took
        self._delivered_timer: asyncio.TimerHandle | None = None
        self._by_us = False  # stopped by close or logout

    async def __aenter__(self) -> Client:
        """Opens the store and begins to connect. Raises StoreError."""
        if self._entered:
            raise RuntimeError("a client can be entered once; make another one")
        self._entered = True
        self._loop = asyncio.get_running_loop()
        self._store = await asyncio.to_thread(Store, self._store_path, secrets.randbits(64) or 1, self._device_id)
        try:
            snapshot = self._store.load()
            user = self._given_user or (subject(self._token) if isinstance(self._token, str) else None)
            if user is not None and snapshot.user is not None and user != snapshot.user:
                raise StoreForeign(
                    f"the store {self._store_path} belongs to {snapshot.user!r}, not to {user!r}; name another file"
                )
            self._delivered = self._store.delivered()
            self._handles = Handles(snapshot.outbox)
            self._machine = Machine(
                snapshot,
                gateways=self._gateways,
                listing=self._listing,
                chance=random.random,
                platform=self._platform,
                transport=self._transport,
                network=self._network,
            )
            if user is not None:
                self._machine.named(user)
            self._ways = Ways(
                self._transport, self._tls, self._poll_port, self._now_ms, random.random, self._try_socket
            )
            self._links = LinkPair(self._machine, self._ways.open, self._now_ms, self._poke)
        except BaseException:
            self._store.close()
            raise
        self._state = self._machine.state
        self._writer = Writer(self._store, self._release)
        self._machine.start(self._now_ms())
        self._poke()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the connection, not the session: the next start resumes it, within the platform's window."""
        self._by_us = True
        self._ways.close()
        self._machine.stop(None)
        self._run_round()
        if self._stream is not None:
            self._delivered = max(self._delivered, self._stream.handed)  # what is in its hands counts as taken
        self._note_delivered()
        if not await self._writer.drain(CLOSE_S):
            _log.warning(
                "the store could not be written within %s s; the last steps are repeated at the next start", CLOSE_S
            )
        await self._writer.abandon()
        self._closed = True
        for handle in (self._round, self._timer, self._delivered_timer):
            if handle is not None:
                handle.cancel()
        self._links.close()
        self._links.close_second()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._access.close()
        await self._links.ended()
        self._wake_all(Stopped(None))
        self._store.close()

    # ── what an application asks ─────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> State:
        """The connection's state now."""
        return self._state

    @property
    def user(self) -> str | None:
        """Who this client is, once known."""
        return self._machine.user

    @property
    def device_id(self) -> int:
        """This installation's id."""
        return self._machine.device_id

    @property
    def http(self) -> Http:
        """The HTTP API as this user. Raises ValueError where the client was made without its api_url."""
        if self._http is None:
            raise ValueError("this client knows no HTTP API: give Client its api_url")
        return self._http

    async def states(self) -> AsyncIterator[State]:
        """The state now and each later one, until the client stops; a slow reader misses some in between, never the last."""
        shown: State | None = None
        while True:
            changed = self._state_changed
            if self._state != shown:
                shown = self._state
                yield shown
            elif shown.phase is Phase.STOPPED:
                return
            else:
                await changed.wait()

    @property
    def moves(self) -> int:
        """How often this client went over to a second link, by a Redirect or back from polls; it was ONLINE all the time."""
        return self._machine.moves

    @property
    def next_try_s(self) -> float | None:
        """Seconds until the next attempt to connect; None while one runs, online, or when there will be none."""
        due_ms = self._machine.next_round_ms
        return None if due_ms is None else max(0.0, (due_ms - self._now_ms()) / 1000)

    def hurry(self) -> None:
        """Its user is waiting: the next attempt to connect is made now, instead of when the back-off ends. At most one a
        second, however often this is called; without effect while an attempt runs, online, or stopped."""
        self._check_open(stopped_too=False)
        self._machine.hurry(self._now_ms())
        self._set_timer()

    def network_changed(self, network: str) -> None:
        """The device is in another kind of network now: a connection of the one before is left, and resumed at once."""
        self._check_open(stopped_too=False)
        self._network = network
        self._ways.forget()
        self._machine.network_changed(network, self._now_ms())
        self._poke()

    async def send(
        self,
        body: bytes | str | Rich,
        *,
        to: str | None = None,
        conversation_id: str | None = None,
        msg_type: int | None = None,
        client_msg_id: uuid.UUID | None = None,
    ) -> Sent:
        """Puts a message into the durable outbox and returns when it is there; it is sent whenever there is a connection.

        body: text, a rich message, or bytes of the application's own. to: the other user of a dialogue; or conversation_id.
        msg_type: the application's own, 0 to 2^32 - 1 (1,000 to 1,999 are operations, which have calls of their own).
        Messages of one conversation keep the order of their `send` calls. A cancelled call may have sent.

        client_msg_id: the message's idempotency key, by default a random one. The same key again in the same conversation,
        also after a restart, sends nothing and returns the first message's handle, whatever the body is now.
        Raises ValueError, Refused (the body is larger than the platform takes; or `to` before it is known who this client
        is, and its token is refused), OutboxFull, Stopped.
        """
        if isinstance(body, Rich):
            if msg_type not in (None, MsgType.RICH):
                raise ValueError(f"msg_type {msg_type}: a rich message has its own")
            msg_type, data = MsgType.RICH, body.encode()
        else:
            msg_type, data = msg_type or 0, body.encode() if isinstance(body, str) else bytes(body)
        if (to is None) == (conversation_id is None):
            raise ValueError("name either `to` or `conversation_id`")
        if not 0 <= msg_type < 1 << 32 or is_operation(msg_type):
            raise ValueError(f"msg_type {msg_type}: 0 to 2^32 - 1, without 1,000 to 1,999")
        if to is not None:
            if why := why_unreachable(to):
                raise ValueError(f"to {to!r}: it {why}")
            conversation_id = dialogue_id(await self._who(), to)
        assert conversation_id is not None
        return await self._post(conversation_id, msg_type, data, to or "", client_msg_id)

    async def _post(
        self, conversation_id: str, msg_type: int, body: bytes, to: str = "", key: uuid.UUID | None = None
    ) -> Sent:
        """Into the durable outbox. Raises ValueError, Refused, OutboxFull, Stopped."""
        if not is_conversation_id(conversation_id):
            raise ValueError(f"conversation_id {conversation_id!r}: 1 to 64 bytes of UTF-8 without control characters")
        limit = self._machine.timing.max_body_bytes
        if len(body) > limit:
            raise Refused(Code.BODY_TOO_LARGE, f"{len(body)} bytes, limit {limit}")
        self._check_open()
        name = (key or uuid.uuid4()).bytes
        sent = self._handles.before(conversation_id, self.user, name, self._store) if key is not None else None
        if sent is None:
            sent = self._handles.add(self._machine.send(conversation_id, name, to, int(msg_type), body))
            self._poke()
        await self._handles.durable(name)
        return sent

    def messages(self) -> AsyncIterator[Message]:
        """Each message of every conversation once, in order per conversation, own ones included.

        What was taken is remembered, so the next start goes on behind it; after a crash the last few may be shown again.
        One reader at a time: a second one goes on where the first stands, and ends it. The iteration ends when the client
        is closed or logged out, and raises Stopped when a final code ended it.
        """
        if self._stream is not None:
            self._stream.end()
            self._rows_came.set()
        self._stream = MessageStream(self._delivered, self._next_page, self._rows_come, self._took)
        return self._stream

    async def history(self, conversation_id: str, before: int | None = None, limit: int = 50) -> list[Message]:
        """At most `limit` (1 to 500) messages with seq < before (None: the newest), by rising seq; without hidden ones.

        From the store; what it does not have yet is asked from the platform, if there is a connection.
        """
        if not 1 <= limit <= 500:
            raise ValueError(f"limit {limit}: 1 to 500")
        if before is not None and before <= 1:
            return []
        self._check_open(stopped_too=False)
        thread = self._machine.thread(conversation_id)
        known = thread is not None and thread.placed and not thread.behind
        if not known and (before is None or thread is None or before > thread.cursor + 1):
            ref = self._machine.history(conversation_id, before, limit, self._now_ms())
            if ref is not None:
                rows = await self._page(ref)
                if rows is not None:
                    return [self._message(row) for row in self._store.shown(rows)]
        self._run_round()
        await self._writer.caught_up(HISTORY_S)  # what this device knows of may be on its way to the disk still
        self._check_open(stopped_too=False)
        return [self._message(row) for row in self._store.history(conversation_id, before, limit)]

    async def logout(self) -> None:
        """Ends the session on the platform and stops. Without a connection within 5 s the session is only forgotten here;
        the platform ends it after its window. The store stays."""
        self._check_open(stopped_too=False)
        self._by_us = True
        self._machine.logout(self._now_ms())
        self._poke()
        try:
            async with asyncio.timeout(LOGOUT_S):
                while self._state.phase is not Phase.STOPPED:
                    await self._state_changed.wait()
        except TimeoutError:
            self._machine.stop(int(Code.LOGGED_OUT))
            self._run_round()
            await self._writer.drain(CLOSE_S)

    # ── rounds ───────────────────────────────────────────────────────────────────────────────────────────

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    def _poke(self) -> None:
        """A round is due as soon as the loop has handed over what it has."""
        if self._round is None and not self._closed:
            self._round = self._loop.call_soon(self._run_round)

    def _run_round(self) -> None:
        self._round = None
        effects = self._machine.take(self._now_ms())
        if effects:
            self._writer.put(effects)
        self._pace_reading()
        self._set_timer()

    def _pace_reading(self) -> None:
        self._links.pause(self._writer.backlog)

    def _set_timer(self) -> None:
        """One timer per client; one that is early only looks and is set again."""
        due_ms = self._machine.deadline_ms()
        if due_ms is None or (self._timer is not None and self._timer_ms <= due_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = due_ms
        self._timer = self._loop.call_at((due_ms + 1) / 1000, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._machine.tick(self._now_ms())
        self._run_round()

    def _release(self, effects: Effects) -> None:
        """The round's writes are durable: everything else may be seen now."""
        self._handles.written(effects.writes.queued)
        links = self._links
        self._ways.learn(effects.polls)
        if effects.go_over:
            links.go_over()
        if effects.frames:
            links.send(effects.link_no, effects.frames)
        if effects.close:
            links.close()
        for link_no in effects.give_up:
            links.give_up(link_no)
        for link_no, address in effects.connects:
            links.connect(link_no, address)
        if effects.second_close:
            links.close_second()
        if effects.second is not None:
            links.connect_second(*effects.second)
        if effects.second_frames:
            links.send_second(effects.second_frames)
        if effects.want_token:
            self._spawn(self._give_token(effects.fresh_token))
        if effects.want_list:
            self._spawn(self._give_list())
        for notice in effects.notices:
            self._tell(notice)
        if effects.writes.rows:
            self._rows_came.set()
        self._pace_reading()

    def _tell(self, notice: Notice) -> None:
        match notice:
            case StateChanged():
                self._state = notice.state
                self._warn(notice.state)
                self._state_changed.set()
                self._state_changed = asyncio.Event()
                if notice.state.phase is Phase.STOPPED:
                    self._wake_all(Stopped(None) if self._by_us else self._stopped())
            case HistoryPage():
                page = self._pages.pop(notice.ref, None)
                if page is not None and not page.done():
                    page.set_result(notice.rows)
            case Accepted() | Settled() | RefusedMessage():
                self._handles.tell(notice)
            case _:
                self._tell_change(notice)

    def _warn(self, state: State) -> None:
        """What a person has to mend is logged, once until it is mended."""
        if state.phase is Phase.ONLINE:
            self._warned.clear()
        elif state.phase is Phase.OFFLINE and (state.detail or action(state.code or 0) is Action.LOGIN):
            kind = state.code or state.detail
            if kind not in self._warned:
                self._warned.add(kind)
                _log.warning("%s; tried again", state)

    def _wake_all(self, error: ClientError) -> None:
        """The client stopped: nobody waits for ever. What is in the outbox stays there for the next start."""
        self._handles.fail(error)
        for page in self._pages.values():
            if not page.done():
                page.set_result(None)
        self._pages.clear()
        self._rows_came.set()
        self._end_changes(None if self._by_us or self._state.code is None else self._stopped())

    # ── tokens, the list ─────────────────────────────────────────────────────────────────────────────────

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _try_socket(self) -> bool:
        """A socket beside the polls that stand; False: not now."""
        begun = self._machine.reopen(self._now_ms())
        self._poke()
        return begun

    async def _give_token(self, fresh: bool) -> None:
        token = await self._access.token(fresh)
        self._machine.tokened(token, self._now_ms(), "" if token is not None else self._access.token_detail)
        self._poke()

    async def _give_list(self) -> None:
        addresses = await self._access.gateways()
        self._ways.learn(self._access.polls)
        access = self._access
        self._machine.listed(addresses, self._now_ms(), access.list_code, access.list_detail)
        self._poke()

    async def _who(self) -> str:
        """This client's user: known, or read from the token, or told at the first login, which is waited for. Raises
        Stopped; Refused where the platform refuses the token, so that there may never be one."""
        if self._machine.user is None:
            token = await self._access.token(fresh=False)
            named = subject(token) if token is not None else None
            if named is not None:
                self._machine.named(named)
                self._poke()
        while (user := self._machine.user) is None:
            self._check_open()
            state = self._state
            if state.phase is Phase.OFFLINE and state.code and action(state.code) is Action.LOGIN:
                raise Refused(state.code, "whose message this is, no login has told yet; a client with user=… keeps it")
            await self._state_changed.wait()
        return user

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────

    def _next_page(self, after: int) -> list[tuple[int, Message]]:
        """The stream's call: what comes behind a number. Raises StopAsyncIteration or Stopped when nothing ever will."""
        self._rows_came.clear()
        page = [] if self._closed else self._store.after(after, MessageStream.PAGE)
        if not page and self._state.phase is Phase.STOPPED:
            if self._by_us or self._state.code is None:
                raise StopAsyncIteration
            raise self._stopped()
        return [(number, self._message(row, hidden)) for number, row, hidden in page]

    async def _rows_come(self) -> None:
        await self._rows_came.wait()

    def _took(self, number: int) -> None:
        """The application has taken every message up to this number."""
        self._delivered = number
        if self._delivered_timer is None and not self._closed:
            self._delivered_timer = self._loop.call_later(DELIVERED_S, self._note_delivered)

    def _note_delivered(self) -> None:
        if self._delivered_timer is not None:
            self._delivered_timer.cancel()
            self._delivered_timer = None
        if self._delivered:
            self._writer.put(Effects(Writes(delivered=self._delivered)))

    async def _page(self, ref: int) -> tuple[Row, ...] | None:
        """The platform's answer to a history request; None: it did not come."""
        page: asyncio.Future[tuple[Row, ...] | None] = self._loop.create_future()
        self._pages[ref] = page
        self._poke()
        try:
            async with asyncio.timeout(HISTORY_S):
                return await page
        except TimeoutError:
            return None
        finally:
            self._pages.pop(ref, None)
            self._machine.forget_history(ref)

    def _check_open(self, stopped_too: bool = True) -> None:
        if not self._entered or self._closed:
            raise Stopped(None)
        if stopped_too and self._state.phase is Phase.STOPPED:
            raise self._stopped()

    def _stopped(self) -> Stopped:
        return Stopped(self._state.code, self._state.detail)
