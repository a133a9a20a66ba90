"""The chat page: the files of `static/` beside this module, read once, served with their own strict security policy."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).parent / "static"
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class StaticFile:
    """One file of the page. kind: its media type."""

    def __init__(self, name: str, kind: str) -> None:
        self._body, self._kind = (_FOLDER / name).read_bytes(), kind

    async def respond(self, request: Request) -> Response:
        return Response(self._body, headers=_HEADERS, media_type=self._kind)


PAGES = {
    "/": StaticFile("index.html", "text/html"),
    "/playground.css": StaticFile("playground.css", "text/css"),
    "/playground.js": StaticFile("playground.js", "text/javascript"),
} | {
    f"/playground/{part}.js": StaticFile(f"playground/{part}.js", "text/javascript")
    for part in ("answer", "page", "stream", "theme", "tools")
}
