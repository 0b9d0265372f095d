"""What the paper says and what is aimed at, table by table.

Owns: the names that figures of a summary have for a reader, their units, the paper's values as printed there, and how a
figure is judged whose file carries no verdict.  Must not know: any measurement, or how claims are shown.
Strategy: bounds, and the paper's values where benches have them, are the benches' own constants.  A bench that nobody
has written yet has its claims here under the keys that its summary is to have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from harness import churn, composition, inheritance, overhead, rates, retirement, tenants
from harness.report.numbers import (
    MS,
    PERCENT,
    PLAIN,
    RATIO,
    SHARE,
    TIMES,
    TOKENS,
    Unit,
    count,
)
from harness.report.results import Run
from harness.statistics import Interval, Verdict, at_least, at_most, median_at_most, whether

UNTOLD = "–"
TRIALS = count("trials")
POINTS = count("points")
BLOCKS = count("blocks")


class Sense(StrEnum):
    """On which side of a bound a figure is to be."""

    AT_LEAST = "≥"
    AT_MOST = "≤"
    MEDIAN_AT_MOST = "median ≤"
    EXACTLY = "="
    ABOVE = ">"


@dataclass(frozen=True)
class Aim:
    """`bound`: a value, or the key of the figure that is the bound.  `upper`: of the interval, if the median counts."""

    sense: Sense
    bound: float | str
    upper: float | None = None

    def bound_in(self, run: Run | None) -> float | None:
        """The bound as a value, if it is known."""
        if isinstance(self.bound, str):
            return None if run is None else run.number(self.bound)
        return self.bound

    def text(self, run: Run | None, unit: Unit) -> str:
        """For a reader."""
        bound = self.bound_in(run)
        if bound is None:
            return "all" if self.sense is Sense.EXACTLY else f"{self.sense} what was stated"
        sign = "" if self.sense is Sense.EXACTLY else f"{self.sense} "
        more = "" if self.upper is None else f", interval ≤ {unit.exact(self.upper)}"
        return f"{sign}{unit.exact(bound)}{more}"

    def verdict(self, run: Run, key: str) -> Verdict:
        """Whether a run has reached it.  A figure that is not there has not."""
        value, bound = run.number(key), self.bound_in(run)
        if value is None or bound is None:
            return Verdict.NOT_REACHED
        interval = run.interval(key) or Interval(value, value)
        match self.sense:
            case Sense.AT_LEAST:
                return at_least(interval, bound)
            case Sense.MEDIAN_AT_MOST:
                return median_at_most(value, interval, bound, self.upper)
            case Sense.AT_MOST:
                return at_most(interval, bound)
            case Sense.EXACTLY:
                return whether(value == bound)
            case Sense.ABOVE:
                return whether(value > bound)


@dataclass(frozen=True)
class Claim:
    """`key`: in the summary.  `label`: for a reader, under `group` if it has one.  `paper`: as printed there."""

    key: str
    label: str
    unit: Unit = PLAIN
    paper: str = UNTOLD
    aim: Aim | None = None
    group: str = ""


@dataclass(frozen=True)
class Chapter:
    """The tables and figures of the paper that one bench stands beside.  `asks`: the question, in a sentence."""

    bench: str
    title: str
    place: str
    asks: str
    claims: Sequence[Claim] = ()


def _least(bound: float | str) -> Aim:
    return Aim(Sense.AT_LEAST, bound)


def _most(bound: float | str) -> Aim:
    return Aim(Sense.AT_MOST, bound)


def _all_of(key: float | str) -> Aim:
    return Aim(Sense.EXACTLY, key)


PUBLICATION = Chapter(
    "publication",
    "Obsolete output",
    "Table 4, row 1",
    "What does an application still read of a version after its replacement was accepted?",
    (
        Claim(
            "native_stale_tokens",
            "Old tokens taken after the acceptance, vLLM's abort",
            TOKENS,
            "170 tokens in 18 trials",
            Aim(Sense.ABOVE, 0),
        ),
        Claim("native_close_stale_tokens", "The same when the runtime closes its response", TOKENS),
        Claim(
            "retire_raw_stale_frames_max",
            "The same under RETIRE, raw slow reader: most frames in a trial",
            count("frames"),
            aim=_most("stated_bound_frames"),
        ),
        Claim("retire_raw_stale_tokens", "The same in all trials", TOKENS),
        Claim("client_stale_tokens", "The same through RETIRE's client", TOKENS, "0 tokens", _all_of(0)),
        Claim("client_dropped_tokens", "Old tokens in buffers that the client dropped", TOKENS),
    ),
)

CORRECTNESS = Chapter(
    "correctness",
    "Valid inheritance",
    "Table 4 and A.3",
    "Does a successor say what it would have said anyway, and does it hang on the pages it adopts?",
    (
        Claim(
            "configs_equal", "Configurations equal, both modes", count("configurations"), "10 of 10", _all_of("configs")
        ),
        Claim("measurements", "Measurements taken", count("measurements"), "120", _all_of("measurements_planned")),
        Claim("faults_seen", "Page faults that changed the output", TRIALS, "3 of 3", _all_of("faults")),
        Claim("repaired_exact", "Outputs that came back with the bytes", TRIALS, "3 of 3", _all_of("faults")),
    ),
)

SAVED = "TTFT saved over abort and cold restart"
GRID = "Moments × overlaps"

COMPOSITION = Chapter(
    "composition",
    "Composed on one critical path",
    "Table 5",
    "How much sooner does a successor speak, and is a plain prefix cache ever the better answer?",
    (
        Claim(
            "reduction_vs_native_cold.trim",
            "Step trimmed",
            SHARE,
            "17.1 % (combined)",
            _least(composition.TRIM_AIM),
            SAVED,
        ),
        *(
            Claim(
                f"reduction_vs_native_cold.{arm}",
                label,
                SHARE,
                SHARE.exact(composition.PAPER[arm]) if arm in composition.PAPER else UNTOLD,
                group=SAVED,
            )
            for arm, label in (
                ("combined", "The paper's policy"),
                ("inherit", "Inheritance alone"),
                ("invalidate", "Invalidation alone"),
                ("prefix", "Abort and vLLM's prefix cache"),
            )
        ),
        Claim("grid_cells_failing", "A native arm is faster", count("cells"), aim=_all_of(0), group=GRID),
        Claim("grid_cells_counted", "Compared", count("cells"), group=GRID),
        Claim("worst_ratio_vs_best_native", "Ours / better native TTFT, worst cell", RATIO, group=GRID),
        Claim("median_ratio_vs_best_native", "Ours / better native TTFT, median cell", RATIO, group=GRID),
    ),
)

INHERITANCE = Chapter(
    "inheritance",
    "What a certified prefix saves",
    "§7.3 and A.4",
    "How much sooner does a successor speak that inherits its prefix, and what does it cost where nothing is saved?",
    (
        Claim("speedup", "Cold TTFT / certified TTFT", TIMES, "33.8×", _least(inheritance.SPEEDUP_AIM)),
        Claim(
            "full_hit_ratio",
            "Certified TTFT / native full hit, zero pressure",
            RATIO,
            "within 1.02×",
            _most(inheritance.FULL_HIT_AIM),
        ),
        Claim("prefix_tokens", "Certified prefix", TOKENS, "4080 tokens, 4096 tokens"),
    ),
)

_PATHS = {
    "long_prefill": ("Long prefill", "1.48×"),
    "draft_verify_prefill": ("Draft–verify prefill", "1.42×"),
    "active_spec_decode": ("Active speculative decode", "1.12×"),
    "two_kv_groups": ("Two kinds of KV groups", "1.22×"),
}

RETIREMENT = Chapter(
    "retirement",
    "How long obsolete work goes on",
    "Table 10 and §7.3",
    "How soon after its authority ends is no row of the old version computed any more?",
    tuple(
        replace(claim, group=_PATHS[path.name][0])
        for path in retirement.PATHS
        for fence, native in [("129 ms", "3213 ms") if path.name == "long_prefill" else (UNTOLD, UNTOLD)]
        for claim in (
            Claim(
                f"fence_ratio.{path.name}",
                "Native boundary / fence",
                TIMES,
                TIMES.exact(path.paper),
                _least(path.aim),
            ),
            Claim(f"fence_ms.{path.name}", "Fence", MS, fence),
            Claim(f"native_ms.{path.name}", "Native boundary", MS, native),
            Claim(
                f"fence_over_interval.{path.name}",
                "Fence / longest interval of safe points",
                RATIO,
                aim=_most(retirement.OVER_INTERVAL_AIM),
            ),
            Claim(
                f"longest_interval_over_mean.{path.name}",
                "Longest interval of safe points / mean layer",
                RATIO,
                aim=_most(retirement.OVER_MEAN_AIM),
            ),
            Claim(
                f"interruption_to_successor_ratio.{path.name}",
                "Interruption to successor, native / RETIRE",
                TIMES,
                _PATHS[path.name][1],
            ),
        )
    ),
)

_WORKLOADS = {
    "decode": "Decode of one stream",
    "prefill_1k": "Prefill of 1K",
    "prefill_4k": "Prefill of 4K",
    "mixed": "Eight requests, mixed",
}

IN_USE = "Scopes in use"

OVERHEAD = Chapter(
    "overhead",
    "What it costs who does not use it",
    "Table 11 and §7.2",
    "How much slower is RETIRE than unpatched vLLM when no scope is in use, and what do its checks cost when one is?",
    (
        *(
            Claim(
                f"{cell}_overhead_pct",
                label,
                PERCENT,
                overhead.PAPER[cell].replace("-", "−"),
                Aim(Sense.MEDIAN_AT_MOST, overhead.AIM_PCT, overhead.BOUND_PCT if cell in overhead.BOUNDED else None),
                "Added time, no scope in use",
            )
            for cell, label in _WORKLOADS.items()
        ),
        Claim(
            "advance_p99_ms",
            "Gate to stored word beside eight streams, 99th percentile",
            MS,
            aim=_most(overhead.ADVANCE_AIM_MS),
            group=IN_USE,
        ),
        Claim("advance_p50_ms", "Gate to stored word beside eight streams, median", MS, group=IN_USE),
        Claim("fence_ratio_same_run", "Native boundary / fence, same server", TIMES, "24.0×", group=IN_USE),
        Claim("safe_points_selective", "Safe points, selective arming", POINTS, "1080 points", group=IN_USE),
        Claim("safe_points_always", "Safe points, always armed", POINTS, "35,190 points", group=IN_USE),
        Claim("scoped_ms_per_token_selective", "Time per token, selective arming", MS, group=IN_USE),
        Claim("scoped_ms_per_token_always", "Time per token, always armed", MS, group=IN_USE),
    ),
)

CHURN = Chapter(
    "churn",
    "State after churn",
    "Figure 5 and Table 12",
    "Does a certificate hold while other work turns the whole pool over?",
    (
        *(
            Claim(
                f"{tier}_efficiency",
                f"Unpressured successor / ours, {tier.upper()}",
                RATIO,
                aim=_least(aim),
                group="At the worst point",
            )
            for tier, aim in (("hbm", churn.HBM_AIM), ("dram", churn.DRAM_AIM))
        ),
        *(
            Claim(
                f"worst_{tier}_ratio_vs_native",
                f"Ours / native prefix cache, {tier.upper()}",
                RATIO,
                paper,
                _most(churn.NATIVE_AIM),
                "At the worst point",
            )
            for tier, paper in (("hbm", "1.002×"), ("dram", "2.0×"))
        ),
        *(
            claim
            for tier, best, whole in (("hbm", "6.87×", "1.190×"), ("dram", "3.84×", "1.121×"))
            for claim in (
                Claim(f"{tier}_best_speedup", f"Recovery, {tier.upper()}", TIMES, best, group="At the best point"),
                Claim(
                    f"full_interval_speedup/{tier}",
                    f"Full interval, {tier.upper()}",
                    RATIO,
                    whole,
                    group="At the best point",
                ),
            )
        ),
        Claim("certified_tokens", "Certified tokens at every point", TOKENS, "7168 tokens", group="At every point"),
        Claim(
            "blocks_returned", "Blocks given back to the allocator, DRAM", BLOCKS, "512 blocks", group="At every point"
        ),
        Claim("blocks_republished", "Blocks published again, at most", BLOCKS, "448 blocks", group="At every point"),
        Claim("slots_remapped", "Blocks that came back in other slots, at most", BLOCKS, group="At every point"),
        Claim("cold_ms", "Successor in an empty cache", MS, group="At every point"),
    ),
)

BURST = Chapter(
    "burst",
    "Bursts of revisions",
    "Figure 6 and Table 9",
    "Does the server follow when the next revision comes before the last one is cleaned up?",
    (
        Claim("retire_obsolete_tokens", "Obsolete tokens, RETIRE, all scales", TOKENS, "0 tokens", _all_of(0)),
        Claim("native_obsolete_tokens", "Obsolete tokens, native abort", TOKENS, "40,499 tokens"),
        Claim("retire_final", "Final versions that spoke, RETIRE", count("versions"), "9 of 9", _all_of("final_total")),
        Claim("native_final", "Final versions that spoke, native abort", count("versions"), "3 of 9"),
        Claim("goodput_ratio", "Current-version tokens per second, RETIRE / best native", TIMES, "5.53×", _least(5.53)),
        Claim("cleanup_p99_intervals", "Cleanup in intervals of safe points, 99th percentile", RATIO, "1.08 ms"),
    ),
)

RATES = Chapter(
    "rates",
    "Revision rates",
    "A.2.2",
    "Which policy gives the most current-version output at which rate of revisions?",
    (
        Claim(
            "selector_within_2pct",
            "Cells where the selector is within 2 % of the better quantum",
            count("cells"),
            "follows",
            _all_of("cells"),
        ),
        Claim(
            "worst_selector_ratio",
            "Selector / better quantum, worst cell",
            RATIO,
            "follows",
            _least(rates.WITHIN_AIM),
        ),
        Claim(
            "native_quantum_as_paper",
            "Cells where native's better quantum is the paper's",
            count("cells"),
            "large at 0 and 0.05, small at 0.2",
        ),
        Claim("retire_obsolete_tokens", "Obsolete tokens, RETIRE, all runs", TOKENS, "0 tokens", _all_of(0)),
        Claim("native_obsolete_tokens", "Obsolete tokens, native abort, all runs", TOKENS),
        Claim("points", "Runs", POINTS, "108 points"),
    ),
)

REPLAY = Chapter(
    "replay",
    "Recorded interruptions, replayed",
    "Figure 6 and Table 9",
    "What became of every version of a trace on this server, and what did old work cost?",
    (
        Claim("retire_obsolete_tokens", "Obsolete tokens, RETIRE", TOKENS, "0 tokens"),
        Claim("native_obsolete_tokens", "Obsolete tokens, native abort", TOKENS, "40,499 tokens"),
        Claim("retire_final", "Final versions that spoke, RETIRE", count("versions"), "9 of 9"),
        Claim("native_final", "Final versions that spoke, native abort", count("versions"), "3 of 9"),
        Claim("final_total", "Final versions in the trace", count("versions"), "9 versions"),
        Claim("goodput_ratio", "Current-version tokens per second, RETIRE / native", TIMES, "5.53×"),
        Claim("cleanup_p99_intervals", "Cleanup in intervals of safe points, 99th percentile", RATIO, "1.08 ms"),
    ),
)

DISTRIBUTED = Chapter(
    "distributed",
    "Several workers",
    "Table 6",
    "Does one transition close every participating worker?",
    tuple(
        claim
        for name, label, fence, saved in (
            ("tp2", "TP 2", 12.19, 5.78),
            ("tp4", "TP 4", 10.57, 5.27),
            ("tp2pp2", "TP 2 × PP 2", 6.04, 7.08),
        )
        for claim in (
            Claim(f"fence_ratio.{name}", "Native boundary / fence", TIMES, TIMES.exact(fence), _least(fence), label),
            Claim(
                f"inheritance_speedup.{name}", "Cold / inherited TTFT", TIMES, TIMES.exact(saved), _least(saved), label
            ),
        )
    ),
)

TENANTS = Chapter(
    "tenants",
    "Another tenant",
    "§7.4 and A.3",
    "What is a supersede of one tenant to another?",
    (
        Claim(
            "b_itl_ratio_bound95",
            "B's inter-token time, supersede / native abort: one-sided 95 % bound",
            RATIO,
            "1.010× (median)",
            _most(tenants.AIM),
        ),
        Claim("b_itl_ratio", "The same, median", RATIO, "1.010×"),
        Claim("b_blocks_unchanged", "B's block ids unchanged", paper="3 of 3"),
        Claim("b_digest_unchanged", "B's pages unchanged", paper="3 of 3"),
        Claim("b_gap_p99_ms", "B's longest gap, supersede, 99th percentile", MS, "changed by 1.8 %"),
        Claim("b_gap_p99_ms_native", "B's longest gap, native abort, 99th percentile", MS),
        Claim(
            "zero_quota_cold",
            "Zero quota: cold, nothing inherited, equal to clean",
            TRIALS,
            "3 of 3",
            _all_of("zero_quota_trials"),
        ),
    ),
)

HISTORIES = Chapter(
    "histories",
    "Histories from outside",
    "A.1",
    "Can clients see a broken promise while the server's processes are stopped and killed?",
    (
        Claim("linearizable", "Some order explains every answer"),
        Claim("revoked_frames_client", "Revoked frames through the client", count("frames"), aim=_all_of(0)),
        Claim("revoked_frames_raw_over_bound", "The same, raw, beyond the bound", count("frames"), aim=_all_of(0)),
        Claim("versions_not_as_stated", "Versions of which more came than is stated", aim=_all_of(0)),
        Claim("keys_answered_differently", "Idempotency keys with several answers", aim=_all_of(0)),
        Claim("operations", "Operations"),
        Claim("frames", "Frames read", count("frames")),
        Claim("scopes", "Scopes"),
        Claim("kills", "Kills"),
        Claim("pauses", "Pauses"),
        Claim("unknown_outcomes", "Operations whose outcome nobody was told"),
    ),
)

CHAPTERS = (
    PUBLICATION,
    CORRECTNESS,
    COMPOSITION,
    INHERITANCE,
    RETIREMENT,
    OVERHEAD,
    CHURN,
    BURST,
    RATES,
    REPLAY,
    DISTRIBUTED,
    TENANTS,
    HISTORIES,
)
"""In the paper's order."""
