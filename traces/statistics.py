"""What rows say.

Owns: rates, quantiles, the variation of arrivals, the densest window.  Must not know: where rows come from.
Strategy: transitions arrive at the start of the successor.  Sources are never mixed: the clock of each begins with it,
so what lies between arrivals is asked within a source and pooled afterwards.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from traces.rows import Transition

WINDOW_S: Final = 120.0
"""The paper's."""

PERCENTS: Final = (10, 25, 50, 75, 90, 99)


_MEASURES: Final[dict[str, Callable[[Transition], float | None]]] = {
    "gap_s": lambda row: row.gap_s,
    "aborted_turn_s": lambda row: row.aborted_turn_s,
    "aborted_turn_calls": lambda row: row.aborted_turn_calls,
    "prompt_tokens_before": lambda row: row.prompt_tokens_before,
    "prompt_tokens_after": lambda row: row.prompt_tokens_after,
    "delta_tokens": lambda row: row.delta_tokens,
    "output_tokens_before": lambda row: row.output_tokens_before,
    "common_prefix_share": lambda row: row.kept_share,
}


def quantile(values: Sequence[float], percent: float) -> float:
    """The nearest rank.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("no value was measured")
    return sorted(values)[max(0, math.ceil(percent * len(values) / 100) - 1)]


def inter_arrivals_s(rows: Iterable[Transition]) -> list[float]:
    """Seconds between arrivals that follow each other, of rows of one source in any order."""
    return [later - earlier for earlier, later in itertools.pairwise(sorted(row.t_start_s for row in rows))]


def variation(gaps_s: Sequence[float]) -> float | None:
    """The coefficient of variation: the deviation of these very gaps (not an estimate from a sample) over their mean.

    The published figures of recorded sources are computed so.  None: fewer than two gaps, or all of them zero.
    """
    if len(gaps_s) < 2 or not any(gaps_s):
        return None
    return statistics.pstdev(gaps_s) / statistics.fmean(gaps_s)


@dataclass(frozen=True, slots=True)
class Window:
    """Transitions of one source that arrive within a window.

    `bursts`: how many follow each other sooner than transitions of the window do in the mean.
    """

    from_s: float
    transitions: int
    scopes: int
    variation: float | None
    bursts: tuple[int, ...]


def densest_rows(rows: Iterable[Transition], window_s: float) -> list[Transition]:
    """Rows of one source that arrive in its window with most arrivals, the earliest of several, by their starts."""
    ordered = sorted(rows, key=lambda row: row.t_start_s)
    first = last = best = 0
    for end, row in enumerate(ordered, start=1):
        while row.t_start_s - ordered[first].t_start_s > window_s:
            first += 1
        if end - first > last - best:
            best, last = first, end
    return ordered[best:last]


def densest(rows: Iterable[Transition], window_s: float = WINDOW_S) -> Window | None:
    """The window of a source with most arrivals, the earliest of several.  None: there are no rows."""
    inside = densest_rows(rows, window_s)
    if not inside:
        return None
    gaps_s = inter_arrivals_s(inside)
    return Window(
        inside[0].t_start_s, len(inside), len({row.scope for row in inside}), variation(gaps_s), bursts(gaps_s)
    )


def bursts(gaps_s: Sequence[float]) -> tuple[int, ...]:
    """How many belong to each burst: what follows sooner than in the mean is of the same."""
    sizes = [1]
    mean_s = statistics.fmean(gaps_s) if gaps_s else 0.0
    for gap_s in gaps_s:
        if gap_s > mean_s:
            sizes.append(0)
        sizes[-1] += 1
    return tuple(sizes)


def summary(sources: Iterable[Iterable[Transition]], window_s: float = WINDOW_S) -> dict[str, Any]:
    """What rows say, as plain data.  `sources`: the rows of each source, at least one row in all.

    Raises:
        ValueError: there is no row.
    """
    each = [list(rows) for rows in sources]
    rows = list(itertools.chain.from_iterable(each))
    if not rows:
        raise ValueError("no transition was measured")
    scopes = Counter((number, row.scope) for number, source in enumerate(each) for row in source)
    gaps_s = [inter_arrivals_s(source) for source in each]
    span_s = sum(map(sum, gaps_s))
    windows = [window for source in each if (window := densest(source, window_s))]
    best = max(windows, key=lambda window: window.transitions)
    shares = {"auto_submit": "auto_submit", "compacted": "compacted_between", "clock_back": "clock_back"}
    return {
        "transitions": len(rows),
        "sources": sum(map(bool, each)),
        "scopes": len(scopes),
        "span_s": round(span_s, 3),
        "transitions_per_hour": _rounded(sum(map(len, gaps_s)) / span_s * 3600 if span_s else None),
        "transitions_per_scope": _quantiles(list(scopes.values())),
        "agents": dict(Counter(row.agent.value for row in rows).most_common()),
        "reasons": dict(Counter(row.reason.value for row in rows).most_common()),
        "share": {name: _rounded(sum(getattr(row, of) for row in rows) / len(rows)) for name, of in shares.items()},
        **{
            name: _quantiles([found for row in rows if (found := of(row)) is not None])
            for name, of in _MEASURES.items()
        },
        "inter_arrival_s": _quantiles(list(itertools.chain.from_iterable(gaps_s))),
        "inter_arrival_cv": _rounded(variation(list(itertools.chain.from_iterable(gaps_s)))),
        "densest_window": {
            "window_s": window_s,
            "from_s": round(best.from_s, 3),
            "transitions": best.transitions,
            "scopes": best.scopes,
            "inter_arrival_cv": _rounded(best.variation),
            "bursts": list(best.bursts),
        },
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"n": 0}
    found = {f"p{percent}": quantile(values, percent) for percent in PERCENTS}
    all_of_it = {"n": len(values), "min": min(values), **found, "max": max(values), "mean": statistics.fmean(values)}
    return {name: round(value, 3) for name, value in all_of_it.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def table(found: dict[str, Any]) -> str:
    """A summary for a terminal."""
    columns = ("n", "min", *(f"p{percent}" for percent in PERCENTS), "max", "mean")
    plain = [f"{name}: {_plain(value)}" for name, value in found.items() if not isinstance(value, dict)]
    words = [
        f"{name}: {', '.join(f'{key} {_plain(value)}' for key, value in group.items())}"
        for name, group in found.items()
        if isinstance(group, dict) and "n" not in group
    ]
    rows = [("", *columns)]
    rows += [
        (name, *(_plain(group[column]) if column in group else "" for column in columns))
        for name, group in found.items()
        if isinstance(group, dict) and "n" in group
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join([*plain, *words, *lines])


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return "none" if value is None else str(value)
