"""Where a process keeps its records: a ring in memory, or files that outlive it.

Owns: numbering, rotation, what happens when there is no room.  Must not know: what a record says.
Strategy: a record goes into mapped memory by one call under one lock, so a process that is killed leaves all of them
but the one it was writing.  A file is allocated before it is mapped: a full disk shows as an error here, never as
SIGBUS.  Then records go on in memory, and the next file is tried a ring later; what is missing shows by its number.
"""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import os
import secrets
import threading
import time
from pathlib import Path
from typing import Final

from retire.journal.schema import NOWHERE, RECORD_BYTES, U64, Head, Kind, pack, pack_head
from retire.settings import Settings

_log = logging.getLogger("vllm.retire")
RING_RECORDS: Final = 16_384  # 2 MiB
FILES_KEPT: Final = 64
SUFFIX: Final = ".journal"


class Recorder:
    """One per process.  `directory`: None for a ring in memory.

    `records`: of a file, or of the ring.  `files`: older ones of this process are removed.
    """

    def __init__(
        self, directory: Path | None, *, process: str, records: int = RING_RECORDS, files: int = FILES_KEPT
    ) -> None:
        self._directory = directory
        self._process = process
        self._records = records
        self._files = files
        self._life = secrets.randbits(64)
        self._written: list[Path] = []
        self._lock = threading.Lock()
        self._seq = 0
        self._place = records  # in the mapping; there is none yet
        self._map: mmap.mmap | None = None
        self._view: memoryview = memoryview(b"")
        self._complained = False

    @property
    def records(self) -> int:
        """How many were written."""
        return self._seq

    def note(
        self,
        kind: Kind,
        *,
        slot: int = NOWHERE,
        seen: int = 0,
        word: int = 0,
        epoch: int = 0,
        key: int = 0,
        transition: int = 0,
        ticket: int = 0,
        request: int = 0,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        flags: int = 0,
    ) -> None:
        """Write one record; fields are those of `schema`.  Of `key`, a scope's in the table, 64 bits are kept."""
        at_ns = time.monotonic_ns()
        low, high = transition & U64, transition >> 64
        what = kind | flags << 8
        with self._lock:
            if self._place >= self._records:
                self._turn()
            seq = self._seq = self._seq + 1
            place, self._place = self._place, self._place + 1
            words = (seq, at_ns, what, slot, seen, word, epoch, key & U64, low, high, ticket, request, a, b, c)
            pack(self._view, (place + 1) * RECORD_BYTES, words)

    def _turn(self) -> None:
        """The next file, or the ring from its beginning."""
        size = (self._records + 1) * RECORD_BYTES
        fresh = self._next_file(size) if self._directory is not None else None
        if fresh is None and (self._map is None or self._written):
            fresh, self._written = mmap.mmap(-1, size), []
        if fresh is not None:
            self._view.release()
            self._map, self._view = fresh, memoryview(fresh)
        head = pack_head(Head(self._life, os.getpid(), self._seq + 1, self._process))
        self._view[:RECORD_BYTES] = head
        self._place = 0

    def _next_file(self, size: int) -> mmap.mmap | None:
        assert self._directory is not None
        path = self._directory / f"{self._process}-{os.getpid()}-{self._life:016x}-{self._seq + 1:012d}{SUFFIX}"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
                fresh = mmap.mmap(fd, size)
            except OSError:
                path.unlink()
                raise
            finally:
                os.close(fd)
            self._written.append(path)
            while len(self._written) > self._files:
                self._written.pop(0).unlink(missing_ok=True)
        except OSError as error:
            if not self._complained:
                _log.warning("retire: the journal goes on in memory, %s: %s", path, error.strerror)
            self._complained = True
            return None
        self._complained = False
        return fresh

    def dump(self, path: Path) -> None:
        """Write what is in memory, oldest first, as a file of its own.  Raises OSError."""
        with self._lock:
            if self._map is None:
                return
            data = bytes(self._view)
            place, seq = self._place, self._seq
        kept = min(seq, self._records)
        head = pack_head(Head(self._life, os.getpid(), seq - kept + 1, self._process))
        body = data[RECORD_BYTES:]
        cut = place * RECORD_BYTES
        older = body[cut:] if kept == self._records else b""
        path.write_bytes(head + older + body[:cut])


_recorder: Recorder | None = None
_audits = False


def _forget() -> None:
    global _recorder  # noqa: PLW0603 - a forked child writes a journal of its own
    _recorder = None


os.register_at_fork(after_in_child=_forget)


def recorder() -> Recorder:
    """The one of this process."""
    global _recorder, _audits  # noqa: PLW0603 - one per process
    if _recorder is None:
        settings = Settings.from_env()
        _audits = settings.audit
        name = multiprocessing.current_process().name
        process = "".join(letter if letter.isalnum() else "_" for letter in name)
        _recorder = Recorder(settings.journal_dir, process=process)
    return _recorder


def note(kind: Kind, **fields: int) -> None:
    """`Recorder.note` of this process's recorder."""
    (_recorder or recorder()).note(kind, **fields)


def newest() -> int:
    """Number of this process's newest record."""
    return (_recorder or recorder()).records


def audits() -> bool:
    """Whether every frame and every row is asked for."""
    if _recorder is None:
        recorder()
    return _audits
