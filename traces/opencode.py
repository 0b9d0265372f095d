"""OpenCode exports: one document, `{info, messages: [{info, parts}]}`.

Owns: which message means what.  Must not know: files, pairing.
Strategy: a message's `info` says all that is wanted.  Messages stand in the order in which they were made, so one that
was queued stands after the aborted answer that it waited for and is stamped before that answer's end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from traces.events import (
    Compacted,
    Event,
    Key,
    ModelCalled,
    Record,
    TurnAborted,
    TurnStarted,
    epoch_s,
    identity,
    key_of,
    tokens,
)
from traces.rows import Agent, Reason, StartKind


class OpenCode:
    """One export, or messages of it one by one."""

    agent: ClassVar = Agent.OPENCODE

    def __init__(self, file: Key) -> None:
        self._file = file
        self._aborted_s: dict[Key, float] = {}

    def wanted(self, line: bytes) -> bool:
        """Exports come as documents; a message of its own line is small."""
        return b'"role"' in line

    def read(self, record: Record) -> Iterator[Event]:
        """The events of one message."""
        match record:
            case {"info": {"role": str(role), "time": dict(time)} as info}:
                created_s, completed_s = (epoch_s(time.get(field), per_s=1000) for field in ("created", "completed"))
                session = info.get("sessionID")
                thread = key_of("opencode", session) if isinstance(session, str) and session else self._file
                if role == "user":
                    waiting = created_s is not None and created_s < self._aborted_s.get(thread, 0.0)
                    key = identity("turn", info.get("id"), thread, created_s)
                    yield TurnStarted(thread, key, created_s, StartKind.USER_PROMPT, waiting=waiting)
                elif role == "assistant":
                    yield from self._answer(info, thread, created_s, completed_s)

    def finish(self) -> tuple[Event, ...]:
        """Nothing is left open."""
        return ()

    def _answer(self, info: Record, thread: Key, created_s: float | None, completed_s: float | None) -> Iterator[Event]:
        if info.get("summary") is True:
            yield Compacted(thread)
        else:
            yield from _call(info, thread, created_s)
        match info:
            case {"error": {"name": "MessageAbortedError"}}:
                ended_s = created_s if completed_s is None else completed_s
                if ended_s is not None:
                    self._aborted_s[thread] = ended_s
                key = identity("abort", info.get("id"), thread, ended_s)
                yield TurnAborted(thread, key, ended_s, Reason.INTERRUPTED)


def _call(info: Record, thread: Key, created_s: float | None) -> Iterator[Event]:
    match info:
        case {"tokens": {"cache": dict(cache), **usage}}:
            fresh, cached, written = (
                tokens(value) or 0 for value in (usage.get("input"), cache.get("read"), cache.get("write"))
            )
            output = (tokens(usage.get("output")) or 0) + (tokens(usage.get("reasoning")) or 0)
            if prompt := fresh + cached + written:  # an answer that was aborted early has counted nothing
                key = identity("call", info.get("id"), thread, created_s)
                yield ModelCalled(thread, key, created_s, prompt, cached, output)
