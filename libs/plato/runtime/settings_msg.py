"""The section `msg` of the settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from plato.api import names
from plato.runtime.section import Port, Section


class MsgSettings(Section):
    """The message service."""

    host: str = Field("127.0.0.1", description="Address that state shards connect to.")
    grpc_port: Port = Field(names.MSG_GRPC_PORT, description="gRPC: Sync and Pull, for state.")
    http_host: str = Field("127.0.0.1", description="Address of the HTTP port.")
    http_port: Port = Field(names.MSG_HTTP_PORT, description="The HTTP API; health and metrics.")
    batch_records: int = Field(500, ge=1, le=10_000, description="Records of one partition in one transaction.")
    member_stale_ms: int = Field(3_000, ge=500, description="A msg process silent this long loses its partitions.")
    bus_retention_s: int = Field(86_400, ge=60, description="Bus rows are kept this long after their fan-out.")
    read_calm_ms: int = Field(
        500, ge=50, le=10_000, description="A Sync or Pull that takes longer means overload; see docs/overload.md."
    )
    hot_pulls_per_s: int = Field(
        50, ge=1, description="Pulls of one conversation that make it hot: they are answered together, from memory."
    )
    group_members_max: int = Field(10_000, ge=1, le=100_000, description="Most members of a group.")
    push_members_max: int = Field(
        500, ge=0, le=10_000, description="Members of larger groups get no pushes: they are notified, and pull."
    )
    notify_window_ms: int = Field(
        10,
        ge=1,
        le=10_000,
        description="One notice per so long, for a group of push_members_max members; longer for larger and busier ones.",
    )
    notify_window_max_ms: int = Field(
        5_000, ge=1, le=30_000, description="Neither that time nor the one for pulls grows beyond this."
    )
    http_origins: tuple[str, ...] = Field(
        (), description="Origins that browsers may come from, to the HTTP API; empty: any loopback."
    )
    api_user_per_s: int = Field(
        50, ge=1, le=100_000, description="Requests of one user to one process, and four times as many at once."
    )
    api_server_per_s: int = Field(
        2_000, ge=1, le=1_000_000, description="The same for an application server, by its token's `sub`."
    )
    friends_only: bool = Field(
        False, description="Only friends may write to a user in a dialogue, unless the user says otherwise."
    )
    allocator: Literal["single_writer", "redis", "segment"] = Field(
        "single_writer", description="Who gives seqs; see docs/allocators.md. May change at any start."
    )
