"""Runs of several sittings, with trials made up: nothing is measured twice, and nothing is lost or invented."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.experiment import Cell, Result, columns, join
from harness.journal import Journal, JournalInUse
from harness.ledger import Key, Ledger
from harness.manifest import _contents as contents
from harness.manifest import identity
from harness.progress import Progress, span
from harness.sitting import Asked, measured, trials_beside


class Interruption(BaseException):
    """As the power going, somewhere."""


class Clock:
    """Every look at it takes a second, or is the last one of a sitting."""

    def __init__(self, left=10**9):
        self.left, self.trials = left, []

    def trial(self, key):
        if self.left <= 0:
            raise Interruption
        self.left -= 1
        self.trials.append(key)


@dataclass(frozen=True)
class Arm:
    ms: float


@dataclass(frozen=True)
class MadeUp:
    """Two starts of servers and trials without one; what a trial gives hangs on its seed alone."""

    clock: Clock = field(compare=False, repr=False)
    trials: int = 4
    bad: frozenset[int] = frozenset()
    model: str = "tiny"
    name: str = field(default="made-up", init=False)
    paper: str = field(default="§0", init=False)
    own_servers: str = field(default="its server is made up", init=False)

    def run(self, ledger, *, quick):
        ledger.plan({"a": self.trials, "b": self.trials, "alone": 1})
        found = [ledger.start(f"server {cell}", lambda cell=cell: self._served(ledger, cell)) for cell in ("a", "b")]
        alone = ledger.trial(Key("alone", ("x",), 0, 99), lambda: self._trial(ledger, 99))
        cells = [Cell({"cell": n}, columns(one["trials"])) for n, one in enumerate(found)]
        return Result(
            cells, {"alone": alone["x"]["ms"], "quick": quick}, dict(sorted(ledger.checks.items())), model="t"
        )

    def _served(self, ledger, cell):
        join(ledger.checks, {"warm": True})
        keys = [Key(cell, ("x", "y"), n, seed=n + 10 * (cell == "b")) for n in range(self.trials)]
        done = [ledger.trial(key, lambda key=key: self._trial(ledger, key.seed)) for key in keys]
        join(ledger.checks, {"nothing_left": True})
        return {"trials": done, "seal": {}}

    def _trial(self, ledger, seed):
        self.clock.trial(seed)
        join(ledger.checks, {"equal": seed not in self.bad, f"seen {seed % 2}": True})
        draw = random.Random(seed)
        return {arm: {"ms": Arm(draw.uniform(1, 9)).ms} for arm in ("x", "y")}


TRIALS, ASKED = 9, Asked()


@pytest.fixture(autouse=True)
def same_machine(monkeypatch):
    """What is installed does not change in the length of a test, and takes long to look up."""
    monkeypatch.setattr("harness.manifest._contents", lambda _packages: ["sources"])
    monkeypatch.setattr("harness.manifest.metadata.distributions", list)
    monkeypatch.setattr("harness.manifest.commit", lambda _root: {"commit": "0123", "dirty": False})


def result_of(document):
    return {name: part for name, part in document.items() if name != "manifest"}


def whole(**experiment):
    return result_of(json.loads(json.dumps(measured(MadeUp(Clock(), **experiment), ASKED))))


def sitting(file, left=10**9, asked=ASKED, **experiment):
    """The trials of one sitting, and its document if it came to the end."""
    clock = Clock(left)
    try:
        return clock.trials, measured(MadeUp(clock, **experiment), asked, file)
    except Interruption:
        return clock.trials, None


@settings(max_examples=40)  # files that are waited for until they are on the disk
@given(
    lengths=st.lists(st.integers(0, 4), max_size=12),
    bad=st.frozensets(st.sampled_from([0, 3, 11, 99]), max_size=2),
    torn=st.lists(st.integers(0, 400), max_size=12),
)
def test_however_often_it_is_interrupted_the_result_is_that_of_one_sitting(lengths, bad, torn):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        trials, taken = [], []
        for number, left in enumerate(lengths):
            done, document = sitting(file, left, bad=bad)
            trials += done
            taken.append(bool(done))
            if document is not None:
                break
            if number < len(torn):  # and the power goes in the middle of a line that is written
                with trials_beside(file).open("a") as out:
                    out.write(json.dumps({"key": "x" * 400, "result": None})[: torn[number]])
        else:
            done, document = sitting(file, bad=bad)
            trials += done
            taken.append(bool(done))
        assert result_of(json.loads(file.read_text())) == whole(bad=bad) == result_of(document)
        assert sorted(trials) == sorted(set(trials)), "no trial twice"
        assert len(trials) == TRIALS
        assert document["checks"]["equal"] == (not bad & {0, 1, 2, 3, 10, 11, 12, 13, 99})
        assert document["manifest"].get("sittings", 1) == max(1, sum(taken))


@settings(max_examples=40)
@given(share=st.floats(0, 1))
def test_whatever_was_written_last_may_be_cut_off_anywhere(share):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        before, _ = sitting(file, 5)
        text = trials_beside(file).read_bytes()
        place = round(share * len(text))
        trials_beside(file).write_bytes(text[:place])
        kept = sum(whole_line(line) for line in text[:place].decode().split("\n") if line.startswith('{"key": "['))
        after, document = sitting(file)
        assert result_of(json.loads(json.dumps(document))) == whole()
        assert len(after) == TRIALS - kept
        assert len(before) >= kept


def whole_line(line):
    try:
        return bool(json.loads(line))
    except ValueError:
        return False


def test_a_failed_check_stays_failed_also_one_that_was_made_outside_of_trials(tmp_path):
    file = tmp_path / "found.json"
    sitting(file, 2, bad=frozenset({1}))
    _, document = sitting(file, bad=frozenset({1}))
    assert document["checks"]["equal"] is False

    kept = []
    ledger = Ledger(write=kept.append)
    join(ledger.checks, {"warm": False})
    ledger.trial(Key("a", (), 0, 0), lambda: join(ledger.checks, {"equal": True}))
    assert ledger.checks == {"warm": False, "equal": True}
    later = Ledger(kept)
    later.trial(Key("a", (), 0, 0), lambda: pytest.fail("measured again"))
    assert later.checks == {"warm": False, "equal": True}


def test_work_that_was_interrupted_leaves_neither_result_nor_checks():
    kept = []
    ledger = Ledger(write=kept.append)
    join(ledger.checks, {"before": True})

    def work():
        join(ledger.checks, {"half": False})
        raise Interruption

    with pytest.raises(Interruption):
        ledger.trial(Key("a", (), 0, 0), work)
    assert kept == []
    assert ledger.checks == {"before": True}


def test_a_trial_is_the_same_object_of_json_whether_measured_or_read():
    kept = []
    key, given_ = Key("a", ("x",), 0, 0), {"arm": Arm(0.1), "pair": (1, None), 4: [float("inf")]}
    measured_ = Ledger(write=kept.append).trial(key, lambda: given_)
    assert measured_ == {"arm": {"ms": 0.1}, "pair": [1, None], "4": [float("inf")]}
    assert Ledger(json.loads(json.dumps(kept))).trial(key, lambda: pytest.fail("measured again")) == measured_


def test_a_key_is_its_cell_arms_number_and_seed_in_whatever_order_the_arms_come():
    assert str(Key("a", ("x", "y"), 1, 2)) == str(Key("a", ["y", "x"], 1, 2))
    keys = [Key("a", ("x",), 1, 2), Key("b", ("x",), 1, 2), Key("a", ("y",), 1, 2), Key("a", ("x",), 2, 2)]
    assert len({*map(str, keys), str(Key("a", ("x",), 1, 3))}) == 5
    ledger = Ledger()
    ledger.trial(keys[0], lambda: 1)
    with pytest.raises(ValueError, match="twice"):
        ledger.trial(keys[0], lambda: 1)


@pytest.mark.parametrize("changed", ["commit", "sources", "packages", "settings", "weights", "cpu", "memory_bytes"])
def test_trials_of_another_machine_model_or_code_are_kept_but_not_taken_up(changed, tmp_path, monkeypatch, capsys):
    file = tmp_path / "found.json"
    sitting(file, 5)
    before = trials_beside(file).read_text()
    real = identity
    monkeypatch.setattr("harness.sitting.identity", lambda *args, **more: real(*args, **more) | {changed: "another"})
    trials, document = sitting(file)
    assert len(trials) == TRIALS
    assert "sittings" not in document["manifest"]
    assert (tmp_path / "found.1.trials.jsonl").read_text() == before
    assert f"of another {changed}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "other",
    [{"asked": Asked(quick=True)}, {"asked": Asked(model="other")}, {"trials": 3}, {"asked": Asked(anew=True)}],
    ids=["quick", "model", "parameters", "anew"],
)
def test_so_are_those_of_another_command(other, tmp_path):
    file = tmp_path / "found.json"
    sitting(file, 5)
    trials, _ = sitting(file, **other)
    assert len(trials) == 2 * other.get("trials", 4) + 1
    for number in (2, 3):
        sitting(file, trials=number + 10)
        assert (tmp_path / f"found.{number}.trials.jsonl").exists()


def test_a_run_that_came_to_its_end_is_not_repeated_unless_asked_for(tmp_path, capsys):
    file = tmp_path / "found.json"
    _, first = sitting(file)
    trials, again = sitting(file)
    assert trials == []
    assert again == json.loads(json.dumps(first))
    assert "--anew" in capsys.readouterr().err
    trials, _ = sitting(file, 3, asked=Asked(anew=True))
    assert len(trials) == 3
    trials, _ = sitting(file)
    assert len(trials) == TRIALS - 3, "the newer measurement goes on, although an older result lies there"


def test_a_result_that_was_lost_is_made_again_from_its_trials(tmp_path):
    file = tmp_path / "found.json"
    sitting(file)
    text = file.read_text()
    file.unlink()
    trials, _ = sitting(file)
    assert trials == []
    assert result_of(json.loads(file.read_text())) == result_of(json.loads(text))
    assert [one.name for one in tmp_path.iterdir() if "partial" in one.name] == []


def test_two_runs_cannot_write_the_same_results(tmp_path):
    file = tmp_path / "found.json"
    with Journal(trials_beside(file), {}), pytest.raises(JournalInUse, match="another run"):
        sitting(file)


def test_a_file_that_is_no_journal_is_set_aside(tmp_path):
    file = tmp_path / "found.json"
    trials_beside(file).write_text('{"key": "what is this"}\n')
    trials, _ = sitting(file)
    assert len(trials) == TRIALS
    assert (tmp_path / "found.1.trials.jsonl").exists()


def test_the_identity_changes_with_the_model_and_the_settings_and_not_with_a_key(tmp_path, monkeypatch):
    experiment = dataclasses.replace(MadeUp(Clock()), model=str(tmp_path))

    def now():
        return identity(experiment, quick=False)

    monkeypatch.delenv("RETIRE_ARM_MS", raising=False)
    before = now()
    assert json.loads(json.dumps(before)) == before
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert now() == before
    monkeypatch.setenv("RETIRE_ARM_MS", "1")
    assert now() != before
    monkeypatch.delenv("RETIRE_ARM_MS")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert now() != before
    assert str(tmp_path / "model.safetensors") not in json.dumps(now())


def test_a_dirty_tree_is_known_by_the_content_of_its_sources(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.manifest.ROOT", tmp_path)
    (tmp_path / "retire").mkdir()
    for name in ("gate.py", "pins.toml", "notes.txt"):
        (tmp_path / "retire" / name).write_text(name)
    before = list(contents([tmp_path / "retire"]))
    assert [line.split()[0] for line in before] == ["retire/gate.py", "retire/pins.toml"]
    (tmp_path / "retire" / "notes.txt").write_text("other")
    assert list(contents([tmp_path / "retire"])) == before
    (tmp_path / "retire" / "gate.py").write_text("other")
    assert list(contents([tmp_path / "retire"])) != before


# ---------------------------------------------------------------- progress


def test_the_time_left_is_what_the_trials_of_each_cell_took():
    progress = Progress()
    progress.plan({"fast": 3, "slow": 2})
    assert (progress.trials_done, progress.trials, progress.left_s()) == (0, 5, None)
    assert str(progress) == "0 of 5"
    progress.done("fast", 2.0)
    assert progress.left_s() == 4 * 2.0, "no slow one was seen"
    progress.done("slow", 100.0)
    assert progress.left_s() == 2 * 2.0 + 1 * 100.0
    progress.done("fast", 4.0)
    assert progress.left_s() == 3.0 + 100.0
    assert str(progress) == "3 of 5, 2 min left"
    progress.plan({"fast": 1})
    assert progress.left_s() == 2 * 3.0 + 100.0


def test_what_was_not_seen_yet_takes_time_by_its_size():
    progress = Progress()
    progress.plan({"whole": 2}, 10)
    progress.plan({"small": 3, "tiny": 2}, 2)
    progress.done("whole", 100.0)
    assert progress.left_s() == 100.0 + 5 * 20.0
    progress.done("small", 12.0)
    pace = 112.0 / 12
    assert progress.left_s() == pytest.approx(100.0 + 2 * 12.0 + 2 * 2 * pace)


def test_more_trials_than_planned_leave_nothing_to_wait_for():
    progress = Progress()
    progress.plan({"a": 1})
    for _ in range(3):
        progress.done("a", 1.0)
    assert (progress.trials_done, progress.trials, progress.left_s()) == (3, 3, 0.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e4)), max_size=20), st.integers(0, 9))
def test_progress_ends_at_nothing_left(done, more):
    progress = Progress()
    progress.plan({cell: sum(one == cell for one, _ in done) for cell in "abc"})
    for cell, took_s in done:
        progress.done(cell, took_s)
    assert progress.trials == progress.trials_done == len(done)
    assert progress.left_s() in (0.0, None)
    progress.plan({"a": more})
    assert (progress.left_s() or 0.0) >= 0.0


def test_what_was_taken_up_counts_and_tells_how_long_the_rest_takes(tmp_path, capsys):
    times = iter(range(0, 1000, 5))
    kept = []
    first = Ledger(write=kept.append, clock=lambda: next(times))
    experiment = MadeUp(Clock(left=6))
    with pytest.raises(Interruption):
        experiment.run(first, quick=False)
    shown = []
    again = Ledger(kept, show=lambda progress: shown.append(str(progress)), clock=lambda: next(times))
    MadeUp(Clock()).run(again, quick=False)
    assert again.earlier_trials == 6
    assert shown == ["7 of 9, 10 s left", "8 of 9, 5 s left", "9 of 9, 0 s left"]


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0 s"), (99.4, "99 s"), (100, "2 min"), (5939, "99 min"), (6000, "1 h 40 min")]
)
def test_lengths_of_time_for_people(seconds, said):
    assert span(seconds) == said


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stderr", "bars"), [(Terminal(), True), (io.StringIO(), False)], ids=["terminal", "file"])
def test_a_terminal_gets_a_bar_and_a_file_a_line_for_each_trial(stderr, bars, monkeypatch):
    monkeypatch.setattr("sys.stderr", stderr)
    measured(MadeUp(Clock()), ASKED)
    said = stderr.getvalue()
    assert ("made-up: 9 of 9, 0 s left |" in said) == bars
    assert ("  9 of 9, 0 s left\n" in said) == (not bars)
    assert said.count("\n") == (0 if bars else TRIALS)
