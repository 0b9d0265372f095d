"""What the burst bench makes of replays, with a server that computes nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import bench, burst
from harness.arrivals import Plan, Planned
from harness.burst import ALWAYS, PROMPT_TOKENS, QUANTA, Burst, Scale, arms_of, best, recorded, result, scaled, used
from harness.client import Frame, Reply
from harness.ledger import Ledger
from harness.replay import Arm, Replay, Replayed
from harness.report.figures.burst import live
from harness.report.paper import BURST
from harness.session import Session
from harness.statistics import Verdict
from retire.core.errors import RetireError
from retire.settings import POLICY_ENV
from tests.harness.stand_in_server import StandIn, never_started
from traces import generate

ANSWER = 60


def short(name="squeeze_1", squeeze=1.0):
    """Two scopes, three versions each, a tenth of a second apart."""
    every = tuple(
        Planned(scope, n, 0.1 * n + 0.05 * scope, None if n == 1 else 0.1 * n + 0.05 * scope, 40 + n, 0, ANSWER)
        for scope in (1, 2)
        for n in (1, 2, 3)
    )
    return Scale(name, Plan(every, (0.2,), ((1, 3), (2, 3))), window_s=1.0, limit_s=4.0, squeeze=squeeze)


@pytest.fixture(scope="module")
def measured():
    """Every arm once on stand-ins for the servers."""
    servers = [StandIn(fence_ms=8.0, interval_ms=10.0).start() for _ in QUANTA]
    ledger = Ledger()
    sessions = {
        quantum: Session(server.url, "made-up", checks=ledger.checks)
        for quantum, server in zip(QUANTA, servers, strict=True)
    }
    one = burst._Bench(ledger, sessions)
    found = {"squeeze_1": one.runs(short(), 1, quick=False)}
    yield SimpleNamespace(found=found, checks=ledger.checks, seal=one.seal, prefill=one.prefill_s())
    for server in servers:
        server.close()


def told(measured, found=None, scales=None):
    scales = scales or [short()]
    return result(Burst(), scales, found or measured.found, measured.checks, measured.seal, measured.prefill)


def test_every_arm_runs_and_the_checks_hold(measured):
    assert set(measured.found["squeeze_1"]) == {
        "native_64",
        "selective_64",
        "abandon_64",
        "native_256",
        "always_256",
        "native_512",
        "selective_512",
    }
    assert measured.checks == dict.fromkeys(measured.checks, True)
    assert {
        "successors_equal_clean_runs",
        "epochs_follow_versions",
        "every_transition_closed",
        "nothing_beyond_what_was_published",
    } <= set(measured.checks)


def test_the_summary_has_the_keys_that_the_report_shows(measured):
    found = told(measured)
    assert {claim.key for claim in BURST.claims} <= set(found.summary)
    assert {target.key for target in found.targets} <= set(found.summary)
    assert found.summary["final_total"] == found.summary["retire_final"] == 2
    assert found.summary["cleanup_p99_intervals"] == 0.8
    assert found.summary["abandoned_obsolete_tokens"] > ANSWER
    assert found.summary["by_scale.squeeze_1"]["best_native"].startswith("native_")
    verdicts = {target.key: target.verdict for target in found.targets}
    assert verdicts["cleanup_p99_intervals"] is Verdict.REACHED
    assert verdicts["retire_final"] is Verdict.REACHED
    assert found.correct
    json.dumps(found.document({}), allow_nan=False)


def replied(*tokens):
    """Token and log-probability of each, `other` being 0.3 less likely everywhere."""
    told = [{"tokens": [one], "token_logprobs": [-0.1], "top_logprobs": [{one: -0.1, "other": -0.4}]} for one in tokens]
    return Reply(
        status=200,
        frames=[Frame(0.0, None, one, {"choices": [{"logprobs": x}]}) for one, x in zip(tokens, told, strict=True)],
    )


def test_where_and_how_far_a_successor_parts_from_its_clean_run_is_noted(capsys):
    clean = dict.fromkeys((1, 2, 3, 4), replied("a", "b", "c"))
    said = {1: ("a", "b", "c"), 2: ("a", "other"), 3: ("a", "never"), 4: ("a", "b")}
    lasts = {scope: SimpleNamespace(reply=replied(*tokens)) for scope, tokens in said.items()}
    assert not burst.equal(lasts, clean)
    assert capsys.readouterr().err.splitlines() == [
        "  scope 2 differs from its clean run: token 2 of 3 is 'other' instead of 'b', 0.300 less likely (near: 0.25)",
        "  scope 3 differs from its clean run: token 2 of 3 is 'never' instead of 'b', not among the likeliest",
        "  scope 4 differs from its clean run: 2 tokens instead of 3",
    ]
    assert burst.equal({1: lasts[1], 4: lasts[4]}, clean, whole=False)
    assert capsys.readouterr().err == ""


def test_what_an_arm_comes_after_changes_from_trial_to_trial():
    bench = burst._Bench.__new__(burst._Bench)
    bench._ledger, bench._sessions, orders = Ledger(), dict.fromkeys(QUANTA), []
    bench._trial = lambda _scale, order, _trial: orders.append([name for name, _ in order]) or {}
    bench.runs(short(), 8, quick=False)
    after = [order[order.index("selective_64") - 1] for order in orders if order[0] != "selective_64"]
    assert 0 < after.count("native_64") <= 8 / 2


def test_a_run_with_a_late_act_is_repeated_and_the_summary_says_how_often(measured, monkeypatch):
    server, lateness = StandIn().start(), iter([1.0, 0.0])
    made = Replayed(Arm.RETIRE, short().plan, 0.0, 1.0, {})
    monkeypatch.setattr(Replay, "run", lambda *_: dataclasses.replace(made, late_s=next(lateness)))
    session = Session(server.url, "made-up")
    one = burst._Bench(Ledger(), dict.fromkeys(QUANTA, session))
    run = one._run(session, short(), Arm.RETIRE, 0, {})
    assert session.checks["acts_on_time"]
    runs = measured.found["squeeze_1"]
    assert told(measured).summary["runs_repeated"] == 0
    repeated = {**runs, "always_256": [runs["always_256"][0] | {"repeats": run.figures()["repeats"]}]}
    assert told(measured, {"squeeze_1": repeated}).summary["runs_repeated"] == 1
    server.close()


def test_a_quantum_that_gives_more_is_the_baseline_and_what_runs_on_never_is(measured):
    runs = measured.found["squeeze_1"]
    fast = {"goodput_tokens_per_s": 1e9}
    assert best({**runs, "native_256": [fast]}, "native") == "native_256"
    assert best({**runs, "abandon_64": [fast]}, "native") != "abandon_64"
    assert best({}, "native") is None


def test_without_a_run_there_is_no_figure_and_no_target_is_reached(measured):
    found = told(measured, {"squeeze_1": {}})
    assert found.summary["goodput_ratio"] is None
    assert found.summary["cleanup_p99_intervals"] is None
    assert found.summary["retire_obsolete_tokens"] is None
    assert Verdict.REACHED not in [target.verdict for target in found.targets]
    json.dumps(found.document({}))


@pytest.mark.parametrize(("trials", "verdict"), [(1, Verdict.OPEN), (2, Verdict.OPEN), (3, Verdict.NOT_REACHED)])
def test_a_ratio_of_fewer_than_three_trials_is_open(measured, trials, verdict):
    runs = {arm: of * trials for arm, of in measured.found["squeeze_1"].items()}
    found = told(measured, {"squeeze_1": runs})
    assert found.summary["goodput_ratio"] < burst.GOODPUT_AIM
    assert {t.key: t.verdict for t in found.targets}["goodput_ratio"] is verdict


def test_what_was_obsolete_at_any_scale_counts_and_the_rest_of_the_head_says_its_scale(measured):
    runs = measured.found["squeeze_1"]
    leaky = {**runs, "selective_512": [runs["selective_512"][0] | {"obsolete_tokens": 3}]}
    both = [short(), short("squeeze_4", 4.0)]
    found = told(measured, {"squeeze_1": runs, "squeeze_4": leaky}, both)
    at_first = told(measured).summary["retire_obsolete_tokens"]
    assert found.summary["retire_obsolete_tokens"] == 2 * at_first + 3 - runs["selective_512"][0]["obsolete_tokens"]
    assert {t.key: t.verdict for t in found.targets}["retire_obsolete_tokens"] is Verdict.NOT_REACHED
    assert found.summary["scale"] == "squeeze_1"
    assert told(measured, {"squeeze_4": runs}, both[1:]).summary["scale"] == "squeeze_4"


def test_nothing_is_said_of_an_arm_that_did_not_run(measured):
    runs = {arm: of for arm, of in measured.found["squeeze_1"].items() if "abandon" not in arm}
    found = told(measured, {"squeeze_1": runs}).summary
    assert found["abandoned_obsolete_tokens"] is found["goodput_ratio_vs_abandoned"] is None


def test_the_cells_are_what_the_figure_draws(measured):
    document = told(measured).document({"bench": "burst"})
    cells = told(measured).cells
    drawing = live(SimpleNamespace(bench="burst", cells=cells))
    assert len(drawing.panels) == 7
    assert document["cell"]["bursts_s"] == [0.2]


@pytest.mark.parametrize("prefill", [0.2, 0.405, 1.0])
def test_ratios_to_a_prefill_are_the_papers_whatever_the_machine(prefill):
    ratios = scaled(prefill, 1.0).ratios(prefill)
    assert ratios["window_over_prefill"] == pytest.approx(120 / 0.405)
    assert ratios["limit_over_prefill"] == pytest.approx(180 / 0.405)
    assert ratios["burst_over_prefill"] == pytest.approx(1.5 / 0.405)
    tight = scaled(prefill, 4.0)
    assert tight.ratios(prefill)["window_over_prefill"] == pytest.approx(30 / 0.405)
    assert tight.limit_s == scaled(prefill, 1.0).limit_s
    assert len(tight.plan.finals) == 9
    assert {one.prompt_tokens for one in tight.plan.versions} == {PROMPT_TOKENS}


def quick_scales(told=(), prefill=0.405):
    return Burst(trace=Path("rows.jsonl")).planned(prefill, told, quick=True)


def test_a_quick_run_leaves_time_for_its_servers_and_no_recorded_row_takes_any(capsys):
    ((scale, trials),) = quick_scales(generate.sessions(5, scopes=40, span_s=3600)).items()
    arms = [arm for quantum in used(quick=True) for arm in arms_of(quantum, quick=True)]
    spoken_s = scale.plan.versions[0].answer_tokens * 0.405 / 12  # a step of one token is much shorter than a prefill
    assert trials * len(arms) * (scale.plan.last_s + spoken_s) < 120
    assert "not in a quick run" in capsys.readouterr().err
    assert len(Burst().planned(0.4, generate.sessions(5, scopes=40, span_s=3600), quick=False)) == 4


def test_a_quick_runs_answers_are_shorter_by_less_than_its_window_and_its_last_ones_outlast_it():
    (quick,) = quick_scales()
    full = scaled(0.405, 1.0)
    tokens, in_full = (scale.plan.versions[0].answer_tokens for scale in (quick, full))
    assert tokens / quick.window_s > in_full / full.window_s
    at_last = [one.start_s for one in quick.plan.versions if one.start_s >= quick.plan.bursts_s[-1]]
    assert tokens * 0.405 / 40 > quick.window_s - min(at_last)  # were a step of one token as short as that


def test_the_paper_scale_has_its_trials_and_the_others_theirs():
    planned = Burst(trials=5, squeezed_trials=2).planned(0.4, [], quick=False)
    assert [(scale.squeeze, trials) for scale, trials in planned.items()] == [(1.0, 5), (2.0, 2), (4.0, 2)]


def test_every_quantum_has_a_server_and_all_start_at_once(monkeypatch):
    asked = never_started(monkeypatch, burst)
    with burst._serving("m", QUANTA, {}) as found:
        assert found == {QUANTA[0]: 0, QUANTA[1]: 1, QUANTA[2]: 2}
    (kinds,) = asked
    assert [kind["flags"][1] for kind in kinds] == [str(quantum) for quantum in QUANTA]
    assert [kind["env"][POLICY_ENV] for kind in kinds] == ["selective", "always", "selective"]


def test_recorded_transitions_keep_their_shares_and_last_as_long_as_they_may():
    scale = recorded(generate.sessions(5, scopes=40, span_s=3600))
    assert len(scale.plan.scopes) == 3
    assert scale.plan.last_s == pytest.approx(burst.RECORDED_S)
    assert max(one.prompt_tokens for one in scale.plan.versions) <= 2 * PROMPT_TOKENS
    assert "burst_over_prefill" not in scale.ratios(0.4)


def test_a_quick_run_needs_two_servers():
    assert used(quick=True) == [QUANTA[0], QUANTA[2]]
    assert [arms_of(quantum, quick=True) for quantum in used(quick=True)] == [
        ["native_64", "selective_64"],
        ["native_512", "selective_512"],
    ]
    assert arms_of(ALWAYS, quick=False) == ["native_256", "always_256"]


def test_a_trace_is_for_burst_alone_and_is_read_before_any_server_starts(tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.main(["churn", "--trace", str(tmp_path / "none")])
    assert "--trace is for burst" in capsys.readouterr().err
    with pytest.raises(RetireError, match="cannot be read"):
        bench.main(["burst", "--trace", str(tmp_path / "none")])
