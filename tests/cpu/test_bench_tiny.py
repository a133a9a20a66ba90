"""Every benchmark command on the bundled model, in full but small: the numbers agree with each other."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.cpu.bench_server import Fake, serving_in_a_thread
from thalweg.bench import collectives, compare_transformers, eval, filled_cache, in_process, one_batch
from thalweg.bench.answering import EngineAnswerer, EvalPrompt, PromptFormat
from thalweg.bench.compare_transformers import Row, agreement, decode_fp8, judge, load_transformers
from thalweg.bench.in_process import Timing, time_batch
from thalweg.bench.tasks import make_items
from thalweg.config.tree import options_of
from thalweg.core.errors import InvalidRequest, UnsupportedConfig
from thalweg.core.messages import TokenDelta
from thalweg.core.sampling import SamplingParams
from thalweg.llm import LLM

TINY = Path(__file__).parents[2] / "models" / "tiny"
ENGINE = ["--model", str(TINY), "--threads", "1", "--dtype", "float32"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(TINY), threads=1, dtype="float32", max_running_requests=8, max_total_tokens=16384)


def test_one_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "one.json"
    lengths = ["--batch-size", "1", "3", "--input-len", "20", "--output-len", "5", "1", "--repeat", "2"]
    assert one_batch.main([*ENGINE, *lengths, "--result-filename", str(out)]) == 0
    saved = json.loads(out.read_text())
    assert [(r["batch_size"], r["output_len"]) for r in saved["results"]] == [(1, 5), (1, 1), (3, 5), (3, 1)]
    for r in saved["results"]:
        assert r["prefill_throughput"] == pytest.approx(r["batch_size"] * 20 / r["prefill_latency"])
        assert r["total_latency"] >= r["prefill_latency"] > 0
        assert (r["median_decode_latency"] > 0) == (r["output_len"] > 1)
        assert len(r["runs"]) == 2 and r["total_latency"] == min(run["total_latency"] for run in r["runs"])
    assert saved["configuration"]["decisions"] and saved["device"]["cpu"] and saved["versions"]["torch"]
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("prefill", "decode", "tok/s")) and "…" not in shown
    assert "accept" not in shown and "limit" not in shown, "columns without a value are left out"
    assert max(map(len, shown.splitlines())) <= 80


def test_a_batch_that_does_not_fit_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--batch-size", "60000", "--input-len", "3000", "--output-len", "5"]
    assert one_batch.main([*ENGINE, *lengths]) == 2
    assert "--batch-size 60000, 3005 tokens each: max_total_tokens: " in capsys.readouterr().err


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (UnsupportedConfig("no memory"), 2)])
def test_one_batch_keeps_what_was_measured(
    error: BaseException, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = one_batch.measure, iter(range(9))

    def second_fails(*given: object) -> list[Timing]:
        if next(calls) == 1:
            raise error
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(one_batch, "measure", second_fails)
    out = tmp_path / "one.json"
    lengths = ["--batch-size", "1", "2", "--input-len", "20", "--output-len", "4"]
    assert one_batch.main([*ENGINE, *lengths, "--result-filename", str(out)]) == status
    saved = json.loads(out.read_text())
    assert [len(r["decode_latencies"]) for r in saved["results"]] == [3] and saved["partial"] is True and saved["ended"]


def test_one_batch_refuses_what_is_longer_than_the_context(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_process, "LocalEngine", None)  # before anything is loaded
    assert one_batch.main([*ENGINE, "--input-len", "4000", "--output-len", "500", "--max-total-tokens", "8192"]) == 2
    assert "4500 tokens" in capsys.readouterr().err


def test_a_timed_batch_is_what_generate_gives(llm: LLM) -> None:
    prompts = [llm.get_tokenizer().encode(text) for text in ("Good morrow", "What is 12 + 34?", "Who is there?")]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    timing = time_batch(llm.engine, prompts, 6)
    assert timing.outputs == [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
    assert len(timing.decode) == 5 and timing.total == pytest.approx(timing.prefill + sum(timing.decode))


def test_long_contexts_that_nobody_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "one.json"
    lengths = ["--batch-size", "3", "--input-len", "1000", "640", "--output-len", "4", "--context-length", "1024"]
    filled = [*ENGINE, *lengths, "--fill-cache", "--result-filename", str(out)]
    assert one_batch.main([*filled, "--kv-cache-dtype", "fp8_ds_mla"]) == 0
    rows = json.loads(out.read_text())["results"]
    assert [(r["filled"], len(r["decode_latencies"]), "prefill_latency" in r) for r in rows] == [(True, 3, False)] * 2
    assert "prefill" not in capsys.readouterr().out
    assert one_batch.main([*filled, "--no-radix-cache"]) == 2 and "--fill-cache works" in capsys.readouterr().err


def test_collectives_without_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert collectives.main([]) == collectives.main(["--tp-size", "2"]) == 2
    line = "thalweg bench collectives: it times transfers between GPUs: this host has 0, and at least 2 are needed\n"
    assert capsys.readouterr().err == 2 * line


def test_filled_pages_are_each_prompts_own() -> None:
    options = options_of(model=str(TINY), threads=1, max_total_tokens=64 * 40, max_running_requests=3)
    resolved, engine = in_process.start(options)
    prompts = filled_cache.prompts_of_own_pages(resolved, 3, 640, Random(1))
    engine.fill_cache(prompts, 1)
    for spec in engine.runner.planes.specs:
        stored = engine.runner.planes.paged(spec.name, spec.layer)
        vectors = engine.runner.planes.read(spec.name, spec.layer, stored, torch.float32)
        assert 0.9 < float(vectors[1:].std()) < 1.1 and vectors[40].any()
    requests, pages = [in_process.exactly(prompt, 9) for prompt in prompts], set[int]()
    for step in in_process.generate(engine, requests):
        running = engine.loop.scheduler.live.values() if step.running == 3 else ()
        pages |= {page for request in running for page in request.pages[:9]}
    assert [request.cached for request in requests] == [576] * 3 and len(pages) == 27
    with pytest.raises(InvalidRequest, match="the cache's 40 pages: use more --max-total-tokens"):
        engine.fill_cache(filled_cache.prompts_of_own_pages(resolved, 5, 640, Random(2)), 1)
    assert engine.loop.scheduler.allocator.num_available() == 40, "a refused fill holds no pages"


def test_fp8_blocks_are_decoded_with_their_own_scales() -> None:
    codes = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3) + 0.5
    plain = decode_fp8(
        {"w.weight": codes, "w.weight_scale_inv": scales, "n.weight": torch.ones(4, dtype=torch.bfloat16)}
    )
    assert set(plain) == {"w.weight", "n.weight"} and plain["n.weight"].dtype == torch.float32
    for row, column in ((0, 0), (127, 128), (128, 127), (199, 299)):
        want = float(codes[row, column]) * float(scales[row // 128, column // 128])
        assert float(plain["w.weight"][row, column]) == pytest.approx(want)


def test_transformers_has_the_same_model(llm: LLM) -> None:
    model: Any = load_transformers(TINY)
    ids = PromptFormat(TINY).with_target(make_items("sums", "held_out", 1)[0])[0]
    ours = torch.tensor(llm.score([ids])[0])
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    theirs = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    # from index_topk tokens on, a near tie of the indexer may be broken differently
    assert torch.allclose(ours[:63], theirs[:63], atol=1e-3)
    assert float((ours - theirs).abs().median()) < 1e-3


def test_agreement_ends_at_the_first_difference() -> None:
    assert agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == 4 / 6


def test_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cmp.json"
    flags = [
        "--batch-size",
        "1",
        "2",
        "--input-len",
        "12",
        "--output-len",
        "6",
        "--rounds",
        "2",
        "--output-file",
        str(out),
    ]
    assert compare_transformers.main([*ENGINE, *flags]) == 0
    saved = json.loads(out.read_text())
    for result in saved["results"]:
        rates = result["output_tokens_per_s"]
        assert result["ratio"] == pytest.approx(rates["thalweg"] / rates[result["fastest_other"]])
        assert rates[result["fastest_other"]] == max(rate for name, rate in rates.items() if name != "thalweg")
        assert [len(seconds) for seconds in result["seconds"].values()] == [2, 2, 2]
        # short of index_topk, and the same weights: the same text
        assert result["same_tokens"]["transformers dynamic"] > 0.9
    assert saved["load"]["threads"] == 1 and saved["load"]["checkpoint"] == "tiny"
    assert "ratio" in capsys.readouterr().out


def test_the_comparison_is_in_float32_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_transformers.main(["--model", str(TINY), "--dtype", "bfloat16", "--threads", "1"]) == 2
    assert "--dtype float32" in capsys.readouterr().err


def test_an_interrupted_comparison_keeps_the_batch_sizes_that_are_done(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["thalweg", *(f"transformers {cache}" for cache in compare_transformers.CACHES)]
    seconds, outputs = ([1.0], [2.0], [3.0]), ([[5, 6]], [[5, 6]], [[5, 7]])
    rows = iter([judge(2, dict(zip(names, seconds, strict=True)), dict(zip(names, outputs, strict=True)))])

    def compete(*_: object) -> Row:
        if (found := next(rows, None)) is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(compare_transformers, "start", lambda room: (llm.texts.resolved, llm.engine))
    monkeypatch.setattr(compare_transformers, "compete", compete)
    monkeypatch.setattr(compare_transformers, "load_transformers", lambda path: None)
    out = tmp_path / "cmp.json"
    flags = ["--batch-size", "1", "2", "--input-len", "4", "--output-len", "2", "--output-file", str(out)]
    assert compare_transformers.main([*ENGINE, *flags]) == 130
    saved = json.loads(out.read_text())
    assert [row["batch_size"] for row in saved["results"]] == [1] and saved["results"][0]["ratio"] == 2.0
    assert saved["partial"] is True and saved["ended"] == "Ctrl-C" and "PARTIAL" in capsys.readouterr().err


def test_evaluation_of_every_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "eval.json"
    assert eval.main([*ENGINE, "--items", "3", "--output-file", str(out)]) == 0
    saved = json.loads(out.read_text())
    rows = {row["task"]: row for row in saved["results"]}
    shares = ["sums", "recall", "recall, random context", "recall-choice", "tools", "agents"]
    assert list(rows) == [*shares, "dialogue perplexity"]
    assert rows["recall"]["hits"] > rows["recall, random context"]["hits"]
    assert rows["sums"]["total"] == rows["recall"]["total"] == 3
    assert rows["sums"]["hits"] >= 2, rows["sums"]["wrong"]
    assert 1 < rows["dialogue perplexity"]["perplexity"] < 2048
    assert all(len(row["wrong"]) == row["total"] - row["hits"] for row in rows.values() if "wrong" in row)
    assert saved["evaluation"]["items"] == 3 and saved["checkpoint"] == "tiny"
    assert saved["evaluation"]["shots"] == 0 and saved["partial"] is False and saved["ended"] == ""
    assert "95 % interval" in capsys.readouterr().out


def test_perplexity_is_that_of_the_target_alone(llm: LLM) -> None:
    run = eval.Evaluation(PromptFormat(TINY), EngineAnswerer(llm, progress=False), 2, 0)
    run.perplexity(EngineAnswerer(llm, progress=False))
    nats, tokens = 0.0, 0
    for item in make_items("dialogue", "held_out", 2):
        prompt = run.texts.prompt(item).ids
        rest = [*llm.get_tokenizer().encode(item.target, add_special_tokens=False), llm.get_tokenizer().eos_ids[0]]
        for i, token in enumerate(rest):  # one token at a time, by the log-probability of a forced choice
            forced = SamplingParams(
                temperature=0.0, max_tokens=1, logit_bias=((token, 100.0),), logprobs=0, ignore_eos=True
            )
            (result,) = llm.generate([(*prompt, *rest[:i])], forced)
            assert result.outputs[0].token_ids == [token]
            nats, tokens = nats - next(iter(result.outputs[0].logprobs[0].values())).logprob, tokens + 1
    row = run.rows[0]
    assert row["tokens"] == tokens
    assert row["perplexity"] == pytest.approx(torch.tensor(nats / tokens).exp().item(), rel=1e-3)


def test_ctrl_c_leaves_the_answers_that_are_done_and_an_engine_that_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    into: dict[int, str] = {}
    step = llm.engine.step

    def interrupted() -> list[TokenDelta]:
        if into:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    asked = [EvalPrompt(tuple(range(40, 48)), limit) for limit in (40, 2, 40)]
    with pytest.raises(KeyboardInterrupt):
        into.update(EngineAnswerer(llm, progress=False).answer(asked, "x"))
    assert list(into) == [1] and into[1]
    monkeypatch.undo()
    again = dict(EngineAnswerer(llm, progress=False).answer(asked[1:2], "x"))
    assert again[0] == into[1] and llm.engine.idle


def test_a_random_choice_replaces_the_indexers(llm: LLM) -> None:
    seen: list[int] = []

    def choose(scores_NS: torch.Tensor, topk: int) -> torch.Tensor:
        seen.append(topk)
        return scores_NS.topk(topk, -1).indices

    own = LLM(str(TINY), threads=1, dtype="float32", max_running_requests=2, max_total_tokens=4096)
    EngineAnswerer(own, progress=False).select(choose)
    own.generate([list(range(40, 140))], SamplingParams(max_tokens=1, temperature=0.0))
    assert seen and set(seen) == {64}


def test_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake(first=0.0, gap=0.0)
    with serving_in_a_thread(fake) as url:
        assert eval.main(["--model", str(TINY), "--base-url", url, "--tasks", "sums", "--items", "2"]) == 0
    first = fake.bodies[0]
    assert first["skip_special_tokens"] is False and "ignore_eos" not in first and first["temperature"] == 0.0
    wanted = [list(PromptFormat(TINY).prompt(item).ids) for item in make_items("sums", "held_out", 2)]
    assert sorted(body["prompt"] for body in fake.bodies) == sorted(wanted)
    assert "0.0%" in capsys.readouterr().out  # the fake's answers are no sums
    with serving_in_a_thread(Fake(plan=["ok", "429"])) as url:
        assert eval.main(["--model", str(TINY), "--base-url", url, "--tasks", "sums", "--items", "2"]) == 1
    assert "2 requests of sums were answered, then: HTTP 429" in capsys.readouterr().err


def test_what_http_cannot_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert eval.main(["--model", str(TINY), "--tasks", "dialogue", "--base-url", "http://x"]) == 2
    assert "leave --base-url out" in capsys.readouterr().err


def test_gsm8k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "g.jsonl"
    path.write_text(json.dumps({"question": "What is 12 + 34?", "answer": "46 it is\n#### 46"}))
    flags = ["--gsm8k", str(path), "--thinking", "--max-new-tokens", "160", "--output-file", str(tmp_path / "o.json")]
    assert eval.main([*ENGINE, *flags]) == 0
    (row,) = json.loads((tmp_path / "o.json").read_text())["results"]
    assert (row["task"], row["total"]) == ("gsm8k", 1) and (row["hits"] == 1 or row["wrong"][0]["right"] == "46")
