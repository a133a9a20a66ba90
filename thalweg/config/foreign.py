"""Flags of other engines that have no equal here: what to do instead, and those of one that stands for several
settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thalweg.config.drafters import DRAFTERS
from thalweg.config.setting import nearest
from thalweg.core.errors import UnsupportedConfig


def text_table(text: str, splits: bool = True) -> dict[str, str]:
    """Rows of "keys: value"; an indented line continues the one before. splits: several keys by spaces."""
    rows = dict(row.split(": ", 1) for row in text.strip().replace("\n    ", " ").splitlines())
    return {key: value for keys, value in rows.items() for key in (keys.split() if splits else [keys])}


# flags, without dashes: what to do instead
UNSUPPORTED_FLAGS = text_table("""
tokenizer-path tokenizer: put the tokenizer's files into the checkpoint's folder
download-dir: set the variable HF_HOME
json-model-override-args hf-overrides: edit config.json in the folder
generation-config: use --sampling-defaults
default-chat-template-kwargs: give chat_template_kwargs in requests
max-prefill-tokens schedule-conservativeness: use --chunked-prefill-size; admission reserves what a request can need
radix-eviction-policy: not needed: what was used least recently goes first
decode-log-interval: see /metrics and --watchdog-timeout
swap-space cpu-offload-gb kv-transfer-config: not in this version
enable-hierarchical-cache hicache-ratio hicache-storage-backend: not in this version
disaggregation-mode disaggregation-transfer-backend: not in this version
speculative-token-map: not needed: a head's own vocabulary (d2t in its file) is read with it, and a next-token layer
    drafts from the whole one
speculative-attention-mode: not needed: rows of all kinds share a step, and --attention-backend chooses its kernels
speculative-draft-attention-backend speculative-moe-runner-backend speculative-moe-a2a-backend: not needed: a drafter
    computes with the model's backends, which --attention-backend and --moe-runner-backend choose
speculative-draft-model-revision: download that revision, and name its folder by --speculative-draft-model-path
speculative-draft-load-format: not needed: a drafter is loaded as the model is, by --load-format
speculative-draft-model-quantization: not needed: it is read from the config.json in the drafter's folder
speculative-draft-tensor-parallel-size: not in this version: a drafter is divided as its target
speculative-use-rejection-sampling: use --speculative-acceptance rejection-sampling
speculative-adaptive-config: not needed: times are measured at the start, and --speculative-num-steps is the most
    drafts of a step
speculative-disable-by-batch-size: not needed: in each step as many drafts are made as bring most tokens a second,
    none included
ngram-prompt-lookup-max ngram-prompt-lookup-min: not needed: the longest earlier match of the last 2 to 5
    tokens is used
speculative-ngram-min-match-window-size speculative-ngram-max-match-window-size speculative-ngram-max-trie-depth
    speculative-ngram-branch-length: not needed: the longest earlier match of the last 2 to 5 tokens is used
speculative-ngram-min-bfs-breadth speculative-ngram-max-bfs-breadth speculative-ngram-match-type
    speculative-ngram-capacity: not needed: what is looked up is one chain, in the sequence itself
enable-expert-parallel: use --ep-size, the number of groups that the experts are divided over
enable-two-batch-overlap tbo-token-distribution-threshold enable-dbo: not in this version: half batches read the
    experts' weights twice, which costs more than hidden communication saves on one host
enable-single-batch-overlap: not in this version: a layer's communication is too short on one host to hide much behind
    the shared experts
enable-lora lora-paths lora-modules: not in this version
compilation-config: use --cuda-graph-mode for its cudagraph_mode in lower case
enable-flashinfer-mla: use --attention-backend flashinfer
enable-flashmla: use --attention-backend flashmla
prefill-context-parallel-size pcp: use --attn-cp-size, and --tp-size for all devices: context-parallel ranks are a
    part of them here
enable-nsa-prefill-cp-cache-layer-split: not in this version: each device holds all layers of its cache
enable-ep-moe: use --ep-size
all2all-backend: use --moe-a2a-backend
eplb-config: use --ep-num-redundant-experts, --eplb-algorithm and --eplb-rebalance-num-iterations
base-gpu-id gpu-id-step: set the variable CUDA_VISIBLE_DEVICES, such as 4,5,6,7 for four devices from the fourth on
nccl-port data-parallel-rpc-port: not needed: the system chooses ports, and --dist-init-addr names one for several nodes
data-parallel-address data-parallel-size-local data-parallel-start-rank data-parallel-rank: use --nnodes, --node-rank
    and --dist-init-addr, the sizes being those of all nodes
data-parallel-external-lb data-parallel-hybrid-lb: not in this version: one address serves all data-parallel ranks
max-parallel-loading-workers: not needed: every process reads only its own part of the files
pp-max-micro-batch-size pp-async-batch-depth: not needed: decoding requests are spread evenly over as many steps as
    there are stages
enable-elastic-ep elastic-ep-backend: not in this version: when a process is lost, the group starts again
enable-deepep-moe: use --ep-size and --moe-a2a-backend deepep
enable-flashinfer-cutlass-moe: not in this version
ep-dispatch-algorithm ep-static-dispatch: not needed: a token chooses among the copies of an expert by all its experts
expert-distribution-recorder-mode expert-distribution-recorder-buffer-size: use --enable-eplb, which counts, and POST
    /dump_expert_distribution_record
disable-flashinfer disable-flashinfer-sampling: use --attention-backend triton; sampling has kernels of its own
torch-compile-max-bs torch-compile enable-torch-compile: not needed: captured steps are faster than what
    torch.compile makes
disable-cuda-graph-padding: use --cuda-graph-bs, which says which rows are recorded
enable-memory-saver custom-weight-loader: not in this version
master-addr master-port: use --dist-init-addr HOST:PORT
api-server-count: not in this version: one process serves one engine
max-logprobs: not needed: the limit is fixed, and the error names it
profile: use thalweg roofline, or POST /start_profile while a server runs
middleware: use a proxy in front
""")


def instead_of(flag: str) -> str:
    """flag: with its dashes. What to do instead, "" where nothing is known of it."""
    name = flag.removeprefix("--")
    if name.startswith("speculative-config."):
        return f"give one object: --speculative-config '{{\"{name.partition('.')[2].replace('-', '_')}\": ...}}'"
    return UNSUPPORTED_FLAGS.get(name, "")


# flags of other engines that change nothing here, with the values that they may have: why
NO_EFFECT_FLAGS = text_table(
    """
enable-prefill-cp: --attn-cp-size above 1 turns context parallelism on
enable-prefill-context-parallel: --attn-cp-size above 1 turns context parallelism on
enable-nsa-prefill-context-parallel: --attn-cp-size above 1 turns context parallelism on
enable-dsa-prefill-context-parallel: --attn-cp-size above 1 turns context parallelism on
dcp-comm-backend a2a: ranks exchange attention outputs in one all-to-all a layer
cp-kv-cache-interleave-size 64: ranks hold 64 tokens in turn, so that pages stay whole
dcp-kv-cache-interleave-size 64: ranks hold 64 tokens in turn, so that pages stay whole
disable-custom-all-reduce: own kernels add up only what they were timed to add sooner than NCCL at the start
enable-flashinfer-allreduce-fusion: sums are fused with the norm wherever that was faster than NCCL at the start
enable-symm-mem: sums of few rows use symmetric memory wherever that was faster than NCCL at the start
enable-torch-symm-mem: sums of few rows use symmetric memory wherever that was faster than NCCL at the start
enable-p2p-check: whether GPUs address each other's memory is always checked
enable-nccl-nvls: NCCL multicasts over NVLink if the variable NCCL_NVLS_ENABLE is 1
load-balance-method total_tokens or minimum_tokens or auto: a request goes to the rank with the fewest tokens to compute
distributed-executor-backend mp: the server starts the processes of its machine
data-parallel-backend mp: the server starts the processes of its machine
trust-remote-code: no code of a checkpoint is ever run
enable-mixed-chunk: prefill and decode always share steps
enable-chunked-prefill: prompts are always cut to the step's token budget
enable-auto-tool-choice: tools are read whenever a request brings some
enable-cache-report: usage always reports cached tokens
enable-reasoning: the chat template decides; --reasoning-parser none turns it off
stream-interval 1: every step's tokens are sent at once
num-continuous-decode-steps 1: every step is planned anew
grammar-backend llguidance: it is the only one
tokenizer-mode auto: there is one way to tokenize
disable-log-stats: steps are not logged; --no-metrics turns /metrics off
enable-trace: --otlp-traces-endpoint alone turns traces on
speculative-accept-threshold-single 1.0: drafts are accepted without loss
speculative-accept-threshold-acc 1.0: drafts are accepted without loss
""",
    splits=False,
)
OTHER_VALUES = dict.fromkeys(
    ("speculative-accept-threshold-single 1.0", "speculative-accept-threshold-acc 1.0"),
    "below 1 it changes how answers are distributed; --speculative-acceptance relaxed is the lossy rule there is",
) | dict.fromkeys(
    ("distributed-executor-backend mp", "data-parallel-backend mp"),
    "use --launcher ray or torchrun, with --nnodes, for several machines",
)


def without_effect(flag: str, value: object) -> str:
    """Why a flag of NO_EFFECT_FLAGS changes nothing. value: as it was given.

    Raises UnsupportedConfig for a value that would change something.
    """
    name, _, allowed = flag.partition(" ")
    if allowed and str(value) not in (*allowed.split(" or "), allowed.removesuffix(".0")):
        instead = OTHER_VALUES.get(flag, NO_EFFECT_FLAGS[flag])
        raise UnsupportedConfig(f"--{name}: {allowed} is all it may be, got {value}: {instead}")
    return f"--{name} changes nothing: {NO_EFFECT_FLAGS[flag]}"


# ---- vLLM's --speculative-config ----

CONFIG = "speculative_config"
METHODS = {method: name for name, entry in DRAFTERS.items() for method in entry.vllm_methods}
EQUAL = {
    "method": "speculative_algorithm",
    "model": "speculative_draft_model_path",
    "num_speculative_tokens": "speculative_num_steps",
}
ADAPTIVE = "in each step as many drafts are made as bring most tokens a second"
WITHOUT = {  # keys that change nothing, in which value (... is any), and why
    "draft_tensor_parallel_size": (1, "a drafter is divided as its target"),
    "disable_by_batch_size": (..., ADAPTIVE),
    "num_speculative_tokens_per_batch_size": (..., ADAPTIVE),
    "disable_padded_drafter_batch": (..., "requests are drafted for together whatever they accepted"),
}
REFUSED = {
    "prompt_lookup_max": "the longest earlier match of the last 2 to 5 tokens is used",
    "prompt_lookup_min": "the longest earlier match of the last 2 to 5 tokens is used",
    "draft_tensor_parallel_size": "a drafter is divided as its target",
    "speculative_token_tree": "use --speculative-eagle-topk and --speculative-num-draft-tokens for trees",
    "rejection_sample_method": "use --speculative-acceptance",
    "draft_sample_method": "use --speculative-acceptance: with rejection-sampling drafts are sampled",
    "synthetic_acceptance_rate": "use --speculative-simulate-accept-length, for benchmarks",
    "quantization": "it is read from the config.json in the drafter's folder",
    "revision": "download that revision, and give its folder as the model",
    "code_revision": "no code of a checkpoint is ever run",
    "max_model_len": "a drafter's context is the model's, --context-length",
    "draft_load_config": "a drafter is loaded as the model is, by --load-format",
    "enforce_eager": "use --cuda-graph-mode none, for model and drafter",
    "attention_backend": "a drafter computes with the model's, --attention-backend",
    "moe_backend": "a drafter computes with the model's, --moe-runner-backend",
}


# ---- SGLang's --hisparse-config ----

HISPARSE_EQUAL = {"device_buffer_size": "hisparse_device_buffer_size"}
HISPARSE_WITHOUT: dict[str, tuple[Any, str]] = {
    "top_k": (2048, "the model's index_topk says how much context is chosen"),
    "swap_in_block_size": (..., "the kernel chooses its block"),
}
HISPARSE_REFUSED = {
    "top_k": "index_topk in the model's config.json is the number",
    "host_to_device_ratio": "use --hisparse-host-memory-gb: host memory is limited by what is free, not by the GPU's",
}


@dataclass(frozen=True, slots=True)
class TranslatedConfig:
    """values: settings by name, as text or numbers. notices: what was called otherwise, or changes nothing."""

    values: Mapping[str, Any]
    notices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForeignObject:
    """A flag of another engine whose value is an object of settings, or its JSON."""

    name: str
    equal: Mapping[str, str]  # settings by key
    without: Mapping[str, tuple[Any, str]]  # keys that change nothing, in which value (... is any), and why
    refused: Mapping[str, str]  # what to do instead
    example: str  # JSON
    flags: str  # to use in its place

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    def translate(self, value: object) -> TranslatedConfig:
        """Raises UnsupportedConfig naming a key that has no equal."""
        values, notices = dict[str, Any](), list[str]()
        for key, entry in _with_method(self._object(value)).items():
            if entry is None:
                continue
            if key in self.equal:
                name = self.equal[key]
                values[name] = _method(entry) if key == "method" else entry
                notices.append(f"{self.flag}: {key} is called --{name.replace('_', '-')} {values[name]} here")
                continue
            allowed, why = self.without.get(key, (None, ""))
            if why and (allowed is ... or entry == allowed):
                notices.append(f"{self.flag}: {key} changes nothing: {why}")
                continue
            if key in self.refused:
                raise UnsupportedConfig(f"{self.name}: {key} has no equal here: {self.refused[key]}; leave it out")
            known = (*self.equal, *self.without)
            guess = nearest(str(key), known)
            raise UnsupportedConfig(
                f"{self.name}: {key} is not known; "
                + (f"did you mean {guess}?" if guess else f"understood are {', '.join(known)}")
            )
        return TranslatedConfig(values, tuple(notices))

    def _object(self, value: object) -> Mapping[str, Any]:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise UnsupportedConfig(
                    f"{self.name}: not JSON ({error}); give an object in single quotes, such as '{self.example}', or"
                    f" use {self.flags}"
                ) from None
        if not isinstance(value, Mapping):
            raise UnsupportedConfig(f"{self.name}: expected an object of settings, got {value!r}")
        return value


def _with_method(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """vLLM's lookup of n-grams may be named as the model."""
    if tree.get("model") not in ("ngram", "[ngram]"):
        return tree
    rest = {key: entry for key, entry in tree.items() if key != "model"}
    return rest if rest.get("method") is not None else rest | {"method": "ngram"}


def _method(name: object) -> str:
    """Models' own layers have a method of their own there, such as deepseek_mtp."""
    if isinstance(name, str) and (name in METHODS or name.endswith("_mtp")):
        return METHODS.get(name, "NEXTN")
    raise UnsupportedConfig(
        f"{CONFIG}: the method {name!r} is not here; there are {', '.join(METHODS)} "
        f"(or, as --speculative-algorithm has them, {', '.join(DRAFTERS)})"
    )


FOREIGN_OBJECTS = {
    one.name: one
    for one in (
        ForeignObject(
            CONFIG,
            EQUAL,
            WITHOUT,
            REFUSED,
            '{"method": "mtp", "num_speculative_tokens": 3}',
            "--speculative-algorithm and --speculative-num-steps",
        ),
        ForeignObject(
            "hisparse_config",
            HISPARSE_EQUAL,
            HISPARSE_WITHOUT,
            HISPARSE_REFUSED,
            '{"device_buffer_size": 4096}',
            "--hisparse-device-buffer-size",
        ),
    )
}
