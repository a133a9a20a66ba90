"""Structured output on the bundled model: samples at temperature 1 are valid, and other requests are not affected."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.sampling import SamplingParams, StructuredOutputsParams
from thalweg.llm import LLM, AsyncLLM, CompletionOutput
from thalweg.text.grammar import GrammarCompiler
from thalweg.text.parser import TOOL_FORMATS
from thalweg.text.tool_grammar import ToolGrammarSpec, tool_grammar
from tools.fuzz_checks import parse

MODEL = str(Path(__file__).resolve().parents[2] / "models" / "tiny")
HOT = SamplingParams(temperature=1.0, max_tokens=600, skip_special_tokens=False)
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
FREE_ASK = SamplingParams(temperature=1.0, seed=11, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "overlap"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM(MODEL, context_length=1024, enable_overlap_schedule=request.param, chunked_prefill_size=64)


def schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A random schema whose values are all short, so that a model that means nothing comes to an end."""
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(0, 900)},
        lambda: {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 8)},
        lambda: {"type": "string", "pattern": rng.choice(("^[a-f]{2,5}$", "^(ab|cd)+x$", "^[0-9]{3}-[0-9]{2}$"))},
        lambda: {"enum": rng.sample([1, "two", None, True, "vier", 5.5], rng.randint(1, 5))},
        lambda: {"const": rng.choice(["fixed", 7, False])},
        lambda: {"type": "boolean"},
        lambda: {"type": ["null", "boolean"]},
        lambda: {"type": "string", "format": rng.choice(("date", "time", "ipv4", "uuid"))},
    ]
    if depth:
        kinds += [
            lambda: members(rng, depth - 1),
            lambda: {"type": "array", "items": schema(rng, depth - 1), "minItems": rng.randint(0, 1), "maxItems": 2},
            lambda: {"anyOf": [schema(rng, depth - 1) for _ in range(2)]},
        ]
    return rng.choice(kinds)()


def members(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", "name", "größe", "x y", "list", 'qu"ote'], rng.randint(0, 3))
    required = [name for name in names if rng.random() < 0.6]
    properties = {name: schema(rng, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def valid(text: str, wanted: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(wanted).validate(json.loads(text))


def test_random_schemas_give_valid_output_and_do_not_affect_other_requests(llm: LLM) -> None:
    rng = random.Random(3)
    alone = llm.generate("My lord,", FREE_ASK)[0].outputs[0].token_ids
    wanted = [members(rng, 3) if i % 2 else schema(rng) for i in range(40)]
    prompts, params, grammars = [], [], []
    for i, one in enumerate(wanted):
        prompts += [f"Give me {i}: "] + ["My lord,"] * (i % 5 == 0)
        params += [msgspec.structs.replace(HOT, seed=i)] + [FREE_ASK] * (i % 5 == 0)
        grammars += [Grammar("json_schema", json.dumps(one))] + [NO_GRAMMAR] * (i % 5 == 0)
    ended = 0
    results = iter(llm.generate(prompts, params, grammar=grammars))
    for i, one in enumerate(wanted):
        output = next(results).outputs[0]
        if output.finish_reason == "stop":  # numbers with a fraction and time zones may go on for long
            valid(output.text.removesuffix("<｜end▁of▁sentence｜>"), one)
            ended += 1
        if i % 5 == 0:
            assert next(results).outputs[0].token_ids == alone
    assert ended >= 38


def test_a_result_names_what_is_not_enforced(llm: LLM) -> None:
    source = json.dumps({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True})
    free, loose = llm.generate(["My lord,"] * 2, HOT, grammar=[NO_GRAMMAR, Grammar("json_schema", source)])
    assert free.warnings == () and [w.partition(" ")[0] for w in loose.warnings] == ["grammar#/uniqueItems"]
    with pytest.raises(InvalidRequest, match="#/uniqueItems"):
        llm.generate("My lord,", HOT, grammar=Grammar("json_schema", source, strict=True))


def test_overlap_gives_the_same_tokens() -> None:
    grammar = Grammar("json_schema", json.dumps(members(random.Random(5), 3)))
    params = [msgspec.structs.replace(HOT, seed=seed, max_tokens=80, frequency_penalty=0.3) for seed in range(6)]
    outputs = []
    for overlap in (False, True):
        llm = LLM(MODEL, context_length=512, enable_overlap_schedule=overlap)
        outputs.append([r.outputs[0].token_ids for r in llm.generate(["My lord,"] * 6, params, grammar=grammar)])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("grammar", "accepts"),
    [
        (Grammar("regex", r"[a-f]{3,9}-\d{1,3}x"), re.compile(r"[a-f]{3,9}-\d{1,3}x").fullmatch),
        (Grammar("regex", "(((a+)+)+|b){1,40}c"), re.compile("[ab]+c").fullmatch),
        (Grammar("choice", '["yes", "n\\"o", "schön", "a b\\n"]'), ["yes", 'n"o', "schön", "a b\n"].__contains__),
        (
            Grammar("ebnf", 'root ::= "a" [0-9]+ (" " item)*\nitem ::= "x" | "y"'),
            re.compile(r"a[0-9]+( [xy])*").fullmatch,
        ),
        (
            Grammar("lark", 'start: WORD ("," WORD)?\nWORD: /[a-c]{1,3}/'),
            re.compile(r"[a-c]{1,3}(,[a-c]{1,3})?").fullmatch,
        ),
        (
            Grammar("json_schema", json.dumps({"type": "array", "items": DIGIT, "maxItems": 3})),
            lambda text: all(0 <= value <= 9 for value in json.loads(text)),
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)  # fmt: skip
def test_every_kind(llm: LLM, grammar: Grammar, accepts: Callable[[str], object]) -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=400) for seed in range(6)]
    outputs = [r.outputs[0] for r in llm.generate(["Well, "] * 6, params, grammar=grammar)]
    ended = [output for output in outputs if output.finish_reason == "stop"]
    assert len(ended) >= 3
    for output in ended:
        assert accepts(output.text), output.text


def test_choices_of_one_request_logprobs_penalties_and_minimum_length(llm: LLM) -> None:
    grammar = Grammar("choice", '["yes", "no"]')
    params = SamplingParams(
        temperature=1.0, seed=1, n=4, logprobs=3, min_tokens=12, repetition_penalty=1.3, logit_bias=((300, 90.0),)
    )
    for output in llm.generate("Will you? ", params, grammar=grammar)[0].outputs:
        assert output.text in ("yes", "no") and output.finish_reason == "stop"
        assert len(output.logprobs) == len(output.token_ids)
        assert all(3 <= len(entry) <= 4 for entry in output.logprobs), "log-probabilities are the model's own"


def test_a_grammar_survives_preemption() -> None:
    grammar = Grammar(
        "json_schema", json.dumps({"type": "array", "items": {"enum": ["aye", "nay"]}, "minItems": 60, "maxItems": 70})
    )
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=300) for seed in range(8)]
    ample = LLM(MODEL, context_length=400)
    scarce = LLM(MODEL, context_length=400, max_total_tokens=512, enable_overlap_schedule=True)
    want, got = (
        [r.outputs[0] for r in llm.generate(["Say: "] * 8, params, grammar=grammar)] for llm in (ample, scarce)
    )
    assert scarce.engine.loop.stats().preemptions > 0
    assert all(60 <= len(json.loads(output.text)) <= 70 for output in got)
    assert [output.token_ids for output in got] == [output.token_ids for output in want]


TOOLS = [
    {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 10},
                "unit": {"enum": ["C", "F"]},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
                "where": {"$ref": "#/$defs/point"},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {
                "point": {
                    "type": "object",
                    "properties": {"x": {"type": "boolean"}},
                    "required": ["x"],
                    "additionalProperties": False,
                }
            },
        },
    },
    {"name": "stop_all"},
    {
        "name": "either",
        "parameters": {
            "anyOf": [
                {"properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False},
                {"properties": {"off": {"enum": ["a<b", "c"]}}, "required": ["off"], "additionalProperties": False},
            ]
        },
    },
]  # fmt: skip


@pytest.mark.parametrize("form", TOOL_FORMATS)
@pytest.mark.parametrize("single", [True, False], ids=["one call", "calls"])
def test_a_forced_call_is_valid_in_every_format(llm: LLM, form: str, single: bool) -> None:
    grammar = tool_grammar(form, ToolGrammarSpec(TOOLS, True, single, llm.texts.tokenizer.mark_id))
    params = [msgspec.structs.replace(HOT, temperature=3.0, seed=seed, max_tokens=200) for seed in range(12)]
    schemas = {tool["name"]: tool.get("parameters", {"maxProperties": 0}) for tool in TOOLS}
    seen: set[str] = set()
    for result in llm.generate(["My lord, "] * 12, params, grammar=grammar):
        output = result.outputs[0]
        parsed = parse(output.text.removesuffix("<｜end▁of▁sentence｜>"), None, form, functions=TOOLS)
        if output.finish_reason == "stop":
            assert parsed.content is None and parsed.calls and (len(parsed.calls) == 1 or not single)
        else:
            assert not single, "a model that means nothing may call for ever, but not within one call"
        for call in parsed.calls:
            if call.complete:
                valid(call.arguments, schemas[call.name])
                seen.add(call.name)
    assert len(seen) > 1


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_a_call_that_the_model_chooses_is_held_to_its_schema(llm: LLM, form: str) -> None:
    """Text is free until a call begins; from there on it must be a good one."""
    tokenizer = llm.texts.tokenizer
    grammar = tool_grammar(form, ToolGrammarSpec(TOOLS, False, False, tokenizer.mark_id))
    begins = {
        "deepseekv32": "<｜DSML｜function_calls>",
        "qwen25": "<tool_call>",
        "glm45": "<tool_call>",
        "kimi_k2": "<|tool_calls_section_begin|>",
        "llama3": '{"name": "',
    }
    begin = begins.get(form, "<｜tool▁calls▁begin｜>")
    matcher = GrammarCompiler(tokenizer, llm.engine.vocab, tokenizer.eos_ids).compile(grammar)
    before = "" if form == "llama3" else "Well < then: "  # a call is Llama's whole answer
    matcher.accept(tokenizer.encode(before + begin, False))
    assert not matcher.error
    matcher.accept(tokenizer.encode("nonsense", False))
    assert matcher.error
    plain = msgspec.structs.replace(HOT, seed=0, max_tokens=40)
    held, free = (llm.generate("Well: ", plain, grammar=g)[0].outputs[0].token_ids for g in (grammar, NO_GRAMMAR))
    assert held == free, "text stays what it was"


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_an_answer_in_a_form_without_a_bound_ends(llm: LLM, temperature: float) -> None:
    """The prompt does not name the form, and any length is allowed."""
    questions = "Hello", "Name three cities.", "Tell me about Anna, who is 21.", "What is 27 + 58?", "Make up a man."
    asked = [[{"role": "user", "content": question}] for question in questions]
    tags = {"type": "array", "items": {"type": "string"}}
    for shape in (
        StructuredOutputsParams(json_object=True),
        StructuredOutputsParams(json=tags),
        StructuredOutputsParams(json={"type": "object", "properties": {"title": {"type": "string"}, "tags": tags}}),
    ):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=300, structured_outputs=shape)
        for result in llm.chat(asked, params):
            assert result.outputs[0].finish_reason == "stop", (shape, result.prompt, result.outputs[0].text)
            json.loads(result.outputs[0].text)


def test_reasoning_comes_before_the_grammar(llm: LLM) -> None:
    tokenizer = llm.texts.tokenizer
    opens, closes = tokenizer.mark_id("<think>"), tokenizer.mark_id("</think>")
    assert opens is not None and closes is not None
    asked = [{"role": "user", "content": "What is 12 + 34?"}]
    ids = llm.texts.render(asked, chat_template_kwargs={"thinking": True}).ids
    params = SamplingParams(temperature=0.0, max_tokens=200, skip_special_tokens=False)
    number = {"type": "integer", "minimum": 0, "maximum": 999}
    shape = {"type": "object", "properties": {"sum": number}, "required": ["sum"], "additionalProperties": False}
    grammar = Grammar("json_schema", json.dumps(shape), starts_in_thought=True, think_end_id=closes)
    text = llm.generate(ids, params, grammar=grammar)[0].outputs[0].text
    thought, _, answer = text.removesuffix("<｜end▁of▁sentence｜>").partition("</think>")
    assert thought.strip() and isinstance(json.loads(answer)["sum"], int)
    free = llm.generate(ids, params)[0].outputs[0].text
    assert free.startswith(thought), "the thought is what it would have been"


def test_what_cannot_be_compiled_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="grammar"):
        llm.generate(["a", "b"], HOT, grammar=[NO_GRAMMAR, Grammar("regex", "(a")])
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        llm.generate("a", msgspec.structs.replace(HOT, ignore_eos=True), grammar=Grammar("json_object"))
    assert llm.engine.idle


HEAVY = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(6000)}})


def test_a_heavy_schema_does_not_delay_other_requests() -> None:
    """Straight to the engine's process, past the server's door: it takes long to compile, then is refused; a stream
    beside it flows.
    """

    async def run() -> tuple[list[float], Exception | None, CompletionOutput]:
        async with AsyncLLM(MODEL, context_length=512, enable_overlap_schedule=True) as served:
            await served.generate("warm", SamplingParams(max_tokens=2), grammar=Grammar("choice", '["a"]'))
            gaps: list[float] = []

            async def flow() -> None:
                last = time.monotonic()
                async for _ in served.generate("My lord,", msgspec.structs.replace(FREE_ASK, max_tokens=250)):
                    now = time.monotonic()
                    gaps.append(now - last)
                    last = now

            async def refused() -> Exception | None:
                await asyncio.sleep(0.1)
                try:
                    await served.generate(
                        "x", SamplingParams(max_tokens=5), grammar=Grammar("json_schema", HEAVY, field="guided_json")
                    )
                except InvalidRequest as error:
                    return error
                return None

            _, error = await asyncio.gather(flow(), refused())
            after = await served.generate(
                "x", SamplingParams(max_tokens=30), grammar=Grammar("choice", '["aye", "nay"]')
            )
            return gaps, error, after.outputs[0]

    gaps, error, after = asyncio.run(run())
    assert isinstance(error, InvalidRequest) and error.field == "guided_json"
    assert len(gaps) >= 200 and max(gaps[1:]) < 0.5, max(gaps[1:])
    assert after.text in ("aye", "nay")


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm").engine
        allocator = engine.loop.scheduler.allocator
        assert engine.idle and allocator.num_available() == allocator.num_pages, "a page did not come home"


@pytest.mark.parametrize("config", [{}, {"speculative_algorithm": "NEXTN"}], ids=["plain", "drafts"])
def test_a_thought_ends_at_its_budget(config: dict[str, Any]) -> None:
    """Also in several choices, before a grammar, inside a chain of drafts, and beside requests without a budget."""
    llm = LLM(MODEL, context_length=1024, **config)
    tokenizer = llm.texts.tokenizer
    opens, closes = map(tokenizer.mark_id, ("<think>", "</think>"))
    assert opens is not None and closes is not None
    asked = [{"role": "user", "content": "What is 127 + 358?"}]
    ids = list(llm.texts.render(asked, chat_template_kwargs={"thinking": True}).ids)
    limit = Grammar(starts_in_thought=True, think_end_id=closes, thinking_budget=5)
    grammars = [limit, NO_GRAMMAR, msgspec.structs.replace(limit, kind="choice", source='["yes", "no"]')]
    params = SamplingParams(temperature=0.6, seed=5, max_tokens=60, n=3)
    limited, free, chosen = llm.generate([ids] * 3, params, grammar=grammars)
    assert [list(output.token_ids).index(closes) for output in (*limited.outputs, *chosen.outputs)] == [5] * 6
    assert all(closes not in output.token_ids[:6] for output in free.outputs)
    assert {tokenizer.decode(output.token_ids[6:]) for output in chosen.outputs} <= {"yes", "no"}
    begun = Grammar(think_start_id=opens, think_end_id=closes, thinking_budget=0)  # the model opens the thought itself
    hot = msgspec.structs.replace(params, n=1, logit_bias=((opens, 100.0),), max_tokens=2)
    assert llm.generate(ids[:-1], hot, grammar=begun)[0].outputs[0].token_ids == [opens, closes]
