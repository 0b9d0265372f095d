"""The DRAM tier on vLLM's KV connector interface.

Owns: which of upstream's hooks means what to the tier, on both sides, and nothing else.
Strategy: the connector of the scheduler has a `tier`, which the coordinator talks to; the connector of a worker has a
`worker`.  Transfers start where a step begins, before its forward pass, so that they overlap it; a restore is an
asynchronous load in upstream's sense: the request waits without rows until every page is verified and written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_sliding_window
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from retire.authority import home
from retire.core.types import KVGroup, RequestId
from retire.engine.tier_scheduler import Tier
from retire.engine.tier_wire import Ended, Orders, Reports
from retire.engine.tier_worker import TierWorker
from retire.kv.host import HostPages
from retire.settings import Settings
from retire.tenants import Registry

DIGEST_ENV = "RETIRE_DRAM_DIGEST"


class RetireTier(KVConnectorBase_V1, SupportsHMA):
    """Named by the engine's configuration; one in the scheduler, one in each worker."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._reports: Reports | None = None
        if role == KVConnectorRole.SCHEDULER:
            registry = Registry.from_env()
            pages = HostPages(
                Settings.from_env().dram_bytes,
                page_bytes(kv_cache_config),
                limit_bytes=lambda tenant: registry.tenant(tenant).dram_bytes,
            )
            specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
            groups = [KVGroup(spec.block_size, get_kv_cache_spec_sliding_window(spec)) for spec in specs]
            self.tier = Tier(pages, groups, ranks=vllm_config.parallel_config.world_size)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a preempted request hands nothing to anybody."""
        return False

    # -- in the scheduler -------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens to restore beyond what the device has; the restore runs between steps."""
        tokens = self.tier.matched_tokens(request.request_id, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks."""
        self.tier.allocated(request.request_id, blocks.blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:  # noqa: ARG002 - upstream's signature
        """What this step tells the workers."""
        return self.tier.take_orders()

    def update_connector_output(self, connector_output: Any) -> None:
        """Reports are taken by the versioned scheduler before upstream sees the output; by now there are none."""
        self.tier.settle(connector_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002 - upstream's signature
        """Whoever has finished needs no restore; upstream keeps its blocks until the transfer has ended."""
        self.tier.withdraw(RequestId(request.request_id))
        return False, None

    def has_pending_push_work(self) -> bool:
        """Reports come with steps: an otherwise idle engine has to make some."""
        return self.tier.busy

    def reset_cache(self) -> bool:
        """A cascade of cache resets came to the connector."""
        self.tier.cancel_all()
        return True

    # -- in a worker ------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The device's caches exist: transfers can run."""
        self.worker = TierWorker(
            kv_caches,
            self._kv_cache_config,
            holds=home.table().holds,
            rank=self._vllm_config.parallel_config.rank,
            verify=os.environ.get(DIGEST_ENV, "1") != "0",
        )

    def handle_preemptions(self, kv_connector_metadata: Orders) -> None:
        """Begin this step's transfers.  Upstream calls it before anything of the step is launched."""
        self.worker.take(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Orders) -> None:
        """Nothing: they are taken already."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: transfers began before the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no request has rows before its restore has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: pages are copied after their request has closed."""

    def wait_for_save(self) -> None:
        """Nothing: device pages stay pinned until their copy is reported."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002 - upstream's signature
        """Restores that ended since the last step."""
        results = self.worker.collect()
        self._reports = Reports(tuple(result for _, result in results)) if results else None
        return KVConnectorTransferResults(
            finished_recving={str(target) for target, _ in results if target is not None},
            failed_recving={str(target) for target, result in results if target and result.ended is not Ended.DONE},
        )

    def build_connector_worker_meta(self) -> Reports | None:
        """Reports of what `get_transfer_results` has just seen."""
        return self._reports

    def shutdown(self) -> None:
        """End the transfer thread, if start-up came that far."""
        worker: TierWorker | None = getattr(self, "worker", None)
        if worker is not None:
            worker.close()


@contextmanager
def unknown_to_layers() -> Iterator[None]:
    """While this is open vLLM knows of no connector: every attention layer would look up two hooks that do nothing.

    A process runs one pass at a time: its forward context is one for all threads, as its connector is.
    """
    known, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, None
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = known


def page_bytes(kv_cache_config: Any) -> tuple[int, ...]:
    """Bytes of one page of each KV group on one rank: all layers of the group, one block."""
    sizes = []
    for group in kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        per_layer = [(specs[name] if specs else group.kv_cache_spec).page_size_bytes for name in group.layer_names]
        sizes.append(sum(per_layer))
    return tuple(sizes)
