"""What a successor may inherit: pure arithmetic over tokens, blocks and generations.

Owns: the longest valid prefix, and the reason when there is none (paper 6.1, ALIGN).
Must not know: transitions, pins, time, nor the engine beyond what `Geometry` answers.
Strategy: every condition only shortens the prefix or refuses it.  One pass per group finds, for each page, where
the unbroken run of valid pages that ends there begins; a boundary is good when every group's run reaches back far
enough.  Full attention is the window without end.  Device blocks and the copy in host memory are tried alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import TypeVar

from .types import (
    BlockId,
    BlockRef,
    Certificate,
    Equivalence,
    Generation,
    Holding,
    HostRef,
    KVGroup,
    PageRef,
    Refusal,
    ScopeId,
    Successor,
    Tier,
    TokenCount,
    TransitionId,
)

Page = TypeVar("Page", bound=BlockRef | HostRef)


def _always_pays(tokens: TokenCount, tier: Tier) -> bool:  # noqa: ARG001  the question's signature
    return True


@dataclass(frozen=True, slots=True)
class Geometry:
    """What ALIGN asks the engine.

    `generations`: which generation a block has now.  `exact_tokens`: on which token grid a prefix must end so that its
    reuse equals a cold run bit for bit; None where the configuration cannot promise it.  `pays`: whether reusing so
    many tokens from that tier is faster than computing them.  `offloads`: whether there is host memory to copy to.
    """

    groups: Sequence[KVGroup]
    generations: Callable[[BlockId], Generation]
    exact_tokens: int | None = None
    pays: Callable[[TokenCount, Tier], bool] = _always_pays
    offloads: bool = False


def common_prefix(a: Sequence[int], b: Sequence[int]) -> TokenCount:
    """How many leading tokens are equal.  Halves the uncertain span, so elements are compared in C, about once each."""
    if type(a) is not type(b) or not isinstance(a, (list, tuple)):
        a, b = list(a), list(b)  # slices of different types never compare equal
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return TokenCount(high)
    while high - low > 1:  # a[:low] == b[:low] and a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return TokenCount(low)


def boundary(tokens: int, groups: Sequence[KVGroup]) -> int:
    """`tokens` rounded down to a block boundary common to all groups."""
    return tokens - tokens % _unit_tokens(groups)


def certify(
    holding: Holding,
    successor: Successor,
    *,
    scope: ScopeId,
    transfer: TransitionId,
    equivalence: Equivalence,
    env: Geometry,
) -> Certificate | Refusal:
    """The longest prefix of `holding` that `successor` may adopt, or why there is none (invariants 3 and 4).

    Strictly shorter than the successor: at least one token must be computed to have something to sample from.
    """
    if holding.tenant != successor.tenant:
        return Refusal.TENANT
    if holding.fingerprint != successor.fingerprint or len(holding.groups) != len(env.groups):
        return Refusal.FINGERPRINT
    if boundary(holding.frontier_tokens, env.groups) == 0:
        return Refusal.NOTHING_COMPLETED
    limit = min(_shared_tokens(holding, successor), len(successor.tokens) - 1)
    unit = _unit_tokens(env.groups)
    if limit < unit:
        return Refusal.NO_COMMON_PREFIX
    if equivalence is Equivalence.EXACT:
        if env.exact_tokens is None:
            return Refusal.EXACT_UNAVAILABLE
        unit, limit = lcm(unit, env.exact_tokens), min(limit, holding.grid_tokens)
        if limit < unit:
            return Refusal.OFF_GRID
    found = _from_either_tier(holding, limit - limit % unit, unit, env)
    if isinstance(found, Refusal):
        return found
    tokens, tier = found
    pages: Sequence[Sequence[BlockRef | HostRef | None]] = holding.groups if tier is Tier.HBM else holding.host or ()
    covered = [_cover(held, group, tokens) for held, group in zip(pages, env.groups, strict=True)]
    return Certificate(
        tenant=holding.tenant,
        scope=scope,
        transfer=transfer,
        source=holding.request,
        target=successor.request,
        tokens=tokens,
        fingerprint=holding.fingerprint,
        groups=tuple(covered),
        tier=tier,
    )


def best(
    holdings: Sequence[Holding],
    successor: Successor,
    *,
    scope: ScopeId,
    transfer: TransitionId,
    equivalence: Equivalence,
    env: Geometry,
) -> tuple[Holding, Certificate] | Refusal:
    """The holding that yields the longest certificate, or the most promising one's refusal.

    Of equals one on the device, and of these the first.
    """
    if not holdings:
        return Refusal.NO_PREDECESSOR
    tried = [
        (one, certify(one, successor, scope=scope, transfer=transfer, equivalence=equivalence, env=env))
        for one in holdings
    ]
    granted = [(one, found) for one, found in tried if isinstance(found, Certificate)]
    if granted:
        return max(granted, key=lambda pair: (pair[1].tokens, pair[1].tier is Tier.HBM))
    _, refusal = max(tried, key=lambda pair: _shared_tokens(pair[0], successor))
    assert isinstance(refusal, Refusal)
    return refusal


def promised(holding: Holding, tokens: TokenCount, groups: Sequence[KVGroup], grid_tokens: int = 1) -> Holding:
    """`holding` cut to the pages that a successor may adopt which shares `tokens` tokens with it.

    Windows are covered for the one boundary that this promises, a multiple of `grid_tokens`.
    """
    kept: int = min(tokens, holding.frontier_tokens)
    kept -= kept % lcm(_unit_tokens(groups), grid_tokens)
    return replace(
        holding,
        frontier_tokens=TokenCount(kept),
        grid_tokens=TokenCount(min(holding.grid_tokens, kept)),
        groups=tuple(_cover(held, group, kept) for held, group in zip(holding.groups, groups, strict=True)),
    )


def _from_either_tier(holding: Holding, top: int, unit: int, env: Geometry) -> tuple[TokenCount, Tier] | Refusal:
    """The longer of what the device still holds and what host memory does; the device wins a draw."""
    found: list[tuple[TokenCount, Tier]] = []
    refusal = None
    for tier, pages in ((Tier.HBM, holding.groups), (Tier.DRAM, holding.host)):
        if pages is None:
            continue
        tokens = _longest_held(pages, top, unit, env)
        if isinstance(tokens, Refusal):
            refusal = refusal or tokens
        elif env.pays(tokens, tier):
            found.append((tokens, tier))
        else:
            refusal = Refusal.UNPROFITABLE
    if found:
        return max(found, key=lambda one: one[0])
    assert refusal is not None, "the device's blocks were tried"
    return refusal


def _unit_tokens(groups: Sequence[KVGroup]) -> int:
    return lcm(*(group.block_tokens for group in groups))


def _shared_tokens(holding: Holding, successor: Successor) -> int:
    """Written tokens that the successor starts with."""
    return min(common_prefix(holding.tokens, successor.tokens), holding.frontier_tokens)


def first_needed(group: KVGroup, tokens: int) -> int:
    """Index of the first block that the token at position `tokens` attends to."""
    if group.window_tokens is None:
        return 0
    return max(0, tokens - group.window_tokens + 1) // group.block_tokens


def _cover(held: Sequence[Page | None], group: KVGroup, tokens: int) -> tuple[Page | None, ...]:
    """The pages of one group for [0, tokens), None before its window."""
    first, end = first_needed(group, tokens), tokens // group.block_tokens
    return (None,) * min(first, end) + tuple(held[first:end])


def _longest_held(pages: Sequence[Sequence[PageRef]], top: int, unit: int, env: Geometry) -> TokenCount | Refusal:
    """The largest multiple of `unit` in (0, top] whose needed pages every group still holds.

    WINDOW_SLID when windows that moved on are the only obstacle at every boundary, else GENERATION.
    """
    runs = [_runs(held, top // g.block_tokens, env) for held, g in zip(pages, env.groups, strict=True)]
    only_windows = True
    for tokens in range(top, 0, -unit):
        held = True
        for group, (valid_from, lost) in zip(env.groups, runs, strict=True):
            first, end = first_needed(group, tokens), tokens // group.block_tokens
            if valid_from[end - 1] > first:
                held = False
                only_windows = only_windows and group.window_tokens is not None and not _any_in(lost, first, end)
        if held:
            return TokenCount(tokens)
    return Refusal.WINDOW_SLID if only_windows else Refusal.GENERATION


def _any_in(ordered: list[int], first: int, end: int) -> bool:
    return bisect_left(ordered, first) < bisect_left(ordered, end)


def _runs(held: Sequence[PageRef], count: int, env: Geometry) -> tuple[list[int], list[int]]:
    """For each of the first `count` pages, where the run of valid pages ending there begins (its index + 1 if it
    is not valid itself); and the indices of blocks that are held but belong to another owner by now.
    """
    valid_from: list[int] = []
    lost: list[int] = []
    start = 0
    for index in range(count):
        page = held[index] if index < len(held) else None
        if page is None:
            start = index + 1
        elif isinstance(page, BlockRef) and env.generations(page.block) != page.generation:
            lost.append(index)
            start = index + 1
        valid_from.append(start)
    return valid_from, lost
