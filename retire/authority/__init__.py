"""Who may still have effects: the mapped table that every gate reads, and the durable record behind it."""

from retire.authority.record import Idempotent
from retire.authority.store import Advanced, Authority, ScopeStatus, ScopeView, validate_epoch, validate_scope
from retire.authority.table import UNLIMITED, AuthorityTable

__all__ = [
    "UNLIMITED",
    "Advanced",
    "Authority",
    "AuthorityTable",
    "Idempotent",
    "ScopeStatus",
    "ScopeView",
    "validate_epoch",
    "validate_scope",
]
