"""The CRDs by themselves: every field explained, defaults within bounds, and `plato.api` agreeing field by field."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from plato.api.cluster import PlatoClusterSpec, PlatoClusterStatus
from plato.api.objects import ApiError, from_object, key_of, to_object
from plato.api.pool import GatewayPoolSpec, GatewayPoolStatus
from plato.api.shard import StateShardSpec, StateShardStatus

FOLDER = Path(__file__).resolve().parents[2] / "crds"
KINDS = {
    "PlatoCluster": (PlatoClusterSpec, PlatoClusterStatus),
    "GatewayPool": (GatewayPoolSpec, GatewayPoolStatus),
    "StateShard": (StateShardSpec, StateShardStatus),
}
SMALLEST: dict[str, dict[str, Any]] = {
    "PlatoCluster": {
        "version": "0.1.0",
        "database": {"uri": {"name": "db"}},
        "store": {"url": {"name": "kv"}},
        "auth": {"keys": {"name": "keys"}},
    },
    "GatewayPool": {"clusterRef": {"name": "demo"}},
    "StateShard": {"clusterRef": {"name": "demo"}},
}


@cache
def crds() -> dict[str, dict[str, Any]]:
    found = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml"))]
    return {crd["spec"]["names"]["kind"]: crd for crd in found}


def root_of(kind: str) -> dict[str, Any]:
    schema: dict[str, Any] = crds()[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def walk(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for key, inner in schema.get("properties", {}).items():
        yield from walk(inner, f"{path}.{key}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from walk(schema["additionalProperties"], f"{path}.*")


def filled(schema: dict[str, Any], value: Any) -> Any:
    """What the API server makes of `value`: missing fields get their defaults, inside of defaults too."""
    if isinstance(value, dict) and "properties" in schema:
        value = dict(value)
        for key, inner in schema["properties"].items():
            if key not in value and "default" in inner:
                value[key] = inner["default"]
            if key in value:
                value[key] = filled(inner, value[key])
    return value


def refuse(schema: dict[str, Any], value: Any, path: str) -> list[str]:
    """What of types, enums, bounds and patterns `value` breaks."""
    found = []
    types_: dict[str, tuple[type, ...]] = {
        "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "boolean": (bool,),
    }  # fmt: skip
    if "type" in schema and not isinstance(value, types_[schema["type"]]):
        return [f"{path}: {value!r} is no {schema['type']}"]
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{path}: {value!r} is none of {schema['enum']}")
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        found.append(f"{path}: {value} is out of bounds")
    if isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            found.append(f"{path}: {value!r} has a wrong length")
        if "pattern" in schema and not re.search(schema["pattern"], value):
            found.append(f"{path}: {value!r} does not fit {schema['pattern']}")
    if isinstance(value, dict):
        found += [f"{path}.{key} is missing" for key in schema.get("required", []) if key not in value]
        for key, inner in value.items():
            known = schema.get("properties", {}).get(key) or schema.get("additionalProperties")
            if known is None and not schema.get("x-kubernetes-preserve-unknown-fields"):
                found.append(f"{path}.{key} is unknown")
            elif isinstance(known, dict):
                found += refuse(known, inner, f"{path}.{key}")
    return found


def test_the_three_kinds_have_names_columns_and_subresources() -> None:
    found = crds()
    assert set(found) == set(KINDS)
    short = {kind: crd["spec"]["names"]["shortNames"] for kind, crd in found.items()}
    assert short == {"PlatoCluster": ["plato"], "GatewayPool": ["gwpool"], "StateShard": ["sshard"]}
    for kind, crd in found.items():
        spec = crd["spec"]
        assert crd["metadata"]["name"] == f"{spec['names']['plural']}.{spec['group']}"
        assert (spec["group"], spec["scope"], spec["names"]["categories"]) == ("plato.im", "Namespaced", ["plato-all"])
        (version,) = spec["versions"]
        assert (version["name"], version["served"], version["storage"]) == ("v1alpha1", True, True)
        assert version["subresources"]["status"] == {}
        assert [c["name"] for c in version["additionalPrinterColumns"]][-3:] == ["Reason", "Age", "Conns"]
        assert version["additionalPrinterColumns"][-1]["priority"] == 1
        assert ("scale" in version["subresources"]) == (kind == "GatewayPool")
        for column in version["additionalPrinterColumns"]:
            at: Any = version["schema"]["openAPIV3Schema"]
            for part in column["jsonPath"].split("[")[0].strip(".").split("."):
                at = at["properties"][part] if part != "creationTimestamp" else at
            assert at, column


def test_scale_points_at_fields_that_exist() -> None:
    scale = crds()["GatewayPool"]["spec"]["versions"][0]["subresources"]["scale"]
    root = root_of("GatewayPool")
    for path in scale.values():
        _, part, field = path.split(".")
        assert field in root["properties"][part]["properties"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_explained(kind: str) -> None:
    for path, schema in walk(root_of(kind), kind):
        if path == f"{kind}.metadata":
            assert schema == {"type": "object"}, "the API server allows nothing else there"
            continue
        assert len(schema.get("description", "")) >= 5, f"{path} has no description"
        assert schema["description"].endswith("."), f"{path}: a description is a sentence"


@pytest.mark.parametrize("kind", KINDS)
def test_fields_are_bounded(kind: str) -> None:
    """What a person can write has an end: numbers and lists in spec have bounds."""
    for path, schema in walk(root_of(kind)["properties"]["spec"], f"{kind}.spec"):
        if schema.get("type") == "integer" and "enum" not in schema:
            assert "minimum" in schema, path
            assert "maximum" in schema or schema.get("format") == "int64", path
        if schema.get("type") == "array":
            assert "maxItems" in schema, path
        if schema.get("type") == "object":
            assert "properties" in schema or "additionalProperties" in schema or path.endswith(
                ("podOverlay", "affinity", "[]")
            ), path  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_allowed_values(kind: str) -> None:
    for path, schema in walk(root_of(kind), kind):
        if "default" in schema:
            assert refuse(schema, filled(schema, schema["default"]), path) == []
            bare = schema["default"] == {} and "properties" in schema
            assert not bare, f"{path}: an object's default is spelled out, else rules in it are refused"
        for rule in schema.get("x-kubernetes-validations", []):
            assert rule["message"], path
            assert "\n" not in rule["rule"], path


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_of_objects_agree_with_those_of_their_fields(kind: str) -> None:
    for path, schema in walk(root_of(kind), kind):
        if "default" in schema and "properties" in schema:
            assert filled(schema, {}) == filled(schema, schema["default"]), path


def record_of(hint: Any) -> type | None:
    """The dataclass inside of a type hint, if there is one."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    return hint if dataclasses.is_dataclass(hint) and isinstance(hint, type) else None


def agree(kind: type, schema: dict[str, Any], path: str) -> None:
    hints = typing.get_type_hints(kind)
    assert {key_of(f.name) for f in dataclasses.fields(kind)} == set(schema["properties"]), path
    for f in dataclasses.fields(kind):
        inner, at, hint = schema["properties"][key_of(f.name)], f"{path}.{key_of(f.name)}", hints[f.name]
        if record := record_of(hint):
            agree(record, inner.get("items", inner), at)
        elif typing.get_origin(hint) is tuple:
            assert inner["type"] == "array", at
        elif typing.get_origin(hint) is not None and issubclass(typing.get_origin(hint), Mapping):
            assert inner["type"] == "object", at
        else:
            plain = next((a for a in typing.get_args(hint) if a is not type(None)), hint)
            assert {"string": str, "integer": int, "boolean": bool}[inner["type"]] is plain, at


@pytest.mark.parametrize("kind", KINDS)
def test_the_dataclasses_have_the_same_fields_and_types(kind: str) -> None:
    spec, status = KINDS[kind]
    agree(spec, root_of(kind)["properties"]["spec"], f"{kind}.spec")
    agree(status, root_of(kind)["properties"]["status"], f"{kind}.status")


@pytest.mark.parametrize("kind", KINDS)
def test_the_dataclasses_have_the_same_defaults(kind: str) -> None:
    schema = root_of(kind)["properties"]["spec"]
    spec, _ = KINDS[kind]
    defaulted = filled(schema, SMALLEST[kind])
    assert refuse(schema, defaulted, kind) == []
    assert from_object(spec, SMALLEST[kind]) == from_object(spec, defaulted)
    assert from_object(spec, to_object(from_object(spec, defaulted))) == from_object(spec, defaulted)


def test_read_errors_name_the_path() -> None:
    with pytest.raises(ApiError, match=r"^clusterRef\.name is missing$"):
        from_object(GatewayPoolSpec, {"clusterRef": {}})
    with pytest.raises(ApiError, match=r"^drain\.pacePerSecond is 'x', not int$"):
        from_object(GatewayPoolSpec, {"clusterRef": {"name": "c"}, "drain": {"pacePerSecond": "x"}})
    with pytest.raises(ApiError, match=r"^images\.pullSecrets\[1\] is 3, not a mapping$"):
        from_object(
            PlatoClusterSpec, {**SMALLEST["PlatoCluster"], "images": {"pullSecrets": [{"name": "a"}, 3]}}
        )  # fmt: skip


def test_what_is_refused_is_found_by_these_checks() -> None:
    """The checker itself: without it the tests above could not fail."""
    schema = root_of("GatewayPool")["properties"]["spec"]
    bad = {"clusterRef": {}, "replicas": 501, "workers": 3, "nonsense": 1}
    assert len(refuse(schema, bad, "spec")) == 4
