"""FENCE, ALIGN, RESUME on the real engine: what the successor gets, and that it is right."""

from __future__ import annotations

import itertools
import time

import pytest

from harness.client import Streaming
from tests.support import (
    clean_run,
    completion,
    decoding_beside,
    fresh_salt,
    record_of,
    said,
    stated_chars,
    supersede,
    supersede_inside_a_step,
    text_ids,
    wait_for_scope,
)

PREFIX, SUFFIX = 7000, 60


def pair(url, attempt, shared=PREFIX):
    ids, salt = text_ids(url, PREFIX, seed=1000 + attempt), fresh_salt()
    return (
        completion(ids + text_ids(url, 300, seed=5000 + attempt), cache_salt=salt),
        completion(ids[:shared] + text_ids(url, SUFFIX, seed=9000 + attempt), cache_salt=salt),
    )


@pytest.mark.engine
@pytest.mark.parametrize(("choice", "shared"), [("stop", 4100), ("trim", 5500)])
def test_a_successor_adopts_what_a_cut_step_completed_and_says_what_a_clean_run_says(either, scope, choice, shared):
    server = either
    found = supersede_inside_a_step(server.url, scope, lambda attempt: pair(server.url, attempt, shared), choice)
    record, certificate = found.record, found.record["certificate"]
    assert record["outcome"] == "inherited"
    assert record["inherited_tokens"] == certificate["tokens"] > 0
    assert record["adopted_blocks"] == certificate["blocks"], "the successor's table aliases the certified blocks"
    (receipt,) = record["receipts"]
    assert certificate["tokens"] <= receipt["frontier_tokens"]
    if choice == "trim":
        assert certificate["tokens"] == receipt["frontier_tokens"] == shared // 32 * 32, "all of the useful rows"
    assert receipt["cost_row_layers"][choice] == min(receipt["cost_row_layers"].values())
    _, new = pair(server.url, int(record["scope"].rsplit("-", 1)[1]), shared)
    assert found.new.text == clean_run(server.url, new["prompt"], certificate["tokens"])
    assert not [frame for frame in found.old.frames if frame.text], "nothing of the old epoch was published"


@pytest.mark.engine
def test_rows_of_others_do_not_notice_that_a_step_beside_them_is_trimmed(either, scope):
    """Half a dozen requests decode, without a scope and in other ones, while prefills beside them are cut."""
    url = either.url
    alone, beside = decoding_beside(url, scope, 6, 400)
    for stream in beside:
        stream.wait_for_text(1)
    choices = []
    for attempt, after_s in enumerate((0.1, 0.2, 0.3, 0.4, 0.5, 0.6)):
        old, new = pair(url, 40 + attempt, shared=3000 + 300 * attempt)
        choices.append(supersede(url, f"{scope}-{attempt}", old, new, after_s=after_s).choice)
    assert {"trim", "stop"} & set(choices), choices
    assert [stream.wait().text for stream in beside] == alone


@pytest.mark.engine
def test_stages_end_in_order_and_are_all_reported(server, scope):
    found = supersede_inside_a_step(server.url, scope, lambda attempt: pair(server.url, 50 + attempt, 3000))
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
    wait_for_scope(server.url, scope)
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
        assert len(reply.text) == stated_chars(record_of(server.url, successor.headers["location"]))
