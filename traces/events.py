"""What every agent's log can be told in: turns start, call a model, are aborted.

Owns: the events, and reading times, counts and ids out of foreign JSON.  Must not know: any agent's format.
Strategy: nothing of a log's text gets into an event.  Ids become 8-byte hashes at once, times become seconds since
1970, and a count is believed only where a count can be.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, ClassVar, Final, NewType, Protocol

from traces.rows import Agent, Reason, StartKind

Key = NewType("Key", int)
"""The hash of something that must be recognised when it comes again."""

Record = dict[str, Any]
"""One JSON object of a log."""

_YEAR_2000_S: Final = 946_684_800.0
_YEAR_2100_S: Final = 4_102_444_800.0
_MOST_TOKENS: Final = 10**7  # a larger number is an id or a mistake
_LONGEST_TURN_S: Final = 30 * 86_400.0
_UNIQUE_CHARS: Final = 16  # a shorter id may be somebody else's as well


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """A user's turn begins.  `time_s` None: nobody knows when, but it is the next turn."""

    thread: Key
    key: Key
    time_s: float | None
    kind: StartKind
    prompt_chars: int | None = None
    waiting: bool = False  # stamped when it was queued, while the turn before it still ran


@dataclass(frozen=True, slots=True)
class PromptSeen:
    """The message of the turn that has just started, in characters."""

    thread: Key
    chars: int


@dataclass(frozen=True, slots=True)
class ModelCalled:
    """The model has answered, or has said one more piece of the answer (`key` is then the same)."""

    thread: Key
    key: Key
    time_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TurnAborted:
    """The running turn ends before it is done.  `lasted_s` is what the log says, if it does."""

    thread: Key
    key: Key
    time_s: float | None
    reason: Reason
    lasted_s: float | None = None
    forked: bool = False  # told by a thread that began with a copy of another's history


@dataclass(frozen=True, slots=True)
class Compacted:
    """The conversation was summarised: the next prompt is another one."""

    thread: Key


@dataclass(frozen=True, slots=True)
class CopySkipped:
    """Something that another thread had told before it was forked."""

    thread: Key


Event = TurnStarted | PromptSeen | ModelCalled | TurnAborted | Compacted | CopySkipped


class Dialect(Protocol):
    """One agent's log, one file of it."""

    agent: ClassVar[Agent]

    def __init__(self, file: Key) -> None:
        """`file` stands for the thread where the log names none."""

    def wanted(self, line: bytes) -> bool:
        """Whether a line can matter, cheaply.  Wrong answers may only be True."""
        ...

    def read(self, record: Record) -> Iterable[Event]:
        """The events of a record, in the order of the log."""
        ...

    def finish(self) -> Iterable[Event]:
        """What the end of the file decides."""
        ...


def key_of(*parts: str | float | None) -> Key:
    """A hash of parts; equal parts have equal hashes in every run."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return Key(int.from_bytes(blake2b(text, digest_size=8).digest()))


def identity(kind: str, name: Any, thread: Key, time_s: float | None, *, anywhere: bool = False) -> Key:
    """What makes an event the same event where it is found again.

    That is its id, and where the id is too short to be nobody else's, its time and thread too; without an id its time
    and thread alone.  `anywhere`: copies may be told by other threads, with the same time.
    """
    if isinstance(name, str) and len(name) >= _UNIQUE_CHARS:
        return key_of(kind, name)
    if isinstance(name, str) and name and anywhere:
        return key_of(kind, name, time_s)
    return key_of(kind, name if isinstance(name, str) else None, thread, time_s)


def stamp_s(value: Any) -> float | None:
    """Seconds since 1970 of an RFC 3339 stamp; without a zone it is UTC's.  None: no stamp of this century."""
    if not isinstance(value, str):
        return None
    try:
        stamp = datetime.fromisoformat(value.upper())
        return _this_century((stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        return None


def epoch_s(value: Any, per_s: int = 1) -> float | None:
    """Seconds since 1970 of a number that counts `per_s` per second.  None: no time of this century."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return _this_century(value / per_s) if abs(value) <= _YEAR_2100_S * per_s else None


def _this_century(time_s: float) -> float | None:
    return time_s if _YEAR_2000_S <= time_s < _YEAR_2100_S else None


def tokens(value: Any) -> int | None:
    """A token count.  None: no integer, or one that no count can be."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS else None


def lasted_s(milliseconds: Any) -> float | None:
    """How long a turn took.  None: no number, or one that no turn can take."""
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float):
        return None
    return milliseconds / 1000 if 0 <= milliseconds <= _LONGEST_TURN_S * 1000 else None
