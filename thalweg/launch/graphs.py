"""Which steps are captured as CUDA graphs."""

from __future__ import annotations

from thalweg.config.backends import DECODE
from thalweg.config.options import Options
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import KernelConfig
from thalweg.core.report import AUTO, Decision
from thalweg.launch.decisions import Decisions

MAX_CAPTURED_ROWS = 256  # larger steps keep the device busier than Python
# A larger step computes for about as long as Python takes to launch it. 2,048 prompt tokens and 256 decode rows fit.
MAX_PIECEWISE_TOKENS = 2304
WHOLE_STEPS = ("full", "full_decode_only", "full_and_piecewise")
PIECEWISE = ("piecewise", "full_and_piecewise")
SHARED_INDEXER = "with --shard-indexer a step captured whole would add up the scores of the longest context"


def resolve_graphs(
    options: Options,
    device: str,
    kernels: KernelConfig,
    max_rows: int,
    max_tokens: int,
    decisions: Decisions,
) -> None:
    """max_rows: of a decode step. max_tokens: of a step. Raises UnsupportedConfig."""
    load, name = options.load, "cuda_graph_mode"
    mode, reason = load.cuda_graph_mode, _no_graphs(device, kernels)
    if reason and mode not in (None, "none"):
        raise UnsupportedConfig(f"{name}: {mode}, but {reason}; use --cuda-graph-mode none")
    if reason:
        decisions.record(name, "none", mode is not None, reason)
        _note_unused(options, "none", reason, decisions)
        return
    tokens = min(max_tokens, MAX_PIECEWISE_TOKENS)
    reason = f"decode steps whole, other steps of up to {tokens} tokens piecewise; larger steps keep the device busy"
    auto, config = "full_and_piecewise", decisions.config()
    if config.shard_indexer:
        if mode in WHOLE_STEPS:
            raise UnsupportedConfig(
                f"{name}: {mode}, but {SHARED_INDEXER}; use piecewise, or leave --shard-indexer out"
            )
        auto, reason = "piecewise", SHARED_INDEXER
    mode = decisions.choose(name, mode, auto, reason)
    _note_unused(options, mode, f"--cuda-graph-mode {mode} captures no such steps", decisions)
    if mode in WHOLE_STEPS:
        wish = load.cuda_graph_max_bs or min(max_rows, MAX_CAPTURED_ROWS)
        if wish > max_rows:
            reason = f"{wish} is more than a decode step has rows (--max-running-requests, with drafts their rows too)"
            decisions.entries.append(Decision("cuda_graph_max_bs", max_rows, AUTO, reason))
        rows = tuple(sorted(set(load.cuda_graph_bs or buckets(min(wish, max_rows)))))
        limit = f"--max-running-requests (with drafts, their rows too), {max_rows}"
        _add_sizes("cuda_graph_bs", rows, max_rows, limit, bool(load.cuda_graph_bs), decisions)
    if mode in PIECEWISE:
        asked = load.piecewise_cuda_graph_tokens
        sizes = tuple(sorted(set(asked or token_buckets(tokens))))
        limit = f"the tokens of a step, {max_tokens}"
        _add_sizes("piecewise_cuda_graph_tokens", sizes, max_tokens, limit, bool(asked), decisions)
        decisions.fields["trim_piecewise_cuda_graphs"] = bool(sizes) and not asked


def _note_unused(options: Options, mode: str, why: str, decisions: Decisions) -> None:
    """Reports sizes that the user asked for and that the mode does not use. Raises UnsupportedConfig for sizes that
    contradict each other.
    """
    load = options.load
    for flag, asked, modes in (
        ("cuda_graph_bs", load.cuda_graph_bs, WHOLE_STEPS),
        ("cuda_graph_max_bs", load.cuda_graph_max_bs, WHOLE_STEPS),
        ("piecewise_cuda_graph_tokens", load.piecewise_cuda_graph_tokens, PIECEWISE),
    ):
        if asked is not None and min(asked if isinstance(asked, tuple) else (asked,), default=1) < 1:
            raise UnsupportedConfig(f"{flag}: {asked} must be at least 1")
        if asked and mode not in modes:
            decisions.entries.append(Decision(flag, "none", AUTO, f"{asked} is not used: {why}"))
    rows, most = load.cuda_graph_bs, load.cuda_graph_max_bs
    if rows and most and max(rows) > most:
        raise UnsupportedConfig(
            f"cuda_graph_bs: {list(rows)} is beyond cuda_graph_max_bs, {most}; leave one of them out"
        )


def _no_graphs(device: str, kernels: KernelConfig) -> str:
    """Why there can be no graphs; "" where there can."""
    if device == "cpu":
        return "a CPU has none"
    can_capture = True in DECODE[kernels.decode].supports.graphs
    return "" if can_capture else f"{kernels.decode} attention reads lengths on the host"


def _add_sizes(name: str, sizes: tuple[int, ...], most: int, limit: str, is_asked: bool, decisions: Decisions) -> None:
    if any(not 1 <= size <= most for size in sizes):
        raise UnsupportedConfig(f"{name}: {list(sizes)} must lie between 1 and {limit}")
    decisions.record(name, ",".join(map(str, sizes)), is_asked, "steps that are captured")
    decisions.fields[name] = sizes


def buckets(most: int) -> tuple[int, ...]:
    """Rows that graphs are captured for: 1, 2, 4, then every eighth up to 256, then every 32nd. Over 1 to 256 rows the
    mean of (bucket - rows) / bucket is 4.9 %.
    """
    steps = [1, 2, 4, *range(8, min(most, 256) + 1, 8), *range(288, most + 1, 32)]
    return tuple(sorted({min(step, most) for step in steps} | {most}))


def token_buckets(most: int) -> tuple[int, ...]:
    """Tokens that piecewise graphs are captured for: up to 256 in small steps, then every 128th, since matrix products
    compute tiles of 128 rows anyway, and from 1,024 on every 256th; and `most` itself.
    """
    steps = [16, 32, 48, 64, 96, 128, 192, *range(256, 1024, 128), *range(1024, most + 1, 256)]
    return tuple(sorted({step for step in steps if step < most} | {most}))
