"""Carries the protocol out on vLLM's scheduler.

Owns: which requests are scoped, what of them is in flight, what is readable, and one `ScopeState` per scope.  Feeds
events to `retire.core.transition.step` and does what the effects say.
Must not know: HTTP, how a step is stopped.
Strategy: authority is read from the table; the API process only adds under which contract it changed.  A request of a
revoked epoch is closed when the receipt of its last step is in, so its frontier is exact and no writer is left.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from retire.authority.table import AuthorityTable
from retire.authority.tag import Tag
from retire.core import effects as do
from retire.core import events as happened
from retire.core.errors import InvariantViolation, ProtocolError
from retire.core.transition import Geometry, ScopeState, step
from retire.core.types import (
    Certificate,
    Contract,
    Epoch,
    Equivalence,
    Holding,
    Inherit,
    KVGroup,
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
from retire.engine.plan import PlannedRows, Receipt, StepPlan
from retire.kv.ownership import Ownership

ScopeKey = tuple[TenantId, ScopeId]


class Engine(Protocol):
    """What the coordinator asks of the scheduler it lives in."""

    def request(self, request_id: RequestId) -> Any:
        """vLLM's request, None when it is gone."""

    def computed_blocks(self, request_id: RequestId) -> tuple[Iterable[Any], ...]:
        """The request's block table, per KV group."""

    def publish(self, request: Any, tokens: int) -> None:
        """Make the request's full blocks below `tokens` readable."""

    def drop(self, request_id: RequestId) -> None:
        """Finish the request and free what it holds."""


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
        self._hash_tokens = hash_tokens
        self._arm_rows = arm_rows
        self._clock_ns = clock_ns
        self._geometry = Geometry(groups=groups, generations=ownership.generation)
        self._tags: dict[RequestId, Tag] = {}
        self._states: dict[ScopeKey, ScopeState] = {}
        self._early: dict[ScopeKey, list[RequestId]] = {}
        self._orphans: dict[ScopeKey, list[tuple[RequestId, Holding]]] = {}
        self._held: set[RequestId] = set()  # admitted, and not to run before the protocol says so
        self._closing: set[RequestId] = set()
        self._dropped_late: set[RequestId] = set()  # aborted from outside while a step still computes them
        self._in_flight: Counter[RequestId] = Counter()
        self._frontier: dict[RequestId, int] = {}
        self._started: set[RequestId] = set()
        self._last_receipt: dict[RequestId, Receipt] = {}
        self._plans: deque[StepPlan] = deque()
        self._unpublished: dict[int, set[Any]] = {}
        self._scheduling: set[Any] = set()
        self._seq = 0
        self.certificates: dict[RequestId, Certificate] = {}
        self._expiry_ns: dict[TransitionId, int] = {}
        self.facts = Facts()

    # -- requests come and go -------------------------------------------------------------------------------------

    def is_scoped(self, request_id: str) -> bool:
        """Whether the request carries a ticket."""
        return request_id in self._tags

    def revoked(self, request_id: str) -> bool:
        """Whether the request's epoch, or the request itself, has lost authority."""
        return not self._table.holds(self._tags[RequestId(request_id)].ticket)

    def paused(self, request_id: str) -> bool:
        """Whether the request's scope is paused."""
        tag = self._tags.get(RequestId(request_id))
        return tag is not None and self._table.paused(tag.ticket.slot)

    def paused_requests(self) -> int:
        """How many scoped requests a pause holds back."""
        return sum(1 for request_id in self._tags if self.paused(request_id))

    def admitted(self, request: Any, tag: Tag) -> None:
        """A scoped request reached the scheduler."""
        request_id = RequestId(request.request_id)
        self._tags[request_id] = tag
        self._frontier[request_id] = 0
        self._held.add(request_id)
        key = (tag.tenant, tag.scope)
        state = self._states.get(key)
        if state is None or (state.cancelled and tag.epoch > state.epoch):
            state = self._states[key] = ScopeState(tenant=tag.tenant, scope=tag.scope, epoch=tag.epoch)
        if tag.epoch > state.epoch:
            self._early.setdefault(key, []).append(request_id)  # the message about its epoch is still on its way
        elif tag.epoch == state.epoch:
            self._feed(key, happened.RequestAdmitted(self._successor(request_id), tag.epoch))
        # an older epoch: the table has revoked it, the next sweep drops it

    def may_run(self, request_id: str) -> bool:
        """Whether the scheduler may start this waiting request now."""
        return request_id not in self._held and not self.paused(request_id)

    def ended(self, request_id: str) -> None:
        """The scheduler has let go of the request, for whatever reason."""
        rid = RequestId(request_id)
        tag = self._tags.pop(rid, None)
        if tag is None:
            return
        self._forget(rid)
        key = (tag.tenant, tag.scope)
        state = self._states.get(key)
        if state is not None and rid in state.live | state.closing | state.leaving:
            self._feed(key, happened.RequestFinished(rid))

    def defers_abort(self, request_id: str) -> bool:
        """An abort from outside came while a step computes the request: it waits for the receipt."""
        rid = RequestId(request_id)
        if rid in self._tags and self._in_flight[rid] > 0:
            self._dropped_late.add(rid)
            return True
        return False

    # -- a step ---------------------------------------------------------------------------------------------------

    def rows_allocated(self, request: Any, hit_tokens: int, new_tokens: int) -> None:
        """Slots were given out: these blocks will be written by the step being scheduled."""
        start = request.num_computed_tokens + hit_tokens
        size = self._hash_tokens
        self._scheduling.update(request.block_hashes[start // size : (start + new_tokens) // size])

    def shares_unwritten(self, request: Any) -> bool:
        """Whether the request starts with blocks that a step in flight is about to publish: better wait than redo."""
        if request.request_id in self.certificates:
            return False
        pending = [self._scheduling, *self._unpublished.values()]
        return any(block in hashes for hashes in pending if hashes for block in request.block_hashes)

    def before_schedule(self) -> None:
        """Start of a scheduling pass."""
        self._scheduling = set()
        self.sweep()

    def scheduled(self, output: Any) -> None:
        """A step was scheduled: describe it for the workers, and verify what was adopted."""
        rows = []
        for request_id, tokens in output.num_scheduled_tokens.items():
            tag = self._tags.get(request_id)
            if tag is None:
                continue
            end = self._engine.request(request_id).num_computed_tokens
            start = end - tokens
            if request_id not in self._started:  # what it starts with is a hit in the prefix cache, or certified
                self._started.add(request_id)
                self._frontier[request_id] = start
            rows.append(PlannedRows(request_id, tag.ticket, start, end))
            self._in_flight[request_id] += 1
            if request_id in self.certificates:
                self._verify_adoption(request_id)
        if rows:
            self._seq += 1
            foreign = len(rows) < len(output.num_scheduled_tokens)
            armed = not foreign and output.total_num_scheduled_tokens >= self._arm_rows
            plan = StepPlan(self._seq, tuple(rows), foreign_rows=foreign, armed=armed)
            self._plans.append(plan)
            self._unpublished[plan.seq] = self._scheduling
            output.retire_plan = plan
        self.facts.flush()

    def step_ended(self, output: Any, receipt: Receipt | None) -> None:
        """The step's output is here, not yet processed: publish what was written, close what lost authority."""
        plan: StepPlan | None = getattr(output, "retire_plan", None)
        if plan is not None:
            self._take_receipt(plan, receipt)
        self.sweep()
        self.facts.flush()

    def _take_receipt(self, plan: StepPlan, receipt: Receipt | None) -> None:
        if receipt is None or receipt.seq != plan.seq or self._plans.popleft().seq != plan.seq:
            raise InvariantViolation(f"invariant 7: step {plan.seq} ended without its receipt")
        self._unpublished.pop(plan.seq, None)
        for rows in plan.rows:
            rid = rows.request
            self._in_flight[rid] -= 1
            if not self._in_flight[rid]:
                del self._in_flight[rid]
            if rid not in self._tags:
                continue
            self._last_receipt[rid] = receipt
            request = self._engine.request(rid)
            if receipt.stopped or request is None or self._frontier[rid] < rows.start:
                continue
            self._frontier[rid] = min(rows.end, request.num_tokens)
            self._engine.publish(request, self._frontier[rid])

    def preempted(self, request_id: str) -> None:
        """The request lost its blocks and starts over."""
        if request_id in self._frontier:
            self._frontier[RequestId(request_id)] = 0
            self._started.discard(RequestId(request_id))

    # -- authority ------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Close every request that has lost authority and is in no step any more."""
        self._expire()
        for rid in [r for r in self._tags if r in self._dropped_late or self.revoked(r)]:
            if self._in_flight[rid] == 0:
                del self._in_flight[rid]
                self._close(rid)
        self.facts.flush()

    def _close(self, rid: RequestId) -> None:
        tag = self._tags[rid]
        key = (tag.tenant, tag.scope)
        state = self._states.get(key)
        lost_epoch = not self._table.current(tag.ticket)
        holding = self._capture(rid, tag) if lost_epoch else None
        if lost_epoch:
            self._report_receipt(rid, key, holding)
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
        self._tags.pop(rid, None)
        for store in (self._held, self._closing, self._dropped_late, self._started):
            store.discard(rid)
        self._frontier.pop(rid, None)
        self._last_receipt.pop(rid, None)
        self.certificates.pop(rid, None)

    def _capture(self, rid: RequestId, tag: Tag) -> Holding | None:
        """Pin what the request has written, before the scheduler frees it."""
        request = self._engine.request(rid)
        frontier = min(self._frontier.get(rid, 0), request.num_tokens) if request is not None else 0
        if frontier <= 0:
            return None
        blocks = self._engine.computed_blocks(rid)
        groups = tuple(
            self.ownership.refs(group, frontier // geometry.block_tokens)
            for group, geometry in zip(blocks, self._geometry.groups, strict=True)
        )
        holding = Holding(
            request=rid,
            tenant=tag.tenant,
            tokens=tuple(request.all_token_ids[:frontier]),
            frontier_tokens=TokenCount(frontier),
            fingerprint=self._fingerprint(request),
            groups=groups,
        )
        self.ownership.pin(holding)
        return holding

    def told(self, event: dict[str, Any]) -> dict[str, int] | None:
        """A message of the API process, which has already changed the table; "status" is answered."""
        key = (TenantId(event.get("tenant", "")), ScopeId(event.get("scope", "")))
        match event["kind"]:
            case "advanced":
                self._advanced(key, event)
            case "cancelled":
                self._cancelled(key)
            case "wake" | "status":
                pass
            case kind:
                raise InvariantViolation(f"unknown message {kind}")
        self.sweep()
        self._collect(key)
        return self.leftovers() if event["kind"] == "status" else None

    def _cancelled(self, key: ScopeKey) -> None:
        if key in self._states:
            self._feed(key, happened.ScopeCancelled())
        for rid, holding in self._orphans.pop(key, []):
            self._feed(key, happened.RequestClosed(rid, holding))

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
            for _, holding in self._orphans.pop(key, []):
                self.ownership.release(holding)
            return
        lifetime_ms = min(contract.ttl_ms, contract.deadline_ms or contract.ttl_ms)
        self._expiry_ns[transition] = self._clock_ns() + lifetime_ms * 1_000_000
        for rid, holding in self._orphans.pop(key, []):
            current = self._states[key].transition
            if current is not None and rid in current.closing:
                self._feed(key, happened.RequestClosed(rid, holding))
            else:
                self.ownership.release(holding)
        for rid in self._early.pop(key, []):
            tag = self._tags.get(rid)
            if tag is not None and tag.epoch == new:
                self._feed(key, happened.RequestAdmitted(self._successor(rid), new))
            elif tag is not None and tag.epoch > new:
                self._early.setdefault(key, []).append(rid)

    def _expire(self) -> None:
        now = self._clock_ns()
        for transition, due in list(self._expiry_ns.items()):
            if now >= due:
                del self._expiry_ns[transition]
                self._give_up(transition, happened.PinsExpired(transition))

    def yield_pins(self, for_request: str) -> bool:
        """The pool is full: give up the oldest pins that `for_request` is not about to adopt."""
        for transition in self._expiry_ns:
            certificate = self.certificates.get(RequestId(for_request))
            if certificate is not None and certificate.transfer == transition:
                continue
            if self._give_up(transition, happened.PinsYielded(transition)):
                return True
        return False

    def _give_up(self, transition: TransitionId, event: happened.Event) -> bool:
        for key, state in self._states.items():
            if state.transition is not None and state.transition.id == transition and state.transition.holdings:
                self._feed(key, event)
                return True
        return False

    def revoke_certificates(self) -> None:
        """Weights, adapters or the cache are about to change: pins go first."""
        for key in list(self._states):
            if self._states[key].transition is not None:
                self._feed(key, happened.CertificatesRevoked())
        for key in list(self._orphans):
            for _, holding in self._orphans.pop(key):
                self.ownership.release(holding)

    # -- the protocol ---------------------------------------------------------------------------------------------

    def _successor(self, rid: RequestId) -> Successor:
        request, tag = self._engine.request(rid), self._tags[rid]
        return Successor(rid, tag.tenant, tuple(request.all_token_ids), self._fingerprint(request))

    def _feed(self, key: ScopeKey, event: happened.Event) -> None:
        before = self._states[key]
        state, effects = step(before, event, self._geometry)
        self._states[key] = state
        transition = state.transition or before.transition
        for effect in effects:
            self._carry_out(effect, transition.id if transition is not None else None)
        self._collect(key)

    def _collect(self, key: ScopeKey) -> None:
        """A scope with nothing live and nothing open needs no memory here: the table knows its epoch."""
        state = self._states.get(key)
        if state is None or key in self._early or key in self._orphans:
            return
        if not state.live and not state.leaving and state.transition is None:
            del self._states[key]

    def _carry_out(self, effect: do.Effect, transition_id: TransitionId | None) -> None:
        match effect:
            case do.CloseRequests(requests):
                self._closing |= requests
                self._held -= requests
                for rid in requests:
                    self.certificates.pop(rid, None)
            case do.InstallCertificate(certificate):
                self.certificates[certificate.target] = certificate
                self._held.discard(certificate.target)
                self._report(
                    certificate.transfer,
                    "certificate",
                    tokens=certificate.tokens,
                    source=certificate.source,
                    target=certificate.target,
                    fingerprint=certificate.fingerprint,
                    blocks=_ids(certificate),
                    generations=[[None if r is None else r.generation for r in g] for g in certificate.groups],
                )
            case do.StartCold(rid, refusal):
                self._held.discard(rid)
                self.certificates.pop(rid, None)
                self._report(transition_id, "refused", request=rid, refusal=refusal.value)
            case do.StartFresh(rid):
                self._held.discard(rid)
            case do.ReleasePins(holdings):
                for holding in holdings:
                    self.ownership.release(holding)
            case do.ReportStage(transition, stage):
                self._report(transition, "stage", stage=stage.value)
            case do.ReportClosed(transition, outcome):
                self._expiry_ns.pop(transition, None)
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
        tag = self._tags[rid]
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

    def _report_receipt(self, rid: RequestId, key: ScopeKey, holding: Holding | None) -> None:
        receipt = self._last_receipt.pop(rid, None)
        self.facts.append(
            {
                "transition": None,
                "tenant": key[0],
                "scope": key[1],
                "epoch": self._tags[rid].epoch,
                "kind": "receipt",
                "at_ns": self._clock_ns(),
                "request": rid,
                "frontier_tokens": holding.frontier_tokens if holding else 0,
                "stopped": bool(receipt and receipt.stopped),
                "closed_ns": receipt.closed_ns if receipt else None,
                "safe_points": receipt.safe_points if receipt else 0,
                "longest_interval_ns": receipt.longest_interval_ns if receipt else 0,
            }
        )

    # -- what can be asked ----------------------------------------------------------------------------------------

    def leftovers(self) -> dict[str, int]:
        """What an idle engine must not hold."""
        return {
            "pinned_blocks": self.ownership.pinned_blocks(),
            "scoped_requests": len(self._tags),
            "open_transitions": sum(1 for state in self._states.values() if state.transition is not None),
            "orphans": sum(len(group) for group in self._orphans.values()),
            "steps_in_flight": len(self._plans),
        }


def _ids(certificate: Certificate) -> list[list[int | None]]:
    return [[None if ref is None else int(ref.block) for ref in group] for group in certificate.groups]


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
