"""The data path as pods, this test in the operator's place: it writes the record, and reads what pods say of themselves.

Pods as ARCHITECTURE.md has them: one ServiceAccount that may see one ConfigMap, settings by environment, a root that nobody
may write to, user 65532. Gateways on the host's network, ports 9200, 9201 and 9209.
"""

from __future__ import annotations

import asyncio
import gc
import json
import secrets
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from plato.adapters import tokens
from plato.adapters.topology_kube import Access, KubeTopology
from plato.api import names
from plato.client import Client
from plato.topology import stored
from plato.topology.record import Gateway, Msg, Shard, SlotRange, Topology, even_ranges, next_epoch

from e2e.frame.dependencies import Dependencies
from e2e.frame.kube import Kube, Object, wait_for
from e2e.frame.platform import Images, pod_ready
from e2e.testbed.layout import Layout

NAMESPACE = "dp-pods"
CLUSTER: Final = "plato"
TCP, WS, ADMIN = 9200, 9201, 9209
SHARDS: Final = ("plato-s0", "plato-s1")
TOKEN: Final = "report-token"
SOON_S: Final = 90.0


def _env(**values: str) -> list[Object]:
    return [{"name": f"PLATO_{name}", "value": value} for name, value in values.items()]


def _field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


class Operator:
    """What this test does in the operator's place."""

    def __init__(self, kube: Kube, images: Images, dependencies: Dependencies, folder: Path) -> None:
        self.kube, self.images, self.dependencies, self.folder = kube, images, dependencies, folder
        self.schema = f"dp_{secrets.token_hex(4)}"
        self.record: Topology | None = None

    # ── objects ──────────────────────────────────────────────────────────────────────────────────────────────

    def base(self) -> None:
        """Account, Secrets, the shards' Service."""
        account = {"name": CLUSTER}
        rule = {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": [names.topology_name(CLUSTER)],
            "verbs": ["get", "list", "watch"],
        }
        key = tokens.make_dev_key(self.folder / "keys")
        self.kube.secret("plato-db", {"uri": self.dependencies.database_uri})
        self.kube.secret("plato-store", {"url": self.dependencies.store_url})
        self.kube.secret("plato-keys", {key.name: key.read_text(encoding="utf-8")})
        self.kube.secret(names.admin_secret_name(CLUSTER), {"current": TOKEN})
        rbac = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": account}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": CLUSTER}
        self.kube.apply(
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account},
            {**rbac, "kind": "Role", "rules": [rule]},
            {**rbac, "kind": "RoleBinding", "roleRef": role, "subjects": [{"kind": "ServiceAccount", "name": CLUSTER}]},
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": f"{CLUSTER}-state"},
                "spec": {
                    "clusterIP": "None",
                    "publishNotReadyAddresses": True,
                    "selector": {names.LABEL_COMPONENT: "state"},
                    "ports": [{"port": names.STATE_PORT}],
                },
            },
        )

    def pod(self, component: str, env: list[Object], admin: int, **spec: Any) -> Object:
        """A pod template."""
        scheme = {"httpGet": {"path": "/readyz", "port": admin}, "periodSeconds": 1}
        common = [
            _field("PLATO_PROCESS__UID", "metadata.uid"),
            _field("PLATO_PROCESS__POD_IP", "status.podIP"),
            *_env(
                PROCESS__ADMIN_TOKENS_DIR="/etc/plato/admin",
                TOPOLOGY__CONFIG_MAP=names.topology_name(CLUSTER),
                TOPOLOGY__PATH="/run/plato/topology.json",
                AUTH__KEYS_DIR="/etc/plato/keys",
                DATABASE__SCHEMA_NAME=self.schema,
                STORE__KEY_PREFIX=f"{self.schema}:",
                BUS__PARTITIONS="8",
            ),
            _field("PLATO_TOPOLOGY__NAMESPACE", "metadata.namespace"),
            *(
                {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
                for name, secret, key in (
                    ("PLATO_DATABASE__URI", "plato-db", "uri"),
                    ("PLATO_STORE__URL", "plato-store", "url"),
                )
            ),
        ]
        container = {
            "name": component,
            "image": f"{self.images.registry}/plato-{component}:{self.images.tag}",
            "imagePullPolicy": self.images.pull_policy,
            "env": [*common, *env],
            "readinessProbe": scheme,
            "securityContext": {
                "readOnlyRootFilesystem": True,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [
                {"name": "run", "mountPath": "/run/plato"},
                {"name": "tmp", "mountPath": "/tmp"},
                {"name": "admin", "mountPath": "/etc/plato/admin", "readOnly": True},
                {"name": "keys", "mountPath": "/etc/plato/keys", "readOnly": True},
            ],
        }
        return {
            "metadata": {"labels": {names.LABEL_CLUSTER: CLUSTER, names.LABEL_COMPONENT: component}},
            "spec": {
                "serviceAccountName": CLUSTER,
                "securityContext": {"runAsUser": 65532, "runAsGroup": 65532, "runAsNonRoot": True, "fsGroup": 65532},
                "containers": [container],
                "volumes": [
                    {"name": "run", "emptyDir": {"medium": "Memory"}},
                    {"name": "tmp", "emptyDir": {}},
                    {"name": "admin", "secret": {"secretName": names.admin_secret_name(CLUSTER)}},
                    {"name": "keys", "secret": {"secretName": "plato-keys"}},
                ],
                **spec,
            },
        }

    def stateful_set(self, name: str, service: str, template: Object, replicas: int = 1) -> None:
        """One StatefulSet, its pods labelled by its name."""
        template["metadata"]["labels"]["app"] = name
        self.kube.apply(
            {
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "metadata": {"name": name},
                "spec": {
                    "serviceName": service,
                    "replicas": replicas,
                    "podManagementPolicy": "Parallel",
                    "selector": {"matchLabels": {"app": name}},
                    "template": template,
                },
            }
        )

    def start(self) -> None:
        """Every pod; the database is empty, and no record is there."""
        for shard in SHARDS:
            env = _env(PROCESS__NAME=shard, STATE__HOST="0.0.0.0", STATE__ADMIN_HOST="0.0.0.0")
            self.stateful_set(shard, f"{CLUSTER}-state", self.pod("state", env, names.STATE_ADMIN_PORT))
        own_name = _field("PLATO_PROCESS__NAME", "metadata.name")
        env = [own_name, *_env(MSG__HOST="0.0.0.0", MSG__HTTP_HOST="0.0.0.0")]
        self.stateful_set("plato-msg", "plato-msg", self.pod("msg", env, names.MSG_HTTP_PORT))
        env = [own_name, *_env(IPCONFIG__HOST="0.0.0.0", IPCONFIG__INTERNAL_HOST="0.0.0.0")]
        self.stateful_set("plato-ipconfig", "plato-ipconfig", self.pod("ipconfig", env, names.IPCONFIG_INTERNAL_PORT))
        env = [
            own_name,
            *_env(
                GATEWAY__HOST="0.0.0.0",
                GATEWAY__ADMIN_HOST="0.0.0.0",
                GATEWAY__TCP_PORT=str(TCP),
                GATEWAY__WS_PORT=str(WS),
                GATEWAY__POLL_PORT="0",
                GATEWAY__ADMIN_PORT=str(ADMIN),
                GATEWAY__RUN_DIR="/run/plato",
                GATEWAY__WORKERS="1",
            ),
        ]
        spread = {"app": "edge"}
        template = self.pod(
            "gateway",
            env,
            ADMIN,
            hostNetwork=True,
            dnsPolicy="ClusterFirstWithHostNet",
            terminationGracePeriodSeconds=60,
            affinity={
                "podAntiAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [
                        {"labelSelector": {"matchLabels": spread}, "topologyKey": "kubernetes.io/hostname"}
                    ]
                }
            },
        )
        self.stateful_set("edge", "edge", template, replicas=2)

    def migrate(self) -> None:
        """The Job."""
        template = self.pod("msg", [], names.MSG_HTTP_PORT, restartPolicy="Never")
        (container,) = template["spec"]["containers"]
        del container["readinessProbe"]
        container["command"] = ["python3", "-m", "plato.cli", "db", "migrate"]
        template["metadata"]["labels"] = {"app": "migrate"}
        spec = {"backoffLimit": 3, "template": template}
        self.kube.apply({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "migrate"}, "spec": spec})
        self.kube.done("wait", "--for=condition=complete", "job/migrate", "--timeout=90s")

    # ── the record ───────────────────────────────────────────────────────────────────────────────────────────

    def found(self, name: str) -> Object | None:
        """A pod that runs and has an address."""
        pod = self.kube.get("Pod", name)
        runs = pod is not None and pod["status"].get("phase") == "Running" and pod["status"].get("podIP")
        return pod if pod is not None and runs and "deletionTimestamp" not in pod["metadata"] else None

    def uid(self, name: str) -> str:
        """That of a pod, once it runs."""
        wait_for(f"pod {name} runs", lambda: self.found(name), SOON_S, seen=self.seen)
        return str((self.found(name) or {})["metadata"]["uid"])

    def admit(self, slots: tuple[SlotRange, ...] | None = None) -> Topology:
        """Writes every pod that runs into the record."""
        before = self.record
        epoch = next_epoch(before.epoch if before is not None else 0, int(time.time()))
        shards = {s: Shard(names.shard_addr(CLUSTER, s, NAMESPACE), self.uid(f"{s}-0")) for s in SHARDS}
        gateways = {}
        for index, name in enumerate(("edge-0", "edge-1")):
            uid = self.uid(name)
            ip = str((self.found(name) or {})["status"]["podIP"])
            gateways[name] = Gateway(
                uid, 10 + index, 1, (SHARDS[index],), ip, TCP, WS, f"{ip}:{ADMIN}", zone=f"zone-{index}"
            )
        msg_uid = self.uid("plato-msg-0")
        ip = str((self.found("plato-msg-0") or {})["status"]["podIP"])
        msgs = {"plato-msg-0": Msg(msg_uid, 600, f"{ip}:{names.MSG_GRPC_PORT}")}
        slots = slots or (before.slots if before is not None else even_ranges(SHARDS, epoch))
        return self.write(Topology("cluster-uid", epoch, slots, shards, gateways, msgs, writer="test"))

    def write(self, record: Topology) -> Topology:
        """One write of the ConfigMap."""
        metadata = {"name": names.topology_name(CLUSTER)}
        self.kube.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, **stored.pack(record)})
        self.record = record
        return record

    def ready(self, *pods: str) -> bool:
        """Whether all of them are."""
        found = [self.found(name) for name in pods]
        return all(pod is not None and pod_ready(pod) for pod in found)

    def seen(self) -> str:
        """For a message."""
        return self.kube.run("get", "pods", "-o", "wide").stdout

    def inside(self, pod: str, url: str, token: str = "") -> tuple[int, str]:
        """GET from within a pod, by its own Python: (status, body); (0, why) while nobody listens."""
        code = (
            "import sys,urllib.request,urllib.error\n"
            "r=urllib.request.Request(sys.argv[1],headers={'Authorization':'Bearer '+sys.argv[2]} if sys.argv[2] else {})\n"
            "try:\n a=urllib.request.urlopen(r,timeout=5);print(a.status);print(a.read().decode())\n"
            "except urllib.error.HTTPError as e:\n print(e.code);print(e.read().decode())\n"
            "except urllib.error.URLError as e:\n print(0);print(e)\n"
        )
        out = self.kube.done("exec", pod, "--", "python3", "-c", code, url, token)
        status, _, body = out.partition("\n")
        return int(status), body


ALL: Final = ("plato-s0-0", "plato-s1-0", "plato-msg-0", "plato-ipconfig-0", "edge-0", "edge-1")


@pytest.fixture(scope="module")
def operator(
    kube: Kube, images: Images, dependencies: Dependencies, tmp_path_factory: pytest.TempPathFactory
) -> Operator:
    """Pods that wait for a schema and a record, and then serve."""
    made = Operator(kube, images, dependencies, tmp_path_factory.mktemp("dp"))
    made.base()
    made.start()
    for name in ALL:
        made.uid(name)
    # Nothing crashes for want of the schema or the record; each says what it waits for.
    wait_for(
        "a shard says what it waits for",
        lambda: "plato db migrate" in made.inside("plato-s0-0", f"http://127.0.0.1:{names.STATE_ADMIN_PORT}/readyz")[1],
        SOON_S,
        seen=made.seen,
    )
    made.migrate()
    wait_for(
        "a shard waits for its record",
        lambda: "no topology" in made.inside("plato-s0-0", f"http://127.0.0.1:{names.STATE_ADMIN_PORT}/readyz")[1],
        SOON_S,
    )
    assert not any(made.ready(name) for name in ALL)
    made.admit()
    wait_for("every pod is Ready", lambda: made.ready(*ALL), SOON_S, seen=made.seen)
    return made


def node_ip(operator: Operator, pod: str) -> str:
    """Where a gateway is reached."""
    return str((operator.found(pod) or {})["status"]["podIP"])


def report(operator: Operator, pod: str, port: int) -> dict[str, Any]:
    """What a pod says of itself, once its admin port answers."""

    def asked() -> dict[str, Any] | None:
        status, body = operator.inside(pod, f"http://127.0.0.1:{port}/v1/report", TOKEN)
        assert status in (0, 200), body
        said: dict[str, Any] | None = json.loads(body) if status else None
        return said

    return wait_for(f"{pod} reports", asked, SOON_S, seen=operator.seen) or {}


async def talk(operator: Operator, folder: Path, text: str, gateway: str = "edge-0", within_s: float = 30.0) -> None:
    """alice writes to bob, who is on the other gateway; it arrives."""
    keys = operator.folder / "keys"
    other = "edge-1" if gateway == "edge-0" else "edge-0"
    people = {
        user: Client(
            tokens.issue(keys, "dev", user, "plato", "plato", 600),
            folder / f"{user}.db",
            [f"{node_ip(operator, at)}:{TCP}"],
            user=user,
        )
        for user, at in (("alice", gateway), ("bob", other))
    }
    async with people["alice"] as alice, people["bob"] as bob, asyncio.timeout(within_s):
        await alice.send(text.encode(), to=("bob"))
        async for message in bob.messages():
            if message.text == text:
                return


def test_a_message_goes_from_gateway_to_gateway(operator: Operator, tmp_path: Path) -> None:
    """Two clients outside, everything between them in pods."""
    asyncio.run(talk(operator, tmp_path, "hello through pods"))


def test_every_process_reports_to_who_has_the_token(operator: Operator) -> None:
    """401 without; lease, slots and epoch with it."""
    assert operator.record is not None
    ip = node_ip(operator, "edge-0")
    for headers, wanted in (({}, 401), ({"Authorization": "Bearer wrong"}, 401)):
        request = urllib.request.Request(f"http://{ip}:{ADMIN}/v1/report", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=5)
        with refused.value as answer:
            assert answer.code == wanted
    for index in (0, 1):
        said = report(operator, f"edge-{index}", ADMIN)
        assert (said["worker_id"], said["lease"], said["epoch_seen"]) == (10 + index, True, operator.record.epoch)
        assert said["uid"] == operator.record.gateways[f"edge-{index}"].uid
    said = report(operator, "plato-s0-0", names.STATE_ADMIN_PORT)
    assert said["slots"] == {
        "acquired": [[0, 511]], "loading": [], "released": [], "outbid": [], "deserted": [], "fence": 0,
    }  # fmt: skip
    said = report(operator, "plato-msg-0", names.MSG_HTTP_PORT)
    assert (said["worker_id"], said["lease"]) == (600, True)


def test_a_pod_may_see_its_record_and_nothing_else(operator: Operator, kubeconfig: Path) -> None:
    """The Role names one ConfigMap."""
    account = f"system:serviceaccount:{NAMESPACE}:{CLUSTER}"

    def may(*words: str) -> bool:
        return operator.kube.run("auth", "can-i", *words, f"--as={account}").stdout.strip() == "yes"

    name = f"configmaps/{names.topology_name(CLUSTER)}"
    assert all(may(verb, name) for verb in ("get", "list", "watch"))
    assert not may("list", "configmaps")
    assert not may("get", "configmaps/other")
    assert not may("patch", name)
    assert not may("get", "secrets")


# A TLS connection that is being opened when its task is cancelled is left to the collector by asyncio.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
async def test_the_watch_of_one_object_on_a_real_api_server(
    operator: Operator, testbed: Layout | None, tmp_path: Path
) -> None:
    """From outside, with the account's token: record, no other objects, deletion, and what is forbidden means gone."""
    if testbed is None:
        pytest.skip("the API server's certificate is known for the testbed only")
    from e2e.testbed.layout import API_URL

    (tmp_path / "token").write_text(operator.kube.done("create", "token", CLUSTER))
    config = operator.kube.done("config", "view", "--raw", "-o", "json")
    authority = json.loads(config)["clusters"][0]["cluster"]
    ca = authority.get("certificate-authority")
    if ca is None:
        import base64

        (tmp_path / "ca.crt").write_bytes(base64.b64decode(authority["certificate-authority-data"]))
        ca = str(tmp_path / "ca.crt")
    ssl.create_default_context(cafile=ca)
    access = Access(API_URL, NAMESPACE, tmp_path / "token", Path(ca))
    source = KubeTopology(names.topology_name(CLUSTER), access, tmp_path / "kept.json")
    forbidden = KubeTopology("another", access, tmp_path / "none.json")
    tasks = [asyncio.create_task(s.run()) for s in (source, forbidden)]
    try:
        async with asyncio.timeout(20):
            first = await source.changed(0)
            assert first == operator.record
            while not forbidden.gone:  # noqa: ASYNC110  # it has no event
                await asyncio.sleep(0.05)
            written = await asyncio.to_thread(operator.write, replace(first, epoch=first.epoch + 1))
            assert await source.changed(first.epoch) == written
            assert not source.gone
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        del source, forbidden, tasks
        gc.collect()  # here, where it is known why


def test_ipconfig_lists_public_addresses_and_zones(operator: Operator) -> None:
    """The record's addresses, the caller's zone first."""
    token = tokens.issue(operator.folder / "keys", "dev", "alice", "plato", "plato", 600)
    url = f"http://127.0.0.1:{names.IPCONFIG_PORT}/ip/list?zone=zone-1"

    def both() -> list[dict[str, Any]]:
        """It lists a gateway that it has heard."""
        status, body = operator.inside("plato-ipconfig-0", url, token)
        assert status == 200, body
        found: list[dict[str, Any]] = json.loads(body)["data"]
        return found if len(found) == 2 else []

    listed = wait_for("both are listed", both, 30.0)
    assert [(g["name"], g["zone"]) for g in listed] == [("edge-1", "zone-1"), ("edge-0", "zone-0")]
    assert (listed[0]["ip"], listed[0]["port"], listed[0]["ws_port"]) == (node_ip(operator, "edge-1"), TCP, WS)


def test_a_container_writes_to_run_and_tmp_only_and_opens_what_it_may(operator: Operator) -> None:
    """Read-only root, user 65532, the soft limit of files raised to the hard one."""
    code = (
        "import os,resource\n"
        "for p in ('/x','/app/x','/etc/x','/home/x'):\n"
        " try: open(p,'w'); print('wrote',p)\n"
        " except OSError: pass\n"
        "for p in ('/run/plato/x','/tmp/x'): open(p,'w').close(); os.remove(p)\n"
        "print(os.getuid(), open('/proc/1/limits').read())"
    )
    for pod in ("plato-s0-0", "plato-msg-0", "plato-ipconfig-0", "edge-0"):
        out = operator.kube.done("exec", pod, "--", "python3", "-c", code)
        assert "wrote" not in out, pod
        assert out.startswith("65532 "), pod
        (files,) = [line.split() for line in out.splitlines() if line.startswith("Max open files")]
        if pod != "edge-0":  # whose workers raise theirs
            assert files[3] == files[4], (pod, files)


def test_orphans_do_not_stay_as_zombies(operator: Operator) -> None:
    """The first process of a container gets the orphans of whoever was run in it."""
    orphan_stays = (
        "import os,subprocess,time\n"
        "pid=subprocess.run(['sh','-c','sleep 0.2 >/dev/null & echo $!'],capture_output=True,text=True).stdout.strip()\n"
        "end=time.monotonic()+15\n"
        "while os.path.exists(f'/proc/{pid}') and time.monotonic()<end: time.sleep(0.05)\n"
        "print(os.path.exists(f'/proc/{pid}'))"
    )
    for pod in ("plato-s0-0", "edge-0"):
        assert operator.kube.done("exec", pod, "--", "python3", "-c", orphan_stays).strip() == "False", pod


def test_a_replaced_shard_serves_by_its_name_though_nobody_writes_it_down(operator: Operator, tmp_path: Path) -> None:
    """The operator is away while a shard's pod is replaced: another uid, another address, the same name."""
    before = operator.found("plato-s0-0") or {}
    began = time.monotonic()
    operator.kube.done("delete", "pod", "plato-s0-0")
    assert time.monotonic() - began < 15, "SIGTERM ends it, not the grace period"
    wait_for("another pod has its name", lambda: operator.found("plato-s0-0"), SOON_S, seen=operator.seen)
    after = operator.found("plato-s0-0") or {}
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    wait_for("it serves", lambda: operator.ready("plato-s0-0", "edge-0", "edge-1"), SOON_S, seen=operator.seen)
    asyncio.run(talk(operator, tmp_path, "by its name"))
    operator.admit()
    assert operator.record is not None
    epoch = operator.record.epoch
    wait_for(
        "the record's epoch is applied",
        lambda: report(operator, "plato-s0-0", names.STATE_ADMIN_PORT)["epoch_seen"] == epoch,
        SOON_S,
    )
    asyncio.run(talk(operator, tmp_path, "written down"))


def test_a_replaced_msg_gets_the_gate_when_the_record_names_it(operator: Operator, tmp_path: Path) -> None:
    """Another uid serves nothing until it is written down."""
    began = time.monotonic()
    operator.kube.done("delete", "pod", "plato-msg-0")
    assert time.monotonic() - began < 15
    operator.uid("plato-msg-0")
    said = report(operator, "plato-msg-0", names.MSG_HTTP_PORT)
    assert (said["worker_id"], said["lease"], said["serving"]) == (None, None, False)
    operator.admit()
    wait_for("it serves", lambda: operator.ready("plato-msg-0"), SOON_S, seen=operator.seen)
    asyncio.run(talk(operator, tmp_path, "through another msg"))


def test_a_rebuilt_record_gives_every_slot_a_greater_fence_and_nobody_reconnects(
    operator: Operator, tmp_path: Path
) -> None:
    """As after the record was lost and rebuilt: new epochs everywhere, the same owners."""

    async def scene() -> None:
        keys = operator.folder / "keys"
        token = tokens.issue(keys, "dev", "carol", "plato", "plato", 600)
        address = f"{node_ip(operator, 'edge-0')}:{TCP}"
        async with Client(token, tmp_path / "carol.db", [address], user="carol") as carol, asyncio.timeout(60):
            await (await carol.send(b"one", to="carol2")).settled()
            # Clients of the test before may still be closing.
            while report(operator, "edge-0", ADMIN)["connections"] != 1:  # noqa: ASYNC110  # a report has no event
                await asyncio.sleep(0.1)
            accepted = metric(operator, "plato_gateway_accepted_total")
            epoch = next_epoch(operator.record.epoch, int(time.time())) if operator.record is not None else 0
            await asyncio.to_thread(operator.admit, even_ranges(SHARDS, epoch))
            for shard in SHARDS:
                while report(operator, f"{shard}-0", names.STATE_ADMIN_PORT)["epoch_seen"] < epoch:  # noqa: ASYNC110  # a report has no event
                    await asyncio.sleep(0.2)
            await (await carol.send(b"two", to="carol2")).settled()
            assert report(operator, "edge-0", ADMIN)["connections"] == 1
            assert metric(operator, "plato_gateway_accepted_total") == accepted

    asyncio.run(scene())


def metric(operator: Operator, name: str) -> float:
    """The sum of one metric of edge-0's."""
    with urllib.request.urlopen(f"http://{node_ip(operator, 'edge-0')}:{ADMIN}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_when_the_record_is_gone_a_gateway_ends_at_once(operator: Operator) -> None:
    """Last: as when the namespace is deleted."""
    operator.kube.done("delete", "configmap", names.topology_name(CLUSTER))
    wait_for(
        "edge-0 noticed",
        lambda: "the record is gone" in operator.kube.run("logs", "edge-0").stdout,
        30,
        seen=operator.seen,
    )
    assert operator.ready("edge-0"), "it serves on from memory"
    began = time.monotonic()
    operator.kube.done("delete", "pod", "edge-0")
    assert time.monotonic() - began < 15
