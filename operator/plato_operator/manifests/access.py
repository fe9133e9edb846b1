"""The tokens of /v1/report, and what pods may ask the API server: one ConfigMap, nothing else."""

from __future__ import annotations

import base64
import secrets
from typing import Any

from plato.api.names import topology_name

from plato_operator.manifests.meta import Ask


def secret(ask: Ask) -> dict[str, Any]:
    """Secret with one random bearer token. Another one at each call: it must be created, never applied again."""
    token = base64.b64encode(secrets.token_urlsafe(32).encode()).decode()
    return {**ask.base(), "type": "Opaque", "data": {"token": token}}


def service_account(ask: Ask) -> dict[str, Any]:
    """Account of all pods of the data plane; each pod says itself whether it gets a token."""
    return {**ask.base(), "automountServiceAccountToken": False}


def role(ask: Ask) -> dict[str, Any]:
    """Reading and watching the record."""
    rule = {
        "apiGroups": [""], "resources": ["configmaps"], "resourceNames": [topology_name(ask.cluster)],
        "verbs": ["get", "list", "watch"],
    }  # fmt: skip
    return {**ask.base(), "rules": [rule]}


def role_binding(ask: Ask) -> dict[str, Any]:
    """Gives the role to the account."""
    subject = {"kind": "ServiceAccount", "name": ask.cluster, "namespace": ask.snap.cluster.namespace}
    return {
        **ask.base(),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ask.cluster},
        "subjects": [subject],
    }
