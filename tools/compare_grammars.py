"""llguidance against xgrammar on the same schemas: compile time, time of a mask, what each lets through, and hostile
schemas.

xgrammar is no dependency of ours: install it in an environment of its own that sees this
one, `pip install --no-deps xgrammar apache-tvm-ffi`, and run there

    python -m tools.compare_grammars --tokenizer FOLDER > comparison.json

FOLDER holds a tokenizer.json. Times are CPU times. Each hostile grammar gets a process and ten seconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import Grammar
from thalweg.text.grammar import GrammarCompiler, check
from thalweg.text.tokenizer import Tokenizer

PATIENCE = 10.0  # seconds for a hostile grammar
REFUSED = "refused"
# A schema a line, with outputs that it allows (members in its own order: neither library writes them in another) and
# outputs that it does not.
FEATURES = Path(__file__).with_name("grammar_features.json")


class Walk(Protocol):
    """One output being written."""

    bits: NDArray[np.int32]  # the last mask, a bit a token

    def mask(self) -> None:
        """Compute which tokens may come next."""

    def accept(self, token: int) -> None: ...


class Guidance:
    """llguidance, through the wrapper that the engine uses, with its limits."""

    name = f"llguidance {version('llguidance')}"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos = tokenizer.eos_ids[0]
        self.vocab = tokenizer.vocab_size
        self.compiler = GrammarCompiler(tokenizer, self.vocab, [self.eos])

    def compile(self, grammar: Grammar) -> Any:
        check(grammar)
        return self.compiler.compile(grammar)

    def start(self, compiled: Any) -> Walk:
        return _GuidanceWalk(self, compiled.copy())


class _GuidanceWalk:
    def __init__(self, backend: Guidance, matcher: Any) -> None:
        self.backend, self.matcher = backend, matcher
        self.bits = np.zeros((backend.vocab + 31) // 32, np.int32)

    def mask(self) -> None:
        self.bits[:] = 0
        self.backend.compiler.fill([(self.matcher, 0)], self.bits[None])

    def accept(self, token: int) -> None:
        self.matcher.accept([token])


class XGrammar:
    """xgrammar as SGLang and vLLM call it: any whitespace, strict mode; one thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.library = importlib.import_module("xgrammar")
        self.name = f"xgrammar {version('xgrammar')}"
        self.vocab, self.eos = tokenizer.vocab_size, tokenizer.eos_ids[0]
        special = set(tokenizer.added_ids)
        words = [b"" if i in special else tokenizer.token_bytes(i) for i in range(self.vocab)]
        info = self.library.TokenizerInfo(
            words, self.library.VocabType.RAW, vocab_size=self.vocab, stop_token_ids=[self.eos]
        )
        self.compiler = self.library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> Any:
        calls: dict[str, Callable[[str], Any]] = {
            "json_schema": self.compiler.compile_json_schema,
            "regex": self.compiler.compile_regex,
            "ebnf": self.compiler.compile_grammar,
        }
        try:
            return calls[grammar.kind](grammar.source)
        except (RuntimeError, ValueError) as error:
            raise InvalidRequest(grammar.kind, str(error)[:200]) from error

    def start(self, compiled: Any) -> Walk:
        return _XGrammarWalk(self, compiled)


class _XGrammarWalk:
    def __init__(self, backend: XGrammar, compiled: Any) -> None:
        self.matcher = backend.library.GrammarMatcher(compiled)
        self.tensor = backend.library.allocate_token_bitmask(1, backend.vocab)
        self.bits = self.tensor.numpy()[0]

    def mask(self) -> None:
        self.bits[:] = -1  # where all is allowed it leaves the mask as it was
        self.matcher.fill_next_token_bitmask(self.tensor, 0)

    def accept(self, token: int) -> None:
        self.matcher.accept_token(token)


Backend = Guidance | XGrammar


def accepts(backend: Backend, compiled: Any, ids: list[int], spent: list[int]) -> bool:
    """Whether this is an output: every token allowed, and the end after the last. spent: gets the time of each mask,
    ns.
    """
    walk = backend.start(compiled)
    for token in [*ids, backend.eos]:
        begun = time.thread_time_ns()
        walk.mask()
        spent.append(time.thread_time_ns() - begun)
        if not walk.bits[token >> 5] >> (token & 31) & 1:
            return False
        if token != backend.eos:
            walk.accept(token)
    return True


def speed(backend: Backend, tokenizer: Tokenizer) -> list[dict[str, object]]:
    """Each workload three times: the best compile time, and the masks of a document that it allows."""
    rows = []
    for name, (grammar, text) in workloads().items():
        ids = tokenizer.encode(text, False)
        compiling, masks, done = [], list[int](), False
        for _ in range(3):
            begun = time.process_time()
            compiled = backend.compile(grammar)
            compiling.append(time.process_time() - begun)
            done = accepts(backend, compiled, ids, masks)
        masks.sort()
        row: dict[str, object] = {
            "workload": name,
            "tokens": len(ids),
            "accepted": done,
            "compile_ms": _ms(min(compiling)),
        }
        p50, p99, most = statistics.median(masks), masks[int(len(masks) * 0.99)], masks[-1]
        row["mask_us"] = {"p50": round(p50 / 1e3, 1), "p99": round(p99 / 1e3, 1), "max": round(most / 1e3, 1)}
        rows.append(row)
    return rows


def features(backend: Backend, tokenizer: Tokenizer) -> list[dict[str, object]]:
    """What becomes of each keyword: `exact`, `refused` (at compile time), or which outputs it wrongly takes or
    rejects.
    """
    rows: list[dict[str, object]] = []
    for case in json.loads(FEATURES.read_text(encoding="utf-8")):
        row: dict[str, object] = {"feature": case["feature"]}
        rows.append(row)
        try:
            compiled = backend.compile(Grammar("json_schema", json.dumps(case["schema"])))
        except InvalidRequest as error:
            row |= {"verdict": REFUSED, "why": error.message[:120]}
            continue
        taken = {
            text: accepts(backend, compiled, tokenizer.encode(text, False), [])
            for text in case["valid"] + case["invalid"]
        }
        wrong, missed = [t for t in case["invalid"] if taken[t]], [t for t in case["valid"] if not taken[t]]
        row["verdict"] = "takes what is invalid" if wrong else "rejects what is valid" if missed else "exact"
        if wrong or missed:
            row |= {"took": wrong, "rejected": missed}
    return rows


def hostile(kind: str, folder: str) -> list[dict[str, object]]:
    context = multiprocessing.get_context("spawn")
    rows = []
    for name, grammar in attacks().items():
        ours, theirs = context.Pipe()
        child = context.Process(target=_attack, args=(kind, folder, grammar, theirs))
        child.start()
        theirs.close()
        ours.recv()  # it is ready
        answered = ours.poll(PATIENCE)
        row: dict[str, object] = {"attack": name}
        try:
            row |= ours.recv() if answered else {"verdict": f"still compiling after {PATIENCE:.0f} s"}
        except EOFError:
            row["verdict"] = "the process died"
        child.kill()
        child.join()
        rows.append(row)
    return rows


def _attack(kind: str, folder: str, grammar: Grammar, pipe: Any) -> None:
    """Compiles, then writes 50 tokens, always the first that is allowed."""
    backend = BACKENDS[kind](Tokenizer(Path(folder)))
    pipe.send("ready")
    begun, slowest, verdict = time.process_time(), 0.0, "compiled"
    try:
        walk = backend.start(backend.compile(grammar))
    except InvalidRequest:
        pipe.send({"verdict": REFUSED, "ms": _ms(time.process_time() - begun)})
        return
    compiling = time.process_time() - begun
    for _ in range(50):
        begun = time.process_time()
        walk.mask()
        slowest = max(slowest, time.process_time() - begun)
        token = next((t for t in np.flatnonzero(_unpack(walk.bits)) if t != backend.eos), None)
        if token is None:
            break
        walk.accept(int(token))
    pipe.send({"verdict": verdict, "ms": _ms(compiling), "slowest_mask_ms": _ms(slowest)})


def _unpack(bits: NDArray[np.int32]) -> NDArray[np.uint8]:
    return np.unpackbits(bits.view(np.uint8), bitorder="little")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.is_file() else []
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


BACKENDS: dict[str, Callable[[Tokenizer], Backend]] = {"llguidance": Guidance, "xgrammar": XGrammar}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.compare_grammars")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    found = parser.parse_args()
    tokenizer = Tokenizer(found.tokenizer)
    report: dict[str, Any] = {
        "command": "python -m tools.compare_grammars --tokenizer FOLDER",
        "vocab": tokenizer.vocab_size,
    }
    report["machine"] = _processor()
    for kind, make in BACKENDS.items():
        backend = make(tokenizer)
        report[backend.name] = {
            "speed": speed(backend, tokenizer),
            "features": features(backend, tokenizer),
            "hostile": hostile(kind, str(found.tokenizer)),
        }
    print(_lines(report))
    return 0


def _lines(value: Any, indent: str = "") -> str:
    """JSON, a row a line."""
    if isinstance(value, dict) and (not indent or any(isinstance(one, dict | list) for one in value.values())):
        members = (f"{indent} {json.dumps(key)}: {_lines(one, indent + ' ')}" for key, one in value.items())
        return "{\n" + ",\n".join(members) + f"\n{indent}}}"
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"{indent} {json.dumps(row, ensure_ascii=False)}" for row in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def workloads() -> dict[str, tuple[Grammar, str]]:
    """Grammars that people use, each with an output."""
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "email": {"type": "string", "format": "email"},
            "tags": {"type": "array", "items": {"enum": ["new", "old", "vip"]}, "maxItems": 4},
        },
        "required": ["name", "age", "email", "tags"],
        "additionalProperties": False,
    }
    line = {
        "type": "object",
        "properties": {
            "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
            "count": {"type": "integer"},
            "price": {"type": "number"},
        },
        "required": ["sku", "count", "price"],
        "additionalProperties": False,
    }
    order = {
        "type": "object",
        "properties": {
            "customer": person,
            "lines": {"type": "array", "items": line},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["customer", "lines", "note"],
        "additionalProperties": False,
    }
    tree = {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["value", "children"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    }
    wide = {
        "type": "object",
        "properties": {f"field_{i}": {"type": "string"} for i in range(100)},
        "required": [f"field_{i}" for i in range(100)],
        "additionalProperties": False,
    }
    someone = {"name": "Ada Lovelace", "age": 36, "email": "ada@example.org", "tags": ["vip", "old"]}
    lines = [{"sku": f"ABC-{1000 + i}", "count": i, "price": i * 1.25} for i in range(12)]
    nodes: dict[str, Any] = {"value": 0, "children": []}
    for i in range(12):
        nodes = {"value": i, "children": [nodes, {"value": -i, "children": []}]}
    names = [f"city of {i}" for i in range(2000)]
    long_text = {"text": "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 8}

    def schema(value: object, output: object) -> tuple[Grammar, str]:
        return Grammar("json_schema", json.dumps(value)), json.dumps(output, ensure_ascii=False)

    return {
        "person": schema(person, someone),
        "order": schema(order, {"customer": someone, "lines": lines, "note": None}),
        "recursive tree": schema(tree, nodes),
        "100 members": schema(wide, {f"field_{i}": f"value {i}" for i in range(100)}),
        "enum of 2000": schema({"enum": names}, names[-1]),
        "one long string": schema({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}, long_text),
        "any object": schema({"type": "object"}, {"customer": someone, "lines": lines}),
        "regex": (Grammar("regex", r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2} [a-zA-Z ]+"), "2026-11-21T05:40 Some words here"),
        "ebnf": (
            Grammar("ebnf", 'root ::= sum\nsum ::= product ("+" product)*\nproduct ::= item ("*" item)*\nitem ::= [0-9]+ | "(" sum ")"'),
            "(1+2*(3+4))*567+8*(9+(10*11))",
        ),
    }  # fmt: skip


def attacks() -> dict[str, Grammar]:
    """Grammars that are large, deep or explode."""

    def schema(value: object) -> Grammar:
        return Grammar("json_schema", json.dumps(value))

    def members(count: int) -> dict[str, Any]:
        properties = {f"p{i}": {"type": "integer"} for i in range(count)}
        return {"type": "object", "properties": properties, "additionalProperties": False}

    deep: dict[str, Any] = {"type": "string"}
    arrays: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep, "b": {"type": "integer"}}, "required": ["a"]}
    for _ in range(18):
        arrays = {
            "type": "array",
            "prefixItems": [arrays],
            "items": {"anyOf": [{"type": "integer"}, {"const": "x" * 50}]},
        }
    explosion = [{"anyOf": [{"properties": {f"k{i}{j}": {"pattern": "^a.*b$"}}} for j in range(10)]} for i in range(6)]
    circle = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    chain = "\n".join(f'r{i} ::= "x{i}" r{i + 1} | r{i + 1} "y"' for i in range(2000))
    return {
        "400 optional members": schema(members(400)),
        "6000 optional members": schema(members(6000)),
        "minItems 100000": schema({"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
        "maxLength 1000000": schema({"type": "string", "maxLength": 1_000_000}),
        "counted nests": schema({"type": "string", "pattern": "^(((a{1,50}){1,50}){1,50}){1,50}$"}),
        "pattern, exponential DFA": schema({"type": "string", "pattern": "(a|b)*a(a|b){40}"}),
        "patterns in allOf": schema({"allOf": [{"type": "string", "pattern": f"^.*{c}.*$"} for c in "abcdefghij"]}),
        "anyOf in allOf": schema({"allOf": explosion}),
        "nested 60 deep": schema(deep),
        "arrays in arrays": schema(arrays),
        "enum of 15000": schema({"enum": [f"a value of some length {i}" for i in range(15_000)]}),
        "references to themselves": schema(circle),
        "regex, counted": Grammar("regex", "((a{1,100}){1,100}){1,100}"),
        "regex, long": Grammar("regex", "|".join(f"word{i}[a-z]*" for i in range(1000))),
        "ebnf, ambiguous": Grammar("ebnf", 'root ::= s\ns ::= s s s s | s s s | s s | "a" | ""'),
        "ebnf, left recursive": Grammar("ebnf", 'root ::= root "a" | root root | "b"'),
        "ebnf, nested": Grammar("ebnf", "root ::= " + "(" * 4000 + '"a"' + ")" * 4000),
        "ebnf, 2000 rules": Grammar("ebnf", f'root ::= r0\n{chain}\nr2000 ::= "z"'),
    }


if __name__ == "__main__":
    sys.exit(main())
