"""Records survive what a process does not, and the checker tells a violation from a hole."""

from __future__ import annotations

import errno
import gzip
import lzma
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from retire import checker
from retire.authority.store import Authority
from retire.cli import main
from retire.core import events
from retire.core.effects import Effect
from retire.core.transition import TABLE, place_name
from retire.core.types import Outcome, Refusal
from retire.journal import Kind, recorder, schema
from retire.journal.recorder import Recorder

SLOT, KEY, ROW = 3, 99, 7
SOURCE, TARGET, MOVE = 11, 12, 5


def places():
    return {place_name(place) for place, _ in TABLE}


def test_the_schemas_names_are_the_cores():
    assert set(schema.PLACES) == places()
    assert set(schema.EVENTS) == {event.__name__ for event in events.Event.__args__}
    assert set(schema.EFFECTS) == {effect.__name__ for effect in Effect.__args__}
    assert tuple(refusal.value for refusal in Refusal) == schema.REFUSALS
    assert tuple(outcome.value for outcome in Outcome) == schema.OUTCOMES


def test_every_step_of_the_table_has_a_number_of_its_own():
    steps = {
        (place_name(place), event.__name__, place_name(target))
        for (place, event), row in TABLE.items()
        for target in row.leads_to
    }
    assert {schema.core_step_names(schema.core_step(*step)) for step in steps} == steps


class Server:
    """Two processes' journals: what the engine does goes into the one, the rest into the other."""

    def __init__(self, folder):
        self.api, self.engine = (Recorder(folder, process=name, records=64) for name in ("Api", "Engine"))

    def note(self, kind, **fields):
        of_the_engine = kind is Kind.MAPPED or kind >= Kind.ADMITTED
        (self.engine if of_the_engine else self.api).note(kind, **fields)


@pytest.fixture
def journal(tmp_path):
    return Server(tmp_path / "journal")


def examined(path):
    return checker.examine(*checker.read([path]))


def owner(note, *, upto=3):
    """A table with one scope; `upto`: its last word."""
    note(Kind.OPENED, a=8, c=1)
    note(Kind.PLACED, slot=SLOT, seen=1, epoch=1, key=KEY)
    for word in range(1, upto):
        note(Kind.ADVANCED, slot=SLOT, seen=word + 1, word=word, epoch=word + 1, key=KEY, transition=MOVE + word)


def engine(note):
    """A request is cut, kept, certified, adopted, let go."""
    note(Kind.MAPPED, c=1)
    note(Kind.ADMITTED, slot=SLOT, seen=1, word=1, epoch=1, key=KEY, request=SOURCE)
    note(Kind.STEPPED, epoch=1, key=KEY, a=schema.core_step("IDLE", "RequestAdmitted", "IDLE"))
    note(Kind.LAUNCHED, slot=SLOT, word=1, request=SOURCE, a=1, b=0, c=512)
    note(Kind.RECEIPT, slot=SLOT, word=1, request=SOURCE, a=1, b=0, c=256, flags=1)
    note(Kind.STEPPED, epoch=2, key=KEY, a=schema.core_step("IDLE", "EpochAdvanced", "FENCE"))
    note(Kind.ADMITTED, slot=SLOT, seen=2, word=2, epoch=2, key=KEY, request=TARGET)
    note(Kind.PINNED, request=SOURCE, a=2, b=256, c=77)
    note(Kind.CERTIFIED, key=KEY, transition=MOVE, request=TARGET, a=256, b=77, c=SOURCE)
    note(Kind.ADOPTED, transition=MOVE, request=TARGET, a=256, b=77)
    note(Kind.RELEASED, request=SOURCE)
    note(Kind.ENDED, transition=MOVE)


def test_what_is_right_holds(journal, tmp_path):
    owner(journal.note)
    engine(journal.note)
    report = examined(tmp_path)
    assert (report.status, report.violated, report.unknown) == (0, [], [])
    assert report.records == journal.api.records + journal.engine.records == 4 + 12
    assert report.pinned == 0


def without(kind):
    return lambda calls: [call for call in calls if call[0] is not kind]


def changed(kind, **fields):
    return lambda calls: [(k, {**f, **fields} if k is kind else f) for k, f in calls]


def also(kind, **fields):
    return lambda calls: [*calls, (kind, fields)]


UNHEARD_OF = Kind.ADMITTED, {"slot": SLOT, "seen": 8, "word": 8, "epoch": 8, "key": KEY, "request": 40}


def test_what_an_owner_that_runs_has_not_yet_written_down_is_no_violation(journal, tmp_path):
    owner(journal.note)
    journal.note(Kind.MAPPED, c=1)
    kind, fields = UNHEARD_OF
    journal.note(kind, **fields)
    report = examined(tmp_path)
    assert report.status == 2
    assert "which nobody has stored" in report.unknown[0]


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        (changed(Kind.RECEIPT, c=768), 7),
        (without(Kind.LAUNCHED), 7),
        (without(Kind.PINNED), 4),
        (without(Kind.CERTIFIED), 4),
        (without(Kind.RECEIPT), 5),
        (changed(Kind.PINNED, b=384), 3),
        (changed(Kind.CERTIFIED, a=384), 3),
        (changed(Kind.ADOPTED, b=78), 4),
        (changed(Kind.ADOPTED, a=128), 4),
        (also(Kind.RELEASED, request=SOURCE), 6),
        (also(Kind.ENDED, transition=MOVE), 9),
        (also(Kind.COLD, request=TARGET, a=99), 10),
        (also(Kind.LAUNCHED, slot=SLOT, word=1, request=SOURCE, a=9, b=256, c=512), 1),
        (also(Kind.STEPPED, epoch=2, key=KEY, a=schema.core_step("ALIGN", "RequestAdmitted", "RESUME")), 9),
        (also(Kind.STEPPED, epoch=1, key=KEY, a=schema.core_step("FENCE", "RequestAdmitted", "FENCE")), 2),
        (also(Kind.ADVANCED, slot=SLOT, seen=9, word=3, epoch=4, key=KEY), 2),
        (also(Kind.ADVANCED, slot=SLOT, seen=4, word=3, epoch=3, key=KEY), 2),
        (lambda calls: [*calls, UNHEARD_OF, (Kind.CLOSED, {"c": 1})], 2),
        (also(Kind.ADMITTED, slot=SLOT, seen=1, word=1, epoch=1, key=KEY, request=40), 2),
        (also(Kind.FRAME, slot=SLOT, seen=3, word=1), 1),
        (also(Kind.FRAME, slot=SLOT, seen=1, word=1), 1),
        (also(Kind.RESPONSE, slot=SLOT, seen=1, word=1, a=4, b=3), 1),
        (also(Kind.RESPONSE, slot=SLOT, seen=3, word=2, a=4, b=1), 1),
        (also(Kind.WITHHELD, slot=SLOT, seen=3, word=3), 1),
    ],
)
def test_what_is_wrong_is_named(journal, tmp_path, change, invariant):
    calls = []
    owner(lambda kind, **fields: calls.append((kind, fields)))
    engine(lambda kind, **fields: calls.append((kind, fields)))
    for kind, fields in change(calls):
        journal.note(kind, **fields)
    report = examined(tmp_path)
    assert report.status == 1
    assert invariant in {finding.invariant for finding in report.violated}, list(map(str, report.violated))


def test_a_response_that_ended_before_the_store_is_right(journal, tmp_path):
    owner(journal.note)
    journal.note(Kind.RESPONSE, slot=SLOT, seen=1, word=1, a=4, b=2)  # the last frame passed after record 2
    journal.note(Kind.RESPONSE, slot=SLOT, seen=0, word=1)  # nothing of this one ever passed
    report = examined(tmp_path)
    assert [finding.record.seq for finding in report.violated] == []


def test_a_hole_is_not_a_violation(journal, tmp_path):
    owner(journal.note)
    engine(journal.note)
    (file,) = (tmp_path / "journal").glob("Engine*")
    data = bytearray(file.read_bytes())
    launch = next(at for at in range(128, len(data), 128) if data[at + 16] == Kind.LAUNCHED)
    data[launch + 8] ^= 1
    file.write_bytes(data)
    report = examined(tmp_path)
    assert report.status == 2, list(map(str, report.violated))
    assert any("damaged" in what for what in report.unknown)


def test_files_follow_each_other_and_old_ones_go(tmp_path):
    journal = Recorder(tmp_path, process="Engine", records=8, files=3)
    for number in range(60):
        journal.note(Kind.GONE, request=number)
    assert len(list(tmp_path.iterdir())) == 3
    (found,), _ = checker.read([tmp_path])
    assert [record.request for record in found.records] == list(range(40, 60))
    assert not found.complete


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_compressed_files_are_read_truncated_ones_as_far_as_they_go(journal, tmp_path, suffix, compress):
    owner(journal.note)
    engine(journal.note)
    for file in (tmp_path / "journal").iterdir():
        packed = compress(file.read_bytes())
        file.unlink()
        (tmp_path / "journal" / f"{file.name}{suffix}").write_bytes(packed)
    assert examined(tmp_path).status == 0
    (file,) = (tmp_path / "journal").glob("Engine*")
    file.write_bytes(file.read_bytes()[:-20])
    assert examined(tmp_path).status == 2


def test_any_truncation_of_a_file_reads_as_a_process_that_was_killed(journal, tmp_path):
    owner(journal.note)
    engine(journal.note)
    (file,) = (tmp_path / "journal").glob("Engine*")
    data = file.read_bytes()
    for length in range(128, 15 * 128, 61):
        file.write_bytes(data[:length])
        (found,), strangers = checker.read([file])
        assert not strangers
        assert len(found.records) == min(12, length // 128 - 1)
        assert examined(tmp_path).violated == []


def test_what_is_no_journal_is_told(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("nothing of the kind" * 20)
    assert main(["check", str(tmp_path)]) == 2
    assert "notes.txt: no journal" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "absent")]) == 2


def test_the_command_says_what_it_found(journal, tmp_path, capsys):
    owner(journal.note)
    assert main(["check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "holds"
    journal.note(Kind.FRAME, slot=SLOT, seen=2, word=1)
    assert main(["check", str(tmp_path)]) == 1
    assert "invariant 1: Api-" in capsys.readouterr().out


def test_a_full_disk_ends_in_memory_and_goes_on_when_there_is_room(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    journal = Recorder(tmp_path, process="Engine", records=8)
    journal.note(Kind.GONE, request=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        for number in range(2, 20):
            journal.note(Kind.GONE, request=number)
    assert caplog.text.count("the journal goes on in memory") == 1
    for number in range(20, 40):
        journal.note(Kind.GONE, request=number)
    (found,), _ = checker.read([tmp_path])
    assert {1, 8, 39} <= {record.request for record in found.records}
    assert not found.complete
    journal.dump(tmp_path / "late.journal")


def test_a_killed_process_leaves_every_record(tmp_path):
    code = """
        import sys
        from pathlib import Path
        from retire.journal import Kind
        from retire.journal.recorder import Recorder
        journal = Recorder(Path(sys.argv[1]), process="Engine", records=256)
        while True:
            journal.note(Kind.GONE, request=7)
            print(journal.records, flush=True)
    """
    running = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    told = 0
    while told < 700:
        told = int(running.stdout.readline())
    running.send_signal(signal.SIGKILL)
    rest = running.communicate()[0].split()
    told = int(rest[-1]) if rest else told
    (found,), _ = checker.read([tmp_path])
    assert len(found.records) >= told
    assert found.complete


def test_the_ring_in_memory_can_be_written_down(tmp_path):
    journal = Recorder(None, process="Engine", records=16)
    for number in range(40):
        journal.note(Kind.GONE, request=number)
    journal.dump(tmp_path / "ring.journal")
    (found,), _ = checker.read([tmp_path])
    assert [record.request for record in found.records] == list(range(24, 40))


def test_a_forked_child_writes_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("RETIRE_JOURNAL", str(tmp_path))
    monkeypatch.setattr(recorder, "_recorder", None)
    recorder.note(Kind.GONE, request=1)
    child = os.fork()
    if not child:
        recorder.note(Kind.GONE, request=2)
        os._exit(0)
    os.waitpid(child, 0)
    recorder.note(Kind.GONE, request=3)
    found, _ = checker.read([tmp_path])
    assert sorted([record.request for record in one.records] for one in found) == [[1, 3], [2]]
    assert all(one.complete for one in found)


def test_an_authority_writes_what_the_checker_believes(tmp_path, monkeypatch):
    monkeypatch.setenv("RETIRE_JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setattr(recorder, "_recorder", None)
    for life in range(3):
        with Authority.open(tmp_path / "state", tenants=("acme", "initech"), scopes_per_tenant=16) as authority:
            for number in range(40):  # more than there is room for
                view = authority.resolve("acme", f"s{number}")
                ticket = authority.issue(view)
                for step in range(number % 4):
                    authority.advance("acme", f"s{number}", "*", 1000 * life + 10 * number + step + 1)
                authority.release(ticket)
            authority.advance("acme", "s3", "*", 900 + life)
            if life == 0:
                authority.cancel("acme", "s5")
                authority.resolve("acme", "s5", 77)
    report = examined(tmp_path / "journal")
    assert (report.status, list(map(str, report.violated)), report.unknown) == (0, [], [])
    assert report.counts["ADVANCED"] == 3 * 61
    assert {"OPENED", "PLACED", "CANCELLED", "REVIVED", "ISSUED", "RETURNED", "CLOSED"} <= set(report.counts)


def test_a_record_costs_little_beside_what_it_records():
    """Both in one run: a record, and a JSON line of the same fields, which is what it would otherwise be."""
    import json

    journal = Recorder(None, process="Engine")

    def best(call):
        times = []
        for _ in range(20):
            begun = time.perf_counter_ns()
            for _ in range(1000):
                call()
            times.append(time.perf_counter_ns() - begun)
        return min(times)

    fields = {
        "slot": 3,
        "seen": 2**40,
        "word": 2**40,
        "epoch": 5,
        "key": 2**60,
        "request": 2**61,
        "a": 1,
        "b": 2,
        "c": 3,
    }
    record = best(lambda: journal.note(Kind.LAUNCHED, **fields))
    line = best(lambda: json.dumps({"kind": "launched", "at_ns": time.monotonic_ns(), **fields}))
    assert record < line
