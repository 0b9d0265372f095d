"""Rows that are drawn: the same seed, the same bytes; many of them show the quantiles they were drawn from."""

from __future__ import annotations

import hashlib
import io
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces import generate, measured, rows
from traces.statistics import densest, inter_arrivals_s, variation

SEEDS = range(30)


def written(drawn):
    out = io.StringIO()
    rows.write(drawn, out)
    return out.getvalue()


# ---------------------------------------------------------------- the paper's window (A.1.1 and 7.4)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_papers_window(seed):
    drawn = list(rows.read(written(generate.paper_window(seed)).splitlines()))
    window = densest(drawn, 120.0)
    assert (window.transitions, window.scopes, window.bursts) == (24, 3, (8, 8, 8))
    assert len(drawn) == 24
    assert variation(inter_arrivals_s(drawn)) == pytest.approx(3.568, abs=0.001)
    assert drawn[-1].t_start_s - drawn[0].t_start_s < 120
    assert {row.prompt_tokens_before for row in drawn} == {row.prompt_tokens_after for row in drawn} == {8192}
    assert {row.common_prefix_lb for row in drawn} == {0}


@pytest.mark.parametrize("seed", SEEDS)
def test_in_the_window_a_scope_has_one_turn_at_a_time_and_a_last_one_in_every_burst(seed):
    drawn = generate.paper_window(seed)
    for scope in (1, 2, 3):
        mine = [row for row in drawn if row.scope == scope]
        assert len(mine) == 8
        assert all(before.t_start_s < after.t_abort_s < after.t_start_s for before, after in pairwise(mine))
        for before, after in pairwise(mine):
            assert before.t_start_s + after.aborted_turn_s == pytest.approx(after.t_abort_s)
    finals = {(number // 8, row.scope) for number, row in enumerate(drawn)}
    assert len(finals) == 9, "the paper's nine final versions"


def test_seeds_give_different_windows():
    assert len({written(generate.paper_window(seed)) for seed in SEEDS}) == len(SEEDS)


# ---------------------------------------------------------------- sessions


@pytest.mark.parametrize(
    ("draw", "digest"),
    [
        (lambda: generate.paper_window(7), "f7c4ee5479eefb09"),
        (lambda: generate.sessions(7, 50, 3600.0), "e0f818cf13068102"),
    ],
)
def test_the_same_seed_gives_the_same_bytes_everywhere(draw, digest):
    """Should this change, everybody's seeded rows change."""
    assert hashlib.sha256(written(draw()).encode()).hexdigest()[:16] == digest


def test_drawn_rows_show_the_published_quantiles():
    drawn = generate.sessions(1, 4000, 3600.0)
    firsts = {row.scope: row for row in reversed(drawn)}
    for name, quantiles, of in (
        ("gap_s", measured.GAP_S, drawn),
        ("aborted_turn_s", measured.ABORTED_TURN_S, drawn),
        ("output_tokens_before", measured.OUTPUT_TOKENS, drawn),
        ("new_prompt_chars", measured.PROMPT_CHARS, drawn),
        ("prompt_tokens_before", measured.PROMPT_TOKENS, firsts.values()),
    ):
        for share, value in quantiles.figures:
            below = sum(getattr(row, name) <= value for row in of) / len(of)
            assert below == pytest.approx(share, abs=0.025), (name, share)
    assert sum(row.reason == "interrupted" for row in drawn) / len(drawn) == pytest.approx(132 / 205, abs=0.025)
    kept = sum(row.common_prefix_lb >= 0.95 * row.prompt_tokens_before - 1 for row in drawn)
    assert kept / len(drawn) == pytest.approx(0.696, abs=0.025)
    assert 1.3 < len(drawn) / 4000 < 1.6, "1.464 were measured"


@settings(max_examples=40)
@given(st.integers(), st.integers(1, 10), st.floats(0.1, 1e5))
def test_drawn_rows_could_be_recorded_ones(seed, scopes, span_s):
    drawn = generate.sessions(seed, scopes, span_s)
    assert {row.scope for row in drawn} == set(range(1, scopes + 1))
    assert [row.t_start_s for row in drawn] == sorted(row.t_start_s for row in drawn)
    for row in drawn:
        assert 0 <= row.gap_s <= 3600
        assert row.t_start_s == pytest.approx(row.t_abort_s + row.gap_s)
        assert row.common_prefix_lb <= min(row.prompt_tokens_before, row.prompt_tokens_after)
        assert row.auto_submit == (row.gap_s < rows.AUTO_SUBMIT_S)
        assert rows.Transition.from_json(row.to_json()).to_json() == row.to_json()
    for scope in range(1, scopes + 1):
        mine = [row for row in drawn if row.scope == scope]
        assert all(before.t_start_s <= after.t_abort_s for before, after in pairwise(mine))
        assert all(before.prompt_tokens_after == after.prompt_tokens_before for before, after in pairwise(mine))


@given(st.floats(0, 1))
def test_a_draw_lies_between_the_figures_around_it(share):
    for name, quantiles in vars(measured).items():
        if isinstance(quantiles, measured.Quantiles):
            low = max((v for s, v in quantiles.figures if s < share), default=quantiles.figures[0][1])
            high = min(v for s, v in quantiles.figures if s >= share)
            assert min(low, high) <= quantiles.at(share) <= high, name
