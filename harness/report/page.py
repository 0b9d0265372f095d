"""The report as one HTML page.

Owns: the page; it needs nothing but itself, no network, no scripts, no fonts.  Must not know: results.
Strategy: the template escapes whatever it is given; drawings come escaped from `harness.report.drawing`.
"""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from harness.report import drawing
from harness.report.paper import UNTOLD
from harness.report.sections import Report, Spread, Standing
from harness.report.words import seen

FOLDER = Path(__file__).parent


def page(report: Report) -> str:
    """The page's text."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    text = environment.get_template("page.html").render(
        report=report,
        counts=report.counts(),
        shortfalls=report.shortfalls(),
        anchors={section.bench: anchor(number, section.bench) for number, section in enumerate(report.sections)},
        css=Markup((FOLDER / "page.css").read_text(encoding="utf-8")),  # noqa: S704 - our own file
        small=_small,
        void=Standing.VOID,
        untold=UNTOLD,
    )
    return seen(text)


def anchor(number: int, bench: str) -> str:
    """Where a section is found; a bench may have any name."""
    return f"{re.sub('[^a-z0-9]+', '-', bench.lower()).strip('-') or 'bench'}-{number + 1}"


def _small(spread: Spread) -> Markup:
    return drawing.interval(spread.value, spread.interval.low, spread.interval.high, spread.bound)
