"""The catalog of drafters: what each can do, and where its code is. No torch. To add one: a file, and a row here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

NO_DRAFTER = "NONE"


class DrafterWeights(Enum):
    """Location of a drafter's weights."""

    NONE = "it has none"
    CHECKPOINT = "in the model's checkpoint"
    FOLDER = "in a folder of its own"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterEntry:
    """A row of the catalog. Code is named by entry points (`config.entry_point`)."""

    summary: str  # what it drafts with
    build: str  # makes an empty `spec.drafter.Drafter` of (target, folder, draft_sampling)
    # checks the folder by (algorithm, folder, target's facts, target's folder); raises CheckpointError,
    # UnsupportedConfig
    inspect: str = ""
    weights: DrafterWeights
    steps: int = 3  # drafts of a chain where the user names no number
    steps_reason: str = "later drafts are seldom right"
    can_branch: bool = False  # drafts may form a tree
    is_sampled: bool = False  # drafts are samples of a distribution that it knows
    without_folder: str = ""  # the drafter that is meant where no folder is named
    vllm_methods: tuple[str, ...] = ()  # its names in vLLM's --speculative-config


DRAFTERS: dict[str, DrafterEntry] = {
    "NEXTN": DrafterEntry(
        summary="the checkpoint's next-token layer",
        build="spec.nextn:build",
        weights=DrafterWeights.CHECKPOINT,
        can_branch=True,
        is_sampled=True,
        vllm_methods=("mtp", "deepseek_mtp"),
    ),
    "EAGLE": DrafterEntry(
        summary="an EAGLE or EAGLE-2 head; without a folder NEXTN, as other engines call it",
        build="spec.eagle:build",
        inspect="launch.drafter_checks:inspect_eagle",
        weights=DrafterWeights.FOLDER,
        without_folder="NEXTN",
        can_branch=True,
        is_sampled=True,
        vllm_methods=("eagle",),
    ),
    "EAGLE3": DrafterEntry(
        summary="an EAGLE-3 head",
        build="spec.eagle:build",
        inspect="launch.drafter_checks:inspect_eagle",
        weights=DrafterWeights.FOLDER,
        can_branch=True,
        is_sampled=True,
        vllm_methods=("eagle3",),
    ),
    "STANDALONE": DrafterEntry(
        summary="a smaller model",
        build="spec.draft_model:build",
        inspect="launch.drafter_checks:inspect_draft_model",
        weights=DrafterWeights.FOLDER,
        steps=4,
        steps_reason="a whole model stays right for longer than one layer",
        can_branch=True,
        is_sampled=True,
        vllm_methods=("draft_model",),
    ),
    "NGRAM": DrafterEntry(
        summary="the tokens that followed the last ones earlier in the sequence",
        build="spec.ngram:build",
        weights=DrafterWeights.NONE,
        steps=4,
        steps_reason="they cost nothing but their verification",
        vllm_methods=("ngram",),
    ),
}
