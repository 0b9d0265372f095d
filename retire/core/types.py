"""The nouns of the protocol.

Owns: identities, the contract, holdings and certificates, as frozen values.
Must not know: vLLM, HTTP, clocks.  Strategy: a value that cannot be built wrong needs no check later.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from collections.abc import Sequence

TenantId = NewType("TenantId", str)
ScopeId = NewType("ScopeId", str)
RequestId = NewType("RequestId", str)
TransitionId = NewType("TransitionId", str)
Epoch = NewType("Epoch", int)
BlockId = NewType("BlockId", int)
Generation = NewType("Generation", int)
TokenCount = NewType("TokenCount", int)

EPOCH_MAX = 2**64 - 1
SCOPE_MAX_CHARS = 256


class Stage(Enum):
    """The five stages of a transition, in order (paper 5.2)."""

    ADVANCE = "advance"
    FENCE = "fence"
    ALIGN = "align"
    RESUME = "resume"
    RECLAIM = "reclaim"


class Inherit(Enum):
    """What the successor may take over."""

    CERTIFIED = "certified"
    NONE = "none"


class Equivalence(Enum):
    """What the successor's output must equal."""

    MODE_MATCHED = "mode_matched"  # a clean run that reuses the same length
    EXACT = "exact"  # a clean cold run, bit for bit


class Tier(Enum):
    """Where certified blocks wait for their successor."""

    HBM = "hbm"
    DRAM = "dram"


class Refusal(Enum):
    """Why a successor starts cold.  Invariant 10: every refusal names its reason."""

    NOT_WANTED = "not_wanted"  # the contract says inherit: none
    NO_PREDECESSOR = "no_predecessor"  # nothing of the old epoch held completed blocks
    NO_COMMON_PREFIX = "no_common_prefix"  # shorter than one block common to all groups
    NOTHING_COMPLETED = "nothing_completed"  # the frontier lies before the first block boundary
    WINDOW_SLID = "window_slid"  # a sliding-window group no longer holds its window
    FINGERPRINT = "fingerprint"  # model, adapter, cache generation or layout differ
    GENERATION = "generation"  # a block was handed to another owner
    TENANT = "tenant"  # the holding belongs to another tenant
    QUOTA = "quota"  # the tenant may keep nothing more; the successor runs in a fresh cache generation
    UNPROFITABLE = "unprofitable"  # reuse would cost more than it saves
    OFF_GRID = "off_grid"  # equivalence exact: the prefix was not computed in the chunks of a clean run
    EXACT_UNAVAILABLE = "exact_unavailable"  # equivalence exact: this configuration cannot promise it
    EXPIRED = "expired"  # the pins outlived their time
    DEADLINE = "deadline"  # the successor came after the contract's deadline
    REVOKED = "revoked"  # weights, adapters or the cache changed in between
    CORRUPT = "corrupt"  # a page in host memory no longer matched its digest
    TRANSFER = "transfer"  # the restore from host memory failed or came too late


class Outcome(Enum):
    """How a transition closed.  Details are in its refusal; this is what metrics count."""

    INHERITED = "inherited"  # the successor adopted the certified blocks
    COLD = "cold"  # the successor started without them, for a named refusal
    OVERTAKEN = "overtaken"  # the scope was superseded again; a later transition owns the holdings
    CLIENT_LOST = "client_lost"  # the successor ended before it had adopted anything
    EXPIRED = "expired"  # nobody came for the pins in time
    CANCELLED = "cancelled"  # the scope was cancelled for good


@dataclass(frozen=True, slots=True)
class Contract:
    """What the runtime accepts of its successor (`C` in the paper).

    `keep_prefix_tokens` promises that X' starts with that many tokens of X.
    """

    inherit: Inherit = Inherit.CERTIFIED
    equivalence: Equivalence = Equivalence.MODE_MATCHED
    keep_prefix_tokens: TokenCount | None = None
    deadline_ms: int | None = None
    tier: Tier = Tier.HBM
    ttl_ms: int = 30_000

    @property
    def lifetime_ms(self) -> int:
        """How long pins are kept for a successor, counted from ADVANCE."""
        return self.ttl_ms if self.deadline_ms is None else min(self.ttl_ms, self.deadline_ms)


@dataclass(frozen=True, slots=True)
class Ticket:
    """An admitted request's tag, compared at every gate.

    `slot`, `raw`: the scope's slot and the raw word it held at admission (invariant 2).
    `row`, `incarnation`: the request's row-limit slot and which use of that slot is meant.
    """

    slot: int
    raw: int
    row: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One KV block under one ownership."""

    block: BlockId
    generation: Generation


@dataclass(frozen=True, slots=True)
class HostRef:
    """One KV page in host memory: all layers of one block of one group.  `digest`: XXH3-128 of its bytes."""

    slot: int
    digest: int


PageRef = BlockRef | HostRef | None
"""A page of a certificate; None where a window has let it go."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Geometry of a KV cache group.  `window_tokens` is None for full attention."""

    block_tokens: int
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Holding:
    """What one closed predecessor request leaves: pinned blocks under one owner (invariant 6).

    `tokens` covers at least `frontier_tokens` positions; `groups[g][i]` is the i-th block of group g,
    None where a sliding window has let it go.  `frontier_tokens` counts the tokens whose KV every
    participant has written in every layer (invariant 3).  `grid_tokens`: the prefix that was computed in the very
    chunks of a clean run, alone in its steps.  `guaranteed`: every block is kept by a pin; else some are readable only
    until they are reused.  `host`: the copy in host memory, shaped like `groups`; all None once a restore failed.
    """

    request: RequestId
    tenant: TenantId
    tokens: Sequence[int]
    frontier_tokens: TokenCount
    fingerprint: str
    groups: tuple[tuple[BlockRef | None, ...], ...]
    grid_tokens: TokenCount = TokenCount(0)
    guaranteed: bool = True
    host: tuple[tuple[HostRef | None, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class Successor:
    """The request that asks to inherit."""

    request: RequestId
    tenant: TenantId
    tokens: Sequence[int]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """The only thing that may cross a boundary (invariant 4).

    Covers tokens [0, `tokens`); `groups[g]` lists tokens / block size entries, positional from 0.
    `source` is the request that wrote the blocks, `target` the one that may adopt them,
    `transfer` the transition that carries them over.  `tier` HBM: the groups list device blocks to alias; DRAM: pages
    of host memory to restore into blocks of the target.
    """

    tenant: TenantId
    scope: ScopeId
    transfer: TransitionId
    source: RequestId
    target: RequestId
    tokens: TokenCount
    fingerprint: str
    groups: tuple[tuple[PageRef, ...], ...]
    tier: Tier = Tier.HBM
