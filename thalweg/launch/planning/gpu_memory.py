"""Memory of a GPU after an engine's start, and the bytes left for the KV cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from msgspec import structs

from thalweg.config.engine import EngineConfig
from thalweg.config.model import ModelFacts
from thalweg.core.plan import PAGE
from thalweg.core.report import AUTO, Decision
from thalweg.core.sampling import MAX_EOS_IDS, MAX_LOGIT_BIAS, MAX_LOGPROB_IDS, MAX_STOP_IDS
from thalweg.kernels.exchange.ref import MAX_ROWS, bf16_row, bytes_for, row_words
from thalweg.launch.planning.layouts import ONE, ParallelLayout
from thalweg.launch.planning.weights import PlannedModel
from thalweg.launch.resolved import Resolved
from thalweg.quant.catalog import format_of, scheme_of_experts
from thalweg.quant.scheme import Quantized, Scheme

RESERVE = 1 << 30  # as start-up keeps

# Fitted to starts on an H100 (torch 2.11) of V2-Lite and Qwen2.5-7B in bf16 and of five layers of V3 in FP8. Each sum
# below is within 3 % of what start-up measured, with the resolver's own settings.
RUNTIME = 808e6  # bytes of the driver's context, loaded kernels and libraries
ALLOCATED_DENSE, ALLOCATED_SPARSE = 1.14, 1.8  # torch's allocator over a step's tensors: blocks leave gaps
ALLOCATED_GRAPHS = 1.28  # the same of captured steps
GRAPHS = 30e6  # bytes of the driver, once anything is captured
GRAPH_LAYER = 64e3  # and for each layer of each graph; layers with experts have more kernels
SPARSE_KERNELS = 1.25
LOGIT, ACTIVATION = 4, 2  # bytes of a number
GROUPED = 3072  # tokens from which FP8 experts run as DeepGEMM's grouped products


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes on one GPU."""

    free: float  # before anything starts
    beside: float  # driver and libraries
    weights: float
    step: float  # of the largest step while it runs
    graphs: float
    slots: float  # state of the running requests
    reserve: float
    page: float  # of 64 tokens in all planes on the device
    page_size: int = PAGE  # tokens of a page on all GPUs that share each context
    host: float = 0.0  # of host memory for latents
    host_page: float = 0.0  # of 64 tokens there; 0: nothing is there

    def as_json(self) -> dict[str, float]:
        return asdict(self) | {
            "room": max(self.left, 0.0),
            "kv": self.pages * self.page,
            "pages": self.pages,
            "tokens": self.tokens,
        }

    @property
    def left(self) -> float:
        """For pages, without the null page."""
        used = self.beside + self.weights + self.step + self.graphs + self.slots + self.reserve
        return self.free - used - self.page

    @property
    def pages(self) -> int:
        held = int(self.left // self.page)
        return max(min(held, int(self.host // self.host_page) - 1) if self.host_page else held, 0)

    @property
    def tokens(self) -> int:
        return self.pages * self.page_size


def gpu_memory(
    resolved: Resolved, model: PlannedModel, layout: ParallelLayout, free: int, gpus_of_node: int
) -> GpuMemory:
    """One GPU of a layout: its part of weights and cache, and what an engine takes anyway. free: bytes of the idle GPU.
    gpus_of_node: that share the memory of a host.

    Raises UnsupportedConfig where the layers cannot be divided so.
    """
    facts, engine, sizes = model.facts, resolved.engine, resolved.sizes
    rank, alone = model.on(layout), model.on(ONE)
    rotary = 4 * facts.context * facts.rope.dim
    # most of a drafter's weights are experts
    drafter = (sizes.weight_bytes - rotary - alone.weight_bytes) / layout.tp
    stage = -(-facts.layers // layout.pp) / facts.layers
    share = PAGE * stage * rank.kv_bytes() / alone.kv_bytes()
    page, host_page = (sizes.kv_bytes - sizes.host_kv_bytes) * share, sizes.host_kv_bytes * share
    step, graphs = (count(facts, engine, layout.tp) for count in (step_bytes, graph_bytes))
    beside = RUNTIME + exchange_bytes(facts, engine, layout)
    host = engine.hisparse_host_memory * engine.node_processes / min(layout.gpus, gpus_of_node)
    weights, requests = rank.weight_bytes + rotary + drafter, engine.max_running_requests + 1
    page_size = PAGE * layout.dcp
    memory = GpuMemory(free, beside, weights, step, graphs, 0.0, RESERVE, page, page_size, host, host_page)
    # slots are as long as the longest sequence, which is no longer than what the pages hold
    context = min(engine.context_length, max(memory.tokens, PAGE))
    own = slot_bytes(requests, context, drafts=sizes.slot_bytes, page_size=page_size)
    return replace(memory, slots=own + requests * sizes.hot_sets(context) * stage)


def exchange_bytes(facts: ModelFacts, engine: EngineConfig, layout: ParallelLayout) -> int:
    """Of the one-sided dispatch and combine between ranks that have different tokens; see `engine.collectives`."""
    ranks = layout.ep if engine.moe_a2a_backend == "alltoall" else layout.dp * layout.cp
    if facts.moe is None or ranks == 1 or engine.moe_a2a_backend == "deepep" or engine.deterministic_inference:
        return 0
    row_bytes = bf16_row(facts.moe.topk + facts.moe.shared, facts.hidden)
    return sum(bytes_for(ranks, MAX_ROWS, words) for words in row_words(row_bytes, facts.hidden))


def with_pages(resolved: Resolved, memory: GpuMemory, layout: ParallelLayout) -> Resolved:
    """With the pages that are expected where start-up will measure them, in place of the resolver's first estimate."""
    engine = structs.replace(resolved.engine, dcp_size=layout.dcp)
    if engine.num_pages:
        return replace(resolved, pages=engine.num_pages, engine=engine)
    limit = resolved.engine.context_length
    context = min(limit, max(memory.tokens, 1))
    where = f" of each of the {layout.caches} caches" if layout.caches > 1 else " of the cache"
    where = "" if layout.gpus == 1 else where
    reason = f"expected{where}, which start-up replaces by what it measures: see the memory above"
    decisions = [Decision("max_total_tokens", memory.tokens, AUTO, reason)]
    if context < limit:
        decisions.append(Decision("context_length", context, AUTO, "what the KV cache is expected to hold"))
    return replace(resolved, pages=memory.pages, context=context, engine=engine.started(decisions))


def slot_bytes(slots: int, context: int, table_entry: int = 4, drafts: int = 0, page_size: int = PAGE) -> int:
    """State of the requests as `batch.slots` keeps it: tokens, page table, eight integers, six sampling numbers, stop
    ids, ids to score, biases, the root of a tree. table_entry: bytes, 8 on a CPU. drafts: bytes that drafts add to
    each.
    """
    lists = 8 * (MAX_STOP_IDS + MAX_EOS_IDS + MAX_LOGPROB_IDS) + 12 * MAX_LOGIT_BIAS + 8 * 3
    return slots * (4 * (context + 1) + table_entry * -(-context // page_size) + 8 * 8 + 6 * 4 + lists + drafts)


def step_bytes(facts: ModelFacts, engine: EngineConfig, cut: int = 1) -> float:
    """The largest step: activations of a full step of prompt tokens, or sampling for every running request. cut: GPUs
    that share a layer.
    """
    sampling = 3 * LOGIT * engine.max_running_requests * facts.vocab  # logits, a copy for log-probabilities, the sort
    allocated = ALLOCATED_DENSE if facts.moe is None else ALLOCATED_SPARSE
    return max(allocated * _activations(facts, engine.chunked_prefill_size, cut), sampling)


def graph_bytes(facts: ModelFacts, engine: EngineConfig, cut: int = 1) -> float:
    """Memory that all graphs share, and what the driver keeps of each."""
    rows, pieces = engine.cuda_graph_bs, engine.piecewise_cuda_graph_tokens
    if not rows and not pieces:
        return 0.0
    tokens, most = max(pieces, default=0), max(rows, default=0)
    pool = ALLOCATED_GRAPHS * _activations(facts, max(tokens, most), cut) + LOGIT * most * facts.vocab
    pool += ACTIVATION * tokens * _attention_numbers(facts, cut)
    kernels = GRAPH_LAYER * (1.0 if facts.moe is None else SPARSE_KERNELS)
    # a bucket is captured in pieces, and with its attention twice: with decode rows and without
    return pool + GRAPHS + kernels * facts.layers * (len(rows) + 3 * len(pieces))


def _activations(facts: ModelFacts, tokens: int, cut: int) -> float:
    """The most bytes that a layer uses: a dense MLP's gates, values and their product, or what experts take and give
    for each choice. Products that round their inputs to 8 bits hold a copy of them.
    """
    hidden = ACTIVATION * tokens * facts.hidden
    width = ACTIVATION * tokens * facts.intermediate / cut
    copy = _rounded_bytes(format_of(facts.quantization_config).scheme("model.layers.0.mlp.up_proj"), facts.hidden)
    dense = hidden + max(3 * width, 2 * width + tokens * copy)
    if facts.moe is None:
        return dense
    inner, choices = facts.moe.intermediate / cut, tokens * (facts.moe.topk + facts.moe.shared)
    experts = scheme_of_experts(facts.quantization_config, facts.layers)
    if experts is not None and experts.operation == "fp8_gemm" and tokens >= GROUPED:
        # inputs as codes and sums in float32 of all tokens; of each choice codes, gates and values, codes of their
        # product, and the result
        scales = 4 * (facts.hidden + inner) / 128
        return 9 * tokens * facts.hidden + choices * (3 * facts.hidden + 5 * inner + scales)
    sparse = 2 * hidden + ACTIVATION * choices * (inner + facts.hidden)
    sparse += tokens * _rounded_bytes(experts, facts.hidden) + choices * _rounded_bytes(experts, inner)
    return sparse if all(facts.moe.sparse) else max(dense, sparse)


def _rounded_bytes(scheme: Scheme | None, columns: float) -> float:
    """Of a row in 8 bits, with its scales; 0.0 where the products of a scheme read 16 bits, or codes from elsewhere."""
    rule = scheme.activations if isinstance(scheme, Quantized) else None
    return 0.0 if rule is None else columns + 4 * (columns / rule.group if rule.group else 1)


def _attention_numbers(facts: ModelFacts, cut: int) -> float:
    """Numbers of a token that captured pieces hand to attention and get back."""
    heads = facts.heads / cut
    if facts.mla is None:
        return (2 * heads + 2 * facts.kv_heads / cut) * facts.head_dim
    return heads * (facts.mla.nope + facts.mla.rope + facts.mla.v)
