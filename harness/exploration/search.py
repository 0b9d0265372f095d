"""All states of a world, breadth first.

Owns: the order of visiting, the way back to a counterexample, and whether rest is reachable from everywhere.
Must not know: what a state means.
Strategy: the first time an invariant breaks, it breaks after as few moves as it can.  Edges of moves in which nothing
fails are kept; a state from which no path of them leads to rest is a livelock or a deadlock.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass

import numpy as np

from harness.exploration.world import Rules, State, Violated


@dataclass(frozen=True)
class Explored:
    """What was found.  `stuck`: states from which nobody can come to rest."""

    world: str
    states: int
    moves: int
    depth: int
    resting: int
    core_states: int
    seconds: float
    counterexample: Counterexample | None = None

    def __str__(self) -> str:
        told = (
            f"{self.world}: {self.states:,} states, {self.moves:,} moves, depth {self.depth}, {self.resting:,} at rest, "
            f"{self.core_states:,} of the core, {self.seconds:.0f} s"
        )
        return told if self.counterexample is None else f"{told}\n{self.counterexample}"


@dataclass(frozen=True)
class Counterexample:
    """The shortest way into a defect."""

    why: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        steps = "\n".join(f"  {number}. {text}" for number, text in enumerate(self.path, 1))
        return f"{steps}\n  => {self.why}"


class TooLarge(RuntimeError):
    """More states than were allowed for."""


def explore(rules: Rules, limit: int = 5_000_000) -> Explored:
    """Every state that can be reached.  Ends at the first defect.

    Raises:
        TooLarge: after `limit` states.
    """
    begun = time.process_time()
    name, start = rules.world.name, rules.start
    numbers: dict[State, int] = {start: 0}
    order: list[State] = [start]
    parents, texts, depths = array("l", [-1]), [""], array("l", [0])
    sources, targets = array("l"), array("l")
    resting = bytearray([rules.rests(start)])
    moves = 0

    def told(counterexample: Counterexample | None) -> Explored:
        return Explored(
            name,
            len(order),
            moves,
            depths[-1],
            sum(resting),
            rules.core_states,
            time.process_time() - begun,
            counterexample,
        )

    def path(number: int) -> tuple[str, ...]:
        back = []
        while number > 0:
            back.append(texts[number])
            number = parents[number]
        return tuple(reversed(back))

    place = 0
    while place < len(order):
        state = order[place]
        try:
            for move, after in rules.moves(state):
                moves += 1
                known = numbers.get(after)
                if known is None:
                    known = numbers[after] = len(order)
                    order.append(after)
                    parents.append(place)
                    texts.append(move.text)
                    depths.append(depths[place] + 1)
                    resting.append(rules.rests(after))
                    if known >= limit:
                        raise TooLarge(f"{name}: more than {limit:,} states")
                    try:
                        rules.check(after)
                    except Violated as error:
                        return told(Counterexample(str(error), path(known)))
                if move.good and known != place:
                    sources.append(place)
                    targets.append(known)
        except Violated as error:
            return told(Counterexample(str(error), (*path(place), "the move that shows it")))
        place += 1
    stuck = _stuck(len(order), sources, targets, resting)
    if stuck is not None:
        return told(Counterexample("invariant 9 (ANY_STAGE): from here no version will ever answer", path(stuck)))
    return told(None)


def _stuck(states: int, sources: array[int], targets: array[int], resting: bytearray) -> int | None:
    """The first state from which no path leads to rest; None if there is none."""
    ends, begins = np.frombuffer(targets, dtype=np.int64), np.frombuffer(sources, dtype=np.int64)
    good = np.frombuffer(resting, dtype=np.uint8).astype(bool)
    reached = -1
    while reached != (reached := int(good.sum())):
        good[begins[good[ends]]] = True
    lost = np.flatnonzero(~good)
    assert good.size == states
    return int(lost[0]) if lost.size else None
