"""The small worlds are exhausted without a violation; planted defects are found, each as what it is.

All worlds together take about a minute; docs/EXPLORATION.md says what they hold.
"""

from __future__ import annotations

import functools
from math import comb

import pytest

from harness.exploration.__main__ import main
from harness.exploration.defects import DEFECTS
from harness.exploration.search import TooLarge, explore
from harness.exploration.world import Rules, World
from harness.exploration.worlds import LARGE, SMALL
from retire.core import TABLE
from retire.core.invariants import Invariant

STATES_AIM = 500_000


@functools.cache
def explored(world):
    """What was found, and the places of the core's states that were seen."""
    rules = Rules(world)
    found = explore(rules)
    return found, {rules.core(number).place for number in range(rules.core_states)}


@pytest.mark.parametrize("world", SMALL, ids=lambda world: world.name.replace(" ", "_"))
def test_no_order_of_events_breaks_an_invariant_or_leads_where_nobody_will_ever_answer(world):
    found, _ = explored(world)
    assert found.counterexample is None, str(found)
    assert found.resting > 0


def test_the_worlds_are_large_enough_to_mean_something():
    assert sum(explored(world)[0].states for world in SMALL) >= STATES_AIM


def test_the_worlds_have_what_the_small_ones_are_asked_to_have():
    assert any(len(set(world.tenants)) == 2 for world in SMALL)
    assert any(len(world.prompts) == 2 for world in SMALL)
    assert any(world.participants == 2 for world in SMALL)
    assert any(len(prompts) == 3 for world in SMALL for prompts in world.prompts)
    assert {"engine", "api", "host"} <= {process for world in SMALL for process in world.crashes}
    assert len({world.name for world in (*SMALL, *LARGE)}) == len(SMALL) + len(LARGE)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name.replace(" ", "_"))
def test_a_planted_defect_is_found_as_what_it_is(defect):
    found = defect.explored().counterexample
    assert found is not None
    assert f"({defect.invariant.name})" in found.why, str(found)
    assert found.path


def test_defects_cover_the_invariants_that_a_world_can_show():
    shown = {defect.invariant for defect in DEFECTS}
    assert shown >= set(Invariant) - {Invariant.ALL_RECEIPTS, Invariant.ISOLATION, Invariant.NAMED_REFUSAL}


def test_a_counterexample_is_as_short_as_it_can_be():
    found = next(defect for defect in DEFECTS if defect.name == "the gate is open").explored().counterexample
    assert found is not None
    assert sum("superseded" in move for move in found.path) == 1
    assert len(found.path) == 7  # it comes, is launched, written, told of, answers, is superseded; and the frame
    assert "a frame goes to the gate" in " ".join(found.path)


def test_a_world_without_end_is_given_up():
    with pytest.raises(TooLarge, match="losses: more than 100 states"):
        explore(Rules(SMALL[0]), 100)


def test_participants_who_differ_by_name_alone_are_one_state():
    def states(participants):
        world = World("one block", (((1, 2, 3),),), ("acme",), blocks=1, participants=participants)
        return explore(Rules(world)).states

    # Of a step, each is working, has written or has told, not all of them told; the request may have been sent again.
    def of_a_step(participants):
        return 2 * (comb(participants + 2, 2) - 1)

    assert [states(n) - states(1) for n in (2, 3)] == [of_a_step(n) - of_a_step(1) for n in (2, 3)]


def test_the_command_counts_and_says_so(capsys):
    assert main(["--world", "host memory"]) == 0
    told = capsys.readouterr().out
    assert "host memory: " in told
    assert "0 of them not shown to hold" in told
    assert main(["--world", "host memory", "--limit", "10"]) == 1
    assert "not exhausted" in capsys.readouterr().out


def test_every_place_of_the_table_is_reached():
    assert set().union(*(explored(world)[1] for world in SMALL)) == {place for place, _ in TABLE}
