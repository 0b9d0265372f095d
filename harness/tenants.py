"""`retire bench tenants`: what a supersede of one tenant is to another.

Stands beside §7.4 (tenant B's KV digest and block ids unchanged; its runtime and frame gap within 1.0 % and 1.8 % of
native abort) and the zero-quota campaign of A.3 (three of three cold, nothing inherited, equal to clean).

Tenants A, B and Z come from a tenants file; Z may pin nothing.

- Pairs: B decodes; A's long prefill begins, and after as many of B's tokens is either superseded (`supersede`) or
  aborted and resubmitted (`native_abort`), with the same successor, which keeps a sixth, half, or five sixths of A's
  prompt in turn.  B's inter-token time is its mean from A's arrival to the end of B's answer, which outlasts A's.  The
  pair's order alternates.
- Pages: B's block ids and a digest over B's full pages, from the worker, before A arrives and after A's successor is
  done; outside the timed pairs, because asking takes the engine's time.
- Zero quota: Z's predecessor decodes in a scope and is superseded.

What could be unfair, and which way: both arms prefill the same tokens with B's rows in every step; what A has lost the
use of is cut out of the running step in one arm and computed to its end in the other.  With five sixths kept there is
nothing to cut, and both arms compute the same.  B's answers must be equal in both arms and whole.  How many rows of A
share a step with B's depends on timing, and in bfloat16 the company decides between near-ties: hence float32.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness.client import Reply
from harness.experiment import Cell, Result, Target
from harness.faults import EXTENSION
from harness.ledger import Key, Ledger
from harness.progress import note
from harness.session import DEVELOPMENT, Session, serving
from harness.statistics import Bootstrap, Verdict, at_most, median_of_ratios, percentile
from harness.workload import diverging, fresh_salt, fresh_scope, passage, record_of

BLOCK, QUANTUM = 128, 256
A_KEY, B_KEY, Z_KEY = "key-of-a", "key-of-b", "key-of-z"
FILE = f"""
[tenants.a]
keys = ["{A_KEY}"]
[tenants.b]
keys = ["{B_KEY}"]
[tenants.z]
keys = ["{Z_KEY}"]
pin_blocks = 0
"""
B_PROMPT, B_TOKENS, B_PAGES = 64, 32, 8
A_PROMPT, A_SHARES, A_TOKENS = 768, (128, 384, 640), 8
INTERRUPT_AFTER = 2  # of B's tokens since A arrived, so in the same step of A in both arms
AIM = 1.01
ARMS = ("supersede", "native_abort")


@dataclass(frozen=True)
class Tenants:
    """`pairs`: timed; `trials`: of pages and of the zero quota."""

    model: str = "smollm2"
    pairs: int = 60
    quick_pairs: int = 10
    trials: int = 3
    name: str = field(default="tenants", init=False)
    paper: str = field(default="§7.4 and A.3", init=False)
    own_servers: str = field(default="its server has tenants of its own, and a worker that shows pages", init=False)

    def run(self, ledger: Ledger, *, quick: bool) -> Result:
        """See the module."""
        pairs = self.quick_pairs if quick else self.pairs
        ledger.plan({"pairs": pairs, "pages": self.trials, "zero quota": self.trials})
        flags = (
            *("--block-size", str(BLOCK)),
            *("--max-num-batched-tokens", str(QUANTUM)),
            *("--kv-cache-memory-bytes", str(2 << 30)),
            *("--dtype", "float32"),
            *("--worker-extension-cls", EXTENSION),
        )
        timed: list[dict[str, dict[str, float]]] = []
        with tempfile.TemporaryDirectory(prefix="retire-tenants-") as folder:
            file = Path(folder) / "tenants.toml"
            file.write_text(FILE, encoding="utf-8")
            env = {"RETIRE_TENANTS": str(file), **DEVELOPMENT}
            with serving(self.model, flags, ledger.checks, env, B_KEY) as session:
                bench = _Bench(session)
                bench.pair(0, ARMS)  # warm-up
                for number in range(pairs):
                    found = ledger.trial(Key("pairs", ARMS, number, seed=1 + number), partial(_timed, bench, number))
                    if found is not None:
                        timed.append(found)
                pages = [_apart(ledger, "pages", n, 500 + n, bench.pages) for n in range(self.trials)]
                cold = [_apart(ledger, "zero quota", n, 900 + n, bench.zero_quota) for n in range(self.trials)]
        return self._result(session, timed, pairs, pages, cold)

    def _result(
        self,
        session: Session,
        timed: Sequence[dict[str, dict[str, float]]],
        planned: int,
        pages: Sequence[tuple[bool, bool]],
        cold: Sequence[bool],
    ) -> Result:
        ratio = None
        if timed:
            ratio = Bootstrap(
                median_of_ratios, [(one["supersede"]["itl_ms"], one["native_abort"]["itl_ms"]) for one in timed]
            )
        interval = None if ratio is None else ratio.interval(0.90)  # its upper end is the one-sided 95 % bound
        summary: dict[str, Any] = {
            "b_blocks_unchanged": all(ids for ids, _ in pages),
            "b_digest_unchanged": all(digest for _, digest in pages),
            "b_itl_ratio": None if ratio is None else ratio.value,
            "b_itl_ratio_bound95": None if interval is None else interval.high,
            "b_itl_ratio_by_kept": _by_kept(timed),
            "b_gap_p99_ms": _p99([one["supersede"]["longest_gap_ms"] for one in timed]),
            "b_gap_p99_ms_native": _p99([one["native_abort"]["longest_gap_ms"] for one in timed]),
            "zero_quota_cold": sum(cold),
            "zero_quota_trials": len(cold),
            "pairs": planned,
            "pairs_counted": len(timed),
        }
        verdict = Verdict.NOT_REACHED if interval is None else at_most(interval, AIM)
        session.check("b_blocks_unchanged", summary["b_blocks_unchanged"])
        session.check("b_digest_unchanged", summary["b_digest_unchanged"])
        session.check("zero_quota_is_cold_and_equal_to_clean", all(cold))
        cell = Cell(
            {"bench": self.name, "quantum": QUANTUM},
            {arm: {m: [one[arm][m] for one in timed] for m in ("itl_ms", "longest_gap_ms")} for arm in ARMS},
        )
        return Result(
            [cell],
            summary,
            session.checks,
            [Target("b_itl_ratio_bound95", "1.010 (median)", f"≤ {AIM:g}", verdict)],
            model=self.model,
            seal=session.seal,
        )


def _timed(bench: _Bench, number: int) -> dict[str, dict[str, float]] | None:
    """A pair, whose order alternates; None when a check of it failed."""
    found, counts = bench.pair(1 + number, ARMS if number % 2 else ARMS[::-1])
    note(f"  {number + 1}: " + ", ".join(f"{arm} {metrics['itl_ms']:.2f}" for arm, metrics in found.items()))
    return found if counts else None


def _apart(ledger: Ledger, cell: str, number: int, seed: int, work: Callable[[int], Any]) -> Any:
    """A trial outside the timed pairs."""
    return ledger.trial(Key(cell, ("supersede",), number, seed), partial(work, seed))


def _kept_tokens(seed: int) -> int:
    """How much of A's prompt its successor keeps."""
    return A_SHARES[seed % len(A_SHARES)]


class _Bench:
    """The three tenants on one server."""

    def __init__(self, session: Session) -> None:
        self._b = session
        self._a = Session(session.url, session.model, A_KEY, session.checks)
        self._z = Session(session.url, session.model, Z_KEY, session.checks)

    def pair(self, seed: int, order: Sequence[str]) -> tuple[dict[str, dict[str, float]], bool]:
        """Both arms on the same texts; per arm B's mean and longest time between tokens, and whether it counts."""
        prompt = passage(self._b.url, self._b.model, B_PROMPT, 10_000 + seed, B_KEY)
        a_prompts = self._a_prompts(seed)  # now: tokenising beside B would take its time
        runs = {arm: self._run(arm, prompt, a_prompts) for arm in order}
        said = {arm: reply.token_ids for arm, (reply, _) in runs.items()}
        whole = all(len(ids) == B_TOKENS for ids in said.values())
        counts = self._b.check("b_is_whole", whole)
        counts &= self._b.check("b_says_the_same", said["supersede"] == said["native_abort"])
        kept = {"kept_tokens": float(_kept_tokens(seed))}
        return {arm: times | kept for arm, (_, times) in runs.items()}, counts

    def _a_prompts(self, seed: int) -> tuple[list[int], list[int]]:
        shared = _kept_tokens(seed)
        return diverging(self._a.url, self._a.model, shared, A_PROMPT - shared, 20_000 + seed, A_KEY)

    def _run(
        self, arm: str, prompt: list[int], a_prompts: tuple[list[int], list[int]]
    ) -> tuple[Reply, dict[str, float]]:
        b = self._b.stream(prompt, B_TOKENS, fresh_salt())
        b.wait_for_tokens(4)
        seen = len(b.reply.token_ids)
        location = self._interrupt(arm, a_prompts, lambda: b.wait_for_tokens(seen + INTERRUPT_AFTER))
        reply = b.wait()
        if arm == "supersede":
            record = record_of(self._a.url, location, A_KEY)
            self._b.check("a_is_superseded", record["outcome"] in ("inherited", "cold"))
        at = [frame.at for frame in reply.frames if frame.token_ids][seen - 1 :]
        gaps = [(later - earlier) * 1000 for earlier, later in itertools.pairwise(at)]
        return reply, {"itl_ms": (at[-1] - at[0]) * 1000 / len(gaps), "longest_gap_ms": max(gaps)}

    def _interrupt(self, arm: str, a_prompts: tuple[list[int], list[int]], moment: Callable[[], None]) -> str:
        """A's prefill, interrupted at the moment; where the record is, when A's successor is done."""
        old_ids, new_ids = a_prompts
        salt, scope = fresh_salt(), fresh_scope()
        if arm == "supersede":
            old = self._a.stream(old_ids, 256, salt, {"X-Retire-Scope": scope})
            moment()
            new = self._a.stream(new_ids, A_TOKENS, salt, {"X-Retire-Scope": scope, "X-Retire-Supersedes": "1"})
            reply = new.wait()
        else:
            old = self._a.stream(old_ids, 256, salt)
            moment()
            old.hang_up()
            reply = self._a.stream(new_ids, A_TOKENS, salt).wait()
        old.wait()
        self._b.check("a_answers", len(reply.token_ids) == A_TOKENS)
        return reply.headers.get("location", "")

    def pages(self, seed: int) -> tuple[bool, bool]:
        """Whether B's block ids, and its full pages, are the same before A arrives and after A's successor."""
        prompt = passage(self._b.url, self._b.model, B_PAGES * BLOCK, 30_000 + seed, B_KEY)
        a_prompts = self._a_prompts(seed)
        b = self._b.stream(prompt, 600, fresh_salt())
        b.wait_for_tokens(4)
        ((name, before),) = self._b.ask_worker("requests_blocks").items()
        full = before[:B_PAGES]
        digest = self._b.ask_worker("digest_pages", blocks=full)
        self._interrupt("supersede", a_prompts, lambda: b.wait_for_tokens(8))
        after = self._b.ask_worker("requests_blocks").get(name, [])
        unchanged = self._b.ask_worker("digest_pages", blocks=full) == digest
        b.hang_up()
        b.wait()
        return after[: len(before)] == before, unchanged

    def zero_quota(self, seed: int) -> bool:
        """Whether Z's successor starts cold, inherits nothing, and says what a clean run says."""
        old_ids, new_ids = diverging(self._z.url, self._z.model, A_PROMPT, 64, 40_000 + seed, Z_KEY)
        salt, scope = fresh_salt(), fresh_scope()
        old = self._z.stream(old_ids, 1000, salt, {"X-Retire-Scope": scope})
        old.wait_for_tokens(4)
        new = self._z.stream(new_ids, 16, salt, {"X-Retire-Scope": scope, "X-Retire-Supersedes": "1"}).wait()
        old.wait()
        record = record_of(self._z.url, new.headers["location"], Z_KEY)
        clean = self._z.stream(new_ids, 16, fresh_salt()).wait()
        cold = (record["outcome"], record["refusal"], record["inherited_tokens"]) == ("cold", "quota", 0)
        return cold and new.cached_tokens == 0 and new.token_ids == clean.token_ids


def _by_kept(timed: Sequence[dict[str, dict[str, float]]]) -> dict[str, float]:
    """The median ratio for each share of A's prompt that its successor keeps."""
    ratios: dict[int, list[float]] = {shared: [] for shared in A_SHARES}
    for one in timed:
        ratios[int(one["supersede"]["kept_tokens"])].append(one["supersede"]["itl_ms"] / one["native_abort"]["itl_ms"])
    return {f"{kept}/{A_PROMPT}": statistics.median(found) for kept, found in ratios.items() if found}


def _p99(values: Sequence[float]) -> float | None:
    return percentile(values, 99) if values else None
