"""`retire bench NAME`: run one experiment, print its figures beside the paper's, write them as JSON.

The exit status says whether the run was correct.  A target that is not reached is printed and changes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.burst import Burst
from harness.churn import Churn
from harness.composition import Composition
from harness.correctness import Correctness
from harness.experiment import Experiment, Result
from harness.inheritance import Inheritance
from harness.manifest import manifest
from harness.overhead import Overhead
from harness.publication import Publication
from harness.retirement import Retirement
from harness.server import ServerFailed
from harness.tenants import Tenants

EXPERIMENTS: tuple[Experiment, ...] = (
    Burst(),
    Churn(),
    Composition(),
    Correctness(),
    Inheritance(),
    Overhead(),
    Publication(),
    Retirement(),
    Tenants(),
)


def main(argv: Sequence[str] | None = None, experiments: Iterable[Experiment] = EXPERIMENTS) -> int:
    """Exit status 0 when every correctness check passed."""
    known = {experiment.name: experiment for experiment in experiments}
    parser = argparse.ArgumentParser(prog="retire bench", description="One of the paper's experiments, here and now.")
    parser.add_argument("name", metavar="NAME", choices=sorted(known), help=", ".join(sorted(known)))
    parser.add_argument("--quick", action="store_true", help="fewer runs, under four minutes on two quiet cores")
    parser.add_argument("--json", metavar="FILE", type=_writable, help="write everything measured there")
    parser.add_argument("--trace", metavar="FILE", type=Path, help="burst: recorded transitions, replayed as well")
    options = parser.parse_args(argv)
    experiment = known[options.name]
    if options.trace is not None:
        if not isinstance(experiment, Burst):
            parser.error("--trace is for burst")
        experiment = replace(experiment, trace=options.trace)
    try:
        result = experiment.run(quick=options.quick)
    except ServerFailed as error:
        print(f"retire bench: the server did not start:\n{error}", file=sys.stderr)
        return 1
    document = result.document(manifest(experiment.name, result, quick=options.quick))
    print(table(experiment, result, document["manifest"]))
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0 if result.correct else 1


def _writable(text: str) -> Path:
    """A path that can be written, found out before the minutes are spent."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text}")
    return path


def table(experiment: Experiment, result: Result, about: Mapping[str, Any]) -> str:
    """The result for a terminal."""
    rows = [("figure", "paper", "aim", "here", "")]
    rows += [
        (target.key, target.paper, target.aim, shown(result.summary, target.key), target.verdict.value)
        for target in result.targets
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    told = {target.key for target in result.targets} | {f"{target.key}_ci95" for target in result.targets}
    lines = [f"{experiment.name}, beside {experiment.paper} of the paper"]
    if result.targets:
        lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [f"  {key}: {_plain(value)}" for key, value in result.summary.items() if key not in told]
    lines += [f"  {'ok  ' if holds else 'NOT '} {name}" for name, holds in result.checks.items()]
    lines += [f"  {', '.join(f'{key} {value}' for key, value in about.items())}"]
    lines += ["correct" if result.correct else "NOT CORRECT: the figures above do not count"]
    return "\n".join(lines)


def shown(summary: Mapping[str, Any], key: str) -> str:
    """A figure and its interval."""
    interval = summary.get(f"{key}_ci95")
    return _plain(summary[key]) + (f" [{_plain(interval[0])}, {_plain(interval[1])}]" if interval else "")


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
