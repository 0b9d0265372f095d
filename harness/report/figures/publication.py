"""What was still read of a revoked version.

Reads cells with `pace_s` and per arm `stale_tokens` and `stale_frames`, one value a trial; the summary's
`stated_bound_frames`.
"""

from __future__ import annotations

from harness.report.drawing import Bar, Drawing, bars
from harness.report.numbers import NONE, TOKENS, count
from harness.report.results import Run, coordinate, values

ARMS = {
    "native_abort": ("vLLM, abort", "native"),
    "native_close": ("vLLM, response closed", "native-second"),
    "retire_raw": ("RETIRE, raw slow reader", "second"),
    "retire_client": ("RETIRE's client", "ours"),
}
FRAMES = count("frames")


def stale(run: Run) -> Drawing | None:
    """Old tokens by arm, and how many frames a raw reader got at most, by its pace."""
    totals = {arm: [one for cell in run.cells for one in values(cell, arm, "stale_tokens")] for arm in ARMS}
    counted = {arm: sum(found) for arm, found in totals.items() if found}
    if not counted:
        return None
    most = [
        (_pace(coordinate(cell, "pace_s")), max(found))
        for cell in run.cells
        if (found := values(cell, "retire_raw", "stale_frames"))
    ]
    bound = run.number("stated_bound_frames")
    told = "; ".join(f"{ARMS[arm][0]} {TOKENS.text(found)}" for arm, found in counted.items())
    panels = [
        bars(
            f"Old tokens taken after the acceptance: {told}",
            "old tokens taken after the acceptance",
            [Bar(ARMS[arm][0], TOKENS.text(found), [(ARMS[arm][1], found)]) for arm, found in counted.items()],
            "tokens, all trials",
        )
    ]
    if most:
        paces = [Bar(pace, FRAMES.text(frames), [("second", frames)]) for pace, frames in most]
        stated = [Bar("stated before the first trial", FRAMES.text(bound), [("limit", bound)])] if bound else []
        words = "; ".join(f"{pace} {FRAMES.text(frames)}" for pace, frames in most)
        title = "RETIRE, raw reader: most old frames in a trial"
        panels.append(bars(f"{title}: {words}", title, [*stated, *paces], "frames"))
    rows = [(ARMS[arm][0], TOKENS.text(one), f"{len(totals[arm])} trials") for arm, one in counted.items()]
    rows += [(f"{ARMS['retire_raw'][0]}, {pace}", FRAMES.text(frames), "most in a trial") for pace, frames in most]
    rows.append(("stated bound", NONE if bound is None else FRAMES.text(bound), "a trial"))
    return Drawing(
        title="What is still read of a version that was replaced",
        caption="A consumer that lags behind has frames under way when authority ends. How many natively follows "
        "from how far it lags, which the bench chooses; under RETIRE a raw reader gets no more than was stated.",
        panels=panels,
        head=("reader", "old output", "of"),
        rows=rows,
    )


def _pace(pace_s: float | None) -> str:
    if pace_s is None:
        return "takes one frame, then none"
    return f"{pace_s:g} s between frames" if pace_s else "as they come"
