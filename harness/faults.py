"""Faults that a worker can be told to have, and looks at its pages, over vLLM's own development route.

Owns: the bytes of KV pages in the worker's process.  Must not know: whose pages they are, or when.
Loaded there by `--worker-extension-cls harness.faults.PageFaults`, called through `POST /collective_rpc`, which vLLM
serves under `VLLM_SERVER_DEV_MODE=1` only.
"""

from __future__ import annotations

import hashlib
from typing import Any

EXTENSION = f"{__name__}.PageFaults"


class PageFaults:
    """Mixed into the worker.  `blocks`: ids of KV blocks; a page is one block in one layer, keys and values."""

    model_runner: Any
    saved_pages: list[Any]

    def save_pages(self, blocks: list[int]) -> dict[str, str]:
        """Keep a copy of the pages."""
        self.saved_pages = [layer[blocks] for layer in self.model_runner.kv_caches]
        return self.digest_pages(blocks)

    def zero_pages(self, blocks: list[int]) -> dict[str, str]:
        """Overwrite the pages with zeros."""
        for layer in self.model_runner.kv_caches:
            layer[blocks] = 0
        return self.digest_pages(blocks)

    def restore_pages(self, blocks: list[int]) -> dict[str, str]:
        """Write back what was saved of the same blocks."""
        for layer, saved in zip(self.model_runner.kv_caches, self.saved_pages, strict=True):
            layer[blocks] = saved
        return self.digest_pages(blocks)

    def spoil_host_pages(self, slots: int) -> dict[str, int]:
        """Flip the first byte of the first `slots` slots of host memory."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        tier: Any = get_kv_transfer_group()
        for slot in range(slots):
            page, _ = tier.worker.arena.slot(slot)
            page[0] ^= 0xFF
        return {"slots": slots}

    def requests_blocks(self) -> dict[str, list[int]]:
        """Block ids of every request that this worker knows, in the order of its tokens (first KV group)."""
        return {name: list(request.block_ids[0]) for name, request in self.model_runner.requests.items()}

    def compare_pages(self, blocks: list[int], others: list[int]) -> dict[str, float]:
        """The share of bytes in which pages differ from others in the same order, and by how much at most.

        `largest` is in units of the pages' own root mean square, over every layer.
        """
        import torch

        different = total = 0
        largest = 0.0
        for layer in self.model_runner.kv_caches:
            mine, theirs = layer[blocks].contiguous(), layer[others].contiguous()
            different += int((mine.view(torch.uint8) != theirs.view(torch.uint8)).sum())
            total += mine.view(torch.uint8).numel()
            scale = float(theirs.float().square().mean().sqrt())
            largest = max(largest, float((mine.float() - theirs.float()).abs().max()) / scale if scale else 0.0)
        return {"different_bytes": different / total, "largest": largest}

    def digest_pages(self, blocks: list[int]) -> dict[str, str]:
        """SHA-256 over the pages' bytes, layer by layer."""
        import torch

        digest = hashlib.sha256()
        for layer in self.model_runner.kv_caches:  # [blocks, KV heads, tokens, keys and values]
            digest.update(layer[blocks].contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return {"sha256": digest.hexdigest()}
