"""The user's wishes for speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.config.setting import check_section, setting

ALGORITHMS = ("NEXTN", "EAGLE", "NGRAM", "NONE")
DEEPEST = 8  # drafts a step: a layer that was trained for one is right in few of those behind the fourth


@dataclass(frozen=True, kw_only=True)
class SpeculativeOptions:
    """Tokens that are drafted, and verified several in a step. They are those of plain decoding, seed for seed, whatever is drafted."""

    speculative_algorithm: str | None = setting(
        None,
        "what drafts tokens. NEXTN: the checkpoint's own next-token layer (EAGLE is the same, as other engines call it); NGRAM: what followed the "
        "last tokens when they stood in the sequence before; NONE: nothing",
        choices=ALGORITHMS,
        auto="NEXTN where a number of drafts is given, else NONE",
        off="NONE",
        on="NEXTN",
    )
    speculative_adaptive: bool = setting(
        True,
        "draft as many of these in each step as bring most tokens a second, by measured times and what was accepted lately; off: always all",
    )
    speculative_num_steps: int | None = setting(
        None,
        "tokens drafted for each step at most, one behind the other",
        least=1,
        most=DEEPEST,
        auto="NEXTN 3, NGRAM 4",
    )
    speculative_num_draft_tokens: int | None = setting(
        None,
        "tokens verified in a step: one more than are drafted",
        least=2,
        most=DEEPEST + 1,
        auto="--speculative-num-steps + 1",
    )
    mtp: int | None = setting(
        None,
        "short for a chain of the checkpoint's own: tokens a step brings at most; 1 is off",
        least=1,
        most=DEEPEST + 1,
        auto="--speculative-num-steps + 1",
    )

    def __post_init__(self) -> None:
        check_section(self)
