"""A request whose output is NaN ends with an error; others continue, and none of its pages is reused."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.compose.matrix import MODEL
from tests.cpu.test_speculation import engine, prompts, unrecorded
from thalweg import cli
from thalweg.batch.batch import Batch
from thalweg.bench import eval as evaluation
from thalweg.bench import one_batch
from thalweg.core.errors import NumericalError
from thalweg.core.messages import EngineReady, StepUpdate, TokenDelta
from thalweg.core.plan import PAGE
from thalweg.core.report import Report
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.engine.client import EngineClient
from thalweg.engine.local import LocalEngine
from thalweg.engine.streams import Piece
from thalweg.llm import LLM
from thalweg.memory.planes import Planes
from thalweg.server.errors import api_error
from thalweg.text.tokenizer import Tokenizer

assert unrecorded  # a fixture of this module, too
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 3},
    "truncated": {"temperature": 0.9, "top_p": 0.8, "top_k": 50, "seed": 4},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 2},
}
TREE = TreeShape(2, 2, 4)
NEW = 30


class Poisoned:
    """The model's steps, whose states at this token are no numbers."""

    def __init__(self, made: LocalEngine, token: int) -> None:
        self.steps, self.token = made.runner.forward_model, token
        made.runner.forward_model = self

    def forward(self, batch: Batch, planes: Planes) -> Tensor:
        hidden = self.steps.forward(batch, planes)
        return hidden.masked_fill((batch.ids_T == self.token).unsqueeze(1), torch.nan)


def answered(made: LocalEngine, asked: list[list[int]], params: SamplingParams) -> list[tuple[list[int], str]]:
    """Tokens of each, and how it ended."""
    answers: dict[int, tuple[list[int], str]] = {}
    for prompt in asked:
        answers |= {uid: ([], "") for uid in made.submit(prompt, params)}
    while not made.idle:
        for delta in made.step():
            answers[delta.uid] = ([*answers[delta.uid][0], *delta.tokens], delta.finish)
    return list(answers.values())


@pytest.mark.parametrize(
    ("kind", "width", "depth", "fields"),
    [
        ("greedy", 0, 2, {}),
        ("truncated", 0, 1, {}),
        ("penalised", 0, 2, {}),
        ("sampled", 2, 1, {"speculative_acceptance": "rejection-sampling"}),
        (
            "truncated",
            2,
            2,
            {"speculative_acceptance": "relaxed", "speculative_relaxed_topk": 3, "speculative_relaxed_delta": 0.9},
        ),
        ("penalised", 3, 2, {}),
        ("truncated", 4, 1, {"tree": TREE}),
    ],
)
def test_only_the_request_with_nan_fails(kind: str, width: int, depth: int, fields: dict[str, Any]) -> None:
    """In the middle of its output: the token at which the model breaks is one that this request writes, and no other
    has.
    """
    params = SamplingParams(max_tokens=NEW, ignore_eos=True, **KINDS[kind])
    made = engine(width, max_steps_in_flight=depth, max_running_requests=3, **fields)
    asked = prompts(4, 100)
    sane = answered(made, asked, params)
    others = {token for i in (0, 2, 3) for token in (*asked[i], *sane[i][0])}
    at, token = next((i, token) for i, token in enumerate(sane[1][0]) if i > 8 and token not in others | {*asked[1]})
    made.flush_cache()
    Poisoned(made, token)
    got = answered(made, asked, params)
    assert [got[i] for i in (0, 2, 3)] == [sane[i] for i in (0, 2, 3)]
    tokens, finish = got[1]
    assert finish == "error" and tokens == sane[1][0][: len(tokens)] and len(tokens) <= at + 1
    stats = made.loop.stats()
    assert (stats.broken, stats.drafter_failures) == (1, 0)
    assert stats.pages_used == 0 and (not width or stats.accepted_tokens > 0)


@pytest.mark.parametrize(("width", "tree"), [(0, CHAIN), (2, CHAIN), (4, TREE)])
def test_nan_pages_leave_the_prefix_cache(width: int, tree: TreeShape) -> None:
    """Not its prompt's pages either, which others could find while it was computed; what they had computed before
    stays.
    """
    made = engine(width, tree=tree, max_running_requests=2, max_steps_in_flight=2)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    shared = [0, *range(30, 30 + PAGE)]
    ((want, _),) = answered(made, [shared], params)
    before = made.loop.stats().pages_cached
    broken = [*shared[:PAGE], *range(200, 200 + 2 * PAGE), 1999]
    Poisoned(made, 1999)
    for _ in range(2):
        assert answered(made, [broken], params) == [([], "error")]
        assert made.loop.stats().pages_cached == before == 1
    assert made.loop.stats().cached_tokens == 2 * PAGE
    assert answered(made, [shared, prompts(1)[0]], params)[0] == (want, "length")
    assert made.loop.stats().drafter_failures == 0


def test_nan_prompt_logprobs_fail_too() -> None:
    made, prompt = engine(0, chunked_prefill_size=64), [0, *range(30, 130)]
    Poisoned(made, 40)
    for params in ({"max_tokens": 0}, {"max_tokens": 3}):
        asked = SamplingParams(temperature=0.0, prompt_logprobs=0, **params)
        ((tokens, finish),) = answered(made, [prompt], asked)
        assert (tokens, finish) == ([], "error")
    assert answered(made, [prompt], SamplingParams(temperature=0.0, max_tokens=3))[0][1] != "error"


def test_offline_others_keep_their_answers() -> None:
    llm = LLM(MODEL, max_total_tokens=1024)
    Poisoned(llm.engine, 77)  # type: ignore[arg-type]
    broken, fine = llm.generate(
        [[0, 5, 77], [0, 5, 78]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    )
    assert (broken.outputs[0].finish_reason, broken.outputs[0].token_ids) == ("error", [])
    assert (fine.outputs[0].finish_reason, len(fine.outputs[0].token_ids)) == ("length", 4)


def test_a_stream_delivers_its_tokens_before_the_nan_error(caplog: pytest.LogCaptureFixture) -> None:
    front = EngineClient(engine(0).config, Tokenizer(Path(MODEL)))
    front.ready, front.state = EngineReady(1, 400, 2048, 10, 4, Report()), "ready"
    pieces: list[Piece] = []

    async def serve() -> None:
        stream = front.stream((0, 5), SamplingParams(max_tokens=9), request_id="r")
        asyncio.get_running_loop().call_soon(front._handle, StepUpdate((TokenDelta(0, (300,)),), time.time()), 0)
        pieces.append(await anext(stream))
        front._handle(StepUpdate((TokenDelta(0, (), "error"),), time.time()), 0)
        async for piece in stream:
            pieces.append(piece)

    with caplog.at_level(logging.ERROR, "thalweg.client"), pytest.raises(NumericalError) as raised:
        asyncio.run(serve())
    assert (
        [piece.ids for piece in pieces] == [(300,)]
        and not front.running
        and sum(one.name == "thalweg.client" for one in caplog.records) == 1
    )
    problem = api_error(raised.value)
    assert (problem.status, problem.code) == (500, "nan_output") and "NaN" in problem.message


def test_commands_say_that_a_checkpoint_computes_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing answer is neither an empty one nor a wrong one."""
    for file in Path(MODEL).iterdir():
        (tmp_path / file.name).symlink_to(file.resolve())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"].fill_(torch.nan)
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    words = [str(tmp_path), "--device", "cpu", "--threads", "1"]
    assert cli.main(["generate", *words, "--prompt", "27 + 58 =", "--max-tokens", "4"]) == 1
    assert "the model computed NaN" in capsys.readouterr().err
    assert evaluation.main([*words, "--tasks", "sums", "--items", "2"]) == 1
    assert "the model computed NaN" in capsys.readouterr().err
    assert one_batch.main([*words, "--batch-size", "2", "--input-len", "8", "--output-len", "4"]) == 1
    assert "the model computed NaN" in capsys.readouterr().err
