"""A small world to test the protocol in: short prompts, two-token blocks, pins that are counted.

Every request is named by its epoch and a letter ("1a"); its blocks are its own, so a certificate shows its source.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from retire.core import Effect, Event, Geometry, ScopeState, check, step
from retire.core.effects import ReleasePins
from retire.core.errors import ProtocolError
from retire.core.events import EpochAdvanced, RequestAdmitted, RequestClosed
from retire.core.types import (
    BlockId,
    BlockRef,
    Contract,
    Epoch,
    Generation,
    Holding,
    Inherit,
    KVGroup,
    RequestId,
    ScopeId,
    Successor,
    TenantId,
    TokenCount,
    TransitionId,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

TENANT, SCOPE = TenantId("acme"), ScopeId("plan-7")
BLOCK_TOKENS = 2
CERTIFIED, NONE = Contract(), Contract(inherit=Inherit.NONE)
COMMON = (1, 2, 3, 4, 5, 6)


def steady(_block: BlockId) -> Generation:
    """No block changes hands."""
    return Generation(1)


def geometry(
    groups: Sequence[KVGroup] = (KVGroup(BLOCK_TOKENS),), generations: Callable[..., Generation] = steady
) -> Geometry:
    return Geometry(groups, generations)


ENV = geometry()


def refs(blocks: Iterable[int | None], generation: int = 1) -> tuple[BlockRef | None, ...]:
    return tuple(None if b is None else BlockRef(BlockId(b), Generation(generation)) for b in blocks)


def holding(
    request: str,
    tokens: Sequence[int] = (*COMMON, 90, 91),
    frontier: int | None = None,
    *,
    tenant: str = TENANT,
    fingerprint: str = "f",
    groups: tuple[tuple[BlockRef | None, ...], ...] | None = None,
    first_block: int = 100,
) -> Holding:
    frontier = len(tokens) if frontier is None else frontier
    if groups is None:
        groups = (refs(range(first_block, first_block + frontier // BLOCK_TOKENS)),)
    return Holding(RequestId(request), TenantId(tenant), tokens, TokenCount(frontier), fingerprint, groups)


def successor(
    request: str, tokens: Sequence[int] = (*COMMON, 80, 81), *, tenant: str = TENANT, fingerprint: str = "f"
) -> Successor:
    return Successor(RequestId(request), TenantId(tenant), tokens, fingerprint)


def rid(name: str) -> RequestId:
    return RequestId(name)


def tid(name: str) -> TransitionId:
    return TransitionId(name)


def advanced(old: int, new: int, contract: Contract = CERTIFIED, name: str | None = None) -> EpochAdvanced:
    return EpochAdvanced(tid(name or f"t{old}{new}"), Epoch(old), Epoch(new), contract)


def admitted(request: str, epoch: int | None = None, tokens: Sequence[int] = (*COMMON, 80, 81)) -> RequestAdmitted:
    """Epoch from the request's name unless said otherwise."""
    return RequestAdmitted(successor(request, tokens), Epoch(int(request[0]) if epoch is None else epoch))


def closed(request: str, held: Holding | None = None) -> RequestClosed:
    return RequestClosed(rid(request), held)


def fresh(epoch: int = 1) -> ScopeState:
    return ScopeState(TENANT, SCOPE, Epoch(epoch))


def play(state: ScopeState, *events: Event, env: Geometry = ENV) -> tuple[ScopeState, tuple[Effect, ...]]:
    """Feed the events in order; the last state, sound at every step, and all effects."""
    effects: tuple[Effect, ...] = ()
    for event in events:
        state, new = step(state, event, env)
        check(state)
        effects += new
    return state, effects


def state_after(*events: Event, env: Geometry = ENV) -> ScopeState:
    return play(fresh(), *events, env=env)[0]


def is_rejected(state: ScopeState, event: Event, env: Geometry = ENV) -> bool:
    try:
        step(state, event, env)
    except ProtocolError:
        return True
    return False


def released(effects: Iterable[Effect]) -> tuple[Holding, ...]:
    return tuple(held for effect in effects if isinstance(effect, ReleasePins) for held in effect.holdings)


class Ledger:
    """Counts every hand-over of pins.  An accepted `RequestClosed` enters; `ReleasePins` leaves; nothing else may."""

    def __init__(self) -> None:
        self.entered: Counter[RequestId] = Counter()
        self.left: Counter[RequestId] = Counter()

    def record(self, event: Event, effects: Iterable[Effect], after: ScopeState) -> None:
        if isinstance(event, RequestClosed) and event.holding is not None:
            self.entered[event.holding.request] += 1
        self.left.update(held.request for held in released(effects))
        owned = Counter(held.request for held in after.holdings)
        assert max(owned.values(), default=1) == 1, f"owned twice: {owned}"
        assert self.entered == self.left + owned, f"entered {self.entered}, left {self.left}, owned {owned}"
