"""Every (place, event) cell of the table: what it does, or that it is refused and changes nothing."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from retire.core import TABLE, check, mermaid, step
from retire.core import events as ev
from retire.core import transition as tr
from retire.core.effects import (
    CloseRequests,
    InstallCertificate,
    ReleasePins,
    ReportClosed,
    ReportStage,
    StartCold,
    StartFresh,
)
from retire.core.errors import InvariantViolation, ProtocolError
from retire.core.types import KVGroup, Outcome, Refusal, Stage
from tests.core.world import (
    CERTIFIED,
    COMMON,
    ENV,
    NONE,
    SCOPE,
    admitted,
    advanced,
    closed,
    fresh,
    geometry,
    holding,
    is_rejected,
    play,
    refs,
    rid,
    state_after,
    successor,
    tid,
)

IDLE, FENCE, ALIGN, RESUME, CANCELLED = None, Stage.FENCE, Stage.ALIGN, Stage.RESUME, Outcome.CANCELLED
PLACES = (*Stage, IDLE, CANCELLED)
EVENTS = ev.Event.__args__

H1A, H1B = holding("1a", first_block=100), holding("1b", (*COMMON[:4], 70, 71), first_block=200)
STRANGER = holding("0z")
GRANTED = InstallCertificate(
    tr.best((H1A,), successor("2a"), scope=SCOPE, transfer=tid("t12"), groups=ENV.groups, generations=ENV.generations)[
        1
    ]
)
ADOPTED = ev.CertificateAdopted(rid("2a"), ((100, 101, 102),))

# One state for each place, reached by real events.
AT = {
    IDLE: state_after(admitted("1a"), admitted("1b")),
    FENCE: state_after(admitted("1a"), admitted("1b"), advanced(1, 2), admitted("2a"), closed("1a", H1A)),
    ALIGN: state_after(admitted("1a"), advanced(1, 2), closed("1a", H1A)),
    RESUME: state_after(admitted("1a"), advanced(1, 2), closed("1a", H1A), admitted("2a")),
    CANCELLED: state_after(admitted("1a"), ev.ScopeCancelled()),
}
LIVE_1 = frozenset({rid("1a"), rid("1b")})
COLD_END = (ReportStage(tid("t12"), Stage.RECLAIM), ReportClosed(tid("t12"), Outcome.COLD))
LOST_PINS = (ev.PinsExpired(tid("t12")), ev.PinsYielded(tid("t12")), ev.CertificatesRevoked())


def overtaken(closing: str | None) -> tuple:
    told = (CloseRequests(frozenset({rid(closing)})),) if closing else ()
    return (ReportStage(tid("t23"), Stage.ADVANCE), *told, ReportClosed(tid("t12"), Outcome.OVERTAKEN))


# (place, event type) -> (event, where it leads, effects in order)
CELLS = {
    (IDLE, ev.EpochAdvanced): (
        advanced(1, 2),
        FENCE,
        (ReportStage(tid("t12"), Stage.ADVANCE), CloseRequests(LIVE_1)),
    ),
    (IDLE, ev.RequestAdmitted): (admitted("1c"), IDLE, (StartFresh(rid("1c")),)),
    (IDLE, ev.RequestClosed): (closed("0z", STRANGER), IDLE, (ReleasePins((STRANGER,)),)),
    (IDLE, ev.RequestFinished): (ev.RequestFinished(rid("1a")), IDLE, ()),
    (IDLE, ev.CertificatesRevoked): (ev.CertificatesRevoked(), IDLE, ()),
    (IDLE, ev.ScopeCancelled): (ev.ScopeCancelled(), CANCELLED, (CloseRequests(LIVE_1),)),
    (FENCE, ev.EpochAdvanced): (advanced(2, 3), FENCE, overtaken("2a")),
    (FENCE, ev.RequestAdmitted): (admitted("2b"), FENCE, (StartFresh(rid("2b")),)),
    (FENCE, ev.RequestClosed): (
        closed("1b", H1B),
        RESUME,
        (ReportStage(tid("t12"), Stage.FENCE), GRANTED, ReleasePins((H1B,)), ReportStage(tid("t12"), Stage.ALIGN)),
    ),
    (FENCE, ev.RequestFinished): (
        ev.RequestFinished(rid("1b")),
        RESUME,
        (ReportStage(tid("t12"), Stage.FENCE), GRANTED, ReportStage(tid("t12"), Stage.ALIGN)),
    ),
    **{(FENCE, type(event)): (event, FENCE, (ReleasePins((H1A,)),)) for event in LOST_PINS},
    (FENCE, ev.ScopeCancelled): (
        ev.ScopeCancelled(),
        CANCELLED,
        (CloseRequests(frozenset({rid("2a")})), ReleasePins((H1A,)), ReportClosed(tid("t12"), Outcome.CANCELLED)),
    ),
    (ALIGN, ev.EpochAdvanced): (advanced(2, 3), ALIGN, (*overtaken(None), ReportStage(tid("t23"), Stage.FENCE))),
    (ALIGN, ev.RequestAdmitted): (admitted("2a"), RESUME, (GRANTED, ReportStage(tid("t12"), Stage.ALIGN))),
    (ALIGN, ev.RequestClosed): (closed("0z", STRANGER), ALIGN, (ReleasePins((STRANGER,)),)),
    (ALIGN, ev.PinsExpired): (
        ev.PinsExpired(tid("t12")),
        IDLE,
        (
            ReleasePins((H1A,)),
            ReportStage(tid("t12"), Stage.RECLAIM),
            ReportClosed(tid("t12"), Outcome.EXPIRED),
        ),
    ),
    **{(ALIGN, type(event)): (event, ALIGN, (ReleasePins((H1A,)),)) for event in LOST_PINS[1:]},
    (ALIGN, ev.ScopeCancelled): (
        ev.ScopeCancelled(),
        CANCELLED,
        (ReleasePins((H1A,)), ReportClosed(tid("t12"), Outcome.CANCELLED)),
    ),
    (RESUME, ev.EpochAdvanced): (advanced(2, 3), FENCE, overtaken("2a")),
    (RESUME, ev.RequestAdmitted): (admitted("2b"), RESUME, (StartFresh(rid("2b")),)),
    (RESUME, ev.RequestClosed): (closed("0z", STRANGER), RESUME, (ReleasePins((STRANGER,)),)),
    (RESUME, ev.RequestFinished): (
        ev.RequestFinished(rid("2a")),
        IDLE,
        (ReleasePins((H1A,)), ReportClosed(tid("t12"), Outcome.CLIENT_LOST)),
    ),
    (RESUME, ev.CertificateAdopted): (
        ADOPTED,
        IDLE,
        (
            ReleasePins((H1A,)),
            ReportStage(tid("t12"), Stage.RESUME),
            ReportStage(tid("t12"), Stage.RECLAIM),
            ReportClosed(tid("t12"), Outcome.INHERITED),
        ),
    ),
    (RESUME, ev.AdoptionFailed): (
        ev.AdoptionFailed(rid("2a"), Refusal.NOT_ADOPTED),
        IDLE,
        (StartCold(rid("2a"), Refusal.NOT_ADOPTED), ReleasePins((H1A,)), *COLD_END),
    ),
    **{
        (RESUME, type(event)): (event, IDLE, (StartCold(rid("2a"), reason), ReleasePins((H1A,)), *COLD_END))
        for event, reason in zip(LOST_PINS, (Refusal.EXPIRED, Refusal.PRESSURE, Refusal.REVOKED), strict=True)
    },
    (RESUME, ev.ScopeCancelled): (
        ev.ScopeCancelled(),
        CANCELLED,
        (CloseRequests(frozenset({rid("2a")})), ReleasePins((H1A,)), ReportClosed(tid("t12"), Outcome.CANCELLED)),
    ),
    (CANCELLED, ev.RequestClosed): (closed("1a", H1A), CANCELLED, (ReleasePins((H1A,)),)),
    (CANCELLED, ev.RequestFinished): (ev.RequestFinished(rid("1a")), CANCELLED, ()),
    (CANCELLED, ev.CertificatesRevoked): (ev.CertificatesRevoked(), CANCELLED, ()),
}
# A plausible event of each kind, to try where the table has no cell.
ANY = {
    ev.EpochAdvanced: advanced(2, 3),
    ev.RequestAdmitted: admitted("1c"),
    ev.RequestClosed: closed("1a", H1A),
    ev.RequestFinished: ev.RequestFinished(rid("1a")),
    ev.CertificateAdopted: ADOPTED,
    ev.AdoptionFailed: ev.AdoptionFailed(rid("2a"), Refusal.NOT_ADOPTED),
    ev.PinsExpired: ev.PinsExpired(tid("t12")),
    ev.PinsYielded: ev.PinsYielded(tid("t12")),
    ev.CertificatesRevoked: ev.CertificatesRevoked(),
    ev.ScopeCancelled: ev.ScopeCancelled(),
}


def name(key) -> str:
    return f"{tr.place_name(key[0])}-{key[1].__name__}"


def test_the_cells_are_the_table():
    assert set(CELLS) == set(TABLE)
    assert set(ANY) == set(EVENTS)


@pytest.mark.parametrize("key", CELLS, ids=name)
def test_a_cell_does_what_it_says(key):
    event, leads_to, effects = CELLS[key]
    state, did = play(AT[key[0]], event)
    assert state.place == leads_to
    assert did == effects


@pytest.mark.parametrize("key", [(p, e) for p in PLACES for e in EVENTS if (p, e) not in TABLE], ids=name)
def test_an_event_without_a_cell_is_refused_and_changes_nothing(key):
    place, kind = key
    if place not in AT:
        assert place in (Stage.ADVANCE, Stage.RECLAIM), "passed through within one event, never rested in"
        return
    before = copy.deepcopy(AT[place])
    with pytest.raises(ProtocolError, match=kind.__name__):
        step(AT[place], ANY[kind], ENV)
    assert AT[place] == before


FOREIGN = holding("1b", tenant="rival")
REFUSED = {
    "late_old_epoch": (IDLE, advanced(0, 2)),
    "late_after_overtake": (FENCE, advanced(1, 3)),
    "duplicate_advance": (FENCE, advanced(1, 2)),
    "advance_to_itself": (IDLE, advanced(1, 1)),
    "advance_backwards": (IDLE, advanced(5, 4)),
    "transition_id_reused": (FENCE, advanced(2, 3, name="t12")),
    "request_of_an_old_epoch": (FENCE, admitted("1c")),
    "request_of_a_future_epoch": (FENCE, admitted("3a")),
    "request_admitted_twice": (FENCE, admitted("2a")),
    "closing_request_admitted_again": (FENCE, admitted("1b", 2)),
    "closed_request_admitted_again": (ALIGN, admitted("1a", 2)),
    "request_of_another_tenant": (ALIGN, ev.RequestAdmitted(successor("2a", tenant="rival"), 2)),
    "live_request_closed": (IDLE, closed("1a", H1A)),
    "unknown_request_closed": (IDLE, closed("0z")),
    "closed_twice": (ALIGN, closed("1a")),
    "pins_handed_over_twice": (ALIGN, closed("1a", H1A)),
    "pins_handed_over_twice_in_fence": (FENCE, closed("1a", H1A)),
    "pins_of_another_request": (FENCE, closed("1b", H1A)),
    "pins_of_another_tenant": (FENCE, closed("1b", FOREIGN)),
    "unknown_request_finished": (IDLE, ev.RequestFinished(rid("0z"))),
    "finished_twice": (RESUME, ev.RequestFinished(rid("1a"))),
    "adopted_by_another": (RESUME, ev.CertificateAdopted(rid("2b"), ((100, 101, 102),))),
    "adoption_failed_for_another": (RESUME, ev.AdoptionFailed(rid("2b"), Refusal.NOT_ADOPTED)),
    "pins_of_another_transition_expired": (ALIGN, ev.PinsExpired(tid("t01"))),
    "pins_of_another_transition_yielded": (RESUME, ev.PinsYielded(tid("t01"))),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_late_or_foreign_event_is_refused_and_changes_nothing(case):
    place, event = case
    before = copy.deepcopy(AT[place])
    assert is_rejected(AT[place], event)
    assert AT[place] == before


def test_adopting_other_blocks_than_certified_is_a_defect():
    with pytest.raises(InvariantViolation, match="invariant 4"):
        step(AT[RESUME], ev.CertificateAdopted(rid("2a"), ((100, 101, 999),)), ENV)


def test_a_handler_is_held_to_the_arrows_of_its_row(monkeypatch):
    key = (IDLE, ev.ScopeCancelled)
    monkeypatch.setitem(tr.TABLE, key, tr.Row(TABLE[key].handler, (IDLE,)))
    with pytest.raises(InvariantViolation, match="not in the table"):
        step(AT[IDLE], ev.ScopeCancelled(), ENV)


# Paths that one cell does not show


def test_a_successor_that_waits_in_fence_runs_after_the_last_receipt():
    state = state_after(admitted("1a"), advanced(1, 2))
    state, effects = play(state, admitted("2a"))
    assert (state.place, effects) == (FENCE, ())
    state, effects = play(state, closed("1a", H1A))
    assert effects == (ReportStage(tid("t12"), Stage.FENCE), GRANTED, ReportStage(tid("t12"), Stage.ALIGN))


def test_an_overtaken_transition_hands_on_its_pins_and_the_best_of_both_versions_wins():
    deeper = holding("2a", (*COMMON, 80, 81, 82, 83), first_block=300)
    state = state_after(
        admitted("1a"), advanced(1, 2), closed("1a", H1A), admitted("2a"), advanced(2, 3), closed("2a", deeper)
    )
    assert state.holdings == (H1A, deeper)
    state, effects = play(state, admitted("3a", tokens=(*COMMON, 80, 81, 9)))
    assert effects[0].certificate.source == rid("2a")
    assert effects[0].certificate.tokens == 8
    assert effects[1] == ReleasePins((H1A,))


def test_pins_survive_a_version_that_left_nothing():
    state = state_after(admitted("1a"), advanced(1, 2), closed("1a", H1A), admitted("2a"), advanced(2, 3), closed("2a"))
    _, effects = play(state, admitted("3a"))
    assert effects[0].certificate.source == rid("1a")


def test_an_overtaking_contract_that_inherits_nothing_releases_what_it_was_handed():
    state, effects = play(AT[RESUME], advanced(2, 3, NONE))
    assert effects == (
        ReportStage(tid("t23"), Stage.ADVANCE),
        CloseRequests(frozenset({rid("2a")})),
        ReleasePins((H1A,)),
        ReportClosed(tid("t12"), Outcome.OVERTAKEN),
    )
    assert state.transition.refusal is Refusal.NOT_WANTED


def test_an_epoch_whose_message_was_lost_is_skipped():
    state = state_after(admitted("1a"), advanced(1, 2), admitted("2a"))
    state, _ = play(state, advanced(4, 5, CERTIFIED))
    assert state.epoch == 5
    assert state.closing == {rid("1a"), rid("2a")}


REASONS = (Refusal.EXPIRED, Refusal.PRESSURE, Refusal.REVOKED)


@pytest.mark.parametrize(
    ("place", "event", "reason"),
    [
        *((FENCE, event, reason) for event, reason in zip(LOST_PINS, REASONS, strict=True)),
        *((ALIGN, event, reason) for event, reason in zip(LOST_PINS[1:], REASONS[1:], strict=True)),
    ],
)
def test_lost_pins_are_named_to_the_successor_that_comes_later(place, event, reason):
    state, _ = play(AT[place], event, event)
    last = closed("1b", H1B) if place is FENCE else admitted("2a")
    state, effects = play(state, last)
    assert StartCold(rid("2a"), reason) in effects
    assert state.place is IDLE
    assert (ReleasePins((H1B,)) in effects) == (place is FENCE)


def test_the_first_reason_stands():
    state, _ = play(AT[FENCE], ev.PinsYielded(tid("t12")), ev.PinsExpired(tid("t12")))
    assert state.transition.refusal is Refusal.PRESSURE


def test_a_request_after_unclaimed_pins_expired_is_like_any_other():
    state, effects = play(AT[ALIGN], ev.PinsExpired(tid("t12")), admitted("2a"))
    assert state.place is IDLE
    assert StartFresh(rid("2a")) in effects


def test_a_lost_client_in_fence_leaves_its_predecessors_to_the_next_fence():
    state, effects = play(AT[FENCE], ev.RequestFinished(rid("2a")))
    assert effects == (ReleasePins((H1A,)), ReportClosed(tid("t12"), Outcome.CLIENT_LOST))
    assert state.place is IDLE
    assert state.leaving == {rid("1b")}
    state, effects = play(state, advanced(2, 3))
    assert effects == (ReportStage(tid("t23"), Stage.ADVANCE),), "1b was told already; FENCE is not claimed"
    _, effects = play(state, closed("1b", H1B))
    assert effects == (ReportStage(tid("t23"), Stage.FENCE),)


def test_requests_that_nobody_waits_for_still_leave_once():
    leaving, _ = play(AT[FENCE], ev.RequestFinished(rid("2a")))
    state, effects = play(leaving, closed("1b", H1B))
    assert (state.leaving, effects) == (frozenset(), (ReleasePins((H1B,)),))
    assert is_rejected(state, closed("1b"))
    state, effects = play(leaving, admitted("2c"), ev.ScopeCancelled())
    assert effects[-1] == CloseRequests(frozenset({rid("2c")})), "1b was told already"
    assert state.leaving == {rid("1b"), rid("2c")}
    state, effects = play(state, ev.RequestFinished(rid("1b")), closed("2c"))
    assert (state.leaving, effects) == (frozenset(), ())


def test_another_live_request_may_end_without_touching_the_transition():
    for place in (FENCE, RESUME):
        state, effects = play(AT[place], admitted("2b"), ev.RequestFinished(rid("2b")))
        assert state == AT[place]
        assert effects == (StartFresh(rid("2b")),)


def test_nothing_common_starts_cold_by_name():
    state = state_after(admitted("1a"), advanced(1, 2), closed("1a", H1A))
    state, effects = play(state, admitted("2a", tokens=(7, 7, 7)))
    assert effects == (
        StartCold(rid("2a"), Refusal.NO_COMMON_PREFIX),
        ReportStage(tid("t12"), Stage.ALIGN),
        ReleasePins((H1A,)),
        *COLD_END,
    )


def test_a_changed_generation_starts_cold_by_name():
    env = geometry(generations=lambda _: 2)
    _, effects = play(AT[ALIGN], admitted("2a"), env=env)
    assert effects[0] == StartCold(rid("2a"), Refusal.GENERATION)


def test_a_cancelled_id_starts_anew_above_its_epoch_and_strangers_leave_no_pins():
    again = fresh(epoch=AT[CANCELLED].epoch + 1)
    state, effects = play(again, admitted("2a"), closed("1a", H1A))
    assert effects == (StartFresh(rid("2a")), ReleasePins((H1A,)))
    assert state.live == {rid("2a")}


def test_the_diagram_shows_every_arrow_of_the_table():
    lines = mermaid().splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> IDLE"]
    for (place, event), row in TABLE.items():
        for target in row.leads_to:
            arrow = f"    {tr.place_name(place)} --> {tr.place_name(target)}: "
            assert any(line.startswith(arrow) and event.__name__ in line[len(arrow) :].split(", ") for line in lines)


# `check` sees what it claims to see

BROKEN = {
    "2": (AT[IDLE], {"epoch": 0}, {}),
    "2 transition elsewhere": (AT[ALIGN], {"epoch": 9}, {}),
    "3 frontier beyond tokens": (AT[ALIGN], {}, {"holdings": (holding("1a", (1,), 8),)}),
    "3 writer open": (AT[FENCE], {}, {"holdings": (H1B,)}),
    "4 fence over with closing": (AT[FENCE], {}, {"stage": ALIGN}),
    "4 no certificate in resume": (AT[RESUME], {}, {"certificate": None}),
    "4 old writer escaped": (AT[ALIGN], {"leaving": frozenset({rid("0z")})}, {}),
    "4 another source": (AT[RESUME], {}, {"holdings": (H1B,)}),
    "4 other blocks": (AT[RESUME], {}, {"holdings": (holding("1a", first_block=500),)}),
    "4 another prefix": (AT[RESUME], {}, {"successor": successor("2a", (1, 2, 9, 9, 9, 9, 9))}),
    "4 nothing left to compute": (AT[RESUME], {}, {"successor": successor("2a", COMMON)}),
    "4 fingerprint": (AT[RESUME], {}, {"successor": successor("2a", fingerprint="g")}),
    "6 owned twice": (AT[ALIGN], {}, {"holdings": (H1A, H1A)}),
    "6 rests in reclaim": (AT[ALIGN], {}, {"stage": Stage.RECLAIM}),
    "6 waits for nobody": (AT[RESUME], {"live": frozenset()}, {}),
    "6 cancelled with transition": (AT[ALIGN], {"cancelled": True}, {}),
    "8 holding of another tenant": (AT[ALIGN], {}, {"holdings": (holding("1a", tenant="rival"),)}),
    "9 live and closing": (AT[FENCE], {"live": frozenset({rid("1b"), rid("2a")})}, {}),
    "10 pins after refusal": (AT[ALIGN], {}, {"refusal": Refusal.EXPIRED}),
}


@pytest.mark.parametrize("label", BROKEN)
def test_check_names_the_invariant_that_a_state_breaks(label):
    state, of_state, of_transition = BROKEN[label]
    if of_transition:
        state = replace(state, transition=replace(state.transition, **of_transition))
    with pytest.raises(InvariantViolation, match=rf"invariant {label.split()[0]} "):
        check(replace(state, **of_state))


def test_check_accepts_blocks_before_a_window_as_left_out():
    hybrid = geometry((KVGroup(2), KVGroup(2, window_tokens=3)))
    held = holding("1a", groups=(refs(range(10, 14)), refs((20, 21, 22, 23))))
    state, _ = play(fresh(), admitted("1a"), advanced(1, 2), closed("1a", held), admitted("2a"), env=hybrid)
    assert state.transition.certificate.groups == (refs((10, 11, 12)), refs((None, None, 22)))
