"""`retire bench histories`: whether clients can see that a server broke its promises, while it is being tormented.

Stands beside A.1, whose checker requires the current epoch at every publication, and sees the inside of its server.
Here runtimes of two tenants supersede, cancel and read each other's scopes, raw and through retire.client, while the
server's processes are stopped, killed and started again on the same state directory.  Every call and every frame is
written down; then a checker that knows nothing else decides whether some order explains all answers, and whether
anybody read what had been revoked.  docs/HISTORIES.md says what is recorded and what may be claimed.

A storm is a trial.  The server is the tiny checkpoint, so that most of the time is spent in what is being looked for;
nothing is timed, so it starts from a copy (`harness.preforked`).  A history that is not right is kept.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness.experiment import Cell, Result
from harness.histories.checker import Rule, check
from harness.histories.history import Opening, Recorder, read
from harness.histories.saboteur import deeds, tormented
from harness.histories.storm import Storm
from harness.ledger import Key, Ledger
from harness.progress import note
from harness.server import Server
from harness.session import Session, left_as_found, started
from harness.workload import fresh_scope

TENANTS = {"a": "key-of-a", "b": "key-of-b"}
FILE = "".join(f'[tenants.{name}]\nkeys = ["{key}"]\n' for name, key in TENANTS.items())
FLAGS = (
    *("--block-size", "32"),
    *("--max-num-batched-tokens", "2048"),
    *("--kv-cache-memory-bytes", str(256 << 20)),
)
CLAIMS = {
    Rule.ORDER: "some_order_explains_every_answer",
    Rule.UNDECIDED: "every_history_was_decided",
    Rule.KEYS: "equal_keys_are_answered_alike",
    Rule.CLIENT: "nothing_revoked_through_the_client",
    Rule.RAW: "raw_backlog_within_the_stated_bound",
    Rule.END: "nothing_after_the_last_word",
    Rule.STATED: "no_more_came_than_is_stated",
    Rule.TAG: "every_frame_names_its_epoch",
}
COUNTS = (
    "operations", "frames", "scopes", "kills", "pauses", "unknown_outcomes", "revoked_frames_client",
    "revoked_frames_raw_over_bound", "versions_not_as_stated", "keys_answered_differently",
)  # fmt: skip


@dataclass(frozen=True)
class Histories:
    """`storms`: how many; each takes so many seconds, those included in which the server starts again."""

    model: str = "tiny-llama"
    storms: int = 6
    storm_s: float = 150.0
    pauses: int = 14
    kills: int = 4
    quick_storms: int = 1
    quick_storm_s: float = 90.0
    quick_pauses: int = 6
    quick_kills: int = 2
    name: str = field(default="histories", init=False)
    paper: str = field(default="A.1", init=False)
    own_servers: str = field(default="it stops and kills its server's processes", init=False)

    def run(self, ledger: Ledger, *, quick: bool) -> Result:
        """See the module."""
        planned = self.quick_storms if quick else self.storms
        ledger.plan({"storm": planned})
        found: list[Mapping[str, Any]] = []
        with tempfile.TemporaryDirectory(prefix="retire-tenants-") as folder:
            file = Path(folder) / "tenants.toml"
            file.write_text(FILE, encoding="utf-8")
            env = {"RETIRE_TENANTS": str(file), "RETIRE_PIN_TTL_MS": "3000", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}
            with started(self.model, FLAGS, [{"env": env, "preforked": True}]) as [server]:
                sessions = [Session(server.url, self.model, key, ledger.checks) for key in TENANTS.values()]
                with left_as_found(sessions):
                    for number in range(planned):
                        key = Key("storm", ("retire",), number, seed=1 + number)
                        found.append(ledger.trial(key, partial(self._storm, server, sessions[0], 1 + number, quick)))
        return self._result(sessions[0], found)

    def _storm(self, server: Server, session: Session, seed: int, quick: bool) -> dict[str, Any]:
        """One storm, judged."""
        seconds = self.quick_storm_s if quick else self.storm_s
        pauses, kills = (self.quick_pauses, self.quick_kills) if quick else (self.pauses, self.kills)
        folder = Path(tempfile.mkdtemp(prefix="retire-histories-"))
        file = folder / f"storm-{seed}.jsonl"
        storm = Storm(server.url, self.model, TENANTS, seed, fresh_scope())
        opening = Opening(seed=seed, backlog_bytes=session.stated_backlog()["bytes_in_send_buffer"])
        plan = deeds(seed, seconds, pauses, kills)
        with Recorder(file, opening) as recorder, tormented(server, recorder, plan) as serving:
            storm.run(recorder, seconds, serving)
        verdict = check(read(file))
        for rule, claim in CLAIMS.items():
            session.check(claim, not verdict.broken(rule))
        session.check("the_storm_was_one", bool(verdict.frames) and bool(verdict.kills) and bool(verdict.pauses))
        told = [str(finding) for finding in verdict.findings]
        note(f"  {seed}: {verdict.summary()}")
        for text in told:
            note(text)
        if told:
            note(f"the history is kept: {file}")
        else:
            shutil.rmtree(folder)
        return {**verdict.summary(), "findings": told, "history": str(file) if told else None}

    def _result(self, session: Session, found: Sequence[Mapping[str, Any]]) -> Result:
        summary: dict[str, Any] = {count: sum(one[count] for one in found) for count in COUNTS}
        summary["linearizable"] = bool(found) and all(one["linearizable"] for one in found)
        summary["findings"] = [text for one in found for text in one["findings"]]
        summary["kept"] = [one["history"] for one in found if one["history"]]
        columns = {count: [one[count] for one in found] for count in COUNTS}
        cell = Cell({"bench": self.name}, {"retire": columns})
        return Result([cell], summary, session.checks, model=self.model, seal=session.seal)
