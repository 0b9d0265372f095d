"""Props of the tests: prompts with a known prefix, one supersede from end to end."""

from __future__ import annotations

import argparse as _long_text
import functools
import random
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from harness.client import Reply, Streaming

TIMEOUT_S = 300


@functools.cache
def _tokens(url: str) -> tuple[int, ...]:
    text = Path(_long_text.__file__).read_text(encoding="utf-8")
    answer = httpx.post(f"{url}/tokenize", json={"model": "tiny", "prompt": text}, timeout=TIMEOUT_S)
    return tuple(answer.json()["tokens"])


def text_ids(url: str, count: int, seed: int) -> list[int]:
    """`count` token ids of real text, another passage per seed."""
    tokens = _tokens(url)
    start = random.Random(seed).randrange(len(tokens))
    doubled = tokens * (2 + count // len(tokens))
    return list(doubled[start : start + count])


def completion(ids: list[int], tokens: int = 16, **more: Any) -> dict[str, Any]:
    """A greedy completion of a token prompt."""
    return {"model": "tiny", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def complete(url: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """A whole answer."""
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def said(url: str, body: dict[str, Any], **headers: str) -> str:
    """The text of a whole answer."""
    text: str = complete(url, body, **headers)["choices"][0]["text"]
    return text


def fresh_salt() -> str:
    """A cache of one's own."""
    return f"clean-{uuid.uuid4()}"


def clean_run(url: str, ids: list[int], reused: int, tokens: int = 16) -> str:
    """What a run says that reuses the first `reused` tokens from a completed predecessor, in a cache of its own."""
    salt = fresh_salt()
    if reused:
        said(url, completion(ids[:reused], 1, cache_salt=salt))
    return said(url, completion(ids, tokens, cache_salt=salt))


def prefill_s(url: str, ids: list[int]) -> float:
    """How long a cold prompt of these tokens takes."""
    started = time.monotonic()
    said(url, completion(ids, 1, cache_salt=fresh_salt()))
    return time.monotonic() - started


@dataclass
class Handover:
    """One supersede and what came of it."""

    old: Reply
    new: Reply
    record: dict[str, Any]

    @property
    def stopped(self) -> bool:
        """Whether a step of the predecessor was stopped at a safe point."""
        return any(receipt["stopped"] for receipt in self.record["receipts"])


def record_of(url: str, location: str) -> dict[str, Any]:
    """The transition's record once it is closed."""
    deadline = time.monotonic() + 120
    while True:
        record: dict[str, Any] = httpx.get(url + location, timeout=TIMEOUT_S).json()
        if record["closed"] or time.monotonic() > deadline:
            return record
        time.sleep(0.02)


def supersede(
    url: str,
    scope: str,
    old: dict[str, Any],
    new: dict[str, Any],
    *,
    after_s: float,
    contract: str | None = None,
) -> Handover:
    """Start `old` in the scope, supersede it by `new` after a while, wait for both."""
    first = Streaming(url, old, {"X-Retire-Scope": scope})
    time.sleep(after_s)
    headers = {"X-Retire-Scope": scope, "X-Retire-Supersedes": "*"}
    if contract is not None:
        headers["X-Retire-Contract"] = contract
    second = Streaming(url, new, headers)
    replies = first.wait(), second.wait()
    assert replies[1].status == 200, replies[1].error
    return Handover(replies[0], replies[1], record_of(url, replies[1].headers["location"]))


def supersede_inside_a_step(url: str, scope: str, make: Any, tries: int = 12) -> Handover:
    """Supersede again and again, at other moments, until a running step was stopped with something completed.

    `make(n)` gives the n-th pair of bodies, of which none may have been sent before.
    """
    old, _ = make(0)
    whole_s = min(prefill_s(url, old["prompt"]) for _ in range(3))
    for attempt in range(1, tries + 1):
        share = 0.3 + 0.6 * ((attempt * 0.618) % 1)
        found = supersede(url, f"{scope}-{attempt}", *make(attempt), after_s=whole_s * share)
        if found.stopped and found.record["inherited_tokens"]:
            return found
    raise AssertionError(f"no step was ever stopped in {tries} tries; a whole prefill takes {whole_s:.2f} s")
