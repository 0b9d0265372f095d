"""Faults that a worker can be told to have, over vLLM's own development route.

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

    def digest_pages(self, blocks: list[int]) -> dict[str, str]:
        """SHA-256 over the pages' bytes, layer by layer."""
        import torch

        digest = hashlib.sha256()
        for layer in self.model_runner.kv_caches:  # [blocks, KV heads, tokens, keys and values]
            digest.update(layer[blocks].contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return {"sha256": digest.hexdigest()}
