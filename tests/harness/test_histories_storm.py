"""Storms on a stand-in: of a right one nothing is found, of each kind of wrong one what is wrong with it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import islice

import pytest

from harness.histories import __main__ as command
from harness.histories.checker import Rule, check
from harness.histories.history import (
    Answer,
    Call,
    Kind,
    Opening,
    Operation,
    Recorder,
    Via,
    What,
    assembled,
    read,
    read_line,
    written,
)
from harness.histories.plan import Act, moves
from harness.histories.saboteur import Deed, Who, deeds, tormented
from harness.histories.storm import Storm
from tests.harness.stand_in_scopes import StandInScopes
from tests.server.wire import eventually

TENANTS = {"a": "key-a", "b": "key-b"}
SECONDS = 4.0


class Killable:
    """A stand-in behind a process that can be stopped and killed."""

    def __init__(self, wrong=None):
        self.server, self.process, self.lives = StandInScopes(wrong), None, 0
        self.begin()

    @property
    def pid(self):
        return self.process.pid

    def children(self):
        return []

    def begin(self):
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.lives += 1

    def stop(self):
        self.server.close()
        self.process.kill()
        self.process.wait()

    def start(self):
        self.server = self.server.reborn()
        self.begin()


def storm_on(killable, file, plan=(), seconds=SECONDS):
    storm = Storm(killable.server.url, "made-up", TENANTS, 1, "storm", runtimes=8, scopes=2)
    opening = Opening(seed=1, backlog_bytes=1 << 20)
    with Recorder(file, opening) as recorder, tormented(killable, recorder, plan) as serving:
        storm.run(recorder, seconds, serving)
    return read(file)


@pytest.fixture
def killable(request):
    found = Killable(getattr(request, "param", None))
    yield found
    found.stop()


def test_a_storm_on_a_right_server_that_is_stopped_and_killed_shows_nothing_wrong(killable, tmp_path, capsys):
    plan = [Deed(0.5, Who.API, 0.1), Deed(1.2, Who.API, None), Deed(2.0, Who.ENGINE, None)]
    history = storm_on(killable, tmp_path / "storm.jsonl", plan)
    verdict = check(history)
    assert verdict.findings == [], "\n".join(map(str, verdict.findings))
    assert (verdict.kills, verdict.pauses, killable.lives) == (2, 1, 3)
    told = verdict.summary()
    assert told["linearizable"]
    assert told["scopes"] == 4
    assert told["unknown_outcomes"] > 0
    kinds = Counter((one.call.kind, one.answer.status) for one in history.operations if one.answer)
    for seen in [(Kind.JOIN, 200), (Kind.SUPERSEDE, 200), (Kind.SUPERSEDE, 409), (Kind.LOOK, 200)]:
        assert kinds[seen] > 0, kinds
    frames = Counter(one.call.via for one in history.operations for _ in one.frames)
    assert frames[Via.RAW] > 0
    assert frames[Via.CLIENT] > 0
    assert any(frame.ends for one in history.operations for frame in one.frames), "somebody read a last word"
    assert {one.left.how for one in history.operations if one.left} >= {"done", "dropped"}
    assert command.main([str(tmp_path / "storm.jsonl")]) == 0
    assert '"linearizable": true' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("killable", "plan", "broken"),
    [
        ("stale", (), {Rule.ORDER}),
        ("forgetful", (Deed(1.5, Who.API, None),), {Rule.ORDER}),
        ("keys", (), {Rule.ORDER, Rule.KEYS}),
        ("leaks", (), {Rule.STATED}),
    ],
    indirect=["killable"],
)
def test_what_is_wrong_with_a_server_is_found_from_outside(killable, plan, broken, tmp_path, capsys):
    verdict = check(storm_on(killable, tmp_path / "storm.jsonl", plan))
    found = {finding.rule for finding in verdict.findings}
    assert found & broken, found
    assert all(len(finding.lines) < 20 for finding in verdict.findings), "it is told in few words"
    assert command.main([str(tmp_path / "storm.jsonl")]) == 1
    assert "/storm-" in capsys.readouterr().out


# -- the file ----------------------------------------------------------------------------------------------------------


def test_every_line_is_read_back_as_it_was_written(killable, tmp_path):
    storm_on(killable, tmp_path / "storm.jsonl", seconds=0.5)
    for text in (tmp_path / "storm.jsonl").read_text().splitlines():
        assert written(read_line(text)) == text


def test_a_file_that_was_cut_off_anywhere_is_a_history_of_its_own(killable, tmp_path):
    whole = tmp_path / "storm.jsonl"
    storm_on(killable, whole, seconds=0.7)
    text = whole.read_bytes()
    for share in range(1, 10):
        cut = tmp_path / "cut.jsonl"
        cut.write_bytes(text[: len(text) * share // 10])
        verdict = check(read(cut))
        assert verdict.findings == [], "\n".join(map(str, verdict.findings))
        assert verdict.operations > 0


def test_a_line_that_is_none_is_told():
    with pytest.raises(ValueError, match="not a line"):
        read_line('{"line": "nonsense"}')
    with pytest.raises(ValueError, match="nobody made"):
        assembled([Answer(3, 10, 200)])


def test_an_answer_that_was_not_read_leaves_its_call():
    history = assembled([Call(1, 5, "r", "t", "s", Kind.CANCEL)])
    assert history.operations == [Operation(Call(1, 5, "r", "t", "s", Kind.CANCEL))]
    assert history.operations[0].unknown


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_plan_hangs_on_its_seed_and_name_alone_and_has_every_act():
    def first(seed, name):
        return list(islice(moves(seed, name, 3), 300))

    assert first(1, "r1") == first(1, "r1")
    assert first(1, "r1") != first(1, "r2")
    assert first(1, "r1") != first(2, "r1")
    assert {move.act for move in first(1, "r1")} == set(Act)
    assert {move.copies for move in first(1, "r1") if move.keyed} == {1, 2, 3}


@pytest.mark.parametrize(("pauses", "kills"), [(6, 2), (14, 4), (0, 3), (2, 0)])
def test_deeds_come_in_order_within_the_time_and_every_process_has_its_turn(pauses, kills):
    plan = deeds(5, 100.0, pauses, kills)
    assert [deed.pause_s is None for deed in plan].count(True) == kills
    assert len(plan) == pauses + kills
    times = [deed.at_s for deed in plan]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 100
    turns = [Who.API, Who.ENGINE, Who.WORKER, Who.API]
    assert [deed.who for deed in plan if deed.pause_s is None] == turns[:kills]


def test_a_server_that_does_not_come_back_fails_the_run(killable, tmp_path):
    def start():
        raise RuntimeError("it does not start")

    first, killable.start, file = killable.start, start, tmp_path / "storm.jsonl"

    def storm():
        with Recorder(file, Opening()) as recorder, tormented(killable, recorder, [Deed(0.0, Who.API, None)]):
            eventually(lambda: [mark.what for mark in read(file).marks] == [What.KILLED], "it was killed")

    with pytest.raises(RuntimeError, match="not start"):
        storm()
    first()
