"""Which processes the embedded cluster runs, and the effective settings of each.

A process gets one YAML file that holds everything, and its identity by environment. No PLATO_ variable of the user reaches
it: what they set is in the file already.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from plato.local.folder import DataFolder
from plato.local.ports import PortUse, gateway_name, msg_name, shard_name, web_origins
from plato.local.servers import write_private
from plato.runtime.settings import PREFIX, Settings, dump

KINDS = ("postgres", "valkey", "state", "gateway", "worker", "link", "poller", "msg", "ipconfig")
"""Kinds of processes, as status.json and `plato stop` name them. Workers, links and pollers belong to a gateway."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One service process: how to run it, where it says whether it serves, and where it names its own children."""

    name: str
    kind: str
    argv: tuple[str, ...]
    log: Path
    admin: PortUse
    pids: Path | None = None

    def environment(self, uid: str) -> dict[str, str]:
        """The child's environment."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
        return kept | {f"{PREFIX}PROCESS__NAME": self.name, f"{PREFIX}PROCESS__UID": uid, "PYTHONUNBUFFERED": "1"}


_DECIDED = (
    ("topology", "path"), ("topology", "config_map"), ("auth", "keys_dir"), ("gateway", "run_dir"),
    ("database", "uri"), ("store", "url"), ("process", "name"), ("process", "uid"),
    ("tls", "internal_dir"), ("ipconfig", "override_path"),
)  # fmt: skip
"""Keys that the embedded cluster sets itself: see `effective` and `write_all`."""


def overruled(settings: Settings) -> list[str]:
    """The keys that the user set although this cluster decides them, as "section.key"."""
    return [f"{section}.{key}" for section, key in _DECIDED if key in getattr(settings, section).model_fields_set]


def effective(settings: Settings, folder: DataFolder, database_uri: str, store_url: str) -> Settings:
    """The user's settings with what this cluster decides: folders, its servers, its key. Ports are still the user's.

    Where the user names the pages that may connect, the chat page is one of them; with none named every local one may.
    """
    own, asked = settings.gateway.ws_origins, settings.msg.http_origins
    page = web_origins(settings)
    return settings.model_copy(
        update={
            "topology": settings.topology.model_copy(update={"path": folder.topology, "config_map": ""}),
            "auth": settings.auth.model_copy(update={"keys_dir": folder.keys}),
            "database": settings.database.model_copy(update={"uri": database_uri}),
            "store": settings.store.model_copy(update={"url": store_url}),
            "gateway": settings.gateway.model_copy(update={"ws_origins": (*own, *page) if own else ()}),
            "msg": settings.msg.model_copy(update={"http_origins": (*asked, *page) if asked else ()}),
            "tls": settings.tls.model_copy(update={"internal_dir": None}),
            "local": settings.local.model_copy(update={"data_dir": folder.root}),
            "attachments": settings.attachments.model_copy(
                update={}
                if settings.attachments.s3_url or settings.attachments.folder
                else {"folder": folder.attachments}
            ),
        }
    )


def gateway_run_dir(folder: DataFolder, name: str) -> Path:
    """Folder of a gateway's worker-link socket and pids.json."""
    return folder.sockets / name


def write_all(base: Settings, folder: DataFolder, ports: dict[str, PortUse]) -> list[Spec]:
    """Writes one settings file per process; returns the specs in the order in which they stop: clients' side first."""
    specs = []

    def add(name: str, kind: str, settings: Settings, admin: PortUse, pids: Path | None = None) -> None:
        path = folder.run / f"{name}.yaml"
        write_private(path, dump(settings))
        argv = (sys.executable, "-P", "-m", f"plato_{kind}", "--settings", str(path))
        specs.append(Spec(name, kind, argv, folder.logs / f"{name}.log", admin, pids))

    ipconfig = base.ipconfig.model_copy(
        update={
            "port": ports["ipconfig"].port,
            "internal_port": ports["ipconfig.internal"].port,
            "override_path": folder.root / "override.json",
        }
    )
    add("plato-ipconfig-0", "ipconfig", base.model_copy(update={"ipconfig": ipconfig}), ports["ipconfig.internal"])
    for i in range(base.local.gateways):
        name = gateway_name(i)
        run_dir = gateway_run_dir(folder, name)
        run_dir.mkdir(mode=0o700, exist_ok=True)
        gateway = base.gateway.model_copy(
            update={
                "tcp_port": ports[f"{name}.tcp"].port,
                "ws_port": ports[f"{name}.ws"].port,
                "admin_port": ports[f"{name}.admin"].port,
                "poll_port": ports[f"{name}.poll"].port if base.gateway.poll_port else 0,
                "run_dir": run_dir,
            }
        )
        add(
            name, "gateway", base.model_copy(update={"gateway": gateway}), ports[f"{name}.admin"], run_dir / "pids.json"
        )
    for i in range(base.local.shards):
        name = shard_name(i)
        state = base.state.model_copy(
            update={"port": ports[f"{name}.grpc"].port, "admin_port": ports[f"{name}.admin"].port}
        )
        add(name, "state", base.model_copy(update={"state": state}), ports[f"{name}.admin"])
    for i in range(base.local.msgs):
        name = msg_name(i)
        msg = base.msg.model_copy(
            update={
                "grpc_port": ports[f"{name}.grpc"].port,
                "http_port": ports[f"{name}.http"].port,
                "api_port": ports[f"{name}.api"].port if base.msg.api_port else 0,
            }
        )
        add(name, "msg", base.model_copy(update={"msg": msg}), ports[f"{name}.http"])
    return specs
