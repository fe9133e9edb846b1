"""A worker: one process, one thread, one epoll. It holds sockets and knows frames and connection ids, nothing else.

    round:  wait ≤ 200 ms → sockets' input to columns, the lane's frames to sockets
            → tick: login time-outs, closes → columns to the lane → fds that ended are closed

Ticks are the time that rounds took, each counted with at most MAX_STEP_MS, after the round has drained its input: a
process that was stopped and wakes has not aged (R10). When the link dies, the worker keeps every socket, stops reading
them, and connects again; R6's announcement tells the next link what lives.
"""

from __future__ import annotations

import os
import resource
import secrets
import select
import signal
import time
from typing import Final

from plato.core.codes import Code
from plato.runtime import logs
from plato.runtime.client_tls import load
from plato.runtime.process import collect_rarely
from plato.runtime.settings import Settings

from .core import lanes
from .core.addresses import Addresses, part_of
from .core.drain import Mode
from .downlink import Downlink
from .lane import RETRY_MS, Lane
from .listeners import Listeners
from .sockets import CLOSING, GREETING, IN, LANE, LISTENER, OUT, SHAKING, TCP, UPGRADING, WAITS, WS, Sockets
from .uplink import Uplink

WAIT_MS: Final = 200
MAX_EVENTS: Final = 4_096
MAX_STEP_MS: Final = 250
STATS_MS: Final = 1_000
STOP_MS: Final = 1_000
"""How long a stopping worker waits for its peers to take their last frame."""

_DEAD: Final = select.EPOLLHUP | select.EPOLLERR


class Worker:
    """The loop. `listen` opens its ports, `turn` runs one round, `stop` begins its end."""

    def __init__(self, settings: Settings, index: int) -> None:
        gateway = settings.gateway
        self.index = index
        self.boot = secrets.randbits(63) | 1
        self.stats = lanes.Stats()
        self._lane = Lane(gateway.run_dir)
        self._sockets = Sockets()
        if gateway.connections_per_address or gateway.connects_per_s_per_address:
            # The kernel spreads an address's connections over the workers, each of which has its part of the bounds.
            most = part_of(gateway.connections_per_address, gateway.workers)
            self._sockets.addresses = Addresses(most, gateway.connects_per_s_per_address / gateway.workers)
        self._downlink = Downlink(self._sockets, self.stats, gateway.send_queue_bytes)
        self._uplink = Uplink(self._sockets, self._downlink, self.stats, gateway.max_frame_bytes, self._lane.send)
        self._downlink.sink = self._uplink
        self._listeners = Listeners(
            self._sockets,
            self._uplink,
            self._downlink,
            self.stats,
            max_connections=max(1, gateway.max_connections // gateway.workers),
            login_timeout_ms=gateway.login_timeout_ms,
            ws_origins=gateway.ws_origins,
            certificates=load(settings.tls.client_dir) if settings.tls.client_dir is not None else None,
        )
        self._address = gateway.host, gateway.tcp_port, gateway.ws_port
        self._poll_dir = gateway.run_dir if gateway.poll_port else None
        self._log = logs.get("worker")
        self._lane_fd = -1
        self._age_ms = 0.0
        self._last_ms = _now_ms()
        self._next_stats_ms = 0.0
        self._next_connect_ms = 0.0
        self._worst_lag_ms = 0.0
        self._stopping = False
        self._cut = 0
        """Connections that a drain's deadline closed here."""

    def listen(self) -> None:
        """Opens the listening sockets. Raises StartError."""
        self._listeners.listen(*self._address)
        if self._poll_dir is not None:
            self._listeners.listen_polls(self._poll_dir, self.index)

    def run(self) -> int:
        """Rounds until SIGTERM or SIGINT; then tells every peer that the gateway is closing. Returns the exit code."""
        asked: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda n, _: asked.append(n))
        while not asked:
            self.turn()
        self.stop()
        end_ms = _now_ms() + STOP_MS
        while self._sockets.open and _now_ms() < end_ms:
            self.turn(wait_ms=20)
        return 0

    def stop(self) -> None:
        """Stops listening and closes every connection with GATEWAY_CLOSING."""
        self._stopping = True
        self._listeners.stop()
        for fd in list(self._sockets.fd_of.values()):
            self._downlink.close(fd, Code.GATEWAY_CLOSING)

    def turn(self, wait_ms: int = WAIT_MS) -> None:
        """One round."""
        sockets, uplink, downlink = self._sockets, self._uplink, self._downlink
        if self._lane_fd < 0:
            self._connect()
            wait_ms = min(wait_ms, RETRY_MS)
        events = sockets.epoll.poll(0 if sockets.again else wait_ms / 1000, MAX_EVENTS)
        began_ms = _now_ms()
        kind, read_tcp = sockets.kind, uplink.read_tcp
        if sockets.again:
            self._read_again()
        for fd, event in events:
            what = kind[fd]
            if what == TCP:
                if event == IN:
                    read_tcp(fd)
                    continue
                if event & IN:
                    read_tcp(fd)
                elif event & _DEAD:
                    uplink.hung_up(fd)
                if event & OUT and sockets.flags[fd] & WAITS:
                    downlink.flush(fd)
            elif what == LANE:
                self._on_lane(event)
            elif what == LISTENER:
                self._listeners.accept(fd)
            elif what:
                self._on_other(fd, what, event)
        self._tick(began_ms, drained=len(events) < MAX_EVENTS)
        uplink.flush()
        self._flush_lane()
        sockets.close_ended()

    def _read_again(self) -> None:
        """Reads what TLS connections hold already, of which no event tells."""
        sockets = self._sockets
        waiting, sockets.again = sockets.again, []
        for fd, serial in waiting:
            if sockets.serial[fd] == serial and sockets.kind[fd] in (TCP, WS, UPGRADING):
                if sockets.kind[fd] == TCP:
                    self._uplink.read_tcp(fd)
                else:
                    self._on_other(fd, sockets.kind[fd], IN)

    def _on_other(self, fd: int, what: int, event: int) -> None:
        if what == SHAKING:
            if event & IN:
                self._listeners.read_handshake(fd)
            elif event & _DEAD:
                self._listeners.hung_up(fd)
        elif event & IN:
            if what == WS:
                self._uplink.read_ws(fd)
            elif what == UPGRADING:
                self._listeners.read_upgrade(fd)
            elif what == GREETING:
                self._listeners.read_greeting(fd)
            elif what == CLOSING:
                self._uplink.discard(fd)
        elif event & _DEAD:
            self._uplink.hung_up(fd)
        if event & OUT and self._sockets.flags[fd] & WAITS:
            self._downlink.flush(fd)

    def _tick(self, began_ms: float, *, drained: bool) -> None:
        now_ms = _now_ms()
        took_ms = now_ms - began_ms
        self._worst_lag_ms = max(self._worst_lag_ms, took_ms)
        listeners, downlink = self._listeners, self._downlink
        listeners.lag_ms += (min(took_ms, 5_000.0) - listeners.lag_ms) / 16
        if drained:
            self._age_ms += min(now_ms - self._last_ms, MAX_STEP_MS)
            self._last_ms = now_ms
            listeners.age_ms = downlink.age_ms = int(self._age_ms)
            listeners.expire()
            downlink.expire()
        if now_ms >= self._next_stats_ms:
            self._next_stats_ms = now_ms + STATS_MS
            self._send_stats()
            if said := listeners.renew():
                self._log.warning(said)

    # ── the lane ─────────────────────────────────────────────────────────────────────────────────────────────

    def _connect(self) -> None:
        now_ms = _now_ms()
        if now_ms < self._next_connect_ms:
            return
        self._next_connect_ms = now_ms + RETRY_MS
        if not self._lane.connect():
            return
        self._lane_fd = self._lane.fd
        self._sockets.add(self._lane_fd, LANE)
        hello = lanes.Hello(self.index, self.boot, os.getpid(), len(self._sockets.fd_of), self._uplink.attach)
        self._lane.send(lanes.pack_hello(hello))
        self._send_stats()
        self._flush_lane()

    def _on_lane(self, event: int) -> None:
        if event & (IN | _DEAD):
            try:
                messages = self._lane.read()
            except lanes.LaneError as e:
                self.stats.lane_errors += 1
                self._log.error("the link sent what is no lane message", error=str(e))
                messages = None
            if messages is None:
                self._lane_broke()
                return
            for message in messages:
                self._take(message)
        # The round's end flushes the lane, whatever woke it.

    def _take(self, message: lanes.Message) -> None:
        uplink = self._uplink
        match message:
            case lanes.Frames():
                self._downlink.deliver(message)
            case lanes.Credit():
                uplink.credit(message.group, message.credit_bytes)
            case lanes.Announce():
                uplink.announce(message.group, message.attach, message.credit_bytes)
            case lanes.Hold():
                uplink.hold(message.slots)
            case lanes.Suspend():
                uplink.suspend(message.group)
            case lanes.Slots():
                uplink.set_slots(message.groups)
            case lanes.Config():
                self._listeners.minter.assign(message.worker_id, message.slots)
                self._listeners.minter.grant(message.from_ms, message.until_ms)
            case lanes.Drain():
                self._drain(message.mode)
            case _:
                self.stats.lane_errors += 1

    def _drain(self, mode: int) -> None:
        """Newcomers are let in or sent to the next gateway, everybody is closed or stays; the answer says who is here."""
        if self._stopping:
            return
        self._listeners.closing = mode != Mode.SERVE
        if mode == Mode.SERVE:
            self._cut = 0
        elif mode == Mode.CUT:
            here = list(self._sockets.fd_of.values())
            for fd in here:
                self._downlink.close(fd, Code.GATEWAY_CLOSING)
            self._cut += len(here)
        self._lane.send(lanes.pack_held(mode, self._cut, self._sockets.fd_of))

    def _flush_lane(self) -> None:
        if self._lane_fd < 0:
            return
        if not self._lane.flush():
            self._lane_broke()
            return
        sockets, fd = self._sockets, self._lane_fd
        if self._lane.waits != bool(sockets.flags[fd] & WAITS):
            sockets.flags[fd] ^= WAITS
            sockets.watch(fd)

    def _lane_broke(self) -> None:
        fd, self._lane_fd = self._lane_fd, -1
        self._sockets.epoll.unregister(fd)
        self._sockets.kind[fd] = 0
        self._sockets.flags[fd] = 0
        self._lane.close()
        self._uplink.detach_all()

    def _send_stats(self) -> None:
        stats = self.stats
        stats.connections = len(self._sockets.fd_of)
        stats.bytes_out = self._sockets.bytes_out
        stats.loop_lag_ms = int(self._worst_lag_ms)
        stats.clock_lag_ms = self._listeners.minter.lag_ms
        self._worst_lag_ms = 0.0
        self._lane.send(lanes.pack_stats(stats))


def run(settings: Settings, index: int) -> int:
    """A worker process's main. Returns the exit code; raises StartError when a port cannot be opened."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    worker = Worker(settings, index)
    worker.listen()
    collect_rarely()
    return worker.run()


def _now_ms() -> float:
    return time.monotonic_ns() / 1_000_000
