"""`--launcher ray`: the agents of all nodes but the first are tasks of a Ray cluster that is running already.

A placement group reserves a bundle on each node, with a GPU for each process there. Ray starts a task again when its
node or its worker has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from thalweg.config.engine import EngineConfig
from thalweg.config.options import Options
from thalweg.config.tree import command_line, non_defaults, replace, settings
from thalweg.core.errors import UnsupportedConfig
from thalweg.launch.node_start import end_with_parent, free_address

log = logging.getLogger("thalweg.ray")
ROOM_S = 300.0  # in which the cluster has to find room for all nodes
OF_THE_FIRST = ("listen", "server")  # sections that only the first node reads


def _ray() -> Any:
    """The library. Raises UnsupportedConfig."""
    try:
        import ray
    except ImportError as error:
        raise UnsupportedConfig(
            "launcher: Ray is not installed; use pip install 'thalweg[ray]', or --launcher local"
        ) from error
    return ray


def on_cluster(options: Options) -> Options:
    """Joins the cluster: → options with an address of this node that the others reach. Raises UnsupportedConfig."""
    ray = _ray()
    try:
        ray.init(address="auto", logging_level=logging.WARNING)
    except ConnectionError as error:
        raise UnsupportedConfig(
            "launcher: no Ray cluster is found from here; run `ray start --head` first (RAY_ADDRESS names another), or"
            " use --launcher local"
        ) from error
    if options.parallel.dist_init_addr is not None:
        return options
    return replace(options, dist_init_addr=free_address(ray.util.get_node_ip_address()))


@contextlib.contextmanager
def ray_agents(options: Options, engine: EngineConfig) -> Iterator[None]:
    """Within the block the other nodes have agents. Raises UnsupportedConfig if the cluster has no room for them."""
    ray = _ray()
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    gpus = engine.node_processes if engine.device == "cuda" else 0
    bundles = [{"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {}) for _ in range(engine.nnodes)]
    bundles[0][f"node:{ray.util.get_node_ip_address()}"] = 0.001  # this node's, so that no agent comes here
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=ROOM_S)
    except ray.exceptions.GetTimeoutError as error:
        remove_placement_group(group)
        raise UnsupportedConfig(
            f"launcher: in {ROOM_S:g} s the Ray cluster found no room for {bundles[-1]} on each of {engine.nnodes}"
            f" nodes; all of it is {ray.cluster_resources()}"
        ) from error
    task = ray.remote(run_agent)
    for node in range(1, engine.nnodes):
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        own = task.options(num_cpus=1, num_gpus=gpus, max_retries=-1, scheduling_strategy=where)
        ref = own.remote(words_of(options, node), _token(options))
        threading.Thread(target=_report, args=(ray, ref, node), name="ray", daemon=True).start()
    try:
        yield
    finally:
        remove_placement_group(group)
        ray.shutdown()


def words_of(options: Options, node: int) -> list[str]:
    """The command of another node, without secrets."""
    given = non_defaults(replace(options, node_rank=node, launcher="local"))
    known = settings()
    own = {name: value for name, value in given.items() if known[name].section not in OF_THE_FIRST}
    model = own.pop("model", options.model.model)
    return ["serve", os.path.abspath(model) if os.path.isdir(model) else model, *command_line(own)]


def _token(options: Options) -> dict[str, str]:
    return {} if options.model.hf_token is None else {"HF_TOKEN": options.model.hf_token}


def run_agent(words: Sequence[str], variables: dict[str, str]) -> None:
    """The task: ends with the agent, and the agent with it. Raises RuntimeError if it fails."""
    command, env = [sys.executable, "-m", "thalweg", *words], os.environ | variables
    if code := subprocess.run(command, env=env, preexec_fn=end_with_parent).returncode:
        raise RuntimeError(f"the agent ended with exit code {code}; the task's log says why")


def _report(ray: Any, ref: Any, node: int) -> None:
    try:
        ray.get(ref)
    except Exception as error:  # noqa: BLE001 - whatever the task raised, the engine waits for its node
        log.error("node %d has no agent: %s", node, error)
