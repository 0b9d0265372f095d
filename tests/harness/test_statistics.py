"""Intervals and corrections against answers known by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.statistics import (
    Bootstrap,
    Interval,
    Verdict,
    at_least,
    at_most,
    holm,
    median_of_ratios,
    ratio_of_medians,
)

times = st.floats(min_value=0.5, max_value=1e4)
some_pairs = st.lists(st.tuples(times, times), min_size=1, max_size=12)
p_values = st.dictionaries(st.integers(), st.floats(min_value=0, max_value=1), min_size=1, max_size=8)


def test_the_two_ratios_differ_where_pairs_are_uneven():
    pairs = [(10, 1), (20, 10), (30, 10)]
    assert ratio_of_medians(pairs) == 20 / 10
    assert median_of_ratios(pairs) == 3.0


def test_two_pairs_resample_to_a_quarter_a_half_and_a_quarter():
    # Ratios 1 and 2: both draws the first 1/4, both the second 1/4, one of each 1/2 with median 1.5.
    found = Bootstrap(median_of_ratios, [(1, 1), (2, 1)])
    assert found.value == 1.5
    assert found.interval(0.95) == Interval(1, 2)
    assert found.interval(0.40) == Interval(1.5, 1.5), "the middle 40 % lie inside the middle half"
    assert found.p_not_above(1) == pytest.approx(1 / 4, abs=0.02)
    assert found.p_not_below(1.5) == pytest.approx(3 / 4, abs=0.02)


def test_an_interval_of_many_pairs_covers_the_ratio_they_were_drawn_from():
    # (n, n) for 1..20 has ratio 1 everywhere; the noise of ±5 % cancels in the median.
    pairs = [(n * (1.05 if n % 2 else 0.95), n) for n in range(1, 21)]
    interval = Bootstrap(median_of_ratios, pairs).interval()
    assert interval.low == pytest.approx(0.95)
    assert interval.high == pytest.approx(1.05)


@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_few_pairs_prove_little_even_when_all_agree(count):
    found = Bootstrap(median_of_ratios, [(n, 2 * n) for n in range(1, count + 1)])
    assert found.p_not_below(1) == max(0.5**count, 1 / 10_001)
    assert found.p_not_above(1) == 1


def test_nothing_measured_has_no_interval():
    with pytest.raises(ValueError, match="no pair"):
        Bootstrap(median_of_ratios, [])


@given(some_pairs, st.floats(min_value=0.1, max_value=50))
@settings(max_examples=30)
def test_equal_ratios_leave_no_doubt(pairs, ratio):
    even = [(below * ratio, below) for _, below in pairs]
    interval = Bootstrap(median_of_ratios, even, resamples=100).interval()
    assert interval.low == pytest.approx(ratio)
    assert interval.high == pytest.approx(ratio)


@given(some_pairs)
@settings(max_examples=30)
def test_the_interval_lies_within_what_was_measured_and_is_the_same_every_time(pairs):
    first, again = (Bootstrap(median_of_ratios, pairs, resamples=200).interval() for _ in range(2))
    ratios = [above / below for above, below in pairs]
    assert first == again
    assert min(ratios) <= first.low <= first.high <= max(ratios)


@given(some_pairs)
@settings(max_examples=30)
def test_a_common_unit_cancels(pairs):
    scaled = [(above * 1024, below * 1024) for above, below in pairs]
    for statistic in (ratio_of_medians, median_of_ratios):
        whole, scaled_up = (Bootstrap(statistic, each, resamples=100) for each in (pairs, scaled))
        assert scaled_up.value == pytest.approx(whole.value)
        assert scaled_up.interval().low == pytest.approx(whole.interval().low)


def test_wider_levels_give_wider_intervals():
    found = Bootstrap(ratio_of_medians, [(n, math.sqrt(n)) for n in range(1, 16)])
    narrow, wide = found.interval(0.5), found.interval(0.99)
    assert wide.low <= narrow.low <= found.value <= narrow.high <= wide.high
    assert wide != narrow


def test_holm_on_a_worked_example():
    # Sorted: 0.005×4, 0.01×3, 0.03×2, and 0.04×1 raised to the one before it.
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})


@given(p_values)
def test_holm_is_never_kinder_than_one_test_nor_harsher_than_bonferroni(found):
    adjusted = holm(found)
    for cell, p in found.items():
        assert p <= adjusted[cell] <= min(1.0, p * len(found)) + 1e-12
    ranked = sorted(found, key=found.__getitem__)
    assert [adjusted[cell] for cell in ranked] == sorted(adjusted.values())


def test_a_target_is_reached_when_the_whole_interval_is_there():
    assert at_least(Interval(34, 40), 34) is Verdict.REACHED
    assert at_least(Interval(33, 40), 34) is Verdict.OPEN
    assert at_least(Interval(30, 33), 34) is Verdict.NOT_REACHED
    assert at_most(Interval(0.9, 1.02), 1.02) is Verdict.REACHED
    assert at_most(Interval(0.9, 1.03), 1.02) is Verdict.OPEN
    assert at_most(Interval(1.03, 1.1), 1.02) is Verdict.NOT_REACHED


def test_so_few_pairs_say_nothing_whatever_their_interval():
    assert at_least(Interval(34, 40), 34, 3) is Verdict.REACHED
    for pairs in (1, 2):
        assert at_least(Interval(40, 40), 34, pairs) is at_least(Interval(30, 30), 34, pairs) is Verdict.OPEN


def test_pairs_of_one_group_are_drawn_together() -> None:
    pairs = [(100 + 5 * group, 100) for group in range(3) for _ in range(100)]
    groups = [group for group in range(3) for _ in range(100)]
    alone, together = Bootstrap(median_of_ratios, pairs), Bootstrap(median_of_ratios, pairs, groups=groups)
    assert alone.value == together.value == 1.05
    assert (alone.interval().low, alone.interval().high) == (1.05, 1.05), "300 pairs, if they are independent"
    assert (together.interval().low, together.interval().high) == (1.0, 1.1), "three starts, which are what differs"
    assert together.p_not_above(1.01) >= 0.125, "three of one kind prove no more"
