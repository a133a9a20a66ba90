"""What drafts cost at best, by what makes them: the step verifies them, and each is a forward of the drafter's own
weights, where it has any. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from thalweg.config.eagle import read_eagle
from thalweg.config.model import ModelFacts
from thalweg.core.report import AUTO
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.launch.planning.layouts import ONE, ParallelLayout
from thalweg.launch.planning.roofline import KVBytes, StepPhase, StepShape, nextn, phases, verified
from thalweg.launch.planning.weights import PLAIN, NumberBytes
from thalweg.launch.resolved import Resolved
from thalweg.spec.draft_model import draft_model_facts

HINTED = 3  # drafts, where nothing drafts and something could


@dataclass(frozen=True, slots=True)
class DraftForward:
    """That makes a draft of each row. facts: as of a model with its layers and its head. each, once: numbers of the
    matrices before its layers, which every draft is multiplied by, and which the states of a step are; in 16 bits.
    widths, kept: of the weights, and of what it keeps of a token. cut: whether a layout cuts it as it does the model,
    else each GPU has all of it.
    """

    facts: ModelFacts
    each: int
    once: int
    widths: NumberBytes
    kept: KVBytes
    cut: bool = False

    def work(self, shape: StepShape, layout: ParallelLayout) -> list[StepPhase]:
        return [_product("join", self.each, shape, self.widths), *self.layers(shape, layout)]

    def layers(self, shape: StepShape, layout: ParallelLayout) -> list[StepPhase]:
        return phases(self.facts, shape, layout if self.cut else ONE, self.widths, self.kept)


@dataclass(frozen=True, slots=True)
class DrafterPlanner:
    """name: in words. forward: None where drafts are looked up, and cost nothing. most: drafts of a chain; tree: their
    form. asked: whether anything drafts; else it is what could.
    """

    name: str
    forward: DraftForward | None
    most: int
    tree: TreeShape = CHAIN
    asked: bool = True

    @property
    def counts(self) -> tuple[int, ...]:
        """Of drafts that are worth comparing: all of a tree, and of a chain each."""
        return (self.tree.num_drafts,) if self.tree.is_tree else tuple(range(1, self.most + 1))


def by_nextn(facts: ModelFacts, widths: NumberBytes, kept: KVBytes) -> DraftForward:
    """The checkpoint's own layer, behind what joins embedding and hidden state. Raises ValueError as `nextn`."""
    return DraftForward(nextn(facts), 2 * facts.hidden * facts.hidden, 0, widths, kept, cut=True)


def by_head(folder: Path, target: ModelFacts, dtype: str = "bfloat16") -> DraftForward:
    """An EAGLE head: one of EAGLE-3 joins the streams of the target once a step, and its layer reads two vectors side
    by side. Raises CheckpointError.
    """
    eagle = read_eagle(folder, target)
    facts = replace(eagle.facts, vocab=eagle.draft_vocab)
    if not eagle.is_eagle3:
        return _own(facts, 2 * facts.hidden * facts.hidden, 0, dtype)
    wider = facts.hidden * facts.head_dim * (facts.heads + 2 * facts.kv_heads)
    return _own(facts, wider, len(eagle.watched.layers) * eagle.target_hidden * facts.hidden, dtype)


def by_model(folder: Path, target: ModelFacts, dtype: str = "bfloat16") -> DraftForward:
    """A smaller model. Raises CheckpointError."""
    return _own(draft_model_facts(folder, target), 0, 0, dtype)


def drafter_planner(facts: ModelFacts, resolved: Resolved, widths: NumberBytes, kept: KVBytes) -> DrafterPlanner | None:
    """What drafts in this engine. Where nobody said whether anything should, and the checkpoint has a layer for it,
    what could; else None. widths, kept: of the model.
    """
    engine = resolved.engine
    dtype = engine.dtype if engine.device == "cpu" else "bfloat16"
    most = engine.tree.max_depth if engine.tree.is_tree else engine.num_drafts
    name, folder = engine.speculative_algorithm, Path(engine.speculative_draft_model_path)
    if name == "NEXTN":
        return DrafterPlanner("the next-token layer", by_nextn(facts, widths, kept), most, engine.tree)
    if name in ("EAGLE", "EAGLE3"):
        return DrafterPlanner("the EAGLE head", by_head(folder, facts, dtype), most, engine.tree)
    if name == "STANDALONE":
        return DrafterPlanner("the smaller model", by_model(folder, facts, dtype), most, engine.tree)
    if name == "NGRAM":
        return DrafterPlanner("looking up the text itself", None, most)
    chosen = next(one for one in resolved.decisions if one.name == "speculative_algorithm")
    if chosen.source != AUTO or engine.drafter_left_out or not facts.nextn or facts.moe is None:
        return None
    return DrafterPlanner("the next-token layer", by_nextn(facts, widths, kept), HINTED, asked=False)


def drafting(
    facts: ModelFacts,
    shape: StepShape,
    drafts: int,
    layout: ParallelLayout,
    widths: NumberBytes,
    kept: KVBytes,
    made: DrafterPlanner,
) -> list[StepPhase]:
    """A decode step that verifies drafts and makes as many anew. shape: of the step without."""
    whole = phases(facts, verified(shape, drafts), layout, widths, kept)
    forward = made.forward
    if forward is None:
        return whole
    states = verified(shape, drafts)
    whole.append(_product("join", forward.once, states, forward.widths))
    if not made.tree.is_tree:
        return [*whole, *(phase.times(drafts) for phase in forward.work(shape, layout))]
    wide = replace(shape, new=made.tree.branching, scored=True)
    rest = (phase.times(made.tree.max_depth - 1) for phase in forward.work(wide, layout))
    return [*whole, *forward.work(shape, layout), *rest]


def _own(facts: ModelFacts, each: int, once: int, dtype: str) -> DraftForward:
    """Of weights in a folder of their own, which a CPU loads in this type."""
    plain = PLAIN[dtype]
    return DraftForward(
        facts, each, once, NumberBytes.of(facts, dtype, dequantized=plain > 2), KVBytes.of(facts, plain, plain)
    )


def _product(name: str, numbers: int, shape: StepShape, widths: NumberBytes) -> StepPhase:
    return StepPhase(name, numbers * widths.plain, bf16=2.0 * shape.tokens * numbers)
