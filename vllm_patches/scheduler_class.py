"""Seam: vllm.config.scheduler:SchedulerConfig.get_scheduler_cls
Process: engine    Kind: wrap
Why: a scheduler class given by flag must name one base, and upstream picks it by configuration.
Delta: whatever class upstream would use gets RETIRE's scheduler mixed in.
No seam: --scheduler-cls replaces the choice instead of refining it.
Remove: when scheduler classes can be composed by configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_patches._seam import Seam


def build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Derive from upstream's choice."""

    @functools.cache
    def versioned(base: type) -> type:
        from retire.engine.scheduler import VersionedScheduler

        return type(f"Versioned{base.__name__}", (VersionedScheduler, base), {})

    def get_scheduler_cls(self: Any) -> type:
        return versioned(original(self))

    return get_scheduler_cls


S = "vllm.v1.core.sched.scheduler:Scheduler."
SEAM = Seam(
    "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
    "wrap",
    build,
    # Everything of the base class that the mixin overrides or whose order of work it leans on.
    relies_on=(
        "vllm.v1.engine.core:EngineCore.step",
        "vllm.v1.engine.core:EngineCore.step_with_batch_queue",
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_request_with_output",
        *(
            S + name
            for name in (
                "__init__",
                "schedule",
                "update_from_output",
                "add_request",
                "finish_requests",
                "reset_prefix_cache",
                "get_num_unfinished_requests",
                "_update_after_schedule",
                "_free_request",
                "_free_request_blocks",
                "_drain_deferred_frees",
                "_preempt_request",
                "_handle_blocked_waiting_request",
                "_get_local_prefix_cache_hit",
            )
        ),
    ),
)
