"""Whether reuse pays, by what was measured on this engine.

Owns: how long a computed prompt token takes here, and the two questions that ALIGN asks.  Must not know: scopes.
"""

from __future__ import annotations

from collections.abc import Callable

from retire.core.types import Tier, TokenCount

WEIGHT = 0.2  # of the newest step in the running mean


class Rates:
    """`restore_ns`: how long so many tokens take to come back from host memory, None while nobody knows.

    `min_tokens`: what is shorter is never worth a certificate.
    """

    def __init__(self, min_tokens: int, restore_ns: Callable[[int], float | None] | None) -> None:
        self._min_tokens = min_tokens
        self._restore_ns = restore_ns
        self.ns_per_token: float | None = None

    def computed(self, tokens: int, took_ns: int) -> None:
        """A step of so many prompt tokens ran to its end."""
        newest = took_ns / tokens
        known = self.ns_per_token
        self.ns_per_token = newest if known is None else known + WEIGHT * (newest - known)

    def pays(self, tokens: TokenCount, tier: Tier) -> bool:
        """Whether reusing so many tokens from `tier` beats computing them.  What was never measured is tried."""
        if tokens < self._min_tokens:
            return False
        if tier is Tier.HBM or self.ns_per_token is None or self._restore_ns is None:
            return True
        restore_ns = self._restore_ns(tokens)
        return restore_ns is None or restore_ns < tokens * self.ns_per_token
