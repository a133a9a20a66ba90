"""Draft counts in answers and in the server's metrics."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from tests.cpu.fakes import FakeFront, Piece, fake_app, serving
from tests.cpu.test_speculation import GREEDY, engine, prompts, unrecorded
from thalweg.bench.server_info import Counters, accept_length, read_counters
from thalweg.config.server import ServerOptions
from thalweg.core.acceptance import AcceptanceCounts
from thalweg.core.messages import Stats
from thalweg.core.report import AUTO, START_UP, USER, Decision, Report

assert unrecorded  # a fixture of this module, too
TOLD = AcceptanceCounts(4, 8, 5, (4, 4), (3, 2))


class Drafting(FakeFront):
    """Every choice had the same drafts."""

    async def stream(self, *args: Any, **more: Any) -> AsyncGenerator[Piece, None]:
        async for piece in super().stream(*args, **more):
            yield piece if piece.finish is None else replace(piece, drafted=TOLD)


def test_answers_report_drafts_if_asked() -> None:
    with serving(fake_app(Drafting())) as url, httpx.Client(base_url=url) as api:
        body: dict[str, Any] = {"prompt": ["abc", "de"], "max_tokens": 5, "n": 2}
        plain = api.post("/v1/completions", json=body).json()["usage"]
        assert plain["completion_tokens_details"] == {"reasoning_tokens": 0}
        usage = api.post("/v1/completions", json=body | {"return_draft_usage": True}).json()["usage"]
        told = {"accepted_prediction_tokens": 20, "rejected_prediction_tokens": 12, "spec_verify_ct": 16}
        assert usage == plain | {"completion_tokens_details": {"reasoning_tokens": 0} | told}
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "return_draft_usage": True}
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
        assert '"accepted_prediction_tokens":5' in api.post("/v1/chat/completions", json=chat).text
        native = api.post("/generate", json={"text": "abc", "sampling_params": {"max_new_tokens": 5}}).json()
    meta = {name: value for name, value in native["meta_info"].items() if name.startswith("spec_")}
    assert meta == {
        "spec_verify_ct": 4,
        "spec_draft_token_num": 8,
        "spec_accept_token_num": 5,
        "spec_accept_length": 2.25,
        "spec_accept_rate": 0.625,
        "spec_accept_histogram": [1, 1, 2],
    }


def test_without_drafts_there_is_nothing_to_tell() -> None:
    with serving(fake_app(FakeFront())) as url, httpx.Client(base_url=url) as api:
        body = {"prompt": "abc", "max_tokens": 3, "return_draft_usage": True}
        details = api.post("/v1/completions", json=body).json()["usage"]["completion_tokens_details"]
        assert set(details.values()) == {0}
        native = api.post("/generate", json={"text": "abc"}).json()
        assert not [name for name in native["meta_info"] if name.startswith("spec_")]


def test_metrics_count_the_drafts_of_all_requests() -> None:
    options = ServerOptions(metrics_names=("sglang", "vllm"))
    with serving(fake_app(Drafting(), options)) as url, httpx.Client(base_url=url) as api:
        api.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3, "n": 2}).raise_for_status()
        (state,) = api.get("/server_info").json()["internal_states"]
        page = api.get("/metrics").text
    assert (state["avg_spec_accept_length"], state["spec_accept_rate"]) == (2.2, 0.6)
    assert (state["spec_accept_rate_by_depth"], state["spec_rolled_back_tokens"]) == ([0.8, 0.4], 8)
    assert state["stats"]["steps_by_num_drafts"] == [5, 0, 10] and state["stats"]["wasted_drafts"] == 3
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]

    def values(name: str, label: str = "model_name") -> dict[str, float]:
        return {s.labels[label]: s.value for s in samples if s.name == name}

    assert values("thalweg_accepted_by_depth_total", "depth") == {"1": 8, "2": 4}
    assert values("thalweg_drafted_by_depth_total", "depth") == {"1": 10, "2": 10}
    assert values("thalweg_steps_by_num_drafts_total", "num_drafts") == {"0": 5, "1": 0, "2": 10}
    assert values("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position") == {"0": 8, "1": 4}
    one = {name: next(iter(values(name).values())) for name in (
        "thalweg_rolled_back_tokens_total", "thalweg_wasted_drafts_total", "sglang:spec_accept_length", "sglang:spec_accept_rate",
        "thalweg_accept_length_tokens_count", "thalweg_accept_length_tokens_sum",
    )}  # fmt: skip
    assert list(one.values()) == [8, 3, 2.2, 0.6, 2, 4.5]


def test_the_server_says_when_drafts_are_accepted_with_a_loss() -> None:
    front = FakeFront()
    with serving(fake_app(front)) as url, httpx.Client(base_url=url) as api:
        assert api.get("/server_info").json()["speculative_acceptance"] is None
        for rule, lossless in (("rejection-sampling", True), ("relaxed", False)):
            decision = Decision("speculative_acceptance", rule, USER, "because")
            assert front.ready is not None
            front.ready = msgspec.structs.replace(front.ready, report=Report((decision,)))
            told = api.get("/server_info").json()["speculative_acceptance"]
            assert told == {"rule": rule, "lossless": lossless, "reason": "because", "simulated": None}
        simulated = Decision("speculative_simulate_accept_length", 2.5, USER, "simulated")
        report = Report((msgspec.structs.replace(decision, value="gumbel-max"), simulated))
        front.ready = msgspec.structs.replace(front.ready, report=report)
        told = api.get("/server_info").json()["speculative_acceptance"]
        assert told == {"rule": "gumbel-max", "lossless": False, "reason": "simulated", "simulated": 2.5}


class Lost(FakeFront):
    """Its drafter has failed."""

    @property
    def stats(self) -> Stats:
        return msgspec.structs.replace(super().stats, drafter_failures=1)


def test_the_server_says_whether_anything_still_drafts() -> None:
    for front, active in ((FakeFront(), True), (Lost(), False)):
        ready = front.ready
        assert ready is not None
        report = Report(
            (
                Decision("speculative_algorithm", "NEXTN", AUTO, "why"),
                Decision("speculative_acceptance", "gumbel-max", AUTO, ""),
            )
        )
        front.ready = msgspec.structs.replace(ready, report=report)
        with serving(fake_app(front)) as url:
            told = httpx.get(f"{url}/server_info").json()
            (state,) = told["internal_states"]
            assert (state["speculative"]["drafter"], state["speculative"]["active"]) == ("NEXTN", active)
            assert (
                state["speculative"]["reason"] == "why" if active else "switched off" in state["speculative"]["reason"]
            )
            assert (told["speculative_acceptance"] is not None) == active
            report = report.append([Decision("speculative_algorithm", "NONE", START_UP, "no room for it")])
            front.ready = msgspec.structs.replace(ready, report=report)
            (state,) = httpx.get(f"{url}/server_info").json()["internal_states"]
            assert state["speculative"] == {
                "drafter": "NONE",
                "active": False,
                "reason": "no room for it",
            }


def test_the_load_generator_reads_what_its_own_load_was_given() -> None:
    """Counters between two looks, not the mean since the server's start."""
    with serving(fake_app(Drafting())) as url:
        after = read_counters(httpx.get(url + "/metrics").text)
    assert (after.totals["drafts"], after.totals["accepted"]) == (10, 12)
    before = Counters({"drafts": 6.0, "accepted": 2.0})
    assert accept_length({"internal_states": [{"avg_spec_accept_length": 9.0}]}, after.since(before)) == 1 + 10 / 4


def test_the_engine_counts_drafts_for_each_request() -> None:
    made, told = engine(3, max_steps_in_flight=2), dict[int, AcceptanceCounts | None]()
    for prompt in prompts(4):
        made.submit(prompt, GREEDY)
    while not made.idle:
        told |= {delta.uid: delta.acceptance for delta in made.step() if delta.finish}
    stats = made.loop.stats()
    ended = [one for one in told.values() if one is not None]
    assert len(ended) == 4 and stats.acceptance.accepted > 0
    for count in ("verifications", "drafted", "accepted"):
        assert sum(getattr(one, count) for one in ended) == getattr(stats.acceptance, count)
    assert stats.steps_by_num_drafts[1:3] == (0, 0) and sum(stats.steps_by_num_drafts) > 0
