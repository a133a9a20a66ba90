"""Runs the examples of docs/api.md; only the address is replaced."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cpu.fakes import FakeFront, fake_app, serving
from thalweg.server.app import ROUTES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "api.md").read_text(encoding="utf-8")
SHELL = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) for line in re.split(r"\n(?=curl )", block)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(fake_app(FakeFront())) as url:
        yield url


@pytest.mark.parametrize("command", SHELL, ids=range(len(SHELL)))
def test_curl(address: str, command: str) -> None:
    line = command.replace("http://127.0.0.1:30000", address).replace("curl ", "curl --silent --show-error ", 1)
    answer = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=20, check=True).stdout
    assert "error" not in json.loads(answer), answer


def test_python(address: str) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    program = program.replace("http://127.0.0.1:30000", address)
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.startswith("Answer 0: the prompt has")


def test_every_route_has_its_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    for route in ROUTES:
        assert route.path.replace(":path", "") in pages, route.path
