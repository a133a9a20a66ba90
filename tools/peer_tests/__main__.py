"""Runs vLLM's own tests of its HTTP API and Python class against Thalweg with a small model.

    python -m tools.peer_tests --source FOLDER [--write]

FOLDER is an unpacked source distribution of vLLM. Only server, model and fixtures are replaced (`stand_in.py`); the
test files run as they are. Needs pytest-asyncio, pytest-timeout and transformers. --write renews the results under
benchmarks/ and docs/peer_tests.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "benchmarks/cpu/vllm_tests.json"
PAGE = ROOT / "docs/peer_tests.md"
TIMEOUT = 120  # seconds a test


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.peer_tests", description=__doc__.split("\n")[0])
    parser.add_argument("--source", type=Path, required=True, metavar="FOLDER", help="vLLM's source distribution")
    parser.add_argument("--write", action="store_true", help="renew the results and the page")
    parser.add_argument("--only", default="", metavar="TEXT", help="only files with this in their path")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    arguments = parser.parse_args()
    tests = yaml.safe_load((HERE / "tests.yaml").read_text())
    files = [name for name in tests["files"] if arguments.only in name]
    version = re.search(r"^Version: (.*)$", (arguments.source / "PKG-INFO").read_text(), re.MULTILINE)
    results = run(arguments.source, files, ["-k", tests["but"], *arguments.pytest])
    passed = sum(outcome == "passed" for outcome in results.values())
    print(f"{passed} of {len(results)} passed")
    if arguments.write and not arguments.only:
        report = {"vllm": version[1] if version else "", "model": "models/tiny", "passed": passed, "tests": results}
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")
        from tools.peer_tests.page import page

        PAGE.write_text(page(report))
    return 0


def run(source: Path, files: list[str], options: list[str]) -> dict[str, str]:
    """Test id → passed, failed, error or skipped."""
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder) / "tests"
        for name in [*files, "conftest.py", *{f"{Path(name).parent}/conftest.py" for name in files}]:
            if (origin := source / "tests/entrypoints" / name).exists():
                target = tests / "entrypoints" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(origin, target)
        for below in {path.parent for path in tests.rglob("*.py")} | {tests, tests / "entrypoints"}:
            while below != Path(folder):
                (below / "__init__.py").touch()
                below = below.parent
        xml = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-p", "tools.peer_tests.stand_in", f"--junit-xml={xml}", "-q"]
        command += ["-o", "junit_family=xunit1", f"--timeout={TIMEOUT}", "-o", "asyncio_mode=strict", "--tb=short"]
        command += [f"--rootdir={folder}", "-p", "no:cacheprovider", *options]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PEER_TESTS_NAMES": " ".join(model_names(source, files)),
            "PEER_TESTS_MODEL": str(ROOT / "models/tiny"),
            "PEER_TESTS_SOURCE": str(source),
        }
        subprocess.run([*command, *(f"tests/entrypoints/{name}" for name in files)], cwd=folder, env=environment)
        cases = ElementTree.parse(xml).getroot().iter("testcase")
        return {f"{case.get('file')}::{case.get('name')}": outcome(case) for case in cases}


def outcome(case: ElementTree.Element) -> str:
    kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
    return {"failure": "failed"}.get(kinds[0], kinds[0]) if kinds else "passed"


def model_names(source: Path, files: list[str]) -> list[str]:
    """Every name of a model in the files: the server answers to all."""
    texts = [(source / "tests/entrypoints" / name).read_text() for name in files]
    patterns = r'MODEL\w* *= *"([^"]+)"', r'"--served-model-name",\s*"([^"]+)"', r'model_name = "([^"]+)"'
    return sorted({name for text in texts for pattern in patterns for name in re.findall(pattern, text)})


if __name__ == "__main__":
    sys.exit(main())
