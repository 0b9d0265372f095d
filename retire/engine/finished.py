"""What requests that finished by themselves have left behind.

Owns: holdings of requests of current epochs that ended before anybody superseded them; nothing pins them, so they are
worth what of their blocks has not been reused by the time somebody asks.  Bounded in tokens, oldest scopes first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import replace

from retire.core.types import Epoch, Holding, ScopeId, TenantId

ScopeKey = tuple[TenantId, ScopeId]
TOKENS_KEPT = 4_194_304  # four bytes each
PER_SCOPE = 8


class Finished:
    """One per scheduler."""

    def __init__(self, tokens_kept: int = TOKENS_KEPT) -> None:
        self._room = tokens_kept
        self._left: OrderedDict[ScopeKey, tuple[Epoch, list[Holding]]] = OrderedDict()

    def keep(self, key: ScopeKey, epoch: Epoch, holding: Holding) -> None:
        """A request of `epoch` has finished.  Epochs before it are forgotten."""
        known, holdings = self._left.get(key, (epoch, []))
        if known != epoch:
            self.forget(key)
            holdings = []
        holdings.append(replace(holding, tokens=array("i", holding.tokens)))
        self._room -= len(holding.tokens)
        if len(holdings) > PER_SCOPE:
            self._room += len(holdings.pop(0).tokens)
        self._left[key] = epoch, holdings
        self._left.move_to_end(key)
        while self._room < 0:
            self.forget(next(iter(self._left)))

    def take(self, key: ScopeKey, epoch: Epoch) -> list[Holding]:
        """What was left in that epoch, handed over."""
        known, holdings = self._left.get(key, (epoch, []))
        self.forget(key)
        return holdings if known == epoch else []

    def forget(self, key: ScopeKey) -> None:
        """Nobody will ask for this scope's any more."""
        _, holdings = self._left.pop(key, (None, []))
        self._room += sum(len(holding.tokens) for holding in holdings)

    def clear(self) -> None:
        """Nothing written so far may be inherited."""
        for key in list(self._left):
            self.forget(key)
