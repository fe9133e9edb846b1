"""Ending the testbed and seeing that nothing is left.

Order: kubelets first, so that nothing comes back; then every process in a container, the node's containerd and what it
left running, the namespaces' holders, the control plane. With the last process of a node its namespaces and mounts go.
What remains are the bridge, the cables, the cgroups and the state folder. The API server is killed: its database is
deleted anyway, and it would take a minute to end by itself.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from e2e.testbed.layout import BRIDGE, CGROUP, PREFIX, Layout, TestbedError
from e2e.testbed.machine import cgroup_roots, folders_below
from e2e.testbed.node import OWN_FOLDERS, container_pids, kill_containers
from e2e.testbed.processes import Daemon, daemons, kill_all, marked, run, until

_GONE_WITHIN_S = 30


def check_state(layout: Layout) -> None:
    """Raise TestbedError when the state folder is another's, or lies where nodes would not see it."""
    state = layout.state
    if any(state.is_relative_to(path) for path in OWN_FOLDERS):
        raise TestbedError(
            f"the state folder may not lie below {', '.join(OWN_FOLDERS)}: nodes have their own of these"
        )
    if state.exists() and (not state.is_dir() or (any(state.iterdir()) and not layout.marker.exists())):
        raise TestbedError(f"{state} is not empty and not the testbed's; choose another folder with --state")


def claim(layout: Layout) -> None:
    """Make the state folder, marked as ours, and the mount points that nodes need. `check_state` comes first."""
    layout.state.mkdir(parents=True, exist_ok=True)
    made = [path for path in OWN_FOLDERS if not Path(path).exists()]
    layout.marker.write_text(json.dumps({"made": made}))
    for path in made:
        Path(path).mkdir()
    for folder in (layout.pids, layout.logs, layout.bin, layout.images):
        folder.mkdir()


def down(layout: Layout) -> None:
    """End all of it; does nothing when there is nothing. Raises TestbedError that lists what could not be removed."""
    if not layout.marker.exists():
        left = leftovers(layout)
        if left:
            raise TestbedError(f"{layout.state} is not there, yet another testbed's parts are: {'; '.join(left)}")
        return
    running = {daemon.name: daemon for daemon in daemons(layout)}

    def stop(part: str, grace_s: float) -> None:
        for name, daemon in running.items():
            if name.endswith(part):
                daemon.stop(grace_s)

    stop("-kubelet", 2)
    stop("-kube-proxy", 2)
    _end_containers()
    stop("-containerd", 5)
    stop("-holder", 0)
    for daemon in running.values():
        _end(daemon)
    _end_marked(layout)
    _remove_links()
    _remove_cgroups()
    _remove_folders(layout)
    left = leftovers(layout)
    if left:
        raise TestbedError(f"this is left and must be removed by hand: {'; '.join(left)}")


def leftovers(layout: Layout) -> list[str]:
    """What of a testbed is on this machine, in words; empty after `down`."""
    left = [f"process {pid}" for pid in sorted(marked(layout) | container_pids())]
    left += [f"mount {path}" for path in _mounts_below(layout.state)]
    left += [f"link {path.name}" for path in sorted(Path("/sys/class/net").glob(f"{PREFIX}*"))]
    left += [f"cgroup {root / CGROUP}" for root in cgroup_roots() if (root / CGROUP).exists()]
    if layout.marker.exists():
        left.append(f"folder {layout.state}")
    return left


def _end(daemon: Daemon) -> None:
    daemon.stop(0 if daemon.name in ("kube-apiserver", "etcd") or daemon.pid is None else 2)


def _end_containers() -> None:
    def ended() -> bool:
        kill_containers()
        return not container_pids()

    until(ended, _GONE_WITHIN_S, "the containers to end")


def _end_marked(layout: Layout) -> None:
    """What containerd started and left: its shims. They have no pid file and outlive it."""

    def ended() -> bool:
        pids = marked(layout)
        kill_all(pids)
        return not pids

    until(ended, _GONE_WITHIN_S, "the containers' shims to end")


def _remove_links() -> None:
    """The cables go with their node's namespace, which the kernel clears a moment after its last process."""
    for path in sorted(Path("/sys/class/net").glob(f"{PREFIX}v*")):
        run(["ip", "link", "del", path.name], quiet=True)
    if (Path("/sys/class/net") / BRIDGE).exists():
        run(["ip", "link", "del", BRIDGE])
    until(lambda: not list(Path("/sys/class/net").glob(f"{PREFIX}*")), _GONE_WITHIN_S, "the links to go")


def _remove_cgroups() -> None:
    """A cgroup can be removed once the kernel has let go of its last process and of the cgroups below."""

    def gone() -> bool:
        for root in cgroup_roots():
            for folder in reversed(folders_below(root / CGROUP)):
                with contextlib.suppress(OSError):  # busy yet; tried again
                    folder.rmdir()
        return not any((root / CGROUP).exists() for root in cgroup_roots())

    until(gone, _GONE_WITHIN_S, "the cgroups to go")


def _mounts_below(folder: Path) -> list[str]:
    fields = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    targets = [entry[1].replace("\\040", " ") for entry in fields]
    return sorted((target for target in targets if Path(target).is_relative_to(folder)), reverse=True)


def _remove_folders(layout: Layout) -> None:
    for target in _mounts_below(layout.state):
        run(["umount", "--lazy", target])
    if _mounts_below(layout.state):
        raise TestbedError(f"something is still mounted below {layout.state}; nothing there was deleted")
    made = json.loads(layout.marker.read_text() or "{}").get("made", [])
    for path in made:
        with contextlib.suppress(OSError):  # another put something there meanwhile: it stays
            Path(path).rmdir()
    shutil.rmtree(layout.state)
