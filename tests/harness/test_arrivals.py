"""Plans of versions, on clocks that nobody waits for."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import arrivals
from harness.arrivals import Agenda, Arrival, ArrivalError, GiveUp, Pace, Sizes, Start, agenda, counted, plan
from traces import generate, rows
from traces.rows import Agent, Reason, StartKind, Transition


def row(scope=1, abort_s=10.0, gap_s=0.0, source="S01", **more):
    return Transition(
        source=source,
        scope=scope,
        agent=Agent.GENERATED,
        start_kind=StartKind.TASK_STARTED,
        reason=Reason.INTERRUPTED,
        t_abort_s=abort_s,
        t_start_s=abort_s + gap_s,
        gap_s=gap_s,
        **more,
    )


def starts(planned):
    return [(one.scope, one.number, one.given_up_s, one.start_s) for one in planned.versions]


def test_the_papers_window_has_three_bursts_and_nine_final_versions():
    planned = plan(generate.paper_window(1), Sizes(scale=512 / 8192))
    assert counted(planned) == {
        "scopes": 3,
        "versions": 27,
        "transitions": 24,
        "in_one_act": 24,
        "bursts": 3,
        "final_total": 9,
    }
    assert {(one.prompt_tokens, one.shared_tokens) for one in planned.versions} == {(512, 0)}
    assert [one.start_s for one in planned.versions if one.number == 1] == [0.0] * 3
    assert sorted(scope for scope, number in planned.finals if number == 9) == [1, 2, 3]


def test_the_window_keeps_its_arrivals_and_speed_divides_them():
    window = generate.paper_window(2)
    arrived = sorted(one.t_start_s for one in window)
    for speed in (1.0, 4.0):
        planned = plan(window, Sizes(), speed=speed)
        found = sorted(one.start_s for one in planned.versions if one.number > 1)
        assert found == pytest.approx([at / speed for at in arrived])


def test_a_successor_that_was_waiting_is_one_act_and_one_that_somebody_typed_is_two():
    planned = plan([row(abort_s=10, gap_s=0.01, aborted_turn_s=4), row(abort_s=20, gap_s=6, aborted_turn_s=3)], Sizes())
    assert starts(planned) == [
        (1, 1, None, 0.0),
        (1, 2, pytest.approx(4.01), pytest.approx(4.01)),
        (1, 3, 14.0, 20.0),
    ]
    acts = agenda(planned.versions).due(float("inf"))
    assert [type(act) for _, act in acts] == [Start, Start, GiveUp, Start]


def test_folded_scopes_begin_together_and_have_no_idle_time():
    told = [
        row(scope=1, abort_s=1000, gap_s=5, aborted_turn_s=30),
        row(scope=1, abort_s=9000, gap_s=0.1, aborted_turn_s=7),
        row(scope=2, abort_s=500_000, gap_s=2, aborted_turn_s=None),
    ]
    planned = plan(told, Sizes(), pace=Pace.FOLDED)
    assert starts(planned) == [
        (1, 1, None, 0.0),
        (1, 2, 30.0, 35.0),
        (1, 3, pytest.approx(42.1), pytest.approx(42.1)),
        (2, 1, None, 0.0),
        (2, 2, arrivals.TURN_S, arrivals.TURN_S + 2),
    ]


def test_sizes_come_from_the_row_where_it_has_them_and_from_options_elsewhere():
    sizes = Sizes(prompt_tokens=100, overlap=0.5, scale=0.01, most_tokens=900)
    told = [
        row(abort_s=1, prompt_tokens_before=80_000, prompt_tokens_after=None),
        row(abort_s=2, prompt_tokens_before=50_000, prompt_tokens_after=95_000, common_prefix_lb=40_000),
        row(abort_s=3, prompt_tokens_before=0, prompt_tokens_after=2, common_prefix_lb=0),
    ]
    planned = plan(told, sizes)
    assert [(one.prompt_tokens, one.shared_tokens) for one in planned.versions] == [
        (800, 0),
        (100, 99),
        (900, 80),
        (1, 0),
    ]


def test_a_clock_that_was_set_back_does_not_turn_versions_round():
    planned = plan([row(abort_s=10, gap_s=1, aborted_turn_s=1), row(abort_s=4, gap_s=7)], Sizes())
    assert [one.start_s for one in planned.versions] == sorted(one.start_s for one in planned.versions)
    assert all(one.given_up_s is None or one.given_up_s <= one.start_s for one in planned.versions)


def test_the_scopes_with_most_transitions_are_taken():
    told = [row(scope=1), row(scope=2), row(scope=2, abort_s=20), row(scope=2, abort_s=30, source="S02")]
    assert [len(of) for of in plan(told, Sizes(), scopes=1).scopes.values()] == [3]
    assert len(plan(told, Sizes()).scopes) == 3


def test_a_window_is_the_densest_of_one_source_and_turns_begin_a_second_before_it():
    told = [
        row(abort_s=5, aborted_turn_s=1),
        row(scope=2, abort_s=100, aborted_turn_s=90),
        row(scope=3, abort_s=110, aborted_turn_s=2),
        row(abort_s=105, source="S02"),
    ]
    planned = plan(told, Sizes(), window_s=20)
    assert starts(planned) == [(1, 1, None, 0.0), (1, 2, 1.0, 1.0), (2, 1, None, 9.0), (2, 2, 11.0, 11.0)]
    fast = plan(told, Sizes(), window_s=20, speed=4)
    assert starts(fast) == [(1, 1, None, 0.0), (1, 2, 1.0, 1.0), (2, 1, None, 3.0), (2, 2, 3.5, 3.5)]


def test_a_version_that_was_given_up_long_before_the_window_runs_until_it_begins():
    told = [row(abort_s=999, gap_s=1, aborted_turn_s=90), row(scope=2, abort_s=500, gap_s=510, aborted_turn_s=50)]
    assert starts(plan(told, Sizes(), window_s=20)) == [
        (1, 1, None, 0.0),
        (1, 2, 1.0, 1.0),
        (2, 1, None, 0.0),
        (2, 2, 1.0, 11.0),
    ]


def test_nothing_to_replay_is_said():
    with pytest.raises(ArrivalError):
        plan([], Sizes())


@st.composite
def traces(draw):
    counts = st.none() | st.integers(0, 200_000)
    return [
        row(
            scope=draw(st.integers(1, 4)),
            abort_s=draw(st.floats(0, 1e6)),
            gap_s=draw(st.floats(0, 3600)),
            aborted_turn_s=draw(st.none() | st.floats(0, 3000)),
            prompt_tokens_before=draw(counts),
            prompt_tokens_after=draw(counts),
            common_prefix_lb=draw(counts),
        )
        for _ in range(draw(st.integers(1, 12)))
    ]


@given(traces(), st.sampled_from(Pace), st.floats(0.1, 100), st.floats(0, 1), st.integers(1, 5000))
def test_every_plan_is_one_that_can_be_carried_out(told, pace, speed, overlap, most):
    planned = plan(told, Sizes(overlap=overlap, most_tokens=most), pace=pace, speed=speed)
    assert sum(one.number > 1 for one in planned.versions) == len(told)
    assert min(one.start_s for one in planned.versions) == 0
    for versions in planned.scopes.values():
        assert [one.number for one in versions] == list(range(1, len(versions) + 1))
        assert versions[0].given_up_s is None
        for old, new in pairwise(versions):
            assert old.start_s <= new.given_up_s <= new.start_s
            assert 0 <= new.shared_tokens <= min(old.prompt_tokens, new.prompt_tokens - 1)
            assert 1 <= new.prompt_tokens <= most
    assert {scope for scope, _ in planned.finals} == set(planned.scopes)
    assert len(set(planned.finals)) == len(planned.finals)


@given(st.lists(st.floats(0, 100), max_size=20), st.lists(st.floats(0, 120), max_size=30))
def test_an_agenda_hands_out_everything_once_in_order_and_never_early(times, looks):
    one = Agenda(zip(times, range(len(times)), strict=True))
    given_out = []
    for now in [*sorted(looks), 1000.0]:
        due = one.due(now)
        assert all(at <= now for at, _ in due)
        assert one.next_s() is None or one.next_s() > now
        given_out += due
    assert sorted(number for _, number in given_out) == list(range(len(times)))
    assert [at for at, _ in given_out] == sorted(times)


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.9799600,12,0\n"
)
MOONCAKE = (
    '{"timestamp": 500, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n\n'
    '{"timestamp": 3500, "input_length": 10, "output_length": 4}\n'
)


def test_both_forms_of_arrivals_are_read_from_their_first_one_on():
    assert arrivals.arrivals(io.StringIO(AZURE), until_s=60) == [Arrival(0.0, 4096, 10), Arrival(2.0, 12, 1)]
    assert arrivals.arrivals(io.StringIO(MOONCAKE), until_s=60, speed=2) == [Arrival(0, 4096, 500), Arrival(1.5, 10, 4)]
    assert len(arrivals.arrivals(io.StringIO(MOONCAKE), until_s=3)) == 1
    assert arrivals.arrivals([], until_s=3) == []


@pytest.mark.parametrize(
    "line", ["a,b", AZURE + "x,1,2", AZURE + "2023-11-16 18:17:05,12", "{", '{"timestamp": 1}', "[]"]
)
def test_what_is_no_arrival_is_named(line):
    with pytest.raises(ArrivalError, match=rf"line {line.count(chr(10)) + 1}"):
        arrivals.arrivals(line.splitlines(), until_s=60)


def test_rows_of_a_file_are_what_a_plan_is_made_of():
    out = io.StringIO()
    rows.write(generate.paper_window(3), out)
    again = list(rows.read(out.getvalue().splitlines()))
    assert plan(again, Sizes()).finals == plan(generate.paper_window(3), Sizes()).finals
