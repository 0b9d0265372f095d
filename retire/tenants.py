"""Who is isolated from whom, by which keys they are known, and what each may hold.

Owns: the tenants file (`RETIRE_TENANTS`), authentication, and the tenant that the current request belongs to.
Must not know: routes, vLLM, how a quota is enforced.
Strategy: read once per process, before anything is loaded.  A file that is not understood in every word stops start-up
with one line: a limit that is ignored because it is misspelt is worse than no server.  A tenant comes from a key and
from nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import secrets
import tomllib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from retire.core.errors import SeamError, Unauthorized
from retire.core.types import TenantId

TENANTS_ENV: Final = "RETIRE_TENANTS"
DEFAULT: Final = TenantId("default")
DEFAULT_PIN_SHARE: Final = 0.5
NAME_MAX_CHARS: Final = 64
SCOPES_MAX: Final = 2**20
TENANTS_MAX: Final = 256
# What a server with a tenants file shows to everybody: liveness, and what describes the server rather than its use.
OPEN: Final = frozenset({"/health", "/ping", "/version", "/metrics", "/docs", "/redoc", "/openapi.json"})

asking: ContextVar[TenantId | None] = ContextVar("retire_tenant", default=None)
"""Whose request this task works for.  Set by the gate, for every request anew; None: nobody was asked for a key."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant.  None: the server's own default.

    `key_digests`: SHA-256 of its keys.  `scopes`: in use at once, that is with a live request or paused.
    `transitions`: scopes at once whose latest transition is open.  `pin_blocks`, `pin_share`: see `pin_quota`.
    `beyond_quota`: what becomes of pins beyond it.  `dram_bytes`: host memory for its certified blocks.
    """

    id: TenantId
    key_digests: frozenset[bytes] = field(default=frozenset(), repr=False)
    scopes: int | None = None
    transitions: int | None = None
    pin_blocks: int | None = None
    pin_share: float | None = None
    beyond_quota: Literal["best_effort", "cold"] = "best_effort"
    dram_bytes: int | None = None

    def pin_quota(self, pool_blocks: int) -> int:
        """How many blocks of a pool of `pool_blocks` it may pin for certain: the smaller of what its file grants.

        0: it never inherits.
        """
        granted = [] if self.pin_blocks is None else [self.pin_blocks]
        if self.pin_share is not None or not granted:
            share = DEFAULT_PIN_SHARE if self.pin_share is None else self.pin_share
            granted.append(math.floor(share * pool_blocks))
        return min(granted)


class Registry:
    """All tenants of a server.

    `isolated`: nothing that one tenant's request has computed serves another's, not through vLLM's prefix cache either.
    `path`: the file they come from; None for a server with one tenant, behind vLLM's own keys.
    """

    def __init__(self, tenants: Iterable[Tenant], *, isolated: bool = False, path: Path | None = None) -> None:
        self._tenants = {tenant.id: tenant for tenant in tenants}
        self._digests = [(digest, tenant.id) for tenant in self._tenants.values() for digest in tenant.key_digests]
        self.isolated = isolated
        self.path = path

    @classmethod
    def single(cls, api_keys: Iterable[str] = ()) -> Registry:
        """The default tenant behind these keys; without a key, everybody is it."""
        return cls([Tenant(DEFAULT, frozenset(_digest(key) for key in api_keys if key))])

    @classmethod
    def load(cls, path: Path) -> Registry:
        """Read a tenants file.  Raises SeamError, one line that names the file and what is wrong where."""
        try:
            with path.open("rb") as file:
                return _registry(path, tomllib.load(file))
        except _Malformed as error:
            raise SeamError(f"tenants file {str(path)!r}: {error}") from error
        except OSError as error:
            raise SeamError(f"tenants file {str(path)!r}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:  # TOML or UTF-8
            raise SeamError(f"tenants file {str(path)!r}: not TOML: {error}") from error

    @classmethod
    def from_env(cls) -> Registry:
        """What `RETIRE_TENANTS` names, else the default tenant alone.  Raises as `load`."""
        path = os.environ.get(TENANTS_ENV)
        return cls.load(Path(path)) if path else cls.single()

    def accepting(self, api_keys: Iterable[str]) -> Registry:
        """With vLLM's own keys (`--api-key`, `VLLM_API_KEY`).

        Raises:
            SeamError: there is a tenants file; vLLM would then refuse every key but its own.
        """
        keys = [key for key in api_keys if key]
        if self.path is None:
            return Registry.single(keys)
        if keys:
            raise SeamError(
                f"--api-key (or VLLM_API_KEY) beside the tenants file {str(self.path)!r}: "
                "give that key to a tenant of the file instead"
            )
        return self

    @property
    def ids(self) -> tuple[TenantId, ...]:
        """Every tenant, in the file's order."""
        return tuple(self._tenants)

    def tenant(self, tenant: TenantId) -> Tenant:
        """What the tenant may do; one that nobody configured has the defaults."""
        return self._tenants.get(tenant) or Tenant(tenant)

    def guards(self, path: str) -> bool:
        """Whether the gate asks for a key on this route of vLLM.  Without a tenants file that is vLLM's own affair."""
        return self.path is not None and path not in OPEN

    def authenticate(self, authorization: str | None) -> TenantId:
        """The tenant behind an Authorization header.

        Raises:
            Unauthorized: keys are configured and this is none of them.
        """
        if not self._digests:
            return DEFAULT
        scheme, _, key = (authorization or "").partition(" ")
        given, found = _digest(key), None
        for digest, tenant in self._digests:  # every one of them, so that time tells nothing
            if secrets.compare_digest(given, digest):
                found = tenant
        if scheme.lower() != "bearer" or found is None:
            raise Unauthorized("Unauthorized")
        return found


def asker() -> TenantId:
    """The tenant that the current request belongs to.  Raises Unauthorized where none was asked for a key."""
    tenant = asking.get()
    if tenant is None:
        raise Unauthorized("Unauthorized")
    return tenant


def cache_salt(tenant: TenantId | None, secret: int, own: str | None) -> str:
    """What stands for the tenant in the hashes of vLLM's prefix cache, its client's `own` salt included.

    `secret`: the authority table's, so that no client can name another tenant's.  Without a tenant: a salt that nobody
    else has, and with it a request that shares with nobody.
    """
    if tenant is None:
        return secrets.token_hex(32)
    return hmac.digest(secret.to_bytes(8, "big"), f"{tenant}\0{own or ''}".encode(), "sha256").hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


# -- the file --------------------------------------------------------------------------------------------------------


class _Malformed(Exception):
    """Where in the file, and what is wrong there.  Never holds a key."""


def _registry(path: Path, content: dict[str, Any]) -> Registry:
    isolate, tables = content.pop("isolate_prefix_cache", None), content.pop("tenants", None)
    _require_empty(content)
    if not isinstance(isolate, bool | None):
        raise _Malformed("isolate_prefix_cache: is true or false")
    if not isinstance(tables, dict) or not 1 <= len(tables) <= TENANTS_MAX:
        raise _Malformed(f"tenants: 1 to {TENANTS_MAX} tables [tenants.NAME]")
    tenants = [_named_tenant(name, table) for name, table in tables.items()]
    _require_own_keys(tenants)
    if math.fsum(tenant.pin_share or 0 for tenant in tenants) > 1:
        raise _Malformed("pin_share: the shares of all tenants are more than the whole pool")
    return Registry(tenants, isolated=len(tenants) > 1 if isolate is None else isolate, path=path)


def _require_empty(table: dict[str, Any]) -> None:
    for name in table:
        raise _Malformed(f"{name!r}: no such field")


def _named_tenant(name: str, table: object) -> Tenant:
    if not isinstance(table, dict):  # whatever stands there instead may be a key
        raise _Malformed("tenants: each of them is a table [tenants.NAME]")
    if not 1 <= len(name) <= NAME_MAX_CHARS or not name.isprintable():
        raise _Malformed(f"tenant {name!r}: a name has 1 to {NAME_MAX_CHARS} printable characters")
    try:
        return _tenant(TenantId(name), table)
    except _Malformed as error:
        raise _Malformed(f"tenant {name!r}: {error}") from error


def _tenant(name: TenantId, table: dict[str, Any]) -> Tenant:
    digests = [*_keys(table), *_key_digests(table)]
    if not digests:
        raise _Malformed("keys: without keys or key_sha256 nobody can be this tenant")
    if len(set(digests)) < len(digests):
        raise _Malformed("keys: the same key twice")
    tenant = Tenant(
        name,
        frozenset(digests),
        scopes=_count(table, "scopes", low=1, high=SCOPES_MAX),
        transitions=_count(table, "transitions"),
        pin_blocks=_count(table, "pin_blocks"),
        pin_share=_share(table, "pin_share"),
        beyond_quota=_beyond_quota(table),
        dram_bytes=_count(table, "dram_bytes"),
    )
    _require_empty(table)
    return tenant


def _strings(table: dict[str, Any], name: str) -> Iterator[str]:
    values = table.pop(name, [])
    if not isinstance(values, list) or any(not isinstance(value, str) for value in values):
        raise _Malformed(f"{name}: is a list of strings")
    yield from values


def _keys(table: dict[str, Any]) -> Iterator[bytes]:
    for key in _strings(table, "keys"):
        if not key or not key.isprintable() or " " in key:
            raise _Malformed("keys: a key is not empty, and has neither spaces nor control characters")
        yield _digest(key)


def _key_digests(table: dict[str, Any]) -> Iterator[bytes]:
    for text in _strings(table, "key_sha256"):
        try:
            digest = bytes.fromhex(text)
        except ValueError:
            digest = b""
        if len(text) != 64 or len(digest) != 32:
            raise _Malformed("key_sha256: is 64 hex digits")
        if digest == _digest(""):
            raise _Malformed("key_sha256: is that of an empty key")
        yield digest


def _count(table: dict[str, Any], name: str, *, low: int = 0, high: int = 2**63 - 1) -> int | None:
    value = table.pop(name, None)
    if value is not None and (type(value) is not int or not low <= value <= high):  # True is an int
        raise _Malformed(f"{name}: is an integer from {low}" + (f" to {high}" if high < 2**63 - 1 else ""))
    return value


def _share(table: dict[str, Any], name: str) -> float | None:
    value = table.pop(name, None)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= 1:  # NaN is not
        raise _Malformed(f"{name}: is a number from 0 to 1")
    return float(value)


def _beyond_quota(table: dict[str, Any]) -> Literal["best_effort", "cold"]:
    match table.pop("beyond_quota", "best_effort"):
        case "best_effort":
            return "best_effort"
        case "cold":
            return "cold"
        case _:
            raise _Malformed('beyond_quota: is "best_effort" or "cold"')


def _require_own_keys(tenants: list[Tenant]) -> None:
    owners: dict[bytes, TenantId] = {}
    for tenant in tenants:
        for digest in tenant.key_digests:
            owner = owners.setdefault(digest, tenant.id)
            if owner != tenant.id:
                raise _Malformed(f"tenant {tenant.id!r}: keys: one of them is also a key of tenant {owner!r}")
