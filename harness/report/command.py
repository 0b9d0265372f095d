"""`retire report DIR`: read results, write the page and the Markdown, say in a line what they show."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.report.markdown import markdown
from harness.report.page import page
from harness.report.results import read
from harness.report.sections import report


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when there was a result to show, and it was written."""
    parser = argparse.ArgumentParser(
        prog="retire report",
        description="Results of `retire bench --json FILE`, beside the paper: one page for a browser.",
    )
    parser.add_argument("folder", metavar="DIR", type=_folder, help="where the results lie")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the page (default: report.html in DIR)")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="the same numbers as Markdown")
    options = parser.parse_args(argv)
    found = read(options.folder)
    for file, why in found.left_out.items():
        print(f"retire report: {file} is left out: {why}", file=sys.stderr)
    if not found.runs:
        print(f"retire report: no result of retire bench in {options.folder}", file=sys.stderr)
        return 1
    told = report(found)
    written = {options.out or options.folder / "report.html": page(told)}
    if options.markdown:
        written[options.markdown] = markdown(told)
    for file, text in written.items():
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"retire report: cannot write {file}: {error.strerror}", file=sys.stderr)
            return 1
    counts = (count.of(standing) for standing, count in told.counts().items() if count)
    print(f"{', '.join(map(str, written))}: {', '.join(counts)}")
    return 0


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    return Path(text)
