"""Settings: flag > PLATO_SECTION__KEY > plato.yaml > default. Read once, validated whole, frozen.

An unknown key, a wrong type or a value out of bounds is a SettingsError whose one line names the key, the value and
where it was said: the flag, the variable or the file. An empty variable counts as unset, as it does for a shell's
`${NAME:-default}`: an empty path would be the working folder. Units stand in the names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from plato.api import names
from plato.runtime.section import Port as Port
from plato.runtime.section import Section
from plato.runtime.settings_attachments import AttachmentSettings as AttachmentSettings
from plato.runtime.settings_msg import MsgSettings as MsgSettings

Latitude = Annotated[float, Field(ge=-90, le=90)]
Longitude = Annotated[float, Field(ge=-180, le=180)]
PREFIX = "PLATO_"
DEFAULT_FILE = "plato.yaml"


class SettingsError(Exception):
    """A setting that cannot work: one line that names the key, the value and the way out."""


class NotAlone(SettingsError):
    """What the settings name belongs to another PlatoCluster; the text says to which, and the ways out."""


def _worker_count(count: int) -> int:
    """1, 2, 4, 8 or 16."""  # on the page of settings too
    if count not in (1, 2, 4, 8, 16):
        raise ValueError("must be 1, 2, 4, 8 or 16")
    return count


class ProcessSettings(Section):
    """Who this process is. Set by the supervisor or the downward API, not by hand."""

    name: str = Field("", description="Name in the topology, e.g. plato-s0, edge-0, plato-msg-0.")
    uid: str = Field("", description="Unique per start; the topology's record must name it before it serves.")
    pod_ip: str = Field("", description="The pod's own address, by the downward API; empty outside of Kubernetes.")
    admin_tokens_dir: Path | None = Field(
        None,
        description="Each file in it is one bearer token that may read /v1/report; unset: loopback may, without one.",
    )


class TopologySettings(Section):
    """Where the topology is read: from a file, or, with config_map, from Kubernetes by a watch of that one object."""

    path: Path = Field(
        Path("topology.json"),
        description="File that holds the topology record; with config_map: keeps the newest one for the next start.",
    )
    config_map: str = Field(
        "",
        pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$",
        description="Name of the ConfigMap, e.g. plato-topology; empty: the file is read.",
    )
    namespace: str = Field(
        "",
        pattern=r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$",
        description="Namespace of the ConfigMap; empty: the pod's own.",
    )


class AuthSettings(Section):
    """Who may come in."""

    keys_dir: Path = Field(Path("keys"), description="One file per key; its name without suffix is the kid.")
    issuer: str = Field("plato", min_length=1, description="Required `iss` of a token.")
    audience: str = Field("plato", min_length=1, description="Required `aud` of a token.")
    guests: bool = Field(False, description="Lets the public client in without a token, as guest:<conn_id>.")


class GatewaySettings(Section):
    """The gateway pod: workers and link."""

    host: str = Field("127.0.0.1", description="Address that TCP, WebSocket and long polling listen on.")
    tcp_port: Port = Field(names.GATEWAY_TCP_PORT, description="TCP clients connect here.")
    ws_port: Port = Field(names.GATEWAY_WS_PORT, description="WebSocket clients connect here, path /ws.")
    poll_port: int = Field(
        names.GATEWAY_POLL_PORT,
        ge=0,
        le=65_535,
        description="Long polling, path /poll, for clients whose network kills sockets; 0: none.",
    )
    admin_host: str = Field("127.0.0.1", description="Address of /healthz, /readyz, /metrics and the load figures.")
    admin_port: Port = Field(names.GATEWAY_ADMIN_PORT, description="Health, metrics; ipconfig asks here for the load.")
    workers: Annotated[int, AfterValidator(_worker_count)] = Field(
        2, description="Worker processes; one per core, a power of two."
    )
    max_connections: int = Field(
        50_000,
        ge=1,
        le=1_000_000,
        description="Per gateway; past it a client is told to try the next: memory is bounded.",
    )
    max_bytes_per_s: int = Field(
        0,
        ge=0,
        description="What its network carries, both ways together; ipconfig sends clients where most is left. 0: not told.",
    )
    connections_per_address: int = Field(
        0, ge=0, description="Connections of one IP address; 0: no bound. Thousands of phones may share one address."
    )
    connects_per_s_per_address: int = Field(
        0, ge=0, description="New connections of one IP address per second, ten seconds' worth at once; 0: no bound."
    )
    max_frame_bytes: int = Field(
        65_536, ge=4_096, le=1_048_576, description="Largest payload of one frame; a larger one closes its connection."
    )
    send_queue_bytes: int = Field(
        1_048_576, ge=65_536, description="Per connection; past it: closed as slow, so that it takes no other's memory."
    )
    login_timeout_ms: int = Field(
        10_000,
        ge=100,
        description="A connection that sends no frame is closed: idle sockets must not fill the gateway.",
    )
    credit_bytes: int = Field(
        4_194_304, ge=65_536, description="Uplink bytes on their way per worker and shard: a slow shard stops no other."
    )
    ws_origins: tuple[str, ...] = Field(
        (), description="Origins that browsers may come from, by WebSocket or long polling; empty: any loopback."
    )
    poll_wait_ms: int = Field(
        25_000, ge=1_000, le=60_000, description="How long a poll waits at most; proxies often end requests after 30 s."
    )
    poll_silent_ms: int = Field(
        30_000, ge=1_000, le=300_000, description="A connection by long polling that sends no request is closed."
    )
    poll_max_connections: int = Field(
        5_000, ge=1, le=20_000, description="By long polling, per gateway; one process serves them all."
    )
    run_dir: Path = Field(Path("run"), description="Folder of the worker-link socket.")
    drain_pace_per_s: int = Field(
        200, ge=1, le=10_000, description="Clients sent elsewhere per second after a SIGTERM that no order came before."
    )
    drain_deadline_s: int = Field(
        300, ge=1, le=3_540, description="After a SIGTERM: what is left then is closed, so that the pod ends in time."
    )
    drain_settle_s: int = Field(
        5, ge=0, le=300, description="After a SIGTERM: wait until the lists of gateways leave this one out."
    )
    drain_on_term: bool = Field(
        False,
        description="A SIGTERM moves the clients away first; off: it closes them. On for pods; see ARCHITECTURE.md.",
    )


class StateSettings(Section):
    """A state shard and the timers that clients are told. repeat_max_ms ≥ repeat_min_ms; fence_stop_ms < fence_stale_ms."""

    host: str = Field("127.0.0.1", description="Address that gateways, msg and other shards connect to.")
    port: Port = Field(names.STATE_PORT, description="gRPC.")
    admin_host: str = Field("0.0.0.0", description="Address of /healthz, /readyz and /metrics: its place is a pod.")
    admin_port: Port = Field(names.STATE_ADMIN_PORT, description="Health and metrics.")
    login_timeout_ms: int = Field(10_000, ge=100, description="From opened to the committed Sync; then it is closed.")
    heartbeat_ms: int = Field(
        30_000,
        ge=200,
        le=240_000,
        description="Told to clients: shorter finds dead sockets sooner, longer saves batteries.",
    )
    heartbeat_floor_ms: int | None = Field(
        None, ge=100, description="The least interval that a client may learn for its network; unset: heartbeat_ms / 2."
    )
    heartbeat_ceiling_ms: int | None = Field(
        None,
        le=1_920_000,
        description="The longest one; unset: heartbeat_ms × 8. With both at heartbeat_ms nothing is learnt.",
    )
    connect_delay_ms: int = Field(
        250, ge=10, le=10_000, description="Told to clients: when the next gateway is tried beside one that is silent."
    )
    connect_timeout_ms: int = Field(
        5_000, ge=100, le=60_000, description="Told to clients: an attempt to connect is given up after this."
    )
    logins_per_s: int = Field(
        500,
        ge=1,
        le=100_000,
        description="Logins and resumes let in by this shard; who comes when there is no room is told its turn.",
    )
    resume_window_ms: int = Field(
        300_000, ge=1_000, description="How long a session waits for its client to come back; then it must log in."
    )
    reconnect_delay_ms: int = Field(
        1_000, ge=0, le=60_000, description="Upper bound of a client's random delay: a crowd comes back spread out."
    )
    repeat_min_ms: int = Field(2_000, ge=50, description="First repeat of what is unanswered; told to clients.")
    repeat_max_ms: int = Field(30_000, ge=50, description="Longest repeat; told to clients.")
    pending_ms: int = Field(1_000, ge=50, le=1_000, description="An unsettled frame is answered `pending` after this.")
    fence_stale_ms: int = Field(10_000, ge=1_000, description="A foreign fence unproven this long may be taken (R5).")
    fence_stop_ms: int = Field(3_000, ge=500, description="Own fences unproven this long: stop answering (R5).")
    max_devices_per_user: int = Field(
        64,
        ge=1,
        le=10_000,
        description="Devices of one user with a session, connected or to be resumed; one more is refused at login.",
    )
    max_uplinks_per_connection: int = Field(
        64, ge=1, description="Uplinks of one connection on their way; past it: busy."
    )
    connection_uplinks_per_s: int = Field(
        500,
        ge=1,
        le=100_000,
        description="Uplinks of one connection, and four times as many at once; past it: too fast.",
    )
    user_uplinks_per_s: int = Field(
        1_000,
        ge=1,
        le=100_000,
        description="The same for all connections that one user has with this shard.",
    )
    bus_calm_ms: int = Field(
        400,
        ge=50,
        le=10_000,
        description="Uplinks that wait longer for the bus mean overload: new ones are told to wait; docs/overload.md.",
    )
    receipt_calm_ms: int = Field(
        5_000,
        ge=500,
        le=60_000,
        description="The same for uplinks that the bus has and that msg did not deal with yet.",
    )
    bus_queue_bytes: int = Field(
        33_554_432, ge=1_048_576, description="Uplink bytes that wait for the bus; past it: busy."
    )

    @property
    def heartbeat_bounds_ms(self) -> tuple[int, int]:
        """The least and the longest interval that a client may keep."""
        floor, ceiling = self.heartbeat_floor_ms, self.heartbeat_ceiling_ms
        return floor or self.heartbeat_ms // 2, ceiling or self.heartbeat_ms * 8

    @model_validator(mode="after")
    def _fits(self) -> Self:
        floor_ms, ceiling_ms = self.heartbeat_bounds_ms
        if not floor_ms <= self.heartbeat_ms <= ceiling_ms:
            raise ValueError(
                f"heartbeat_ms ({self.heartbeat_ms}) must lie between heartbeat_floor_ms ({floor_ms}) and "
                f"heartbeat_ceiling_ms ({ceiling_ms})"
            )
        if self.repeat_max_ms < self.repeat_min_ms:
            raise ValueError(
                f"repeat_max_ms ({self.repeat_max_ms}) must not be below repeat_min_ms ({self.repeat_min_ms})"
            )
        if self.fence_stop_ms >= self.fence_stale_ms:
            # Else another shard could serve a slot while this one still answers for it.
            raise ValueError(
                f"fence_stop_ms ({self.fence_stop_ms}) must be below fence_stale_ms ({self.fence_stale_ms}): "
                "an owner stops before another takes over"
            )
        return self


class IpconfigSettings(Section):
    """The list of gateways. silent_ms ≥ poll_ms."""

    host: str = Field("127.0.0.1", description="Address that clients ask for gateways.")
    port: Port = Field(names.IPCONFIG_PORT, description="GET /ip/list.")
    internal_host: str = Field("127.0.0.1", description="Address of the internal port; keep it from clients.")
    internal_port: Port = Field(names.IPCONFIG_INTERNAL_PORT, description="Health, metrics and /explain.")
    poll_ms: int = Field(1_000, ge=50, description="How often each gateway is asked for its load.")
    silent_ms: int = Field(
        3_000, ge=100, description="A gateway silent this long is not listed while others have room."
    )
    geoip_path: Path | None = Field(
        None, description="Your .mmdb file with locations; a newer one is taken by itself. Unset: zones tell distances."
    )
    regions: dict[str, str] = Field(
        {}, description='Region of a zone: {"eu-1a": "eu-1", "eu-1b": "eu-1"}; its zones are near each other.'
    )
    places: dict[str, tuple[Latitude, Longitude]] = Field(
        {},
        description='A zone on the map, for gateways whose addresses the file does not know: {"eu-1a": [50.1, 8.7]}.',
    )
    user_per_min: int = Field(60, ge=1, le=60_000, description="Lists that one user may ask for in the long run.")
    user_burst: int = Field(30, ge=1, description="And at once, after a rest.")
    address_per_s: int = Field(
        200, ge=1, description="Requests without a valid token of one address (of one /64): a NAT holds thousands."
    )
    address_burst: int = Field(2_000, ge=1, description="And at once, after a rest.")
    trusted_proxies: tuple[str, ...] = Field(
        (), description="Networks whose X-Forwarded-For counts, as 10.0.0.0/8; empty: nobody's."
    )
    override_path: Path = Field(
        Path("override.json"), description="File that keeps the manual override over a restart; see docs/dispatch.md."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.silent_ms < self.poll_ms:
            raise ValueError(
                f"silent_ms ({self.silent_ms}) must not be below poll_ms ({self.poll_ms}): every gateway would be silent"
            )
        for text in self.trusted_proxies:
            try:
                ip_network(text.strip())
            except ValueError as e:
                raise ValueError(
                    f"trusted_proxies: {e}; write networks as 10.0.0.0/8, with no bits behind the /"
                ) from e
        return self


class DatabaseSettings(Section):
    """PostgreSQL: messages, and the bus of small clusters."""

    uri: str = Field("postgresql://plato@127.0.0.1:8908/plato", description="PostgreSQL ≥ 15.")
    schema_name: str = Field(
        "plato", pattern=r"^[a-z_][a-z0-9_]{0,40}$", description="PostgreSQL schema; lets clusters share a database."
    )


class StoreSettings(Section):
    """Valkey or Redis: sessions, routes, fences, reservations."""

    url: str = Field("redis://127.0.0.1:8928/0", description="Valkey ≥ 8 or Redis ≥ 7.")
    key_prefix: str = Field(
        "", pattern=r"^[A-Za-z0-9:_.-]{0,40}$", description="Before every key; lets clusters share a store."
    )


class BusSettings(Section):
    """The durable log between state and msg."""

    type: Literal["postgres", "kafka"] = Field("postgres", description="Which log: postgres or kafka.")
    partitions: int = Field(
        64, ge=1, le=1024, description="Fixed when the database is made; a mismatch refuses to start."
    )
    servers: str = Field("", description="Kafka's bootstrap servers, host:port with commas between.")
    topic: str = Field(
        "plato-uplinks",
        pattern=r"^[A-Za-z0-9._-]{1,249}$",
        description="Topic of the uplinks; made with that many partitions if it is missing.",
    )
    properties_file: Path | None = Field(
        None, description="File of Kafka client properties, bootstrap.servers and so on; the keys here win over it."
    )
    security_protocol: Literal["", "PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "", description="PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL; empty: as the properties say, else PLAINTEXT."
    )
    sasl_mechanism: Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "", description="PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512; empty: as the properties say, else PLAIN."
    )
    username: str = Field("", description="Who we are to Kafka, with SASL.")
    password_file: Path | None = Field(None, description="File that holds the password, read at each new connection.")
    ca_file: Path | None = Field(None, description="PEM of who signed the brokers; unset: the system's authorities.")
    cert_file: Path | None = Field(None, description="PEM of our own certificate, where the brokers ask for one.")
    key_file: Path | None = Field(None, description="PEM of its key; unset: it lies in cert_file too.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        named = bool(self.servers or self.properties_file)
        if self.type == "kafka" and not named:
            raise ValueError("type kafka needs bus.servers (host:port, …) or bus.properties_file")
        if self.type == "postgres" and named:
            raise ValueError(
                "bus.servers and bus.properties_file name a Kafka, but bus.type is postgres; set it to kafka"
            )
        return self


class TlsSettings(Section):
    """Certificates: tls.crt, tls.key and ca.crt in each folder; read again when they change."""

    internal_dir: Path | None = Field(
        None, description="Of gRPC between the parts (both sides show it) and the admin ports; unset: plain text."
    )
    client_dir: Path | None = Field(
        None, description="Of the gateways' ports for clients, and of msg.api_port; unset: plain text."
    )


class OperatorSettings(Section):
    """The operator."""

    namespaces: str = Field(
        "",
        description="Namespaces whose resources it serves, with commas between; * is all; unset: lease_namespace alone.",
    )
    lease_namespace: str = Field(
        "", description="Where its Lease `plato-operator` lies: its own namespace, by the downward API."
    )
    nodes: Literal["auto", "true", "false"] = Field(
        "auto", description="Whether it reads nodes: cordons, lost nodes, external addresses. auto: if it may."
    )
    node_cidrs: str = Field(
        "",
        description="Where nodes' addresses lie, for NetworkPolicies: traffic of host-network gateways; commas between.",
    )
    admin_host: str = Field("0.0.0.0", description="Address of /healthz, /readyz and /metrics: its place is a pod.")
    port: Port = Field(names.OPERATOR_PORT, description="/healthz, /readyz, /metrics.")


class LogSettings(Section):
    """Logs."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is written.")


class LocalSettings(Section):
    """The embedded cluster."""

    data_dir: Path | None = Field(
        None, description="Default: /var/lib/plato as root, else .plato in this folder. New, empty, or Plato's already."
    )
    port_offset: int = Field(0, ge=0, le=50_000, description="Added to every port of the embedded cluster.")
    shards: int = Field(2, ge=1, le=16, description="State shards; two, so that one may die while the other serves.")
    gateways: int = Field(2, ge=1, le=16, description="Gateways; clients of a dead one come back through another.")
    msgs: int = Field(2, ge=1, le=16, description="Msg processes; each takes over the partitions of a dead one.")
    postgres_port: Port = Field(names.POSTGRES_PORT, description="The embedded PostgreSQL, on loopback.")
    valkey_port: Port = Field(names.VALKEY_PORT, description="The embedded Valkey, on loopback.")
    web_port: int = Field(
        names.LOCAL_WEB_PORT,
        ge=0,
        le=65_535,
        description="The chat page, on loopback, with a sign-in that asks for no password; 0: none.",
    )


class Settings(Section):
    """Everything one `plato.yaml` can say."""

    process: ProcessSettings = ProcessSettings()
    topology: TopologySettings = TopologySettings()
    auth: AuthSettings = AuthSettings()
    gateway: GatewaySettings = GatewaySettings()
    state: StateSettings = StateSettings()
    msg: MsgSettings = MsgSettings()
    attachments: AttachmentSettings = AttachmentSettings()
    ipconfig: IpconfigSettings = IpconfigSettings()
    database: DatabaseSettings = DatabaseSettings()
    store: StoreSettings = StoreSettings()
    bus: BusSettings = BusSettings()
    tls: TlsSettings = TlsSettings()
    operator: OperatorSettings = OperatorSettings()
    log: LogSettings = LogSettings()
    local: LocalSettings = LocalSettings()


def load(
    path: Path | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    flag_names: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Reads and validates the settings.

    path: the YAML file; None means $PLATO_SETTINGS, else ./plato.yaml if it exists.
    flags: {"section.key": value}, strongest. flag_names: {"section.key": "--flag"}, as the user wrote it, for the words
    of an error. environ: os.environ by default.
    Raises SettingsError.
    """
    env = os.environ if environ is None else environ
    if path is None and env.get("PLATO_SETTINGS"):
        path = Path(env["PLATO_SETTINGS"])
    if path is None:
        path = Path(DEFAULT_FILE)
        source = _read_yaml(path) if path.exists() else {}
    else:
        source = _read_yaml(path)
    merged: dict[str, dict[str, Any]] = {}
    said_in: dict[tuple[str, str], str] = {}
    """Where a value comes from, if not from the file."""
    for section, values in source.items():
        if values is None:
            continue
        if not isinstance(values, dict):
            raise SettingsError(f"{section}: {values!r} in {path} is no section; write its keys indented below it")
        merged[str(section)] = dict(values)
    for name, value in env.items():
        section, parted, key = name.removeprefix(PREFIX).lower().partition("__")
        if name.startswith(PREFIX) and parted and value:
            merged.setdefault(section, {})[key] = _from_text(value)
            said_in[section, key] = name
    for name, value in (flags or {}).items():
        section, parted, key = name.partition(".")
        if not parted:
            raise SettingsError(f"{name}: names no key; write section.key, as in gateway.tcp_port")
        merged.setdefault(section, {})[key] = value
        said_in[section, key] = (flag_names or {}).get(name, name)
    try:
        return Settings.model_validate(merged)
    except ValidationError as e:
        raise SettingsError(_one_line(e, path, said_in)) from e


def dump(settings: Settings) -> str:
    """The settings as YAML that `load` reads back."""
    return yaml.safe_dump(json.loads(settings.model_dump_json()), sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """YAML as usual, but a key that is written twice is an error: yaml itself takes the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    mark = key_node.start_mark
                    raise SettingsError(
                        f"settings file {mark.name}: {key_node.value} is written twice, again in line {mark.line + 1}; "
                        "leave one of the two"
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            raw = yaml.load(file, _Loader)
    except OSError as e:
        raise SettingsError(f"settings file {path}: {e.strerror}; name a readable file or leave it out") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        first = " ".join(str(e).split())
        raise SettingsError(f"settings file {path} is no YAML: {first}") from e
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise SettingsError(f"settings file {path}: must hold sections (gateway:, state:, …), not {type(raw).__name__}")
    return raw


def _from_text(value: str) -> Any:
    """Environment values are text; lists and objects may be given as JSON."""
    if value[:1] in "[{":
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _one_line(error: ValidationError, path: Path, said_in: Mapping[tuple[str, str], str]) -> str:
    first = error.errors()[0]
    where = [str(p) for p in first["loc"]]
    key = ".".join(where)
    value = first.get("input")
    source = said_in.get((where[0], where[1])) if len(where) > 1 else None
    if source is None and len(where) == 1:  # a section that is not known, which variables alone may have named
        source = next((said for (section, _), said in said_in.items() if section == where[0]), None)
    place = source or str(path)
    if first["type"] == "extra_forbidden":
        known = _known(where[:-1])
        kind = "key" if len(where) > 1 else "section"
        return f"{key}: unknown {kind} in {place}; known here: {', '.join(known)}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    reason = first["msg"]
    reason = reason.removeprefix("Value error, ")
    reason = reason[0].lower() + reason[1:]
    if len(where) == 1 and isinstance(value, (dict, BaseModel)):
        return f"{key}: {reason}; correct it in {place}{more}"
    shown = str(value) if isinstance(value, Path) else repr(value)
    return f"{key}: {shown} cannot be used: {reason}; correct it in {place}{more}"


def _known(where: list[str]) -> list[str]:
    model: Any = Settings
    for part in where:
        model = model.model_fields[part].annotation
    return list(model.model_fields)
