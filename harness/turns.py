"""Several servers at work at once, in turns so short that all of them meet the same machine.

Owns: which server's processes run at a time, and how long each was at work.
Must not know: what they work on.
Strategy: a machine's speed drifts by a fifth within seconds, so two things measured one after the other differ by that
much whatever they are.  Here every server but one is stopped (SIGSTOP) for the length of a turn; the time that counts
is a server's own turns, until its work is done.  What a turn costs beyond that, all of them pay alike.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from harness.server import Server

TURN_S = 0.03


class Turns:
    """Hands out turns to these servers, in an order that is drawn anew each round."""

    def __init__(self, servers: Mapping[str, Server], turn_s: float = TURN_S, seed: int = 0) -> None:
        self._processes = {name: [server.pid, *server.children()] for name, server in servers.items()}
        self._turn_s = turn_s
        self._draw = random.Random(seed)  # noqa: S311 - an order

    def measure(self, work: Mapping[str, Callable[[], float]]) -> dict[str, float]:
        """Seconds each server was at work.

        `work`: per server, called in a thread of its own while all are stopped; sends what is to be done and returns
        when, on `time.monotonic`, that was done.
        """
        turns: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
        with ThreadPoolExecutor(len(work)) as pool:
            for name in self._processes:
                self._signal(name, signal.SIGSTOP)
            try:
                done = {name: pool.submit(one) for name, one in work.items()}
                while due := [name for name in work if not done[name].done()]:
                    self._draw.shuffle(due)
                    for name in due:
                        turns[name].append(self._turn(name, done[name]))
            finally:
                for name in self._processes:
                    self._signal(name, signal.SIGCONT)
            return {name: _worked_s(turns[name], one.result()) for name, one in done.items()}

    def _turn(self, name: str, done: Future[float]) -> tuple[float, float]:
        began = time.monotonic()
        self._signal(name, signal.SIGCONT)
        while not done.done() and (left_s := began + self._turn_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.005))
        self._signal(name, signal.SIGSTOP)
        return began, time.monotonic()

    def _signal(self, name: str, number: signal.Signals) -> None:
        for process in self._processes[name]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)


def _worked_s(turns: list[tuple[float, float]], done_at: float) -> float:
    return sum(min(ended, done_at) - began for began, ended in turns if began < done_at)
