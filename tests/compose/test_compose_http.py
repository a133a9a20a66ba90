"""Every pair of request features over HTTP, against a server with small chunks, few pages and overlap, gives the plain
engine's tokens.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.compose.covering import covering
from thalweg.core.sampling import SamplingParams
from thalweg.llm import LLM

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "When in disgrace with fortune and men's eyes, I all alone beweep my outcast state. " * 3
SERVERS = {
    "overlap": ("--enable-overlap-schedule", "--chunked-prefill-size", "48", "--max-total-tokens", "768"),
    "plain": ("--disable-radix-cache", "--schedule-policy", "priority", "--max-running-requests", "3"),
}
CASES = covering(
    {
        "stream": [True, False],
        "seed": [None, 3],
        "n": [1, 2],
        "logprobs": [None, 2],
        "echo": [True, False],
        "penalty": [0.0, 0.5],
        "as_ids": [True, False],
    },
    seed=5,
)


@pytest.fixture(scope="module", params=list(SERVERS))
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    command = [
        sys.executable,
        "-m",
        "thalweg",
        "serve",
        "--model",
        "models/tiny",
        "--port",
        "0",
        "--context-length",
        "512",
    ]
    process = subprocess.Popen(
        [*command, *SERVERS[request.param]],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if "try " in line:
            break
    found = re.search(r"http://[0-9.:]+", said)
    assert found, said
    yield found[0]
    process.terminate()
    assert process.wait(30) == 0


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(ROOT / "models" / "tiny"), context_length=512, disable_radix_cache=True)


def body_of(case: dict[str, Any], llm: LLM) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": list(llm.get_tokenizer().encode(PROMPT)) if case["as_ids"] else PROMPT,
        "max_tokens": 90,
        "temperature": 0.0 if case["seed"] is None else 0.9,
        "top_p": 1.0,  # the checkpoint recommends less, which a server takes and LLM does not
        "n": case["n"],
        "frequency_penalty": case["penalty"],
        "echo": case["echo"],
        "stream": case["stream"],
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return body | {name: case[name] for name in ("seed", "logprobs") if case[name] is not None}


def ask(url: str, body: dict[str, Any]) -> list[list[int]]:
    """The token ids of each choice."""
    ids: list[list[int]] = [[] for _ in range(body["n"])]
    if not body["stream"]:
        answer = httpx.post(url + "/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            ids[choice["index"]] = choice["token_ids"]
        return ids
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=120) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    ids[choice["index"]] += choice.get("token_ids") or []
    return ids


def test_every_way_of_asking_gives_the_plain_engines_tokens(url: str, llm: LLM) -> None:
    bodies = [body_of(case, llm) for case in CASES]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: ask(url, body), bodies))
    different = 0
    for body, answer in zip(bodies, answers, strict=True):
        params = SamplingParams(
            temperature=body["temperature"],
            seed=body.get("seed"),
            n=body["n"],
            frequency_penalty=body["frequency_penalty"],
            max_tokens=body["max_tokens"],
            ignore_eos=True,
        )
        want = [choice.token_ids for choice in llm.generate(PROMPT, params)[0].outputs]
        different += answer != want
    assert different <= 1, f"{different} of {len(bodies)} differ; a near tie of the model may move one at most"
