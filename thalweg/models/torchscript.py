"""TorchScript programs of a step. `models.traced` and `models.traced_head` run them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from thalweg.batch.batch import Batch, Group
from thalweg.models.draft_head import DraftHead
from thalweg.models.interface import Model

Program = Callable[..., Tensor]


@torch.inference_mode()
def trace(
    work: Callable[..., Tensor],
    modules: Sequence[Model | DraftHead],
    inputs: tuple[Tensor, ...],
    group: Group,
    num_extra: int = 0,
) -> Program:
    """`work` of a batch and the `num_extra` inputs behind it, as a program of which nothing is left when it is dropped.

    modules: the program refers to their parameters and buffers, so that it follows them where they change in place;
    other tensors become constants. inputs end with the planes' tensors: as inputs, writes to them are not optimised
    away. `torch.jit.trace` does the same in a compilation unit that all of Python shares and that is never cleared:
    some 15 MB a program, for good.
    """

    def run(*tensors: Tensor) -> Tensor:
        ids_T, positions_T, write_T, table_RP, real_T, _, *rest = tensors
        batch = Batch(ids_T, positions_T, write_T, table_RP, real_T, ids_T, (group,))
        return work(batch, *rest[:num_extra])

    program = torch._C.ScriptModule("Traced", torch._C.CompilationUnit(), False)  # type: ignore[call-arg]
    tensors = list[Tensor]()
    for module in modules:
        assert isinstance(module, nn.Module), "models and heads are modules"
        tensors += [*module.parameters(), *module.buffers()]
    for number, tensor in enumerate(tensors):
        program._register_attribute(f"tensor{number}", torch._C.TensorType.get(), tensor)  # type: ignore[attr-defined]
    strict, outplace, names, stored = True, False, list[str](), False
    with warnings.catch_warnings():
        # Python values become constants of this kind of step; torch prefers torch.compile, which needs a C++ compiler
        warnings.simplefilter("ignore")
        create = program._create_method_from_trace  # type: ignore[attr-defined]
        create("forward", run, inputs, lambda _: "", strict, outplace, names, stored)
        forward: Program = program._get_method("forward")
        # The first run optimises, and writes what the step itself writes. Other strategies profile a run before, for
        # fusions that a CPU has not, and take twice the time.
        strategy = torch.jit.set_fusion_strategy([("STATIC", 0)])
        try:
            forward(*inputs)
        finally:
            torch.jit.set_fusion_strategy(strategy)
    return forward
