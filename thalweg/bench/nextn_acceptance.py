"""How often the NextN layer's greedy draft is the token that the main model then wrote: acceptance at depth 1
(DeepSeek-V3 §5.4.3).

Given a prompt and what the model wrote greedily after it, one pass of the main model gives the hidden states, and one
pass of the NextN layer over them gives at each position p, from the hidden state of p and token p + 1, its draft of
token p + 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Group
from thalweg.bench.statistics import Share
from thalweg.core.plan import PAGE
from thalweg.engine.local import LocalEngine
from thalweg.memory.planes import Planes
from thalweg.models import catalog
from thalweg.models.decoder import Model
from thalweg.models.nextn import NextN
from thalweg.weights.loader import load
from thalweg.weights.stream import Safetensors

Written = tuple[Sequence[int], Sequence[int]]  # prompt, what was written after it
TOKENS_A_PASS = 2048


def load_nextn(engine: LocalEngine) -> NextN:
    """The NextN layer behind the engine's model, from the same checkpoint. Raises CheckpointError when it has none."""
    main = engine.runner.model
    nextn = catalog.build_nextn(main)
    with Safetensors(Path(engine.config.model_path)) as stream:
        load(nextn, nextn.table(), stream, main.facts.quantization_config)
    return nextn


def passes(written: Sequence[Written], room: int = TOKENS_A_PASS) -> Iterator[list[Written]]:
    """Cuts a list into passes of at most `room` tokens (or of one sequence that is longer)."""
    part: list[Written] = []
    size = 0
    for one in written:
        length = len(one[0]) + len(one[1])
        if part and size + length > room:
            yield part
            part, size = [], 0
        part.append(one)
        size += length
    if part:
        yield part


def whole_batch(lengths: Sequence[int], ids_T: Tensor) -> Batch:
    """Sequences in full, one group each, on pages of their own from page 1 on."""
    device = ids_T.device
    table = torch.zeros(len(lengths), -(-max(lengths) // PAGE), dtype=torch.int64, device=device)
    groups, positions, places, page, token = [], [], [], 1, 0
    for row, length in enumerate(lengths):
        pages = -(-length // PAGE)
        table[row, :pages] = torch.arange(page, page + pages, device=device)
        groups.append(Group(row, 1, token, length, length))
        positions.append(torch.arange(length, device=device))
        places.append(page * PAGE + positions[-1])
        page, token = page + pages, token + length
    return Batch(
        ids_T=ids_T,
        positions_T=torch.cat(positions),
        write_T=torch.cat(places),
        table_RP=table,
        real_T=torch.ones(token, dtype=torch.bool, device=device),
        emit_N=torch.zeros(0, dtype=torch.int64, device=device),
        groups=tuple(groups),
    )


@torch.inference_mode()
def accepted_in(main: Model, nextn: NextN, part: Sequence[Written], device: torch.device) -> Share:
    """Drafts that came true, of all written tokens but each sequence's first, which no draft precedes."""
    lengths = [len(prompt) + len(output) for prompt, output in part]
    ids_T = torch.tensor(
        [token for prompt, output in part for token in (*prompt, *output)], dtype=torch.int64, device=device
    )
    batch = whole_batch(lengths, ids_T)
    planes = Planes((*main.planes(), *nextn.planes()), 1 + sum(-(-length // PAGE) for length in lengths), device)
    hidden_TH = main.forward(batch, planes)
    next_T = torch.cat([ids_T[1:], ids_T[:1]])  # a sequence's last token is followed by another one's: not looked at
    drafts_T = nextn.logits(nextn.forward(next_T, hidden_TH, batch, planes)).argmax(-1)
    hits = total = first = 0
    for (prompt, _), length in zip(part, lengths, strict=True):
        draft = drafts_T[first + len(prompt) - 1 : first + length - 2]
        true = ids_T[first + len(prompt) + 1 : first + length]
        hits, total, first = hits + int((draft == true).sum()), total + len(true), first + length
    return Share(hits, total)


def acceptance(
    engine: LocalEngine,
    nextn: NextN,
    written: Sequence[Written],
    advance: Callable[[int], None] = lambda sequences: None,
) -> Share:
    """Over greedy texts of the engine's model. advance: told how many sequences each pass did."""
    main = engine.runner.model
    hits = total = 0
    for part in passes([one for one in written if len(one[1]) > 1]):
        share = accepted_in(main, nextn, part, torch.device(engine.config.device))
        hits, total = hits + share.hits, total + share.total
        advance(len(part))
    return Share(hits, total)
