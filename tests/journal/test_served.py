"""The journal of a real server: a transition is all in it, under every process's own hand."""

from __future__ import annotations

import pytest

from retire.cli import main
from tests.support import completion, fresh_salt, supersede_inside_a_step, text_ids

OF_A_TRANSITION = {
    *("OPENED", "PLACED", "ISSUED", "ADVANCED", "FRAME", "RESPONSE", "RETURNED"),
    *("MAPPED", "ADMITTED", "LAUNCHED", "RECEIPT", "STEPPED", "CUT", "PINNED", "CERTIFIED", "ADOPTED", "RELEASED"),
    *("SHARED", "GONE", "ENDED"),
}


@pytest.mark.engine
def test_a_transition_is_in_the_journal_and_the_checker_agrees_with_it(tiny_server, scope, capsys):
    url, salt = tiny_server.url, fresh_salt()

    def make(attempt):
        ids = text_ids(url, 7000, seed=77_000 + attempt)
        return (
            completion(ids, cache_salt=salt),
            completion(ids[:4100] + text_ids(url, 60, seed=78_000 + attempt), stream=True, cache_salt=salt),
        )

    supersede_inside_a_step(url, scope, make, "stop")
    report = tiny_server.examined()
    assert [str(finding) for finding in report.violated] == []
    assert report.unknown == []
    assert set(report.counts) >= OF_A_TRANSITION
    assert report.pinned == 0
    assert main(["check", str(tiny_server.journal_dir)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "holds"
