"""What is recorded as CUDA graphs: the part of the resolver's decisions that goes by numbers of rows and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.config.backends import DECODE
from thalweg.config.options import Options
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import KernelConfig
from thalweg.launch.decisions import Decisions, source_and_reason

MOST_RECORDED = 256  # rows; larger steps wait for the device longer than for Python
MOST_PIECES = 2048  # tokens; a larger step keeps the device busy longer than Python takes to launch it
WHOLE = ("full", "full_decode_only", "full_and_piecewise")
IN_PIECES = ("piecewise", "full_and_piecewise")
AUTO_WHY = "decode steps whole, up to {} tokens of others in pieces: beyond, the device is busier than Python"


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """mode: the resolved `cuda_graph_mode`. rows: of whole steps. tokens: of the static parts of others."""

    mode: str = "none"
    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()


def resolve_graphs(
    config: Options, device: str, kernels: KernelConfig, slots: int, budget: int, decisions: Decisions
) -> GraphPlan:
    """Decides and notes it. slots: rows of a decode step at most. budget: tokens of a step. Raises
    UnsupportedConfig.
    """
    wish = config.load
    mode = wish.cuda_graph_mode
    cannot = _cannot(device, kernels)
    if cannot:
        if mode not in (None, "none"):
            raise UnsupportedConfig(f"cuda_graph_mode: {mode}, but {cannot}; use --cuda-graph-mode none")
        decisions.add("cuda_graph_mode", "none", *source_and_reason(mode is not None, cannot))
        return GraphPlan()
    mode = decisions.choose("cuda_graph_mode", mode, "full_and_piecewise", AUTO_WHY.format(min(budget, MOST_PIECES)))
    rows = _rows(config, slots, decisions) if mode in WHOLE else ()
    tokens = _tokens(config, budget, decisions) if mode in IN_PIECES else ()
    return GraphPlan(mode, rows, tokens)


def _cannot(device: str, kernels: KernelConfig) -> str:
    """Why there can be no graphs, "" where there can."""
    if device == "cpu":
        return "a CPU has none"
    return (
        ""
        if True in DECODE[kernels.decode].supports.graphs
        else f"{kernels.decode} attention reads lengths on the host"
    )


def _rows(config: Options, slots: int, decisions: Decisions) -> tuple[int, ...]:
    wish = config.load
    most = min(wish.cuda_graph_max_bs or min(slots, MOST_RECORDED), slots)
    made = tuple(wish.cuda_graph_bs) or buckets(most)
    if any(rows < 1 or rows > slots for rows in made):
        raise UnsupportedConfig(
            f"cuda_graph_bs: {list(made)} must lie between 1 and --max-running-requests (with drafts, their rows too),"
            f" {slots}"
        )
    made = tuple(sorted(set(made)))
    decisions.add(
        "cuda_graph_bs", _listed(made), *source_and_reason(bool(wish.cuda_graph_bs), "rows of recorded decode steps")
    )
    return made


def _tokens(config: Options, budget: int, decisions: Decisions) -> tuple[int, ...]:
    wish = config.load.piecewise_cuda_graph_tokens
    made = tuple(sorted(set(wish))) or token_buckets(min(budget, MOST_PIECES))
    if any(tokens < 1 or tokens > budget for tokens in made):
        raise UnsupportedConfig(
            f"piecewise_cuda_graph_tokens: {list(made)} must lie between 1 and the tokens of a step, {budget}"
        )
    why = "tokens of steps whose static parts are recorded"
    decisions.add("piecewise_cuda_graph_tokens", _listed(made), *source_and_reason(bool(wish), why))
    return made


def _listed(counts: tuple[int, ...]) -> str:
    return ",".join(map(str, counts))


def buckets(most: int) -> tuple[int, ...]:
    """Numbers of rows that graphs are made for: 1, 2, 4, then every eighth up to 256, then every thirty-second. Over 1
    to 256 rows the mean of (bucket - rows) / bucket is 4.9 %.
    """
    steps = [1, 2, 4, *range(8, min(most, 256) + 1, 8), *range(288, most + 1, 32)]
    return tuple(sorted({min(step, most) for step in steps} | {most}))


def token_buckets(most: int) -> tuple[int, ...]:
    """Numbers of tokens that pieces are made for: up to 256 in small steps, then every 128th, since matrix products
    compute tiles of 128 rows anyway; and `most` itself.
    """
    steps = [16, 32, 48, 64, 96, 128, 192, *range(256, most + 1, 128)]
    return tuple(sorted({step for step in steps if step < most} | {most}))
