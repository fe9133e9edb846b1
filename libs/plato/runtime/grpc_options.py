"""Options of every gRPC channel and server of ours: a peer whose machine vanished is noticed, one whose name leads to
another address is found there.

Both sides ask whether the other lives, within 9 s, also while no call is under way; servers bear being asked that often,
where gRPC's default takes it for abuse. A replaced pod keeps its name: it is resolved anew at each attempt to connect,
where gRPC's default is to believe the last answer for 30 s.
"""

from __future__ import annotations

from typing import Final

KEEPALIVE_TIME_MS: Final = 5_000
KEEPALIVE_TIMEOUT_MS: Final = 4_000

_KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # The one that ends a connection, after a minute by default: the one above starts no timer (grpc/grpc#39239).
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # no bound
)

CHANNEL: Final = (
    *_KEEPALIVE,
    ("grpc.dns_min_time_between_resolutions_ms", 200),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 150),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # in spite of its name: how long one attempt to connect may take
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel waits out the back-off of the one before
    ("grpc.enable_http_proxy", 0),
)

SERVER: Final = (
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.so_reuseport", 0),  # a second process on the port must fail, not share it
)
