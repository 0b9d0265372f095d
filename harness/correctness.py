"""`retire bench correctness`: a successor says what it would have said anyway, and hangs on what it adopts.

Stands beside Table 4 and A.3: five texts × common prefixes of 4096 tokens (a block boundary) and 4095; three arms, two
repetitions, two modes, 120 measurements; three trials of a page fault.

Every successor of a configuration is the same prompt: so many tokens in common with its predecessor, then another tail.

- `cold`: in a cache that holds nothing of it.
- `clean_prefix`: the predecessor's prompt has run to its end as a request of its own; the prefix cache serves.  It is
  the very prompt, so that the prefix was computed in the predecessor's chunks.
- `completed_predecessor`: a predecessor whose prompt is complete decodes in a scope and is superseded; the certificate
  serves.

A configuration is equal, over both repetitions, in tokens and in every log-probability as the server prints it (so that
equal means bit for bit):

- `mode_matched`: `clean_prefix` and `completed_predecessor` say the same, and reused the same length, the last block
  boundary of the common prefix.  `cold` is measured, not compared: this back end's results hang on chunk boundaries.
- `exact`: all three say the same, and a certificate for the last point of the chunk grid was adopted.  All requests
  declare the mode, and therefore have scopes, but for `cold`, which stays an ordinary request: it is to be equalled.

A server that refuses a mode fails its checks.  Every run has a cache salt of its own.

Page fault: the scope is paused, so that its successor gets a certificate and does not adopt.  Three times the same
successor: as it is; with the certified pages zeroed before it goes on; with their bytes restored.  Block ids and the
inherited length must be those of the first, the output must change and come back.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from harness.client import TIMEOUT_S, Reply, Streaming, http
from harness.experiment import Cell, Result, Target
from harness.faults import EXTENSION
from harness.ledger import Key, Ledger
from harness.progress import note
from harness.session import DEVELOPMENT, Session, serving
from harness.statistics import whether
from harness.workload import PATIENCE_S, adopted_as_certified, diverging, fresh_salt, fresh_scope, record_of

BLOCK, QUANTUM = 128, 2048
TAIL_TOKENS = 32
ANSWER_TOKENS = 16
PREDECESSOR_TOKENS = 4000  # more than it can decode before it is superseded
FLAGS = (
    *("--block-size", str(BLOCK)),
    *("--max-num-batched-tokens", str(QUANTUM)),
    *("--kv-cache-memory-bytes", str(1 << 30)),
    *("--worker-extension-cls", EXTENSION),
)


class Mode(StrEnum):
    """The contract's equivalence."""

    MODE_MATCHED = "mode_matched"
    EXACT = "exact"

    @property
    def grid_tokens(self) -> int:
        """Where reuse may end."""
        return BLOCK if self is Mode.MODE_MATCHED else QUANTUM  # the quantum is a multiple of the block


class Arm(StrEnum):
    """Where a successor's prefix comes from."""

    COLD = "cold"
    CLEAN_PREFIX = "clean_prefix"
    COMPLETED_PREDECESSOR = "completed_predecessor"


class Config(NamedTuple):
    """`seed` of the text, and how many tokens predecessor and successor have in common."""

    seed: int
    lcp_tokens: int


class Said(NamedTuple):
    """An answer: token ids and the log-probability of each."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @classmethod
    def by(cls, reply: Reply) -> Said:
        """The first `ANSWER_TOKENS` tokens of a reply."""
        logprobs = [logprob for _, logprob in reply.logprobs]
        return cls.of(reply.token_ids[:ANSWER_TOKENS], logprobs[:ANSWER_TOKENS])

    @classmethod
    def of(cls, token_ids: Sequence[int], logprobs: Sequence[float]) -> Said:
        """From lists."""
        return cls(tuple(token_ids), tuple(logprobs))

    @property
    def whole(self) -> bool:
        """Whether nothing is missing."""
        return len(self.token_ids) == len(self.logprobs) == ANSWER_TOKENS


class Measured(NamedTuple):
    """One successor.  `reused_tokens`: of its prompt, not computed; `certified_tokens`: None without a certificate."""

    said: Said
    reused_tokens: int | None
    certified_tokens: int | None = None

    @classmethod
    def of(cls, said: Sequence[Any], reused_tokens: int | None, certified_tokens: int | None) -> Measured:
        """From lists."""
        return cls(Said.of(*said), reused_tokens, certified_tokens)


class RefusedError(Exception):
    """The server answered an error where the experiment needs a successor."""


Runs = dict[Config, dict[Arm, list[Measured]]]


@dataclass(frozen=True)
class Correctness:
    """`texts`: passages; `lcps`: common prefixes of each; `faults`: trials of the page fault."""

    model: str = "smollm2"
    texts: int = 5
    quick_texts: int = 1
    lcps: Sequence[int] = (2 * QUANTUM, 2 * QUANTUM - 1)
    repetitions: int = 2
    faults: int = 3
    quick_faults: int = 1
    name: str = field(default="correctness", init=False)
    paper: str = field(default="Table 4 and A.3", init=False)
    own_servers: str = field(default="its server has a worker that spoils pages", init=False)

    def run(self, ledger: Ledger, *, quick: bool) -> Result:
        """See the module."""
        configs = [Config(seed, lcp) for seed in range(self.quick_texts if quick else self.texts) for lcp in self.lcps]
        runs: dict[Mode, Runs] = {mode: {c: {arm: [] for arm in Arm} for c in configs} for mode in Mode}
        faults = self.quick_faults if quick else self.faults
        ledger.plan(dict.fromkeys(Mode, len(configs) * self.repetitions) | {"fault": faults})
        with serving(self.model, FLAGS, ledger.checks, DEVELOPMENT) as session:
            refused = self._measure(session, ledger, runs)
            found = []
            for number in range(faults):
                seed = 100 + number
                key = Key("fault", (Arm.COMPLETED_PREDECESSOR,), number, seed)
                found.append(_Fault(*ledger.trial(key, partial(_fault, session, self.lcps[0], seed))))
        return self._result(session, runs, refused, found)

    def _measure(self, session: Session, ledger: Ledger, runs: dict[Mode, Runs]) -> dict[str, str]:
        """Fill `runs`; gives the modes that the server refused, and how."""
        refused: dict[str, str] = {}
        for repetition, mode, number in itertools.product(range(self.repetitions), Mode, range(len(runs[Mode.EXACT]))):
            if mode.value in refused:
                continue
            config, arms = list(runs[mode].items())[number]
            turn = (repetition + number) % len(Arm)
            order = [*Arm][turn:] + [*Arm][:turn]
            place = repetition * len(runs[mode]) + number
            key = Key(mode, order, place, config.seed)
            found = ledger.trial(key, partial(_measured, session, mode, config, order))
            for arm, measured in found["arms"].items():
                arms[Arm(arm)].append(Measured.of(*measured))
            if found["refused"] is not None:
                refused[mode.value] = found["refused"]
                ledger.plan({mode: place + 1 - self.repetitions * len(runs[mode])})
            done = f"repetition {repetition + 1}" if mode.value not in refused else f"refused: {refused[mode.value]}"
            note(f"  {mode}, text {config.seed}, {config.lcp_tokens} common tokens, {done}")
        return refused

    def _result(
        self, session: Session, runs: dict[Mode, Runs], refused: dict[str, str], faults: Sequence[_Fault]
    ) -> Result:
        equal = {mode: [config for config in runs[mode] if self._equal(mode, config, runs[mode])] for mode in Mode}
        configs = list(runs[Mode.EXACT])
        everywhere = [config for config in configs if all(config in equal[mode] for mode in Mode)]
        taken = sum(len(done) for mode in Mode for arms in runs[mode].values() for done in arms.values())
        planned = len(Mode) * len(configs) * len(Arm) * self.repetitions
        for mode in Mode:
            session.check(f"{mode}_is_served", mode.value not in refused)
            session.check(f"{mode}_configurations_are_equal", len(equal[mode]) == len(configs))
        session.check("every_measurement_was_taken", taken == planned)
        summary: dict[str, Any] = {
            "configs": len(configs),
            "configs_equal": len(everywhere),
            "configs_equal_by_mode": {mode.value: len(equal[mode]) for mode in Mode},
            "measurements": taken,
            "measurements_planned": planned,
            "faults": len(faults),
            "faults_seen": sum(fault.seen for fault in faults),
            "repaired_exact": sum(fault.repaired for fault in faults),
            "refused": refused,
        }
        return Result(
            cells=[_cell(mode, runs[mode]) for mode in Mode],
            summary=summary,
            checks=session.checks,
            targets=[
                _all("configs_equal", "10 of 10", summary["configs_equal"], len(configs)),
                _all("measurements", "120", taken, planned),
                _all("faults_seen", "3 of 3", summary["faults_seen"], len(faults)),
                _all("repaired_exact", "3 of 3", summary["repaired_exact"], len(faults)),
            ],
            model=self.model,
            seal=session.seal,
        )

    def _equal(self, mode: Mode, config: Config, runs: Runs) -> bool:
        arms = runs[config]
        reusing = (Arm.CLEAN_PREFIX, Arm.COMPLETED_PREDECESSOR)
        compared = [run for arm in (reusing if mode is Mode.MODE_MATCHED else Arm) for run in arms[arm]]
        due = config.lcp_tokens // mode.grid_tokens * mode.grid_tokens
        adopted = all(run.certified_tokens == run.reused_tokens == due for run in arms[Arm.COMPLETED_PREDECESSOR])
        matched = mode is Mode.EXACT or all(run.reused_tokens == due for run in arms[Arm.CLEAN_PREFIX])
        complete = all(len(done) == self.repetitions for done in arms.values()) and all(r.said.whole for r in compared)
        alike = len({run.said for run in compared}) == 1
        verdicts = {"complete": complete, "adopted as certified": adopted, "reused alike": matched, "said alike": alike}
        if not all(verdicts.values()):
            note(f"  {mode}, {config}: not equal, {verdicts}")
        return all(verdicts.values())


def _measured(session: Session, mode: Mode, config: Config, order: Sequence[Arm]) -> dict[str, Any]:
    """One configuration's arms in that order, until the server refuses the mode, and how it does."""
    found: dict[str, Measured] = {}
    try:
        for arm in order:
            found[arm.value] = _Successor(session, mode, config).measure(arm)
    except RefusedError as error:
        return {"arms": found, "refused": str(error)}
    return {"arms": found, "refused": None}


class _Successor:
    """One configuration in one mode, in a cache of its own."""

    def __init__(self, session: Session, mode: Mode, config: Config) -> None:
        self._session = session
        self._mode = mode
        self._old, self._new = diverging(session.url, session.model, config.lcp_tokens, TAIL_TOKENS, config.seed)
        self._salt = fresh_salt()

    def measure(self, arm: Arm) -> Measured:
        """Raises RefusedError."""
        match arm:
            case Arm.COLD:
                return self._measured(self._send(self._new, ANSWER_TOKENS))
            case Arm.CLEAN_PREFIX:
                _whole(self._send(self._old, 1, self._alone()))
                return self._measured(self._send(self._new, ANSWER_TOKENS, self._alone()))
            case Arm.COMPLETED_PREDECESSOR:
                return self._superseding()

    def _superseding(self) -> Measured:
        scope = fresh_scope()
        old = self._send(self._old, PREDECESSOR_TOKENS, self._joining(scope))
        old.wait_for_tokens(1)
        contract = json.dumps({"equivalence": self._mode.value})
        headers = {"X-Retire-Scope": scope, "X-Retire-Supersedes": "1", "X-Retire-Contract": contract}
        try:
            _accepted(old.reply)
            reply = _whole(self._send(self._new, ANSWER_TOKENS, headers))
        except RefusedError:
            old.leave()
            raise
        old.wait()
        record = record_of(self._session.url, reply.headers["location"])
        certificate = record["certificate"]
        self._session.check("the_certified_blocks_were_adopted", adopted_as_certified(record))
        return Measured(Said.by(reply), record["inherited_tokens"], certificate and certificate["tokens"])

    def _alone(self) -> dict[str, str]:
        """Headers of a request that follows nobody: only a scope's requests can declare a mode."""
        return {} if self._mode is Mode.MODE_MATCHED else self._joining(fresh_scope())

    def _joining(self, scope: str) -> dict[str, str]:
        exact = {"X-Retire-Equivalence": self._mode.value} if self._mode is Mode.EXACT else {}
        return {"X-Retire-Scope": scope, **exact}

    def _send(self, ids: list[int], tokens: int, headers: Mapping[str, str] | None = None) -> Streaming:
        return self._session.stream(ids, tokens, self._salt, headers)

    @staticmethod
    def _measured(stream: Streaming) -> Measured:
        reply = _whole(stream)
        return Measured(Said.by(reply), reply.cached_tokens)


class _Fault(NamedTuple):
    """`seen`: the output changed with the bytes.  `repaired`: it came back with them."""

    seen: bool
    repaired: bool


def _fault(session: Session, prefix_tokens: int, seed: int) -> _Fault:
    return _FaultTrial(session, prefix_tokens, seed).run()


class _FaultTrial:
    """One scope through four epochs."""

    def __init__(self, session: Session, prefix_tokens: int, seed: int) -> None:
        self._session = session
        self._old, self._new = diverging(session.url, session.model, prefix_tokens, TAIL_TOKENS, seed)
        self._scope, self._salt = fresh_scope(), fresh_salt()
        self._epoch = 1
        self._prefix_tokens = prefix_tokens

    def run(self) -> _Fault:
        """Raises RefusedError, TimeoutError."""
        streams = [self._session.stream(self._old, PREDECESSOR_TOKENS, self._salt, {"X-Retire-Scope": self._scope})]
        streams[0].wait_for_tokens(1)
        self._post(f"/scopes/{self._scope}/pause")
        said, blocks, digests = [], [], []
        for method in ("save_pages", "zero_pages", "restore_pages"):
            stream, location, digest = self._successor(method)
            streams.append(stream)
            said.append(Said.by(stream.reply))
            record = record_of(self._session.url, location)
            inherited = record["inherited_tokens"] == self._prefix_tokens and adopted_as_certified(record)
            self._session.check("fault_successors_inherit_the_whole_prefix", inherited)
            blocks.append(record["adopted_blocks"])
            digests.append(digest)
        streams.pop().leave()
        for stream in streams:
            stream.wait()
        self._session.check("fault_block_ids_stay_the_same", blocks[0] == blocks[1] == blocks[2])
        saved, zeroed, restored = digests
        self._session.check("fault_bytes_were_changed_and_put_back", saved == restored != zeroed)
        self._session.check("fault_answers_are_whole", all(one.whole for one in said))
        fault = _Fault(seen=said[1] != said[0], repaired=said[2] == said[0])
        self._session.check("fault_is_seen", fault.seen)
        self._session.check("fault_is_repaired_exactly", fault.repaired)
        return fault

    def _successor(self, method: str) -> tuple[Streaming, str, str]:
        """The paused scope's next epoch, `method` of `PageFaults` done to its certified pages before it adopts them.

        Its stream, its transition's location, and the digest of the pages after that.
        """
        headers = {"X-Retire-Scope": self._scope, "X-Retire-Supersedes": str(self._epoch)}
        stream = self._session.stream(self._new, PREDECESSOR_TOKENS, self._salt, headers)
        stream.wait_for_headers()
        _accepted(stream.reply)
        self._epoch += 1
        location = stream.reply.headers["location"]
        blocks = [block for group in self._certificate(location)["blocks"] for block in group if block is not None]
        digest = self._session.ask_worker(method, blocks=blocks)["sha256"]
        self._session.check("fault_lies_before_adoption", self._record(location)["adopted_blocks"] is None)
        self._post(f"/scopes/{self._scope}/continue")
        stream.wait_for_tokens(ANSWER_TOKENS)
        self._post(f"/scopes/{self._scope}/pause")  # so that it is still there to be superseded
        return stream, location, digest

    def _certificate(self, location: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self._session.held()  # the engine of a paused scope sleeps; asked, it tells what it knows
            certificate: dict[str, Any] | None = self._record(location)["certificate"]
            if certificate is not None:
                return certificate
            time.sleep(0.02)
        raise TimeoutError(f"no certificate was issued: {self._record(location)}")

    def _record(self, location: str) -> dict[str, Any]:
        found: dict[str, Any] = http.get(self._session.url + location, timeout=TIMEOUT_S).raise_for_status().json()
        return found

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer = http.post(self._session.url + path, json=body, timeout=TIMEOUT_S).raise_for_status()
        found: dict[str, Any] = answer.json()
        return found


def _accepted(reply: Reply) -> None:
    if reply.status != 200:
        message = ((reply.error or {}).get("error") or {}).get("message", "no answer")
        raise RefusedError(f"{reply.status} {message}")


def _whole(stream: Streaming) -> Reply:
    reply = stream.wait()
    _accepted(reply)
    return reply


def _all(key: str, paper: str, found: int, wanted: int) -> Target:
    return Target(key, paper, f"{wanted}", whether(found == wanted))


def _cell(mode: Mode, runs: Runs) -> Cell:
    """Lists per arm are parallel: one entry a measurement."""
    arms: dict[str, dict[str, list[Any]]] = {}
    for arm in Arm:
        rows = [
            (config, repetition, one) for config, done in runs.items() for repetition, one in enumerate(done[arm], 1)
        ]
        arms[arm.value] = {
            "seed": [config.seed for config, _, _ in rows],
            "lcp_tokens": [config.lcp_tokens for config, _, _ in rows],
            "repetition": [repetition for _, repetition, _ in rows],
            "reused_tokens": [one.reused_tokens for _, _, one in rows],
            "certified_tokens": [one.certified_tokens for _, _, one in rows],
            "token_ids": [list(one.said.token_ids) for _, _, one in rows],
            "logprobs": [list(one.said.logprobs) for _, _, one in rows],
        }
    return Cell({"bench": "correctness", "mode": mode.value}, arms)
