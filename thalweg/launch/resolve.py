"""`resolve`: options become a `Resolved`. Finds the checkpoint, reads its facts, counts its sizes without its weights,
and decides everything that the user left open.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import msgspec

from thalweg.config.drafters import NO_DRAFTER
from thalweg.config.machine import Machine
from thalweg.config.model import ModelFacts, index_pattern, read_config, with_index_pattern
from thalweg.config.options import ModelOptions, Options
from thalweg.config.tree import non_defaults
from thalweg.core.errors import CheckpointError, InsufficientMemory, InvalidRequest, UnsupportedConfig
from thalweg.core.report import AUTO, USER
from thalweg.core.sampling import SamplingParams
from thalweg.engine.build import LEFT_OUT
from thalweg.launch import tuned
from thalweg.launch.decisions import NO_CACHE, Decisions
from thalweg.launch.hub import Checkpoint, fetch_weights, locate
from thalweg.launch.resolved import Resolved
from thalweg.launch.resources import Resources, resolve_resources
from thalweg.launch.sizes import measure
from thalweg.launch.speculation import refuse_simulated, resolve_drafting, without_room
from thalweg.models.catalog import read_facts, states_quantization
from thalweg.quant.catalog import RECOGNIZED, quantization_names
from thalweg.text.chat import ChatFormat, ChatOptions, ParserNames, choose_chat
from thalweg.text.parser import REASONING_FORMATS, TOOL_FORMATS
from thalweg.text.retention import ThinkingRetention
from thalweg.text.tokenizer import Tokenizer, has_tokenizer, read_json_object

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
        "glm47": "glm45",
        "llama3_json": "llama3",
        "kimi-k2": "kimi_k2",
    },
}
INT8_ACTIVATIONS = (
    'Activations are INT8, too; for 16-bit ones add "quantization_config": {"quant_method": "w8a8_int8", "is_dynamic":'
    " false} to config.json"
)
# options that the engine takes as the user set them; the defaults of both are the same
UNCHANGED = (
    "load_format",
    "cache_dir",
    "warmup",
    "max_queued_requests",
    "log_level",
    "log_format",
    "crash_dump_folder",
    "watchdog_timeout",
    "watchdog_action",
    "restart_timeout",
)
GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def resolve(
    options: Options,
    machine: Machine | None = None,
    weights: bool = True,
    progress: bool = True,
    simulates: bool = False,
) -> Resolved:
    """machine: default this one. weights: whether to fetch those of a model on the hub, once it is clear that they can
    be served. progress: whether loading shows a bar. simulates: whether acceptance may be simulated, for a benchmark.

    Raises UnsupportedConfig for options that cannot be honoured, CheckpointError for a checkpoint that is missing or
    wrong.
    """
    model = options.model
    if not model.model:
        raise UnsupportedConfig(
            "model: give the folder of a checkpoint, or org/name on the hub, e.g. --model models/tiny"
        )
    if not simulates:
        refuse_simulated(options.speculative)
    checkpoint, drafter = _locate(options, weights)
    published, here = read_facts(checkpoint.folder), machine or Machine.here()
    pattern = _index_pattern(model, published)
    facts = with_index_pattern(published, pattern)
    resources, decisions = _fit(options, facts, here, checkpoint, drafter)
    if pattern:
        decisions.record(
            "index_topk_pattern", pattern, True, "F: the layer selects context; S: it shares the last one's"
        )
    tuned_kernels = tuned.resolve_tuned(options, here, resources.config.device, decisions)
    _check_quantization(model.quantization, facts, decisions)
    tokenizer = Tokenizer(checkpoint.folder) if weights or has_tokenizer(checkpoint.folder) else None
    chat = _chat(options, checkpoint.folder, tokenizer, decisions)
    uses_models = options.sampling.sampling_defaults == "model"
    sampling = _sampling(checkpoint.folder) if uses_models else SamplingParams()
    if weights and options.load.load_format != "dummy":
        fetch_weights(checkpoint, model.hf_token)
        if drafter is not None and resources.config.speculative_draft_model_path:
            fetch_weights(drafter, model.hf_token)
    engine = decisions.config(
        **{name: value for name, value in non_defaults(options).items() if name in UNCHANGED},
        model_path=str(checkpoint.folder),
        index_topk_pattern=pattern,
        eos_ids=facts.eos if tokenizer is None else tokenizer.eos_ids,
        tuned_kernels=tuned_kernels,
        show_progress=progress,
    )
    return Resolved(
        path=checkpoint.folder,
        names=options.server.served_model_name or tuple(dict.fromkeys((checkpoint.folder.resolve().name, model.model))),
        architecture=facts.architecture,
        vocab=facts.vocab,
        engine=engine,
        pages=resources.pages,
        context=resources.context,
        tokenizer=tokenizer,
        chat=chat,
        sampling=sampling,
        sizes=resources.sizes,
    )


def _index_pattern(model: ModelOptions, facts: ModelFacts) -> str:
    """As `EngineConfig` has it. Raises UnsupportedConfig where both flags are given."""
    if model.index_topk_freq is None:
        return model.index_topk_pattern or ""
    if model.index_topk_pattern is not None:
        raise UnsupportedConfig("index_topk_freq, index_topk_pattern: give one of them")
    first = facts.layers if facts.indexer is None else facts.indexer.offset
    return index_pattern(model.index_topk_freq, facts.layers, first)


def _locate(options: Options, weights: bool) -> tuple[Checkpoint, Checkpoint | None]:
    """The model's folder, and the drafter's where one was named."""
    model, speculative = options.model, options.speculative
    checkpoint = locate(model.model, model.revision, model.hf_token)
    weights = weights and options.load.load_format != "dummy"
    if weights and not states_quantization(checkpoint.folder):
        fetch_weights(checkpoint, model.hf_token)  # the tensors tell their format
    if speculative.speculative_draft_model_path is None:
        return checkpoint, None
    drafter = locate(speculative.speculative_draft_model_path, token=model.hf_token)
    if weights and speculative.speculative_algorithm is None:
        fetch_weights(drafter, model.hf_token)  # the names of its tensors may have to tell what it is
    return checkpoint, drafter


def _fit(
    options: Options, facts: ModelFacts, machine: Machine, checkpoint: Checkpoint, drafter: Checkpoint | None
) -> tuple[Resources, Decisions]:
    """The decisions with the drafter, or without it where memory is too small for both."""
    decisions, count = Decisions(), functools.partial(measure, facts)
    folder = None if drafter is None else drafter.folder
    resolve_drafting(options.speculative, facts, decisions, folder, checkpoint.folder)
    drafting = decisions.config()
    try:
        return resolve_resources(options, facts, machine, count, decisions), decisions
    except InsufficientMemory as error:
        if drafting.speculative_algorithm == NO_DRAFTER:
            raise
        reason = str(error)
    decisions = without_room(reason)
    resources = resolve_resources(options, facts, machine, count, decisions)
    decisions.fields["drafter_left_out"] = True
    log.error(LEFT_OUT, reason)
    return resources, decisions


def _check_quantization(asked: str | None, facts: ModelFacts, decisions: Decisions) -> None:
    """Records the format of the weights. Raises UnsupportedConfig where the user named another."""
    stored, *names = quantization_names(facts.quantization_config)
    if asked in names:
        decisions.add("quantization", stored, USER, f"{asked} is called {stored} here")
        return
    if asked not in (None, stored):
        raise UnsupportedConfig(
            f"quantization: {asked} was asked for, and the checkpoint's quantization_config says"
            f" {', '.join((stored, *names))}. Weights are not converted: leave --quantization out, or serve a"
            " checkpoint that has this format"
        )
    reason = "quantization_config in config.json"
    if (tensor := facts.quantization_config.get(RECOGNIZED)) is not None:
        reason = f"config.json has no quantization_config; {tensor} and all quantized weights are INT8 with row scales"
        log.warning("quantization: %s: read as %s. %s", reason, stored, INT8_ACTIVATIONS)
    decisions.choose("quantization", asked, stored, reason)


def _chat(options: Options, folder: Path, tokenizer: Tokenizer | None, decisions: Decisions) -> ChatFormat:
    """Encoder and parsers, the user's where named. Raises UnsupportedConfig for an unknown name, CheckpointError for a
    broken template.
    """
    model = options.model
    special_tokens = {} if tokenizer is None else tokenizer.special_tokens
    chat = choose_chat(
        folder, read_config(folder, "a model"), ChatOptions(model.chat_template or "auto", special_tokens), model.model
    )
    decisions.add("chat_template", chat.encoder.name, USER if model.chat_template else AUTO, chat.reason)
    reasoning = _parser(
        "reasoning_parser", model.reasoning_parser, REASONING_FORMATS, chat.formats.reasoning, decisions
    )
    tools = _parser("tool_call_parser", model.tool_call_parser, TOOL_FORMATS, chat.formats.tools, decisions)
    strip, shows_calls = options.memory.strip_thinking_cache, model.tool_call_parser == "none"
    chat = replace(chat, formats=ParserNames(reasoning, tools), strip=strip, shows_calls=shows_calls)
    strips = ThinkingRetention(chat, _no_mark if tokenizer is None else tokenizer.mark_id).strips
    drops = "drops the thoughts of earlier turns" if strips else "keeps the thoughts of earlier turns"
    if chat.strip and not options.memory.radix_cache:
        decisions.add("strip_thinking_cache", True, USER, NO_CACHE)
    else:
        decisions.choose("strip_thinking_cache", chat.strip, strips, f"the chat template {drops}")
    return chat


def _no_mark(text: str) -> None:
    """Without a tokenizer no text is a token."""


def _parser(name: str, asked: str | None, known: Collection[str], auto: str | None, decisions: Decisions) -> str | None:
    if asked in PARSER_NAMES[name]:
        ours = PARSER_NAMES[name][asked]
        decisions.add(name, ours, USER, f"{asked} is called {ours} here")
        return ours
    if asked is not None and asked not in (*known, "none"):
        raise UnsupportedConfig(f"{name}: unknown {asked!r}; there is {', '.join(known)}, none")
    chosen = decisions.choose(name, asked, auto or "none", "what the chat template writes")
    return None if chosen == "none" else chosen


def _sampling(folder: Path) -> SamplingParams:
    """Sampling defaults of generation_config.json; parameters that it leaves out are off. Raises CheckpointError."""
    path = folder / "generation_config.json"
    given = read_json_object(path)
    try:
        fields = {name: given[name] for name in GENERATION_FIELDS if given.get(name) is not None}
        params = msgspec.convert(fields, SamplingParams)
        params.check(1)
    except (msgspec.ValidationError, InvalidRequest) as error:
        raise CheckpointError(f"{path}: {error}; correct it, or use --sampling-defaults openai") from error
    return params
