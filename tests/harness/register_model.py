"""A scope's register told forwards, histories of it drawn with a seed, and every order of a small one tried."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace

from harness.histories.history import Answer, Call, Kind, Lost, Operation

PLACE = ("t", "s")


def made(number, kind, called, returned=None, *, runtime="r", asked=None, star=False, key=None, **answer):
    """An operation from `called` to `returned`, or without an answer; `answer`: what it says."""
    call = Call(number, called, runtime, *PLACE, Kind(kind), asked, star, key)
    if returned is None:
        return Operation(call)
    status = answer.pop("status", 200)
    return Operation(call, Answer(number, returned, status, **answer))


@dataclass
class Register:
    """A correct scope: each call takes effect at once and says what it says."""

    epoch: int = 0
    cancelled: bool = False
    keys: dict = field(default_factory=dict)

    def copy(self):
        return replace(self, keys=dict(self.keys))

    def as_tuple(self):
        return self.epoch, self.cancelled, tuple(sorted(self.keys.items()))

    def admit(self, asked):
        """The epoch of admission, or the refusal."""
        if self.epoch == 0:
            if asked not in (None, 1):
                return {"status": 409, "authority": "unchanged"}
            self.epoch = 1
        elif self.cancelled:
            if asked is None or asked <= self.epoch:
                return {"status": 410, "current": self.epoch, "authority": "unchanged"}
            self.epoch, self.cancelled = asked, False
        elif asked is not None and asked != self.epoch:
            return {"status": 410 if asked < self.epoch else 409, "current": self.epoch, "authority": "unchanged"}
        return self.epoch

    def respond(self, admitted):
        if (self.epoch, self.cancelled) == (admitted, False):
            return {"status": 200, "epoch": admitted}
        return {"status": 410, "current": self.epoch, "authority": "unchanged"}

    def perform(self, call):
        """Anything but a join."""
        if call.kind is Kind.SUPERSEDE:
            return self.supersede(call.asked, call.star, call.key)
        if self.epoch == 0:
            return {"status": 404}
        if call.kind is Kind.CANCEL:
            self.cancelled = True
        return {"status": 200, "epoch": self.epoch, "cancelled": self.cancelled}

    def supersede(self, asked, star, key):
        if key in self.keys:
            return self.accepted(self.keys[key])
        if self.epoch == 0 and star:
            return {"status": 404, "authority": "unchanged"}
        if self.epoch == 0 and asked != 1:
            return {"status": 409, "authority": "unchanged"}
        self.epoch = self.epoch or 1
        if self.cancelled:
            return {"status": 410, "current": self.epoch, "authority": "unchanged"}
        if not star and asked != self.epoch:
            return {"status": 409, "current": self.epoch, "authority": "unchanged"}
        self.epoch += 1
        if key is not None:
            self.keys[key] = self.epoch
        return self.accepted(self.epoch)

    def accepted(self, new):
        return {"status": 200, "epoch": new, "old": new - 1, "new": new, "transition": f"t{new}"}


# -- drawn histories ---------------------------------------------------------------------------------------------------


def drawn_call(rng, number, at, epoch, keys):
    """A call that somebody makes who believes the scope to be at this epoch."""
    kind = rng.choices(["join", "supersede", "look", "cancel"], [4, 5, 3, 0.4])[0]
    asked = rng.choice([None, epoch, epoch, max(1, epoch - 1), epoch + 1, epoch + 3])
    if kind in ("look", "cancel"):
        return Call(number, at, "r", *PLACE, Kind(kind))
    if kind == "join":
        return Call(number, at, "r", *PLACE, Kind.JOIN, asked)
    key = rng.choice([None, f"k{number}"])
    if keys and rng.random() < 0.2:
        return replace(rng.choice(keys), id=number, at=at)
    call = Call(number, at, "r", *PLACE, Kind.SUPERSEDE, asked, asked is None, key)
    if key:
        keys.append(call)
    return call


def drawn_history(rng, count, width, lost_share):
    """`count` operations of `width` callers on a correct register, each with its place between call and answer.

    Of those whose answer is lost some take effect long after, and some never.
    """
    register, operations, keys = Register(), [], []
    events = [(rng.randrange(100), n, "call", None) for n in range(width)]
    heapq.heapify(events)
    ticket = width
    while events:
        at, _, what, about = heapq.heappop(events)

        def then(delay, what, about, at=at):
            nonlocal ticket
            ticket += 1
            heapq.heappush(events, (at + rng.randrange(1, delay), ticket, what, about))

        if what == "call":
            if len(operations) == count:
                continue
            call = drawn_call(rng, len(operations) + 1, at, max(1, register.epoch), keys)
            lost = rng.random() < lost_share
            operations.append(operation := Operation(call))
            if lost:
                operation.lost = Lost(call.id, at + 1)
                then(20, "call", None)
                if rng.random() < 0.5:
                    then(5000, "happen", (operation, True))
            else:
                then(200, "happen", (operation, False))
        elif what == "happen":
            operation, lost = about
            call = operation.call
            told = register.admit(call.asked) if call.kind is Kind.JOIN else register.perform(call)
            if not lost:
                then(100, "respond" if isinstance(told, int) else "answer", (operation, told))
        elif what == "respond":
            operation, admitted = about
            then(50, "answer", (operation, register.respond(admitted)))
        else:
            operation, told = about
            operation.answer = Answer(operation.id, at, **told)
            then(100, "call", None)
    return operations


# -- every order of a small one ----------------------------------------------------------------------------------------


def explained(operations):
    """Whether any order of these operations on the register gives these answers."""
    return _explained(Register(), [[one, None, False] for one in operations], set())


def _explained(register, progress, seen):
    """`progress`: per operation, the epoch it was admitted under, if it was, and whether it is over."""
    place = register.as_tuple(), tuple((admitted, over) for _, admitted, over in progress)
    if place in seen:
        return False
    seen.add(place)
    waiting = [one for one, _, over in progress if not over and one.answer is not None]
    if not waiting:
        return True
    horizon = min(one.answer.at for one in waiting)
    for number, (one, admitted, over) in enumerate(progress):
        if over or one.call.at > horizon:
            continue
        for after, step in _next(register, one, admitted):
            changed = [list(entry) for entry in progress]
            changed[number][1:] = step
            if _explained(after, changed, seen):
                return True
    return False


def _next(register, one, admitted):
    """What the next instant of an operation can make of the register, and how far the operation is then."""
    after = register.copy()
    call = one.call
    if call.kind is not Kind.JOIN:
        told = after.perform(call)
        if one.answer is None or _says(one.answer, told):
            yield after, (None, True)
        if one.answer is None and call.kind is Kind.SUPERSEDE and register.epoch == 0 and call.asked == 1:
            yield replace(register, epoch=1), (None, False)
        return
    if admitted is None:
        told = after.admit(call.asked)
        if one.answer is None:
            yield after, (None, True)
        elif isinstance(told, int):
            yield after, (told, False)
        elif _says(one.answer, told):
            yield after, (None, True)
    elif _says(one.answer, after.respond(admitted)):
        yield after, (admitted, True)


def _says(answer, told):
    names = ("status", "epoch", "current", "new", "cancelled")
    return all(getattr(answer, name) == told.get(name, False if name == "cancelled" else None) for name in names)
