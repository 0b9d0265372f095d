"""Execution policies, and how much of prompts a step computes while versions are revised (A.2.2 of the paper).

Owns: the policies by name, the estimate of revision pressure, which prefill quantum follows from it.
Must not know: clocks (times are passed in, in seconds of any clock), steps, vLLM.
Strategy: a large quantum wastes nothing on the fixed cost of steps, a small one wastes less on a version that is
revised while its step runs.  Which matters is told by how often a live scope is revised in the time of the largest
step.  The paper's map has two sides: up to 0.05 revisions a scope and second the largest quantum gives most, at 0.2 an
eighth of it, with a prefill of 0.405 s in one quantum (7.4).  In between the choice goes down by halves.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from math import exp, log

WINDOW_S = 30.0
CALM_S = 10.0
HALVINGS = 3
MODERATE, HIGH = 0.05 * 0.405, 0.2 * 0.405
"""The paper's rates, in revisions of a scope while a step of the largest quantum runs."""
MARGIN = 2**0.5  # an estimate may be off by so much at either rate without another choice


class Policy(StrEnum):
    """When steps are armed, and how large a step's share of prompts may be."""

    SELECTIVE = "selective"  # steps that are expected to take long; whatever vLLM gives a step
    ALWAYS = "always"  # every step; the same
    RATE = "rate"  # as selective; by revision pressure alone


def quanta(largest: int, unit: int, least: int = 1) -> tuple[int, ...]:
    """The quanta to choose from, largest first: all that a step may have, its half, its quarter, its eighth.

    All but the first are whole multiples of `unit` tokens, where a certificate may end, and none is below `least`.
    """
    floor = -(-max(unit, least) // unit) * unit
    halves = (max(floor, (largest >> halving) // unit * unit) for halving in range(1, HALVINGS + 1))
    return largest, *sorted({half for half in halves if half < largest}, reverse=True)


def halvings(revisions_per_step: float) -> int:
    """How often the largest quantum is halved when a scope is revised so often while a step of it runs."""
    first, last = MODERATE * MARGIN, HIGH / MARGIN
    if revisions_per_step < first:
        return 0
    if revisions_per_step >= last:
        return HALVINGS
    return 1 + int((HALVINGS - 1) * log(revisions_per_step / first) / log(last / first))


class Selector:
    """Estimates revision pressure and chooses among `quanta` (of `quanta`).

    What was seen fades with `WINDOW_S`.  What was never seen counts as calm: it is as if one scope had always lived for
    `CALM_S` without a revision, so that a single one says little.
    `steps`: how many were given each quantum.
    """

    def __init__(self, choices: tuple[int, ...]) -> None:
        self._choices = choices
        self._scopes = 0
        self._revisions = self._scope_s = 0.0
        self._at_s: float | None = None
        self.steps: Counter[int] = Counter()

    def live(self, at_s: float, scopes: int) -> None:
        """So many scopes have requests from now on."""
        self._pass(at_s)
        self._scopes = scopes

    def revised(self, at_s: float) -> None:
        """A scope that has requests was superseded."""
        self._pass(at_s)
        self._revisions += 1

    @property
    def pressure(self) -> float:
        """Revisions per live scope and second, as of the last call with a time."""
        return self._revisions / (self._scope_s + CALM_S)

    def choose(self, step_s: float) -> int:
        """The quantum of the next step, in tokens.  `step_s`: how long one of the largest takes, 0 while unknown."""
        chosen = self._choices[min(halvings(self.pressure * step_s), len(self._choices) - 1)]
        self.steps[chosen] += 1
        return chosen

    def _pass(self, at_s: float) -> None:
        last_s = at_s if self._at_s is None else self._at_s
        self._at_s = max(last_s, at_s)  # a revision is told of after its time
        passed_s = self._at_s - last_s
        kept = exp(-passed_s / WINDOW_S)
        self._revisions *= kept
        self._scope_s = self._scope_s * kept + self._scopes * WINDOW_S * (1 - kept)
