"""The error tree.

::

    RetireError
    ├── CallerError            the runtime asked for something that cannot be; carries an HTTP status
    │   ├── InvalidRequest     400  malformed scope, epoch, contract or body
    │   ├── Unauthorized       401  no tenant behind this key
    │   ├── NotFound           404  unknown scope or transition (another tenant's look the same)
    │   ├── EpochConflict      409  expected epoch is not the current one, or lies ahead of it
    │   ├── EpochRevoked       410  the epoch was superseded, or the scope cancelled
    │   ├── Unsupported        422  well-formed, but no configuration of this server can honour it
    │   └── OverLimit          429  the tenant is over one of its limits
    ├── EngineError            503  the engine is gone; authority stands as the table says
    ├── ProtocolError          an event that the transition table does not allow; nothing changed
    └── SeamError              vLLM is not what RETIRE was written against; start-up must stop

    InvariantViolation         (apart) a defect of RETIRE itself; never swallowed
"""

from __future__ import annotations

from typing import ClassVar


class RetireError(Exception):
    """Base of every error that RETIRE raises on purpose."""


class CallerError(RetireError):
    """The caller can mend this.  `status` is the HTTP status, `kind` the type in vLLM's error body."""

    status: ClassVar[int] = 400
    kind: ClassVar[str] = "BadRequestError"

    def __init__(self, message: str, *, param: str | None = None, current_epoch: int | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.current_epoch = current_epoch


class InvalidRequest(CallerError):
    """Malformed scope, epoch, contract or body."""


class Unauthorized(CallerError):
    """No tenant behind this key."""

    status = 401
    kind = "AuthenticationError"


class NotFound(CallerError):
    """Unknown to this tenant."""

    status = 404
    kind = "NotFoundError"


class EpochConflict(CallerError):
    """The expected epoch is not current, or lies ahead of it; `current_epoch` says which is."""

    status = 409
    kind = "EpochConflictError"


class EpochRevoked(CallerError):
    """The epoch has lost authority, or the scope was cancelled."""

    status = 410
    kind = "EpochRevokedError"


class Unsupported(CallerError):
    """Well-formed, but no configuration of this server can honour it."""

    status = 422
    kind = "UnprocessableEntityError"


class OverLimit(CallerError):
    """The tenant is over one of its limits."""

    status = 429
    kind = "TenantLimitError"


class EngineError(RetireError):
    """The engine is gone."""

    status: ClassVar[int] = 503
    kind: ClassVar[str] = "ServiceUnavailableError"

    def __init__(self, message: str, *, current_epoch: int | None = None) -> None:
        super().__init__(message)
        self.current_epoch = current_epoch


class ProtocolError(RetireError):
    """An event that the transition table does not allow.  The state is unchanged."""


class SeamError(RetireError):
    """vLLM is not what RETIRE was written against."""


class InvariantViolation(AssertionError):
    """One of the numbered invariants does not hold: a defect, not a condition."""
