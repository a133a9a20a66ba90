"""The playground in headless Chromium, against a scripted model: what its tests share. One browser and server a module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect, sync_playwright

from tests.cpu.fakes import FakeFront, Script, fake_app, serving

CHROMIUM = Path("/usr/bin/chromium")
ARGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
needs_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason="Chromium is not installed: apt-get install chromium")
LONG = "The sea keeps what it takes. " * 40


@dataclass(frozen=True)
class Site:
    context: BrowserContext  # shared by the tests of a module: the libraries are loaded once
    front: FakeFront
    url: str

    @contextmanager
    def visit(
        self,
        script: Script = lambda prompt, choice: "Good day to you.",
        *,
        gap: float = 0.0,
        chunk: int = 4,
        url: str = "",
        expect_errors: bool = False,
        size: tuple[int, int] = (1280, 800),
        scheme: Any = "light",
    ) -> Iterator[Page]:
        """A first visit to the page, with nothing stored; it may ask nobody but its server, and the console stays empty
        unless errors are part of the test.

        url: of another server than the module's.
        """
        self.front.__dict__.update(FakeFront(script, gap, chunk).__dict__)
        page, address = self.context.new_page(), url or self.url
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.emulate_media(color_scheme=scheme)
        self.context.new_cdp_session(page).send(
            "Storage.clearDataForOrigin", {"origin": address, "storageTypes": "local_storage"}
        )
        asked: list[str] = []
        said: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(address)
        yield page
        assert all(address.startswith((url or self.url, "data:", "blob:")) for address in asked), asked
        assert expect_errors or not said, said
        page.close()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    front = FakeFront()
    with sync_playwright() as playwright, serving(fake_app(front)) as url:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGS)
        yield Site(browser.new_context(), front, url)
        browser.close()


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def finished(page: Page, answers: int = 1) -> None:
    expect(page.locator(".model-turn .meta")).to_have_count(answers)


def bodies(page: Page) -> list[dict[str, Any]]:
    """The bodies of the chat requests that the page sends from now on."""
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.post_data else None)
    return sent


def prompt_of(site: Site, request: int = -1) -> str:
    return bytes(site.front.seen[request][0]).decode()


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def readable(page: Page, *chosen: str) -> None:
    """Contrast of at least 4.5 between a text and what is behind it (WCAG 2 AA)."""
    for one in chosen:
        ink, ground = page.locator(one).first.evaluate(
            """e => { let b = e; while (getComputedStyle(b).backgroundColor === "rgba(0, 0, 0, 0)") b = b.parentElement;
                      return [getComputedStyle(e).color, getComputedStyle(b).backgroundColor]; }"""
        )
        light, dark = sorted((luminance(ink), luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (one, ink, ground)


def nameless(page: Page) -> list[str]:
    """The controls that a screen reader could not name."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, select, fieldset, dialog, section, form, [role=region], [role=img]")]
            .filter((e) => {
                const legend = e.querySelector("legend, h2");
                const label = e.getAttribute("aria-label") || (e.labels && e.labels.length && e.labels[0].textContent)
                    || e.getAttribute("aria-labelledby") || (legend && legend.textContent) || e.textContent;
                return !label.trim() && e.id !== "controls" && !e.matches(".calls, .edit");
            }).map((e) => e.outerHTML)"""
    )
    return found
