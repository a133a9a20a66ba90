"""Shared prefixes, multi-turn conversations, latency targets, and conversation files."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from thalweg.bench.dataset_files import file_prompts, sharegpt_prompts
from thalweg.bench.datasets import (
    LengthRange,
    OrdinaryTokens,
    PromptGroups,
    Reply,
    SampleRequest,
    file_conversations,
    possible_hits,
    schedule,
    shared_prompts,
)
from thalweg.bench.errors import DatasetError
from thalweg.bench.metrics import Record, by_turn, goodput, samples, tokens_by_second, within_limits
from thalweg.bench.traces import TraceLimits, trace_prompts

WORDS = OrdinaryTokens(
    range(3, 900), lambda ids: " ".join(map(str, ids)), lambda text: [int(word) for word in text.split()]
)


def groups(**changed: object) -> PromptGroups:
    wish = {
        "groups": 3,
        "each": 4,
        "system": LengthRange(50, 1.0),
        "question": LengthRange(10, 1.0),
        "output": LengthRange(8, 1.0),
    }
    return PromptGroups(**(wish | changed))  # type: ignore[arg-type]


def test_a_group_begins_alike_and_groups_do_not() -> None:
    prompts = shared_prompts(WORDS, groups(ordered=True), seed=1)
    assert [p.input_len for p in prompts] == [60] * 12 and {p.output_len for p in prompts} == {8}
    heads = [tuple(p.ids[:50]) for p in prompts]
    assert heads == [heads[0]] * 4 + [heads[4]] * 4 + [heads[8]] * 4 and len(set(heads)) == 3
    assert len({tuple(p.ids[50:]) for p in prompts}) == 12 and all(p.after == -1 for p in prompts)
    mixed = shared_prompts(WORDS, groups(), seed=1)
    assert [p.ids for p in mixed] != [p.ids for p in prompts]
    assert sorted(p.ids for p in mixed) == sorted(p.ids for p in prompts)
    assert shared_prompts(WORDS, groups(), seed=2) != mixed == shared_prompts(WORDS, groups(), seed=1)


def test_turns_follow_one_another() -> None:
    prompts = shared_prompts(WORDS, groups(turns=3, pause=0.5), seed=1)
    assert len(prompts) == 36 and [p.turn for p in prompts[:6]] == [0, 1, 2, 0, 1, 2]
    assert [p.after for p in prompts[:6]] == [-1, 0, 1, -1, 3, 4]
    assert [p.input_len for p in prompts[:3]] == [60, 10, 10] and prompts[0].pause == 0.0 < prompts[1].pause
    assert schedule(prompts[:6], 10.0, False, 0)[:4] == [0.0] + [schedule(prompts[:6], 10.0, False, 0)[1]] * 3


def test_a_later_turn_has_all_that_was_said() -> None:
    first, second, third = (WORDS.prompt(ids, 4) for ids in ([7, 8], [20], [30, 31]))
    then = second.following(first, Reply("91 92", (91, 92)))
    assert then.as_ids_or_text() == [7, 8, 91, 92, 20] and then.input_len == 5
    last = third.following(then, Reply("95", ()))  # an API without ids: its text is tokenized
    assert last.as_ids_or_text() == [7, 8, 91, 92, 20, 95, 30, 31] and last.input_len == 0
    assert [(m["role"], m["content"]) for m in last.as_messages()] == [
        ("user", "7 8"), ("assistant", "91 92"), ("user", "20"), ("assistant", "95"), ("user", "30 31"),
    ]  # fmt: skip
    with pytest.raises(DatasetError, match="--tokenizer"):
        SampleRequest(1, ids=[5]).following(SampleRequest(1, ids=[4]), Reply("a")).as_ids_or_text()
    text = SampleRequest(1, text=" and").following(SampleRequest(1, text="Once"), Reply(" upon"))
    assert text.as_ids_or_text() == "Once upon and"


def test_conversations_of_a_file_are_played_again_without_its_answers(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    said = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye")]
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in said], "output_len": 9},
        {"conversations": [{"from": "human", "value": "One"}, {"from": "gpt", "value": "1"}]},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    first, second, other = file_conversations(file_prompts(path, 0, 5, WORDS), pause=0.0, seed=0)
    assert [m["role"] for m in first.messages] == ["system", "user"] and first.output_len == 9
    assert second.messages == ({"role": "user", "content": "Bye"},) and (second.after, second.turn) == (0, 1)
    assert other.messages == ({"role": "user", "content": "One"},) and other.after == -1
    whole = second.following(first, Reply("What is it?")).as_messages()
    assert [m["content"] for m in whole] == ["Be brief.", "Hi", "What is it?", "Bye"]
    with pytest.raises(DatasetError, match="no messages"):
        file_conversations([SampleRequest(1, text="x")], 0.0, 0)


def test_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    rows = [
        {"conversations": [{"from": "human", "value": "1 2 3"}, {"from": "gpt", "value": "4 5"}]},
        {"conversations": [{"from": "human", "value": "7"}, {"from": "gpt", "value": "too short a question"}]},
        {"conversations": [{"from": "human", "value": "alone"}]},
        {"conversations": [{"from": "human", "value": " ".join("9" * 30)}, {"from": "gpt", "value": "8 8 8"}]},
    ]
    rows[1]["conversations"][1]["value"] = "8 8"
    path.write_text(json.dumps(rows))
    found = sharegpt_prompts(path, 0, (0, 0), WORDS, seed=0)
    assert {(p.text, p.output_len, p.input_len) for p in found} == {("1 2 3", 2, 3), (" ".join("9" * 30), 3, 30)}
    assert [p.input_len for p in sharegpt_prompts(path, 0, (6, 20), WORDS, seed=0)] == [3]
    assert len(sharegpt_prompts(path, 1, (0, 0), WORDS, seed=0)) == 1
    for content, words in (
        ("[1]", "JSON list"),
        ("{}", "JSON list"),
        ("[", "not a JSON list"),
        ("[]", "no conversation"),
    ):
        path.write_text(content)
        with pytest.raises(DatasetError, match=words):
            sharegpt_prompts(path, 0, (0, 0), WORDS, seed=0)


def record(ttft: float, latency: float, tokens: int, **more: object) -> Record:
    gaps = [(latency - ttft) / (tokens - 1)] * (tokens - 1) if tokens > 1 else []
    made = Record(prompt_tokens=100, output_tokens=tokens, ttft=ttft, latency=latency, itl=gaps, done=True)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_goodput_counts_what_keeps_every_limit() -> None:
    records = [
        record(0.1, 1.1, 11),
        record(0.3, 1.3, 11),
        record(0.1, 3.1, 11),
        record(0.1, 0.1, 1),
        record(0.1, 0.2, 2, error="x"),
    ]
    limits = {"ttft": 200.0, "tpot": 150.0}
    assert [within_limits(one, limits) for one in records] == [True, False, False, True, False]
    told = goodput(records, 4.0, limits)
    assert told == {"goodput": 0.5, "goodput_share": 0.4, "goodput_limits_ms": {"ttft": 200.0, "tpot": 150.0}}
    assert [within_limits(one, {"itl": 50.0}) for one in records[:2]] == [False, False]
    assert within_limits(records[0], {"e2el": 1200.0})
    assert goodput(records, 4.0, {}) == {}


def test_samples_turns_and_seconds() -> None:
    records = [
        record(0.5, 2.5, 5, turn=0, cached_tokens=0),
        record(0.1, 0.1, 1, turn=1, cached_tokens=80),
        record(0.2, 0.2, 1, turn=1, error="x"),
    ]
    drawn = samples(records)
    assert drawn == {"e2e_latency_ms": [2500.0, 100.0], "ttft_ms": [500.0, 100.0], "tpot_ms": [500.0]}
    first, second = by_turn(records)
    assert (first["turn"], first["completed"], first["cache_hit_rate"], first["median_ttft_ms"]) == (1, 1, 0.0, 500.0)
    assert (second["completed"], second["cache_hit_rate"], second["median_tpot_ms"]) == (1, 0.8, 0.0)
    assert by_turn(records[:1]) == []
    assert tokens_by_second(records[:1], 0.0) == [1, 2, 2] and tokens_by_second([], 0.0) == []


def trace(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROW: dict[str, object] = {"timestamp": 0, "input_length": 1024, "output_length": 64, "hash_ids": [1, 2]}


def test_a_part_of_a_trace_scaled_and_jittered(tmp_path: Path) -> None:
    rows = [ROW | {"timestamp": 1000 * i, "hash_ids": [1, 10 + i]} for i in range(10)]
    path = trace(tmp_path / "t.jsonl", *rows)
    part = trace_prompts(path, WORDS, 0, TraceLimits(begin=2, end=6, scale=0.125, slowdown=2.0), seed=1)
    assert [p.at for p in part] == [4.0, 6.0, 8.0, 10.0] and schedule(part, 1.0, True, 0) == [0.0, 2.0, 4.0, 6.0]
    assert {(p.input_len, p.output_len) for p in part} == {(128, 8)}
    assert (
        len({tuple(p.ids[:64]) for p in part}) == 1 and len({tuple(p.ids[:65]) for p in part}) == 4
    )  # 512 / 8 tokens are shared
    moved = [p.at for p in trace_prompts(path, WORDS, 0, TraceLimits(jitter=0.5), seed=1)]
    assert all(0 <= at - i <= 0.5 for i, at in enumerate(moved)) and len({at - i for i, at in enumerate(moved)}) == 10
    with pytest.raises(DatasetError, match="no requests between"):
        trace_prompts(path, WORDS, 0, TraceLimits(begin=50.0), seed=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("timestamp", "soon"), ("timestamp", -1), ("timestamp", None), ("input_length", 12.5), ("input_length", -4), ("input_length", True),
     ("input_length", 10**12), ("output_length", None), ("hash_ids", "none"), ("hash_ids", [1, "x"]), ("hash_ids", [True])],
)  # fmt: skip
def test_a_broken_row_names_file_line_and_field(tmp_path: Path, field: str, value: object) -> None:
    path = trace(tmp_path / "t.jsonl", ROW, ROW | {field: value})
    with pytest.raises(DatasetError, match=f"t.jsonl, line 2: .*{field}"):
        trace_prompts(path, WORDS, 1, TraceLimits(), seed=0)  # though only the first row was asked for


def test_the_highest_possible_hit_rate_is_reported() -> None:
    """Pages of 64 tokens, of prompts that were sent before, and of answers for the turn behind them."""
    head = list(range(3, 133))  # 130 tokens: two pages
    first, second = WORDS.prompt([*head, 200], 4), WORDS.prompt([*head, 300], 4)
    assert possible_hits([first, second]) == pytest.approx(128 / 262)
    assert possible_hits([first]) == 0.0 and possible_hits([first, first]) == pytest.approx(128 / 262)
    page = WORDS.prompt(head[:128], 4)
    assert possible_hits([page, page]) == pytest.approx(64 / 256)  # one token is left to compute, so not its page
    turn = WORDS.prompt([5] * 10, 4).following(
        first, Reply("", tuple(range(400, 461)))
    )  # 131 + 61 = 192 = three pages known
    assert possible_hits([first, turn]) == pytest.approx(192 / (131 + 202))
    assert possible_hits([first, SampleRequest(1, text="words")]) is None
    assert possible_hits([turn.following(first, Reply("no ids"))]) is None and possible_hits([]) is None


def archive(path: Path, **files: str) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"data/{name.replace('_', '-').replace('-csv', '.csv').replace('-json', '.json')}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


LENGTHS = {"input_tokens": "{10: 0.5, 30: 0.5}", "output_tokens": "{7: 1.0, 9: 0.0}", "reason_ratio": "{}"}
CLIENT = {
    "chunk_1_trace_csv": "0,2.0,1.0,Gamma,1.2,0.4\n600,0.0,0,,,\n1200,4.0,0.8,Weibull,1.3,0.3\n",
    "chunk_1_dataset_json": json.dumps({"0": LENGTHS, "1200": LENGTHS | {"output_tokens": "{50: 1.0}"}}),
}


def test_requests_are_drawn_from_statistics(tmp_path: Path) -> None:
    path = archive(tmp_path / "s.tar.gz", **CLIENT)
    prompts = trace_prompts(path, WORDS, 0, TraceLimits(), seed=1)
    early, late = ([p for p in prompts if (p.at < 600) == first] for first in (True, False))
    assert 1100 < len(early) < 1300 and 2300 < len(late) < 2500 and all(1200 <= p.at < 1800 for p in late)
    assert {p.output_len for p in early} == {7} and {p.output_len for p in late} == {50}
    assert {p.input_len for p in prompts} == {10, 30} and 0.45 < sum(p.input_len == 10 for p in early) / len(
        early
    ) < 0.55
    assert [p.at for p in prompts] == sorted(p.at for p in prompts)
    part = trace_prompts(path, WORDS, 5, TraceLimits(begin=1500, end=1600, slowdown=0.5), seed=1)
    assert len(part) == 5 and all(750 <= p.at < 800 for p in part)
    assert part == trace_prompts(path, WORDS, 5, TraceLimits(begin=1500, end=1600, slowdown=0.5), seed=1)
    with pytest.raises(DatasetError, match="no requests between"):
        trace_prompts(path, WORDS, 0, TraceLimits(begin=700, end=1100), seed=1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"chunk_1_trace_csv": "0,2.0,1.0,Zipf,1.2,0.4\n"}, "trace.csv, line 1: expected Gamma or Weibull"),
     ({"chunk_1_trace_csv": "0,2.0,1.0,Gamma,1.2,0.4\n600,x,1.0,Gamma,1,1\n"}, "trace.csv, line 2"),
     ({"chunk_1_dataset_json": "{"}, "dataset.json: "),
     ({"chunk_1_dataset_json": json.dumps({"0": LENGTHS | {"output_tokens": "{1: "}})}, "dataset.json, window 0"),
     ({"chunk_2_trace_csv": "0,1,1,Gamma,1,1"}, "chunk-2-dataset.json|chunk-2-.*dataset.json")],
)  # fmt: skip
def test_broken_statistics_name_their_place(tmp_path: Path, changed: dict[str, str], words: str) -> None:
    with pytest.raises(DatasetError, match=words):
        trace_prompts(archive(tmp_path / "s.tar.gz", **(CLIENT | changed)), WORDS, 0, TraceLimits(), seed=1)


def test_an_archive_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no clients in it"):
        trace_prompts(archive(tmp_path / "s.tar.gz", readme="hello"), WORDS, 0, TraceLimits(), seed=1)
    (tmp_path / "t").write_text("no archive")
    with pytest.raises(DatasetError, match="nor ServeGen's archive"):
        trace_prompts(tmp_path / "t", WORDS, 0, TraceLimits(), seed=1)
