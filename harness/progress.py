"""How far a run is, and how long the rest of it will take.

Owns: the arithmetic of that, the bar on a terminal, and the lines of progress (results go to stdout).
Must not know: what a trial is about.
Strategy: a trial's time is that since the trial before, so that starts of servers and calibration are in it.  What is
left of a cell is expected to take what its own trials took; as long as it has none, what all others took, by size.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping

from tqdm import tqdm


class Progress:
    """Trials by cell: planned, done, and how long each took, in seconds."""

    def __init__(self) -> None:
        self._planned: dict[str, int] = {}
        self._size: dict[str, float] = {}
        self._took_s: dict[str, list[float]] = {}

    def plan(self, trials: Mapping[str, int], size: float = 1.0) -> None:
        """So many more trials of these cells will come, or fewer.  `size`: how much work one is, beside others."""
        for cell, count in trials.items():
            self._planned[cell] = self._planned.get(cell, 0) + count
            self._size[cell] = size

    def done(self, cell: str, took_s: float) -> None:
        """One of them is done, now or in an earlier sitting."""
        self._took_s.setdefault(cell, []).append(took_s)

    @property
    def trials_done(self) -> int:
        """How many are done."""
        return sum(map(len, self._took_s.values()))

    @property
    def trials(self) -> int:
        """How many there will be: what was planned, or done beyond that."""
        cells = {*self._planned, *self._took_s}
        return sum(max(self._planned.get(cell, 0), len(self._took_s.get(cell, ()))) for cell in cells)

    def left_s(self) -> float | None:
        """Seconds until all are done; None before the first one is."""
        if not self._took_s:
            return None
        pace = sum(map(sum, self._took_s.values())) / sum(
            self._size.get(cell, 1.0) * len(took) for cell, took in self._took_s.items()
        )
        left = 0.0
        for cell, count in self._planned.items():
            took = self._took_s.get(cell, [])
            left += max(0, count - len(took)) * (statistics.fmean(took) if took else pace * self._size[cell])
        return left

    def __str__(self) -> str:
        left_s = self.left_s()
        told = f"{self.trials_done} of {self.trials}"
        return told if left_s is None else f"{told}, {span(left_s)} left"


class Bar:
    """The progress of one run on stderr: a bar on a terminal, else a line whenever a trial is done."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._bar = tqdm(desc=name, total=0, disable=None, leave=False, dynamic_ncols=True, bar_format="{desc} |{bar}|")

    def show(self, progress: Progress) -> None:
        """After a trial was planned or done."""
        if self._bar.disable:
            note(f"  {progress}")
            return
        self._bar.total, self._bar.n = progress.trials, progress.trials_done
        self._bar.set_description_str(f"{self._name}: {progress}")

    def close(self) -> None:
        """Take it from the terminal."""
        self._bar.close()


def span(seconds: float) -> str:
    """A length of time for people."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def note(text: str) -> None:
    """A line on stderr, above the bar if there is one."""
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()
