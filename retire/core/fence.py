"""What becomes of a revoked request's rows in the step that computes them: keep, trim or stop.

Owns: the choice, and what each would cost.  Must not know: models, tables, time.
Strategy: a row is still useful below its row limit, because attention is causal.  Cost is counted in row-layers (rows ×
decoder layers) that have to be computed until the useful rows are written in every layer, now or by the successor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Choice(StrEnum):
    """KEEP: every row goes on to the end of the step.  TRIM: only the useful ones.  STOP: none."""

    KEEP = "keep"
    TRIM = "trim"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens [`start`, `end`) of a request's sequence; up to `useful_end`, which lies within, they are still wanted."""

    start: int
    end: int
    useful_end: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Rows [start, `end`) go on.  `cost`: row-layers of every choice that was open."""

    choice: Choice
    end: int
    cost: dict[Choice, int]


def useful_end(start: int, end: int, limit_tokens: int, unit_tokens: int) -> int:
    """Up to where rows [start, end) are of use when the successor shares `limit_tokens` tokens.

    What lies beyond the last boundary of `unit_tokens` can be in no certificate.
    """
    if limit_tokens >= end:
        return end
    return min(max(start, limit_tokens - limit_tokens % unit_tokens), end)


def decide(rows: Rows, *, layers: int, remaining: int, company: int, least_rows: int, can_trim: bool) -> Decision:
    """The cheapest choice; of equals the one that leaves more written.  Rows that are of no use stop whatever it costs.

    `layers`: of the model.  `remaining`: of them not yet computed in this step.  `company`: rows of other requests that
    go on.  `least_rows`: fewer rows than this take as long as this many.  `can_trim`: whether rows can be cut out of
    the step; if not, rows in company cannot stop.
    """
    all_of_them, useful = rows.end - rows.start, rows.useful_end - rows.start
    others = max(company, least_rows) if company else 0

    def going_on(own: int) -> int:
        return (max(own + company, least_rows) - others) * remaining

    cost = {Choice.KEEP: going_on(all_of_them)}
    if can_trim and 0 < useful < all_of_them:
        cost[Choice.TRIM] = going_on(useful)
    if can_trim or not company:
        cost[Choice.STOP] = useful * layers
    choice = min(cost, key=lambda one: cost[one])
    if useful == 0 and Choice.STOP in cost:
        choice = Choice.STOP
    end = {Choice.KEEP: rows.end, Choice.TRIM: rows.useful_end, Choice.STOP: rows.start}[choice]
    return Decision(choice, end, cost)
