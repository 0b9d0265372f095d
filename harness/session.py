"""One server for the length of an experiment, and whether it is left as it was found.

Owns: start and end, the checks of a run, what the pool and the engine hold before and after.
Must not know: what the experiment does in between.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from harness.client import TIMEOUT_S, Streaming, http
from harness.experiment import join
from harness.server import Server, start_side_by_side
from harness.workload import bearer, complete, completion
from retire import models

REST_S = 60.0
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}
FLAGS = ("--enforce-eager", "--enable-prompt-tokens-details", "--max-model-len", "8192")


class Session:
    """A server that answers at `url` as `model`, to `key` if it needs one.

    `checks`: correctness so far; `seal`: what it runs on.
    """

    def __init__(self, url: str, model: str, key: str | None = None) -> None:
        self.url = url
        self.model = model
        self.key = key
        self.checks: dict[str, bool] = {}
        self.seal: dict[str, str] = self._status()["seal"]

    def stream(
        self, ids: list[int], tokens: int, salt: str, headers: Mapping[str, str] | None = None, alternatives: int = 0
    ) -> Streaming:
        """A streamed completion that tells token ids, log-probabilities, and at its end what was cached.

        `alternatives`: how many likeliest tokens are told for each place.
        """
        asked = {"logprobs": alternatives, "return_token_ids": True, "stream_options": {"include_usage": True}}
        return Streaming(
            self.url,
            completion(self.model, ids, tokens, cache_salt=salt, **asked),
            {**bearer(self.key), **(headers or {})},
        )

    def check(self, name: str, holds: bool) -> bool:
        """Note one observation of a claim, which is true when all of them were.  Gives `holds` back."""
        join(self.checks, {name: holds})
        if not holds:
            note(f"  NOT {name}")
        return holds

    def held(self) -> dict[str, int]:
        """What the engine holds for scopes: pins, requests, open transitions, steps in flight."""
        held: dict[str, int] = self._status()["engine"]
        return held

    def tier(self) -> dict[str, int]:
        """What host memory holds and has done."""
        found: dict[str, int] = self._status()["tier"]
        return found

    def ask_worker(self, method: str, **arguments: Any) -> dict[str, Any]:
        """What a method of the worker's extension gives (`harness.faults`), in a server started with `DEVELOPMENT`."""
        body, headers = {"method": method, "kwargs": arguments}, bearer(self.key)
        answer = http.post(f"{self.url}/collective_rpc", json=body, headers=headers, timeout=TIMEOUT_S)
        found: dict[str, Any] = answer.raise_for_status().json()["results"][0]
        return found

    def stated_backlog(self) -> dict[str, int]:
        """What of a scoped stream the server says may lie behind its last gate."""
        stated: dict[str, int] = self._status()["stated_backlog"]
        return stated

    def pool_usage(self) -> float:
        """The share of KV blocks that somebody references, after a step that nobody else was in."""
        complete(self.url, completion(self.model, [1], 1), **bearer(self.key))  # vLLM counts at the end of a step
        return self.metric("vllm:kv_cache_usage_perc")

    def metric(self, name: str) -> float:
        """A gauge or counter of the server's, of which there is one.  Raises RuntimeError."""
        return metric(self.url, name)

    def check_rest(self, usage_before: float) -> None:
        """The engine must come to hold nothing for any scope, and the pool as many free blocks as before."""
        deadline = time.monotonic() + REST_S
        while any(self.held().values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        held = self.held()
        if not self.check("nothing_left", not any(held.values())):
            note(f"  the engine still holds {held}")
        self.check("pool_as_before", self.pool_usage() == usage_before)

    def _status(self) -> dict[str, Any]:
        answer = http.get(f"{self.url}/retire/status", headers=bearer(self.key), timeout=TIMEOUT_S)
        status: dict[str, Any] = answer.raise_for_status().json()
        return status


@contextmanager
def serving(
    model: str, flags: Sequence[str], env: Mapping[str, str] | None = None, key: str | None = None
) -> Iterator[Session]:
    """A patched server with `FLAGS` and these; checked for what is left in it at the end."""
    with serving_side_by_side(model, flags, [env or {}], key) as [(_, session)]:
        yield session


@contextmanager
def serving_side_by_side(
    model: str, flags: Sequence[str], envs: Sequence[Mapping[str, str]], key: str | None = None
) -> Iterator[list[tuple[Server, Session]]]:
    """One such server for each environment."""
    command = (*FLAGS, "--served-model-name", model, *flags)
    servers = [Server(models.resolve(model), command, env=env) for env in envs]
    note(f"starting {'a server' if len(servers) == 1 else f'{len(servers)} servers'} with {model} ...")
    try:
        start_side_by_side(servers)
        sessions = [Session(server.url, model, key) for server in servers]
        usages = [session.pool_usage() for session in sessions]
        yield list(zip(servers, sessions, strict=True))
        for session, usage in zip(sessions, usages, strict=True):
            session.check_rest(usage)
    finally:
        for server in servers:
            server.close()


def metric(url: str, name: str) -> float:
    """A gauge or counter of the server at `url`, with labels or without.  Raises RuntimeError."""
    metrics = http.get(f"{url}/metrics", timeout=TIMEOUT_S).raise_for_status().text
    found = re.search(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", metrics, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the server does not tell {name}")
    return float(found[1])


def note(text: str) -> None:
    """Progress; results go to stdout."""
    print(text, file=sys.stderr, flush=True)
