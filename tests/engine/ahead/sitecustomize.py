"""Asynchronous scheduling where there is no device: streams and events that have nothing to wait for.

In the folder that `ahead_server` puts on its path; Python imports a module of this name by itself.
"""

from contextlib import nullcontext

from retire import seal

install = seal.install


class Nothing:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    wait_stream = synchronize = record


def patched_and_ahead():
    if seal.current() is None:
        install()
        import torch
        from vllm.platforms.cpu import CpuPlatform

        check = CpuPlatform.check_and_update_config

        def check_and_update_config(config):
            check(config)
            config.scheduler_config.async_scheduling = True
            chosen = config.scheduler_config.get_scheduler_cls().__name__
            print(f"scheduled by {chosen}, {config.max_concurrent_batches} at a time", flush=True)

        CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
        torch.cuda.Event = torch.cuda.Stream = Nothing
        torch.cuda.current_stream = lambda *_: Nothing()
        torch.cuda.stream = lambda _: nullcontext()
    return seal.current()


seal.install = patched_and_ahead
