"""Nothing that lies in a directory stops the reading, fills the memory or makes it wait."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces.records import LOGS, aborted, event, line, meta, read, said, started, stopped, told, write
from traces import files
from traces.rows import RowError

GOOD = [meta(0), started(1, "a"), aborted(5, "a"), started(9, "b")]
MIB = 1 << 20


@pytest.fixture
def place(tmp_path):
    """A directory with one good log in it, in which something else lies; it has to be read all the same."""
    write(tmp_path / "m-good.jsonl", *GOOD)
    yield tmp_path
    found = read(tmp_path)
    assert told(found.rows) == [(1, 4.0, 4.0)]


# ---------------------------------------------------------------- lines


@pytest.mark.parametrize(
    "damage",
    [
        b"not JSON",
        b'{"timestamp":"2026-01-01T06:00:03.000Z","type":"event_msg","payload":{"type":"task_st',
        b'{"type":"event_msg","payload":}',
        b'"event_msg"',
        b"[1]",
        b"\x00" * 4096,
        b"\xff\xfe\x00event_msg",
        b'{"type":"event_msg","payload":' * 20_000 + b"1" + b"}" * 20_000,
        b'{"type":"event_msg","payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"type":"event_msg","payload":{"type":"token_count","n":' + b"9" * 10_000 + b"}}",
    ],
)
def test_a_broken_line_is_counted_and_skipped(damage, tmp_path):
    found = read(write(tmp_path / "log.jsonl", *GOOD[:2], damage, *GOOD[2:]))
    assert told(found.rows) == [(1, 4.0, 4.0)]
    assert found.counts["broken lines"] == 1


def test_empty_lines_and_other_line_ends_are_no_damage(tmp_path):
    log = write(tmp_path / "log.jsonl", b"", *GOOD, b"  ", b"\r")
    log.write_bytes(b"\xef\xbb\xbf" + log.read_bytes().lstrip().replace(b"\n", b"\r\n"))
    found = read(log)
    assert told(found.rows) == [(1, 4.0, 4.0)]
    assert found.counts["broken lines"] == 0


def test_bytes_that_are_no_utf8_do_not_cost_the_line(tmp_path):
    latin = json.dumps(event(2, "user_message", message="naive")).encode().replace(b"naive", b"na\xefve")
    marker = json.dumps(aborted(5, "a") | {"cwd": "naive"}).encode().replace(b"naive", b"na\xefve")
    assert told(read(write(tmp_path / "log.jsonl", *GOOD[:2], latin, marker, GOOD[3])).rows) == [(1, 4.0, 4.0)]


def test_stamps_of_any_zone_and_precision_are_stamps(tmp_path):
    odd = ["2026-01-01t06:00:05z", "2026-01-01T08:00:09.500000001+02:00"]
    records = [record | {"timestamp": text} for record, text in zip(GOOD[2:], odd, strict=True)]
    assert told(read(write(tmp_path / "log.jsonl", *GOOD[:2], *records)).rows) == [(1, 4.0, 4.5)]


def test_utf16_is_of_no_known_kind(place):
    (place / "a.jsonl").write_bytes("\n".join(map(json.dumps, GOOD)).encode("utf-16"))
    assert read(place).counts["files of no known kind"] == 1


@pytest.mark.parametrize("size", [MIB - 100, MIB, MIB + 1, 3 * MIB])
def test_a_turn_with_a_large_picture_is_found(size, tmp_path):
    picture = [{"type": "text", "text": "see"}, {"type": "image", "source": {"type": "base64", "data": "A" * size}}]
    log = write(
        tmp_path / "log.jsonl", said(0, "a"), stopped(5, "b"), said(9, "c", picture), stopped(11, "d"), said(14, "e")
    )
    found = read(log)
    assert told(found.rows) == [(1, 5.0, 4.0), (1, 11.0, 3.0)]
    assert found.rows[0].new_prompt_chars == 3


def test_what_a_large_text_says_at_its_beginning_still_counts(tmp_path):
    output = said(7, "c", "<local-command-stdout>" + "x\n" * MIB)
    prompt = said(9, "d", "x\n" * MIB)
    (row,) = read(write(tmp_path / "log.jsonl", said(0, "a"), stopped(5, "b"), output, prompt)).rows
    assert row.gap_s == 4.0
    assert row.new_prompt_chars is None, "a text that was cut is not counted"


def test_a_large_line_of_many_small_things_is_given_up(tmp_path):
    many = event(3, "agent_message", parts=[{"a": n} for n in range(MIB // 4)])
    found = read(write(tmp_path / "log.jsonl", *GOOD[:2], many, *GOOD[2:]))
    assert told(found.rows) == [(1, 4.0, 4.0)]
    assert found.counts["lines too long"] == 1


def test_memory_does_not_grow_with_lines_or_files(tmp_path):
    large = [line(2, "response_item", {"output": "x" * 8 * MIB}), event(2, "agent_message", message='\\"' * 4 * MIB)]
    log = write(tmp_path / "log.jsonl", *GOOD[:2], *large, b"\x00" * 16 * MIB, *GOOD[2:])
    tracemalloc.start()
    found = read(log)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert told(found.rows) == [(1, 4.0, 4.0)]
    assert peak < 12 * MIB, "a line has 8 to 16 MiB"


def test_a_line_of_a_gigabyte_is_read_within_a_few_megabytes(tmp_path):
    log = write(tmp_path / "log.jsonl", *GOOD, b'{"type":"event_msg","payload":{"type":"user_message","message":"')
    with log.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.truncate(file.seek(0, os.SEEK_END) + (1 << 30))  # nothing is written: it reads as zeros
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28));"
        "from traces.extract import extract;"
        f"print(len(extract([{str(log)!r}]).rows))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "1", done.stderr


# ---------------------------------------------------------------- files


def test_a_compressed_file_that_is_cut_short_says_what_it_says(place):
    packed = gzip.compress((LOGS / "claude-1.jsonl").read_bytes() + b"\n" + os.urandom(10_000).hex().encode())
    (place / "m-good.jsonl").unlink()
    (place / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    found = read(place)
    assert len(found.rows) == 1
    assert found.counts["files cut short"] == 1
    (place / "a.jsonl.gz").unlink()
    write(place / "m-good.jsonl", *GOOD)


@pytest.mark.parametrize(
    "damage", [b"\x1f\x8b", b"\x1f\x8b" + b"\x00" * 99, gzip.compress(b"x" * 999)[:-12] + b"\xff" * 12]
)
def test_a_damaged_gzip_file_is_counted(place, damage):
    (place / "a.jsonl.gz").write_bytes(damage)
    found = read(place)
    assert found.counts["unreadable"] + found.counts["files cut short"] == 1


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs the zstd program")
def test_a_damaged_zstd_file_is_counted(place):
    whole = subprocess.run(
        ["zstd", "-cq"], input=os.urandom(400_000).hex().encode(), capture_output=True, check=True
    ).stdout
    (place / "a.jsonl.zst").write_bytes(whole[: len(whole) // 2])
    (place / "b.jsonl.zst").write_bytes(whole[:4])
    found = read(place)
    assert found.counts["unreadable"] + found.counts["files cut short"] == 2


def test_without_a_program_for_zstd_that_is_said(place, monkeypatch):
    monkeypatch.setattr(files.shutil, "which", lambda _: None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    (place / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd" + b"\x00" * 20)
    assert read(place).counts["files that need zstd"] == 1


def test_pythons_own_zstd_is_used_where_there_is_one(place, monkeypatch):
    class Library:
        ZstdError = type("ZstdError", (Exception,), {})

        class ZstdFile:
            def __init__(self, raw):
                self.data = [raw.readall()[4:], b"\n"]

            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

            def read1(self, _size):
                if not self.data:
                    raise Library.ZstdError
                return self.data.pop(0)

    monkeypatch.setitem(sys.modules, "compression", Library)
    monkeypatch.setitem(sys.modules, "compression.zstd", Library)
    (place / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd" + (LOGS / "gemini.json").read_bytes())
    found = read(place / "a.jsonl.zst")
    assert len(found.rows) == 1
    assert found.counts["files cut short"] == 1
    (place / "a.jsonl.zst").unlink()


def test_links_pipes_sockets_and_devices_are_left_alone(place):
    (place / "loop").symlink_to(place)
    (place / "a.jsonl").symlink_to(place / "a.jsonl")
    (place / "b.jsonl").symlink_to("/dev/zero")
    (place / "c.jsonl").symlink_to("nowhere")
    os.mkfifo(place / "d.jsonl")
    found = read(place, place / "d.jsonl", "/dev/zero", place / "a.jsonl")
    assert told(found.rows) == [(1, 4.0, 4.0)]
    assert found.counts["links, pipes and devices skipped"] == 6
    assert found.counts["unreadable"] == 1, "a link to itself, asked for by name"


def test_a_pipe_that_takes_a_files_place_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(OSError, match="not a regular file"), files.opened(tmp_path / "log.jsonl"):
        pass


def test_what_may_not_be_read_is_counted(place, monkeypatch):
    for kind in ("closed", "shut"):
        (place / kind).mkdir()
        write(place / kind / "log.jsonl", *GOOD)
    listing, opening = files.Path.iterdir, os.open

    def iterdir(path):
        if path.name == "closed":
            raise PermissionError
        return listing(path)

    def open_(path, *flags):
        if files.Path(path).parent.name == "shut":
            raise PermissionError
        return opening(path, *flags)

    with monkeypatch.context() as patched:
        patched.setattr(files.Path, "iterdir", iterdir)
        patched.setattr(os, "open", open_)
        found = read(place)
    assert told(found.rows) == [(1, 4.0, 4.0)]
    assert found.counts["unreadable"] == 2
    assert read("", place / "nothing", "\0", "x" * 5000).counts["unreadable"] == 3


def test_other_files_are_not_taken_for_logs(place):
    (place / "notes.txt").write_text("x")
    (place / "binary.jsonl").write_bytes(os.urandom(5000))
    (place / "empty.jsonl").touch()
    (place / "package.json").write_text(json.dumps({"name": "x", "scripts": {"a": ["b"]}}, indent=2))
    (place / "list.json").write_text(json.dumps([{"role": "user", "content": "x"}], indent=2))
    found = read(place)
    assert (found.counts["files"], found.counts["files of no known kind"]) == (5, 4)


def test_directories_as_deep_as_they_come(tmp_path):
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(30):  # deeper than a path may be long
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    write(tmp_path / "log.jsonl", *GOOD)
    found = read(tmp_path)
    assert told(found.rows) == [(1, 4.0, 4.0)]
    assert found.counts["unreadable"] == 1
    shutil.rmtree(tmp_path / ("d" * 200), ignore_errors=True)


@pytest.mark.parametrize("cut", range(0, 2500, 100))
def test_a_document_that_is_cut_short_says_what_it_says(cut, tmp_path):
    whole = (LOGS / "opencode.json").read_bytes()
    log = tmp_path / "log.json"
    log.write_bytes(whole[:cut])
    rows = read(log).rows
    assert [row.gap_s for row in rows] == [0.0, 30.0][: len(rows)]


# ---------------------------------------------------------------- anything

SAMPLES = [path.read_bytes() for path in sorted(LOGS.iterdir())]


@settings(max_examples=150)
@given(st.data())
def test_damage_of_any_kind_never_stops_the_reading(tmp_path_factory, data):
    log = bytearray(data.draw(st.sampled_from(SAMPLES)))
    for _ in range(data.draw(st.integers(1, 8))):
        at, until = sorted((data.draw(st.integers(0, len(log))), data.draw(st.integers(0, len(log)))))
        match data.draw(st.sampled_from(["write", "cut", "double", "shuffle"])):
            case "write":
                log[at : at + 8] = data.draw(st.binary(min_size=1, max_size=8))
            case "cut":
                del log[at : min(until, at + 300)]
            case "double":
                log[at:at] = log[at : min(until, at + 300)]
            case "shuffle":
                lines = log.splitlines(keepends=True)
                data.draw(st.randoms(use_true_random=False)).shuffle(lines)
                log = bytearray(b"".join(lines))
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    path.write_bytes(bytes(log))
    for row in read(path).rows:
        assert 0 <= row.gap_s <= 3600
        try:
            assert type(row).from_json(row.to_json()).to_json() == row.to_json()
        except RowError as error:
            raise AssertionError(row) from error


@settings(max_examples=100)
@given(st.binary(max_size=3000))
def test_any_bytes_at_all(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    path.write_bytes(data)
    assert read(path).rows == []
