"""Resolves the drafter, the number and form of drafts, and the acceptance rule."""

from __future__ import annotations

from pathlib import Path

from thalweg.config.drafters import DRAFTERS, NO_DRAFTER, DrafterEntry, DrafterWeights
from thalweg.config.eagle import algorithm_of
from thalweg.config.entry_point import load_entry
from thalweg.config.model import ModelFacts
from thalweg.config.speculative import MAX_STEPS, RELAXED_DELTA, RELAXED_TOPK, SpeculativeOptions
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.report import AUTO, USER, Decision, Value
from thalweg.core.tree import MAX_TREE_NODES, TreeShape
from thalweg.launch.decisions import Decisions

FOLDER_FLAG = "--speculative-draft-model-path"
TREE_DRAFTS = 15  # drafts of a tree by default: with its root as many tokens as a tile of the kernels has rows
LOSSY = "LOSSY: answers are not distributed as the model's, and greedy ones are not the model's own"
SIMULATED = "drafts are accepted without verification, so the text means nothing"
POINT_MASS = "these drafts are no samples, and for them the rule is the same as gumbel-max"
MULTI_DRAFT = "for the drafts of a tree, the multi-draft form of gumbel-max is used"


def resolve_drafting(
    options: SpeculativeOptions,
    facts: ModelFacts,
    decisions: Decisions,
    folder: Path | None = None,
    model: Path | None = None,
) -> None:
    """Decides all speculative_* fields. folder: of the drafter, where the user named one; model: the target's.

    Raises UnsupportedConfig for settings that contradict each other or need another drafter or checkpoint, and
    CheckpointError for a folder that holds no drafter for this model.
    """
    steps = _requested_steps(options)
    algorithm, reason = _algorithm(options, folder, steps)
    if algorithm == NO_DRAFTER:
        _without_drafter(options, steps, reason, decisions)
        return
    if steps == 0:
        raise UnsupportedConfig(
            f"speculative_algorithm: {algorithm} with 0 drafts a step drafts nothing; use --speculative-algorithm NONE"
        )
    name = DRAFTERS[algorithm].without_folder if folder is None else ""
    drafter = DRAFTERS[name or algorithm]
    notes = _inspect(name or algorithm, algorithm, folder, facts, model)
    _check_mtp(options, algorithm, drafter)
    decisions.record("speculative_algorithm", algorithm, not reason, reason)
    decisions.entries += notes
    decisions.fields |= {
        "speculative_algorithm": name or algorithm,
        "speculative_draft_model_path": "" if folder is None else str(folder),
    }
    depth = decisions.choose("speculative_num_steps", steps, drafter.steps, drafter.steps_reason)
    decisions.fields["speculative_num_draft_tokens"] = depth + 1
    adaptive = options.speculative_adaptive
    reason = "by measured step times and recent acceptance"
    decisions.record("speculative_adaptive", adaptive, not adaptive, reason)
    _resolve_shared_topk(options, name or algorithm, depth, facts, decisions)
    _resolve_acceptance(options, drafter, depth, decisions)
    _resolve_tree(options, algorithm, depth, decisions)


def without_room(reason: str) -> Decisions:
    """Plain decoding, although the user set a drafter."""
    decisions = Decisions()
    decisions.add("speculative_algorithm", NO_DRAFTER, AUTO, f"no memory for the drafter: {reason}")
    return decisions


def refuse_simulated(options: SpeculativeOptions) -> None:
    """Raises UnsupportedConfig for simulated acceptance outside a benchmark."""
    if options.speculative_simulate_accept_length is not None and not options.allow_simulated_acceptance:
        raise UnsupportedConfig(
            f"speculative_simulate_accept_length: {SIMULATED}. It is for `thalweg bench one-batch`, `offline` and"
            " `speculation`; leave it out, or add --allow-simulated-acceptance"
        )


def has_branches(options: SpeculativeOptions) -> bool:
    """Whether the user set a tree of drafts."""
    return (options.speculative_eagle_topk or 1) > 1


def _requested_steps(options: SpeculativeOptions) -> int | None:
    """Drafts of a chain, one after the other; None where no setting says so."""
    steps, tokens, mtp = options.speculative_num_steps, options.speculative_num_draft_tokens, options.mtp
    meanings = {
        "--speculative-num-steps": steps,
        "--speculative-num-draft-tokens": None if tokens is None or has_branches(options) else tokens - 1,
        "--mtp": None if mtp is None else mtp - 1,
    }
    counts = {count for count in meanings.values() if count is not None}
    if len(counts) > 1:
        listed = ", ".join(f"{flag} means {count} drafts" for flag, count in meanings.items() if count is not None)
        raise UnsupportedConfig(
            f"speculative_num_steps: {listed}; give one of them. A chain verifies one token more than it drafts"
        )
    if counts and max(counts) > MAX_STEPS:
        can_branch = options.speculative_algorithm in (None, NO_DRAFTER) or _entry(options).can_branch
        instead = ", or a tree (--speculative-eagle-topk 4)" if can_branch else ""
        raise UnsupportedConfig(
            f"speculative_num_draft_tokens: {tokens} tokens in one chain; use at most {MAX_STEPS + 1}{instead}"
        )
    return counts.pop() if counts else None


def _entry(options: SpeculativeOptions) -> DrafterEntry:
    assert options.speculative_algorithm is not None
    return DRAFTERS[options.speculative_algorithm]


def _algorithm(options: SpeculativeOptions, folder: Path | None, steps: int | None) -> tuple[str, str]:
    """The algorithm, and the reason where the user did not ask for it directly."""
    if options.speculative_algorithm is not None:
        return options.speculative_algorithm, ""
    if folder is not None:
        return algorithm_of(folder), "what the drafter's folder holds"
    is_asked = steps or has_branches(options) or options.speculative_num_draft_tokens
    return ("NEXTN", "") if is_asked else (NO_DRAFTER, "not asked for")


def _without_drafter(options: SpeculativeOptions, steps: int | None, reason: str, decisions: Decisions) -> None:
    if steps:
        raise UnsupportedConfig(
            f"speculative_algorithm: NONE drafts nothing, and the options set {steps} drafts a step; leave the number"
            " out, or use --speculative-algorithm NEXTN"
        )
    if has_branches(options):
        raise UnsupportedConfig(
            f"--speculative-eagle-topk {options.speculative_eagle_topk} needs a drafter that can branch, and there is"
            " none. Use --speculative-algorithm NEXTN, or leave it out."
        )
    _check_thresholds(options)
    is_asked = bool(options.speculative_algorithm or options.mtp)
    decisions.record("speculative_algorithm", NO_DRAFTER, is_asked, reason)
    unused: dict[str, Value | None] = {
        "speculative_draft_model_path": options.speculative_draft_model_path,
        "speculative_adaptive": None if options.speculative_adaptive else False,
        "speculative_acceptance": options.speculative_acceptance,
        "index_share_for_mtp_iteration": options.index_share_for_mtp_iteration or None,
        "speculative_simulate_accept_length": options.speculative_simulate_accept_length,
    }
    for name, value in unused.items():
        if value is not None:
            decisions.entries.append(Decision(name, value, USER, "without effect: nothing drafts"))


def _inspect(name: str, algorithm: str, folder: Path | None, facts: ModelFacts, model: Path | None) -> list[Decision]:
    """Checks that the drafter has its weights. algorithm: its name as the user wrote it."""
    drafter = DRAFTERS[name]
    if drafter.weights is not DrafterWeights.FOLDER and folder is not None:
        raise UnsupportedConfig(
            f"speculative_draft_model_path: {algorithm} has no folder of its own; leave one of them out, or use"
            " --speculative-algorithm EAGLE3 for a head and STANDALONE for a model"
        )
    if drafter.weights is DrafterWeights.CHECKPOINT and not facts.nextn:
        raise UnsupportedConfig(
            f"speculative_algorithm: {algorithm} needs a next-token layer, and this checkpoint has none"
            f" (num_nextn_predict_layers is 0 in its config.json); name the folder of a head by {FOLDER_FLAG}, or use"
            " --speculative-algorithm NGRAM or NONE"
        )
    if drafter.weights is DrafterWeights.FOLDER and folder is None:
        raise UnsupportedConfig(
            f"speculative_algorithm: {algorithm} drafts by weights of its own; name their folder by {FOLDER_FLAG}"
        )
    notes: list[Decision] = load_entry(drafter.inspect)(algorithm, folder, facts, model) if drafter.inspect else []
    return notes


def _resolve_shared_topk(
    options: SpeculativeOptions, name: str, depth: int, facts: ModelFacts, decisions: Decisions
) -> None:
    """depth: drafts one after the other. Raises UnsupportedConfig."""
    if not options.index_share_for_mtp_iteration:
        return
    if facts.indexer is None or name != "NEXTN":
        without = (
            f"{facts.architecture} attends to all context" if facts.indexer is None else f"{name} is another drafter"
        )
        raise UnsupportedConfig(
            f"index_share_for_mtp_iteration: the steps of a NEXTN draft share a selection of context, and {without};"
            " leave it out, or use --speculative-algorithm NEXTN with a model that has an indexer, such as V3.2"
        )
    reason = (
        "without effect: there is one draft" if depth == 1 else "later drafts attend to what the first one selected"
    )
    decisions.add("index_share_for_mtp_iteration", True, USER, reason)


def _check_mtp(options: SpeculativeOptions, algorithm: str, drafter: DrafterEntry) -> None:
    if options.mtp and drafter.weights is not DrafterWeights.CHECKPOINT:
        raise UnsupportedConfig(
            f"mtp: counts tokens of the checkpoint's own next-token layer, and {algorithm} is another drafter; use"
            " --speculative-num-steps"
        )
    if options.mtp and has_branches(options):
        raise UnsupportedConfig(
            f"mtp: counts tokens of a chain, and --speculative-eagle-topk {options.speculative_eagle_topk} makes drafts"
            f" a tree; use --speculative-num-steps {options.mtp - 1} in its place, or leave one of them out"
        )


def _check_thresholds(options: SpeculativeOptions) -> None:
    rule = options.speculative_acceptance
    for name in ("speculative_relaxed_topk", "speculative_relaxed_delta"):
        if vars(options)[name] is not None and rule != "relaxed":
            raise UnsupportedConfig(
                f"{name}: a threshold of the relaxed rule, and the rule is {rule or 'gumbel-max'}; leave it out, or"
                " use --speculative-acceptance relaxed"
            )


def _resolve_acceptance(options: SpeculativeOptions, drafter: DrafterEntry, depth: int, decisions: Decisions) -> None:
    _check_thresholds(options)
    asked, length = options.speculative_acceptance, options.speculative_simulate_accept_length
    delta = options.speculative_relaxed_delta
    topk, delta = options.speculative_relaxed_topk or RELAXED_TOPK, RELAXED_DELTA if delta is None else delta
    decisions.fields |= {"speculative_relaxed_topk": topk, "speculative_relaxed_delta": delta}
    reason = "tokens are the same as without drafts, seed for seed" if asked is None else ""
    rule = asked or "gumbel-max"
    if asked == "relaxed":
        reason = f"{LOSSY}; drafts among the {topk} most likely tokens, at most {delta:g} less likely than the first"
    if asked == "rejection-sampling":
        reason = MULTI_DRAFT if has_branches(options) else "" if drafter.is_sampled else POINT_MASS
        rule = "gumbel-max" if reason else asked
    decisions.add("speculative_acceptance", asked or "gumbel-max", AUTO if asked is None else USER, reason)
    decisions.fields["speculative_acceptance"] = rule
    if length is None:
        return
    if length > depth + 1:
        raise UnsupportedConfig(
            f"speculative_simulate_accept_length: {length:g} tokens a verification, and {depth} drafts one after the"
            f" other bring {depth + 1} at most; give less, or more --speculative-num-steps"
        )
    if asked not in (None, "gumbel-max"):
        raise UnsupportedConfig(
            f"speculative_acceptance: {asked} accepts no draft where acceptance is simulated; leave it out, or"
            " --speculative-simulate-accept-length"
        )
    decisions.add("speculative_simulate_accept_length", length, USER, f"BENCHMARKS ONLY: {SIMULATED}")


def _resolve_tree(options: SpeculativeOptions, algorithm: str, depth: int, decisions: Decisions) -> None:
    """algorithm: as the user names it. depth: drafts one after the other."""
    branches, tokens, form = (
        options.speculative_eagle_topk,
        options.speculative_num_draft_tokens,
        options.speculative_tree,
    )
    if branches is None or branches == 1:
        if form is not None:
            raise UnsupportedConfig(
                f"speculative_tree: {form} is a form of trees, and drafts are a chain; leave it out, or use"
                " --speculative-eagle-topk 4"
            )
        return
    if not DRAFTERS[algorithm].can_branch:
        able = next(name for name, entry in DRAFTERS.items() if entry.can_branch)
        raise UnsupportedConfig(
            f"--speculative-eagle-topk {branches} needs a drafter that can branch; {algorithm} proposes a chain. Use 1,"
            f" or {able}."
        )
    shape = TreeShape(branches, depth, 0, form != "static")
    if shape.dynamic and shape.num_expanded() > MAX_TREE_NODES:
        raise UnsupportedConfig(
            f"speculative_eagle_topk: a tree {depth} deep with {branches} children a token grows from"
            f" {shape.num_expanded()} nodes, more than the {MAX_TREE_NODES} that there can be; use"
            f" --speculative-num-steps {1 + MAX_TREE_NODES // branches}, or --speculative-tree static"
        )
    candidates = shape.num_candidates()
    if tokens is not None and tokens - 1 > candidates:
        raise UnsupportedConfig(
            f"speculative_num_draft_tokens: {tokens}, but a tree {depth} deep with {branches} children a token has"
            f" {candidates} drafts at most; use {candidates + 1} or fewer, or more --speculative-num-steps or"
            " --speculative-eagle-topk"
        )
    drafts = min(TREE_DRAFTS, candidates) if tokens is None else tokens - 1
    if drafts == 1:
        decisions.add("speculative_eagle_topk", 1, AUTO, "one draft is a chain")
        decisions.fields |= {"speculative_num_steps": 1, "speculative_num_draft_tokens": 2}
        return
    decisions.add("speculative_eagle_topk", branches, USER, "")
    reason = "as many as a tile of the kernels has rows, or all"
    decisions.record("speculative_num_draft_tokens", drafts + 1, tokens is not None, reason)
    decisions.choose("speculative_tree", form, "dynamic", "it grows where drafts are likely")
