"""A runtime's side of one scope.

Owns: requests of the scope and their streams, each frame past the client's gate.
Must not know: which agent framework calls it.
Strategy: supersede by header, so that the successor is an ordinary OpenAI request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn, Self

import httpx

from retire.client.gate import ClientGate
from retire.core.errors import CallerError, EpochConflict, EpochRevoked, RetireError

Chunk = dict[str, Any]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class ServerRefused(RetireError):
    """Any other refusal; `status` and `answer` are the server's."""

    def __init__(self, status: int, answer: Mapping[str, Any]) -> None:
        super().__init__(f"{status}: {(answer.get('error') or {}).get('message', answer)}")
        self.status = status
        self.answer = answer


class ScopeClient:
    """One scope of a RETIRE server.  Methods may be called from several threads; each stream is read by one.

    While a supersede is under way, streams of the scope hand out nothing.  Once it was accepted, nothing of an older
    epoch comes any more, whoever reads it; once it was refused, they go on where they were.
    """

    def __init__(self, url: str, scope: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)
        self._gate = ClientGate()
        self.scope = scope

    @property
    def epoch(self) -> int:
        """The newest epoch this process has heard of, 0 before the first answer."""
        return self._gate.epoch

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
        return self._stream(CHAT, request, {})

    def completions(self, request: Mapping[str, Any]) -> Iterator[Chunk]:
        """A streamed completion.  Otherwise as `chat`."""
        return self._stream(COMPLETIONS, request, {})

    def supersede(
        self, request: Mapping[str, Any], *, contract: Mapping[str, Any] | None = None, reason: str | None = None
    ) -> Iterator[Chunk]:
        """Revoke the current epoch; the request, a chat completion or with `prompt` a completion, is the successor.

        Raises:
            EpochConflict: somebody else superseded first; `epoch` then holds what is current.
            ServerRefused: anything else but 200.
        """
        path = COMPLETIONS if "prompt" in request else CHAT
        with self._gate.asking() as epoch:
            headers = {"X-Retire-Supersedes": str(epoch or "*")}
            if contract is not None:
                headers["X-Retire-Contract"] = json.dumps(dict(contract))
            if reason is not None:
                headers["X-Retire-Reason"] = reason
            return self._stream(path, request, headers, asked=epoch)

    def revoke(self, *, contract: Mapping[str, Any] | None = None, reason: str | None = None) -> dict[str, Any]:
        """Revoke the current epoch; whatever is asked next belongs to the new one.  Gives the server's record.

        Raises:
            EpochConflict: somebody else superseded first; `epoch` then holds what is current.
            ServerRefused: anything else but 200.
        """
        with self._gate.asking() as epoch:
            body = {"scope": self.scope, "expected_epoch": epoch or "*", "contract": contract, "reason": reason}
            told = {name: value for name, value in body.items() if value is not None}
            response = self._http.post("/supersede", json=told)
            if response.status_code != 200:
                self._refused(response, asked=epoch)
            record: dict[str, Any] = response.json()
            self._gate.begun(record["new_epoch"])
            return record

    def transition(self, identity: str) -> dict[str, Any]:
        """GET /transitions/{id}."""
        record: dict[str, Any] = self._http.get(f"/transitions/{identity}").raise_for_status().json()
        return record

    def _stream(
        self, path: str, request: Mapping[str, Any], headers: Mapping[str, str], asked: int = 0
    ) -> Iterator[Chunk]:
        context = self._http.stream(
            "POST", path, json={**request, "stream": True}, headers={"X-Retire-Scope": self.scope, **headers}
        )
        response = context.__enter__()
        try:
            if response.status_code != 200:
                response.read()
                self._refused(response, asked)
            epoch = int(response.headers["x-retire-epoch"])
            self._gate.begun(epoch)
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
                    self._gate.begun(chunk["retire"]["superseded_by"])
                if not self._gate.passes(epoch):
                    return
                yield chunk
        finally:
            context.__exit__(None, None, None)

    def _refused(self, response: httpx.Response, asked: int) -> NoReturn:
        """Take in a refusal of a request that asked to revoke this epoch (0: none), and raise it."""
        answer = response.json()
        error = answer.get("error") or {}
        current = error.get("current_epoch")
        if answer.get("authority") != "unchanged":
            self._gate.revoked(asked)
        if current is not None:
            self._gate.begun(current)
        kinds: dict[int, type[CallerError]] = {409: EpochConflict, 410: EpochRevoked}
        if response.status_code in kinds:
            raise kinds[response.status_code](error.get("message", ""), current_epoch=current)
        raise ServerRefused(response.status_code, answer)
