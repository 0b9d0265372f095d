"""What the routes accept and answer, as pydantic models: validation and OpenAPI come from the same place."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from retire.core.errors import Unsupported
from retire.core.types import EPOCH_MAX, SCOPE_MAX_CHARS, Contract, Equivalence, Inherit, Tier, TokenCount
from retire.settings import Settings

ScopeName = Annotated[StrictStr, Field(min_length=1, max_length=SCOPE_MAX_CHARS, examples=["plan-7"])]
EpochNumber = Annotated[StrictInt, Field(ge=1, le=EPOCH_MAX, examples=[3])]
TOKENS_MAX = DEADLINE_MAX_MS = 2**31 - 1
REASON_MAX_CHARS = 256


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RetainBody(_Strict):
    """How long, and where, certified blocks wait for the successor."""

    tier: Literal["hbm", "dram"] = "hbm"
    ttl_s: Annotated[float, Field(ge=0.001, allow_inf_nan=False)] | None = None


class ContractBody(_Strict):
    """What the runtime accepts of the successor."""

    inherit: Literal["certified", "none"] = "certified"
    equivalence: Literal["mode_matched", "exact"] = "mode_matched"
    keep_prefix: (
        Annotated[StrictInt, Field(ge=1, le=TOKENS_MAX, description="X' starts with so many tokens of X")] | None
    ) = None
    deadline_ms: Annotated[StrictInt, Field(ge=1, le=DEADLINE_MAX_MS)] | None = None
    retain: RetainBody = RetainBody()

    def to_contract(self, settings: Settings) -> Contract:
        """The protocol's value.

        Raises:
            Unsupported: this server cannot honour it.
        """
        if self.retain.tier == "dram" and settings.dram_bytes == 0:
            raise Unsupported("this server keeps no pages in host memory", param="contract.retain.tier")
        ttl_ms = settings.pin_ttl_ms if self.retain.ttl_s is None else int(self.retain.ttl_s * 1000)
        if ttl_ms > settings.max_pin_ttl_ms:
            raise Unsupported(
                f"ttl_s above this server's limit of {settings.max_pin_ttl_ms / 1000:g}", param="contract.retain.ttl_s"
            )
        return Contract(
            inherit=Inherit(self.inherit),
            equivalence=Equivalence(self.equivalence),
            keep_prefix_tokens=None if self.keep_prefix is None else TokenCount(self.keep_prefix),
            deadline_ms=self.deadline_ms,
            tier=Tier(self.retain.tier),
            ttl_ms=ttl_ms,
        )


class SuccessorBody(_Strict):
    """The request of the new epoch, sent with the revocation of the old one."""

    endpoint: Literal["/v1/chat/completions", "/v1/completions"] = "/v1/chat/completions"
    body: dict[str, Any] = Field(description="an ordinary OpenAI request for that endpoint")


class SupersedeBody(_Strict):
    """Revoke a scope's current epoch, with or without the request that replaces it."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"scope": "plan-7", "expected_epoch": 3, "reason": "user_steering"},
                {
                    "scope": "plan-7",
                    "expected_epoch": "*",
                    "contract": {"inherit": "certified", "keep_prefix": 6000},
                    "successor": {
                        "endpoint": "/v1/chat/completions",
                        "body": {"model": "smollm2", "messages": [{"role": "user", "content": "keep the API"}]},
                    },
                },
            ]
        },
    )

    scope: ScopeName
    expected_epoch: EpochNumber | Literal["*"] = Field(description='the epoch to revoke; "*": whatever is current')
    reason: Annotated[StrictStr, Field(max_length=REASON_MAX_CHARS)] | None = None
    contract: ContractBody = ContractBody()
    successor: SuccessorBody | None = None


class Accepted(BaseModel):
    """Answer of POST /supersede without a successor.  Equal for every replay of one idempotency key."""

    id: str
    scope: str
    old_epoch: int
    new_epoch: int
    reason: str | None
    accepted: Literal[True] = True
    fenced: bool | None = Field(default=None, description="with `Prefer: wait=fenced`: are obsolete rows closed")
    fence_ms: float | None = None


class ScopeInfo(BaseModel):
    """One scope of the caller's tenant."""

    scope: str
    epoch: int
    paused: bool
    cancelled: bool
    live_requests: int
    transition: str | None = Field(default=None, description="id of the latest transition known to this process")


class ScopeList(BaseModel):
    """GET /scopes."""

    scopes: list[ScopeInfo]
    next: str | None = Field(default=None, description="ask again with `after` set to it; null: this was the last page")


class TransitionInfo(BaseModel):
    """GET /transitions/{id}.  Times are ms since ADVANCE.

    `accepted`, `fenced`, `reclaimed` and `closed` are separate facts: a transition that was overtaken closes without
    reclaiming, its pins live on in the next one.
    """

    id: str
    scope: str
    old_epoch: int
    new_epoch: int
    reason: str | None
    contract: dict[str, Any]
    accepted: bool
    fenced: bool
    reclaimed: bool
    closed: bool
    outcome: str | None
    advance_ms: float | None = Field(description="from the call's arrival at the gate to the stored word")
    stages: dict[str, float]
    receipts: list[dict[str, Any]]
    certificate: dict[str, Any] | None
    refusal: str | None
    adopted_blocks: list[list[int | None]] | None
    inherited_tokens: int
    published: list[dict[str, Any]] = Field(description="per predecessor request and choice: what was published")


class ServerStatus(BaseModel):
    """GET /retire/status."""

    seal: dict[str, str]
    state_dir: str
    stated_backlog: dict[str, int]
    policy: str = Field(description="when steps check authority, and how the prefill quantum is chosen")
    quanta: dict[str, int] = Field(description="per prefill quantum, how many steps were given it; {} without a choice")
    engine: dict[str, int] = Field(description="what is held for the tenant's scopes; all 0 when nothing is")
    tier: dict[str, int] = Field(description="pages in host memory: what is there and what happened; {} without it")
