"""The topology in a ConfigMap: what the API server may do to a watch, and what a pod sees of it (nothing)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from plato.adapters.topology import topology_source
from plato.adapters.topology_file import FileTopology, write
from plato.adapters.topology_kube import Access, KubeTopology, Pace
from plato.core.errors import Unavailable
from plato.fakes.kube_api import FakeKubeApi
from plato.runtime.settings import SettingsError, TopologySettings
from plato.topology.record import Rest, Shard, Topology, even_ranges
from plato.topology.stored import pack

NAME = "plato-topology"
QUICK = Pace(watch_s=60, silence_s=0.5, answer_s=20, backoff_min_s=0.01, backoff_max_s=0.05)
"""A request that nobody answers is none of these tests' cases: a busy machine may take its time."""
WAIT_S = 20.0


def record(epoch: int) -> Topology:
    return Topology("cluster", epoch, even_ranges(["plato-s0"], 1), shards={"plato-s0": Shard("a:1", f"uid-{epoch}")})


@pytest.fixture
async def api() -> AsyncIterator[FakeKubeApi]:
    async with FakeKubeApi() as fake:
        yield fake


class Pod:
    """One source that runs, with its files."""

    def __init__(self, api: FakeKubeApi, folder: Path) -> None:
        self.api, self.folder = api, folder
        self.token = folder / "token"
        self.token.write_text(api.token)
        self.kept = folder / "run" / "topology.json"

    @contextlib.asynccontextmanager
    async def runs(self, pace: Pace = QUICK) -> AsyncIterator[KubeTopology]:
        source = KubeTopology(NAME, Access(self.api.base, self.api.namespace, self.token, None), self.kept, pace)
        task = asyncio.create_task(source.run())
        try:
            yield source
            assert not task.done(), "following never ends by itself"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def pod(api: FakeKubeApi, tmp_path: Path) -> Pod:
    return Pod(api, tmp_path)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - conditions of several objects
            await asyncio.sleep(0.005)


async def epoch_is(source: KubeTopology, epoch: int) -> None:
    async with asyncio.timeout(WAIT_S):
        assert (await source.changed(epoch - 1)).epoch == epoch


async def test_one_object_is_asked_for_by_name(api: FakeKubeApi, pod: Pod) -> None:
    api.publish("another", record(9))
    api.publish(NAME, record(5))
    async with pod.runs() as source:
        await epoch_is(source, 5)
        await until(lambda: api.watches == 1)
        api.publish("another", record(10))
        api.publish(NAME, record(6))
        await epoch_is(source, 6)
        assert [request["fieldSelector"] for request in api.requests] == [f"metadata.name={NAME}"] * 2
        assert api.requests[1]["resourceVersion"] == "102"


async def test_a_large_record_comes_whole(api: FakeKubeApi, pod: Pod) -> None:
    uid = "00000000-0000-4000-8000-{:012x}"
    large = dataclasses.replace(
        record(8), resting={i: Rest(uid.format(i * 2654435761 % 2**48), 1_790_000_000_000 + i) for i in range(1024)}
    )
    large = dataclasses.replace(large, shards={f"s{i:04}{uid.format(i)}": Shard("a:1", "u") for i in range(1500)})
    assert "binaryData" in pack(large)
    async with pod.runs() as source:
        await until(lambda: api.watches == 1)
        api.publish(NAME, large)
        await epoch_is(source, 8)
        assert source.current() == large


async def test_an_object_that_comes_later_is_seen_at_once(api: FakeKubeApi, pod: Pod) -> None:
    async with pod.runs() as source:
        await until(lambda: api.watches == 1)
        with pytest.raises(Unavailable, match="there is no ConfigMap plato-topology in namespace im"):
            source.current()
        assert source.gone
        api.publish(NAME, record(5))
        await epoch_is(source, 5)
        assert not source.gone


async def test_what_happened_while_the_watch_was_cut_is_not_missed(api: FakeKubeApi, pod: Pod) -> None:
    api.publish(NAME, record(5))
    async with pod.runs() as source:
        await until(lambda: api.watches == 1)
        await api.down()
        api.publish(NAME, record(6))
        assert source.current() == record(5)
        await api.up()
        await epoch_is(source, 6)


async def test_a_watch_that_the_server_ended_goes_on_where_it_stood(api: FakeKubeApi, pod: Pod) -> None:
    api.publish(NAME, record(5))
    async with pod.runs(dataclasses.replace(QUICK, watch_s=1.0, silence_s=20)) as source:
        await until(lambda: api.watches == 1)
        api.bookmark()
        marked = str(api.version)
        # The next watch, or the one behind it, if this one ended in the very moment of the mark.
        await until(lambda: any(r.get("resourceVersion") == marked for r in api.requests))
        assert ["watch" in r for r in api.requests] == [False] + [True] * (len(api.requests) - 1)
        api.publish(NAME, record(6))
        await epoch_is(source, 6)


async def test_a_version_that_is_too_old_is_listed_anew(api: FakeKubeApi, pod: Pod) -> None:
    api.publish(NAME, record(5))
    async with pod.runs() as source:
        await until(lambda: api.watches == 1)
        api.oldest = api.version + 1
        api.publish(NAME, record(6))
        api.cut()
        await epoch_is(source, 6)
        await until(lambda: api.watches == 1)
        api.publish(NAME, record(7))
        await epoch_is(source, 7)


async def test_410_in_the_middle_of_a_watch(api: FakeKubeApi, pod: Pod) -> None:
    api.publish(NAME, record(5))
    async with pod.runs() as source:
        await until(lambda: api.watches == 1)
        api.say({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "Expired"}})
        await until(lambda: len([r for r in api.requests if "watch" not in r]) >= 2)
        assert not source.gone
        api.oldest = api.version
        api.publish(NAME, record(6))
        await epoch_is(source, 6)


@pytest.mark.parametrize("status", [403, 404])
async def test_a_refusal_means_gone_and_the_newest_record_stands(api: FakeKubeApi, pod: Pod, status: int) -> None:
    api.publish(NAME, record(5))
    async with pod.runs() as source:
        await epoch_is(source, 5)
        assert not source.gone
        api.refuse = status
        api.cut()
        await until(lambda: source.gone)
        assert source.current() == record(5)
        api.refuse = 0
        await until(lambda: not source.gone)
        api.publish(NAME, record(6))
        await epoch_is(source, 6)


@pytest.mark.parametrize("status", [401, 429, 500, 503])
async def test_other_refusals_say_nothing_of_the_record(api: FakeKubeApi, pod: Pod, status: int) -> None:
    api.publish(NAME, record(5))
    async with pod.runs() as source:
        await epoch_is(source, 5)
        api.refuse = status
        api.cut()
        asked = len(api.requests)
        await until(lambda: len(api.requests) > asked + 2)
        assert not source.gone
        api.refuse = 0
        api.publish(NAME, record(6))
        await epoch_is(source, 6)


async def test_a_deleted_record_is_gone_until_it_is_written_again(api: FakeKubeApi, pod: Pod) -> None:
    api.publish(NAME, record(5))
    async with pod.runs() as source:
        await until(lambda: api.watches == 1)
        api.delete(NAME)
        await until(lambda: source.gone)
        assert source.current() == record(5)
        api.publish(NAME, record(6))
        await epoch_is(source, 6)
        assert not source.gone


async def test_an_api_server_that_is_away_does_not_mean_gone(api: FakeKubeApi, pod: Pod) -> None:
    api.publish(NAME, record(5))
    async with pod.runs() as source:
        await epoch_is(source, 5)
        await api.down()
        await asyncio.sleep(0.2)  # some attempts fail meanwhile
        assert not source.gone
        await api.up()


async def test_epochs_never_go_back(api: FakeKubeApi, pod: Pod) -> None:
    api.publish(NAME, record(5))
    async with pod.runs() as source:
        await epoch_is(source, 5)
        await until(lambda: api.watches == 1)
        api.publish(NAME, record(4))
        api.delete(NAME)
        api.publish(NAME, record(3))
        await until(lambda: not source.gone)
        assert source.current() == record(5)
        api.publish(NAME, record(6))
        await epoch_is(source, 6)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>proxy</html>",
        b"[]",
        b'{"metadata":{}}',
        b'{"metadata":{"resourceVersion":"1"},"items":[7]}',
        b"\xff",
    ],
)
async def test_garbage_for_a_list_is_tried_again(api: FakeKubeApi, pod: Pod, body: bytes) -> None:
    api.garbage = body
    async with pod.runs() as source:
        await until(lambda: len(api.requests) > 2)
        with pytest.raises(Unavailable):
            source.current()
        api.garbage = None
        api.publish(NAME, record(5))
        await epoch_is(source, 5)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "ADDED", "object": []},
        {"type": "ADDED", "object": "text"},
        {"type": "MODIFIED", "object": {"metadata": {"name": NAME}}},
        {"type": "MODIFIED", "object": {"metadata": {"name": NAME}, "data": {"topology.json": "{"}}},
        {"type": "MODIFIED", "object": {"metadata": {"name": NAME}, "data": ["topology.json"]}},
        {"type": "MODIFIED", "object": {"metadata": {"name": NAME}, "binaryData": {"topology.json.gz": "!"}}},
        {"type": "ERROR", "object": {"code": "x"}},
        {"type": "NEWS", "object": {"metadata": {"name": NAME}}},
    ],
    ids=lambda event: json.dumps(event)[:60],
)
async def test_garbage_in_a_watch_keeps_the_last_good_record(
    api: FakeKubeApi, pod: Pod, event: dict[str, object]
) -> None:
    api.publish(NAME, record(5))
    async with pod.runs() as source:
        await until(lambda: api.watches == 1)
        api.say(event)
        api.publish(NAME, record(6))
        await epoch_is(source, 6)


async def test_a_server_that_falls_silent_is_left(api: FakeKubeApi, pod: Pod) -> None:
    api.publish(NAME, record(5))
    async with pod.runs(dataclasses.replace(QUICK, watch_s=1.0, silence_s=0.1, answer_s=2)) as source:
        await until(lambda: api.watches == 1)
        api.mute = True
        api.publish(NAME, record(6))
        await until(lambda: api.watches == 0)
        assert source.current() == record(5)
        api.mute = False
        await epoch_is(source, 6)


async def test_a_server_that_ends_every_watch_at_once_is_not_asked_without_pause(api: FakeKubeApi, pod: Pod) -> None:
    api.publish(NAME, record(5))
    api.end_watches_at_once = True
    slow = dataclasses.replace(QUICK, backoff_min_s=0.2, backoff_max_s=0.2)
    began_s = time.monotonic()
    async with pod.runs(slow) as source:
        await epoch_is(source, 5)
        await asyncio.sleep(0.5)
        # A list and a watch, each 0.1 s at the earliest, for as long as it took.
        assert len(api.requests) <= 2 * (1 + (time.monotonic() - began_s) / 0.1)
        api.end_watches_at_once = False
        api.publish(NAME, record(6))
        await epoch_is(source, 6)


async def test_a_rotated_token_is_read_again(api: FakeKubeApi, pod: Pod) -> None:
    api.publish(NAME, record(5))
    async with pod.runs() as source:
        await until(lambda: api.watches == 1)
        api.token = "token-2"
        api.cut()
        api.publish(NAME, record(6))
        await until(lambda: api.watches == 0)
        pod.token.write_text("token-2\n")
        await epoch_is(source, 6)
        assert not source.gone


async def test_a_token_that_is_not_there_yet_is_waited_for(api: FakeKubeApi, pod: Pod) -> None:
    api.publish(NAME, record(5))
    pod.token.unlink()
    async with pod.runs() as source:
        await asyncio.sleep(0.05)
        pod.token.write_text(api.token)
        await epoch_is(source, 5)


async def test_a_start_without_the_api_server_begins_with_the_kept_record(api: FakeKubeApi, pod: Pod) -> None:
    api.publish(NAME, record(5))
    async with pod.runs() as source:
        await epoch_is(source, 5)
        await until(pod.kept.exists)
    await api.down()
    async with pod.runs() as source:
        assert source.current() == record(5)
        await api.up()
        api.publish(NAME, record(4))  # restored from a backup
        await until(lambda: api.watches == 1)
        assert source.current() == record(5)
        api.publish(NAME, record(6))
        await epoch_is(source, 6)


async def test_a_kept_record_that_cannot_be_read_costs_nothing(api: FakeKubeApi, pod: Pod) -> None:
    pod.kept.parent.mkdir()
    pod.kept.write_bytes(b"{")
    api.publish(NAME, record(5))
    async with pod.runs() as source:
        await epoch_is(source, 5)


async def test_a_folder_that_takes_no_record_costs_nothing(api: FakeKubeApi, pod: Pod) -> None:
    pod.kept.parent.write_text("a file, where a folder should be")
    api.publish(NAME, record(5))
    async with pod.runs() as source:
        await epoch_is(source, 5)
        await until(lambda: api.watches == 1)
        api.publish(NAME, record(6))
        await epoch_is(source, 6)


async def test_cancelled_it_leaves_no_connection(api: FakeKubeApi, pod: Pod) -> None:
    async with pod.runs():
        await until(lambda: api.watches == 1)
    await until(lambda: api.watches == 0)


# ── which source, and how the API server is found ────────────────────────────────────────────────────────────


def account(folder: Path) -> Path:
    (folder / "namespace").write_text("im\n")
    (folder / "token").write_text("t")
    return folder


def test_in_a_pod_everything_is_found_by_the_service_account(tmp_path: Path) -> None:
    env = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    found = Access.in_cluster("", env, account(tmp_path))
    assert (found.base, found.namespace) == ("https://10.96.0.1:443", "im")
    assert (found.token_file, found.ca_file) == (tmp_path / "token", tmp_path / "ca.crt")
    assert Access.in_cluster("other", {**env, "KUBERNETES_SERVICE_HOST": "fd00::1"}, tmp_path) == Access(
        "https://[fd00::1]:443", "other", tmp_path / "token", tmp_path / "ca.crt"
    )


def test_outside_of_a_pod_the_setting_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"topology\.config_map: .*KUBERNETES_SERVICE_HOST"):
        topology_source(TopologySettings(config_map=NAME), {})
    with pytest.raises(SettingsError, match=r"topology\.namespace: not set"):
        Access.in_cluster("", {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, tmp_path)


async def test_without_a_config_map_the_file_is_read(tmp_path: Path) -> None:
    source = topology_source(TopologySettings(path=tmp_path / "t.json"), {})
    assert isinstance(source, FileTopology)
    write(tmp_path / "t.json", record(5))
    following = asyncio.create_task(source.run())
    assert (await asyncio.wait_for(source.changed(0), WAIT_S)).epoch == 5
    assert not source.gone
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    source = topology_source(
        TopologySettings(config_map=NAME, namespace="im", path=tmp_path / "t.json"), {"KUBERNETES_SERVICE_HOST": "h"}
    )
    assert isinstance(source, KubeTopology)
