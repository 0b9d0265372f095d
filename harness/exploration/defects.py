"""Faults planted in a world, each of which its invariants must find.

Owns: what is broken, in which world, and the invariant that must say so.
Must not know: how states are visited.
Each takes away one check or one wait of the protocol.  A defect that is not found is a world that proves nothing.
"""

# ruff: noqa: ARG002  what is overridden keeps its signature

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.exploration.search import Explored, explore
from harness.exploration.world import (
    TAKEN_WROTE,
    WROTE,
    Block,
    Draft,
    Job,
    Move,
    Request,
    Rules,
    Scope,
    Step,
)
from harness.exploration.worlds import SMALL
from retire.core import Effect, Event, Geometry, ScopeState, step
from retire.core import effects as do
from retire.core import events as ev
from retire.core.invariants import Invariant

STATES = 300_000


class _OpenGate(Draft):
    def _passes_gate(self, number: int, ticket: int) -> bool:
        return not self.scopes[number].cancelled


class _GateAboveOnly(Draft):
    def _passes_gate(self, number: int, ticket: int) -> bool:
        scope = self.scopes[number]
        return ticket + 1 >= scope.word and not scope.cancelled


class _GateIgnoresTombstone(Draft):
    def _passes_gate(self, number: int, ticket: int) -> bool:
        return ticket == self.scopes[number].word


class _LaunchesRevoked(Draft):
    def _may_launch(self, number: int, version: int) -> bool:
        return True


class _BlockInFlightCounts(Draft):
    def _frontier(self, request: Request) -> int:
        return len(request.blocks)


class _FirstReceiptCounts(Draft):
    def _complete(self, jobs: Sequence[Job]) -> bool:
        return any(job.status == TAKEN_WROTE for job in jobs)

    def _wrote(self, jobs: Sequence[Job]) -> bool:
        return self._complete(jobs)


class _LateReceiptCounts(Draft):
    """A receipt is taken for whatever step its request has in flight."""

    def _is_same_step(self, job: Job, echo: Job) -> bool:
        return job[:2] == echo[:2]


class _PublishesBeforeTheReceipt(Draft):
    def launch(self, number: int, version: int) -> Move | None:
        move = super().launch(number, version)
        found = self._found(number, version)
        if move is not None and found is not None:
            self._publish(number, found._replace(written=found.written + 1))
        return move


class _PinnedIsFree(Draft):
    """The pool hands out what one owner still holds."""

    def _is_free(self, block: Block) -> bool:
        return block.refs <= 1


class _ForgetsWriters(Draft):
    """A fence that is given up returns the block while it is still written."""

    def _orphan(self, number: int, request: Request) -> None:
        block = request.blocks[-1][0] if request.stepping else None
        super()._orphan(number, request)
        if block is not None and self.pool[block].refs > 1:
            self._drop(block)


class _StoppedCountsAsWritten(Draft):
    def receipt(self, place: int, job: Job, *, echo: bool) -> Move:
        if job.status != WROTE:
            self._job(place, job, job._replace(status=WROTE))
            job = job._replace(status=WROTE)
        return super().receipt(place, job, echo=echo)


class _RecoversWhatWasSynced(Draft):
    """No stride above the durable record."""

    def _recovered(self, scope: Scope) -> int:
        return scope.synced


class _ForgetsRetries(Draft):
    """A request whose stream died is never taken again."""

    def _on_again(self, number: int, version: int) -> None:
        self._on_adm(number, version)


def _keeps_pins(state: ScopeState, event: Event, env: Geometry) -> tuple[ScopeState, tuple[Effect, ...]]:
    """A core whose pins are never told to be released."""
    after, effects = step(state, event, env)
    return after, tuple(effect for effect in effects if not isinstance(effect, do.ReleasePins))


def _releases_at_close(state: ScopeState, event: Event, env: Geometry) -> tuple[ScopeState, tuple[Effect, ...]]:
    """A core that gives the pins of a fenced request back before anybody has adopted them."""
    after, effects = step(state, event, env)
    if isinstance(event, ev.RequestClosed) and event.holding is not None:
        effects = (*effects, do.ReleasePins((event.holding,)))
    return after, effects


def _certifies_what_differs(state: ScopeState, event: Event, env: Geometry) -> tuple[ScopeState, tuple[Effect, ...]]:
    """A core that takes the prompt of the successor to begin with all that was complete."""
    if isinstance(event, ev.RequestAdmitted) and state.holdings:
        held = max(state.holdings, key=lambda found: found.frontier_tokens)
        who, end = event.successor, held.frontier_tokens
        event = replace(event, successor=replace(who, tokens=(*held.tokens[:end], *who.tokens[end:])))
    return step(state, event, env)


@dataclass(frozen=True)
class Defect:
    """`invariant`: what the counterexample must be about."""

    name: str
    world: str
    invariant: Invariant
    draft: type[Draft] = Draft
    core: Step = step

    def explored(self) -> Explored:
        """Until the first counterexample.  Raises TooLarge: a defect may have states without end."""
        world = next(world for world in SMALL if world.name == self.world)
        return explore(Rules(world, self.draft, self.core), STATES)


DEFECTS = (
    Defect("the gate is open", "losses", Invariant.CURRENT_OUTPUT, _OpenGate),
    Defect("the gate lets one epoch pass", "losses", Invariant.CURRENT_OUTPUT, _GateAboveOnly),
    Defect("the gate ignores tombstones", "cancellation", Invariant.CURRENT_OUTPUT, _GateIgnoresTombstone),
    Defect("steps of revoked requests begin", "losses", Invariant.ANY_STAGE, _LaunchesRevoked),
    Defect(
        "a block in flight is within the frontier", "participants", Invariant.WRITTEN_BEFORE_READ, _BlockInFlightCounts
    ),
    Defect("one participant's receipt is enough", "participants", Invariant.CERTIFIED, _FirstReceiptCounts),
    Defect("a late receipt counts for the step in flight", "repeats", Invariant.CERTIFIED, _LateReceiptCounts),
    Defect("a stopped step counts as written", "losses", Invariant.CERTIFIED, _StoppedCountsAsWritten),
    Defect("published at launch", "losses", Invariant.WRITTEN_BEFORE_READ, _PublishesBeforeTheReceipt),
    Defect("what one owner holds is free", "losses", Invariant.NO_OLD_WRITER, _PinnedIsFree),
    Defect("writers of a lost step are forgotten", "participants", Invariant.PINS, _ForgetsWriters),
    Defect("pins are released at the close", "losses", Invariant.PINS, core=_releases_at_close),
    Defect("pins are never released", "losses", Invariant.PINS, core=_keeps_pins),
    Defect("more is certified than agrees", "participants", Invariant.CERTIFIED, core=_certifies_what_differs),
    Defect("the durable record is taken for the word", "deaths", Invariant.ONE_EPOCH, _RecoversWhatWasSynced),
    Defect("a retry is taken for a repetition", "participants", Invariant.ANY_STAGE, _ForgetsRetries),
)
