"""Frames: the pieces of a response that carry model output, and what has been published of them.

Owns: tagging every chunk with (scope, epoch), counting tokens and characters per choice, the chunks that end a
superseded stream.  Must not know: sockets, authority.
Strategy: the gate asks vLLM for running usage on scoped streams, counts from it, and takes it out again when the
client did not ask for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DONE = b"data: [DONE]\n\n"
CHOICES_MAX = 65_536  # more than vLLM answers; a client may ask for any number before vLLM refuses it

Count = tuple[int, int | None, int, bool]
"""Choice, tokens so far (None: not told), characters of this frame, whether the choice is finished."""


def dumps(value: Any) -> bytes:
    """Compact JSON.  Half a surrogate pair, which a client may have sent as an escape, goes back as one."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace")


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(value) + b"\n\n"


@dataclass(slots=True)
class Published:
    """What of one choice has passed the last gate.  `tokens` is None where the answer does not tell."""

    tokens: int | None = 0
    chars: int = 0
    finished: bool = False


@dataclass
class Frames:
    """Rewrites the body of one scoped response.

    `chat`: which of the two endpoints.  `usage`, `running_usage`: what the client itself asked for.
    `fingerprint`: vLLM puts it on the chunk that finishes a choice, or on the usage chunk that we take out.
    """

    tag: dict[str, Any]
    chat: bool
    choices: int
    model: str
    usage: bool
    running_usage: bool
    fingerprint: str | None = None
    published: dict[int, Published] = field(default_factory=dict)
    _head: dict[str, Any] = field(default_factory=dict)

    def rewrite(self, body: bytes) -> tuple[bytes, list[Count]]:
        """Tagged bytes of an SSE body, and (choice, tokens so far, characters, finished) per chunk for `account`."""
        out, counts = [], []
        for event in body.split(b"\n\n"):
            if not event:
                continue
            if not event.startswith(b"data: {"):
                out.append(event + b"\n\n")
                continue
            chunk = json.loads(event[6:])
            if "choices" in chunk:
                if not self._head:
                    self._head = {key: chunk[key] for key in ("id", "object", "created", "model") if key in chunk}
                usage = chunk.get("usage")
                if not chunk["choices"] and not self.usage:
                    continue  # the final usage chunk, which only we asked for
                if chunk["choices"] and not self.running_usage:
                    chunk.pop("usage", None)
                if not self.usage and self.fingerprint and any(c.get("finish_reason") for c in chunk["choices"]):
                    chunk.setdefault("system_fingerprint", self.fingerprint)
                counts += [self._count(choice, usage) for choice in chunk["choices"]]
            chunk["retire"] = self.tag
            out.append(sse(chunk))
        return b"".join(out), counts

    def _count(self, choice: Mapping[str, Any], usage: Mapping[str, Any] | None) -> Count:
        text = (choice.get("delta") or {}).get("content") if self.chat else choice.get("text")
        tokens = usage.get("completion_tokens", 0) if usage else 0
        return choice.get("index", 0), tokens, len(text or ""), choice.get("finish_reason") is not None

    def account(self, counts: list[Count]) -> None:
        """These chunks have passed the last gate."""
        for index, tokens, chars, finished in counts:
            seen = self.published.setdefault(index, Published())
            seen.tokens = None if tokens is None else max(seen.tokens or 0, tokens)
            seen.chars += chars
            seen.finished |= finished

    def summary(self) -> list[dict[str, int | None]]:
        """Per choice, what was published."""
        return [
            {"index": index, "tokens": seen.tokens, "chars": seen.chars}
            for index in range(self.choices)
            for seen in [self.published.get(index, Published())]
        ]

    def ending(self, **why: Any) -> bytes:
        """The chunks that end a superseded stream: one per unfinished choice, then [DONE]."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        head = {"id": "retired", "object": kind, "created": int(time.time()), "model": self.model, **self._head}
        out = []
        for index in range(self.choices):
            seen = self.published.get(index, Published())
            if seen.finished:
                continue
            choice: dict[str, Any] = {"index": index, "finish_reason": "length", "logprobs": None}
            choice["delta" if self.chat else "text"] = {} if self.chat else ""
            note = {**self.tag, **why, "published": {"tokens": seen.tokens, "chars": seen.chars}}
            out.append(sse({**head, "choices": [choice], "retire": note}))
        return b"".join(out) + DONE

    def tag_json(self, body: bytes) -> bytes:
        """A whole JSON answer with the tag in it."""
        return b'{"retire":' + dumps(self.tag) + b"," + body.lstrip()[1:] if body.lstrip()[:1] == b"{" else body
