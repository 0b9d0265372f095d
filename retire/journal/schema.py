"""One record of the journal, and the file it lies in.

Owns: the layout; what each kind of record puts where.  Must not know: who writes, who reads, what follows from it.
Strategy: sixteen 8-byte words, so that a record is written by one call and a torn one shows in its checksum.  Times of
two processes order nothing: what does are raw words of the authority table, which only grow, and the numbers of one
process's own records.

====  =========  =====================================================================================================
word  name       meaning
====  =========  =====================================================================================================
0     seq        1, 2, ... within one process; 0 where nothing was written
1     at_ns      CLOCK_MONOTONIC
2     kind       `Kind` | flags << 8
3     slot       the scope's slot in the table; `NOWHERE` where none is concerned
4     seen       the scope's raw word as this process read it for this very act
5     word       the raw word that the act was done under (a ticket's), or that was replaced
6     epoch      public epoch
7     key        64 bits of (tenant, scope)
8, 9  transition 128-bit id, low half first; 0 for none
10    ticket     row << 32 | incarnation
11    request    hash of the engine's request id; one ticket may have several requests
12    a          see `Kind`
13    b          see `Kind`
14    c          see `Kind`
15    checksum   xxh3_64 of the words before it
====  =========  =====================================================================================================
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

MAGIC: Final = b"RETIREJL"
VERSION: Final = 1
RECORD_BYTES: Final = 128
NOWHERE: Final = 2**64 - 1
U64: Final = 2**64 - 1

_RECORD: Final = struct.Struct("<15Q")
_SUM: Final = struct.Struct("<Q")
_HEADER: Final = struct.Struct("<8sQQQQ80s")


class Kind(IntEnum):
    """What happened.  `seen` and `word` are as above unless said otherwise."""

    OPENED = 1  # the table, by its owner.  a: scope slots per tenant, b: unknown scopes start above it, c: its identity
    PLACED = 2  # a scope has this slot, from raw word `seen` on
    ADVANCED = 3  # the one store: `seen` took the place of `word`
    CANCELLED = 4  # a tombstone: `seen` took the place of `word`
    REVIVED = 5  # a cancelled scope is used again, under `seen`
    ISSUED = 6  # a ticket under `word`
    RETURNED = 7  # a ticket
    FRAME = 8  # audit: a frame went out.  a: which, b: digest of its bytes, c: their number
    RESPONSE = 9  # a scoped response is over.  a: frames that passed; `seen` at the last, b: newest record then
    WITHHELD = 10  # the gate let a frame not pass
    CLOSED = 11  # the table, in order
    MAPPED = 12  # the table, by another process.  c: its identity

    ADMITTED = 20  # the engine has the request
    LAUNCHED = 21  # rows of a step: more than one, or audit.  a: the step, b: first token, c: beyond the last
    RECEIPT = 22  # of those rows.  a, b: as LAUNCHED, c: computed up to here in every layer; flag 1: fewer
    STEPPED = 23  # the core took an event.  a: `core_step`, b: bit mask of its `EFFECTS`; epoch: after it
    PINNED = 24  # blocks of a request that is over.  a: how many, b: tokens completed, c: digest of block ids
    RELEASED = 25  # those pins
    CERTIFIED = 26  # request may adopt.  a: tokens, b: digest of block ids, c: whose; flag 1: from host memory
    ADOPTED = 27  # request did.  a: tokens, b: digest; flag 1: not comparable (host memory, or windows moved on)
    COLD = 28  # request starts without.  a: place in `REFUSALS`
    SHARED = 29  # audit: the prefix cache serves the request's blocks.  a: up to this token
    GONE = 30  # request has left the engine
    ENDED = 31  # a transition.  a: place in `OUTCOMES`
    PREEMPTED = 32  # request has lost its blocks and starts over

    CUT = 40  # a worker decided about running rows.  a: the step, b: they go on up to here, c: layer; flags: the choice


# Names that a number in a record stands for: its place here.  Names are added at the end, never moved.
PLACES: Final = ("IDLE", "FENCE", "ALIGN", "RESUME", "CANCELLED")
EVENTS: Final = (
    "EpochAdvanced",
    "RequestAdmitted",
    "RequestClosed",
    "RequestFinished",
    "CertificateAdopted",
    "AdoptionFailed",
    "PagesOffloaded",
    "PinsExpired",
    "CertificatesRevoked",
    "ScopeCancelled",
)
EFFECTS: Final = (
    "CloseRequests",
    "InstallCertificate",
    "StartCold",
    "StartFresh",
    "OffloadPages",
    "ReturnBlocks",
    "ReleasePins",
    "ReportStage",
    "ReportClosed",
)


REFUSALS: Final = (
    "not_wanted",
    "no_predecessor",
    "no_common_prefix",
    "nothing_completed",
    "window_slid",
    "fingerprint",
    "generation",
    "tenant",
    "quota",
    "unprofitable",
    "off_grid",
    "exact_unavailable",
    "expired",
    "deadline",
    "revoked",
    "corrupt",
    "transfer",
)
OUTCOMES: Final = ("inherited", "cold", "overtaken", "client_lost", "expired", "cancelled")


def core_step(before: str, event: str, after: str) -> int:
    """Names of the core's places and events as one word, a byte each."""
    return PLACES.index(before) | EVENTS.index(event) << 8 | PLACES.index(after) << 16


def core_step_names(word: int) -> tuple[str, str, str]:
    """What `core_step` packed."""
    return PLACES[word & 0xFF], EVENTS[word >> 8 & 0xFF], PLACES[word >> 16 & 0xFF]


class _Ticket(Protocol):
    @property
    def slot(self) -> int: ...
    @property
    def raw(self) -> int: ...
    @property
    def row(self) -> int: ...
    @property
    def incarnation(self) -> int: ...


def under(ticket: _Ticket) -> dict[str, int]:
    """A record's fields that say under which ticket something was done."""
    number = (ticket.row << 32 | ticket.incarnation & 0xFFFF_FFFF) & U64
    return {"slot": ticket.slot, "word": ticket.raw, "ticket": number}


class Record(NamedTuple):
    """See the module."""

    seq: int
    at_ns: int
    kind: Kind
    flags: int
    slot: int
    seen: int
    word: int
    epoch: int
    key: int
    transition: int
    ticket: int
    request: int
    a: int
    b: int
    c: int


class Head(NamedTuple):
    """Of a file.  `life`: names the process, also when its pid is used again.  `first`: number of its first record."""

    life: int
    pid: int
    first: int
    process: str


def pack(buffer: memoryview, offset: int, words: tuple[int, ...]) -> None:
    """Write the fifteen words before the checksum, and that.  Raises struct.error for what is no such word."""
    _RECORD.pack_into(buffer, offset, *words)
    end = offset + _RECORD.size
    _SUM.pack_into(buffer, end, xxh3_64_intdigest(buffer[offset:end]))


def unpack(data: bytes) -> Record | None:
    """A record; None where its checksum says that it was not completely written, or its kind is unknown."""
    words = _RECORD.unpack_from(data)
    if _SUM.unpack_from(data, _RECORD.size)[0] != xxh3_64_intdigest(data[: _RECORD.size]):
        return None
    seq, at_ns, kind, slot, seen, word, epoch, key, low, high, *rest = words
    try:
        return Record(seq, at_ns, Kind(kind & 0xFF), kind >> 8, slot, seen, word, epoch, key, high << 64 | low, *rest)
    except ValueError:
        return None


def pack_head(head: Head) -> bytes:
    """The first `RECORD_BYTES` of a file."""
    packed = _HEADER.pack(MAGIC, VERSION, head.life, head.pid, head.first, head.process.encode()[:80])
    return packed + _SUM.pack(xxh3_64_intdigest(packed))


def unpack_head(data: bytes) -> Head | None:
    """None where the file is no journal of this version."""
    if len(data) < RECORD_BYTES or _SUM.unpack_from(data, _HEADER.size)[0] != xxh3_64_intdigest(data[: _HEADER.size]):
        return None
    magic, version, life, pid, first, process = _HEADER.unpack_from(data)
    if (magic, version) != (MAGIC, VERSION):
        return None
    return Head(life, pid, first, process.rstrip(b"\0").decode(errors="replace"))
