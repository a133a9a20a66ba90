"""Links and file names in the documentation exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
FILE = re.compile(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|json|yaml|md|toml))`")
FOLDERS = {path.name for path in (*ROOT.iterdir(), *(ROOT / "thalweg").iterdir()) if path.is_dir()}


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_of_a_page_exist(page: Path) -> None:
    wrong = []
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            wrong.append(f"{target}#{anchor}" if anchor else target)
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_files_named_on_a_page_exist(page: Path) -> None:
    names = {name for name in FILE.findall(page.read_text(encoding="utf-8")) if name.partition("/")[0] in FOLDERS}
    assert not {name for name in names if not (ROOT / name).exists() and not (ROOT / "thalweg" / name).exists()}
