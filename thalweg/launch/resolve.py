"""`resolve`: a `Config` becomes a `Resolved`. Finds the checkpoint, reads its facts, measures it without its weights,
decides.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import msgspec

from thalweg.config.backends import TRITON
from thalweg.config.engine import EngineConfig
from thalweg.config.machine import Machine
from thalweg.config.model import ModelFacts
from thalweg.config.options import Options
from thalweg.core.errors import CheckpointError, InsufficientMemory, InvalidRequest, UnsupportedConfig
from thalweg.core.kernels import TORCH_ATTENTION, KernelConfig
from thalweg.core.plan import PAGE
from thalweg.core.report import AUTO, USER, Report
from thalweg.core.sampling import SamplingParams
from thalweg.engine.build import DTYPES, layer_factory
from thalweg.engine.fallback import LEFT_OUT
from thalweg.launch import tuned
from thalweg.launch.acceptance import refuse_simulated
from thalweg.launch.decisions import Decisions
from thalweg.launch.drafts import DraftingDecision, no_drafts, resolve_drafts
from thalweg.launch.hub import fetch_weights, locate
from thalweg.launch.resolved import Resolved, Sizes
from thalweg.launch.resources import ResolvedResources, resolve_resources
from thalweg.launch.sizes import DraftSettings, counted, measure
from thalweg.launch.speculation import NO_DRAFTER
from thalweg.models.catalog import read_facts
from thalweg.text.chat import ChatFormat, ChatOptions, ParserNames, choose_chat
from thalweg.text.parser import REASONING_FORMATS, TOOL_FORMATS
from thalweg.text.retention import ThinkingRetention
from thalweg.text.tokenizer import Tokenizer

log = logging.getLogger("thalweg.launch")

# names of vLLM and SGLang for parsers that are the same here
PARSER_NAMES = {
    "reasoning_parser": {"deepseek_r1": "deepseek-r1", "deepseek_v3": "deepseek-v3"},
    "tool_call_parser": {
        "deepseek_v3": "deepseekv3",
        "deepseek_v31": "deepseekv31",
        "deepseek_v32": "deepseekv32",
        "hermes": "qwen25",
        "qwen": "qwen25",
    },
}
GENERATION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def resolve(
    config: Options,
    machine: Machine | None = None,
    weights: bool = True,
    progress: bool = True,
    simulates: bool = False,
) -> Resolved:
    """Everything that an engine needs to be told. machine: default this one. weights: whether those of a model on the
    hub are fetched, once it is clear that they can be served. progress: whether loading shows a bar. simulates: whether
    drafts may be accepted by decree, for a benchmark.

    Raises UnsupportedConfig for wishes that cannot be honoured, CheckpointError for a checkpoint that is not there or
    wrong.
    """
    wish = config.model
    if not wish.model:
        raise UnsupportedConfig(
            "model: give the folder of a checkpoint, or org/name on the hub, e.g. --model models/tiny"
        )
    if not simulates:
        refuse_simulated(config.speculative)
    checkpoint = locate(wish.model, wish.revision, wish.hf_token)
    facts = read_facts(checkpoint.folder)
    here = machine or Machine.here()
    draft = config.speculative.speculative_draft_model_path
    drafting = None if draft is None else locate(draft, token=wish.hf_token)
    fetched = weights and config.load.load_format != "dummy"
    if fetched and drafting is not None and config.speculative.speculative_algorithm is None:
        fetch_weights(drafting, wish.hf_token)  # the names of its tensors may have to tell what it is
    wanted = resolve_drafts(config, facts, checkpoint.folder, None if drafting is None else drafting.folder)
    drafts, found = _fitting(config, facts, here, wanted)
    decisions, speculation, acceptance = drafts.decisions, drafts.speculation, drafts.acceptance
    choices = tuned.resolve_tuned(config, here, found.device, decisions)
    tokenizer = Tokenizer(checkpoint.folder) if weights or (checkpoint.folder / "tokenizer.json").is_file() else None
    chat = _chat(config, checkpoint.folder, tokenizer, decisions)
    sampling = _sampling(checkpoint.folder) if config.sampling.sampling_defaults == "model" else SamplingParams()
    if fetched:
        for one in (checkpoint, *([] if drafting is None or not speculation.folder else [drafting])):
            fetch_weights(one, wish.hf_token)
    schedule = config.schedule
    kernels, relaxed = found.kernels, acceptance.relaxed
    engine = EngineConfig(
        model_path=str(checkpoint.folder),
        load_format=config.load.load_format,
        dtype=found.dtype,
        eos_ids=facts.eos if tokenizer is None else tokenizer.eos_ids,
        context_length=found.limit if found.measured else found.context,
        min_context_length=found.least_context,
        device=found.device,
        threads=found.threads,
        decode_attention_backend=kernels.decode,
        prefill_attention_backend=kernels.prefill,
        moe_runner_backend=kernels.moe,
        fp8_gemm_backend=kernels.fp8_gemm,
        mla=kernels.latent,
        deterministic_inference=kernels.deterministic,
        tuned_kernels=choices,
        cuda_graph_mode=found.graphs.mode,
        cuda_graph_bs=found.graphs.rows,
        piecewise_cuda_graph_tokens=found.graphs.tokens,
        trim_piecewise_cuda_graphs=bool(found.graphs.tokens) and not config.load.piecewise_cuda_graph_tokens,
        cache_dir=config.load.cache_dir or "",
        warmup=config.load.warmup,
        max_total_tokens=0 if found.measured else found.pages * PAGE,
        kv_cache_dtype=kernels.kv or found.dtype,
        radix_cache=config.memory.radix_cache,
        max_running_requests=found.slots,
        max_queued_requests=schedule.max_queued_requests,
        chunked_prefill_size=found.budget,
        mixed_step_limits=None if paced(found.device, kernels) and schedule.chunked_prefill_size is None else (),
        schedule_policy=schedule.schedule_policy,
        overlap_schedule=found.overlap,
        random_seed=found.seed,
        speculative_algorithm=speculation.drafter,
        speculative_draft_model_path=speculation.folder,
        drafter_left_out=drafts is not wanted,
        speculative_num_steps=drafts.tree.max_depth or speculation.width,
        speculative_eagle_topk=drafts.tree.branching,
        speculative_num_draft_tokens=drafts.width + 1 if drafts.width else 0,
        speculative_tree="dynamic" if drafts.tree.dynamic else "static",
        speculative_adaptive=speculation.adaptive,
        speculative_acceptance=acceptance.rule,
        speculative_relaxed_topk=relaxed[0],
        speculative_relaxed_delta=relaxed[1],
        speculative_simulate_accept_length=acceptance.imposed,
        show_progress=progress,
        log_level=config.server.log_level,
        log_format=config.server.log_format,
        crash_dump_folder=config.server.crash_dump_folder or "",
        watchdog_timeout=config.server.watchdog_timeout,
        report=Report(tuple(decisions.entries)),
    )
    return Resolved(
        path=checkpoint.folder,
        names=config.server.served_model_name or tuple(dict.fromkeys((checkpoint.folder.resolve().name, wish.model))),
        architecture=facts.architecture,
        vocab=facts.vocab,
        engine=engine,
        pages=found.pages,
        context=found.context,
        tokenizer=tokenizer,
        chat=chat,
        sampling=sampling,
        sizes=found.sizes,
    )


def paced(device: str, kernels: KernelConfig) -> bool:
    """Whether the engine measures how many tokens prompts may have beside decoding rows. Where every token is a step of
    its own that would take minutes, and any other number would have a row wait, too.
    """
    return device == "cuda" and not (kernels.deterministic and kernels.decode in TORCH_ATTENTION)


def _fitting(
    config: Options, facts: ModelFacts, here: Machine, drafts: DraftingDecision
) -> tuple[DraftingDecision, ResolvedResources]:
    """What is decided with these drafts, or without any where memory is too small for both. Raises as `decide`."""

    def found(drafts: DraftingDecision) -> ResolvedResources:
        sizes_in = functools.partial(_measure, facts, drafts)
        return resolve_resources(config, facts, here, sizes_in, drafts.decisions, drafts.width, drafts.tree.is_tree)

    try:
        return drafts, found(drafts)
    except InsufficientMemory as error:
        if drafts.speculation.drafter == NO_DRAFTER:
            raise
        why = str(error)
    plain = no_drafts(f"no room for it: {why}")
    decided = found(plain)
    log.error(LEFT_OUT, why)
    return plain, decided


def _measure(facts: ModelFacts, wanted: DraftingDecision, device: str, kernels: KernelConfig, dtype: str) -> Sizes:
    """The sizes of model and drafter as this device would hold them."""
    drafter, folder = wanted.speculation.drafter, wanted.speculation.folder
    drafts = DraftSettings(drafter, folder, wanted.acceptance.rule, wanted.width, wanted.tree)
    if kernels.decode != "reference" and not TRITON.is_installed():  # a plan for another machine
        return counted(facts, kernels, DTYPES[dtype], drafts)
    return measure(facts, layer_factory(facts, "meta", kernels, dtype), drafts)


def _chat(config: Options, folder: Path, tokenizer: Tokenizer | None, decisions: Decisions) -> ChatFormat:
    """Encoder and parsers, the user's where named. Raises UnsupportedConfig for a name that is none, CheckpointError
    for a broken template.
    """
    wish = config.model
    special_tokens = {} if tokenizer is None else tokenizer.special_tokens
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    chat = choose_chat(folder, raw, ChatOptions(wish.chat_template or "auto", special_tokens), wish.model)
    decisions.add("chat_template", chat.encoder.name, USER if wish.chat_template else AUTO, chat.reason)
    reasoning = _parser("reasoning_parser", wish.reasoning_parser, REASONING_FORMATS, chat.formats.reasoning, decisions)
    tools = _parser("tool_call_parser", wish.tool_call_parser, TOOL_FORMATS, chat.formats.tools, decisions)
    chat = replace(chat, formats=ParserNames(reasoning, tools), strip=config.memory.strip_thinking_cache)
    strips = ThinkingRetention(chat, _no_mark if tokenizer is None else tokenizer.mark_id).strips
    drops = "drops the thoughts of earlier turns" if strips else "has no thoughts that it drops later"
    decisions.choose("strip_thinking_cache", chat.strip, strips, f"the chat template {drops}")
    return chat


def _no_mark(text: str) -> None:
    """A folder without a tokenizer can be planned with: no text is a token."""


def _parser(name: str, wish: str | None, known: Collection[str], auto: str | None, decisions: Decisions) -> str | None:
    if wish in PARSER_NAMES[name]:
        ours = PARSER_NAMES[name][wish]
        decisions.add(name, ours, USER, f"{wish} is called {ours} here")
        return ours
    if wish is not None and wish not in (*known, "none"):
        raise UnsupportedConfig(f"{name}: unknown {wish!r}; there is {', '.join(known)}, none")
    chosen = decisions.choose(name, wish, auto or "none", "what the chat template writes")
    return None if chosen == "none" else chosen


def _sampling(folder: Path) -> SamplingParams:
    """What generation_config.json recommends; what it does not say is off. Raises CheckpointError."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return SamplingParams()
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        params = msgspec.convert(
            {name: given[name] for name in GENERATION if given.get(name) is not None}, SamplingParams
        )
        params.check(1)
    except (ValueError, TypeError, AttributeError, msgspec.ValidationError, InvalidRequest) as error:
        raise CheckpointError(f"{path}: {error}; correct it, or use --sampling-defaults openai") from error
    return params
