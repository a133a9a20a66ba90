"""Grammars without a model: the message, compilation and its cache, reasoning, failures, and quick refusals."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from thalweg.cache.page_allocator import PageAllocator
from thalweg.cache.radix import RadixTree
from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import KINDS, NO_GRAMMAR, Grammar
from thalweg.core.messages import Abort, Rejected, Submit, ToEngine
from thalweg.core.plan import PAGE, GrammarState, Output, Row, StepPlan
from thalweg.core.sampling import SamplingParams
from thalweg.core.ticket import TicketState
from thalweg.engine.grammars import GrammarRegistry
from thalweg.scheduler.requests import Limits
from thalweg.scheduler.scheduler import Scheduler
from thalweg.text.grammar import MAX_SOURCE, check
from thalweg.text.parser import TOOL_FORMATS
from thalweg.text.tool_grammar import ToolGrammarSpec, tool_grammar

VOCAB, EOS, OPENS, CLOSES = 100, 1, 90, 91
PARAMS = SamplingParams(max_tokens=8)


class Counter:
    """Its language: the source as a number, counting up by one a token; from 50 on it breaks."""

    def __init__(self, at: int) -> None:
        self.at, self.error = at, ""

    def copy(self) -> Self:
        return type(self)(self.at)

    def accept(self, tokens: Sequence[int]) -> None:
        if self.error:
            return
        assert list(tokens) == list(range(self.at, self.at + len(tokens))), "a token that the mask forbids"
        self.at += len(tokens)
        self.error = "too far" if self.at >= 50 else ""


class FakeCompiler:
    specials = (0, EOS, OPENS, CLOSES)

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.go = threading.Event()
        self.go.set()

    def compile(self, grammar: Grammar) -> Counter:
        self.go.wait(10)
        self.seen.append(grammar.source)
        if not grammar.source.isdigit():
            raise InvalidRequest(grammar.field, "is no number")
        return Counter(int(grammar.source))

    def fill(self, wanted: Sequence[tuple[Counter, int]], bits: NDArray[np.int32]) -> None:
        for matcher, row in wanted:
            bits[row].view(np.uint8)[matcher.at >> 3] |= 1 << (matcher.at & 7)


class Bench:
    """A scheduler and its grammars, stepped by hand; the device samples the lowest token that the mask allows, 7 without
    one.
    """

    def __init__(self, cached: int = 128) -> None:
        self.compiler = FakeCompiler()
        self.book = GrammarRegistry(lambda: self.compiler, VOCAB, cached)
        limits = Limits(slots=8, budget=256, context=512, vocab=VOCAB, eos_ids=(EOS,))
        self.scheduler = Scheduler(limits, PageAllocator(50, RadixTree(PAGE)), grammars=self.book)
        self.out: dict[int, list[int]] = {}
        self.refused: dict[int, Rejected] = {}
        self.endings: list[tuple[int, str]] = []  # in order: (uid, its finish or why it was refused)

    def turn(self, *messages: ToEngine) -> StepPlan:
        for reply in self.scheduler.handle(messages):
            assert isinstance(reply, Rejected)
            self.refused[reply.uid] = reply
            self.endings.append((reply.uid, reply.message))
        plan = self.scheduler.plan(0)
        masks = self.book.fill(plan, self.scheduler.grammar_states())
        allowed = {} if masks is None else dict(zip(masks.rows, map(ids_of, masks.bits), strict=True))
        self.scheduler.mark_launched()
        outputs = []
        for i, row in enumerate(plan.rows):
            token = min(allowed.get(i, {7}))
            self.out.setdefault(row.uid, []).append(token)
            request = self.scheduler.requests[row.uid]
            outputs.append(Output((token,), (), request.num_tokens + 1 >= request.end))
        self.scheduler.commit(plan, outputs)
        self.endings += [(delta.uid, delta.finish) for delta in self.scheduler.take_deltas() if delta.finish]
        return plan

    def until_idle(self) -> None:
        deadline = time.monotonic() + 10
        while not self.scheduler.is_idle:
            assert time.monotonic() < deadline, "stuck"
            if not self.turn().rows:
                time.sleep(0.001)


def ids_of(bits: NDArray[np.int32]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def submit(uid: int, source: str = "", **fields: object) -> Submit:
    grammar = Grammar("regex", source, **fields) if source else NO_GRAMMAR  # type: ignore[arg-type]
    return Submit(uid, (5, 6, 7), PARAMS, grammar=grammar)


def test_the_value_crosses_the_wire_and_off_costs_nothing() -> None:
    message = submit(3, "20", starts_in_thought=True, think_end_id=CLOSES, field="regex")
    wire = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.Decoder(ToEngine).decode(wire) == message
    assert not NO_GRAMMAR.is_set and submit(4).grammar is NO_GRAMMAR


def test_a_mixed_batch_follows_each_grammar() -> None:
    bench = Bench()
    bench.turn(submit(0, "20"), submit(1), submit(2, "30"))
    bench.until_idle()
    assert bench.out == {0: list(range(20, 28)), 1: [7] * 8, 2: list(range(30, 38))}


def test_compiling_a_grammar_blocks_no_other_request_and_can_be_aborted() -> None:
    bench = Bench()
    bench.compiler.go.clear()
    bench.turn(submit(0, "20"), submit(1), submit(2, "21"))
    for _ in range(10):
        bench.turn()
    assert bench.out == {1: [7] * 8} and not bench.scheduler.is_idle
    bench.turn(Abort((2,)))
    bench.compiler.go.set()
    bench.until_idle()
    assert bench.out[0] == list(range(20, 28)) and 2 not in bench.out


def test_what_cannot_be_compiled_is_refused_by_name() -> None:
    bench = Bench()
    bench.turn(submit(0, "bad", field="guided_regex"), submit(1, "20"))
    bench.until_idle()
    assert (bench.refused[0].field, bench.refused[0].message) == ("guided_regex", "is no number")
    assert bench.out[1] == list(range(20, 28))


def test_each_grammar_is_compiled_once_until_it_is_forgotten() -> None:
    bench = Bench(cached=2)
    for uid, source in enumerate(["20", "20", "bad", "bad", "20", "30", "40", "20"]):
        bench.turn(submit(uid, source))
        bench.until_idle()
    assert bench.compiler.seen == ["20", "bad", "30", "40", "20"]


def test_reasoning_is_unconstrained_and_ends_before_the_grammar() -> None:
    book: GrammarRegistry = GrammarRegistry(FakeCompiler, VOCAB)
    for uid, grammar in enumerate(
        (Grammar("regex", "20", True, -1, CLOSES), Grammar("regex", "20", False, OPENS, CLOSES))
    ):
        ticket = book.open(uid, grammar)
        while ticket.state is TicketState.PENDING:
            time.sleep(0.001)
    thought = set(range(VOCAB)) - set(FakeCompiler.specials) | {CLOSES}
    assert allowed(book, 0) == thought
    assert allowed(book, 1) == {20, OPENS}
    book.advance(1, (OPENS,))
    for uid in (0, 1):
        book.advance(uid, (9, 9))
        assert allowed(book, uid) == thought
        book.advance(uid, (CLOSES,))
        assert allowed(book, uid) == {20}
        book.advance(uid, (20,))
        assert allowed(book, uid) == {21}
    book.open(2, Grammar("regex", "20", False, OPENS, CLOSES))
    book.advance(2, (20, 21))
    assert allowed(book, 2) == {22}, "no thought: the grammar held from the start"


def test_nothing_is_masked_before_the_trigger() -> None:
    """Drafts behind a drafted trigger are masked."""
    book: GrammarRegistry = GrammarRegistry(FakeCompiler, VOCAB)
    for uid in (0, 1):
        ticket = book.open(uid, Grammar("regex", "20", trigger_id=OPENS))
        while ticket.state is TicketState.PENDING:
            time.sleep(0.001)
    plan = StepPlan(0, 3, (Row(0, 0, 0, 1, 3, True),))
    assert book.fill(plan, {0: GrammarState(1, 0, (7, 8, 9))}) is None, "no work at all"
    masks = book.fill(plan, {0: GrammarState(1, 0, (7, OPENS, 20))})
    assert masks is not None and masks.rows == (2,) and ids_of(masks.bits[0]) == {20}
    book.advance(0, (7, 8, OPENS))
    assert allowed(book, 0) == {20}
    book.advance(1, (7, CLOSES, 30, OPENS, 20))
    assert allowed(book, 1) == {21}


def allowed(book: GrammarRegistry, uid: int) -> set[int]:
    masks = book.fill(StepPlan(0, 0, (Row(uid, 0, 0, 1, 0, True),)), {uid: GrammarState(1, 0, ())})
    assert masks is not None
    return ids_of(masks.bits[0])


def test_a_failing_grammar_ends_only_its_own_request() -> None:
    bench = Bench()
    bench.turn(submit(0, "46", field="ebnf"), submit(1, "20"))
    bench.until_idle()
    assert bench.refused[0].field == "ebnf" and "too far" in bench.refused[0].message
    assert bench.out[1] == list(range(20, 28))
    assert bench.scheduler.allocator.num_available() == bench.scheduler.allocator.num_pages


def test_a_failing_grammar_ends_its_request_once() -> None:
    """The front takes the first ending it hears: an abort's news might overtake the error, and the client would get
    half an answer.
    """
    bench = Bench()
    bench.turn(submit(0, "46", field="ebnf"), submit(1, "20"))
    bench.until_idle()
    assert bench.endings == [(0, "went beyond its limits: too far"), (1, "length")]
    assert bench.scheduler.stats(0.0).aborted == 1
    bench.scheduler.handle([Abort((0,))])
    assert not bench.scheduler.take_deltas(), "it is gone: a later abort gets no answer"


def test_parameters_that_contradict_a_grammar_are_refused() -> None:
    bench = Bench()
    bench.turn(Submit(0, (5,), SamplingParams(ignore_eos=True), grammar=Grammar("regex", "20")))
    bench.turn(Submit(1, (5,), PARAMS, grammar=Grammar("poem", "20")))
    assert bench.refused[0].field == "ignore_eos" and bench.refused[1].field == "grammar"


def deep(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


EXPENSIVE = {
    "too large": Grammar("json_schema", '{"enum": ["' + "x" * MAX_SOURCE + '"]}'),
    "not JSON": Grammar("json_schema", "{"),
    "not a schema": Grammar("json_schema", "[1]"),
    "unknown type": Grammar("json_schema", '{"type": "objec"}'),
    "no value": Grammar("json_schema", '{"type": "string", "const": 1}'),
    "number that overflows the library's stack": Grammar("ebnf", 'start: %json {"const": -9223372036854775808}'),
    "dangling reference": Grammar("json_schema", '{"$ref": "#/nowhere"}'),
    "nested deeply": Grammar("json_schema", json.dumps(deep(200))),
    "nested beyond recursion": Grammar("json_schema", "[" * 100_000),
    "exploding": Grammar(
        "json_schema",
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"k{i}{j}": {"pattern": "^a.*b$"}}} for j in range(20)]}
                    for i in range(20)
                ]
            }
        ),
    ),
    "thousands of members": Grammar(
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(6000)}}),
    ),
    "open group": Grammar("regex", "(a"),
    "look-around": Grammar("regex", "a(?=b)"),
    "long expression": Grammar("regex", "a|" * 20_000),
    "no grammar": Grammar("ebnf", "root ::= ("),
    "no rule": Grammar("ebnf", "root ::= nothing"),
    "nested grammar": Grammar("ebnf", "root ::= " + "(" * 4000 + '"a"' + ")" * 4000),
    "no choice": Grammar("choice", "[]"),
    "not texts": Grammar("choice", "[1]"),
    "NUL": Grammar("regex", "a\0"),
    "no structures": Grammar("structural_tag", '{"triggers": ["<"]}'),
}


@pytest.mark.parametrize("grammar", EXPENSIVE.values(), ids=EXPENSIVE)
def test_an_expensive_grammar_is_refused_quickly(grammar: Grammar) -> None:
    started = time.thread_time()
    with pytest.raises(InvalidRequest) as refused:
        check(msgspec.structs.replace(grammar, field="response_format"))
    assert time.thread_time() - started < 2.0
    assert refused.value.field.startswith("response_format") and len(refused.value.message) < 400


GOOD = {
    "json_object": "",
    "json_schema": '{"enum": [' + ",".join(f'"value {i}"' for i in range(5000)) + "]}",
    "regex": "((a+)+)+b",
    "ebnf": 'root ::= "a" [0-9]+ (" " item)*\nitem ::= "x" | "y"',
    "choice": '["yes", "n\\"o", "schön"]',
    "structural_tag": json.dumps(
        {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f"]}
    ),
    "lark": 'start: "a"+',
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_valid_grammar_compiles_quickly(kind: str) -> None:
    started = time.monotonic()
    check(Grammar(kind, GOOD[kind]))
    assert time.monotonic() - started < 2.0


@pytest.mark.parametrize("form", TOOL_FORMATS)
@pytest.mark.parametrize("tokens", [True, False], ids=["marks are tokens", "marks are text"])
@pytest.mark.parametrize("forced", [True, False])
def test_tool_grammars_compile_in_every_format(form: str, tokens: bool, forced: bool) -> None:
    functions = [
        {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
        {"name": "stop"},
    ]
    for single in (True, False):
        grammar = tool_grammar(
            form, ToolGrammarSpec(functions, forced, single, (lambda text: 91) if tokens else (lambda text: None))
        )
        check(grammar)
    with pytest.raises(InvalidRequest, match="tools"):
        tool_grammar(form, ToolGrammarSpec([{"name": 'a"b'}], forced, False, lambda text: None))
