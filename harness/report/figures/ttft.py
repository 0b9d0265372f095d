"""Bars of times to the first token, with their stages where these were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from markupsafe import Markup

from harness.experiment import Cell
from harness.report.drawing import Bar, Key, bars
from harness.report.numbers import MS
from harness.report.results import number, values

STAGES = {
    "fence": "fence",
    "align": "align",
    "resume": "resume",
    "first_frame": "to the first frame",
    "client": "on its way to the client",
}
"""What passes one after the other until the first token; RECLAIM is on nobody's way."""

CLOSER = 0.2


@dataclass(frozen=True)
class Times:
    """An arm's times, ms.  `stages`: how long each took in the median run, where the arm tells of them."""

    label: str
    class_: str
    ttft: Sequence[float]
    stages: Mapping[str, float]

    @property
    def median(self) -> float:
        """Half of the runs took no longer."""
        return median(self.ttft)

    @property
    def range_words(self) -> str:
        """From the fastest to the slowest."""
        return f"{MS.text(self.median)} [{MS.bare(min(self.ttft))}, {MS.bare(max(self.ttft))}]"


def times(cells: Sequence[Cell], arms: Mapping[str, tuple[str, str]]) -> list[Times]:
    """Of those arms that were measured.  `arms`: label and class of each."""
    found = [
        Times(label, class_, [one for cell in cells for one in values(cell, arm, "ttft_ms")], _stages(cells, arm))
        for arm, (label, class_) in arms.items()
    ]
    return [one for one in found if one.ttft]


def panels(found: Sequence[Times], words: str) -> list[Markup]:
    """All arms; and those that are small beside the longest once more, on an axis of their own."""
    longest = max((one.median for one in found), default=0.0)
    small = [one for one in found if one.median < CLOSER * longest]
    drawn = [bars(f"{words}: {_told(found)}", "TTFT", [_bar(one) for one in found], "ms")]
    if small:
        drawn.append(
            bars(f"{words}, the short ones: {_told(small)}", "TTFT, closer", [_bar(one) for one in small], "ms")
        )
    return drawn


def legend(found: Sequence[Times]) -> list[Key]:
    """The stages that are drawn."""
    seen = {stage for one in found for stage in one.stages}
    return [Key(f"stage-{stage}", words) for stage, words in STAGES.items() if stage in seen]


def _told(found: Sequence[Times]) -> str:
    return "; ".join(f"{one.label} {MS.text(one.median)}" for one in found)


def _bar(one: Times) -> Bar:
    parts = [(f"stage-{stage}", length) for stage, length in one.stages.items()] or [(one.class_, one.median)]
    return Bar(one.label, MS.text(one.median), parts, (min(one.ttft), max(one.ttft)))


def _stages(cells: Sequence[Cell], arm: str) -> dict[str, float]:
    """The median time between the ends of two stages, scaled to the median TTFT; nothing if any is missing."""
    lengths: dict[str, list[float]] = {stage: [] for stage in STAGES}
    whole = []
    for cell in cells:
        metrics = cell.arms.get(arm, {})
        names = [f"{stage}_ms" for stage in STAGES if stage != "client"]
        for ends in zip(*(metrics.get(name, ()) for name in [*names, "ttft_ms"]), strict=False):
            told = [found for end in ends if (found := number(end)) is not None]
            if len(told) != len(STAGES):
                continue
            whole.append(told[-1])
            before = 0.0
            for stage, end in zip(STAGES, told, strict=True):
                lengths[stage].append(max(0.0, end - before))
                before = max(before, end)
    if not whole:
        return {}
    medians = {stage: median(took) for stage, took in lengths.items()}
    every = sum(medians.values())
    return {stage: took * median(whole) / every for stage, took in medians.items()} if every > 0 else {}
