"""VersionedScheduler: mixed into whatever scheduler class vLLM would use.

Owns: where vLLM's scheduling touches the protocol, and nothing of the protocol itself.  Each override says which
upstream behaviour it leans on; all of them are pinned in `vllm_patches.scheduler_class`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from math import lcm
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import get_kv_cache_spec_sliding_window
from vllm.v1.request import RequestStatus

from retire import seal
from retire.authority import home
from retire.authority.tag import from_xargs
from retire.core.certificate import Geometry
from retire.core.errors import CallerError
from retire.core.quantum import Policy, Selector, quanta
from retire.core.types import KVGroup, RequestId, TenantId
from retire.engine import configuration
from retire.engine.coordinator import Coordinator
from retire.engine.keeper import Keeper
from retire.engine.quantum import cut_to
from retire.engine.rates import Rates
from retire.engine.steps import Steps
from retire.engine.tier_scheduler import Tier
from retire.kv.ownership import Ownership, Quota
from retire.settings import Settings
from retire.tenants import Registry


class VersionedScheduler:
    """Mixin before a vLLM scheduler class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seal.require()
        super().__init__(*args, **kwargs)
        scheduler: Any = self
        configuration.check_kv(scheduler.kv_cache_config, replay_tokens=scheduler.prefix_replay_tokens)
        scheduler.defer_block_free = True  # invariant 5: a block that a step may still write waits for its receipt
        settings, kv = Settings.from_env(), scheduler.kv_cache_manager
        base = configuration.fingerprint_base(scheduler.vllm_config)
        tier: Tier | None = scheduler.connector.tier if scheduler.connector is not None else None
        groups = tuple(
            KVGroup(manager.block_size, get_kv_cache_spec_sliding_window(manager.kv_cache_spec))
            for manager in kv.coordinator.single_type_managers
        )
        ownership = Ownership(kv.block_pool, _quotas(kv.block_pool.num_gpu_blocks - 1), _beside_a_full_request(kv))
        restore_ns = tier.restore_ns if tier is not None else None
        rates = Rates(
            settings.min_inherit_tokens,
            restore_ns,
            long_ns=0 if settings.policy is Policy.ALWAYS else settings.arm_ms * 1_000_000,
            drafts=scheduler.num_spec_tokens,
            largest=scheduler.max_num_scheduled_tokens,
        )
        self._grid_tokens = _chunk_tokens(scheduler)
        exact = configuration.exact_grid(self._grid_tokens, guesses=scheduler.num_spec_tokens > 0)
        geometry = Geometry(groups, ownership.generation, exact, rates.pays, offloads=tier is not None)
        self._rates = rates
        self._selector: Selector | None = None
        if settings.policy is Policy.RATE:
            largest, unit = scheduler.max_num_scheduled_tokens, lcm(*(group.block_tokens for group in groups))
            self._selector = Selector(quanta(largest, unit, 1 + scheduler.num_spec_tokens))
        self._tier = tier
        self._secret = home.table().secret
        self._turn: str | None = None
        self._alone_last, self._alone_served = False, 0
        self.retire = Coordinator(
            engine=self,
            table=home.table(),
            keeper=Keeper(ownership, geometry, tier),
            steps=Steps(
                self,
                ownership,
                groups,
                hash_tokens=scheduler.hash_block_size,
                rates=rates,
                grid_tokens=self._grid_tokens,
            ),
            rates=rates,
            fingerprint=lambda request: f"{base}|{_request_fingerprint(request)}",
            untold_ns=settings.pin_ttl_ms * 1_000_000,
            selector=self._selector,
        )
        if tier is not None:
            tier.offloaded, tier.restored = self.retire.offloaded, self.retire.restored
        kv.retire = self.retire
        kv.block_pool.retire_ownership = ownership

    # -- what the coordinator asks (retire.engine.coordinator.Engine) -----------------------------------------------

    def request(self, request_id: RequestId) -> Any:
        """The scheduler's request, None when it is gone."""
        return self.requests.get(request_id)  # type: ignore[attr-defined]

    def computed_blocks(self, request_id: RequestId) -> tuple[Sequence[Any], ...]:
        """The request's block table, per KV group."""
        return self.kv_cache_manager.coordinator.get_blocks(request_id)  # type: ignore[attr-defined]

    def publish(self, request: Any, tokens: int) -> None:
        """Make the request's full blocks below `tokens` readable through the prefix cache."""
        self.kv_cache_manager.cache_blocks(request, tokens)  # type: ignore[attr-defined]

    def drop(self, request_id: RequestId) -> None:
        """Finish a request that lost authority and free what it holds."""
        super().finish_requests(request_id, RequestStatus.FINISHED_ABORTED)  # type: ignore[misc]

    # -- upstream's entry points --------------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """Upstream enqueues it; a scoped one is then known to the coordinator before any step can see it."""
        new = request.request_id not in self.requests  # type: ignore[attr-defined]
        super().add_request(request)  # type: ignore[misc]
        params = request.sampling_params
        if not new or params is None:
            return
        try:
            tag = from_xargs(params.extra_args, self._secret)
        except CallerError:  # a front end that no patch covers: whoever has no ticket does not run
            super().finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)  # type: ignore[misc]
            return
        if tag is not None:
            self.retire.admitted(request, tag)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Revoked requests leave first, so that no step is launched for them."""
        self.retire.before_schedule()
        if not self.retire.scoped_requests:
            self._turn = None
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        else:
            self._turn = self._next_alone()
            with self._due(), self._chunk_of_a_clean_run(), self._quantum():
                output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.retire.scheduled(output)
        return output

    def _next_alone(self) -> str | None:
        """The request that has the next step to itself; None when it is everybody else's turn."""
        alone = self.retire.runs_alone()
        if not alone:
            return None
        scheduler: Any = self
        mine = set(alone)
        others = any(r.request_id not in mine for r in chain(scheduler.running, scheduler.waiting))
        self._alone_last = not (self._alone_last and others)
        if not self._alone_last:
            return None
        self._alone_served = self._alone_served + 1
        return alone[self._alone_served % len(alone)]

    def _shares(self, request_id: str) -> bool:
        """Whether the request may be in the step that is being scheduled."""
        return self._turn == request_id if self._turn else not self.retire.alone(request_id)

    @contextmanager
    def _due(self) -> Iterator[None]:
        """Upstream skips a running request until this step; what may not go on now is never due."""
        kept: list[tuple[Any, int]] = []
        for request in self.running:  # type: ignore[attr-defined]
            rid = request.request_id
            if not self._shares(rid) or (self.retire.is_scoped(rid) and not self.retire.may_go_on(rid)):
                kept.append((request, request.next_decode_eligible_step))
                request.next_decode_eligible_step = sys.maxsize
        try:
            yield
        finally:
            for request, step in kept:
                request.next_decode_eligible_step = step

    @contextmanager
    def _chunk_of_a_clean_run(self) -> Iterator[None]:
        """A request that runs alone after a preemption computes its own output again as it was: token by token."""
        request = self.requests.get(self._turn) if self._turn else None  # type: ignore[attr-defined]
        config = self.scheduler_config  # type: ignore[attr-defined]
        kept = config.long_prefill_token_threshold
        if request is not None and request.num_preemptions:
            done, prompt = request.num_computed_tokens, request.num_prompt_tokens
            config.long_prefill_token_threshold = min(self._grid_tokens, prompt - done) if done < prompt else 1
        try:
            yield
        finally:
            config.long_prefill_token_threshold = kept

    def _quantum(self) -> AbstractContextManager[None]:
        """The prefill quantum that the policy chooses.  A request that runs alone has the chunks of a clean run."""
        if self._selector is None or self._turn:
            return nullcontext()
        scheduler: Any = self
        quantum = self._selector.choose(self._rates.largest_ns / 1e9)
        return cut_to(quantum, scheduler) if quantum < scheduler.max_num_scheduled_tokens else nullcontext()

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Receipts first: publish what was written, finish what lost authority before upstream reads its tokens."""
        if self._tier is not None:
            self._tier.settle(model_runner_output.kv_connector_output)
        self.retire.step_ended(scheduler_output, getattr(model_runner_output, "retire_receipt", None))
        said = model_runner_output.sampled_token_ids
        for rid in scheduler_output.num_scheduled_tokens if said and self.retire.scoped_requests else ():
            if self.retire.counts_for_nothing(rid):  # as a chunk that is not the prompt's last says nothing
                said[model_runner_output.req_id_to_index[rid]] = []
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self.retire.facts.flush()
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """An abort while a step computes the request waits for the receipt, so that its frontier is exact."""
        if request_ids is None:
            return super().finish_requests(None, finished_status)  # type: ignore[misc]
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        if finished_status == RequestStatus.FINISHED_ABORTED:
            ids = [request_id for request_id in ids if not self.retire.defers_abort(request_id)]
        return super().finish_requests(ids, finished_status)  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Pins would make the reset fail: certificates are revoked first."""
        self.retire.revoke_certificates()
        return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]

    def get_num_unfinished_requests(self) -> int:
        """A paused request is no work: the engine may sleep."""
        unfinished: int = super().get_num_unfinished_requests()  # type: ignore[misc]
        return max(0, unfinished - self.retire.paused_requests())

    # -- upstream's inner steps -------------------------------------------------------------------------------------

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
        self.retire.ended(request)
        return result

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        self.retire.preempted(request.request_id)

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        rid = request.request_id
        if not self._shares(rid) or (self.retire.is_scoped(rid) and not self.retire.may_run(request)):
            return False
        ready: bool = super()._handle_blocked_waiting_request(request)  # type: ignore[misc]
        return ready

    def _get_local_prefix_cache_hit(self, request: Any) -> tuple[KVCacheBlocks, int, int, bool]:
        install = self.retire.blocks_to_install(request.request_id)
        if self.retire.reads_nothing(request.request_id):
            hit = self.kv_cache_manager.empty_kv_cache_blocks, 0, 0, False  # type: ignore[attr-defined]
        else:
            hit = super()._get_local_prefix_cache_hit(request)  # type: ignore[misc]
        if install is None:
            return hit
        tokens, certified = install
        found, cached, *rest = hit
        if cached <= tokens:
            return KVCacheBlocks(certified), tokens, 0, False
        longer = tuple(  # certified blocks first, then what else is published of the same tokens
            [mine if not mine.is_null else theirs for mine, theirs in zip(ours, blocks, strict=False)]
            + list(blocks[len(ours) :])
            for ours, blocks in zip(certified, found.blocks, strict=True)
        )
        return KVCacheBlocks(longer), cached, *rest


def _quotas(pool_blocks: int) -> Callable[[TenantId], Quota]:
    """What the tenants file lets each tenant's pins guarantee."""
    registry = Registry.from_env()

    def quota(tenant: TenantId) -> Quota:
        found = registry.tenant(tenant)
        return Quota(found.pin_quota(pool_blocks), beyond=found.beyond_quota == "best_effort")

    return quota


def _beside_a_full_request(kv: Any) -> int:
    """Blocks that all pins together may keep: a request of full length always finds room beside them."""
    full = 0
    for manager in kv.coordinator.single_type_managers:
        blocks = -(-kv.max_model_len // manager.block_size)
        cap = manager.max_admission_blocks_per_request
        full += blocks if cap is None else min(blocks, cap)
    return max(0, kv.block_pool.num_gpu_blocks - 1 - full)


def _chunk_tokens(scheduler: Any) -> int:
    """How many prompt tokens a request that is alone gets in one step: the grid of a clean run."""
    most: int = scheduler.max_num_scheduled_tokens
    threshold: int = scheduler.scheduler_config.long_prefill_token_threshold
    return min(most, threshold) if threshold > 0 else most


def _request_fingerprint(request: Any) -> str:
    """The request's part of the fingerprint: adapter, cache generation, and what stands in for tokens."""
    lora = request.lora_request
    features = [
        (feature.identifier, feature.mm_position.offset, feature.mm_position.length) for feature in request.mm_features
    ]
    embeds = request.request_id if request.prompt_embeds is not None else None  # its tokens are placeholders
    adapter = (lora.lora_name, lora.lora_path, lora.lora_int_id) if lora else ()
    return f"{adapter}|{request.cache_salt or ''}|{features}|{embeds}"
