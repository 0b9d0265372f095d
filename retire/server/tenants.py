"""Who is asking.

The gate stands before vLLM's own authentication, so whatever changes authority is authenticated here, by the same
keys (`--api-key`, `VLLM_API_KEY`).  One tenant exists behind all of them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

from retire.core.errors import Unauthorized
from retire.core.types import TenantId

DEFAULT = TenantId("default")


class Tenants:
    """`keys`: the accepted API keys; none means that everybody is the default tenant."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys if key]

    def authenticate(self, authorization: str | None) -> TenantId:
        """The tenant behind an Authorization header.

        Raises:
            Unauthorized: keys are configured and this is none of them.
        """
        if not self._digests:
            return DEFAULT
        scheme, _, key = (authorization or "").partition(" ")
        given = hashlib.sha256(key.encode()).digest()
        known = False
        for digest in self._digests:  # every one of them, so that time tells nothing
            known |= secrets.compare_digest(given, digest)
        if scheme.lower() != "bearer" or not known:
            raise Unauthorized("Unauthorized")
        return DEFAULT
