"""Who gets through the gate, and to what, with API keys configured; the application behind it is a stand-in."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import pytest

from retire.core.types import TenantId
from retire.server.gate import Gate
from retire.tenants import Registry, Tenant, asking

KEY = "sk-right"
ONE = Registry.single([KEY, "sk-other"])
TWO = Registry(
    [Tenant(TenantId(name), frozenset([hashlib.sha256(f"sk-{name}".encode()).digest()])) for name in ("acme", "beta")],
    path=Path("tenants.toml"),
)
BODY = json.dumps({"scope": "s", "expected_epoch": 1}).encode()


class Behind:
    """The application behind the gate: remembers who reached it."""

    def __init__(self):
        self.reached = []

    async def __call__(self, scope, _receive, send):
        self.reached.append((scope["type"], scope.get("path"), asking.get()))
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})


def untouchable():
    raise AssertionError("authority must not be looked at")


def no_cors(app):
    return app


def through(method, path, headers=(), body=b"", *, kind="http", root_path="", tenants=ONE):
    """Send one request at a gate with a key; gives what came back and who was reached."""
    behind, sent = Behind(), []
    gate = Gate(behind, untouchable, lambda: tenants, no_cors)
    incoming = [{"type": "http.request" if kind == "http" else "websocket.connect", "body": body, "more_body": False}]

    async def receive():
        return incoming.pop()

    async def send(message):
        sent.append(message)

    pairs = [(name.lower().encode(), value.encode()) for name, value in headers]
    scope = {"type": kind, "method": method, "path": root_path + path, "root_path": root_path, "headers": pairs}
    asyncio.run(gate(scope, receive, send))
    return sent, behind.reached


def bearer(key=KEY, scheme="Bearer"):
    return ("Authorization", f"{scheme} {key}")


PROTECTED = {
    "a supersede": ("POST", "/supersede", [], BODY),
    "the list of scopes": ("GET", "/scopes", [], b""),
    "a cancellation": ("DELETE", "/scopes/s", [], b""),
    "a pause": ("POST", "/scopes/s/pause", [], b""),
    "a record": ("GET", "/transitions/1", [], b""),
    "the status": ("GET", "/retire/status", [], b""),
    "a scoped chat": ("POST", "/v1/chat/completions", [("X-Retire-Scope", "s")], b"{}"),
    "a superseding chat": ("POST", "/v1/completions", [("X-Retire-Scope", "s"), ("X-Retire-Supersedes", "1")], b"{}"),
    "a scope in the body": ("POST", "/v1/chat/completions", [], b'{"vllm_xargs": {"retire_scope": "s"}}'),
}
STRANGERS = {
    "nobody": [],
    "a wrong key": [bearer("sk-wrong")],
    "a longer key": [bearer(KEY + "x")],
    "a shorter key": [bearer(KEY[:-1])],
    "an empty key": [bearer("")],
    "another scheme": [bearer(scheme="Basic")],
    "the bare key": [("Authorization", KEY)],
}


@pytest.mark.parametrize(("method", "path", "headers", "body"), PROTECTED.values(), ids=PROTECTED)
@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_gets_401_and_reaches_nothing(method, path, headers, body, stranger):
    (start, answer), reached = through(method, path, [*headers, *stranger], body)
    assert start["status"] == 401
    told = json.loads(answer["body"])
    assert (told["error"]["type"], told["authority"]) == ("AuthenticationError", "unchanged")
    assert KEY not in answer["body"].decode()
    assert not reached


@pytest.mark.parametrize("key", [KEY, "sk-other"])
@pytest.mark.parametrize("root_path", ["", "/behind/a/proxy"])
def test_a_known_key_reaches_our_routes_as_its_tenant(key, root_path):
    for path in ("/scopes", "/scopes/s", "/transitions/1", "/retire/status"):
        sent, reached = through("GET", path, [bearer(key)], root_path=root_path)
        assert sent[0]["status"] == 200
        assert reached == [("http", root_path + path, "default")]


def test_what_names_no_scope_is_left_to_vllms_own_authentication():
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/health"), ("POST", "/v1/embeddings")):
        sent, reached = through(method, path, [], b'{"model": "retire_scope"}')
        assert sent[0]["status"] == 200
        assert reached == [("http", path, None)]


@pytest.mark.parametrize("path", ["/supersede", "/scopes/s", "/retire/status"])
def test_a_browsers_preflight_needs_no_key(path):
    headers = [("Origin", "http://page"), ("Access-Control-Request-Method", "POST")]
    sent, reached = through("OPTIONS", path, headers)
    assert sent[0]["status"] == 200
    assert reached


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/responses", "/v1/chat/completions/", "/", "/scope", "/invocations"]
)
def test_a_scope_on_a_route_without_a_gate_never_reaches_it(path):
    (start, answer), reached = through("POST", path, [bearer(), ("X-Retire-Scope", "s")], b"{}")
    assert start["status"] == 422
    assert path in json.loads(answer["body"])["error"]["message"]
    assert not reached


def test_a_scope_on_a_websocket_never_reaches_the_application():
    sent, reached = through("GET", "/v1/realtime", [bearer(), ("X-Retire-Scope", "s")], kind="websocket")
    assert not reached
    assert [message["type"] for message in sent] == ["websocket.close"]
    assert through("GET", "/v1/realtime", kind="websocket")[1], "without a scope it is none of our business"


# -- with a tenants file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/chat/completions", "/invocations", "/tokenize", "/health/", "//v1"]
)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_every_route_asks_for_a_key_and_whoever_has_one_is_known_behind_it(path, kind):
    for headers in ([], [bearer()], [bearer("acme")]):
        sent, reached = through("POST", path, headers, b"{}", kind=kind, tenants=TWO)
        assert sent[0].get("status", sent[0].get("code")) == (401 if kind == "http" else 1008)
        assert not reached
    for name in ("acme", "beta"):
        _, reached = through("POST", path, [bearer(f"sk-{name}")], b"{}", kind=kind, tenants=TWO)
        assert reached == [(kind, path, name)]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/docs"])
def test_what_shows_nothing_of_anybody_needs_no_key_and_is_nobodys(path):
    for headers in ([], [bearer("sk-acme")]):
        assert through("GET", path, headers, tenants=TWO)[1] == [("http", path, None)]


def test_a_request_does_not_take_over_the_tenant_of_the_one_before_it():
    """uvicorn starts the task of a pipelined request within the task of its predecessor."""
    asking.set(TenantId("acme"))
    try:
        assert through("GET", "/health", tenants=TWO)[1] == [("http", "/health", None)]
        assert through("GET", "/v1/models", [bearer("sk-beta")], tenants=TWO)[1] == [("http", "/v1/models", "beta")]
        assert through("POST", "/v1/embeddings")[1] == [("http", "/v1/embeddings", None)]
        assert through("GET", "/v1/realtime", kind="websocket")[1] == [("websocket", "/v1/realtime", None)]
    finally:
        asking.set(None)


def test_a_lifespan_passes():
    assert through("", "", kind="lifespan")[1]
