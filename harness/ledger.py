"""What of a run is done, so that nothing is measured twice.

Owns: which trial is which, the claims that were checked in each, and taking up what an earlier sitting has written.
Must not know: files, servers, any experiment.
Strategy: a trial's result is what JSON makes of it, whether it was measured just now or read back, so a run of several
sittings cannot differ from one that nobody interrupted.  An entry is written when its work is over, with the checks
that were made in the meantime; work that was interrupted has left nothing and is done again.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.experiment import join
from harness.progress import Progress

Entry = Mapping[str, Any]
"""`key`, `result`, `checks`, and `took_s`: cell and seconds of each trial in it."""

_START = "start "


@dataclass(frozen=True)
class Key:
    """Which trial of its bench this is.

    `cell`: the point of the grid it belongs to.  `arms`: measured in it, in any order.  `number`: of the trial among
    those of its cell.  `seed`: of its texts.
    """

    cell: str
    arms: Sequence[str]
    number: int
    seed: int

    def __str__(self) -> str:
        return json.dumps([self.cell, sorted(self.arms), self.number, self.seed])


class Ledger:
    """The trials of one run of one bench.

    `earlier`: entries of sittings before this one.  `write`: keeps an entry; when it returns, the entry is safe.
    `checks`: the claims of the run so far; whoever observes one joins it in here (`harness.experiment.join`).
    """

    def __init__(
        self,
        earlier: Iterable[Entry] = (),
        write: Callable[[Entry], None] = lambda _entry: None,
        show: Callable[[Progress], None] = lambda _progress: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.checks: dict[str, bool] = {}
        self.progress = Progress()
        self._earlier = {entry["key"]: entry for entry in earlier}
        self._write, self._show, self._clock = write, show, clock
        self._asked: set[str] = set()
        self._took_s: list[tuple[str, float]] = []
        self._last_end = clock()

    @property
    def earlier_trials(self) -> int:
        """How many trials are there from earlier sittings."""
        return sum(not key.startswith(_START) for key in self._earlier)

    def plan(self, trials: Mapping[str, int], size: float = 1.0) -> None:
        """So many more trials of these cells will come, or fewer; for the time left alone.

        `size`: how much work such a trial is, in a unit of the bench's.
        """
        self.progress.plan(trials, size)

    def trial(self, key: Key, work: Callable[[], Any]) -> Any:
        """What the work gives, as JSON: measured now, or in an earlier sitting.

        `work` gives something of JSON's types, dataclasses or named tuples; it makes the trial's checks, in `checks`.

        Raises:
            ValueError: there was a trial of this key before in this run.
        """

        def counted() -> Any:
            result = work()
            now = self._clock()
            self._count([(key.cell, now - self._last_end)])
            self._last_end = now
            self._show(self.progress)
            return result

        return self._once(str(key), counted)

    def start(self, name: str, work: Callable[[], Any]) -> Any:
        """The same for everything that is asked of servers that are started for it, trials included.

        If it ended in an earlier sitting, the servers need not be started again.  If it was interrupted, they are, and
        its trials that are done are taken up one by one; checks of the servers themselves are made anew.
        """
        return self._once(f"{_START}{name}", work)

    def _once(self, key: str, work: Callable[[], Any]) -> Any:
        if key in self._asked:
            raise ValueError(f"{key} is measured twice")
        self._asked.add(key)
        if key in self._earlier:
            entry = self._earlier[key]
            self._count(entry["took_s"])
        else:
            entry = self._measured(key, work)
        join(self.checks, entry["checks"])
        return entry["result"]

    def _measured(self, key: str, work: Callable[[], Any]) -> Entry:
        before, trials = dict(self.checks), len(self._took_s)
        self.checks.clear()
        try:
            result = work()
            # What failed outside of any trial (a warm-up, say) would be forgotten by the next sitting.
            checks = {name: False for name, held in before.items() if not held}
            join(checks, self.checks)
        finally:
            self.checks.clear()
            self.checks |= before
        written = {"key": key, "result": result, "checks": checks, "took_s": self._took_s[trials:]}
        entry: Entry = json.loads(json.dumps(written, default=dataclasses.asdict))
        self._write(entry)
        return entry

    def _count(self, took_s: Iterable[tuple[str, float]]) -> None:
        for cell, one_s in took_s:
            self._took_s.append((cell, one_s))
            self.progress.done(cell, one_s)
