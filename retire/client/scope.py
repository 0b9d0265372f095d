"""A runtime's side of one scope.

Owns: the epoch the runtime knows, and the client's own gate: a frame of an epoch that this process has superseded is
dropped on arrival, also when it was already in a socket buffer when authority moved (invariant 1's last remark).
Must not know: which agent framework calls it.
Strategy: supersede by header, so that the successor is an ordinary OpenAI request; one lock, one number.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from retire.core.errors import CallerError, EpochConflict, EpochRevoked, RetireError

Chunk = dict[str, Any]
CHAT = "/v1/chat/completions"


class ServerRefused(RetireError):
    """Any other refusal; `status` and `answer` are the server's."""

    def __init__(self, status: int, answer: Mapping[str, Any]) -> None:
        super().__init__(f"{status}: {(answer.get('error') or {}).get('message', answer)}")
        self.status = status
        self.answer = answer


class ScopeClient:
    """One scope of a RETIRE server.

    `epoch` is the newest epoch this process has started, 0 before the first answer.  Methods may be called from
    several threads; each stream is read by one.
    """

    def __init__(self, url: str, scope: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)
        self._lock = threading.Lock()
        self.scope = scope
        self.epoch = 0
        self._dead = 0  # epochs up to this one are revoked, or about to be

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        self._http.close()

    def chat(self, request: Mapping[str, Any]) -> Iterator[Chunk]:
        """A streamed chat completion of the current epoch: its chunks, until it ends or is superseded.

        Raises:
            EpochRevoked: the scope was cancelled, or this epoch superseded before anything was said.
            ServerRefused: anything else but 200.
        """
        return self._stream(request, {})

    def supersede(
        self, request: Mapping[str, Any], *, contract: Mapping[str, Any] | None = None, reason: str | None = None
    ) -> Iterator[Chunk]:
        """Revoke the current epoch; the request is the successor.

        From this call on every chunk of an older epoch is dropped, whoever reads it.

        Raises:
            EpochConflict: somebody else superseded first; `epoch` then holds what is current.
            ServerRefused: anything else but 200.
        """
        headers = {"X-Retire-Supersedes": str(self.epoch) if self.epoch else "*"}
        with self._lock:
            self._dead = self.epoch
        if contract is not None:
            headers["X-Retire-Contract"] = json.dumps(dict(contract))
        if reason is not None:
            headers["X-Retire-Reason"] = reason
        return self._stream(request, headers)

    def transition(self, identity: str) -> dict[str, Any]:
        """GET /transitions/{id}."""
        record: dict[str, Any] = self._http.get(f"/transitions/{identity}").raise_for_status().json()
        return record

    def _stream(self, request: Mapping[str, Any], headers: dict[str, str]) -> Iterator[Chunk]:
        context = self._http.stream(
            "POST", CHAT, json={**request, "stream": True}, headers={"X-Retire-Scope": self.scope, **headers}
        )
        response = context.__enter__()
        try:
            if response.status_code != 200:
                self._refused(response.status_code, json.loads(response.read()))
            epoch = int(response.headers["x-retire-epoch"])
            self._started(epoch)
        except BaseException:
            context.__exit__(None, None, None)
            raise
        return self._chunks(context, response, epoch)

    def _chunks(self, context: Any, response: httpx.Response, epoch: int) -> Iterator[Chunk]:
        try:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk: Chunk = json.loads(line[6:])
                if "superseded_by" in chunk.get("retire", {}):
                    self._started(chunk["retire"]["superseded_by"])
                if epoch <= self._dead:  # the client's own gate
                    return
                yield chunk
        finally:
            context.__exit__(None, None, None)

    def _started(self, epoch: int) -> None:
        with self._lock:
            self.epoch = max(self.epoch, epoch)
            self._dead = max(self._dead, self.epoch - 1)

    def _refused(self, status: int, answer: Mapping[str, Any]) -> None:
        error = answer.get("error") or {}
        if answer.get("authority") == "unchanged":
            with self._lock:
                self._dead = min(self._dead, self.epoch - 1)
        current = error.get("current_epoch")
        if current is not None:
            self._started(current)
        kinds: dict[int, type[CallerError]] = {409: EpochConflict, 410: EpochRevoked}
        if status in kinds:
            raise kinds[status](error.get("message", ""), current_epoch=current)
        raise ServerRefused(status, answer)
