"""vLLM's asynchronous scheduling on the real engine: the next step is launched before the last one has ended.

The CPU back end switches it off, because there is no device to wait for.  In `ahead_server` it is on, with stand-ins
for streams and events (`ahead/sitecustomize.py`): the scheduler, the runner and their outputs are upstream's
asynchronous ones, and the engine schedules while the worker computes.  What a device adds to that is time
(`test_ahead.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from harness.client import Streaming
from harness.server import Server
from tests.conftest import leak_checked
from tests.support import (
    clean_run,
    completion,
    decoding_beside,
    fresh_salt,
    prefill_s,
    record_of,
    said,
    supersede,
    supersede_inside_a_step,
    text_ids,
)

PREFIX = 7000


@pytest.fixture
def ahead(ahead_server: Server) -> Iterator[Server]:
    yield from leak_checked(ahead_server)


def pair(url, attempt, shared):
    ids, salt = text_ids(url, PREFIX, seed=1000 + attempt), fresh_salt()
    return (
        completion(ids + text_ids(url, 300, seed=5000 + attempt), cache_salt=salt),
        completion(ids[:shared] + text_ids(url, 60, seed=9000 + attempt), cache_salt=salt),
    )


@pytest.mark.engine
@pytest.mark.slow
def test_the_server_is_what_it_claims_to_be(ahead):
    assert "scheduled by VersionedAsyncScheduler, 2 at a time" in ahead.log()


@pytest.mark.engine
@pytest.mark.slow
def test_scoped_and_other_requests_say_the_same(ahead, scope):
    ids = text_ids(ahead.url, 3000, seed=1)
    plain = said(ahead.url, completion(ids, 100, cache_salt=fresh_salt()))
    body = completion(ids, 100, cache_salt=fresh_salt())
    assert Streaming(ahead.url, body, {"X-Retire-Scope": scope}).wait().text == plain


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(("choice", "shared"), [("stop", 4100), ("trim", 5500)])
def test_a_successor_says_what_a_clean_run_says_when_a_step_was_cut_with_another_behind_it(
    ahead, scope, choice, shared
):
    """The step behind was scheduled on top of rows that were then cut out."""
    found = supersede_inside_a_step(ahead.url, scope, lambda attempt: pair(ahead.url, attempt, shared), choice)
    record = found.record
    assert record["outcome"] == "inherited"
    assert record["adopted_blocks"] == record["certificate"]["blocks"]
    (receipt,) = record["receipts"]
    assert record["inherited_tokens"] <= receipt["frontier_tokens"]
    if choice == "trim":
        assert record["inherited_tokens"] == receipt["frontier_tokens"] == shared // 32 * 32
    _, new = pair(ahead.url, int(record["scope"].rsplit("-", 1)[1]), shared)
    assert found.new.text == clean_run(ahead.url, new["prompt"], record["inherited_tokens"])
    assert not [frame for frame in found.old.frames if frame.text]


@pytest.mark.engine
@pytest.mark.slow
def test_versions_that_end_while_they_decode_leave_what_was_said(ahead, scope):
    """With tokens on their way, and requests beside it that have nothing to do with it."""
    url = ahead.url
    alone, beside = decoding_beside(url, scope, 3, 200)
    for attempt in range(4):
        ids = text_ids(url, 900, seed=600 + attempt)
        old, new = completion([*ids, 1], 400), completion([*ids, 2], 16)
        stream = Streaming(url, old, {"X-Retire-Scope": f"{scope}-{attempt}"})
        stream.wait_for_text(3 + attempt)
        headers = {"X-Retire-Scope": f"{scope}-{attempt}", "X-Retire-Supersedes": "*"}
        reply = Streaming(url, new, headers).wait()
        stream.wait()
        record = record_of(url, reply.headers["location"])
        assert record["inherited_tokens"] == 896
        assert reply.text == clean_run(url, new["prompt"], 896)
    assert [stream.wait().text for stream in beside] == alone


@pytest.mark.engine
@pytest.mark.slow
def test_clients_that_leave_take_nothing_with_them(ahead, scope):
    whole_s = prefill_s(ahead.url, text_ids(ahead.url, PREFIX, seed=70))
    for attempt in range(4):
        ids = text_ids(ahead.url, PREFIX, seed=71 + attempt)
        stream = Streaming(ahead.url, completion(ids, 64), {"X-Retire-Scope": f"{scope}-{attempt}"})
        time.sleep(whole_s * (0.3 + 0.3 * attempt))
        stream.hang_up()
    ids = text_ids(ahead.url, 500, seed=99)
    assert said(ahead.url, completion(ids)) == clean_run(ahead.url, ids, 0)


@pytest.mark.engine
@pytest.mark.slow
def test_structured_output_is_cut_off_without_an_error(ahead, scope):
    """Its next step waits for the token before; what a stopped step samples must not reach the grammar."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    for attempt in range(4):
        ids = text_ids(ahead.url, 2500, seed=300 + attempt)
        old = completion(ids, 64, structured_outputs={"json": schema}, ignore_eos=False)
        found = supersede(ahead.url, f"{scope}-{attempt}", old, completion([*ids[:2000], 3]), after_s=0.15 * attempt)
        assert found.new.text == clean_run(ahead.url, [*ids[:2000], 3], found.record["inherited_tokens"])
    assert "grammar rejected" not in ahead.log()
