"""A.2.2: which policy gives the most current-version output at which rate.

What a result of a bench `rates` is to have for it: one cell for each rate and concurrency,

    {"cell": {"bench": "rates", "revisions_per_scope_per_s": 0.05, "concurrency": 4},
     "arms": {"native_1024": {"goodput_tokens_per_s": [21.0, ...]}, "native_8192": {...}, "always_4096": {...},
              "selective_8192": {...}, "rate_only": {...}}}

with one value a repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from markupsafe import Markup

from harness.experiment import Cell
from harness.report.drawing import Drawing, Field, Key, heat
from harness.report.numbers import NONE, TOKENS_PER_S
from harness.report.results import Run, coordinate, values
from harness.report.words import words

RATE, CONCURRENCY, GOODPUT = "revisions_per_scope_per_s", "concurrency", "goodput_tokens_per_s"


def goodput(run: Run) -> Drawing | None:
    """A map for each concurrency; in each column the policy that gives most is marked."""
    cells = [
        cell
        for cell in run.cells
        if None not in (coordinate(cell, RATE), coordinate(cell, CONCURRENCY))
        and any(values(cell, arm, GOODPUT) for arm in cell.arms)
    ]
    if not cells:
        return None
    policies = list(dict.fromkeys(arm for cell in cells for arm in cell.arms))
    by_concurrency: dict[float, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: coordinate(cell, RATE) or 0.0):
        by_concurrency.setdefault(coordinate(cell, CONCURRENCY) or 0.0, []).append(cell)
    return Drawing(
        title="Current-version output by policy and revision rate",
        caption="Median token/s. A frame marks the best policy of a rate; the stronger a colour, the closer to it.",
        panels=[_map(scopes, found, policies) for scopes, found in sorted(by_concurrency.items())],
        head=("concurrency", "revisions per scope and second", *(words(policy) for policy in policies)),
        rows=[
            (f"{scopes:g}", f"{coordinate(cell, RATE):g}", *(_told(cell, policy) for policy in policies))
            for scopes, found in sorted(by_concurrency.items())
            for cell in found
        ],
        legend=[Key("good", "close to the best of its rate")],
    )


def _told(cell: Cell, policy: str) -> str:
    found = values(cell, policy, GOODPUT)
    return TOKENS_PER_S.text(median(found)) if found else NONE


def _map(scopes: float, cells: Sequence[Cell], policies: Sequence[str]) -> Markup:
    best = [max(median(found) for policy in policies if (found := values(cell, policy, GOODPUT))) for cell in cells]
    fields = [
        _field(values(cell, policy, GOODPUT), most)
        for policy in policies
        for cell, most in zip(cells, best, strict=True)
    ]
    return heat(
        f"Concurrency {scopes:g}: token/s of {len(policies)} policies at {len(cells)} rates",
        f"token/s, concurrency {scopes:g}",
        ("revisions per scope and second", [f"{coordinate(cell, RATE):g}" for cell in cells]),
        ("policy", [words(policy) for policy in policies]),
        fields,
    )


def _field(found: Sequence[float], most: float) -> Field:
    if not found:
        return Field("–", None)
    here = median(found)
    return Field(TOKENS_PER_S.bare(here), -max(0.0, here / most) if most > 0 else 0.0, marked=here == most)
