"""The chat page: the files of `static/`, read once, served with a strict security policy."""

from __future__ import annotations

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


class StaticFile:
    def __init__(self, name: str, media_type: str) -> None:
        self._body, self._media_type = (_FOLDER / name).read_bytes(), media_type

    async def respond(self, request: Request) -> Response:
        return Response(self._body, headers=_HEADERS, media_type=self._media_type)


PAGES = {
    "/": StaticFile("index.html", "text/html"),
    "/playground.css": StaticFile("playground.css", "text/css"),
    "/playground.js": StaticFile("playground.js", "text/javascript"),
} | {
    f"/playground/{part}.js": StaticFile(f"playground/{part}.js", "text/javascript")
    for part in ("answer", "page", "stream", "theme", "tools")
}
