"""VersionedScheduler: mixed into whatever scheduler class vLLM would use.

Owns: where vLLM's scheduling touches the protocol, and nothing of the protocol itself.  Each override says which
upstream behaviour it leans on; all of them are pinned in `vllm_patches.scheduler_class`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import get_kv_cache_spec_sliding_window
from vllm.v1.request import RequestStatus

from retire import seal
from retire.authority import home
from retire.authority.tag import from_xargs
from retire.core.errors import CallerError
from retire.core.types import KVGroup, RequestId
from retire.engine import configuration
from retire.engine.coordinator import Coordinator
from retire.kv.ownership import Ownership
from retire.settings import Settings


class VersionedScheduler:
    """Mixin before a vLLM scheduler class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seal.require()
        super().__init__(*args, **kwargs)
        scheduler: Any = self
        configuration.check_kv(scheduler.kv_cache_config, replay_tokens=scheduler.prefix_replay_tokens)
        kv = scheduler.kv_cache_manager
        ownership = Ownership(kv.block_pool)
        base = configuration.fingerprint_base(scheduler.vllm_config)
        self._secret = home.table().secret
        self.retire = Coordinator(
            engine=self,
            table=home.table(),
            ownership=ownership,
            groups=tuple(
                KVGroup(manager.block_size, get_kv_cache_spec_sliding_window(manager.kv_cache_spec))
                for manager in kv.coordinator.single_type_managers
            ),
            fingerprint=lambda request: f"{base}|{_request_fingerprint(request)}",
            hash_tokens=scheduler.hash_block_size,
            arm_rows=Settings.from_env().arm_rows,
        )
        kv.retire = self.retire
        kv.block_pool.retire_ownership = ownership

    # -- what the coordinator asks (retire.engine.coordinator.Engine) -----------------------------------------------

    def request(self, request_id: RequestId) -> Any:
        """The scheduler's request, None when it is gone."""
        return self.requests.get(request_id)  # type: ignore[attr-defined]

    def computed_blocks(self, request_id: RequestId) -> tuple[Iterable[Any], ...]:
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
        for request in self.running:  # type: ignore[attr-defined]
            if self.retire.is_scoped(request.request_id):
                # Upstream skips a running request until this step; what may not go on is never due.
                request.next_decode_eligible_step = 0 if self.retire.may_go_on(request.request_id) else sys.maxsize
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.retire.scheduled(output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Receipts first: publish what was written, finish what lost authority before upstream reads its tokens."""
        self.retire.step_ended(scheduler_output, getattr(model_runner_output, "retire_receipt", None))
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
        self.retire.ended(request.request_id)
        return result

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        self.retire.preempted(request.request_id)

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        if self.retire.is_scoped(request.request_id) and not self.retire.may_run(request):
            return False
        ready: bool = super()._handle_blocked_waiting_request(request)  # type: ignore[misc]
        return ready

    def _get_local_prefix_cache_hit(self, request: Any) -> tuple[KVCacheBlocks, int, int, bool]:
        install = self.retire.blocks_to_install(request.request_id)
        if install is not None:
            tokens, blocks = install
            return KVCacheBlocks(blocks), tokens, 0, False
        hit: tuple[KVCacheBlocks, int, int, bool] = super()._get_local_prefix_cache_hit(request)  # type: ignore[misc]
        return hit


def _request_fingerprint(request: Any) -> str:
    """The request's part of the fingerprint: adapter, cache generation, and what stands in for tokens."""
    lora = request.lora_request
    features = [
        (feature.identifier, feature.mm_position.offset, feature.mm_position.length) for feature in request.mm_features
    ]
    embeds = request.request_id if request.prompt_embeds is not None else None  # its tokens are placeholders
    adapter = (lora.lora_name, lora.lora_path, lora.lora_int_id) if lora else ()
    return f"{adapter}|{request.cache_salt or ''}|{features}|{embeds}"
