"""A data plane of objects: pods that exist in the API server only, run as their status says, and answer /v1/report.

What kubelets and processes would do is done here by a thread: a pod that was made is set Running with an address of its
own in 127.77.0.0/16, serves once the record names it, drains at its pace, acquires its slots; migration pods succeed.
Reports are answered on the pods' ports on every address, and the one that was asked tells which pod is meant. Such pods are
bound to no node, so a deleted one is gone at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from kubernetes import config
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ConflictError, NotFoundError
from plato.api import names
from plato.topology.record import SERVING, Topology
from plato.topology.stored import unpack
from urllib3.exceptions import HTTPError

from e2e.frame.kube import Object

STEP_S: Final = 0.3
MERGE: Final = "application/merge-patch+json"
CONNECTIONS: Final = 20
NOWHERE: Final = {"placement": {"nodeSelector": {"plato.im/e2e": "nowhere"}}}
"""For each component of a PlatoCluster: no scheduler finds its pods a node."""


@dataclass(slots=True)
class Process:
    """What runs in a pod, if it were one."""

    name: str
    uid: str
    component: str
    owner: str
    address: str
    connections: float = 0
    worker_id: int | None = None
    lease: bool | None = None
    slots: list[tuple[int, int]] = field(default_factory=list)
    drain: Object | None = None
    drained_at: float = 0.0
    ready: bool = False


class ObjectPods:
    """Use as `with ObjectPods(kubeconfig, namespace, cluster, admin_port)`.

    asleep: names of pods whose process does nothing and answers nothing. stuck: names of pods that never start.
    """

    def __init__(self, kubeconfig: Path, namespace: str, cluster: str, admin_port: int, step_s: float = STEP_S) -> None:
        """admin_port: of the pool's gateways. step_s: how often it looks at all pods."""
        self._kubeconfig, self._namespace, self._cluster = kubeconfig, namespace, cluster
        self._ports = (admin_port, names.STATE_ADMIN_PORT, names.MSG_HTTP_PORT)
        self.step_s = step_s
        self.asleep: set[str] = set()
        self.stuck: set[str] = set()
        self.processes: dict[str, Process] = {}
        self.troubles: list[str] = []
        self.epoch = 0
        self._addresses: dict[str, str] = {}
        self._made = 0
        self._by_address: dict[str, Process] = {}
        self._stop = threading.Event()
        self._over, self._up = asyncio.Event(), threading.Event()
        self._loop = asyncio.new_event_loop()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._answer, self._run)]

    def __enter__(self) -> ObjectPods:
        for thread in self._threads:
            thread.start()
        assert self._up.wait(20), f"nobody listens on {self._ports}: {self.troubles}"
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._loop.call_soon_threadsafe(self._over.set)
        for thread in self._threads:
            thread.join(60)

    def _answer(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async def told(request: web.Request) -> web.Response:
            assert request.transport is not None
            found = self.report(request.transport.get_extra_info("sockname")[0])
            return web.json_response(found, status=200 if found is not None else 503)

        application = web.Application()
        application.router.add_get("/v1/report", told)
        runner = web.AppRunner(application, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        try:
            for port in self._ports:
                await web.TCPSite(runner, "0.0.0.0", port, backlog=1024).start()
            self._up.set()
            await self._over.wait()
        except OSError as e:
            self.troubles.append(str(e))
        finally:
            await runner.cleanup()

    # ── what it does ─────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        client = DynamicClient(config.new_client_from_config(str(self._kubeconfig)))  # type: ignore[no-untyped-call]  # the library has no types
        pods = client.resources.get(api_version="v1", kind="Pod")
        maps = client.resources.get(api_version="v1", kind="ConfigMap")
        while not self._stop.wait(self.step_s):
            try:
                self._step(pods, maps)
            except (ApiException, HTTPError, OSError) as e:  # HTTPError: a connection that broke in the middle
                self.troubles.append(repr(e))

    def _step(self, pods: Any, maps: Any) -> None:
        selector = f"{names.LABEL_CLUSTER}={self._cluster}"
        found = pods.get(
            namespace=self._namespace, label_selector=selector, serialize=False
        )  # hundreds cost seconds else
        objects: list[Object] = json.loads(found.data)["items"]
        try:
            record = unpack(maps.get(namespace=self._namespace, name=names.topology_name(self._cluster)).to_dict())
        except NotFoundError:
            record = None
        self.epoch = record.epoch if record is not None else 0
        here = {}
        for pod in objects:
            process = self._process(pod)
            if process is None or "deletionTimestamp" in pod["metadata"]:
                continue
            here[process.name] = process
            if process.name not in self.asleep and record is not None:
                self._live(process, record)
            change = self._status(pod, process)
            if change is not None and not self._stop.is_set():
                with contextlib.suppress(NotFoundError, ConflictError):
                    pods.status.patch(
                        body={"metadata": {"uid": process.uid}, "status": change},
                        name=process.name, namespace=self._namespace, content_type=MERGE,
                    )  # fmt: skip
        self.processes = here
        self._by_address = {p.address: p for p in here.values()}

    def _process(self, pod: Object) -> Process | None:
        meta = pod["metadata"]
        own, name, uid = meta.get("labels") or {}, meta["name"], meta["uid"]
        if name in self.stuck:
            return None
        old = self.processes.get(name)
        if old is not None and old.uid == uid:
            return old
        if uid not in self._addresses:
            self._made += 1
            self._addresses[uid] = f"127.77.{self._made // 250}.{self._made % 250 + 1}"
        owner = own.get(names.LABEL_POOL) or own.get(names.LABEL_SHARD, "")
        return Process(name, uid, own.get(names.LABEL_COMPONENT, ""), owner, self._addresses[uid])

    def _live(self, process: Process, record: Topology) -> None:
        """One step of the process that read this record."""
        if process.component == "state":
            shard = record.shards.get(process.owner)
            mine = shard is not None and shard.uid == process.uid
            process.slots = [(r.first, r.last) for r in record.slots if mine and r.shard == process.owner]
            process.ready = mine
        elif process.component == "msg":
            msg = record.msgs.get(process.name)
            process.ready = msg is not None and msg.uid == process.uid
            process.worker_id, process.lease = (
                (msg.worker_id, True) if msg is not None and process.ready else (None, None)
            )
        elif process.component == "gateway":
            self._gateway(process, record)
        else:
            process.ready = True

    def _gateway(self, process: Process, record: Topology) -> None:
        mine = record.gateways.get(process.name)
        if mine is None or mine.uid != process.uid:
            process.ready = False
            return
        process.worker_id, process.lease = mine.worker_id, True
        process.ready = mine.state == SERVING
        if mine.drain is None:
            process.drain = None
            process.connections = CONNECTIONS if mine.state == SERVING else process.connections
            return
        if process.drain is None or process.drain["id"] != mine.drain.id:
            process.drain = {"id": mine.drain.id, "phase": "draining", "remaining": int(process.connections), "cut": 0}
            process.drained_at = time.monotonic() + mine.drain.settle_s
        if time.monotonic() >= process.drained_at:
            process.connections = max(0.0, process.connections - mine.drain.pace_per_s * self.step_s)
        if time.time() * 1000 >= mine.drain.deadline_ms and process.connections:
            process.drain["cut"], process.connections = int(process.connections), 0
        process.drain["remaining"] = int(process.connections)
        process.drain["phase"] = "draining" if process.connections else "drained"

    def _status(self, pod: Object, process: Process) -> Object | None:
        """The pod's status as a kubelet would have it, None when it says so already."""
        if not process.component or process.component not in ("gateway", "state", "msg", "ipconfig"):
            return None if pod["status"].get("phase") == "Succeeded" else _ended(pod)
        old = pod["status"]
        conditions = {c["type"]: c for c in old.get("conditions") or ()}
        gates = [g["conditionType"] for g in pod["spec"].get("readinessGates") or ()]
        ready = process.ready and all(conditions.get(g, {}).get("status") == "True" for g in gates)
        told = conditions.get("Ready", {}).get("status")
        if old.get("phase") == "Running" and told == str(ready):
            return None
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        kept = [c for c in conditions.values() if c["type"] in gates]
        container = pod["spec"]["containers"][0]
        return {
            "phase": "Running", "podIP": process.address, "podIPs": [{"ip": process.address}], "hostIP": process.address,
            "startTime": old.get("startTime") or now,
            "conditions": [*kept, {"type": "Ready", "status": str(ready), "lastTransitionTime": now}],
            "containerStatuses": [{
                "name": container["name"], "image": container["image"], "imageID": "", "ready": process.ready,
                "restartCount": 0, "started": True, "state": {"running": {"startedAt": old.get("startTime") or now}},
            }],
        }  # fmt: skip

    def report(self, address: str) -> Object | None:
        """What the process at this address says; None: nothing."""
        p = self._by_address.get(address)
        if p is None or p.name in self.asleep:
            return None
        return {
            "uid": p.uid, "boot": p.uid, "epoch_seen": self.epoch, "worker_id": p.worker_id, "lease": p.lease,
            "slots": {"acquired": p.slots, "loading": [], "released": []}, "drain": p.drain,
            "connections": int(p.connections),
        }  # fmt: skip


def _ended(pod: Object) -> Object:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "phase": "Succeeded",
        "containerStatuses": [
            {
                "name": c["name"], "image": c["image"], "imageID": "", "ready": False, "restartCount": 0,
                "state": {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now}},
            }
            for c in pod["spec"]["containers"]
        ],
    }  # fmt: skip
