"""The routes that only look or mark: scopes, transitions, pause, cancel, status.

`POST /supersede` is declared here for OpenAPI; the gate answers it.  Should the route ever be reached, the gate is not
in front of it, and it says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Path, Query, Request
from fastapi.responses import JSONResponse

from retire import seal
from retire.core.errors import CallerError, EngineError, NotFound
from retire.core.types import Epoch, ScopeId
from retire.server.gate import GATED, scope_headers
from retire.server.schemas import Accepted, ScopeInfo, ScopeList, ServerStatus, SupersedeBody, TransitionInfo
from retire.server.service import Service
from retire.tenants import asker

router = APIRouter(tags=["retire"])
SCOPES_PER_PAGE, SCOPES_PER_PAGE_MAX = 100, 1000
ScopePath = Annotated[str, Path(description="a scope of the caller's tenant", examples=["plan-7"])]


SCOPE_HEADERS = {
    "X-Retire-Scope": ("the request joins this scope", "plan-7"),
    "X-Retire-Epoch": ("under this epoch; without it, under the current one", 3),
    "X-Retire-Supersedes": ('revoke this epoch ("*": the current one) and be the successor', 3),
    "X-Retire-Contract": (
        "the contract of POST /supersede, as JSON; with X-Retire-Supersedes",
        '{"keep_prefix": 6000}',
    ),
    "X-Retire-Equivalence": (
        "exact: compute it alone and on the chunk grid, so that a successor can equal a clean run bit for bit",
        "exact",
    ),
    "X-Retire-Reason": ("why; with X-Retire-Supersedes", "user_steering"),
    "Idempotency-Key": ("same key: the same transition, answered with its record; with X-Retire-Supersedes", "k-1"),
}


def document_headers(app: FastAPI) -> None:
    """Show in OpenAPI which headers scope an ordinary request."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generate()
        for path in GATED:
            operation = schema.get("paths", {}).get(path, {}).get("post")
            if operation is not None and not any(
                p["name"] == "X-Retire-Scope" for p in operation.get("parameters", [])
            ):
                operation.setdefault("parameters", []).extend(
                    {
                        "name": name,
                        "in": "header",
                        "description": text,
                        "example": example,
                        "schema": {"type": "string"},
                    }
                    for name, (text, example) in SCOPE_HEADERS.items()
                )
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _service(request: Request) -> Service:
    service: Service = request.app.state.retire
    return service


def error_response(error: CallerError | EngineError) -> JSONResponse:
    """vLLM's error shape."""
    param = getattr(error, "param", None)
    detail = {"message": str(error), "type": error.kind, "param": param, "code": error.status}
    if getattr(error, "current_epoch", None) is not None:
        detail["current_epoch"] = error.current_epoch
    return JSONResponse({"error": detail, "authority": "unchanged"}, status_code=error.status)


def _about_scope(scope: str, look: Callable[[], dict[str, Any]]) -> JSONResponse:
    """What `look` says of the scope, or why not; scope and epoch are named in the headers where they are known."""
    try:
        info = look()
    except CallerError as error:
        response, epoch = error_response(error), error.current_epoch
    else:
        response, epoch = JSONResponse(info), info["epoch"]
    if epoch is not None:
        response.raw_headers.extend(scope_headers(ScopeId(scope), Epoch(epoch)))
    return response


_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "malformed scope, epoch, contract or successor; authority unchanged"},
    401: {"description": "no tenant behind this key"},
    404: {"description": "unknown scope, transition or model"},
    409: {"description": "expected_epoch is not current; the body carries current_epoch; x-should-retry: false"},
    410: {"description": "the scope is cancelled"},
    422: {"description": "a contract that this server cannot honour, or an idempotency key with another body"},
    429: {"description": "the tenant is over its scopes or requests"},
    503: {"description": "the engine is gone; `authority` says whether it moved"},
}


@router.post("/supersede", response_model=Accepted, responses=_ERRORS)
async def supersede(
    body: SupersedeBody,
    idempotency_key: Annotated[str | None, Header(description="same key and body: the same record")] = None,
    prefer: Annotated[str | None, Header(description="`wait=fenced` answers when obsolete rows are closed")] = None,
) -> JSONResponse:
    """Revoke a scope's current epoch.

    With `successor` the answer is that request's OpenAI response (streamed or not) under the new epoch; without it,
    a record, and the successor comes later as an ordinary request.
    """
    del body, idempotency_key, prefer
    detail = {"message": "the gate does not stand before this route", "type": "ServiceUnavailableError", "code": 503}
    return JSONResponse({"error": detail, "authority": "unchanged"}, status_code=503)


@router.get("/transitions/{transition}", response_model=TransitionInfo, responses={404: _ERRORS[404]})
async def transition(request: Request, transition: str) -> Any:
    """Stage times, receipts, certificate or refusal, and what the predecessor had published."""
    record = _service(request).transitions.get(asker(), transition)
    if record is None:
        return error_response(NotFound(f"no transition {transition!r}", param="transition"))
    return record.info()


@router.get("/scopes", response_model=ScopeList)
async def scopes(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=SCOPES_PER_PAGE_MAX)] = SCOPES_PER_PAGE,
    after: Annotated[str, Query(description="`next` of the page before")] = "",
) -> Any:
    """The tenant's scopes by name, a page at a time."""
    service, tenant = _service(request), asker()
    found = service.authority.page(tenant, after=after, limit=limit + 1)
    following = found[limit - 1].scope if len(found) > limit else None
    return {"scopes": [service.describe(status) for status in found[:limit]], "next": following}


@router.get("/scopes/{scope:path}", response_model=ScopeInfo, responses={404: _ERRORS[404]})
async def scope(request: Request, scope: ScopePath) -> Any:
    """One scope."""
    return _about_scope(scope, lambda: _service(request).scope(asker(), scope))


@router.delete("/scopes/{scope:path}", response_model=ScopeInfo, responses={404: _ERRORS[404]})
async def cancel(request: Request, scope: ScopePath) -> Any:
    """Terminal cancellation: every request of the scope loses authority, and the id is dead until a higher epoch."""
    service, tenant = _service(request), asker()
    return _about_scope(scope, lambda: service.describe(service.cancel(tenant, scope)))


@router.post("/scopes/{scope:path}/pause", response_model=ScopeInfo, responses={404: _ERRORS[404], 410: _ERRORS[410]})
async def pause(request: Request, scope: ScopePath) -> Any:
    """Schedule nothing of the scope until it continues.  Authority is unchanged; its blocks stay."""
    return _set_paused(request, scope, paused=True)


@router.post("/scopes/{scope:path}/continue", response_model=ScopeInfo, responses={404: _ERRORS[404]})
async def continue_(request: Request, scope: ScopePath) -> Any:
    """Let a paused scope go on."""
    return _set_paused(request, scope, paused=False)


def _set_paused(request: Request, scope: str, *, paused: bool) -> Any:
    service, tenant = _service(request), asker()
    return _about_scope(scope, lambda: service.describe(service.set_paused(tenant, scope, paused)))


@router.get("/retire/status", response_model=ServerStatus)
async def status(request: Request) -> Any:
    """The seal of every process, the stated backlog, the policy, and what the engine holds for the tenant's scopes."""
    service = _service(request)
    try:
        held = await service.engine_status(asker())
    except EngineError as error:
        return error_response(error)
    return {
        "seal": seal.require().as_dict(),
        "state_dir": str(service.settings.state_dir),
        "stated_backlog": service.stated_backlog(),
        "policy": service.settings.policy.value,
        **held,
    }
