"""PlatoCluster: the spec and the status, as in crds/platoclusters.plato.im.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plato.api.pool import PoolTemplate
from plato.api.shared import Condition, Placement, Ref, Resources


@dataclass(frozen=True, slots=True)
class UriKey:
    """A Secret key that holds a database URI."""

    name: str
    key: str = "uri"


@dataclass(frozen=True, slots=True)
class UrlKey:
    """A Secret key that holds a store URL."""

    name: str
    key: str = "url"


@dataclass(frozen=True, slots=True)
class PropertiesKey:
    """A Secret key that holds Kafka client properties."""

    name: str
    key: str = "properties"


@dataclass(frozen=True, slots=True)
class AccessKey:
    """A Secret key that holds an S3 access key."""

    name: str
    key: str = "accessKey"


@dataclass(frozen=True, slots=True)
class SecretKey:
    """A Secret key that holds an S3 secret key."""

    name: str
    key: str = "secretKey"


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A Secret key that holds what requests to hooks are signed with."""

    name: str
    key: str = "secret"


@dataclass(frozen=True, slots=True)
class Images:
    """Where images come from; overrides: {service: whole reference}."""

    registry: str = "ghcr.io/plato-im"
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[Ref, ...] = ()
    overrides: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Database:
    """The PostgreSQL of the messages."""

    uri: UriKey
    schema: str = "plato"


@dataclass(frozen=True, slots=True)
class Store:
    """The Valkey or Redis of sessions, routes and fences."""

    url: UrlKey
    key_prefix: str = ""


@dataclass(frozen=True, slots=True)
class Kafka:
    """How to reach Kafka."""

    config: PropertiesKey
    topic: str = "plato-uplinks"


@dataclass(frozen=True, slots=True)
class Bus:
    """type is Postgres or Kafka; kafka is given with Kafka and only then."""

    type: str = "Postgres"
    partitions: int = 64
    kafka: Kafka | None = None


@dataclass(frozen=True, slots=True)
class Auth:
    """Who may log in; keys is None only with guests."""

    keys: Ref | None = None
    issuer: str = "plato"
    audience: str = "plato"
    guests: bool = False


@dataclass(frozen=True, slots=True)
class Tls:
    """Secrets of type kubernetes.io/tls; None is plain text."""

    client: Ref | None = None
    internal: Ref | None = None


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state shards; on_node_loss is Wait or TakeOver."""

    shards: int = 2
    slots_per_move: int = 4
    move_interval_seconds: int = 2
    reshard_paused: bool = False
    on_node_loss: str = "Wait"
    resume_window_seconds: int = 300
    resources: Resources = field(default_factory=Resources)
    placement: Placement = field(default_factory=Placement)
    pod_overlay: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MsgSpec:
    """The message service."""

    replicas: int = 2
    resources: Resources = field(default_factory=Resources)
    placement: Placement = field(default_factory=Placement)
    pod_overlay: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IpconfigSpec:
    """The list of gateways over HTTP."""

    replicas: int = 2
    service_type: str = "ClusterIP"
    resources: Resources = field(default_factory=Resources)
    placement: Placement = field(default_factory=Placement)
    pod_overlay: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gateways:
    """The default pool; initial_replicas counts at its creation only."""

    enabled: bool = True
    initial_replicas: int = 2
    template: PoolTemplate = field(default_factory=PoolTemplate)


@dataclass(frozen=True, slots=True)
class ApiSpec:
    """The HTTP API for people; tls is Client or None."""

    enabled: bool = False
    port: int = 8903
    service_type: str = "ClusterIP"
    annotations: Mapping[str, str] = field(default_factory=dict)
    tls: str = "Client"
    max_connections: int = 2_000
    user_requests_per_second: int = 50
    server_requests_per_second: int = 2_000


@dataclass(frozen=True, slots=True)
class S3:
    """A bucket of a store that speaks S3."""

    endpoint: str
    bucket: str
    access_key: AccessKey
    secret_key: SecretKey
    prefix: str = ""
    region: str = "us-east-1"


@dataclass(frozen=True, slots=True)
class Attachments:
    """Files that people send; s3 None: off. types empty: the usual ones."""

    s3: S3 | None = None
    max_bytes: int = 26_214_400
    types: tuple[str, ...] = ()
    keep_unused_seconds: int = 86_400
    unused_max_bytes: int = 268_435_456


@dataclass(frozen=True, slots=True)
class Hooks:
    """URLs that msg posts to; before_on_failure is Accept or Refuse. secret is given where a URL is."""

    before_url: str = ""
    before_timeout_milliseconds: int = 1_000
    before_on_failure: str = "Accept"
    after_url: str = ""
    push_url: str = ""
    secret: SigningKey | None = None


@dataclass(frozen=True, slots=True)
class Messages:
    """What people may do with messages; 0 is never."""

    recall_seconds: int = 120
    edit_seconds: int = 86_400
    retention_days: int = 0
    group_members: int = 10_000
    friends_only: bool = False
    search: bool = True


@dataclass(frozen=True, slots=True)
class Events:
    """The feed of events."""

    enabled: bool = False
    retention_hours: int = 72


@dataclass(frozen=True, slots=True)
class Monitoring:
    """For the Prometheus operator."""

    pod_monitor: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlatoClusterSpec:
    """spec of a PlatoCluster."""

    version: str
    database: Database
    store: Store
    auth: Auth
    images: Images = field(default_factory=Images)
    bus: Bus = Bus()
    tls: Tls = Tls()
    state: StateSpec = field(default_factory=StateSpec)
    msg: MsgSpec = field(default_factory=MsgSpec)
    ipconfig: IpconfigSpec = field(default_factory=IpconfigSpec)
    gateways: Gateways = field(default_factory=Gateways)
    origins: tuple[str, ...] = ()
    api: ApiSpec = field(default_factory=ApiSpec)
    attachments: Attachments = Attachments()
    hooks: Hooks = Hooks()
    messages: Messages = Messages()
    events: Events = Events()
    monitoring: Monitoring = field(default_factory=Monitoring)
    network_policy: bool = False
    paused: bool = False

    @property
    def api_certificate(self) -> Ref | None:
        """What the API for people shows; None: plain text, or no such API."""
        return self.tls.client if self.api.enabled and self.api.tls == "Client" else None


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """Slots of 1024: given to a shard, reported as served, in the open move."""

    assigned: int = 0
    acquired: int = 0
    moving: int = 0


@dataclass(frozen=True, slots=True)
class WorkerIdCounts:
    """Worker ids of 1024: held by pods, resting after their pod went."""

    live: int = 0
    resting: int = 0


@dataclass(frozen=True, slots=True)
class Reshard:
    """The open move (from_ and to empty between two moves) and how many slots are not where they should be."""

    from_: str = ""
    to: str = ""
    slots_left: int = 0


@dataclass(frozen=True, slots=True)
class PlatoClusterStatus:
    """status of a PlatoCluster; shards and gateways are "ready/wanted"."""

    observed_generation: int = 0
    phase: str = "Pending"
    version: str = ""
    epoch: int = 0
    slots: SlotCounts = SlotCounts()
    worker_ids: WorkerIdCounts = WorkerIdCounts()
    shards: str = ""
    gateways: str = ""
    connections: int = 0
    reshard: Reshard | None = None
    conditions: tuple[Condition, ...] = ()
