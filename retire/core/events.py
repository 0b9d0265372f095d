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
    from .types import Contract, Epoch, Holding, Refusal, RequestId, Successor, TransitionId


@dataclass(frozen=True, slots=True)
class EpochAdvanced:
    """The authority table holds `new_epoch` (paper 5.2, ADVANCE): the store has already happened.

    Messages may be lost, so `new_epoch` may lie further ahead than one; never at or behind the known epoch.
    """

    transition: TransitionId
    old_epoch: Epoch
    new_epoch: Epoch
    contract: Contract


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """A request of `epoch` reached the engine.  Feed `EpochAdvanced` first when its epoch is news."""

    successor: Successor
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class RequestClosed:
    """The receipts of a closing request are complete: `obsolete_closed` and `frontier_ready` of every participant.

    `holding` hands over pins already taken on the written blocks.  It is None when there are none to give, and
    when any participant's receipt is missing: invariant 7 fails closed to cold.
    """

    request: RequestId
    holding: Holding | None


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request ended by itself, or its client left.  It leaves no pins behind."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class CertificateAdopted:
    """The successor's block table was read back after installation: block ids per group, positional from 0."""

    request: RequestId
    blocks: tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True, slots=True)
class AdoptionFailed:
    """The certificate could not be installed, or the block table did not show it; the successor has not run."""

    request: RequestId
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class PinsExpired:
    """The transition's pins outlived the contract's `ttl_ms`, counted from their birth."""

    transition: TransitionId


@dataclass(frozen=True, slots=True)
class PinsYielded:
    """The pool needs the transition's best-effort pins back."""

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
    | PinsExpired
    | PinsYielded
    | CertificatesRevoked
    | ScopeCancelled
)
