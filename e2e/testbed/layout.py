"""Where everything of the testbed lies: folders, names, addresses. Nothing here touches the machine.

The names that the kernel shows (links, cgroups) begin with `plato-tb-`, so that a stranger sees whose they are and so that
tear-down can name exactly what it deletes. A machine holds one testbed at a time, since these names and addresses are fixed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PREFIX: Final = "plato-tb-"
BRIDGE: Final = f"{PREFIX}br"
CGROUP: Final = f"{PREFIX}pods"
"""The cgroup, at the root of each hierarchy, below which all containers run."""

MARK: Final = "PLATO_TESTBED"
"""Environment variable that each started process carries, with the state folder as its value; their children inherit it."""

HOST_IP: Final = "10.231.0.1"
NODE_NET: Final = "10.231.0.0/24"
POD_NET: Final = "10.232.0.0/16"
SERVICE_NET: Final = "10.233.0.0/16"
API_SERVICE_IP: Final = "10.233.0.1"
DNS_SERVICE_IP: Final = "10.233.0.10"
PRIVATE_IP: Final = "127.231.0.1"
"""Loopback address of what only the control plane talks to: etcd, and the health ports of the others."""

API_URL: Final = f"https://{HOST_IP}:6443"
ETCD_URL: Final = f"http://{PRIVATE_IP}:2379"
ETCD_PEER_URL: Final = f"http://{PRIVATE_IP}:2380"


class TestbedError(Exception):
    """The testbed cannot do what was asked; the text says why and what helps, for a person."""

    __test__ = False  # pytest would take the name for a test


class MachineError(TestbedError):
    """This machine cannot run it, whatever Plato is like: names what is missing."""


@dataclass(frozen=True)
class NodeNames:
    """One node: `number` from 1; it has its own network, mount and host-name namespaces and its own zone."""

    number: int
    folder: Path

    @property
    def name(self) -> str:
        """Name of the Kubernetes node and host name of its processes."""
        return f"node{self.number}"

    @property
    def ip(self) -> str:
        """Address of the node on the bridge."""
        return f"10.231.0.{10 + self.number}"

    @property
    def pod_net(self) -> str:
        """The node's part of POD_NET."""
        return f"10.232.{self.number}.0/24"

    @property
    def zone(self) -> str:
        """Value of its label topology.kubernetes.io/zone."""
        return f"zone-{self.number}"

    @property
    def link(self) -> str:
        """The host's end of the node's cable."""
        return f"{PREFIX}v{self.number}"

    @property
    def socket(self) -> Path:
        """Where its containerd listens."""
        return self.folder / "containerd.sock"


@dataclass(frozen=True)
class Layout:
    """`state` holds one run and is deleted by tear-down; `cache` holds binaries and stays."""

    state: Path
    cache: Path

    @property
    def marker(self) -> Path:
        """A file whose presence says that the state folder is ours to delete."""
        return self.state / "plato-testbed"

    @property
    def pids(self) -> Path:
        """Folder of pid files."""
        return self.state / "pids"

    @property
    def logs(self) -> Path:
        """Folder of one log per process."""
        return self.state / "logs"

    @property
    def pki(self) -> Path:
        """Folder of keys and certificates."""
        return self.state / "pki"

    @property
    def bin(self) -> Path:
        """Folder of links to the cached binaries."""
        return self.state / "bin"

    @property
    def images(self) -> Path:
        """Folder of the testbed's own images, as archives."""
        return self.state / "images"

    @property
    def audit_log(self) -> Path:
        """The API server's log of every write, one JSON object per line."""
        return self.logs / "audit.log"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig; certificates are inside, so the file may be copied."""
        return self.state / "admin.kubeconfig"

    @property
    def nodes(self) -> list[NodeNames]:
        """The three nodes, in order."""
        return [NodeNames(number, self.state / f"node{number}") for number in (1, 2, 3)]

    def node(self, name: str) -> NodeNames:
        """The node of that name; raises TestbedError for an unknown one."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise TestbedError(f"there is no node {name!r}; the nodes are {', '.join(node.name for node in self.nodes)}")


def layout(state: str | None = None) -> Layout:
    """The layout from the flag, PLATO_TESTBED_STATE and PLATO_CACHE, or the defaults. Paths are made absolute."""
    chosen = state or os.environ.get("PLATO_TESTBED_STATE") or "/var/lib/plato-testbed"
    cache = os.environ.get("PLATO_CACHE") or "~/.cache/plato"
    return Layout(Path(chosen).expanduser().resolve(), Path(cache).expanduser().resolve() / "testbed")
