"""The `thalweg` command. Each subcommand imports what it needs when it runs, so that help is there at once."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from thalweg import __version__
from thalweg.config.args import ENGINE, OptionsParser, ParsedOptions, add_setting, options_parser, parse_options
from thalweg.config.setting import nearest
from thalweg.config.tree import non_defaults, settings
from thalweg.core.errors import NumericalError, ThalwegError, UnsupportedConfig

if TYPE_CHECKING:
    from thalweg.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Command:
    """summary: one line for `thalweg --help`. run: takes the arguments behind the command's name, returns the exit
    status.
    """

    summary: str
    run: Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 it broke, 2 it was asked for wrongly."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        words[0] = "version"
    if words[0] not in COMMANDS:
        guess = nearest(words[0], COMMANDS)
        return _fail(
            f"unknown command {words[0]!r}" + (f"; did you mean {guess}?" if guess else "; thalweg --help lists them"),
            2,
        )
    try:
        return COMMANDS[words[0]].run(words[1:])
    except UnsupportedConfig as error:
        return _fail(str(error), 2)
    except ThalwegError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `thalweg ... | head`: the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def usage() -> str:
    rows = "\n".join(f"  {name:<10}{command.summary}" for name, command in COMMANDS.items())
    return f"""\
usage: thalweg COMMAND [MODEL] [--flag value ...]

Thalweg {__version__}: an LLM inference engine. MODEL is a folder with config.json and *.safetensors,
or org/name on the model hub. Without MODEL it is models/tiny, which comes with Thalweg.

{rows}

examples:
  thalweg serve                                      then open http://127.0.0.1:30000/ in a browser
  thalweg chat                                       the same, in this terminal
  thalweg run models/tiny "What is 27 + 58?"         one answer
  thalweg generate models/tiny --prompt "Once upon"  one completion, without a server
  thalweg plan org/name                              what would be chosen and why, without loading anything

thalweg COMMAND --help tells more; docs/configuration.md lists every setting."""


def _fail(message: str, status: int) -> int:
    print(f"thalweg: {message}", file=sys.stderr)
    return status


def _parse(parser: OptionsParser, argv: Sequence[str], needs_model: bool = True) -> ParsedOptions:
    """Reads the command line; prints a line for each flag that has another name here."""
    parsed = parse_options(parser, argv, needs_model)
    for notice in parsed.notices:
        _notify(notice)
    return parsed


def _notify(notice: str) -> None:
    print(f"thalweg: {notice}", file=sys.stderr)


# ---- commands ----


def serve(argv: Sequence[str]) -> int:
    epilog = """\
examples:
  thalweg serve
  thalweg serve models/tiny --port 8000
  thalweg serve org/name --revision v1.0 --served-model-name river --api-key "$KEY"
  thalweg serve models/tiny --host 0.0.0.0 --ssl-certfile cert.pem --ssl-keyfile key.pem
  thalweg serve --config serve.yaml --log-level debug

/ready answers 200 once the model is loaded, /health while the server lives. SIGTERM and Ctrl-C let running requests
finish."""
    parser = options_parser(
        "thalweg serve", "Serves a model over HTTP: OpenAI's routes, its own, and a page to chat on.", epilog
    )
    text = "print every setting with its reason, and the phases of the start; later /resolved has them"
    parser.own.add_argument("-v", "--verbose", action="store_true", help=text)
    parsed = _parse(parser, argv)
    config, path = parsed.options, parsed.options.model.model
    path = os.path.abspath(path) if os.path.isdir(path) else path
    from thalweg.engine.child import EngineProcess

    with contextlib.closing(EngineProcess()) as engine:  # imports while this process does
        gc.disable()  # imports leave no garbage
        from thalweg.launch.serve import serve as run
        from thalweg.server.app import build
        from thalweg.server.connection import bounded

        gc.enable()
        return run(
            config,
            lambda front, options, resolved: {
                "app": build(
                    front,
                    options,
                    resolved.chat,
                    path=path,
                    defaults=resolved.sampling,
                    folder=resolved.path,
                ),
                "http": bounded(options),
            },
            engine,
            parsed.args.verbose,
        )


def plan(argv: Sequence[str]) -> int:
    from thalweg.bench.plan_check import check
    from thalweg.launch.planning.command import main as run

    return run(argv, _notify, check)


def warmup(argv: Sequence[str]) -> int:
    epilog = """\
examples:
  thalweg warmup org/name
  thalweg warmup org/name --max-running-requests 128 --cache-dir /var/cache/thalweg
  thalweg warmup --export kernels.tar.gz     and on another machine: thalweg warmup --import kernels.tar.gz

Takes the flags of `thalweg serve` and compiles what it will run. Weights are not read: config.json is enough."""
    parser = options_parser(
        "thalweg warmup",
        "Compiles ahead all kernels that serving with these flags needs, into a folder that stays.",
        epilog,
    )
    either = parser.own.add_mutually_exclusive_group()
    either.add_argument("--export", type=Path, metavar="FILE", help="write the compiled kernels to an archive, and end")
    either.add_argument(
        "--import", type=Path, metavar="FILE", dest="archive", help="take compiled kernels from an archive, and end"
    )
    parsed = _parse(parser, argv)
    from thalweg.launch.warmup import warmup as run

    return run(parsed.options, parsed.args.export, parsed.args.archive)


def generate(argv: Sequence[str]) -> int:
    epilog = """\
examples:
  thalweg generate models/tiny --prompt "Once upon a time" --max-tokens 64
  thalweg generate models/tiny --prompt-file prompts.txt --temperature 0 --json > out.jsonl
  echo "Once upon a time" | thalweg generate models/tiny"""
    parser = options_parser("thalweg generate", "Completes prompts in this process, without a server.", epilog, ENGINE)
    own = _sampling_flags(parser)
    own.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be given several times"
    )
    own.add_argument("--prompt-file", type=Path, metavar="FILE", help="a prompt a line; - is standard input")
    own.add_argument("--n", type=int, metavar="N", help="completions of each prompt (default: 1)")
    own.add_argument("--json", action="store_true", help="print a JSON object a prompt")
    parsed = _parse(parser, argv)
    prompts = _prompts(parsed.args)
    from thalweg.llm import LLM, GenerationInterrupted

    llm = LLM(**non_defaults(parsed.options))
    interrupted = None
    try:
        results = llm.generate(prompts, _sampling(parsed.args, llm.get_default_sampling_params()))
    except GenerationInterrupted as error:
        results, interrupted = error.outputs, error
    for prompt, result in zip(prompts, results, strict=True):
        if parsed.args.json:
            outputs = [
                {"text": one.text, "tokens": len(one.token_ids), "finish_reason": one.finish_reason}
                for one in result.outputs
            ]
            print(json.dumps({"prompt": prompt, "outputs": outputs}, ensure_ascii=False))
        else:
            print(*(prompt + one.text for one in result.outputs), sep="\n---\n")
    if interrupted is not None:
        raise interrupted
    if any(one.finish_reason == "error" for result in results for one in result.outputs):
        raise NumericalError
    return 0


def chat(argv: Sequence[str]) -> int:
    epilog = """\
examples:
  thalweg chat
  thalweg chat models/tiny --system "You speak in verse." --temperature 0.7 --thinking

/new forgets the conversation, /bye or Ctrl-D leaves, /help says so, Ctrl-C stops an answer."""
    return _chat(options_parser("thalweg chat", "Talks to a model in this terminal.", epilog, ENGINE), argv)


def run(argv: Sequence[str]) -> int:
    epilog = """\
examples:
  thalweg run                                  as thalweg chat
  thalweg run "What is 27 + 58?"               one answer of the bundled model
  thalweg run models/tiny "What is 27 + 58?"   one answer
  cat question.txt | thalweg run models/tiny   the same, from standard input"""
    text = "Talks to a model in this terminal, or answers one PROMPT."
    parser = options_parser("thalweg run", text, epilog, ENGINE, "PROMPT")
    return _chat(parser, argv, is_piped=not sys.stdin.isatty())


def _chat(parser: OptionsParser, argv: Sequence[str], is_piped: bool = False) -> int:
    """is_piped: whether standard input is the prompt where the command line has none."""
    own = _sampling_flags(parser)
    own.add_argument("--system", default="", metavar="TEXT", help="system message")
    own.add_argument("--thinking", action="store_true", help="ask for a thought before the answer")
    parsed = _parse(parser, argv)
    prompt = " ".join(parsed.words) or (sys.stdin.read().strip() if is_piped else "")
    if is_piped and not prompt:
        model = parsed.args.positional_model
        where = f"{model!r} was taken as MODEL; write the prompt after it" if model else "write it after MODEL"
        raise UnsupportedConfig(f"no prompt: {where}, or on standard input")
    from thalweg.launch.chat import chat
    from thalweg.launch.resolve import resolve

    resolved = resolve(parsed.options)
    resolved = replace(resolved, engine=resolved.engine.started((), log_start=False))
    params = _sampling(parsed.args, resolved.sampling)
    return chat(resolved, params, parsed.args.system, parsed.args.thinking or None, prompt)


def pull(argv: Sequence[str]) -> int:
    epilog = """\
examples:
  thalweg pull org/name
  thalweg pull org/name --revision v1.0

Files go into the hub's cache (HF_HOME), where `thalweg serve org/name` finds them. Run it again after an interruption:
complete files are kept, and a file that broke off goes on from there."""
    parser = OptionsParser(
        "thalweg pull", "Downloads a model from the hub.", epilog, "thalweg pull ORG/NAME [--revision NAME]"
    )
    parser.own.add_argument("model", metavar="ORG/NAME", help="name of the model on the hub")
    for name in ("revision", "hf_token"):
        add_setting(parser.own, settings()[name])
    parsed = _parse(parser, argv, needs_model=False)
    from thalweg.launch.hub import pull as run

    model = parsed.options.model
    print(run(parsed.args.model, model.revision, model.hf_token))
    return 0


def doctor(argv: Sequence[str]) -> int:
    epilog = """\
examples:
  thalweg doctor
  thalweg doctor models/tiny --port 8000 --online
  thalweg doctor --json

Exit status: 0 if serving can start, else 1. A machine without a GPU is fine."""
    parser = options_parser(
        "thalweg doctor",
        "Checks this machine, and prints a command that fixes each problem.",
        epilog,
        ("model", "listen"),
    )
    own = parser.own
    own.add_argument("--json", action="store_true", help="print one JSON object")
    own.add_argument("--online", action="store_true", help="ask the model hub too whether it can be reached")
    parsed = _parse(parser, argv, needs_model=False)
    from thalweg.launch.doctor import doctor as run

    return run(parsed.options, parsed.args)


def version(argv: Sequence[str]) -> int:
    print(__version__)
    return 0


def _main(module: str) -> Callable[[Sequence[str]], int]:
    """The `main` of a module, which is imported when the command runs."""
    return lambda argv: int(importlib.import_module(f"thalweg.{module}").main(argv))


COMMANDS = {
    "serve": Command("serve a model over HTTP", serve),
    "chat": Command("talk to a model in this terminal", chat),
    "run": Command("talk to a model, or answer one prompt: thalweg run MODEL [PROMPT]", run),
    "pull": Command("download a model from the hub", pull),
    "generate": Command("complete prompts in this process", generate),
    "plan": Command("show memory, lower bounds of step times, and every setting with its reason", plan),
    "warmup": Command("compile the kernels that serving with these flags needs", warmup),
    "quantize": Command(
        "write a checkpoint in another format: int4, w4afp8, nvfp4, mxfp4, int8, fp8", _main("quantize.cli")
    ),
    "render": Command("show the prompt and token ids of a conversation", _main("launch.render")),
    "parse": Command("parse raw model output into reasoning, content and tool calls", _main("launch.parse")),
    "bench": Command("measure speed: of a server, batches, a start, kernels; compare results", _main("bench.cli")),
    "eval": Command("measure accuracy", _main("bench.eval")),
    "ablate": Command("turn features off and on, and measure what each is worth", _main("bench.ablate")),
    "roofline": Command(
        "show where a step's time goes: each operation against its lower bound", _main("bench.roofline")
    ),
    "tune": Command("search faster kernel tiles for a model on this device", _main("bench.tune")),
    "replay": Command("rerun the recorded steps of an engine", _main("bench.replay")),
    "doctor": Command("check this machine, and print a command that fixes each problem", doctor),
    "version": Command("print the version", version),
}


# ---- sampling flags of generate and chat ----


def _sampling_flags(parser: OptionsParser) -> argparse._ArgumentGroup:
    """The group of a command's own flags, with those of sampling in it; what is not given is left to the model's
    defaults.
    """
    group = parser.own
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help="tokens an answer may have (default: 256)", default=256
    )
    group.add_argument("--temperature", type=float, metavar="X", help="0 is greedy (default: the model's, else 1)")
    group.add_argument(
        "--top-p",
        type=float,
        metavar="X",
        help="sample among the likeliest tokens with this sum (default: the model's, else 1)",
    )
    group.add_argument(
        "--top-k",
        type=int,
        metavar="N",
        help="sample among so many of the likeliest tokens (default: the model's, else all)",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that ends an answer; may be given several times",
    )
    return group


def _sampling(rest: argparse.Namespace, default: SamplingParams) -> SamplingParams:
    """Sampling parameters of the flags, on top of the model's defaults."""
    import msgspec

    names = ("max_tokens", "temperature", "top_p", "top_k", "n")
    said = {name: vars(rest)[name] for name in names if vars(rest).get(name) is not None}
    return msgspec.structs.replace(default, stop=tuple(rest.stop), **said)


def _prompts(rest: argparse.Namespace) -> list[str]:
    """From --prompt, --prompt-file, or standard input as one prompt. Raises UnsupportedConfig."""
    prompts = list(rest.prompt)
    if rest.prompt_file is not None:
        try:
            text = sys.stdin.read() if str(rest.prompt_file) == "-" else rest.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UnsupportedConfig(f"--prompt-file {rest.prompt_file}: {error}") from error
        prompts += [line for line in text.splitlines() if line]
    if not prompts and not sys.stdin.isatty():
        prompts = [sys.stdin.read().removesuffix("\n")]
    if not any(prompts):
        raise UnsupportedConfig('no prompt: give --prompt "TEXT", --prompt-file FILE, or text on standard input')
    return prompts
