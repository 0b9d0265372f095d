"""What rows say, against answers known by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces.test_rows import ROW, ROWS
from traces import statistics
from traces.statistics import densest, inter_arrivals_s, quantile, summary, table, variation


def at(*starts_s, scope=1, source="S01"):
    return [replace(ROW, t_start_s=float(start_s), scope=scope, source=source) for start_s in starts_s]


def test_a_quantile_is_a_value_that_was_measured():
    assert [quantile(range(1, 11), percent) for percent in (0, 10, 11, 50, 90, 100)] == [1, 1, 2, 5, 9, 10]
    with pytest.raises(ValueError, match="no value"):
        quantile([], 50)


def test_variation_is_of_these_gaps_and_no_estimate_from_them():
    """Recorded sources were published so: deviations are divided by their number, not by one less."""
    assert variation([1.0, 3.0]) == 0.5
    assert variation([2.0, 2.0, 2.0]) == 0.0
    assert variation([0.0, 0.0]) is None
    assert variation([1.0]) is None


def test_arrivals_are_starts_in_order():
    assert inter_arrivals_s(at(5, 1, 2)) == [1.0, 3.0]


def test_the_densest_window_is_the_first_of_the_fullest():
    rows = [*at(0, 200, 200.5, 319, 320, scope=1), *at(1000, 1001, 1002, 1003, scope=2), *at(1119, scope=3)]
    window = densest(rows)
    assert (window.from_s, window.transitions, window.scopes) == (1000.0, 5, 2)
    assert window.bursts == (4, 1)
    assert densest(rows, 119).transitions == 5, "both ends belong to it"
    assert densest(rows, 1.0).from_s == 200.0, "of several that are as full, the first"
    assert densest([]) is None


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=40), st.floats(1, 500))
def test_no_window_is_denser(starts_s, window_s):
    dumb = max(sum(start <= other <= start + window_s for other in starts_s) for start in starts_s)
    found = densest(at(*starts_s), window_s)
    assert abs(found.transitions - dumb) <= sum(abs(abs(a - b) - window_s) < 1e-9 for a in starts_s for b in starts_s)
    assert sum(found.bursts) == found.transitions


def test_sources_are_never_mixed():
    """Their clocks have nothing in common, nor have their scopes."""
    one, two = at(0, 10, 20), at(5, 15, 25, source="S02")
    found = summary([one, two])
    assert found["inter_arrival_cv"] == 0.0
    assert found["inter_arrival_s"]["n"] == 4
    assert (found["sources"], found["scopes"]) == (2, 2)
    assert found["transitions_per_hour"] == 360.0
    assert found["densest_window"]["transitions"] == 3


def test_shares_and_counts():
    rows = at(0, 1, 2, 3)
    rows[0] = replace(rows[0], auto_submit=True, prompt_tokens_before=200, prompt_tokens_after=150, common_prefix_lb=50)
    found = summary([rows])
    assert found["share"] == {"auto_submit": 0.25, "compacted": 0.0, "clock_back": 0.0}
    assert found["delta_tokens"]["p50"] == -50
    assert (found["common_prefix_share"]["n"], found["common_prefix_share"]["p50"]) == (1, 0.25)
    assert found["prompt_tokens_after"]["n"] == 1
    assert found["aborted_turn_s"] == {"n": 0}
    assert found["reasons"] == {"interrupted": 4}


@settings(max_examples=30)
@given(st.lists(st.lists(ROWS, max_size=2), min_size=1, max_size=2).filter(any))
def test_any_rows_have_a_summary_that_a_terminal_can_show(sources):
    found = summary(sources)
    assert found["transitions"] == sum(map(len, sources))
    lines = table(found).splitlines()
    assert any(line.startswith("gap_s") for line in lines)
    assert f"transitions: {found['transitions']}" in lines


def test_without_rows_there_is_nothing_to_say():
    with pytest.raises(ValueError, match="no transition"):
        summary([[], []])


def test_the_window_is_the_papers():
    assert statistics.WINDOW_S == 120
