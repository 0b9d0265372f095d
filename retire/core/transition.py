"""One scope's transition from an old epoch to a new one.

Owns: everything that affects how a scope moves through ADVANCE FENCE ALIGN RESUME RECLAIM; it is all in `TABLE`, which
`step`, the tests and the diagram read.  Must not know: engines, time, threads.
Strategy: `step(state, event, env) -> (state, effects)`.  States are frozen and own their pins; a handler hands each
holding on to the next state or releases it, never both, never neither (invariant 6).  An event that the table does
not list, or whose handler finds it late or foreign, raises ProtocolError; nothing has changed then.

A scope rests idle (no transition), in FENCE, ALIGN or RESUME, or cancelled.  ADVANCE and RECLAIM are passed through
within one event: the store has already happened, and reclamation never holds a successor back (paper 5.3).
"""
# ruff: noqa: ARG001  every handler has the table's signature

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from .certificate import Geometry, best, first_needed
from .effects import (
    CloseRequests,
    Effect,
    InstallCertificate,
    OffloadPages,
    ReleasePins,
    ReportClosed,
    ReportStage,
    ReturnBlocks,
    StartCold,
    StartFresh,
)
from .errors import InvariantViolation, ProtocolError
from .events import (
    AdoptionFailed,
    CertificateAdopted,
    CertificatesRevoked,
    EpochAdvanced,
    Event,
    PagesOffloaded,
    PinsExpired,
    RequestAdmitted,
    RequestClosed,
    RequestFinished,
    ScopeCancelled,
)
from .invariants import Invariant, is_copy, require
from .types import (
    Certificate,
    Contract,
    Epoch,
    Holding,
    HostRef,
    Inherit,
    Outcome,
    Refusal,
    RequestId,
    ScopeId,
    Stage,
    Successor,
    TenantId,
    Tier,
    TransitionId,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NOBODY: Final[frozenset[RequestId]] = frozenset()


@dataclass(frozen=True, slots=True)
class Transition:
    """An open transition.  It owns its holdings until it hands them on or releases them.

    `closing`: old requests whose receipts are awaited; empty exactly when FENCE is over (invariant 4).
    `holdings`: pins owned here and nowhere else (invariant 6); in RESUME only the certificate's source.
    `successor`: the first request of the new epoch; waits in FENCE, installs in RESUME.
    `refusal`: why nothing is or will be held; set as soon as it is known (invariant 10).
    `unkept`: why something that was written is not held; the refusal if nothing else is.  QUOTA also if nothing else
    can be certified: its successor reads nothing, so that what has no room is not inherited through the prefix cache.
    `copying`: sources of the holdings that are being copied to host memory.
    """

    id: TransitionId
    old_epoch: Epoch
    new_epoch: Epoch
    contract: Contract
    stage: Stage
    closing: frozenset[RequestId] = NOBODY
    holdings: tuple[Holding, ...] = ()
    successor: Successor | None = None
    certificate: Certificate | None = None
    refusal: Refusal | None = None
    unkept: Refusal | None = None
    copying: frozenset[RequestId] = NOBODY


Place = Stage | Literal[Outcome.CANCELLED] | None
"""Where a scope rests: the open transition's stage, None when there is none, CANCELLED for good."""


@dataclass(frozen=True, slots=True)
class ScopeState:
    """What the engine knows of a scope.

    `epoch`: the current one as far as messages told; never falls (invariant 2).
    `live`: requests of that epoch.  `transition`: the open one, at most one (invariant 6).
    `leaving`: requests told to close that no transition waits for; the next FENCE waits for them too.

    A cancelled scope stays so.  When its id is used again, start a new state above the cancelled epoch: what is still
    leaving is a stranger there, and strangers' holdings are released on sight.
    """

    tenant: TenantId
    scope: ScopeId
    epoch: Epoch
    live: frozenset[RequestId] = NOBODY
    transition: Transition | None = None
    leaving: frozenset[RequestId] = NOBODY
    cancelled: bool = False

    @property
    def place(self) -> Place:
        """The row of `TABLE` that applies."""
        if self.cancelled:
            return Outcome.CANCELLED
        return None if self.transition is None else self.transition.stage

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """Every holding owned here."""
        return () if self.transition is None else self.transition.holdings

    @property
    def closing(self) -> frozenset[RequestId]:
        """The requests that the open transition waits for."""
        return NOBODY if self.transition is None else self.transition.closing


Step = tuple[ScopeState, tuple[Effect, ...]]


def step(state: ScopeState, event: Event, env: Geometry) -> Step:
    """The state after `event`, and what the caller must do, in order.

    Raises ProtocolError for an event that has no place here; InvariantViolation for a defect.  Both change nothing.
    """
    row = TABLE.get((state.place, type(event)))
    if row is None:
        raise ProtocolError(f"{type(event).__name__} has no place in {place_name(state.place)}")
    after, effects = row.handler(state, event, env)
    if after.place not in row.leads_to:
        raise InvariantViolation(f"{type(event).__name__} led from {state.place} to {after.place}, not in the table")
    return after, effects


# ADVANCE


def _advance(state: ScopeState, event: EpochAdvanced, env: Geometry) -> Step:
    """Revoke first: every request known is of an old epoch now.  An open transition hands on all it owns (9)."""
    overtaken = state.transition
    _expect(event.old_epoch >= state.epoch, f"late: epoch {event.old_epoch} was passed, {state.epoch} is current")
    _expect(event.new_epoch > event.old_epoch, f"epoch {event.new_epoch} does not follow {event.old_epoch}")
    _expect(overtaken is None or overtaken.id != event.transition, f"transition {event.transition} is open already")
    closing = state.live | state.leaving | state.closing
    for holding in event.left:
        _expect(holding.request not in closing, f"{holding.request} has not finished")
    holdings = (*state.holdings, *_offered(state, event.left))
    refusal = None if event.contract.inherit is Inherit.CERTIFIED else Refusal.NOT_WANTED
    opened = Transition(
        id=event.transition,
        old_epoch=event.old_epoch,
        new_epoch=event.new_epoch,
        contract=event.contract,
        stage=Stage.FENCE if closing else Stage.ALIGN,
        closing=closing,
        holdings=() if refusal else holdings,
        refusal=refusal,
        unkept=_unkept(overtaken.unkept if overtaken is not None else None, event.refusal),
        copying=overtaken.copying if overtaken is not None and not refusal else NOBODY,
    )
    effects: list[Effect] = [ReportStage(opened.id, Stage.ADVANCE)]
    if state.live:
        effects.append(CloseRequests(state.live))
    if refusal:
        effects.extend(_release(holdings))
    if overtaken is not None:
        effects.append(ReportClosed(overtaken.id, Outcome.OVERTAKEN))
    if not closing:
        opened, copies = _to_host(opened, env)
        effects.extend((ReportStage(opened.id, Stage.FENCE), *copies))
    return replace(state, epoch=event.new_epoch, live=NOBODY, leaving=NOBODY, transition=opened), tuple(effects)


# FENCE


def _close_in_fence(state: ScopeState, event: RequestClosed, env: Geometry) -> Step:
    """Keep what the request wrote, unless nothing will be inherited."""
    transition = _open(state)
    if event.request not in transition.closing:
        return _close_stranger(state, event, env)
    offered = _of_closed(state, event)
    if transition.refusal is None:
        unkept = _unkept(transition.unkept, event.refusal)
        state = replace(state, transition=replace(transition, unkept=unkept))
        return _closed(state, event.request, offered, env)
    after, effects = _closed(state, event.request, (), env)
    return after, (*_release(offered), *effects)


def _closed(state: ScopeState, request: RequestId, kept: tuple[Holding, ...], env: Geometry) -> Step:
    """One closing request fewer; the last ends FENCE."""
    transition = _open(state)
    closing = transition.closing - {request}
    transition = replace(transition, closing=closing, holdings=(*transition.holdings, *kept))
    if closing:
        return replace(state, transition=transition), ()
    transition = replace(transition, stage=Stage.ALIGN)
    fenced = ReportStage(transition.id, Stage.FENCE)
    if transition.successor is None:
        transition, copies = _to_host(transition, env)
        return replace(state, transition=transition), (fenced, *copies)
    after, effects = _align(state, transition, transition.successor, env)
    return after, (fenced, *effects)


def _close_stranger(state: ScopeState, event: RequestClosed, env: Geometry) -> Step:
    """No transition waits for this request: whatever it offers goes back at once."""
    _expect(event.request not in state.live, f"{event.request} is live: it finishes, or its epoch is revoked first")
    offered = _of_closed(state, event)
    _expect(bool(offered) or event.request in state.leaving, f"{event.request} is unknown, or closed already")
    return replace(state, leaving=state.leaving - {event.request}), _release(offered)


def _to_host(transition: Transition, env: Geometry) -> tuple[Transition, tuple[OffloadPages, ...]]:
    """Nobody is here to adopt yet: what the contract wants in host memory, or no pin guarantees, is copied there."""
    wanted = [
        holding
        for holding in transition.holdings
        if holding.host is None
        and holding.request not in transition.copying
        and (transition.contract.tier is Tier.DRAM or not holding.guaranteed)
        and env.offloads
        and env.pays(holding.frontier_tokens, Tier.DRAM)
    ]
    copying = transition.copying | {holding.request for holding in wanted}
    return replace(transition, copying=copying), tuple(OffloadPages(holding, transition.id) for holding in wanted)


def _offloaded(state: ScopeState, event: PagesOffloaded, env: Geometry) -> Step:
    """The copy is complete, or never will be.  Device blocks go back unless they are being installed."""
    transition = _open(state)
    _expect(event.request in transition.copying, f"no copy of {event.request} is awaited")
    transition = replace(transition, copying=transition.copying - {event.request})
    if event.host is None:
        return replace(state, transition=transition), ()
    (source,) = (holding for holding in transition.holdings if holding.request == event.request)
    require(is_copy(event.host, source.groups), Invariant.CERTIFIED, f"this is no copy of {event.request}")
    copied = replace(source, host=event.host)
    holdings = tuple(copied if holding is source else holding for holding in transition.holdings)
    after = replace(state, transition=replace(transition, holdings=holdings))
    return after, () if transition.stage is Stage.RESUME else (ReturnBlocks(copied),)


# ALIGN


def _admit_waiting(state: ScopeState, event: RequestAdmitted, env: Geometry) -> Step:
    """The first request of the new epoch becomes the successor and waits for the last receipt."""
    transition = _open(state)
    if transition.successor is not None:
        return _admit_fresh(state, event, env)
    admitted = _admitted(state, event)
    return replace(admitted, transition=replace(transition, successor=event.successor)), ()


def _admit_aligning(state: ScopeState, event: RequestAdmitted, env: Geometry) -> Step:
    return _align(_admitted(state, event), _open(state), event.successor, env)


def _admit_fresh(state: ScopeState, event: RequestAdmitted, env: Geometry) -> Step:
    return _admitted(state, event), (StartFresh(event.successor.request),)


def _align(
    state: ScopeState, transition: Transition, successor: Successor, env: Geometry, failed: Refusal | None = None
) -> Step:
    """Certify the longest valid prefix, or start cold by name.  Every writer is closed by now (invariant 4).

    `failed`: why the certificate that is out was not adopted; it stands when nothing else can be certified.
    """
    aligned = () if failed else (ReportStage(transition.id, Stage.ALIGN),)
    transition = replace(transition, successor=successor)
    found: tuple[Holding, Certificate] | Refusal
    if transition.refusal is not None:
        found = transition.refusal
    else:
        equivalence = transition.contract.equivalence
        found = best(
            transition.holdings, successor, scope=state.scope, transfer=transition.id, equivalence=equivalence, env=env
        )
        if isinstance(found, Refusal) and (transition.unkept is Refusal.QUOTA or not transition.holdings):
            found = transition.unkept or found
        elif failed and not isinstance(found, Refusal) and found[1] == transition.certificate:
            found = failed  # installing the same once more could go on for ever
    if isinstance(found, Refusal):
        after, (start, *rest) = _start_cold(state, transition, failed or found)
        return after, (start, *aligned, *rest)
    chosen, certificate = found
    others = tuple(holding for holding in transition.holdings if holding is not chosen)
    transition = replace(
        transition,
        stage=Stage.RESUME,
        holdings=(chosen,),
        certificate=certificate,
        copying=transition.copying & {chosen.request},
    )
    return replace(state, transition=transition), (InstallCertificate(certificate), *_release(others), *aligned)


# RESUME and RECLAIM


def _adopt(state: ScopeState, event: CertificateAdopted, env: Geometry) -> Step:
    """The successor's own references keep the blocks live from here on; the pins have served."""
    transition, certificate = _installing(state, event.request)
    require(
        _as_certified(event, certificate, env),
        Invariant.CERTIFIED,
        f"{event.request} adopted other blocks than certified",
    )
    resumed = ReportStage(transition.id, Stage.RESUME)
    reclaimed = ReportStage(transition.id, Stage.RECLAIM)
    closed = ReportClosed(transition.id, Outcome.INHERITED)
    return replace(state, transition=None), (*_release(transition.holdings), resumed, reclaimed, closed)


def _as_certified(event: CertificateAdopted, certificate: Certificate, env: Geometry) -> bool:
    """Whether every page is where it was certified to be, those aside that no window of the target shows any more."""
    shapes = [len(blocks) for blocks in event.blocks], [len(pages) for pages in certificate.groups]
    return shapes[0] == shapes[1] and all(
        (block is None and number < first_needed(group, event.start_tokens))
        or (block is not None if isinstance(page, HostRef) else block == (page and page.block))
        for group, blocks, pages in zip(env.groups, event.blocks, certificate.groups, strict=True)
        for number, (block, page) in enumerate(zip(blocks, pages, strict=True))
    )


def _fail_adoption(state: ScopeState, event: AdoptionFailed, env: Geometry) -> Step:
    """What the device still holds may do; else the successor starts cold, and the failure is the reason."""
    transition, _ = _installing(state, event.request)
    assert transition.successor is not None, "RESUME has a successor"
    holdings = transition.holdings
    if event.refusal is not Refusal.GENERATION:
        holdings = tuple(_without_copy(holding) for holding in holdings)
    return _align(state, replace(transition, holdings=holdings), transition.successor, env, failed=event.refusal)


def _without_copy(holding: Holding) -> Holding:
    """No page of the copy counts any more.  It is there until the release, so the holding is not copied again."""
    if holding.host is None:
        return holding
    return replace(holding, host=tuple((None,) * len(pages) for pages in holding.host))


def _start_cold(state: ScopeState, transition: Transition, refusal: Refusal) -> Step:
    """The successor runs without inheriting; nothing is held for it any more, so the transition is over."""
    assert transition.successor is not None
    start = StartCold(transition.successor.request, refusal)
    reclaimed = ReportStage(transition.id, Stage.RECLAIM)
    closed = ReportClosed(transition.id, Outcome.COLD)
    return replace(state, transition=None), (start, *_release(transition.holdings), reclaimed, closed)


# At any stage


def _finish(state: ScopeState, event: RequestFinished, env: Geometry) -> Step:
    """A request is gone.  With the successor goes the transition; closing requests of it leave on their own."""
    request, transition = event.request, state.transition
    if request in state.closing:
        return _closed(state, request, (), env)
    _expect(request in state.live | state.leaving, f"{request} is unknown, or finished already")
    after = replace(state, live=state.live - {request}, leaving=state.leaving - {request})
    if transition is None or transition.successor is None or transition.successor.request != request:
        return after, ()
    lost = ReportClosed(transition.id, Outcome.CLIENT_LOST)
    after = replace(after, leaving=after.leaving | transition.closing, transition=None)
    return after, (*_release(transition.holdings), lost)


LOSSES: Final[dict[type[Event], Refusal]] = {
    PinsExpired: Refusal.EXPIRED,
    CertificatesRevoked: Refusal.REVOKED,
}


def _lose_pins(state: ScopeState, event: PinsExpired | CertificatesRevoked, env: Geometry) -> Step:
    """Nothing will be inherited.  The first reason stands, and a repeated loss finds nothing left to release."""
    transition = _open(state)
    if not isinstance(event, CertificatesRevoked):
        _expect(event.transition == transition.id, f"transition {event.transition} is not the open one")
    refusal = LOSSES[type(event)]
    if transition.stage is Stage.RESUME:
        return _start_cold(state, transition, refusal)
    bare = replace(transition, holdings=(), copying=NOBODY, refusal=transition.refusal or refusal)
    return replace(state, transition=bare), _release(transition.holdings)


def _expire_unclaimed(state: ScopeState, event: PinsExpired, env: Geometry) -> Step:
    """Nobody came: the transition is over, and a request that comes now is like any other."""
    transition = _open(state)
    _expect(event.transition == transition.id, f"transition {event.transition} is not the open one")
    reclaimed = ReportStage(transition.id, Stage.RECLAIM)
    closed = ReportClosed(transition.id, Outcome.EXPIRED)
    return replace(state, transition=None), (*_release(transition.holdings), reclaimed, closed)


def _ignore(state: ScopeState, event: CertificatesRevoked, env: Geometry) -> Step:
    """A weight update concerns every scope; this one holds nothing."""
    return state, ()


def _cancel(state: ScopeState, event: ScopeCancelled, env: Geometry) -> Step:
    leaving = state.live | state.leaving | state.closing
    effects: list[Effect] = [CloseRequests(state.live)] if state.live else []
    effects.extend(_release(state.holdings))
    if state.transition is not None:
        effects.append(ReportClosed(state.transition.id, Outcome.CANCELLED))
    return replace(state, live=NOBODY, leaving=leaving, transition=None, cancelled=True), tuple(effects)


# What the handlers share


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ProtocolError(otherwise)


def _open(state: ScopeState) -> Transition:
    assert state.transition is not None, "the table asks for an open transition"
    return state.transition


def _installing(state: ScopeState, request: RequestId) -> tuple[Transition, Certificate]:
    transition = _open(state)
    assert transition.certificate is not None, "RESUME has a certificate"
    _expect(request == transition.certificate.target, f"{request} is not the target of the certificate")
    return transition, transition.certificate


def _admitted(state: ScopeState, event: RequestAdmitted) -> ScopeState:
    request = event.successor.request
    _expect(event.epoch == state.epoch, f"{request} is of epoch {event.epoch}, {state.epoch} is current")
    _expect(event.successor.tenant == state.tenant, f"{request} is another tenant's")
    known = state.live | state.leaving | state.closing | {holding.request for holding in state.holdings}
    _expect(request not in known, f"{request} was admitted already")
    return replace(state, live=state.live | {request})


def _of_closed(state: ScopeState, event: RequestClosed) -> tuple[Holding, ...]:
    if event.holding is None:
        return ()
    _expect(event.holding.request == event.request, f"the holding of {event.holding.request} came with {event.request}")
    return _offered(state, (event.holding,))


def _offered(state: ScopeState, holdings: tuple[Holding, ...]) -> tuple[Holding, ...]:
    """Pins that are handed over.  Handing over again what is owned here would release it twice."""
    owned = {holding.request for holding in state.holdings}
    for holding in holdings:
        _expect(holding.tenant == state.tenant, f"the holding of {holding.request} is another tenant's")
        _expect(holding.request not in owned, f"{holding.request} handed over its pins already")
        owned.add(holding.request)
    return holdings


def _unkept(before: Refusal | None, now: Refusal | None) -> Refusal | None:
    """The newest reason; but what no quota had room for stays so, whatever else is not held."""
    return Refusal.QUOTA if Refusal.QUOTA in {before, now} else now or before


def _release(holdings: tuple[Holding, ...]) -> tuple[ReleasePins, ...]:
    return (ReleasePins(holdings),) if holdings else ()


# The table


class Row(NamedTuple):
    """What an event does at one place, and every place it can lead to; `step` holds handlers to that."""

    handler: Callable[[ScopeState, Any, Geometry], Step]
    leads_to: tuple[Place, ...]


IDLE: Final = None
FENCE, ALIGN, RESUME = Stage.FENCE, Stage.ALIGN, Stage.RESUME
CANCELLED: Final = Outcome.CANCELLED

TABLE: Final[dict[tuple[Place, type[Event]], Row]] = {
    (IDLE, EpochAdvanced): Row(_advance, (FENCE, ALIGN)),
    (IDLE, RequestAdmitted): Row(_admit_fresh, (IDLE,)),
    (IDLE, RequestClosed): Row(_close_stranger, (IDLE,)),
    (IDLE, RequestFinished): Row(_finish, (IDLE,)),
    (IDLE, CertificatesRevoked): Row(_ignore, (IDLE,)),
    (IDLE, ScopeCancelled): Row(_cancel, (CANCELLED,)),
    (FENCE, EpochAdvanced): Row(_advance, (FENCE,)),
    (FENCE, RequestAdmitted): Row(_admit_waiting, (FENCE,)),
    (FENCE, RequestClosed): Row(_close_in_fence, (FENCE, ALIGN, RESUME, IDLE)),
    (FENCE, RequestFinished): Row(_finish, (FENCE, ALIGN, RESUME, IDLE)),
    (FENCE, PagesOffloaded): Row(_offloaded, (FENCE,)),
    (FENCE, PinsExpired): Row(_lose_pins, (FENCE,)),
    (FENCE, CertificatesRevoked): Row(_lose_pins, (FENCE,)),
    (FENCE, ScopeCancelled): Row(_cancel, (CANCELLED,)),
    (ALIGN, EpochAdvanced): Row(_advance, (ALIGN,)),
    (ALIGN, RequestAdmitted): Row(_admit_aligning, (RESUME, IDLE)),
    (ALIGN, RequestClosed): Row(_close_stranger, (ALIGN,)),
    (ALIGN, PagesOffloaded): Row(_offloaded, (ALIGN,)),
    (ALIGN, PinsExpired): Row(_expire_unclaimed, (IDLE,)),
    (ALIGN, CertificatesRevoked): Row(_lose_pins, (ALIGN,)),
    (ALIGN, ScopeCancelled): Row(_cancel, (CANCELLED,)),
    (RESUME, EpochAdvanced): Row(_advance, (FENCE,)),
    (RESUME, RequestAdmitted): Row(_admit_fresh, (RESUME,)),
    (RESUME, RequestClosed): Row(_close_stranger, (RESUME,)),
    (RESUME, RequestFinished): Row(_finish, (RESUME, IDLE)),
    (RESUME, CertificateAdopted): Row(_adopt, (IDLE,)),
    (RESUME, AdoptionFailed): Row(_fail_adoption, (RESUME, IDLE)),
    (RESUME, PagesOffloaded): Row(_offloaded, (RESUME,)),
    (RESUME, PinsExpired): Row(_lose_pins, (IDLE,)),
    (RESUME, CertificatesRevoked): Row(_lose_pins, (IDLE,)),
    (RESUME, ScopeCancelled): Row(_cancel, (CANCELLED,)),
    (CANCELLED, RequestClosed): Row(_close_stranger, (CANCELLED,)),
    (CANCELLED, RequestFinished): Row(_finish, (CANCELLED,)),
    (CANCELLED, CertificatesRevoked): Row(_ignore, (CANCELLED,)),
}


def place_name(place: Place) -> str:
    """IDLE, FENCE, ALIGN, RESUME or CANCELLED."""
    return "IDLE" if place is None else place.name


def mermaid() -> str:
    """`TABLE` as a mermaid state diagram: one arrow per pair of places, labelled with the events that take it."""
    arrows: dict[tuple[Place, Place], list[str]] = {}
    for (place, event), row in TABLE.items():
        for target in row.leads_to:
            arrows.setdefault((place, target), []).append(event.__name__)
    lines = ["stateDiagram-v2", "    [*] --> IDLE"]
    for (place, target), names in arrows.items():
        lines.append(f"    {place_name(place)} --> {place_name(target)}: {', '.join(names)}")
    return "\n".join(lines) + "\n"
