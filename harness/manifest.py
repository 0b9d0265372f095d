"""What stands beside every number: commit, patches, model, versions, machine, date."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.experiment import Result

ROOT = Path(__file__).resolve().parents[1]
UNKNOWN = "unknown"


def manifest(name: str, result: Result, *, quick: bool) -> dict[str, Any]:
    """The manifest of one run.  What cannot be found out is "unknown"."""
    return {
        "bench": name,
        "quick": quick,
        **commit(ROOT),
        "pins": result.seal.get("pins", UNKNOWN),
        "model": result.model,
        "vllm": result.seal.get("vllm", UNKNOWN),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit(root: Path) -> dict[str, Any]:
    """`commit` and `dirty` of the checkout at `root`; of an installed copy nothing is known."""
    head, status = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain")
    if not (root / ".git").exists() or head is None or status is None:
        return {"commit": UNKNOWN, "dirty": UNKNOWN}
    return {"commit": head, "dirty": bool(status)}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],  # noqa: S607 - whichever git the user has
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return UNKNOWN


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), UNKNOWN)
