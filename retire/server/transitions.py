"""Records of transitions, as the API process knows them.

Owns: what `GET /transitions/{id}` tells.  Fed by the ADVANCE it made itself, the engine's facts, and the gate.
Must not know: how any of these come about.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any

from retire.core.types import Contract, Epoch, ScopeId, Stage, TenantId, TransitionId

KEPT = 4096


@dataclass
class Transition:
    """One transition.  Stage times are monotonic ns; `first_frame_ns` is the first publication of the successor.

    `obsolete_closed_ns`: of the receipts so far, the last time at which a row was computed that nobody had a use for.
    `advance_took_ns`: from the call's arrival at the gate to the stored word, None where another life stored it.
    """

    id: TransitionId
    tenant: TenantId
    scope: ScopeId
    old_epoch: Epoch
    new_epoch: Epoch
    reason: str | None
    contract: Contract
    advanced_ns: int
    advance_took_ns: int | None = None
    published: list[dict[str, Any]] = field(default_factory=list)
    receipts: list[dict[str, Any]] = field(default_factory=list)
    obsolete_closed_ns: int = 0
    ended_ns: dict[Stage, int] = field(default_factory=dict)
    moved_ns: dict[str, int] = field(default_factory=dict)  # to and from host memory
    certificate: dict[str, Any] | None = None
    refusal: str | None = None
    adopted_blocks: list[list[int | None]] | None = None
    outcome: str | None = None
    first_frame_ns: int | None = None
    fenced: asyncio.Event = field(default_factory=asyncio.Event)

    def learn(self, fact: dict[str, Any]) -> None:
        """Take in one fact of the engine."""
        match fact["kind"]:
            case "stage":
                stage, ended_ns = Stage(fact["stage"]), fact["at_ns"]
                if stage is Stage.FENCE:  # a step whose useful rows went on told of it at its end only
                    ended_ns = self.obsolete_closed_ns or ended_ns
                    self.fenced.set()
                self.ended_ns.setdefault(stage, ended_ns)
            case "receipt":
                obsolete_closed_ns = max(self.advanced_ns, fact["obsolete_closed_ns"] or fact["at_ns"])
                self.obsolete_closed_ns = max(self.obsolete_closed_ns, obsolete_closed_ns)
                self.receipts.append(
                    {
                        "request": fact["request"],
                        "stopped": fact["stopped"],
                        "choice": fact["choice"],
                        "layer": fact["layer"],
                        "phase": fact["phase"],
                        "cost_row_layers": fact["cost"],
                        "obsolete_closed_ms": _ms(obsolete_closed_ns - self.advanced_ns),  # 0: before, or at once
                        "frontier_tokens": fact["frontier_tokens"],
                        "safe_points": fact["safe_points"],
                        "longest_interval_ms": _ms(fact["longest_interval_ns"]),
                    }
                )
            case "certificate":
                self.certificate = {
                    key: fact[key]
                    for key in ("tokens", "source", "target", "fingerprint", "tier", "blocks", "generations")
                }
            case "adopted":
                self.adopted_blocks = fact["blocks"]
            case "refused":
                self.refusal = fact["refusal"]
                self.certificate = None
            case "offloaded" | "restored":
                self.moved_ns[fact["kind"]] = fact["at_ns"]
            case "closed":
                self.outcome = fact["outcome"]
                self.fenced.set()

    @property
    def inherited_tokens(self) -> int:
        """Tokens whose blocks the successor's table was seen to hold."""
        return self.certificate["tokens"] if self.certificate and self.adopted_blocks else 0

    def fence_ms(self) -> float | None:
        """ms from ADVANCE to where no obsolete row was computed any more, None while a receipt is out."""
        ended = self.ended_ns.get(Stage.FENCE)
        return None if ended is None else _ms(ended - self.advanced_ns)

    def accepted(self) -> dict[str, Any]:
        """The part that never changes."""
        return {
            "id": self.id,
            "scope": self.scope,
            "old_epoch": self.old_epoch,
            "new_epoch": self.new_epoch,
            "reason": self.reason,
            "accepted": True,
        }

    def info(self) -> dict[str, Any]:
        """Everything known now."""
        contract = self.contract
        stages = {stage.value: _ms(ns - self.advanced_ns) for stage, ns in self.ended_ns.items()}
        stages |= {moved: _ms(ns - self.advanced_ns) for moved, ns in self.moved_ns.items()}
        stages[Stage.ADVANCE.value] = 0.0
        if self.first_frame_ns is not None:
            stages["first_frame"] = _ms(self.first_frame_ns - self.advanced_ns)
        return {
            **self.accepted(),
            "contract": {
                "inherit": contract.inherit.value,
                "equivalence": contract.equivalence.value,
                "keep_prefix": contract.keep_prefix_tokens,
                "deadline_ms": contract.deadline_ms,
                "retain": {"tier": contract.tier.value, "ttl_s": contract.ttl_ms / 1000},
            },
            "fenced": Stage.FENCE in self.ended_ns,
            "reclaimed": Stage.RECLAIM in self.ended_ns,
            "closed": self.outcome is not None,
            "outcome": self.outcome,
            "advance_ms": None if self.advance_took_ns is None else _ms(self.advance_took_ns),
            "stages": dict(sorted(stages.items(), key=lambda item: item[1])),
            "receipts": self.receipts,
            "certificate": self.certificate,
            "refusal": self.refusal,
            "adopted_blocks": self.adopted_blocks,
            "inherited_tokens": self.inherited_tokens,
            "published": self.published,
        }


class _Records:
    """One tenant's: nobody's records push out another's."""

    def __init__(self) -> None:
        self.by_id: OrderedDict[TransitionId, Transition] = OrderedDict()
        self.latest: dict[ScopeId, TransitionId] = {}
        self.open: dict[ScopeId, TransitionId] = {}  # scopes whose latest transition is open


class Transitions:
    """The latest `KEPT` records of each tenant."""

    def __init__(self) -> None:
        self._tenants: defaultdict[TenantId, _Records] = defaultdict(_Records)
        self._owners: dict[TransitionId, TenantId] = {}  # the engine's facts name the transition only

    def add(self, record: Transition, *, open_: bool) -> None:
        """A new record; the tenant's oldest beyond the bound is forgotten.  `open_`: the engine will say it closed."""
        records = self._tenants[record.tenant]
        records.by_id[record.id] = record
        records.latest[record.scope] = record.id
        if open_:
            records.open[record.scope] = record.id
        self._owners[record.id] = record.tenant
        while len(records.by_id) > KEPT:
            old_id, old = records.by_id.popitem(last=False)
            del self._owners[old_id]
            for known in (records.latest, records.open):
                if known.get(old.scope) == old_id:
                    del known[old.scope]

    def get(self, tenant: TenantId, transition: str) -> Transition | None:
        """The tenant's record of that id."""
        return self._tenants[tenant].by_id.get(TransitionId(transition))

    def of_scope(self, tenant: TenantId, scope: ScopeId) -> Transition | None:
        """The scope's latest record."""
        records = self._tenants[tenant]
        found = records.latest.get(scope)
        return None if found is None else records.by_id[found]

    def open_beside(self, tenant: TenantId, scope: str) -> int:
        """How many other scopes of the tenant have an open transition; the scope's own would be overtaken."""
        return sum(1 for other in self._tenants[tenant].open if other != scope)

    def learn(self, fact: dict[str, Any]) -> Transition | None:
        """Hand a fact to its record."""
        record = self._about(fact)
        if record is not None:
            record.learn(fact)
            known = self._tenants[record.tenant].open
            if record.outcome is not None and known.get(record.scope) == record.id:
                del known[record.scope]
        return record

    def _about(self, fact: dict[str, Any]) -> Transition | None:
        if fact["transition"] is not None:
            transition = TransitionId(fact["transition"])
            owner = self._owners.get(transition)
            return None if owner is None else self._tenants[owner].by_id[transition]
        if "scope" not in fact:
            return None
        told = (fact["scope"], fact["epoch"])
        records = reversed(self._tenants[fact["tenant"]].by_id.values())
        return next((record for record in records if (record.scope, record.old_epoch) == told), None)


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)


def now_ns() -> int:
    """The clock of every stage time: CLOCK_MONOTONIC, shared by all processes of the host."""
    return time.monotonic_ns()
