"""Offline use of the bundled model through `LLM` and `AsyncLLM`, checked against the model's own scores."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from thalweg.core.errors import EngineDead, InvalidRequest, UnsupportedConfig
from thalweg.core.messages import TokenDelta
from thalweg.core.plan import StepPlan
from thalweg.core.sampling import SamplingParams
from thalweg.llm import LLM, AsyncLLM

MODEL = str(Path(__file__).resolve().parents[2] / "models" / "tiny")
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a"
    " wife."
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, context_length=1024)


def test_one_and_many_prompts_as_text_and_ids(llm: LLM) -> None:
    one = llm.generate(TEXT, GREEDY)
    ids = llm.texts.ids(TEXT)
    many = llm.generate([TEXT, ids, "Shall I"], [GREEDY, GREEDY, msgspec.structs.replace(GREEDY, max_tokens=3)])
    assert one[0].outputs[0].ids == many[0].outputs[0].ids == many[1].outputs[0].ids
    assert len(many[2].outputs[0].ids) == 3 and many[2].outputs[0].finish == "length"
    assert one[0].outputs[0].text == llm.texts.tokenizer.decode(one[0].outputs[0].ids)


def test_a_seeded_request_does_not_depend_on_its_neighbours(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=24, ignore_eos=True)
    alone = llm.generate("My lord,", seeded)[0].outputs[0].ids
    crowd = llm.generate(
        ["Sir,", "My lord,", TEXT, "Alas!"], [SamplingParams(max_tokens=30), seeded, GREEDY, SamplingParams()]
    )
    assert crowd[1].outputs[0].ids == alone
    other = llm.generate("My lord,", msgspec.structs.replace(seeded, seed=12))[0].outputs[0].ids
    assert other != alone


def test_choices_of_one_request_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=12, ignore_eos=True)
    first, again = (llm.generate("My lord,", params)[0] for _ in range(2))
    texts = [choice.text for choice in first.outputs]
    assert len(set(texts)) == 3 and texts == [choice.text for choice in again.outputs]


def test_logprobs_agree_with_scores(llm: LLM) -> None:
    """What generation says of its tokens is what scoring says of the same tokens as a prompt."""
    result = llm.generate(TEXT, msgspec.structs.replace(GREEDY, logprobs=2))[0]
    choice = result.outputs[0]
    scores = llm.score([*result.prompt_ids, *choice.ids], top=2)[0]
    assert len(scores) == len(result.prompt_ids) + len(choice.ids) - 1
    for said, scored, token in zip(choice.logprobs, scores[len(result.prompt_ids) - 1 :], choice.ids, strict=True):
        assert math.isclose(said.logprob, scored.logprob, abs_tol=1e-3)
        assert said.top_ids[0] == token and math.isclose(said.top_logprobs[0], said.logprob, abs_tol=1e-6)


def test_prompt_logprobs_survive_chunks_and_prefix_hits() -> None:
    whole = LLM(MODEL, context_length=1024, disable_radix_cache=True)
    cut = LLM(MODEL, context_length=1024, chunked_prefill_size=17)
    prompt = whole.texts.ids(TEXT * 6)
    want = whole.score(prompt, top=1)[0]
    for engine_run in range(2):
        got = cut.generate(prompt, msgspec.structs.replace(GREEDY, prompt_logprobs=1, max_tokens=4))[0]
        assert len(got.prompt_logprobs) == len(prompt) - 1, engine_run
        for a, b in zip(want, got.prompt_logprobs, strict=True):
            assert math.isclose(a.logprob, b.logprob, abs_tol=1e-3)
    hit = cut.generate(prompt, GREEDY)[0]
    assert hit.cached_tokens == (len(prompt) - 1) // 64 * 64


def test_prompt_logprobs_of_a_cached_prompt() -> None:
    alone, shared = (LLM(MODEL, context_length=1024, disable_radix_cache=off) for off in (True, False))
    prompt = alone.texts.ids(TEXT * 6)
    shared.score([prompt[:-20] + prompt[:5]], top=2)
    got = shared.generate(prompt, msgspec.structs.replace(GREEDY, prompt_logprobs=1, max_tokens=4))[0]
    assert 64 <= got.cached_tokens < len(prompt) - 20
    for a, b in zip(alone.score(prompt, top=1)[0], got.prompt_logprobs, strict=True):
        assert math.isclose(a.logprob, b.logprob, abs_tol=1e-3) and a.top_ids == b.top_ids


def test_stop_strings_ids_and_minimum(llm: LLM) -> None:
    base = llm.generate(TEXT, GREEDY)[0].outputs[0]
    stop = base.text[5:8]
    cut = llm.generate(TEXT, msgspec.structs.replace(GREEDY, stop=(stop,)))[0].outputs[0]
    assert cut.text == base.text[: base.text.index(stop)] and cut.finish == "stop" and cut.stop == stop
    kept = llm.generate(TEXT, msgspec.structs.replace(GREEDY, stop=(stop,), include_stop=True))[0].outputs[0]
    assert kept.text == cut.text + stop
    few = len(cut.ids) + 2
    late = llm.generate(TEXT, msgspec.structs.replace(GREEDY, stop=(stop,), min_tokens=few))[0].outputs[0]
    assert late.text.startswith(kept.text) and len(late.ids) > few, "min_tokens holds off stop strings too"
    by_id = llm.generate(TEXT, msgspec.structs.replace(GREEDY, stop_token_ids=(base.ids[3],)))[0].outputs[0]
    assert by_id.ids == base.ids[: base.ids.index(base.ids[3]) + 1] and by_id.stop == base.ids[3]
    banned = msgspec.structs.replace(GREEDY, stop_token_ids=(base.ids[0],), min_tokens=8)
    assert len(llm.generate(TEXT, banned)[0].outputs[0].ids) >= 8


def test_sums_in_chat(llm: LLM) -> None:
    asked = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in ((12, 34), (250, 139), (77, 48))]
    answers = llm.chat(asked, SamplingParams(temperature=0.0, max_tokens=120), thinking=True)
    for result, total in zip(answers, (46, 389, 125), strict=True):
        assert result.outputs[0].text.rstrip(".").endswith(str(total)), result.outputs[0].text


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], GREEDY, "prompt"),
        ([99999], GREEDY, "prompt"),
        ([5] * 2000, GREEDY, "prompt"),
        ("x", SamplingParams(top_p=0.0), "top_p"),
        ("x", SamplingParams(temperature=-1.0), "temperature"),
        ("x", SamplingParams(min_p=float("nan")), "min_p"),
        ("x", SamplingParams(logit_bias=((99999, 1.0),)), "logit_bias"),
        ("x", SamplingParams(min_tokens=5, max_tokens=2), "min_tokens"),
        ("x", SamplingParams(logprobs=1000), "logprobs"),
        ("x", SamplingParams(n=0), "n"),
        ("x", SamplingParams(top_k=2**63), "top_k"),
        ("x", SamplingParams(min_tokens=2**70), "min_tokens"),
        ("x", SamplingParams(max_tokens=2**70), "max_tokens"),
        ("x", SamplingParams(stop=("a" * 5000,)), "stop"),
        ("x", SamplingParams(stop=tuple("abcdefgh" * 9)), "stop"),
    ],
)
def test_bad_input_names_the_field_and_other_requests_continue(
    llm: LLM, prompt: object, params: SamplingParams, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llm.generate([prompt], params)  # type: ignore[list-item]
    assert refused.value.field == field
    assert llm.generate("My lord,", GREEDY)[0].outputs[0].finish == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([1.5, 2.7, 3], {}, "prompt"),
        ([5, "6"], {}, "prompt"),
        ([5, None], {}, "prompt"),
        (TEXT, {"temperature": "0"}, "temperature"),
        (TEXT, {"max_tokens": 2.5}, "max_tokens"),
        (TEXT, {"stop_token_ids": [1.5]}, "stop_token_ids"),
        (TEXT, {"logit_bias": {5: "much"}}, "logit_bias"),
        (TEXT, {"stop": [1]}, "stop"),
    ],
)
def test_wrong_types_are_refused_before_anything_runs(
    llm: LLM, prompt: object, params: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        llm.generate([prompt], SamplingParams(**params))  # type: ignore[list-item]
    assert error.value.field == field
    assert llm.generate(TEXT, GREEDY)[0].outputs[0].finish == "length"


def test_a_single_stop_string_and_a_mapping_of_biases_are_taken(llm: LLM) -> None:
    (plain,) = llm.generate(TEXT, GREEDY)
    first, text = plain.outputs[0].ids[0], plain.outputs[0].text
    params = msgspec.structs.replace(GREEDY, stop=text[3:7])
    assert llm.generate(TEXT, params)[0].outputs[0].text == text[: text.index(text[3:7])]
    params = msgspec.structs.replace(GREEDY, logit_bias={first: -100.0})
    assert llm.generate(TEXT, params)[0].outputs[0].ids[0] != first


def test_the_largest_numbers_are_served(llm: LLM) -> None:
    most = 2**63 - 1
    params = SamplingParams(temperature=1.0, seed=3, top_k=most, max_tokens=most, min_tokens=most)
    (result,) = llm.generate([[20] * 1000], params)
    assert len(result.outputs[0].ids) == 24 and result.outputs[0].finish == "length"


def test_a_temperature_near_zero_is_greedy(llm: LLM) -> None:
    want = llm.generate("My lord,", GREEDY)[0].outputs[0].ids
    for temperature in (1e-38, 1e-42, 1e-300):
        params = msgspec.structs.replace(GREEDY, temperature=temperature, top_p=0.9, seed=1)
        assert llm.generate("My lord,", params)[0].outputs[0].ids == want


def test_logprobs_are_those_asked_for_whatever_the_neighbours_ask(llm: LLM) -> None:
    asked = (None, 0, 1, 4)
    results = llm.generate([TEXT] * 4, [msgspec.structs.replace(GREEDY, logprobs=top) for top in asked])
    for top, result in zip(asked, results, strict=True):
        choice = result.outputs[0]
        assert len(choice.logprobs) == (0 if top is None else len(choice.ids))
        assert all(len(entry.top_ids) == len(entry.top_logprobs) == top for entry in choice.logprobs)


def test_an_interrupted_call_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    long, step = msgspec.structs.replace(GREEDY, max_tokens=900), llm.engine.step
    steps = iter(range(1000))

    def interrupted() -> list[TokenDelta]:
        if next(steps) == 3:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXT, long)
        assert next(steps) == 4, "it went on after the interruption"
    assert llm.generate("My lord,", GREEDY)[0].outputs[0].finish == "length"
    assert llm.engine.idle


def test_a_step_that_fails_is_told_and_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(MODEL, context_length=256)

    def fails(plan: StepPlan, agreed: object = None) -> None:
        raise ValueError("out of memory")

    monkeypatch.setattr(llm.engine.runner, "forward", fails)
    with pytest.raises(ValueError, match="out of memory"):
        llm.generate("My lord,", GREEDY)
    with pytest.raises(EngineDead, match="make a new engine"):
        llm.generate("My lord,", GREEDY)


def test_a_wrong_setting_names_the_nearest() -> None:
    with pytest.raises(UnsupportedConfig, match="chunked_prefill_size"):
        LLM(MODEL, chunked_prefil_size=64)


def test_async_requests_share_the_engine(llm: LLM) -> None:
    async def run() -> None:
        async with AsyncLLM(MODEL, context_length=1024) as served:
            results = await asyncio.gather(*(served.generate(text, GREEDY) for text in (TEXT, "My lord,", "Alas!")))
            want = llm.generate([TEXT, "My lord,", "Alas!"], GREEDY)
            assert [r.outputs[0].ids for r in results] == [r.outputs[0].ids for r in want]
            together = await served.generate_all([TEXT, "My lord,", "Alas!"], GREEDY, progress=True)
            assert [r.outputs[0].ids for r in together] == [r.outputs[0].ids for r in want]
            pieces = [piece async for piece in served.stream("Alas!", GREEDY)]
            assert "".join(piece.text for piece in pieces) == want[2].outputs[0].text
            answer = await served.chat(
                [{"role": "user", "content": "What is 20 + 15?"}], SamplingParams(temperature=0.0), thinking=False
            )
            assert "35" in answer.outputs[0].text
            assert len(await served.score("Alas! poor Yorick")) == len(llm.texts.ids("Alas! poor Yorick")) - 1

    asyncio.run(run())
