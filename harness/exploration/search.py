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
from retire.core.invariants import Invariant


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
            f"{self.world}: {self.states:,} states, {self.moves:,} moves, depth {self.depth}, "
            f"{self.resting:,} at rest, {self.core_states:,} of the core, {self.seconds:.0f} s"
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
    return _Search(rules, limit).run()


class _Search:
    def __init__(self, rules: Rules, limit: int) -> None:
        self._rules = rules
        self._limit = limit
        self._numbers: dict[State, int] = {}
        self._order: list[State] = []
        self._parents, self._depths = array("l"), array("l")
        self._texts: list[str] = []
        self._sources, self._targets = array("l"), array("l")
        self._resting = bytearray()
        self._moves = 0

    def run(self) -> Explored:
        begun = time.process_time()
        counterexample = self._visit_all()
        if counterexample is None:
            stuck = _stuck(self._sources, self._targets, self._resting)
            if stuck is not None:
                why = f"invariant {Invariant.ANY_STAGE.value} (ANY_STAGE): from here no version will ever answer"
                counterexample = Counterexample(why, self._path(stuck))
        return Explored(
            self._rules.world.name,
            len(self._order),
            self._moves,
            self._depths[-1],
            sum(self._resting),
            self._rules.core_states,
            time.process_time() - begun,
            counterexample,
        )

    def _visit_all(self) -> Counterexample | None:
        self._note(self._rules.start, -1, "")
        place = 0
        while place < len(self._order):
            fresh = len(self._order)
            try:
                self._visit(place)
            except Violated as error:
                return Counterexample(str(error), (*self._path(place), "a move that cannot be carried out"))
            for number in range(fresh, len(self._order)):
                try:
                    self._rules.check(self._order[number])
                except Violated as error:
                    return Counterexample(str(error), self._path(number))
            place += 1
        return None

    def _visit(self, place: int) -> None:
        numbers, sources, targets = self._numbers, self._sources, self._targets
        for move, after in self._rules.moves(self._order[place]):
            self._moves += 1
            known = numbers.get(after)
            if known is None:
                known = self._note(after, place, move.text)
            if move.good and known != place:
                sources.append(place)
                targets.append(known)

    def _note(self, state: State, parent: int, text: str) -> int:
        number = self._numbers[state] = len(self._order)
        if number >= self._limit:
            raise TooLarge(f"{self._rules.world.name}: more than {self._limit:,} states")
        self._order.append(state)
        self._parents.append(parent)
        self._depths.append(self._depths[parent] + 1 if number else 0)
        self._texts.append(text)
        self._resting.append(self._rules.rests(state))
        return number

    def _path(self, number: int) -> tuple[str, ...]:
        back = []
        while number > 0:
            back.append(self._texts[number])
            number = self._parents[number]
        return tuple(reversed(back))


def _stuck(sources: array[int], targets: array[int], resting: bytearray) -> int | None:
    """The first state from which no path leads to rest; None if there is none."""
    ends, begins = np.frombuffer(targets, dtype=np.int64), np.frombuffer(sources, dtype=np.int64)
    good = np.frombuffer(resting, dtype=np.uint8).astype(bool)
    reached = -1
    while reached != (reached := int(good.sum())):
        good[begins[good[ends]]] = True
    lost = np.flatnonzero(~good)
    return int(lost[0]) if lost.size else None
