"""Carries the protocol out on vLLM's scheduler.

Owns: one `ScopeState` per scope, and what its effects mean for requests and blocks.  Feeds events to
`retire.core.transition.step` and does what it says.  Must not know: HTTP, how a step is stopped.
Strategy: authority is read from the table; the API process only adds under which contract it changed.  A request of a
revoked epoch is closed when the receipt of its last step is in, so its frontier is exact and no writer is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from retire.authority.table import AuthorityTable
from retire.authority.tag import Tag
from retire.core import effects as do
from retire.core import events as happened
from retire.core.errors import InvariantViolation, ProtocolError
from retire.core.transition import Geometry, ScopeState, Transition, step
from retire.core.types import (
    Certificate,
    Contract,
    Epoch,
    Equivalence,
    Holding,
    Inherit,
    KVGroup,
    Outcome,
    Refusal,
    RequestId,
    ScopeId,
    Stage,
    Successor,
    TenantId,
    Tier,
    TokenCount,
    TransitionId,
)
from retire.engine.facts import Facts
from retire.engine.plan import Receipt
from retire.engine.steps import Engine, Steps, Tracked
from retire.kv.ownership import Ownership

ScopeKey = tuple[TenantId, ScopeId]


class Coordinator:
    """One per scheduler.  All calls come from the engine's own thread."""

    def __init__(
        self,
        engine: Engine,
        table: AuthorityTable,
        ownership: Ownership,
        groups: tuple[KVGroup, ...],
        fingerprint: Callable[[Any], str],
        hash_tokens: int,
        arm_rows: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._engine = engine
        self._table = table
        self.ownership = ownership
        self._fingerprint = fingerprint
        self._clock_ns = clock_ns
        self._geometry = Geometry(groups=groups, generations=ownership.generation)
        self._steps = Steps(engine, hash_tokens, arm_rows)
        self._requests = self._steps.requests
        self._states: dict[ScopeKey, ScopeState] = {}
        self._early: dict[ScopeKey, list[RequestId]] = {}  # admitted before the message about their epoch
        self._orphans: dict[ScopeKey, list[tuple[RequestId, Holding | None]]] = {}  # closed before that message
        self._held: set[RequestId] = set()  # admitted, and not to run before the protocol says so
        self._aborted: set[RequestId] = set()  # from outside, while a step still computes them
        self._adopting: set[TransitionId] = set()  # certificates whose target got its blocks in this pass
        self._expiry_ns: dict[TransitionId, int] = {}
        self.certificates: dict[RequestId, Certificate] = {}
        self.facts = Facts()
        self.defect: Exception | None = None  # raised where nobody stops for it; the next pass does

    # -- requests come and go -------------------------------------------------------------------------------------

    def is_scoped(self, request_id: str) -> bool:
        """Whether the request carries a ticket."""
        return request_id in self._requests

    def revoked(self, request_id: str) -> bool:
        """Whether the request's epoch, or the request itself, has lost authority."""
        return not self._table.holds(self._requests[RequestId(request_id)].tag.ticket)

    def paused(self, request_id: str) -> bool:
        """Whether the request's scope is paused."""
        tracked = self._requests.get(RequestId(request_id))
        return tracked is not None and self._table.paused(tracked.tag.ticket.slot)

    def paused_requests(self) -> int:
        """How many scoped requests a pause holds back."""
        return sum(1 for request_id in self._requests if self.paused(request_id))

    def admitted(self, request: Any, tag: Tag) -> None:
        """A scoped request reached the scheduler."""
        request_id = RequestId(request.request_id)
        self._requests[request_id] = Tracked(tag)
        self._held.add(request_id)
        self._place(request_id)

    def _place(self, request_id: RequestId) -> None:
        if self.revoked(request_id):
            return  # whatever its epoch was, it is over: the next sweep drops it
        tag = self._requests[request_id].tag
        key = (tag.tenant, tag.scope)
        state = self._states.get(key)
        if state is None or (state.cancelled and tag.epoch > state.epoch):
            state = self._states[key] = ScopeState(tenant=tag.tenant, scope=tag.scope, epoch=tag.epoch)
        if tag.epoch > state.epoch:
            self._early.setdefault(key, []).append(request_id)
        elif tag.epoch == state.epoch and not state.cancelled:
            self._feed(key, happened.RequestAdmitted(self._successor(request_id), tag.epoch))

    def may_run(self, request: Any) -> bool:
        """Whether the scheduler may start this waiting request now."""
        rid = request.request_id
        if rid in self._held or self.paused(rid):
            return False
        return rid in self.certificates or not self._steps.shares_unwritten(request)

    def may_go_on(self, request_id: str) -> bool:
        """Whether another step may be launched for this running request."""
        return not self.paused(request_id) and not self.revoked(request_id)

    def ended(self, request_id: str) -> None:
        """The scheduler has let go of the request, for whatever reason."""
        rid = RequestId(request_id)
        tracked = self._requests.get(rid)
        if tracked is None:
            return
        self._forget(rid)
        key = (tracked.tag.tenant, tracked.tag.scope)
        state = self._states.get(key)
        if state is not None and rid in state.live | state.closing | state.leaving:
            self._feed(key, happened.RequestFinished(rid))

    def defers_abort(self, request_id: str) -> bool:
        """An abort from outside came while a step computes the request: it waits for the receipt."""
        rid = RequestId(request_id)
        if self._steps.computes(rid):
            self._aborted.add(rid)
            return True
        return False

    # -- a step ---------------------------------------------------------------------------------------------------

    def rows_allocated(self, request: Any, hit_tokens: int, new_tokens: int) -> None:
        """Slots were given out to a scoped request."""
        certificate = self.certificates.get(request.request_id)
        if certificate is not None:
            self._adopting.add(certificate.transfer)
        self._steps.rows_allocated(request, hit_tokens, new_tokens)

    def before_schedule(self) -> None:
        """Start of a scheduling pass."""
        if self.defect is not None:
            raise self.defect
        self._steps.begin_pass()
        self._adopting = set()
        self.sweep()

    def scheduled(self, output: Any) -> None:
        """A step was scheduled: describe it for the workers, and verify what was adopted."""
        for rid in self._steps.scheduled(output):
            if rid in self.certificates:
                self._verify_adoption(rid)
        self.facts.flush()

    def step_ended(self, output: Any, receipt: Receipt | None) -> None:
        """The step's output is here, not yet processed: publish what was written, close what lost authority."""
        self._steps.ended(output, receipt)
        self.sweep()

    def preempted(self, request_id: str) -> None:
        """The request lost its blocks and starts over."""
        self._steps.preempted(RequestId(request_id))

    # -- authority ------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Close every request that has lost authority and is in no step any more."""
        self._expire()
        for rid in [r for r in self._requests if r in self._aborted or self.revoked(r)]:
            if not self._steps.computes(rid):
                self._close(rid)
        self.facts.flush()

    def _close(self, rid: RequestId) -> None:
        tracked = self._requests[rid]
        tag = tracked.tag
        key = (tag.tenant, tag.scope)
        state = self._states.get(key)
        lost_epoch = not self._table.current(tag.ticket)
        holding = self._capture(rid, tracked) if lost_epoch else None
        if lost_epoch:
            self._report_receipt(rid, tracked, holding)
        if state is not None and (
            rid in state.closing | state.leaving or (holding is not None and tag.epoch < state.epoch)
        ):
            self._forget(rid)
            self._engine.drop(rid)
            self._feed(key, happened.RequestClosed(rid, holding))
            return
        if holding is not None:  # the table spoke before the API process did
            self._orphans.setdefault(key, []).append((rid, holding))
            self._forget(rid)
        self._engine.drop(rid)

    def _forget(self, rid: RequestId) -> None:
        """Drop every note about the request without telling the protocol that it finished."""
        self._requests.pop(rid, None)
        self._held.discard(rid)
        self._aborted.discard(rid)
        self.certificates.pop(rid, None)

    def _capture(self, rid: RequestId, tracked: Tracked) -> Holding | None:
        """Pin what the request has written, before the scheduler frees it."""
        request = self._engine.request(rid)
        frontier = min(tracked.frontier_tokens, request.num_tokens) if request is not None else 0
        if frontier <= 0:
            return None
        groups = tuple(
            self.ownership.refs(blocks, frontier // group.block_tokens)
            for blocks, group in zip(self._engine.computed_blocks(rid), self._geometry.groups, strict=True)
        )
        holding = Holding(
            request=rid,
            tenant=tracked.tag.tenant,
            tokens=tuple(request.all_token_ids[:frontier]),
            frontier_tokens=TokenCount(frontier),
            fingerprint=self._fingerprint(request),
            groups=groups,
        )
        self.ownership.pin(holding)
        return holding

    def told(self, event: dict[str, Any]) -> dict[str, int] | None:
        """A message of the API process, which has already changed the table; "status" is answered, for its tenant."""
        key = (TenantId(event.get("tenant", "")), ScopeId(event.get("scope", "")))
        match event["kind"]:
            case "advanced":
                self._advanced(key, event)
            case "cancelled":
                self._cancelled(key)
            case "abandoned":
                self._abandoned(key, TransitionId(event["transition"]))
            case "wake" | "status":
                pass
            case kind:
                raise InvariantViolation(f"unknown message {kind}")
        self.sweep()
        self._collect(key)
        return self.leftovers(event.get("tenant")) if event["kind"] == "status" else None

    def _cancelled(self, key: ScopeKey) -> None:
        if key in self._states and not self._states[key].cancelled:
            self._feed(key, happened.ScopeCancelled())
        for rid, holding in self._orphans.pop(key, []):
            self._feed(key, happened.RequestClosed(rid, holding))
        for rid in self._early.pop(key, []):
            if rid in self._requests:
                self._place(rid)  # the scope's next life, or revoked by now

    def _abandoned(self, key: ScopeKey, transition: TransitionId) -> None:
        """The client left before its successor came here; one that did come ends by its own abort."""
        current = self._states[key].transition if key in self._states else None
        if current is not None and current.id == transition and current.successor is None:
            self._feed(key, happened.PinsExpired(transition))

    def _advanced(self, key: ScopeKey, event: dict[str, Any]) -> None:
        old, new = Epoch(event["old_epoch"]), Epoch(event["new_epoch"])
        transition = TransitionId(event["transition"])
        contract = contract_of(event["contract"])
        if key not in self._states or self._states[key].cancelled:
            self._states[key] = ScopeState(tenant=key[0], scope=key[1], epoch=old)
        try:
            self._feed(key, happened.EpochAdvanced(transition, old, new, contract))
        except ProtocolError:
            # The successor was here first and nothing of the old epoch ever was: it runs without a certificate.
            self._report(transition, "refused", refusal=Refusal.NO_PREDECESSOR.value)
            for stage in (Stage.FENCE, Stage.ALIGN, Stage.RESUME, Stage.RECLAIM):
                self._report(transition, "stage", stage=stage.value)
            self._report(transition, "closed", outcome="cold")
            return
        self._expiry_ns[transition] = event["at_ns"] + contract.lifetime_ms * 1_000_000
        for rid, holding in self._orphans.pop(key, []):
            current = self._states[key].transition
            if current is not None and rid in current.closing:
                self._feed(key, happened.RequestClosed(rid, holding))
            elif holding is not None:
                self.ownership.release(holding)
        for rid in self._early.pop(key, []):
            if rid in self._requests:
                self._place(rid)

    def _expire(self) -> None:
        """Fed for as long as the transition is open: what closes after the deadline must not stay pinned either."""
        now = self._clock_ns()
        for transition in [t for t, due in self._expiry_ns.items() if now >= due]:
            self._give_up(transition, happened.PinsExpired(transition))

    def yield_pins(self, for_request: str) -> bool:
        """The pool is full: give up the oldest pins that `for_request` is not about to adopt."""
        for transition in self._expiry_ns:
            certificate = self.certificates.get(RequestId(for_request))
            if certificate is not None and certificate.transfer == transition:
                continue
            if transition in self._adopting:
                continue
            if self._give_up(transition, happened.PinsYielded(transition), holding=True):
                return True
        return False

    def _give_up(self, transition: TransitionId, event: happened.Event, *, holding: bool = False) -> bool:
        for key, state in self._states.items():
            current = state.transition
            if current is not None and current.id == transition and (current.holdings or not holding):
                self._feed(key, event)
                return True
        return False

    def revoke_certificates(self) -> None:
        """Weights, adapters or the cache are about to change: pins go first."""
        for key in list(self._states):
            if self._states[key].transition is not None:
                self._feed(key, happened.CertificatesRevoked())
        for key, orphans in self._orphans.items():
            for _, holding in orphans:
                if holding is not None:
                    self.ownership.release(holding)
            self._orphans[key] = [(rid, None) for rid, _ in orphans]

    # -- the protocol ---------------------------------------------------------------------------------------------

    def _successor(self, rid: RequestId) -> Successor:
        request, tag = self._engine.request(rid), self._requests[rid].tag
        return Successor(rid, tag.tenant, tuple(request.all_token_ids), self._fingerprint(request))

    def _feed(self, key: ScopeKey, event: happened.Event) -> None:
        before = self._states[key]
        state, effects = step(before, event, self._geometry)
        self._states[key] = state
        transition = state.transition or before.transition
        for effect in effects:
            self._carry_out(effect, transition)
        self._collect(key)

    def _collect(self, key: ScopeKey) -> None:
        """A scope with nothing live and nothing open needs no memory here: the table knows its epoch."""
        state = self._states.get(key)
        if state is None or key in self._early or key in self._orphans:
            return
        if not state.live and not state.leaving and state.transition is None:
            del self._states[key]

    def _carry_out(self, effect: do.Effect, current: Transition | None) -> None:
        match effect:
            case do.CloseRequests(requests):
                self._held -= requests
                for rid in requests:
                    self.certificates.pop(rid, None)
            case do.InstallCertificate(certificate):
                self.ownership.keep_only(certificate.source, certificate.groups)
                self.certificates[certificate.target] = certificate
                self._held.discard(certificate.target)
                self._report(certificate.transfer, "certificate", **_described(certificate))
            case do.StartCold(rid, refusal):
                self._held.discard(rid)
                self.certificates.pop(rid, None)
                self._report(current.id if current else None, "refused", request=rid, refusal=refusal.value)
            case do.StartFresh(rid):
                self._held.discard(rid)
            case do.ReleasePins(holdings):
                for holding in holdings:
                    self.ownership.release(holding)
            case do.ReportStage(transition, stage):
                self._report(transition, "stage", stage=stage.value)
            case do.ReportClosed(transition, outcome):
                self._closed(transition, outcome, current)

    def _closed(self, transition: TransitionId, outcome: Outcome, current: Transition | None) -> None:
        self._expiry_ns.pop(transition, None)
        if outcome is Outcome.EXPIRED:  # nobody was there to be told why
            assert current is not None, "an open transition was there to expire"
            deadline_ms = current.contract.deadline_ms
            late = deadline_ms is not None and deadline_ms < current.contract.ttl_ms
            reason = current.refusal or (Refusal.DEADLINE if late else Refusal.EXPIRED)
            self._report(transition, "refused", refusal=reason.value)
        self._report(transition, "closed", outcome=outcome.value)

    def blocks_to_install(self, request_id: str) -> tuple[int, tuple[list[Any], ...]] | None:
        """Tokens and blocks per group that the request adopts, or None."""
        certificate = self.certificates.get(RequestId(request_id))
        if certificate is None:
            return None
        return certificate.tokens, tuple(
            [self.ownership.block_of(ref) for ref in group] for group in certificate.groups
        )

    def _verify_adoption(self, rid: RequestId) -> None:
        certificate = self.certificates.pop(rid)
        tag = self._requests[rid].tag
        key = (tag.tenant, tag.scope)
        table = self._engine.computed_blocks(rid)
        adopted = tuple(
            tuple(None if ref is None else block.block_id for ref, block in zip(group, blocks, strict=False))
            for group, blocks in zip(certificate.groups, table, strict=True)
        )
        self._report(certificate.transfer, "adopted", request=rid, blocks=[list(group) for group in adopted])
        self._feed(key, happened.CertificateAdopted(rid, adopted))

    def _report(self, transition: TransitionId | None, kind: str, **values: Any) -> None:
        self.facts.append({"transition": transition, "kind": kind, "at_ns": self._clock_ns(), **values})

    def _report_receipt(self, rid: RequestId, tracked: Tracked, holding: Holding | None) -> None:
        receipt, tag = tracked.receipt, tracked.tag
        self.facts.append(
            {
                "transition": None,
                "tenant": tag.tenant,
                "scope": tag.scope,
                "epoch": tag.epoch,
                "kind": "receipt",
                "at_ns": self._clock_ns(),
                "request": rid,
                "frontier_tokens": holding.frontier_tokens if holding else 0,
                "stopped": bool(receipt and receipt.stopped),
                "obsolete_closed_ns": receipt.obsolete_closed_ns if receipt else None,
                "safe_points": receipt.safe_points if receipt else 0,
                "longest_interval_ns": receipt.longest_interval_ns if receipt else 0,
            }
        )

    # -- what can be asked ----------------------------------------------------------------------------------------

    def leftovers(self, tenant: TenantId | None = None) -> dict[str, int]:
        """What an idle engine must not hold, for the tenant or for all of them."""
        states = (state for key, state in self._states.items() if tenant in (None, key[0]))
        orphans = (group for key, group in self._orphans.items() if tenant in (None, key[0]))
        requests = (tracked for tracked in self._requests.values() if tenant in (None, tracked.tag.tenant))
        return {
            "pinned_blocks": self.ownership.pinned_blocks(tenant),
            "scoped_requests": sum(1 for _ in requests),
            "open_transitions": sum(1 for state in states if state.transition is not None),
            "orphans": sum(len(group) for group in orphans),
            "steps_in_flight": self._steps.in_flight(tenant),
        }


def _described(certificate: Certificate) -> dict[str, Any]:
    return {
        "tokens": certificate.tokens,
        "source": certificate.source,
        "target": certificate.target,
        "fingerprint": certificate.fingerprint,
        "blocks": [[None if ref is None else ref.block for ref in group] for group in certificate.groups],
        "generations": [[None if ref is None else ref.generation for ref in group] for group in certificate.groups],
    }


def contract_of(values: dict[str, Any]) -> Contract:
    """The contract as it travels between processes."""
    keep = values.get("keep_prefix_tokens")
    return Contract(
        inherit=Inherit(values["inherit"]),
        equivalence=Equivalence(values["equivalence"]),
        keep_prefix_tokens=None if keep is None else TokenCount(keep),
        deadline_ms=values.get("deadline_ms"),
        tier=Tier(values["tier"]),
        ttl_ms=values["ttl_ms"],
    )
