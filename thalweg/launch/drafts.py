"""All that is decided about drafts, together: what makes them, which rule judges them, whether they part ways."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from thalweg.config.model import ModelFacts
from thalweg.config.options import Options
from thalweg.core.report import AUTO
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.launch.acceptance import Acceptance, decide_acceptance
from thalweg.launch.ledger import Ledger
from thalweg.launch.speculation import NO_DRAFTER, Speculation, branching, decide_speculation
from thalweg.launch.trees import decide_tree


@dataclass(frozen=True, slots=True)
class Drafts:
    """ledger: where it was noted, and what else is decided for the same engine will be."""

    ledger: Ledger
    speculation: Speculation
    acceptance: Acceptance
    tree: TreeShape

    @property
    def width(self) -> int:
        """Tokens that are drafted a step, at most."""
        return self.tree.num_drafts or self.speculation.width


def decide_drafts(config: Options, facts: ModelFacts, model: Path, folder: Path | None) -> Drafts:
    """model: its folder; folder: of the drafter, where one was named. Raises as `decide_speculation`,
    `decide_acceptance` and `decide_tree`.
    """
    wish, ledger = config.speculative, Ledger()
    speculation = decide_speculation(wish, facts, ledger, folder, model)
    acceptance = decide_acceptance(wish, speculation.drafter, speculation.width, branching(wish), ledger)
    tree = decide_tree(wish, speculation.drafter, speculation.width, ledger)
    return Drafts(ledger, speculation, acceptance, tree)


def no_drafts(why: str) -> Drafts:
    """Plain decoding, although drafts were asked for."""
    ledger = Ledger()
    ledger.note("speculative_algorithm", "NONE", AUTO, why)
    return Drafts(ledger, Speculation(NO_DRAFTER, 0, False), Acceptance(), CHAIN)
