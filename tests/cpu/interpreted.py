"""Sampling kernels, and those of many tokens' experts, in Triton's interpreter against their references, without a GPU.
A process of its own, since Triton reads TRITON_INTERPRET once.

    TRITON_INTERPRET=1 python -m tests.cpu.interpreted
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.cpu.interpreter import prepare
from tests.gpu import growing
from thalweg.batch.slots import Slots
from thalweg.config.model import MoeFacts
from thalweg.core.kernels import KernelConfig
from thalweg.core.plan import Bind, SamplingNeeds
from thalweg.core.sampling import SamplingParams
from thalweg.kernels import peer_words
from thalweg.kernels.all_reduce import case as all_reduce
from thalweg.kernels.build_inputs import ref as inputs_ref
from thalweg.kernels.build_inputs import triton as inputs
from thalweg.kernels.build_inputs.ref import SlotTensors
from thalweg.kernels.build_tree import ref as grow_ref
from thalweg.kernels.build_tree import triton as grow
from thalweg.kernels.case import KernelCase, Run
from thalweg.kernels.draft_state import ref as draft_ref
from thalweg.kernels.draft_state import triton as draft
from thalweg.kernels.exchange import case as exchange
from thalweg.kernels.exchange import triton as exchange_kernel
from thalweg.kernels.exchange.ref import bytes_for
from thalweg.kernels.expert_slots import case as expert_slots
from thalweg.kernels.experts import case as expert_case
from thalweg.kernels.experts import triton as experts
from thalweg.kernels.moe_align import triton as align
from thalweg.kernels.moe_align.ref import order
from thalweg.kernels.pack_rows import case as pack_rows
from thalweg.kernels.penalties import triton as penalties
from thalweg.kernels.quantize import case as quantize_case
from thalweg.kernels.quantize.ref import rounded_rows
from thalweg.kernels.router.triton import RouterOutput
from thalweg.kernels.sample.triton import SampledRows
from thalweg.kernels.temperature import case
from thalweg.kernels.temperature import triton as temperature
from thalweg.kernels.topk_topp_threshold import triton as threshold
from thalweg.kernels.verify import case as verify
from thalweg.kernels.weight_only import case as weight_only_case
from thalweg.kernels.weight_only import triton as weight_only_kernels
from thalweg.layers.kernel_layers import KernelLayers
from thalweg.layers.kernel_moe import KernelMoe
from thalweg.layers.reference import ReferenceLayers
from thalweg.layers.residual import SingleStream
from thalweg.parallel.axis import SINGLE
from thalweg.parallel.layout import SINGLE_RANK, ExpertLayout, Layout
from thalweg.quant.catalog import Declared
from thalweg.sampling.kernel_sampling import KernelSampler
from thalweg.sampling.sample import BANNED, REFERENCE
from thalweg.weights.random import load_random
from thalweg.weights.table import table_of

EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {
        "repetition_penalty": 0.8,
        "presence_penalty": -0.7,
        "frequency_penalty": 0.1,
        "min_tokens": 99,
        "logit_bias": ((3, 5.0),),
    },
    {"frequency_penalty": 0.4},
]

DRAWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 2000, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.01},
]


@triton.jit
def logarithm(x):  # type: ignore[no-untyped-def]
    return tl.log(x)


def tempered(lists: int, every: int = 1) -> None:
    """lists: ids that a row may list; of more the threshold is searched. every: of so many cases one."""
    before = {"LIST": threshold.LIST, "SHORT": threshold.SHORT}
    for module in (threshold, temperature):
        vars(module).update(LIST=tl.constexpr(lists), SHORT=tl.constexpr(lists // 2))
    for one in list(case.cases(torch.Generator().manual_seed(lists)))[::every]:
        errors = one.errors(case.run_triton(**one.fresh_inputs()))
        assert max(errors) <= one.tolerance, (lists, one.name, errors)
    for module in (threshold, temperature):
        vars(module).update(before)


def adjusted(vocab: int, query: int, drafts: int) -> None:
    """Nodes of trees, and rows that are none."""
    generator = torch.Generator().manual_seed(vocab)
    slots = Slots(len(EDITS), 200, torch.device("cpu"))
    for slot, edit_logits in enumerate(EDITS):
        known = torch.randint(0, vocab, (5 + 60 * slot,), generator=generator).tolist()
        slots.bind([Bind(slot, tuple(known), 3, 0, 199, slot, (7, 1), SamplingParams(**edit_logits))])
    for each, behind in (
        (query, torch.randint(-1, vocab, (len(EDITS), query, drafts), generator=generator)),
        (1, None),
    ):
        slot_N = torch.arange(len(EDITS)).repeat_interleave(each)
        logits, ints_NI = torch.randn(len(slot_N), vocab, generator=generator) * 3, slots.ints_SI[slot_N]
        want, got = logits.clone(), logits.clone()
        REFERENCE.edit_logits(
            want, slots, slot_N, ints_NI, SamplingNeeds(penalised=True, biased=True), 200, None, behind
        )
        rows, biases = (
            SampledRows(got, vocab, vocab, slot_N, ints_NI, slots.floats_SF),
            (slots.bias_ids_SB, slots.bias_SB),
        )
        penalties.apply_penalties(rows, slots.tensors(is_tree=False), biases, True, True, BANNED, behind)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        assert not torch.equal(want, logits)


def broken(kinds: list[dict[str, Any]], vocab: int, needs: SamplingNeeds) -> None:
    """Rows with a NaN, of every kind, have no token; the others have theirs."""
    generator = torch.Generator().manual_seed(vocab)
    rows = 2 * len(kinds)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    nan_E = torch.arange(rows) % 2 == 0
    places = torch.randint(0, vocab, (rows,), generator=generator)
    logits[nan_E, places[nan_E]] = torch.nan
    logits[0] = torch.nan
    logits[1, 5] = torch.inf  # a number that wins
    slots = [Slots(rows, 60, torch.device("cpu")) for _ in range(2)]
    for one in slots:
        one.bind(
            [Bind(i, (5, 6, 7 + i), 3, 2, 59, 9 + i, (7, 1), SamplingParams(**kinds[i // 2])) for i in range(rows)]
        )
    slot_E = torch.arange(rows)
    made = [
        sampling.sample_into_slots(logits.clone(), one, slot_E, one.ints_SI.clone(), needs)
        for sampling, one in zip((KernelSampler(), REFERENCE), slots, strict=True)
    ]
    assert torch.equal(made[0].tokens_EQ, made[1].tokens_EQ), (vocab, needs, made)
    assert torch.equal(made[0].tokens_EQ[:, 0] < 0, nan_E) and made[0].done_E[nan_E].all()
    assert torch.equal(made[0].done_E, made[1].done_E)
    assert all(torch.equal(*(getattr(one, name) for one in slots)) for name in ("ints_SI", "tokens_SL"))
    assert not slots[0].tokens_SL[nan_E, 3].any()
    left = KernelSampler.distribution.apply_temperature(logits, slots[0], slot_E, slots[0].ints_SI, needs.truncated)
    assert torch.equal(left.softmax(-1).isnan().all(-1), nan_E | (left == torch.inf).any(-1))


def verified() -> None:
    for one in list(verify.cases(torch.Generator().manual_seed(1)))[1::2]:
        errors = one.errors(verify.run_triton(**one.fresh_inputs()))
        assert max(errors) <= one.tolerance, (one.name, errors)


def summed_over_ranks() -> None:
    """All ranks in one process, one part after the other; every second case, to save time."""
    for one in list(all_reduce.cases(torch.Generator().manual_seed(1)))[1::2]:
        errors = one.errors(all_reduce.run_triton(**one.fresh_inputs()))
        assert max(errors) <= one.tolerance, (one.name, errors)


def exchanged() -> None:
    for one in exchange.cases(torch.Generator().manual_seed(1)):
        errors = one.errors(exchange.run_triton(**one.fresh_inputs()))
        assert max(errors) <= one.tolerance, (one.name, errors)


def dispatched() -> None:
    """What goes with tokens to the ranks of their experts, and in which slots these are."""
    for operation in (expert_slots, pack_rows):
        for one in operation.cases(torch.Generator().manual_seed(1)):
            errors = one.errors(operation.run_triton(**one.fresh_inputs()))
            assert max(errors) <= one.tolerance, (one.name, errors)


def missing_rank() -> None:
    """A kernel that gives up waiting for a rank sets the flag, and does not accept words of an earlier call."""
    tries = peer_words.TRIES
    peer_words.TRIES = tl.constexpr(2)
    try:
        memory = torch.zeros(bytes_for(2, 3, 64), dtype=torch.uint8)
        own = exchange_kernel.PeerRows.of([memory.data_ptr()] * 2, 0, memory.device, rows=3, words=64)
        to, rows = exchange_kernel.Destinations.of(torch.ones(2, 3, dtype=torch.bool)), torch.ones(3, 64).int()
        exchange_kernel.dispatch(rows, to, own, 0, exchange_kernel.RECEIVE)
        assert own.failed.item() == 1
    finally:
        peer_words.TRIES = tries
        own.failed.zero_()


def trees() -> None:
    """Their paths, and how they are grown."""
    generator = torch.Generator().manual_seed(1)
    ids_D = torch.randperm(18000, generator=generator)[:9000]
    for many, branches, deepest, vocab, ids in ((1, 4, 4, 5000, None), (2, 10, 3, 9000, ids_D), (3, 2, 1, 900, None)):
        made = growing.scene(many, branches, deepest, vocab, torch.device("cpu"), generator)
        differences = growing.differences(grow, made, branches * deepest, branches, ids)
        assert not differences, (many, branches, deepest, differences)
    assert growing.impossible(grow, torch.device("cpu"))
    for module in (grow, grow_ref):
        assert growing.sound(module, torch.device("cpu")) == [True, False, False, True]


def concluded() -> None:
    """What is no draft: no entry, a logit or a state that is no number, and an id that the target has not."""
    generator = torch.Generator().manual_seed(2)
    entry, logits = torch.tensor([7, 8, -1, 9, 2]), torch.randn(5, 40, generator=generator)
    state, new = torch.randn(2, 5, 300, generator=generator)
    new[1, 9], logits[4, 2] = torch.nan, torch.inf
    slot, ints = torch.tensor([3, 1, 7, 0, 4]), torch.tensor([[9, 8, 99, 0, 0, 0, 0, 1]]).repeat(9, 1)
    ids, fine = torch.arange(40) * 5, [True, False, False, True, False]
    for ids_D, vocab, wanted, sound in (
        (None, 40, [7, 8, 0, 9, 0], fine),
        (ids, 200, [35, 40, 0, 45, 0], fine),
        (ids, 36, [35, 0, 0, 0, 0], [True, *[False] * 4]),
    ):
        for module in (draft, draft_ref):
            flags, tokens = torch.ones(5, dtype=torch.bool), torch.zeros(9, 50, dtype=torch.int32)
            drafts = torch.zeros(5, 3, dtype=torch.int64)
            chain = draft_ref.DraftChain(slot, torch.ones(5, dtype=torch.int64), state.clone(), drafts, flags)
            slots_ints = ints.clone()
            module.store_draft(
                draft_ref.DraftedTokens(entry, logits, ids_D, vocab), new, ints[slot], chain, tokens, slots_ints
            )
            assert tokens[slot, 9].tolist() == wanted == drafts[:, 1].tolist() and flags.tolist() == sound, module
            assert slots_ints[slot, 7].tolist() == [2] * 5 and torch.equal(
                chain.state_EW.nan_to_num(), new.nan_to_num()
            )


def ragged_inputs() -> None:
    """Rows of one token, of a part of a program's tokens and of several programs', some past the end of their slot."""
    generator = torch.Generator().manual_seed(3)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    for lengths, pages in (((1, 1, 5, 300, 1, 700), 16), ((1, 1, 1), 3), ((64,), 300)):
        ints = whole(0, 100, 9, 8)
        ints[:, 2] = ints[:, 1] + torch.tensor([800, 0, 3, 400, 1, 250, 64, 5, 9])
        tokens, table = whole(0, 99, 9, 1000).int(), whole(1, 5000, 9, 300).int()
        held = SlotTensors(ints, tokens, ints, table, None)
        first = torch.tensor([0, *lengths]).cumsum(0)
        slot_R = torch.randperm(9, generator=generator)[: len(lengths)]
        rows_2R = torch.stack((torch.cat((slot_R, slot_R.new_zeros(1))), first))
        given = rows_2R, int(first[-1]), max(lengths), held, pages, 64
        for got, want in zip(inputs.build_ragged(*given), inputs_ref.build_ragged(*given), strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want)


def grouped() -> None:
    """Experts by TMA, with tiles that end inside a dim; rows of pairs, some of no expert."""
    one = expert_case.small_case(torch.Generator().manual_seed(1), expert_case.Shape(150, 5, 3, 128, 72), torch.float32)
    out, x, ids, weights, *stacks = one.fresh_inputs().values()
    tile = experts.ExpertTile(64, 32, 64, 2, 4)
    plan = "tma", experts.ExpertTiles(tile, tile)
    experts.run_experts(out, x, RouterOutput(weights, ids), experts.ExpertWeights(*stacks), plan=plan)
    assert max(one.errors((out,))) <= one.tolerance
    ids = ids.masked_fill(weights < 0.1, 5)
    by, pairs = align.sort(ids, 5, 16, aligned=True), order(ids, 5)
    rows, _ = align.gather(x, None, by, ids, 5)
    assert torch.equal(rows[by.position_P[pairs]], x[pairs // 3])


class Half:
    """One of two ranks with the same tokens, whose collectives nothing here calls."""

    def __init__(self, rank: int) -> None:
        self.size, self.rank = 2, rank


def divided_experts() -> None:
    """Two ranks' parts of a mixture of experts, with stacked shared experts and with FP8 codes, are one rank's sum."""
    moe = MoeFacts(experts=8, shared=1, topk=2, intermediate=128, method="greedy", renormalize=True, sparse=(True,) * 2)
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}

    def block(layout: Layout, quantization: dict[str, Any]) -> KernelMoe:
        kernels = KernelConfig(decode="triton", prefill="triton")
        factory = KernelLayers(torch.bfloat16, torch.device("cpu"), kernels, layout, schemes=Declared(quantization))
        made = factory.moe(1, "moe", moe, 256)
        load_random(made, table_of(made), quantization, 3, False)
        assert made.shared is None, "it is in the stacks"
        return made

    x_TH = torch.randn(2, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    for quantization, redundant in (({}, 0), (fp8, 2)):
        want_TH, got_TH = torch.zeros_like(x_TH), torch.zeros(2, 256)
        block(SINGLE_RANK, quantization).add_(want_TH, x_TH, None)
        for axis in (Half(0), Half(1)):
            layout = Layout(axis, SINGLE, axis, axis, SINGLE, axis, ExpertLayout(redundant))  # type: ignore[arg-type]
            got_TH += block(layout, quantization).partial(x_TH, None)
        assert float((got_TH - want_TH.float()).norm() / want_TH.float().norm()) < 0.01


WIDE = {"x_MK", "x_TH", "out_TH", "residual_MN"}


def round_as_a_gpu() -> None:
    """Triton's interpreter is wrong at binade edges of e4m3, and rounds a fused multiplication and addition twice."""
    convert = interpreter._convert_float

    def by_torch(data: Any, from_type: Any, to_type: Any, rounding: Any) -> Any:
        if to_type == tl.float8e4nv and from_type == tl.float32:
            return torch.from_numpy(data.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(data, from_type, to_type, rounding)

    def fused(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = x.data.astype("float64") * y.data + z.data
        return interpreter.TensorHandle(wide.astype(x.data.dtype), z.dtype.scalar)

    interpreter._convert_float = by_torch
    interpreter.InterpreterBuilder.create_fma = fused


def weight_only() -> None:
    """Products of codes of every kind, a weight cut along K, and tiles of experts with a tail."""
    seeded, experts_of = torch.Generator().manual_seed, weight_only_case.run_experts_triton
    operations = (
        (quantize_case.cases_of_rows, quantize_case.run_rows_triton),
        (weight_only_case.cases, weight_only_case.run_triton),
        (weight_only_case.cases_of_experts, experts_of),
        (weight_only_case.EIGHT_BIT.cases, weight_only_case.run_triton),
        (weight_only_case.EIGHT_BIT_EXPERTS.cases, experts_of),
    )
    for cases, run in operations:
        for one in list(cases(seeded(1)))[::3]:  # 3 has no factor with the kinds of rows
            if not one.name.startswith(("240 tokens", "420 tokens")):  # half a minute each
                meets(one, run)
    whole, sort = weight_only_kernels.expert_tile, patch.object(weight_only_kernels, "sort", wraps=align.sort)
    tail = patch.object(weight_only_kernels, "expert_tile", lambda *args: replace(whole(*args), m=16, tail=16))
    with tail, sort as sorts:
        for cases in weight_only_case.cases_of_experts, weight_only_case.EIGHT_BIT_EXPERTS.cases:
            for one in cases(seeded(1)):
                if one.name.startswith(("60 tokens", "120 tokens")):  # 20 and 40 of an expert
                    meets(one, experts_of)
    assert {call.args[2] for call in sorts.call_args_list} == {32}, "a tile has the rows of both blocks"


def meets(one: KernelCase, run: Run) -> None:
    inputs = one.fresh_inputs()  # the interpreter multiplies no bf16
    wide = {name: inputs[name].float() for name in WIDE & inputs.keys()}
    errors = one.errors(run(**inputs | wide))
    assert max(errors) <= one.tolerance, (one.name, errors)


def broken_rows() -> None:
    """Rows of activations with a NaN have no numbers, others have theirs; with INT8 codes too."""
    x, static = torch.randn(3, 256, generator=torch.Generator().manual_seed(4)), torch.ones(1)
    x[1, 200] = torch.nan
    for kind, group, scales in (("int8", 0, None), ("int8", 128, None), ("e4m3", 0, None), ("e4m3", 0, static)):
        got = quantize_case.run_rows_triton(x, kind, group, scales)[0]
        want = rounded_rows(x, kind, group, scales)
        numbers = ~want.isnan()
        assert got[1, 200].isnan() and got[[0, 2]].isfinite().all() and numbers[[0, 2]].all()
        assert torch.allclose(got[numbers & ~got.isnan()], want[numbers & ~got.isnan()], rtol=1e-6)


def rounded_alike() -> None:
    """Kernels and plain torch round the activations of one checkpoint in the same way: experts and products."""
    kernels = KernelConfig(decode="triton", prefill="triton")
    for shared, quantization in (
        (0, {"quant_method": "w4afp8"}),
        (0, {"quant_method": "w4afp8", "activation_scheme": "static"}),
        (1, {"quant_method": "w8a8_int8"}),
        (1, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
        (1, {"quant_method": "blockwise_int8", "weight_block_size": [128, 128]}),
    ):
        sparse = {"method": "greedy", "renormalize": True, "sparse": (True,)}
        moe = MoeFacts(experts=6, shared=shared, topk=2, intermediate=128, **sparse)
        made = [
            kind(torch.float32, torch.device("cpu"), kernels, schemes=Declared(quantization))
            for kind in (KernelLayers, ReferenceLayers)
        ]
        blocks = [factory.moe(1, "mlp", moe, 256) for factory in made]
        linears = [factory.row("a", (192, 256)) for factory in made]
        for module in (*blocks, *linears):
            load_random(module, table_of(module), quantization, 3, False)
        for tokens in (2, 20):
            x_TH = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(tokens))
            results = [x_TH.clone() for _ in blocks]
            for block, h_TH in zip(blocks, results, strict=True):
                block.add_to(SingleStream(h_TH), x_TH)
            got, want = (result - x_TH for result in results)
            assert float((got - want).norm() / want.norm()) < 5e-3, (quantization, tokens)
            if shared:  # W4AFP8 has FP8 blocks beside its experts
                got, want = (linear.forward(x_TH) for linear in linears)
                assert float((got - want).norm() / want.norm()) < 1e-5, (quantization, tokens)


def main() -> int:
    prepare()
    round_as_a_gpu()
    weight_only()
    ragged_inputs()
    grouped()
    divided_experts()
    broken_rows()
    rounded_alike()
    tl.extra.cuda.libdevice.fast_logf = logarithm  # the device's own is nothing that is interpreted
    vars(penalties)["BLOCK"] = tl.constexpr(32)  # so that sequences have several
    tempered(256, every=2)
    tempered(16, every=3)
    for shape in ((12, 4, 3), (60, 16, 4)):
        adjusted(*shape)
    verified()
    trees()
    summed_over_ranks()
    exchanged()
    dispatched()
    missing_rank()
    concluded()
    for vocab in (300, 5000):
        broken(DRAWS[:2], vocab, SamplingNeeds(random=True))
    broken(DRAWS, 5000, SamplingNeeds(random=True, truncated=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
