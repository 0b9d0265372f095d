"""The one authority of this process, and the way to it from the others.

The process that builds the engine's configuration owns the state directory; engine and workers open the mapping that
the environment names.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path

from retire.authority.store import Authority
from retire.authority.table import AuthorityTable
from retire.core.errors import SeamError
from retire.core.types import TenantId
from retire.settings import TABLE_ENV, Settings

asking: ContextVar[TenantId | None] = ContextVar("retire_asking", default=None)
"""Whose request this task works for, as authenticated by the gate."""

_authority: Authority | None = None


def own(settings: Settings, tenants: Sequence[str]) -> Authority:
    """Open the state directory for this process (once) and announce its table to child processes.

    Raises:
        SeamError: another server holds the directory, or it cannot be written.
    """
    global _authority  # noqa: PLW0603 - one home per process
    if _authority is None:
        try:
            _authority = Authority.open(
                settings.state_dir, tenants=tenants, scopes_per_tenant=settings.scopes, rows=settings.rows
            )
        except OSError as error:
            raise SeamError(f"state directory {settings.state_dir}: {error.strerror or error}") from error
        os.environ[TABLE_ENV] = str(_authority.table_path)
        table.cache_clear()
    return _authority


def owned() -> Authority | None:
    """The authority that this process owns, if it does."""
    return _authority


def disown() -> None:
    """Close what `own` opened."""
    global _authority  # noqa: PLW0603 - one home per process
    if _authority is not None:
        _authority.close()
        _authority = None
        os.environ.pop(TABLE_ENV, None)
        table.cache_clear()


@functools.cache
def table() -> AuthorityTable:
    """The mapping named by the environment.  Raises SeamError when no process of this server owns one."""
    path = os.environ.get(TABLE_ENV)
    if path is None:
        raise SeamError("no authority table: the process that starts the engine was not patched")
    return AuthorityTable.open(Path(path))
