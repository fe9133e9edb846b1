"""Prometheus metrics of a state shard."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

CONNECTIONS: Final = Gauge("plato_state_connections", "Connections and waiting sessions by phase.", ["phase"])
TIMERS: Final = Gauge("plato_state_timers", "Armed timers.", ["wheel"])
UPLINKS: Final = Counter("plato_state_uplinks_total", "Answers to UPs by code.", ["code"])
FRAMES: Final = Counter("plato_state_frames_total", "Frames from clients by type.", ["type"])
PUSHES: Final = Counter("plato_state_pushes_total", "Frames pushed for the first time.")
REPEATS: Final = Counter("plato_state_repeats_total", "Pushes sent again since no ACK came.")
DROPPED: Final = Counter("plato_state_dropped_total", "Frames and events dropped by reason.", ["reason"])
DOUBTS: Final = Counter("plato_state_doubts_total", "Sessions that began a new run.")
LOGINS: Final = Counter("plato_state_commits_total", "Ends of commits by result.", ["result"])
PUT_OFF: Final = Counter("plato_state_logins_put_off_total", "Logins and resumes that were told to come later.")
ENDED: Final = Counter("plato_state_sessions_ended_total", "Sessions that ended by reason.", ["reason"])
REDIRECTS: Final = Counter("plato_state_redirects_total", "Clients of draining gateways by what was done.", ["done"])
APPEND_SECONDS: Final = Histogram(
    "plato_state_bus_append_seconds",
    "Time of one append to the bus.",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
APPEND_RECORDS: Final = Counter("plato_state_bus_records_total", "Records that the bus took.")
APPEND_FAILURES: Final = Counter(
    "plato_state_bus_failures_total", "Appends that failed or are unknown; each is repeated."
)
QUEUE_BYTES: Final = Gauge("plato_state_bus_queue_bytes", "Uplink bytes that wait for the bus or are in flight.")
SLOTS: Final = Gauge("plato_state_slots", "Slots by what this shard does with them.", ["state"])
PROOF_LAG: Final = Gauge("plato_state_fence_lag_seconds", "Own ticks since the fences were last proven.")
LINKS: Final = Gauge("plato_state_links", "Gateway streams that are attached.")
LOOP_LAG: Final = Gauge("plato_state_loop_lag_seconds", "How late the last tick was.")
ERRORS: Final = Counter("plato_state_errors_total", "Unexpected errors while an event was handled.")
REFUSED: Final = Counter(
    "plato_state_uplinks_put_off_total", "Uplinks that were told to come later, by what for.", ["for"]
)
IN_FLIGHT: Final = Gauge(
    "plato_state_in_flight", "Uplinks that wait for the bus, or for msg behind it; Syncs and Pulls.", ["where"]
)
IN_FLIGHT_LIMIT: Final = Gauge(
    "plato_state_in_flight_limit", "How many of them may be in flight, once they are not dealt with in time.", ["where"]
)
IN_FLIGHT_AGE: Final = Gauge("plato_state_in_flight_seconds", "How long the oldest of them takes by now.", ["where"])
BREAKER_REFUSED: Final = Counter("plato_state_breaker_refused_total", "Calls that a breaker refused.", ["toward"])
BREAKER: Final = Gauge(
    "plato_state_breaker_refusal_ratio", "The share of calls that a breaker refuses now.", ["toward"]
)
