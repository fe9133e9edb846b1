"""Where this process reads the topology, by its settings: a ConfigMap on Kubernetes, else a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from plato.adapters.topology_file import FileTopology
from plato.runtime.settings import TopologySettings

if TYPE_CHECKING:
    from plato.adapters.topology_kube import KubeTopology


def topology_source(
    settings: TopologySettings, environ: Mapping[str, str] | None = None
) -> FileTopology | KubeTopology:
    """The source; its `run` must be running for it to follow the record. Raises SettingsError outside of a pod."""
    if not settings.config_map:
        return FileTopology(settings.path)
    # Here: its HTTP library is a sixth of what a process outside of Kubernetes takes to start.
    from plato.adapters.topology_kube import Access, KubeTopology

    return KubeTopology(settings.config_map, Access.in_cluster(settings.namespace, environ), settings.path)
