"""Malformed, contradictory, forged and hostile input: refused by name, authority told truly, the engine unharmed."""

from __future__ import annotations

import json

import pytest

from tests.server.wire import (
    CHAT,
    COMPLETIONS,
    MODEL,
    SOON,
    SUPERSEDE,
    Raw,
    at_epoch_1,
    chat,
    cpu_s,
    epoch_of,
    http,
    long_prompt,
    record,
    refused,
    scope_info,
    scope_path,
    supersede,
    work_a_while,
)

pytestmark = pytest.mark.engine
JSON = {"Content-Type": "application/json"}
LONE = "\ud800"  # half of a surrogate pair: legal in JSON's escapes, no character


@pytest.fixture
def known(server, scope):
    """A scope at epoch 1 that must be there, at epoch 1, when the test is over, with an engine that still answers."""
    at_epoch_1(server.url, scope)
    yield scope
    assert epoch_of(server.url, scope) == 1, "a refused request has moved authority"
    work_a_while(server.url, 2)


def join(server, headers, body=None, path=CHAT):
    """An ordinary request with these headers."""
    given = headers.items() if isinstance(headers, dict) else headers
    raw = [tuple(v.encode("utf-8") if isinstance(v, str) else v for v in pair) for pair in given]
    return http.post(server.url + path, json=chat(1) if body is None else body, headers=raw)


# -- POST /supersede ---------------------------------------------------------------------------------------------------

EPOCHS = [0, -1, 1.5, 1.0, "1", True, None, 2**64, 10**400, [1], {}, "**", ""]
SCOPES = ["", "x" * 257, "a\nb", "a\x00b", "\x1f", "\x7f", "\x85", LONE, 7, None, ["a"], {}]
SUCCESSOR = {"messages": [{"role": "user", "content": "x"}], "model": MODEL, "max_tokens": 1}

MALFORMED = {
    "nothing": b"",
    "no JSON": b"{",
    "no object": b"[]",
    "a number": b"1",
    "null": b"null",
    "invalid UTF-8": b'{"scope": "\xff", "expected_epoch": 1}',
    "NaN for an epoch": b'{"scope": "s", "expected_epoch": NaN}',
    "endless nesting": b"[" * 100_000,
    "nested just below the interpreter's limit": b'{"scope":' + b'{"a":' * 970 + b"1" + b"}" * 970 + b"}",
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_a_body_that_is_no_supersede_is_400(server, known, body):
    refused(http.post(server.url + SUPERSEDE, content=body, headers=JSON), 400)


@pytest.mark.parametrize("epoch", EPOCHS, ids=lambda v: repr(v)[:12])
def test_what_is_no_epoch_is_400(server, known, epoch):
    refused(supersede(server.url, known, epoch), 400)


@pytest.mark.parametrize("name", SCOPES, ids=lambda value: ascii(value)[:12])
def test_what_is_no_scope_is_400(server, known, name):
    refused(supersede(server.url, name, 1), 400)
    refused(supersede(server.url, name, 1, successor={"body": SUCCESSOR}), 400)


FIELDS = {
    "an unknown field": ({"epoch": 1}, "epoch"),
    "an unknown field of the contract": ({"contract": {"inherits": "none"}}, "contract.inherits"),
    "an unknown way to inherit": ({"contract": {"inherit": "all"}}, "contract.inherit"),
    "an unknown equivalence": ({"contract": {"equivalence": "roughly"}}, "contract.equivalence"),
    "an unknown tier": ({"contract": {"retain": {"tier": "tape"}}}, "contract.retain.tier"),
    "a contract that is none": ({"contract": "inherit"}, "contract"),
    "no prefix to keep": ({"contract": {"keep_prefix": 0}}, "contract.keep_prefix"),
    "half a token to keep": ({"contract": {"keep_prefix": 1.5}}, "contract.keep_prefix"),
    "more to keep than a word holds": ({"contract": {"keep_prefix": 2**64}}, "contract.keep_prefix"),
    "a deadline in the past": ({"contract": {"deadline_ms": -1}}, "contract.deadline_ms"),
    "a deadline that a word does not hold": ({"contract": {"deadline_ms": 2**64}}, "contract.deadline_ms"),
    "no time to retain": ({"contract": {"retain": {"ttl_s": 0}}}, "contract.retain.ttl_s"),
    "time that is text": ({"contract": {"retain": {"ttl_s": "long"}}}, "contract.retain.ttl_s"),
    "a reason that is none": ({"reason": 5}, "reason"),
    "a long reason": ({"reason": "x" * 257}, "reason"),
    "a successor that is none": ({"successor": "later"}, "successor"),
    "a successor without a body": ({"successor": {"endpoint": CHAT}}, "successor.body"),
    "an endpoint without a gate": ({"successor": {"endpoint": "/v1/embeddings", "body": {}}}, "successor.endpoint"),
    "a successor without messages": ({"successor": {"body": {"model": MODEL}}}, "successor.body.messages"),
    "temperature as text": ({"successor": {"body": {**SUCCESSOR, "temperature": "hot"}}}, "successor.body.temperature"),
}


@pytest.mark.parametrize(("more", "param"), FIELDS.values(), ids=FIELDS)
def test_a_malformed_field_is_400_by_name_and_changes_nothing(server, known, more, param):
    error = refused(supersede(server.url, known, 1, **more), 400)
    assert error["param"] == param
    assert param.rpartition(".")[2] in error["message"]


@pytest.mark.parametrize("ttl", ["1e400", "Infinity", "NaN", "-Infinity"])
def test_time_to_retain_is_a_finite_number(server, known, ttl):
    body = f'{{"scope": "{known}", "expected_epoch": 1, "contract": {{"retain": {{"ttl_s": {ttl}}}}}}}'
    answer = http.post(server.url + SUPERSEDE, content=body, headers=JSON)
    assert answer.status_code in (400, 422)
    refused(answer, answer.status_code)


def test_a_field_whose_name_is_no_text_is_400(server, known):
    body = f'{{"scope": "{known}", "expected_epoch": 1, "\\ud800": 1}}'
    refused(http.post(server.url + SUPERSEDE, content=body, headers=JSON), 400)


@pytest.mark.parametrize("missing", ["scope", "expected_epoch"])
def test_a_missing_field_is_400_by_name(server, known, missing):
    body = {"scope": known, "expected_epoch": 1}
    del body[missing]
    assert refused(http.post(server.url + SUPERSEDE, json=body), 400)["param"] == missing


@pytest.mark.parametrize("model", ["nobody", LONE, "tiny/../tiny"], ids=ascii)
def test_a_successor_for_an_unknown_model_is_404_and_changes_nothing(server, known, model):
    body = json.dumps({"scope": known, "expected_epoch": 1, "successor": {"body": {**SUCCESSOR, "model": model}}})
    answer = http.post(server.url + SUPERSEDE, content=body, headers=JSON)
    refused(answer, 404 if model != LONE else answer.status_code)
    assert answer.status_code in (400, 404)


def test_a_successor_nested_too_deep_is_refused_before_authority_moves(server, scope):
    successor = json.dumps(SUCCESSOR)[:-1]
    for depth in range(960, 985, 2):  # around the interpreter's limit, which parser and encoder reach differently
        at = f"{scope}-{depth}"
        at_epoch_1(server.url, at)
        nested = '{"a":' * depth + "1" + "}" * depth
        body = f'{{"scope": "{at}", "expected_epoch": 1, "successor": {{"body": {successor}, "metadata": {nested}}}}}}}'
        answer = http.post(server.url + SUPERSEDE, content=body, headers=JSON)
        if answer.status_code == 200:
            assert epoch_of(server.url, at) == 2
        else:
            refused(answer, 400)
            assert epoch_of(server.url, at) == 1


@pytest.mark.parametrize("xargs", [{"retire_scope": "other"}, {"retire_epoch": 9}, {"retire_ticket": [1, 2, 3, 4, 5]}])
def test_a_successor_that_names_another_scope_or_a_ticket_is_400(server, known, xargs):
    refused(supersede(server.url, known, 1, successor={"body": chat(1, vllm_xargs=xargs)}), 400)


def test_a_scope_header_that_disagrees_with_the_body_of_a_supersede_is_400(server, known):
    refused(supersede(server.url, known, 1, {"X-Retire-Scope": "other"}), 400)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_supersede_that_a_foreign_web_page_could_send_unasked_is_refused(server, known, kind):
    answer = supersede(server.url, known, 1, {"Content-Type": kind})
    assert answer.status_code in (400, 415)
    refused(answer, answer.status_code)


UNSUPPORTED = {
    "beam search": {"use_beam_search": True},
    "prompt logprobs": {"prompt_logprobs": 3},
    "prompt logprobs of the prompt's own tokens": {"prompt_logprobs": 0},
    "all prompt logprobs": {"prompt_logprobs": -1},
    "another engine's KV": {"kv_transfer_params": {"do_remote_prefill": True}},
}


@pytest.mark.parametrize("more", UNSUPPORTED.values(), ids=UNSUPPORTED)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_no_ticket_can_follow_is_422_with_a_scope(server, known, path, more):
    body = {**(chat(1) if path == CHAT else {"model": MODEL, "prompt": "x", "max_tokens": 1}), **more}
    (field,) = more
    assert refused(join(server, {"X-Retire-Scope": known}, body, path), 422)["param"] == field
    successor = {"endpoint": path, "body": body}
    assert refused(supersede(server.url, known, 1, successor=successor), 422)["param"] == field


def test_echoed_prompt_logprobs_are_422_with_a_scope(server, known):
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "echo": True, "logprobs": 0}
    assert refused(join(server, {"X-Retire-Scope": known}, body, COMPLETIONS), 422)["param"] == "echo"


# -- joining -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "x" * 257, "a\tb", "\x85"], ids=ascii)
def test_a_header_that_holds_no_scope_is_400(server, known, name):
    refused(join(server, {"X-Retire-Scope": name}), 400)


@pytest.mark.parametrize("header", ["X-Retire-Epoch", "X-Retire-Supersedes"])
@pytest.mark.parametrize(
    "value",
    ["0", "-1", "1.5", "+1", "0x1", "1e3", "one", "", "²", "１", str(2**64), "9" * 5000, "1 1"],
    ids=lambda v: ascii(v)[:24],
)
def test_a_header_that_holds_no_epoch_is_400(server, known, header, value):
    refused(join(server, {"X-Retire-Scope": known, header: value}), 400)


def test_star_is_no_epoch_to_join(server, known):
    refused(join(server, {"X-Retire-Scope": known, "X-Retire-Epoch": "*"}), 400)


@pytest.mark.parametrize(
    "name", ["X-Retire-Scope", "X-Retire-Epoch", "X-Retire-Supersedes", "X-Retire-Contract", "X-Retire-Reason"]
)
def test_one_of_our_headers_given_twice_is_400(server, known, name):
    values = {"X-Retire-Scope": known, "X-Retire-Contract": "{}", "X-Retire-Reason": "r"}
    headers = [("X-Retire-Scope", known), *[(name, values.get(name, "1"))] * (1 if name == "X-Retire-Scope" else 2)]
    refused(join(server, headers), 400)


def test_our_headers_without_a_scope_are_400(server, known):
    refused(join(server, {"X-Retire-Epoch": "1"}), 400)
    refused(join(server, {"X-Retire-Supersedes": "1"}), 400)


def test_an_unknown_header_of_ours_is_400_and_not_ignored(server, known):
    refused(join(server, {"X-Retire-Scope": known, "X-Retire-Supersede": "1"}), 400)


def test_to_join_and_to_supersede_at_once_is_400(server, known):
    refused(join(server, {"X-Retire-Scope": known, "X-Retire-Supersedes": "1", "X-Retire-Epoch": "1"}), 400)


DISAGREEING = {
    "scopes": ({"X-Retire-Scope": "{}"}, {"retire_scope": "other"}),
    "a scope and a number": ({"X-Retire-Scope": "{}"}, {"retire_scope": 1}),
    "epochs": ({"X-Retire-Scope": "{}", "X-Retire-Epoch": "1"}, {"retire_epoch": 2}),
    "an epoch and true": ({"X-Retire-Scope": "{}", "X-Retire-Epoch": "1"}, {"retire_epoch": True}),
    "an epoch and a fraction": ({"X-Retire-Scope": "{}", "X-Retire-Epoch": "1"}, {"retire_epoch": 1.0}),
}


@pytest.mark.parametrize(("headers", "xargs"), DISAGREEING.values(), ids=DISAGREEING)
def test_headers_and_body_that_disagree_are_400(server, known, headers, xargs):
    headers = {name: value.format(known) for name, value in headers.items()}
    refused(join(server, headers, chat(1, vllm_xargs=xargs)), 400)


XARGS = {
    "an epoch without a scope": {"retire_epoch": 1},
    "a scope that is a number": {"retire_scope": 1},
    "a scope that is null": {"retire_scope": None},
    "an empty scope": {"retire_scope": ""},
    "an epoch that is text": {"retire_scope": "{}", "retire_epoch": "1"},
    "an epoch that is true": {"retire_scope": "{}", "retire_epoch": True},
    "an epoch of zero": {"retire_scope": "{}", "retire_epoch": 0},
    "an epoch above every word": {"retire_scope": "{}", "retire_epoch": 2**64},
    "a ticket": {"retire_scope": "{}", "retire_ticket": [1, 2, 3, 4, 5]},
    "a ticket alone": {"retire_ticket": [1, 2, 3, 4, 5]},
    "a tenant": {"retire_scope": "{}", "retire_tenant": "default"},
    "a key that we do not know": {"retire_scope": "{}", "retire_supersedes": 1},
    "a key that is no text": {"retire_scope": "{}", "retire_\ud800": 1},
}


@pytest.mark.parametrize("xargs", XARGS.values(), ids=XARGS)
def test_forged_or_malformed_tags_in_the_body_are_400(server, known, xargs):
    xargs = {key: value.format(known) if isinstance(value, str) else value for key, value in xargs.items()}
    refused(http.post(server.url + CHAT, content=json.dumps(chat(1, vllm_xargs=xargs)), headers=JSON), 400)


@pytest.mark.parametrize("xargs", ["retire_scope", ["retire_scope"], 5], ids=repr)
def test_xargs_that_are_no_object_are_400(server, known, xargs):
    refused(join(server, {"X-Retire-Scope": known}, chat(1, vllm_xargs=xargs)), 400)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_tag_that_hides_from_the_gate_by_its_spelling_is_refused_before_the_engine(server, known, encoding):
    escaped = "retire_scope" if encoding != "utf-8" else "\\u0072etire_scope"
    body = json.dumps(chat(1, vllm_xargs={"KEY": known})).replace("KEY", escaped).encode(encoding)
    answer = http.post(server.url + CHAT, content=body, headers=JSON)
    assert answer.status_code in (400, 422)
    assert "scope" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"model": "\xff"}', b"[" * 100_000], ids=ascii)
def test_a_scoped_body_that_is_no_json_object_is_400(server, known, body):
    headers = {**JSON, "X-Retire-Scope": known}
    refused(http.post(server.url + CHAT, content=body, headers=headers), 400)


def test_nesting_at_the_interpreters_limit_is_never_an_internal_error(server, known):
    for depth in range(960, 985):
        nested = '{"a":' * depth + "1" + "}" * depth
        body = json.dumps(chat(1))[:-1] + f', "metadata": {nested}}}'
        answer = http.post(server.url + CHAT, content=body, headers={**JSON, "X-Retire-Scope": known})
        assert answer.status_code in (200, 400), f"depth {depth}: {answer.status_code} {answer.text[:100]}"


def test_a_huge_number_of_choices_is_refused_and_costs_no_more_than_a_small_one(server, known):
    def cost_s(count):
        before = cpu_s([server.pid])
        for _ in range(3):
            refused(join(server, {"X-Retire-Scope": known}, chat(1, n=count)), 400)
            assert http.get(server.url + "/health").status_code == 200
        return cpu_s([server.pid]) - before

    assert cost_s(10**6) < 0.5 + 10 * cost_s(20_000)


@pytest.mark.parametrize("stream", [1, "true", "yes"], ids=repr)
def test_a_stream_asked_for_in_another_spelling_is_refused_or_counted_like_any_other(server, scope, stream):
    answer = join(server, {"X-Retire-Scope": scope}, chat(3, stream=stream))
    if answer.status_code != 200:
        refused(answer, 400)
        return
    location = supersede(server.url, scope, 1, successor={"body": chat(1)}).headers["location"]
    (published,) = record(server.url, location)["published"]
    assert published["choices"][0]["tokens"] == 3


# -- what moved is told ------------------------------------------------------------------------------------------------

TOO_LONG = {"model": MODEL, "prompt": long_prompt(1, 8300), "max_tokens": 1}


def test_a_successor_over_the_context_length_says_truly_whether_authority_moved(server, scope):
    at_epoch_1(server.url, scope)
    answer = supersede(server.url, scope, 1, contract=SOON, successor={"endpoint": COMPLETIONS, "body": TOO_LONG})
    moved = epoch_of(server.url, scope) == 2
    refused(answer, 400, "advanced" if moved else "unchanged")
    assert answer.headers["x-retire-authority"] == ("advanced" if moved else "unchanged")
    assert http.post(server.url + CHAT, json=chat(1), headers={"X-Retire-Scope": scope}).status_code == 200


ADVANCED = {
    "no JSON": b"{",
    "an unknown model": json.dumps({**chat(1), "model": "nobody"}).encode(),
    "no messages": json.dumps({"model": MODEL}).encode(),
    "beam search": json.dumps(chat(1, use_beam_search=True)).encode(),
    "another scope": json.dumps(chat(1, vllm_xargs={"retire_scope": "other"})).encode(),
}


@pytest.mark.parametrize("body", ADVANCED.values(), ids=ADVANCED)
def test_a_header_supersede_moves_authority_before_its_body_is_read_and_says_so(server, scope, body):
    at_epoch_1(server.url, scope)
    headers = {**JSON, "X-Retire-Scope": scope, "X-Retire-Supersedes": "1", "X-Retire-Contract": json.dumps(SOON)}
    answer = http.post(server.url + CHAT, content=body, headers=headers)
    refused(answer, answer.status_code, "advanced")
    assert 400 <= answer.status_code < 500
    assert answer.headers["x-retire-authority"] == "advanced"
    assert answer.headers["x-retire-epoch"] == "2"
    assert http.get(server.url + answer.headers["location"]).json()["new_epoch"] == 2
    assert epoch_of(server.url, scope) == 2


@pytest.mark.parametrize(
    "contract", ["{", "[]", '{"inherit": "all"}', '{"equivalence": "bitwise"}', '{"retain": {"ttl_s": 1e400}}', "ä"]
)
def test_a_bad_contract_header_is_refused_before_authority_moves(server, known, contract):
    answer = join(server, {"X-Retire-Scope": known, "X-Retire-Supersedes": "1", "X-Retire-Contract": contract})
    assert answer.status_code in (400, 422)
    refused(answer, answer.status_code)


def test_a_long_reason_in_a_header_is_refused_as_it_is_in_a_body(server, known):
    refused(join(server, {"X-Retire-Scope": known, "X-Retire-Supersedes": "1", "X-Retire-Reason": "x" * 257}), 400)


@pytest.mark.parametrize("key", ["", "k" * 257])
def test_an_idempotency_key_has_1_to_256_characters(server, known, key):
    refused(supersede(server.url, known, 1, {"Idempotency-Key": key}), 400)


# -- routes that cannot carry a scope ----------------------------------------------------------------------------------

UNGATED = {
    "/v1/embeddings": {"model": MODEL, "input": "x"},
    "/v1/responses": {"model": MODEL, "input": "x", "max_output_tokens": 1},
    "/v1/messages": {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
    "/v1/chat/completions/batch": {**chat(1), "messages": [chat(1)["messages"]]},
    "/invocations": chat(1),
    "/tokenize": {"model": MODEL, "prompt": "x"},
    "/detokenize": {"model": MODEL, "tokens": [1]},
    "/generative_scoring": {"model": MODEL},
    "/nowhere": {},
}


@pytest.mark.parametrize(("path", "body"), UNGATED.items(), ids=UNGATED)
def test_a_scope_header_on_a_route_without_a_gate_is_422(server, known, path, body):
    refused(join(server, {"X-Retire-Scope": known}, body, path), 422)
    refused(join(server, {"X-Retire-Scope": known, "X-Retire-Supersedes": "1"}, body, path), 422)


@pytest.mark.parametrize("path", ["/v1/responses", "/invocations", "/v1/chat/completions/batch"])
def test_a_scope_in_the_body_of_a_route_without_a_gate_is_422(server, known, path):
    for forged in ({"retire_scope": known}, {"retire_scope": known, "retire_ticket": [1, 0, 1, 0, 1]}):
        answer = http.post(server.url + path, json={**UNGATED[path], "vllm_xargs": forged})
        assert answer.status_code == 422, answer.text
        assert answer.json()["error"]["param"] == "vllm_xargs"
    assert scope_info(server.url, known)["live_requests"] == 0


def test_a_scope_header_on_a_websocket_is_refused(server, known):
    with Raw(server.url) as raw:
        raw.request(
            "GET",
            "/v1/realtime",
            headers=[
                "Connection: Upgrade",
                "Upgrade: websocket",
                "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
                "Sec-WebSocket-Version: 13",
                f"X-Retire-Scope: {known}",
            ],
        )
        assert int(raw.read_until(b"\r\n").split()[1]) in (403, 404, 422)


# -- names that are unusual and fine -----------------------------------------------------------------------------------

NAMES = [
    "plän-日本-🙂",
    "a/b",
    "a/pause",
    "x/",
    "/x",
    "..",
    "%2F",
    "a?b#c",
    "a b",
    "scope: 1",
    "'\"<>&\\",
    "x" * 256,
    "*",
]


@pytest.mark.parametrize("name", NAMES, ids=lambda v: ascii(v)[:24])
def test_an_unusual_scope_works_through_headers_body_and_path(server, scope, name):
    name = f"{name}{scope}"[-256:] if len(name) < 256 else name[: -len(scope)] + scope
    by_header = join(server, {"X-Retire-Scope": name})
    assert by_header.json()["retire"] == {"scope": name, "epoch": 1}
    assert by_header.headers["x-retire-scope"].encode(by_header.headers.encoding).decode("utf-8") == name
    by_body = http.post(server.url + CHAT, json=chat(1, vllm_xargs={"retire_scope": name}))
    assert by_body.json()["retire"] == {"scope": name, "epoch": 1}
    assert supersede(server.url, name, 1, successor={"body": chat(1)}).json()["retire"] == {"scope": name, "epoch": 2}
    assert scope_info(server.url, name)["epoch"] == 2
    for word, paused in (("pause", True), ("continue", False)):
        told = http.post(f"{server.url}{scope_path(name)}/{word}").json()
        assert (told["scope"], told["paused"]) == (name, paused)
    assert http.delete(server.url + scope_path(name)).json()["scope"] == name


def test_a_scope_name_given_in_latin_1_is_understood(server, scope):
    answer = join(server, [("X-Retire-Scope", f"plän-{scope}".encode("latin-1"))])
    assert answer.json()["retire"]["scope"] == f"plän-{scope}"


def test_a_scope_path_that_is_no_utf_8_finds_nothing(server, known):
    for path in ("/scopes/%ff", "/scopes/%zz", "/scopes/%00", "/scopes/", f"/scopes/{'x' * 257}"):
        answer = http.get(server.url + path)
        assert answer.status_code in (400, 404), path
        refused(answer, answer.status_code)
