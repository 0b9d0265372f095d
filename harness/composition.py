"""`retire bench composition`: fast invalidation and inheritance on one critical path, and trimming beyond both.

Stands beside Table 5 (an 8192-token prompt, quantum 4096, 90 % overlap, a revision inside the second quantum: 17.1 %
off native abort and cold restart with both mechanisms together).

A predecessor's prefill is interrupted at a share of one of its steps by a successor of the same length that has its
first tokens in common with it.  TTFT is measured at the client, from the decision to the successor's first token.

- `native_cold`: the client hangs up and sends the successor, in a cache that holds nothing of it.
- `native_prefix`: the same in the predecessor's cache; vLLM reuses what it finds there.
- `invalidate`: supersede with `inherit: none`; the step stops, nothing is reused.
- `inherit`: a server on which no step is armed, so that this one runs to its end; then a certificate.
- `combined`: POST /supersede, then the successor as a request of its own.  Nobody has told what is still of use when
  the step is fenced, so it stops at once, and what earlier steps completed is inherited.  The paper's policy.
- `trim`: supersede in the successor's header; what it shares of the running step is finished, the rest is cut out.

The full cell has all arms; the grid has `trim` against the better native arm at every moment and overlap: the question
is whether there is a revision for which an ordinary prefix cache is the better answer.

What could be unfair, and which way:

- The arms of a trial run on servers of their own, which take turns (`harness.turns`), and change servers every time.
  With six arms three come first and three after; only arms that came together are judged against each other.
- The moment is a share of the step's expected length; trials in which it fell outside the step are measured again.
- Native arms do not wait until the server has noticed the hang-up, and carry no gate, ticket or usage.  For native.
- An abandoned native stream ends by the client's own doing; no stale frame is waited for.  For native.
- Every arm asks for the same tokens and log-probabilities, in caches of its own.
- In the grid `native_cold` is measured in every pair where at most a quarter is shared, once elsewhere: it computes all
  that `native_prefix` computes and more.
- All cells of the grid are measured a few times; where the median is not below 1, again, and only these fresh pairs are
  judged (Holm over the whole grid).
- How a prompt is cut into steps changes the last bits of its KV, so arms may part where two tokens are nearly as
  likely (`harness.client.says_the_same`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from harness.client import TIMEOUT_S, Reply, Streaming, http, says_the_same
from harness.experiment import Cell, Result, Target, columns, figures
from harness.faults import EXTENSION
from harness.ledger import Key, Ledger
from harness.moments import Clock, Moment, MomentMissed, Moments
from harness.progress import note
from harness.server import Server
from harness.session import DEVELOPMENT, Session, serving_side_by_side
from harness.statistics import Bootstrap, Verdict, at_least, holm, median_of_ratios, whether
from harness.turns import Turns
from harness.workload import diverging, fresh_salt, fresh_scope, passage, record_of
from retire.core.quantum import Policy
from retire.settings import ARM_ENV, POLICY_ENV

ARMS = ("native_cold", "native_prefix", "trim", "invalidate", "inherit", "combined")
PAPER = {"invalidate": 0.056, "inherit": 0.103, "combined": 0.171}
ANSWER_TOKENS, PREDECESSOR_TOKENS, ALTERNATIVES = 4, 256, 5
SERVERS, TRIES = 3, 30  # late in a short step a moment is hit one time in two, and all arms must be
BLOCK = 128
TRIM_AIM, NATIVE_AIM, ALPHA = 0.60, 1.02, 0.05
SHARES, OVERLAPS = (0.10, 0.40, 0.70, 0.95), (0.0, 0.25, 0.50, 0.75, 0.90, 1.0)


@dataclass(frozen=True)
class Revision:
    """`tokens`: of both prompts.  `quantum`: of a step.  `step`: the interrupted one, from 1, at `share` of its work.

    `overlap`: the share of the prompt that the successor keeps.
    """

    tokens: int
    quantum: int
    step: int
    share: float
    overlap: float

    @property
    def shared_tokens(self) -> int:
        """Tokens in common."""
        return round(self.tokens * self.overlap)

    @property
    def steps(self) -> int:
        """How many steps a whole prefill has."""
        return -(-self.tokens // self.quantum)

    def __str__(self) -> str:
        return f"{self.tokens}/{self.quantum}, step {self.step} at {self.share:.0%}, {self.overlap:.0%} kept"

    def as_json(self) -> dict[str, Any]:
        """Coordinates of a cell."""
        return {
            "bench": "composition",
            "tokens": self.tokens,
            "quantum": self.quantum,
            "step": self.step,
            "share": self.share,
            "overlap": self.overlap,
        }


FULL = Revision(8000, 4096, 2, 0.40, 0.90)
QUICK_FULL = Revision(2048, 1024, 2, 0.40, 0.90)
GRID = tuple(
    Revision(2048, 512, step, share, overlap) for step in (1, 2, 4) for share in SHARES for overlap in OVERLAPS
)
QUICK_GRID = tuple(Revision(2048, 1024, 2, share, overlap) for share in (0.40, 0.95) for overlap in (0.0, 0.50, 1.0))


@dataclass(frozen=True)
class Arm:
    """What one arm of one trial gave.  `receipt`: `choice` and `layer` of the step that was interrupted, of ours."""

    ttft_ms: float
    reused_tokens: int | None
    receipt: Mapping[str, Any] | None = None

    @property
    def metrics(self) -> dict[str, Any]:
        """Values of a cell."""
        return {"ttft_ms": self.ttft_ms, "reused_tokens": self.reused_tokens, **(self.receipt or {})}


Trial = Mapping[str, Arm]


def _trial(told: Mapping[str, Mapping[str, Any]]) -> Trial:
    """From what a ledger keeps."""
    return {arm: Arm(**one) for arm, one in told.items()}


@dataclass(frozen=True)
class _Answered:
    """An arm whose successor has answered.  `record`: of its transition."""

    ttft_ms: float
    reply: Reply
    record: Mapping[str, Any] | None

    @property
    def arm(self) -> Arm:
        """What is kept of it."""
        receipt = None
        if self.record is not None:
            first: Mapping[str, Any] = next(iter(self.record["receipts"]), {})
            receipt = {"choice": first.get("choice"), "layer": first.get("layer")}
        return Arm(self.ttft_ms, self.reply.cached_tokens, receipt)


@dataclass(frozen=True)
class Composition:
    """`pairs`: of the full cell.  `screen`: of every cell of the grid.  `judge`: fresh ones of those in doubt."""

    model: str = "smollm2"
    pairs: int = 5
    screen: int = 3
    judge: int = 12
    name: str = field(default="composition", init=False)
    paper: str = field(default="Table 5", init=False)
    own_servers: str = field(default="several servers take turns, and one of them stops no step", init=False)

    def run(self, ledger: Ledger, *, quick: bool) -> Result:
        """See the module."""
        full, grid = (QUICK_FULL, _Grid(QUICK_GRID)) if quick else (FULL, _Grid(GRID))
        screen, judge = (1, 0) if quick else (self.screen, self.judge)
        pairs = 1 if quick else self.pairs
        ledger.plan({str(full): pairs}, len(ARMS) * full.tokens)
        ledger.plan({"kept pages": 1}, 2 * full.tokens)
        grid.plan(ledger, grid.revisions, screen)

        def whole() -> dict[str, Any]:
            with _serving(self.model, full, ledger.checks, unarmed=True) as served:
                bench = _Bench(ledger, served, full)
                trials = [trial for _ in range(pairs) if (trial := bench.trial(full, ARMS))]
                pages = bench.kept_pages(full)
                if quick:  # the same steps, the same servers
                    grid.measure(bench, screen, judge)
            return {"trials": trials, "pages": pages, "grid": grid.as_json(), "seal": served[0][1].seal}

        def cells() -> dict[str, Any]:
            with _serving(self.model, grid.revisions[0], ledger.checks, unarmed=False) as served:
                grid.measure(_Bench(ledger, served, grid.revisions[0]), screen, judge)
            return grid.as_json()

        found = ledger.start("full", whole)
        grid.take(found["grid"] if quick else ledger.start("grid", cells))
        trials = [_trial(one) for one in found["trials"]]
        return self._result(found["seal"], ledger.checks, full, trials, grid, found["pages"])

    def _result(
        self,
        seal: Mapping[str, str],
        checks: Mapping[str, bool],
        full: Revision,
        wholes: Sequence[Trial],
        grid: _Grid,
        pages: Mapping[str, Any],
    ) -> Result:
        summary: dict[str, Any] = {}
        targets = []
        for arm in ARMS[1:]:
            key = f"reduction_vs_native_cold.{arm.removeprefix('native_')}"
            found = _reduction(wholes, arm)
            summary |= figures(key, found)
            if arm == "trim":
                verdict = Verdict.NOT_REACHED if found is None else at_least(found.interval(), TRIM_AIM)
                targets.append(Target(key, f"{PAPER['combined']} combined", f"≥ {TRIM_AIM}", verdict))
        summary["reduction_in_the_paper"] = PAPER
        summary |= {"pairs": len(wholes), "kept_pages": dict(pages)} | grid.summary()
        failing = summary["grid_cells_failing"]
        unmeasured = summary["grid_cells"] - summary["grid_cells_counted"]
        targets.append(Target("grid_cells_failing", "-", "0", whether(failing == unmeasured == 0)))
        return Result([_cell(full, wholes), *grid.cells()], summary, checks, targets, model=self.model, seal=seal)


def _serving(
    model: str, revision: Revision, checks: dict[str, bool], *, unarmed: bool
) -> AbstractContextManager[list[tuple[Server, Session]]]:
    """Servers that are alike, and with `unarmed` a last one that stops no step."""
    flags = (
        *("--max-num-batched-tokens", str(revision.quantum)),
        *("--kv-cache-memory-bytes", str(1 << 30)),
        *("--worker-extension-cls", EXTENSION),
    )
    alike = {**DEVELOPMENT, POLICY_ENV: Policy.SELECTIVE}  # whatever is exported here
    envs = [alike] * SERVERS + [{**alike, ARM_ENV: "1000000"}] * unarmed
    return serving_side_by_side(model, flags, [{"env": env} for env in envs], checks)


class _Side:
    """One of the servers that take turns."""

    def __init__(self, session: Session, clock: Clock, lengths_s: list[float]) -> None:
        self.session = session
        self.moments = Moments(session.url, clock, lengths_s)

    def calibrate(self, ids: list[int], steps: int) -> None:
        """Learn how long the steps of such a prefill take."""
        self.moments.calibrate(lambda: self.session.stream(ids, 1, fresh_salt()), steps)

    def interrupt(self, arm: str, revision: Revision, old: list[int], new: list[int]) -> _Interrupted | None:
        """Until the successor's first token has come; None when the moment was missed."""
        session, salt, scope, location = self.session, fresh_salt(), fresh_scope(), None
        native = arm.startswith("native")
        mine = {} if native else {"X-Retire-Scope": scope}
        predecessor = session.stream(old, PREDECESSOR_TOKENS, salt, mine)
        try:
            moment = self.moments.wait(predecessor, revision.step, revision.share)
        except MomentMissed:
            predecessor.hang_up()
            return None
        if native:
            predecessor.hang_up()
        elif arm == "combined":
            body = {"scope": scope, "expected_epoch": 1}
            answer = http.post(f"{session.url}/supersede", json=body, timeout=TIMEOUT_S).raise_for_status()
            location = answer.headers["location"]
        else:
            mine |= {"X-Retire-Supersedes": "1"}
            if arm == "invalidate":
                mine |= {"X-Retire-Contract": '{"inherit": "none"}'}
        new_salt = fresh_salt() if arm == "native_cold" else salt
        successor = session.stream(new, ANSWER_TOKENS, new_salt, mine, ALTERNATIVES)
        successor.wait_for_tokens(1)
        return _Interrupted(arm, location, moment, predecessor, successor)

    def finish(self, one: _Interrupted, first_token_s: float) -> _Answered | None:
        """What the arm gave, when all servers go on; None when its moment lay outside the step."""
        one.predecessor.hang_up()
        one.predecessor.wait()
        reply, hit = one.successor.wait(), one.moment.hit()
        native, record = one.arm.startswith("native"), None
        if native or not hit:  # a step that was over before the moment has cost a try, and the next one is to be better
            self.moments.learn(one.moment)
        if not native:
            record = record_of(self.session.url, one.location or reply.headers["location"])
        self.session.check("successors_are_answered", reply.status == 200)
        return _Answered((first_token_s - one.moment.at) * 1000, reply, record) if hit else None


@dataclass(frozen=True)
class _Interrupted:
    """An arm whose successor has begun to answer.  `location`: of the transition's record, if told before that."""

    arm: str
    location: str | None
    moment: Moment
    predecessor: Streaming
    successor: Streaming


class _Bench:
    """Trials on servers whose prefills all have the same steps."""

    def __init__(self, ledger: Ledger, served: Sequence[tuple[Server, Session]], revision: Revision) -> None:
        self.ledger = ledger
        names = [f"server {number}" for number in range(len(served))]
        self._turns = Turns(dict(zip(names, (server for server, _ in served), strict=True)))
        lengths_s: list[float] = []
        self._sides = {
            name: _Side(session, self._turns.clock(name), lengths_s)
            for name, (_, session) in zip(names, served, strict=True)
        }
        self._session = served[0][1]
        self._trial = 0
        for seed in (1, 2):  # the first one warms up
            ids = passage(self._session.url, self._session.model, revision.tokens, seed)
            self._turns.run({name: partial(side.calibrate, ids, revision.steps) for name, side in self._sides.items()})

    def trial(self, revision: Revision, arms: Sequence[str]) -> Trial | None:
        """The arms on one text, as many at a time as there are servers; None when something was wrong with it."""
        self._trial += 1
        key = Key(str(revision), arms, self._trial, seed=10 + self._trial)
        told = self.ledger.trial(key, partial(self._measured, revision, arms, self._trial))
        return None if told is None else _trial(told)

    def _measured(self, revision: Revision, arms: Sequence[str], number: int) -> Trial | None:
        old, new = self._prompts(revision, number)
        found: dict[str, _Answered] = {}
        for first in range(0, len(arms), SERVERS):
            measured = self._hit(revision, arms[first : first + SERVERS], old, new, number)
            if measured is None:
                self._session.check("moments_are_hit", False)
                return None
            found |= measured
        told = ", ".join(f"{arm} {found[arm].ttft_ms:.0f}" for arm in ARMS if arm in found)
        note(f"  step {revision.step} at {revision.share:.0%}, {revision.overlap:.0%} kept: {told}")
        return {arm: one.arm for arm, one in found.items()} if self._counts(revision, found) else None

    def _hit(
        self, revision: Revision, arms: Sequence[str], old: list[int], new: list[int], number: int
    ) -> Mapping[str, _Answered] | None:
        """These arms together, tried until every moment lay in its step; None when that never was so."""
        return next((done for _ in range(TRIES) if (done := self._together(revision, arms, old, new, number))), None)

    def _together(
        self, revision: Revision, arms: Sequence[str], old: list[int], new: list[int], number: int
    ) -> Mapping[str, _Answered] | None:
        """These arms in turns, each on a server of its own, another one every time; None when a moment was missed."""
        *names, last = self._sides
        alike = [*names, last][:SERVERS]
        shift = number % SERVERS
        placed = dict(zip(alike[shift:] + alike[:shift], (arm for arm in arms if arm != "inherit"), strict=False))
        if "inherit" in arms:
            placed[last] = "inherit"
        work = {name: partial(self._sides[name].interrupt, arm, revision, old, new) for name, arm in placed.items()}
        done = {name: one for name, one in self._turns.run(work).items() if one is not None}
        first_s = {name: self._turns.worked_s(name, one.successor.reply.first_token_at) for name, one in done.items()}
        found = {one.arm: self._sides[name].finish(one, first_s[name]) for name, one in done.items()}
        hit = {arm: one for arm, one in found.items() if one is not None}
        return hit if len(hit) == len(arms) else None

    def kept_pages(self, revision: Revision) -> dict[str, Any]:
        """Pages that a trimmed step has written, against those of the same step that nobody interrupted.

        The back end's results depend on how many rows a step has.  The yardstick is the same prompt cut by vLLM itself:
        its step of just the kept rows against the whole one.  Trimming must not differ by more than twice that.
        """
        compared: dict[str, Any] = self.ledger.trial(
            Key("kept pages", ("trim",), 0, seed=10), partial(self._compared_pages, revision)
        )
        return compared

    def _compared_pages(self, revision: Revision) -> dict[str, Any]:
        old, new = self._prompts(revision, 0)
        found = self._hit(revision, ("trim",), old, new, number=0)  # the one arm is on the first server
        record = found["trim"].record if found else None
        if not self._session.check("kept_pages_are_compared", bool(record and record["adopted_blocks"])):
            return {}
        assert record is not None
        adopted = record["adopted_blocks"][0]
        kept = slice((revision.step - 1) * revision.quantum // BLOCK, len(adopted))  # what the trimmed step wrote
        pages = {"trimmed": adopted[kept]}
        with ExitStack() as running:
            for name, ids in (("whole", old), ("shorter", old[: len(adopted) * BLOCK + 1])):
                pages[name] = self._blocks_of(running, ids)[kept]
            compared = {
                name: self._session.ask_worker("compare_pages", blocks=pages[name], others=pages["whole"])
                for name in ("trimmed", "shorter")
            }
        within = compared["trimmed"]["largest"] <= 2 * compared["shorter"]["largest"]
        self._session.check("kept_pages_are_within_the_bound", within)
        choices = [receipt["choice"] for receipt in record["receipts"]]
        return {**compared, "pages": len(adopted[kept]), "choices": choices}

    def _blocks_of(self, running: ExitStack, ids: list[int]) -> list[int]:
        """The blocks of a prompt that nobody interrupts, while it answers."""
        before = self._session.ask_worker("requests_blocks")
        stream = self._session.stream(ids, PREDECESSOR_TOKENS, fresh_salt())
        running.callback(stream.wait)
        running.callback(stream.hang_up)
        stream.wait_for_tokens(1)
        after = self._session.ask_worker("requests_blocks")
        (blocks,) = (found for name, found in after.items() if name not in before)
        return list(blocks)

    def _prompts(self, revision: Revision, number: int) -> tuple[list[int], list[int]]:
        url, model, seed = self._session.url, self._session.model, 10 + number
        if revision.shared_tokens == revision.tokens:
            return (whole := passage(url, model, revision.tokens, seed)), whole
        return diverging(url, model, revision.shared_tokens, revision.tokens - revision.shared_tokens, seed)

    def _counts(self, revision: Revision, trial: Mapping[str, _Answered]) -> bool:
        whole = all(len(one.reply.token_ids) == ANSWER_TOKENS for one in trial.values())
        counts = self._session.check("every_answer_is_whole", whole)
        reference = trial.get("native_cold") or trial["native_prefix"]
        for arm, one in trial.items():
            counts &= self._session.check(f"{arm}_says_the_same", says_the_same(reference.reply, one.reply))
            if one.record is not None:
                reused, certified = one.reply.cached_tokens or 0, one.record["inherited_tokens"]
                honest = certified <= reused <= revision.shared_tokens and (arm != "invalidate" or reused == 0)
                counts &= self._session.check(f"{arm}_reuses_what_it_may", honest)
        return counts


def _reduction(trials: Sequence[Trial], arm: str) -> Bootstrap | None:
    pairs = [(one["native_cold"].ttft_ms - one[arm].ttft_ms, one["native_cold"].ttft_ms) for one in trials]
    return Bootstrap(median_of_ratios, pairs) if pairs else None


def _cell(revision: Revision, trials: Sequence[Trial]) -> Cell:
    return Cell(revision.as_json(), columns({arm: one.metrics for arm, one in trial.items()} for trial in trials))


class _Grid:
    """Ours against the better native arm, cell by cell."""

    def __init__(self, revisions: Sequence[Revision]) -> None:
        self._screened: dict[Revision, list[Trial]] = {one: [] for one in revisions}
        self._judged: dict[Revision, list[Trial]] = {}

    @property
    def revisions(self) -> list[Revision]:
        """Its cells."""
        return list(self._screened)

    def measure(self, bench: _Bench, screen: int, judge: int) -> None:
        """Every cell so many times, round by round; then, where ours was not the faster one, so many fresh pairs."""
        for number in range(screen):
            for revision in self._screened:
                self._measure(bench, self._screened, revision, number)
        doubtful = [
            revision
            for revision, trials in self._screened.items()
            if trials and statistics.median(above / below for above, below in _against_native(trials)) >= 1
        ]
        self._judged = {revision: [] for revision in doubtful} if judge else {}
        note(f"  {len(self._judged)} of {len(self._screened)} cells are measured again")
        self.plan(bench.ledger, self._judged, judge)
        for number in range(judge):
            for revision in self._judged:
                self._measure(bench, self._judged, revision, number)

    @staticmethod
    def plan(ledger: Ledger, revisions: Iterable[Revision], trials: int) -> None:
        """So many of each will come."""
        for one in revisions:
            ledger.plan({str(one): trials}, 2 * one.tokens)

    @staticmethod
    def _measure(bench: _Bench, into: dict[Revision, list[Trial]], revision: Revision, number: int) -> None:
        arms = ["native_prefix", "trim"]
        if revision.overlap <= 0.25 or number == 0:
            arms.append("native_cold")
        found = bench.trial(revision, arms)
        if found is not None:
            into[revision].append(found)

    def as_json(self) -> dict[str, Any]:
        """What a ledger keeps: the trials of each cell, in the order of the cells."""
        return {
            "screened": list(self._screened.values()),
            "judged": [self._judged.get(revision) for revision in self._screened],
        }

    def take(self, told: Mapping[str, Any]) -> None:
        """What was measured, from that."""
        for revision, screened, judged in zip(self.revisions, told["screened"], told["judged"], strict=True):
            self._screened[revision] = [_trial(one) for one in screened]
            if judged is not None:
                self._judged[revision] = [_trial(one) for one in judged]

    def _trials(self, revision: Revision) -> Sequence[Trial]:
        return self._judged.get(revision) or self._screened[revision]

    def summary(self) -> dict[str, Any]:
        """The grid's entries of the summary."""
        ratios = {
            one: Bootstrap(median_of_ratios, pairs)
            for one in self._screened
            if (pairs := _against_native(self._trials(one)))
        }
        p_holm = holm({one: ratio.p_not_above(NATIVE_AIM) for one, ratio in ratios.items()})
        failing = [one for one, p in p_holm.items() if p <= ALPHA]
        worst = max(ratios, key=lambda one: ratios[one].value, default=None)
        return {
            "grid_cells": len(self._screened),
            "grid_cells_counted": len(ratios),
            "grid_cells_failing": len(failing),
            "grid_cells_judged_again": len(self._judged),
            "grid_cells_above_1_02": sum(ratio.value > NATIVE_AIM for ratio in ratios.values()),
            "failing_cells": [one.as_json() for one in failing],
            "worst_ratio_vs_best_native": None if worst is None else ratios[worst].value,
            "worst_cell": None if worst is None else worst.as_json(),
            "median_ratio_vs_best_native": statistics.median(one.value for one in ratios.values()) if ratios else None,
            "ratios": [
                {
                    "step": one.step,
                    "share": one.share,
                    "overlap": one.overlap,
                    **figures("ratio", ratio),
                    "pairs": len(self._trials(one)),
                    "p_holm_above_1_02": p_holm[one],
                }
                for one, ratio in ratios.items()
            ],
        }

    def cells(self) -> list[Cell]:
        """Everything measured; first rounds and fresh pairs of one revision stand apart."""
        found = [_cell(revision, trials) for revision, trials in self._screened.items()]
        return found + [_cell(revision, trials) for revision, trials in self._judged.items()]


def _against_native(trials: Sequence[Trial]) -> list[tuple[float, float]]:
    """Pairs of ours and that native arm which is faster in this cell."""
    medians = {
        arm: statistics.median(one[arm].ttft_ms for one in trials if arm in one)
        for arm in ("native_cold", "native_prefix")
        if any(arm in one for one in trials)
    }
    best = min(medians, key=lambda arm: medians[arm], default="")
    if not all(best in one for one in trials):
        best = "native_prefix"
    return [(one["trim"].ttft_ms, one[best].ttft_ms) for one in trials]
