"""The chat page: the files of `static/`, read once, served with a strict security policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).parent / "static"
_POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def _page(name: str, media_type: str) -> Callable[[Request], Response]:
    body = (_FOLDER / name).read_bytes()
    return lambda request: Response(body, headers=_HEADERS, media_type=media_type)


_SCRIPTS = ("playground.js", *(f"playground/{part}.js" for part in ("answer", "page", "stream", "theme", "tools")))
PAGES = {
    "/": _page("index.html", "text/html"),
    "/playground.css": _page("playground.css", "text/css"),
    **{f"/{name}": _page(name, "text/javascript") for name in _SCRIPTS},
}
