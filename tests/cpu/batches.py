"""Builds `Batch`es for tests of models, as `build_inputs` would: scattered pages, chunks, decode rows, padding."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Group
from thalweg.core.agreement import AgreedStep
from thalweg.core.plan import PAGE, Output, StepPlan
from thalweg.memory.planes import Planes
from thalweg.models.interface import Model
from thalweg.models.traced import traced
from thalweg.runner.runner import Runner


def run_step(runner: Runner, plan: StepPlan, agreed: AgreedStep | None, num_drafts: int) -> tuple[Output, ...]:
    """Both halves of a step, with drafts."""
    forwarded = runner.forward(plan, agreed)
    sampled = runner.sample(forwarded)
    drafted = runner.draft(forwarded, sampled, num_drafts)
    return tuple(runner.add_drafts(plan, runner.outputs(forwarded, sampled), drafted))


class Bench:
    """A model with planes and some sequences. `step` computes rows and returns float32 logits of every token of each
    row.
    """

    def __init__(
        self, model: Model, sequences: int, pages: int = 0, seed: int = 0, extra: tuple = (), *, trace: bool = False
    ) -> None:
        self.page_size = PAGE * model.factory.layout.dcp.size
        per = pages or -(-model.facts.context // self.page_size)
        order = list(range(1, sequences * per + 1))
        random.Random(seed).shuffle(order)  # neighbours in a context are not neighbours in storage
        self.tables = [order[i * per : (i + 1) * per] for i in range(sequences)]
        self.lengths = [0] * sequences
        self.planes = Planes((*model.planes(), *extra), sequences * per + 1)
        self.model = traced(model, self.planes) if trace else model

    def batch(self, rows: list[tuple[int, list[int]]], padding: int = 0) -> Batch:
        """rows: (sequence, new tokens), equal lengths consecutive form one group. padding: padding tokens behind the
        last group's rows.
        """
        ids, positions, write, real = [], [], [], []
        groups: list[Group] = []
        for number, (sequence, tokens) in enumerate(rows):
            start = self.lengths[sequence]
            where = range(start, start + len(tokens))
            max_kv_len = start + len(tokens)
            if groups and groups[-1].query == len(tokens):
                last = groups[-1]
                groups[-1] = Group(
                    last.row_start, last.rows + 1, last.token_start, last.query, max(last.max_kv_len, max_kv_len)
                )
            else:
                groups.append(Group(number, 1, len(ids), len(tokens), max_kv_len))
            ids += tokens
            positions += where
            size = self.page_size
            write += [self.tables[sequence][p // size] * size + p % size for p in where]
            real += [True] * len(tokens)
        tables = [self.tables[sequence] for sequence, _ in rows]
        if padding:
            groups.append(Group(len(rows), padding, len(ids), 1, PAGE))
            tables += [[0] * len(tables[0])] * padding
            ids, positions = ids + [0] * padding, positions + [0] * padding
            write, real = write + [0] * padding, real + [False] * padding
        return Batch(
            ids_T=torch.tensor(ids),
            positions_T=torch.tensor(positions),
            write_T=torch.tensor(write),
            table_RP=torch.tensor(tables),
            real_T=torch.tensor(real),
            logits_indices_N=torch.tensor(
                [group.token_start + group.query * (row + 1) - 1 for group in groups for row in range(group.rows)]
            ),
            groups=tuple(groups),
        )

    def hidden(self, rows: list[tuple[int, list[int]]], padding: int = 0) -> list[Tensor]:
        """Hidden states of each row's tokens; the sequences grow."""
        with torch.inference_mode():
            hidden = self.model.forward(self.batch(rows, padding), self.planes)
        for sequence, tokens in rows:
            self.lengths[sequence] += len(tokens)
        return list(hidden[: sum(len(tokens) for _, tokens in rows)].split([len(tokens) for _, tokens in rows]))

    def step(self, rows: list[tuple[int, list[int]]], padding: int = 0) -> list[Tensor]:
        with torch.inference_mode():
            return [self.model.logits(hidden) for hidden in self.hidden(rows, padding)]


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
        logits_indices_N=torch.zeros(0, dtype=torch.int64, device=device),
        groups=tuple(groups),
    )
