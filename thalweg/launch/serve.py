"""`thalweg serve`: binds the port, starts the engine, speaks HTTP, says how to reach it, and drains on SIGTERM or
Ctrl-C.

The server is on this level too, so the application comes as an argument: `cli.py` brings the two together.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import resource
import shlex
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import uvicorn

from thalweg.config.options import ListenOptions, Options
from thalweg.config.server import ServerOptions
from thalweg.core import logs
from thalweg.core.errors import EngineDead, UnsupportedConfig
from thalweg.core.report import Decision
from thalweg.engine.child import EngineProcess
from thalweg.engine.client import EngineClient
from thalweg.engine.node_agent import run_agent
from thalweg.launch.launchers import LAUNCHERS
from thalweg.launch.report import as_json, show, wide_console
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved

log = logging.getLogger("thalweg.serve")
DOCS = Path(__file__).parents[2] / "docs" / "README.md"  # in a checkout; not installed with the package
OF_A_NODE = ("model_path", "speculative_draft_model_path", "cache_dir", "crash_dump_folder")  # its own paths
BACKLOG = 2048
OTHER_FILES = 256  # that a server has open beside its connections
LAST_WORDS = 5  # seconds that answers get to leave their sockets after the engine has finished them

MakeServer = Callable[[EngineClient, ServerOptions, Resolved], dict[str, Any]]


def serve(
    config: Options, make_server: MakeServer, first: EngineProcess | None = None, is_verbose: bool = False
) -> int:
    """Serves until a signal says stop; returns the exit status. make_server: settings of uvicorn: `app`, the ASGI
    application of a front, and `http`, what speaks HTTP on a socket. first: a process for the first engine. is_verbose:
    whether to print every setting and the phases of the start.

    Raises UnsupportedConfig when the port is taken or a setting cannot be honoured, CheckpointError, and EngineDead
    when the engine cannot start, or cannot be started again after it has ended.
    """
    logs.configure(config.server.log_level, config.server.log_format)
    if config.server.log_level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)  # what it says of itself is said here
    if config.server.log_requests_level and not config.server.log_requests:
        log.warning("--log-requests-level %d says nothing without --log-requests", config.server.log_requests_level)
    launcher = LAUNCHERS[config.parallel.launcher]
    config = launcher.options(config)
    if config.parallel.node_rank:
        return _run_node(config, first)
    _allow_files(config.server.max_connections + OTHER_FILES)
    with listen(config.listen) as sock:
        tls = _tls(config.listen)
        is_text = config.server.log_format == "text"
        resolved = resolve(config, progress=is_text)
        if not is_text:
            log.info("resolved", extra=logs.fields(resolved=as_json(resolved)))
        elif is_verbose:
            show(as_json(resolved), wide_console())
        else:
            resolved = dataclasses.replace(resolved, engine=resolved.engine.started((), log_start=False))
        with launcher.agents(config, resolved.engine):
            return asyncio.run(_run(config, resolved, sock, tls, make_server, first))


def _run_node(config: Options, first: EngineProcess | None) -> int:
    """Runs the devices of this node for the first one, until that has ended or a signal says stop. Raises EngineDead
    when the first node refuses this one.
    """
    engine = resolve(config).engine
    if first is not None:
        first.close()
    node, nodes = config.parallel.node_rank, engine.nnodes
    log.info("node %d of %d, which count from 0: %d processes here", node, nodes, engine.node_processes)
    with contextlib.suppress(KeyboardInterrupt):
        run_agent(engine, node, {name: getattr(engine, name) for name in OF_A_NODE}, config.listen.drain_timeout)
    return 0


class _Server(uvicorn.Server):
    """uvicorn, but a signal first drains: no new requests, time for those that run. A second signal ends at once."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], asyncio.Task[None]]) -> None:
        super().__init__(config)
        self.drain = drain
        self.draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.draining is not None:
            logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # no words on what is cut off
            self.force_exit = self.should_exit = True
            return
        log.info("%s: finishing running requests; send the signal again to stop now", signal.Signals(sig).name)
        self.draining = self.drain()
        self.draining.add_done_callback(lambda task: self._leave())

    def _leave(self) -> None:
        self.should_exit = True


async def _run(
    config: Options,
    resolved: Resolved,
    sock: socket.socket,
    tls: dict[str, Any],
    make_server: MakeServer,
    first: EngineProcess | None,
) -> int:
    options = dataclasses.replace(config.server, served_model_name=resolved.names)
    if resolved.engine.nnodes > 1 and first is not None:
        first.close()
        first = None
    front = EngineClient(resolved.engine, resolved.reader(), first)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, front.record)
    if options.api_keys_file is not None:  # whoever rotates keys may send it, and must not end the server with it
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _hangup)
    settings = uvicorn.Config(
        **make_server(front, options, resolved),
        loop="asyncio",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=LAST_WORDS,
        **tls,
    )
    server = _Server(settings, lambda: asyncio.create_task(front.drain(config.listen.drain_timeout)))
    running = asyncio.create_task(_run_engine(front, server, config, resolved, sock))
    await server.serve([sock])
    await front.close()
    try:
        await running
    except EngineDead:
        if server.draining is None:  # else a signal came first
            raise
    return 0


def _hangup() -> None:
    log.info("SIGHUP: changes nothing, the keys file is read again whenever it changes")


async def _run_engine(
    front: EngineClient, server: _Server, config: Options, resolved: Resolved, sock: socket.socket
) -> None:
    """Starts the engine and says where it is reached; /ready answers 503 meanwhile. Ends the server when no engine
    will serve any more, and raises EngineDead then.
    """
    try:
        await front.start()
        _announce(config, resolved, sock, front)
        await front.ended()
    except EngineDead:
        server.should_exit = True
        raise


def _announce(config: Options, resolved: Resolved, sock: socket.socket, front: EngineClient) -> None:
    gc.collect()
    gc.freeze()  # modules and tables stay: a full collection over them was seen to stop every stream for 0.4 s
    url = _url(config.listen, sock.getsockname()[1])
    if config.server.log_format == "json":
        log.info("ready", extra=logs.fields(url=url, model=resolved.names[0]))
    else:
        settings = front.ready.report.current() if front.ready else {}
        print(_welcome(config, resolved, url, settings), flush=True)


def _url(listen: ListenOptions, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
        listen.host, f"[{listen.host}]" if ":" in listen.host else listen.host
    )
    return f"http{'s' if listen.ssl_certfile else ''}://{host}:{port}"


def _welcome(config: Options, resolved: Resolved, url: str, settings: Mapping[str, Decision]) -> str:
    """The six lines that a start prints. settings: those of the engine that runs, by name."""
    engine, device, tokens = resolved.engine, settings["device"], settings["max_total_tokens"].value
    size = f"{resolved.sizes.parameters:,} parameters, {engine.dtype}"
    processes = f", {engine.processes} processes" if engine.processes > 1 else ""
    hardware = f"{device.value} ({device.reason})" if device.reason else device.value
    page = f"{url}/ in a browser is a chat page; " if config.server.playground else ""
    lines = {
        "model": f"{resolved.names[0]} ({resolved.architecture}, {size}) from {resolved.path}",
        "runs on": f"{hardware}{processes}, KV cache of {tokens:,} tokens",
        "address": url,
        "curl": _curl(config, resolved, url),
        "docs": f"{documentation()}{url}/openapi.json has every field",
        "try": f"{page}-v or {url}/resolved shows every setting with its reason",
    }
    return "\n".join(f"{name:<9}{text}" for name, text in lines.items())


def documentation() -> str:
    """The path of the documentation from here and "; ", or "" where it was not installed."""
    if not DOCS.is_file():
        return ""
    here = Path.cwd()
    return f"{DOCS.relative_to(here) if DOCS.is_relative_to(here) else DOCS}; "


def _curl(config: Options, resolved: Resolved, url: str) -> str:
    """A command that works; an API key is a variable in it."""
    words = ["curl", "-s"]
    if config.listen.ssl_certfile:
        words += ["--cacert", config.listen.ssl_certfile]
    body: dict[str, Any] = {"model": resolved.names[0], "max_tokens": 64}
    if resolved.chat.encoder.name == "none":
        route, body["prompt"] = "/v1/completions", "Once upon a time"
    else:
        route, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "Good morrow! Who are you?"}]
    words += [url + route, "-H", "Content-Type: application/json"]
    key = ' -H "Authorization: Bearer $API_KEY"' if config.server.api_key or config.server.api_keys_file else ""
    return shlex.join(words) + key + " -d " + shlex.quote(msgspec.json.encode(body).decode())


def _allow_files(needed: int) -> None:
    """Lets this process open so many files, as far as it may: a connection is one, and 1,024 is all that many systems
    give at first.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < needed:
        log.warning("only %d files may be open (ulimit -n), so fewer connections than --max-connections", wanted)


def listen(wish: ListenOptions) -> socket.socket:
    """A bound socket, before anything slow happens. Raises UnsupportedConfig."""
    try:
        infos = socket.getaddrinfo(wish.host, wish.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = infos[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise UnsupportedConfig(
            f"cannot listen on {wish.host} port {wish.port}: {error.strerror}; use another --port (0 picks a free one)"
        ) from error


def _tls(wish: ListenOptions) -> dict[str, Any]:
    """uvicorn's TLS settings, tried once before anything slow happens. Raises UnsupportedConfig."""
    if wish.ssl_certfile is None:
        return {}
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(wish.ssl_certfile, wish.ssl_keyfile, wish.ssl_keyfile_password or "")
    except (OSError, ssl.SSLError) as error:
        raise UnsupportedConfig(
            f"ssl_certfile {wish.ssl_certfile} with ssl_keyfile {wish.ssl_keyfile}: {error}"
        ) from error
    return {
        "ssl_certfile": wish.ssl_certfile,
        "ssl_keyfile": wish.ssl_keyfile,
        "ssl_keyfile_password": wish.ssl_keyfile_password,
    }
