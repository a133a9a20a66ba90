"""Offline use of the bundled model through `LLM` and `AsyncLLM`, checked against the model's own scores."""

from __future__ import annotations

import asyncio
import json
import math
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest

from thalweg import LLM, AsyncLLM, Grammar, RequestOutputKind, SamplingParams, StructuredOutputsParams
from thalweg.config.tree import keyword_options, options_of
from thalweg.core.errors import EngineDead, InvalidRequest, UnsupportedConfig
from thalweg.core.messages import TokenDelta
from thalweg.core.plan import StepPlan
from thalweg.llm import GenerationInterrupted
from thalweg.llm.llm import prompt_scores

MODEL = str(Path(__file__).resolve().parents[2] / "models" / "tiny")
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a"
    " wife."
)
GREEDY_LONG = SamplingParams(temperature=0.0, max_tokens=200)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, context_length=1024)


def test_one_and_many_prompts_as_text_and_ids(llm: LLM) -> None:
    one = llm.generate(TEXT, GREEDY)
    ids = llm.get_tokenizer().encode(TEXT)
    many = llm.generate([TEXT, ids, "Shall I"], [GREEDY, GREEDY, msgspec.structs.replace(GREEDY, max_tokens=3)])
    assert one[0].outputs[0].token_ids == many[0].outputs[0].token_ids == many[1].outputs[0].token_ids
    assert len(many[2].outputs[0].token_ids) == 3 and many[2].outputs[0].finish_reason == "length"
    assert one[0].outputs[0].text == llm.get_tokenizer().decode(one[0].outputs[0].token_ids)


def test_a_seeded_request_does_not_depend_on_its_neighbours(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=24, ignore_eos=True)
    alone = llm.generate("My lord,", seeded)[0].outputs[0].token_ids
    crowd = llm.generate(
        ["Sir,", "My lord,", TEXT, "Alas!"], [SamplingParams(max_tokens=30), seeded, GREEDY, SamplingParams()]
    )
    assert crowd[1].outputs[0].token_ids == alone
    other = llm.generate("My lord,", msgspec.structs.replace(seeded, seed=12))[0].outputs[0].token_ids
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
    scores = llm.score([*result.prompt_token_ids, *choice.token_ids])[0]
    assert len(scores) == len(result.prompt_token_ids) + len(choice.token_ids) - 1
    scored = scores[len(result.prompt_token_ids) - 1 :]
    assert choice.logprobs is not None and choice.cumulative_logprob == pytest.approx(sum(scored), abs=1e-2)
    for said, logprob, token in zip(choice.logprobs, scored, choice.token_ids, strict=True):
        assert math.isclose(said[token].logprob, logprob, abs_tol=1e-3)
        assert [(i, one.rank) for i, one in said.items()] == [(token, 1), (list(said)[1], 2)], "greedy: the likeliest"


def test_logprobs_name_each_token_and_its_rank(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=12, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    (result,) = llm.generate(TEXT, params)
    (choice,) = result.outputs
    prompt, decode = result.prompt_logprobs, llm.get_tokenizer().decode
    assert choice.logprobs is not None and prompt is not None and prompt[0] is None
    positions = [*zip(choice.token_ids, choice.logprobs, strict=True)]
    positions += [(i, e) for i, e in zip(result.prompt_token_ids, prompt, strict=True) if e is not None]
    for place, (token, entries) in enumerate(positions):
        top = 3 if place < len(choice.token_ids) else 2
        assert list(entries)[0] == token and len(entries) == top + (entries[token].rank is None)
        ranked = sorted((one.rank, -one.logprob) for one in entries.values() if one.rank is not None)
        assert [rank for rank, _ in ranked] == [*range(1, top + 1)]
        assert [value for _, value in ranked] == sorted(value for _, value in ranked)
        if entries[token].rank is None:
            assert -entries[token].logprob >= ranked[-1][1]
        assert all(one.decoded_token == decode([i], skip_special_tokens=False) for i, one in entries.items())
    plain = llm.generate(TEXT, GREEDY)[0]
    assert plain.prompt_logprobs is None and plain.outputs[0].logprobs is plain.outputs[0].cumulative_logprob is None


def test_prompt_logprobs_survive_chunks_and_prefix_hits() -> None:
    whole = LLM(MODEL, context_length=1024, disable_radix_cache=True)
    cut = LLM(MODEL, context_length=1024, chunked_prefill_size=17)
    prompt = whole.get_tokenizer().encode(TEXT * 6)
    want = whole.score(prompt)[0]
    for engine_run in range(2):
        got = cut.generate(prompt, msgspec.structs.replace(GREEDY, prompt_logprobs=1, max_tokens=4))[0]
        assert len(prompt_scores(got)) == len(prompt) - 1, engine_run
        assert prompt_scores(got) == pytest.approx(want, abs=1e-3)
    hit = cut.generate(prompt, GREEDY)[0]
    assert hit.num_cached_tokens == (len(prompt) - 1) // 64 * 64


def test_prompt_logprobs_of_a_cached_prompt() -> None:
    alone, shared = (LLM(MODEL, context_length=1024, disable_radix_cache=off) for off in (True, False))
    prompt = alone.get_tokenizer().encode(TEXT * 6)
    scored = msgspec.structs.replace(GREEDY, prompt_logprobs=1, max_tokens=4)
    shared.generate([prompt[:-20] + prompt[:5]], msgspec.structs.replace(scored, prompt_logprobs=2))
    got, want = shared.generate(prompt, scored)[0], alone.generate(prompt, scored)[0]
    assert 64 <= got.num_cached_tokens < len(prompt) - 20
    assert prompt_scores(got) == pytest.approx(prompt_scores(want), abs=1e-3)
    assert got.prompt_logprobs is not None and want.prompt_logprobs is not None
    assert [list(each or ()) for each in got.prompt_logprobs] == [list(each or ()) for each in want.prompt_logprobs]


def test_stop_strings_ids_and_minimum(llm: LLM) -> None:
    base = llm.generate(TEXT, GREEDY)[0].outputs[0]
    stop = base.text[5:8]
    cut = llm.generate(TEXT, msgspec.structs.replace(GREEDY, stop=(stop,)))[0].outputs[0]
    assert cut.text == base.text[: base.text.index(stop)] and cut.finish_reason == "stop" and cut.stop_reason == stop
    kept = llm.generate(TEXT, msgspec.structs.replace(GREEDY, stop=(stop,), include_stop_str_in_output=True))[
        0
    ].outputs[0]
    assert kept.text == cut.text + stop
    few = len(cut.token_ids) + 2
    late = llm.generate(TEXT, msgspec.structs.replace(GREEDY, stop=(stop,), min_tokens=few))[0].outputs[0]
    assert late.text.startswith(kept.text) and len(late.token_ids) > few, "min_tokens holds off stop strings too"
    by_id = llm.generate(TEXT, msgspec.structs.replace(GREEDY, stop_token_ids=(base.token_ids[3],)))[0].outputs[0]
    assert (
        by_id.token_ids == base.token_ids[: base.token_ids.index(base.token_ids[3]) + 1]
        and by_id.stop_reason == base.token_ids[3]
    )
    banned = msgspec.structs.replace(GREEDY, stop_token_ids=(base.token_ids[0],), min_tokens=8)
    assert len(llm.generate(TEXT, banned)[0].outputs[0].token_ids) >= 8


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
    assert llm.generate("My lord,", GREEDY)[0].outputs[0].finish_reason == "length"


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
    assert llm.generate(TEXT, GREEDY)[0].outputs[0].finish_reason == "length"


def test_a_single_stop_string_and_a_mapping_of_biases_are_taken(llm: LLM) -> None:
    (plain,) = llm.generate(TEXT, GREEDY)
    first, text = plain.outputs[0].token_ids[0], plain.outputs[0].text
    params = msgspec.structs.replace(GREEDY, stop=text[3:7])
    assert llm.generate(TEXT, params)[0].outputs[0].text == text[: text.index(text[3:7])]
    params = msgspec.structs.replace(GREEDY, logit_bias={first: -100.0})
    assert llm.generate(TEXT, params)[0].outputs[0].token_ids[0] != first


def test_the_largest_numbers_are_served(llm: LLM) -> None:
    most = 2**63 - 1
    params = SamplingParams(temperature=1.0, seed=3, top_k=most, max_tokens=most, min_tokens=most)
    (result,) = llm.generate([[20] * 1000], params)
    assert len(result.outputs[0].token_ids) == 24 and result.outputs[0].finish_reason == "length"


def test_a_temperature_near_zero_is_greedy(llm: LLM) -> None:
    want = llm.generate("My lord,", GREEDY)[0].outputs[0].token_ids
    for temperature in (1e-38, 1e-42, 1e-300):
        params = msgspec.structs.replace(GREEDY, temperature=temperature, top_p=0.9, seed=1)
        assert llm.generate("My lord,", params)[0].outputs[0].token_ids == want


def test_logprobs_are_those_asked_for_whatever_the_neighbours_ask(llm: LLM) -> None:
    asked = (None, 0, 1, 4)
    results = llm.generate([TEXT] * 4, [msgspec.structs.replace(GREEDY, logprobs=top) for top in asked])
    for top, result in zip(asked, results, strict=True):
        choice = result.outputs[0]
        assert (choice.logprobs is None) == (top is None)
        assert [len(entry) for entry in choice.logprobs or ()] == [max(top or 0, 1)] * (16 if top is not None else 0)


@pytest.mark.parametrize("drafts", [{}, {"speculative_algorithm": "NEXTN", "speculative_num_draft_tokens": 3}])
def test_listed_tokens_have_the_log_probabilities_that_a_prompt_gives_them(drafts: dict[str, Any]) -> None:
    """Whatever bias and penalties this request and its neighbours have: they are the model's own."""
    listed, ids = (7, 1999, 300, 7), LLM(MODEL).get_tokenizer().encode(TEXT)
    asked = [
        SamplingParams(logprob_token_ids=listed, seed=5, max_tokens=6, ignore_eos=True, logit_bias={7: -50}),
        SamplingParams(logprobs=2, max_tokens=6, ignore_eos=True, temperature=0.0),
        SamplingParams(logprob_token_ids=(11,), max_tokens=6, ignore_eos=True, repetition_penalty=1.5),
        SamplingParams(max_tokens=6, ignore_eos=True),
    ]
    with LLM(MODEL, context_length=1024, max_running_requests=4, **drafts) as llm:
        results = [result.outputs[0] for result in llm.generate([ids] * 4, asked)]
        for choice, params in zip(results, asked, strict=True):
            if params.logprobs is None:
                assert choice.logprobs is None
                continue
            assert choice.logprobs is not None and len(choice.logprobs) == 6
            wanted = {*params.logprob_token_ids}
            for i, entry in enumerate(choice.logprobs):
                assert set(entry) == wanted | {choice.token_ids[i]} if wanted else len(entry) in (2, 3)
                assert not wanted or all(said.rank is None for said in entry.values()), "their order is the request's"
                for token in wanted:
                    (other,) = llm.generate(
                        [[*ids, *choice.token_ids[:i], token]], SamplingParams(max_tokens=0, prompt_logprobs=0)
                    )
                    assert other.prompt_logprobs is not None and other.prompt_logprobs[-1] is not None
                    assert entry[token].logprob == pytest.approx(other.prompt_logprobs[-1][token].logprob, abs=1e-3)
        again = llm.generate([ids] * 4, [msgspec.structs.replace(GREEDY, logprobs=1, max_tokens=2)] * 4)
        assert all(len(entry) == 1 for result in again for entry in result.outputs[0].logprobs or [{}])
    for wrong in ((2048,), (-1,), tuple(range(129))):
        with pytest.raises(InvalidRequest, match="logprob_token_ids"), LLM(MODEL, context_length=512) as llm:
            llm.generate("x", SamplingParams(logprob_token_ids=wrong))


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
    assert llm.generate("My lord,", GREEDY)[0].outputs[0].finish_reason == "length"
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
    texts = [TEXT, "My lord,", "Alas!"]
    want = llm.generate(texts, GREEDY)

    async def streams(served: AsyncLLM) -> None:
        results = await asyncio.gather(*(served.generate(text, GREEDY) for text in texts))
        assert [r.outputs for r in results] == [r.outputs for r in want]
        (last,) = want[2].outputs
        outputs = [output async for output in served.generate("Alas!", GREEDY, "mine")]
        assert len(outputs) > 2 and outputs[-1].outputs == [last] and {o.request_id for o in outputs} == {"mine"}
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for output in outputs:
            assert last.text.startswith(output.outputs[0].text)
            assert output.outputs[0].token_ids == last.token_ids[: len(output.outputs[0].token_ids)]
        news = msgspec.structs.replace(GREEDY, output_kind=RequestOutputKind.DELTA, logprobs=0)
        parts = [output.outputs[0] async for output in served.generate("Alas!", news)]
        assert "".join(part.text for part in parts) == last.text
        assert sum((part.token_ids for part in parts), []) == last.token_ids
        assert [len(part.logprobs or ()) for part in parts] == [len(part.token_ids) for part in parts]
        final = msgspec.structs.replace(GREEDY, output_kind=RequestOutputKind.FINAL_ONLY)
        assert [output.outputs async for output in served.generate({"prompt": "Alas!"}, final)] == [[last]]
        asked = [{"role": "user", "content": "What is 20 + 15?"}]
        answer = await served.chat(asked, {"temperature": 0}, chat_template_kwargs={"thinking": False})
        assert "35" in answer.outputs[0].text
        assert await served.score(TEXT) == pytest.approx(llm.score(TEXT)[0], abs=1e-3)

    async def aborts(served: AsyncLLM) -> None:
        long = msgspec.structs.replace(GREEDY, max_tokens=900)
        async for output in served.generate("Alas!", long):
            assert not output.finished
            break
        stream = served.generate("Alas!", long)
        await anext(stream)
        await stream.aclose()
        task = asyncio.ensure_future(served.generate("Alas!", long, "gone"))
        while not served.front.running:
            await asyncio.sleep(0.01)
        await served.abort(["gone", "unknown"])
        aborted = await asyncio.wait_for(task, 10)
        assert aborted.finished and aborted.outputs[0].finish_reason == "abort"
        cancelled = asyncio.ensure_future(served.generate("Alas!", long))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        while served.front.running:
            await asyncio.sleep(0.01)
        with pytest.raises(InvalidRequest, match=r"did you mean temperature\?"):
            await served.generate("x", {"temprature": 1})
        with pytest.raises(InvalidRequest, match="top_p"):
            async for _ in served.generate("x", SamplingParams(top_p=2)):
                pass

    async def run() -> None:
        served = AsyncLLM(MODEL, max_model_len=1024)  # starts with the first request
        await streams(served)
        await aborts(served)
        await served.shutdown()
        with pytest.raises(EngineDead):
            await served.generate("x")

    asyncio.run(run())


PROMPTS = ["Hello, my name is", "The capital of France is", "My lord,"]


def test_prompts_in_every_form(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("My lord,")
    forms: list[Any] = ["My lord,", ids, tuple(ids), numpy.array(ids), {"prompt": "My lord,"}]
    forms += [{"prompt_token_ids": ids}, {"prompt_token_ids": ids, "prompt": None}]
    alone = [llm.generate(form, GREEDY)[0] for form in forms]
    together = llm.generate(forms, GREEDY)
    assert {tuple(r.outputs[0].token_ids) for r in alone + together} == {tuple(alone[0].outputs[0].token_ids)}
    assert all(r.prompt_token_ids == ids for r in alone + together)
    assert [r.prompt for r in together] == ["My lord,", None, None, None, "My lord,", None, None]
    assert len({r.request_id for r in alone + together}) == 14
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        ({"prompts": "x"}, "prompt.prompts"),
        ({"prompt": "x", "multi_modal_data": {}}, "prompt.multi_modal_data"),
        ({}, "prompt"),
        ({"prompt": [5]}, "prompt.prompt"),
        ({"prompt_token_ids": "x"}, "prompt.prompt_token_ids"),
        ({"prompt_token_ids": [999999]}, "prompt"),
        (["x", {"prompt_token_ids": [1.5]}], "prompts[1].prompt_token_ids"),
        (["x", [5] * 2000], "prompts[1]"),
        ([1.5], "prompt"),
        ([None, "x"], "prompts[0]"),
    ],
)
def test_a_wrong_prompt_is_named(llm: LLM, prompts: Any, field: str) -> None:
    with pytest.raises(ValueError) as refused:
        llm.generate(prompts, GREEDY)
    assert isinstance(refused.value, InvalidRequest) and refused.value.field == field


def test_one_salt_does_not_find_the_pages_of_another(llm: LLM) -> None:
    text = "Salted: " + TEXT * 3
    hits = [llm.generate({"prompt": text, "cache_salt": salt}, GREEDY)[0].num_cached_tokens for salt in "aab"]
    assert hits[0] == hits[2] == 0 < hits[1]


def test_parameters_in_sglangs_dictionaries(llm: LLM) -> None:
    base = llm.generate(TEXT, GREEDY)[0].outputs[0]
    named = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    one, two = llm.generate([TEXT] * 2, [named, named | {"stop": base.text[5:8], "no_stop_trim": True}])
    assert one.outputs[0].token_ids == base.token_ids
    assert two.outputs[0].text == base.text[: base.text.index(base.text[5:8]) + 3]
    assert len(llm.generate(TEXT, {"ignore_eos": True})[0].outputs[0].token_ids) == 128, "SGLang's default"
    (choice,) = llm.generate("Say: ", {"regex": "aye|nay", "max_new_tokens": 20})[0].outputs
    assert choice.text in ("aye", "nay")
    for wrong, message in (
        ({"max_new_token": 1}, r"sampling_params\.max_new_token: .*did you mean max_new_tokens\?"),
        ({"max_tokens": 1}, r"sampling_params\.max_tokens: .*did you mean"),
        ({"max_new_tokens": "5"}, r"sampling_params\.max_new_tokens: must be an integer, got a text"),
        ({"regex": "a", "ebnf": "b"}, r"sampling_params\.ebnf: asks for a second structure"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            llm.generate(TEXT, wrong)


def test_a_wrong_name_of_a_parameter_suggests_the_right_one() -> None:
    for wrong, right in (("temprature", "temperature"), ("max_new_tokens", "max_tokens"), ("topk", "top_k")):
        with pytest.raises(TypeError, match=f"no parameter '{wrong}'; did you mean {right}"):
            SamplingParams(**{wrong: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="there is temperature, top_k"):
        SamplingParams(beams=["x"])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no parameter 'bad_words'; use logit_bias"):
        SamplingParams(bad_words=["x"])  # type: ignore[call-arg]
    harmless = {"bad_words": [], "detokenize": True, "best_of": 1, "logits_processors": None}
    assert SamplingParams(max_tokens=3, **harmless) == SamplingParams(max_tokens=3)  # type: ignore[arg-type]


def test_parameters_can_be_changed_and_copied(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.temperature, params.max_tokens, params.stop = 0.0, 3, "zz"  # type: ignore[assignment]
    longer = params.clone()
    longer.max_tokens = 5
    with pytest.raises(AttributeError):
        params.max_token = 9  # type: ignore[attr-defined]
    assert params.stop == ("zz",) and llm.get_default_sampling_params().max_tokens is None
    several = AsyncLLM(MODEL, context_length=256)
    several.get_default_sampling_params().max_tokens = 3
    assert several.get_default_sampling_params().max_tokens is None
    outputs = [result.outputs[0] for result in llm.generate([TEXT] * 2, [params, longer])]
    assert [len(output.token_ids) for output in outputs] == [3, 5]


def test_the_tokenizer_has_transformers_methods(llm: LLM) -> None:
    tokenizer, asked = llm.get_tokenizer(), [{"role": "user", "content": "What is 12 + 34?"}]
    ids = tokenizer("My lord,")["input_ids"]
    assert ids == tokenizer.encode("My lord,") and tokenizer(["My lord,"])["input_ids"] == [ids]
    assert tokenizer.decode(ids[1:]) == "My lord," and tokenizer.batch_decode([ids], True) == ["My lord,"]
    assert tokenizer.eos_token_id in tokenizer.eos_ids and ids[0] == tokenizer.bos_token_id
    for thinking in (False, True):
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, thinking=thinking)
        answer = llm.chat(asked, GREEDY, thinking=thinking)[0]
        assert answer.prompt == text and answer.prompt_token_ids == tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, thinking=thinking
        )
    with pytest.raises(InvalidRequest, match="return_tensors: is not supported"):
        tokenizer.apply_chat_template(asked, return_tensors="pt")


def test_an_effort_turns_thinking_on_and_none_off(llm: LLM) -> None:
    asked = [{"role": "user", "content": "What is 12 + 34?"}]
    for arguments, thinks in (
        ({"reasoning_effort": "high"}, True),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, True),
        ({"reasoning_effort": "none", "thinking": True}, False),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, False),
        ({}, False),
    ):
        prompt = llm.chat(asked, GREEDY, **arguments)[0].prompt or ""  # type: ignore[arg-type]
        assert prompt.endswith("<think>") == thinks, arguments


def test_prompts_of_a_wrong_type_are_refused(llm: LLM) -> None:
    wrong: Any
    for wrong in (None, 5, b"abc"):
        with pytest.raises(InvalidRequest, match=r"prompts: must be a text, .* got (NoneType|int|bytes)"):
            llm.generate(wrong)
    with pytest.raises(InvalidRequest, match="messages: must be a list of messages"):
        llm.chat(None)  # type: ignore[arg-type]
    assert llm.generate({"prompt": TEXT, "multi_modal_data": None}, GREEDY)  # type: ignore[arg-type]


def test_the_prefix_cache_is_emptied(llm: LLM) -> None:
    prompt = TEXT * 8
    cached = [llm.generate(prompt, GREEDY)[0].num_cached_tokens for _ in range(2)][1]
    assert llm.reset_prefix_cache() and cached and not llm.generate(prompt, GREEDY)[0].num_cached_tokens


def test_without_a_model_it_is_the_bundled_one() -> None:
    with LLM(context_length=256) as bundled:
        assert bundled.get_tokenizer().vocab_size == 2048


def test_structures_in_the_parameters(llm: LLM) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"mood": {"enum": ["merry", "sad"]}},
        "required": ["mood"],
    }
    schema["additionalProperties"] = False
    shapes: list[dict[str, Any]] = [{"json": schema}, {"json": json.dumps(schema)}, {"choice": ["yes", "no"]}]
    shapes += [{"regex": "[ab]{3}"}, {"grammar": 'root ::= "x" | "y"'}]
    params = [
        SamplingParams(max_tokens=60, structured_outputs=StructuredOutputsParams(**shape), seed=1) for shape in shapes
    ]
    texts = [result.outputs[0].text for result in llm.generate(["Well: "] * 5, params)]
    assert all(json.loads(text)["mood"] in ("merry", "sad") for text in texts[:2])
    assert texts[2] in ("yes", "no") and re.fullmatch("[ab]{3}", texts[3]) and texts[4] in "xy"
    both = StructuredOutputsParams(regex="a", choice=["b"])
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.choice: asks for a second structure"):
        llm.generate("x", SamplingParams(structured_outputs=both))
    with pytest.raises(InvalidRequest, match="second structure beside grammar"):
        llm.generate("x", params[2], grammar=Grammar("regex", "a"))
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.regex"):
        llm.generate(["x", "y"], [GREEDY, SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a"))])


def test_a_structure_in_a_chat_holds_after_the_thought(llm: LLM) -> None:
    shape = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 999}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    params = SamplingParams(temperature=0.0, max_tokens=200, structured_outputs=StructuredOutputsParams(json=shape))
    asked = [{"role": "user", "content": "What is 12 + 34?"}]
    for thinking in (True, False):
        (result,) = llm.chat(asked, params, chat_template_kwargs={"thinking": thinking})
        thought, _, answer = result.outputs[0].text.rpartition("</think>")
        assert isinstance(json.loads(answer)["sum"], int) and bool(thought) == thinking
        assert result.prompt is not None and "12 + 34" in result.prompt


def test_a_thought_is_limited(llm: LLM) -> None:
    asked = [{"role": "user", "content": "What is 12 + 34?"}]
    whole = llm.chat(asked, GREEDY_LONG, thinking=True)[0].outputs[0]
    limits = [SamplingParams(temperature=0.0, max_tokens=200, thinking_token_budget=budget) for budget in (5, -1, 0)]
    cut, same, none = (result.outputs[0] for result in llm.chat([asked] * 3, limits, thinking=True))
    end = llm.get_tokenizer().convert_tokens_to_ids("</think>")
    assert end is not None
    assert whole.token_ids.index(end) > 5 and same.token_ids == whole.token_ids
    assert cut.token_ids.index(end) == 5 and cut.token_ids[:5] == whole.token_ids[:5]
    assert none.token_ids[0] == end
    shape = StructuredOutputsParams(regex="[0-9]{2}")
    both = SamplingParams(temperature=0.0, max_tokens=200, thinking_token_budget=5, structured_outputs=shape)
    assert re.fullmatch(r".*</think>[0-9]{2}", llm.chat(asked, both, thinking=True)[0].outputs[0].text, re.DOTALL)
    (prompt,) = llm.generate("Well<think>", limits[0])
    assert prompt.outputs[0].token_ids.index(end) <= 5
    with pytest.raises(InvalidRequest, match="thinking_token_budget: must be"):
        llm.chat(asked, SamplingParams(thinking_token_budget=-2))


def test_calls_are_of_the_tools_that_a_chat_offers(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias makes the model begin a call, whatever it would rather do."""
    shape = {"type": "object", "properties": {"kind": {"enum": ["x7", "y8"]}}, "required": ["kind"]}
    tools = [{"type": "function", "function": {"name": "zab.qu", "parameters": shape}}]
    begins = SamplingParams(
        temperature=1.0, max_tokens=300, logit_bias={llm.get_tokenizer().encode("｜DSML｜")[-1]: 60}
    )
    asked = [[{"role": "user", "content": "Sing of the sea, and do it well."}]] * 4
    seeds = [msgspec.structs.replace(begins, seed=seed) for seed in range(4)]
    texts = [result.outputs[0].text for result in llm.chat(asked, seeds, tools=tools)]
    names = [name for text in texts for name in re.findall(r'invoke name="([^"]*)"', text)]
    assert names and set(names) == {"zab.qu"}
    kinds = [kind for text in texts for kind in re.findall(r'name="kind" string="true">([^<]*)<', text)]
    assert kinds and set(kinds) <= {"x7", "y8"}
    monkeypatch.setattr(llm.texts, "masks_calls", False)
    free = [result.outputs[0].text for result in llm.chat(asked, seeds, tools=tools)]
    assert free != texts


def test_default_parameters_are_the_models(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    few = SamplingParams(temperature=0.0, max_tokens=9)
    assert llm.get_default_sampling_params() == llm.texts.resolved.sampling
    monkeypatch.setattr(llm.texts, "resolved", replace(llm.texts.resolved, sampling=GREEDY))
    assert llm.generate(TEXT)[0].outputs == llm.generate(TEXT, GREEDY)[0].outputs
    assert llm.generate(TEXT, {"max_new_tokens": 9})[0].outputs[0].text == llm.generate(TEXT, few)[0].outputs[0].text


def test_lists_have_one_entry_for_each_prompt(llm: LLM) -> None:
    """As vLLM's own tests of `LLM.generate` have it."""
    each = [SamplingParams(temperature=t, top_p=0.95, max_tokens=4) for t in (0.01, 0.3, 0.99)]
    assert len(llm.generate(PROMPTS, sampling_params=each)) == 3
    assert len(llm.generate(PROMPTS, sampling_params=each[0], priority=[0, 1, 2])) == 3
    for wrong in ({"sampling_params": each[:2]}, {"priority": [0, 0]}, {"priority": []}, {"priority": [2**40] * 3}):
        with pytest.raises(ValueError, match="sampling_params|priority"):
            llm.generate(PROMPTS, **({"sampling_params": each} | wrong))  # type: ignore[arg-type]


def test_a_wrong_conversation_leaves_nothing_in_the_queue(llm: LLM) -> None:
    good, bad = [{"role": "user", "content": "Hello"}], [{"role": "user", "content": "very long " * 900}]
    with pytest.raises(ValueError, match=r"prompts\[2\]: .* \d+ tokens of prompt"):
        llm.chat([good, good, bad], GREEDY)
    assert llm.engine.idle
    assert [r.finished for r in llm.chat([good, good], GREEDY)] == [True, True]


def test_flags_as_other_engines_spell_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "thalweg.config"):
        options = keyword_options(
            model_path=MODEL,
            tensor_parallel_size=2,
            max_model_len=256,
            max_num_seqs=3,
            enforce_eager=True,
            trust_remote_code=True,
            quantization=None,
            enable_lora=False,
            swap_space=0,
        )
    assert "trust-remote-code changes nothing" in caplog.text
    assert options == options_of(
        model=MODEL, tp_size=2, context_length=256, max_running_requests=3, cuda_graph_mode="none"
    )
    with pytest.raises(UnsupportedConfig, match="enable_lora: .*not in this version"):
        LLM(MODEL, enable_lora=True)


def test_shutdown_ends_the_engine() -> None:
    with LLM(MODEL, context_length=256) as short:
        assert short.generate("My lord,", GREEDY)[0].finished
    with pytest.raises(EngineDead, match="make a new LLM"):
        short.generate("My lord,", GREEDY)


def test_ctrl_c_keeps_results_and_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal in the middle of a step waits for its end."""
    long, forward, steps = msgspec.structs.replace(GREEDY, max_tokens=900), llm.engine.loop.step, iter(range(1000))

    def pressed() -> None:
        if next(steps) == 30:
            signal.raise_signal(signal.SIGINT)
        forward()

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as raised:
        patched.setattr(llm.engine.loop, "step", pressed)
        llm.generate([TEXT, "My lord,"], [GREEDY, long])
    assert isinstance(raised.value, GenerationInterrupted) and str(raised.value).startswith("1 of 2 prompts were done")
    done, cut = (output.outputs[0] for output in raised.value.outputs)
    assert done == llm.generate(TEXT, GREEDY)[0].outputs[0]
    assert cut.finish_reason == "abort" and 10 < len(cut.token_ids) < 40
    assert signal.getsignal(signal.SIGINT) is before and llm.engine.idle


def test_progress_is_shown_on_a_terminal_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(PROMPTS, GREEDY)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "140")
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(PROMPTS, GREEDY)
    out, err = capsys.readouterr()
    shown = re.sub(r"\x1b\[[0-9;?]*\w", "", err)
    assert "3/3" in shown and re.search(r"it/s, input [\d,]+ tok/s, output [\d,]+ tok/s", shown) and not out


def test_importing_the_package_is_light() -> None:
    script = (
        "import sys, thalweg; from thalweg import SamplingParams, StructuredOutputsParams; SamplingParams(stop='x');"
        "assert not {'torch', 'numpy', 'zmq'} & set(sys.modules); assert set(thalweg.__all__) <= set(dir(thalweg));"
        "[getattr(thalweg, name) for name in thalweg.__all__]"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(ImportError, match="Nothing"):
        exec("from thalweg import Nothing")
