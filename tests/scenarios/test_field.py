"""Faults from the field (SCENARIOS of the design), as inputs to the real server.  Numbers are theirs."""

from __future__ import annotations

import json
import time

import pytest

from harness.client import Streaming, http, probe_ms
from harness.publication import Arm, Consumer, RawReader, bound_frames, event_bytes
from retire.client import ScopeClient
from tests.conftest import leftovers
from tests.support import (
    clean_run,
    completion,
    fresh_salt,
    prefill_s,
    record_of,
    said,
    stated_chars,
    supersede,
    text_ids,
    wait_for_scope,
)


def wait_until_empty(server):
    """Blocks, pins and requests of every scope are back."""
    deadline = time.monotonic() + 30
    while any(v for k, v in leftovers(server).items() if k != "open_transitions"):
        assert time.monotonic() < deadline, leftovers(server)
        time.sleep(0.02)


@pytest.mark.engine
def test_1_a_request_behind_an_abandoned_scoped_prefill_waits_for_a_safe_point_not_for_a_step(server, scope):
    """Nobody sends SUPERSEDE: the client just disconnects."""
    ids = text_ids(server.url, 8000, seed=1)
    whole_s = min(prefill_s(server.url, ids) for _ in range(2))
    scoped, native = [], []
    for attempt, share in enumerate((0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.75, 0.85)):  # everywhere in a step
        for waits, headers in ((native, {}), (scoped, {"X-Retire-Scope": f"{scope}-{attempt}"})):
            stream = Streaming(server.url, completion(ids, cache_salt=fresh_salt()), headers)
            time.sleep(whole_s * share)
            stream.leave()
            waits.append(probe_ms(server.url, "tiny"))
    assert sum(scoped) < sum(native), (scoped, native)


@pytest.mark.engine
@pytest.mark.parametrize("share", [0.15, 0.4], ids=["several versions a step", "one or two steps a version"])
def test_2_a_deadline_shorter_than_the_prefill_is_no_livelock(server, scope, share):
    """The runtime supersedes every `d` seconds with the same context; nothing that was certified is ever lost."""
    ids = text_ids(server.url, 8000, seed=2)
    body = completion([*ids, 1], cache_salt=fresh_salt())
    deadline_s = share * min(prefill_s(server.url, ids) for _ in range(2))
    versions = []
    for epoch in range(40):
        headers = {"X-Retire-Scope": scope} | ({"X-Retire-Supersedes": str(epoch)} if epoch else {})
        versions.append(Streaming(server.url, body, headers))
        wait_for_scope(server.url, scope, epoch + 1)
        time.sleep(deadline_s)
        if versions[-1].reply.text:
            break
    newest = versions[-1].wait()
    assert len(versions) > 2, "the deadline was not shorter than the prefill"
    assert newest.text
    assert newest.text == clean_run(server.url, body["prompt"], 0)
    records = [record_of(server.url, version.wait().headers["location"]) for version in versions[1:]]
    inherited = [record["inherited_tokens"] for record in records if record["inherited_tokens"]]
    assert inherited == sorted(inherited)
    assert inherited[-1] > inherited[0]


@pytest.mark.engine
def test_3_fence_latency_of_an_early_supersede_is_recorded_and_bounded_by_one_armed_interval(server, scope):
    ids = text_ids(server.url, 8000, seed=3)
    for attempt in range(12):
        salt = fresh_salt()
        found = supersede(
            server.url,
            f"{scope}-{attempt}",
            completion([*ids, 1], cache_salt=salt),
            completion([*ids[:100], 2], cache_salt=salt),
            after_s=0.1 + 0.01 * attempt,
        )
        if found.choice == "stop":
            receipt = found.record["receipts"][0]
            # closed at the first safe point after the store; the interval that was running when it came is not in the
            # longest one yet, so the step's longest, doubled, bounds it
            assert receipt["obsolete_closed_ms"] <= 2 * receipt["longest_interval_ms"] + 5
            assert found.record["stages"]["fence"] >= receipt["obsolete_closed_ms"]
            return
    pytest.fail("no step was stopped")


@pytest.mark.engine
def test_4_supersede_while_the_last_chunk_is_in_flight_publishes_no_old_token_and_returns_all_blocks(server, scope):
    ids = text_ids(server.url, 6000, seed=4)
    whole_s = min(prefill_s(server.url, ids) for _ in range(3))
    for attempt in range(5):
        salt = fresh_salt()
        found = supersede(
            server.url,
            f"{scope}-{attempt}",
            completion([*ids, 1], 200, cache_salt=salt),
            completion([*ids[:3000], 2, 3], cache_salt=salt),
            after_s=whole_s * (0.75 + 0.05 * attempt),
        )
        assert len(found.old.text) == stated_chars(found.record)
        assert found.record["inherited_tokens"] <= 3000
    wait_until_empty(server)


@pytest.mark.engine
def test_5_structured_output_leaves_no_visible_text_outside_its_grammar(server, scope):
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    body = completion(
        text_ids(server.url, 500, seed=5), 400, structured_outputs={"json": schema}, ignore_eos=False, cache_salt="s"
    )
    first = Streaming(server.url, body, {"X-Retire-Scope": scope})
    first.wait_for_text(frames=10)
    second = Streaming(server.url, body | {"max_tokens": 40}, {"X-Retire-Scope": scope, "X-Retire-Supersedes": "1"})
    old, new = first.wait(), second.wait()
    assert old.text.lstrip().startswith("{")
    assert set(old.text) <= set('{}[]",:-0123456789.aeE+ \n\t\r'), old.text
    assert new.status == 200
    assert new.text.lstrip().startswith("{")


@pytest.mark.engine
def test_6_slots_of_superseded_decoding_requests_are_free_within_a_step(server, scope):
    streams = [
        Streaming(
            server.url,
            completion(text_ids(server.url, 64, seed=60 + n), 6000, cache_salt=fresh_salt()),
            {"X-Retire-Scope": scope},
        )
        for n in range(12)
    ]
    for stream in streams:
        stream.wait_for_text(frames=2)
    answer = http.post(
        f"{server.url}/supersede",
        json={"scope": scope, "expected_epoch": 1, "contract": {"inherit": "none"}},
        headers={"Prefer": "wait=fenced"},
        timeout=60,
    ).json()
    assert answer["fenced"] is True
    held = leftovers(server)
    assert (held["scoped_requests"], held["pinned_blocks"]) == (0, 0)
    for stream in streams:
        reply = stream.wait()
        assert reply.frames[-1].body["choices"][0]["finish_reason"] == "length"
        assert reply.frames[-1].body["retire"]["superseded_by"] == 2


@pytest.mark.engine
def test_14_neighbours_that_share_the_prefix_of_a_stopped_step_say_what_a_clean_run_says(server, scope):
    """Admitted before, in and after the step; all of the same tenant, none of the same scope."""
    ids = text_ids(server.url, 6000, seed=14)
    whole_s = min(prefill_s(server.url, ids) for _ in range(2))
    for attempt in range(4):
        salt = fresh_salt()
        neighbours = []

        def neighbour(length, salt=salt, into=neighbours):
            body = completion([*ids[:length], 9], 8, cache_salt=salt)
            into.append((length, Streaming(server.url, body)))

        neighbour(2000)  # before
        old = Streaming(server.url, completion(ids, cache_salt=salt), {"X-Retire-Scope": f"{scope}-{attempt}"})
        wait_for_scope(server.url, f"{scope}-{attempt}")
        time.sleep(whole_s * (0.3 + 0.15 * attempt))
        neighbour(3000)  # in, or waiting for its end
        new = Streaming(
            server.url,
            completion([*ids[:1000], 7], cache_salt=salt),
            {"X-Retire-Scope": f"{scope}-{attempt}", "X-Retire-Supersedes": "1"},
        )
        neighbour(4000)  # after
        old.wait()
        record_of(server.url, new.wait().headers["location"])
        for length, stream in neighbours:
            says = stream.wait().text
            # Which part was reused depends on the moment; the first tokens must be right whatever it was.
            assert says.split()[:3] == clean_run(server.url, [*ids[:length], 9], 0, 8).split()[:3], length


@pytest.mark.engine
def test_15_same_prompt_of_the_same_tenant_is_reused(server, scope):
    ids = text_ids(server.url, 4000, seed=15)
    salt = fresh_salt()
    said(server.url, completion(ids, 1, cache_salt=salt), **{"X-Retire-Scope": scope})

    def hits():
        lines = http.get(f"{server.url}/metrics", timeout=60).text.splitlines()
        return sum(float(s.rsplit(" ", 1)[1]) for s in lines if s.startswith("vllm:prefix_cache_hits_total"))

    before = hits()
    said(server.url, completion(ids, 1, cache_salt=salt), **{"X-Retire-Scope": f"{scope}-other"})
    assert hits() - before >= 3968
    said(server.url, completion(ids, 1, cache_salt=fresh_salt()), **{"X-Retire-Scope": f"{scope}-third"})
    assert hits() - before < 2 * 3968, "another cache salt is another tenant's cache"


@pytest.mark.engine
def test_16_a_reader_at_one_frame_a_second_gets_nothing_old_through_the_client_and_the_stated_backlog_without(
    server, scope
):
    body = completion(text_ids(server.url, 64, seed=16), 4000, return_token_ids=True)
    stated = http.get(f"{server.url}/retire/status", timeout=60).json()["stated_backlog"]
    with ScopeClient(server.url, scope) as client:
        reader = RawReader(server.url, body, {"X-Retire-Scope": scope})
        consumers = [Consumer(reader.bodies(), 1.0), Consumer(client.completions(body), 1.0)]
        for consumer in consumers:
            consumer.wait_for_token()
        said(server.url, completion(text_ids(server.url, 64, seed=160), 400))  # as many steps for both
        record = client.revoke(contract={"inherit": "none"})
        accepted_at = time.monotonic()
        raw, gated = (Arm(consumer.finish(), accepted_at, ()) for consumer in consumers)
        (new,) = {chunk["retire"]["epoch"] for chunk in client.completions(completion([1, 2, 3], 4))}
    assert gated.figures["stale_frames"] == 0
    assert gated.taken < 400, "most of it was in buffers"
    smallest = min(event_bytes(frame.body) for frame in raw.old if frame.token_ids)
    assert 0 < raw.figures["stale_frames"] <= bound_frames(stated, reader.holds_bytes, smallest)
    assert raw.last["retire"]["superseded_by"] == new == 2
    published = {
        one["choices"][0]["tokens"] for one in record_of(server.url, f"/transitions/{record['id']}")["published"]
    }
    assert raw.taken in published, "every token that was let out has come"
    wait_until_empty(server)


@pytest.mark.engine
def test_the_engine_is_alive_and_empty_after_all_of_this(server):
    assert http.get(f"{server.url}/health", timeout=10).status_code == 200
    assert json.dumps(leftovers(server))
    assert said(server.url, completion([1, 2, 3], 2))
