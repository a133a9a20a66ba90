"""The training inputs of an EAGLE-3 head equal what the engine computes with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.compose.matrix import MODEL
from tests.cpu import zoo
from tests.cpu.batches import whole_batch
from thalweg.memory.planes import Planes
from thalweg.models.eagle import Eagle3
from thalweg.spec.eagle import eagle_head
from thalweg.weights.loader import load
from thalweg.weights.stream import Safetensors
from tools.train_tiny import eagle
from tools.train_tiny.data import Rows
from tools.train_tiny.shape import read_shape

LENGTH, STEPS = 40, 3


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> eagle.Plan:
    numbers = {"minutes": 0.0, "rate": 1e-3, "rows": 1, "length": LENGTH, "workers": 1, "vocab": 700, "items": 1}
    folder = tmp_path_factory.mktemp("head")
    paths = {"corpus": folder, "target": Path(MODEL), "out": folder}
    return eagle.Plan(**numbers, **paths, steps=STEPS, seed=1, device=torch.device("cpu"))  # type: ignore[arg-type]


def test_unrolled_steps_are_those_of_the_engine(plan: eagle.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two documents in a row: every state of every step, and what is drafted."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(20, 2000, (1, LENGTH), generator=generator)
    cut = 15
    document = (torch.arange(LENGTH) >= cut).long()[None]
    rows = Rows(ids.numpy(), np.ones((1, LENGTH)), document.numpy(), np.zeros((1, LENGTH), dtype=bool))
    chosen = torch.randperm(2048, generator=generator)[: plan.vocab].sort().values
    torch.manual_seed(4)
    trained, teacher = eagle.Head(read_shape(Path(MODEL)), chosen), eagle.Teacher(plan)
    with torch.no_grad():  # as they are published
        for parameter in trained.parameters():
            parameter.copy_(parameter.bfloat16())
    seen = teacher.see(rows)
    states: list[torch.Tensor] = []
    forward = trained.midlayer.forward

    def watched(*given: object) -> torch.Tensor:
        states.append(forward(*given))  # type: ignore[arg-type]
        return states[-1]

    monkeypatch.setattr(trained.midlayer, "forward", watched)
    total, shares = eagle.losses(trained, teacher.model.embed_tokens, seen, STEPS)
    assert total.isfinite() and len(shares) == STEPS
    eagle.save(trained, plan)

    target = zoo.ours(Path(MODEL))
    head = eagle_head(target, plan.out)  # type: ignore[arg-type]
    assert isinstance(head, Eagle3) and target.watched == (2, 3, 4)  # type: ignore[attr-defined]
    with Safetensors(plan.out) as stream:
        load(head, head.table(), stream)
    assert head.ids_D is not None and torch.equal(head.ids_D, chosen)
    for first, last in ((0, cut), (cut, LENGTH)):
        mine, place = ids[0, first:last], last - first - 1
        planes = Planes((*target.planes(), *head.planes()), 3)
        with torch.inference_mode():
            batch = whole_batch([len(mine)], mine)
            learned = head.draft_state(target.forward(batch, planes))
            before = torch.cat([torch.zeros(1, 256), learned[:-1]])
            state = head.forward(mine, before, batch, planes)
            close(state, states[0][0, first:last])
            # the last places as a chain: each further step begins one place later on the true entries before it
            for step in range(1, STEPS):
                chain = Planes(planes.specs, 3)
                root = whole_batch([place - step + 1], mine[: place - step + 1])
                state = head.forward(mine[: place - step + 1], before[: place - step + 1], root, chain)[-1:]
                for i in range(step):
                    at = place - step + 1 + i
                    one = whole_batch([1], mine[at : at + 1])
                    one = type(one)(
                        one.ids_T, one.positions_T + at, one.write_T + at, one.table_RP, one.real_T, one.logits_indices_N,
                        (type(one.groups[0])(0, 1, 0, 1, at + 1),),
                    )  # fmt: skip
                    state = head.forward(mine[at : at + 1], state, one, chain)
                close(state[0], states[step][0, last - 1])


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want.detach(), atol=2e-3, rtol=2e-3)
