"""Requests that come out of the protocol.

Owns: one frozen value per thing the caller must do, named in the imperative.
Must not know: how an engine does it.  Strategy: effects of one step are carried out in the order given, and all of
them before the next event of the same scope is fed; each docstring says what the effect must follow, and why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .types import Certificate, Holding, Outcome, Refusal, RequestId, Stage, TransitionId


@dataclass(frozen=True, slots=True)
class CloseRequests:
    """Launch nothing more for these requests and collect their receipts; answer each with `RequestClosed`.

    Follows the store that revoked their epoch (revoke first).  Withdraws an `InstallCertificate` or a wait that is
    pending for any of them, so it precedes a `ReleasePins` of the same step.  Each request is named once.
    """

    requests: frozenset[RequestId]


@dataclass(frozen=True, slots=True)
class InstallCertificate:
    """Let the certificate's target alias the certified blocks, read its table back, then let it run.

    Of tier DRAM: restore the pages into blocks of the target first, verified.  Follows the last receipt of every
    closing request (invariants 3 and 4).  Answer with `CertificateAdopted` or `AdoptionFailed`; the pins stay until
    then.  A second one for the same target takes the place of the first.
    """

    certificate: Certificate


@dataclass(frozen=True, slots=True)
class StartCold:
    """Let the successor run without a certificate, and report the refusal.  What is published serves it as anybody.

    Refused by QUOTA it reads nothing: its cache generation is fresh.  Follows the last receipt of every closing
    request.  Withdraws an `InstallCertificate` of the same request, so it precedes the `ReleasePins` of the same step.
    Invariant 10: the refusal names the reason.
    """

    request: RequestId
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class StartFresh:
    """Let a request run that no transition wants as its successor.  Follows its admission only."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class OffloadPages:
    """Copy the holding's pages to host memory; answer with `PagesOffloaded`, whatever happens.

    Follows the last receipt of every closing request (invariant 5).  The pins stay until `ReturnBlocks` or the release.
    """

    holding: Holding
    transition: TransitionId


@dataclass(frozen=True, slots=True)
class ReturnBlocks:
    """The pages live in host memory now: give the device blocks back.  They stay readable until they are reused.

    Follows the verified copy of every page.  The holding itself stays owned.
    """

    holding: Holding


@dataclass(frozen=True, slots=True)
class ReleasePins:
    """Drop these holdings' pins and pages in host memory; the protocol has forgotten them (invariant 6: once).

    Follows whatever ended their use: the verified adoption (the successor's own references keep the blocks live),
    or the `StartCold` or `CloseRequests` that withdrew the installation.  Never empty.
    """

    holdings: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class ReportStage:
    """Record that `stage` of the transition has ended.  Follows the event and the effects that ended it.

    A report may be late, never early: `Stage.FENCE` is not claimed while one receipt is missing.
    """

    transition: TransitionId
    stage: Stage


@dataclass(frozen=True, slots=True)
class ReportClosed:
    """Record how the transition ended.  Follows every other effect of that transition; nothing about it comes later."""

    transition: TransitionId
    outcome: Outcome


Effect = (
    CloseRequests
    | InstallCertificate
    | StartCold
    | StartFresh
    | OffloadPages
    | ReturnBlocks
    | ReleasePins
    | ReportStage
    | ReportClosed
)
