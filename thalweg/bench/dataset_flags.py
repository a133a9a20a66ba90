"""The flags of the data sets, with SGLang's names and meanings, and the prompts that they ask for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from thalweg.bench.command import add_flags
from thalweg.bench.dataset_files import file_prompts, sharegpt_prompts
from thalweg.bench.datasets import (
    LengthRange,
    OrdinaryTokens,
    PromptGroups,
    SampleRequest,
    file_conversations,
    random_prompts,
    shared_prompts,
)
from thalweg.bench.display import fields
from thalweg.bench.errors import DatasetError
from thalweg.bench.traces import TraceLimits, trace_prompts

DATASETS = ("random", "generated-shared-prefix", "conversations", "trace", "sharegpt", "file")
ALIASES = fields("""
random-ids  random
mooncake    trace
servegen    trace
openai      file
custom      file
gsp         generated-shared-prefix
""")
FROM_FILES = ("trace", "sharegpt", "file")
SHORTENING_FLAGS = {
    "trace": "--trace-max-input-len, --trace-max-output-len or --trace-length-scale",
    "generated-shared-prefix": "--gsp-system-prompt-len, --gsp-question-len and --gsp-output-len",
    "sharegpt": "--sharegpt-context-len and --sharegpt-output-len",
    "file": "--output-len",
}
FLAGS = f"""
--dataset-name  dataset=random  {", ".join(DATASETS)};
                                also {", ".join(f"{alias} ({name})" for alias, name in ALIASES.items())}
--dataset-path  file            the trace (Mooncake JSONL, Azure CSV, .gz too; ServeGen .tar.gz), or the file of prompts
                                or conversations
--num-prompts   whole           how many; default 1000 for random, 64 conversations, all of a file
--seed          whole=1         of tokens, lengths and arrivals
--random-input-len --random-input  count=1024  longest prompt, or turn of a conversation, in tokens
--random-output-len --random-output --output-len  count=1024  longest output in tokens; for files, where a line has none
--random-range-ratio    share=0.0  lengths are uniform in [R x length, length]: 1 is fixed, 0 halves the mean. This is
                                    SGLang's meaning; in vLLM 0 is fixed and R means plus or minus R
--sharegpt-output-len   whole=0     tokens of every answer; 0: as in the file
--sharegpt-context-len  whole=0     leave out longer ones, question and answer together; 0: no limit
--num-turns             count=4     turns of each of the conversations
--system-prompt-len     whole=0     tokens that all conversations begin with
--think-time            seconds=0   mean pause between an answer and the next turn, exponential
--gsp-num-groups        count=64    system prompts of generated-shared-prefix
--gsp-prompts-per-group  count=16   prompts, or conversations, with each of them
--gsp-system-prompt-len  whole=2048  tokens of each of them
--gsp-question-len      count=128   tokens behind it
--gsp-output-len        count=256   tokens of each answer
--gsp-num-turns         count=1     turns of each
--gsp-range-ratio       share=1    as --random-range-ratio
--gsp-ordered           switch      group after group; else in random order
--trace-max-input-len   whole=0     cut longer prompts of a trace to this; 0: no limit
--trace-max-output-len  whole=0     cut longer outputs of a trace to this; 0: no limit
--trace-length-scale    share=1    multiply all lengths, and the 512 tokens of a prefix block, before that: prefixes
                                    keep their share
--trace-begin           seconds=0   take the part of the recording from here
--trace-end             positive=inf  to here
--trace-jitter          seconds=0   move each time of the recording by up to this (Mooncake's are multiples of 3 s)
--trace-slowdown-factor --mooncake-slowdown-factor --time-scale  positive=1  multiply a trace's times: 2 is half its
                                    speed, 0.1 ten times its speed
"""


def _dataset(name: str) -> str:
    if (name := ALIASES.get(name, name)) not in DATASETS:
        known = ", ".join(DATASETS)
        raise argparse.ArgumentTypeError(
            f"unknown data set {name!r}; there is {known} (a Mooncake or Azure recording is a trace)"
        )
    return name


def add_dataset_flags(parser: argparse.ArgumentParser, title: str) -> None:
    add_flags(parser, title, FLAGS, dataset=_dataset)


def check_dataset(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fills in the number of prompts that depends on the data set. Exits as argparse does."""
    counts = {"random": 1000, "conversations": 0 if args.dataset_path else 64}
    args.num_prompts = counts.get(args.dataset_name, 0) if args.num_prompts is None else args.num_prompts
    if args.dataset_name == "random" and args.num_prompts < 1:
        parser.error("--num-prompts must be at least 1")
    if args.dataset_name in FROM_FILES and not args.dataset_path:
        parser.error(f"--dataset-name {args.dataset_name} needs --dataset-path")


def shortening_flags(args: argparse.Namespace) -> str:
    """The flags that make this data set's prompts and answers shorter."""
    return SHORTENING_FLAGS.get(args.dataset_name, "--random-input-len and --random-output-len")


def load_prompts(args: Any, vocabulary: OrdinaryTokens | None, seed: int) -> list[SampleRequest]:
    """The prompts that the flags ask for. vocabulary: None without a tokenizer, which texts from files do not need.
    Raises DatasetError.
    """
    path, count, name = Path(args.dataset_path), args.num_prompts, args.dataset_name
    if name == "sharegpt":
        lengths = args.sharegpt_output_len, args.sharegpt_context_len
        return sharegpt_prompts(path, count, lengths, vocabulary or OrdinaryTokens(()), seed)
    if name == "file" or (name == "conversations" and args.dataset_path):
        prompts = file_prompts(path, count, args.random_output_len, vocabulary or OrdinaryTokens(()))
        return file_conversations(prompts, args.think_time, seed) if name == "conversations" else prompts
    if vocabulary is None:
        raise DatasetError(
            "random tokens need a vocabulary: give --tokenizer, the folder of the model's tokenizer.json"
        )
    if name == "trace":
        names = ("max_input_len", "max_output_len", "slowdown_factor", "begin", "end", "length_scale", "jitter")
        limits = TraceLimits(*(getattr(args, f"trace_{name}") for name in names))
        return trace_prompts(path, vocabulary, count, limits, seed)
    lengths = args.random_input_len, args.random_output_len
    if name == "random":
        return random_prompts(vocabulary, count, *lengths, args.random_range_ratio, seed)
    if name == "conversations":
        ratio, turns, size = args.random_range_ratio, args.num_turns, (1, count)
        system, ordered = LengthRange(args.system_prompt_len, 1.0), False
    else:
        ratio, turns = args.gsp_range_ratio, args.gsp_num_turns
        size, lengths = (args.gsp_num_groups, args.gsp_prompts_per_group), (args.gsp_question_len, args.gsp_output_len)
        system, ordered = LengthRange(args.gsp_system_prompt_len, ratio), args.gsp_ordered
    question, output = (LengthRange(length, ratio) for length in lengths)
    groups = PromptGroups(*size, system, question, output, turns, args.think_time, ordered)
    return shared_prompts(vocabulary, groups, seed)
