"""The transition protocol without I/O: facts in, requests out, standard library only.

`step(state, event, env)` is all of it.  Events are in `events`, effects in `effects`, the values they speak of in
`types`; `check(state)` proves a state sound.
"""

from .certificate import Geometry, best, boundary, certify, common_prefix, promised
from .effects import Effect
from .events import Event
from .invariants import Invariant, check
from .transition import TABLE, ScopeState, Transition, mermaid, step

__all__ = [
    "TABLE",
    "Effect",
    "Event",
    "Geometry",
    "Invariant",
    "ScopeState",
    "Transition",
    "best",
    "boundary",
    "certify",
    "check",
    "common_prefix",
    "mermaid",
    "promised",
    "step",
]
