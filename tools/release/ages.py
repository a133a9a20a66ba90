"""How old results are, by commits: which commits have changed the code that a result measures since it was measured.

Comments, docstrings and layout are no code.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tools.size import code_of

CHANGED = "+changes"  # behind the commit of a result that was measured in a tree with changes
SHOWN = 3  # commits that are named
TRAILER, UNCHANGED = "Results", "unchanged"  # of a commit that cannot change what was measured, and says why


class NoHistory(Exception):
    """The tree is no git checkout, or does not know a commit."""


def git(root: Path, *words: str) -> str:
    """What git prints. Raises NoHistory."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, errors="surrogateescape", check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoHistory(f"git {' '.join(words)}: {error}") from error
    return done.stdout.strip()


@dataclass(frozen=True, slots=True)
class Age:
    """commits: (hash, title) of those since, the newest first. files: changed and not committed. unsure: the measured
    tree had changes that no commit holds, or the result does not name its commit.
    """

    measured: str
    commits: tuple[tuple[str, str], ...]
    files: tuple[str, ...]
    unsure: str

    @property
    def old(self) -> bool:
        return bool(self.commits or self.files)


def measured_at(root: Path, path: str, result: Mapping[str, Any]) -> tuple[str, str]:
    """(commit that the result was measured at, why that is unsure). A result that does not say counts from the commit
    that brought its file. Raises NoHistory.
    """
    told = str(result.get("commit") or "")
    if told:
        dirty = "the tree had changes when it was measured" if told.endswith(CHANGED) else ""
        return told.removesuffix(CHANGED), dirty
    brought = git(root, "log", "-1", "--format=%H", "--", path)
    return brought, "it does not name its commit, so it counts from the one that brought the file"


def age(root: Path, path: str, result: Mapping[str, Any], code: Sequence[str]) -> Age:
    """Of one result. path: of its file, from root; code: the paths that it measures. One that does not name its commit
    and is not committed as it stands was measured just now. Raises NoHistory.
    """
    if not result.get("commit") and git(root, "status", "--porcelain", "--", path):
        return Age(git(root, "rev-parse", "HEAD"), (), (), "it is not committed yet, and counts as measured now")
    commit, unsure = measured_at(root, path, result)
    names = git(root, "diff", "--name-only", "--no-renames", commit, "HEAD", "--", *code).splitlines()
    files = [name for name in names if _code(root, commit, name) != _code(root, "HEAD", name)]
    form = f"--format=%h%x09%(trailers:key={TRAILER},valueonly,separator=%x2C)%x09%s"
    log = git(root, "log", form, f"{commit}..HEAD", "--", *files) if files else ""
    lines = [line.split("\t", 2) for line in log.splitlines()]
    commits = tuple((short, title) for short, trailer, title in lines if not trailer.startswith(UNCHANGED))
    changed = git(root, "diff", "--name-only", "HEAD", "--", *code).splitlines()
    return Age(commit, commits, tuple(changed), unsure)


@cache
def _code(root: Path, commit: str, name: str) -> str:
    """The code of a file at a commit; "" where it has none."""
    try:
        text = git(root, "show", f"{commit}:{name}")
    except NoHistory:
        return ""
    return "\n".join(code_of(text)) if name.endswith(".py") else text


def words(path: str, one: Age, again: str) -> str:
    """What is to be said of a result, in a sentence or two."""
    doubt = f" ({one.unsure})" if one.unsure else ""
    if not one.old:
        return f"{path}: as new as the code that it measures, commit {one.measured[:7]}{doubt}"
    since = []
    if one.commits:
        named = "; ".join(f'{short} "{title}"' for short, title in one.commits[:SHOWN])
        more = f" and {len(one.commits) - SHOWN} more" if len(one.commits) > SHOWN else ""
        since.append(
            f"{len(one.commits)} commit{'s' if len(one.commits) > 1 else ''} changed that code since: {named}{more}"
        )
    if one.files:
        since.append(f"{len(one.files)} of its files have changes that are not committed, {one.files[0]} among them")
    return (
        f"{path} is older than the code that it measures: of commit {one.measured[:7]}{doubt}, and {'; '.join(since)}."
        f" Measure again: {again}"
    )
