"""The load generator against a small server with known delays and failures."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import resource
import signal
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from tests.cpu.bench_server import Fake, Send, serving, serving_in_a_thread
from tests.cpu.null_sink import null_sink
from tests.cpu.plan_models import LITE
from thalweg.bench import serve
from thalweg.bench.backends import BACKENDS, AnswerReader
from thalweg.bench.dataset_flags import shortening_flags
from thalweg.bench.errors import DatasetError, HttpError
from thalweg.bench.floor import ServedModel, share_of_floor
from thalweg.bench.http_client import HttpClient
from thalweg.bench.metrics import Record
from thalweg.bench.serve import parse
from thalweg.config.machines import hardware
from thalweg.launch.planning.layouts import ONE


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    made.add_special_tokens([AddedToken("<eos>", special=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


def bench(fake: Fake, *flags: str) -> dict[str, Any]:
    async def body() -> dict[str, Any]:
        async with serving(fake) as url:
            words = ["--base-url", url, "--disable-tqdm", *flags]
            return await serve.run(parse(words), words)

    return asyncio.run(body())


SMALL = ("--num-prompts", "6", "--random-input-len", "11", "--random-output-len", "5", "--random-range-ratio", "1")


@pytest.mark.parametrize("backend", ["thalweg", "openai", "openai-chat", "sglang"])
def test_each_api_and_known_latencies(tokenizer: str, backend: str) -> None:
    fake = Fake(first=0.03, gap=0.02)
    result = bench(
        fake, "--backend", backend, "--tokenizer", tokenizer, "--output-details", "--max-concurrency", "3", *SMALL
    )
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 30)
    assert result["total_input_tokens"] == 66 and result["total_cached_tokens"] == 18
    assert 28 <= result["median_ttft_ms"] < 150
    assert 16 <= result["median_itl_ms"] < 100 and 16 <= result["median_tpot_ms"] < 100
    assert 110 <= result["median_e2e_latency_ms"] < 500
    assert [len(gaps) for gaps in result["itls"]] == [4] * 6
    assert set(result["generated_texts"]) == {"éééééé"[:5]}
    assert fake.most == 3 and result["max_concurrent_requests"] == 3
    assert fake.connections <= 4  # kept alive: one for each place, perhaps one more
    body = fake.bodies[0]
    sampling = body["sampling_params"] if backend == "sglang" else body
    assert sampling["ignore_eos"] is True and sampling["temperature"] == 0.0
    if backend == "openai-chat":
        assert len(body["messages"][0]["content"].split()) == 11
    else:
        ids = body["input_ids"] if backend == "sglang" else body["prompt"]
        assert len(ids) == 11 and max(ids) < 50  # never the special token


@pytest.mark.parametrize("backend", ["thalweg", "sglang"])
def test_several_tokens_in_an_event_count_as_several(tokenizer: str, backend: str) -> None:
    fake = Fake(first=0.01, gap=0.01, per_event=2)
    result = bench(fake, "--backend", backend, "--tokenizer", tokenizer, "--output-details", *SMALL)
    assert result["total_output_tokens"] == 30
    # 2 + 2 + 1 tokens: the second event's gap of 20 ms counts twice as 10 ms, the last one's 10 ms once
    assert [len(gaps) for gaps in result["itls"]] == [3] * 6
    assert 6 <= result["median_itl_ms"] < 100


def test_failures_are_counted_with_their_reasons(tokenizer: str) -> None:
    fake = Fake(first=0.0, gap=0.005, plan=["ok", "429", "drop", "error", "cut", "noise", "429"])
    result = bench(fake, "--backend", "openai", "--tokenizer", tokenizer, *SMALL)
    assert (result["completed"], result["failed"]) == (0, 6)
    noise = next(reason for reason in result["failures"] if "/v1/completions" in reason)
    assert noise.startswith("not an event of this API") and result["failures"].pop(noise) == 1
    assert result["failures"] == {
        "HTTP 429 Somehow: the queue is full": 2,
        "the server closed the connection before its answer was complete": 1,
        "error event: the engine ended": 1,
        "the stream ended without [DONE] or a finish reason": 1,
    }
    assert result["total_output_tokens"] == 0


def test_thoughts_are_output_and_no_answer() -> None:
    """Both names that servers have for them; a later turn gets the answer alone."""
    record = Record(start=1.0)
    reader = AnswerReader(BACKENDS["openai-chat"], record)
    for at, delta in enumerate(
        ({"reasoning_content": "Hm. "}, {"reasoning": "Yes."}, {"content": "Seven"}, {"content": "!"})
    ):
        reader.event(json.dumps({"choices": [{"delta": delta}]}).encode(), 2.0 + at)
    assert (record.text, record.text[record.thought :], reader.seen) == ("Hm. Yes.Seven!", "Seven!", 4)
    assert (record.ttft, record.itl) == (1.0, [1.0] * 3)


def test_without_streaming(tokenizer: str) -> None:
    result = bench(Fake(first=0.02, gap=0.005), "--tokenizer", tokenizer, "--disable-stream", *SMALL)
    assert result["completed"] == 6 and result["total_output_tokens"] == 30
    assert 30 <= result["median_ttft_ms"] < 200 and result["median_ttft_ms"] == result["median_e2e_latency_ms"]


def test_a_failing_warm_up_stops_the_run(tokenizer: str) -> None:
    fake = Fake(plan=["429"])
    with pytest.raises(serve.BenchError, match="warm-up.*the queue is full"):
        bench(fake, "--tokenizer", tokenizer, *SMALL)
    assert len(fake.bodies) == 1


def test_a_warm_round_has_the_lengths_of_the_load_and_other_tokens(tokenizer: str) -> None:
    fake = Fake(first=0.0, gap=0.0)
    lengths = ("--random-input-len", "30", "--random-output-len", "9", "--random-range-ratio", str(1 / 3))
    bench(fake, "--tokenizer", tokenizer, "--num-prompts", "8", "--warmup-requests", "6", *lengths)
    warm, load = fake.bodies[:6], fake.bodies[6:12]
    shapes = [sorted((len(body["prompt"]), body["max_tokens"]) for body in bodies) for bodies in (warm, load)]
    assert shapes[0] == shapes[1] and len(set(shapes[0])) > 3
    assert all(10 <= size <= 30 and 3 <= output <= 9 for size, output in shapes[0])
    assert not {tuple(body["prompt"]) for body in warm} & {tuple(body["prompt"]) for body in load}


def test_staggered_requests_do_not_run_in_lockstep(tokenizer: str) -> None:
    """A request takes 0.4 s; of 4 at a time each begins 0.1 s after the one before."""
    flags = ("--tokenizer", tokenizer, "--max-concurrency", "4", "--warmup-requests", "4", "--output-details")
    fake = Fake(first=0.2, gap=0.05)
    starts = bench(fake, *flags, *SMALL, "--stagger")["start_times"]
    gaps = [after - before for before, after in zip(starts[:4], starts[1:4], strict=False)]
    assert all(0.07 < gap < 0.2 for gap in gaps), gaps
    assert max(starts[4:]) - starts[0] < 1.0, "the others follow as soon as one has ended"
    together = bench(Fake(first=0.2, gap=0.05), *flags, *SMALL)["start_times"]
    assert together[3] - together[0] < 0.05


def test_the_share_of_the_floor_needs_a_machine_and_a_config(tokenizer: str) -> None:
    flags = ("--tokenizer", tokenizer, "--max-concurrency", "4", *SMALL, "--machine", "h200")  # 4 requests, then 2
    assert bench(Fake(first=0.01, gap=0.01), *flags)["share_of_floor"] is None
    (Path(tokenizer) / "config.json").write_text(json.dumps(LITE))
    result = bench(Fake(first=0.01, gap=0.01), *flags)
    run = 6, 66, 30, result["concurrency"], result["duration"]
    assert result["share_of_floor"] == share_of_floor(ServedModel(Path(tokenizer), ONE), hardware("h200"), *run) > 0
    assert "Share of the decode floor (%)" in serve.show(result)


def test_a_warm_up_that_is_refused_names_the_flags_that_shorten_it(tokenizer: str) -> None:
    fake = Fake(plan=["400"])
    with pytest.raises(serve.BenchError, match=r"it had 11 tokens and asked for 5: --random-input-len and .* shorter"):
        bench(fake, "--tokenizer", tokenizer, *SMALL)
    names = {"trace": "--trace-max-input-len", "generated-shared-prefix": "--gsp-question-len", "file": "--output-len"}
    for name, flag in names.items():
        assert flag in shortening_flags(parse(["--dataset-name", name, "--dataset-path", "x"]))


def test_flags_reach_the_requests(tokenizer: str) -> None:
    fake = Fake(first=0.0, gap=0.0, tokenizer=tokenizer)  # the tokenizer's place comes from /server_info
    extra = ("--extra-request-body", '{"top_p": 0.5}', "--temperature", "0.7", "--disable-ignore-eos", "--flush-cache")
    bench(fake, "--warmup-requests", "0", "--served-model-name", "mine", *extra, *SMALL)
    assert all(b["top_p"] == 0.5 and b["temperature"] == 0.7 and "ignore_eos" not in b for b in fake.bodies)
    assert {b["model"] for b in fake.bodies} == {"mine"} and fake.posts[0] == "/flush_cache" and len(fake.bodies) == 6


def test_a_poisson_load_keeps_its_times(tokenizer: str) -> None:
    fake = Fake(first=0.0, gap=0.0)
    flags = ("--tokenizer", tokenizer, "--request-rate", "100", "--num-prompts", "60", "--random-output-len", "1")
    result = bench(fake, "--output-details", *flags)
    assert 0.3 < result["duration"] < 3
    assert min(result["send_delays"]) >= 0 and sorted(result["send_delays"])[len(result["send_delays"]) // 2] < 0.02


def test_a_trace_replays_faster(tokenizer: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1000 * i, "input_length": 600, "output_length": 2, "hash_ids": [0, i]} for i in range(1, 5)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fake = Fake(first=0.0, gap=0.0)
    flags = (
        "--dataset-name",
        "trace",
        "--dataset-path",
        str(trace),
        "--use-trace-timestamps",
        "--trace-slowdown-factor",
        "0.1",
    )
    result = bench(fake, "--tokenizer", tokenizer, "--output-details", "--warmup-requests", "0", *flags)
    starts = result["start_times"]
    assert 0.1 < starts[-1] - starts[0] < 2.0  # 0.3 s of the trace's 3; a busy machine may begin late
    prompts = [body["prompt"] for body in fake.bodies]
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1 and len({tuple(prompt) for prompt in prompts}) == 4


def test_prompts_that_the_api_cannot_carry_are_found_before_the_load(tmp_path: Path) -> None:
    path, fake = tmp_path / "p.jsonl", Fake()
    path.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    with pytest.raises(DatasetError, match="--backend openai-chat"):
        bench(fake, "--dataset-name", "file", "--dataset-path", str(path), "--warmup-requests", "0")
    assert fake.bodies == []


def test_ctrl_c_keeps_what_was_measured(tokenizer: str) -> None:
    fake = Fake(first=0.0, gap=0.0, plan=["ok"] * 3)
    slow = Fake.handle

    async def stalling(self: Fake, method: str, path: str, body: bytes, send: Send) -> bool:
        if method == "POST" and len(self.bodies) == 3:
            self.bodies.append({})
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            await asyncio.sleep(30)
        return await slow(self, method, path, body, send)

    fake.handle = stalling.__get__(fake)  # type: ignore[method-assign]
    result = bench(fake, "--tokenizer", tokenizer, "--max-concurrency", "1", *SMALL)
    assert result["interrupted"] is True and result["completed"] == 2 and result["failed"] == 0
    assert result["duration"] < 5


def test_main_writes_the_result_and_says_what_failed(
    tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, out = Fake(first=0.0, gap=0.0, plan=["ok", "429"]), tmp_path / "results" / "run.jsonl"

    with serving_in_a_thread(fake) as url:
        flags = ["--base-url", url, "--tokenizer", tokenizer, "--api-key", "secret", "--output-file", str(out), *SMALL]
        assert serve.main(flags) + serve.main(flags) == 0
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert (first["completed"], first["failed"], second["completed"]) == (5, 1, 6)
    assert first["configuration"]["client"]["random_range_ratio"] == 1.0 and first["versions"]["thalweg"]
    assert first["device"]["cores"] >= 1 and first["command"].startswith("thalweg bench serve")
    shown = capsys.readouterr().out
    assert "Serving Benchmark Result" in shown and "1 × HTTP 429" in shown
    assert "secret" not in out.read_text()


def test_an_unreachable_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--base-url", "http://127.0.0.1:9", "--tokenizer", "x"]) == 1
    assert "cannot connect to http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--goodput", "ttft"], "NAME:MILLISECONDS"),
        (["--goodput", "speed:3"], "NAME:MILLISECONDS"),
        (["--goodput", "ttft:-1"], "NAME:MILLISECONDS"),
        (["--request-rate", "1", "0"], "--request-rate: expected a number above 0, got '0'"),
        (["--burstiness", "nan"], "--burstiness: expected a number above 0"),
        (["--repeat", "0"], "--repeat: expected a whole number from 1 on"),
        (["--random-range-ratio", "1.5"], "--random-range-ratio: expected a number between 0 and 1"),
        (["--random-range-ratio", "nan"], "between 0 and 1"),
        (["--gsp-num-groups", "0"], "--gsp-num-groups: expected a whole number from 1 on"),
        (["--think-time", "inf"], "--think-time: expected a number of seconds from 0 on"),
        (["--trace-slowdown-factor", "0"], "above 0"),
        (["--dataset-name", "nonsense"], "unknown data set"),
        (["--dataset-name", "trace"], "--dataset-path"),
        (["--use-trace-timestamps"], "--dataset-name trace"),
        (["--stagger"], "--max-concurrency"),
        (["--stagger", "--max-concurrency", "4", "--warmup-requests", "0"], "--warmup-requests"),
        (["--extra-request-body", "[1]"], "JSON object"),
        (["--extra-request-body", "{"], "JSON object"),
        (["--header", "nothing"], "NAME=VALUE"),
        (["--num-prompts", "-3"], "whole number"),
        (["--backend", "trt"], "invalid choice"),
        (["--num-promts", "5"], "unknown flag --num-promts; did you mean --num-prompts?"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(flags)
    said = capsys.readouterr().err
    assert words in said and left.value.code == 2 and len(said.splitlines()) == 2, "not behind thirty lines of flags"


def test_help_tells_every_data_set_that_the_docs_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    assert "servegen (trace)" in shown.replace("\n", " ") and "gsp" in shown


def test_sglangs_short_spellings_work() -> None:
    args = parse(["--random-input", "7", "--random-output", "8", "--request-rate", "inf"])
    assert (args.random_input_len, args.random_output_len, args.request_rate) == (7, 8, [math.inf])


def client_test(body: Callable[[HttpClient, Fake], Coroutine[Any, Any, None]], fake: Fake) -> None:
    async def run() -> None:
        async with serving(fake) as url:
            client = HttpClient(url)
            await body(client, fake)
            client.close()

    asyncio.run(run())


def test_a_connection_closed_while_idle_is_replaced() -> None:
    async def body(client: HttpClient, fake: Fake) -> None:
        assert (await client.request("GET", "/v1/models")).status == 200
        idle = client._idle[0]
        assert idle.transport is not None
        idle.transport.abort()
        await asyncio.sleep(0)
        assert (await client.request("GET", "/v1/models")).status == 200
        assert fake.connections == 2

    client_test(body, Fake())


def test_running_out_of_file_descriptors_is_reported_as_such(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def few(count: int, required: bool) -> None:
        assert count == 40 + serve.SPARE_FILES and not required
        used = {int(name) for name in os.listdir("/proc/self/fd")}
        ninth = list(itertools.islice((number for number in itertools.count() if number not in used), 9))[-1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (ninth + 1, before[1]))

    with null_sink() as (url, _):
        flags = ["--base-url", url, "--tokenizer", tokenizer, "--warmup-requests", "0", *SMALL, "--num-prompts", "40"]
        asyncio.run(serve.ServingBenchmark(parse(flags)).run())  # imports what the next run must not open
        monkeypatch.setattr(serve, "raise_file_limit", few)
        measured = serve.ServingBenchmark(parse(flags))
        try:
            asyncio.run(measured.run())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    (row,) = measured.rows
    failed: Any = row["failed"]
    assert (row["completed"], row["partial"]) == (40 - failed, False) and failed > 0
    (reason,) = row["failures"]  # type: ignore[misc]
    assert "cannot open another connection (Too many open files)" in reason


def test_an_invalid_address_is_refused() -> None:
    with pytest.raises(HttpError, match="http://host:port"):
        HttpClient("ftp://there")
