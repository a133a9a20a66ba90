"""Examples of every page that no other test runs: commands are read by their parser, curl bodies by their route, programs
are run. README and all of docs/.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from starlette.datastructures import Headers

from thalweg.bench.command import CommandParser
from thalweg.cli import COMMANDS, main
from thalweg.config import args as config_args
from thalweg.config.server import ServerOptions
from thalweg.config.tree import options_from, read_yaml
from thalweg.server.api_keys import ApiKeys
from thalweg.server.app import ROUTES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_ELSEWHERE = ("render", "parse")  # test_docs_native.py
SHELL = re.compile(r"```(?:sh|bash)\n(.*?)```", re.S)


def commands() -> Iterator[tuple[str, str]]:
    """(page, command) of the shell blocks, with continued lines and quoted newlines joined."""
    for page in PAGES:
        for block in SHELL.findall(page.read_text(encoding="utf-8")):
            text = ""
            for line in block.splitlines():
                text = f"{text}\n{line}" if text else line
                if text.endswith("\\"):
                    text = text[:-1]
                elif text.count("'") % 2 == 0 or text.lstrip().startswith("#"):
                    yield page.name, text
                    text = ""


ALL = list(commands())
TYPED = [(page, text) for page, text in ALL if re.match(r"(?:[A-Z_]+=\S+ )*thalweg ", text)]
CURLS = [(page, text) for page, text in ALL if text.startswith("curl ")]
PYTHON = [(page, text) for page, text in ALL if re.match(r"(?:[A-Z_]+=\S+ )*python ", text)]
EXTRAS = [(page, extra) for page, text in ALL for extra in re.findall(r"pip install .*?(?:thalweg|\.)\[(\w+)\]", text)]
MAKE = [(page, text) for page, text in ALL if text.startswith("make ")]


class Parsed(Exception):
    """A command line was read without an error."""


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands end once they have read their command line."""

    def end(*args: Any, **fields: Any) -> NoReturn:
        raise Parsed

    parse: Callable[..., tuple[Any, list[str]]] = CommandParser.parse_known_args

    def parse_and_end(self: CommandParser, words: Any = None, namespace: Any = None) -> NoReturn:
        _, unknown = parse(self, words, namespace)
        if unknown and not self.prog.endswith("startup"):  # which passes them on to the server
            self.error(f"unrecognized arguments: {unknown[0]}")
        raise Parsed

    monkeypatch.setattr(config_args, "ParsedOptions", end)
    monkeypatch.setattr(CommandParser, "parse_known_args", parse_and_end)
    monkeypatch.chdir(ROOT)


def test_there_are_examples() -> None:
    assert len(TYPED) > 60 and len(CURLS) > 15 and len(MAKE) > 5 and len(PYTHON) > 3 and EXTRAS


@pytest.mark.parametrize(("page", "text"), TYPED, ids=[f"{page}-{i}" for i, (page, _) in enumerate(TYPED)])
def test_each_command_is_one_that_its_parser_reads(
    page: str, text: str, parse_only: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(re.split(r"\s(?:\||>|&&?|2>)\s?", text)[0], comments=True)
    words = words[words.index("thalweg") + 1 :]
    if words[0] in RUN_ELSEWHERE:
        return
    assert words[0] in COMMANDS
    with pytest.raises((Parsed, SystemExit)) as ended:
        status = main(words)
        pytest.fail(f"{text}: status {status}: {capsys.readouterr().err}")
    assert ended.type is Parsed or ended.value.code == 0, capsys.readouterr().err  # type: ignore[attr-defined]


@pytest.mark.parametrize(("page", "text"), CURLS, ids=[f"{page}-{i}" for i, (page, _) in enumerate(CURLS)])
def test_each_curl_body_is_one_that_its_route_takes(page: str, text: str) -> None:
    words = shlex.split(text)
    path = next(word for word in words if word.startswith("http")).split("30000", 1)[1].partition("?")[0]
    body = words[words.index("-d") + 1] if "-d" in words else None
    method = words[words.index("-X") + 1] if "-X" in words else "POST" if body else "GET"
    (route,) = [one for one in ROUTES if one.path == path and one.method == method]
    if body is not None and route.body is not None:
        kind: type[Any] = route.body
        decoded = msgspec.json.decode(body, type=kind)
        known = {field.encode_name for field in msgspec.structs.fields(kind)}
        assert set(msgspec.json.decode(body)) <= known and isinstance(decoded, kind)


@pytest.mark.parametrize(("page", "text"), MAKE)
def test_each_make_target_exists(page: str, text: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in shlex.split(text, comments=True)[1:]:
        assert "=" in word or re.search(rf"^{re.escape(word)}:", makefile, re.M), word


@pytest.mark.parametrize(("page", "text"), PYTHON, ids=[f"{page}-{i}" for i, (page, _) in enumerate(PYTHON)])
def test_each_program_exists_and_knows_its_flags(page: str, text: str) -> None:
    words = shlex.split(re.split(r"\s(?:\||>|&&?|2>)\s?", text)[0], comments=True)
    words = words[words.index("python") + 1 :]
    if words[0] == "-c":
        return
    found = importlib.util.find_spec(words[1]) if words[0] == "-m" else None
    path = ROOT / words[0] if words[0] != "-m" else Path(found.origin if found and found.origin else "missing")
    assert path.is_file(), text
    if not path.is_relative_to(ROOT) or ".venv" in path.parts:
        return  # a library's
    folder = [path, *path.parent.rglob("*.py")] if path.name == "__init__.py" else [path]
    source = "".join(one.read_text(encoding="utf-8") for one in folder)
    package = path.parent / "__main__.py"
    source += package.read_text(encoding="utf-8") if path.name == "__init__.py" and package.exists() else ""
    for flag in (word.partition("=")[0] for word in words[1:] if word.startswith("--")):
        assert f'"{flag}"' in source or re.search(rf"^{flag}\s", source, re.M), f"{flag} in {text}"


@pytest.mark.parametrize(("page", "extra"), EXTRAS)
def test_each_extra_can_be_installed(page: str, extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert extra in project["optional-dependencies"]


def test_files_of_settings_and_of_keys(tmp_path: Path) -> None:
    """As --config and --api-keys-file read them."""

    def block(page: str) -> Path:
        (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.S)
        path = tmp_path / page
        path.write_text(text, encoding="utf-8")
        return path

    settings = read_yaml(block("configuration.md"))
    assert settings["max_running_requests"] == 32 and options_from(settings) != options_from({})
    keys = ApiKeys(ServerOptions(api_keys_file=str(block("security.md"))))
    found = keys.find(Headers({"x-api-key": "sk-3f0c9a2e"}))
    assert found is not None and found.name == "batch" and found.entry.private_cache


def test_the_program_of_several_ranks(tmp_path: Path) -> None:
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/several_gpus.md").read_text(encoding="utf-8"), re.S)
    (path := tmp_path / "program.py").write_text(text, encoding="utf-8")
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(path)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and len(done.stdout.strip()) > 5, done.stderr


def test_programs() -> None:
    """Those of README and of docs/configuration.md, in one process."""
    pages = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/configuration.md"))
    command = [sys.executable, "-c", "\n".join(re.findall(r"```python\n(.*?)```", pages, re.S))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "68" in done.stdout, done.stderr
