"""What a certified prefix saves, and where the time of a certified successor goes.

Reads cells with the arms `cold`, `certified`, `native_full_hit`: `ttft_ms`, and for `certified` the ends of its stages
since ADVANCE (`fence_ms`, `align_ms`, `resume_ms`, `first_frame_ms`).
"""

from __future__ import annotations

from harness.report.drawing import Drawing
from harness.report.figures import ttft
from harness.report.numbers import MS, TIMES
from harness.report.paper import UNTOLD
from harness.report.results import Run

ARMS = {
    "cold": ("cold", "native"),
    "native_full_hit": ("native full hit", "native-second"),
    "certified": ("certified", "ours"),
}
PAPER_MS = {"cold": "3965 ms", "certified": "117 ms"}


def first_tokens(run: Run) -> Drawing | None:
    """TTFT by arm, over all offsets, the certified one's by stage."""
    found = ttft.times(run.cells, ARMS)
    if not found:
        return None
    arm_of = {label: arm for arm, (label, _) in ARMS.items()}
    longest = max(one.median for one in found)
    rows = [
        (one.label, one.range_words, TIMES.text(longest / one.median), PAPER_MS.get(arm_of[one.label], UNTOLD))
        for one in found
        if one.median > 0
    ]
    rows += [
        (f"{one.label}: {ttft.STAGES[stage]}", MS.text(took), UNTOLD, UNTOLD)
        for one in found
        for stage, took in one.stages.items()
    ]
    return Drawing(
        title="TTFT of a successor, by where its prefix comes from",
        caption="Whiskers span the trials. The certified successor's bar is cut by stage: median lengths, scaled to "
        "the median TTFT. RECLAIM is on nobody's way and not in it.",
        panels=ttft.panels(found, "Time to first token by arm"),
        head=("arm", "TTFT [least, most]", "sooner than the slowest", "paper's TTFT"),
        rows=rows,
        legend=ttft.legend(found),
    )
