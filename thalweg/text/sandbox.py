"""Jinja's sandbox with limits on what one rendering may build: templates come with checkpoints.

Texts and lists are counted before they are built, and every loop and call is a step. The limits hold for intermediate
values too.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import Environment, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SIZE = 1 << 26  # characters and items; the longest body has 2^25
MAX_STEPS = 1 << 20
MAX_SECONDS = 2.0
MAX_BITS = 4096  # of an integer
_SIZED = {"batch", "slice"}  # their parameters are sizes
_WRITE = {"string", "tojson", "pprint", "urlencode", "escape", "e", "forceescape", "join", "format", "safe", "trim"}
_WRITE |= {"upper", "lower", "replace", "title", "capitalize", "indent", "center", "wordwrap", "truncate"}
_REMOVED = "urlize", "xmlattr", "striptags"  # of HTML, with costs of their own


class TemplateLimitError(Exception):
    """A rendering takes more than the limits."""


class _Spent:
    """What one rendering has taken."""

    def __init__(self) -> None:
        self.size = self.steps = 0
        self.deadline = time.monotonic() + MAX_SECONDS

    def build(self, size: int) -> None:
        self.size += size
        if self.size > MAX_SIZE:
            raise TemplateLimitError(f"it builds more than {MAX_SIZE} characters")

    def step(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > MAX_STEPS or time.monotonic() > self.deadline:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS} steps or {MAX_SECONDS:g} s")

    def write(self, value: Any) -> None:
        """Counts the text of a value; of an object that is in it twice, twice."""
        if isinstance(value, str):
            return self.build(len(value))
        rest, size = [value], 0
        while rest and size <= MAX_SIZE:
            item = rest.pop()
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, dict):
                rest += item
                rest += item.values()
            elif isinstance(item, list | tuple | set | frozenset):
                rest += item
            size += 8
        self.build(size)


_spent: ContextVar[_Spent] = ContextVar("_spent")


@contextmanager
def limits() -> Iterator[None]:
    """Inside, renderings share one set of limits. They raise TemplateLimitError."""
    token = _spent.set(_Spent())
    try:
        yield
    finally:
        _spent.reset(token)


class _CodeGenerator(CodeGenerator):
    """Joins the operands of `~` within the limits."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_operands((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Templates of it render inside `limits`."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_written, optimized=False, **options)  # unoptimized: nothing is built while compiling
        for name in _REMOVED:
            del self.filters[name]
        del self.globals["lipsum"]
        self.globals["range"] = _range
        for name, run in self.filters.items():
            self.add_filter(name, run)

    def add_filter(self, name: str, run: Callable[..., Any]) -> None:
        """A filter that counts what it builds."""
        self.filters[name] = self._limited(name, run)

    def _limited(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def limited(*args: Any, **options: Any) -> Any:
            spent = _spent.get()
            spent.step()
            # Jinja gives some filters its own objects first
            value, *parameters = [arg for arg in args if not isinstance(arg, Context | Environment | nodes.EvalContext)]
            parameters += options.values()
            if name in _SIZED:
                spent.build(_total(parameters))
            if name in _WRITE:
                texts = [arg for arg in (value, *parameters) if isinstance(arg, str)]
                spent.write([value, *parameters])
                spent.build(_total(parameters) * (1 + sum(text.count("\n") for text in texts)) + _widths(texts))
                if name == "replace":
                    spent.build(_replaced(*texts[:3]))
                elif name == "join" and isinstance(value, Sized):
                    spent.build(sum(map(len, texts)) * len(value))
            return run(*args, **options)

        return functools.update_wrapper(limited, run)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Makes each turn of a loop and each run of a macro a call."""
        tree = super()._parse(source, name, filename)
        bodies: list[nodes.For | nodes.Macro | nodes.CallBlock]
        bodies = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro), *tree.find_all(nodes.CallBlock)]
        for node in bodies:
            step = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None).set_lineno(node.lineno)
            node.body.insert(0, nodes.ExprStmt(step).set_lineno(node.lineno))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(step, node.test).set_lineno(node.lineno)
        return tree

    def step(self) -> bool:
        """Does nothing; calling it is a step."""
        return True

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        spent = _spent.get()
        spent.step()
        method = getattr(__obj, "__wrapped__", __obj)  # jinja wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            given = [*args, *kwargs.values()]
            texts = [text, *(arg for arg in given if isinstance(arg, str))]
            spent.build(len(text))
            match method.__name__:
                case "replace":
                    spent.build(_replaced(*texts[:3]))
                case "join":
                    args = (list(args[0]),)
                    spent.build(len(text) * len(args[0]))
                    spent.write(args[0])
                case "format" | "format_map":
                    spent.write(given)
                    spent.build(_widths(texts) + (_total(given) if re.search(r"{[^}]*{", text) else 0))
                case "translate":
                    raise TemplateLimitError("it calls str.translate")
                case _:
                    spent.build(_total(given) * (1 + text.count("\t")))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        spent = _spent.get()
        spent.step()
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "+":
            spent.build(0 if isinstance(left, int | float) else len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            spent.write(right)
            values = right if isinstance(right, tuple) else (right,)
            spent.build(len(left) + _widths([left]) + (_total(values) if "*" in left else 0))
        elif operator == "*" and not numbers:
            for one, count in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(count, int):
                    spent.build(len(one) * max(count, 0))
        elif numbers and operator in "**":
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise TemplateLimitError(f"it computes an integer of more than {MAX_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def join_operands(self, operands: tuple[Any, ...]) -> str:
        """The value of `a ~ b`."""
        _spent.get().write(operands)
        return str_join(operands)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """The text of a template, a macro or a block."""
        texts = list(parts)
        _spent.get().build(sum(map(len, texts)))
        return "".join(texts)


def _written(value: Any) -> Any:
    if not isinstance(value, str):  # those are counted by `concat`
        _spent.get().write(value)
    return value


def _range(*args: int) -> range:
    numbers = range(*args)
    _spent.get().step(len(numbers[: MAX_STEPS + 1]))
    return numbers


def _total(values: Iterable[Any]) -> int:
    """The widths and counts among the arguments of a function of texts."""
    return sum(abs(value) for value in values if isinstance(value, int))


def _widths(texts: Iterable[str]) -> int:
    """The widths in format strings."""
    return sum(int(digits[:9]) for text in texts for digits in re.findall(r"[%{][^%{}a-zA-Z]*?(\d{5,})", text))


def _replaced(text: str, old: str = "", new: str = "") -> int:
    """Characters that str.replace builds."""
    return len(text) + text.count(old) * len(new)
