"""RAM and CPU of the operator with 500 gateways: a real process, a real API server, pods that are objects only.

`PLATO_E2E_KUBECONFIG=… python bench/operator_500.py [--gateways 500]` makes a PlatoCluster in the namespace e2e-500, waits
until all gateways are admitted and serve, then measures the process for a minute in which nothing happens. The pods are
bound to no node (a node that does not exist would have them collected); what would run in them is played by this process
(e2e/frame/objects.py), whose cost is not counted. It reports and judges nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from plato.topology.stored import unpack  # noqa: E402  # the path is set first

from e2e.frame.kube import Kube, Object, wait_for  # noqa: E402  # the checkout has to be on the path first
from e2e.frame.objects import NOWHERE, ObjectPods  # noqa: E402  # the path is set first
from e2e.frame.process import Operator  # noqa: E402  # the path is set first
from e2e.testbed.layout import layout  # noqa: E402  # the path is set first

NAMESPACE = "e2e-500"
CLUSTER = "big"
PORTS = {"tcp": 9600, "ws": 9601, "admin": 9609}
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
STEADY_S = 60.0


def cluster(gateways: int) -> Object:
    """The resource."""
    spec: dict[str, Any] = {
        "version": "0.1.0", "database": {"uri": {"name": "db"}}, "store": {"url": {"name": "kv"}},
        "auth": {"guests": True}, "state": NOWHERE, "msg": NOWHERE, "ipconfig": NOWHERE,
        "gateways": {"initialReplicas": gateways, "template": {**NOWHERE, "ports": PORTS}},
    }  # fmt: skip
    return {"apiVersion": "plato.im/v1alpha1", "kind": "PlatoCluster", "metadata": {"name": CLUSTER}, "spec": spec}


def cpu_s(pid: int) -> float:
    """User and system time of a process, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def memory_mb(pid: int, field: str) -> float:
    """VmRSS or VmHWM of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def admitted(kube: Kube) -> int:
    """Gateways in the record."""
    found = kube.get("ConfigMap", f"{CLUSTER}-topology")
    return len(unpack(found).gateways) if found is not None else 0


def measure(kube: Kube, folder: Path, gateways: int) -> dict[str, float]:
    """Brings it up, measures, leaves the namespace to the caller."""
    kube.secret("db", {"uri": "postgresql://nowhere"})
    kube.secret("kv", {"url": "redis://nowhere"})
    operator, restarts = Operator(folder, kube.kubeconfig, NAMESPACE, "operator-0"), 0
    try:
        with ObjectPods(kube.kubeconfig, NAMESPACE, CLUSTER, PORTS["admin"], step_s=2.0) as pods:
            kube.apply(cluster(gateways))
            began = time.monotonic()

            def serving() -> bool:
                nonlocal operator, restarts
                if operator.process.poll() is not None:  # as a kubelet does; it lost its Lease on a busy machine
                    operator, restarts = Operator(folder, kube.kubeconfig, NAMESPACE, "operator-0"), restarts + 1
                status = (kube.get("GatewayPool", f"{CLUSTER}-edge") or {}).get("status", {})
                return bool(status.get("readyReplicas") == gateways)

            wait_for(f"{gateways} gateways serve", serving, 900, seen=lambda: (admitted(kube), pods.troubles[-3:]))
            up_s = time.monotonic() - began
            pods.step_s = 20.0
            passes = operator.metric("plato_operator_passes_total")
            wait_for("it rests", lambda: operator.metric("plato_operator_passes_total") >= passes + 3, 120)
            pid = operator.process.pid
            names = (
                "plato_operator_passes_total",
                "plato_operator_pass_seconds_sum",
                "plato_operator_pass_seconds_count",
            )
            before, spent = [operator.metric(n) for n in names], cpu_s(pid)
            time.sleep(STEADY_S)
            after = [operator.metric(n) for n in names]
            done = after[2] - before[2]
            return {
                "gateways": gateways, "up_s": up_s, "restarts": restarts,
                "rss_mb": memory_mb(pid, "VmRSS"), "most_rss_mb": memory_mb(pid, "VmHWM"),
                "cpu_cores": (cpu_s(pid) - spent) / STEADY_S, "passes_per_minute": after[0] - before[0],
                "pass_s": (after[1] - before[1]) / done if done else float("nan"), "load": os.getloadavg()[0],
            }  # fmt: skip
    finally:
        operator.end()


def main() -> int:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gateways", type=int, default=500)
    arguments = parser.parse_args()
    kubeconfig = os.environ.get("PLATO_E2E_KUBECONFIG")
    if not kubeconfig:
        print("PLATO_E2E_KUBECONFIG names no cluster", file=sys.stderr)
        return 2
    here = layout()
    kube = Kube(Path(kubeconfig), NAMESPACE, here.bin if here.bin.exists() else None)
    kube.make_namespace({})
    kube.done("apply", "--server-side", "-f", str(HERE.parent / "crds"))
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(kube, Path(folder), arguments.gateways)
    finally:
        kube.drop_namespace(600)
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
