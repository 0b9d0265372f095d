"""`retire bench publication`: what an application still reads of a version after its replacement was accepted.

Stands beside Table 4, row 1 (vLLM: 170 obsolete tokens across 18 trials of request abort; RETIRE: none).

A trial has four arms on one pair of texts and one server, in an order that rotates.  In each, a long answer is read at
the trial's pace: one frame and then nothing, one a second, ten a second, or as they come.  Its first token is waited
for, then as many steps of the engine as an unrelated answer takes, which are more than the bound below; then the
application changes its mind.

- `native_abort`: no scope, a raw socket.  The old request is aborted by vLLM's own route, the replacement is sent, and
  its response headers are the acceptance.
- `native_close`: no scope, an HTTP library, and the runtime closes the response under its slow consumer, as SDKs do.
- `retire_raw`: a scoped stream on the same raw socket.  The answer of `POST /supersede`, read whole, is the acceptance.
- `retire_client`: a scoped stream through `retire.client`.  The return of its `supersede` is the acceptance.

Then the old stream is read to its end.  A token is stale when its frame was taken after the acceptance.  Nobody holds
anything back for the native arms: what a reader has not fetched yet lies in the kernels' buffers, the server's and its
own, where an abort does not reach; so it is with every consumer that is slower than the engine.

The bound of `retire_raw` is stated before the first trial (`stated_bound`): from what the server says may lie behind
its last gate, the buffers on the reader's side, and the size of a frame that says nothing.

What could be unfair, and which way:

- How much is stale natively follows from how far the consumer lags, which the bench chooses.  That it is above 0 means
  something, its size does not.  A consumer that keeps up gets next to nothing natively, too.
- The natives abort before they send the replacement, and count from its acceptance, which comes later; RETIRE's arms
  count from the answer to the revocation itself.  In favour of native.
- `native_abort` does not close its connection, since the consumer goes on reading, as it does behind a queue or a
  proxy.  One that closes loses what its kernel holds: hence `native_close`, where only what the library has read
  already is left.
- A small receive buffer keeps what lies on the reader's side small, in both raw arms; the bound counts it in full.
- After the acceptance readers hurry, to save time.  What is then on its way can no longer be called back, however
  slowly it is read.
- A frame is stamped once it was taken, so one taken in that very instant counts as stale in every arm.
- vLLM joins tokens that had to wait into one frame: tokens and frames are both told.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx

from harness.client import TIMEOUT_S, Frame, http
from harness.experiment import Cell, Result, Target
from harness.ledger import Key, Ledger
from harness.progress import note
from harness.session import ServerUnsuitable, Session, measuring
from harness.statistics import whether
from harness.workload import complete, completion, diverging, fresh_salt, fresh_scope, passage, record_of
from retire.client import ScopeClient

BLOCK, SHARED, TAIL = 64, 128, 32
OLD_TOKENS, ANSWER_TOKENS = 4000, 16
PACES_S = (None, 1.0, 0.1, 0.0)  # between two frames; None: for good
MORE_STEPS = 24  # at most; the engine takes so many more than the stated bound lets frames through
RECEIVE_BUFFER, READ_BYTES = 4096, 256
ABORT = "/inference/v1/abort_requests"
PATH = "/v1/completions"
ARMS = ("native_abort", "native_close", "retire_raw", "retire_client")

Body = dict[str, Any]


class RawReader:
    """A request on a socket of its own that fetches little at a time and lets little be sent ahead."""

    def __init__(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        address = urlsplit(url)
        payload = json.dumps({**body, "stream": True}).encode()
        lines = {"Host": address.netloc, "Content-Type": "application/json", "Content-Length": len(payload), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        self._socket.settimeout(TIMEOUT_S)
        self._socket.connect((address.hostname, address.port))
        self._socket.sendall(f"POST {PATH} HTTP/1.1\r\n{head}\r\n".encode() + payload)
        self.holds_bytes = READ_BYTES + self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        """What may lie on this side without having been taken."""

    def bodies(self) -> Iterator[Body]:
        """The chunks, each fetched when it is asked for."""
        held = b""
        with self._socket:
            while data := self._socket.recv(READ_BYTES):
                held += data
                while b"\n\n" in held:  # no chunk of HTTP ends inside a frame, and no frame has it inside
                    event, _, held = held.partition(b"\n\n")
                    told = event.partition(b"data: ")[2]
                    if told == b"[DONE]":
                        return
                    yield json.loads(told)


class Consumer:
    """An application that takes one frame after the other, `pace_s` apart, until it is told to hurry."""

    def __init__(self, bodies: Iterator[Body], pace_s: float | None) -> None:
        self.frames: list[Frame] = []
        self._bodies, self._pace_s = bodies, pace_s
        self._hurried = threading.Event()
        self._reading: Future[None] = Future()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._read()
        except BaseException as error:  # noqa: BLE001 - whoever waits for the end gets it
            self._reading.set_exception(error)
        else:
            self._reading.set_result(None)

    def _read(self) -> None:
        for body in self._bodies:
            epoch = (body.get("retire") or {}).get("epoch")
            text = "".join(choice["text"] for choice in body["choices"])
            self.frames.append(Frame(time.monotonic(), epoch, text, body))
            if self.frames[-1].token_ids:
                self._hurried.wait(self._pace_s)

    def wait_for_token(self) -> None:
        """Until the first token was taken, or there is nothing more to take."""
        while not self._reading.done() and not any(frame.token_ids for frame in list(self.frames)):
            time.sleep(0.002)

    def finish(self) -> list[Frame]:
        """Take the rest as fast as it comes; all frames."""
        self._hurried.set()
        self._reading.result(TIMEOUT_S)
        return self.frames


@dataclass(frozen=True)
class Arm:
    """What one arm showed.  `published`: how many tokens of the old version RETIRE says it has let out."""

    old: Sequence[Frame]
    accepted_at: float
    successor: Sequence[int]
    published: int | None = None

    @property
    def figures(self) -> dict[str, int]:
        """Stale frames and tokens, how many tokens were taken in all, and how many were let out."""
        stale = [frame for frame in self.old if frame.token_ids and frame.at > self.accepted_at]
        return {
            "stale_frames": len(stale),
            "stale_tokens": sum(len(frame.token_ids) for frame in stale),
            "taken_tokens": self.taken,
            **({} if self.published is None else {"published_tokens": self.published}),
        }

    @property
    def taken(self) -> int:
        """Tokens of the old version that the application was given, stale or not."""
        return sum(len(frame.token_ids) for frame in self.old)

    @property
    def last(self) -> Body:
        """The chunk that ended the old stream."""
        return self.old[-1].body


@dataclass(frozen=True)
class Trial:
    """A trial that counts.  `figures`: per arm."""

    pace_s: float | None
    figures: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Publication:
    """`trials`: as many as the paper's."""

    model: str = "smollm2"
    trials: int = 18
    quick_trials: int = 3
    url: str = ""
    name: str = field(default="publication", init=False)
    paper: str = field(default="Table 4, row 1", init=False)
    own_servers: str = field(default="", init=False)

    def run(self, ledger: Ledger, *, quick: bool) -> Result:
        """See the module."""
        planned = self.quick_trials if quick else self.trials
        draw = random.Random(planned)  # noqa: S311 - a schedule keeps no secret
        paces = [PACES_S[number % len(PACES_S)] for number in range(planned)]
        draw.shuffle(paces)
        ledger.plan({f"pace {pace_s}": paces.count(pace_s) for pace_s in PACES_S} | {"stated": 1})
        flags = (
            "--enable-scale-out",  # for the route that aborts
            *("--block-size", str(BLOCK)),
            *("--kv-cache-memory-bytes", str(1 << 30)),
            *("--dtype", "float32"),
        )
        found: list[Trial] = []
        with measuring(self.url, self.model, flags, ledger.checks) as session:
            if self.url:
                _expect_abort(session)
            stated = Key("stated", ("retire_raw",), 0, seed=0)  # once for the run: before its first trial
            frame_bytes, bound = ledger.trial(stated, partial(stated_bound, session))
            note(f"  stated: at most {bound} frames of {frame_bytes} bytes or more")
            for number, pace_s in enumerate(paces):
                steps = bound + 1 + draw.randrange(MORE_STEPS)
                key = Key(f"pace {pace_s}", ARMS, number, seed=1 + number)
                figures = ledger.trial(key, partial(self._trial, session, pace_s, steps, frame_bytes, number))
                if figures is not None:
                    found.append(Trial(pace_s, figures))
        return self._result(session, found, planned, bound)

    def _trial(
        self, session: Session, pace_s: float | None, steps: int, frame_bytes: int, number: int
    ) -> dict[str, dict[str, int]] | None:
        """What the arms showed; None when a check of it failed."""
        trial = _Trial(session, pace_s, steps, frame_bytes, seed=1 + number)
        turn = number % len(ARMS)
        figures = trial.run(ARMS[turn:] + ARMS[:turn])
        told = ", ".join(f"{arm} {figures[arm]['stale_tokens']}" for arm in ARMS)
        note(f"  {number + 1}, pace {pace_s} s: stale tokens {told}")
        return figures if trial.counts else None

    def _result(self, session: Session, found: Sequence[Trial], planned: int, bound: int) -> Result:
        def of(arm: str, figure: str, among: Sequence[Trial] = found) -> list[int]:
            return [trial.figures[arm][figure] for trial in among]

        by_pace = {pace_s: [trial for trial in found if trial.pace_s == pace_s] for pace_s in PACES_S}
        summary: dict[str, Any] = {
            "trials": planned,
            "native_stale_tokens": sum(of("native_abort", "stale_tokens")),
            "retire_raw_stale_frames_max": max(of("retire_raw", "stale_frames"), default=None),
            "client_stale_tokens": sum(of("retire_client", "stale_tokens")),
            "stated_bound_frames": bound,
            "trials_counted": len(found),
            "native_close_stale_tokens": sum(of("native_close", "stale_tokens")),
            "retire_raw_stale_tokens": sum(of("retire_raw", "stale_tokens")),
            "client_dropped_tokens": sum(of("retire_client", "published_tokens"))
            - sum(of("retire_client", "taken_tokens")),
            "native_stale_tokens_by_pace": {
                str(pace_s): of("native_abort", "stale_tokens", among) for pace_s, among in by_pace.items()
            },
            "retire_raw_stale_frames_by_pace": {
                str(pace_s): of("retire_raw", "stale_frames", among) for pace_s, among in by_pace.items()
            },
        }
        most = summary["retire_raw_stale_frames_max"]
        within = session.check("raw_backlog_within_the_stated_bound", most is not None and most <= bound)
        none = session.check("nothing_old_through_the_client", bool(found) and summary["client_stale_tokens"] == 0)
        return Result(
            [self._cell(pace_s, among) for pace_s, among in by_pace.items()],
            summary,
            session.checks,
            [
                Target("native_stale_tokens", "170 in 18 trials", "> 0", whether(summary["native_stale_tokens"] > 0)),
                Target("retire_raw_stale_frames_max", "–", f"≤ {bound}, as stated", whether(within)),
                Target("client_stale_tokens", "0", "0", whether(none)),
            ],
            model=self.model,
            seal=session.seal,
        )

    def _cell(self, pace_s: float | None, among: Sequence[Trial]) -> Cell:
        metrics = {arm: among[0].figures[arm] if among else () for arm in ARMS}
        return Cell(
            {"bench": self.name, "pace_s": pace_s},
            {arm: {metric: [trial.figures[arm][metric] for trial in among] for metric in metrics[arm]} for arm in ARMS},
        )


def _expect_abort(session: Session) -> None:
    """Raises ServerUnsuitable when the server has no route that aborts."""
    routes = http.get(f"{session.url}/openapi.json").raise_for_status().json()["paths"]
    if ABORT not in routes:
        raise ServerUnsuitable("the server has no route that aborts: start it with --enable-scale-out")


def event_bytes(body: Body) -> int:
    """The size of a chunk as a server-sent event."""
    return len(b"data: \n\n") + len(json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode())


def bound_frames(backlog: Mapping[str, int], reader_bytes: int, frame_bytes: int) -> int:
    """How many frames can reach a reader after the last gate has closed.

    Those in the write; what the bytes between gate and application can hold of frames of this size, the smallest; and
    one whose beginning had been fetched before.
    """
    return backlog["frames_in_transport"] + (backlog["bytes_in_send_buffer"] + reader_bytes) // frame_bytes + 1


def stated_bound(session: Session) -> tuple[int, int]:
    """The size of a frame without content, and how many frames `retire_raw` may get; both before any trial."""
    body = completion(session.model, [1], 4, return_token_ids=True)
    reader = RawReader(session.url, body, {"X-Retire-Scope": fresh_scope()})
    _, said, *_ = [frame.body for frame in Consumer(reader.bodies(), 0.0).finish() if frame.token_ids]
    frame_bytes = event_bytes({**said, "choices": [{**said["choices"][0], "text": "", "token_ids": [0]}]})
    return frame_bytes, bound_frames(session.stated_backlog(), reader.holds_bytes, frame_bytes)


class _Trial:
    """The arms on one pair of texts.  `counts`: whether every check of it has passed."""

    def __init__(self, session: Session, pace_s: float | None, steps: int, frame_bytes: int, seed: int) -> None:
        self._session = session
        self._pace_s, self._steps, self._frame_bytes = pace_s, steps, frame_bytes
        self._old_ids, self._new_ids = diverging(session.url, session.model, SHARED, TAIL, seed)
        self._other_ids = passage(session.url, session.model, TAIL, 10_000 + seed)
        self.counts = True

    def run(self, order: Sequence[str]) -> dict[str, dict[str, int]]:
        """The arms in that order; per arm what it showed."""
        arms = {
            "native_abort": self._native_abort,
            "native_close": self._native_close,
            "retire_raw": self._retire_raw,
            "retire_client": self._retire_client,
        }
        clean = self._session.stream(self._new_ids, ANSWER_TOKENS, fresh_salt()).wait().token_ids
        found = {arm: self._interrupted(arms[arm]) for arm in order}
        raw, native = found["retire_raw"], found["native_abort"]
        sizes = [event_bytes(frame.body) for frame in raw.old if frame.token_ids]
        claims = {
            "every_successor_is_whole": all(len(one.successor) == ANSWER_TOKENS for one in found.values()),
            "successors_equal_the_clean_run": all(one.successor == clean for one in found.values()),
            "interrupted_while_decoding": all(0 < one.taken < OLD_TOKENS for one in found.values()),
            "vllm_has_aborted": native.last["choices"][0]["finish_reason"] == "abort",
            "the_superseded_stream_says_so": raw.last["retire"].get("superseded_by") == 2,
            "raw_reader_gets_what_was_published": raw.taken == raw.published,
            "no_frame_smaller_than_stated": min(sizes, default=0) >= self._frame_bytes,
        }
        for name, holds in claims.items():
            self.counts &= self._session.check(name, holds)
        return {arm: one.figures for arm, one in found.items()}

    def _interrupted(self, arm: Callable[[Body, str], Arm]) -> Arm:
        salt = fresh_salt()
        asked = {"cache_salt": salt, "return_token_ids": True}
        return arm(completion(self._session.model, self._old_ids, OLD_TOKENS, **asked), salt)

    def _consume(self, bodies: Iterator[Body]) -> Consumer:
        """A consumer that lags behind by as much as its pace lets it."""
        consumer = Consumer(bodies, self._pace_s)
        consumer.wait_for_token()
        other = completion(self._session.model, self._other_ids, self._steps, cache_salt=fresh_salt())
        complete(self._session.url, other)
        return consumer

    def _native(self, consumer: Consumer, abort: Callable[[], object], salt: str) -> Arm:
        abort()
        new = self._session.stream(self._new_ids, ANSWER_TOKENS, salt)
        new.wait_for_headers()
        return Arm(consumer.finish(), new.reply.headers_at, new.wait().token_ids)

    def _native_abort(self, body: Body, salt: str) -> Arm:
        url = self._session.url
        consumer = self._consume(RawReader(url, body, {}).bodies())
        name = {"request_ids": [f"{consumer.frames[0].body['id']}-0"]}  # vLLM counts the prompts of a completion
        return self._native(consumer, lambda: http.post(url + ABORT, json=name).raise_for_status(), salt)

    def _native_close(self, body: Body, salt: str) -> Arm:
        with http.stream("POST", self._session.url + PATH, json={**body, "stream": True}) as response:
            return self._native(self._consume(_until_closed(response)), response.close, salt)

    def _retire_raw(self, body: Body, salt: str) -> Arm:
        session, scope = self._session, fresh_scope()
        consumer = self._consume(RawReader(session.url, body, {"X-Retire-Scope": scope}).bodies())
        answer = http.post(f"{session.url}/supersede", json={"scope": scope, "expected_epoch": 1}).raise_for_status()
        accepted_at = time.monotonic()
        new = session.stream(self._new_ids, ANSWER_TOKENS, salt, {"X-Retire-Scope": scope, "X-Retire-Epoch": "2"})
        old = consumer.finish()
        return Arm(old, accepted_at, new.wait().token_ids, self._published(answer.headers["location"]))

    def _retire_client(self, body: Body, salt: str) -> Arm:
        session = self._session
        answer = completion(session.model, self._new_ids, ANSWER_TOKENS, cache_salt=salt, return_token_ids=True)
        with ScopeClient(session.url, fresh_scope()) as client:
            consumer = self._consume(client.completions(body))
            new = client.supersede(answer)
            accepted_at = time.monotonic()
            old = consumer.finish()
            successor = [token for chunk in new for choice in chunk["choices"] for token in choice["token_ids"] or []]
            known = http.get(f"{session.url}/scopes/{client.scope}").raise_for_status().json()
        return Arm(old, accepted_at, successor, self._published(f"/transitions/{known['transition']}"))

    def _published(self, location: str) -> int:
        (old,) = record_of(self._session.url, location)["published"]
        tokens: int = old["choices"][0]["tokens"]
        return tokens


def _until_closed(response: httpx.Response) -> Iterator[Body]:
    """What an HTTP library hands out, until it notices that the response was closed under it."""
    with contextlib.suppress(httpx.TransportError, httpx.StreamError):
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])
