"""Makes `Options` from names and values: keyword arguments, a YAML file, or both with the command line on top."""

from __future__ import annotations

import functools
import logging
import re
import typing
from pathlib import Path
from typing import Any, Mapping

from thalweg.config.foreign import FOREIGN_OBJECTS, NO_EFFECT_FLAGS, instead_of, without_effect
from thalweg.config.options import Options
from thalweg.config.setting import COMMAND_LINE, Setting, nearest, settings_of
from thalweg.core.errors import UnsupportedConfig

log = logging.getLogger("thalweg.config")


@functools.cache
def sections() -> dict[str, type]:
    """The sections of `Options` by name, in order."""
    return {name: typing.cast(type, hint) for name, hint in typing.get_type_hints(Options).items()}


@functools.cache
def settings() -> dict[str, Setting]:
    """All settings by name, in the order of the tree."""
    return {one.name: one for name, kind in sections().items() for one in settings_of(kind, name)}


@functools.cache
def spellings() -> dict[str, tuple[Setting, Any, bool]]:
    """Every name (with underscores) that means a setting: (setting, the value it sets or `...`, is it another engine's
    spelling).
    """
    known: dict[str, tuple[Setting, Any, bool]] = {name: (one, ..., False) for name, one in settings().items()}
    for one in settings().values():
        for spelling, value, is_foreign in one.spellings():
            name = spelling.replace("-", "_")
            assert name not in known, f"{name} means both {known[name][0].name} and {one.name}"
            known[name] = one, value, is_foreign
    return known


def options_of(**values: Any) -> Options:
    """`Options` from settings of all sections by name or alias; text is read as on the command line.

    Raises UnsupportedConfig for an unknown name (with the nearest known one), a wrong type or a value out of bounds.
    """
    return options_from(flat(values))


def keyword_options(**values: Any) -> Options:
    """`options_of` for Python code written for vLLM or SGLang: it also takes their arguments that change nothing here,
    and those without an equal if they are off. None is the default.

    Raises UnsupportedConfig as `options_of` does, and with what to do instead of an argument that is on.
    """
    unchanging = {flag.partition(" ")[0].replace("-", "_"): flag for flag in NO_EFFECT_FLAGS}
    kept = {}
    for name, value in values.items():
        instead = instead_of(name.replace("_", "-"))
        if name in unchanging and value is not None:
            log.info("%s", without_effect(unchanging[name], value).removeprefix("--"))
        elif instead and value:
            raise UnsupportedConfig(f"{name}: {instead}")
        elif not instead and value is not None:
            kept[name] = value
    return options_of(**kept)


def options_from(values: Mapping[str, Any]) -> Options:
    """`Options` from settings by their own names; what is left out has its default."""
    parts: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    for name, value in values.items():
        parts[settings()[name].section][name] = value
    return Options(**{name: kind(**parts[name]) for name, kind in sections().items()})


def flat(tree: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Settings by their own names, from names, aliases, and sections that hold such; dashes and underscores are one.

    `where` prefixes errors, `COMMAND_LINE` for flags. Raises UnsupportedConfig as `options_of` does, and for a setting
    with two values.
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = str(key).replace("-", "_")
        if name in FOREIGN_OBJECTS:
            # keys of the object are no flags
            entries = flat(FOREIGN_OBJECTS[name].translate(value).values, where.removeprefix(COMMAND_LINE))
        elif name in sections() and (isinstance(value, Mapping) or name not in spellings()):
            entries = _section(name, value, where)
        else:
            entries = dict([_entry(name, str(key), value, where)])
        for own, parsed in entries.items():
            if isinstance(parsed, tuple) and isinstance(found.get(own), tuple):
                parsed = tuple(dict.fromkeys(found[own] + parsed))  # lists add up
            elif found.get(own, parsed) != parsed:
                raise settings()[own].contradiction(found[own], parsed, where)
            found[own] = parsed
    return found


def _section(name: str, tree: Any, where: str) -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        raise UnsupportedConfig(f"{where}{name}: a section holds settings, got {tree!r}")
    entries = flat(tree, where)
    for own in entries:
        if settings()[own].section != name:
            raise UnsupportedConfig(f"{where}{own}: belongs to the section {settings()[own].section}, not to {name}")
    return entries


def _entry(name: str, written: str, value: Any, where: str) -> tuple[str, Any]:
    """written: the name as the user wrote it."""
    if name not in spellings():
        guess = nearest(name, spellings())
        raise UnsupportedConfig(f"{where}{name}: no such setting" + (f"; did you mean {guess}?" if guess else ""))
    one, fixed, _ = spellings()[name]
    where += written
    try:
        if fixed is ...:
            return one.name, one.parse(value)
        if value is True:
            return one.name, fixed
        if value is False and isinstance(fixed, bool):
            return one.name, not fixed
    except UnsupportedConfig as error:
        raise UnsupportedConfig(where + str(error).removeprefix(one.name)) from None
    raise UnsupportedConfig(f"{where}: expected true or false, got {value!r}")


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a YAML file, flat or in sections. Raises UnsupportedConfig naming the file and what is wrong in
    it.
    """
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedConfig(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UnsupportedConfig(f"--config {path}: not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise UnsupportedConfig(f"--config {path}: expected settings such as `port: 30000`, got {type(tree).__name__}")
    return flat(tree, f"{path}: ")


def secrets_of(variables: Mapping[str, str]) -> dict[str, Any]:
    """Secret settings from environment variables, since a command line can be read by every user of the machine:
    THALWEG_API_KEY holds the key, or several by commas, and THALWEG_API_KEY_FILE names a file with one a line. Raises
    UnsupportedConfig naming the variable.
    """
    found: dict[str, Any] = {}
    for one in settings().values():
        variable = f"THALWEG_{one.name.upper().replace('-', '_')}"
        text, file = variables.get(variable), variables.get(f"{variable}_FILE")
        if not one.secret or not (text or file):
            continue
        if text and file:
            raise UnsupportedConfig(f"{variable} and {variable}_FILE: give one of them")
        if file:
            try:
                text = Path(file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UnsupportedConfig(f"{variable}_FILE: {error}") from error
        words = [word.strip() for word in re.split(r"[\n,]" if one.many else r"\n", text or "") if word.strip()]
        if not words or (len(words) > 1 and not one.many):
            raise UnsupportedConfig(f"{variable}: expected {'keys' if one.many else 'one line'}, got {len(words)}")
        found |= flat({one.name: words if one.many else words[0]}, f"{variable}: ")
    return found


def non_defaults(config: Options) -> dict[str, Any]:
    """The settings that differ from their defaults, by name: `options_of(**non_defaults(config)) == config`."""
    values = {one.name: vars(vars(config)[one.section])[one.name] for one in settings().values()}
    return {name: value for name, value in values.items() if value != settings()[name].default}


def command_line(values: Mapping[str, Any]) -> list[str]:
    """The flags that set these values. Secrets are left out."""
    words: list[str] = []
    for name, value in values.items():
        one = settings()[name]
        for entry in () if one.secret else value if one.many else (value,):
            words += [one.called(entry)] if one.kind is bool else [one.flag, str(entry)]
    return words


def replace(config: Options, **values: Any) -> Options:
    """`Options` with some settings changed."""
    return options_from(non_defaults(config) | flat(values))
