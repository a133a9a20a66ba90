"""`thalweg bench COMMAND`: finds the command's module and imports that one only, so that `bench serve` never waits for
torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = """
serve                 measure a running server, any OpenAI-compatible one; `bench serving` is the same
load                  start a server and check it under 1,000 streams: answers, CPU time, memory, step rate
offline               throughput of a whole data set in this process, without HTTP
startup               from the command to the first token, phase by phase, cold and warm
one-batch             time prefill and decode of fixed batches in this process, without HTTP
kernels               every kernel by every backend that runs here, and the device's limits
collectives           the sum over the GPUs of this host with residual and norm, by our kernel, torch and NCCL
compare               what changed between two results beyond noise
report                tables and plots of results
compare-transformers  the same prompts through transformers' generate
make-checkpoint       write random weights to disk as a published checkpoint
structured            what grammars cost: the step rate of a batch with and without them
acceptance            drafts accepted by task and depth, and tokens as plain decoding's
speculation           decode speed by number of drafts, with real or simulated acceptance
"""  # the module of a command has its name
ALIASES = {"serving": "serve", "latency": "one-batch", "throughput": "offline"}  # of SGLang and vLLM
USAGE = "usage: thalweg bench COMMAND [OPTIONS]\n{}\n\nthalweg bench COMMAND --help tells more"


def main(argv: Sequence[str] | None = None) -> int:
    """The command's exit status; 2 for a command that is none."""
    words, usage = list(sys.argv[1:] if argv is None else argv), USAGE.format(COMMANDS.rstrip().replace("\n", "\n  "))
    if not words or words[0] in ("-h", "--help"):
        print(usage)
        return 0 if words else 2
    words[0] = ALIASES.get(words[0], words[0])
    if words[0] not in [line.split()[0] for line in COMMANDS.strip().splitlines()]:
        print(f"thalweg bench: unknown command {words[0]!r}\n\n{usage}", file=sys.stderr)
        return 2
    status = import_module(f"thalweg.bench.{words[0].replace('-', '_')}").main(words[1:])
    assert isinstance(status, int)
    return status
