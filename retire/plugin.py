"""Entry points that vLLM calls: `vllm.general_plugins` in every process, `vllm.endpoint_plugins` in the API process.

An installed but unnamed package changes nothing: both look for `retire` in `VLLM_PLUGINS` first.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from retire.core.errors import SeamError
from retire.settings import named_in_vllm_plugins

if TYPE_CHECKING:
    from retire.server.endpoint import RetireEndpoint


def general() -> None:
    """Seal this process.  Raises SeamError, which stops the process: an error here is not swallowed by vLLM."""
    if named_in_vllm_plugins():
        from retire import seal

        _one_clear_line()
        seal.install()


def _one_clear_line() -> None:
    """A refused start-up ends with its reason, not with a traceback through vLLM."""
    earlier = sys.excepthook
    if getattr(earlier, "__module__", None) == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, SeamError):
            print(f"retire: {error}", file=sys.stderr)
        else:
            earlier(kind, error, trace)

    sys.excepthook = hook


def endpoint() -> RetireEndpoint:
    """The HTTP side."""
    from retire.server.endpoint import RetireEndpoint

    return RetireEndpoint()
