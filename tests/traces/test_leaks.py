"""Rows hold nobody's words: no text, path, name or id of a log comes out, in rows or in what is printed."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retire import cli
from tests.traces.records import LOGS, aborted, answered, counted, event, meta, read, said, started, stopped, write
from traces.rows import Agent, Reason, StartKind, Transition

SECRET = "Zebra"
WORDS = {*Agent, *Reason, *StartKind, "S01"} | {field.name for field in fields(Transition)} | {"delta_tokens"}
NUMBERS = re.compile(r"true|false|null|-?\d+(\.\d+)?(e-?\d+)?")
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.just(SECRET), lambda inner: st.lists(inner, max_size=2)
)


def tainted(value, *, keep):
    """The same record with a secret in every string, but for those that say what kind of record it is."""
    if isinstance(value, dict):
        return {key: inner if key in keep else tainted(inner, keep=keep) for key, inner in value.items()} | {
            SECRET: SECRET
        }
    if isinstance(value, list):
        return [tainted(inner, keep=keep) for inner in value]
    return f"{SECRET} {value} /home/{SECRET}" if isinstance(value, str) else value


def words_of(text):
    return set(re.findall(r'"([^"]*)"', text))


def assert_holds_only_numbers_and_known_words(text):
    assert words_of(text) <= WORDS
    for row in text.splitlines():
        for field in re.sub(r'"[^"]*"', "", row).strip("{}").replace(":", ",").split(","):
            assert not field.strip() or NUMBERS.fullmatch(field.strip()), field


@pytest.mark.parametrize("log", sorted(path.name for path in LOGS.iterdir()))
def test_secrets_in_every_string_of_a_log_stay_there(log, tmp_path, capfd):
    keep = {"type", "timestamp", "role", "name", "reason", "subtype", "messages"}
    path = LOGS / log
    text = path.read_text(encoding="utf-8")
    records = [json.loads(text)] if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    place = tmp_path / SECRET
    place.mkdir()
    lines = []
    for record in records:
        line = json.dumps(tainted(record, keep=keep))
        # What an abort is told by is a text itself.
        for marker in (
            "[Request interrupted by user for tool use]",
            "[Request interrupted by user]",
            "Request cancelled.",
        ):
            line = line.replace(f"{SECRET} {marker} /home/{SECRET}", marker)
        lines.append(line.encode())
    write(place / f"{SECRET}{path.suffix}", *lines, b"{" + SECRET.encode(), f'{{"{SECRET}"}}'.encode())
    rows = tmp_path / "rows"
    assert cli.main(["traces", "extract", str(place), "--out", str(rows)]) == 0
    told = capfd.readouterr()
    assert "transitions:" in told.err, "something was found in it"
    for out in (rows.read_text(encoding="utf-8"), told.out, told.err):
        assert SECRET.lower() not in out.lower()
        assert str(place) not in out
    assert_holds_only_numbers_and_known_words(rows.read_text(encoding="utf-8"))
    assert len(rows.read_text(encoding="utf-8").splitlines()) >= 1


@settings(max_examples=200)
@given(st.data())
def test_whatever_stands_where_a_number_or_a_word_should_be(tmp_path_factory, data):
    """Some field of some record is something else."""
    records = [
        *(
            meta(0),
            started(1, "a", started_at=1767247201),
            event(2, "user_message", message="x"),
            counted(3, 9, 8, 7, 6),
        ),
        *(aborted(5, "a", duration_ms=4000, completed_at=1767247205), started(9, "b"), counted(10, 9, 8, 7, 16)),
    ]
    if data.draw(st.booleans()):
        records = [said(0, "a"), answered(1, "b"), stopped(5, "c"), said(9, "d"), answered(10, "e")]
    record = data.draw(st.sampled_from(records))
    while True:
        key = data.draw(st.sampled_from(sorted(record)))
        if not isinstance(record[key], dict) or data.draw(st.booleans()):
            break
        record = record[key]
    record[key] = data.draw(ANYTHING)
    found = read(write(tmp_path_factory.mktemp("log") / "log.jsonl", *records))
    for row in found.rows:
        assert_holds_only_numbers_and_known_words(row.to_json())
        assert Transition.from_json(row.to_json()).to_json() == row.to_json()


def test_a_number_that_is_somebodys_id_is_no_count(tmp_path):
    phone = 4915112345678
    records = [meta(0), counted(1, phone, phone, phone), aborted(5, "a", duration_ms=phone), started(9, "b")]
    (row,) = read(
        write(tmp_path / "log.jsonl", *records, counted(10, phone), event(11, "user_message", message=phone))
    ).rows
    assert str(phone) not in row.to_json()
    assert "5112345" not in row.to_json()


def test_rows_do_not_tell_the_day(tmp_path):
    days = [[said(day, "a"), stopped(day + 5, "b"), said(day + 9, "c")] for day in (0, 86_400 * 400)]
    first, second = (read(write(tmp_path / f"{n}.jsonl", *records)).rows for n, records in enumerate(days))
    assert first == second
