"""Real servers for the tests, one per kind and session.

A fixture of this file never passes a server on that holds something: after every test that used one, the engine must
have nothing left of any scope (pins, requests, open steps), or the test fails.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, settings

from harness.client import http
from harness.server import Server, ServerFailed, start_side_by_side
from retire import checker, models

# How long an example takes is the machine's business, not the code's.
settings.register_profile("retire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("retire")

TINY_FLAGS = (
    "--enforce-eager",
    *("--max-model-len", "8192"),
    *("--max-num-batched-tokens", "2048"),
    *("--block-size", "32"),
    *("--kv-cache-memory-bytes", str(256 << 20)),
    *("--dtype", "float32"),  # so that chunk boundaries do not decide between near-ties
    *("--served-model-name", "tiny"),
)


SHORT_PINS = {"RETIRE_PIN_TTL_MS": "3000"}  # so that a scope without a successor leaves nothing behind for long


def served(model: str, flags: tuple[str, ...] = TINY_FLAGS, **more: Any) -> Iterator[Server]:
    """A server for as long as the fixture lives."""
    for servers in all_served({"": (model, more, flags)}):
        yield servers[""]


def all_served(made: Mapping[str, tuple[str, dict[str, Any], tuple[str, ...]]]) -> Iterator[dict[str, Server]]:
    """Servers by name, made of (model, `Server`'s keyword arguments, flags), for as long as the fixture lives."""
    servers = {
        name: Server(models.resolve(model), flags, **{"preforked": True, "journaled": True, **more})
        for name, (model, more, flags) in made.items()
    }
    try:
        start_side_by_side(list(servers.values()))
        yield servers
    finally:
        reports = {name: _stopped(server) for name, server in servers.items()}
        for server in servers.values():
            server.close()
    for name, report in reports.items():
        assert report is None or not report.violated, (name, [str(finding) for finding in report.violated[:20]])


def _stopped(server: Server) -> checker.Report | None:
    """What the server's journal says, once nobody writes it any more."""
    server.stop()
    return server.examined()


def all_failed(servers: Mapping[str, Server]) -> Iterator[Mapping[str, Server]]:
    """Servers that are not to come up, side by side, each come to an end by itself or up."""
    try:
        with suppress(ServerFailed):
            start_side_by_side(list(servers.values()))
        yield servers
    finally:
        for server in servers.values():
            server.close()


_PATH = (str(Path(__file__).parent / "engine" / "ahead"), os.environ.get("PYTHONPATH"))
AHEAD = {**SHORT_PINS, "PYTHONPATH": os.pathsep.join(filter(None, _PATH))}
COMMON: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {  # the session's servers, by their fixtures
    "tiny_server": ("tiny-llama", {"env": SHORT_PINS, "preforked": False}, TINY_FLAGS),  # as users start it
    "gemma_server": ("tiny-gemma3", {"env": SHORT_PINS}, TINY_FLAGS),
    "plain_server": ("tiny-llama", {"patched": False}, TINY_FLAGS),
    "ahead_server": ("tiny-llama", {"env": AHEAD}, (*TINY_FLAGS, "--max-num-batched-tokens", "1024")),
}


@pytest.fixture(scope="session")
def common_servers(request: pytest.FixtureRequest) -> Iterator[dict[str, Server]]:
    """Those of `COMMON` that some test of the session asks for, started side by side."""
    asked_for = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    yield from all_served({name: made for name, made in COMMON.items() if name in asked_for})


@pytest.fixture(scope="session")
def tiny_server(common_servers: dict[str, Server]) -> Server:
    """A patched server with a random Llama of four layers: fast, and wrong KV changes its output."""
    return common_servers["tiny_server"]


@pytest.fixture(scope="session")
def gemma_server(common_servers: dict[str, Server]) -> Server:
    """A patched server with a random Gemma-3: sliding and full attention, several KV groups."""
    return common_servers["gemma_server"]


@pytest.fixture(scope="session")
def plain_server(common_servers: dict[str, Server]) -> Server:
    """vLLM as it is, the same model as `tiny_server`."""
    return common_servers["plain_server"]


@pytest.fixture(scope="session")
def ahead_server(common_servers: dict[str, Server]) -> Server:
    """As `tiny_server`, in smaller steps, of which each is launched before the one before it has ended."""
    return common_servers["ahead_server"]


def leftovers(server: Server, key: str | None = None) -> dict[str, int]:
    """What the engine holds for the scopes of whoever has the key."""
    status = http.get(f"{server.url}/retire/status", headers=bearer(key), timeout=60).json()
    held: dict[str, int] = status["engine"]
    return held


def bearer(key: str | None) -> dict[str, str]:
    """The header that shows a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@pytest.fixture
def server(tiny_server: Server) -> Iterator[Server]:
    """`tiny_server`, checked for leaks afterwards."""
    yield from leak_checked(tiny_server)


@pytest.fixture
def gemma(gemma_server: Server) -> Iterator[Server]:
    """`gemma_server`, checked for leaks afterwards."""
    yield from leak_checked(gemma_server)


@pytest.fixture(params=["tiny-llama", "tiny-gemma3"])
def either(request: pytest.FixtureRequest, tiny_server: Server, gemma_server: Server) -> Iterator[Server]:
    """One KV group, then several; checked for leaks afterwards."""
    yield from leak_checked(tiny_server if request.param == "tiny-llama" else gemma_server)


def all_scopes(server: Server, key: str | None = None) -> Iterator[dict[str, Any]]:
    """Every scope of whoever has the key."""
    after: str | None = ""
    while after is not None:
        query = {"after": after, "limit": 1000}
        page = http.get(f"{server.url}/scopes", params=query, headers=bearer(key), timeout=60).json()
        yield from page["scopes"]
        after = page["next"]


def end_scopes(server: Server, key: str | None = None) -> None:
    """Cancel every scope that was ever superseded and still lives."""
    for found in all_scopes(server, key):
        if found["transition"] is not None and not found["cancelled"]:
            path = f"/scopes/{quote(found['scope'], safe='')}"
            http.delete(server.url + path, headers=bearer(key), timeout=60)


def leak_checked(server: Server, keys: tuple[str | None, ...] = (None,)) -> Iterator[Server]:
    """Hand the server to a test; then wait for the engine to come to rest and look at what it holds, for every key."""
    yield server
    deadline = time.monotonic() + 60
    for key in keys:
        while True:
            held = leftovers(server, key)
            if not any(held.values()) or time.monotonic() > deadline:
                break
            if held["open_transitions"]:  # one that waits for a successor would go on until its pins expire
                end_scopes(server, key)
            time.sleep(0.1)
        assert held == dict.fromkeys(held, 0), f"the test left something behind: {held}"


@pytest.fixture
def scope() -> str:
    """A scope that nobody else uses."""
    return f"test-{uuid.uuid4().hex[:12]}"
