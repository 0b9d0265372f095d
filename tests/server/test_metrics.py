"""What facts do to the `retire:*` metrics, without a server."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY

from retire.core.types import Contract, Epoch, ScopeId, TenantId, TransitionId
from retire.server import metrics
from retire.server.transitions import Transition, Transitions

SAFE_POINTS, FENCES = "retire:safe_points_total", "retire:fence_seconds_count"


def value(name: str) -> float:
    return REGISTRY.get_sample_value(name) or 0.0


def told(transitions: Transitions, fact: dict[str, Any]) -> None:
    metrics.observe(fact, transitions.learn(fact))


def test_safe_points_are_counted_whosever_they_were() -> None:
    before = value(SAFE_POINTS)
    for count in (3, 4):
        told(Transitions(), {"transition": None, "kind": "safe_points", "at_ns": 1, "count": count})
    assert value(SAFE_POINTS) == before + 7


def test_a_fact_about_a_transition_that_nobody_knows_counts_nothing() -> None:
    before = value(FENCES)
    fact = {"transition": "00", "kind": "stage", "stage": "fence", "at_ns": 2}
    transitions = Transitions()
    told(transitions, fact)
    assert value(FENCES) == before
    known = Transition(
        TransitionId("00"), TenantId("t"), ScopeId("s"), Epoch(1), Epoch(2), None, Contract(), advanced_ns=1
    )
    transitions.add(known, open_=True)
    told(transitions, fact)
    assert value(FENCES) == before + 1
