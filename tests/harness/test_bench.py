"""`retire bench` around an experiment that needs no server."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from harness import bench
from harness.experiment import Cell, Result, Target
from harness.manifest import commit
from harness.server import ServerFailed
from harness.statistics import Verdict
from retire import cli

GOOD = Result(
    cells=[Cell({"tokens": 4}, {"cold": {"ttft_ms": [30.0, 33.0]}, "warm": {"ttft_ms": [1.0, 1.0]}})],
    summary={"speedup": 31.234567, "speedup_ci95": [30.0, 33.0], "trials": 2},
    checks={"equal": True},
    targets=[Target("speedup", "33.8×", "≥ 34", Verdict.NOT_REACHED)],
    model="tiny",
    seal={"pins": "abc", "vllm": "0.32.0"},
)


@dataclass
class Fake:
    """An experiment whose result is known."""

    result: Result = GOOD
    name: str = "fake"
    paper: str = "§0"
    asked: list[bool] = field(default_factory=list)

    def run(self, *, quick):
        self.asked.append(quick)
        return self.result


def with_checks(**checks):
    return Fake(Result(cells=GOOD.cells, summary=GOOD.summary, checks=checks))


def test_a_correct_run_that_misses_its_target_exits_with_0_and_says_both(capsys):
    fake = Fake()
    assert bench.main(["fake"], [fake]) == 0
    assert fake.asked == [False]
    shown = capsys.readouterr().out
    (row,) = [line for line in shown.splitlines() if line.startswith("  speedup")]
    assert row.split("  ")[1:] == ["speedup", "33.8×", "≥ 34", "31.23 [30, 33]", "not reached"]
    assert "trials: 2" in shown
    assert "ok   equal" in shown
    assert shown.rstrip().endswith("correct")


@pytest.mark.parametrize("checks", [{"equal": False, "rest": True}, {}])
def test_a_failed_check_or_none_at_all_fails_the_run(checks, capsys):
    assert bench.main(["fake"], [with_checks(**checks)]) == 1
    shown = capsys.readouterr().out
    assert "NOT CORRECT" in shown
    assert ("NOT  equal" in shown) == bool(checks)


def test_the_document_has_the_one_cell_at_its_top_and_what_was_measured_in_full(tmp_path, capsys):
    file = tmp_path / "found.json"
    fake = Fake()
    assert bench.main(["fake", "--quick", "--json", str(file)], [fake]) == 0
    assert fake.asked == [True]
    document = json.loads(file.read_text())
    assert set(document) == {"cell", "arms", "summary", "targets", "checks", "manifest"}
    assert document["cell"] == {"tokens": 4}
    assert document["arms"]["cold"] == {"ttft_ms": [30.0, 33.0]}
    assert document["summary"]["speedup"] == 31.234567, "not rounded"
    assert document["targets"] == [{"key": "speedup", "paper": "33.8×", "aim": "≥ 34", "verdict": "not reached"}]
    assert document["checks"] == {"equal": True}
    manifest = document["manifest"]
    assert (manifest["bench"], manifest["quick"], manifest["model"]) == ("fake", True, "tiny")
    assert (manifest["pins"], manifest["vllm"]) == ("abc", "0.32.0")
    assert manifest["cores"] >= 1
    assert manifest["memory_bytes"] > 2**20
    assert {"commit", "dirty", "torch", "python", "cpu", "date"} <= set(manifest)


def test_several_cells_stand_in_a_list(tmp_path):
    file = tmp_path / "found.json"
    two = Result(cells=[*GOOD.cells, Cell({"tokens": 16}, {})], summary={}, checks={"equal": True})
    assert bench.main(["fake", "--json", str(file)], [Fake(two)]) == 0
    document = json.loads(file.read_text())
    assert set(document) == {"cells", "summary", "targets", "checks", "manifest"}
    assert [cell["cell"]["tokens"] for cell in document["cells"]] == [4, 16]
    assert document["manifest"]["pins"] == "unknown", "no server told of any"


def test_a_failed_run_is_written_too(tmp_path):
    file = tmp_path / "found.json"
    assert bench.main(["fake", "--json", str(file)], [with_checks(equal=False)]) == 1
    assert json.loads(file.read_text())["checks"] == {"equal": False}


@pytest.mark.parametrize("place", ["nowhere/found.json", ""])
def test_a_path_that_cannot_be_written_is_told_before_anything_runs(place, tmp_path, capsys):
    fake = Fake()
    with pytest.raises(SystemExit) as end:
        bench.main(["fake", "--json", str(tmp_path / place)], [fake])
    assert end.value.code == 2
    assert "cannot write" in capsys.readouterr().err
    assert fake.asked == []


def test_an_unknown_bench_is_a_usage_error_that_names_the_known_ones(capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(["nonsense"], [Fake()])
    assert end.value.code == 2
    assert "fake" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_told_with_the_end_of_its_log(capsys):
    class Broken(Fake):
        def run(self, *, quick):
            raise ServerFailed(f"no such model, quick or not ({quick})")

    assert bench.main(["fake"], [Broken()]) == 1
    assert "no such model" in capsys.readouterr().err


def test_the_registry_has_every_experiment_once_under_its_own_name():
    names = [experiment.name for experiment in bench.EXPERIMENTS]
    assert len(set(names)) == len(names)
    assert {"correctness", "inheritance"} <= set(names)


def test_the_command_line_hands_its_arguments_on(monkeypatch):
    given = []
    monkeypatch.setattr(bench, "main", lambda rest: given.append(rest) or 1)
    assert cli.main(["bench", "fake", "--quick", "--json", "x.json"]) == 1
    assert given == [["fake", "--quick", "--json", "x.json"]]


def test_from_a_shell_an_unknown_bench_leaves_with_2():
    done = subprocess.run(
        [sys.executable, "-m", "retire.cli", "bench", "nonsense"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "inheritance" in done.stderr


def test_the_commit_of_a_checkout_is_known_and_of_anything_else_is_not(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    assert commit(tmp_path) == {"commit": "unknown", "dirty": "unknown"}
    git("init")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-m", "first")
    clean = commit(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "new").write_text("")
    assert commit(tmp_path)["dirty"] is True
