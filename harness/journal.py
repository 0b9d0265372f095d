"""The file in which a run keeps what is done.

Owns: its lines, its lock, and whether what it holds belongs to the run that is about to begin.
Must not know: what an entry means.
Strategy: JSON lines, each on the disk before the next trial begins.  The first line says what was measured with what;
a file of another run is set aside under another name, never overwritten.  A line that was torn when the power went is
passed over.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from harness.ledger import Entry
from harness.progress import note

SUFFIX = ".trials.jsonl"
_ENTRY = {"key", "result", "checks", "took_s"}


class JournalInUse(RuntimeError):
    """Another process is writing the same results."""


class Journal:
    """Entries of the run with this identity, kept in `file`.  Use as a context manager.

    `earlier`: entries that are there already.  `finished`: whether that run came to its end.
    `anew`: whether even a file of the same identity is set aside.

    Raises:
        JournalInUse: another process has it open.
        OSError: it cannot be read or written.
    """

    def __init__(self, file: Path, identity: Mapping[str, Any], *, anew: bool = False) -> None:
        self._file = file
        self._out = self._open()
        lines = list(_lines(self._out))
        why = "another measurement is asked for" if anew else _differs(lines, json.loads(json.dumps(identity)))
        if lines and why:
            self._set_aside(why)
            lines = []
        self.earlier: list[Entry] = [line for line in lines if line.keys() >= _ENTRY]
        self.finished = any("finished" in line for line in lines)
        self._sittings = _sittings(lines)
        self._begun = bool(lines)
        self._identity = identity

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._out.close()

    def begin(self) -> None:
        """A sitting begins."""
        if not self._begun:
            self._append({"identity": self._identity})
        date = datetime.now(UTC).isoformat(timespec="seconds")
        self._append({"sitting": date})
        self._sittings.append((date, 0))

    def write(self, entry: Entry) -> None:
        """Keep an entry; it is on the disk when this returns."""
        self._append(entry)
        date, entries = self._sittings.pop()
        self._sittings.append((date, entries + 1))

    def finish(self) -> None:
        """The run has come to its end and its result is written."""
        self._append({"finished": datetime.now(UTC).isoformat(timespec="seconds")})

    @property
    def sittings(self) -> list[str]:
        """When those began in which something was measured."""
        return [date for date, entries in self._sittings if entries]

    def _open(self) -> IO[str]:
        out = self._file.open("a+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            out.close()
            raise JournalInUse(f"{self._file} is being written by another run") from None
        return out

    def _set_aside(self, why: str) -> None:
        stem = self._file.name.removesuffix(SUFFIX)
        number = 1
        while (aside := self._file.with_name(f"{stem}.{number}{SUFFIX}")).exists():
            number += 1
        self._file.rename(aside)
        note(f"beginning anew: {why}; what {self._file.name} held is kept as {aside.name}")
        self._out.close()
        self._out = self._open()

    def _append(self, line: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()
        os.fsync(self._out.fileno())


def _lines(file: IO[str]) -> Iterator[Mapping[str, Any]]:
    """Every line that is whole; one that was torn is ended, so that the next does not stick to it."""
    file.seek(0)
    text = file.read()
    if text and not text.endswith("\n"):
        file.write("\n")
    for line in text.split("\n"):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def _differs(lines: list[Mapping[str, Any]], identity: Mapping[str, Any]) -> str:
    """In what the run that wrote these lines is another one; empty if in nothing."""
    written = lines[0].get("identity") if lines else None
    if not isinstance(written, dict):
        return "it does not say what was measured"
    names = [name for name in {**written, **identity} if written.get(name) != identity.get(name)]
    return f"it is of another {', '.join(names)}" if names else ""


def _sittings(lines: list[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """When each sitting began, and how many entries it has written."""
    found: list[tuple[str, int]] = []
    for line in lines:
        if "sitting" in line:
            found.append((str(line["sitting"]), 0))
        elif found and line.keys() >= _ENTRY:
            date, entries = found.pop()
            found.append((date, entries + 1))
    return found
