"""Default ports (defaults.md's table, copied into docs/settings) and fixed names."""

from __future__ import annotations

from typing import Final

GATEWAY_TCP_PORT: Final = 8900
GATEWAY_WS_PORT: Final = 8901
STATE_PORT: Final = 8902
MSG_HTTP_PORT: Final = 8903
IPCONFIG_PORT: Final = 8904
IPCONFIG_INTERNAL_PORT: Final = 8905
STATE_ADMIN_PORT: Final = 8906
MSG_GRPC_PORT: Final = 8907
POSTGRES_PORT: Final = 8908
GATEWAY_ADMIN_PORT: Final = 8909
VALKEY_PORT: Final = 8928

LOCAL_PORT_STEP: Final = 10
"""A second local instance of a service listens this much higher."""

WS_PATH: Final = "/ws"
GUEST_PREFIX: Final = "guest:"
