"""podOverlay: merged over a pod template by strategic merge, last; what Plato needs is refused, in words.

Lists are merged by their merge key, as kubectl does: containers, volumes and variables by name, ports by number. Tolerations
and lists without a key are put behind ours. null removes a key, `$patch: delete` an entry.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

_MERGE_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
    "env": ("name",),
    "ports": ("containerPort", "protocol"),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "hostAliases": ("ip",),
    "readinessGates": ("conditionType",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "resourceClaims": ("name",),
}
_APPENDED: Final = ("tolerations", "envFrom")
_DEFAULTS: Final = {"protocol": "TCP", "whenUnsatisfiable": "DoNotSchedule"}
_FIXED_SPEC: Final = {
    "hostNetwork": "set spec.network",
    "dnsPolicy": "it follows from spec.network",
    "serviceAccountName": "pods read the topology by this account",
    "serviceAccount": "pods read the topology by the operator's account",
    "automountServiceAccountToken": "pods read the topology by this token",
    "terminationGracePeriodSeconds": "it follows from drain.deadlineSeconds",
    "restartPolicy": "pods always restart their containers",
    "hostname": "pods are found by their name",
    "subdomain": "pods are found by their name",
    "enableServiceLinks": "other Services' variables would be read as settings",
}
_FIXED_CONTAINER: Final = ("livenessProbe", "readinessProbe", "startupProbe")


class OverlayError(ValueError):
    """A podOverlay that cannot be; the text says what and where, for a person to act upon."""


def overlaid(template: dict[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """The template with the overlay merged over it. Raises OverlayError."""
    if not overlay:
        return template
    for key, value in overlay.items():
        if value is None:
            raise OverlayError(f"podOverlay.{key} is null: Plato needs it; leave it out")
        if key not in ("metadata", "spec"):
            raise OverlayError(
                f"podOverlay.{key}: an overlay has metadata and spec, as a pod template; is it {_under(key)}?"
            )
    metadata = overlay.get("metadata") or {}
    for key in metadata if isinstance(metadata, Mapping) else ():
        if key not in ("labels", "annotations"):
            raise OverlayError(f"podOverlay.metadata.{key}: only labels and annotations can be overlaid")
    merged: dict[str, Any] = _map(copy.deepcopy(template), overlay, "podOverlay")
    _check(template, merged)
    return merged


def _under(key: str) -> str:
    return f"metadata.{key}" if key in ("labels", "annotations") else f"spec.{key}"


def _map(base: dict[str, Any], over: Any, at: str) -> dict[str, Any]:
    if not isinstance(over, Mapping):
        raise OverlayError(f"{at} is {_kind(over)}, where a pod template has a mapping")
    for key, value in over.items():
        path = f"{at}.{key}"
        if str(key).startswith("$"):
            raise OverlayError(f"{path}: of the directives only `$patch: delete` in an entry of a list is known")
        if value is None:
            base.pop(key, None)
        elif key in _MERGE_KEYS and isinstance(base.get(key, []), list):
            base[key] = _list(base.get(key, []), value, _MERGE_KEYS[key], path)
        elif key in _APPENDED:
            if not isinstance(value, list):
                raise OverlayError(f"{path} is {_kind(value)}, where a pod template has a list")
            base[key] = [*base.get(key, []), *copy.deepcopy(value)]
        elif isinstance(base.get(key), dict):
            base[key] = _map(base[key], value, path)
        elif isinstance(value, Mapping):
            base[key] = _map({}, value, path)
        elif isinstance(base.get(key), list) and not isinstance(value, list):
            raise OverlayError(f"{path} is {_kind(value)}, where a pod template has a list")
        else:
            base[key] = copy.deepcopy(value)
    return base


def _list(base: list[Any], over: Any, keys: tuple[str, ...], at: str) -> list[Any]:
    if not isinstance(over, list):
        raise OverlayError(f"{at} is {_kind(over)}, where a pod template has a list")
    found = list(base)
    for i, entry in enumerate(over):
        path = f"{at}[{i}]"
        if not isinstance(entry, Mapping):
            raise OverlayError(f"{path} is {_kind(entry)}, where a pod template has a mapping")
        if keys[0] not in entry:
            raise OverlayError(f"{path} needs {keys[0]}, by which it is merged")
        same = [n for n, old in enumerate(found) if _key(old, keys) == _key(entry, keys)]
        patch = {k: v for k, v in entry.items() if k != "$patch"}
        if entry.get("$patch", "delete") != "delete":
            raise OverlayError(f"{path}.$patch: only delete is known")
        if "$patch" in entry:
            found = [old for n, old in enumerate(found) if n not in same]
        elif same:
            found[same[0]] = _map(found[same[0]], patch, path)
        else:
            found.append(_map({}, patch, path))
    return found


def _key(entry: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(entry.get(key, _DEFAULTS.get(key)) for key in keys)


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list) else repr(value)


def _check(template: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    """Everything that Plato relies on is as it was."""
    for part in ("labels", "annotations"):
        for key, value in template["metadata"][part].items():
            if merged["metadata"].get(part, {}).get(key) != value:
                raise OverlayError(f"podOverlay.metadata.{part}: {key} is Plato's own and cannot be changed")
    ours, theirs = template["spec"], merged["spec"]
    for key, why in _FIXED_SPEC.items():
        if ours.get(key) != theirs.get(key):
            raise OverlayError(f"podOverlay.spec.{key} cannot be changed: {why}")
    _kept(ours, theirs, "volumes", ("name",), "podOverlay.spec.volumes", "Plato needs it as it is")
    gate = "Plato needs it as it is"
    _kept(ours, theirs, "readinessGates", ("conditionType",), "podOverlay.spec.readinessGates", gate)
    main = ours["containers"][0]
    found = [c for c in theirs.get("containers", []) if c.get("name") == main["name"]]
    at = f"podOverlay.spec.containers[{main['name']}]"
    if not found:
        raise OverlayError(f"{at} cannot be removed: it is Plato itself")
    for probe in _FIXED_CONTAINER:
        if found[0].get(probe) != main.get(probe):
            raise OverlayError(f"{at}.{probe} cannot be changed: the operator relies on it")
    _kept(main, found[0], "ports", ("containerPort", "protocol"), f"{at}.ports", "ports are set in the resource's spec")
    _kept(main, found[0], "env", ("name",), f"{at}.env", "the operator sets it; see the resource's spec")
    _kept(main, found[0], "volumeMounts", ("mountPath",), f"{at}.volumeMounts", "Plato needs it as it is")
    for container in theirs["containers"]:
        for port in container.get("ports", []) if container is not found[0] else ():
            if port.get("containerPort") in {p["containerPort"] for p in main["ports"]}:
                where = f"podOverlay.spec.containers[{container.get('name')}].ports"
                raise OverlayError(f"{where}: {port['containerPort']} is taken by {main['name']}")


def _kept(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], field: str, keys: tuple[str, ...], at: str, why: str
) -> None:
    """Each entry of ours is there unchanged, and no other one has its key or takes its name."""
    for entry in ours.get(field, []):
        same = [other for other in theirs.get(field, []) if _key(other, keys) == _key(entry, keys)]
        if same != [entry]:
            raise OverlayError(f"{at}: {entry.get('name') or _key(entry, keys)[0]} cannot be changed: {why}")
