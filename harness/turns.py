"""Several servers at work at once, in turns so short that all of them meet the same machine.

Owns: which server's processes run at a time, and how long each was at work.
Must not know: what they work on.
Strategy: a machine's speed drifts by a fifth within seconds, so two things measured one after the other differ by that
much whatever they are.  Here every server but one is stopped (SIGSTOP) for the length of a turn; the time that counts
is a server's own turns, until its work is done.  What a turn costs beyond that, all of them pay alike.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from harness.server import Server

TURN_S = 0.03

Found = TypeVar("Found")


class Turns:
    """Hands out turns to these servers, in an order that is drawn anew each round."""

    def __init__(self, servers: Mapping[str, Server], turn_s: float = TURN_S, seed: int = 0) -> None:
        self._servers = dict(servers)
        self._turn_s = turn_s
        self._draw = random.Random(seed)  # noqa: S311 - an order
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._ended: dict[str, list[tuple[float, float]]] = {name: [] for name in self._servers}
        self._running: tuple[str, float] | None = None

    def run(self, work: Mapping[str, Callable[[], Found]]) -> dict[str, Found]:
        """What the work of each server gives, when all of it is done.

        `work`: called in a thread of its own; asks its server to do something and waits for that, on `clock`.
        """
        with self._lock:
            self._begin()
        with ThreadPoolExecutor(len(work)) as pool:
            for server in self._servers.values():
                server.freeze()
            try:
                done = {name: pool.submit(one) for name, one in work.items()}
                while due := [name for name in work if not done[name].done()]:
                    self._draw.shuffle(due)
                    for name in due:
                        self._turn(name, done[name])
            finally:
                for server in self._servers.values():
                    server.thaw()
            return {name: one.result() for name, one in done.items()}

    def clock(self, name: str) -> Callable[[], float]:
        """A clock that stands still while the server does: seconds it was at work since the last `run` began."""
        return lambda: self.worked_s(name, time.monotonic())

    def worked_s(self, name: str, until: float) -> float:
        """How long the server was at work in the last `run` up to then, of `time.monotonic`."""
        with self._lock:
            turns = [*self._ended[name]]
            if self._running is not None and self._running[0] == name:
                turns.append((self._running[1], until))
        return sum(min(ended, until) - began for began, ended in turns if began < until)

    def _turn(self, name: str, done: Future[Found]) -> None:
        with self._lock:
            began = time.monotonic()
            self._running = name, began
        self._servers[name].thaw()
        while not done.done() and (left_s := began + self._turn_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.005))
        self._servers[name].freeze()
        with self._lock:
            self._running = None
            self._ended[name].append((began, time.monotonic()))
