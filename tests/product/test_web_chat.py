"""The chat page in headless Chromium against a whole cluster: what two people see of each other."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageDraw
from plato.local.cluster import LocalCluster
from playwright.async_api import FilePayload, Page, expect

from tests.faults.night import client_of
from tests.faults.waiting import until
from tests.product.browser import WAIT_MS, Person, browsers, installed, required

SETTINGS = {"gateway.workers": 1, "state.reconnect_delay_ms": 300, "attachments.bytes_max": 2 << 20}
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def town(new_cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    required()
    made = new_cluster(SETTINGS)
    yield made
    made.down()


def picture(width: int = 640, height: int = 420) -> bytes:
    """A JPEG that is worth looking at."""
    image = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(image)
    for y in range(height):
        share = y / height
        draw.line([(0, y), (width, y)], fill=(int(255 - 90 * share), int(150 + 60 * share), int(90 + 130 * share)))
    draw.ellipse([width * 0.62, height * 0.2, width * 0.8, height * 0.47], fill=(255, 236, 170))
    draw.polygon([(0, height), (width * 0.3, height * 0.45), (width * 0.62, height)], fill=(58, 76, 102))
    draw.polygon([(width * 0.35, height), (width * 0.7, height * 0.55), (width, height)], fill=(40, 56, 80))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=88)
    return out.getvalue()


async def send_picture(page: Page, name: str = "hills.jpg") -> None:
    """Attaches a picture, as the button does."""
    file = FilePayload(name=name, mimeType="image/jpeg", buffer=picture())
    await page.locator("input[type=file]").set_input_files([file])


async def drawn(page: Page, count: int = 1) -> None:
    """Waits until so many pictures of messages are loaded and drawn."""
    script = "n => [...document.querySelectorAll('.picture img')].filter(i => i.naturalWidth > 0).length >= n"
    await page.wait_for_function(script, arg=count, timeout=WAIT_MS)


async def test_two_people_talk_answer_edit_recall_and_send_a_picture(town: LocalCluster) -> None:
    async with browsers() as browser:
        ann = await Person.enter(browser, town, "ann")
        ben = await Person.enter(browser, town, "ben", scheme="dark")
        await ann.write_to("ben")
        await ann.say("Good morning, Ben")
        await expect(ben.page.get_by_label("1 unread")).to_be_visible(timeout=WAIT_MS)
        await expect(ben.page).to_have_title("(1) Plato")
        await expect(ann.bubble("Good morning").get_by_label("Delivered")).to_be_visible(timeout=WAIT_MS)
        await ben.open("ann")
        await ben.sees("Good morning, Ben")
        await expect(ann.bubble("Good morning").get_by_label("Read")).to_be_visible(timeout=WAIT_MS)
        await expect(ben.page.get_by_label("1 unread")).to_have_count(0)

        async def types() -> bool:
            """Who types is told at most once, and for a few seconds."""
            await ben.page.get_by_placeholder("Message").fill("")
            await ben.page.get_by_placeholder("Message").press_sequentially("Mor", delay=30)
            try:
                await expect(ann.page.get_by_role("main").get_by_text("typing …")).to_be_visible(timeout=5_000)
            except AssertionError:
                return False
            return True

        await until(types, WAIT_MS / 1_000)
        await ben.page.get_by_placeholder("Message").fill("")
        await ben.choose("Good morning", "Reply")
        await ben.say("Morning! Shall we walk on Saturday?\nThe weather looks fine: https://example.org/weather")
        answer = ann.bubble("Shall we walk")
        await expect(answer.get_by_role("button", name="Answers ann: Good morning, Ben")).to_be_visible(timeout=WAIT_MS)
        link = answer.get_by_role("link")
        assert await link.get_attribute("href") == "https://example.org/weather"
        assert "noopener" in str(await link.get_attribute("rel"))

        await ann.say("<b>Yes</b>, at nihne")
        await ann.delivered("at nihne")
        await ann.page.get_by_placeholder("Message").press("ArrowUp")
        await expect(ann.page.get_by_text("Edit message")).to_be_visible()
        await ann.say("<b>Yes</b>, at nine")
        await ben.sees("<b>Yes</b>, at nine")
        await expect(ben.bubble("at nine").get_by_text("edited")).to_be_visible()
        assert await ben.bubble("at nine").locator("b").count() == 0, "what people write is text"

        await ann.say("I have to tell you something")
        await ben.sees("I have to tell you something")
        await ann.delivered("I have to tell you something")
        await ann.choose("I have to tell", "Recall for everybody")
        await expect(ben.log.get_by_text("This message was recalled")).to_be_visible(timeout=WAIT_MS)
        await expect(ben.page.get_by_text("I have to tell")).to_have_count(0)

        await send_picture(ann.page)
        await drawn(ben.page)
        await ben.page.get_by_role("button", name="Picture hills.jpg").click()
        await expect(ben.page.get_by_role("dialog", name="hills.jpg").get_by_role("img")).to_be_visible()
        await ben.page.keyboard.press("Escape")
        await expect(ben.page.get_by_role("dialog")).to_have_count(0)

        asked: list[str] = []
        ann.page.on("request", lambda request: asked.append(request.url))
        film = FilePayload(name="film.bin", mimeType="application/octet-stream", buffer=bytes((2 << 20) + 100_000))
        await ann.page.locator("input[type=file]").set_input_files([film])
        await expect(ann.log.get_by_text("Too large: 2.1 MB, and files have at most 2.0 MB here.")).to_be_visible()
        await expect(ann.log.get_by_role("button", name="Try again")).to_have_count(0)
        await ann.log.get_by_role("button", name="Discard").click()
        await expect(ann.log.get_by_text("film.bin")).to_have_count(0)
        assert [url for url in asked if "attachments?" in url] == [], "it is not even uploaded"
        assert ann.faults == ben.faults == []


async def test_events_of_what_was_left_meanwhile_are_no_fault_of_the_page(town: LocalCluster) -> None:
    """A scroll or a key may come after its conversation, or the whole list, has gone from the page."""
    async with browsers() as browser:
        ann = await Person.enter(browser, town, "ann-e")
        await ann.write_to("ben-e")
        await ann.say("one")
        await ann.sees("one")
        messages = await ann.page.query_selector(".messages")
        search = await ann.page.query_selector("nav.list input")
        assert messages is not None
        assert search is not None
        await ann.write_to("cid-e")
        await expect(ann.page.get_by_role("main", name="Conversation with cid-e")).to_be_visible()
        await messages.evaluate("e => e.dispatchEvent(new Event('scroll'))")
        await ann.page.get_by_role("navigation").get_by_role("button", name="Menu").click()
        await ann.page.get_by_role("menuitem", name="Sign out").click()
        await expect(ann.page.get_by_label("Your name")).to_be_visible(timeout=WAIT_MS)
        await search.evaluate("e => e.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown', bubbles: true}))")
        assert ann.faults == []


async def test_a_dialogue_begun_on_another_device_has_its_name(town: LocalCluster, tmp_path: Path) -> None:
    """The rows alone do not say it: they are all this person's own, until somebody answers."""
    phone, tablet = (client_of(town, "ann-o", tmp_path / name, "tcp") for name in ("phone.sqlite", "tablet.sqlite"))
    async with browsers() as browser, phone:
        ann = await Person.enter(browser, town, "ann-o")
        async with tablet:
            sent = await phone.send("are you there?", to="ben-o")
            await expect(ann.page.locator("nav .line b")).to_have_text("ben-o", timeout=WAIT_MS)
            await until(lambda: getattr(tablet.conversation(sent.conversation_id), "peer", "") == "ben-o", 30.0)
        await ann.open("ben-o")
        await ann.sees("are you there?")
        assert ann.faults == []


async def test_a_group_is_made_and_changed_found_and_left(town: LocalCluster) -> None:
    async with browsers() as browser:
        ann = await Person.enter(browser, town, "ann-g")
        ben, cid = await Person.enter(browser, town, "ben-g"), await Person.enter(browser, town, "cid-g")
        await ann.page.get_by_role("button", name="Menu").click()
        await ann.page.get_by_role("menuitem", name="New group").click()
        window = ann.page.get_by_role("dialog", name="New group")
        await window.get_by_label("Title").fill("Hikers")
        await window.get_by_placeholder("Name, then Enter").fill("ben-g")
        await window.get_by_placeholder("Name, then Enter").press("Enter")
        await window.get_by_role("button", name="Create").click()
        await ann.say("Welcome, hikers")
        await ben.open("Hikers")
        await ben.sees("Welcome, hikers")
        await ben.say("A marmot is no beaver")

        await ann.page.get_by_role("button", name="Members").click()
        window = ann.page.get_by_role("dialog", name="Hikers")
        await window.get_by_role("button", name="Add members").click()
        await window.get_by_placeholder("Name, then Enter").fill("cid-g")
        await window.get_by_placeholder("Name, then Enter").press("Enter")
        await window.get_by_role("button", name="Add", exact=True).click()
        await expect(window.get_by_text("cid-g", exact=True)).to_be_visible(timeout=WAIT_MS)
        await window.get_by_role("button", name="Close").click()
        await cid.open("Hikers")
        await expect(cid.log.get_by_text("ann-g added you")).to_be_visible(timeout=WAIT_MS)
        assert "Welcome, hikers" not in await cid.shown(), "a member sees from the join on"
        await cid.say("Hello from Cid")
        await ann.sees("Hello from Cid")

        await ann.page.keyboard.press("Control+K")
        hit = ann.page.get_by_role("region", name="Messages found").get_by_role("button")

        async def found() -> bool:
            """What was said is found a moment later, and the page asks when the words change."""
            await ann.page.get_by_label("Search conversations and messages").fill("")
            await ann.page.keyboard.type("marmot")
            try:
                await expect(hit).to_have_count(1, timeout=5_000)
            except AssertionError:
                return False
            return True

        await until(found, WAIT_MS / 1_000)
        await hit.click()
        await expect(ann.bubble("A marmot is no beaver")).to_be_focused(timeout=WAIT_MS)

        await cid.page.get_by_role("button", name="Members").click()
        await cid.page.get_by_role("dialog", name="Hikers").get_by_role("button", name="Leave").click()
        await expect(cid.page.get_by_text("You cannot write here any more.")).to_be_visible(timeout=WAIT_MS)
        await expect(ben.log.get_by_text("cid-g left")).to_be_visible(timeout=WAIT_MS)
        assert ann.faults == ben.faults == cid.faults == []


async def test_a_browser_that_was_closed_has_all_when_it_comes_back(town: LocalCluster, tmp_path: Path) -> None:
    async with browsers() as browser:
        ann = await Person.enter(browser, town, "ann-c")
        async with installed(tmp_path / "ben") as context:
            ben = await Person.enter(context, town, "ben-c")
            await ben.write_to("ann-c")
            await ben.say("before")
            await ann.open("ben-c")
            await ann.sees("before")
        for n in range(30):
            await ann.say(f"while you were away {n}")
        await expect(ann.bubble("while you were away 29").get_by_label("Delivered")).to_be_visible(timeout=WAIT_MS)
        async with installed(tmp_path / "ben") as context:
            page = await context.new_page()
            await page.goto(f"http://127.0.0.1:{town.ports['web']}/")  # it knows who this is
            ben = Person(page, "ben-c")
            await expect(page.get_by_label("30 unread")).to_be_visible(timeout=WAIT_MS)
            await ben.open("ann-c")
            await ben.sees("while you were away 29")
            wanted = ["before", *(f"while you were away {n}" for n in range(30))]
            await until(lambda: _same(ben, wanted), 20, "not the same messages")
            # Without a network what is written waits, also over a reload, and goes out when it is back.
            await context.set_offline(True)
            town.stop_processes("gateway")
            await ben.say("from the tunnel")
            await expect(ben.bubble("from the tunnel").get_by_label("Waiting to be sent")).to_be_visible()
            await context.set_offline(False)
            await page.reload()
            await ben.open("ann-c")
            await expect(ben.bubble("from the tunnel").get_by_label("Waiting to be sent")).to_be_visible()
            await asyncio.to_thread(town.start_processes, "gateway")
            await expect(ben.bubble("from the tunnel").get_by_label("Read")).to_be_visible(timeout=60_000)
            await until(lambda: _same(ann, [*wanted, "from the tunnel"]), 20, "ann has not the same messages")
            assert ben.faults == []


async def _same(person: Person, wanted: list[str]) -> bool:
    return await person.shown() == wanted


async def test_gateways_that_die_in_mid_talk_cost_nothing(town: LocalCluster) -> None:
    async with browsers() as browser:
        ann, ben = await Person.enter(browser, town, "ann-k"), await Person.enter(browser, town, "ben-k")
        await ann.write_to("ben-k")
        await ann.say("ann 0")
        await ben.open("ann-k")
        said = ["ann 0"]
        for n in range(1, 25):
            if n in (8, 16):
                town.kill(f"edge-{n // 8 - 1}")
            who = ben if n % 2 else ann
            await who.say(f"{'ben' if n % 2 else 'ann'} {n}")
            said.append(f"{'ben' if n % 2 else 'ann'} {n}")
        await until(lambda: _all(ann, said), 60, "ann misses something")
        await until(lambda: _all(ben, said), 60, "ben misses something")
        assert await ann.shown() == await ben.shown()
        for name in ("ann", "ben"):
            own = [text for text in await ann.shown() if text.startswith(name)]
            assert own == [text for text in said if text.startswith(name)], "each once, in the order of sending"
        assert ann.faults == ben.faults == []


async def _all(person: Person, said: list[str]) -> bool:
    waiting = await person.page.locator(".tick.queued, .tick.accepted").count()
    return sorted(await person.shown()) == sorted(said) and waiting == 0


async def test_one_tab_at_a_time_has_the_messages_and_another_may_take_over(town: LocalCluster, tmp_path: Path) -> None:
    async with browsers() as browser:
        first = await Person.enter(browser, town, "ann-t")
        await first.write_to("ann-t")
        await first.say("a note")
        page = await first.page.context.new_page()
        second = Person(page, "ann-t")
        await page.goto(f"http://127.0.0.1:{town.ports['web']}/#ann-t")
        await expect(page.get_by_role("heading", name="Open in another tab")).to_be_visible(timeout=WAIT_MS)
        await page.get_by_role("button", name="Use this tab instead").click()
        await second.online()
        await expect(first.page.get_by_role("heading", name="Open in another tab")).to_be_visible(timeout=WAIT_MS)
        await second.open("Notes to self")
        await second.sees("a note")
        assert first.faults == second.faults == []


async def test_a_phone_shows_one_pane_and_leads_back(town: LocalCluster) -> None:
    async with browsers() as browser:
        ann = await Person.enter(browser, town, "ann-p", width=390, height=844)
        ben = await Person.enter(browser, town, "ben-p")
        await ben.write_to("ann-p")
        await ben.say("a" * 300 + " and a long word")
        await ann.open("ben-p")
        await ann.sees("and a long word")
        await expect(ann.page.get_by_role("navigation")).to_be_hidden()
        assert await ann.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await ann.page.get_by_role("button", name="Back to the conversations").click()
        await expect(ann.page.get_by_role("navigation")).to_be_visible()
        await expect(ann.page.get_by_role("main")).to_be_hidden()


async def test_from_plato_up_to_a_picture_between_two_browsers_is_less_than_two_minutes(
    new_cluster: Callable[..., LocalCluster],
) -> None:
    required()
    begun = time.monotonic()
    cluster = await asyncio.to_thread(new_cluster)
    up_s = time.monotonic() - begun
    assert f"http://127.0.0.1:{cluster.ports['web']}" in cluster.output.read_text(encoding="utf-8")
    async with browsers() as browser:
        ann, ben = await Person.enter(browser, cluster, "alice"), await Person.enter(browser, cluster, "bob")
        await ann.write_to("bob")
        await ann.say("Look at this")
        await send_picture(ann.page)
        await ben.open("alice")
        await drawn(ben.page)
        await ben.say("Beautiful!")
        await ann.sees("Beautiful!")
    took_s = time.monotonic() - begun
    print(
        f"from `plato up` to a picture between two browsers: {took_s:.1f} s, of which the cluster's start {up_s:.1f} s"
    )
    cluster.down()
    assert took_s < 120
