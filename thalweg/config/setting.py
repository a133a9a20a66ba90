"""One setting: a dataclass field with its help, its other spellings and its limits. The command line, YAML, Python and
the documentation are all made from it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, Iterable

from thalweg.core.errors import UnsupportedConfig

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def setting(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),  # other spellings, without dashes; "name=value" is a flag that sets this value
    foreign: tuple[str, ...] = (),  # the same of other engines: a notice says what the flag is called here
    choices: tuple[str | int, ...] = (),
    least: float | None = None,  # inclusive bounds of every number in it
    most: float | None = None,
    metavar: str = "",  # the value's name in the help
    auto: str = "",  # what `None` lets the resolver choose, in words
    secret: bool = False,  # never printed
    off: Any = ...,  # for `thalweg ablate`: the value without the feature, and one with it
    on: Any = ...,
) -> Any:
    """A dataclass field that is a setting."""
    metadata = {"help": help, "aliases": aliases, "foreign": foreign, "choices": choices, "least": least, "most": most}
    metadata |= {"metavar": metavar, "auto": auto, "secret": secret, "off": off, "on": on}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting as the command line, YAML and the documentation see it."""

    name: str
    section: str
    kind: type  # bool, int, float or str
    many: bool  # a tuple of these
    optional: bool  # None ("auto") is a value
    default: Any
    metadata: typing.Mapping[str, Any]  # the arguments of `setting`

    @property
    def help(self) -> str:
        return str(self.metadata["help"])

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def choices(self) -> tuple[Any, ...]:
        return tuple(self.metadata.get("choices", ()))

    @property
    def secret(self) -> bool:
        return bool(self.metadata.get("secret", False))

    @property
    def shown_default(self) -> str:
        """The default in words; "" where there is none to show."""
        if self.default is None:
            return str(self.metadata.get("auto", ""))
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return ", ".join(self.default) if self.many else str(self.default)

    def spellings(self, key: str) -> list[tuple[str, Any]]:
        """The (flag name without dashes, value it sets or `...`) pairs of "aliases" or "foreign"."""
        pairs = []
        for entry in self.metadata.get(key, ()):
            name, equals, value = entry.partition("=")
            pairs.append((name, self.parse(value) if equals else ...))
        return pairs

    def parse(self, value: object) -> Any:
        """The value of a text from a command line, or of a scalar or list from YAML. Raises UnsupportedConfig."""
        if self.optional and (value is None or value == "auto"):
            return None
        if self.many:
            entries = value if isinstance(value, (list, tuple)) else [value]
            return tuple(self._scalar(entry) for entry in entries)
        return self._scalar(value)

    def _scalar(self, value: object) -> Any:
        if self.kind is bool and isinstance(value, str) and value.lower() in TRUE + FALSE:
            return value.lower() in TRUE
        if self.kind is int and isinstance(value, str):
            value = _number(int, value)
        if self.kind is float and (isinstance(value, str) or type(value) is int):
            value = _number(float, value)
        if self.kind is str and type(value) in (int, float):
            value = str(value)
        if self.choices and isinstance(value, str) and value not in self.choices:
            value = next((one for one in self.choices if str(one).lower() == value.lower()), value)
        if type(value) is not self.kind:
            raise UnsupportedConfig(f"{self.name}: expected {self._expected()}, got {value!r}")
        return value

    def check(self, value: Any) -> None:
        """Raises UnsupportedConfig naming the setting when the value has the wrong type, is no choice or lies outside
        the bounds.
        """
        if value is None and self.optional:
            return
        if self.many and not isinstance(value, tuple):
            raise UnsupportedConfig(f"{self.name}: expected {self._expected()}, got {value!r}")
        for entry in value if self.many else (value,):
            self._check_one(entry)

    def _check_one(self, value: Any) -> None:
        if type(value) not in ((int, float) if self.kind is float else (self.kind,)):
            raise UnsupportedConfig(f"{self.name}: expected {self._expected()}, got {value!r}")
        if self.choices and value not in self.choices:
            raise UnsupportedConfig(f"{self.name}: must be one of {', '.join(map(str, self.choices))}; got {value!r}")
        if self.kind in (int, float):
            least, most = self.metadata.get("least"), self.metadata.get("most")
            if not math.isfinite(value) or (least is not None and value < least) or (most is not None and value > most):
                raise UnsupportedConfig(f"{self.name}: must be {_between(least, most)}, got {value}")

    def _expected(self) -> str:
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[self.kind]
        return (f"a list, each {words}" if self.many else words) + (" or auto" if self.optional else "")


def settings_of(section_type: type, section: str) -> tuple[Setting, ...]:
    """The settings of one section, in the order of its fields."""
    hints = typing.get_type_hints(section_type)
    return tuple(_setting(f, hints[f.name], section) for f in dataclasses.fields(section_type))


def check_section(section: Any) -> None:
    """For the `__post_init__` of a section: checks every field. Raises UnsupportedConfig naming the first that is
    wrong.
    """
    for one in settings_of(type(section), ""):
        one.check(vars(section)[one.name])


def _setting(field: dataclasses.Field[Any], hint: Any, section: str) -> Setting:
    optional, many = False, False
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        optional = True
    if typing.get_origin(hint) is tuple:
        hint, many = typing.get_args(hint)[0], True
    return Setting(field.name, section, hint, many, optional, field.default, field.metadata)


def _number(kind: type, text: object) -> object:
    """The number that `text` is, or the text itself (which the caller refuses by its type)."""
    try:
        return kind(text)
    except ValueError:
        return text


def _between(least: float | None, most: float | None) -> str:
    if least is None and most is None:
        return "a finite number"
    if most is None:
        return f"at least {least:g}"
    return f"at most {most:g}" if least is None else f"between {least:g} and {most:g}"


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like it; "" where none is."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), "")
