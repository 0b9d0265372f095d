"""How a number is written: the same on the page, in its figures and in Markdown.

Owns: units, decimals, and the unit that a key's name tells.  Must not know: what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.report.results import number
from harness.statistics import Interval

NONE = "none"
LONGEST_TEXT, LONGEST_LIST = 120, 12
FIVE_DIGITS = 1e4


@dataclass(frozen=True)
class Unit:
    """`suffix`: with the space before it, if it has one.  `decimals`: below 10; one less for each digit more.

    `scale`: what a value is multiplied by to be in this unit.
    """

    suffix: str
    decimals: int = 2
    scale: float = 1.0

    def bare(self, value: float) -> str:
        """Without the unit."""
        scaled = value * self.scale
        digits = max(1, math.floor(math.log10(abs(scaled))) + 1) if scaled else 1
        comma = "," if abs(scaled) >= FIVE_DIGITS else ""
        return f"{scaled:{comma}.{max(0, self.decimals + 1 - digits)}f}".replace("-", "−")

    def text(self, value: float) -> str:
        """With the unit."""
        return self.bare(value) + self.suffix

    def exact(self, value: float) -> str:
        """A value that was chosen, not measured: without zeros that say nothing."""
        scaled = value * self.scale
        comma = "," if abs(scaled) >= FIVE_DIGITS else ""
        return f"{scaled:{comma}.10g}{self.suffix}".replace("-", "−")

    def between(self, interval: Interval) -> str:
        """An interval."""
        return f"[{self.bare(interval.low)}, {self.bare(interval.high)}]{self.suffix}"


TIMES = Unit("×")
RATIO = Unit("×", decimals=3)
MS = Unit(" ms")
SECONDS = Unit(" s")
PERCENT = Unit(" %")
SHARE = Unit(" %", scale=100)
TOKENS = Unit(" tokens", decimals=0)
TOKENS_PER_S = Unit(" token/s")
PLAIN = Unit("", decimals=3)
WHOLE = Unit("", decimals=0)
GIB = Unit(" GiB", decimals=1, scale=1 / (1 << 30))


def count(of: str) -> Unit:
    """Whole things of that name."""
    return Unit(f" {of}", decimals=0)


_BY_NAME: Mapping[str, Unit] = {
    "ms": MS,
    "s": SECONDS,
    "pct": PERCENT,
    "tokens": TOKENS,
    "frames": count("frames"),
    "blocks": count("blocks"),
    "pages": count("pages"),
    "pairs": count("pairs"),
    "trials": count("trials"),
    "cells": count("cells"),
    "bytes": count("bytes"),
    "ratio": RATIO,
    "efficiency": RATIO,
    "speedup": TIMES,
    "reduction": SHARE,
}


def unit_of(key: str) -> Unit:
    """What a figure's name says of its unit; the last word that says anything decides."""
    words = key.replace("/", "_").replace(".", "_").split("_")
    return next((_BY_NAME[word] for word in reversed(words) if word in _BY_NAME), PLAIN)


def shown(value: Any, unit: Unit) -> str:
    """Any figure of a summary.  What is counted in whole things and is no whole number is a share or a mean: bare."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    found = number(value)
    if found is not None:
        return _fitting(unit, whole=found == round(found)).text(found)
    if isinstance(value, list | dict):
        return _entries(value, unit)
    text = str(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


def _fitting(unit: Unit, *, whole: bool) -> Unit:
    if unit.decimals == 0 and not whole:
        return PLAIN
    return WHOLE if unit is PLAIN and whole else unit


def _entries(value: list[Any] | dict[str, Any], unit: Unit) -> str:
    """A short list in full; of anything else only how much there is."""
    if isinstance(value, dict) or len(value) > LONGEST_LIST or any(isinstance(one, list | dict) for one in value):
        return f"{len(value)} entries"
    return ", ".join(shown(one, unit) for one in value) or NONE
