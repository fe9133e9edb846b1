"""Keys and certificates of one run, by openssl: one authority, elliptic keys, 30 days; kubeconfigs with them inside."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Final

from e2e.testbed.layout import API_SERVICE_IP, API_URL, HOST_IP, Layout
from e2e.testbed.processes import run

_DAYS: Final = "30"
_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def make_authority(layout: Layout) -> None:
    """The authority, the service accounts' signing pair, and the certificates of the control plane and its clients."""
    pki = layout.pki
    pki.mkdir(mode=0o700)
    subject = ["-subj", "/CN=plato-testbed"]
    run(["openssl", "req", "-x509", *_KEY, "-keyout", pki / "ca.key", "-out", pki / "ca.crt", "-days", _DAYS, *subject])
    run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", pki / "sa.key"])
    run(["openssl", "ec", "-in", pki / "sa.key", "-pubout", "-out", pki / "sa.pub"])
    names = "localhost kubernetes kubernetes.default kubernetes.default.svc kubernetes.default.svc.cluster.local"
    certify(layout, "apiserver", "kube-apiserver", ips=[HOST_IP, API_SERVICE_IP, "127.0.0.1"], names=names.split())
    certify(layout, "admin", "plato-testbed-admin", organisation="system:masters")
    for client in ("kube-controller-manager", "kube-scheduler", "kube-proxy", "coredns"):
        certify(layout, client, f"system:{client}")


def certify(
    layout: Layout,
    file: str,
    common_name: str,
    *,
    organisation: str | None = None,
    ips: list[str] | None = None,
    names: list[str] | None = None,
) -> None:
    """Write pki/FILE.key and pki/FILE.crt, good for both ends of TLS."""
    pki = layout.pki
    subject = (f"/O={organisation}" if organisation else "") + f"/CN={common_name}"
    alternatives = [f"IP:{ip}" for ip in ips or []] + [f"DNS:{name}" for name in names or []]
    lines = ["extendedKeyUsage=serverAuth,clientAuth"]
    if alternatives:
        lines.append("subjectAltName=" + ",".join(alternatives))
    extensions = pki / f"{file}.ext"
    extensions.write_text("\n".join(lines) + "\n")
    request = run(["openssl", "req", "-new", *_KEY, "-keyout", pki / f"{file}.key", "-subj", subject])
    authority: list[str | Path] = [
        "-CA",
        pki / "ca.crt",
        "-CAkey",
        pki / "ca.key",
        "-CAcreateserial",
        "-days",
        _DAYS,
        "-extfile",
        extensions,
    ]
    run(["openssl", "x509", "-req", *authority, "-out", pki / f"{file}.crt"], stdin=request)


def kubeconfig(layout: Layout, file: str) -> Path:
    """Write and return a kubeconfig for the holder of pki/FILE.crt, with all certificates inside."""

    def inside(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    pki = layout.pki
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "testbed", "cluster": {"server": API_URL, "certificate-authority-data": inside(pki / "ca.crt")}},
        ],
        "users": [
            {
                "name": file,
                "user": {
                    "client-certificate-data": inside(pki / f"{file}.crt"),
                    "client-key-data": inside(pki / f"{file}.key"),
                },
            }
        ],
        "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": file}}],
        "current-context": "testbed",
    }
    path = layout.state / f"{file}.kubeconfig"
    path.touch(mode=0o600)
    path.write_text(json.dumps(content, indent=1))
    return path
