"""What stands beside every number: commit, patches, model, versions, machine, date.

And what two measurements must have in common to be parts of one run (`identity`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.experiment import Experiment, Result

ROOT = Path(__file__).resolve().parents[1]
UNKNOWN = "unknown"


SOURCES = ("retire", "vllm_patches", "harness")
_SETTINGS = ("RETIRE_", "VLLM_", "OMP_", "KMP_", "MALLOC_", "GLIBC_", "CUDA_", "TORCH", "LD_PRELOAD")
_HARMLESS = ("RETIRE_CACHE", "RETIRE_STATE_DIR", "RETIRE_URL", "VLLM_API_KEY")


def manifest(
    name: str, result: Result, *, quick: bool, sittings: Sequence[str] = (), identity: str = ""
) -> dict[str, Any]:
    """The manifest of one run.  What cannot be found out is "unknown".

    `sittings`: when each began in which something was measured; told when there were several.
    `identity`: the digest of the run's, if it was kept in a file.
    """
    return {
        "bench": name,
        "quick": quick,
        **commit(ROOT),
        "pins": result.seal.get("pins", UNKNOWN),
        "model": result.model,
        "vllm": result.seal.get("vllm", UNKNOWN),
        **_machine(),
        **({"sittings": len(sittings), "begun": ", ".join(sittings)} if len(sittings) > 1 else {}),
        **({"identity": identity} if identity else {}),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def identity(experiment: Experiment, *, quick: bool, served: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What trials of one run have in common: a change of any of it would be a change of what is measured.

    `sources` is a digest of our own files, which tells a dirty tree from another one and holds for an installed copy.
    `settings` is a digest: environment variables that servers inherit.  `served`: what a running server says it is.
    """
    model = getattr(experiment, "model", None)
    packages = {f"{one.name}=={one.version}" for one in metadata.distributions()}
    settings = {
        f"{name}={value}" for name, value in os.environ.items() if name.startswith(_SETTINGS) and name not in _HARMLESS
    }
    return {
        "bench": experiment.name,
        "quick": quick,
        "parameters": repr(experiment),
        **{name: _content(value) for name, value in vars(experiment).items() if isinstance(value, Path)},
        "commit": commit(ROOT)["commit"],
        "sources": _digest(_contents(ROOT / name for name in SOURCES)),
        "model": model or UNKNOWN,
        "weights": _digest(_looks(Path(model))) if model else UNKNOWN,
        "packages": _digest(sorted(packages)),
        "settings": _digest(sorted(settings)),
        "served": dict(served or {}),
        **_machine(),
    }


def digest_of(identity: Mapping[str, Any]) -> str:
    """A short name of an identity."""
    return _digest([json.dumps(identity, sort_keys=True)])


def _machine() -> dict[str, Any]:
    return {
        "torch": _version("torch"),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _content(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else UNKNOWN


def _contents(packages: Iterable[Path]) -> Iterable[str]:
    """Every file of ours whose content decides what is measured."""
    for package in packages:
        for file in sorted(package.rglob("*")):
            if file.suffix in {".py", ".toml"}:
                yield f"{file.relative_to(ROOT)} {hashlib.sha256(file.read_bytes()).hexdigest()}"


def _looks(folder: Path) -> Iterable[str]:
    """Name, size and time of every file of a model's folder; nothing for a name that is no folder."""
    for file in sorted(folder.glob("*")) if folder.is_dir() else ():
        about = file.stat()
        yield f"{file.name} {about.st_size} {about.st_mtime_ns}"


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


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
