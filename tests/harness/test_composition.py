"""What composition makes of measurements, with measurements made up."""

from __future__ import annotations

import pytest

from harness import composition
from harness.client import Frame, Reply, says_the_same
from harness.composition import FULL, Arm, Composition, Revision, _Grid
from harness.statistics import Verdict


def said(*tokens, alternatives=()):
    places = [{"tokens": [t], "token_logprobs": [lp], "top_logprobs": [dict(alternatives)]} for t, lp in tokens]
    return Reply(frames=[Frame(1.0, None, "", {"choices": [{"logprobs": place}]}) for place in places])


def test_answers_may_part_at_a_near_tie_and_nowhere_else():
    reference = said(("a", -0.5), ("b", -0.9), alternatives=[("b", -0.9), ("c", -1.0), ("d", -2.0)])
    assert says_the_same(reference, reference)
    assert says_the_same(reference, said(("a", -0.5), ("c", -0.95)))
    assert not says_the_same(reference, said(("a", -0.5), ("d", -1.0)))
    assert not says_the_same(reference, said(("a", -0.5), ("e", -1.0)))
    assert not says_the_same(reference, said(("a", -0.5)))
    assert not says_the_same(said(), said())


def composed(**ttft_ms):
    return {arm: Arm(ms, 0) for arm, ms in ttft_ms.items()}


def grid(trials):
    found = _Grid(list(trials))
    found._screened = trials
    return found


def test_a_cell_fails_only_when_its_interval_is_above_the_bound_and_none_is_dropped():
    revisions = [Revision(2048, 512, 1, share, 0.5) for share in (0.1, 0.4, 0.7)]
    slow = [composed(native_prefix=100.0, native_cold=200.0, trim=110.0 + n) for n in range(12)]
    even = [composed(native_prefix=100.0, native_cold=200.0, trim=100.0 + n % 2) for n in range(12)]
    found = grid(dict(zip(revisions, (slow, even, []), strict=True))).summary()
    assert (found["grid_cells"], found["grid_cells_counted"], found["grid_cells_failing"]) == (3, 2, 1)
    assert found["worst_cell"]["share"] == 0.1
    assert found["worst_ratio_vs_best_native"] > 1.1
    few = grid({revisions[0]: slow[:3]}).summary()
    assert few["grid_cells_failing"] == 0  # three pairs cannot show it
    assert few["grid_cells_above_1_02"] == 1  # but they say so


def test_ours_is_compared_with_the_native_arm_that_is_faster_in_this_cell():
    revision = Revision(2048, 512, 1, 0.1, 0.0)
    found = grid({revision: [composed(native_prefix=120.0, native_cold=100.0, trim=90.0)]}).summary()
    assert found["worst_ratio_vs_best_native"] == 0.9
    cold_once = [composed(native_prefix=80.0, native_cold=100.0, trim=40.0), composed(native_prefix=80.0, trim=40.0)]
    assert grid({revision: cold_once}).summary()["worst_ratio_vs_best_native"] == 0.5


def test_reductions_are_medians_of_paired_changes():
    arms = ("native_prefix", "invalidate", "inherit", "combined", "trim")
    trials = [composed(native_cold=100.0, **dict.fromkeys(arms, ms)) for ms in (30.0, 40.0, 35.0)]
    found = Composition()._result({}, {"equal": True}, FULL, trials, grid({}), {})
    assert found.summary["reduction_vs_native_cold.trim"] == 0.65
    assert [target.verdict for target in found.targets] == [Verdict.REACHED, Verdict.REACHED]
    assert Composition()._result({}, {"equal": True}, FULL, [], grid({}), {}).targets[0].verdict is Verdict.NOT_REACHED


def test_every_server_has_the_default_policy_and_one_stops_no_step(monkeypatch: pytest.MonkeyPatch):
    """Under an exported `always` the one that is not armed would be."""
    monkeypatch.setattr(composition, "serving_side_by_side", lambda *asked: [kind["env"] for kind in asked[2]])
    *armed, unarmed = composition._serving("m", FULL, {}, unarmed=True)
    assert [one["RETIRE_POLICY"] for one in (*armed, unarmed)] == ["selective"] * (composition.SERVERS + 1)
    assert [one.get("RETIRE_ARM_MS") for one in armed] == [None] * composition.SERVERS
    assert int(unarmed["RETIRE_ARM_MS"]) >= 1000 * 1000
    assert composition._serving("m", FULL, {}, unarmed=False) == armed
