"""docs/migrating.md against the code: every flag, spelling, notice and route that it names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from thalweg.config.args import options_parser, parse_options
from thalweg.config.foreign import EQUAL, HISPARSE_EQUAL, HISPARSE_WITHOUT, NO_EFFECT_FLAGS, UNSUPPORTED_FLAGS, WITHOUT
from thalweg.config.setting import Setting
from thalweg.config.tree import settings, spellings
from thalweg.core.errors import UnsupportedConfig
from thalweg.launch.resolve import PARSER_NAMES
from thalweg.quant.catalog import METHODS
from thalweg.text.parser import REASONING_FORMATS, TOOL_FORMATS

PAGE = (Path(__file__).parents[2] / "docs/migrating.md").read_text(encoding="utf-8")
PARSER = options_parser("thalweg serve", "")
FLAG = re.compile(r"`(--[\w-]+)")
OURS = {flag for action in PARSER._actions for flag in action.option_strings}


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    lines = [line for line in section(title).splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def sample(one: Setting) -> str:
    """A value that the setting takes."""
    if one.choices:
        return str(one.choices[0])
    if one.kind in (int, float):
        return str(one.kind(one.least or 1))
    return "x"


RENAMED = rows("Flags with another name here")


@pytest.mark.parametrize("row", RENAMED, ids=[row[0].strip("`") for row in RENAMED])
def test_a_spelling_sets_what_the_page_says(row: list[str]) -> None:
    typed, here = row[0].strip("`"), row[1].strip("`")
    one, value, foreign = spellings()[typed[2:].replace("-", "_")]
    assert foreign == (row[3] == "yes")
    words = [typed] if value is not ... else [typed, sample(one)]
    by_theirs, by_ours = parse_options(PARSER, words), parse_options(PARSER, [*here.split(), *words[1:]])
    assert by_theirs.options == by_ours.options and not by_ours.notices
    assert by_theirs.notices == ((f"{typed} is called {here} here",) if foreign else ())


def test_every_spelling_has_its_row() -> None:
    others = {"--" + name.replace("_", "-") for name, (one, *_) in spellings().items() if name != one.name}
    assert others == {row[0].strip("`") for row in RENAMED}
    habits = {f"--{flag}": reason for flag, reason in NO_EFFECT_FLAGS.items()}
    shown = {row[0].strip("`"): row[1] for row in rows("Flags that are taken and change nothing")}
    assert shown == habits


@pytest.mark.parametrize("habit", NO_EFFECT_FLAGS)
def test_an_ignored_flag_changes_nothing_and_says_so(habit: str) -> None:
    name, _, value = habit.partition(" ")
    for some in value.split(" or "):
        parsed = parse_options(PARSER, [f"--{name}", *([some] if some else [])])
        assert parsed.options == parse_options(PARSER, []).options
        assert parsed.notices == (f"--{name} changes nothing: {NO_EFFECT_FLAGS[habit]}",)
    if value:
        with pytest.raises(UnsupportedConfig, match=f"^--{name}: {re.escape(value)} is all it may be, got shortest"):
            parse_options(PARSER, [f"--{name}", "shortest"])


def test_absent_flags_have_their_rows() -> None:
    shown = {flag for row in rows("Flags that are not here") for flag in FLAG.findall(row[0])}
    assert shown == {f"--{flag}" for flag in UNSUPPORTED_FLAGS}


def test_same_names_are_our_names() -> None:
    same = section("Flags with the same name")
    names = set(FLAG.findall(same))
    assert len(names) > 40 and names <= {one.flag for one in settings().values()} | {"--config"}


def test_flags_that_are_not_here_are_refused_and_their_substitutes_exist() -> None:
    for missing, instead in rows("Flags that are not here"):
        for flag in FLAG.findall(missing):
            assert flag not in OURS, f"{flag} exists now"
            with pytest.raises(UnsupportedConfig, match=f"^{flag}: {re.escape(instead.replace('`', ''))}$"):
                parse_options(PARSER, [flag])
        assert set(FLAG.findall(instead)) <= OURS, instead


def test_every_other_flag_on_the_page_exists() -> None:
    rest = PAGE.replace(section("Flags that are not here"), "").replace(section("Flags with another name here"), "")
    assert set(FLAG.findall(rest)) <= OURS


def test_the_example_lines_are_understood() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("thalweg serve")]
    notices = [parse_options(PARSER, shlex.split(line)[2:]).notices for line in lines]
    assert [len(one) for one in notices] == [0, 4, 2]
    keys = {key for row in rows("`--speculative-config`") for key in re.findall(r"`(\w+)`", row[0])}
    assert keys == {*EQUAL, *WITHOUT}
    keys = {key for row in rows("`--hisparse-config`") for key in re.findall(r"`(\w+)`", row[0])}
    assert keys == {*HISPARSE_EQUAL, *HISPARSE_WITHOUT}


def test_parser_names_of_other_engines_map_to_ours() -> None:
    for flag, names in PARSER_NAMES.items():
        (row,) = [row for row in rows("Flags with the same name") if row[0] == f"`--{flag.replace('_', '-')}`"]
        assert {f"`{name}`" for pair in names.items() for name in pair} <= set(re.findall(r"`[^`]+`", row[1]))
    assert set(PARSER_NAMES["reasoning_parser"].values()) <= set(REASONING_FORMATS)
    assert set(PARSER_NAMES["tool_call_parser"].values()) <= set(TOOL_FORMATS)


def test_names_of_formats_that_are_taken_have_their_row() -> None:
    (row,) = [row for row in rows("Flags with the same name") if row[0] == "`--quantization`"]
    taken, _, absent = row[1].partition(";")
    known = set(settings()["quantization"].choices)
    assert set(re.findall(r"`(\w[^`]+)`", taken)) <= known
    assert known - {*METHODS, "none"} <= set(re.findall(r"`([^`]+)`", taken))
    assert not known & set(re.findall(r"`([^`]+)`", absent))


def test_documented_routes_exist_and_absent_ones_do_not() -> None:
    from thalweg.server.app import METRICS, ROUTES

    ours = {f"{route.method} {route.path}" for route in (*ROUTES, METRICS)}
    named = {row[2].strip("`") for row in rows("Routes")}
    assert named and named <= ours
    absent = re.findall(r"`(/[\w/{}]+)`", section("Routes").partition("Not here:")[2])
    assert len(absent) > 10 and not set(absent) & {route.path for route in ROUTES}
