"""What the scheduler tells the workers about a step, and what they answer.

Plain values that pickle: they ride on vLLM's SchedulerOutput and ModelRunnerOutput.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from retire.core.fence import Choice
from retire.core.types import RequestId, Ticket


class Phase(StrEnum):
    """Whose forward a step is in: the served model's, or that of the model that drafts for it."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """One scoped request's rows of a step: tokens [`start`, `end`) of its sequence.

    `on_grid`: the step is theirs alone, and they are a whole chunk of the prompt as a clean run has it.
    """

    request: RequestId
    ticket: Ticket
    start: int
    end: int
    on_grid: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`armed`: the worker looks at the table at its safe points.

    `foreign_rows`: how many rows of requests without a scope the step also computes; they always go on.
    `unit_tokens`: where a certificate may end.  `least_rows`: fewer rows than this take as long as this many.
    """

    seq: int
    rows: tuple[PlannedRows, ...]
    foreign_rows: int
    armed: bool
    unit_tokens: int = 1
    least_rows: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """A request's rows that lost their use while they were computed.

    `cost`: of every choice that was open, in row-layers (`retire.core.fence`).  `layer`: how many had been computed,
    a draft model's counted on from the target's.  `end`: rows from here on were no longer computed.
    `at_ns`: CLOCK_MONOTONIC.
    """

    request: RequestId
    choice: Choice
    cost: dict[Choice, int]
    layer: int
    end: int
    at_ns: int
    phase: Phase = Phase.TARGET


@dataclass(frozen=True, slots=True)
class Receipt:
    """A participant's statement about one step.

    `ends`: for each of the plan's rows, up to which token they were computed in every layer (`frontier_ready`), a
    draft model's included.
    `stopped`: the step ended at a safe point, in the forward that `phase` names.
    `ended_ns`: CLOCK_MONOTONIC, when nothing of it was computed any more.
    `safe_points`: how many were passed.  `longest_interval_ns`: the longest time between two of them.
    """

    seq: int
    ends: tuple[int, ...]
    cuts: tuple[Cut, ...]
    stopped: bool
    ended_ns: int
    safe_points: int
    longest_interval_ns: int
    phase: Phase = Phase.TARGET

    def arrived(self, at_ns: int) -> Receipt:
        """The same, of a step whose output came from the device at that time: by then all its rows were computed."""
        return self if self.stopped else replace(self, ended_ns=at_ns)

    def cut_of(self, request: RequestId) -> Cut | None:
        """The last cut that took some of the request's rows, else the last decision to keep them; None: none fell."""
        mine = [cut for cut in self.cuts if cut.request == request]
        return self._shortening(request) or (mine[-1] if mine else None)

    def _shortening(self, request: RequestId) -> Cut | None:
        """The last cut that took some of the request's rows."""
        mine = (cut for cut in reversed(self.cuts) if cut.request == request)
        return next((cut for cut in mine if cut.choice is not Choice.KEEP), None)

    def cut_short(self, request: RequestId) -> bool:
        """Whether some of the request's rows were not computed: what is launched on top of them counts for nothing."""
        return self._shortening(request) is not None

    def phase_of(self, request: RequestId) -> Phase | None:
        """In whose forward something ended for the request: some of its rows, else the step; None: nothing did."""
        cut = self.cut_of(request)
        return cut.phase if cut is not None else self.phase if self.stopped else None

    def obsolete_closed_ns(self, request: RequestId) -> int:
        """When no row of the request was computed that nobody had a use for."""
        cut = self._shortening(request)
        return self.ended_ns if cut is None else cut.at_ns
