"""What paired measurements show.

Owns: ratios of paired samples, their bootstrap intervals, Holm's correction over cells, and when a target counts as
reached.  Must not know: what was measured.
Strategy: pairs are resampled whole, so what a pair has in common (its text, the hour of the machine) cancels.  The
generator is seeded: the same pairs give the same interval.  Nothing is rounded here.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

Pairs = Sequence[tuple[float, float]]
"""(numerator, denominator) of each pair, both positive and in one unit."""

Key = TypeVar("Key", bound=Hashable)
RESAMPLES = 10_000
PAIRS_LEAST = 3
"""Resampling one pair gives an interval of no width, and two give their own ends: neither says anything."""


def ratio_of_medians(pairs: Pairs) -> float:
    """The median numerator over the median denominator."""
    return statistics.median(above for above, _ in pairs) / statistics.median(below for _, below in pairs)


def median_of_ratios(pairs: Pairs) -> float:
    """The median of the pairs' own ratios."""
    return statistics.median(above / below for above, below in pairs)


def percentile(values: Sequence[float], percent: int) -> float:
    """The nearest rank."""
    return sorted(values)[max(0, -(-percent * len(values) // 100) - 1)]


@dataclass(frozen=True, slots=True)
class Interval:
    """Both ends belong to it."""

    low: float
    high: float


class Bootstrap:
    """The distribution of `statistic` over resampled pairs.  `value` is the statistic of the pairs themselves.

    `groups`: which group each pair belongs to, if pairs have more in common than a pair has (the servers of one start).
    Groups are drawn first, then pairs of each.

    Raises:
        ValueError: there is no pair.
    """

    def __init__(
        self,
        statistic: Callable[[Pairs], float],
        pairs: Pairs,
        *,
        groups: Sequence[Hashable] | None = None,
        resamples: int = RESAMPLES,
        seed: int = 0,
    ) -> None:
        if not pairs:
            raise ValueError("no pair was measured")
        draw = random.Random(seed)  # noqa: S311 - resampling keeps no secret
        members: dict[Hashable, list[tuple[float, float]]] = {}
        for pair, group in zip(pairs, groups or [None] * len(pairs), strict=True):
            members.setdefault(group, []).append(pair)
        among = list(members.values())
        self.value = statistic(pairs)
        # What the sign test of so few could show at best.
        self._least_p = 0.5 ** (len(pairs) if groups is None else len(among))
        self._draws = sorted(
            statistic([one for group in draw.choices(among, k=len(among)) for one in draw.choices(group, k=len(group))])
            for _ in range(resamples)
        )

    def interval(self, level: float = 0.95) -> Interval:
        """The percentile interval, its ends taken outwards to draws that occurred."""
        last, tail = len(self._draws) - 1, (1 - level) / 2
        return Interval(self._draws[math.floor(tail * last)], self._draws[math.ceil((1 - tail) * last)])

    def p_not_above(self, bound: float) -> float:
        """The p-value of "the statistic is above `bound`" against its opposite."""
        return self._p(sum(draw <= bound for draw in self._draws))

    def p_not_below(self, bound: float) -> float:
        """The p-value of "the statistic is below `bound`" against its opposite."""
        return self._p(sum(draw >= bound for draw in self._draws))

    def _p(self, against: int) -> float:
        """Resampling knows nothing beyond what was measured: two pairs on one side prove little, and it would say 0."""
        return max(self._least_p, (1 + against) / (1 + len(self._draws)))


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Holm's adjusted p-values: below alpha for the cells that hold together at that level."""
    adjusted: dict[Key, float] = {}
    floor = 0.0
    for rank, (cell, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        floor = max(floor, min(1.0, (len(p_values) - rank) * p))
        adjusted[cell] = floor
    return adjusted


class Verdict(StrEnum):
    """What an interval says about a target."""

    REACHED = "reached"
    NOT_REACHED = "not reached"
    OPEN = "open: the interval holds the target"


def whether(holds: bool) -> Verdict:
    """Of a figure that was counted, or is the worst of all: there is no interval around it."""
    return Verdict.REACHED if holds else Verdict.NOT_REACHED


def at_least(interval: Interval, bound: float, pairs: int = PAIRS_LEAST) -> Verdict:
    """Whether the whole interval is `bound` or more; open where fewer than `PAIRS_LEAST` `pairs` have led to it."""
    if pairs < PAIRS_LEAST:
        return Verdict.OPEN
    if interval.low >= bound:
        return Verdict.REACHED
    return Verdict.NOT_REACHED if interval.high < bound else Verdict.OPEN


def at_most(interval: Interval, bound: float) -> Verdict:
    """Whether the whole interval is `bound` or less."""
    if interval.high <= bound:
        return Verdict.REACHED
    return Verdict.NOT_REACHED if interval.low > bound else Verdict.OPEN


def median_at_most(value: float, interval: Interval, bound: float, upper: float | None = None) -> Verdict:
    """Whether the value itself is `bound` or less and, where `upper` says so, its interval ends there or before."""
    if value <= bound and (upper is None or interval.high <= upper):
        return Verdict.REACHED
    return Verdict.NOT_REACHED if interval.low > bound else Verdict.OPEN
