"""What retirement makes of measurements, with measurements made up."""

from __future__ import annotations

import json

from harness.retirement import PATHS, TAILS, Arm, Trial, _result


def test_a_fence_is_judged_by_its_worst_trial_and_every_planned_trial_must_count():
    def trial(native_ms, fence_ms):
        native = Arm(native_ms, 300.0, step_ms=3000.0)
        return Trial(native, Arm(fence_ms, 100.0, longest_interval_ms=50.0))

    planned = dict.fromkeys((*PATHS, *TAILS), 2)
    found = _result({path.name: [trial(1500.0, 20.0), trial(1500.0, 40.0)] for path in planned}, {}, {}, planned)
    assert found.summary["fence_ratio.long_prefill"] == 50.0
    assert found.summary["fence_over_interval.long_prefill"] == 0.8
    assert found.summary["longest_interval_over_mean.long_prefill"] == 0.5
    assert found.summary["interruption_to_successor_ratio.long_prefill"] == 3.0
    assert found.summary["tail_ms_by_quantum"]["2048"] == {"native": 1500.0, "retire": 30.0}
    assert found.checks == {"every_trial_counts": True}
    none = _result({path.name: [] for path in planned}, {}, {}, planned)
    assert none.checks == {"every_trial_counts": False}
    json.dumps(none.document({}))
