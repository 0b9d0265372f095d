"""From files to records, whatever state they are in.

Owns: which files belong to one process, what is missing.  Must not know: what records mean.
Strategy: a file is what is left of one, so nothing here raises for its content: what cannot be read is a gap, and a gap
is told.  A file that ends early, or in a torn record, ends where its process was killed: that is no gap.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from retire.journal.schema import RECORD_BYTES, Head, Record, unpack, unpack_head

_GZIP: Final = 31  # zlib's window bits for a gzip header


class _Unpacking(Protocol):
    @property
    def eof(self) -> bool: ...
    def decompress(self, data: bytes, /) -> bytes: ...


@dataclass
class Journal:
    """What one process wrote.  `missing`: what is known to be not there, in words."""

    head: Head
    records: list[Record] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the process."""
        return f"{self.head.process}-{self.head.pid}"

    @property
    def complete(self) -> bool:
        """Whether every record that the process wrote is here, as far as numbers can tell."""
        return not self.missing


def read(paths: Iterable[Path]) -> tuple[list[Journal], list[str]]:
    """The journals in these files and folders, by process, and what is no journal.

    Raises:
        OSError: a path cannot be read at all.
    """
    lives: dict[int, Journal] = {}
    strangers: list[str] = []
    parts: dict[int, list[Record]] = {}
    for path in sorted(_files(paths)):
        data, whole = _content(path)
        head = unpack_head(data)
        if head is None:
            if data.strip(b"\0") or not whole:  # else the process was killed before it wrote anything
                strangers.append(f"{path.name}: no journal of this version")
            continue
        journal = lives.setdefault(head.life, Journal(head))
        parts.setdefault(head.life, []).extend(_records(data, journal, path.name))
        if not whole:
            journal.missing.append(f"{path.name} ends early")
    for life, journal in lives.items():
        journal.records = sorted({record.seq: record for record in parts[life]}.values())
        _note_gaps(journal)
    return sorted(lives.values(), key=lambda one: (one.records[0].at_ns if one.records else 0, one.name)), strangers


def _files(paths: Iterable[Path]) -> Iterable[Path]:
    for path in paths:
        if path.is_dir():
            yield from (file for file in path.rglob("*") if file.is_file())
        else:
            yield path


def _content(path: Path) -> tuple[bytes, bool]:
    """All that can be had of a file, and whether that is all of it."""
    data = path.read_bytes()
    unpacking: _Unpacking
    if path.suffix == ".gz":
        unpacking = zlib.decompressobj(_GZIP)
    elif path.suffix == ".xz":
        unpacking = lzma.LZMADecompressor()
    else:
        return data, True
    try:
        return unpacking.decompress(data), unpacking.eof
    except (zlib.error, lzma.LZMAError):
        return b"", False


def _records(data: bytes, journal: Journal, name: str) -> list[Record]:
    found: list[Record] = []
    torn = 0
    for at in range(RECORD_BYTES, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        piece = data[at : at + RECORD_BYTES]
        record = unpack(piece)
        if record is None:
            torn = torn or (at if piece.strip(b"\0") else 0)
        elif torn:
            journal.missing.append(f"{name}: the record at byte {torn} is damaged")
            torn = 0
            found.append(record)
        else:
            found.append(record)
    return found


def _note_gaps(journal: Journal) -> None:
    if not journal.records:
        journal.missing.append("no record can be read")
        return
    expected = 1
    for record in journal.records:
        if record.seq != expected:
            journal.missing.append(f"records {expected} to {record.seq - 1} are not here")
        expected = record.seq + 1
