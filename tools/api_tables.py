"""Tables of the API pages: fields of requests, refused fields and error codes. `python -m tools.api_tables` writes them
(`make docs`); `wrong` says where a page, the code and `api_fields.yaml` differ.

In a page, the lines between `<!-- fields: STRUCT -->`, `<!-- refused: STRUCT -->` or `<!-- errors -->` and
`<!-- end -->` are made here. Types come from the structs, ranges from `core.sampling`, what is said of refused fields from
`server.refused`, all else from `api_fields.yaml`.
"""

from __future__ import annotations

import ast
import re
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from thalweg.core import sampling
from thalweg.server import anthropic, protocol
from thalweg.server.openapi import _RANGES
from thalweg.server.refused import REASONS, AdminRefusedFields
from thalweg.server.responses import protocol as responses

ROOT = Path(__file__).parents[1]
PAGES = ("docs/api.md", "docs/native.md", "docs/anthropic.md", "docs/responses.md")
STRUCTS: dict[str, type[msgspec.Struct]] = {
    kind.__name__: kind
    for kind in (
        protocol.ChatRequest,
        protocol.CompletionRequest,
        protocol.GenerateRequest,
        protocol.NativeSampling,
        protocol.TokenizeRequest,
        protocol.DetokenizeRequest,
        protocol.StreamOptions,
        protocol.ResponseFormat,
        sampling.StructuredOutputsParams,
        protocol.AbortRequest,
        anthropic.Conversation,
        anthropic.MessagesRequest,
        anthropic.AnthropicTool,
        anthropic.ToolChoice,
        anthropic.Thinking,
        anthropic.OutputFormat,
        responses.ResponsesRequest,
        responses.Reasoning,
        responses.TextFormat,
        responses.ResponsesTool,
    )
}
BLOCK = re.compile(r"^<!-- (?P<kind>fields|refused|errors)(?:: (?P<struct>\w+))? -->\n.*?^<!-- end -->$", re.M | re.S)
NAMES = {str: "text", int: "integer", float: "number", bool: "boolean", Any: "any", dict: "object"}
HEADS = {
    "fields": ("field", "type", "default", "range", "meaning", "from"),
    "refused": ("refused field", "why, or what to use"),
    "errors": ("status", "`code`", "`type`", "when", "what to do"),
}


@cache
def rows() -> dict[str, dict[str, Any]]:
    """api_fields.yaml."""
    tree: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "tools/api_fields.yaml").read_text(encoding="utf-8"))
    return tree


def type_name(kind: Any) -> str:
    """A field's type in words; null is left out, since it means "not given"."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(type_name(part) for part in parts if part is not types.NoneType))
    if origin is Annotated:
        return type_name(parts[0])
    if origin is Literal:
        return ", ".join(f'`"{part}"`' for part in parts)
    if origin in (list, tuple):
        return f"list of {type_name(parts[0])}"
    return NAMES.get(origin or kind, "object")


def refused(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(getattr(kind, "REFUSED", ()))


def row_name(kind: type[msgspec.Struct], field: str) -> str:
    """The row of a field: that of the struct, of one that it inherits from, or of every struct; "" where none is."""
    names = (*(f"{one.__name__}.{field}" for one in kind.__mro__), field)
    return next((name for name in names if name in rows()["fields"]), "")


def field_rows(kind: type[msgspec.Struct]) -> Iterator[tuple[str, ...]]:
    """The cells of each field that is understood, in the order of api_fields.yaml."""
    table = rows()["fields"]
    order = list(table)
    chosen = [(row_name(kind, field.name), field) for field in msgspec.structs.fields(kind)]
    understood = [(name, field) for name, field in chosen if field.name not in refused(kind)]
    for name, field in sorted(understood, key=lambda pair: order.index(pair[0])):
        default, limits, origin, meaning = map(str, table[name])
        yield f"`{field.name}`", type_name(field.type), default, limits or _range(field), meaning, origin


def _range(field: Any) -> str:
    if field.name not in _RANGES or not {"integer", "number"} & set(type_name(field.type).split(" or ")):
        return ""
    low, high = _RANGES[field.name]
    return f"from {low:g}" if high is None or high >= 2**31 else f"{low:g} to {high:g}"


def lines(kind: str, struct: str) -> list[str]:
    """The lines of one table."""
    if kind == "fields":
        cells: list[tuple[str, ...]] = list(field_rows(STRUCTS[struct]))
    elif kind == "refused":
        cells = [(f"`{name}`", REASONS[name]) for name in refused(STRUCTS[struct])]
    else:
        cells = [(str(row[0]), f"`{code}`", f"`{row[1]}`", *row[2:]) for code, row in rows()["errors"].items()]
    heads = HEADS[kind]
    return [" ".join(["|", *(f"{cell} |".lstrip() for cell in row)]) for row in (heads, ("---",) * len(heads), *cells)]


def renewed(page: str) -> str:
    """A page with its tables made anew."""

    def made(found: re.Match[str]) -> str:
        order = found["kind"] + (f": {found['struct']}" if found["struct"] else "")
        return "\n".join([f"<!-- {order} -->\n", *lines(found["kind"], found["struct"] or ""), "\n<!-- end -->"])

    return BLOCK.sub(made, page)


def sent_codes() -> set[str]:
    """Error codes in the server's source: those of the calls that make an error, and of names called `code`."""
    places = {"ApiError": 4, "too_many_requests": 1, "_refuse": 2}
    found: set[str] = set()
    for path in (ROOT / "thalweg/server").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            value: ast.AST | None = None
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                given = [word.value for word in node.keywords if word.arg == "code"] if name in places else []
                value = next(iter(given), None) or (node.args[places[name] :] or [None])[0] if name in places else None
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "code":
                value = node.value
            constants = [part.value for part in ast.walk(value) if isinstance(part, ast.Constant)] if value else []
            found |= {one for one in constants if isinstance(one, str) and re.fullmatch("[a-z_]{4,}", one)}
    return found


def unmatched() -> Iterator[str]:
    """Fields, refused fields and error codes without a row in api_fields.yaml, and rows without one of these."""
    known, used = {**rows(), "refused": REASONS}, set[str]()
    for kind in STRUCTS.values():
        for field in msgspec.structs.fields(kind):
            is_refused = field.name in refused(kind)
            name = field.name if is_refused else row_name(kind, field.name)
            used.add(f"{'refused' if is_refused else 'fields'} {name}")
            if name not in known["refused" if is_refused else "fields"]:
                yield f"no {'reason' if is_refused else 'row'} for {kind.__name__}.{field.name}"
    used |= {f"refused {name}" for name in AdminRefusedFields.__struct_fields__}  # no page has a table of these
    codes = sent_codes()
    used |= {f"errors {code}" for code in codes}
    yield from (f"no row for the error code {code}" for code in sorted(codes - set(known["errors"])))
    in_tables = {f"{part} {name}" for part in ("fields", "refused", "errors") for name in known[part]}
    yield from (f"nothing in the code for the row {name}" for name in sorted(in_tables - used))


def wrong() -> list[str]:
    """What differs between the code, api_fields.yaml and the pages; [] when all is well."""
    if problems := [f"tools/api_fields.yaml: {problem}" for problem in unmatched()]:
        return problems
    ordered = set[tuple[str, str]]()
    for name in PAGES:
        page = (ROOT / name).read_text(encoding="utf-8")
        ordered |= {(found["kind"], found["struct"] or "") for found in BLOCK.finditer(page)}
        problems += [f"{name}: a table differs; run `make docs`"] if renewed(page) != page else []
    problems += [f"no page has the fields of {name}" for name in STRUCTS if ("fields", name) not in ordered]
    return problems


def main() -> None:
    for name in PAGES:
        path = ROOT / name
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
