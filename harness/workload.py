"""What a server is given to do, and what it is asked about that.

Owns: natural text as token ids, the bodies of requests, isolation by cache salts, transitions' records.
Must not know: what an experiment makes of it.
Strategy: prompts are token ids of CPython's own reference manual, which is English prose that every machine has; the
server's tokenizer makes the ids, once.  Prompts that may not meet in a cache carry salts that nobody has used before.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
import uuid
from pydoc_data import topics
from typing import Any

from harness.client import TIMEOUT_S, http

PATIENCE_S = 120.0


@functools.cache
def _corpus(url: str, model: str, key: str | None) -> tuple[int, ...]:
    text = "\n".join(topics.topics.values())
    body, headers = {"model": model, "prompt": text}, bearer(key)
    answer = http.post(f"{url}/tokenize", json=body, headers=headers, timeout=TIMEOUT_S)
    return tuple(answer.raise_for_status().json()["tokens"])


def bearer(key: str | None) -> dict[str, str]:
    """The header of an API key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def passage(url: str, model: str, count: int, seed: int, key: str | None = None) -> list[int]:
    """`count` token ids of natural text, another passage per seed."""
    tokens = _corpus(url, model, key)
    start = random.Random(seed).randrange(len(tokens))  # noqa: S311 - a place in a book
    doubled = tokens * (2 + count // len(tokens))
    return list(doubled[start : start + count])


def diverging(
    url: str, model: str, shared: int, tail: int, seed: int, key: str | None = None
) -> tuple[list[int], list[int]]:
    """Two prompts of `shared` + `tail` tokens that have exactly their first `shared` tokens in common."""
    old = passage(url, model, shared + tail, seed, key)
    for other in itertools.count(seed + 1_000_000):
        end = passage(url, model, tail, other, key)
        if end[0] != old[shared]:
            return old, old[:shared] + end
    raise AssertionError("an endless count has ended")


def completion(model: str, ids: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy completion of exactly `tokens` tokens after a prompt of token ids."""
    return {"model": model, "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def complete(url: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """A whole answer.  Raises httpx.HTTPStatusError."""
    answer = http.post(f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def fresh_salt() -> str:
    """A cache of one's own."""
    return f"salt-{uuid.uuid4()}"


def fresh_scope() -> str:
    """A scope that nobody else uses."""
    return f"bench-{uuid.uuid4().hex}"


def prefill_s(url: str, model: str, ids: list[int], salt: str | None = None) -> float:
    """Seconds until a prompt of these tokens is answered by one token; in a cache of its own unless told otherwise."""
    started = time.monotonic()
    complete(url, completion(model, ids, 1, cache_salt=salt or fresh_salt()))
    return time.monotonic() - started


def record_of(url: str, location: str, key: str | None = None, patience_s: float = PATIENCE_S) -> dict[str, Any]:
    """The transition's record once it is closed.

    Raises:
        TimeoutError: it was not, so many seconds later.  It is asked for once at least.
        httpx.HTTPError: no answer, or no record.
    """
    deadline = time.monotonic() + patience_s
    while True:
        record: dict[str, Any] = (
            http.get(url + location, headers=bearer(key), timeout=TIMEOUT_S).raise_for_status().json()
        )
        if record["closed"]:
            return record
        if time.monotonic() > deadline:
            raise TimeoutError(f"the transition did not close: {record}")
        time.sleep(0.02)


def adopted_as_certified(record: dict[str, Any]) -> bool:
    """Whether the successor's block table was seen to hold the very blocks of its certificate."""
    certificate = record["certificate"]
    return certificate is not None and record["adopted_blocks"] == certificate["blocks"]
