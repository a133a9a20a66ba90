"""The playground's tools, calls and JSON answers in headless Chromium, against a scripted model."""

from __future__ import annotations

import json
import re
from typing import Any

from playwright.sync_api import Page, expect

from tests.cpu.fakes import eventually
from tests.cpu.playground import Site, bodies, finished, nameless, needs_chromium, prompt_of, readable, send, site

__all__ = ["site"]
pytestmark = needs_chromium

EVIL = '<img src=x onerror="document.title=1">'


def dsml(*calls: tuple[str, dict[str, str]]) -> str:
    rows = []
    for name, arguments in calls:
        inner = [
            f'<｜DSML｜parameter name="{key}" string="true">{value}</｜DSML｜parameter>'
            for key, value in arguments.items()
        ]
        rows.append("\n".join([f'<｜DSML｜invoke name="{name}">', *inner, "</｜DSML｜invoke>"]))
    return "\n\n<｜DSML｜function_calls>\n" + "\n".join(rows) + "\n</｜DSML｜function_calls>"


def weather(prompt: str, choice: int) -> str:
    """Calls for two places at once, behind a thought; answers when the results are there."""
    if "<result>" in prompt:
        return "Good.</think>Both are **wet**."
    return "I look at both.</think>Let me see." + dsml(
        ("weather", {"place": "Ulm"}), ("weather", {"place": EVIL, "unit": "°C"})
    )


def add_tool(page: Page, name: str, parameters: str = "") -> None:
    page.get_by_role("button", name="Add a tool").click()
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Description").fill("The weather at a place")
    if parameters:
        page.get_by_label("Arguments (JSON schema)").fill(parameters)
    page.get_by_role("button", name="Save the tool").click()
    expect(page.get_by_role("dialog")).to_have_count(0)


def tool_names(body: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in body["tools"]]


def test_a_tool_is_defined_called_and_answered(site: Site) -> None:
    with site.visit(weather, gap=0.002) as page:
        sent = bodies(page)
        schema = {"type": "object", "properties": {"place": {"type": "string"}, "unit": {"type": "string"}}}
        add_tool(page, "weather", json.dumps(schema))
        page.get_by_role("switch", name="Think before answering").check()
        send(page, "How is it there?")
        results = page.get_by_label("Result of weather")
        expect(results).to_have_count(2)
        assert sent[0]["tools"] == [
            {
                "type": "function",
                "function": {"name": "weather", "description": "The weather at a place", "parameters": schema},
            }
        ]
        assert sent[0]["tool_choice"] == "auto" and "parallel_tool_calls" not in sent[0]
        shown = page.locator(".call pre")
        assert json.loads(shown.nth(0).inner_text()) == {"place": "Ulm"}
        assert json.loads(shown.nth(1).inner_text()) == {"place": EVIL, "unit": "°C"}
        assert page.locator(".log img").count() == 0 and page.title() != "1"
        expect(page.locator("details.thought summary")).to_have_text(re.compile("Thought for"))
        expect(page.locator(".model-turn .text")).to_have_text("Let me see.")
        expect(page.get_by_role("status")).to_have_text("The model calls weather, weather. Type what it returns.")
        expect(results.nth(0)).to_be_focused()
        send(page, "too early")
        expect(results.nth(0)).to_be_focused()
        assert len(site.front.seen) == 1, "a message waits until the calls have their results"
        page.get_by_label("Message", exact=True).fill("")
        results.nth(0).fill("rain")
        page.keyboard.press("Enter")
        expect(results.nth(1)).to_be_focused()
        page.keyboard.type("snow")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("and <b>fog</b>")
        page.keyboard.press("Enter")
        finished(page, 2)
        expect(page.locator(".model-turn .text").nth(1)).to_have_text("Both are wet.")
        call, first, second = sent[1]["messages"][-3:]
        assert call["reasoning_content"] == "I look at both." and call["content"] == "Let me see."
        assert (first["content"], second["content"]) == ("rain", "snow\nand <b>fog</b>")
        assert [first["tool_call_id"], second["tool_call_id"]] == [one["id"] for one in call["tool_calls"]]
        expect(page.locator(".call pre.result").nth(1)).to_have_text("snow\nand <b>fog</b>")
        assert "<result>rain</result>" in prompt_of(site)
        page.get_by_role("button", name="Regenerate").first.click()
        expect(page.get_by_label("Result of weather")).to_have_count(2)
        assert [message["role"] for message in sent[2]["messages"]] == ["user"]
        page.reload()
        expect(page.get_by_role("button", name="Edit weather")).to_be_visible()


def test_the_dialog_checks_what_is_typed(site: Site) -> None:
    with site.visit() as page:
        add_tool(page, "weather")
        page.get_by_role("button", name="Add a tool").click()
        dialog, name = page.get_by_role("dialog"), page.get_by_label("Name", exact=True)
        arguments, save = page.get_by_label("Arguments (JSON schema)"), page.get_by_role("button", name="Save the tool")
        expect(name).to_be_focused()
        for wrong, why in (
            ("weather", "There is a tool weather already."),
            ("a b", "1 to 64 letters"),
            ("", "1 to 64"),
        ):
            name.fill(wrong)
            save.click()
            expect(dialog).to_be_visible()
            expect(page.locator("#tool-name-problem")).to_contain_text(why)
        name.fill("clock")
        for wrong, why in (
            ("{", "The schema is not JSON"),
            ("[]", "must be a JSON object"),
            ("{}", '"type": "object"'),
        ):
            arguments.fill(wrong)
            save.click()
            expect(page.locator("#tool-parameters-problem")).to_contain_text(why)
            expect(arguments).to_have_attribute("aria-invalid", "true")
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        expect(page.get_by_role("button", name="Edit clock")).to_have_count(0)
        page.get_by_role("button", name="Add a tool").click()
        pasted = {"name": "clock", "description": "The time", "strict": True, "parameters": {"type": "object"}}
        arguments.fill(json.dumps({"type": "function", "function": pasted}))
        expect(name).to_have_value("clock")
        expect(page.get_by_label("Description")).to_have_value("The time")
        expect(page.get_by_role("switch", name="Hold the model to the schema")).to_be_checked()
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Enter")  # in a field: saves
        expect(page.get_by_role("button", name="Edit clock")).to_be_visible()
        sent = bodies(page)
        page.get_by_label("Call one").select_option("only clock")
        page.get_by_role("switch", name="Several calls at once").uncheck()
        page.get_by_role("button", name="Remove weather").click()
        expect(page.get_by_role("button", name="Add a tool")).to_be_focused()
        expect(page.get_by_label("Call one")).to_have_value("call clock")
        page.get_by_role("button", name="Edit clock").click()
        name.fill("watch")
        save.click()
        expect(page.get_by_label("Call one")).to_have_value("auto")
        send(page, "Hello")
        finished(page)
        assert [tool["function"]["name"] for tool in sent[0]["tools"]] == ["watch"]
        assert sent[0]["tools"][0]["function"]["strict"] is True and sent[0]["parallel_tool_calls"] is False
        curl = page.locator("#curl").text_content() or ""
        assert '"parallel_tool_calls": false' in curl and '"name": "watch"' in curl


def test_json_answers(site: Site) -> None:
    answers = iter(['{"a": 1, "b": "<b>"}', '{"n": 7}', '{"n": 7'])
    with site.visit(lambda prompt, choice: next(answers)) as page:
        sent = bodies(page)
        page.get_by_label("Answer as", exact=True).select_option("JSON")
        expect(page.get_by_label("Schema of the answer")).to_be_hidden()
        send(page, "Give me JSON")
        finished(page, 1)
        assert sent[0]["response_format"] == {"type": "json_object"}
        expect(page.locator(".text pre")).to_have_text('{\n  "a": 1,\n  "b": "<b>"\n}')
        page.get_by_label("Answer as", exact=True).select_option("JSON of a schema")
        schema = page.get_by_label("Schema of the answer")
        schema.fill('{"type": "object"')
        expect(page.locator("#schema-problem")).to_contain_text("The schema is not JSON")
        send(page, "Again")
        expect(schema).to_be_focused()
        assert len(sent) == 1, "a schema that is no JSON is not sent"
        schema.fill('{"type": "object", "properties": {"n": {"type": "integer"}}}')
        send(page, "Again")
        finished(page, 2)
        wanted = {"type": "object", "properties": {"n": {"type": "integer"}}}
        assert sent[1]["response_format"]["json_schema"] == {"name": "answer", "strict": True, "schema": wanted}
        send(page, "Once more")
        finished(page, 3)
        expect(page.locator(".meta").nth(2)).to_contain_text("not valid JSON")
        assert sent[2]["messages"][-2]["content"] == '{"n": 7}', "what goes back is the text as it came"


def test_a_call_that_was_stopped_is_left_out(site: Site) -> None:
    script = lambda prompt, choice: dsml(("weather", {"place": "x" * 400}))  # noqa: E731
    with site.visit(script, gap=0.03) as page:
        sent = bodies(page)
        add_tool(page, "weather")
        send(page, "How is it?")
        expect(page.locator(".call pre")).to_contain_text("xxx")
        page.keyboard.press("Escape")
        eventually(lambda: site.front.running == 0)
        expect(page.locator(".problem:not(:empty)")).to_have_text(
            "The call of weather was not finished and is left out."
        )
        expect(page.get_by_label("Result of weather")).to_have_count(0)
        site.front.script = lambda prompt, choice: "fine"
        site.front.gap = 0.0
        send(page, "Without it then")
        finished(page, 2)
        assert sent[1]["messages"][1] == {"role": "assistant", "content": ""}


def test_a_refused_tool_is_said_clearly_and_named_controls(site: Site) -> None:
    with site.visit(weather, expect_errors=True) as page:
        add_tool(page, "weather", '{"type": "object", "properties": {"place": {"type": "nonsense"}}}')
        page.get_by_label("Call one").select_option("at least one")
        page.get_by_label("Answer as", exact=True).select_option("JSON")
        send(page, "How is it?")
        expect(page.locator(".wrong")).to_contain_text("The server refused response_format")
        page.get_by_label("Answer as", exact=True).select_option("text")
        page.get_by_label("Call one").select_option("when needed")
        page.locator(".wrong").get_by_role("button", name="Try again").click()
        expect(page.get_by_label("Result of weather")).to_have_count(2)
        assert nameless(page) == []


def test_an_example_brings_its_tool_into_its_conversation_only(site: Site) -> None:
    with site.visit() as page:
        add_tool(page, "weather")
        sent = bodies(page)
        example = page.get_by_role("button", name="Edit roll_dice")
        page.get_by_role("button", name="Throw 16 dice").click()
        finished(page)
        expect(example).to_contain_text("this conversation")
        assert tool_names(sent[-1]) == ["weather", "roll_dice"] and '"roll_dice"' in prompt_of(site, 0)
        page.reload()
        expect(example).to_be_visible()
        page.get_by_role("button", name="New conversation", exact=True).click()
        expect(example).to_have_count(0)
        expect(page.get_by_role("button", name="Edit weather")).to_be_visible()
        page.reload()
        send(page, "What is 27 + 58?")
        finished(page)
        assert tool_names(sent[-1]) == ["weather"]
        page.locator("#conversations .open").nth(1).click()
        send(page, "Once more")
        finished(page, 2)
        assert tool_names(sent[-1]) == ["weather", "roll_dice"]
        page.get_by_role("button", name="Remove roll_dice").click()
        page.reload()
        expect(page.get_by_role("button", name="Edit weather")).to_be_visible()
        expect(example).to_have_count(0)


def test_an_example_that_the_user_changes_is_the_users_tool(site: Site) -> None:
    with site.visit() as page:
        page.get_by_role("button", name="Throw 16 dice").click()
        finished(page)
        page.get_by_role("button", name="Edit roll_dice").click()
        page.get_by_label("Description").fill("Throw dice of any kind")
        page.get_by_role("button", name="Save the tool").click()
        page.get_by_role("button", name="New conversation", exact=True).click()
        sent = bodies(page)
        send(page, "Hello")
        finished(page)
        assert [tool["function"]["description"] for tool in sent[0]["tools"]] == ["Throw dice of any kind"]


def test_calls_can_be_read_in_both_themes_and_in_a_narrow_window(site: Site) -> None:
    with site.visit(weather, scheme="dark", size=(320, 640)) as page:
        page.get_by_role("button", name="Settings", exact=True).click()
        page.get_by_role("button", name="Add a tool").click()
        box = page.get_by_role("dialog").bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= 320 and box["height"] <= 640
        page.get_by_label("Name", exact=True).fill("a b")
        page.get_by_role("button", name="Save the tool").click()
        readable(page, ".dialog h2", ".dialog label", "#tool-name-problem", ".dialog input", "#tool-parameters")
        page.get_by_label("Name", exact=True).fill("weather")
        page.get_by_role("button", name="Save the tool").click()
        readable(page, "#tool-list .tool", "#tool-list .remove", "legend >> nth=1", ".choice label", "#format")
        page.keyboard.press("Escape")
        send(page, "How is it there?")
        expect(page.get_by_label("Result of weather")).to_have_count(2)
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
        for _ in range(2):
            readable(page, ".call h4", ".call pre", ".call label", ".call textarea", ".calls .primary")
            page.locator("#theme").click()
