"""Every order of events in a small world: one scope, two requests per epoch, three epochs.

Events may be lost, late, repeated and reordered: each of them is tried in every reachable state, until no new state
appears, so paths of any length are covered.  Pins are counted per step (owned before + handed over = owned after +
released); by induction they are owned once and released once along every path.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

from retire.core import TABLE, ScopeState, check, step
from retire.core import events as ev
from retire.core.effects import CloseRequests, InstallCertificate, ReportStage, StartCold, StartFresh
from retire.core.errors import ProtocolError
from retire.core.types import Refusal, Stage
from tests.core.world import COMMON, ENV, NONE, admitted, advanced, closed, fresh, holding, released, rid, tid

# Prompts of different overlap: 1a and 2a share much, 1b less, 3b nothing with the others.
PROMPTS = {
    "1a": (*COMMON, 10, 11),
    "1b": (*COMMON[:3], 12, 13),
    "2a": (*COMMON, 20),
    "2b": (*COMMON[:4], 21, 22),
    "3a": (*COMMON, 20, 30, 31),
    "3b": (40, 41, 42),
}
HELD = {name: holding(name, PROMPTS[name], first_block=100 * i) for i, name in enumerate(PROMPTS, 1)}
TRANSITIONS = ("t12", "t23", "t13", "n12", "n23")
EVENTS: tuple[ev.Event, ...] = (
    advanced(1, 2),
    advanced(2, 3),
    advanced(1, 3),  # what arrives when the news of epoch 2 was lost
    advanced(1, 2, NONE, "n12"),
    advanced(2, 3, NONE, "n23"),
    *(admitted(name, tokens=PROMPTS[name]) for name in PROMPTS),
    *(closed(name, HELD[name]) for name in PROMPTS),
    *(closed(name) for name in PROMPTS),
    *(ev.RequestFinished(rid(name)) for name in PROMPTS),
    *(ev.AdoptionFailed(rid(name), Refusal.NOT_ADOPTED) for name in PROMPTS if name[0] != "1"),
    *(ev.PinsExpired(tid(name)) for name in TRANSITIONS),
    *(ev.PinsYielded(tid(name)) for name in TRANSITIONS),
    ev.CertificatesRevoked(),
    ev.ScopeCancelled(),
)


def events_at(state: ScopeState):
    """Everything, and the adoption of whatever certificate is out (of a foreign one where none is)."""
    yield from EVENTS
    certificate = state.transition and state.transition.certificate
    if certificate:
        blocks = tuple(tuple(ref and ref.block for ref in group) for group in certificate.groups)
        yield ev.CertificateAdopted(certificate.target, blocks)
    yield ev.CertificateAdopted(rid("1a"), ((100,),))


@cache
def explore():
    """All reachable states, and every (place, event type, place) seen."""
    seen, frontier = {fresh()}, [fresh()]
    arrows, steps, rejections = set(), 0, 0
    while frontier:
        state = frontier.pop()
        for event in events_at(state):
            steps += 1
            try:
                after, effects = step(state, event, ENV)
            except ProtocolError:
                rejections += 1
                continue
            assert_pins_balance(state, event, after, effects)
            assert_effects_in_order(state, event, after, effects)
            arrows.add((state.place, type(event), after.place))
            if after not in seen:
                check(after)
                seen.add(after)
                frontier.append(after)
    return seen, arrows, steps, rejections


def assert_pins_balance(state, event, after, effects) -> None:
    before = [held.request for held in state.holdings]
    entered = [event.holding.request] if isinstance(event, ev.RequestClosed) and event.holding else []
    kept = [held.request for held in after.holdings]
    left = [held.request for held in released(effects)]
    assert sorted(before + entered) == sorted(kept + left)
    assert max(Counter(kept).values(), default=1) == 1


def assert_effects_in_order(state, event, after, effects) -> None:
    for effect in effects:
        if isinstance(effect, CloseRequests):
            assert effect.requests == state.live
            assert not after.live
        elif isinstance(effect, InstallCertificate):
            assert effect.certificate.target in after.live
            assert not after.closing
            assert effect.certificate == after.transition.certificate
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
    print(f"{len(seen)} states, {steps} events tried, {rejections} refused")
    assert len(seen) > 1000


def test_every_arrow_of_the_table_is_taken_and_no_other():
    _, arrows, _, _ = explore()
    assert arrows == {(place, event, to) for (place, event), row in TABLE.items() for to in row.leads_to}


def test_a_waiting_successor_runs_once_the_last_receipt_is_in_even_if_nothing_was_kept():
    """Liveness: from every state where a successor waits, empty receipts are enough to start it."""
    waiting = [s for s in explore()[0] if s.place is Stage.FENCE and s.transition.successor]
    assert waiting
    for state in waiting:
        after, effects, target = state, (), state.transition.successor.request
        for request in sorted(state.closing):
            after, effects = step(after, ev.RequestClosed(request, None), ENV)
        started = [e for e in effects if isinstance(e, (InstallCertificate, StartCold))]
        assert [e.certificate.target if isinstance(e, InstallCertificate) else e.request for e in started] == [target]


def test_cancelling_leaves_no_pin_anywhere():
    for state in explore()[0]:
        if not state.cancelled:
            after, effects = step(state, ev.ScopeCancelled(), ENV)
            assert released(effects) == state.holdings
            assert not after.holdings


def test_the_scope_can_be_superseded_again_from_every_state():
    """Invariant 9."""
    for state in explore()[0]:
        if not state.cancelled:
            after, effects = step(state, advanced(state.epoch, 9, name="again"), ENV)
            check(after)
            assert after.holdings == state.holdings
            assert not released(effects)
            assert not after.live
            assert after.closing == state.live | state.closing | state.leaving
