"""How a ticket travels with a request: as flat values in `SamplingParams.extra_args`.

Owns: the keys, and the proof that the values were written by this server (a secret that lives in the table's header
and in no response).  A client that writes these keys itself is told so; it cannot forge a ticket.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from retire.core.errors import InvalidRequest
from retire.core.types import Epoch, ScopeId, TenantId, Ticket

PREFIX = "retire_"
TICKET_KEY = "retire_ticket"
TENANT_KEY = "retire_tenant"
SCOPE_KEY = "retire_scope"
EPOCH_KEY = "retire_epoch"
EXACT_KEY = "retire_exact"


@dataclass(frozen=True, slots=True)
class Tag:
    """Whose request this is, and under which authority it was admitted.

    `exact`: it is computed alone and on the chunk grid, so that a successor can equal a clean run bit for bit.
    """

    tenant: TenantId
    scope: ScopeId
    epoch: Epoch
    ticket: Ticket
    exact: bool = False


def to_xargs(tag: Tag, secret: int) -> dict[str, str | int | bool | list[int]]:
    """Flat values for `vllm_xargs`."""
    ticket = tag.ticket
    return {
        TICKET_KEY: [secret, ticket.slot, ticket.raw, ticket.row, ticket.incarnation],
        TENANT_KEY: tag.tenant,
        SCOPE_KEY: tag.scope,
        EPOCH_KEY: tag.epoch,
        EXACT_KEY: tag.exact,
    }


def from_xargs(extra_args: Mapping[str, Any] | None, secret: int) -> Tag | None:
    """The tag of a request; None when it names no scope.

    Raises:
        InvalidRequest: one of our keys is there, and not from this server.
    """
    if not extra_args or not any(key.startswith(PREFIX) for key in extra_args):
        return None
    values = extra_args.get(TICKET_KEY)
    if not (
        isinstance(values, list)
        and len(values) == 5
        and all(isinstance(value, int) for value in values)
        and hmac.compare_digest(str(values[0]), str(secret))
    ):
        raise InvalidRequest(
            "a scoped request must come through a route that RETIRE gates (/v1/chat/completions, /v1/completions)",
            param="vllm_xargs",
        )
    _, slot, raw, row, incarnation = values
    return Tag(
        tenant=TenantId(extra_args[TENANT_KEY]),
        scope=ScopeId(extra_args[SCOPE_KEY]),
        epoch=Epoch(extra_args[EPOCH_KEY]),
        ticket=Ticket(slot=slot, raw=raw, row=row, incarnation=incarnation),
        exact=extra_args[EXACT_KEY],
    )
