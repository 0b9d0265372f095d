"""Pages of a superseded request through host memory and back, on a real server with several KV groups.

The device's cache is so small that other requests take every block of the predecessor before its successor comes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from harness.server import Server
from harness.workload import fresh_salt
from tests.conftest import TINY_FLAGS, leak_checked, leftovers, served
from tests.support import clean_run, completion, said, text_ids

SMALL_CACHE = (*TINY_FLAGS, "--kv-cache-memory-bytes", str(16 << 20))
SHARED, OLD, NEW, TOKENS = 2500, 3000, 3100, 16
TO_HOST = {"retain": {"tier": "dram", "ttl_s": 60}}


@pytest.fixture(scope="module")
def small_server() -> Iterator[Server]:
    yield from served("tiny-gemma3", SMALL_CACHE)


@pytest.fixture
def small(small_server: Server) -> Iterator[Server]:
    yield from leak_checked(small_server)


def in_host_memory(server: Server, scope: str, seed: int) -> tuple[dict[str, Any], str]:
    """Supersede a request, wait until its pages are copied, have others take its blocks.

    Returns the body of the successor, and where the record is.
    """
    url = server.url
    old = text_ids(url, OLD, seed)
    new = old[:SHARED] + text_ids(url, NEW - SHARED, seed + 50)
    salt = fresh_salt()
    said(url, completion(old, 8, cache_salt=salt), **{"X-Retire-Scope": scope})
    body = {"scope": scope, "expected_epoch": 1, "contract": TO_HOST}
    answer = httpx.post(f"{url}/supersede", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    record = f"{url}{answer.headers['location']}"
    while "offloaded" not in httpx.get(record, timeout=60).json()["stages"] or leftovers(server)["copies_in_flight"]:
        time.sleep(0.05)
    for other in range(4):
        said(url, completion(text_ids(url, 5000, 1000 * seed + other), 1, cache_salt=fresh_salt()))
    return completion(new, TOKENS, cache_salt=salt), record


@pytest.mark.engine
def test_a_successor_whose_predecessors_blocks_are_gone_gets_its_pages_back(small, scope):
    body, record = in_host_memory(small, scope, seed=1)
    text = said(small.url, body, **{"X-Retire-Scope": scope, "X-Retire-Epoch": "2"})
    made = httpx.get(record, timeout=60).json()
    assert made["outcome"] == "inherited"
    assert made["certificate"]["tier"] == "dram"
    assert made["inherited_tokens"] == SHARED - SHARED % 32
    assert {"offloaded", "restored"} <= set(made["stages"])
    assert text == clean_run(small.url, body["prompt"], made["inherited_tokens"], TOKENS)


@pytest.mark.engine
def test_restored_blocks_are_published_and_may_be_read_by_whoever_shares_the_prefix(small, scope):
    body, _ = in_host_memory(small, scope, seed=2)
    text = said(small.url, body, **{"X-Retire-Scope": scope, "X-Retire-Epoch": "2"})
    assert said(small.url, body, **{"X-Retire-Scope": scope, "X-Retire-Epoch": "2"}) == text
