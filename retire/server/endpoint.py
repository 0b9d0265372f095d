"""The endpoint plugin: how the gate and the routes get into vLLM's API server.

Owns: wiring, and the refusal to serve unless the gate is outermost and every process is sealed alike.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from retire import seal
from retire.authority import home
from retire.core.errors import SeamError
from retire.server.gate import App, Gate
from retire.server.routes import document_headers, router
from retire.server.service import Service
from retire.settings import PLUGIN_NAME, Settings
from retire.tenants import Registry


class RetireEndpoint:
    """vLLM's `EndpointPlugin` protocol."""

    name = PLUGIN_NAME
    required_tasks = None

    def __init__(self) -> None:
        self._app: FastAPI | None = None
        self._build: Any = None
        self._service: Service | None = None
        self._tenants: Registry | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and put the gate around everything, the middleware that is added later included."""
        app.include_router(router)
        document_headers(app)
        inner_build = app.build_middleware_stack

        def build_with_gate() -> App:
            return Gate(inner_build(), self.service, self.tenants, lambda answered: _with_cors(app, answered))

        app.build_middleware_stack = build_with_gate  # type: ignore[method-assign]
        self._app, self._build = app, build_with_gate

    def service(self) -> Service:
        """The service of this process, once it is ready."""
        if self._service is None:
            raise SeamError("RETIRE is not ready")
        return self._service

    def tenants(self) -> Registry:
        """Who may ask, once that is known."""
        if self._tenants is None:
            raise SeamError("RETIRE is not ready")
        return self._tenants

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Refuse to serve unless everything is in its place; then follow the engine.

        Raises:
            SeamError: no engine, an unsealed process, a layer outside the gate, or keys of vLLM beside a tenants file.
        """
        if engine_client is None:
            raise SeamError("RETIRE needs an engine; the render server has none")
        self._require_outermost()
        from vllm import envs

        self._tenants = home.tenants().accepting(args.api_key or [envs.VLLM_API_KEY or ""])
        authority = home.owned()
        if authority is None:
            raise SeamError("this process does not own the state directory")
        core = engine_client.engine_core
        await self._require_same_seal(core)

        models = state.openai_serving_models
        self._service = Service(
            authority,
            Settings.from_env(),
            self._tenants,
            call_engine=core.call_utility_async,
            engine_dead=lambda: bool(engine_client.errored),
            fingerprint=getattr(getattr(state, "openai_serving_chat", None), "system_fingerprint", None),
            serves_model=lambda name: models.is_base_model(name) or name in models.lora_requests,
        )
        state.retire = self._service
        self._service.spawn(self._service.follow_engine())

    def _require_outermost(self) -> None:
        app = self._app
        built = None if app is None else app.middleware_stack  # some middleware has it built before the first request
        if app is None or app.build_middleware_stack is not self._build or not isinstance(built, Gate | None):
            raise SeamError("another package has put itself outside RETIRE's gate")

    @staticmethod
    async def _require_same_seal(core: Any) -> None:
        mine = seal.require().as_dict()
        try:
            others = await core.call_utility_async("retire_seal")
        except Exception as error:
            raise SeamError(f"the engine process is not patched: {error}") from error
        for other in others:
            if other != mine:
                raise SeamError(f"processes disagree: API {mine}, engine or worker {other}")


def _with_cors(app: FastAPI, answered: App) -> App:
    """The application's own CORS middleware around an answer of the gate."""
    layers: list[Any] = [layer for layer in app.user_middleware if layer.cls is CORSMiddleware]  # type: ignore[comparison-overlap]
    for layer in layers:
        answered = layer.cls(answered, *layer.args, **layer.kwargs)
    return answered
