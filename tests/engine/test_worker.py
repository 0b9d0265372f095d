"""The armed step: what becomes of its rows, and what its receipt says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from retire.authority.table import AuthorityTable
from retire.core.fence import Choice
from retire.core.types import RequestId, Ticket
from retire.engine.plan import Phase, PlannedRows, Receipt, StepPlan
from retire.engine.worker import FINE_NS, StepFenced, StepGuard

KEY = 77
START, END = 96, 160
UNIT, LAYERS = 32, 4


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


class Pass:
    """Remembers how many rows of whom went on."""

    def __init__(self) -> None:
        self.kept: list[dict[RequestId, int]] = []

    def keep(self, ends: dict[RequestId, int]) -> None:
        self.kept.append(ends)


def rows(ticket: Ticket, start: int = START, end: int = END) -> PlannedRows:
    return PlannedRows(RequestId(f"r{ticket.row}"), ticket, start, end)


def plan(
    *planned: PlannedRows, seq: int = 1, foreign: int = 0, armed: bool = True, unit: int = UNIT, least: int = 0
) -> StepPlan:
    return StepPlan(seq, planned, foreign, armed, unit, least)


def running(
    table: AuthorityTable, told: StepPlan | None, *, patience: int = 0, cuttable: bool = True
) -> tuple[StepGuard, Pass]:
    """A guard in the forward of that step."""
    guard, made = StepGuard(table, patience), Pass()
    guard.begin(told)
    guard.arm(LAYERS, made if cuttable else None)
    return guard, made


@pytest.mark.parametrize(
    ("current", "limit", "useful"),
    [
        (True, None, END),
        (True, 0, START),  # its client left
        (True, START - 1, END),
        (True, START + UNIT, END),
        (False, None, START),
        (False, 0, START),
        (False, START - 1, START),
        (False, START, START),  # nothing of the step lies below the limit
        (False, START + 1, START),  # not a whole unit does
        (False, START + UNIT, START + UNIT),  # the common prefix reaches into the step
        (False, END - 1, END - UNIT),
        (False, END, END),
        (False, END + 1, END),
    ],
)
@pytest.mark.parametrize("layer", [0, 2])
def test_the_useful_rows_go_on(
    table: AuthorityTable, current: bool, limit: int | None, useful: int, layer: int
) -> None:
    scope = Scope(table)
    ticket = scope.ticket()
    guard, made = running(table, plan(rows(ticket)))
    for done in range(layer):
        guard.layer_point(done)
    if limit is not None:
        table.lower(ticket, limit)
    if not current:
        scope.advance()
    if useful == START:
        with pytest.raises(StepFenced):
            guard.layer_point(layer)
    else:
        guard.layer_point(layer)
    receipt = guard.end()
    assert receipt is not None
    assert receipt.ends == (useful,)
    assert receipt.stopped is (useful == START)
    assert made.kept == ([{RequestId(f"r{ticket.row}"): useful - START}] if START < useful < END else [])
    if useful == END:
        assert receipt.cuts == ()
    else:
        (cut,) = receipt.cuts
        assert (cut.choice, cut.layer, cut.end) == (Choice.STOP if useful == START else Choice.TRIM, layer, useful)


def test_a_table_that_has_not_changed_is_read_at_the_first_layer_alone(table: AuthorityTable, monkeypatch) -> None:
    read, limit = [], table.limit
    monkeypatch.setattr(table, "limit", lambda ticket: (read.append(ticket), limit(ticket))[1])
    first, second = Scope(table), Scope(table, KEY + 1)
    gone, staying = first.ticket(), second.ticket()
    guard, made = running(table, plan(rows(gone), rows(staying)))
    guard.layer_point(0)
    read.clear()
    for layer in range(1, LAYERS - 1):
        guard.safe_point()
        guard.layer_point(layer)
    assert not read
    table.lower(gone, START + UNIT)
    first.advance()
    guard.safe_point()
    assert read, "what has become of a ticket is looked at"
    assert not made.kept, "rows are cut out between layers only"
    guard.layer_point(LAYERS - 1)
    assert made.kept == [{RequestId(f"r{gone.row}"): UNIT}]


@pytest.mark.parametrize("end", ["released", "released and issued again", "cancelled", "cancelled and revived"])
@pytest.mark.parametrize("cuttable", [True, False])
def test_rows_of_a_ticket_that_is_over_are_obsolete(table: AuthorityTable, end: str, cuttable: bool) -> None:
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
    guard, _ = running(table, plan(rows(ticket)), cuttable=cuttable)
    with pytest.raises(StepFenced):
        guard.attention_point("layer 0")


def test_rows_of_others_go_on_until_they_are_obsolete_too(table: AuthorityTable) -> None:
    one, two = Scope(table, 1), Scope(table, 2)
    tickets = one.ticket(), one.ticket(), two.ticket()
    guard, made = running(table, plan(*(rows(ticket) for ticket in tickets)))
    names = [RequestId(f"r{ticket.row}") for ticket in tickets]
    guard.layer_point(0)
    assert made.kept == []
    one.advance()
    guard.layer_point(1)
    assert made.kept == [{names[0]: 0, names[1]: 0}]
    table.lower(tickets[2], 0)
    with pytest.raises(StepFenced):
        guard.layer_point(2)
    receipt = guard.end()
    assert receipt is not None
    assert receipt.stopped
    assert [cut.layer for cut in receipt.cuts] == [1, 1, 2]


def test_rows_without_a_scope_always_go_on(table: AuthorityTable) -> None:
    scope = Scope(table)
    ticket = scope.ticket()
    guard, made = running(table, plan(rows(ticket), foreign=5))
    scope.advance()
    guard.safe_point()
    guard.layer_point(0)
    receipt = guard.end()
    assert made.kept == [{RequestId(f"r{ticket.row}"): 0}]
    assert receipt is not None
    assert (receipt.ends, receipt.stopped) == ((START,), False)


def test_inside_a_layer_only_a_whole_step_stops(table: AuthorityTable) -> None:
    scope = Scope(table)
    ticket = scope.ticket()
    guard, made = running(table, plan(rows(ticket)))
    table.lower(ticket, START + UNIT)
    scope.advance()
    guard.safe_point()
    guard.attention_point("layer 0")
    assert made.kept == []
    table.lower(ticket, START)
    with pytest.raises(StepFenced):
        guard.safe_point()


def test_a_limit_that_falls_twice_cuts_twice(table: AuthorityTable) -> None:
    scope = Scope(table)
    ticket = scope.ticket()
    guard, made = running(table, plan(rows(ticket, 0, 4 * UNIT)))
    scope.advance()
    for layer, limit in enumerate((3 * UNIT, UNIT)):
        table.lower(ticket, limit)
        guard.layer_point(layer)
    guard.layer_point(2)
    assert [next(iter(kept.values())) for kept in made.kept] == [3 * UNIT, UNIT]


@pytest.mark.parametrize("patience", [0, 1, 3])
@pytest.mark.parametrize("cuttable", [True, False])
def test_a_limit_that_nobody_sets_is_waited_for_so_many_layers(
    table: AuthorityTable, patience: int, cuttable: bool
) -> None:
    scope = Scope(table)
    guard, _ = running(table, plan(rows(scope.ticket())), patience=patience, cuttable=cuttable)

    def layer(number: int) -> None:
        if cuttable:
            guard.layer_point(number)
        for _ in range(2):
            guard.attention_point(f"layer {number}")
        guard.safe_point()

    scope.advance()
    for number in range(patience):
        layer(number)
    with pytest.raises(StepFenced):
        layer(patience)


def test_a_limit_that_is_set_between_two_looks_does_not_cut_inside_a_layer(
    table: AuthorityTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = Scope(table)
    ticket = scope.ticket()
    guard, made = running(table, plan(rows(ticket)))
    scope.advance()
    looked = guard._wanted_now

    def then_set() -> list[int]:
        found = looked()
        table.lower(ticket, START + UNIT)
        return found

    monkeypatch.setattr(guard, "_wanted_now", then_set)
    with pytest.raises(StepFenced):
        guard.safe_point()
    assert made.kept == []


def test_each_request_is_closed_when_its_own_rows_were_cut(table: AuthorityTable) -> None:
    one, two = Scope(table, 1), Scope(table, 2)
    tickets = one.ticket(), two.ticket()
    guard, _ = running(table, plan(*(rows(ticket) for ticket in tickets)))
    names = [RequestId(f"r{ticket.row}") for ticket in tickets]
    one.advance()
    guard.layer_point(1)
    between = time.monotonic_ns()
    two.advance()
    table.lower(tickets[1], END)
    guard.layer_point(2)
    receipt = guard.end()
    assert receipt is not None
    assert receipt.obsolete_closed_ns(names[0]) <= between <= receipt.obsolete_closed_ns(names[1])
    assert receipt.cut_of(names[1]) is None, "all of it is still wanted"


def test_a_step_that_cannot_be_cut_stops_when_the_last_current_request_is_revoked(table: AuthorityTable) -> None:
    one, two = Scope(table, 1), Scope(table, 2)
    tickets = one.ticket(), two.ticket()
    guard, _ = running(table, plan(*(rows(ticket) for ticket in tickets)), cuttable=False)
    one.advance()
    guard.attention_point("layer 0")
    two.cancel()
    with pytest.raises(StepFenced):
        guard.attention_point("layer 1")
    receipt = guard.end()
    assert receipt is not None
    assert {cut.request for cut in receipt.cuts if cut.choice is Choice.STOP} == {
        RequestId(f"r{ticket.row}") for ticket in tickets
    }


def test_a_limit_that_comes_in_time_is_obeyed(table: AuthorityTable) -> None:
    scope = Scope(table)
    ticket = scope.ticket()
    guard, made = running(table, plan(rows(ticket)), patience=1)
    scope.advance()
    guard.layer_point(0)
    table.lower(ticket, START + UNIT)
    guard.layer_point(1)
    assert [next(iter(kept.values())) for kept in made.kept] == [UNIT]


@pytest.mark.parametrize(("layer", "stops"), [(0, True), (1, True), (2, False), (3, False)])
def test_a_step_that_cannot_be_cut_stops_or_goes_on_whichever_costs_less(
    table: AuthorityTable, layer: int, stops: bool
) -> None:
    """32 of 64 rows are useful: going on costs 64 rows in what is left of four layers, stopping 32 in all four."""
    scope = Scope(table)
    ticket = scope.ticket()
    guard, _ = running(table, plan(rows(ticket)), cuttable=False)
    for done in range(layer):
        guard.attention_point(f"layer {done}")
        guard.attention_point(f"layer {done}")
    table.lower(ticket, START + UNIT)
    scope.advance()
    if stops:
        with pytest.raises(StepFenced):
            guard.attention_point(f"layer {layer}")
    else:
        guard.attention_point(f"layer {layer}")
    receipt = guard.end()
    assert receipt is not None
    assert receipt.ends == ((START,) if stops else (END,))
    (cut,) = receipt.cuts
    assert cut.cost == {Choice.KEEP: 64 * (LAYERS - layer), Choice.STOP: 32 * LAYERS}


@pytest.mark.parametrize("foreign", [0, 3])
def test_a_step_that_cannot_be_cut_goes_on_for_whoever_is_current_in_it(table: AuthorityTable, foreign: int) -> None:
    one, two = Scope(table, 1), Scope(table, 2)
    planned = [rows(one.ticket())] + ([] if foreign else [rows(two.ticket())])
    guard, _ = running(table, plan(*planned, foreign=foreign), cuttable=False)
    one.advance()
    for layer in range(LAYERS):
        guard.attention_point(f"layer {layer}")
    receipt = guard.end()
    assert receipt is not None
    assert set(receipt.ends) == {END}


def test_a_pass_that_starts_again_has_all_its_rows(table: AuthorityTable) -> None:
    scope = Scope(table)
    ticket = scope.ticket()
    guard, _ = running(table, plan(rows(ticket)))
    table.lower(ticket, START + UNIT)
    scope.advance()
    guard.layer_point(1)
    guard.uncut()
    assert not guard.armed
    receipt = guard.end()
    assert receipt is not None
    assert (receipt.ends, receipt.cuts) == ((END,), ())


def test_the_fence_passes_every_handler_of_errors() -> None:
    """A layer that catches Exception must not swallow it."""
    assert not issubclass(StepFenced, Exception)


def test_a_finished_step_has_a_receipt_without_a_stop(table: AuthorityTable) -> None:
    guard, _ = running(table, plan(rows(Scope(table).ticket()), seq=41))
    before = time.monotonic_ns()
    for layer in range(3):
        guard.layer_point(layer)
    receipt = guard.end()
    assert receipt is not None
    assert (receipt.seq, receipt.ends, receipt.stopped, receipt.safe_points) == (41, (END,), False, 3)
    assert before <= receipt.ended_ns <= time.monotonic_ns()


def test_a_stopped_step_says_when_and_after_how_many_points(table: AuthorityTable) -> None:
    scope = Scope(table)
    guard, _ = running(table, plan(rows(scope.ticket()), seq=7))
    guard.layer_point(0)
    time.sleep(0.02)
    scope.advance()
    before = time.monotonic_ns()
    with pytest.raises(StepFenced):
        guard.layer_point(1)
    after = time.monotonic_ns()
    assert not guard.armed, "the runner's own code must not stop a second time"
    time.sleep(0.02)
    receipt = guard.end()
    assert receipt is not None
    assert (receipt.seq, receipt.stopped, receipt.safe_points) == (7, True, 2)
    assert before <= receipt.ended_ns <= after
    assert 20_000_000 <= receipt.longest_interval_ns < 20_000_000 + (after - before) + 1_000_000_000


def test_a_step_without_scoped_rows_has_no_receipt(table: AuthorityTable) -> None:
    guard, _ = running(table, None)
    assert not guard.armed
    assert not guard.wanted
    assert guard.end() is None
    assert guard.end() is None


@pytest.mark.parametrize("armed", [True, False])
def test_only_an_armed_plan_arms(table: AuthorityTable, armed: bool) -> None:
    guard, _ = running(table, plan(rows(Scope(table).ticket()), armed=armed))
    assert guard.wanted is armed
    assert guard.armed is armed
    receipt = guard.end()
    assert receipt is not None
    assert (receipt.ends, receipt.stopped) == ((END,), False)
    assert not guard.armed


def test_nothing_of_a_stopped_step_reaches_the_next(table: AuthorityTable) -> None:
    scope = Scope(table)
    guard, _ = running(table, plan(rows(scope.ticket()), seq=1))
    scope.advance()
    with pytest.raises(StepFenced):
        guard.safe_point()
    first = guard.end()
    guard.begin(plan(rows(scope.ticket()), seq=2))
    guard.arm(LAYERS)
    assert guard.armed
    guard.safe_point()
    second = guard.end()
    assert first is not None
    assert second is not None
    assert (second.seq, second.ends, second.cuts, second.safe_points) == (2, (END,), (), 1)
    assert second.ended_ns > first.ended_ns


def test_a_step_that_was_never_ended_does_not_reach_the_next(table: AuthorityTable) -> None:
    """The runner may end a step without sampling."""
    scope = Scope(table)
    guard, _ = running(table, plan(rows(scope.ticket())))
    scope.advance()
    guard.begin(None)
    guard.arm(LAYERS)
    assert not guard.armed
    assert guard.end() is None


def test_a_step_is_not_armed_before_its_models_forward(table: AuthorityTable) -> None:
    scope = Scope(table)
    guard = StepGuard(table)
    guard.begin(plan(rows(scope.ticket())))
    assert not guard.armed
    assert guard.wanted


def test_the_inside_of_a_layer_is_asked_once_layers_take_long(table: AuthorityTable, monkeypatch) -> None:
    now_ns = 0
    monkeypatch.setattr("retire.engine.worker.time.monotonic_ns", lambda: now_ns)
    guard, _ = running(table, plan(rows(Scope(table).ticket())))
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


class Code:
    """Which safe points are in vLLM's code; a switch that changes nothing is one too many."""

    def __init__(self) -> None:
        self.live = {"attention": True, "linear": True}  # as installed
        self.switched = 0

    def __call__(self, layers: str, *, live: bool) -> None:
        assert self.live[layers] is not live
        self.live[layers] = live
        self.switched += 1

    def of(self, guard: StepGuard) -> tuple[bool, bool]:
        """Attention's and linear layers', which are what the guard says."""
        found = self.live["attention"], self.live["linear"]
        assert found == (guard.armed, guard.fine)
        return found


def test_safe_points_are_in_the_models_code_only_while_they_are_live(table: AuthorityTable, monkeypatch) -> None:
    now_ns, code = 0, Code()
    monkeypatch.setattr("retire.engine.worker.time.monotonic_ns", lambda: now_ns)
    guard = StepGuard(table, switch=code)
    assert code.of(guard) == (False, False), "as long as nothing is armed"
    code.switched = 0
    guard.begin(None)
    guard.end()
    guard.begin(plan(rows(Scope(table).ticket()), armed=False))
    guard.arm(LAYERS, Pass())
    guard.end()
    assert code.switched == 0
    guard.begin(plan(rows(Scope(table).ticket())))
    assert code.switched == 0, "what lies before the forward has no safe points"
    guard.arm(LAYERS, Pass())
    guard.layer_point(0)
    assert code.of(guard) == (True, False)
    for _ in range(2):
        now_ns += FINE_NS
        guard.safe_point()
        assert code.of(guard) == (True, True)
    guard.disarm()
    assert code.of(guard) == (False, False)
    guard.end()
    assert code.switched == 4


def test_every_way_out_of_a_pass_takes_its_safe_points_out(table: AuthorityTable, monkeypatch) -> None:
    now_ns, code = 0, Code()
    monkeypatch.setattr("retire.engine.worker.time.monotonic_ns", lambda: now_ns)
    guard, scope = StepGuard(table, switch=code), Scope(table)
    guard.begin(plan(rows(scope.ticket())), drafts=True)
    guard.arm(LAYERS, Pass())
    now_ns += FINE_NS
    guard.layer_point(0)
    assert code.of(guard) == (True, True)
    guard.uncut()
    assert code.of(guard) == (False, False)
    guard.arm(LAYERS, Pass(), Phase.DRAFT)
    now_ns += FINE_NS
    guard.layer_point(0)
    guard.arm_guesses()
    assert code.of(guard) == (True, False), "each pass begins outside its layers"
    now_ns += FINE_NS
    guard.safe_point()
    guard.begin(plan(rows(scope.ticket())))
    assert code.of(guard) == (False, False), "nobody has ended the step before"
    guard.arm(LAYERS)
    now_ns += FINE_NS
    guard.attention_point("layers.0")
    assert code.of(guard) == (True, True)
    scope.advance()
    with pytest.raises(StepFenced):
        guard.attention_point("layers.1")
    assert code.of(guard) == (False, False)
    guard.begin(plan(rows(scope.ticket())))
    scope.advance()
    with pytest.raises(StepFenced):
        guard.arm_guesses()
    assert code.of(guard) == (False, False)


def test_what_lies_between_passes_is_an_interval_but_not_a_long_layer(table: AuthorityTable, monkeypatch) -> None:
    now_ns = 0
    monkeypatch.setattr("retire.engine.worker.time.monotonic_ns", lambda: now_ns)
    guard, _ = running(table, plan(rows(Scope(table).ticket())))
    guard.safe_point()
    for longest_ns, begin in ((2 * FINE_NS, partial(drafting, guard)), (3 * FINE_NS, guard.arm_guesses)):
        now_ns += longest_ns
        guard.disarm()
        begin()
        guard.safe_point()
        assert not guard.fine
    now_ns += 4 * FINE_NS
    receipt = guard.end()
    assert receipt is not None
    assert receipt.longest_interval_ns == 4 * FINE_NS, "the last one ends with the step"


# -- a draft model's pass behind the target's ---------------------------------------------------------------------


def drafting(guard: StepGuard, *, cuttable: bool = True) -> Pass:
    """The target's pass of a step is over, the draft model's begins."""
    guard.disarm()
    made = Pass()
    guard.arm(LAYERS, made if cuttable else None, Phase.DRAFT)
    return made


def ended(guard: StepGuard) -> Receipt:
    receipt = guard.end()
    assert receipt is not None
    return receipt


def test_the_draft_models_pass_begins_with_the_rows_that_the_targets_ended_with(table: AuthorityTable) -> None:
    one, two = Scope(table, 1), Scope(table, 2)
    tickets = one.ticket(), two.ticket()
    guard, _ = running(table, plan(*(rows(ticket) for ticket in tickets)))
    one.advance()
    table.lower(tickets[0], START + UNIT)
    guard.layer_point(1)
    made = drafting(guard)
    guard.layer_point(0)
    guard.layer_point(1)
    assert made.kept == [{RequestId(f"r{tickets[0].row}"): UNIT}], "the other has all, and those that are drafted from"
    receipt = ended(guard)
    assert receipt.ends == (START + UNIT, END)
    assert [cut.phase for cut in receipt.cuts] == [Phase.TARGET]


@pytest.mark.parametrize("useful", [0, UNIT])
def test_rows_that_lose_their_use_while_a_draft_model_computes_them_go_there(
    table: AuthorityTable, useful: int
) -> None:
    scope = Scope(table)
    ticket = scope.ticket()
    guard, _ = running(table, plan(rows(ticket)))
    guard.layer_point(0)
    made = drafting(guard)
    guard.layer_point(0)
    table.lower(ticket, START + useful)
    scope.advance()
    if useful:
        guard.layer_point(2)
        assert made.kept == [{RequestId(f"r{ticket.row}"): useful}]
    else:
        with pytest.raises(StepFenced):
            guard.layer_point(2)
    receipt = ended(guard)
    (cut,) = receipt.cuts
    assert (cut.phase, cut.layer) == (Phase.DRAFT, LAYERS + 2)
    assert receipt.ends == (START + useful,), "what the draft model's layers lack is not complete"
    assert receipt.stopped is (useful == 0)


def test_stopping_in_the_draft_models_pass_costs_the_targets_layers_too(table: AuthorityTable) -> None:
    scope = Scope(table)
    ticket = scope.ticket()
    guard, _ = running(table, plan(rows(ticket)), cuttable=False)
    guard.attention_point("layer 0")
    drafting(guard, cuttable=False)
    guard.attention_point("draft layer 0")
    table.lower(ticket, START + UNIT)
    scope.advance()
    guard.attention_point("draft layer 1")
    (cut,) = ended(guard).cuts
    assert cut.cost == {Choice.KEEP: 64 * (LAYERS - 1), Choice.STOP: UNIT * 2 * LAYERS}
    assert cut.choice is Choice.KEEP


def test_a_step_that_nobody_drafted_for_leaves_holes_in_the_draft_models_layers(table: AuthorityTable) -> None:
    guard, made = StepGuard(table), plan(rows(Scope(table).ticket()))
    for drafted, end in ((False, START), (True, END)):
        guard.begin(made, drafts=True)
        if drafted:
            guard.drafted()
        assert ended(guard).ends == (end,)


def test_guesses_that_nobody_will_verify_are_not_made(table: AuthorityTable) -> None:
    one, two = Scope(table, 1), Scope(table, 2)
    tickets = one.ticket(), two.ticket()
    guard, _ = running(table, plan(*(rows(ticket) for ticket in tickets)))
    drafting(guard)
    one.advance()
    table.lower(tickets[0], START + UNIT)
    guard.layer_point(0)
    guard.disarm()
    guard.arm_guesses()
    assert guard.armed
    guard.attention_point("draft layer 0")
    two.cancel()
    table.lower(tickets[1], END)
    with pytest.raises(StepFenced):
        guard.attention_point("draft layer 1")
    receipt = ended(guard)
    assert (receipt.stopped, receipt.phase) == (True, Phase.DRAFT)
    assert receipt.ends == (START + UNIT, END), "every row of the step was written before the first guess"
    assert [(cut.request, cut.choice) for cut in receipt.cuts] == [(RequestId(f"r{tickets[0].row}"), Choice.TRIM)]
    assert receipt.phase_of(RequestId(f"r{tickets[1].row}")) is Phase.DRAFT


def test_guesses_beside_rows_without_a_scope_are_made(table: AuthorityTable) -> None:
    scope = Scope(table)
    guard, _ = running(table, plan(rows(scope.ticket()), foreign=1))
    scope.advance()
    guard.arm_guesses()
    guard.attention_point("draft layer 0")
    guard.safe_point()
    assert not ended(guard).stopped


def test_a_draft_models_pass_that_starts_again_has_the_rows_that_the_target_left(table: AuthorityTable) -> None:
    scope = Scope(table)
    ticket = scope.ticket()
    guard, _ = running(table, plan(rows(ticket, 0, 4 * UNIT)))
    scope.advance()
    table.lower(ticket, 3 * UNIT)
    guard.layer_point(1)
    drafting(guard)
    table.lower(ticket, UNIT)
    guard.layer_point(1)
    guard.uncut()
    receipt = ended(guard)
    assert receipt.ends == (3 * UNIT,)
    assert len(receipt.cuts) == 1


def test_a_limit_is_waited_for_across_both_passes(table: AuthorityTable) -> None:
    scope = Scope(table)
    guard, _ = running(table, plan(rows(scope.ticket())), patience=2)
    scope.advance()
    guard.layer_point(LAYERS - 1)
    drafting(guard)
    guard.layer_point(0)
    with pytest.raises(StepFenced):
        guard.layer_point(1)


# -- steps in flight ----------------------------------------------------------------------------------------------


def test_a_later_step_of_a_cut_request_counts_for_nothing(table: AuthorityTable) -> None:
    """It was launched before, on top of rows that do not exist now."""
    scope = Scope(table)
    ticket = scope.ticket()
    guard, _ = running(table, plan(rows(ticket, 0, 2 * UNIT)))
    scope.advance()
    table.lower(ticket, 4 * UNIT)
    table.lower(ticket, UNIT)
    guard.layer_point(1)
    assert ended(guard).ends == (UNIT,)
    guard.begin(plan(rows(ticket, 2 * UNIT, 4 * UNIT), seq=2))
    guard.arm(LAYERS, Pass())
    with pytest.raises(StepFenced):
        guard.layer_point(0)
    receipt = ended(guard)
    assert (receipt.stopped, receipt.ends) == (True, (2 * UNIT,))
    assert receipt.cuts[0].choice is Choice.STOP
    guard.begin(plan(rows(ticket, 4 * UNIT, 5 * UNIT), seq=3, armed=False))
    assert ended(guard).ends == (4 * UNIT,), "nor does one without safe points"


def test_rows_that_the_limit_still_wants_are_of_no_use_behind_a_hole(table: AuthorityTable) -> None:
    """Nobody had said how much is wanted when the first was stopped."""
    scope, other = Scope(table), Scope(table, 2)
    ticket, theirs = scope.ticket(), other.ticket()
    guard, _ = running(table, plan(rows(ticket, 0, 2 * UNIT)), cuttable=False)
    scope.advance()
    with pytest.raises(StepFenced):
        guard.attention_point("layer 0")
    assert ended(guard).ends == (0,)
    table.lower(ticket, 8 * UNIT)
    guard.begin(plan(rows(ticket, 2 * UNIT, 3 * UNIT), rows(theirs, 0, UNIT), seq=2))
    made = Pass()
    guard.arm(LAYERS, made)
    guard.layer_point(0)
    assert made.kept == [{RequestId(f"r{ticket.row}"): 0}]
    assert ended(guard).ends == (2 * UNIT, UNIT)


def test_a_request_that_starts_over_leaves_its_hole_behind(table: AuthorityTable) -> None:
    scope = Scope(table)
    ticket = scope.ticket()
    guard, _ = running(table, plan(rows(ticket, 0, 2 * UNIT)))
    scope.advance()
    table.lower(ticket, UNIT)
    guard.layer_point(1)
    ended(guard)
    guard.begin(plan(rows(ticket, 0, UNIT), seq=2, armed=False))
    assert ended(guard).ends == (UNIT,)
    guard.begin(plan(rows(ticket, UNIT, 2 * UNIT), seq=3, armed=False))
    assert ended(guard).ends == (2 * UNIT,)


def test_a_step_that_nobody_drafted_for_leaves_no_hole_in_the_targets_layers(table: AuthorityTable) -> None:
    ticket = Scope(table).ticket()
    guard = StepGuard(table)
    guard.begin(plan(rows(ticket, 0, UNIT)), drafts=True)
    ended(guard)
    guard.begin(plan(rows(ticket, UNIT, 2 * UNIT), seq=2))
    guard.arm(LAYERS, made := Pass())
    guard.layer_point(0)
    assert made.kept == []
    assert ended(guard).ends == (2 * UNIT,)
