"""`retire bench` around an experiment that needs no server."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest

from harness import bench, burst, publication
from harness.experiment import Cell, Result, Target
from harness.ledger import Key
from harness.manifest import commit, identity
from harness.server import ServerFailed
from harness.session import ServerUnsuitable
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
    own_servers: str = ""
    asked: list[bool] = field(default_factory=list, repr=False)

    def run(self, _ledger, *, quick):
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


@pytest.mark.parametrize("place", ["nowhere/found.json", "", "/dev/null"])
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
        def run(self, _ledger, *, quick):
            raise ServerFailed(f"no such model, quick or not ({quick})")

    assert bench.main(["fake"], [Broken()]) == 1
    assert "no such model" in capsys.readouterr().err


# ---------------------------------------------------------------- all of them


class Broken(Fake):
    def run(self, _ledger, *, quick):
        raise RuntimeError(f"the engine is gone, quick or not ({quick})")


def three(*, second=Broken):
    return [Fake(name="first"), second(name="second"), Fake(name="third")]


def test_all_benches_run_whatever_happens_to_one_and_it_is_named_at_the_end(tmp_path, capsys):
    out = tmp_path / "results"
    benches = three()
    assert bench.main(["all", "--out", str(out)], benches) == 1
    shown = capsys.readouterr()
    assert "the engine is gone" in shown.err
    lines = shown.out.splitlines()
    assert [line.partition(", ")[0] for line in lines if line.startswith(("first: ", "third: "))] == [
        "first: correct",
        "third: correct",
    ]
    assert "second: FAILED: RuntimeError: the engine is gone, quick or not (False)" in lines
    assert any(re.fullmatch(r"\d+ s in all; failed: second", line) for line in lines)
    assert sorted(file.name for file in out.glob("*.json")) == ["first.json", "third.json"]
    assert "first" in (out / "report.md").read_text()
    assert (out / "report.html").stat().st_size > 1000


def test_all_benches_go_on_where_they_were_and_what_was_mended_is_made_up_for(tmp_path, capsys):
    out = tmp_path / "results"
    benches = three()
    assert bench.main(["all", "--out", str(out)], benches) == 1
    again = three(second=Fake)
    assert bench.main(["all", "--out", str(out)], again) == 0
    assert [one.asked for one in again] == [[], [False], []]
    assert "second: correct" in capsys.readouterr().out


def test_a_bench_that_was_not_correct_fails_the_whole_and_stays_so(tmp_path, capsys):
    wrong = Fake(Result(GOOD.cells, GOOD.summary, {"equal": False}, GOOD.targets), name="wrong")
    for _ in range(2):
        assert bench.main(["all", "--out", str(tmp_path)], [Fake(), wrong]) == 1
        assert "wrong: NOT CORRECT" in capsys.readouterr().out
    assert wrong.asked == [False]


def test_some_of_all_can_be_chosen_and_quick_runs_lie_beside_full_ones(tmp_path):
    chosen = three(second=Fake)
    assert bench.main(["all", "--out", str(tmp_path), "--only", "first,second", "--skip", "second"], chosen) == 0
    assert bench.main(["all", "--out", str(tmp_path), "--quick", "--skip", "second,third"], chosen) == 0
    assert [one.asked for one in chosen] == [[False, True], [], []]
    assert sorted(file.name for file in tmp_path.glob("*.json")) == ["first.json", "first.quick.json"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["all"], "--out DIR"),
        (["all", "--out", "x", "--only", "fake,nonsense"], "nonsense"),
        (["fake", "--out", "x"], "--json FILE"),
        (["fake", "--skip", "fake"], "--json FILE"),
        (["all", "--json", "x.json"], "--out DIR"),
    ],
)
def test_what_belongs_to_all_and_what_to_one_is_told(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        bench.main(arguments, [Fake()])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


class Interrupted(Fake):
    """Its first trial is done when SIGTERM comes."""

    def run(self, ledger, *, quick):
        ledger.trial(Key("a", ("x",), 0, 0), lambda: self.asked.append(quick))
        ledger.trial(Key("a", ("x",), 1, 1), self.second)
        return self.result

    def second(self):
        if len(self.asked) == 1:
            self.asked.append("ended")
            os.kill(os.getpid(), signal.SIGTERM)
        return True


def test_sigterm_ends_a_run_as_ctrl_c_does_and_it_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Interrupted, "__repr__", lambda _: "always the same")
    one, file = Interrupted(), str(tmp_path / "found.json")
    assert bench.main(["fake", "--json", file], [one]) == 130
    assert "goes on from here" in capsys.readouterr().err
    assert bench.main(["fake", "--json", file], [one]) == 0
    assert one.asked == [False, "ended"], "the first trial was not repeated"
    assert json.loads((tmp_path / "found.json").read_text())["manifest"]["sittings"] == 2


def test_ctrl_c_ends_all_of_them(tmp_path, capsys):
    class Stopped(Fake):
        def run(self, _ledger, *, quick):
            raise KeyboardInterrupt(quick)

    benches = three(second=Stopped)
    assert bench.main(["all", "--out", str(tmp_path)], benches) == 130
    assert benches[2].asked == []
    assert "goes on from here" in capsys.readouterr().err


# ---------------------------------------------------------------- a running server, another model


@pytest.mark.parametrize("name", ["burst", "churn", "composition", "correctness", "overhead", "retirement", "tenants"])
def test_benches_that_bring_their_servers_refuse_a_running_one_and_say_why(name, capsys):
    assert bench.main([name, "--url", "http://127.0.0.1:9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    reason = {one.name: one.own_servers for one in bench.EXPERIMENTS}[name]
    assert line == f"retire bench: {name} cannot measure a running server: {reason}"
    assert len(reason) > 20


def test_the_others_have_a_place_for_its_address():
    fields = {one.name: {field.name for field in dataclasses.fields(one)} for one in bench.EXPERIMENTS}
    assert {one.name for one in bench.EXPERIMENTS if not one.own_servers} == {"inheritance", "publication"}
    assert all("url" in fields[one.name] for one in bench.EXPERIMENTS if not one.own_servers)


def test_a_bench_without_a_model_of_its_own_choosing_refuses_another(capsys):
    assert bench.main(["fake", "--model", "tiny"], [Fake()]) == 2
    assert "models of its own" in capsys.readouterr().err


@dataclass(frozen=True)
class Choosing:
    """An experiment that takes what it is given."""

    model: str = "its own"
    url: str = ""
    name: str = "choosing"
    paper: str = "§0"
    own_servers: str = ""

    def run(self, _ledger, *, quick):
        return Result(GOOD.cells, {"url": self.url, "quick": quick}, {"equal": True}, model=self.model)


@pytest.mark.parametrize(
    ("arguments", "model", "url"),
    [
        ([], "its own", ""),
        (["--model", "other"], "other", ""),
        (["--url", "{url}/"], "served", "{url}"),
        (["--url", "{url}", "--model", "served"], "served", "{url}"),
    ],
)
def test_model_and_address_reach_the_experiment(arguments, model, url, tmp_path, running):
    file = tmp_path / "found.json"
    arguments = [one.format(url=running.url) for one in arguments]
    assert bench.main(["choosing", "--json", str(file), *arguments], [Choosing()]) == 0
    document = json.loads(file.read_text())
    assert document["manifest"]["model"] == model
    assert document["summary"]["url"] == url.format(url=running.url)


@pytest.mark.parametrize(
    ("answers", "more", "said"),
    [
        ({"/retire/status": None}, [], "no RETIRE"),
        ({"/v1/models": {"data": [{"id": "short", "max_model_len": 2048}]}}, [], "8192 are needed"),
        ({}, ["--model", "other"], "serves served"),
        ({"/v1/models": {"data": [{"id": "a"}, {"id": "b"}]}}, [], "name one with --model"),
    ],
)
def test_a_running_server_that_cannot_be_measured_is_told(answers, more, said, running, capsys):
    running.answers |= answers
    assert bench.main(["choosing", "--url", running.url, *more], [Choosing()]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_running_server_of_other_patches_does_not_take_up_trials(running, tmp_path, capsys):
    arguments = ["choosing", "--json", str(tmp_path / "found.json"), "--url", running.url]
    assert bench.main(arguments, [Choosing()]) == 0
    running.answers["/retire/status"] = {"seal": {"pins": "def"}}
    assert bench.main(arguments, [Choosing()]) == 0
    assert "of another served" in capsys.readouterr().err


def test_publication_needs_the_route_by_which_vllm_aborts(running):
    session = SimpleNamespace(url=running.url)
    running.answers["/openapi.json"] = {"paths": {publication.ABORT: {}}}
    publication._expect_abort(session)
    running.answers["/openapi.json"] = {"paths": {"/v1/completions": {}}}
    with pytest.raises(ServerUnsuitable, match="--enable-scale-out"):
        publication._expect_abort(session)


def test_a_trace_is_part_of_what_is_measured(tmp_path):
    file = tmp_path / "trace.jsonl"
    found = []
    for text in ("one", "two", "two"):
        file.write_text(text)
        found.append(identity(dataclasses.replace(burst.Burst(), trace=file), quick=True))
    assert found[0] != found[1] == found[2]


def test_nobody_at_the_address_is_told_in_a_line(capsys):
    assert bench.main(["choosing", "--url", "http://127.0.0.1:9"], [Choosing()]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("retire bench: no answer from http://127.0.0.1:9")


@pytest.fixture
def running():
    """A server as far as it says what it is.  `answers`: per path."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            answer = self.server.answers.get(self.path)
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.answers = {
        "/retire/status": {"seal": {"pins": "abc"}},
        "/v1/models": {"data": [{"id": "served", "max_model_len": 8192}]},
    }
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


# ---------------------------------------------------------------- the registry


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
