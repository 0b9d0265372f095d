"""Records of the agents' logs, made up.  `at` is in seconds after some morning."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from traces.extract import Extraction, extract
from traces.rows import Transition

LOGS = Path(__file__).parent / "logs"
MORNING = datetime(2026, 1, 1, 6, tzinfo=UTC)
MARKER = "[Request interrupted by user]"
TOOL_MARKER = "[Request interrupted by user for tool use]"


def stamp(at: float) -> str:
    return (MORNING + timedelta(seconds=at)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def epoch(at: float) -> int:
    return int((MORNING + timedelta(seconds=at)).timestamp())


def name(text: str) -> str:
    """An id that is long enough to be nobody else's."""
    return f"{text:-<32}"


# ---------------------------------------------------------------- Codex


def line(at: float, kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    return {"timestamp": stamp(at), "type": kind, "payload": payload}


def event(at: float, kind: str, **payload: Any) -> dict[str, Any]:
    return line(at, "event_msg", {"type": kind, **payload})


def meta(at: float, thread: str = "T", **payload: Any) -> dict[str, Any]:
    return line(at, "session_meta", {"id": name(thread), "timestamp": stamp(at), **payload})


def started(at: float, turn: str | None = None, **payload: Any) -> dict[str, Any]:
    return event(at, "task_started", **({"turn_id": name(turn)} if turn else {}), **payload)


def aborted(at: float, turn: str | None = None, **payload: Any) -> dict[str, Any]:
    return event(at, "turn_aborted", reason="interrupted", **({"turn_id": name(turn)} if turn else {}), **payload)


def counted(at: float, prompt: int, cached: int = 0, output: int = 1, total: int | None = None) -> dict[str, Any]:
    usage = {"input_tokens": prompt, "cached_input_tokens": cached, "output_tokens": output}
    totals = {"total_token_usage": {"total_tokens": total}} if total is not None else {}
    return event(at, "token_count", info={"last_token_usage": usage, **totals})


# ---------------------------------------------------------------- Claude Code


def claude(at: float, uuid: str, session: str = "S", parent: str | None = None, **record: Any) -> dict[str, Any]:
    return {
        "parentUuid": parent and name(parent),
        "isSidechain": False,
        "sessionId": name(session),
        "uuid": name(uuid),
        "timestamp": stamp(at),
        **record,
    }


def said(at: float, uuid: str, text: Any = "go on", session: str = "S", **record: Any) -> dict[str, Any]:
    return claude(at, uuid, session, type="user", message={"role": "user", "content": text}, **record)


def stopped(at: float, uuid: str, session: str = "S", text: str = MARKER, **record: Any) -> dict[str, Any]:
    return said(at, uuid, [{"type": "text", "text": text}], session, **record)


def answered(at: float, uuid: str, prompt: int = 100, session: str = "S", **record: Any) -> dict[str, Any]:
    usage = {
        "input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": prompt - 1,
        "output_tokens": 1,
    }
    message = {"role": "assistant", "id": name(uuid), "content": [{"type": "text", "text": "x"}], "usage": usage}
    return claude(at, uuid, session, type="assistant", requestId=name(uuid), message=message, **record)


# ---------------------------------------------------------------- reading them


def write(path: Path, *records: dict[str, Any] | bytes) -> Path:
    """One line per record; bytes are lines as they are."""
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records))
    return path


def read(*paths: Path) -> Extraction:
    return extract(map(str, paths))


def told(rows: list[Transition]) -> list[tuple[int, float, float]]:
    """Scope, abort and gap of each, in milliseconds where they are times."""
    return [(row.scope, round(row.t_abort_s, 3), round(row.gap_s, 3)) for row in rows]
