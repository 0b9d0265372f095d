"""What the scheduler tells the workers about a step, and what they answer.

Plain values that pickle: they ride on vLLM's SchedulerOutput and ModelRunnerOutput.
"""

from __future__ import annotations

from dataclasses import dataclass

from retire.core.types import RequestId, Ticket


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

    `foreign_rows`: the step also computes rows of requests without a scope, so it is never stopped.
    """

    seq: int
    rows: tuple[PlannedRows, ...]
    foreign_rows: bool
    armed: bool


@dataclass(frozen=True, slots=True)
class Receipt:
    """A participant's statement about one step.

    `stopped`: the step ended at a safe point; no row of it is complete.  Otherwise every row was computed in every
    layer: `frontier_ready`.  `obsolete_closed_ns`: CLOCK_MONOTONIC, when obsolete rows were no longer computed.
    `safe_points`: how many were passed.  `longest_interval_ns`: the longest time between two of them.
    """

    seq: int
    stopped: bool
    obsolete_closed_ns: int
    safe_points: int
    longest_interval_ns: int
