"""What the rates bench makes of its runs, with servers that compute nothing."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import rates
from harness.burst import PAPER_PREFILL_S, PROMPT_TOKENS, equal
from harness.client import Frame, Reply
from harness.ledger import Ledger
from harness.rates import ARMS, LARGE, POINTS, SMALL, Point, Rates, mean_quantum, of_point, result
from harness.replay import Arm, Replay, Replayed
from harness.report.figures.rates import goodput, selector
from harness.report.paper import RATES
from harness.report.results import Run
from harness.session import Session
from harness.statistics import Bootstrap, Verdict
from retire.settings import POLICY_ENV
from tests.harness.stand_in_server import StandIn, never_started


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    """Thirty cells a test: enough to tell made-up differences from none."""
    monkeypatch.setattr(rates, "Bootstrap", partial(Bootstrap, resamples=500))


def run_of(tokens_per_s, obsolete=0, quantum=None):
    return dict.fromkeys(rates.KEPT, 0) | {
        "goodput_tokens_per_s": tokens_per_s,
        "obsolete_tokens": obsolete,
        "quantum_tokens": quantum,
    }


def trials(count=3, **given_):
    """Every arm gives 50 token/s but those that are told."""
    return [
        {arm: run_of(given_.get(arm, 50.0) + trial / 100, quantum=100.0 if arm == "rate" else None) for arm in ARMS}
        for trial in range(count)
    ]


def found_of(**by_rate):
    """The whole map."""
    return {point: trials(**by_rate.get(f"at_{point.rate:g}".replace(".", "_"), {})) for point in POINTS}


def told(found, checks=None):
    checks = {"whole": True} if checks is None else checks
    return result(Rates(), found, checks, {"pins": "abc"}, PAPER_PREFILL_S, rates.WINDOW_S)


# ---------------------------------------------------------------- what is sent


def test_the_map_is_the_papers():
    assert {(point.rate, point.scopes) for point in POINTS} == {(r, n) for r in (0, 0.05, 0.2) for n in (4, 8)}
    assert len(ARMS) == 5
    assert (SMALL, LARGE) == (64, 512)
    assert 3 * len(POINTS) * len(ARMS) == 90


@pytest.mark.parametrize("prefill", [0.1, PAPER_PREFILL_S, 2.0])
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_a_rate_is_as_many_revisions_a_prefill_on_any_machine(point, prefill):
    plan = point.plan(rates.WINDOW_S, prefill, seed=1)
    revisions = sum(version.number > 1 for version in plan.versions)
    assert revisions == round(point.rate * point.scopes * rates.WINDOW_S)
    window_s = rates.WINDOW_S * prefill / PAPER_PREFILL_S
    assert revisions / point.scopes / (window_s / prefill) == pytest.approx(point.rate * PAPER_PREFILL_S, abs=1e-3)
    assert plan.last_s <= window_s


@given(
    seed=st.integers(0, 999),
    point=st.sampled_from(POINTS),
    window_s=st.sampled_from([rates.QUICK_WINDOW_S, rates.WINDOW_S]),
)
def test_versions_follow_each_other_within_the_window_and_share_nothing(seed, point, window_s):
    plan = point.plan(window_s, 0.5, seed)
    assert plan == point.plan(window_s, 0.5, seed), "the same for every policy"
    assert sorted(plan.scopes) == list(range(1, point.scopes + 1))
    for versions in plan.scopes.values():
        assert [one.number for one in versions] == list(range(1, len(versions) + 1))
        starts = [one.start_s for one in versions]
        least_s = 0.05 * 0.5 / PAPER_PREFILL_S
        assert all(later - earlier >= least_s - 1e-9 for earlier, later in pairwise(starts)), "none overtakes another"
        assert versions[0].given_up_s is None
        assert all(one.in_one_act for one in versions[1:])
        assert {(one.prompt_tokens, one.shared_tokens) for one in versions} == {(PROMPT_TOKENS, 0)}
    assert dict(plan.finals) == {scope: len(versions) for scope, versions in plan.scopes.items()}


def test_a_quick_run_leaves_time_for_its_servers():
    runs = len(rates.QUICK_POINTS) * len(ARMS)
    assert runs * rates.QUICK_WINDOW_S * 0.45 / PAPER_PREFILL_S < 100
    assert all(rates.QUICK_POINTS[-1].plan(rates.QUICK_WINDOW_S, 0.45, 1).finals)


def test_three_servers_start_at_once(monkeypatch):
    asked = never_started(monkeypatch, rates)
    with rates._serving("m", {}) as found:
        assert found == {"small": 0, "large": 1, "rate": 2}
    told = [(int(kind["flags"][1]), str(kind["env"][POLICY_ENV])) for kind in asked[0]]
    assert told == [(SMALL, "selective"), (LARGE, "selective"), (LARGE, "rate")]


def test_other_trials_have_other_times():
    point = Point(0.2, 4)
    assert point.plan(60, 0.4, 1) != point.plan(60, 0.4, 2)


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def measured():
    """One trial of a busy cell on stand-ins, an answer cut in each scope."""
    servers = {name: StandIn(fence_ms=8.0, interval_ms=10.0).start() for name in ("small", "large", "rate")}
    servers["rate"].quanta = {"64": 3, "512": 1}
    ledger = Ledger()
    sessions = {name: Session(server.url, "made-up", checks=ledger.checks) for name, server in servers.items()}
    bench = rates._Bench(ledger, sessions, window_s=6.0, prefill=PAPER_PREFILL_S / 5)
    yield SimpleNamespace(trials=bench.runs(Point(0.2, 4), 1), checks=ledger.checks, servers=servers)
    for server in servers.values():
        server.close()


def test_every_policy_runs_and_the_checks_hold_although_all_answers_are_cut(measured):
    ((trial),) = measured.trials
    assert set(trial) == set(ARMS)
    assert all(run["goodput_tokens_per_s"] > 0 for run in trial.values())
    assert measured.checks == dict.fromkeys(measured.checks, True)
    assert {
        "no_version_failed",
        "acts_on_time",
        "every_transition_closed",
        "nothing_beyond_what_was_published",
        "epochs_follow_versions",
        "successors_begin_as_clean_runs",
    } <= set(measured.checks)


def test_what_a_policy_comes_after_changes_from_trial_to_trial():
    bench, orders = rates._Bench(Ledger(), {}, 6.0, 0.1), []
    bench._trial = lambda _point, order, _trial: orders.append(order) or {}
    bench.runs(Point(0.2, 4), 8)
    after = [order[order.index("rate") - 1] for order in orders if order[0] != "rate"]
    assert 0 < after.count("selective_512") <= 8 / 2


def test_only_the_selectors_server_is_asked_for_its_choice(measured):
    ((trial),) = measured.trials
    assert [arm for arm, run in trial.items() if run["quantum_tokens"] is not None] == []
    assert mean_quantum({64: 3, 512: 1}) == 176
    assert mean_quantum({64: 0}) is None


def test_native_versions_are_hung_up_and_the_others_superseded(measured):
    small = measured.servers["small"]
    assert small.hung_up > 0
    assert any(asked["supersedes"] == "*" for asked in small.asked)
    assert {asked["scope"] is None for asked in small.asked} == {True, False}
    assert all(asked["scope"] for asked in measured.servers["rate"].asked if asked["supersedes"])


def test_a_late_run_counts_for_nothing_not_even_for_the_mean_quantum(monkeypatch):
    server = StandIn().start()
    runs = iter([(1.0, {"64": 10}), (0.0, {"64": 10, "512": 3})])
    plan = Point(0.2, 4).plan(6.0, 0.1, seed=1)

    def run(_self, arm):
        late_s, server.quanta = next(runs)
        return Replayed(arm, plan, 0.0, 1.0, {}, late_s=late_s)

    monkeypatch.setattr(Replay, "run", run)
    session = Session(server.url, "made-up")
    bench = rates._Bench(Ledger(), {"rate": session}, window_s=6.0, prefill=0.1)
    told = bench._run(session, plan, Arm.RETIRE, 0, {})
    assert (told["quantum_tokens"], told["repeats"]) == (512, 1)
    assert session.checks["acts_on_time"]
    server.close()


def replied(*tokens):
    likely = [{"tokens": [one], "token_logprobs": [-0.1], "top_logprobs": [{one: -0.1}]} for one in tokens]
    return Reply(status=200, frames=[Frame(0.0, None, "x", {"choices": [{"logprobs": one}]}) for one in likely])


def test_a_cut_answer_is_compared_as_far_as_it_came():
    def begins(*said):
        return equal({1: SimpleNamespace(reply=replied(*said))}, {1: replied("a", "b", "c")}, whole=False)

    assert begins()
    assert begins("a", "b")
    assert begins("a", "b", "c", "d")
    assert not begins("a", "x")


@pytest.mark.parametrize(("failed", "cut", "holds"), [(4, 4, True), (0, 6, True), (5, 5, False), (1, 0, False)])
def test_an_answer_that_breaks_off_is_no_answer_that_was_cut(failed, cut, holds):
    run = SimpleNamespace(
        checks=lambda: {"no_version_failed": True, "last_versions_are_whole": False, "acts_on_time": True},
        account=SimpleNamespace(outcomes=lambda: {"failed": failed}),
        cut=cut,
        versions=dict.fromkeys(range(4)),
    )
    assert rates.checks_of(run) == {"acts_on_time": True, "no_version_failed": holds}


# ---------------------------------------------------------------- what is made of them


def test_the_summary_has_the_keys_that_the_report_shows():
    found = told(found_of())
    assert {claim.key for claim in RATES.claims} <= set(found.summary)
    assert {target.key for target in found.targets} <= set(found.summary)
    assert (found.summary["cells"], found.summary["points"]) == (6, 90)
    assert found.summary["by_cell.rate_0.2_scopes_8"]["concurrency"] == 8
    assert found.correct
    json.dumps(found.document({}), allow_nan=False)


def test_a_selector_that_follows_is_within_two_percent_everywhere():
    found = told(found_of(at_0_2={"selective_64": 49.0, "rate": 49.5}))
    assert found.summary["selector_within_2pct"] == 6
    assert found.summary["worst_selector_ratio"] == pytest.approx(0.99, rel=1e-3)
    assert {target.verdict for target in found.targets} == {Verdict.REACHED}


def test_one_that_does_not_is_named_by_its_cell_and_fails_both_targets():
    found = told(found_of(at_0_05={"rate": 40.0}))
    assert found.summary["selector_within_2pct"] == 4
    assert found.summary["worst_cell"] == "rate_0.05_scopes_4"
    verdicts = {target.key: target.verdict for target in found.targets}
    assert verdicts["selector_within_2pct"] is verdicts["worst_selector_ratio"] is Verdict.NOT_REACHED
    assert verdicts["retire_obsolete_tokens"] is Verdict.REACHED


def verdict_of(found, key="selector_within_2pct"):
    return {target.key: target.verdict for target in told(found).targets}[key]


def spread(*ratios):
    """Trials of a cell in which the selector gives so much of what the better quantum does."""
    return [{arm: run_of(50.0 * ratio if arm == "rate" else 50.0) for arm in ARMS} for ratio in ratios]


@pytest.mark.parametrize(
    ("ratios", "within", "verdict"),
    [
        ((0.99, 1.0, 1.02), 6, Verdict.REACHED),
        ((0.95, 0.99, 1.02), 6, Verdict.OPEN),  # the median is within, one end of the interval is not
        ((0.90, 0.97, 1.02), 5, Verdict.OPEN),
        ((0.90, 0.95, 0.97), 5, Verdict.NOT_REACHED),
        ((1.0, 1.0), 6, Verdict.OPEN),
        ((0.5,), 5, Verdict.OPEN),
    ],
)
def test_that_the_selector_follows_is_said_by_intervals_and_counted_by_medians(ratios, within, verdict):
    found = found_of() | {POINTS[2]: spread(*ratios)}
    assert told(found).summary["selector_within_2pct"] == within
    assert verdict_of(found) is verdict
    if min(ratios) < 1:
        assert verdict_of(found, "worst_selector_ratio") is verdict


def test_the_selector_is_held_against_the_better_quantum_and_native_is_not_asked():
    cell = of_point(Point(0.2, 4), trials(selective_64=40.0, selective_512=60.0, native_64=90.0, rate=60.0))
    assert (cell["best_selective"], cell["best_native"]) == ("selective_512", "native_64")
    assert cell["selector_ratio"] == pytest.approx(1.0)
    assert cell["goodput_ratio"] == pytest.approx(60 / 90, rel=1e-3)
    assert cell["selector_over.selective_64"] == pytest.approx(1.5, rel=1e-3)
    assert cell["selector_quantum_tokens"] == 100


def test_the_map_says_where_natives_better_quantum_is_the_papers():
    as_paper = {"native_64": 40.0, "native_512": 60.0}
    found = told(found_of(at_0=as_paper, at_0_05=as_paper, at_0_2={"native_64": 60.0, "native_512": 40.0}))
    assert found.summary["native_quantum_as_paper"] == 6
    assert told(found_of(at_0=as_paper, at_0_05=as_paper, at_0_2=as_paper)).summary["native_quantum_as_paper"] == 4


def test_how_many_runs_were_repeated_is_told():
    found = found_of()
    found[POINTS[0]][0]["native_64"]["repeats"] = 2
    found[POINTS[1]][0]["rate"]["repeats"] = 1
    assert told(found).summary["runs_repeated"] == 3


def test_obsolete_tokens_are_counted_by_runtime():
    found = found_of()
    found[POINTS[0]][0]["native_64"]["obsolete_tokens"] = 7
    found[POINTS[0]][1]["rate"]["obsolete_tokens"] = 1
    one = told(found)
    assert (one.summary["native_obsolete_tokens"], one.summary["retire_obsolete_tokens"]) == (7, 1)
    assert {t.key: t.verdict for t in one.targets}["retire_obsolete_tokens"] is Verdict.NOT_REACHED


@pytest.mark.parametrize("found", [{}, {POINTS[0]: []}, {POINTS[0]: trials(rate=-50.0)}])
def test_without_a_figure_nothing_is_reached(found):
    one = told(found)
    assert one.summary["worst_selector_ratio"] is None
    assert one.summary["worst_cell"] is None
    assert Verdict.REACHED not in [t.verdict for t in one.targets if t.key == "worst_selector_ratio"]
    json.dumps(one.document({}), allow_nan=False)


def test_the_cells_are_what_the_figures_draw():
    one = told(found_of(at_0_2={"rate": 45.0}))
    run = Run("rates.json", "rates", one.summary, one.checks, {}, one.cells)
    assert [len(draw(run).panels) for draw in (goodput, selector)] == [2, 1]
    assert len(selector(run).rows) == len(POINTS)
    assert [row[3] for row in selector(run).rows].count("0.900×") == 2


def test_runtimes_are_those_of_the_papers_policies():
    assert [arm for arm, (_, runtime) in ARMS.items() if runtime is Arm.NATIVE] == ["native_64", "native_512"]
