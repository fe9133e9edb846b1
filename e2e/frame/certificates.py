"""Certificates for the platform under test, as cert-manager would put them there: Secrets of type kubernetes.io/tls."""

from __future__ import annotations

import base64

import trustme

from e2e.frame.kube import Kube


def put(kube: Kube, name: str, authority: trustme.CA, host: str, *, with_ca: bool = True) -> str:
    """A new certificate for this host name, signed by this authority, in the Secret of this name; returns its chain, PEM.

    with_ca: whether ca.crt lies beside it, which TLS inside needs and TLS toward clients does not.
    """
    made = authority.issue_cert(host)
    chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
    data = {"tls.crt": chain, "tls.key": made.private_key_pem.bytes()}
    if with_ca:
        data["ca.crt"] = authority.cert_pem.bytes()
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/tls",
            "metadata": {"name": name},
            "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
        }
    )
    return chain.decode()
