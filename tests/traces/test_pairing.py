"""An aborted turn and the next one of its thread, within an hour: each is found once."""

from __future__ import annotations

import json
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces.records import (
    TOOL_MARKER,
    aborted,
    answered,
    claude,
    counted,
    event,
    line,
    meta,
    name,
    read,
    said,
    started,
    stopped,
    told,
    write,
)


@pytest.fixture
def log(tmp_path):
    """Write a log of these records, and say what is in it."""

    def read_them(*records):
        return read(write(tmp_path / "log.jsonl", *records))

    return read_them


# ---------------------------------------------------------------- which turn is the next one


def test_an_abort_that_nothing_follows_is_no_transition(log):
    found = log(meta(0), started(1, "a"), aborted(5, "a"))
    assert found.rows == []
    assert found.counts["aborts"] == 1


@pytest.mark.parametrize(("gap_s", "counts"), [(3599.999, 1), (3600.0, 1), (3600.001, 0)])
def test_an_hour_is_the_limit(log, gap_s, counts):
    found = log(meta(0), started(1, "a"), aborted(5, "a"), started(5 + gap_s, "b"))
    assert len(found.rows) == counts
    assert found.counts["next turn after an hour"] == 1 - counts


def test_what_follows_after_an_hour_uses_the_abort_up(log):
    later = [started(5 + 3700, "b"), started(5 + 3710, "c")]
    assert log(meta(0), started(1, "a"), aborted(5, "a"), *later).rows == []


def test_turns_that_end_by_themselves_are_no_transitions(log):
    done = event(5, "task_complete", turn_id=name("a"))
    assert (
        log(meta(0), started(1, "a"), done, started(9, "b"), aborted(11, "b"), started(12, "c")).counts["aborts"] == 1
    )


def test_two_markers_without_a_turn_between_them_are_one_abort(log):
    found = log(said(0, "a"), stopped(5, "b", text=TOOL_MARKER), stopped(5.2, "c"), said(9, "d"))
    assert told(found.rows) == [(1, 5.0, 4.0)]
    assert found.counts["second markers of an abort"] == 1


def test_a_run_that_nobody_is_seen_to_start_is_aborted_by_itself(log):
    assert told(log(said(0, "a"), stopped(5, "b"), stopped(100, "d"), said(131, "e")).rows) == [(1, 100.0, 31.0)]
    found = log(said(0, "a"), stopped(5, "b"), answered(20, "c"), stopped(25, "d"), said(31, "e"))
    assert told(found.rows) == [(1, 25.0, 6.0)]


def test_a_turn_that_is_aborted_again_and_again_counts_every_time(log):
    turns = [record for n in range(5) for record in (started(10 * n, f"t{n}"), aborted(10 * n + 4, f"t{n}"))]
    assert len(log(meta(0), *turns, started(60, "last")).rows) == 5


def test_an_abort_before_any_start_counts_and_nobody_knows_how_long_it_ran(log):
    (row,) = log(meta(0), aborted(5, "a"), started(8, "b")).rows
    assert (row.aborted_turn_s, row.aborted_turn_calls) == (None, None)
    (row,) = log(meta(0), aborted(5, "a", duration_ms=2500), started(8, "b")).rows
    assert row.aborted_turn_s == 2.5


def test_calls_that_are_counted_after_the_abort_are_the_old_turns(log):
    (row,) = log(meta(0), started(1, "a"), aborted(5, "a"), counted(5.1, 700), started(9, "b"), counted(12, 800)).rows
    assert (row.aborted_turn_calls, row.prompt_tokens_before, row.prompt_tokens_after) == (1, 700, 800)


# ---------------------------------------------------------------- clocks and gaps in what is known


def test_a_clock_that_was_set_back_is_flagged_and_the_gap_is_not_made_up(log):
    (row,) = log(meta(0), started(1, "a"), aborted(50, "a"), started(30, "b"), counted(31, 5)).rows
    assert (row.clock_back, row.gap_s, row.auto_submit) == (True, 0.0, False)
    assert row.t_start_s == row.t_abort_s
    assert row.first_record_after_start_s is None


def test_a_clock_that_was_set_back_by_more_than_an_hour_tells_nothing(log):
    assert log(meta(0), started(1, "a"), aborted(9000, "a"), started(30, "b")).rows == []


def test_a_next_turn_without_a_time_is_the_next_turn(log):
    timeless = started(9, "b") | {"timestamp": None}
    found = log(meta(0), started(1, "a"), aborted(5, "a"), timeless, started(12, "c"))
    assert found.rows == [], "c is not the next one"
    assert found.counts["next turn without a time"] == 1


def test_codex_says_in_the_event_what_the_line_lacks(log):
    records = [started(1, "a"), aborted(5, "a", completed_at=1767247205), started(9, "b", started_at=1767247209)]
    found = log(meta(0), *(record | {"timestamp": "yesterday"} for record in records))
    assert [row.gap_s for row in found.rows] == [4.0]


def test_missing_fields_leave_fields_unknown(log):
    bare = [
        {"timestamp": "2026-01-01T06:00:05Z", "type": "event_msg", "payload": {"type": "turn_aborted"}},
        {"timestamp": "2026-01-01T06:00:06Z", "type": "event_msg", "payload": {"type": "task_started"}},
        {"timestamp": "2026-01-01T06:00:07Z", "type": "event_msg", "payload": {"type": "token_count", "info": None}},
        {"timestamp": "2026-01-01T06:00:07Z", "type": "event_msg", "payload": {"type": "token_count"}},
        {"timestamp": "2026-01-01T06:00:08Z", "type": "event_msg"},
        {"timestamp": "2026-01-01T06:00:08Z", "type": "event_msg", "payload": {}},
    ]
    (row,) = log(*bare).rows
    assert row.gap_s == 1.0
    assert (row.prompt_tokens_before, row.prompt_tokens_after, row.common_prefix_lb) == (None, None, None)


def test_a_reason_that_nobody_knows_is_other(log):
    odd = aborted(5, "a")
    odd["payload"]["reason"] = "the moon"
    (row,) = log(meta(0), odd, started(6, "b")).rows
    assert row.reason == "other"


@pytest.mark.parametrize("value", [-1, 10**12, 1.5, True, "45000", None, [1], {}])
def test_a_count_that_is_none_is_unknown(log, value):
    (row,) = log(meta(0), aborted(5, "a"), started(6, "b"), counted(7, value)).rows
    assert row.prompt_tokens_after is None


# ---------------------------------------------------------------- threads


def test_threads_that_are_mixed_in_one_file_are_told_apart(log):
    found = log(
        said(0, "a1", session="A"),
        said(1, "b1", session="B"),
        stopped(4, "a2", session="A"),
        said(5, "b2", session="B"),
        stopped(6, "b3", session="B"),
        said(9, "a3", session="A"),
        said(20, "b4", session="B"),
    )
    assert told(found.rows) == [(1, 4.0, 5.0), (2, 6.0, 14.0)]


def test_rollouts_that_somebody_has_joined_are_told_apart(log):
    first = [meta(0, "T1"), started(1, "a"), aborted(5, "a")]
    second = [meta(10, "T2"), started(11, "b"), aborted(15, "b"), started(18, "c")]
    assert told(log(*first, *second).rows) == [(1, 14.0, 3.0)], "T2's first turn does not answer T1's abort"


def test_a_subagents_records_are_part_of_the_turn_that_runs_it(log):
    side = {"isSidechain": True}
    found = log(
        said(0, "a"),
        stopped(4, "b", **side),
        said(5, "c", **side),
        stopped(6, "d"),
        said(9, "e", **side),
        said(12, "f"),
    )
    assert told(found.rows) == [(1, 6.0, 6.0)]
    assert found.counts["turns"] == 2


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "tool_result", "tool_use_id": "x", "content": "y"}],
        "<local-command-stdout>y</local-command-stdout>",
        "<bash-input>y</bash-input>",
        "<task-notification>y</task-notification>",
        [{"type": "text", "text": "<bash-stdout>y</bash-stdout>"}],
        [],
        "",
    ],
)
def test_what_is_no_turn_of_a_user_does_not_start_one(log, content):
    found = log(said(0, "a"), stopped(5, "b"), said(7, "c", content), said(9, "d"))
    assert told(found.rows) == [(1, 5.0, 4.0)]


@pytest.mark.parametrize("flag", ["isMeta", "isCompactSummary"])
def test_what_the_client_says_for_the_user_does_not_start_a_turn(log, flag):
    assert told(log(said(0, "a"), stopped(5, "b"), said(7, "c", **{flag: True}), said(9, "d")).rows) == [(1, 5.0, 4.0)]


def test_a_command_is_a_turn_if_the_model_is_asked(log):
    command = said(7, "c", "<command-name>/x</command-name>")
    output = said(7.1, "d", "<local-command-stdout></local-command-stdout>")
    before = [said(0, "a"), stopped(5, "b")]
    assert told(log(*before, command, answered(8, "e"), said(9, "f")).rows) == [(1, 5.0, 2.0)]
    assert told(log(*before, command, output, said(9, "f")).rows) == [(1, 5.0, 4.0)]
    assert told(log(*before, command).rows) == [(1, 5.0, 2.0)], "nothing says that the client answered it"
    assert told(log(*before, command, stopped(8, "e"), said(9, "f")).rows) == [(1, 5.0, 2.0), (1, 8.0, 1.0)]


def test_a_picture_is_a_turn(log):
    picture = [{"type": "image", "source": {"type": "base64", "data": "AAAA"}}]
    assert told(log(said(0, "a"), stopped(5, "b"), said(7, "c", picture)).rows) == [(1, 5.0, 2.0)]


def test_older_codex_starts_turns_with_the_message_alone(log):
    found = log(
        meta(0),
        event(1, "user_message", message="x"),
        aborted(5),
        event(9, "user_message", message="yy"),
        counted(11, 6),
    )
    (row,) = found.rows
    assert (row.start_kind, row.gap_s, row.new_prompt_chars, row.prompt_tokens_after) == ("user_message", 4.0, 2, 6)


def test_in_newer_codex_a_message_to_a_running_turn_starts_nothing(log):
    steer = event(3, "user_message", message="left")
    found = log(meta(0), started(1, "a"), steer, aborted(5, "a"), started(9, "b"))
    assert found.counts["turns"] == 2
    assert told(found.rows) == [(1, 4.0, 4.0)]


# ---------------------------------------------------------------- copies


def test_a_file_that_is_there_twice_counts_once(tmp_path):
    records = [meta(0), started(1, "a"), aborted(5, "a"), started(9, "b"), aborted(10, "b"), started(12, "c")]
    files = [write(tmp_path / f"{n}.jsonl", *records) for n in range(3)]
    assert len(read(*files).rows) == 2
    assert read(*files).counts["aborts"] == 2
    assert len(read(files[0], tmp_path, files[0]).rows) == 2


@pytest.mark.parametrize("ids", [True, False])
def test_lines_that_are_there_twice_count_once(log, ids):
    turn = ("a", "b", "c") if ids else (None, None, None)
    records = [
        started(1, turn[0]),
        aborted(5, turn[0]),
        started(9, turn[1]),
        aborted(10, turn[1]),
        started(12, turn[2]),
    ]
    found = log(meta(0), *(record for record in records for _ in range(2)))
    assert told(found.rows) == [(1, 4.0, 4.0), (1, 9.0, 2.0)]
    assert found.counts["turns"] == 3
    assert told(log(meta(0), *records, meta(0), *records).rows) == [(1, 4.0, 4.0), (1, 9.0, 2.0)]


def test_calls_that_are_there_twice_count_once(log):
    (row,) = log(
        *(said(0, "a"), answered(1, "b", 10), answered(2, "c", 20), answered(2.1, "b", 10), answered(3, "c", 20)),
        *(stopped(5, "d"), said(9, "e"), answered(9.1, "c", 20), answered(10, "f", 30)),
    ).rows
    assert (row.aborted_turn_calls, row.prompt_tokens_before, row.prompt_tokens_after) == (2, 20, 30)


def test_a_copy_that_ends_with_the_abort_does_not_hide_the_next_turn(tmp_path):
    records = [meta(0), started(1, "a"), aborted(5, "a"), started(9, "b"), started(15, "c")]
    short = write(tmp_path / "1.jsonl", *records[:3])
    whole = write(tmp_path / "2.jsonl", *records)
    tail = write(tmp_path / "3.jsonl", records[0], records[4])
    for order in permutations((short, whole, tail)):
        assert told(read(*order).rows) == [(1, 4.0, 4.0)]


def test_a_turn_does_not_follow_its_own_abort(log):
    assert log(meta(0), started(1, "a"), aborted(1, "a")).rows == []


def test_a_start_follows_one_abort(tmp_path):
    """A copy that begins between two markers of one abort."""
    records = [said(0, "a"), stopped(5, "b"), stopped(6, "c"), said(9, "d")]
    write(tmp_path / "1.jsonl", *records[2:])
    write(tmp_path / "2.jsonl", *records)
    assert told(read(tmp_path).rows) == [(1, 5.0, 4.0)]


def test_a_resumed_session_in_a_file_of_its_own_goes_on(tmp_path):
    """A session's abort is the last thing in one file, its next turn the first in another."""
    before = write(tmp_path / "z.jsonl", said(0, "a"), stopped(5, "b"))
    after = write(tmp_path / "a.jsonl", said(9, "c", parent="b"), answered(11, "d", prompt=70))
    (row,) = read(before, after).rows
    assert (row.gap_s, row.prompt_tokens_after) == (4.0, 70)
    assert read(after, before).rows == [row]


@pytest.mark.parametrize("renamed", [True, False])
def test_a_resumed_session_that_begins_with_a_copy_counts_once(tmp_path, renamed):
    """The copy has the same uuids and stamps; whether it names the old session or the new depends on the version."""
    records = [said(0, "a"), stopped(5, "b"), said(9, "c"), stopped(14, "d")]
    copied = [record | {"sessionId": name("S2")} if renamed else record for record in records]
    write(tmp_path / "1.jsonl", *records)
    write(
        tmp_path / "2.jsonl", *copied, claude(20, "e", "S2", "d", type="user", message={"role": "user", "content": "x"})
    )
    rows = read(tmp_path).rows
    for order in permutations((tmp_path / "1.jsonl", tmp_path / "2.jsonl")):
        found = read(*order)
        assert found.rows == rows
        assert [(at, gap) for _, at, gap in told(found.rows)] == [(5.0, 4.0), (14.0, 6.0)]
        assert (found.counts["turns"], found.counts["aborts"]) == (3, 2)


def test_two_sessions_with_short_ids_are_not_taken_for_copies(tmp_path):
    for at, session in ((0, "S1"), (50, "S2")):
        records = [said(at, "a"), stopped(at + 5, "b"), said(at + 9, "c")]
        short = [record | {"sessionId": session, "uuid": uuid} for record, uuid in zip(records, "abc", strict=True)]
        write(tmp_path / f"{session}.jsonl", *short)
        turns = [started(1), aborted(5), started(9)]
        for turn, number in zip(turns, "121", strict=True):
            turn["payload"]["turn_id"] = number  # a count that begins anew in each thread
        write(tmp_path / f"codex-{session}.jsonl", meta(0, session), *turns)
    assert len(read(tmp_path).rows) == 4


# ---------------------------------------------------------------- forks

PARENT = [meta(0, "P"), started(1, "a"), aborted(5, "a"), started(21, "b"), aborted(25, "b"), started(29, "c")]


def fork_of(records, at, thread="F", every=0.001, **fork):
    """What a fork at `at` begins with: a meta of its own, then the parent's records, stamped anew."""
    parent = records[0]["payload"]["id"]
    copied = [record | {"timestamp": meta(at + every * n)["timestamp"]} for n, record in enumerate(records, start=1)]
    return [meta(at, thread, **(fork or {"forked_from_id": parent})), *copied]


def without_ids(records):
    return [json.loads(json.dumps(record).replace("turn_id", "dropped")) for record in records]


OWN = [started(1000, "x"), aborted(1007, "x"), started(1010, "y")]


@pytest.mark.parametrize("strip", [list, without_ids])
@pytest.mark.parametrize(
    "fork",
    [
        {"forked_from_id": name("P")},
        {"source": {"subagent": {"thread_spawn": {"parent_thread_id": name("P"), "depth": 1}}}},
    ],
)
def test_a_forks_copy_of_its_parent_is_dropped_and_its_own_turns_stay(tmp_path, strip, fork):
    child = write(tmp_path / "child.jsonl", *strip([*fork_of(PARENT, 900, **fork), *OWN]))
    found = read(child)
    assert [gap for _, _, gap in told(found.rows)] == [3.0], "the parent's transitions are not here"
    assert found.counts["copied records of forks"] == 5
    write(tmp_path / "parent.jsonl", *strip(PARENT))
    both = read(tmp_path)
    assert [gap for _, _, gap in told(both.rows)] == [16.0, 4.0, 3.0]
    assert len({row.scope for row in both.rows}) == 2
    assert both.counts["aborts"] == 3


def test_a_fork_of_a_fork_drops_both_histories(tmp_path):
    first = [*fork_of(PARENT, 900), *OWN]
    second = [
        *fork_of(first, 2000, "G", forked_from_id=name("F")),
        started(2010, "p"),
        aborted(2012, "p"),
        started(2019, "q"),
    ]
    write(tmp_path / "0.jsonl", *second)
    assert [gap for _, _, gap in told(read(tmp_path).rows)] == [7.0]
    write(tmp_path / "1.jsonl", *first)
    write(tmp_path / "2.jsonl", *PARENT)
    assert [gap for _, _, gap in told(read(tmp_path).rows)] == [16.0, 4.0, 3.0, 7.0]


def test_a_forks_first_turn_may_begin_at_once(tmp_path):
    """A subagent is put to work in the instant it is made: its start may be lost, its transition is not."""
    own = [started(900.05, "x"), counted(903, 5), aborted(907, "x"), started(910, "y")]
    child = write(tmp_path / "child.jsonl", *fork_of(PARENT, 900), *own)
    assert [gap for _, _, gap in told(read(child).rows)] == [3.0]
    own[0]["payload"]["started_at"] = 1767247200 + 900
    child = write(tmp_path / "child.jsonl", *fork_of(PARENT, 900), *own)
    (row,) = read(child).rows
    assert (row.gap_s, row.aborted_turn_s) == (pytest.approx(3.0), pytest.approx(6.95)), "it says itself when it began"


def test_a_copy_that_is_written_slowly_is_known_by_its_own_times_or_by_its_parent(tmp_path):
    timed = [
        record | {"payload": record["payload"] | {key: 1767247200 + at}}
        for record, key, at in zip(PARENT[1:], ["started_at", "completed_at"] * 3, (1, 5, 21, 25, 29), strict=False)
    ]
    slow = write(tmp_path / "slow.jsonl", *fork_of([PARENT[0], *timed], 900, every=2.0), *OWN)
    assert [gap for _, _, gap in told(read(slow).rows)] == [3.0]
    untimed = write(tmp_path / "slow.jsonl", *fork_of(PARENT, 900, every=2.0), *OWN)
    parent = write(tmp_path / "parent.jsonl", *PARENT)
    for order in ((untimed, parent), (parent, untimed)):
        assert [gap for _, _, gap in told(read(*order).rows)] == [16.0, 4.0, 3.0], "same turns: the parent is believed"


def test_an_abort_just_before_the_fork_is_the_parents(tmp_path):
    last = [started(890, "l", started_at=1767247200 + 890), aborted(896, "l", completed_at=1767247200 + 896)]
    child = write(
        tmp_path / "child.jsonl", *fork_of([*PARENT, *last], 900), started(905, "x", started_at=1767247200 + 905)
    )
    assert read(child).rows == []
    write(tmp_path / "parent.jsonl", *PARENT, *last)
    assert [gap for _, _, gap in told(read(tmp_path).rows)] == [16.0, 4.0]


def test_a_fork_that_does_not_say_so_has_two_names_at_once(tmp_path):
    child = write(tmp_path / "child.jsonl", *fork_of(PARENT, 900, forked_from_id=None), *OWN)
    assert [gap for _, _, gap in told(read(child).rows)] == [3.0]


def test_in_a_fork_only_turns_are_asked_when_they_were(tmp_path):
    tool = event(1006.5, "mcp_tool_call_end", started_at=1767247200 + 960, completed_at=1767247200 + 960)
    child = write(tmp_path / "child.jsonl", *fork_of(PARENT, 900), OWN[0], tool, *OWN[1:])
    assert [gap for _, _, gap in told(read(child).rows)] == [3.0]


def test_a_fork_that_is_resumed_at_once_loses_nothing(tmp_path):
    again = meta(1100, "F", forked_from_id=name("P"))
    again["payload"]["timestamp"] = meta(900)["timestamp"]
    child = write(tmp_path / "child.jsonl", *fork_of(PARENT, 900), *OWN[:2], again, started(1100.01, "y"))
    assert [gap for _, _, gap in told(read(child).rows)] == [pytest.approx(93.01)]


def test_a_thread_that_is_no_fork_may_be_as_fast_as_it_likes(log):
    assert len(log(meta(0), started(0.001, "a"), aborted(0.002, "a"), started(0.003, "b")).rows) == 1


def test_a_rollout_that_is_resumed_says_its_name_again(log):
    found = log(meta(0), started(1, "a"), aborted(5, "a"), meta(300), started(301, "b"))
    assert told(found.rows) == [(1, 4.0, 296.0)]


# ---------------------------------------------------------------- against a dumb version

STEPS = st.lists(
    st.tuples(
        st.sampled_from("AB"),
        st.sampled_from(["start", "call", "abort"]),
        st.sampled_from([0, 1, 59, 61, 500, 3600, 3601]),
    ),
    max_size=30,
)


def dumb(steps):
    """(thread, abort, gap) of each transition, looked for backwards from every start."""
    at, events = 0, []
    for thread, kind, after in steps:
        at += after
        events.append((thread, kind, at))
    found = []
    for index, (thread, kind, start_at) in enumerate(events):
        if kind != "start":
            continue
        before = [(k, t) for who, k, t in events[:index] if who == thread]
        starts = [n for n, (k, _) in enumerate(before) if k == "start"]
        since = before[starts[-1] + 1 :] if starts else before
        aborts = [n for n, (k, _) in enumerate(since) if k == "abort"]
        counted = []
        for n in aborts:  # a second marker within a minute, and with no call in between, is the first one's
            ran = counted and any(k == "call" for k, _ in since[counted[-1] : n])
            if not counted or ran or since[n][1] - since[counted[-1]][1] > 60:
                counted.append(n)
        if counted and start_at - since[counted[-1]][1] <= 3600:
            found.append((thread, since[counted[-1]][1], start_at - since[counted[-1]][1]))
    return sorted(found)


@settings(max_examples=150)
@given(STEPS)
def test_a_dumb_version_finds_the_same(tmp_path_factory, steps):
    at, records = 0, []
    for number, (thread, kind, after) in enumerate(steps):
        at += after
        make = {"start": said, "call": answered, "abort": stopped}[kind]
        records.append(make(at, f"{number}", session=thread))
    found = read(write(tmp_path_factory.mktemp("log") / "log.jsonl", *records, line(at, "x", {})))
    firsts = [sum(after for _, _, after in steps[: n + 1]) for n, (_, kind, _) in enumerate(steps) if kind != "call"]
    expected = dumb(steps)
    rows = [(round(row.t_abort_s) + min(firsts, default=0), round(row.gap_s)) for row in found.rows]
    assert sorted(rows) == sorted((at, gap) for _, at, gap in expected)
    threads = {row.scope for row in found.rows}
    assert len(threads) == len({thread for thread, _, _ in expected})
