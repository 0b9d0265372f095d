"""`retire bench retirement`: how long obsolete work goes on after its authority has ended.

Stands beside Table 10 (FENCE against the native request boundary: long prefill 24.9×, draft–verify prefill 51.3×,
active speculative decode 9.99×, two kinds of KV groups 7.01×) and §7.3 (the native tail grows with the quantum).

A predecessor is interrupted at a moment drawn uniformly from its work, with a short successor that shares nothing with
it.

- `native`: the client hangs up; the engine is free when it answers again.
- `retire`: the successor supersedes with `inherit: none`; obsolete rows are closed when the record says so, `fence_ms`
  after ADVANCE, on one clock for all processes of the host.

The bound is not a time but an interval: the fence may take as long as the longest time between two safe points of that
very step, and a little (`fence_over_interval`, the largest of all trials).  Those intervals in turn must not be longer
than a layer of the native step (`longest_interval_over_mean`).

What could be unfair, and which way:

- Native's boundary is seen through HTTP; what an idle engine takes to answer is taken off.
- Both arms of a pair are interrupted at the same offset into the same step; their order alternates.
- In `active_spec_decode` the moment is a pause after a token's arrival, drawn from longer than a step lasts.
- A transition whose requests were in no step when authority moved has nothing to fence and is drawn again.
"""

from __future__ import annotations

import functools
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.client import Reply, says_the_same
from harness.experiment import Cell, Result, Target, columns, figures
from harness.ledger import Key, Ledger
from harness.moments import MomentMissed, Moments
from harness.progress import note
from harness.session import Session, serving
from harness.statistics import Bootstrap, at_least, ratio_of_medians, whether
from harness.workload import diverging, fresh_salt, fresh_scope, passage, record_of
from retire import models

MODEL, LAYERS = "smollm2", 30
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ANSWER_TOKENS, PREDECESSOR_TOKENS, ALTERNATIVES = 4, 400, 5
SUCCESSOR_TOKENS = 512
DRAFTS = 3
DECODE_S = 0.5  # longer than a step that drafts and verifies
OVER_INTERVAL_AIM, OVER_MEAN_AIM = 1.25, 1.3
TRIES = 6
ARMS = ("native", "retire")


@dataclass(frozen=True)
class Path:
    """Work that is interrupted.  `paper`: its FENCE ratio there; `aim`: ours.

    `tokens`, `quantum`: of the prompt and of a step.  `decoding`: interrupted while it answers, not while it reads.
    `layers`: that a step runs through.  `drafted`: the model drafts for itself, which is as long as drafting can be.
    """

    name: str
    model: str
    tokens: int
    quantum: int
    layers: int
    paper: float
    aim: float
    drafted: bool = False
    decoding: bool = False

    @property
    def steps(self) -> int:
        """How many steps a whole prefill has."""
        return -(-self.tokens // self.quantum)

    @property
    def tail(self) -> bool:
        """Whether it is here for its quantum alone, and the paper has no ratio for it."""
        return not self.paper

    @property
    def flags(self) -> tuple[str, ...]:
        """The server's."""
        flags = ("--max-num-batched-tokens", str(self.quantum), "--kv-cache-memory-bytes", str(1 << 30))
        if not self.drafted:
            return flags
        speculation = {
            "method": "draft_model",
            "model": models.resolve(self.model),
            "num_speculative_tokens": DRAFTS,
            "max_model_len": 8192,
        }
        return (*flags, "--speculative-config", json.dumps(speculation))


@dataclass(frozen=True)
class Arm:
    """ms.  `closed_ms`: from the decision to where no obsolete row was computed.  `step_ms`: of the whole native step.

    `longest_interval_ms`: between two safe points of the step that was stopped.
    """

    closed_ms: float
    successor_ms: float
    step_ms: float = 0.0
    longest_interval_ms: float = 0.0


@dataclass(frozen=True)
class Trial:
    """Both arms at one moment."""

    native: Arm
    retire: Arm

    @classmethod
    def of(cls, native: Mapping[str, float], retire: Mapping[str, float]) -> Trial:
        """From what a ledger keeps."""
        return cls(Arm(**native), Arm(**retire))

    def as_metrics(self) -> dict[str, dict[str, float]]:
        """Values of a cell."""
        return {
            "native": {
                "closed_ms": self.native.closed_ms,
                "step_ms": self.native.step_ms,
                "successor_ms": self.native.successor_ms,
            },
            "retire": {
                "closed_ms": self.retire.closed_ms,
                "longest_interval_ms": self.retire.longest_interval_ms,
                "successor_ms": self.retire.successor_ms,
            },
        }


PATHS = (
    Path("long_prefill", MODEL, 8000, 4096, layers=LAYERS, paper=24.9, aim=30.0),
    Path("draft_verify_prefill", MODEL, 4000, 4096, layers=2 * LAYERS, paper=51.3, aim=51.3, drafted=True),
    Path(
        "active_spec_decode",
        MODEL,
        512,
        4096,
        layers=LAYERS * (1 + DRAFTS),
        paper=9.99,
        aim=9.99,
        drafted=True,
        decoding=True,
    ),
    Path("two_kv_groups", "gemma3-270m", 4000, 4000, layers=18, paper=7.01, aim=7.01),
)
TAILS = tuple(Path(f"tail_{quantum}", MODEL, 8000, quantum, layers=LAYERS, paper=0, aim=0) for quantum in (1024, 2048))


@dataclass(frozen=True)
class Retirement:
    """`trials`: per path.  `tail_trials`: per quantum.  `model`: of all paths but that of two KV groups."""

    model: str = MODEL
    trials: int = 20
    tail_trials: int = 6
    quick_trials: int = 3
    name: str = field(default="retirement", init=False)
    paper: str = field(default="Table 10 and §7.3", init=False)
    own_servers: str = field(default="every path has a server of its own, with its quantum and draft model", init=False)

    def run(self, ledger: Ledger, *, quick: bool) -> Result:
        """See the module."""
        found: dict[str, list[Trial]] = {}
        seal: Mapping[str, str] = {}
        planned = dict.fromkeys(_with(self.model, PATHS), self.quick_trials if quick else self.trials)
        planned |= {} if quick else dict.fromkeys(_with(self.model, TAILS), self.tail_trials)
        ledger.plan({path.name: trials for path, trials in planned.items()})
        for path, trials in planned.items():
            done = ledger.start(path.name, functools.partial(_measured, ledger, path, trials))
            found[path.name] = [Trial.of(**one) for one in done["trials"]]
            seal = done["seal"]
        return _result(found, ledger.checks, seal, planned)


def _with(model: str, paths: Sequence[Path]) -> list[Path]:
    """The same paths through another model; that of two KV groups is left as it is."""
    if model == MODEL:
        return list(paths)
    times = {path: path.layers // LAYERS for path in paths if path.model == MODEL}
    layers = layers_of(model)
    return [replace(path, model=model, layers=layers * times[path]) if path.model == MODEL else path for path in paths]


def layers_of(model: str) -> int:
    """How many layers a model has.  Raises OSError when it cannot be found."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(models.resolve(model)).get_text_config().num_hidden_layers)


def _measured(ledger: Ledger, path: Path, trials: int) -> dict[str, Any]:
    """One path on a server of its own; the trials that count."""
    with serving(path.model, path.flags, ledger.checks) as session:
        bench = _Bench(session, path)
        done = [
            ledger.trial(Key(path.name, ARMS, number, 100 + number), functools.partial(bench.trial, number))
            for number in range(trials)
        ]
    return {"trials": [one for one in done if one is not None], "seal": session.seal}


class _Bench:
    """Trials of one path on one server."""

    def __init__(self, session: Session, path: Path) -> None:
        self._session, self._path = session, path
        self._moments = Moments(session.url)
        for seed in (1, 2):  # the first one warms up
            ids = passage(session.url, session.model, path.tokens, seed)
            begin = functools.partial(session.stream, ids, 1, fresh_salt())
            if path.decoding:
                begin().wait()
                self._moments.settle()
            else:
                self._moments.calibrate(begin, path.steps)

    def trial(self, number: int) -> Trial | None:
        """Both arms at one moment; None when it was never hit, or something was wrong."""
        session, path = self._session, self._path
        draw = random.Random(f"{path.name} {number}")  # noqa: S311 - moments, the same whichever trials came before
        drafts = session.metric(DRAFTED) if path.drafted else 0
        old, new = diverging(session.url, session.model, 0, path.tokens, seed=100 + number)
        new = new[:SUCCESSOR_TOKENS]
        for _ in range(TRIES):
            where = self._draw_moment(draw)
            try:
                order = ARMS if number % 2 else ARMS[::-1]
                arms = {arm: self._interrupt(arm, old, new, *where) for arm in order}
            except MomentMissed:
                continue
            (native, native_reply), (ours, our_reply) = (arms[arm] for arm in ARMS)
            note(
                f"  {path.name} {number + 1}, {where[0]} + {where[1]:.2f}: native {native.closed_ms:.0f},"
                f" fence {ours.closed_ms:.1f}, longest interval {ours.longest_interval_ms:.1f} ms"
            )
            if path.decoding:
                session.check("draft_work_is_observed", session.metric(DRAFTED) > drafts)
            same = session.check("successors_say_the_same", says_the_same(native_reply, our_reply))
            return Trial(native, ours) if same else None
        session.check("moments_are_hit", False)
        return None

    def _draw_moment(self, draw: random.Random) -> tuple[int, float]:
        """A step and a share of its work, uniformly over the predecessor's work; of an answer a token and seconds."""
        if self._path.decoding:
            return draw.randrange(8, 40), draw.uniform(0, DECODE_S)
        left_s = draw.uniform(0, sum(self._moments.lengths_s))
        for step, length_s in enumerate(self._moments.lengths_s, 1):
            if left_s < length_s:
                return step, left_s / length_s
            left_s -= length_s
        raise AssertionError("a moment beyond the work it was drawn from")

    def _interrupt(self, arm: str, old: list[int], new: list[int], step: int, share: float) -> tuple[Arm, Reply]:
        """One arm, and what its successor said.  Raises MomentMissed."""
        session, scope = self._session, fresh_scope()
        mine = {} if arm == "native" else {"X-Retire-Scope": scope}
        predecessor = session.stream(old, PREDECESSOR_TOKENS, fresh_salt(), mine)
        try:
            wait = self._moments.wait_decoding if self._path.decoding else self._moments.wait
            moment = wait(predecessor, step, share)
            if arm == "native":
                predecessor.hang_up()
            else:
                mine |= {"X-Retire-Supersedes": "1", "X-Retire-Contract": '{"inherit": "none"}'}
            successor = session.stream(new, ANSWER_TOKENS, fresh_salt(), mine, ALTERNATIVES)
            reply = successor.wait()
        finally:
            predecessor.hang_up()
            predecessor.wait()
        session.check("every_answer_is_whole", len(reply.token_ids) == ANSWER_TOKENS)
        if not moment.hit():
            raise MomentMissed("the step was over")
        successor_ms = (reply.first_token_at - moment.at) * 1000
        if arm == "native":
            boundary_s = moment.boundary_s() - self._moments.idle_s
            return Arm(boundary_s * 1000, successor_ms, step_ms=moment.step_s() * 1000), reply
        stale = [frame for frame in predecessor.reply.frames if frame.text and frame.at > reply.first_token_at]
        session.check("no_stale_token", not stale)
        record = record_of(session.url, reply.headers["location"])
        receipt = next((one for one in record["receipts"] if one["safe_points"]), None)
        if receipt is None:
            raise MomentMissed("no step held it")
        session.check("nothing_is_inherited", record["inherited_tokens"] == 0)
        return Arm(
            receipt["obsolete_closed_ms"], successor_ms, longest_interval_ms=receipt["longest_interval_ms"]
        ), reply


def _result(
    found: Mapping[str, Sequence[Trial]],
    checks: Mapping[str, bool],
    seal: Mapping[str, str],
    planned: Mapping[Path, int],
) -> Result:
    summary: dict[str, Any] = {}
    targets = []
    for path in (path for path in planned if not path.tail):
        trials, name = found[path.name], path.name
        if not trials:
            summary |= {f"{key}.{name}": None for key in _KEYS}
            continue
        ratio = Bootstrap(ratio_of_medians, [(one.native.closed_ms, one.retire.closed_ms) for one in trials])
        over_interval = [one.retire.closed_ms / one.retire.longest_interval_ms for one in trials]
        over_mean = [one.retire.longest_interval_ms * path.layers / one.native.step_ms for one in trials]
        to_successor = [(one.native.successor_ms, one.retire.successor_ms) for one in trials]
        summary |= {
            f"fence_ms.{name}": statistics.median(one.retire.closed_ms for one in trials),
            f"native_ms.{name}": statistics.median(one.native.closed_ms for one in trials),
            **figures(f"fence_ratio.{name}", ratio),
            f"fence_over_interval.{name}": max(over_interval),
            f"longest_interval_over_mean.{name}": statistics.median(over_mean),
            f"longest_interval_over_mean_max.{name}": max(over_mean),
            f"interruption_to_successor_ratio.{name}": ratio_of_medians(to_successor),
            f"trials.{name}": len(trials),
        }
        targets += [
            Target(f"fence_ratio.{name}", f"{path.paper:g}×", f"≥ {path.aim:g}", at_least(ratio.interval(), path.aim)),
            _reached(f"fence_over_interval.{name}", summary, OVER_INTERVAL_AIM),
            _reached(f"longest_interval_over_mean.{name}", summary, OVER_MEAN_AIM),
        ]
    summary["tail_ms_by_quantum"] = {
        str(path.quantum): {
            "native": statistics.median(one.native.closed_ms for one in trials),
            "retire": statistics.median(one.retire.closed_ms for one in trials),
        }
        for path in sorted(planned, key=lambda path: path.quantum)
        if (path.tail or path.name == PATHS[0].name) and (trials := found[path.name])
    }
    checks = {**checks, "every_trial_counts": all(len(found[path.name]) == due for path, due in planned.items())}
    cells = [_cell(path, found[path.name]) for path in planned]
    return Result(cells, summary, checks, targets, next(iter(planned)).model, seal)


_KEYS = ("fence_ms", "native_ms", "fence_ratio", "fence_over_interval", "longest_interval_over_mean")


def _reached(key: str, summary: Mapping[str, Any], aim: float) -> Target:
    return Target(key, "-", f"≤ {aim:g}", whether(summary[key] <= aim))


def _cell(path: Path, trials: Sequence[Trial]) -> Cell:
    about = {"bench": "retirement", "path": path.name, "tokens": path.tokens, "quantum": path.quantum}
    return Cell(about, columns(trial.as_metrics() for trial in trials))
