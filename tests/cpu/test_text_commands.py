"""`thalweg render` and `thalweg parse`: golden files, single files, errors; neither loads torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from thalweg.cli import main
from thalweg.text.parser import TOOL_FORMATS, AnswerParser
from thalweg.text.tokenizer import Tokenizer
from tools.fuzz_checks import FRAMES

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "models" / "tiny")
DATA = ROOT / "tests" / "null" / "data"
USER = {"role": "user", "content": "Grüße"}
TOOL = {"type": "function", "function": {"name": "f"}}
PROMPT = "<｜begin▁of▁sentence｜><｜User｜>Grüße<｜Assistant｜></think>"
CALL = '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="n" string="{}">5</｜DSML｜parameter>\n</｜DSML｜invoke>'


@pytest.fixture
def write(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(value: Any) -> str:
        path = tmp_path / "file"
        path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
        return str(path)

    return write


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_render_gives_every_golden_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    path = DATA / "chat_golden.json"
    assert main(["render", "--cases", str(path)]) == 0
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    assert lines(capsys) == [{"id": case["id"], "prompt": case["expected_prompt"]} for case in cases]


@pytest.mark.parametrize(
    ("model", "end"),
    [
        ("V3-0324", "<｜Assistant｜>"),
        ("deepseek-ai/DeepSeek-R1-0528", "<｜Assistant｜>"),
        ("V3.1-Terminus", "<｜Assistant｜></think>"),
        ("V3.2-Exp", "<｜Assistant｜></think>"),
        ("V3.2", "<｜Assistant｜></think>"),
    ],
)
def test_a_case_names_its_release(model: str, end: str, write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "--cases", write([{"id": "a", "model": model, "messages": [USER]}])]) == 0
    (line,) = lines(capsys)
    assert line["prompt"].endswith("Grüße" + end)


def test_a_case_that_fails_does_not_end_the_rest(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        {"id": "wrong", "model": "V3.2", "messages": [USER, {"role": "king"}]},
        {"id": "unknown", "model": "Qwen3", "messages": [USER]},
        {"id": "bare", "model": "V3.2"},
        {"id": "typed", "model": "V3.2", "messages": [USER], "thinking": "yes"},
        {"id": "good", "model": "V3.2", "messages": [USER]},
    ]
    assert main(["render", "--cases", write({"cases": cases})]) == 1
    wrong, unknown, bare, typed, good = lines(capsys)
    assert wrong["error"].startswith("messages[1].role: is 'king'") and "Qwen3" in unknown["error"]
    assert bare["error"] == "messages: is required" and typed["error"].startswith("thinking: must be true or false")
    assert good == {"id": "good", "prompt": PROMPT}


def test_render_shows_prompt_and_ids(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ids = Tokenizer(Path(TINY)).encode(PROMPT)
    assert ids[0] == 0 and 0 not in ids[1:], "one BOS"
    assert main(["render", TINY, write([USER])]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{PROMPT}\n\n{len(ids)} tokens\n{ids}\n" and "deepseek-v32" in shown.err
    path = write({"messages": [USER], "thinking": True})
    assert main(["render", "--json", TINY, path]) == 0
    (line,) = lines(capsys)
    assert line["prompt"].endswith("<｜Assistant｜><think>") and len(line["tokens"]) == len(ids)
    assert main(["render", "--chat-template", "deepseek-r1", "--json", path]) == 0
    assert lines(capsys)[0]["tokens"] is None


@pytest.mark.parametrize(
    ("argv", "content", "words"),
    [
        (["render", TINY, "FILE"], [USER, {"role": "user"}], "messages[1].content: is missing"),
        (["render", TINY, "FILE"], [{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0].type"),
        (["render", TINY, "FILE"], "{", "not JSON"),
        (["render", "FILE"], [USER], "give the model before the file"),
        (["render"], "", "--help"),
        (["render", "--chat-template", "deepseek-v33", "FILE"], [USER], "deepseek-v32"),
        (
            ["render", "--chat-template", "deepseek-r1", "FILE"],
            {"messages": [USER], "tools": [TOOL]},
            "does not render tools",
        ),
        (["render", "--cases", "FILE"], {"a": 1}, "expected"),
        (["parse", "--format", "deepseekv33", "FILE"], "", "deepseekv32"),
        (["parse", "FILE"], "", "--format"),
        (["parse", "--cases", "/nowhere"], "", "/nowhere"),
        (["parse", "--format", "deepseekv32", "--tools", "FILE", "FILE"], [{"type": "function"}], "tools[0].function"),
    ],
)
def test_mistakes_are_answered_in_one_line(
    argv: list[str], content: Any, words: str, write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(content)
    assert main([path if word == "FILE" else word for word in argv]) in (1, 2)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("thalweg: ") and words in line


def test_parse_runs_every_case_mode_and_split(capsys: pytest.CaptureFixture[str]) -> None:
    path = DATA / "parser_cases.json"
    assert main(["parse", "--cases", str(path)]) == 0
    got = lines(capsys)
    cases = {case["id"]: case for case in json.loads(path.read_text(encoding="utf-8"))["cases"]}
    wanted = [
        (id, mode, how)
        for id, case in cases.items()
        for mode in case["modes"]
        for how in (*case["splits"]["must"], *case["splits"]["should"])
    ]
    assert [(line["id"], line["mode"], line["split"]) for line in got] == wanted
    for line in got:
        expect = cases[line["id"]]["expect"]
        assert expect["finish_reason"] in ("any", line["finish_reason"])
        assert (line["reasoning_content"] or "") == (expect["reasoning_content"] or "")
        calls = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in line["tool_calls"]]
        if expect["tool_calls_mode"] == "exact" and line["mode"] == "nonstream":
            assert calls == expect["tool_calls"]
        assert all(call["id"] for call in line["tool_calls"])


def test_a_case_offers_its_tools_or_none_and_its_last_token_is_hidden(
    write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    chunks = [
        "x\n\n<｜DSML｜function_calls>\n" + CALL.format("false"),
        "</｜DSML｜function_calls><｜end▁of▁",
        "sentence｜>",
    ]
    function = {"type": "function", "function": {"name": "f"}}
    cases = [
        {"id": str(tools), "format": "deepseekv32", "chunks": chunks, "tools": tools}
        for tools in ([], None, [function])
    ]
    assert main(["parse", "--cases", write(cases)]) == 0
    for line in lines(capsys):
        assert len(line["tool_calls"]) == (line["id"] != "[]")
        assert line["content"].startswith("x\n\n<function_calls>") if line["id"] == "[]" else line["content"] == "x"
        assert not line["content"].endswith("｜>")


def test_parse_says_what_is_wrong_with_a_case(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        {"id": "format", "format": "deepseekv9", "chunks": ["x"]},
        {"id": "split", "chunks": ["x"], "splits": {"must": ["halves"]}},
        {"id": "chunks"},
        {"id": "good", "chunks": ["x", "y"], "modes": ["stream"], "splits": {"must": ["char"]}},
    ]
    assert main(["parse", "--cases", write(cases)]) == 1
    *bad, good = lines(capsys)
    assert [re.findall("deepseekv9|halves|chunks", line["error"])[0] for line in bad] == [
        "deepseekv9",
        "halves",
        "chunks",
    ]
    assert good["content"] == "xy" and good["finish_reason"] == "stop"


def test_parse_shows_one_output(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("Let me see.</think>I look.\n\n<｜DSML｜function_calls>\n" + CALL.format("false"))
    assert main(["parse", "--format", "deepseekv32", path]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["reasoning_content"], shown["content"], shown["finish_reason"]) == (
        "Let me see.",
        "I look.",
        "tool_calls",
    )
    assert [(call["name"], call["arguments"]) for call in shown["tool_calls"]] == [("f", '{"n": 5}')]
    assert main(["parse", "--format", "none", "--reasoning-parser", "deepseek-r1", path]) == 0
    assert "invoke" in json.loads(capsys.readouterr().out)["content"]


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_the_work_grows_with_the_text_and_no_faster(form: str) -> None:
    """A model in a loop writes megabytes of one thing, a few characters at a time."""
    begin = FRAMES[form][0]
    opener = begin[: begin.index(">") + 1]
    for reasoning, start, unit in (
        (None, begin, "x"),
        (None, begin, " "),
        (None, opener, " "),
        (None, "", opener),
        ("deepseek-r1", "", " "),
        ("qwen3", "", " "),
    ):

        def seconds(size: int, reasoning: str | None = reasoning, start: str = start, unit: str = unit) -> float:
            parser, pieces = AnswerParser(reasoning, form), [unit] * (size // len(unit))
            begun = time.process_time()
            parser.feed(start)
            for piece in pieces:
                parser.feed(piece)
            parser.finish()
            return time.process_time() - begun

        # other work on the machine may slow one of two runs, but not each pair of them
        assert any(seconds(40_000) < 8 * 3 * seconds(5_000) for _ in range(4)), (start, unit)


def test_neither_loads_torch() -> None:
    for argv in (
        ["render", "--cases", str(DATA / "chat_golden.json")],
        ["parse", "--cases", str(DATA / "parser_cases.json")],
    ):
        script = f"import sys; from thalweg.cli import main; main({argv}); sys.exit('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0


def test_the_examples_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "text.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```sh\n(.*?)```", page, re.S)
    script = block.replace("thalweg ", f"{sys.executable} -m thalweg ")
    done = subprocess.run(["bash", "-ec", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.count("<｜Assistant｜>") == 2 and '"content": "It is.' in done.stdout
