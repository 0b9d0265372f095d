"""What an experiment is, and what it gives back.

Owns: the shape of results, in memory and as JSON.  Must not know: any experiment, or how a server is driven.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from harness.statistics import Bootstrap, Verdict

if TYPE_CHECKING:
    from harness.ledger import Ledger


@dataclass(frozen=True)
class Cell:
    """One point of the experiment's grid.

    `cell`: its coordinates.  `arms`: per arm and metric, one value a run; the lists of one cell are paired by position.
    """

    cell: Mapping[str, Any]
    arms: Mapping[str, Mapping[str, Sequence[Any]]]

    def as_json(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "cell": dict(self.cell),
            "arms": {
                arm: {metric: list(values) for metric, values in metrics.items()} for arm, metrics in self.arms.items()
            },
        }


@dataclass(frozen=True)
class Target:
    """A figure of the summary beside the paper's.

    `key`: where it stands in the summary.  `paper`: the paper's figure, as printed there.  `aim`: what we want.
    """

    key: str
    paper: str
    aim: str
    verdict: Verdict

    def as_json(self) -> dict[str, str]:
        """JSON-ready form."""
        return {"key": self.key, "paper": self.paper, "aim": self.aim, "verdict": self.verdict.value}

    @classmethod
    def of(cls, told: Mapping[str, str]) -> Target:
        """From that form.  Raises KeyError, ValueError."""
        return cls(told["key"], told["paper"], told["aim"], Verdict(told["verdict"]))


@dataclass(frozen=True)
class Result:
    """What one run of an experiment found.

    `checks`: correctness, each true or false; a run with a false one, or with none at all, has failed.
    `summary`: figures under the names that scripts rely on; ratios are not rounded.
    `model`, `seal`: what was served, and what the server said it was made of.
    """

    cells: Sequence[Cell]
    summary: Mapping[str, Any]
    checks: Mapping[str, bool]
    targets: Sequence[Target] = ()
    model: str = "unknown"
    seal: Mapping[str, str] = field(default_factory=dict)

    @property
    def correct(self) -> bool:
        """Whether every check passed."""
        return bool(self.checks) and all(self.checks.values())

    def document(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON document: `cell` and `arms` at the top when there is one cell, else a list under `cells`."""
        cells = [cell.as_json() for cell in self.cells]
        body = cells[0] if len(cells) == 1 else {"cells": cells}
        return {
            **body,
            "summary": dict(self.summary),
            "targets": [target.as_json() for target in self.targets],
            "checks": dict(self.checks),
            "manifest": dict(manifest),
        }


def from_document(document: Mapping[str, Any]) -> Result:
    """The result that a document was made of, without its cells.  Raises KeyError, ValueError."""
    about = document["manifest"]
    return Result(
        cells=(),
        summary=document["summary"],
        checks=document["checks"],
        targets=[Target.of(target) for target in document["targets"]],
        model=about["model"],
    )


def join(checks: dict[str, bool], more: Mapping[str, bool]) -> None:
    """A claim holds when it has held in every part of a run."""
    for name, holds in more.items():
        checks[name] = checks.get(name, True) and holds


def columns(trials: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, list[Any]]]:
    """Per arm and metric the values of all trials, for a `Cell`.  Each trial: per arm and metric, one value."""
    found: dict[str, dict[str, list[Any]]] = {}
    for trial in trials:
        for arm, metrics in trial.items():
            for metric, value in metrics.items():
                found.setdefault(arm, {}).setdefault(metric, []).append(value)
    return found


class Experiment(Protocol):
    """One module of this package has one: a frozen dataclass, whose fields say how much of what is measured.

    A field `model` may be set by `--model`, a field `url` by `--url`.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """What `retire bench` calls it."""

    @property
    def paper(self) -> str:
        """The paper's sections."""

    @property
    def own_servers(self) -> str:
        """Why a running server cannot be measured; empty where one can."""

    def run(self, ledger: Ledger, *, quick: bool) -> Result:
        """Measure.

        Every trial goes through `ledger`, and every claim into its `checks`.
        `quick`: fewer runs through the same code, under four minutes on two quiet cores.
        """


def figures(key: str, found: Bootstrap | None) -> dict[str, Any]:
    """A statistic and its 95 % interval as entries of a summary; None when no run counted."""
    if found is None:
        return {key: None, f"{key}_ci95": None}
    interval = found.interval()
    return {key: found.value, f"{key}_ci95": [interval.low, interval.high]}
