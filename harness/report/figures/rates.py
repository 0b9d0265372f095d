"""A.2.2: which policy gives the most current-version output at which rate, and whether the selector follows.

What a result of a bench `rates` has for it: one cell for each rate and concurrency,

    {"cell": {"bench": "rates", "revisions_per_scope_per_s": 0.05, "concurrency": 4},
     "arms": {"native_64": {"goodput_tokens_per_s": [21.0, ...]}, "native_512": {...}, "selective_64": {...},
              "selective_512": {...}, "rate": {...}}}

with one value a repetition; and in the summary, under `by_cell.NAME`, the cell's `revisions_per_scope_per_s`,
`concurrency`, `best_selective`, `selector_ratio` with its interval, and `selector_quantum_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from markupsafe import Markup

from harness.experiment import Cell
from harness.rates import WITHIN_AIM
from harness.report.drawing import Drawing, Field, Key, Span, Spans, heat, spans
from harness.report.numbers import NONE, RATIO, TOKENS, TOKENS_PER_S
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


def selector(run: Run) -> Drawing | None:
    """The selector's output over that of the better quantum, cell by cell."""
    drawn, rows = [], []
    for key in run.summary:
        if not key.startswith("by_cell."):
            continue
        ratio, quantum = run.number(f"{key}/selector_ratio"), run.number(f"{key}/selector_quantum_tokens")
        interval = run.interval(f"{key}/selector_ratio")
        scopes, rate = run.number(f"{key}/{CONCURRENCY}"), run.number(f"{key}/{RATE}")
        if ratio is None or interval is None or scopes is None or rate is None:
            continue
        chosen = NONE if quantum is None else TOKENS.text(quantum)
        label = f"{scopes:g} scopes, rate {rate:g}"
        span = Span("ours", ratio, interval.low, interval.high, RATIO.text(ratio))
        drawn.append(Spans(label, (span,), f"chose {chosen}"))
        better = words(str(run.figure(f"{key}/best_selective")))
        rows.append((f"{scopes:g}", f"{rate:g}", better, RATIO.text(ratio), RATIO.between(interval), chosen))
    if not drawn:
        return None
    told = "; ".join(f"{one.label} {one.found[0].words}" for one in drawn)
    return Drawing(
        title="The selector beside the better quantum",
        caption="Current-version output of the selector over that of the better selective quantum of its cell, with "
        "the interval of the pairs. The line is 2 % below.",
        panels=[
            spans(
                f"Selector over the better quantum: {told}",
                "selector / better quantum",
                drawn,
                "×",
                rules=[("rule", WITHIN_AIM)],
            )
        ],
        head=("concurrency", "revisions per scope and second", "better quantum", "ratio", "interval", "mean quantum"),
        rows=rows,
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
