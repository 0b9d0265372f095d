"""The official OpenAI client, as it is, against a scoped server."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from contextlib import closing, contextmanager, suppress
from urllib.parse import urlsplit

import openai
import pytest

from retire.server.frames import Frames
from tests.server.wire import (
    CHAT,
    COMPLETIONS,
    MODEL,
    at_epoch_1,
    chat,
    epoch_of,
    events,
    eventually,
    http,
    record,
    scope_info,
)

pytestmark = pytest.mark.engine
MESSAGES = [{"role": "user", "content": "hello"}]
LONG = {"max_tokens": 7000, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", _strict_response_validation=True) as client:
        yield client


def ask(client, scope=None, **more):
    """A chat completion through the SDK."""
    headers = {} if scope is None else {"X-Retire-Scope": scope}
    given = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "temperature": 0, **more}
    given["extra_headers"] = {**headers, **more.get("extra_headers", {})}
    return client.chat.completions.create(**given)


def shape(value):
    """The keys of a JSON value, all the way down."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    return [shape(inner) for inner in value] if isinstance(value, list) else None


def said(chunks, index=0):
    """The text of one choice."""
    choices = (choice for chunk in chunks for choice in chunk.choices if choice.index == index)
    return "".join(choice.delta.content or "" for choice in choices)


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
def test_an_unscoped_answer_has_vllms_shape_and_no_trace_of_us(server, plain_server, path, stream):
    body = chat() if path == CHAT else {**chat(), "prompt": "hello"}
    if path == COMPLETIONS:
        del body["messages"]
    ours, native = (http.post(url + path, json={**body, "stream": stream}) for url in (server.url, plain_server.url))
    assert "retire" not in ours.text
    assert set(ours.headers) == set(native.headers)
    if stream:
        assert [shape(chunk) for chunk in parsed(ours)] == [shape(chunk) for chunk in parsed(native)]
    else:
        assert shape(ours.json()) == shape(native.json())
        assert ours.json()["choices"] == native.json()["choices"]
        assert ours.json()["usage"] == native.json()["usage"]


def parsed(answer):
    """The chunks of a streamed answer, read without the SDK."""
    return events(answer.content)


def test_a_scoped_answer_differs_from_an_unscoped_one_by_the_tag_alone(server, scope):
    unscoped = http.post(server.url + CHAT, json=chat())
    scoped = http.post(server.url + CHAT, json=chat(), headers={"X-Retire-Scope": scope})
    tagged = shape(scoped.json())
    assert tagged.pop("retire") == {"scope": None, "epoch": None}
    assert tagged == shape(unscoped.json())
    assert scoped.json()["choices"] == unscoped.json()["choices"]


def test_a_scoped_stream_differs_from_an_unscoped_one_by_the_tag_alone(server, scope):
    body = chat(stream=True)
    unscoped = parsed(http.post(server.url + CHAT, json=body))
    scoped = parsed(http.post(server.url + CHAT, json=body, headers={"X-Retire-Scope": scope}))
    tags = [chunk.pop("retire") for chunk in scoped[:-1]]
    assert tags == [{"scope": scope, "epoch": 1}] * len(tags)
    assert [shape(chunk) for chunk in scoped] == [shape(chunk) for chunk in unscoped]


def test_a_scoped_answer_names_scope_and_epoch_in_headers_and_body(client, scope):
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=5, extra_headers={"X-Retire-Scope": scope}
    )
    assert (raw.headers["x-retire-scope"], raw.headers["x-retire-epoch"]) == (scope, "1")
    answer = raw.parse()
    assert answer.retire == {"scope": scope, "epoch": 1}
    assert answer.usage.completion_tokens == 5


def test_every_chunk_of_a_scoped_stream_names_scope_and_epoch(client, scope):
    with ask(client, scope, stream=True) as stream:
        assert (stream.response.headers["x-retire-scope"], stream.response.headers["x-retire-epoch"]) == (scope, "1")
        chunks = list(stream)
    assert chunks
    assert all(chunk.retire == {"scope": scope, "epoch": 1} for chunk in chunks)
    assert said(chunks) == ask(client).choices[0].message.content


def test_a_scope_can_be_named_in_the_body_alone(client, scope):
    answer = ask(client, extra_body={"vllm_xargs": {"retire_scope": scope}})
    assert answer.retire == {"scope": scope, "epoch": 1}
    again = ask(client, extra_body={"vllm_xargs": {"retire_scope": scope, "retire_epoch": 1}}, stream=True)
    assert {str(chunk.retire) for chunk in again} == {str(answer.retire)}


def test_completions_carry_the_tag_too(client, scope):
    answer = client.completions.create(
        model=MODEL, prompt="hello", max_tokens=3, temperature=0, extra_headers={"X-Retire-Scope": scope}
    )
    assert answer.retire == {"scope": scope, "epoch": 1}


# -- what was asked for, and nothing else ------------------------------------------------------------------------------

USAGE = {
    "nothing": (None, 0, False),
    "null": ({"include_usage": False}, 0, False),
    "a final usage chunk": ({"include_usage": True}, 1, False),
    "running usage": ({"include_usage": True, "continuous_usage_stats": True}, 1, True),
}


@pytest.mark.parametrize(("options", "final", "running"), USAGE.values(), ids=USAGE)
@pytest.mark.parametrize("scoped", [False, True])
def test_usage_comes_exactly_as_it_was_asked_for(client, scope, scoped, options, final, running):
    more = {} if options is None else {"stream_options": options}
    chunks = list(ask(client, scope if scoped else None, stream=True, **more))
    assert sum(1 for chunk in chunks if not chunk.choices) == final
    assert {chunk.usage is not None for chunk in chunks if chunk.choices} == {running}
    if final:
        assert chunks[-1].usage.completion_tokens == 5
    if running:
        assert [chunk.usage.completion_tokens for chunk in chunks if chunk.choices] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_arrive_whole(client, scope, stream):
    answer = ask(client, scope, n=3, temperature=1.0, stream=stream, extra_body={"ignore_eos": True})
    if stream:
        choices = [choice for chunk in answer for choice in chunk.choices]
        assert sorted(choice.index for choice in choices if choice.finish_reason == "length") == [0, 1, 2]
        spoken = [sum(1 for c in choices if c.index == index and c.delta.content) for index in range(3)]
        assert all(spoken)
    else:
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens == 15


def test_logprobs_come_with_the_tokens_that_they_are_about(client, scope):
    plain = ask(client, logprobs=True, top_logprobs=2)
    whole = ask(client, scope, logprobs=True, top_logprobs=2)
    chunks = list(ask(client, scope, logprobs=True, top_logprobs=2, stream=True))
    streamed = [e for c in chunks for choice in c.choices for e in (choice.logprobs and choice.logprobs.content) or []]
    tokens = [entry.token for entry in plain.choices[0].logprobs.content]
    assert [entry.token for entry in whole.choices[0].logprobs.content] == tokens
    assert [entry.token for entry in streamed] == tokens
    assert all(len(entry.top_logprobs) == 2 for entry in streamed)


def test_a_stop_string_ends_a_scoped_stream_as_it_ends_any(client, scope):
    text = ask(client).choices[0].message.content
    stop = text[-4:]
    chunks = list(ask(client, scope, stop=stop, stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert said(chunks) == text[: text.index(stop)]


TOOLS = [{"type": "function", "function": {"name": "rename", "parameters": {"type": "object", "properties": {}}}}]


def test_tools_do_not_disturb_a_scoped_request(client, scope):
    chunks = list(ask(client, scope, tools=TOOLS, tool_choice="none", stream=True))
    assert said(chunks) == ask(client, tools=TOOLS, tool_choice="none").choices[0].message.content


def test_a_tool_choice_that_vllm_refuses_is_refused_in_vllms_words(client, scope):
    with pytest.raises(openai.BadRequestError) as native:
        ask(client, tools=TOOLS, tool_choice="required")
    with pytest.raises(openai.BadRequestError) as ours:
        ask(client, scope, tools=TOOLS, tool_choice="required")
    assert ours.value.body == native.value.body
    assert ours.value.response.json()["authority"] == "unchanged"


def test_a_tool_call_delta_passes_as_it_is():
    frames = Frames({"scope": "s", "epoch": 1}, chat=True, choices=1, model="m", usage=False, running_usage=False)
    call = {"index": 0, "function": {"arguments": '{"naïve": "\\u2028"}'}}
    chunk = {
        "id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m",
        "choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}],
        "usage": {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3},
    }  # fmt: skip
    body, counts = frames.rewrite(f"data: {json.dumps(chunk)}\n\n".encode())
    frames.account(counts)
    passed = json.loads(body.removeprefix(b"data: "))
    assert passed["choices"] == chunk["choices"]
    assert "usage" not in passed
    assert frames.summary() == [{"index": 0, "tokens": 3, "chars": 0}]


@pytest.mark.parametrize("chat", [True, False])
def test_only_choices_that_have_not_finished_get_a_terminal_chunk(chat):
    frames = Frames({"scope": "s", "epoch": 1}, chat=chat, choices=3, model="m", usage=False, running_usage=False)
    frames.account([(0, 4, 9, True), (2, 2, 5, False)])
    *chunks, done = events(frames.ending(superseded_by=2))
    assert done == "[DONE]"
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [1, 2]
    assert [chunk["retire"]["published"] for chunk in chunks] == [{"tokens": 0, "chars": 0}, {"tokens": 2, "chars": 5}]


# -- superseding through the SDK ---------------------------------------------------------------------------------------


def begin(stream, frames=4):
    """Read the first chunks of a stream, with text in them."""
    return list(itertools.islice(stream, frames))


@pytest.mark.parametrize("choices", [1, 3])
def test_a_superseded_stream_ends_with_one_chunk_per_choice_that_strict_models_accept(client, scope, choices):
    old = ask(client, scope, stream=True, n=choices, temperature=1.0, **LONG)
    read = begin(old, 3 * choices)
    new = ask(client, scope, stream=True, extra_headers={"X-Retire-Supersedes": "1"})
    assert new.response.headers["x-retire-epoch"] == "2"
    rest = list(old)  # ends by [DONE], or the SDK would wait on
    final = rest[-choices:]
    assert sorted(chunk.choices[0].index for chunk in final) == list(range(choices))
    for chunk in final:
        assert chunk.choices[0].finish_reason == "length"
        assert chunk.choices[0].delta.content is None
        assert chunk.retire["superseded_by"] == 2
        index, published = chunk.choices[0].index, chunk.retire["published"]
        assert published["chars"] == len(said(read + rest, index)), "what was published is what this client received"
        contents = sum(1 for c in read + rest for choice in c.choices if choice.index == index and choice.delta.content)
        assert 0 < contents <= published["tokens"]
    assert all(chunk.choices[0].finish_reason is None for chunk in read + rest[:-choices])
    assert {chunk.retire["epoch"] for chunk in read + rest} == {1}
    fresh = list(new)
    assert {chunk.retire["epoch"] for chunk in fresh} == {2}
    assert said(fresh) == ask(client).choices[0].message.content


def test_a_superseded_completion_stream_ends_the_same_way(server, scope):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        given = {"model": MODEL, "prompt": ["hello", "good day"], "temperature": 0, **LONG}
        old = client.completions.create(stream=True, extra_headers={"X-Retire-Scope": scope}, **given)
        read = begin(old)
        client.completions.create(
            model=MODEL,
            prompt="hello",
            max_tokens=1,
            extra_headers={"X-Retire-Scope": scope, "X-Retire-Supersedes": "1"},
        )
        rest = list(old)
        for index, chunk in enumerate(rest[-2:]):
            choice = chunk.choices[0]
            assert (choice.index, choice.finish_reason, choice.text) == (index, "length", "")
            text = "".join(c.text for chunk in read + rest for c in chunk.choices if c.index == index)
            assert chunk.retire["published"]["chars"] == len(text)
            assert chunk.retire["superseded_by"] == 2


def test_a_superseded_request_that_does_not_stream_gets_410_and_no_text(client, server, scope):
    failure = []

    def wait_for_it():
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client, scope, **LONG)
        failure.append(caught.value)

    waiting = threading.Thread(target=wait_for_it)
    waiting.start()
    eventually(lambda: epoch_of(server.url, scope) and scope_info(server.url, scope)["live_requests"], "it is running")
    assert ask(client, scope, extra_headers={"X-Retire-Supersedes": "1"}).retire["epoch"] == 2
    waiting.join()
    assert failure[0].status_code == 410
    assert failure[0].body["type"] == "EpochRevokedError"
    assert failure[0].body["current_epoch"] == 2
    assert "choices" not in failure[0].response.text


def test_a_late_request_of_an_old_epoch_gets_410_and_one_ahead_409(client, server, scope):
    at_epoch_1(server.url, scope)
    ask(client, scope, extra_headers={"X-Retire-Supersedes": "1"})
    with pytest.raises(openai.APIStatusError) as old:
        ask(client, scope, extra_headers={"X-Retire-Epoch": "1"})
    assert (old.value.status_code, old.value.body["current_epoch"]) == (410, 2)
    with pytest.raises(openai.ConflictError) as ahead:
        ask(client, scope, extra_headers={"X-Retire-Epoch": "3"})
    assert ahead.value.body["current_epoch"] == 2
    assert ask(client, scope).retire["epoch"] == 2


def test_star_supersedes_whatever_is_current(client, server, scope):
    at_epoch_1(server.url, scope)
    for epoch in (2, 3, 4):
        assert ask(client, scope, extra_headers={"X-Retire-Supersedes": "*"}).retire == {"scope": scope, "epoch": epoch}


def test_the_successors_response_leads_to_the_record_of_its_transition(client, server, scope):
    at_epoch_1(server.url, scope)
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=2,
        extra_headers={"X-Retire-Scope": scope, "X-Retire-Supersedes": "1", "X-Retire-Reason": "user_steering"},
    )
    found = record(server.url, raw.headers["location"])
    assert (found["scope"], found["old_epoch"], found["new_epoch"]) == (scope, 1, 2)
    assert found["reason"] == "user_steering"
    assert found["outcome"] in ("inherited", "cold")


@contextmanager
def counting_proxy(url):
    """A TCP proxy and the bytes that went through it towards the server."""
    address, sent = urlsplit(url), bytearray()
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def pump(source, target, log):
            with suppress(OSError):  # the other direction has closed both
                while data := source.recv(65_536):
                    log += data
                    target.sendall(data)
            source.close()
            target.close()

        def serve():
            while True:
                try:
                    downstream, _ = listener.accept()
                except OSError:
                    return
                upstream = socket.create_connection((address.hostname, address.port))
                threading.Thread(target=pump, args=(downstream, upstream, sent), daemon=True).start()
                threading.Thread(target=pump, args=(upstream, downstream, bytearray()), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", sent
        listener.shutdown(socket.SHUT_RDWR)


def test_a_stale_supersede_with_the_sdks_default_retries_is_one_request_and_one_409(server, scope):
    at_epoch_1(server.url, scope)
    http.post(server.url + "/supersede", json={"scope": scope, "expected_epoch": 1})
    with counting_proxy(server.url) as (url, sent), openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
        assert client.max_retries > 0
        with pytest.raises(openai.ConflictError) as caught:
            ask(client, scope, extra_headers={"X-Retire-Supersedes": "1"})
    assert sent.count(b"POST /v1/chat/completions") == 1
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert caught.value.body["current_epoch"] == 2
    assert caught.value.response.json()["authority"] == "unchanged"
    assert epoch_of(server.url, scope) == 2


def test_the_sdks_streaming_helper_ends_in_order_and_says_that_the_answer_was_cut(client, scope):
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, temperature=0, extra_headers={"X-Retire-Scope": scope}, max_tokens=7000
    ) as old:
        seen = list(itertools.islice(old, 6))
        ask(client, scope, extra_headers={"X-Retire-Supersedes": "1"})
        seen += list(old)
        with pytest.raises(openai.LengthFinishReasonError) as cut:
            old.get_final_completion()
    deltas = [event.delta for event in seen if event.type == "content.delta"]
    assert cut.value.completion.choices[0].message.content == "".join(deltas)
