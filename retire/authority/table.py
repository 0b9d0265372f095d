"""The authority table: one shared mapping of monotone words.

Owns: the layout of the mapping, the one store function, the writers' lock.
Must not know: scope names, files other than its own two, who asks.
Strategy: a reader decides with one aligned 8-byte load, so nothing has to be delivered for a revocation to
hold.  `memoryview.cast("Q")` items are such loads and stores; `struct` calls are not (they show torn words to
other processes).  Writers exclude each other, between threads and between processes, and order their stores so
that a writer that dies between any two of them leaves no epoch lower and no old ticket valid.

Layout, in cache lines of eight u64 words: a header page; tenants x scopes-per-tenant scope slots; row slots, which the
tenants share out equally.  A tenant's scopes and tickets take nothing from another's.  From word 16 on the header says
how many slots of its region each tenant uses (0: all of them).

==========  ==========================================================================================
scope word  meaning
==========  ==========================================================================================
0           raw: only grows, also when the slot is reused for another scope (invariant 2)
1           base: the public epoch is (raw - base) mod 2**64
2, 3        128-bit key, low half first; both 0 while the slot was never used
4, 5        128-bit id of the last transition, low half first; both 0 for none
6           flags: bit 0 cancelled, bit 1 paused
7           the raw word that the transition in 4, 5 leads to: it is applied once word 0 says so
row word
0           (incarnation << 32) | (0xFFFFFFFF - limit): only grows, when the limit falls and at reuse
1           scope slot + 1 while the ticket is live, 0 when free
==========  ==========================================================================================
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from xxhash import xxh3_128_intdigest

from retire.core.errors import EpochConflict, EpochRevoked, InvariantViolation, OverLimit, SeamError
from retire.core.types import EPOCH_MAX, Ticket

if TYPE_CHECKING:
    from pathlib import Path

MAGIC: Final = int.from_bytes(b"RETIREAT", "little")
LAYOUT_VERSION: Final = 1
WINDOW_SLOTS: Final = 64
TENANTS_MAX: Final = 256
UNLIMITED: Final = None
"""A row limit that was never lowered."""

_SLOT_WORDS: Final = 8
_HEADER_WORDS: Final = mmap.PAGESIZE // 8
_U64: Final = 2**64 - 1
_LIMIT_MASK: Final = 2**32 - 1
_INCARNATION_MAX: Final = 2**32 - 1

_H_MAGIC, _H_VERSION, _H_TENANTS, _H_SCOPES, _H_ROWS, _H_SECRET, _H_CLEAN, _H_BOOT, _H_FLOOR, _H_NAMES = range(10)
_H_USED: Final = 16
_RAW, _BASE, _KEY_LO, _KEY_HI, _TRANSITION_LO, _TRANSITION_HI, _FLAGS, _LEADS_TO = range(8)
_ROW_LIMIT, _ROW_SCOPE = range(2)

CANCELLED: Final = 1
PAUSED: Final = 2

OnEvict = Callable[[int, int, int, bool], None]
"""(tenant index, key, epoch, cancelled) of a scope that is about to leave the table; it must be safe on return."""


def _store(words: memoryview[int], index: int, value: int) -> None:
    """One aligned 8-byte store: the only way in which this package writes to the mapping."""
    words[index] = value


class ScopeWords(NamedTuple):
    """What a scope slot says, read under the writers' lock."""

    slot: int
    key: int
    epoch: int
    flags: int


class Watch:
    """Words that decide about some tickets, and how they were at the last look."""

    def __init__(self, words: memoryview[int], at: tuple[int, ...]) -> None:
        self._words = words
        self._at = at
        self._seen: list[int] | None = None

    def changed(self) -> bool:
        """Whether one of them is not as it was; at the first look, always.  One load per word."""
        words = self._words
        seen = [words[index] for index in self._at]
        if seen == self._seen:
            return False
        self._seen = seen
        return True


class _WritersLock:
    """Excludes threads of this process, then other processes.  Re-entrant.

    The kernel drops the file lock of a process that dies.  A forked child would share its parent's, so it opens anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._threads = threading.RLock()
        self._depth = 0
        self._pid = os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            self._open()
        self._threads.acquire()
        try:
            if self._depth == 0:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
        except BaseException:
            self._threads.release()
            raise
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        try:
            if self._depth == 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def close(self) -> None:
        os.close(self._fd)


class AuthorityTable:
    """One mapping of the table, for all threads of a process."""

    def __init__(self, path: Path, mapping: mmap.mmap, on_evict: OnEvict | None) -> None:
        """Use `create` or `open`."""
        self._map = mapping
        self._words: memoryview[int] = memoryview(mapping).cast("Q")
        self.tenants = self._words[_H_TENANTS]
        self.scopes_per_tenant = self._words[_H_SCOPES]
        self.rows = self._words[_H_ROWS]
        used = self._words[_H_USED : _H_USED + self.tenants]
        self.used_scopes = tuple(count or self.scopes_per_tenant for count in used)
        self._row0 = _HEADER_WORDS + self.tenants * self.scopes_per_tenant * _SLOT_WORDS
        self._on_evict = on_evict
        self._lock = _WritersLock(_beside(path, ".lock"))
        self._rows_per_tenant = self.rows // self.tenants
        self._free_rows: list[deque[int]] = [deque() for _ in range(self.tenants)]

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        tenants: int = 1,
        scopes_per_tenant: int = 4096,
        used_scopes: Sequence[int] = (),
        rows: int = 8192,
        boot: int = 0,
        floor: int = 0,
        names: int = 0,
        on_evict: OnEvict | None = None,
    ) -> AuthorityTable:
        """Put an empty table at `path`, in one rename.  An old one there lives on only in processes that mapped it.

        `used_scopes`: per tenant, how many of its slots it may fill; without it, all.
        """
        if not 1 <= tenants <= min(rows, TENANTS_MAX) or scopes_per_tenant < 1:
            raise InvariantViolation(f"a table has 1 to {TENANTS_MAX} tenants, and a scope and a row for each")
        fits = all(1 <= count <= scopes_per_tenant for count in used_scopes)
        if not fits or len(used_scopes) not in (0, tenants):
            raise InvariantViolation(f"{tenants} regions of {scopes_per_tenant} scopes, used as {used_scopes}")
        size = _size_bytes(tenants, scopes_per_tenant, rows)
        fresh = _beside(path, ".new")
        fresh.unlink(missing_ok=True)
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # a full disk shows here, not as SIGBUS at some later store
            mapping = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        with memoryview(mapping).cast("Q") as words:
            geometry, random = (tenants, scopes_per_tenant, rows), secrets.randbits(63)
            for index, value in enumerate((MAGIC, LAYOUT_VERSION, *geometry, random, 0, boot, floor, names)):
                _store(words, index, value)
            for index, count in enumerate(used_scopes):
                _store(words, _H_USED + index, count)
        fresh.replace(path)
        return cls(path, mapping, on_evict)

    @classmethod
    def open(cls, path: Path, *, on_evict: OnEvict | None = None) -> AuthorityTable:
        """Map the table at `path`.  Raises SeamError when there is none, or it is not one of this layout."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SeamError(f"no authority table at {path}: {error.strerror}") from error
        try:
            size = os.fstat(fd).st_size
            if size < _HEADER_WORDS * 8:
                raise SeamError(f"{path} is too short for an authority table")
            mapping = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        with memoryview(mapping).cast("Q") as words:
            magic, version, *geometry = (words[index] for index in range(_H_ROWS + 1))
        known = (magic, version) == (MAGIC, LAYOUT_VERSION) and geometry[0] <= TENANTS_MAX
        if not known or 0 in geometry or size != _size_bytes(*geometry):
            mapping.close()
            raise SeamError(f"{path} is not an authority table of layout {LAYOUT_VERSION}")
        return cls(path, mapping, on_evict)

    def close(self) -> None:
        """Unmap.  Further calls raise ValueError."""
        self._words.release()
        self._map.close()
        self._lock.close()

    # -- the header

    @property
    def secret(self) -> int:
        """63 random bits of this table, known to whoever may map it."""
        return self._words[_H_SECRET]

    @property
    def identity(self) -> int:
        """Names this table among others; says nothing about its secret."""
        return int.from_bytes(blake2b(self.secret.to_bytes(8), digest_size=8).digest())

    @property
    def boot(self) -> int:
        """Hash of the boot under which the table was created."""
        return self._words[_H_BOOT]

    @property
    def floor(self) -> int:
        """Unknown scopes start at this epoch + 1."""
        return self._words[_H_FLOOR]

    @property
    def names(self) -> int:
        """Hash of the tenants' names in the order of their regions."""
        return self._words[_H_NAMES]

    @property
    def clean(self) -> bool:
        """Whether the last owner shut down in order."""
        return self._words[_H_CLEAN] == 1

    def set_clean(self, clean: bool) -> None:
        """See `clean`."""
        with self._lock:
            _store(self._words, _H_CLEAN, int(clean))

    # -- readers: no lock

    def raw(self, slot: int) -> int:
        """The scope's raw word: one load."""
        return self._words[_HEADER_WORDS + (slot << 3)]

    def current(self, ticket: Ticket) -> bool:
        """Whether the ticket's version still has authority: one load (invariant 1)."""
        return self._words[_HEADER_WORDS + (ticket.slot << 3)] == ticket.raw

    def holds(self, ticket: Ticket) -> bool:
        """Whether the ticket's version has authority, the ticket is still issued, and work for it is wanted."""
        word = self._words[self._row0 + (ticket.row << 3)]
        live = word >> 32 == ticket.incarnation and word & _LIMIT_MASK != _LIMIT_MASK
        return live and self.current(ticket)

    def limit(self, ticket: Ticket) -> int | None:
        """How many tokens of the request are worth computing: UNLIMITED, or a number that only falls."""
        word = self._words[self._row0 + (ticket.row << 3)]
        if word >> 32 != ticket.incarnation:
            return 0
        limit_tokens = _LIMIT_MASK - (word & _LIMIT_MASK)
        return UNLIMITED if limit_tokens == _LIMIT_MASK else limit_tokens

    def watch(self, tickets: Iterable[Ticket]) -> Watch:
        """To ask again and again whether anything has become of these tickets."""
        rows = [(_HEADER_WORDS + (ticket.slot << 3), self._row0 + (ticket.row << 3)) for ticket in tickets]
        return Watch(self._words, tuple(chain.from_iterable(rows)))

    def epoch(self, slot: int) -> int:
        """The public epoch.  Two loads: while the scope is being cancelled it may read one ahead; lock to be exact."""
        return (self.raw(slot) - self._scope_word(slot, _BASE)) & _U64

    def transition(self, slot: int) -> int:
        """Id of the last transition, 0 for none."""
        return self._scope_word(slot, _TRANSITION_HI) << 64 | self._scope_word(slot, _TRANSITION_LO)

    def leads_to(self, slot: int) -> int:
        """The raw word that `transition` leads to; it was applied, and is the last one, iff `raw` equals it."""
        return self._scope_word(slot, _LEADS_TO)

    def cancelled(self, slot: int) -> bool:
        """Whether the scope was ended for good."""
        return self._scope_word(slot, _FLAGS) & CANCELLED != 0

    def paused(self, slot: int) -> bool:
        """Whether the scope is paused; its authority is unchanged."""
        return self._scope_word(slot, _FLAGS) & PAUSED != 0

    def raws(self) -> list[int]:
        """Every scope's raw word, by slot.  Whatever changed between two calls shows as a difference."""
        return self._words[_HEADER_WORDS : self._row0 : _SLOT_WORDS].tolist()

    # -- scopes: under the writers' lock

    def locked(self) -> _WritersLock:
        """Hold off other writers for several calls: `with table.locked(): ...`."""
        return self._lock

    def find(self, tenant_index: int, key: int) -> int | None:
        """The slot of `key`.  Slots of a window fill in order and are never emptied, so the first empty one ends it."""
        with self._lock:
            for slot in self._window(tenant_index, key):
                held = self._key(slot)
                if held == key:
                    return slot
                if held == 0:
                    return None
            return None

    def insert(self, tenant_index: int, key: int, epoch: int, cancelled: bool = False) -> int:
        """The slot of `key`; if it has none, one is filled with `epoch`, or taken from an idle scope of the window.

        Idle: not paused, and no live ticket names it.  Without `on_evict` nobody could remember an evicted scope, so
        none is.  Raises OverLimit when the whole window is busy.
        """
        with self._lock:
            slot = self.find(tenant_index, key)
            if slot is not None:
                return slot
            window = list(self._window(tenant_index, key))
            slot = next((slot for slot in window if self._key(slot) == 0), None)
            if slot is None:
                slot = self._idle_slot(window)
                self._evict(tenant_index, slot)
            self._claim(slot, key, epoch, cancelled)
            return slot

    def advance(self, slot: int, key: int, expected_raw: int, transition_id: int) -> int:
        """ADVANCE: the one store that moves authority.  Returns the new raw word.

        Raises EpochConflict if the scope left the slot, another caller won, or the epochs are used up, and
        EpochRevoked if the scope is cancelled; nothing changed then.
        """
        with self._lock:
            self._require(slot, key)
            epoch = self.epoch(slot)
            if self.cancelled(slot):
                raise EpochRevoked("the scope is cancelled", current_epoch=epoch)
            if self.raw(slot) != expected_raw:
                raise EpochConflict("another caller advanced the scope", current_epoch=epoch)
            if epoch == EPOCH_MAX:
                raise EpochConflict("the scope's epochs are exhausted", current_epoch=epoch)
            new_raw = expected_raw + 1
            self._store_transition(slot, transition_id, new_raw)
            self._store_scope(slot, _RAW, new_raw)
            return new_raw

    def cancel(self, slot: int, key: int, transition_id: int = 0) -> int:
        """End the scope: every ticket dies, the public epoch stays.  Returns the new raw word.

        Raw first: whoever sees the flag sees no valid ticket, and a death in between leaves the epoch higher.
        """
        with self._lock:
            self._require(slot, key)
            if self.cancelled(slot):
                return self.raw(slot)
            new_raw = self.raw(slot) + 1
            self._store_transition(slot, transition_id, new_raw)
            self._store_scope(slot, _RAW, new_raw)
            self._store_scope(slot, _BASE, (self._scope_word(slot, _BASE) + 1) & _U64)
            self._store_scope(slot, _FLAGS, CANCELLED)
            return new_raw

    def revive(self, slot: int, key: int, epoch: int) -> int:
        """Use a cancelled scope again, at a higher epoch.  Returns the new raw word."""
        with self._lock:
            self._require(slot, key)
            if not self.cancelled(slot) or epoch <= self.epoch(slot):
                raise EpochConflict("only a higher epoch revives a cancelled scope", current_epoch=self.epoch(slot))
            new_raw = self.raw(slot) + 1
            self._store_scope(slot, _RAW, new_raw)
            self._store_scope(slot, _BASE, (new_raw - epoch) & _U64)
            self._store_transition(slot, 0, 0)
            self._store_scope(slot, _FLAGS, 0)
            return new_raw

    def set_paused(self, slot: int, key: int, paused: bool) -> None:
        """Authority unchanged; a paused scope is not evicted."""
        with self._lock:
            self._require(slot, key)
            flags = self._scope_word(slot, _FLAGS)
            self._store_scope(slot, _FLAGS, flags | PAUSED if paused else flags & ~PAUSED)

    def read(self, slot: int) -> ScopeWords:
        """A consistent reading of a slot; `key` is 0 if it was never used."""
        with self._lock:
            return ScopeWords(slot, self._key(slot), self.epoch(slot), self._scope_word(slot, _FLAGS))

    def scopes(self, tenant_index: int) -> Iterator[ScopeWords]:
        """The tenant's scopes, each read consistently."""
        first = tenant_index * self.scopes_per_tenant
        for slot in range(first, first + self.scopes_per_tenant):
            if self.raw(slot) != 0:
                words = self.read(slot)
                if words.key != 0:
                    yield words

    # -- rows: under the writers' lock

    def issue(self, slot: int, raw: int) -> Ticket:
        """A ticket for one request, without limit.  Raises OverLimit when every row of the tenant is in use."""
        with self._lock:
            row = self._free_row(slot // self.scopes_per_tenant)
            word = self._row_word(row, _ROW_LIMIT)
            incarnation = (word >> 32) + 1
            self._store_row(row, _ROW_SCOPE, slot + 1)
            self._store_row(row, _ROW_LIMIT, incarnation << 32)
            return Ticket(slot=slot, raw=raw, row=row, incarnation=incarnation)

    def lower(self, ticket: Ticket, limit_tokens: int) -> None:
        """Let the ticket's limit fall to `limit_tokens`.  A higher limit and an old ticket change nothing."""
        if limit_tokens < 0:
            raise InvariantViolation(f"a row limit of {limit_tokens} tokens")
        with self._lock:
            word = self._row_word(ticket.row, _ROW_LIMIT)
            lowered = ticket.incarnation << 32 | _LIMIT_MASK - min(limit_tokens, _LIMIT_MASK)
            if word >> 32 == ticket.incarnation and lowered > word:
                self._store_row(ticket.row, _ROW_LIMIT, lowered)

    def release(self, ticket: Ticket) -> None:
        """The request is over: limit 0, and its row is free.  A second release changes nothing."""
        with self._lock:
            word = self._row_word(ticket.row, _ROW_LIMIT)
            if word >> 32 != ticket.incarnation or self._row_word(ticket.row, _ROW_SCOPE) == 0:
                return
            self._store_row(ticket.row, _ROW_LIMIT, word | _LIMIT_MASK)
            self._store_row(ticket.row, _ROW_SCOPE, 0)
            self._free_rows[ticket.row // self._rows_per_tenant].append(ticket.row)

    def release_all_rows(self) -> None:
        """No ticket of an earlier server holds any more."""
        with self._lock:
            for row in range(self.rows):
                word = self._row_word(row, _ROW_LIMIT)
                if word >> 32 != 0:
                    self._store_row(row, _ROW_LIMIT, word | _LIMIT_MASK)
                self._store_row(row, _ROW_SCOPE, 0)

    def live_rows(self, slot: int) -> int:
        """How many live tickets name the slot."""
        with self._lock:
            return self._row_scopes().count(slot + 1)

    # -- inside

    def _window(self, tenant_index: int, key: int) -> Iterator[int]:
        if not 0 <= tenant_index < self.tenants or not 0 < key < 2**128:
            raise InvariantViolation(f"no region for tenant {tenant_index} and key {key:#x}")
        scopes = self.used_scopes[tenant_index]
        first, home = tenant_index * self.scopes_per_tenant, key % scopes
        return (first + (home + step) % scopes for step in range(min(WINDOW_SLOTS, scopes)))

    def _idle_slot(self, window: list[int]) -> int:
        if self._on_evict is not None:
            busy = set(self._row_scopes())
            for slot in window:
                if slot + 1 not in busy and not self.paused(slot):
                    return slot
        raise OverLimit("the tenant's scopes are all in use")

    def _evict(self, tenant_index: int, slot: int) -> None:
        if self._on_evict is None:
            raise InvariantViolation("nobody remembers the evicted scope")
        self._on_evict(tenant_index, self._key(slot), self.epoch(slot), self.cancelled(slot))

    def _claim(self, slot: int, key: int, epoch: int, cancelled: bool) -> None:
        """Give the slot to another scope.  Raw first: old tickets die.  Until the last store its key is nobody's."""
        new_raw = self.raw(slot) + 1
        self._store_scope(slot, _RAW, new_raw)
        self._store_scope(slot, _KEY_HI, _U64)
        self._store_scope(slot, _BASE, (new_raw - epoch) & _U64)
        self._store_transition(slot, 0, 0)
        self._store_scope(slot, _FLAGS, CANCELLED if cancelled else 0)
        self._store_scope(slot, _KEY_LO, key & _U64)
        self._store_scope(slot, _KEY_HI, key >> 64)

    def _require(self, slot: int, key: int) -> None:
        if self._key(slot) != key:
            raise EpochConflict("the scope has left its slot")

    def _free_row(self, tenant_index: int) -> int:
        """A hint list of our own releases first; other processes' releases are found when it runs dry."""
        first, free = tenant_index * self._rows_per_tenant, self._free_rows[tenant_index]
        for scan in (False, True):
            if scan:
                scopes = self._row_scopes()[first : first + self._rows_per_tenant]
                free.extend(row for row, scope in enumerate(scopes, first) if scope == 0)
            while free:
                row = free.popleft()
                if self._row_word(row, _ROW_SCOPE) == 0 and self._row_word(row, _ROW_LIMIT) >> 32 < _INCARNATION_MAX:
                    return row
        raise OverLimit("the tenant has as many requests in scopes as it may")

    def _row_scopes(self) -> list[int]:
        return self._words[self._row0 + _ROW_SCOPE :: _SLOT_WORDS].tolist()

    def _key(self, slot: int) -> int:
        return self._scope_word(slot, _KEY_HI) << 64 | self._scope_word(slot, _KEY_LO)

    def _scope_word(self, slot: int, word: int) -> int:
        return self._words[_HEADER_WORDS + (slot << 3) + word]

    def _row_word(self, row: int, word: int) -> int:
        return self._words[self._row0 + (row << 3) + word]

    def _store_scope(self, slot: int, word: int, value: int) -> None:
        _store(self._words, _HEADER_WORDS + (slot << 3) + word, value)

    def _store_row(self, row: int, word: int, value: int) -> None:
        _store(self._words, self._row0 + (row << 3) + word, value)

    def _store_transition(self, slot: int, transition_id: int, leads_to: int) -> None:
        if not 0 <= transition_id < 2**128:
            raise InvariantViolation(f"transition id {transition_id:#x} has more than 128 bits")
        self._store_scope(slot, _LEADS_TO, 0)  # until all three are there, they speak of no transition
        self._store_scope(slot, _TRANSITION_LO, transition_id & _U64)
        self._store_scope(slot, _TRANSITION_HI, transition_id >> 64)
        self._store_scope(slot, _LEADS_TO, leads_to)


def scope_key(tenant: str, scope: str) -> int:
    """A scope's name in the table: 128 bits, never 0, which is an empty slot's."""
    return xxh3_128_intdigest(f"{tenant}\0{scope}".encode()) or 1


def _size_bytes(tenants: int, scopes_per_tenant: int, rows: int) -> int:
    return 8 * (_HEADER_WORDS + _SLOT_WORDS * (tenants * scopes_per_tenant + rows))


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
