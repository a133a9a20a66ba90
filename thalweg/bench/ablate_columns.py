"""What `thalweg ablate` turns off and on: columns, made from what the resolver decides, and the levels that each of
them can have.

A setting is a feature where it declares an `off` value, or where it is a switch that the resolver decides. So a new
feature has its column as soon as it has its setting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from thalweg.config.machine import Machine
from thalweg.config.setting import Setting, nearest
from thalweg.config.tree import options_of, settings
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.report import Report
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved

AS_IT_IS = ...  # the wish of a level that wishes nothing: what the base has
SHORT = {
    "graph": "cuda_graph_mode",
    "radix": "radix_cache",
    "attention": "attention_backend",
    "nextn": "speculative_algorithm",
    "ep": "ep_size",
    "dp-attention": "dp_size",
    "overlap": "overlap_schedule",
    "mla": "mla",
    "tp": "tp_size",
    "pp": "pp_size",
    "kv": "kv_cache_dtype",
    "moe": "moe_runner_backend",
    "fp8-gemm": "fp8_gemm_backend",
    "chunk": "chunked_prefill_size",
    "policy": "schedule_policy",
    "deterministic": "deterministic_inference",
    "strip-thinking": "strip_thinking_cache",
}
OFF, ON = "off", "on"


@dataclass(frozen=True, slots=True)
class Level:
    """One state of a column. wish: the setting's value, AS_IT_IS where the base has it already. value: what it comes
    to, in words.
    """

    label: str
    wish: Any
    value: str


@dataclass(frozen=True, slots=True)
class Column:
    """name: its heading. setting: which it sets. levels: the first is the one without. base: label of what the base
    has.
    """

    name: str
    setting: str
    levels: tuple[Level, ...]
    base: str

    def wishes(self, level: Level) -> dict[str, Any]:
        return {} if level.wish is AS_IT_IS else {self.setting: level.wish}


class Probe:
    """Asks the resolver what becomes of wishes on top of the base's. machine: one look at it for all, so that they
    differ by wishes alone.
    """

    def __init__(self, base: Mapping[str, Any], machine: Machine, found: Callable[..., Resolved] = resolve) -> None:
        self.base, self.machine, self._resolve = dict(base), machine, found
        self._known: dict[str, Resolved | str] = {}

    def __call__(self, wishes: Mapping[str, Any]) -> Resolved | str:
        """What is resolved, or why it cannot be served. Raises CheckpointError."""
        key = repr(sorted(wishes.items()))
        if key not in self._known:
            try:
                self._known[key] = self._resolve(options_of(**{**self.base, **wishes}), self.machine, weights=False)
            except UnsupportedConfig as error:
                self._known[key] = str(error)
        return self._known[key]

    def start(self) -> Resolved:
        """The base itself. Raises UnsupportedConfig where it cannot be served."""
        found = self({})
        if isinstance(found, str):
            raise UnsupportedConfig(found)
        return found

    def alike(self, wishes: Mapping[str, Any]) -> bool:
        """Whether these wishes make the base's very engine."""
        found = self(wishes)
        return not isinstance(found, str) and _engine(found) == _engine(self.start())


def _engine(resolved: Resolved) -> object:
    return msgspec.structs.replace(resolved.engine, report=Report(), random_seed=0), resolved.chat.strip


def features(base: Resolved) -> list[str]:
    """Settings that are features: those that the resolver decided for this base, in its order, then the others that
    declare an off value.
    """
    known = settings()
    decided = [one.name for one in base.decisions if one.name in known]
    named = [*decided, *known]
    return list(dict.fromkeys(name for name in named if _off(known[name], name in decided) is not AS_IT_IS))


def _off(one: Setting, decided: bool) -> Any:
    """The value without the feature, AS_IT_IS for what is none."""
    declared = one.metadata["off"]
    return False if declared is ... and one.kind is bool and decided else declared


def columns(asked: Sequence[str], probe: Probe) -> list[Column]:
    """The columns of a table. asked: short names or settings, each alone or as name=value,value; none is every feature
    that there is.

    Raises UnsupportedConfig for a base that cannot be served, an unknown name, one that is given twice, and a setting
    that is no feature and has no values given.
    """
    base = probe.start()
    long = {setting: name for name, setting in SHORT.items()}
    made: dict[str, Column] = {}
    for word in asked or [long.get(name, name) for name in features(base)]:
        name, given, values = word.partition("=")
        setting = _setting(name)
        if setting in made:
            raise UnsupportedConfig(
                f"--columns {name}: given twice; a column holds all values: {name}=VALUE,VALUE,VALUE"
            )
        made[setting] = _explicit(name, setting, values, base) if given else _switch(name, setting, probe)
    return list(made.values())


def _setting(name: str) -> str:
    """The setting that a column's name stands for. Raises UnsupportedConfig naming the nearest that there is."""
    setting = SHORT.get(name, name.removeprefix("--").replace("-", "_"))
    if setting not in settings():
        guess = nearest(name, [*SHORT, *settings()])
        raise UnsupportedConfig(
            f"--columns {name}: no such setting; "
            + (
                f"did you mean {guess}?"
                if guess
                else f"short names are {', '.join(SHORT)}, and any setting's name will do"
            )
        )
    return setting


def _explicit(name: str, setting: str, values: str, base: Resolved) -> Column:
    levels = tuple(Level(value, value, value) for value in values.split(",") if value)
    if len(levels) < 2:
        raise UnsupportedConfig(
            f"--columns {name}={values}: a column compares two values or more, e.g. kv=bfloat16,fp8_e4m3"
        )
    return Column(name, setting, levels, _value(setting, base))


def _switch(name: str, setting: str, probe: Probe) -> Column:
    """Off and on, one of which is what the base has."""
    one = settings()[setting]
    off, has = _off(one, decided=True), _value(setting, probe.start())
    if off is AS_IT_IS:
        raise UnsupportedConfig(
            f"--columns {name}: {setting} is a size and no feature that can be off; compare values: {name}=VALUE,VALUE"
        )
    if not probe.alike({setting: off}):
        return Column(name, setting, (Level(OFF, off, _shown(off)), Level(ON, AS_IT_IS, has)), ON)
    on = True if one.kind is bool else one.metadata["on"]
    return Column(name, setting, (Level(OFF, AS_IT_IS, has), Level(ON, on, _shown(on))), OFF)


def _value(setting: str, base: Resolved) -> str:
    """What the base has, in words."""
    decided = next((one.value for one in base.decisions if one.name == setting), None)
    return _shown(settings()[setting].default if decided is None else decided)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return ON if value else OFF
    return "auto" if value is None else str(value)
