"""Authority: which version of which scope may have effects.

Owns: the rules of epochs (unknown, behind, ahead, cancelled), the state directory, recovery.
Must not know: vLLM, HTTP, what a transition does after its store.
Strategy: the table decides, the record remembers.  Whatever changes both happens under the table's writers' lock;
lock order is sync, table, record.  Epochs never decrease (invariant 2): the table survives every process, and after
the loss of the host each epoch restarts `STRIDE` above its last synced value, which is more than it can have
advanced since, because a scope that comes within half a stride of that waits for a sync.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sqlite3
import threading
import time
import unicodedata
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Self

from xxhash import xxh3_64_intdigest

from retire.authority.record import Change, Idempotent, Record, Recorded
from retire.authority.table import CANCELLED, PAUSED, AuthorityTable, scope_key
from retire.core.errors import EpochConflict, EpochRevoked, InvalidRequest, InvariantViolation, NotFound, SeamError
from retire.core.types import EPOCH_MAX, SCOPE_MAX_CHARS, Epoch, ScopeId, TenantId, Ticket
from retire.journal import Kind, note, under

if TYPE_CHECKING:
    from collections.abc import Sequence

STRIDE: Final = 2**20
PRUNE_INTERVAL_S: Final = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeStatus:
    """What a tenant may know of its scope."""

    tenant: TenantId
    scope: ScopeId
    epoch: Epoch
    cancelled: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeView(ScopeStatus):
    """A scope in its slot, with the raw word that stands for `epoch`."""

    slot: int
    raw: int


@dataclass(frozen=True, slots=True)
class Advanced:
    """Authority moved."""

    slot: int
    raw: int
    old_epoch: Epoch
    new_epoch: Epoch


def validate_scope(scope: object) -> ScopeId:
    """1 to 256 characters, none of them a control character or a lone surrogate.  Raises InvalidRequest."""
    if not isinstance(scope, str):
        raise InvalidRequest("a scope is a string", param="scope")
    if not 1 <= len(scope) <= SCOPE_MAX_CHARS:
        raise InvalidRequest(f"a scope has 1 to {SCOPE_MAX_CHARS} characters", param="scope")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in scope):
        raise InvalidRequest("a scope has no control characters", param="scope")
    return ScopeId(scope)


def validate_epoch(epoch: object) -> Epoch:
    """An integer from 1 to 2**64 - 1.  Raises InvalidRequest."""
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 1 <= epoch <= EPOCH_MAX:
        raise InvalidRequest("an epoch is an integer from 1 to 2**64 - 1", param="epoch")
    return Epoch(epoch)


class Authority:
    """The one owner of a state directory.  Other processes map `table_path`."""

    def __init__(
        self,
        state_dir: Path,
        directory_lock: int,
        record: Record,
        *,
        tenants: tuple[str, ...],
        scopes: tuple[int, ...],
        rows: int,
        boot: int,
        sync_interval_s: float,
        tombstone_retention_s: float,
        idempotency_retention_s: float,
    ) -> None:
        """Use `open`."""
        self.table_path = state_dir / "table"
        self._directory_lock = directory_lock
        self._record = record
        self._names = tenants
        self._tenants = {name: index for index, name in enumerate(tenants)}
        self._tombstone_retention_s = tombstone_retention_s
        self._idempotency_retention_s = idempotency_retention_s
        self._table = self._recover(tenants, scopes, rows, boot)
        self._first_epoch = self._table.floor + 1
        note(Kind.OPENED, a=self._table.scopes_per_tenant, b=self._table.floor, c=self._table.identity)
        self._synced_raws = self._table.raws()
        self._syncing = threading.Lock()
        self._stop = threading.Event()
        self._closed = False
        self._thread = threading.Thread(
            target=self._sync_often, args=(sync_interval_s,), name="retire-authority-sync", daemon=True
        )
        self._thread.start()

    @classmethod
    def open(
        cls,
        state_dir: Path,
        *,
        tenants: Sequence[str] = ("default",),
        scopes_per_tenant: int | Sequence[int] = 4096,
        rows_per_tenant: int = 8192,
        sync_interval_s: float = 0.5,
        tombstone_retention_s: float = 7 * 86400,
        idempotency_retention_s: float = 86400,
        boot_id: str | None = None,
    ) -> Authority:
        """Own `state_dir` and recover what it holds.

        `scopes_per_tenant`: one number for all, or one for each of `tenants`.
        Raises SeamError if another server owns the directory, or it is damaged.
        """
        if not tenants or len(set(tenants)) != len(tenants) or any(not name or "\0" in name for name in tenants):
            raise InvariantViolation(f"tenants need distinct, non-empty names: {tenants!r}")
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            directory_lock = _lock_directory(state_dir)
            undo.callback(os.close, directory_lock)
            if (state_dir / "table").exists() and not (state_dir / "record.sqlite3").exists():
                raise SeamError(
                    f"{state_dir} has lost its record.sqlite3: restore it, or start with an empty directory"
                )
            record = Record(state_dir / "record.sqlite3")
            undo.callback(record.close)
            authority = cls(
                state_dir,
                directory_lock,
                record,
                tenants=tuple(tenants),
                scopes=(scopes_per_tenant,) * len(tenants)
                if isinstance(scopes_per_tenant, int)
                else tuple(scopes_per_tenant),
                rows=rows_per_tenant * len(tenants),
                boot=xxh3_64_intdigest((_this_boot() if boot_id is None else boot_id).encode()),
                sync_interval_s=sync_interval_s,
                tombstone_retention_s=tombstone_retention_s,
                idempotency_retention_s=idempotency_retention_s,
            )
            undo.pop_all()
            return authority

    def close(self) -> None:
        """Sync, mark the shutdown clean, let the directory go.  If the sync fails the mark is not set."""
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        self._thread.join()
        try:
            self.sync()
            self._record.set_meta("clean", "1")
            self._record.sync()
            self._table.set_clean(True)
            note(Kind.CLOSED, c=self._table.identity)
        finally:
            self._table.close()
            self._record.close()
            os.close(self._directory_lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def secret(self) -> int:
        """The table's 63 random bits."""
        return self._table.secret

    # -- versions

    def resolve(self, tenant: str, scope: str, epoch: int | None = None) -> ScopeView:
        """The version that an ordinary request joins.

        An unknown scope is created; a cancelled one comes back under a higher epoch.  Raises InvalidRequest,
        EpochRevoked (behind, or cancelled), EpochConflict (ahead), OverLimit.
        """
        validate_scope(scope)
        if epoch is not None:
            validate_epoch(epoch)
        with self._table.locked():
            view = self._known(tenant, scope)
            if view is None:
                if epoch is not None and epoch != self._first_epoch:
                    raise EpochConflict(f"an unknown scope starts at epoch {self._first_epoch}", param="epoch")
                return self._create(tenant, scope)
            if view.cancelled:
                if epoch is None or epoch <= view.epoch:
                    raise EpochRevoked("the scope is cancelled", param="scope", current_epoch=view.epoch)
                return self._revive(view, epoch)
            if epoch is not None and epoch < view.epoch:
                raise EpochRevoked(f"epoch {epoch} was superseded", param="epoch", current_epoch=view.epoch)
            if epoch is not None and epoch > view.epoch:
                raise EpochConflict(f"epoch {epoch} is ahead", param="epoch", current_epoch=view.epoch)
            return view

    def advance(self, tenant: str, scope: str, expected: int | Literal["*"], transition: int) -> Advanced:
        """ADVANCE for `transition`; asking again for the one that was applied last gives the same answer.

        Raises InvalidRequest, NotFound ("*" on an unknown scope), EpochConflict (not current, another caller won, or
        exhausted), EpochRevoked (cancelled), OverLimit.
        """
        validate_scope(scope)
        if expected != "*":
            validate_epoch(expected)
        while True:
            with self._table.locked():
                view = self._advancing(tenant, scope, expected)
                if self._table.raw(view.slot) - self._synced_raws[view.slot] < STRIDE // 2:
                    return self._advance(view, expected, transition)
            self.sync()

    def cancel(self, tenant: str, scope: str, transition: int = 0) -> ScopeView:
        """End the scope for good; on return its tombstone is durable.  Raises InvalidRequest, NotFound."""
        with self._table.locked():
            view = self._found(tenant, scope)
            key = scope_key(tenant, scope)
            cancelled = self._table.cancel(view.slot, key, transition)
            if cancelled != view.raw:  # now, not before
                self._note(Kind.CANCELLED, view, cancelled, transition=transition)
            view = self._view(tenant, scope, view.slot)
        self._record.put(tenant, key, scope, view.epoch, True)
        self._record.sync()
        return view

    def set_paused(self, tenant: str, scope: str, paused: bool) -> ScopeView:
        """Raises InvalidRequest, NotFound, EpochRevoked (cancelled)."""
        with self._table.locked():
            view = self._found(tenant, scope)
            if view.cancelled:
                raise EpochRevoked("the scope is cancelled", param="scope", current_epoch=view.epoch)
            self._table.set_paused(view.slot, scope_key(tenant, scope), paused)
            return self._view(tenant, scope, view.slot)

    def view(self, tenant: str, scope: str) -> ScopeView | None:
        """The scope as it is, None if unknown.  Raises InvalidRequest, OverLimit (it is known, but has no slot)."""
        validate_scope(scope)
        with self._table.locked():
            return self._known(tenant, scope)

    def page(self, tenant: str, *, after: str = "", limit: int = 1000) -> list[ScopeStatus]:
        """The tenant's next scopes by name, those included that have left the table."""
        self._index(tenant)
        return [self._status(tenant, recorded) for recorded in self._record.page(tenant, after=after, limit=limit)]

    # -- tickets

    def issue(self, view: ScopeView) -> Ticket:
        """A ticket for one request of the viewed version.  Raises EpochRevoked (no longer current), OverLimit."""
        with self._table.locked():
            if self._table.raw(view.slot) != view.raw:  # superseded, or moved to another slot
                view = self.resolve(view.tenant, view.scope, view.epoch)
            ticket = self._table.issue(view.slot, view.raw)
            self._note(Kind.ISSUED, view, view.raw, ticket=under(ticket)["ticket"])
            return ticket

    def lower(self, ticket: Ticket, limit_tokens: int) -> None:
        """Let the ticket's row limit fall."""
        self._table.lower(ticket, limit_tokens)

    def release(self, ticket: Ticket) -> None:
        """The request is over."""
        self._table.release(ticket)
        note(Kind.RETURNED, **under(ticket))

    def holds(self, ticket: Ticket) -> bool:
        """Whether the ticket still has authority and its work is wanted."""
        return self._table.holds(ticket)

    def seen(self, ticket: Ticket) -> int:
        """The raw word of the ticket's scope: it has authority as long as this is its own.  One load."""
        return self._table.raw(ticket.slot)

    # -- idempotency

    def remember_idempotent(
        self, tenant: str, key: str, body_hash: bytes, *, transition: int, scope: str, epoch: int | None = None
    ) -> Idempotent:
        """Keep what stands behind an idempotency key: before the store, and once more with its epoch after it.

        Returns what stands; if that is another body or transition, another caller used the key first.
        """
        self._index(tenant)
        return self._record.remember(tenant, key, Idempotent(body_hash, transition, scope, epoch, time.time()))

    def find_idempotent(self, tenant: str, key: str) -> Idempotent | None:
        """What stands behind an idempotency key."""
        self._index(tenant)
        return self._record.find_idempotent(tenant, key)

    # -- durability

    def sync(self) -> None:
        """Make every epoch durable that the table held when this was called."""
        with self._syncing:
            changed = _differing(self._table.raws(), self._synced_raws)
            raws: dict[int, int] = {}
            changes: list[Change] = []
            for slot in changed:
                with self._table.locked():
                    raws[slot] = self._table.raw(slot)
                    words = self._table.read(slot)
                tenant = self._names[slot // self._table.scopes_per_tenant]
                changes.append(Change(tenant, words.key, words.epoch, words.flags & CANCELLED != 0))
            self._record.update(changes)
            self._record.sync()
            with self._table.locked():
                for slot, raw in raws.items():
                    self._synced_raws[slot] = max(self._synced_raws[slot], raw)

    def _sync_often(self, interval_s: float) -> None:
        pruned_s = time.monotonic()
        while not self._stop.wait(interval_s):
            try:
                self.sync()
                if time.monotonic() - pruned_s >= PRUNE_INTERVAL_S:
                    self.prune()
                    pruned_s = time.monotonic()
            except (OSError, sqlite3.Error):  # the next round tries again; half a stride of advances may wait for it
                _log.exception("the authority record could not be synced")

    def prune(self) -> None:
        """Drop tombstones and idempotency keys that are past their retention."""
        self._record.prune(
            tombstone_retention_s=self._tombstone_retention_s, idempotency_retention_s=self._idempotency_retention_s
        )

    def _recover(self, tenants: tuple[str, ...], scopes: tuple[int, ...], rows: int, boot: int) -> AuthorityTable:
        """The table to go on with: the mapped one if it outlived its server, else an empty one over the record."""
        names, wanted = _names_hash(tenants), (len(tenants), max(scopes), scopes, rows)
        table = self._surviving_table(boot)
        if table is not None:
            self._absorb(table)
            geometry = (table.tenants, table.scopes_per_tenant, table.used_scopes, table.rows)
            if (table.names, geometry) != (names, wanted):
                table.close()
                table = None
        elif self._record.meta("clean", "1") != "1":
            self._record.raise_epochs(STRIDE)
        self.prune()
        self._record.set_meta("clean", "0")
        if table is None:
            self._record.set_meta("tenants", json.dumps(tenants))
        self._record.sync()
        if table is None:
            return AuthorityTable.create(
                self.table_path,
                tenants=len(tenants),
                scopes_per_tenant=max(scopes),
                used_scopes=scopes,
                rows=rows,
                boot=boot,
                floor=int(self._record.meta("floor", "0")),
                names=names,
                on_evict=self._remember_evicted,
            )
        table.set_clean(False)
        table.release_all_rows()
        return table

    def _surviving_table(self, boot: int) -> AuthorityTable | None:
        """The mapped table, if it is of this boot and belongs to this record."""
        try:
            table = AuthorityTable.open(self.table_path, on_evict=self._remember_evicted)
        except SeamError:
            return None
        if table.boot == boot and table.names == _names_hash(json.loads(self._record.meta("tenants", "[]"))):
            return table
        table.close()
        return None

    def _absorb(self, table: AuthorityTable) -> None:
        names: list[str] = json.loads(self._record.meta("tenants", "[]"))
        self._record.update(
            Change(name, words.key, words.epoch, words.flags & CANCELLED != 0)
            for index, name in enumerate(names)
            for words in table.scopes(index)
        )
        self._settle_keys(table, names)

    def _settle_keys(self, table: AuthorityTable, names: list[str]) -> None:
        """Note the epoch behind every key whose process died between store and record.

        The slot names the transition that was applied last; the next one would take that knowledge with it.
        """
        for tenant, key, entry in self._record.unanswered():
            if tenant in names:
                slot = table.find(names.index(tenant), scope_key(tenant, entry.scope))
                if slot is None:
                    continue
                if (table.transition(slot), table.leads_to(slot)) == (entry.transition, table.raw(slot)):
                    self._record.remember(tenant, key, replace(entry, epoch=table.epoch(slot)))

    def _remember_evicted(self, tenant_index: int, key: int, epoch: int, cancelled: bool) -> None:
        """Most were synced long ago; one that was not must be, or its unsynced advances would go uncounted."""
        if self._record.update([Change(self._names[tenant_index], key, epoch, cancelled)]):
            self._record.sync()

    # -- inside, under the writers' lock

    def _known(self, tenant: str, scope: str) -> ScopeView | None:
        """The scope in its slot; one that had left the table returns as it was."""
        index, key = self._index(tenant), scope_key(tenant, scope)
        slot = self._table.find(index, key)
        if slot is None:
            recorded = self._record.lookup(tenant, key)
            if recorded is None:
                return None
            slot = self._insert(index, key, recorded.epoch, recorded.cancelled)
        return self._view(tenant, scope, slot)

    def _status(self, tenant: str, recorded: Recorded) -> ScopeStatus:
        """The scope where it is: looking through many must not push others out of the table."""
        key = scope_key(tenant, recorded.scope)
        with self._table.locked():
            slot = self._table.find(self._index(tenant), key)
            words = None if slot is None else self._table.read(slot)
            found = self._record.lookup(tenant, key) or recorded  # evicted since the page was read, or pruned
        flags = CANCELLED * found.cancelled if words is None else words.flags
        return ScopeStatus(
            tenant=TenantId(tenant),
            scope=ScopeId(recorded.scope),
            epoch=Epoch(found.epoch if words is None else words.epoch),
            cancelled=flags & CANCELLED != 0,
            paused=flags & PAUSED != 0,
        )

    def _found(self, tenant: str, scope: str) -> ScopeView:
        validate_scope(scope)
        view = self._known(tenant, scope)
        if view is None:
            raise NotFound("no such scope", param="scope")
        return view

    def _create(self, tenant: str, scope: str) -> ScopeView:
        """Row first: a scope in the table always has its name in the record."""
        index, key = self._index(tenant), scope_key(tenant, scope)
        self._record.put(tenant, key, scope, self._first_epoch, False)
        try:
            slot = self._insert(index, key, self._first_epoch, False)
        except BaseException:
            self._record.forget(tenant, key)
            raise
        return self._view(tenant, scope, slot)

    def _insert(self, index: int, key: int, epoch: int, cancelled: bool) -> int:
        slot = self._table.insert(index, key, epoch, cancelled)
        raw = self._synced_raws[slot] = self._table.raw(slot)
        note(Kind.PLACED, slot=slot, seen=raw, epoch=epoch, key=key)
        return slot

    def _revive(self, view: ScopeView, epoch: int) -> ScopeView:
        """Durable before anybody is told: the new epoch may lie any number of strides ahead."""
        key = scope_key(view.tenant, view.scope)
        raw = self._table.revive(view.slot, key, epoch)
        self._note(Kind.REVIVED, view, raw, epoch=epoch)
        self._record.put(view.tenant, key, view.scope, epoch, False)
        self._record.sync()
        return self._view(view.tenant, view.scope, view.slot)

    def _advancing(self, tenant: str, scope: str, expected: int | Literal["*"]) -> ScopeView:
        """The scope to advance.  A SUPERSEDE may overtake its predecessor, so naming the first epoch creates it."""
        view = self._known(tenant, scope)
        if view is None:
            if expected == "*":
                raise NotFound("no such scope", param="scope")
            if expected != self._first_epoch:
                raise EpochConflict(f"an unknown scope starts at epoch {self._first_epoch}", param="expected_epoch")
            view = self._create(tenant, scope)
        if view.cancelled:
            raise EpochRevoked("the scope is cancelled", param="scope", current_epoch=view.epoch)
        return view

    def _advance(self, view: ScopeView, expected: int | Literal["*"], transition: int) -> Advanced:
        slot, epoch = view.slot, view.epoch
        applied = (self._table.transition(slot), self._table.leads_to(slot)) == (transition, view.raw)
        if transition != 0 and applied and expected in ("*", epoch - 1):
            return Advanced(slot, view.raw, Epoch(epoch - 1), epoch)
        if expected not in ("*", epoch):
            raise EpochConflict(f"epoch {expected} is not current", param="expected_epoch", current_epoch=epoch)
        raw = self._table.advance(slot, scope_key(view.tenant, view.scope), view.raw, transition)
        self._note(Kind.ADVANCED, view, raw, epoch=epoch + 1, transition=transition)
        return Advanced(slot, raw, epoch, Epoch(epoch + 1))

    def _note(self, kind: Kind, view: ScopeView, seen: int, *, epoch: int | None = None, **fields: int) -> None:
        """Journal what was done to the viewed version, and the word it left.  `epoch`: where it is another one."""
        key = scope_key(view.tenant, view.scope)
        epoch = view.epoch if epoch is None else epoch
        note(kind, slot=view.slot, seen=seen, word=view.raw, epoch=epoch, key=key, **fields)

    def _view(self, tenant: str, scope: str, slot: int) -> ScopeView:
        words = self._table.read(slot)
        return ScopeView(
            tenant=TenantId(tenant),
            scope=ScopeId(scope),
            epoch=Epoch(words.epoch),
            cancelled=words.flags & CANCELLED != 0,
            paused=words.flags & PAUSED != 0,
            slot=slot,
            raw=self._table.raw(slot),
        )

    def _index(self, tenant: str) -> int:
        index = self._tenants.get(tenant)
        if index is None:
            raise InvariantViolation(f"tenant {tenant!r} is not configured")
        return index


def _differing(seen: list[int], known: list[int]) -> list[int]:
    """Where the two differ.  Mostly nowhere, and then nobody waits for this thread to find out."""
    if seen == known:
        return []
    return [slot for slot, (raw, synced) in enumerate(zip(seen, known, strict=True)) if raw != synced]


def _names_hash(tenants: Sequence[str]) -> int:
    return xxh3_64_intdigest("\0".join(tenants).encode())


def _this_boot() -> str:
    """The kernel's boot id.  Where there is none every start counts as another boot, which only raises epochs."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex


def _lock_directory(state_dir: Path) -> int:
    """The file descriptor that keeps a second server off the directory; the kernel lets go when its process dies."""
    fd = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as error:
        owner = os.pread(fd, 32, 0).decode().strip() or "unknown"
        os.close(fd)
        raise SeamError(f"state directory {state_dir} is in use by process {owner}") from error
    return fd
