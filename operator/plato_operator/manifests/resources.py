"""Plato's own resources that a PlatoCluster makes: StateShards and the default GatewayPool."""

from __future__ import annotations

from typing import Any

from plato.api.cluster import Gateways

from plato_operator.core.children import stripped
from plato_operator.manifests.meta import Ask


def state_shard(ask: Ask) -> dict[str, Any]:
    """A StateShard. Without weight: that is for people to set."""
    return {**ask.base(), "spec": {"clusterRef": {"name": ask.cluster}}}


def gateway_pool(ask: Ask) -> dict[str, Any]:
    """The default pool by the template, without replicas: those are the pool's own from its creation on."""
    template = stripped(ask.spec.gateways.template, Gateways().template)
    return {**ask.base(), "spec": {"clusterRef": {"name": ask.cluster}, **template}}


def new_gateway_pool(ask: Ask) -> dict[str, Any]:
    """What sets the default pool's replicas, once; and its network, which can never be changed."""
    made = ask.base()
    del made["metadata"]["annotations"], made["metadata"]["labels"]
    network = ask.spec.gateways.template.network
    return {**made, "spec": {"clusterRef": {"name": ask.cluster}, "network": network, "replicas": ask.order.replicas}}
