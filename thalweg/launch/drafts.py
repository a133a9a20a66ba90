"""All that is decided about drafts, together: what makes them, which rule judges them, whether they part ways."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from thalweg.config.model import ModelFacts
from thalweg.config.options import Options
from thalweg.core.report import AUTO
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.launch.acceptance import Acceptance, resolve_acceptance
from thalweg.launch.decisions import Decisions
from thalweg.launch.speculation import NO_DRAFTER, Speculation, branching, resolve_speculation
from thalweg.launch.trees import resolve_tree


@dataclass(frozen=True, slots=True)
class DraftingDecision:
    """decisions: where it was noted, and what else is decided for the same engine will be."""

    decisions: Decisions
    speculation: Speculation
    acceptance: Acceptance
    tree: TreeShape

    @property
    def width(self) -> int:
        """Tokens that are drafted a step, at most."""
        return self.tree.num_drafts or self.speculation.width


def resolve_drafts(config: Options, facts: ModelFacts, model: Path, folder: Path | None) -> DraftingDecision:
    """model: its folder; folder: of the drafter, where one was named. Raises as `decide_speculation`,
    `decide_acceptance` and `decide_tree`.
    """
    wish, decisions = config.speculative, Decisions()
    speculation = resolve_speculation(wish, facts, decisions, folder, model)
    acceptance = resolve_acceptance(wish, speculation.drafter, speculation.width, branching(wish), decisions)
    tree = resolve_tree(wish, speculation.drafter, speculation.width, decisions)
    return DraftingDecision(decisions, speculation, acceptance, tree)


def no_drafts(why: str) -> DraftingDecision:
    """Plain decoding, although drafts were asked for."""
    decisions = Decisions()
    decisions.add("speculative_algorithm", "NONE", AUTO, why)
    return DraftingDecision(decisions, Speculation(NO_DRAFTER, 0, False), Acceptance(), CHAIN)
