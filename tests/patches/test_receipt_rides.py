"""When the receipt of a step is on its output: not before the device has computed it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import AsyncModelRunnerOutput

from retire.core.fence import Choice
from retire.core.types import RequestId
from retire.engine.plan import Cut, Receipt
from vllm_patches import worker_receipt

LAUNCHED_NS, ARRIVED_NS = 1_000, 9_000


def receipt(seq: int, *, stopped: bool = False) -> Receipt:
    cuts = (Cut(RequestId("a"), Choice.STOP, {}, 1, 0, LAUNCHED_NS),) if stopped else ()
    return Receipt(seq, (8,), cuts, stopped, ended_ns=LAUNCHED_NS, safe_points=0, longest_interval_ns=0)


class FirstRunners(AsyncModelRunnerOutput):
    def __init__(self) -> None:
        self._model_runner_output = SimpleNamespace()

    def get_output(self) -> Any:
        return self._model_runner_output


class SecondRunners(AsyncModelRunnerOutput):
    def __init__(self) -> None:
        self.model_runner_output = SimpleNamespace()

    def get_output(self) -> Any:
        return self.model_runner_output


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Receipt | None], Any]:
    """What the patched `sample_tokens` gives for an output and a receipt."""

    def run(output: Any, made: Receipt | None) -> Any:
        monkeypatch.setattr("retire.engine.worker.guard", lambda: SimpleNamespace(end=lambda: made))
        monkeypatch.setattr(worker_receipt.time, "monotonic_ns", lambda: ARRIVED_NS)
        return worker_receipt.build(lambda _worker, _grammar: output)(None, None)

    return run


def test_an_output_that_is_here_has_it(sample: Any) -> None:
    output = SimpleNamespace()
    assert sample(output, receipt(1)) is output
    assert output.retire_receipt == receipt(1)


@pytest.mark.parametrize("made", [FirstRunners, SecondRunners])
def test_an_output_on_its_way_gets_it_on_arrival(sample: Any, made: Callable[[], AsyncModelRunnerOutput]) -> None:
    output = made()
    held = next(iter(vars(output).values()))
    assert sample(output, receipt(1)) is output
    assert not vars(held), "nothing is said before the device has come there"
    arrived = output.get_output()
    assert arrived is held
    assert arrived.retire_receipt.ends == (8,)
    assert arrived.retire_receipt.ended_ns == ARRIVED_NS


def test_a_step_that_stopped_was_over_when_it_stopped(sample: Any) -> None:
    arrived = sample(FirstRunners(), receipt(1, stopped=True)).get_output()
    assert arrived.retire_receipt.ended_ns == LAUNCHED_NS


def test_two_outputs_on_their_way_get_their_own(sample: Any) -> None:
    first, second = (sample(SecondRunners(), receipt(seq)) for seq in (1, 2))
    assert [output.get_output().retire_receipt.seq for output in (first, second)] == [1, 2]


@pytest.mark.parametrize("output", [None, FirstRunners()])
def test_a_failed_step_and_one_without_scoped_rows_are_left_alone(sample: Any, output: Any) -> None:
    made = receipt(1) if output is None else None
    assert sample(output, made) is output
    assert output is None or not hasattr(output.get_output(), "retire_receipt")
