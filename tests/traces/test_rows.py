"""Rows are lines of JSON, there and back."""

from __future__ import annotations

import io
import json
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces import rows
from traces.rows import Agent, Reason, RowError, StartKind, Transition

TIMES = st.floats(0, 1e8)
COUNTS = st.integers(0, 10**8)
ROWS = st.builds(
    Transition,
    source=st.integers(1, 999).map("S{:02d}".format),
    scope=st.integers(1, 10**6),
    agent=st.sampled_from(Agent),
    start_kind=st.sampled_from(StartKind),
    reason=st.sampled_from(Reason),
    t_abort_s=TIMES,
    t_start_s=TIMES,
    gap_s=TIMES,
    aborted_turn_s=st.none() | TIMES,
    aborted_turn_calls=st.none() | COUNTS,
    prompt_tokens_before=st.none() | COUNTS,
    output_tokens_before=st.none() | COUNTS,
    prompt_tokens_after=st.none() | COUNTS,
    cached_tokens_after=st.none() | COUNTS,
    first_record_after_start_s=st.none() | TIMES,
    compacted_between=st.booleans(),
    new_prompt_chars=st.none() | COUNTS,
    auto_submit=st.booleans(),
    common_prefix_lb=st.none() | COUNTS,
    clock_back=st.booleans(),
)
ROW = Transition(
    source="S01",
    scope=1,
    agent=Agent.CODEX,
    start_kind=StartKind.TASK_STARTED,
    reason=Reason.INTERRUPTED,
    t_abort_s=1.5,
    t_start_s=4.0,
    gap_s=2.5,
)


@settings(max_examples=50)
@given(st.lists(ROWS, max_size=2))
def test_what_is_written_is_read(some):
    out = io.StringIO()
    rows.write(some, out)
    found = list(rows.read(out.getvalue().splitlines(keepends=True)))
    assert len(found) == len(some)
    again = io.StringIO()
    rows.write(found, again)
    assert again.getvalue() == out.getvalue()
    for row, whole in zip(found, some, strict=True):
        for field in fields(Transition):
            before, after = getattr(whole, field.name), getattr(row, field.name)
            assert after == (round(before, 3) if isinstance(before, float) else before)


def test_a_row_of_the_published_set_is_a_row():
    """The same names, with what is unknown left out or null, and a field that is computed here."""
    line = """{"source": "S07", "scope": 4, "agent": "opencode", "start_kind": "user_prompt", "reason": "interrupted",
        "t_abort_s": 10.0, "t_start_s": 12, "gap_s": 2.0, "aborted_turn_s": null, "aborted_turn_calls": 0,
        "prompt_tokens_before": 500, "output_tokens_before": 3, "prompt_tokens_after": 470, "cached_tokens_after": 90,
        "first_record_after_start_s": 1.25, "compacted_between": false, "new_prompt_chars": null, "auto_submit": false,
        "delta_tokens": -30, "common_prefix_lb": 90, "a field of tomorrow": "x"}"""
    row = Transition.from_json(line)
    assert (row.t_start_s, row.aborted_turn_s, row.delta_tokens, row.clock_back) == (12.0, None, -30, False)
    assert json.loads(row.to_json()).items() >= {**json.loads(line), "clock_back": False, "t_start_s": 12.0}.items() - {
        ("a field of tomorrow", "x")
    }


def test_what_has_no_default_is_what_a_row_must_have():
    assert Transition.from_json(ROW.to_json()) == ROW
    for field in json.loads(ROW.to_json()):
        line = json.dumps({key: value for key, value in json.loads(ROW.to_json()).items() if key != field})
        if field in rows._REQUIRED:
            with pytest.raises(RowError, match=f"^{field} is missing"):
                Transition.from_json(line)
        else:
            assert Transition.from_json(line) == ROW
    assert set(rows._READERS) == {field.name for field in fields(Transition)}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"source": "me"}, {"source": 1}, {"scope": "T"}, {"scope": True}, {"agent": "me"}, {"reason": ["x"]}),
        *({"t_start_s": "1"}, {"t_start_s": float("nan")}, {"gap_s": -1.0}, {"gap_s": 10**400}, {"auto_submit": 1}),
        *({"prompt_tokens_before": -1}, {"prompt_tokens_after": 1.5}, {"common_prefix_lb": "x"}),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(wrong):
    (field,) = wrong
    with pytest.raises(RowError, match=f"^{field} "):
        Transition.from_json(json.dumps(json.loads(ROW.to_json()) | wrong))


@pytest.mark.parametrize("line", ["", "x", "[]", "1", "null", "[" * 100_000])
def test_what_is_no_object_is_refused(line):
    with pytest.raises(RowError):
        Transition.from_json(line)


def test_the_line_that_is_no_row_is_named():
    lines = [ROW.to_json(), "", replace(ROW, scope=2).to_json(), "{}"]
    with pytest.raises(RowError, match=r"^line 4: source is missing"):
        list(rows.read(lines))
