"""What the overhead bench makes of measurements."""

from __future__ import annotations

import json

import pytest

from harness import overhead
from harness.client import Frame, Reply
from harness.ledger import Ledger
from harness.overhead import Overhead, percent_more, verdict
from harness.statistics import Bootstrap, Verdict, percentile

USED = {"advance_p99_ms": 0.4, "safe_points_selective": 10, "safe_points_always": 20, "fence_ratio_same_run": 30.0}


class Known:
    """A server that says the token `said` every `token_s` of its working time."""

    def __init__(self, token_s=0.001, said=7):
        self.url, self.token_s, self.said = "nowhere", token_s, said

    def wake(self):
        pass

    def answers(self, prompts, tokens):
        assert len(prompts) == len(tokens)
        choices = [{"token_ids": [self.said]}]
        frames = [[Frame((n + 1) * self.token_s, None, "", {"choices": choices}) for n in range(k)] for k in tokens]
        return [Reply(frames=one) for one in frames]


class KnownTurns:
    """Every server has the machine to itself."""

    def run(self, work):
        return {name: one() for name, one in work.items()}

    def worked_s(self, _name, until):
        return until


def run(planned, **idle):
    ledger = Ledger()
    bench = overhead._Bench("tiny", ledger)
    pairs = bench.pairs({"native": Known(), "idle": Known(**idle)}, KnownTurns(), planned, start=0)
    return overhead._result(Overhead(), overhead._by_server([pairs]), ledger.checks, {"pins": "abc"}, USED, 1, planned)


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr("harness.workload._corpus", lambda *_: tuple(range(99)))


FEW = {"decode": 4, "prefill_1k": 2, "prefill_4k": 2, "mixed": 2}


@pytest.mark.usefixtures("known")
def test_both_servers_take_turns_and_only_their_own_time_counts():
    found = run(FEW, token_s=0.00104)
    for cell in FEW:
        assert found.summary[f"{cell}_overhead_pct"] == pytest.approx(4.0)
        low, high = found.summary[f"{cell}_overhead_pct_ci95"]
        assert low <= found.summary[f"{cell}_overhead_pct"] <= high
    assert found.correct
    assert {target.verdict for target in found.targets[:4]} == {Verdict.NOT_REACHED}
    assert found.targets[4].verdict is Verdict.REACHED
    assert set(USED) <= set(found.summary)
    assert [cell.cell["cell"] for cell in found.cells] == list(FEW)
    json.dumps(found.document({}))


@pytest.mark.usefixtures("known")
def test_servers_that_disagree_fail_the_run_where_they_must_not():
    found = run(FEW, said=8)
    assert not found.checks["both_servers_say_the_same"]
    assert not found.correct
    assert found.summary["decode_overhead_pct"] is None
    assert found.summary["mixed_pairs"] == 2, "company decides there"
    assert found.targets[0].verdict is Verdict.NOT_REACHED


@pytest.mark.parametrize(
    ("percents", "cell", "expected"),
    [
        ([0.4] * 9, "decode", Verdict.REACHED),
        ([0.4] * 6 + [2.0] * 3, "decode", Verdict.OPEN),
        ([0.4] * 6 + [2.0] * 3, "mixed", Verdict.REACHED),
        ([0.6] * 9, "mixed", Verdict.NOT_REACHED),
        ([0.1] * 4 + [0.9] * 5, "prefill_4k", Verdict.OPEN),
    ],
)
def test_the_median_counts_and_where_it_is_bounded_the_interval_too(percents, cell, expected):
    assert verdict(cell, Bootstrap(percent_more, [(100 + one, 100) for one in percents])) is expected


def test_a_percentile_is_one_of_the_values():
    assert percentile(range(1, 101), 99) == 99
    assert percentile([5.0], 99) == 5.0
    assert percentile([1.0, 9.0], 50) == 1.0


def test_pairs_of_an_interrupted_start_belong_to_the_servers_they_were_measured_on():
    def start(*servers):
        return {cell: [{"ms": {"native": 1.0}, "server": one} for one in servers] for cell in FEW}

    found = overhead._by_server([start("port 1", "port 1"), start("port 2", "port 3"), start("port 1")])
    for pairs in found.values():
        assert [number for number, _ in pairs] == [0, 0, 1, 2, 3]


def test_every_server_is_told_its_policy(monkeypatch: pytest.MonkeyPatch):
    def told(_model, _flags, kinds):
        raise Told({kind["env"]["RETIRE_POLICY"] for kind in kinds}, [kind["patched"] for kind in kinds])

    monkeypatch.setattr(overhead, "started", told)
    for always, policies in ((False, {"selective"}), (True, {"selective", "always"})):
        with pytest.raises(Told) as caught, overhead._servers("m", {}, always=always, swapped=False):
            pass
        assert caught.value.args == (policies, [False, True, *([True] * always)])


class Told(Exception):
    """What servers would have been started with."""
