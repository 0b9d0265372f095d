"""`retire bench inheritance`: what a certified prefix saves, and what it costs where nothing is to be saved.

Stands beside §7.3 (a certified 4080-token prefix, 33.8×) and the full-hit control of A.4 (within 2 % of native prefix
caching at zero pressure, three interruption offsets).

A trial has three arms on one text and one server, in an order that rotates.  Every successor is the same prompt: the
text's first `prefix_tokens`, then `tail_tokens` new ones.

- `cold`: sent to an idle engine, in a cache that holds nothing of it.
- `certified`: a predecessor with another tail decodes in a scope; after `offset` of its tokens the successor
  supersedes it.
- `native_full_hit`: the same predecessor without a scope; at the same offset its client hangs up and submits the
  successor, for which vLLM's own prefix cache holds every reusable block.

TTFT is measured at the client, from the decision (for `native_full_hit` before the hang-up) to the first token.

What could be unfair, and which way:

- Caches: each arm has a salt of its own and each trial a text of its own.  The reused length is asked of the server and
  must be the same in both reusing arms, and nothing in the cold one.
- `cold` has nothing to interrupt; both others wait for the decode step that is in flight.  In favour of cold.
- `native_full_hit` does not wait until the server has noticed the hang-up, and carries neither gate nor ticket, running
  usage or certificate.  In favour of native.
- All arms open a connection of their own, send token ids (nothing to tokenise) and ask for the same log-probabilities.
- Prefix and chunk grid agree (`prefix_tokens` is a multiple of `QUANTUM`), so that all three arms must say the same,
  bit for bit; an arm that was fast because it was wrong does not count.
- One warm-up trial on a short prefix is thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from harness.client import Reply, Streaming
from harness.experiment import Cell, Result, Target, figures
from harness.ledger import Key, Ledger
from harness.progress import note
from harness.session import Session, measuring
from harness.statistics import Bootstrap, Pairs, Verdict, at_least, at_most, holm, median_of_ratios, ratio_of_medians
from harness.workload import adopted_as_certified, diverging, fresh_salt, fresh_scope, record_of

QUANTUM = 2048
ANSWER_TOKENS = 16
PREDECESSOR_TOKENS = 4000  # more than it can decode before it is interrupted
SPEEDUP_AIM, FULL_HIT_AIM = 34.0, 1.02
ARMS = ("cold", "certified", "native_full_hit")

Times = dict[str, dict[str, float]]
"""Per arm and metric, ms: `ttft_ms`, and for `certified` the record's stages, counted from ADVANCE."""


@dataclass(frozen=True)
class Inheritance:
    """`pairs`: trials per offset.  `offsets`: after how many tokens of the predecessor it is interrupted."""

    model: str = "smollm2"
    prefix_tokens: int = 2 * QUANTUM
    tail_tokens: int = 32
    offsets: Sequence[int] = (4, 16, 64)
    pairs: int = 5
    quick_pairs: int = 2
    url: str = ""
    name: str = field(default="inheritance", init=False)
    paper: str = field(default="§7.3 and A.4", init=False)
    own_servers: str = field(default="", init=False)

    def run(self, ledger: Ledger, *, quick: bool) -> Result:
        """See the module."""
        trials: dict[int, list[Times]] = {offset: [] for offset in self.offsets}
        planned = [offset for _ in range(self.quick_pairs if quick else self.pairs) for offset in self.offsets]
        ledger.plan({f"offset {offset}": planned.count(offset) for offset in self.offsets})
        flags = ("--max-num-batched-tokens", str(QUANTUM), "--kv-cache-memory-bytes", str(1 << 30))
        with measuring(self.url, self.model, flags, ledger.checks) as session:
            _Trial(session, QUANTUM, self.tail_tokens, self.offsets[0], seed=0).run(ARMS)
            for number, offset in enumerate(planned):
                key = Key(f"offset {offset}", ARMS, number, seed=1 + number)
                times = ledger.trial(key, partial(self._trial, session, number, offset))
                if times is not None:
                    trials[offset].append(times)
        return self._result(session, trials, len(planned))

    def _trial(self, session: Session, number: int, offset: int) -> Times | None:
        """The arms, in an order of which every offset sees every one; None when a check of it failed."""
        turn = (number + number // len(self.offsets)) % len(ARMS)
        trial = _Trial(session, self.prefix_tokens, self.tail_tokens, offset, seed=1 + number)
        times = trial.run(ARMS[turn:] + ARMS[:turn])
        told = ", ".join(f"{arm} {found['ttft_ms']:.1f} ms" for arm, found in times.items())
        note(f"  {number + 1}, offset {offset}: {told}")
        return times if trial.counts else None

    def _result(self, session: Session, trials: dict[int, list[Times]], planned: int) -> Result:
        counted = [trial for offset in self.offsets for trial in trials[offset]]
        speedup = full_hit = None
        verdicts = (Verdict.NOT_REACHED, Verdict.NOT_REACHED)
        if counted:
            speedup = Bootstrap(ratio_of_medians, _pairs(counted, "cold", "certified"))
            full_hit = Bootstrap(median_of_ratios, _pairs(counted, "certified", "native_full_hit"))
            verdicts = (
                at_least(speedup.interval(), SPEEDUP_AIM),
                at_most(full_hit.interval(), FULL_HIT_AIM),
            )
        return Result(
            cells=[self._cell(offset, done) for offset, done in trials.items()],
            summary={
                **figures("speedup", speedup),
                "prefix_tokens": self.prefix_tokens,
                **figures("full_hit_ratio", full_hit),
                "full_hit_ratio_by_offset": self._by_offset(trials),
                "trials": planned,
                "trials_counted": len(counted),
            },
            checks=session.checks,
            targets=[
                Target("speedup", "33.8×", f"≥ {SPEEDUP_AIM:g}", verdicts[0]),
                Target("full_hit_ratio", "within 1.02", f"≤ {FULL_HIT_AIM:g}", verdicts[1]),
            ],
            model=self.model,
            seal=session.seal,
        )

    def _cell(self, offset: int, done: Sequence[Times]) -> Cell:
        metrics = {arm: done[0][arm].keys() if done else ("ttft_ms",) for arm in ARMS}
        return Cell(
            {"bench": self.name, "offset_tokens": offset, "prefix_tokens": self.prefix_tokens},
            {arm: {metric: [trial[arm][metric] for trial in done] for metric in metrics[arm]} for arm in ARMS},
        )

    def _by_offset(self, trials: dict[int, list[Times]]) -> dict[str, Any]:
        """Per offset: the ratio, its interval, and Holm's p-value of it being below the aim."""
        found = {
            offset: Bootstrap(median_of_ratios, _pairs(done, "certified", "native_full_hit"))
            for offset, done in trials.items()
            if done
        }
        p_holm = holm({offset: one.p_not_below(FULL_HIT_AIM) for offset, one in found.items()})
        return {
            str(offset): {**figures("ratio", one), "p_holm": p_holm[offset]} for offset, one in sorted(found.items())
        }


@dataclass(frozen=True)
class _Run:
    """A successor and when it was decided on.  `stages_ms`: what the server's record adds."""

    started: float
    reply: Reply
    stages_ms: dict[str, float] = field(default_factory=dict)

    @property
    def times(self) -> dict[str, float]:
        return {"ttft_ms": (self.reply.first_token_at - self.started) * 1000, **self.stages_ms}


class _Trial:
    """`counts`: whether every check of it has passed."""

    def __init__(self, session: Session, prefix_tokens: int, tail_tokens: int, offset: int, seed: int) -> None:
        self._session = session
        self._prefix_tokens = prefix_tokens
        self._offset = offset
        self._old, self._new = diverging(session.url, session.model, prefix_tokens, tail_tokens, seed)
        self.counts = True

    def run(self, order: Sequence[str]) -> Times:
        """Measure the three arms in that order."""
        arms = {"cold": self._cold, "certified": self._certified, "native_full_hit": self._native}
        found = {arm: arms[arm](fresh_salt()) for arm in order}
        said = {arm: (one.reply.token_ids, one.reply.logprobs) for arm, one in found.items()}
        whole = all(len(ids) == len(logprobs) == ANSWER_TOKENS for ids, logprobs in said.values())
        self._check("every_answer_is_whole", whole)
        self._check("successors_equal_the_clean_cold_run", said["certified"] == said["cold"])
        self._check("native_equals_the_clean_cold_run", said["native_full_hit"] == said["cold"])
        cached = {arm: one.reply.cached_tokens for arm, one in found.items()}
        self._check("nothing_cached_in_the_cold_arm", cached["cold"] == 0)
        self._check(
            "cached_tokens_equal_the_prefix_in_both_arms",
            cached["certified"] == cached["native_full_hit"] == self._prefix_tokens,
        )
        return {arm: one.times for arm, one in found.items()}

    def _check(self, name: str, holds: bool) -> None:
        self.counts &= self._session.check(name, holds)

    def _cold(self, salt: str) -> _Run:
        started = time.monotonic()
        return _Run(started, self._send(self._new, salt).wait())

    def _certified(self, salt: str) -> _Run:
        scope = fresh_scope()
        old = self._predecessor(salt, {"X-Retire-Scope": scope})
        started = time.monotonic()
        new = self._send(self._new, salt, {"X-Retire-Scope": scope, "X-Retire-Supersedes": "1"}).wait()
        old.wait()
        record = record_of(self._session.url, new.headers["location"])
        certified = record["certificate"] is not None and record["inherited_tokens"] == self._prefix_tokens
        self._check("the_certified_prefix_was_inherited", certified)
        self._check("the_certified_blocks_were_adopted", certified and adopted_as_certified(record))
        return _Run(started, new, {f"{stage}_ms": at_ms for stage, at_ms in record["stages"].items()})

    def _native(self, salt: str) -> _Run:
        old = self._predecessor(salt)
        started = time.monotonic()
        old.hang_up()
        new = self._send(self._new, salt).wait()
        old.wait()
        return _Run(started, new)

    def _predecessor(self, salt: str, headers: dict[str, str] | None = None) -> Streaming:
        stream = self._send(self._old, salt, headers, PREDECESSOR_TOKENS)
        stream.wait_for_tokens(self._offset)
        said = len(stream.reply.token_ids)
        self._check("interrupted_while_decoding", self._offset <= said < PREDECESSOR_TOKENS)
        return stream

    def _send(
        self, ids: list[int], salt: str, headers: dict[str, str] | None = None, tokens: int = ANSWER_TOKENS
    ) -> Streaming:
        return self._session.stream(ids, tokens, salt, headers)


def _pairs(trials: Sequence[Times], above: str, below: str) -> Pairs:
    return [(trial[above]["ttft_ms"], trial[below]["ttft_ms"]) for trial in trials]
