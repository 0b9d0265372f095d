"""Props of the tests: prompts with a known prefix, one supersede from end to end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from harness import workload
from harness.client import Reply, Streaming, http
from harness.workload import fresh_salt, record_of
from retire.core.certificate import common_prefix
from tests.server.wire import epoch_of, eventually

MODEL = "tiny"
TIMEOUT_S = 300


def text_ids(url: str, count: int, seed: int) -> list[int]:
    """`count` token ids of natural text, another passage per seed."""
    return workload.passage(url, MODEL, count, seed)


def completion(ids: list[int], tokens: int = 16, **more: Any) -> dict[str, Any]:
    """A greedy completion of a token prompt."""
    return workload.completion(MODEL, ids, tokens, **more)


def complete(url: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """A whole answer."""
    answer = http.post(f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def said(url: str, body: dict[str, Any], **headers: str) -> str:
    """The text of a whole answer."""
    text: str = complete(url, body, **headers)["choices"][0]["text"]
    return text


def decoding_beside(url: str, scope: str, count: int, tokens: int) -> tuple[list[str], list[Streaming]]:
    """What so many requests say when each is alone, and the same requests as they begin to run together.

    Every second one is in a scope of its own.
    """
    prompts = [text_ids(url, 40 + 17 * n, seed=4000 + n) for n in range(count)]
    alone = [said(url, completion(ids, tokens, cache_salt=fresh_salt())) for ids in prompts]
    together = [
        Streaming(
            url,
            completion(ids, tokens, cache_salt=fresh_salt()),
            {"X-Retire-Scope": f"{scope}-beside-{n}"} if n % 2 else {},
        )
        for n, ids in enumerate(prompts)
    ]
    return alone, together


def clean_run(url: str, ids: list[int], reused: int, tokens: int = 16) -> str:
    """What a run says that reuses the first `reused` tokens from a completed predecessor, in a cache of its own."""
    salt = fresh_salt()
    if reused:
        said(url, completion(ids[:reused], 1, cache_salt=salt))
    return said(url, completion(ids, tokens, cache_salt=salt))


def prefill_s(url: str, ids: list[int]) -> float:
    """How long a cold prompt of these tokens takes."""
    return workload.prefill_s(url, MODEL, ids)


def wait_for_scope(url: str, scope: str, epoch: int = 1) -> None:
    """Until the scope is at this epoch: on a machine that stands still, what was sent long ago may not have arrived."""
    eventually(lambda: (epoch_of(url, scope) or 0) >= epoch, f"{scope} is at epoch {epoch}")


def stated_chars(record: dict[str, Any]) -> int:
    """How many characters the record says had been published when authority moved.

    A client that has received as many has received nothing afterwards.  Its own clock can't tell that: what has
    arrived may be read late.
    """
    return sum(choice["chars"] for version in record["published"] for choice in version["choices"])


@dataclass
class Handover:
    """One supersede and what came of it."""

    old: Reply
    new: Reply
    record: dict[str, Any]

    @property
    def choice(self) -> str | None:
        """What became of the predecessor's rows in a step that ran: keep, trim or stop; None when none was cut."""
        return next((receipt["choice"] for receipt in self.record["receipts"]), None)


def supersede(
    url: str,
    scope: str,
    old: dict[str, Any],
    new: dict[str, Any],
    *,
    after_s: float,
    contract: str | None = None,
) -> Handover:
    """Start `old` in the scope, supersede it by `new` after a while (or as soon as it is there), wait for both."""
    first = Streaming(url, old, {"X-Retire-Scope": scope})
    wait_for_scope(url, scope)
    time.sleep(max(0.0, first.reply.sent_at + after_s - time.monotonic()))
    headers = {"X-Retire-Scope": scope, "X-Retire-Supersedes": "*"}
    if contract is not None:
        headers["X-Retire-Contract"] = contract
    second = Streaming(url, new, headers)
    replies = first.wait(), second.wait()
    assert replies[1].status == 200, replies[1].error
    return Handover(replies[0], replies[1], record_of(url, replies[1].headers["location"]))


def supersede_inside_a_step(url: str, scope: str, make: Any, choice: str = "stop", tries: int = 16) -> Handover:
    """Supersede again and again until `choice` befell a running step, with something completed; what came of it.

    `make(n)` gives the n-th pair of bodies, of which none may have been sent before.  Every try says whether it came
    too early or too late, so the moment is found on a machine of any speed.
    """
    old, _ = make(0)
    whole_s = min(prefill_s(url, old["prompt"]) for _ in range(2))
    early_s, late_s = 0.0, 1.5 * whole_s
    for attempt in range(1, tries + 1):
        after_s = early_s + (late_s - early_s) * (0.35 + 0.3 * ((attempt * 0.618) % 1))
        old, new = make(attempt)
        found = supersede(url, f"{scope}-{attempt}", old, new, after_s=after_s)
        if found.choice == choice and found.record["inherited_tokens"]:
            return found
        frontier = max((receipt["frontier_tokens"] for receipt in found.record["receipts"]), default=0)
        shared = common_prefix(old["prompt"], new["prompt"])
        past_it = (found.choice == "stop" and frontier > 0) or (choice == "trim" and frontier >= shared)
        if found.old.text or past_it:
            late_s, early_s = after_s, 0.9 * early_s
        else:
            early_s, late_s = after_s, 1.1 * late_s
    raise AssertionError(f"never {choice} in {tries} tries; a whole prefill takes {whole_s:.2f} s")
