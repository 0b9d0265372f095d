"""While a model's pass runs its layers find no KV connector; whatever becomes of the pass, everybody else does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group, kv_transfer_state
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from retire.core.types import RequestId
from retire.engine.tier import RetireTier, unknown_to_layers
from retire.engine.tier_wire import Ended, Orders, Result
from retire.engine.worker import StepFenced
from vllm_patches import draft_proposal, model_forward, worker_step

ROWS, HIDDEN = 3, 4
ENDS = {"well": None, "stopped": StepFenced, "failed": ValueError, "the process is told to go": SystemExit}


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> RetireTier:
    """The worker's; its transfers are never begun."""
    made: RetireTier = RetireTier.__new__(RetireTier)
    made._connector_metadata = made._reports = None
    made.worker = SimpleNamespace(taken=[], collect=lambda: [(RequestId("a"), Result(1, 0, Ended.DONE, (), 0, 0))])
    made.worker.take = made.worker.taken.append
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", made)
    return made


@maybe_transfer_kv_layer
def layer(layer_name: str) -> str:
    return layer_name


class Pass:
    """The pass of a model whose layers are vLLM's as far as the connector is concerned."""

    def __init__(self, ends: type[BaseException] | None) -> None:
        self._ends = ends
        self.layers: list[str] = []

    def __call__(self, *_: Any, **__: Any) -> torch.Tensor:
        assert not has_kv_transfer_group()
        self.layers.append(layer("layers.0"))
        if self._ends is not None:
            raise self._ends
        return torch.ones(ROWS, HIDDEN)


def targets(run: Pass) -> Callable[[], Any]:
    """V1's model forward, of a pass that is given embeddings: a step's rows are none of its business."""
    runner = SimpleNamespace(
        model_config=SimpleNamespace(get_hidden_size=lambda: HIDDEN), dtype=torch.float32, device=torch.device("cpu")
    )
    return lambda: model_forward.build(run)(runner, inputs_embeds=torch.zeros(ROWS, HIDDEN))


def drafters(run: Pass) -> Callable[[], Any]:
    return lambda: draft_proposal.build(run)(SimpleNamespace())


def seconds(run: Pass) -> Callable[[], Any]:
    """A step of V2's runner that is not armed."""
    runner = SimpleNamespace(model=None, use_aux_hidden_state_outputs=False)
    worker = SimpleNamespace(model_runner=runner, use_v2_model_runner=True)
    return lambda: worker_step.build(run)(worker, SimpleNamespace())


@pytest.mark.parametrize("seam", [targets, drafters, seconds])
@pytest.mark.parametrize("ends", ENDS)
def test_the_connector_is_back_however_a_pass_ends(
    connector: RetireTier, monkeypatch: pytest.MonkeyPatch, seam: Callable[[Pass], Callable[[], Any]], ends: str
) -> None:
    step = SimpleNamespace(wanted=False, begin=lambda *_, **__: None)
    for module in ("forward", "second_runner", "worker"):
        monkeypatch.setattr(f"retire.engine.{module}.guard", lambda: step)
    run = Pass(ENDS[ends])
    try:
        seam(run)()
    except BaseException as error:
        if type(error) is not ENDS[ends]:
            raise
    assert run.layers == ["layers.0"]
    assert get_kv_transfer_group() is connector


def test_a_pass_within_a_pass_does_not_bring_it_back(connector: RetireTier) -> None:
    with unknown_to_layers():
        with unknown_to_layers():
            pass
        assert not has_kv_transfer_group()
    assert get_kv_transfer_group() is connector


def test_a_worker_without_a_connector_gets_none(connector: RetireTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)
    with unknown_to_layers():
        pass
    assert not has_kv_transfer_group()


def test_a_first_runners_step_without_rows_asks_where_it_is_known(
    connector: RetireTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, found = SimpleNamespace(model_runner=None, use_v2_model_runner=False), []
    monkeypatch.setattr("retire.engine.worker.guard", lambda: SimpleNamespace(begin=lambda *_, **__: None))
    worker_step.build(lambda *_: found.append(get_kv_transfer_group()))(worker, SimpleNamespace())
    assert found == [connector]


def test_a_second_runner_keeps_the_connector_itself(connector: RetireTier) -> None:
    """Its steps begin and end transfers while nobody else could find it; without rows, all in one call."""
    active = ActiveKVConnector.__new__(ActiveKVConnector)
    active.kv_connector, active._disabled, active._pending_load_kwargs = connector, False, None
    orders = Orders()
    step = SimpleNamespace(kv_connector_metadata=orders, has_sync_kv_loads=False, finished_req_ids=set())
    with override_forward_context(SimpleNamespace()), unknown_to_layers():
        output = active.no_forward(step)
    assert connector.worker.taken == [orders]
    assert output.kv_connector_output.finished_recving == {"a"}
    assert get_kv_transfer_group() is connector
