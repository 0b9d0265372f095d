"""Which files are read, and how lines come out of them.

Owns: finding, opening, decompressing, bounds on memory, counting what could not be read.  Must not know: what lines
say.
Strategy: nothing that a directory can hold may stop the reading or make it wait.  Only regular files are opened, links
inside a directory are not followed, a file that is met again under another name is left out, and what cannot be read is
counted.  A line longer than `LINE_BYTES` is shortened while it is read (`traces.skim`).  Whether a file is compressed
is asked of its first bytes.
"""

from __future__ import annotations

import gzip
import importlib
import io
import os
import re
import shutil
import stat
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from traces.skim import Shortener

LINE_BYTES: Final = 1 << 20
HEAD_BYTES: Final = 1 << 16
_NAMES: Final = re.compile(r".*\.jsonl?(\.gz|\.zst)?", re.IGNORECASE | re.DOTALL)
_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"

Unreadable = (OSError, EOFError, zlib.error)
"""What a damaged, vanished or forbidden file can raise."""


class _Source(Protocol):
    def read1(self, size: int, /) -> bytes: ...


class NoDecoder(OSError):
    """Compressed by something that this machine has no program for."""


def find(paths: Iterable[str], counts: Counter[str]) -> Iterator[Path]:
    """Regular files: those named in `paths`, and the logs in the directories named there, in the order of their
    names.
    """
    met: set[tuple[int, int]] = set()
    for path in paths:
        waiting = [(Path(path), True)]
        while waiting:
            place, named = waiting.pop()
            try:
                about = place.stat() if named else place.lstat()
                if stat.S_ISDIR(about.st_mode):
                    waiting += [(inside, False) for inside in sorted(place.iterdir(), reverse=True)]
                    continue
            except (OSError, ValueError):  # ValueError: a path that no file can have
                counts["unreadable"] += 1
                continue
            if not named and not _NAMES.fullmatch(place.name):
                continue
            if not stat.S_ISREG(about.st_mode):
                counts["links, pipes and devices skipped"] += 1
            elif (about.st_dev, about.st_ino) in met:
                counts["files met twice"] += 1
            else:
                met.add((about.st_dev, about.st_ino))
                yield place


@contextmanager
def opened(path: Path) -> Iterator[tuple[bytes, io.BufferedReader]]:
    """A file's first bytes, and the whole of it as a stream.

    Raises:
        OSError: it cannot be opened, is no regular file any more, or nothing here can decompress it.
    """
    # Should a pipe have taken the place of the file, this does not wait for its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as raw:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file")
        with _decompressed(raw, os.pread(descriptor, 4, 0)) as source:
            head = b""
            try:
                while len(head) < HEAD_BYTES and (more := source.read1(HEAD_BYTES)):
                    head += more
            except Unreadable:
                if not head:
                    raise
            yield head, io.BufferedReader(_Rejoined(head, source), LINE_BYTES)


@contextmanager
def _decompressed(raw: io.FileIO, magic: bytes) -> Iterator[_Source]:
    if magic.startswith(_GZIP):
        with gzip.GzipFile(fileobj=raw) as stream:
            yield stream
    elif magic == _ZSTD:
        with _zstd(raw) as source:
            yield source
    else:
        yield io.BufferedReader(raw, LINE_BYTES)


@contextmanager
def _zstd(raw: io.FileIO) -> Iterator[_Source]:
    """By the standard library, which can since Python 3.14, or by the program."""
    try:
        library: Any = importlib.import_module("compression.zstd")
    except ModuleNotFoundError:
        if (program := shutil.which("zstd")) is None:
            raise NoDecoder("no zstd") from None
        with subprocess.Popen(
            [program, "-dcq"], stdin=raw, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            try:
                yield _Piped(process)
            finally:
                process.kill()
    else:
        with library.ZstdFile(raw) as stream:
            yield _Decoded(stream, library.ZstdError)


class _Piped:
    """What a program says.  That it failed is told at the end."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def read1(self, size: int, /) -> bytes:
        assert isinstance(self._process.stdout, io.BufferedReader)
        data = self._process.stdout.read1(size)
        if not data and self._process.wait():
            raise EOFError("damaged")
        return data


class _Decoded:
    """What a decoder says that has an error of its own."""

    def __init__(self, stream: _Source, error: type[Exception]) -> None:
        self._stream = stream
        self._error = error

    def read1(self, size: int, /) -> bytes:
        try:
            return self._stream.read1(size)
        except self._error:
            raise EOFError("damaged") from None


class _Rejoined(io.RawIOBase):
    """A beginning that has been read, and the rest."""

    def __init__(self, head: bytes, rest: _Source) -> None:
        super().__init__()
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if self._head:
            data, self._head = self._head[: len(buffer)], self._head[len(buffer) :]
        else:
            data = self._rest.read1(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def lines(stream: io.BufferedReader, counts: Counter[str]) -> Iterator[bytes]:
    """The lines of a stream without their ends, empty ones left out, long ones shortened.

    Raises:
        OSError, EOFError, zlib.error: the file cannot be read further; complete lines before that have come.
    """
    while line := stream.readline(LINE_BYTES):
        if len(line) == LINE_BYTES and not line.endswith(b"\n"):
            line = _shortened(line, stream)
            if len(line) > LINE_BYTES:
                counts["lines too long"] += 1
                continue
        if line := line.strip():
            yield line


def _shortened(beginning: bytes, stream: io.BufferedReader) -> bytes:
    """The rest of a long line is read and mostly forgotten."""
    shortener = Shortener()
    out, piece = bytearray(), beginning
    while piece:
        if len(out) <= LINE_BYTES:
            out += shortener.feed(piece)
        if piece.endswith(b"\n"):
            break
        piece = stream.readline(LINE_BYTES)
    return bytes(out)
