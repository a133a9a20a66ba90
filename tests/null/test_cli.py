"""The command line without an engine: help, version, misspelt commands and flags."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from thalweg import __version__
from thalweg.cli import COMMANDS, main
from thalweg.config.tree import settings
from thalweg.text.parser import REASONING_FORMATS, TOOL_FORMATS

ROOT = Path(__file__).parents[2]


def test_help_lists_every_command_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out and command.summary in out for name, command in COMMANDS.items())
    assert "thalweg run models/tiny" in out
    assert main([]) == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n" * 2


@pytest.mark.parametrize("command", ["serve", "plan", "generate", "chat", "run"])
def test_help_of_a_command_shows_examples_and_defaults(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert f"thalweg {command} models/tiny" in out and "(default: " in out and "--model DIR" in out
    assert ("--port" in out) == (command == "serve")


def test_help_does_not_load_torch() -> None:
    """Best of three: nothing heavy is imported. Measured 0.05 s of processor time on an idle core."""
    script = (
        "import sys, time; from thalweg.cli import main; main(['--help']); print(time.process_time(), 'torch' in"
        " sys.modules)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
        for _ in range(3)
    ]
    seconds, torch = zip(*(run.stdout.split()[-2:] for run in runs), strict=True)
    assert min(map(float, seconds)) < 0.3
    assert set(torch) == {"False"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["plam"], ("unknown command 'plam'", "plan")),
        (["xyzzy"], ("unknown command", "--help")),
        (["plan", "models/tiny", "--portt", "3"], ("unknown flag --portt",)),
        (["plan", "models/tiny", "--port", "3"], ("unknown flag --port",)),
        (["serve", "models/tiny", "--page-size", "1"], ("--page-size: must be one of", "64")),
        (["serve", "--config", "/nowhere.yaml"], ("/nowhere.yaml", "No such file")),
        (["generate", "models/tiny", "--prompt-file", "/nowhere"], ("--prompt-file /nowhere", "No such file")),
        (["generate", "models/tiny", "--prompt", ""], ("no prompt", "--prompt")),
        (["generate", "models/tiny", "--prompt", "a", "--top-k", "x"], ("--top-k", "invalid")),
    ],
)
def test_mistakes_are_answered_in_one_line(
    argv: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("thalweg: "), lines
    assert all(word in lines[0] for word in words), lines[0]


def test_help_explains_each_choice_on_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for one in settings().values():
        assert set(one.choices) <= set(one.meanings) or len(one.choices) < 2, f"{one.name}: a choice without a meaning"
        for name, meaning in one.meanings.items():
            assert any(line.startswith(f"{name}: {meaning[:20]}") for line in lines), (one.name, name)


def test_backends_and_parsers_are_explained_where_they_are_known() -> None:
    of_text = {"reasoning_parser": REASONING_FORMATS, "tool_call_parser": TOOL_FORMATS}
    for name, known in of_text.items():
        assert set(settings()[name].meanings) == {*known, "none"}


@pytest.mark.parametrize("name", ["serving", "serve"])
def test_bench_serving_takes_the_arguments_of_sglang_and_vllm(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = """--backend vllm --dataset-name random --num-prompts 3 --request-rate 4 --random-input-len 8
        --random-output-len 8 --max-concurrency 2 --ignore-eos --base-url http://127.0.0.1:9""".split()
    assert main(["bench", name, *words]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_help_lists_a_command_s_own_flags_before_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    shown = capsys.readouterr().out
    assert shown.index("This command:") < shown.index("--online ") < shown.index("--chat-template ")
