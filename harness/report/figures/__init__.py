"""Which figures a run has.

One module a bench; each says what it reads of a result.  A result that lacks it has no such figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.report.drawing import Drawing
from harness.report.figures import (
    burst,
    churn,
    composition,
    inheritance,
    overhead,
    publication,
    rates,
    retirement,
)
from harness.report.results import Run

FIGURES: Mapping[str, Sequence[Callable[[Run], Drawing | None]]] = {
    "burst": (burst.live,),
    "churn": (churn.recovery,),
    "composition": (composition.first_tokens, composition.grid),
    "inheritance": (inheritance.first_tokens,),
    "overhead": (overhead.intervals,),
    "publication": (publication.stale,),
    "rates": (rates.goodput, rates.selector),
    "replay": (burst.live,),
    "retirement": (retirement.boundaries, retirement.tail),
}


def drawn(run: Run) -> list[Drawing]:
    """The figures of a run, as far as it holds what they show."""
    return [found for draw in FIGURES.get(run.bench, ()) if (found := draw(run)) is not None]
