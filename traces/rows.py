"""One transition as a line of JSON.

Owns: the schema, reading and writing.  Must not know: where rows come from.
Strategy: a row can hold numbers, truth values and members of closed lists, nothing else: there is no field for text, a
path, a name or an id.  Counts are of the model's tokens as the agent's log states them; times are seconds after the
source's first event, so that rows say when something happened within a source and not on which day.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final, Self, TextIO

from retire.core.errors import RetireError

AUTO_SUBMIT_S: Final = 0.25
"""Nobody types that fast: a turn that starts sooner after an abort was waiting already."""

_SOURCE: Final = re.compile(r"S\d{2,6}")


class RowError(RetireError):
    """A line is no row of this schema."""


class Agent(StrEnum):
    """Whose log it was."""

    CLAUDE = "claude"
    CODEX = "codex"
    GEMINI = "gemini"
    OPENCODE = "opencode"
    GENERATED = "generated"  # nobody's: drawn from quantiles


class Reason(StrEnum):
    """Why the turn was aborted, as the log says."""

    INTERRUPTED = "interrupted"
    TOOL_USE = "tool_use"  # while a tool ran, or the tool was rejected
    REPLACED = "replaced"
    REVIEW_ENDED = "review_ended"
    BUDGET_LIMITED = "budget_limited"
    OTHER = "other"  # the log has a word that is none of these


class StartKind(StrEnum):
    """The record that the successor's start was read from."""

    TASK_STARTED = "task_started"
    USER_MESSAGE = "user_message"
    USER_PROMPT = "user_prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A turn that was aborted and the next turn of its thread.  None: the log does not say.

    `source` is a number of a collection of logs ("S01") and `scope` one of a thread in it, given in the order of first
    transitions.  Tokens "before" are of the last model call that the log knows before the successor started, tokens
    "after" of the successor's first call.  Where the aborted turn has no call, "before" is an earlier
    turn's.
    """

    source: str
    scope: int
    agent: Agent
    start_kind: StartKind
    reason: Reason
    t_abort_s: float
    t_start_s: float
    gap_s: float  # abort to start; 0 where the successor had been waiting or the clock was set back in between
    aborted_turn_s: float | None = None  # start of the aborted turn to its abort
    aborted_turn_calls: int | None = None  # model calls of it that the log counts tokens of
    prompt_tokens_before: int | None = None
    output_tokens_before: int | None = None  # that call's; Claude Code often states a placeholder of 1 to 8
    prompt_tokens_after: int | None = None
    cached_tokens_after: int | None = None  # of prompt_tokens_after, read from the provider's prefix cache
    first_record_after_start_s: float | None = None  # start to the first call that the log knows
    compacted_between: bool = False  # the agent summarised the conversation between the two prompts
    new_prompt_chars: int | None = None  # characters of the message that started the successor
    auto_submit: bool = False  # a queued message: it was waiting, or came within AUTO_SUBMIT_S
    common_prefix_lb: int | None = None  # tokens that the successor shares with the old prompt and output, at least
    clock_back: bool = False  # the start is recorded after the abort and stamped before it

    @property
    def delta_tokens(self) -> int | None:
        """By how many tokens the prompt grew."""
        if self.prompt_tokens_before is None or self.prompt_tokens_after is None:
            return None
        return self.prompt_tokens_after - self.prompt_tokens_before

    @property
    def kept_share(self) -> float | None:
        """What of the old prompt's tokens the successor begins with, at least; output that it keeps counts as well."""
        if self.common_prefix_lb is None or not self.prompt_tokens_before:
            return None
        return self.common_prefix_lb / self.prompt_tokens_before

    def to_json(self) -> str:
        """One line, without its end.  Times are rounded to milliseconds."""
        row: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            row[field.name] = round(value, 3) if isinstance(value, float) else value
            if field.name == "auto_submit":
                row["delta_tokens"] = self.delta_tokens
        return json.dumps(row)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The row of a line.  Fields that it lacks are unknown, fields that the schema lacks are ignored.

        Raises:
            RowError: not an object, or a field is missing or of another type.
        """
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise RowError("not JSON") from None
        if not isinstance(row, dict):
            raise RowError("not an object")
        known: dict[str, Any] = {}
        for field in fields(cls):
            value = row.get(field.name)
            if value is None and field.name not in _REQUIRED:
                continue
            try:
                known[field.name] = _READERS[field.name](value)
            except (TypeError, ValueError, OverflowError):
                raise RowError(f"{field.name} is missing or not what it should be") from None
        return cls(**known)


def _source(value: Any) -> str:
    if not _SOURCE.fullmatch(value):
        raise ValueError
    return str(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _duration(value: Any) -> float:
    if (number := _number(value)) < 0:
        raise ValueError
    return number


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    if value < 0:
        raise ValueError
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "source": _source,
    "scope": _count,
    "agent": Agent,
    "start_kind": StartKind,
    "reason": Reason,
    "t_abort_s": _number,
    "t_start_s": _number,
    "gap_s": _duration,
    "aborted_turn_s": _duration,
    "aborted_turn_calls": _count,
    "prompt_tokens_before": _count,
    "output_tokens_before": _count,
    "prompt_tokens_after": _count,
    "cached_tokens_after": _count,
    "first_record_after_start_s": _duration,
    "compacted_between": _flag,
    "new_prompt_chars": _count,
    "auto_submit": _flag,
    "common_prefix_lb": _count,
    "clock_back": _flag,
}
_REQUIRED: Final = {"source", "scope", "agent", "start_kind", "reason", "t_abort_s", "t_start_s", "gap_s"}


def write(rows: Iterable[Transition], out: TextIO) -> None:
    """Write rows as JSON lines."""
    out.writelines(row.to_json() + "\n" for row in rows)


def read(lines: Iterable[str]) -> Iterator[Transition]:
    """The rows of JSON lines, empty lines left out.

    Raises:
        RowError: names the first line that is no row.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield Transition.from_json(line)
            except RowError as error:
                raise RowError(f"line {number}: {error}") from None
