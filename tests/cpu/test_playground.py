"""The playground's conversations, settings and errors in headless Chromium, against a scripted model."""

from __future__ import annotations

import json
import re
import subprocess

import httpx
from playwright.sync_api import Page, expect

from tests.cpu.fakes import DEEPSEEK_V32, FakeFront, eventually, fake_app, serving
from tests.cpu.playground import (
    LONG,
    Site,
    bodies,
    finished,
    nameless,
    needs_chromium,
    prompt_of,
    readable,
    send,
    site,
)
from thalweg.config.server import ServerOptions
from thalweg.core.sampling import SamplingParams
from thalweg.server.app import build

__all__ = ["site"]
pytestmark = needs_chromium


def answer(page: Page, text: str, at: int = 0) -> None:
    expect(page.locator(".model-turn .text").nth(at)).to_have_text(text)


def test_versions_of_messages_and_answers_survive_a_reload(site: Site) -> None:
    with site.visit() as page:
        expect(page.get_by_role("heading", name="Say something.")).to_be_visible()
        send(page, "Hello")
        finished(page)
        answer(page, "Good day to you.")
        expect(page.locator(".meta")).to_contain_text("17 tokens")
        expect(page.locator(".meta")).to_contain_text("TTFT")
        expect(page.get_by_role("log")).to_have_attribute("aria-live", "polite")
        expect(page.get_by_role("status")).to_have_text("Answer finished.")
        expect(page.locator("#usage")).to_have_text(re.compile(r"^\d+ of 4,096 tokens$"))
        send(page, "And again")
        finished(page, 2)
        history = "Hello<｜Assistant｜></think>Good day to you.<｜end▁of▁sentence｜><｜User｜>And again<｜Assistant｜></think>"
        assert prompt_of(site).endswith(history)
        site.front.script = lambda prompt, choice: "Good night."
        page.get_by_role("button", name="Regenerate").first.click()
        answer(page, "Good night.")
        finished(page, 1)
        assert prompt_of(site).endswith("<｜User｜>Hello<｜Assistant｜></think>")
        expect(page.locator(".model-turn .versions")).to_have_text("2/2")
        page.get_by_role("button", name="Previous version").click()
        answer(page, "Good day to you.")
        finished(page, 2)
        expect(page.get_by_role("button", name="Next version")).to_be_focused()
        page.locator(".you").nth(1).get_by_role("button", name="Edit").click()
        field = page.get_by_label("Edit the message")
        expect(field).to_have_value("And again")
        page.keyboard.press("Escape")
        expect(field).to_have_count(0)
        page.locator(".you").nth(1).get_by_role("button", name="Edit").click()
        field.fill("And better")
        page.keyboard.press("Enter")
        answer(page, "Good night.", 1)
        assert prompt_of(site).endswith(
            "Good day to you.<｜end▁of▁sentence｜><｜User｜>And better<｜Assistant｜></think>"
        )
        finished(page, 2)
        page.reload()
        expect(page.locator(".you .text")).to_have_text(["Hello", "And better"])
        answer(page, "Good night.", 1)
        expect(page.locator(".versions:not([hidden])")).to_have_text(["1/2", "2/2"])


def test_the_list_of_conversations(site: Site) -> None:
    with site.visit() as page:
        send(page, "The first one")
        finished(page)
        page.get_by_role("button", name="New conversation", exact=True).click()
        expect(page.locator(".turn")).to_have_count(0)
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        send(page, "<b>second</b>")
        finished(page)
        assert "The first one" not in prompt_of(site)
        titles = page.locator("#conversations .open")
        expect(titles).to_have_text(["<b>second</b>", "The first one"])
        titles.nth(1).hover()
        page.get_by_role("button", name="Rename The first one").click()
        page.keyboard.type("Greetings")
        page.keyboard.press("Enter")
        expect(titles).to_have_text(["<b>second</b>", "Greetings"])
        titles.nth(1).click()
        expect(page.locator(".you .text")).to_have_text("The first one")
        expect(titles.nth(1)).to_have_attribute("aria-current", "true")
        page.get_by_role("button", name="Delete Greetings").click()
        page.get_by_role("button", name="Keep").click()
        page.get_by_role("button", name="Delete Greetings").click()
        page.get_by_role("button", name="Delete", exact=True).click()
        expect(titles).to_have_text(["<b>second</b>"])
        expect(page.locator(".turn")).to_have_count(0)
        page.reload()
        expect(titles).to_have_text(["<b>second</b>"])


def test_stop_with_the_button_and_with_escape(site: Site) -> None:
    with site.visit(lambda prompt, choice: LONG, gap=0.03) as page:
        for i, stop in enumerate(("Stop", "Escape")):
            send(page, "Go on")
            expect(page.locator(".model-turn .text").nth(i)).to_contain_text("The sea")
            assert site.front.running == 1
            expect(page.locator(".model-turn").nth(i)).to_have_attribute("aria-busy", "true")
            if stop == "Stop":
                page.get_by_role("button", name="Stop", exact=True).click()
            else:
                page.keyboard.press("Escape")
            eventually(lambda: site.front.running == 0)
            expect(page.locator(".meta").nth(i)).to_contain_text("stopped by you")
            expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
            expect(page.get_by_label("Message", exact=True)).to_be_focused()
        assert site.front.ended == ["closed", "closed"] and site.front.pages == 0


def test_an_answer_goes_on_behind_another_conversation_and_survives_a_reload(site: Site) -> None:
    with site.visit(lambda prompt, choice: LONG, gap=0.02, chunk=12) as page:
        send(page, "Go on")
        expect(page.locator(".model-turn .text")).to_contain_text("The sea")
        page.get_by_role("button", name="New conversation", exact=True).click()
        expect(page.locator(".turn")).to_have_count(0)
        expect(page.locator("#conversations .busy")).to_have_count(1)
        expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
        page.locator("#conversations .open").click()
        expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()
        finished(page)
        answer(page, LONG.strip())
        send(page, "And on")
        expect(page.locator(".model-turn .text").nth(1)).to_contain_text("The sea")
        page.reload()
        expect(page.locator(".model-turn .text").nth(1)).to_contain_text("The sea")
        expect(page.locator(".meta").nth(1)).to_contain_text("the answer broke off")
        eventually(lambda: site.front.running == 0)


def test_thinking_shows_while_it_streams_and_folds_after(site: Site) -> None:
    script = lambda prompt, choice: "Seven and eight are **fifteen**. " * 8 + "</think>It is 85."  # noqa: E731
    with site.visit(script, gap=0.02) as page:
        page.get_by_role("switch", name="Think before answering").check()
        send(page, "What is 27 + 58?")
        thought = page.locator("details.thought")
        expect(thought).to_have_attribute("open", "")
        expect(thought.locator("summary")).to_have_text("Thinking…")
        expect(thought.locator("strong").first).to_have_text("fifteen")
        finished(page)
        expect(thought).not_to_have_attribute("open", "")
        expect(thought.locator("summary")).to_have_text(re.compile(r"Thought for \d+\.\d s"))
        answer(page, "It is 85.")
        expect(page.locator(".model-turn")).to_have_attribute("aria-busy", "false")
        assert prompt_of(site).endswith("<think>")


def test_settings_start_from_the_servers_defaults(site: Site) -> None:
    defaults = SamplingParams(temperature=0.6, top_p=0.95)
    app = build(site.front, ServerOptions(), DEEPSEEK_V32, path="models/scripted", defaults=defaults)  # type: ignore[arg-type]
    with serving(app) as url, site.visit(url=url) as page:
        temperature, slider = page.get_by_label("Temperature", exact=True), page.get_by_label("Temperature slider")
        expect(temperature).to_have_attribute("placeholder", "0.6")
        expect(slider).to_have_value("0.6")
        sent = bodies(page)
        send(page, "Hello")
        finished(page)
        assert not {"temperature", "top_p", "max_tokens", "seed"} & sent[0].keys()
        assert (site.front.seen[0][1].temperature, site.front.seen[0][1].top_p) == (0.6, 0.95)
        page.get_by_label("System prompt").fill("Speak in verse.")
        slider.fill("0.35")
        expect(temperature).to_have_value("0.35")
        page.get_by_label("Top-p", exact=True).fill("0.8")
        page.get_by_label("Max tokens").fill("9")
        page.get_by_label("Seed").fill("-7")
        page.get_by_text("More sampling").click()
        page.get_by_label("Top-k").fill("40")
        page.get_by_label("Stop strings").fill("day\nnight")
        send(page, "Hello")
        finished(page, 2)
        params = site.front.seen[1][1]
        assert prompt_of(site).startswith("<｜begin▁of▁sentence｜>Speak in verse.<｜User｜>Hello")
        assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.35, 0.8, 9, -7)
        assert (params.top_k, params.stop) == (40, ("day", "night"))
        page.reload()
        expect(slider).to_have_value("0.35")
        expect(page.get_by_label("Seed")).to_have_value("-7")
        page.get_by_label("Max tokens").fill("0")
        send(page, "Hello")
        expect(page.get_by_label("Max tokens")).to_be_focused()
        assert len(sent) == 2, "a value out of range is not sent"
        page.get_by_role("button", name="Back to the defaults").click()
        expect(temperature).to_have_value("")
        expect(slider).to_have_value("0.6")
        expect(page.get_by_label("System prompt")).to_have_value("Speak in verse.")


def test_the_curl_line_gives_the_same_answer(site: Site) -> None:
    with site.visit(lambda prompt, choice: "It's 'quoted' & fine: " + prompt[-40:]) as page:
        page.get_by_text("This request with curl").click()
        page.get_by_label("Message", exact=True).fill('What\'s "this" $HOME `x`?')
        command = page.locator("#curl").inner_text()
        page.keyboard.press("Enter")
        finished(page)
        shown = page.locator(".model-turn .text").inner_text()
        output = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=20, check=True).stdout
        lines = [line.removeprefix("data: ") for line in output.splitlines() if line.startswith("data: {")]
        deltas = [choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"]]
        assert "".join(deltas).replace("`", "") == shown and "$HOME x?" in shown
        assert site.front.seen[0][:2] == site.front.seen[1][:2]


def test_the_strip_shows_the_engines_state(site: Site) -> None:
    with site.visit(lambda prompt, choice: LONG, gap=0.02) as page:
        expect(page.locator("#state-text")).to_have_text("ready")
        expect(page.get_by_label("Model", exact=True)).to_have_value("scripted")
        send(page, "Go on")
        expect(page.locator("#running")).to_have_text("1")
        expect(page.locator("#cache")).to_have_text(re.compile(r"^[1-9][\d.]* %$"))
        use = re.compile(r"[\d.]+ % of the cache in use, 7.0 % kept for later")
        expect(page.locator("#cache-bar")).to_have_attribute("aria-label", use)
        expect(page.locator("#decode")).to_have_text(re.compile(r"^[1-9]\d+$"))
        site.front.state, site.front.reason = "starting", "the engine is starting again"
        expect(page.locator("#state")).to_have_attribute("data-state", "starting")
        expect(page.locator("#state")).to_have_attribute("title", "the engine is starting again")
        site.front.state = "ready"
        page.keyboard.press("Escape")
        eventually(lambda: site.front.running == 0)


def test_errors_are_said_clearly(site: Site) -> None:
    with site.visit(lambda prompt, choice: LONG, gap=0.02, expect_errors=True) as page:
        site.front.full = True
        send(page, "Hello")
        alert = page.locator(".wrong")
        expect(alert).to_have_attribute("role", "alert")
        expect(alert).to_contain_text("The server is busy")
        site.front.full = False
        alert.get_by_role("button", name="Try again").click()
        expect(page.locator(".model-turn .text")).to_contain_text("The sea")
        expect(alert).to_have_count(0)
        site.front.die("the engine process ended with exit code -9")
        expect(alert).to_contain_text("The engine is not serving")
        expect(alert).to_contain_text("exit code -9")
        expect(page.locator(".model-turn .text")).to_contain_text("The sea")
        site.front.__dict__.update(FakeFront(lambda prompt, choice: "short").__dict__)
        send(page, "x" * 5000)
        expect(alert.nth(1)).to_contain_text("The conversation is longer than the context")
        expect(alert.nth(1)).to_contain_text("maximum context length is 4096 tokens")
        expect(page.locator("#usage")).to_have_text(re.compile(r"^5,\d+ of 4,096 tokens$"))
        expect(alert.nth(1).get_by_role("button", name="Try again")).to_have_count(0)
        alert.nth(1).get_by_role("button", name="Edit").click()
        field = page.get_by_label("Edit the message")
        expect(field).to_be_focused()
        alert.nth(1).get_by_role("button", name="Edit").click()
        field.fill("Shorter")
        page.keyboard.press("Enter")
        answer(page, "short", 1)
        expect(page.locator("#usage")).to_have_text(re.compile(r"^\d{1,3} of 4,096 tokens$"))
        send(page, "x" * 5000)
        expect(alert.nth(1)).to_contain_text("The conversation is longer than the context")
        send(page, "Still there?")
        answer(page, "short", 2)
        expect(page.locator(".you .text")).to_have_text(["Hello", "Shorter", "Still there?"])
        page.evaluate("() => { window.fetch = () => Promise.reject(new TypeError('Failed to fetch')); }")
        send(page, "And now?")
        expect(alert.nth(1)).to_contain_text("The server cannot be reached")


def test_a_full_storage_is_said_and_the_page_goes_on(site: Site) -> None:
    with site.visit() as page:
        page.evaluate(
            """() => { let text = "x".repeat(1 << 20);
                       for (let i = 0; text.length > 64; i++) try { localStorage.setItem("fill" + i, text); }
                       catch { text = text.slice(0, text.length / 2); } }"""
        )
        send(page, "Hello")
        finished(page)
        expect(page.get_by_role("alert")).to_contain_text("The storage of this browser is full")
        page.evaluate("() => localStorage.removeItem('fill0')")
        send(page, "Hello again")
        finished(page, 2)
        expect(page.locator("#notice")).to_be_hidden()


def test_a_server_with_keys(site: Site) -> None:
    app = fake_app(site.front, ServerOptions(api_key=("sesame",)))
    with serving(app) as url, site.visit(url=url, expect_errors=True) as page:
        expect(page.locator("#state-text")).to_have_text("needs a key")
        send(page, "Hello")
        expect(page.locator(".wrong")).to_contain_text("An API key is needed")
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("sesame")
        expect(page.locator("#state-text")).to_have_text("ready")
        expect(page.get_by_label("Model", exact=True)).to_have_value("scripted")
        page.locator(".wrong").get_by_role("button", name="Try again").click()
        finished(page)
        curl = page.locator("#curl").text_content() or ""
        assert "sesame" not in curl and "$API_KEY" in curl
        assert "sesame" not in page.evaluate("() => JSON.stringify(localStorage)")


def test_the_page_follows_an_answer_only_from_its_end(site: Site) -> None:
    lines = "\n\n".join(f"Line {i} of the answer." for i in range(40))
    with site.visit(lambda prompt, choice: lines, size=(1280, 500)) as page:
        send(page, "Go on")
        finished(page)
        end = (
            "() => { const e = document.querySelector('#log'); return e.scrollHeight - e.scrollTop - e.clientHeight; }"
        )
        assert page.evaluate(end) < 2
        page.locator("#log").evaluate("e => { e.scrollTop = 200; }")
        jump = page.get_by_role("button", name="To the end of the conversation")
        expect(jump).to_be_visible()
        site.front.gap, site.front.chunk = 0.005, 16
        page.get_by_role("button", name="Regenerate").evaluate("e => e.click()")
        expect(page.locator(".model-turn .text")).to_contain_text("Line 20 of")
        page.locator("#log").evaluate("e => { e.scrollTop = 100; }")
        finished(page)
        assert page.locator("#log").evaluate("e => e.scrollTop") == 100
        jump.click()
        assert page.evaluate(end) < 2


def test_log_probabilities_show_the_alternatives(site: Site) -> None:
    with site.visit(lambda prompt, choice: "ab é") as page:
        page.get_by_role("switch", name="Log-probabilities").check()
        sent = bodies(page)
        send(page, "Hello")
        finished(page)
        assert (sent[0]["logprobs"], sent[0]["top_logprobs"]) == (True, 5)
        tokens = page.locator(".token-text .tok")
        expect(tokens).to_have_text(["a", "b", " ", "\\xc3", "\\xa9", "<eos>"])
        tokens.nth(1).hover()
        tip = page.get_by_role("tooltip")
        rows = [["b", "55.0 %", "−0.598"], ["c", "20.2 %", "−1.598"]]  # exp(-0.5 - 98 / 1000) = 0.5499
        assert [row.inner_text().split("\t")[:3] for row in tip.locator("tr").all()][:2] == rows
        expect(tip.locator(".chosen th")).to_have_text("b")
        page.get_by_role("group", name="Tokens of the answer").focus()
        page.keyboard.press("ArrowRight")
        expect(tip.locator(".chosen th")).to_have_text(re.compile(r"^[ac␣]$"))
        page.get_by_role("button", name="Tokens", exact=True).click()
        expect(page.locator(".model-turn .text")).to_be_visible()
        expect(tokens.first).to_be_hidden()
        expect(tip).to_be_hidden()


def test_keyboard_and_names(site: Site) -> None:
    with site.visit() as page:
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        page.keyboard.press("Enter")
        finished(page)
        assert "<｜User｜>one\ntwo<" in prompt_of(site)
        page.evaluate("document.activeElement.blur()")
        reached, bare = set(), []
        for _ in range(34):
            page.keyboard.press("Tab")
            name, is_shown = page.evaluate(
                """() => {
                    const e = document.activeElement, name = e.id || e.getAttribute("aria-label") || e.textContent.trim();
                    const seen = (x) => getComputedStyle(x).outlineStyle !== "none";
                    const ring = [e, e.closest(".composer"), e.nextElementSibling].some((x) => x && seen(x));
                    return [e === document.body ? "body" : name, ring];
                }"""
            )
            reached.add(name)
            bare += [] if is_shown or name == "body" else [name]
        assert not bare, f"no visible focus on {bare}"
        wanted = {"new", "model", "theme", "log", "prompt", "thinking", "system", "temperature", "top_p", "max_tokens"}
        wanted |= {"seed", "logprobs", "key", "Copy answer", "Regenerate", "Edit", "Rename one two", "Delete one two"}
        assert wanted <= reached, wanted - reached
        assert nameless(page) == []


def test_light_and_dark(site: Site) -> None:
    text = (
        "See [it](https://a.example) in `code`:\n\n```python\ndef f(): return 1  # why\n```\n\n> said\n\n|a|\n|-|\n|1|"
    )
    with site.visit(lambda prompt, choice: text, scheme="dark") as page:
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = page.evaluate(ground)
        send(page, "Hello")
        finished(page)
        for _ in range(2):
            readable(
                page, ".model-turn .text p", ".text a", ".text code", ".text th", ".text blockquote", ".code figcaption"
            )
            readable(page, ".hljs-keyword", ".hljs-title", ".hljs-number", ".hljs-comment")
            readable(
                page,
                ".meta",
                "#keys",
                ".strip dt",
                ".you .text",
                ".usage",
                ".hint",
                ".open",
                ".new",
                "legend",
                ".chip span",
            )
            page.locator("#theme").click()
        page.get_by_role("button", name="Switch to light colours").click()
        light = page.evaluate(ground)
        assert light != dark
        page.reload()
        assert page.evaluate(ground) == light
        expect(page.get_by_role("button", name="Switch to dark colours")).to_be_visible()


def test_narrow_windows(site: Site) -> None:
    with site.visit(lambda prompt, choice: "| a | b |\n|-|-|\n| " + "w" * 90 + " | 2 |", size=(390, 844)) as page:
        send(page, "w" * 300)
        finished(page)
        for width in (320, 390, 820):
            page.set_viewport_size({"width": width, "height": 700})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.locator("#log").evaluate("e => e.scrollWidth <= e.clientWidth")
            expect(page.get_by_label("System prompt")).to_be_hidden()
        page.set_viewport_size({"width": 390, "height": 844})
        button = page.get_by_role("button", name="Settings", exact=True)
        button.click()
        expect(button).to_have_attribute("aria-expanded", "true")
        page.get_by_label("System prompt").fill("Be brief.")
        page.keyboard.press("Escape")
        expect(page.get_by_label("System prompt")).to_be_hidden()
        expect(button).to_be_focused()
        page.get_by_role("button", name="Conversations", exact=True).click()
        page.locator("#sidebar").get_by_role("button", name="Close").click()
        expect(page.locator("#sidebar")).to_be_hidden()
        page.get_by_role("button", name="Start a new conversation").click()
        send(page, "Hello")
        finished(page)
        assert "Be brief." in prompt_of(site)


def test_the_files_of_the_page(site: Site) -> None:
    page = httpx.get(site.url + "/")
    policy = page.headers["content-security-policy"]
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in policy and "unsafe" not in policy and "require-trusted-types-for 'script'" in policy
    again = httpx.get(site.url + "/", headers={"If-None-Match": page.headers["etag"]})
    assert again.status_code == 304 and not again.content
    for path, kind in (("/vendor/Temml.woff2", "font/woff2"), ("/vendor/purify.min.js", "text/javascript")):
        assert httpx.get(site.url + path).headers["content-type"].startswith(kind)
    assert httpx.get(site.url + "/vendor/manifest.json").status_code == 404
    with serving(fake_app(FakeFront(), ServerOptions(playground=False))) as url:
        assert httpx.get(url + "/").status_code == 404 and httpx.get(url + "/health").status_code == 200
