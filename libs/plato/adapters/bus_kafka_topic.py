"""The topic of the bus: made once, checked by every process that uses it, and what its settings promise (R11).

    make_sure plato db migrate, and the local supervisor: makes the topic where it is missing
    look      state and msg, at their start: refuse what does not fit, say what an acknowledged message is worth

The number of partitions never changes: a conversation's order hangs on it. `identity` is kept in the database beside it: the
positions there are offsets of this topic on this cluster, and mean nothing on another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.metadata import MetadataRequest

from plato.adapters.bus_kafka_config import KafkaConfig, TopicGone, translated
from plato.adapters.schema_pg import Durability
from plato.core.errors import Unavailable
from plato.runtime.settings import SettingsError

REPLICATION: Final = 3
MIN_IN_SYNC: Final = 2
TIMEOUT_S: Final = 10.0
RECORD_OVERHEAD_BYTES: Final = 8_192
"""What a record holds besides the client's frame, and what its batch adds."""
SEGMENT_BYTES: Final = 64 << 20
"""What msg is done with goes segment by segment; Kafka's own gigabyte would be kept per partition."""
_UNKNOWN_TOPIC: Final = 3
_LEADER_COMES: Final = 5
_EXISTS: Final = 36
_NOT_ALLOWED: Final = (29, 31, 44)


@dataclass(frozen=True, slots=True)
class Topic:
    """What was found of the topic. config: {} where the account may not read it."""

    identity: str
    partitions: int
    replication: int
    """Of the partition that has fewest."""
    brokers: int
    config: Mapping[str, str]

    @property
    def durability(self) -> Durability:
        """See judge_durability."""
        return judge_durability(self.replication, self.config)

    @property
    def warnings(self) -> list[str]:
        """What may surprise, in words."""
        found = []
        if int(self.config.get("retention.ms", -1)) >= 0 or int(self.config.get("retention.bytes", -1)) >= 0:
            found.append(
                "retention.ms or retention.bytes is set: what msg did not take by then is lost; set both to -1, msg deletes"
                " what it is done with"
            )
        return found


def judge_durability(replication: int, config: Mapping[str, str]) -> Durability:
    """What a topic with these settings promises about an append with acks=all."""
    if not config:
        return Durability("none", "Kafka: not known, this account may not read the topic's settings (DescribeConfigs)")
    in_sync = int(config.get("min.insync.replicas", "1"))
    if config.get("unclean.leader.election.enable", "false") == "true":
        return Durability(
            "none", "Kafka: unclean.leader.election.enable is on: acknowledged messages may be lost with a node"
        )
    if replication == 1:
        return Durability("process", "Kafka: single node (replication 1): promises process crashes only")
    if in_sync < MIN_IN_SYNC:
        return Durability(
            "process",
            f"Kafka: replication {replication}, but min.insync.replicas is {in_sync}: an acknowledged message may be on one"
            " node alone: promises process crashes only",
        )
    if replication < REPLICATION or replication <= in_sync:
        return Durability(
            "node",
            f"Kafka: replication {replication}, min.insync.replicas {in_sync}: survives the loss of one node, but takes"
            " nothing while one is away",
        )
    return Durability(
        "node", f"Kafka: replication {replication}, min.insync.replicas {in_sync}: survives the loss of one node"
    )


async def make_sure(config: KafkaConfig, partitions: int, frame_bytes: int) -> Topic:
    """Makes the topic where it is missing, for records of `frame_bytes`; as `look` then. Raises as `look` does."""
    async with _admin(config) as admin:
        try:
            return await _look(admin, config, partitions, frame_bytes)
        except TopicGone:
            await _make(admin, config.topic, partitions, frame_bytes)
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        while True:
            try:
                return await _look(admin, config, partitions, frame_bytes)
            except Unavailable:  # it is on its way to the brokers
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.1)


async def look(config: KafkaConfig, partitions: int, frame_bytes: int) -> Topic:
    """The topic, if this program can use it.

    frame_bytes: the largest payload of a client. Raises SettingsError in words: other number of partitions, compaction, a
    record limit that is too small; TopicGone while it is missing, Unavailable while Kafka is away.
    """
    async with _admin(config) as admin:
        return await _look(admin, config, partitions, frame_bytes)


@contextlib.asynccontextmanager
async def _admin(config: KafkaConfig) -> AsyncIterator[AIOKafkaAdminClient]:
    with translated(config.where()):
        admin = AIOKafkaAdminClient(**config.options(), request_timeout_ms=round(TIMEOUT_S * 1000))
        try:
            async with asyncio.timeout(3 * TIMEOUT_S):
                await admin.start()
                yield admin
        finally:
            with contextlib.suppress(Exception):
                await admin.close()


async def _look(admin: AIOKafkaAdminClient, config: KafkaConfig, partitions: int, frame_bytes: int) -> Topic:
    name = config.topic
    # Told not to make it: a broker that makes topics by itself would give it another number of partitions.
    answer = (await admin._send_request(MetadataRequest([name], allow_auto_topic_creation=False))).to_object()
    found = next((t for t in answer["topics"] if t["topic"] == name), None)
    if found is None or found["error_code"] == _UNKNOWN_TOPIC:
        raise TopicGone(f"{config.where()} has no topic {name} yet; `plato db migrate` makes it")
    if found["error_code"] not in (0, _LEADER_COMES):
        raise for_code(found["error_code"])(f"topic {name}")
    if len(found["partitions"]) != partitions:
        raise SettingsError(
            f"bus.partitions: {partitions} cannot be used: topic {name} has {len(found['partitions'])}, and a conversation's"
            f" order hangs on it; set bus.partitions to {len(found['partitions'])}, or bus.topic to another topic"
        )
    if leaderless := sorted(p["partition"] for p in found["partitions"] if p["leader"] < 0):
        raise Unavailable(f"topic {name}: partitions {leaderless} have no leader")
    topic = Topic(
        identity=f"kafka {answer.get('cluster_id') or '?'} {name}",
        partitions=partitions,
        replication=min(len(p["replicas"]) for p in found["partitions"]),
        brokers=len(answer["brokers"]),
        config=await _config(admin, name),
    )
    policy = topic.config.get("cleanup.policy", "delete")
    if policy != "delete":
        raise SettingsError(
            f"bus.topic: {name} cannot be used: its cleanup.policy is {policy}, which drops records that were not read; set"
            " it to delete, or name another topic"
        )
    needed = frame_bytes + RECORD_OVERHEAD_BYTES
    if (most := int(topic.config.get("max.message.bytes", needed))) < needed:
        raise SettingsError(
            f"bus.topic: {name} cannot be used: its max.message.bytes is {most}, and a message may need {needed}; raise it,"
            " or lower gateway.max_frame_bytes"
        )
    return topic


async def _config(admin: AIOKafkaAdminClient, name: str) -> dict[str, str]:
    answers: list[Any] = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)])
    for resource in answers[0].resources:
        if resource[0] in _NOT_ALLOWED:
            return {}
        if resource[0]:
            raise for_code(resource[0])(resource[1])
        return {entry[0]: entry[1] for entry in resource[4] if entry[1] is not None}
    raise KafkaError(f"no settings of topic {name}")


async def _make(admin: AIOKafkaAdminClient, name: str, partitions: int, frame_bytes: int) -> None:
    brokers = len((await admin.describe_cluster())["brokers"])
    replication = min(REPLICATION, max(1, brokers))
    topic = NewTopic(
        name,
        partitions,
        replication,
        topic_configs={
            "cleanup.policy": "delete",
            "retention.ms": "-1",
            "retention.bytes": "-1",
            "segment.bytes": str(SEGMENT_BYTES),
            "min.insync.replicas": str(MIN_IN_SYNC if replication >= REPLICATION else 1),
            "unclean.leader.election.enable": "false",
            "max.message.bytes": str(max(1_048_588, frame_bytes + RECORD_OVERHEAD_BYTES)),
            "message.timestamp.type": "LogAppendTime",  # msg deletes by age, and brokers' clocks are fewer
        },
    )
    response = await admin.create_topics([topic])
    for error in response.topic_errors:
        code, message = error[1], error[2] if len(error) > 2 else ""
        if code in _NOT_ALLOWED:
            raise SettingsError(
                f"bus.topic: {name} is not there and this account may not make it: {message or for_code(code).__name__};"
                f" make it with {partitions} partitions, see docs/kafka.md, or allow Create"
            )
        if code not in (0, _EXISTS):
            raise for_code(code)(f"topic {name} cannot be made: {message}")
