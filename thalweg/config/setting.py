"""One setting: a dataclass field with its help, its other spellings and its limits. The command line, YAML, Python and
the documentation are all made from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import typing
from dataclasses import dataclass
from typing import Any, Iterable, Iterator, Mapping

from thalweg.core.errors import UnsupportedConfig

BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
CONVERTED: dict[type, tuple[type, ...]] = {bool: (), int: (str,), float: (str, int), str: (int, float)}
COMMAND_LINE = "--"  # what errors put before the name of a setting that was typed as a flag
EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting as the command line, YAML and the documentation see it."""

    help: str
    aliases: tuple[str, ...] = ()  # other spellings, without dashes; "name=value" is a flag that sets this value
    foreign: tuple[str, ...] = ()  # the same of other engines: a notice says what the flag is called here
    choices: tuple[str | int, ...] = ()
    meanings: Mapping[str | int, str] = dataclasses.field(
        default_factory=dict
    )  # of the choices, or of well-known values
    least: float | None = None  # inclusive bounds of every number in it
    most: float | None = None
    metavar: str = ""  # the value's name in the help
    auto: str = ""  # what `None` lets the resolver choose, in words
    secret: bool = False  # never printed
    off: Any = ...  # for `thalweg ablate`: the value without the feature, and one with it
    on: Any = ...
    # from the dataclass field
    name: str = ""
    section: str = ""
    kind: type = str  # bool, int, float or str
    many: bool = False  # a tuple of these
    optional: bool = False  # None ("auto") is a value
    default: Any = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def shown_default(self) -> str:
        """The default in words; "" where there is none to show."""
        if self.default in (None, ()):
            return self.auto
        if self.kind is bool:
            return "on" if self.default else "off"
        return ", ".join(self.default) if self.many else str(self.default)

    def spellings(self) -> Iterator[tuple[str, Any, bool]]:
        """Each other name without dashes, the value that it sets or `...`, and whether it is another engine's."""
        for entry in (*self.aliases, *self.foreign):
            name, equals, value = entry.partition("=")
            yield name, self.parse(value) if equals else ..., entry in self.foreign

    def called(self, value: Any) -> str:
        """The flag that sets a value; `...`: the flag alone."""
        if value is ... or value is True:
            return self.flag
        return f"--no-{self.flag[2:]}" if value is False else f"{self.flag} {value}"

    def contradiction(self, first: object, second: object, where: str = "") -> UnsupportedConfig:
        """The error for a setting that is given with two values."""
        shown = "" if self.secret else f", as {first!r} and as {second!r}"
        name = self.flag if where == COMMAND_LINE else where + self.name
        return UnsupportedConfig(f"{name}: given twice{shown}; leave one out")

    def parse(self, value: object) -> Any:
        """The value of a text from a command line, or of a scalar or list from YAML. Raises UnsupportedConfig."""
        if self.optional and (value is None or value == "auto"):
            return None
        if self.many:
            entries = list(value) if isinstance(value, (list, tuple)) else [value]
            if self.kind is int:  # 16,15 as well as 16 15
                entries = [part for one in entries for part in (one.split(",") if isinstance(one, str) else [one])]
            value = tuple(map(self._convert, entries))
        else:
            value = self._convert(value)
        self.check(value)
        return value

    def _convert(self, value: object) -> object:
        """The value in the setting's type where it can be read so, else as it is."""
        if type(value) in CONVERTED[self.kind]:
            with contextlib.suppress(ValueError):
                value = self.kind(value)
        word = str(value).lower()
        if type(value) is bool and self.kind is str:  # YAML reads `off` as false
            word = "on" if value else "off"
        if self.kind is bool and isinstance(value, str):
            return BOOLEANS.get(word, value)
        return next((choice for choice in self.choices if str(choice).lower() == word), value)

    def check(self, value: Any) -> None:
        """Raises UnsupportedConfig that names the setting for a wrong type, an unknown choice or a number out of
        bounds.
        """
        if value is None and self.optional:
            return
        known = (int, float) if self.kind is float else (self.kind,)
        entries = value if self.many and isinstance(value, tuple) else (value,)
        wrong = [entry for entry in entries if type(entry) not in known]
        if wrong or self.many != isinstance(value, tuple):
            expected = ("a list, each " if self.many else "") + EXPECTED[self.kind] + " or auto" * self.optional
            shown = "" if self.secret else f", got {(wrong or [value])[0]!r}"
            raise UnsupportedConfig(f"{self.name}: expected {expected}{shown}")
        for entry in entries:
            if self.choices and entry not in self.choices:
                names = [*map(str, self.choices)]
                guess = nearest(str(entry), names)
                instead = f"; use {guess}" * bool(guess)
                raise UnsupportedConfig(f"{self.name}: must be one of {', '.join(names)}; got {entry!r}{instead}")
            if self.kind in (int, float) and not self._is_within(entry):
                limits = {"at least": self.least, "at most": self.most}
                bounds = [f"{word} {limit:g}" for word, limit in limits.items() if limit is not None]
                raise UnsupportedConfig(f"{self.name}: must be {' and '.join(bounds) or 'finite'}, got {entry}")

    def _is_within(self, number: float) -> bool:
        is_above = self.least is None or number >= self.least
        return math.isfinite(number) and is_above and (self.most is None or number <= self.most)


def setting(default: Any, help: str, **fields: Any) -> Any:
    """A dataclass field that is a setting. fields: of `Setting`; `choices` may be a mapping that has their meanings
    too.
    """
    if isinstance(choices := fields.get("choices"), Mapping):
        fields |= {"choices": tuple(choices), "meanings": choices}
    return dataclasses.field(default=default, metadata={"setting": Setting(help=help, **fields)})


class Section:
    """Settings that belong together, a dataclass. Raises UnsupportedConfig for the first that is wrong."""

    def __post_init__(self) -> None:
        for one in settings_of(type(self), ""):
            one.check(vars(self)[one.name])


def settings_of(section_type: type, section: str) -> tuple[Setting, ...]:
    """The settings of one section, in the order of its fields."""
    hints = typing.get_type_hints(section_type)
    return tuple(_complete(f, hints[f.name], section) for f in dataclasses.fields(section_type))


def _complete(field: dataclasses.Field[Any], hint: Any, section: str) -> Setting:
    parts = typing.get_args(hint)  # of `int | None` and `tuple[int, ...]`
    declared: Setting = field.metadata["setting"]
    return dataclasses.replace(
        declared,
        name=field.name,
        section=section,
        kind=parts[0] if parts else hint,
        many=typing.get_origin(hint) is tuple,
        optional=type(None) in parts,
        default=field.default,
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like it; "" where none is."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), "")
