"""The columns of an ablation, made from what the resolver decides, their levels, and the cells of each mode.

A setting is a feature where it declares an `off` value, or where it is a switch that the resolver decides. So a new
feature has its column as soon as it has its setting.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from thalweg.bench.display import fields
from thalweg.config.machine import Machine
from thalweg.config.setting import Setting, nearest
from thalweg.config.tree import options_of, settings
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.report import Report
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved

UNCHANGED = ...  # the wish of a level that the base has already
SHORT = fields("""
graph           cuda_graph_mode
radix           radix_cache
attention       attention_backend
nextn           speculative_algorithm
ep              ep_size
eplb            enable_eplb
a2a             moe_a2a_backend
shared-fusion   shared_experts_fusion
dp              dp_size
dp-attention    enable_dp_attention
overlap         overlap_schedule
mla             mla
tp              tp_size
pp              pp_size
dcp             dcp_size
cp              attn_cp_size
kv              kv_cache_dtype
moe             moe_runner_backend
fp8-gemm        fp8_gemm_backend
chunk           chunked_prefill_size
policy          schedule_policy
deterministic   deterministic_inference
strip-thinking  strip_thinking_cache
""")
OFF, ON = "off", "on"
ONE, LADDER, MATRIX = "one-at-a-time", "ladder", "matrix"
TOGETHER = {ONE: 1, "pairs": 2, "triples": 3}  # mode → most columns that a cell changes
MODES = (*TOGETHER, LADDER, MATRIX)


class ColumnLevel(NamedTuple):
    """One state of a column."""

    label: str
    wish: Any  # the setting's value; UNCHANGED where the base has it
    value: str  # that it resolves to, in words
    others: Mapping[str, Any] = MappingProxyType({})  # wishes of other settings, without which it is something else


class AblationColumn(NamedTuple):
    name: str  # its heading
    setting: str
    levels: tuple[ColumnLevel, ...]  # the first is the one without the feature
    base: str  # label of the base's level

    def wishes(self, level: ColumnLevel) -> dict[str, Any]:
        return {} if level.wish is UNCHANGED else {**level.others, self.setting: level.wish}

    def as_json(self) -> dict[str, Any]:
        levels = {"levels": [level.label for level in self.levels], "values": [level.value for level in self.levels]}
        return {"name": self.name, "setting": self.setting, "base": self.base, **levels}


class SettingsProbe:
    """Resolves wishes on top of the base's. machine: the same for all, so that results differ by wishes alone."""

    def __init__(self, base: Mapping[str, Any], machine: Machine) -> None:
        self.base, self.machine = dict(base), machine
        self._known: dict[str, Resolved | str] = {}

    def __call__(self, wishes: Mapping[str, Any]) -> Resolved | str:
        """The resolved settings, or why they cannot be served. Raises CheckpointError."""
        key = repr(sorted(wishes.items()))
        if key not in self._known:
            try:
                self._known[key] = resolve(options_of(**{**self.base, **wishes}), self.machine, weights=False)
            except UnsupportedConfig as error:
                self._known[key] = str(error)
        return self._known[key]

    def start(self) -> Resolved:
        """The base itself. Raises UnsupportedConfig where it cannot be served."""
        resolved = self({})
        if isinstance(resolved, str):
            raise UnsupportedConfig(resolved)
        return resolved

    def same_as_base(self, wishes: Mapping[str, Any]) -> bool:
        """Whether these wishes give the base's engine."""
        resolved = self(wishes)
        return not isinstance(resolved, str) and _engine(resolved) == _engine(self.start())


def _engine(resolved: Resolved) -> object:
    return msgspec.structs.replace(resolved.engine, report=Report(), random_seed=0), resolved.chat.strip


def features(base: Resolved) -> list[str]:
    """Settings that are features: those that the resolver decided for this base, in its order, then the others that
    declare an off value.
    """
    known = settings()
    decided = [decision.name for decision in base.decisions if decision.name in known]
    names = dict.fromkeys((*decided, *known))
    return [name for name in names if _off(known[name], name in decided) is not UNCHANGED]


def _off(setting: Setting, decided: bool) -> Any:
    """The value without the feature; UNCHANGED for a setting that is none."""
    declared = setting.off
    return False if declared is UNCHANGED and setting.kind is bool and decided else declared


def columns(words: Sequence[str], probe: SettingsProbe) -> list[AblationColumn]:
    """words: short names or settings, each alone or as name=value,value; none is every feature.

    Raises UnsupportedConfig for a base that cannot be served, an unknown or repeated name, and a setting that is no
    feature and has no values.
    """
    base, short = probe.start(), {setting: name for name, setting in SHORT.items()}
    found: dict[str, AblationColumn] = {}
    for word in words or [short.get(name, name) for name in features(base)]:
        name, has_values, values = word.partition("=")
        setting = _setting(name)
        if setting in found:
            raise UnsupportedConfig(f"--columns {name}: given twice; a column has all values: {name}=VALUE,VALUE,VALUE")
        found[setting] = _of_values(name, setting, values, base) if has_values else _of_feature(name, setting, probe)
    return list(found.values())


def _setting(name: str) -> str:
    """The setting of a column's name. Raises UnsupportedConfig that suggests the nearest."""
    setting = SHORT.get(name, name.removeprefix("--").replace("-", "_"))
    if setting in settings():
        return setting
    guess = nearest(name, [*SHORT, *settings()])
    known = f"did you mean {guess}?" if guess else f"short names are {', '.join(SHORT)}; any setting's name works"
    raise UnsupportedConfig(f"--columns {name}: no such setting; {known}")


def _of_values(name: str, setting: str, values: str, base: Resolved) -> AblationColumn:
    levels = tuple(ColumnLevel(value, value, value) for value in values.split(",") if value)
    if len(levels) < 2:
        raise UnsupportedConfig(
            f"--columns {name}={values}: a column compares two values or more, e.g. kv=bfloat16,fp8_e4m3"
        )
    return AblationColumn(name, setting, levels, _base_value(setting, base))


def _of_feature(name: str, setting: str, probe: SettingsProbe) -> AblationColumn:
    """Off and on; the base has one of them."""
    declared = settings()[setting]
    off, has = _off(declared, decided=True), _base_value(setting, probe.start())
    if off is UNCHANGED:
        raise UnsupportedConfig(
            f"--columns {name}: {setting} is a size and no feature that can be off; compare values: {name}=VALUE,VALUE"
        )
    parallel = _parallel(setting, probe.start())
    if not probe.same_as_base({setting: off, **parallel.off}):
        levels = ColumnLevel(OFF, off, _words(off), parallel.off), ColumnLevel(ON, UNCHANGED, has)
        return AblationColumn(name, setting, levels, ON)
    on = parallel.on.get(setting, True if declared.kind is bool else declared.on)
    levels = ColumnLevel(OFF, UNCHANGED, has), ColumnLevel(ON, on, _words(on), parallel.on)
    return AblationColumn(name, setting, levels, OFF)


class _Parallel(NamedTuple):
    """Wishes that belong to the levels of a setting."""

    off: Mapping[str, Any] = MappingProxyType({})
    on: Mapping[str, Any] = MappingProxyType({})


def _parallel(setting: str, base: Resolved) -> _Parallel:
    """Of the layouts of several processes: what makes a column of one setting what its name says. Data-parallel
    attention has one process a rank, and the experts are divided over all processes: those of the base, or two.
    """
    size = max(base.engine.tp_size, 2)
    match setting:
        case "dp_size":
            return _Parallel({"enable_dp_attention": False}, {"enable_dp_attention": False})
        case "enable_dp_attention":
            return _Parallel({"dp_size": 1}, {"tp_size": size, "dp_size": size})
        case "attn_cp_size" | "dcp_size":
            return _Parallel(on={"tp_size": size})
        case "ep_size":
            return _Parallel(on={"tp_size": size, "ep_size": size})
        case "enable_eplb" | "moe_a2a_backend" if base.engine.ep_size == 1:
            return _Parallel(on={"tp_size": size, "ep_size": size})
    return _Parallel()


def _base_value(setting: str, base: Resolved) -> str:
    decided = next((one.value for one in base.decisions if one.name == setting), None)
    return _words(settings()[setting].default if decided is None else decided)


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return ON if value else OFF
    return "auto" if value is None else str(value)


class AblationCell(NamedTuple):
    """One combination of levels."""

    labels: Mapping[str, str]  # of each column's level
    wishes: Mapping[str, Any]  # settings on top of the base's
    reason: str  # why it cannot run; "" where it can
    decisions: Mapping[str, Any]  # the resolver's, by name

    @property
    def key(self) -> str:
        """Equal for equal wishes."""
        return json.dumps(self.wishes, sort_keys=True, default=str)


Levels = dict[str, ColumnLevel]  # by column; the others are as in the base


def cells(mode: str, columns: Sequence[AblationColumn], probe: SettingsProbe) -> list[AblationCell]:
    """The cells of a mode, each once: the base and up to one, two or three columns changed; everything off and then one
    column after the other on; every combination, the base first where it is one of them.
    """
    found: dict[str, AblationCell] = {}

    def add(chosen: Levels) -> AblationCell:
        cell = _cell(columns, chosen, probe)
        return found.setdefault(cell.key, cell)

    if mode == MATRIX:
        ordered = [sorted(column.levels, key=lambda level: level.label != column.base) for column in columns]
        for levels in itertools.product(*ordered):
            add({column.name: level for column, level in zip(columns, levels, strict=True)})
        return list(found.values())
    if mode in TOGETHER:
        others = [(column.name, level) for column in columns for level in _changes(column, probe)]
        for count in range(TOGETHER[mode] + 1):
            for changes in itertools.combinations(others, count):
                if len(dict(changes)) == count:  # of different columns
                    add(dict(changes))
        return list(found.values())
    chosen = {column.name: column.levels[0] for column in columns}
    add(chosen)
    for column in columns:
        for level in column.levels:
            changed = {**chosen, column.name: level}
            if not add(changed).reason:  # the next steps do without a level that cannot run
                chosen = changed
    return list(found.values())


def _changes(column: AblationColumn, probe: SettingsProbe) -> list[ColumnLevel]:
    """The levels that give another engine than the base."""
    others = (level for level in column.levels if level.label != column.base)
    return [level for level in others if not probe.same_as_base(column.wishes(level))]


def _cell(columns: Sequence[AblationColumn], chosen: Levels, probe: SettingsProbe) -> AblationCell:
    wishes: dict[str, Any] = {}
    for column in columns:
        if column.name in chosen:
            wishes |= column.wishes(chosen[column.name])
    labels = {column.name: chosen[column.name].label if column.name in chosen else column.base for column in columns}
    resolved = probe(wishes)
    if isinstance(resolved, str):
        return AblationCell(labels, wishes, resolved, {})
    return AblationCell(labels, wishes, "", {one.name: one.value for one in resolved.decisions})
