"""Says whether the operator may go: exits 1 while PlatoClusters are left.

    python3 -m plato_operator.uninstall NAMESPACE…

The chart runs it before an uninstall. Without the operator a PlatoCluster still serves, but nobody repairs, drains or
scales it, so leaving one behind has to be meant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from plato.api import names


def left(namespaces: Sequence[str], list_names: Callable[[str], list[str]]) -> list[str]:
    """namespace/name of each PlatoCluster that is left."""
    return [cluster for namespace in namespaces for cluster in list_names(namespace)]


def refusal(clusters: Sequence[str]) -> str:
    """What the person who uninstalls reads."""
    deletes = "\n".join(
        f"    kubectl -n {namespace} delete platocluster {name}"
        for namespace, name in (cluster.split("/") for cluster in clusters)
    )
    return (
        f"Not uninstalled: {len(clusters)} PlatoCluster(s) would be left without an operator. Delete them first:\n\n"
        f"{deletes}\n\n"
        "or leave them running unattended: helm uninstall --no-hooks"
    )


def list_clusters(namespace: str) -> list[str]:
    """namespace/name of each PlatoCluster in a namespace (*: in all); none without their CRD. Raises ApiException."""
    api = client.CustomObjectsApi()
    found: Any
    try:
        if namespace == "*":
            found = api.list_cluster_custom_object(names.GROUP, names.VERSION, "platoclusters")
        else:
            found = api.list_namespaced_custom_object(names.GROUP, names.VERSION, namespace, "platoclusters")
    except ApiException as e:
        if e.status == 404:
            return []
        raise
    return [f"{item['metadata']['namespace']}/{item['metadata']['name']}" for item in found["items"]]


def main(namespaces: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    try:
        config.load_config()  # type: ignore[no-untyped-call]  # the package types its API classes only
        clusters = left(namespaces, list_clusters)
    except (ApiException, config.ConfigException, OSError) as e:
        why = f"{e.status} {e.reason}" if isinstance(e, ApiException) else str(e)
        print(
            f"Not uninstalled: the PlatoClusters in {', '.join(namespaces)} cannot be listed ({why}).\n"
            "Look yourself (kubectl get platocluster -A), then pass this check by: helm uninstall --no-hooks"
        )
        return 1
    if clusters:
        print(refusal(clusters))
        return 1
    print("no PlatoCluster is left")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
