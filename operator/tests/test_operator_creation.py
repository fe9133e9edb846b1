"""Pods that the API server refuses are said to be, for as long as they are missing and refused."""

from __future__ import annotations

from typing import Any

from plato_operator.creation import refused_pods
from plato_operator.kube import Refused

QUOTA = 'pods "demo-edge-1" is forbidden: exceeded quota: few, requested: pods=1, used: pods=1, limited: pods=1'
SECURITY = 'pods "demo-edge-1" is forbidden: violates PodSecurity "baseline:latest": host namespaces (hostNetwork=true)'


class Api:
    """Answers the list of events."""

    def __init__(self, *events: dict[str, Any], fails: Refused | None = None) -> None:
        self.events, self.fails, self.asked = list(events), fails, 0

    async def call(self, method: str, path: str, *, params: dict[str, str]) -> dict[str, Any]:
        assert (method, path, params) == (
            "GET",
            "/api/v1/namespaces/im/events",
            {"fieldSelector": "involvedObject.uid=u"},
        )
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        return {"items": self.events}


def event(pod: str, error: str, at: str) -> dict[str, Any]:
    said = f"Create Pod {pod} in StatefulSet demo-edge " + (f"failed error: {error}" if error else "successful")
    return {"reason": "FailedCreate" if error else "SuccessfulCreate", "message": said, "lastTimestamp": at}


def objects(*pods: str) -> dict[tuple[str, str], Any]:
    sts = {"metadata": {"name": "demo-edge", "uid": "u"}, "spec": {"replicas": 2}}
    return {("StatefulSet", "demo-edge"): sts, **{("Pod", p): {} for p in pods}}


async def refused(api: Api, found: dict[tuple[str, str], Any]) -> dict[tuple[str, str], tuple[str, str]]:
    return await refused_pods(api, "im", found)  # type: ignore[arg-type]  # the one call of Kube that it makes


async def test_nobody_is_asked_while_every_pod_is_there() -> None:
    api = Api(event("demo-edge-1", QUOTA, "2026-01-01T00:00:00Z"))
    assert await refused(api, objects("demo-edge-0", "demo-edge-1")) == {}
    assert api.asked == 0


async def test_a_quota_and_a_security_level_are_told_apart() -> None:
    for error, reason in ((QUOTA, "QuotaExceeded"), (SECURITY, "Forbidden"), ("odd", "ApplyRefused")):
        found = await refused(Api(event("demo-edge-1", error, "2026-01-01T00:00:00Z")), objects("demo-edge-0"))
        assert found == {("StatefulSet", "demo-edge"): (reason, f"its pods cannot be created: {error}")}


async def test_a_failure_that_is_over_is_not_told_when_the_pod_is_replaced() -> None:
    then = event("demo-edge-1", QUOTA, "2026-01-01T00:00:00Z")
    later = event("demo-edge-1", "", "2026-01-01T00:05:00Z")
    other = event("demo-edge-0", "", "2026-01-01T00:09:00Z")
    assert await refused(Api(later, then, other), objects("demo-edge-0")) == {}
    assert await refused(Api(later, other), objects("demo-edge-0")) == {}


async def test_without_the_right_to_list_events_nothing_is_said() -> None:
    assert await refused(Api(fails=Refused(403, "Forbidden", "no", "GET")), objects()) == {}


async def test_a_deployment_says_it_itself() -> None:
    condition = {"type": "ReplicaFailure", "status": "True", "message": QUOTA}
    deployment = {"metadata": {"name": "demo-msg"}, "status": {"conditions": [condition]}}
    found = await refused(Api(), {("Deployment", "demo-msg"): deployment})
    assert found["Deployment", "demo-msg"][0] == "QuotaExceeded"
    condition["status"] = "False"
    assert await refused(Api(), {("Deployment", "demo-msg"): deployment}) == {}
