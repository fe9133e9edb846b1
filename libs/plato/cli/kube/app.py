"""The commands of `kubectl plato`. kubectl runs the program `kubectl-plato` that it finds on PATH.

They change nothing but what a person could write by hand: `paused`, `reshardPaused`, a weight, and the annotation that
asks for a drain. The operator does the rest. What ipconfig knows and decides they ask in its pods, by `kubectl exec`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from plato.api import names
from plato.cli import dispatch
from plato.cli.kube import bundle, view
from plato.cli.kube.kubectl import CLUSTERS, POOLS, SHARDS, Kubectl, KubeError
from plato.topology.record import Topology, TopologyError
from plato.topology.stored import unpack

app = typer.Typer(
    name="kubectl plato",
    help="Plato on Kubernetes: a cluster at a glance, its slots, drains and moves.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

POLL_S = 1.0

Name = Annotated[str, typer.Argument(help="PlatoCluster; may be left out if the namespace has one.")]
Pod = Annotated[str, typer.Argument(help="Gateway pod, e.g. chat-edge-0.")]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Default: the context's.", show_default=False)]
Context = Annotated[str, typer.Option("--context", help="Context of the kubeconfig.", show_default=False)]
Config = Annotated[str, typer.Option("--kubeconfig", help="Kubeconfig file.", show_default=False)]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it is done.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Longest wait, in seconds.")]


@app.callback()
def _first(ctx: typer.Context, namespace: Namespace = "", context: Context = "", kubeconfig: Config = "") -> None:
    """Takes kubectl's own flags before the command too, where kubectl's users write them."""
    flags = {"namespace": namespace, "context": context, "kubeconfig": kubeconfig}
    given = {flag: value for flag, value in flags.items() if value}
    ctx.default_map = dict.fromkeys(getattr(ctx.command, "commands", ()), given)


def _refs(resources: list[dict[str, Any]], cluster: str) -> list[dict[str, Any]]:
    return [r for r in resources if r["spec"].get("clusterRef", {}).get("name") == cluster]


def _chosen(kube: Kubectl, name: str) -> dict[str, Any]:
    if name:
        return kube.get(CLUSTERS, name)
    found = kube.list(CLUSTERS)
    if len(found) == 1:
        return found[0]
    where = f"namespace {kube.namespace}" if kube.namespace else "the context's namespace"
    if not found:
        raise KubeError(f"there is no PlatoCluster in {where}; name another one with -n, or look with -A")
    raise KubeError(f"{where} has several PlatoClusters: {', '.join(c['metadata']['name'] for c in found)}; name one")


def _topology(kube: Kubectl, cluster: str) -> Topology | None:
    name = names.topology_name(cluster)
    try:
        return unpack(kube.get("configmap", name))
    except TopologyError as e:
        raise KubeError(f"ConfigMap {name} cannot be read: {e}") from e
    except KubeError as e:
        if "NotFound" in str(e) or "not found" in str(e):
            return None
        raise


@app.command()
def status(
    name: Name = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Config = "",
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Clusters of all namespaces.")] = False,
) -> int:
    """Clusters at a glance. Exit code 0 if all of them are Ready, else 1."""
    kube = Kubectl(namespace, context, kubeconfig)
    clusters = kube.list(CLUSTERS, everywhere=True) if everywhere else [_chosen(kube, name)]
    if not clusters:
        raise KubeError("there is no PlatoCluster in any namespace")
    for i, cluster in enumerate(clusters):
        its = cluster["metadata"]["name"]
        there = Kubectl(cluster["metadata"]["namespace"], context, kubeconfig)
        lines = view.status(
            cluster, _refs(there.list(POOLS), its), _refs(there.list(SHARDS), its), _topology(there, its)
        )
        print("\n".join([*([""] if i else []), *lines]))
    return 0 if all(view.is_ready(c) for c in clusters) else 1


@app.command()
def slots(
    name: Name = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Config = "",
    raw: Annotated[bool, typer.Option("--raw", help="Print the whole record as JSON, also when it is packed.")] = False,
) -> int:
    """Which shard has which slots, what each should have, and the open move."""
    from plato.topology.record import dumps

    kube = Kubectl(namespace, context, kubeconfig)
    cluster = _chosen(kube, name)["metadata"]["name"]
    topology = _topology(kube, cluster)
    if topology is None:
        raise KubeError(f"{cluster} has no topology record yet; is the operator running?")
    if raw:
        print(dumps(topology))
        return 0
    shards = _refs(kube.list(SHARDS), cluster)
    weights = {s["metadata"]["name"]: int(s["spec"].get("weight", 100)) for s in shards}
    served = {s["metadata"]["name"]: int(s.get("status", {}).get("slotCount", 0)) for s in shards}
    print("\n".join(view.slots(topology, weights, served)))
    return 0


@app.command()
def drain(
    pod: Pod,
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Config = "",
    wait: Wait = False,
    timeout: Timeout = 900.0,
) -> int:
    """Move a gateway's clients to the others; the pod is replaced afterwards. `undrain` takes it back until then."""
    kube = Kubectl(namespace, context, kubeconfig)
    found = _gateway(kube, pod)
    uid = found["metadata"]["uid"]
    if found["metadata"].get("annotations", {}).get(names.ANNOTATION_DRAIN) is None:
        kube.merge("pod", pod, {"metadata": {"annotations": {names.ANNOTATION_DRAIN: "kubectl-plato"}}})
    print(f"{pod} is to be drained; `kubectl plato undrain {pod}` takes it back")
    if not wait:
        return 0
    end_s = time.monotonic() + timeout
    while time.monotonic() < end_s:
        if _uid(kube, pod) != uid:
            print(f"{pod} is drained and gone")
            return 0
        time.sleep(POLL_S)
    raise KubeError(f"{pod} is not drained after {timeout:.0f} s; see `kubectl plato status`")


@app.command()
def undrain(pod: Pod, namespace: Namespace = "", context: Context = "", kubeconfig: Config = "") -> int:
    """Take back a drain that `drain` asked for, while it lasts."""
    kube = Kubectl(namespace, context, kubeconfig)
    if _gateway(kube, pod)["metadata"].get("annotations", {}).get(names.ANNOTATION_DRAIN) is None:
        print(f"{pod} was not asked to drain")
        return 0
    kube.merge("pod", pod, {"metadata": {"annotations": {names.ANNOTATION_DRAIN: None}}})
    print(f"{pod} is to serve again")
    return 0


@app.command()
def rebalance(
    name: Name = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Config = "",
    weight: Annotated[
        list[str] | None, typer.Option("--weight", help="SHARD=0..100; 0 evacuates it.", show_default=False)
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="Open no more moves; the open one ends.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would move.")] = False,
    gateways: Annotated[bool, typer.Option("--gateways", help="Clients between gateways, not slots.")] = False,
    pace: Annotated[
        int | None, typer.Option(help="With --gateways: clients per second and gateway.", min=1, max=10_000)
    ] = None,
) -> int:
    """Let slots move to where the weights want them (the default), give shards other weights, or stop the moves; or, with
    --gateways, move the surplus of fuller gateways to emptier ones."""
    kube = Kubectl(namespace, context, kubeconfig)
    cluster = _chosen(kube, name)["metadata"]["name"]
    if gateways:
        if weight or stop:
            raise KubeError("--gateways moves clients; --weight and --stop speak of slots")
        (pod, *_) = _ipconfigs(kube, cluster)
        found = _ask(kube, pod, "POST", "/rebalance", dispatch.rebalance_body(dry_run, pace, 10))
        print("\n".join(dispatch.rebalanced(found, dry_run)))
        return 1 if found["refused"] else 0
    shards = {s["metadata"]["name"]: int(s["spec"].get("weight", 100)) for s in _refs(kube.list(SHARDS), cluster)}
    changes = _weights(weight or [], shards)
    topology = _topology(kube, cluster)
    if topology is None:
        raise KubeError(f"{cluster} has no topology record yet; is the operator running?")
    if not dry_run:
        for shard, value in changes.items():
            kube.merge(SHARDS, shard, {"spec": {"weight": value}})
        kube.merge(CLUSTERS, cluster, {"spec": {"state": {"reshardPaused": stop}}})
    print("\n".join(view.slots(topology, shards | changes, {})))
    if dry_run:
        print("nothing was changed (--dry-run)")
    else:
        print("moves are stopped" if stop else "moves go on by themselves; `kubectl plato slots` shows them")
    return 0


def _weights(given: list[str], shards: dict[str, int]) -> dict[str, int]:
    found = {}
    for text in given:
        shard, parted, number = text.partition("=")
        if not parted or not number.isdecimal() or not 0 <= int(number) <= 100:
            raise KubeError(f"--weight {text}: write SHARD=NUMBER with a number from 0 to 100")
        if shard not in shards:
            raise KubeError(f"--weight {text}: there is no shard {shard}; known: {', '.join(sorted(shards)) or 'none'}")
        found[shard] = int(number)
    if shards and not any((shards | found).values()):
        raise KubeError("--weight: every shard would have weight 0, so the slots would have nowhere to go")
    return found


@app.command()
def explain(
    name: Name = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Config = "",
    address: Annotated[str, typer.Option("--address", help="The client's IP address.")] = "",
    zone: Annotated[str, typer.Option("--zone", help="The client's zone.")] = "",
    region: Annotated[str, typer.Option("--region", help="The client's region.")] = "",
) -> int:
    """Show which gateways a client would be sent to, and why in this order. It runs a command in an ipconfig pod."""
    kube = Kubectl(namespace, context, kubeconfig)
    (pod, *_) = _ipconfigs(kube, _chosen(kube, name)["metadata"]["name"])
    found = _ask(kube, pod, "GET", dispatch.explain_path(address, zone, region))
    print("\n".join(dispatch.explained(found)))
    return 0


@app.command()
def override(
    name: Name = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Config = "",
    first: Annotated[list[str] | None, typer.Option("--first", help="A gateway that stands first.")] = None,
    never: Annotated[list[str] | None, typer.Option("--never", help="A gateway that is not listed.")] = None,
    by: Annotated[str, typer.Option("--by", help="load, distance or chance: what orders the list.")] = "load",
    for_s: Annotated[int, typer.Option("--for-s", min=0, help="Seconds until it ends by itself; 0: never.")] = 0,
    reason: Annotated[str, typer.Option("--reason", help="For whoever finds it.")] = "",
    clear: Annotated[bool, typer.Option("--clear", help="Take it back.")] = False,
) -> int:
    """Decide over the figures' heads which gateways clients are sent to, in every ipconfig pod that there is now; with no
    option: show what is decided."""
    kube = Kubectl(namespace, context, kubeconfig)
    method, body = ("DELETE", "") if clear else ("GET", "")
    if not clear and (first or never or by != "load"):
        method, body = "PUT", dispatch.override_body(by, first or (), never or (), for_s, reason)
    for pod in _ipconfigs(kube, _chosen(kube, name)["metadata"]["name"]):
        found = _ask(kube, pod, method, "/override", body)
        note = f" ({found['note']})" if found.get("note") else ""
        print(f"{pod}: override: {dispatch.overridden(found['override'])}{note}")
    if method == "PUT":
        print("pods that come later know nothing of it: look again after a rollout")
    return 0


def _ipconfigs(kube: Kubectl, cluster: str) -> list[str]:
    """Names of the ipconfig pods that run. Raises KubeError when none does."""
    pods = kube.list("pods", f"{names.LABEL_CLUSTER}={cluster},{names.LABEL_COMPONENT}=ipconfig")
    running = [
        pod["metadata"]["name"]
        for pod in pods
        if pod.get("status", {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]
    if not running:
        raise KubeError(f"no ipconfig pod of {cluster} runs; `kubectl plato status` says more")
    return running


def _ask(kube: Kubectl, pod: str, method: str, path: str, body: str = "") -> dict[str, Any]:
    """What ipconfig's internal port in that pod answers."""
    words = ["exec", pod, "-c", "ipconfig", "--", "python3", "-m", "plato_ipconfig.ask", method, path]
    found: dict[str, Any] = json.loads(kube.run(*words, *([body] if body else [])))
    return found


@app.command()
def pause(name: Name = "", namespace: Namespace = "", context: Context = "", kubeconfig: Config = "") -> int:
    """Let the operator change nothing; pods that restart are still let in."""
    return _paused(Kubectl(namespace, context, kubeconfig), name, True)


@app.command()
def resume(name: Name = "", namespace: Namespace = "", context: Context = "", kubeconfig: Config = "") -> int:
    """Let the operator go on."""
    return _paused(Kubectl(namespace, context, kubeconfig), name, False)


def _paused(kube: Kubectl, name: str, paused: bool) -> int:
    cluster = _chosen(kube, name)["metadata"]["name"]
    kube.merge(CLUSTERS, cluster, {"spec": {"paused": paused}})
    print(f"{cluster} is {'paused' if paused else 'no longer paused'}")
    return 0


@app.command()
def report(
    name: Name = "",
    namespace: Namespace = "",
    context: Context = "",
    kubeconfig: Config = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File; default: plato-<name>-<time>.tar.gz")
    ] = None,
    operator_namespace: Annotated[
        str, typer.Option(help="Namespace of the operator, for its log; default: looked for.", show_default=False)
    ] = "",
    since: Annotated[str, typer.Option(help="How far back logs go.")] = "1h",
) -> int:
    """Write a bundle for support: resources, record, events, logs; of the operator's, no line about another cluster. Secrets
    are not read; passwords are struck out."""
    kube = Kubectl(namespace, context, kubeconfig)
    cluster = _chosen(kube, name)
    its, where = cluster["metadata"]["name"], cluster["metadata"]["namespace"]
    now_s = int(time.time())
    path = output or Path(f"plato-{its}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now_s))}.tar.gz")
    there = Kubectl(where, context, kubeconfig)
    try:
        written = bundle.write(path, _content(there, cluster, operator_namespace, since), now_s)
    except OSError as e:
        raise KubeError(f"{path}: {e.strerror}; name another file with -o") from e
    print(f"{path}: {len(written)} files; passwords and tokens are struck out, but read it before you send it")
    return 0


def _content(
    kube: Kubectl, cluster: dict[str, Any], operator_namespace: str, since: str
) -> Iterator[tuple[str, object]]:
    its = cluster["metadata"]["name"]
    selector = f"{names.LABEL_CLUSTER}={its}"
    yield "cluster.json", cluster
    failures: list[str] = []
    for kind in (POOLS, SHARDS, "pods", "statefulsets", "deployments", "jobs", "services", "poddisruptionbudgets"):
        try:
            found = kube.list(kind, "" if kind in (POOLS, SHARDS) else selector)
            yield f"{kind.partition('.')[0]}.json", _refs(found, its) if kind in (POOLS, SHARDS) else found
        except KubeError as e:
            failures.append(str(e))
    for what, words in (
        ("topology.json", ("get", "configmap", names.topology_name(its), "-o", "json")),
        ("events.json", ("get", "events", "-o", "json")),
        ("nodes.json", ("get", "nodes", "-o", "json")),
        ("lease.json", ("get", "leases", "--all-namespaces", "-l", "app.kubernetes.io/name=plato", "-o", "json")),
        ("versions.txt", ("version",)),
    ):
        try:
            text = kube.run(*words)
            yield what, json.loads(text) if what.endswith(".json") else text
        except (KubeError, ValueError) as e:
            failures.append(str(e))
    for pod in _or_nothing(kube, selector, failures):
        yield from _log(kube, pod, since, failures)
    operator = Kubectl(operator_namespace or kube.namespace, kube.context, kube.kubeconfig)
    everywhere = not operator_namespace
    ours = (
        "app.kubernetes.io/name=plato,app.kubernetes.io/component=operator"  # not the logs of every operator there is
    )
    for pod in _or_nothing(operator, ours, failures, everywhere=everywhere):
        place = Kubectl(pod["metadata"]["namespace"], kube.context, kube.kubeconfig)
        for log, text in _log(place, pod, since, failures):
            yield log, bundle.lines_about(text, kube.namespace, its)
    try:
        pools, shards = _refs(kube.list(POOLS), its), _refs(kube.list(SHARDS), its)
        yield "status.txt", "\n".join(view.status(cluster, pools, shards, _topology(kube, its))) + "\n"
    except KubeError as e:
        failures.append(str(e))
    yield "missing.txt", "\n".join(failures) + "\n" if failures else "nothing is missing\n"


def _or_nothing(kube: Kubectl, selector: str, failures: list[str], *, everywhere: bool = False) -> list[dict[str, Any]]:
    try:
        return kube.list("pods", selector, everywhere=everywhere)
    except KubeError as e:
        failures.append(str(e))
        return []


def _log(kube: Kubectl, pod: dict[str, Any], since: str, failures: list[str]) -> Iterator[tuple[str, str]]:
    name = pod["metadata"]["name"]
    restarted = any(s.get("restartCount") for s in pod.get("status", {}).get("containerStatuses", ()))
    for before in (False, True) if restarted else (False,):
        words = ["logs", name, "--all-containers", f"--since={since}", "--limit-bytes=4000000", "--timestamps"]
        try:
            yield f"logs/{name}{'.previous' if before else ''}.log", kube.run(*words, *(["--previous"] * before))
        except KubeError as e:
            failures.append(str(e))


def _gateway(kube: Kubectl, pod: str) -> dict[str, Any]:
    found = kube.get("pod", pod)
    labels = found["metadata"].get("labels", {})
    if labels.get(names.LABEL_COMPONENT) != "gateway" or names.LABEL_POOL not in labels:
        raise KubeError(f"{pod} is no gateway of a GatewayPool; `kubectl plato status` lists them")
    return found


def _uid(kube: Kubectl, pod: str) -> str:
    """uid of the pod of that name now; "" if there is none."""
    return kube.run("get", "pod", pod, "--ignore-not-found", "-o", "jsonpath={.metadata.uid}").strip()


def main() -> int:
    """Runs a command line. Returns the exit code: 0, 1 it failed or is not Ready, 2 wrong arguments."""
    try:
        return int(typer.main.get_command(app).main(prog_name="kubectl plato", standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except KubeError as e:
        print(f"kubectl plato: {e}", file=sys.stderr)
        return 1
    except Exception as e:
        said = getattr(e, "format_message", None)
        if said is None:
            raise
        print(f"kubectl plato: {' '.join(str(said()).split())}", file=sys.stderr)
        return 2
