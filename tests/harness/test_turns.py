"""Servers that take turns, with plain processes in their places."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from harness.server import Server
from harness.turns import Turns

COUNT = "for n in range(10**9):\n    if n % 10_000 == 0: print('x' * 200, flush=True)"


class Process(Server):
    """As much of a server as takes turns."""

    def __init__(self):
        super().__init__("tiny")
        command = [sys.executable, "-c", COUNT]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self._process.stdout.readline()

    def lines(self, count):
        for _ in range(count):
            self._process.stdout.readline()
        return time.monotonic()


@pytest.fixture
def two():
    found = {"a": Process(), "b": Process()}
    yield found
    for process in found.values():
        process.close()


def test_only_one_is_at_work_at_a_time_and_the_one_with_more_to_do_takes_longer(two):
    turns = Turns(two, turn_s=0.01)
    began = time.monotonic()
    done_at = turns.run({"a": lambda: two["a"].lines(1000), "b": lambda: two["b"].lines(3000)})
    worked = {name: turns.worked_s(name, at) for name, at in done_at.items()}
    assert sum(worked.values()) <= time.monotonic() - began
    assert worked["b"] > worked["a"] > 0


def test_a_clock_stands_still_while_its_server_does(two):
    turns = Turns(two, turn_s=0.01)
    clock = turns.clock("a")
    done_at = turns.run({"a": lambda: two["a"].lines(1000), "b": lambda: two["b"].lines(3000)})
    assert turns.worked_s("a", done_at["a"]) <= clock() == turns.worked_s("a", done_at["b"])


def test_everybody_goes_on_afterwards_also_when_the_work_fails(two):
    def fails():
        raise RuntimeError("no answer")

    with pytest.raises(RuntimeError, match="no answer"):
        Turns(two).run({"a": fails, "b": lambda: two["b"].lines(10)})
    assert all(process.lines(400) for process in two.values())  # more than a pipe holds


def test_what_a_server_did_after_its_work_was_done_does_not_count(two):
    turns = Turns(two)
    turns._ended["a"] = [(0.0, 1.0), (5.0, 6.0), (9.0, 10.0)]
    assert turns.worked_s("a", 5.5) == 1.5
    assert turns.worked_s("a", 7.0) == 2.0


def test_a_frozen_server_can_be_stopped(two):
    two["a"].freeze()
    two["a"].close()
    assert two["a"]._process.returncode is not None
