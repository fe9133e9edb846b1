"""What msg measures; Prometheus, one registry per process."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

RECORDS: Final = Counter("plato_msg_records_total", "Records decided, by code; repetitions as duplicate.", ["code"])
POISON: Final = Counter("plato_msg_poison_records_total", "Records skipped because no outcome could be kept for them.")
BATCHES: Final = Counter("plato_msg_batches_total", "Batch transactions, by end.", ["end"])
BATCH_SECONDS: Final = Histogram(
    "plato_msg_batch_seconds",
    "From the guard to the commit of one batch.",
    buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
LAG: Final = Gauge("plato_msg_lag_records", "Records of an owned partition that are not taken yet.", ["partition"])
PARTITIONS: Final = Gauge("plato_msg_partitions_owned", "Partitions that this process owns.")
STOPPED: Final = Gauge(
    "plato_msg_partitions_stopped", "Owned partitions whose next position the bus does not hold; they wait."
)
TAKEOVERS: Final = Counter("plato_msg_takeovers_total", "Partitions taken over.")
STEPPED_DOWN: Final = Counter("plato_msg_stepped_down_total", "Partitions lost to another owner.")
FANOUT: Final = Counter("plato_msg_fanout_entries_total", "Frames for connections, by what became of them.", ["end"])
FANOUT_BATCHES: Final = Gauge(
    "plato_msg_fanout_batches", "Batches that are committed and not yet taken by their shards."
)
NOTICES: Final = Counter("plato_msg_notices_total", "Notices to the members of large groups: one per window.")
NOTICE_BATCHES: Final = Counter("plato_msg_notice_batches_total", "Batches with messages that those notices stood for.")
NOTICE_DEVICES: Final = Counter("plato_msg_notice_devices_total", "Devices that they went out to.")
DIRTY: Final = Gauge("plato_msg_dirty_shards", "Shards that may have missed frames and are not done with a new run.")
ID_LAG_MS: Final = Gauge(
    "plato_msg_id_lag_ms", "How far the clock lies behind its greatest reading; above 5 it stepped back."
)
DURABILITY: Final = Gauge(
    "plato_msg_durability", "1 at what bus and database promise: none, process, node (R11).", ["level"]
)
READS: Final = Counter("plato_msg_reads_total", "Sync and Pull answered, by code.", ["kind", "code"])
READS_IN_FLIGHT: Final = Gauge("plato_msg_reads_in_flight", "Syncs and Pulls that are being answered.")
READS_LIMIT: Final = Gauge(
    "plato_msg_reads_in_flight_limit", "How many of them may be in flight, once they are not answered in time."
)
READS_AGE: Final = Gauge("plato_msg_reads_in_flight_seconds", "How long the oldest of them takes by now.")
BREAKER: Final = Gauge(
    "plato_msg_breaker_refusal_ratio", "The share of reads that the breaker toward the database refuses now."
)
BREAKER_REFUSED: Final = Counter(
    "plato_msg_breaker_refused_total", "Reads that the breaker toward the database refused."
)
HOT: Final = Gauge("plato_msg_hot_conversations", "Conversations that are pulled so often that their reads are merged.")
HOT_READS: Final = Counter(
    "plato_msg_hot_reads_total",
    "Pulls of hot conversations: asked, merged with a question that waited, rows from memory.",
    ["how"],
)
SEQ_JUMPS: Final = Counter(
    "plato_msg_seq_jumps_total", "Counters of the store that were lost and begun again, higher up."
)
SEQS_AHEAD: Final = Counter(
    "plato_msg_seq_segments_ahead_total", "Segments of seqs that were fetched before their need."
)
SEQS_FALLEN_BACK: Final = Gauge(
    "plato_msg_seqs_fallen_back", "1 while segments give the seqs because the store's counters are away."
)
STATE_CHANGES: Final = Counter(
    "plato_msg_state_changes_total", "Read positions, pins, mutes and deletions asked for, by code.", ["kind", "code"]
)
STATE_BATCH: Final = Counter("plato_msg_state_batches_total", "Transactions that they were merged into.")
HOOKS: Final = Counter(
    "plato_msg_hooks_total", "Requests to the application: answered, failed, or spared by the breaker.", ["hook", "how"]
)
STATES: Final = Counter("plato_msg_states_told_total", "STATE frames handed on, one per device.")
HINTS: Final = Counter("plato_msg_hints_total", "READ and TYPING frames: sent, or dropped with a shard away.", ["how"])
REMOVED: Final = Counter(
    "plato_msg_messages_removed_total", "Messages that were older than msg.message_retention_days."
)
