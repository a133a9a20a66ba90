"""The tables of fields and errors on the API pages, against the structs and the server's source."""

from __future__ import annotations

import msgspec
import pytest

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
