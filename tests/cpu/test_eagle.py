"""EAGLE heads: loaded from published formats, compared with the published formulas, and in a whole engine."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compose.matrix import MODEL, settings
from tests.configs import changed
from tests.cpu import eagle_heads as heads
from tests.cpu import reference_model, zoo
from tests.cpu.batches import whole_batch
from tests.cpu.eagle_heads import Reference
from thalweg.bench.answering import PromptFormat
from thalweg.bench.tasks import make_items
from thalweg.core.errors import CheckpointError
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.kernels.experts.ref import SCRIPTABLE
from thalweg.memory.planes import Planes
from thalweg.models import traced
from thalweg.models.catalog import read_facts
from thalweg.models.eagle import Eagle, Eagle3
from thalweg.models.interface import Target
from thalweg.spec.autoregressive import AutoregressiveDrafter
from thalweg.spec.eagle import eagle_head
from thalweg.weights import stream
from thalweg.weights.loader import load
from thalweg.weights.stream import Safetensors

FORMATS = [pytest.param(True, id="eagle3"), pytest.param(False, id="eagle")]


def loaded(target: Target, folder: Path) -> Any:
    head = eagle_head(target, folder)
    assert isinstance(head, nn.Module)
    with Safetensors(folder) as tensors:
        load(head, head.table(), tensors)
    return head


@pytest.fixture(autouse=True, scope="module")
def unrecorded() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced, "ROWS", 0)
        yield


def test_invalid_d2t_ids_of_a_head_are_refused(tmp_path: Path) -> None:
    """The target would look for their embeddings, or a tree would have equal children."""
    given = json.loads((Path(MODEL) / "config.json").read_text())
    third = heads.config(given, True)
    made = heads.tensors(third, given["hidden_size"], True)
    target: Any = zoo.ours(Path(MODEL))
    loaded(target, heads.publish(tmp_path / "head", third, made))
    place, vocab = torch.arange(len(made["d2t"])), given["vocab_size"]
    for name, wrong, words in (
        ("absolute", made["d2t"] + place, ("subtract from each its place", f"0 to {vocab - 1}")),
        ("far", made["d2t"].clone().index_fill_(0, torch.tensor([7]), vocab), (f"value {vocab} at 7 makes that {vocab + 7}", "1 of")),
        ("below", made["d2t"].clone().index_fill_(0, torch.tensor([7]), -9), ("value -9 at 7 makes that -2", "1 of")),
        ("twice", torch.arange(len(place)) // 2 - place, ("which another entry says, too", "value -1 at 1 makes that 0")),
    ):  # fmt: skip
        with pytest.raises(CheckpointError) as refused:
            loaded(target, heads.publish(tmp_path / name, third, made | {"d2t": wrong}))
        assert all(word in str(refused.value) for word in (str(tmp_path / name), "d2t", *words)), refused.value


# ---- one pass


class Pass:
    """A target of some family, a head of it, and one sequence."""

    def __init__(self, family: str, third: bool, folder: Path, **fields: Any) -> None:
        given = zoo.draw_config(family, 3)
        zoo.save(zoo.reference(given, 3), given, folder / "target")
        self.given = heads.config(given, third, **fields)
        self.made = heads.tensors(self.given, given["hidden_size"], third)
        heads.publish(folder / "head", self.given, self.made)
        self.target: Any = zoo.ours(folder / "target")
        self.head = loaded(self.target, folder / "head")
        self.reference = Reference(self.given, self.made, self.target.embedding.weight, self.target.head.weight)
        self.ids = torch.randint(given["vocab_size"], (90,), generator=torch.Generator().manual_seed(1))
        self.planes = Planes((*self.target.planes(), *self.head.planes()), 4)
        with torch.inference_mode():
            self.batch = whole_batch([len(self.ids)], self.ids)
            self.hidden = self.target.forward(self.batch, self.planes)
            before = self.head.draft_state(self.hidden).roll(1, 0)
            self.before = before.index_fill(0, torch.tensor([0]), 0.0)


@pytest.mark.parametrize(
    ("family", "third"),
    [
        ("v2-lite", True),
        ("v32", True),
        ("llama", True),
        ("qwen2", True),
        ("qwen3", True),
        ("v2-lite", False),
        ("llama", False),
    ],
)
def test_states_and_logits_are_those_of_the_formulas(family: str, third: bool, tmp_path: Path) -> None:
    made = Pass(family, third, tmp_path, num_hidden_layers=1 if third else 2, qkv_bias=family == "llama")
    target, hidden = made.target, made.target.facts.hidden
    streams = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, args: streams.append(args[0].value().clone()))
        for layer in target.layers
    ]
    with torch.inference_mode():
        target.forward(made.batch, made.planes)
        got = made.head.forward(made.ids, made.before, made.batch, made.planes)
        logits = made.head.logits(got)
    for hook in hooks:
        hook.remove()
    seen = made.hidden[:, :hidden]
    if third:  # its three streams, in their order
        layers = target.facts.layers
        wanted = [2, layers // 2, max(layers - 3, 0)]
        seen = torch.cat([streams[i] if i < layers else last_stream(target, made) for i in wanted], 1)
        torch.testing.assert_close(made.hidden[:, hidden:], seen)
    before = made.reference.learned(seen).roll(1, 0)
    before[0] = 0
    want = made.reference.step(made.ids, before)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    full = made.reference.logits(want)
    ids = torch.arange(full.shape[1]) if made.head.ids_D is None else made.head.ids_D
    torch.testing.assert_close(logits, full[:, ids], atol=2e-4, rtol=1e-4)
    if third:
        assert len(ids) == made.given["draft_vocab_size"] and full[:, ids].isfinite().all()


def last_stream(target: Any, made: Pass) -> Tensor:
    """What leaves the last layer: the input of the final norm."""
    found: list[Tensor] = []
    lazy = target.norm.lazy
    target.norm.lazy = lambda x: found.append(x.clone()) or lazy(x)
    with torch.inference_mode():
        target.forward(made.batch, made.planes)
    target.norm.lazy = lazy
    return found[0]


@pytest.mark.parametrize("third", FORMATS)
def test_draft_extend_stores_what_a_forward_stores(third: bool, tmp_path: Path) -> None:
    made = Pass("llama", third, tmp_path, num_hidden_layers=1 if third else 2)
    other = Planes(made.planes.specs, made.planes.pages)
    with torch.inference_mode():
        made.head.forward(made.ids, made.before, made.batch, made.planes)
        made.head.write_kv(made.ids, made.before, made.batch, other)
    for spec in made.head.planes():
        pages = made.planes.bytes[spec.name, spec.layer]
        assert pages[1:3].any() and torch.equal(pages[1:], other.bytes[spec.name, spec.layer][1:])


# ---- the format


def test_what_a_folder_may_differ_in(tmp_path: Path) -> None:
    """The layer under its other name, an embedding of its own, a whole vocabulary, streams that are named by layers
    whose output they are.
    """
    made = Pass("qwen2", True, tmp_path)
    target = made.target
    vocab, layers = made.given["vocab_size"], target.facts.layers
    given = made.given | {
        "draft_vocab_size": vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, layers - 1]},
    }
    tensors = heads.tensors(given, target.facts.hidden, True, seed=5)
    generator = torch.Generator().manual_seed(6)
    own = torch.randn(vocab, given["hidden_size"], generator=generator)
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    folder = heads.publish(tmp_path / "other", given, named | {"embed_tokens.weight": own})
    head = loaded(target, folder)
    assert target.watched == (2, 1, layers) and head.ids_D is None
    with torch.inference_mode():
        hidden = target.forward(made.batch, made.planes)
        state = head.draft_state(hidden)
        got = head.logits(head.forward(made.ids, state, made.batch, made.planes))
    reference = Reference(given, tensors, own, target.head.weight)
    want = reference.logits(reference.step(made.ids, state))
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


def test_ids_beside_that_do_not_begin_with_one_are_inputs(tmp_path: Path) -> None:
    made = Pass("v2-lite", True, tmp_path, eagle_aux_hidden_state_layer_ids=[2, 0, 1])
    assert made.target.watched == (2, 0, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 4000}, ("vocab_size is 4000", "another model's")),
        ({"target_hidden_size": 8192}, ("target_hidden_size is 8192", "another model's")),
        ({"draft_vocab_size": 3000}, ("draft_vocab_size", "2048")),
        ({"num_hidden_layers": 2}, ("one layer",)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 9]}}, ("4 layers",)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 2}}, ("list of layers",)),
    ],
)
def test_a_head_of_another_model_is_refused(change: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    target = read_config(MODEL)
    heads.publish(tmp_path, heads.config(target, True) | change, {})
    with pytest.raises(CheckpointError) as refused:
        eagle_head(reference_model.build(read_facts(Path(MODEL)), torch.float32, "meta"), tmp_path)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_pickled_head_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(heads.config(read_config(MODEL), True)))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="save_file"):
        eagle_head(reference_model.build(read_facts(Path(MODEL)), torch.float32, "meta"), tmp_path)


# ---- a whole engine


def read_config(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return found


class Bundled:
    """A head for the bundled model, in a folder."""

    def __init__(self, third: bool, folder: Path) -> None:
        self.given = heads.config(read_config(MODEL), third, head_dim=32, num_attention_heads=8)
        self.made = heads.tensors(self.given, self.given["hidden_size"], third)
        self.folder = heads.publish(folder, self.given, self.made)

    def engine(self, width: int, **fields: Any) -> LocalEngine:
        wished = {
            "chunked_prefill_size": 64,
            "num_pages": 60,
            "max_running_requests": 8,
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(self.folder),
        }
        return LocalEngine(changed(settings(), **(wished | {"num_drafts": width} | fields)))


@pytest.fixture(scope="module", params=FORMATS)
def bundled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundled:
    return Bundled(request.param, tmp_path_factory.mktemp("head"))


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(5, 150, (count,), generator=generator).tolist()
    return [[0, *torch.randint(20, 2000, (length,), generator=generator).tolist()] for length in lengths]


def run(made: LocalEngine, asked: list[list[int]], params: SamplingParams) -> list[list[int]]:
    answers: dict[int, list[int]] = {}
    for prompt in asked:
        answers |= {uid: [] for uid in made.submit(prompt, params)}
    while not made.idle:
        for delta in made.step():
            answers[delta.uid] += delta.tokens
    return list(answers.values())


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=7, top_p=0.9, max_tokens=24, ignore_eos=True)


def test_drafts_are_those_of_the_formulas(bundled: Bundled) -> None:
    """Whatever was accepted and refused before: each chain is what the formulas draft behind the known tokens, from the
    target's true states.
    """
    made = bundled.engine(3)
    drafter, slots, model = made.runner.drafting.drafter, made.runner.slots, made.runner.model
    assert isinstance(drafter, AutoregressiveDrafter)
    chains: list[tuple[list[int], list[int]]] = []
    propose = drafter.propose

    def watched(asked: Any, width: int, *rest: Any) -> Any:
        proposed = propose(asked, width, *rest)
        for slot, drafts in zip(asked.slot_E.tolist(), proposed.drafts_EK.tolist(), strict=True):
            length, end = int(slots.length[slot]), int(slots.end[slot])
            if end:  # behind which nothing is drafted
                chains.append((slots.tokens_SL[slot, :length].tolist(), drafts[: end - length]))
        return proposed

    drafter.propose = watched  # type: ignore[method-assign]
    run(made, prompts(2), GREEDY)
    target: Any = model
    reference = Reference(bundled.given, bundled.made, target.embedding.weight, target.head.weight)
    compared = 0
    for known, drafts in chains[::3]:
        ids = torch.tensor(known)
        planes = Planes(model.planes(), 10)
        with torch.inference_mode():
            hidden = model.forward(whole_batch([len(known)], ids), planes)
        seen = hidden[:, 256:] if reference.third else hidden
        before = torch.cat([torch.zeros(1, 256), reference.learned(seen)[:-1]])
        want, close = reference.chain(known, before, 3)
        if close > 1e-3:
            assert drafts == want[: len(drafts)]
            compared += 1
    assert compared >= 10


@cache
def plain() -> tuple[list[list[int]], list[list[int]]]:
    """Greedy and seeded answers without a drafter."""
    made = LocalEngine(changed(settings(), chunked_prefill_size=64, num_pages=60, max_running_requests=8))
    return run(made, prompts(4), GREEDY), run(made, prompts(4), SEEDED)


def test_tokens_are_those_of_plain_decoding(bundled: Bundled) -> None:
    """The seeded ones behind prefixes that were found in the cache."""
    made = bundled.engine(3, max_steps_in_flight=2)
    assert (run(made, prompts(4), GREEDY), run(made, prompts(4), SEEDED)) == plain()
    assert made.loop.stats().drafted_tokens > 200 and made.loop.stats().cached_tokens > 0


def test_loading_reads_the_heads_own_folder_and_nothing_twice(
    bundled: Bundled, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, str]] = []
    deliver = stream.Safetensors.deliver

    def watched(self: Safetensors, reads: Any, device: Any) -> Any:
        read.extend((str(self._slices[one.name].path.parent), one.name) for one in reads)
        return deliver(self, reads, device)

    monkeypatch.setattr(stream.Safetensors, "deliver", watched)
    bundled.engine(1)
    own = [name for folder, name in read if folder == str(bundled.folder)]
    assert sorted(own) == sorted(bundled.made.keys() - {"t2d"})
    others = {name for folder, name in read if folder != str(bundled.folder)}
    assert not any(name.startswith("model.layers.4.") for name in others), "the NextN layer, which nobody uses here"


def test_a_folder_with_a_config_alone_gets_random_weights(bundled: Bundled, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(bundled.given))
    made = bundled.engine(2, speculative_draft_model_path=str(tmp_path), load_format="dummy")
    tokens = run(made, prompts(2), GREEDY)
    head = made.runner.drafting.drafter.head  # type: ignore[attr-defined]
    assert all(len(one) == 24 for one in tokens) and made.loop.stats().drafted_tokens > 20
    assert not made.loop.stats().drafter_failures
    if isinstance(head, Eagle3):
        assert head.ids_D is not None and len(head.ids_D.unique()) == 1024 and int(head.ids_D.max()) < 2048
    else:
        assert isinstance(head, Eagle)


@pytest.mark.skipif(not SCRIPTABLE, reason="TorchScript does not support this Python")
def test_recorded_steps_draft_the_same(bundled: Bundled, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = bundled.engine(2, max_running_requests=1)
    monkeypatch.setattr(traced, "ROWS", 1)
    recorded = bundled.engine(2, max_running_requests=1)
    assert type(recorded.runner.drafting.drafter.steps).__name__ == "TracedHead"  # type: ignore[attr-defined]
    asked = prompts(1)
    assert run(recorded, asked, GREEDY) == run(eager, asked, GREEDY)
    assert recorded.loop.stats().accepted_tokens == eager.loop.stats().accepted_tokens


def test_drafts_of_the_bundled_head_are_mostly_right() -> None:
    """Trained: see models/tiny-eagle3/README.md, which says 3.9 tokens of a verification for all sums."""
    folder = Path(MODEL).parent / "tiny-eagle3"
    fields = {
        "chunked_prefill_size": 256,
        "num_pages": 60,
        "max_running_requests": 8,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(folder),
        "num_drafts": 3,
    }
    made = LocalEngine(changed(settings(), **fields))
    texts = PromptFormat(Path(MODEL))
    asked = [list(texts.prompt(item).ids) for item in make_items("sums", "held_out", 4)]
    run(made, asked, SamplingParams(temperature=0.0, max_tokens=64))
    assert made.loop.stats().acceptance.mean_length > 3
