"""Kinds of drawings.

Owns: what a drawing is, and how series, bars, maps, intervals and bands are put on paper.  Must not know: any bench.
Strategy: a panel is narrow enough for a telephone and is hardly scaled down there; a drawing has as many as it needs,
and they stand side by side where there is room.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from harness.report.svg import (
    LETTER,
    MARKS,
    WIDTH,
    Scale,
    axis,
    element,
    line,
    linear,
    logarithmic,
    rect,
    svg,
    text,
    tick,
)

NARROWEST = 0.8


@dataclass(frozen=True)
class Key:
    """An entry of a legend.  `mark`: of a series; without one it is a bar or a band."""

    class_: str
    words: str
    mark: str | None = None

    @property
    def swatch(self) -> Markup:
        """What it looks like."""
        if self.mark is None:
            return svg("", 12, rect(2, 1, 18, 10, f"bar {self.class_}"), width=22)
        shapes = line(1, 6, 21, 6, "path"), MARKS[self.mark](11.0, 6.0)
        return svg("", 12, element("g", *shapes, class_=f"series {self.class_}"), width=22)


@dataclass(frozen=True)
class Drawing:
    """`caption`: what is to be seen.  `head`, `rows`: all its numbers, as text."""

    title: str
    caption: str
    panels: Sequence[Markup]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: Sequence[Key] = ()

    @property
    def narrow(self) -> bool:
        """Whether another one has room beside it."""
        return len(self.panels) == 1


@dataclass(frozen=True)
class Series:
    """`class_`: gives colour and dashes.  `points`: (x, y).  `whiskers`: (low, high) of each."""

    name: str
    class_: str
    points: Sequence[tuple[float, float]]
    mark: str = "circle"
    whiskers: Sequence[tuple[float, float]] = ()
    joined: bool = True


@dataclass(frozen=True)
class Chart:
    """Series over two axes.

    `x_at`: where the x axis has its values, if not at round ones.  `y_seen`: what y shows in any case.  `rule`: a line
    across.
    """

    title: str
    x_words: str
    y_words: str
    series: Sequence[Series]
    x_at: Sequence[float] = ()
    log: bool = False
    y_seen: Sequence[float] = (0.0,)
    rule: float | None = None

    def panel(self) -> Markup:
        """The picture."""
        xs = [x for one in self.series for x, _ in one.points]
        ys = [y for one in self.series for y in [*(y for _, y in one.points), *itertools.chain(*one.whiskers)]]
        left, right, top, bottom = 46.0, WIDTH - 16, 34.0, 190.0
        if self.log:
            x = Scale(min(xs) / 1.15, max(xs) * 1.15, left, right, log=True)
            y = logarithmic(ys, bottom, top)
        else:
            x, y = linear(xs, left, right), linear(ys, bottom, top, around=self.y_seen)
        told = "; ".join(f"{one.name} " + ", ".join(f"{value:.4g}" for _, value in one.points) for one in self.series)
        return svg(
            f"{self.title}: {told}",
            230.0,
            text(2, 13, self.y_words, "start", "label"),
            *_levels(y, left, right),
            *axis(x, bottom, bottom, self.x_at),
            line(left, bottom, right, bottom, "axis"),
            text((left + right) / 2, 226, self.x_words, class_="label"),
            *([] if self.rule is None else [line(left, y(self.rule), right, y(self.rule), "rule")]),
            *(_drawn(one, x, y) for one in self.series),
        )


def _levels(y: Scale, left: float, right: float) -> Iterator[Markup]:
    for value in y.ticks:
        yield line(left, y(value), right, y(value), "grid")
        yield text(left - 6, y(value) + 4, tick(value), "end")


def _drawn(series: Series, x: Scale, y: Scale) -> Markup:
    places = [(x(one), y(other)) for one, other in series.points]
    shapes = []
    if series.joined and len(places) > 1:
        joined = " ".join(f"{one:.2f},{other:.2f}" for one, other in places)
        shapes.append(element("polyline", points=joined, class_="path"))
    for (place, _), (low, high) in zip(places, series.whiskers, strict=False):
        shapes += [line(place, y(low), place, y(high), "whisker")]
        shapes += [line(place - 3, y(end), place + 3, y(end), "whisker") for end in (low, high)]
    shapes += [MARKS[series.mark](one, other) for one, other in places]
    return element("g", *shapes, class_=f"series {series.class_}")


@dataclass(frozen=True)
class Bar:
    """A labelled bar.  `parts`: class and length, one behind the other.  `range_`: (low, high) of the whole."""

    label: str
    value: str
    parts: Sequence[tuple[str, float]]
    range_: tuple[float, float] | None = None


def bars(words: str, title: str, found: Sequence[Bar], unit: str) -> Markup:
    """Bars from 0, each under its label."""
    ends = [sum(length for _, length in bar.parts) for bar in found]
    ends += [bar.range_[1] for bar in found if bar.range_]
    row, top, left, right = 34.0, 26.0, 8.0, WIDTH - 10
    bottom = top + row * len(found) + 4
    x = Scale(0.0, max(ends, default=0.0) or 1.0, left, right)
    shapes = [_bar(bar, x, top + row * number, right) for number, bar in enumerate(found)]
    return svg(
        words,
        bottom + 36,
        text(2, 13, title, "start", "label"),
        *axis(x, top, bottom),
        text(right, bottom + 32, unit, "end", "label"),
        *shapes,
        line(left, top, left, bottom, "axis"),
    )


def _bar(bar: Bar, x: Scale, y: float, right: float) -> Markup:
    shapes = [text(11, y + 12, bar.label, "start", "halo"), text(right, y + 12, bar.value, "end", "value halo")]
    begin = 0.0
    for class_, length in bar.parts:
        shapes.append(rect(x(begin), y + 17, x(begin + length) - x(begin), 13, f"bar {class_}"))
        begin += length
    if bar.range_ and bar.range_[1] > bar.range_[0]:
        shapes += _whisker(x(bar.range_[0]), x(bar.range_[1]), y + 23.5)
    return element("g", *shapes)


def _whisker(low: float, high: float, y: float) -> list[Markup]:
    return [line(low, y, high, y, "whisker"), *(line(end, y - 3.5, end, y + 3.5, "whisker") for end in (low, high))]


@dataclass(frozen=True)
class Field:
    """A cell of a map.  `tone`: from −1 (good) over 0 to 1 (bad); None where nothing was measured."""

    text: str
    tone: float | None
    marked: bool = False


def heat(
    words: str, title: str, over: tuple[str, Sequence[str]], down: tuple[str, Sequence[str]], fields: Sequence[Field]
) -> Markup:
    """A map, row by row.  `over`, `down`: the words of an axis and its values."""
    left = 12 + LETTER * max((len(one) for one in down[1]), default=0)
    top, row, column = 40.0, 30.0, (WIDTH - left - 4) / max(1, len(over[1]))
    bottom = top + row * len(down[1])
    places = itertools.product(range(len(down[1])), range(len(over[1])))
    cells = [
        shape
        for one, (below, beside) in zip(fields, places, strict=True)
        for shape in _field(one, left + column * beside, top + row * below, column, row)
    ]
    return svg(
        words,
        bottom + 38,
        text(2, 13, title, "start", "label"),
        text(2, 32, down[0], "start"),
        *(text(left - 6, top + row * number + 19, value, "end") for number, value in enumerate(down[1])),
        *cells,
        *(text(left + column * (number + 0.5), bottom + 15, value) for number, value in enumerate(over[1])),
        text((left + WIDTH) / 2, bottom + 32, over[0], class_="label"),
    )


def _field(one: Field, x: float, y: float, width: float, height: float) -> Iterator[Markup]:
    tone = one.tone or 0.0
    class_ = "empty" if one.tone is None else "good" if tone < 0 else "bad"
    yield rect(
        x + 1, y + 1, width - 2, height - 2, f"field {class_}", None if one.tone is None else 0.08 + 0.5 * abs(tone)
    )
    if one.marked:
        yield rect(x + 2, y + 2, width - 4, height - 4, "marked")
    yield text(x + width / 2, y + height / 2 + 4, one.text, class_="value" if one.marked else None)


@dataclass(frozen=True)
class Span:
    """An interval on a line of its own.  `class_`: its colour.  `words`: its value, for a reader."""

    class_: str
    value: float
    low: float
    high: float
    words: str


@dataclass(frozen=True)
class Spans:
    """Intervals that belong together.  `more`: what else is said of them."""

    label: str
    found: Sequence[Span]
    more: str = ""


def spans(
    words: str,
    title: str,
    rows: Sequence[Spans],
    unit: str,
    *,
    rules: Sequence[tuple[str, float]] = (),
    log: bool = False,
) -> Markup:
    """Intervals under labels, over one axis.  `rules`: class and place of lines across."""
    every = [span for row in rows for span in row.found]
    ends = [end for span in every for end in (span.low, span.high, span.value)]
    inner = 10.0, WIDTH - 18 - LETTER * max((len(span.words) for span in every), default=0)
    x = logarithmic(ends, *inner) if log else linear(ends, *inner, around=[place for _, place in rules])
    top, y, shapes = 26.0, 26.0, []
    for row in rows:
        shapes += [text(2, y + 12, row.label, "start", "strong halo"), text(WIDTH - 4, y + 12, row.more, "end", "halo")]
        shapes += [_span(span, x, y + 24 + 20 * number) for number, span in enumerate(row.found)]
        y += 24 + 20 * len(row.found)
    return svg(
        words,
        y + 24,
        text(2, 13, title, "start", "label"),
        *axis(x, top, y),
        *(line(x(place), top - 4, x(place), y, class_) for class_, place in rules),
        *shapes,
        text(WIDTH - 4, y + 16, unit, "end", "label"),
    )


def _span(span: Span, x: Scale, y: float) -> Markup:
    low, high = x(span.low), x(span.high)
    return element(
        "g",
        line(low, y, high, y, "path"),
        *(line(end, y - 4, end, y + 4, "path") for end in (low, high)),
        MARKS["circle"](x(span.value), y),
        text(WIDTH - 4, y + 4, span.words, "end", "value"),
        class_=f"series {span.class_}",
    )


def interval(value: float, low: float, high: float, bound: float) -> Markup:
    """A figure's interval against its aim, small enough for a table."""
    x = linear([value, low, high, bound], 4.0, 92.0)
    span = line(x(low), 9, x(high), 9, "path"), MARKS["circle"](x(value), 9.0)
    return svg("", 18, line(x(bound), 1, x(bound), 17, "rule"), element("g", *span, class_="series ours"), width=96)


Change = tuple[float, Sequence[float]]
"""When, and how thick each band is from then on."""


def steps(
    words: str,
    title: str,
    found: Sequence[Change],
    classes: Sequence[str],
    *,
    end: float,
    most: float,
    rules: Sequence[float],
    x_words: str,
) -> Markup:
    """Bands that are stacked and change at steps, until `end`; `most` is the height of all.  `rules`: lines upright."""
    left, right, top, bottom = 32.0, WIDTH - 8, 30.0, 160.0
    x, y = Scale(0.0, end or 1.0, left, right), Scale(0.0, most or 1.0, bottom, top)
    return svg(
        words,
        202,
        text(2, 13, title, "start", "label"),
        *_levels(y, left, right),
        *(_band(found, number, class_, x, y, end) for number, class_ in enumerate(classes)),
        *(line(x(at), top - 6, x(at), bottom, "burst") for at in rules),
        *axis(x, bottom, bottom),
        line(left, bottom, right, bottom, "axis"),
        text((left + right) / 2, 196, x_words, class_="label"),
    )


def _band(found: Sequence[Change], number: int, class_: str, x: Scale, y: Scale, end: float) -> Markup:
    """What stands on the bands below it; the shortest execution is still seen."""
    boxes = []
    for (at, thick), until in zip(found, [*(at for at, _ in found[1:]), end], strict=True):
        if thick[number]:
            floor, roof = y(sum(thick[:number])), y(sum(thick[: number + 1]))
            boxes.append(f"M{x(at):.2f} {floor:.2f}V{roof:.2f}h{max(NARROWEST, x(until) - x(at)):.2f}V{floor:.2f}z")
    return element("path", d="".join(boxes), class_=f"band {class_}")
