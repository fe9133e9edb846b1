"""`kubectl plato` against a kubectl that answers from a file and writes down what it was told to change."""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plato.cli.kube import app, bundle, view
from plato.cli.kube.kubectl import KubeError
from plato.topology.record import Drain, Gateway, Move, Shard, SlotRange, Topology
from plato.topology.stored import pack

FAKE = """#!{python}
import json, os, sys
objects = json.load(open({objects!r}))
words = [w for w in sys.argv[1:] if not w.startswith(("--namespace=", "--context=", "--kubeconfig="))]
verb, rest = words[0], words[1:]
with open({calls!r}, "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
if verb == "get":
    kind = rest[0].partition(".")[0].rstrip("s")
    names = [w for w in rest[1:] if not w.startswith("-") and w not in ("json", "jsonpath={{.metadata.uid}}")]
    selected = "-l" in rest
    found = [o for o in objects if o["kind"].lower().rstrip("s") == kind]
    if names and not selected:
        found = [o for o in found if o["metadata"]["name"] == names[0]]
        if not found and "--ignore-not-found" not in rest:
            sys.exit(f'Error from server (NotFound): {{kind}} "{{names[0]}}" not found')
        print(json.dumps(found[0]) if "json" in rest else found[0]["metadata"]["uid"] if found else "")
    else:
        print(json.dumps({{"items": found}}))
elif verb == "logs" and os.path.exists({objects!r} + ".logs"):
    print(json.load(open({objects!r} + ".logs")).get(rest[0], ""), end="")
elif verb == "logs":
    print("2026 connected to postgresql://plato:hunter2@db/plato with Bearer abcdefgh12345678")
elif verb == "version":
    print("v1.37")
elif verb == "exec":
    path = sys.argv[sys.argv.index("plato_ipconfig.ask") + 2]
    print(json.dumps(json.load(open({objects!r} + ".answers"))[path.partition("?")[0]]))
"""

TOPOLOGY = Topology(
    "cluster-uid",
    1790000200,
    (SlotRange(0, 511, "chat-s0", 1790000001), SlotRange(512, 1023, "chat-s1", 1790000200)),
    {"chat-s0": Shard("s0:8902", "u0"), "chat-s1": Shard("s1:8902", "u1")},
    {
        "chat-edge-0": Gateway("g0", 1, 2, ("chat-s0",), "10.0.0.1", 8900, 8901, "10.0.0.1:8909", node="n1", zone="z1"),
        "chat-edge-1": Gateway(
            "g1", 2, 2, ("chat-s1",), "10.0.0.2", 8900, 8901, "10.0.0.2:8909", "draining", node="n2",
            drain=Drain(9, "Rollout", 200, 5, 1),
        ),
    },
    move=Move(1790000200, ((512, 515),), "chat-s0", "chat-s1", 1790000200),
)  # fmt: skip


def _object(kind: str, name: str, *, generation: int = 1, **fields: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": "im", "uid": f"uid-{name}", "generation": generation}
    meta |= fields.pop("metadata", {})
    return {"kind": kind, "metadata": meta, **fields}


def _ready(status: str, reason: str, message: str = "words", generation: int = 1) -> dict[str, Any]:
    found = {"type": "Ready", "status": status, "reason": reason, "message": message, "observedGeneration": generation}
    return {"conditions": [found]}


@pytest.fixture
def objects() -> list[dict[str, Any]]:
    ref = {"clusterRef": {"name": "chat"}}
    serving = _ready("True", "Serving")
    running = {"phase": "Running", "version": "0.1.0", **serving}
    draining = {"readyReplicas": 1, **_ready("False", "Draining")}
    gateway = {"labels": {"plato.im/component": "gateway", "plato.im/pool": "chat-edge"}, "annotations": {}}
    env = [{"name": "PLATO_DATABASE__PASSWORD", "value": "hunter2"}]
    return [
        _object("PlatoCluster", "chat", spec={"version": "0.1.0"}, status=running),
        _object("GatewayPool", "chat-edge", spec={**ref, "replicas": 2}, status=draining),
        _object("StateShard", "chat-s0", spec={**ref, "weight": 100}, status={"slotCount": 512, **serving}),
        _object("StateShard", "chat-s1", spec={**ref, "weight": 100}, status={"slotCount": 508, **serving}),
        _object("StateShard", "foreign-s0", spec={"clusterRef": {"name": "other"}}, status={}),
        {**_object("ConfigMap", "chat-topology"), **pack(TOPOLOGY)},
        _object("Pod", "chat-edge-1", metadata=gateway, spec={"containers": [{"name": "gateway", "env": env}]}),
        _object("Pod", "chat-s0-0", metadata={"labels": {"plato.im/component": "state"}}),
        _object("Secret", "chat-admin", data={"token": "c2VjcmV0"}),
    ]  # fmt: skip


Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objects: list[dict[str, Any]]) -> Run:
    program, file = tmp_path / "kubectl", tmp_path / "objects.json"
    program.write_text(FAKE.format(python=sys.executable, objects=str(file), calls=str(tmp_path / "calls")))
    program.chmod(0o755)
    monkeypatch.setenv("PLATO_KUBECTL", str(program))

    def call(*words: str) -> int:
        file.write_text(json.dumps(objects))
        monkeypatch.setattr(sys, "argv", ["kubectl-plato", *words])
        return app.main()

    return call


def _patches(tmp_path: Path) -> list[tuple[str, Any]]:
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    return [(c[c.index("patch") + 2], json.loads(c[-1])) for c in calls if "patch" in c]


def test_status_shows_a_cluster_at_a_glance(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "-n", "im") == 0
    shown = capsys.readouterr().out
    assert "im/chat: Running, Ready" in shown
    assert "chat-edge: Ready=False Draining: words" in shown
    assert "Rollout, 200/s" in shown
    assert "DRAINING" in shown
    assert "foreign" not in shown


def test_status_does_not_call_an_old_generation_ready(run: Run, objects: list[dict[str, Any]]) -> None:
    objects[0]["metadata"]["generation"] = 2
    assert run("status") == 1


def test_status_says_that_nobody_looked_yet(
    run: Run, objects: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    del objects[0]["status"]
    objects[:] = [o for o in objects if o["kind"] != "ConfigMap"]
    assert run("status") == 1
    shown = capsys.readouterr().out
    assert "is it running?" in shown
    assert "no topology record yet" in shown


def test_several_clusters_have_to_be_named(
    run: Run, objects: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    objects.append(_object("PlatoCluster", "second", spec={}))
    assert run("slots") == 1
    assert "chat, second; name one" in capsys.readouterr().err
    assert run("slots", "chat") == 0


def test_slots_show_the_ranges_the_move_and_what_is_left(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("slots") == 0
    shown = capsys.readouterr().out
    assert "512-1023" in shown
    assert "moving now: slots 512-515 from chat-s0 to chat-s1" in shown
    assert "every slot is where it should be" in shown
    assert run("slots", "--raw") == 0
    assert json.loads(capsys.readouterr().out)["epoch"] == 1790000200


def test_a_packed_record_is_read_too(objects: list[dict[str, Any]]) -> None:
    many = {f"edge-{i}": Gateway(f"u{i}", i, 2, ("chat-s0",) * 8, "10.0.0.1", 1, 2, "10.0.0.1:3") for i in range(500)}
    large = Topology("u", 5, TOPOLOGY.slots, TOPOLOGY.shards, many)
    stored = pack(large)
    assert "binaryData" in stored
    from plato.topology.stored import unpack

    assert (
        view.slots(unpack(stored), {"chat-s0": 100, "chat-s1": 0}, {})[-1]
        == "512 slots are not where the weights want them"
    )


def test_drain_annotates_once_and_undrain_takes_it_back(
    run: Run, tmp_path: Path, objects: list[dict[str, Any]]
) -> None:
    assert run("drain", "chat-edge-1") == 0
    assert _patches(tmp_path) == [("chat-edge-1", {"metadata": {"annotations": {"plato.im/drain": "kubectl-plato"}}})]
    objects[6]["metadata"]["annotations"] = {"plato.im/drain": "kubectl-plato"}
    assert run("drain", "chat-edge-1") == 0
    assert len(_patches(tmp_path)) == 1
    assert run("undrain", "chat-edge-1") == 0
    assert _patches(tmp_path)[-1] == ("chat-edge-1", {"metadata": {"annotations": {"plato.im/drain": None}}})


def test_only_a_gateway_can_be_drained(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("drain", "chat-s0-0") == 1
    assert "is no gateway" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        ("chat-s0", "write SHARD=NUMBER"),
        ("chat-s0=101", "from 0 to 100"),
        ("nobody=3", "there is no shard nobody"),
        ("foreign-s0=3", "there is no shard foreign-s0"),
    ],
)
def test_a_weight_that_cannot_be_is_refused_in_words(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], weight: str, words: str
) -> None:
    assert run("rebalance", "--weight", weight) == 1
    assert words in capsys.readouterr().err
    assert _patches(tmp_path) == []


def test_all_weights_0_are_refused(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("rebalance", "--weight", "chat-s0=0", "--weight", "chat-s1=0") == 1
    assert "nowhere to go" in capsys.readouterr().err
    assert _patches(tmp_path) == []


def test_rebalance_changes_weights_and_lets_moves_go_on(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("rebalance", "--dry-run", "--weight", "chat-s0=0") == 0
    assert _patches(tmp_path) == []
    assert "512 slots are not where" in capsys.readouterr().out
    assert run("rebalance", "--weight", "chat-s0=0") == 0
    assert _patches(tmp_path) == [
        ("chat-s0", {"spec": {"weight": 0}}),
        ("chat", {"spec": {"state": {"reshardPaused": False}}}),
    ]


def _ipconfig_pods(objects: list[dict[str, Any]], *phases: str) -> None:
    labels = {"plato.im/cluster": "chat", "plato.im/component": "ipconfig"}
    for i, phase in enumerate(phases):
        objects.append(_object("Pod", f"chat-ipconfig-{i}", metadata={"labels": labels}, status={"phase": phase}))


def _asked(tmp_path: Path) -> list[list[str]]:
    """Pod, method, path, body of each command that was run in a pod."""
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    runs = [c for c in calls if "exec" in c]
    assert all(
        c[c.index("exec") + 2 :][:6] == ["-c", "ipconfig", "--", "python3", "-m", "plato_ipconfig.ask"] for c in runs
    )
    return [[c[c.index("exec") + 1], *c[c.index("plato_ipconfig.ask") + 1 :]] for c in runs]


EXPLAINED = {
    "caller": {"address": "198.51.100.7", "zone": "", "region": "eu", "map": [50.1, 8.7]},
    "map": {"loaded": True, "trouble": ""},
    "override": {"by": "load", "first": [], "never": ["edge-1"], "reason": "its disk", "until_ms": 0},
    "gateways": [
        {"place": 1, "name": "edge-0", "zone": "", "group": "room", "active": 0.5, "static": 900.0, "why": "0.50 GB/s left"},
        {"place": None, "name": "edge-1", "zone": "z", "group": "room", "active": 1.25, "static": 12.0, "why": "never"},
    ],
}  # fmt: skip


def test_explain_asks_one_ipconfig_pod_that_runs(
    run: Run, tmp_path: Path, objects: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "objects.json.answers").write_text(json.dumps({"/explain": EXPLAINED}))
    _ipconfig_pods(objects, "Pending", "Running", "Running")
    assert run("explain", "--address", "198.51.100.7", "--region", "eu") == 0
    assert _asked(tmp_path) == [["chat-ipconfig-1", "GET", "/explain?address=198.51.100.7&region=eu"]]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "for a caller 198.51.100.7: region eu, at 50.10, 8.70"
    assert lines[1] == "override: never edge-1; because: its disk"
    assert [line.split()[:6] for line in lines[-2:]] == [
        ["1", "edge-0", "–", "room", "0.50", "900"],
        ["–", "edge-1", "z", "room", "1.25", "12"],
    ]


def test_an_override_is_set_in_every_ipconfig_pod(
    run: Run, tmp_path: Path, objects: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "objects.json.answers").write_text(json.dumps({"/override": {"override": None, "note": ""}}))
    assert run("override", "--never", "edge-1") == 1
    assert "no ipconfig pod of chat runs" in capsys.readouterr().err
    _ipconfig_pods(objects, "Running", "Running")
    assert run("override", "--never", "edge-1", "--for-s", "60", "--reason", "its disk") == 0
    assert run("override", "--clear") == 0
    assert run("override") == 0
    order = {"by": "load", "first": [], "never": ["edge-1"], "for_s": 60, "reason": "its disk"}
    asked = _asked(tmp_path)
    assert [json.loads(body) for *_, body in asked[:2]] == [order, order]
    assert [words[:3] for words in asked] == [
        [f"chat-ipconfig-{i}", method, "/override"] for method in ("PUT", "DELETE", "GET") for i in (0, 1)
    ]


def test_rebalance_of_gateways_says_who_goes_where_and_who_refused(
    run: Run, tmp_path: Path, objects: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    gateways = {name: {"connections": n, "most": 1_000, "zone": ""} for name, n in (("edge-0", 400), ("edge-1", 0))}
    found = {"imbalance": 2.0, "gateways": gateways, "shifts": [{"from": "edge-0", "to": "edge-1", "clients": 200}]}
    answers = tmp_path / "objects.json.answers"
    answers.write_text(json.dumps({"/rebalance": {**found, "refused": {}}}))
    _ipconfig_pods(objects, "Running", "Running")
    assert run("rebalance", "--gateways", "--pace", "50") == 0
    assert _asked(tmp_path)[0][:3] == ["chat-ipconfig-0", "POST", "/rebalance"]
    assert json.loads(_asked(tmp_path)[0][3]) == {"dry_run": False, "least": 10, "pace_per_s": 50}
    assert "200 clients of edge-0 go to edge-1" in capsys.readouterr().out
    answers.write_text(json.dumps({"/rebalance": {**found, "refused": {"edge-0": "draining"}}}))
    assert run("rebalance", "--gateways") == 1
    assert "edge-0 refused: draining" in capsys.readouterr().out
    assert run("rebalance", "--gateways", "--stop") == 1
    assert _patches(tmp_path) == []


def test_pause_and_resume(run: Run, tmp_path: Path) -> None:
    assert run("pause") == 0
    assert run("resume", "chat") == 0
    assert _patches(tmp_path) == [("chat", {"spec": {"paused": True}}), ("chat", {"spec": {"paused": False}})]


def test_the_report_holds_what_helps_and_no_secret(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bundle.tar.gz"
    assert run("report", "-o", str(file)) == 0
    assert file.stat().st_mode & 0o077 == 0
    with tarfile.open(file) as tar:
        opened = ((member.name.partition("/")[2], tar.extractfile(member)) for member in tar)
        texts = {name: file.read().decode() for name, file in opened if file is not None}
    assert {"cluster.json", "topology.json", "pods.json", "events.json", "status.txt", "logs/chat-edge-1.log"} <= set(
        texts
    )
    assert not [
        name for name, text in texts.items() if "hunter2" in text or "abcdefgh12345678" in text or "c2VjcmV0" in text
    ]
    calls = (tmp_path / "calls").read_text()
    assert '"secret' not in calls


def test_the_report_leaves_the_operators_lines_about_other_clusters_out(
    run: Run, tmp_path: Path, objects: list[dict[str, Any]]
) -> None:
    """One operator serves several teams, whose clusters may have one name; what it says of itself helps everybody."""
    ours = [
        '2026-11-30T10:00:00Z {"event": "serves", "ts": "1"}',
        '2026-11-30T10:00:01Z {"cluster": "chat", "namespace": "im", "event": "applied"}',
        '2026-11-30T10:00:02Z {"cluster": "chat", "event": "by an operator that names no namespace"}',
        "2026-11-30T10:00:03Z Traceback of {something} in the process",
        "2026-11-30T10:00:04Z [1, 2]",
    ]
    others = [
        '2026-11-30T10:00:05Z {"cluster": "shop", "namespace": "team-a", "event": "refused", "why": "hidden"}',
        '2026-11-30T10:00:06Z {"cluster": "chat", "namespace": "team-a", "event": "hidden"}',
    ]
    labels = {"app.kubernetes.io/name": "plato", "app.kubernetes.io/component": "operator"}
    objects.append(_object("Pod", "plato-operator-1", metadata={"namespace": "plato-system", "labels": labels}))
    (tmp_path / "objects.json.logs").write_text(json.dumps({"plato-operator-1": "\n".join([*ours, *others]) + "\n"}))
    file = tmp_path / "bundle.tar.gz"
    assert run("report", "-n", "im", "-o", str(file)) == 0
    with tarfile.open(file) as tar:
        *_, log = [
            member for member in tar.getmembers() if member.name.endswith("logs/plato-operator-1.log")
        ]  # kubectl here selects nothing
        opened = tar.extractfile(log)
        assert opened is not None
        text = opened.read().decode()
    assert text.splitlines() == ["# 2 lines about other PlatoClusters are left out", *ours]


@pytest.mark.parametrize("flag", ["-n", "--namespace"])
def test_flags_of_kubectl_may_stand_before_the_command_too(run: Run, tmp_path: Path, flag: str) -> None:
    assert run(flag, "im", "--context", "far", "--kubeconfig", "/k", "pause", "chat") == 0
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls
    assert {tuple(call[:3]) for call in calls} == {("--kubeconfig=/k", "--context=far", "--namespace=im")}


def test_a_flag_behind_the_command_counts_more_than_one_before_it(run: Run, tmp_path: Path) -> None:
    assert run("-n", "elsewhere", "pause", "chat", "-n", "im") == 0
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert {call[0] for call in calls} == {"--namespace=im"}


def test_the_report_says_which_file_cannot_be_written(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", "-o", "/nonexistent/x.tar.gz") == 1
    assert "name another file with -o" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("postgresql://u:p4ss@h/db?sslmode=require", "postgresql://u:[struck out]@h/db?sslmode=require"),
        ("redis://:p4ss@h:6379/0", "redis://:[struck out]@h:6379/0"),
        ("postgresql://h/db?password=p4ss&x=1", "postgresql://h/db?password=[struck out]&x=1"),
        ("token eyJhbGciOi.eyJzdWIiOiJh.c2ln end", "token [struck out] end"),
        ("-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----\nrest", "[struck out]\nrest"),
        ("nothing secret: 12:30@noon", "nothing secret: 12:30@noon"),
        ('redis://:p4"s@s@h:6379/0', "redis://:[struck out]@h:6379/0"),
        ('{"url": "http://h:8080", "by": "a@b"}', '{"url": "http://h:8080", "by": "a@b"}'),
        ("host=db password=p4ss dbname=x", "host=db password=[struck out] dbname=x"),
        ("ssl.key.password=p4ss", "ssl.key.password=[struck out]"),
        (
            'LoginModule required username="u" password="p4 ss";',
            'LoginModule required username="u" password=[struck out];',
        ),
        ('{"password": "p4ss", "user": "u"}', '{"password": [struck out], "user": "u"}'),
        ("GET /ws?access_token=p4ss HTTP/1.1", "GET /ws?access_token=[struck out] HTTP/1.1"),
        ("Authorization: Basic dTpwNHNzd29yZA==", "Authorization: Basic [struck out]"),
        ("SecretMissing: create in this namespace: demo-keys", "SecretMissing: create in this namespace: demo-keys"),
    ],
)
def test_secrets_in_text_are_struck_out(text: str, kept: str) -> None:
    assert bundle.struck(text) == kept


def test_secrets_in_objects_are_struck_out() -> None:
    """By the name of a variable, of a key, of a flag; names of Secrets stay."""
    env = [{"name": name, "value": "p4ss"} for name in ("PGPASSWORD", "DB_PASSWORD_OLD", "REDIS_AUTH", "PASSPHRASE")]
    kept = {"name": "PLATO_AUTH__ISSUER", "value": "plato"}
    container = {"env": [*env, kept], "args": ["--requirepass", "p4ss", "--password=p4ss", "--port", "1"]}
    found = bundle.cleaned(
        {"containers": [container], "annotations": {"x/password": "p4ss"}, "secretName": "demo-keys"}
    )
    assert "p4ss" not in json.dumps(found)
    assert found["containers"][0]["env"][-1] == kept
    assert found["containers"][0]["args"][-2:] == ["--port", "1"]
    assert found["secretName"] == "demo-keys"


def test_without_kubectl_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PLATO_KUBECTL", "/nonexistent/kubectl")
    monkeypatch.setattr(sys, "argv", ["kubectl-plato", "status"])
    assert app.main() == 1
    assert "kubectl is not on PATH" in capsys.readouterr().err


def test_a_log_of_any_bytes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies writes what it likes; the bundle is made all the same."""
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\nprintf 'core \\377\\376 dumped'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PLATO_KUBECTL", str(program))
    from plato.cli.kube.kubectl import Kubectl

    assert Kubectl().run("logs", "x") == "core \ufffd\ufffd dumped"


def test_a_missing_crd_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "kubectl"
    program.write_text(
        '#!/bin/sh\necho "error: the server doesn\'t have a resource type \\"platoclusters\\"" >&2\nexit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PLATO_KUBECTL", str(program))
    from plato.cli.kube.kubectl import CLUSTERS, Kubectl

    with pytest.raises(KubeError, match="install Plato's CRDs first"):
        Kubectl().list(CLUSTERS)
