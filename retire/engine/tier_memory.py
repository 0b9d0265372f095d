"""Where the bytes of a page are, on the device and in host memory, and how they move.

Owns: the pieces that make up a page, the host arena, the copy of a page.  Must not know: jobs, tickets, digests.
Strategy: a page is a list of contiguous pieces, each at `address + block · stride`, whatever layout vLLM chose; in its
host slot they stand one after the other.  The arena grows by chunks, as slots are first used, and keeps what it has.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

CHUNK_BYTES = 32 << 20

Copies = Iterable[tuple[int, int, int]]
"""(to, from, bytes): addresses."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Contiguous bytes of every block: `size` bytes at `address + block · stride`."""

    address: int
    stride: int
    size: int


def pieces_of(caches: Iterable[torch.Tensor], num_blocks: int) -> tuple[Piece, ...]:
    """The pieces of one block of a KV group, in order of their addresses.

    `caches`: each layer's cache, [num_blocks · k, ...], k kernel blocks to a block.  Layers that share memory count
    once, pieces that touch are one.
    """
    found = sorted({piece for cache in caches for piece in _layer_pieces(cache, num_blocks)}, key=lambda p: p.address)
    merged: list[Piece] = []
    for piece in found:
        last = merged[-1] if merged else None
        if last is not None and last.stride == piece.stride and last.address + last.size == piece.address:
            merged[-1] = Piece(last.address, last.stride, last.size + piece.size)
        else:
            merged.append(piece)
    return tuple(merged)


def _layer_pieces(cache: torch.Tensor, num_blocks: int) -> list[Piece]:
    view = cache if cache.shape[0] == num_blocks else cache.unflatten(0, (num_blocks, -1))
    item = view.element_size()
    run = item
    outer: list[tuple[int, int]] = []
    dimensions = zip(view.stride()[1:], view.shape[1:], strict=True)
    for stride, count in sorted((stride * item, count) for stride, count in dimensions):
        if count == 1:
            continue
        if stride == run and not outer:
            run *= count
        else:
            outer.append((stride, count))
    offsets = [0]
    for stride, count in outer:
        offsets = [offset + index * stride for offset in offsets for index in range(count)]
    return [Piece(view.data_ptr() + offset, view.stride(0) * item, run) for offset in offsets]


class HostArena:
    """Slots of `slot_bytes` each.  `pin(address, size)` is called on every chunk as it comes into being."""

    def __init__(self, slot_bytes: int, pin: Callable[[int, int], object] = lambda _address, _size: None) -> None:
        self._slot_bytes = slot_bytes
        self._per_chunk = max(1, CHUNK_BYTES // slot_bytes)
        self._pin = pin
        self._chunks: dict[int, tuple[memoryview, int]] = {}

    def slot(self, index: int) -> tuple[memoryview, int]:
        """The slot's bytes, and where they are."""
        number, place = divmod(index, self._per_chunk)
        if number not in self._chunks:
            self._chunks[number] = self._grown()
        chunk, address = self._chunks[number]
        offset = place * self._slot_bytes
        return chunk[offset : offset + self._slot_bytes], address + offset

    def _grown(self) -> tuple[memoryview, int]:
        size = self._per_chunk * self._slot_bytes
        memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._pin(address, size)
        return memoryview(memory), address


class Mover(Protocol):
    """Copies between device and host."""

    def mark(self) -> Any:
        """On the step's thread, before it launches anything: what has been launched so far."""

    def enter(self) -> None:
        """Once, on the transfer thread, before anything is moved."""

    def move(self, copies: Copies, after: Any) -> None:
        """Copy, starting after what `mark` saw, and return when the bytes have arrived."""


class CpuMover:
    """The device's memory is host memory.  Steps run to their end before the next one begins: nothing to wait for."""

    def mark(self) -> None:
        """Nothing is in flight between two steps."""

    def enter(self) -> None:
        """Leave the cores of the model alone: OpenMP has bound the main thread, which this one takes after."""
        allowed = os.sched_getaffinity(os.getppid())
        os.sched_setaffinity(0, allowed - os.sched_getaffinity(os.getpid()) or allowed)

    def move(self, copies: Copies, after: None) -> None:  # noqa: ARG002 - Mover's signature
        """`memmove` by address: it lets go of the interpreter, and takes no OpenMP thread as torch's copies do."""
        for to, source, size in copies:
            ctypes.memmove(to, source, size)


class CudaMover:
    """Through a stream of its own, with vLLM's batched copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=torch.cuda.Stream.priority_range()[0])

    def mark(self) -> torch.cuda.Event:
        """An event behind every kernel that wrote the pages to copy out, or still reads the blocks to fill."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def enter(self) -> None:
        """CUDA's current device is the thread's own."""
        torch.cuda.set_device(self._device)

    def move(self, copies: Copies, after: torch.cuda.Event) -> None:
        """One batch; the host waits, so what comes after it needs no event."""
        from vllm import _custom_ops as ops

        to, source, size = (torch.tensor(column, dtype=torch.int64) for column in zip(*copies, strict=True))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            ops.swap_blocks_batch(source, to, size)
        self._stream.synchronize()


def mover_of(device: torch.device) -> Mover:
    """How bytes move from and to this device."""
    return CpuMover() if device.type == "cpu" else CudaMover(device)


def pinned(device: torch.device) -> Callable[[int, int], object]:
    """How host memory is made ready for this device."""
    if device.type == "cpu":
        return lambda _address, _size: None
    from vllm.v1.kv_offload.cpu.host_register import host_register

    return host_register
