"""The durable record: what survives the loss of the host, and of a scope's place in the table.

Owns: the SQLite file.  Must not know: the mapping, who asks, what an epoch means beyond its order.
Strategy: a write is committed at once (it survives the death of the process) and `sync` makes all committed ones
survive the loss of the host.  The log is synced outside the lock, so nobody who looks up a scope waits for a disk.
A scope's row only moves up in (epoch, cancelled), so late writers do no harm (invariant 2).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from retire.core.errors import SeamError
from retire.core.types import EPOCH_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

SCHEMA_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE scopes(tenant TEXT, key BLOB, scope TEXT NOT NULL, epoch BLOB NOT NULL, cancelled INTEGER NOT NULL,
                    touched REAL NOT NULL, PRIMARY KEY (tenant, key)) WITHOUT ROWID;
CREATE INDEX tombstones ON scopes(touched) WHERE cancelled;
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE idempotency(tenant TEXT, key TEXT, body_hash BLOB NOT NULL, transition BLOB NOT NULL, scope TEXT NOT NULL,
                         epoch BLOB, created REAL NOT NULL, PRIMARY KEY (tenant, key)) WITHOUT ROWID;
CREATE INDEX idempotency_age ON idempotency(created);
"""


class Recorded(NamedTuple):
    """A scope's row."""

    scope: str
    epoch: int
    cancelled: bool


class Change(NamedTuple):
    """A new state of a scope that has a row."""

    tenant: str
    key: int
    epoch: int
    cancelled: bool


@dataclass(frozen=True, slots=True)
class Idempotent:
    """What was answered, or is being answered, under an idempotency key.  `epoch` is None until authority moved."""

    body_hash: bytes
    transition: int
    scope: str
    epoch: int | None
    created: float


class Record:
    """The record in one SQLite file.  Thread-safe; one process at a time (the state directory's lock sees to it)."""

    def __init__(self, path: Path) -> None:
        """Open or create.  Raises SeamError if the file is damaged or of another schema."""
        self._wal = path.with_name(path.name + "-wal")
        self._lock = threading.RLock()
        self._syncing = threading.Lock()
        self._unsynced = False
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")  # the log is synced by `sync`, and before checkpoints
            self._db.create_function("raised", 2, _raised, deterministic=True)
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            if version in (0, SCHEMA_VERSION):
                self._db.execute("CREATE INDEX IF NOT EXISTS scopes_by_name ON scopes(tenant, scope)")
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise SeamError(f"{path} is damaged: {error}") from error
        if version not in (0, SCHEMA_VERSION):
            self._db.close()
            raise SeamError(f"{path} has schema {version}; this version reads {SCHEMA_VERSION}")
        self._unsynced = True  # perhaps the schema, perhaps writes of an earlier process
        self.sync()
        _fsync(path.parent)

    def close(self) -> None:
        """Further calls raise sqlite3.ProgrammingError."""
        with self._lock:
            self._db.close()

    # -- scopes

    def lookup(self, tenant: str, key: int) -> Recorded | None:
        """The scope's row, None if it has none."""
        with self._lock:
            row = self._db.execute(
                "SELECT scope, epoch, cancelled FROM scopes WHERE tenant = ? AND key = ?", (tenant, _key(key))
            ).fetchone()
        return None if row is None else Recorded(row[0], _int(row[1]), bool(row[2]))

    def page(self, tenant: str, *, after: str, limit: int) -> list[Recorded]:
        """The tenant's next rows in the order of their scopes' names, which is that of the code points."""
        with self._lock:
            rows = self._db.execute(
                "SELECT scope, epoch, cancelled FROM scopes WHERE tenant = ? AND scope > ? ORDER BY scope LIMIT ?",
                (tenant, after, limit),
            ).fetchall()
        return [Recorded(scope, _int(epoch), bool(cancelled)) for scope, epoch, cancelled in rows]

    def put(self, tenant: str, key: int, scope: str, epoch: int, cancelled: bool) -> None:
        """A row for a new scope, or a new state of one whose row may have been pruned."""
        with self._write():
            self._db.execute(
                "INSERT INTO scopes(tenant, key, scope, epoch, cancelled, touched) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT DO UPDATE SET epoch = excluded.epoch, cancelled = excluded.cancelled,"
                " touched = excluded.touched"
                " WHERE (excluded.epoch, excluded.cancelled) > (scopes.epoch, scopes.cancelled)",
                (tenant, _key(key), scope, _epoch(epoch), int(cancelled), time.time()),
            )

    def forget(self, tenant: str, key: int) -> None:
        """Take back the row of a scope that could not be created."""
        with self._write():
            self._db.execute("DELETE FROM scopes WHERE tenant = ? AND key = ?", (tenant, _key(key)))

    def update(self, changes: Iterable[Change]) -> int:
        """Move rows up.  Returns how many did; pruned tombstones stay pruned."""
        now = time.time()
        rows = [
            (_epoch(epoch), int(cancelled), now, tenant, _key(key), _epoch(epoch), int(cancelled))
            for tenant, key, epoch, cancelled in changes
        ]
        if not rows:
            return 0
        with self._write():
            return self._db.executemany(
                "UPDATE scopes SET epoch = ?, cancelled = ?, touched = ?"
                " WHERE tenant = ? AND key = ? AND (?, ?) > (epoch, cancelled)",
                rows,
            ).rowcount

    def raise_epochs(self, stride: int) -> None:
        """After a loss: every row, and the floor under scopes without one, move beyond what was lost."""
        with self._write():
            self._db.execute("UPDATE scopes SET epoch = raised(epoch, ?)", (stride,))
            self.set_meta("floor", str(min(int(self.meta("floor", "0")) + stride, EPOCH_MAX - 1)))

    # -- meta

    def meta(self, key: str, default: str) -> str:
        """One of: clean, floor, tenants (in the order of their regions when the table was created)."""
        with self._lock:
            row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return default if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        """See `meta`."""
        with self._write():
            self._db.execute("INSERT OR REPLACE INTO meta(key, value) VALUES (?, ?)", (key, value))

    # -- idempotency

    def remember(self, tenant: str, key: str, entry: Idempotent) -> Idempotent:
        """Keep `entry`, or fill in the epoch of the same one.  Returns what stands: the first under a key wins."""
        with self._write():
            self._db.execute(
                "INSERT INTO idempotency(tenant, key, body_hash, transition, scope, epoch, created)"
                " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET epoch = excluded.epoch"
                " WHERE body_hash = excluded.body_hash AND transition = excluded.transition AND epoch IS NULL",
                (
                    tenant,
                    key,
                    entry.body_hash,
                    _key(entry.transition),
                    entry.scope,
                    None if entry.epoch is None else _epoch(entry.epoch),
                    entry.created,
                ),
            )
            return self.find_idempotent(tenant, key) or entry

    def find_idempotent(self, tenant: str, key: str) -> Idempotent | None:
        """What stands under the key."""
        with self._lock:
            row = self._db.execute(
                "SELECT body_hash, transition, scope, epoch, created FROM idempotency WHERE tenant = ? AND key = ?",
                (tenant, key),
            ).fetchone()
        if row is None:
            return None
        body_hash, transition, scope, epoch, created = row
        return Idempotent(body_hash, _int(transition), scope, None if epoch is None else _int(epoch), created)

    def unanswered(self) -> list[tuple[str, str, Idempotent]]:
        """Tenant, key and entry wherever authority is not known to have moved."""
        with self._lock:
            rows = self._db.execute(
                "SELECT tenant, key, body_hash, transition, scope, created FROM idempotency WHERE epoch IS NULL"
            ).fetchall()
        return [
            (tenant, key, Idempotent(body_hash, _int(transition), scope, None, created))
            for tenant, key, body_hash, transition, scope, created in rows
        ]

    # -- upkeep

    def prune(self, *, tombstone_retention_s: float, idempotency_retention_s: float) -> None:
        """Drop tombstones and idempotency keys that are older."""
        now = time.time()
        with self._write():
            self._db.execute("DELETE FROM scopes WHERE cancelled AND touched < ?", (now - tombstone_retention_s,))
            self._db.execute("DELETE FROM idempotency WHERE created < ?", (now - idempotency_retention_s,))

    def sync(self) -> None:
        """Return when every committed write survives the loss of the host.  Raises OSError."""
        with self._syncing:
            with self._lock:
                pending, self._unsynced = self._unsynced, False
            if not pending:
                return
            try:
                with contextlib.suppress(FileNotFoundError):  # no log: all of it was checkpointed, hence synced
                    _fsync(self._wal)
            except BaseException:
                self._unsynced = True
                raise

    @contextlib.contextmanager
    def _write(self) -> Iterator[None]:
        """One transaction, or a part of the one that this thread is in."""
        with self._lock:
            if self._db.in_transaction:
                yield
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
            self._unsynced = True


def _raised(epoch: bytes, stride: int) -> bytes:
    return _epoch(min(_int(epoch) + stride, EPOCH_MAX))


def _epoch(epoch: int) -> bytes:
    """Big-endian: SQLite then orders epochs as numbers."""
    return epoch.to_bytes(8, "big")


def _key(key: int) -> bytes:
    return key.to_bytes(16, "big")


def _int(blob: bytes) -> int:
    return int.from_bytes(blob, "big")


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
