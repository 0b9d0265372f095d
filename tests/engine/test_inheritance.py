"""FENCE, ALIGN, RESUME on the real engine: what the successor gets, and that it is right."""

from __future__ import annotations

import itertools
import time

import pytest

from harness.client import Streaming
from tests.support import clean_run, completion, record_of, said, supersede, supersede_inside_a_step, text_ids

PREFIX, SUFFIX = 7000, 60


def pair(url, attempt):
    ids = text_ids(url, PREFIX, seed=1000 + attempt)
    return (
        completion(ids + text_ids(url, 300, seed=5000 + attempt)),
        completion(ids + text_ids(url, SUFFIX, seed=9000 + attempt)),
    )


@pytest.mark.engine
@pytest.mark.parametrize("which", ["server", "gemma"])
def test_a_successor_adopts_the_completed_prefix_of_a_stopped_step_and_says_what_a_clean_run_says(
    which, request, scope
):
    server = request.getfixturevalue(which)
    found = supersede_inside_a_step(server.url, scope, lambda attempt: pair(server.url, attempt))
    record, certificate = found.record, found.record["certificate"]
    assert record["outcome"] == "inherited"
    assert record["inherited_tokens"] == certificate["tokens"] > 0
    assert record["adopted_blocks"] == certificate["blocks"], "the successor's table aliases the certified blocks"
    assert certificate["tokens"] <= max(receipt["frontier_tokens"] for receipt in record["receipts"])
    body = next(p for p in (pair(server.url, a)[1] for a in range(1, 13)) if _same(p, found, server.url))
    assert found.new.text == clean_run(server.url, body["prompt"], certificate["tokens"])
    assert not [frame for frame in found.old.frames if frame.text], "nothing of the old epoch was published"


def _same(body, found, url):
    """Find the successor of the attempt that was stopped: its scope carries the attempt's number."""
    return body["prompt"] == pair(url, int(found.record["scope"].rsplit("-", 1)[1]))[1]["prompt"]


@pytest.mark.engine
def test_stages_end_in_order_and_are_all_reported(server, scope):
    found = supersede_inside_a_step(server.url, scope, lambda attempt: pair(server.url, 50 + attempt))
    stages = found.record["stages"]
    order = [stages[name] for name in ("advance", "fence", "align", "resume", "reclaim", "first_frame")]
    assert order == sorted(order)


@pytest.mark.engine
def test_inherit_none_gives_a_cold_successor_that_touches_no_block_of_its_predecessor(server, scope):
    ids = text_ids(server.url, 3000, seed=31)
    old, new = completion([*ids, 5, 6, 7], 200), completion([*ids, 8, 9, 10])
    found = supersede(server.url, scope, old, new, after_s=1.0, contract='{"inherit": "none"}')
    assert found.record["refusal"] == "not_wanted"
    assert found.record["inherited_tokens"] == 0
    assert found.record["outcome"] == "cold"
    assert found.new.text == clean_run(server.url, new["prompt"], 0)
    # Its cache generation is its own: another request with that prompt does not find the successor's blocks either.
    assert said(server.url, new) == found.new.text


@pytest.mark.engine
def test_a_promised_prefix_lets_a_useful_step_run_to_its_end(server, scope):
    for attempt in range(8):
        old, new = pair(server.url, 80 + attempt)
        found = supersede(
            server.url, f"{scope}-{attempt}", old, new, after_s=0.1 + attempt * 0.15, contract='{"keep_prefix": 7000}'
        )
        receipts = found.record["receipts"]
        if receipts and 0 < receipts[0]["frontier_tokens"] < PREFIX:
            assert not receipts[0]["stopped"], "every row of that step lay inside the promised prefix"
            assert found.record["inherited_tokens"] == receipts[0]["frontier_tokens"] // 32 * 32
            return
    pytest.fail("the revision never fell into a step of the promised prefix")


@pytest.mark.engine
def test_a_second_supersede_before_the_first_successor_has_run_hands_the_prefix_on(server, scope):
    ids = text_ids(server.url, PREFIX, seed=77)
    streams = [Streaming(server.url, completion([*ids, 3]), {"X-Retire-Scope": scope})]
    time.sleep(0.4)
    for tail in (11, 12, 13):
        headers = {"X-Retire-Scope": scope, "X-Retire-Supersedes": "*"}
        streams.append(Streaming(server.url, completion([*ids, tail]), headers))
        while not streams[-1].reply.status and streams[-1].reply.done_at == 0:
            time.sleep(0.001)
    replies = [stream.wait() for stream in streams]
    last = record_of(server.url, replies[-1].headers["location"])
    assert replies[-1].text == clean_run(server.url, [*ids, 13], last["inherited_tokens"])
    for reply, successor in itertools.pairwise(replies):
        assert all(frame.at <= successor.headers_at for frame in reply.frames if frame.text)
