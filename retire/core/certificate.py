"""What a successor may inherit: pure arithmetic over tokens, blocks and generations.

Owns: the longest valid prefix, and the reason when there is none (paper 6.1, ALIGN).
Must not know: transitions, pins, time, nor the block pool beyond one question, the current generation of a block.
Strategy: every condition only shortens the prefix or refuses it.  One pass per group finds, for each block, where
the unbroken run of valid blocks that ends there begins; a boundary is good when every group's run reaches back far
enough.  Full attention is the window without end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import lcm

from .types import (
    BlockId,
    BlockRef,
    Certificate,
    Generation,
    Holding,
    KVGroup,
    Refusal,
    ScopeId,
    Successor,
    TokenCount,
    TransitionId,
)

Generations = Callable[[BlockId], Generation]


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
    groups: Sequence[KVGroup],
    generations: Generations,
) -> Certificate | Refusal:
    """The longest prefix of `holding` that `successor` may adopt, or why there is none (invariants 3 and 4).

    Strictly shorter than the successor: at least one token must be computed to have something to sample from.
    """
    if holding.tenant != successor.tenant:
        return Refusal.TENANT
    if holding.fingerprint != successor.fingerprint or len(holding.groups) != len(groups):
        return Refusal.FINGERPRINT
    if boundary(holding.frontier_tokens, groups) == 0:
        return Refusal.NOTHING_COMPLETED
    limit = min(_shared_tokens(holding, successor), len(successor.tokens) - 1)
    if limit < _unit_tokens(groups):
        return Refusal.NO_COMMON_PREFIX
    tokens = _longest_held(holding, boundary(limit, groups), groups, generations)
    if isinstance(tokens, Refusal):
        return tokens
    covered = tuple(_cover(held, group, tokens) for held, group in zip(holding.groups, groups, strict=True))
    return Certificate(
        tenant=holding.tenant,
        scope=scope,
        transfer=transfer,
        source=holding.request,
        target=successor.request,
        tokens=TokenCount(tokens),
        fingerprint=holding.fingerprint,
        groups=covered,
    )


def best(
    holdings: Sequence[Holding],
    successor: Successor,
    *,
    scope: ScopeId,
    transfer: TransitionId,
    groups: Sequence[KVGroup],
    generations: Generations,
) -> tuple[Holding, Certificate] | Refusal:
    """The holding that yields the longest certificate (the first of equals), or the most promising one's refusal."""
    if not holdings:
        return Refusal.NO_PREDECESSOR
    tried = [
        (one, certify(one, successor, scope=scope, transfer=transfer, groups=groups, generations=generations))
        for one in holdings
    ]
    granted = [(one, found) for one, found in tried if isinstance(found, Certificate)]
    if granted:
        return max(granted, key=lambda pair: pair[1].tokens)
    _, refusal = max(tried, key=lambda pair: _shared_tokens(pair[0], successor))
    assert isinstance(refusal, Refusal)
    return refusal


def _unit_tokens(groups: Sequence[KVGroup]) -> int:
    return lcm(*(group.block_tokens for group in groups))


def _shared_tokens(holding: Holding, successor: Successor) -> int:
    """Written tokens that the successor starts with."""
    return min(common_prefix(holding.tokens, successor.tokens), holding.frontier_tokens)


def _first_needed(group: KVGroup, tokens: int) -> int:
    """Index of the first block that the token at position `tokens` attends to."""
    if group.window_tokens is None:
        return 0
    return max(0, tokens - group.window_tokens + 1) // group.block_tokens


def _cover(held: tuple[BlockRef | None, ...], group: KVGroup, tokens: int) -> tuple[BlockRef | None, ...]:
    """The blocks of one group for [0, tokens), None before its window."""
    first, end = _first_needed(group, tokens), tokens // group.block_tokens
    return (None,) * min(first, end) + held[first:end]


def _longest_held(holding: Holding, top: int, groups: Sequence[KVGroup], generations: Generations) -> int | Refusal:
    """The largest common boundary in (0, top] whose needed blocks every group still holds.

    WINDOW_SLID when windows that moved on are the only obstacle at every boundary, else GENERATION.
    """
    unit = _unit_tokens(groups)
    runs = [_runs(held, top // g.block_tokens, generations) for held, g in zip(holding.groups, groups, strict=True)]
    only_windows = True
    for tokens in range(top, 0, -unit):
        held = True
        for group, (valid_from, lost) in zip(groups, runs, strict=True):
            first, end = _first_needed(group, tokens), tokens // group.block_tokens
            if valid_from[end - 1] > first:
                held = False
                only_windows = only_windows and group.window_tokens is not None and not _any_in(lost, first, end)
        if held:
            return tokens
    return Refusal.WINDOW_SLID if only_windows else Refusal.GENERATION


def _any_in(ordered: list[int], first: int, end: int) -> bool:
    return bisect_left(ordered, first) < bisect_left(ordered, end)


def _runs(held: tuple[BlockRef | None, ...], count: int, generations: Generations) -> tuple[list[int], list[int]]:
    """For each of the first `count` blocks, where the run of valid blocks ending there begins (its index + 1 if it
    is not valid itself); and the indices of blocks that are held but belong to another owner by now.
    """
    valid_from: list[int] = []
    lost: list[int] = []
    start = 0
    for index in range(count):
        ref = held[index] if index < len(held) else None
        if ref is None:
            start = index + 1
        elif generations(ref.block) != ref.generation:
            lost.append(index)
            start = index + 1
        valid_from.append(start)
    return valid_from, lost
