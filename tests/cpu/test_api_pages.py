"""Runs the examples of docs/anthropic.md and docs/responses.md; only the address is replaced."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cpu.fakes import FakeFront, fake_app, serving

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("anthropic", "responses")}
CALL = (
    'I see.</think>\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="place"'
    ' string="true">Ulm</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)


def script(prompt: str, choice: int) -> str:
    if "<result>sunny</result>" in prompt:
        return "Good.</think>The sun shines in Ulm."
    return CALL if "Ulm" in prompt else "85"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(fake_app(FakeFront(script))) as url:
        yield url


@pytest.mark.parametrize("page", PAGES)
def test_curl(address: str, page: str) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", PAGES[page], re.S)
    commands = [line for block in blocks for line in re.split(r"\n(?=curl )", block)]
    assert commands
    for command in commands:
        line = command.replace("http://127.0.0.1:30000", address).replace("curl ", "curl --silent --show-error ", 1)
        answer = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=20, check=True).stdout
        assert json.loads(answer).get("error") is None, answer


@pytest.mark.parametrize("page", PAGES)
def test_python(address: str, page: str) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGES[page], re.S)
    program = program.replace("http://127.0.0.1:30000", address)
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "The sun shines in Ulm."
