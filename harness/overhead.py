"""`retire bench overhead`: what RETIRE costs whoever does not use it, and what its checks cost whoever does.

Stands beside Table 11 (prefill of 1K and 4K, decode of one stream, eight requests mixed; safe points 35,190 → 1,080).

Two servers with the same flags get the same requests at the same time and take turns (`harness.turns`).

- `native`: vLLM without patches.
- `idle`: RETIRE, no scope in use.

Cells: `decode` (one stream: time per token), `prefill_1k` and `prefill_4k` (TTFT of one request in a cache of its own),
`mixed` (eight requests, half of them mostly prompt: time until all are done).  A figure is the median of the pairs'
ratios.  In a full run the servers are started anew several times.

Then, on the last `idle` server:

- ADVANCE beside eight decoding streams: from the call's arrival at the gate to the stored word, as the record tells.
- A fence: a long prefill superseded `INTO_QUANTUM` into its second quantum, against a plain abort at that moment.
- One scoped workload there (`selective`) and on a server whose every scoped step is armed (`always`): safe points.

What could be unfair, and which way:

- A server that has just worked spins for a second, and the workers of all servers are bound to the same core: all
  processes of whoever is not at work are stopped, and both are woken by a short request before a pair.
- Every turn begins with the other's data in the caches.  Both pay that; it makes a difference between them smaller by
  the share that it takes of a turn.
- Where a server's memory lies is decided at its start and stays: a second unpatched server differs from the first by a
  percent or two for as long as both live.  Hence many starts, which are resampled as wholes.
  Whether the C library gives freed memory back, only to fault it in again at the next layer, would depend on accidents
  of each process: both are told to keep it.
- Decode and prefill must say the same on both servers.  In `mixed` who shares a step with whom depends on timing, and
  in bfloat16 the company decides between near-ties: there every answer must be whole.
- `native` has no KV connector and no gate; both are part of what RETIRE costs.  In favour of native.
- Where a decode step takes longer than `RETIRE_ARM_MS`, as on a slow machine, selective arming arms it as well.
"""

from __future__ import annotations

import json
import select
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from harness.client import TIMEOUT_S, Reply, Streaming, http
from harness.experiment import Cell, Result, Target, figures
from harness.ledger import Key, Ledger
from harness.moments import Moments
from harness.progress import note
from harness.session import Session, check, left_as_found, metric, started
from harness.statistics import Bootstrap, Pairs, Verdict, median_at_most, median_of_ratios, percentile, whether
from harness.turns import Turns
from harness.workload import PATIENCE_S, completion, fresh_salt, fresh_scope, passage, record_of
from retire.core.quantum import Policy
from retire.settings import POLICY_ENV

SAFE_POINTS = "retire:safe_points_total"
BLOCK, QUANTUM = 128, 1024
SHORT, DECODE_TOKENS, PREFILL_TOKENS = 32, 32, 2
STREAMS, STREAM_TOKENS = 8, 7000
FENCED_PROMPT, INTO_QUANTUM = 4 * QUANTUM, 0.15
ADVANCED_SCOPES = 10
SCOPED_PROMPT, SCOPED_TOKENS = 1024, 64
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
SOON = {"retain": {"ttl_s": 0.2}}
AIM_PCT, BOUND_PCT, ADVANCE_AIM_MS = 0.5, 1.05, 1.0
BOUNDED = ("decode", "prefill_4k")
PAPER = {"decode": "1.05 %", "prefill_1k": "0.14 %", "prefill_4k": "0.70 %", "mixed": "-0.65 %"}
ARMS = ("native", "idle")
TURN_S = 0.015

Found = TypeVar("Found")


@dataclass(frozen=True)
class Overhead:
    """`starts`: of the servers.  `pairs`: of each cell, at every start."""

    model: str = "smollm2"
    starts: int = 8
    pairs: Mapping[str, int] = field(
        default_factory=lambda: {"decode": 16, "prefill_1k": 8, "prefill_4k": 6, "mixed": 4}
    )
    quick_pairs: Mapping[str, int] = field(
        default_factory=lambda: {"decode": 16, "prefill_1k": 4, "prefill_4k": 2, "mixed": 2}
    )
    advances: int = 1200
    quick_advances: int = 100
    fences: int = 3
    name: str = field(default="overhead", init=False)
    paper: str = field(default="Table 11 and §7.2", init=False)
    own_servers: str = field(default="several servers take turns, and one of them is without patches", init=False)

    def run(self, ledger: Ledger, *, quick: bool) -> Result:
        """See the module."""
        starts, planned = (1, self.quick_pairs) if quick else (self.starts, self.pairs)
        advances, fences = (self.quick_advances, 1) if quick else (self.advances, self.fences)
        ledger.plan({cell: starts * count for cell, count in planned.items()})
        ledger.plan({"advance": 1, "fence": fences, "safe points": 1})
        bench = _Bench(self.model, ledger)

        def one(number: int) -> dict[str, Any]:
            last = number == starts - 1
            with _servers(self.model, ledger.checks, always=last, swapped=number % 2 == 1) as (arms, turns, seal):
                found = bench.pairs(arms, turns, planned, start=number)
                used = _Used(bench, arms, turns).summary(advances, fences) if last else {}
            return {"found": found, "used": used, "seal": seal}

        done = [ledger.start(f"start {number + 1}", partial(one, number)) for number in range(starts)]
        return _result(
            self,
            _by_server([start["found"] for start in done]),
            ledger.checks,
            done[0]["seal"],
            done[-1]["used"],
            starts,
            planned,
        )


Worked = Callable[[float], float]
"""How long the server had worked by then, of `time.monotonic`, in seconds."""


def per_token_ms(replies: Sequence[Reply], worked_s: Worked) -> float:
    """Between two tokens of the one stream."""
    at = [frame.at for frame in replies[0].frames if frame.token_ids]
    return (worked_s(at[-1]) - worked_s(at[0])) / (len(at) - 1) * 1000


def first_token_ms(replies: Sequence[Reply], worked_s: Worked) -> float:
    """Until the first token of the one stream."""
    return worked_s(replies[0].first_token_at) * 1000


def all_done_ms(replies: Sequence[Reply], worked_s: Worked) -> float:
    """Until the last token of all."""
    return max(worked_s(frame.at) for reply in replies for frame in reply.frames if frame.token_ids) * 1000


@dataclass(frozen=True)
class _Kind:
    """What a cell sends at once, what is measured, and whether both servers must say the same."""

    prompts: Sequence[int]
    tokens: Sequence[int]
    ms: Callable[[Sequence[Reply], Worked], float]
    equal: bool = True


CELLS = {
    "decode": _Kind((SHORT,), (DECODE_TOKENS,), per_token_ms),
    "prefill_1k": _Kind((1024,), (PREFILL_TOKENS,), first_token_ms),
    "prefill_4k": _Kind((4096,), (PREFILL_TOKENS,), first_token_ms),
    "mixed": _Kind((448,) * 4 + (SHORT,) * 4, (4,) * 4 + (32,) * 4, all_done_ms, equal=False),
}


class _Arm:
    """What a server is asked."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.model = model

    def wake(self) -> None:
        """Who has idled is slow at first."""
        self.send(passage(self.url, self.model, SHORT, seed=0), 4).wait()

    def send(self, ids: list[int], tokens: int, headers: Mapping[str, str] | None = None) -> Streaming:
        """A streamed request in a cache of its own."""
        asked = completion(self.model, ids, tokens, cache_salt=fresh_salt(), return_token_ids=True)
        return Streaming(self.url, asked, headers)

    def answers(self, prompts: Sequence[list[int]], tokens: Sequence[int]) -> list[Reply]:
        """All of them at once, until the last one is answered."""
        streams = [self.send(ids, count) for ids, count in zip(prompts, tokens, strict=True)]
        return [stream.wait() for stream in streams]


@contextmanager
def _servers(
    model: str, checks: dict[str, bool], *, always: bool, swapped: bool
) -> Iterator[tuple[dict[str, _Arm], Turns, Mapping[str, str]]]:
    """What they are asked, their turns, and a seal; patched ones are checked for what is left in them."""
    flags = (
        *("--block-size", str(BLOCK)),
        *("--max-num-batched-tokens", str(QUANTUM)),
        *("--kv-cache-memory-bytes", str(1 << 30)),
    )
    names = [*(ARMS[::-1] if swapped else ARMS), *(("always",) if always else ())]
    policy = dict.fromkeys(names, Policy.SELECTIVE) | {"always": Policy.ALWAYS}  # whatever is exported here
    env = {name: {**ALLOCATOR, POLICY_ENV: policy[name]} for name in names}
    with started(model, flags, [{"patched": name != "native", "env": env[name]} for name in names]) as running:
        servers = dict(zip(names, running, strict=True))
        sessions = [Session(server.url, model, checks=checks) for name, server in servers.items() if name != "native"]
        with left_as_found(sessions):
            arms = {name: _Arm(server.url, model) for name, server in servers.items()}
            for arm in arms.values():
                passage(arm.url, model, SHORT, seed=0)  # tokenised once, while all run
            yield arms, Turns(servers, TURN_S), sessions[0].seal


Pair = dict[str, Any]
"""`ms`: per arm.  `server`: where the native one was; another one after a run was interrupted within a start."""


class _Bench:
    """Pairs on servers that take turns."""

    def __init__(self, model: str, ledger: Ledger) -> None:
        self.model = model
        self.ledger = ledger

    def check(self, name: str, holds: bool) -> bool:
        """Note one observation of a claim."""
        return check(self.ledger.checks, name, holds)

    def pairs(
        self, arms: Mapping[str, _Arm], turns: Turns, planned: Mapping[str, int], start: int
    ) -> dict[str, list[Pair]]:
        """All pairs of one start, the cells spread evenly over it; per cell each that counts."""
        found: dict[str, list[Pair]] = {cell: [] for cell in planned}
        due = sorted(((n + 0.5) / count, cell, n) for cell, count in planned.items() for n in range(count))
        for cell in planned:
            self._pair(arms, turns, cell, seed=900 + start)  # thrown away
        for place, cell, number in due:
            seed = 1000 * (1 + start) + number
            told = f"start {start + 1}, {place:.0%}"
            pair = self.ledger.trial(Key(cell, ARMS, number, seed), partial(self._timed, arms, turns, cell, seed, told))
            if pair is not None:
                found[cell].append(pair)
        return found

    def _timed(self, arms: Mapping[str, _Arm], turns: Turns, cell: str, seed: int, told: str) -> Pair | None:
        ms, counts = self._pair(arms, turns, cell, seed)
        shown = ", ".join(f"{arm} {ms[arm]:.2f}" for arm in ARMS)
        note(f"  {told}: {cell} {shown} ms, {(ms['idle'] / ms['native'] - 1) * 100:+.2f} %")
        return {"ms": ms, "server": arms[ARMS[0]].url} if counts else None

    def _pair(self, arms: Mapping[str, _Arm], turns: Turns, cell: str, seed: int) -> tuple[dict[str, float], bool]:
        kind, url = CELLS[cell], arms[ARMS[0]].url
        prompts = [passage(url, self.model, count, 100 * seed + n) for n, count in enumerate(kind.prompts)]
        turns.run({name: arms[name].wake for name in ARMS})
        replies = turns.run({name: partial(arms[name].answers, prompts, kind.tokens) for name in ARMS})
        said = {name: [reply.token_ids for reply in answers] for name, answers in replies.items()}
        whole = all([len(ids) for ids in answers] == list(kind.tokens) for answers in said.values())
        counts = self.check("every_answer_is_whole", whole)
        if kind.equal:
            counts &= self.check("both_servers_say_the_same", said["native"] == said["idle"])
        if not whole:
            return dict.fromkeys(ARMS, 1.0), counts
        return {name: kind.ms(answers, partial(turns.worked_s, name)) for name, answers in replies.items()}, counts


class _Unread:
    """Scoped streams that decode; what they say is thrown away, so that their reader hardly needs the server's core."""

    def __init__(self, arm: _Arm) -> None:
        where = urlsplit(arm.url)
        self._sockets = [socket.create_connection((where.hostname, where.port)) for _ in range(STREAMS)]
        self._last = [b""] * STREAMS
        self._left = threading.Event()
        for number, one in enumerate(self._sockets):
            ids = passage(arm.url, arm.model, SHORT, seed=70 + number)
            body = json.dumps({**completion(arm.model, ids, STREAM_TOKENS), "stream": True}).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nX-Retire-Scope: {fresh_scope()}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            one.sendall(head.encode() + body)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + PATIENCE_S
        while not self.decode():
            if time.monotonic() > deadline:
                raise RuntimeError("the streams did not come to decode together")

    def _read(self) -> None:
        while not self._left.wait(0.02):
            for one in select.select(self._sockets, [], [], 0)[0]:
                self._last[self._sockets.index(one)] = one.recv(1 << 16)

    def decode(self) -> bool:
        """Whether every stream has said something new by a second from now, and none is over."""
        self._last = [b""] * STREAMS
        time.sleep(1)
        return all(b"data: {" in said and b"[DONE]" not in said for said in self._last)

    def leave(self) -> None:
        """Hang up."""
        self._left.set()
        self._thread.join()
        for one in self._sockets:
            one.close()


class _Used:
    """What is asked of servers that are used."""

    def __init__(self, bench: _Bench, arms: Mapping[str, _Arm], turns: Turns) -> None:
        self._bench = bench
        self._arms = {"selective": arms["idle"], "always": arms["always"]}
        self._selective = arms["idle"]
        self._turns = turns

    def summary(self, advances: int, fences: int) -> dict[str, Any]:
        """What came out, as entries of the summary."""

        def trial(cell: str, number: int, work: Callable[[], Any]) -> Any:
            return self._bench.ledger.trial(Key(cell, tuple(self._arms), number, seed=number), work)

        found: dict[str, Any] = trial("advance", 0, partial(self.advance, advances))
        found |= _fences([trial("fence", number, partial(self.fence, number)) for number in range(fences)])
        found |= trial("safe points", 0, self.safe_points)
        return found

    def _alone(self, name: str, work: Callable[[], Found]) -> Found:
        """What the work gives, while no other server does anything."""
        return self._turns.run({name: work})[name]

    # -- ADVANCE --------------------------------------------------------------------------------------------------

    def advance(self, count: int) -> dict[str, Any]:
        """Supersede idle scopes beside eight scoped streams that decode, by header and by `POST /supersede` in turn."""
        return self._alone("idle", partial(self._advance_all, count))

    def _advance_all(self, count: int) -> dict[str, Any]:
        arm = self._selective
        scopes = [fresh_scope() for _ in range(ADVANCED_SCOPES)]
        server_ms: dict[str, list[float]] = {"header": [], "body": []}
        client_ms: dict[str, list[float]] = {"header": [], "body": []}
        arm.wake()
        streams = _Unread(arm)
        locations: list[tuple[str, str]] = []
        for number in range(count + ADVANCED_SCOPES):  # the first ones make the scopes known, and are left out
            form = "header" if number % 2 else "body"
            scope, epoch = scopes[number % ADVANCED_SCOPES], 1 + number // ADVANCED_SCOPES
            location, took_ms = self._advance(form, scope, epoch)
            if number >= ADVANCED_SCOPES:
                locations.append((form, location))
                client_ms[form].append(took_ms)
        for form, location in locations:
            server_ms[form].append(record_of(arm.url, location)["advance_ms"])
        self._bench.check("eight_streams_decoded_throughout", streams.decode())
        streams.leave()
        for scope in scopes:
            http.delete(f"{arm.url}/scopes/{scope}", timeout=TIMEOUT_S).raise_for_status()
        return {
            "advance_p99_ms": percentile(server_ms["header"], 99),
            "advance_p50_ms": statistics.median(server_ms["header"]),
            "advance_client_p50_ms": statistics.median(client_ms["header"]),
            "advance_client_p99_ms": percentile(client_ms["header"], 99),
            "advance_body_p99_ms": percentile(server_ms["body"], 99),
            "advance_body_client_p99_ms": percentile(client_ms["body"], 99),
            "advances": len(locations),
        }

    def _advance(self, form: str, scope: str, epoch: int) -> tuple[str, float]:
        """One supersede: its record, and when the client had its answer's headers."""
        arm = self._selective
        if form == "body":
            body = {"scope": scope, "expected_epoch": epoch, "contract": SOON}
            started = time.monotonic()
            answer = http.post(f"{arm.url}/supersede", json=body, timeout=TIMEOUT_S).raise_for_status()
            return answer.headers["location"], (time.monotonic() - started) * 1000
        headers = {"X-Retire-Scope": scope, "X-Retire-Supersedes": str(epoch)}
        reply = arm.send(passage(arm.url, arm.model, SHORT, seed=0), 1, headers).wait()
        return reply.headers["location"], (reply.headers_at - reply.sent_at) * 1000

    # -- a fence --------------------------------------------------------------------------------------------------

    def fence(self, number: int) -> tuple[float, float]:
        """A prefill that is ended in its second quantum: natively, and by a supersede; ms of both."""
        return self._alone("idle", partial(self._fence_alone, number))

    def _fence_alone(self, number: int) -> tuple[float, float]:
        arm = self._selective
        moments = Moments(arm.url, self._turns.clock("idle"))
        ids = passage(arm.url, arm.model, FENCED_PROMPT, seed=80 + number)
        moments.calibrate(partial(arm.send, ids, 1), FENCED_PROMPT // QUANTUM)
        native = arm.send(ids, 1)
        moment = moments.wait(native, 2, INTO_QUANTUM)
        native.hang_up()
        boundary_ms = (moment.boundary_s() - moments.idle_s) * 1000
        native.wait()
        scope = fresh_scope()
        old = arm.send(ids, 1, {"X-Retire-Scope": scope})
        moments.wait(old, 2, INTO_QUANTUM)
        body = {"scope": scope, "expected_epoch": 1, "contract": SOON}
        answer = http.post(f"{arm.url}/supersede", json=body, timeout=TIMEOUT_S).raise_for_status()
        old.wait()
        record = record_of(arm.url, answer.headers["location"])
        stopped = [receipt["stopped"] for receipt in record["receipts"]]
        self._bench.check("the_prefill_was_stopped_at_a_safe_point", stopped == [True])
        return boundary_ms, record["stages"]["fence"]

    # -- safe points ----------------------------------------------------------------------------------------------

    def safe_points(self) -> dict[str, Any]:
        """The same scoped prefill and decode on both servers, in turn."""
        took: dict[str, list[float]] = {"selective": [], "always": []}
        passed: dict[str, list[int]] = {"selective": [], "always": []}
        said: dict[str, list[list[int]]] = {"selective": [], "always": []}
        for number, name in enumerate(("selective", "always", "always", "selective")):
            arm = self._arms[name]
            ids = passage(arm.url, arm.model, SCOPED_PROMPT, seed=60 + number // 2)
            server = "idle" if name == "selective" else name
            reply, points = self._alone(server, partial(self._scoped, arm, ids))
            passed[name].append(points)
            at = [frame.at for frame in reply.frames if frame.token_ids]
            took[name].append((at[-1] - at[0]) * 1000 / (SCOPED_TOKENS - 1))
            said[name].append(reply.token_ids)
        same = sorted(said["selective"]) == sorted(said["always"])
        self._bench.check("scoped_answers_are_the_same", same)
        return {
            "safe_points_selective": sum(passed["selective"]),
            "safe_points_always": sum(passed["always"]),
            "scoped_ms_per_token_selective": statistics.median(took["selective"]),
            "scoped_ms_per_token_always": statistics.median(took["always"]),
        }

    def _scoped(self, arm: _Arm, ids: list[int]) -> tuple[Reply, int]:
        """A scoped answer, and how many safe points it passed; they are told when the request has ended."""
        arm.wake()
        before = metric(arm.url, SAFE_POINTS)
        reply = arm.send(ids, SCOPED_TOKENS, {"X-Retire-Scope": fresh_scope()}).wait()
        deadline = time.monotonic() + 5
        while (found := metric(arm.url, SAFE_POINTS)) == before and time.monotonic() < deadline:
            time.sleep(0.05)
        return reply, int(found - before)


def _by_server(starts: Sequence[Mapping[str, Sequence[Pair]]]) -> dict[str, list[tuple[int, dict[str, float]]]]:
    """Per cell ms of each pair, and which servers it was measured on: what has those in common is resampled whole."""
    servers: dict[tuple[int, str], int] = {}
    return {
        cell: [
            (servers.setdefault((number, pair["server"]), len(servers)), pair["ms"])
            for number, found in enumerate(starts)
            for pair in found[cell]
        ]
        for cell in CELLS
    }


def _fences(trials: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Entries of the summary from the native boundary and the fence of each trial, ms."""
    boundary_ms, fence_ms = (statistics.median(column) for column in zip(*trials, strict=True))
    return {"fence_ratio_same_run": boundary_ms / fence_ms, "fence_ms": fence_ms, "native_boundary_ms": boundary_ms}


def percent_more(pairs: Pairs) -> float:
    """By how many percent the median pair's numerator is above its denominator."""
    return (median_of_ratios(pairs) - 1) * 100


def _result(
    bench: Overhead,
    done: Mapping[str, Sequence[tuple[int, Mapping[str, float]]]],
    checks: Mapping[str, bool],
    seal: Mapping[str, str],
    used: Mapping[str, Any],
    starts: int,
    planned: Mapping[str, int],
) -> Result:
    """`done`: per cell, of each pair that counts, the start it belongs to and ms of both arms."""
    summary: dict[str, Any] = {}
    targets: list[Target] = []
    for cell, runs in done.items():
        key = f"{cell}_overhead_pct"
        pairs = [(ms["idle"], ms["native"]) for _, ms in runs]
        found = Bootstrap(percent_more, pairs, groups=[start for start, _ in runs]) if runs else None
        summary |= figures(key, found)
        summary[f"{key}_by_start"] = [
            percent_more([(ms["idle"], ms["native"]) for start, ms in runs if start == n])
            for n in sorted({start for start, _ in runs})
        ]
        summary[f"{cell}_pairs"] = len(runs)
        aim = f"≤ {AIM_PCT:g}" + (f", interval ≤ {BOUND_PCT:g}" if cell in BOUNDED else "")
        targets.append(Target(key, PAPER[cell], aim, verdict(cell, found)))
    summary |= used
    reached = whether(used["advance_p99_ms"] <= ADVANCE_AIM_MS)
    targets.append(Target("advance_p99_ms", "-", f"≤ {ADVANCE_AIM_MS:g}", reached))
    whole = all(len(done[cell]) == starts * count for cell, count in planned.items())
    checks = {**checks, "every_pair_counts": whole}
    cells = [
        Cell(
            {"bench": bench.name, "cell": cell, "quantum": QUANTUM, "block_tokens": BLOCK},
            {arm: {"ms": [ms[arm] for _, ms in runs], "start": [start for start, _ in runs]} for arm in ARMS},
        )
        for cell, runs in done.items()
    ]
    return Result(cells, summary, checks, targets, model=bench.model, seal=seal)


def verdict(cell: str, found: Bootstrap | None) -> Verdict:
    """The median within the aim, and where the interval is bounded its upper end too."""
    if found is None:
        return Verdict.NOT_REACHED
    return median_at_most(found.value, found.interval(), AIM_PCT, BOUND_PCT if cell in BOUNDED else None)
