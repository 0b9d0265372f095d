"""What records must agree with: the invariants of ARCHITECTURE.md, as far as a journal can show them.

Owns: one rule per method, named after what it holds.  Must not know: the server's code; only the schema is shared.
Strategy: within one process its own numbers order everything.  Between two processes nothing is ordered by time; a raw
word that was observed must have been stored, and says under which version.  Where a journal has gaps, a record that
should be there and is not proves nothing: then the answer is "not enough recorded", never "violated".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from retire.checker.reading import Journal
from retire.journal.schema import NOWHERE, REFUSALS, Kind, Record, core_step_names

_STORES: Final = (Kind.PLACED, Kind.ADVANCED, Kind.CANCELLED, Kind.REVIVED)


@dataclass(frozen=True)
class Finding:
    """`invariant`: its number in ARCHITECTURE.md."""

    invariant: int
    process: str
    record: Record
    cause: str

    def __str__(self) -> str:
        at = f"{self.process}, record {self.record.seq} ({self.record.kind.name})"
        return f"invariant {self.invariant}: {at}: {self.cause}"


@dataclass
class Report:
    """`unknown`: what could not be decided.  `pinned`: requests whose pins nobody has released by the end."""

    records: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    violated: list[Finding] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    pinned: int = 0

    @property
    def status(self) -> int:
        """0: everything holds; 1: something is violated; 2: not enough was recorded to say so."""
        return 1 if self.violated else 2 if self.unknown or not self.records else 0


def examine(journals: Sequence[Journal], strangers: Sequence[str] = ()) -> Report:
    """Hold every rule against every record."""
    report = Report()
    report.unknown += strangers
    stores = _Stores(report)
    for journal in journals:
        report.records += len(journal.records)
        report.counts.update(record.kind.name for record in journal.records)
        report.unknown += [f"{journal.name}: {what}" for what in journal.missing]
        stores.read(journal)
    whole = all(journal.complete for journal in journals) and not strangers
    for journal in journals:
        _Process(journal, report, stores, whole=whole).run()
    return report


class _Stores:
    """Every raw word that a table has held, by the table's identity and slot."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._words: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._epochs: dict[int, int] = {}
        self._closed: set[int] = set()  # tables whose owner ended in order, the last time

    def read(self, journal: Journal) -> None:
        table, last = 0, dict[int, int]()
        for record in journal.records:
            if record.kind is Kind.OPENED:
                table, last = record.c, {}
                self._closed.discard(table)
            elif record.kind is Kind.CLOSED:
                self._closed.add(table)
            elif record.kind in _STORES:
                self._store(journal, record, last)
                self._words[table, record.slot].add(record.seen)
                if record.kind is not Kind.PLACED:
                    self._words[table, record.slot].add(record.word)

    def _store(self, journal: Journal, record: Record, last: dict[int, int]) -> None:
        """Invariant 2: words only grow, and a scope's epoch with them."""
        before = last.get(record.slot, 0)
        last[record.slot] = record.seen
        found = None
        if record.seen <= before:
            found = f"slot {record.slot} held {before} and is given {record.seen}"
        elif record.kind in (Kind.ADVANCED, Kind.CANCELLED) and record.seen != record.word + 1:
            found = f"{record.word} is replaced by {record.seen}, not by the next word"
        elif record.kind is Kind.ADVANCED and journal.complete and before and record.word != before:
            found = f"{record.word} is replaced, where the slot held {before}"
        epoch = self._epochs.get(record.key, 0)
        if record.epoch < epoch or (record.kind is Kind.ADVANCED and record.epoch == epoch):
            found = f"epoch {record.epoch} follows epoch {epoch}"
        self._epochs[record.key] = max(epoch, record.epoch)
        if found is not None:
            self._report.violated.append(Finding(2, journal.name, record, found))

    def knows(self, table: int, slot: int, word: int) -> bool:
        return word in self._words[table, slot]

    def had_all(self, table: int, slot: int, word: int) -> bool:
        """Whether the word would be here, had it been stored.

        An owner that still runs, or was killed between store and record, may owe the newest ones.
        """
        words = self._words[table, slot]
        return bool(words) and (table in self._closed or word < max(words))


class _Request:
    """What a process has recorded of one request."""

    def __init__(self) -> None:
        self.key = self.epoch = 0
        self.launched: dict[int, Record] = {}  # by step, whose receipt is out
        self.end: int | None = None  # where the receipt of a cut ended it
        self.pinned: Record | None = None
        self.certified: Record | None = None


class _Process:
    """The rules that one process's records must keep, in their order."""

    def __init__(self, journal: Journal, report: Report, stores: _Stores, *, whole: bool) -> None:
        self._journal = journal
        self._report = report
        self._stores = stores
        self._whole = whole
        self._table = 0
        self._seen: dict[int, int] = {}
        self._replaced: dict[tuple[int, int], int] = {}  # (slot, word): number of the record that replaced it
        self._known: dict[int, int] = {}  # key: epoch that the engine knows of
        self._places: dict[int, str] = {}
        self._requests: defaultdict[int, _Request] = defaultdict(_Request)
        self._ended: set[int] = set()
        self._rules: dict[Kind, Callable[[Record], None]] = {
            Kind.OPENED: self._opened,
            Kind.MAPPED: self._opened,
            Kind.ADVANCED: self._replaces,
            Kind.CANCELLED: self._replaces,
            Kind.FRAME: self._frame,
            Kind.RESPONSE: self._response,
            Kind.WITHHELD: self._withheld,
            Kind.ADMITTED: self._admitted,
            Kind.LAUNCHED: self._launched,
            Kind.RECEIPT: self._receipt,
            Kind.STEPPED: self._stepped,
            Kind.PINNED: self._pinned,
            Kind.RELEASED: self._released,
            Kind.CERTIFIED: self._certified,
            Kind.ADOPTED: self._adopted,
            Kind.COLD: self._cold,
            Kind.PREEMPTED: self._preempted,
            Kind.ENDED: self._transition_ended,
        }

    def run(self) -> None:
        for record in self._journal.records:
            self._observes(record)
            rule = self._rules.get(record.kind)
            if rule is not None:
                rule(record)
        self._report.pinned += sum(one.pinned is not None for one in self._requests.values())

    def _violated(self, invariant: int, record: Record, cause: str) -> None:
        self._report.violated.append(Finding(invariant, self._journal.name, record, cause))

    def _absent(self, invariant: int, record: Record, cause: str) -> None:
        """Something should have been recorded before: a violation where nothing is missing."""
        if self._journal.complete:
            self._violated(invariant, record, cause)
        else:
            self._report.unknown.append(f"{self._journal.name}, record {record.seq}: {cause}")

    def _opened(self, record: Record) -> None:
        if record.c != self._table:
            self._table = record.c
            self._seen.clear()
            self._replaced.clear()

    def _observes(self, record: Record) -> None:
        """Invariant 2: what is observed was stored, and no process sees a word fall."""
        if record.slot == NOWHERE or record.seen == 0:
            return
        before = self._seen.get(record.slot, 0)
        if record.kind is not Kind.RESPONSE:  # which tells of something that was before
            if record.seen < before:
                self._violated(2, record, f"slot {record.slot} shows {record.seen} after {before}")
            self._seen[record.slot] = max(before, record.seen)
        if not self._stores.knows(self._table, record.slot, record.seen):
            cause = f"slot {record.slot} shows {record.seen}, which nobody has stored"
            if self._whole and self._stores.had_all(self._table, record.slot, record.seen):
                self._violated(2, record, cause)
            else:
                self._report.unknown.append(f"{self._journal.name}, record {record.seq}: {cause}")

    # -- the process that owns the table ------------------------------------------------------------------------------

    def _replaces(self, record: Record) -> None:
        self._replaced[record.slot, record.word] = record.seq

    def _frame(self, record: Record) -> None:
        if record.seen != record.word:
            self._violated(1, record, f"a frame of word {record.word} passed while the scope's was {record.seen}")
        self._passed_at(record, record.seq)

    def _response(self, record: Record) -> None:
        if record.a and record.seen != record.word:
            self._violated(1, record, f"its last frame passed while the scope's word was {record.seen}")
        if record.a:
            self._passed_at(record, record.b)

    def _passed_at(self, record: Record, newest: int) -> None:
        """Invariant 1: the last frame was before the record of the store that took its authority."""
        replaced = self._replaced.get((record.slot, record.word))
        if replaced is not None and replaced <= newest:
            self._violated(1, record, f"a frame of word {record.word} passed after record {replaced} had replaced it")

    def _withheld(self, record: Record) -> None:
        if record.seen == record.word:
            self._violated(1, record, "a frame of the current version was withheld")

    # -- the engine ---------------------------------------------------------------------------------------------------

    def _admitted(self, record: Record) -> None:
        one = self._requests[record.request] = _Request()
        one.key, one.epoch = record.key, record.epoch

    def _launched(self, record: Record) -> None:
        one = self._requests[record.request]
        if not one.key:
            self._absent(7, record, "launched, and never admitted")
        elif one.epoch < self._known.get(one.key, 0):
            self._violated(1, record, f"rows of epoch {one.epoch}, after the engine knew of {self._known[one.key]}")
        if one.pinned is not None:
            self._violated(5, record, "rows of a request whose blocks are already kept for a successor")
        one.launched[record.a] = record

    def _receipt(self, record: Record) -> None:
        one = self._requests[record.request]
        launched = one.launched.pop(record.a, None)
        if launched is None:
            self._absent(7, record, f"the receipt of step {record.a}, which was not launched")
            return
        if record.b != launched.b or not launched.b <= record.c <= launched.c:
            self._violated(7, record, f"rows {launched.b} to {launched.c} were launched, not up to {record.c}")
        if record.flags:
            one.end = record.c if one.end is None else min(one.end, record.c)

    def _preempted(self, record: Record) -> None:
        self._requests[record.request].end = None

    def _stepped(self, record: Record) -> None:
        before, event, after = core_step_names(record.a)
        known = self._places.get(record.key, "IDLE")
        if known != before and not (before == "IDLE" and known in ("IDLE", "CANCELLED")):
            self._absent(9, record, f"{event} was taken in {before}, and the scope was left in {known}")
        self._places[record.key] = after
        if after != "CANCELLED":
            known_epoch = self._known.get(record.key, 0)
            if record.epoch < known_epoch:
                self._violated(2, record, f"the engine knew of epoch {known_epoch} and goes back to {record.epoch}")
            self._known[record.key] = max(known_epoch, record.epoch)

    def _pinned(self, record: Record) -> None:
        one = self._requests[record.request]
        if one.pinned is not None:
            self._violated(6, record, f"pinned again, after record {one.pinned.seq}")
        for launched in one.launched.values():
            self._violated(5, record, f"pinned while step {launched.a} has no receipt")
        if one.end is not None and record.b > one.end:
            self._violated(3, record, f"{record.b} tokens are kept, where a receipt says {one.end}")
        one.pinned = record

    def _released(self, record: Record) -> None:
        one = self._requests[record.request]
        if one.pinned is None:
            self._absent(6, record, "released, and not pinned")
        one.pinned = None

    def _certified(self, record: Record) -> None:
        source, target = self._requests[record.c], self._requests[record.request]
        if source.pinned is None:
            self._absent(4, record, "certified from a request whose blocks are not kept")
        elif record.a > source.pinned.b:
            self._violated(3, record, f"{record.a} tokens are certified, of {source.pinned.b} that are kept")
        if source.key and target.key and source.key != target.key:
            self._violated(4, record, "certified from another scope's request")
        if record.transition in self._ended:
            self._violated(4, record, "certified by a transition that had ended")
        target.certified = record

    def _adopted(self, record: Record) -> None:
        target = self._requests[record.request]
        if target.certified is None:
            self._absent(4, record, "adopted, and nothing was certified")
        elif record.a != target.certified.a or (not record.flags and record.b != target.certified.b):
            self._violated(4, record, f"what was adopted is not what record {target.certified.seq} certified")
        target.certified = None

    def _cold(self, record: Record) -> None:
        if record.a >= len(REFUSALS):
            self._violated(10, record, "a cold start that names no reason")
        self._requests[record.request].certified = None

    def _transition_ended(self, record: Record) -> None:
        if record.transition in self._ended:
            self._violated(9, record, "ended twice")
        self._ended.add(record.transition)


def told(report: Report) -> Iterator[str]:
    """The report, a line each."""
    yield f"{report.records:,} records: " + ", ".join(f"{name} {n:,}" for name, n in report.counts.most_common())
    yield from (f"violated  {finding}" for finding in report.violated)
    yield from (f"unknown   {what}" for what in report.unknown)
    yield ("holds", "violated", "not enough recorded")[report.status]
