"""A server with RETIRE's surface for scopes, in memory: right, or wrong in one way that is asked for."""

from __future__ import annotations

import json
import select
import socket
import time
from collections import defaultdict
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import RLock, Thread
from urllib.parse import unquote

from tests.harness.register_model import Register

TICK_S = 0.003
ON_ITS_WAY_S = 0.04  # every question, and the answer to a supersede


class StandInScopes(ThreadingHTTPServer):
    """A token every `TICK_S` for each stream; every tenant has the scopes.

    `wrong`: "stale": every tenth stale supersede is accepted.  "forgetful": a restart takes every scope one epoch back.
    "leaks": a superseded stream goes on without being told.  "keys": keys are not remembered.
    """

    daemon_threads = True

    def __init__(self, wrong=None, past=None):
        """`past`: the life before this one, at whose address it goes on with all that was known."""
        super().__init__(("127.0.0.1", past.server_port if past else 0), Answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.wrong, self.connections = wrong, []
        self.lock = past.lock if past else RLock()
        self.registers = past.registers if past else defaultdict(Register)
        self.published = past.published if past else defaultdict(lambda: defaultdict(int))
        self.transitions, self.stale = past.transitions if past else {}, 0
        Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def process_request(self, request, client_address):
        self.connections.append(request)
        super().process_request(request, client_address)

    def known(self, tenant):
        """The tenant's scopes that anybody has used."""
        return {
            name: register for (whose, name), register in self.registers.items() if whose == tenant and register.epoch
        }

    def close(self):
        """Every connection is cut, as by the death of a process."""
        self.shutdown()
        self.server_close()
        for one in self.connections:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def reborn(self):
        """The next life."""
        if self.wrong == "forgetful":
            with self.lock:
                for register in self.registers.values():
                    register.epoch = max(1, register.epoch - 1)
        return StandInScopes(self.wrong, self)

    def handle_error(self, *_):
        pass


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        self.connection.settimeout(20)

    def parse_request(self):
        time.sleep(ON_ITS_WAY_S)
        return super().parse_request()

    @property
    def tenant(self):
        return self.headers.get("authorization", "")

    # -- what is asked

    def do_GET(self):
        path = self.path.partition("?")[0]
        with self.server.lock:
            if path == "/scopes":
                rows = [self.row(name) for name in self.server.known(self.tenant)]
                self.say({"scopes": rows, "next": None})
            elif path.startswith("/transitions/"):
                told = self.server.transitions.get(path.removeprefix("/transitions/"))
                self.say(told or {}, 200 if told else 404)
            else:
                self.about(unquote(path.removeprefix("/scopes/")))

    def do_DELETE(self):
        name = unquote(self.path.removeprefix("/scopes/"))
        with self.server.lock:
            if name in self.server.known(self.tenant):
                self.register(name).cancelled = True
            self.about(name)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/supersede":
            successor = body.get("successor", {}).get("body")
            self.supersede(body["scope"], body["expected_epoch"], successor)
        elif (expected := self.headers["x-retire-supersedes"]) is not None:
            name = self.headers["x-retire-scope"]
            self.supersede(name, expected if expected == "*" else int(expected), body)
        else:
            asked = self.headers["x-retire-epoch"]
            name = self.headers["x-retire-scope"]
            with self.server.lock:
                told = self.register(name).admit(None if asked is None else int(asked))
            if isinstance(told, int):
                self.stream(name, told, body, {})
            else:
                self.refuse(told)

    # -- what is answered

    def register(self, name):
        return self.server.registers[self.tenant, name]

    def row(self, name):
        register = self.register(name)
        return {"scope": name, "epoch": register.epoch, "cancelled": register.cancelled}

    def about(self, name):
        known = name in self.server.known(self.tenant)
        self.say(self.row(name) if known else {"error": {}, "authority": "unchanged"}, 200 if known else 404)

    def supersede(self, name, expected, successor):
        server, key = self.server, self.headers["idempotency-key"]
        key = None if server.wrong == "keys" else key
        with server.lock:
            register = self.register(name)
            before = register.epoch
            if server.wrong == "stale" and expected != "*" and expected < before and not register.cancelled:
                server.stale += 1
                expected = expected if server.stale % 10 else before
            told = register.supersede(None if expected == "*" else expected, expected == "*", key)
            fresh = register.epoch > before
            if told["status"] == 200:
                identity = f"{name}-{told['new']}-{abs(hash(self.tenant))}"
                record = {"id": identity, "scope": name, "old_epoch": told["old"], "new_epoch": told["new"]}
                headers = {"location": f"/transitions/{identity}", "x-retire-epoch": str(told["new"])}
                if fresh:
                    chars = server.published[self.tenant, name][told["old"]]
                    published = [{"epoch": told["old"], "choices": [{"index": 0, "chars": chars}]}]
                    server.transitions[identity] = {**record, "published": published}
        time.sleep(ON_ITS_WAY_S)
        if told["status"] != 200:
            self.refuse(told)
        elif successor and fresh:
            self.stream(name, told["new"], successor, headers)
        else:
            self.say(record, 200, headers)

    def refuse(self, told):
        error = {"message": "no", "code": told["status"]}
        if "current" in told:
            error["current_epoch"] = told["current"]
        self.say({"error": error, "authority": "unchanged"}, told["status"], {"x-retire-authority": "unchanged"})

    def stream(self, name, epoch, body, headers):
        server, register, told = self.server, self.register(name), 0
        with server.lock:
            if register.respond(epoch)["status"] != 200:
                word = "advanced" if headers else "unchanged"
                error = {"code": 410, "current_epoch": register.epoch}
                self.say({"error": error, "authority": word}, 410, {**headers, "x-retire-authority": word})
                return
            self.send_response(200)
            for key, value in {
                "content-type": "text/event-stream",
                "connection": "close",
                "x-retire-epoch": str(epoch),
                **headers,
            }.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.flush()
        for _ in range(body["max_tokens"]):
            time.sleep(TICK_S)
            if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                return
            with server.lock:  # the last gate: compare, write, count
                current = register.respond(epoch)["status"] == 200
                if not current and server.wrong != "leaks":
                    why = {"cancelled": True} if register.epoch == epoch else {"superseded_by": register.epoch}
                    self.event("", {"epoch": epoch, **why, "published": {"chars": told}})
                    break
                self.event("xy", {"epoch": epoch})
                told += 2
                server.published[self.tenant, name][epoch] += 2
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, text, tag):
        self.wfile.write(b"data: " + json.dumps({"choices": [{"text": text}], "retire": tag}).encode() + b"\n\n")
        self.wfile.flush()

    def say(self, told, status=200, headers=None):
        payload = json.dumps(told).encode()
        self.send_response(status)
        for name, value in {
            "content-length": str(len(payload)),
            "content-type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_):
        pass
