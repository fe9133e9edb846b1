"""Friends on real processes: requests that cross, on every device; a block that holds while msg is killed, and that nobody
is told of."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from plato.client import Refused
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.local.cluster import LocalCluster

from tests.faults.load import Person
from tests.faults.people import person as device
from tests.faults.waiting import until
from tests.product import pages
from tests.product.api import Api, person

SETTINGS = {
    "local.shards": 1,
    "local.msgs": 2,
    "gateway.workers": 1,
    "msg.member_stale_ms": 500,
    "state.reconnect_delay_ms": 100,
    "state.repeat_min_ms": 300,
}
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def town(new_cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    made = new_cluster(SETTINGS)
    yield made
    made.down()


def status(one: Person, other: str) -> str:
    """What a device shows of another user."""
    return next((f.status.name.lower() for f in one.client.friends() if f.user == other), "none")


def at(api: Api, cluster: LocalCluster, number: int) -> Api:
    host = cluster.settings.msg.http_host
    return Api(f"http://{host}:{cluster.ports[f'plato-msg-{number}.http']}", api.token, api.acts_for)


async def test_requests_that_cross_make_friends_on_every_device(town: LocalCluster, tmp_path: Path) -> None:
    ann, ben = (f"{name}-{uuid.uuid4().hex[:6]}" for name in ("ann", "ben"))
    a, b = at(person(town, ann), town, 0), at(person(town, ben), town, 1)
    async with AsyncExitStack() as stack:
        devices = [
            await stack.enter_async_context(device(town, user, tmp_path / f"{user}-{n}"))
            for user in (ann, ben)
            for n in range(2)
        ]
        await a.ok("POST", f"/v1/friends/{ben}/request", {"words": "it is me"})
        await until(lambda: [status(d, ann) for d in devices[2:]] == ["waiting", "waiting"])
        (one,) = (await b.ok("GET", "/v1/friends?status=waiting"))["friends"]
        assert one == {"user": ann, "status": "waiting", "words": "it is me"}
        await b.ok("POST", f"/v1/friends/{ann}/refuse")
        await until(lambda: status(devices[0], ben) == "none" and status(devices[1], ben) == "none")
        await asyncio.gather(a.ok("POST", f"/v1/friends/{ben}/request"), b.ok("POST", f"/v1/friends/{ann}/request"))
        await until(
            lambda: [status(d, ben) for d in devices[:2]] + [status(d, ann) for d in devices[2:]] == ["friends"] * 4
        )
        assert (await a.ok("GET", f"/v1/friends/{ben}"))["status"] == "friends"
        assert (await b.ok("DELETE", f"/v1/friends/{ann}"))["status"] == "none"
        await until(lambda: [status(d, ben) for d in devices[:2]] == ["none"] * 2)
    for path, code in (("/v1/friends/%02/request", Code.MALFORMED), (f"/v1/friends/{ann}/request", Code.BAD_TO_USER)):
        await a.refused(400, code, "POST", path)
    await a.refused(409, Code.NOT_ALLOWED, "POST", f"/v1/friends/{ben}/accept")


async def test_a_block_holds_while_msg_is_killed_and_tells_nobody(town: LocalCluster, tmp_path: Path) -> None:
    ann, ben, cid = (f"{name}-{uuid.uuid4().hex[:6]}" for name in ("ann", "ben", "cid"))
    a, b, c = (person(town, user) for user in (ann, ben, cid))
    async with AsyncExitStack() as stack:
        hers = await stack.enter_async_context(device(town, ann, tmp_path / "ann"))
        his = await stack.enter_async_context(device(town, ben, tmp_path / "ben"))
        await (await his.client.send(b"before", to=ann)).settled()
        await until(lambda: [row.body for row in hers.shown] == [b"before"])
        await a.ok("POST", f"/v1/friends/{ben}/block")
        refused = 0
        for n in range(12):
            ticket = await his.client.send(f"no {n}".encode(), to=ann)
            if n in (3, 7):
                town.kill("plato-msg-0" if n == 3 else "plato-msg-1")
            with pytest.raises(Refused) as e:
                await asyncio.wait_for(ticket.settled(), 60)
            assert e.value.code == Code.NOT_WELCOME
            refused += 1
        assert refused == 12
        await until(town.ready, 60.0)
        assert [row.body for row in hers.shown] == [b"before"]
        # What he sees is what somebody sees who waits.
        assert (await b.ok("GET", f"/v1/friends/{ann}"))["status"] == "none"
        asked = await b.ask("POST", f"/v1/friends/{ann}/request", {"words": "hello"})
        waits = await c.ask("POST", f"/v1/friends/{ann}/request", {"words": "hello"})
        assert (asked.status, asked.raw) == (waits.status, waits.raw)
        await until(lambda: status(hers, cid) == "waiting")
        assert status(hers, ben) == "blocked"
        assert (await a.ok("POST", f"/v1/friends/{ben}/unblock"))["status"] == "waiting"
        await (await his.client.send(b"after", to=ann)).settled()
        await until(lambda: [row.body for row in hers.shown] == [b"before", b"after"])
        # Only friends may write.
        assert await a.ok("GET", "/v1/me/settings") == {"friends_only": False, "chosen": None}
        await a.ok("PUT", "/v1/me/settings", {"friends_only": True})
        with pytest.raises(Refused) as e:
            await (await his.client.send(b"stranger", to=ann)).settled()
        assert e.value.code == Code.NOT_WELCOME
        await a.ok("POST", f"/v1/friends/{ben}/accept")
        await (await his.client.send(b"friend", to=ann)).settled()
        body = {"to": ann, "text": "who are you"}
        await c.refused(403, Code.NOT_WELCOME, "POST", "/v1/messages", body)
        assert (await c.ask("GET", f"/v1/conversations/{dialogue_id(ann, cid)}/messages")).status == 404


def test_the_page_does_as_it_says(town: LocalCluster) -> None:
    said = pages.run(town, "friends.md")
    assert '{"friends":[{"user":"alice","status":"waiting","words":"We met in Rome"}]}' in said
    assert '"code":436' in said
    assert '{"friends_only":false,"chosen":null}' in said
