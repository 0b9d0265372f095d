"""What is measured of steps, and what follows from it."""

from __future__ import annotations

import pytest

from retire.core.types import Tier, TokenCount
from retire.engine.rates import Rates


def test_what_was_never_measured_is_taken_for_long() -> None:
    rates = Rates(0, None, long_ns=10)
    assert rates.is_long(1, 1)
    assert rates.is_long(2000, 1)


@pytest.mark.parametrize(("took_ns", "long"), [(9, False), (10, True)])
def test_a_decode_step_is_as_long_as_the_ones_before_it(took_ns: int, *, long: bool) -> None:
    rates = Rates(0, None, long_ns=10)
    rates.ran(8, 1, took_ns)
    assert rates.is_long(4, 1) is long


def test_a_prefill_step_is_long_by_its_rows_and_never_shorter_than_a_decode_step() -> None:
    rates = Rates(0, None, long_ns=1000)
    rates.ran(100, 100, 500)
    assert [rates.is_long(rows, rows) for rows in (100, 199, 200)] == [False, False, True]
    rates.ran(1, 1, 1000)
    assert rates.is_long(2, 2)
    assert rates.is_long(20, 20)


def test_steps_with_drafts_are_decode_steps_and_short_tails_are_neither() -> None:
    rates = Rates(0, None)
    rates.ran(20, 5, 500)
    rates.ran(40, 40, 900)
    assert (rates.decode_ns, rates.ns_per_token) == (500, None)
    rates.ran(100, 100, 5000)
    assert rates.least_rows == 10


@pytest.mark.parametrize("decodes", [1, 20, 200])
def test_a_prompt_beside_any_number_of_decodes_is_one(decodes: int) -> None:
    rates = Rates(0, None, long_ns=1000)
    rates.ran(decodes, 1, 10)
    rates.ran(64 + decodes, 64, 20 * (64 + decodes))
    assert (rates.decode_ns, rates.ns_per_token) == (10, 20)
    assert rates.is_long(64 + decodes, 64)
    rates.ran(9 + decodes, 9, 10**6)
    assert (rates.decode_ns, rates.ns_per_token) == (10, 20), "a tail beside them tells nothing"


@pytest.mark.parametrize(("took_ns", "long"), [(9, False), (10, True)])
def test_a_step_that_verifies_many_drafts_is_measured_as_a_decode_step(took_ns: int, *, long: bool) -> None:
    rates = Rates(0, None, long_ns=10, drafts=15)
    rates.ran(4 * 16, 16, took_ns)
    assert (rates.decode_ns, rates.ns_per_token) == (took_ns, None)
    assert rates.is_long(2 * 16, 16) is long


def test_one_odd_step_moves_the_mean_by_a_fifth() -> None:
    rates = Rates(0, None, long_ns=0)
    rates.ran(100, 100, 1000)
    rates.ran(100, 100, 2000)
    assert rates.ns_per_token == pytest.approx(12)


def took_ns(rows: int) -> int:
    """Of a step with a fixed cost."""
    return 3000 + 10 * rows


def test_small_steps_do_not_make_the_largest_look_longer() -> None:
    rates = Rates(0, None, largest=512)
    assert rates.largest_ns == 0
    rates.ran(64, 64, took_ns(64))
    assert rates.largest_ns == pytest.approx(8 * took_ns(64)), "better than nothing"
    rates.ran(512, 500, took_ns(512))
    for _ in range(100):
        rates.ran(64, 64, took_ns(64))
    assert rates.largest_ns == pytest.approx(took_ns(512))


def test_one_odd_large_step_is_not_believed_for_long() -> None:
    rates = Rates(0, None, largest=512)
    rates.ran(512, 512, 100 * took_ns(512))
    for _ in range(100):
        rates.ran(64, 64, took_ns(64))
    assert rates.largest_ns == pytest.approx(8 * took_ns(64))


def test_a_restore_pays_when_it_is_faster_than_computing() -> None:
    rates = Rates(32, lambda tokens: tokens * 5.0, long_ns=0)
    assert rates.pays(TokenCount(64), Tier.DRAM), "what was never measured is tried"
    rates.ran(100, 100, 400)
    assert not rates.pays(TokenCount(64), Tier.DRAM)
    assert rates.pays(TokenCount(64), Tier.HBM)
    assert not rates.pays(TokenCount(31), Tier.HBM)
    for _ in range(20):
        rates.ran(100, 100, 2000)
    assert rates.pays(TokenCount(64), Tier.DRAM)
