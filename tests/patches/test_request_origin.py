"""Whose cache an engine request uses: derived where every front end passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from retire.authority import home
from retire.authority.tag import Tag, to_xargs
from retire.core.types import TenantId
from retire.settings import Settings
from retire.tenants import Registry, Tenant, asking
from vllm_patches import request_origin

ACME, BETA = TenantId("acme"), TenantId("beta")
Salted = Callable[..., str | None]


def upstream(_self: object, _request_id: str, prompt: str | None, _params: object) -> SimpleNamespace:
    return SimpleNamespace(cache_salt=prompt)


def salted_with(folder: Path, registry: Registry) -> Iterator[Salted]:
    home.own(Settings(folder, scopes=4, rows=4), registry)
    patched = request_origin.build(upstream)

    def salted(own: str | None = None, *, extra_args: dict[str, object] | None = None) -> str | None:
        salt: str | None = patched(None, "r", own, SimpleNamespace(extra_args=extra_args)).cache_salt
        return salt

    try:
        yield salted
    finally:
        asking.set(None)
        home.disown()


@pytest.fixture
def isolated(tmp_path: Path) -> Iterator[Salted]:
    yield from salted_with(tmp_path, Registry([Tenant(ACME), Tenant(BETA)], isolated=True))


@pytest.fixture
def single(tmp_path: Path) -> Iterator[Salted]:
    yield from salted_with(tmp_path, Registry.single())


def test_a_salt_is_its_tenants_and_holds_the_clients_own(isolated: Salted) -> None:
    salts = {}
    for tenant in (ACME, BETA):
        asking.set(tenant)
        for own in (None, "x", "y"):
            salts[tenant, own] = isolated(own)
            assert isolated(own) == salts[tenant, own]
    assert len(set(salts.values())) == 6
    assert not {None, "x", "y"} & set(salts.values())


def test_tasks_carry_the_tenant_along_and_whatever_lost_it_shares_with_nobody(isolated: Salted) -> None:
    async def everywhere() -> list[str | None]:
        asking.set(ACME)
        in_task = await asyncio.create_task(asyncio.to_thread(isolated))
        lost = [await asyncio.get_running_loop().run_in_executor(None, isolated) for _ in range(2)]
        return [isolated(), in_task, *lost]

    here, in_task, *lost = asyncio.run(everywhere())
    assert here == in_task
    assert len({here, *lost, isolated()}) == 4


def test_a_ticket_says_whose_it_is_wherever_it_is_read(isolated: Salted) -> None:
    authority = home.owned()
    assert authority is not None
    view = authority.resolve(BETA, "s")
    ticket = authority.issue(view)
    tag = to_xargs(Tag(view.tenant, view.scope, view.epoch, ticket), authority.secret)
    lost = isolated(extra_args=tag)
    asking.set(BETA)
    assert lost == isolated() == isolated(extra_args=tag)


def test_a_server_with_one_tenant_leaves_salts_as_they_are(single: Salted) -> None:
    for tenant in (None, ACME):
        asking.set(tenant)
        assert [single(own) for own in (None, "x")] == [None, "x"]
