"""What `helm test` runs: makes the sample PlatoCluster, waits until it is Ready, sends a message through it, deletes it.

In the image of msg, which has the client and no library for the API server: six calls, made by hand. Reads the sample from
/etc/plato-test/cluster.json and the development key from /etc/plato-keys/dev.key.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from plato.client import Client

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SAMPLE: dict[str, Any] = json.loads(Path("/etc/plato-test/cluster.json").read_text(encoding="utf-8"))
NAMESPACE: str = SAMPLE["metadata"]["namespace"]
CLUSTER: str = SAMPLE["metadata"]["name"]
PORT: int = SAMPLE["spec"]["gateways"]["template"]["ports"]["tcp"]
DEADLINE_S = time.monotonic() + float(os.environ["TIMEOUT_S"])
CLUSTERS = f"/apis/plato.im/v1alpha1/namespaces/{NAMESPACE}/platoclusters"
TEXT = "one message, by helm test"


def call(method: str, path: str, body: object = None) -> dict[str, Any] | None:
    """One request to the API server; None: there is no such thing. Raises OSError, with the server's words in it."""
    request = urllib.request.Request(
        "https://kubernetes.default.svc" + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {(ACCOUNT / 'token').read_text(encoding='utf-8').strip()}",
            "Content-Type": "application/apply-patch+yaml" if method == "PATCH" else "application/json",
        },
    )
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            made: dict[str, Any] = json.load(answer)
            return made
    except urllib.error.HTTPError as e:
        if e.code == 404:
            return None
        raise OSError(f"{method} {path}: {e.code} {e.read().decode(errors='replace')}") from e


def condition(cluster: dict[str, Any]) -> tuple[bool, str]:
    """Is it Ready in its present generation, and what it says of itself."""
    status = cluster.get("status", {})
    for found in status.get("conditions", []):
        if found["type"] == "Ready":
            fresh = found.get("observedGeneration") == cluster["metadata"]["generation"]
            return fresh and found["status"] == "True", f"{found.get('reason', '')}: {found.get('message', '')}"
    return False, "the operator has said nothing of it yet"


def wait_ready() -> None:
    """Returns when the cluster is Ready. Raises TimeoutError with its last words."""
    said = ""
    while True:
        cluster = call("GET", f"{CLUSTERS}/{CLUSTER}")
        ready, why = condition(cluster) if cluster is not None else (False, "it was deleted")
        if ready:
            return
        if why != said:
            print(f"  {why}", flush=True)
            said = why
        if time.monotonic() > DEADLINE_S:
            raise TimeoutError(f"PlatoCluster {CLUSTER} is not Ready in time: {why}")
        time.sleep(1)


def delete() -> None:
    """Deletes the cluster and waits until its pods are gone. Raises OSError, TimeoutError."""
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=plato.im%2Fcluster%3D{CLUSTER}"
    call("DELETE", f"{CLUSTERS}/{CLUSTER}", {"propagationPolicy": "Foreground"})
    until = time.monotonic() + 120
    while call("GET", f"{CLUSTERS}/{CLUSTER}") is not None or (call("GET", pods) or {}).get("items"):
        if time.monotonic() > until:
            raise TimeoutError(f"PlatoCluster {CLUSTER} or its pods do not go")
        time.sleep(1)


def gateways() -> list[str]:
    """host:port of each gateway pod that serves."""
    found = call("GET", f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=plato.im%2Fcluster%3D{CLUSTER}") or {}
    return [
        f"{pod['status']['podIP']}:{PORT}"
        for pod in found.get("items", [])
        if pod["metadata"]["labels"].get("plato.im/component") == "gateway"
        and any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
    ]


def token(user: str) -> str:
    """A token by the development key."""

    def part(value: bytes) -> str:
        return base64.urlsafe_b64encode(value).rstrip(b"=").decode()

    auth = SAMPLE["spec"]["auth"]
    now = int(time.time())
    claims = {"sub": user, "iss": auth["issuer"], "aud": auth["audience"], "iat": now, "exp": now + 600}
    signed = ".".join(part(json.dumps(x).encode()) for x in ({"alg": "HS256", "typ": "JWT", "kid": "dev"}, claims))
    key = Path("/etc/plato-keys/dev.key").read_bytes().strip()
    return f"{signed}.{part(hmac.new(key, signed.encode(), hashlib.sha256).digest())}"


async def message(addresses: list[str]) -> None:
    """One user sends, the other one reads. Raises TimeoutError."""
    async with (
        asyncio.timeout(60),
        Client(token("helm-test-a"), ":memory:", addresses, user="helm-test-a") as sender,
        Client(token("helm-test-b"), ":memory:", addresses, user="helm-test-b") as reader,
    ):
        await sender.send(TEXT, to="helm-test-b")
        async for got in reader.messages():
            if got.text == TEXT:
                return


def main() -> int:
    """Entry point; returns the exit code."""
    if call("GET", f"{CLUSTERS}/{CLUSTER}") is not None:
        print(f"deleting the PlatoCluster {CLUSTER} that an earlier test left", flush=True)
        delete()
    try:
        print(f"applying PlatoCluster {NAMESPACE}/{CLUSTER}", flush=True)
        call("PATCH", f"{CLUSTERS}/{CLUSTER}?fieldManager=helm-test", SAMPLE)
        wait_ready()
        addresses = gateways()
        print(f"Ready; sending one message by {', '.join(addresses)}", flush=True)
        asyncio.run(message(addresses))
        print("it arrived", flush=True)
    finally:
        delete()
    print("deleted")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, TimeoutError) as e:
        sys.exit(f"FAILED: {e or 'the message did not arrive within 60 s'}")
