"""The engine of an ablation's cell: in the cell's process, or behind a server of its own that is asked over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import msgspec

from thalweg.bench.answering import Answerer, EngineAnswerer, ServerAnswerer
from thalweg.bench.backends import BACKENDS, RequestOptions
from thalweg.bench.datasets import SampleRequest
from thalweg.bench.errors import BenchError
from thalweg.bench.floor import ServedModel
from thalweg.bench.http_client import HttpClient
from thalweg.bench.in_process import Generation, run_all
from thalweg.bench.load_driver import LoadRun
from thalweg.bench.server_info import ServerInfo
from thalweg.bench.server_process import ServerProcess, engine_processes, usage
from thalweg.core.messages import Stats
from thalweg.llm import LLM

IN_PROCESS, HTTP = "in-process", "http"
CLIENTS = (IN_PROCESS, HTTP)
AT_ONCE = 8  # questions of an evaluation


class CellEngine(Protocol):
    model: ServedModel
    context: int  # longest sequence, in tokens

    def run(self, requests: Sequence[Generation], concurrency: int = 0) -> None:
        """Runs all requests, at most `concurrency` (0: all) at a time, and fills in their times. Raises BenchError."""

    def flush_cache(self) -> None: ...

    def cpu_seconds(self) -> float:
        """CPU time of all processes of the engine, and of the server's front, so far."""

    def answerer(self) -> Answerer: ...

    def ran(self) -> dict[str, Any]:
        """What the engine runs, by its own report, and what its drafts were worth."""


@contextmanager
def cell_engine(client: str, settings: Mapping[str, Any]) -> Iterator[CellEngine]:
    """client: one of CLIENTS. settings: of the engine, by name, with `model`. Raises ThalwegError."""
    if client == IN_PROCESS:
        yield InProcess(settings)
        return
    with TemporaryDirectory(prefix="thalweg-ablate-") as folder, asyncio.Runner() as runner:
        config, key = Path(folder) / "settings.yaml", token_hex()
        config.write_text(json.dumps({**settings, "admin_api_key": key}), encoding="utf-8")  # JSON is YAML
        # keys of the user's would win over the file's
        env = {name: value for name, value in os.environ.items() if "API_KEY" not in name}
        server = ServerProcess(["--config", str(config)], env=env)
        runner.run(server.__aenter__())
        try:
            yield Served(server, key, runner, Path(settings["model"]))
        finally:
            runner.run(server.stop())


class InProcess:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        rest = dict(settings)
        self.llm = LLM(rest.pop("model"), use_tqdm_on_load=False, **rest)
        self.engine = self.llm.engine
        self.model = ServedModel.of(self.llm.texts.resolved.path, self.engine.config)
        self.context, self.flush_cache = self.engine.context, self.engine.flush_cache

    def run(self, requests: Sequence[Generation], concurrency: int = 0) -> None:
        run_all(self.engine, requests, concurrency)

    def cpu_seconds(self) -> float:
        return time.process_time() + sum(usage(one).cpu for one in engine_processes(os.getpid()))

    def answerer(self) -> Answerer:
        return EngineAnswerer(self.llm, False)

    def ran(self) -> dict[str, Any]:
        return _ran(self.engine.config.report.as_tree(), self.engine.loop.stats())


class Served:
    """A server of this cell alone. admin_key: `/flush_cache` asks for it."""

    def __init__(self, server: ServerProcess, admin_key: str, runner: asyncio.Runner, folder: Path) -> None:
        self.server, self.runner = server, runner
        self.info = ServerInfo(HttpClient(server.url, {"Authorization": f"Bearer {admin_key}"}))
        settings = runner.run(self.info.settings())
        self.name, self.context = runner.run(self.info.model()), int(settings["context_length"])
        self.model = ServedModel.of_server(folder, settings)

    def run(self, requests: Sequence[Generation], concurrency: int = 0) -> None:
        self.runner.run(self._run(requests, concurrency))

    async def _run(self, requests: Sequence[Generation], concurrency: int) -> None:
        prompts = [SampleRequest(one.params.max_tokens or 1, ids=one.prompt) for one in requests]
        client = HttpClient(self.server.url)
        load = LoadRun(client, BACKENDS["thalweg"], RequestOptions(self.name), prompts)
        await load.run((), concurrency, asyncio.Event())
        client.close()
        for request, record in zip(requests, load.records, strict=True):
            if not record.ok:
                raise BenchError(f"a request failed: {record.error}")
            request.tokens, request.cached = record.ids, record.cached_tokens
            request.start, request.first = record.start, record.start + record.ttft
            request.end = record.start + record.latency

    def flush_cache(self) -> None:
        self.runner.run(self.info.post("/flush_cache", "--client http"))

    def cpu_seconds(self) -> float:
        return sum(usage(one).cpu for one in (self.server.pid, *engine_processes(self.server.pid)))

    def answerer(self) -> Answerer:
        return ServerAnswerer(self.server.url, self.name, "", AT_ONCE, False, self.runner.run)

    def ran(self) -> dict[str, Any]:
        info = self.runner.run(self.info.settings())
        return _ran(info["resolved"], msgspec.convert(info["internal_states"][0]["stats"], Stats))


def _ran(decisions: Mapping[str, Mapping[str, Any]], stats: Stats) -> dict[str, Any]:
    drafts = stats.verifications
    return {
        "decisions": {name: decision["value"] for name, decision in decisions.items()},
        "accept_length": 1 + stats.accepted_tokens / drafts if drafts else None,
        "drafter_failures": stats.drafter_failures,
    }
