"""A small HTTP client that remembers when every frame came.

Owns: times and epochs of frames as an application sees them.  Used by demo and benches; the product's client is
`retire.client`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 600.0
NEAR = 0.25
_TLS = ssl.create_default_context()  # one for all: making one costs 70 ms, or seconds while a stream is being read
http = httpx.Client(timeout=TIMEOUT_S, verify=_TLS, limits=httpx.Limits(max_keepalive_connections=0))
"""For single questions: a new connection each, nothing else to set up."""


@dataclass
class Frame:
    """One chunk.  `at` is seconds of `time.monotonic`; `text` the content it carried."""

    at: float
    epoch: int | None
    text: str
    body: dict[str, Any]

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens it carried, if token ids were asked for."""
        return [token for choice in self.body.get("choices", []) for token in choice.get("token_ids") or []]


@dataclass
class Reply:
    """A streamed response, filled in while it arrives."""

    sent_at: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    headers_at: float = 0.0
    frames: list[Frame] = field(default_factory=list)
    error: dict[str, Any] | None = None
    done_at: float = 0.0

    @property
    def text(self) -> str:
        """Everything said."""
        return "".join(frame.text for frame in self.frames)

    @property
    def first_text_at(self) -> float:
        """When the first content came; inf if none did."""
        return next((frame.at for frame in self.frames if frame.text), float("inf"))

    @property
    def first_token_at(self) -> float:
        """When the first generated token came, if token ids were asked for; inf if none did."""
        return next((frame.at for frame in self.frames if frame.token_ids), float("inf"))

    @property
    def token_ids(self) -> list[int]:
        """Every generated token, if token ids were asked for."""
        return [token for frame in list(self.frames) for token in frame.token_ids]

    @property
    def logprobs(self) -> list[tuple[str, float]]:
        """Token and log-probability of every generated token that was asked for."""
        found: list[tuple[str, float]] = []
        for choice in (choice for frame in self.frames for choice in frame.body.get("choices", [])):
            told = choice.get("logprobs") or {}
            found += [(entry["token"], entry["logprob"]) for entry in told.get("content") or []]
            found += zip(told.get("tokens") or [], told.get("token_logprobs") or [], strict=True)
        return found

    @property
    def alternatives(self) -> list[dict[str, float]]:
        """For every generated token of a completion the likeliest tokens there, if any were asked for."""
        choices = (choice for frame in self.frames for choice in frame.body.get("choices", []))
        return [place for choice in choices for place in (choice.get("logprobs") or {}).get("top_logprobs") or []]

    @property
    def cached_tokens(self) -> int | None:
        """How much of the prompt was not computed, if usage was asked for and the server tells."""
        details = [(frame.body.get("usage") or {}).get("prompt_tokens_details") for frame in self.frames]
        return next((told["cached_tokens"] for told in details if told is not None), None)


def difference(reference: Reply, other: Reply, *, whole: bool = True) -> str | None:
    """Where and how two greedy answers differ, or None if they are equal as far as numerics can tell.

    How a prompt is cut into steps changes the last bits of its KV, so they may part where the log-probabilities of two
    tokens are within `NEAR` of each other; what comes after that is not compared.  `reference` must have been asked for
    alternatives.  If not `whole`, they are compared as far as both go.
    """
    expected, said = reference.logprobs, other.logprobs
    for place, ((token, likely), (here, _), likeliest) in enumerate(
        zip(expected, said, reference.alternatives, strict=False), start=1
    ):
        if here != token:
            gap = likely - likeliest[here] if here in likeliest else None
            if gap is not None and gap <= NEAR:
                return None
            less = "not among the likeliest" if gap is None else f"{gap:.3f} less likely (near: {NEAR:g})"
            return f"token {place} of {len(expected)} is {here!r} instead of {token!r}, {less}"
    if whole and len(expected) != len(said):
        return f"{len(said)} tokens instead of {len(expected)}"
    return "no token was told" if whole and not expected else None


def says_the_same(reference: Reply, other: Reply, *, whole: bool = True) -> bool:
    """Whether there is no `difference`."""
    return difference(reference, other, whole=whole) is None


class Streaming:
    """A streamed chat completion (or, with `prompt` in its body, completion) in a thread of its own."""

    def __init__(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        self.reply = Reply()
        self._url, self._body, self._headers = f"{url}{path}", {**body, "stream": True}, headers or {}
        self._client = httpx.Client(timeout=TIMEOUT_S, verify=_TLS)
        self._socket: socket.socket | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.reply.sent_at = time.monotonic()
        self._thread.start()

    def _run(self) -> None:
        reply = self.reply
        try:
            with self._client.stream("POST", self._url, json=self._body, headers=dict(self._headers)) as response:
                reply.status, reply.headers = response.status_code, dict(response.headers)
                reply.headers_at = time.monotonic()
                self._socket = response.extensions["network_stream"].get_extra_info("socket")
                if response.status_code != 200:
                    reply.error = json.loads(response.read())
                    return
                for line in response.iter_lines():
                    if self._left.is_set():
                        return
                    if line.startswith("data: {"):
                        self._take(json.loads(line[6:]))
        except httpx.TransportError:
            if not self._left.is_set():
                raise
        finally:
            reply.done_at = time.monotonic()

    def _take(self, body: dict[str, Any]) -> None:
        text = "".join(
            choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in body.get("choices", [])
        )
        self.reply.frames.append(Frame(time.monotonic(), (body.get("retire") or {}).get("epoch"), text, body))

    def wait(self) -> Reply:
        """The whole reply."""
        self._thread.join()
        return self.reply

    def wait_for_text(self, frames: int = 1) -> None:
        """Until so many frames with content have come, or the reply is over."""
        while self._thread.is_alive() and sum(1 for frame in self.reply.frames if frame.text) < frames:
            time.sleep(0.002)

    def wait_for_tokens(self, count: int) -> None:
        """Until so many token ids have come, or the reply is over."""
        while self._thread.is_alive() and len(self.reply.token_ids) < count:
            time.sleep(0.002)

    def wait_for_headers(self) -> None:
        """Until the server has accepted the request, or the reply is over."""
        while self._thread.is_alive() and not self.reply.headers_at:
            time.sleep(0.002)

    def leave(self) -> None:
        """Close the connection, as a client does that has lost interest."""
        self.hang_up()
        self._thread.join()

    def hang_up(self) -> None:
        """The same without waiting for the thread that reads."""
        self._left.set()
        while self._socket is None and self._thread.is_alive():
            time.sleep(0.002)
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the reply is over, and its connection with it
                self._socket.shutdown(socket.SHUT_RDWR)  # closing the client would wait for the thread that reads


def probe_ms(url: str, model: str, headers: Mapping[str, str] | None = None) -> float:
    """How long an unrelated one-token request takes right now.  Raises httpx.HTTPError."""
    started = time.monotonic()
    body = {"model": model, "prompt": "Hi", "max_tokens": 1, "temperature": 0}
    http.post(f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S).raise_for_status()
    return (time.monotonic() - started) * 1000
