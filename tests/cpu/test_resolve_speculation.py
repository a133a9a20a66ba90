"""How the resolver decides speculation from options and checkpoint facts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from thalweg.config.args import options_parser, parse_options
from thalweg.config.drafters import DRAFTERS
from thalweg.config.eagle import read_eagle
from thalweg.config.engine import EngineConfig
from thalweg.config.speculative import SpeculativeOptions
from thalweg.config.tree import options_of
from thalweg.core.errors import CheckpointError, UnsupportedConfig
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.launch.decisions import Decisions
from thalweg.launch.drafter_checks import check_vocabularies
from thalweg.launch.resolve import resolve
from thalweg.launch.speculation import resolve_drafting
from thalweg.models.catalog import read_facts


@dataclass
class Facts:
    nextn: int = 1
    indexer: None = None
    architecture: str = "DeepseekV3ForCausalLM"


def decided(nextn: int = 1, **wishes: Any) -> tuple[EngineConfig, Decisions]:
    decisions = Decisions()
    facts: Any = Facts(nextn)
    resolve_drafting(SpeculativeOptions(**wishes), facts, decisions)
    return decisions.config(), decisions


@pytest.mark.parametrize(
    ("wishes", "drafter", "width"),
    [
        ({}, "NONE", 0),
        ({"mtp": 1}, "NONE", 0),
        ({"mtp": 3}, "NEXTN", 2),
        ({"speculative_algorithm": "NEXTN"}, "NEXTN", 3),
        ({"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}, "NEXTN", 3),
        ({"speculative_num_draft_tokens": 3}, "NEXTN", 2),
        ({"speculative_num_draft_tokens": 16, "speculative_eagle_topk": 4}, "NEXTN", 3),
        ({"speculative_eagle_topk": 4}, "NEXTN", 3),
        ({"speculative_algorithm": "NGRAM"}, "NGRAM", 4),
        ({"speculative_algorithm": "NGRAM", "speculative_num_steps": 2}, "NGRAM", 2),
        ({"speculative_algorithm": "NONE"}, "NONE", 0),
    ],
)
def test_wishes_become_a_drafter_and_a_width(wishes: dict[str, Any], drafter: str, width: int) -> None:
    made = decided(**wishes)[0]
    assert (made.speculative_algorithm, made.speculative_num_steps) == (drafter, width)
    assert made.speculative_adaptive == (width > 0)
    assert made.tree.is_tree or made.speculative_num_draft_tokens == (width + 1 if width else 0)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"mtp": 3, "speculative_num_steps": 3}, ("--mtp means 2", "--speculative-num-steps means 3")),
        ({"speculative_num_steps": 3, "speculative_num_draft_tokens": 3}, ("means 3 drafts", "means 2 drafts")),
        ({"speculative_algorithm": "NONE", "mtp": 2}, ("NONE", "1 drafts")),
        ({"speculative_algorithm": "NGRAM", "mtp": 2}, ("mtp", "NGRAM", "--speculative-num-steps")),
        ({"speculative_algorithm": "NEXTN", "mtp": 1}, ("0 drafts",)),
        ({"mtp": 40}, ("mtp", "9")),
        ({"speculative_num_draft_tokens": 16}, ("9", "--speculative-eagle-topk 4")),
        ({"mtp": 4, "speculative_eagle_topk": 4}, ("mtp", "a tree", "--speculative-num-steps 3")),
    ],
)
def test_wishes_that_contradict_are_refused(wishes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedConfig) as refused:
        decided(**wishes)
    assert all(word in str(refused.value) for word in words), refused.value


def test_an_algorithm_without_trees_is_told_of_none() -> None:
    with pytest.raises(UnsupportedConfig) as refused:
        decided(speculative_algorithm="NGRAM", speculative_num_draft_tokens=16)
    assert "9" in str(refused.value) and "topk" not in str(refused.value)


@pytest.mark.parametrize(
    ("wish", "value"),
    [
        ("speculative_draft_model_path", "head"),
        ("speculative_adaptive", False),
        ("speculative_acceptance", "relaxed"),
        ("speculative_simulate_accept_length", 2.5),
    ],
)
def test_what_has_no_effect_is_told(wish: str, value: Any) -> None:
    for more in ({"speculative_algorithm": "NONE"}, {"mtp": 1}):
        made, decisions = decided(**more, **{wish: value})
        assert made.speculative_algorithm == "NONE"
        told = decisions.entries[-1]
        assert (told.name, told.value, told.source) == (wish, value, "user") and "nothing drafts" in told.reason
    assert all("without effect" not in one.reason for one in decided(mtp=4, **{wish: value})[1].entries)


def test_a_checkpoint_without_the_layer_is_named() -> None:
    with pytest.raises(UnsupportedConfig, match="num_nextn_predict_layers is 0"):
        decided(0, mtp=2)
    assert decided(0)[0].speculative_algorithm == "NONE" and decided(0)[0].num_drafts == 0
    assert decided(0, speculative_algorithm="NGRAM")[0].speculative_algorithm == "NGRAM"


def shape(drafter: str = "NEXTN", deepest: int = 3, **wishes: Any) -> TreeShape:
    steps = {} if drafter == "NONE" else {"speculative_num_steps": deepest}
    made = decided(speculative_algorithm=drafter, **steps, **wishes)[0]
    return made.tree if made.tree.is_tree else CHAIN._replace(max_depth=made.num_drafts, num_drafts=made.num_drafts)


@pytest.mark.parametrize(
    ("wishes", "wanted"),
    [
        ({}, CHAIN._replace(max_depth=3, num_drafts=3)),
        (
            {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4},
            CHAIN._replace(max_depth=3, num_drafts=3),
        ),
        ({"speculative_eagle_topk": 4}, TreeShape(4, 3, 15)),
        ({"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 2}, CHAIN._replace(max_depth=1, num_drafts=1)),
        ({"speculative_eagle_topk": 2}, TreeShape(2, 3, 10)),
        ({"speculative_eagle_topk": 8, "speculative_num_draft_tokens": 64}, TreeShape(8, 3, 63)),
        ({"speculative_eagle_topk": 2, "speculative_tree": "static"}, TreeShape(2, 3, 14, False)),
        ({"speculative_eagle_topk": 10, "deepest": 7, "speculative_num_draft_tokens": 60}, TreeShape(10, 7, 59)),
        ({"speculative_eagle_topk": 10, "deepest": 8, "speculative_tree": "static"}, TreeShape(10, 8, 15, False)),
    ],
)
def test_wishes_become_a_tree(wishes: dict[str, Any], wanted: TreeShape) -> None:
    """Of EAGLE-2's paper too: 10 ways, 7 levels, 60 tokens."""
    assert shape(**wishes) == wanted


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"speculative_tree": "static"}, ("speculative_tree", "--speculative-eagle-topk 4")),
        ({"speculative_eagle_topk": 2, "drafter": "NONE"}, ("needs a drafter", "--speculative-algorithm NEXTN")),
        ({"speculative_eagle_topk": 10, "deepest": 8}, ("70 nodes", "63", "--speculative-num-steps 7")),
        (
            {"speculative_eagle_topk": 2, "drafter": "NGRAM"},
            ("--speculative-eagle-topk 2 needs a drafter that can branch; NGRAM proposes a chain. Use 1, or NEXTN.",),
        ),
        (
            {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 12},
            ("10 drafts at most", "11 or fewer", "more --speculative-num-steps"),
        ),
    ],
)
def test_trees_that_cannot_be_are_refused(wishes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedConfig) as refused:
        shape(**wishes)
    assert all(word in str(refused.value) for word in words), refused.value


def test_the_tokens_of_a_tree_say_nothing_of_its_depth() -> None:
    wishes = {"speculative_algorithm": "NEXTN", "speculative_num_draft_tokens": 30}
    assert decided(**wishes, speculative_eagle_topk=4)[0].speculative_num_steps == 3
    with pytest.raises(UnsupportedConfig, match="--speculative-eagle-topk 4"):
        decided(**wishes)


def test_every_choice_is_noted() -> None:
    assert [(one.name, one.value, one.source) for one in decided(mtp=4)[1].entries] == [
        ("speculative_algorithm", "NEXTN", "user"),
        ("speculative_num_steps", 3, "user"),
        ("speculative_adaptive", True, "auto"),
        ("speculative_acceptance", "gumbel-max", "auto"),
    ]
    assert not decided(mtp=4, speculative_adaptive=False)[0].speculative_adaptive
    assert [(one.name, one.value, one.source) for one in decided()[1].entries] == [
        ("speculative_algorithm", "NONE", "auto")
    ]


def test_other_engines_flags() -> None:
    flags = "--model m --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
    parsed = parse_options(options_parser("t", "t"), [*flags.split(), "--speculative-num-draft-tokens", "4"])
    assert parsed.options.speculative.speculative_num_steps == 3


# ---- a drafter from its own folder


TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8, "max_position_embeddings": 512,
}  # fmt: skip
EAGLE3 = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 1000}
EAGLE = LLAMA | {"architectures": ["LlamaForCausalLMEagle"]}


def drafting(folder: Path, config: dict[str, Any], **wishes: Any) -> tuple[EngineConfig, Decisions]:
    (folder / "config.json").write_text(json.dumps(config))
    decisions = Decisions()
    resolve_drafting(SpeculativeOptions(**wishes), read_facts(TINY), decisions, folder)
    return decisions.config(), decisions


@pytest.mark.parametrize(
    ("config", "wish", "drafter", "width"),
    [
        (EAGLE3, None, "EAGLE3", 3),
        (EAGLE3, "EAGLE3", "EAGLE3", 3),
        (EAGLE3, "EAGLE", "EAGLE", 3),
        (EAGLE, None, "EAGLE", 3),
        (LLAMA, "EAGLE", "EAGLE", 3),
        (LLAMA, None, "STANDALONE", 4),
        (LLAMA, "STANDALONE", "STANDALONE", 4),
    ],
)
def test_a_folder_says_what_drafts(
    config: dict[str, Any], wish: str | None, drafter: str, width: int, tmp_path: Path
) -> None:
    made, decisions = drafting(tmp_path, config, speculative_algorithm=wish)
    assert (made.speculative_algorithm, made.num_drafts) == (drafter, width)
    assert made.speculative_adaptive and made.speculative_draft_model_path == str(tmp_path)
    noted = decisions.entries[0]
    assert (noted.source, bool(noted.reason)) == (("auto", True) if wish is None else ("user", False))
    assert drafting(tmp_path, config, speculative_algorithm=wish, speculative_num_steps=2)[0].num_drafts == 2


@pytest.mark.parametrize(
    ("config", "wishes", "words"),
    [
        (EAGLE3, {"speculative_algorithm": "NEXTN"}, ("NEXTN has no folder", "EAGLE3")),
        (EAGLE3, {"speculative_algorithm": "NGRAM"}, ("NGRAM has no folder",)),
        (EAGLE, {"speculative_algorithm": "EAGLE3"}, ("before EAGLE-3", "--speculative-algorithm EAGLE")),
        (EAGLE3, {"mtp": 3}, ("mtp", "--speculative-num-steps")),
        (EAGLE3 | {"vocab_size": 32000}, {}, ("vocab_size is 32000", "another model's")),
        (LLAMA | {"hidden_size": 512}, {"speculative_algorithm": "EAGLE"}, ("hidden_size is 512", "another model's")),
        ({"model_type": "medusa", "medusa_num_heads": 4}, {}, ("config.json is of a Medusa drafter", "EAGLE head")),
        ({"architectures": ["MedusaModel"]}, {}, ("Medusa",)),
    ],
)
def test_folders_that_do_not_fit_are_refused(
    config: dict[str, Any], wishes: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises((UnsupportedConfig, CheckpointError)) as refused:
        drafting(tmp_path, config, **wishes)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize("name", ["fc.weight", "model.fc.weight"])
@pytest.mark.parametrize("indexed", [True, False])
def test_a_head_is_told_by_its_tensors_where_it_says_llama(name: str, indexed: bool, tmp_path: Path) -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    if indexed:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: "one"}}))
    else:
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    made, decisions = drafting(tmp_path, LLAMA)
    assert made.speculative_algorithm == "EAGLE" and decisions.entries[0].value == "EAGLE"


HEADS: list[tuple[dict[str, Any], dict[str, list[int]], tuple[str, ...]]] = [
    (EAGLE3 | {"hidden_size": 512}, {"fc.weight": [512, 1536]},
     ("fc.weight", "hidden_size is 512", "is 256", "another model's")),
    (EAGLE, {"fc.weight": [256, 768]}, ("fc.weight", "hidden_size is 512", "is 256", "another model's")),
    (EAGLE3 | {"hidden_size": 128}, {"fc.weight": [128, 768], "d2t": [1000]},
     ("128", "256", "embed_tokens.weight", "another model's")),
    (EAGLE3, {"fc.weight": [256, 768]}, ("d2t", "1000", "2048", "draft_vocab_size")),
]  # fmt: skip


@pytest.mark.parametrize(("config", "shapes", "words"), HEADS)
def test_a_head_of_another_model_is_told_by_its_tensors(
    config: dict[str, Any], shapes: dict[str, list[int]], words: tuple[str, ...], tmp_path: Path
) -> None:
    held = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}} | held).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError) as refused:
        drafting(tmp_path, config)
    assert all(word in str(refused.value) for word in (str(tmp_path), *words)), refused.value


@pytest.mark.parametrize(("config", "name"), [(EAGLE3, "EAGLE3"), (EAGLE, "EAGLE")])
def test_an_eagle_head_cannot_be_served_as_a_model(config: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        drafting(tmp_path, config, speculative_algorithm="STANDALONE")
    told = str(refused.value)
    assert str(tmp_path) in told and f"--speculative-algorithm {name}" in told


@pytest.mark.parametrize("content", [b"", b"\xff" * 9, b"\x02\0\0\0\0\0\0\0[]"])
def test_weights_that_cannot_be_read_say_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert drafting(tmp_path, LLAMA)[0].speculative_algorithm == "STANDALONE"


STREAMS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("fields", "layers", "words"),
    [
        ({}, (2, 16, 29), "names none"),
        ({STREAMS: []}, (2, 16, 29), "names none"),
        ({STREAMS: [2, 16, 29]}, (2, 16, 29), "inputs"),
        ({STREAMS: [1, 15, 28]}, (2, 16, 29), "outputs"),
        (
            {"eagle_config": {STREAMS: [2, 16, 29]}},
            (3, 17, 30),
            "eagle_config names 2, 16, 29, which are read as outputs",
        ),
        ({"eagle_config": {STREAMS: [1, 15, 28]}}, (2, 16, 29), "outputs"),
        ({"eagle_config": {STREAMS: []}, STREAMS: [4, 5, 6]}, (4, 5, 6), "inputs"),
        ({"eagle_config": {"use_aux_hidden_state": True}, STREAMS: [1, 15, 28]}, (2, 16, 29), "outputs"),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 16, 29), "names none"),
    ],
)
def test_the_streams_of_an_eagle3_head(
    fields: dict[str, Any], layers: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EAGLE3 | fields))
    target, decisions = structs.replace(read_facts(TINY), layers=32), Decisions()
    assert read_eagle(tmp_path, target).watched.layers == layers
    resolve_drafting(SpeculativeOptions(), target, decisions, tmp_path)
    (told,) = (one for one in decisions.entries if one.name == "speculative_eagle_layers")
    assert told.value == ", ".join(map(str, layers)) and words in told.reason


# ---- a small model of another vocabulary


def tokenizer(folder: Path, tokens: Sequence[str]) -> None:
    model = {"type": "WordLevel", "vocab": {token: i for i, token in enumerate(tokens)}, "unk_token": tokens[0]}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


def test_vocabularies_are_compared_by_their_tokens(tmp_path: Path) -> None:
    small, model = tmp_path / "small", tmp_path / "model"
    small.mkdir()
    model.mkdir()
    tokens = [f"t{i}" for i in range(100)]
    check_vocabularies(small, 128, model, 128)  # nothing to compare
    with pytest.raises(CheckpointError) as refused:
        check_vocabularies(small, 128, model, 192)
    assert all(word in str(refused.value) for word in ("128", "192", "tokenizer.json", "small and", "same family"))
    tokenizer(model, tokens)
    tokenizer(small, [*tokens[:96], "u1", "u2", "u3", "u4"])  # as reserved ones are named otherwise
    check_vocabularies(small, 128, model, 192)
    tokenizer(small, tokens[::-1])
    for vocab in (128, 192):
        with pytest.raises(CheckpointError, match="of 100 tokens only 0 have the id.*same family"):
            check_vocabularies(small, 128, model, vocab)


def test_a_small_model_is_compared_when_its_model_is_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 32000}))
    facts = read_facts(TINY)
    with pytest.raises(CheckpointError, match="32000.*2048"):
        resolve_drafting(SpeculativeOptions(), facts, Decisions(), tmp_path, TINY)
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    decisions = Decisions()
    resolve_drafting(SpeculativeOptions(), facts, decisions, tmp_path, TINY)
    assert decisions.config().speculative_algorithm == "STANDALONE"


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_a_drafter_of_its_own_weights_needs_its_folder(algorithm: str) -> None:
    with pytest.raises(UnsupportedConfig, match="--speculative-draft-model-path"):
        decided(speculative_algorithm=algorithm)


def test_every_drafter_that_cannot_branch_refuses_a_tree() -> None:
    chains = [name for name, entry in DRAFTERS.items() if not entry.can_branch]
    assert chains
    for name in chains:
        with pytest.raises(UnsupportedConfig, match=f"{name} proposes a chain"):
            decided(speculative_algorithm=name, speculative_eagle_topk=2)


def test_a_shared_selection_of_context_needs_one() -> None:
    """The steps of a NextN draft share it where the model has an indexer; it is refused elsewhere."""
    wish = {"index_share_for_mtp_iteration": True, "speculative_num_steps": 2}
    tiny = resolve(options_of(model="models/tiny", device="cpu", **wish), progress=False).engine
    assert tiny.index_share_for_mtp_iteration and tiny.speculative_algorithm == "NEXTN"
    with pytest.raises(UnsupportedConfig, match="index_share_.*V3ForCausalLM attends to all context.*NEXTN with a"):
        decided(speculative_algorithm="NEXTN", **wish)
    with pytest.raises(UnsupportedConfig, match="index_share_.*NGRAM is another drafter.*NEXTN with a model"):
        resolve(options_of(model="models/tiny", device="cpu", speculative_algorithm="NGRAM", **wish), progress=False)
    told = decided(speculative_algorithm="NONE", index_share_for_mtp_iteration=True)[1].entries[-1]
    assert told.name == "index_share_for_mtp_iteration" and "nothing drafts" in told.reason
