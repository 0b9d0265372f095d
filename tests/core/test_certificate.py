"""The certificate's arithmetic, compared with an oracle that looks at one element at a time."""

from __future__ import annotations

import time
from dataclasses import replace
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retire.core import best, boundary, certify, common_prefix
from retire.core.types import (
    BlockId,
    BlockRef,
    Certificate,
    Generation,
    Holding,
    KVGroup,
    Refusal,
    RequestId,
    Successor,
    TenantId,
    TokenCount,
)
from tests.core.world import SCOPE, TENANT, holding, refs, steady, successor, tid

GROUPS = (KVGroup(2),)


def ask(held: Holding, wanted: Successor, groups=GROUPS, generations=steady) -> Certificate | Refusal:
    return certify(held, wanted, scope=SCOPE, transfer=tid("t"), groups=groups, generations=generations)


# Dumb oracle


def slow_prefix(a, b) -> int:
    n = 0
    while n < len(a) and n < len(b) and a[n] == b[n]:
        n += 1
    return n


def slow_certify(held: Holding, wanted: Successor, groups, current) -> int | Refusal:
    """Tries every token count from the top and every position of every window."""
    if held.tenant != wanted.tenant:
        return Refusal.TENANT
    if held.fingerprint != wanted.fingerprint or len(held.groups) != len(groups):
        return Refusal.FINGERPRINT
    unit = lcm(*(g.block_tokens for g in groups))
    if held.frontier_tokens < unit:
        return Refusal.NOTHING_COMPLETED
    top = min(slow_prefix(held.tokens, wanted.tokens), held.frontier_tokens, len(wanted.tokens) - 1)
    if top < unit:
        return Refusal.NO_COMMON_PREFIX
    only_windows = True
    for p in range(top, 0, -1):
        if p % unit:
            continue
        obstacles = {
            obstacle
            for g, blocks in zip(groups, held.groups, strict=True)
            for position in range(p)
            if is_attended(position, g, p) and (obstacle := slow_obstacle(position, g, blocks, current))
        }
        if not obstacles:
            return p
        only_windows = only_windows and obstacles == {"slid"}
    return Refusal.WINDOW_SLID if only_windows else Refusal.GENERATION


def is_attended(position: int, group: KVGroup, end: int) -> bool:
    return group.window_tokens is None or position >= end - group.window_tokens + 1


def slow_obstacle(position: int, group: KVGroup, blocks, current) -> str | None:
    index = position // group.block_tokens
    ref = blocks[index] if index < len(blocks) else None
    if ref is None:
        return "absent" if group.window_tokens is None else "slid"
    return None if current[ref.block] == ref.generation else "generation"


WINDOWS = st.one_of(st.none(), st.integers(1, 9))


@st.composite
def cases(draw):
    """Mostly a long shared prefix that is mostly written, so that windows and generations decide."""
    sizes = draw(st.sampled_from([(1, 1, 1), (2, 1, 2), (2, 4, 1), (2, 3, 1), (4, 4, 2)]))
    groups = tuple(KVGroup(size, draw(WINDOWS)) for size in sizes[: draw(st.integers(1, 3))])
    length = draw(st.integers(0, 24))
    tokens = tuple(range(length))
    shared = length - draw(st.sampled_from([0, 0, 1, 3, length]))
    wanted_tokens = (*tokens[: max(0, shared)], *draw(st.lists(st.just(-1), max_size=3)))
    frontier = max(0, length - draw(st.sampled_from([0, 0, 0, 2, 7, length])))
    current: dict[BlockId, Generation] = {}
    held_groups = []
    for number, group in enumerate(groups):
        count = -(-frontier // group.block_tokens)
        slid = draw(st.sampled_from([0, 0, 1, 3, count])) if group.window_tokens is not None else 0
        changed = draw(st.sets(st.integers(0, max(0, count - 1)), max_size=2))
        row: list[BlockRef | None] = []
        for index in range(count):
            block = BlockId(100 * number + index)
            current[block] = Generation(2 if index in changed else 1)
            row.append(None if index < slid else BlockRef(block, Generation(1)))
        held_groups.append(tuple(row))
    held = Holding(RequestId("old"), TENANT, tokens, TokenCount(frontier), "f", tuple(held_groups))
    other = draw(st.sampled_from(["same"] * 18 + ["tenant", "fingerprint"]))
    wanted = Successor(
        RequestId("new"),
        TenantId("rival") if other == "tenant" else TENANT,
        wanted_tokens,
        "g" if other == "fingerprint" else "f",
    )
    return held, wanted, groups, current


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40), st.integers(0, 40))
def test_the_common_prefix_is_the_slow_one(a, b, shared):
    b = a[:shared] + b
    assert common_prefix(a, b) == common_prefix(tuple(a), b) == common_prefix(tuple(a), tuple(b)) == slow_prefix(a, b)


@pytest.mark.parametrize("differ_at", [0, 1, 4999, 9998, 9999, 10_000])
def test_ten_thousand_tokens_take_no_python_loop(differ_at):
    a = [10_000 + i for i in range(10_000)]
    b = [10_000 + i for i in range(10_000)]
    if differ_at < len(b):
        b[differ_at] = -1
    best_s = min(timed(lambda: common_prefix(a, b), differ_at) for _ in range(5))
    assert best_s < 0.005


def timed(call, expected) -> float:
    start_s = time.perf_counter()
    assert call() == expected
    return time.perf_counter() - start_s


@given(st.integers(0, 200), st.lists(st.integers(1, 12), min_size=1, max_size=3))
def test_a_boundary_is_the_largest_multiple_of_every_block_size(tokens, sizes):
    found = boundary(tokens, [KVGroup(size) for size in sizes])
    assert found == max(p for p in range(tokens + 1) if all(p % size == 0 for size in sizes))


@settings(max_examples=500)
@given(cases())
def test_a_certificate_is_what_the_oracle_grants(case):
    held, wanted, groups, current = case
    found = ask(held, wanted, groups, current.__getitem__)
    expected = slow_certify(held, wanted, groups, current)
    assert (found.tokens if isinstance(found, Certificate) else found) == expected


@settings(max_examples=500)
@given(cases())
def test_a_certificate_covers_exactly_the_windows(case):
    held, wanted, groups, current = case
    found = ask(held, wanted, groups, current.__getitem__)
    if isinstance(found, Refusal):
        return
    assert 0 < found.tokens < len(wanted.tokens)
    for group, blocks, owned in zip(groups, found.groups, held.groups, strict=True):
        assert len(blocks) * group.block_tokens == found.tokens
        for index, ref in enumerate(blocks):
            last_position = (index + 1) * group.block_tokens - 1
            needed = group.window_tokens is None or last_position >= found.tokens - group.window_tokens + 1
            assert ref == (owned[index] if needed else None)
            assert ref is None or current[ref.block] == ref.generation


@given(st.lists(cases(), min_size=1, max_size=4))
def test_the_best_holding_is_no_shorter_than_any_other(many):
    _, wanted, groups, _ = many[0]
    current: dict[BlockId, Generation] = {}
    holdings = []
    for number, (held, _, _, generations) in enumerate(many):
        shift = 1000 * number
        current |= {BlockId(b + shift): g for b, g in generations.items()}
        shifted = tuple(
            tuple(None if r is None else BlockRef(BlockId(r.block + shift), r.generation) for r in row)
            for row in held.groups
        )
        holdings.append(replace(held, request=RequestId(f"old{number}"), groups=shifted))
    each = [ask(held, wanted, groups, current.__getitem__) for held in holdings]
    found = best(holdings, wanted, scope=SCOPE, transfer=tid("t"), groups=groups, generations=current.__getitem__)
    granted = [one for one in each if isinstance(one, Certificate)]
    if granted:
        held, certificate = found
        assert certificate.tokens == max(one.tokens for one in granted)
        assert certificate.source == held.request
        assert each[holdings.index(held)] == certificate
    else:
        assert found in each


# Named refusals


def test_no_holding_has_no_predecessor():
    found = best((), successor("n"), scope=SCOPE, transfer=tid("t"), groups=GROUPS, generations=steady)
    assert found is Refusal.NO_PREDECESSOR


def test_the_refusal_is_that_of_the_most_promising_holding():
    far = holding("far", (9, 9, 9, 9), fingerprint="other")
    near = holding("near", (1, 2, 3, 4), tenant="rival")
    found = best((far, near), successor("n"), scope=SCOPE, transfer=tid("t"), groups=GROUPS, generations=steady)
    assert found is Refusal.TENANT


@pytest.mark.parametrize(
    ("held", "wanted", "reason"),
    [
        (holding("o", tenant="rival"), successor("n"), Refusal.TENANT),
        (holding("o", fingerprint="g"), successor("n"), Refusal.FINGERPRINT),
        (holding("o", groups=()), successor("n"), Refusal.FINGERPRINT),
        (holding("o", frontier=1), successor("n"), Refusal.NOTHING_COMPLETED),
        (holding("o", (1, 7, 7, 7)), successor("n"), Refusal.NO_COMMON_PREFIX),
        (holding("o"), successor("n", (1, 2)), Refusal.NO_COMMON_PREFIX),
        (holding("o", groups=(refs(range(4), generation=2),)), successor("n"), Refusal.GENERATION),
    ],
)
def test_every_refusal_names_its_reason(held, wanted, reason):
    """Invariant 10."""
    assert ask(held, wanted) is reason


def test_one_token_is_always_left_to_compute():
    same = (1, 2, 3, 4)
    found = ask(holding("o", same), successor("n", same))
    assert isinstance(found, Certificate)
    assert found.tokens == 2


def test_a_block_that_changed_hands_shortens_the_prefix():
    found = ask(holding("o"), successor("n"), generations=lambda b: Generation(2 if b == 101 else 1))
    assert isinstance(found, Certificate)
    assert found.tokens == 2


HYBRID = (KVGroup(2), KVGroup(2, window_tokens=3))


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ((None, None, 22, 23), (6, (None, None, 22))),
        ((20, None, 22, 23), (6, (None, None, 22))),
        ((20, 21, None, 23), (4, (None, 21))),
        ((20, None, None, 23), (2, (20,))),
        ((None, None, None, 23), Refusal.WINDOW_SLID),
    ],
)
def test_a_window_that_slid_costs_the_boundaries_it_no_longer_covers(window, expected):
    held = holding("o", groups=(refs(range(10, 14)), refs(window)))
    found = ask(held, successor("n"), HYBRID)
    if isinstance(expected, Refusal):
        assert found is expected
    else:
        tokens, blocks = expected
        assert isinstance(found, Certificate)
        assert (found.tokens, found.groups[1]) == (tokens, refs(blocks))


@pytest.mark.parametrize(("window_tokens", "left_out"), [(1, 6), (2, 5), (3, 4), (6, 1), (7, 0), (8, 0)])
def test_the_window_of_the_first_computed_token_is_covered_to_the_position(window_tokens, left_out):
    """The token at position 6 attends to itself and to the window's other positions before it."""
    groups = (KVGroup(1, window_tokens),)
    found = ask(holding("o", groups=(refs(range(8)),)), successor("n"), groups)
    assert isinstance(found, Certificate)
    assert found.groups == (refs([*[None] * left_out, *range(left_out, 6)]),)


def test_a_missing_block_of_full_attention_is_no_slid_window():
    found = ask(holding("o", groups=(refs((None, 1, 2, 3)),)), successor("n"))
    assert found is Refusal.GENERATION


def test_a_block_that_changed_hands_inside_a_window_is_named_before_the_slide():
    groups = (KVGroup(2, window_tokens=5),)
    held = holding("o", groups=(refs((None, None, 22, 23)),))
    assert ask(held, successor("n"), groups) is Refusal.WINDOW_SLID
    assert ask(held, successor("n"), groups, lambda b: Generation(2 if b == 22 else 1)) is Refusal.GENERATION


def test_a_window_is_not_blamed_for_a_block_that_changed_hands():
    held = holding("o", groups=(refs(range(10, 14)), refs((None, None, None, 23))))
    found = ask(held, successor("n"), HYBRID, lambda b: Generation(2 if b == 10 else 1))
    assert found is Refusal.GENERATION


def test_a_long_hybrid_holding_is_certified_quickly():
    tokens = list(range(10_000))
    sliding = tuple(None if i < 600 else BlockRef(BlockId(i), Generation(1)) for i in range(625))
    full = refs(range(1000, 1625))
    held = holding("o", tokens, groups=(full, *[sliding] * 5))
    groups = (KVGroup(16), *[KVGroup(16, 512)] * 5)
    best_s = min(timed(lambda: ask(held, successor("n", [*tokens, 1]), groups), Refusal.WINDOW_SLID) for _ in range(3))
    assert best_s < 0.1
