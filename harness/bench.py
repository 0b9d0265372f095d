"""`retire bench NAME`: run one experiment, print its figures beside the paper's, write them as JSON.

`retire bench all`: run every one of them, each into its own file, then the report on all.

The exit status says whether the run was correct.  A target that is not reached is printed and changes nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.burst import Burst
from harness.churn import Churn
from harness.composition import Composition
from harness.correctness import Correctness
from harness.experiment import Experiment, Result, from_document
from harness.histories.experiment import Histories
from harness.inheritance import Inheritance
from harness.journal import JournalInUse
from harness.overhead import Overhead
from harness.progress import note, span
from harness.publication import Publication
from harness.rates import Rates
from harness.report import command as report
from harness.retirement import Retirement
from harness.server import ServerFailed
from harness.session import ServerUnsuitable
from harness.sitting import Asked, Refused, measured
from harness.tenants import Tenants

EXPERIMENTS: tuple[Experiment, ...] = (
    Burst(),
    Churn(),
    Composition(),
    Correctness(),
    Histories(),
    Inheritance(),
    Overhead(),
    Publication(),
    Rates(),
    Retirement(),
    Tenants(),
)


ALL = "all"


def main(argv: Sequence[str] | None = None, experiments: Iterable[Experiment] = EXPERIMENTS) -> int:
    """Exit status 0 when every correctness check passed, 130 when it was interrupted (Ctrl-C, SIGTERM)."""
    known = {experiment.name: experiment for experiment in experiments}
    options = _parsed(argv, known)
    if options.trace is not None:
        known |= {name: replace(one, trace=options.trace) for name, one in known.items() if isinstance(one, Burst)}
    asked = Asked(quick=options.quick, model=options.model, url=options.url, anew=options.anew)
    try:
        with _terminated_is_interrupted():
            if options.name == ALL:
                chosen = [one for name, one in known.items() if name in options.only and name not in options.skip]
                return _every(chosen, asked, options.out)
            return _one(known[options.name], asked, options.json)
    except KeyboardInterrupt:
        kept = options.out or options.json
        note(
            "interrupted: " + ("the same command goes on from here" if kept else "without --json FILE nothing is kept")
        )
        return 130


def _parsed(argv: Sequence[str] | None, known: Mapping[str, Experiment]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="retire bench",
        description="One of the paper's experiments, or all of them, here and now.  What was interrupted goes on where "
        "it was when the same command is given again, as long as nothing has changed that is measured.",
    )
    names = [*sorted(known), ALL]
    parser.add_argument("name", metavar="NAME", choices=names, help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="fewer runs, under four minutes on two quiet cores")
    parser.add_argument("--model", metavar="NAME|PATH", help="measure with this model")
    parser.add_argument("--url", metavar="URL", help="measure the server that runs there, where a bench can")
    parser.add_argument("--anew", action="store_true", help="measure even what is there already; old trials are kept")
    parser.add_argument("--json", metavar="FILE", type=_writable, help="write everything measured there, trials beside")
    parser.add_argument("--trace", metavar="FILE", type=Path, help="burst: recorded transitions, replayed as well")
    every = parser.add_argument_group(f"{ALL} benches")
    every.add_argument("--out", metavar="DIR", type=_folder, help="where their results and the report go")
    every.add_argument("--only", metavar="A,B", type=_names(known), default=list(known), help="these")
    every.add_argument("--skip", metavar="C,D", type=_names(known), default=[], help="all but these")
    options = parser.parse_args(argv)
    if options.name == ALL and (options.json or not options.out):
        parser.error("all benches write to --out DIR")
    if options.name != ALL and (options.out or options.skip or options.only != list(known)):
        parser.error(f"--out, --only and --skip are for `{ALL}`; one bench writes to --json FILE")
    if options.trace is not None and options.name != ALL and not isinstance(known[options.name], Burst):
        parser.error("--trace is for burst")
    options.url = options.url and options.url.rstrip("/")
    return options


def _one(experiment: Experiment, asked: Asked, file: Path | None) -> int:
    try:
        document = measured(experiment, asked, file)
    except ServerFailed as error:
        print(f"retire bench: the server did not start:\n{error}", file=sys.stderr)
        return 1
    except Refused as error:
        print(f"retire bench: {error}", file=sys.stderr)
        return 2
    except (ServerUnsuitable, JournalInUse) as error:
        print(f"retire bench: {error}", file=sys.stderr)
        return 1
    result = from_document(document)
    print(table(result, document["manifest"], experiment.paper))
    return 0 if result.correct else 1


def _every(experiments: Sequence[Experiment], asked: Asked, out: Path) -> int:
    """One after the other; none is stopped by another's failure.  1 if one has failed or was not correct."""
    started = time.monotonic()
    told: dict[str, str] = {}
    failed = []
    for number, experiment in enumerate(experiments, 1):
        began, name = time.monotonic(), experiment.name
        note(f"{name}, {number} of {len(experiments)}")
        try:
            document = measured(experiment, asked, out / f"{name}{'.quick' if asked.quick else ''}.json")
        except Refused as error:
            told[name] = f"left out: {error}"
            note(f"  {told[name]}")
            continue
        except Exception as error:  # noqa: BLE001 - the others are measured whatever happens to this one
            failed.append(name)
            told[name] = f"FAILED: {traceback.format_exception_only(error)[-1].strip().splitlines()[0]}"
            note(traceback.format_exc())
            continue
        result = from_document(document)
        print(table(result, document["manifest"], experiment.paper), end="\n\n")
        told[name] = f"{'correct' if result.correct else 'NOT CORRECT'}, {span(time.monotonic() - began)}"
        if not result.correct:
            failed.append(name)
    for name, standing in told.items():
        print(f"{name}: {standing}")
    print(f"{span(time.monotonic() - started)} in all" + (f"; failed: {', '.join(failed)}" if failed else ""))
    written = report.main([str(out), "--markdown", str(out / "report.md")])
    return 1 if failed else written


@contextmanager
def _terminated_is_interrupted() -> Iterator[None]:
    """SIGTERM ends servers and files as Ctrl-C does."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _writable(text: str) -> Path:
    """A path that can be written, found out before the minutes are spent."""
    path = Path(text)
    free = not path.exists() or (path.is_file() and os.access(path, os.W_OK))
    if not free or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text}")
    return path


def _folder(text: str) -> Path:
    """A folder that can be written, made if need be."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make {text}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write into {text}")
    return path


def _names(known: Mapping[str, Experiment]) -> Any:
    """What reads a list of benches."""

    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no bench is called {', '.join(unknown)}; known: {', '.join(known)}")
        return names

    return read


def table(result: Result, about: Mapping[str, Any], paper: str) -> str:
    """The result for a terminal.  `about`: its manifest.  `paper`: what of the paper it stands beside."""
    rows = [("figure", "paper", "aim", "here", "")]
    rows += [
        (target.key, target.paper, target.aim, shown(result.summary, target.key), target.verdict.value)
        for target in result.targets
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    told = {target.key for target in result.targets} | {f"{target.key}_ci95" for target in result.targets}
    lines = [f"{about['bench']}, beside {paper} of the paper"]
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
