"""The flags that say what is sent, with SGLang's names and meanings, and the prompts that they ask for."""

from __future__ import annotations

import argparse
import math
import tarfile
from pathlib import Path

from thalweg.bench.conversations import Groups, file_conversations, shared_prompts
from thalweg.bench.datasets import Prompt, Span, Vocabulary, random_prompts
from thalweg.bench.errors import DatasetError
from thalweg.bench.prompt_files import file_prompts, sharegpt_prompts
from thalweg.bench.request_traces import TraceLimits, trace_prompts
from thalweg.bench.servegen import servegen_prompts

DATASETS = ("random", "generated-shared-prefix", "conversations", "trace", "sharegpt", "file")
ALIASES = {
    "random-ids": "random",
    "mooncake": "trace",
    "servegen": "trace",
    "openai": "file",
    "custom": "file",
    "gsp": "generated-shared-prefix",
}
FROM_FILES = ("trace", "sharegpt", "file")


def _dataset(name: str) -> str:
    if name in DATASETS:
        return name
    if name in ALIASES:
        return ALIASES[name]
    raise argparse.ArgumentTypeError(
        f"unknown data set {name!r}; there is {', '.join(DATASETS)} (a Mooncake or Azure recording is a trace)"
    )


def whole(text: str) -> int:
    """An argparse type: a whole number from 0 on."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, got {text!r}")
    return int(text)


def add_data(group: argparse._ArgumentGroup) -> None:
    """Adds the flags of all data sets."""
    add = group.add_argument
    names = "{" + ",".join(DATASETS) + "}"
    also = ", ".join(f"{alias} ({name})" for alias, name in ALIASES.items())
    add("--dataset-name", type=_dataset, default="random", metavar=names, help=f"default: %(default)s; also: {also}")
    add(
        "--dataset-path",
        default="",
        help=(
            "the trace (Mooncake JSONL, Azure CSV, .gz too; ServeGen .tar.gz), or the file of prompts or conversations"
        ),
    )
    add(
        "--num-prompts",
        type=whole,
        default=None,
        help="how many; default 1000 for random, 64 conversations, all of a file",
    )
    add("--seed", type=int, default=1, help="of tokens, lengths and arrivals (default: %(default)s)")
    add(
        "--random-input-len",
        "--random-input",
        type=whole,
        default=1024,
        help="longest prompt, or turn of a conversation, in tokens (default: %(default)s)",
    )
    add(
        "--random-output-len", "--random-output", "--output-len", type=whole, default=1024,
        help="longest output in tokens; for files, where a line names none (default: %(default)s)",
    )  # fmt: skip
    add(
        "--random-range-ratio", type=float, default=0.0, metavar="R",
        help="lengths are uniform in [R x length, length]: 1 is fixed, 0 halves the mean. This is SGLang's meaning; "
        "in vLLM 0 is fixed and R means plus or minus R (default: %(default)s)",
    )  # fmt: skip
    add("--sharegpt-output-len", type=whole, default=0, help="tokens of every answer; 0: as in the file (default)")
    add(
        "--sharegpt-context-len",
        type=whole,
        default=0,
        help="leave out longer ones, question and answer together; 0: do not (default)",
    )
    _add_shared(group)
    _add_trace(group)


def _add_shared(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-turns", type=whole, default=4, help="turns of each of the conversations (default: %(default)s)")
    add("--system-prompt-len", type=whole, default=0, help="tokens that all conversations begin with (default: 0)")
    add(
        "--think-time",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="mean pause between an answer and the next turn, exponential (default: 0)",
    )
    add(
        "--gsp-num-groups",
        type=whole,
        default=64,
        help="system prompts of generated-shared-prefix (default: %(default)s)",
    )
    add(
        "--gsp-prompts-per-group",
        type=whole,
        default=16,
        help="prompts, or conversations, with each of them (default: %(default)s)",
    )
    add("--gsp-system-prompt-len", type=whole, default=2048, help="tokens of each of them (default: %(default)s)")
    add("--gsp-question-len", type=whole, default=128, help="tokens behind it (default: %(default)s)")
    add("--gsp-output-len", type=whole, default=256, help="tokens of each answer (default: %(default)s)")
    add("--gsp-num-turns", type=whole, default=1, help="turns of each (default: %(default)s)")
    add(
        "--gsp-range-ratio", type=float, default=1.0, metavar="R", help="as --random-range-ratio (default: %(default)s)"
    )
    add("--gsp-ordered", action="store_true", help="group after group; else in random order")


def _add_trace(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--trace-max-input-len",
        type=whole,
        default=0,
        help="cut longer prompts of a trace to this; 0: do not (default)",
    )
    add(
        "--trace-max-output-len",
        type=whole,
        default=0,
        help="cut longer outputs of a trace to this; 0: do not (default)",
    )
    add(
        "--trace-length-scale", type=float, default=1.0, metavar="F",
        help="multiply all lengths, and the 512 tokens of a prefix block, before that: sharing stays as it was (default: 1)",
    )  # fmt: skip
    add(
        "--trace-begin",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="take the part of the recording from here (default: 0)",
    )
    add("--trace-end", type=float, default=math.inf, metavar="SECONDS", help="to here (default: its end)")
    add(
        "--trace-jitter",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="move each time of the recording by up to this (Mooncake's stand on a grid of 3 s; default: 0)",
    )
    add(
        "--trace-slowdown-factor", "--mooncake-slowdown-factor", "--time-scale", type=float, default=1.0, metavar="F",
        help="multiply a trace's times: 2 is half its speed, 0.1 ten times its speed (default: %(default)s)",
    )  # fmt: skip


def check_data(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fills in how many prompts where that depends on the data set. Exits with a message (status 2) as argparse
    does.
    """
    counts = {"random": 1000, "conversations": 0 if args.dataset_path else 64}
    args.num_prompts = counts.get(args.dataset_name, 0) if args.num_prompts is None else args.num_prompts
    if args.dataset_name == "random" and args.num_prompts < 1:
        parser.error("--num-prompts must be at least 1")
    if args.dataset_name in FROM_FILES and not args.dataset_path:
        parser.error(f"--dataset-name {args.dataset_name} needs --dataset-path")


def shorter(args: argparse.Namespace) -> str:
    """The flags that make this data set's prompts and answers shorter, in words."""
    flags = {
        "trace": "--trace-max-input-len, --trace-max-output-len or --trace-length-scale",
        "generated-shared-prefix": "--gsp-system-prompt-len, --gsp-question-len and --gsp-output-len",
        "sharegpt": "--sharegpt-context-len and --sharegpt-output-len",
        "file": "--output-len",
    }
    return flags.get(args.dataset_name, "--random-input-len and --random-output-len")


def _groups(args: argparse.Namespace) -> Groups:
    ratio = args.gsp_range_ratio
    return Groups(
        args.gsp_num_groups,
        args.gsp_prompts_per_group,
        Span(args.gsp_system_prompt_len, ratio),
        Span(args.gsp_question_len, ratio),
        Span(args.gsp_output_len, ratio),
        args.gsp_num_turns,
        args.think_time,
        args.gsp_ordered,
    )


def _conversations(args: argparse.Namespace) -> Groups:
    ratio = args.random_range_ratio
    return Groups(
        1,
        args.num_prompts,
        Span(args.system_prompt_len, 1.0),
        Span(args.random_input_len, ratio),
        Span(args.random_output_len, ratio),
        args.num_turns,
        args.think_time,
    )


def _of_a_file(args: argparse.Namespace, words: Vocabulary, seed: int) -> list[Prompt]:
    path = Path(args.dataset_path)
    if args.dataset_name == "sharegpt":
        return sharegpt_prompts(
            path, args.num_prompts, (args.sharegpt_output_len, args.sharegpt_context_len), words, seed
        )
    prompts = file_prompts(path, args.num_prompts, args.random_output_len, words)
    return file_conversations(prompts, args.think_time, seed) if args.dataset_name == "conversations" else prompts


def load_prompts(args: argparse.Namespace, vocabulary: Vocabulary | None, seed: int) -> list[Prompt]:
    """The prompts that the flags ask for. vocabulary: None where there is no tokenizer, which texts from files do
    without. Raises DatasetError.
    """
    if args.dataset_name in ("sharegpt", "file") or (args.dataset_name == "conversations" and args.dataset_path):
        return _of_a_file(args, vocabulary or Vocabulary(()), seed)
    if vocabulary is None:
        raise DatasetError(
            "random tokens need a vocabulary: give --tokenizer, the folder with the model's tokenizer.json"
        )
    if args.dataset_name == "trace":
        limits = TraceLimits(
            args.trace_max_input_len,
            args.trace_max_output_len,
            args.trace_slowdown_factor,
            args.trace_begin,
            args.trace_end,
            args.trace_length_scale,
            args.trace_jitter,
        )
        path = Path(args.dataset_path)
        drawn = path.is_file() and tarfile.is_tarfile(path)  # ServeGen's statistics, not a recording
        read = servegen_prompts if drawn else trace_prompts
        return read(path, vocabulary, args.num_prompts, limits, seed)
    if args.dataset_name == "random":
        lengths = args.random_input_len, args.random_output_len
        return random_prompts(vocabulary, args.num_prompts, *lengths, args.random_range_ratio, seed)
    wish, flag = (
        (_groups(args), "--gsp") if args.dataset_name != "conversations" else (_conversations(args), "--random")
    )
    wish.check(flag)
    return shared_prompts(vocabulary, wish, seed)
