"""Streams on raw sockets: slow readers, clients that leave, many at once, pipelines, and the end of processes."""

from __future__ import annotations

import json
import os
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.server import Server, ServerFailed
from retire import models
from tests.conftest import TINY_FLAGS
from tests.server.wire import (
    CHAT,
    COMPLETIONS,
    MODEL,
    SOON,
    SPOKE,
    SUPERSEDE,
    Raw,
    at_epoch_1,
    chat,
    content,
    endless,
    epoch_of,
    events,
    eventually,
    http,
    long_prompt,
    record,
    refused,
    scope_info,
    scope_path,
    spelled,
    supersede,
    talking,
    work_a_while,
)

pytestmark = pytest.mark.engine


def streaming(**more):
    """An endless streamed chat completion."""
    return {**endless(), "stream": True, **more}


def dechunked(body):
    """The payload of a chunked body."""
    payload = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        payload, body = payload + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return payload


# -- the last gate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(  # with a large buffer the kernel makes large segments, and more is on its way
    ("receive_buffer", "steps"), [(2304, 500), (8192, 500), (65536, 1500)]
)
def test_a_reader_that_lags_behind_gets_no_old_frame_but_the_stated_backlog(server, scope, receive_buffer, steps):
    backlog = http.get(server.url + "/retire/status").json()["stated_backlog"]
    with Raw(server.url, receive_buffer) as raw:
        raw.request("POST", CHAT, streaming(), [f"X-Retire-Scope: {scope}"])
        raw.wait_for(SPOKE)
        work_a_while(server.url, steps)  # as many for the slow stream, of which it reads none
        answer = supersede(server.url, scope, 1, successor={"body": chat(1)})
        taken = len(raw.received) + raw.unread_in_kernel()  # no server can call these back
        assert answer.status_code == 200
        raw.wait_for(b"\r\n0\r\n\r\n")
        head, _, body = raw.received.partition(b"\r\n\r\n")
    *chunks, done = events(dechunked(body))
    assert done == "[DONE]"
    assert chunks[-1]["retire"]["superseded_by"] == 2
    frames = [line for line in body.split(b"data: ") if SPOKE in line]
    assert len(frames) < steps, "the gate has held frames back"
    largest = max(len(frame) for frame in frames) + 16
    ending = len(body) - body.rindex(b'"superseded_by"') + largest
    late = len(head) + 4 + len(body) - ending - taken
    assert late <= backlog["bytes_in_send_buffer"] + backlog["frames_in_transport"] * largest
    # Exactly: what was published when authority moved is all that ever arrives.
    (published,) = record(server.url, answer.headers["location"])["published"]
    assert published["choices"][0]["chars"] == len(content(chunks)) == chunks[-1]["retire"]["published"]["chars"]
    assert published["choices"][0]["tokens"] >= len(frames)  # vLLM joins the tokens that had to wait


def test_a_reader_that_never_reads_holds_up_neither_its_successor_nor_the_engine(server, scope):
    with Raw(server.url, 2304) as raw:
        raw.request("POST", CHAT, streaming(), [f"X-Retire-Scope: {scope}"])
        raw.wait_for(SPOKE)
        work_a_while(server.url, 250)
        answer = supersede(server.url, scope, 1, successor={"body": chat()})
        assert answer.json()["retire"]["epoch"] == 2
        told = record(server.url, answer.headers["location"])
        assert told["fenced"]
        held = http.get(server.url + "/retire/status").json()["engine"]
        assert held["scoped_requests"] == 0
    eventually(lambda: scope_info(server.url, scope)["live_requests"] == 0, "the connection is gone")


def test_a_reader_that_lags_behind_gets_every_frame_of_a_version_that_stays_current(server, scope):
    body = {**chat(300), "stream": True}
    with Raw(server.url, 2304) as raw:
        raw.request("POST", CHAT, body, [f"X-Retire-Scope: {scope}"])
        raw.wait_for(SPOKE)
        work_a_while(server.url, 250)
        *chunks, done = events(raw.response()[2])
    assert done == "[DONE]"
    assert content(chunks) == http.post(server.url + CHAT, json=chat(300)).json()["choices"][0]["message"]["content"]


# -- clients that leave ------------------------------------------------------------------------------------------------


def nothing_left(server, scope):
    """The scope has no request any more.  What the engine holds is looked at by the fixture."""
    eventually(lambda: scope_info(server.url, scope)["live_requests"] == 0, "no request of the scope is left")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_the_prefill_leaves_nothing_behind(server, scope, stream):
    body = {"model": MODEL, "prompt": long_prompt(41 + stream, 7900), "max_tokens": 200, "stream": stream}
    with Raw(server.url) as raw:
        raw.request("POST", COMPLETIONS, body, [f"X-Retire-Scope: {scope}"])
        eventually(lambda: http.get(server.url + "/retire/status").json()["engine"]["scoped_requests"], "it is there")
    nothing_left(server, scope)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_decode_leaves_nothing_behind(server, scope, stream):
    with Raw(server.url) as raw:
        raw.request("POST", CHAT, streaming(stream=stream), [f"X-Retire-Scope: {scope}"])
        if stream:
            raw.wait_for(SPOKE)
        else:
            eventually(lambda: epoch_of(server.url, scope), "it was admitted")
            work_a_while(server.url, 20)
    nothing_left(server, scope)


@pytest.mark.parametrize("leaver", ["the predecessor", "the successor", "both"])
def test_clients_that_leave_while_superseding_leave_nothing_behind(server, scope, leaver):
    with ExitStack() as stack:
        old, new = (stack.enter_context(Raw(server.url)) for _ in range(2))
        old.request("POST", CHAT, streaming(), [f"X-Retire-Scope: {scope}"])
        old.wait_for(SPOKE)
        successor = {"endpoint": CHAT, "body": streaming()}
        new.request("POST", SUPERSEDE, {"scope": scope, "expected_epoch": 1, "successor": successor})
        if leaver != "the successor":
            old.socket.close()
        if leaver != "the predecessor":
            new.socket.close()
        eventually(lambda: epoch_of(server.url, scope) == 2, "authority has moved")
        if leaver == "the successor":
            assert b'"superseded_by":2' in old.read_until(b"[DONE]")
        if leaver == "the predecessor":
            new.wait_for(SPOKE)
    nothing_left(server, scope)
    assert http.post(server.url + CHAT, json=chat(), headers={"X-Retire-Scope": scope}).json()["retire"]["epoch"] == 2


def test_a_client_that_leaves_before_its_body_has_superseded_all_the_same(server, scope):
    with talking(server.url, scope) as old:
        head = [f"POST {CHAT} HTTP/1.1", "host: test", "content-length: 1000", "content-type: application/json"]
        with Raw(server.url) as raw:
            raw.send(
                "\r\n".join(
                    [
                        *head,
                        f"X-Retire-Scope: {scope}",
                        "X-Retire-Supersedes: 1",
                        f"X-Retire-Contract: {json.dumps(SOON)}",
                        "",
                        "{",
                    ]
                ).encode()
            )
            assert old.told().ending["retire"]["superseded_by"] == 2
    nothing_left(server, scope)
    assert epoch_of(server.url, scope) == 2


def test_a_client_that_leaves_in_the_middle_of_a_pipeline_leaves_nothing_behind(server, scope):
    with Raw(server.url) as raw:
        raw.request("POST", CHAT, streaming(), [f"X-Retire-Scope: {scope}"])
        raw.wait_for(SPOKE)
        raw.request("GET", "/health")
        work_a_while(server.url, 5)
    try:
        nothing_left(server, scope)
    finally:
        http.delete(server.url + scope_path(scope))


# -- connections that live on ------------------------------------------------------------------------------------------


def test_a_connection_is_usable_after_the_terminal_chunk(server, scope):
    with Raw(server.url) as raw:
        raw.request("POST", CHAT, streaming(), [f"X-Retire-Scope: {scope}"])
        raw.wait_for(SPOKE)
        supersede(server.url, scope, 1, successor={"body": chat(1)})
        status, _, body = raw.response()
        assert (status, events(body)[-1]) == (200, "[DONE]")
        raw.request("POST", CHAT, chat(), [f"X-Retire-Scope: {scope}"])
        status, headers, _ = raw.response()
        assert (status, headers["x-retire-epoch"]) == (200, "2")
        raw.request("POST", CHAT, chat())
        assert raw.response()[0] == 200
        raw.request("POST", CHAT, chat(), [f"X-Retire-Scope: {scope}", "X-Retire-Epoch: 1"])
        assert raw.response()[0] == 410
        raw.request("GET", "/health")
        assert raw.response()[0] == 200


def test_pipelined_requests_are_answered_in_order_each_under_its_own_scope(server, scope):
    names = [f"{scope}-{n}" for n in range(4)]
    with Raw(server.url) as raw:
        raw.send(b"".join(spelled("POST", CHAT, chat(2), [f"X-Retire-Scope: {name}"]) for name in names))
        assert [raw.response()[1]["x-retire-scope"] for _ in names] == names


def test_a_pipelined_supersede_waits_for_the_response_before_it(server, scope):
    at_epoch_1(server.url, scope)
    with Raw(server.url) as raw:
        first = spelled("POST", CHAT, chat(3), [f"X-Retire-Scope: {scope}"])
        raw.send(first + spelled("POST", SUPERSEDE, {"scope": scope, "expected_epoch": 1}))
        assert raw.response()[1]["x-retire-epoch"] == "1"
        assert raw.response()[1]["x-retire-epoch"] == "2"


def test_a_body_in_chunks_is_read_like_any_other(server, scope):
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (b'{"scope": "', scope.encode(), b'", '))
    body += b'18\r\n"expected_epoch": 1      }\r\n0\r\n\r\n'.replace(b"18", b"%x" % len(b'"expected_epoch": 1      }'))
    with Raw(server.url) as raw:
        raw.send(
            f"POST {SUPERSEDE} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
            "transfer-encoding: chunked\r\n\r\n".encode()
            + body
        )
        status, headers, _ = raw.response()
    assert (status, headers["x-retire-scope"], headers["x-retire-epoch"]) == (200, scope, "2")


def test_old_http_gets_the_same_stream_and_a_closed_connection(server, scope):
    with Raw(server.url) as raw:
        request = spelled("POST", CHAT, {**chat(3), "stream": True}, [f"X-Retire-Scope: {scope}"])
        raw.send(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert b"[DONE]" in raw.read_to_end()


SMUGGLED = {
    "two lengths": b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
    "length and chunks": b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "unknown coding": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": b"X-Retire-Scope : s\r\ncontent-length: 2\r\n\r\n{}",
    "a folded header": b"X-Retire-Scope: s\r\n t\r\ncontent-length: 2\r\n\r\n{}",
    "a NUL in a header": b"X-Retire-Scope: s\x00t\r\ncontent-length: 2\r\n\r\n{}",
    "a negative length": b"content-length: -2\r\n\r\n{}",
}


@pytest.mark.parametrize("rest", SMUGGLED.values(), ids=SMUGGLED)
@pytest.mark.parametrize("path", [CHAT, SUPERSEDE])
def test_an_ambiguous_request_is_refused_with_its_connection(server, path, rest):
    with Raw(server.url) as raw:
        raw.send(f"POST {path} HTTP/1.1\r\nhost: test\r\n".encode() + rest)
        answer = raw.read_to_end()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE"])
def test_supersede_knows_no_other_method(server, scope, method):
    at_epoch_1(server.url, scope)
    body = {"scope": scope, "expected_epoch": 1}
    assert http.request(method, server.url + SUPERSEDE, json=body).status_code == 405
    assert http.request(method, server.url + CHAT, json=chat(), headers={"X-Retire-Scope": scope}).status_code in (
        405,
        422,
    )
    assert epoch_of(server.url, scope) == 1


def test_a_large_body_is_read_and_refused_without_harm(server, scope):
    at_epoch_1(server.url, scope)
    body = b'{"scope": "' + scope.encode() + b'", "expected_epoch": 1, "reason": "' + b"x" * (32 << 20) + b'"}'
    refused(http.post(server.url + SUPERSEDE, content=body, headers={"Content-Type": "application/json"}), 400)
    assert epoch_of(server.url, scope) == 1


# -- many --------------------------------------------------------------------------------------------------------------


def test_sixty_requests_at_once_all_superseded_leave_a_healthy_server(server, scope):
    scopes = [f"{scope}-{n}" for n in range(60)]
    descriptors = Path(f"/proc/{server.pid}/fd")
    before = len(list(descriptors.iterdir()))
    with ExitStack() as stack:
        raws = [stack.enter_context(Raw(server.url)) for _ in scopes]
        for raw, name in zip(raws, scopes, strict=True):
            raw.request("POST", CHAT, streaming(), [f"X-Retire-Scope: {name}"])
        for raw in raws:
            raw.wait_for(SPOKE)
        with ThreadPoolExecutor(8) as pool:
            successor = {"body": chat(2)}
            answers = list(pool.map(lambda name: supersede(server.url, name, 1, successor=successor), scopes))
        assert [answer.json()["retire"]["epoch"] for answer in answers] == [2] * len(scopes)
        for raw in raws:
            *chunks, done = events(raw.response()[2])
            assert done == "[DONE]"
            assert chunks[-1]["retire"]["superseded_by"] == 2
            assert chunks[-1]["retire"]["published"]["chars"] == len(content(chunks))
    assert http.get(server.url + "/health").status_code == 200
    work_a_while(server.url)
    for answer in answers:
        assert record(server.url, answer.headers["location"])["fenced"]
    eventually(lambda: len(list(descriptors.iterdir())) <= before + 10, "the connections' descriptors are closed")


# -- the end of processes ----------------------------------------------------------------------------------------------


def own_server(state_dir):
    """A server of one's own, whose API process outlives its engine so that it can be asked."""
    env = {"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}
    return Server(models.resolve("tiny-llama"), TINY_FLAGS, env=env, state_dir=state_dir, preforked=True)


@pytest.mark.slow
def test_a_second_server_on_the_same_state_directory_is_refused_in_one_clear_line(tiny_server):
    second = own_server(tiny_server.state_dir)
    try:
        with pytest.raises(ServerFailed):
            second.start()
        said = [line for line in second.log().splitlines() if line.startswith("retire: ")]
        assert len(said) == 1
        assert str(tiny_server.state_dir) in said[0]
        assert f"in use by process {tiny_server.pid}" in said[0]
        assert "Traceback" not in second.log()
    finally:
        second.close()
    assert http.get(tiny_server.url + "/health").status_code == 200


@pytest.fixture(scope="module")
def reborn(tmp_path_factory):
    """A server started again on the state of an earlier one, and what the earlier one was told and answered."""
    state_dir = tmp_path_factory.mktemp("reborn") / "state"
    key = {"Idempotency-Key": uuid.uuid4().hex}
    first = own_server(state_dir)
    try:
        first.start()
        at_epoch_1(first.url, "grown")
        for epoch in range(1, 5):
            supersede(first.url, "grown", epoch)
        at_epoch_1(first.url, "ended")
        http.delete(first.url + "/scopes/ended")
        at_epoch_1(first.url, "keyed")
        answer = supersede(first.url, "keyed", 1, key, reason="before the restart")
    finally:
        first.close()
    second = own_server(state_dir)
    try:
        second.start()
        yield second, key, answer
    finally:
        second.close()


@pytest.mark.slow
def test_a_restarted_server_knows_every_epoch_and_tombstone(reborn):
    server, _, _ = reborn
    assert epoch_of(server.url, "grown") == 5
    late = http.post(server.url + CHAT, json=chat(1), headers={"X-Retire-Scope": "grown", "X-Retire-Epoch": "4"})
    assert refused(late, 410)["current_epoch"] == 5
    assert refused(supersede(server.url, "grown", 4), 409)["current_epoch"] == 5
    assert supersede(server.url, "grown", 5, successor={"body": chat(1)}).json()["retire"]["epoch"] == 6
    refused(http.post(server.url + CHAT, json=chat(1), headers={"X-Retire-Scope": "ended"}), 410)


@pytest.mark.slow
def test_an_idempotency_key_gives_the_same_answer_after_a_restart(reborn):
    server, key, before = reborn
    again = supersede(server.url, "keyed", 1, key, reason="before the restart")
    assert again.status_code == 200
    assert again.json() == before.json()
    assert again.headers["location"] == before.headers["location"]
    refused(supersede(server.url, "keyed", 2, key, reason="before the restart"), 422)
    assert epoch_of(server.url, "keyed") == 2


@pytest.mark.slow
def test_when_the_engine_is_killed_authority_stands_as_the_table_says_and_errors_say_so(reborn):
    server, _, _ = reborn
    at_epoch_1(server.url, "widowed")
    at_epoch_1(server.url, "moved")
    with Raw(server.url) as old, ThreadPoolExecutor(1) as pool:
        old.request("POST", CHAT, streaming(), ["X-Retire-Scope: widowed"])
        old.wait_for(SPOKE)
        moved = pool.submit(supersede, server.url, "moved", 1, successor={"body": endless()})
        eventually(lambda: epoch_of(server.url, "moved") == 2, "the supersede was taken")
        work_a_while(server.url, 5)
        for pid in reversed(server.children()):
            if "VLLM" in Path(f"/proc/{pid}/comm").read_text(encoding="utf-8"):
                os.kill(pid, signal.SIGKILL)
        lost = moved.result()
        refused(lost, 503, "advanced")
        assert lost.headers["x-should-retry"] == "false"
        eventually(lambda: http.get(server.url + "/health").status_code == 503, "the server has noticed")
        assert b'"superseded_by"' not in old.read_to_end_or_done()
    for successor in ({}, {"successor": {"body": chat()}}):
        answer = supersede(server.url, "widowed", 1, **successor)
        refused(answer, 503)
        assert answer.headers["x-retire-authority"] == "unchanged"
        assert answer.headers.get("x-should-retry") != "false", "nothing has moved: trying again elsewhere is fine"
    headers = {"X-Retire-Scope": "widowed", "X-Retire-Supersedes": "1"}
    refused(http.post(server.url + CHAT, json=chat(), headers=headers), 503)
    refused(http.post(server.url + CHAT, json=chat(), headers={"X-Retire-Scope": "widowed"}), 503)
    assert epoch_of(server.url, "widowed") == 1
    assert epoch_of(server.url, "moved") == 2
    nothing_left(server, "widowed")
    assert http.delete(server.url + "/scopes/widowed").json()["cancelled"], "the table needs no engine"
    status = http.get(server.url + "/retire/status")
    assert status.status_code == 503
