"""API keys: who may send requests, how many, and of how many tokens.

The keys file is a list, in YAML or JSON:

    - name: alice               # in logs and messages; unique
      key: sk-...               # or the key's SHA-256, so that the file holds no secret:
      sha256: 64 hex digits
      max_concurrency: 8        # generation requests at a time
      tokens_per_minute: 60000  # prompt and output together, see ApiKey
      private_cache: true       # its cached prompts are found by this key only

Only digests of keys are kept, under a second digest with a secret of this process: the time of a look-up tells nothing
about any key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.datastructures import Headers

from thalweg.config.server import ServerOptions
from thalweg.core.errors import InvalidRequest, UnsupportedConfig
from thalweg.server.errors import ApiError, ErrorInfo

log = logging.getLogger("thalweg.server")
MINUTE = 60.0
MAX_FILE = 16 << 20  # bytes of a keys file
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


class ApiKeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of the keys file."""

    name: str
    key: str | None = None
    sha256: str | None = None
    max_concurrency: int | None = None
    tokens_per_minute: int | None = None
    private_cache: bool = False

    def digest(self) -> bytes:
        """SHA-256 of the key. Raises UnsupportedConfig for an entry that is wrong."""
        if error := self._error():
            raise UnsupportedConfig(f"key {self.name!r}: {error}")
        return bytes.fromhex(self.sha256) if self.key is None and self.sha256 else _digest(self.key or "")

    def _error(self) -> str:
        if not _NAME.fullmatch(self.name):
            return "a name has 1 to 64 letters, digits and -_. characters"
        for name, value in (("max_concurrency", self.max_concurrency), ("tokens_per_minute", self.tokens_per_minute)):
            if value is not None and value < 1:
                return f"{name} must be at least 1, got {value}; leave it out to have no limit"
        if (self.key is None) == (self.sha256 is None):
            return "give either key or sha256"
        if self.key is not None and (not self.key or not self.key.isascii()):
            return "a key must be ASCII and not empty, HTTP headers carry nothing else"
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256):
            return "sha256 must be 64 hexadecimal digits"
        return ""


@dataclass(slots=True, eq=False)
class TokenCharge:
    """Tokens that a request is charged."""

    tokens: int
    at: float  # time.monotonic()
    counts: bool = True  # until it is a minute old


class ApiKey:
    """One key and its use, or everyone where there are no keys (not `named`).

    A request is charged when it is admitted, with the most tokens that it can use (its prompts once each, and
    max_tokens for each output); at its end the charge becomes what it has used. The requests admitted within any 60
    seconds are never charged more than `tokens_per_minute` together.
    """

    def __init__(self, entry: ApiKeyEntry, admin: bool = False, named: bool = True) -> None:
        self.entry, self.admin = entry, admin
        self.name = entry.name
        self.label = entry.name if named else ""  # in the log
        self.running = 0
        self._secret = secrets.token_bytes(32)
        self._charges: deque[TokenCharge] = deque()  # of the last minute, in order
        self._charged = 0

    def charge(self, tokens: int, now: float) -> TokenCharge:
        """now: time.monotonic(). Raises InvalidRequest for more than the limit, ApiError (429) if too little of the
        minute's tokens is left.
        """
        limit = self.entry.tokens_per_minute
        while self._charges and self._charges[0].at <= now - MINUTE:
            self._charges[0].counts = False
            self._charged -= self._charges.popleft().tokens
        charge = TokenCharge(tokens, now, limit is not None)
        if limit is None:
            return charge
        if tokens > limit:
            message = f"with the prompt makes up to {tokens} tokens; this key has tokens_per_minute {limit}: lower it"
            raise InvalidRequest("max_tokens", message)
        if self._charged + tokens > limit:
            message = (
                f"the request needs up to {tokens} tokens; of tokens_per_minute {limit}, this key has used or reserved"
                f" {self._charged}"
            )
            raise _limited(message, "tokens_per_minute", self._wait(self._charged + tokens - limit, now))
        self._charges.append(charge)
        self._charged += tokens
        return charge

    def scoped_rid(self, rid: str) -> str:
        """A request id as the engine knows it: keys may choose the same ids, and must not end each other's requests."""
        return f"{rid}@{self.name}" if self.label else rid

    @property
    def salt_key(self) -> bytes:
        """Secret for hashing its cache salts, so that no other key finds its prompts; empty if it shares its cache."""
        return self._secret if self.entry.private_cache else b""

    def enter(self) -> None:
        """Counts a running request. Raises ApiError (429)."""
        limit = self.entry.max_concurrency
        if limit is not None and self.running >= limit:
            raise _limited(f"{self.running} requests of this key run, which is its limit", "max_concurrency", 1)
        self.running += 1

    def settle(self, charge: TokenCharge, used: int) -> None:
        """The charged request has ended."""
        if charge.counts and used < charge.tokens:
            self._charged -= charge.tokens - used
            charge.tokens = used

    def _wait(self, missing: int, now: float) -> int:
        """Whole seconds until so many charged tokens are a minute old."""
        for charge in self._charges:
            missing -= charge.tokens
            if missing <= 0:
                return max(1, int(charge.at + MINUTE - now) + 1)
        return int(MINUTE)


class RequestQuota:
    """What one HTTP request takes of its key. The auth middleware opens and closes it."""

    def __init__(self, api_key: ApiKey) -> None:
        self.api_key = api_key
        self.used = 0  # tokens so far
        self._charge: TokenCharge | None = None
        self._entered = False

    def enter(self) -> None:
        """Raises ApiError (429)."""
        self.api_key.enter()
        self._entered = True

    def reserve(self, tokens: int) -> None:
        """Charges the most that the request can use. Raises InvalidRequest and ApiError (429)."""
        self._charge = self.api_key.charge(tokens, time.monotonic())

    def close(self) -> None:
        if self._charge is not None:
            self.api_key.settle(self._charge, self.used)
        self.api_key.running -= self._entered


class ApiKeys:
    """Finds the key of a request. Without any key, everyone is one key without limits. All on one event loop.

    Raises UnsupportedConfig for a keys file that is wrong.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._path = None if options.api_keys_file is None else Path(options.api_keys_file)
        self._secret = secrets.token_bytes(32)
        self._fixed = {self._blind(_digest(key)): _fixed_key(f"key-{i + 1}") for i, key in enumerate(options.api_key)}
        if options.admin_api_key is not None:
            self._fixed[self._blind(_digest(options.admin_api_key))] = _fixed_key("admin", admin=True)
        self.required = bool(options.api_key) or self._path is not None
        self.has_admin = options.admin_api_key is not None
        self.anyone = _fixed_key("anyone", named=False)
        self._file_version: tuple[int, int, int] | None = None
        self._keys = dict(self._fixed)
        if self._path is not None:
            self._file_version = _version_of(self._path)
            self._update(read_keys(self._path))

    def find(self, headers: Headers) -> ApiKey | None:
        """The key that the headers name, else `anyone`, or None where a key is required."""
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        openai, anthropic = bearer.strip() if kind.lower() == "bearer" else "", headers.get("x-api-key", "")
        keys = [self._keys.get(self._blind(_digest(key))) for key in (openai, anthropic)]
        return keys[0] or keys[1] or (None if self.required else self.anyone)

    def check_admin(self, api_key: ApiKey, path: str) -> None:
        """Raises ApiError (403) if the key may not use the admin route `path`."""
        if self.has_admin and api_key.admin:
            return
        message = f"{path} is an admin route: send the server's --admin-api-key as `Authorization: Bearer KEY`"
        if not self.has_admin:
            message = f"{path} is an admin route, and these are off: --admin-api-key KEY turns them on"
        code = "admin_only" if self.has_admin else "admin_off"
        raise ApiError(ErrorInfo(403, message, "permission_error", code=code))

    async def refresh(self) -> None:
        """Reads the keys file again if it has changed. A broken one changes nothing, and is logged once."""
        if self._path is None or (version := _version_of(self._path)) == self._file_version:
            return
        self._file_version = version
        try:
            self._update(await asyncio.to_thread(read_keys, self._path))  # a thousand keys of YAML take 40 ms
            log.info("api_keys_file: read again, %d keys", len(self._keys) - len(self._fixed))
        except UnsupportedConfig as error:
            log.error("%s; the keys that were read before stay", error)

    def _update(self, entries: list[ApiKeyEntry]) -> None:
        """Replaces the file's keys; those with a known name keep what they have used. Raises UnsupportedConfig."""
        before = {api_key.name: api_key for api_key in self._keys.values()}
        names = {api_key.name for api_key in self._fixed.values()}
        keys: dict[bytes, ApiKey] = {}
        for entry in entries:
            blind = self._blind(entry.digest())
            if entry.name in names:
                raise UnsupportedConfig(f"api_keys_file {self._path}: two keys are called {entry.name!r}")
            if blind in keys or blind in self._fixed:
                raise UnsupportedConfig(f"api_keys_file {self._path}: {entry.name!r} has a key that another has too")
            names.add(entry.name)
            keys[blind] = before.get(entry.name) or ApiKey(entry)
        for api_key, entry in zip(keys.values(), entries, strict=True):
            api_key.entry = entry  # only now that the whole file is known to be right
        self._keys = self._fixed | keys

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def read_keys(path: Path) -> list[ApiKeyEntry]:
    """The entries of a keys file. Raises UnsupportedConfig."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise UnsupportedConfig(f"api_keys_file {path}: is larger than {MAX_FILE} bytes")
        return msgspec.yaml.decode(path.read_bytes(), type=list[ApiKeyEntry])
    except OSError as error:
        raise UnsupportedConfig(f"api_keys_file {path}: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError) as error:  # YAML passes on errors of dates and numbers
        message = f"{str(error).splitlines()[0]}; it is a list of entries with name and key"
        raise UnsupportedConfig(f"api_keys_file {path}: {message}") from None


def _version_of(path: Path) -> tuple[int, int, int]:
    """Changes when the file does; zeros where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _fixed_key(name: str, admin: bool = False, named: bool = True) -> ApiKey:
    """A key of the command line, without limits."""
    return ApiKey(ApiKeyEntry(name=name, key="-"), admin, named)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _limited(message: str, field: str, wait: int) -> ApiError:
    code = "rate_limit_exceeded"
    return ApiError(ErrorInfo(429, message, "rate_limit_error", field, code, retry=True, retry_after=wait))
