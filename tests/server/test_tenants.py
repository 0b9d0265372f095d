"""Several tenants on one server: who gets in, what each sees, and that nothing crosses over."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from harness.server import Server
from retire import models
from tests.conftest import SHORT_PINS, TINY_FLAGS, all_failed, all_scopes, bearer, leak_checked, leftovers, served
from tests.server.wire import (
    CHAT,
    COMPLETIONS,
    MODEL,
    SUPERSEDE,
    Raw,
    chat,
    events,
    eventually,
    http,
    long_prompt,
    refused,
    scope_path,
    spelled,
    supersede,
    talking,
)

pytestmark = pytest.mark.engine

ACME, ACME_TOO, BETA, NOBODY, SMALL = "sk-acme-1", "sk-acme-2", "sk-beta", "sk-nobody", "sk-small"
KEYS = (ACME, BETA, NOBODY, SMALL)  # one of each tenant
FILE = f"""
[tenants.acme]
keys = ["{ACME}"]
key_sha256 = ["{hashlib.sha256(ACME_TOO.encode()).hexdigest()}"]
pin_share = 0.5

[tenants.beta]
keys = ["{BETA}"]

[tenants.nobody]
keys = ["{NOBODY}"]
pin_blocks = 0

[tenants.small]
keys = ["{SMALL}"]
scopes = 1
transitions = 1
"""
LONG = {"retain": {"ttl_s": 60}}
RESPONSES = "/v1/responses"
PAGE = "http://page.example"
seeds = itertools.count(time.time_ns() % 10**6)


@pytest.fixture(scope="session")
def tenants_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    path.write_text(FILE)
    env = {**SHORT_PINS, "RETIRE_TENANTS": str(path)}
    flags = (*TINY_FLAGS, "--enable-prompt-tokens-details", "--allowed-origins", json.dumps([PAGE]))
    yield from served("tiny-llama", flags, env=env)


@pytest.fixture
def tenants(tenants_server: Server) -> Iterator[Server]:
    yield from leak_checked(tenants_server, KEYS)


def call(server, method, path, key, body=None, **headers):
    content = None if body is None else json.dumps(body)
    told = {"Content-Type": "application/json", **bearer(key), **headers}
    return http.request(method, server.url + path, content=content, headers=told)


def prompt() -> list[int]:
    """Four blocks and a bit that nobody has prefilled yet."""
    return long_prompt(next(seeds), 150)


def ask(server, key, ids, path=COMPLETIONS, *, text="", **more):
    """One token on the prompt; gives how many of its tokens came from the cache."""
    headers = {name: value for name, value in more.items() if name.startswith("X-")}
    fields = {name: value for name, value in more.items() if name not in headers}
    asked = {
        COMPLETIONS: {"prompt": ids, "max_tokens": 1},
        CHAT: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
        RESPONSES: {"input": text, "max_output_tokens": 1},
        "/v1/messages": {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
    }[path]
    answer = call(server, "POST", path, key, {"model": MODEL, "temperature": 0, **asked, **fields}, **headers)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0


# -- who gets in -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "sk-wrong", ACME + "x", "acme"])
def test_a_stranger_gets_401_on_every_route_but_those_that_show_nothing_of_anybody(tenants, scope, key):
    routes = [
        ("GET", "/v1/models", {}), ("POST", COMPLETIONS, {}), ("POST", CHAT, {}), ("POST", "/tokenize", {}),
        ("POST", "/invocations", {}), ("POST", RESPONSES, {}), ("GET", "/v1/responses/resp_1", {}),
        ("POST", CHAT, {"X-Retire-Scope": scope}), ("POST", SUPERSEDE, {}), ("GET", "/scopes", {}),
        ("DELETE", scope_path(scope), {}), ("GET", "/transitions/1", {}), ("GET", "/retire/status", {}),
        ("GET", "/nowhere", {}),
    ]  # fmt: skip
    body = {"model": MODEL, "prompt": "hello", "messages": [], "scope": scope, "expected_epoch": 1}
    for method, path, headers in routes:
        answer = call(tenants, method, path, key, body if method == "POST" else None, **headers)
        assert refused(answer, 401)["message"] == "Unauthorized", path
    for path in ("/health", "/metrics", "/version", "/openapi.json"):
        assert call(tenants, "GET", path, key).status_code == 200
    assert scope not in {known["scope"] for every in KEYS for known in all_scopes(tenants, every)}


@pytest.mark.parametrize("key", [ACME, ACME_TOO, BETA, NOBODY, SMALL])
def test_every_key_of_the_file_gets_in_to_vllms_routes_as_well(tenants, key):
    assert call(tenants, "GET", "/v1/models", key).json()["data"][0]["id"] == MODEL
    assert call(tenants, "POST", CHAT, key, chat(1)).status_code == 200
    assert call(tenants, "GET", "/retire/status", key).status_code == 200


def test_a_request_behind_another_on_one_connection_is_its_own_tenants(tenants):
    ids = prompt()
    body = {"model": MODEL, "prompt": ids, "max_tokens": 1, "temperature": 0}
    with Raw(tenants.url) as connection:
        for key in (ACME, BETA, ACME, BETA):
            connection.send(spelled("POST", COMPLETIONS, body, [f"authorization: Bearer {key}"]))
        connection.send(spelled("GET", "/scopes", None))
        answers = [connection.response() for _ in range(5)]
    assert [status for status, _, _ in answers] == [200, 200, 200, 200, 401]
    cached = [json.loads(told)["usage"]["prompt_tokens_details"] for _, _, told in answers[:4]]
    assert [(details or {}).get("cached_tokens", 0) > 0 for details in cached] == [False, False, True, True]


def test_what_the_gate_answers_itself_can_be_read_by_a_page_that_vllm_was_told_to_allow(tenants, scope):
    origin = {"Origin": PAGE}
    answers = [
        call(tenants, "GET", "/scopes", None, **origin),
        call(tenants, "POST", SUPERSEDE, BETA, {"scope": scope, "expected_epoch": 7}, **origin),
        call(tenants, "POST", SUPERSEDE, BETA, {"scope": scope, "expected_epoch": 1}, **origin),
        call(tenants, "GET", "/scopes", BETA, **origin),
        call(tenants, "POST", CHAT, BETA, chat(1), **origin, **{"X-Retire-Scope": scope}),
    ]
    assert [answer.status_code for answer in answers] == [401, 409, 200, 200, 200]
    for answer in answers:
        assert answer.headers.get_list("access-control-allow-origin") == [PAGE]
    for others in ({}, {"Origin": "http://other.example"}):
        assert "access-control-allow-origin" not in call(tenants, "GET", "/scopes", None, **others).headers


# -- one tenant, two keys ----------------------------------------------------------------------------------------------


def test_two_keys_of_a_tenant_share_scopes_transitions_and_cache(tenants, scope):
    with talking(tenants.url, scope, Authorization=f"Bearer {ACME}") as old:
        assert call(tenants, "GET", scope_path(scope), ACME_TOO).json()["live_requests"] == 1
        done = supersede(tenants.url, scope, 1, bearer(ACME_TOO), successor={"body": chat(2)})
        assert done.json()["retire"]["epoch"] == 2
        assert old.told().ending["retire"]["superseded_by"] == 2
    for key in (ACME, ACME_TOO):
        assert call(tenants, "GET", done.headers["location"], key).json()["new_epoch"] == 2
    ids = prompt()
    assert [ask(tenants, key, ids) for key in (ACME, ACME_TOO, ACME)] == [0, 128, 128]


# -- nothing of the prefix cache crosses over --------------------------------------------------------------------------


def test_the_same_prompt_of_another_tenant_starts_cold(tenants):
    ids = prompt()
    assert [ask(tenants, key, ids) for key in (ACME, BETA, NOBODY, ACME, BETA, NOBODY)] == [0, 0, 0, 128, 128, 128]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, "/v1/messages"])
def test_that_holds_on_every_route_to_the_engine(tenants, path):
    text = f"{next(seeds)} what would you say to a line that goes on " * 20
    cached = [ask(tenants, key, [], path, text=text) for key in (ACME, BETA, ACME, BETA)]
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) >= 64


def test_streams_and_several_choices_stay_apart_too(tenants):
    ids = prompt()
    body = {"model": MODEL, "prompt": ids, "max_tokens": 1, "n": 2, "stream": True}
    body["stream_options"] = {"include_usage": True}
    for key, expected in ((ACME, 0), (BETA, 0), (ACME, 128)):
        told = call(tenants, "POST", COMPLETIONS, key, body)
        *_, last, _ = events(told.content)
        assert (last["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0) == expected


def test_a_salt_that_two_tenants_share_opens_nothing(tenants):
    ids = prompt()
    assert [ask(tenants, key, ids, cache_salt="ours") for key in (ACME, BETA, ACME, BETA)] == [0, 0, 128, 128]
    assert ask(tenants, ACME, ids) == 0, "a tenant's own salts stay apart as well"


def test_a_scope_is_in_its_tenants_cache_and_in_no_others(tenants, scope):
    ids = prompt()
    inside = {"X-Retire-Scope": scope}
    assert ask(tenants, ACME, ids, **inside) == 0
    assert ask(tenants, BETA, ids, **inside) == 0
    assert ask(tenants, ACME, ids) == 128, "what a tenant computed in a scope serves it outside"
    assert ask(tenants, ACME, ids, **inside) == 128


def test_a_scope_that_must_not_inherit_has_a_cache_of_its_own_within_its_tenants(tenants, scope):
    ids = prompt()
    inside = {"X-Retire-Scope": scope}
    for key in (ACME, BETA):
        assert ask(tenants, key, ids, **inside) == 0
        contract = {"X-Retire-Supersedes": "1", "X-Retire-Contract": '{"inherit": "none"}'}
        assert ask(tenants, key, ids, **inside, **contract) == 0
        assert ask(tenants, key, ids, **inside) == 128
        assert ask(tenants, key, ids) == 128


# -- foreign is unknown ------------------------------------------------------------------------------------------------


def alike(one: httpx.Response, other: httpx.Response, *names: tuple[str, str]) -> None:
    """Two answers that differ in nothing but the names that were asked for."""

    def told(answer: httpx.Response) -> tuple[Any, ...]:
        text = answer.text
        for name, foreign in names:
            text = text.replace(foreign, name)
        headers = {n: v for n, v in answer.headers.items() if n not in ("date", "content-length")}
        return answer.status_code, text, headers

    assert told(one) == told(other)


def test_a_foreign_scope_looks_like_one_that_nobody_has(tenants, scope):
    unknown = scope[:-1] + ("0" if scope[-1] != "0" else "1")
    with talking(tenants.url, scope, Authorization=f"Bearer {ACME}") as stream:
        for method, suffix in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/continue")):
            foreign, never = (call(tenants, method, scope_path(s) + suffix, BETA) for s in (scope, unknown))
            refused(foreign, 404)
            alike(never, foreign, (unknown, scope))
        for expected, status in (("*", 404), (2, 409), (2**64 - 1, 409)):
            foreign, never = (supersede(tenants.url, s, expected, bearer(BETA)) for s in (scope, unknown))
            refused(foreign, status)
            alike(never, foreign, (unknown, scope))
        for epoch in ("2", "7"):
            headers = {"X-Retire-Epoch": epoch}
            foreign, never = (
                call(tenants, "POST", CHAT, BETA, chat(1), **headers, **{"X-Retire-Scope": s}) for s in (scope, unknown)
            )
            refused(foreign, 409)
            alike(never, foreign, (unknown, scope))
        heard = stream.heard()
        eventually(lambda: stream.heard() > heard, "the stream goes on")
        assert call(tenants, "GET", scope_path(scope), ACME).json()["epoch"] == 1
    assert scope not in {known["scope"] for known in all_scopes(tenants, BETA)}


def test_one_name_two_tenants_is_two_scopes(tenants, scope):
    with talking(tenants.url, scope, Authorization=f"Bearer {ACME}") as acmes:
        with talking(tenants.url, scope, Authorization=f"Bearer {BETA}") as betas:
            done = supersede(tenants.url, scope, 1, bearer(BETA), successor={"body": chat(2)})
            assert done.json()["retire"]["epoch"] == 2
            assert betas.told().ending["retire"]["superseded_by"] == 2
        assert call(tenants, "DELETE", scope_path(scope), BETA).json()["cancelled"]
        heard = acmes.heard()
        eventually(lambda: acmes.heard() > heard, "the other tenant's stream goes on")
        told = call(tenants, "GET", scope_path(scope), ACME).json()
        assert (told["epoch"], told["cancelled"], told["live_requests"], told["transition"]) == (1, False, 1, None)


def test_a_foreign_transition_looks_like_one_that_never_was(tenants, scope):
    location = supersede(tenants.url, scope, 1, bearer(ACME)).headers["location"]
    unknown = location[:-8] + "00000000"
    assert call(tenants, "GET", location, ACME).status_code == 200
    foreign, never = (call(tenants, "GET", path, BETA) for path in (location, unknown))
    refused(foreign, 404, "unchanged")
    alike(never, foreign, (unknown.rpartition("/")[2], location.rpartition("/")[2]))


def test_an_idempotency_key_is_its_tenants_own(tenants, scope):
    key = {"Idempotency-Key": f"k-{scope}"}
    acme, beta, again = (supersede(tenants.url, scope, 1, {**bearer(who), **key}) for who in (ACME, BETA, ACME_TOO))
    assert acme.json() == again.json()
    assert acme.json()["id"] != beta.json()["id"]
    assert beta.json()["new_epoch"] == 2
    other = supersede(tenants.url, f"{scope}-2", 1, {**bearer(BETA), "Idempotency-Key": f"k-{scope}"})
    refused(other, 422)


def test_nothing_in_a_body_or_a_header_changes_the_tenant(tenants, scope):
    inside = {"X-Retire-Scope": scope}
    assert call(tenants, "POST", CHAT, ACME, chat(1), **inside).status_code == 200
    for xargs in (
        {"retire_tenant": "acme"},
        {"retire_tenant": "acme", "retire_scope": scope},
        {"retire_ticket": [1] * 5},
    ):
        refused(call(tenants, "POST", CHAT, BETA, chat(1, vllm_xargs=xargs), **inside), 400)
        refused(call(tenants, "POST", CHAT, BETA, chat(1, vllm_xargs=xargs)), 400)
        refused(supersede(tenants.url, scope, 1, bearer(BETA), successor={"body": chat(1, vllm_xargs=xargs)}), 400)
    refused(call(tenants, "POST", CHAT, BETA, chat(1), **inside, **{"X-Retire-Tenant": "acme"}), 400)
    refused(supersede(tenants.url, scope, "*", bearer(BETA), tenant="acme"), 400)
    fields = {"user": "acme", "metadata": {"tenant": "acme"}, "tenant": "acme", "vllm_xargs": {"tenant": "acme"}}
    answer = call(tenants, "POST", CHAT, BETA, chat(1, **fields), **inside, **{"X-Tenant": "acme", "X-Api-Key": ACME})
    assert answer.status_code == 200
    assert call(tenants, "DELETE", scope_path(scope), BETA).json()["epoch"] == 1
    assert not call(tenants, "GET", scope_path(scope), ACME).json()["cancelled"]


# -- what each may look at ---------------------------------------------------------------------------------------------


def test_the_status_shows_a_tenant_nothing_of_another(tenants, scope):
    with talking(tenants.url, scope, Authorization=f"Bearer {ACME}"):
        assert leftovers(tenants, ACME)["scoped_requests"] == 1
        assert leftovers(tenants, ACME_TOO)["scoped_requests"] == 1
        assert not any(leftovers(tenants, BETA).values())
        assert "tenants" not in call(tenants, "GET", "/retire/status", BETA).json()
        location = supersede(tenants.url, scope, 1, bearer(ACME), contract=LONG).headers["location"]
        eventually(lambda: call(tenants, "GET", location, ACME).json()["fenced"], "it is fenced")
        assert leftovers(tenants, ACME)["open_transitions"] == 1
        assert not any(leftovers(tenants, BETA).values())
    call(tenants, "DELETE", scope_path(scope), ACME)


def test_scopes_come_in_pages_by_name(tenants, scope):
    names = [f"{scope}-{number}" for number in range(5)]
    for name in reversed(names):
        call(tenants, "POST", CHAT, NOBODY, chat(1), **{"X-Retire-Scope": name})
    found, after = [], ""
    while after is not None:
        page = call(tenants, "GET", f"/scopes?limit=2&after={after}", NOBODY).json()
        assert len(page["scopes"]) == 2 or page["next"] is None
        found += [known["scope"] for known in page["scopes"]]
        after = page["next"]
    assert [name for name in found if name in names] == names
    assert found == sorted(set(found))
    for limit in ("0", "-1", "1001", "many"):
        refused(call(tenants, "GET", f"/scopes?limit={limit}", NOBODY), 400, None)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_tenant_with_all_its_scopes_in_use_gets_429_and_nobody_else_does(tenants, scope):
    other = f"{scope}-more"
    with talking(tenants.url, scope, Authorization=f"Bearer {SMALL}"):
        for answer in (
            call(tenants, "POST", CHAT, SMALL, chat(1), **{"X-Retire-Scope": other}),
            call(tenants, "POST", CHAT, SMALL, chat(1, vllm_xargs={"retire_scope": other})),
            supersede(tenants.url, other, 1, bearer(SMALL)),
            call(tenants, "POST", CHAT, SMALL, chat(1), **{"X-Retire-Scope": other, "X-Retire-Supersedes": "1"}),
        ):
            assert refused(answer, 429)["type"] == "TenantLimitError"
            assert answer.headers.get("x-should-retry") != "false", "a later try may find room"
        assert call(tenants, "POST", CHAT, SMALL, chat(1), **{"X-Retire-Scope": scope}).status_code == 200
        assert call(tenants, "POST", CHAT, SMALL, chat(1)).status_code == 200
        assert call(tenants, "POST", CHAT, BETA, chat(1), **{"X-Retire-Scope": other}).status_code == 200
    eventually(lambda: call(tenants, "GET", scope_path(scope), SMALL).json()["live_requests"] == 0, "it is over")
    answer = call(tenants, "POST", CHAT, SMALL, chat(1), **{"X-Retire-Scope": other})
    assert answer.json()["retire"]["epoch"] == 1, "authority was unchanged by what was refused"


def test_a_tenant_with_all_its_transitions_open_gets_429_until_one_closes(tenants, scope):
    other = f"{scope}-more"
    first = supersede(tenants.url, scope, 1, {**bearer(SMALL), "Idempotency-Key": scope}, contract=LONG)
    assert first.status_code == 200
    for headers in ({}, {"Idempotency-Key": other}):
        answer = supersede(tenants.url, other, 1, {**bearer(SMALL), **headers}, contract=LONG)
        assert refused(answer, 429)["type"] == "TenantLimitError"
        assert answer.headers.get("x-should-retry") != "false"
    refused(call(tenants, "GET", scope_path(other), SMALL), 404)
    assert supersede(tenants.url, other, 1, bearer(BETA)).status_code == 200
    again = supersede(tenants.url, scope, 1, {**bearer(SMALL), "Idempotency-Key": scope}, contract=LONG)
    assert again.json() == first.json(), "an answer that is given again opens nothing"
    overtaking = supersede(tenants.url, scope, 2, bearer(SMALL), contract=LONG)
    assert overtaking.json()["new_epoch"] == 3, "it takes the place of the scope's own open one"
    call(tenants, "POST", CHAT, SMALL, chat(1), **{"X-Retire-Scope": scope})
    closed(tenants, SMALL, overtaking.headers["location"])
    done = supersede(tenants.url, other, 1, {**bearer(SMALL), "Idempotency-Key": other}, contract=LONG)
    assert done.json()["new_epoch"] == 2
    call(tenants, "DELETE", scope_path(other), SMALL)
    closed(tenants, SMALL, done.headers["location"])


def closed(server, key, location):
    eventually(lambda: call(server, "GET", location, key).json()["closed"], f"{location} is closed")


# -- start-up ----------------------------------------------------------------------------------------------------------


UNTELLABLE = {  # tenants file, flags, environment, what the line has to name
    "malformed": ('[tenants.acme]\nkeys = ["sk"]\npin_share = 2', (), {}, ["acme", "pin_share"]),
    "shared store": (FILE, (), {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}, ["RESPONSES_API_STORE"]),
    "a key of vLLM's": (FILE, ("--api-key", "sk-of-vllm"), {}, ["--api-key"]),
}


@pytest.fixture(scope="module")
def untellable(tmp_path_factory):
    """A server for each."""
    servers = {}
    for name, (file, flags, env, _) in UNTELLABLE.items():
        path = tmp_path_factory.mktemp("untellable") / "tenants.toml"
        path.write_text(file)
        servers[name] = Server(
            models.resolve("tiny-llama"),
            (*TINY_FLAGS, *flags),
            env={**env, "RETIRE_TENANTS": str(path)},
            preforked=True,
        )
    yield from all_failed(servers)


@pytest.mark.slow
@pytest.mark.parametrize("case", UNTELLABLE)
def test_a_server_whose_tenants_cannot_be_told_apart_does_not_come_up(untellable, case):
    server = untellable[case]
    assert server.wait(10) != 0
    (said,) = [line for line in server.log().splitlines() if "retire: " in line]
    assert all(word in said for word in UNTELLABLE[case][3]), said
    assert "sk" not in said.split()
