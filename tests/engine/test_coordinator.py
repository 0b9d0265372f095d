"""The coordinator on a small engine whose block contents can be looked at.

`World` plays both processes: the API side stores in the authority table and sends messages that arrive when the test
says so; the engine side schedules, computes and frees over vLLM's own block pool.  A computed token leaves the hash of
its prefix in its block, so a successor that reads a block nobody wrote, or one of another sequence, is seen at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.core.block_pool import BlockPool

from retire.authority.table import AuthorityTable
from retire.authority.tag import Tag
from retire.core.certificate import Geometry
from retire.core.errors import InvariantViolation
from retire.core.invariants import check
from retire.core.types import Epoch, KVGroup, RequestId, ScopeId, TenantId
from retire.engine.coordinator import Coordinator
from retire.engine.keeper import Keeper
from retire.engine.plan import Receipt, StepPlan
from retire.engine.rates import Rates
from retire.engine.steps import Steps
from retire.engine.worker import StepFenced, StepGuard
from retire.kv.ownership import Ownership, Quota

BLOCK = 4
TENANT = TenantId("t")
FULL = (KVGroup(BLOCK),)
HYBRID = (KVGroup(BLOCK), KVGroup(2 * BLOCK, window_tokens=10))
TTL_MS = 1000
CONTRACT = {
    "inherit": "certified",
    "equivalence": "mode_matched",
    "keep_prefix_tokens": None,
    "deadline_ms": None,
    "tier": "hbm",
    "ttl_ms": TTL_MS,
}


class FakeRequest:
    def __init__(self, request_id: str, tokens: Iterable[int], max_tokens: int, salt: str) -> None:
        self.request_id = request_id
        self.prompt_token_ids = list(tokens)
        self.all_token_ids = list(self.prompt_token_ids)
        self.num_computed_tokens = 0
        self.max_tokens = max_tokens
        self.salt = salt

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def block_hashes(self) -> list[int]:
        return [self.prefix(end) for end in range(BLOCK, self.num_tokens + 1, BLOCK)]

    def prefix(self, end: int) -> int:
        return hash((self.salt, tuple(self.all_token_ids[:end])))

    def full(self) -> bool:
        return self.num_tokens >= len(self.prompt_token_ids) + self.max_tokens


class FakeScope:
    """The API side of one scope."""

    def __init__(self, world: World, name: str, key: int) -> None:
        self.world, self.name, self.key = world, ScopeId(name), key
        self.slot = world.table.insert(0, key, 1)

    @property
    def epoch(self) -> int:
        return self.world.table.epoch(self.slot)

    def store(self, **contract: Any) -> str:
        """ADVANCE alone; its message is on its way."""
        table, old = self.world.table, self.epoch
        transition = f"{self.name}-{old + 1}"
        table.advance(self.slot, self.key, table.raw(self.slot), old)
        self.world.messages.append(
            {
                "kind": "advanced",
                "tenant": TENANT,
                "scope": self.name,
                "transition": transition,
                "at_ns": self.world.now_ns,
                "old_epoch": old,
                "new_epoch": old + 1,
                "contract": {**CONTRACT, **contract},
            }
        )
        return transition

    def supersede(self, **contract: Any) -> str:
        """ADVANCE, and the engine has been told."""
        transition = self.store(**contract)
        self.world.deliver()
        return transition

    def cancel(self) -> None:
        self.world.table.cancel(self.slot, self.key)
        self.world.messages.append({"kind": "cancelled", "tenant": TENANT, "scope": self.name})

    def revive(self) -> None:
        self.world.table.revive(self.slot, self.key, self.epoch + 3)

    def pause(self, paused: bool = True) -> None:
        self.world.table.set_paused(self.slot, self.key, paused)


class FakeStep(SimpleNamespace):
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    writes: list[tuple[FakeRequest, int, int, list[list[Any]]]]


def whole(plan: StepPlan) -> Receipt:
    """Of a step that ran to its end."""
    ends = tuple(rows.end for rows in plan.rows)
    return Receipt(plan.seq, ends, (), stopped=False, ended_ns=1, safe_points=0, longest_interval_ns=0)


class AnyPass:
    """A forward pass that any rows can be cut out of."""

    def keep(self, ends: dict[RequestId, int]) -> None:
        pass


class FixedRates(Rates):
    """Steps of so many rows are long, whatever they took."""

    def __init__(self, arm_rows: int) -> None:
        super().__init__(0, None)
        self._arm_rows = arm_rows

    def is_long(self, rows: int, most: int) -> bool:  # noqa: ARG002
        return rows >= self._arm_rows


class World:
    def __init__(
        self,
        folder: Path,
        *,
        blocks: int = 65,
        groups: tuple[KVGroup, ...] = FULL,
        arm_rows: int = 1,
        quota: Quota | None = None,
        exact_tokens: int | None = None,
        tier: Any = None,
        patience: int = 0,
        selector: Any = None,
    ) -> None:
        self.patience = patience
        self.table = AuthorityTable.create(folder / "table", tenants=1, scopes_per_tenant=16, rows=256)
        self.pool = BlockPool(blocks, enable_caching=False, hash_block_size=BLOCK)
        self.now_ns = 1
        self.groups = groups
        self.quota = Quota(blocks) if quota is None else quota
        self.ownership = Ownership(self.pool, lambda _: self.quota, blocks)
        rates = FixedRates(arm_rows)
        geometry = Geometry(groups, self.ownership.generation, exact_tokens, rates.pays, offloads=tier is not None)
        self.retire = Coordinator(
            engine=self,
            table=self.table,
            keeper=Keeper(self.ownership, geometry, tier),
            steps=Steps(
                self,
                self.ownership,
                groups,
                hash_tokens=BLOCK,
                rates=rates,
                grid_tokens=exact_tokens or 16,
            ),
            rates=rates,
            fingerprint=lambda request: f"model|{request.salt}",
            untold_ns=TTL_MS * 1_000_000,
            clock_ns=lambda: self.now_ns,
            selector=selector,
        )
        self.requests: dict[str, FakeRequest] = {}
        self.tags: dict[str, Tag] = {}
        self.tables: dict[str, list[list[Any]]] = {}
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.finished: list[str] = []
        self.steps: deque[FakeStep] = deque()
        self.messages: deque[dict[str, Any]] = deque()
        self.scopes: dict[str, FakeScope] = {}
        self.content: dict[tuple[int, int], int] = {}  # (block, offset) -> hash of the prefix that ends there
        self.cache: dict[tuple[int, int], tuple[int, int]] = {}  # (group, hash) -> block, generation
        self.published: dict[str, int] = {}
        self.started_at: dict[str, int] = {}
        self._cursor = 0
        self._names = 0
        self.deferred: list[Any] = []  # blocks that go back when the steps in flight have ended

    def close(self) -> None:
        self.table.close()

    # -- what the coordinator asks

    def request(self, request_id: str) -> FakeRequest | None:
        return self.requests.get(request_id)

    def computed_blocks(self, request_id: str) -> tuple[list[Any], ...]:
        return tuple(self.tables.get(request_id, [[] for _ in self.groups]))

    def publish(self, request: FakeRequest, tokens: int) -> None:
        self.published[request.request_id] = max(tokens, self.published.get(request.request_id, 0))
        assert request.request_id in self.tables, "published, and holds no blocks"
        for index, (group, blocks) in enumerate(zip(self.groups, self.tables[request.request_id], strict=True)):
            size = group.block_tokens
            for number in range(tokens // size):
                block = blocks[number]
                if block.is_null:
                    continue
                end = (number + 1) * size
                self._must_hold(request, block, number * size, end, size)
                generation = self.ownership.generation(block.block_id)
                self.cache.setdefault((index, request.prefix(end)), (block.block_id, generation))

    def drop(self, request_id: str) -> None:
        if request_id in self.requests:
            self._free_request(request_id)

    # -- what happens from outside

    def scope(self, name: str = "s") -> FakeScope:
        if name not in self.scopes:
            self.scopes[name] = FakeScope(self, name, len(self.scopes) + 1)
        return self.scopes[name]

    def admit(self, scope: FakeScope | None, tokens: Iterable[int], max_tokens: int = 4, salt: str = "") -> str:
        """A request of the scope's current epoch (or of none) reaches the scheduler."""
        self._names += 1
        request = FakeRequest(f"r{self._names}", tokens, max_tokens, salt)
        tag = None
        if scope is not None:
            ticket = self.table.issue(scope.slot, self.table.raw(scope.slot))
            tag = Tag(TENANT, scope.name, Epoch(scope.epoch), ticket)
        self.arrive(request, tag)
        return request.request_id

    def arrive(self, request: FakeRequest, tag: Tag | None) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request.request_id)
        if tag is not None:
            self.tags[request.request_id] = tag
            self.retire.admitted(request, tag)

    def deliver(self, count: int | None = None) -> None:
        """Messages arrive, in order."""
        for _ in range(len(self.messages) if count is None else count):
            self.retire.told(self.messages.popleft())

    def client_leaves(self, request_id: str) -> None:
        """The API process gives the ticket back and aborts."""
        if request_id in self.tags:
            self.table.release(self.tags[request_id].ticket)
        self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """vLLM's front end wants no more of it (a stop string, say); its ticket holds."""
        if not self.retire.defers_abort(request_id):
            self.drop(request_id)

    def pass_time(self, ms: float) -> None:
        self.now_ns += int(ms * 1e6)

    # -- the engine's loop

    def schedule(self, budget: int = 16) -> FakeStep | None:
        self.retire.before_schedule()
        given: dict[str, int] = {}
        for rid in list(self.running):
            request = self.requests.get(rid)
            if rid not in self.running or request is None or not self._may_go_on(rid):
                continue
            want = min(budget, self._known_tokens(request) - request.num_computed_tokens)
            if want > 0 and self._allocate_or_preempt(request, want, given):
                given[rid] = want
                budget -= want
        for rid in list(self.waiting):
            request = self.requests[rid]
            scoped = self.retire.is_scoped(rid)
            if budget == 0 or (scoped and not self.retire.may_run(request)) or not self._may_start(request):
                continue
            installed = self.retire.blocks_to_install(rid)
            nothing = 0, tuple([] for _ in self.groups)
            hit, blocks = installed or (nothing if self.retire.reads_nothing(rid) else self._cached(request))
            if installed is not None:
                self._must_be_this_sequence(request, hit, blocks)
            want = min(budget, request.num_tokens - hit)
            if not self._allocate(request, hit, blocks, want):
                break
            self.waiting.remove(rid)
            self.running.append(rid)
            self.started_at[rid] = request.num_computed_tokens = hit
            given[rid] = want
            budget -= want
        if not given:
            return None
        step = FakeStep(num_scheduled_tokens=given, total_num_scheduled_tokens=sum(given.values()), writes=[])
        for rid, count in given.items():
            request = self.requests[rid]
            start = request.num_computed_tokens
            request.num_computed_tokens += count
            step.writes.append((request, start, start + count, [list(group) for group in self.tables[rid]]))
            self._slide(rid, start)
            self._launched(request, count)
        self.retire.scheduled(step)
        self.steps.append(step)
        return step

    def finish_step(self, *, stop: bool | None = None, receipt: Receipt | None = None) -> None:
        """The oldest step ends.  `stop`: whether a safe point is reached in time; None: when the plan allows it."""
        step = self.steps.popleft()
        plan = getattr(step, "retire_plan", None)
        computed = None if plan is None else self._computed(plan, stop)
        ends = (
            {} if computed is None else {rows.request: end for rows, end in zip(plan.rows, computed.ends, strict=True)}
        )
        for request, start, end, table in step.writes:
            if (end := ends.get(request.request_id, end)) > start:
                self._write(request, start, end, table)
        receipt = receipt or computed
        self.retire.step_ended(step, receipt)
        self._sampled(step)
        self.retire.facts.flush()

    def _may_go_on(self, rid: str) -> bool:
        return not self.retire.paused(rid)

    def _may_start(self, request: FakeRequest) -> bool:  # noqa: ARG002
        return True

    def _may_preempt(self, rid: str) -> bool:
        return not self._in_flight(rid)

    def _known_tokens(self, request: FakeRequest) -> int:
        return request.num_tokens

    def _launched(self, request: FakeRequest, count: int) -> None:
        """Rows of the request are in the step that is being scheduled."""

    def _sampled(self, step: FakeStep) -> None:
        """What upstream makes of the step's tokens.  The next token comes of the last step with the request's rows."""
        for rid in step.num_scheduled_tokens:
            request = self.requests.get(rid)
            if request is None or rid not in self.running or self._in_flight(rid):
                continue
            if request.num_computed_tokens < request.num_tokens:
                continue
            if request.full():
                self.finished.append(rid)
                self._free_request(rid)
            else:
                request.all_token_ids.append(len(request.all_token_ids) * 7 % 50)

    def _computed(self, plan: StepPlan, stop: bool | None) -> Receipt:
        """What a worker of one decoder layer makes of the step."""
        guard = self._guard()
        guard.begin(plan)
        if plan.armed and stop is not False:
            guard.arm(1, AnyPass())
            with suppress(StepFenced):
                guard.layer_point(0)
        receipt = guard.end()
        assert receipt is not None
        assert receipt.stopped or not stop, "the worker would not have stopped this step"
        return replace(receipt, ended_ns=self.now_ns, safe_points=1, longest_interval_ns=1)

    def _guard(self) -> StepGuard:
        return StepGuard(self.table, patience=self.patience)

    def step(self, budget: int = 16) -> bool:
        """Schedule and finish one step; False when there was nothing to do."""
        if self.schedule(budget) is None:
            return False
        self.finish_step()
        return True

    def preempt(self, rid: str) -> None:
        self.running.remove(rid)
        self.waiting.insert(0, rid)
        self._free_blocks(rid)
        self.requests[rid].num_computed_tokens = 0
        self.retire.preempted(rid)

    def run(self, until: str | None = None, limit: int = 500) -> None:
        """Step until nothing moves, or `until` has finished."""
        while self.steps:
            self.finish_step()
        for _ in range(limit):
            if (until is not None and until not in self.requests) or not self.step():
                return
        raise AssertionError(f"no end: running {self.running}, waiting {self.waiting}")

    # -- blocks

    def _allocate_or_preempt(self, request: FakeRequest, want: int, given: dict[str, int]) -> bool:
        while not self._allocate(request, 0, None, want):
            victim = next((rid for rid in reversed(self.running) if self._may_preempt(rid)), None)
            if victim is None:
                return False
            given.pop(victim, None)
            self.preempt(victim)
            if victim == request.request_id:
                return False
        return True

    def _allocate(self, request: FakeRequest, hit: int, shared: tuple[list[Any], ...] | None, want: int) -> bool:
        """As the patched `allocate_slots`."""
        fits = self._try_allocate(request, hit, shared, want)
        if fits and self.retire.is_scoped(request.request_id):
            self.retire.rows_allocated(request, hit, want)
        return fits

    def _try_allocate(self, request: FakeRequest, hit: int, shared: tuple[list[Any], ...] | None, want: int) -> bool:
        rid = request.request_id
        end = request.num_computed_tokens + hit + want
        held = self.tables.get(rid) or [[] for _ in self.groups]
        counts = [
            -(-end // group.block_tokens) - len(blocks) - (len(shared[index]) if shared else 0)
            for index, (group, blocks) in enumerate(zip(self.groups, held, strict=True))
        ]
        revived = [b for group in shared or () for b in group if b.ref_cnt == 0 and not b.is_null]
        if sum(counts) + len(revived) > self.pool.get_num_free_blocks():
            return False
        self.tables[rid] = held
        if shared is not None:
            for blocks, more in zip(held, shared, strict=True):
                self.pool.touch([block for block in more if not block.is_null])
                blocks.extend(more)
        for blocks, count in zip(held, counts, strict=True):
            new = self.pool.get_new_blocks(count)
            self.ownership.allocated(new)
            busy = self._being_written() & {block.block_id for block in new}
            assert not busy, "invariant 5: an old writer may still write it"
            for block in new:
                for offset in range(2 * BLOCK):
                    self.content.pop((block.block_id, offset), None)
            blocks.extend(new)
        return True

    def _being_written(self) -> set[int]:
        """By scoped rows; an aborted request without a scope is freed while its step runs, as upstream does."""
        return {
            block.block_id
            for step in self.steps
            for request, start, end, table in step.writes
            if request.request_id in self.tags
            for group, blocks in zip(self.groups, table, strict=True)
            for block in blocks[start // group.block_tokens : -(-end // group.block_tokens)]
        }

    def _cached(self, request: FakeRequest) -> tuple[int, tuple[list[Any], ...]]:
        """The prefix cache: the longest run of published blocks, common to all groups."""
        unit = max(group.block_tokens for group in self.groups)
        hit = 0
        while hit + unit < request.num_tokens and all(
            self._lookup(index, request.prefix(end))
            for index, group in enumerate(self.groups)
            for end in range(hit + group.block_tokens, hit + unit + 1, group.block_tokens)
        ):
            hit += unit
        blocks = tuple(
            [self._lookup(index, request.prefix(end)) for end in range(group.block_tokens, hit + 1, group.block_tokens)]
            for index, group in enumerate(self.groups)
        )
        self._must_be_this_sequence(request, hit, blocks)
        return hit, blocks

    def _lookup(self, group: int, prefix: int) -> Any:
        block, generation = self.cache.get((group, prefix), (0, -1))
        return self.pool.blocks[block] if self.ownership.generation(block) == generation else None

    def _slide(self, rid: str, computed: int) -> None:
        """Blocks that fell out of a window go back, as the sliding-window manager does before a step's rows."""
        for group, blocks in zip(self.groups, self.tables[rid], strict=True):
            if group.window_tokens is None:
                continue
            for number in range(max(0, computed - group.window_tokens + 1) // group.block_tokens):
                if not blocks[number].is_null and not self._in_flight(rid):
                    self.pool.free_blocks([blocks[number]])
                    blocks[number] = self.pool.null_block

    def _in_flight(self, rid: str) -> bool:
        return any(rid in step.num_scheduled_tokens for step in self.steps)

    def _write(self, request: FakeRequest, start: int, end: int, table: list[list[Any]]) -> None:
        for group, blocks in zip(self.groups, table, strict=True):
            for position in range(start, end):
                block = blocks[position // group.block_tokens]
                if not block.is_null:
                    self.content[block.block_id, position % group.block_tokens] = request.prefix(position + 1)

    def _must_be_this_sequence(self, request: FakeRequest, tokens: int, blocks: tuple[list[Any], ...]) -> None:
        for group, given in zip(self.groups, blocks, strict=True):
            size = group.block_tokens
            needed = 0 if group.window_tokens is None else max(0, tokens - group.window_tokens + 1)
            for number, block in enumerate(given):
                if (number + 1) * size > needed:
                    assert not block.is_null, "the window lacks a block"
                    self._must_hold(request, block, number * size, (number + 1) * size, size)

    def _must_hold(self, request: FakeRequest, block: Any, start: int, end: int, size: int) -> None:
        for position in range(start, end):
            found = self.content.get((block.block_id, position % size))
            assert found == request.prefix(position + 1), f"invariant 3: token {position} of {request.request_id}"

    def _free_blocks(self, rid: str) -> None:
        for blocks in self.tables.pop(rid, []):
            self.pool.free_blocks([block for block in reversed(blocks) if not block.is_null])

    def _free_request(self, rid: str) -> None:
        self._free_blocks(rid)
        request = self.requests.pop(rid)
        for queue in (self.waiting, self.running):
            if rid in queue:
                queue.remove(rid)
        self.retire.ended(request)

    # -- what can be said about it

    def facts(self, kind: str, transition: str | None = None) -> list[dict[str, Any]]:
        log = self.retire.facts.after(-1).result()["facts"]
        return [f for f in log if f["kind"] == kind and transition in (None, f["transition"])]

    def one(self, kind: str, transition: str | None = None) -> dict[str, Any]:
        (found,) = self.facts(kind, transition)
        return found

    def check(self) -> None:
        """What holds between any two events."""
        users = Counter(b.block_id for t in self.tables.values() for group in t for b in group if not b.is_null)
        users += Counter(block.block_id for _, blocks in self.deferred for block in blocks)
        pins = Counter(b.block_id for pin in self.ownership._pins.values() for b in pin.blocks)
        pins += Counter(b.block_id for blocks in self.ownership._copies.values() for b in blocks)
        for block in self.pool.blocks:
            if not block.is_null:
                assert block.ref_cnt == users[block.block_id] + pins[block.block_id], f"references of {block}"
        owned = [h.request for state in self.retire._states.values() for h in state.holdings]
        owned += [one.request for group in self.retire._orphans.values() for one in group if one.kept is not None]
        assert sorted(owned) == sorted(self.ownership._pins), "invariant 6: a pin without its one owner"
        for state in self.retire._states.values():
            check(state)
        for certificate in self.retire.certificates.values():
            assert certificate.source in self.ownership._pins, "a certificate whose pins are gone"
            assert certificate.target in self.requests

    def end(self) -> None:
        """Come to rest: everybody who may run does, then every scope is ended; nothing may be left."""
        self.deliver()
        for scope in self.scopes.values():
            if not self.table.cancelled(scope.slot):
                scope.pause(paused=False)
        self.run()
        self.pass_time(10 * TTL_MS)  # a successor may have to wait until pins that fill the pool expire
        self.retire.told({"kind": "wake"})
        self.run()
        stuck = {r: self.tags.get(r) for r in self.requests}
        assert not stuck, f"never ran: {stuck}"
        assert self.ownership.pinned_blocks() == 0, "pins outlive their time"
        for scope in self.scopes.values():
            scope.cancel()
        self.deliver()
        self.check()
        left = (self.retire.told({"kind": "status"}) or {})["engine"]
        assert left == dict.fromkeys(left or {}, 0), left
        assert {"pinned_blocks", "scoped_requests", "open_transitions", "orphans", "copies_in_flight"} <= set(left)
        assert self.pool.get_num_free_blocks() == len(self.pool.blocks) - 1
        coordinator = self.retire
        for name in (
            *("_requests", "_states", "_early", "_orphans", "_held", "_aborted", "certificates", "_expiry_ns"),
        ):
            assert not getattr(coordinator, name), f"{name} remembers {getattr(coordinator, name)}"
        assert not coordinator._steps._unpublished


@contextmanager
def world_in(folder: Path, *, make: type[World] | None = None, **more: Any) -> Iterator[Any]:
    world = (make or World)(folder, **more)
    yield world
    world.end()
    world.close()


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.end()
    made.close()


def outcomes(world: World) -> dict[str, str]:
    return {fact["transition"]: fact["outcome"] for fact in world.facts("closed")}


def stages(world: World, transition: str) -> list[str]:
    return [fact["stage"] for fact in world.facts("stage", transition)]


ALL_STAGES = ["advance", "fence", "align", "resume", "reclaim"]
PROMPT = list(range(100, 140))  # ten blocks
REVISED = [*PROMPT[:30], *range(500, 520)]  # shares seven full blocks


def superseded_after_two_steps(world: World) -> tuple[FakeScope, str]:
    """A predecessor of which 32 tokens are written; the scope, and the transition that waits for a successor."""
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    world.step()
    return scope, scope.supersede()


# -- the ordinary course ----------------------------------------------------------------------------------------------


def test_a_request_without_a_successor_runs_and_leaves_nothing(world: World) -> None:
    rid = world.admit(world.scope(), PROMPT)
    world.run()
    assert world.finished == [rid]
    assert world.facts("closed") == []


def test_unscoped_requests_are_not_the_coordinators_business(world: World) -> None:
    rid = world.admit(None, PROMPT)
    assert not world.retire.is_scoped(rid)
    step = world.schedule()
    assert not hasattr(step, "retire_plan")
    world.finish_step()
    world.client_leaves(rid)
    assert world.requests == {}


def test_the_successor_inherits_what_was_written(world: World) -> None:
    scope = world.scope()
    old = world.admit(scope, PROMPT)
    world.step()
    world.step()
    transition = scope.supersede()
    assert old not in world.requests
    new = world.admit(scope, REVISED)
    world.run()
    certificate, adopted = world.one("certificate"), world.one("adopted")
    assert (certificate["tokens"], certificate["source"], certificate["target"]) == (28, old, new)
    assert adopted["blocks"] == certificate["blocks"]
    assert world.started_at[new] == 28
    assert outcomes(world) == {transition: "inherited"}
    assert stages(world, transition) == ALL_STAGES
    assert world.finished == [new]


def test_a_receipt_states_the_frontier(world: World) -> None:
    scope = world.scope()
    old = world.admit(scope, PROMPT)
    world.step(16)
    world.step(16)
    scope.supersede()
    receipt = world.one("receipt")
    assert (receipt["request"], receipt["epoch"], receipt["frontier_tokens"]) == (old, 1, 32)
    assert not receipt["stopped"]


def test_inherit_none_releases_at_once(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    transition = scope.supersede(inherit="none")
    assert world.ownership.pinned_blocks() == 0
    new = world.admit(scope, REVISED)
    world.run()
    assert world.one("refused")["refusal"] == "not_wanted"
    assert outcomes(world) == {transition: "cold"}
    assert world.finished == [new]


def test_another_fingerprint_is_refused_by_name(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT, salt="a")
    world.step()
    scope.supersede()
    new = world.admit(scope, PROMPT, salt="b")
    world.run()
    assert world.one("refused")["refusal"] == "fingerprint"
    assert world.started_at[new] == 0


def test_siblings_close_together_and_the_longest_is_inherited(world: World) -> None:
    scope = world.scope()
    short, long = world.admit(scope, PROMPT[:8]), world.admit(scope, [*PROMPT, 1, 2, 3, 4])
    world.step(24)
    world.step(16)
    scope.supersede()
    assert not {short, long} & set(world.requests)
    world.admit(scope, REVISED)
    world.run()
    assert world.one("certificate")["source"] == long
    assert len(world.facts("receipt")) == 2


def test_later_requests_of_the_new_epoch_start_fresh(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    scope.supersede()
    first, second = world.admit(scope, REVISED), world.admit(scope, [9] * 12)
    world.run()
    assert world.one("certificate")["target"] == first
    assert set(world.finished) == {first, second}
    assert world.started_at[second] == 0


def test_other_scopes_are_untouched(world: World) -> None:
    one, two = world.scope("one"), world.scope("two")
    a, b = world.admit(one, PROMPT), world.admit(two, [7] * 20)
    world.step(64)
    blocks = [[block.block_id for block in group] for group in world.tables[b]]
    one.supersede()
    assert [[block.block_id for block in group] for group in world.tables[b]] == blocks
    assert a not in world.requests
    world.run()
    assert world.finished == [b]


# -- the order of store, message, receipt and admission ---------------------------------------------------------------


def test_the_table_speaks_before_the_message_does(world: World) -> None:
    """The next sweep closes the request; its pins wait for the contract."""
    scope = world.scope()
    old = world.admit(scope, PROMPT)
    world.step()
    transition = scope.store()
    assert not world.step()
    assert old not in world.requests
    assert world.retire.leftovers()["orphans"] == 1
    assert world.ownership.pinned_blocks() == 4
    world.deliver()
    assert world.retire.leftovers()["orphans"] == 0
    new = world.admit(scope, REVISED)
    world.run()
    assert world.started_at[new] == 16
    assert outcomes(world) == {transition: "inherited"}


def test_several_orphans_and_then_the_message(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.admit(scope, [3] * 12)
    world.step(64)
    scope.store(inherit="none")
    world.step()
    assert world.retire.leftovers()["orphans"] == 2
    world.deliver()
    assert world.ownership.pinned_blocks() == 0


def test_an_orphan_that_nobody_asks_for_is_given_up(world: World) -> None:
    """The slot went to another scope while a step still computed for a client that had gone: no message will come."""
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    scope.store()
    world.messages.clear()
    world.step()
    assert world.retire.leftovers()["orphans"] == 1
    world.pass_time(TTL_MS)
    world.step()
    assert not any(world.retire.leftovers().values())
    assert not world.retire._states
    scope.supersede()
    new = world.admit(scope, REVISED)
    world.run()
    assert world.finished == [new]


@pytest.mark.parametrize("count", [1, 3])
def test_several_orphans_and_then_a_cancellation(world: World, count: int) -> None:
    scope = world.scope()
    for number in range(count):
        world.admit(scope, [number] * 12)
    world.step(64)
    scope.cancel()
    world.step()
    assert world.retire.leftovers()["orphans"] == count
    world.deliver()
    assert world.retire.leftovers()["orphans"] == world.ownership.pinned_blocks() == 0


def test_the_successor_is_here_before_the_message(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    transition = scope.store()
    new = world.admit(scope, REVISED)
    world.step()
    assert new in world.waiting, "it must not start before the contract is known"
    world.deliver()
    world.run()
    assert world.started_at[new] == 16
    assert outcomes(world) == {transition: "inherited"}


def test_several_early_requests_and_only_one_successor(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    scope.store()
    early = [world.admit(scope, REVISED), world.admit(scope, [8] * 9), world.admit(scope, PROMPT)]
    world.deliver()
    world.run()
    assert world.one("certificate")["target"] == early[0]
    assert set(world.finished) == set(early)


def test_the_successor_of_a_scope_nobody_knew(world: World) -> None:
    scope = world.scope()
    scope.store()
    new = world.admit(scope, PROMPT)
    world.run()
    assert world.finished == [new]
    world.deliver()
    assert world.facts("certificate") == []


def test_a_late_message_about_an_epoch_that_is_passed(world: World) -> None:
    """The successor was admitted first and runs; its own epoch is not to be disturbed."""
    scope = world.scope()
    transition = scope.store()
    new = world.admit(scope, PROMPT)
    world.step()
    world.deliver()
    assert new in world.running
    assert world.one("refused")["refusal"] == "no_predecessor"
    assert outcomes(world) == {transition: "cold"}


def test_a_late_message_does_not_take_a_newer_epochs_pins(world: World) -> None:
    """e+1 was here first, ran, and was revoked in the table; then both messages come."""
    scope = world.scope()
    scope.store()
    middle = world.admit(scope, PROMPT)
    world.step()
    last = scope.store()
    world.step()
    assert middle not in world.requests
    world.deliver()
    assert "fence" in stages(world, last)
    new = world.admit(scope, REVISED)
    world.run()
    assert world.finished == [new]


def test_an_early_request_of_an_epoch_after_next(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    first, second = scope.store(), scope.store()
    new = world.admit(scope, REVISED)
    world.deliver(1)
    world.step()
    assert new in world.waiting
    world.deliver()
    world.run()
    assert outcomes(world) == {first: "overtaken", second: "inherited"}
    assert world.started_at[new] == 16


def test_an_early_request_is_revoked_before_the_message_about_it(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    scope.store()
    early = world.admit(scope, REVISED)
    scope.store()
    world.step()
    assert early not in world.requests
    world.deliver()
    new = world.admit(scope, REVISED)
    world.run()
    assert world.finished == [new]


def test_an_early_requests_client_leaves_before_the_message(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    scope.store()
    early = world.admit(scope, REVISED)
    world.client_leaves(early)
    world.deliver()
    new = world.admit(scope, REVISED)
    world.run()
    assert world.finished == [new]
    assert world.started_at[new] == 16


def test_a_request_of_an_old_epoch_arrives_late(world: World) -> None:
    """Admitted by the API process, overtaken on its way to the scheduler."""
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    late = FakeRequest("late", PROMPT, 4, "")
    ticket = world.table.issue(scope.slot, world.table.raw(scope.slot))
    tag = Tag(TENANT, scope.name, Epoch(scope.epoch), ticket)
    scope.supersede()
    world.arrive(late, tag)
    world.step()
    assert "late" not in world.requests
    assert "late" not in world.published
    new = world.admit(scope, REVISED)
    world.run()
    assert world.finished == [new]


def test_a_request_arrives_late_at_a_scope_nobody_remembers(world: World) -> None:
    scope = world.scope()
    late = FakeRequest("late", PROMPT, 4, "")
    ticket = world.table.issue(scope.slot, world.table.raw(scope.slot))
    tag = Tag(TENANT, scope.name, Epoch(scope.epoch), ticket)
    scope.cancel()
    world.deliver()
    world.arrive(late, tag)
    assert not world.step()
    assert world.requests == {}


@pytest.mark.parametrize("how", ["revived", "expired"])
def test_a_late_request_of_a_dead_epoch_does_not_hold_up_the_living(world: World, how: str) -> None:
    """Both come out of one drain after a long step; the dead one first."""
    scope = world.scope()
    tag = Tag(TENANT, scope.name, Epoch(1), world.table.issue(scope.slot, world.table.raw(scope.slot)))
    if how == "revived":
        scope.cancel()
        world.deliver()
        scope.revive()
    else:
        scope.supersede(ttl_ms=1)
        world.pass_time(5)
        world.retire.told({"kind": "wake"})
    world.arrive(FakeRequest("late", PROMPT, 4, ""), tag)
    new = world.admit(scope, REVISED)
    world.run()
    assert world.finished == [new]


def test_a_request_arrives_late_while_a_cancelled_scope_still_closes(world: World) -> None:
    """It must be dropped like any revoked request; an error here would end the engine."""
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.schedule()
    late = FakeRequest("late", PROMPT, 4, "")
    ticket = world.table.issue(scope.slot, world.table.raw(scope.slot))
    tag = Tag(TENANT, scope.name, Epoch(scope.epoch), ticket)
    scope.cancel()
    world.deliver()
    world.arrive(late, tag)
    world.finish_step()
    world.step()
    assert world.requests == {}


def test_a_scope_is_cancelled_twice_while_it_closes(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.schedule()
    scope.cancel()
    scope.cancel()
    world.deliver()
    world.finish_step()
    assert world.requests == {}


# -- steps in flight --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stop", "frontier"), [(True, 16), (False, 32)])
@pytest.mark.parametrize("told", [True, False])
def test_the_frontier_is_what_the_last_receipt_says(world: World, stop: bool, frontier: int, told: bool) -> None:
    scope = world.scope()
    old = world.admit(scope, PROMPT)
    world.step()
    world.schedule()
    transition = scope.store()
    if told:
        world.deliver()
    assert old in world.requests, "a step computes it"
    world.finish_step(stop=stop)
    assert old not in world.requests
    assert world.published[old] == frontier
    world.deliver()
    receipt = world.one("receipt")
    assert (receipt["stopped"], receipt["frontier_tokens"]) == (stop, frontier)
    new = world.admit(scope, REVISED)
    world.run()
    assert world.started_at[new] == min(frontier, 28)
    assert outcomes(world) == {transition: "inherited"}


def test_a_first_step_that_is_stopped_leaves_nothing_to_inherit(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.schedule()
    transition = scope.store()
    world.finish_step(stop=True)
    world.deliver()
    assert world.ownership.pinned_blocks() == 0
    new = world.admit(scope, REVISED)
    world.run()
    assert world.started_at[new] == 0
    assert world.one("refused")["refusal"] == "no_predecessor"
    assert outcomes(world) == {transition: "cold"}


def test_the_successor_waits_for_the_last_receipt(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    world.schedule()
    transition = scope.supersede()
    new = world.admit(scope, REVISED)
    assert stages(world, transition) == ["advance"]
    assert not world.retire.may_run(world.requests[new])
    world.finish_step(stop=False)
    assert stages(world, transition) == ["advance", "fence", "align"]
    world.run()
    assert world.started_at[new] == 28


def test_two_steps_in_flight_and_the_first_is_stopped(world: World) -> None:
    """The second was computed on top of rows that do not exist: it counts for nothing."""
    scope = world.scope()
    old = world.admit(scope, PROMPT)
    world.step(8)
    world.schedule(8)
    world.schedule(8)
    scope.supersede()
    world.finish_step(stop=True)
    assert old in world.requests
    world.finish_step(stop=False)
    assert old not in world.requests
    assert world.one("receipt")["frontier_tokens"] == 8


@pytest.mark.parametrize("told", ["before", "after"])
def test_an_abort_while_in_flight_waits_for_the_receipt(world: World, told: str) -> None:
    scope = world.scope()
    old = world.admit(scope, PROMPT)
    world.schedule()
    transition = scope.store()
    if told == "before":
        world.deliver()
    world.client_leaves(old)
    assert old in world.requests
    assert world.pool.get_num_free_blocks() == 64 - 4, "a writer still writes these"
    world.finish_step(stop=False)
    assert old not in world.requests
    world.deliver()
    new = world.admit(scope, REVISED)
    world.run()
    assert world.started_at[new] == 16
    assert outcomes(world) == {transition: "inherited"}


def test_an_abort_of_a_current_request_in_flight_keeps_no_pins(world: World) -> None:
    scope = world.scope()
    rid = world.admit(scope, PROMPT)
    world.schedule()
    world.client_leaves(rid)
    assert rid in world.requests
    world.finish_step()
    assert world.requests == {}
    assert world.pool.get_num_free_blocks() == 64


def test_an_abort_between_steps_is_upstreams_own(world: World) -> None:
    rid = world.admit(world.scope(), PROMPT)
    world.step()
    world.client_leaves(rid)
    assert world.requests == {}


def test_a_request_whose_ticket_was_given_back_is_closed_by_the_next_sweep(world: World) -> None:
    rid = world.admit(world.scope(), PROMPT)
    world.step()
    world.table.release(world.tags[rid].ticket)
    assert not world.step()
    assert world.requests == {}


@pytest.mark.parametrize("seq", [None, 99])
def test_a_step_without_its_receipt_is_a_defect(tmp_path: Path, seq: int | None) -> None:
    world = World(tmp_path)
    world.admit(world.scope(), PROMPT)
    step = world.schedule()
    receipt = None if seq is None else replace(whole(step.retire_plan), seq=seq)
    with pytest.raises(InvariantViolation, match="invariant 7"):
        world.retire.step_ended(step, receipt)
    world.close()


def test_receipts_out_of_order_are_a_defect(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.admit(world.scope(), PROMPT)
    world.schedule(8)
    second = world.schedule(8)
    assert second is not None
    receipt = whole(second.retire_plan)
    with pytest.raises(InvariantViolation, match="invariant 7"):
        world.retire.step_ended(second, receipt)
    world.close()


def test_rows_without_a_scope_go_on_when_those_beside_them_stop(world: World) -> None:
    scope = world.scope()
    old = world.admit(scope, PROMPT)
    foreign = world.admit(None, [5] * 8)
    step = world.schedule(64)
    assert step is not None
    assert step.retire_plan.foreign_rows == 8
    assert [rows.request for rows in step.retire_plan.rows] == [old]
    scope.supersede()
    world.deliver()
    world.finish_step()
    receipt = world.one("receipt")
    assert (receipt["choice"], receipt["stopped"], receipt["frontier_tokens"]) == ("stop", True, 0)
    mine = world.tables[foreign][0][:2]
    assert all((block.block_id, offset) in world.content for block in mine for offset in range(BLOCK))


def test_a_step_is_trimmed_to_what_its_successor_shares(world: World) -> None:
    scope = world.scope()
    old = world.admit(scope, PROMPT)
    step = world.schedule(32)
    assert step is not None
    scope.supersede(keep_prefix_tokens=18)
    world.table.lower(world.tags[old].ticket, 18)
    world.deliver()
    world.finish_step()
    receipt = world.one("receipt")
    assert (receipt["choice"], receipt["stopped"], receipt["frontier_tokens"]) == ("trim", False, 16)
    new = world.admit(scope, [*PROMPT[:18], 1, 2, 3, 4])
    world.run(until=new)
    assert world.one("certificate")["tokens"] == 16


def test_only_long_steps_are_armed(tmp_path: Path) -> None:
    with world_in(tmp_path, arm_rows=9) as world:
        world.admit(world.scope(), PROMPT)
        armed = []
        for budget in (8, 9, 8):
            step = world.schedule(budget)
            assert step is not None
            armed.append(step.retire_plan.armed)
            world.finish_step()
        assert armed == [False, True, False]


def test_a_plan_names_the_rows_of_the_step(world: World) -> None:
    rid = world.admit(world.scope(), PROMPT)
    ranges = []
    while rid in world.requests:
        step = world.schedule(16)
        assert step is not None
        ranges += [(rows.start, rows.end) for rows in step.retire_plan.rows]
        world.finish_step()
    assert ranges == [(0, 16), (16, 32), (32, 40), (40, 41), (41, 42), (42, 43), (43, 44)]


# -- preemption -------------------------------------------------------------------------------------------------------


def test_a_preempted_request_has_nothing_to_leave(world: World) -> None:
    scope = world.scope()
    old = world.admit(scope, PROMPT)
    world.step()
    world.preempt(old)
    scope.supersede()
    assert world.one("receipt")["frontier_tokens"] == 0
    assert world.ownership.pinned_blocks() == 0
    new = world.admit(scope, REVISED)
    world.run()
    assert world.one("refused")["refusal"] == "no_predecessor"
    assert world.finished == [new]


def test_a_preempted_request_starts_over_with_a_new_frontier(world: World) -> None:
    scope = world.scope()
    old = world.admit(scope, PROMPT)
    world.step()
    world.step()
    world.preempt(old)
    world.cache.clear()
    world.step(8)
    scope.supersede()
    assert world.one("receipt")["frontier_tokens"] == 8


def test_what_a_preempted_request_finds_in_the_cache_counts(world: World) -> None:
    scope = world.scope()
    old = world.admit(scope, PROMPT)
    world.step()
    world.step()
    world.preempt(old)
    world.step(4)
    assert world.started_at[old] == 32
    scope.supersede()
    assert world.one("receipt")["frontier_tokens"] == 36


def test_a_receipt_from_before_a_preemption_says_nothing_about_the_new_blocks(world: World) -> None:
    """With several steps in flight a request can be preempted and scheduled again before its old step returns."""
    scope = world.scope()
    old = world.admit(scope, PROMPT)
    first = world.schedule(16)
    assert first is not None
    world.steps.clear()  # it computes blocks that the request is about to lose
    world.preempt(old)
    world.cache.clear()
    assert world.retire.leftovers()["steps_in_flight"] == 1
    receipt = whole(first.retire_plan)
    world.retire.step_ended(first, receipt)
    assert old not in world.published
    world.step(8)
    assert world.published[old] == 8


# -- superseded again -------------------------------------------------------------------------------------------------


def test_the_second_supersede_before_the_successor_came(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    first, second = scope.supersede(), scope.supersede()
    assert world.ownership.pinned_blocks() == 4
    new = world.admit(scope, REVISED)
    world.run()
    assert outcomes(world) == {first: "overtaken", second: "inherited"}
    assert world.started_at[new] == 16


def test_the_second_supersede_before_adoption_hands_the_pins_on(world: World) -> None:
    scope = world.scope()
    old = world.admit(scope, PROMPT)
    world.step()
    first = scope.supersede()
    middle = world.admit(scope, REVISED)
    assert middle in world.retire.certificates
    second = scope.supersede()
    assert middle not in world.requests
    assert world.ownership.pinned_blocks() == 4
    new = world.admit(scope, REVISED)
    world.run()
    assert outcomes(world) == {first: "overtaken", second: "inherited"}
    assert [fact["source"] for fact in world.facts("certificate")] == [old, old]
    assert world.started_at[new] == 16


@pytest.mark.parametrize("stop", [True, False])
def test_the_second_supersede_while_the_successor_computes(world: World, stop: bool) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    first = scope.supersede()
    middle = world.admit(scope, REVISED)
    world.schedule()
    second = scope.supersede()
    new = world.admit(scope, REVISED)
    world.finish_step(stop=stop)
    world.run()
    assert outcomes(world) == {first: "inherited", second: "inherited"}
    assert world.facts("certificate")[-1]["source"] == middle
    assert world.started_at[new] == (16 if stop else 32)


def test_ten_supersedes_in_a_row(world: World) -> None:
    scope = world.scope()
    for _ in range(10):
        world.admit(scope, PROMPT)
        world.step(8)
        scope.supersede()
        world.check()
    new = world.admit(scope, REVISED)
    world.run()
    assert world.finished == [new]
    assert len([outcome for outcome in outcomes(world).values() if outcome == "inherited"]) == 10


def test_inherit_none_after_a_certificate(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    scope.supersede()
    world.admit(scope, REVISED)
    scope.supersede(inherit="none")
    assert world.ownership.pinned_blocks() == 0
    new = world.admit(scope, REVISED)
    world.run()
    assert world.finished == [new]


# -- losing the successor, the scope, the pins ------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["in the fence", "before adoption", "after adoption"])
def test_the_successors_client_leaves(world: World, when: str) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    if when == "in the fence":
        world.schedule()
    transition = scope.supersede()
    new = world.admit(scope, REVISED)
    if when == "after adoption":
        world.step()
    world.client_leaves(new)
    world.run()
    assert outcomes(world) == {transition: "inherited" if when == "after adoption" else "client_lost"}
    assert world.ownership.pinned_blocks() == 0


@pytest.mark.parametrize("when", ["idle", "running", "in flight", "aligning", "resuming"])
def test_cancelling(world: World, when: str) -> None:
    scope = world.scope()
    if when != "idle":
        world.admit(scope, PROMPT)
        world.step()
    if when == "in flight":
        world.schedule()
    if when in {"aligning", "resuming"}:
        scope.supersede()
    if when == "resuming":
        world.admit(scope, REVISED)
    scope.cancel()
    world.deliver()
    if when == "in flight":
        world.finish_step(stop=False)
    assert world.requests == {}
    assert world.retire.leftovers() == dict.fromkeys(world.retire.leftovers(), 0)


def test_a_cancelled_scope_is_used_again(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.schedule()
    scope.cancel()
    world.deliver()
    scope.revive()
    new = world.admit(scope, REVISED)
    world.finish_step(stop=False)
    world.step(8)
    transition = scope.supersede()
    last = world.admit(scope, REVISED)
    world.run()
    assert new not in world.requests
    assert world.finished == [last]
    assert outcomes(world) == {transition: "inherited"}


def test_what_a_cancelled_life_left_is_released_when_the_next_is_cancelled(world: World) -> None:
    """Its step outlasts the next life, of which the engine remembers nothing by then."""
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    world.schedule()
    scope.cancel()
    world.deliver()
    scope.revive()
    world.client_leaves(world.admit(scope, REVISED))
    world.finish_step()
    assert world.retire.leftovers()["orphans"] == 1
    scope.cancel()
    world.deliver()
    assert world.retire.leftovers()["orphans"] == world.ownership.pinned_blocks() == 0


def test_a_cancelled_scope_is_used_again_before_the_message(world: World) -> None:
    """The request of the new life may reach the scheduler first; it must run all the same."""
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    scope.cancel()
    scope.revive()
    new = world.admit(scope, REVISED)
    world.deliver()
    world.run()
    assert world.finished == [new]


def test_a_late_message_about_a_cancelled_life_does_not_end_the_next(world: World) -> None:
    """A supersede of the next life waits for the receipts of what came here before that message."""
    scope = world.scope()
    scope.cancel()
    scope.revive()
    world.admit(scope, PROMPT)
    world.schedule()
    world.deliver()
    world.admit(scope, REVISED)
    transition = scope.supersede()
    new = world.admit(scope, REVISED)
    assert stages(world, transition) == ["advance"], "obsolete rows are in flight"
    world.finish_step(stop=False)
    world.run()
    assert outcomes(world) == {transition: "inherited"}
    assert world.finished == [new]


def test_a_request_behind_a_late_message_about_a_cancelled_life_runs(world: World) -> None:
    scope = world.scope()
    scope.cancel()
    scope.revive()
    gone = world.admit(scope, PROMPT)
    world.schedule()
    world.client_leaves(gone)
    world.deliver()
    new = world.admit(scope, REVISED)
    world.run()
    assert world.finished == [new]


def test_pins_expire_without_a_successor(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    transition = scope.supersede()
    world.pass_time(TTL_MS - 1)
    world.retire.told({"kind": "wake"})
    assert world.ownership.pinned_blocks() == 4
    world.pass_time(1)
    world.retire.told({"kind": "wake"})
    assert world.ownership.pinned_blocks() == 0
    new = world.admit(scope, REVISED)
    world.cache.clear()
    world.run()
    assert world.one("refused")["refusal"] == "expired"
    assert world.started_at[new] == 0
    assert outcomes(world) == {transition: "expired"}


def test_pins_expire_under_a_waiting_successor(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    scope.supersede(deadline_ms=10)
    new = world.admit(scope, REVISED)
    assert new in world.retire.certificates
    world.pass_time(10)
    world.cache.clear()
    world.run()
    assert world.started_at[new] == 0
    assert world.one("refused")["refusal"] == "expired"


@pytest.mark.parametrize("contract", [{"ttl_ms": 5}, {"deadline_ms": 5}])
def test_time_runs_out_while_a_step_is_in_flight(world: World, contract: dict[str, int]) -> None:
    """What is written when the step ends comes too late and must not be pinned for good."""
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    world.schedule()
    transition = scope.supersede(**contract)
    world.pass_time(6)
    world.retire.told({"kind": "wake"})
    world.finish_step(stop=False)
    world.retire.told({"kind": "wake"})
    assert world.ownership.pinned_blocks() == 0
    world.admit(scope, REVISED)
    world.run()
    assert world.one("refused")["refusal"] == "expired"
    assert outcomes(world) == {transition: "expired"}


def test_no_time_at_all(world: World) -> None:
    """`ttl_s` below a millisecond arrives as 0."""
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    scope.supersede(ttl_ms=0)
    world.retire.told({"kind": "wake"})
    assert world.ownership.pinned_blocks() == 0


def test_certificates_are_revoked(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    scope.supersede()
    new = world.admit(scope, REVISED)
    world.retire.revoke_certificates()
    assert world.ownership.pinned_blocks() == 0
    world.cache.clear()
    world.run()
    assert world.one("refused")["refusal"] == "revoked"
    assert world.started_at[new] == 0


def test_certificates_are_revoked_before_the_message(world: World) -> None:
    """The orphans' pins go; the fence must still end when the contract arrives."""
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    transition = scope.store()
    world.step()
    world.retire.revoke_certificates()
    assert world.ownership.pinned_blocks() == 0
    world.deliver()
    assert "fence" in stages(world, transition)
    new = world.admit(scope, REVISED)
    world.run()
    assert world.finished == [new]


def test_a_wrong_adoption_is_a_defect(tmp_path: Path) -> None:
    world = World(tmp_path)
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    scope.supersede()
    new = world.admit(scope, REVISED)
    honest = world.computed_blocks

    def swapped(request_id: str) -> tuple[list[Any], ...]:
        (blocks,) = honest(request_id)
        return ([blocks[1], blocks[0], *blocks[2:]],) if request_id == new else (blocks,)

    world.computed_blocks = swapped  # type: ignore[method-assign]
    with pytest.raises(InvariantViolation, match="invariant 4"):
        world.schedule()
    world.close()


def test_an_adoption_of_too_few_blocks_is_a_defect(tmp_path: Path) -> None:
    world = World(tmp_path)
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    scope.supersede()
    world.admit(scope, REVISED)
    honest = world.computed_blocks
    world.computed_blocks = lambda rid: tuple(blocks[:2] for blocks in honest(rid))  # type: ignore[method-assign]
    with pytest.raises(InvariantViolation, match="invariant 4"):
        world.schedule()
    world.close()


# -- a full pool ------------------------------------------------------------------------------------------------------


def test_guaranteed_pins_outlast_ordinary_work_that_wants_the_whole_pool(tmp_path: Path) -> None:
    with world_in(tmp_path, blocks=17) as world:
        scope, transition = superseded_after_two_steps(world)
        assert world.ownership.pinned_blocks() == 8
        big, small = world.admit(None, [4] * 44), world.admit(None, [5] * 20)
        for _ in range(20):
            world.step()
        assert big not in world.finished, "it does not fit beside them"
        assert world.ownership.pinned_blocks() == 8
        new = world.admit(scope, REVISED)
        world.drop(big)
        world.run()
        assert world.one("certificate", transition)["tokens"] == 28
        assert outcomes(world) == {transition: "inherited"}
        assert set(world.finished) == {small, new}


def test_what_no_pin_guarantees_lasts_until_ordinary_work_needs_it(tmp_path: Path) -> None:
    with world_in(tmp_path, blocks=17, quota=Quota(2)) as world:
        scope, transition = superseded_after_two_steps(world)
        assert world.ownership.pinned_blocks() == 2
        big = world.admit(None, [4] * 44)
        world.run(until=big)
        new = world.admit(scope, REVISED)
        world.run()
        assert world.started_at[new] == 8, "the guaranteed head of what was certified"
        assert outcomes(world) == {transition: "inherited"}


def test_what_no_pin_guarantees_is_inherited_whole_when_nobody_needed_it(tmp_path: Path) -> None:
    with world_in(tmp_path, quota=Quota(2)) as world:
        scope, _ = superseded_after_two_steps(world)
        new = world.admit(scope, REVISED)
        world.run()
        assert world.started_at[new] == 28


def test_blocks_reused_between_certificate_and_installation_shorten_it(tmp_path: Path) -> None:
    """The successor waits, the pool turns over, and ALIGN is asked again."""
    with world_in(tmp_path, blocks=17, quota=Quota(2)) as world:
        scope, transition = superseded_after_two_steps(world)
        new = world.admit(scope, REVISED)
        assert world.one("certificate", transition)["tokens"] == 28
        world.waiting.remove(new)
        big = world.admit(None, [4] * 44)
        world.run(until=big)
        world.waiting.append(new)
        world.run()
        assert world.started_at[new] == 8
        assert [found["tokens"] for found in world.facts("certificate", transition)] == [28, 8]
        assert outcomes(world) == {transition: "inherited"}


@pytest.mark.parametrize("quota", [Quota(0), Quota(4, beyond=False)])
def test_over_quota_the_successor_is_cold_by_name_and_reads_nothing(tmp_path: Path, quota: Quota) -> None:
    with world_in(tmp_path, quota=quota) as world:
        scope, _ = superseded_after_two_steps(world)
        assert world.ownership.pinned_blocks() == 0
        new = world.admit(scope, REVISED)
        world.run()
        assert world.one("refused")["refusal"] == "quota"
        assert world.started_at[new] == 0


def test_a_predecessor_that_has_finished_is_inherited_from(world: World) -> None:
    scope = world.scope()
    old = world.admit(scope, PROMPT, max_tokens=1)
    world.run(until=old)
    assert world.ownership.pinned_blocks() == 0
    transition = scope.supersede()
    assert world.ownership.pinned_blocks() == len(PROMPT) // BLOCK
    new = world.admit(scope, REVISED)
    world.run()
    assert world.one("certificate", transition)["source"] == old
    assert world.started_at[new] == 28


def test_of_a_finished_predecessor_only_what_is_left_is_inherited(tmp_path: Path) -> None:
    with world_in(tmp_path, blocks=17) as world:
        scope = world.scope()
        old = world.admit(scope, PROMPT, max_tokens=1)
        world.run(until=old)
        big = world.admit(None, [4] * 60, max_tokens=1)
        world.run(until=big)
        transition = scope.supersede()
        new = world.admit(scope, REVISED)
        world.run()
        assert new in world.finished
        assert outcomes(world) == {transition: "cold"}


def test_a_successor_is_not_starved_by_the_rest_of_its_own_pins(tmp_path: Path) -> None:
    """The predecessor wrote far beyond the common prefix; with all of it pinned the successor never fits."""
    with world_in(tmp_path, blocks=17) as world:
        scope = world.scope()
        world.admit(scope, [*range(100, 156)])
        for _ in range(4):
            world.step()
        scope.supersede()
        new = world.admit(scope, [*range(100, 108), *([3] * 40)], max_tokens=1)
        world.run()
        assert new in world.finished, "it waits for its own pins to expire"


# -- what is readable -------------------------------------------------------------------------------------------------


def test_a_sibling_waits_for_blocks_that_are_being_written(world: World) -> None:
    scope = world.scope()
    first, second = world.admit(scope, PROMPT), world.admit(scope, PROMPT)
    world.schedule(64)
    assert world.running == [first]
    assert world.retire._steps.shares_unwritten(world.requests[second])
    world.finish_step()
    world.retire.before_schedule()
    assert not world.retire._steps.shares_unwritten(world.requests[second])
    world.step()
    assert world.started_at[second] == 36


def test_an_unrelated_request_does_not_wait(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    other = world.admit(scope, [2] * 20)
    world.schedule(64)
    assert other in world.running
    world.finish_step()


def test_a_sibling_does_not_wait_for_a_stopped_step(world: World) -> None:
    one, two = world.scope("one"), world.scope("two")
    world.admit(one, PROMPT)
    world.schedule(64)
    one.supersede()
    second = world.admit(two, PROMPT)
    world.finish_step(stop=True)
    world.retire.before_schedule()
    assert not world.retire._steps.shares_unwritten(world.requests[second])
    world.step()
    assert world.started_at[second] == 0


def test_a_successor_with_a_certificate_does_not_wait(world: World) -> None:
    one, two = world.scope("one"), world.scope("two")
    world.admit(one, PROMPT)
    world.step()
    one.supersede()
    other = world.admit(two, PROMPT)
    world.schedule(64)
    assert world.started_at[other] == 16
    new = world.admit(one, PROMPT)
    world.schedule(64)
    assert world.started_at[new] == 16


def test_nothing_is_published_while_a_step_is_in_flight(world: World) -> None:
    rid = world.admit(world.scope(), PROMPT)
    world.schedule()
    assert rid not in world.published
    world.finish_step()
    assert world.published[rid] == 16


def test_accepted_drafts_do_not_end_publication(world: World) -> None:
    """Speculative decoding schedules more rows than the request has tokens; accepted ones are written."""
    scope = world.scope()
    rid = world.admit(scope, PROMPT, max_tokens=40)
    while world.requests[rid].num_computed_tokens < 40:
        world.step()
    request = world.requests[rid]
    for _ in range(4):
        start = request.num_computed_tokens
        assert start == request.num_tokens - 1
        world.retire.before_schedule()
        world._allocate(request, 0, None, 4)
        request.num_computed_tokens += 4  # one sampled token and three drafts
        step = FakeStep(num_scheduled_tokens={rid: 4}, total_num_scheduled_tokens=4, writes=[])
        world.retire.scheduled(step)
        table = [list(group) for group in world.tables[rid]]
        accepted = FakeRequest(rid, [*request.all_token_ids, 60, 61, 62], 40, "")
        world._write(accepted, start, start + 4, table)
        world.retire.step_ended(step, whole(step.retire_plan))
        request.all_token_ids += [60, 61, 62]  # two drafts accepted, one more token sampled
        request.num_computed_tokens = start + 3
    scope.supersede()
    written = 41 + 3 * 4 - 1
    assert world.one("receipt")["frontier_tokens"] >= written - 4


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_the_frontier_grows_by_accepted_drafts_alone(world: World, accepted: int) -> None:
    scope = world.scope()
    rid = world.admit(scope, PROMPT, max_tokens=40)
    while world.requests[rid].num_computed_tokens < 40:
        world.step()
    request = world.requests[rid]
    for _ in range(6):
        start = request.num_computed_tokens
        world.retire.before_schedule()
        world._allocate(request, 0, None, 4)
        request.num_computed_tokens += 4
        step = FakeStep(num_scheduled_tokens={rid: 4}, total_num_scheduled_tokens=4, writes=[])
        world.retire.scheduled(step)
        assert world.retire._requests[rid].frontier_tokens == start, "what was accepted, and no more"
        said = list(range(60, 61 + accepted))
        guessed = [*said[:accepted], *[90] * (3 - accepted)]
        computed = FakeRequest(rid, [*request.all_token_ids, *guessed], 40, "")
        world._write(computed, start, start + 4, [list(group) for group in world.tables[rid]])
        world.retire.step_ended(step, whole(step.retire_plan))
        assert world.published[rid] <= start + 1 == request.num_tokens
        request.all_token_ids += said
        request.num_computed_tokens = start + 1 + accepted
    scope.supersede()
    assert world.one("receipt")["frontier_tokens"] == start + 1


# -- windows ----------------------------------------------------------------------------------------------------------


def test_two_groups_inherit_at_a_common_boundary(tmp_path: Path) -> None:
    with world_in(tmp_path, groups=HYBRID) as world:
        scope, transition = superseded_after_two_steps(world)
        new = world.admit(scope, PROMPT)
        world.run()
        certificate = world.one("certificate")
        assert certificate["tokens"] == 32
        assert [len(group) for group in certificate["blocks"]] == [8, 4]
        assert certificate["blocks"][1][:2] == [None, None]
        assert None not in certificate["blocks"][0]
        assert world.started_at[new] == 32
        assert outcomes(world) == {transition: "inherited"}


def test_a_window_that_has_slid_and_was_reused_is_refused_by_name(tmp_path: Path) -> None:
    with world_in(tmp_path, blocks=33, groups=HYBRID) as world:
        scope = world.scope()
        world.admit(scope, PROMPT)
        for _ in range(3):
            world.step()
        scope.supersede(keep_prefix_tokens=36)
        busy = world.admit(None, [4] * 60, max_tokens=1)
        world.run(until=busy)
        new = world.admit(scope, [*PROMPT[:17], *([3] * 12)])
        world.cache.clear()
        world.run()
        assert world.one("refused")["refusal"] in {"window_slid", "generation"}
        assert world.started_at[new] == 0


def test_a_window_that_has_slid_is_inherited_while_nobody_reuses_its_blocks(tmp_path: Path) -> None:
    with world_in(tmp_path, groups=HYBRID) as world:
        scope = world.scope()
        world.admit(scope, PROMPT)
        for _ in range(3):
            world.step()
        transition = scope.supersede()
        new = world.admit(scope, [*PROMPT[:17], *([3] * 12)])
        world.cache.clear()
        world.run()
        assert world.started_at[new] == 16
        assert outcomes(world) == {transition: "inherited"}


# -- pausing, asking --------------------------------------------------------------------------------------------------


def test_a_paused_scope_is_no_work_and_can_be_superseded(world: World) -> None:
    scope = world.scope()
    old = world.admit(scope, PROMPT)
    world.step()
    scope.pause()
    assert world.retire.paused(old)
    assert world.retire.paused_requests() == 1
    assert not world.step()
    scope.supersede()
    assert old not in world.requests
    new = world.admit(scope, REVISED)
    assert not world.retire.may_run(world.requests[new])
    scope.pause(paused=False)
    world.run()
    assert world.finished == [new]


def test_status_counts_what_is_held(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.schedule()
    status = (world.retire.told({"kind": "status"}) or {})["engine"]
    assert status == {
        "pinned_blocks": 0,
        "scoped_requests": 1,
        "open_transitions": 0,
        "orphans": 0,
        "steps_in_flight": 1,
        "copies_in_flight": 0,
    }
    world.finish_step()
    scope.supersede()
    status = (world.retire.told({"kind": "status"}) or {})["engine"]
    assert status is not None
    assert (status["pinned_blocks"], status["open_transitions"], status["scoped_requests"]) == (4, 1, 0)


def test_status_shows_a_tenant_its_own_only(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.schedule()
    for change in (lambda: None, world.finish_step, scope.supersede):
        change()
        status = (world.retire.told({"kind": "status"}) or {})["engine"]
        assert status is not None
        assert any(status.values())
        assert (world.retire.told({"kind": "status", "tenant": TENANT}) or {})["engine"] == status
        assert (world.retire.told({"kind": "status", "tenant": "other"}) or {})["engine"] == dict.fromkeys(status, 0)


def test_an_unknown_message_is_a_defect(world: World) -> None:
    with pytest.raises(InvariantViolation, match="unknown message"):
        world.retire.told({"kind": "nonsense"})


def test_finished_scopes_are_forgotten(world: World) -> None:
    for number in range(10):
        world.admit(world.scope(f"s{number}"), [number] * 8, max_tokens=1)
    world.run()
    assert world.retire._states == {}


def test_abandoned_scopes_are_forgotten(world: World) -> None:
    """Superseded, and nobody ever came: when the pins have expired there is nothing left to remember."""
    for number in range(10):
        scope = world.scope(f"s{number}")
        world.admit(scope, [number] * 8)
        world.step()
        scope.supersede()
    world.pass_time(TTL_MS)
    world.retire.told({"kind": "wake"})
    assert world.retire.leftovers()["open_transitions"] == 0


def test_orphans_are_not_remembered_as_closing(world: World) -> None:
    scope = world.scope()
    world.admit(scope, PROMPT)
    world.step()
    scope.store()
    world.step()
    world.deliver()
    assert getattr(world.retire, "_closing", set()) == set()


# -- safe points -------------------------------------------------------------------------------------------------------


def test_safe_points_of_all_steps_are_told_when_a_scoped_request_ends(world):
    world.admit(world.scope(), PROMPT, max_tokens=2)
    steps = 0
    while world.requests:
        assert world.facts("safe_points") == []
        steps += world.step()
    assert world.one("safe_points")["count"] == steps == 5


# -- at random --------------------------------------------------------------------------------------------------------


class Churn(RuleBasedStateMachine):
    """Anything may happen in any order, with up to two steps in flight and a pool that is too small."""

    make: type[World] = World

    @initialize(
        blocks=st.sampled_from([20, 28, 65]), groups=st.sampled_from([FULL, HYBRID]), patience=st.integers(0, 1)
    )
    def begin(self, blocks: int, groups: tuple[KVGroup, ...], patience: int) -> None:
        self.folder = TemporaryDirectory()
        self.world = self.make(Path(self.folder.name), blocks=blocks, groups=groups, patience=patience)
        for name in "abc":
            self.world.scope(name)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.end()
            finally:
                self.world.close()
                self.folder.cleanup()

    scopes = st.sampled_from("abc")

    @rule(
        name=scopes,
        shared=st.integers(0, 24),
        own=st.integers(1, 14),
        variant=st.integers(0, 3),
        max_tokens=st.integers(1, 9),
        salt=st.sampled_from(["", "", "", "x"]),
    )
    def admit(self, name: str, shared: int, own: int, variant: int, max_tokens: int, salt: str) -> None:
        scope = self.world.scope(name)
        if len(self.world.requests) < 8 and not self.world.table.cancelled(scope.slot):
            self.world.admit(scope, [*PROMPT[:shared], *([variant] * own)], max_tokens, salt)

    @rule(own=st.integers(1, 20))
    def admit_unscoped(self, own: int) -> None:
        if len(self.world.requests) < 8:
            self.world.admit(None, [*PROMPT[:8], *([99] * own)], 2)

    @rule(
        name=scopes,
        inherit=st.sampled_from(["certified", "certified", "certified", "none"]),
        ttl=st.sampled_from([5, TTL_MS]),
    )
    def supersede(self, name: str, inherit: str, ttl: int) -> None:
        scope = self.world.scope(name)
        if not self.world.table.cancelled(scope.slot):
            scope.store(inherit=inherit, ttl_ms=ttl)

    @precondition(lambda self: self.world.messages)
    @rule()
    def message(self) -> None:
        self.world.deliver(1)

    @precondition(lambda self: len(self.world.steps) < 2)
    @rule(budget=st.integers(1, 24))
    def schedule(self, budget: int) -> None:
        self.world.schedule(budget)

    @precondition(lambda self: self.world.steps)
    @rule(late=st.booleans())
    def step_ends(self, late: bool) -> None:
        self.world.finish_step(stop=False if late else None)

    @rule(data=st.data(), tokens=st.integers(0, 40))
    def limit_falls(self, data: st.DataObject, tokens: int) -> None:
        """The successor of a revoked request says how much of it is still wanted; also too late, or never."""
        revoked = [tag for tag in self.world.tags.values() if not self.world.table.current(tag.ticket)]
        if revoked:
            self.world.table.lower(data.draw(st.sampled_from(revoked)).ticket, tokens)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        self.world.client_leaves(data.draw(st.sampled_from(sorted(self.world.requests))))

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.requests))))

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        idle = sorted(rid for rid in self.world.running if self.world._may_preempt(rid))
        if idle:
            self.world.preempt(data.draw(st.sampled_from(idle)))

    @rule(name=scopes)
    def cancel(self, name: str) -> None:
        self.world.scope(name).cancel()

    @rule(name=scopes)
    def revive(self, name: str) -> None:
        scope = self.world.scope(name)
        if self.world.table.cancelled(scope.slot):
            scope.revive()

    @rule(name=scopes, paused=st.booleans())
    def pause(self, name: str, paused: bool) -> None:
        scope = self.world.scope(name)
        if not self.world.table.cancelled(scope.slot):
            scope.pause(paused)

    @rule(ms=st.sampled_from([1, 6, TTL_MS]))
    def time_passes(self, ms: int) -> None:
        self.world.pass_time(ms)
        self.world.retire.told({"kind": "wake"})

    @rule()
    def revoke_certificates(self) -> None:
        self.world.retire.revoke_certificates()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


AT_RANDOM = settings(
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a failing run is short enough to read as it is
)
Churn.TestCase.settings = AT_RANDOM
TestChurn = Churn.TestCase
