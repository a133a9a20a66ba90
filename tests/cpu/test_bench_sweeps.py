"""Sweeps, repeats, conversations and interrupted runs, against servers with known behaviour."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from tests.cpu.bench_server import Fake, serving, serving_in_a_thread
from tests.cpu.null_sink import null_sink
from thalweg.bench import serve
from thalweg.bench.server_info import Counters, accept_length, cache_hits, read_counters


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(50)} | {"é": 50}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Split("é", "isolated")
    made.add_special_tokens([AddedToken("<eos>", special=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


def bench(fake: Fake, tokenizer: str, *flags: str) -> dict[str, Any]:
    async def body() -> dict[str, Any]:
        async with serving(fake) as url:
            words = ["--base-url", url, "--disable-tqdm", "--tokenizer", tokenizer, *flags]
            return await serve.run(serve.parse(words), words)

    return asyncio.run(body())


SMALL = ("--random-input-len", "11", "--random-output-len", "5", "--random-range-ratio", "1")


def test_a_sweep_measures_each_point_with_prompts_of_its_own(tokenizer: str) -> None:
    fake = Fake(first=0.0, gap=0.002)
    flags = ("--num-prompts", "4", "--max-concurrency", "1", "3", "--repeat", "2", "--warmup-requests", "0")
    result = bench(fake, tokenizer, *SMALL, *flags, "--goodput", "ttft:10000", "e2el:0.001")
    rows = result["points"]
    assert [(row["max_concurrency"], row["repeat"], row["completed"]) for row in rows] == [
        (1, 0, 4), (1, 1, 4), (3, 0, 4), (3, 1, 4),
    ]  # fmt: skip
    assert [row["max_concurrent_requests"] for row in rows] == [1, 1, 3, 3] and result["wanted"] == 4
    assert len({tuple(body["prompt"]) for body in fake.bodies}) == 16 and not result["partial"]
    assert all(row["goodput"] == row["goodput_share"] == 0.0 for row in rows)
    assert all(len(row["samples"]["ttft_ms"]) == 4 and sum(row["tokens_by_second"]) > 0 for row in rows)
    shown = serve.show(result)
    assert shown.count("Serving Benchmark Result") == 4 and "goodput" in shown.splitlines()[-6]


def test_a_rate_sweep_in_lines(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, fake = tmp_path / "r.jsonl", Fake(first=0.0, gap=0.0)
    with serving_in_a_thread(fake) as url:
        flags = ["--base-url", url, "--tokenizer", tokenizer, "--request-rate", "200", "400", "--burstiness", "4"]
        assert serve.main([*flags, *SMALL, "--num-prompts", "5", "--output-file", str(out)]) == 0
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert (first["request_rate"], second["request_rate"]) == ("200.0", "400.0")
    assert first["commit"] == second["commit"] and first["configuration"]["client"]["request_rate"] == [
        "200.0",
        "400.0",
    ]
    assert "TTFT p50" in capsys.readouterr().out.splitlines()[-4]


@pytest.mark.parametrize("backend", ["thalweg", "openai", "openai-chat", "sglang"])
def test_a_later_turn_carries_the_answers(tokenizer: str, backend: str) -> None:
    fake = Fake(first=0.0, gap=0.002)
    flags = ("--dataset-name", "conversations", "--num-prompts", "3", "--num-turns", "3", "--system-prompt-len", "4")
    flags += ("--warmup-requests", "0", "--max-concurrency", "2", "--backend", backend, "--think-time", "0.01")
    result = bench(fake, tokenizer, *flags, *SMALL, "--output-details")
    assert (result["completed"], result["failed"], fake.most) == (9, 0, 2)
    assert [(row["turn"], row["completed"]) for row in result["by_turn"]] == [(1, 3), (2, 3), (3, 3)]
    assert result["turns"] == [0, 1, 2] * 3
    if backend == "openai-chat":
        talks = sorted((body["messages"] for body in fake.bodies), key=len)
        assert [len(talk) for talk in talks] == [1] * 3 + [3] * 3 + [5] * 3
        assert {m["content"] for m in talks[-1] if m["role"] == "assistant"} == {"é" * 5}
        return
    prompts = sorted((tuple(body.get("prompt") or body["input_ids"]) for body in fake.bodies), key=len)
    assert [len(prompt) for prompt in prompts] == [15] * 3 + [31] * 3 + [47] * 3
    answer = (50,) * 5 if backend in ("openai", "sglang") else (5,) * 5  # of text, or the ids that the stream told
    for prompt in prompts[3:]:
        before = prompt[:-11]
        assert before[-5:] == answer and before[:-5] in prompts


def test_a_failed_turn_ends_its_conversation(tokenizer: str) -> None:
    fake = Fake(first=0.0, gap=0.0, plan=["ok", "429"])
    flags = ("--dataset-name", "conversations", "--num-prompts", "1", "--num-turns", "4", "--warmup-requests", "0")
    result = bench(fake, tokenizer, *flags, *SMALL)
    assert (result["completed"], result["failed"], len(fake.bodies)) == (1, 3, 2)
    assert result["failures"] == {
        "an earlier turn of its conversation failed, so it was not sent": 2,
        "HTTP 429 Somehow: the queue is full": 1,
    }


def test_groups_share_their_beginning(tokenizer: str) -> None:
    fake = Fake(first=0.0, gap=0.0)
    flags = ("--dataset-name", "gsp", "--gsp-num-groups", "2", "--gsp-prompts-per-group", "3", "--gsp-output-len", "2")
    result = bench(
        fake, tokenizer, *flags, "--gsp-system-prompt-len", "20", "--gsp-question-len", "5", "--warmup-requests", "0"
    )
    assert result["completed"] == 6 and result["dataset_name"] == "generated-shared-prefix"
    assert {len(body["prompt"]) for body in fake.bodies} == {25}
    assert len({tuple(body["prompt"][:20]) for body in fake.bodies}) == 2 and result["cache_hit_possible"] == 0.0


def test_a_server_that_dies_half_way(tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    with null_sink() as (url, process):

        def kill() -> None:
            while len(json.loads(urlopen(f"{url}/arrivals").read())) < 40:
                time.sleep(0.01)
            process.kill()

        threading.Thread(target=kill, daemon=True).start()
        flags = [
            "--base-url",
            url,
            "--tokenizer",
            tokenizer,
            "--request-rate",
            "100",
            "200",
            "--num-prompts",
            "500",
            *SMALL,
        ]
        assert serve.main([*flags, "--output-file", str(out)]) == 1
    result = json.loads(out.read_text())
    (row,) = result["points"]  # the second rate was not begun
    assert result["partial"] and result["ended"].startswith("the server is gone: cannot connect to http://127.0.0.1:")
    assert 10 < row["completed"] < 500 and row["partial"] and row["requests"] == 500
    assert row["failed"] >= 1 and row["completed"] + row["failed"] < 500  # it is not asked for all that was left
    assert "PARTIAL: the server is gone" in capsys.readouterr().out


def test_ctrl_c_in_a_sweep_keeps_the_points(tokenizer: str, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    fake = Fake(first=0.02, gap=0.01)
    with serving_in_a_thread(fake) as url:

        def press() -> None:
            while len(fake.bodies) < 7:
                stop.wait(0.005)
            signal.pthread_kill(main, signal.SIGINT)

        stop, main = threading.Event(), threading.main_thread().ident
        assert main is not None
        thread = threading.Thread(target=press, daemon=True)
        thread.start()
        flags = [
            "--base-url",
            url,
            "--tokenizer",
            tokenizer,
            "--max-concurrency",
            "2",
            "1",
            "--num-prompts",
            "4",
            *SMALL,
        ]
        assert serve.main([*flags, "--output-file", str(out)]) == 130
        thread.join()
    result = json.loads(out.read_text())
    assert result["interrupted"] and result["ended"] == "Ctrl-C" and result["partial"]
    assert [row["partial"] for row in result["points"]] == [False, True]
    assert result["points"][0]["completed"] == 4 > result["points"][1]["completed"]


def test_a_profile_of_the_load(tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake(first=0.0, gap=0.0)
    flags = ("--profile", "--profile-output-dir", "there", "--num-prompts", "2", "--top-p", "0.5", "--cache-report")
    bench(fake, tokenizer, *flags, *SMALL)
    places = [i for i, path in enumerate(fake.posts) if path.endswith("_profile")]
    assert [fake.posts[i] for i in places] == ["/start_profile", "/stop_profile"] and places == [
        1,
        4,
    ]  # not the warm-up
    assert all(body["top_p"] == 0.5 for body in fake.bodies) and "profile: " in capsys.readouterr().err


def test_ctrl_c_between_two_points_keeps_the_first(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, calls = serve.warm_up, list[int]()

    async def interrupted(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(5)
        await before(*args)

    monkeypatch.setattr(serve, "warm_up", interrupted)
    with serving_in_a_thread(Fake(first=0.0, gap=0.0)) as url:
        flags = [
            "--base-url",
            url,
            "--disable-tqdm",
            "--tokenizer",
            tokenizer,
            "--repeat",
            "3",
            "--num-prompts",
            "2",
            *SMALL,
        ]
        result = asyncio.run(serve.run(serve.parse(flags), flags))
        assert [row["completed"] for row in result["points"]] == [2]  # type: ignore[attr-defined]
        assert result["partial"] and result["ended"] == "Ctrl-C" and len(calls) == 2
        calls[:] = [0]
        with pytest.raises(KeyboardInterrupt):  # before anything was measured there is nothing to keep
            asyncio.run(serve.run(serve.parse(flags), flags))


def test_what_other_servers_count() -> None:
    def page(queries: int, hits: int, drafts: int, accepted: int) -> str:
        return f"""# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{{engine="0"}} {queries}.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{{engine="0"}} {hits}.0
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}.0
"""

    before, after = read_counters(page(100, 10, 50, 20)), read_counters(page(1100, 510, 150, 90))
    new = after.since(before)
    assert accept_length({}, new) == pytest.approx(1.7)
    assert cache_hits(0, 1000, new) == {"cache_hit_rate": 0.5, "cache_hit_source": "metrics"}
    assert cache_hits(250, 1000, new) == {"cache_hit_rate": 0.25, "cache_hit_source": "usage"}
    assert accept_length({}, before.since(after)) is None  # it started anew in between
    assert accept_length({"internal_states": [{"avg_spec_accept_length": 2.5}]}, Counters()) == 2.5
    assert accept_length({}, Counters()) is None
