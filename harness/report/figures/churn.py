"""Figure 5: recovery after other work, and the state that is left.

Reads cells with `share` and per arm (`native_prefix`, `hbm`, `dram`) `recovery_ms` and `reused_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from harness.churn import PAPER
from harness.experiment import Cell
from harness.report.drawing import Chart, Drawing, Key, Series
from harness.report.numbers import MS, NONE, TIMES, TOKENS
from harness.report.paper import UNTOLD
from harness.report.results import Run, coordinate, pairs, values

PAPER_PREFIX = {0.5: 7168, 0.75: 6560, 0.8: 6560, 0.85: 2464, 0.9: 2464, 0.95: 0, 1.0: 0, 1.05: 0, 1.1: 0}
"""Tokens that vLLM's prefix cache still held there (Table 12, H100)."""

TIERS = {"hbm": ("ours", "circle"), "dram": ("second", "square")}


def recovery(run: Run) -> Drawing | None:
    """Speed-ups with the range of the pairs, and the prefix that is still there."""
    points = {share: cell for cell in run.cells if (share := coordinate(cell, "share")) is not None and _ratios(cell)}
    if not points:
        return None
    shares = sorted(points)
    speedups = [
        Series(
            name=f"{tier.upper()}, here",
            class_=class_,
            points=[(share, median(found)) for share in shares if (found := _ratios(points[share], tier))],
            mark=mark,
            whiskers=[(min(found), max(found)) for share in shares if (found := _ratios(points[share], tier))],
        )
        for tier, (class_, mark) in TIERS.items()
    ]
    speedups += [
        Series(
            name=f"{tier.upper()}, paper (H100)",
            class_=f"{class_} paper",
            points=[(share, PAPER[share][number]) for share in shares if share in PAPER],
            mark=mark,
        )
        for number, (tier, (class_, mark)) in enumerate(TIERS.items())
    ]
    left = [
        Series("certified, here", "ours", _tokens(points, shares, "hbm")),
        Series("vLLM's prefix cache, here", "native", _tokens(points, shares, "native_prefix"), "diamond"),
        Series(
            "vLLM's prefix cache, paper (H100)",
            "native paper",
            [(share, float(PAPER_PREFIX[share])) for share in shares if share in PAPER_PREFIX],
            "diamond",
        ),
    ]
    x_words = "other work / capacity of the pool"
    return Drawing(
        title="Recovery and state after churn",
        caption="First: TTFT of vLLM's prefix cache over ours; whiskers span the paired measurements. Second: how much "
        "of the common prefix is still there; what is certified, all of it.",
        panels=[
            Chart("Recovery speed-up over churn", x_words, "recovery speed-up, ×", speedups, shares, rule=1.0).panel(),
            Chart("Prefix tokens still there over churn", x_words, "prefix tokens", left, shares).panel(),
        ],
        head=("other work", "HBM", "paper", "DRAM", "paper", "prefix left natively", "paper", "native", "HBM", "DRAM"),
        rows=[_row(share, points[share]) for share in shares],
        legend=[Key(one.class_, one.name, one.mark) for one in [*speedups, *left[1:]] if one.points],
    )


def _ratios(cell: Cell, tier: str = "hbm") -> list[float]:
    return [native / ours for native, ours in pairs(cell, "native_prefix", tier, "recovery_ms")]


def _tokens(points: Mapping[float, Cell], shares: Sequence[float], arm: str) -> list[tuple[float, float]]:
    return [(share, median(found)) for share in shares if (found := values(points[share], arm, "reused_tokens"))]


def _row(share: float, cell: Cell) -> list[str]:
    told = [f"{share:g}×"]
    for number, tier in enumerate(TIERS):
        ratios = _ratios(cell, tier)
        told.append(TIMES.text(median(ratios)) if ratios else NONE)
        told.append(TIMES.exact(PAPER[share][number]) if share in PAPER else UNTOLD)
    held = values(cell, "native_prefix", "reused_tokens")
    told.append(TOKENS.text(median(held)) if held else NONE)
    told.append(TOKENS.exact(PAPER_PREFIX[share]) if share in PAPER_PREFIX else UNTOLD)
    for arm in ("native_prefix", *TIERS):
        took = values(cell, arm, "recovery_ms")
        told.append(MS.text(median(took)) if took else NONE)
    return told
