"""Writes docs/peer_tests.md from the results and `reasons.yaml`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
HEAD = """# vLLM's own tests

vLLM's source distribution has tests of its HTTP API and of its Python class. `python -m tools.peer_tests` runs those of
one set against Thalweg. The test files run as they are. Only these are replaced:

- the server: `thalweg serve`, with vLLM's flags translated where they change answers,
- the model: the bundled `models/tiny`, under the names that the tests ask for,
- fixtures: tokenizer, vocabulary size and versions. Other names of `vllm` raise an error when a test uses them.

```sh
pip install pytest-asyncio pytest-timeout
pip download --no-deps --no-binary :all: vllm=={version} && tar xf vllm-{version}.tar.gz
python -m tools.peer_tests --source vllm-{version} --write
```

`--write` renews this page and `benchmarks/cpu/vllm_tests.json`, which has the outcome of each test. The files of the set
stand in `tools/peer_tests/tests.yaml`; `tools/peer_tests/reasons.yaml` says why a test fails.
"""


def page(report: Mapping[str, Any]) -> str:
    """report: as in benchmarks/cpu/vllm_tests.json."""
    tests: Mapping[str, str] = report["tests"]
    reasons: Mapping[str, Mapping[str, str]] = yaml.safe_load((HERE / "reasons.yaml").read_text())
    failed = {name: reason_of(name, reasons) for name, outcome in tests.items() if outcome != "passed"}
    lines = [HEAD.format(version=report["vllm"]), "## Result\n"]
    lines.append(f"vLLM {report['vllm']}: **{report['passed']} of {len(tests)} passed**.\n")
    lines += ["| why not | tests |", "| --- | --- |"]
    for kind, about in reasons["kinds"].items():
        lines.append(f"| {about} | {sum(reason[0] == kind for reason in failed.values())} |")
    for kind, about in reasons["kinds"].items():
        of_kind = [(name, why) for name, (found, why) in failed.items() if found == kind]
        if of_kind:
            lines += [f"\n## {about[0].upper()}{about[1:]}\n", "| test | why |", "| --- | --- |"]
            lines += [f"| `{short(name)}` | {why} |" for name, why in of_kind]
    return "\n".join(lines) + "\n"


def reason_of(name: str, reasons: Mapping[str, Mapping[str, str]]) -> tuple[str, str]:
    """(kind, why): of the longest pattern that is found in the test's name."""
    found = max((pattern for pattern in reasons["tests"] if re.search(pattern, name)), key=len, default="")
    kind, _, why = reasons["tests"].get(found, "open: not looked into").partition(": ")
    return kind, why


def short(name: str) -> str:
    return name.removeprefix("tests/entrypoints/").replace("|", "\\|")
