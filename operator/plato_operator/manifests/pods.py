"""The pod templates: one main container named after its component, everything it needs given by environment and mounts.

All but gateways on the host's network meet the pod security level `restricted`. What a template holds depends on the
inputs that `core.children` hashes and on nothing else, so that equal hashes mean equal pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from plato.api.cluster import PlatoClusterSpec
from plato.api.names import (
    ANNOTATION_INPUT_HASH,
    ANNOTATION_VERSION,
    GATE_SERVING,
    IPCONFIG_INTERNAL_PORT,
    IPCONFIG_PORT,
    LABEL_CLUSTER,
    LABEL_COMPONENT,
    LABEL_POOL,
    MSG_GRPC_PORT,
    MSG_HTTP_PORT,
    STATE_ADMIN_PORT,
    STATE_PORT,
    admin_secret_name,
    topology_name,
)
from plato.api.objects import to_object
from plato.api.pool import GatewayPoolSpec
from plato.api.shared import Placement, Ref, Resources

from plato_operator.core.children import MIGRATION_WAIT_S, TLS_VOLUME, job_overlay
from plato_operator.core.members import MSG_GRACE_S
from plato_operator.core.snapshot import GATEWAY, IPCONFIG, MSG, STATE
from plato_operator.manifests import product
from plato_operator.manifests.meta import Ask
from plato_operator.manifests.overlay import overlaid

USER: Final = 65532
STATE_GRACE_S: Final = 30
IPCONFIG_GRACE_S: Final = 30
DRAIN_GRACE_S: Final = 60
"""A gateway's pod may outlive its drain's deadline by this."""
EVICT_AFTER_S: Final = 10
"""msg and ipconfig keep nothing: their pods leave a node that is away at once, others take over."""
START_PERIOD_S: Final = 2
WAIT_FOR_STORE_S: Final = 3600
"""A shard or a msg that waits for its store is not helped by a restart."""
START_S: Final = 300

_RUN, _TMP, _ADMIN, _KEYS = "/run/plato", "/tmp", "/etc/plato/admin", "/etc/plato/keys"
_TLS: Final = {"internal": "/etc/plato/tls/internal", "client": "/etc/plato/tls/client"}
_BUS: Final = "/etc/plato/bus"
"""The Secret of Kafka's client properties, whole: they may name further keys of it, such as ca.crt, as files here."""
_ANYWHERE: Final = "0.0.0.0"

_REQUESTS: Final[Mapping[str, Mapping[str, str]]] = {
    GATEWAY: {"cpu": "250m", "memory": "256Mi"},
    STATE: {"cpu": "100m", "memory": "256Mi"},
    MSG: {"cpu": "100m", "memory": "192Mi"},
    IPCONFIG: {"cpu": "50m", "memory": "96Mi"},
    "migrate": {"cpu": "50m", "memory": "96Mi"},
}
_HARDENED: Final = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


def gateway_pod(ask: Ask) -> dict[str, Any]:
    """Template of a pool's pods."""
    pool = ask.snap.pools[ask.order.owner].spec
    host = pool.network == "Host"
    env = [
        *_identity(ask), *_text(
            PLATO_GATEWAY__HOST=_ANYWHERE, PLATO_GATEWAY__ADMIN_HOST=_ANYWHERE, PLATO_GATEWAY__WORKERS=pool.workers,
            PLATO_GATEWAY__MAX_CONNECTIONS=pool.capacity.connections, PLATO_GATEWAY__TCP_PORT=pool.ports.tcp,
            PLATO_GATEWAY__WS_PORT=pool.ports.ws, PLATO_GATEWAY__POLL_PORT=pool.ports.poll,
            PLATO_GATEWAY__ADMIN_PORT=pool.ports.admin, PLATO_GATEWAY__RUN_DIR=_RUN,
            PLATO_GATEWAY__DRAIN_PACE_PER_S=pool.drain.pace_per_second,
            PLATO_GATEWAY__DRAIN_DEADLINE_S=pool.drain.deadline_seconds,
            PLATO_GATEWAY__DRAIN_SETTLE_S=pool.drain.settle_seconds, PLATO_GATEWAY__DRAIN_ON_TERM="true",
        ),
    ]  # fmt: skip
    env += product.pages(ask.spec)
    if pool.capacity.bytes_per_second:
        env += _text(PLATO_GATEWAY__MAX_BYTES_PER_S=pool.capacity.bytes_per_second)
    if ask.spec.tls.client is not None:
        env += _text(PLATO_TLS__CLIENT_DIR=_TLS["client"])
    ports = {"tcp": pool.ports.tcp, "ws": pool.ports.ws, "admin": pool.ports.admin}
    if pool.ports.poll:
        ports["poll"] = pool.ports.poll
    container = _container(ask, pool.version or ask.spec.version, env, ports, pool.resources, START_S)
    if host:
        for port in container["ports"]:  # so that the scheduler knows which nodes are taken
            port["hostPort"] = port["containerPort"]
    spec = _pod(ask, container, pool.placement, _grace_s(pool))
    spec["readinessGates"] = [{"conditionType": GATE_SERVING}]
    if host:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return _template(ask, pool.version or ask.spec.version, spec, pool.pod_overlay)


def _grace_s(pool: GatewayPoolSpec) -> int:
    return pool.drain.deadline_seconds + DRAIN_GRACE_S


def state_pod(ask: Ask) -> dict[str, Any]:
    """Template of a shard's only pod."""
    state = ask.spec.state
    env = [
        *_identity(ask), *_backing(ask), *_auth(ask.spec), *_text(
            PLATO_STATE__HOST=_ANYWHERE, PLATO_STATE__ADMIN_HOST=_ANYWHERE,
            PLATO_STATE__RESUME_WINDOW_MS=state.resume_window_seconds * 1000,
        ),
    ]  # fmt: skip
    ports = {"grpc": STATE_PORT, "admin": STATE_ADMIN_PORT}
    container = _container(ask, ask.spec.version, env, ports, state.resources, WAIT_FOR_STORE_S)
    spec = _pod(ask, container, state.placement, STATE_GRACE_S)
    return _template(ask, ask.spec.version, spec, state.pod_overlay)


def msg_pod(ask: Ask) -> dict[str, Any]:
    """Template of the message service's pods."""
    msg = ask.spec.msg
    env = [
        *_identity(ask), *_backing(ask), *_auth(ask.spec),
        *_text(PLATO_MSG__HOST=_ANYWHERE, PLATO_MSG__HTTP_HOST=_ANYWHERE),
    ]  # fmt: skip
    extras = product.of_msg(ask.spec)
    env += extras.env
    if ask.spec.api_certificate is not None:
        env += _text(PLATO_TLS__CLIENT_DIR=_TLS["client"])
    ports = {"grpc": MSG_GRPC_PORT, "admin": MSG_HTTP_PORT, **extras.ports}
    container = _container(ask, ask.spec.version, env, ports, msg.resources, WAIT_FOR_STORE_S)
    spec = _pod(ask, container, msg.placement, MSG_GRACE_S)
    return _template(ask, ask.spec.version, spec, msg.pod_overlay)


def ipconfig_pod(ask: Ask) -> dict[str, Any]:
    """Template of the pods that list gateways."""
    ipconfig = ask.spec.ipconfig
    env = [
        *_identity(ask), *_auth(ask.spec), *_text(PLATO_IPCONFIG__HOST=_ANYWHERE, PLATO_IPCONFIG__INTERNAL_HOST=_ANYWHERE),
        *product.pages(ask.spec),
    ]  # fmt: skip
    ports = {"http": IPCONFIG_PORT, "admin": IPCONFIG_INTERNAL_PORT}
    container = _container(ask, ask.spec.version, env, ports, ipconfig.resources, START_S)
    spec = _pod(ask, container, ipconfig.placement, IPCONFIG_GRACE_S)
    return _template(ask, ask.spec.version, spec, ipconfig.pod_overlay)


def migrate_pod(ask: Ask) -> dict[str, Any]:
    """Template of the Job that brings the database to this version, and marks it and the store as this cluster's. It runs
    where msg may run, and asks no API."""
    cluster = ask.snap.cluster
    adopt = _text(PLATO_ADOPT=cluster.adopts) if cluster.adopts else []
    container = {
        "name": "migrate",
        **_image(ask.spec, MSG, ask.spec.version),
        "command": ["python3", "-m", "plato.cli", "db", "migrate", "--wait-s", str(MIGRATION_WAIT_S)],
        "env": [*_backing(ask), *adopt],
        "resources": _resources("migrate", Resources()),
        "securityContext": _HARDENED,
        "terminationMessagePolicy": "FallbackToLogsOnError",  # a condition quotes the last words
        "volumeMounts": [{"name": "tmp", "mountPath": _TMP}, *_bus_mounts(ask.spec)],
    }
    spec = _pod(ask, container, ask.spec.msg.placement, STATE_GRACE_S)
    spec |= {"restartPolicy": "Never", "automountServiceAccountToken": False}
    spec["volumes"] = [{"name": "tmp", "emptyDir": {}}, *_bus_volumes(ask.spec)]
    for only_for_many in ("affinity", "topologySpreadConstraints"):
        if not getattr(ask.spec.msg.placement, _FIELDS[only_for_many]):
            spec.pop(only_for_many, None)
    return _template(ask, ask.spec.version, spec, job_overlay(ask.spec.msg.pod_overlay))


_FIELDS: Final = {"affinity": "affinity", "topologySpreadConstraints": "topology_spread_constraints"}


def _template(ask: Ask, version: str, spec: dict[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    annotations = {ANNOTATION_VERSION: version}
    if ask.order.template_hash:
        annotations[ANNOTATION_INPUT_HASH] = ask.order.template_hash
    template = {"metadata": {"labels": ask.labels(), "annotations": annotations}, "spec": spec}
    return overlaid(template, overlay)


def _pod(ask: Ask, container: dict[str, Any], placement: Placement, grace_s: int) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "containers": [container],
        "serviceAccountName": ask.cluster,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,  # Services of the namespace would add variables that begin with PLATO_
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": _volumes(ask),
    }  # fmt: skip
    if ask.spec.images.pull_secrets:
        spec["imagePullSecrets"] = [{"name": ref.name} for ref in ask.spec.images.pull_secrets]
    return spec | _placed(ask, placement)


def _placed(ask: Ask, placement: Placement) -> dict[str, Any]:
    """Where pods go. Ours is soft: a cluster of one node or zone runs all the same."""
    alike = {
        "matchLabels": {k: v for k, v in ask.selector().items() if k in (LABEL_CLUSTER, LABEL_COMPONENT, LABEL_POOL)}
    }
    apart = {"weight": 100, "podAffinityTerm": {"topologyKey": "kubernetes.io/hostname", "labelSelector": alike}}
    zones = {
        "maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": alike,
    }  # fmt: skip
    own = to_object(placement)
    found: dict[str, Any] = {
        "affinity": own["affinity"]
        or {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [apart]}},
        "topologySpreadConstraints": own["topologySpreadConstraints"] or [zones],
    }
    leaving = [t for t in _LEAVE_SOON if not any(_covers(given, t) for given in own["tolerations"])]
    tolerations = [*own["tolerations"], *(leaving if ask.order.role in (MSG, IPCONFIG) else ())]
    if tolerations:
        found["tolerations"] = tolerations
    if placement.node_selector:
        found["nodeSelector"] = own["nodeSelector"]
    if placement.priority_class_name:
        found["priorityClassName"] = placement.priority_class_name
    return found


def _covers(given: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Whether a person's toleration speaks of the same taint; then ours is left out, else the shorter time would count."""
    return given.get("key") in (None, "", ours["key"]) and given.get("effect") in (None, "", ours["effect"])


_LEAVE_SOON: Final = tuple(
    {
        "key": f"node.kubernetes.io/{why}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": EVICT_AFTER_S,
    }
    for why in ("not-ready", "unreachable")
)


def _container(
    ask: Ask, version: str, env: list[dict[str, Any]], ports: Mapping[str, int], resources: Resources, start_s: int
) -> dict[str, Any]:
    component = ask.order.role
    tls = ask.spec.tls
    mounts = [
        {"name": "run", "mountPath": _RUN}, {"name": "tmp", "mountPath": _TMP},
        {"name": "admin", "mountPath": _ADMIN, "readOnly": True},
    ]  # fmt: skip
    if component in (STATE, MSG, IPCONFIG):
        mounts.append({"name": "keys", "mountPath": _KEYS, "readOnly": True})
    if component in (STATE, MSG):
        mounts += _bus_mounts(ask.spec)
    if tls.internal is not None:
        mounts.append({"name": TLS_VOLUME, "mountPath": _TLS["internal"], "readOnly": True})
    if _shown(ask) is not None:
        mounts.append({"name": "tls-client", "mountPath": _TLS["client"], "readOnly": True})
    if component == MSG:
        mounts += product.of_msg(ask.spec).mounts()

    def probe(path: str, period_s: int, failures: int) -> dict[str, Any]:
        get = {"path": path, "port": "admin", "scheme": "HTTPS" if tls.internal is not None else "HTTP"}
        return {"httpGet": get, "periodSeconds": period_s, "timeoutSeconds": 2, "failureThreshold": failures}

    return {
        "name": component,
        **_image(ask.spec, component, version),
        "env": env,
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        "startupProbe": probe("/healthz", START_PERIOD_S, start_s // START_PERIOD_S),
        "livenessProbe": probe("/healthz", 10, 6),
        "readinessProbe": probe("/readyz", 2, 2),
        "resources": _resources(component, resources),
        "securityContext": _HARDENED,
        "terminationMessagePolicy": "FallbackToLogsOnError",  # a condition quotes the last words
        "volumeMounts": mounts,
    }


def _image(spec: PlatoClusterSpec, service: str, version: str) -> dict[str, Any]:
    images = spec.images
    reference = images.overrides.get(service) or f"{images.registry}/plato-{service}:{version}"
    return {"image": reference, "imagePullPolicy": images.pull_policy}


def _resources(component: str, given: Resources) -> dict[str, Any]:
    """The given ones; our request where neither a request nor a limit of that resource is given."""
    ours = {name: amount for name, amount in _REQUESTS[component].items() if name not in given.limits}
    found = {"requests": {**ours, **given.requests}}
    return {**found, "limits": dict(given.limits)} if given.limits else found


def _volumes(ask: Ask) -> list[dict[str, Any]]:
    component, spec = ask.order.role, ask.spec
    found: list[dict[str, Any]] = [
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
        {"name": "tmp", "emptyDir": {}},
        _secret_volume("admin", admin_secret_name(ask.cluster)),
    ]
    if component in (STATE, MSG, IPCONFIG):
        keys = spec.auth.keys
        found.append(_secret_volume("keys", keys.name) if keys is not None else {"name": "keys", "emptyDir": {}})
    if component in (STATE, MSG):
        found += _bus_volumes(spec)
    if spec.tls.internal is not None:
        found.append(_secret_volume(TLS_VOLUME, spec.tls.internal.name))
    shown = _shown(ask)
    if shown is not None:
        found.append(_secret_volume("tls-client", shown.name))
    if component == MSG:
        found += product.of_msg(spec).volumes()
    return found


def _shown(ask: Ask) -> Ref | None:
    """The Secret with the certificate that clients see at these pods."""
    if ask.order.role == GATEWAY:
        return ask.spec.tls.client
    return ask.spec.api_certificate if ask.order.role == MSG else None


def _bus_volumes(spec: PlatoClusterSpec) -> list[dict[str, Any]]:
    return [_secret_volume("bus", spec.bus.kafka.config.name)] if spec.bus.kafka is not None else []


def _bus_mounts(spec: PlatoClusterSpec) -> list[dict[str, Any]]:
    return [{"name": "bus", "mountPath": _BUS, "readOnly": True}] if spec.bus.kafka is not None else []


def _secret_volume(volume: str, secret: str) -> dict[str, Any]:
    return {"name": volume, "secret": {"secretName": secret, "defaultMode": 0o440}}


def _identity(ask: Ask) -> list[dict[str, Any]]:
    """Who the process is and where it reads the record. A shard's identity is its name, whichever pod it is."""
    name = _text(PLATO_PROCESS__NAME=ask.order.owner) if ask.order.role == STATE else [
        _from_pod("PLATO_PROCESS__NAME", "metadata.name")
    ]  # fmt: skip
    found = [
        *name, _from_pod("PLATO_PROCESS__UID", "metadata.uid"), _from_pod("PLATO_PROCESS__POD_IP", "status.podIP"),
        _from_pod("PLATO_TOPOLOGY__NAMESPACE", "metadata.namespace"), *_text(
            PLATO_TOPOLOGY__CONFIG_MAP=topology_name(ask.cluster), PLATO_TOPOLOGY__PATH=f"{_RUN}/topology.json",
            PLATO_PROCESS__ADMIN_TOKENS_DIR=_ADMIN,
        ),
    ]  # fmt: skip
    if ask.spec.tls.internal is not None:
        found += _text(PLATO_TLS__INTERNAL_DIR=_TLS["internal"])
    return found


def _backing(ask: Ask) -> list[dict[str, Any]]:
    """Database, bus and store, and whose mark they must carry."""
    spec = ask.spec
    uri, url = spec.database.uri, spec.store.url
    found = [_from_secret("PLATO_DATABASE__URI", uri.name, uri.key)]
    found += _text(PLATO_DATABASE__SCHEMA_NAME=spec.database.schema, PLATO_BUS__PARTITIONS=spec.bus.partitions)
    if spec.bus.kafka is not None:
        found += _text(
            PLATO_BUS__TYPE="kafka", PLATO_BUS__TOPIC=spec.bus.kafka.topic,
            PLATO_BUS__PROPERTIES_FILE=f"{_BUS}/{spec.bus.kafka.config.key}",
        )  # fmt: skip
    found.append(_from_secret("PLATO_STORE__URL", url.name, url.key))
    found += _text(PLATO_STORE__KEY_PREFIX=spec.store.key_prefix) if spec.store.key_prefix else []
    # No setting, which an image that does not know it would refuse: such a one marks nothing, and asks for no mark.
    return [*found, *_text(PLATO_CLUSTER=ask.snap.cluster.identity)]


def _auth(spec: PlatoClusterSpec) -> list[dict[str, Any]]:
    return _text(
        PLATO_AUTH__ISSUER=spec.auth.issuer, PLATO_AUTH__AUDIENCE=spec.auth.audience,
        PLATO_AUTH__GUESTS=str(spec.auth.guests).lower(), PLATO_AUTH__KEYS_DIR=_KEYS,
    )  # fmt: skip


def _text(**values: str | int) -> list[dict[str, Any]]:
    return [{"name": name, "value": str(value)} for name, value in values.items()]


def _from_pod(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _from_secret(name: str, secret: str, key: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
