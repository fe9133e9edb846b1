"""A node: namespaces and a cable, then containerd, kubelet and kube-proxy inside them.

The holder process keeps the node's network, mount and host-name namespaces alive; all else enters them. The node's view
of /run, /var/log, /var/lib/kubelet and /var/lib/cni is its own folder, so that kubelet, containerd and the CNI write at
their usual places and nothing of it stays on the host: mounts end with the namespace. The kernel's settings are read-only
in there, and kubelet finds those that it would change for the whole machine as it wants them.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any, Final

import grpc

from e2e.testbed import pki
from e2e.testbed.control import Kubectl
from e2e.testbed.images import PAUSE, load
from e2e.testbed.layout import BRIDGE, CGROUP, DNS_SERVICE_IP, HOST_IP, POD_NET, Layout, NodeNames, TestbedError
from e2e.testbed.machine import cgroup_roots, folders_below
from e2e.testbed.processes import Daemon, as_flags, kill_all, marked, run, until

READY_WITHIN_S: Final = 120
PROCESSES: Final = 16
"""As so many processes of the machine all containers of the nodes count when CPU time is short."""
OWN_FOLDERS: Final = ("/run", "/var/log", "/var/lib/kubelet", "/var/lib/cni")
"""Folders of the host that each node has to itself. Tear-down removes those that had to be made as mount points."""

_READ_ONLY: Final = ("/proc/sys/vm", "/proc/sys/kernel")
_TUNED: Final = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}
"""What kubelet insists on and would set machine-wide (its `setupKernelTunables`); in a node it reads these files."""

_CONTAINERD: Final = """\
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
oom_score = 0
[grpc]
  address = "{socket}"
[ttrpc]
  address = "{socket}.ttrpc"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  # A container may not be allowed to lower OOM scores; without this no pod would start in one.
  restrict_oom_score_adj = true
  sandbox_image = "{pause}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""


class Node:
    """One node of a layout; its parts are daemons named NODE-PART."""

    def __init__(self, layout: Layout, names: NodeNames) -> None:
        self.layout = layout
        self.names = names
        self.holder = Daemon(layout, f"{names.name}-holder")
        self.containerd = Daemon(layout, f"{names.name}-containerd")
        self.kubelet = Daemon(layout, f"{names.name}-kubelet")
        self.proxy = Daemon(layout, f"{names.name}-kube-proxy")

    def start(self) -> None:
        """Bring a new node up whole, with the pause image on it; the caller waits until it is Ready."""
        self.names.folder.mkdir()
        self._make_cgroups()
        self._write_containerd()
        self._write_kubelet()
        self._write_proxy()
        self._power_on()
        load(self.layout, self.names, self.layout.images / "pause.tar")
        self._start_agents()

    def inside(self, *command: str | Path) -> list[str | Path]:
        """The command, made to run in the node's namespaces; raises TestbedError when the node is not up."""
        pid = self.holder.pid
        if pid is None:
            raise TestbedError(f"{self.names.name} is not up")
        # Not `ip netns exec`: that mounts /sys anew, and runc then finds no cgroups.
        return ["nsenter", f"--target={pid}", "--net", "--mount", "--uts", *command]

    def lose(self) -> None:
        """Power loss: every process of the node dies at once, its cable is dead; its disk stays."""
        alive = self.holder.pid
        if alive is None:
            raise TestbedError(f"{self.names.name} is not up")
        network = Path(f"/proc/{alive}/ns/net").stat().st_ino

        def gone() -> bool:
            # What containerd started has no pid file: it is found by our mark and the node's network.
            pids = {pid for pid in marked(self.layout) if _network_of(pid) == network} | container_pids(self.names.name)
            kill_all(pids)
            return not pids and not (Path("/sys/class/net") / self.names.link).exists()

        until(gone, 30, f"{self.names.name} to die")

    def recover(self) -> None:
        """Boot a lost node again, with the disk it had and an empty /run; raises TestbedError while it is up."""
        if self.holder.pid is not None:
            raise TestbedError(f"{self.names.name} is up; only a lost node recovers")
        shutil.rmtree(self._own("/run"))
        self._power_on()
        self._start_agents()

    def stop_kubelet(self) -> None:
        """kubelet dies; the node's pods go on without it."""
        self.kubelet.stop(grace_s=0)

    def start_kubelet(self) -> None:
        """kubelet runs again, with the disk it had."""
        folder = self.names.folder
        flags = {
            "config": folder / "kubelet.json",
            "kubeconfig": self.layout.state / f"{self.names.name}.kubeconfig",
            "hostname-override": self.names.name,
            "node-ip": self.names.ip,
            "node-labels": f"topology.kubernetes.io/zone={self.names.zone}",
            "cert-dir": folder / "certificates",
        }
        self.kubelet.start(self.inside(self.layout.bin / "kubelet", *as_flags(flags)))

    def cut(self) -> None:
        """A partition: pull the node's cable. Its pods go on running."""
        run(["ip", "link", "set", self.names.link, "down"])

    def mend(self) -> None:
        """Plug the cable in again."""
        run(["ip", "link", "set", self.names.link, "up"])
        run(["ip", "route", "replace", self.names.pod_net, "via", self.names.ip, "dev", BRIDGE])

    def _own(self, path: str) -> Path:
        """The node's own folder that it sees at the path."""
        return self.names.folder / path.strip("/").replace("/", "-")

    def _power_on(self) -> None:
        """Namespaces, cable and containerd, which answers at the end."""
        self._hold_namespaces()
        self._connect()
        self.names.socket.unlink(missing_ok=True)
        self.containerd.start(self.inside("containerd", "--config", self.names.folder / "containerd.toml"))
        self.containerd.wait(self._answers_kubelet, 60, f"containerd of {self.names.name} to answer")

    def _answers_kubelet(self) -> bool:
        """Whether what kubelet asks first is answered: it ends at once where the CRI part is not initialized yet, which
        comes later than containerd's own answers."""
        with grpc.insecure_channel(f"unix:{self.names.socket}") as channel:
            ask = channel.unary_unary("/runtime.v1.RuntimeService/Version", bytes, bytes)
            try:
                ask(b"", timeout=5)
            except grpc.RpcError:
                return False
        return True

    def _start_agents(self) -> None:
        """kubelet and kube-proxy."""
        self.start_kubelet()
        self.proxy.start(self.inside(self.layout.bin / "kube-proxy", "--config", self.names.folder / "kube-proxy.json"))

    def _make_cgroups(self) -> None:
        for root in cgroup_roots():
            folder = root
            for part in (CGROUP, self.names.name):
                folder = folder / part
                folder.mkdir(exist_ok=True)
                for setting in ("cpuset.cpus", "cpuset.mems"):  # v1: a new cgroup has none, and nothing could run in it
                    if (folder / setting).exists() and not (folder / setting).read_text().strip():
                        (folder / setting).write_text((folder.parent / setting).read_text())
            _pass_controllers_on(root)
            _weigh(root)

    def _hold_namespaces(self) -> None:
        folder = self.names.folder
        ready = folder / "namespaces-ready"
        ready.unlink(missing_ok=True)
        steps = ["set -e", f"echo {self.names.name} > /proc/sys/kernel/hostname", "mount --make-rshared /"]
        for path in OWN_FOLDERS:
            self._own(path).mkdir(exist_ok=True)
            steps.append(f"mount --bind '{self._own(path)}' {path}")
        for path in _READ_ONLY:
            steps += [f"mount --bind {path} {path}", f"mount -o remount,bind,ro {path}"]
        (folder / "tuned").mkdir(exist_ok=True)
        for setting, value in _TUNED.items():
            shown = folder / "tuned" / setting.replace("/", "-")
            shown.write_text(f"{value}\n")
            steps.append(f"mount --bind '{shown}' /proc/sys/{setting}")
        steps += [f": > '{ready}'", "exec sleep infinity"]
        command = ["unshare", "--net", "--mount", "--uts", "--propagation", "private", "sh", "-c", "\n".join(steps)]
        self.holder.start(command)
        self.holder.wait(ready.exists, 20, f"the namespaces of {self.names.name}")

    def _connect(self) -> None:
        names = self.names
        pid = str(self.holder.pid)
        run(["ip", "link", "add", names.link, "type", "veth", "peer", "name", "eth0", "netns", pid])
        run(["ip", "link", "set", names.link, "master", BRIDGE, "up"])
        run(self.inside("ip", "link", "set", "lo", "up"))
        run(self.inside("ip", "addr", "add", f"{names.ip}/24", "dev", "eth0"))
        run(self.inside("ip", "link", "set", "eth0", "up"))
        run(self.inside("ip", "route", "add", "default", "via", HOST_IP))
        for other in self.layout.nodes:
            if other != names:
                run(self.inside("ip", "route", "add", other.pod_net, "via", other.ip))
        run(self.inside("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"))
        run(["ip", "route", "replace", names.pod_net, "via", names.ip, "dev", BRIDGE])

    def _write_containerd(self) -> None:
        names = self.names
        (names.folder / "containerd.toml").write_text(
            _CONTAINERD.format(folder=names.folder, socket=names.socket, pause=PAUSE)
        )
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": True,
            "hairpinMode": True,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": names.pod_net}]], "routes": [{"dst": "0.0.0.0/0"}]},
        }
        portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
        (names.folder / "cni").mkdir()
        network = {"cniVersion": "0.4.0", "name": "plato-tb-pods", "plugins": [bridge, portmap]}
        (names.folder / "cni" / "10-pods.conflist").write_text(json.dumps(network, indent=1))

    def _write_kubelet(self) -> None:
        names, layout = self.names, self.layout
        pki.certify(
            layout,
            names.name,
            f"system:node:{names.name}",
            organisation="system:nodes",
            ips=[names.ip],
            names=[names.name],
        )
        pki.kubeconfig(layout, names.name)
        resolver = names.folder / "resolv.conf"
        resolver.write_text(f"nameserver {HOST_IP}\n")
        config: dict[str, Any] = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(layout.pki / f"{names.name}.crt"),
            "tlsPrivateKeyFile": str(layout.pki / f"{names.name}.key"),
            "containerRuntimeEndpoint": f"unix://{names.socket}",
            "volumePluginDir": str(names.folder / "volume-plugins"),
            "clusterDomain": "cluster.local",
            "clusterDNS": [DNS_SERVICE_IP],
            "resolvConf": str(resolver),
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": True,
            "cgroupRoot": f"/{CGROUP}/{names.name}",
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "oomScoreAdj": 0,
            # A full disk or little memory on the machine is the tester's affair; pods are not evicted for it.
            "imageGCHighThresholdPercent": 99,
            "imageGCLowThresholdPercent": 98,
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            # A pod is looked at again this often, and gets a changed Secret then: a minute by default.
            "syncFrequency": "15s",
            "nodeStatusUpdateFrequency": "4s",
            "nodeLeaseDurationSeconds": 20,
            "maxPods": 60,
            "serializeImagePulls": False,
        }
        (names.folder / "kubelet.json").write_text(json.dumps(config, indent=1))

    def _write_proxy(self) -> None:
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(pki.kubeconfig(self.layout, "kube-proxy"))},
            "mode": "nftables",
            "clusterCIDR": POD_NET,
            "hostnameOverride": self.names.name,
            "conntrack": {"maxPerCore": 0},  # the table's size belongs to the whole machine
        }
        (self.names.folder / "kube-proxy.json").write_text(json.dumps(config, indent=1))


def ready(layout: Layout) -> dict[str, bool]:
    """Node name → whether Kubernetes calls it Ready, for all nodes that have registered."""
    items = Kubectl(layout).json("get", "nodes")["items"]
    return {
        item["metadata"]["name"]: any(
            condition["type"] == "Ready" and condition["status"] == "True" for condition in item["status"]["conditions"]
        )
        for item in items
    }


def container_pids(name: str = "") -> set[int]:
    """Pids of all processes in containers of the node, or of every node."""
    found: set[int] = set()
    for root in cgroup_roots():
        for folder in folders_below(root / CGROUP / name):
            with contextlib.suppress(OSError):  # it went meanwhile, or is a threaded one, whose root lists the same
                found.update(map(int, (folder / "cgroup.procs").read_text().split()))
    return found - {0}


def kill_containers(name: str = "") -> None:
    """SIGKILL to all of them."""
    kill_all(container_pids(name))


def _network_of(pid: int) -> int | None:
    """Number of the network namespace that the process is in; None when it ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return None


def _weigh(root: Path) -> None:
    """All containers together would get the CPU time of one process of the machine: let them count as many."""
    for setting, value in (("cpu.shares", 1024 * PROCESSES), ("cpu.weight", 100 * PROCESSES)):  # v1, v2
        file = root / CGROUP / setting
        if file.exists():
            file.write_text(str(value))


def _pass_controllers_on(root: Path) -> None:
    """v2 only: let the cgroups below ours have the controllers that ours has; the root's stay as they are."""
    listed = root / CGROUP / "cgroup.controllers"
    if not listed.exists():
        return
    for controller in listed.read_text().split():
        with contextlib.suppress(OSError):  # it cannot be passed on here; the containers do without its limits
            (root / CGROUP / "cgroup.subtree_control").write_text(f"+{controller}")
