"""What becomes of a revoked request's rows in the step that computes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retire.core.fence import Choice, Rows, decide, useful_end

LAYERS = 30


@st.composite
def situations(draw: st.DrawFn) -> tuple[Rows, dict[str, int]]:
    start = draw(st.integers(0, 5000))
    end = start + draw(st.integers(1, 4096))
    useful = draw(st.sampled_from([start, end]) | st.integers(start, end))
    around = {
        "layers": LAYERS,
        "remaining": draw(st.integers(1, LAYERS)),
        "company": draw(st.sampled_from([0, 0, 1, 8, 500])),
        "least_rows": draw(st.sampled_from([0, 24, 100])),
    }
    return Rows(start, end, useful), around


@given(situations(), st.booleans())
def test_no_open_choice_is_cheaper_and_no_useless_row_goes_on_for_nothing(
    situation: tuple[Rows, dict[str, int]], can_trim: bool
) -> None:
    rows, around = situation
    decided = decide(rows, **around, can_trim=can_trim)
    if rows.useful_end > rows.start:
        assert decided.cost[decided.choice] == min(decided.cost.values())
    assert rows.start <= decided.end <= rows.end
    assert (decided.end < rows.useful_end) == (decided.choice is Choice.STOP and rows.useful_end > rows.start)
    if can_trim:
        assert decided.choice is Choice.STOP or decided.end in (rows.useful_end, rows.end)
        assert rows.useful_end > rows.start or decided.end == rows.start
    else:
        assert decided.end in (rows.start, rows.end)
        assert not around["company"] or decided.choice is Choice.KEEP, "in company nothing can stop by itself"


@given(situations())
def test_rows_that_are_all_useful_finish(situation: tuple[Rows, dict[str, int]]) -> None:
    rows, around = situation
    around["least_rows"] = 0
    assert decide(Rows(rows.start, rows.end, rows.end), **around, can_trim=True).choice is Choice.KEEP


@pytest.mark.parametrize(
    ("useful", "remaining", "choice"),
    [
        (1638, 18, Choice.TRIM),
        (4096, 18, Choice.KEEP),
        (0, 18, Choice.STOP),
        (8, 30, Choice.STOP),  # a handful of rows cost a whole step of their own; the successor's step is paid anyway
        (8, 5, Choice.TRIM),  # nearly done
    ],
)
def test_what_a_long_quantum_does(useful: int, remaining: int, choice: Choice) -> None:
    around = {"layers": LAYERS, "remaining": remaining, "company": 0, "least_rows": 24}
    assert decide(Rows(4096, 8192, 4096 + useful), **around, can_trim=True).choice is choice


def test_in_company_a_handful_of_rows_costs_only_itself() -> None:
    around = {"layers": LAYERS, "remaining": 30, "company": 500, "least_rows": 24}
    decided = decide(Rows(0, 100, 8), **around, can_trim=True)
    assert decided.choice is Choice.TRIM
    assert decided.cost == {Choice.KEEP: 3000, Choice.TRIM: 240, Choice.STOP: 240}


@pytest.mark.parametrize(
    ("limit", "end"),
    [(0, 100), (100, 100), (127, 100), (128, 128), (159, 128), (160, 160), (199, 192), (200, 200), (10**6, 200)],
)
def test_useful_rows_end_at_a_boundary_or_with_the_step(limit: int, end: int) -> None:
    assert useful_end(100, 200, limit, 32) == end
