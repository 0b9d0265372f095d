"""Claude Code sessions: `~/.claude/projects/<folder>/<uuid>.jsonl`.

Owns: which record means what.  Must not know: files, pairing.
Strategy: every record names its session and its parent.  An abort is a user's record that says nothing but one of two
markers.

- Not the start of a turn: `isMeta`, `isCompactSummary`, tool results, and what the client writes in a user's name
  (`<local-command-*>`, `<bash-*>`, `<task-notification>`).  A slash command is a turn if the model is asked, and none
  if the client answers it: it is held back until the next record tells.
- A subagent's records (`isSidechain`) are part of the turn that runs it.
- One call comes in several records of one `requestId`; the largest `output_tokens` is the nearest to the truth.
- **A resumed session may begin with a copy of the one before it**, under the same uuids and sometimes still under its
  name; a record whose parent is in this file goes on with its parent's thread, whatever session it names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Final

from traces.events import (
    Compacted,
    Event,
    Key,
    ModelCalled,
    Record,
    TurnAborted,
    TurnStarted,
    identity,
    key_of,
    stamp_s,
    tokens,
)
from traces.rows import Agent, Reason, StartKind
from traces.skim import is_whole

_MARKERS: Final = {
    "[Request interrupted by user]": Reason.INTERRUPTED,
    "[Request interrupted by user for tool use]": Reason.TOOL_USE,
}
_MARKER: Final = b"[Request interrupted by user"
_LOCAL: Final = "<local-command-"
_CLIENTS: Final = (_LOCAL, "<bash-", "<task-notification>")
_COMMANDS: Final = ("<command-name>", "<command-message>")
_RECENT: Final = 1024  # uuids of parents that are remembered


class Claude:
    """One session file; several in a row, or mixed, where somebody has joined them."""

    agent: ClassVar = Agent.CLAUDE

    def __init__(self, file: Key) -> None:
        self._file = file
        self._sessions: dict[Key, Key] = {}
        self._recent: dict[Key, Key] = {}
        self._held: TurnStarted | None = None

    def wanted(self, line: bytes) -> bool:
        """Tool results are most bytes of a session, and start nothing."""
        if b'"assistant"' in line:
            return True
        if b'"user"' in line:
            return b'"tool_result"' not in line or _MARKER in line
        return b'"compact_boundary"' in line or b'"local_command"' in line

    def read(self, record: Record) -> Iterator[Event]:
        """The events of one line."""
        if record.get("isSidechain") is True:
            return
        thread = self._thread(record)
        match record:
            case {"type": "system", "subtype": "local_command"}:
                self._held = None
            case {"type": "system", "subtype": "compact_boundary"} | {"type": "user", "isCompactSummary": True}:
                yield from self.finish()
                yield Compacted(thread)
            case {"type": "assistant", "message": dict(message)}:
                yield from self.finish()
                yield from self._call(record, message, thread)
            case {"type": "user", "isMeta": True}:
                pass
            case {"type": "user", "message": {"content": str() | list() as content}}:
                yield from self._user(record, content, thread)

    def finish(self) -> Iterator[Event]:
        """A command that was held back was a turn."""
        if self._held:
            yield self._held
        self._held = None

    def _thread(self, record: Record) -> Key:
        session, parent, own = (_hashed(record.get(field)) for field in ("sessionId", "parentUuid", "uuid"))
        thread = self._sessions.get(session) if session else None
        if thread is None and parent:
            thread = self._recent.get(parent)
        if thread is None:
            thread = session or self._file
        if session:
            self._sessions[session] = thread
        if own:
            self._recent[own] = thread
            if len(self._recent) > _RECENT:
                del self._recent[next(iter(self._recent))]
        return thread

    def _user(self, record: Record, content: str | list[Any], thread: Key) -> Iterator[Event]:
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        kinds = {kind for block in blocks if isinstance(block, dict) and isinstance(kind := block.get("type"), str)}
        texts = [
            text.strip() for block in blocks if isinstance(block, dict) and isinstance(text := block.get("text"), str)
        ]
        time_s = stamp_s(record.get("timestamp"))
        if reasons := [_MARKERS[text] for text in texts if text in _MARKERS]:
            yield from self.finish()
            yield TurnAborted(
                thread, identity("abort", record.get("uuid"), thread, time_s, anywhere=True), time_s, reasons[0]
            )
        elif "tool_result" in kinds or (
            kinds <= {"text"} and all(not text or text.startswith(_CLIENTS) for text in texts)
        ):
            if texts and texts[0].startswith(_LOCAL):
                self._held = None
        else:
            yield from self.finish()
            chars = sum(map(len, texts)) if all(map(is_whole, texts)) else None
            key = identity("turn", record.get("uuid"), thread, time_s, anywhere=True)
            start = TurnStarted(thread, key, time_s, StartKind.USER_PROMPT, chars)
            if texts and texts[0].startswith(_COMMANDS):
                self._held = start
            else:
                yield start

    def _call(self, record: Record, message: Record, thread: Key) -> Iterator[Event]:
        usage = message.get("usage")
        if not isinstance(usage, dict):
            return
        fresh, written, cached = (
            tokens(usage.get(field)) or 0
            for field in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        )
        if prompt := fresh + written + cached:  # what the client says in the model's name has none
            names = (record.get("requestId"), message.get("id"), record.get("uuid"))
            name = next((name for name in names if isinstance(name, str) and name), None)
            time_s = stamp_s(record.get("timestamp"))
            key = key_of("call", thread, name or time_s)
            yield ModelCalled(thread, key, time_s, prompt, cached, tokens(usage.get("output_tokens")) or 0)


def _hashed(name: Any) -> Key | None:
    return key_of("claude", name) if isinstance(name, str) and name else None
