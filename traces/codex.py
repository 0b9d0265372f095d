"""Codex CLI rollouts: `~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl`, `archived_sessions/`, compressed or not.

Owns: which record means what, in which version.  Must not know: files, pairing.
Strategy: a line is `{timestamp, type, payload}` and says nothing of its thread: `session_meta` does, for what follows.

- A turn starts with `task_started` (later `turn_started`).  Rollouts older than that have `user_message` alone; where a
  thread has shown the former, the latter is a message to the running turn.
- `turn_aborted` has had `turn_id`, `completed_at` and `duration_ms` only since some version.  The mirror of it that the
  model sees (a user's `response_item`) is no second abort and is not read.
- `token_count` repeats itself when rate limits change: the running total tells a new call.
- **A fork begins with its parent's history, stamped anew.**  That history is written in one go, so it ends where stamps
  are `BURST_S` apart; where an event says itself when it was (`started_at`, `completed_at`), what was before the fork
  is the parent's.  Two names at once mean a fork even where none is declared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final

from traces.events import (
    Compacted,
    CopySkipped,
    Event,
    Key,
    ModelCalled,
    PromptSeen,
    Record,
    TurnAborted,
    TurnStarted,
    epoch_s,
    identity,
    key_of,
    lasted_s,
    stamp_s,
    tokens,
)
from traces.rows import Agent, Reason, StartKind

BURST_S: Final = 1.0
"""Copied lines are written milliseconds apart, even where a disk stalls; whoever forks takes longer to say
something.
"""

SLACK_S: Final = 2.0
"""`started_at` is in whole seconds, and the first line of a fork may be written after its first turn has begun."""

_STARTS: Final = ("task_started", "turn_started")
_ENDS: Final = ("turn_aborted", "task_complete", "turn_complete")
_REASONS: Final = {reason.value: reason for reason in Reason if reason is not Reason.TOOL_USE}


class Codex:
    """One rollout file; several in a row where somebody has joined them."""

    agent: ClassVar = Agent.CODEX

    def __init__(self, file: Key) -> None:
        self._open(file)

    def wanted(self, line: bytes) -> bool:
        """Everything else is `response_item` and `turn_context`: most bytes of a rollout."""
        return b'"event_msg"' in line or b'"session_meta"' in line or b'"compacted"' in line

    def read(self, record: Record) -> Iterator[Event]:
        """The events of one line."""
        time_s = stamp_s(record.get("timestamp"))
        match record:
            case {"type": "session_meta", "payload": dict(meta)}:
                self._meta(meta, time_s)
            case {"type": "event_msg", "payload": dict(event)}:
                self._bare_since_s = None
                if self._is_copy(_own_s(event), time_s, starts=event.get("type") in _STARTS):
                    self._learn(event)
                    yield CopySkipped(self._thread)
                else:
                    yield from self._event(event, time_s)
            case {"type": "compacted"} if not self._is_copy(None, time_s):
                yield Compacted(self._thread)

    def finish(self) -> tuple[Event, ...]:
        """Nothing is left open."""
        return ()

    def _open(self, thread: Key, *, forked: bool = False, time_s: float | None = None) -> None:
        self._thread = thread
        self._forked = forked
        self._copying = forked
        self._forked_s = time_s
        self._copied_s = time_s  # the stamp of the last copied record
        self._bare_since_s = None if forked else time_s  # None as soon as something has come
        self._tells_tasks = False
        self._total: int | None = None

    def _meta(self, meta: Record, time_s: float | None) -> None:
        name = meta.get("id")
        thread = key_of("codex", name) if isinstance(name, str) and name else self._thread
        if thread == self._thread or self._is_copy(stamp_s(meta.get("timestamp")), time_s):
            return  # resumed, or an ancestor's
        bare_s = self._bare_since_s
        if bare_s is not None and time_s is not None and abs(time_s - bare_s) <= BURST_S:
            self._open(self._thread, forked=True, time_s=time_s)  # a fork that does not say so
        else:
            self._open(thread, forked=_has_parent(meta), time_s=time_s)

    def _is_copy(self, own_s: float | None, time_s: float | None, *, starts: bool = False) -> bool:
        """Whether a record is the parent's.

        `own_s` is when it happened by its own account, `starts` whether that is the start of a turn.
        """
        if not self._forked:
            return False
        if own_s is not None and self._forked_s is not None:
            if own_s < self._forked_s - SLACK_S:
                self._copying, self._copied_s = True, time_s
            elif starts:
                self._copying = False
        if self._copying and time_s is not None:
            self._copying = self._copied_s is None or abs(time_s - self._copied_s) <= BURST_S
            self._copied_s = time_s
        return self._copying

    def _learn(self, event: Record) -> None:
        """What a copied record says about the records to come."""
        match event:
            case {"type": "task_started" | "turn_started"}:
                self._tells_tasks = True
            case {"type": "token_count", "info": {"total_token_usage": {"total_tokens": int(total)}}}:
                self._total = total

    def _event(self, event: Record, time_s: float | None) -> Iterator[Event]:
        thread = self._thread
        match event:
            case {"type": "task_started" | "turn_started"}:
                self._tells_tasks = True
                began_s = epoch_s(event.get("started_at")) if time_s is None else time_s
                key = identity("turn", event.get("turn_id"), thread, began_s)
                yield TurnStarted(thread, key, began_s, StartKind.TASK_STARTED)
            case {"type": "user_message"}:
                text = event.get("message")
                chars = len(text) if isinstance(text, str) else None
                if not self._tells_tasks:
                    key = key_of("message", thread, time_s)
                    yield TurnStarted(thread, key, time_s, StartKind.USER_MESSAGE, chars)
                elif chars is not None:
                    yield PromptSeen(thread, chars)
            case {"type": "turn_aborted"}:
                ended_s = epoch_s(event.get("completed_at")) if time_s is None else time_s
                key = identity("abort", event.get("turn_id"), thread, ended_s)
                reason = event.get("reason")
                known = _REASONS.get(reason, Reason.OTHER) if isinstance(reason, str) else Reason.INTERRUPTED
                yield TurnAborted(thread, key, ended_s, known, lasted_s(event.get("duration_ms")), forked=self._forked)
            case {"type": "context_compacted"}:
                yield Compacted(thread)
            case {"type": "token_count", "info": dict(info)}:
                yield from self._call(info, time_s)

    def _call(self, info: Record, time_s: float | None) -> Iterator[Event]:
        match info:
            case {"total_token_usage": {"total_tokens": int(total)}} if total == self._total:
                return
            case {"total_token_usage": {"total_tokens": int(total)}}:
                self._total = total
        usage = info.get("last_token_usage")
        if isinstance(usage, dict) and (prompt := tokens(usage.get("input_tokens"))):
            cached, output = tokens(usage.get("cached_input_tokens")) or 0, tokens(usage.get("output_tokens")) or 0
            key = key_of("call", self._thread, time_s, prompt, output, self._total)
            yield ModelCalled(self._thread, key, time_s, prompt, min(cached, prompt), output)


def _own_s(event: Record) -> float | None:
    """When an event happened by its own account."""
    kind = event.get("type")
    return epoch_s(event.get("started_at") if kind in _STARTS else event.get("completed_at") if kind in _ENDS else None)


def _has_parent(meta: Record) -> bool:
    """Whether the file may begin with another thread's history."""
    match meta:
        case {"forked_from_id": str(name)} if name:
            return True
        case {"source": {"subagent": {"thread_spawn": {"parent_thread_id": str(name)}}}} if name:
            return True
    return False
