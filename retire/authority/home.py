"""The one authority of this process, and the way to it from the others.

The process that builds the engine's configuration owns the state directory; engine and workers open the mapping that
the environment names.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from retire.authority.store import Authority
from retire.authority.table import AuthorityTable
from retire.core.errors import SeamError
from retire.journal import Kind, note
from retire.settings import TABLE_ENV, Settings
from retire.tenants import Registry

_authority: Authority | None = None
_tenants: Registry | None = None


def own(settings: Settings, registry: Registry) -> Authority:
    """Open the state directory for this process (once) and announce its table to child processes.

    Raises:
        SeamError: another server holds the directory, or it cannot be written.
    """
    global _authority, _tenants  # noqa: PLW0603 - one home per process
    if _authority is None:
        try:
            _authority = Authority.open(
                settings.state_dir,
                tenants=registry.ids,
                scopes_per_tenant=[registry.tenant(tenant).scopes or settings.scopes for tenant in registry.ids],
                rows_per_tenant=settings.rows,
            )
        except OSError as error:
            raise SeamError(f"state directory {settings.state_dir}: {error.strerror or error}") from error
        _tenants = registry
        os.environ[TABLE_ENV] = str(_authority.table_path)
        table.cache_clear()
    return _authority


def owned() -> Authority | None:
    """The authority that this process owns, if it does."""
    return _authority


def tenants() -> Registry:
    """Those that `own` opened the state directory for.  Raises SeamError before that."""
    if _tenants is None:
        raise SeamError("this process does not own the state directory")
    return _tenants


def disown() -> None:
    """Close what `own` opened."""
    global _authority, _tenants  # noqa: PLW0603 - one home per process
    if _authority is not None:
        _authority.close()
        _authority = _tenants = None
        os.environ.pop(TABLE_ENV, None)
        table.cache_clear()


@functools.cache
def table() -> AuthorityTable:
    """The mapping named by the environment.  Raises SeamError when no process of this server owns one."""
    path = os.environ.get(TABLE_ENV)
    if path is None:
        raise SeamError("no authority table: the process that starts the engine was not patched")
    mapped = AuthorityTable.open(Path(path))
    note(Kind.MAPPED, c=mapped.identity)
    return mapped
