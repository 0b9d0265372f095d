"""Gemini CLI chats: `~/.gemini/tmp/<hash>/chats/session-*.json`, one document, `{sessionId, messages: [...]}`.

Owns: which message means what.  Must not know: files, pairing.
Strategy: the session's name comes once, before its messages.  A cancelled request leaves an `info` message of one fixed
wording.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final

from traces.events import Event, Key, ModelCalled, Record, TurnAborted, TurnStarted, identity, key_of, stamp_s, tokens
from traces.rows import Agent, Reason, StartKind
from traces.skim import is_whole

_CANCELLED: Final = "Request cancelled."


class Gemini:
    """One chat, or messages of it one by one."""

    agent: ClassVar = Agent.GEMINI

    def __init__(self, file: Key) -> None:
        self._thread = file

    def wanted(self, line: bytes) -> bool:
        """Chats come as documents; a message of its own line is read."""
        return b'"type"' in line or b'"sessionId"' in line

    def read(self, record: Record) -> Iterator[Event]:
        """The events of one message, or of what stands before the messages."""
        session = record.get("sessionId")
        if isinstance(session, str) and session:
            self._thread = key_of("gemini", session)
        thread, time_s, name = self._thread, stamp_s(record.get("timestamp")), record.get("id")
        match record:
            case {"type": "user"}:
                text = record.get("content")
                chars = len(text) if isinstance(text, str) and is_whole(text) else None
                yield TurnStarted(thread, identity("turn", name, thread, time_s), time_s, StartKind.USER_PROMPT, chars)
            case {"type": "info", "content": str(text)} if text.strip() == _CANCELLED:
                yield TurnAborted(thread, identity("abort", name, thread, time_s), time_s, Reason.INTERRUPTED)
            case {"type": "gemini", "tokens": dict(usage)}:
                if prompt := tokens(usage.get("input")):
                    output, cached = tokens(usage.get("output")) or 0, tokens(usage.get("cached")) or 0
                    key = identity("call", name, thread, time_s)
                    yield ModelCalled(thread, key, time_s, prompt, min(cached, prompt), output)

    def finish(self) -> tuple[Event, ...]:
        """Nothing is left open."""
        return ()
