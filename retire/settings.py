"""Settings of one server, read from the environment.

`retire serve` has flags for some of them and writes those there; a plain vLLM server with `VLLM_PLUGINS=retire` takes
them as they are.
Every process of the server inherits the same environment, so all of them read the same values.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PLUGIN_NAME = "retire"
TABLE_ENV = "RETIRE_TABLE"  # set by the process that owns the state directory, inherited by engine and workers


@dataclass(frozen=True)
class Settings:
    """`scopes`: slots per tenant.  `rows`: requests per tenant that can hold a ticket at once.

    `arm_rows`: a step with at least this many rows checks authority at its safe points; shorter steps end soon by
    themselves.  `pin_ttl_ms`, `max_pin_ttl_ms`: pins live so long by default, and at most.
    `backlog_bytes`: send buffer of a scoped stream's socket; what the last gate cannot call back.
    """

    state_dir: Path
    scopes: int = 4096
    rows: int = 8192
    arm_rows: int = 128
    pin_ttl_ms: int = 30_000
    max_pin_ttl_ms: int = 600_000
    backlog_bytes: int = 16_384

    @classmethod
    def from_env(cls) -> Settings:
        """Read the environment; unset values take the defaults above."""
        default_dir = Path(os.environ.get("XDG_STATE_HOME", Path.home() / ".local" / "state")) / "retire"
        return cls(
            state_dir=Path(os.environ.get("RETIRE_STATE_DIR", default_dir)),
            scopes=int(os.environ.get("RETIRE_SCOPES", cls.scopes)),
            rows=int(os.environ.get("RETIRE_ROWS", cls.rows)),
            arm_rows=int(os.environ.get("RETIRE_ARM_ROWS", cls.arm_rows)),
            pin_ttl_ms=int(os.environ.get("RETIRE_PIN_TTL_MS", cls.pin_ttl_ms)),
            max_pin_ttl_ms=int(os.environ.get("RETIRE_MAX_PIN_TTL_MS", cls.max_pin_ttl_ms)),
            backlog_bytes=int(os.environ.get("RETIRE_BACKLOG_BYTES", cls.backlog_bytes)),
        )


def named_in_vllm_plugins() -> bool:
    """Whether `VLLM_PLUGINS` names us.  Without that the installed package stays inert."""
    return PLUGIN_NAME in os.environ.get("VLLM_PLUGINS", "").split(",")
