"""Every experiment, with measurements made up: interrupted anywhere, its result is that of an uninterrupted run."""

from __future__ import annotations

import json
import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from harness import (
    bench,
    burst,
    churn,
    composition,
    correctness,
    inheritance,
    overhead,
    publication,
    rates,
    retirement,
    tenants,
)
from harness.client import Frame, Reply
from harness.experiment import join
from harness.histories import experiment as histories
from harness.ledger import Ledger
from harness.statistics import Bootstrap


class Interruption(BaseException):
    """Somewhere."""


class MadeUp:
    """What every fake has: numbers that hang on where they belong alone, and a claim that fails where it is told to."""

    wrong: tuple[object, ...] = ()

    @staticmethod
    def ms(*where):
        return random.Random(repr(where)).uniform(50, 60)

    @classmethod
    def holds(cls, *where):
        return where not in cls.wrong


class Turns:
    """Every server has the machine to itself."""

    def __init__(self, servers=None):
        self.servers = servers

    def clock(self, _name):
        return float

    def run(self, work):
        return {name: one() for name, one in work.items()}

    def worked_s(self, _name, until):
        return until


def session(checks):
    def check(name, holds):
        join(checks, {name: holds})
        return holds

    return SimpleNamespace(url="nowhere", model="tiny", checks=checks, seal={"pins": "abc"}, check=check)


@contextmanager
def served(_model, _flags, checks, *_more):
    found = session(checks)
    yield found
    found.check("nothing_left", True)


def the_inheritance(patch):
    class Trial:
        def __init__(self, on, _prefix, _tail, offset, seed):
            self.on, self.where, self.counts = on, (offset, seed), True

        def run(self, order):
            self.counts &= self.on.check("equal", MadeUp.holds("inheritance", *self.where))
            return {arm: {"ttft_ms": MadeUp.ms(arm, *self.where)} for arm in order}

    patch.setattr(inheritance, "measuring", lambda _url, *rest: served(*rest))
    patch.setattr(inheritance, "_Trial", Trial)
    return inheritance.Inheritance(), ("inheritance", 16, 2)


def the_publication(patch):
    class Trial:
        def __init__(self, on, pace_s, steps, _frame_bytes, seed):
            self.on, self.where, self.counts = on, (pace_s, steps, seed), True

        def run(self, order):
            self.counts &= self.on.check("equal", MadeUp.holds("publication", self.where[2]))
            draw = random.Random(repr(self.where))
            names = ("stale_frames", "stale_tokens", "taken_tokens", "published_tokens")
            found = {arm: {name: draw.randrange(9) for name in names} for arm in order}
            return found | {"retire_client": dict.fromkeys(names, 0)}

    patch.setattr(publication, "measuring", lambda _url, *rest: served(*rest))
    patch.setattr(publication, "stated_bound", lambda _session: (150, 12))
    patch.setattr(publication, "_Trial", Trial)
    return publication.Publication(), ("publication", 3)


def the_histories(patch):
    def storm(_self, _server, on, seed, _quick):
        on.check("equal", MadeUp.holds("histories", seed))
        draw = random.Random(seed)
        return {**{count: draw.randrange(9) for count in histories.COUNTS}, "linearizable": True} | {
            "findings": [], "history": None,
        }  # fmt: skip

    @contextmanager
    def started(*_):
        yield [SimpleNamespace(url="nowhere")]

    @contextmanager
    def left_as_found(sessions):
        yield
        sessions[0].check("nothing_left", True)

    patch.setattr(histories, "started", started)
    patch.setattr(histories, "left_as_found", left_as_found)
    patch.setattr(histories, "Session", lambda _url, _model, _key, checks: session(checks))
    patch.setattr(histories.Histories, "_storm", storm)
    return histories.Histories(), ("histories", 1)


def the_correctness(patch):
    class Successor:
        def __init__(self, on, mode, config):
            self.on, self.mode, self.config = on, mode, config

        def measure(self, arm):
            if not self.on.check("adopted", MadeUp.holds("correctness", self.mode, self.config.lcp_tokens)):
                raise correctness.RefusedError("no")
            ids = tuple(range(correctness.ANSWER_TOKENS))
            due = self.config.lcp_tokens // self.mode.grid_tokens * self.mode.grid_tokens
            reused = 0 if arm is correctness.Arm.COLD else due
            said = correctness.Said(ids, tuple(-one / 7 for one in ids))
            certified = due if arm is correctness.Arm.COMPLETED_PREDECESSOR else None
            return correctness.Measured(said, reused, certified)

    patch.setattr(correctness, "serving", served)
    patch.setattr(correctness, "_Successor", Successor)
    patch.setattr(correctness, "_fault", lambda _session, _prefix, seed: correctness._Fault(seed != 101, True))
    return correctness.Correctness(), ("correctness", correctness.Mode.EXACT, 4095)


def the_retirement(patch):
    class Bench:
        def __init__(self, on, path):
            self.on, self.path = on, path

        def trial(self, number):
            where = (self.path.name, number)
            if not self.on.check("equal", MadeUp.holds("retirement", *where)):
                return None
            native = retirement.Arm(1000 + MadeUp.ms(*where), 2000.0, step_ms=3000.0)
            return retirement.Trial(native, retirement.Arm(MadeUp.ms(*where), 90.0, longest_interval_ms=50.0))

    patch.setattr(retirement, "serving", served)
    patch.setattr(retirement.Path, "flags", ())
    patch.setattr(retirement, "_Bench", Bench)
    return retirement.Retirement(), ("retirement", "two_kv_groups", 1)


def the_tenants(patch):
    class Bench:
        def __init__(self, on):
            self.on = on

        def pair(self, seed, order):
            kept = {"kept_tokens": float(tenants.A_SHARES[seed % 3])}
            times = {arm: {m: MadeUp.ms(seed, arm, m) for m in ("itl_ms", "longest_gap_ms")} | kept for arm in order}
            return times, self.on.check("equal", MadeUp.holds("tenants", seed))

        def pages(self, seed):
            return True, seed > 0

        def zero_quota(self, seed):
            return seed > 0

    patch.setattr(tenants, "serving", served)
    patch.setattr(tenants, "_Bench", Bench)
    return tenants.Tenants(), ("tenants", 4)


def reply(ms, first_at=None):
    frames = [Frame(first_at or ms, None, "", {"choices": [{"token_ids": [1] * composition.ANSWER_TOKENS}]})]
    return Reply(status=200, frames=frames)


def the_composition(patch):
    class Side:
        def __init__(self, on, _clock, _lengths_s):
            self.session = on

        def calibrate(self, _ids, _steps):
            pass

        def interrupt(self, arm, revision, old, _new):
            answer = SimpleNamespace(reply=reply(MadeUp.ms(arm, str(revision), old)))
            return SimpleNamespace(arm=arm, successor=answer)

        def finish(self, one, first_token_s):
            record = None if one.arm.startswith("native") else {"receipts": [{"choice": "trim", "layer": 3}]}
            return composition._Answered(first_token_s, one.successor.reply, record)

    @contextmanager
    def servers(_model, _revision, checks, *, unarmed):
        found = [(None, session(checks)) for _ in range(3 + unarmed)]
        yield found
        for _, one in found:
            one.check("nothing_left", True)

    def counts(self, _revision, trial):
        assert all(isinstance(one, composition._Answered) for one in trial.values())
        return self._session.check("equal", MadeUp.holds("composition", self._trial))

    patch.setattr(composition, "Turns", Turns)
    patch.setattr(composition, "_Side", Side)
    patch.setattr(composition, "_serving", servers)
    patch.setattr(composition, "passage", lambda *_: [0])
    patch.setattr(composition._Bench, "_prompts", lambda _self, _revision, number: ([number], [number]))
    patch.setattr(composition._Bench, "_counts", counts)
    patch.setattr(composition._Bench, "_compared_pages", lambda _self, revision: {"pages": revision.step})
    patch.setattr(composition, "GRID", composition.QUICK_GRID)
    return composition.Composition(pairs=2, screen=2, judge=2), ("composition", 3)


def the_overhead(patch):
    class Arm:
        def __init__(self, name):
            self.url, self.name = "nowhere", name

        def wake(self):
            pass

        def answers(self, prompts, tokens):
            token_s = MadeUp.ms(self.name, prompts) / 1000
            said = [8 if self.name == "idle" and not MadeUp.holds("overhead", prompts[0][0]) else 7]
            body = {"choices": [{"token_ids": said}]}
            return [Reply(frames=[Frame((n + 1) * token_s, None, "", body) for n in range(count)]) for count in tokens]

    @contextmanager
    def servers(_model, checks, *, always, swapped):
        yield {name: Arm(name) for name in ("native", "idle", *["always"] * always)}, Turns(), {"pins": str(swapped)}
        join(checks, {"nothing_left": True})

    advanced = {"advance_p99_ms": 0.4, "advances": 10}
    patch.setattr(overhead, "passage", lambda _url, _model, count, seed: [seed] * count)
    patch.setattr(overhead, "_servers", servers)
    patch.setattr(overhead._Used, "advance", lambda _self, _count: dict(advanced))
    patch.setattr(overhead._Used, "fence", lambda _self, number: (1000.0 + number, 20.0 + number))
    patch.setattr(overhead._Used, "safe_points", lambda _self: {"safe_points_selective": 10, "safe_points_always": 90})
    few = {"decode": 2, "prefill_1k": 1, "prefill_4k": 2, "mixed": 1}
    return overhead.Overhead(starts=2, pairs=few, quick_pairs=few), ("overhead", 100_100)


def the_churn(patch):
    class Arm:
        def __init__(self, name, checks):
            self.name, self.checks, self.begun, self.seal = name, checks, False, {"pins": "abc"}

        def begin(self):
            self.begun = True

        def end(self):
            join(self.checks, {"nothing_left": True})

        def cold_ms(self, seed):
            return MadeUp.ms("cold", seed)

        def churn(self, _point):
            assert self.begun

        def wake(self):
            pass

        def successor(self, point):
            return lambda: MadeUp.ms(self.name, point.seed) / 1000

        def recovered(self, point, recovery_ms):
            holds = MadeUp.holds("churn", point.seed)
            join(self.checks, {"equal": holds})
            point.counts &= holds
            moved = dict.fromkeys(("blocks_returned", "blocks_republished", "slots_remapped"), 56.0)
            found = {"recovery_ms": recovery_ms, "full_interval_ms": 100.0 + recovery_ms, "reused_tokens": 7168.0}
            return found | (moved if self.name == "dram" else {})

    patch.setattr(churn, "_start", lambda _stack, _m, checks: ({arm: Arm(arm, checks) for arm in churn.ARMS}, Turns()))
    return churn.Churn(rounds=2), ("churn", 1)


def the_burst(patch):
    def run(_self, on, scale, arm, trial, _clean):
        on.check("equal", MadeUp.holds("burst", trial))
        where = (on.seal["quantum"], scale.name, arm, trial)
        figures = {
            "goodput_tokens_per_s": MadeUp.ms(*where),
            "obsolete_tokens": 0 if arm is burst.Arm.RETIRE else trial,
            "final_versions": 9,
            "cleanup_ms": None,
            "cleanup_intervals": [1.0, 1.5],
            "most_obsolete": 1,
            "repeats": 0,
        }
        return SimpleNamespace(figures=lambda: figures)

    @contextmanager
    def serving(_model, quanta, checks):
        found = {quantum: session(checks) for quantum in quanta}
        for quantum, one in found.items():
            one.seal = {"quantum": str(quantum)}
        yield found
        for one in found.values():
            one.check("nothing_left", True)

    patch.setattr(burst, "_serving", serving)
    patch.setattr(burst, "passage", lambda *_: [0])
    patch.setattr(burst, "prefill_s", lambda *_: 0.4)
    patch.setattr(burst._Bench, "_run", run)
    return burst.Burst(), ("burst", 0)


def the_rates(patch):
    def run(_self, on, plan, runtime, trial, _clean):
        where = (on.seal["pins"], len(plan.versions), runtime, trial)
        on.check("equal", MadeUp.holds("rates", trial))
        figures = dict.fromkeys(rates.KEPT, 0) | {"goodput_tokens_per_s": MadeUp.ms(*where), "quantum_tokens": None}
        return figures | ({"quantum_tokens": 100.0} if on.seal["pins"] == "rate" else {})

    @contextmanager
    def servers(_model, checks):
        found = {name: session(checks) for name in ("small", "large", "rate")}
        for name, one in found.items():
            one.seal = {"pins": name}
        yield found
        found["small"].check("nothing_left", True)

    patch.setattr(rates, "_serving", servers)
    patch.setattr(rates, "native_prefill_s", lambda *_, times=5: 0.4 + 0 * times)
    patch.setattr(rates._Bench, "_run", run)
    return rates.Rates(), ("rates", 0)


SET_UPS = {name.removeprefix("the_"): set_up for name, set_up in list(globals().items()) if name.startswith("the_")}


def document(experiment, ledger, *, quick):
    found = experiment.run(ledger, quick=quick).document({})
    found["checks"] = dict(sorted(found["checks"].items()))
    return json.loads(json.dumps(found))


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setitem(Bootstrap.__init__.__kwdefaults__, "resamples", 20)
    monkeypatch.setattr(MadeUp, "wrong", ())


def test_every_experiment_is_here():
    assert set(SET_UPS) == {one.name for one in bench.EXPERIMENTS}


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
@pytest.mark.parametrize("name", SET_UPS)
def test_interrupted_after_any_entry_or_within_any_trial_it_ends_as_if_it_had_not_been(name, quick, monkeypatch):
    experiment, wrong = SET_UPS[name](monkeypatch)
    monkeypatch.setattr(MadeUp, "wrong", (wrong,))
    whole = []
    expected = document(experiment, Ledger(write=whole.append), quick=quick)
    assert len({entry["key"] for entry in whole}) == len(whole)
    kept = []
    for sitting in range(2 * len(whole) + 1):
        before = len(kept)

        def write(entry, before=before, sitting=sitting):
            if len(kept) == before:
                kept.append(entry)
            elif sitting % 2:  # this one is kept too, before the end
                kept.append(entry)
                raise Interruption
            else:  # this one is lost
                raise Interruption

        try:
            ledger = Ledger(json.loads(json.dumps(kept)), write)
            assert document(experiment, ledger, quick=quick) == expected
            break
        except Interruption:
            continue
    assert [entry["key"] for entry in kept if "start" not in entry["key"]] == [
        entry["key"] for entry in whole if "start" not in entry["key"]
    ]
    assert ledger.progress.trials_done == ledger.progress.trials
    assert document(experiment, Ledger(kept), quick=quick) == expected, "nothing is left to measure"


@pytest.mark.parametrize("name", SET_UPS)
def test_what_is_planned_is_what_is_measured_and_one_failed_check_fails_the_run(name, monkeypatch):
    experiment, wrong = SET_UPS[name](monkeypatch)
    ledger = Ledger()
    found = experiment.run(ledger, quick=False)
    assert found.correct, found.checks
    assert ledger.progress.trials == ledger.progress.trials_done > 0
    assert ledger.progress.left_s() == 0
    monkeypatch.setattr(MadeUp, "wrong", (wrong,))
    assert not experiment.run(Ledger(), quick=False).correct
