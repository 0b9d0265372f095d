"""The runtime's own client: one scope, one number, and a gate of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from harness.client import http
from harness.server import Server
from retire.client import ScopeClient, ServerRefused
from retire.core.errors import EpochConflict, EpochRevoked

LONG = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me more."}],
    "max_tokens": 4000,
    "ignore_eos": True,
}
SHORT = {**LONG, "max_tokens": 4}


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
