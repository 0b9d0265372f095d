"""A server that speaks vLLM's and RETIRE's wire forms and computes nothing, for what drives real ones."""

from __future__ import annotations

import json
import select
import socket
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread

TICK_S = 0.004


def never_started(monkeypatch, bench):
    """The bench's servers are numbers instead; gives what the kinds of each start will have been."""
    asked = []

    @contextmanager
    def side_by_side(_model, _flags, kinds, _checks):
        asked.append(kinds)
        yield [(None, number) for number in range(len(kinds))]

    monkeypatch.setattr(bench, "serving_side_by_side", side_by_side)
    return asked


class StandIn(ThreadingHTTPServer):
    """A token every `TICK_S`.

    `versioned`: whether it knows scopes.  `refuse`: status with which the successor of that number is refused, by
    number.  `slow`: seconds before the response of that version of a scope starts, by number; who is superseded by then
    gets 410.  `breaks`: prompt lengths whose answer is broken off.  `fence_ms`: what records say.  `key`: without which
    nobody is answered.  `length`: tokens of prompt and answer that it takes, if it tells.
    `leaks`: tokens that every superseded version still says.  `closes`: whether transitions ever do.
    """

    daemon_threads = True

    def __init__(
        self,
        *,
        versioned=True,
        refuse=None,
        slow=None,
        breaks=(),
        fence_ms=8.0,
        interval_ms=10.0,
        key=None,
        length=None,
        leaks=0,
        closes=True,
    ):
        super().__init__(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.versioned, self.refuse, self.slow, self.breaks = versioned, refuse or {}, slow or {}, breaks
        self.fence_ms, self.interval_ms, self.key, self.length = fence_ms, interval_ms, key, length
        self.closes, self.records_asked_at = closes, []
        self.leaks, self.spoken, self.published = leaks, Counter(), {}
        self.changed = Condition()
        self.epochs, self.asked, self.hung_up, self.quanta = {}, [], 0, {}

    def start(self):
        Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def close(self):
        self.shutdown()
        self.server_close()

    @property
    def waited_s(self):
        """Between the first and the last question about a transition."""
        return self.records_asked_at[-1] - self.records_asked_at[0]

    def advance(self, scope):
        with self.changed:
            old = self.epochs[scope]
            self.epochs[scope] = new = old + 1
            said = {"index": 0, "tokens": self.spoken[scope, old]}
            self.published[f"/transitions/{scope}-{new}"] = [{"epoch": old, "choices": [said]}]
            return new


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if not self.known():
            self.say({}, 401)
        elif self.path == "/v1/models":
            self.say({"data": [{"id": "made-up", "max_model_len": self.server.length}]})
        elif self.path == "/retire/status" and self.server.versioned:
            self.say({"seal": {"pins": "abc"}, "quanta": self.server.quanta})
        elif self.path.startswith("/transitions/"):
            receipt = {
                "safe_points": 30,
                "obsolete_closed_ms": self.server.fence_ms,
                "longest_interval_ms": self.server.interval_ms,
            }
            stages = {"advance": 0.0, "fence": self.server.fence_ms}
            published = self.server.published[self.path]
            told = {"advance_ms": 0.1, "stages": stages, "receipts": [receipt], "published": published}
            self.server.records_asked_at.append(time.monotonic())
            self.say({"closed": self.server.closes, **told})
        else:
            self.say({}, 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.known():
            self.say({}, 401)
        elif self.path == "/tokenize":
            self.say({"tokens": list(range(5000))})
        elif self.path == "/supersede":
            epoch = self.server.advance(body["scope"])
            self.say({}, 200, {"location": f"/transitions/{body['scope']}-{epoch}"})
        elif not body.get("stream"):
            self.say({"choices": [{"text": "x"}]})
        else:
            self.stream(body)

    def known(self):
        return self.server.key is None or self.headers["authorization"] == f"Bearer {self.server.key}"

    def stream(self, body):
        server, scope = self.server, self.headers["x-retire-scope"]
        admitted = self.admit(scope, body)
        if admitted is None:
            return
        epoch, told = admitted
        if wait_s := server.slow.get(epoch):
            time.sleep(wait_s)
            if server.epochs[scope] != epoch:
                self.refuse_revoked(told, server.epochs[scope])
                return
        self.send_response(200)
        for name, value in {"content-type": "text/event-stream", "connection": "close", **told}.items():
            self.send_header(name, value)
        self.end_headers()
        self.speak(body, scope, epoch)

    def admit(self, scope, body):
        """Its epoch and what its response says of it, or None if it was refused; no scope has neither."""
        server, told = self.server, {}
        with server.changed:
            server.asked.append({"scope": scope, "supersedes": self.headers["x-retire-supersedes"], **body})
            if not scope:
                return None, told
            first = scope not in server.epochs
            epoch = server.epochs.setdefault(scope, 1)
            if self.headers["x-retire-supersedes"] and not first:
                if status := server.refuse.pop(epoch + 1, None):
                    self.say({"error": {"code": status}}, status, {"x-retire-authority": "unchanged"})
                    return None
                epoch = server.advance(scope)
                told["location"] = f"/transitions/{scope}-{epoch}"
            return epoch, {**told, "x-retire-epoch": str(epoch)}

    def speak(self, body, scope, epoch):
        server, leaks = self.server, self.server.leaks
        for token in range(body["max_tokens"]):
            time.sleep(TICK_S)
            if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                server.hung_up += 1
                return
            if len(body["prompt"]) in server.breaks and token == 2:
                return
            likely = {"tokens": ["x"], "token_logprobs": [0.0], "top_logprobs": [{"x": 0.0}]}
            with server.changed:  # the last gate: compare, write, count
                current = not scope or server.epochs[scope] == epoch
                if not current and not leaks:
                    self.event({"choices": [{"text": "", "token_ids": []}], "retire": {"superseded_by": epoch + 1}})
                    break
                choice = {"text": "x", "token_ids": [token], "logprobs": likely}
                self.event({"choices": [choice], "retire": {"epoch": epoch}})
                leaks -= not current
                server.spoken[scope, epoch] += current
        self.wfile.write(b"data: [DONE]\n\n")

    def refuse_revoked(self, told, current):
        """As the gate does: a successor is told of itself, anybody else of the version that is current now."""
        advanced = "location" in told
        headers = told if advanced else {"x-retire-epoch": str(current)}
        authority = "advanced" if advanced else "unchanged"
        self.say({"error": {"code": 410}, "authority": authority}, 410, {"x-retire-authority": authority, **headers})

    def event(self, told):
        self.wfile.write(b"data: " + json.dumps(told).encode() + b"\n\n")
        self.wfile.flush()

    def say(self, told, status=200, headers=None):
        payload = json.dumps(told).encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(payload)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_):
        pass
