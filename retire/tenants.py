"""Tenants: who may ask, what each may hold, and who never shares a cache with whom.

Owns: the tenants file, the keys behind `--api-key`, and the answer to "which tenant is this?".
Must not know: HTTP beyond the Authorization header's text, the engine.
Strategy: read once per process, refuse at start-up with one line; keys are kept as digests, compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import tomllib
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from retire.core.errors import SeamError, Unauthorized
from retire.core.types import TenantId

FILE_ENV: Final = "RETIRE_TENANTS"
DEFAULT: Final = TenantId("default")
DEFAULT_PIN_SHARE: Final = 0.5
_FIELDS: Final = (
    "keys",
    "key_sha256",
    "scopes",
    "transitions",
    "pin_blocks",
    "pin_share",
    "beyond_quota",
    "dram_bytes",
)


@dataclass(frozen=True, slots=True)
class Tenant:
    """`scopes`, `transitions`: how many it may have open; None: the server's own limit.

    `pin_blocks`, `pin_share`: how much of the KV pool its pins may guarantee, in blocks and as a share; the smaller of
    those given.  `beyond_quota`: whether more is kept for as long as nobody needs it.  `dram_bytes`: of host memory.
    """

    id: TenantId
    scopes: int | None = None
    transitions: int | None = None
    pin_blocks: int | None = None
    pin_share: float | None = None
    beyond_quota: Literal["best_effort", "cold"] = "best_effort"
    dram_bytes: int | None = None

    def pin_quota(self, pool_blocks: int) -> int:
        """Blocks of a pool of so many that this tenant's pins may guarantee."""
        share = self.pin_share
        if share is None:
            share = DEFAULT_PIN_SHARE if self.pin_blocks is None else 1.0
        of_share = math.floor(share * pool_blocks)
        return of_share if self.pin_blocks is None else min(self.pin_blocks, of_share)


class Registry:
    """`keys`: digest of each key and whose it is; without any, everybody is the default tenant.

    `isolated`: tenants share no prefix cache.
    """

    def __init__(
        self, tenants: Mapping[TenantId, Tenant], keys: Iterable[tuple[bytes, TenantId]], *, isolated: bool
    ) -> None:
        self._tenants = dict(tenants)
        self._keys = tuple(keys)
        self.isolated = isolated

    @classmethod
    def from_env(cls, api_keys: Iterable[str] = ()) -> Registry:
        """The file that the environment names, else the keys of vLLM's own flag.

        Raises:
            SeamError: the file is malformed, or both are given.
        """
        path, given = os.environ.get(FILE_ENV), [key for key in api_keys if key]
        if not path:
            return cls.of_keys(given)
        if given:
            raise SeamError(f"--api-key and the tenants file {path} exclude each other: put the key into the file")
        return load(Path(path))

    @classmethod
    def of_keys(cls, keys: Iterable[str]) -> Registry:
        """One tenant behind all these keys; without any, behind every request."""
        return cls({}, [(_digest(key), DEFAULT) for key in keys], isolated=False)

    @property
    def names(self) -> tuple[TenantId, ...]:
        """Every tenant that can ask."""
        return tuple(self._tenants) or (DEFAULT,)

    @property
    def guards_everything(self) -> bool:
        """Whether every route asks for a key, not only those that vLLM guards."""
        return bool(self._tenants)

    def tenant(self, tenant: TenantId) -> Tenant:
        """What the tenant may hold; the defaults for one that no file names."""
        return self._tenants.get(tenant) or Tenant(tenant)

    def cache_salt(self, tenant: TenantId | None, secret: int, given: str | None) -> str:
        """What keeps the blocks of this tenant's requests apart; a request of nobody shares with nobody."""
        whose = uuid.uuid4().hex if tenant is None else f"{secret}\0{tenant}"
        return hashlib.sha256(f"{whose}\0{given or ''}".encode()).hexdigest()

    def authenticate(self, authorization: str | None) -> TenantId:
        """The tenant behind an Authorization header.

        Raises:
            Unauthorized: keys are configured and this is none of them.
        """
        if not self._keys:
            return DEFAULT
        scheme, _, key = (authorization or "").partition(" ")
        given, found = _digest(key), None
        for digest, tenant in self._keys:  # every one of them, so that time tells nothing
            if hmac.compare_digest(digest, given):
                found = tenant
        if scheme.lower() != "bearer" or found is None:
            raise Unauthorized("Unauthorized")
        return found


def load(path: Path) -> Registry:
    """Read a tenants file.

    Raises:
        SeamError: naming the file, the tenant and the field.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SeamError(f"tenants file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SeamError(f"tenants file {path}: {error}") from error
    try:
        return _registry(document)
    except ValueError as error:
        raise SeamError(f"tenants file {path}: {error}") from error


def _registry(document: dict[str, Any]) -> Registry:
    unknown = sorted(set(document) - {"tenant", "isolate_prefix_cache"})
    _require(not unknown, f"unknown field {', '.join(unknown)}")
    sections = document.get("tenant")
    _require(isinstance(sections, dict) and bool(sections), "no [tenant.NAME] in it")
    assert isinstance(sections, dict)
    tenants: dict[TenantId, Tenant] = {}
    keys: dict[bytes, TenantId] = {}
    for name, section in sections.items():
        _require(bool(name) and isinstance(section, dict), f"[tenant.{name}] is no table")
        tenant = TenantId(name)
        for digest in _key_digests(name, section):
            _require(digest not in keys, f"tenant {name}: one of its keys is given twice")
            keys[digest] = tenant
        tenants[tenant] = _tenant(tenant, section)
    shares = sum(tenant.pin_share or 0.0 for tenant in tenants.values())
    _require(shares <= 1.0 + 1e-9, f"pin_share: the tenants' shares add up to {shares:g}, above 1")
    isolated = document.get("isolate_prefix_cache", len(tenants) > 1)
    _require(isinstance(isolated, bool), "isolate_prefix_cache is true or false")
    return Registry(tenants, keys.items(), isolated=isolated)


def _tenant(tenant: TenantId, section: dict[str, Any]) -> Tenant:
    unknown = sorted(set(section) - set(_FIELDS))
    _require(not unknown, f"tenant {tenant}: unknown field {', '.join(unknown)}")
    share = section.get("pin_share")
    _require(
        share is None or (_is_number(share) and 0 <= share <= 1), f"tenant {tenant}: pin_share is a number in [0, 1]"
    )
    beyond = section.get("beyond_quota", "best_effort")
    _require(beyond in ("best_effort", "cold"), f'tenant {tenant}: beyond_quota is "best_effort" or "cold"')
    return Tenant(
        tenant,
        scopes=_count(tenant, section, "scopes", at_least=1),
        transitions=_count(tenant, section, "transitions", at_least=1),
        pin_blocks=_count(tenant, section, "pin_blocks"),
        pin_share=None if share is None else float(share),
        beyond_quota=beyond,
        dram_bytes=_count(tenant, section, "dram_bytes"),
    )


def _key_digests(name: str, section: dict[str, Any]) -> list[bytes]:
    plain, hashed = section.get("keys", []), section.get("key_sha256", [])
    for field, values in (("keys", plain), ("key_sha256", hashed)):
        are_texts = isinstance(values, list) and all(isinstance(value, str) and value.strip() for value in values)
        _require(are_texts, f"tenant {name}: {field} is a list of texts that are not empty")
    try:
        digests = [bytes.fromhex(value) for value in hashed]
    except ValueError:
        digests = [b""]
    _require(
        all(len(digest) == hashlib.sha256().digest_size for digest in digests), f"tenant {name}: key_sha256 is hex"
    )
    _require(bool(plain or hashed), f"tenant {name}: it has no key")
    return [*(_digest(key) for key in plain), *digests]


def _count(tenant: TenantId, section: dict[str, Any], field: str, at_least: int = 0) -> int | None:
    value = section.get(field)
    is_count = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= at_least)
    _require(is_count, f"tenant {tenant}: {field} is a whole number from {at_least}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
