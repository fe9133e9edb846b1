"""The API server, asked in plain objects: list, get, create, replace, apply, patch, delete. No caches, no retries.

Every call ends within TIMEOUT_S: with an object, with `Refused` (the server said no, in words) or with `Unreachable` (no
answer, or none that can be read; whether a write happened is then unknown). Credentials come from KUBECONFIG, or from the
pod's service account; its token is read again as it is renewed.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration
from plato.api.names import GROUP, VERSION

TIMEOUT_S: Final = 10.0
MANAGER: Final = "plato-operator"
"""Field manager of what we apply."""
_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

Object = dict[str, Any]


class KubeError(Exception):
    """A call did not do what it should.

    Refused: the server's no. Unreachable: no answer.
    """


class Refused(KubeError):
    """The server refused: HTTP status, Kubernetes' reason, its message."""

    def __init__(self, status: int, reason: str, message: str, what: str) -> None:
        super().__init__(f"{what}: {message or reason or status}")
        self.status, self.reason, self.message = status, reason, message

    @property
    def passing(self) -> bool:
        """Whether it says more of the moment than of what was asked: a conflict, too many requests, a server in trouble; or
        one that does not know us yet, which is what it says while it starts."""
        return self.status in (401, 408, 409, 429) or self.status >= 500


class Unreachable(KubeError):
    """No answer in time, a broken connection, or an answer that is no Kubernetes object."""


class Kind(NamedTuple):
    """Where objects of a kind lie."""

    prefix: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """apiVersion of its objects."""
        return self.prefix.removeprefix("/apis/").removeprefix("/api/")


KINDS: Final[Mapping[str, Kind]] = {
    "PlatoCluster": Kind(f"/apis/{GROUP}/{VERSION}", "platoclusters"),
    "GatewayPool": Kind(f"/apis/{GROUP}/{VERSION}", "gatewaypools"),
    "StateShard": Kind(f"/apis/{GROUP}/{VERSION}", "stateshards"),
    "Pod": Kind("/api/v1", "pods"),
    "ConfigMap": Kind("/api/v1", "configmaps"),
    "Secret": Kind("/api/v1", "secrets"),
    "Service": Kind("/api/v1", "services"),
    "ServiceAccount": Kind("/api/v1", "serviceaccounts"),
    "Node": Kind("/api/v1", "nodes", False),
    "Role": Kind("/apis/rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": Kind("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "StatefulSet": Kind("/apis/apps/v1", "statefulsets"),
    "Deployment": Kind("/apis/apps/v1", "deployments"),
    "Job": Kind("/apis/batch/v1", "jobs"),
    "PodDisruptionBudget": Kind("/apis/policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": Kind("/apis/networking.k8s.io/v1", "networkpolicies"),
    "PodMonitor": Kind("/apis/monitoring.coreos.com/v1", "podmonitors"),
    "Lease": Kind("/apis/coordination.k8s.io/v1", "leases"),
    "Event": Kind("/apis/events.k8s.io/v1", "events"),
}


def path(kind: str, namespace: str = "", name: str = "", sub: str = "") -> str:
    """URL path of an object, or of all of them without `name`; without `namespace`: of all namespaces."""
    where = KINDS[kind]
    parts = [where.prefix]
    if where.namespaced and namespace:
        parts.append(f"namespaces/{namespace}")
    parts += [part for part in (where.plural, name, sub) if part]
    return "/".join(parts)


async def credentials() -> Configuration:
    """How to reach the API server. Raises config.ConfigException."""
    found = Configuration()
    if "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ:
        config.load_incluster_config(found)  # type: ignore[no-untyped-call]  # as generated
    else:
        await config.load_kube_config(client_configuration=found)  # type: ignore[no-untyped-call]  # as generated
    return found


def own_namespace() -> str:
    """The namespace of this pod; empty outside of a cluster."""
    if named := os.environ.get("POD_NAMESPACE", ""):
        return named
    return _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else ""


class Kube:
    """One client for all of this process. Made inside the loop; `close` ends it."""

    def __init__(self, found: Configuration, timeout_s: float = TIMEOUT_S) -> None:
        self._config = found
        context = ssl.create_default_context(cafile=found.ssl_ca_cert or None)
        if found.cert_file:
            context.load_cert_chain(found.cert_file, found.key_file)
        if not found.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=64),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            headers={"User-Agent": MANAGER},
        )

    async def close(self) -> None:
        """Closes the connections."""
        await self._session.close()

    async def call(
        self,
        method: str,
        at: str,
        *,
        params: Mapping[str, str] | None = None,
        body: object = None,
        content: str = "application/json",
    ) -> Object:
        """One request. Raises Refused and Unreachable."""
        what = f"{method} {at}"
        headers = {"Content-Type": content} if body is not None else {}
        try:
            if token := await self._config.get_api_key_with_prefix("BearerToken"):
                headers["Authorization"] = token
            data = json.dumps(body).encode() if body is not None else None
            url = f"{self._config.host}{at}"
            async with self._session.request(method, url, params=params, data=data, headers=headers) as answer:
                text = await answer.read()
                status = answer.status
        except (TimeoutError, aiohttp.ClientError, OSError, config.ConfigException) as e:
            raise Unreachable(f"{what}: {e or type(e).__name__}") from e
        try:
            found = json.loads(text)
        except ValueError as e:
            if status >= 400:
                raise Refused(status, "", text[:200].decode(errors="replace"), what) from e
            raise Unreachable(f"{what}: the answer is no JSON: {text[:80]!r}") from e
        if not isinstance(found, dict):
            raise Unreachable(f"{what}: the answer is no object: {text[:80]!r}")
        if status >= 400:
            raise Refused(status, str(found.get("reason", "")), str(found.get("message", "")), what)
        return found

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """The object as it is now; None: there is none."""
        try:
            return await self.call("GET", path(kind, namespace, name))
        except Refused as e:
            if e.status == 404:
                return None
            raise

    async def list(self, kind: str, namespace: str = "", selector: str = "") -> list[Object]:
        """All objects of a kind, as they are now."""
        params = {"labelSelector": selector} if selector else None
        found = await self.call("GET", path(kind, namespace), params=params)
        items = found.get("items")
        if not isinstance(items, list):
            raise Unreachable(f"GET {path(kind, namespace)}: the answer is no list")
        return items

    async def create(self, kind: str, namespace: str, body: Object) -> Object:
        """Creates an object."""
        return await self.call("POST", path(kind, namespace), params={"fieldManager": MANAGER}, body=body)

    async def replace(self, kind: str, namespace: str, name: str, body: Object, sub: str = "") -> Object:
        """Replaces an object, or its subresource; its resourceVersion in `body` must be the newest."""
        return await self.call("PUT", path(kind, namespace, name, sub), params={"fieldManager": MANAGER}, body=body)

    async def apply(self, kind: str, namespace: str, name: str, body: Object, manager: str = MANAGER) -> Object:
        """Server-side apply, by force; a uid or resourceVersion in `body` must be the present one."""
        return await self.call(
            "PATCH", path(kind, namespace, name), params={"fieldManager": manager, "force": "true"}, body=body,
            content="application/apply-patch+yaml",
        )  # fmt: skip

    async def merge(self, kind: str, namespace: str, name: str, body: Object, sub: str = "") -> Object:
        """Strategic merge patch of a built-in kind, or merge patch of ours."""
        ours = KINDS[kind].prefix.startswith(f"/apis/{GROUP}/")
        return await self.call(
            "PATCH", path(kind, namespace, name, sub), params={"fieldManager": MANAGER}, body=body,
            content=f"application/{'merge' if ours else 'strategic-merge'}-patch+json",
        )  # fmt: skip

    async def delete(
        self, kind: str, namespace: str, name: str, *, uid: str, version: str = "", grace_s: int | None = None
    ) -> None:
        """Deletes the object with this uid and, where given, resourceVersion. One that is not there any more is no error."""
        preconditions = {"uid": uid, **({"resourceVersion": version} if version else {})}
        # Background is not every kind's default: a Job would leave its pods behind.
        body: Object = {
            "apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions, "propagationPolicy": "Background",
        }  # fmt: skip
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            await self.call("DELETE", path(kind, namespace, name), body=body)
        except Refused as e:
            if e.status != 404:
                raise
