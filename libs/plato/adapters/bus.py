"""Which bus this process uses, by its settings: tables in the database, or Kafka; and what it is asked at a start.

    prepare   plato db migrate, and the local supervisor, once the schema is there: makes Kafka's topic
    check     every process that appends or reads, before it does: the database, the bus, and that the two belong together

Kafka's library is imported where it is used: whoever has no Kafka saves 20 MB and a third of a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from plato.adapters import schema_pg
from plato.adapters.bus_pg import PgBusProducer, PgBusReader
from plato.adapters.owner import Owner
from plato.adapters.pg import Database
from plato.adapters.schema_pg import Durability
from plato.runtime.settings import Settings

if TYPE_CHECKING:
    from plato.adapters.bus_kafka import KafkaBusProducer
    from plato.adapters.bus_kafka_reader import KafkaBusReader
    from plato.adapters.bus_kafka_topic import Topic

_LEVELS: Final = ("none", "process", "node")


@dataclass(frozen=True, slots=True)
class Found:
    """What a check found: what an acknowledged message is worth (R11), and what may surprise, in words."""

    durability: Durability
    warnings: tuple[str, ...] = ()


def producer(settings: Settings, database: Database) -> PgBusProducer | KafkaBusProducer:
    """The producing side; it connects when it is used."""
    if settings.bus.type == "kafka":
        from plato.adapters.bus_kafka import KafkaBusProducer
        from plato.adapters.bus_kafka_config import KafkaConfig

        return KafkaBusProducer(KafkaConfig(settings.bus), settings.bus.partitions)
    return PgBusProducer(database, settings.bus.partitions)


def reader(settings: Settings, database: Database) -> PgBusReader | KafkaBusReader:
    """The consuming side; it connects when it is used."""
    if settings.bus.type == "kafka":
        from plato.adapters.bus_kafka_config import KafkaConfig
        from plato.adapters.bus_kafka_reader import KafkaBusReader

        return KafkaBusReader(KafkaConfig(settings.bus))
    return PgBusReader(database)


def away(side: object) -> dict[str, str]:
    """For /readyz: {"bus": why the last try of this producer or reader got no answer}; {} when it got one, and for a bus in
    the database, of which others tell."""
    why = str(getattr(side, "away", ""))
    return {"bus": why} if why else {}


async def prepare(settings: Settings) -> str:
    """Makes Kafka's topic where it is missing; says in words what stands, "" for a bus in the database.

    Raises SettingsError for what waiting does not mend, and Unavailable.
    """
    if settings.bus.type != "kafka":
        return ""
    from plato.adapters.bus_kafka_config import KafkaConfig
    from plato.adapters.bus_kafka_topic import make_sure

    topic = await make_sure(KafkaConfig(settings.bus), settings.bus.partitions, settings.gateway.max_frame_bytes)
    return f"{KafkaConfig(settings.bus).where()}: topic {settings.bus.topic}, {topic.partitions} partitions"


async def check(settings: Settings, owner: Owner | None = None) -> Found:
    """Whether database and bus can be used, by this owner if there is one, and what they promise. Raises SettingsError
    (NotAlone: another one's) and Unavailable."""
    uri, schema, partitions = settings.database.uri, settings.database.schema_name, settings.bus.partitions
    topic: Topic | None = None
    if settings.bus.type == "kafka":
        from plato.adapters.bus_kafka_config import KafkaConfig
        from plato.adapters.bus_kafka_topic import look

        topic = await look(KafkaConfig(settings.bus), partitions, settings.gateway.max_frame_bytes)
    bus = topic.identity if topic is not None else schema_pg.POSTGRES_BUS
    await schema_pg.check(uri, schema, partitions, bus, owner)
    database = await schema_pg.durability(uri)
    if topic is None:
        return Found(database)
    return Found(both(topic.durability, database), tuple(topic.warnings))


async def durability(settings: Settings) -> Durability:
    """What `check` finds of it, of a bus and a database that were checked. Raises SettingsError and Unavailable."""
    return (await check(settings)).durability


def both(bus: Durability, database: Durability) -> Durability:
    """A message is on the bus, and later in the database alone: it is worth what the weaker of them promises."""
    level = min(bus.level, database.level, key=_LEVELS.index)
    return Durability(level, f"{bus.promise}; database: {database.promise}")
