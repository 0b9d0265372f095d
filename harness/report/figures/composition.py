"""Table 5 as bars, and the map of moments and overlaps.

Reads the cell with all arms (`ttft_ms`, `reused_tokens`) and `ratios` of the summary: `step`, `share`, `overlap`,
`ratio`, `pairs` and `p_holm_above_1_02` of each revision of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from markupsafe import Markup

from harness.composition import ALPHA, NATIVE_AIM
from harness.report.drawing import Drawing, Field, Key, heat
from harness.report.figures import ttft
from harness.report.numbers import MS, NONE, RATIO, SHARE, TOKENS
from harness.report.paper import UNTOLD
from harness.report.results import Run, number, pairs, values

ARMS = {
    "native_cold": ("abort, cold restart", "native"),
    "native_prefix": ("abort, vLLM's prefix cache", "native-second"),
    "invalidate": ("invalidation alone", "second"),
    "inherit": ("inheritance alone", "second"),
    "combined": ("both, the paper's policy", "ours-second"),
    "trim": ("both, step trimmed", "ours"),
}
PAPER_MS = {"native_cold": 1127.0, "invalidate": 1068.0, "inherit": 1011.0, "combined": 951.0}
FULL_TONE = math.log(1.5)


def first_tokens(run: Run) -> Drawing | None:
    """The arms of the full cell.  Servers take turns there, so that stages on the wall's clock say nothing."""
    cell = next((cell for cell in run.cells if {"native_cold", "combined", "trim"} <= set(cell.arms)), None)
    found = ttft.times([cell], ARMS) if cell else []
    if cell is None or not found:
        return None
    rows = []
    for arm, (label, _) in ARMS.items():
        took, reused = values(cell, arm, "ttft_ms"), values(cell, arm, "reused_tokens")
        less = [1 - ours / cold for ours, cold in pairs(cell, arm, "native_cold", "ttft_ms")]
        if took:
            told = next(one.range_words for one in found if one.label == label)
            saved = SHARE.text(median(less)) if less and arm != "native_cold" else UNTOLD
            paper = MS.exact(PAPER_MS[arm]) if arm in PAPER_MS else UNTOLD
            rows.append((label, told, saved, TOKENS.text(median(reused)) if reused else NONE, paper))
    return Drawing(
        title="From the revision to the successor's first token",
        caption=f"{_about(cell.cell)} Whiskers span the trials. The paper's times are an H100's.",
        panels=ttft.panels(found, "Time to first token by arm"),
        head=("arm", "TTFT [least, most]", "saved, paired", "reused", "paper's TTFT"),
        rows=rows,
    )


def _about(cell: Mapping[str, object]) -> str:
    tokens, quantum, step, share, overlap = (
        number(cell.get(name)) for name in ("tokens", "quantum", "step", "share", "overlap")
    )
    if tokens is None or quantum is None or step is None or share is None or overlap is None:
        return ""
    return (
        f"A prompt of {TOKENS.text(tokens)} in steps of {TOKENS.text(quantum)}, interrupted at {SHARE.exact(share)} of "
        f"step {step:.0f}; the successor keeps {SHARE.exact(overlap)}."
    )


@dataclass(frozen=True)
class _Revision:
    """One entry of the grid."""

    step: float
    share: float
    overlap: float
    ratio: float
    pairs: float
    p_holm: float

    @property
    def slower(self) -> bool:
        """Whether a native arm is faster here, beyond chance."""
        return self.p_holm <= ALPHA


def grid(run: Run) -> Drawing | None:
    """The trimmed step against the better native arm, at every moment and overlap."""
    found = _revisions(run.figure("ratios"))
    if not found:
        return None
    steps = sorted({one.step for one in found})
    return Drawing(
        title="Moment × overlap: trimmed step against the better native arm",
        caption="TTFT of ours over that of the faster of the two native arms; below 1 ours is faster. "
        f"A frame and ✕ mark what is above {NATIVE_AIM:g} with Holm's correction over all cells; – was not measured.",
        panels=[_map(step, [one for one in found if one.step == step]) for step in steps],
        head=("step", "moment", "kept", "ours / better native", "pairs", "native is faster"),
        rows=[
            (
                f"{one.step:g}",
                SHARE.exact(one.share),
                SHARE.exact(one.overlap),
                RATIO.text(one.ratio),
                f"{one.pairs:g}",
                "yes" if one.slower else "no",
            )
            for one in found
        ],
        legend=[Key("good", "ours is faster"), Key("bad", "native is faster")],
    )


def _revisions(told: object) -> list[_Revision]:
    found = []
    for one in told if isinstance(told, list) else []:
        if not isinstance(one, dict):
            continue
        names = ("step", "share", "overlap", "ratio", "pairs", "p_holm_above_1_02")
        parts = [value for name in names if (value := number(one.get(name))) is not None]
        if len(parts) == len(names) and parts[3] > 0:
            found.append(_Revision(*parts))
    return sorted(found, key=lambda one: (one.step, one.share, one.overlap))


def _map(step: float, found: Sequence[_Revision]) -> Markup:
    shares = sorted({one.share for one in found})
    overlaps = sorted({one.overlap for one in found}, reverse=True)
    at = {(one.overlap, one.share): one for one in found}
    fields = [_field(at.get((overlap, share))) for overlap in overlaps for share in shares]
    worst = max(found, key=lambda one: one.ratio)
    return heat(
        f"Step {step:g}: {len(found)} revisions, the slowest {RATIO.text(worst.ratio)} of the better native arm",
        f"step {step:g}: ours / better native",
        ("moment within the step", [SHARE.exact(share) for share in shares]),
        ("kept", [SHARE.exact(overlap) for overlap in overlaps]),
        fields,
    )


def _field(one: _Revision | None) -> Field:
    if one is None:
        return Field(UNTOLD, None)
    tone = max(-1.0, min(1.0, math.log(one.ratio) / FULL_TONE))
    return Field(f"{one.ratio:.2f}" + (" ✕" if one.slower else ""), tone, marked=one.slower)
