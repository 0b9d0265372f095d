"""Seam: vllm.engine.arg_utils:EngineArgs.create_engine_config
Process: api    Kind: wrap
Why: a configuration in which a guarantee cannot hold must stop start-up before a model is loaded, and pages leave
    the device by a KV connector that nobody should have to name.
Delta: our KV connector is named, the finished configuration is checked, this process takes its state directory.
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
        settings = Settings.from_env()
        configuration.add_tier(self, settings.dram_bytes)
        config = original(self, *args, **kwargs)
        configuration.check(config, api_processes=self._api_process_count)
        home.own(settings, Registry.from_env().names)
        return config

    return create_engine_config


SEAM = Seam("vllm.engine.arg_utils:EngineArgs.create_engine_config", "wrap", build)
