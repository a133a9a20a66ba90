"""Which scheme a configuration gives to a module, by rules of names in its own syntax."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from thalweg.core.errors import CheckpointError
from thalweg.quant.scheme import Scheme

EXPERT = re.compile(r".*\.experts(\.\d+\..*)?").fullmatch
Matcher = Callable[[str], bool]  # of a module's published name


@dataclass(frozen=True)
class Format:
    """The first rule that matches decides, else the default."""

    rules: tuple[tuple[Matcher, Scheme], ...]
    default: Scheme

    def scheme(self, module: str) -> Scheme:
        return next((scheme for matches, scheme in self.rules if matches(module)), self.default)

    def schemes(self) -> tuple[Scheme, ...]:
        """All, the default first."""
        return self.default, *(scheme for _, scheme in self.rules)


def names(value: Any, where: str) -> list[str]:
    """A list of names in a configuration, or none. Raises CheckpointError."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(f"{where} must be a list of names, got {value!r}")
    return list(value)


def by_part(listed: Iterable[str]) -> Matcher:
    """Whole components of the name, as transformers' `modules_to_not_convert`."""
    wanted = tuple(listed)
    return lambda module: any(
        module == name or module.startswith(name + ".") or f".{name}." in f".{module}." for name in wanted
    )


def by_substring(listed: Iterable[str]) -> Matcher:
    """As AutoAWQ's `modules_to_not_convert`."""
    wanted = tuple(listed)
    return lambda module: any(name in module for name in wanted)


def by_glob(listed: Iterable[str]) -> Matcher:
    """As ModelOpt and Quark; `*` crosses dots. A name without wildcards covers what is inside it."""
    wanted = tuple(listed)
    return lambda module: any(fnmatchcase(module, name) or module.startswith(name + ".") for name in wanted)


def by_pattern(listed: Iterable[str], classes: Iterable[str] = ()) -> Matcher:
    """As compressed-tensors: `re:` and a regular expression from the start, a name, or a class that all modules have.

    Raises CheckpointError for a broken expression.
    """
    patterns, exact = [], set[str]()
    for name in listed:
        if not name.startswith("re:"):
            exact.add(name)
            continue
        try:
            patterns.append(re.compile(name[3:]))
        except re.error as error:
            raise CheckpointError(f"quantization_config: {name!r} is no regular expression: {error}") from None
    is_all = bool(exact & set(classes))
    return lambda module: is_all or module in exact or any(pattern.match(module) for pattern in patterns)


def is_expert(module: str) -> bool:
    """Whether a module is a routed expert's, or all of a layer's experts."""
    return EXPERT(module) is not None


def one_of(config: Mapping[str, Any], field: str, where: str, known: Iterable[Any], default: Any = None) -> Any:
    """A field of a configuration with known values. Raises CheckpointError naming it and them."""
    value, known = config.get(field, default), list(known)
    if value not in known:
        names_known = ", ".join(map(str, known))
        raise CheckpointError(f"{where}: {field} {value!r} is not supported; there is {names_known}")
    return value


def refuse(config: Mapping[str, Any], where: str, fields: Mapping[str, str]) -> None:
    """Raises CheckpointError for a field that is set: what it means, by field."""
    for field, meaning in fields.items():
        if config.get(field):
            raise CheckpointError(f"{where}: {field} {config[field]!r} is not supported: {meaning}")
