"""What the user may wish of the HTTP server. Host, port and TLS belong to whoever opens the socket."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.config.setting import check_section, setting
from thalweg.core.errors import CannotServe


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Names, keys, limits and log of the HTTP server."""

    served_model_name: tuple[str, ...] = setting(
        (), "names under which the model answers; the first one is shown. Default: the last part of the model's path"
    )
    api_key: tuple[str, ...] = setting(
        (),
        "keys, one of which a request must bring as `Authorization: Bearer KEY`. Default: none is asked for",
        secret=True,
    )
    open_probes: bool = setting(True, "/health, /ready and /metrics answer without a key even when there are keys")
    max_body_bytes: int = setting(32 << 20, "longest request body; beyond it the answer is 413", least=1)
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
    request_id_header: str = setting("X-Request-Id", "header that may bring a request's id and always carries it back")
    playground: bool = setting(True, "serve the chat page at /")
    metrics: bool = setting(True, "serve Prometheus metrics at /metrics", aliases=("enable-metrics=true",))
    sglang_metrics: bool = setting(True, "give the metrics also under the sglang:* names that dashboards read")
    log_level: str = setting(
        "info", "least severe message that is logged", choices=("critical", "error", "warning", "info", "debug")
    )
    log_requests: bool = setting(False, "log a line for each request: id, route, status and seconds, never its text")

    def __post_init__(self) -> None:
        check_section(self)
        for name in ("api_key", "served_model_name"):
            if any(not value for value in vars(self)[name]):
                raise CannotServe(f"{name}: holds an empty text; leave the option out to have none")
        if any(not key.isascii() for key in self.api_key):
            raise CannotServe("api_key: must be ASCII, HTTP headers carry nothing else")
        header = self.request_id_header
        if not header.isascii() or not header.replace("-", "").isalnum():
            raise CannotServe(f"request_id_header: must be letters, digits and dashes, got {header!r}")
