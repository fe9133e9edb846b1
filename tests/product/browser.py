"""A person at the chat page: headless Chromium, driven from outside, through what the page shows and nothing else.

missing()        why there is no browser here; "" where there is one
browsers()       one Chromium; each person is a browser of their own in it (a context: own storage, own settings)
Person           signs in, writes, looks
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal

import pytest
from plato.local.cluster import LocalCluster
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

ARGS: Final = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
WAIT_MS: Final = 30_000
expect.set_options(
    timeout=WAIT_MS
)  # of an `expect` that names none: five seconds are few where processes share two cores
SCREENS: Final = os.environ.get("PLATO_WEB_SCREENS", "")
"""A folder that gets pictures of the page."""


def chromium() -> str:
    """The browser's file; "" where there is none."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
    )


def required() -> None:
    """Skips the test, in words, where there is no browser; fails it where PLATO_WEB_REQUIRED says that there must be one."""
    if not chromium():
        words = "Chromium is missing (apt-get install chromium): the chat page is not tried here"
        if os.environ.get("PLATO_WEB_REQUIRED") == "1":
            pytest.fail(words)
        pytest.skip(words)


@asynccontextmanager
async def browsers() -> AsyncIterator[Browser]:
    """One Chromium, ended with the block."""
    required()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=ARGS)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def installed(folder: Path) -> AsyncIterator[BrowserContext]:
    """A browser that keeps its data in this folder, as a person's own does."""
    required()
    async with async_playwright() as playwright:
        context = await playwright.chromium.launch_persistent_context(
            str(folder), executable_path=chromium(), args=ARGS, viewport={"width": 1200, "height": 800}
        )
        try:
            yield context
        finally:
            await context.close()


class Person:
    """One person at one page."""

    def __init__(self, page: Page, name: str) -> None:
        self.page, self.name = page, name
        self.faults: list[str] = []
        """What the page complained of: exceptions, and what its policy forbade."""
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", self._heard)

    def _heard(self, message: Any) -> None:
        # A refused connection is told there as well, and is no fault of the page.
        if (
            message.type == "error"
            and "Failed to load resource" not in message.text
            and "WebSocket" not in message.text
        ):
            self.faults.append(message.text)

    @classmethod
    async def enter(
        cls,
        where: Browser | BrowserContext,
        cluster: LocalCluster,
        name: str,
        *,
        width: int = 1200,
        height: int = 800,
        scheme: Literal["light", "dark"] = "light",
    ) -> Person:
        """Opens the page in a browser of its own and signs in."""
        context = where
        if isinstance(where, Browser):
            context = await where.new_context(
                viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=1
            )
        page = await context.new_page()
        person = cls(page, name)
        await page.goto(f"http://127.0.0.1:{cluster.ports['web']}/")
        field = page.get_by_label("Your name")
        await field.fill(name)
        await field.press("Enter")
        await person.online()
        return person

    async def online(self) -> None:
        """Waits until the page says so."""
        await expect(self.page.get_by_role("status").get_by_text("Online", exact=True)).to_be_visible(timeout=WAIT_MS)

    async def write_to(self, user: str) -> None:
        """Opens the dialogue with a user, by the button for a new one."""
        await self.page.get_by_role("button", name="New conversation").last.click()
        window = self.page.get_by_role("dialog", name="New conversation")
        await window.get_by_label("To").fill(user)
        await window.get_by_label("To").press("Enter")

    async def open(self, name: str) -> None:
        """Opens a conversation of the list."""
        await self.page.get_by_role("navigation").get_by_role("button", name=name).first.click()
        await expect(self.page.get_by_role("main", name=f"Conversation with {name}")).to_be_visible()

    async def say(self, text: str) -> None:
        """Writes and sends."""
        field = self.page.get_by_placeholder("Message")
        await field.fill(text)
        await field.press("Enter")

    async def delivered(self, text: str) -> None:
        """Waits until this page knows that its message has its place: what others see of it may come before that."""
        await expect(self.bubble(text).get_by_label(re.compile("^(Delivered|Read)$"))).to_be_visible(timeout=WAIT_MS)

    async def sees(self, text: str) -> None:
        """Waits for a message."""
        await expect(self.bubble(text)).to_be_visible(timeout=WAIT_MS)

    @property
    def log(self) -> Any:
        """The messages of the conversation that is open."""
        return self.page.get_by_role("log")

    def bubble(self, text: str) -> Any:
        """The message that says this."""
        return self.page.get_by_role("article").filter(has_text=text).first

    async def choose(self, text: str, choice: str) -> None:
        """Chooses from the menu of the message that says this."""
        bubble = self.bubble(text)
        await bubble.hover()
        await bubble.get_by_role("button", name="Message", exact=True).click()
        await bubble.get_by_role("menuitem", name=choice).click()

    async def shown(self) -> list[str]:
        """The texts of the conversation that is open, from top to bottom."""
        found: list[str] = await self.page.evaluate(
            "[...document.querySelectorAll('.message .text')].map(e => e.firstChild?.textContent ?? '')"
        )
        return found

    async def screen(self, name: str) -> None:
        """A picture of the page, where somebody wants one."""
        if SCREENS:
            await self.page.screenshot(path=f"{SCREENS}/{name}.png", animations="disabled")
