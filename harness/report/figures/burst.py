"""Figure 6: live executions over a replay of bursts.

What a result of a bench `burst` is to have for it: one cell with

    {"cell": {"bench": "burst", "window_s": 120, "scopes": 3, "bursts_s": [9.5, 47.0, 88.2]},
     "arms": {"native_1024": {"goodput_tokens_per_s": [9.8, ...], "obsolete_tokens": [40499, ...],
                              "final_versions": [3, ...], "cleanup_ms": [180000.0, ...],
                              "live": [[[0.0, 0, 0], [9.5, 3, 0], [9.9, 3, 2], ...], ...]},
              "selective_8192": {...}}}

with one value a trial in every list.  `bursts_s`: when each begins.  A `live` of a trial is the list of its changes, in
order: seconds since the replay began, and how many executions of current and of obsolete versions there are from then
on.  The summary's keys are those of the chapter in `harness.report.paper`.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from harness.experiment import Cell
from harness.report.drawing import Change, Drawing, Key, steps
from harness.report.numbers import MS, NONE, TOKENS, TOKENS_PER_S, Unit, count
from harness.report.results import Run, coordinate, numbers, values
from harness.report.words import words

METRICS: Mapping[str, Unit] = {
    "goodput_tokens_per_s": TOKENS_PER_S,
    "obsolete_tokens": TOKENS,
    "final_versions": count("versions"),
    "cleanup_ms": MS,
}


def live(run: Run) -> Drawing | None:
    """Current and obsolete executions, the trial of median goodput of every arm, on equal axes."""
    cell = next((cell for cell in run.cells if any("live" in metrics for metrics in cell.arms.values())), None)
    if cell is None:
        return None
    found = {arm: changes for arm in cell.arms if (changes := _changes(cell, arm))}
    if not found:
        return None
    end = coordinate(cell, "window_s") or max(changes[-1][0] for changes in found.values())
    shown = {arm: [one for one in changes if one[0] <= end] for arm, changes in found.items()}
    most = max(sum(thick) for changes in shown.values() for _, thick in changes)
    bursts = [at for at in numbers(cell.cell.get("bursts_s")) if 0 <= at <= end]
    panels = [
        steps(
            f"{words(arm)}: at most {max(thick[1] for _, thick in changes):g} obsolete executions at once",
            f"live executions, {words(arm)}",
            changes,
            ("current", "obsolete"),
            end=end,
            most=most,
            rules=bursts,
            x_words="seconds of the replay",
        )
        for arm, changes in shown.items()
    ]
    return Drawing(
        title="Live executions while revisions come in bursts",
        caption="How thick a band is says how many executions are current or obsolete; both stacked are all that live. "
        "Lines mark the bursts. The trial of median goodput of each arm.",
        panels=panels,
        head=("arm", "current-version output", "obsolete output", "final versions", "cleanup", "most obsolete at once"),
        rows=[
            (words(arm), *(_median(cell, arm, metric) for metric in METRICS), f"{max(t[1] for _, t in changes):g}")
            for arm, changes in shown.items()
        ],
        legend=[Key("current", "current"), Key("obsolete", "obsolete"), Key("burst", "a burst begins")],
    )


def _median(cell: Cell, arm: str, metric: str) -> str:
    found = values(cell, arm, metric)
    return METRICS[metric].text(median(found)) if found else NONE


def _changes(cell: Cell, arm: str) -> list[Change]:
    """The changes of the arm's middle trial."""
    trials = [_trial(one) for one in cell.arms[arm].get("live", ())]
    goodput = values(cell, arm, "goodput_tokens_per_s")
    order = sorted(range(len(trials)), key=lambda trial: goodput[trial] if len(goodput) == len(trials) else trial)
    return trials[order[(len(order) - 1) // 2]] if order else []


def _trial(told: object) -> list[Change]:
    rows = [numbers(one) for one in told] if isinstance(told, list) else []
    found: list[Change] = [(row[0], row[1:]) for row in rows if len(row) == 3 and min(row) >= 0]
    return sorted(found, key=lambda one: one[0])
