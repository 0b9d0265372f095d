"""Who counts as what, with replies made up."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.arrivals import Planned
from harness.client import Frame, Reply
from harness.outcomes import (
    NEVER,
    Account,
    Outcome,
    Version,
    fates,
    fence_intervals,
    let_go,
    live,
    tokens,
    unpublished_tokens,
)


def said(at, count=1):
    return Frame(at, None, "x" * count, {"choices": [{"token_ids": list(range(count))}]})


def version(number, sent_at, at, done_at, *, gave_up_at=None, accepted_at=None, answer=4, status=200, **more):
    """`at`: when each token came."""
    frames = [said(when) for when in at]
    told = {"authority": more.pop("authority", None), "epoch": more.pop("epoch", None)}
    headers = {f"x-retire-{name}": str(value) for name, value in told.items() if value is not None}
    reply = Reply(sent_at=sent_at, status=status, headers=headers, frames=frames, done_at=done_at)
    planned = Planned(1, number, sent_at, None if number == 1 else sent_at, 10, 0, answer)
    return Version(planned, reply, gave_up_at, accepted_at, **more)


def replaced(*, accepted_at=2.5, done_at=2.6, **more):
    """One version that speaks until it is over, and the next, sent at 2."""
    return [
        version(1, 0.0, [1.0, 2.0, 2.2, 2.55], done_at, answer=9, **more),
        version(2, 2.0, [3.0, 3.1, 3.2, 3.3], 3.4, gave_up_at=2.0, accepted_at=accepted_at),
    ]


def test_a_token_is_current_then_late_then_obsolete():
    old, new = fates(replaced())
    assert [[frame.at for frame in kind] for kind in (old.current, old.late, old.obsolete)] == [
        [1.0, 2.0],
        [2.2],
        [2.55],
    ]
    assert (old.outcome, new.outcome) == (Outcome.SUPERSEDED, Outcome.FINISHED)
    assert len(new.current) == 4
    assert new.given_up_at is None


@pytest.mark.parametrize("status", [409, 410, 503, 0])
def test_a_successor_that_was_refused_revokes_nothing(status):
    versions = [
        version(1, 0.0, [1, 2, 3, 4], 4.5),
        version(2, 2.0, [], 2.1, gave_up_at=2.0, status=status),
    ]
    old, refused = fates(versions)
    assert len(old.current) == 4
    assert old.obsolete == []
    assert refused.outcome is Outcome.FAILED


def test_the_next_one_that_was_accepted_revokes_both():
    versions = [
        version(1, 0.0, [1, 2, 3, 4], 4.5, answer=9),
        version(2, 2.0, [], 2.1, gave_up_at=2.0, status=409),
        version(3, 3.0, [3.5], 3.6, gave_up_at=3.0, accepted_at=3.2, answer=1),
    ]
    old, refused, new = fates(versions)
    assert [len(kind) for kind in (old.current, old.late, old.obsolete)] == [3, 0, 1]
    assert [one.outcome for one in (old, refused, new)] == [Outcome.SUPERSEDED, Outcome.FAILED, Outcome.FINISHED]


def test_one_that_was_superseded_before_it_could_answer_has_still_revoked_its_predecessor():
    early = version(2, 2.0, [], 2.3, gave_up_at=2.0, accepted_at=2.3, status=410, authority="advanced")
    versions = [
        version(1, 0.0, [1, 2.5], 2.6, answer=9),
        early,
        version(3, 2.2, [3], 4, gave_up_at=2.2, accepted_at=2.4),
    ]
    old, middle, last = fates(versions)
    assert early.accepted
    assert [one.outcome for one in (old, middle, last)] == [Outcome.SUPERSEDED, Outcome.SUPERSEDED, Outcome.FAILED]
    assert [frame.at for frame in old.obsolete] == [2.5]


def test_an_answer_that_was_over_before_leaves_nothing_to_clean_up():
    old, _ = fates([version(1, 0.0, [1, 1, 1, 1], 1.5), version(2, 2.0, [3] * 4, 4, gave_up_at=2.0, accepted_at=2.1)])
    assert old.outcome is Outcome.FINISHED
    assert old.cleanup_ms is None


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        ({"at": [1, 2], "done_at": 2}, Outcome.FAILED),  # cut short
        ({"at": [], "done_at": 1, "status": 0}, Outcome.FAILED),  # the client failed
        ({"at": [1, 2, 3, 4], "done_at": 4}, Outcome.FINISHED),
        ({"at": [1], "done_at": 0.0}, Outcome.FAILED),  # nobody waited for it
    ],
)
def test_nobody_gave_it_up(reply, outcome):
    (only,) = fates([version(1, 0.0, **reply)])
    assert only.outcome is outcome


def test_live_executions_are_current_until_given_up_and_obsolete_until_let_go():
    versions = replaced(let_go_at=5.0)
    assert live(fates(versions), origin=-1.0) == [(1.0, 1, 0), (3.0, 1, 1), (4.4, 0, 1), (6.0, 0, 0)]
    assert fates(versions)[0].cleanup_ms == pytest.approx(3000)


def test_what_was_never_let_go_stays_and_its_cleanup_has_no_end():
    versions = replaced(done_at=0.0)
    assert live(fates(versions), 0.0)[-1] == (3.4, 0, 1)
    assert fates(versions)[0].cleanup_ms == NEVER


def test_a_refused_version_was_never_live():
    versions = [version(1, 0.0, [1] * 4, 1.5), version(2, 2.0, [], 2.1, gave_up_at=2.0, status=409)]
    assert live(fates(versions), 0.0) == [(0.0, 1, 0), (1.5, 0, 0)]


def account(versions, window_s=10.0, finals=((1, 1), (1, 2)), records=()):
    return Account(fates(versions), 0.0, window_s, finals, records)


def test_goodput_is_current_tokens_within_the_window_and_obsolete_ones_count_always():
    found = account(replaced(), window_s=3.05)
    assert found.current_tokens() == 3
    assert found.goodput() == pytest.approx(3 / 3.05)
    assert (found.obsolete_tokens(), found.late_tokens()) == (1, 1)
    assert found.outcomes() == {"finished": 1, "superseded": 1, "failed": 0}


def test_a_final_version_counts_when_it_spoke_while_it_was_current():
    found = account(replaced())
    assert (found.spoke(), found.whole(), found.most_obsolete()) == (2, 1, 1)
    assert found.first_token_ms() == [1000.0, 1000.0]
    silent = account([version(1, 0.0, [2.2], 2.4, answer=9), *replaced()[1:]])
    assert (silent.spoke(), silent.whole()) == (1, 1)
    assert account([], finals=()).spoke() == 0


def test_a_frame_without_token_ids_counts_by_its_text():
    assert tokens([Frame(0, None, "x", {}), Frame(0, None, "", {"usage": {}}), said(0, 3)]) == 4


def receipt(closed_ms, interval_ms, safe_points=30):
    return {"obsolete_closed_ms": closed_ms, "longest_interval_ms": interval_ms, "safe_points": safe_points}


def test_intervals_are_of_the_step_that_was_stopped_and_short_steps_have_none():
    assert fence_intervals({"receipts": [receipt(10, 20), receipt(30, 20), receipt(90, 0.0, 0)]}) == 1.5
    assert fence_intervals({"receipts": [receipt(9, 0.0, 0)]}) is None
    assert fence_intervals({"receipts": []}) is None
    found = account([], records=[{"receipts": [receipt(10, 20)]}, {"receipts": []}])
    assert found.cleanup_intervals() == [0.5]


def test_an_overtaken_transition_is_over_with_the_fence_that_waited_for_it():
    versions = [
        version(1, 0.0, [1], 2.01, answer=9),
        version(2, 2.0, [], 2.11, gave_up_at=2.0, accepted_at=2.03, answer=9, transition="/a"),
        version(3, 2.1, [], 2.4, gave_up_at=2.1, accepted_at=2.15, answer=9, transition="/b"),
        version(4, 2.3, [], 0.0, gave_up_at=2.3, accepted_at=2.3, transition="/c"),
    ]
    records = {
        "/a": {"advance_ms": 1.0, "stages": {"advance": 0.0}},
        "/b": {"advance_ms": 1.0, "stages": {"fence": 20.0}},
        "/c": {"advance_ms": None, "stages": {"fence": 5.0}},
    }
    let_go(versions, records)
    assert [one.let_go_at for one in versions[:3]] == [pytest.approx(2.17), pytest.approx(2.17), 2.4]
    assert versions[3].let_go_at is None
    let_go(versions[:1], {})


def test_cleanup_is_no_shorter_than_it_was_whatever_the_way_to_the_gate_took():
    """ADVANCE was somewhere between giving up and reading the acceptance: the bound holds for the latest moment."""
    versions = replaced(done_at=2.1, accepted_at=2.5)
    versions[1].transition = "/a"
    let_go(versions, {"/a": {"advance_ms": 0.1, "stages": {"advance": 0.0, "fence": 30.0}}})
    assert fates(versions)[0].cleanup_ms == pytest.approx(530)


def published(epoch, count):
    return {"epoch": epoch, "choices": [{"index": 0, "tokens": count}]}


def test_what_came_of_a_superseded_version_is_at_most_what_its_successors_record_states():
    versions = [
        version(1, 0.0, [1, 2, 2.1], 2.2, epoch=4, answer=9),
        version(2, 2.0, [], 2.1, gave_up_at=2.0, status=409),
        version(3, 2.1, [2.3, 2.4], 2.5, gave_up_at=2.1, accepted_at=2.2, epoch=5, answer=9, transition="/a"),
        version(4, 2.4, [3] * 4, 4, gave_up_at=2.4, accepted_at=2.6, epoch=6, transition="/b"),
    ]

    def beyond(**stated):
        return unpublished_tokens(versions, {f"/{name}": {"published": told} for name, told in stated.items()})

    assert beyond(a=[published(4, 3)], b=[published(5, 2)]) == 0
    assert beyond(a=[published(4, 9)], b=[published(4, 9), published(5, 2)]) == 0
    assert beyond(a=[published(4, 2)], b=[published(5, 0)]) == 3
    assert beyond(a=[published(5, 3)], b=[]) == 5, "what another epoch has published is no excuse"
    assert beyond() == 0, "that a record is missing is for another check"


@st.composite
def scopes(draw):
    """Versions of one scope in which anything may have happened."""
    at, versions = 0.0, []
    times = st.floats(0.0, 5.0)
    for number in range(1, draw(st.integers(1, 6)) + 1):
        at += draw(times)
        status = draw(st.sampled_from([200, 200, 200, 409, 410, 0]))
        heard = sorted(at + draw(times) for _ in range(draw(st.integers(0, 5)))) if status == 200 else []
        over = draw(st.booleans())
        versions.append(
            version(
                number,
                at,
                heard,
                max([at, *heard]) + draw(times) if over else 0.0,
                gave_up_at=None if number == 1 else at,
                accepted_at=at + draw(times) if number > 1 and status == 200 else None,
                status=status,
                let_go_at=draw(st.none() | st.floats(0, 40)),
            )
        )
    return versions


@given(scopes())
def test_every_token_is_counted_once_and_nobody_is_live_less_than_not_at_all(versions):
    found = fates(versions)
    for fate in found:
        parts = tokens(fate.current) + tokens(fate.late) + tokens(fate.obsolete)
        assert parts == tokens(fate.version.reply.frames)
        assert fate.cleanup_ms is None or fate.cleanup_ms >= 0
    changes = live(found, 0.0)
    assert all(current >= 0 and obsolete >= 0 for _, current, obsolete in changes)
    assert all(earlier[0] < later[0] for earlier, later in pairwise(changes))
    if all(fate.version.reply.done_at for fate in found):
        assert not changes or changes[-1][1] == 0
