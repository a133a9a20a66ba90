"""`thalweg bench COMMAND`: finds the command's module and imports that one only, so that `bench serve` never waits for
torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "serve": ("thalweg.bench.serve", "measure a running server, any OpenAI-compatible one"),
    "load": (
        "thalweg.bench.load_test",
        "start a server and check it under 1,000 streams: answers, CPU time, memory, step rate",
    ),
    "offline": ("thalweg.bench.offline", "throughput of a whole data set in this process, without HTTP"),
    "startup": ("thalweg.bench.startup", "from the command to the first token, phase by phase, cold and warm"),
    "one-batch": ("thalweg.bench.one_batch", "time prefill and decode of fixed batches in this process, without HTTP"),
    "kernels": ("thalweg.bench.kernels", "every kernel by every backend that runs here, beside what the device can do"),
    "compare": ("thalweg.bench.compare", "what changed between two results beyond noise"),
    "report": ("thalweg.bench.report", "tables and plots of results"),
    "compare-transformers": ("thalweg.bench.compare_transformers", "the same prompts through transformers' generate"),
    "make-checkpoint": ("thalweg.bench.make_checkpoint", "write random weights to disk as a published checkpoint"),
    "structured": ("thalweg.bench.structured", "what grammars cost: the step rate of a batch with and without them"),
    "acceptance": ("thalweg.bench.acceptance", "drafts accepted by task and depth, and tokens as plain decoding's"),
    "speculation": ("thalweg.bench.speculation", "decode speed by number of drafts, with real or simulated acceptance"),
}


def usage() -> str:
    lines = (f"  {name:<22}{text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: thalweg bench COMMAND [OPTIONS]\n\n" + "\n".join(lines) + "\n\nthalweg bench COMMAND --help tells more"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command's exit status; 2 for a command that is none."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] not in COMMANDS:
        print(f"thalweg bench: unknown command {words[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    status = import_module(COMMANDS[words[0]][0]).main(words[1:])
    assert isinstance(status, int)
    return status
