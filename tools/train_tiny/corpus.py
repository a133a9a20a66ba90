"""The public-domain texts as paragraphs, dialogues and plain text, split by position.

A text is cut into sections of 40 paragraphs; the hash of (text, section number) puts a section into training or holds
it out, so a held-out speech never shares a page with training text. `python -m tools.train_tiny.corpus FOLDER` writes
the held-out dialogues that `thalweg eval` uses to `thalweg/bench/dialogue_held_out.json`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

_SECTION = 40
_HELD_OUT_ONE_IN = 6
_MAX_SPEECH = 360  # characters; longer speeches end at the last sentence that fits
_MIN_SPEECH = 8
_QUOTED = re.compile(r'"([^"]+)(?:"|$)')
_HELD_OUT_FILE = Path(__file__).parents[2] / "thalweg" / "bench" / "dialogue_held_out.json"


@dataclass(frozen=True)
class Section:
    """Consecutive paragraphs of one text. `runs` are its conversations: lists of speeches that answer each other."""

    text: str
    runs: tuple[tuple[str, ...], ...]
    held_out: bool


def read_sections(folder: Path) -> list[Section]:
    """All sections of the `.txt` files of a folder, in order.

    Raises:
        FileNotFoundError: the folder holds no text.
    """
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise FileNotFoundError(
            f"no .txt file in {folder}: give the folder that holds the corpus (see tools/train_tiny/README.md)"
        )
    sections: list[Section] = []
    for file in files:
        paragraphs = [p.strip() for p in re.split(r"\n\s*\n", _plain(file.read_text(encoding="utf-8"))) if p.strip()]
        is_play = "shakespeare" in file.name
        for start in range(0, len(paragraphs), _SECTION):
            part = paragraphs[start : start + _SECTION]
            digest = hashlib.sha256(f"{file.name} {start}".encode()).digest()
            text = "\n\n".join(part if is_play else (" ".join(p.split()) for p in part))
            sections.append(Section(text, _runs(part, is_play), digest[0] % _HELD_OUT_ONE_IN == 0))
    return sections


def _plain(text: str) -> str:
    return text.translate({0x201C: '"', 0x201D: '"', 0x2018: "'", 0x2019: "'", 0x5F: None, 0x2014: "--"})


def _runs(paragraphs: list[str], is_play: bool) -> tuple[tuple[str, ...], ...]:
    runs: list[list[str]] = [[]]
    for paragraph in paragraphs:
        speech = _speech(paragraph, is_play)
        if speech is None:
            runs.append([])
        else:
            runs[-1].append(speech)
    return tuple(tuple(run) for run in runs if len(run) > 1)


def _speech(paragraph: str, is_play: bool) -> str | None:
    """The words spoken in a paragraph, without speaker and narration; None when it is no speech."""
    if is_play:
        speaker, _, words = paragraph.partition(":\n")
        speech = words if words and "\n" not in speaker else ""
    else:
        speech = " ".join(_QUOTED.findall(" ".join(paragraph.split()))) if paragraph.startswith('"') else ""
    speech = " ".join(speech.split())
    if len(speech) > _MAX_SPEECH:
        end = max(speech.rfind(mark, 0, _MAX_SPEECH) for mark in ".!?")
        speech = speech[: end + 1]
    return speech if len(speech) >= _MIN_SPEECH else None


def held_out_dialogues(sections: list[Section], count: int) -> list[tuple[str, str]]:
    """`count` pairs of speech and answer from held-out sections, shuffled the same way every time.

    Raises:
        ValueError: there are fewer.
    """
    pairs = [(run[i], run[i + 1]) for s in sections if s.held_out for run in s.runs for i in range(len(run) - 1)]
    pairs = list(dict.fromkeys(pairs))
    if len(pairs) < count:
        raise ValueError(f"the corpus has {len(pairs)} held-out pairs of speeches, fewer than {count}")
    Random("dialogue").shuffle(pairs)
    return pairs[:count]


def main() -> None:
    """Write the held-out dialogues from the corpus folder given on the command line."""
    pairs = held_out_dialogues(read_sections(Path(sys.argv[1])), 1024)
    text = "[\n" + ",\n".join(json.dumps(pair, ensure_ascii=False) for pair in pairs) + "\n]\n"
    _HELD_OUT_FILE.write_text(text, encoding="utf-8")
    print(f"{len(pairs)} dialogues, {len(text.encode())} bytes -> {_HELD_OUT_FILE.name}")


if __name__ == "__main__":
    main()
