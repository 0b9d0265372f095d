"""Who gets through the gate, and to what, with API keys configured; the application behind it is a stand-in."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from retire.authority import Authority
from retire.core.types import Contract, TenantId
from retire.server.gate import Gate
from retire.server.service import Service
from retire.server.transitions import now_ns
from retire.settings import Settings
from retire.tenants import DEFAULT, Registry, Tenant, asking

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


# -- a refusal after authority has moved -------------------------------------------------------------------------------

SUCCESSOR = json.dumps({"model": "tiny", "prompt": [1], "max_tokens": 1}).encode()


class Connection:
    """As much of uvicorn's end of a request as a scoped response leans on.  `arrives`: called before the body comes."""

    disconnected = False

    def __init__(self, headers, body, arrives):
        self.flow = SimpleNamespace(write_paused=False)
        self.transport = SimpleNamespace(set_write_buffer_limits=lambda **_: None, get_extra_info=lambda _: None)
        self.scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        self.body, self.arrives, self.sent = body, arrives, []

    async def receive(self):
        if self.body is None:
            await asyncio.Event().wait()
        self.arrives()
        message, self.body = {"type": "http.request", "body": self.body, "more_body": False}, None
        return message

    async def send(self, message):
        self.sent.append(message)


@pytest.fixture
def scoped(tmp_path):
    """Sends a request of scope `s`, which is known, to a gate with real authority and no engine.

    `overtaken`: when somebody else supersedes the scope: before the "body" comes, or before the "response" starts.
    Gives status, headers and error.
    """

    async def one(supersedes, body, overtaken):
        with Authority.open(tmp_path, scopes_per_tenant=4, rows_per_tenant=8) as authority:

            async def call_engine(_name, event):
                if event["kind"] == "advanced":
                    service.transitions.get(DEFAULT, event["transition"]).fenced.set()

            registry = Registry.single()
            service = Service(authority, Settings(tmp_path), registry, call_engine, lambda: False, lambda _: True)
            authority.resolve(DEFAULT, "s")

            def overtake():
                service.supersede(DEFAULT, "s", "*", Contract(), successor_follows=False, entered_ns=now_ns())

            async def behind(_scope, receive, _send):
                assert (await receive())["type"] == "http.request"
                overtake()
                assert (await receive())["type"] == "http.disconnect"

            named = {"x-retire-scope": "s", **({"x-retire-supersedes": supersedes} if supersedes else {})}
            pairs = [(name.encode(), value.encode()) for name, value in named.items()]
            connection = Connection(pairs, body, overtake if overtaken == "body" else lambda: None)
            await Gate(behind, lambda: service, lambda: registry, no_cors)(
                connection.scope, connection.receive, connection.send
            )
            start, answer = connection.sent
            latest = service.transitions.of_scope(DEFAULT, "s")
            headers = {name.decode(): value.decode() for name, value in start["headers"]}
            located = headers.get("location", "").removeprefix("/transitions/")
            made = service.transitions.get(DEFAULT, located)
            while service._tasks:
                await asyncio.gather(*service._tasks)
            return SimpleNamespace(
                status=start["status"], headers=headers, told=json.loads(answer["body"]), made=made, latest=latest
            )

    return lambda supersedes=None, body=SUCCESSOR, overtaken=None: asyncio.run(one(supersedes, body, overtaken))


@pytest.mark.parametrize("overtaken", ["body", "response"])
def test_a_successor_that_is_superseded_before_it_answers_is_told_where_its_own_transition_is(scoped, overtaken):
    found = scoped("1", overtaken=overtaken)
    assert (found.status, found.told["authority"]) == (410, "advanced")
    assert found.headers["x-retire-epoch"] == "2"
    assert (found.made.old_epoch, found.made.new_epoch, found.latest.new_epoch) == (1, 2, 3)


def test_a_successor_that_is_refused_after_authority_moved_is_told_where_its_transition_is(scoped):
    found = scoped("1", body=b"{")
    assert (found.status, found.headers["x-retire-authority"]) == (400, "advanced")
    assert found.made is found.latest


def test_who_moved_nothing_is_told_of_no_transition(scoped):
    found = scoped(overtaken="response")
    assert (found.status, found.headers["x-retire-authority"]) == (410, "unchanged")
    assert found.headers["x-retire-epoch"] == "2", "the version that is current now"
    assert "location" not in found.headers
    assert scoped("7").headers.keys() & {"location", "x-retire-authority"} == {"x-retire-authority"}
