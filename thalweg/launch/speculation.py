"""What drafts tokens, and how many: decided from the user's wishes and what the checkpoint has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from thalweg.config.model import ModelFacts
from thalweg.config.speculative import SpeculativeOptions
from thalweg.core.errors import CannotServe
from thalweg.launch.ledger import Ledger, source
from thalweg.launch.resolved import ASKED, AUTO


class Kind(NamedTuple):
    """name: the drafter's. width: drafts a step where nobody says how many, for the reason `why`."""

    name: str
    width: int
    why: str


NEXTN = Kind("nextn", 3, "those behind the third are seldom right")
KINDS = {"NEXTN": NEXTN, "EAGLE": NEXTN, "NGRAM": Kind("ngram", 4, "they cost nothing but their verification")}


@dataclass(frozen=True, slots=True)
class Speculation:
    """drafter: as of `engine.settings.EngineSettings`; width: drafts a step at most, 0 without one; adaptive: whether the engine chooses how many."""

    drafter: str
    width: int
    adaptive: bool


def decide_speculation(wish: SpeculativeOptions, facts: ModelFacts, ledger: Ledger) -> Speculation:
    """Raises CannotServe for wishes that contradict each other, and for a drafter that the checkpoint has not."""
    width = _width(wish)
    asked = wish.speculative_algorithm
    algorithm = asked or ("NEXTN" if width else "NONE")
    if algorithm == "NONE":
        if width:
            raise CannotServe(
                f"speculative_algorithm: NONE drafts nothing, but {width} drafts a step were asked for; leave the number out, or use "
                "--speculative-algorithm NEXTN"
            )
        ledger.note("speculative_algorithm", "NONE", *((ASKED, "") if asked or wish.mtp else (AUTO, "not asked for")))
        return Speculation("", 0, False)
    if width == 0:
        raise CannotServe(
            f"speculative_algorithm: {algorithm} with 0 drafts a step drafts nothing; use --speculative-algorithm NONE"
        )
    kind = KINDS[algorithm]
    if kind is not NEXTN and wish.mtp:
        raise CannotServe(
            f"mtp: counts tokens of the checkpoint's own next-token layer, and {algorithm} is another drafter; use --speculative-num-steps"
        )
    if kind is NEXTN and not facts.nextn:
        raise CannotServe(
            f"speculative_algorithm: {algorithm} needs a next-token layer, and this checkpoint has none (num_nextn_predict_layers is 0 in its "
            "config.json); use --speculative-algorithm NGRAM or NONE"
        )
    ledger.note("speculative_algorithm", algorithm, ASKED, "")
    if width is None:
        ledger.note("speculative_num_steps", kind.width, AUTO, kind.why)
    else:
        ledger.note("speculative_num_steps", width, ASKED, "")
    adaptive = wish.speculative_adaptive
    ledger.note(
        "speculative_adaptive", adaptive, *source(not adaptive, "by measured times of steps and what was accepted")
    )
    return Speculation(kind.name, kind.width if width is None else width, adaptive)


def _width(wish: SpeculativeOptions) -> int | None:
    """Drafts a step, None where no wish says so."""
    steps, tokens, mtp = wish.speculative_num_steps, wish.speculative_num_draft_tokens, wish.mtp
    said = {
        "--speculative-num-steps": steps,
        "--speculative-num-draft-tokens": None if tokens is None else tokens - 1,
        "--mtp": None if mtp is None else mtp - 1,
    }
    counts = {count for count in said.values() if count is not None}
    if len(counts) > 1:
        told = ", ".join(f"{flag} means {count} drafts" for flag, count in said.items() if count is not None)
        raise CannotServe(
            f"speculative_num_steps: {told}; give one of them, a chain verifies one token more than it drafts"
        )
    return counts.pop() if counts else None
