"""Search on real processes: Chinese and other words, in one's own conversations only, while msg processes die."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from plato.core.codes import Code
from plato.local.cluster import LocalCluster

from tests.faults import looking
from tests.faults.waiting import until
from tests.product import pages
from tests.product.api import Api, person, quoted

SETTINGS = {"local.shards": 1, "local.msgs": 2, "gateway.workers": 1, "msg.member_stale_ms": 500}
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def town(new_cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    made = new_cluster(SETTINGS)
    yield made
    made.down()


async def find(api: Api, words: str, more: str = "") -> list[dict[str, Any]]:
    found = await api.ok("GET", f"/v1/search?q={quoted(words)}{more}")
    return list(found["messages"])


async def comes(api: Api, words: str, count: int) -> list[dict[str, Any]]:
    """Waits until so many are found."""
    found: list[dict[str, Any]] = []

    async def there() -> bool:
        found[:] = await find(api, words)
        return len(found) == count

    await until(there, 30.0, f"{words} is not found")
    return found


async def test_chinese_is_found_by_who_may_read_it_and_an_edit_and_a_recall_show(town: LocalCluster) -> None:
    tail = uuid.uuid4().hex[:6]
    ann, ben, eve = (person(town, f"{name}-{tail}") for name in ("ann", "ben", "eve"))
    sent = await ann.ok("POST", "/v1/messages", {"to": f"ben-{tail}", "text": "明天我们去北京大学吃饭"})
    (hit,) = await comes(ben, "北京", 1)
    assert (hit["msg_id"], hit["text"], hit["from"]) == (sent["msg_id"], "明天我们去北京大学吃饭", f"ann-{tail}")
    assert [hit["snippet"][a:b] for a, b in hit["matches"]] == ["北京"]
    assert [len(await find(api, "大学 吃")) for api in (ann, ben, eve)] == [1, 1, 0]
    assert await find(ben, "京北") == []
    conversation = f"&conversation={quoted(sent['conversation_id'])}"
    assert await find(eve, "北京", conversation) == await find(eve, "北京", "&conversation=none") == []
    assert await find(ben, "北京", f"{conversation}&from=ben-{tail}") == []
    await ann.ok("PATCH", f"/v1/messages/{sent['msg_id']}", {"text": "明天去上海"})
    assert await find(ben, "北京") == [], "at once"
    (hit,) = await comes(ben, "上海", 1)
    assert hit["edited"]
    await ann.ok("DELETE", f"/v1/messages/{sent['msg_id']}?for=all")
    assert await find(ben, "上海") == []
    for wrong in ("?q=", "?q=%3F%3F", "?q=x&cursor=x", "?q=x&limit=1000", "?q=x&conversation=%01"):
        answer = await ben.ask("GET", f"/v1/search{wrong}")
        assert (answer.status, answer.headers["content-type"]) == (400, "application/problem+json"), wrong
    await ben.refused(400, Code.BAD_OPERATION, "GET", "/v1/search?q=%3F%3F")


async def test_what_was_sent_while_msg_was_killed_is_found(town: LocalCluster) -> None:
    tail = uuid.uuid4().hex[:6]
    ann, ben = person(town, f"ann-{tail}"), person(town, f"ben-{tail}")
    keys = iter(range(1_000))

    async def say(text: str) -> None:
        key = {"Idempotency-Key": f"{tail}-{next(keys)}"}

        async def done() -> bool:
            try:
                body = {"to": f"ben-{tail}", "text": text}
                return (await ann.ask("POST", "/v1/messages", body, key)).status == 201
            except OSError:
                return False

        await until(done, 60.0)

    for round_ in range(3):
        for n in range(10):
            await say(f"walrus {round_} {n}")
        killed = "plato-msg-0" if round_ % 2 else "plato-msg-1"
        dead = town.kill(killed)
    await until(lambda: looking.back(town, killed, dead) and town.ready(), 60.0)
    await comes(ben, "walrus", 30)
    pages, cursor = [], ""
    while True:
        page = await ben.ok("GET", f"/v1/search?q=walrus&limit=7{cursor}")
        pages += [m["seq"] for m in page["messages"]]
        if "cursor" not in page:
            break
        cursor = f"&cursor={page['cursor']}"
    assert pages == sorted(pages, reverse=True)
    assert len(set(pages)) == 30


def test_the_page_does_as_it_says(town: LocalCluster) -> None:
    said = pages.run(town, "search.md")
    assert '"matches":[[5,7]]' in said
    assert said.count("at noon") >= 2
