"""Errors of benchmarks. Each message says what was wrong, where, and what to do."""

from __future__ import annotations

from thalweg.core.errors import ThalwegError


class BenchError(ThalwegError):
    """The run cannot start, or its numbers cannot be used."""


class DatasetError(BenchError):
    """A data set that cannot be used; names the file, the line and the field."""


class HttpError(BenchError):
    """The server cannot be reached, closed the connection, or sent something that is not HTTP."""


class ResultError(BenchError):
    """A result file that cannot be read or written."""
