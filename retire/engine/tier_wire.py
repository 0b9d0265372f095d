"""What the scheduler tells the workers about transfers, and what they answer.

Plain values that pickle: they ride on vLLM's SchedulerOutput and ModelRunnerOutput.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from retire.core.types import RequestId, Ticket

DIGEST_BITS = 128


def joined(digests: Sequence[int]) -> int:
    """The digests of one page on every rank as one number, rank r at bit 128·r."""
    return sum(digest << DIGEST_BITS * rank for rank, digest in enumerate(digests))


def of_rank(digest: int, rank: int) -> int:
    """One rank's part of a joined digest."""
    return digest >> DIGEST_BITS * rank & (1 << DIGEST_BITS) - 1


@dataclass(frozen=True, slots=True)
class Move:
    """One page between block `block` of group `group` on the device and host slot `slot`.

    `digest`: what the bytes in the slot must hash to before they may be restored, joined over the ranks; 0 for a page
    that goes out.
    """

    group: int
    block: int
    slot: int
    digest: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """One transfer.  `target` and `ticket`: the request a restore is for; None for an offload."""

    job: int
    moves: tuple[Move, ...]
    target: RequestId | None = None
    ticket: Ticket | None = None


@dataclass(frozen=True)
class Orders(KVConnectorMetadata):
    """Transfers to begin, and jobs that nobody waits for any more."""

    begin: tuple[Order, ...] = ()
    cancel: tuple[int, ...] = ()


class Ended(Enum):
    """How a transfer ended on one rank."""

    DONE = "done"
    CORRUPT = "corrupt"  # a page in host memory did not match its digest
    LATE = "late"  # the target lost its ticket
    CANCELLED = "cancelled"
    FAILED = "failed"  # an error on the worker; its log says which


@dataclass(frozen=True, slots=True)
class Result:
    """One rank's end of a job.

    `digests`: of the pages that went out, in the order of the moves.  `moved_bytes` in `busy_ns` of the transfer
    thread's time.
    """

    job: int
    rank: int
    ended: Ended
    digests: tuple[int, ...]
    moved_bytes: int
    busy_ns: int


@dataclass(frozen=True)
class Reports(KVConnectorWorkerMetadata):
    """The transfers that ended since the last step."""

    results: tuple[Result, ...]

    def aggregate(self, other: Reports) -> Reports:
        """The reports of several ranks in one."""
        return Reports(self.results + other.results)
