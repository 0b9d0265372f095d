"""What is sent when: a trace as a plan of versions, and other work as arrivals.

Owns: time scales, prompt sizes, what versions share, which bursts there are, forms of arrival traces.
Must not know: a server, a clock, what a prompt says.
Strategy: a plan is made whole before anything is sent, and is the same for every arm.  All times are seconds since the
replay begins, on its own scale; whoever carries a plan out asks an `Agenda` what is due.  Nothing in it waits for an
answer: arrivals are open-loop.

A transition is one act where the successor was waiting already (`traces.rows.AUTO_SUBMIT_S`), and two where the log
says that somebody thought in between: the version is given up, and its successor comes later.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import islice, pairwise
from typing import Final, Generic, TypeVar

from retire.core.errors import RetireError
from traces.rows import AUTO_SUBMIT_S, Transition
from traces.statistics import bursts, densest_rows

T = TypeVar("T")
TURN_S: Final = 48.0
"""How long an aborted turn had lasted whose log does not say: what is usual."""
LEAD_S: Final = 1.0
"""How long before a window, on the replay's scale, turns begin that were running when it does."""


class ArrivalError(RetireError):
    """A line of an arrival trace is none, or there is nothing to replay."""


class Pace(StrEnum):
    """What becomes of the time between the transitions of a scope."""

    RECORDED = "recorded"  # as it was: what lies between includes turns that nobody aborted
    FOLDED = "folded"  # left out: a scope's aborted turns and gaps follow each other, all scopes begin together


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long prompts and answers are, in tokens.

    `prompt_tokens` and `overlap` (the share of a prompt that its successor begins with) stand in for what a row does
    not say.  `scale` is applied to what rows do say; no prompt is longer than `most_tokens`, and what it shares shrinks
    with it.  `answer_tokens`: of every version.
    """

    prompt_tokens: int = 1024
    overlap: float = 0.0
    scale: float = 1.0
    most_tokens: int = 4096
    answer_tokens: int = 256

    def prompt(self, recorded: int | None) -> int:
        """Of a prompt that was so long, or whose length nobody knows; 1 at least."""
        wanted = self.prompt_tokens if recorded is None else round(self.scale * recorded)
        return max(1, min(wanted, self.most_tokens))

    def shared(self, row: Transition, before: int, after: int) -> int:
        """How many of `before` tokens the successor's `after` begin with: one less than these, at most."""
        share = self.overlap if row.kept_share is None else row.kept_share
        return max(0, min(round(share * before), before, after - 1))


@dataclass(frozen=True, slots=True)
class Planned:
    """Version `number` (from 1) of scope `scope` (from 1).

    `given_up_s`: when the version before it is; None for the first, `start_s` where both are one act.
    `shared_tokens`: with the version before it.
    """

    scope: int
    number: int
    start_s: float
    given_up_s: float | None
    prompt_tokens: int
    shared_tokens: int
    answer_tokens: int

    @property
    def in_one_act(self) -> bool:
        """Whether it comes with the end of its predecessor."""
        return self.given_up_s == self.start_s


@dataclass(frozen=True, slots=True)
class Plan:
    """Versions by scope and number, and when each burst begins.

    `finals`: per burst and scope, the number of the last version that the burst leaves.
    """

    versions: tuple[Planned, ...]
    bursts_s: tuple[float, ...]
    finals: tuple[tuple[int, int], ...]

    @property
    def scopes(self) -> dict[int, list[Planned]]:
        """The versions of every scope, in order."""
        found: dict[int, list[Planned]] = {}
        for version in self.versions:
            found.setdefault(version.scope, []).append(version)
        return found

    @property
    def last_s(self) -> float:
        """When the last version starts."""
        return max(version.start_s for version in self.versions)


def plan(
    rows: Iterable[Transition],
    sizes: Sizes,
    *,
    scopes: int | None = None,
    speed: float = 1.0,
    pace: Pace = Pace.RECORDED,
    window_s: float | None = None,
) -> Plan:
    """The versions that these transitions make.

    `scopes`: only so many, those with most transitions.  `speed`: how much faster than recorded.  `window_s`: only the
    recorded seconds with most transitions of any source, by their starts; turns that began before begin `LEAD_S` before
    it, and nothing is given up before it.

    Raises:
        ArrivalError: no row is left.
    """
    kept = list(rows)
    window_begins_s = float("-inf")
    if window_s is not None and kept:
        kept = _densest(kept, window_s)
        window_begins_s = kept[0].t_start_s
    threads: dict[tuple[str, int], list[Transition]] = {}
    for row in sorted(kept, key=lambda row: (row.t_start_s, row.t_abort_s)):
        threads.setdefault((row.source, row.scope), []).append(row)
    chosen = sorted(threads.values(), key=len, reverse=True)[:scopes]
    if not chosen:
        raise ArrivalError("there is no transition to replay")
    chosen.sort(key=lambda thread: (thread[0].t_start_s, thread[0].scope))
    lead_s = LEAD_S * speed
    timed = [
        _folded(thread) if pace is Pace.FOLDED else _recorded(thread, window_begins_s, lead_s) for thread in chosen
    ]
    origin_s = min(times[0][1] for times in timed)
    versions = []
    for scope, (thread, times) in enumerate(zip(chosen, timed, strict=True), start=1):
        before = sizes.prompt(thread[0].prompt_tokens_before)
        shared = 0
        for number, (given_up_s, start_s) in enumerate(times, start=1):
            if number > 1:
                row = thread[number - 2]
                after = sizes.prompt(row.prompt_tokens_after)
                shared, before = sizes.shared(row, before, after), after
            versions.append(
                Planned(
                    scope,
                    number,
                    (start_s - origin_s) / speed,
                    None if given_up_s is None else (given_up_s - origin_s) / speed,
                    before,
                    shared,
                    sizes.answer_tokens,
                )
            )
    return Plan(tuple(versions), *_bursts(versions))


def _densest(rows: Iterable[Transition], window_s: float) -> list[Transition]:
    """The rows of the window with most arrivals of any source, by their starts."""
    sources: dict[str, list[Transition]] = {}
    for row in rows:
        sources.setdefault(row.source, []).append(row)
    windows = [densest_rows(of_source, window_s) for of_source in sources.values()]
    return max(windows, key=lambda window: (len(window), -window[0].t_start_s))


_Times = list[tuple[float | None, float]]
"""Of each version of a scope: when its predecessor is given up, and when it starts."""


def _recorded(thread: Sequence[Transition], window_begins_s: float, lead_s: float) -> _Times:
    first = thread[0]
    began_s = max(window_begins_s - lead_s, first.t_abort_s - _lasted_s(first))
    times: _Times = [(None, min(first.t_start_s, began_s))]
    for row in thread:
        earliest_s = max(times[-1][1], window_begins_s)  # clocks of logs are set back at times
        start_s = max(row.t_start_s, earliest_s)
        given_up_s = start_s if row.gap_s < AUTO_SUBMIT_S else min(start_s, max(row.t_abort_s, earliest_s))
        times.append((given_up_s, start_s))
    return times


def _folded(thread: Sequence[Transition]) -> _Times:
    times: _Times = [(None, 0.0)]
    for row in thread:
        given_up_s = times[-1][1] + _lasted_s(row)
        start_s = given_up_s + row.gap_s
        times.append((start_s if row.gap_s < AUTO_SUBMIT_S else given_up_s, start_s))
    return times


def _lasted_s(row: Transition) -> float:
    return TURN_S if row.aborted_turn_s is None else row.aborted_turn_s


def _bursts(versions: Sequence[Planned]) -> tuple[tuple[float, ...], tuple[tuple[int, int], ...]]:
    """Successors that follow each other sooner than in the mean are one burst."""
    successors = sorted((one for one in versions if one.number > 1), key=lambda one: (one.start_s, one.scope))
    gaps_s = [later.start_s - earlier.start_s for earlier, later in pairwise(successors)]
    left = iter(successors)
    found = [list(islice(left, size)) for size in bursts(gaps_s)]
    finals = [(scope, number) for burst in found for scope, number in {one.scope: one.number for one in burst}.items()]
    return tuple(burst[0].start_s for burst in found), tuple(finals)


# ---------------------------------------------------------------- other work


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of nobody's scope."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int


def arrivals(lines: Iterable[str], *, speed: float = 1.0, until_s: float, most_tokens: int = 4096) -> list[Arrival]:
    """Requests of an arrival trace that come before `until_s`, from its first one on, none longer than `most_tokens`.

    Known are CSV with TIMESTAMP, ContextTokens, GeneratedTokens, and JSON lines with timestamp (ms), input_length,
    output_length.

    Raises:
        ArrivalError: names the first line that is neither.
    """
    found: list[Arrival] = []
    first_s: float | None = None
    columns: list[str] | None = None
    for number, line in enumerate(lines, start=1):
        text = line.strip().lstrip("\ufeff")
        if not text:
            continue
        try:
            if text.startswith("{"):
                told = json.loads(text)
                seconds, sizes = told["timestamp"] / 1000, (told["input_length"], told["output_length"])
            elif columns is None:
                columns = [name.strip() for name in text.split(",")]
                for name in _COLUMNS:
                    columns.index(name)
                continue
            else:
                values = dict(zip(columns, text.split(","), strict=True))
                seconds = datetime.fromisoformat(values["TIMESTAMP"].strip()).timestamp()
                sizes = int(values["ContextTokens"]), int(values["GeneratedTokens"])
            first_s = seconds if first_s is None else first_s
            at_s = max(0.0, (seconds - first_s) / speed)
            if at_s >= until_s:
                break
            prompt, answer = (max(1, min(int(size), most_tokens)) for size in sizes)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise ArrivalError(f"line {number} is no arrival") from None
        found.append(Arrival(at_s, prompt, answer))
    return sorted(found, key=lambda arrival: arrival.at_s)


_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


# ---------------------------------------------------------------- when


class Agenda(Generic[T]):
    """Things to do at their times, each handed out once and in order; equal times keep the order they came in."""

    def __init__(self, items: Iterable[tuple[float, T]]) -> None:
        self._items = sorted(items, key=lambda item: item[0])
        self._taken = 0

    def due(self, now_s: float) -> list[tuple[float, T]]:
        """What has come due and was not handed out yet, with its time."""
        first = self._taken
        while self._taken < len(self._items) and self._items[self._taken][0] <= now_s:
            self._taken += 1
        return self._items[first : self._taken]

    def next_s(self) -> float | None:
        """When the next one is; None: there is none."""
        return self._items[self._taken][0] if self._taken < len(self._items) else None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The current version of the scope is given up; its successor comes later."""

    successor: Planned


@dataclass(frozen=True, slots=True)
class Start:
    """The version is sent, and its predecessor given up by it where that is one act."""

    version: Planned


def agenda(versions: Iterable[Planned]) -> Agenda[GiveUp | Start]:
    """What an application with these versions does."""
    acts: list[tuple[float, GiveUp | Start]] = []
    for version in versions:
        if version.given_up_s is not None and not version.in_one_act:
            acts.append((version.given_up_s, GiveUp(version)))
        acts.append((version.start_s, Start(version)))
    return Agenda(acts)


def counted(planned: Plan) -> dict[str, int]:
    """What a plan holds, for a reader."""
    kinds = Counter("in_one_act" if one.in_one_act else "given_up_before" for one in planned.versions if one.number > 1)
    return {
        "scopes": len(planned.scopes),
        "versions": len(planned.versions),
        "transitions": sum(kinds.values()),
        **kinds,
        "bursts": len(planned.bursts_s),
        "final_total": len(planned.finals),
    }
