"""What drafts tokens, and how many: decided from the user's wishes, what the checkpoint has, and what the folder of a
drafter holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from thalweg.config.eagle import algorithm_of, read_eagle
from thalweg.config.model import ModelFacts
from thalweg.config.speculative import DEEPEST, SpeculativeOptions
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.report import AUTO, MODEL, USER, Value
from thalweg.launch.decisions import Decisions, source_and_reason
from thalweg.launch.vocabularies import check_vocabularies
from thalweg.spec.draft_model import draft_model_facts


class DrafterKind(NamedTuple):
    """name: the drafter's. width: drafts a step where nobody says how many, for the reason `why`."""

    name: str
    width: int
    why: str


NEXTN = DrafterKind("NEXTN", 3, "those behind the third are seldom right")
HEAD = DrafterKind("EAGLE", 3, "those behind the third are seldom right")
KINDS = {
    "NEXTN": NEXTN,
    "EAGLE": HEAD,
    "EAGLE3": HEAD,
    "STANDALONE": DrafterKind("STANDALONE", 4, "a model of its own does not tire as a layer does"),
    "NGRAM": DrafterKind("NGRAM", 4, "they cost nothing but their verification"),
}
NO_DRAFTER = "NONE"
FOLDER = "--speculative-draft-model-path"


@dataclass(frozen=True, slots=True)
class Speculation:
    """drafter: the resolved algorithm, folder: of its weights; width: drafts a step at most, 0 without a drafter;
    adaptive: whether the engine chooses how many."""

    drafter: str
    width: int
    adaptive: bool
    folder: str = ""


def resolve_speculation(
    wish: SpeculativeOptions,
    facts: ModelFacts,
    decisions: Decisions,
    folder: Path | None = None,
    model: Path | None = None,
) -> Speculation:
    """folder: of the drafter, where one was named; model: of what it drafts for. Raises UnsupportedConfig for wishes
    that contradict each other, and for a drafter that the checkpoint has not; CheckpointError for a folder that holds
    none, or one of another model.
    """
    width = _width(wish)
    algorithm, why = _algorithm(wish, folder, width)
    if algorithm == "NONE":
        if width:
            raise UnsupportedConfig(
                f"speculative_algorithm: NONE drafts nothing, but {width} drafts a step were asked for; leave the"
                " number out, or use --speculative-algorithm NEXTN"
            )
        asked = wish.speculative_algorithm or wish.mtp
        decisions.add("speculative_algorithm", "NONE", *((USER, "") if asked else (AUTO, why)))
        for name, value in _idle(wish).items():
            decisions.add(name, value, USER, "without effect: nothing drafts")
        return Speculation(NO_DRAFTER, 0, False)
    if width == 0:
        raise UnsupportedConfig(
            f"speculative_algorithm: {algorithm} with 0 drafts a step drafts nothing; use --speculative-algorithm NONE"
        )
    kind = _kind(algorithm, folder, facts)
    if kind is KINDS["STANDALONE"] and folder is not None and model is not None:
        check_vocabularies(folder, draft_model_facts(folder, facts).vocab, model, facts.vocab)
    if kind is not NEXTN and wish.mtp:
        raise UnsupportedConfig(
            f"mtp: counts tokens of the checkpoint's own next-token layer, and {algorithm} is another drafter; use"
            " --speculative-num-steps"
        )
    if branching(wish) and wish.mtp:
        raise UnsupportedConfig(
            f"mtp: counts tokens of a chain, and --speculative-eagle-topk {wish.speculative_eagle_topk} makes drafts a"
            f" tree; use --speculative-num-steps {wish.mtp - 1} in its place, or leave one of them out"
        )
    decisions.add("speculative_algorithm", algorithm, *source_and_reason(not why, why))
    if kind is HEAD and folder is not None:
        watched = read_eagle(folder, facts).watched
        if watched.layers:
            named = ", ".join(map(str, watched.layers))
            decisions.add("speculative_eagle_layers", named, MODEL, f"inputs of the target's layers: {watched.why}")
    if width is None:
        decisions.add("speculative_num_steps", kind.width, AUTO, kind.why)
    else:
        decisions.add("speculative_num_steps", width, USER, "")
    adaptive = wish.speculative_adaptive
    decisions.add(
        "speculative_adaptive",
        adaptive,
        *source_and_reason(not adaptive, "by measured times of steps and what was accepted"),
    )
    return Speculation(
        kind.name, kind.width if width is None else width, adaptive, "" if folder is None else str(folder)
    )


def _algorithm(wish: SpeculativeOptions, folder: Path | None, width: int | None) -> tuple[str, str]:
    """What was asked for, and why where it follows from something else."""
    asked = wish.speculative_algorithm
    if asked is not None:
        return asked, ""
    if folder is not None:
        return algorithm_of(folder), "what the drafter's folder holds"
    counted = width or branching(wish) or wish.speculative_num_draft_tokens
    return ("NEXTN", "") if counted else ("NONE", "not asked for")


def _idle(wish: SpeculativeOptions) -> dict[str, Value]:
    """What was asked for of drafts, and means nothing where there are none."""
    asked: dict[str, Value | None] = {
        "speculative_draft_model_path": wish.speculative_draft_model_path,
        "speculative_adaptive": None if wish.speculative_adaptive else False,
        "speculative_acceptance": wish.speculative_acceptance,
        "speculative_simulate_accept_length": wish.speculative_simulate_accept_length,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _kind(algorithm: str, folder: Path | None, facts: ModelFacts) -> DrafterKind:
    """The drafter of this name, once it is clear that there is one. Raises as `resolve_speculation`."""
    kind = KINDS[algorithm]
    if algorithm == "EAGLE" and folder is None:  # so other engines call the checkpoint's own layer
        kind = NEXTN
    if kind in (NEXTN, KINDS["NGRAM"]) and folder is not None:
        raise UnsupportedConfig(
            f"speculative_draft_model_path: {algorithm} has no folder of its own; leave one of them out, or use"
            " --speculative-algorithm EAGLE3 for a head and STANDALONE for a model"
        )
    if kind is NEXTN and not facts.nextn:
        raise UnsupportedConfig(
            f"speculative_algorithm: {algorithm} needs a next-token layer, and this checkpoint has none"
            f" (num_nextn_predict_layers is 0 in its config.json); name the folder of a head by {FOLDER}, or use"
            " --speculative-algorithm NGRAM or NONE"
        )
    if kind is NEXTN or kind is KINDS["NGRAM"]:
        return kind
    if folder is None:
        raise UnsupportedConfig(
            f"speculative_algorithm: {algorithm} drafts by weights of its own; name their folder by {FOLDER}"
        )
    if kind is HEAD:
        third = read_eagle(folder, facts).third
        if algorithm == "EAGLE3" and not third:
            raise UnsupportedConfig(
                f"speculative_algorithm: {folder} holds a head of the format before EAGLE-3 (its config.json has no"
                " draft_vocab_size); use --speculative-algorithm EAGLE"
            )
        return kind
    draft_model_facts(folder, facts)
    return kind


def _width(wish: SpeculativeOptions) -> int | None:
    """Drafts one behind the other, None where no wish says so."""
    steps, tokens, mtp = wish.speculative_num_steps, wish.speculative_num_draft_tokens, wish.mtp
    said = {
        "--speculative-num-steps": steps,
        "--speculative-num-draft-tokens": None if tokens is None or branching(wish) else tokens - 1,
        "--mtp": None if mtp is None else mtp - 1,
    }
    counts = {count for count in said.values() if count is not None}
    if len(counts) > 1:
        told = ", ".join(f"{flag} means {count} drafts" for flag, count in said.items() if count is not None)
        raise UnsupportedConfig(
            f"speculative_num_steps: {told}; give one of them, a chain verifies one token more than it drafts"
        )
    if counts and max(counts) > DEEPEST:
        instead = "" if wish.speculative_algorithm == "NGRAM" else ", or a tree (--speculative-eagle-topk 4)"
        raise UnsupportedConfig(
            f"speculative_num_draft_tokens: {tokens} tokens in one chain; use at most {DEEPEST + 1}{instead}"
        )
    return counts.pop() if counts else None


def branching(wish: SpeculativeOptions) -> bool:
    """Whether drafts may part ways."""
    return (wish.speculative_eagle_topk or 1) > 1
