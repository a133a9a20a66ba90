"""How a log line looks, in every process: text for people, or one JSON object a line for machines. Nothing that came from outside can
begin a line of its own or write to a terminal, whatever it holds: control characters are escaped, and the lines of a traceback are indented."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any

FORMATS = ("text", "json")
_BARE = re.compile(r"[\w.:/@+,-]+", re.ASCII)
# C0, DEL, C1, the two line separators of Unicode, and what turns the direction of text
_UNSEEMLY = [
    *range(0x20),
    *range(0x7F, 0xA0),
    0x2028,
    0x2029,
    0x200E,
    0x200F,
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
]
_ESCAPES = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _UNSEEMLY} | {
    ord(sign): escape for sign, escape in (("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"))
}


def configure(level: str, form: str) -> None:
    """Sends what the whole process logs at `level` ("info") and above to stderr, as "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if form == "json" else Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """`log.info("request", extra=fields(id=…))`: facts that a line carries as data, in this order. None is left out."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


class Text(logging.Formatter):
    """`2026-11-21 05:13:23 INFO thalweg.requests: request id=… status=200`"""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        parts = [f"{stamp} {record.levelname} {record.name}: {record.getMessage().translate(_ESCAPES)}"]
        parts += [f"{name}={_shown(value)}" for name, value in _fields(record).items()]
        return "\n    ".join([" ".join(parts), *_trace(self, record)])


class Json(logging.Formatter):
    """One object a line, in ASCII: time (UTC), level, logger, message, the line's own fields, and `trace`, a list of lines, with an error."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line = {"time": stamp, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        trace = _trace(self, record)
        return json.dumps(line | _fields(record) | ({"trace": trace} if trace else {}), default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = vars(record).get("fields", {})
    return found


def _shown(value: Any) -> str:
    """A value as it stands behind its name: bare where nothing in it could be misread, else as JSON."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if _BARE.fullmatch(text) else json.dumps(text) if isinstance(value, str) else text


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    """The lines of the error that is logged, outermost first; none without an error."""
    if not record.exc_info:
        return []
    lines = re.split(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", formatter.formatException(record.exc_info))
    return [line.translate(_ESCAPES) for line in lines]
