"""What of every scoped request has been scheduled, written and published.

Owns: one record per scoped request, the plans of the steps in flight, the frontier that receipts move, which blocks
a step is about to write, and which hold what it wrote.  Must not know: epochs, transitions, why a request ends.
Strategy: a request's frontier moves only by the receipt of a step that ran to its end, and only while every block of
that step still belongs to it; publication follows it.  Blocks that a sliding window lets go stay on record: they are
readable until they are reused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, Protocol

from retire.authority.tag import Tag
from retire.core.errors import InvariantViolation
from retire.core.types import BlockRef, KVGroup, RequestId, TenantId
from retire.engine import notes
from retire.engine.plan import PlannedRows, Receipt, StepPlan
from retire.engine.rates import Rates
from retire.kv.ownership import Ownership


class Engine(Protocol):
    """What is asked of the scheduler."""

    def request(self, request_id: RequestId) -> Any:
        """vLLM's request, None when it is gone."""

    def computed_blocks(self, request_id: RequestId) -> tuple[Sequence[Any], ...]:
        """The request's block table, per KV group."""

    def publish(self, request: Any, tokens: int) -> None:
        """Make the request's full blocks below `tokens` readable."""

    def drop(self, request_id: RequestId) -> None:
        """Finish the request and free what it holds."""


@dataclass(slots=True)
class Tracked:
    """A scoped request, from admission to its end.

    `frontier_tokens`: tokens whose KV is written in every layer (invariant 3).  `written_rows`: the same with draft
    tokens, which count once they are accepted.  `started`: it has had rows since admission or preemption.
    `lost_until`: receipts up to this plan speak of blocks that a preemption took away.
    `fingerprint`: what its KV depends on beside its tokens, as of its admission.
    `alone`: it shares no step with others.  `reads_nothing`: neither does it read what others have published.
    `grid_tokens`: see `Holding`.
    `blocks`: per KV group and position, the block that was given for it, slid out of the window or not.
    `receipt`: of its last step, or of the one that cut it.  `closed_ns`: when the last obsolete row was computed.
    """

    tag: Tag
    fingerprint: str
    alone: bool = False
    reads_nothing: bool = False
    blocks: tuple[list[BlockRef | None], ...] = ()
    grid_tokens: int = 0
    started: bool = False
    steps_in_flight: int = 0
    frontier_tokens: int = 0
    written_rows: int = 0
    lost_until: int = 0
    receipt: Receipt | None = None
    closed_ns: int | None = None


class Steps:
    """One per scheduler."""

    def __init__(
        self,
        engine: Engine,
        ownership: Ownership,
        groups: tuple[KVGroup, ...],
        *,
        hash_tokens: int,
        rates: Rates,
        grid_tokens: int,
    ) -> None:
        self.requests: dict[RequestId, Tracked] = {}
        self._engine = engine
        self._ownership = ownership
        self._groups = groups
        self._hash_tokens = hash_tokens
        self._rates = rates
        self._unit_tokens = lcm(*(group.block_tokens for group in groups))
        self._grid_tokens = grid_tokens
        self._plans: deque[StepPlan] = deque()
        self._unpublished: dict[int, set[Any]] = {}
        self._scheduling: set[Any] = set()
        self._seq = 0

    def in_flight(self, tenant: TenantId | None = None) -> int:
        """Steps with scoped rows, or with the tenant's, whose receipt is out."""
        return sum(1 for plan in self._plans if tenant is None or self._has_rows_of(tenant, plan))

    def _has_rows_of(self, tenant: TenantId, plan: StepPlan) -> bool:
        tracked = (self.requests.get(rows.request) for rows in plan.rows)
        return any(request is not None and request.tag.tenant == tenant for request in tracked)

    def computes(self, request_id: RequestId) -> bool:
        """Whether a step in flight has rows of the request."""
        tracked = self.requests.get(request_id)
        return tracked is not None and tracked.steps_in_flight > 0

    def begin_pass(self) -> None:
        """A scheduling pass starts."""
        self._scheduling = set()

    def rows_allocated(self, request: Any, hit_tokens: int, new_tokens: int) -> None:
        """Slots were given out: the step being scheduled will write these blocks."""
        start = request.num_computed_tokens + hit_tokens
        size = self._hash_tokens
        self._scheduling.update(request.block_hashes[start // size : (start + new_tokens) // size])

    def shares_unwritten(self, request: Any) -> bool:
        """Whether the request starts with blocks that a step is about to publish: better wait than compute them too."""
        pending = [hashes for hashes in (self._scheduling, *self._unpublished.values()) if hashes]
        return any(block in hashes for hashes in pending for block in request.block_hashes)

    def scheduled(self, output: Any) -> list[RequestId]:
        """Describe the step on vLLM's scheduler output, for the workers.  Returns the scoped requests in it."""
        if not self.requests:
            return []
        alone = len(output.num_scheduled_tokens) == 1
        rows = [
            self._rows(self.requests[rid], rid, tokens, alone=alone)
            for rid, tokens in output.num_scheduled_tokens.items()
            if rid in self.requests
        ]
        if rows:
            self._seq += 1
            total = output.total_num_scheduled_tokens
            plan = StepPlan(
                self._seq,
                tuple(rows),
                foreign_rows=total - sum(planned.end - planned.start for planned in rows),
                armed=self._rates.is_long(total, max(output.num_scheduled_tokens.values())),
                unit_tokens=self._unit_tokens,
                least_rows=self._rates.least_rows,
            )
            self._plans.append(plan)
            self._unpublished[plan.seq] = self._scheduling
            output.retire_plan = plan
            notes.launched(plan)
        return [planned.request for planned in rows]

    def _rows(self, tracked: Tracked, rid: RequestId, tokens: int, *, alone: bool) -> PlannedRows:
        request = self._engine.request(rid)
        end = request.num_computed_tokens
        start = end - tokens
        first = start
        if not tracked.started:  # what it starts with is a hit in the prefix cache, or certified
            tracked.started, tracked.frontier_tokens, first = True, start, 0
            tracked.blocks = tuple([] for _ in self._groups)
        elif tracked.steps_in_flight == 0 and tracked.written_rows >= start:
            tracked.frontier_tokens = max(tracked.frontier_tokens, start)  # accepted draft tokens
        self._note_blocks(tracked, rid, first, end)
        tracked.steps_in_flight += 1
        whole = tokens == self._grid_tokens and end <= request.num_prompt_tokens
        return PlannedRows(rid, tracked.tag.ticket, start, end, alone and whole and start == tracked.grid_tokens)

    def _note_blocks(self, tracked: Tracked, rid: RequestId, start: int, end: int) -> None:
        """Put down which blocks hold tokens [start, end)."""
        for noted, blocks, group in zip(tracked.blocks, self._engine.computed_blocks(rid), self._groups, strict=True):
            first, last = start // group.block_tokens, -(-end // group.block_tokens)
            del noted[first:]
            noted.extend(self._ownership.ref(block) for block in blocks[first:last])

    def _still_owned(self, tracked: Tracked, rows: PlannedRows) -> bool:
        """Whether every block that the rows were written to still belongs to the request."""
        return all(
            self._ownership.holds(ref)
            for noted, group in zip(tracked.blocks, self._groups, strict=True)
            for ref in noted[rows.start // group.block_tokens : -(-rows.end // group.block_tokens)]
        )

    def ended(self, output: Any, receipt: Receipt | None) -> None:
        """A step is over: move frontiers and publish what it wrote.

        Raises:
            InvariantViolation: it had scoped rows and came back without its receipt (invariant 7).
        """
        plan: StepPlan | None = getattr(output, "retire_plan", None)
        if plan is None:
            return
        if receipt is None or receipt.seq != plan.seq or self._plans.popleft().seq != plan.seq:
            raise InvariantViolation(f"invariant 7: step {plan.seq} ended without its receipt")
        notes.received(plan, receipt)
        del self._unpublished[plan.seq]
        for rows, end in zip(plan.rows, receipt.ends, strict=True):
            tracked = self.requests.get(rows.request)
            if tracked is not None:
                tracked.steps_in_flight -= 1
                tracked.closed_ns = receipt.obsolete_closed_ns(rows.request)
                if tracked.receipt is None or not tracked.receipt.cut_short(rows.request):
                    tracked.receipt = receipt
                if end > rows.start and plan.seq > tracked.lost_until:
                    self._written(tracked, replace(rows, end=end, on_grid=rows.on_grid and end == rows.end))

    def _written(self, tracked: Tracked, rows: PlannedRows) -> None:
        """These rows were computed in every layer."""
        request = self._engine.request(rows.request)
        if request is None:
            return
        if tracked.frontier_tokens < rows.start or not self._still_owned(tracked, rows):
            return  # an earlier step of it was stopped, or a block was handed on too early
        tracked.written_rows = rows.end
        if rows.on_grid:
            tracked.grid_tokens = rows.end
        tracked.frontier_tokens = min(rows.end, request.num_tokens)
        self._engine.publish(request, tracked.frontier_tokens)
        notes.shared(rows.request, tracked.frontier_tokens)

    def preempted(self, request_id: RequestId) -> None:
        """The request lost its blocks and starts over."""
        tracked = self.requests.get(request_id)
        if tracked is not None:
            tracked.started, tracked.frontier_tokens, tracked.written_rows, tracked.grid_tokens = False, 0, 0, 0
            tracked.blocks, tracked.lost_until = (), self._seq
            notes.preempted(request_id)
