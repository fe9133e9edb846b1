"""Whether the installed resource definitions know every field that this operator reads and writes.

Asked by /openapi/v3, which an account without any role may read. Fields that the definitions have and we do not know are no
harm: a newer CRD with an older operator is what every upgrade passes through.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Final

from plato.api.cluster import PlatoClusterSpec, PlatoClusterStatus
from plato.api.names import GROUP, VERSION
from plato.api.objects import key_of
from plato.api.pool import GatewayPoolSpec, GatewayPoolStatus
from plato.api.shard import StateShardSpec, StateShardStatus

from plato_operator.kube import Kube, Refused

TYPES: Final[Mapping[str, tuple[type, type]]] = {
    "PlatoCluster": (PlatoClusterSpec, PlatoClusterStatus),
    "GatewayPool": (GatewayPoolSpec, GatewayPoolStatus),
    "StateShard": (StateShardSpec, StateShardStatus),
}


async def lacking(kube: Kube) -> str:
    """What is wrong with the installed definitions, in words; empty: nothing. Raises KubeError."""
    try:
        document = await kube.call("GET", f"/openapi/v3/apis/{GROUP}/{VERSION}")
    except Refused as e:
        if e.status == 404:
            return f"the API server does not serve {GROUP}/{VERSION}: install the CRDs of this operator's version"
        raise
    return judged(document)


def judged(document: Mapping[str, Any]) -> str:
    """The words for an OpenAPI document of the group; empty: every field is known."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for schema in ((document.get("components") or {}).get("schemas") or {}).values():
        for gvk in schema.get("x-kubernetes-group-version-kind") or ():
            if gvk.get("group") == GROUP and gvk.get("version") == VERSION:
                schemas[gvk.get("kind", "")] = schema
    missing: list[str] = []
    for kind, (spec, status) in TYPES.items():
        if kind not in schemas:
            missing.append(kind)
            continue
        parts = schemas[kind].get("properties") or {}
        missing += [f"{kind}.spec.{f}" for f in unknown(spec, parts.get("spec") or {})]
        missing += [f"{kind}.status.{f}" for f in unknown(status, parts.get("status") or {})]
    if not missing:
        return ""
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    return (
        f"the CRDs are older than this operator, they lack {', '.join(missing[:5])}{more}: install those of its version"
    )


def unknown(kind: type, schema: Mapping[str, Any]) -> Iterator[str]:
    """Dotted paths of fields of the dataclass `kind` that `schema` does not have."""
    properties = schema.get("properties") or {}
    for name, hint in typing.get_type_hints(kind).items():
        key = key_of(name)
        if key not in properties:
            yield key
            continue
        inner, at = _inner(hint, properties[key])
        if inner is not None:
            yield from (f"{key}.{below}" for below in unknown(inner, at))


def _inner(hint: Any, schema: Mapping[str, Any]) -> tuple[type | None, Mapping[str, Any]]:
    """The dataclass within a hint and the schema of its objects; (None, …) for plain values and free-form objects."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _inner(next(a for a in typing.get_args(hint) if a is not type(None)), schema)
    if origin is tuple:
        return _inner(typing.get_args(hint)[0], schema.get("items") or {})
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        alone: list[Mapping[str, Any]] = schema.get("allOf") or []
        return hint, alone[0] if len(alone) == 1 and "properties" not in schema else schema
    return None, schema
