"""Tables of an ablation: rates with their range over rounds, ratios with their interval, and a mark for possible noise."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree

import pytest

from thalweg.bench.ablation_tables import cell_table, digest, effects, figure, markdown, save_plot, sglang_table
from thalweg.bench.plots import Bars


def round_of(rate: float, **more: Any) -> dict[str, Any]:
    batch = {"concurrency": 8, "requests": 16, "throughput": 100 * rate, "decode_per_request": rate / 2}
    return {"single": {"decode_tokens_per_s": rate}, "batches": [batch], **more}


def made() -> dict[str, Any]:
    """A matrix of two columns, one round."""
    names = [
        {"name": name, "setting": setting, "base": "on", "levels": ["off", "on"], "values": ["off", "on"]}
        for name, setting in (("graph", "cuda_graph_mode"), ("radix", "radix_cache"))
    ]
    rows = []
    for graph, radix, rate in (("on", "on", 80.0), ("on", "off", 40.0), ("off", "on", 10.0), ("off", "off", 20.0)):
        row: dict[str, Any] = {
            "columns": {"graph": graph, "radix": radix},
            "status": "done",
            "reason": "",
            "accuracy": [],
        }
        row |= {"decisions": {}, "wishes": {"cuda_graph_mode": "full" if graph == "on" else "none"}}
        row["wishes"] |= {"radix_cache": radix == "on"}
        rows.append(row | round_of(rate))
    work = {"input_len": 760, "output_len": 460, "spread": 0.5, "waves": 2, "shared_prefix": 0, "concurrency": [8]}
    device = {"gpus": ["H100"], "cores": 2, "cpu": "x"}
    settings = {
        "cuda_graph_mode": "full",
        "radix_cache": True,
        "speculative_algorithm": "NONE",
        "max_running_requests": 8,
    }
    report = {"decisions": {name: {"value": value} for name, value in settings.items()}}
    head = {"checkpoint": "m", "mode": "matrix", "columns": names, "configuration": report}
    return head | {"cells": rows, "workload": work, "device": device}


def alone(without: list[float], with_it: list[float]) -> dict[str, Any]:
    """One column, so many rounds of the cell without and with it."""
    result = made() | {"mode": "one-at-a-time"}
    result["columns"] = result["columns"][:1]
    result["cells"] = []
    for label, rates in (("on", with_it), ("off", without)):
        row = {"columns": {"graph": label}, "status": "done", "reason": "", "accuracy": [], **round_of(rates[0])}
        row |= {"decisions": {}, "wishes": {"cuda_graph_mode": "full" if label == "on" else "none"}}
        row["again"] = [round_of(rate, round=turn) for turn, rate in enumerate(rates[1:], 1)]
        result["cells"].append(row)
    return result


def test_a_columns_effect_is_the_mean_ratio_over_pairs() -> None:
    shown = "\n".join(effects(made()))
    assert "| graph  | 4.00 (2.00 – 8.00 of 2 pairs) | 4.00 (2.00 – 8.00 of 2 pairs) |" in shown
    assert "| radix  | 1.00 (0.50 – 2.00 of 2 pairs) | 1.00 (0.50 – 2.00 of 2 pairs) |" in shown


def test_one_round_says_that_the_noise_is_unknown() -> None:
    for result in (made(), alone([10.0], [20.0])):
        assert "**One round: the noise is unknown" in markdown(result) and "~" not in "".join(effects(result)[4:])
    assert "| graph  | 2.00        | 2.00        |" in markdown(alone([10.0], [20.0]))


def test_a_ratio_has_its_interval_over_the_rounds_pair_by_pair() -> None:
    """A machine that is twice as slow in the second round: both cells are, so it falls out."""
    lines = effects(alone([10.0, 5.0, 10.0], [20.0, 10.1, 19.9]))
    (line,) = [one for one in lines if one.startswith("| graph  ")][:1]
    assert line.startswith("| graph  | 2.00 (1.97 – 2.04) |") and "~" not in line
    assert "interval over 3 rounds" in lines[2]


def test_what_may_be_noise_is_marked() -> None:
    """The very cells of a busy machine whose best of three said 1.15."""
    lines = effects(alone([1326.0, 881.0, 2314.0], [1420.0, 2653.0, 1110.0]))
    (line,) = [one for one in lines if one.startswith("| graph  ")][:1]
    assert line.startswith("| graph  | ~ 1.16 (0.12 – ")
    assert "~ has 1 in its interval: it may be noise" in lines[2]


def test_noise_alone_is_marked_nineteen_times_in_twenty() -> None:
    rng = Random(5)
    draws = [[[100 * rng.lognormvariate(0, 0.2) for _ in range(4)] for _ in range(2)] for _ in range(200)]
    plain = sum("| graph  | ~" not in "".join(effects(alone(*draw))) for draw in draws)
    assert 2 <= plain <= 22, plain


def test_a_round_counts_only_if_all_pairs_have_it() -> None:
    result = made()
    for row in result["cells"]:
        row["again"] = [round_of(row["single"]["decode_tokens_per_s"] * 2, round=1)]
    assert "| graph  | 4.00 (4.00 – 4.00)   |" in "\n".join(effects(result))
    result["cells"][0]["again"] = []  # its second run failed
    assert "| graph  | 4.00 (2.00 – 8.00 of 2 pairs) |" in "\n".join(effects(result))
    result["cells"][0]["again"] = [round_of(800.0, round=2)]  # and a third is nobody's pair
    assert "| graph  | 4.00 (2.00 – 8.00 of 2 pairs) |" in "\n".join(effects(result))


def test_an_unmeasured_cell_shows_its_reason_and_is_not_averaged() -> None:
    result = made()
    kept = {name: result["cells"][3][name] for name in ("columns", "wishes", "decisions")}
    gone = {**kept, "status": "timed out", "reason": "not done within 9 s"}
    result["cells"][3] = gone
    shown = markdown(result)
    assert "- off, off: timed out: not done within 9 s\n" in shown and "| off   | off   |" not in shown
    assert (
        "| graph  | 8.00        | 8.00        |" in shown and "| on    | on    | 80.0        | 8,000       |" in shown
    )
    result["cells"][3] = gone | {"status": "interrupted", "reason": ""}
    assert "- off, off: interrupted\n" in markdown(result)


def test_rates_have_their_range_and_fit_a_terminal() -> None:
    lines = cell_table(alone([2653.0, 1420.0, 1110.0], [80.0, 40.0, 60.0]))
    assert "| the base  | 60.0 (40.0 – 80.0)    | 6,000 (4,000 – 8,000)       |" in lines
    assert any("| graph off | 1,420 (1,110 – 2,653) |" in line for line in lines)
    assert max(map(len, lines)) <= 110


def test_on_a_cpu_there_is_a_rate_by_cpu_time() -> None:
    result = made()
    result["device"]["gpus"] = []
    for row, cpu in zip(result["cells"], (1.0, 2.0, 4.0, 8.0), strict=True):
        row["batches"][0] |= {"input_tokens": 30, "output_tokens": 50, "cpu_seconds": cpu}
        row["single"] |= {"input_len": 760, "output_len": 460, "cpu_seconds": 2.0}
    shown = markdown(result)
    assert "Tokens a CPU second: (prompt" in shown
    assert "| on    | on    | 610.0       | 80.0        |" in shown
    assert "| radix  | 1.00 (1.00 – 1.00 of 2 pairs) | 2.00 (2.00 – 2.00 of 2 pairs) |" in shown


def panels(result: dict[str, Any]) -> list[Bars]:
    return [panel for panel in figure(result).panels if isinstance(panel, Bars)]


def test_the_plot_has_a_bar_for_each_rate_and_counts_what_has_none() -> None:
    result = made()
    assert [panel.title for panel in panels(result)] == ["one request", "8 at a time", "each of 8"]
    first = panels(result)[0]
    assert (
        first.values[""] == [80.0, 40.0, 10.0, 20.0] and first.intervals == [None] * 4 and first.rows[0] == "the base"
    )
    result["cells"][3] = {"columns": result["cells"][3]["columns"], "status": "failed", "reason": "x"}
    assert "1 more could not run" in panels(result)[0].label and len(panels(result)[0].rows) == 3


def test_the_plot_shows_the_range_of_the_rounds() -> None:
    first = panels(alone([10.0, 20.0, 40.0], [80.0, 40.0, 60.0]))[0]
    assert first.values[""] == [60.0, 20.0], "medians"
    assert first.intervals == [(40.0, 80.0), (10.0, 40.0)]


def test_a_plot_is_an_svg_of_its_result(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = made() | {"checkpoint": "a<b"}
    save_plot(result, tmp_path / "plot")
    text = (tmp_path / "plot.svg").read_text()
    assert digest(result) in text and "a<b" in "".join(ElementTree.fromstring(text).itertext())
    assert digest(made() | {"cells": []}) not in text


def test_the_table_has_sglangs_columns() -> None:
    result = made()
    result["cells"][1] |= {"ran": {"accept_length": 1.5}, "query": {"right": False}}
    del result["cells"][2]["single"]
    result["cells"][2] |= {"status": "not runnable", "reason": "no GPU"}
    heads, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in sglang_table(result)[:-2])
    table = [dict(zip(heads, row, strict=True)) for row in rows]
    assert list(table[0])[4:11] == [
        "Torch Compile", "Cuda Graph", "Radix Cache", "Flashinfer-mla", "Next-N", "EP-MoE", "DP-Attention"
    ]  # fmt: skip
    assert [row["Runnable"] for row in table] == ["✅", "✅", "❌ no GPU", "✅"]
    assert [row["Cuda Graph"] for row in table] == ["✅", "✅", "➖", "➖"]
    assert [row["Radix Cache"] for row in table] == ["✅", "➖", "✅", "➖"]
    assert [row["TPS@1"] for row in table] == ["80.0", "40.0", "–", "20.0"]
    assert (table[1]["Accept length"], table[1]["Answer"], table[0]["Answer"]) == ("1.50", "❌", "–")
    assert table[0]["Avg Throughput (p+d, token/s)"] == "8,000" and table[0]["total req"] == "16"
