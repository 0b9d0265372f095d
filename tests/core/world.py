"""A small world to test the protocol in: short prompts, two-token blocks; pins and copies are counted.

Every request is named by its epoch and a letter ("1a"); its blocks are its own, so a certificate shows its source.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from retire.core import Effect, Event, Geometry, ScopeState, certify, check, step
from retire.core.effects import OffloadPages, ReleasePins, ReturnBlocks
from retire.core.errors import ProtocolError
from retire.core.events import CertificateAdopted, EpochAdvanced, PagesOffloaded, RequestAdmitted, RequestClosed
from retire.core.types import (
    BlockId,
    BlockRef,
    Certificate,
    Contract,
    Epoch,
    Equivalence,
    Generation,
    Holding,
    HostRef,
    Inherit,
    KVGroup,
    Refusal,
    RequestId,
    ScopeId,
    Successor,
    TenantId,
    Tier,
    TokenCount,
    TransitionId,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

TENANT, SCOPE = TenantId("acme"), ScopeId("plan-7")
BLOCK_TOKENS = 2
CERTIFIED, NONE = Contract(), Contract(inherit=Inherit.NONE)
HOST, EXACT = Contract(tier=Tier.DRAM), Contract(equivalence=Equivalence.EXACT)
COMMON = (1, 2, 3, 4, 5, 6)


def steady(_block: BlockId) -> Generation:
    """No block changes hands."""
    return Generation(1)


def geometry(
    groups: Sequence[KVGroup] = (KVGroup(BLOCK_TOKENS),),
    generations: Callable[..., Generation] = steady,
    **more: object,
) -> Geometry:
    return Geometry(groups, generations, **more)


def reused(*blocks: int) -> Callable[[BlockId], Generation]:
    """Everything is as it was, but these blocks have another owner."""
    return lambda block: Generation(2 if block in blocks else 1)


ENV = geometry()
WITH_HOST = geometry(offloads=True)


def refs(blocks: Iterable[int | None], generation: int = 1) -> tuple[BlockRef | None, ...]:
    return tuple(None if b is None else BlockRef(BlockId(b), Generation(generation)) for b in blocks)


def host_of(
    groups: Sequence[Sequence[BlockRef | None]], lost: Sequence[int] = ()
) -> tuple[tuple[HostRef | None, ...], ...]:
    """A copy in host memory: block 100 is in slot 1100, and so on."""
    return tuple(
        tuple(None if r is None or r.block in lost else HostRef(1000 + r.block, r.block) for r in row) for row in groups
    )


def certificate_of(
    held: Holding,
    wanted: Successor,
    env: Geometry = ENV,
    *,
    transfer: str = "t12",
    equivalence: Equivalence = Equivalence.MODE_MATCHED,
) -> Certificate | Refusal:
    return certify(held, wanted, scope=SCOPE, transfer=tid(transfer), equivalence=equivalence, env=env)


def holding(
    request: str,
    tokens: Sequence[int] = (*COMMON, 90, 91),
    frontier: int | None = None,
    *,
    tenant: str = TENANT,
    fingerprint: str = "f",
    groups: tuple[tuple[BlockRef | None, ...], ...] | None = None,
    first_block: int = 100,
    grid: int = 0,
    guaranteed: bool = True,
    copied: bool = False,
) -> Holding:
    frontier = len(tokens) if frontier is None else frontier
    if groups is None:
        groups = (refs(range(first_block, first_block + frontier // BLOCK_TOKENS)),)
    return Holding(
        RequestId(request),
        TenantId(tenant),
        tokens,
        TokenCount(frontier),
        fingerprint,
        groups,
        TokenCount(grid),
        guaranteed,
        host_of(groups) if copied else None,
    )


def successor(
    request: str, tokens: Sequence[int] = (*COMMON, 80, 81), *, tenant: str = TENANT, fingerprint: str = "f"
) -> Successor:
    return Successor(RequestId(request), TenantId(tenant), tokens, fingerprint)


def rid(name: str) -> RequestId:
    return RequestId(name)


def tid(name: str) -> TransitionId:
    return TransitionId(name)


def advanced(
    old: int,
    new: int,
    contract: Contract = CERTIFIED,
    name: str | None = None,
    *,
    left: tuple[Holding, ...] = (),
    refusal: Refusal | None = None,
) -> EpochAdvanced:
    return EpochAdvanced(tid(name or f"t{old}{new}"), Epoch(old), Epoch(new), contract, left, refusal)


def admitted(request: str, epoch: int | None = None, tokens: Sequence[int] = (*COMMON, 80, 81)) -> RequestAdmitted:
    """Epoch from the request's name unless said otherwise."""
    return RequestAdmitted(successor(request, tokens), Epoch(int(request[0]) if epoch is None else epoch))


def closed(request: str, held: Holding | None = None, refusal: Refusal | None = None) -> RequestClosed:
    return RequestClosed(rid(request), held, refusal)


def offloaded(held: Holding) -> PagesOffloaded:
    return PagesOffloaded(held.request, host_of(held.groups))


def not_offloaded(request: str) -> PagesOffloaded:
    return PagesOffloaded(rid(request), None)


def adopted(certificate: Certificate) -> CertificateAdopted:
    """The target's table shows what was certified; restored pages got blocks from 500 on."""
    blocks = [
        tuple(500 + page.slot if isinstance(page, HostRef) else page and page.block for page in group)
        for group in certificate.groups
    ]
    return CertificateAdopted(certificate.target, tuple(blocks))


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
    """Counts every hand-over of pins and every copy.

    An accepted `RequestClosed` or `EpochAdvanced` enters; `ReleasePins` leaves; nothing else may.  A holding is given
    to host memory once.  `asked`: copies whose answer is still owed.
    """

    def __init__(self) -> None:
        self.entered: Counter[RequestId] = Counter()
        self.left: Counter[RequestId] = Counter()
        self.returned: set[RequestId] = set()
        self.asked: set[RequestId] = set()

    def record(self, event: Event, effects: Iterable[Effect], after: ScopeState) -> None:
        effects = tuple(effects)
        self.entered.update(held.request for held in handed_over(event))
        self.left.update(held.request for held in released(effects))
        owned = Counter(held.request for held in after.holdings)
        assert max(owned.values(), default=1) == 1, f"owned twice: {owned}"
        assert self.entered == self.left + owned, f"entered {self.entered}, left {self.left}, owned {owned}"
        for effect in effects:
            if isinstance(effect, OffloadPages):
                assert effect.holding in after.holdings
                assert effect.holding.request not in self.asked, "copied twice at a time"
                self.asked.add(effect.holding.request)
            elif isinstance(effect, ReturnBlocks):
                assert effect.holding in after.holdings
                assert effect.holding.request not in self.returned, "returned twice"
                self.returned.add(effect.holding.request)
        if after.transition:
            assert after.transition.copying <= self.asked, "waits for an answer that will not come"


def handed_over(event: Event) -> tuple[Holding, ...]:
    """The pins that come with an event."""
    if isinstance(event, EpochAdvanced):
        return event.left
    return (event.holding,) if isinstance(event, RequestClosed) and event.holding is not None else ()
