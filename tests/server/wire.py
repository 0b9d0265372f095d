"""Props of the server tests: bodies, one shared HTTP client, a raw socket that reads as slowly as it is told to."""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx

from harness.client import http

PATIENCE_S = 120.0
MODEL = "tiny"
SOON = {"retain": {"ttl_s": 0.2}}  # for pins that nobody will ask for
SPOKE = b'"delta":{"content":'  # stands in every chunk with text and in none without


CHAT, COMPLETIONS, SUPERSEDE = "/v1/chat/completions", "/v1/completions", "/supersede"


def chat(tokens: int = 5, text: str = "hello", **more: Any) -> dict[str, Any]:
    """A greedy chat completion of exactly `tokens` tokens."""
    messages = [{"role": "user", "content": text}]
    return {
        "model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more
    }  # fmt: skip


def endless(text: str = "hello", **more: Any) -> dict[str, Any]:
    """A chat completion that goes on until somebody ends it."""
    return chat(7000, text, **more)


def long_prompt(seed: int, tokens: int = 7000) -> list[int]:
    """Token ids that nobody has prefilled yet."""
    return [1000 + (seed * 7919 + n * n * 31 + n) % 40_000 for n in range(tokens)]


def supersede(
    url: str, scope: str, expected: Any, headers: Mapping[str, str] | None = None, **more: Any
) -> httpx.Response:
    """POST /supersede.  Where no successor comes with it, nothing is kept for one for long."""
    if not {"successor", "contract"} & more.keys():
        more["contract"] = SOON
    body = json.dumps({"scope": scope, "expected_epoch": expected, **more})
    return http.post(url + SUPERSEDE, content=body, headers={"Content-Type": "application/json", **(headers or {})})


def scope_path(scope: str) -> str:
    """Where a scope is found."""
    return "/scopes/" + quote(scope, safe="")


def scope_info(url: str, scope: str) -> dict[str, Any]:
    """What the server knows of the scope."""
    answer = http.get(url + scope_path(scope))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def epoch_of(url: str, scope: str) -> int | None:
    """The current epoch, None for an unknown scope."""
    answer = http.get(url + scope_path(scope))
    return answer.json()["epoch"] if answer.status_code == 200 else None


def at_epoch_1(url: str, scope: str) -> None:
    """Make the scope known."""
    answer = http.post(url + CHAT, json=chat(1), headers={"X-Retire-Scope": scope})
    assert answer.headers["x-retire-epoch"] == "1", answer.text


def record(url: str, location: str, until: str = "closed") -> dict[str, Any]:
    """The transition's record, once `until` holds."""

    def look() -> dict[str, Any] | None:
        found: dict[str, Any] = http.get(url + location).json()
        return found if found[until] else None

    return eventually(look, f"{location} is {until}")


def eventually(look: Callable[[], Any], claim: str) -> Any:
    """What `look` gives once that is true.

    A machine that stands still (a virtual one does, for seconds) ages nothing: a round counts for a second at most.
    """
    looks, waited_s, longest_s = 0, 0.0, 0.0
    ended = time.monotonic()
    while not (found := look()):
        assert waited_s < PATIENCE_S, f"never came true: {claim} ({looks} looks, at most {longest_s:.1f} s apart)"
        time.sleep(0.02)
        ended, before = time.monotonic(), ended
        round_s = ended - before
        looks, waited_s, longest_s = looks + 1, waited_s + min(round_s, 1.0), max(longest_s, round_s)
    return found


def work_a_while(url: str, tokens: int = 30) -> None:
    """Let the engine take at least so many steps for somebody else."""
    http.post(f"{url}{CHAT}", json=chat(tokens, "an unrelated request")).raise_for_status()


def refused(answer: httpx.Response, status: int, authority: str = "unchanged") -> dict[str, Any]:
    """The error of an answer, which has vLLM's shape and tells about authority."""
    assert answer.status_code == status, f"{answer.status_code} {answer.text[:300]}"
    body = answer.json()
    error: dict[str, Any] = body["error"]
    assert set(error) >= {"message", "type", "param", "code"}, body
    assert error["code"] == status, body
    assert isinstance(error["message"], str), body
    assert error["message"], body
    assert body.get("authority") == authority, body
    return error


def cpu_s(pids: Sequence[int]) -> float:
    """Seconds of CPU that the processes have used."""
    fields = [Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split() for pid in pids]
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


class Raw:
    """A connection on which every byte is ours.  `receive_buffer` bounds what this side's kernel takes unread."""

    def __init__(self, url: str, receive_buffer: int | None = None) -> None:
        address = urlsplit(url)
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect((address.hostname, address.port))
        self.received = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send."""
        self.socket.sendall(data)

    def request(self, method: str, path: str, body: Any = None, headers: Sequence[str | bytes] = ()) -> None:
        """Send one request; `body` goes as JSON unless it is bytes."""
        self.send(spelled(method, path, body, headers))

    def pull(self, size: int = 65_536) -> bytes:
        """Read what is there; empty at the end of the connection."""
        data = self.socket.recv(size)
        self.received += data
        return data

    def read_until(self, mark: bytes) -> bytes:
        """Read until `mark` has come; gives what stands before it, and keeps what follows."""
        self.wait_for(mark)
        before, _, self.received = self.received.partition(mark)
        return before

    def wait_for(self, mark: bytes) -> None:
        """Read until `mark` has come; nothing is taken away."""
        while mark not in self.received:
            assert self.pull(), f"the connection ended without {mark!r}: {self.received[-300:]!r}"

    def read_to_end(self) -> bytes:
        """Everything until the server closes."""
        while self.pull():
            pass
        return self.received

    def read_to_end_or_done(self) -> bytes:
        """Everything until the server closes, or until the chunked body in it is complete."""
        while b"\r\n0\r\n\r\n" not in self.received and self.pull():
            pass
        return self.received

    def response(self) -> tuple[int, dict[str, str], bytes]:
        """One response: status, headers, body."""
        status_line, *lines = self.read_until(b"\r\n\r\n").decode("utf-8").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self.read_until(b"\r\n"), 16):
                body += self._exactly(size)
                self.read_until(b"\r\n")
            self.read_until(b"\r\n")
        else:
            body = self._exactly(int(headers.get("content-length", "0")))
        return int(status_line.split()[1]), headers, body

    def unread_in_kernel(self) -> int:
        """Bytes that this side's kernel has taken."""
        count = array.array("i", [0])
        fcntl.ioctl(self.socket, termios.FIONREAD, count)
        return count[0]

    def _exactly(self, size: int) -> bytes:
        while len(self.received) < size:
            assert self.pull(), "the connection ended inside a body"
        body, self.received = self.received[:size], self.received[size:]
        return body


@dataclass(frozen=True)
class Told:
    """A streamed chat completion, whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def chunks(self) -> list[Any]:
        """Its chunks; the stream must have ended in order."""
        *chunks, done = events(self.body)
        assert done == "[DONE]", self.body[-300:]
        return chunks

    @property
    def text(self) -> str:
        """Everything said."""
        return content(self.chunks)

    @property
    def epochs(self) -> set[int]:
        """The epochs that its chunks name."""
        return {chunk["retire"]["epoch"] for chunk in self.chunks}

    @property
    def ending(self) -> dict[str, Any]:
        """The one chunk that ended a superseded or cancelled stream."""
        (ending,) = [chunk for chunk in self.chunks if "published" in chunk["retire"]]
        assert ending == self.chunks[-1]
        return ending


class Stream(Raw):
    """A streamed chat completion that is read when somebody wants to know."""

    def __init__(self, url: str, scope: str, body: Mapping[str, Any] | None = None, **headers: str) -> None:
        super().__init__(url)
        lines = [f"{name}: {value}" for name, value in {"X-Retire-Scope": scope, **headers}.items()]
        self.request("POST", CHAT, {**(body or endless()), "stream": True}, lines)

    def heard(self) -> int:
        """How many chunks with text have come by now."""
        self.socket.setblocking(False)
        with suppress(BlockingIOError):
            while self.pull():
                pass
        self.socket.settimeout(PATIENCE_S)
        return self.received.count(SPOKE)

    def told(self) -> Told:
        """The whole of it."""
        return Told(*self.response())


@contextmanager
def talking(url: str, scope: str, body: Mapping[str, Any] | None = None, **headers: str) -> Iterator[Stream]:
    """A stream of the scope that has said something.  Its client leaves at the end."""
    with Stream(url, scope, body, **headers) as stream:
        stream.wait_for(SPOKE)
        yield stream


def spelled(method: str, path: str, body: Any = None, headers: Sequence[str | bytes] = ()) -> bytes:
    """A request as bytes."""
    payload = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/1.1".encode(),
        b"host: test",
        b"content-type: application/json",
        f"content-length: {len(payload)}".encode(),
        *(line if isinstance(line, bytes) else line.encode() for line in headers),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + payload


def events(body: bytes) -> list[Any]:
    """The server-sent events of a body: parsed JSON, or the text of anything else."""
    found = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    return [json.loads(event) if event[:1] == b"{" else event.decode() for event in found]


def content(chunks: list[Any]) -> str:
    """The text of chat chunks."""
    return "".join(
        (choice.get("delta") or {}).get("content") or ""
        for chunk in chunks
        if isinstance(chunk, dict)
        for choice in chunk.get("choices", [])
    )
