"""`retire traces`, as from a shell."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from retire import cli
from tests.traces.records import LOGS, aborted, meta, started, write
from traces.extract import extract


def run(*arguments):
    return cli.main(["traces", *map(str, arguments)])


def test_from_logs_to_rows_to_figures(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    assert run("extract", LOGS, "--out", rows) == 0
    told = capsys.readouterr()
    assert told.out == ""
    assert {"files: 9", "transitions: 11", "turns: 20", "aborts: 12"} <= set(told.err.splitlines())
    assert run("extract", LOGS) == 0
    assert capsys.readouterr().out == rows.read_text()
    assert run("stats", rows, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["transitions"], found["scopes"]) == (11, 9)
    assert found["agents"] == {"codex": 6, "opencode": 2, "claude": 2, "gemini": 1}
    assert run("stats", rows, rows) == 0
    assert "transitions: 22" in capsys.readouterr().out


def test_broken_lines_are_told_and_are_no_failure(tmp_path, capsys):
    log = write(tmp_path / "log.jsonl", meta(0), b"{", b"}", started(1, "a"), aborted(2, "a"), started(3, "b"))
    assert run("extract", log) == 0
    told = capsys.readouterr()
    assert "broken lines: 2" in told.err.splitlines()
    assert len(told.out.splitlines()) == 1


def test_the_number_of_a_source_can_be_chosen(capsys):
    assert run("extract", LOGS / "gemini.json", "--source", 7) == 0
    assert json.loads(capsys.readouterr().out)["source"] == "S07"


def test_sources_and_files_keep_their_clocks_apart(tmp_path, capsys):
    for number in (1, 2):
        run("extract", LOGS / "opencode.json", "--source", number, "--out", tmp_path / str(number))
    both = tmp_path / "both"
    both.write_bytes((tmp_path / "1").read_bytes() + (tmp_path / "2").read_bytes())
    found = []
    for files in ([both], [tmp_path / "1", tmp_path / "2"], [tmp_path / "1", tmp_path / "1"]):
        capsys.readouterr()
        assert run("stats", *files, "--json") == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] == found[2]
    assert (found[0]["sources"], found[0]["scopes"]) == (2, 2)


def test_the_papers_window_is_the_papers(tmp_path, capsys):
    assert run("generate", "--seed", 3, "--window", "paper", "--out", tmp_path / "rows") == 0
    assert run("stats", tmp_path / "rows", "--json") == 0
    window = json.loads(capsys.readouterr().out)["densest_window"]
    assert (window["transitions"], window["scopes"], window["bursts"]) == (24, 3, [8, 8, 8])
    assert window["inter_arrival_cv"] == pytest.approx(3.568, abs=0.01)


def test_sessions_are_drawn(capsys):
    drawn = []
    for seed in (1, 1, 2):
        assert run("generate", "--seed", seed, "--sessions", 5, "--hours", 0.5) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_cannot_be_done_is_said_in_one_line(tmp_path, capsys):
    (tmp_path / "bad").write_text("{}\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").touch()
    for arguments, says in (
        (["extract", tmp_path / "nothing"], "no log could be read"),
        (["stats", tmp_path / "nothing"], "cannot be read"),
        (["stats", tmp_path], "cannot be read"),
        (["stats", tmp_path / "binary"], "cannot be read"),
        (["stats", tmp_path / "bad"], "line 1: source is missing"),
        (["stats", tmp_path / "empty"], "there is no transition in it"),
    ):
        assert run(*arguments) == 1
        assert capsys.readouterr().err.splitlines()[-1].startswith("retire: ")
        assert run(*arguments) == 1
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["extract"], ["stats"], ["generate"], ["generate", "--seed", "x"], ["extract", "x", "--source", "me"]),
        *(
            ["generate", "--seed", "1", "--sessions", "0"],
            ["stats", "x", "--window", "nan"],
            ["generate", "--hours", "-1"],
        ),
        *(["extract", "x", "--out", "/nowhere/x"], ["generate", "--seed", "1", "--window", "other"]),
    ],
)
def test_wrong_usage_leaves_with_2(arguments):
    with pytest.raises(SystemExit) as left:
        run(*arguments)
    assert left.value.code == 2


def test_rows_of_an_extraction_do_not_depend_on_the_order_of_files():
    paths = sorted(map(str, LOGS.iterdir()))
    assert extract(paths).rows == extract(paths[::-1]).rows == extract([str(LOGS)]).rows


def test_a_reader_that_leaves_is_no_error():
    command = [sys.executable, "-m", "retire.cli", "traces", "generate", "--seed", "1", "--sessions", "2000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.stdout.close()
        _, said = running.communicate()
    assert b"Traceback" not in said
    assert running.returncode == 141
