"""Tokenizer, detokenizer and stop strings, against the library and the whole text."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from thalweg.core.errors import CheckpointError, InvalidRequest
from thalweg.text.detokenize import StopMatcher
from thalweg.text.tokenizer import Tokenizer

BOS, EOS, THINK = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<think>"
CORPUS = [
    "the ship sails down the river, 漢字 and é and 👩‍👩‍👧 and naïve café — the river runs",
    "hello hello river",
] * 3


def library() -> Library:
    made = Library(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens([AddedToken(THINK, special=True, normalized=False)])
    made.add_tokens([AddedToken("｜DSML｜", normalized=False), AddedToken("two words", normalized=False)])
    return made


def write(folder: Path, made: Library, **config: Any) -> Path:
    made.save(str(folder / "tokenizer.json"))
    declared = {"bos_token": BOS, "eos_token": {"content": EOS}, "add_bos_token": True} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(declared), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tokenizer"), library())


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def pieces(ids: list[int], rng: random.Random) -> list[list[int]]:
    edges = sorted({0, len(ids), *(rng.randrange(len(ids) + 1) for _ in range(rng.randrange(5)))})
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def test_bos_is_put_in_front_once(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("river", add_special=False)
    assert plain and tokenizer.bos_id not in plain
    assert tokenizer.encode("river") == [tokenizer.bos_id, *plain] == tokenizer.encode(BOS + "river")
    assert tokenizer.encode("") == [tokenizer.bos_id]
    assert tokenizer.encode(BOS + "river", add_special=False) == [tokenizer.bos_id, *plain]


def test_bos_follows_the_files(tmp_path: Path) -> None:
    off = Tokenizer(write(tmp_path, library(), add_bos_token=False))
    assert off.bos_id not in off.encode("river")
    made = library()
    made.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    by_template = Tokenizer(write(tmp_path, made, add_bos_token=None))
    assert by_template.encode("river")[0] == by_template.bos_id == 0


def test_ids_of_special_tokens(tokenizer: Tokenizer, folder: Path, tmp_path: Path) -> None:
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (1,))
    assert tokenizer.special_ids == {0, 1, tokenizer.token_id(THINK)}
    assert tokenizer.special_tokens == {"bos_token": BOS, "eos_token": EOS}
    assert tokenizer.vocab_size == library().get_vocab_size(with_added_tokens=True)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 8]}')
    assert Tokenizer(tmp_path).eos_ids == (1, 7, 8, 9)


def test_tokens_that_only_the_config_declares(tmp_path: Path) -> None:
    made = library()
    new = made.get_vocab_size(with_added_tokens=True)
    declared = {str(new): {"content": "<|new|>", "special": True}}
    found = Tokenizer(write(tmp_path, made, added_tokens_decoder=declared))
    assert found.encode("<|new|>", add_special=False) == [new] and new in found.special_ids


@pytest.mark.parametrize("name, text, said", [
    ("tokenizer.json", None, "missing"),
    ("tokenizer.json", "{", "not a tokenizer"),
    ("tokenizer_config.json", "{", "not JSON"),
    ("tokenizer_config.json", "[]", "must hold a JSON object"),
    ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id"),
])  # fmt: skip
def test_broken_files_are_named(folder: Path, tmp_path: Path, name: str, text: str | None, said: str) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink(missing_ok=True)
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"{name}.*{said}"):
        Tokenizer(tmp_path)


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="prompt.*character 1"):
        tokenizer.encode("a\ud800")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 340), max_size=40), st.booleans(), st.randoms(use_true_random=False))
def test_pieces_join_to_the_whole_decode(
    tokenizer: Tokenizer, folder: Path, ids: list[int], skip: bool, rng: random.Random
) -> None:
    known = [i for i in ids if i < tokenizer.vocab_size]
    whole = Library.from_file(str(folder / "tokenizer.json")).decode(known, skip_special_tokens=skip)
    detokenizer = tokenizer.detokenizer(skip)
    assert "".join([*map(detokenizer.feed, pieces(ids, rng)), detokenizer.finish()]) == whole
    assert tokenizer.decode(ids, skip) == whole


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_text_survives_and_no_character_comes_in_halves(tokenizer: Tokenizer, text: str) -> None:
    assume(
        not re.search("<.+>", text)
    )  # a special token, which is not shown; hypothesis knows the constants of modules
    detokenizer = tokenizer.detokenizer()
    shown = [detokenizer.feed([i]) for i in tokenizer.encode(text)]
    assert "".join(shown) == text and detokenizer.finish() == ""
    assert not [piece for piece in shown if "\ufffd" in piece] or "\ufffd" in text


def test_a_character_that_never_ends_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a👩", add_special=False)
    for end in range(2, len(ids)):
        detokenizer = tokenizer.detokenizer()
        assert detokenizer.feed(ids[:end]) == "a" and detokenizer.finish() == "\ufffd"
    detokenizer = tokenizer.detokenizer()
    detokenizer.feed(ids[:-1])
    assert detokenizer.feed(tokenizer.encode("b", add_special=False)) == "\ufffdb"  # nothing is held for ever


def test_which_special_tokens_are_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(BOS + THINK + "a｜DSML｜two words" + EOS)
    think = tokenizer.token_id(THINK)
    assert think is not None
    assert tokenizer.detokenizer().feed(ids) == "a｜DSML｜two words"
    assert tokenizer.detokenizer(False).feed(ids) == BOS + THINK + "a｜DSML｜two words" + EOS
    assert [tokenizer.token_bytes(i).decode() for i in ids[:2]] == [BOS, THINK]


@pytest.fixture(scope="module")
def sentencepiece_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made = Library(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", BOS, EOS, *(f"<0x{b:02X}>" for b in range(256))]
    made.train_from_iterator(
        ["the river runs to the sea"] * 3,
        trainers.BpeTrainer(special_tokens=special, vocab_size=320, show_progress=False),
    )
    return Tokenizer(write(tmp_path_factory.mktemp("sentencepiece"), made))


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="the rivsaun漢é👩", max_size=20), st.randoms(use_true_random=False))
def test_other_decoders_join_too(sentencepiece_like: Tokenizer, text: str, rng: random.Random) -> None:
    ids = sentencepiece_like.encode(text, add_special=False)
    detokenizer = sentencepiece_like.detokenizer(False)
    joined = "".join([*map(detokenizer.feed, pieces(ids, rng)), detokenizer.finish()])
    assert joined == sentencepiece_like._library.decode(ids, skip_special_tokens=False)


def whole_cut(text: str, stops: list[str], include: bool, behind: int) -> tuple[str, str | None]:
    """The definition: the stop string that is complete first behind so many characters, the longest of those."""
    for end in range(behind + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="abc", max_size=20),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_stop_strings_cut_as_on_the_whole_text(text: str, stops: list[str], include: bool, rng: random.Random) -> None:
    edges = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(4))})
    behind = rng.choice((0, *edges))  # as min_tokens
    matcher = StopMatcher(stops, include_stop=include)
    shown, fed = "", ""
    for a, b in itertools.pairwise(edges):
        cut = matcher.feed(text[a:b], may_stop=a >= behind)
        shown, fed = shown + cut.text, fed + text[a:b]
        if cut.stop is not None:
            break
        held = fed[len(shown) :]  # no more than what may still become a stop string
        assert not held or any(stop.startswith(held) for stop in stops)
    else:
        shown += matcher.finish()
        cut = None
    assert (shown, cut.stop if cut else None) == whole_cut(text, stops, include, behind)


def test_a_stop_string_that_overlaps_itself() -> None:
    for stop, text in (("aab", "aaab"), ("abac", "ababac"), ("aabaac", "aabaabaac")):
        matcher = StopMatcher([stop])
        cuts = [matcher.feed(char) for char in text]
        assert (cuts[-1].stop, "".join(cut.text for cut in cuts)) == (stop, text.removesuffix(stop))


def test_a_long_stop_string_costs_no_more(tokenizer: Tokenizer) -> None:
    matcher = StopMatcher(["a" * 20000 + "b"])
    shown = sum(len(matcher.feed("a").text) for _ in range(40000))
    assert shown == 20000 and matcher.feed("b").stop == "a" * 20000 + "b"


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    library().save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = Tokenizer(tmp_path), "the ship sails down the river, 漢字 and é. " * 8000
    working = threading.Thread(target=tokenizer.encode, args=(text,), daemon=True)
    ticks = 0
    working.start()
    while working.is_alive():
        time.sleep(0.002)
        ticks += 1
    assert ticks > 10, "the encoder held the interpreter"
