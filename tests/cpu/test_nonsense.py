"""Checkpoints that hold nonsense: one line that names file and field, at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from thalweg.cli import main
from thalweg.text.tokenizer import Tokenizer

TINY = Path(__file__).parents[2] / "models" / "tiny"
SECONDS = 60
DEEP, LONG = "[" * 100_000 + "]" * 100_000, "9" * 5000  # LONG: Python refuses to read so many digits
Content = str | Callable[[Path], object]


@contextmanager
def at_once() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise TimeoutError(f"it took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def checkpoint(folder: Path, files: dict[str, Content]) -> Path:
    """The bundled model with other files."""
    for path in TINY.iterdir():
        (folder / path.name).symlink_to(path)
    for name, content in files.items():
        (folder / name).unlink(missing_ok=True)
        if isinstance(content, str):
            (folder / name).write_text(content)
        else:
            content(folder / name)
    return folder


def with_value(name: str, path: str, literal: str) -> str:
    """The bundled file `name` with a JSON literal at `path`."""
    value: Any = json.loads((TINY / name).read_text())
    inner, *keys = value, *path.split(".")
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = "@"
    return json.dumps(value).replace('"@"', literal)


def refusal(folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """The one line with which `thalweg plan` ends."""
    capfd.readouterr()
    with at_once():
        status = main(["plan", str(folder)])
    (line,) = capfd.readouterr().err.splitlines()
    assert status == 1 and line.startswith(f"thalweg: {folder}/") and len(line) < 1000, line
    return line


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def unix_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


FILES = "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.json"


@pytest.mark.parametrize("kind", [fifo, endless, loop, unix_socket, Path.mkdir, DEEP, '{"a":' * 50_000, "\0", "[]"])
def test_a_file_that_is_none_is_named(kind: Content, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in (*FILES, "chat_template.jinja")[: None if callable(kind) else len(FILES)]:
        (folder := tmp_path / name).mkdir()
        assert f"{folder / name}" in refusal(checkpoint(folder, {name: kind}), capfd)


NUMBERS = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group", "index_n_heads"),
    *("index_head_dim", "index_topk", "max_position_embeddings", "num_nextn_predict_layers", "rms_norm_eps"),
    *("eos_token_id", "bos_token_id", "rope_theta", "routed_scaling_factor"),
)
ROPE = "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings"


@pytest.mark.parametrize("literal", [LONG, "1e300", "NaN", "-Infinity", "1" + "0" * 18, '"x"', f"[[{LONG}]]"])
def test_a_number_that_none_has_is_named(literal: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cases = [("config.json", name) for name in NUMBERS]
    cases += [("config.json", f"rope_scaling.{name}") for name in ROPE]
    cases += [("generation_config.json", name) for name in ("temperature", "top_p", "eos_token_id")]
    for name, path in cases:
        (folder := tmp_path / f"{name}-{path}").mkdir()
        line = refusal(checkpoint(folder, {name: with_value(name, path, literal)}), capfd)
        assert name in line and path.rpartition(".")[2] in line, line


@pytest.mark.parametrize(
    ("name", "path", "literal"),
    [
        ("config.json", "max_position_embeddings", "1" + "0" * 9),
        ("config.json", "num_hidden_layers", "1000000000"),
        ("config.json", "num_nextn_predict_layers", "1000000"),
        ("config.json", "n_routed_experts", "1000000000"),
        ("config.json", "eos_token_id", "1000000000"),
        ("generation_config.json", "eos_token_id", "1000000000"),
        ("generation_config.json", "eos_token_id", json.dumps(list(range(1000)))),
        ("generation_config.json", "bos_token_id", "-1"),
        ("config.json", "rope_scaling.original_max_position_embeddings", "0"),
        ("tokenizer_config.json", "added_tokens_decoder", '{"x": {"content": "a"}}'),
        ("tokenizer_config.json", "added_tokens_decoder", f'{{"{LONG}": {{"content": "a"}}}}'),
        ("tokenizer_config.json", "added_tokens_decoder", "[1]"),
        ("tokenizer.json", "model.vocab.a", "4000000000"),
    ],
)
def test_a_value_that_would_take_all_memory_or_time_is_named(
    name: str, path: str, literal: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = refusal(checkpoint(tmp_path, {name: with_value(name, path, literal)}), capfd)
    assert name in line and (name == "tokenizer.json" or path.rpartition(".")[2] in line), line


def test_a_tokenizer_that_pads_and_cuts_does_neither_here(tmp_path: Path) -> None:
    content = json.loads((TINY / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    content["padding"] = padding | {"pad_type_id": 0, "pad_token": "x"}
    folder = checkpoint(tmp_path, {"tokenizer.json": json.dumps(content)})
    text = "To be, or not to be, that is the question"
    assert Tokenizer(folder).encode(text) == Tokenizer(TINY).encode(text)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*$"])
def test_a_pattern_that_takes_exponential_time_is_refused(pattern: str, tmp_path: Path) -> None:
    """In a process of its own, which ends even if the pattern is still at work. The library may write of a panic."""
    content = json.loads((TINY / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    folder = checkpoint(tmp_path, {"tokenizer.json": json.dumps(content | {"pre_tokenizer": split})})
    command = [sys.executable, "-m", "thalweg", "plan", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=TINY.parents[1], check=False)
    assert done.returncode == 1, done.stderr
    says = f"thalweg: {folder / 'tokenizer.json'}: pre_tokenizer or normalizer: on texts of 48 characters it "
    assert done.stderr.splitlines()[-1].startswith(says) and "Traceback" not in done.stderr, done.stderr
