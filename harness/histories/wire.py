"""One question to a server on a socket of its own, and what its answer says.

Owns: connections whose reader's side is small and known, the reading of frames, answers as a history has them.
Must not know: plans, who asks.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from harness.histories.history import Answer, Frame, now

TIMEOUT_S = 60.0
RECEIVE_BUFFER = 4096
COMPLETIONS, SUPERSEDE = "/v1/completions", "/supersede"

Body = Mapping[str, Any]


class NotSentError(Exception):
    """The server has seen nothing of it."""


class NoAnswerError(Exception):
    """The server may have seen it."""


@dataclass
class Reply:
    """Status, headers, and the body, or for a stream the lines that are still to come.

    `holds_bytes`: what may lie on this side without having been taken.
    """

    status: int
    headers: Mapping[str, str]
    body: Body
    holds_bytes: int
    _socket: socket.socket
    _response: http.client.HTTPResponse

    @property
    def streams(self) -> bool:
        """Whether frames follow."""
        return _streams(self._response)

    def frames(self, call: int) -> Iterator[Frame]:
        """The frames of that call, each taken when it is asked for, to the end.  Raises NoAnswerError."""
        asked_at = now()
        try:
            while line := self._response.readline():
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: {"):
                    frame = frame_of(call, asked_at, json.loads(line[6:]), len(line) + 1)
                    if frame is not None:
                        yield frame
                        asked_at = now()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswerError(str(error)) from error
        raise NoAnswerError("the stream ended without its end")

    def close(self) -> None:
        """Leave, whatever is still to come."""
        self._response.close()
        self._socket.close()


def ask(
    url: str, method: str, path: str, headers: Mapping[str, str], body: Body | None = None, timeout_s: float = TIMEOUT_S
) -> Reply:
    """Ask; of a stream the headers alone are read.  Raises NotSentError, NoAnswerError."""
    address = urlsplit(url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port or 80)
    connection.sock = sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    sock.settimeout(timeout_s)
    try:
        sock.connect((address.hostname, address.port or 80))
    except OSError as error:
        sock.close()
        raise NotSentError(str(error)) from error
    holds_bytes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) + io.DEFAULT_BUFFER_SIZE
    try:
        payload = None if body is None else json.dumps(body).encode()
        connection.request(method, path, payload, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        told = {} if _streams(response) else json.loads(response.read() or b"{}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        sock.close()
        raise NoAnswerError(str(error)) from error
    lower = {name.lower(): value for name, value in response.headers.items()}
    return Reply(response.status, lower, told if isinstance(told, dict) else {}, holds_bytes, sock, response)


def _streams(response: http.client.HTTPResponse) -> bool:
    return response.status == 200 and (response.getheader("content-type") or "").startswith("text/event-stream")


def answer_of(call: int, reply: Reply) -> Answer:
    """What a reply that was read just now says."""
    body, headers = reply.body, reply.headers
    error = body.get("error") or {}
    epoch = headers.get("x-retire-epoch") or body.get("epoch")
    location = headers.get("location", "")
    return Answer(
        call,
        now(),
        reply.status,
        epoch=None if epoch is None else int(epoch),
        authority=headers.get("x-retire-authority") or body.get("authority"),
        current=error.get("current_epoch"),
        old=body.get("old_epoch"),
        new=body.get("new_epoch"),
        transition=location.removeprefix("/transitions/") or None,
        cancelled=body.get("cancelled") is True,
        published=_published(body),
        holds_bytes=reply.holds_bytes if reply.streams else 0,
    )


def _published(body: Body) -> list[tuple[int, int]] | None:
    told = body.get("published")
    if told is None:
        return None
    return [(one["epoch"], sum(choice["chars"] for choice in one["choices"])) for one in told]


def frame_of(call: int, asked_at: int, chunk: Body, size: int = 0) -> Frame | None:
    """A chunk that was read just now; None for one that is no output of a model."""
    if "choices" not in chunk:
        return None
    told = chunk.get("retire") or {}
    ends = "superseded" if "superseded_by" in told else "cancelled" if told.get("cancelled") else None
    return Frame(
        call,
        asked_at,
        now(),
        told.get("epoch"),
        size,
        sum(len(choice.get("text") or "") for choice in chunk["choices"]),
        ends,
        told.get("superseded_by"),
        (told.get("published") or {}).get("chars"),
    )
