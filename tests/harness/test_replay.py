"""Replays against a server that computes nothing."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from itertools import pairwise

import httpx
import pytest

from harness import replay, replay_command
from harness.arrivals import Agenda, Arrival, Plan, Planned, Sizes, plan
from harness.outcomes import Outcome
from harness.replay import Arm, Replay, Site, in_turn, prompts, summary, walk
from retire import cli
from retire.core.errors import RetireError
from tests.harness.stand_in_server import StandIn
from traces import generate, rows

ANSWER = 60  # tokens; a quarter of a second and a little


@pytest.fixture
def started():
    servers = []

    def start(**how):
        servers.append(StandIn(**how).start())
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def versions(*starts_s, scope=1, ahead_s=0.0, answer=ANSWER, tokens=40, shared=0):
    return [
        Planned(scope, n, at, None if n == 1 else at - ahead_s, tokens + n, shared if n > 1 else 0, answer)
        for n, at in enumerate(starts_s, start=1)
    ]


def planned(*of_scopes):
    every = tuple(one for of_scope in of_scopes for one in of_scope)
    finals = tuple((of_scope[-1].scope, of_scope[-1].number) for of_scope in of_scopes)
    return Plan(every, (min(one.start_s for one in every if one.number > 1),), finals)


def run(server, arm, plan, **more):
    site = Site(server.url, "made-up", server.key)
    return Replay(site, plan, prompts(site, plan, 1), window_s=1.0, limit_s=more.pop("limit_s", 5.0), **more).run(arm)


TWO = planned(versions(0.0, 0.1, 0.2), versions(0.05, 0.15, scope=2))


class Clock:
    """Stands still unless somebody sleeps, or does what takes time."""

    def __init__(self):
        self.now = 100.0
        self.slept = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def test_everything_is_done_at_its_time_and_lateness_is_told():
    clock, done = Clock(), []

    def act(item):
        done.append((clock.now, item))
        clock.now += 3.0 if item == "slow" else 0.0

    assert walk(Agenda([(2.0, "b"), (1.0, "slow"), (9.0, "c")]), act, 100.0, clock, clock.sleep) == pytest.approx(2.0)
    assert done == [(101.0, "slow"), (104.0, "b"), (109.0, "c")]
    assert walk(Agenda([]), act, 100.0, clock, clock.sleep) == 0.0


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_no_arm_comes_directly_after_the_same_one_in_more_than_half_of_the_trials(count):
    arms, trials = list(range(count)), 4 * count
    orders = [in_turn(arms, trial) for trial in range(trials)]
    assert all(sorted(order) == arms for order in orders)
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert max(pairs.values(), default=0) <= trials / 2
    assert {order[0] for order in orders} == set(arms)


def runs_late_by(*late_s):
    """One after the other; gives what is kept, and how many were made."""
    made = [replay.Replayed(Arm.NATIVE, TWO, 0.0, 1.0, {}, late_s=one) for one in late_s]
    left = iter(made)
    kept = replay.on_time(lambda: next(left))
    return kept, len(made) - len(list(left))


def test_a_run_with_a_late_act_is_repeated_and_only_the_kept_one_is_checked():
    for late_s, kept_s, made in [
        ((0.0,), 0.0, 1),
        ((3.0, 0.1), 0.1, 2),
        ((3.0, 3.0, 3.0, 0.2), 0.2, 4),
        ((3.0, 3.0, 3.0, 5.0, 0.0), 5.0, 4),  # three times, and no more
        ((float("inf"), 0.0), float("inf"), 1),  # somebody has ended: no matter of time
    ]:
        kept, count = runs_late_by(*late_s)
        assert (kept.late_s, count, kept.repeats, kept.figures()["repeats"]) == (kept_s, made, made - 1, made - 1)
        assert kept.checks()["acts_on_time"] is (kept_s < replay.ON_TIME_S)


def test_a_dropped_run_in_which_the_server_was_wrong_fails_the_one_that_is_kept():
    class Wrong(replay.Replayed):
        def checks(self):
            return super().checks() | {"every_transition_closed": False, replay.WHOLE: False}

    made = iter(
        [kind(Arm.NATIVE, TWO, 0.0, 1.0, {}, late_s=late_s) for kind, late_s in ((Wrong, 3.0), (replay.Replayed, 0.0))]
    )
    held = replay.on_time(lambda: next(made)).checks()
    assert [name for name, holds in held.items() if not holds] == ["every_transition_closed"]


@pytest.mark.parametrize("arm", Arm)
def test_last_versions_answer_in_full_and_all_others_are_superseded(started, arm):
    found = run(started(), arm, TWO)
    account = found.account
    assert account.outcomes() == {"finished": 2, "superseded": 3, "failed": 0}
    assert (account.spoke(), account.whole(), found.cut) == (2, 2, 0)
    assert all(found.checks().values())
    assert account.current_tokens() >= 2 * ANSWER
    changes = account.live()
    assert changes[-1][1:] == (0, 0)
    json.dumps(found.figures())


def test_who_supersedes_or_hangs_up_gets_nothing_old_and_who_does_neither_gets_all_of_it(started):
    obsolete = {arm: run(started(), arm, TWO).account.obsolete_tokens() for arm in Arm}
    assert obsolete[Arm.RETIRE] <= 3  # what was under way
    assert obsolete[Arm.NATIVE] <= 10
    assert obsolete[Arm.ABANDON] > 60


def test_a_token_that_the_server_does_not_state_as_published_fails_the_run_whenever_it_came(started):
    held, leaked = (run(started(leaks=count), Arm.RETIRE, TWO).checks() for count in (0, 1))
    assert all(held.values())
    assert [name for name, holds in leaked.items() if not holds] == ["nothing_beyond_what_was_published"]


def test_the_native_runtime_names_no_scope_and_hangs_up_each_old_request(started):
    server = started()
    run(server, Arm.NATIVE, TWO)
    assert {one["scope"] for one in server.asked} == {None}
    assert server.hung_up == 3


def test_a_supersede_is_the_successors_own_header_and_every_scope_has_its_epochs(started):
    server = started(fence_ms=8.0, interval_ms=10.0)
    found = run(server, Arm.RETIRE, TWO)
    assert [one["supersedes"] for one in server.asked].count("*") == 3
    assert sorted(server.epochs.values()) == [2, 3]
    assert found.account.cleanup_intervals() == [0.8] * 3
    revoked = [fate for fate in found.account.fates if fate.revoked_at is not None]
    assert all(fate.cleanup_ms >= (fate.revoked_at - fate.given_up_at) * 1000 + 7.999 for fate in revoked)


def test_a_successor_that_comes_later_finds_its_scope_revoked_already(started):
    server = started()
    slow = planned(versions(0.0, 0.15, ahead_s=0.06))
    found = run(server, Arm.RETIRE, slow)
    old, new = found.account.fates
    assert [one["supersedes"] for one in server.asked] == [None, None]
    assert old.outcome is Outcome.SUPERSEDED
    assert old.given_up_at < old.revoked_at < new.version.reply.sent_at
    assert found.account.obsolete_tokens() <= 3  # what was under way while the revocation was sent
    assert len(found.records) == 1
    assert all(found.checks().values())
    native = run(server, Arm.NATIVE, slow).account
    assert native.outcomes() == {"finished": 1, "superseded": 1, "failed": 0}


def test_a_successor_that_is_superseded_before_it_can_answer_leads_to_its_transition_all_the_same(started):
    found = run(started(slow={2: 0.3}), Arm.RETIRE, planned(versions(0.0, 0.08, 0.16)))
    assert [one.reply.status for one in found.versions[1]] == [200, 410, 200]
    assert found.account.outcomes() == {"finished": 1, "superseded": 2, "failed": 0}
    assert len(found.records) == 2
    assert all(found.checks().values())


def test_a_first_version_that_is_superseded_before_it_can_answer_is_told_somebody_elses_epoch(started):
    found = run(started(slow={1: 0.15}), Arm.RETIRE, planned(versions(0.0, 0.08, 0.24)))
    assert [one.reply.headers["x-retire-epoch"] for one in found.versions[1]] == ["2", "2", "3"]
    assert found.account.outcomes() == {"finished": 1, "superseded": 2, "failed": 0}
    assert all(found.checks().values())


@pytest.mark.parametrize("status", [409, 410])
def test_a_refused_successor_fails_and_the_old_version_stays_current_until_the_next(started, status):
    found = run(started(refuse={2: status}), Arm.RETIRE, planned(versions(0.0, 0.08, 0.16)))
    old, refused, new = found.account.fates
    assert [one.outcome for one in (old, refused, new)] == [Outcome.SUPERSEDED, Outcome.FAILED, Outcome.FINISHED]
    assert old.given_up_at == new.version.gave_up_at
    assert not found.checks()["no_version_failed"]


def test_an_answer_that_breaks_off_fails_its_version_and_nobody_elses(started):
    found = run(started(breaks={43}), Arm.NATIVE, TWO)
    assert found.account.outcomes() == {"finished": 1, "superseded": 3, "failed": 1}


def test_a_server_that_nobody_can_reach_fails_every_version(started):
    server = started()
    site = Site(server.url, "made-up")
    texts = prompts(site, TWO, 1)
    replay = Replay(Site(server.url.replace("http:", "ftp:"), "made-up"), TWO, texts, window_s=1, limit_s=1)
    with pytest.raises(Exception, match="protocol"):
        replay.run(Arm.NATIVE)


def test_transitions_that_never_close_are_waited_for_together(started, monkeypatch):
    monkeypatch.setattr(replay, "PATIENCE_S", 0.5)
    server = started(closes=False)
    found = run(server, Arm.RETIRE, planned(*[versions(*[0.02 * n for n in range(6)], scope=s) for s in (1, 2)]))
    assert found.records == {}
    assert not found.checks()["every_transition_closed"]
    assert server.waited_s < 1.5, "not half a second for each of ten"


def test_what_is_not_over_at_the_limit_is_cut_and_its_cleanup_is_no_shorter(started):
    endless = planned(versions(0.0, 0.05, answer=100_000))
    found = run(started(), Arm.ABANDON, endless, limit_s=0.2)
    assert found.cut == 2
    assert found.account.cleanup_ms()[0] >= 190
    assert found.account.spoke() == 1


def test_a_scope_whose_answers_end_by_themselves_has_nothing_to_clean_up(started):
    found = run(started(), Arm.RETIRE, planned(versions(0.0, 0.2, answer=2)))
    assert found.account.outcomes() == {"finished": 2, "superseded": 0, "failed": 0}
    assert found.account.cleanup_ms() == []


def test_other_work_is_sent_without_a_scope_and_counts_apart(started):
    server = started()
    found = run(server, Arm.RETIRE, TWO, others=[Arrival(0.0, 7, 3), Arrival(0.02, 9, 4)])
    assert found.figures()["background_tokens"] == 7
    assert [len(one["prompt"]) for one in server.asked if one["scope"] is None] == [7, 9]


def test_a_plain_server_is_asked_for_a_token_instead_of_its_status(started):
    found = run(started(versioned=False), Arm.NATIVE, TWO)
    assert found.account.outcomes()["failed"] == 0
    assert len(found.account.cleanup_ms()) == 3


@pytest.mark.parametrize(("arm", "versioned"), [(Arm.NATIVE, False), (Arm.NATIVE, True), (Arm.RETIRE, True)])
def test_a_server_that_asks_for_a_key_is_given_it_with_every_question(started, arm, versioned):
    found = run(started(versioned=versioned, key="sk-right"), arm, TWO, others=[Arrival(0.0, 7, 3)])
    assert found.account.outcomes() == {"finished": 2, "superseded": 3, "failed": 0}
    assert found.figures()["background_tokens"] == 3
    assert all(found.checks().values())


def test_versions_share_exactly_what_is_planned(started):
    site = Site(started().url, "made-up")
    texts = prompts(site, planned(versions(0.0, 0.1, 0.2, shared=25)), 1)
    for old, new in ((1, 2), (2, 3)):
        assert texts[1, old][:25] == texts[1, new][:25]
        assert texts[1, old][25] != texts[1, new][25]
    zero = prompts(site, TWO, 1)
    assert zero[1, 1][0] != zero[1, 2][0]
    assert {key: len(ids) for key, ids in zero.items()} == {(1, 1): 41, (1, 2): 42, (1, 3): 43, (2, 1): 41, (2, 2): 42}


def test_the_keys_that_scripts_rely_on(started):
    server = started()
    runs = {arm: [run(server, arm, TWO).figures()] for arm in (Arm.NATIVE, Arm.RETIRE)}
    told = summary(runs, Arm.NATIVE, Arm.RETIRE, TWO)
    assert (told["retire_final"], told["native_final"], told["final_total"]) == (2, 2, 2)
    assert told["goodput_ratio"] > 0
    assert told["cleanup_p99_intervals"] == 0.8
    assert told["runs_repeated"] == 0
    runs[Arm.NATIVE][0]["repeats"] = 2
    assert summary(runs, Arm.NATIVE, Arm.RETIRE, TWO)["runs_repeated"] == 2
    nothing = summary({}, Arm.NATIVE, Arm.RETIRE, TWO)
    assert nothing["goodput_ratio"] is nothing["retire_final"] is nothing["cleanup_p99_intervals"] is None


@pytest.fixture
def window(tmp_path):
    path = tmp_path / "window.jsonl"
    with path.open("w", encoding="utf-8") as out:
        rows.write(generate.paper_window(1), out)
    return path


@pytest.fixture
def short(tmp_path):
    """The paper's window without the time between its bursts, and without what comes close after another."""
    drawn = generate.paper_window(1)
    path = tmp_path / "short.jsonl"
    with path.open("w", encoding="utf-8") as out:
        rows.write(
            (
                dataclasses.replace(row, t_abort_s=at - row.gap_s, t_start_s=at, aborted_turn_s=at)
                for number, row in enumerate(drawn)
                for at in [0.1 + number * 0.05 + number // 8]
            ),
            out,
        )
    return path


SMALL = ["--scale-tokens", "0.01", "--answer-tokens", "60", "--goodput-window", "4", "--limit", "5"]


def test_the_command_prints_the_figures_and_writes_all_of_them(started, short, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(replay, "ON_TIME_S", 60.0)  # a machine with other work is no matter here
    server, out = started(), tmp_path / "out.json"
    load = tmp_path / "load.jsonl"
    load.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2}\n')
    arguments = [str(short), "--url", server.url, *SMALL, "--background", str(load), "--json", str(out)]
    assert cli.main(["replay", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.out.rstrip().endswith("correct")
    assert "transitions 24" in shown.err
    told = json.loads(out.read_text())
    assert told["summary"]["final_total"] == 9
    assert told["summary"]["retire_final"] == 9
    arms, versions = told["cells"]
    assert set(arms["arms"]) == {"native", "retire"}
    assert len(versions["arms"]["retire"]["versions"]) == 27
    assert told["manifest"]["model"] == "made-up"


def test_the_command_repeats_what_was_late_and_says_so(started, short, tmp_path, capsys, monkeypatch):
    lateness, out = iter([1.0, 1.0, 0.0]), tmp_path / "out.json"
    carry_out = Replay.run
    monkeypatch.setattr(Replay, "run", lambda *how: dataclasses.replace(carry_out(*how), late_s=next(lateness)))
    only = ["--window", "0.3", "--scopes", "1", "--arm", "native", "--json", str(out)]
    assert replay_command.main([str(short), "--url", started().url, *SMALL, *only]) == 0
    assert "1.00 s late; repeated" in capsys.readouterr().err
    assert json.loads(out.read_text())["summary"]["runs_repeated"] == 2


def test_a_plan_can_be_looked_at_without_a_server(window, capsys):
    assert replay_command.main([str(window), *SMALL, "--dry-run", "--scopes", "2"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 18
    assert lines == sorted(lines, key=lambda line: (line["scope"], line["number"]))


def test_a_server_that_supersedes_nothing_is_refused_for_the_arm_that_needs_it(started, short):
    server = started(versioned=False)
    with pytest.raises(RetireError, match="supersedes nothing"):
        replay_command.main([str(short), "--url", server.url, *SMALL])
    only = ["--window", "0.3", "--scopes", "1", "--arm", "native"]
    assert replay_command.main([str(short), "--url", server.url, *SMALL, *only]) == 0


def test_a_version_that_the_server_has_no_room_for_is_refused_before_anything_is_sent(started, short):
    server = started(length=140)
    with pytest.raises(RetireError, match=r"takes 140 tokens, .* has 142") as refused:
        replay_command.main([str(short), "--url", server.url, *SMALL])
    assert "\n" not in str(refused.value)
    assert server.asked == []
    server.length = 142
    only = ["--window", "0.3", "--scopes", "1", "--arm", "native"]
    replay_command.main([str(short), "--url", server.url, *SMALL, *only])
    assert len(server.asked) > 1


@pytest.mark.parametrize("arms", [[], ["native"], ["retire", "native"]])
def test_nobody_hangs_up_over_tls(started, short, arms):
    """What came after the hang-up could not be read, so native would have no late token at all."""
    server = started()
    chosen = [word for arm in arms for word in ("--arm", arm)]
    with pytest.raises(RetireError, match="over https") as refused:
        replay_command.main([str(short), "--url", server.url.replace("http:", "HTTPS:"), *SMALL, *chosen])
    assert "\n" not in str(refused.value)


def test_a_runtime_that_does_not_hang_up_may_use_tls(started, short):
    """The stand-in speaks none: that is what fails."""
    with pytest.raises(httpx.ConnectError):
        replay_command.main([str(short), "--url", started().url.replace("http:", "https:"), *SMALL, "--arm", "retire"])


def test_other_work_needs_room_as_well(started, short, tmp_path):
    load = tmp_path / "load.jsonl"
    load.write_text('{"timestamp": 0, "input_length": 900, "output_length": 200}\n')
    with pytest.raises(RetireError, match=r"takes 1000 tokens, .* has 1100"):
        replay_command.main([str(short), "--url", started(length=1000).url, *SMALL, "--background", str(load)])


@pytest.mark.parametrize("text", [None, "{}\n", ""])
def test_a_file_that_holds_no_transition_is_named(tmp_path, text):
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RetireError):
        replay_command.main([str(path), "--dry-run"])


@pytest.mark.parametrize("wrong", [["--speed", "0"], ["--overlap", "2"], ["--scopes", "0"], ["--arm", "other"]])
def test_wrong_usage_exits_with_2(window, wrong):
    with pytest.raises(SystemExit) as left:
        replay_command.main([str(window), *wrong])
    assert left.value.code == 2


def test_a_plan_at_a_speed_is_the_same_plan():
    slow, fast = (plan(generate.paper_window(4), Sizes(), speed=speed) for speed in (1.0, 8.0))
    assert [one.start_s for one in fast.versions] == pytest.approx([one.start_s / 8 for one in slow.versions])
    assert slow.finals == fast.finals
