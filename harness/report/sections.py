"""What a report says, before it is a page or Markdown.

Owns: rows of figures beside the paper's, what became of each aim, and what is put first.
Must not know: HTML, Markdown, or how figures are drawn.
Strategy: every number is written once, here or in a drawing's table; the page and the Markdown show the same strings.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from harness.experiment import Target
from harness.report import figures
from harness.report.drawing import Drawing
from harness.report.numbers import GIB, NONE, shown, unit_of
from harness.report.paper import CHAPTERS, UNTOLD, Chapter, Claim
from harness.report.results import NEVER, Folder, Run
from harness.report.words import words
from harness.statistics import Interval, Verdict

_MANIFEST_FIRST = ("commit", "dirty", "pins", "model", "vllm", "torch", "python", "cpu", "cores", "memory_bytes")
_SHORT_COMMIT = 12
DEEPEST = 4
TOO_FEW = "(too few for an interval)"


class Standing(StrEnum):
    """What became of an aim; shortfalls come first."""

    NOT_REACHED = "not reached"
    VOID = "does not count"
    OPEN = "open"
    REACHED = "reached"
    MISSING = "not measured"

    @property
    def falls_short(self) -> bool:
        """Whether a reader wants to see it before anything else."""
        return self in {Standing.NOT_REACHED, Standing.VOID, Standing.OPEN}


_STANDINGS = {
    Verdict.NOT_REACHED: Standing.NOT_REACHED,
    Verdict.OPEN: Standing.OPEN,
    Verdict.REACHED: Standing.REACHED,
}


@dataclass(frozen=True)
class Spread:
    """A figure, its interval and its aim as values, for a small drawing."""

    value: float
    interval: Interval
    bound: float


@dataclass(frozen=True)
class Row:
    """A figure beside the paper's.  `standing`: None when nothing is aimed at."""

    label: str
    paper: str
    aim: str
    here: str
    interval: str = ""
    standing: Standing | None = None
    spread: Spread | None = None
    group: str = ""

    @property
    def name(self) -> str:
        """What it is called where its group is not in sight."""
        return f"{self.group}: {self.label}" if self.group else self.label

    @property
    def found(self) -> str:
        """The figure and its interval."""
        return f"{self.here} {self.interval}".rstrip()


@dataclass(frozen=True)
class Section:
    """One bench.  `rest`: what else its summary holds.  `checks`: with the words of a reader; failed ones first."""

    bench: str
    title: str
    place: str
    asks: str
    run: Run
    rows: Sequence[Row]
    drawings: Sequence[Drawing]
    rest: Sequence[tuple[str, str]]
    checks: Sequence[tuple[str, bool]]
    manifest: Mapping[str, str]

    @property
    def groups(self) -> list[tuple[str, list[Row]]]:
        """The rows, those of a group together."""
        return [(group, list(rows)) for group, rows in itertools.groupby(self.rows, key=lambda row: row.group)]

    @property
    def failed(self) -> list[str]:
        """The checks that did not hold."""
        return [name for name, held in self.checks if not held]


@dataclass(frozen=True)
class Count:
    """How many, on full runs and on quick ones.  They are not added: a quick run decides little."""

    full: int
    quick: int

    def __bool__(self) -> bool:
        return bool(self.full or self.quick)

    def of(self, standing: Standing) -> str:
        """In words."""
        more = f"{self.quick} on quick runs"
        if not self.quick:
            return f"{self.full} {standing}"
        return f"{self.full} {standing} (and {more})" if self.full else f"{standing}: {more}"


@dataclass(frozen=True)
class Missing:
    """A chapter that no result stands for."""

    chapter: Chapter
    rows: Sequence[Row]


@dataclass(frozen=True)
class Report:
    """All of it.  `left_out`, `passed_over`: files, and why they are not shown."""

    sections: Sequence[Section]
    missing: Sequence[Missing]
    left_out: Mapping[str, str]
    passed_over: Mapping[str, str]
    date: str = NONE

    def counts(self) -> dict[Standing, Count]:
        """How many aims have come to what."""
        quick = Counter(standing for section, _, standing in self.judged() if section.run.quick)
        full = Counter(standing for section, _, standing in self.judged() if not section.run.quick)
        full.update(row.standing for one in self.missing for row in one.rows if row.standing)
        return {standing: Count(full[standing], quick[standing]) for standing in Standing}

    def judged(self) -> Iterator[tuple[Section, Row, Standing]]:
        """Every row with an aim, its section, and what became of it."""
        return ((section, row, row.standing) for section in self.sections for row in section.rows if row.standing)

    def shortfalls(self) -> list[tuple[Section, Row]]:
        """What is not reached, does not count or is open; in that order."""
        found = list(self.judged())
        return [
            (section, row)
            for wanted in Standing
            if wanted.falls_short
            for section, row, standing in found
            if standing is wanted
        ]


def report(folder: Folder) -> Report:
    """The report on a folder."""
    known = {chapter.bench: chapter for chapter in CHAPTERS}
    strange = [Chapter(bench, words(bench), UNTOLD, "") for bench in folder.runs if bench not in known]
    dates = [run.date for run in folder.runs.values() if run.date is not NEVER]
    return Report(
        sections=[
            _section(chapter, folder.runs[chapter.bench])
            for chapter in [*CHAPTERS, *strange]
            if chapter.bench in folder.runs
        ],
        missing=[
            Missing(chapter, [_unmeasured(claim) for claim in chapter.claims])
            for chapter in CHAPTERS
            if chapter.bench not in folder.runs
        ],
        left_out=folder.left_out,
        passed_over={run.file: _why_not(run, folder.runs[run.bench]) for run in folder.passed_over},
        date=max(dates).date().isoformat() if dates else NONE,
    )


def _section(chapter: Chapter, run: Run) -> Section:
    claims = [*chapter.claims, *_unknown(chapter, run)]
    told = {claim.key for claim in claims} | {f"{claim.key}_ci95" for claim in claims}
    return Section(
        bench=run.bench,
        title=chapter.title,
        place=chapter.place,
        asks=chapter.asks,
        run=run,
        rows=[_row(claim, run) for claim in claims],
        drawings=figures.drawn(run),
        rest=[(words(key), shown(value, unit_of(key))) for key, value in _flat(run.summary) if key not in told],
        checks=sorted(((words(name), held) for name, held in run.checks.items()), key=lambda check: check[1]),
        manifest=_manifest(run),
    )


def _unknown(chapter: Chapter, run: Run) -> list[Claim]:
    """Targets of the run's own that no claim speaks of."""
    known = {claim.key for claim in chapter.claims}
    return [
        Claim(key, words(key), unit_of(key), target.paper)
        for key, target in (run.targets or {}).items()
        if key not in known
    ]


def _row(claim: Claim, run: Run) -> Row:
    target = (run.targets or {}).get(claim.key)
    value, interval = run.number(claim.key), run.interval(claim.key)
    bound = claim.aim.bound_in(run) if claim.aim else None
    wide = interval if interval and interval.high > interval.low else None
    return Row(
        label=claim.label,
        paper=claim.paper,
        aim=target.aim if target and not _speaks_of(target.aim, bound) else _aim(claim, run),
        here=shown(run.figure(claim.key), claim.unit),
        interval=(claim.unit.between(interval) if wide else TOO_FEW) if interval else "",
        standing=_standing(claim, target, run),
        spread=Spread(value, wide, bound) if value is not None and wide and bound is not None else None,
        group=claim.group,
    )


def _speaks_of(aim: str, bound: float | None) -> bool:
    """Whether the aim that a bench has written down is still ours; then it is written with its unit."""
    first = re.search(r"\d+(\.\d+)?", aim)
    return bound is not None and first is not None and float(first[0]) == bound


def _unmeasured(claim: Claim) -> Row:
    return Row(
        label=claim.label,
        paper=claim.paper,
        aim=_aim(claim, None),
        here=NONE,
        standing=Standing.MISSING if claim.aim else None,
        group=claim.group,
    )


def _aim(claim: Claim, run: Run | None) -> str:
    return claim.aim.text(run, claim.unit) if claim.aim else UNTOLD


def _standing(claim: Claim, target: Target | None, run: Run) -> Standing | None:
    """What the bench has said of it; what it would say, where the file is from before it did."""
    if target is None and claim.aim is None:
        return None
    if not run.correct:
        return Standing.VOID
    verdict = target.verdict if target else claim.aim.verdict(run, claim.key) if claim.aim else None
    return _STANDINGS[verdict] if verdict else None


def _flat(summary: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for key, value in summary.items():
        if isinstance(value, dict) and len(before) < DEEPEST:
            yield from _flat(value, (*before, key))
        else:
            yield "/".join((*before, key)), value


def _manifest(run: Run) -> dict[str, str]:
    """In an order of ours; `date` and the kind of run first."""
    manifest = run.manifest
    rest = [key for key in manifest if key not in {*_MANIFEST_FIRST, "bench", "quick", "date"}]
    told = {"run": run.kind, "date": _date(run)}
    for key in [*_MANIFEST_FIRST, *rest]:
        if key in manifest:
            told[words(key.removesuffix("_bytes"))] = _told(key, manifest[key])
    return told | {"file": run.file}


def _told(key: str, value: Any) -> str:
    if key == "commit" and isinstance(value, str):
        return value[:_SHORT_COMMIT]
    return shown(value, GIB if key == "memory_bytes" else unit_of(""))


def _why_not(run: Run, shown: Run) -> str:
    better = "full" if run.quick and not shown.quick else "newer"
    return f"{run.kind} of {run.bench}, {_date(run)}: there is a {better} one"


def _date(run: Run) -> str:
    return "date unknown" if run.date is NEVER else f"{run.date:%Y-%m-%d %H:%M} UTC"
