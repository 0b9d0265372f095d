"""A host that runs ahead of its device: how far, and whose time the receipts tell."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retire.authority.table import AuthorityTable
from retire.core.fence import Choice
from retire.core.types import RequestId, Ticket
from retire.engine.ahead import RunAhead, run_ahead
from retire.engine.plan import PlannedRows, Receipt, StepPlan
from retire.engine.worker import FINE_NS, StepFenced, StepGuard

LAYER_NS, LAYERS, WINDOW = 1_000_000, 12, 2
START, END, UNIT, KEY = 0, 64, 16, 5


class Device:
    """Takes so long for every layer; the host launches in no time and waits where it is told to.

    `busy`: when it will have computed everything launched.  `now`: of the one clock.
    """

    def __init__(self) -> None:
        self.now = self.busy = 1
        self.marks = 0

    def launch(self, layers: int = 1) -> None:
        self.busy = max(self.busy, self.now) + layers * LAYER_NS

    @property
    def behind(self) -> float:
        """How many layers it has still to compute."""
        return (self.busy - self.now) / LAYER_NS

    def mark(self) -> DeviceMark:
        return DeviceMark(self)

    def run_ahead(self, window: int = WINDOW) -> RunAhead:
        return RunAhead(window, self.mark, clock_ns=lambda: self.now)


class DeviceMark:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._at = 0

    def record(self) -> None:
        self._device.marks += 1
        self._at = self._device.busy

    def synchronize(self) -> None:
        self._device.now = max(self._device.now, self._at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr("retire.engine.worker.time.monotonic_ns", lambda: made.now)
    return made


@pytest.fixture
def table(tmp_path: Path) -> Iterator[AuthorityTable]:
    made = AuthorityTable.create(tmp_path / "table", tenants=1, scopes_per_tenant=16, rows=32)
    yield made
    made.close()


@pytest.fixture
def ticket(table: AuthorityTable) -> Ticket:
    slot = table.insert(0, KEY, 1)
    return table.issue(slot, table.raw(slot))


def revoke(table: AuthorityTable, ticket: Ticket, limit: int = 0) -> None:
    table.advance(ticket.slot, KEY, ticket.raw, 1)
    table.lower(ticket, limit)


class Pass:
    def keep(self, ends: dict[RequestId, int]) -> None:
        self.kept = ends


def begun(guard: StepGuard, ticket: Ticket, *, armed: bool = True, cuttable: bool = True) -> None:
    rows = PlannedRows(RequestId("r"), ticket, START, END)
    guard.begin(StepPlan(1, (rows,), 0, armed, UNIT))
    if armed:
        guard.arm(LAYERS, Pass() if cuttable else None)


def ended(guard: StepGuard) -> Receipt:
    receipt = guard.end()
    assert receipt is not None
    return receipt


@given(window=st.integers(1, 5), steps=st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_the_device_never_has_more_than_two_windows_left(window: int, steps: list[int]) -> None:
    device = Device()
    ahead = device.run_ahead(window)
    for layers in steps:  # from step to step as well
        for _ in range(layers):
            ahead.layer_point()
            assert device.behind <= 2 * window - 1
            device.launch()
            assert device.behind <= 2 * window


def test_without_waiting_it_would_have_the_whole_step_left(device: Device) -> None:
    for _ in range(LAYERS):
        device.launch()
    assert device.behind == LAYERS


def test_the_device_is_never_idle_while_the_host_waits() -> None:
    device = Device()
    ahead, began = device.run_ahead(), device.now
    for _ in range(LAYERS):
        ahead.layer_point()
        device.launch()
    assert device.busy - began == LAYERS * LAYER_NS


def test_a_stop_takes_effect_within_two_windows_and_closes_when_the_device_is_done(
    device: Device, table: AuthorityTable, ticket: Ticket
) -> None:
    guard = StepGuard(table, ahead=device.run_ahead())
    begun(guard, ticket)
    for layer in range(6):
        guard.layer_point(layer)
        device.launch()
    stored_ns = device.now
    revoke(table, ticket)
    with pytest.raises(StepFenced):
        guard.layer_point(6)
    receipt = ended(guard)
    assert device.behind == 0, "what was launched has been computed before anybody says that it has ended"
    assert receipt.ended_ns == receipt.cuts[0].at_ns == device.busy
    assert 0 < receipt.ended_ns - stored_ns <= 2 * WINDOW * LAYER_NS
    assert receipt.arrived(device.now + LAYER_NS) == receipt, "a stop is over when it is over"


def test_rows_are_cut_when_the_device_has_left_them_and_the_rest_goes_on(
    device: Device, table: AuthorityTable, ticket: Ticket
) -> None:
    guard = StepGuard(table, ahead=device.run_ahead())
    begun(guard, ticket)
    for layer in range(5):
        guard.layer_point(layer)
        device.launch()
    revoke(table, ticket, UNIT)
    guard.layer_point(5)
    assert device.behind == 0
    for _ in range(5, LAYERS):
        device.launch()
    receipt = ended(guard)
    (cut,) = receipt.cuts
    assert (cut.choice, cut.end, receipt.ends) == (Choice.TRIM, UNIT, (UNIT,))
    assert cut.at_ns == 1 + 5 * LAYER_NS


def test_the_longest_interval_is_the_devices(device: Device, table: AuthorityTable, ticket: Ticket) -> None:
    guard = StepGuard(table, ahead=device.run_ahead())
    begun(guard, ticket)
    for layer in range(LAYERS):
        guard.layer_point(layer)
        device.launch()
    receipt = ended(guard)
    assert receipt.longest_interval_ns == WINDOW * LAYER_NS, "the host launched all of them in no time"
    assert receipt.safe_points == LAYERS
    assert receipt.arrived(device.busy).ended_ns == device.busy


def test_where_rows_cannot_be_cut_out_the_host_waits_at_each_new_layer(
    device: Device, table: AuthorityTable, ticket: Ticket
) -> None:
    guard = StepGuard(table, ahead=device.run_ahead())
    begun(guard, ticket, cuttable=False)
    for layer in range(LAYERS):
        guard.attention_point(f"layers.{layer}")
        guard.attention_point(f"layers.{layer}")  # KV update, then attention
        device.launch()
        assert device.behind <= 2 * WINDOW
    assert device.marks == LAYERS // WINDOW
    revoke(table, ticket)
    with pytest.raises(StepFenced):
        guard.attention_point("layers.0")
    assert ended(guard).ended_ns == device.busy


def test_inside_a_layer_the_host_waits_for_nothing(device: Device, table: AuthorityTable, ticket: Ticket) -> None:
    guard = StepGuard(table, ahead=device.run_ahead(1))
    begun(guard, ticket)
    device.launch(10 * FINE_NS // LAYER_NS)
    guard.layer_point(0)
    guard.layer_point(1)
    assert not guard.fine, "the linear layers' safe points say nothing about the device"
    marks = device.marks
    guard.safe_point()
    assert device.marks == marks


def test_a_step_without_safe_points_waits_for_nothing(device: Device, table: AuthorityTable, ticket: Ticket) -> None:
    guard = StepGuard(table, ahead=device.run_ahead())
    begun(guard, ticket, armed=False)
    device.launch(LAYERS)
    receipt = ended(guard)
    assert device.marks == 0
    assert device.behind == LAYERS
    assert receipt.arrived(device.busy).ended_ns == device.busy


def test_a_draft_models_layers_are_computed_before_the_step_is_over(
    device: Device, table: AuthorityTable, ticket: Ticket
) -> None:
    guard = StepGuard(table, ahead=device.run_ahead())
    rows = PlannedRows(RequestId("r"), ticket, START, END)
    guard.begin(StepPlan(1, (rows,), 0, False, UNIT), drafts=True)
    guard.drafted()
    device.launch(LAYERS)
    assert ended(guard).ended_ns == device.busy


def test_passes_over_guesses_are_layers_that_the_host_waits_for_as_well(
    device: Device, table: AuthorityTable, ticket: Ticket
) -> None:
    guard = StepGuard(table, ahead=device.run_ahead())
    begun(guard, ticket)
    for _ in range(3):
        guard.arm_guesses()
        for layer in range(LAYERS):
            guard.attention_point(f"draft.layers.{layer}")
            guard.attention_point(f"draft.layers.{layer}")
            device.launch()
            assert device.behind <= 2 * WINDOW
        guard.disarm()
    assert device.marks == 3 * LAYERS // WINDOW
    guard.arm_guesses()
    revoke(table, ticket)
    with pytest.raises(StepFenced):
        guard.attention_point("draft.layers.0")
    assert ended(guard).ended_ns == device.busy


def test_a_host_that_is_its_own_device_waits_for_nothing() -> None:
    from vllm.platforms import current_platform

    assert current_platform.is_cpu() == (run_ahead(WINDOW) is None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no device")
def test_on_a_device_the_host_is_held_back_and_a_catch_up_sees_the_end() -> None:
    ahead = run_ahead(WINDOW)
    assert ahead is not None
    cycles, layer_ns = 20_000_000, []
    for _ in range(2):  # the first one also warms up
        began = time.monotonic_ns()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        layer_ns.append(time.monotonic_ns() - began)
    began = time.monotonic_ns()
    for _ in range(LAYERS):
        ahead.layer_point()
        torch.cuda._sleep(cycles)
    launched = time.monotonic_ns() - began
    assert launched >= (LAYERS - 2 * WINDOW - 1) * layer_ns[1]
    assert ahead.catch_up() - began >= (LAYERS - 1) * layer_ns[1]
    assert torch.cuda.current_stream().query()
