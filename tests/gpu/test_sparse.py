"""Sparse attention on a GPU beyond index_topk tokens: the reference equals the CPU; plain PyTorch beside kernels, and
kernels, in bfloat16 and in FP8, equal the reference.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.compose import deterministic, matrix
from tests.configs import config
from tests.gpu.shapes import SHAPES, SPARSE, Part, batches, branched, planes, twins
from tests.gpu.test_engine import agreement, engine, tokens
from thalweg.attention.selection import select_top_k
from thalweg.batch.batch import TreeMask
from thalweg.config.model import facts_of
from thalweg.core.kernels import KernelConfig
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.kernels.attend import triton as attend
from thalweg.kernels.attend.args import KvWrite, LatentPlane, QueryRows
from thalweg.kernels.attend.ref import hadamard, rotate_
from thalweg.kernels.dsa import triton as dsa
from thalweg.kernels.dsa.backends import TritonSparse
from thalweg.kernels.rope.triton import LatentNorm, mla_write
from thalweg.layers.mla import Indexer
from thalweg.layers.paged import paths_of_tree
from thalweg.memory.planes import Planes, index_plane, record_plane
from thalweg.memory.records import encode_record, quantize
from thalweg.models.token_by_token import TokenByToken

Masked = tuple[tuple[int, float], ...]
TOPK, PROMPT, NEW = SPARSE["index_topk"], 3900, 12
FP8 = SPARSE | {"quantization_config": SHAPES["v3"]["quantization_config"]}
KINDS = {name: KernelConfig(decode=name, prefill=name) for name in ("torch", "triton_sparse")}
KINDS["choice by torch"] = msgspec.structs.replace(KINDS["triton_sparse"], topk="torch")
KINDS["records"] = msgspec.structs.replace(KINDS["triton_sparse"], kv="fp8_ds_mla", fp8_index=True)
KINDS["records on torch"] = msgspec.structs.replace(KINDS["torch"], kv="fp8_ds_mla", fp8_index=True)
STEPS: dict[str, list[Part]] = {
    "two prompts": [(1, 0, 700), (20, 0, 130)],
    "decode": [(1, 700, 1), (20, 130, 1)],
    "chunks": [(1, 701, 90), (20, 131, 300)],
    "decode beside a prompt": [(1, 791, 1), (20, 431, 1), (32, 0, 70)],
}
TREES: dict[str, list[Part]] = {"a tree": [(1, 792, 16)], "trees": [(1, 808, 7), (20, 432, 7)]}


def answer(path: Path, device: str, budget: int, **more: Any) -> list[tuple[float, ...]]:
    """Log-probabilities: of prompt positions past index_topk, then of the tokens that follow; all forced to the CPU's
    own choice by greed.
    """
    settings = config(
        model_path=str(path),
        device=device,
        context_length=4096,
        num_pages=70,
        max_running_requests=2,
        chunked_prefill_size=budget,
        warmup=False,
        **more,
    )
    engine = LocalEngine(settings)
    rng = random.Random(5)
    prompt = tuple(rng.randrange(engine.vocab) for _ in range(PROMPT))
    engine.submit(
        prompt, SamplingParams(temperature=0.0, max_tokens=NEW, logprobs=4, prompt_logprobs=0, ignore_eos=True)
    )
    found: list[tuple[float, ...]] = []
    while not engine.idle:
        for delta in engine.step():
            found += [(one[0],) for one in delta.prompt_logprobs]
            found += [(float(token), one[0]) for token, one in zip(delta.tokens, delta.logprobs, strict=True)]
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("sparse")
    (path / "config.json").write_text(json.dumps(SPARSE))
    return path


def test_past_the_chosen_context_it_is_the_cpus(checkpoint: Path, cuda: torch.device, monkeypatch: Any) -> None:
    on_cpu = answer(checkpoint, "cpu", 1024, load_format="dummy", threads=8, show_progress=False)
    on_gpu = answer(checkpoint, "cuda", 1024, load_format="dummy", show_progress=False)
    chunked = answer(checkpoint, "cuda", 700, load_format="dummy", show_progress=False)
    assert len(on_cpu) == PROMPT - 1 + NEW
    for got in (on_gpu, chunked):
        apart = [abs(a[-1] - b[-1]) for a, b in zip(on_cpu, got, strict=True)]
        assert sum(gap < 1e-3 for gap in apart) > 0.99 * len(apart), (
            "a choice at a near tie moves a few; the rest is rounding"
        )


def assert_beside_the_reference(
    shape: dict[str, Any], choice: KernelConfig, is_fp8: bool, cuda: torch.device, masked: Masked = ()
) -> None:
    """The bounds of test_models.py, for the median token. What the indexer chooses is compared apart from what becomes
    of a choice: a near tie that rounding decides moves a tenth of what attention to 256 tokens of random weights
    gives. is_fp8: the weights. masked: see `kernels.dsa.backends.SparseKernel`.
    """

    def scattered(scores_NS: torch.Tensor, topk: int) -> torch.Tensor:
        """A choice of any candidates, the same for the same context."""
        order = torch.arange(scores_NS.shape[1], device=cuda) * 7919 % 4093
        return select_top_k(torch.where(scores_NS == -torch.inf, -torch.inf, order.float()), topk)

    of, is_fp8 = facts_of(shape | {"index_topk": 256}, "sparse"), is_fp8 or choice.fp8_index
    reference, kernels = twins(of, cuda, choice)
    kernels.metadata.masked = masked
    for module in (*reference.modules(), *kernels.modules()):
        if isinstance(module, Indexer):
            module.selection = scattered
    there, here, generator = planes(reference, cuda), planes(kernels, cuda), torch.Generator().manual_seed(1)
    for name, rows in (STEPS | TREES).items():
        plain, paged = batches(rows, cuda, generator, 1024)
        if name in TREES:
            plain, paged = (branched(batch, rows, len(rows))[0] for batch in (plain, paged))
        with torch.inference_mode():
            exact = reference.logits(reference.forward(plain, there)).double()
            got = kernels.logits(kernels.forward(paged, here)).double()
        error = float(((got - exact).norm(dim=1) / exact.norm(dim=1)).median())
        assert error < (0.15 if is_fp8 else 0.025), f"{name}: {error:.4f}"  # FlashMLA: up to 0.022
    for plane in ("index", "latent"):  # of the first layer, which no expert has touched
        kept, exact = (of.read(plane, 0, of.paged(plane, 0), torch.float32).double() for of in (here, there))
        assert float((kept - exact).norm() / exact.norm()) < (0.05 if is_fp8 else 0.01), plane


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [SPARSE, FP8], ids=["bf16", "fp8"])
def test_beside_kernels_it_is_the_references(shape: dict[str, Any], kind: str, cuda: torch.device) -> None:
    assert_beside_the_reference(shape, KINDS[kind], shape is FP8, cuda)


@pytest.mark.parametrize("kind", ["triton_sparse", "records"])
def test_prompts_by_a_mask_are_the_references(kind: str, cuda: torch.device) -> None:
    assert_beside_the_reference(SPARSE, KINDS[kind], False, cuda, ((1024, 0.0),))


def chosen_far_back(context: int, choice: KernelConfig, device: torch.device, **sizes: int) -> dict[str, list[float]]:
    """Two decode rows, one behind `context` random tokens and one behind half as many. The model chooses by its own
    scores.

    "kernels": of each layer and row, which share of the reference's choice the kernels chose. "random": the same for a
    random choice instead. "error": of each row, how far the kernels' output is from the reference's.
    """
    layers, many = 2, {"index_n_heads": 16, "max_position_embeddings": 2 * context}
    of = facts_of(SPARSE | many | {"num_hidden_layers": layers, "first_k_dense_replace": layers} | sizes, "sparse")
    reference, kernels = twins(of, device, choice)
    assert of.indexer is not None
    pages = -(-(context + 1) // 64)
    rows: list[Part] = [(1, context, 1), (1 + pages, context // 2, 1)]
    there, here = (Planes(model.planes(), 1 + 2 * pages, device) for model in (reference, kernels))
    generator, places = torch.Generator().manual_seed(4), torch.arange(64, 64 * (1 + 2 * pages), device=device)
    for name, dims in (("index", of.indexer.dim), ("latent", SPARSE["kv_lora_rank"] + SPARSE["qk_rope_head_dim"])):
        for layer in range(layers):
            values = torch.randn(len(places), dims, generator=generator).to(device)
            for planes_of in (there, here):
                planes_of.write(name, layer, places, values.to(torch.bfloat16))
    plain, paged = batches(rows, device, torch.Generator().manual_seed(5), 1024)
    made: dict[str, list[Tensor]] = {"reference": [], "kernels": [], "random": []}

    def recorded(name: str, chosen: Tensor) -> Tensor:
        made[name] += [one[one >= 0] for one in chosen.long()]
        return chosen

    def random_choice(scores_NS: Tensor, topk: int) -> Tensor:
        some = torch.rand(scores_NS.shape, generator=generator).to(device)
        return select_top_k(torch.where(scores_NS == -torch.inf, -torch.inf, some), topk)

    for module in reference.modules():
        if isinstance(module, Indexer):
            module.selection = lambda scores, topk: recorded("reference", select_top_k(scores, topk))
    found: dict[str, list[float]] = {}
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        exact = reference.forward(plain, there).double()
        patch.setattr(dsa, "choose", lambda *of, choose=dsa.choose: recorded("kernels", choose(*of)))
        got = kernels.forward(paged, here).double()
        for module in kernels.modules():
            if isinstance(module, Indexer):
                module.selection = lambda scores, topk: recorded("random", random_choice(scores, topk))
        kernels.forward(paged, here)
    found["error"] = ((got - exact).norm(dim=1) / exact.norm(dim=1)).tolist()
    assert all(len(some) == layers * len(rows) for some in made.values())
    for name in ("kernels", "random"):
        found[name] = [
            float(torch.isin(theirs, ours).float().mean())
            for ours, theirs in zip(made[name], made["reference"], strict=True)
        ]
    return found


@pytest.mark.parametrize("kind", ["triton_sparse", "records"])
@pytest.mark.parametrize("past", [8192, 32768, 131072])
def test_the_models_own_choice_far_back_is_the_references(past: int, kind: str, cuda: torch.device) -> None:
    """Rounding decides near ties of some thousand candidates; a random choice has little in common with it."""
    found = chosen_far_back(TOPK + past, KINDS[kind], cuda)
    assert min(found["kernels"]) > (0.9 if kind == "records" else 0.95), found
    assert max(found["error"]) < (0.15 if kind == "records" else 0.05), found
    assert max(found["random"]) < 0.6, "a random choice must differ"


@pytest.mark.parametrize("kind", ["torch", "triton"])
@pytest.mark.parametrize("shape", [SPARSE, FP8], ids=["bf16", "fp8"])
def test_chunks_and_prefix_hits_change_few_tokens(
    shape: dict[str, Any], kind: str, cuda: torch.device, tmp_path: Path
) -> None:
    """Past index_topk tokens. Rounding differs between steps of other sizes, and decides near ties of choice, experts
    and tokens.
    """
    (tmp_path / "config.json").write_text(json.dumps(shape))
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(1024) for _ in range(3000)) for _ in range(8)]
    params = [SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)] * 8
    of = engine(tmp_path, chunked_prefill_size=4096, dsa_decode_backend=kind)
    whole, cached = tokens(of, prompts, params), tokens(of, prompts, params)
    chunked = tokens(engine(tmp_path, chunked_prefill_size=512, dsa_decode_backend=kind), prompts, params)
    assert agreement(whole, cached, 2) >= 0.6 and agreement(whole, chunked, 2) >= 0.6


@pytest.mark.parametrize(
    ("tokens", "columns"),
    [(1, 4096), (64, 16384), (3, 131072), (3, 163840), (300, 8192), (2, 2048), (3, 8256), (150, 9001)],
)
def test_the_choice_is_that_of_a_stable_sort(tokens: int, columns: int, cuda: torch.device) -> None:
    """Also where many scores are equal, or rise, or one is NaN (the highest), and of rows that see few positions."""
    generator = torch.Generator(cuda).manual_seed(1)
    scores = torch.randn(tokens, columns, device=cuda, generator=generator)
    scores[2:3] += torch.arange(columns, device=cuda) / 1000
    scores[::2] = (4 * scores[::2]).round() / 4
    scores[2:3, 5] = torch.nan
    positions = torch.randint(columns // 2, columns, (tokens,), device=cuda, generator=generator)
    positions[1:2] = 100
    unseen = torch.arange(columns, device=cuda) > positions.unsqueeze(1)
    order = scores.masked_fill(unseen, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :TOPK]
    want = order.masked_fill(unseen.gather(1, order), columns).sort(1).values
    got = dsa.choose(scores, positions, TOPK)
    assert torch.equal(
        got.long(), torch.nn.functional.pad(want.masked_fill(want == columns, -1), (0, TOPK - len(want[0])), value=-1)
    )
    assert torch.equal(dsa.choose(scores[:1], positions[:1], TOPK), got[:1])


@pytest.mark.parametrize("has_trees", [False, True])
def test_keys_and_latents_in_fp8_are_plain_torchs(has_trees: bool, cuda: torch.device) -> None:
    """Sizes of DeepSeek-V3.2: what is stored, bit for bit but for codes at near ties; scores and attention of it."""
    generator = torch.Generator().manual_seed(2)

    def normal(*dims: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*dims, generator=generator).to(cuda, dtype)

    tokens, context, angle = 5, 1000, torch.outer(torch.arange(1024.0), torch.rand(32, generator=generator)).to(cuda)
    table, rows_T = torch.arange(1, 17, device=cuda).view(1, 16).int(), torch.zeros(tokens, device=cuda).int()
    columns = torch.arange(context - tokens, context, device=cuda)
    positions = columns - torch.tensor([0, 0, 1, 1, 2], device=cuda) * has_trees
    masks = torch.tensor([-1, -1, -1 - 2, -1 - 2, -1 - 2 - 8], device=cuda)
    paths = paths_of_tree(TreeMask(columns, masks, 1), tokens) if has_trees else None
    rows = QueryRows(rows_T, table, positions, paths)
    planes = Planes((index_plane(0, 128), record_plane(0, 512, 64)), 17, cuda)
    every = torch.arange(64, 64 + 1024, device=cuda)
    planes.write("index", 0, every, normal(1024, 128))
    planes.write("latent", 0, every, normal(1024, 576))
    key, query, weights = normal(tokens, 128), normal(tokens, 64 * 128), normal(tokens, 64, dtype=torch.float32)
    norm, write = (
        dsa.KeyNorm(torch.ones(128, device=cuda), torch.zeros(128, device=cuda), 1e-6),
        KvWrite(angle.cos(), angle.sin(), positions, columns + 64),
    )
    turns = torch.polar(torch.ones_like(angle), angle)[positions].unsqueeze(1)
    plain_key, plain_query = torch.layer_norm(key.float(), (128,)).bfloat16(), query.clone()
    rotate_(plain_key, turns, 0, 1, 128)
    rotate_(plain_query, turns, 0, 64, 128)
    codes, scales = quantize(hadamard(plain_query.view(tokens, 64, 128)).flatten(1), 128)
    given = weights.clone()
    made = dsa.write(key, query, weights[None], norm, write, planes.paged("index", 0), 0.01, True)
    assert float((made.float() == codes.float()).float().mean()) > 0.98
    torch.testing.assert_close(weights, 0.01 * given * scales, rtol=0.0, atol=1e-8)
    keys = planes.read("index", 0, planes.paged("index", 0)[1:].view(1, 1024, 132), torch.float32)[0]
    want_key = quantize(hadamard(plain_key), 128)
    stored = keys[columns]
    assert float((stored - want_key[0].float() * want_key[1]).norm() / stored.norm()) < 0.02
    got = dsa.scores(made, weights, planes.paged("index", 0), rows, context)
    latent_TD, asked = normal(tokens, 576), normal(tokens, 128, 192)
    latent_norm = LatentNorm(torch.ones(512, device=cuda))
    places = write._replace(write_T=columns + 64)
    mla_write(
        asked[..., 128:],
        asked[..., 128:],
        latent_TD,
        latent_norm,
        places,
        LatentPlane(planes.paged("latent", 0)),
        in_place=True,
    )
    records = planes.tokens("latent", 0)[columns + 64]
    want_record = encode_record(latent_TD, 512)
    assert float((records == want_record).float().mean()) > 0.97
    chosen = dsa.choose(got, positions, 256)
    latents = planes.read("latent", 0, planes.tokens("latent", 0)[64:], torch.float32)
    for heads in (16, 32, 64, 128):
        q = normal(tokens, heads, 576)
        results = [
            attend.merge(
                *dsa.attend(
                    q, LatentPlane(planes.paged("latent", 0)), chosen, rows, 256, scale=0.05, rank=512, splits=splits
                )
            )
            for splits in (0, 3)
        ]
        for t, column in enumerate(columns.tolist()):
            path = torch.tensor(
                [c for c in range(column + 1) if int(masks[t]) >> min(column - c, 63) & 1 or not has_trees], device=cuda
            )
            want = weights[t] @ (made[t].float().view(64, 128) @ keys[path].T).relu()
            torch.testing.assert_close(got[t, : len(path)], want, rtol=2e-2, atol=2e-2)
            best = path[chosen[t].long()]
            exact = (0.05 * q[t].float() @ latents[best].T).softmax(-1) @ latents[best, :512]
            for result in results:
                assert float((result[t].float() - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("shape", [SPARSE, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("cache", [None, "fp8_e4m3"])
def test_kernels_under_graphs_are_the_eager_ones(
    shape: dict[str, Any], cache: str | None, cuda: torch.device, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(1024) for _ in range(n)) for n in (3000, 100, 2040, 2500)]
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * 4
    wishes = {"dsa_decode_backend": "triton", "kv_cache_dtype": cache}
    captured, eager = (engine(tmp_path, cuda_graph_mode=mode, **wishes) for mode in ("full_and_piecewise", "none"))
    assert captured.config.kernels.decode == "triton_sparse" and captured.config.cuda_graph_bs
    assert agreement(tokens(captured, prompts, params), tokens(eager, prompts, params), 4) >= 0.5


@pytest.mark.parametrize("graphs", ["none", "full_and_piecewise"])
@pytest.mark.parametrize("cache", [None, "fp8_ds_mla"])
@pytest.mark.parametrize("shape", [SPARSE, FP8], ids=["bf16", "fp8"])
def test_latents_in_host_memory_give_the_same_tokens(
    shape: dict[str, Any],
    cache: str | None,
    graphs: str,
    cuda: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without masks, which prompts beside hot sets do not have. The hot sets are smaller than every context, so that
    entries are evicted. The second run of the prompts computes their tails behind prefix hits: first tokens are as
    without hot sets, whose kernels have the same sizes. Captured steps are padded, by which a launch may be split
    otherwise.
    """
    monkeypatch.setattr(TritonSparse, "masked", ())
    (tmp_path / "config.json").write_text(json.dumps(shape | {"index_topk": 256}))
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(1024) for _ in range(n)) for n in (3000, 1100, 2040, 1500)]
    wishes = {"dsa_decode_backend": "triton", "cuda_graph_mode": graphs, "kv_cache_dtype": cache}
    hot = {"enable_hisparse": True, "hisparse_device_buffer_size": 320, "hisparse_host_memory_gb": 2.0}
    plain, small = engine(tmp_path, **wishes), engine(tmp_path, **wishes, **hot)
    assert small.config.hisparse_device_buffer_size == 320 < min(map(len, prompts))
    for new in (24, 4):
        want, got = (scored(of, prompts, 24) for of in (plain, small))
        assert agreement([x for x, _ in want], [x for x, _ in got], new) >= 0.75
        if graphs == "none":
            assert max(abs(x[0] - y[0]) for (_, x), (_, y) in zip(want, got, strict=True)) < 1e-3
    assert small.loop.scheduler.counters.cached_tokens > 7000, "prefix hits"


def scored(of: LocalEngine, prompts: list[tuple[int, ...]], new: int) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of each prompt, and their log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=1)
    got: dict[int, tuple[list[int], list[float]]] = {of.submit(prompt, params)[0]: ([], []) for prompt in prompts}
    while not of.idle:
        for delta in of.step():
            got[delta.uid][0].extend(delta.tokens)
            got[delta.uid][1].extend(one[0] for one in delta.logprobs)
    return list(got.values())


@pytest.mark.parametrize("kind", ["torch", "triton_sparse", "records"])
def test_bits_depend_on_the_sequence_alone(kind: str, cuda: torch.device) -> None:
    def engine(**fields: Any) -> LocalEngine:
        choice = msgspec.structs.replace(KINDS[kind], deterministic=True)
        return LocalEngine(matrix.settings(cuda.type, dtype="bfloat16", kernels=choice, **fields))

    plain = deterministic.answers(engine(**deterministic.PLAIN), "seeded", alone=True)
    got = deterministic.answers(engine(**deterministic.CASES["overlap, prefix hits"]), "seeded", alone=False)
    deterministic.assert_equal_bits(plain, got)


@pytest.mark.parametrize("shape", [SPARSE, FP8], ids=["bf16", "fp8"])
def test_a_deterministic_one_starts_warm(shape: dict[str, Any], cuda: torch.device, tmp_path: Path) -> None:
    """Every token is a step of its own: what runs before the first request, and what is measured, is one token's."""
    (tmp_path / "config.json").write_text(json.dumps(shape))
    wishes = {"deterministic_inference": True, "attention_backend": "torch"}
    of = engine(tmp_path, warmup=True, max_running_requests=4, **wishes)
    assert of.config.warmup and of.config.step_times is None and isinstance(of.runner.model, TokenByToken)
    prompts = [tuple(range(100)), tuple(range(7, 50))]
    params = [SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)] * 2
    together = tokens(of, prompts, params)
    assert together == [tokens(of, [prompt], params[:1])[0] for prompt in prompts]
