"""The journal's view of what the engine does: each function writes one kind of record.

Owns: how the engine's values become a record's numbers.  Must not know: when something is worth a record, beyond what
an audit asks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from retire.authority.table import AuthorityTable, scope_key
from retire.core.transition import ScopeState, place_name
from retire.core.types import BlockRef, Certificate, Holding, Outcome, PageRef, Refusal, RequestId, Tier, TransitionId
from retire.journal import Kind, audits, note, under
from retire.journal.schema import EFFECTS, OUTCOMES, REFUSALS, core_step

if TYPE_CHECKING:
    from retire.authority.tag import Tag
    from retire.core.effects import Effect
    from retire.core.events import Event
    from retire.core.fence import Choice
    from retire.core.types import TenantId
    from retire.engine.plan import PlannedRows, Receipt, StepPlan

_EFFECT_BITS = {name: 1 << place for place, name in enumerate(EFFECTS)}
FROM_HOST_MEMORY = NOT_COMPARABLE = FEWER = 1


def request_hash(request: str) -> int:
    """A request's name in a record."""
    return xxh3_64_intdigest(request.encode())


def _block_ids(groups: Iterable[Iterable[PageRef]]) -> list[list[int | None]]:
    """Per group; None for what lies in host memory, or nowhere."""
    return [[page.block if isinstance(page, BlockRef) else None for page in group] for group in groups]


def blocks_digest(blocks: Iterable[Iterable[int | None]]) -> int:
    """Of block ids per group."""
    return xxh3_64_intdigest(repr([list(group) for group in blocks]).encode())


def admitted(request: RequestId, tag: Tag, table: AuthorityTable) -> None:
    """A scoped request reached the engine."""
    ticket = tag.ticket
    note(
        Kind.ADMITTED,
        **under(ticket),
        seen=table.raw(ticket.slot),
        epoch=tag.epoch,
        key=scope_key(tag.tenant, tag.scope),
        request=request_hash(request),
    )


def launched(plan: StepPlan) -> None:
    """A step goes to the workers."""
    for rows in plan.rows:
        if rows.end - rows.start > 1 or audits():
            _rows(Kind.LAUNCHED, plan, rows, rows.end)


def received(plan: StepPlan, receipt: Receipt) -> None:
    """The receipt of a step is in."""
    for rows, end in zip(plan.rows, receipt.ends, strict=True):
        if rows.end - rows.start > 1 or audits():
            _rows(Kind.RECEIPT, plan, rows, end, FEWER if end < rows.end else 0)


def _rows(kind: Kind, plan: StepPlan, rows: PlannedRows, end: int, flags: int = 0) -> None:
    note(
        kind,
        **under(rows.ticket),
        request=request_hash(rows.request),
        a=plan.seq,
        b=rows.start,
        c=end,
        flags=flags,
    )


def cut(plan: StepPlan, rows: PlannedRows, choice: Choice, end: int, layer: int, table: AuthorityTable) -> None:
    """A worker decided about running rows."""
    ticket = rows.ticket
    note(
        Kind.CUT,
        **under(ticket),
        seen=table.raw(ticket.slot),
        request=request_hash(rows.request),
        a=plan.seq,
        b=end,
        c=layer,
        flags=list(type(choice)).index(choice),
    )


def stepped(before: ScopeState, event: Event, after: ScopeState, effects: tuple[Effect, ...]) -> None:
    """The core took an event."""
    transition = after.transition or before.transition
    bits = 0
    for effect in effects:
        bits |= _EFFECT_BITS[type(effect).__name__]
    note(
        Kind.STEPPED,
        epoch=after.epoch,
        key=scope_key(after.tenant, after.scope),
        transition=_number(None if transition is None else transition.id),
        a=core_step(place_name(before.place), type(event).__name__, place_name(after.place)),
        b=bits,
    )


def pinned(holding: Holding) -> None:
    """Blocks of a request are kept for a successor."""
    ids = _block_ids(holding.groups)
    note(
        Kind.PINNED,
        request=request_hash(holding.request),
        a=sum(block is not None for group in ids for block in group),
        b=holding.frontier_tokens,
        c=blocks_digest(ids),
    )


def released(request: RequestId) -> None:
    """Nobody needs these pins any more."""
    note(Kind.RELEASED, request=request_hash(request))


def certified(certificate: Certificate, tenant: TenantId, scope: str) -> None:
    """The target may adopt."""
    note(
        Kind.CERTIFIED,
        key=scope_key(tenant, scope),
        transition=_number(certificate.transfer),
        request=request_hash(certificate.target),
        a=certificate.tokens,
        b=blocks_digest(_block_ids(certificate.groups)),
        c=request_hash(certificate.source),
        flags=FROM_HOST_MEMORY if certificate.tier is Tier.DRAM else 0,
    )


def adopted(certificate: Certificate, blocks: tuple[tuple[int | None, ...], ...]) -> None:
    """The target did.  Blocks are comparable with the certified ones where none came from host memory or was left."""
    missing = sum(block is None for group in blocks for block in group)
    expected = sum(page is None for group in certificate.groups for page in group)
    comparable = certificate.tier is Tier.HBM and missing == expected
    note(
        Kind.ADOPTED,
        transition=_number(certificate.transfer),
        request=request_hash(certificate.target),
        a=certificate.tokens,
        b=blocks_digest(blocks),
        flags=0 if comparable else NOT_COMPARABLE,
    )


def cold(request: RequestId, refusal: Refusal, transition: TransitionId | None) -> None:
    """It starts without a certificate."""
    note(
        Kind.COLD,
        request=request_hash(request),
        transition=_number(transition),
        a=REFUSALS.index(refusal.value),
    )


def shared(request: RequestId, tokens: int) -> None:
    """The prefix cache serves it up to there."""
    if audits():
        note(Kind.SHARED, request=request_hash(request), a=tokens)


def gone(request: RequestId) -> None:
    """It has left the engine."""
    note(Kind.GONE, request=request_hash(request))


def preempted(request: RequestId) -> None:
    """It has lost its blocks."""
    note(Kind.PREEMPTED, request=request_hash(request))


def ended(transition: TransitionId, outcome: Outcome) -> None:
    """Nothing about the transition comes later."""
    note(Kind.ENDED, transition=_number(transition), a=OUTCOMES.index(outcome.value))


def _number(transition: TransitionId | None) -> int:
    """An id is 128 bits in hexadecimal; tests name them as they like.  0 for none."""
    if transition is None:
        return 0
    try:
        return int(transition, 16) & (1 << 128) - 1
    except ValueError:
        return request_hash(transition)
