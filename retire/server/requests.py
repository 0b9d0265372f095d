"""Parsing, before authority moves: what is malformed changes nothing."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ValidationError

from retire.core.errors import InvalidRequest, NotFound, Unsupported
from retire.core.types import Contract
from retire.server.schemas import ContractBody, SuccessorBody, SupersedeBody
from retire.server.service import Service
from retire.settings import Settings

NESTING_MAX = 200

# Fields of a scoped request that no ticket can follow, with the reason that the client reads.
UNSUPPORTED = {
    "use_beam_search": "beam search runs requests that carry no ticket",
    "prompt_logprobs": "prompt logprobs would be computed over rows that a fence drops",
    "kv_transfer_params": "KV transfer parameters hand blocks to another engine",
    "ec_transfer_params": "encoder transfer parameters hand state to another engine",
}


def parse_supersede(raw: bytes) -> SupersedeBody:
    """POST /supersede.  Raises InvalidRequest."""
    try:
        return SupersedeBody.model_validate(_loads(raw))
    except ValidationError as error:
        raise _invalid(error) from error


def parse_successor(successor: SuccessorBody) -> dict[str, Any]:
    """The successor's body, as far as it can be checked without the model.  Raises InvalidRequest, Unsupported."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    body = successor.body
    refuse_unsupported(body)
    kind: type[BaseModel] = ChatCompletionRequest if "chat" in successor.endpoint else CompletionRequest
    try:
        kind.model_validate(json.loads(json.dumps(body)))
    except ValidationError as error:
        raise _invalid(error, "successor.body") from error
    except (ValueError, TypeError) as error:
        raise InvalidRequest(str(error), param="successor.body") from error
    return body


def serves_model(service: Service, body: dict[str, Any]) -> None:
    """Raise NotFound when this server has no such model, in vLLM's words."""
    model = body.get("model")
    if model and not service.serves_model(model):
        raise NotFound(f"The model `{model}` does not exist.", param="model")


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Raise Unsupported for a field that a scoped request cannot have, InvalidRequest for one that we must read."""
    if not isinstance(body.get("stream"), bool | None):
        raise InvalidRequest("stream is true or false", param="stream")
    for name, why in UNSUPPORTED.items():
        if body.get(name) is not None and body.get(name) is not False:  # 0 prompt logprobs are prompt logprobs
            raise Unsupported(f"{name} is refused with a scope: {why}", param=name)
    if body.get("echo") and body.get("logprobs") is not None:
        raise Unsupported(f"echo with logprobs is refused with a scope: {UNSUPPORTED['prompt_logprobs']}", param="echo")


def contract_from_header(value: str | None, settings: Settings) -> Contract:
    """`X-Retire-Contract`: the same JSON object as in `POST /supersede`.  Raises InvalidRequest, Unsupported."""
    try:
        body = ContractBody() if value is None else ContractBody.model_validate(_loads(value.encode()))
    except ValidationError as error:
        raise _invalid(error, "X-Retire-Contract") from error
    return body.to_contract(settings)


def _loads(raw: bytes) -> Any:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"malformed JSON: {error}") from error
    require_shallow(value)
    return value


def require_shallow(value: Any) -> None:
    """Raise InvalidRequest for nesting that one parser on the way would follow and the next would not."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(NESTING_MAX):
        if not level:
            return
        inner = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level = [item for item in inner if isinstance(item, dict | list)]
    raise InvalidRequest(f"the body is nested deeper than {NESTING_MAX} levels")


def _invalid(error: ValidationError, prefix: str = "") -> InvalidRequest:
    first = error.errors()[0]
    where = ".".join(str(part) for part in (prefix, *first["loc"]) if part != "")
    return InvalidRequest(f"{where}: {first['msg']}" if where else str(first["msg"]), param=where or None)
