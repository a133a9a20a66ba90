"""What lies in a GPU's memory once an engine has started, and what that leaves for the KV cache. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.config.model import ModelFacts
from thalweg.core.plan import PAGE
from thalweg.core.sampling import MAX_EOS_IDS, MAX_LOGIT_BIAS, MAX_STOP_IDS
from thalweg.quant.catalog import quantized

RESERVE = 1 << 30  # as `engine.memory` keeps

# Fitted to starts on an H100 (torch 2.11) of V2-Lite in bf16, Qwen2.5-7B in bf16 and five layers of V3 in FP8; each sum
# below came out within 3 % of what the engine measured, with the settings that the resolver chooses.
BESIDE = 808e6  # bytes of the driver's context, loaded kernels and libraries
HELD_DENSE, HELD_SPARSE = (
    1.14,
    1.8,
)  # times what a step uses, that torch's allocator then holds: blocks of many sizes leave gaps
POOLED = 1.28  # the same of what is recorded
RECORDINGS = 30e6  # bytes of the driver, once anything is recorded
RECORDED = 64e3  # and for each layer of each recording; layers with experts have more kernels
SPARSE_KERNELS = 1.25
LOGIT, ACTIVATION = 4, 2  # bytes of a number
GROUPED = 3072  # tokens from which FP8 experts run as DeepGEMM's grouped products, as `kernels.experts.ext` has it


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of one GPU. free: before anything starts. beside: of the driver and libraries. step: of the largest one
    while it runs. slots: state of the running requests. page: of 64 tokens in all planes.
    """

    free: float
    beside: float
    weights: float
    step: float
    graphs: float
    slots: float
    reserve: float
    page: float

    @property
    def left(self) -> float:
        """For pages, the null page not counted."""
        taken = self.beside + self.weights + self.step + self.graphs + self.slots + self.reserve
        return self.free - taken - self.page

    @property
    def pages(self) -> int:
        return max(int(self.left // self.page), 0)

    @property
    def tokens(self) -> int:
        return self.pages * PAGE


@dataclass(frozen=True, slots=True)
class EngineExtent:
    """What an engine prepares for. slots: running requests; budget: tokens of a step; context: longest sequence. rows,
    tokens: of the steps that are recorded whole, and in parts. drafts: bytes that drafts add to a running request's
    state.
    """

    slots: int
    budget: int
    context: int
    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    drafts: int = 0


def slot_bytes(slots: int, context: int, table_entry: int = 4, drafts: int = 0) -> int:
    """State of the requests as `batch.slots` keeps it: tokens, page table, eight integers, six numbers of sampling,
    stop ids, biases, the root of a tree of drafts. table_entry: bytes, 8 on a CPU. drafts: bytes that drafts add to
    each.
    """
    lists = 8 * (MAX_STOP_IDS + MAX_EOS_IDS) + 12 * MAX_LOGIT_BIAS + 8 * 3
    return slots * (4 * (context + 1) + table_entry * -(-context // PAGE) + 8 * 8 + 6 * 4 + lists + drafts)


def step_bytes(facts: ModelFacts, extent: EngineExtent, cut: int = 1) -> float:
    """Of the largest step: activations of a whole budget of prompt tokens, or sampling for every running request. cut:
    GPUs that share a layer.
    """
    sampling = 3 * LOGIT * extent.slots * facts.vocab  # logits, a copy for log-probabilities, and what sorts them
    held = HELD_DENSE if facts.moe is None else HELD_SPARSE
    return max(held * _activations(facts, extent.budget, cut), sampling)


def graph_bytes(facts: ModelFacts, extent: EngineExtent, cut: int = 1) -> float:
    """Memory that all recordings share, and what the driver keeps of each."""
    if not extent.rows and not extent.tokens:
        return 0.0
    tokens = max(extent.tokens, default=0)
    pool = (
        POOLED * _activations(facts, max((tokens, *extent.rows)), cut)
        + LOGIT * max(extent.rows, default=0) * facts.vocab
    )
    pool += ACTIVATION * tokens * _around_attention(facts, cut)
    kernels = RECORDED * (1.0 if facts.moe is None else SPARSE_KERNELS)
    return pool + RECORDINGS + kernels * facts.layers * (len(extent.rows) + len(extent.tokens))


def _activations(facts: ModelFacts, tokens: int, cut: int) -> float:
    """Bytes that a layer uses at its peak: a dense MLP's gates, values and their product, or what experts take and give
    for each choice.
    """
    wide = ACTIVATION * tokens * facts.hidden
    dense = wide + ACTIVATION * tokens * 3 * facts.intermediate / cut
    if facts.moe is None:
        return dense
    inner, choices = facts.moe.intermediate / cut, tokens * (facts.moe.topk + facts.moe.shared)
    if quantized(facts.quantization_config) is not None and tokens >= GROUPED:
        # inputs as codes and sums in float32 of all tokens; of each choice codes, gates and values, codes of their
        # product, and the result
        scales = 4 * (facts.hidden + inner) / 128
        return 9 * tokens * facts.hidden + choices * (3 * facts.hidden + 5 * inner + scales)
    sparse = 2 * wide + ACTIVATION * choices * (inner + facts.hidden)
    return max(dense, sparse) if not all(facts.moe.sparse) else sparse


def _around_attention(facts: ModelFacts, cut: int) -> float:
    """Numbers of a token that recorded pieces leave for attention, and that it returns."""
    heads = facts.heads / cut
    if facts.mla is None:
        return (2 * heads + 2 * facts.kv_heads / cut) * facts.head_dim
    return heads * (facts.mla.nope + facts.mla.rope + facts.mla.v)
