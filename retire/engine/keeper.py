"""What is kept of a closed request until its successor adopts it.

Owns: carrying pins, copies to host memory and their release out on `Ownership` and the host tier.
Must not know: scopes' states; the protocol decides what is kept, this only whether it can be.
Strategy: a holding is pinned once when it is offered and released once; its copy lives and dies beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from retire.core.certificate import Geometry, boundary, promised
from retire.core.errors import InvariantViolation
from retire.core.types import (
    Certificate,
    Contract,
    Equivalence,
    Holding,
    Inherit,
    Refusal,
    RequestId,
    Ticket,
    Tier,
    TokenCount,
)
from retire.engine import notes
from retire.engine.tier_scheduler import Tier as HostTier
from retire.kv.ownership import Ownership


class Keeper:
    """One per scheduler.  `tier` is None where the server has no host memory for pages."""

    def __init__(self, ownership: Ownership, geometry: Geometry, tier: HostTier | None) -> None:
        self.ownership = ownership
        self.geometry = geometry
        self._tier = tier

    def keep(self, left: Holding, contract: Contract | None) -> tuple[Holding | None, Refusal | None]:
        """Pin what the contract promises to a successor; without a promise, everything.

        `contract` is None while it is still on its way.  Returns the pinned holding, or why there is none.
        """
        env, part = self.geometry, left
        if boundary(left.frontier_tokens, env.groups) == 0:
            return None, Refusal.NOTHING_COMPLETED
        if contract is not None:
            if contract.inherit is Inherit.NONE:
                return None, None
            if contract.keep_prefix_tokens is not None:
                grid = env.exact_tokens if contract.equivalence is Equivalence.EXACT else None
                part = promised(left, contract.keep_prefix_tokens, env.groups, grid or 1)
        tokens = boundary(part.frontier_tokens, env.groups)
        if tokens == 0 or not env.pays(TokenCount(tokens), Tier.HBM):
            return None, Refusal.UNPROFITABLE
        pinned = self.ownership.pin(left, part, env.groups)
        if pinned is None:
            return None, Refusal.QUOTA
        notes.pinned(pinned)
        return pinned, None

    def narrow(self, kept: Holding, contract: Contract) -> tuple[Holding | None, Refusal | None]:
        """The contract of a holding that was pinned without it has arrived."""
        self._unpin(kept.request)
        return self.keep(kept, contract)

    def release(self, holdings: Iterable[Holding]) -> None:
        """Nobody will adopt these any more, or somebody has."""
        for holding in holdings:
            self._unpin(holding.request)
            if self._tier is not None:
                self._tier.drop(holding.request)

    def _unpin(self, request: RequestId) -> None:
        self.ownership.release(request)
        notes.released(request)

    # -- host memory --------------------------------------------------------------------------------------------------

    def offload(self, holding: Holding, expires_ns: int) -> bool:
        """Begin to copy what is left of it; False when there is no room."""
        if self._tier is None:
            return False
        alive = self.ownership.begin_copy(holding)
        begun = self._tier.offload(holding.request, holding.tenant, alive, expires_ns)
        if not begun:
            self.ownership.end_copy(holding.request)
        return begun

    def prolong(self, holding: Holding, expires_ns: int) -> None:
        """A later transition owns the copy: it lasts as long as that one's contract says."""
        if self._tier is not None:
            self._tier.prolong(holding.request, expires_ns)

    def copied(self, source: RequestId, *, wanted: bool) -> None:
        """The copy is over."""
        self.ownership.end_copy(source)
        if not wanted and self._tier is not None:
            self._tier.drop(source)

    def return_blocks(self, holding: Holding) -> None:
        """Give the device's blocks back to the allocator."""
        self.ownership.keep_only(holding.request, ())

    # -- adoption -----------------------------------------------------------------------------------------------------

    def install(self, certificate: Certificate, ticket: Ticket) -> None:
        """Prepare for the target: pins shrink to what it adopts, or its pages are about to be restored."""
        if certificate.tier is Tier.HBM:
            self.ownership.keep_only(certificate.source, certificate.groups)
        elif self._tier is not None:
            self._tier.expect(certificate.target, ticket, certificate)
        else:
            raise InvariantViolation("invariant 4: pages in host memory are certified, and there is no host tier")

    def withdraw(self, certificate: Certificate) -> None:
        """The target does not adopt it."""
        if certificate.tier is Tier.DRAM and self._tier is not None:
            self._tier.withdraw(certificate.target)

    def blocks(self, certificate: Certificate) -> tuple[list[Any], ...] | None:
        """The certified device blocks per group; None when one of them was reused since it was certified."""
        if not all(self.ownership.holds(page) for group in certificate.groups for page in group):
            return None
        return tuple([self.ownership.block_of(page) for page in group] for group in certificate.groups)

    def forget_copies(self) -> None:
        """Weights, adapters or the cache are about to change."""
        if self._tier is not None:
            self._tier.cancel_all()
        self.ownership.end_copies()

    def counters(self) -> dict[str, int]:
        """What host memory holds and has done."""
        return {} if self._tier is None else self._tier.counters()
