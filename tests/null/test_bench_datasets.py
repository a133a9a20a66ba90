"""What the load generator sends: exact lengths, shared prefixes, arrival times of a trace, errors for broken files."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from pathlib import Path

import pytest

from thalweg.bench.dataset_files import file_prompts
from thalweg.bench.datasets import OrdinaryTokens, SampleRequest, random_prompts, schedule
from thalweg.bench.errors import DatasetError
from thalweg.bench.traces import BLOCK, TraceLimits, trace_prompts

NONE = OrdinaryTokens(())
WORDS = OrdinaryTokens(range(3, 500), lambda ids: " ".join(map(str, ids)))


def test_random_lengths_are_sglangs() -> None:
    prompts = random_prompts(WORDS, 2000, 100, 40, 0.5, seed=7)
    sizes = [p.input_len for p in prompts]
    assert min(sizes) == 50 and max(sizes) == 100 and 73 < statistics.mean(sizes) < 77
    assert {p.output_len for p in prompts} == set(range(20, 41))
    assert all(len(p.ids) == p.input_len and min(p.ids) >= 3 and max(p.ids) < 500 for p in prompts)
    assert random_prompts(WORDS, 5, 8, 8, 1.0, seed=1)[0].input_len == 8
    assert min(p.input_len for p in random_prompts(WORDS, 500, 10, 10, 0.0, seed=1)) == 1
    assert random_prompts(WORDS, 3, 9, 9, 0.3, seed=4) == random_prompts(WORDS, 3, 9, 9, 0.3, seed=4)
    assert random_prompts(WORDS, 3, 9, 9, 0.3, seed=4) != random_prompts(WORDS, 3, 9, 9, 0.3, seed=5)


def mooncake(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def test_equal_leading_hash_ids_are_shared_prefixes(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 9]},
        {"timestamp": 4000, "input_length": 100, "output_length": 0, "hash_ids": [0]},
        {"timestamp": 5000, "input_length": 600, "output_length": 9, "hash_ids": [5]},
    ]
    path = mooncake(tmp_path / "trace.jsonl.gz", rows)
    a, b, c, d = trace_prompts(path, WORDS, 0, TraceLimits(slowdown=0.5), seed=3)
    assert [len(p.ids) for p in (a, b, c, d)] == [1300, 1100, 100, 600]
    assert [p.at for p in (a, b, c, d)] == [0.0, 1.5, 2.0, 2.5]
    assert [p.output_len for p in (a, b, c, d)] == [5, 7, 1, 9]  # a server cannot be asked for no token
    assert a.ids[: 2 * BLOCK] == b.ids[: 2 * BLOCK] and a.ids[2 * BLOCK :][:70] != b.ids[2 * BLOCK :][:70]
    assert list(c.ids) == list(a.ids[:100])
    cut = trace_prompts(path, WORDS, 2, TraceLimits(max_input=700, max_output=6), seed=3)
    assert [(p.input_len, p.output_len) for p in cut] == [(700, 5), (700, 6)]
    assert list(cut[0].ids) == list(cut[1].ids) == list(a.ids[:700])


def test_an_azure_trace(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n2023-11-16 18:17:05.4799600,31,8\n"
    )
    first, second = trace_prompts(path, WORDS, 0, TraceLimits(), seed=0)
    assert (len(first.ids), first.output_len, first.at) == (48, 10, 0.0)
    assert (len(second.ids), second.output_len) == (31, 8) and second.at == pytest.approx(1.5)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,many,10\n")
    with pytest.raises(DatasetError, match="line 2.*ContextTokens"):
        trace_prompts(path, WORDS, 0, TraceLimits(), seed=0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n{"timestamp": 3,',
            "line 2: needs",
        ),
        ('{"timestamp": 0, "input_length": 5}\n', "line 1: needs timestamp.*hash_ids"),
        ('{"timestamp": 0, "input_length": 5, "output_length": "x", "hash_ids": []}\n', "line 1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("hello\n", "neither a Mooncake trace"),
        ("", "neither a Mooncake trace"),
    ],
)
def test_a_broken_trace_names_its_line(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(DatasetError, match=words):
        trace_prompts(path, WORDS, 0, TraceLimits(), seed=0)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot read"):
        trace_prompts(tmp_path / "missing", WORDS, 0, TraceLimits(), seed=0)
    torn = tmp_path / "torn.gz"
    torn.write_bytes(gzip.compress(b"TIMESTAMP," * 1000)[:-20])
    with pytest.raises(DatasetError, match="cannot read"):
        trace_prompts(torn, WORDS, 0, TraceLimits(), seed=0)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": "Hi", "output_len": 4},
        {"prompt": [7, 8, 9], "max_tokens": 2},
        {"messages": [{"role": "user", "content": "Hello"}]},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    text, ids, chat, again = file_prompts(path, 4, 16, NONE)
    assert (text.as_ids_or_text(), text.output_len) == ("Hi", 4) and again == text
    assert (ids.as_ids_or_text(), ids.output_len, ids.input_len) == ([7, 8, 9], 2, 3)
    assert chat.output_len == 16 and chat.as_messages() == [{"role": "user", "content": "Hello"}]
    with pytest.raises(DatasetError, match="--backend openai-chat"):
        chat.as_ids_or_text()
    with pytest.raises(DatasetError, match="--tokenizer"):
        ids.as_messages()
    path.write_text("one\n\n two \n")
    assert [p.text for p in file_prompts(path, 0, 8, NONE)] == ["one", "two"]
    path.write_text('{"prompt": ""}\n')
    with pytest.raises(DatasetError, match="line 1: needs"):
        file_prompts(path, 0, 8, NONE)
    path.write_text('{"prompt": "a", "output_len": 0}\n')
    with pytest.raises(DatasetError, match="output_len"):
        file_prompts(path, 0, 8, NONE)


def test_ids_become_text_for_a_chat() -> None:
    assert SampleRequest(1, ids=[4, 5], decode=WORDS.decode).as_messages() == [{"role": "user", "content": "4 5"}]


def test_when_requests_are_due() -> None:
    prompts = [SampleRequest(1, text="a", at=at) for at in (0.0, 1.0, 7.5)] * 1000
    assert schedule(prompts, math.inf, False, 0) == [0.0] * 3000
    assert schedule(prompts[1:], math.inf, True, 0)[:3] == [1.0, 7.5, 0.0]
    assert schedule(prompts[1:3], math.inf, True, 0) == [0.0, 6.5]  # a trace begins with its first request
    due = schedule(prompts, 50.0, False, seed=2)
    gaps = [b - a for a, b in zip(due, due[1:], strict=False)]
    assert due[0] == 0.0 and statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.15)  # exponential: its deviation is its mean
