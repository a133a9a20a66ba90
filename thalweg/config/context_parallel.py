"""Ways to divide the tokens of prompts over context-parallel ranks; `batch.share` does it."""

from __future__ import annotations

INTERLEAVE, ZIGZAG = "interleave", "zigzag"
SGLANG_STRATEGIES = {"round-robin-split": INTERLEAVE, "in-seq-split": ZIGZAG}
STRATEGIES = {
    INTERLEAVE: "blocks of 128 tokens in turn",
    ZIGZAG: "a piece from the front of each prompt, and one as long from its end",
}
