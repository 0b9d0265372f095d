"""What a runtime of a storm does, move by move.

Owns: the odds.  Must not know: servers, time, what has become of a move.
Strategy: one seed and a name give one endless sequence.  A move names epochs by what its runtime knows when it is made
(the right one, a stale one, one ahead), so that plans need not foresee who wins.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

Drawn = TypeVar("Drawn")


class Act(StrEnum):
    """What is done."""

    JOIN = "join"
    SUPERSEDE = "supersede"
    AGAIN = "again"  # an earlier supersede under its key once more
    CANCEL = "cancel"
    LOOK = "look"
    LIST = "list"


class Named(StrEnum):
    """Which epoch is named."""

    NONE = "none"
    RIGHT = "right"
    STALE = "stale"
    AHEAD = "ahead"
    STAR = "star"


class Reading(StrEnum):
    """How a stream is read."""

    FAST = "fast"
    SLOW = "slow"
    DROPPED = "dropped"  # half way


@dataclass(frozen=True)
class Move:
    """One move.

    `scope`: by number.  `copies`: so many callers make it at once, under one key.  `by_header`: the form of a
    supersede.  `successor`: whether it comes with one, where the form leaves a choice.  `rest_s`: before the next move.
    """

    scope: int
    act: Act
    named: Named
    by_header: bool
    successor: bool
    keyed: bool
    copies: int
    reading: Reading
    tokens: int
    rest_s: float


_ACTS = {Act.JOIN: 30, Act.SUPERSEDE: 38, Act.AGAIN: 7, Act.LOOK: 18, Act.LIST: 5, Act.CANCEL: 2}
_NAMED = {
    Act.JOIN: {Named.NONE: 45, Named.RIGHT: 30, Named.STALE: 12, Named.AHEAD: 13},
    Act.SUPERSEDE: {Named.RIGHT: 50, Named.STALE: 14, Named.AHEAD: 11, Named.STAR: 25},
}
_READINGS = {Reading.FAST: 50, Reading.SLOW: 30, Reading.DROPPED: 20}


def moves(seed: int, runtime: str, scopes: int) -> Iterator[Move]:
    """The moves of a runtime that knows so many scopes, without end."""
    draw = random.Random(f"{seed} {runtime}")  # noqa: S311 - a plan keeps no secret
    while True:
        act = _drawn(draw, _ACTS)
        keyed = act is Act.SUPERSEDE and draw.random() < 0.4
        yield Move(
            scope=draw.randrange(scopes),
            act=act,
            named=_drawn(draw, _NAMED[act]) if act in _NAMED else Named.NONE,
            by_header=draw.random() < 0.5,
            successor=draw.random() < 0.6,
            keyed=keyed,
            copies=draw.choice((1, 2, 3)) if keyed else 1,
            reading=_drawn(draw, _READINGS),
            tokens=draw.choice((4, 16, 64, 256)),
            rest_s=draw.choice((0.0, 0.02, 0.1, 0.3)),
        )


def _drawn(draw: random.Random, odds: dict[Drawn, int]) -> Drawn:
    return draw.choices(list(odds), list(odds.values()))[0]
