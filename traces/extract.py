"""From logs to rows.

Owns: which dialect a file is in, and counting what was skipped.  Must not know: what records mean.
Strategy: a file is in the dialect of the first record that any dialect knows.  From then on that dialect says of raw
bytes whether a line is worth parsing; most are not.  Whatever a line holds, it is a record, or is counted and left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from io import BufferedReader
from typing import Final

from traces import files
from traces.claude import Claude
from traces.codex import Codex
from traces.events import Dialect, Record, key_of
from traces.gemini import Gemini
from traces.opencode import OpenCode
from traces.rows import Transition
from traces.skim import Document, is_document
from traces.turns import Collector, File

_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Extraction:
    """Rows in the order of their starts, and how often what was met: names are for people, values are numbers."""

    rows: list[Transition]
    counts: Counter[str]


def extract(paths: Iterable[str], source: str = "S01") -> Extraction:
    """Every transition in the logs at `paths`, files or directories, as one source.

    Nothing in a log is an error: what cannot be read is counted.
    """
    collector = Collector()
    for path in files.find(paths, collector.counts):
        try:
            with files.opened(path) as (head, stream):
                collector.counts["files"] += 1
                _Reader(collector).read(head, stream)
        except files.NoDecoder:
            collector.counts["files that need zstd"] += 1
        except files.Unreadable:
            collector.counts["unreadable"] += 1
    rows = list(collector.rows(source))
    collector.counts["transitions"] = len(rows)
    return Extraction(rows, collector.counts)


class _Reader:
    """One file."""

    def __init__(self, collector: Collector) -> None:
        self._into = collector
        self._counts = collector.counts
        self._dialect: Dialect | None = None
        self._file: File | None = None

    def read(self, head: bytes, stream: BufferedReader) -> None:
        """Tell the collector what the file says, as far as it can be read."""
        try:
            if is_document(head):
                self._document(stream)
            elif _is_other(head):
                pass
            else:
                self._lines(stream)
        except files.Unreadable:
            self._counts["files cut short"] += 1
        if self._dialect and self._file:
            for event in self._dialect.finish():
                self._file.take(event)
            self._file.end()
        else:
            self._counts["files of no known kind"] += 1

    def _lines(self, stream: BufferedReader) -> None:
        for whole in files.lines(stream, self._counts):
            line = whole.removeprefix(_BOM)
            if not (line.startswith(b"{") and line.endswith(b"}")):
                self._counts["broken lines"] += 1
            elif self._dialect is None or self._dialect.wanted(line):
                self._take(line)

    def _document(self, stream: BufferedReader) -> None:
        document = Document()
        while chunk := stream.read1(files.LINE_BYTES):
            for message in document.feed(chunk):
                self._take(message)
        self._counts["messages too large"] += document.lost
        self._counts["files cut short"] += not document.complete

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(str(line, "utf-8", "replace"))
        except (ValueError, RecursionError):
            self._counts["broken lines"] += 1
            return
        if self._dialect is None or self._file is None:
            known = _dialect(record)
            if known is None:
                return
            self._dialect = known(key_of("file", self._counts["files"]))
            self._file = File(known.agent, self._into)
        for event in self._dialect.read(record):
            self._file.take(event)


def _is_other(head: bytes) -> bool:
    """Whether a file is JSON laid out for people: a bracket has the first line for itself."""
    return head.removeprefix(_BOM).lstrip().split(b"\n", 1)[0].strip() in {b"{", b"["}


def _dialect(record: Record) -> type[Dialect] | None:
    match record:
        case {"type": str(), "payload": dict()}:
            return Codex
        case {"info": {"role": str()}}:
            return OpenCode
        case {"type": str(), "message": dict()} | {"type": str(), "uuid": str()}:
            return Claude
        case {"type": "user" | "gemini" | "info", "id": str()}:
            return Gemini
        case {"sessionId": str()} if "type" not in record:
            return Gemini
    return None
