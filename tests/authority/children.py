"""The other processes of these tests: `python children.py ROLE ARGUMENT...`, one JSON line as the answer."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from retire.authority import Authority, AuthorityTable
from retire.core.errors import EpochConflict

TWICE = 2**32 + 1  # a word whose halves are equal: a torn one shows


def store_words(path: str) -> None:
    """Store words with equal halves into slot 0's raw word until slot 1's is set; answer how many."""
    table = AuthorityTable.open(Path(path))
    value = 0
    while table.raw(1) == 0:
        value += 1
        table._store_scope(0, 0, value * TWICE)
    _answer(value)


def advance_often(path: str, key: str, count: str) -> None:
    """Advance until `count` calls have won; answer their raw words."""
    table = AuthorityTable.open(Path(path))
    slot = table.find(0, int(key))
    assert slot is not None
    won: list[int] = []
    while len(won) < int(count):
        try:
            won.append(table.advance(slot, int(key), table.raw(slot), os.getpid()))
        except EpochConflict:
            continue
    _answer(won)


def race(path: str, slot: str, key: str, first: str, rounds: str) -> None:
    """Say "ready"; in each round compete for one raw word with whoever else does; answer the rounds won."""
    table = AuthorityTable.open(Path(path))
    won: list[int] = []
    _answer("ready")
    for raw in range(int(first), int(first) + int(rounds)):
        while table.raw(int(slot)) < raw:
            time.sleep(0)
        try:
            table.advance(int(slot), int(key), raw, os.getpid())
            won.append(raw)
        except EpochConflict:
            continue
    _answer(won)


def own_and_die(state_dir: str, boot_id: str, advances: str) -> None:
    """Own the directory, create and advance scope "s", answer its epoch, die without a word."""
    authority = Authority.open(Path(state_dir), boot_id=boot_id, sync_interval_s=3600)
    authority.resolve("default", "s")
    authority.issue(authority.resolve("default", "s"))
    for transition in range(1, int(advances) + 1):
        authority.advance("default", "s", "*", transition)
    view = authority.resolve("default", "s")
    _answer(view.epoch)
    os.kill(os.getpid(), signal.SIGKILL)


def own_and_wait(state_dir: str) -> None:
    """Own the directory until stdin closes."""
    with Authority.open(Path(state_dir)):
        _answer(os.getpid())
        sys.stdin.read()


def _answer(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    {f.__name__: f for f in (store_words, advance_often, race, own_and_die, own_and_wait)}[role](*arguments)
