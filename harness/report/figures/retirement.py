"""Table 10 as ranges, and the tail by quantum.

Reads cells with `path`, `quantum` and the arms `native` and `retire`: `closed_ms`, one value a trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from harness.report.drawing import Chart, Drawing, Key, Series, Span, Spans, spans
from harness.report.numbers import MS, TIMES, TOKENS
from harness.report.paper import UNTOLD
from harness.report.results import Run, coordinate, positive, values
from harness.retirement import PATHS

LABELS = {
    "long_prefill": "long prefill",
    "draft_verify_prefill": "draft–verify prefill",
    "active_spec_decode": "active speculative decode",
    "two_kv_groups": "two kinds of KV groups",
}
PAPER_TAIL_MS = {4096: 714.9, 8192: 1541.2, 16384: 3886.7}


def boundaries(run: Run) -> Drawing | None:
    """Fence and native boundary, path by path."""
    drawn, rows = [], []
    for path in PATHS:
        native, fence = (_closed(run, path.name, arm) for arm in ("native", "retire"))
        if not native or not fence:
            continue
        ratio = TIMES.text(median(native) / median(fence))
        drawn.append(
            Spans(
                LABELS[path.name],
                (_span("native", native), _span("ours", fence)),
                f"{ratio} (paper {TIMES.exact(path.paper)})",
            )
        )
        rows.append((LABELS[path.name], _range(native), _range(fence), ratio, TIMES.exact(path.paper)))
    if not drawn:
        return None
    told = "; ".join(f"{row[0]}: native {row[1]}, fence {row[2]}, {row[3]}" for row in rows)
    return Drawing(
        title="From revocation to the last obsolete row",
        caption="Median and range of the trials, logarithmic. The ratio is that of the medians.",
        panels=[spans(f"Fence against native boundary: {told}", "obsolete work goes on for", drawn, "ms", log=True)],
        head=("path", "native boundary [least, most]", "fence [least, most]", "ratio", "paper's ratio"),
        rows=rows,
        legend=[Key("native", "native boundary", "circle"), Key("ours", "fence", "circle")],
    )


def tail(run: Run) -> Drawing | None:
    """How long obsolete work goes on, by how much a step computes at once."""
    found: dict[float, tuple[list[float], list[float]]] = {}
    for cell in run.cells:
        path, quantum = cell.cell.get("path"), coordinate(cell, "quantum")
        if quantum and quantum > 0 and (path == PATHS[0].name or str(path).startswith("tail_")):
            native, fence = (positive(values(cell, arm, "closed_ms")) for arm in ("native", "retire"))
            if native and fence:
                found[quantum] = native, fence
    if len(found) < 2:
        return None
    quanta = sorted(found)
    series = [
        _by_quantum("native boundary", "native", quanta, [found[quantum][0] for quantum in quanta], "diamond"),
        _by_quantum("fence", "ours", quanta, [found[quantum][1] for quantum in quanta], "circle"),
    ]
    chart = Chart(
        "Tail by quantum",
        "tokens a step (quantum)",
        "obsolete work goes on for, ms",
        series,
        x_at=quanta,
        log=True,
    )
    paper = "; ".join(f"{MS.exact(took)} at {TOKENS.exact(quantum)}" for quantum, took in PAPER_TAIL_MS.items())
    return Drawing(
        title="The tail by quantum",
        caption=f"Median and range of the trials. The paper's native tail on an H100: {paper}.",
        panels=[chart.panel()],
        head=("quantum", "native boundary [least, most]", "fence [least, most]"),
        rows=[(TOKENS.text(quantum), _range(found[quantum][0]), _range(found[quantum][1])) for quantum in quanta],
        legend=[Key(one.class_, one.name, one.mark) for one in series],
    )


def _closed(run: Run, path: str, arm: str) -> list[float]:
    return positive(
        one for cell in run.cells if cell.cell.get("path") == path for one in values(cell, arm, "closed_ms")
    )


def _by_quantum(name: str, class_: str, quanta: Sequence[float], found: Sequence[Sequence[float]], mark: str) -> Series:
    points = [(quantum, median(one)) for quantum, one in zip(quanta, found, strict=True)]
    return Series(name, class_, points, mark, [(min(one), max(one)) for one in found])


def _span(class_: str, found: Sequence[float]) -> Span:
    return Span(class_, median(found), min(found), max(found), MS.text(median(found)))


def _range(found: Sequence[float]) -> str:
    return f"{MS.text(median(found))} [{MS.bare(min(found))}, {MS.bare(max(found))}]" if found else UNTOLD
