"""The HTTP API as people reach it on Kubernetes: by a Service of its own, with the client certificate, and with nothing else
on it; while msg is rolled, while a Secret is missing, and until it is switched off again.
"""

from __future__ import annotations

import base64
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import trustme
from plato.adapters.tokens import DEV_KID, issue

from e2e.frame.certificates import put
from e2e.frame.dependencies import Dependencies
from e2e.frame.kube import Kube, wait_for
from e2e.frame.platform import Images, Platform, pod_ready
from e2e.live import scene

NAMESPACE = "e2e-api"
NAME = "chat.example"
PAGE = "https://page.example"
SPEC: dict[str, Any] = {
    "state": {"shards": 1},
    "msg": {"replicas": 2},
    "ipconfig": {"replicas": 1},
    "tls": {"client": {"name": "outside"}},
    "origins": [PAGE],
    "api": {"enabled": True, "port": 443, "serviceType": "NodePort", "annotations": {"example.org/team": "chat"}},
    "gateways": {"initialReplicas": 1, "template": {"workers": 1, "ports": {"tcp": 9600, "ws": 9601, "admin": 9609}}},
}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Whom our clients trust."""
    return trustme.CA()


@pytest.fixture(scope="module")
def platform(
    kube: Kube,
    images: Images,
    dependencies: Dependencies,
    authority: trustme.CA,
    tmp_path_factory: pytest.TempPathFactory,
) -> Platform:
    """A small platform whose API people reach."""
    made = Platform(kube, "api", images, dependencies, tmp_path_factory.mktemp("api"))
    made.install_operator()
    put(kube, "outside", authority, NAME, with_ca=False)
    made.create(SPEC)
    return made


def door(platform: Platform) -> tuple[str, int]:
    """(address of a node, NodePort) of the people's Service."""
    service = platform.kube.get("Service", f"{platform.name}-api")
    assert service is not None
    (port,) = service["spec"]["ports"]
    return scene.node_addresses(platform.kube)[0], int(port["nodePort"])


class Api:
    """Asks by HTTPS, as a user or as nobody; each request by a connection of its own, as many people's would be."""

    def __init__(self, platform: Platform, authority: trustme.CA, user: str = "", *, scope: str = "") -> None:
        self._trusted = ssl.create_default_context()
        authority.configure_trust(self._trusted)
        host, port = door(platform)
        self._url = f"https://{host}:{port}"
        self._headers = {"Host": NAME}
        if user:
            token = issue(platform.keys_dir, DEV_KID, user, "plato", "plato", 3_600, scope)
            self._headers["Authorization"] = f"Bearer {token}"

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        """The answer."""
        headers = {**self._headers, **more.pop("headers", {})}
        with httpx.Client(verify=self._trusted, timeout=20.0) as client:
            return client.request(method, self._url + path, headers=headers, extensions={"sni_hostname": NAME}, **more)

    def conversations(self) -> list[dict[str, Any]]:
        """The user's list."""
        answer = self.ask("GET", "/v1/conversations")
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["conversations"]
        return found


@pytest.fixture(scope="module")
def dialogue(platform: Platform, authority: trustme.CA) -> str:
    """A conversation of ann and bob with a message in it."""
    sent = Api(platform, authority, "ann").ask("POST", "/v1/messages", json={"to": "bob", "text": "hello"})
    assert sent.status_code in (201, 202), sent.text
    made: str = sent.json()["conversation_id"]
    return made


@pytest.mark.timeout(400)
def test_a_person_reads_their_list_through_the_service(
    platform: Platform, authority: trustme.CA, dialogue: str
) -> None:
    """And the messages in it."""
    bob = Api(platform, authority, "bob")
    wait_for("bob's list has it", lambda: dialogue in [c["conversation_id"] for c in bob.conversations()], 30)
    page = bob.ask("GET", f"/v1/conversations/{dialogue}/messages")
    assert [m["text"] for m in page.json()["messages"]] == ["hello"]
    service = platform.kube.get("Service", f"{platform.name}-api")
    assert service is not None
    assert service["spec"]["ports"][0]["port"] == 443
    assert service["metadata"]["annotations"]["example.org/team"] == "chat"


def test_a_stranger_gets_nothing(platform: Platform, authority: trustme.CA, dialogue: str) -> None:
    """Without a token not even a look; with one, not whether the conversation exists."""
    nobody, mallory = Api(platform, authority), Api(platform, authority, "mallory")
    for path in ("/v1/conversations", f"/v1/conversations/{dialogue}/messages"):
        assert nobody.ask("GET", path).status_code == 401
    assert mallory.conversations() == []
    theirs = mallory.ask("GET", f"/v1/conversations/{dialogue}/messages")
    none = mallory.ask("GET", f"/v1/conversations/{dialogue[:10]}AAAA{dialogue[14:]}/messages")
    assert (theirs.status_code, theirs.json()) == (404, none.json())


def test_what_is_for_operators_is_not_there_and_what_is_for_people_is_nowhere_else(
    platform: Platform, authority: trustme.CA
) -> None:
    """Though the caller has the admin token."""
    secret = platform.kube.get("Secret", f"{platform.name}-admin")
    assert secret is not None
    token = base64.b64decode(secret["data"]["token"]).decode()
    for who in (Api(platform, authority), Api(platform, authority, "ann")):
        for path in (
            "/metrics",
            "/healthz",
            "/readyz",
            "/v1/report",
            "/admin/v1/groups?name=x",
            "/admin/v1/groups/members",
        ):
            for headers in ({}, {"Authorization": f"Bearer {token}"}):
                assert who.ask("GET", path, headers=headers).status_code == 404, path
    assert Api(platform, authority).ask("GET", "/openapi.json").status_code == 200
    ready = next(each for each in platform.pods("msg") if pod_ready(each))  # the other one may still start
    pod = ready["metadata"]["name"]
    internal = f"/api/v1/namespaces/{platform.kube.namespace}/pods/http:{pod}:8903/proxy"
    assert '"ready":true' in platform.kube.done("get", "--raw", f"{internal}/readyz").replace(" ", "")
    refused = platform.kube.run("get", "--raw", f"{internal}/v1/conversations")
    assert refused.returncode != 0
    assert "could not find the requested resource" in refused.stderr, refused.stderr


def test_pages_that_the_spec_names_may_ask_and_no_others(platform: Platform, authority: trustme.CA) -> None:
    """Not even those of loopback, which may where the spec names none."""
    ann = Api(platform, authority, "ann")
    for page, allowed in ((PAGE, PAGE), ("https://evil.example", None), ("http://localhost:8000", None)):
        answer = ann.ask("GET", "/v1/conversations", headers={"Origin": page})
        assert answer.headers.get("access-control-allow-origin") == allowed, page


def test_plain_text_is_not_answered(platform: Platform, authority: trustme.CA) -> None:
    """The connection ends."""
    host, port = door(platform)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{host}:{port}/v1/conversations", timeout=10.0)


@contextmanager
def asking(api: Api) -> Iterator[list[str]]:
    """Asks all the time; yields what went wrong, once more at the end than before."""
    wrong: list[str] = []
    ends = threading.Event()
    count = 0

    def ask() -> None:
        nonlocal count
        while not ends.is_set():
            try:
                answer = api.ask("GET", "/v1/conversations")
                if answer.status_code not in (200, 429):
                    wrong.append(f"{answer.status_code} {answer.text}")
            except httpx.TransportError as e:
                wrong.append(repr(e))
            count += 1
            ends.wait(0.05)

    asks = threading.Thread(target=ask)
    asks.start()
    try:
        yield wrong
    finally:
        ends.set()
        asks.join(60)
    assert count > 10


def rolled(platform: Platform, before: set[str]) -> bool:
    """Only new msg pods, both of them ready."""
    pods = platform.pods("msg")
    return len(pods) == 2 and all(pod_ready(p) and p["metadata"]["uid"] not in before for p in pods)


@pytest.mark.timeout(400)
def test_nobodys_request_fails_while_msg_is_rolled(platform: Platform, authority: trustme.CA) -> None:
    """Pods answer on until the Service sends them nothing any more."""
    before = {pod["metadata"]["uid"] for pod in platform.pods("msg")}
    with asking(Api(platform, authority, "ann")) as wrong:
        platform.kube.done("rollout", "restart", f"deployment/{platform.name}-msg")
        wait_for("msg is rolled", lambda: rolled(platform, before), 240, seen=platform.state)
    assert wrong == []


@pytest.mark.timeout(500)
def test_a_missing_secret_is_told_in_words_and_people_are_served_meanwhile(
    platform: Platform, authority: trustme.CA
) -> None:
    """The new pods wait for it; the old ones serve; with the Secret there the roll goes on by itself."""
    before = {pod["metadata"]["uid"] for pod in platform.pods("msg")}

    def said() -> dict[str, Any]:
        return platform.kube.condition("PlatoCluster", platform.name, "DependenciesReady")

    with asking(Api(platform, authority, "ann")) as wrong:
        platform.patch({"hooks": {"afterUrl": "http://nowhere.example/after", "secret": {"name": "hook-key"}}})
        wait_for("it is told", lambda: said().get("reason") == "SecretMissing", 60, seen=platform.state)
        assert said()["message"] == "create in this namespace: hook-key"
        platform.kube.secret("hook-key", {"other": "x" * 32})
        wait_for("the key is told", lambda: said().get("message", "").endswith(": hook-key/secret"), 60, seen=said)
        assert before & {pod["metadata"]["uid"] for pod in platform.pods("msg") if pod_ready(pod)}
        platform.kube.secret("hook-key", {"secret": "s" * 32})
        wait_for("msg is rolled", lambda: rolled(platform, before), 240, seen=platform.state)
    assert wrong == []
    platform.wait_ready(60)


@pytest.mark.timeout(300)
def test_a_new_certificate_is_shown_without_a_restart(platform: Platform, authority: trustme.CA) -> None:
    """Kubelet brings a changed Secret into the pods within its sync period, a minute or so."""
    before = {pod["metadata"]["uid"] for pod in platform.pods("msg")}
    chain = put(platform.kube, "outside", authority, NAME, with_ca=False)
    host, port = door(platform)
    for _ in range(4):  # connections go to either pod
        wait_for(
            "the new certificate is shown",
            lambda: ssl.get_server_certificate((host, port)).partition("-----END")[0] in chain,
            200,
        )
    assert {pod["metadata"]["uid"] for pod in platform.pods("msg")} == before


@pytest.mark.timeout(400)
def test_switched_off_the_service_goes_and_so_does_the_port(platform: Platform) -> None:
    """Last in this file."""
    before = {pod["metadata"]["uid"] for pod in platform.pods("msg")}
    platform.patch({"api": {"enabled": False}})
    wait_for("msg is rolled", lambda: rolled(platform, before), 240, seen=platform.state)
    wait_for(
        "the Service is gone",
        lambda: platform.kube.get("Service", f"{platform.name}-api") is None,
        60,
        seen=platform.state,
    )
    platform.wait_ready(60)
    for pod in platform.pods("msg"):
        assert [p["name"] for p in pod["spec"]["containers"][0]["ports"]] == ["grpc", "admin"]
