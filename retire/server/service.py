"""Authority changes, as the API process makes them.

Owns: the one place where a supersede happens (header, body or `POST /supersede` all come here), the live streams per
scope, the records, and the messages to and from the engine.
Must not know: ASGI.  Strategy: the store first; everything after it is telling those concerned.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from retire.authority.store import Authority, ScopeView
from retire.core.errors import EngineError, NotFound, OverLimit, Unsupported
from retire.core.types import Contract, Epoch, Inherit, ScopeId, Stage, TenantId, TransitionId
from retire.server import metrics, outlet
from retire.server.transitions import Transition, Transitions, now_ns
from retire.settings import Settings
from retire.tenants import Registry

_log = logging.getLogger("vllm.retire")
FENCE_WAIT_S = 60.0
SETTLED_SCOPES = 4096
SALTED_SCOPES = 65_536

Utility = Callable[..., Awaitable[Any]]


class LiveStream(Protocol):
    """What the service asks of a response in flight."""

    epoch: Epoch

    def revoke(self, superseded_by: int | None, fenced: asyncio.Event | None) -> bool:
        """The epoch has lost authority: end now.  `fenced` will tell when no row of it is computed any more.

        False: it had lost it already.
        """

    def promise(self, tokens: int) -> None:
        """The successor starts with so many tokens of this request's."""

    def compare(self, epoch: Epoch, tokens: list[int]) -> None:
        """The first request of `epoch`, which is a later one, starts with these tokens."""

    def published(self) -> dict[str, Any]:
        """Per choice, what has passed the last gate."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """The record, and whether this call made it (False: an idempotency key answered again)."""

    record: Transition
    fresh: bool
    view: ScopeView


@dataclass
class _Household:
    """What is remembered of one tenant's scopes: nobody's pushes out another's."""

    streams: dict[ScopeId, set[LiveStream]] = field(default_factory=dict)
    leaving: dict[ScopeId, set[LiveStream]] = field(default_factory=dict)
    settled: OrderedDict[ScopeId, list[dict[str, Any]]] = field(default_factory=OrderedDict)
    salts: OrderedDict[ScopeId, str] = field(default_factory=OrderedDict)


class Service:
    """One per API process."""

    def __init__(
        self,
        authority: Authority,
        settings: Settings,
        tenants: Registry,
        call_engine: Utility,
        engine_dead: Callable[[], bool],
        serves_model: Callable[[str], bool],
        fingerprint: str | None = None,
    ) -> None:
        self.fingerprint = fingerprint
        self.authority = authority
        self.settings = settings
        self._tenants = tenants
        self.transitions = Transitions()
        self._call_engine = call_engine
        self.engine_dead = engine_dead
        self.serves_model = serves_model
        self._households: defaultdict[TenantId, _Household] = defaultdict(_Household)
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- supersede ------------------------------------------------------------------------------------------------

    def supersede(
        self,
        tenant: TenantId,
        scope: str,
        expected: int | Literal["*"],
        contract: Contract,
        reason: str | None = None,
        idempotency: tuple[str, bytes] | None = None,
        *,
        successor_follows: bool,
        entered_ns: int,
    ) -> Superseded:
        """ADVANCE.  No await between the look and the store, and none before everybody concerned is told.

        `idempotency`: key and the request's bytes.  `successor_follows`: the successor is being submitted by the same
        call, so how much it has in common with its predecessors will be known in a moment (`successor_starts_with`).
        `entered_ns`: when the call came to the gate.

        Raises:
            CallerError: as `Authority.advance`; Unsupported for a key that came with another body; OverLimit.
            EngineError: the engine is gone; authority has not moved.
        """
        digest = hashlib.sha256(idempotency[1]).digest() if idempotency else b""
        number = uuid.uuid4().int
        if idempotency:
            number = _transition_number(tenant, idempotency[0], digest)
            earlier = self._answered(tenant, idempotency[0], digest, reason, contract)
            if earlier is not None:
                return earlier
        self.require_engine(tenant, scope)
        self._require_room(tenant, scope)
        if idempotency:
            self.authority.remember_idempotent(tenant, idempotency[0], digest, transition=number, scope=scope)
        advanced_ns = now_ns()
        advanced = self.authority.advance(tenant, scope, expected, number)
        took_ns = now_ns() - entered_ns
        record = Transition(
            id=TransitionId(f"{number:032x}"),
            tenant=tenant,
            scope=ScopeId(scope),
            old_epoch=advanced.old_epoch,
            new_epoch=advanced.new_epoch,
            reason=reason,
            contract=contract,
            advanced_ns=advanced_ns,
            advance_took_ns=took_ns,
        )
        self._limit_rows(record, successor_follows=successor_follows)
        self.transitions.add(record, open_=True)
        household = self._households[tenant]
        record.published = household.settled.pop(record.scope, [])
        self._revoke_streams(record.tenant, record.scope, superseded_by=advanced.new_epoch, record=record)
        if contract.inherit is Inherit.NONE:
            household.salts[record.scope] = f"retire:{record.id}"
            while len(household.salts) > SALTED_SCOPES:
                household.salts.popitem(last=False)
        self._tell(
            {
                "kind": "advanced",
                "tenant": tenant,
                "scope": scope,
                "transition": record.id,
                "at_ns": advanced_ns,
                "old_epoch": advanced.old_epoch,
                "new_epoch": advanced.new_epoch,
                "contract": {
                    "inherit": contract.inherit.value,
                    "equivalence": contract.equivalence.value,
                    "keep_prefix_tokens": contract.keep_prefix_tokens,
                    "deadline_ms": contract.deadline_ms,
                    "tier": contract.tier.value,
                    "ttl_ms": contract.ttl_ms,
                },
            }
        )
        asyncio.get_running_loop().call_later(contract.lifetime_ms / 1000 + 0.01, self._tell, {"kind": "wake"})
        if idempotency:
            self.authority.remember_idempotent(
                tenant, idempotency[0], digest, transition=number, scope=scope, epoch=advanced.new_epoch
            )
        metrics.SUPERSEDES.inc()
        metrics.ADVANCE_SECONDS.observe(took_ns / 1e9)
        view = ScopeView(
            tenant=tenant, scope=record.scope, epoch=advanced.new_epoch, slot=advanced.slot, raw=advanced.raw
        )
        return Superseded(record, fresh=True, view=view)

    def _answered(
        self, tenant: TenantId, key: str, digest: bytes, reason: str | None, contract: Contract
    ) -> Superseded | None:
        found = self.authority.find_idempotent(tenant, key)
        if found is None:
            return None
        if found.body_hash != digest:
            raise Unsupported("this idempotency key came with another body", param="Idempotency-Key")
        if found.epoch is None:
            return None  # the store may not have happened; advance knows by the transition's id
        record = self.transitions.get(tenant, f"{found.transition:032x}")
        if record is None:  # another process, or a life before this one, made it
            record = Transition(
                id=TransitionId(f"{found.transition:032x}"),
                tenant=tenant,
                scope=ScopeId(found.scope),
                old_epoch=Epoch(found.epoch - 1),
                new_epoch=Epoch(found.epoch),
                reason=reason,  # the body is the same, so these are
                contract=contract,
                advanced_ns=now_ns(),
            )
            record.fenced.set()  # nothing of that life computes any more
            self.transitions.add(record, open_=False)
        view = self.authority.view(tenant, found.scope)
        assert view is not None, "a scope that was superseded is known"
        return Superseded(record, fresh=False, view=view)

    def _require_room(self, tenant: TenantId, scope: str) -> None:
        limit = self._tenants.tenant(tenant).transitions
        if limit is not None and self.transitions.open_beside(tenant, scope) >= limit:
            raise OverLimit(f"the tenant may have {limit} open transitions", param="scope")

    async def wait_fenced(self, record: Transition) -> bool:
        """Whether obsolete rows are closed; waits for the engine to say so, not forever."""
        try:
            await asyncio.wait_for(record.fenced.wait(), FENCE_WAIT_S)
        except TimeoutError:
            return False
        return Stage.FENCE in record.ended_ns

    # -- scopes ---------------------------------------------------------------------------------------------------

    def cancel(self, tenant: TenantId, scope: str) -> ScopeView:
        """Terminal cancellation: no successor.  Raises as `Authority.cancel`."""
        view = self.authority.cancel(tenant, scope)
        self._households[tenant].settled.pop(view.scope, None)
        self._revoke_streams(tenant, view.scope, superseded_by=None, record=None)
        self._tell({"kind": "cancelled", "tenant": tenant, "scope": scope})
        return view

    def set_paused(self, tenant: TenantId, scope: str, paused: bool) -> ScopeView:
        """Keep the scope's requests from being scheduled, or let them go on.  Authority is unchanged."""
        view = self.authority.set_paused(tenant, scope, paused)
        self._tell({"kind": "wake"})
        return view

    def scope(self, tenant: TenantId, scope: str) -> dict[str, Any]:
        """What a tenant may know of its scope.  Raises NotFound."""
        view = self.authority.view(tenant, scope)
        if view is None:
            raise NotFound(f"no scope {scope!r}", param="scope")
        return self.describe(view)

    def describe(self, view: Any) -> dict[str, Any]:
        """A scope as the routes show it."""
        record = self.transitions.of_scope(view.tenant, view.scope)
        return {
            "scope": view.scope,
            "epoch": view.epoch,
            "paused": view.paused,
            "cancelled": view.cancelled,
            "live_requests": len(self.streams(view.tenant, view.scope)),
            "transition": record.id if record else None,
        }

    # -- streams --------------------------------------------------------------------------------------------------

    def streams(self, tenant: TenantId, scope: ScopeId) -> set[LiveStream]:
        """Responses of the scope that are in flight."""
        return self._households[tenant].streams.get(scope, set())

    def attach(self, tenant: TenantId, scope: ScopeId, stream: LiveStream) -> None:
        """A scoped response begins."""
        self._households[tenant].streams.setdefault(scope, set()).add(stream)

    def detach(self, tenant: TenantId, scope: ScopeId, stream: LiveStream, *, ended_by_itself: bool) -> None:
        """A scoped response is over; what it published stays known until the scope advances."""
        household = self._households[tenant]
        group = self.streams(tenant, scope)
        group.discard(stream)
        if not group:
            household.streams.pop(scope, None)
        if ended_by_itself:
            settled = household.settled
            settled.setdefault(scope, []).append(stream.published())
            del settled[scope][:-64]
            settled.move_to_end(scope)
            while len(settled) > SETTLED_SCOPES:
                settled.popitem(last=False)

    def linger(self, tenant: TenantId, scope: ScopeId, stream: LiveStream) -> None:
        """A revoked response has ended; its request may still be computed, until `gone`."""
        self._households[tenant].leaving.setdefault(scope, set()).add(stream)

    def gone(self, tenant: TenantId, scope: ScopeId, stream: LiveStream) -> None:
        """Nothing of it is computed any more."""
        leaving = self._households[tenant].leaving
        leaving[scope].discard(stream)
        if not leaving[scope]:
            del leaving[scope]

    def _computed(self, tenant: TenantId, scope: ScopeId) -> set[LiveStream]:
        """Responses of the scope whose requests may be in a step."""
        return self.streams(tenant, scope) | self._households[tenant].leaving.get(scope, set())

    def successor_starts_with(self, tenant: TenantId, scope: ScopeId, epoch: Epoch, tokens: list[int]) -> None:
        """A request of `epoch` has this prompt: what it has in common with older ones is still worth computing."""
        for stream in self._computed(tenant, scope):
            if stream.epoch < epoch:
                stream.compare(epoch, tokens)

    def _limit_rows(self, record: Transition, *, successor_follows: bool) -> None:
        """What of the revoked requests is still worth computing, as far as the contract says."""
        wanted: int | None = record.contract.keep_prefix_tokens
        if record.contract.inherit is Inherit.NONE or (wanted is None and not successor_follows):
            wanted = 0
        if wanted is not None:
            for stream in self._computed(record.tenant, record.scope):
                if stream.epoch <= record.old_epoch:
                    stream.promise(wanted)

    def _revoke_streams(
        self, tenant: TenantId, scope: ScopeId, *, superseded_by: int | None, record: Transition | None
    ) -> None:
        for stream in list(self.streams(tenant, scope)):
            if record is None or stream.epoch <= record.old_epoch:
                first = stream.revoke(superseded_by, record.fenced if record is not None else None)
                if record is not None and first:
                    record.published.append(stream.published())

    def salt(self, tenant: TenantId, scope: ScopeId) -> str | None:
        """The scope's cache generation: set once a contract said `inherit: none`, None for the common cache."""
        return self._households[tenant].salts.get(scope)

    # -- the engine -----------------------------------------------------------------------------------------------

    def require_engine(self, tenant: TenantId, scope: str) -> None:
        """Raise EngineError, with the epoch that the table holds, when the engine is dead."""
        if self.engine_dead():
            view = self.authority.view(tenant, scope)
            raise EngineError("the engine is gone", current_epoch=view.epoch if view is not None else None)

    def abandon(self, record: Transition) -> None:
        """The client left before its successor reached the engine: nothing is to be kept for it."""
        self._tell({"kind": "abandoned", "tenant": record.tenant, "scope": record.scope, "transition": record.id})

    def stated_backlog(self) -> dict[str, int]:
        """What of a scoped stream may lie behind the last gate on this host: so many frames, and so many bytes."""
        bytes_held = outlet.stated_bytes(self.settings.backlog_bytes)
        return {"frames_in_transport": 1, "bytes_in_send_buffer": bytes_held}

    async def engine_status(self, tenant: TenantId) -> dict[str, dict[str, int]]:
        """What the engine tells.

        `engine`: what it holds for the tenant's scopes right now.  `tier`: what host memory holds and has done.
        `quanta`: how many steps were given which prefill quantum.
        """
        try:
            status: dict[str, dict[str, int]] = await self._call_engine(
                "retire_event", {"kind": "status", "tenant": tenant}
            )
        except Exception as error:
            raise EngineError(f"the engine does not answer: {error}") from error
        return status

    def _tell(self, event: dict[str, Any]) -> None:
        self.spawn(self._send(event))

    async def _send(self, event: dict[str, Any]) -> None:
        try:
            await self._call_engine("retire_event", event)
        except Exception as error:  # noqa: BLE001 - the table holds the truth; the engine may be gone
            _log.warning("retire: the engine did not take %s: %s", event["kind"], error)

    async def follow_engine(self) -> None:
        """Take in the engine's facts for as long as it lives."""
        cursor = 0
        while True:
            try:
                batch = await self._call_engine("retire_facts", cursor)
            except Exception as error:  # noqa: BLE001 - any failure here is the engine's end
                _log.warning("retire: no more facts from the engine: %s", error)
                return
            cursor = batch["cursor"]
            for fact in batch["facts"]:
                try:
                    metrics.observe(fact, self.transitions.learn(fact))
                except Exception:  # noqa: BLE001 - one fact that is not understood must not hide the next
                    _log.exception("retire: could not take in %s", fact)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run beside everything else; kept alive until done."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _transition_number(tenant: TenantId, key: str, digest: bytes) -> int:
    """Who asks again under an idempotency key asks for the same transition; nobody can aim at another tenant's."""
    told = hashlib.sha256(f"{tenant}\0{key}\0".encode() + digest).digest()
    return int.from_bytes(told[:16], "big")
