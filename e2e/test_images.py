"""The images on the testbed's nodes: they hold what they need and nothing else, and their processes start and stop.

Needs PLATO_E2E_KUBECONFIG with the testbed's own kubeconfig, and root, since it builds the images. Everything runs under
the strictest pod security, in a namespace and under a tag of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.images import DEVELOPMENT, SERVICES, provide, retag
from e2e.images.nodes import on_node
from e2e.testbed.layout import layout

KUBECONFIG = os.environ.get("PLATO_E2E_KUBECONFIG", "")
HERE = layout()
OURS = bool(KUBECONFIG) and Path(KUBECONFIG).resolve() == HERE.kubeconfig and HERE.marker.exists()
TAG = "check"
PASSWORD = "secret"
ADMIN_PORTS = {"gateway": 8909, "state": 8906, "msg": 8903, "ipconfig": 8905}
KEY = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n-----END PUBLIC KEY-----\n"
"""An Ed25519 public key (RFC 8037, A.2)."""

pytestmark = [
    pytest.mark.skipif(not KUBECONFIG, reason="PLATO_E2E_KUBECONFIG names no cluster"),
    pytest.mark.skipif(
        bool(KUBECONFIG) and not OURS, reason="PLATO_E2E_KUBECONFIG is not the testbed's: no nodes to put images on"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="images are built and loaded as root"),
    pytest.mark.timeout(900),  # the first build takes minutes
]


def kubectl(*args: str, given: object = None) -> str:
    """The output of a call that must succeed."""
    text = json.dumps(given) if given is not None else None
    command = ["kubectl", "--kubeconfig", KUBECONFIG, *args]
    result = subprocess.run(command, input=text, capture_output=True, text=True, timeout=90, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def until(condition: Callable[[], Any], within_s: float, what: Callable[[], str]) -> Any:
    """What the condition returns once it is true; fails with `what` after the deadline."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)
    return value


class Space:
    """The namespace, and starting pods in it."""

    def __init__(self, name: str, images: dict[str, str]) -> None:
        self.name = name
        self.images = images

    def start(self, name: str, service: str, **container: Any) -> None:
        """One pod of that image that is never started again; `container` adds to it. Its folders are writable."""
        user = 999 if service in DEVELOPMENT else 65532
        folders = {
            "postgres": ("/var/lib/postgresql", "/var/run/postgresql"),
            "valkey": ("/data",),
        }.get(service, ("/run/plato", "/tmp"))
        volumes: list[dict[str, Any]] = [{"name": f"v{number}", "emptyDir": {}} for number in range(len(folders))]
        mounts = [{"name": f"v{number}", "mountPath": folder} for number, folder in enumerate(folders)]
        if service in ADMIN_PORTS:
            volumes.append({"name": "keys", "secret": {"secretName": "keys", "optional": True}})
            mounts.append({"name": "keys", "mountPath": "/etc/plato/keys"})
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": {
                "restartPolicy": "Never",
                "enableServiceLinks": False,
                "automountServiceAccountToken": False,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": user,
                    "fsGroup": user,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "volumes": volumes,
                "containers": [
                    {
                        "name": "main",
                        "image": self.images[service],
                        "imagePullPolicy": "Never",
                        "volumeMounts": mounts,
                        "securityContext": {
                            "readOnlyRootFilesystem": True,
                            "allowPrivilegeEscalation": False,
                            "capabilities": {"drop": ["ALL"]},
                        },
                        **container,
                    }
                ],
            },
        }
        self.apply(pod)

    def apply(self, child: dict[str, Any]) -> None:
        """Create it here."""
        kubectl("-n", self.name, "create", "-f", "-", given=child)

    def status(self, name: str) -> dict[str, Any]:
        """Of the pod."""
        found: dict[str, Any] = json.loads(kubectl("-n", self.name, "get", "pod", name, "-o", "json"))["status"]
        return found

    def logs(self, name: str) -> str:
        """All that the pod has written."""
        return kubectl("-n", self.name, "logs", name)

    def ended(self, name: str, within_s: float = 60) -> int:
        """The exit code, once it has ended."""

        def code() -> tuple[int] | None:
            states = [container["state"] for container in self.status(name).get("containerStatuses", [])]
            return (states[0]["terminated"]["exitCode"],) if states and "terminated" in states[0] else None

        found: tuple[int] = until(code, within_s, lambda: f"{name} goes on: {self.status(name)}\n{self.logs(name)}")
        return found[0]

    def ready(self, name: str, within_s: float = 60) -> None:
        """Returns once its readiness probe succeeds."""

        def is_ready() -> bool:
            conditions = {each["type"]: each["status"] for each in self.status(name).get("conditions", [])}
            return conditions.get("Ready") == "True"

        until(is_ready, within_s, lambda: f"{name} is not ready: {self.status(name)}\n{self.logs(name)}")

    def execute(self, name: str, *words: str) -> str:
        """What a command inside the pod prints."""
        return kubectl("-n", self.name, "exec", name, "--", *words)

    def terminate(self, name: str) -> None:
        """SIGTERM to its first process, by a command inside, which may be ended with it: whether it came, its end shows."""
        words = ("python3", "-c", "import os, signal; os.kill(1, signal.SIGTERM)")
        command = ["kubectl", "--kubeconfig", KUBECONFIG, "-n", self.name, "exec", name, "--", *words]
        subprocess.run(command, capture_output=True, timeout=90, check=False)


@pytest.fixture(scope="module")
def space() -> Iterator[Space]:
    """The images on all nodes, a namespace that admits restricted pods only."""
    images = provide(HERE, TAG)
    name = f"images-check-{uuid.uuid4().hex[:6]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kubectl(
        "create",
        "-f",
        "-",
        given={"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}},
    )
    account = ("-n", name, "get", "serviceaccount", "default", "--ignore-not-found", "-o", "name")
    until(lambda: kubectl(*account), 30, lambda: f"{name} gets no default ServiceAccount")  # no pod is taken before
    yield Space(name, images)
    kubectl("delete", "namespace", name, "--wait=false")


INSIDE = """
import importlib, importlib.util, json, os, pathlib, pkgutil, shutil, sys
package = sys.argv[1]
tools = ("gcc", "cc", "c++", "make", "pip", "pip3", "git")
def refuses(path):
    try:
        pathlib.Path(path).write_text("x")
    except OSError:
        return True
    return False
broken = []
modules = [each.name for each in pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")]
for name in [*modules, *sys.argv[2:]]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        broken.append(f"{name}: {error}")
sources = [path for top in ("/app", "/opt/plato/lib") for path in pathlib.Path(top).rglob("*.py")]
print(json.dumps({
    "user": [os.getuid(), os.getgid()],
    "tools": [name for name in tools if shutil.which(name)],
    "pip": bool(importlib.util.find_spec("pip")) or pathlib.Path("/etc/pip.conf").exists(),
    "code": sorted(path.name for path in pathlib.Path("/app").iterdir()),
    "broken": broken,
    "read-only": [path for path in ("/x", "/app/x", "/opt/plato/x", "/etc/x") if refuses(path)],
    "writable": [path for path in ("/tmp/x", "/run/plato/x") if not refuses(path)],
    "sources": len(sources) > 100,
    "uncompiled": [str(path) for path in sources if not os.path.exists(importlib.util.cache_from_source(path))],
}))
"""


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_holds_what_its_process_needs_and_no_tools(space: Space, service: str) -> None:
    """Each module of the service imports, so its lock lacks nothing; no compiler, no pip, no source without bytecode."""
    name = f"{service}-inside"
    # The migration's command is lazy: what it imports when it runs is named here.
    more = (
        ["plato.cli.app", "plato.local.database", "plato.adapters.schema_pg", "plato.adapters.valkey"]
        if service == "msg"
        else []
    )
    space.start(name, service, command=["python3", "-c", INSIDE, f"plato_{service}", *more])
    code = space.ended(name)
    said = space.logs(name)
    assert code == 0, said
    assert json.loads(said) == {
        "user": [65532, 65532],
        "tools": [],
        "pip": False,
        "code": ["plato", f"plato_{service}"],
        "broken": [],
        "read-only": ["/x", "/app/x", "/opt/plato/x", "/etc/x"],
        "writable": ["/tmp/x", "/run/plato/x"],
        "sources": True,
        "uncompiled": [],
    }


@pytest.mark.parametrize("service", [service for service in SERVICES if service != "ipconfig"])
def test_a_process_without_settings_says_what_is_missing(space: Space, service: str) -> None:
    """One line, a failing exit code, and no traceback. (ipconfig could answer without any setting.)"""
    name = f"{service}-bare"
    space.start(name, service)
    assert space.ended(name) != 0
    said = space.logs(name)
    assert said.startswith(f"plato-{service}: "), said
    assert len(said.splitlines()) == 1, said


@pytest.fixture(scope="module")
def servers(space: Space) -> dict[str, str]:
    """PostgreSQL and Valkey from their stand-ins, used as the public images are; the settings that name them."""
    env = {"POSTGRES_USER": "plato", "POSTGRES_PASSWORD": PASSWORD, "POSTGRES_DB": "plato"}
    probe = {"periodSeconds": 1, "exec": {"command": ["pg_isready", "--username", "plato", "--dbname", "plato"]}}
    space.start("postgres", "postgres", env=_env(env), readinessProbe=probe)
    probe = {"periodSeconds": 1, "exec": {"command": ["valkey-cli", "ping"]}}
    arguments = ["--appendonly", "yes", "--requirepass", PASSWORD]
    space.start("valkey", "valkey", args=arguments, env=_env({"REDISCLI_AUTH": PASSWORD}), readinessProbe=probe)
    for name, port in (("postgres", 5432), ("valkey", 6379)):
        service = {"selector": {"app": name}, "ports": [{"port": port}]}
        space.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": service})
    for name in ("postgres", "valkey"):
        space.ready(name)
    space.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"k1.pem": KEY}})
    return {
        "PLATO_DATABASE__URI": f"postgresql://plato:{PASSWORD}@postgres:5432/plato",
        "PLATO_STORE__URL": f"redis://:{PASSWORD}@valkey:6379/0",
        "PLATO_BUS__PARTITIONS": "4",
    }


def _env(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def test_the_servers_stand_ins_behave_as_the_public_images(space: Space, servers: dict[str, str]) -> None:
    """Own database and owner; nobody without the password; what a probe calls is there."""
    del servers
    assert (
        space.execute("postgres", "psql", "-U", "plato", "-tAc", "select current_user, current_database()")
        == "plato|plato\n"
    )
    assert space.execute("postgres", "sh", "-c", 'echo "$PGDATA"; id -u') == "/var/lib/postgresql/18/docker\n999\n"
    wrong = "psql postgresql://plato:wrong@$(hostname -i)/plato -c 'select 1' 2>&1 || true"
    assert "password authentication failed" in space.execute("postgres", "sh", "-c", wrong)
    assert space.execute("valkey", "valkey-cli", "config", "get", "appendonly") == "appendonly\nyes\n"


@pytest.fixture(scope="module")
def migrated(space: Space, servers: dict[str, str]) -> dict[str, str]:
    """The schema, made as the operator's Job makes it; the settings."""
    space.start("migrate", "msg", command=["python3", "-m", "plato.cli", "db", "migrate"], env=_env(servers))
    code = space.ended("migrate")
    said = space.logs("migrate")
    assert code == 0, said
    assert "is at version" in said
    assert PASSWORD not in said
    return servers


@pytest.mark.parametrize("service", sorted(ADMIN_PORTS))
def test_sigterm_ends_process_one(space: Space, migrated: dict[str, str], service: str) -> None:
    """Started as the operator starts it, alive, not yet admitted: SIGTERM as PID 1 ends it at once and in order."""
    name = f"{service}-runs"
    settings = {
        **migrated,
        "PLATO_PROCESS__NAME": name,
        "PLATO_PROCESS__UID": str(uuid.uuid4()),
        "PLATO_TOPOLOGY__PATH": "/run/plato/topology.json",
        "PLATO_AUTH__KEYS_DIR": "/etc/plato/keys",
        f"PLATO_{service.upper()}__HOST": "0.0.0.0",
        "PLATO_GATEWAY__ADMIN_HOST": "0.0.0.0",
        "PLATO_STATE__ADMIN_HOST": "0.0.0.0",
        "PLATO_MSG__HTTP_HOST": "0.0.0.0",
        "PLATO_IPCONFIG__INTERNAL_HOST": "0.0.0.0",
        "PLATO_GATEWAY__RUN_DIR": "/run/plato",
    }
    probe = {"periodSeconds": 1, "httpGet": {"path": "/healthz", "port": ADMIN_PORTS[service]}}
    space.start(name, service, env=_env(settings), readinessProbe=probe)
    space.ready(name)
    space.terminate(name)
    assert space.ended(name, within_s=15) == 0, space.logs(name)
    assert "Traceback" not in space.logs(name)


def test_a_second_tag_is_the_same_image(space: Space) -> None:
    """So that tests of rollouts have two versions for the price of one, and a pod finds each."""
    second = retag(HERE, f"{TAG}-2", space.images)
    assert second["valkey"] == space.images["valkey"]
    for node in HERE.nodes:
        there = on_node(node)
        assert [there[second[service]] for service in SERVICES] == [
            there[space.images[service]] for service in SERVICES
        ]
    other = Space(space.name, second)
    other.start("second-tag", "gateway", command=["python3", "-c", "print('it runs')"])
    assert other.ended("second-tag") == 0
    assert other.logs("second-tag") == "it runs\n"
