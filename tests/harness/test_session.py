"""What a session notices about the server it leaves, with a stand-in that answers what it is told to."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from harness import session
from harness.session import ServerUnsuitable, Session, measuring

NOTHING = {"pinned_blocks": 0, "scoped_requests": 0, "open_transitions": 0, "orphans": 0, "steps_in_flight": 0}


class StandIn(ThreadingHTTPServer):
    """`held`: what /retire/status tells, one after the other, the last for good.  `usage`: the pool's."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.held, self.usage, self.tells_cached = [NOTHING], 0.0, True
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/retire/status":
            held = self.server.held[0]
            del self.server.held[: len(self.server.held) > 1]
            self.say(json.dumps({"seal": {"pins": "abc"}, "engine": held}))
        else:
            self.say(f'# TYPE x\nvllm:kv_cache_usage_perc{{engine="0",model_name="tiny"}} {self.server.usage}\n')

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        usage = {"prompt_tokens_details": {"cached_tokens": 0} if self.server.tells_cached else None}
        self.say(f"data: {json.dumps({'usage': usage})}\n\n" if asked.get("stream") else "{}")

    def say(self, text):
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(session, "REST_S", 0.5)
    server = StandIn()
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_server_that_comes_to_rest_passes(stand_in):
    found = Session(stand_in.url, "tiny")
    before = found.pool_usage()
    stand_in.held = [NOTHING | {"pinned_blocks": 3}, NOTHING]
    found.check_rest(before)
    assert found.checks == {"nothing_left": True, "pool_as_before": True}
    assert found.seal == {"pins": "abc"}


@pytest.mark.parametrize("what", NOTHING)
def test_whatever_the_engine_still_holds_fails(what, stand_in):
    found = Session(stand_in.url, "tiny")
    stand_in.held = [NOTHING | {what: 1}]
    found.check_rest(found.pool_usage())
    assert found.checks == {"nothing_left": False, "pool_as_before": True}


def test_a_block_that_never_came_back_fails(stand_in):
    found = Session(stand_in.url, "tiny")
    before = found.pool_usage()
    stand_in.usage = 0.0027
    found.check_rest(before)
    assert found.checks == {"nothing_left": True, "pool_as_before": False}


def test_one_false_observation_outweighs_every_true_one(stand_in):
    found = Session(stand_in.url, "tiny")
    for holds in (True, False, True):
        assert found.check("equal", holds) is holds
    assert found.checks == {"equal": False}


def test_servers_of_a_kind_have_common_flags_and_their_own(monkeypatch):
    made = []

    class Server:
        def __init__(self, model, flags, env):
            made.append((model, flags, env))

        def close(self):
            made.append("closed")

    monkeypatch.setattr(session, "Server", Server)
    monkeypatch.setattr(session, "start_side_by_side", lambda servers: made.append(len(servers)))
    monkeypatch.setattr(session.models, "resolve", lambda name: f"folder of {name}")
    common = (*session.FLAGS, "--served-model-name", "tiny", "--block-size", "32")
    with session.started("tiny", ("--block-size", "32"), [{"env": {"A": "1"}}, {"env": {}, "flags": ("--x", "2")}]):
        pass
    assert made == [
        ("folder of tiny", common, {"A": "1"}),
        ("folder of tiny", (*common, "--x", "2"), {}),
        2,
        *["closed"] * 2,
    ]


def test_a_running_server_is_measured_as_it_is_and_must_be_left_as_it_was_found(stand_in, capsys):
    checks = {}
    with measuring(stand_in.url, "tiny", ("--max-num-batched-tokens", "2048"), checks) as found:
        assert (found.url, found.model, found.seal) == (stand_in.url, "tiny", {"pins": "abc"})
        found.check("equal", True)
        stand_in.held = [NOTHING | {"orphans": 1}]
    assert checks == {"equal": True, "nothing_left": False, "pool_as_before": True}
    assert "--max-num-batched-tokens 2048" in capsys.readouterr().err, "what a server of the bench's own would have had"


def test_a_running_server_must_tell_what_was_cached(stand_in):
    stand_in.tells_cached = False
    with pytest.raises(ServerUnsuitable, match="--enable-prompt-tokens-details"), measuring(stand_in.url, "t", (), {}):
        pytest.fail("measured")
