"""API keys: who may send requests, how many, and of how many tokens.

The keys file is a list, in YAML or JSON:

    - name: alice               # in logs and messages; unique
      key: sk-...               # or the key's SHA-256, so that the file holds no secret:
      sha256: 64 hex digits
      max_concurrency: 8        # generation requests at a time
      tokens_per_minute: 60000  # prompt and output together, see RequestQuota
      private_cache: true       # its cached prompts are found by this key only

Only digests of keys are kept. They are looked up in a dict, whose hashes differ by process: the time of a look-up tells
nothing about any key.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections import deque
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request

from thalweg.config.server import ServerOptions
from thalweg.core.errors import InvalidRequest, UnsupportedConfig
from thalweg.server.errors import ApiError, too_many_requests

log = logging.getLogger("thalweg.server")
MINUTE = 60.0
MAX_FILE = 16 << 20  # bytes of a keys file


class ApiKeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of the keys file."""

    name: str
    key: str | None = None
    sha256: str | None = None
    max_concurrency: int | None = None
    tokens_per_minute: int | None = None
    private_cache: bool = False

    def error(self) -> str:
        """The error of the entry, or ""."""
        for field in ("max_concurrency", "tokens_per_minute"):
            value = getattr(self, field)
            if value is not None and value < 1:
                return f"{field} must be at least 1, got {value}; leave it out to have no limit"
        if not re.fullmatch("[A-Za-z0-9_.-]{1,64}", self.name):
            return "a name has 1 to 64 letters, digits and -_. characters"
        if (self.key is None) == (self.sha256 is None):
            return "give either key or sha256"
        if self.key is not None and not (self.key and self.key.isascii()):
            return "a key must be ASCII and not empty, HTTP headers carry nothing else"
        if self.sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", self.sha256):
            return "sha256 must be 64 hexadecimal digits"
        return ""

    def digest(self) -> bytes:
        """SHA-256 of the key."""
        return _digest(self.key or "") if self.sha256 is None else bytes.fromhex(self.sha256)


class ApiKey:
    """One key and its use. The name "": everyone, where there are no keys."""

    def __init__(self, entry: ApiKeyEntry, admin: bool = False) -> None:
        self.entry, self.admin, self.name = entry, admin, entry.name
        self.running = 0  # requests
        self.charges: deque[RequestQuota] = deque()  # of the last minute, in order
        self.charged = 0  # tokens of these
        self._secret = secrets.token_bytes(32)

    def scoped_rid(self, rid: str) -> str:
        """A request id as the engine knows it: keys may choose the same ids, and must not end each other's requests."""
        return f"{rid}@{self.name}" if self.name else rid

    @property
    def salt_key(self) -> bytes:
        """Secret for hashing its cache salts, so that no other key finds its prompts; empty if it shares its cache."""
        return self._secret if self.entry.private_cache else b""


class ServerLoad:
    """Running requests and body bytes of the whole server, with their limits."""

    def __init__(self, options: ServerOptions) -> None:
        self._running_limit, self._bytes_limit = options.max_concurrent_requests, options.max_bodies_bytes
        self.running = 0  # requests whose bodies are there
        self.body_bytes = 0

    def check(self) -> None:
        """Raises ApiError (429) where no further request may run."""
        if self._running_limit and self.running >= self._running_limit:
            message = f"{self._running_limit} requests are running, which is the limit: try again later"
            raise too_many_requests(message, "too_many_requests")

    def add_body(self, size: int) -> None:
        """Raises ApiError (429)."""
        self.body_bytes += size
        if self.body_bytes > self._bytes_limit:
            message = f"the bodies of all requests have more than {self._bytes_limit} bytes: try again later"
            raise too_many_requests(message, "too_many_bytes")


class RequestQuota:
    """Quota that one HTTP request takes from its key and from the server. The middleware opens and closes it.

    A request is charged when it is admitted, with the most tokens that it can use (its prompts once each, and
    max_tokens for each output); at its end the charge becomes what it has used. The requests admitted within any 60
    seconds are never charged more than `tokens_per_minute` together.
    """

    def __init__(self, api_key: ApiKey, load: ServerLoad) -> None:
        self.api_key = api_key
        self.used = 0  # tokens so far
        self._load, self._body_bytes = load, 0
        self._charged = 0  # tokens; 0 after a minute
        self._at = 0.0  # time.monotonic() of the charge
        self._entered = False

    async def read(self, request: Request, limit: int) -> bytes:
        """The body. Raises ApiError: 413 for more than `limit` bytes, 429."""
        parts: list[bytes] = []
        async for part in request.stream():
            self._body_bytes += len(part)
            self._load.add_body(len(part))
            if self._body_bytes > limit:
                raise body_too_large(limit)
            parts.append(part)
        return b"".join(parts)

    def enter(self) -> None:
        """Counts a running request. Raises ApiError (429)."""
        self._load.check()
        key, limit = self.api_key, self.api_key.entry.max_concurrency
        if limit is not None and key.running >= limit:
            message = f"{key.running} requests of this key run, which is its limit"
            raise too_many_requests(message, "rate_limit_exceeded", "max_concurrency", 1)
        key.running += 1
        self._load.running += 1
        self._entered = True

    def reserve(self, tokens: int, now: float) -> None:
        """Charges the most that the request can use. now: time.monotonic().

        Raises InvalidRequest for more than the limit, ApiError (429) if too little of the minute's tokens is left.
        """
        key, limit = self.api_key, self.api_key.entry.tokens_per_minute
        if limit is None:
            return
        while key.charges and key.charges[0]._at <= now - MINUTE:
            old = key.charges.popleft()
            key.charged -= old._charged
            old._charged = 0
        if tokens > limit:
            message = f"with the prompt makes up to {tokens} tokens; this key has tokens_per_minute {limit}: lower it"
            raise InvalidRequest("max_tokens", message)
        missing = key.charged + tokens - limit
        if missing > 0:
            sums = zip(key.charges, accumulate(quota._charged for quota in key.charges), strict=True)
            frees = next(quota._at + MINUTE - now for quota, freed in sums if freed >= missing)
            used = f"of tokens_per_minute {limit}, this key has used or reserved {key.charged}"
            message = f"the request needs up to {tokens} tokens; {used}"
            raise too_many_requests(message, "rate_limit_exceeded", "tokens_per_minute", max(1, int(frees) + 1))
        self._charged, self._at = tokens, now
        key.charges.append(self)
        key.charged += tokens

    def close(self) -> None:
        if self.used < self._charged:
            self.api_key.charged -= self._charged - self.used
            self._charged = self.used
        self.api_key.running -= self._entered
        self._load.running -= self._entered
        self._load.body_bytes -= self._body_bytes


class ApiKeys:
    """Finds the key of a request. Without any key, everyone is one key without limits. All on one event loop.

    Raises UnsupportedConfig for a keys file that is wrong.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._path = None if options.api_keys_file is None else Path(options.api_keys_file)
        fixed = {key: _fixed_key(f"key-{i + 1}") for i, key in enumerate(options.api_key)}
        if options.admin_api_key is not None:
            fixed[options.admin_api_key] = _fixed_key("admin", admin=True)
        self._fixed = {_digest(key): api_key for key, api_key in fixed.items()}
        self.required = bool(options.api_key) or self._path is not None
        self.has_admin = options.admin_api_key is not None
        self.anyone = _fixed_key("")
        self._keys = dict(self._fixed)
        self._file_version: tuple[int, int, int] | None = None
        if self._path is not None:
            self._file_version = _version_of(self._path)
            self._update(self._read(self._path))

    def find(self, headers: Headers) -> ApiKey | None:
        """The key that the headers name, else `anyone`, or None where a key is required."""
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        openai, anthropic = bearer.strip() if kind.lower() == "bearer" else "", headers.get("x-api-key", "")
        keys = [self._keys.get(_digest(key)) for key in (openai, anthropic)]
        return keys[0] or keys[1] or (None if self.required else self.anyone)

    def check_admin(self, api_key: ApiKey, path: str) -> None:
        """Raises ApiError (403) if the key may not use the admin route `path`."""
        if self.has_admin and api_key.admin:
            return
        message = f"{path} is an admin route: send the server's --admin-api-key as `Authorization: Bearer KEY`"
        if not self.has_admin:
            message = f"{path} is an admin route, and these are off: --admin-api-key KEY turns them on"
        code = "admin_only" if self.has_admin else "admin_off"
        raise ApiError(403, message, "permission_error", code=code)

    async def refresh(self) -> None:
        """Reads the keys file again if it has changed. A broken one changes nothing, and is logged once."""
        if self._path is None or (version := _version_of(self._path)) == self._file_version:
            return
        self._file_version = version
        try:
            self._update(await asyncio.to_thread(self._read, self._path))  # a thousand keys of YAML take 40 ms
            log.info("api_keys_file: read again, %d keys", len(self._keys) - len(self._fixed))
        except UnsupportedConfig as error:
            log.error("%s; the keys that were read before stay", error)

    def _update(self, entries: Mapping[bytes, ApiKeyEntry]) -> None:
        """Replaces the file's keys; those with a known name keep what they have used."""
        known = {api_key.name: api_key for api_key in self._keys.values()}
        self._keys = dict(self._fixed)
        for digest, entry in entries.items():
            api_key = self._keys[digest] = known.get(entry.name) or ApiKey(entry)
            api_key.entry = entry

    def _read(self, path: Path) -> dict[bytes, ApiKeyEntry]:
        """The entries of the keys file by the digest of their key. Raises UnsupportedConfig."""
        entries: dict[bytes, ApiKeyEntry] = {}
        names = {api_key.name for api_key in self._fixed.values()}
        try:
            if path.stat().st_size > MAX_FILE:
                raise ValueError(f"is larger than {MAX_FILE} bytes")
            for entry in msgspec.yaml.decode(path.read_bytes(), type=list[ApiKeyEntry]):
                if error := entry.error():
                    raise ValueError(f"key {entry.name!r}: {error}")
                digest = entry.digest()
                if entry.name in names:
                    raise ValueError(f"two keys are called {entry.name!r}")
                if digest in entries or digest in self._fixed:
                    raise ValueError(f"{entry.name!r} has a key that another has too")
                names.add(entry.name)
                entries[digest] = entry
        except OSError as error:
            raise UnsupportedConfig(f"api_keys_file {path}: {error.strerror}") from error
        except (msgspec.DecodeError, ValueError) as error:  # YAML passes on errors of dates and numbers
            raise UnsupportedConfig(f"api_keys_file {path}: {str(error).splitlines()[0]}") from None
        return entries


def _version_of(path: Path) -> tuple[int, int, int]:
    """Changes when the file does; zeros where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _fixed_key(name: str, admin: bool = False) -> ApiKey:
    """A key of the command line, without limits."""
    return ApiKey(ApiKeyEntry(name=name, key="-"), admin)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than the limit of {limit} bytes", code="body_too_large")
