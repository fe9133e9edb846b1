"""The control plane: etcd → API server → controller manager, scheduler, CoreDNS, all as processes of the host.

The API server listens on the bridge's address only, which pods and the host reach; etcd on a loopback address. Each
write is logged to `Layout.audit_log`. It is throw-away: etcd does not fsync, and tear-down deletes its data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from e2e.testbed import pki
from e2e.testbed.layout import (
    BRIDGE,
    DNS_SERVICE_IP,
    ETCD_PEER_URL,
    ETCD_URL,
    HOST_IP,
    PRIVATE_IP,
    SERVICE_NET,
    Layout,
)
from e2e.testbed.processes import Daemon, as_flags, run

READY_WITHIN_S: Final = 120
TOLERATION_S: Final = 15
"""How long a pod stays bound to a node that is not ready or unreachable; Kubernetes's own 300 s would make tests slow."""

_LOG_POLICY: Final = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "Metadata", "verbs": ["create", "update", "patch", "delete", "deletecollection"]},
        {"level": "None"},
    ],
}
_COREFILE: Final = """\
.:53 {{
    bind {host_ip}
    errors
    cache 5
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 5
    }}
{forward}}}
"""


@dataclass(frozen=True)
class Kubectl:
    """kubectl of the testbed's own build, as its administrator."""

    layout: Layout

    def __call__(self, *words: str, stdin: str | None = None, quiet: bool = False) -> str:
        """Run it and return its output; raises TestbedError unless `quiet`."""
        program: list[str | Path] = [self.layout.bin / "kubectl", "--kubeconfig", self.layout.kubeconfig]
        return run([*program, *words], stdin=stdin, quiet=quiet)

    def json(self, *words: str) -> Any:
        """The decoded output of `kubectl … -o json`."""
        return json.loads(self(*words, "-o", "json"))

    def apply(self, objects: Iterable[dict[str, Any]]) -> None:
        """Server-side apply of the objects."""
        body = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self("apply", "--server-side", "-f", "-", stdin=json.dumps(body))


def add_bridge() -> None:
    """The bridge that nodes hang on, with the host's address."""
    run(["ip", "link", "add", BRIDGE, "type", "bridge"])
    run(["ip", "addr", "add", f"{HOST_IP}/24", "dev", BRIDGE])
    run(["ip", "link", "set", BRIDGE, "up"])


def start(layout: Layout) -> None:
    """Bring it up; returns when the API server is ready and its companions run. Raises TestbedError."""
    pki.make_authority(layout)
    pki.kubeconfig(layout, "admin")
    _start_etcd(layout)
    _start_api_server(layout)
    _start_controller_manager(layout)
    _start_scheduler(layout)
    _start_dns(layout)


def api_answers(layout: Layout) -> bool:
    """Whether the API server says that it is ready."""
    return Kubectl(layout)("get", "--raw", "/readyz", "--request-timeout=3s", quiet=True).strip() == "ok"


def _start_etcd(layout: Layout) -> None:
    command: list[str | Path] = [layout.bin / "etcd", "--data-dir", layout.state / "etcd", "--unsafe-no-fsync"]
    command += ["--listen-client-urls", ETCD_URL, "--advertise-client-urls", ETCD_URL]
    command += ["--listen-peer-urls", ETCD_PEER_URL, "--initial-advertise-peer-urls", ETCD_PEER_URL]
    command += ["--initial-cluster", f"default={ETCD_PEER_URL}", "--log-level", "warn"]
    Daemon(layout, "etcd").start(command)


def _start_api_server(layout: Layout) -> None:
    certificates = layout.pki
    policy = layout.state / "audit-policy.json"
    policy.write_text(json.dumps(_LOG_POLICY, indent=1))
    flags = {
        "etcd-servers": ETCD_URL,
        "bind-address": HOST_IP,
        "advertise-address": HOST_IP,
        "secure-port": 6443,
        "tls-cert-file": certificates / "apiserver.crt",
        "tls-private-key-file": certificates / "apiserver.key",
        "client-ca-file": certificates / "ca.crt",
        "kubelet-client-certificate": certificates / "admin.crt",
        "kubelet-client-key": certificates / "admin.key",
        "service-account-key-file": certificates / "sa.pub",
        "service-account-signing-key-file": certificates / "sa.key",
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-cluster-ip-range": SERVICE_NET,
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": "NodeRestriction",
        "allow-privileged": "true",
        # Node names do not resolve on the host: exec and logs go by address.
        "kubelet-preferred-address-types": "InternalIP",
        # The host has no kube-proxy: webhooks and aggregated APIs are called at their pods' addresses.
        "enable-aggregator-routing": "true",
        "requestheader-client-ca-file": certificates / "ca.crt",
        "requestheader-allowed-names": "plato-testbed-admin",
        "requestheader-username-headers": "X-Remote-User",
        "requestheader-group-headers": "X-Remote-Group",
        "requestheader-extra-headers-prefix": "X-Remote-Extra-",
        "proxy-client-cert-file": certificates / "admin.crt",
        "proxy-client-key-file": certificates / "admin.key",
        "default-not-ready-toleration-seconds": TOLERATION_S,
        "default-unreachable-toleration-seconds": TOLERATION_S,
        "audit-policy-file": policy,
        "audit-log-path": layout.audit_log,
        "audit-log-maxsize": 200,  # MB; with the two older files this bounds the disk it takes
        "audit-log-maxbackup": 2,
    }
    server = Daemon(layout, "kube-apiserver")
    server.start([layout.bin / "kube-apiserver", *as_flags(flags)])
    server.wait(lambda: api_answers(layout), READY_WITHIN_S, "the API server to be ready")


def _start_controller_manager(layout: Layout) -> None:
    own = pki.kubeconfig(layout, "kube-controller-manager")
    flags = {
        "kubeconfig": own,
        "authentication-kubeconfig": own,
        "authorization-kubeconfig": own,
        "service-account-private-key-file": layout.pki / "sa.key",
        "root-ca-file": layout.pki / "ca.crt",
        "cluster-signing-cert-file": layout.pki / "ca.crt",
        "cluster-signing-key-file": layout.pki / "ca.key",
        "use-service-account-credentials": "true",
        "leader-elect": "false",
        "bind-address": PRIVATE_IP,
        "node-monitor-grace-period": "20s",
    }
    Daemon(layout, "kube-controller-manager").start([layout.bin / "kube-controller-manager", *as_flags(flags)])


def _start_scheduler(layout: Layout) -> None:
    own = pki.kubeconfig(layout, "kube-scheduler")
    command: list[str | Path] = [layout.bin / "kube-scheduler", "--leader-elect=false", "--bind-address", PRIVATE_IP]
    for flag in ("--kubeconfig", "--authentication-kubeconfig", "--authorization-kubeconfig"):
        command += [flag, own]
    Daemon(layout, "kube-scheduler").start(command)


def _start_dns(layout: Layout) -> None:
    """CoreDNS as a process, behind the usual Service: so that draining nodes never takes names away."""
    own = pki.kubeconfig(layout, "coredns")
    rules = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces", "endpoints"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "plato-tb-coredns"}
    user = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "system:coredns"}
    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "plato-tb-coredns"}}
    where = {"name": "kube-dns", "namespace": "kube-system"}
    ports = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
    Kubectl(layout).apply(
        [
            {**rbac, "kind": "ClusterRole", "rules": rules},
            {**rbac, "kind": "ClusterRoleBinding", "roleRef": role, "subjects": [user]},
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": where,
                "spec": {"clusterIP": DNS_SERVICE_IP, "ports": ports},
            },
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {**where, "labels": {"kubernetes.io/service-name": "kube-dns"}},
                "addressType": "IPv4",
                "endpoints": [{"addresses": [HOST_IP], "conditions": {"ready": True}}],
                "ports": ports,
            },
        ]
    )
    corefile = layout.state / "Corefile"
    # Names outside the cluster are asked of the machine's own servers, if it has any.
    outside = Path("/etc/resolv.conf")
    has_servers = outside.exists() and any(line.startswith("nameserver") for line in outside.read_text().splitlines())
    forward = f"    forward . {outside}\n" if has_servers else ""
    corefile.write_text(_COREFILE.format(host_ip=HOST_IP, kubeconfig=own, forward=forward))
    Daemon(layout, "coredns").start([layout.bin / "coredns", "-conf", corefile])
