"""`retire:*` metrics beside vLLM's own.  Never labelled by scope."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Histogram

from retire.core.types import Stage
from retire.server.transitions import Transition

SUPERSEDES = Counter("retire:supersedes", "Epochs advanced")
OUTCOMES = Counter("retire:transitions_closed", "Transitions closed", ["outcome"])
REFUSALS = Counter("retire:certificates_refused", "Successors that started without a certificate", ["reason"])
INHERITED = Counter("retire:inherited_tokens", "Tokens whose KV a successor adopted")
SUPPRESSED = Counter("retire:frames_suppressed", "Frames of a revoked epoch stopped at the last gate")
SAFE_POINTS = Counter("retire:safe_points", "Safe points that workers passed in scoped steps")
ADVANCE_SECONDS = Histogram(
    "retire:advance_seconds",
    "From a supersede's arrival at the gate to the stored word",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1, 1),
)
FENCE_SECONDS = Histogram(
    "retire:fence_seconds",
    "From ADVANCE to where no obsolete row was computed any more",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)


def observe(fact: dict[str, Any], record: Transition | None) -> None:
    """Count what a fact says; `record`: of the transition that it is about, if that is known."""
    if fact["kind"] == "safe_points":
        SAFE_POINTS.inc(fact["count"])
    elif record is not None:
        _observe(fact, record)


def _observe(fact: dict[str, Any], record: Transition) -> None:
    match fact["kind"]:
        case "stage" if fact["stage"] == Stage.FENCE.value:
            FENCE_SECONDS.observe((record.fence_ms() or 0.0) / 1000)
        case "refused":
            REFUSALS.labels(fact["refusal"]).inc()
        case "closed":
            OUTCOMES.labels(fact["outcome"]).inc()
            INHERITED.inc(record.inherited_tokens)
