"""The Dockerfile and the Kubernetes example against pyproject, the Makefile, the command line and the routes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from thalweg.config.args import options_parser, parse_options
from thalweg.config.options import ListenOptions, Options
from thalweg.server.app import ROUTES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PATHS = {route.path for route in ROUTES}


def steps() -> Iterator[tuple[str, str]]:
    """(instruction, what follows) of the Dockerfile, continued lines joined."""
    plain = re.sub(r"^#.*\n", "", TEXT, flags=re.M).replace("\\\n", " ")
    return ((line.partition(" ")[0], line.partition(" ")[2].strip()) for line in plain.splitlines() if line)


STEPS = list(steps())


def only(name: str) -> str:
    (found,) = (rest for step, rest in STEPS if step == name)
    return found


def served(argv: list[str]) -> Options:
    assert argv[0] == "serve"
    parsed = parse_options(options_parser("thalweg serve", ""), argv[1:])
    assert not parsed.notices
    return parsed.options


def test_both_variants_are_stages() -> None:
    assert {step for step, _ in STEPS} == {
        "ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "VOLUME", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"
    }  # fmt: skip
    stages = [rest.split(" AS ") for step, rest in STEPS if step == "FROM"]
    assert [stage[0] for stage in stages] == ["python:${PYTHON}-slim", "base", "base", "torch-${VARIANT}"]
    assert {stage[1] for stage in stages[1:3]} == {"torch-cpu", "torch-cuda"}
    defaults = dict(rest.split("=") for step, rest in STEPS if step == "ARG")
    assert defaults["VARIANT"] in ("cpu", "cuda") and f"torch-{defaults['VARIANT']}" in TEXT
    least = tuple(map(int, re.findall(r"\d+", PROJECT["requires-python"])))
    assert tuple(map(int, defaults["PYTHON"].split("."))) >= least


def test_torch_versions_agree_and_are_within_the_bounds() -> None:
    versions = {rest for step, rest in STEPS if step == "ARG" and rest.startswith("TORCH=")}
    (wanted,) = re.findall(r"^TORCH \?= (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert versions == {f"TORCH={wanted}"}
    (bounds,) = re.findall(r"torch>=([\d.]+),<([\d.]+)", " ".join(PROJECT["dependencies"]))
    low, this, high = (tuple(map(int, version.split("."))) for version in (bounds[0], wanted, bounds[1]))
    assert low <= this < high


def test_what_is_copied_and_installed_exists() -> None:
    sources = [source for step, rest in STEPS if step == "COPY" for source in rest.split()[:-1]]
    assert sources and all((ROOT / source).exists() for source in sources)
    let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(let_in) == sorted(sources)
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= set(sources), "pip reads them"
    extras = [
        extra for _, rest in STEPS for group in re.findall(r'"\.\[([\w,]+)\]"', rest) for extra in group.split(",")
    ]
    assert extras and set(extras) <= set(PROJECT["optional-dependencies"])


def test_the_container_serves_without_being_root() -> None:
    command, entry = json.loads(only("CMD")), json.loads(only("ENTRYPOINT"))
    assert entry == ["thalweg"] and entry[0] in PROJECT["scripts"]
    config = served(command)
    assert config.listen.host == "0.0.0.0" and (ROOT / config.model.model / "config.json").is_file()
    assert config.listen.port == int(only("EXPOSE")) == ListenOptions().port
    assert int(only("USER")) > 0 and f"--uid {only('USER')} " in TEXT
    probe = only("HEALTHCHECK")
    port, path = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", probe)[0]
    assert int(port) == config.listen.port and path == "/health" and path in PATHS
    program = json.loads(probe.partition("CMD")[2])
    compile(program[2], "HEALTHCHECK", "exec")
    users = [step for step, _ in STEPS]
    assert users.index("USER") < users.index("ENTRYPOINT")
    for line in re.findall(r"thalweg\S* (serve .*)$", TEXT, re.M):
        served(line.split())


def documents() -> dict[str, Any]:
    text = (ROOT / "deploy/kubernetes/thalweg.yaml").read_text(encoding="utf-8")
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def test_kubernetes_runs_what_the_command_line_understands() -> None:
    found = documents()
    assert set(found) == {"PersistentVolumeClaim", "Deployment", "Service"}
    pod = found["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    config = served(container["args"])
    (port,) = container["ports"]
    assert config.listen.host == "0.0.0.0" and config.listen.port == port["containerPort"]
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    stop = container["lifecycle"]["preStop"]["sleep"]["seconds"] + config.listen.drain_timeout
    assert pod["spec"]["terminationGracePeriodSeconds"] > stop + 5, "a kill must not cut answers off"
    variables = {one["name"] for one in container["env"]}
    assert set(re.findall(r"\$\((\w+)\)", " ".join(container["args"]))) <= variables
    assert pod["spec"]["securityContext"]["runAsUser"] == int(only("USER"))


def test_several_nodes_run_what_the_command_line_understands() -> None:
    text = (ROOT / "deploy/kubernetes/thalweg-nodes.yaml").read_text(encoding="utf-8")
    group, service = yaml.safe_load_all(text)
    template = group["spec"]["leaderWorkerTemplate"]
    (container,) = template["workerTemplate"]["spec"]["containers"]
    # what the controller sets: https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/
    told = {"LWS_GROUP_SIZE": str(template["size"]), "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "thalweg-0.thalweg"}
    words = [re.sub(r"\$\((\w+)\)", lambda found: told[found[1]], word) for word in container["args"]]
    parallel = served(words).parallel
    assert (parallel.nnodes, parallel.node_rank, parallel.dist_init_addr) == (2, 1, "thalweg-0.thalweg:29500")
    assert parallel.tp_size == template["size"] * container["resources"]["limits"]["nvidia.com/gpu"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        program, code = container[probe]["exec"]["command"][:2], container[probe]["exec"]["command"][2]
        assert program == ["python", "-c"] and set(re.findall(r":30000(/\w+)", code)) <= PATHS
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **told}, capture_output=True)
        assert done.returncode == 0, "nothing is asked of a node that is not the first"
    assert service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0", "the others speak no HTTP"


def test_slurm_starts_a_command_on_each_node(tmp_path: Path) -> None:
    """With stand-ins for SLURM's commands, one task after the other."""
    script = ROOT / "deploy/slurm/thalweg.sbatch"
    programs = {
        "scontrol": "echo node-a; echo node-b",
        "srun": 'shift; for i in 0 1; do SLURM_NODEID=$i "$@"; done',
        "thalweg": 'printf "%s\\n" "$*"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    told = {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2", "SLURM_GPUS_PER_NODE": "8"}
    env = {**os.environ, **told, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(script), "org/name", "--max-itl-ms", "50"], env=env, capture_output=True, text=True, check=True
    )
    for number, line in enumerate(done.stdout.splitlines()):
        config = served(line.split())
        parallel = config.parallel
        assert (parallel.tp_size, parallel.nnodes, parallel.node_rank) == (16, 2, number)
        assert parallel.dist_init_addr == "node-a:29500" and config.model.model == "org/name"
    assert done.stdout.count("\n") == 2


def test_kubernetes_probes_and_volumes() -> None:
    found = documents()
    spec = found["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    asked = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {name: one["path"] for name, one in asked.items()} == {
        "startupProbe": "/health",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }
    assert {one["path"] for one in asked.values()} <= PATHS
    assert {one["port"] for one in asked.values()} == {container["ports"][0]["name"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    home = next(one["value"] for one in container["env"] if one["name"] == "HF_HOME")
    claim = volumes[mounts[home]]["persistentVolumeClaim"]["claimName"]
    assert claim == found["PersistentVolumeClaim"]["metadata"]["name"]
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    assert limits["nvidia.com/gpu"] == requests["nvidia.com/gpu"] == 1
    labels = spec["template"]["metadata"]["labels"]
    service = found["Service"]["spec"]
    assert spec["selector"]["matchLabels"] == service["selector"] == labels
    assert service["ports"][0]["targetPort"] == container["ports"][0]["name"]
