"""Results as `retire bench --json` writes them, made up; numbers near those that were seen once."""

from __future__ import annotations

import copy
import json
import random

PACES = (None, 1.0, 0.1, 0.0)
STEPS, SHARES, OVERLAPS = (1, 2, 4), (0.1, 0.4, 0.7, 0.95), (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


def document(bench, summary, cells, *, targets=None, checks=None, **manifest):
    told = {
        "cells": cells,
        "summary": summary,
        "checks": {"every_answer_is_whole": True, "nothing_left": True} if checks is None else checks,
        "manifest": {
            "bench": bench,
            "quick": False,
            "commit": "0123456789abcdef0123456789abcdef01234567",
            "dirty": False,
            "pins": "db65d160952203da",
            "model": "smollm2",
            "vllm": "0.32.0",
            "torch": "2.13.0",
            "python": "3.11.7",
            "cpu": "A processor",
            "cores": 2,
            "memory_bytes": 24 << 30,
            "date": "2026-11-30T12:00:00+00:00",
            **manifest,
        },
    }
    return told if targets is None else {**told, "targets": targets}


def cell(bench, arms, **where):
    return {"cell": {"bench": bench, **where}, "arms": arms}


def figure(key, value, low=None, high=None):
    return {key: value, f"{key}_ci95": [value * 0.95 if low is None else low, value * 1.05 if high is None else high]}


def near(draw, value, count):
    return [value * draw.uniform(0.9, 1.12) for _ in range(count)]


def churn(draw):
    held = {0.5: 7168, 0.75: 5632, 0.8: 4736, 0.85: 4736, 0.9: 3840, 0.95: 2944, 1.0: 2048, 1.05: 1152, 1.1: 0}
    cells = []
    for share, tokens in held.items():
        native = 2500 + (7168 - tokens) * 1.4
        arms = {
            arm: {
                "recovery_ms": near(draw, took, 3),
                "full_interval_ms": [took + 9000] * 3,
                "reused_tokens": [left] * 3,
            }
            for arm, took, left in (
                ("native_prefix", native, tokens),
                ("hbm", 2500, 7168.0),
                ("dram", 2580, 7168.0),
                ("limit", 2480, 7168.0),
            )
        }
        cells.append(cell("churn", arms, share=share, pool_blocks=136, block_tokens=128))
    summary = {
        "rounds": 3,
        **figure("hbm_efficiency", 0.975, 0.968, 1.007),
        **figure("dram_efficiency", 0.963, 0.952, 1.004),
        **figure("worst_hbm_ratio_vs_native", 0.986, 0.973, 0.999),
        **figure("worst_dram_ratio_vs_native", 0.994, 0.971, 1.031),
        "hbm_best_speedup": 4.92,
        "dram_best_speedup": 4.64,
        "full_interval_speedup": {"hbm": 1.43, "dram": 1.46},
        "certified_tokens": 7168,
        "blocks_returned": 63.0,
        "cold_ms": 19000.5,
    }
    return document("churn", summary, cells)


def composition(draw):
    took = {
        "native_cold": (21500, 0),
        "native_prefix": (8700, 4096),
        "invalidate": (16100, 0),
        "inherit": (8800, 7168),
        "combined": (10100, 4096),
        "trim": (7500, 7168),
    }
    arms = {arm: {"ttft_ms": near(draw, ms, 5), "reused_tokens": [kept] * 5} for arm, (ms, kept) in took.items()}
    where = {"tokens": 8000, "quantum": 4096, "step": 2, "share": 0.4, "overlap": 0.9}
    ratios = [
        {
            "step": step,
            "share": share,
            "overlap": overlap,
            "ratio": (ratio := draw.uniform(0.62, 1.05)),
            "ratio_ci95": [ratio - 0.04, ratio + 0.04],
            "pairs": 12 if ratio >= 1 else 3,
            "p_holm_above_1_02": 0.004 if ratio > 1.04 else 1.0,
        }
        for step in STEPS
        for share in SHARES
        for overlap in OVERLAPS
        if (step, share, overlap) != (4, 0.95, 1.0)
    ]
    summary = {
        **figure("reduction_vs_native_cold.prefix", 0.594),
        **figure("reduction_vs_native_cold.invalidate", 0.25),
        **figure("reduction_vs_native_cold.inherit", 0.59),
        **figure("reduction_vs_native_cold.combined", 0.53),
        **figure("reduction_vs_native_cold.trim", 0.652, 0.631, 0.668),
        "grid_cells": 72,
        "grid_cells_counted": 71,
        "grid_cells_failing": 2,
        "worst_ratio_vs_best_native": 1.049,
        "median_ratio_vs_best_native": 0.88,
        "ratios": ratios,
    }
    return document("composition", summary, [cell("composition", arms, **where)])


def inheritance(draw):
    def certified():
        ttft = draw.uniform(96, 118)
        ends = {"advance": 0.0, "fence": 9.0, "align": 12.5, "resume": 14.0, "reclaim": 14.1, "first_frame": ttft - 6}
        return {"ttft_ms": ttft} | {f"{stage}_ms": at for stage, at in ends.items()}

    cells = []
    for offset in (4, 16, 64):
        rows = [certified() for _ in range(5)]
        arms = {
            "cold": {"ttft_ms": near(draw, 4100, 5)},
            "certified": {metric: [row[metric] for row in rows] for metric in rows[0]},
            "native_full_hit": {"ttft_ms": near(draw, 140, 5)},
        }
        cells.append(cell("inheritance", arms, offset_tokens=offset, prefix_tokens=4096))
    summary = {
        **figure("speedup", 39.3, 35.6, 47.6),
        **figure("full_hit_ratio", 0.742, 0.628, 0.993),
        "prefix_tokens": 4096,
        "trials": 15,
    }
    targets = [
        {"key": "speedup", "paper": "33.8×", "aim": "≥ 34", "verdict": "reached"},
        {"key": "full_hit_ratio", "paper": "within 1.02", "aim": "≤ 1.02", "verdict": "reached"},
    ]
    return document("inheritance", summary, cells, targets=targets)


def retirement(draw):
    paths = {
        "long_prefill": (4096, 4200, 45, 24.9),
        "draft_verify_prefill": (4096, 3900, 30, 51.3),
        "active_spec_decode": (4096, 190, 14, 9.99),
        "two_kv_groups": (4000, 2100, 260, 7.01),
        "tail_1024": (1024, 900, 41, 0),
        "tail_2048": (2048, 2000, 43, 0),
    }
    cells, summary = [], {}
    for path, (quantum, native, fence, _) in paths.items():
        boundary = [native * draw.uniform(0.05, 1.9) for _ in range(12)]
        closed = near(draw, fence, 12)
        arms = {
            "native": {
                "closed_ms": boundary,
                "step_ms": [native * 2.0] * 12,
                "successor_ms": near(draw, native + 900, 12),
            },
            "retire": {"closed_ms": closed, "longest_interval_ms": closed, "successor_ms": near(draw, 900, 12)},
        }
        cells.append(cell("retirement", arms, path=path, tokens=8000, quantum=quantum))
        if not path.startswith("tail"):
            summary |= {
                f"fence_ms.{path}": fence,
                f"native_ms.{path}": native,
                **figure(f"fence_ratio.{path}", native / fence, native / fence * 0.7, native / fence * 1.4),
                f"fence_over_interval.{path}": 1.12,
                f"longest_interval_over_mean.{path}": 1.41,
                f"interruption_to_successor_ratio.{path}": 1.9,
            }
    return document("retirement", summary, cells)


def overhead(draw):
    summary = {
        **figure("decode_overhead_pct", 0.61, 0.21, 1.02),
        **figure("prefill_1k_overhead_pct", -0.44, -2.4, 1.9),
        **figure("prefill_4k_overhead_pct", 0.31, -0.35, 0.92),
        **figure("mixed_overhead_pct", 0.2, -0.9, 1.4),
        "advance_p99_ms": 1.496,
        "advance_p50_ms": 0.29,
        "fence_ratio_same_run": 63.5,
        "safe_points_selective": 23899,
        "safe_points_always": 24263,
        "scoped_ms_per_token_selective": 51.4,
        "scoped_ms_per_token_always": 54.3,
    }
    arms = {"native": {"ms": near(draw, 50, 8)}, "idle": {"ms": near(draw, 50, 8)}}
    return document("overhead", summary, [cell("overhead", arms, cell="decode", quantum=1024)], quick=True)


def publication(draw):
    most = {None: 87, 1.0: 64, 0.1: 33, 0.0: 1}
    cells = [
        cell(
            "publication",
            {
                "native_abort": {"stale_tokens": [draw.randrange(60) for _ in range(4)], "stale_frames": [1] * 4},
                "native_close": {"stale_tokens": [2, 0, 1, 0], "stale_frames": [2, 0, 1, 0]},
                "retire_raw": {"stale_tokens": [most[pace]] * 4, "stale_frames": [most[pace], 0, 1, 2]},
                "retire_client": {"stale_tokens": [0] * 4, "stale_frames": [0] * 4},
            },
            pace_s=pace,
        )
        for pace in PACES
    ]
    summary = {
        "trials": 16,
        "native_stale_tokens": 255,
        "native_close_stale_tokens": 12,
        "retire_raw_stale_frames_max": 87,
        "retire_raw_stale_tokens": 740,
        "client_stale_tokens": 0,
        "client_dropped_tokens": 254,
        "stated_bound_frames": 101,
    }
    return document("publication", summary, cells)


def correctness(_draw):
    summary = {
        "configs": 10,
        "configs_equal": 10,
        "configs_equal_by_mode": {"mode_matched": 10, "exact": 10},
        "measurements": 120,
        "measurements_planned": 120,
        "faults": 3,
        "faults_seen": 3,
        "repaired_exact": 2,
        "refused": {},
    }
    checks = {"fault_is_seen": True, "fault_is_repaired_exactly": False}
    return document("correctness", summary, [], checks=checks)


def tenants(draw):
    arms = {
        arm: {"itl_ms": near(draw, 60, 9), "longest_gap_ms": near(draw, 900, 9)}
        for arm in ("supersede", "native_abort")
    }
    summary = {
        "b_blocks_unchanged": True,
        "b_digest_unchanged": True,
        "b_itl_ratio": 0.943,
        "b_itl_ratio_bound95": 0.972,
        "b_itl_ratio_by_kept": {"128/768": 0.86, "384/768": 0.94, "640/768": 1.01},
        "b_gap_p99_ms": 1296.0,
        "b_gap_p99_ms_native": 1322.0,
        "zero_quota_cold": 3,
        "zero_quota_trials": 3,
    }
    return document("tenants", summary, [cell("tenants", arms, quantum=256)])


def burst(draw):
    begins = (8.0, 52.0, 97.0)

    def replay(stays_s):
        """Eight revisions a burst and scope; an obsolete execution lives on for so long."""
        at = [(0.0, 1, 0)]
        for begin in begins:
            for number in range(8):
                when = begin + number * 0.9
                at += [(when, 0, 1), (when + stays_s * draw.uniform(0.8, 1.2), 0, -1)]
        changes, current, obsolete = [], 0, 0
        for when, one, other in sorted(at):
            current, obsolete = current + one * 3, obsolete + other
            changes.append([when, current, obsolete])
        return [change for change in changes if change[0] <= 120]

    def arm(goodput, obsolete, final, cleanup, stays_s):
        return {
            "goodput_tokens_per_s": [goodput * 0.97, goodput, goodput * 1.04],
            "obsolete_tokens": [obsolete] * 3,
            "final_versions": [final] * 3,
            "cleanup_ms": [cleanup] * 3,
            "live": [replay(stays_s) for _ in range(3)],
        }

    arms = {"native_1024": arm(4.2, 9120, 4, 41000.0, 38.0), "selective_1024": arm(21.7, 0, 9, 31.0, 0.03)}
    summary = {
        "retire_obsolete_tokens": 0,
        "native_obsolete_tokens": 9120,
        "retire_final": 9,
        "native_final": 4,
        "final_total": 9,
        **figure("goodput_ratio", 5.2, 4.6, 5.9),
        "cleanup_p99_intervals": 1.1,
    }
    where = {"window_s": 120, "scopes": 3, "bursts_s": list(begins)}
    return document("burst", summary, [cell("burst", arms, **where)])


def rates(draw):
    policies = ("native_64", "native_512", "selective_64", "selective_512", "rate")
    cells, by_cell = [], {}
    for concurrency in (4, 8):
        for rate in (0, 0.05, 0.2):
            arms = {
                policy: {"goodput_tokens_per_s": near(draw, 40 + 9 * number - 60 * rate, 3)}
                for number, policy in enumerate(policies)
            }
            cells.append(cell("rates", arms, revisions_per_scope_per_s=rate, concurrency=concurrency))
            by_cell[f"by_cell.rate_{rate:g}_scopes_{concurrency}"] = {
                "revisions_per_scope_per_s": rate,
                "concurrency": concurrency,
                "best_native": "native_512",
                "best_selective": "selective_512",
                **figure("selector_ratio", 1.0 - rate / 4, 0.93, 1.04),
                "selector_quantum_tokens": 512.0 if rate < 0.2 else 97.5,
            }
    summary = {
        "selector_within_2pct": 4,
        "cells": 6,
        **figure("worst_selector_ratio", 0.95, 0.93, 0.99),
        "worst_cell": "rate_0.2_scopes_8",
        "native_quantum_as_paper": 6,
        "retire_obsolete_tokens": 0,
        "native_obsolete_tokens": 411,
        "points": 90,
        **by_cell,
    }
    return document("rates", summary, cells)


def replay(draw):
    """As `retire replay` writes it: the figures of a burst, and every version."""
    (bursts,) = burst(draw)["cells"]
    arms = {arm.partition("_")[0].replace("selective", "retire"): metrics for arm, metrics in bursts["arms"].items()}
    versions = {arm: {"versions": [{"trial": 0, "scope": 1, "version": 1, "status": 200}]} for arm in arms}
    summary = {
        "retire_obsolete_tokens": 0,
        "native_obsolete_tokens": 31,
        "retire_final": 12,
        "native_final": 11,
        "final_total": 12,
        "goodput_ratio": 1.31,
        "cleanup_p99_intervals": 1.02,
        "goodput_tokens_per_s.native": [8.1],
    }
    where = {key: value for key, value in bursts["cell"].items() if key != "bench"}
    cells = [cell("replay", arms, speed=30.0, **where), cell("replay", versions, what="versions")]
    return document("replay", summary, cells, targets=[])


BENCHES = {
    one.__name__: one
    for one in (
        churn,
        composition,
        inheritance,
        retirement,
        overhead,
        publication,
        correctness,
        tenants,
        burst,
        rates,
        replay,
    )
}


def results():
    """One of every bench; the same every time."""
    return {bench: copy.deepcopy(make(random.Random(bench))) for bench, make in BENCHES.items()}


def write(folder, documents=None):
    """As files; returns the folder."""
    for bench, told in (results() if documents is None else documents).items():
        (folder / f"{bench}.json").write_text(json.dumps(told), encoding="utf-8")
    return folder
