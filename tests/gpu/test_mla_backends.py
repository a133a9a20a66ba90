"""MLA models on each attention backend and KV cache type, without latents, and in deterministic mode."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.queued import assert_same_without_waiting
from tests.gpu.shapes import Part, batches, facts, folder, pair, planes
from tests.gpu.test_engine import agreement, engine, tokens
from thalweg.config.backends import DECODE, PREFILL
from thalweg.config.backends import installed_libraries as libraries
from thalweg.config.entry_point import load_entry
from thalweg.core.kernels import CheckCase, KernelConfig
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.kernels.attend.args import DecodeRows, KvPlanes, KvWrite, LatentPlane, RaggedRows
from thalweg.kernels.case import normal
from thalweg.kernels.mla.backends import MlaShape
from thalweg.kernels.router import triton as routing
from thalweg.layers import paged
from thalweg.layers.moe import Router

pytest.importorskip("triton")
STEPS: dict[str, list[Part]] = {
    "three prompts": [(1, 0, 100), (4, 0, 130), (8, 0, 7)],
    "decode": [(1, 100, 1), (4, 130, 1), (8, 7, 1)],
    "chunks, one without a prefix": [(1, 101, 90), (4, 131, 33), (20, 0, 70)],
    "decode beside prompts": [(1, 191, 1), (8, 8, 1), (10, 0, 70), (20, 70, 200)],
    "verification": [(1, 192, 3), (4, 164, 3)],
    "more decode": [(1, 195, 1), (4, 167, 1), (8, 9, 1), (10, 70, 1), (20, 270, 1)],
}
CHOICES: dict[str, dict[str, Any]] = {
    "triton": {},
    "flashmla": {"decode": "flashmla"},
    "triton+flashmla": {"decode": "triton+flashmla"},
    "fa3": {"prefill": "fa3"},
    "fp8": {"kv": "fp8_e4m3"},
    "flashmla fa3 fp8": {"decode": "flashmla", "prefill": "fa3", "kv": "fp8_e4m3"},
    "deterministic": {"deterministic": True},
    "deterministic fp8": {"deterministic": True, "kv": "fp8_e4m3"},
    "decompressed": {"latent": False},
    "decompressed fp8": {"latent": False, "kv": "fp8_e4m3"},
    "decompressed deterministic": {"latent": False, "deterministic": True},
}


def choice(name: str) -> KernelConfig:
    """Skips the test where its library is missing."""
    made = KernelConfig(**({"decode": "triton", "prefill": "triton"} | CHOICES[name]))
    if missing := {*made.decode.split("+"), made.prefill} - libraries():
        pytest.skip(f"{', '.join(missing)} is not installed")
    return made


class Routes:
    """Which experts the reference and the kernels choose for each token of a forward, layer by layer."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.there: list[Tensor] = []
        self.here: list[Tensor] = []
        ask, route = Router.forward, routing.route

        def of_reference(router: Router, x_TH: Tensor) -> tuple[Tensor, Tensor]:
            weights, ids = ask(router, x_TH)
            self.there.append(ids.sort(1).values)
            return weights, ids

        def of_kernels(
            x: Any, weight: Tensor, bias: Tensor | None, rule: routing.RouterConfig, *more: Any
        ) -> routing.RouterOutput:
            routed = route(x, weight, bias, rule, *more)
            self.here.append(routed.ids_TK[:, : rule.topk].long().sort(1).values)
            return routed

        patch.setattr(Router, "forward", of_reference)
        patch.setattr(routing, "route", of_kernels)

    def alike(self, tokens: int) -> Tensor:
        """bool [tokens]: of the last forwards, which tokens went to the same experts in all layers."""
        same = [(a == b).all(1) for a, b in zip(self.there, self.here, strict=True) if len(a) == tokens]
        self.there, self.here = [], []
        return torch.stack(same).all(0) if same else torch.ones(tokens, dtype=torch.bool)


@pytest.mark.parametrize("shape", ["v2-lite", "v3"])
@pytest.mark.parametrize("name", CHOICES)
def test_logits_are_the_references(name: str, shape: str, cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasoned as in test_models.py, of the median token: 2 % with bf16 weights (seen: 0.9), 10 % with FP8 (seen: 6). A
    cache in FP8 rounds latents to 4 bits, 2.6 % in the mean square, in both models, each from its own latents; FlashMLA
    also rounds queries and weights of keys.

    The bounds are of rounding, and hold for tokens that go to the same experts. Where two experts nearly tie, rounding
    decides which one computes, and that token's logits are some 0.3 apart: behind FP8's 5 % of error a router of 16
    experts so turns 9 % of random tokens, and in a step of three it may be two.
    """
    own, routes, same, seen = choice(name), Routes(monkeypatch), 0, 0
    reference, kernels = pair(shape, cuda, own)
    there, here = planes(reference, cuda), planes(kernels, cuda)
    generator, bound = torch.Generator().manual_seed(1), 0.1 if facts(shape).quantization_config else 0.02
    bound += 0.04 if own.kv else 0.0
    for step, rows in STEPS.items():
        plain, paged = batches(rows, cuda, generator, 1024)
        with torch.inference_mode():
            exact = reference.logits(reference.forward(plain, there)).double()
            got = kernels.logits(kernels.forward(paged, here)).double()
        assert got.isfinite().all(), step
        apart, alike = (got - exact).norm(dim=1) / exact.norm(dim=1), routes.alike(len(got))
        same, seen = same + int(alike.sum()), seen + len(alike)
        error = float(apart[alike].median()) if alike.any() else 0.0
        whole = float((got - exact).norm() / exact.norm())
        print(
            f"{name}, {shape}, {step}: {error:.4f}, of all {whole:.4f}, {int(alike.sum())} of {len(alike)} tokens alike"
        )
        assert error < bound, f"{step}: {error:.4f}"
    assert same > 0.5 * seen, f"{same} of {seen} tokens go to the experts that the reference sends them to"


@pytest.mark.parametrize("prefill", ["triton", "fa3"])
def test_a_context_in_one_piece_or_in_chunks_is_the_same(
    prefill: str, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = choice(prefill)
    _, model = pair("v2-lite", cuda, own)
    found = []
    for chunk in (1 << 14, 128):
        monkeypatch.setattr(paged, "CHUNK", chunk)
        storage, generator = planes(model, cuda), torch.Generator().manual_seed(1)
        for rows in ([(1, 0, 300), (8, 0, 90)], [(12, 0, 1), (1, 300, 200), (8, 90, 64), (20, 0, 30)]):
            _, batch = batches(rows, cuda, generator, 1024)
            with torch.inference_mode():
                got = model.logits(model.forward(batch, storage)).double()
        found.append(got)
    apart = (found[0] - found[1]).norm(dim=1) / found[1].norm(dim=1)
    assert float(apart.median()) < 0.02  # a token that rounding sends to another expert is farther off


WAYS: dict[str, list[list[Part]]] = {
    "whole": [[(1, 0, 300)]],
    "in chunks": [[(1, 0, 100)], [(1, 100, 1)], [(1, 101, 3)], [(1, 104, 196)]],
    "beside others": [[(1, 0, 64), (8, 0, 3), (12, 0, 90)], [(12, 90, 1), (8, 3, 1), (1, 64, 236)]],
    "token by token at the end": [[(1, 0, 290)], *([[(8, i, 1), (1, 290 + i, 1)] for i in range(10)])],
}


@pytest.mark.parametrize("shape", ["v2-lite", "v3"])
@pytest.mark.parametrize("name", [name for name in CHOICES if "deterministic" in name])
def test_deterministic_bits_depend_on_the_sequence_alone(name: str, shape: str, cuda: torch.device) -> None:
    own = choice(name)
    _, model = pair(shape, cuda, own)
    ids = torch.randint(0, 1024, (300,), generator=torch.Generator().manual_seed(2)).to(cuda)
    want = None
    for way, steps in WAYS.items():
        storage, found = planes(model, cuda), torch.zeros(300, 1024, device=cuda)
        for rows in steps:
            _, batch = batches(rows, cuda, torch.Generator().manual_seed(3), 1024)
            token = 0
            for page, at, n in rows:
                if page == 1:
                    batch.ids_T[token : token + n] = ids[at : at + n]
                    mine = slice(token, token + n), slice(at, at + n)
                token += n
            with torch.inference_mode():
                found[mine[1]] = model.logits(model.forward(batch, storage)[mine[0]])
        want = found if want is None else want
        wrong = (found != want).any(1).nonzero().flatten().tolist()
        assert not wrong, f"{way}: tokens {wrong[:5]} of {len(wrong)}"


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("backend", ["triton", "flashmla"])
def test_a_recorded_decode_is_scheduled_anew(backend: str, fp8: bool, cuda: torch.device) -> None:
    """What a backend prepares for a step is part of the recording: a replay with longer contexts is a step of its
    own.
    """
    if backend not in libraries():
        pytest.skip(f"{backend} is not installed")

    generator = torch.Generator().manual_seed(1)
    plane = normal(generator, 40, 64, 576).to(torch.float8_e4m3fn if fp8 else torch.bfloat16).to(cuda)
    latents = LatentPlane(plane, torch.ones(1, device=cuda) if fp8 else None)
    q, uv = (normal(generator, *shape, dtype=torch.bfloat16).to(cuda) for shape in ((5, 16, 576), (16, 512, 128)))
    table, positions = torch.zeros(5, 7, dtype=torch.int32, device=cuda), torch.zeros(5, dtype=torch.int64, device=cuda)
    of = load_entry(DECODE[backend].mla)(MlaShape(16, 512, 0.07, fp8))

    def step() -> Tensor:
        rows = DecodeRows(table, positions, 1, 448)
        made = of.prepare(rows)
        return of.attend(q, latents, uv, rows, made) + of.attend(q, latents, uv, rows, made)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for contexts in ([0, 63, 64, 300, 447], [5, 400, 1, 2, 130]):
        table.copy_(torch.randperm(39, generator=generator)[:35].view(5, 7).to(torch.int32) + 1)
        positions.copy_(torch.tensor(contexts))
        graph.replay()
        assert torch.equal(out, step())
        for t, position in enumerate(contexts):
            kv = plane[table[t].long()].flatten(0, 1)[: position + 1].double()
            sums = (q[t].double() @ kv.T * 0.07).softmax(-1) @ kv[:, :512]
            exact = 2 * torch.einsum("hr,hrv->hv", sums, uv.double()).flatten()
            assert float((out[t].double() - exact).norm() / exact.norm()) < (0.06 if fp8 else 0.01), (t, position)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("contexts", [(192, 9), (9, 1), (700, 1200)], ids=str)
def test_attention_does_not_read_kv_that_is_not_written_yet(
    contexts: tuple[int, int], fp8: bool, heads: int, cuda: torch.device
) -> None:
    """Own kernels let the next one start early, and FlashMLA's neither wait for that nor, where nothing is split, for
    one another. Seen only while the device is behind the host: each step is queued behind a long one, and must be what
    it is by itself.
    """
    if "flashmla" not in libraries():
        pytest.skip("flashmla is not installed")
    from thalweg.kernels.rope.triton import LatentNorm, mla_absorb

    generator = torch.Generator().manual_seed(1)
    plane = normal(generator, 40, 64, 576).to(torch.float8_e4m3fn if fp8 else torch.bfloat16).to(cuda)
    one = torch.ones(1, device=cuda) if fp8 else None
    uk, uv = (normal(generator, heads, *s, dtype=torch.bfloat16).to(cuda) * 0.1 for s in ((128, 512), (512, 128)))
    table = torch.arange(1, 39, dtype=torch.int32).view(2, 19).to(cuda)
    positions = torch.tensor(contexts, device=cuda) - 1
    write = table.long().gather(1, (positions // 64)[:, None])[:, 0] * 64 + positions % 64
    downs = normal(generator, 20, 2, heads * 192 + 576, dtype=torch.bfloat16).to(cuda)
    angle, weight = torch.ones(2048, 32, device=cuda), torch.ones(512, device=cuda)
    rows, of = (
        DecodeRows(table, positions, 1, max(contexts)),
        load_entry(DECODE["flashmla"].mla)(MlaShape(heads, 512, 0.07, fp8)),
    )
    made = of.prepare(rows)

    def step(down: Tensor, wait: bool) -> Tensor:
        queries, latent = down[:, : heads * 192].view(2, heads, 192), down[:, heads * 192 :]
        turn, held = KvWrite(angle, angle, positions, write), LatentPlane(plane, one)
        absorbed = mla_absorb(queries, uk, latent, LatentNorm(weight), turn, held)
        if wait:
            torch.cuda.synchronize()
        out = of.attend(absorbed, held, uv, rows, made)
        if wait:
            torch.cuda.synchronize()
        return out

    assert_same_without_waiting(step, downs, cuda)


def test_the_self_checks_pass(cuda: torch.device) -> None:
    from thalweg.kernels.mla import fa3, flashmla

    if "flashmla" in libraries():
        for heads in (16, 128):
            flashmla.check(cuda, CheckCase(heads=heads))
            flashmla.check(cuda, CheckCase(heads=heads, is_fp8_cache=True))
    if "fa3" in libraries():
        fa3.check(cuda, CheckCase())


def test_rows_that_see_nothing_do_not_count(cuda: torch.device) -> None:
    """A prefix chunk holds rows without a cached context: FlashAttention's LSE there must be -inf, as ours is."""
    if "fa3" not in libraries():
        pytest.skip("fa3 is not installed")
    generator = torch.Generator().manual_seed(1)
    shapes = (90, 4, 192), (70, 576), (4, 128, 512), (4, 128, 512)
    q, latents, uk, stored = (normal(generator, *shape, dtype=torch.bfloat16).to(cuda) * 0.3 for shape in shapes)
    starts, begins = (torch.tensor(x, dtype=torch.int32, device=cuda) for x in ((0, 20, 90), (0, 0, 70)))
    given = q, latents, uk, stored.transpose(1, 2), RaggedRows(starts, begins, 70, 70, is_causal=False)
    mine, mine_lse = load_entry(PREFILL["triton"].mla)(*given, scale=0.07)
    out, lse = load_entry(PREFILL["fa3"].mla)(*given, scale=0.07)
    assert bool((lse[:20] == -torch.inf).all()) and not out[:20].any(), "nothing seen"
    assert float((out - mine).norm() / mine.norm()) < 0.01 and float((lse[20:] - mine_lse[20:]).abs().max()) < 1e-2


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("fp8", [False, True])
def test_decompressed_tokens_are_turned_and_stored(fp8: bool, tokens: int, cuda: torch.device) -> None:
    from thalweg.kernels.rope.triton import mha_write

    generator, heads = torch.Generator().manual_seed(1), 20
    shapes = (tokens, heads, 192), (tokens, heads, 128), (tokens, heads, 128), (tokens, 64)
    q, key, value, turning = (normal(generator, *shape, dtype=torch.bfloat16).to(cuda) for shape in shapes)
    angles = (normal(generator, 30, 32) * 9).to(cuda)
    positions = torch.randint(30, (tokens,), generator=generator).to(cuda)
    write = torch.randperm(192, generator=generator)[:tokens].to(cuda)
    kept = torch.float8_e4m3fn if fp8 else torch.bfloat16
    store = torch.zeros(2, 192, heads, 256, dtype=kept, device=cuda)
    scale = torch.tensor([0.03], device=cuda) if fp8 else None
    torch.full((1 << 24,), torch.nan, device=cuda)  # what `torch.empty` finds next
    turn = KvWrite(angles.cos(), angles.sin(), positions, write)
    wide = mha_write(q, key, value, turning, turn, KvPlanes(*store, scale, scale))
    cos, sin = angles.cos()[positions].double()[:, None], angles.sin()[positions].double()[:, None]

    def turned(x: Tensor) -> Tensor:
        even, odd = x[..., 0::2].double(), x[..., 1::2].double()
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)

    nothing, unit = torch.zeros(tokens, heads, 64, device=cuda), 0.03 if fp8 else 1.0
    shared = turned(turning[:, None]).expand(-1, heads, -1)
    exact = (
        (wide, torch.cat((q[..., :128].double(), turned(q[..., 128:]), nothing), -1), 4e-3),
        (store[0][write].float() * unit, torch.cat((key.double(), shared, nothing), -1), 4e-2 if fp8 else 4e-3),
        (store[1][write].float() * unit, torch.cat((value.double(), nothing, nothing), -1), 4e-2 if fp8 else 4e-3),
    )
    for got, wanted, bound in exact:
        assert float((got.double() - wanted).norm() / wanted.norm()) < bound
    assert int((store.float().abs().sum((2, 3)) > 0).sum()) == 2 * tokens, "no other row is written"


@pytest.mark.parametrize("heads", [16, 20, 128])
def test_raised_sums_depend_on_their_own_token(heads: int, cuda: torch.device) -> None:
    from thalweg.kernels.mla.triton import up

    generator = torch.Generator().manual_seed(1)
    u = normal(generator, 150, heads, 512, dtype=torch.bfloat16).to(cuda)
    uv = (normal(generator, heads, 128, 512, dtype=torch.bfloat16) * 0.05).to(cuda).transpose(1, 2)
    out = up(u, uv)
    exact = torch.einsum("thr,hrv->thv", u.double(), uv.double()).flatten(1)
    assert float((out.double() - exact).norm() / exact.norm()) < 4e-3
    for first, last in ((0, 1), (70, 71), (3, 100)):
        assert torch.equal(up(u[first:last], uv), out[first:last])


def test_fixed_tiles_absorb_the_same_bits(cuda: torch.device) -> None:
    from thalweg.kernels.rope.triton import LatentNorm, mla_absorb

    generator, tokens = torch.Generator().manual_seed(1), 90
    down = normal(generator, tokens, 16 * 192 + 576, dtype=torch.bfloat16).to(cuda)
    uk = (normal(generator, 16, 128, 512, dtype=torch.bfloat16) * 0.1).to(cuda)
    angles, weight = (normal(generator, 30, 32) * 9).to(cuda), normal(generator, 512).to(cuda)
    positions, write = torch.randint(30, (tokens,), generator=generator).to(cuda), torch.arange(tokens, device=cuda)
    plane = torch.zeros(128, 576, dtype=torch.bfloat16, device=cuda)

    def absorbed(first: int, last: int) -> Tensor:
        part = down[first:last]
        queries, latent = part[:, : 16 * 192].view(-1, 16, 192), part[:, 16 * 192 :]
        turn = KvWrite(angles.cos(), angles.sin(), positions[first:last], write[first:last])
        return mla_absorb(
            queries, uk, latent, LatentNorm(weight), turn, LatentPlane(plane.view(2, 64, 576)), fixed=True
        )

    whole = absorbed(0, tokens)
    stored = plane.clone()
    for first, last in ((0, 1), (40, 41), (5, 88)):
        plane.zero_()
        assert torch.equal(absorbed(first, last), whole[first:last])
        assert torch.equal(plane[first:last], stored[first:last])


@pytest.mark.parametrize(
    "wishes",
    [
        {"attention_backend": "flashmla"},
        {"attention_backend": "fa3"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8", "attention_backend": "flashmla"},
        {"mla": False},
    ],
    ids=str,
)
def test_the_engine_runs_on_it(wishes: dict[str, Any], cuda: torch.device, tmp_path: Path) -> None:
    """Recorded decode steps, overlap and mixed steps; the first token, which no batch has rounded otherwise yet, is
    mostly that of own kernels.
    """
    if wishes.get("attention_backend", "triton") not in libraries():
        pytest.skip("not installed")
    rng, path = random.Random(1), folder("v2-lite", tmp_path)
    prompts = [tuple(rng.randrange(1024) for _ in range(rng.randrange(1, 700))) for _ in range(30)]
    greedy = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True) for _ in prompts]
    plain = tokens(engine(path, attention_backend="triton"), prompts, greedy)
    got = tokens(engine(path, **wishes), prompts, greedy)
    assert all(len(one) == 12 for one in got)
    assert agreement(plain, got, 1) >= (0.5 if "kv_cache_dtype" in wishes else 0.8)


def told(of: LocalEngine, prompts: list[tuple[int, ...]]) -> list[tuple[Any, ...]]:
    """Tokens and log-probabilities of each prompt's answer, all asked at once."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
    uids = [of.submit(prompt, params)[0] for prompt in prompts]
    got: dict[int, list[Any]] = {uid: [] for uid in uids}
    while not of.idle:
        for delta in of.step():
            got[delta.uid] += zip(delta.tokens, delta.logprobs, strict=True)
    return [tuple(got[uid]) for uid in uids]


@pytest.mark.parametrize("wishes", [{}, {"kv_cache_dtype": "fp8"}, {"mla": False}], ids=str)
def test_a_deterministic_engine_repeats_every_bit(wishes: dict[str, Any], cuda: torch.device, tmp_path: Path) -> None:
    """Alone without a cache, against all at once in small chunks, with prefix hits, recorded decode steps and
    overlap.
    """
    rng, path = random.Random(1), folder("v2-lite", tmp_path)
    head = tuple(rng.randrange(1024) for _ in range(200))
    prompts = [head + tuple(rng.randrange(1024) for _ in range(rng.randrange(1, 300))) for _ in range(12)]
    plain = engine(path, deterministic_inference=True, cuda_graph_mode="none", radix_cache=False, **wishes)
    alone = [told(plain, [prompt])[0] for prompt in prompts]
    del plain
    crowded = engine(path, deterministic_inference=True, chunked_prefill_size=96, **wishes)
    assert told(crowded, prompts) == alone
    assert told(crowded, prompts[::-1]) == alone[::-1]
