from __future__ import annotations
from dataclasses import dataclass
from typing import Literal

from retire.core.types import TenantId

@dataclass(frozen=True)
class Tenant:
    id: TenantId
    beyond_quota: Literal["best_effort", "cold"] = "best_effort"
    def pin_quota(self, pool_blocks: int) -> int:
        return pool_blocks // 2

class Registry:
    @classmethod
    def from_env(cls) -> Registry:
        return cls()
    def tenant(self, tenant: TenantId) -> Tenant:
        return Tenant(tenant)
