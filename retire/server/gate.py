"""The outermost ASGI layer: every authority change comes in here, every frame of a scope goes out here.

Owns: who is asking, admission of scoped requests, the last compare before a frame is written, the end of a superseded
stream.  Must not know: scheduling, KV.
Strategy: the last gate is `Stream._publish`: drain the transport, compare the ticket, write, with no await between the
compare and the write (invariant 1).  What lies behind it is bounded for streams: the transport keeps no more than the
frame that filled it, the socket no more than its outlet lets in (under TLS asyncio keeps a buffer of its own besides).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Literal

from xxhash import xxh3_64_intdigest

from retire.authority.store import ScopeView
from retire.authority.table import scope_key
from retire.authority.tag import EPOCH_KEY, PREFIX, SCOPE_KEY, Tag, to_xargs
from retire.core.certificate import common_prefix
from retire.core.errors import (
    EngineError,
    EpochRevoked,
    InvalidRequest,
    RetireError,
    Unsupported,
)
from retire.core.types import EPOCH_MAX, Epoch, ScopeId, TenantId, Ticket
from retire.journal import Kind, audits, newest, note, under
from retire.server import metrics
from retire.server.frames import CHOICES_MAX, Count, Frames, dumps
from retire.server.outlet import Outlet
from retire.server.prompts import told_prompt
from retire.server.requests import (
    contract_from_header,
    parse_successor,
    parse_supersede,
    refuse_unsupported,
    require_shallow,
    serves_model,
)
from retire.server.schemas import REASON_MAX_CHARS
from retire.server.service import FENCE_WAIT_S, Service, Superseded
from retire.server.transitions import Transition, now_ns
from retire.tenants import Registry, asker, asking

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GATED = {"/v1/chat/completions": True, "/v1/completions": False}  # path → whether it speaks in chat chunks
SUPERSEDE = "/supersede"
OURS = (SUPERSEDE, "/scopes", "/transitions", "/retire")
ABANDONED_AFTER_S = 10.0
PREFIX_OF_OURS = "x-retire-"
KNOWN = frozenset(
    PREFIX_OF_OURS + name for name in ("scope", "epoch", "supersedes", "contract", "reason", "equivalence")
)
EPOCH_MAX_DIGITS = len(str(EPOCH_MAX))


class Headers:
    """The request's headers that concern us, each given at most once."""

    def __init__(self, scope: Scope) -> None:
        self._values: dict[str, str] = {}
        for raw_name, raw in scope["headers"]:
            name = raw_name.decode("latin-1").lower()
            if name.startswith(PREFIX_OF_OURS):
                if name in self._values:
                    raise InvalidRequest(f"header {name} given twice", param=name)
                if name not in KNOWN:  # ignored, a misspelt supersede would join the version it meant to end
                    raise InvalidRequest(f"header {name} is not known", param=name)
            try:
                self._values[name] = raw.decode("utf-8")
            except UnicodeDecodeError:
                self._values[name] = raw.decode("latin-1")

    def get(self, name: str) -> str | None:
        """One header."""
        return self._values.get(name)

    @property
    def scoped(self) -> bool:
        """Whether any of them speaks to us."""
        return not KNOWN.isdisjoint(self._values)

    def epoch(self, name: str, *, star: bool = False) -> int | Literal["*"] | None:
        """A header that holds an epoch."""
        value = self._values.get(name)
        if value is None:
            return None
        if star and value == "*":
            return "*"
        digits = value.isascii() and value.isdigit() and len(value) <= EPOCH_MAX_DIGITS
        if not digits or not 1 <= int(value) <= EPOCH_MAX:
            raise InvalidRequest(f"{name} is an integer from 1 to 2**64 - 1", param=name)
        return int(value)

    def refuse(self, *names: str, why: str) -> None:
        """Raise InvalidRequest for a header that would be ignored here."""
        for name in sorted(names):
            if name in self._values:
                raise InvalidRequest(f"header {name} has no meaning here: {why}", param=name)

    def reason(self) -> str | None:
        """`X-Retire-Reason`."""
        value = self._values.get("x-retire-reason")
        if value is not None and len(value) > REASON_MAX_CHARS:
            raise InvalidRequest(f"a reason has at most {REASON_MAX_CHARS} characters", param="X-Retire-Reason")
        return value

    def exact(self) -> bool:
        """`X-Retire-Equivalence`: whether the request is to be computed as a clean run would."""
        value = self._values.get("x-retire-equivalence", "mode_matched")
        if value not in ("mode_matched", "exact"):
            raise InvalidRequest("equivalence is mode_matched or exact", param="X-Retire-Equivalence")
        return value == "exact"

    def require_json(self) -> None:
        """As vLLM's routes do; without it any web page could send a supersede unasked."""
        media_type = (self._values.get("content-type") or "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise InvalidRequest("Unsupported Media Type: Only 'application/json' is allowed", param="Content-Type")

    def prefers_fenced(self) -> bool:
        """Whether `wait=fenced` is among the preferences."""
        return "wait=fenced" in (part.strip() for part in (self._values.get("prefer") or "").split(","))


class Gate:
    """Wraps the whole application, vLLM's own middleware included.

    `cors` puts vLLM's CORS middleware around an application: what the gate answers itself never passes the one inside.
    """

    def __init__(
        self, app: App, service: Callable[[], Service], tenants: Callable[[], Registry], cors: Callable[[App], App]
    ) -> None:
        self._app = app
        self._get_service = service
        self._get_tenants = tenants
        self._cors = cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        asking.set(None)  # a pipelined request's task starts with what its predecessor's has set
        if scope["type"] == "http" and scope["method"] != "OPTIONS":  # a preflight asks for nothing and has no key
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket" and (refusal := self._refuses(scope)) is not None:
            await send({"type": "websocket.close", "code": 1008, "reason": refusal})
        else:
            await self._app(scope, receive, send)

    def _refuses(self, scope: Scope) -> str | None:
        """Why this websocket does not open, or None."""
        try:
            if Headers(scope).scoped:
                return "a websocket cannot carry a scope"
            self._know(scope, Headers(scope))
        except RetireError as error:
            return str(error)
        return None

    def _know(self, scope: Scope, headers: Headers) -> str:
        """Note who is asking, where a key is asked for.  Gives the path.  Raises Unauthorized."""
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        tenants = self._get_tenants()
        if headers.scoped or path.startswith(OURS) or tenants.guards(path):
            asking.set(tenants.authenticate(headers.get("authorization")))
        return path

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(self._app, self._get_service, scope, receive, send, self._cors)
        try:
            headers = Headers(scope)
            path = self._know(scope, headers)
            if path == SUPERSEDE and scope["method"] == "POST":
                await exchange.supersede(headers, asker())
            elif path in GATED and scope["method"] == "POST":
                await exchange.gated(path, headers, self._get_tenants())
            elif headers.scoped and not path.startswith(OURS):
                raise Unsupported(f"{path} cannot carry a scope; use {' or '.join(GATED)}", param="X-Retire-Scope")
            else:
                await self._app(scope, receive, send)
        except RetireError as error:
            await exchange.refuse(error)


class Exchange:
    """One request at the gate."""

    def __init__(
        self,
        app: App,
        service: Callable[[], Service],
        scope: Scope,
        receive: Receive,
        send: Send,
        cors: Callable[[App], App],
    ) -> None:
        self._entered_ns = now_ns()
        self._app = app
        self._cors = cors
        self._service = service
        self._scope = scope
        self._receive = receive
        self._send = send
        self._advanced: Transition | None = None
        self._about: str | None = None  # the scope that this is about

    # -- what a request can be ------------------------------------------------------------------------------------

    async def supersede(self, headers: Headers, tenant: TenantId) -> None:
        """POST /supersede."""
        headers.require_json()
        headers.refuse(*(KNOWN - {"x-retire-scope"}), why="the body says it")
        raw = await self._body()
        request = parse_supersede(raw)
        self._about = request.scope
        if headers.scoped and headers.get("x-retire-scope") != request.scope:
            raise InvalidRequest("the X-Retire headers disagree with the body", param="X-Retire-Scope")
        service = self._service()
        contract = request.contract.to_contract(service.settings)
        successor = None if request.successor is None else parse_successor(request.successor)
        if successor is not None:
            _merge(request.scope, None, successor, superseding=True)
            serves_model(service, successor)
        done = service.supersede(
            tenant,
            request.scope,
            request.expected_epoch,
            contract,
            request.reason,
            _idempotency(headers, raw),
            successor_follows=successor is not None,
            entered_ns=self._entered_ns,
        )
        self._advanced = done.record
        if successor is None or not done.fresh:
            await self._answer_record(headers, done)
            return
        assert request.successor is not None
        await self._serve(request.successor.endpoint, successor, done.view, done.record, rewritten=True)

    async def gated(self, path: str, headers: Headers, tenants: Registry) -> None:
        """A chat completion or completion, scoped or not, superseding or not."""
        if not headers.scoped:
            raw = await self._body()
            body = _json_object(raw) if PREFIX.encode() in raw else None
            if body is None or not _names_scope(body):
                await self._app(self._scope, self._replay(raw), self._send)
                return
            asking.set(tenants.authenticate(headers.get("authorization")))
            view = self._join(asker(), None, None, body)
            await self._serve(path, body, view, None, rewritten=False)
            return
        tenant = asker()
        scope_name, epoch = headers.get("x-retire-scope"), _number(headers.epoch("x-retire-epoch"))
        expected = headers.epoch("x-retire-supersedes", star=True)
        if scope_name is None:
            raise InvalidRequest("X-Retire-Scope is missing", param="X-Retire-Scope")
        if expected is None:
            headers.refuse("x-retire-contract", "x-retire-reason", why="only with X-Retire-Supersedes")
            body = _json_object(await self._body())
            view = self._join(tenant, scope_name, epoch, body)
            assert body is not None
            exact = headers.exact()
        else:
            headers.refuse("x-retire-equivalence", why="the contract says it")
            exact = False  # the engine knows the contract
            if epoch is not None:
                raise InvalidRequest("X-Retire-Supersedes already names the epoch", param="X-Retire-Epoch")
            done = self._supersede_by_header(headers, tenant, scope_name, expected)
            if not done.fresh:
                await self._answer_record(headers, done)
                return
            body = _json_object(await self._body())
            if body is None:
                raise InvalidRequest("the body is not a JSON object")
            require_shallow(body)
            _merge(scope_name, None, body, superseding=True)
            refuse_unsupported(body)
            view = done.view
        await self._serve(path, body, view, self._advanced, rewritten=False, exact=exact)

    def _join(
        self, tenant: TenantId, scope_name: str | None, epoch: int | None, body: dict[str, Any] | None
    ) -> ScopeView:
        """An ordinary request joins its scope."""
        if body is None:
            raise InvalidRequest("the body is not a JSON object")
        require_shallow(body)
        scope_name, epoch = _merge(scope_name, epoch, body, superseding=False)
        self._about = scope_name
        refuse_unsupported(body)
        service = self._service()
        service.require_engine(tenant, scope_name)
        return service.authority.resolve(tenant, scope_name, epoch)

    def _supersede_by_header(
        self, headers: Headers, tenant: TenantId, scope_name: str, expected: int | Literal["*"]
    ) -> Superseded:
        """Authority moves when the headers are read; the body is still on its way."""
        service = self._service()
        self._about, reason = scope_name, headers.reason()
        contract = contract_from_header(headers.get("x-retire-contract"), service.settings)
        told = f"{scope_name}\0{expected}\0{headers.get('x-retire-contract')}".encode()
        keys = _idempotency(headers, told)
        done = service.supersede(
            tenant,
            scope_name,
            expected,
            contract,
            reason,
            keys,
            successor_follows=True,
            entered_ns=self._entered_ns,
        )
        self._advanced = done.record
        return done

    # -- a scoped response ----------------------------------------------------------------------------------------

    async def _serve(
        self,
        path: str,
        body: dict[str, Any],
        view: ScopeView,
        record: Transition | None,
        *,
        rewritten: bool,
        exact: bool = False,
    ) -> None:
        service = self._service()
        cycle = getattr(self._send, "__self__", None)
        if not all(hasattr(cycle, name) for name in ("flow", "transport", "disconnected")):
            raise EngineError("the gate is not the outermost layer of this server; scoped requests are refused")
        ticket = service.authority.issue(view)
        try:
            stream = Stream(self, service, path, body, view, ticket, record, cycle, exact=exact)
        except BaseException:
            service.authority.release(ticket)
            raise
        service.attach(view.tenant, view.scope, stream)
        try:
            await stream.run(self._inner_scope(path, rewritten=rewritten))
        finally:
            if not stream.finishing:
                stream.settle()

    def _inner_scope(self, path: str, *, rewritten: bool) -> Scope:
        headers = [
            (name, value)
            for name, value in self._scope["headers"]
            if name.lower() not in (b"content-length", b"transfer-encoding", b"content-type", b"accept-encoding")
        ]
        inner = {**self._scope, "headers": [*headers, (b"content-type", b"application/json")]}
        if not rewritten:
            original = [(n, v) for n, v in self._scope["headers"] if n.lower() == b"content-type"]
            inner["headers"] = [*headers, *original]
        if rewritten:
            root = self._scope.get("root_path", "")
            inner |= {"path": root + path, "raw_path": (root + path).encode(), "query_string": b""}
        return inner

    async def call(self, inner_scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application behind the gate."""
        await self._app(inner_scope, receive, send)

    # -- plain answers --------------------------------------------------------------------------------------------

    async def _answer_record(self, headers: Headers, done: Superseded) -> None:
        record = done.record
        answer = record.accepted()
        extra = [record_header(record)]
        if headers.prefers_fenced():
            answer["fenced"] = await self._service().wait_fenced(record)
            answer["fence_ms"] = record.fence_ms()
            extra.append((b"preference-applied", b"wait=fenced"))
        await self.respond(200, answer, [*extra, *scope_headers(record.scope, record.new_epoch)])

    async def refuse(self, error: RetireError) -> None:
        """An error in vLLM's shape, saying whether authority has moved."""
        status = getattr(error, "status", 500)
        detail: dict[str, Any] = {
            "message": str(error),
            "type": getattr(error, "kind", "InternalServerError"),
            "param": getattr(error, "param", None),
            "code": status,
        }
        current = getattr(error, "current_epoch", None)
        if current is None and self._advanced is not None:
            current = self._advanced.new_epoch
        if current is not None:
            detail["current_epoch"] = current
        extra = self.refusal_headers(status)
        if self._about is not None and current is not None and self._advanced is None:
            extra += scope_headers(ScopeId(self._about), Epoch(current))
        await self.respond(status, {"error": detail, "authority": self.authority_word()}, extra)

    def authority_word(self) -> str:
        """`advanced` once this request has moved authority."""
        return "unchanged" if self._advanced is None else "advanced"

    def refusal_headers(self, status: int) -> list[tuple[bytes, bytes]]:
        """What a refusal says beside its body, the record's place with it if this request has moved authority.

        SDKs retry 409 and 503 by themselves; neither helps here once authority is involved.
        """
        headers = [(b"x-retire-authority", self.authority_word().encode())]
        if status == 409 or (self._advanced is not None and status >= 500):
            headers.append((b"x-should-retry", b"false"))
        if self._advanced is not None:
            headers += [
                *scope_headers(self._advanced.scope, self._advanced.new_epoch),
                record_header(self._advanced),
            ]
        return headers

    async def respond(self, status: int, answer: dict[str, Any], headers: list[tuple[bytes, bytes]]) -> None:
        """A JSON response of the gate itself."""
        body = dumps(answer)
        base = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]

        async def answered(_scope: Scope, _receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": status, "headers": [*base, *headers]})
            await send({"type": "http.response.body", "body": body})

        await self._cors(answered)(self._scope, self._receive, self._send)

    # -- the request's body ---------------------------------------------------------------------------------------

    async def _body(self) -> bytes:
        parts = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                if self._advanced is not None:
                    self._service().abandon(self._advanced)
                raise InvalidRequest("the client left before its body was complete")
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)

    def _replay(self, raw: bytes) -> Receive:
        pending = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> Message:
            return pending.pop() if pending else await self._receive()

        return receive

    @property
    def receive(self) -> Receive:
        """The server's own receive."""
        return self._receive

    @property
    def send(self) -> Send:
        """The server's own send."""
        return self._send


class Stream:
    """One scoped response on its way out."""

    def __init__(
        self,
        exchange: Exchange,
        service: Service,
        path: str,
        body: dict[str, Any],
        view: ScopeView,
        ticket: Ticket,
        record: Transition | None,
        cycle: Any,
        *,
        exact: bool,
    ) -> None:
        self.epoch = view.epoch
        self.finishing = False
        self._exchange = exchange
        self._service = service
        self._view = view
        self._ticket = ticket
        self._record = record
        self._cycle = cycle
        self._streaming = body.get("stream") is True
        self._revoked = asyncio.Event()
        self._superseded_by: int | None = None
        self._fenced: asyncio.Event | None = None
        self._closed = False  # nothing of the application goes out any more
        self._complete = False
        self._start: Message | None = None
        self._started = False
        self._passed = 0, 0, 0  # messages through the last gate, the word seen at the last, newest record then
        self._key = scope_key(view.tenant, view.scope)
        self._outlet: Outlet | None = None
        self._buffer: list[bytes] = []
        self._prompts: list[list[int]] = []
        self._compared_with = Epoch(0)
        self._request_body: bytes | None = self._prepare(path, body, exact=exact)

    def _prepare(self, path: str, body: dict[str, Any], *, exact: bool) -> bytes:
        """The application's body: with the tag, the scope's cache generation, and running usage for the count."""
        view = self._view
        options = body.get("stream_options") if isinstance(body.get("stream_options"), dict) else {}
        prompts = body.get("prompt") if path == "/v1/completions" else None
        many = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
        count = body.get("n")
        self._frames = Frames(
            tag={"scope": view.scope, "epoch": view.epoch},
            chat=GATED[path],
            choices=min((count if isinstance(count, int) and count > 0 else 1) * many, CHOICES_MAX),
            model=str(body.get("model") or ""),
            usage=bool(options and options.get("include_usage")),
            running_usage=bool(options and options.get("include_usage") and options.get("continuous_usage_stats")),
            fingerprint=self._service.fingerprint,
        )
        tag = Tag(view.tenant, view.scope, view.epoch, self._ticket, exact)
        xargs = body.get("vllm_xargs")
        kept = {k: v for k, v in xargs.items() if not str(k).startswith(PREFIX)} if isinstance(xargs, dict) else {}
        prepared = {**body, "vllm_xargs": {**kept, **to_xargs(tag, self._service.authority.secret)}}
        salt = self._service.salt(view.tenant, view.scope)
        if salt is not None:
            prepared["cache_salt"] = f"{salt}:{body.get('cache_salt') or ''}"
        if self._streaming and isinstance(body.get("stream_options", {}), dict | None):
            prepared["stream_options"] = {**(options or {}), "include_usage": True, "continuous_usage_stats": True}
        return json.dumps(prepared).encode()

    # -- what the service says ------------------------------------------------------------------------------------

    def revoke(self, superseded_by: int | None, fenced: asyncio.Event | None) -> bool:
        """The epoch has lost authority (already in the table): end at once.  False: it had lost it before."""
        if self._revoked.is_set():
            return False
        self._superseded_by = superseded_by
        self._fenced = fenced
        self._revoked.set()
        return True

    def promise(self, tokens: int) -> None:
        """The successor starts with so many tokens of this one's."""
        self._service.authority.lower(self._ticket, tokens)

    def compare(self, epoch: Epoch, tokens: list[int]) -> None:
        """The first request of a later epoch has this prompt; what others of that epoch have is no matter."""
        if epoch > self._compared_with:
            self._compared_with = epoch
            self.promise(max((common_prefix(own, tokens) for own in self._prompts), default=0))

    def _told_prompt(self, tokens: list[int]) -> None:
        if self._revoked.is_set():
            return  # whoever comes after this one has something in common with its predecessors, or not
        self._prompts.append(tokens)
        self._service.successor_starts_with(self._view.tenant, self._view.scope, self.epoch, tokens)

    def published(self) -> dict[str, Any]:
        """What has passed the last gate."""
        return {"epoch": self.epoch, "choices": self._frames.summary()}

    # -- running --------------------------------------------------------------------------------------------------

    async def run(self, inner_scope: Scope) -> None:
        """Serve until the application is done, the client leaves, or the epoch loses authority."""
        self._bound_backlog()
        told = told_prompt.set(self._told_prompt)
        inner = asyncio.ensure_future(self._exchange.call(inner_scope, self._receive, self._send))
        told_prompt.reset(told)
        revoked = asyncio.ensure_future(self._revoked.wait())
        try:
            await asyncio.wait({inner, revoked}, return_when=asyncio.FIRST_COMPLETED)
            if self._revoked.is_set() and not self._complete:
                await self._end_revoked()
                if not inner.done():
                    self.finishing = True
                    self._service.spawn(self._abandon(inner))
                    return
            await inner
        except asyncio.CancelledError:
            inner.cancel()
            raise
        finally:
            revoked.cancel()

    async def _abandon(self, inner: asyncio.Future[None]) -> None:
        """The application has been told that its client left; see that it ends, then let go of the ticket."""
        try:
            await asyncio.wait({inner}, timeout=ABANDONED_AFTER_S)
            inner.cancel()
            await asyncio.gather(inner, return_exceptions=True)
        finally:
            self.settle()

    def settle(self) -> None:
        """The response is over.

        A ticket that lost its epoch keeps its row limit until the last receipt: a promised prefix is still wanted.
        """
        service, view = self._service, self._view
        frames, seen, newest_then = self._passed
        self._note(Kind.RESPONSE, seen=seen, a=frames, b=newest_then)
        service.detach(view.tenant, view.scope, self, ended_by_itself=not self._revoked.is_set())
        if self._fenced is None:
            service.authority.lower(self._ticket, 0)
            service.authority.release(self._ticket)
        else:
            service.linger(view.tenant, view.scope, self)
            service.spawn(self._release_when_fenced(self._fenced))

    async def _release_when_fenced(self, fenced: asyncio.Event) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(fenced.wait(), FENCE_WAIT_S)
        finally:
            self._service.gone(self._view.tenant, self._view.scope, self)
            self._service.authority.release(self._ticket)

    def _bound_backlog(self) -> None:
        """Keep what this process and the kernel hold behind the last gate small (`stated_backlog`)."""
        transport = self._cycle.transport
        transport.set_write_buffer_limits(high=0)
        sock = transport.get_extra_info("socket")
        if sock is not None and self._streaming:
            self._outlet = Outlet(sock, self._service.settings.backlog_bytes)

    # -- the application's side -----------------------------------------------------------------------------------

    async def _receive(self) -> Message:
        if self._request_body is not None:
            body, self._request_body = self._request_body, None
            return {"type": "http.request", "body": body, "more_body": False}
        gone = asyncio.ensure_future(self._exchange.receive())
        revoked = asyncio.ensure_future(self._revoked.wait())
        try:
            await asyncio.wait({gone, revoked}, return_when=asyncio.FIRST_COMPLETED)
            if self._revoked.is_set():
                return {"type": "http.disconnect"}
            message = gone.result()
            if message["type"] == "http.disconnect" and not self._complete:
                self._service.authority.lower(self._ticket, 0)  # workers stop at the next safe point
                if self._record is not None:
                    self._service.abandon(self._record)
            return message
        finally:
            gone.cancel()
            revoked.cancel()

    async def _send(self, message: Message) -> None:
        if self._closed:
            return
        if message["type"] == "http.response.start":
            self._start = message
            if self._is_event_stream(message):
                await self._publish([self._tagged_start(message, None)], [])
        elif message["type"] == "http.response.body":
            await (self._send_frame(message) if self._started else self._send_whole(message))

    @staticmethod
    def _is_event_stream(message: Message) -> bool:
        return message["status"] == 200 and any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in message["headers"]
        )

    async def _send_frame(self, message: Message) -> None:
        body, counts = self._frames.rewrite(message.get("body", b""))
        more = message.get("more_body", False)
        if body or not more:
            await self._publish([{"type": "http.response.body", "body": body, "more_body": more}], counts)

    async def _send_whole(self, message: Message) -> None:
        """A response that is one frame: held until it is whole, so that revocation can still turn it into a 410."""
        self._buffer.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        assert self._start is not None
        body = b"".join(self._buffer)
        if self._start["status"] >= 500 and self._service.engine_dead():
            self._complete = self._closed = True
            await self._exchange.refuse(EngineError("the engine is gone", current_epoch=self.epoch))
            return
        if self._start["status"] == 200:
            body = self._frames.tag_json(body)
        elif body.lstrip()[:1] == b"{":
            body = b'{"authority":"' + self._exchange.authority_word().encode() + b'",' + body.lstrip()[1:]
        await self._publish(
            [self._tagged_start(self._start, len(body)), {"type": "http.response.body", "body": body}],
            self._whole_counts(body) if self._start["status"] == 200 else [],
        )

    def _whole_counts(self, body: bytes) -> list[Count]:
        answer = json.loads(body)
        if not isinstance(answer, dict):  # vLLM says null to a client that has left
            return []
        choices = answer.get("choices", [])
        tokens = (answer.get("usage") or {}).get("completion_tokens", 0) if len(choices) == 1 else None
        texts = [(c.get("message") or {}).get("content") if "message" in c else c.get("text") for c in choices]
        return [(c.get("index", 0), tokens, len(t or ""), True) for c, t in zip(choices, texts, strict=True)]

    def _tagged_start(self, message: Message, length: int | None) -> Message:
        dropped = (b"content-length",) if length is not None else ()
        headers = [(n, v) for n, v in message["headers"] if n.lower() not in dropped]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        headers += scope_headers(self._view.scope, self._view.epoch)
        if self._record is not None:
            headers.append(record_header(self._record))
        if message["status"] >= 400:
            known = {name for name, _ in headers}
            headers += [pair for pair in self._exchange.refusal_headers(message["status"]) if pair[0] not in known]
        return {**message, "headers": headers}

    # -- the last gate --------------------------------------------------------------------------------------------

    async def _publish(self, messages: list[Message], counts: list[Count]) -> None:
        """Write the frame if its epoch is current when it is written."""
        for message in messages:
            await self._room()
            if self._closed:
                return
            seen = self._service.authority.seen(self._ticket)
            if seen != self._ticket.raw:
                self._note(Kind.WITHHELD, seen=seen)
                metrics.SUPPRESSED.inc()
                self._closed = True
                self._revoked.set()
                return
            await self._exchange.send(message)  # does not suspend: the transport was drained just now
            self._started = True
            self._passed = self._passed[0] + 1, seen, self._note_frame(message, seen)
        self._frames.account(counts)
        self._complete = messages[-1]["type"] == "http.response.body" and not messages[-1].get("more_body", False)
        if self._record is not None and counts and self._record.first_frame_ns is None:
            self._record.first_frame_ns = now_ns()

    def _note_frame(self, message: Message, seen: int) -> int:
        """Journal a frame that has passed, if every one is asked for.  Gives the number of the newest record."""
        if audits():
            body: bytes = message.get("body", b"")
            self._note(Kind.FRAME, seen=seen, a=self._passed[0] + 1, b=xxh3_64_intdigest(body), c=len(body))
        return newest()

    def _note(self, kind: Kind, **fields: int) -> None:
        """Journal something about this response."""
        note(kind, epoch=self.epoch, key=self._key, **under(self._ticket), **fields)

    async def _room(self) -> None:
        await self._drain()
        while self._outlet is not None and not self._cycle.disconnected and not self._outlet.open():
            await self._outlet.wait()
            await self._drain()

    async def _drain(self) -> None:
        while self._cycle.flow.write_paused and not self._cycle.disconnected:
            await self._cycle.flow.drain()

    async def _end_revoked(self) -> None:
        """End the response as a superseded one.  The bytes are the server's own, nothing of the old epoch."""
        self._closed = True
        service, view = self._service, self._view
        now = service.authority.view(view.tenant, view.scope)
        successor = self._superseded_by or (now.epoch if now is not None and now.epoch != view.epoch else None)
        if self._started:
            why = {"superseded_by": successor} if successor is not None else {"cancelled": True}
            await self._drain()
            await self._exchange.send(
                {"type": "http.response.body", "body": self._frames.ending(**why), "more_body": False}
            )
        else:
            what = f"epoch {view.epoch} was superseded" if successor is not None else "the scope was cancelled"
            await self._exchange.refuse(EpochRevoked(what, param="scope", current_epoch=successor or view.epoch))


def scope_headers(scope: ScopeId, epoch: Epoch) -> list[tuple[bytes, bytes]]:
    """`X-Retire-Scope` and `X-Retire-Epoch` of a response."""
    return [(b"x-retire-scope", scope.encode("utf-8")), (b"x-retire-epoch", str(epoch).encode())]


def record_header(record: Transition) -> tuple[bytes, bytes]:
    """`Location` of a response: where the record of the transition is that its request has made."""
    return b"location", f"/transitions/{record.id}".encode()


def _idempotency(headers: Headers, told: bytes) -> tuple[str, bytes] | None:
    key = headers.get("idempotency-key")
    if key is None:
        return None
    if not 1 <= len(key) <= 256:
        raise InvalidRequest("Idempotency-Key has 1 to 256 characters", param="Idempotency-Key")
    return key, told


def _json_object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _number(epoch: int | Literal["*"] | None) -> int | None:
    return None if epoch == "*" else epoch


def _names_scope(body: dict[str, Any]) -> bool:
    xargs = body.get("vllm_xargs")
    return isinstance(xargs, dict) and any(str(key).startswith(PREFIX) for key in xargs)


def _merge(
    scope_name: str | None, epoch: int | None, body: dict[str, Any], *, superseding: bool
) -> tuple[str, int | None]:
    """Scope and epoch from headers and `vllm_xargs`; they must not disagree."""
    xargs = body.get("vllm_xargs")
    if xargs is not None and not isinstance(xargs, dict):
        raise InvalidRequest("vllm_xargs is a JSON object", param="vllm_xargs")
    xargs = xargs or {}
    foreign = [key for key in xargs if str(key).startswith(PREFIX) and key not in (SCOPE_KEY, EPOCH_KEY)]
    if foreign:
        raise InvalidRequest(f"vllm_xargs.{foreign[0]} is not a field of the client", param=f"vllm_xargs.{foreign[0]}")
    body_scope, body_epoch = xargs.get(SCOPE_KEY), xargs.get(EPOCH_KEY)
    if body_epoch is not None and type(body_epoch) is not int:  # True and 1.0 equal 1
        raise InvalidRequest("vllm_xargs.retire_epoch is an integer", param="vllm_xargs.retire_epoch")
    if body_scope is not None and scope_name is not None and body_scope != scope_name:
        raise InvalidRequest("X-Retire-Scope and vllm_xargs.retire_scope disagree", param="vllm_xargs.retire_scope")
    if body_epoch is not None and ((epoch is not None and body_epoch != epoch) or superseding):
        raise InvalidRequest("the epochs of headers and vllm_xargs disagree", param="vllm_xargs.retire_epoch")
    name = scope_name if scope_name is not None else body_scope
    if name is None:
        raise InvalidRequest("vllm_xargs.retire_scope is missing", param="vllm_xargs.retire_scope")
    return name, epoch if epoch is not None else body_epoch
