"""The seal: this process runs vLLM with every patch in place, or not at all.

Owns: the version check, the all-or-nothing installation, and the value that all processes of a server must agree on.
The scheduler and the workers refuse to start unsealed, and the server is not ready until every process has reported
the same seal.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

from retire import __version__
from retire.core.errors import SeamError

VLLM_VERSION = "0.32.0"


@dataclass(frozen=True, slots=True)
class Seal:
    """What a process attests.  `runner`: the generations of the model runner that the safe points were written for."""

    retire: str
    vllm: str
    pins: str
    runner: str = "v1 v2"

    def as_dict(self) -> dict[str, str]:
        """JSON-ready form, as it travels between processes."""
        return asdict(self)


_seal: Seal | None = None


def current() -> Seal | None:
    """The seal of this process, None when it is unpatched."""
    return _seal


def require() -> Seal:
    """The seal of this process; SeamError when it runs unpatched."""
    if _seal is None:
        raise SeamError("this process runs vLLM without RETIRE's patches; is `retire` in VLLM_PLUGINS everywhere?")
    return _seal


def of_worker(_worker: object) -> dict[str, str] | None:
    """For `collective_rpc`: the seal of a worker's process."""
    return _seal.as_dict() if _seal is not None else None


def install() -> Seal:
    """Check version and pins, then install every patch or none.  Idempotent.

    Raises:
        SeamError: another vLLM version, changed source, or a foreign wrapper on a target.
    """
    global _seal  # noqa: PLW0603 - one seal per process, set once
    if _seal is not None:
        return _seal
    import vllm

    if vllm.__version__ != VLLM_VERSION:
        raise SeamError(f"RETIRE {__version__} needs vLLM {VLLM_VERSION}, found {vllm.__version__}")
    from vllm_patches import install_all

    pins = install_all()
    text = "\n".join(f"{target} {value}" for target, value in sorted(pins.items()))
    _seal = Seal(retire=__version__, vllm=vllm.__version__, pins=hashlib.sha256(text.encode()).hexdigest()[:16])
    return _seal


def switch(layers: str, *, live: bool) -> None:
    """Put the safe points of "attention" or "linear" layers into this sealed process's vLLM, or take them out.

    Raises:
        SeamError: unpatched, or somebody else's code stands in their place.
    """
    require()
    from vllm_patches import switch

    switch(layers, live=live)


def doctor() -> int:
    """Print what this installation is made of; 0 when a server could start, 1 when not."""
    import vllm

    from vllm_patches import examine

    print(f"retire   {__version__}")
    ok = vllm.__version__ == VLLM_VERSION
    print(f"vllm     {vllm.__version__}  {'ok' if ok else f'needs {VLLM_VERSION}'}")
    for target, verdict in examine():
        ok &= verdict == "ok"
        print(f"{'  ok ' if verdict == 'ok' else 'FAIL '} {target}" + ("" if verdict == "ok" else f": {verdict}"))
    print("seal     " + ("would be granted" if ok else "refused"))
    return 0 if ok else 1
