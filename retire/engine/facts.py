"""What the engine has to tell the API process, in order.

Owns: a bounded log and the one reader that waits at its end.  Facts are flat dictionaries of JSON values.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any

Fact = dict[str, Any]
KEPT = 65_536


class Facts:
    """`after(cursor)` answers when something follows the cursor; the cursor counts facts from 0."""

    def __init__(self) -> None:
        self._log: deque[Fact] = deque(maxlen=KEPT)
        self._count = 0
        self._waiting: tuple[int, Future[dict[str, Any]]] | None = None

    def append(self, fact: Fact) -> None:
        """Add a fact; wake the reader with `flush`."""
        self._log.append(fact)
        self._count += 1

    def flush(self) -> None:
        """Answer the waiting reader if there is something new."""
        if self._waiting is not None and self._count > self._waiting[0]:
            cursor, future = self._waiting
            self._waiting = None
            future.set_result(self._batch(cursor))

    def after(self, cursor: int) -> Future[dict[str, Any]]:
        """A future of {"cursor": next, "facts": [...]}; a later call takes the place of an unanswered one."""
        future: Future[dict[str, Any]] = Future()
        if self._waiting is not None:
            self._waiting[1].cancel()
        self._waiting = (cursor, future)
        self.flush()
        return future

    def _batch(self, cursor: int) -> dict[str, Any]:
        kept = min(self._count - cursor, len(self._log))
        return {"cursor": self._count, "facts": list(self._log)[len(self._log) - kept :]}
