"""Between Kubernetes objects (nested dicts, camelCase) and the frozen dataclasses of `plato.api`.

The API server has already checked bounds, enums and CEL rules; what arrives here may still be older or newer than this code,
so unknown keys are passed over, missing ones take the default, and a wrong type raises ApiError with its path.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, Union, cast

T = TypeVar("T")

_UPPER = {"uid": "UID"}


class ApiError(ValueError):
    """An object does not fit its type; the text names the path and what was expected."""


def key_of(field: str) -> str:
    """Key of a field in YAML: `pod_uid` → `podUID`, `bytes_per_second` → `bytesPerSecond`; a trailing `_` is dropped."""
    first, *rest = field.rstrip("_").split("_")
    return first + "".join(_UPPER.get(part, part.capitalize()) for part in rest)


def from_object(kind: type[T], raw: object, path: str = "") -> T:
    """Reads `raw` (a mapping) as dataclass `kind`. Raises ApiError."""
    if not isinstance(raw, Mapping):
        raise ApiError(f"{path or 'object'} is {raw!r}, not a mapping")
    values: dict[str, Any] = {}
    for name, (key, hint, required) in _fields(cast(type, kind)).items():
        at = f"{path}.{key}" if path else key
        if raw.get(key) is not None:
            values[name] = _read(hint, raw[key], at)
        elif required:
            raise ApiError(f"{at} is missing")
    return kind(**values)


def to_object(value: object) -> Any:
    """The YAML shape of a dataclass of `plato.api`. Fields that are None are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((key_of(f.name), getattr(value, f.name)) for f in dataclasses.fields(value))
        return {key: to_object(inner) for key, inner in pairs if inner is not None}
    if isinstance(value, Mapping):
        return {k: to_object(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_object(v) for v in value]
    return value


@cache
def _fields(kind: type) -> dict[str, tuple[str, Any, bool]]:
    """{field name: (key, type, required)}."""
    hints = typing.get_type_hints(kind)
    return {
        f.name: (
            key_of(f.name),
            hints[f.name],
            f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING,
        )
        for f in dataclasses.fields(cast(Any, kind))
    }


def _read(hint: Any, raw: Any, at: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return _read(next(a for a in typing.get_args(hint) if a is not type(None)), raw, at)
    if hint is Any:
        return raw
    if origin is tuple:
        if not isinstance(raw, list):
            raise ApiError(f"{at} is {raw!r}, not a list")
        inner = typing.get_args(hint)[0]
        return tuple(_read(inner, v, f"{at}[{i}]") for i, v in enumerate(raw))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(raw, Mapping):
            raise ApiError(f"{at} is {raw!r}, not a mapping")
        inner = typing.get_args(hint)[1]
        return {str(k): _read(inner, v, f"{at}.{k}") for k, v in raw.items()}
    if dataclasses.is_dataclass(hint):
        return from_object(cast(type, hint), raw, at)
    if not isinstance(raw, hint) or (isinstance(raw, bool) and hint is not bool):
        raise ApiError(f"{at} is {raw!r}, not {hint.__name__}")
    return raw
