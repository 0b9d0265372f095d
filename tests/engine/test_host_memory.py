"""Pages that wait in host memory, on the real engine: under pressure, corrupted, late, revoked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from harness.client import Streaming, http
from harness.faults import EXTENSION
from harness.server import Server
from tests.conftest import TINY_FLAGS, all_served, leak_checked, leftovers
from tests.support import (
    TIMEOUT_S,
    clean_run,
    completion,
    fresh_salt,
    record_of,
    said,
    text_ids,
    wait_for_scope,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
SMALL_POOL = (
    *TINY_FLAGS,
    "--kv-cache-memory-bytes",
    str(24 << 20),
    "--max-num-seqs",
    "4",
    "--worker-extension-cls",
    EXTENSION,
)
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1", "RETIRE_PIN_TTL_MS": "20000"}
OLD, SHARED = 2000, 1600


MODELS = ("tiny-llama", "tiny-gemma3")


@pytest.fixture(scope="module")
def small_pools() -> Iterator[dict[str, Server]]:
    yield from all_served({model: (model, {"env": DEVELOPMENT}, SMALL_POOL) for model in MODELS})


@pytest.fixture(scope="module", params=MODELS)
def small_pool(request: pytest.FixtureRequest, small_pools: dict[str, Server]) -> Server:
    return small_pools[request.param]


@pytest.fixture
def server(small_pool: Server) -> Iterator[Server]:
    yield from leak_checked(small_pool)


def tier(server: Server) -> dict[str, int]:
    found: dict[str, int] = http.get(f"{server.url}/retire/status", timeout=TIMEOUT_S).json()["tier"]
    return found


def superseded(server: Server, scope: str, ids: list[int], epoch: int = 1, **retain: Any) -> str:
    """Supersede a predecessor that decodes; returns where the record is."""
    talking = Streaming(server.url, completion(ids, 3000), {"X-Retire-Scope": scope})
    talking.wait_for_text(2)
    body = {"scope": scope, "expected_epoch": epoch, "contract": {"retain": {"tier": "dram", **retain}}}
    answer = http.post(f"{server.url}/supersede", json=body, headers={"Prefer": "wait=fenced"}, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    talking.wait()
    return str(answer.headers["location"])


def offloaded(server: Server, location: str) -> dict[str, Any]:
    """The record, once the pages are in host memory."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        record: dict[str, Any] = http.get(server.url + location, timeout=TIMEOUT_S).json()
        if "offloaded" in record["stages"]:
            return record
        time.sleep(0.02)
    raise AssertionError(f"never offloaded: {record}, {tier(server)}")


def turn_the_pool_over(server: Server) -> None:
    for seed in range(4):
        said(server.url, completion(text_ids(server.url, 7000, 900 + seed), 1, cache_salt=fresh_salt()))


def successor_of(ids: list[int], server: Server, seed: int) -> list[int]:
    return [*ids[:SHARED], *text_ids(server.url, 100, seed)]


def test_pages_come_back_into_other_blocks_after_the_pool_has_turned_over(server: Server, scope: str) -> None:
    before = tier(server)
    ids = text_ids(server.url, OLD, 1)
    location = superseded(server, scope, ids)
    offloaded(server, location)
    assert leftovers(server)["pinned_blocks"] == 0, "the device has its blocks back"
    turn_the_pool_over(server)
    new = successor_of(ids, server, 2)
    answer = said(server.url, completion(new), **{"X-Retire-Scope": scope})
    record = record_of(server.url, location)
    assert (record["outcome"], record["inherited_tokens"]) == ("inherited", SHARED)
    assert record["certificate"]["tier"] == "dram"
    assert "restored" in record["stages"]
    assert answer == clean_run(server.url, new, SHARED)
    assert said(server.url, completion(new), **{"X-Retire-Scope": scope}) == answer, "what was restored is published"
    after = tier(server)
    assert after["restored_pages"] > before["restored_pages"]
    assert (after["host_bytes"], after["transfers"]) == (0, 0)


def test_a_page_that_changed_in_host_memory_is_refused_and_computed_again(server: Server, scope: str) -> None:
    """The digest in the certificate is not what the bytes say any more."""
    ids = text_ids(server.url, OLD, 11)
    location = superseded(server, scope, ids)
    offloaded(server, location)
    turn_the_pool_over(server)
    spoil(server)
    before = tier(server)["restores_corrupt"]
    new = successor_of(ids, server, 12)
    answer = said(server.url, completion(new), **{"X-Retire-Scope": scope})
    record = record_of(server.url, location)
    assert (record["outcome"], record["refusal"], record["inherited_tokens"]) == ("cold", "corrupt", 0)
    assert answer == clean_run(server.url, new, 0)
    assert tier(server)["restores_corrupt"] == before + 1


def spoil(server: Server) -> None:
    """Flip a byte of every slot in use, in the worker's host memory."""
    body = {"method": "spoil_host_pages", "kwargs": {"slots": tier(server)["offloaded_pages"]}}
    answer = http.post(f"{server.url}/collective_rpc", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/collective_rpc"])
def test_a_cache_reset_and_a_weight_update_revoke_certificates_and_succeed(
    server: Server, scope: str, path: str
) -> None:
    ids = text_ids(server.url, OLD, 21)
    location = superseded(server, scope, ids, tier="hbm")
    assert leftovers(server)["pinned_blocks"] > 0
    body = {"method": "reload_weights"} if path == "/collective_rpc" else None
    answer = http.post(server.url + path, json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    assert leftovers(server)["pinned_blocks"] == 0
    new = successor_of(ids, server, 22)
    said(server.url, completion(new), **{"X-Retire-Scope": scope})
    record = record_of(server.url, location)
    assert (record["outcome"], record["refusal"]) == ("cold", "revoked")


def test_a_scope_that_is_superseded_during_a_restore_goes_on(server: Server, scope: str) -> None:
    """Late transfers are dropped, the newest version answers, nothing is left."""
    ids = text_ids(server.url, OLD, 31)
    location = superseded(server, scope, ids)
    offloaded(server, location)
    turn_the_pool_over(server)
    new = successor_of(ids, server, 32)
    restoring = Streaming(server.url, completion(new, 400), {"X-Retire-Scope": scope})
    newest = successor_of(ids, server, 33)
    answer = said(server.url, completion(newest), **{"X-Retire-Scope": scope, "X-Retire-Supersedes": "2"})
    restoring.wait()
    assert answer == clean_run(server.url, newest, record_of_scope(server, scope)["inherited_tokens"])


def record_of_scope(server: Server, scope: str) -> dict[str, Any]:
    found = http.get(f"{server.url}/scopes/{scope}", timeout=TIMEOUT_S).json()["transition"]
    return record_of(server.url, f"/transitions/{found}")


def test_a_request_that_is_superseded_in_the_queue_leaves_its_scope_usable(server: Server, scope: str) -> None:
    busy = [
        Streaming(server.url, completion(text_ids(server.url, 50, 40 + n), 1500, cache_salt=fresh_salt()))
        for n in range(4)
    ]
    for one in busy:
        one.wait_for_text(1)
    queued = Streaming(server.url, completion(text_ids(server.url, 300, 50), 8), {"X-Retire-Scope": scope})
    wait_for_scope(server.url, scope)
    time.sleep(0.2)
    newest = Streaming(
        server.url,
        completion(text_ids(server.url, 300, 51), 8),
        {"X-Retire-Scope": scope, "X-Retire-Supersedes": "1", "X-Retire-Contract": '{"retain": {"tier": "dram"}}'},
    )
    wait_for_scope(server.url, scope, 2)
    time.sleep(0.2)
    for one in busy:
        one.leave()
    assert newest.wait().status == 200
    assert len(newest.reply.text) > 0
    assert queued.wait().text == ""


def test_a_successor_that_never_comes_leaves_nothing_in_host_memory(server: Server, scope: str) -> None:
    location = superseded(server, scope, text_ids(server.url, OLD, 61), ttl_s=1.5)
    offloaded(server, location)
    assert tier(server)["host_bytes"] > 0
    assert record_of(server.url, location)["outcome"] == "expired"
    assert tier(server)["host_bytes"] == 0
