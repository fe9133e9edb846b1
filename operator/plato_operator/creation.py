"""Why pods that should be there are not: a quota or the namespace's pod security level refused them.

A StatefulSet says so by events only, a Deployment by a condition. Events are asked for while a pod is missing, and by no
other reason; without the right to list them nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from plato_operator.kube import Kube, Object, Refused

_FAILED: Final = "FailedCreate"
_BOTH: Final = (_FAILED, "SuccessfulCreate")


async def refused_pods(
    kube: Kube, namespace: str, objects: Mapping[tuple[str, str], Object]
) -> dict[tuple[str, str], tuple[str, str]]:
    """{(kind, name) of a workload: (reason, message)} of those whose pods are refused now. Raises KubeError."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for key, obj in objects.items():
        if key[0] == "Deployment":
            message = _replica_failure(obj)
        elif key[0] == "StatefulSet" and (missing := _missing(obj, objects)):
            message = _last_failure(await _events(kube, namespace, obj["metadata"]["uid"]), missing)
        else:
            continue
        if message:
            found[key] = reason(message), f"its pods cannot be created: {message}"
    return found


def reason(message: str) -> str:
    """The reason of a condition for what the API server said."""
    if "exceeded quota" in message:
        return "QuotaExceeded"
    return "Forbidden" if "forbidden" in message else "ApplyRefused"


def _missing(obj: Object, objects: Mapping[tuple[str, str], Object]) -> list[str]:
    """Names of a StatefulSet's pods that are not there."""
    name = obj["metadata"]["name"]
    wanted = (obj.get("spec") or {}).get("replicas", 1)
    return [pod for pod in (f"{name}-{i}" for i in range(wanted)) if ("Pod", pod) not in objects]


def _replica_failure(obj: Object) -> str:
    for condition in (obj.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return str(condition.get("message", ""))
    return ""


async def _events(kube: Kube, namespace: str, uid: str) -> list[Any]:
    try:
        answer = await kube.call(
            "GET", f"/api/v1/namespaces/{namespace}/events", params={"fieldSelector": f"involvedObject.uid={uid}"}
        )
    except Refused as e:
        if e.status == 403:
            return []
        raise
    return list(answer.get("items") or ())


def _last_failure(events: Iterable[Mapping[str, Any]], pods: Iterable[str]) -> str:
    """What the newest event of one of the pods says, if it is a failure."""
    ours = sorted((e for e in events if e.get("reason") in _BOTH), key=_when)
    for pod in pods:
        # "create Pod NAME in", with a capital in newer versions of Kubernetes.
        said = [e for e in ours if f"reate Pod {pod} in" in str(e.get("message", ""))]
        if said and said[-1]["reason"] == _FAILED:
            return str(said[-1]["message"]).partition("error: ")[2] or str(said[-1]["message"])
    return ""


def _when(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")
