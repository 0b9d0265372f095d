"""How much of prompts a step computes: what is estimated, and what follows (A.2.2)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retire.core.quantum import CALM_S, HALVINGS, WINDOW_S, Selector, halvings, quanta

PREFILL_S = 0.405  # the paper's, of its largest quantum


def seen(rate: float, scopes: int, seconds: float = 120.0, choices: tuple[int, ...] = (512, 256, 128, 64)) -> Selector:
    """A selector that has seen so many scopes, each revised evenly at that rate."""
    selector, at = Selector(choices), 0.0
    for number in range(int(rate * scopes * seconds)):
        at = (number + 1) / (rate * scopes)
        selector.live(at - 1e-3, scopes)
        selector.revised(at)
    selector.live(0.0, scopes)
    selector.live(max(at, seconds), scopes)
    return selector


@pytest.mark.parametrize("scopes", [4, 8])
@pytest.mark.parametrize(("rate", "chosen"), [(0.0, 512), (0.05, 512), (0.2, 64)])
def test_the_largest_at_zero_and_moderate_pressure_an_eighth_at_high(rate, scopes, chosen):
    """A.2.2: 8192 at zero and moderate revision pressure, 1024 at 0.2, for both concurrencies."""
    assert seen(rate, scopes).choose(PREFILL_S) == chosen


@pytest.mark.parametrize("slower", [0.1, 1.0, 30.0])
def test_what_counts_is_the_rate_over_the_time_of_a_step_not_seconds(slower):
    assert halvings(0.05 / slower * PREFILL_S * slower) == 0
    assert halvings(0.2 / slower * PREFILL_S * slower) == HALVINGS


def test_between_moderate_and_high_the_choice_goes_down_by_halves():
    found = [halvings(rate / 1000 * PREFILL_S) for rate in range(250)]
    assert found == sorted(found)
    assert set(found) == {0, 1, 2, 3}


@given(low=st.floats(0, 1e6), high=st.floats(0, 1e6))
def test_more_pressure_never_means_a_larger_quantum(low, high):
    first, second = sorted((low, high))
    assert 0 <= halvings(first) <= halvings(second) <= HALVINGS


@given(largest=st.integers(1, 1 << 20), unit=st.integers(1, 4096), least=st.integers(1, 64))
def test_quanta_fall_from_all_that_a_step_may_have_in_whole_units(largest, unit, least):
    first, *rest = quanta(largest, unit, least)
    assert first == largest
    assert len(rest) <= HALVINGS
    assert sorted({first, *rest}, reverse=True) == [first, *rest]
    assert all(one % unit == 0 and one >= max(unit, least) for one in rest)


def test_powers_of_two_stay_powers_of_two():
    assert quanta(8192, 16) == (8192, 4096, 2048, 1024)
    assert quanta(512, 32) == (512, 256, 128, 64)
    assert quanta(512, 128) == (512, 256, 128)
    assert quanta(100, 128) == (100,)


def test_nothing_seen_or_measured_is_calm():
    assert Selector((512, 64)).choose(PREFILL_S) == 512
    assert seen(0.2, 8).choose(0.0) == 512


def test_one_revision_says_little_and_many_say_it_at_once():
    selector = Selector((512, 256, 128, 64))
    selector.live(0.0, 8)
    selector.live(2.0, 8)
    selector.revised(2.0)
    assert selector.choose(PREFILL_S) == 512
    for _ in range(9):
        selector.revised(2.0)
    assert selector.choose(PREFILL_S) == 64


def test_what_was_seen_fades_and_scopes_that_are_not_live_do_not_make_it_calm():
    selector = seen(0.2, 4)
    before = selector.pressure
    selector.live(120.0, 0)
    selector.live(120.0 + WINDOW_S, 0)
    assert 0.4 * before < selector.pressure < before
    selector.live(120.0 + 20 * WINDOW_S, 0)
    assert selector.choose(PREFILL_S) == 512


@given(seed=st.integers(0, 200), scopes=st.sampled_from([4, 8]), rate=st.sampled_from([0.05, 0.2]))
def test_the_estimate_comes_near_the_rate(seed, scopes, rate):
    draw, selector, at, sum_ = random.Random(seed), Selector((512,)), 0.0, 0.0
    selector.live(0.0, scopes)
    counted = 0
    while at < 40 * WINDOW_S:
        at += draw.expovariate(rate * scopes)
        selector.live(at, scopes)
        selector.revised(at)
        if at > 3 * WINDOW_S:
            sum_, counted = sum_ + selector.pressure, counted + 1
    assert 0.5 * rate < sum_ / counted < 1.6 * rate


def test_a_revision_that_is_told_of_late_takes_no_time_back():
    selector = Selector((512,))
    selector.live(0.0, 4)
    selector.live(10.0, 4)
    before = selector.pressure, selector._scope_s
    selector.revised(9.0)
    selector.live(10.0, 4)
    assert selector._scope_s == before[1]
    assert selector.pressure == pytest.approx(1 / (before[1] + CALM_S))


def test_steps_are_counted_by_what_they_were_given():
    selector = seen(0.2, 8)
    for step_s in (PREFILL_S, PREFILL_S, 0.0):
        selector.choose(step_s)
    assert selector.steps == {64: 2, 512: 1}
