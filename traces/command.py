"""`retire traces extract|stats|generate`.

Owns: flags, and what goes to stdout and what to stderr.  Must not know: how anything works.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from retire.core.errors import RetireError
from traces import generate, rows, statistics
from traces.extract import extract


def main(argv: Sequence[str] | None = None) -> int:
    """Run one action.

    Raises:
        RetireError: nothing was there to be read, or a file of rows holds something else.
    """
    parser = argparse.ArgumentParser(prog="retire traces", description="Recorded interruptions, and rows like them.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    of_logs = actions.add_parser("extract", help="from agents' logs to rows: times and counts, nobody's text")
    of_logs.add_argument(
        "paths", nargs="+", metavar="PATH", help="a log of Codex, Claude Code, OpenCode or Gemini CLI, or a folder"
    )
    of_logs.add_argument(
        "--source", type=_source, default="1", metavar="N", help="the number of this collection (%(default)s)"
    )
    of_logs.set_defaults(run=_extract)

    of_rows = actions.add_parser("stats", help="rates, gaps, variation and the densest window of rows")
    of_rows.add_argument("files", nargs="+", metavar="FILE", help="rows, as extract and generate write them")
    of_rows.add_argument(
        "--window", type=_seconds, default=statistics.WINDOW_S, metavar="S", help="seconds (%(default)g)"
    )
    of_rows.add_argument("--json", action="store_true", help="for a program")
    of_rows.set_defaults(run=_stats)

    drawn = actions.add_parser("generate", help="rows drawn from published quantiles; the same seed, the same bytes")
    drawn.add_argument("--seed", type=int, required=True, metavar="N")
    drawn.add_argument("--sessions", type=_count, default=100, metavar="N", help="threads (%(default)s)")
    drawn.add_argument("--hours", type=_seconds, default=1.0, metavar="H", help="within which they begin (%(default)g)")
    drawn.add_argument(
        "--window", choices=["paper"], help="24 transitions as in the paper's densest 120 seconds, instead"
    )
    drawn.set_defaults(run=_generate)

    for writer in (of_logs, drawn):
        writer.add_argument("--out", type=_writable, metavar="FILE", help="write there instead of stdout")
    options = parser.parse_args(argv)
    return int(options.run(options))


def _extract(options: argparse.Namespace) -> int:
    found = extract(options.paths, options.source)
    for name, count in sorted(found.counts.items()):
        if count:
            print(f"{name}: {count}", file=sys.stderr)
    if not found.counts["files"]:
        raise RetireError("no log could be read")
    _write(found.rows, options.out)
    return 0


def _stats(options: argparse.Namespace) -> int:
    sources: list[list[rows.Transition]] = []
    for name in options.files:
        try:
            with Path(name).open(encoding="utf-8") as lines:
                of_file = sorted(rows.read(lines), key=_of)
        except rows.RowError as error:
            raise RetireError(f"{name}: {error}") from None
        except (OSError, ValueError) as error:
            raise RetireError(f"{name} cannot be read: {error}") from None
        sources += [list(source) for _, source in groupby(of_file, key=_of)]
    if not sources:
        raise RetireError("there is no transition in it")
    found = statistics.summary(sources, options.window)
    print(json.dumps(found, indent=2) if options.json else statistics.table(found))
    return 0


def _of(row: rows.Transition) -> str:
    return row.source


def _generate(options: argparse.Namespace) -> int:
    if options.window == "paper":
        drawn = generate.paper_window(options.seed)
    else:
        drawn = generate.sessions(options.seed, options.sessions, options.hours * 3600)
    _write(drawn, options.out)
    return 0


def _write(drawn: Sequence[rows.Transition], path: Path | None) -> None:
    if path is None:
        rows.write(drawn, sys.stdout)
        return
    with path.open("w", encoding="utf-8", newline="\n") as out:
        rows.write(drawn, out)


def _writable(text: str) -> Path:
    """A path that can be written, found out before the minutes are spent."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text}")
    return path


def _source(text: str) -> str:
    return f"S{_count(text):02d}"


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def _seconds(text: str) -> float:
    if not 0 < (number := float(text)) < 1e9:
        raise argparse.ArgumentTypeError("must be more than 0")
    return number
