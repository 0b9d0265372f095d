"""Every place where RETIRE changes vLLM, one module each.

Prefer an official seam, then a wrap; never a copied body.  `install_all` is called by `retire.seal.install` alone.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Iterator
from pathlib import Path

from retire.core.errors import SeamError
from vllm_patches import _seam

MODULES = (
    "engine_configuration",
    "endpoint_attached",
    "scheduler_class",
    "kv_publication",
    "block_generation",
    "engine_seal",
    "engine_transition",
    "engine_facts",
    "engine_weights",
    "engine_adapter_load",
    "engine_adapter_removal",
    "request_origin",
    "output_queue_ticket",
    "output_queue_gate",
    "worker_step",
    "worker_receipt",
    "model_forward",
    "draft_proposal",
    "attention_safe_point",
    "mla_attention_safe_point",
    "column_linear_safe_point",
    "row_linear_safe_point",
    "seeded_sample",
    "seeded_bookkeeping",
)
SAFE_POINTS = {
    "attention": ("attention_safe_point", "mla_attention_safe_point"),
    "linear": ("column_linear_safe_point", "row_linear_safe_point"),
}
PINS = Path(__file__).with_name("pins.toml")


def seams() -> tuple[_seam.Seam, ...]:
    """The seam of every patch module."""
    return tuple(importlib.import_module(f"{__name__}.{name}").SEAM for name in MODULES)


def pins() -> dict[str, str]:
    """Target → digest of the source that the patches were written against."""
    return dict(tomllib.loads(PINS.read_text(encoding="utf-8"))["pins"])


def examine() -> Iterator[tuple[str, str]]:
    """Each pinned target with "ok" or what is wrong with it."""
    expected = pins()
    for target in sorted({t for seam in seams() for t in seam.pinned}):
        try:
            found = _seam.digest(target)
        except SeamError as error:
            yield target, str(error)
            continue
        yield target, "ok" if expected.get(target) == found else "source differs from what RETIRE was written against"


def install_all() -> dict[str, str]:
    """Check every pin and every target, then swap all of them in; undo all on the first failure.

    Returns the pins.  Raises SeamError naming the first target that is not as expected.
    """
    for target, verdict in examine():
        if verdict != "ok":
            raise SeamError(f"{target}: {verdict}")
    for seam in seams():
        _seam.check_untouched(seam)
    undo = []
    try:
        for seam in seams():
            undo.append(_seam.swap(seam))  # noqa: PERF401 - each must be undone if the next fails
    except BaseException:
        for step in reversed(undo):
            step()
        raise
    return pins()


def switch(layers: str, *, live: bool) -> None:
    """Put the safe points of attention or linear layers in, or take them out: passes that need none pay for none."""
    for name in SAFE_POINTS[layers]:
        _seam.switch(importlib.import_module(f"{__name__}.{name}").SEAM, live=live)


def write_pins() -> None:
    """Record the digests of the installed vLLM (for maintainers, after reading what changed)."""
    targets = sorted({t for seam in seams() for t in seam.pinned})
    lines = [f'"{target}" = "{_seam.digest(target)}"' for target in targets]
    head = "# sha256 (first 32 hex digits) of the source text of each function, vLLM 0.32.0.\n[pins]\n"
    PINS.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
