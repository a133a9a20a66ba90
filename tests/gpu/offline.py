"""Compiles every Triton kernel that steps of small models launch, for one GPU and without any; nothing is computed.

    python -m tests.gpu.offline [--target sm_90|sm_100|gfx950] [--each launch|constants|kernel] [SHAPE[:CHOICE] …]

The steps run on the CPU with a driver that stands for that GPU: a launch compiles down to machine code and returns. It
finds what would end the start of an engine there: code that does not compile, and more shared memory than a block may
have. It needs Triton, but no CUDA and no ROCm.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.errors import TritonError
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.gpu import shapes
from tests.gpu.test_models import STEPS
from tests.gpu.test_trees import TREES
from thalweg.batch.slots import Slots
from thalweg.core.kernels import KernelConfig
from thalweg.core.plan import PAGE, SamplingNeeds
from thalweg.core.tree import TreeShape
from thalweg.kernels.attend.args import KvWrite, LatentPlane, QueryRows, RaggedRows
from thalweg.kernels.build_inputs import triton as input_kernels
from thalweg.kernels.build_tree import triton as growing
from thalweg.kernels.build_tree.ref import BuiltTree, TreeCandidates, TreeLevel, first_candidate
from thalweg.kernels.draft_state import triton as drafting
from thalweg.kernels.draft_state.ref import DraftChain, DraftedTokens, DraftRows, TokenPlaces
from thalweg.kernels.dsa import triton as dsa
from thalweg.kernels.dsa.places import places
from thalweg.kernels.expert_slots import case as slot_cases
from thalweg.kernels.expert_slots import triton as expert_slots
from thalweg.kernels.mla.backends import triton_prefill
from thalweg.kernels.nsa import triton as nsa
from thalweg.kernels.nsa.ref import NsaConfig, NsaPlanes
from thalweg.kernels.pack_rows import case as pack_cases
from thalweg.kernels.pack_rows import triton as pack_rows
from thalweg.kernels.rope.triton import LatentNorm, mla_absorb, mla_write
from thalweg.kernels.router.triton import RouterOutput, partial_logits
from thalweg.kernels.swap_in import triton as swap
from thalweg.kernels.verify import triton as verify
from thalweg.kernels.verify.ref import AcceptedPaths, Verification
from thalweg.kernels.weight_only import case as codes_case
from thalweg.kernels.weight_only import triton as codes
from thalweg.kernels.weight_only.ref import arranged
from thalweg.memory.planes import Planes, index_plane, record_plane, vector_plane
from thalweg.models import catalog
from thalweg.sampling.kernel_sampling import KernelSampler


class Target(NamedTuple):
    """A GPU to compile for."""

    gpu: GPUTarget
    shared: int  # bytes that a block may have
    processors: int
    capability: tuple[int, int]  # as `launch.capability`
    exempt: Mapping[str, str] = MappingProxyType({})  # modules of `kernels` that launch nothing there, and why


EXEMPT = {
    "experts.tma": "weights come by TMA; `experts.triton` computes these products with pointers",
    "small_batch_gemm.triton": "weights come by TMA; the library of PyTorch computes these products",
}
TARGETS = {
    "sm_90": Target(GPUTarget("cuda", 90, 32), 232448, 132, (9, 0)),  # H100, H200
    "sm_100": Target(GPUTarget("cuda", 100, 32), 232448, 148, (10, 0)),  # B200
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), 163840, 256, (0, 0), EXEMPT),  # MI355X
}
CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "deterministic": {"deterministic": True},
    "fp8": {"kv": "fp8_e4m3"},
    "decompressed": {"latent": False},
}
DECODES = (1, 2, 4, 8, 16, 64)  # rows


class Driver:
    """What Triton asks a driver."""

    def __init__(self, target: Target) -> None:
        self.target, self.utils = target, self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.target.shared, "multiprocessor_count": self.target.processors}

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target.gpu

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def constants_of(function: JITFunction[Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[str, ...]:
    """The constants of a launch, and its number of warps and stages."""
    values = dict(zip(function.arg_names, args, strict=False)) | options
    variables = {param.name for param in function.params if not param.is_constexpr}
    return tuple(f"{name}={value}" for name, value in sorted(values.items()) if name not in variables)


class Compiled:
    """In the place of `JITFunction.run`: compiles instead of launching, and keeps account.

    each: "launch" compiles what a GPU would, "constants" a kernel once with the same constants, whatever the types of
    its arguments and the divisors of their values, "kernel" a kernel once.
    """

    def __init__(self, target: Target, each: str = "launch") -> None:
        self.target, self.each = target, each
        self.compiled = set[tuple[str, ...]]()
        self.launches: Counter[str] = Counter()
        self.failures: dict[str, str] = {}
        self.run = JITFunction.run

    def __call__(self, function: JITFunction[Any], *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        name = f"{function.fn.__module__}.{function.fn.__name__}"
        if name in self.failures:
            return
        self.launches[name] += 1
        if name.removeprefix("thalweg.kernels.").rpartition(".")[0] in self.target.exempt:
            self.failures[name] = "launched, though its module is exempt"
            return
        if self.each != "launch":
            key = (name, *(constants_of(function, args, options) if self.each == "constants" else ()))
            if key in self.compiled:
                return
            self.compiled.add(key)
        try:
            kernel = self.run(function, *args, grid=grid, warmup=True, **options)
        except (
            TritonError,
            RuntimeError,
            TypeError,
            ValueError,
            AttributeError,
            KeyError,
        ) as error:  # each fails the run in the end
            self.failures[name] = str(error)
            return
        if kernel.metadata.shared > self.target.shared:
            self.failures[name] = f"{kernel.metadata.shared} bytes of shared memory; a block has {self.target.shared}"


def pretend(target: Target, each: str = "launch") -> Compiled:
    """Makes this process take itself for one with such a GPU. each: see `Compiled`."""
    compiled, product = Compiled(target, each), torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return product(a, b).to(out_dtype or a.dtype)  # a CPU's has no out_dtype

    driver.set_active(Driver(target))
    JITFunction.run = lambda *args, **kwargs: compiled(*args, **kwargs)
    CompiledKernel._init_handles = lambda self: None
    for module in [one for name, one in sys.modules.items() if name.startswith("thalweg.kernels.")]:
        if hasattr(module, "capability"):
            vars(module)["capability"] = lambda tensor: target.capability
    vars(torch)["mm"] = mm
    return compiled


def steps(shape: str, choice: str) -> None:
    """Every step of tests/gpu/test_models, and decode steps of several sizes."""
    device, of = torch.device("cpu"), shapes.facts(shape)
    kernels = KernelConfig(decode="triton", prefill="triton", **CHOICES[choice])
    model = catalog.assemble(of, shapes.kernel_layers(of, device, kernels))
    planes = shapes.planes(model, device)
    decodes = [[(1 + row, 40, 1) for row in range(rows)] for rows in DECODES]
    with torch.inference_mode():
        for rows in [*STEPS.values(), *decodes]:
            _, batch = shapes.batches(rows, device, torch.Generator().manual_seed(1), 1024)
            model.logits(model.forward(batch, planes))
        for rows, trees in TREES.values():
            _, batch = shapes.batches(rows, device, torch.Generator().manual_seed(1), 1024)
            model.logits(model.forward(shapes.branched(batch, rows, trees)[0], planes))


def drafts(rows: int, query: int, width: int) -> None:
    """What surrounds the forwards of a verification with a chain's drafter of a state so wide, whose vocabulary is the
    target's.
    """
    slots, tokens, vocab = Slots(rows + 1, 256, torch.device("cpu")), rows * query, 129280
    slots.table_SP = slots.table_SP.to(torch.int32)
    slot_T, ahead_T = torch.zeros(2, tokens, dtype=torch.int64)
    held = slots.tensors(is_tree=False)
    step = input_kernels.build_inputs(slot_T, ahead_T, held, 4, PAGE)
    ids, positions, write, real, _, ints, *_ = step
    input_kernels.build_ragged(torch.zeros(2, rows + 1, dtype=torch.int64), tokens, query, held, 4, PAGE)
    for needs in (SamplingNeeds(), SamplingNeeds(random=True), SamplingNeeds(random=True, truncated=True)):
        drawn = KernelSampler().sample_tokens(torch.empty(tokens, vocab), slots, slot_T, ints, needs)
        scores = KernelSampler.distribution.apply_temperature(
            torch.empty(tokens, vocab), slots, slot_T, ints, needs.truncated
        )
    KernelSampler.distribution.add_gumbel_noise(scores, ints[::query, 3], ints[::query, 0])
    for behind in (None, torch.zeros(rows, query, query - 1, dtype=torch.int64)):
        edits = slots, slot_T, ints, SamplingNeeds(penalised=True, biased=True), 256, None, behind
        KernelSampler().edit_logits(torch.empty(tokens, vocab), *edits)
    flags = torch.empty(rows, dtype=torch.bool)
    tokens_RQ = torch.empty(rows, query, dtype=torch.int64)
    verify.verify(drawn, step, held, PAGE, Verification(tokens_RQ, None, drawn[:rows], flags), None)
    state, kept = torch.empty(tokens, width, dtype=torch.bfloat16), torch.empty(rows, width, dtype=torch.bfloat16)
    places = TokenPlaces(positions, write, real)
    drafting.shift_hidden_states(state, DraftRows(slot_T, ahead_T, ahead_T), places, kept, kept, slots.ints_SI, PAGE)
    chain = DraftChain(slot_T[:rows], ahead_T[:rows], kept, tokens_RQ, flags)
    for ids in (None, slot_T):
        guess = DraftedTokens(drawn[:rows], torch.empty(rows, vocab), ids, vocab)
        drafting.store_draft(guess, state[:rows], ints, chain, slots.tokens_SL, slots.ints_SI)


def trees(rows: int, query: int, deepest: int) -> None:
    """What surrounds the forwards of a step whose rows each verify a tree, with the types that slots have on a GPU."""
    slots, most = Slots(rows + 1, 256, torch.device("cpu"), tree=TreeShape(4, deepest, query - 1)), 1 + deepest
    slot_R, paths = (
        torch.zeros(rows, dtype=torch.int64),
        [torch.empty(rows * most, dtype=torch.int64) for _ in range(6)],
    )
    held = slots.tensors(is_tree=True)._replace(table_SP=slots.table_SP.to(torch.int32))
    step = input_kernels.build_inputs(slot_R, None, held, 4, PAGE, query)
    paths[3] = paths[3].to(torch.bool)
    out = torch.empty(rows, most, dtype=torch.int64), torch.empty(rows, most, dtype=torch.int64), slot_R, slot_R > 0
    verify.verify(step.slot_T, step, held, PAGE, Verification(*out), AcceptedPaths(*paths))
    state, logits = torch.empty(4 * rows, 7168, dtype=torch.bfloat16), torch.empty(rows, 129280)
    level = TreeLevel(slot_R.view(-1, 1), slot_R.view(-1, 1), slot_R.view(-1, 1), torch.empty(rows, 1))
    ints, many = torch.empty(rows, slots.ints_SI.shape[1], dtype=torch.int64), first_candidate(deepest, 4)
    made = TreeCandidates(torch.empty(rows, many), *(torch.empty(rows, many, dtype=torch.int64) for _ in range(2)))
    for depth in range(deepest):
        top_children = growing.top_children(
            logits.repeat(4 if depth else 1, 1), 4, torch.arange(9) if rows > 1 else None
        )
        level, _ = growing.expand_level(*top_children, level, depth, slot_R, ints, held.table_SP, PAGE, made)
    found = BuiltTree(*(torch.empty(rows, query - 1, dtype=torch.int64) for _ in range(2)), slot_R > 0)
    growing.store_best_tree(made, 4, state, state[:rows], slot_R, ints, held, found)


def weight_only() -> None:
    """Products of codes of every kind, with activations of 16 bits and of 8."""
    generator = torch.Generator().manual_seed(1)
    for kind in (*codes_case.WEIGHTS, *codes_case.EIGHT_BITS):
        for rows in (1, 300):
            weight = arranged(codes_case.draw_weight(generator, (256, 1024), *kind))
            codes.linear(torch.empty(rows, 1024, dtype=torch.bfloat16), weight)
        shapes = (4, 512, 256), (4, 256, 256)
        stacks = codes.CodedExperts(*(arranged(codes_case.draw_weight(generator, shape, *kind)) for shape in shapes))
        for tokens in (2, 600):
            routed = RouterOutput(torch.empty(tokens, 2), torch.zeros(tokens, 2, dtype=torch.int32))
            x = torch.empty(tokens, 256, dtype=torch.bfloat16)
            codes.run_experts(torch.empty_like(x), x, routed, stacks)


def dispatched() -> None:
    """What a dispatch of tokens to other ranks launches but for the exchange, see tests/cpu/test_peer_words_compile."""
    generator = torch.Generator().manual_seed(1)
    for one in pack_cases.cases(generator):
        sent = tuple(one.inputs.values())
        pack_rows.unpacked(pack_rows.packed(sent), sent)
    for one in slot_cases.cases(generator):
        expert_slots.local_slots(expert_slots.choose(**one.inputs), 7, 5)


def sparse() -> None:
    """Attention to a chosen context, of DeepSeek-V3.2's sizes and of its heads on 1 to 8 ranks."""
    rows_T, positions, angles = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), torch.empty(8, 32)
    norm, write = dsa.KeyNorm(torch.empty(128), torch.empty(128), 1e-6), KvWrite(angles, angles, positions, positions)
    for tokens in (3, 5):
        partial_logits(torch.empty(tokens, 7168, dtype=torch.bfloat16), torch.empty(64, 7168))
    for is_fp8 in (False, True):
        spec = index_plane(0, 128) if is_fp8 else vector_plane("index", 0, 128, torch.bfloat16)
        latent = record_plane(0, 512, 64) if is_fp8 else vector_plane("latent", 0, 576, torch.bfloat16)
        planes = Planes((spec, latent), 4)
        keys, latents = planes.paged("index", 0), LatentPlane(planes.paged("latent", 0))
        key, query = torch.empty(3, 8320, dtype=torch.bfloat16).split((128, 8192), 1)
        parts, weights = torch.empty(14, 3, 64), torch.empty(3, 64)
        made = dsa.write(key, query, parts, norm, write, keys, 1.0, is_fp8)
        asked, latent_TD = (torch.empty(3, *dims, dtype=torch.bfloat16) for dims in ((16, 192), (576,)))
        latent_norm, uk = LatentNorm(torch.empty(512)), torch.empty(16, 128, 512, dtype=torch.bfloat16)
        mla_write(asked[..., 128:], asked[..., 128:], latent_TD, latent_norm, write, latents, in_place=True)
        mla_absorb(asked, uk, latent_TD, latent_norm, write, latents, fixed=True)
        for paths in (None, torch.zeros(3, 64, dtype=torch.int32)):
            rows = QueryRows(rows_T, torch.zeros(2, 4, dtype=torch.int32), positions, paths)
            dsa.scores(made, weights, keys, rows, 200)
            for heads in (16, 32, 64, 128):
                asked = torch.empty(3, heads, 576, dtype=torch.bfloat16)
                for chosen in (torch.zeros(3, 2048, dtype=torch.int32), None):
                    dsa.attend(asked, latents, chosen, rows, 2048, scale=1.0, rank=512)
                    places(chosen, rows, 2048)
            for entries in (4096, 10240):
                hot = Planes((replace(latent, hot=entries),), 4, slots=2, context=PAGE)
                slots_T, real_T = positions, torch.ones(3, dtype=torch.bool)
                for chosen in (torch.zeros(3, 2048, dtype=torch.int32), None):
                    swap.swap_in(hot.hot(0), hot.tokens("latent", 0), slots_T, real_T, rows, chosen, 2048)
        swap.copy_pages(latents.paged_PSD, rows_T)
    for columns in (64, 4096, 20000):
        dsa.choose(torch.empty(3, columns), positions, 2048)
    records = torch.empty(9, PAGE, 656, dtype=torch.uint8)
    dsa.decode_pages(records, torch.zeros(5, dtype=torch.int32), 512, 64, torch.bfloat16)
    starts, uv = torch.zeros(2, dtype=torch.int32), torch.empty(16, 128, 512, dtype=torch.bfloat16)
    mask = dsa.mask_of(torch.zeros(3, 2048, dtype=torch.int32), 2500)
    asked, latent_SD = (torch.empty(3, *dims, dtype=torch.bfloat16) for dims in ((16, 192), (576,)))
    triton_prefill(
        asked, latent_SD, uk, uv.transpose(1, 2), RaggedRows(starts, starts, 3, 2500), scale=1.0, chosen_TS=mask
    )


def native_sparse() -> None:
    """Native sparse attention, of 1 to 64 query heads of a key head."""
    rows = QueryRows(torch.zeros(3, dtype=torch.int32), torch.zeros(2, 40, dtype=torch.int32), torch.zeros(3).long())
    for heads, kv_heads, key, value, window in (
        (4, 4, 128, 128, 512), (28, 4, 64, 64, 0), (40, 2, 128, 64, 64), (64, 4, 192, 128, 512), (64, 1, 192, 128, 512),
    ):  # fmt: skip
        shapes_of = [(4, PAGE, kv_heads, key), (4, PAGE, kv_heads, value), (4, kv_heads, key), (4, kv_heads, value)]
        shapes_of += [(3, kv_heads, key), (3, kv_heads, value), (3, heads, key), (3, heads, 3)]
        *planes, new_key, new_value, query, gates = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes_of)
        nsa.write(new_key, new_value, rows.positions_T, NsaPlanes(*planes))
        nsa.attend(query, gates, NsaPlanes(*planes), rows, NsaConfig(16, window, 1.0), 40 * PAGE)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.offline")
    parser.add_argument("--target", choices=TARGETS, default="sm_90")
    parser.add_argument("--each", choices=("launch", "constants", "kernel"), default="launch", help="what is compiled")
    parser.add_argument("wanted", nargs="*", metavar="SHAPE[:CHOICE]", help="of tests.gpu.shapes; sparse; weight-only")
    arguments = parser.parse_args(argv)
    compiled, wanted = pretend(TARGETS[arguments.target], arguments.each), arguments.wanted
    if not wanted or "sparse" in wanted:
        sparse()
        native_sparse()
        print(f"sparse: {len(compiled.launches)} kernels so far", flush=True)
    if wanted == ["sparse"]:
        return report(compiled)
    if not wanted or "weight-only" in wanted:
        weight_only()
        print(f"weight-only: {len(compiled.launches)} kernels so far", flush=True)
    if wanted == ["weight-only"]:
        return report(compiled)
    for shape in (*shapes.SHAPES, *shapes.ROUNDED):
        for choice in CHOICES:
            if not wanted or shape in wanted or f"{shape}:{choice}" in wanted:
                steps(shape, choice)
                print(f"{shape} {choice}: {len(compiled.launches)} kernels so far", flush=True)
    dispatched()
    for rows, query in ((1, 2), (1, 4), (16, 3), (64, 9)):
        drafts(rows, query, 7168)
        trees(rows, 4 * query, query)
    print(f"drafts: {len(compiled.launches)} kernels so far", flush=True)
    return report(compiled)


def report(compiled: Compiled) -> int:
    """Prints what failed. Returns the exit status."""
    for name, error in compiled.failures.items():
        print(f"FAILED {name}\n{error}\n")
    return 1 if compiled.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
