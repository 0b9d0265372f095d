"""Every format and version: what is in the logs is found, whatever they are compressed with."""

from __future__ import annotations

import gzip
import shutil
import subprocess

import pytest

from tests.traces.records import LOGS, read
from traces.rows import Agent, Reason, StartKind

FOUND = {
    # agent, start, reason, abort after the file's first turn, gap: all in seconds
    "codex-user-message.jsonl": [
        ("codex", "user_message", "interrupted", 15.499, 25.001),
        ("codex", "user_message", "replaced", 54.999, 0.04),
    ],
    "codex-task-started.jsonl": [("codex", "task_started", "interrupted", 11.0, 16.0)],
    "codex-turn-started.jsonl": [("codex", "task_started", "review_ended", 30.0, 10.0)],
    "codex-fork.jsonl": [("codex", "task_started", "interrupted", 10.0, 6.0)],
    "codex-subagent.jsonl": [("codex", "task_started", "interrupted", 0.0, 3.0)],
    "claude-1.jsonl": [("claude", "user_prompt", "tool_use", 8.001, 12.0)],
    "claude-2.jsonl": [("claude", "user_prompt", "interrupted", 8.0, 30.0)],
    "opencode.json": [
        ("opencode", "user_prompt", "interrupted", 12.0, 0.0),
        ("opencode", "user_prompt", "interrupted", 20.0, 30.0),
    ],
    "gemini.json": [("gemini", "user_prompt", "interrupted", 9.0, 12.0)],
}


def found(path):
    rows = read(path).rows
    return [(r.agent, r.start_kind, r.reason, round(r.t_abort_s, 3), round(r.gap_s, 3)) for r in rows]


def test_every_log_here_is_expected_of():
    assert {path.name for path in LOGS.iterdir()} == set(FOUND)


@pytest.mark.parametrize("log", FOUND)
def test_every_transition_is_found(log):
    assert found(LOGS / log) == FOUND[log]


@pytest.mark.parametrize("log", FOUND)
def test_compressed_with_gzip_it_says_the_same(log, tmp_path):
    packed = tmp_path / f"{log}.gz"
    packed.write_bytes(gzip.compress((LOGS / log).read_bytes()))
    assert found(packed) == FOUND[log]
    assert found(tmp_path) == FOUND[log], "in a directory it is found by its name"


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs the zstd program to compress with")
@pytest.mark.parametrize("log", FOUND)
def test_compressed_with_zstd_it_says_the_same(log, tmp_path):
    subprocess.run(["zstd", "-q", LOGS / log, "-o", tmp_path / f"{log}.zst"], check=True)
    assert found(tmp_path) == FOUND[log]


def test_all_together_they_are_one_source_and_no_scope_is_mixed_with_another():
    rows = read(LOGS).rows
    assert len(rows) == sum(map(len, FOUND.values()))
    assert {row.source for row in rows} == {"S01"}
    assert len({row.scope for row in rows}) == len(FOUND)
    assert [row.t_start_s for row in rows] == sorted(row.t_start_s for row in rows)
    assert [row.scope for row in rows if row.scope not in {r.scope for r in rows[: rows.index(row)]}] == list(
        range(1, 10)
    )


def test_codex_counts_tokens_of_calls_and_not_of_repetitions():
    (row,) = read(LOGS / "codex-task-started.jsonl").rows
    assert row.aborted_turn_calls == 1
    assert (row.prompt_tokens_before, row.output_tokens_before) == (45000, 200)
    assert (row.prompt_tokens_after, row.cached_tokens_after) == (45400, 45100)
    assert row.delta_tokens == 400
    assert row.common_prefix_lb == 45100, "more than the old prompt: it holds 100 tokens of the old answer"
    assert row.first_record_after_start_s == pytest.approx(5.0)
    assert row.new_prompt_chars == len("by size")


def test_claudes_prompt_is_everything_that_was_read_and_its_output_the_largest_of_a_request():
    (row,) = read(LOGS / "claude-2.jsonl").rows
    assert (row.prompt_tokens_before, row.output_tokens_before) == (44903, 250)
    assert (row.prompt_tokens_after, row.cached_tokens_after) == (9003, 2000)
    assert row.compacted_between
    assert row.aborted_turn_calls == 1
    assert row.aborted_turn_s == pytest.approx(8.0)


def test_codex_compacts_too():
    (row,) = read(LOGS / "codex-turn-started.jsonl").rows
    assert row.compacted_between
    assert (row.agent, row.start_kind, row.reason) == (Agent.CODEX, StartKind.TASK_STARTED, Reason.REVIEW_ENDED)


def test_opencode_flags_what_was_queued_while_the_aborted_turn_ran():
    queued, typed = read(LOGS / "opencode.json").rows
    assert (queued.auto_submit, queued.gap_s, queued.clock_back) == (True, 0.0, False)
    assert (queued.prompt_tokens_before, queued.output_tokens_before) == (40510, 7), "reasoning is output"
    assert (queued.prompt_tokens_after, queued.cached_tokens_after) == (40900, 40200)
    assert queued.first_record_after_start_s == pytest.approx(1.0), "after the abort that it waited for"
    assert not typed.auto_submit


def test_a_message_may_be_queued_for_hours(tmp_path):
    hours = (
        (LOGS / "opencode.json")
        .read_text(encoding="utf-8")
        .replace('"completed": 1767225612000', '"completed": 1767239999000')
    )
    (tmp_path / "log.json").write_text(hours, encoding="utf-8")
    queued = read(tmp_path).rows[-1]
    assert (queued.auto_submit, queued.gap_s, queued.aborted_turn_s) == (True, 0.0, 14399.0)


def test_a_message_that_follows_at_once_was_queued():
    typed, queued = read(LOGS / "codex-user-message.jsonl").rows
    assert (typed.auto_submit, queued.auto_submit) == (False, True)
