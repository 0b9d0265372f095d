"""The armed step: when it stops, and what its receipt says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from retire.authority.table import AuthorityTable
from retire.core.types import RequestId, Ticket
from retire.engine.plan import PlannedRows, Receipt, StepPlan
from retire.engine.worker import FINE_NS, StepFenced, StepGuard, obsolete

KEY = 77
START, END = 100, 164


@pytest.fixture
def table(tmp_path: Path) -> Iterator[AuthorityTable]:
    made = AuthorityTable.create(tmp_path / "table", tenants=1, scopes_per_tenant=16, rows=32)
    yield made
    made.close()


class Scope:
    """One scope of the table, and tickets of its current epoch."""

    def __init__(self, table: AuthorityTable, key: int = KEY) -> None:
        self.table, self.key = table, key
        self.slot = table.insert(0, key, 1)

    def ticket(self) -> Ticket:
        return self.table.issue(self.slot, self.table.raw(self.slot))

    def advance(self) -> None:
        self.table.advance(self.slot, self.key, self.table.raw(self.slot), 1)

    def cancel(self) -> None:
        self.table.cancel(self.slot, self.key)


def rows(ticket: Ticket, start: int = START, end: int = END) -> PlannedRows:
    return PlannedRows(RequestId(f"r{ticket.row}"), ticket, start, end)


def plan(*planned: PlannedRows, seq: int = 1, foreign: bool = False, armed: bool = True) -> StepPlan:
    return StepPlan(seq, planned, foreign_rows=foreign, armed=armed)


@pytest.mark.parametrize(
    ("current", "limit", "gone"),
    [
        (True, None, False),
        (True, 0, True),  # its client left
        (True, START - 1, False),
        (True, START, False),
        (True, START + 1, False),
        (False, None, True),
        (False, 0, True),
        (False, START - 1, True),
        (False, START, True),  # nothing of the step lies below the limit
        (False, START + 1, False),  # the promised prefix reaches into the step
        (False, END, False),
        (False, END + 1, False),
    ],
)
def test_which_rows_are_obsolete(table: AuthorityTable, current: bool, limit: int | None, gone: bool) -> None:
    scope = Scope(table)
    ticket = scope.ticket()
    if limit is not None:
        table.lower(ticket, limit)
    if not current:
        scope.advance()
    assert obsolete(table, rows(ticket)) is gone


@pytest.mark.parametrize("end", ["released", "released and issued again", "cancelled", "cancelled and revived"])
def test_rows_of_a_ticket_that_is_over_are_obsolete(table: AuthorityTable, end: str) -> None:
    scope = Scope(table)
    ticket = scope.ticket()
    if end.startswith("released"):
        table.release(ticket)
        if "again" in end:
            while table.issue(scope.slot, table.raw(scope.slot)).row != ticket.row:
                pass
    else:
        scope.cancel()
        if "revived" in end:
            table.revive(scope.slot, scope.key, 9)
    assert obsolete(table, rows(ticket))


def test_a_step_stops_only_when_all_its_rows_are_obsolete(table: AuthorityTable) -> None:
    one, two = Scope(table, 1), Scope(table, 2)
    tickets = one.ticket(), one.ticket(), two.ticket()
    guard = StepGuard(table)
    guard.begin(plan(*(rows(ticket) for ticket in tickets)))
    guard.arm()
    guard.safe_point()
    one.advance()
    guard.safe_point()
    table.lower(tickets[2], 0)
    with pytest.raises(StepFenced):
        guard.safe_point()


def test_a_promised_prefix_keeps_the_step_going(table: AuthorityTable) -> None:
    scope = Scope(table)
    ticket = scope.ticket()
    table.lower(ticket, START + 32)
    guard = StepGuard(table)
    guard.begin(plan(rows(ticket)))
    guard.arm()
    scope.advance()
    guard.safe_point()
    table.lower(ticket, START)
    with pytest.raises(StepFenced):
        guard.safe_point()


def test_the_fence_passes_every_handler_of_errors() -> None:
    """A layer that catches Exception must not swallow it."""
    assert not issubclass(StepFenced, Exception)


def test_a_finished_step_has_a_receipt_without_a_stop(table: AuthorityTable) -> None:
    scope = Scope(table)
    guard = StepGuard(table)
    guard.begin(plan(rows(scope.ticket()), seq=41))
    guard.arm()
    before = time.monotonic_ns()
    for _ in range(3):
        guard.safe_point()
    receipt = guard.end()
    assert isinstance(receipt, Receipt)
    assert (receipt.seq, receipt.stopped, receipt.safe_points) == (41, False, 3)
    assert before <= receipt.obsolete_closed_ns <= time.monotonic_ns()


def test_a_stopped_step_says_when_and_after_how_many_points(table: AuthorityTable) -> None:
    scope = Scope(table)
    guard = StepGuard(table)
    guard.begin(plan(rows(scope.ticket()), seq=7))
    guard.arm()
    guard.safe_point()
    time.sleep(0.02)
    scope.advance()
    before = time.monotonic_ns()
    with pytest.raises(StepFenced):
        guard.safe_point()
    after = time.monotonic_ns()
    assert not guard.armed, "the runner's own code must not stop a second time"
    time.sleep(0.02)
    receipt = guard.end()
    assert receipt is not None
    assert (receipt.seq, receipt.stopped, receipt.safe_points) == (7, True, 2)
    assert before <= receipt.obsolete_closed_ns <= after
    assert 20_000_000 <= receipt.longest_interval_ns < 20_000_000 + (after - before) + 1_000_000_000


def test_a_step_without_scoped_rows_has_no_receipt(table: AuthorityTable) -> None:
    guard = StepGuard(table)
    guard.begin(None)
    guard.arm()
    assert not guard.armed
    assert guard.end() is None
    assert guard.end() is None


@pytest.mark.parametrize("armed", [True, False])
def test_only_an_armed_plan_arms(table: AuthorityTable, armed: bool) -> None:
    guard = StepGuard(table)
    guard.begin(plan(rows(Scope(table).ticket()), armed=armed))
    guard.arm()
    assert guard.armed is armed
    receipt = guard.end()
    assert receipt is not None
    assert not receipt.stopped
    assert not guard.armed


def test_nothing_of_a_stopped_step_reaches_the_next(table: AuthorityTable) -> None:
    scope = Scope(table)
    guard = StepGuard(table)
    guard.begin(plan(rows(scope.ticket()), seq=1))
    guard.arm()
    scope.advance()
    with pytest.raises(StepFenced):
        guard.safe_point()
    first = guard.end()
    guard.begin(plan(rows(scope.ticket()), seq=2))
    guard.arm()
    assert guard.armed
    guard.safe_point()
    second = guard.end()
    assert first is not None
    assert second is not None
    assert (second.seq, second.stopped, second.safe_points) == (2, False, 1)
    assert second.obsolete_closed_ns > first.obsolete_closed_ns


def test_a_step_that_was_never_ended_does_not_reach_the_next(table: AuthorityTable) -> None:
    """The runner may end a step without sampling."""
    scope = Scope(table)
    guard = StepGuard(table)
    guard.begin(plan(rows(scope.ticket()), seq=1))
    guard.arm()
    scope.advance()
    guard.begin(None)
    guard.arm()
    assert not guard.armed
    assert guard.end() is None


def test_a_step_is_not_armed_before_its_models_forward(table: AuthorityTable) -> None:
    """What runs before it (a vision tower has linear layers too) has nobody to catch a fence."""
    guard = StepGuard(table)
    guard.begin(plan(rows(Scope(table).ticket())))
    assert not guard.armed


def test_the_inside_of_a_layer_is_asked_once_layers_take_long(table: AuthorityTable, monkeypatch) -> None:
    now_ns = 0
    monkeypatch.setattr("retire.engine.worker.time.monotonic_ns", lambda: now_ns)
    guard = StepGuard(table)
    guard.begin(plan(rows(Scope(table).ticket())))
    guard.arm()
    guard.safe_point()
    assert not guard.fine
    now_ns += FINE_NS
    guard.safe_point()
    assert guard.fine
    now_ns += 1
    guard.safe_point()
    assert guard.fine, "a short interval inside the layer says nothing about the layer"
    guard.disarm()
    assert not guard.fine
