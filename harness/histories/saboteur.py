"""Somebody who stops and kills the processes of a server while it is being used, and starts it again.

Owns: signals, and when they are sent.  Must not know: who uses the server.
Strategy: the server comes back on the same state directory and at the same address.  Users are not told before their
server dies; while there is none they are kept from asking.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from harness.histories.history import Recorder, What

WITHOUT_ENGINE_S = 1.5
"""For so long is a server used that has lost its engine or worker, before it is started again."""


class Who(StrEnum):
    """Which of the server's processes."""

    API = "api"
    ENGINE = "engine"
    WORKER = "worker"
    ALL = "all"


class Victim(Protocol):
    """What is asked of a server; `harness.server.Server` is one."""

    @property
    def pid(self) -> int:
        """The API process."""

    def children(self) -> list[int]:
        """Its processes, parents first."""

    def start(self) -> None:
        """Start it and wait until it serves."""

    def stop(self) -> None:
        """End it, and every process that is left of it."""


@dataclass(frozen=True)
class Deed:
    """`at_s`: after the beginning.  `pause_s`: for so long it is stopped; None: it is killed."""

    at_s: float
    who: Who
    pause_s: float | None


def deeds(seed: int, seconds: float, pauses: int, kills: int) -> list[Deed]:
    """So many of each, spread over that time; kills take turns among the processes, the API's first."""
    draw = random.Random(f"{seed} deeds")  # noqa: S311 - a plan keeps no secret
    count, turns = pauses + kills, (Who.API, Who.ENGINE, Who.WORKER)
    kill = {(2 * number + 1) * count // (2 * kills): turns[number % len(turns)] for number in range(kills)}
    width, plan = seconds / (count + 1), []
    for number in range(count):
        at_s = (number + draw.uniform(0.6, 1.4)) * width
        paused = Deed(at_s, draw.choice(list(Who)), draw.choice((0.05, 0.3, 1.0)))
        plan.append(Deed(at_s, kill[number], None) if number in kill else paused)
    return plan


@contextlib.contextmanager
def tormented(server: Victim, recorder: Recorder, plan: Sequence[Deed]) -> Iterator[threading.Event]:
    """A server to which these deeds are done; gives what is set while it serves.

    At the end it serves, whatever was being done to it.
    """
    one = _Saboteur(server, recorder, plan)
    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()
    try:
        yield one.serving
    finally:
        one.enough.set()
        thread.join()
    if one.failed is not None:
        raise one.failed


class _Saboteur:
    def __init__(self, server: Victim, recorder: Recorder, plan: Sequence[Deed]) -> None:
        self._server, self._recorder, self._plan = server, recorder, plan
        self.serving, self.enough = threading.Event(), threading.Event()
        self.serving.set()
        self.failed: BaseException | None = None

    def run(self) -> None:
        began = time.monotonic()
        try:
            for deed in self._plan:
                if self.enough.wait(max(0.0, began + deed.at_s - time.monotonic())):
                    return
                if deed.pause_s is None:
                    self._kill(deed.who)
                else:
                    self._pause(deed.who, deed.pause_s)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the end gets it
            self.failed = error
        finally:
            self.serving.set()

    def _pause(self, who: Who, seconds: float) -> None:
        pids = processes(self._server, who)
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            self._recorder.mark(What.STOPPED, who)
            self.enough.wait(seconds)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        self._recorder.mark(What.CONTINUED, who)

    def _kill(self, who: Who) -> None:
        for pid in processes(self._server, who):
            os.kill(pid, signal.SIGKILL)
        if who in (Who.ENGINE, Who.WORKER):
            self.enough.wait(WITHOUT_ENGINE_S)
        self.serving.clear()
        self._server.stop()
        self._recorder.mark(What.KILLED, who)  # now nothing of it can act any more
        self._server.start()
        self._recorder.mark(What.SERVING, who)
        self.serving.set()


def processes(server: Victim, who: Who) -> list[int]:
    """Their ids.  vLLM's own bear its name; where the engine has no worker of its own it is both."""
    ours = [pid for pid in server.children() if "VLLM" in _name(pid)]
    match who:
        case Who.ENGINE if ours:
            return ours[:1]
        case Who.WORKER if ours:
            return ours[-1:]
        case Who.ALL:
            return [server.pid, *ours]
        case _:
            return [server.pid]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8")
    except OSError:  # it has ended
        return ""
