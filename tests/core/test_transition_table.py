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
    OffloadPages,
    ReleasePins,
    ReportClosed,
    ReportStage,
    ReturnBlocks,
    StartCold,
    StartFresh,
)
from retire.core.errors import InvariantViolation, ProtocolError
from retire.core.types import KVGroup, Outcome, Refusal, Stage, Tier, TokenCount
from tests.core.world import (
    CERTIFIED,
    COMMON,
    ENV,
    EXACT,
    HOST,
    NONE,
    WITH_HOST,
    admitted,
    adopted,
    advanced,
    certificate_of,
    closed,
    fresh,
    geometry,
    holding,
    host_of,
    is_rejected,
    not_offloaded,
    offloaded,
    play,
    refs,
    released,
    reused,
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
COPIED = replace(H1A, host=host_of(H1A.groups))
SPENT = replace(H1A, host=((None,) * 4,))  # its copy did not come back as it was
SOFT = replace(H1A, guaranteed=False)
GRANTED = InstallCertificate(certificate_of(H1A, successor("2a")))
ADOPTED = ev.CertificateAdopted(rid("2a"), ((100, 101, 102),))
FAILED = ev.AdoptionFailed(rid("2a"), Refusal.GENERATION)

# One state for each place, reached by real events.
AT = {
    IDLE: state_after(admitted("1a"), admitted("1b")),
    FENCE: state_after(admitted("1a"), admitted("1b"), advanced(1, 2), admitted("2a"), closed("1a", H1A)),
    ALIGN: state_after(admitted("1a"), advanced(1, 2), closed("1a", H1A)),
    RESUME: state_after(admitted("1a"), advanced(1, 2), closed("1a", H1A), admitted("2a")),
    CANCELLED: state_after(admitted("1a"), ev.ScopeCancelled()),
}
# The same, with a copy to host memory under way, and with a copy to restore from.
COPYING = {
    FENCE: state_after(
        admitted("1a"),
        advanced(1, 2, HOST),
        closed("1a", H1A),
        admitted("2a"),
        advanced(2, 3, HOST, "t23"),
        env=WITH_HOST,
    ),
    ALIGN: state_after(admitted("1a"), advanced(1, 2, HOST), closed("1a", H1A), env=WITH_HOST),
    RESUME: state_after(admitted("1a"), advanced(1, 2, HOST), closed("1a", H1A), admitted("2a"), env=WITH_HOST),
}
LOST = geometry(generations=reused(100, 101, 102, 103), offloads=True)
RESTORING, _ = play(COPYING[ALIGN], offloaded(H1A), admitted("2a"), env=LOST)
LIVE_1 = frozenset({rid("1a"), rid("1b")})
COLD_END = (ReportStage(tid("t12"), Stage.RECLAIM), ReportClosed(tid("t12"), Outcome.COLD))
LOST_PINS = (ev.PinsExpired(tid("t12")), ev.CertificatesRevoked())


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
        FAILED,
        IDLE,
        (StartCold(rid("2a"), Refusal.GENERATION), ReleasePins((H1A,)), *COLD_END),
    ),
    **{
        (RESUME, type(event)): (event, IDLE, (StartCold(rid("2a"), reason), ReleasePins((H1A,)), *COLD_END))
        for event, reason in zip(LOST_PINS, (Refusal.EXPIRED, Refusal.REVOKED), strict=True)
    },
    (RESUME, ev.ScopeCancelled): (
        ev.ScopeCancelled(),
        CANCELLED,
        (CloseRequests(frozenset({rid("2a")})), ReleasePins((H1A,)), ReportClosed(tid("t12"), Outcome.CANCELLED)),
    ),
    (FENCE, ev.PagesOffloaded): (offloaded(H1A), FENCE, (ReturnBlocks(COPIED),)),
    (ALIGN, ev.PagesOffloaded): (offloaded(H1A), ALIGN, (ReturnBlocks(COPIED),)),
    (RESUME, ev.PagesOffloaded): (offloaded(H1A), RESUME, ()),
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
    ev.AdoptionFailed: FAILED,
    ev.PagesOffloaded: offloaded(H1A),
    ev.PinsExpired: ev.PinsExpired(tid("t12")),
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
    before, env = AT[key[0]], ENV
    if key[1] is ev.PagesOffloaded:
        before = COPYING[key[0]]
    elif key[1] is ev.AdoptionFailed:
        env = LOST
    state, did = play(before, event, env=env)
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
FINISHED = holding("1z", first_block=400)
REFUSED = {
    "late_old_epoch": (IDLE, advanced(0, 2)),
    "late_after_overtake": (FENCE, advanced(1, 3)),
    "duplicate_advance": (FENCE, advanced(1, 2)),
    "advance_to_itself": (IDLE, advanced(1, 1)),
    "advance_backwards": (IDLE, advanced(5, 4)),
    "transition_id_reused": (FENCE, advanced(2, 3, name="t12")),
    "left_by_another_tenant": (ALIGN, advanced(2, 3, left=(FOREIGN,))),
    "left_what_is_owned": (ALIGN, advanced(2, 3, left=(H1A,))),
    "left_twice": (ALIGN, advanced(2, 3, left=(FINISHED, FINISHED))),
    "left_by_a_writer_that_is_live": (IDLE, advanced(1, 2, left=(H1A,))),
    "left_by_a_writer_that_is_closing": (FENCE, advanced(2, 3, left=(H1B,))),
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
    "adoption_failed_for_another": (RESUME, ev.AdoptionFailed(rid("2b"), Refusal.GENERATION)),
    "copy_that_nobody_asked_for": (ALIGN, offloaded(H1A)),
    "failed_copy_that_nobody_asked_for": (RESUME, not_offloaded("1a")),
    "copy_of_what_is_not_held": (FENCE, offloaded(H1B)),
    "pins_of_another_transition_expired": (ALIGN, ev.PinsExpired(tid("t01"))),
    "pins_of_another_transition_expired_in_resume": (RESUME, ev.PinsExpired(tid("t01"))),
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


@pytest.mark.parametrize(
    "blocks", [(), ((100, 101, 102), ()), ((100, 101),), ((100, 101, 102, 103),), ((100, None, 102),)]
)
def test_adopting_another_number_of_blocks_than_certified_is_a_defect(blocks):
    with pytest.raises(InvariantViolation, match="invariant 4"):
        step(AT[RESUME], ev.CertificateAdopted(rid("2a"), blocks), ENV)


def test_adopting_a_block_where_the_certificate_has_none_is_a_defect():
    hybrid = geometry((KVGroup(2, window_tokens=3),))
    state = state_after(admitted("1a"), advanced(1, 2), closed("1a", H1A), admitted("2a"), env=hybrid)
    assert state.transition.certificate.groups == (refs((None, None, 102)),)
    with pytest.raises(InvariantViolation, match="invariant 4"):
        step(state, ev.CertificateAdopted(rid("2a"), ((7, None, 102),)), hybrid)


def test_what_no_window_shows_any_more_may_be_missing_behind_a_longer_hit_in_the_prefix_cache():
    hybrid = geometry((KVGroup(2, window_tokens=3),))
    state = state_after(admitted("1a"), advanced(1, 2), closed("1a", H1A), admitted("2a"), env=hybrid)
    assert state.transition.certificate.tokens == 6
    moved_on = ev.CertificateAdopted(rid("2a"), ((None, None, None),), TokenCount(8))
    after, _ = step(state, moved_on, hybrid)
    assert after.place is IDLE
    with pytest.raises(InvariantViolation, match="invariant 4"):
        step(state, replace(moved_on, start_tokens=TokenCount(6)), hybrid)


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


@pytest.mark.parametrize(
    ("place", "event", "reason"),
    [
        (FENCE, LOST_PINS[0], Refusal.EXPIRED),
        (FENCE, LOST_PINS[1], Refusal.REVOKED),
        (ALIGN, LOST_PINS[1], Refusal.REVOKED),
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
    for first, second, reason in ((*LOST_PINS, Refusal.EXPIRED), (*LOST_PINS[::-1], Refusal.REVOKED)):
        state, _ = play(AT[FENCE], first, second)
        assert state.transition.refusal is reason


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
    _, effects = play(AT[ALIGN], admitted("2a"), env=LOST)
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


# Finished predecessors

LEFT_AT_REST = state_after(advanced(1, 2, left=(FINISHED, H1A)))


def test_what_had_finished_before_the_store_is_certified_like_what_was_closed():
    state, effects = play(fresh(), advanced(1, 2, left=(FINISHED,)), admitted("2a"))
    assert effects[2] == InstallCertificate(certificate_of(FINISHED, successor("2a")))
    assert state.holdings == (FINISHED,)


def test_finished_predecessors_wait_through_fence_beside_those_that_close():
    state = state_after(admitted("1a"), advanced(1, 2, left=(FINISHED,)))
    assert (state.place, state.holdings) == (FENCE, (FINISHED,))
    state, _ = play(state, closed("1a", H1A))
    assert (state.place, state.holdings) == (ALIGN, (FINISHED, H1A))


def test_finished_predecessors_join_what_an_overtaken_transition_hands_on():
    left = holding("2z", first_block=500)
    state, effects = play(AT[ALIGN], advanced(2, 3, left=(left,)))
    assert state.holdings == (H1A, left)
    assert not released(effects)


def test_a_contract_that_inherits_nothing_releases_what_had_finished_with_what_it_was_handed():
    state, effects = play(AT[ALIGN], advanced(2, 3, NONE, left=(FINISHED,)))
    assert released(effects) == (H1A, FINISHED)
    assert state.transition.refusal is Refusal.NOT_WANTED


def test_a_finished_predecessor_that_expires_unclaimed_is_released():
    _, effects = play(LEFT_AT_REST, ev.PinsExpired(tid("t12")))
    assert released(effects) == (FINISHED, H1A)


# What was written and is not held

DISTANT = holding("1a", (7, 7, 7, 7))


@pytest.mark.parametrize(
    "events",
    [
        (admitted("1a"), advanced(1, 2), closed("1a", None, Refusal.QUOTA), admitted("2a")),
        (admitted("1a"), advanced(1, 2), admitted("2a"), closed("1a", None, Refusal.QUOTA)),
        (advanced(1, 2, refusal=Refusal.QUOTA), admitted("2a")),
        (admitted("1a"), advanced(1, 2, refusal=Refusal.QUOTA), closed("1a"), admitted("2a")),
        (admitted("1a"), advanced(1, 2, refusal=Refusal.QUOTA), ev.RequestFinished(rid("1a")), admitted("2a")),
        (advanced(1, 2, refusal=Refusal.QUOTA), advanced(2, 3), admitted("3a")),
        (admitted("1a"), advanced(1, 2), advanced(2, 3), closed("1a", None, Refusal.QUOTA), admitted("3a")),
        # whatever else is not held, in any order
        (
            admitted("1a"),
            advanced(1, 2, refusal=Refusal.QUOTA),
            closed("1a", None, Refusal.NOTHING_COMPLETED),
            admitted("2a"),
        ),
        (
            admitted("1a"),
            advanced(1, 2, refusal=Refusal.UNPROFITABLE),
            closed("1a", None, Refusal.QUOTA),
            admitted("2a"),
        ),
        (advanced(1, 2, refusal=Refusal.QUOTA), advanced(2, 3, refusal=Refusal.UNPROFITABLE), admitted("3a")),
        # what is held does not serve, and what might have served is not held
        (admitted("1a"), advanced(1, 2, refusal=Refusal.QUOTA), closed("1a", DISTANT), admitted("2a")),
        (
            admitted("1a"),
            advanced(1, 2, left=(replace(DISTANT, request=rid("1z")),)),
            admitted("2a"),
            closed("1a", None, Refusal.QUOTA),
        ),
    ],
)
def test_a_successor_of_what_no_quota_had_room_for_is_told_so(events):
    _, effects = play(fresh(), *events)
    assert [effect.refusal for effect in effects if isinstance(effect, StartCold)] == [Refusal.QUOTA]


def test_what_is_not_held_does_not_keep_the_rest_from_being_certified():
    state = state_after(admitted("1a"), admitted("1b"), advanced(1, 2), closed("1b", None, Refusal.QUOTA))
    _, effects = play(state, closed("1a", H1A), admitted("2a"))
    assert GRANTED in effects


def test_the_refusal_of_what_is_held_is_more_than_why_the_rest_is_not():
    state = state_after(admitted("1a"), advanced(1, 2, refusal=Refusal.UNPROFITABLE), closed("1a", H1A))
    _, effects = play(state, admitted("2a", tokens=(7, 7, 7)))
    assert effects[0] == StartCold(rid("2a"), Refusal.NO_COMMON_PREFIX)


def test_a_contract_that_inherits_nothing_is_named_before_the_quota():
    _, effects = play(fresh(), advanced(1, 2, refusal=Refusal.QUOTA), advanced(2, 3, NONE), admitted("3a"))
    assert StartCold(rid("3a"), Refusal.NOT_WANTED) in effects


# Copies to host memory

ASKED = OffloadPages(H1A, tid("t12"))


def offloads(effects) -> list[OffloadPages]:
    return [effect for effect in effects if isinstance(effect, OffloadPages)]


@pytest.mark.parametrize(
    ("contract", "held", "env", "is_copied"),
    [
        (HOST, H1A, WITH_HOST, True),
        (CERTIFIED, SOFT, WITH_HOST, True),
        (CERTIFIED, H1A, WITH_HOST, False),
        (HOST, H1A, ENV, False),
        (CERTIFIED, SOFT, ENV, False),
        (HOST, COPIED, WITH_HOST, False),
        (HOST, H1A, geometry(offloads=True, pays=lambda tokens, tier: tokens < 8 or tier is Tier.HBM), False),
        (HOST, H1A, geometry(offloads=True, pays=lambda tokens, _tier: tokens >= 8), True),
        (NONE, SOFT, WITH_HOST, False),
    ],
)
def test_copied_is_what_the_contract_wants_in_host_memory_or_no_pin_guarantees_where_that_pays(
    contract, held, env, is_copied
):
    for events in (
        (admitted("1a"), advanced(1, 2, contract), closed("1a", held)),
        (advanced(1, 2, contract, left=(held,)),),
    ):
        state, effects = play(fresh(), *events, env=env)
        assert offloads(effects) == ([OffloadPages(held, tid("t12"))] if is_copied else [])
        assert state.transition.copying == ({rid("1a")} if is_copied else set())


def test_nothing_is_copied_while_an_old_writer_is_open():
    """Invariant 5."""
    state, effects = play(
        fresh(), admitted("1a"), admitted("1b"), advanced(1, 2, HOST), closed("1a", H1A), env=WITH_HOST
    )
    assert not offloads(effects)
    _, effects = play(state, closed("1b", H1B), env=WITH_HOST)
    assert effects == (ReportStage(tid("t12"), Stage.FENCE), ASKED, OffloadPages(H1B, tid("t12")))


def test_nothing_is_copied_for_a_successor_that_is_here_already():
    state = state_after(admitted("1a"), advanced(1, 2, HOST), admitted("2a"), env=WITH_HOST)
    state, effects = play(state, closed("1a", H1A), env=WITH_HOST)
    assert not offloads(effects)
    assert GRANTED in effects
    assert not state.transition.copying


def test_an_answer_without_a_copy_leaves_the_holding_as_it_was():
    for place, state in COPYING.items():
        after, effects = play(state, not_offloaded("1a"), env=WITH_HOST)
        assert (after.place, after.holdings, effects) == (place, (H1A,), ())
        assert is_rejected(after, offloaded(H1A)), "each copy is answered once"


def test_a_copy_is_answered_once():
    for state in COPYING.values():
        after, _ = play(state, offloaded(H1A), env=WITH_HOST)
        assert after.holdings == (COPIED,)
        assert is_rejected(after, offloaded(H1A))
        assert is_rejected(after, not_offloaded("1a"))


def test_a_copy_under_way_is_handed_on_and_not_begun_again():
    state, effects = play(COPYING[ALIGN], advanced(2, 3, HOST), advanced(3, 4), env=WITH_HOST)
    assert not offloads(effects)
    assert state.transition.copying == {rid("1a")}
    state, effects = play(state, offloaded(H1A), env=WITH_HOST)
    assert (state.holdings, effects) == ((COPIED,), (ReturnBlocks(COPIED),))


def test_a_copy_of_e_that_ends_in_the_fence_of_e_plus_2_counts_for_e_plus_2():
    deeper = holding("2a", (*COMMON[:4], 60, 61), first_block=300)
    state, _ = play(COPYING[FENCE], offloaded(H1A), closed("2a", deeper), env=LOST)
    state, effects = play(state, admitted("3a"), env=LOST)
    assert (effects[0].certificate.source, effects[0].certificate.tier) == (rid("1a"), Tier.DRAM)
    assert released(effects) == (deeper,)


def test_a_copy_that_failed_is_tried_again_for_the_next_version():
    state, _ = play(COPYING[ALIGN], not_offloaded("1a"), env=WITH_HOST)
    _, effects = play(state, advanced(2, 3, HOST), env=WITH_HOST)
    assert offloads(effects) == [OffloadPages(H1A, tid("t23"))]


def test_a_copy_of_pins_that_lost_the_choice_is_late():
    state = state_after(
        admitted("1a"), admitted("1b"), advanced(1, 2, HOST), closed("1a", H1A), closed("1b", H1B), env=WITH_HOST
    )
    state, _ = play(state, admitted("2a"), env=WITH_HOST)
    assert state.transition.copying == {rid("1a")}
    assert is_rejected(state, offloaded(H1B))


@pytest.mark.parametrize(
    "event",
    [
        *LOST_PINS,
        ev.ScopeCancelled(),
        advanced(2, 3, NONE),
        ev.RequestFinished(rid("2a")),
        ADOPTED,
        FAILED,
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_copy_that_ends_after_its_pins_were_released_is_late(event):
    """What a rejected answer carried is still the caller's."""
    place = ALIGN if isinstance(event, ev.CertificatesRevoked) else RESUME
    state, effects = play(COPYING[place], event, env=LOST)
    assert released(effects) == (H1A,)
    for late in (offloaded(H1A), not_offloaded("1a")):
        assert is_rejected(state, late)


def test_device_blocks_that_are_being_installed_are_not_given_back():
    state, effects = play(COPYING[RESUME], offloaded(H1A), env=WITH_HOST)
    assert effects == ()
    _, effects = play(state, ADOPTED, env=WITH_HOST)
    assert effects[0] == ReleasePins((COPIED,)), "pins and copy go together"


def test_pages_in_host_memory_are_certified_when_the_device_has_lost_its_own():
    certificate = RESTORING.transition.certificate
    assert (certificate.tier, certificate.tokens) == (Tier.DRAM, 6)
    assert certificate.groups == (COPIED.host[0][:3],)
    state, effects = play(RESTORING, adopted(certificate), env=LOST)
    assert effects[0] == ReleasePins((COPIED,))
    assert effects[-1] == ReportClosed(tid("t12"), Outcome.INHERITED)
    assert state.place is IDLE


def test_a_page_that_was_not_restored_is_a_defect():
    with pytest.raises(InvariantViolation, match="invariant 4"):
        step(RESTORING, ev.CertificateAdopted(rid("2a"), ((500, None, 502),)), LOST)


@pytest.mark.parametrize("host", [(), ((),), (COPIED.host[0][:3],), (COPIED.host[0], ()), (COPIED.host[0] * 2,)])
def test_a_copy_that_is_not_shaped_like_its_source_is_a_defect(host):
    with pytest.raises(InvariantViolation, match="invariant 4"):
        step(COPYING[ALIGN], ev.PagesOffloaded(rid("1a"), host), WITH_HOST)


def test_a_copy_of_what_a_window_had_let_go_is_a_defect():
    slid = replace(H1A, groups=(refs((None, None, 102, 103)),))
    state = state_after(admitted("1a"), advanced(1, 2, HOST), closed("1a", slid), env=WITH_HOST)
    with pytest.raises(InvariantViolation, match="invariant 4"):
        step(state, offloaded(H1A), WITH_HOST)


def test_a_copy_may_lack_what_was_reused_before_it_was_read():
    state, effects = play(COPYING[ALIGN], ev.PagesOffloaded(rid("1a"), host_of(H1A.groups, lost=(102,))), env=WITH_HOST)
    assert isinstance(effects[0], ReturnBlocks)
    state, _ = play(state, admitted("2a"), env=LOST)
    assert (state.transition.certificate.tier, state.transition.certificate.tokens) == (Tier.DRAM, 4)


# Adoption that fails


def test_the_end_of_align_is_reported_once():
    for after in (FAILED, ev.AdoptionFailed(rid("2a"), Refusal.TRANSFER)):
        for lost in ((102,), (100,)):
            _, effects = play(AT[RESUME], after, env=geometry(generations=reused(*lost)))
            assert ReportStage(tid("t12"), ALIGN) not in effects


@pytest.mark.parametrize("reason", [Refusal.GENERATION, Refusal.CORRUPT, Refusal.TRANSFER])
def test_a_certificate_that_failed_is_not_installed_again(reason):
    """Else an engine that sees a loss where ALIGN sees none would be told the same for ever."""
    _, effects = play(AT[RESUME], ev.AdoptionFailed(rid("2a"), reason))
    assert effects[0] == StartCold(rid("2a"), reason)


def test_a_copy_that_could_not_be_restored_is_neither_tried_nor_made_again():
    """It is there until the release: host memory refuses to copy a source twice."""
    state, effects = play(
        RESTORING, ev.AdoptionFailed(rid("2a"), Refusal.CORRUPT), advanced(2, 3, HOST), closed("2a"), env=WITH_HOST
    )
    assert state.holdings == (SPENT,)
    assert not offloads(effects)
    _, effects = play(state, admitted("3a"), env=LOST)
    assert effects[0] == StartCold(rid("3a"), Refusal.GENERATION)


def test_soft_blocks_that_were_reused_shorten_the_certificate():
    env = geometry(generations=reused(102))
    state, effects = play(AT[RESUME], FAILED, env=env)
    shorter = certificate_of(H1A, successor("2a"), env)
    assert shorter.tokens == 4
    assert effects[0] == InstallCertificate(shorter)
    assert not released(effects)
    assert (state.place, state.holdings) == (RESUME, (H1A,))


def test_each_reuse_shortens_the_certificate_until_none_is_left():
    state, certified, cold = AT[RESUME], [], []
    for lost in ((102,), (101, 102), (100, 101, 102)):
        state, effects = play(state, FAILED, env=geometry(generations=reused(*lost)))
        certified += [e.certificate.tokens for e in effects if isinstance(e, InstallCertificate)]
        cold += [e.refusal for e in effects if isinstance(e, StartCold)]
    assert (certified, cold, state.place) == ([4, 2], [Refusal.GENERATION], IDLE)


def test_soft_blocks_that_were_reused_turn_to_the_copy():
    state, _ = play(COPYING[RESUME], offloaded(H1A), env=WITH_HOST)
    state, effects = play(state, FAILED, env=LOST)
    assert effects[0] == InstallCertificate(RESTORING.transition.certificate)


@pytest.mark.parametrize("reason", [Refusal.CORRUPT, Refusal.TRANSFER])
def test_a_restore_that_failed_turns_to_the_device(reason):
    env = geometry(generations=reused(101))
    failed = ev.AdoptionFailed(rid("2a"), reason)
    state, effects = play(RESTORING, failed, env=env)
    assert (effects[0].certificate.tier, effects[0].certificate.tokens) == (Tier.HBM, 2)
    assert not released(effects)
    assert state.place is RESUME


@pytest.mark.parametrize("reason", [Refusal.CORRUPT, Refusal.TRANSFER])
def test_a_restore_that_failed_starts_cold_under_its_name_when_the_device_has_nothing(reason):
    state, effects = play(RESTORING, ev.AdoptionFailed(rid("2a"), reason), env=LOST)
    assert effects[0] == StartCold(rid("2a"), reason)
    assert [held.request for held in released(effects)] == [rid("1a")]
    assert effects[-2:] == COLD_END
    assert state.place is IDLE


def test_an_exact_contract_stays_exact_after_a_failure():
    held = replace(H1A, grid_tokens=8)
    exact = geometry(exact_tokens=4)
    state = state_after(admitted("1a"), advanced(1, 2, EXACT), closed("1a", held), admitted("2a"), env=exact)
    assert state.transition.certificate.tokens == 4
    _, effects = play(state, FAILED, env=geometry(generations=reused(101), exact_tokens=4))
    assert effects[0] == StartCold(rid("2a"), Refusal.GENERATION), "two tokens are left, but off the grid"


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
    "4 exact beyond the grid": (AT[RESUME], {}, {"contract": EXACT}),
    "4 no copy to restore from": (RESTORING, {}, {"holdings": (H1A,)}),
    "4 a copy of another shape": (AT[ALIGN], {}, {"holdings": (replace(H1A, host=()),)}),
    "4 another prefix": (AT[RESUME], {}, {"successor": successor("2a", (1, 2, 9, 9, 9, 9, 9))}),
    "4 nothing left to compute": (AT[RESUME], {}, {"successor": successor("2a", COMMON)}),
    "4 fingerprint": (AT[RESUME], {}, {"successor": successor("2a", fingerprint="g")}),
    "6 owned twice": (AT[ALIGN], {}, {"holdings": (H1A, H1A)}),
    "6 copied and not held": (AT[ALIGN], {}, {"copying": frozenset({rid("1b")})}),
    "6 copied again": (AT[ALIGN], {}, {"holdings": (COPIED,), "copying": frozenset({rid("1a")})}),
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
