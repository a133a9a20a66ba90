"""The bundled model's tasks: deterministic, without overlap between splits, strictly scored."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from thalweg.bench.tasks import (
    MAKERS,
    Item,
    dsml_block,
    make_items,
    make_sum,
    parse_dsml,
    score,
    split_of,
    sum_reasoning,
)
from thalweg.text.chat import builtin

TASKS = sorted(MAKERS)


@pytest.mark.parametrize("task", TASKS)
def test_same_arguments_same_items(task: str) -> None:
    assert make_items(task, "held_out", 20, seed=4) == make_items(task, "held_out", 30, seed=4)[:20]
    assert make_items(task, "held_out", 20, seed=4) != make_items(task, "held_out", 20, seed=5)


@pytest.mark.parametrize("task", TASKS)
def test_splits_share_no_item(task: str) -> None:
    train = {item.identity for item in make_items(task, "train", 400)}
    held_out = {item.identity for item in make_items(task, "held_out", 400)}
    assert len(train) > 300 and len(held_out) > 300 and not train & held_out
    assert {split_of(identity) for identity in train} == {"train"} and {
        split_of(identity) for identity in held_out
    } == {"held_out"}


def test_swapped_addends_are_one_item() -> None:
    assert make_sum(Random(1)).identity.split()[1:] == sorted(make_sum(Random(1)).identity.split()[1:], key=int)


@pytest.mark.parametrize("task", TASKS)
def test_target_is_right(task: str) -> None:
    assert all(score(item, item.target) for item in make_items(task, "held_out", 200, seed=1))


@pytest.mark.parametrize("task", TASKS)
def test_another_items_target_is_wrong(task: str) -> None:
    items = make_items(task, "held_out", 200, seed=2)
    wrong = [score(item, other.target) for item, other in pairwise(items) if item.answer != other.answer]
    assert len(wrong) > 150 and not any(wrong)


def test_thinking_must_end() -> None:
    item = make_items("sums", "held_out", 1)[0]
    assert not score(item, item.target.replace("</think>", "\n"))
    assert score(replace(item, thinking=False), item.target.split("</think>")[1])


@pytest.mark.parametrize(("a", "b"), [(10, 10), (999, 999), (57, 234), (905, 95)])
def test_written_addition(a: int, b: int) -> None:
    *steps, total = sum_reasoning(a, b).splitlines()[1:]
    digits = "".join(step.split("write ")[1][0] for step in reversed(steps))
    carry = steps[-1].removesuffix("\n")[-1]
    assert int(carry + digits) == a + b and total == f"The sum is {a + b}"


def calls_of(item: Item) -> list[tuple[str, dict[str, object]]]:
    return [(call["name"], call["arguments"]) for call in json.loads(item.answer)]


def test_dsml_is_what_the_encoder_writes() -> None:
    for item in make_items("tools", "held_out", 60, seed=3):
        functions = [
            {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)} for name, arguments in calls_of(item)
        ]
        calls = [{"id": str(n), "type": "function", "function": function} for n, function in enumerate(functions)]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        text = builtin("deepseek-v32").encode(
            [*item.messages, answer], tools=list(item.tools), add_generation_prompt=True
        )
        assert text.endswith(f"<｜Assistant｜></think>{item.target}<｜end▁of▁sentence｜>")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("</｜DSML｜function_calls>", ""),
        ("</｜DSML｜invoke>", ""),
        ('string="true"', 'string="false"'),
        ('string="false"', 'string="true"'),
        ("<｜DSML｜function_calls>", "Of course: <｜DSML｜function_calls>"),
        ('"days"', '"day"'),
        (">3<", ">3.0<"),
        (">3<", ">three<"),
    ],
)
def test_damaged_calls_are_wrong(old: str, new: str) -> None:
    block = dsml_block([("get_weather", {"city": "Oslo", "days": 3})])
    item = replace(
        make_items("tools", "held_out", 1)[0],
        answer=json.dumps([{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}]),
    )
    assert score(item, block) and old in block
    assert not score(item, block.replace(old, new))


def test_calls_without_parameters_and_repeated_names() -> None:
    assert parse_dsml(dsml_block([("list_events", {})])) == [{"name": "list_events", "arguments": {}}]
    block = dsml_block([("f", {"a": "x"})])
    line = '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n'
    assert line in block and parse_dsml(block.replace(line, line + line)) is None


def test_dialogue() -> None:
    items = make_items("dialogue", "held_out", 1024)
    assert len({item.identity for item in items}) == 1024 and all(item.target and not item.thinking for item in items)
    with pytest.raises(ValueError, match="perplexity"):
        score(items[0], items[0].target)
    with pytest.raises(ValueError, match="train_tiny"):
        make_items("dialogue", "train", 1)
    with pytest.raises(ValueError, match="fewer"):
        make_items("dialogue", "held_out", 10**6)


def test_unknown_task() -> None:
    with pytest.raises(ValueError, match="unknown task"):
        make_items("poetry", "held_out", 1)
