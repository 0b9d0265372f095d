"""Claims about epochs, tombstones and recovery."""

import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from retire.authority import Authority, AuthorityTable, ScopeStatus, record, store, validate_epoch, validate_scope
from retire.authority import table as table_module
from retire.core.errors import (
    EpochConflict,
    EpochRevoked,
    InvalidRequest,
    InvariantViolation,
    NotFound,
    OverLimit,
    SeamError,
)
from retire.core.types import EPOCH_MAX

T = "default"


def open_authority(path: Path, *, boot_id: str = "boot-1", **settings: object) -> Authority:
    return Authority.open(path, boot_id=boot_id, **{"sync_interval_s": 3600.0, **settings})  # type: ignore[arg-type]


def abandon(authority: Authority) -> None:
    """What the death of the process leaves: nothing is synced, nothing is marked, the kernel drops the lock."""
    authority._stop.set()
    authority._thread.join()
    authority._table.close()
    authority._record.close()
    os.close(authority._directory_lock)


class Disk:
    """Stands for the disk under the record: what was not synced is lost with the host."""

    def __init__(self, state_dir: Path, patch: pytest.MonkeyPatch) -> None:
        self.state_dir = state_dir
        self.durable: dict[str, bytes] = {}
        patch.setattr(record, "_fsync", self.fsync)

    def fsync(self, path: Path) -> None:
        if path.exists():
            self.durable = {file.name: file.read_bytes() for file in self.state_dir.glob("record.sqlite3*")}

    def lose_the_host(self, authority: Authority) -> None:
        abandon(authority)
        for file in self.state_dir.glob("record.sqlite3*"):
            file.unlink()
        for name, content in self.durable.items():
            if not name.endswith("-shm"):
                (self.state_dir / name).write_bytes(content)


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[Authority]:
    with open_authority(tmp_path, tenants=(T, "other"), scopes_per_tenant=4, rows_per_tenant=8) as authority:
        yield authority


def fill(authority: Authority, count: int = 40) -> None:
    """Push every idle scope out of the table."""
    for number in range(count):
        authority.resolve(T, f"filler {number}")


def held(authority: Authority, scope: str) -> bool:
    return authority._table.find(0, store.scope_key(T, scope)) is not None


# -- validation


@pytest.mark.parametrize("scope", ["a", "x" * 256, "plan-7", "日本 / ß", "\U0001f600" * 256, " "])
def test_scopes_that_are_fine(authority: Authority, scope: str) -> None:
    assert authority.resolve(T, validate_scope(scope)).scope == scope


@pytest.mark.parametrize("scope", ["", "x" * 257, "a\0b", "a\nb", "\x7f", "\x85", "\ud800", None, 7, b"a", ["a"]])
def test_scopes_that_are_not(authority: Authority, scope: object) -> None:
    with pytest.raises(InvalidRequest):
        validate_scope(scope)
    calls: list[Callable[[str], object]] = [
        lambda scope: authority.resolve(T, scope),
        lambda scope: authority.advance(T, scope, "*", 1),
        lambda scope: authority.cancel(T, scope),
        lambda scope: authority.set_paused(T, scope, True),
        lambda scope: authority.view(T, scope),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest):
            call(scope)  # type: ignore[arg-type]


@pytest.mark.parametrize("epoch", [0, -1, 2**64, True, False, 1.0, "1", "*", None, [1]])
def test_epochs_that_are_none(authority: Authority, epoch: object) -> None:
    with pytest.raises(InvalidRequest):
        validate_epoch(epoch)
    if epoch is not None:
        with pytest.raises(InvalidRequest):
            authority.resolve(T, "s", epoch)  # type: ignore[arg-type]
    if epoch != "*":
        with pytest.raises(InvalidRequest):
            authority.advance(T, "s", epoch, 1)  # type: ignore[arg-type]
    assert authority.view(T, "s") is None


def test_a_tenant_that_is_not_configured_is_a_defect(authority: Authority) -> None:
    for call in (authority.resolve, authority.view, authority.cancel, authority.find_idempotent):
        with pytest.raises(InvariantViolation):
            call("stranger", "s")
    with pytest.raises(InvariantViolation):
        authority.page("stranger")


@pytest.mark.parametrize("tenants", [(), ("a", "a"), ("",), ("a\0b",)])
def test_tenants_have_distinct_names(tmp_path: Path, tenants: tuple[str, ...]) -> None:
    with pytest.raises(InvariantViolation):
        open_authority(tmp_path, tenants=tenants)


# -- resolution


def test_which_epoch_a_request_joins(authority: Authority) -> None:
    view = authority.resolve(T, "s")
    assert view.epoch == 1
    assert authority.resolve(T, "t", 1).epoch == 1
    with pytest.raises(EpochConflict) as unknown:
        authority.resolve(T, "u", 2)
    assert unknown.value.current_epoch is None
    assert authority.view(T, "u") is None
    authority.advance(T, "s", 1, 11)
    assert authority.resolve(T, "s") == authority.resolve(T, "s", 2) == authority.view(T, "s")
    with pytest.raises(EpochRevoked) as behind:
        authority.resolve(T, "s", 1)
    with pytest.raises(EpochConflict) as ahead:
        authority.resolve(T, "s", 3)
    assert behind.value.current_epoch == ahead.value.current_epoch == 2


def test_a_supersede_may_come_before_its_predecessor(authority: Authority) -> None:
    with pytest.raises(NotFound):
        authority.advance(T, "s", "*", 1)
    with pytest.raises(EpochConflict):
        authority.advance(T, "s", 2, 1)
    assert authority.view(T, "s") is None
    moved = authority.advance(T, "s", 1, 1)
    assert (moved.old_epoch, moved.new_epoch) == (1, 2)
    with pytest.raises(EpochRevoked):
        authority.resolve(T, "s", 1)


def test_advance_names_the_current_epoch_or_star(authority: Authority) -> None:
    authority.resolve(T, "s")
    assert authority.advance(T, "s", 1, 1).new_epoch == 2
    for wrong in (1, 3):
        with pytest.raises(EpochConflict) as conflict:
            authority.advance(T, "s", wrong, 2)
        assert conflict.value.current_epoch == 2
    assert authority.advance(T, "s", "*", 3).new_epoch == 3
    assert authority.resolve(T, "s").raw == authority.advance(T, "s", "*", 3).raw, "the same transition, asked again"


def test_of_concurrent_callers_exactly_one_wins(authority: Authority) -> None:
    authority.resolve(T, "s")
    outcomes: list[object] = []

    def compete(transition: int) -> None:
        for epoch in range(1, 51):
            try:
                outcomes.append(authority.advance(T, "s", epoch, transition << 32 | epoch).old_epoch)
            except EpochConflict:
                while authority.resolve(T, "s").epoch <= epoch:
                    time.sleep(0)

    threads = [threading.Thread(target=compete, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == list(range(1, 51))  # type: ignore[type-var]
    assert authority.resolve(T, "s").epoch == 51


@pytest.mark.parametrize("expected", [1, "*"])
def test_a_death_between_store_and_reply_repeats_the_answer(tmp_path: Path, expected: int | Literal["*"]) -> None:
    authority = open_authority(tmp_path)
    authority.resolve(T, "s")
    moved = authority.advance(T, "s", expected, 42)
    abandon(authority)
    with open_authority(tmp_path) as authority:
        assert authority.advance(T, "s", expected, 42) == moved
        assert authority.advance(T, "s", 2, 43).new_epoch == 3
        with pytest.raises(EpochConflict):
            authority.advance(T, "s", 1, 42)


def test_a_death_before_the_store_is_not_taken_for_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = open_authority(tmp_path)
    raw = authority.resolve(T, "s").raw
    stores, real = 0, table_module._store

    def die_at_the_fifth(words: "memoryview[int]", index: int, value: int) -> None:
        nonlocal stores
        stores += 1
        if stores == 5:  # all of the transition is there, the raw word is not
            raise KeyboardInterrupt
        real(words, index, value)

    monkeypatch.setattr(table_module, "_store", die_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        authority.advance(T, "s", "*", 42)
    monkeypatch.undo()
    abandon(authority)
    with open_authority(tmp_path) as authority:
        view = authority.resolve(T, "s")
        assert (view.raw, view.epoch, authority._table.transition(view.slot)) == (raw, 1, 42)
        assert authority.advance(T, "s", "*", 42).new_epoch == 2


# -- cancellation, pause, eviction


def test_a_cancelled_scope_comes_back_only_under_a_higher_epoch(authority: Authority) -> None:
    ticket = authority.issue(authority.resolve(T, "s"))
    authority.advance(T, "s", 1, 1)
    assert authority.cancel(T, "s").cancelled
    assert authority.cancel(T, "s").epoch == 2
    for epoch in (None, 1, 2):
        with pytest.raises(EpochRevoked) as revoked:
            authority.resolve(T, "s", epoch)
        assert revoked.value.current_epoch == 2
    for expected in (2, "*"):
        with pytest.raises(EpochRevoked):
            authority.advance(T, "s", expected, 2)  # type: ignore[arg-type]
    with pytest.raises(EpochRevoked):
        authority.set_paused(T, "s", True)
    revived = authority.resolve(T, "s", 9)
    assert (revived.epoch, revived.cancelled) == (9, False)
    assert authority.resolve(T, "s") == revived
    assert not authority.holds(ticket)
    assert authority.seen(ticket) != ticket.raw
    with pytest.raises(NotFound):
        authority.cancel(T, "unknown")
    with pytest.raises(NotFound):
        authority.set_paused(T, "unknown", True)


def test_a_tombstone_survives_eviction_and_reopening(tmp_path: Path) -> None:
    with open_authority(tmp_path, scopes_per_tenant=4) as authority:
        authority.resolve(T, "s")
        authority.advance(T, "s", 1, 1)
        authority.cancel(T, "s")
        fill(authority)
        assert not held(authority, "s")
        with pytest.raises(EpochRevoked):
            authority.resolve(T, "s")
    for boot_id in ("boot-1", "boot-2"):
        with open_authority(tmp_path, scopes_per_tenant=4, boot_id=boot_id) as authority:
            with pytest.raises(EpochRevoked) as revoked:
                authority.resolve(T, "s", 2)
            assert revoked.value.current_epoch == 2
    with open_authority(tmp_path, scopes_per_tenant=4) as authority:
        assert authority.resolve(T, "s", 3).epoch == 3


def test_an_evicted_scope_never_left(authority: Authority) -> None:
    view = authority.resolve(T, "s")
    ticket = authority.issue(view)
    authority.advance(T, "s", 1, 1)
    fill(authority)
    assert held(authority, "s"), "a live ticket keeps it"
    authority.release(ticket)
    fill(authority)
    assert not held(authority, "s")
    assert not authority.holds(ticket)
    assert authority.seen(ticket) != ticket.raw
    with pytest.raises(EpochConflict):
        authority.advance(T, "s", 1, 2)
    fill(authority)
    assert authority.resolve(T, "s").epoch == 2
    fill(authority)
    found = authority.view(T, "s")
    assert found is not None
    assert found.epoch == 2


def test_a_request_admitted_while_its_scope_moves_gets_a_ticket_of_its_version(authority: Authority) -> None:
    view = authority.resolve(T, "s")
    fill(authority)
    ticket = authority.issue(view)
    assert authority.holds(ticket)
    authority.release(ticket)
    authority.advance(T, "s", "*", 1)
    with pytest.raises(EpochRevoked) as revoked:
        authority.issue(view)
    assert revoked.value.current_epoch == 2


def test_a_full_region_refuses_its_own_tenant_only(authority: Authority) -> None:
    for number in range(4):
        authority.issue(authority.resolve(T, str(number)))
    for attempt in ("x", "y"):
        with pytest.raises(OverLimit):
            authority.resolve(T, attempt)
    assert authority.view(T, "x") is None, "a refused scope leaves no trace"
    assert authority.resolve("other", "x").epoch == 1
    assert authority.resolve(T, "0").epoch == 1


def test_a_paused_scope_keeps_its_place_and_its_authority(authority: Authority) -> None:
    ticket = authority.issue(authority.resolve(T, "s"))
    assert authority.set_paused(T, "s", True).paused
    assert authority.holds(ticket)
    authority.release(ticket)
    fill(authority)
    assert held(authority, "s")
    assert not authority.set_paused(T, "s", False).paused


def test_tenants_do_not_see_each_other(authority: Authority) -> None:
    authority.resolve(T, "s")
    authority.advance(T, "s", 1, 1)
    assert authority.view("other", "s") is None
    assert authority.resolve("other", "s").epoch == 1
    assert authority.remember_idempotent(T, "k", b"h", transition=1, scope="s").transition == 1
    assert authority.find_idempotent("other", "k") is None


def test_a_list_names_every_scope_also_the_evicted(authority: Authority) -> None:
    authority.resolve(T, "a")
    authority.advance(T, "a", 1, 1)
    authority.resolve(T, "b")
    authority.cancel(T, "b")
    fill(authority, 20)
    authority.resolve(T, "c")
    authority.set_paused(T, "c", True)
    named = {status.scope: status for status in authority.page(T)}
    assert len(named) == 23
    assert named["a"] == ScopeStatus(tenant="default", scope="a", epoch=2)  # type: ignore[arg-type]
    assert named["b"].cancelled
    assert named["c"].paused
    assert authority.page("other") == []


def test_pages_follow_each_other_by_name_and_leave_the_table_as_it_is(authority: Authority) -> None:
    names = [f"filler {number}" for number in range(20)] + ["Z", "é", "日本", "\U0001f600"]
    for name in names:
        authority.resolve(T, name)
    kept = [name for name in names if held(authority, name)]
    pages, after = [], ""
    while page := authority.page(T, after=after, limit=7):
        pages.append([status.scope for status in page])
        after = page[-1].scope
    assert [len(page) for page in pages] == [7, 7, 7, 3]
    assert [name for page in pages for name in page] == sorted(names)
    assert [name for name in names if held(authority, name)] == kept


# -- idempotency


def test_the_first_use_of_an_idempotency_key_stands(tmp_path: Path) -> None:
    with open_authority(tmp_path) as authority:
        assert authority.find_idempotent(T, "k") is None
        first = authority.remember_idempotent(T, "k", b"body", transition=2**127, scope="s")
        assert (first.body_hash, first.transition, first.scope, first.epoch) == (b"body", 2**127, "s", None)
        assert authority.remember_idempotent(T, "k", b"body", transition=5, scope="s", epoch=9) == first
        assert authority.remember_idempotent(T, "k", b"else", transition=2**127, scope="s", epoch=9) == first
        done = authority.remember_idempotent(T, "k", b"body", transition=2**127, scope="s", epoch=EPOCH_MAX)
        assert done.epoch == EPOCH_MAX
    with open_authority(tmp_path, boot_id="boot-2") as authority:
        assert authority.find_idempotent(T, "k") == done
    with open_authority(tmp_path, idempotency_retention_s=-1) as authority:
        assert authority.find_idempotent(T, "k") is None


def test_a_key_whose_process_died_right_after_the_store_stands_even_when_another_transition_came_first(
    tmp_path: Path,
) -> None:
    authority = open_authority(tmp_path)
    authority.resolve(T, "s")
    for key, transition in (("stored", 7), ("not stored", 9)):
        authority.remember_idempotent(T, key, b"body", transition=transition, scope="s")
    authority.advance(T, "s", "*", 7)
    abandon(authority)
    with open_authority(tmp_path) as authority:
        authority.advance(T, "s", 2, 8)
        found = {key: authority.find_idempotent(T, key) for key in ("stored", "not stored")}
        assert {key: one and one.epoch for key, one in found.items()} == {"stored": 2, "not stored": None}


# -- the state directory and recovery


def test_the_state_directory_is_private(tmp_path: Path) -> None:
    with open_authority(tmp_path / "deep" / "state") as authority:
        directory = authority.table_path.parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {0o600}


def test_a_second_authority_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    with open_authority(tmp_path) as authority:
        with pytest.raises(SeamError, match=f"in use by process {os.getpid()}"):
            open_authority(tmp_path)
        assert authority.resolve(T, "s").epoch == 1
    open_authority(tmp_path).close()


@pytest.mark.parametrize("boot_id", ["boot-1", "boot-2"])
@pytest.mark.parametrize("table", ["kept", "missing", "corrupt"])
def test_a_clean_shutdown_loses_nothing(tmp_path: Path, boot_id: str, table: str) -> None:
    with open_authority(tmp_path) as authority:
        authority.resolve(T, "s")
        for transition in range(1, 6):
            authority.advance(T, "s", "*", transition)
        authority.cancel(T, authority.resolve(T, "gone").scope)
        path = authority.table_path
    assert _header_clean(path)
    _damage(path, table)
    with open_authority(tmp_path, boot_id=boot_id) as authority:
        assert not _header_clean(path)
        assert authority.resolve(T, "s").epoch == 6
        assert authority.resolve(T, "new").epoch == 1
        with pytest.raises(EpochRevoked):
            authority.resolve(T, "gone")


@pytest.mark.parametrize(
    ("boot_id", "table"), [("boot-2", "kept"), ("boot-1", "missing"), ("boot-1", "corrupt"), ("boot-2", "missing")]
)
def test_without_a_clean_shutdown_every_epoch_is_higher(tmp_path: Path, boot_id: str, table: str) -> None:
    authority = open_authority(tmp_path)
    authority.resolve(T, "s")
    authority.sync()
    last = [authority.advance(T, "s", "*", transition).new_epoch for transition in range(1, 6)][-1]
    authority.cancel(T, authority.resolve(T, "gone").scope)
    abandon(authority)
    _damage(authority.table_path, table)
    with open_authority(tmp_path, boot_id=boot_id) as authority:
        floor = store.STRIDE
        assert authority.resolve(T, "s").epoch == 1 + floor > last
        assert authority.resolve(T, "new").epoch == 1 + floor
        assert authority.resolve(T, "named", 1 + floor).epoch == 1 + floor
        with pytest.raises(EpochConflict, match=f"starts at epoch {1 + floor}"):
            authority.resolve(T, "named low", 1)
        assert authority.advance(T, "early", 1 + floor, 1).old_epoch == 1 + floor
        with pytest.raises(EpochRevoked):
            authority.resolve(T, "gone")
        with pytest.raises(EpochConflict) as learnt:
            authority.advance(T, "s", last, 7)
        assert learnt.value.current_epoch == 1 + floor
    with open_authority(tmp_path, boot_id=boot_id) as authority:
        assert authority.resolve(T, "newer").epoch == 1 + floor, "the floor stays"


def test_the_sync_thread_writes_by_itself(tmp_path: Path) -> None:
    with open_authority(tmp_path, sync_interval_s=0.02) as authority:
        authority.resolve(T, "s")
        authority.advance(T, "s", 1, 1)
        deadline_s = time.monotonic() + 5
        while _recorded_epoch(authority, "s") != 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def test_a_scope_waits_for_a_sync_before_it_outruns_the_stride(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "STRIDE", 16)
    with open_authority(tmp_path) as authority:
        authority.resolve(T, "s")
        for transition in range(1, 100):
            epoch = authority.advance(T, "s", "*", transition).new_epoch
            assert epoch - _recorded_epoch(authority, "s") <= 8
        monkeypatch.setattr(authority._record, "sync", _disk_full)
        while authority.resolve(T, "s").epoch - _recorded_epoch(authority, "s") < 8:
            authority.advance(T, "s", "*", 0)
        last = authority.resolve(T, "s")
        with pytest.raises(OSError, match="full"):
            authority.advance(T, "s", "*", 0)
        assert authority.resolve(T, "s") == last, "what cannot be made durable does not happen"
        monkeypatch.undo()


def test_evictions_do_not_hide_unsynced_advances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path, monkeypatch)
    monkeypatch.setattr(store, "STRIDE", 16)
    authority = open_authority(tmp_path, scopes_per_tenant=1)
    authority.resolve(T, "s")
    authority.sync()
    for _ in range(10):
        for _ in range(7):
            last = authority.advance(T, "s", "*", 0).new_epoch
        authority.resolve(T, "filler")
    disk.lose_the_host(authority)
    with open_authority(tmp_path, boot_id="boot-2") as authority:
        assert authority.resolve(T, "s").epoch > last


def test_a_revived_epoch_is_durable_however_far_it_jumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path, monkeypatch)
    authority = open_authority(tmp_path)
    authority.cancel(T, authority.resolve(T, "s").scope)
    last = authority.resolve(T, "s", 2**62).epoch
    disk.lose_the_host(authority)
    with open_authority(tmp_path, boot_id="boot-2") as authority:
        assert authority.resolve(T, "s").epoch > last


def test_a_late_writer_does_not_take_the_record_back(tmp_path: Path) -> None:
    rows = record.Record(tmp_path / "record.sqlite3")
    rows.put("t", 1, "s", 2**63, True)
    for epoch, cancelled in ((2**63, False), (5, True), (2**63 - 1, True)):
        assert rows.update([record.Change("t", 1, epoch, cancelled)]) == 0
        rows.put("t", 1, "s", epoch, cancelled)
        assert rows.lookup("t", 1) == ("s", 2**63, True)
    assert rows.update([record.Change("t", 1, EPOCH_MAX, False), record.Change("t", 2, 1, False)]) == 1
    assert rows.lookup("t", 1) == ("s", EPOCH_MAX, False)
    assert rows.lookup("t", 2) is None
    rows.close()


def test_a_failed_sync_leaves_no_clean_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = open_authority(tmp_path)
    epoch = authority.resolve(T, "s").epoch
    monkeypatch.setattr(authority._record, "sync", _disk_full)
    with pytest.raises(OSError, match="full"):
        authority.close()
    with open_authority(tmp_path, boot_id="boot-2") as authority:
        assert authority.resolve(T, "s").epoch > epoch


def test_another_configuration_keeps_the_epochs(tmp_path: Path) -> None:
    authority = open_authority(tmp_path, tenants=("a", "b"))
    for tenant, advances in (("a", 3), ("b", 5)):
        authority.resolve(tenant, "s")
        for transition in range(1, advances):
            authority.advance(tenant, "s", "*", transition)
    abandon(authority)
    authority = open_authority(tmp_path, tenants=("b", "c", "a"), scopes_per_tenant=64, rows_per_tenant=16)
    assert [authority.resolve(tenant, "s").epoch for tenant in ("a", "b", "c")] == [3, 5, 1]
    abandon(authority)
    with open_authority(tmp_path, tenants=("a",)) as authority:
        assert authority.resolve("a", "s").epoch == 3


def test_a_tenant_whose_number_of_scopes_changes_keeps_its_epochs(tmp_path: Path) -> None:
    names = [f"s-{number}" for number in range(8)]
    authority = open_authority(tmp_path, tenants=("a", "b"), scopes_per_tenant=(8, 2))
    for name in names:
        authority.resolve("a", name)
        authority.advance("a", name, "*", 1)
    abandon(authority)
    for scopes in ((3, 16), (16, 1)):
        authority = open_authority(tmp_path, tenants=("a", "b"), scopes_per_tenant=scopes)
        for name in names:
            authority.advance("a", name, "*", 2)
        tickets = [authority.issue(authority.resolve("b", str(number))) for number in range(scopes[1])]
        with pytest.raises(OverLimit):
            authority.resolve("b", "one more")
        for ticket in tickets:
            authority.release(ticket)
        abandon(authority)
    with open_authority(tmp_path, tenants=("a", "b")) as authority:
        assert [authority.resolve("a", name).epoch for name in names] == [4] * 8


def test_tombstones_are_pruned_after_their_retention(tmp_path: Path) -> None:
    with open_authority(tmp_path, tombstone_retention_s=3600) as authority:
        authority.cancel(T, authority.resolve(T, "gone").scope)
        authority.resolve(T, "stays")
        authority.prune()
        assert len(authority.page(T)) == 2
    with open_authority(tmp_path, boot_id="boot-2", tombstone_retention_s=-1) as authority:
        assert [status.scope for status in authority.page(T)] == ["stays"]
        assert authority.resolve(T, "gone").epoch == 1


@pytest.mark.parametrize("damage", ["missing", "garbage", "schema"])
def test_a_damaged_record_stops_the_start_and_lets_the_directory_go(tmp_path: Path, damage: str) -> None:
    open_authority(tmp_path).close()
    path = tmp_path / "record.sqlite3"
    good = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "garbage":
        path.write_bytes(b"garbage" * 1000)
    else:
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA user_version = 99")
        db.close()
    for _ in range(2):
        with pytest.raises(SeamError, match=r"record\.sqlite3"):
            open_authority(tmp_path)
    path.write_bytes(good)
    open_authority(tmp_path).close()


def test_other_processes_read_what_the_owner_decides(authority: Authority) -> None:
    reader = AuthorityTable.open(authority.table_path)
    ticket = authority.issue(authority.resolve(T, "s"))
    assert reader.secret == authority.secret
    assert reader.holds(ticket)
    authority.lower(ticket, 5)
    assert reader.limit(ticket) == 5
    authority.advance(T, "s", 1, 1)
    assert not reader.current(ticket)
    reader.close()


class CrashMachine(RuleBasedStateMachine):
    """Epochs against every kind of restart, in a table of two slots.

    The loss of the host takes the table, and of the record all that was not synced.
    """

    SCOPES = st.sampled_from(["a", "b", "c", "d"])

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.state_dir = Path(self.folder.name) / "state"
        self.patch = pytest.MonkeyPatch()
        self.disk = Disk(self.state_dir, self.patch)
        self.patch.setattr(store, "STRIDE", 8)
        self.boot = 1
        self.known: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.transition = 0
        self.authority = self.open()

    def open(self) -> Authority:
        authority = open_authority(self.state_dir, boot_id=str(self.boot), scopes_per_tenant=2, rows_per_tenant=2)
        authority._record._db.execute("PRAGMA synchronous = OFF")  # `Disk` stands in for it
        return authority

    def teardown(self) -> None:
        self.authority.close()
        self.patch.undo()
        self.folder.cleanup()

    def learn(self, scope: str, epoch: int) -> None:
        """Exact, as long as the host is not lost."""
        assert epoch == self.known.setdefault(scope, epoch)

    def current(self, scope: str) -> int:
        """The scope's epoch; the answer says whether it is cancelled."""
        if scope not in self.cancelled:
            return self.authority.resolve(T, scope).epoch
        with pytest.raises(EpochRevoked) as revoked:
            self.authority.resolve(T, scope)
        assert revoked.value.current_epoch is not None
        return revoked.value.current_epoch

    @rule(scope=SCOPES)
    def resolve(self, scope: str) -> None:
        self.learn(scope, self.current(scope))

    @rule(scope=SCOPES, times=st.integers(1, 12))
    def advance(self, scope: str, times: int) -> None:
        for _ in range(times):
            self.transition += 1
            if scope in self.cancelled or scope not in self.known:
                with pytest.raises(EpochRevoked if scope in self.cancelled else NotFound):
                    self.authority.advance(T, scope, "*", self.transition)
                return
            moved = self.authority.advance(T, scope, "*", self.transition)
            self.learn(scope, moved.old_epoch)
            self.known[scope] = moved.new_epoch

    @rule(scope=SCOPES)
    def cancel(self, scope: str) -> None:
        if scope in self.known:
            self.learn(scope, self.authority.cancel(T, scope).epoch)
            self.cancelled.add(scope)

    @rule(scope=SCOPES, jump=st.integers(1, 1000))
    def revive(self, scope: str, jump: int) -> None:
        if scope in self.cancelled:
            view = self.authority.view(T, scope)
            assert view is not None
            self.learn(scope, view.epoch)
            self.known[scope] = self.authority.resolve(T, scope, view.epoch + jump).epoch
            self.cancelled.discard(scope)

    @rule()
    def sync(self) -> None:
        self.authority.sync()

    @rule(other_boot=st.booleans())
    def restart_cleanly(self, other_boot: bool) -> None:
        self.authority.close()
        self.boot += other_boot
        self.authority = self.open()

    @rule()
    def lose_the_process(self) -> None:
        abandon(self.authority)
        self.authority = self.open()

    @rule(unsynced_survives=st.booleans())
    def lose_the_host(self, unsynced_survives: bool) -> None:
        if unsynced_survives:
            abandon(self.authority)
        else:
            self.disk.lose_the_host(self.authority)
        self.boot += 1
        self.authority = self.open()
        for scope, before in self.known.items():
            self.known[scope] = self.current(scope)
            assert self.known[scope] > before


TestCrashMachine = CrashMachine.TestCase
TestCrashMachine.settings = settings(max_examples=50, stateful_step_count=25)


def _damage(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    elif how == "corrupt":
        path.write_bytes(b"\xff" * path.stat().st_size)


def _header_clean(path: Path) -> bool:
    table = AuthorityTable.open(path)
    try:
        return table.clean
    finally:
        table.close()


def _recorded_epoch(authority: Authority, scope: str) -> int:
    recorded = authority._record.lookup(T, store.scope_key(T, scope))
    assert recorded is not None
    return recorded.epoch


def _disk_full() -> None:
    raise OSError("the disk is full")
