"""The command line of the settings, made from the tree of options: names, aliases, other engines' spellings, help with
defaults.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Sequence

from thalweg.config.foreign import FLAG as FOREIGN
from thalweg.config.foreign import NO_EFFECT_FLAGS, OTHER_VALUES, instead_of, translate_speculative_config
from thalweg.config.options import Options
from thalweg.config.setting import Setting, nearest
from thalweg.config.tree import options_from, read_yaml, sections, settings, spellings
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


@dataclass(frozen=True, slots=True)
class FlagValue:
    """A setting on the command line: the flag that brought it, and its value."""

    flag: str
    value: Any


class OptionsParser(argparse.ArgumentParser):
    """argparse that says which known flag is nearest to an unknown one, and raises UnsupportedConfig instead of leaving
    the process.
    """

    def error(self, message: str) -> NoReturn:
        raise UnsupportedConfig(message)


@dataclass(frozen=True, slots=True)
class ParsedOptions:
    """What a command line said. notices: one line for each spelling that has another name here. args: the values of the
    command's own flags.
    """

    options: Options
    notices: tuple[str, ...]
    args: argparse.Namespace


def options_parser(prog: str, description: str, epilog: str = "", only: Sequence[str] = ()) -> OptionsParser:
    """A parser with the flags of the sections in `only` (default: all), grouped; a command adds its own to it."""
    parser = OptionsParser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage=f"{prog} [MODEL] [--flag value ...]",
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help=argparse.SUPPRESS)
    wanted = tuple(only) or tuple(sections())
    groups = {
        name: parser.add_argument_group(TITLES[name], _summary(kind))
        for name, kind in sections().items()
        if name in wanted
    }
    for one in settings().values():
        if one.section in groups:
            _add(groups[one.section], one)
    groups["model"].add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="settings in YAML, flat or in sections; flags on the command line win",
    )
    for flag in NO_EFFECT_FLAGS:
        name, _, value = flag.partition(" ")
        nargs: Any = {} if value else {"nargs": 0}
        parser.add_argument(f"--{name}", action=_note(flag), help=argparse.SUPPRESS, **nargs)
    if "speculative" in groups:
        parser.add_argument(FOREIGN, action=Translate, help=argparse.SUPPRESS)
    parser.set_defaults(notices=(), given=())
    return parser


def parse_options(parser: OptionsParser, argv: Sequence[str]) -> ParsedOptions:
    """Reads a command line; a YAML file given with --config lies below the flags. Raises UnsupportedConfig naming the
    flag.
    """
    found, unknown = parser.parse_known_args([_dashes(arg) for arg in argv])
    for arg in unknown:
        if not arg.startswith("-"):
            raise UnsupportedConfig(f"unexpected {arg!r}: a value stands behind its flag, and one model is served")
        flags = [flag for action in parser._actions for flag in action.option_strings]
        if instead := instead_of(arg.partition("=")[0]):
            raise UnsupportedConfig(f"unknown flag {arg}: {instead}")
        guess = nearest(arg.partition("=")[0], flags)
        raise UnsupportedConfig(
            f"unknown flag {arg}" + (f"; did you mean {guess}?" if guess else "; --help lists what there is")
        )
    values = {name: entry.value for name, entry in found.given}
    if found.positional_model is not None:
        if "model" in values:
            raise UnsupportedConfig(f"two models are given, {found.positional_model} and {values['model']}")
        values["model"] = settings()["model"].parse(found.positional_model)
    below = read_yaml(found.config) if found.config is not None else {}
    return ParsedOptions(options_from(below | values), found.notices, found)


def _dashes(arg: str) -> str:
    """--mem_fraction_static=0.8 → --mem-fraction-static=0.8"""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def _add(group: argparse._ArgumentGroup, one: Setting) -> None:
    """One setting's flags. Shown are its own name and the aliases; other engines' spellings are known but not
    listed.
    """
    flags: list[tuple[str, Any, bool]] = []
    others: list[tuple[str, Any, bool]] = []
    for name, (owner, fixed, foreign) in spellings().items():
        if owner is one:
            (flags if fixed is ... and not foreign else others).append(("--" + name.replace("_", "-"), fixed, foreign))
    names = [flag for flag, _, _ in flags]
    shown = f"{one.help.rstrip('.')} (default: {one.shown_default})" if one.shown_default else one.help
    options: dict[str, Any] = {"help": shown.replace("%", "%%"), "action": _set(one, ..., False)}
    if one.kind is bool:
        group.add_argument(*names, *(f"--no-{flag[2:]}" for flag in names), nargs=0, **options)
    else:
        group.add_argument(*names, metavar=one.metadata.get("metavar") or _metavar(one), **options)
    for flag, fixed, foreign in others:
        options = {"nargs": 0} if fixed is not ... or one.kind is bool else {}
        text = argparse.SUPPRESS if foreign else f"the same as {_called(one, fixed)}"
        group.add_argument(flag, action=_set(one, fixed, foreign), help=text, **options)


def _metavar(one: Setting) -> str:
    if one.choices:
        return "{" + ",".join(map(str, one.choices)) + "}"
    return {int: "N", float: "X", str: "TEXT"}[one.kind]


def _called(one: Setting, fixed: Any) -> str:
    """What a spelling that sets `fixed` is called here."""
    if fixed is ...:
        return one.flag
    if one.kind is bool:
        return one.flag if fixed else f"--no-{one.flag[2:]}"
    return f"{one.flag} {fixed}"


def _set(one: Setting, fixed: Any, foreign: bool) -> type[argparse.Action]:
    """The action of one spelling: records the setting's value, and a notice where the spelling is another engine's."""

    class Set(argparse.Action):
        def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, flag: str | None = None) -> None:
            new = fixed
            if fixed is ...:
                new = not str(flag).startswith("--no-") if one.kind is bool else one.parse(value)
            _record(namespace, one, str(flag), new)
            if foreign:
                namespace.notices += (f"{flag} is called {_called(one, fixed)} here",)

    return Set


def _record(namespace: argparse.Namespace, one: Setting, flag: str, new: Any) -> None:
    """Raises UnsupportedConfig where another flag has said otherwise."""
    before: dict[str, FlagValue] = dict(namespace.given)
    last = before.get(one.name)
    if last is not None and last.flag != flag and not one.many and last.value != new:
        raise UnsupportedConfig(f"{flag} and {last.flag} mean the same setting and disagree: leave one out")
    before[one.name] = FlagValue(flag, (*last.value, *new) if last is not None and one.many else new)
    namespace.given = tuple(before.items())


class Translate(argparse.Action):
    """Of a flag that stands for several settings."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, flag: str | None = None) -> None:
        found = translate_speculative_config(value)
        for name, told in found.values.items():
            one = settings()[name]
            _record(namespace, one, str(flag), one.parse(told))
        namespace.notices += found.notices


def _note(no_effect: str) -> type[argparse.Action]:
    """no_effect: a key of `NO_EFFECT_FLAGS`."""
    reason, (_, _, allowed) = NO_EFFECT_FLAGS[no_effect], no_effect.partition(" ")

    class Note(argparse.Action):
        def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, flag: str | None = None) -> None:
            if allowed and value not in (allowed, allowed.removesuffix(".0")):
                instead = OTHER_VALUES.get(no_effect, reason)
                raise UnsupportedConfig(f"{flag}: {allowed} is all it may be, got {value}: {instead}")
            namespace.notices += (f"{flag} changes nothing: {reason}",)

    return Note


def _summary(kind: type) -> str:
    return (kind.__doc__ or "").partition(". ")[0].partition("\n")[0].rstrip(".")
