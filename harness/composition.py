"""`retire bench composition`: fast invalidation and inheritance on one critical path, and trimming beyond both.

Stands beside Table 5 (an 8192-token prompt, quantum 4096, 90 % overlap, a revision inside the second quantum: 17.1 %
off native abort and cold restart with both mechanisms together).

A predecessor's prefill is interrupted at a share of one of its steps by a successor of the same length that has its
first tokens in common with it.  TTFT is measured at the client, from the decision to the successor's first token.

- `native_cold`: the client hangs up and sends the successor, in a cache that holds nothing of it.
- `native_prefix`: the same in the predecessor's cache; vLLM reuses what it finds there.
- `invalidate`: supersede with `inherit: none`; the step stops, nothing is reused.
- `inherit`: supersede with everything promised (`keep_prefix`), so that the step runs to its end; then a certificate.
- `combined`: POST /supersede, then the successor as a request of its own.  Nobody has told what is still of use when
  the step is fenced, so it stops at once, and what earlier steps completed is inherited.  The paper's policy.
- `trim`: supersede in the successor's header; what it shares of the running step is finished, the rest is cut out.

The full cell has all arms; the grid has `trim` against the better native arm at every moment and overlap: the question
is whether there is a revision for which an ordinary prefix cache is the better answer.

What could be unfair, and which way:

- The moment is an offset from the step's begin, the same for all arms of a pair; arms whose moment fell outside its
  step are measured again.
- Native arms do not wait until the server has noticed the hang-up, and carry no gate, ticket or usage.  For native.
- An abandoned native stream ends by the client's own doing; no stale frame is waited for.  For native.
- Every arm asks for the same tokens and log-probabilities, in caches of its own; the order rotates.
- In the grid `native_cold` is measured in every pair where at most a quarter is shared, once elsewhere: it computes all
  that `native_prefix` computes and more.
- All cells of the grid are measured a few times; where the median is not below 1, again, and only these fresh pairs are
  judged (Holm over the whole grid).
- How a prompt is cut into steps changes the last bits of its KV, so arms may part where two tokens are nearly as
  likely (`harness.client.says_the_same`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.client import TIMEOUT_S, Reply, http, says_the_same
from harness.experiment import Cell, Result, Target, figures
from harness.faults import EXTENSION
from harness.moments import MomentMissed, Moments
from harness.session import DEVELOPMENT, Session, note, serving
from harness.statistics import Bootstrap, Verdict, at_least, holm, median_of_ratios
from harness.workload import diverging, fresh_salt, fresh_scope, passage, record_of

ARMS = ("native_cold", "native_prefix", "invalidate", "inherit", "combined", "trim")
PAPER = {"invalidate": 0.056, "inherit": 0.103, "combined": 0.171}
ANSWER_TOKENS, ALTERNATIVES = 4, 5
TRIES = 4
BLOCK, PAGES_BOUND = 128, 0.0
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
QUICK_FULL = Revision(4000, 2048, 2, 0.40, 0.90)
GRID = tuple(
    Revision(2048, 512, step, share, overlap) for step in (1, 2, 4) for share in SHARES for overlap in OVERLAPS
)
QUICK_GRID = tuple(Revision(2048, 512, 2, share, overlap) for share in (0.40, 0.95) for overlap in (0.0, 0.50, 1.0))


@dataclass
class Arm:
    """What one arm of one trial gave.  `record`: of its transition."""

    ttft_ms: float
    reply: Reply
    record: Mapping[str, Any] | None

    @property
    def metrics(self) -> dict[str, Any]:
        """Values of a cell."""
        found: dict[str, Any] = {"ttft_ms": self.ttft_ms, "reused_tokens": self.reply.cached_tokens}
        if self.record is not None:
            receipt: Mapping[str, Any] = next(iter(self.record["receipts"]), {})
            found |= {"fence_ms": self.record["stages"].get("fence"), "choice": receipt.get("choice")}
        return found


Trial = Mapping[str, Arm]


@dataclass(frozen=True)
class Composition:
    """`pairs`: of the full cell.  `screen`: of every cell of the grid.  `judge`: fresh ones of those in doubt."""

    model: str = "smollm2"
    pairs: int = 5
    screen: int = 3
    judge: int = 12
    name: str = field(default="composition", init=False)
    paper: str = field(default="Table 5", init=False)

    def run(self, *, quick: bool) -> Result:
        """See the module."""
        full, grid = (QUICK_FULL, QUICK_GRID) if quick else (FULL, GRID)
        checks: dict[str, bool] = {}
        with _serving(self.model, full) as session:
            bench = _Bench(session, full)
            wholes = [found for found in bench.trials(full, 1 if quick else self.pairs, ARMS) if found]
            pages = bench.kept_pages(full)
            _join(checks, session.checks)
        with _serving(self.model, grid[0]) as session:
            bench = _Bench(session, grid[0])
            found = _Grid(bench, grid)
            found.screen(1 if quick else self.screen)
            found.judge(0 if quick else self.judge)
            _join(checks, session.checks)
        return self._result(session, checks, full, wholes, found, pages)

    def _result(
        self,
        session: Session,
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
        targets.append(
            Target(
                "grid_cells_failing", "-", "0", Verdict.REACHED if failing == unmeasured == 0 else Verdict.NOT_REACHED
            )
        )
        return Result(
            [_cell(full, wholes), *grid.cells()], summary, checks, targets, model=self.model, seal=session.seal
        )


def _join(checks: dict[str, bool], more: Mapping[str, bool]) -> None:
    for name, holds in more.items():
        checks[name] = checks.get(name, True) and holds


def _serving(model: str, revision: Revision) -> Any:
    flags = (
        *("--max-num-batched-tokens", str(revision.quantum)),
        *("--kv-cache-memory-bytes", str(1 << 30)),
        *("--worker-extension-cls", EXTENSION),
    )
    return serving(model, flags, DEVELOPMENT)


class _Bench:
    """Trials on one server, whose prefills all have the same steps."""

    def __init__(self, session: Session, revision: Revision) -> None:
        self._session = session
        self._moments = Moments(session.url)
        self._seed = 0
        for _ in range(2):  # the first one warms up
            ids = passage(session.url, session.model, revision.tokens, self._next_seed())
            self._moments.calibrate(session.stream(ids, 1, fresh_salt()), revision.steps)

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed

    def trials(self, revision: Revision, count: int, arms: Sequence[str]) -> Iterator[Trial | None]:
        """So many trials; None for one that does not count."""
        for number in range(count):
            turn = number % len(arms)
            yield self.trial(revision, (*arms[turn:], *arms[:turn]))

    def trial(self, revision: Revision, order: Sequence[str]) -> Trial | None:
        """The arms on one text, in that order; None when something was wrong with it."""
        old, new = self._prompts(revision)
        offset_s = self._moments.offset_s(revision.step, revision.share)
        found = {}
        for arm in order:
            measured = self._arm(arm, revision, old, new, offset_s)
            if measured is None:
                return None
            found[arm] = measured
        told = ", ".join(f"{arm} {found[arm].ttft_ms:.0f}" for arm in ARMS if arm in found)
        note(f"  step {revision.step} at {revision.share:.0%}, {revision.overlap:.0%} kept: {told}")
        return found if self._counts(revision, found) else None

    def kept_pages(self, revision: Revision) -> dict[str, Any]:
        """Pages that a trimmed step has written beside those of the same step that nobody interrupted."""
        session, (old, new) = self._session, self._prompts(revision)
        found = self._arm("trim", revision, old, new, self._moments.offset_s(revision.step, revision.share))
        if found is None or found.record is None or not found.record["adopted_blocks"]:
            session.check("kept_pages_are_compared", False)
            return {}
        whole = session.stream(old, 1000, fresh_salt())
        whole.wait_for_tokens(1)
        (blocks,) = session.ask_worker("requests_blocks").values()
        adopted = found.record["adopted_blocks"][0]
        kept = range((revision.step - 1) * revision.quantum // BLOCK, len(adopted))  # what the trimmed step wrote
        told = session.ask_worker(
            "compare_pages", blocks=[adopted[one] for one in kept], others=[blocks[one] for one in kept]
        )
        whole.hang_up()
        whole.wait()
        session.check("kept_pages_are_compared", len(kept) > 0)
        session.check("kept_pages_are_within_the_bound", told["largest"] <= PAGES_BOUND)
        choices = [receipt["choice"] for receipt in found.record["receipts"]]
        return {**told, "bound": PAGES_BOUND, "pages": len(kept), "choices": choices}

    def _prompts(self, revision: Revision) -> tuple[list[int], list[int]]:
        url, model, seed = self._session.url, self._session.model, self._next_seed()
        if revision.shared_tokens == revision.tokens:
            return (whole := passage(url, model, revision.tokens, seed)), whole
        return diverging(url, model, revision.shared_tokens, revision.tokens - revision.shared_tokens, seed)

    def _arm(self, arm: str, revision: Revision, old: list[int], new: list[int], offset_s: float) -> Arm | None:
        for _ in range(TRIES):
            try:
                found = self._try(arm, revision, old, new, offset_s)
            except MomentMissed:
                continue
            if found is not None:
                return found
        self._session.check("moments_are_hit", False)
        return None

    def _try(self, arm: str, revision: Revision, old: list[int], new: list[int], offset_s: float) -> Arm | None:
        session, salt, scope = self._session, fresh_salt(), fresh_scope()
        native = arm.startswith("native")
        mine = {} if native else {"X-Retire-Scope": scope}
        predecessor = session.stream(old, 256, salt, mine)
        moment = None
        try:
            moment = self._moments.wait(predecessor, revision.step, offset_s)
            decided = time.monotonic()
            if native:
                predecessor.hang_up()
            elif arm == "combined":
                body = {"scope": scope, "expected_epoch": 1}
                http.post(f"{session.url}/supersede", json=body, timeout=TIMEOUT_S).raise_for_status()
            else:
                mine = mine | {"X-Retire-Supersedes": "1", **_contract(arm, revision)}
            successor = session.stream(
                new, ANSWER_TOKENS, fresh_salt() if arm == "native_cold" else salt, mine, ALTERNATIVES
            )
            reply = successor.wait()
        finally:
            predecessor.hang_up()
            predecessor.wait()
            hit = moment is not None and moment.hit()
        if native and hit and moment is not None:
            self._moments.learn(moment)
        record = None
        if not native:
            record = record_of(session.url, self._location(scope, reply))
        if not hit or reply.status != 200:
            session.check("successors_are_answered", reply.status == 200)
            return None
        return Arm((reply.first_token_at - decided) * 1000, reply, record)

    def _location(self, scope: str, reply: Reply) -> str:
        if "location" in reply.headers:
            return reply.headers["location"]
        found = http.get(f"{self._session.url}/scopes/{scope}", timeout=TIMEOUT_S).raise_for_status().json()
        return f"/transitions/{found['transition']}"

    def _counts(self, revision: Revision, trial: Trial) -> bool:
        session = self._session
        counts = session.check(
            "every_answer_is_whole", all(len(one.reply.token_ids) == ANSWER_TOKENS for one in trial.values())
        )
        reference = trial.get("native_cold") or trial["native_prefix"]
        for arm, one in trial.items():
            counts &= session.check(f"{arm}_says_the_same", says_the_same(reference.reply, one.reply))
        for arm in ("inherit", "trim", "combined"):
            if arm in trial and (record := trial[arm].record) is not None:
                told = trial[arm].reply.cached_tokens == record["inherited_tokens"] <= revision.shared_tokens
                counts &= session.check(f"{arm}_inherits_what_it_says", told)
        return counts


def _contract(arm: str, revision: Revision) -> dict[str, str]:
    if arm == "invalidate":
        return {"X-Retire-Contract": '{"inherit": "none"}'}
    if arm == "inherit":
        return {"X-Retire-Contract": f'{{"keep_prefix": {revision.tokens}}}'}
    return {}


def _reduction(trials: Sequence[Trial], arm: str) -> Bootstrap | None:
    pairs = [(one["native_cold"].ttft_ms - one[arm].ttft_ms, one["native_cold"].ttft_ms) for one in trials]
    return Bootstrap(median_of_ratios, pairs) if pairs else None


def _cell(revision: Revision, trials: Sequence[Trial]) -> Cell:
    arms: dict[str, dict[str, list[Any]]] = {}
    for trial in trials:
        for arm, one in trial.items():
            for metric, value in one.metrics.items():
                arms.setdefault(arm, {}).setdefault(metric, []).append(value)
    return Cell(revision.as_json(), arms)


class _Grid:
    """Ours against the better native arm, cell by cell."""

    def __init__(self, bench: _Bench, revisions: Sequence[Revision]) -> None:
        self._bench = bench
        self._screened: dict[Revision, list[Trial]] = {one: [] for one in revisions}
        self._judged: dict[Revision, list[Trial]] = {}

    def screen(self, pairs: int) -> None:
        """Every cell, round by round."""
        for number in range(pairs):
            for revision in self._screened:
                self._measure(self._screened, revision, number)

    def judge(self, pairs: int) -> None:
        """Fresh pairs where ours was not the faster one."""
        doubtful = [
            revision
            for revision, trials in self._screened.items()
            if trials and statistics.median(above / below for above, below in _against_native(trials)) >= 1
        ]
        self._judged = {revision: [] for revision in doubtful} if pairs else {}
        note(f"  {len(doubtful)} of {len(self._screened)} cells are measured again")
        for number in range(pairs):
            for revision in self._judged:
                self._measure(self._judged, revision, number)

    def _measure(self, into: dict[Revision, list[Trial]], revision: Revision, number: int) -> None:
        order = ["native_prefix", "trim"] if number % 2 else ["trim", "native_prefix"]
        if revision.overlap <= 0.25 or number == 0:
            order.insert(number % 3, "native_cold")
        found = self._bench.trial(revision, order)
        if found is not None:
            into[revision].append(found)

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
