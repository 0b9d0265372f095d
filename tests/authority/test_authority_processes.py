"""Claims about the table that only real processes can prove."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retire.authority import Authority, AuthorityTable
from retire.core.errors import SeamError

ROOT = Path(__file__).parents[2]
TWICE = 2**32 + 1


@contextlib.contextmanager
def child(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("children.py")), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the child died"
    return json.loads(line)


def test_no_load_sees_a_torn_store(tmp_path: Path) -> None:
    table = AuthorityTable.create(tmp_path / "table")
    with child("store_words", tmp_path / "table") as writer:
        seen, last, deadline_s = 0, 0, time.monotonic() + 60
        while last < 200_000 * TWICE or seen < 20_000:
            for _ in range(10_000):
                word = table.raw(0)
                if word != last:
                    assert word >> 32 == word & 0xFFFFFFFF, f"torn: {word:#x}"
                    assert word > last
                    seen, last = seen + 1, word
            assert writer.poll() is None
            assert time.monotonic() < deadline_s, f"only {seen} loads ran beside the writer"
        table._store_scope(1, 0, 1)
        assert answer(writer) >= 200_000
    table.close()


def test_compare_and_store_from_two_processes_loses_no_update(tmp_path: Path) -> None:
    each = 4000
    table = AuthorityTable.create(tmp_path / "table")
    slot = table.insert(0, 77, 1)
    first = table.raw(slot)
    arguments = ("advance_often", tmp_path / "table", 77, each)
    with child(*arguments) as one, child(*arguments) as other:
        won = answer(one) + answer(other)
    assert sorted(won) == list(range(first + 1, first + 1 + 2 * each))
    assert table.epoch(slot) == 2 * each + 1
    table.close()


def test_a_writer_in_another_process_waits(tmp_path: Path) -> None:
    table = AuthorityTable.create(tmp_path / "table")
    slot = table.insert(0, 77, 1)
    first = table.raw(slot)
    with child("race", tmp_path / "table", slot, 77, first, 1) as writer:
        with table.locked(), table.locked():
            assert answer(writer) == "ready"
            time.sleep(0.3)
            assert table.raw(slot) == first
        assert answer(writer) == [first]
    table.close()


def test_a_forked_child_excludes_its_parent(tmp_path: Path) -> None:
    table = AuthorityTable.create(tmp_path / "table")
    slot = table.insert(0, 77, 1)
    first = table.raw(slot)
    ours, theirs = os.pipe()
    child_pid = os.fork()
    if child_pid == 0:
        with table.locked():
            os.write(theirs, b"x")
            time.sleep(0.3)
            table.advance(slot, 77, first, 1)
        os._exit(0)
    assert os.read(ours, 1) == b"x"
    with table.locked():
        assert table.raw(slot) == first + 1
    assert os.waitpid(child_pid, 0)[1] == 0
    os.close(ours)
    os.close(theirs)
    table.close()


def test_of_two_processes_that_advance_one_epoch_exactly_one_wins(tmp_path: Path) -> None:
    rounds = 500
    table = AuthorityTable.create(tmp_path / "table")
    slot = table.insert(0, 77, 1)
    first = table.raw(slot)
    arguments = ("race", tmp_path / "table", slot, 77, first, rounds)
    with child(*arguments) as one, child(*arguments) as other:
        assert answer(one) == answer(other) == "ready"
        won = answer(one) + answer(other)
    assert sorted(won) == list(range(first, first + rounds))
    assert table.epoch(slot) == rounds + 1
    table.close()


def test_the_mapping_survives_the_death_of_its_owner_exactly(tmp_path: Path) -> None:
    with child("own_and_die", tmp_path, "boot-1", 9) as owner:
        assert answer(owner) == 10
        assert owner.wait(10) == -9
    with Authority.open(tmp_path, boot_id="boot-1") as authority:
        assert authority.resolve("default", "s").epoch == 10
        assert [status.scope for status in authority.page("default")] == ["s"]
        table = AuthorityTable.open(authority.table_path)
        assert sum(table.live_rows(slot) for slot in range(table.scopes_per_tenant)) == 0, "a dead server's ticket"
        table.close()


def test_after_the_loss_of_the_host_every_epoch_is_higher(tmp_path: Path) -> None:
    with child("own_and_die", tmp_path, "boot-1", 9) as owner:
        last = answer(owner)
        assert owner.wait(10) == -9
    with Authority.open(tmp_path, boot_id="boot-2") as authority:
        assert authority.resolve("default", "s").epoch > last
        assert authority.resolve("default", "created after the last sync").epoch > last


def test_a_second_server_is_kept_off_the_directory(tmp_path: Path) -> None:
    with child("own_and_wait", tmp_path) as owner:
        pid = answer(owner)
        with pytest.raises(SeamError, match=f"in use by process {pid}"):
            Authority.open(tmp_path)
    with Authority.open(tmp_path), pytest.raises(SeamError, match=f"in use by process {os.getpid()}"):
        Authority.open(tmp_path)
