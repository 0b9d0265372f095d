"""How far the host may run ahead of the device in armed steps.

Owns: the marks between windows of layers, and waiting for them.  Must not know: the table, rows, what a stop is.
Strategy: an accelerator computes long after the host has launched, so what the host sees at a layer says nothing about
what is still computed.  After every window of layers a mark goes behind all that was launched, and the host waits for
the mark before it: the device never has more than two windows left, and what the host decides takes effect within
them.  Marks are kept from step to step, so the end of one step and the beginning of the next do not add up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Mark(Protocol):
    """A place in the device's queue of work: `torch.cuda.Event`."""

    def record(self) -> object:
        """Put it behind everything that was launched."""

    def synchronize(self) -> object:
        """Return when the device has come there.  One that was never recorded has been reached."""


class RunAhead:
    """One per worker process.  `window`: so many layers are launched between two marks."""

    def __init__(self, window: int, mark: Callable[[], Mark], clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._window = window
        self._next, self._before = mark(), mark()
        self._layers = 0
        self._clock_ns = clock_ns

    def layer_point(self) -> int | None:
        """Before a layer.  At a window's end, when the device was seen to have come to the end of the one before."""
        self._layers += 1
        if self._layers % self._window:
            return None
        self._next.record()
        self._before.synchronize()
        self._next, self._before = self._before, self._next
        return self._clock_ns()

    def catch_up(self) -> int:
        """Wait until everything launched has been computed; when that was."""
        self._next.record()
        self._next.synchronize()
        return self._clock_ns()


def run_ahead(window: int) -> RunAhead | None:
    """For this process's device; None where it is the host itself."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda_alike():
        return None
    import torch

    return RunAhead(window, lambda: torch.cuda.Event(blocking=True))
