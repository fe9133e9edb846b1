"""What a live load shall do: one value, handed to every worker process as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Plan:
    """Who talks to which platform, how much, and where the records go."""

    folder: Path
    """Histories, stores and the workers' output lie here."""
    keys_dir: Path
    """Holds dev.key, with which tokens are signed."""
    issuer: str
    audience: str
    ipconfig_url: str
    """"" when `gateways` are named instead."""
    gateways: tuple[str, ...] = ()
    users: int = 300
    rate_per_s: float = 50.0
    """Of all workers together."""
    workers: int = 4
    ws_every: int = 2
    """Each n-th user comes by WebSocket; 0: none."""
    seed: int = 20240607
    token_ttl_s: int = 3_600
    prefix: str = "u"
    """Users are <prefix>000, <prefix>001 …"""

    def user(self, number: int) -> str:
        """The user's name."""
        return f"{self.prefix}{number:03}"

    def share(self, worker: int) -> range:
        """The numbers of the users that a worker plays."""
        return range(worker, self.users, self.workers)

    def history(self, worker: int) -> Path:
        """The worker's records."""
        return self.folder / f"history-{worker}.jsonl"

    def store(self, user: str) -> Path:
        """The SQLite file of a user's device."""
        return self.folder / "stores" / f"{user}.sqlite"

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps({**dataclasses.asdict(self), "folder": str(self.folder), "keys_dir": str(self.keys_dir)})

    @classmethod
    def loads(cls, text: str) -> Plan:
        """From `dumps`."""
        given = json.loads(text)
        given |= {
            "folder": Path(given["folder"]),
            "keys_dir": Path(given["keys_dir"]),
            "gateways": tuple(given["gateways"]),
        }
        return cls(**given)
