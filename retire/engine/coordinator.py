"""Carries the protocol out on vLLM's scheduler.

Owns: one `ScopeState` per scope, and what its effects mean for requests; blocks and pages are the keeper's
(`retire.engine.keeper`).  Feeds events to `retire.core.transition.step` and does what it says.
Must not know: HTTP, how a step is stopped.
Strategy: authority is read from the table; the API process only adds under which contract it changed.  A request of a
revoked epoch is closed when the receipt of its last step is in, so its frontier is exact and no writer is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from retire.authority.table import AuthorityTable
from retire.authority.tag import Tag
from retire.core import effects as do
from retire.core import events as happened
from retire.core.errors import InvariantViolation, ProtocolError
from retire.core.fence import Choice
from retire.core.quantum import Selector
from retire.core.transition import ScopeState, Transition, step
from retire.core.types import (
    BlockRef,
    Certificate,
    Contract,
    Epoch,
    Equivalence,
    Holding,
    HostRef,
    Inherit,
    Outcome,
    PageRef,
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
from retire.engine import notes
from retire.engine.facts import Facts
from retire.engine.finished import Finished, ScopeKey
from retire.engine.keeper import Keeper
from retire.engine.plan import Receipt
from retire.engine.rates import Rates
from retire.engine.steps import Engine, Steps, Tracked

LEFT_BEHIND = 4096  # versions whose requests have gone and whose message may still come; each is a name and a number


class Coordinator:
    """One per scheduler.  All calls come from the engine's own thread.

    `untold_ns`: so long is kept what was closed by the table's word alone.  No message may ever come: the front end
    may have died, or given the scope's slot to another one once its client had gone.
    `selector`: is told of live scopes and of their revisions; None where nobody chooses a quantum.
    """

    def __init__(
        self,
        engine: Engine,
        table: AuthorityTable,
        keeper: Keeper,
        steps: Steps,
        rates: Rates,
        fingerprint: Callable[[Any], str],
        untold_ns: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        selector: Selector | None = None,
    ) -> None:
        self._engine = engine
        self._table = table
        self._keeper = keeper
        self._steps = steps
        self._rates = rates
        self._fingerprint = fingerprint
        self._untold_ns = untold_ns
        self._clock_ns = clock_ns
        self._selector = selector
        self._left_behind: dict[tuple[ScopeKey, Epoch], bool] = {}  # revoked, and lost a request before their message
        self._requests = steps.requests
        self._states: dict[ScopeKey, ScopeState] = {}
        self._early: dict[ScopeKey, list[RequestId]] = {}  # admitted before the message about their epoch
        self._orphans: dict[ScopeKey, list[_Orphan]] = {}  # closed before that message
        self._held: set[RequestId] = set()  # admitted, and not to run before the protocol says so
        self._aborted: set[RequestId] = set()  # from outside, while a step still computes them
        self._finished = Finished()
        self._copying: dict[RequestId, ScopeKey] = {}  # to host memory
        self._answers: list[tuple[ScopeKey, happened.Event]] = []  # to effects, fed when all of them are carried out
        self._feeding = False
        self._expiry_ns: dict[TransitionId, int] = {}
        self._step_ended_ns = 0
        self._safe_points = 0  # passed since they were last told
        self._contents = 0  # of the cache: counts what makes everything written before it worthless
        self.certificates: dict[RequestId, Certificate] = {}
        self.facts = Facts()
        self.defect: Exception | None = None  # raised where nobody stops for it; the next pass does

    # -- requests come and go -------------------------------------------------------------------------------------

    def is_scoped(self, request_id: str) -> bool:
        """Whether the request carries a ticket."""
        return request_id in self._requests

    @property
    def scoped_requests(self) -> int:
        """How many requests carry a ticket."""
        return len(self._requests)

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
        fingerprint = f"{self._contents}|{self._fingerprint(request)}"
        self._requests[request_id] = Tracked(tag, fingerprint)
        self._held.add(request_id)
        notes.admitted(request_id, tag, self._table)
        if tag.exact:
            self._run_exact(request_id)
        self._place(request_id)

    def _run_exact(self, rid: RequestId) -> None:
        """Compute it as a clean run would: alone, chunk for chunk, reading nothing that is not certified."""
        if self._keeper.geometry.exact_tokens is not None:
            self._requests[rid].alone = self._requests[rid].reads_nothing = True

    def _place(self, request_id: RequestId) -> None:
        if self.revoked(request_id):
            return  # whatever its epoch was, it is over: the next sweep drops it
        tag = self._requests[request_id].tag
        key = (tag.tenant, tag.scope)
        state = self._states.get(key)
        if state is None or (state.cancelled and tag.epoch >= state.epoch):
            state = self._states[key] = ScopeState(tenant=tag.tenant, scope=tag.scope, epoch=tag.epoch)
        if tag.epoch > state.epoch:
            self._early.setdefault(key, []).append(request_id)
        elif tag.epoch == state.epoch and not state.cancelled:
            self._feed(key, happened.RequestAdmitted(self._successor(request_id), tag.epoch))

    def may_run(self, request: Any) -> bool:
        """Whether the scheduler may start this waiting request now."""
        rid = request.request_id
        if rid in self._held or rid in self._aborted or self.paused(rid):
            return False
        return rid in self.certificates or not self._steps.shares_unwritten(request)

    def may_go_on(self, request_id: str) -> bool:
        """Whether another step may be launched for this running request.

        Not for an aborted one: its abort waits until no step computes it.
        """
        return not (request_id in self._aborted or self.paused(request_id) or self.revoked(request_id))

    def alone(self, request_id: str) -> bool:
        """Whether the request shares no step with others."""
        tracked = self._requests.get(RequestId(request_id))
        return tracked is not None and tracked.alone

    def reads_nothing(self, request_id: str) -> bool:
        """Whether only a certificate may spare the request computing its own prefix."""
        tracked = self._requests.get(RequestId(request_id))
        return tracked is not None and tracked.reads_nothing

    def runs_alone(self) -> list[RequestId]:
        """Requests that share no step with others and may be in the next one."""
        return [
            rid for rid, one in self._requests.items() if one.alone and rid not in self._held and self.may_go_on(rid)
        ]

    def ended(self, request: Any) -> None:
        """The scheduler has let go of the request, for whatever reason."""
        rid = RequestId(request.request_id)
        tracked = self._requests.get(rid)
        if tracked is None:
            return
        self._forget(rid)
        key = (tracked.tag.tenant, tracked.tag.scope)
        state = self._states.get(key)
        if state is not None and rid in state.live and tracked.tag.epoch == state.epoch:
            left = self._left_by(request, tracked)
            if left is not None:
                self._finished.keep(key, state.epoch, left)
            if not self._table.current(tracked.tag.ticket):
                self._leave_behind(key, state.epoch)
        if state is not None and rid in state.live | state.closing | state.leaving:
            self._feed(key, happened.RequestFinished(rid))

    def _leave_behind(self, key: ScopeKey, epoch: Epoch) -> None:
        """A request of this epoch is gone before anybody said that the epoch is over: whoever counts wants to know."""
        if self._selector is None:
            return
        self._left_behind[key, epoch] = True
        if len(self._left_behind) > LEFT_BEHIND:
            del self._left_behind[next(iter(self._left_behind))]

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
        self._steps.rows_allocated(request, hit_tokens, new_tokens)

    def before_schedule(self) -> None:
        """Start of a scheduling pass."""
        if self.defect is not None:
            raise self.defect
        self._steps.begin_pass()
        self.sweep()
        if self._selector is not None:
            self._selector.live(self._clock_ns() / 1e9, sum(bool(state.live) for state in self._states.values()))

    def scheduled(self, output: Any) -> None:
        """A step was scheduled: describe it for the workers, and verify what was adopted."""
        output.retire_began_ns = self._clock_ns()
        for rid in self._steps.scheduled(output):
            if rid in self.certificates:
                self._verify_adoption(rid)
        self.facts.flush()

    def step_ended(self, output: Any, receipt: Receipt | None) -> None:
        """The step's output is here, not yet processed: publish what was written, close what lost authority."""
        rows, most = output.total_num_scheduled_tokens, max(output.num_scheduled_tokens.values(), default=0)
        began_ns = max(output.retire_began_ns, self._step_ended_ns)  # it may have waited for the one before
        self._step_ended_ns = self._clock_ns()
        if most and not (receipt is not None and (receipt.stopped or receipt.cuts)):
            self._rates.ran(rows, most, self._step_ended_ns - began_ns)
        self._steps.ended(output, receipt)
        self._safe_points += receipt.safe_points if receipt is not None else 0
        self.sweep()

    def counts_for_nothing(self, request_id: str) -> bool:
        """After `step_ended`, of a request in the step: it has lost authority, and a later step computes it still.

        Nobody may look at its tokens: they may have been sampled from nothing.
        """
        return self.is_scoped(request_id) and self.revoked(request_id)

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
        tracked, request = self._requests[rid], self._engine.request(rid)
        tag = tracked.tag
        if self._table.current(tag.ticket):  # the request alone is over: its client has gone
            self._aborted.discard(rid)
            self._engine.drop(rid)
            return
        key = (tag.tenant, tag.scope)
        state = self._states.get(key)
        left = None if request is None else self._left_by(request, tracked)
        self._report_receipt(rid, tracked, left)
        known = state is not None and (rid in state.closing | state.leaving or tag.epoch < state.epoch)
        if not known and left is None:
            self._engine.drop(rid)
            return
        transition = state.transition if state is not None and known else None
        kept, refusal = None, None
        if left is not None and (transition is not None or not known):
            kept, refusal = self._keeper.keep(left, transition.contract if transition is not None else None)
        self._forget(rid)
        self._engine.drop(rid)
        if not known:  # the table spoke before the API process did
            self._orphans.setdefault(key, []).append(_Orphan(rid, kept, refusal, self._clock_ns() + self._untold_ns))
        elif state is not None and (kept is not None or rid in state.closing | state.leaving):
            self._feed(key, happened.RequestClosed(rid, kept, refusal))

    def _forget(self, rid: RequestId) -> None:
        """Drop every note about the request without telling the protocol that it finished."""
        if self._requests.pop(rid, None) is not None:
            notes.gone(rid)
        self._held.discard(rid)
        self._aborted.discard(rid)
        self._withdraw(rid)
        if self._safe_points:
            self._report(None, "safe_points", count=self._safe_points)
            self._safe_points = 0

    def _withdraw(self, rid: RequestId) -> None:
        certificate = self.certificates.pop(rid, None)
        if certificate is not None:
            self._keeper.withdraw(certificate)

    def _left_by(self, request: Any, tracked: Tracked) -> Holding | None:
        """What the request has written, before or after the scheduler frees it."""
        frontier = min(tracked.frontier_tokens, request.num_tokens)
        if frontier <= 0 or not tracked.fingerprint.startswith(f"{self._contents}|"):
            return None
        groups = self._keeper.geometry.groups
        return Holding(
            request=RequestId(request.request_id),
            tenant=tracked.tag.tenant,
            tokens=tuple(request.all_token_ids[:frontier]),
            frontier_tokens=TokenCount(frontier),
            fingerprint=tracked.fingerprint,
            groups=tuple(
                tuple(noted[: frontier // group.block_tokens])
                for noted, group in zip(tracked.blocks, groups, strict=True)
            ),
            grid_tokens=TokenCount(min(tracked.grid_tokens, frontier)),
        )

    def told(self, event: dict[str, Any]) -> dict[str, dict[str, int]] | None:
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
        if event["kind"] != "status":
            return None
        quanta = {} if self._selector is None else {str(tokens): n for tokens, n in self._selector.steps.items()}
        return {"engine": self.leftovers(event.get("tenant")), "tier": self._keeper.counters(), "quanta": quanta}

    def _cancelled(self, key: ScopeKey) -> None:
        """The scope's life is over, unless the message is late and the table speaks of the next one already."""
        state = self._states.get(key)
        current = state is not None and any(rid in self._requests and not self.revoked(rid) for rid in state.live)
        if state is not None and not state.cancelled and not current:
            self._feed(key, happened.ScopeCancelled())
        self._finished.forget(key)
        for orphan in self._orphans.pop(key, []):
            state = self._states.get(key)
            if state is not None and (orphan.kept is not None or orphan.request in state.closing | state.leaving):
                self._feed(key, happened.RequestClosed(orphan.request, orphan.kept))
            elif orphan.kept is not None:  # of a life before the one that was forgotten
                self._keeper.release((orphan.kept,))
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
        if self._selector is not None and self._had_requests(key, old):
            self._selector.revised(event["at_ns"] / 1e9)
        left, refusal = self._take_finished(key, old, contract)
        self._expiry_ns[transition] = event["at_ns"] + contract.lifetime_ms * 1_000_000
        try:
            self._feed(key, happened.EpochAdvanced(transition, old, new, contract, left, refusal))
        except ProtocolError:
            # The successor was here first and nothing of the old epoch ever was: it runs without a certificate.
            del self._expiry_ns[transition]
            self._keeper.release(left)
            self._report(transition, "refused", refusal=Refusal.NO_PREDECESSOR.value)
            for stage in (Stage.FENCE, Stage.ALIGN, Stage.RESUME, Stage.RECLAIM):
                self._report(transition, "stage", stage=stage.value)
            self._report(transition, "closed", outcome="cold")
            notes.ended(transition, Outcome.COLD)
            return
        for holding in self._states[key].holdings:
            if holding.host is not None:
                self._keeper.prolong(holding, self._expiry_ns[transition])
        self._settle_orphans(key, contract)
        for rid in self._early.pop(key, []):
            if rid in self._requests:
                self._place(rid)

    def _had_requests(self, key: ScopeKey, old: Epoch) -> bool:
        """Whether the epoch that a message ends had requests when it was revoked.  Asked once."""
        state = self._states[key]
        return self._left_behind.pop((key, old), False) or (bool(state.live) and state.epoch <= old)

    def _settle_orphans(self, key: ScopeKey, contract: Contract) -> None:
        """What was closed before this message came is offered now, under its contract."""
        for orphan in self._orphans.pop(key, []):
            current = self._states[key].transition
            if current is not None and orphan.request in current.closing:
                kept, why = orphan.kept, orphan.refusal
                if kept is not None:
                    kept, why = self._keeper.narrow(kept, contract)
                self._feed(key, happened.RequestClosed(orphan.request, kept, why))
            elif orphan.kept is not None:
                self._keeper.release((orphan.kept,))

    def _take_finished(
        self, key: ScopeKey, epoch: Epoch, contract: Contract
    ) -> tuple[tuple[Holding, ...], Refusal | None]:
        """Pin what requests of `epoch` left that had finished by themselves."""
        offers = [self._keeper.keep(left, contract) for left in self._finished.take(key, epoch)]
        refusals = [refusal for _, refusal in offers if refusal is not None]
        refusal = Refusal.QUOTA if Refusal.QUOTA in refusals else next(iter(refusals), None)
        return tuple(kept for kept, _ in offers if kept is not None), refusal

    def _expire(self) -> None:
        """Fed for as long as the transition is open: what closes after the deadline must not stay pinned either."""
        now = self._clock_ns()
        due = {transition for transition, at_ns in self._expiry_ns.items() if now >= at_ns}
        for key in list(self._states) if due else ():
            transition = self._states[key].transition
            if transition is not None and transition.id in due:
                self._feed(key, happened.PinsExpired(transition.id))
        for key, orphan in [(key, one) for key, group in self._orphans.items() for one in group if now >= one.due_ns]:
            self._disown(key, orphan)

    def _disown(self, key: ScopeKey, orphan: _Orphan) -> None:
        """Nobody has said what became of its epoch: as far as the protocol knows the request has finished."""
        self._orphans[key].remove(orphan)
        if not self._orphans[key]:
            del self._orphans[key]
        if orphan.kept is not None:
            self._keeper.release((orphan.kept,))
        if key in self._states and orphan.request in self._states[key].live:
            self._feed(key, happened.RequestFinished(orphan.request))
        self._collect(key)

    def revoke_certificates(self) -> None:
        """Weights, adapters or the cache are about to change: nothing written so far may be inherited."""
        self._contents += 1
        self._finished.clear()
        for key in list(self._states):
            if self._states[key].transition is not None:
                self._feed(key, happened.CertificatesRevoked())
        for orphans in self._orphans.values():
            for number, orphan in enumerate(orphans):
                if orphan.kept is not None:
                    self._keeper.release((orphan.kept,))
                    orphans[number] = replace(orphan, kept=None, refusal=Refusal.REVOKED)
        self._keeper.forget_copies()

    # -- host memory ----------------------------------------------------------------------------------------------

    def offloaded(self, source: RequestId, host: tuple[tuple[HostRef | None, ...], ...] | None) -> None:
        """A copy to host memory is over; None: there is none."""
        key = self._copying.pop(source)
        transition = self._states[key].transition if key in self._states else None
        if transition is None or source not in transition.copying:
            self._keeper.copied(source, wanted=False)
            return
        self._keeper.copied(source, wanted=True)
        if host is not None:
            self._report(transition.id, "offloaded")
        self._feed(key, happened.PagesOffloaded(source, host))

    def restored(self, target: RequestId, refusal: Refusal | None) -> None:
        """The target's pages are in its blocks, verified; or they never will be."""
        certificate = self.certificates.get(target)
        if certificate is None or certificate.tier is not Tier.DRAM:
            return
        if refusal is None:
            self._report(certificate.transfer, "restored", request=target)
        else:
            self._fail_adoption(target, refusal)

    def _fail_adoption(self, target: RequestId, refusal: Refusal) -> None:
        tag = self._requests[target].tag
        self._withdraw(target)
        self._feed((tag.tenant, tag.scope), happened.AdoptionFailed(target, refusal))

    # -- the protocol ---------------------------------------------------------------------------------------------

    def _successor(self, rid: RequestId) -> Successor:
        request, tracked = self._engine.request(rid), self._requests[rid]
        return Successor(rid, tracked.tag.tenant, tuple(request.all_token_ids), tracked.fingerprint)

    def _feed(self, key: ScopeKey, event: happened.Event) -> None:
        """Feed one event and carry its effects out; then the answers that these gave at once."""
        before = self._states[key]
        state, effects = step(before, event, self._keeper.geometry)
        self._states[key] = state
        notes.stepped(before, event, state, effects)
        transition = state.transition or before.transition
        for effect in effects:
            self._carry_out(effect, key, transition)
        self._collect(key)
        if not self._feeding:
            self._feeding = True
            try:
                while self._answers:
                    self._feed(*self._answers.pop(0))
            finally:
                self._feeding = False

    def _collect(self, key: ScopeKey) -> None:
        """A scope with nothing live and nothing open needs no memory here: the table knows its epoch."""
        state = self._states.get(key)
        if state is None or key in self._early or key in self._orphans:
            return
        if not state.live and not state.leaving and state.transition is None:
            del self._states[key]

    def _carry_out(self, effect: do.Effect, key: ScopeKey, current: Transition | None) -> None:
        match effect:
            case do.CloseRequests(requests):
                self._held -= requests
                for rid in requests:
                    self._withdraw(rid)
            case do.InstallCertificate(certificate):
                self._install(certificate, current)
            case do.StartCold(rid, refusal):
                self._start_cold(rid, refusal, current)
            case do.StartFresh(rid):
                self._held.discard(rid)
            case do.OffloadPages() | do.ReturnBlocks() | do.ReleasePins():
                self._carry_out_on_blocks(effect, key)
            case do.ReportStage(transition, stage):
                self._report(transition, "stage", stage=stage.value)
            case do.ReportClosed(transition, outcome):
                self._closed(transition, outcome, current)

    def _carry_out_on_blocks(self, effect: do.OffloadPages | do.ReturnBlocks | do.ReleasePins, key: ScopeKey) -> None:
        match effect:
            case do.OffloadPages(holding, transition):
                if self._keeper.offload(holding, self._expiry_ns[transition]):
                    self._copying[holding.request] = key
                else:
                    self._answers.append((key, happened.PagesOffloaded(holding.request, None)))
            case do.ReturnBlocks(holding):
                self._keeper.return_blocks(holding)
            case do.ReleasePins(holdings):
                self._keeper.release(holdings)

    def _start_cold(self, rid: RequestId, refusal: Refusal, current: Transition | None) -> None:
        self._withdraw(rid)
        if current is not None and current.contract.equivalence is Equivalence.EXACT:
            self._run_exact(rid)
        if refusal is Refusal.QUOTA:
            self._requests[rid].reads_nothing = True
        self._held.discard(rid)
        notes.cold(rid, refusal, current.id if current else None)
        self._report(current.id if current else None, "refused", request=rid, refusal=refusal.value)

    def _install(self, certificate: Certificate, current: Transition | None) -> None:
        assert current is not None, "a certificate belongs to an open transition"
        target = certificate.target
        tracked = self._requests[target]
        self._withdraw(target)
        self._keeper.install(certificate, tracked.tag.ticket)
        self.certificates[target] = certificate
        if current.contract.equivalence is Equivalence.EXACT:
            self._run_exact(target)
            tracked.grid_tokens = certificate.tokens
        self._held.discard(target)
        notes.certified(certificate, tracked.tag.tenant, tracked.tag.scope)
        self._report(certificate.transfer, "certificate", **_described(certificate))

    def _closed(self, transition: TransitionId, outcome: Outcome, current: Transition | None) -> None:
        self._expiry_ns.pop(transition, None)
        if outcome is Outcome.EXPIRED:  # nobody was there to be told why
            assert current is not None, "an open transition was there to expire"
            deadline_ms = current.contract.deadline_ms
            late = deadline_ms is not None and deadline_ms < current.contract.ttl_ms
            reason = current.refusal or (Refusal.DEADLINE if late else Refusal.EXPIRED)
            self._report(transition, "refused", refusal=reason.value)
        self._report(transition, "closed", outcome=outcome.value)
        notes.ended(transition, outcome)

    def blocks_to_install(self, request_id: str) -> tuple[int, tuple[list[Any], ...]] | None:
        """Tokens and device blocks per group that the request adopts, or None."""
        rid = RequestId(request_id)
        while (certificate := self.certificates.get(rid)) is not None and certificate.tier is Tier.HBM:
            blocks = self._keeper.blocks(certificate)
            if blocks is not None:
                return certificate.tokens, blocks
            self._fail_adoption(rid, Refusal.GENERATION)  # leaves a shorter certificate, or none
        return None

    def _verify_adoption(self, rid: RequestId) -> None:
        certificate = self.certificates.pop(rid)
        tracked = self._requests[rid]
        tag = tracked.tag
        key = (tag.tenant, tag.scope)
        table = self._engine.computed_blocks(rid)
        adopted = tuple(
            tuple(
                None if page is None or block.is_null else block.block_id
                for page, block in zip(group, blocks, strict=False)
            )
            for group, blocks in zip(certificate.groups, table, strict=True)
        )
        notes.adopted(certificate, adopted)
        self._report(certificate.transfer, "adopted", request=rid, blocks=[list(group) for group in adopted])
        start_tokens = TokenCount(tracked.frontier_tokens)  # its first rows' own, as long as they are not computed
        self._feed(key, happened.CertificateAdopted(rid, adopted, start_tokens))

    def _report(self, transition: TransitionId | None, kind: str, **values: Any) -> None:
        self.facts.append({"transition": transition, "kind": kind, "at_ns": self._clock_ns(), **values})

    def _report_receipt(self, rid: RequestId, tracked: Tracked, holding: Holding | None) -> None:
        receipt, tag = tracked.receipt, tracked.tag
        cut, phase = (receipt.cut_of(rid), receipt.phase_of(rid)) if receipt else (None, None)
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
                "choice": cut.choice.value if cut else None,
                "cost": {choice.value: cost for choice, cost in cut.cost.items()} if cut else None,
                "layer": cut.layer if cut else None,
                "phase": phase.value if phase else None,
                "stopped": bool(cut and cut.choice is Choice.STOP),
                "obsolete_closed_ns": tracked.closed_ns,
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
            "pinned_blocks": self._keeper.ownership.pinned_blocks(tenant),
            "scoped_requests": sum(1 for _ in requests),
            "open_transitions": sum(1 for state in states if state.transition is not None),
            "orphans": sum(len(group) for group in orphans),
            "steps_in_flight": self._steps.in_flight(tenant),
            "copies_in_flight": sum(1 for key in self._copying.values() if tenant in (None, key[0])),
        }


@dataclass(frozen=True, slots=True)
class _Orphan:
    """A request that was closed before the message about its epoch came; its pins, or why there are none.

    `due_ns`: how long it waits for that message.
    """

    request: RequestId
    kept: Holding | None
    refusal: Refusal | None
    due_ns: int


def _described(certificate: Certificate) -> dict[str, Any]:
    """A certificate as facts show it: device blocks and generations, or slots of host memory."""
    return {
        "tokens": certificate.tokens,
        "source": certificate.source,
        "target": certificate.target,
        "fingerprint": certificate.fingerprint,
        "tier": certificate.tier.value,
        "blocks": [[_number(page) for page in group] for group in certificate.groups],
        "generations": [
            [page.generation if isinstance(page, BlockRef) else None for page in group] for group in certificate.groups
        ],
    }


def _number(page: PageRef) -> int | None:
    return page.block if isinstance(page, BlockRef) else page.slot if page is not None else None


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
