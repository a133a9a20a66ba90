"""The options of the HTTP server. Host, port and TLS are in `ListenOptions`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from thalweg.config.setting import Section, setting
from thalweg.core.errors import UnsupportedConfig


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Section):
    """Names, keys, limits and log of the HTTP server."""

    served_model_name: tuple[str, ...] = setting(
        (), "names under which the model answers; the first one is shown. Default: the last part of the model's path"
    )
    api_key: tuple[str, ...] = setting(
        (),
        "keys, one of which a request must bring as `Authorization: Bearer KEY`. Default: no key is needed",
        secret=True,
    )
    api_keys_file: str | None = setting(
        None,
        "keys with limits of their own: a YAML or JSON list of name, key or sha256, max_concurrency, tokens_per_minute,"
        " private_cache. Read again when it changes",
        metavar="FILE",
        auto="none",
    )
    admin_api_key: str | None = setting(
        None,
        "key of the admin routes, which change what others get (/flush_cache, abort_all, weights, profiles). It opens"
        " the other routes too",
        auto="the admin routes are off",
        secret=True,
    )
    open_probes: bool = setting(True, "/health, /ready and /metrics answer without a key even when there are keys")
    max_body_bytes: int = setting(32 << 20, "longest request body; beyond it the answer is 413", least=1)
    max_connections: int = setting(8192, "open connections; beyond it they are closed with a 503", least=1)
    client_timeout: float = setting(
        60.0,
        "seconds in which a client must send its request, and must read what waits for it (64 KiB at most); after that"
        " it is cut off",
        least=0.1,
        most=86400.0,
    )
    max_concurrent_requests: int = setting(
        2048, "generation requests at a time, waiting ones included; beyond it the answer is 429. 0: no limit", least=0
    )
    max_stored_responses: int = setting(
        1000, "answers of /v1/responses that are kept for previous_response_id, the latest used ones. 0: none", least=0
    )
    max_stored_response_bytes: int = setting(
        256 << 20, "bytes that they may take together, their conversations included", least=0
    )
    retry_after: int = setting(1, "seconds that a 429 or 503 tells the client to wait", least=1)
    cors_origins: tuple[str, ...] = setting(
        (),
        "origins whose web pages may call this server; * allows all. Default: none but its own playground",
        foreign=("allowed-origins",),
    )
    root_path: str = setting(
        "",
        "prefix under which a proxy passes requests on, such as /llm: all routes answer under it too",
        foreign=("fastapi-root-path",),
    )
    enable_force_include_usage: bool = setting(
        False, "chunks of /v1/completions and /v1/chat/completions have the usage so far, asked for or not"
    )
    request_id_header: str = setting("X-Request-Id", "header that may bring a request's id and always carries it back")
    tool_strict_level: str = setting(
        "parameter",
        "what a call that the model makes by itself is held to; a request may say so too",
        choices={"off": "nothing", "parameter": "a declared tool and its schema"},
    )
    constrained_json_disable_any_whitespace: bool = setting(
        True, "JSON of structured output has no whitespace between its parts, so that it ends soon"
    )
    playground: bool = setting(True, "serve the chat page at /")
    metrics: bool = setting(True, "serve Prometheus metrics at /metrics", aliases=("enable-metrics=true",))
    metrics_names: tuple[str, ...] = setting(
        (),
        "other engines' names under which the metrics are given too; may be given twice. Default: only ours",
        choices={"sglang": "for SGLang's dashboards", "vllm": "for vLLM's dashboards"},
    )
    log_level: str = setting(
        "info",
        "least severe message that is logged",
        choices={
            "critical": "the server ends",
            "error": "a request or the engine failed",
            "warning": "something works less well than it could",
            "info": "starts, stops, and with --log-requests each request",
            "debug": "everything",
        },
        foreign=("uvicorn-log-level",),
    )
    log_format: str = setting(
        "text",
        "how log lines look",
        foreign=("log-requests-format",),
        choices={"text": "for people", "json": "an object each, for machines"},
    )
    log_requests: bool = setting(
        False,
        "log a line for each request when it has ended: id, route, status, tokens, seconds",
        foreign=("enable-log-requests=true", "disable-log-requests=false"),
    )
    log_requests_level: int = setting(
        0,
        "what that line also has",
        choices={
            0: "nothing more",
            1: "sampling parameters",
            2: "these, and the first 2,048 characters of prompts and outputs",
            3: "these, and all of prompts and outputs",
        },
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "OTLP/HTTP address of an OpenTelemetry collector that gets a trace of each request, such as"
        " http://localhost:4318",
        auto="no traces",
    )

    crash_dump_folder: str | None = setting(
        None,
        "folder for recordings of the engine's last steps: written when it dies or hangs and on SIGUSR1, run again by"
        " thalweg replay. They hold the token ids of prompts and outputs",
        metavar="DIR",
        auto="nothing is recorded",
    )
    profile_folder: str | None = setting(
        None,
        "folder under which /start_profile may write profiles of the engine's steps",
        metavar="DIR",
        auto="the routes of profiles are off",
    )
    watchdog_timeout: float = setting(
        300.0,
        "seconds in which the engine must make a step while requests wait; beyond it /health answers 503 until it does."
        " 0: no limit",
        foreign=("dist-timeout",),
        least=0.0,
        most=86400.0,
    )
    watchdog_action: str = setting(
        "report",
        "what is done with an engine that makes no step in that time",
        choices={
            "report": "log it, record its last steps, say it at /health",
            "restart": "the same, then kill it and start a new one",
        },
    )
    restart_timeout: float = setting(
        1800.0,
        "seconds in which a new engine must serve after one has ended; beyond it the server exits with status 1. 0: no"
        " limit",
        least=0.0,
        most=86400.0,
    )

    @property
    def prefix(self) -> str:
        """root_path with one / before it and none behind; "" for none."""
        return ("/" + self.root_path.strip("/")).rstrip("/")

    @property
    def max_bodies_bytes(self) -> int:
        """That the bodies of all requests under way may have together; beyond it the answer is 429."""
        return 16 * self.max_body_bytes

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("api_key", "served_model_name"):
            if any(not value for value in vars(self)[name]):
                raise UnsupportedConfig(f"{name}: holds an empty text; leave the option out to have none")
        if any(not key.isascii() for key in self.api_key):
            raise UnsupportedConfig("api_key: must be ASCII, HTTP headers carry nothing else")
        if self.admin_api_key is not None and not (self.admin_api_key and self.admin_api_key.isascii()):
            raise UnsupportedConfig("admin_api_key: must be ASCII and not empty; leave it out to have no admin routes")
        if self.admin_api_key in self.api_key:
            raise UnsupportedConfig("admin_api_key: must not be one of the api_keys")
        if not re.fullmatch(r"[\w.~/-]*", self.root_path) or "//" in self.root_path:
            raise UnsupportedConfig(f"root_path: must be a path such as /llm, got {self.root_path!r}")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise UnsupportedConfig(
                f"otlp_traces_endpoint: must begin with http:// or https://, got {endpoint!r}; collectors listen for it"
                " on port 4318 (4317 is gRPC, which is not spoken here)"
            )
        header = self.request_id_header
        if not header.isascii() or not header.replace("-", "").isalnum():
            raise UnsupportedConfig(f"request_id_header: must be letters, digits and dashes, got {header!r}")
