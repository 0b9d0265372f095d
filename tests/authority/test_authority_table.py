"""Claims about the table that one process can prove."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from retire.authority import UNLIMITED, AuthorityTable
from retire.authority import table as table_module
from retire.core.errors import EpochConflict, EpochRevoked, InvariantViolation, OverLimit, SeamError
from retire.core.types import EPOCH_MAX, Ticket


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


@pytest.fixture
def table(path: Path) -> Iterator[AuthorityTable]:
    table = AuthorityTable.create(path, tenants=2, scopes_per_tenant=4, rows=12, on_evict=lambda *_: None)
    yield table
    table.close()


def test_open_sees_what_create_wrote(path: Path, table: AuthorityTable) -> None:
    slot = table.insert(1, 5, 7)
    other = AuthorityTable.open(path)
    assert (other.secret, other.tenants, other.scopes_per_tenant, other.rows) == (table.secret, 2, 4, 12)
    assert 0 <= table.secret < 2**63
    assert other.find(1, 5) == slot
    assert other.find(0, 5) is None
    assert other.epoch(slot) == 7
    assert [tuple(words) for words in other.scopes(1)] == [(slot, 5, 7, 0)]
    other.close()


def test_a_watch_sees_what_becomes_of_its_tickets_and_of_no_others(path: Path, table: AuthorityTable) -> None:
    mine, other = table.insert(0, 5, 1), table.insert(0, 6, 1)
    ticket, foreign = table.issue(mine, table.raw(mine)), table.issue(other, table.raw(other))
    reader = AuthorityTable.open(path)
    watch, nobody = reader.watch([ticket]), reader.watch([])
    assert watch.changed(), "the first look is news"
    assert not watch.changed()
    table.lower(foreign, 1)
    table.advance(other, 6, table.raw(other), 1)
    assert not watch.changed()
    for change in (
        lambda: table.lower(ticket, 7),
        lambda: table.advance(mine, 5, table.raw(mine), 2),
        lambda: table.release(ticket),
    ):
        change()
        assert watch.changed()
        assert not watch.changed()
    assert nobody.changed()
    assert not nobody.changed()
    reader.close()


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "magic", "version"])
@pytest.mark.usefixtures("table")
def test_open_refuses_what_is_no_table(path: Path, damage: str) -> None:
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        changed = bytearray(content)
        changed[{"magic": 0, "version": 8}.get(damage, 100)] ^= 0xFF
        path.write_bytes({"empty": b"", "truncated": content[:-64]}.get(damage, bytes(changed)))
    with pytest.raises(SeamError):
        AuthorityTable.open(path)


def test_advance_compares_key_raw_word_and_flag(table: AuthorityTable) -> None:
    slot = table.insert(0, 1, 3)
    raw = table.raw(slot)
    with pytest.raises(EpochConflict):
        table.advance(slot, 2, raw, 0)
    with pytest.raises(EpochConflict) as conflict:
        table.advance(slot, 1, raw + 1, 0)
    assert conflict.value.current_epoch == 3
    assert table.advance(slot, 1, raw, 2**128 - 1) == raw + 1 == table.leads_to(slot)
    assert (table.epoch(slot), table.transition(slot)) == (4, 2**128 - 1)
    with pytest.raises(InvariantViolation):
        table.advance(slot, 1, raw + 1, 2**128)
    assert table.epoch(slot) == 4
    table.cancel(slot, 1)
    with pytest.raises(EpochRevoked):
        table.advance(slot, 1, table.raw(slot), 0)


def test_epochs_end_at_the_largest(table: AuthorityTable) -> None:
    slot = table.insert(0, 1, EPOCH_MAX - 1)
    raw = table.advance(slot, 1, table.raw(slot), 0)
    assert table.epoch(slot) == EPOCH_MAX
    with pytest.raises(EpochConflict, match="exhausted"):
        table.advance(slot, 1, raw, 0)
    assert table.raw(slot) == raw


def test_cancel_kills_tickets_and_keeps_the_epoch_and_revive_needs_a_higher_one(table: AuthorityTable) -> None:
    slot = table.insert(0, 1, 3)
    ticket = table.issue(slot, table.raw(slot))
    table.cancel(slot, 1, 9)
    assert not table.current(ticket)
    assert not table.holds(ticket)
    assert (table.epoch(slot), table.cancelled(slot), table.transition(slot)) == (3, True, 9)
    assert table.cancel(slot, 1) == table.raw(slot), "a second cancellation changes nothing"
    with pytest.raises(EpochConflict):
        table.revive(slot, 1, 3)
    table.revive(slot, 1, 8)
    assert (table.epoch(slot), table.cancelled(slot)) == (8, False)
    assert not table.holds(ticket)


def test_a_row_limit_only_falls(table: AuthorityTable) -> None:
    slot = table.insert(0, 1, 1)
    ticket = table.issue(slot, table.raw(slot))
    assert table.limit(ticket) is UNLIMITED
    table.lower(ticket, 2**40)
    assert table.limit(ticket) is UNLIMITED
    for asked, stands in ((50, 50), (70, 50), (20, 20)):
        table.lower(ticket, asked)
        assert table.limit(ticket) == stands
        assert table.holds(ticket)
    table.lower(ticket, 0)
    assert table.limit(ticket) == 0
    assert not table.holds(ticket)
    assert table.current(ticket)
    with pytest.raises(InvariantViolation):
        table.lower(ticket, -1)


def test_rows_run_out_and_come_back_also_from_another_process(path: Path, table: AuthorityTable) -> None:
    slot = table.insert(0, 1, 1)
    other = AuthorityTable.open(path)
    tickets = [issuer.issue(slot, table.raw(slot)) for issuer in (table, other) * 3]
    assert {ticket.row for ticket in tickets} == set(range(6))
    assert table.live_rows(slot) == 6
    for issuer in (table, other):
        with pytest.raises(OverLimit):
            issuer.issue(slot, table.raw(slot))
    other.release(tickets[0])
    other.release(tickets[0])
    again = table.issue(slot, table.raw(slot))
    assert again.row == tickets[0].row
    table.release(tickets[0])
    table.lower(tickets[0], 0)
    assert table.holds(again), "an old ticket must not touch its successor's row"
    assert table.limit(tickets[0]) == 0
    table.release_all_rows()
    assert table.live_rows(slot) == 0
    assert not any(map(table.holds, [*tickets, again]))
    other.close()


def test_a_tenant_that_uses_up_its_rows_leaves_those_of_another(table: AuthorityTable) -> None:
    mine, theirs = table.insert(0, 1, 1), table.insert(1, 1, 1)
    for _ in range(6):
        table.issue(mine, table.raw(mine))
    with pytest.raises(OverLimit):
        table.issue(mine, table.raw(mine))
    tickets = [table.issue(theirs, table.raw(theirs)) for _ in range(6)]
    table.release(tickets[0])
    with pytest.raises(OverLimit):
        table.issue(mine, table.raw(mine))
    assert table.issue(theirs, table.raw(theirs)).row == tickets[0].row


def test_a_tenant_fills_no_more_slots_than_it_was_given(path: Path) -> None:
    table = AuthorityTable.create(path, tenants=3, scopes_per_tenant=4, used_scopes=(1, 4, 3), rows=3)
    other = AuthorityTable.open(path)
    for tenant, used in enumerate((1, 4, 3)):
        slots = {table.insert(tenant, key, 1) for key in range(1, used + 1)}
        assert slots == set(range(4 * tenant, 4 * tenant + used))
        with pytest.raises(OverLimit):
            table.insert(tenant, 9, 1)
        assert {other.find(tenant, key) for key in range(1, used + 1)} == slots
    assert other.used_scopes == (1, 4, 3)
    for opened in (table, other):
        opened.close()


@pytest.mark.parametrize(
    "shape",
    [
        {"tenants": 0},
        {"tenants": 257, "rows": 300},
        {"tenants": 3, "rows": 2},
        {"scopes_per_tenant": 0},
        {"used_scopes": (0,)},
        {"scopes_per_tenant": 4, "used_scopes": (5,)},
        {"used_scopes": (4, 4)},
    ],
)
def test_a_table_that_has_no_room_for_a_tenant_is_a_defect(path: Path, shape: dict[str, object]) -> None:
    with pytest.raises(InvariantViolation):
        AuthorityTable.create(path, **shape)  # type: ignore[arg-type]


def test_a_worn_out_row_is_not_issued_again(table: AuthorityTable) -> None:
    slot = table.insert(0, 1, 1)
    for row in range(5):
        table._store_row(row, 0, (2**32 - 1) << 32 | 2**32 - 1)
    ticket = table.issue(slot, table.raw(slot))
    assert ticket.row == 5
    with pytest.raises(OverLimit):
        table.issue(slot, table.raw(slot))


def test_a_full_window_refuses_and_another_tenant_does_not_notice(table: AuthorityTable) -> None:
    for key in range(1, 5):
        slot = table.insert(0, key, 1)
        table.issue(slot, table.raw(slot)) if key % 2 else table.set_paused(slot, key, True)
    with pytest.raises(OverLimit):
        table.insert(0, 9, 1)
    assert table.insert(0, 3, 1) == table.find(0, 3), "who is in stays in"
    slot = table.insert(1, 9, 1)
    assert 4 <= slot < 8
    table.set_paused(table.find(0, 2) or 0, 2, False)
    assert table.insert(0, 9, 1) == 2 % 4


def test_without_a_memory_nothing_is_evicted(path: Path) -> None:
    table = AuthorityTable.create(path, scopes_per_tenant=1)
    table.insert(0, 1, 1)
    with pytest.raises(OverLimit):
        table.insert(0, 2, 1)
    table.close()


class Died(BaseException):
    """The writer, between two stores."""


Prepare = Callable[[AuthorityTable, int], object]


@pytest.mark.parametrize(
    ("prepare", "act", "epochs"),
    [
        (None, lambda table, slot: table.advance(slot, 1, table.raw(slot), 2**70), {5, 6}),
        (None, lambda table, slot: table.cancel(slot, 1, 7), {5, 6}),
        (lambda table, slot: table.cancel(slot, 1), lambda table, slot: table.revive(slot, 1, 2**40), {5, 6, 2**40}),
        (None, lambda table, _: table.insert(0, 2, 2**33), {5, 6}),
    ],
    ids=["advance", "cancel", "revive", "evict"],
)
def test_a_writer_may_die_between_any_two_stores(
    path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Prepare | None, act: Prepare, epochs: set[int]
) -> None:
    """No epoch falls, no scope shows with another's epoch, no old ticket holds once anything else is seen."""
    survived = 0
    while not _dies_after(survived, path, monkeypatch, (prepare, act), epochs):
        survived += 1
    assert survived >= 5


def _dies_after(
    survived: int, path: Path, monkeypatch: pytest.MonkeyPatch, acts: tuple[Prepare | None, Prepare], epochs: set[int]
) -> bool:
    """Whether `act` needs no more than `survived` stores; checks what a death after that many leaves."""
    prepare, act = acts
    evicted: list[tuple[int, int, int, bool]] = []
    table = AuthorityTable.create(path, scopes_per_tenant=1, rows=1, on_evict=lambda *args: evicted.append(args))
    slot = table.insert(0, 1, 5)
    ticket = table.issue(slot, table.raw(slot))
    table.release(ticket)
    if prepare is not None:
        prepare(table, slot)
    raw, left, store = table.raw(slot), iter(range(survived)), table_module._store

    def store_or_die(words: "memoryview[int]", index: int, value: int) -> None:
        if next(left, None) is None:
            raise Died
        store(words, index, value)

    finished = False
    with monkeypatch.context() as patch, contextlib.suppress(Died):
        patch.setattr(table_module, "_store", store_or_die)
        act(table, slot)
        finished = True
    table.close()

    table = AuthorityTable.open(path, on_evict=lambda *args: evicted.append(args))
    words = table.read(slot)
    assert table.raw(slot) >= raw
    if words.key == 1:
        assert words.epoch in epochs
    elif words.key == 2:
        assert (words.epoch, words.flags) == (2**33, 0)
        assert evicted[0][1:] == (1, 5, False)
    else:
        assert words.key != 0, "a hole would hide the scopes behind it"
    assert words.flags == 0 or not table.current(ticket)
    assert (table.transition(slot), table.leads_to(slot)) != (2**70, table.raw(slot)) or words.epoch == 6
    assert table.epoch(table.insert(0, 1, 5)) >= 5
    table.close()
    return finished


KEYS = st.integers(1, 8)


class TableMachine(RuleBasedStateMachine):
    """One tenant, four slots, eight scopes; the model is a dict of epochs that nothing is ever lost from."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        path = Path(self.folder.name) / "table"
        self.table = AuthorityTable.create(path, scopes_per_tenant=4, rows=5, on_evict=self.evicted)
        self.model: dict[int, tuple[int, bool]] = {}
        self.paused: set[int] = set()
        self.live: dict[Ticket, int] = {}
        self.dead: list[Ticket] = []
        self.raws = [0] * 4
        self.rows = [0] * 5

    def teardown(self) -> None:
        self.table.close()
        self.folder.cleanup()

    def evicted(self, tenant_index: int, key: int, epoch: int, cancelled: bool) -> None:
        assert (tenant_index, self.model[key]) == (0, (epoch, cancelled))
        assert key not in self.paused
        assert key not in self.live.values()

    def slot(self, key: int) -> int | None:
        return self.table.find(0, key)

    @rule(key=KEYS)
    def insert(self, key: int) -> None:
        epoch, cancelled = self.model.get(key, (1, False))
        try:
            self.table.insert(0, key, epoch, cancelled)
        except OverLimit:
            assert self.slot(key) is None
            holders = {words.key for words in self.table.scopes(0)}
            assert holders <= self.paused | set(self.live.values())
            return
        self.model[key] = (epoch, cancelled)

    @rule(key=KEYS, stale=st.booleans())
    def advance(self, key: int, stale: bool) -> None:
        slot = self.slot(key)
        if slot is None:
            return
        epoch, cancelled = self.model[key]
        try:
            self.table.advance(slot, key, self.table.raw(slot) - stale, 1)
        except EpochConflict:
            assert stale
        except EpochRevoked:
            assert cancelled
        else:
            assert not stale
            assert not cancelled
            self.model[key] = (epoch + 1, False)
            self.retire(key)

    @rule(key=KEYS)
    def cancel(self, key: int) -> None:
        slot = self.slot(key)
        if slot is not None:
            self.table.cancel(slot, key)
            if not self.model[key][1]:
                self.paused.discard(key)
            self.model[key] = (self.model[key][0], True)
            self.retire(key)

    @rule(key=KEYS, jump=st.integers(-1, 2**62))
    def revive(self, key: int, jump: int) -> None:
        slot = self.slot(key)
        if slot is None:
            return
        epoch, cancelled = self.model[key]
        try:
            self.table.revive(slot, key, epoch + jump)
        except EpochConflict:
            assert not cancelled or jump <= 0
        else:
            self.model[key] = (epoch + jump, False)
            self.paused.discard(key)

    @rule(key=KEYS, paused=st.booleans())
    def pause(self, key: int, paused: bool) -> None:
        slot = self.slot(key)
        if slot is not None:
            self.table.set_paused(slot, key, paused)
            self.paused = self.paused | {key} if paused else self.paused - {key}

    @rule(key=KEYS)
    def issue(self, key: int) -> None:
        slot = self.slot(key)
        if slot is None or self.model[key][1]:
            return
        try:
            self.live[self.table.issue(slot, self.table.raw(slot))] = key
        except OverLimit:
            assert len(self.live) == 5

    @precondition(lambda self: self.live)
    @rule(data=st.data(), limit_tokens=st.integers(0, 9))
    def lower_or_release(self, data: st.DataObject, limit_tokens: int) -> None:
        ticket = data.draw(st.sampled_from(list(self.live)))
        if limit_tokens:
            before = self.table.limit(ticket)
            self.table.lower(ticket, limit_tokens)
            assert self.table.limit(ticket) == (limit_tokens if before is None else min(before, limit_tokens))
        else:
            self.table.release(ticket)
            del self.live[ticket]
            self.dead.append(ticket)

    def retire(self, key: int) -> None:
        """Superseded and cancelled tickets stay live until released, but never hold again."""
        self.dead.extend(ticket for ticket, owner in self.live.items() if owner == key)

    @invariant()
    def words_only_grow(self) -> None:
        raws, rows = self.table.raws(), [self.table._row_word(row, 0) for row in range(5)]
        assert all(new >= old for new, old in zip(raws + rows, self.raws + self.rows, strict=True))
        self.raws, self.rows = raws, rows

    @invariant()
    def dead_tickets_stay_dead(self) -> None:
        assert not any(map(self.table.holds, self.dead))
        assert all(self.table.holds(ticket) for ticket in self.live if ticket not in self.dead)

    @invariant()
    def the_table_says_what_the_model_says(self) -> None:
        for words in self.table.scopes(0):
            assert (words.epoch, bool(words.flags & 1)) == self.model[words.key]
            assert bool(words.flags & 2) == (words.key in self.paused)
            assert self.table.live_rows(words.slot) == list(self.live.values()).count(words.key)


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_recreated_table_leaves_old_mappings_alone(path: Path, table: AuthorityTable, tmp_path: Path) -> None:
    slot = table.insert(0, 1, 1)
    shutil.copy(path, tmp_path / "copy")
    AuthorityTable.create(path).close()
    assert table.epoch(slot) == 1
