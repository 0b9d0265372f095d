"""What retirement makes of measurements, with measurements made up."""

from __future__ import annotations

import json

from harness import retirement
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


def test_another_model_takes_the_place_of_the_small_one_with_as_many_layers_as_it_has(monkeypatch):
    monkeypatch.setattr(retirement, "layers_of", lambda _model: 7)
    layers = {path.name: (path.model, path.layers) for path in retirement._with("mine", [*PATHS, *TAILS])}
    assert layers == {
        "long_prefill": ("mine", 7),
        "draft_verify_prefill": ("mine", 14),
        "active_spec_decode": ("mine", 28),
        "two_kv_groups": ("gemma3-270m", 18),
        "tail_1024": ("mine", 7),
        "tail_2048": ("mine", 7),
    }
    assert retirement._with("smollm2", PATHS) == list(PATHS)


def test_layers_are_read_from_the_models_own_folder(tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 5, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert retirement.layers_of(str(tmp_path)) == 5
