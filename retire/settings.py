"""Settings of one server, read from the environment.

`retire serve` has flags for some of them and writes those there; a plain vLLM server with `VLLM_PLUGINS=retire` takes
them as they are.
Every process of the server inherits the same environment, so all of them read the same values.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from retire.core.errors import SeamError
from retire.core.quantum import Policy

PLUGIN_NAME = "retire"
DRAM_ENV = "RETIRE_DRAM_BYTES"
POLICY_ENV = "RETIRE_POLICY"
ARM_ENV = "RETIRE_ARM_MS"
JOURNAL_ENV = "RETIRE_JOURNAL"
AUDIT_ENV = "RETIRE_AUDIT"
TABLE_ENV = "RETIRE_TABLE"  # set by the process that owns the state directory, inherited by engine and workers


@dataclass(frozen=True)
class Settings:
    """`scopes`: slots per tenant.  `rows`: requests per tenant that can hold a ticket at once.

    `policy`: when steps check authority, and how much of prompts one computes.
    `arm_ms`: a step that is expected to take so long checks authority at its safe points; shorter ones end soon by
    themselves, and check it too under the policy `always` alone.
    `pin_ttl_ms`, `max_pin_ttl_ms`: pins live so long by default, and at most.
    `dram_bytes`: of each worker's host memory for pages of superseded requests; 0 turns that tier off.
    `min_inherit_tokens`: a shorter common prefix is not worth a certificate.
    `limit_patience`: for so many layers a worker waits to be told how much of a revoked request is still wanted.
    `window_layers`: in armed steps an accelerator is never more than two windows of so many layers behind the host.
    `backlog_bytes`: send buffer of a scoped stream's socket; what the last gate cannot call back.
    `journal_dir`: where every process keeps its journal; None: in its memory, the newest records alone.
    `audit`: the journal has every frame and every row of a step.
    """

    state_dir: Path
    scopes: int = 4096
    rows: int = 8192
    policy: Policy = Policy.SELECTIVE
    arm_ms: int = 10
    pin_ttl_ms: int = 30_000
    max_pin_ttl_ms: int = 600_000
    dram_bytes: int = 1 << 30
    min_inherit_tokens: int = 0
    limit_patience: int = 1
    window_layers: int = 4
    backlog_bytes: int = 16_384
    journal_dir: Path | None = None
    audit: bool = False

    @classmethod
    def from_env(cls) -> Settings:
        """Read the environment; unset values take the defaults above.

        Raises:
            SeamError: a size that is none, a policy that nobody knows, an `arm_ms` below 1.
        """
        default_dir = Path(os.environ.get("XDG_STATE_HOME", Path.home() / ".local" / "state")) / "retire"
        return cls(
            state_dir=Path(os.environ.get("RETIRE_STATE_DIR", default_dir)),
            scopes=int(os.environ.get("RETIRE_SCOPES", cls.scopes)),
            rows=int(os.environ.get("RETIRE_ROWS", cls.rows)),
            policy=_policy(),
            arm_ms=_arm_ms(cls.arm_ms),
            pin_ttl_ms=int(os.environ.get("RETIRE_PIN_TTL_MS", cls.pin_ttl_ms)),
            max_pin_ttl_ms=int(os.environ.get("RETIRE_MAX_PIN_TTL_MS", cls.max_pin_ttl_ms)),
            dram_bytes=_size_in(DRAM_ENV, cls.dram_bytes),
            min_inherit_tokens=int(os.environ.get("RETIRE_MIN_INHERIT_TOKENS", cls.min_inherit_tokens)),
            limit_patience=int(os.environ.get("RETIRE_LIMIT_PATIENCE", cls.limit_patience)),
            window_layers=max(1, int(os.environ.get("RETIRE_WINDOW_LAYERS", cls.window_layers))),
            backlog_bytes=int(os.environ.get("RETIRE_BACKLOG_BYTES", cls.backlog_bytes)),
            journal_dir=Path(directory) if (directory := os.environ.get(JOURNAL_ENV)) else None,
            audit=os.environ.get(AUDIT_ENV, "0") not in ("", "0"),
        )


def _policy() -> Policy:
    asked = os.environ.get(POLICY_ENV, Policy.SELECTIVE)
    if asked not in set(Policy):
        raise SeamError(f"{POLICY_ENV}: no policy is called {asked!r}; known: {', '.join(Policy)}")
    return Policy(asked)


def _arm_ms(default: int) -> int:
    asked = int(os.environ.get(ARM_ENV, default))
    if asked < 1:
        raise SeamError(f"{ARM_ENV}: {asked} ms is no time; {POLICY_ENV}={Policy.ALWAYS} arms every step")
    return asked


def size_bytes(text: str) -> int:
    """Bytes of "1073741824", "512MiB" or "2 GiB".  Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+)\s*([KMGT]iB)?", text.strip(), re.ASCII)
    if found is None:
        raise ValueError(f"{text!r} is no size: give bytes, or a number and KiB, MiB, GiB or TiB")
    number, unit = found.groups()
    return int(number) << (10 * (1 + "KMGT".index(unit[0])) if unit else 0)


def _size_in(variable: str, default: int) -> int:
    try:
        return size_bytes(os.environ.get(variable, str(default)))
    except ValueError as error:
        raise SeamError(f"{variable}: {error}") from None


def named_in_vllm_plugins() -> bool:
    """Whether `VLLM_PLUGINS` names us.  Without that the installed package stays inert."""
    return PLUGIN_NAME in os.environ.get("VLLM_PLUGINS", "").split(",")
