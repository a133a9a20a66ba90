"""The chat page: the files of `static/`, read once, served with a strict security policy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).parent / "static"
_POLICY = (
    "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
)
_HEADERS = {
    "Cache-Control": "no-cache",  # kept, and asked for again with its ETag
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".woff2": "font/woff2"}


def _page(path: Path) -> Callable[[Request], Response]:
    body = path.read_bytes()
    headers = _HEADERS | {"ETag": f'"{hashlib.sha256(body).hexdigest()[:20]}"'}

    def answer(request: Request) -> Response:
        if request.headers.get("if-none-match", "").removeprefix("W/") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=_MEDIA_TYPES[path.suffix])

    return answer


PAGES = {
    f"/{path.relative_to(_FOLDER).as_posix()}".replace("/index.html", "/"): _page(path)
    for path in sorted(_FOLDER.rglob("*"))
    if path.suffix in _MEDIA_TYPES
}
