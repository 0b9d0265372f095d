"""The named worlds.

Owns: what each holds and how large that is allowed to be.  What none of them has is said in docs/EXPLORATION.md.
"""

from __future__ import annotations

from harness.exploration.world import World

# Two blocks and a token more.  The second keeps the first block, the third both of the second's.
PLAN = ((1, 2, 3, 4, 5), (1, 2, 6, 7, 8), (1, 2, 6, 7, 9))
# One block and a token more, which every version keeps.
SHORT = ((1, 2, 3), (1, 2, 4), (1, 2, 5))
# The second keeps nothing of the first.
ANOTHER = ((1, 2, 3), (7, 8, 9))
DEATHS = ("engine", "api", "host")

SMALL = (
    World("losses", (SHORT,), ("acme",), losses=True, contracts=("certified", "none"), blocks=2),
    World("repeats", (PLAN[:2],), ("acme",), participants=2, echoes=True),
    World("participants", (PLAN[:2],), ("acme",), participants=2, losses=True),
    World("deaths", (SHORT[:2],), ("acme",), losses=True, crashes=DEATHS, faults=1, blocks=2),
    World("host memory", (PLAN[:2],), ("acme",), contracts=("dram",), host_memory=True, blocks=2, expiry=True),
    World("nothing in common", (ANOTHER,), ("acme",), losses=True, expiry=True, blocks=2),
    World("cancellation", (SHORT[:2],), ("acme",), losses=True, echoes=True, cancels=True, blocks=2),
    World("two tenants", (SHORT[:2], SHORT[:1]), ("acme", "initech"), blocks=2),
    World("one tenant", (SHORT[:2], SHORT[:1]), ("acme", "acme"), blocks=2),
)
"""Exhausted by the tests."""

LARGE = (
    World("two tenants revise", (SHORT[:2], SHORT[:2]), ("acme", "initech"), blocks=2),
    World("one tenant revises two", (SHORT[:2], SHORT[:2]), ("acme", "acme"), blocks=2),
    World("three epochs", (PLAN,), ("acme",), contracts=("certified", "none")),
    World("losses and repeats", (SHORT,), ("acme",), losses=True, echoes=True, blocks=2),
    World("three epochs, deaths", (SHORT,), ("acme",), crashes=DEATHS, faults=1, blocks=2),
    World("two deaths", (SHORT[:2],), ("acme",), losses=True, crashes=DEATHS, faults=2, blocks=2),
    World("two tenants, losses", (SHORT[:2], SHORT[:2]), ("acme", "initech"), losses=True, blocks=2),
)
"""On demand: minutes each, and gigabytes."""
