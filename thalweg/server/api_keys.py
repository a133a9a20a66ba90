"""Who asks: API keys, what each may use, and what it has used.

The keys file is a list, in YAML or JSON:

    - name: alice               # in logs and messages, never secret; unique
      key: sk-...               # or the key's SHA-256, so that the file holds no secret:
      sha256: 64 hex digits
      max_concurrency: 8        # generation requests at a time
      tokens_per_minute: 60000  # prompt and output together, see Tenant
      private_cache: true       # its cached prompts are found by this key only

Only digests of keys are kept, and they are looked up under a second digest that is keyed with a secret of this process:
no client can aim at its bytes, so the time of a look-up says nothing about any key, and does not grow with their
number.
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
from pathlib import Path

import msgspec
from starlette.datastructures import Headers

from thalweg.config.server import ServerOptions
from thalweg.core.errors import InvalidRequest, UnsupportedConfig
from thalweg.server.errors import ApiError, ErrorInfo

log = logging.getLogger("thalweg.server")
MINUTE = 60.0
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_FILE = 16 << 20  # bytes of a keys file


class ApiKeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of the keys file."""

    name: str
    key: str | None = None
    sha256: str | None = None
    max_concurrency: int | None = None
    tokens_per_minute: int | None = None
    private_cache: bool = False

    def digest(self) -> bytes:
        """SHA-256 of the key. Raises UnsupportedConfig naming the entry for one that says nothing or too much."""
        where = f"key {self.name!r}"
        if not _NAME.fullmatch(self.name):
            raise UnsupportedConfig(f"{where}: a name has 1 to 64 letters, digits and -_. characters")
        for name, value in (("max_concurrency", self.max_concurrency), ("tokens_per_minute", self.tokens_per_minute)):
            if value is not None and value < 1:
                raise UnsupportedConfig(
                    f"{where}: {name} must be at least 1, got {value}; leave it out to have no limit"
                )
        if (self.key is None) == (self.sha256 is None):
            raise UnsupportedConfig(f"{where}: give either key or sha256")
        if self.key is not None:
            if not self.key or not self.key.isascii():
                raise UnsupportedConfig(f"{where}: a key must be ASCII and not empty, HTTP headers carry nothing else")
            return _digest(self.key)
        try:
            digest = bytes.fromhex(self.sha256 or "")
        except ValueError:
            digest = b""
        if len(digest) != 32:
            raise UnsupportedConfig(f"{where}: sha256 must be 64 hexadecimal digits")
        return digest


class ApiKey:
    """The holder of one key, or everyone where there are none (not `named`).

    A request is charged when it is admitted, with the most that it can use (its prompts once each, and max_tokens for
    each output), and the charge becomes what it really used when it ends. The requests admitted within any 60 seconds
    are never charged more than `tokens_per_minute` together, so they never use more either.
    """

    def __init__(self, entry: ApiKeyEntry, admin: bool = False, named: bool = True) -> None:
        self.entry, self.admin, self.named = entry, admin, named
        self.running = 0
        self._secret = secrets.token_bytes(32)
        self._charges: deque[TokenCharge] = deque()  # of the last minute, in order
        self._charged = 0

    @property
    def name(self) -> str:
        return self.entry.name

    def charge(self, tokens: int, now: float) -> TokenCharge:
        """now: time.monotonic(). Raises InvalidRequest for more than a minute ever has, ApiError (429) while the minute
        has too little left.
        """
        limit = self.entry.tokens_per_minute
        while self._charges and self._charges[0].at <= now - MINUTE:
            self._charged -= self._charges.popleft().close()
        if limit is not None and tokens > limit:
            why = f"with the prompt makes up to {tokens} tokens; this key has tokens_per_minute {limit}: ask for less"
            raise InvalidRequest("max_tokens", why)
        if limit is not None and self._charged + tokens > limit:
            wait = self._wait(self._charged + tokens - limit, now)
            message = (
                f"up to {tokens} tokens are asked for; of tokens_per_minute {limit}, this key has used or reserved"
                f" {self._charged}"
            )
            raise _limited(message, "tokens_per_minute", wait)
        charge = TokenCharge(self, tokens, now)
        if limit is None:
            charge.close()  # nobody asks
            return charge
        self._charges.append(charge)
        self._charged += tokens
        return charge

    @property
    def label(self) -> str:
        """Its name in the log; "" for everyone."""
        return self.name if self.named else ""

    def mark(self, rid: str) -> str:
        """A request id as the engine knows it: two keys may choose the same, and must not end each other's requests."""
        return f"{rid}@{self.name}" if self.named else rid

    @property
    def salt_key(self) -> bytes:
        """What its cache salts are hashed with: a secret, so that no other key's salt can be the same; nothing where it
        shares its cache.
        """
        return self._secret if self.entry.private_cache else b""

    def enter(self) -> None:
        """A request takes one of the key's places. Raises ApiError (429)."""
        limit = self.entry.max_concurrency
        if limit is not None and self.running >= limit:
            raise _limited(f"{self.running} requests of this key run, which is its limit", "max_concurrency", 1)
        self.running += 1

    def correct(self, less: int) -> None:
        self._charged -= less

    def _wait(self, missing: int, now: float) -> int:
        """Whole seconds until so many charged tokens are a minute old, if nothing ends before."""
        for charge in self._charges:
            missing -= charge.tokens
            if missing <= 0:
                return max(1, int(charge.at + MINUTE - now) + 1)
        return int(MINUTE)


class TokenCharge:
    """Tokens that one request is charged, from `at` (time.monotonic()) on."""

    __slots__ = ("api_key", "tokens", "at", "_open")

    def __init__(self, api_key: ApiKey, tokens: int, at: float) -> None:
        self.api_key, self.tokens, self.at = api_key, tokens, at
        self._open = True

    def settle(self, used: int) -> None:
        """The request has ended, having used so many."""
        if self._open and used < self.tokens:
            self.api_key.correct(self.tokens - used)
            self.tokens = used

    def close(self) -> int:
        """It is a minute old and counts no more; its tokens."""
        self._open = False
        return self.tokens


class RequestQuota:
    """What one HTTP request may still take; the gate makes it and closes it, whatever happens in between.

    used: the tokens that it has used so far, which whoever runs it adds up.
    """

    def __init__(self, api_key: ApiKey) -> None:
        self.api_key = api_key
        self.used = 0
        self._charge: TokenCharge | None = None
        self._entered = False

    def enter(self) -> None:
        """Raises ApiError (429)."""
        self.api_key.enter()
        self._entered = True

    def reserve(self, tokens: int) -> None:
        """The most that the request can use. Raises InvalidRequest and ApiError (429)."""
        self._charge = self.api_key.charge(tokens, time.monotonic())

    def close(self) -> None:
        if self._charge is not None:
            self._charge.settle(self.used)
        if self._entered:
            self.api_key.running -= 1


ANYONE = ApiKeyEntry(name="anyone", key="-")
ADMIN = ApiKeyEntry(name="admin", key="-")


class ApiKeys:
    """Finds the tenant of a request. Without any key, everyone is one tenant without limits. All on one event loop.

    Raises UnsupportedConfig for a keys file that cannot be read.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._path = None if options.api_keys_file is None else Path(options.api_keys_file)
        self._secret = secrets.token_bytes(32)
        self._fixed = {self._blind(_digest(key)): self._own(f"key-{i + 1}") for i, key in enumerate(options.api_key)}
        if options.admin_api_key is not None:
            self._fixed[self._blind(_digest(options.admin_api_key))] = ApiKey(ADMIN, admin=True)
        self.asks = bool(options.api_key) or self._path is not None
        self.has_admin = options.admin_api_key is not None
        self.anyone = ApiKey(ANYONE, named=False)
        self._seen: tuple[int, int, int] | None = None
        self._tenants = dict(self._fixed)
        if self._path is not None:
            self._seen = _identity(self._path)
            self._take(read_keys(self._path))

    def find(self, headers: Headers) -> ApiKey | None:
        """The tenant of the key that a request brings; without a right one, that of everyone, or None where a key is
        needed.
        """
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = (
            bearer.strip() if kind.lower() == "bearer" else "",
            headers.get("x-api-key", ""),
        )  # OpenAI's, Anthropic's
        blinds = [self._blind(_digest(key)) for key in given]
        found = [self._tenants.get(blind) for blind in blinds]
        api_key = next((one for one in found if one is not None), None)
        return self.anyone if api_key is None and not self.asks else api_key

    def check_admin(self, api_key: ApiKey, path: str) -> None:
        """Raises ApiError (403) where the tenant may not use the admin route `path`."""
        if self.has_admin and api_key.admin:
            return
        message = f"{path} is an admin route: send the server's --admin-api-key as `Authorization: Bearer KEY`"
        if not self.has_admin:
            message = f"{path} is an admin route, and these are off: --admin-api-key KEY turns them on"
        code = "admin_only" if self.has_admin else "admin_off"
        raise ApiError(ErrorInfo(403, message, "permission_error", code=code))

    async def refresh(self) -> None:
        """Reads the keys file again if it has changed; a broken one changes nothing, and the log says so once."""
        if self._path is None or (found := _identity(self._path)) == self._seen:
            return
        self._seen = found
        try:
            self._take(await asyncio.to_thread(read_keys, self._path))  # a thousand keys of YAML take 40 ms
            log.info("api_keys_file: read again, %d keys", len(self._tenants) - len(self._fixed))
        except UnsupportedConfig as error:
            log.error("%s; the keys that were read before stay", error)

    def _take(self, entries: list[ApiKeyEntry]) -> None:
        """Accounts go on under their names: what runs and was used is not forgotten. Raises UnsupportedConfig for what
        contradicts itself.
        """
        before = {api_key.name: api_key for api_key in self._tenants.values()}
        names = {api_key.name for api_key in self._fixed.values()}
        tenants: dict[bytes, ApiKey] = {}
        renewed: dict[str, ApiKeyEntry] = {}
        for entry in entries:
            blind = self._blind(entry.digest())
            if entry.name in names:
                raise UnsupportedConfig(f"api_keys_file {self._path}: two keys are called {entry.name!r}")
            if blind in tenants or blind in self._fixed:
                raise UnsupportedConfig(f"api_keys_file {self._path}: {entry.name!r} has a key that another has too")
            names.add(entry.name)
            tenants[blind] = before.get(entry.name) or ApiKey(entry)
            renewed[entry.name] = entry
        for api_key in tenants.values():
            api_key.entry = renewed[api_key.name]  # only now that the whole file is known to be right
        self._tenants = self._fixed | tenants

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")

    @staticmethod
    def _own(name: str) -> ApiKey:
        return ApiKey(ApiKeyEntry(name=name, key="-"))


def read_keys(path: Path) -> list[ApiKeyEntry]:
    """The entries of a keys file. Raises UnsupportedConfig."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise UnsupportedConfig(f"api_keys_file {path}: is larger than {MAX_FILE} bytes")
        return msgspec.yaml.decode(path.read_bytes(), type=list[ApiKeyEntry])
    except OSError as error:
        raise UnsupportedConfig(f"api_keys_file {path}: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError) as error:  # YAML passes on what a date or a number that is none raises
        raise UnsupportedConfig(
            f"api_keys_file {path}: {str(error).splitlines()[0]}; it is a list of entries with name and key"
        ) from None


def _identity(path: Path) -> tuple[int, int, int]:
    """Changes when the file does; zeros where there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _limited(message: str, field: str, wait: int) -> ApiError:
    return ApiError(ErrorInfo(429, message, "rate_limit_error", field, "rate_limit_exceeded", retry=True, wait=wait))
