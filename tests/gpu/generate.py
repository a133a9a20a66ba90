"""python -m tests.gpu.generate FOLDER TOKENS NAME=VALUE ...: generates from some prompts with these settings. The last
line has the tokens, and the log-probabilities of the best two at each, as JSON.
"""

from __future__ import annotations

import json
import sys

from thalweg import LLM, SamplingParams


def main(folder: str, tokens: int, wishes: list[str]) -> None:
    settings = {name: json.loads(value) for name, _, value in (wish.partition("=") for wish in wishes)}
    prompts = [{"prompt_token_ids": [(7 * i + 31 * j) % 1900 + 20 for j in range(20 + 60 * i)]} for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=2)
    with LLM(folder, context_length=1024, max_running_requests=8, **settings) as llm:
        outputs = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
    best = [[sorted((one.logprob for one in at.values()), reverse=True)[:2] for at in out.logprobs] for out in outputs]
    print(json.dumps([[list(out.token_ids), two] for out, two in zip(outputs, best, strict=True)]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
