"""The authority of one scope as a register, and what an answer about it says of that register.

Owns: the states, what each kind of step does to them, and how an operation becomes steps.
Must not know: how an order of steps is found, frames, files.  Nothing of RETIRE is imported: this is what its surface
promises, told a second time.

A scope is unknown, live or cancelled, at an epoch.  Being used makes an unknown one live at its first epoch; a
supersede that names the first epoch does so and advances it in one.  A supersede advances a live one by one if it names
its epoch, or "*".  A cancelled one comes back when a request names a higher epoch.  The loss of the host may raise an
epoch, and may make a scope unknown again whose first epoch then lies above every one it has had.  So states only grow,
each is passed once, and at most one supersede of an epoch succeeds.

An answer that was lost leaves an operation that takes effect at any time after its call, or never.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple, Protocol

from harness.histories.history import Answer, Call, Kind, Mark, Operation, What


class Status(IntEnum):
    """In which order a scope has them at one epoch."""

    UNKNOWN = 0
    LIVE = 1
    CANCELLED = 2


class State(NamedTuple):
    """`epoch` of an unknown scope: the last one that it will not have."""

    epoch: int
    status: Status

    def __str__(self) -> str:
        match self.status:
            case Status.UNKNOWN:
                return "unknown" if not self.epoch else f"unknown again, above epoch {self.epoch}"
            case Status.LIVE:
                return f"epoch {self.epoch}"
            case Status.CANCELLED:
                return f"cancelled at epoch {self.epoch}"


START = State(0, Status.UNKNOWN)
LIVE, CANCELLED, UNKNOWN = Status.LIVE, Status.CANCELLED, Status.UNKNOWN


class Effect(Protocol):
    """What a step does."""

    def moves(self, state: State) -> tuple[State, ...]:
        """The states it may lead to from this one; none where it cannot stand."""

    def over(self, state: State) -> bool:
        """Whether it can stand nowhere from here on."""


# What an answer says.  Such a step must have its place.


@dataclass(frozen=True)
class Seen:
    """The scope was so."""

    epoch: int | None
    statuses: tuple[Status, ...]

    def moves(self, state: State) -> tuple[State, ...]:
        """It changes nothing."""
        fits = state.status in self.statuses and self.epoch in (None, state.epoch)
        return (state,) if fits else ()

    def over(self, state: State) -> bool:
        """Once the scope has gone further."""
        return not self.statuses or (self.epoch is not None and state > (self.epoch, max(self.statuses)))


@dataclass(frozen=True)
class SeenUnknown:
    """There was no such scope, or, if one is named, none whose first epoch is that."""

    asked: int | None = None

    def moves(self, state: State) -> tuple[State, ...]:
        """It changes nothing."""
        return (state,) if state.status is UNKNOWN and state.epoch + 1 != self.asked else ()

    def over(self, state: State) -> bool:  # noqa: ARG002  the question's signature
        """A lost host may bring that back."""
        return False


@dataclass(frozen=True)
class Before:
    """A request that names no epoch was taken on before the scope came to this state, which ended it."""

    epoch: int

    def moves(self, state: State) -> tuple[State, ...]:
        """It may have made the scope."""
        if state.status is UNKNOWN:
            return (State(state.epoch + 1, LIVE),) if state.epoch < self.epoch else ()
        fits = (state.status is LIVE and state.epoch < self.epoch) or state == (self.epoch, CANCELLED)
        return (state,) if fits else ()

    def over(self, state: State) -> bool:
        """Once the scope has gone further."""
        return state > (self.epoch, CANCELLED)


@dataclass(frozen=True)
class Admitted:
    """A request was taken on under this epoch."""

    epoch: int
    asked: int | None

    def moves(self, state: State) -> tuple[State, ...]:
        """It may have made the scope, or brought it back."""
        made = state == (self.epoch - 1, UNKNOWN)
        back = state.status is CANCELLED and self.asked is not None and state.epoch < self.epoch
        return (State(self.epoch, LIVE),) if made or back or state == (self.epoch, LIVE) else ()

    def over(self, state: State) -> bool:
        """Once the scope has gone further."""
        return state > (self.epoch, LIVE)


@dataclass(frozen=True)
class Advanced:
    """A supersede was accepted.  `asked`: None if it named none, or nobody knows."""

    new: int
    asked: int | None

    def moves(self, state: State) -> tuple[State, ...]:
        """It may have made the scope first."""
        made = state == (self.new - 2, UNKNOWN) and self.asked is not None
        return (State(self.new, LIVE),) if made or state == (self.new - 1, LIVE) else ()

    def over(self, state: State) -> bool:
        """Once the scope has gone further."""
        return state > (self.new - 1, LIVE)


@dataclass(frozen=True)
class Cancelled:
    """The scope was cancelled at this epoch."""

    epoch: int

    def moves(self, state: State) -> tuple[State, ...]:
        """It may have been before."""
        return (State(self.epoch, CANCELLED),) if state in ((self.epoch, LIVE), (self.epoch, CANCELLED)) else ()

    def over(self, state: State) -> bool:
        """Once the scope has gone further."""
        return state > (self.epoch, CANCELLED)


# What may have happened.  Such a step has a place, or none.


@dataclass(frozen=True)
class MayAdmit:
    """A request whose answer is not known, or says nothing of it.  `torn`: its server may have died over it."""

    asked: int | None
    torn: bool = False

    def moves(self, state: State) -> tuple[State, ...]:
        """Make the scope, or bring it back."""
        if state.status is UNKNOWN:
            first = state.epoch + 1
            return (State(first, LIVE),) if self.asked in (None, first) else ()
        if state.status is LIVE or self.asked is None or self.asked <= state.epoch:
            return ()
        halfway = (State(state.epoch + 1, CANCELLED), State(self.asked, CANCELLED)) if self.torn else ()
        return (State(self.asked, LIVE), *halfway)

    def over(self, state: State) -> bool:
        """Once the scope is known, or as far as that; unless it is forgotten."""
        return state.status is not UNKNOWN if self.asked is None else state.epoch >= self.asked


@dataclass(frozen=True)
class MayAdvance:
    """A supersede whose answer is not known.  `asked`: None for "*", or when nobody knows."""

    asked: int | None

    def moves(self, state: State) -> tuple[State, ...]:
        """Advance the scope, and make it first."""
        if state.status is UNKNOWN:
            return (State(state.epoch + 2, LIVE),) if self.asked == state.epoch + 1 else ()
        fits = state.status is LIVE and self.asked in (None, state.epoch)
        return (State(state.epoch + 1, LIVE),) if fits else ()

    def over(self, state: State) -> bool:
        """Once the scope has gone further."""
        return self.asked is not None and state.epoch > self.asked


@dataclass(frozen=True)
class MayMake:
    """The first half of a supersede whose answer is not known: its server may have died before the second."""

    asked: int

    def moves(self, state: State) -> tuple[State, ...]:
        """Make the scope."""
        return (State(self.asked, LIVE),) if state == (self.asked - 1, UNKNOWN) else ()

    def over(self, state: State) -> bool:
        """Once the scope is known; unless it is forgotten."""
        return state.status is not UNKNOWN


@dataclass(frozen=True)
class MayCancel:
    """A cancellation whose answer is not known.  `torn`: its server may have died over it, which raises the epoch."""

    torn: bool = False

    def moves(self, state: State) -> tuple[State, ...]:
        """Cancel the scope."""
        if state.status is not LIVE:
            return ()
        halfway = (State(state.epoch + 1, LIVE),) if self.torn else ()
        return (State(state.epoch, CANCELLED), *halfway)

    def over(self, state: State) -> bool:  # noqa: ARG002
        """It need not stand anywhere."""
        return False


@dataclass(frozen=True)
class MayRaise:
    """The host was lost.  `targets`: the epochs that anybody speaks of."""

    targets: tuple[int, ...]

    def moves(self, state: State) -> tuple[State, ...]:
        """Raise the epoch, or forget the scope."""
        higher = [epoch for epoch in self.targets if epoch > state.epoch]
        forgotten = [] if state.status is UNKNOWN else [State(epoch, UNKNOWN) for epoch in higher]
        return (*(State(epoch, state.status) for epoch in higher), *forgotten)

    def over(self, state: State) -> bool:  # noqa: ARG002
        """It need not stand anywhere."""
        return False


@dataclass(frozen=True)
class Step:
    """A step of operation `id`.

    `called`, `returned`: between these it has its place; `returned` is None for what may have happened at any time
    after, or never.  `after`: steps, by number, that come before it.  `until`: one that it can only come before.
    """

    id: int
    effect: Effect
    called: int
    returned: int | None = None
    after: tuple[int, ...] = ()
    until: int | None = None

    @property
    def must(self) -> bool:
        """Whether it has a place in every order."""
        return self.returned is not None


ANY = (UNKNOWN, LIVE, CANCELLED)
NEVER = Seen(None, ())
"""What no server may say to such a question, whatever its state."""
LOST_HOST = 0
"""The operation that steps of a lost host belong to."""


def steps_of(
    operations: Sequence[Operation], marks: Sequence[Mark] = (), doubted: frozenset[int] = frozenset()
) -> list[Step]:
    """The steps of one scope's operations.  `doubted`: the answers of these are taken for lost."""
    steps: list[Step] = []
    killed_at = max((mark.at for mark in marks if mark.what is What.KILLED), default=0)
    known = [replace(one, answer=None) if one.id in doubted else one for one in operations if not one.unsent]
    keyed: dict[tuple[str, int | None, bool], list[Operation]] = {}
    for operation in known:
        call = operation.call
        if call.kind is Kind.SUPERSEDE and call.key is not None:
            keyed.setdefault((call.key, call.asked, call.star), []).append(operation)
        elif operation.answer is None:
            steps += _may(operation, torn=call.at < killed_at)
        else:
            _TOLD[call.kind](steps, operation, operation.answer)
    for group in keyed.values():
        _under_one_key(steps, group)
    lost = sorted(mark.at for mark in marks if mark.what is What.HOST_LOST)
    if lost:
        targets = _spoken_of(known)
        steps += [Step(LOST_HOST, MayRaise(targets), at) for at in lost]
    return steps


def _may(operation: Operation, *, torn: bool = False) -> Iterable[Step]:
    """What an operation may have done that nobody has an answer to."""
    call = operation.call
    match call.kind:
        case Kind.JOIN:
            yield Step(call.id, MayAdmit(call.asked, torn), call.at)
        case Kind.SUPERSEDE:
            yield Step(call.id, MayAdvance(call.asked), call.at)
            yield from _half(call)
        case Kind.CANCEL:
            yield Step(call.id, MayCancel(torn), call.at)
        case Kind.LOOK | Kind.RECORD:
            return


def _half(call: Call) -> Iterable[Step]:
    if call.asked is not None:
        yield Step(call.id, MayMake(call.asked), call.at)


def _named(answer: Answer) -> int | None:
    """The epoch that a refusal calls current."""
    return answer.current if answer.current is not None else answer.epoch


def _see(steps: list[Step], operation: Operation, effect: Effect, after: tuple[int, ...] = ()) -> int:
    """Add what must have been; its number."""
    assert operation.answer is not None
    steps.append(Step(operation.id, effect, operation.call.at, operation.answer.at, after))
    return len(steps) - 1


def _told_of_join(steps: list[Step], operation: Operation, answer: Answer) -> None:
    call = operation.call
    if answer.status == 200:
        if operation.epoch is not None:
            alike = call.asked in (None, operation.epoch)
            _see(steps, operation, Admitted(operation.epoch, call.asked) if alike else NEVER)
            return
        seen: Seen | None = Seen(None, ANY)  # through the client, and nothing was said
    else:
        seen = _refused_join(steps, operation, answer)
    if seen is None:
        return
    bound = _see(steps, operation, seen)
    steps.append(Step(call.id, MayAdmit(call.asked), call.at, until=bound))


def _refused_join(steps: list[Step], operation: Operation, answer: Answer) -> Seen | None:
    """What a refusal says that may come after the request was taken on; None where it is told in full."""
    asked, current = operation.call.asked, _named(answer)
    if answer.status == 409:  # it asked for an epoch ahead of the current one, and was not taken on
        ahead = asked is not None and (current is None or current < asked)
        told = SeenUnknown(asked) if current is None else Seen(current, (LIVE,))
        _see(steps, operation, told if ahead else NEVER)
        return None
    if answer.status == 410 and current is not None:
        if asked is None:
            before = _see(steps, operation, Before(current))
            _see(steps, operation, Seen(current, (LIVE, CANCELLED) if current > 1 else (CANCELLED,)), (before,))
            return None
        return Seen(current, (LIVE, CANCELLED) if current > asked else (CANCELLED,)) if current >= asked else NEVER
    return Seen(current, ANY)


def _told_of_supersede(steps: list[Step], operation: Operation, answer: Answer) -> None:
    call = operation.call
    new = accepted_as(operation)
    if new is not None:
        alike = answer.old in (None, new - 1)
        advanced = _see(steps, operation, _advance(new, call.asked) if alike else NEVER)
        if answer.status != 200 and answer.current is not None:
            _see(steps, operation, Seen(answer.current, ANY), (advanced,))
    elif answer.status == 200 or answer.authority is None:
        bound = _see(steps, operation, Seen(None if answer.status == 200 else _named(answer), ANY))
        steps.append(Step(call.id, MayAdvance(call.asked), call.at, until=bound))
    else:
        _see(steps, operation, _refusal_of_supersede(operation, answer))


def _advance(new: int, asked: int | None) -> Effect:
    return Advanced(new, asked) if asked in (None, new - 1) else NEVER


def _refusal_of_supersede(operation: Operation, answer: Answer) -> Effect:
    """What a refusal says that has changed nothing."""
    call, current = operation.call, _named(answer)
    match answer.status:
        case 404 if call.star:
            return SeenUnknown()
        case 409 if current is None:
            return SeenUnknown(call.asked)
        case 409:
            return NEVER if call.star or current == call.asked else Seen(current, (LIVE,))
        case 410:
            return Seen(current, (CANCELLED,))
        case _:
            return Seen(current, ANY)


def accepted_as(operation: Operation) -> int | None:
    """The epoch that a supersede says it has made; None where it says of none."""
    answer = operation.answer
    if answer is None or operation.call.kind is not Kind.SUPERSEDE:
        return None
    if answer.status == 200:
        return operation.epoch
    return answer.epoch if answer.authority == "advanced" else None


def _told_of_cancel(steps: list[Step], operation: Operation, answer: Answer) -> None:
    if answer.status == 200 and answer.epoch is not None:
        _see(steps, operation, Cancelled(answer.epoch) if answer.cancelled else NEVER)
    elif answer.status == 404:
        _see(steps, operation, SeenUnknown())
    else:
        bound = _see(steps, operation, Seen(_named(answer), ANY))
        steps.append(Step(operation.id, MayCancel(), operation.call.at, until=bound))


def _told_of_look(steps: list[Step], operation: Operation, answer: Answer) -> None:
    if answer.status == 200:
        _see(steps, operation, Seen(answer.epoch, (CANCELLED,) if answer.cancelled else (LIVE,)))
    elif answer.status == 404:
        _see(steps, operation, SeenUnknown())


def _told_of_record(_steps: list[Step], _operation: Operation, _answer: Answer) -> None:
    """A record speaks of the past."""


_TOLD = {
    Kind.JOIN: _told_of_join,
    Kind.SUPERSEDE: _told_of_supersede,
    Kind.CANCEL: _told_of_cancel,
    Kind.LOOK: _told_of_look,
    Kind.RECORD: _told_of_record,
}


def _under_one_key(steps: list[Step], group: Sequence[Operation]) -> None:
    """Operations that are one: whichever takes effect, all accepted ones are told of it.

    So whoever is refused was refused before that.  It happens after the first call of one that is not refused.
    """
    refused: list[int] = []
    accepted: dict[int, list[Operation]] = {}
    open_ended: list[Operation] = []
    for operation in group:
        answer, new = operation.answer, accepted_as(operation)
        if answer is None:
            open_ended.append(operation)
        elif new is not None:
            accepted.setdefault(new, []).append(operation)
        elif answer.status in (404, 409, 410, 429, 503) and answer.authority == "unchanged":
            refused.append(_see(steps, operation, _refusal_of_supersede(operation, answer)))
        elif answer.authority != "unchanged":
            open_ended.append(operation)
    steps += [half for operation in open_ended for half in _half(operation.call)]
    after = tuple(refused)
    asked = group[0].call.asked
    if not accepted and open_ended:
        first = min(open_ended, key=lambda one: one.call.at)
        steps.append(Step(first.id, MayAdvance(asked), first.call.at, after=after))
    for new, members in accepted.items():
        first = min([*members, *open_ended], key=lambda one: one.call.at)
        told = [(one.answer.at, one.id) for one in members if one.answer is not None]
        steps.append(Step(min(told)[1], _advance(new, asked), first.call.at, min(told)[0], after))


def _spoken_of(operations: Iterable[Operation]) -> tuple[int, ...]:
    """Every epoch that a call or an answer names, and the one before it, from which it can be reached."""
    named: set[int] = set()
    for one in operations:
        told = [one.call.asked, one.epoch]
        if one.answer is not None:
            told += [one.answer.epoch, one.answer.current, one.answer.old, one.answer.new]
        named.update(epoch for epoch in told if epoch is not None)
    return tuple(sorted({near for epoch in named for near in (epoch - 2, epoch - 1, epoch) if near >= 1}))
