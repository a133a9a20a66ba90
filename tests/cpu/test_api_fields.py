"""The tables of fields and errors on the API pages, against the structs and the server's source."""

from __future__ import annotations

import msgspec
import pytest

from thalweg.core.errors import EngineDead, EngineStarting, InvalidRequest, NumericalError, Overloaded
from thalweg.server.errors import ApiError, api_error
from tools import api_tables


def test_each_field_and_error_has_its_row_on_the_pages() -> None:
    assert api_tables.wrong() == []


def test_a_new_field_without_a_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = api_tables.STRUCTS["ChatRequest"]
    wider = msgspec.defstruct("ChatRequest", [("top_z", int | None, None)], bases=(kind,), kw_only=True)
    monkeypatch.setitem(api_tables.STRUCTS, "ChatRequest", wider)
    assert api_tables.wrong() == ["tools/api_fields.yaml: no row for ChatRequest.top_z"]


def test_a_row_without_a_field_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = api_tables.rows()
    monkeypatch.setitem(rows["fields"], "top_z", ["", "", "OpenAI", "nothing"])
    monkeypatch.setitem(rows["errors"], "no_such_code", [400, "x", "never", "nothing"])
    assert [problem.rpartition("row ")[2] for problem in api_tables.wrong()] == ["errors no_such_code", "fields top_z"]


def test_types_are_in_words() -> None:
    assert api_tables.type_name(str | list[str] | None) == "text or list of text"
    assert api_tables.type_name(dict[int, float] | None) == "object"


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("n", "x"),
        Overloaded("x"),
        EngineStarting("x"),
        EngineDead("x"),
        NumericalError(),
        RecursionError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_status_and_type_of_an_error_are_those_of_its_row(error: Exception) -> None:
    sent = api_error(error)
    assert sent.code is not None
    assert api_tables.rows()["errors"][sent.code][:2] == [sent.status, sent.type]


def test_the_types_of_anthropic_s_errors_are_on_its_page() -> None:
    page = (api_tables.ROOT / "docs/anthropic.md").read_text(encoding="utf-8")
    for row in api_tables.rows()["errors"].values():
        name = msgspec.json.decode(ApiError(row[0], "x").anthropic)["error"]["type"]
        (line,) = [line for line in page.splitlines() if line.startswith("| ") and line.endswith(f"| `{name}` |")]
        assert str(row[0]) in line or name == "api_error"
