"""A plan of versions carried out against a server, by one of three kinds of runtime.

Owns: threads and connections of a replay, what is asked of the server, and the figures of one run.
Must not know: where a plan comes from (`harness.arrivals`), what counts as what (`harness.outcomes`).

- `native`: closes its side of the old connection, and sends the new request.  What the server still says is read.
- `retire`: the new request supersedes its predecessor, by header.  Where the successor comes later, `POST /supersede`.
- `abandon`: sends the new request and leaves the old one running, as a runtime does that cannot cancel.

Strategy: every scope is a thread with an agenda, other work is one more.  Nothing waits for an answer before it sends.
When the engine has let go is observed: under `retire` the transition's record says it; under `native` the engine is
asked something that it answers only between two steps, right after the hang-up, and what such an answer takes in an
idle engine is taken off.  A plain server has no such question: there a request of one token is sent, which may be
answered a step too late.

A run in which an act came late has met other arrivals than were planned, because the machine stood still; it is
dropped and repeated (`on_time`).
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import httpx

from harness.arrivals import Agenda, Arrival, GiveUp, Plan, Planned, Start, T, agenda
from harness.client import TIMEOUT_S, Reply, Streaming, http, probe_ms
from harness.experiment import join
from harness.outcomes import NEVER, Account, Outcome, Version, fates, let_go, tokens, unpublished_tokens
from harness.progress import note
from harness.statistics import percentile
from harness.workload import PATIENCE_S, bearer, completion, fresh_salt, fresh_scope, passage, record_of

NAP_S = 0.002
ON_TIME_S = 0.25
REPEATS = 3
"""How often a run is repeated whose acts were late."""
WHOLE = "last_versions_are_whole"
"""The one check that a run whose acts were late may fail by that alone."""
Key = tuple[int, int]
"""Scope and number of a version."""
Figures = Mapping[str, Any]
"""Of one arm's run, as `Replayed.figures` tells them."""


class Arm(StrEnum):
    """Which runtime it is."""

    NATIVE = "native"
    RETIRE = "retire"
    ABANDON = "abandon"


@dataclass(frozen=True)
class Site:
    """Where requests go, and to which model."""

    url: str
    model: str
    key: str | None = None


class Sent(Streaming):
    """A streamed completion whose failure is its reply's, and that can be left while what still comes is read."""

    def _run(self) -> None:
        try:
            super()._run()
        except (httpx.HTTPError, httpx.StreamError, OSError, ValueError) as error:
            self.reply.error = self.reply.error or {"message": str(error) or type(error).__name__}

    def close_sending(self) -> None:
        """Close this side of the connection as soon as there is one that was answered."""
        while self._socket is None and self._thread.is_alive():
            time.sleep(NAP_S)
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the reply is over, and its connection with it
                self._socket.shutdown(socket.SHUT_WR)


def walk(
    todo: Agenda[T],
    act: Callable[[T], None],
    origin: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Do everything at its time after `origin`; the seconds by which the latest was late."""
    late_s = 0.0
    while (next_s := todo.next_s()) is not None:
        while (left_s := origin + next_s - clock()) > 0:
            sleep(left_s)
        for due_s, item in todo.due(clock() - origin):
            late_s = max(late_s, clock() - origin - due_s)
            act(item)
    return late_s


def prompts(site: Site, plan: Plan, seed: int) -> dict[Key, list[int]]:
    """Token ids of every version: natural text that has exactly the planned tokens in common with its predecessor's."""
    found: dict[Key, list[int]] = {}
    for scope, versions in plan.scopes.items():
        before: list[int] = []
        for one in versions:
            at = one.shared_tokens
            for other in range(64):
                place = (seed * 100 + scope) * 10_000 + one.number * 64 + other
                ids = before[:at] + passage(site.url, site.model, one.prompt_tokens - at, place, site.key)
                if before[at : at + 1] != ids[at : at + 1]:
                    break
            found[scope, one.number] = before = ids
    return found


@dataclass(frozen=True)
class Replayed:
    """One arm's run.

    `versions`: per scope, in order.  `records`: by where they are; one that did not close is missing.
    `late_s`: by how much the latest act was late, inf if somebody has ended before his last one.  `cut`: how many
    answers were not over at the limit.  `repeats`: how many runs were dropped for this one.  `before`: whether
    what must be true of any run was true of those.
    """

    arm: Arm
    plan: Plan
    origin: float
    window_s: float
    versions: Mapping[int, Sequence[Version]]
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    background: Sequence[Reply] = ()
    late_s: float = 0.0
    cut: int = 0
    repeats: int = 0
    before: Mapping[str, bool] = field(default_factory=dict)

    @property
    def late(self) -> bool:
        """Whether all was done, and something too late."""
        return ON_TIME_S <= self.late_s < NEVER

    @cached_property
    def account(self) -> Account:
        """The run in figures."""
        return Account(
            [fate for versions in self.versions.values() for fate in fates(versions)],
            self.origin,
            self.window_s,
            self.plan.finals,
            list(self.records.values()),
        )

    def figures(self) -> dict[str, Any]:
        """Values of a cell, one a trial."""
        account = self.account
        cleanup_ms, first_ms = account.cleanup_ms(), account.first_token_ms()
        return {
            "goodput_tokens_per_s": account.goodput(),
            "obsolete_tokens": account.obsolete_tokens(),
            "late_tokens": account.late_tokens(),
            "final_versions": account.spoke(),
            "final_whole": account.whole(),
            "final_ttft_ms": statistics.median(first_ms) if first_ms else None,
            "cleanup_ms": percentile(cleanup_ms, 99) if cleanup_ms else None,
            "cleanup_median_ms": statistics.median(cleanup_ms) if cleanup_ms else None,
            "cleanup_intervals": account.cleanup_intervals(),
            "most_obsolete": account.most_obsolete(),
            "cut_at_limit": self.cut,
            "repeats": self.repeats,
            "background_tokens": sum(tokens(reply.frames) for reply in self.background),
            "live": [list(change) for change in account.live()],
            **account.outcomes(),
        }

    def checks(self) -> dict[str, bool]:
        """What must be true whatever the figures are."""
        account = self.account
        found = {
            "no_version_failed": account.outcomes()[Outcome.FAILED.value] == 0 or self.cut > 0,
            "acts_on_time": self.late_s < ON_TIME_S,
        }
        if self.arm is Arm.RETIRE:
            wanted = [v.transition for versions in self.versions.values() for v in versions if v.gave_up_at is not None]
            found["every_transition_closed"] = all(one in self.records for one in wanted)
            found["epochs_follow_versions"] = all(map(_ascending, self.versions.values()))
            beyond = [unpublished_tokens(versions, self.records) for versions in self.versions.values()]
            found["nothing_beyond_what_was_published"] = not any(beyond)
            found[WHOLE] = all(versions[-1].whole for versions in self.versions.values())
        join(found, self.before)
        return found


def _ascending(versions: Sequence[Version]) -> bool:
    """Whether the epochs of those that were accepted rise; a refusal may tell the epoch of somebody else."""
    told = [int(v.reply.headers["x-retire-epoch"]) for v in versions if v.accepted]
    return told == sorted(set(told))


class Replay:
    """`others`: requests of nobody's scope.  `limit_s`: how long after the last act answers are waited for.

    `window_s`: seconds over which goodput is counted.
    """

    def __init__(
        self,
        site: Site,
        plan: Plan,
        texts: Mapping[Key, list[int]],
        *,
        window_s: float,
        limit_s: float,
        others: Sequence[Arrival] = (),
    ) -> None:
        self._site, self._plan, self._texts = site, plan, texts
        self._window_s, self._limit_s, self._others = window_s, limit_s, others

    def run(self, arm: Arm) -> Replayed:
        """Carry it out once, in caches that nobody has used."""
        engine = _Engine(self._site)
        scopes = {
            scope: _Scope(self._site, arm, engine, {key[1]: ids for key, ids in self._texts.items() if key[0] == scope})
            for scope in self._plan.scopes
        }
        background = _Background(self._site, self._others)
        origin = time.monotonic() + 0.1
        late: list[float] = []
        walkers = [
            threading.Thread(target=lambda t, a: late.append(walk(t, a, origin)), args=(todo, act), daemon=True)
            for todo, act in [
                *((agenda(versions), scopes[scope].act) for scope, versions in self._plan.scopes.items()),
                (Agenda((one.at_s, one) for one in self._others), background.send),
            ]
        ]
        for walker in walkers:
            walker.start()
        for walker in walkers:
            walker.join()
        streams = [*background.streams, *(stream for scope in scopes.values() for stream in scope.streams)]
        limit_at = origin + self._plan.last_s + self._limit_s
        while any(not stream.reply.done_at for stream in streams) and time.monotonic() < limit_at:
            time.sleep(0.02)
        cut = [stream for stream in streams if not stream.reply.done_at]
        for stream in cut:
            stream.hang_up()
        for stream in streams:
            stream.wait()
        versions = {scope: one.versions() for scope, one in scopes.items()}
        records = self._records(versions)
        if arm is Arm.RETIRE:
            for of_scope in versions.values():
                let_go(of_scope, records)
        return Replayed(
            arm,
            self._plan,
            origin,
            self._window_s,
            versions,
            records,
            [stream.reply for stream in background.streams],
            max(late, default=0.0) if len(late) == len(walkers) else NEVER,
            len(cut),
        )

    def _records(self, versions: Mapping[int, Sequence[Version]]) -> dict[str, Mapping[str, Any]]:
        """Those that close within `PATIENCE_S`, which is for all of them together."""
        found: dict[str, Mapping[str, Any]] = {}
        deadline = time.monotonic() + PATIENCE_S
        for version in (version for of_scope in versions.values() for version in of_scope):
            if version.transition is not None:
                left_s = deadline - time.monotonic()
                with contextlib.suppress(TimeoutError, httpx.HTTPError):  # missing, and a check says so
                    found[version.transition] = record_of(self._site.url, version.transition, self._site.key, left_s)
        return found


def on_time(once: Callable[[], Replayed]) -> Replayed:
    """The first run whose acts were on time, or the last one that `REPEATS` allows.  `once`: makes a run.

    The others leave their number, and their checks: a server must be right whenever it is asked.
    """
    run = once()
    for repeats in range(1, REPEATS + 1):
        if not run.late:
            break
        note(f"  {run.arm}: an act was {run.late_s:.2f} s late; repeated, {repeats} of {REPEATS} times at most")
        before = {name: holds for name, holds in run.checks().items() if name not in ("acts_on_time", WHOLE)}
        run = replace(once(), repeats=repeats, before=before)
    return run


class _Engine:
    """Knows when the engine is between two steps."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._headers = bearer(site.key)
        status = http.get(f"{site.url}/retire/status", headers=self._headers, timeout=TIMEOUT_S)
        self._ask = self._ask_status if status.status_code == 200 else self._ask_for_a_token
        self._ask()
        self._idle_s = statistics.median(self._ask() for _ in range(5))

    def let_go_at(self) -> float:
        """When it has finished the step that runs now."""
        asked_at = time.monotonic()
        return asked_at + max(0.0, self._ask() - self._idle_s)

    def _ask_status(self) -> float:
        asked_at = time.monotonic()
        http.get(f"{self._site.url}/retire/status", headers=self._headers, timeout=TIMEOUT_S).raise_for_status()
        return time.monotonic() - asked_at

    def _ask_for_a_token(self) -> float:
        return probe_ms(self._site.url, self._site.model, self._headers) / 1000


class _Scope:
    """One scope's runtime.  `texts`: the prompt of each version, by number."""

    def __init__(self, site: Site, arm: Arm, engine: _Engine, texts: Mapping[int, list[int]]) -> None:
        self._site, self._arm, self._engine, self._texts = site, arm, engine, texts
        self._name, self._salt = fresh_scope(), fresh_salt()
        self._versions: list[Version] = []
        self._given_up: tuple[float, float | None, str | None] | None = None  # ahead of its successor
        self._leaving: list[threading.Thread] = []
        self.streams: list[Sent] = []

    def act(self, item: GiveUp | Start) -> None:
        """What is due now."""
        if isinstance(item, GiveUp):
            self._give_up()
        else:
            self._start(item.version)

    def versions(self) -> list[Version]:
        """All of them, once everything is over."""
        for thread in self._leaving:
            thread.join()
        for version in self._versions:
            if version.gave_up_at is not None and version.planned.in_one_act:
                version.accepted_at = version.reply.headers_at if version.accepted else None
                version.transition = version.reply.headers.get("location")
        return self._versions

    def _start(self, planned: Planned) -> None:
        headers = bearer(self._site.key)
        gave_up_at = accepted_at = transition = None
        if self._arm is Arm.RETIRE:
            headers["X-Retire-Scope"] = self._name
        if planned.in_one_act:
            gave_up_at = time.monotonic()
            if self._arm is Arm.RETIRE:
                headers["X-Retire-Supersedes"] = "*"  # whether the one before was accepted may not be known yet
            elif self._arm is Arm.NATIVE:
                self._leave()
        elif self._given_up is not None:
            (gave_up_at, accepted_at, transition), self._given_up = self._given_up, None
        body = completion(
            self._site.model,
            self._texts[planned.number],
            planned.answer_tokens,
            cache_salt=self._salt,
            logprobs=0,
            return_token_ids=True,
        )
        stream = Sent(self._site.url, body, headers)
        self.streams.append(stream)
        self._versions.append(Version(planned, stream.reply, gave_up_at, accepted_at, transition=transition))

    def _give_up(self) -> None:
        gave_up_at = time.monotonic()
        accepted_at: float | None = gave_up_at
        transition = None
        if self._arm is Arm.NATIVE:
            self._leave()
        elif self._arm is Arm.RETIRE:
            accepted_at = None
            with contextlib.suppress(httpx.TransportError):  # then nothing was accepted
                answer = http.post(
                    f"{self._site.url}/supersede",
                    json={"scope": self._name, "expected_epoch": "*"},
                    headers=bearer(self._site.key),
                    timeout=TIMEOUT_S,
                )
                if answer.is_success:
                    accepted_at, transition = time.monotonic(), answer.headers["location"]
        self._given_up = gave_up_at, accepted_at, transition

    def _leave(self) -> None:
        """Hang up without waiting, and look when the engine has heard of it."""
        if self.streams and not self.streams[-1].reply.done_at:
            thread = threading.Thread(target=self._left, args=(self.streams[-1], self._versions[-1]), daemon=True)
            self._leaving.append(thread)
            thread.start()

    def _left(self, stream: Sent, version: Version) -> None:
        stream.close_sending()
        with contextlib.suppress(httpx.HTTPError):  # then the end of its answer has to do
            version.let_go_at = self._engine.let_go_at()


class _Background:
    """Other work."""

    def __init__(self, site: Site, others: Sequence[Arrival]) -> None:
        self._site = site
        self._prompts = {
            one: passage(site.url, site.model, one.prompt_tokens, 77_000_000 + number, site.key)
            for number, one in enumerate(others)
        }
        self.streams: list[Sent] = []

    def send(self, one: Arrival) -> None:
        """One request that nobody revises."""
        body = completion(
            self._site.model, self._prompts[one], one.answer_tokens, cache_salt=fresh_salt(), return_token_ids=True
        )
        self.streams.append(Sent(self._site.url, body, bearer(self._site.key)))


# ---------------------------------------------------------------- figures of several runs


def in_turn(arms: Sequence[T], trial: int) -> list[T]:
    """The order of a trial: it begins one further with every second trial, and is turned round in every other.

    Turned alone, arms that stand side by side would keep who comes directly after whom.
    """
    turn = trial // 2 % len(arms)
    order = [*arms[turn:], *arms[:turn]]
    return order[::-1] if trial % 2 else order


def summary(found: Mapping[str, Sequence[Figures]], best_native: str, retire: str, plan: Plan) -> dict[str, Any]:
    """The keys that scripts rely on, from all trials of two arms; None where an arm has no run.

    Tokens are sums over trials, final versions the least of them, goodput a ratio of medians.
    """
    ours, theirs = [found.get(arm, ()) for arm in (retire, best_native)]
    intervals = [one for run in ours for one in run["cleanup_intervals"]]
    native, versioned = goodput(theirs), goodput(ours)
    return {
        "retire_obsolete_tokens": sum(run["obsolete_tokens"] for run in ours) if ours else None,
        "native_obsolete_tokens": sum(run["obsolete_tokens"] for run in theirs) if theirs else None,
        "retire_final": min((run["final_versions"] for run in ours), default=None),
        "native_final": min((run["final_versions"] for run in theirs), default=None),
        "final_total": len(plan.finals),
        "goodput_ratio": versioned / native if native and versioned is not None else None,
        "cleanup_p99_intervals": percentile(intervals, 99) if intervals else None,
        "cleanups_in_armed_steps": len(intervals),
        "runs_repeated": repeated(run for runs in found.values() for run in runs),
    }


def repeated(runs: Iterable[Figures]) -> int:
    """How many runs were dropped because acts came late."""
    return sum(run["repeats"] for run in runs)


def goodput(runs: Sequence[Figures]) -> float | None:
    """The median of the runs, token/s; None without any."""
    return statistics.median(run["goodput_tokens_per_s"] for run in runs) if runs else None
