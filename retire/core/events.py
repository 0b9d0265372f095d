"""Facts that go into the protocol.

Owns: one frozen value per thing that happened, named in the past tense.
Must not know: what follows from a fact (that is `transition.TABLE`), nor how it became known.
Strategy: an event carries only what the caller alone can know.  Its pins change hands when it is
accepted; a rejected event changes nothing, and what it carried is still the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .types import Contract, Epoch, Holding, HostRef, Refusal, RequestId, Successor, TransitionId


@dataclass(frozen=True, slots=True)
class EpochAdvanced:
    """The authority table holds `new_epoch` (paper 5.2, ADVANCE): the store has already happened.

    Messages may be lost, so `new_epoch` may lie further ahead than one; never at or behind the known epoch.
    `left` hands over pins on what requests of the old epoch wrote that had finished before the store; `refusal` names
    why something of that is not offered.
    """

    transition: TransitionId
    old_epoch: Epoch
    new_epoch: Epoch
    contract: Contract
    left: tuple[Holding, ...] = ()
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """A request of `epoch` reached the engine.  Feed `EpochAdvanced` first when its epoch is news."""

    successor: Successor
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class RequestClosed:
    """The receipts of a closing request are complete: `obsolete_closed` and `frontier_ready` of every participant.

    `holding` hands over pins already taken on the written blocks.  It is None when there are none to give, and
    when any participant's receipt is missing: invariant 7 fails closed to cold.  `refusal` then names why blocks that
    were written are not offered.
    """

    request: RequestId
    holding: Holding | None
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request ended by itself, or its client left.  It leaves no pins behind."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class CertificateAdopted:
    """The successor's block table was read back after installation: block ids per group, positional from 0.

    `start_tokens`: where it began to compute.  The prefix cache may have had more than was certified; windows then have
    moved on, and what none of them shows any more is None.
    """

    request: RequestId
    blocks: tuple[tuple[int | None, ...], ...]
    start_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AdoptionFailed:
    """The certificate could not be installed; the successor has not run.

    GENERATION: blocks that no pin guaranteed were reused since ALIGN; what is left of the holding is certified anew.
    CORRUPT, TRANSFER: the pages in host memory did not come back as they were, or not in time.
    """

    request: RequestId
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class PagesOffloaded:
    """The answer to `OffloadPages`: the copy in host memory, shaped like the holding's groups.

    A page is None in it whose block was reused before it could be read.  `host` is None when there was no room, or the
    copy failed; the holding is as it was.
    """

    request: RequestId
    host: tuple[tuple[HostRef | None, ...], ...] | None


@dataclass(frozen=True, slots=True)
class PinsExpired:
    """The transition's pins outlived the contract's `ttl_ms`, counted from their birth."""

    transition: TransitionId


@dataclass(frozen=True, slots=True)
class CertificatesRevoked:
    """Weights, adapters or the cache are about to change: nothing written before may be inherited."""


@dataclass(frozen=True, slots=True)
class ScopeCancelled:
    """The authority table holds a tombstone.  A terminal cancellation has no successor (paper 3.1)."""


Event = (
    EpochAdvanced
    | RequestAdmitted
    | RequestClosed
    | RequestFinished
    | CertificateAdopted
    | AdoptionFailed
    | PagesOffloaded
    | PinsExpired
    | CertificatesRevoked
    | ScopeCancelled
)
