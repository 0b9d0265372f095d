"""Model runner V2's forward call, guarded on the model: with a stand-in for the runner, which needs Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from retire.authority.table import AuthorityTable
from retire.core.fence import Choice
from retire.core.types import RequestId
from retire.engine import second_runner
from retire.engine.plan import PlannedRows, Receipt, StepPlan
from retire.engine.worker import StepGuard
from vllm_patches import worker_step

ROWS, HIDDEN, LAYERS, KEY = 24, 4, 3, 5


class Model(nn.Module):
    """Asks where its attention layers ask.  `meanwhile`: what happens before a layer."""

    def __init__(self, guard: StepGuard) -> None:
        super().__init__()
        self._guard = guard
        self.meanwhile: dict[int, Callable[[], object]] = {}
        self.computed = 0

    def forward(self, *, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        for layer in range(LAYERS):
            self.meanwhile.get(layer, lambda: None)()
            if self._guard.armed:
                self._guard.attention_point(f"layers.{layer}")
            self.computed += 1
        return torch.ones(len(input_ids), HIDDEN)


class Runner:
    """As much of vLLM's as is looked at.  `graph`: the whole step is replayed, the model is not called."""

    def __init__(self, guard: StepGuard) -> None:
        self.model = Model(guard)
        self.model_config = SimpleNamespace(get_hidden_size=lambda: HIDDEN)
        self.dtype, self.device = torch.float16, torch.device("cpu")
        self.use_aux_hidden_state_outputs = self.graph = False
        self.embeds: torch.Tensor | None = None

    def execute_model(self) -> torch.Tensor:
        if self.graph:
            return torch.ones(ROWS, HIDDEN)
        return self.model(input_ids=torch.zeros(ROWS), positions=None, inputs_embeds=self.embeds)


class Step:
    """A step of one request, and the patched method of a runner that is about to launch it."""

    def __init__(self, table: AuthorityTable, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table = table
        self.slot = table.insert(0, KEY, 1)
        self.ticket = table.issue(self.slot, table.raw(self.slot))
        self.guard = StepGuard(table)
        self.runner = Runner(self.guard)
        monkeypatch.setattr(second_runner, "guard", lambda: self.guard)
        monkeypatch.setattr("retire.engine.worker.guard", lambda: self.guard)
        self.worker = SimpleNamespace(model_runner=self.runner, use_v2_model_runner=True)
        self.execute = worker_step.build(lambda worker, _output: worker.model_runner.execute_model())

    def launch(self, *, armed: bool = True, foreign: int = 0) -> tuple[torch.Tensor, Receipt]:
        rows = PlannedRows(RequestId("a"), self.ticket, 0, ROWS)
        output = self.execute(self.worker, SimpleNamespace(retire_plan=StepPlan(1, (rows,), foreign, armed)))
        assert "forward" not in vars(self.runner.model), "the model is as it was"
        assert not self.guard.armed
        receipt = self.guard.end()
        assert receipt is not None
        return output, receipt

    def supersede(self) -> None:
        self.table.advance(self.slot, KEY, self.table.raw(self.slot), 1)
        self.table.lower(self.ticket, 0)


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
    table = AuthorityTable.create(tmp_path / "table", tenants=1, scopes_per_tenant=16, rows=32)
    yield Step(table, monkeypatch)
    table.close()


def test_a_step_that_nobody_revokes_is_the_runners_own(step: Step) -> None:
    output, receipt = step.launch()
    assert (output == 1).all()
    assert receipt.ends == (ROWS,)
    assert receipt.safe_points == LAYERS


@pytest.mark.parametrize("layer", [0, 2])
def test_a_revoked_step_stops_at_the_next_layer_and_gives_zeros_of_the_models_kind(step: Step, layer: int) -> None:
    step.runner.model.meanwhile[layer] = step.supersede
    output, receipt = step.launch()
    assert step.runner.model.computed == layer
    assert output.shape == (ROWS, HIDDEN)
    assert output.dtype == step.runner.dtype
    assert not output.any()
    assert (receipt.stopped, receipt.ends) == (True, (0,))
    assert receipt.cuts[0].choice is Choice.STOP


def test_rows_in_company_run_to_their_end_and_the_receipt_says_so(step: Step) -> None:
    step.runner.model.meanwhile[1] = step.supersede
    output, receipt = step.launch(foreign=3)
    assert (output == 1).all()
    assert (receipt.stopped, receipt.ends) == (False, (ROWS,))


@pytest.mark.parametrize("what", ["unarmed", "replayed", "embeddings", "auxiliary states"])
def test_passes_that_are_not_guarded_run_to_their_end(step: Step, what: str) -> None:
    step.supersede()
    step.runner.graph = what == "replayed"
    step.runner.use_aux_hidden_state_outputs = what == "auxiliary states"
    step.runner.embeds = torch.zeros(ROWS, HIDDEN) if what == "embeddings" else None
    output, receipt = step.launch(armed=what != "unarmed")
    assert (output == 1).all()
    assert (receipt.ends, receipt.safe_points) == ((ROWS,), 0)


def test_an_error_of_the_model_is_its_own(step: Step) -> None:
    def fail() -> None:
        raise ValueError("broken")

    step.runner.model.meanwhile[1] = fail
    with pytest.raises(ValueError, match="broken"):
        step.launch()
    assert "forward" not in vars(step.runner.model)
    assert not step.guard.armed


def test_why_no_rows_are_cut_out_is_said_once(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("retire.engine.trim._log.warning", lambda text, *_: said.append(text))
    for _ in range(2):
        step.launch()
    assert len(said) == 1
    assert "rows are not cut out" in said[0]
