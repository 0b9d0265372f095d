"""A history: what clients asked of a server and what they saw, as JSON lines.

Owns: the lines, how they are written and read back.  Must not know: servers, what makes a history right.
Strategy: a call is in the file before it is sent and its answer after it was read, so the beginning of a file is a
history of its own, in which more outcomes are unknown; what was cut off cannot have been seen by what was not.

All times are ns of CLOCK_MONOTONIC, read by the recording process.  Linux gives all processes and threads of one host
the same one, so intervals of several runtimes can be compared as long as they run on one machine between two boots.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

now = time.monotonic_ns


class Kind(StrEnum):
    """What is asked for."""

    JOIN = "join"  # an ordinary request of a scope
    SUPERSEDE = "supersede"
    CANCEL = "cancel"
    LOOK = "look"  # a scope as a GET route shows it
    RECORD = "record"  # a transition as a GET route shows it


class Via(StrEnum):
    """Through what a runtime speaks to the server."""

    RAW = "raw"
    CLIENT = "client"  # retire.client, which has a gate of its own


class What(StrEnum):
    """What was done to the server."""

    STOPPED = "stopped"
    CONTINUED = "continued"
    KILLED = "killed"
    SERVING = "serving"
    HOST_LOST = "host lost"


@dataclass(frozen=True)
class Opening:
    """The first line.  `backlog_bytes`: what of a stream the server says may lie behind its last gate."""

    clock: str = "CLOCK_MONOTONIC, ns"
    seed: int | None = None
    backlog_bytes: int | None = None


@dataclass(frozen=True)
class Call:
    """An operation begins.

    `asked`: the epoch it names, if it does, or if it is known.  `star`: whatever is current is to be superseded.
    """

    id: int
    at: int
    runtime: str
    tenant: str
    scope: str
    kind: Kind
    asked: int | None = None
    star: bool = False
    key: str | None = None
    via: Via = Via.RAW

    @property
    def place(self) -> tuple[str, str]:
        """Tenant and scope."""
        return self.tenant, self.scope


@dataclass(frozen=True)
class Answer:
    """Its answer was read: of a stream, the headers.

    `epoch`: what X-Retire-Epoch says, or the body where it shows a scope.  `authority`: advanced, unchanged, or not
    told.  `current`: of an error.  `old`, `new`, `transition`: of a record.  `published`: of a record, epoch and
    characters of each response that it tells of.  `holds_bytes`: what of a stream may lie unread on the reader's side.
    """

    id: int
    at: int
    status: int
    epoch: int | None = None
    authority: str | None = None
    current: int | None = None
    old: int | None = None
    new: int | None = None
    transition: str | None = None
    cancelled: bool = False
    published: Sequence[tuple[int, int]] | None = None
    holds_bytes: int = 0


@dataclass(frozen=True)
class Lost:
    """No answer came.  `sent`: whether the server can have seen anything of the operation.

    `over`: through retire.client, the epoch up to which all are over for it now, as far as its caller can tell.
    """

    id: int
    at: int
    sent: bool = True
    over: int | None = None


@dataclass(frozen=True)
class Frame:
    """A frame of the response to operation `id` was read, or handed out.

    `asked_at`: when the reader began to ask for it.  `ends`: it is the server's own last word, "superseded" or
    "cancelled"; then `by` is the epoch that it names, and `told_chars` what it says was published.
    """

    id: int
    asked_at: int
    at: int
    epoch: int | None
    bytes: int = 0
    chars: int = 0
    ends: str | None = None
    by: int | None = None
    told_chars: int | None = None


@dataclass(frozen=True)
class Left:
    """A response was read no further.  `how`: done, dropped, lost."""

    id: int
    at: int
    how: str


@dataclass(frozen=True)
class Mark:
    """Something was done to the server."""

    at: int
    what: What
    who: str


Line = Opening | Call | Answer | Lost | Frame | Left | Mark
_LINES: dict[str, type[Any]] = {one.__name__.lower(): one for one in (Opening, Call, Answer, Lost, Frame, Left, Mark)}
_ENUMS = {"kind": Kind, "via": Via, "what": What}


def written(line: Line) -> str:
    """A line as it stands in the file, what is as usual left out."""
    usual = {one.name: one.default for one in dataclasses.fields(line)}
    told = {name: value for name, value in vars(line).items() if value != usual[name]}
    return json.dumps({"line": type(line).__name__.lower(), **told}, separators=(",", ":"))


def read_line(text: str) -> Line:
    """The same back.  Raises ValueError."""
    told = json.loads(text)
    try:
        kind = _LINES[told.pop("line")]
        line: Line = kind(**{name: _ENUMS[name](value) if name in _ENUMS else value for name, value in told.items()})
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a line of a history: {text[:80]!r}") from error
    return line


@dataclass
class Operation:
    """A call and what came of it."""

    call: Call
    answer: Answer | None = None
    lost: Lost | None = None
    frames: list[Frame] = field(default_factory=list)
    left: Left | None = None

    @property
    def id(self) -> int:
        """Its number in the file."""
        return self.call.id

    @property
    def unsent(self) -> bool:
        """Whether it certainly never reached the server."""
        return self.lost is not None and not self.lost.sent

    @property
    def unknown(self) -> bool:
        """Whether it may have taken effect, and nobody was told."""
        return self.answer is None and not self.unsent

    @property
    def epoch(self) -> int | None:
        """The epoch of the response it was given: its headers', or through the client its frames'."""
        if self.answer is None or self.answer.status != 200:
            return None
        if self.answer.new is not None or self.answer.epoch is not None:
            return self.answer.new if self.answer.new is not None else self.answer.epoch
        return next((frame.epoch for frame in self.frames if frame.epoch is not None), None)


@dataclass
class History:
    """A file, put together."""

    opening: Opening = field(default_factory=Opening)
    operations: list[Operation] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def by_scope(self) -> dict[tuple[str, str], list[Operation]]:
        """The operations that concern each scope, in the order of their calls."""
        found: dict[tuple[str, str], list[Operation]] = {}
        for operation in sorted(self.operations, key=lambda one: one.call.at):
            found.setdefault(operation.call.place, []).append(operation)
        return found


def assembled(lines: Iterable[Line]) -> History:
    """A history of its lines.  Raises ValueError when one speaks of a call that nobody made."""
    history = History()
    known: dict[int, Operation] = {}
    for line in lines:
        match line:
            case Opening():
                history.opening = line
            case Mark():
                history.marks.append(line)
            case Call():
                known[line.id] = Operation(line)
                history.operations.append(known[line.id])
            case _ if line.id not in known:
                raise ValueError(f"a line speaks of call {line.id}, which nobody made")
            case Answer():
                known[line.id].answer = line
            case Lost():
                known[line.id].lost = line
            case Frame():
                known[line.id].frames.append(line)
            case Left():
                known[line.id].left = line
    return history


def read(path: Path) -> History:
    """The history in a file; of a last line that was cut off nothing.  Raises ValueError, OSError."""
    whole, _, _rest = path.read_text(encoding="utf-8").rpartition("\n")
    return assembled(read_line(text) for text in whole.splitlines())


class Recorder:
    """Writes a history.  Safe for threads."""

    def __init__(self, path: Path, opening: Opening) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self.write(opening)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is written any more; whoever still tries is not heard."""
        with self._lock:
            self._file.close()

    def call(self, runtime: str, place: tuple[str, str], kind: Kind, *, at: int | None = None, **more: Any) -> Call:
        """Note that an operation begins now, or has begun; it may be sent when this returns."""
        with self._lock:
            number = next(self._ids)
        call = Call(number, now() if at is None else at, runtime, *place, kind, **more)
        self.write(call)
        return call

    def write(self, line: Line) -> None:
        """Note anything else."""
        text = written(line) + "\n"
        with self._lock:
            if not self._file.closed:
                self._file.write(text)

    def mark(self, what: What, who: str) -> None:
        """Note what is done to the server now."""
        self.write(Mark(now(), what, who))
