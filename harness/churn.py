"""`retire bench churn`: a certificate holds while other work turns the whole pool over.

Stands beside Figure 5 and Table 12: an 8192-token predecessor, 7168 tokens in common with its successor, other work of
0.5 to 1.1 times the pool's capacity between the version switch and the successor.

Four servers, each with a chain of versions: every successor is itself an 8192-token request that shares its first 7168
tokens with the next one, so it is the next point's predecessor.

- `native_prefix`: vLLM without patches.  The predecessor is over; what its prefix cache still holds is luck.
- `hbm`: SUPERSEDE, guaranteed pins; the successor comes later and adopts.
- `dram`: SUPERSEDE with `tier: dram`; the device's blocks go back to the allocator, the successor restores.
- `limit`: SUPERSEDE, and the successor at once: its prefix was never under pressure.

A point: on each server but the last the switch, then unique prompts of `CHURN_TOKENS` tokens, two at a time, the same
on every server; then the same successor on all four, which take turns (`harness.turns`), so that a machine that gets
slower gets slower for all.  Recovery is a successor's TTFT in turns of its own server; the full interval is that
server's time from the switch through the other work, plus that.  A successor in an empty cache is measured once a
round.

What could be unfair, and which way:

- Pins take their share of the pool from the churn; upstream's cache has the whole.  In the full interval, against us.
- All arms send the same tokens in the same order; the order of the servers rotates over points.
- The native server's predecessor is looked up once more (a full hit) right before its switch, so that nothing else has
  aged it.  In favour of native.
- 7168 is a multiple of a step's length, so that our three arms must say the same, token for token.  What native reuses
  off that grid differs in the last bits: there two tokens that are nearly as likely may change places.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from harness.client import TIMEOUT_S, Reply, Streaming, http, says_the_same
from harness.experiment import Cell, Result, Target, figures
from harness.ledger import Key, Ledger
from harness.progress import note
from harness.session import Session, check, started
from harness.statistics import Bootstrap, Interval, Verdict, at_least, at_most, holm, median_of_ratios
from harness.turns import Turns
from harness.workload import complete, completion, fresh_salt, fresh_scope, passage, record_of

BLOCK, QUANTUM = 128, 1024
SHARED, TOTAL, ANSWER_TOKENS, ALTERNATIVES = 7168, 8192, 16, 5
POOL_BLOCKS = 136  # pins of a whole predecessor are within the default quota, a full request fits beside them
CHURN_TOKENS, AT_ONCE = 1024, 2
RETAIN_S = 300
POINTS = (0.5, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1)
QUICK_POINTS = (1.0,)
ARMS = ("native_prefix", "hbm", "dram", "limit")
HBM_AIM, DRAM_AIM, NATIVE_AIM = 0.95, 0.90, 1.02
PAPER = {  # H100 PCIe, Table 12: recovery speed-up over native prefix caching, HBM and DRAM
    0.5: (0.998, 0.798),
    0.75: (1.58, 0.786),
    0.8: (1.59, 0.699),
    0.85: (4.82, 2.29),
    0.9: (4.93, 2.31),
    0.95: (6.87, 3.27),
    1.0: (6.51, 3.84),
    1.05: (6.79, 3.25),
    1.1: (6.79, 3.23),
}


@dataclass(frozen=True)
class Churn:
    """`rounds`: how often every point is measured."""

    model: str = "smollm2"
    rounds: int = 3
    name: str = field(default="churn", init=False)
    paper: str = field(default="Figure 5 and Table 12", init=False)
    own_servers: str = field(default="four servers take turns, and one of them is without patches", init=False)

    def run(self, ledger: Ledger, *, quick: bool) -> Result:
        """See the module."""
        points, rounds = (QUICK_POINTS, 1) if quick else (POINTS, self.rounds)
        found: dict[float, list[dict[str, dict[str, float]]]] = {point: [] for point in points}
        cold_ms: list[float] = []
        ledger.plan({"cold": rounds} | {f"{point:g}": rounds for point in points})
        with ExitStack() as stack:
            arms, turns = _start(stack, self.model, ledger.checks)
            for arm in arms.values():
                arm.begin()
            for number in range(rounds):
                seed = 90_000 + number
                cold = Key("cold", ("native_prefix",), number, seed)
                cold_ms.append(ledger.trial(cold, partial(arms["native_prefix"].cold_ms, seed)))
                for index, point in enumerate(points):
                    seed = 1 + number * len(points) + index
                    turn = (number + index) % len(arms)
                    key = Key(f"{point:g}", ARMS, number, seed)
                    measured = ledger.trial(key, partial(_measured, arms, turns, point, seed, turn))
                    if measured is not None:
                        found[point].append(measured)
            for arm in arms.values():
                arm.end()
            seal = arms["hbm"].seal
        return _result(self, found, ledger.checks, seal, points, cold_ms)


def _measured(
    arms: dict[str, _Arm], turns: Turns, share: float, seed: int, turn: int
) -> dict[str, dict[str, float]] | None:
    """One point, the servers' order turned by `turn`; None when a check of it failed."""
    step = _Point(share, seed)
    order = list(arms.values())
    for arm in order[turn:] + order[:turn]:
        arm.churn(step)
    for arm in order:
        arm.wake()
    first_at = turns.run({name: arm.successor(step) for name, arm in arms.items()})
    measured = {
        name: arm.recovered(step, turns.worked_s(name, first_at[name]) * 1000)
        for name, arm in reversed(arms.items())  # the limit's answer is what the others must say
    }
    note(f"  {share:g}: " + ", ".join(f"{a} {m['recovery_ms']:.0f}" for a, m in measured.items()))
    return measured if step.counts else None


class _Point:
    """`share`: of the pool's capacity that other work writes.  `counts`: whether every check of it has passed."""

    def __init__(self, share: float, seed: int) -> None:
        self.share = share
        self.seed = seed
        self.said: Reply | None = None
        self.counts = True


class _Arm:
    """A server and the chain of versions on it.  `checks`: of the whole run."""

    seal: Mapping[str, str] = {}

    def __init__(self, url: str, model: str, checks: dict[str, bool]) -> None:
        self._url, self._model = url, model
        self._checks = checks
        self._headers: dict[str, str] = {}
        self._churned_ms = 0.0
        self._stream: Streaming | None = None
        self._shared = passage(url, model, SHARED, seed=0)
        self._prompt = self._next_prompt(0)

    def begin(self) -> None:
        """The first predecessor runs."""
        self._send(self._prompt).wait()

    def end(self) -> None:
        """The chain is over; what is left is checked."""

    def churn(self, point: _Point) -> None:
        """The switch, and other work."""
        started = time.monotonic()
        self._switch()
        self._other_work(point)
        self._churned_ms = (time.monotonic() - started) * 1000

    def _switch(self) -> None:
        """The predecessor's version is over."""

    def successor(self, point: _Point) -> Callable[[], float]:
        """What sends the point's successor, the next one's predecessor, and tells when its first token came."""
        self._prompt = self._next_prompt(point.seed)

        def run() -> float:
            self._stream = self._send(self._prompt)
            self._stream.wait_for_tokens(1)
            return self._stream.reply.first_token_at

        return run

    def recovered(self, point: _Point, recovery_ms: float) -> dict[str, float]:
        """What was measured (ms; tokens), when the successor is done."""
        assert self._stream is not None
        reply = self._stream.wait()
        said = reply.token_ids
        self._check(point, "every_answer_is_whole", len(said) == ANSWER_TOKENS)
        point.said = point.said or reply
        self._check(point, "all_arms_say_the_same", self._equal(point.said, reply))
        return {
            "recovery_ms": recovery_ms,
            "full_interval_ms": self._churned_ms + recovery_ms,
            "reused_tokens": float(reply.cached_tokens or 0),
        }

    def _equal(self, expected: Reply, reply: Reply) -> bool:
        return says_the_same(expected, reply)

    def cold_ms(self, seed: int) -> float:
        """TTFT of a successor in an empty cache."""
        started = time.monotonic()
        return (self._send(self._next_prompt(seed), salt=fresh_salt()).wait().first_token_at - started) * 1000

    def _next_prompt(self, seed: int) -> list[int]:
        return self._shared + passage(self._url, self._model, TOTAL - SHARED - ANSWER_TOKENS, seed=100_000 + seed)

    def _send(self, ids: list[int], salt: str | None = None) -> Streaming:
        asked = {"return_token_ids": True, "stream_options": {"include_usage": True}, "logprobs": ALTERNATIVES}
        salted = asked if salt is None else {**asked, "cache_salt": salt}
        return Streaming(self._url, completion(self._model, ids, ANSWER_TOKENS, **salted), self._headers)

    def _other_work(self, point: _Point) -> None:
        count = round(point.share * POOL_BLOCKS * BLOCK / CHURN_TOKENS)

        def one(number: int) -> None:
            ids = passage(self._url, self._model, CHURN_TOKENS - 1, seed=10_000 * point.seed + number)
            complete(self._url, completion(self._model, ids, 1, cache_salt=fresh_salt()))

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(one, range(count)))

    def wake(self) -> None:
        """A server that has idled while others worked is slow at first; that is nobody's merit or fault."""
        ids = passage(self._url, self._model, 64, seed=0)
        complete(self._url, completion(self._model, ids, 1, cache_salt=fresh_salt()))

    def _check(self, point: _Point, name: str, holds: bool) -> None:
        point.counts &= check(self._checks, name, holds, f": {type(self).__name__} at {point.share:g}")


class _Native(_Arm):
    """vLLM as it is."""

    def churn(self, point: _Point) -> None:
        self._send(self._prompt).wait()  # the predecessor is the youngest again
        super().churn(point)


class _Retained(_Arm):
    """A patched server; the certificate waits in `tier`."""

    def __init__(self, url: str, model: str, checks: dict[str, bool], tier: str) -> None:
        super().__init__(url, model, checks)
        session = Session(url, model, checks=checks)
        self.seal = session.seal
        self._session = session
        self._usage = session.pool_usage()
        self._tier = tier
        self._scope, self._epoch = fresh_scope(), 1
        self._headers = {"X-Retire-Scope": self._scope}
        self._blocks: list[int | None] = []
        self._moved: dict[str, int] = {}
        self._location = ""

    def _equal(self, expected: Reply, reply: Reply) -> bool:
        return reply.token_ids == expected.token_ids  # all of them reuse the same on the same grid

    def _switch(self) -> None:
        self._moved = self._session.tier()
        self._location = self._supersede()

    def recovered(self, point: _Point, recovery_ms: float) -> dict[str, float]:
        found = super().recovered(point, recovery_ms)
        record, before = record_of(self._url, self._location), self._blocks
        self._blocks = (record["adopted_blocks"] or [[]])[0]  # what the next successor may adopt
        self._check(point, "certified_tokens_are_constant", record["inherited_tokens"] == SHARED)
        if self._tier == "dram":
            after = self._session.tier()
            moved_elsewhere = sum(a != b for a, b in zip(self._blocks, before, strict=False))
            found |= {
                "blocks_returned": float(after["offloaded_pages"] - self._moved["offloaded_pages"]),
                "blocks_republished": float(after["restored_pages"] - self._moved["restored_pages"]),
                "slots_remapped": float(moved_elsewhere),
            }
            self._check(point, "the_devices_blocks_were_given_back", "offloaded" in record["stages"])
        return found

    def end(self) -> None:
        http.delete(f"{self._url}/scopes/{self._scope}", timeout=TIMEOUT_S).raise_for_status()
        self._session.check_rest(self._usage)

    def _supersede(self) -> str:
        contract = {"keep_prefix": SHARED, "retain": {"tier": self._tier, "ttl_s": RETAIN_S}}
        body = {"scope": self._scope, "expected_epoch": self._epoch, "contract": contract}
        answer = http.post(f"{self._url}/supersede", json=body, timeout=TIMEOUT_S).raise_for_status()
        self._epoch += 1
        return str(answer.headers["location"])


class _Limit(_Retained):
    """The limit of what inheritance can be: nothing comes between."""

    def _other_work(self, point: _Point) -> None:
        pass


def _start(stack: ExitStack, model: str, checks: dict[str, bool]) -> tuple[dict[str, _Arm], Turns]:
    """The four servers, started side by side."""
    flags = (
        *("--block-size", str(BLOCK)),
        *("--max-num-batched-tokens", str(QUANTUM)),
        *("--kv-cache-memory-bytes", str(1 << 30)),  # less than what the override below takes would stop start-up
        *("--num-gpu-blocks-override", str(POOL_BLOCKS + 1)),  # one is the null block
    )
    servers = stack.enter_context(started(model, flags, [{"patched": arm != "native_prefix"} for arm in ARMS]))
    native, hbm, dram, limit = (server.url for server in servers)
    arms = (
        _Native(native, model, checks),
        _Retained(hbm, model, checks, "hbm"),
        _Retained(dram, model, checks, "dram"),
        _Limit(limit, model, checks, "hbm"),
    )
    return dict(zip(ARMS, arms, strict=True)), Turns(dict(zip(ARMS, servers, strict=True)))


Measured = Mapping[float, Sequence[Mapping[str, Mapping[str, float]]]]


def _pairs(runs: Sequence[Mapping[str, Mapping[str, float]]], above: str, below: str, metric: str) -> Bootstrap:
    return Bootstrap(median_of_ratios, [(run[above][metric], run[below][metric]) for run in runs])


def _result(
    bench: Churn,
    found: Measured,
    checks: Mapping[str, bool],
    seal: Mapping[str, str],
    points: Sequence[float],
    cold_ms: Sequence[float],
) -> Result:
    measured = {point: runs for point, runs in found.items() if runs}
    whole = bool(measured) and len(measured) == len(points)
    summary: dict[str, Any] = {"rounds": len(cold_ms), "points": list(points), "points_counted": len(measured)}
    summary["cold_ms"] = statistics.median(cold_ms)
    targets: list[Target] = []
    for tier, aim in (("hbm", HBM_AIM), ("dram", DRAM_AIM)):
        efficiency = {p: _pairs(runs, "limit", tier, "recovery_ms") for p, runs in measured.items()}
        against = {p: _pairs(runs, tier, "native_prefix", "recovery_ms") for p, runs in measured.items()}
        speedup = {p: _pairs(runs, "native_prefix", tier, "recovery_ms") for p, runs in measured.items()}
        interval = {p: _pairs(runs, "native_prefix", tier, "full_interval_ms") for p, runs in measured.items()}
        lowest = min(efficiency.values(), key=lambda one: one.value) if whole else None
        highest = max(against.values(), key=lambda one: one.value) if whole else None
        p_holm = holm({p: one.p_not_below(NATIVE_AIM) for p, one in against.items()})
        summary |= {
            **figures(f"{tier}_efficiency", lowest),
            **figures(f"worst_{tier}_ratio_vs_native", highest),
            f"{tier}_best_speedup": max((one.value for one in speedup.values()), default=None),
            f"{tier}_by_point": {
                f"{p:g}": {
                    "efficiency": efficiency[p].value,
                    "speedup": speedup[p].value,
                    "paper_speedup": PAPER[p][tier == "dram"],
                    "full_interval_speedup": interval[p].value,
                    "ratio_vs_native": against[p].value,
                    "p_holm_below_1_02": p_holm[p],
                }
                for p in sorted(measured)
            },
        }
        targets += [
            Target(f"{tier}_efficiency", "-", f"≥ {aim:g}", _verdict(lowest, at_least, aim)),
            Target(
                f"worst_{tier}_ratio_vs_native",
                "1.002" if tier == "hbm" else "2.0",
                f"≤ {NATIVE_AIM:g}",
                _verdict(highest, at_most, NATIVE_AIM),
            ),
        ]
    summary["full_interval_speedup"] = {
        tier: max((row["full_interval_speedup"] for row in summary[f"{tier}_by_point"].values()), default=None)
        for tier in ("hbm", "dram")
    }
    for name in ("blocks_returned", "blocks_republished", "slots_remapped"):
        summary[name] = max((run["dram"][name] for runs in measured.values() for run in runs), default=None)
    summary["certified_tokens"] = SHARED if checks.get("certified_tokens_are_constant") else None
    cells = [
        Cell(
            {"bench": bench.name, "share": point, "pool_blocks": POOL_BLOCKS, "block_tokens": BLOCK},
            {
                arm: {metric: [run[arm][metric] for run in runs] for metric in runs[0][arm]}
                for arm in (runs[0] if runs else {})
            },
        )
        for point, runs in found.items()
    ]
    return Result(cells, summary, checks, targets, model=bench.model, seal=seal)


def _verdict(found: Bootstrap | None, judge: Any, bound: float) -> Verdict:
    interval: Interval | None = None if found is None else found.interval()
    return Verdict.NOT_REACHED if interval is None else judge(interval, bound)
