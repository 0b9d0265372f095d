"""One server for the length of an experiment, and whether it is left as it was found.

Owns: start and end (or what a server that runs already must offer), the checks of a run, what the pool and the engine
hold before and after.
Must not know: what the experiment does in between.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from harness.client import TIMEOUT_S, Streaming, http
from harness.experiment import join
from harness.progress import note
from harness.server import Server, start_side_by_side
from harness.workload import bearer, complete, completion, fresh_salt
from retire import models

REST_S = 60.0
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}
MODEL_LEN = 8192
FLAGS = ("--enforce-eager", "--enable-prompt-tokens-details", "--max-model-len", str(MODEL_LEN))


class ServerUnsuitable(RuntimeError):
    """A running server is not what the experiment needs; the message says what it must be started with."""


class Session:
    """A server that answers at `url` as `model`, to `key` if it needs one.

    `checks`: correctness so far, of the whole run if they are given; `seal`: what it runs on.
    """

    def __init__(self, url: str, model: str, key: str | None = None, checks: dict[str, bool] | None = None) -> None:
        self.url = url
        self.model = model
        self.key = key
        self.checks = {} if checks is None else checks
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
        return check(self.checks, name, holds)

    def held(self) -> dict[str, int]:
        """What the engine holds for scopes: pins, requests, open transitions, steps in flight."""
        held: dict[str, int] = self._status()["engine"]
        return held

    def tier(self) -> dict[str, int]:
        """What host memory holds and has done."""
        found: dict[str, int] = self._status()["tier"]
        return found

    def quanta(self) -> dict[int, int]:
        """How many steps were given which prefill quantum, in tokens; nothing where the policy chooses none."""
        found: dict[str, int] = self._status()["quanta"]
        return {int(tokens): steps for tokens, steps in found.items()}

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
    model: str,
    flags: Sequence[str],
    checks: dict[str, bool],
    env: Mapping[str, str] | None = None,
    key: str | None = None,
) -> Iterator[Session]:
    """A patched server with `FLAGS` and these; checked for what is left in it at the end."""
    with serving_side_by_side(model, flags, [{"env": env or {}}], checks, key) as [(_, session)]:
        yield session


@contextmanager
def serving_side_by_side(
    model: str,
    flags: Sequence[str],
    kinds: Sequence[Mapping[str, Any]],
    checks: dict[str, bool],
    key: str | None = None,
) -> Iterator[list[tuple[Server, Session]]]:
    """One such server for each of `kinds`, as in `started`."""
    with started(model, flags, kinds) as servers:
        sessions = [Session(server.url, model, key, checks) for server in servers]
        with left_as_found(sessions):
            yield list(zip(servers, sessions, strict=True))


@contextmanager
def started(model: str, flags: Sequence[str], kinds: Sequence[Mapping[str, Any]]) -> Iterator[list[Server]]:
    """Servers with `FLAGS` and these, started side by side; one for each of `kinds`.

    `kinds`: what else `Server` is told; its `flags` are added to those that all have.
    """
    command = (*FLAGS, "--served-model-name", model, *flags)
    servers = [Server(models.resolve(model), **{**kind, "flags": (*command, *kind.get("flags", ()))}) for kind in kinds]
    note(f"starting {'a server' if len(servers) == 1 else f'{len(servers)} servers'} with {model} ...")
    try:
        start_side_by_side(servers)
        yield servers
    finally:
        for server in servers:
            server.close()


@contextmanager
def measuring(url: str, model: str, flags: Sequence[str], checks: dict[str, bool]) -> Iterator[Session]:
    """The server that runs at `url`, or if that is empty one like `serving`'s; checked alike.

    Raises ServerUnsuitable.
    """
    if not url:
        with serving(model, flags, checks) as session:
            yield session
        return
    session = Session(url, model, checks=checks)
    note(f"measuring {model} at {url}, as it was started; a server of our own would have had {' '.join(flags)}")
    if session.stream([1], 1, fresh_salt()).wait().cached_tokens is None:
        raise ServerUnsuitable("the server does not tell what was cached: start it with --enable-prompt-tokens-details")
    with left_as_found([session]):
        yield session


@contextmanager
def left_as_found(sessions: Sequence[Session]) -> Iterator[None]:
    """At the end each server is checked for what is left in it.  For whoever starts servers of his own."""
    usages = [session.pool_usage() for session in sessions]
    yield
    for session, usage in zip(sessions, usages, strict=True):
        session.check_rest(usage)


def served_at(url: str, model: str | None = None) -> dict[str, Any]:
    """What runs at `url`: `model` (the only one, if none is named), `length_tokens` and `seal`.

    Raises:
        ServerUnsuitable: nobody answers, it is no RETIRE, or serves another model, several, or one that is too short.
    """
    try:
        status = http.get(f"{url}/retire/status", timeout=TIMEOUT_S)
        if status.status_code != 200:
            told = f"{url} answers {status.status_code} to /retire/status: no RETIRE, or it asks for a key"
            raise ServerUnsuitable(told)
        listed = http.get(f"{url}/v1/models", timeout=TIMEOUT_S).raise_for_status().json()["data"]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerUnsuitable(f"no answer from {url}: {error}") from error
    lengths = {one["id"]: one.get("max_model_len") or 0 for one in listed}
    if model is None and len(lengths) == 1:
        model = next(iter(lengths))
    if model is None or model not in lengths:
        raise ServerUnsuitable(f"{url} serves {', '.join(lengths)}: name one with --model")
    if lengths[model] < MODEL_LEN:
        raise ServerUnsuitable(f"{model} at {url} takes {lengths[model]} tokens: {MODEL_LEN} are needed")
    return {"model": model, "length_tokens": lengths[model], "seal": status.json()["seal"]}


def check(checks: dict[str, bool], name: str, holds: bool, where: str = "") -> bool:
    """Join one observation of a claim into `checks`; say on stderr, with `where`, that it failed.  Gives `holds`."""
    join(checks, {name: holds})
    if not holds:
        note(f"  NOT {name}{where}")
    return holds


def metric(url: str, name: str) -> float:
    """A gauge or counter of the server at `url`, with labels or without.  Raises RuntimeError."""
    metrics = http.get(f"{url}/metrics", timeout=TIMEOUT_S).raise_for_status().text
    found = re.search(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", metrics, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the server does not tell {name}")
    return float(found[1])
