"""What a history shows: made by hand, drawn from a correct register, and compared with every order tried."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.histories.checker import Rule, check
from harness.histories.history import Answer, Call, Frame, History, Kind, Lost, Mark, Opening, Operation, Via, What
from harness.histories.register import steps_of
from harness.histories.search import Found, fewest, search
from tests.harness.register_model import PLACE, drawn_history, explained, made


def judged(*operations, marks=(), backlog_bytes=1000):
    return check(History(Opening(backlog_bytes=backlog_bytes), list(operations), list(marks)))


def rules(*operations, **more):
    return [finding.rule for finding in judged(*operations, **more).findings]


def right(*operations, **more):
    return rules(*operations, **more) == []


def contradiction(*operations, **more):
    """The one finding, of no order; its text."""
    (finding,) = judged(*operations, **more).findings
    assert finding.rule is Rule.ORDER, finding
    return str(finding)


JOINED = made(1, "join", 0, 10, epoch=1)
SECOND = made(2, "supersede", 20, 30, asked=1, epoch=2, old=1, new=2)


def refused(number, kind, called, returned, status, current=None, **more):
    return made(number, kind, called, returned, status=status, current=current, authority="unchanged", **more)


# -- the register ------------------------------------------------------------------------------------------------------


def test_a_scope_is_made_by_its_first_use_and_advanced_by_whoever_names_its_epoch_or_star():
    assert right(
        JOINED,
        SECOND,
        made(3, "supersede", 40, 50, star=True, epoch=3, old=2, new=3),
        made(4, "look", 60, 70, epoch=3),
        refused(5, "supersede", 80, 90, 409, 3, asked=2),
        refused(6, "supersede", 80, 90, 409, 3, asked=4),
        refused(7, "join", 80, 90, 410, 3, asked=1),
        refused(8, "join", 80, 90, 409, 3, asked=9),
        made(9, "join", 100, 110, asked=3, epoch=3),
    )


def test_a_supersede_of_the_first_epoch_may_come_before_anything_else():
    assert right(SECOND, made(3, "look", 40, 50, epoch=2))
    assert not right(made(1, "supersede", 0, 10, asked=2, epoch=3, new=3))
    assert not right(made(1, "supersede", 0, 10, star=True, epoch=2, new=2))


def test_unknown_scopes_are_unknown_until_somebody_uses_them():
    assert right(made(1, "look", 0, 5, status=404), replace(JOINED, call=replace(JOINED.call, at=4)))
    assert right(refused(1, "supersede", 0, 5, 404, star=True), refused(2, "join", 0, 5, 409, asked=4))
    assert "looks: 404" in contradiction(JOINED, made(2, "look", 20, 30, status=404))


def test_two_successes_from_one_epoch_are_a_lost_update():
    other = made(3, "supersede", 20, 30, asked=1, epoch=2, old=1, new=2)
    text = contradiction(JOINED, SECOND, other, made(4, "look", 40, 50, epoch=2))
    assert text.count("supersedes epoch 1: 200, now epoch 2") == 2
    assert "joins" not in text
    assert "looks" not in text
    star = made(3, "supersede", 20, 30, star=True, epoch=2, old=1, new=2)
    assert not right(JOINED, SECOND, star)


def test_an_epoch_that_falls_after_a_restart_is_told_with_the_two_who_saw_it():
    marks = [Mark(32, What.KILLED, "api"), Mark(38, What.SERVING, "api")]
    text = contradiction(JOINED, SECOND, made(3, "look", 40, 50, epoch=1), marks=marks)
    assert "#3 r looks: 200, epoch 1" in text
    assert "#2" in text
    assert "#1" not in text


def test_a_request_under_a_stale_epoch_may_not_be_taken_on():
    text = contradiction(JOINED, SECOND, made(3, "join", 40, 50, asked=1, epoch=1))
    assert "#3 r joins under epoch 1: 200, epoch 1" in text
    assert right(JOINED, SECOND, made(3, "join", 25, 50, asked=1, epoch=1)), "it was called before the other returned"


def test_a_stale_supersede_may_not_be_accepted():
    assert not right(JOINED, SECOND, made(3, "supersede", 40, 50, asked=1, epoch=3, old=2, new=3))


@pytest.mark.parametrize("current", [1, 3, 7])
def test_a_409_that_names_another_epoch_than_the_current_one_is_wrong(current):
    wrong = refused(3, "supersede", 40, 50, 409, current, asked=5)
    assert f"409, current is epoch {current}" in contradiction(JOINED, SECOND, wrong)
    assert right(JOINED, SECOND, refused(3, "supersede", 40, 50, 409, 2, asked=5))


def test_a_refusal_must_have_a_reason():
    assert not right(JOINED, SECOND, refused(3, "supersede", 40, 50, 409, 2, asked=2))
    assert not right(JOINED, SECOND, refused(3, "supersede", 40, 50, 409, 2, star=True))
    assert not right(JOINED, SECOND, refused(3, "join", 40, 50, 410, 2, asked=2))
    assert not right(JOINED, SECOND, refused(3, "join", 40, 50, 410, 2)), "nobody superseded it while it was waiting"
    assert right(JOINED, SECOND, refused(3, "join", 15, 50, 410, 2)), "it may have been taken on before the supersede"
    assert not right(JOINED, SECOND, refused(3, "supersede", 40, 50, 410, 2, asked=2)), "nobody cancelled it"


def test_a_cancelled_scope_is_dead_until_a_request_names_a_higher_epoch():
    cancelled = made(3, "cancel", 40, 50, epoch=2, cancelled=True)
    assert right(
        JOINED,
        SECOND,
        cancelled,
        refused(4, "join", 60, 70, 410, 2),
        refused(5, "join", 60, 70, 410, 2, asked=2),
        refused(6, "supersede", 60, 70, 410, 2, star=True),
        made(7, "cancel", 60, 70, epoch=2, cancelled=True),
        made(8, "join", 80, 90, asked=7, epoch=7),
        made(9, "supersede", 100, 110, asked=7, epoch=8, old=7, new=8),
    )
    assert "#4" in contradiction(JOINED, SECOND, cancelled, made(4, "join", 60, 70, epoch=2))
    assert not right(JOINED, SECOND, cancelled, made(4, "join", 60, 70, asked=2, epoch=2))
    assert not right(JOINED, SECOND, cancelled, made(4, "supersede", 60, 70, asked=2, epoch=3, old=2, new=3))
    assert not right(JOINED, SECOND, cancelled, made(4, "look", 60, 70, epoch=2))
    assert not right(JOINED, SECOND, made(3, "join", 60, 70, asked=7, epoch=7)), "it was not cancelled"


def test_a_supersede_whose_successor_was_refused_has_advanced_all_the_same():
    advanced = made(3, "supersede", 40, 50, asked=2, status=410, authority="advanced", epoch=3, current=4)
    overtaker = made(4, "supersede", 40, 50, asked=3, epoch=4, old=3, new=4)
    assert right(JOINED, SECOND, advanced, overtaker)
    assert not right(JOINED, SECOND, advanced), "nobody can have made epoch 4"
    assert not right(JOINED, SECOND, advanced, overtaker, made(5, "look", 60, 70, epoch=3))


def test_an_engine_that_is_gone_changes_nothing_and_names_the_current_epoch():
    assert right(JOINED, SECOND, made(3, "supersede", 40, 50, asked=2, status=503, authority="unchanged", epoch=2))
    assert not right(JOINED, SECOND, made(3, "supersede", 40, 50, asked=2, status=503, authority="unchanged", epoch=1))


# -- unknown outcomes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [2, 3])
def test_a_supersede_without_an_answer_may_have_happened_or_not(epoch):
    assert right(JOINED, SECOND, made(3, "supersede", 40, asked=2), made(4, "look", 50, 60, epoch=epoch))


def test_it_may_happen_long_afterwards():
    assert right(
        JOINED,
        SECOND,
        made(3, "supersede", 40, asked=2),
        made(4, "look", 50, 60, epoch=2),
        made(5, "look", 70, 80, epoch=3),
    )
    assert not right(JOINED, SECOND, made(3, "supersede", 60, asked=2), made(4, "look", 40, 50, epoch=3)), "not before"


def test_it_happens_once_and_to_the_epoch_that_it_names():
    lost = made(3, "supersede", 40, asked=2)
    assert not right(JOINED, SECOND, lost, made(4, "look", 50, 60, epoch=4))
    assert not right(JOINED, SECOND, made(3, "supersede", 40, asked=1), made(4, "look", 50, 60, epoch=3))
    assert right(JOINED, SECOND, made(3, "supersede", 40, star=True), made(4, "look", 50, 60, epoch=3))


def test_what_was_never_sent_never_happened():
    unsent = replace(made(3, "supersede", 40, asked=2), lost=Lost(3, 45, sent=False))
    assert not right(JOINED, SECOND, unsent, made(4, "look", 50, 60, epoch=3))
    assert judged(JOINED, unsent).unknown == 0


def test_a_cancellation_or_a_first_use_without_an_answer_may_have_happened():
    assert right(JOINED, made(2, "cancel", 20), made(3, "look", 30, 40, epoch=1, cancelled=True))
    assert right(JOINED, made(2, "cancel", 20), made(3, "join", 30, 40, asked=5), made(4, "look", 50, 60, epoch=5))
    assert right(made(1, "join", 0), made(2, "look", 10, 20, epoch=1))
    assert not right(made(2, "look", 10, 20, epoch=1))


def test_a_server_that_is_killed_over_a_cancellation_may_leave_the_epoch_higher():
    leaves = [JOINED, made(2, "cancel", 20), made(3, "look", 60, 70, epoch=2)]
    assert right(*leaves, marks=[Mark(30, What.KILLED, "api")])
    assert not right(*leaves)


def test_an_answer_that_does_not_say_whether_authority_moved_leaves_both_possible_while_it_was_under_way():
    vague = made(3, "supersede", 40, 50, asked=2, status=500)
    assert right(JOINED, SECOND, vague, made(4, "look", 60, 70, epoch=2))
    assert right(JOINED, SECOND, vague, made(4, "look", 60, 70, epoch=3))
    looks = [made(4, "look", 60, 70, epoch=2), made(5, "look", 80, 90, epoch=3)]
    assert not right(JOINED, SECOND, vague, *looks), "not after its answer"


# -- the loss of the host ----------------------------------------------------------------------------------------------

LOST = [Mark(35, What.HOST_LOST, "host")]


def test_only_the_loss_of_the_host_raises_an_epoch_and_it_never_lowers_one():
    raised = made(3, "look", 40, 50, epoch=1_048_578)
    assert right(JOINED, SECOND, raised, marks=LOST)
    assert not right(JOINED, SECOND, raised)
    assert not right(JOINED, SECOND, made(3, "look", 40, 50, epoch=1), marks=LOST)
    early = made(3, "look", 32, 34, epoch=1_048_578)
    assert not right(JOINED, SECOND, early, marks=LOST), "before it was lost"


def test_a_scope_that_was_forgotten_with_its_host_begins_above_all_it_had():
    forgotten = made(3, "look", 40, 50, status=404)
    assert right(JOINED, SECOND, forgotten, made(4, "join", 60, 70, epoch=1_048_577), marks=LOST)
    assert not right(JOINED, SECOND, forgotten, made(4, "join", 60, 70, epoch=2), marks=LOST)
    assert not right(JOINED, SECOND, forgotten)


# -- keys --------------------------------------------------------------------------------------------------------------


def keyed(number, called, returned=None, *, new=None, asked=1, transition="t2", **more):
    answer = {} if new is None else {"epoch": new, "old": new - 1, "new": new, "transition": transition}
    return made(number, "supersede", called, returned, asked=asked, key="k", **answer, **more)


def test_equal_keys_are_one_transition():
    again = [keyed(2, 20, 30, new=2), keyed(3, 21, 35, new=2), keyed(4, 60, 70, new=2)]
    assert right(JOINED, *again, made(5, "supersede", 40, 50, asked=2, epoch=3, old=2, new=3))


def test_equal_keys_with_different_answers_are_told():
    assert Rule.KEYS in rules(JOINED, keyed(2, 20, 30, new=2), keyed(3, 40, 50, new=2, transition="t9"))
    star = [made(n, "supersede", 20 * n, 20 * n + 10, star=True, key="k", epoch=n, new=n) for n in (2, 3)]
    assert rules(JOINED, *star) == [Rule.KEYS]


def test_a_key_whose_supersede_was_accepted_is_refused_no_more():
    late = refused(3, "supersede", 60, 70, 409, 3, asked=1, key="k")
    other = made(4, "supersede", 40, 50, asked=2, epoch=3, old=2, new=3)
    assert "409" in contradiction(JOINED, keyed(2, 20, 30, new=2), other, late)
    early = refused(3, "supersede", 12, 15, 409, 1, asked=2, key="k")
    accepted = keyed(5, 60, 70, new=3, asked=2)
    assert right(JOINED, early, SECOND, accepted), "it was ahead of its time"


def test_a_key_that_was_lost_and_asked_again_happened_once():
    lost, again = keyed(2, 20), keyed(4, 60, 70, new=2)
    looked = made(3, "look", 40, 50, epoch=2)
    assert right(JOINED, lost, looked, again), "the first one may have done it"
    star = {"star": True, "key": "k"}
    twice = made(4, "supersede", 60, 70, **star, epoch=3, old=2, new=3)
    assert not right(JOINED, made(2, "supersede", 20, **star), looked, twice), "the first and the second cannot both"


# -- frames ------------------------------------------------------------------------------------------------------------


def streamed(number, called, answered, frames, *, via=Via.RAW, epoch=1, runtime="r", holds_bytes=100, **more):
    """A join whose frames were asked for and read at these times, 100 bytes and 1 character each."""
    call = Call(number, called, runtime, *PLACE, Kind.JOIN, via=via)
    told = None if via is Via.CLIENT else epoch
    answer = Answer(number, answered, 200, epoch=told, holds_bytes=holds_bytes)
    read = [Frame(number, asked_at, at, epoch, 100, 1, **more) for asked_at, at in frames]
    return Operation(call, answer, frames=read)


def superseding(number, called, answered, **more):
    call = Call(number, called, "r", *PLACE, Kind.SUPERSEDE, 1, via=Via.CLIENT)
    return Operation(call, Answer(number, answered, 200, old=1, new=2, **more))


def test_nothing_old_is_handed_out_to_who_asks_after_the_supersede_has_returned():
    def old(*frames):
        return streamed(1, 0, 10, [(11, 12), *frames], via=Via.CLIENT)

    assert rules(old((15, 16), (31, 32)), superseding(2, 20, 30)) == [Rule.CLIENT]
    assert judged(old((31, 32), (33, 34)), superseding(2, 20, 30)).summary()["revoked_frames_client"] == 2
    assert right(old((15, 32)), superseding(2, 20, 30)), "it may have been handed out before"
    elsewhere = superseding(2, 20, 30)
    elsewhere.call = replace(elsewhere.call, runtime="another")
    assert right(old((31, 32)), elsewhere), "its own runtime had not heard"


def test_a_refusal_that_names_a_newer_epoch_is_heard_as_well_and_no_answer_counts_as_one():
    old = streamed(1, 0, 10, [(11, 12), (51, 52)], via=Via.CLIENT)
    winner = made(2, "supersede", 20, 30, runtime="another", asked=1, epoch=2, old=1, new=2)
    call = Call(3, 40, "r", *PLACE, Kind.SUPERSEDE, 1, via=Via.CLIENT)
    conflict = Operation(call, Answer(3, 50, 409, authority="unchanged", current=2))
    assert rules(old, winner, conflict) == [Rule.CLIENT]
    assert rules(old, winner, Operation(call, lost=Lost(3, 50, over=1))) == [Rule.CLIENT]
    assert right(old, winner)


def test_a_raw_stream_may_still_bring_what_was_on_its_way_and_no_more():
    def old(count):
        return streamed(1, 0, 10, [(11, 12), *[(100 + n, 100 + n) for n in range(count)]])

    assert right(old(12), SECOND), "1000 stated, 100 at the reader's, one frame"
    judgement = judged(old(15), SECOND)
    assert [finding.rule for finding in judgement.findings] == [Rule.RAW]
    assert judgement.summary()["revoked_frames_raw_over_bound"] == 3
    assert right(old(15)), "nobody has superseded it"


@pytest.mark.parametrize(
    "witness",
    [
        made(2, "look", 80, 90, epoch=2),
        streamed(2, 80, 90, [(95, 96)], epoch=2),
        refused(2, "join", 80, 90, 410, 2, asked=1),
        made(2, "look", 80, 90, epoch=1, cancelled=True),
    ],
    ids=["a look", "a newer frame", "a refusal", "a tombstone"],
)
def test_whatever_shows_that_an_epoch_is_over_counts_from_when_it_was_read(witness):
    old = streamed(1, 0, 10, [(11, 12), *[(100 + n, 100 + n) for n in range(15)]])
    cause = made(
        3,
        "cancel" if witness.answer.cancelled else "supersede",
        20,
        **({"asked": 1} if not witness.answer.cancelled else {}),
    )
    assert rules(old, cause, witness) == [Rule.RAW]


def test_nothing_comes_after_the_last_word_and_what_came_is_what_it_states():
    def ended(told_chars, *after):
        old = streamed(1, 0, 10, [(11, 12), (13, 14)])
        last = Frame(1, 21, 22, 1, 150, 0, ends="superseded", by=2, told_chars=told_chars)
        return replace(old, frames=[*old.frames, last, *after])

    assert right(ended(2), SECOND)
    assert rules(ended(1), SECOND) == [Rule.STATED]
    assert rules(ended(2, Frame(1, 23, 24, 1, 100, 1)), SECOND) == [Rule.END]


def test_every_frame_names_the_epoch_of_its_response():
    other = streamed(1, 0, 10, [(11, 12), (13, 14)])
    other.frames[1] = replace(other.frames[1], epoch=2)
    assert Rule.TAG in rules(other, SECOND)


def test_no_more_comes_of_a_version_than_its_transition_states():
    old = streamed(1, 0, 10, [(11, 12), (13, 14), (15, 16)])

    def record(*published, **more):
        return made(3, "record", 40, 50, old=1, new=2, published=published, **more)

    assert right(old, SECOND, record((1, 2), (1, 1)))
    assert rules(old, SECOND, record((1, 2), (2, 9))) == [Rule.STATED]
    killed = [Mark(5, What.KILLED, "api")]
    assert right(old, SECOND, record((1, 2)), marks=killed), "the record is of another life"


# -- drawn histories ---------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 12), st.sampled_from([0, 0.1, 0.4]))
def test_a_correct_register_is_always_found_right(seed, count, width, lost_share):
    operations = drawn_history(random.Random(seed), count, width, lost_share)
    verdict = judged(*operations)
    assert verdict.findings == [], str(verdict.findings[0])
    assert verdict.unknown == sum(one.answer is None for one in operations)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(["falls", "lost update", "from nowhere"]))
def test_what_breaks_a_correct_history_is_found_and_told_in_few_operations(seed, how):
    rng = random.Random(seed)
    operations = drawn_history(rng, 30, 6, 0.1)
    end = max(one.answer.at for one in operations if one.answer) + 10
    accepted = [one for one in operations if one.call.kind is Kind.SUPERSEDE and one.answer and one.answer.new]
    top = max([one.answer.epoch or 0 for one in operations if one.answer], default=0)
    if how == "from nowhere":
        wrong = made(99, "look", end, end + 1, epoch=top + 50)
    elif how == "falls" and top > 1:
        wrong = made(99, "join", end, end + 1, epoch=top - 1)
    elif accepted:
        wrong = made(99, "supersede", end, end + 1, star=True, old=top - 1, new=top, epoch=top)
    else:
        return
    text = contradiction(*operations, wrong)
    assert "#99" in text
    assert text.count(" ms  #") <= (1 if how == "from nowhere" else 2)


def guessed(rng, count):
    """A small history whose answers are drawn too: often wrong, sometimes right."""
    operations = []
    for number in range(1, count + 1):
        called = rng.randrange(12)
        kind = rng.choice(["join", "join", "supersede", "supersede", "supersede", "look", "cancel"])
        asked = rng.choice([None, 1, 1, 2, 3]) if kind in ("join", "supersede") else None
        star = kind == "supersede" and asked is None
        key = rng.choice([None, None, "k"]) if kind == "supersede" else None
        if key:
            asked, star = 1, False
        returned = None if rng.random() < 0.25 else called + rng.randrange(1, 8)
        epoch = rng.choice([1, 1, 2, 2, 3])
        accepted = {"epoch": epoch, "old": epoch - 1, "new": epoch}
        answers = {
            "join": [
                {"epoch": epoch},
                {"epoch": epoch},
                {"status": 410, "current": epoch},
                {"status": 409, "current": epoch},
            ],
            "supersede": [accepted, accepted, {"status": 409, "current": epoch}, {"status": 410, "current": epoch}],
            "look": [{"epoch": epoch}, {"epoch": epoch, "cancelled": True}, {"status": 404}],
            "cancel": [{"epoch": epoch, "cancelled": True}, {"status": 404}],
        }
        told = rng.choice(answers[kind])
        if told.get("status") in (409, 410):
            told = {**told, "authority": "unchanged"}
        operations.append(made(number, kind, called, returned, asked=asked, star=star, key=key, **told))
    return operations


@settings(max_examples=400)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_on_small_histories_it_agrees_with_trying_every_order(seed, count):
    operations = guessed(random.Random(seed), count)
    found = search(steps_of(operations)).found
    assert (found is Found.ORDER) == explained(operations), operations


def test_trying_every_order_says_yes_and_no_often_enough_to_mean_something():
    verdicts = [explained(guessed(random.Random(seed), 3)) for seed in range(300)]
    assert 30 < sum(verdicts) < 270


# -- size --------------------------------------------------------------------------------------------------------------


def test_hundreds_of_concurrent_operations_with_unknown_outcomes_are_few_configurations():
    """All called at once, none returned before the last was called; every fourth answer is lost."""
    rng = random.Random(7)
    operations = []
    for epoch in range(1, 101):
        lost = epoch % 4 == 0
        new = {} if lost else {"epoch": epoch + 1, "old": epoch, "new": epoch + 1}
        star = rng.random() < 0.5
        asked = None if star else epoch
        returned = None if lost else 2000 + rng.randrange(100)
        operations += [
            made(3 * epoch, "supersede", rng.randrange(1000), returned, asked=asked, star=star, **new),
            made(3 * epoch + 1, "look", rng.randrange(1000), 2000 + rng.randrange(100), epoch=epoch),
            refused(3 * epoch + 2, "supersede", rng.randrange(1000), 2050, 409, epoch, asked=epoch + 60),
        ]
    operations.append(made(1, "join", 0, 2000, epoch=1))
    verdict = judged(*operations)
    assert verdict.findings == []
    assert verdict.configurations < 1000
    wrong = made(999, "look", 3000, 3001, epoch=100)
    assert "#999" in contradiction(*operations, wrong, made(998, "look", 2200, 2300, epoch=101))


def test_a_search_that_would_take_too_long_says_so():
    operations = drawn_history(random.Random(3), 40, 8, 0.5)
    verdict = check(History(Opening(), operations), most=1)
    assert [finding.rule for finding in verdict.findings] == [Rule.UNDECIDED]
    assert not verdict.summary()["linearizable"]


def test_of_what_contradicts_no_part_can_be_left_out():
    kept = fewest(range(50), lambda doubted: not {3, 17, 40} & doubted)
    assert kept == [3, 17, 40]
