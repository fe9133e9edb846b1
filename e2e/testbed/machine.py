"""What the testbed needs of the machine, and saying in words what is missing. Only `install` changes anything."""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import platform
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Final

from e2e.testbed.layout import BRIDGE, HOST_IP, NODE_NET, POD_NET, SERVICE_NET, MachineError, TestbedError
from e2e.testbed.processes import PATH, run

PACKAGES: Final = {
    "containerd": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "nft": "nftables",
    "conntrack": "conntrack",
    "iptables": "iptables",  # the CNI's portmap and masquerade call it
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "openssl": "openssl",
    "lua5.4": "lua5.4",  # runs the health check for Argo CD
    "nsenter": "util-linux",
}
"""Program (a name on the search path, or a file) → the Debian package that brings it."""

GO_AT_LEAST: Final = (1, 26)
FREE_BYTES: Final = 6 << 30
"""Room for Go's own cache (3 GB), the modules and the binaries of a cold build."""
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000


def missing_packages() -> list[str]:
    """Debian packages whose programs are not there, sorted."""
    return sorted(
        package
        for program, package in PACKAGES.items()
        if not (Path(program).exists() if program.startswith("/") else shutil.which(program, path=PATH))
    )


def install() -> None:
    """Install the missing packages by apt-get; raises TestbedError that names them when that cannot be."""
    packages = missing_packages()
    if not packages:
        return
    wanted = " ".join(packages)
    if shutil.which("apt-get") is None:
        raise MachineError(
            f"these programs' Debian packages are missing and there is no apt-get to install them: {wanted}"
        )
    print(f"installing {wanted} by apt-get", flush=True)
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        done = subprocess.run(["apt-get", *command], env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MachineError(
                f"apt-get {command[0]} failed; install these yourself: {wanted}\n{done.stderr.strip()[-800:]}"
            )
    left = missing_packages()
    if left:
        raise MachineError(f"installed, yet their programs are not on {PATH}: {' '.join(left)}")


def check_go() -> str:
    """The words of `go version`; raises TestbedError when Go is missing or too old."""
    if shutil.which("go") is None:
        raise MachineError(
            "there is no `go` on the PATH; the testbed builds Kubernetes from source, with Go 1.26 or later"
        )
    # From the root, where no go.mod can ask for another toolchain.
    version = subprocess.run(["go", "version"], capture_output=True, text=True, check=False, cwd="/").stdout.strip()
    found = re.search(r"go(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < GO_AT_LEAST:
        raise MachineError(f"Go 1.26 or later is needed; this is {version or 'a go that does not tell its version'}")
    return version


def check(state: Path) -> None:
    """Raise one TestbedError that lists all that keeps this machine from running the testbed; say nothing when it can."""
    if platform.system() != "Linux":
        raise MachineError(
            f"the testbed needs Linux, this is {platform.system()}; use PLATO_E2E_KUBECONFIG with another cluster"
        )
    if os.geteuid() != 0:
        raise MachineError("the testbed needs root, for namespaces and mounts: run it with sudo")
    troubles = [trouble for trouble in (_namespaces(), _cgroups(), _room(state)) if trouble]
    if troubles:
        raise MachineError("; ".join(troubles))


def check_network() -> None:
    """Raise TestbedError when the fixed addresses or ports are taken by another."""
    if (Path("/sys/class/net") / BRIDGE).exists():
        raise TestbedError(f"the bridge {BRIDGE} is there already: another testbed with another state folder runs here")
    ours = [ipaddress.ip_network(net) for net in (NODE_NET, POD_NET, SERVICE_NET)]
    for route in json.loads(run(["ip", "-json", "-4", "route", "show", "table", "all"]) or "[]"):
        target = str(route.get("dst", "default"))
        if target == "default":
            continue
        taken = ipaddress.ip_network(target, strict=False)
        # A wide route, such as a private network's 10.0.0.0/8, gives way to our narrower ones.
        if taken.prefixlen >= 16 and any(taken.overlaps(net) for net in ours):
            raise TestbedError(
                f"the testbed's addresses ({NODE_NET}, {POD_NET}, {SERVICE_NET}) overlap this machine's route {taken}"
            )
    # A server on all addresses would catch the bridge's too.
    for kind, port in ((socket.SOCK_STREAM, 6443), (socket.SOCK_DGRAM, 53), (socket.SOCK_STREAM, 53)):
        with socket.socket(socket.AF_INET, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.231.0.1", port))
            except OSError as error:
                raise TestbedError(
                    f"port {port} is taken on all addresses, so it cannot be had on {HOST_IP}: {error}"
                ) from error


def _namespaces() -> str | None:
    """Try in a child what a node needs: new network, mount and host-name namespaces."""
    libc = ctypes.CDLL(None, use_errno=True)
    child = os.fork()
    if child == 0:
        failed = libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWNET)
        os._exit(1 if failed else 0)
    if os.waitpid(child, 0)[1]:
        return (
            "this root may not make network, mount and host-name namespaces (a container needs CAP_SYS_ADMIN for that)"
        )
    return None


def _cgroups() -> str | None:
    hierarchies = cgroup_roots()
    if not hierarchies:
        return "no cgroup file system is mounted"
    if not all(os.access(root, os.W_OK) for root in hierarchies):
        return "the cgroup file systems are mounted read-only"
    return None


def cgroup_roots() -> list[Path]:
    """Where cgroup hierarchies are mounted: one for v2, one per controller for v1."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [Path(fields[1]) for fields in mounts if fields[2] in ("cgroup", "cgroup2")]


def folders_below(top: Path) -> list[Path]:
    """The folder and all below it, parents first. Those that vanish meanwhile, as cgroups do, are passed over."""
    return [Path(path) for path, _, _ in os.walk(top)]  # Path.rglob raises for them


def _room(state: Path) -> str | None:
    folder = next(parent for parent in (state, *state.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    return None if free >= FREE_BYTES else f"{folder} has {free >> 20} MB free; 6 GB are needed"
