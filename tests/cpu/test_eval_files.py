"""`thalweg eval` on files and through lm-evaluation-harness: prompts, scoring, and error messages."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cpu.bench_server import Fake, serving_in_a_thread
from thalweg.bench import eval, harness
from thalweg.bench.answering import (
    Continuation,
    EngineAnswerer,
    EvalPrompt,
    NoAnswer,
    PromptFormat,
    ServerAnswerer,
    continuations,
)
from thalweg.bench.errors import DatasetError
from thalweg.bench.eval_files import (
    ChoiceQuestion,
    read_questions,
    recall_questions,
)
from thalweg.bench.evaluation import EvalSettings, Evaluation, evaluate
from thalweg.bench.tasks import make_items, score
from thalweg.llm import LLM
from tools import harness_tasks

TINY = Path(__file__).parents[2] / "models" / "tiny"
ENGINE = ["--model", str(TINY), "--threads", "1", "--dtype", "float32"]


@pytest.fixture(scope="module")
def texts() -> PromptFormat:
    return PromptFormat(TINY)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


# ---- multiple choice ----


def test_three_ways_to_ask(tmp_path: Path, texts: PromptFormat) -> None:
    asked = {"choices": ["yes", "no"], "answer": 0}
    messages = [{"role": "user", "content": "Is it?"}]
    path = write(
        tmp_path / "q", asked | {"question": "Is it?"}, asked | {"prompt": "Is it? "}, asked | {"messages": messages}
    )
    plain, raw, chat = read_questions(path)
    assert (plain.prompt, plain.choices) == ("Question: Is it?\nAnswer:", (" yes", " no"))
    assert (raw.prompt, raw.choices) == ("Is it? ", ("yes", "no"))
    for question in (plain, raw, chat):
        for one, choice in zip(continuations(question, texts), question.choices, strict=True):
            assert texts.tokenizer.decode(one.ids[one.at :]).endswith(choice.strip()[-1])
            before = (
                question.prompt
                if isinstance(question.prompt, str)
                else texts.encoder.encode(messages, None, thinking=False)
            )
            shown = texts.tokenizer.decode(one.ids)
            assert shown.endswith(choice) and (before + choice).endswith(shown[-len(choice) - 5 :])


def test_a_token_across_the_boundary_counts_with_the_choice(texts: PromptFormat) -> None:
    both = next(
        a + b
        for a in "abcdefghi"
        for b in "abcdefghi"
        if len(texts.tokenizer.encode(" " + a + b, add_special=False)) == 1
    )
    (one, _) = continuations(ChoiceQuestion("Say " + both[0], (both[1], "?"), 0), texts)
    assert texts.tokenizer.decode(one.ids[one.at :]).strip() == both


@pytest.mark.parametrize(("answer", "index"), [(1, 1), ("B", 1), ("b", 1), ("no", 1), ("A", 0)])
def test_the_right_one_is_named_in_several_ways(tmp_path: Path, answer: object, index: int) -> None:
    (question,) = read_questions(write(tmp_path / "q", {"question": "?", "choices": ["yes", "no"], "answer": answer}))
    assert question.answer == index


@pytest.mark.parametrize(
    "row",
    [
        {"question": "?", "choices": ["yes", "no"]},
        {"question": "?", "choices": ["yes", "no"], "answer": "C"},
        {"question": "?", "choices": ["yes", "no"], "answer": -1},
        {"question": "?", "choices": ["yes", "no"], "answer": True},
        {"question": "?", "choices": ["yes"], "answer": 0},
        {"question": "?", "choices": ["yes", ""], "answer": 0},
        {"choices": ["yes", "no"], "answer": 0},
        {"messages": "?", "choices": ["yes", "no"], "answer": 0},
        "?",
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, row: object) -> None:
    path = write(tmp_path / "q.jsonl", {"question": "?", "choices": ["yes", "no"], "answer": 0}, row)
    with pytest.raises(DatasetError, match="q.jsonl, line 2: needs"):
        read_questions(path)
    with pytest.raises(DatasetError, match="nothing in it"):
        read_questions(write(tmp_path / "empty"))


class Weights:
    """Says of each continuation what it was told to."""

    def __init__(self, nats: Sequence[float]) -> None:
        self.nats = list(nats)

    def answer(self, questions: Sequence[EvalPrompt], label: str) -> Iterator[tuple[int, str]]:
        raise AssertionError("nothing is written")

    def likelihoods(self, asked: Sequence[Continuation], label: str) -> Iterator[tuple[int, float]]:
        assert len(asked) == len(self.nats)
        return iter(enumerate(self.nats))


def test_the_sum_favours_short_choices_and_the_byte_does_not(tmp_path: Path, texts: PromptFormat) -> None:
    path = write(tmp_path / "q.jsonl", {"prompt": "x", "choices": ["no", "certainly"], "answer": 1})
    run = Evaluation(texts, Weights([-2.0, -4.5]), 10, 0)
    rows = list(evaluate(run, EvalSettings(choices=str(path))))
    assert [(row["task"], row["hits"], row["total"]) for row in rows] == [("q", 0, 1), ("q, a byte", 1, 1)]


def test_recall_choices_are_repeatable_and_hold_the_answer() -> None:
    items = make_items("recall", "held_out", 30)
    questions = recall_questions(items)
    assert questions[5:9] == recall_questions(items[5:9])
    for item, question in zip(items, questions, strict=True):
        assert len(set(question.choices)) == 4 and question.choices[question.answer] == item.target
        assert [score(item, choice) for choice in question.choices].count(True) == 1
    assert {question.answer for question in questions} == {0, 1, 2, 3}


def test_log_probabilities_here_and_over_http_are_the_same(texts: PromptFormat) -> None:
    llm = LLM(str(TINY), threads=1, dtype="float32", max_running_requests=4, max_total_tokens=4096)
    asked = [
        one
        for question in recall_questions(make_items("recall", "held_out", 2))
        for one in continuations(question, texts)
    ]
    here = dict(EngineAnswerer(llm, progress=False).likelihoods(asked, "x"))
    (whole,) = llm.score([asked[0].ids])
    assert here[0] == pytest.approx(math.fsum(whole[asked[0].at - 1 :]))

    def log(body: dict[str, Any]) -> list[float | None]:
        (entries,) = llm.score([body["prompt"]])
        return [None, *entries, -9.0]  # and of the token that it wrote

    fake = Echo(log)
    with serving_in_a_thread(fake) as url:
        there = dict(ServerAnswerer(url, "m", "", 3, progress=False).likelihoods(asked, "x"))
    assert there == pytest.approx(here) and sorted(here) == list(range(8))
    assert all(body["echo"] and body["logprobs"] == 0 and body["max_tokens"] == 1 for body in fake.bodies)


class Echo(Fake):
    """A server whose completions are log-probabilities of the prompt."""

    def __init__(self, log: Callable[[dict[str, Any]], object]) -> None:
        super().__init__()
        self.log = log

    async def handle(self, method: str, path: str, body: bytes, send: Callable[[bytes], None]) -> bool:
        self.bodies.append(json.loads(body))
        page = json.dumps({"choices": [{"text": "", "logprobs": {"token_logprobs": self.log(self.bodies[-1])}}]})
        send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(page)}\r\n\r\n{page}".encode())
        return True


@pytest.mark.parametrize("log", [[], [None, -1.0], [None, None, -1.0]])
def test_a_server_without_log_probabilities_is_no_answer(log: list[float | None]) -> None:
    with serving_in_a_thread(Echo(lambda body: log)) as url:
        there = ServerAnswerer(url, "m", "", 3, progress=False)
        with pytest.raises(NoAnswer, match="gives no log-probabilities"):
            list(there.likelihoods([Continuation((5, 6, 7), 1)], "x"))


def test_a_file_over_http_and_one_that_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "q.jsonl", {"prompt": "x", "choices": ["aye", "no"], "answer": 0})
    with serving_in_a_thread(Echo(lambda body: [-1.0] * len(body["prompt"]))) as url:
        assert eval.main(["--model", str(TINY), "--base-url", url, "--choices", str(path)]) == 0
    assert "q, a byte" in capsys.readouterr().out
    assert eval.main([*ENGINE, "--choices", str(tmp_path / "none.jsonl")]) == 1
    assert "cannot read" in capsys.readouterr().err


def test_all_kinds_at_once_through_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "q.jsonl", {"prompt": "x", "choices": ["aye", "no"], "answer": 0})
    out = tmp_path / "o.json"
    assert (
        eval.main(
            [*ENGINE, "--choices", str(path), "--tasks", "recall-choice", "--items", "3", "--output-file", str(out)]
        )
        == 0
    )
    rows = json.loads(out.read_text())["results"]
    assert [(row["task"], row["total"]) for row in rows] == [("recall-choice", 3), ("q", 1), ("q, a byte", 1)]
    assert rows[0]["hits"] == 3


# ---- what is kept ----


class Breaks:
    """Answers so many questions, rightly where it is told how, then raises."""

    def __init__(self, most: int, error: BaseException, right: Callable[[int], str] = lambda place: "") -> None:
        self.most, self.error, self.right = most, error, right

    def answer(self, questions: Sequence[EvalPrompt], label: str) -> Iterator[tuple[int, str]]:
        for place in range(len(questions)):
            if not self.most:
                raise self.error
            self.most -= 1
            yield place, self.right(place)

    def likelihoods(self, asked: Sequence[Continuation], label: str) -> Iterator[tuple[int, float]]:
        for place in range(len(asked)):
            if not self.most:
                raise self.error
            self.most -= 1
            yield place, -float(place)


def breaking(monkeypatch: pytest.MonkeyPatch, texts: PromptFormat, most: int, error: BaseException) -> None:
    sums = make_items("sums", "held_out", 4)
    answers = Breaks(most, error, lambda place: sums[place % 4].target)
    monkeypatch.setattr(eval, "_start", lambda *_: (Evaluation(texts, answers, 4, 0), {}))


@pytest.mark.parametrize(
    ("error", "status", "ended"),
    [(KeyboardInterrupt(), 130, "Ctrl-C"), (NoAnswer("2 of 4 requests were answered, then: gone"), 1, "then: gone")],
)
def test_an_interrupted_evaluation_is_kept_and_marked_partial(
    error: BaseException, status: int, ended: str, tmp_path: Path, texts: PromptFormat, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    breaking(monkeypatch, texts, 6, error)
    out = tmp_path / "o.json"
    words = ["--model", str(TINY), "--base-url", "http://x", "--items", "4", "--output-file", str(out)]
    assert eval.main([*words, "--tasks", "sums", "tools", "recall"]) == status
    saved = json.loads(out.read_text())
    assert [(row["task"], row["hits"], row["total"], row.get("asked")) for row in saved["results"]] == [
        ("sums", 4, 4, None),
        ("tools", 0, 2, 4),
    ]
    assert saved["partial"] is True and ended in saved["ended"]
    shown = capsys.readouterr()
    assert "2 of 4" in shown.out and "PARTIAL" in shown.err and ended in shown.err


def test_an_unexpected_error_keeps_what_was_done_and_is_not_hidden(
    tmp_path: Path, texts: PromptFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch, texts, 4, RuntimeError("a bug"))
    out = tmp_path / "o.json"
    words = ["--model", str(TINY), "--base-url", "http://x", "--items", "4", "--output-file", str(out)]
    with pytest.raises(RuntimeError, match="a bug"):
        eval.main([*words, "--tasks", "sums", "tools"])
    assert [row["task"] for row in json.loads(out.read_text())["results"]] == ["sums"]


def test_choices_count_once_all_of_them_are_weighed(tmp_path: Path, texts: PromptFormat) -> None:
    row = {"prompt": "x", "choices": ["aye", "no"], "answer": 0}
    run = Evaluation(texts, Breaks(3, KeyboardInterrupt()), 9, 0)
    with pytest.raises(KeyboardInterrupt):
        list(evaluate(run, EvalSettings(choices=str(write(tmp_path / "q.jsonl", row, row, row)))))
    assert [(one["task"], one["hits"], one["total"], one["asked"]) for one in run.rows] == [
        ("q", 1, 1, 3),
        ("q, a byte", 1, 1, 3),
    ]


def test_a_failed_http_request_keeps_the_other_answers(texts: PromptFormat) -> None:
    items = make_items("sums", "held_out", 6)
    fake = Fake(
        first=0.3, gap=0.0, plan=["ok", "ok", "ok", "429"]
    )  # who began meanwhile is stopped before it is answered
    into: dict[int, str] = {}
    with serving_in_a_thread(fake) as url:
        there = ServerAnswerer(url, "m", "", 1, progress=False)
        with pytest.raises(NoAnswer, match="3 of 6 requests of sums were answered, then: HTTP 429"):
            into.update(there.answer([texts.prompt(item) for item in items], "sums"))
    assert sorted(into) == [0, 1, 2] and len(fake.bodies) < 6, "the rest would only fail too"


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["--gsm8k", "BROKEN"], 1, "line 2: needs"),
        (["--gsm8k", "GOOD", "--gsm8k-shots", "GOOD", "--shots", "3"], 1, "1 worked examples, and --shots asks for 3"),
        (["--gsm8k", "GOOD", "--shots", "1"], 2, "needs --gsm8k FILE and --gsm8k-shots FILE"),
        (["--gsm8k", "GOOD", "--gsm8k-shots", "GOOD"], 2, "say how many of them"),
        (["--shots", "-1"], 2, "expected a whole number from 0 on"),
    ],
)
def test_files_are_looked_at_before_a_model_is_loaded(
    flags: list[str], status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(eval, "LLM", lambda *_, **__: pytest.fail("a model was loaded"))
    problem = {"question": "What is 12 + 34?", "answer": "#### 46"}
    files = {
        "GOOD": write(tmp_path / "good", problem),
        "BROKEN": write(tmp_path / "broken", problem, {"question": "?"}),
    }
    words = [str(files.get(word, word)) for word in flags]
    assert eval.main([*ENGINE, "--tasks", "sums", *words]) == status
    assert said in capsys.readouterr().err


# ---- lm-evaluation-harness ----

FAKE_HARNESS = """
import json, os, pathlib, sys
words = sys.argv[1:]
pathlib.Path(os.environ["HARNESS_SAID"]).write_text(json.dumps([*words, os.environ.get("OPENAI_API_KEY")]))
if "sick" in words[words.index("--tasks") + 1]:
    sys.exit("no such task")
place = pathlib.Path(words[words.index("--output_path") + 1]) / "m"
place.mkdir(parents=True)
values = {"alias": "t", "acc,none": 0.75, "acc_stderr,none": 0.2, "f1,first": 0.5, "f1_stderr,first": "N/A"}
(place / "results_2026.json").write_text(json.dumps({"results": {"t": values}, "n-samples": {"t": {"original": 9, "effective": 4}}}))
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A harness that writes down how it is called; the file it writes."""
    package = tmp_path / "site" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(FAKE_HARNESS)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(package.parent), *sys.path)))
    monkeypatch.setenv("HARNESS_SAID", str(tmp_path / "said"))
    return tmp_path / "said"


def test_the_harness_is_called_and_its_shares_get_our_interval(installed: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    words = [
        "--model",
        str(TINY),
        "--base-url",
        "http://127.0.0.1:9/",
        "--served-model-name",
        "tiny",
        "--api-key",
        "hush",
    ]
    words += ["--harness", "t", "u", "--harness-shots", "3", "--harness-limit", "5", "--output-file", str(out)]
    assert eval.main([*words, "--harness-include", "tasks", "--concurrency", "4"]) == 0
    said = json.loads(installed.read_text())
    assert said[:3] == ["run", "--model", "local-completions"] and said[-1] == "hush"
    model = dict(pair.split("=", 1) for pair in said[said.index("--model_args") + 1].split(","))
    assert model["base_url"] == "http://127.0.0.1:9/v1/completions" and model["model"] == "tiny"
    assert model["num_concurrent"] == "4" and Path(model["tokenizer"]) == TINY.resolve()
    for flag, value in (("--tasks", "t,u"), ("--num_fewshot", "3"), ("--limit", "5"), ("--include_path", "tasks")):
        assert said[said.index(flag) + 1] == value
    share, other = json.loads(out.read_text())["results"]
    assert (share["task"], share["hits"], share["total"]) == ("t: acc", 3, 4)
    assert share["low_95"] == pytest.approx(0.3006, abs=1e-3)
    assert (other["task"], other["value"], other["stderr"]) == ("t: f1 (first)", 0.5, None)
    assert "hush" not in out.read_text()


def test_chat_goes_to_the_chat_route(installed: Path) -> None:
    words = ["--model", str(TINY), "--base-url", "http://x", "--harness", "t", "--harness-api", "chat"]
    assert eval.main(words) == 0
    said = json.loads(installed.read_text())
    assert said[2] == "local-chat-completions" and "--apply_chat_template" in said
    assert "base_url=http://x/v1/chat/completions" in said[said.index("--model_args") + 1]


def test_a_harness_that_fails_is_no_result(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert eval.main(["--model", str(TINY), "--base-url", "http://x", "--harness", "sick"]) == 1
    assert "lm_eval ended with status 1" in capsys.readouterr().err


def test_a_missing_harness_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    assert eval.main(["--model", str(TINY), "--harness", "t"]) == 2
    assert "not installed here; pip install 'lm_eval[api]'" in capsys.readouterr().err


def test_the_harness_gets_a_server_with_the_settings(installed: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    words = [*ENGINE, "--no-radix-cache", "--max-running-requests", "2", "--harness", "t", "--output-file", str(out)]
    assert eval.main(words) == 0
    resolved = json.loads(out.read_text())["configuration"]["resolved"]
    assert (resolved["radix_cache"]["value"], resolved["max_running_requests"]["value"]) == (False, 2)
    assert "model=tiny" in json.loads(installed.read_text())[4]


def test_the_bundled_tasks_as_task_files(tmp_path: Path, texts: PromptFormat) -> None:
    assert harness_tasks.main([str(TINY), str(tmp_path), "--items", "3"]) == 0
    for name in ("sums", "recall", "recall_choice"):
        task = yaml.safe_load((tmp_path / f"{name}.yaml").read_text())
        rows = [
            json.loads(line) for line in Path(task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
        ]
        assert task["task"] == f"thalweg_{name}" and len(rows) == 3
        assert all(row["prompt"].startswith("<｜begin") for row in rows)
    (regex, _) = yaml.safe_load((tmp_path / "sums.yaml").read_text())["filter_list"][0]["filter"]
    assert re.findall(regex["regex_pattern"], "so 12 + 5 = 17.") == ["17"]
