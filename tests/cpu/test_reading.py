"""How much a newcomer reads: the reading list of docs/architecture.md, and the files of one greedy token."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from thalweg.core.sampling import SamplingParams
from thalweg.llm import LLM

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "thalweg"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CEILINGS = yaml.safe_load((ROOT / "tools" / "ceilings.yaml").read_text(encoding="utf-8"))["reading"]


def lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def test_the_reading_list_is_short() -> None:
    section = PAGE.partition("## Reading list")[2].partition("\n## ")[0]
    files = re.findall(r"^\| `([\w/]+\.py)` \|", section, re.M)
    assert len(files) == 7
    assert sum(lines(PACKAGE / file) for file in files) <= CEILINGS["list_lines"]
    assert len(PAGE.split()) <= CEILINGS["page_words"]


def test_a_greedy_token_passes_through_few_files() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    llm = LLM(str(ROOT / "models" / "tiny"), threads=1)
    llm.generate(["the king"], params)  # what runs once is not counted
    files: set[Path] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            files.add(Path(frame.f_code.co_filename))

    sys.setprofile(note)
    try:
        llm.generate(["a prompt of other words"], params)
    finally:
        sys.setprofile(None)
    shown = "\n".join(sorted(f"{lines(file):5} {file.relative_to(PACKAGE)}" for file in files))
    assert len(files) <= CEILINGS["token_files"], shown
    assert sum(map(lines, files)) <= CEILINGS["token_lines"], shown
