"""What the experiments make of measurements, with measurements made up."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from vllm.utils.import_utils import resolve_obj_by_qualname

from harness.client import Frame, Reply, says_the_same
from harness.composition import FULL, Composition, Revision, _Grid
from harness.composition import Arm as ComposedArm
from harness.correctness import ANSWER_TOKENS, Arm, Config, Correctness, Measured, Mode, Said
from harness.faults import EXTENSION, PageFaults
from harness.inheritance import Inheritance
from harness.retirement import PATHS, TAILS, Trial
from harness.retirement import Arm as RetiredArm
from harness.retirement import _result as retired
from harness.statistics import Verdict
from harness.workload import diverging

CONFIG = Config(seed=0, lcp_tokens=4095)
SAID = Said(tuple(range(ANSWER_TOKENS)), tuple(-n / 7 for n in range(ANSWER_TOKENS)))
OTHER = Said(SAID.token_ids, (*SAID.logprobs[:-1], -2.2857142857142856))


def runs(due, cold=SAID):
    return {
        Arm.COLD: [Measured(cold, 0)] * 2,
        Arm.CLEAN_PREFIX: [Measured(SAID, due)] * 2,
        Arm.COMPLETED_PREDECESSOR: [Measured(SAID, due, due)] * 2,
    }


def equal(mode, arms):
    return Correctness()._equal(mode, CONFIG, {CONFIG: arms})


def test_one_token_below_a_block_boundary_reuse_ends_at_the_block_before_or_at_the_grid():
    assert equal(Mode.MODE_MATCHED, runs(3968))
    assert equal(Mode.EXACT, runs(2048))
    assert not equal(Mode.MODE_MATCHED, runs(2048))
    assert not equal(Mode.EXACT, runs(3968))


def test_only_exact_compares_with_a_cold_run():
    assert equal(Mode.MODE_MATCHED, runs(3968, cold=OTHER))
    assert not equal(Mode.EXACT, runs(2048, cold=OTHER))


@pytest.mark.parametrize(
    "wrong",
    [
        Measured(OTHER, 3968, 3968),
        Measured(Said(SAID.token_ids[:-1], SAID.logprobs[:-1]), 3968, 3968),
        Measured(SAID, 3840, 3840),
        Measured(SAID, 0, None),
        Measured(SAID, 0, 3968),
    ],
    ids=["one logprob", "a token short", "a block short", "no certificate", "not adopted"],
)
def test_one_repetition_that_differs_makes_a_configuration_unequal(wrong):
    arms = runs(3968)
    arms[Arm.COMPLETED_PREDECESSOR] = [arms[Arm.COMPLETED_PREDECESSOR][0], wrong]
    assert not equal(Mode.MODE_MATCHED, arms)


@pytest.mark.parametrize("arm", Arm)
def test_a_missing_measurement_makes_a_configuration_unequal(arm):
    arms = runs(3968)
    arms[arm] = arms[arm][:1]
    assert not equal(Mode.MODE_MATCHED, arms)
    arms[arm] = []
    assert not equal(Mode.MODE_MATCHED, arms)


def trial(cold, certified, native):
    return {
        "cold": {"ttft_ms": cold},
        "certified": {"ttft_ms": certified, "fence_ms": 1.0},
        "native_full_hit": {"ttft_ms": native},
    }


def inherited(trials, planned):
    session = SimpleNamespace(checks={"equal": True}, seal={"pins": "abc"})
    return Inheritance(offsets=(4, 16))._result(session, trials, planned)


def test_speedup_and_full_hit_ratio_come_from_the_same_trials():
    found = inherited({4: [trial(4000, 100, 100), trial(4400, 110, 100)], 16: [trial(4200, 105, 105)]}, planned=3)
    assert found.summary["speedup"] == 4200 / 105
    assert found.summary["full_hit_ratio"] == 1.0
    assert found.summary["full_hit_ratio_ci95"] == [1.0, 1.1]
    assert found.summary["full_hit_ratio_by_offset"]["4"]["ratio"] == 1.05
    assert (found.summary["prefix_tokens"], found.summary["trials_counted"]) == (4096, 3)
    assert [target.verdict for target in found.targets] == [Verdict.REACHED, Verdict.OPEN]
    assert [cell.cell["offset_tokens"] for cell in found.cells] == [4, 16]
    assert found.cells[0].arms["certified"] == {"ttft_ms": [100, 110], "fence_ms": [1.0, 1.0]}


def test_when_no_trial_counts_there_is_no_figure_and_no_target_is_reached():
    found = inherited({4: [], 16: []}, planned=6)
    assert found.summary["speedup"] is None
    assert found.summary["full_hit_ratio_ci95"] is None
    assert found.summary["trials_counted"] == 0
    assert {target.verdict for target in found.targets} == {Verdict.NOT_REACHED}
    json.dumps(found.document({}))


def test_zeroed_pages_come_back_byte_for_byte_and_their_neighbours_never_change():
    worker = PageFaults()
    layers = [torch.randn(6, 2, 4, 8).to(torch.bfloat16) for _ in range(3)]
    before = [layer.clone() for layer in layers]
    worker.model_runner = SimpleNamespace(kv_caches=layers)
    saved, neighbours = worker.save_pages([1, 4]), worker.digest_pages([0, 2, 3, 5])
    assert worker.zero_pages([1, 4]) != saved
    assert all(not layer[[1, 4]].any() for layer in layers)
    assert worker.digest_pages([0, 2, 3, 5]) == neighbours
    assert worker.restore_pages([1, 4]) == saved
    assert all(torch.equal(*pair) for pair in zip(layers, before, strict=True))


def test_the_worker_extension_is_found_under_the_name_it_is_asked_for():
    assert resolve_obj_by_qualname(EXTENSION) is PageFaults


@pytest.mark.parametrize("seed", range(5))
def test_diverging_prompts_share_exactly_what_they_should(seed, monkeypatch):
    monkeypatch.setattr("harness.workload._corpus", lambda *_: (7, 7, 7, 7, 7, 7, 9))
    old, new = diverging("nowhere", "tiny", shared=20, tail=3, seed=seed)
    assert len(old) == len(new) == 23
    assert old[:20] == new[:20]
    assert old[20] != new[20]


def test_a_reply_tells_tokens_log_probabilities_and_what_was_cached():
    def frame(at, choices, usage=None):
        return Frame(at, None, "", {"choices": choices, "usage": usage})

    reply = Reply(
        frames=[
            frame(1.0, [{"text": "", "token_ids": []}]),
            frame(2.0, [{"token_ids": [5, 6], "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0]}}]),
            frame(3.0, [], {"prompt_tokens_details": {"cached_tokens": 128}}),
        ]
    )
    assert reply.token_ids == [5, 6]
    assert reply.first_token_at == 2.0
    assert reply.logprobs == [("a", -1.0), ("b", -2.0)]
    assert reply.cached_tokens == 128
    assert Said.by(reply) == Said((5, 6), (-1.0, -2.0))
    assert not Said.by(reply).whole


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
    return {arm: ComposedArm(ms, Reply(), None) for arm, ms in ttft_ms.items()}


def grid(trials):
    found = _Grid(None, list(trials))
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
    session = SimpleNamespace(seal={})
    found = Composition()._result(session, {"equal": True}, FULL, trials, grid({}), {})
    assert found.summary["reduction_vs_native_cold.trim"] == 0.65
    assert [target.verdict for target in found.targets] == [Verdict.REACHED, Verdict.REACHED]
    assert (
        Composition()._result(session, {"equal": True}, FULL, [], grid({}), {}).targets[0].verdict
        is Verdict.NOT_REACHED
    )


def test_a_fence_is_judged_by_its_worst_trial_and_every_planned_trial_must_count():
    def trial(native_ms, fence_ms):
        native = RetiredArm(native_ms, 300.0, Reply(), step_ms=3000.0)
        return Trial(native, RetiredArm(fence_ms, 100.0, Reply(), longest_interval_ms=50.0))

    planned = dict.fromkeys((*PATHS, *TAILS), 2)
    found = retired({path.name: [trial(1500.0, 20.0), trial(1500.0, 40.0)] for path in planned}, {}, {}, planned)
    assert found.summary["fence_ratio.long_prefill"] == 50.0
    assert found.summary["fence_over_interval.long_prefill"] == 0.8
    assert found.summary["longest_interval_over_mean.long_prefill"] == 0.5
    assert found.summary["interruption_to_successor_ratio.long_prefill"] == 3.0
    assert found.summary["tail_ms_by_quantum"]["2048"] == {"native": 1500.0, "retire": 30.0}
    assert found.checks == {"every_trial_counts": True}
    none = retired({path.name: [] for path in planned}, {}, {}, planned)
    assert none.checks == {"every_trial_counts": False}
    json.dumps(none.document({}))
