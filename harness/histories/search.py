"""Whether steps can be put into an order that a register allows.

Owns: the search, and the fewest answers that contradict each other when there is none.
Must not know: how answers become steps, frames, files.
Strategy: Wing and Gong's search over configurations (which steps have their place, in which state), each visited once,
as Lowe does it.  A step may come next when no step that returned before its call is left over.  What keeps this small:

- A step that can stand without changing anything does so at once: it can come later in no order in which it could not
  have come now.  So there is a choice where the state changes, and where something can happen until that step only.
- States only grow.  Whoever must stand in a state that has passed ends the branch.
- The way out of an epoch that an accepted supersede claims is left to it; and what could only leave this very epoch is
  taken before what could leave any.
- Of what may have happened, steps that do the same differ only in when they were called: the earliest is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from harness.histories.register import LIVE, START, Advanced, Effect, MayAdvance, MayRaise, State, Step

CONFIGURATIONS_MAX = 200_000


class Found(Enum):
    """What a search comes to."""

    ORDER = "order"
    NONE = "none"
    UNDECIDED = "undecided"  # more configurations than it was given


@dataclass(frozen=True)
class Outcome:
    """`visited`: how many configurations.  `state`, `stuck`: the furthest it got, and what was left over there."""

    found: Found
    visited: int
    state: State
    stuck: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Configuration:
    """`first`: of the steps that must stand, all before this one do.  `beyond`: which from there on do, as bits.

    `used`: how many of each kind of what may have happened did.
    """

    first: int
    beyond: int
    used: tuple[int, ...]
    state: State

    @property
    def placed(self) -> int:
        """How many steps that must stand do."""
        return self.first + self.beyond.bit_count()

    def has(self, position: int) -> bool:
        """Whether this step stands."""
        return position < self.first or bool(self.beyond >> (position - self.first) & 1)


class _Search:
    def __init__(self, steps: Sequence[Step]) -> None:
        numbered = sorted(enumerate(steps), key=lambda one: (one[1].called, one[0]))
        must = [(number, step) for number, step in numbered if step.must]
        self._positions = {number: position for position, (number, _) in enumerate(must)}
        self._must = [step for _, step in must]
        self._returned = [step.returned or 0 for step in self._must]
        self._after = [[self._positions[one] for one in step.after] for step in self._must]
        kinds: dict[tuple[Effect, tuple[int, ...], int | None], list[Step]] = {}
        for _, step in numbered:
            if not step.must:
                kinds.setdefault((step.effect, step.after, step.until), []).append(step)
        self._may = list(kinds.values())
        self._bounded = {
            self._positions[step.until]: kind for (kind, (step, *_)) in enumerate(self._may) if step.until is not None
        }
        self._forgetful = any(isinstance(one.effect, MayRaise) for one, *_ in self._may)
        self._claimed = {step.effect.new - 1 for step in self._must if isinstance(step.effect, Advanced)}

    def run(self, most: int) -> Outcome:
        start = self._settled(_Configuration(0, 0, (0,) * len(self._may), START))
        furthest, seen, waiting = start, {start}, [start]
        while waiting:
            here = waiting.pop()
            if here.placed > furthest.placed:
                furthest = here
            if here.first == len(self._must):
                return Outcome(Found.ORDER, len(seen), here.state)
            if len(seen) > most:
                return Outcome(Found.UNDECIDED, len(seen), furthest.state)
            for there in map(self._settled, self._next(here)):
                if there not in seen:
                    seen.add(there)
                    waiting.append(there)
        stuck = {self._must[position].id for position in self._window(furthest)[0]}
        return Outcome(Found.NONE, len(seen), furthest.state, tuple(sorted(stuck)))

    def _window(self, here: _Configuration) -> tuple[list[int], float]:
        """The steps that may come next, by what must stand, and before when what may come next was called."""
        horizon = float("inf")
        open_: list[int] = []
        for position in range(here.first, len(self._must)):
            if self._must[position].called > horizon:
                break
            if not here.has(position):
                open_.append(position)
                horizon = min(horizon, self._returned[position])
        return [position for position in open_ if self._must[position].called <= horizon], horizon

    def _settled(self, here: _Configuration) -> _Configuration:
        """With everything in its place that changes nothing there."""
        while True:
            first, beyond = here.first, here.beyond
            while beyond & 1:
                beyond >>= 1
                first += 1
            here = _Configuration(first, beyond, here.used, here.state)
            free = [
                position
                for position in self._window(here)[0]
                if self._ready(here, position)
                and self._must[position].effect.moves(here.state) == (here.state,)
                and not self._waits(here, position)
            ]
            if not free:
                return here
            for position in free:
                beyond |= 1 << (position - first)
            here = replace(here, beyond=beyond)

    def _waits(self, here: _Configuration, position: int) -> bool:
        """Whether something may still happen until then, and only until then."""
        kind = self._bounded.get(position)
        if kind is None or here.used[kind]:
            return False
        return self._forgetful or not self._may[kind][0].effect.over(here.state)

    def _ready(self, here: _Configuration, position: int) -> bool:
        return all(here.has(one) for one in self._after[position])

    def _next(self, here: _Configuration) -> list[_Configuration]:
        """What can come of the next change of state; what is most likely at the end."""
        window, horizon = self._window(here)
        if any(self._must[position].effect.over(here.state) for position in window):
            return []
        found = [
            _Configuration(here.first, here.beyond, _one_more(here.used, kind), to)
            for kind in self._may_come(here, horizon)
            for to in self._may[kind][0].effect.moves(here.state)
        ]
        for position in window:
            if self._ready(here, position):
                beyond = here.beyond | 1 << (position - here.first)
                moves = self._must[position].effect.moves(here.state)
                found += [_Configuration(here.first, beyond, here.used, to) for to in moves]
        return found

    def _may_come(self, here: _Configuration, horizon: float) -> list[int]:
        """The kinds of which one more may come next."""
        state, kinds = here.state, []
        if state.status is LIVE and state.epoch in self._claimed:
            return []
        for kind, alike in enumerate(self._may):
            if here.used[kind] == len(alike):
                continue
            step = alike[here.used[kind]]
            bound = step.until is None or not here.has(self._positions[step.until])
            if step.called <= horizon and bound and all(here.has(self._positions[one]) for one in step.after):
                kinds.append(kind)
        if state.status is not LIVE:
            return kinds
        advancing = {kind: one for kind in kinds if isinstance(one := self._may[kind][0].effect, MayAdvance)}
        exact = [kind for kind, effect in advancing.items() if effect.asked == state.epoch]
        return [kind for kind in kinds if kind not in advancing or kind in (exact[:1] or advancing)]


def _one_more(used: tuple[int, ...], kind: int) -> tuple[int, ...]:
    return (*used[:kind], used[kind] + 1, *used[kind + 1 :])


def search(steps: Sequence[Step], most: int = CONFIGURATIONS_MAX) -> Outcome:
    """Look for an order, among so many configurations at most."""
    return _Search(steps).run(most)


def fewest(ids: Sequence[int], contradict: Callable[[frozenset[int]], bool]) -> list[int]:
    """Of operations whose answers contradict each other a part whose answers do, and from which none can be left out.

    `contradict`: whether the answers still do when those of these are doubted.
    """
    kept, doubted = list(ids), set[int]()
    size = max(1, len(kept) // 2)
    while True:
        place = 0
        while place < len(kept):
            part = set(kept[place : place + size])
            if contradict(frozenset(doubted | part)):
                doubted |= part
                kept = [one for one in kept if one not in part]
            else:
                place += size
        if size == 1:
            return kept
        size = max(1, size // 2)
