"""Ways to divide a model among GPUs: tensor, data, expert and pipeline parallelism, and whole copies."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from thalweg.config.engine import EngineConfig
from thalweg.config.machines import A_NODE
from thalweg.config.model import ModelFacts
from thalweg.config.options import Options
from thalweg.config.tree import command_line, non_defaults
from thalweg.core.plan import PAGE
from thalweg.launch.report import ONE_GPU

DEFAULT_RUNNING = 256  # requests that the resolver gives a GPU
OF_LAYOUT = (  # settings that a layout's command has itself
    "model", "nnodes", "node_rank", "dist_init_addr", "launcher", "tp_size", "dp_size", "enable_dp_attention",
    "attn_cp_size", "pp_size", "dcp_size", "shard_indexer", "ep_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    tp: int = 1  # GPUs that share each layer of a stage
    dp: int = 1  # groups among them with requests and KV of their own (data-parallel attention)
    ep: int = 1  # groups that the experts are divided over; 1 cuts each expert instead
    pp: int = 1  # stages of consecutive layers
    copies: int = 1  # whole engines behind one balancer
    cp: int = 1  # groups of the GPUs of an attention that divide the tokens of each step
    dcp: int = 1  # GPUs of an attention that share each context
    shard_indexer: bool = False  # GPUs of an attention share its index heads

    @property
    def attention(self) -> int:
        """GPUs that share an attention, a dense MLP, and the head."""
        return self.tp // (self.dp * self.cp)

    @property
    def indexer(self) -> int:
        """GPUs that share the heads of an indexer."""
        return self.attention if self.shard_indexer else 1

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.copies

    @property
    def caches(self) -> int:
        """KV caches on the whole machine that hold different requests."""
        return self.dp * self.copies

    @property
    def name(self) -> str:
        inner = " ".join(f"{name.upper()}{count}" for name, count in self._sizes()) or ONE_GPU
        inner += ", shared indexer" * self.shard_indexer
        return f"{self.copies} x {inner}" if self.copies > 1 else inner

    def flags(self) -> tuple[str, ...]:
        """The command-line flags of one copy."""
        flags = {"cp": "attn-cp"}
        sizes = (word for name, count in self._sizes() for word in (f"--{flags.get(name, name)}-size", str(count)))
        return (*sizes, *["--enable-dp-attention"][: self.dp - 1], *["--shard-indexer"] * self.shard_indexer)

    def _sizes(self) -> Iterator[tuple[str, int]]:
        for name in ("tp", "dp", "cp", "ep", "pp", "dcp"):
            if (count := getattr(self, name)) > 1:
                yield name, count


ONE = ParallelLayout()


def layout_of(config: EngineConfig) -> ParallelLayout:
    """The layout that an engine has."""
    sizes = config.tp_size, config.attention_dp, config.ep_size, config.pp_size, config.copies
    return ParallelLayout(*sizes, config.attn_cp_size, config.dcp_size, config.shard_indexer)


def why_not(facts: ModelFacts, layout: ParallelLayout) -> str:
    """Why a layout is not proposed; "" where it is. Whether the layers can be divided, the layers say themselves."""
    if layout.tp % (layout.dp * layout.cp):
        return f"dp {layout.dp} and cp {layout.cp} must divide tp {layout.tp}"
    if facts.heads % layout.attention:
        return f"{facts.heads} heads are not divided by {layout.attention}"
    if (replicas := facts.kv_replicas(layout.attention)) % layout.dcp:
        return f"dcp {layout.dcp} must divide the {replicas} GPUs that hold the same KV"
    if layout.pp > facts.layers:
        return f"{facts.layers} layers are fewer than {layout.pp} stages"
    if facts.moe is None:
        return "" if layout.ep == layout.dp == 1 else "a model without experts gains nothing: use copies"
    if layout.tp % layout.ep or facts.moe.experts % layout.ep:
        return f"{facts.moe.experts} experts are divided evenly over equal groups of a stage's {layout.tp} GPUs"
    return ""


def why_not_on_nodes(layout: ParallelLayout, gpus_of_node: int) -> str:
    """Why nodes with so many GPUs do not hold the copies of a layout; "" where they do."""
    each = layout.tp * layout.pp
    if each % gpus_of_node and gpus_of_node % each:
        return f"{each} GPUs a copy are neither whole nodes of {gpus_of_node} nor an even part of one"
    return ""


def layouts(facts: ModelFacts, gpus: int, gpus_of_node: int = A_NODE) -> Iterator[ParallelLayout]:
    """All that use this many GPUs."""
    for copies in _divisors(gpus):
        for pp in _divisors(gpus // copies):
            tp = gpus // copies // pp
            for dp in _divisors(tp):
                for ep in _divisors(tp):
                    layout = ParallelLayout(tp, dp, ep, pp, copies)
                    if not why_not(facts, layout) and (
                        gpus <= gpus_of_node or not why_not_on_nodes(layout, gpus_of_node)
                    ):
                        yield layout


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def command(options: Options, layout: ParallelLayout, requests: int, gpus_of_node: int = A_NODE) -> str:
    """Shell command that starts a layout for so many requests at a time: one server, or with data-parallel attention
    one for each copy, on GPUs and ports of their own. On several nodes: what runs on each. Settings that the user gave
    stay.
    """
    words = ["thalweg", "serve", _folder(options.model.model), *layout.flags()]
    own = {name: value for name, value in non_defaults(options).items() if name not in OF_LAYOUT}
    running = -(-requests // layout.copies)
    if "max_running_requests" not in own and running > DEFAULT_RUNNING:
        words += ["--max-running-requests", str(-(-running // PAGE) * PAGE)]
    words += command_line(own)
    each = layout.tp * layout.pp
    if each > gpus_of_node:
        nodes = f"--nnodes {each // gpus_of_node} --node-rank RANK --dist-init-addr HOST:29500"
        return f"{shlex.join(words)} {nodes}  # on each node{' of a copy' if layout.copies > 1 else ''}"
    on_node = min(gpus_of_node // each, layout.copies)
    where = "  # on each node" if on_node < layout.copies else ""
    if on_node == 1 or layout.dp == 1:
        copies = ["--dp-size", str(on_node)] if on_node > 1 else []
        return shlex.join([*words, *copies]) + where
    first = "$i" if each == 1 else f"$(seq -s, $(({each}*i)) $(({each}*i+{each - 1})))"
    return (
        f"for i in $(seq 0 {on_node - 1}); do{where}\n"
        f"  CUDA_VISIBLE_DEVICES={first} {shlex.join(words)} --port $((30000+i)) &\ndone"
    )


def _folder(model: str) -> str:
    """The model to serve: the folder of a config.json; a placeholder for a configuration by another name."""
    path = Path(model)
    if path.suffix != ".json":
        return model
    return str(path.parent) if path.name == "config.json" else "MODEL"
