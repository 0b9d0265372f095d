"""Whether a history can be that of a server which keeps its promises, judged without that server.

Owns: the rules, what breaks them, how that is told.  Must not know: the server, RETIRE's code; no I/O.

Each rule says no more than can be known from outside; docs/HISTORIES.md gives the reasons.

- *order*: the answers about each scope are those of its register (`register`), in some order that respects time.
- *keys*: accepted supersedes under one key are told of the same transition.
- *client*: through retire.client nothing of an epoch is handed out to a question asked after the same runtime has been
  told that it is over.
- *raw*: of a raw stream, when anybody has read that its epoch is over, no more comes than the stated backlog, a frame,
  and what lay on the reader's side.
- *end*: after the server's last word on a stream nothing comes.
- *stated*: what came of a version is what the server says was published, on its last word exactly, in the record of the
  transition that revoked it at most.
- *tag*: every frame names the epoch that its response was taken on under.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from harness.histories.history import Answer, Frame, History, Kind, Mark, Operation, Via, What
from harness.histories.register import CANCELLED, LIVE, NEVER, State, Status, accepted_as, steps_of
from harness.histories.search import CONFIGURATIONS_MAX, Found, fewest, search

SETTLED_MAX = 64  # so many responses of a version the server remembers; of more it states less than was published
SHOWN = 12


class Rule(StrEnum):
    """What can be broken."""

    ORDER = "order"
    UNDECIDED = "undecided"
    KEYS = "keys"
    CLIENT = "client"
    RAW = "raw"
    END = "end"
    STATED = "stated"
    TAG = "tag"


@dataclass(frozen=True)
class Finding:
    """A rule that a scope broke.  `count`: so many frames, or 1.  `lines`: for a reader."""

    rule: Rule
    place: tuple[str, str]
    count: int
    lines: Sequence[str]

    def __str__(self) -> str:
        return "\n".join([f"{self.rule}, scope {'/'.join(self.place)}:", *(f"  {line}" for line in self.lines)])


@dataclass(frozen=True)
class Verdict:
    """What a history shows.  `configurations`: how many the search visited, over all scopes."""

    operations: int
    frames: int
    scopes: int
    kills: int
    pauses: int
    unknown: int
    configurations: int
    findings: Sequence[Finding] = field(default_factory=tuple)

    def broken(self, rule: Rule) -> int:
        """How often."""
        return sum(one.count for one in self.findings if one.rule is rule)

    def summary(self) -> dict[str, Any]:
        """In figures."""
        return {
            "operations": self.operations,
            "frames": self.frames,
            "scopes": self.scopes,
            "kills": self.kills,
            "pauses": self.pauses,
            "unknown_outcomes": self.unknown,
            "linearizable": not self.broken(Rule.ORDER) and not self.broken(Rule.UNDECIDED),
            "revoked_frames_client": self.broken(Rule.CLIENT),
            "revoked_frames_raw_over_bound": self.broken(Rule.RAW) + self.broken(Rule.END),
            "versions_not_as_stated": self.broken(Rule.STATED),
            "keys_answered_differently": self.broken(Rule.KEYS),
        }


def check(history: History, most: int = CONFIGURATIONS_MAX) -> Verdict:
    """Judge it.  `most`: how many configurations a scope's search may visit before it is given up as undecided."""
    findings: list[Finding] = []
    visited = 0
    scopes = history.by_scope()
    for place, operations in scopes.items():
        found = search(steps_of(operations, history.marks), most)
        visited += found.visited
        if found.found is Found.UNDECIDED:
            findings.append(Finding(Rule.UNDECIDED, place, 1, [f"given up after {found.visited} configurations"]))
        elif found.found is Found.NONE:
            findings.append(_contradiction(place, operations, history.marks, most))
        findings += _of_keys(place, operations)
        findings += _of_frames(place, operations, history)
    what = Counter(mark.what for mark in history.marks)
    return Verdict(
        operations=len(history.operations),
        frames=sum(len(one.frames) for one in history.operations),
        scopes=len(scopes),
        kills=what[What.KILLED],
        pauses=what[What.STOPPED],
        unknown=sum(one.unknown for one in history.operations),
        configurations=visited,
        findings=findings,
    )


# -- order ----------------------------------------------------------------------------------------------------------


def _contradiction(
    place: tuple[str, str], operations: Sequence[Operation], marks: Sequence[Mark], most: int
) -> Finding:
    """The fewest answers that contradict each other, whatever the rest of the operations did."""

    def contradict(doubted: frozenset[int]) -> bool:
        return search(steps_of(operations, marks, doubted), most).found is Found.NONE

    answered = [one.id for one in operations if one.answer is not None]
    kept = frozenset(fewest(answered, contradict))
    left = search(steps_of(operations, marks, frozenset(answered) - kept), most)
    told = sorted((one for one in operations if one.id in kept), key=lambda one: one.call.at)
    others = len(operations) - len(told)
    what = "this answer is wrong" if len(told) == 1 else "no order explains these answers"
    furthest = f"the furthest that an order comes is {left.state}; left over: {_numbers(left.stuck)}"
    if any(step.effect == NEVER for step in steps_of(told)):
        furthest = "no state of a scope allows it"
    lines = [f"{what}, whenever the {others} other operations took effect, if they did:", *_shown(told), furthest]
    return Finding(Rule.ORDER, place, 1, lines)


def _shown(operations: Sequence[Operation]) -> Iterator[str]:
    """One line for each, in ms from the first call on."""
    origin = min(one.call.at for one in operations)
    for one in operations[:SHOWN]:
        end = "…" if one.answer is None else f"{(one.answer.at - origin) / 1e6:.3f}"
        yield f"{(one.call.at - origin) / 1e6:.3f} to {end} ms  {described(one)}"
    if len(operations) > SHOWN:
        yield f"and {len(operations) - SHOWN} more"


def described(operation: Operation) -> str:
    """An operation and its answer in words."""
    call, answer = operation.call, operation.answer
    asked = "*" if call.star else "an epoch that it did not tell" if call.asked is None else f"epoch {call.asked}"
    match call.kind:
        case Kind.JOIN:
            what = "joins" if call.asked is None else f"joins under epoch {call.asked}"
        case Kind.SUPERSEDE:
            what = f"supersedes {asked}" + ("" if call.key is None else f" (key {call.key})")
        case _:
            what = {"cancel": "cancels", "look": "looks", "record": "reads a record"}[call.kind]
    return f"#{call.id} {call.runtime} {what}: {_answered(operation, answer)}"


def _answered(operation: Operation, answer: Answer | None) -> str:
    if answer is None:
        return "no answer"
    told = [str(answer.status)]
    new = accepted_as(operation)
    if new is not None:
        told.append(f"now epoch {new}")
    elif (epoch := operation.epoch if answer.status == 200 else answer.current or answer.epoch) is not None:
        told.append(f"epoch {epoch}" if answer.status == 200 else f"current is epoch {epoch}")
    if answer.cancelled:
        told.append("cancelled")
    return ", ".join(told)


def _numbers(ids: Sequence[int]) -> str:
    return ", ".join(f"#{one}" if one else "the loss of the host" for one in ids) or "nothing"


# -- keys -----------------------------------------------------------------------------------------------------------


def _of_keys(place: tuple[str, str], operations: Sequence[Operation]) -> Iterator[Finding]:
    groups: dict[str, list[Operation]] = {}
    for one in operations:
        if one.call.key is not None and accepted_as(one) is not None:
            groups.setdefault(one.call.key, []).append(one)
    for key, group in groups.items():
        told = {(accepted_as(one), one.answer.transition) for one in group if one.answer is not None}
        if len(told) > 1:
            lines = [f"one key, {key}, and {len(told)} different answers:", *map(described, group)]
            yield Finding(Rule.KEYS, place, 1, lines)


# -- frames ---------------------------------------------------------------------------------------------------------


def _of_frames(place: tuple[str, str], operations: Sequence[Operation], history: History) -> Iterator[Finding]:
    over = _Over(operations)
    heard = _heard(operations)
    for one in operations:
        if one.frames:
            yield from _of_tags(place, one)
            if one.call.via is Via.CLIENT:
                yield from _of_client(place, one, heard.get(one.call.runtime, []))
            else:
                yield from _of_raw(place, one, over, history.opening.backlog_bytes)
                yield from _of_end(place, one)
    yield from _of_records(place, operations, history.marks)


class _Over:
    """When anybody on this host had read that an epoch is over: the server's store came before that."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._told: list[tuple[int, State]] = []  # each further than the one before
        for at, state in sorted(told for one in operations for told in _told_states(one)):
            if not self._told or state > self._told[-1][1]:
                self._told.append((at, state))

    def known_at(self, epoch: int) -> int | None:
        """The time, ns; None if nobody has."""
        return next((at for at, state in self._told if state > (epoch, LIVE)), None)


def _told_states(operation: Operation) -> Iterator[tuple[int, State]]:
    """States that the scope had reached by then, by what was read."""
    answer = operation.answer
    if answer is not None:
        ended = answer.cancelled and operation.call.kind in (Kind.LOOK, Kind.CANCEL)
        for epoch in (operation.epoch, answer.epoch, answer.current, answer.new):
            if epoch is not None and operation.call.kind is not Kind.RECORD:
                yield answer.at, State(epoch, CANCELLED if ended else LIVE)
    for frame in operation.frames:
        if frame.epoch is not None:
            yield frame.at, State(frame.epoch, CANCELLED if frame.ends == "cancelled" else LIVE)
        if frame.by is not None:
            yield frame.at, State(frame.by, Status.LIVE)


def _heard(operations: Sequence[Operation]) -> dict[str, list[tuple[int, int]]]:
    """Per runtime, what retire.client has told its caller: when, and the oldest epoch that is not over."""
    found: dict[str, list[tuple[int, int]]] = {}
    for one in operations:
        call = one.call
        if call.via is not Via.CLIENT:
            continue
        told = found.setdefault(call.runtime, [])
        if one.answer is not None:
            known = [epoch for epoch in (one.epoch, one.answer.current, one.answer.new) if epoch is not None]
            told += [(one.answer.at, epoch) for epoch in known]
        elif one.lost is not None and one.lost.over is not None:
            told.append((one.lost.at, one.lost.over + 1))
    return found


def _of_tags(place: tuple[str, str], operation: Operation) -> Iterator[Finding]:
    wrong = [frame for frame in operation.frames if frame.epoch not in (None, operation.epoch)]
    if wrong:
        lines = [described(operation), f"{len(wrong)} of its frames name epoch {wrong[0].epoch}"]
        yield Finding(Rule.TAG, place, len(wrong), lines)


def _of_client(place: tuple[str, str], operation: Operation, heard: Sequence[tuple[int, int]]) -> Iterator[Finding]:
    """Only a frame that was asked for afterwards is certain: one under way may have been handed out just before."""
    epoch = operation.epoch
    over_at = min((at for at, oldest in heard if epoch is not None and epoch < oldest), default=None)
    if over_at is None:
        return
    late = [frame for frame in operation.frames if frame.asked_at > over_at and frame.ends is None]
    if late:
        ms = (late[0].at - over_at) / 1e6
        told = f"{len(late)} frames of epoch {epoch} were handed out after its runtime had been told that it is over"
        yield Finding(Rule.CLIENT, place, len(late), [described(operation), f"{told}, the first {ms:.3f} ms after"])


def _of_raw(place: tuple[str, str], operation: Operation, over: _Over, backlog_bytes: int | None) -> Iterator[Finding]:
    """Bytes that had left the last gate before the store may come for as long as buffers hold them."""
    frames, epoch, answer = operation.frames, operation.epoch, operation.answer
    over_at = None if epoch is None else over.known_at(epoch)
    if over_at is None or backlog_bytes is None or answer is None:
        return
    bound = backlog_bytes + answer.holds_bytes + max(frame.bytes for frame in frames)
    late = [frame for frame in frames if frame.at > over_at and frame.ends is None]
    came, beyond = 0, 0
    for frame in late:
        came += frame.bytes
        beyond += came > bound
    if beyond:
        told = f"{came} bytes of epoch {epoch} in {len(late)} frames came after it was known to be over"
        yield Finding(Rule.RAW, place, beyond, [described(operation), f"{told}; {bound} may have been on their way"])


def _of_end(place: tuple[str, str], operation: Operation) -> Iterator[Finding]:
    frames = operation.frames
    ending = next((number for number, frame in enumerate(frames) if frame.ends is not None), None)
    if ending is None:
        return
    last, after = frames[ending], frames[ending + 1 :]
    if after:
        yield Finding(Rule.END, place, len(after), [described(operation), f"{len(after)} frames after its last word"])
    came = _chars(frames[:ending])
    if last.told_chars is not None and came != last.told_chars:
        lines = [described(operation), f"{came} characters came, {last.told_chars} were published, says its last word"]
        yield Finding(Rule.STATED, place, 1, lines)


def _chars(frames: Sequence[Frame]) -> int:
    return sum(frame.chars for frame in frames if frame.ends is None)


def _of_records(place: tuple[str, str], operations: Sequence[Operation], marks: Sequence[Mark]) -> Iterator[Finding]:
    """A record states what had passed the last gate when the store was made; no clock has a part in it.

    It knows of this life of the server only, and of so many responses.
    """
    judged = set[int]()
    for one in operations:
        answer = one.answer
        if one.call.kind is not Kind.RECORD or answer is None or answer.published is None or answer.old is None:
            continue
        if answer.old in judged:
            continue
        judged.add(answer.old)
        streams = [other for other in operations if other.frames and other.epoch == answer.old]
        since = min((other.call.at for other in streams), default=answer.at)
        lived = not any(mark.what is What.KILLED and since <= mark.at <= answer.at for mark in marks)
        stated = sum(chars for epoch, chars in answer.published if epoch == answer.old)
        came = sum(_chars(other.frames) for other in streams)
        if lived and len(streams) <= SETTLED_MAX and came > stated:
            lines = [
                f"{came} characters of epoch {answer.old} came, of which the record of its transition states {stated}:",
                *map(described, streams[:SHOWN]),
            ]
            yield Finding(Rule.STATED, place, 1, lines)
