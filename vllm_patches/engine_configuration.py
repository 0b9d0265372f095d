"""Seam: vllm.engine.arg_utils:EngineArgs.create_engine_config
Process: api    Kind: wrap
Why: a configuration in which a guarantee cannot hold must stop start-up before a model is loaded, and pages leave
    the device by a KV connector that nobody should have to name.
Delta: our KV connector is named, an accelerator's worker gets a process of its own, the finished configuration is
    checked, this process takes its state directory.
No seam: general plugins run before the configuration exists, endpoint plugins after the engine does.
Remove: when plugins can veto a configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Add to the arguments, check what upstream has made of them."""
    from retire.authority import home
    from retire.engine import configuration
    from retire.settings import Settings
    from retire.tenants import Registry

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings, tenants = Settings.from_env(), Registry.from_env()
        configuration.add_tier(self, settings.dram_bytes)
        configuration.add_worker_process(self)
        config = original(self, *args, **kwargs)
        configuration.check(config, api_processes=self._api_process_count)
        configuration.check_policy(config, settings.policy)
        configuration.check_tenants(config, tenants)
        home.own(settings, tenants)
        return config

    return create_engine_config


S = "vllm.v1.core.sched.scheduler:Scheduler."
R = "vllm.v1.worker.gpu_model_runner:GPUModelRunner."
M = "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin."
SEAM = Seam(
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    "wrap",
    build,
    # When upstream calls which hook of the connector, what it makes of the answers, and how it lays out the caches.
    relies_on=(
        S + "has_requests",
        S + "_connector_finished",
        S + "_handle_failed_recving",
        S + "_update_from_kv_xfer_finished",
        S + "_update_waiting_for_remote_kv",
        R + "execute_model",
        R + "initialize_kv_cache",
        M + "_get_kv_connector_output",
        M + "kv_connector_no_forward",
        "vllm._custom_ops:swap_blocks_batch",
        "vllm.distributed.kv_transfer.kv_connector.utils:KVOutputAggregator.aggregate",
        "vllm.distributed.kv_transfer.kv_transfer_state:ensure_kv_transfer_initialized",
        "vllm.utils.ompmultiprocessing:OMPProcessManager.__init__",
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.allocate_external_computed_blocks",
        "vllm.v1.engine.core:EngineCoreProc._process_engine_step",
        "vllm.v1.kv_cache_interface:create_kv_cache_views",
        "vllm.v1.kv_offload.cpu.host_register:host_register",
        "vllm.v1.worker.gpu.attn_utils:init_kv_cache",
        "vllm.v1.worker.utils:allocate_kv_cache",
    ),
)
