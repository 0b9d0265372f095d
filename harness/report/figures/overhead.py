"""Table 11 as intervals.

Reads `{decode,prefill_1k,prefill_4k,mixed}_overhead_pct` of the summary and their `_ci95`.
"""

from __future__ import annotations

from harness.overhead import AIM_PCT
from harness.report.drawing import Drawing, Key, Span, Spans, spans
from harness.report.numbers import PERCENT
from harness.report.results import Run
from harness.statistics import Interval

PAPER = {
    "decode": (1.05, Interval(0.873, 1.34)),
    "prefill_1k": (0.140, Interval(-3.27, 4.76)),
    "prefill_4k": (0.697, Interval(0.198, 1.46)),
    "mixed": (-0.646, Interval(-1.74, 0.381)),
}
LABELS = {
    "decode": "decode, one stream",
    "prefill_1k": "prefill of 1K",
    "prefill_4k": "prefill of 4K",
    "mixed": "eight requests, mixed",
}


def intervals(run: Run) -> Drawing | None:
    """Ours and the paper's, workload by workload."""
    drawn, rows = [], []
    for cell, (paper, between) in PAPER.items():
        value, interval = run.number(f"{cell}_overhead_pct"), run.interval(f"{cell}_overhead_pct")
        if value is None or interval is None:
            continue
        ours = Span("ours", value, interval.low, interval.high, PERCENT.text(value))
        theirs = Span("paper", paper, between.low, between.high, PERCENT.exact(paper))
        drawn.append(Spans(LABELS[cell], (ours, theirs)))
        rows.append(
            (
                LABELS[cell],
                PERCENT.text(value),
                PERCENT.between(interval),
                PERCENT.exact(paper),
                f"[{PERCENT.exact(between.low)}, {PERCENT.exact(between.high)}]",
            )
        )
    if not drawn:
        return None
    told = "; ".join(f"{row[0]} {row[1]} {row[2]}" for row in rows)
    return Drawing(
        title="Added time without any scope in use",
        caption=f"Median and 95 % interval. The full line is no difference, the dashed one the aim of {AIM_PCT:g} %.",
        panels=[
            spans(
                f"Added time, percent: {told}",
                "time added over unpatched vLLM",
                drawn,
                "%",
                rules=[("zero", 0.0), ("rule", AIM_PCT)],
            )
        ],
        head=("workload", "here", "95 % interval", "paper", "95 % interval"),
        rows=rows,
        legend=[Key("ours", "here", "circle"), Key("paper", "paper (H100)", "circle")],
    )
