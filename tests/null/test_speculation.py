"""What is decided about speculation, from wishes and a checkpoint's facts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from thalweg.config.args import config_parser, parse_config
from thalweg.config.model import read_facts
from thalweg.config.speculative import SpeculativeOptions
from thalweg.core.errors import CannotServe, CheckpointError
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.launch.ledger import Ledger
from thalweg.launch.speculation import Speculation, decide_speculation
from thalweg.launch.trees import decide_tree


@dataclass
class Facts:
    nextn: int = 1


def decided(nextn: int = 1, **wishes: Any) -> tuple[Speculation, Ledger]:
    ledger = Ledger()
    facts: Any = Facts(nextn)
    return decide_speculation(SpeculativeOptions(**wishes), facts, ledger), ledger


@pytest.mark.parametrize(
    ("wishes", "drafter", "width"),
    [
        ({}, "", 0),
        ({"mtp": 1}, "", 0),
        ({"mtp": 3}, "nextn", 2),
        ({"speculative_algorithm": "NEXTN"}, "nextn", 3),
        ({"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}, "nextn", 3),
        ({"speculative_num_draft_tokens": 3}, "nextn", 2),
        ({"speculative_algorithm": "NGRAM"}, "ngram", 4),
        ({"speculative_algorithm": "NGRAM", "speculative_num_steps": 2}, "ngram", 2),
        ({"speculative_algorithm": "NONE"}, "", 0),
    ],
)
def test_wishes_become_a_drafter_and_a_width(wishes: dict[str, Any], drafter: str, width: int) -> None:
    assert decided(**wishes)[0] == Speculation(drafter, width, adaptive=width > 0)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"mtp": 3, "speculative_num_steps": 3}, ("--mtp means 2", "--speculative-num-steps means 3")),
        ({"speculative_num_steps": 3, "speculative_num_draft_tokens": 3}, ("means 3 drafts", "means 2 drafts")),
        ({"speculative_algorithm": "NONE", "mtp": 2}, ("NONE", "1 drafts")),
        ({"speculative_algorithm": "NGRAM", "mtp": 2}, ("mtp", "NGRAM", "--speculative-num-steps")),
        ({"speculative_algorithm": "NEXTN", "mtp": 1}, ("0 drafts",)),
        ({"mtp": 40}, ("mtp", "9")),
    ],
)
def test_wishes_that_contradict_are_refused(wishes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(CannotServe) as refused:
        decided(**wishes)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_checkpoint_without_the_layer_is_named() -> None:
    with pytest.raises(CannotServe, match="num_nextn_predict_layers is 0"):
        decided(0, mtp=2)
    assert decided(0)[0] == Speculation("", 0, False)
    assert decided(0, speculative_algorithm="NGRAM")[0].drafter == "ngram"


def shape(drafter: str = "nextn", deepest: int = 3, exact: bool = False, **wishes: Any) -> TreeShape:
    return decide_tree(SpeculativeOptions(**wishes), drafter, deepest, exact, Ledger())


@pytest.mark.parametrize(
    ("wishes", "wanted"),
    [
        ({}, CHAIN),
        ({"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}, CHAIN),
        ({"speculative_eagle_topk": 4}, TreeShape(4, 3, 15)),
        ({"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 2}, CHAIN._replace(deepest=1, nodes=1)),
        ({"speculative_eagle_topk": 2}, TreeShape(2, 3, 10)),
        ({"speculative_eagle_topk": 8, "speculative_num_draft_tokens": 64}, TreeShape(8, 3, 63)),
        ({"speculative_eagle_topk": 2, "speculative_tree": "static"}, TreeShape(2, 3, 14, False)),
    ],
)
def test_wishes_become_a_tree(wishes: dict[str, Any], wanted: TreeShape) -> None:
    assert shape(**wishes) == wanted


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"speculative_tree": "static"}, ("speculative_tree", "--speculative-eagle-topk 4")),
        ({"speculative_eagle_topk": 2, "drafter": ""}, ("nothing drafts",)),
        ({"speculative_eagle_topk": 2, "drafter": "ngram"}, ("one chain", "--speculative-eagle-topk 1")),
        ({"speculative_eagle_topk": 2, "exact": True}, ("--deterministic-inference",)),
        ({"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 12}, ("10 at most", "11 or fewer", "steps 4")),
    ],
)
def test_trees_that_cannot_be_are_refused(wishes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(CannotServe) as refused:
        shape(**wishes)
    assert all(word in str(refused.value) for word in words), refused.value


def test_the_tokens_of_a_tree_say_nothing_of_its_depth() -> None:
    wishes = {"speculative_algorithm": "NEXTN", "speculative_num_draft_tokens": 30}
    assert decided(**wishes, speculative_eagle_topk=4)[0].width == 3
    with pytest.raises(CannotServe, match="--speculative-eagle-topk 4"):
        decided(**wishes)


def test_every_choice_is_noted() -> None:
    assert [(one.name, one.value, one.source) for one in decided(mtp=4)[1].decisions] == [
        ("speculative_algorithm", "NEXTN", "asked"),
        ("speculative_num_steps", 3, "asked"),
        ("speculative_adaptive", True, "auto"),
    ]
    assert not decided(mtp=4, speculative_adaptive=False)[0].adaptive
    assert [(one.name, one.value, one.source) for one in decided()[1].decisions] == [
        ("speculative_algorithm", "NONE", "auto")
    ]


def test_other_engines_flags() -> None:
    flags = "--model m --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
    parsed = parse_config(config_parser("t", "t"), [*flags.split(), "--speculative-num-draft-tokens", "4"])
    assert parsed.config.speculative.speculative_num_steps == 3


# ---- a drafter from its own folder


TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 8, "max_position_embeddings": 512,
}  # fmt: skip
EAGLE3 = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 1000}
EAGLE = LLAMA | {"architectures": ["LlamaForCausalLMEagle"]}


def drafting(folder: Path, config: dict[str, Any], **wishes: Any) -> tuple[Speculation, Ledger]:
    (folder / "config.json").write_text(json.dumps(config))
    ledger = Ledger()
    return decide_speculation(SpeculativeOptions(**wishes), read_facts(TINY), ledger, folder), ledger


@pytest.mark.parametrize(
    ("config", "wish", "drafter", "width"),
    [
        (EAGLE3, None, "eagle", 3),
        (EAGLE3, "EAGLE3", "eagle", 3),
        (EAGLE3, "EAGLE", "eagle", 3),
        (EAGLE, None, "eagle", 3),
        (LLAMA, "EAGLE", "eagle", 3),
        (LLAMA, None, "small", 4),
        (LLAMA, "STANDALONE", "small", 4),
    ],
)
def test_a_folder_says_what_drafts(
    config: dict[str, Any], wish: str | None, drafter: str, width: int, tmp_path: Path
) -> None:
    made, ledger = drafting(tmp_path, config, speculative_algorithm=wish)
    assert made == Speculation(drafter, width, True, str(tmp_path))
    noted = ledger.decisions[0]
    assert (noted.source, bool(noted.reason)) == (("auto", True) if wish is None else ("asked", False))
    assert drafting(tmp_path, config, speculative_algorithm=wish, speculative_num_steps=2)[0].width == 2


@pytest.mark.parametrize(
    ("config", "wishes", "words"),
    [
        (EAGLE3, {"speculative_algorithm": "NEXTN"}, ("NEXTN has no folder", "EAGLE3")),
        (EAGLE3, {"speculative_algorithm": "NGRAM"}, ("NGRAM has no folder",)),
        (EAGLE, {"speculative_algorithm": "EAGLE3"}, ("before EAGLE-3", "--speculative-algorithm EAGLE")),
        (EAGLE3, {"mtp": 3}, ("mtp", "--speculative-num-steps")),
        (LLAMA | {"vocab_size": 32000}, {}, ("32000", "2048", "same family")),
        (EAGLE3 | {"vocab_size": 32000}, {}, ("vocab_size is 32000", "another model's")),
        (LLAMA | {"hidden_size": 512}, {"speculative_algorithm": "EAGLE"}, ("hidden_size 512",)),
    ],
)
def test_folders_that_do_not_fit_are_refused(
    config: dict[str, Any], wishes: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises((CannotServe, CheckpointError)) as refused:
        drafting(tmp_path, config, **wishes)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_a_drafter_of_its_own_weights_needs_its_folder(algorithm: str) -> None:
    with pytest.raises(CannotServe, match="--speculative-draft-model-path"):
        decided(speculative_algorithm=algorithm)
