"""What the product's fields of a PlatoCluster are in the pods: settings by environment, Secrets as files.

Only what is not the setting's own default is said, so that a cluster that sets nothing has the pods that it always had.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from plato.api.cluster import (
    AccessKey,
    ApiSpec,
    Attachments,
    Events,
    Hooks,
    Messages,
    PlatoClusterSpec,
    SecretKey,
    SigningKey,
)
from plato.api.names import MSG_API_PORT

SETTLE_MS: Final = 5_000
"""A Service goes on sending requests to a pod for a while after its deletion."""
KeyOf = AccessKey | SecretKey | SigningKey
_ATTACHMENTS, _HOOKS = "/etc/plato/attachments", "/etc/plato/hooks"


@dataclass(frozen=True, slots=True)
class Extras:
    """More of a container: variables, ports by name, and folders with keys of Secrets: {volume: (folder, {file: key})}."""

    env: list[dict[str, Any]]
    ports: dict[str, int]
    secrets: dict[str, tuple[str, dict[str, KeyOf]]]

    def volumes(self) -> list[dict[str, Any]]:
        """Of the pod. Whole volumes, no subPath: those are never written anew when a Secret changes."""
        return [
            {
                "name": volume,
                "projected": {
                    "defaultMode": 0o440,
                    "sources": [
                        {"secret": {"name": ref.name, "items": [{"key": ref.key, "path": file}]}}
                        for file, ref in files.items()
                    ],
                },
            }
            for volume, (_, files) in self.secrets.items()
        ]

    def mounts(self) -> list[dict[str, Any]]:
        """Of the container."""
        return [{"name": volume, "mountPath": folder, "readOnly": True} for volume, (folder, _) in self.secrets.items()]


def pages(spec: PlatoClusterSpec) -> list[dict[str, Any]]:
    """Which web pages may connect, for gateways and ipconfig."""
    return _text(PLATO_GATEWAY__WS_ORIGINS=json.dumps(spec.origins)) if spec.origins else []


def of_msg(spec: PlatoClusterSpec) -> Extras:
    """Of the msg pods."""
    made = Extras([], {}, {})
    if spec.origins:
        made.env.extend(_text(PLATO_MSG__HTTP_ORIGINS=json.dumps(spec.origins)))
    _api(spec.api, made)
    _attachments(spec.attachments, made)
    _hooks(spec.hooks, made)
    own, usual = spec.messages, Messages()
    made.env.extend(
        _unusual(
            ("PLATO_MSG__RECALL_LIMIT_S", own.recall_seconds, usual.recall_seconds),
            ("PLATO_MSG__EDIT_LIMIT_S", own.edit_seconds, usual.edit_seconds),
            ("PLATO_MSG__MESSAGE_RETENTION_DAYS", own.retention_days, usual.retention_days),
            ("PLATO_MSG__GROUP_MEMBERS_MAX", own.group_members, usual.group_members),
            ("PLATO_MSG__FRIENDS_ONLY", own.friends_only, usual.friends_only),
            ("PLATO_MSG__SEARCH", own.search, usual.search),
            ("PLATO_MSG__EVENTS", spec.events.enabled, Events().enabled),
            ("PLATO_MSG__EVENTS_RETENTION_H", spec.events.retention_hours, Events().retention_hours),
        )
    )
    return made


def _api(api: ApiSpec, made: Extras) -> None:
    usual = ApiSpec()
    if api.enabled:
        made.ports["api"] = MSG_API_PORT
        made.env.extend(
            _text(
                PLATO_MSG__API_HOST="0.0.0.0", PLATO_MSG__API_PORT=MSG_API_PORT, PLATO_MSG__API_SETTLE_MS=SETTLE_MS,
                PLATO_MSG__API_CONNECTIONS=api.max_connections,
            )
        )  # fmt: skip
    made.env.extend(
        _unusual(
            ("PLATO_MSG__API_USER_PER_S", api.user_requests_per_second, usual.user_requests_per_second),
            ("PLATO_MSG__API_SERVER_PER_S", api.server_requests_per_second, usual.server_requests_per_second),
        )
    )


def _attachments(files: Attachments, made: Extras) -> None:
    usual, s3 = Attachments(), files.s3
    if s3 is not None:
        place = "/".join(part for part in (s3.endpoint, s3.bucket, s3.prefix) if part)
        made.secrets["attachments"] = (_ATTACHMENTS, {"access-key": s3.access_key, "secret-key": s3.secret_key})
        made.env.extend(
            [
                *_text(PLATO_ATTACHMENTS__S3_URL=place, PLATO_ATTACHMENTS__S3_REGION=s3.region),
                *_text(
                    PLATO_ATTACHMENTS__S3_ACCESS_KEY_FILE=f"{_ATTACHMENTS}/access-key",
                    PLATO_ATTACHMENTS__S3_SECRET_KEY_FILE=f"{_ATTACHMENTS}/secret-key",
                ),
            ]
        )
    if files.types:
        made.env.extend(_text(PLATO_ATTACHMENTS__TYPES=json.dumps(files.types)))
    made.env.extend(
        _unusual(
            ("PLATO_ATTACHMENTS__BYTES_MAX", files.max_bytes, usual.max_bytes),
            ("PLATO_ATTACHMENTS__KEEP_UNUSED_S", files.keep_unused_seconds, usual.keep_unused_seconds),
            ("PLATO_ATTACHMENTS__UNUSED_BYTES_MAX", files.unused_max_bytes, usual.unused_max_bytes),
        )
    )


def _hooks(hooks: Hooks, made: Extras) -> None:
    usual = Hooks()
    if hooks.secret is not None:
        made.secrets["hooks"] = (_HOOKS, {"secret": hooks.secret})
        made.env.extend(_text(PLATO_MSG__HOOK_SECRET_FILE=f"{_HOOKS}/secret"))
    made.env.extend(
        _unusual(
            ("PLATO_MSG__HOOK_URL", hooks.before_url, usual.before_url),
            (
                "PLATO_MSG__HOOK_TIMEOUT_MS",
                hooks.before_timeout_milliseconds,
                usual.before_timeout_milliseconds,
            ),
            ("PLATO_MSG__HOOK_ON_FAILURE", hooks.before_on_failure.lower(), usual.before_on_failure.lower()),
            ("PLATO_MSG__AFTER_URL", hooks.after_url, usual.after_url),
            ("PLATO_MSG__PUSH_URL", hooks.push_url, usual.push_url),
        )
    )


def _unusual(*values: tuple[str, str | int, str | int]) -> list[dict[str, Any]]:
    """Variables of (name, value, the setting's default) whose value is another one."""
    return [
        {"name": name, "value": str(value).lower() if isinstance(value, bool) else str(value)}
        for name, value, usual in values
        if value != usual
    ]


def _text(**values: str | int) -> list[dict[str, Any]]:
    return [{"name": name, "value": str(value)} for name, value in values.items()]
