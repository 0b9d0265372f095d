"""The ten invariants, numbered, and a check of those that one scope's state can show.

Owns: the text and number of each invariant; fields and messages elsewhere cite the number.
Must not know: events.  Strategy: `check` reads a state and raises on the first defect.  Invariants about time, other
processes or the block pool (1, 5, 7, and half of the others) have their gates elsewhere and are only named here.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from .errors import InvariantViolation
from .types import EPOCH_MAX, Certificate, Equivalence, Holding, PageRef, Stage, Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .transition import ScopeState, Transition


class Invariant(IntEnum):
    """What always holds.

    1. No frame, token or tool call of a non-current epoch is published whose last compare follows the store; at most
       one frame per stream can be inside the write at that instant.
    2. At most one epoch of a scope is current; epochs never decrease, not across eviction, restart or loss of the host.
    3. A block is readable through the prefix cache or a certificate only if every layer of every participant has
       written it.
    4. A successor consumes predecessor state only under a certificate whose prefix, fingerprint, generation, tenant
       and transfer match and whose writers are closed.
    5. A block is not handed to a new owner while an old writer may still write it.
    6. Every pin is owned by one transition at a time and released once.
    7. A distributed transition closes with the receipts of its whole participant set or fails closed to cold.
    8. Another tenant's blocks and outputs are untouched by a transition, and its delay is bounded by one safe-point
       interval.
    9. The same scope can be superseded again at any stage; intermediate versions never publish after they are revoked.
    10. Every refusal names its reason; nothing degrades silently.
    """

    CURRENT_OUTPUT = 1
    ONE_EPOCH = 2
    WRITTEN_BEFORE_READ = 3
    CERTIFIED = 4
    NO_OLD_WRITER = 5
    PINS = 6
    ALL_RECEIPTS = 7
    ISOLATION = 8
    ANY_STAGE = 9
    NAMED_REFUSAL = 10


def require(holds: bool, invariant: Invariant, detail: str) -> None:
    """Raise InvariantViolation unless `holds`."""
    if not holds:
        raise InvariantViolation(f"invariant {invariant.value} ({invariant.name}): {detail}")


def check(state: ScopeState) -> None:
    """Raise InvariantViolation if `state` shows a defect.  Costs one pass over the certified blocks."""
    require(1 <= state.epoch <= EPOCH_MAX, Invariant.ONE_EPOCH, f"epoch {state.epoch}")
    require(not state.live & state.leaving, Invariant.ANY_STAGE, "a live request is also leaving")
    if state.cancelled:
        require(state.transition is None, Invariant.PINS, "a cancelled scope has a transition open")
        require(not state.live, Invariant.CURRENT_OUTPUT, "a cancelled scope has live requests")
    if state.transition is not None:
        _check_transition(state, state.transition)


def _check_transition(state: ScopeState, t: Transition) -> None:
    require(t.new_epoch == state.epoch, Invariant.ONE_EPOCH, "the open transition leads to another epoch")
    require(1 <= t.old_epoch < t.new_epoch, Invariant.ONE_EPOCH, "the transition does not advance")
    require(not t.closing & state.live, Invariant.ANY_STAGE, "a closing request is also live")
    require(not state.leaving, Invariant.CERTIFIED, "an old writer escaped the fence")
    fencing = t.stage is Stage.FENCE
    require(fencing == bool(t.closing), Invariant.CERTIFIED, f"{t.stage} with {len(t.closing)} closing")
    if fencing or t.stage is Stage.ALIGN:
        require(t.certificate is None, Invariant.CERTIFIED, f"a certificate in {t.stage}")
        require(fencing or t.successor is None, Invariant.CERTIFIED, "a successor waits for nothing")
        require(t.successor is not None or not state.live, Invariant.CERTIFIED, "the first request was passed over")
    else:
        require(t.stage is Stage.RESUME, Invariant.PINS, f"{t.stage} is passed through, never rested in")
        require(t.certificate is not None, Invariant.CERTIFIED, "RESUME without a certificate")
    if t.successor is not None:
        require(t.successor.request in state.live, Invariant.PINS, "pins wait for a successor that is gone")
        require(t.successor.tenant == state.tenant, Invariant.ISOLATION, "the successor is another tenant's")
    _check_holdings(state, t)


def _check_holdings(state: ScopeState, t: Transition) -> None:
    sources = [holding.request for holding in t.holdings]
    require(len(sources) == len(set(sources)), Invariant.PINS, "a holding is owned twice")
    require(not set(sources) & (state.live | t.closing), Invariant.WRITTEN_BEFORE_READ, "a writer is not closed")
    require(t.refusal is None or not t.holdings, Invariant.NAMED_REFUSAL, "pins are kept after a refusal")
    uncopied = {holding.request for holding in t.holdings if holding.host is None}
    require(t.copying <= uncopied, Invariant.PINS, "pages are copied that are not held, or have a copy")
    for holding in t.holdings:
        require(holding.tenant == state.tenant, Invariant.ISOLATION, "a holding is another tenant's")
        written = holding.frontier_tokens <= len(holding.tokens)
        require(written, Invariant.WRITTEN_BEFORE_READ, "the frontier lies beyond the tokens")
        shaped = holding.host is None or is_copy(holding.host, holding.groups)
        require(shaped, Invariant.CERTIFIED, "a copy is not shaped like its source")
    if t.certificate is not None:
        require(sources == [t.certificate.source], Invariant.CERTIFIED, "the certificate's source is not what is held")
        _check_certificate(state, t, t.certificate, t.holdings[0])


def _check_certificate(state: ScopeState, t: Transition, certificate: Certificate, source: Holding) -> None:
    identity = (certificate.tenant, certificate.scope, certificate.transfer)
    require(identity == (state.tenant, state.scope, t.id), Invariant.CERTIFIED, "tenant, scope or transfer differ")
    successor = t.successor
    require(successor is not None, Invariant.CERTIFIED, "the certificate has no target")
    assert successor is not None
    require(certificate.target == successor.request, Invariant.CERTIFIED, "the target is another request")
    fingerprints = {certificate.fingerprint, source.fingerprint, successor.fingerprint}
    require(len(fingerprints) == 1, Invariant.CERTIFIED, "fingerprints differ")
    n = certificate.tokens
    require(0 < n < len(successor.tokens), Invariant.CERTIFIED, "no token is left to compute")
    require(n <= source.frontier_tokens, Invariant.WRITTEN_BEFORE_READ, "certified beyond the frontier")
    on_grid = t.contract.equivalence is not Equivalence.EXACT or n <= source.grid_tokens
    require(on_grid, Invariant.CERTIFIED, "certified as exact beyond the chunks of a clean run")
    same_prefix = list(source.tokens[:n]) == list(successor.tokens[:n])
    require(same_prefix, Invariant.CERTIFIED, "the prefix differs")
    pages: Sequence[Sequence[PageRef]] = source.groups if certificate.tier is Tier.HBM else source.host or ()
    require(len(certificate.groups) == len(pages), Invariant.CERTIFIED, "group counts differ, or there is no copy")
    for certified, held in zip(certificate.groups, pages, strict=True):
        require(_is_prefix(certified, held), Invariant.CERTIFIED, "a certified page is not the source's")


def is_copy(copied: Sequence[Sequence[PageRef]], held: Sequence[Sequence[PageRef]]) -> bool:
    """Shaped alike, and no page that was not held; some may be missing."""
    return [len(pages) for pages in copied] == [len(pages) for pages in held] and not any(
        page is not None and source is None
        for pages, sources in zip(copied, held, strict=True)
        for page, source in zip(pages, sources, strict=True)
    )


def _is_prefix(certified: Sequence[PageRef], held: Sequence[PageRef]) -> bool:
    """Block for block, except that blocks before a window (always a head) are left out."""
    head = next((i for i, ref in enumerate(certified) if ref is not None), len(certified))
    return certified[head:] == held[head : len(certified)]
