"""The playground in headless Chromium, against a scripted model. Skipped only where Chromium is not installed."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.cpu.fakes import FakeFront, Script, eventually, fake_app, serving
from thalweg.config.server import ServerOptions

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
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="Chromium is not installed: apt-get install chromium")

LONG = "The sea keeps what it takes. " * 40


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGS)
        yield browser
        browser.close()


@contextmanager
def visit(
    browser: Browser,
    script: Script = lambda prompt, choice: "Good day to you.",
    *,
    gap: float = 0.0,
    chunk: int = 4,
    options: ServerOptions = ServerOptions(),  # noqa: B008  frozen
    expect_errors: bool = False,
    **context: Any,
) -> Iterator[tuple[Page, FakeFront]]:
    """A fresh visit to the page; it may ask nobody but its server, and the console stays empty unless errors are part
    of the test.
    """
    front = FakeFront(script, gap=gap, chunk=chunk)
    with serving(fake_app(front, options)) as url:
        visitor = browser.new_context(viewport={"width": 1280, "height": 800}, **context)
        page = visitor.new_page()
        asked: list[str] = []
        said: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(url)
        yield page, front
        assert all(address.startswith((url, "data:", "blob:")) for address in asked), asked
        assert expect_errors or not said, said
        visitor.close()


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def finished(page: Page, answers: int = 1) -> None:
    expect(page.locator(".model-turn .meta")).to_have_count(answers)


def test_a_conversation(chromium: Browser) -> None:
    with visit(chromium) as (page, front):
        expect(page.locator("#state-text")).to_have_text("ready")
        expect(page.locator("#model")).to_contain_text("scripted")
        send(page, "Hello")
        finished(page)
        expect(page.locator(".model-turn .text")).to_have_text("Good day to you.")
        expect(page.locator(".meta")).to_contain_text("17 tokens")
        expect(page.get_by_role("log")).to_have_attribute("aria-live", "polite")
        expect(page.get_by_role("status")).to_have_text("Answer finished: 17 tokens.")
        send(page, "And again")
        finished(page, 2)
        prompt = bytes(front.seen[-1][0]).decode()
        assert prompt.endswith(
            "Hello<｜Assistant｜></think>Good day to you.<｜end▁of▁sentence｜><｜User｜>And again<｜Assistant｜></think>"
        )
        page.get_by_role("button", name="Try again").first.click()
        finished(page, 1)
        assert bytes(front.seen[-1][0]).decode().endswith("<｜User｜>Hello<｜Assistant｜></think>")
        page.get_by_role("button", name="New conversation").click()
        expect(page.locator(".turn")).to_have_count(0)
        expect(page.get_by_role("heading", name="Say something.")).to_be_visible()


def test_code_blocks_are_shown_and_html_is_escaped(chromium: Browser) -> None:
    answer = "Look:\n\n```python\nfor i in x:\n    go()\n```\n\n<img src=x onerror=alert(1)> done"
    with visit(chromium, lambda prompt, choice: answer) as (page, _):
        send(page, "code")
        finished(page)
        expect(page.locator(".text pre")).to_have_text("for i in x:\n    go()")
        expect(page.locator(".model-turn .text")).to_contain_text("<img src=x onerror=alert(1)> done")
        assert page.locator(".text img").count() == 0


def test_thinking_shows_while_it_streams_and_folds_after(chromium: Browser) -> None:
    script = lambda prompt, choice: "Seven and eight are fifteen. " * 12 + "</think>It is 85."  # noqa: E731
    with visit(chromium, script, gap=0.02) as (page, front):
        page.get_by_role("switch", name="Think before answering").check()
        send(page, "What is 27 + 58?")
        thought = page.locator("details.thought")
        expect(thought).to_have_attribute("open", "")
        expect(thought.locator("summary")).to_have_text("Thinking…")
        expect(thought.locator("div")).to_contain_text("Seven and eight")
        expect(page.locator(".model-turn")).to_have_attribute("aria-busy", "true")
        finished(page)
        expect(thought).not_to_have_attribute("open", "")
        expect(thought.locator("summary")).to_have_text(re.compile(r"Thought for \d+\.\d s"))
        expect(page.locator(".model-turn .text")).to_have_text("It is 85.")
        expect(page.locator(".model-turn")).to_have_attribute("aria-busy", "false")
        thought.locator("summary").click()
        expect(thought.locator("div")).to_be_visible()
        assert bytes(front.seen[0][0]).decode().endswith("<think>")


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_ends_the_request(chromium: Browser, how: str) -> None:
    with visit(chromium, lambda prompt, choice: LONG, gap=0.03) as (page, front):
        send(page, "Go on")
        expect(page.locator(".model-turn .text")).to_contain_text("The sea")
        assert front.running == 1
        if how == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press("Escape")
        eventually(lambda: front.running == 0)
        assert front.ended == ["closed"] and front.pages == 0
        expect(page.locator(".meta")).to_contain_text("stopped by you")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_a_new_conversation_drops_the_answer_under_way(chromium: Browser) -> None:
    with visit(chromium, lambda prompt, choice: LONG, gap=0.03) as (page, front):
        send(page, "Go on")
        expect(page.locator(".model-turn .text")).to_contain_text("The sea")
        page.get_by_role("button", name="New conversation").click()
        eventually(lambda: front.running == 0)
        expect(page.locator(".turn")).to_have_count(0)
        front.script = lambda prompt, choice: "fresh"
        send(page, "Who?")
        finished(page)
        assert "Go on" not in bytes(front.seen[-1][0]).decode()


def test_controls_reach_the_request_and_are_remembered(chromium: Browser) -> None:
    with visit(chromium) as (page, front):
        page.get_by_label("System prompt").fill("Speak in verse.")
        page.get_by_label("Temperature, as a number").fill("0.35")
        page.get_by_label("Top-p", exact=True).fill("0.8")
        page.get_by_label("Max tokens").fill("9")
        page.get_by_label("Seed").fill("-7")
        send(page, "Hello")
        finished(page)
        prompt, params, *_ = front.seen[0]
        assert bytes(prompt).decode().startswith("<｜begin▁of▁sentence｜>Speak in verse.<｜User｜>Hello")
        assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.35, 0.8, 9, -7)
        expect(page.locator(".meta")).to_contain_text("cut at max tokens")
        page.reload()
        expect(page.get_by_label("Temperature", exact=True)).to_have_value("0.35")
        expect(page.get_by_label("Seed")).to_have_value("-7")
        page.get_by_label("Max tokens").fill("0")
        send(page, "Hello")
        assert len(front.seen) == 1, "a value out of range is not sent"
        expect(page.get_by_label("Max tokens")).to_be_focused()


def test_the_curl_line_gives_the_same_answer(chromium: Browser) -> None:
    with visit(chromium, lambda prompt, choice: "It's 'quoted' & fine: " + prompt[-40:]) as (page, front):
        page.get_by_label("Message", exact=True).fill('What\'s "this" $HOME `x`?')
        command = page.locator("#curl").inner_text()
        page.keyboard.press("Enter")
        finished(page)
        shown = page.locator(".model-turn .text").inner_text()
        answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=20, check=True).stdout
        lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
        deltas = [choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"]]
        assert "".join(deltas) == shown and "$HOME `x`?" in shown
        assert front.seen[0][:2] == front.seen[1][:2]


def test_the_status_bar_shows_the_engines_state(chromium: Browser) -> None:
    with visit(chromium, lambda prompt, choice: LONG, gap=0.02) as (page, front):
        expect(page.locator("#running")).to_have_text("0")
        send(page, "Go on")
        expect(page.locator("#running")).to_have_text("1")
        expect(page.locator("#cache")).to_have_text(re.compile(r"^[1-9][\d.]* %$"))
        expect(page.locator("#cache-bar")).to_have_attribute(
            "aria-label", re.compile(r"[\d.]+ % of the cache in use, 7.0 % kept for later")
        )
        assert page.locator("#cache-used").evaluate("e => e.getBoundingClientRect().width") > 0
        expect(page.locator("#decode")).to_have_text(re.compile(r"^[1-9]\d+$"))
        front.state, front.reason = "starting", "the engine is starting again"
        expect(page.locator("#state")).to_have_attribute("data-state", "starting")
        expect(page.locator("#state")).to_have_attribute("title", "the engine is starting again")


def test_errors_are_said_clearly(chromium: Browser) -> None:
    with visit(chromium, lambda prompt, choice: LONG, gap=0.02, expect_errors=True) as (page, front):
        front.full = True
        send(page, "Hello")
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("The server is busy")
        front.full = False
        alert.get_by_role("button", name="Try again").click()
        expect(page.locator(".model-turn .text")).to_contain_text("The sea")
        expect(alert).to_have_count(0)
        front.die("the engine process ended with exit code -9")
        expect(alert).to_contain_text("The engine is not serving")
        expect(alert).to_contain_text("exit code -9")
        expect(page.locator(".model-turn .text")).to_contain_text("The sea"), "what came stays"
        expect(page.locator(".meta")).to_contain_text("the answer broke off")
        send(page, "Still there?")
        expect(alert).to_have_count(1)
        send(page, "x" * 5000)
        expect(page.locator(".you")).to_have_count(2)


def test_a_refusal_names_the_field(chromium: Browser) -> None:
    with visit(chromium, expect_errors=True) as (page, _):
        send(page, "x" * 5000)
        expect(page.get_by_role("alert")).to_contain_text("The server refused messages")
        expect(page.get_by_role("alert")).to_contain_text("at most 4095 fit")
        send(page, "short")
        finished(page)
        expect(page.locator(".you")).to_have_count(1)


def test_a_server_with_keys(chromium: Browser) -> None:
    with visit(chromium, options=ServerOptions(api_key=("sesame",)), expect_errors=True) as (page, front):
        expect(page.locator("#state-text")).to_have_text("needs a key")
        send(page, "Hello")
        expect(page.get_by_role("alert")).to_contain_text("An API key is needed")
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("sesame")
        expect(page.locator("#state-text")).to_have_text("ready")
        page.get_by_role("alert").get_by_role("button", name="Try again").click()
        finished(page)
        curl = page.locator("#curl").inner_text()
        assert "sesame" not in curl and "$API_KEY" in curl


def test_keyboard_alone(chromium: Browser) -> None:
    with visit(chromium) as (page, front):
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        page.keyboard.press("Enter")
        finished(page)
        assert "<｜User｜>one\ntwo<" in bytes(front.seen[0][0]).decode()
        page.evaluate("document.activeElement.blur()")
        reached, bare = [], []
        for _ in range(30):
            page.keyboard.press("Tab")
            name, outline = page.evaluate(
                """() => {
                    const e = document.activeElement, name = e.id || e.textContent.trim().slice(0, 20);
                    return [e === document.body ? "body" : name, getComputedStyle(e).outlineStyle];
                }"""
            )
            reached.append(name)
            bare += [name] if outline == "none" and name != "body" else []
        assert not bare, f"no visible focus on {bare}"
        wanted = {
            "theme",
            "log",
            "prompt",
            "system",
            "thinking",
            "temperature",
            "top_p",
            "max_tokens",
            "seed",
            "key",
            "curl",
            "clear",
        }
        assert wanted <= set(reached), wanted - set(reached)


def test_every_control_has_a_name(chromium: Browser) -> None:
    with visit(chromium) as (page, _):
        send(page, "Hello")
        finished(page)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, input, textarea, [role], summary, details")].filter((e) => {
                if (e.matches("details, [role=status], [role=alert]")) return false;
                const label = e.getAttribute("aria-label") || (e.labels && e.labels.length && e.labels[0].textContent) || e.textContent;
                return !label.trim();
            }).map((e) => e.outerHTML)"""
        )
        assert nameless == []


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(chromium: Browser, scheme: str) -> None:
    with visit(chromium, color_scheme=scheme) as (page, _):
        body = lambda: luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))  # noqa: E731
        assert (body() > 0.5) == (scheme == "light")
        send(page, "Hello")
        finished(page)
        for chosen in (".model-turn .text", ".meta", "#keys", ".strip dt", ".you .text", ".quiet"):
            ink, ground = page.locator(chosen).first.evaluate(
                """e => { let b = e; while (getComputedStyle(b).backgroundColor === "rgba(0, 0, 0, 0)") b = b.parentElement;
                          return [getComputedStyle(e).color, getComputedStyle(b).backgroundColor]; }"""
            )
            light, dark = sorted((luminance(ink), luminance(ground)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (chosen, ink, ground)
        other = "dark" if scheme == "light" else "light"
        page.get_by_role("button", name=f"Switch to {other} colours").click()
        assert (body() > 0.5) == (other == "light")
        page.reload()
        assert (body() > 0.5) == (other == "light")
        expect(page.get_by_role("button", name=f"Switch to {scheme} colours")).to_be_visible()


@pytest.mark.parametrize(("width", "height"), [(320, 640), (390, 780), (820, 1000)])
def test_narrow_windows(chromium: Browser, width: int, height: int) -> None:
    with visit(chromium) as (page, front):
        page.set_viewport_size({"width": width, "height": height})
        send(page, "w" * 300)
        finished(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        expect(page.get_by_label("System prompt")).to_be_hidden()
        button = page.get_by_role("button", name="Settings")
        button.click()
        expect(button).to_have_attribute("aria-expanded", "true")
        page.get_by_label("System prompt").fill("Be brief.")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.keyboard.press("Escape")
        expect(page.get_by_label("System prompt")).to_be_hidden()
        expect(button).to_be_focused()
        send(page, "Hello")
        finished(page, 2)
        assert "Be brief." in bytes(front.seen[-1][0]).decode()


def test_the_page_can_be_left_out() -> None:
    with serving(fake_app(FakeFront(), ServerOptions(playground=False))) as url:
        assert httpx.get(url + "/").status_code == 404 and httpx.get(url + "/health").status_code == 200
    with serving(fake_app(FakeFront())) as url:
        page = httpx.get(url + "/")
        assert (
            page.headers["content-type"].startswith("text/html")
            and "default-src 'self'" in page.headers["content-security-policy"]
        )
