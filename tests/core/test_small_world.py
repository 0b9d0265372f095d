"""Every order of events in a small world: one scope, two requests per epoch, three epochs, host memory.

Events may be lost, late, repeated and reordered: each of them is tried in every reachable state, until no new state
appears, so paths of any length are covered.  What surrounds the scope is explored with it: soft blocks are reused at
any moment, and the answer to a copy comes at any moment too, once.  Pins are counted per step (owned before + handed
over = owned after + released); by induction they are owned once and released once along every path.  A holding's copy
is counted alike: it is asked for when there is none, and once it is there it stays.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

from retire.core import TABLE, ScopeState, check, step
from retire.core import events as ev
from retire.core.effects import (
    CloseRequests,
    InstallCertificate,
    OffloadPages,
    ReportStage,
    ReturnBlocks,
    StartCold,
    StartFresh,
)
from retire.core.errors import ProtocolError
from retire.core.types import Refusal, RequestId, Stage, Tier
from tests.core.world import (
    COMMON,
    HOST,
    NONE,
    admitted,
    adopted,
    advanced,
    closed,
    fresh,
    geometry,
    handed_over,
    holding,
    not_offloaded,
    offloaded,
    released,
    reused,
    rid,
    tid,
)

# Prompts of different overlap: 1a and 2a share much, 1b less, 3b nothing with the others.
PROMPTS = {
    "1a": (*COMMON, 10, 11),
    "1b": (*COMMON[:3], 12, 13),
    "2a": (*COMMON, 20),
    "2b": (*COMMON[:4], 21, 22),
    "3a": (*COMMON, 20, 30, 31),
    "3b": (40, 41, 42),
    "1z": (*COMMON[:5], 14, 15),  # finished by itself, before anybody superseded it
}
HELD = {name: holding(name, PROMPTS[name], first_block=100 * i) for i, name in enumerate(PROMPTS, 1)}
HELD["1a"] = replace(HELD["1a"], guaranteed=False)
HELD["1z"] = replace(HELD["1z"], guaranteed=False)
# 1a loses its third block, 1z its first: there is a shorter certificate of one, and none of the other.
INTACT = geometry(offloads=True)
LOST = geometry(generations=reused(102, 700), offloads=True)
TRANSITIONS = ("t12", "t23", "t13", "n12", "n23")
EVENTS: tuple[ev.Event, ...] = (
    advanced(1, 2),
    advanced(2, 3, HOST),
    advanced(1, 3, left=(HELD["1z"],), refusal=Refusal.QUOTA),  # what arrives when the news of epoch 2 was lost
    advanced(1, 2, NONE, "n12", left=(HELD["1z"],)),
    advanced(2, 3, NONE, "n23"),
    *(admitted(name, tokens=PROMPTS[name]) for name in PROMPTS if name != "1z"),
    *(closed(name, HELD[name]) for name in PROMPTS if name != "1z"),
    *(closed(name) for name in PROMPTS),
    closed("1b", None, Refusal.QUOTA),
    *(ev.RequestFinished(rid(name)) for name in PROMPTS),
    *(ev.AdoptionFailed(rid(name), Refusal.GENERATION) for name in PROMPTS if name[0] != "1"),
    *(ev.AdoptionFailed(rid(name), Refusal.CORRUPT) for name in PROMPTS if name[0] != "1"),
    *(ev.PinsExpired(tid(name)) for name in TRANSITIONS),
    ev.CertificatesRevoked(),
    ev.ScopeCancelled(),
)


@dataclass(frozen=True)
class World:
    """`lost`: the soft blocks were reused.  `asked`: copies whose answer is still owed."""

    state: ScopeState
    lost: bool = False
    asked: frozenset[RequestId] = frozenset()

    @property
    def env(self):
        return LOST if self.lost else INTACT


def events_at(world: World):
    """Everything, the answers that are owed, and the adoption of whatever certificate is out."""
    yield from EVENTS
    for name in world.asked:
        yield offloaded(HELD[name])
        yield not_offloaded(name)
    certificate = world.state.transition and world.state.transition.certificate
    if certificate:
        yield adopted(certificate)
    yield ev.CertificateAdopted(rid("1a"), ((100,),))  # where none is out, a foreign one


def after_event(world: World, event: ev.Event, after: ScopeState, effects) -> World:
    asked = world.asked - {event.request} if isinstance(event, ev.PagesOffloaded) else world.asked
    asked |= {effect.holding.request for effect in effects if isinstance(effect, OffloadPages)}
    return World(after, world.lost, asked)


@cache
def explore():
    """All reachable worlds, and every (place, event type, place) seen."""
    seen, frontier = {World(fresh())}, [World(fresh())]
    arrows, steps, rejections = set(), 0, 0
    while frontier:
        world = frontier.pop()
        found = [replace(world, lost=True)]
        for event in events_at(world):
            steps += 1
            state = world.state
            try:
                after, effects = step(state, event, world.env)
            except ProtocolError:
                rejections += 1
                if isinstance(event, ev.PagesOffloaded):
                    found.append(after_event(world, event, state, ()))
                continue
            assert_pins_balance(state, event, after, effects)
            assert_copies_balance(world, after, effects)
            assert_effects_in_order(state, event, after, effects)
            arrows.add((state.place, type(event), after.place))
            found.append(after_event(world, event, after, effects))
        for new in found:
            if new not in seen:
                check(new.state)
                assert new.state.transition is None or new.state.transition.copying <= new.asked
                seen.add(new)
                frontier.append(new)
    return seen, arrows, steps, rejections


def assert_pins_balance(state, event, after, effects) -> None:
    before = [held.request for held in state.holdings]
    entered = [held.request for held in handed_over(event)]
    kept = [held.request for held in after.holdings]
    left = [held.request for held in released(effects)]
    assert sorted(before + entered) == sorted(kept + left)
    assert max(Counter(kept).values(), default=1) == 1


def assert_copies_balance(world, after, effects) -> None:
    copied = {held.request for held in world.state.holdings if held.host is not None}
    copied_after = {held.request for held in after.holdings if held.host is not None}
    assert copied & {held.request for held in after.holdings} <= copied_after, "there until the release"
    for effect in effects:
        if isinstance(effect, OffloadPages):
            assert effect.holding in after.holdings
            assert effect.holding.request in after.transition.copying
            assert effect.holding.request not in copied | world.asked, "copied twice"
            assert not after.closing, "invariant 5"
        elif isinstance(effect, ReturnBlocks):
            assert effect.holding in after.holdings
            assert effect.holding.request in copied_after - copied, "returned twice, or without a copy"


def assert_effects_in_order(state, event, after, effects) -> None:
    for effect in effects:
        if isinstance(effect, CloseRequests):
            assert effect.requests == state.live
            assert not after.live
        elif isinstance(effect, InstallCertificate):
            assert effect.certificate.target in after.live
            assert not after.closing
            assert effect.certificate == after.transition.certificate
            assert state.transition is None or effect.certificate != state.transition.certificate, "goes on for ever"
        elif isinstance(effect, (StartCold, StartFresh)):
            assert effect.request in after.live
            assert isinstance(effect, StartFresh) or not after.closing
        elif isinstance(effect, ReportStage) and effect.stage is Stage.FENCE:
            assert not after.closing
            assert not after.leaving
    assert after.epoch >= state.epoch, "invariant 2"
    assert after.epoch == state.epoch or isinstance(event, ev.EpochAdvanced)


def test_every_reachable_state_is_sound():
    seen, _, steps, rejections = explore()
    print(f"{len(seen)} worlds, {steps} events tried, {rejections} refused")
    assert len(seen) > 1000


def test_every_arrow_of_the_table_is_taken_and_no_other():
    _, arrows, _, _ = explore()
    assert arrows == {(place, event, to) for (place, event), row in TABLE.items() for to in row.leads_to}


def test_a_waiting_successor_runs_once_the_last_receipt_is_in_even_if_nothing_was_kept():
    """Liveness: from every state where a successor waits, empty receipts are enough to start it."""
    waiting = [w for w in explore()[0] if w.state.place is Stage.FENCE and w.state.transition.successor]
    assert waiting
    for world in waiting:
        state, effects, target = world.state, (), world.state.transition.successor.request
        for request in sorted(state.closing):
            state, effects = step(state, ev.RequestClosed(request, None), world.env)
        started = [e for e in effects if isinstance(e, (InstallCertificate, StartCold))]
        assert [e.certificate.target if isinstance(e, InstallCertificate) else e.request for e in started] == [target]


def test_adoption_that_keeps_failing_ends_in_a_cold_start_under_the_last_failures_name():
    """Liveness: whatever fails, there are no more attempts than blocks in both tiers."""
    resuming = [w for w in explore()[0] if w.state.place is Stage.RESUME]
    assert {w.state.transition.certificate.tier for w in resuming} == set(Tier)
    for world in resuming:
        for reasons in ((Refusal.GENERATION,), (Refusal.CORRUPT,), (Refusal.TRANSFER, Refusal.GENERATION)):
            state, effects, failures = world.state, (), 0
            while state.place is Stage.RESUME:
                reason = reasons[failures % len(reasons)]
                state, effects = step(state, ev.AdoptionFailed(state.transition.successor.request, reason), world.env)
                failures += 1
                assert failures <= 8
            assert effects[0] == StartCold(world.state.transition.successor.request, reason)
            assert {held.request for held in released(effects)} == {held.request for held in world.state.holdings}


def test_cancelling_leaves_no_pin_anywhere():
    for world in explore()[0]:
        if not world.state.cancelled:
            after, effects = step(world.state, ev.ScopeCancelled(), world.env)
            assert released(effects) == world.state.holdings
            assert not after.holdings


def test_the_scope_can_be_superseded_again_from_every_state():
    """Invariant 9: pins and copies under way are handed on."""
    for world in explore()[0]:
        state = world.state
        if not state.cancelled:
            after, effects = step(state, advanced(state.epoch, 9, name="again"), world.env)
            check(after)
            assert after.holdings == state.holdings
            assert not released(effects)
            assert not after.live
            assert after.closing == state.live | state.closing | state.leaving
            asked = {effect.holding.request for effect in effects if isinstance(effect, OffloadPages)}
            copying = state.transition.copying if state.transition else frozenset()
            assert after.transition.copying == copying | asked


def test_a_copy_that_comes_late_is_refused_or_belongs_to_a_holding_without_one():
    owed = [(w, name) for w in explore()[0] for name in w.asked]
    refused = 0
    for world, name in owed:
        held = {held.request: held for held in world.state.holdings}
        try:
            after, _ = step(world.state, offloaded(HELD[name]), world.env)
        except ProtocolError:
            refused += 1
            continue
        assert held[name].host is None
        (copied,) = (one for one in after.holdings if one.request == name)
        assert copied == replace(held[name], host=offloaded(HELD[name]).host)
    assert 0 < refused < len(owed)
