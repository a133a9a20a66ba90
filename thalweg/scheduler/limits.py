"""What the scheduler is told once, at the start."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.core.tree import CHAIN, TreeShape


@dataclass(frozen=True, slots=True)
class Limits:
    """slots: requests that run at once. budget: tokens a step may compute, prefill chunks included (there are no
    others). beside: pairs of (rows, tokens), rows rising: up to how many tokens prompts may fill a step beside at least
    so many decoding rows, which wait for them; without pairs, up to the budget. context: the model's longest sequence,
    in tokens. vocab: number of token ids. eos_ids: they end a sequence unless it ignores EOS. stages: pipeline stages.
    policy: the order of the queue, a key of `queue.POLICIES`. seed: of the seeds drawn for requests without one. tree:
    the shape of what is drafted.
    """

    slots: int
    budget: int
    context: int
    vocab: int
    eos_ids: tuple[int, ...] = ()
    stages: int = 1
    policy: str = "fcfs"
    seed: int = 0
    beside: tuple[tuple[int, int], ...] = ()
    tree: TreeShape = CHAIN

    def __post_init__(self) -> None:
        counts = {
            "slots": self.slots,
            "budget": self.budget,
            "context": self.context,
            "vocab": self.vocab,
            "stages": self.stages,
        }
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        rows = [rows for rows, _ in self.beside]
        if rows != sorted(set(rows)) or any(count < 1 for pair in self.beside for count in pair):
            raise ValueError(f"beside must have rising rows, and at least 1 token for each, got {self.beside}")

    def prompt_tokens(self, decoding: int, left: int) -> int:
        """How many of the `left` tokens of a step prompts may have beside so many decoding rows: half a chunk at least,
        however many there are.
        """
        allowed = left
        for rows, tokens in self.beside:
            if rows <= decoding:
                allowed = max(tokens - (self.budget - left), (tokens - rows + 1) // 2, 1)
        return min(allowed, left)
