"""`make testbed-check`: proves that the testbed is a Kubernetes, and that it goes as it came.

Takes a picture of the machine and brings the testbed up. Asserts: a second `up` says that it runs; a pod becomes Ready on
each node; logs, exec, names and a Service answer, from pods, from a node and from the host; a pod ends gracefully; a cut
node is noticed; a lost node's pod moves and the node comes back; the audit log shows the writes. Takes it down, compares
the pictures, and does up and down once more with warm binaries. It refuses to begin while a testbed runs, so that it never
takes down another's.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from e2e.testbed import audit, images
from e2e.testbed.control import Kubectl
from e2e.testbed.layout import DNS_SERVICE_IP, Layout, TestbedError, layout
from e2e.testbed.machine import cgroup_roots
from e2e.testbed.node import Node, container_pids, ready
from e2e.testbed.processes import marked, run, until
from e2e.testbed.teardown import leftovers

PODS_WITHIN_S: Final = 90
MOVED_WITHIN_S: Final = 120
GRACE_S: Final = 20
KERNEL_SETTINGS: Final = (
    "vm/overcommit_memory",
    "kernel/panic",
    "kernel/panic_on_oops",
    "net/ipv4/ip_forward",
    "kernel/hostname",
)


def main() -> int:
    """Run all steps; exit code 0 when every one held."""
    here = layout()
    try:
        if leftovers(here):
            raise TestbedError("a testbed is on this machine already; `make testbed-down` first, or use that one")
        before = picture()
        _step("up", lambda: _command("up"))
        try:
            _while_up(here)
        except TestbedError:
            _diagnose(here)
            raise
        finally:
            _step("down", lambda: _command("down"))
        _equal(before, picture())
        _step("up again, with warm binaries", lambda: _command("up"))
        try:
            _step("pods Ready on each node", lambda: _pods(Kubectl(here), here))
        finally:
            _step("down again", lambda: _command("down"))
        _equal(before, picture())
        if leftovers(here):
            raise TestbedError(f"left behind: {leftovers(here)}")
    except TestbedError as error:
        print(f"testbed-check: {error}", file=sys.stderr)
        return 1
    print("the testbed holds: all steps passed and nothing is left")
    return 0


def _while_up(here: Layout) -> None:
    kubectl = Kubectl(here)
    if "runs already" not in _command("up"):
        raise TestbedError("the second `up` did not say that it runs")
    _command("status")
    print(f"  memory of its processes: {_memory_bytes(here) >> 20} MB", flush=True)
    _step("pods Ready on each node", lambda: _pods(kubectl, here))
    print(f"  memory with three pods: {_memory_bytes(here) >> 20} MB", flush=True)
    _step("logs and exec", lambda: _logs_and_exec(kubectl))
    _step("names and a Service", lambda: _service(kubectl, here))
    _step("a pod ends gracefully", lambda: _graceful_end(kubectl))
    _step("a cut node is noticed, and mended", lambda: _cut(kubectl, here))
    _step("a lost node's pod moves, and the node comes back", lambda: _lost(kubectl, here))
    _step("the audit log shows the writes", lambda: _audit(here))


def _diagnose(here: Layout) -> None:
    """Show, before tear-down removes it, what tells why a step failed."""
    print(Kubectl(here)("get", "nodes,pods,events", "-A", "-o", "wide", quiet=True), file=sys.stderr)
    for log in sorted(here.logs.glob("node*-*.log")):
        errors = [line[:300] for line in log.read_text(errors="replace").splitlines() if not line.startswith("I")]
        print(f"-- {log}", *errors[-8:], sep="\n", file=sys.stderr)


def _pods(kubectl: Kubectl, here: Layout) -> None:
    _command("load", str(here.images / "box.tar"))
    selector = {"app": "box"}
    container = {
        "name": "box",
        "image": images.BOX,
        "imagePullPolicy": "Never",
        "args": ["serve"],
        "ports": [{"containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}},
        "securityContext": {
            "runAsNonRoot": True,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    template = {
        "metadata": {"labels": selector},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": GRACE_S},
    }
    each = {"selector": {"matchLabels": selector}, "template": template}
    service = {"selector": selector, "ports": [{"port": 80, "targetPort": 8080}]}
    kubectl.apply(
        [
            {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "box"}, "spec": each},
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "box"}, "spec": service},
        ]
    )
    nodes = {names.name for names in here.nodes}
    _until(
        lambda: {pod["spec"]["nodeName"] for pod in _ready_pods(kubectl, "box")} == nodes,
        PODS_WITHIN_S,
        "a Ready pod on each node",
    )


def _logs_and_exec(kubectl: Kubectl) -> None:
    for pod in _ready_pods(kubectl, "box"):
        name = pod["metadata"]["name"]
        if f"serving {name}" not in kubectl("logs", name):
            raise TestbedError(f"kubectl logs {name} does not show what it printed")
        if kubectl("exec", name, "--", "/box", "hostname").strip() != name:
            raise TestbedError(f"kubectl exec in {name} does not answer with its name")


def _service(kubectl: Kubectl, here: Layout) -> None:
    names = {pod["metadata"]["name"] for pod in _ready_pods(kubectl, "box")}
    address: str = kubectl.json("get", "service", "box")["spec"]["clusterIP"]
    for pod in sorted(names):

        def resolves(pod: str = pod) -> bool:
            return kubectl("exec", pod, "--", "/box", "resolve", "box", quiet=True).strip() == address

        _until(resolves, 20, f"{pod} to resolve `box`")
        met: set[str] = set()

        def ask(pod: str = pod, met: set[str] = met) -> bool:
            met.add(kubectl("exec", pod, "--", "/box", "get", "http://box.default.svc.cluster.local/").strip())
            return met == names

        # Endpoints are drawn at random: after some asks each has answered, the ones on other nodes too.
        _until(ask, 60, f"{pod} to meet all three pods through the Service")
    # From the node itself, as a hostNetwork pod would, and from the host straight to a pod, as webhooks are called.
    program = next(here.cache.glob("images-*/box"))
    run(Node(here, here.nodes[0]).inside(program, "get", f"http://{address}/"))
    run([program, "get", f"http://{_ready_pods(kubectl, 'box')[1]['status']['podIP']}:8080/"])
    if DNS_SERVICE_IP not in kubectl(
        "get", "service", "-n", "kube-system", "kube-dns", "-o", "jsonpath={.spec.clusterIP}"
    ):
        raise TestbedError("the DNS Service has another address than pods are told")


def _graceful_end(kubectl: Kubectl) -> None:
    name = _ready_pods(kubectl, "box")[0]["metadata"]["name"]
    follow: list[str] = [
        str(kubectl.layout.bin / "kubectl"),
        "--kubeconfig",
        str(kubectl.layout.kubeconfig),
        "logs",
        "-f",
        name,
    ]
    with subprocess.Popen(follow, stdout=subprocess.PIPE, text=True) as logs:
        began = time.monotonic()
        kubectl("delete", "pod", name, "--wait=true", f"--timeout={GRACE_S}s")
        took_s = time.monotonic() - began
        words = logs.communicate(timeout=30)[0]
    if "asked to stop" not in words or "stopped" not in words:
        raise TestbedError(f"{name} was not let end by itself; its log: {words!r}")
    if not 2 <= took_s < GRACE_S:
        raise TestbedError(f"{name} took {took_s:.1f} s to end; it lingers for 2 s and had {GRACE_S}")
    _until(lambda: len(_ready_pods(kubectl, "box")) == 3, PODS_WITHIN_S, "the pod's successor")


def _cut(kubectl: Kubectl, here: Layout) -> None:
    node = here.nodes[1].name
    inside = container_pids(node)
    _command("node", "cut", node)
    _until(lambda: not ready(here)[node], 60, f"{node} to be called not Ready")
    if not inside <= container_pids(node):
        raise TestbedError("a partition ended containers")
    _command("node", "mend", node)
    _until(lambda: ready(here)[node], 60, f"{node} to be Ready again")
    _until(lambda: len(_ready_pods(kubectl, "box")) == 3, PODS_WITHIN_S, "three pods after the partition")


def _lost(kubectl: Kubectl, here: Layout) -> None:
    container = {"name": "box", "image": images.BOX, "args": ["serve"], "imagePullPolicy": "Never"}
    spec = {"terminationGracePeriodSeconds": 1, "containers": [container]}
    labels = {"app": "mover"}
    deployment = {
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": spec},
    }
    kubectl.apply([{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "mover"}, "spec": deployment}])
    _until(lambda: len(_ready_pods(kubectl, "mover")) == 1, PODS_WITHIN_S, "the mover")
    first = _ready_pods(kubectl, "mover")[0]["spec"]["nodeName"]
    _command("node", "lose", first)
    if container_pids(first):
        raise TestbedError(f"containers of {first} outlived it")

    def moved() -> bool:
        return any(pod["spec"]["nodeName"] != first for pod in _ready_pods(kubectl, "mover"))

    _until(moved, MOVED_WITHIN_S, "the lost node's pod to run elsewhere")
    _command("node", "recover", first)
    _until(lambda: ready(here)[first], 90, f"{first} to be Ready again")
    _until(lambda: len(_ready_pods(kubectl, "box")) == 3, PODS_WITHIN_S, "three pods after the loss")


def _audit(here: Layout) -> None:
    seen = list(audit.writes(here))
    made = [write for write in seen if write.resource == "daemonsets" and write.name == "box" and write.verb == "patch"]
    if not made or made[0].user != "plato-testbed-admin":
        raise TestbedError("the audit log does not show who applied the DaemonSet")
    bound = [write for write in seen if write.resource == "pods/binding" and write.user == "system:kube-scheduler"]
    if len(bound) < 3:
        raise TestbedError("the audit log does not show the scheduler's bindings")
    if list(audit.writes(here, since="9999")):
        raise TestbedError("`since` lets older writes through")


def picture() -> dict[str, Any]:
    """What the testbed could leave behind, so that two pictures can be compared."""
    cgroups = {str(folder) for root in cgroup_roots() for folder in root.iterdir() if folder.is_dir()}
    folders = (
        "/run",
        "/run/netns",
        "/var/lib",
        "/var/log",
        "/var/log/containers",
        "/opt",
        "/etc/cni",
        "/usr/libexec",
        "/var/run",
    )
    return {
        "links": sorted(path.name for path in Path("/sys/class/net").iterdir()),
        "routes": run(["ip", "-4", "route", "show", "table", "main"]),
        "firewall": run(["nft", "list", "ruleset"]),
        "mounts": sorted(line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()),
        "namespaces": _namespaces(),
        "cgroups": sorted(cgroups),
        "controllers": {str(root): _text(root / "cgroup.subtree_control") for root in cgroup_roots()},
        "folders": {folder: _listing(Path(folder)) for folder in folders},
        "kernel": {name: _text(Path("/proc/sys") / name) for name in KERNEL_SETTINGS},
        "processes": sorted(marked(layout()) | container_pids()),
    }


def _listing(folder: Path) -> list[str] | None:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else None


def _namespaces() -> list[str]:
    """Network namespaces that some process is in."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(str(entry.readlink()))
        except OSError:  # ended meanwhile
            continue
    return sorted(found)


def _text(file: Path) -> str:
    return file.read_text().strip() if file.exists() else ""


def _equal(before: dict[str, Any], after: dict[str, Any]) -> None:
    changed = [f"{what}: {before[what]!r} became {after[what]!r}" for what in before if before[what] != after[what]]
    if changed:
        raise TestbedError("the machine is not as it was; " + "; ".join(changed))
    print(
        "  the machine is as it was: links, routes, firewall, mounts, namespaces, cgroups, folders, kernel settings",
        flush=True,
    )


def _ready_pods(kubectl: Kubectl, app: str) -> list[dict[str, Any]]:
    """Pods of that label that are Ready and not being deleted, by name."""
    items: list[dict[str, Any]] = kubectl.json("get", "pods", "-l", f"app={app}", "--sort-by=.metadata.name")["items"]
    return [
        item
        for item in items
        if "deletionTimestamp" not in item["metadata"]
        and any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in item["status"].get("conditions", [])
        )
    ]


def _memory_bytes(here: Layout) -> int:
    """Proportional memory of all processes of the testbed."""
    total = 0
    for pid in marked(here) | container_pids():
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:  # ended meanwhile
            continue
        total += sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


def _command(*words: str) -> str:
    """A command of the testbed, as a person would call it; raises TestbedError with its output."""
    return run([sys.executable, "-m", "e2e.testbed", *words])


def _until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    until(condition, within_s, what, poll_s=0.3)


def _step(what: str, action: Callable[[], object]) -> None:
    began = time.monotonic()
    action()
    print(f"  {what}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
