"""Which vLLM configurations RETIRE can keep its guarantees in.

Owns: the refusal list.  Strategy: refuse at start-up with one clear line; nothing degrades silently.
"""

from __future__ import annotations

import os
from typing import Any

from retire.core.errors import SeamError
from retire.core.quantum import Policy
from retire.settings import DRAM_ENV, POLICY_ENV
from retire.tenants import Registry

TIER_MODULE = "retire.engine.tier"
DRAFTERS = ("ngram", "draft_model")


def add_tier(arguments: Any, dram_bytes: int) -> None:
    """Name our KV connector in vLLM's EngineArgs, unless there is to be none or the caller named one.

    Raises:
        SeamError: this machine has less memory.
    """
    if dram_bytes == 0 or arguments.kv_transfer_config is not None:
        return
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if dram_bytes > machine_bytes:
        raise SeamError(f"{DRAM_ENV}: {dram_bytes} bytes of host memory, of {machine_bytes} that this machine has")
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    arguments.kv_transfer_config = KVTransferConfig(
        kv_connector="RetireTier",
        kv_connector_module_path=TIER_MODULE,
        kv_role="kv_producer",  # a consumer would take multimodal inputs without their tensors from anybody
        kv_load_failure_policy="recompute",
    )
    if current_platform.is_cpu():  # upstream sets a core aside for a connector; ours shares what the model leaves
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")


def add_worker_process(arguments: Any) -> None:
    """Give the worker of an accelerator a process of its own, unless the caller has chosen.

    In armed steps it waits for the device (`retire.engine.ahead`).  In the engine's process the output of one step
    would wait with it until the next one has nearly ended.
    """
    from vllm.platforms import current_platform

    if arguments.distributed_executor_backend is None and current_platform.is_cuda_alike():
        arguments.distributed_executor_backend = "mp"


def refusals(config: Any, *, api_processes: int) -> list[str]:
    """What in a VllmConfig stands in the way, one line each."""
    from vllm.platforms import current_platform

    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    connector, speculative = config.kv_transfer_config, config.speculative_config
    draft_model_config = _draft_model_config(config)
    ahead, second_runner = config.scheduler_config.async_scheduling, config.use_v2_model_runner
    checks = [
        (parallel.tensor_parallel_size > 1, "tensor parallelism above 1 (one participant per step for now)"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism above 1"),
        (parallel.data_parallel_size > 1, "data parallelism above 1, MoE-DP included"),
        (api_processes > 1, "more than one API server process (--api-server-count 1)"),
        (
            connector is not None and connector.kv_connector_module_path != TIER_MODULE,
            "a KV connector other than RETIRE's: it would store blocks of a stopped step",
        ),
        (parallel.enable_dbo, "dual-batch overlap (--enable-dbo)"),
        (model.is_hybrid or model.is_attention_free, "Mamba or other state-space layers: their state cannot restart"),
        (not cache.enable_prefix_caching, "--no-enable-prefix-caching: certificates install through it"),
        (
            not (current_platform.is_cpu() or current_platform.is_cuda_alike()),
            "a device that is neither a CPU nor of CUDA's kind: when it has computed what was launched is not known",
        ),
        (
            ahead and parallel.distributed_executor_backend == "uni",
            "asynchronous scheduling in one process with the worker (--distributed-executor-backend mp): outputs wait",
        ),
        (
            _prefetches_weights(config.offload_config),
            "weights that layers prefetch for one another (--offload-group-size): a stopped step mixes them up",
        ),
        (
            speculative is not None and speculative.use_eagle(),
            "EAGLE or MTP: a chunk's last KV depends on the next token",
        ),
        (
            speculative is not None and not speculative.use_eagle() and speculative.method not in DRAFTERS,
            f"speculation other than {' and '.join(DRAFTERS)}: what it keeps between requests is not fenced",
        ),
        (
            draft_model_config is not None and draft_model_config.max_model_len < model.max_model_len,
            "a draft model shorter than --max-model-len: its KV would have holes",
        ),
        (
            speculative is not None and ahead,
            "speculation with asynchronous scheduling (--no-async-scheduling): guesses count as computed at once",
        ),
        (
            speculative is not None and second_runner,
            "speculation with model runner V2 (VLLM_USE_V2_MODEL_RUNNER=0): its drafting is not fenced",
        ),
        (
            second_runner and current_platform.is_cpu(),
            "model runner V2 on the CPU (VLLM_USE_V2_MODEL_RUNNER=0): it needs Triton and was never run there",
        ),
    ]
    return [reason for stands, reason in checks if stands]


def _prefetches_weights(offload: Any) -> bool:
    group_size: int = offload.prefetch.offload_group_size
    return offload.offload_backend == "prefetch" or (offload.offload_backend == "auto" and group_size > 0)


def _draft_model_config(config: Any) -> Any:
    """The model whose layers hold KV beside the served model's, None for none."""
    speculative = config.speculative_config
    return speculative.draft_model_config if speculative is not None and speculative.method == "draft_model" else None


def check(config: Any, *, api_processes: int) -> None:
    """Raise SeamError naming everything that the configuration must give up."""
    if config.model_config is None:
        return
    found = refusals(config, api_processes=api_processes)
    if found:
        raise SeamError("RETIRE cannot serve this configuration: " + "; ".join(found))


def check_policy(config: Any, policy: Policy) -> None:
    """Raise SeamError where the policy has no quantum to choose."""
    if policy is not Policy.RATE:
        return
    if not config.scheduler_config.enable_chunked_prefill:
        raise SeamError(f"{POLICY_ENV}={policy} without chunked prefill: prompts are not cut, whatever is chosen")
    if config.model_config is not None and config.model_config.is_multimodal_model:
        raise SeamError(f"{POLICY_ENV}={policy} with a multimodal model: some inputs must be prefilled in one piece")


def check_tenants(config: Any, tenants: Registry) -> None:
    """Raise SeamError where vLLM would hand one tenant what it keeps for another."""
    if len(tenants.ids) > 1 and os.environ.get("VLLM_ENABLE_RESPONSES_API_STORE", "0") != "0":
        raise SeamError("VLLM_ENABLE_RESPONSES_API_STORE with several tenants: the store does not know them apart")
    if tenants.isolated and config.model_config is not None and config.model_config.is_multimodal_model:
        raise SeamError(
            "a multimodal model with isolated tenants: its media caches do not know them apart "
            "(isolate_prefix_cache = false in the tenants file gives the isolation up)"
        )


CERTIFIABLE = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec")


def check_kv(kv_cache_config: Any, *, replay_tokens: int) -> None:
    """Raise SeamError for KV groups whose blocks no certificate describes."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    # A group of several is one of layers of one kind whose pages differ in size, as a draft model's may.
    kinds = {type(one).__name__ for spec in specs for one in getattr(spec, "kv_cache_specs", {"": spec}).values()}
    unknown = sorted(kinds - set(CERTIFIABLE))
    if unknown or replay_tokens:
        what = ", ".join(unknown) or "prefix replay"
        raise SeamError(f"RETIRE cannot serve this model: its KV cache has {what}, which no certificate describes")


def exact_grid(chunk_tokens: int, *, guesses: bool = False) -> int | None:
    """On which token grid reuse equals a cold run bit for bit; None: nowhere.

    The CPU back end's results depend on the shape of the chunk, so equal chunks give equal bits; with `guesses`
    (speculation) a last token may come in other shapes.  Elsewhere vLLM's batch-invariant mode makes them all equal.
    """
    from vllm.platforms import current_platform

    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in {"0", ""}:
        return 1
    return chunk_tokens if current_platform.is_cpu() and not guesses else None


def fingerprint_base(config: Any) -> str:
    """What must be equal between writer and reader of a block, beside the request's own part."""
    model, cache, drafter = config.model_config, config.cache_config, _draft_model_config(config)
    return "|".join(
        str(part)
        for part in (
            model.model,
            model.revision,
            model.dtype,
            model.quantization,
            cache.cache_dtype,
            cache.block_size,
            os.environ.get("VLLM_BATCH_INVARIANT", "0"),
            *(() if drafter is None else (drafter.model, drafter.revision, drafter.dtype, drafter.quantization)),
        )
    )
