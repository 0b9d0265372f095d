"""`retire bench burst`: recorded bursts of revisions, replayed.

Stands beside Figure 6 and Table 9: 24 transitions in 120 seconds, three scopes, three bursts of eight; prompts of 8192
tokens that share nothing.  Whoever gives recorded rows (`--trace FILE`) sees those at their human pace as well.

The window is the paper's, on this machine's scale.  One number sets the scale: how often a native prefill of the prompt
fits into the window.  There it is 120 s over 0.405 s, the TTFT of the final versions (7.4), and the cleanup limit is
180 s over the same; here both are kept over the prefill measured at the start, so a burst is as many prefills wide as
there.  Other squeezes than 1 are other scales: at 4, revisions come four times as fast, in prefills.  Quanta keep the
paper's share of a prompt: an eighth, a half, the whole.  A quick run has a scale of its own, shorter answers that are a
larger share of its window, and no recorded rows.

Arms, on one server per quantum, in an order that rotates and is turned round in every other trial:

- `native_Q`: vLLM's requests without a scope; the runtime hangs up and sends the new request.
- `selective_Q`: the new request supersedes.
- `always_Q`: the same, every step armed.
- `abandon_Q`: nobody ends the old request.  The paper's native figures (22 obsolete executions at once, a cleanup that
  is not over after 180 s) are those of old work that runs on; here it is shown beside and is not the baseline.

The best native quantum is the one with the highest goodput of that scale, and `goodput_ratio` is that of the best
selective quantum over it.  `scale` says of which scale such figures are: the paper's, or the nearest that was measured;
`retire_obsolete_tokens` and `runs_repeated` are of all scales.  What counts as current, obsolete and final is said in
`harness.outcomes`; a final version is the last of its scope in a burst.

What could be unfair, and which way:

- Native's engine is asked between two steps whether it has let go, and answers over HTTP; what an idle one takes is
  taken off.  A request that waited and was in no step counts as live until then, in all arms.
- When RETIRE has let go comes from its records, as time after ADVANCE, and is added to when the client had read the
  acceptance, which comes later.  Against us by what a response's first bytes take; never less than when the client
  saw the old stream end.
- A frame counts when it was taken, by a client that shares two cores with the engine: what came before the acceptance
  and was taken after it counts as obsolete, in all arms.  Nobody holds anything back; RETIRE's own client would.
- What was let out late and taken before the acceptance was read would count as late, not as obsolete.  So a check
  compares, for every superseded version, what came with what its successor's record states as published.
- The native arms run on patched servers.  What that costs unscoped requests is `retire bench overhead`'s to say.
- All arms have prefix caching, and nothing in common to find there.
- Intervals of safe points are those of the very step that was stopped.  Steps too short to be armed have none and are
  left out of `cleanup_p99_intervals`; `cleanup_ms` has them all.
- Rows of different scopes are in one step here as there, so a step with somebody else's rows goes on without the
  obsolete ones.
- A run in which an act was a quarter of a second late or more is repeated, at most three times; `runs_repeated` says
  how often.  The client shares the cores with the engine, so an arm that keeps them busier is repeated more often.
- Chosen for the best of their scale, quanta of both sides are favoured by chance alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from harness.arrivals import Pace, Plan, Sizes, plan
from harness.client import Reply, difference
from harness.experiment import Cell, Result, Target, columns, figures
from harness.ledger import Key, Ledger
from harness.outcomes import Version
from harness.progress import note
from harness.replay import Arm, Figures, Replay, Replayed, Site, goodput, in_turn, on_time, prompts, repeated, summary
from harness.session import Session, serving_side_by_side
from harness.statistics import Bootstrap, at_least, ratio_of_medians, whether
from harness.workload import fresh_salt, passage, prefill_s
from retire.core.errors import RetireError
from retire.core.quantum import Policy
from retire.settings import POLICY_ENV
from traces import rows
from traces.generate import WINDOW_PROMPT_TOKENS, paper_window
from traces.rows import Transition
from traces.statistics import WINDOW_S

PROMPT_TOKENS = 512
ANSWER_TOKENS = 720  # 54 token/s for 120 s over nine final versions
QUICK_ANSWER_TOKENS = 160
QUANTA = (PROMPT_TOKENS // 8, PROMPT_TOKENS // 2, PROMPT_TOKENS)
ALWAYS = QUANTA[1]  # of the server that arms every step
PAPER_PREFILL_S, PAPER_LIMIT_S, PAPER_BURST_S = 0.405, 180.0, 1.5
GOODPUT_AIM, INTERVALS_AIM = 5.5, 1.25
QUICK_SQUEEZE = 6.0
ALTERNATIVES = 5
RECORDED_S = 120.0  # how long recorded transitions may take here
BLOCK = 32


@dataclass(frozen=True)
class Scale:
    """A replay that every arm goes through.

    `squeeze`: how much faster than the paper's, measured in prefills; None for recorded transitions.
    """

    name: str
    plan: Plan
    window_s: float
    limit_s: float
    squeeze: float | None = None

    def ratios(self, prefill: float) -> dict[str, float]:
        """The window, a burst and the cleanup limit over a native prefill."""
        burst_s = {} if self.squeeze is None else {"burst_over_prefill": PAPER_BURST_S / PAPER_PREFILL_S / self.squeeze}
        return {"window_over_prefill": self.window_s / prefill, "limit_over_prefill": self.limit_s / prefill, **burst_s}


def scaled(prefill: float, squeeze: float, answer_tokens: int = ANSWER_TOKENS, seed: int = 1) -> Scale:
    """The paper's window where a native prefill takes `prefill` seconds."""
    factor = prefill / PAPER_PREFILL_S / squeeze
    sizes = Sizes(scale=PROMPT_TOKENS / WINDOW_PROMPT_TOKENS, answer_tokens=answer_tokens)
    made = plan(paper_window(seed), sizes, speed=1 / factor)
    return Scale(f"squeeze_{squeeze:g}", made, WINDOW_S * factor, PAPER_LIMIT_S * factor * squeeze, squeeze)


def recorded(told: Sequence[Transition], scopes: int = 3) -> Scale:
    """Recorded transitions of the busiest scopes, at a speed that makes them last `RECORDED_S`."""
    lengths = [row.prompt_tokens_before for row in told if row.prompt_tokens_before]
    share = PROMPT_TOKENS / median(lengths) if lengths else 1.0
    sizes = Sizes(PROMPT_TOKENS, 0.0, share, 2 * PROMPT_TOKENS, ANSWER_TOKENS)
    slow = plan(told, sizes, scopes=scopes, pace=Pace.FOLDED)
    speed = max(slow.last_s / RECORDED_S, 1e-6)
    made = plan(told, sizes, scopes=scopes, pace=Pace.FOLDED, speed=speed)
    return Scale("recorded", made, RECORDED_S + 30.0, PAPER_LIMIT_S)


@dataclass(frozen=True)
class Burst:
    """`trials`: of every arm at the paper's scale; the others have fewer.  `trace`: a file of recorded rows."""

    model: str = "smollm2"
    trials: int = 3
    squeezed_trials: int = 2
    squeezes: tuple[float, ...] = (1.0, 2.0, 4.0)
    trace: Path | None = None
    name: str = field(default="burst", init=False)
    paper: str = field(default="Figure 6 and Table 9", init=False)

    own_servers: str = field(default="every quantum has a server of its own, and one arms every step", init=False)

    def run(self, ledger: Ledger, *, quick: bool) -> Result:
        """See the module.

        Raises:
            RetireError: `trace` cannot be read, or holds something else.
        """
        told = _read(self.trace)
        with _serving(self.model, used(quick=quick), ledger.checks) as servers:
            bench = _Bench(ledger, servers)
            # Once for the run: the scale of all its trials.
            prefill = ledger.trial(Key("prefill", (f"native_{QUANTA[-1]}",), 0, seed=2), bench.prefill_s)
            note(f"  native prefill of {PROMPT_TOKENS} tokens: {prefill:.3f} s")
            planned = self.planned(prefill, told, quick=quick)
            ledger.plan({"prefill": 1} | {scale.name: trials for scale, trials in planned.items()})
            found = {}
            for scale, trials in planned.items():
                note(f"  {scale.name}: " + ", ".join(f"{k} {v:.3g}" for k, v in scale.ratios(prefill).items()))
                found[scale.name] = bench.runs(scale, trials, quick=quick)
        return result(self, list(planned), found, ledger.checks, bench.seal, prefill)

    def planned(self, prefill: float, told: Sequence[Transition], *, quick: bool) -> dict[Scale, int]:
        """What is replayed, and how many times by every arm.  `prefill`: seconds.  `told`: recorded rows."""
        if quick:
            if told:
                note(f"  {self.trace} takes {RECORDED_S:g} s an arm: not in a quick run")
            return {scaled(prefill, QUICK_SQUEEZE, QUICK_ANSWER_TOKENS): 1}
        found = {scaled(prefill, one): self.squeezed_trials for one in self.squeezes}
        found[next(iter(found))] = self.trials
        return found | ({recorded(told): self.squeezed_trials} if told else {})


def _read(path: Path | None) -> list[Transition]:
    if path is None:
        return []
    try:
        with path.open(encoding="utf-8") as lines:
            return list(rows.read(lines))
    except (OSError, UnicodeDecodeError) as error:
        raise RetireError(f"{path} cannot be read: {error}") from None


def used(*, quick: bool) -> list[int]:
    """The quanta that have a server."""
    return [quantum for quantum in QUANTA if not quick or quantum != ALWAYS]


def server_flags(quantum: int) -> tuple[str, ...]:
    """vLLM's, of a server with that quantum."""
    return (
        *("--max-num-batched-tokens", str(quantum)),
        *("--max-num-seqs", "32"),
        *("--block-size", str(BLOCK)),
        *("--kv-cache-memory-bytes", str(1 << 30)),
    )


@contextmanager
def _serving(model: str, quanta: Sequence[int], checks: dict[str, bool]) -> Iterator[dict[int, Session]]:
    """A server for each quantum."""
    kinds = [
        {
            "flags": server_flags(quantum),
            "env": {POLICY_ENV: Policy.ALWAYS if quantum == ALWAYS else Policy.SELECTIVE},
        }
        for quantum in quanta
    ]
    with serving_side_by_side(model, (), kinds, checks) as found:
        yield {quantum: session for quantum, (_, session) in zip(quanta, found, strict=True)}


def native_prefill_s(session: Session, times: int = 5) -> float:
    """Seconds until a prompt of `PROMPT_TOKENS` without a scope is answered; the median of so many other texts."""
    texts = [passage(session.url, session.model, PROMPT_TOKENS, 2 + number) for number in range(times)]
    return median(prefill_s(session.url, session.model, ids) for ids in texts)


class _Bench:
    """Servers, by quantum, and the runs on them."""

    def __init__(self, ledger: Ledger, sessions: Mapping[int, Session]) -> None:
        self._ledger = ledger
        self._sessions = sessions
        self.seal = sessions[QUANTA[0]].seal
        for session in sessions.values():
            native_prefill_s(session, times=1)  # the first of each warms up

    def prefill_s(self) -> float:
        """Of a native prompt in one quantum."""
        return native_prefill_s(self._sessions[QUANTA[-1]])

    def runs(self, scale: Scale, trials: int, *, quick: bool) -> dict[str, list[Figures]]:
        """Per arm, one run a trial."""
        found: dict[str, list[Figures]] = {}
        arms = [(name, quantum) for quantum in self._sessions for name in arms_of(quantum, quick=quick)]
        for trial in range(trials):
            key = Key(scale.name, [name for name, _ in arms], trial, seed=1 + trial)
            work = partial(self._trial, scale, in_turn(arms, trial), trial)
            for name, run in self._ledger.trial(key, work).items():
                found.setdefault(name, []).append(run)
        return found

    def _trial(self, scale: Scale, order: Sequence[tuple[str, int]], trial: int) -> dict[str, Figures]:
        """Every arm once, in that order."""
        clean: dict[int, Reply] = {}
        found: dict[str, Figures] = {}
        for name, quantum in order:
            run = self._run(self._sessions[quantum], scale, ARMS[name.partition("_")[0]], trial, clean)
            found[name] = told = run.figures()
            note(
                f"  {trial + 1} {name}: {told['goodput_tokens_per_s']:.1f} token/s,"
                f" obsolete {told['obsolete_tokens']}, final {told['final_versions']},"
                f" cleanup {told['cleanup_ms'] or 0:.1f} ms, at once {told['most_obsolete']}"
            )
        return found

    def _run(self, session: Session, scale: Scale, arm: Arm, trial: int, clean: dict[int, Reply]) -> Replayed:
        site = Site(session.url, session.model)
        texts = prompts(site, scale.plan, 1 + trial)
        replay = Replay(site, scale.plan, texts, window_s=scale.window_s, limit_s=scale.limit_s)
        run = on_time(partial(replay.run, arm))
        if arm is not Arm.ABANDON:  # what runs on there may be cut at the limit
            for name, holds in run.checks().items():
                session.check(name, holds)
        check_answers(session, run, texts, clean, "successors_equal_clean_runs")
        return run


ARMS = {"native": Arm.NATIVE, "selective": Arm.RETIRE, "always": Arm.RETIRE, "abandon": Arm.ABANDON}


def arms_of(quantum: int, *, quick: bool) -> list[str]:
    """Which arms run on the server of this quantum."""
    if quantum == ALWAYS:
        return [f"native_{quantum}", f"always_{quantum}"]
    abandoned = [] if quick or quantum != QUANTA[0] else [f"abandon_{quantum}"]
    return [f"native_{quantum}", f"selective_{quantum}", *abandoned]


def check_answers(
    session: Session,
    run: Replayed,
    texts: Mapping[tuple[int, int], list[int]],
    clean: dict[int, Reply],
    claim: str,
    tokens: int | None = None,
) -> None:
    """Check that under RETIRE every scope's last version says what a clean run of its prompt says.

    `texts`: by scope and number of a version.  `clean`: the trial's clean runs by scope; the first arm makes them.
    `tokens`: a clean run is so long, and is compared as far as it goes; None: as long as the answer, whole.
    """
    lasts = {scope: versions[-1] for scope, versions in run.versions.items()}
    if not clean:
        asked = {
            scope: session.stream(
                texts[scope, last.planned.number],
                last.planned.answer_tokens if tokens is None else tokens,
                fresh_salt(),
                None,
                ALTERNATIVES,
            )
            for scope, last in lasts.items()
        }
        clean.update({scope: stream.wait() for scope, stream in asked.items()})
    if run.arm is Arm.RETIRE:
        session.check(claim, equal(lasts, clean, whole=tokens is None))


def equal(lasts: Mapping[int, Version], clean: Mapping[int, Reply], *, whole: bool = True) -> bool:
    """Whether every scope's last version says what a clean run says, as far as numerics can tell.

    `whole`: whether all of it must have come.  Where one differs, and by how much, goes to stderr.
    """
    found = {scope: difference(clean[scope], version.reply, whole=whole) for scope, version in lasts.items()}
    for scope, what in found.items():
        if what is not None:
            note(f"  scope {scope} differs from its clean run: {what}")
    return all(what is None for what in found.values())


def best(found: Mapping[str, Sequence[Figures]], kind: str) -> str | None:
    """The arm of this kind with the highest median goodput; None if none ran."""
    of_kind = {arm: told for arm, runs in found.items() if arm.startswith(kind) if (told := goodput(runs)) is not None}
    return max(of_kind, key=lambda arm: of_kind[arm], default=None)


def result(
    bench: Burst,
    scales: Sequence[Scale],
    found: Mapping[str, Mapping[str, Sequence[Figures]]],
    checks: Mapping[str, bool],
    seal: Mapping[str, str],
    prefill: float,
) -> Result:
    """The figures of all scales; those that the paper has are of its scale, or of the first that was measured.

    None stands for what no run was made for, and no target is reached by it.
    """
    told: dict[str, Any] = {}
    for scale in reversed(scales):
        runs = found[scale.name]
        native, ours = best(runs, "native"), best(runs, "selective")
        at_scale = summary(runs, native or "", ours or "", scale.plan)
        told[f"by_scale.{scale.name}"] = {
            **scale.ratios(prefill),
            **at_scale,
            "best_native": native,
            "best_retire": ours,
            "goodput_tokens_per_s": {arm: goodput(of_arm) for arm, of_arm in runs.items()},
            "obsolete_tokens": {arm: _sum(of_arm, "obsolete_tokens") for arm, of_arm in runs.items()},
        }
    scale = scales[0]
    runs = found[scale.name]
    first = told[f"by_scale.{scale.name}"]
    pairs = goodput_pairs(runs, first["best_retire"], first["best_native"])
    ratio = Bootstrap(ratio_of_medians, pairs) if pairs else None
    versioned = [run for of_scale in found.values() for run in _runs(of_scale, Arm.RETIRE)]
    keys = ("native_obsolete_tokens", "retire_final", "native_final", "final_total", "cleanup_p99_intervals")
    head: dict[str, Any] = {
        "scale": scale.name,
        "retire_obsolete_tokens": _sum(versioned, "obsolete_tokens"),
        **{key: first[key] for key in keys},
        **figures("goodput_ratio", ratio),
        "prefill_s": prefill,
        "best_native": first["best_native"],
        "best_retire": first["best_retire"],
        "abandoned_obsolete_tokens": _sum(_runs(runs, Arm.ABANDON), "obsolete_tokens"),
        "goodput_ratio_vs_abandoned": _ratio(runs, first["best_retire"], best(runs, "abandon")),
        "runs_repeated": repeated(run for of_scale in found.values() for of in of_scale.values() for run in of),
    }
    p99 = head["cleanup_p99_intervals"]
    all_final = head["retire_final"] == head["final_total"]
    goodput_verdict = whether(holds=False) if ratio is None else at_least(ratio.interval(), GOODPUT_AIM, len(pairs))
    targets = [
        Target("retire_obsolete_tokens", "0", "0", whether(head["retire_obsolete_tokens"] == 0)),
        Target("native_obsolete_tokens", "40,499", "> 0", whether((head["native_obsolete_tokens"] or 0) > 0)),
        Target("retire_final", "9 of 9", f"{head['final_total']}", whether(all_final)),
        Target(
            "cleanup_p99_intervals",
            "1.08 ms",
            f"≤ {INTERVALS_AIM:g}",
            whether(p99 is not None and p99 <= INTERVALS_AIM),
        ),
        Target("goodput_ratio", "5.53×", f"≥ {GOODPUT_AIM:g}", goodput_verdict),
    ]
    cells = [_cell(scale, found[scale.name]) for scale in scales]
    return Result(cells, {**head, **told}, dict(checks), targets, bench.model, seal)


def goodput_pairs(
    runs: Mapping[str, Sequence[Figures]], above: str | None, below: str | None
) -> list[tuple[float, float]]:
    """Of two arms, by trial; none where an arm has not run, or the lower gave nothing once."""
    if above is None or below is None:
        return []
    both = zip(runs[above], runs[below], strict=True)
    pairs = [(ours["goodput_tokens_per_s"], theirs["goodput_tokens_per_s"]) for ours, theirs in both]
    return pairs if all(theirs > 0 for _, theirs in pairs) else []


def _ratio(runs: Mapping[str, Sequence[Figures]], above: str | None, below: str | None) -> float | None:
    pairs = goodput_pairs(runs, above, below)
    return ratio_of_medians(pairs) if pairs else None


def _runs(of_scale: Mapping[str, Sequence[Figures]], runtime: Arm) -> list[Figures]:
    """All of the arms with that runtime."""
    return [run for arm, runs in of_scale.items() if ARMS[arm.partition("_")[0]] is runtime for run in runs]


def _sum(runs: Sequence[Figures], figure: str) -> int | None:
    return int(sum(run[figure] for run in runs)) if runs else None


def _cell(scale: Scale, runs: Mapping[str, Sequence[Figures]]) -> Cell:
    about = {
        "bench": "burst",
        "scale": scale.name,
        "squeeze": scale.squeeze,
        "window_s": scale.window_s,
        "limit_s": scale.limit_s,
        "scopes": len(scale.plan.scopes),
        "bursts_s": list(scale.plan.bursts_s),
        "tokens": PROMPT_TOKENS,
    }
    count = min((len(of_arm) for of_arm in runs.values()), default=0)
    return Cell(about, columns({arm: of[trial] for arm, of in runs.items()} for trial in range(count)))
