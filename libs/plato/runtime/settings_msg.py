"""The section `msg` of the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from plato.api import names
from plato.runtime.section import Port, Section

_URL: Final = r"^(https?://[^\s]+)?$"


class MsgSettings(Section):
    """The message service."""

    host: str = Field("127.0.0.1", description="Address that state shards connect to.")
    grpc_port: Port = Field(names.MSG_GRPC_PORT, description="gRPC: Sync and Pull, for state.")
    http_host: str = Field("127.0.0.1", description="Address of the HTTP port.")
    http_port: Port = Field(names.MSG_HTTP_PORT, description="Health and metrics; the HTTP API while api_port is 0.")
    api_host: str = Field("127.0.0.1", description="Address of the HTTP API's own port.")
    api_port: int = Field(
        0,
        ge=0,
        le=65_535,
        description="The HTTP API's own port, with nothing else on it, by tls.client_dir; 0: it is on http_port.",
    )
    api_connections: int = Field(
        2_000, ge=1, le=50_000, description="Connections to api_port at once; further ones are closed."
    )
    api_head_ms: int = Field(
        10_000,
        ge=100,
        le=120_000,
        description="A handshake, and the head of a request, must be whole within this; at api_port.",
    )
    api_body_ms: int = Field(
        10_000,
        ge=100,
        le=120_000,
        description="How long a body may make api_port wait, and so much longer as it brings 4 KiB per second.",
    )
    api_settle_ms: int = Field(
        0,
        ge=0,
        le=30_000,
        description="After a SIGTERM api_port answers for so long: until nobody sends it requests any more. For pods.",
    )
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
    recall_limit_s: int = Field(
        120, ge=0, description="A sender may recall a message for so long; 0: never. A group's leaders may at any time."
    )
    edit_limit_s: int = Field(86_400, ge=0, description="A sender may edit a message for so long; 0: never.")
    message_retention_days: int = Field(
        0, ge=0, le=36_500, description="Messages older than this are removed; 0: none, ever. See docs/messages.md."
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
    events: bool = Field(
        False,
        description="Keeps the feed that /v1/events reads: one more row per message. Hooks that need it keep it too.",
    )
    events_retention_h: int = Field(72, ge=1, le=8_760, description="The feed's rows are removed after this.")
    hook_url: str = Field(
        "",
        pattern=_URL,
        description="Is asked about messages before they are stored; see docs/hooks.md. Empty: nobody.",
    )
    hook_timeout_ms: int = Field(1_000, ge=10, le=10_000, description="How long the messages wait for its answer.")
    hook_on_failure: Literal["accept", "refuse"] = Field(
        "accept", description="What becomes of messages when it gives none."
    )
    after_url: str = Field("", pattern=_URL, description="Is told of every message afterwards. Empty: nobody.")
    push_url: str = Field(
        "", pattern=_URL, description="Is told of messages for users who are not online. Empty: nobody."
    )
    hook_secret_file: Path | None = Field(
        None,
        description="Holds the secret of 32 bytes or more that they are signed with; read again when it changes.",
    )
    friends_only: bool = Field(
        False, description="Only friends may write to a user in a dialogue, unless the user says otherwise."
    )
    search: bool = Field(True, description="Messages can be searched; off: no index is kept, and searches are refused.")
    search_ms: int = Field(2_000, ge=100, le=8_000, description="A search ends after this, in words.")
    allocator: Literal["single_writer", "redis", "segment"] = Field(
        "single_writer", description="Who gives seqs; see docs/allocators.md. May change at any start."
    )

    @property
    def keeps_events(self) -> bool:
        """Whether batches write the feed."""
        return self.events or bool(self.after_url or self.push_url)

    @model_validator(mode="after")
    def _signed(self) -> Self:
        if self.hook_secret_file is None and (self.hook_url or self.after_url or self.push_url):
            raise ValueError(
                "hook_secret_file must name a file with a secret where hook_url, after_url or push_url is set"
            )
        return self
