"""The runtime's own client: one scope, one number, and a gate of its own."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from harness.client import http
from harness.server import Server
from retire.client import ScopeClient, ServerRefused
from retire.client.gate import ClientGate
from retire.core.errors import EpochConflict, EpochRevoked

LONG = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me more."}],
    "max_tokens": 4000,
    "ignore_eos": True,
}
SHORT = {**LONG, "max_tokens": 4}
PROMPT = {"model": "tiny", "prompt": "Tell me more.", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def client(server: Server, scope: str) -> Iterator[ScopeClient]:
    with ScopeClient(server.url, scope) as made:
        yield made


@pytest.mark.engine
def test_a_stream_of_the_current_epoch_is_read_to_its_end(client):
    chunks = list(client.chat(SHORT))
    assert {chunk["retire"]["epoch"] for chunk in chunks} == {1}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.engine
def test_after_a_supersede_no_chunk_of_the_old_epoch_is_handed_out(client):
    old = client.chat(LONG)
    before = list(itertools.islice(old, 20))
    new = client.supersede(SHORT, reason="user_steering")
    assert list(old) == [], "what was still in the socket is dropped"
    assert {chunk["retire"]["epoch"] for chunk in before} == {1}
    assert {chunk["retire"]["epoch"] for chunk in new} == {2}
    assert client.epoch == 2


@pytest.mark.engine
def test_a_supersede_that_somebody_else_won_is_a_conflict_and_teaches_the_current_epoch(server, scope, client):
    list(client.chat(SHORT))
    with ScopeClient(server.url, scope) as other:
        list(other.supersede(SHORT))
    with pytest.raises(EpochConflict):
        client.supersede(SHORT)
    assert client.epoch == 2
    assert [chunk["retire"]["epoch"] for chunk in client.supersede(SHORT)].pop() == 3


@pytest.mark.engine
def test_a_refused_supersede_leaves_the_running_stream_alone(client):
    old = client.chat({**LONG, "max_tokens": 40})
    next(old)
    with pytest.raises(ServerRefused):
        client.supersede(SHORT, contract={"inherit": "everything"})
    assert list(old)[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.engine
def test_a_cancelled_scope_raises(server, scope, client):

    list(client.chat(SHORT))
    assert http.delete(f"{server.url}/scopes/{scope}", timeout=60).status_code == 200
    with pytest.raises(EpochRevoked):
        client.chat(SHORT)


@pytest.mark.engine
def test_completions_are_of_the_scope_as_chats_are(client):
    old = client.completions({**PROMPT, "max_tokens": 4000})
    assert next(old)["retire"]["epoch"] == 1
    new = list(client.supersede(PROMPT))
    assert list(old) == []
    assert {(chunk["object"], chunk["retire"]["epoch"]) for chunk in new} == {("text_completion", 2)}


@pytest.mark.engine
def test_a_revoked_epoch_needs_no_successor_and_the_next_request_is_of_the_new_one(client):
    old = client.chat(LONG)
    next(old)
    record = client.revoke(reason="user_steering", contract={"inherit": "none"})
    assert list(old) == []
    assert (record["old_epoch"], record["new_epoch"], record["reason"]) == (1, 2, "user_steering")
    assert client.epoch == 2
    assert {chunk["retire"]["epoch"] for chunk in client.completions(PROMPT)} == {2}
    assert client.transition(record["id"])["published"][0]["epoch"] == 1


@pytest.mark.engine
def test_nobody_is_handed_an_old_chunk_once_the_supersede_has_returned(server, scope, client):
    taken = []

    def consume(stream):
        for chunk in stream:
            at = time.monotonic()
            taken.append((at, chunk))

    readers = [threading.Thread(target=consume, args=(client.chat(LONG),)) for _ in range(3)]
    for reader in readers:
        reader.start()
    while len(taken) < 30:
        time.sleep(0.01)
    list(itertools.islice(client.supersede(SHORT), 1))
    accepted_at = time.monotonic()
    for reader in readers:
        reader.join(60)
    assert not [chunk for at, chunk in taken if at > accepted_at]


# -- the gate by itself ------------------------------------------------------------------------------------------------


def waits(gate, epoch):
    """A thread that asks whether a frame passes, and where it puts the answer."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(gate.passes(epoch)), daemon=True)
    thread.start()
    thread.join(0.1)
    return thread, answers


def test_a_frame_waits_while_its_epoch_is_being_asked_about_and_falls_with_it():
    gate = ClientGate()
    gate.begun(1)
    assert gate.passes(1)
    with gate.asking() as epoch:
        thread, answers = waits(gate, 1)
        assert (epoch, answers) == (1, []), "nobody knows yet"
        gate.begun(2)
    thread.join(5)
    assert answers == [False]
    assert gate.passes(2)


def test_after_a_refusal_the_frame_goes_on():
    gate = ClientGate()
    gate.begun(1)
    with suppress(ServerRefused), gate.asking():
        thread, answers = waits(gate, 1)
        raise ServerRefused(422, {})
    thread.join(5)
    assert answers == [True]


def test_without_an_answer_the_epoch_counts_as_revoked():
    gate = ClientGate()
    gate.begun(3)
    with pytest.raises(httpx.ReadTimeout), gate.asking():
        raise httpx.ReadTimeout("no answer")
    assert not gate.passes(3)
    assert gate.passes(4)


def test_one_refusal_does_not_release_what_another_call_is_still_asking_about():
    gate = ClientGate()
    gate.begun(1)
    with gate.asking():
        with pytest.raises(ServerRefused), gate.asking():
            raise ServerRefused(422, {})
        thread, answers = waits(gate, 1)
        assert answers == []
        gate.begun(2)
    thread.join(5)
    assert answers == [False]


def test_a_late_answer_about_an_older_epoch_brings_nothing_back():
    gate = ClientGate()
    gate.begun(5)
    gate.begun(2)
    assert gate.epoch == 5
    assert not gate.passes(4)


@pytest.mark.parametrize(("authority", "outlives"), [("unchanged", True), ("advanced", False), (None, False)])
def test_only_a_refusal_that_says_so_leaves_the_old_stream_alive(authority, outlives):
    chunk = json.dumps({"choices": [], "retire": {"scope": "s", "epoch": 1}})

    def answer(request):
        if "x-retire-supersedes" in request.headers:
            told = {"error": {"message": "no"}} | ({"authority": authority} if authority else {})
            return httpx.Response(500, json=told)
        return httpx.Response(200, headers={"x-retire-epoch": "1"}, content=f"data: {chunk}\n\n" * 3)

    with ScopeClient("http://nowhere", "s") as client:
        client._http = httpx.Client(base_url="http://nowhere", transport=httpx.MockTransport(answer))
        old = client.chat({})
        next(old)
        with pytest.raises(ServerRefused):
            client.supersede({})
        assert len(list(old)) == (2 if outlives else 0)
