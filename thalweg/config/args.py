"""The command line of the settings, made from the tree of options: names, aliases, other engines' spellings, help with
defaults.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Sequence

from thalweg.config.bundled import NAME, NOTICE, find_bundled
from thalweg.config.foreign import FOREIGN_OBJECTS, NO_EFFECT_FLAGS, instead_of, without_effect
from thalweg.config.options import Options
from thalweg.config.setting import COMMAND_LINE, Setting, nearest
from thalweg.config.tree import flat, options_from, read_yaml, secrets_of, sections, settings, spellings
from thalweg.core.errors import UnsupportedConfig

TITLES = {
    "model": "Model",
    "load": "Loading",
    "memory": "Memory",
    "schedule": "Scheduling",
    "sampling": "Sampling defaults",
    "speculative": "Speculative decoding",
    "parallel": "Several devices",
    "listen": "Address",
    "server": "HTTP server",
}
ENGINE = ("model", "load", "memory", "schedule", "sampling", "speculative", "parallel")  # sections without a server's
PREFIX = "setting "  # of argparse's names for settings; a command's own flags have none
SWITCH: dict[str, Any] = {"action": "store_const", "const": True}
METAVARS = {int: "N", float: "X", str: "TEXT"}


class HelpLayout(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the epilog, and a choice of a flag on a line of its own."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        lines = (
            textwrap.wrap(line, width, subsequent_indent="  " * bool(i)) for i, line in enumerate(text.split("\n"))
        )
        return [part for line in lines for part in line]


class OptionsParser(argparse.ArgumentParser):
    """argparse that raises UnsupportedConfig instead of leaving the process."""

    def __init__(self, prog: str, description: str, epilog: str, usage: str) -> None:
        super().__init__(prog, usage, description, epilog, formatter_class=HelpLayout, allow_abbrev=False)
        self.own = self.add_argument_group("This command")  # first in the help
        self.takes_words = False  # after the model

    def error(self, message: str) -> NoReturn:
        raise UnsupportedConfig(message)


class _Store(argparse.Action):
    """Stores a value under the flag that gave it, so that `flat` compares the spellings of a setting."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, flag: str | None = None) -> None:
        name = str(flag)[2:]
        if self.nargs == 0:
            name, value = name.removeprefix("no-"), not name.startswith("no-")
            if getattr(namespace, PREFIX + name, None) is (not value):
                raise spellings()[name.replace("-", "_")][0].contradiction(not value, value, COMMAND_LINE)
        setattr(namespace, PREFIX + name, value)


@dataclass(frozen=True, slots=True)
class ParsedOptions:
    """A command line."""

    options: Options
    notices: tuple[str, ...]  # one line for each spelling that has another name here
    args: argparse.Namespace  # with the values of the command's own flags
    words: tuple[str, ...] = ()  # that follow the model


def options_parser(
    prog: str, description: str, epilog: str = "", only: Sequence[str] = (), words: str = ""
) -> OptionsParser:
    """A parser with the flags of the sections in `only` (default: all), grouped; a command adds its own to it. words:
    the name of what may follow the model ("": nothing).
    """
    parser = OptionsParser(prog, description, epilog, f"{prog} [MODEL]{words and f' [{words}]'} [--flag value ...]")
    parser.takes_words = bool(words)
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help=argparse.SUPPRESS)
    for name, kind in sections().items():
        if only and name not in only:
            continue
        group = parser.add_argument_group(TITLES[name], (kind.__doc__ or "").partition(".")[0])
        for one in settings().values():
            if one.section == name:
                add_setting(group, one)
        if name == "model":
            text = "settings in YAML, flat or in sections; flags on the command line win"
            group.add_argument("--config", metavar="FILE", type=Path, help=text)
    for known in FOREIGN_OBJECTS.values():
        parser.add_argument(known.flag, dest=PREFIX + known.name, help=argparse.SUPPRESS)
    for flag in NO_EFFECT_FLAGS:
        name, _, value = flag.partition(" ")
        parser.add_argument(f"--{name}", dest=PREFIX + flag, help=argparse.SUPPRESS, **({} if value else SWITCH))
    return parser


def parse_options(parser: OptionsParser, argv: Sequence[str], needs_model: bool = False) -> ParsedOptions:
    """Reads a command line; a YAML file given with --config lies below the flags. needs_model: take the bundled one
    where none is given. Raises UnsupportedConfig naming the flag.
    """
    args, unknown = parser.parse_known_args(list(_one_value_each([_dashes(arg) for arg in argv])))
    words = tuple(arg for arg in unknown if parser.takes_words and not arg.startswith("--"))
    for arg in unknown:
        if arg not in words:
            _refuse(arg, parser)
    values = {name.removeprefix(PREFIX): value for name, value in vars(args).items() if name.startswith(PREFIX)}
    given = {name: value for name, value in values.items() if value is not None}
    notices = tuple(_notices(given))
    own = vars(args)
    model = own.get("positional_model")
    if model and parser.takes_words and " " in model and not Path(model).exists():  # a prompt, for the bundled model
        words = (model, *words)
    elif model is not None:
        given["model-path"] = model
    below = read_yaml(args.config) if own.get("config") is not None else {}
    above = flat({name: value for name, value in given.items() if name not in NO_EFFECT_FLAGS}, COMMAND_LINE)
    values = below | secrets_of(os.environ) | above
    if needs_model and not (values.get("model") or own.get("base_url") or own.get("trace")):
        values["model"], notices = NAME, (*notices, NOTICE)
    values |= {"model": find_bundled(values["model"])} if "model" in values else {}
    return ParsedOptions(options_from(values), notices, args, words)


def _refuse(arg: str, parser: OptionsParser) -> NoReturn:
    """Raises UnsupportedConfig for a word that the parser does not know."""
    if not arg.startswith("-"):
        raise UnsupportedConfig(f"unexpected {arg!r}: a value follows its flag, and one model is served")
    flag = arg.partition("=")[0]
    if instead := instead_of(flag):
        raise UnsupportedConfig(f"{flag}: {instead}")
    guess = nearest(flag, parser._option_string_actions)
    raise UnsupportedConfig(f"unknown flag {arg}" + (f"; did you mean {guess}?" if guess else "; see --help"))


def _notices(given: dict[str, Any]) -> Iterator[str]:
    """Raises UnsupportedConfig for another value of a flag that has one alone."""
    for name, value in given.items():
        if name in NO_EFFECT_FLAGS:
            yield without_effect(name, value)
        elif name in FOREIGN_OBJECTS:
            yield from FOREIGN_OBJECTS[name].translate(value).notices
        else:
            one, fixed, is_foreign = spellings()[name.replace("-", "_")]
            if one.secret:
                variable = f"THALWEG_{one.name.upper()}"
                yield f"--{name} can be read by every user of this machine: set {variable} or {variable}_FILE instead"
            if is_foreign:
                yield f"--{name} is called {one.called(fixed)} here"


def _one_value_each(argv: Sequence[str]) -> Iterator[str]:
    """--cuda-graph-bs 1 2 → --cuda-graph-bs 1 --cuda-graph-bs 2"""
    lists = [one for one in settings().values() if one.many and one.kind is int]
    many = {flag for one in lists for flag in (one.flag, *(f"--{name}" for name, *_ in one.spellings()))}
    flag, before = "", ""
    for arg in argv:
        if flag and arg.isdecimal() and before != flag:
            yield flag
        elif not arg.isdecimal():
            name = arg.partition("=")[0]
            flag = name if name in many else ""
        yield arg
        before = arg


def _dashes(arg: str) -> str:
    """--mem_fraction_static=0.8 → --mem-fraction-static=0.8"""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def add_setting(group: argparse._ArgumentGroup, one: Setting) -> None:
    """One setting's flags. Shown are its own name and the aliases; other engines' spellings are known but not
    listed.
    """
    taken: dict[str, Any] = {"action": _Store, "nargs": 0}
    if one.kind is not bool:
        choices = "{" + ",".join(map(str, one.choices)) + "}" if one.choices else METAVARS[one.kind]
        taken = {"action": "append" if one.many else _Store, "metavar": one.metavar or choices}
    default = f" (default: {one.shown_default})" if one.shown_default else ""
    meanings = "".join(f"\n{name}: {meaning}" for name, meaning in one.meanings.items())
    text = ((one.help.rstrip(".") + default if default else one.help) + meanings).replace("%", "%%")
    others = [(f"--{name}", value, is_foreign) for name, value, is_foreign in one.spellings()]
    aliases = [flag for flag, value, is_foreign in others if value is ... and not is_foreign]

    def add(flags: Sequence[str], dest: str, text: str) -> None:
        negative = [f"--no-{flag[2:]}" for flag in flags if one.kind is bool]
        group.add_argument(*flags, *negative, dest=PREFIX + dest, help=text, **taken)

    add([one.flag, *aliases], one.name, text)
    for flag, value, is_foreign in others:
        if flag not in aliases:
            text = argparse.SUPPRESS if is_foreign else f"the same as {one.called(value)}"
            if value is ...:
                add([flag], flag[2:], text)
            else:
                group.add_argument(flag, dest=PREFIX + flag[2:], help=text, **SWITCH)
