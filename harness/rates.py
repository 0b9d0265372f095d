"""`retire bench rates`: which policy gives most at which rate of revisions.

Stands beside A.2.2: rates of 0, 0.05 and 0.2 revisions a scope and second, 4 and 8 scopes, five policies, three
repetitions.  The paper's 108 points are these 90 and 18 that it does not describe.

Seconds are the paper's on this machine's scale, as in `burst`: a prefill takes 0.405 s there (7.4), and what it takes
here is measured at the start.  So a rate is as many revisions a prefill as there, and the window of `WINDOW_S` as many
prefills long.  Quanta keep the paper's share of a prompt: an eighth, the whole.  Prompts share nothing.

A scope has one version at a time, whose answer is longer than the window: without revisions it would speak until the
end.  Scopes begin a prefill apart.  A cell has as many revisions as its rate says, at times and of scopes that are
drawn with the trial's seed, those of a scope `LEAST_GAP_S` apart or more.  All policies meet the same ones, in an order
that rotates and is turned round in every other repetition:

- `native_Q`: vLLM's requests without a scope; the runtime hangs up and sends the new request.
- `selective_Q`: the new request supersedes; long steps are armed.
- `rate`: the same on a server that has the large quantum and `--retire-policy rate`, the paper's selector.

Goodput is current-version tokens a second of the window, as `harness.outcomes` counts them.  `selector_ratio` of a cell
is the selector's over the better selective quantum's, which has the same guards.  Where it lies within 2 % is counted
by the medians.  That the selector follows is another matter: reached when the intervals of all cells lie there, open
while none lies outside.

What could be unfair, and which way:

- Chosen for the better of two, the selective quantum is favoured by chance over the selector, which is one arm alone.
- The selector begins every run calm, and needs some revisions before it believes in a rate: in each window it is at the
  large quantum first.  A server that runs for hours would not.
- Steps are cut while requests with scopes are there.  Nobody else is, here.
- All answers are cut at the end of the window, in all arms alike: no final version is whole.
- Everything else as in `burst`: two shared cores, runs that are repeated because acts were late, native on patched
  servers, prefix caching that finds nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from harness.arrivals import Plan, Planned
from harness.burst import (
    PAPER_PREFILL_S,
    PROMPT_TOKENS,
    best,
    check_answers,
    goodput_pairs,
    native_prefill_s,
    server_flags,
)
from harness.client import Reply
from harness.experiment import Cell, Result, Target, columns, figures, join
from harness.ledger import Key, Ledger
from harness.outcomes import Outcome
from harness.progress import note
from harness.replay import WHOLE, Arm, Figures, Replay, Replayed, Site, goodput, in_turn, on_time, prompts, repeated
from harness.session import Session, serving_side_by_side
from harness.statistics import Bootstrap, Interval, Verdict, at_least, ratio_of_medians, whether
from retire.core.quantum import Policy
from retire.settings import POLICY_ENV

RATES, CONCURRENCIES = (0.0, 0.05, 0.2), (4, 8)
SMALL, LARGE = PROMPT_TOKENS // 8, PROMPT_TOKENS
WINDOW_S, QUICK_WINDOW_S = 60.0, 8.0
LEAST_GAP_S = 0.05  # of the paper's, as in its window; closer ones may overtake each other on their way to the server
ANSWER_TOKENS = 4096  # more than anybody says in a window
CLEAN_TOKENS = 16
WITHIN_AIM = 0.98

ARMS: Mapping[str, tuple[str, Arm]] = {
    f"native_{SMALL}": ("small", Arm.NATIVE),
    f"native_{LARGE}": ("large", Arm.NATIVE),
    f"selective_{SMALL}": ("small", Arm.RETIRE),
    f"selective_{LARGE}": ("large", Arm.RETIRE),
    "rate": ("rate", Arm.RETIRE),
}
"""Per policy of the paper's: on which server, and what the runtime does."""

SELECTOR = "rate"
KEPT = (
    "goodput_tokens_per_s",
    "obsolete_tokens",
    "late_tokens",
    "final_ttft_ms",
    "cleanup_ms",
    "most_obsolete",
    "repeats",
)


@dataclass(frozen=True)
class Point:
    """A cell of the map.  `rate`: revisions a scope and second of the paper's."""

    rate: float
    scopes: int

    @property
    def name(self) -> str:
        """What its figures stand under."""
        return f"rate_{self.rate:g}_scopes_{self.scopes}"

    @property
    def native_quantum(self) -> int:
        """What the paper's map shows to be best natively."""
        return SMALL if self.rate >= RATES[-1] else LARGE

    def plan(self, window_s: float, prefill: float, seed: int) -> Plan:
        """Every version of a trial, where a native prefill takes `prefill` seconds.

        `window_s`: on the paper's scale.
        """
        draw, factor = random.Random(f"{self.name} {seed}"), prefill / PAPER_PREFILL_S  # noqa: S311 - times
        revised = Counter(draw.randint(1, self.scopes) for _ in range(round(self.rate * self.scopes * window_s)))
        starts_s = {
            scope: _starts_s(draw, prefill * (scope - 1), window_s * factor, revised[scope], LEAST_GAP_S * factor)
            for scope in range(1, self.scopes + 1)
        }
        versions = [
            Planned(scope, number, start_s, None if number == 1 else start_s, PROMPT_TOKENS, 0, ANSWER_TOKENS)
            for scope, starts in starts_s.items()
            for number, start_s in enumerate(starts, start=1)
        ]
        return Plan(tuple(versions), (), tuple((scope, len(starts)) for scope, starts in starts_s.items()))


def _starts_s(draw: random.Random, begin_s: float, end_s: float, revisions: int, gap_s: float) -> list[float]:
    """When each version of a scope starts: the first at `begin_s`, the others anywhere, `gap_s` apart or more."""
    left_s = end_s - begin_s - revisions * gap_s
    drawn_s = sorted(draw.uniform(0.0, left_s) for _ in range(revisions))
    return [begin_s, *(begin_s + at_s + number * gap_s for number, at_s in enumerate(drawn_s, start=1))]


POINTS = tuple(Point(rate, scopes) for scopes in CONCURRENCIES for rate in RATES)
QUICK_POINTS = (Point(RATES[0], CONCURRENCIES[0]), Point(RATES[-1], CONCURRENCIES[0]))


@dataclass(frozen=True)
class Rates:
    """`trials`: repetitions of every cell."""

    model: str = "smollm2"
    trials: int = 3
    name: str = field(default="rates", init=False)
    paper: str = field(default="A.2.2", init=False)

    own_servers: str = field(default="both quanta and the selector have a server each", init=False)

    def run(self, ledger: Ledger, *, quick: bool) -> Result:
        """See the module."""
        points, trials = (QUICK_POINTS, 1) if quick else (POINTS, self.trials)
        with _serving(self.model, ledger.checks) as servers:
            for session in servers.values():
                native_prefill_s(session, times=1)  # warms up
            key = Key("prefill", (f"native_{LARGE}",), 0, seed=2)
            prefill = ledger.trial(key, lambda: native_prefill_s(servers["large"]))
            window_s = QUICK_WINDOW_S if quick else WINDOW_S
            note(
                f"  native prefill of {PROMPT_TOKENS} tokens: {prefill:.3f} s, the paper's {PAPER_PREFILL_S:g} s;"
                f" window {window_s * prefill / PAPER_PREFILL_S:.3g} s, rates "
                + ", ".join(f"{rate * PAPER_PREFILL_S / prefill:.3g}" for rate in RATES)
                + " per scope and second here"
            )
            ledger.plan({"prefill": 1} | {point.name: trials for point in points})
            bench = _Bench(ledger, servers, window_s, prefill)
            found = {point: bench.runs(point, trials) for point in points}
        return result(self, found, ledger.checks, servers["large"].seal, prefill, window_s)


@contextmanager
def _serving(model: str, checks: dict[str, bool]) -> Iterator[dict[str, Session]]:
    made = {"small": (SMALL, Policy.SELECTIVE), "large": (LARGE, Policy.SELECTIVE), "rate": (LARGE, Policy.RATE)}
    kinds = [{"flags": server_flags(quantum), "env": {POLICY_ENV: policy}} for quantum, policy in made.values()]
    with serving_side_by_side(model, (), kinds, checks) as found:
        yield {name: session for name, (_, session) in zip(made, found, strict=True)}


class _Bench:
    """Servers, and the runs on them.  `window_s`: on the paper's scale.  `prefill`: of a native prompt, in seconds."""

    def __init__(self, ledger: Ledger, servers: Mapping[str, Session], window_s: float, prefill: float) -> None:
        self._ledger, self._servers = ledger, servers
        self._window_s, self._prefill = window_s, prefill

    def runs(self, point: Point, trials: int) -> list[Mapping[str, Figures]]:
        """Per trial, every arm's figures."""
        names = list(ARMS)
        found = []
        for trial in range(trials):
            key = Key(point.name, names, trial, seed=1 + trial)
            found.append(self._ledger.trial(key, partial(self._trial, point, in_turn(names, trial), trial)))
        return found

    def _trial(self, point: Point, order: Sequence[str], trial: int) -> dict[str, Figures]:
        """Every arm once, in that order."""
        plan = point.plan(self._window_s, self._prefill, 1 + trial)
        clean: dict[int, Reply] = {}
        found: dict[str, Figures] = {}
        for arm in order:
            server, runtime = ARMS[arm]
            session = self._servers[server]
            found[arm] = told = self._run(session, plan, runtime, trial, clean)
            note(
                f"  {point.name} {trial + 1} {arm}: {told['goodput_tokens_per_s']:.1f} token/s,"
                f" obsolete {told['obsolete_tokens']}, quantum {told['quantum_tokens'] or 'as started'}"
            )
        return found

    def _run(self, session: Session, plan: Plan, runtime: Arm, trial: int, clean: dict[int, Reply]) -> Figures:
        site = Site(session.url, session.model)
        texts = prompts(site, plan, 1 + trial)
        window_s = self._window_s * self._prefill / PAPER_PREFILL_S
        replay = Replay(site, plan, texts, window_s=window_s, limit_s=window_s - plan.last_s)
        before: dict[int, int] = {}

        def once() -> Replayed:
            nonlocal before
            before = session.quanta()
            return replay.run(runtime)

        run = on_time(once)
        chosen = {tokens: steps - before.get(tokens, 0) for tokens, steps in session.quanta().items()}
        for name, holds in checks_of(run).items():
            session.check(name, holds)
        check_answers(session, run, texts, clean, "successors_begin_as_clean_runs", CLEAN_TOKENS)
        told = run.figures()
        return {**{name: told[name] for name in KEPT}, "quantum_tokens": mean_quantum(chosen)}


def checks_of(run: Replayed) -> dict[str, bool]:
    """What must be true although every answer is cut at the end of the window: no other one is broken off."""
    held = {name: holds for name, holds in run.checks().items() if name != WHOLE}
    failed = run.account.outcomes()[Outcome.FAILED.value]
    join(held, {"no_version_failed": failed <= min(run.cut, len(run.versions))})
    return held


def mean_quantum(steps: Mapping[int, int]) -> float | None:
    """Of steps by quantum; None where none was chosen."""
    count = sum(steps.values())
    return sum(tokens * number for tokens, number in steps.items()) / count if count else None


Trials = Sequence[Mapping[str, Figures]]


def result(
    bench: Rates,
    found: Mapping[Point, Trials],
    checks: Mapping[str, bool],
    seal: Mapping[str, str],
    prefill: float,
    window_s: float,
) -> Result:
    """The figures of all cells, and what the worst of them says."""
    told = {point: of_point(point, trials) for point, trials in found.items()}
    counted = {point: one["selector_ratio"] for point, one in told.items() if one["selector_ratio"] is not None}
    within = sum(ratio >= WITHIN_AIM for ratio in counted.values())
    worst = min(counted, key=lambda point: counted[point], default=None)
    runs = [(arm, run) for trials in found.values() for trial in trials for arm, run in trial.items()]
    obsolete = {
        runtime: sum(run["obsolete_tokens"] for arm, run in runs if ARMS[arm][1] is runtime)
        for runtime in (Arm.RETIRE, Arm.NATIVE)
    }
    head: dict[str, Any] = {
        "selector_within_2pct": within,
        "cells": len(found),
        "worst_selector_ratio": None if worst is None else told[worst]["selector_ratio"],
        "worst_selector_ratio_ci95": None if worst is None else told[worst]["selector_ratio_ci95"],
        "worst_cell": None if worst is None else worst.name,
        "retire_obsolete_tokens": obsolete[Arm.RETIRE],
        "native_obsolete_tokens": obsolete[Arm.NATIVE],
        "native_quantum_as_paper": sum(
            one["best_native"] == f"native_{point.native_quantum}" for point, one in told.items()
        ),
        "points": len(runs),
        "runs_repeated": repeated(run for _, run in runs),
        "prefill_s": prefill,
        "time_scale": prefill / PAPER_PREFILL_S,
        "window_s": window_s * prefill / PAPER_PREFILL_S,
    }
    verdicts = {point: _follows(one, len(found[point])) for point, one in told.items()}
    targets = [
        Target("selector_within_2pct", "follows", f"{len(found)}", _worst(list(verdicts.values()))),
        Target(
            "worst_selector_ratio",
            "follows",
            f"≥ {WITHIN_AIM:g}",
            Verdict.NOT_REACHED if worst is None else verdicts[worst],
        ),
        Target("retire_obsolete_tokens", "0", "0", whether(bool(runs) and obsolete[Arm.RETIRE] == 0)),
    ]
    cells = [
        Cell({"bench": "rates", "revisions_per_scope_per_s": point.rate, "concurrency": point.scopes}, columns(trials))
        for point, trials in found.items()
    ]
    by_cell = {f"by_cell.{point.name}": one for point, one in told.items()}
    return Result(cells, {**head, **by_cell}, dict(checks), targets, bench.model, seal)


def _follows(cell: Mapping[str, Any], trials: int) -> Verdict:
    """What the interval of a cell's selector says."""
    interval = cell["selector_ratio_ci95"]
    return Verdict.NOT_REACHED if interval is None else at_least(Interval(*interval), WITHIN_AIM, trials)


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Reached if all of them are, and at least one; open if none says the contrary."""
    if not verdicts or Verdict.NOT_REACHED in verdicts:
        return Verdict.NOT_REACHED
    return Verdict.OPEN if Verdict.OPEN in verdicts else Verdict.REACHED


def of_point(point: Point, trials: Trials) -> dict[str, Any]:
    """One cell: every policy's goodput, and what the selector and RETIRE make of it.

    Ratios are of medians; `selector_over.ARM` is against each other policy.
    """
    runs = {arm: [trial[arm] for trial in trials] for arm in ARMS}
    native, selective = best(runs, "native"), best(runs, "selective")
    quantum = [run["quantum_tokens"] for run in runs[SELECTOR] if run["quantum_tokens"]]
    over = {arm: _ratio(runs, SELECTOR, arm) for arm in ARMS if arm != SELECTOR}
    return {
        "revisions_per_scope_per_s": point.rate,
        "concurrency": point.scopes,
        "goodput_tokens_per_s": {arm: told for arm in ARMS if (told := goodput(runs[arm])) is not None},
        "best_native": native,
        "best_selective": selective,
        **figures("selector_ratio", None if selective is None else over[selective]),
        **figures("goodput_ratio", _ratio(runs, selective, native)),
        **{key: value for arm, ratio in over.items() for key, value in figures(f"selector_over.{arm}", ratio).items()},
        "selector_quantum_tokens": sum(quantum) / len(quantum) if quantum else None,
    }


def _ratio(runs: Mapping[str, Sequence[Figures]], above: str | None, below: str | None) -> Bootstrap | None:
    """Of goodputs, by trial; None where somebody gave nothing."""
    pairs = goodput_pairs(runs, above, below)
    return Bootstrap(ratio_of_medians, pairs) if pairs and all(ours > 0 for ours, _ in pairs) else None
