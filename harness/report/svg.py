"""SVG, inline.

Owns: elements and their escaping, marks, axes, and scales from values to places.  Must not know: what is drawn, or any
colour: shapes carry class names, the page's style sheet gives them light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 320.0
LETTER = 6.8  # an average one, at the size of labels


def element(name: str, *children: str, **attributes: object) -> Markup:
    """One SVG element.  `class_` is `class`; of other names `_` is `-`; None is left out."""
    told = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _attribute(value))
        for key, value in attributes.items()
        if value is not None
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), told, Markup("").join(children))  # noqa: S704 - our own name


def _attribute(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def text(x: float, y: float, words: str, anchor: str = "middle", class_: str | None = None) -> Markup:
    """A line of text."""
    return element("text", escape(words), x=x, y=y, text_anchor=anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str, opacity: float | None = None) -> Markup:
    """A filled box; nothing has a negative size."""
    size = {"width": max(0.0, width), "height": max(0.0, height)}
    return element("rect", x=x, y=y, **size, class_=class_, fill_opacity=opacity)


def svg(words: str, height: float, *shapes: str, width: float = WIDTH) -> Markup:
    """A picture and what it says to who does not see it; without words it only repeats what stands beside it."""
    told = {"role": "img", "aria_label": words} if words else {"aria_hidden": "true"}
    return element("svg", *shapes, viewBox=f"0 0 {_attribute(width)} {_attribute(height)}", **told)


@dataclass(frozen=True)
class Scale:
    """From values to places.  `log`: both ends are above 0."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The place of a value; what lies outside is put at the end."""
        low, high, here = (self._measure(one) for one in (self.low, self.high, min(max(value, self.low), self.high)))
        share = (here - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def _measure(self, value: float) -> float:
        return math.log10(value) if self.log else value

    @property
    def ticks(self) -> list[float]:
        """Round values to label, four to eight or so."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [10.0**power for power in powers]
            return [one for one in found if self.low <= one <= self.high]
        rough = (self.high - self.low) / 5 or 1.0
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [step * number for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def linear(values: Iterable[float], start: float, end: float, *, around: Sequence[float] = ()) -> Scale:
    """A scale that has room for these values and for those that must be seen."""
    seen = [*values, *around] or [0.0, 1.0]
    low, high = min(seen), max(seen)
    spare = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Scale(0.0 if low == 0 else low - spare, high + spare, start, end)


def logarithmic(values: Iterable[float], start: float, end: float) -> Scale:
    """The same over whole powers of ten."""
    seen = [one for one in values if one > 0] or [1.0, 10.0]
    low, high = math.floor(math.log10(min(seen))), math.ceil(math.log10(max(seen)))
    return Scale(10.0**low, 10.0 ** max(high, low + 1), start, end, log=True)


def tick(value: float) -> str:
    """A round value on an axis."""
    return (f"{value:,.6g}" if 1e4 <= abs(value) < 1e6 else f"{value:.6g}").replace("-", "−")


def label(x: float, y: float, words: str) -> Markup:
    """A text around a place, kept inside the picture."""
    half = LETTER * len(words) / 2
    return text(min(max(x, half), WIDTH - half), y, words)


def axis(x: Scale, top: float, bottom: float, at: Sequence[float] = ()) -> list[Markup]:
    """Lines from `top` to `bottom` and the values below, at `at` or at round ones; where there is no room, no value."""
    shapes, free = [], -math.inf
    for value in at or x.ticks:
        words = tick(value)
        shapes.append(line(x(value), top, x(value), bottom + 4, "grid"))
        if x(value) - LETTER * len(words) / 2 > free:
            free = x(value) + LETTER * (len(words) / 2 + 1)
            shapes.append(label(x(value), bottom + 16, words))
    return shapes


MARKS: dict[str, Callable[[float, float], Markup]] = {
    "circle": lambda x, y: element("circle", cx=x, cy=y, r=3.6, class_="mark"),
    "square": lambda x, y: element("rect", x=x - 3.2, y=y - 3.2, width=6.4, height=6.4, class_="mark"),
    "diamond": lambda x, y: element("path", d=f"M{x:.2f} {y - 4.6:.2f}l4.6 4.6-4.6 4.6-4.6-4.6z", class_="mark"),
    "triangle": lambda x, y: element("path", d=f"M{x:.2f} {y - 4.4:.2f}l4.4 7.6h-8.8z", class_="mark"),
}
"""Shapes tell series apart where colours do not."""
