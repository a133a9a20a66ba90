"""python -m tests.gpu.generate FOLDER TOKENS NAME=VALUE ...: generates from some prompts with these settings.
python -m tests.gpu.generate FOLDER FILE NAME=VALUE ...: how much likelier this engine's best token is than each token
that another engine generated (FILE has what that one printed).

The last line is JSON: of each prompt its length and its tokens with what was generated; or nats, one for each token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from thalweg import LLM, SamplingParams

PROMPTS = [[(7 * i + 31 * j) % 1900 + 20 for j in range(20 + 60 * i)] for i in range(4)]


def generate(llm: LLM, tokens: int) -> list[tuple[int, list[int]]]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return [(len(ids), [*ids, *out.outputs[0].token_ids]) for ids, out in zip(PROMPTS, outputs, strict=True)]


def score(llm: LLM, generated: list[tuple[int, list[int]]]) -> list[list[float]]:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": ids} for _, ids in generated], params, use_tqdm=False)
    return [
        [max(one.logprob for one in at.values()) - at[token].logprob for token, at in pairs[length:]]
        for (length, ids), out in zip(generated, outputs, strict=True)
        for pairs in [list(zip(ids, out.prompt_logprobs, strict=True))]
    ]


def main(folder: str, what: str, wishes: list[str]) -> None:
    settings = {name: json.loads(value) for name, _, value in (wish.partition("=") for wish in wishes)}
    sizes = {"context_length": 1024, "max_running_requests": 8, "max_total_tokens": 16384}  # GPUs may have other guests
    with LLM(folder, random_seed=1, **sizes, **settings) as llm:
        done = generate(llm, int(what)) if what.isdecimal() else score(llm, json.loads(Path(what).read_text()))
    print(json.dumps(done))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
