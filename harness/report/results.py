"""What a folder holds of results of `retire bench`.

Owns: reading files that anybody may have written or damaged, and which of several results of one bench counts.
Must not know: any experiment, or how results are shown.
Strategy: whatever does not have the shape is left out where it stands, and a file without any is named with the reason;
nothing here raises.  JSON as Python reads it holds numbers that nobody has measured: infinite ones, and ones that are
none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.experiment import Cell, Target
from harness.statistics import Interval, Verdict

_VERDICTS = [verdict.value for verdict in Verdict]
LARGEST, SMALLEST = 1e15, 1e-15
NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Run:
    """One result of one bench.  `file`: its name, without the folder."""

    file: str
    bench: str
    summary: Mapping[str, Any]
    checks: Mapping[str, bool]
    manifest: Mapping[str, Any]
    cells: Sequence[Cell] = ()
    targets: Mapping[str, Target] | None = None

    @property
    def quick(self) -> bool:
        """Whether it was made with `--quick`."""
        return self.manifest.get("quick") is True

    @property
    def kind(self) -> str:
        """The same in words."""
        return "quick run" if self.quick else "full run"

    @property
    def correct(self) -> bool:
        """Whether it counts: there were checks, and all passed."""
        return bool(self.checks) and all(self.checks.values())

    @property
    def date(self) -> datetime:
        """When it was written; before all others if it does not say."""
        try:
            found = datetime.fromisoformat(str(self.manifest.get("date")))
            return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
        except (ValueError, OverflowError):
            return NEVER

    def figure(self, key: str) -> Any:
        """A figure of the summary; `a/b` is the `b` of a figure that has several.  None when there is none."""
        found: Any = self.summary
        for part in [key] if key in self.summary else key.split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def number(self, key: str) -> float | None:
        """The same, if it is a finite number."""
        return number(self.figure(key))

    def interval(self, key: str) -> Interval | None:
        """The interval around a figure."""
        ends = numbers(self.figure(f"{key}_ci95"))
        return Interval(*ends) if len(ends) == 2 else None


@dataclass(frozen=True)
class Folder:
    """What was found.  `runs`: of each bench, by name, the newest full run, else the newest quick one.

    `passed_over`: the others.

    `left_out`: per file that gave no result, why.
    """

    runs: Mapping[str, Run]
    passed_over: Sequence[Run]
    left_out: Mapping[str, str]


def read(folder: Path) -> Folder:
    """Every result that lies in the folder itself, as a file whose name ends in `.json`."""
    found: list[Run] = []
    left_out: dict[str, str] = {}
    for file in sorted(folder.glob("*.json")):
        run = _read(file)
        if isinstance(run, Run):
            found.append(run)
        else:
            left_out[file.name] = run
    found.sort(key=lambda run: (not run.quick, run.date, run.file))
    shown = {run.bench: run for run in found}
    return Folder(
        runs=dict(sorted(shown.items())),
        passed_over=[run for run in found if shown[run.bench] is not run],
        left_out=left_out,
    )


def _read(file: Path) -> Run | str:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"cannot be read: {error.strerror if isinstance(error, OSError) else error}"
    if not isinstance(document, dict):
        return "not a result of retire bench"
    summary, checks, manifest = (document.get(name) for name in ("summary", "checks", "manifest"))
    if not isinstance(summary, dict) or not isinstance(checks, dict) or not isinstance(manifest, dict):
        return "not a result of retire bench"
    bench = manifest.get("bench")
    if not isinstance(bench, str) or not bench:
        return "a result of no bench"
    return Run(
        file=file.name,
        bench=bench,
        summary=summary,
        checks={name: held is True for name, held in checks.items()},
        manifest=manifest,
        cells=_cells(document),
        targets=_targets(document.get("targets")),
    )


def _cells(document: Mapping[str, Any]) -> list[Cell]:
    """Those that have the shape, and of them the metrics that do."""
    several = document.get("cells")
    return [
        Cell(one["cell"], {arm: _lists(metrics) for arm, metrics in one["arms"].items()})
        for one in (several if isinstance(several, list) else [document])
        if isinstance(one, dict) and isinstance(one.get("cell"), dict) and isinstance(one.get("arms"), dict)
    ]


def _lists(metrics: Any) -> dict[str, list[Any]]:
    if not isinstance(metrics, dict):
        return {}
    return {metric: values for metric, values in metrics.items() if isinstance(values, list)}


def _targets(told: Any) -> dict[str, Target] | None:
    """Per figure what its bench said of it; None when the file is from before benches said so."""
    if not isinstance(told, list):
        return None
    rows = ([one.get(name) for name in ("key", "paper", "aim", "verdict")] for one in told if isinstance(one, dict))
    return {
        key: Target(key, paper, aim, Verdict(verdict))
        for key, paper, aim, verdict in rows
        if isinstance(key, str) and isinstance(paper, str) and isinstance(aim, str) and verdict in _VERDICTS
    }


def number(value: Any) -> float | None:
    """A finite number that can be drawn, or None; truth is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        return None
    return float(value) if abs(value) >= SMALLEST else 0.0


def numbers(values: Any) -> list[float]:
    """The finite numbers of a list."""
    return [found for one in values if (found := number(one)) is not None] if isinstance(values, list) else []


def values(cell: Cell, arm: str, metric: str) -> list[float]:
    """What was measured of an arm in a cell."""
    return numbers(cell.arms.get(arm, {}).get(metric))


def pairs(cell: Cell, above: str, below: str, metric: str) -> list[tuple[float, float]]:
    """What two arms gave, run by run, where both gave something above 0."""
    columns = (cell.arms.get(arm, {}).get(metric, ()) for arm in (above, below))
    both = ((number(one), number(other)) for one, other in zip(*columns, strict=False))
    return [(one, other) for one, other in both if one is not None and other is not None and min(one, other) > 0]


def coordinate(cell: Cell, name: str) -> float | None:
    """Where a cell stands, if that is a number."""
    return number(cell.cell.get(name))


def positive(found: Iterable[float]) -> list[float]:
    """Those that a logarithmic axis has room for."""
    return [one for one in found if one > SMALLEST]
