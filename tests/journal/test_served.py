"""The journal of a real server: a transition is all in it, under every process's own hand."""

from __future__ import annotations

import pytest

from harness.client import http
from harness.exploration.search import explore
from harness.exploration.world import Rules
from harness.exploration.worlds import SMALL
from retire import checker
from retire.authority.table import scope_key
from retire.cli import main
from retire.journal import U64, Kind
from retire.journal.schema import EFFECTS, core_step_names
from tests.support import completion, fresh_salt, said, supersede_inside_a_step, text_ids, wait_for_scope

OF_A_TRANSITION = {
    *("OPENED", "PLACED", "ISSUED", "ADVANCED", "FRAME", "RESPONSE", "RETURNED"),
    *("MAPPED", "ADMITTED", "LAUNCHED", "RECEIPT", "STEPPED", "CUT", "PINNED", "CERTIFIED", "ADOPTED", "RELEASED"),
    *("SHARED", "GONE", "ENDED"),
}


def pair(url, attempt, salt):
    ids = text_ids(url, 7000, seed=77_000 + attempt)
    return (
        completion(ids, cache_salt=salt),
        completion(ids[:4100] + text_ids(url, 60, seed=78_000 + attempt), cache_salt=salt),
    )


@pytest.mark.engine
def test_a_transition_is_in_the_journal_and_the_checker_agrees_with_it(tiny_server, scope, capsys):
    url, salt = tiny_server.url, fresh_salt()
    supersede_inside_a_step(url, scope, lambda attempt: pair(url, attempt, salt))
    report = tiny_server.examined()
    assert [str(finding) for finding in report.violated] == []
    assert report.unknown == []
    assert set(report.counts) >= OF_A_TRANSITION
    assert report.pinned == 0
    assert main(["check", str(tiny_server.journal_dir)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "holds"


def steps_of(server, scope):
    """What the core of a real server did for a scope, as the exploration names it."""
    journals, _ = checker.read([server.journal_dir])
    key = scope_key("default", scope) & U64
    taken = [one for journal in journals for one in journal.records if one.kind is Kind.STEPPED and one.key == key]
    return [
        (*core_step_names(one.a), frozenset(name for place, name in enumerate(EFFECTS) if one.b >> place & 1))
        for one in taken
    ]


@pytest.mark.engine
def test_what_a_real_server_does_was_explored(tiny_server, scope):
    """A revision in a prefill, one of an answer that is complete, and the end of the scope."""
    url, salt = tiny_server.url, fresh_salt()
    found = supersede_inside_a_step(url, scope, lambda attempt: pair(url, 50 + attempt, salt))
    revised = found.record["scope"]
    said(url, completion(text_ids(url, 300, seed=5)), **{"X-Retire-Scope": revised, "X-Retire-Supersedes": "*"})
    wait_for_scope(url, revised, epoch=3)
    assert http.delete(f"{url}/scopes/{revised}").status_code == 200
    taken = steps_of(tiny_server, revised)
    assert {event for _, event, _, _ in taken} >= {"EpochAdvanced", "RequestAdmitted", "RequestClosed"}
    explored = set()
    for world in SMALL[2:7]:
        rules = Rules(world)
        explore(rules)
        explored |= rules.relation
    assert set(taken) <= explored
