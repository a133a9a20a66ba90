"""Runs the examples of docs/native.md and docs/text.md; only the address is replaced."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cpu.fakes import FakeFront, default_script, fake_app, serving
from thalweg.server.protocol import GenerateRequest, GenerationRefusedFields, NativeSampling

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/native.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
COMMANDS = [line for block in BLOCKS for line in re.split(r"\n(?=curl )", block)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(fake_app(FakeFront())) as url:
        yield url


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_curl(address: str, command: str) -> None:
    line = command.replace("http://127.0.0.1:30000", address).replace("curl ", "curl --silent --show-error ", 1)
    run = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=20, check=True)
    answer = json.loads(run.stdout)
    assert "error" not in answer, answer
    if "/generate" not in command:
        return
    answers = answer if isinstance(answer, list) else [answer]
    assert len(answers) == (3 if '"n": 2' in command else 1)
    for one in answers:
        assert {f"meta_info.{name}" for name in one["meta_info"] if "logprob" not in name} | {"text", "output_ids"} == {
            "text", "output_ids", "meta_info.id", "meta_info.finish_reason", "meta_info.prompt_tokens",
            "meta_info.completion_tokens", "meta_info.cached_tokens", "meta_info.e2e_latency",
        }  # fmt: skip
    if "return_logprob" in command:
        meta = answer["meta_info"]
        assert len(meta["input_token_logprobs"]) == 18 and meta["input_token_logprobs"][0][0] is None
        assert len(meta["output_token_logprobs"]) == 4 and meta["output_token_logprobs"][0][2] == "A"


def test_python(address: str) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    program = program.replace("http://127.0.0.1:30000", address)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert run.stdout == default_script("Once upon a time", 0) + "\n"


def test_every_field_is_on_the_page() -> None:
    hidden = {
        *GenerationRefusedFields.__struct_fields__,
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    }
    hidden.add("structured_outputs")  # vLLM's names for the same, in structured-output.md
    for name in {*GenerateRequest.__struct_fields__, *NativeSampling.__struct_fields__} - hidden:
        assert f"`{name}`" in PAGE, name


def test_the_commands_of_the_text_page() -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/text.md").read_text(encoding="utf-8"), re.S)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = ["bash", "-euo", "pipefail", "-c", block]
    done = subprocess.run(run, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "<｜User｜>Hello<｜Assistant｜>" in done.stdout, done.stderr
    assert "So it is." in done.stdout
