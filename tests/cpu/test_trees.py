"""Draft trees in a whole engine with the bundled model's NextN layer: plain decoding's tokens, and a chain's KV in the
pages.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.compose.matrix import MODEL
from tests.cpu.test_speculation import GREEDY, JSON, breaking, engine, prompts, run, written_afresh
from thalweg.core.kernels import KernelConfig
from thalweg.core.messages import TokenDelta
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import TreeShape
from thalweg.engine.local import LocalEngine
from thalweg.models import traced
from thalweg.spec.drafter import DraftOutput
from thalweg.spec.tree import TreeDrafter, static
from thalweg.text.tokenizer import Tokenizer

DYNAMIC, STATIC = TreeShape(4, 3, 12), TreeShape(3, 4, 12, dynamic=False)
WIDE = TreeShape(9, 8, 63)  # grown from as many nodes as there may be
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True)
PENALISED = SamplingParams(
    temperature=0.7,
    seed=5,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.3,
    logit_bias=((700, 3.0),),
    min_tokens=30,
    max_tokens=40,
    logprobs=3,
)


@pytest.fixture(autouse=True, scope="module")
def unrecorded() -> Iterator[None]:
    """Recorded steps are those of chains, which the compose tests mix with trees."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced, "ROWS", 0)
        yield


def growing(shape: TreeShape, **fields: Any) -> LocalEngine:
    return engine(shape.num_drafts, tree=shape, **fields)


@pytest.fixture(scope="module")
def plain() -> dict[str, list[list[int]]]:
    made = engine(0)
    return {repr(params): run(made, prompts(3), params) for params in (GREEDY, SEEDED, PENALISED)}


@pytest.mark.parametrize(
    ("shape", "depth", "params"), [(DYNAMIC, 2, GREEDY), (DYNAMIC, 1, PENALISED), (STATIC, 2, SEEDED)]
)
def test_tokens_are_those_of_plain_decoding(
    plain: dict[str, list[list[int]]], shape: TreeShape, depth: int, params: SamplingParams
) -> None:
    made = growing(shape, max_steps_in_flight=depth)
    assert run(made, prompts(3), params) == plain[repr(params)]
    stats = made.loop.stats()
    assert stats.accepted_tokens > 0.5 * stats.verifications, "a tree is right at least as often as its best path"
    assert len(stats.drafted_at) == shape.max_depth, "drafts are counted by their depth"


def test_a_tree_of_all_nodes_there_may_be(plain: dict[str, list[list[int]]]) -> None:
    assert run(growing(WIDE, chunked_prefill_size=80), prompts(5)[:2]) == plain[repr(GREEDY)][:2]


def test_a_tree_accepts_more_than_its_chain(plain: dict[str, list[list[int]]]) -> None:
    """Also where requests sample: children are the tokens that the target most likely draws."""
    for params in (GREEDY, SEEDED):
        lengths = []
        for made in (engine(3), growing(TreeShape(4, 3, 15))):
            run(made, prompts(3), params)
            stats = made.loop.stats()
            lengths.append(stats.accepted_tokens / stats.verifications)
        assert lengths[1] > lengths[0] + 0.2, params


CACHES = [
    KernelConfig(kv="fp8_e4m3"),
    KernelConfig(kv="fp8_ds_mla", fp8_index=True),
    KernelConfig(latent=False),
]


@pytest.mark.parametrize("kernels", CACHES, ids=repr)
def test_with_every_kind_of_cache(kernels: KernelConfig) -> None:
    assert run(growing(DYNAMIC, kernels=kernels), prompts(2)) == run(engine(0, kernels=kernels), prompts(2))


def test_under_a_grammar() -> None:
    """Of every node the mask is that of its own path."""
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=150)
    texts = run(engine(0), prompts(2, 40), params, JSON)
    made = growing(DYNAMIC, max_steps_in_flight=2)
    assert run(made, prompts(2, 40), params, JSON) == texts
    assert made.loop.stats().accepted_tokens > 0
    tokenizer = Tokenizer(Path(MODEL))
    assert all(6 <= len(json.loads(tokenizer.decode(tokens[:-1]))) <= 9 for tokens in texts)


def test_a_changing_draft_length_changes_no_token(plain: dict[str, list[list[int]]]) -> None:
    """Chains of one, trees and single tokens meet in a step; a tree that is cut keeps its best nodes."""
    made, rng = growing(DYNAMIC, max_steps_in_flight=2, chunked_prefill_size=70), random.Random(5)
    made.loop.scheduler.draft_length.choose = lambda sampling, most: rng.choice((0, 1, 2, 5, 12))  # type: ignore[method-assign]
    assert run(made, prompts(3), PENALISED) == plain[repr(PENALISED)]
    assert made.loop.stats().accepted_tokens > 10


def test_what_ends_within_a_path(plain: dict[str, list[list[int]]]) -> None:
    """A stop id, and the end of the sequence, wherever they come."""
    for tokens in (1, 2, 3, 6):
        short = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        assert run(growing(STATIC), prompts(2), short) == [one[:tokens] for one in plain[repr(GREEDY)][:2]]
    for at in (3, 7):
        stop = plain[repr(GREEDY)][0][at]
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
        (got,) = run(growing(DYNAMIC), prompts(1), params)
        assert got == plain[repr(GREEDY)][0][: plain[repr(GREEDY)][0].index(stop) + 1]


# ---- what is left in the pages


@pytest.mark.parametrize("kernels", [KernelConfig(), KernelConfig(latent=False)], ids=["latents", "keys and values"])
def test_entries_are_those_of_plain_decoding(kernels: KernelConfig) -> None:
    """Of the target and of its drafter, wherever in the tree a token was computed."""
    made = growing(DYNAMIC, chunked_prefill_size=50, radix_cache=False, kernels=kernels)
    afresh = written_afresh(made, prompts(1)[0])
    drafter = made.runner.drafting.drafter
    assert isinstance(drafter, TreeDrafter)
    for spec in (*made.runner.model.planes(), *drafter.head.planes()):
        afresh.check(made, spec, 3e-3, 2e-3)


# ---- trees as they are made


def check(parents: Tensor, depth: Tensor, masks: Tensor) -> None:
    """A node comes after its parent, and sees its ancestors and itself of all that stands from the root on."""
    for row in range(len(parents)):
        ancestors = [{0}]
        for node, parent in enumerate(parents[row].tolist(), 1):
            assert parent < node
            ancestors.append(ancestors[parent] | {node})
            assert len(ancestors[node]) == int(depth[row, node - 1]) + 1
            seen = {node - i for i in range(node + 1) if int(masks[row, node - 1]) >> i & 1}
            assert seen == ancestors[node] and int(masks[row, node - 1]) >> (node + 1) == -1


@pytest.mark.parametrize("shape", [STATIC, WIDE, TreeShape(2, 8, 30), TreeShape(8, 2, 63, dynamic=False)])
def test_every_tree_is_one(shape: TreeShape, monkeypatch: pytest.MonkeyPatch) -> None:
    made = growing(shape, chunked_prefill_size=200)
    drafter, trees = made.runner.drafting.drafter, []
    assert isinstance(drafter, TreeDrafter)
    propose = drafter.propose

    def watched(asked: Any, width: int, slots: Any, planes: Any) -> DraftOutput | None:
        found = propose(asked, width, slots, planes)
        assert found is not None and found.parents_EK is not None
        trees.append((found, *slots.nodes_SN3[asked.slot_E, 1 : 1 + width].unbind(2)))
        return found

    monkeypatch.setattr(drafter, "propose", watched)
    run(made, prompts(2), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert len(trees) > 2
    for found, parents, depth, masks in trees:
        assert torch.equal(parents, found.parents_EK) and int(depth.max()) <= shape.max_depth
        check(parents, depth, masks)
        for row, tokens in zip(parents.tolist(), found.drafts_EK.tolist(), strict=True):
            assert len(set(zip(row, tokens, strict=True))) == len(row), "children of a node are different tokens"


def test_a_static_tree_has_the_likeliest_ranks_first() -> None:
    order = static(TreeShape(3, 3, 14, dynamic=False))
    assert [tuple(node) for node in order[:4]] == [(0, 0, 1), (1, 0, 2), (0, 1, 1), (2, 0, 3)]
    assert len(order) == 14 and max(node.depth for node in order) == 3


@pytest.mark.parametrize("length", [1.0, 2.5])
def test_simulated_acceptance_is_reached(length: float) -> None:
    made = growing(STATIC if length > 2 else DYNAMIC, speculative_simulate_accept_length=length, context_length=200)
    run(made, prompts(4, 40), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    stats = made.loop.stats()
    assert abs(1 + stats.accepted_tokens / stats.verifications - length) < 0.2


def test_a_tree_drafter_with_nan_output_does_no_harm(plain: dict[str, list[list[int]]]) -> None:
    made = growing(DYNAMIC, max_steps_in_flight=2)
    drafter = made.runner.drafting.drafter
    assert isinstance(drafter, TreeDrafter)
    drafter.head.norm.weight.data.fill_(float("nan"))  # type: ignore[attr-defined]
    assert run(made, prompts(3)) == plain[repr(GREEDY)]
    assert made.loop.stats().drafter_failures == 1


def test_decoding_continues_after_a_tree_drafter_raises(plain: dict[str, list[list[int]]]) -> None:
    """That are under way: they count as none."""
    made = growing(DYNAMIC, max_steps_in_flight=2)
    breaking(made, "propose", 4)
    assert run(made, prompts(3)) == plain[repr(GREEDY)]
    assert made.loop.stats().drafter_failures == 1


def test_in_deterministic_mode_bits_do_not_depend_on_trees() -> None:
    """Nor where a tree was cut, and the next one stands where it stood."""
    kernels = KernelConfig(deterministic=True)

    def bits(made: LocalEngine) -> dict[int, TokenDelta]:
        found: dict[int, TokenDelta] = {}
        for prompt in prompts(2, 60):
            made.submit(prompt, PENALISED)
        while not made.idle:
            for delta in made.step():
                found[delta.uid] = found[delta.uid].merge(delta) if delta.uid in found else delta
        return {uid: msgspec.structs.replace(delta, acceptance=None) for uid, delta in found.items()}

    made, rng = growing(DYNAMIC, kernels=kernels, max_steps_in_flight=2, chunked_prefill_size=70), random.Random(5)
    made.loop.scheduler.draft_length.choose = lambda sampling, most: rng.choice((0, 1, 2, 5, 12, 12))  # type: ignore[method-assign]
    assert bits(made) == bits(engine(0, kernels=kernels))
    assert made.loop.stats().accepted_tokens > 10
