"""Runtimes that supersede each other's work, and write down what they asked and saw.

Owns: threads, what a runtime knows, the recording of its calls.  Must not know: who torments the server, what a history
has to be like.
Strategy: a runtime makes one move after the other; what it streams is read beside, fast, slowly, or half way.  Every
second runtime reads through retire.client, which has one gate per runtime and scope; the others have raw sockets.  All
runtimes of a tenant use the same scopes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from harness.histories.history import Answer, Call, Frame, Kind, Left, Lost, Recorder, Via, now
from harness.histories.plan import Act, Move, Named, Reading, moves
from harness.histories.wire import (
    COMPLETIONS,
    SUPERSEDE,
    TIMEOUT_S,
    NoAnswerError,
    NotSentError,
    answer_of,
    ask,
    frame_of,
)
from harness.workload import bearer
from retire.client import Chunk, ScopeClient, ServerRefused
from retire.core.errors import EpochConflict, EpochRevoked

OPEN_MAX = 3  # streams of a runtime at once; the oldest is left for another
SLOW_S = 0.15
DROPPED_AFTER = 5
LISTED = 200
LEAVING_S = 15.0
PROMPT = "The quick brown fox jumps over the lazy dog, and then it"

Place = tuple[str, str]
_NO_ANSWER = (httpx.HTTPError, httpx.StreamError, ValueError, KeyError)


@dataclass(frozen=True)
class Storm:
    """`tenants`: keys by name, None for a server without.  `scopes`: of each tenant.  `prefix`: of their names."""

    url: str
    model: str
    tenants: Mapping[str, str | None]
    seed: int
    prefix: str
    runtimes: int = 8
    scopes: int = 3

    def run(self, recorder: Recorder, seconds: float, serving: threading.Event) -> None:
        """Until the time is over.  `serving`: while it is not set, nobody begins anything."""
        over = threading.Event()
        names = list(self.tenants)
        runtimes = [
            Runtime(self, recorder, f"r{n}", names[n % len(names)], Via.CLIENT if n // len(names) % 2 else Via.RAW)
            for n in range(self.runtimes)
        ]
        with ThreadPoolExecutor(len(runtimes)) as pool:
            running = [pool.submit(one.run, over, serving) for one in runtimes]
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not any(one.done() for one in running):
                time.sleep(0.05)
            over.set()
        for one in running:
            one.result()
        serving.wait(TIMEOUT_S)
        for runtime in runtimes[: len(names)]:
            runtime.look_at_all()
        for runtime in runtimes:
            runtime.close()

    def names(self) -> list[str]:
        """The scopes that every tenant has."""
        return [f"{self.prefix}-{number}" for number in range(self.scopes)]


@dataclass(frozen=True)
class Superseding:
    """A supersede as it can be asked again: the same call, the same bytes."""

    place: Place
    asked: int | None
    key: str | None
    method: tuple[str, str]
    headers: Mapping[str, str]
    body: Mapping[str, Any]


class _Open:
    """A stream that is being read."""

    def __init__(self) -> None:
        self.leave = threading.Event()
        self.thread: threading.Thread | None = None


class Runtime:
    """One of a storm's."""

    def __init__(self, storm: Storm, recorder: Recorder, name: str, tenant: str, via: Via) -> None:
        self._storm, self._recorder, self.name, self._tenant, self._via = storm, recorder, name, tenant, via
        self._key = bearer(storm.tenants[tenant])
        self._names = storm.names()
        self._lock = threading.Lock()
        self._known: dict[str, int] = {}
        self._cancelled: set[str] = set()
        self._keyed: list[Superseding] = []
        self._open: list[_Open] = []
        self._clients: dict[str, ScopeClient] = {}

    def run(self, over: threading.Event, serving: threading.Event) -> None:
        """Make moves until it is over."""
        for move in moves(self._storm.seed, self.name, len(self._names)):
            while not over.is_set() and not serving.wait(0.1):
                pass
            if over.is_set():
                break
            self._make(move)
            over.wait(move.rest_s)
        for one in self._open:
            one.leave.set()

    def close(self) -> None:
        """Wait for those who read, then let go of every connection."""
        deadline = time.monotonic() + LEAVING_S
        for one in self._open:
            if one.thread is not None:
                one.thread.join(max(0.0, deadline - time.monotonic()))
        for client in self._clients.values():
            client.close()

    def look_at_all(self) -> None:
        """How every scope is in the end."""
        for name in self._names:
            self._look((self._tenant, name))

    def _make(self, move: Move) -> None:
        place = (self._tenant, self._names[move.scope])
        match move.act:
            case Act.JOIN if self._via is Via.CLIENT:
                self._join_through_client(place, move)
            case Act.JOIN:
                self._join(place, move)
            case Act.SUPERSEDE if self._via is Via.CLIENT and not move.keyed:
                self._supersede_through_client(place, move)
            case Act.SUPERSEDE:
                self._supersede(self._superseding(place, move), move)
            case Act.AGAIN:
                if self._keyed:
                    self._supersede(self._keyed[move.tokens % len(self._keyed)], move)
            case Act.CANCEL:
                self._cancel(place)
            case Act.LOOK:
                self._look(place)
            case Act.LIST:
                self._list()

    # -- what it knows ----------------------------------------------------------------------------------------------

    def _epoch(self, place: Place, named: Named) -> int | None:
        """The epoch to name, by what this runtime has heard.  A cancelled scope comes back under a higher one."""
        with self._lock:
            right = self._known.get(place[1], 1) + (place[1] in self._cancelled)
        match named:
            case Named.RIGHT:
                return right
            case Named.STALE:
                return max(1, right - 1)
            case Named.AHEAD:
                return right + 2
            case Named.NONE | Named.STAR:
                return None

    def _heard(self, place: Place, *epochs: int | None, cancelled: bool = False) -> None:
        with self._lock:
            newest = max((epoch for epoch in epochs if epoch is not None), default=0)
            if newest > self._known.get(place[1], 0):
                self._known[place[1]] = newest
                self._cancelled.discard(place[1])
            if cancelled:
                self._cancelled.add(place[1])

    # -- raw --------------------------------------------------------------------------------------------------------

    def _join(self, place: Place, move: Move) -> None:
        epoch = self._epoch(place, move.named)
        headers = {"X-Retire-Scope": place[1], **({} if epoch is None else {"X-Retire-Epoch": str(epoch)})}
        call = self._recorder.call(self.name, place, Kind.JOIN, asked=epoch)
        self._asked(call, ("POST", COMPLETIONS), headers, self._body(move), move)

    def _body(self, move: Move) -> dict[str, Any]:
        return {
            "model": self._storm.model, "prompt": PROMPT, "max_tokens": move.tokens, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip

    def _superseding(self, place: Place, move: Move) -> Superseding:
        asked = self._epoch(place, move.named)
        expected: int | str = "*" if asked is None else asked
        key = f"{self._storm.prefix}-{self.name}-{now()}" if move.keyed else None
        headers = {} if key is None else {"Idempotency-Key": key}
        if move.by_header:
            headers |= {"X-Retire-Scope": place[1], "X-Retire-Supersedes": str(expected)}
            return Superseding(place, asked, key, ("POST", COMPLETIONS), headers, self._body(move))
        body: dict[str, Any] = {"scope": place[1], "expected_epoch": expected}
        if move.successor:
            body["successor"] = {"endpoint": COMPLETIONS, "body": self._body(move)}
        return Superseding(place, asked, key, ("POST", SUPERSEDE), headers, body)

    def _supersede(self, what: Superseding, move: Move) -> None:
        if what.key is not None and what not in self._keyed:
            self._keyed = [*self._keyed[-9:], what]
        callers = [threading.Thread(target=self._supersede_once, args=(what, move)) for _ in range(move.copies - 1)]
        for caller in callers:
            caller.start()
        self._supersede_once(what, move)
        for caller in callers:
            caller.join()

    def _supersede_once(self, what: Superseding, move: Move) -> None:
        call = self._recorder.call(
            self.name, what.place, Kind.SUPERSEDE, asked=what.asked, star=what.asked is None, key=what.key
        )
        answer = self._asked(call, what.method, what.headers, what.body, move)
        if answer is not None and answer.status == 200 and answer.transition is not None and move.rest_s:
            self._read_record(what.place, answer.transition)

    def _asked(
        self,
        call: Call,
        method: tuple[str, str],
        headers: Mapping[str, str],
        body: Any = None,
        move: Move | None = None,
    ) -> Answer | None:
        """Ask, write down what comes; a stream is read beside."""
        try:
            reply = ask(self._storm.url, *method, {**self._key, **headers}, body)
        except NotSentError:
            self._recorder.write(Lost(call.id, now(), sent=False))
            return None
        except NoAnswerError:
            self._recorder.write(Lost(call.id, now()))
            return None
        answer = answer_of(call.id, reply)
        self._recorder.write(answer)
        self._heard(call.place, answer.epoch, answer.current, answer.new, cancelled=answer.cancelled)
        if move is not None and reply.streams:
            self._read(call, reply.frames(call.id), reply.close, move)
        else:
            reply.close()
        return answer

    def _read_record(self, place: Place, transition: str) -> None:
        call = self._recorder.call(self.name, place, Kind.RECORD)
        self._asked(call, ("GET", f"/transitions/{transition}"), {})

    def _cancel(self, place: Place) -> None:
        call = self._recorder.call(self.name, place, Kind.CANCEL)
        self._asked(call, ("DELETE", _path(place)), {})

    def _look(self, place: Place) -> None:
        call = self._recorder.call(self.name, place, Kind.LOOK)
        self._asked(call, ("GET", _path(place)), {})

    def _list(self) -> None:
        """Every row of a page is a look at a scope, at a time of its own while the page was made."""
        called_at = now()
        try:
            reply = ask(self._storm.url, "GET", f"/scopes?limit={LISTED}&after={self._storm.prefix}", self._key)
        except (NotSentError, NoAnswerError):
            return
        reply.close()
        rows = {row["scope"]: row for row in reply.body.get("scopes", ())} if reply.status == 200 else {}
        answered_at = now()
        for name in rows.keys() & set(self._names):
            call = self._recorder.call(self.name, (self._tenant, name), Kind.LOOK, at=called_at)
            row = rows[name]
            self._recorder.write(Answer(call.id, answered_at, 200, epoch=row["epoch"], cancelled=row["cancelled"]))

    # -- through retire.client --------------------------------------------------------------------------------------

    def _client(self, place: Place) -> ScopeClient:
        if place[1] not in self._clients:
            key = self._storm.tenants[self._tenant]
            self._clients[place[1]] = ScopeClient(self._storm.url, place[1], api_key=key, timeout_s=TIMEOUT_S)
        return self._clients[place[1]]

    def _join_through_client(self, place: Place, move: Move) -> None:
        client = self._client(place)
        call = self._recorder.call(self.name, place, Kind.JOIN, via=Via.CLIENT)
        stream = self._through_client(call, None, lambda: client.completions(self._body(move)))
        if stream is not None:
            self._recorder.write(Answer(call.id, now(), 200))
            self._read(call, _handed_out(call.id, stream), stream.close, move)

    def _supersede_through_client(self, place: Place, move: Move) -> None:
        """By header with the successor, or by body without; which epoch it names is the client's own affair."""
        client = self._client(place)
        over = client.epoch
        call = self._recorder.call(self.name, place, Kind.SUPERSEDE, via=Via.CLIENT)
        if move.successor:
            stream = self._through_client(call, over, lambda: client.supersede(self._body(move)))
            if stream is not None:
                self._recorder.write(Answer(call.id, now(), 200))
                self._read(call, _handed_out(call.id, stream), stream.close, move)
            return
        record = self._through_client(call, over, client.revoke)
        if record is not None:
            new = record["new_epoch"]
            self._recorder.write(Answer(call.id, now(), 200, new=new, old=record["old_epoch"], transition=record["id"]))
            self._heard(place, new)

    def _through_client(self, call: Call, over: int | None, work: Callable[[], Any]) -> Any:
        """What the client gives; None if it raises, which is written down."""
        try:
            return work()
        except (EpochConflict, EpochRevoked) as error:
            told: dict[str, Any] = {"current": error.current_epoch}
            if isinstance(error, EpochConflict):
                told["authority"] = "unchanged"  # as a 409 always says
            answer = Answer(call.id, now(), error.status, **told)
        except ServerRefused as error:
            current = (error.answer.get("error") or {}).get("current_epoch")
            authority = error.answer.get("authority")
            answer = Answer(call.id, now(), error.status, authority=authority, current=current)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            self._recorder.write(Lost(call.id, now(), sent=False, over=over))
            return None
        except _NO_ANSWER:
            self._recorder.write(Lost(call.id, now(), over=over))
            return None
        self._recorder.write(answer)
        self._heard(call.place, answer.current)
        return None

    # -- streams ----------------------------------------------------------------------------------------------------

    def _read(self, call: Call, frames: Iterator[Frame], close: Callable[[], None], move: Move) -> None:
        """Read beside, as the move says.  The oldest of too many is left."""
        with self._lock:
            self._open = [one for one in self._open if one.thread is None or one.thread.is_alive()]
            for one in self._open[: max(0, len(self._open) - OPEN_MAX + 1)]:
                one.leave.set()
            mine = _Open()
            self._open.append(mine)
        mine.thread = threading.Thread(target=self._take, args=(call, frames, close, move, mine.leave), daemon=True)
        mine.thread.start()

    def _take(
        self, call: Call, frames: Iterator[Frame], close: Callable[[], None], move: Move, leave: threading.Event
    ) -> None:
        how = "done"
        try:
            for number, frame in enumerate(frames, 1):
                self._recorder.write(frame)
                self._heard(call.place, frame.epoch, frame.by, cancelled=frame.ends == "cancelled")
                if leave.is_set() or (move.reading is Reading.DROPPED and number == DROPPED_AFTER):
                    how = "dropped"
                    break
                if move.reading is Reading.SLOW:
                    leave.wait(SLOW_S)
        except (NoAnswerError, *_NO_ANSWER):
            how = "lost"
        finally:
            close()
        self._recorder.write(Left(call.id, now(), how))


def _handed_out(call: int, stream: Iterator[Chunk]) -> Iterator[Frame]:
    """What retire.client hands out, each frame when it is asked for."""
    while True:
        asked_at = now()
        chunk = next(stream, None)
        if chunk is None:
            return
        frame = frame_of(call, asked_at, chunk)
        if frame is not None:
            yield frame


def _path(place: Place) -> str:
    return f"/scopes/{quote(place[1], safe='')}"
