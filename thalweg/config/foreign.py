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


@dataclass(frozen=True, slots=True)
class UnsupportedFlag:
    """flags: without dashes, by spaces. instead: what to do, as the error says it."""

    flags: str
    instead: str


UNSUPPORTED_FLAGS = (
    UnsupportedFlag("tokenizer-path tokenizer", "put the tokenizer's files into the checkpoint's folder"),
    UnsupportedFlag("download-dir", "set the variable HF_HOME"),
    UnsupportedFlag("json-model-override-args hf-overrides", "edit config.json in the folder"),
    UnsupportedFlag(
        "quantization", "not needed: it is read from config.json; FP8 of 128 × 128 blocks, else bf16 or float32"
    ),
    UnsupportedFlag("generation-config", "use --sampling-defaults"),
    UnsupportedFlag("default-chat-template-kwargs", "give chat_template_kwargs in requests"),
    UnsupportedFlag(
        "max-prefill-tokens schedule-conservativeness",
        "use --chunked-prefill-size; admission reserves what a request can need",
    ),
    UnsupportedFlag("radix-eviction-policy", "not needed: what was used least recently goes first"),
    UnsupportedFlag("decode-log-interval", "see /metrics and --watchdog-timeout"),
    UnsupportedFlag("swap-space cpu-offload-gb kv-transfer-config", "not in this version"),
    UnsupportedFlag("enable-hierarchical-cache hicache-ratio hicache-storage-backend", "not in this version"),
    UnsupportedFlag("disaggregation-mode disaggregation-transfer-backend", "not in this version"),
    UnsupportedFlag(
        "speculative-token-map",
        "not needed: a head's own vocabulary (d2t in its file) is read with it, and a next-token layer drafts from the"
        " whole one",
    ),
    UnsupportedFlag(
        "speculative-attention-mode",
        "not needed: rows of all kinds share a step, and --attention-backend chooses its kernels",
    ),
    UnsupportedFlag(
        "speculative-draft-attention-backend speculative-moe-runner-backend speculative-moe-a2a-backend",
        "not needed: a drafter computes with the model's backends, which --attention-backend and --moe-runner-backend"
        " choose",
    ),
    UnsupportedFlag(
        "speculative-draft-model-revision",
        "download that revision, and name its folder by --speculative-draft-model-path",
    ),
    UnsupportedFlag(
        "speculative-draft-load-format", "not needed: a drafter is loaded as the model is, by --load-format"
    ),
    UnsupportedFlag(
        "speculative-draft-model-quantization", "not needed: it is read from the config.json in the drafter's folder"
    ),
    UnsupportedFlag("speculative-draft-tensor-parallel-size", "not in this version: one device"),
    UnsupportedFlag("speculative-use-rejection-sampling", "use --speculative-acceptance standard"),
    UnsupportedFlag(
        "speculative-adaptive-config",
        "not needed: times are measured at the start, and --speculative-num-steps is the most drafts of a step",
    ),
    UnsupportedFlag(
        "speculative-disable-by-batch-size",
        "not needed: in each step as many drafts are made as bring most tokens a second, none included",
    ),
    UnsupportedFlag(
        "ngram-prompt-lookup-max ngram-prompt-lookup-min",
        "not needed: the longest of 2 to 5 last tokens that stood there before counts",
    ),
    UnsupportedFlag(
        "speculative-ngram-min-match-window-size speculative-ngram-max-match-window-size"
        " speculative-ngram-max-trie-depth speculative-ngram-branch-length",
        "not needed: the longest of 2 to 5 last tokens that stood there before counts",
    ),
    UnsupportedFlag(
        "speculative-ngram-min-bfs-breadth speculative-ngram-max-bfs-breadth speculative-ngram-match-type "
        "speculative-ngram-capacity",
        "not needed: what is looked up is one chain, in the sequence itself",
    ),
    UnsupportedFlag(
        "enable-dp-attention enable-eplb moe-a2a-backend enable-expert-parallel", "not in this version: one device"
    ),
    UnsupportedFlag("enable-lora lora-paths lora-modules", "not in this version"),
    UnsupportedFlag("compilation-config", "use --cuda-graph-mode for its cudagraph_mode in lower case"),
    UnsupportedFlag(
        "torch-compile enable-torch-compile", "not needed: captured steps are faster than what torch.compile makes"
    ),
    UnsupportedFlag("disable-cuda-graph-padding", "use --cuda-graph-bs, which says which rows are recorded"),
    UnsupportedFlag("enable-memory-saver custom-weight-loader", "not in this version"),
    UnsupportedFlag("api-server-count node-ips dist-init-addr", "not in this version: one process serves one engine"),
    UnsupportedFlag("max-logprobs", "not needed: the limit is fixed, and the error names it"),
    UnsupportedFlag("disable-log-stats", "use --no-metrics"),
    UnsupportedFlag("root-path", "use a proxy that rewrites paths"),
    UnsupportedFlag("middleware", "use a proxy in front"),
)


def instead_of(flag: str) -> str:
    """flag: with its dashes. What to do instead, "" where nothing is known of it."""
    name = flag.removeprefix("--")
    if name.startswith("speculative-config."):
        return f"give one object: --speculative-config '{{\"{name.partition('.')[2].replace('-', '_')}\": ...}}'"
    return next((one.instead for one in UNSUPPORTED_FLAGS if name in one.flags.split()), "")


# ---- vLLM's --speculative-config ----

CONFIG, FLAG = "speculative_config", "--speculative-config"
METHODS = {method: name for name, entry in DRAFTERS.items() for method in entry.vllm_methods}
EQUAL = {
    "method": "speculative_algorithm",
    "model": "speculative_draft_model_path",
    "num_speculative_tokens": "speculative_num_steps",
}
ADAPTIVE = "in each step as many drafts are made as bring most tokens a second"
WITHOUT = {  # keys that change nothing, in which value (... is any), and why
    "draft_tensor_parallel_size": (1, "one device is all there is"),
    "disable_by_batch_size": (..., ADAPTIVE),
    "num_speculative_tokens_per_batch_size": (..., ADAPTIVE),
    "disable_padded_drafter_batch": (..., "requests are drafted for together whatever they accepted"),
}
REFUSED = {
    "prompt_lookup_max": "the longest of 2 to 5 last tokens that stood there before counts",
    "prompt_lookup_min": "the longest of 2 to 5 last tokens that stood there before counts",
    "draft_tensor_parallel_size": "one device is all there is",
    "speculative_token_tree": "use --speculative-eagle-topk and --speculative-num-draft-tokens for trees",
    "rejection_sample_method": "use --speculative-acceptance",
    "draft_sample_method": "use --speculative-acceptance: standard has drafts sampled, race judges likely ones",
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


@dataclass(frozen=True, slots=True)
class TranslatedConfig:
    """values: settings by name, as text or numbers. notices: what was called otherwise, or changes nothing."""

    values: Mapping[str, Any]
    notices: tuple[str, ...]


def translate_speculative_config(value: object) -> TranslatedConfig:
    """Of vLLM's object, or its JSON. Raises UnsupportedConfig naming a key that has no equal."""
    tree, values, notices = _object(value), dict[str, Any](), list[str]()
    if tree.get("method") is None and tree.get("model") in ("ngram", "[ngram]"):
        tree = {**tree, "method": "ngram"}
    for key, entry in tree.items():
        if entry is None or key == "model" and entry in ("ngram", "[ngram]"):
            continue
        if key in EQUAL:
            name = EQUAL[key]
            values[name] = _method(entry) if key == "method" else entry
            notices.append(f"{FLAG}: {key} is called --{name.replace('_', '-')} {values[name]} here")
            continue
        allowed, why = WITHOUT.get(key, (None, ""))
        if why and (allowed is ... or entry == allowed):
            notices.append(f"{FLAG}: {key} changes nothing: {why}")
            continue
        if key in REFUSED:
            raise UnsupportedConfig(f"{CONFIG}: {key} has no equal here: {REFUSED[key]}; leave it out")
        known = (*EQUAL, *WITHOUT)
        guess = nearest(str(key), known)
        raise UnsupportedConfig(
            f"{CONFIG}: {key} is not known; "
            + (f"did you mean {guess}?" if guess else f"understood are {', '.join(known)}")
        )
    return TranslatedConfig(values, tuple(notices))


def _method(name: object) -> str:
    """Models' own layers have a method of their own there, such as deepseek_mtp."""
    if isinstance(name, str) and (name in METHODS or name.endswith("_mtp")):
        return METHODS.get(name, "NEXTN")
    raise UnsupportedConfig(
        f"{CONFIG}: the method {name!r} is not here; there are {', '.join(METHODS)} "
        f"(or, as --speculative-algorithm has them, {', '.join(DRAFTERS)})"
    )


def _object(value: object) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UnsupportedConfig(
                f'{CONFIG}: not JSON ({error}); give an object in single quotes, such as \'{{"method": "mtp",'
                ' "num_speculative_tokens": 3}\', or use --speculative-algorithm and --speculative-num-steps'
            ) from None
    if not isinstance(value, Mapping):
        raise UnsupportedConfig(f"{CONFIG}: expected an object of settings, got {value!r}")
    return value
