"""Log formats of every process: text for people, or one JSON object a line for machines.

Values from outside cannot start a line of their own or write to a terminal: control characters are escaped, and the
lines of a traceback indented.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any

FORMATS = ("text", "json")
_BARE = re.compile(r"[\w.:/@+,-]+", re.ASCII)
# C0, DEL, C1, the two line separators of Unicode, and the characters that change the direction of text
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def configure(level: str, form: str) -> None:
    """Logs the whole process to stderr, from `level` ("info") on, as "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """Data fields of a log line: `log.info("request", extra=fields(id=…))`. None is left out."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


class TextFormatter(logging.Formatter):
    """`2026-11-21 05:13:23 INFO thalweg.requests: request id=… status=200`"""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        parts = [f"{stamp} {record.levelname} {record.name}: {_escaped(record.getMessage())}"]
        parts += [f"{name}={_text_of(value)}" for name, value in _fields(record).items()]
        return "\n    ".join([" ".join(parts), *_trace(self, record)])


class JsonFormatter(logging.Formatter):
    """One ASCII object a line: time (UTC), level, logger, message, the line's own fields, and with an error `trace`, a
    list of lines.
    """

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line = {"time": stamp, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        trace = _trace(self, record)
        return json.dumps(line | _fields(record) | ({"trace": trace} if trace else {}), default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    values: dict[str, Any] = vars(record).get("fields", {})
    return values


def _text_of(value: Any) -> str:
    """A value as text: bare if it cannot be misread, else as JSON."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if _BARE.fullmatch(text) else json.dumps(text) if isinstance(value, str) else text


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    """Lines of the logged error's traceback, outermost first; [] without an error."""
    if not record.exc_info:
        return []
    return [_escaped(line) for line in formatter.formatException(record.exc_info).splitlines()]
