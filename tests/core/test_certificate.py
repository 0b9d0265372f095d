"""The certificate's arithmetic, compared with an oracle that looks at one element at a time."""

from __future__ import annotations

import time
from dataclasses import replace
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retire.core import Geometry, best, boundary, common_prefix, promised
from retire.core.types import (
    BlockId,
    BlockRef,
    Certificate,
    Equivalence,
    Generation,
    Holding,
    HostRef,
    KVGroup,
    Refusal,
    RequestId,
    Successor,
    TenantId,
    Tier,
    TokenCount,
)
from tests.core.world import (
    COMMON,
    ENV,
    SCOPE,
    TENANT,
    certificate_of,
    geometry,
    holding,
    host_of,
    refs,
    reused,
    steady,
    successor,
    tid,
)

GROUPS = (KVGroup(2),)
EXACT, MODE_MATCHED = Equivalence.EXACT, Equivalence.MODE_MATCHED


def ask(held: Holding, wanted: Successor, groups=GROUPS, generations=steady) -> Certificate | Refusal:
    return certificate_of(held, wanted, geometry(groups, generations))


def choose(held, wanted: Successor, env: Geometry = ENV, equivalence: Equivalence = MODE_MATCHED):
    return best(held, wanted, scope=SCOPE, transfer=tid("t12"), equivalence=equivalence, env=env)


# Dumb oracle


def slow_prefix(a, b) -> int:
    n = 0
    while n < len(a) and n < len(b) and a[n] == b[n]:
        n += 1
    return n


def slow_certify(held: Holding, wanted: Successor, equivalence, env) -> tuple[int, Tier] | Refusal:
    """Tries both tiers, every token count from the top and every position of every window."""
    if held.tenant != wanted.tenant:
        return Refusal.TENANT
    if held.fingerprint != wanted.fingerprint or len(held.groups) != len(env.groups):
        return Refusal.FINGERPRINT
    unit = lcm(*(g.block_tokens for g in env.groups))
    if held.frontier_tokens < unit:
        return Refusal.NOTHING_COMPLETED
    top = min(slow_prefix(held.tokens, wanted.tokens), held.frontier_tokens, len(wanted.tokens) - 1)
    if top < unit:
        return Refusal.NO_COMMON_PREFIX
    boundaries = [p for p in range(top, 0, -1) if p % unit == 0]
    if equivalence is EXACT:
        if env.exact_tokens is None:
            return Refusal.EXACT_UNAVAILABLE
        boundaries = [p for p in boundaries if p % env.exact_tokens == 0 and p <= held.grid_tokens]
        if not boundaries:
            return Refusal.OFF_GRID
    device = slow_tier(held.groups, boundaries, env)
    host = slow_tier(held.host, boundaries, env) if held.host is not None else None
    offers = [(tokens, tier) for tokens, tier in ((device, Tier.HBM), (host, Tier.DRAM)) if isinstance(tokens, int)]
    paying = [offer for offer in offers if env.pays(*offer)]
    if paying:
        longest = max(tokens for tokens, _ in paying)
        return next(offer for offer in paying if offer[0] == longest)
    return Refusal.UNPROFITABLE if offers else device


def slow_tier(pages, boundaries, env) -> int | Refusal:
    only_windows = True
    for p in boundaries:
        obstacles = {
            obstacle
            for g, row in zip(env.groups, pages, strict=True)
            for position in range(p)
            if is_attended(position, g, p) and (obstacle := slow_obstacle(position, g, row, env))
        }
        if not obstacles:
            return p
        only_windows = only_windows and obstacles == {"slid"}
    return Refusal.WINDOW_SLID if only_windows else Refusal.GENERATION


def is_attended(position: int, group: KVGroup, end: int) -> bool:
    return group.window_tokens is None or position >= end - group.window_tokens + 1


def slow_obstacle(position: int, group: KVGroup, row, env) -> str | None:
    index = position // group.block_tokens
    page = row[index] if index < len(row) else None
    if page is None:
        return "absent" if group.window_tokens is None else "slid"
    return None if isinstance(page, HostRef) or env.generations(page.block) == page.generation else "generation"


WINDOWS = st.one_of(st.none(), st.integers(1, 9))


@st.composite
def cases(draw):
    """Mostly a long shared prefix that is mostly written, so that windows, generations, copies and grids decide.

    Blocks before a window are absent, or still there and valid, or there and reused: whoever is no longer guaranteed.
    """
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
    host = draw(st.sampled_from([None, None, "complete", "gaps"]))
    gaps = draw(st.sets(st.sampled_from(sorted(current)), max_size=2)) if host == "gaps" and current else ()
    held = Holding(
        RequestId("old"),
        TENANT,
        tokens,
        TokenCount(frontier),
        "f",
        tuple(held_groups),
        TokenCount(draw(st.integers(0, frontier))),
        host=None if host is None else host_of(held_groups, gaps),
    )
    other = draw(st.sampled_from(["same"] * 18 + ["tenant", "fingerprint"]))
    wanted = Successor(
        RequestId("new"),
        TenantId("rival") if other == "tenant" else TENANT,
        wanted_tokens,
        "g" if other == "fingerprint" else "f",
    )
    least = {tier: draw(st.sampled_from([0, 0, 0, 4, 12])) for tier in Tier}
    env = Geometry(
        groups,
        current.__getitem__,
        draw(st.sampled_from([None, 1, 3, 4, 6])),
        lambda tokens, tier: tokens >= least[tier],
    )
    return held, wanted, draw(st.sampled_from([MODE_MATCHED, MODE_MATCHED, EXACT])), env, current


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
    held, wanted, equivalence, env, _ = case
    found = certificate_of(held, wanted, env, equivalence=equivalence)
    expected = slow_certify(held, wanted, equivalence, env)
    assert ((found.tokens, found.tier) if isinstance(found, Certificate) else found) == expected


@settings(max_examples=500)
@given(cases())
def test_a_certificate_covers_exactly_the_windows_with_pages_of_one_tier(case):
    held, wanted, equivalence, env, _ = case
    found = certificate_of(held, wanted, env, equivalence=equivalence)
    if isinstance(found, Refusal):
        return
    assert 0 < found.tokens < len(wanted.tokens)
    assert equivalence is MODE_MATCHED or found.tokens <= held.grid_tokens
    pages = held.groups if found.tier is Tier.HBM else held.host
    for group, certified, owned in zip(env.groups, found.groups, pages, strict=True):
        assert len(certified) * group.block_tokens == found.tokens
        for index, page in enumerate(certified):
            last_position = (index + 1) * group.block_tokens - 1
            needed = group.window_tokens is None or last_position >= found.tokens - group.window_tokens + 1
            assert page == (owned[index] if needed else None)
            assert page is None or isinstance(page, HostRef) or env.generations(page.block) == page.generation


@given(st.lists(cases(), min_size=1, max_size=4))
def test_the_best_holding_is_no_shorter_than_any_other(many):
    _, wanted, equivalence, env, _ = many[0]
    current: dict[BlockId, Generation] = {}
    holdings = []
    for number, (held, _, _, _, generations) in enumerate(many):
        shift = 1000 * number
        current |= {BlockId(b + shift): g for b, g in generations.items()}
        shifted = tuple(
            tuple(None if r is None else BlockRef(BlockId(r.block + shift), r.generation) for r in row)
            for row in held.groups
        )
        holdings.append(replace(held, request=RequestId(f"old{number}"), groups=shifted))
    env = replace(env, generations=current.__getitem__)
    each = [certificate_of(held, wanted, env, equivalence=equivalence) for held in holdings]
    found = choose(holdings, wanted, env, equivalence)
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
    assert choose((), successor("n")) is Refusal.NO_PREDECESSOR


def test_the_refusal_is_that_of_the_most_promising_holding():
    far = holding("far", (9, 9, 9, 9), fingerprint="other")
    near = holding("near", (1, 2, 3, 4), tenant="rival")
    assert choose((far, near), successor("n")) is Refusal.TENANT


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
    found = ask(holding("o"), successor("n"), generations=reused(101))
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
    assert ask(held, successor("n"), groups, reused(22)) is Refusal.GENERATION


def test_a_window_is_not_blamed_for_a_block_that_changed_hands():
    held = holding("o", groups=(refs(range(10, 14)), refs((None, None, None, 23))))
    found = ask(held, successor("n"), HYBRID, reused(10))
    assert found is Refusal.GENERATION


def test_a_long_hybrid_holding_is_certified_quickly():
    tokens = list(range(10_000))
    sliding = tuple(None if i < 600 else BlockRef(BlockId(i), Generation(1)) for i in range(625))
    full = refs(range(1000, 1625))
    held = holding("o", tokens, groups=(full, *[sliding] * 5))
    groups = (KVGroup(16), *[KVGroup(16, 512)] * 5)
    best_s = min(timed(lambda: ask(held, successor("n", [*tokens, 1]), groups), Refusal.WINDOW_SLID) for _ in range(3))
    assert best_s < 0.1


# Soft blocks: some of what a holding lists has been reused


@pytest.mark.parametrize(
    ("lost", "tokens"), [((), 6), ((102,), 4), ((101,), 2), ((101, 102), 2), ((103,), 6), ((103, 102), 4)]
)
def test_the_first_lost_block_ends_the_prefix(lost, tokens):
    found = ask(holding("o"), successor("n"), generations=reused(*lost))
    assert found.tokens == tokens


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        ((), 6),
        ((20, 21), 6),  # before the window of the longest prefix
        ((22,), 4),  # the window of 4 has slid out of need, and is still there
        ((22, 21), 2),
        ((12,), 4),
        ((12, 21), 2),
        ((10,), Refusal.GENERATION),
        ((20, 21, 22), Refusal.GENERATION),
    ],
)
def test_blocks_that_a_window_has_passed_serve_while_nobody_else_owns_them(lost, expected):
    held = holding("o", groups=(refs(range(10, 14)), refs(range(20, 24))))
    found = ask(held, successor("n"), HYBRID, reused(*lost))
    assert (found if isinstance(found, Refusal) else found.tokens) == expected


def test_blocks_that_slid_away_and_blocks_that_were_reused_together_are_named_as_reused():
    held = holding("o", groups=(refs(range(10, 14)), refs((None, None, 22, 23))))
    assert ask(held, successor("n"), HYBRID, reused(22)) is Refusal.GENERATION


# Exact equivalence


def exactly(held: Holding, wanted: Successor, env: Geometry) -> Certificate | Refusal:
    return certificate_of(held, wanted, env, equivalence=EXACT)


@pytest.mark.parametrize(
    ("sizes", "grid_every", "grid_tokens", "expected"),
    [
        ((2,), 4, 24, 20),  # 23 tokens shared
        ((2,), 4, 20, 20),
        ((2,), 4, 19, 16),
        ((2,), 5, 24, 20),  # every 10: block 2, grid 5
        ((4,), 6, 24, 12),  # every 12
        ((4,), 6, 11, Refusal.OFF_GRID),
        ((2, 3), 4, 24, 12),  # every 12: blocks 2 and 3, grid 4
        ((2, 3), 5, 24, Refusal.OFF_GRID),  # every 30
        ((2,), 1, 24, 22),
        ((2,), 1, 0, Refusal.OFF_GRID),
        ((2,), None, 24, Refusal.EXACT_UNAVAILABLE),
    ],
)
def test_an_exact_prefix_ends_on_a_multiple_of_blocks_and_grid_within_clean_chunks(
    sizes, grid_every, grid_tokens, expected
):
    tokens = tuple(range(24))
    groups = tuple(refs(range(100 * number, 100 * number + 24 // size)) for number, size in enumerate(sizes))
    held = holding("o", tokens, groups=groups, grid=grid_tokens)
    env = geometry([KVGroup(size) for size in sizes], exact_tokens=grid_every)
    found = exactly(held, successor("n", (*tokens[:23], -1)), env)
    assert (found if isinstance(found, Refusal) else found.tokens) == expected


def test_a_lost_block_rounds_an_exact_prefix_to_the_grid_before_it():
    tokens = tuple(range(24))
    held = holding("o", tokens, grid=24)
    env = geometry(generations=reused(107), exact_tokens=4)
    assert exactly(held, successor("n", (*tokens, 1)), env).tokens == 12
    assert certificate_of(held, successor("n", (*tokens, 1)), env).tokens == 14


def test_mode_matched_does_not_ask_for_a_grid():
    env = geometry(exact_tokens=4)
    assert certificate_of(holding("o"), successor("n"), env).tokens == 6


# Device or host memory, and whether it pays


def least(device: int, host: int):
    return lambda tokens, tier: tokens >= (device if tier is Tier.HBM else host)


@pytest.mark.parametrize(
    ("lost", "copied", "pays", "expected"),
    [
        ((), True, least(0, 0), (6, Tier.HBM)),  # a draw
        ((102,), True, least(0, 0), (6, Tier.DRAM)),
        ((102,), False, least(0, 0), (4, Tier.HBM)),
        ((100,), True, least(0, 0), (6, Tier.DRAM)),
        ((100,), False, least(0, 0), Refusal.GENERATION),
        ((102,), True, least(0, 7), (4, Tier.HBM)),
        ((), True, least(7, 0), (6, Tier.DRAM)),
        ((102,), True, least(5, 7), Refusal.UNPROFITABLE),
        ((100,), True, least(0, 7), Refusal.UNPROFITABLE),
        ((100,), False, least(7, 7), Refusal.GENERATION),
        ((), False, least(7, 0), Refusal.UNPROFITABLE),
        ((), False, least(6, 0), (6, Tier.HBM)),
    ],
)
def test_the_longer_tier_that_pays_serves_and_the_device_wins_a_draw(lost, copied, pays, expected):
    held = holding("o", copied=copied)
    found = certificate_of(held, successor("n"), geometry(generations=reused(*lost), pays=pays))
    assert (found if isinstance(found, Refusal) else (found.tokens, found.tier)) == expected
    if isinstance(found, Certificate):
        assert found.groups == ((held.groups if found.tier is Tier.HBM else held.host)[0][: found.tokens // 2],)


def test_of_equal_holdings_one_on_the_device_serves_before_one_to_restore():
    gone, here = holding("gone", copied=True), holding("here", first_block=200)
    for held in ((gone, here), (here, gone)):
        chosen, certificate = choose(held, successor("n"), geometry(generations=reused(100, 101, 102)))
        assert (chosen, certificate.tier) == (here, Tier.HBM)


def test_a_copy_serves_without_the_windows_that_slid_on_the_device():
    copied = holding("o", groups=(refs(range(10, 14)), refs((None, None, 22, 23)))).groups
    held = replace(holding("o", groups=copied), host=host_of(copied))
    found = ask(held, successor("n"), HYBRID, reused(10, 11, 12))
    assert (found.tier, found.tokens) == (Tier.DRAM, 6)
    assert found.groups == (held.host[0][:3], (None, None, held.host[1][2]))


# What a contract promises


def test_a_promise_cuts_a_holding_to_the_blocks_before_it():
    held = holding("o", grid=8)
    kept = promised(held, TokenCount(5), GROUPS)
    assert kept == replace(held, frontier_tokens=4, grid_tokens=4, groups=(refs((100, 101)),))
    assert promised(held, TokenCount(99), GROUPS) == held
    assert promised(held, TokenCount(1), GROUPS).groups == ((),)


def test_a_promise_keeps_the_window_of_the_boundary_that_it_promises():
    held = holding("o", groups=(refs(range(10, 14)), refs(range(20, 24))))
    kept = promised(held, TokenCount(7), HYBRID)
    assert kept.groups == (refs((10, 11, 12)), refs((None, None, 22)))
    assert ask(kept, successor("n"), HYBRID) == ask(held, successor("n"), HYBRID)
    assert ask(kept, successor("n", (*COMMON[:5], 80)), HYBRID) is Refusal.WINDOW_SLID, "less than was promised"


@settings(max_examples=500)
@given(cases(), st.integers(0, 30))
def test_a_successor_that_keeps_its_promise_gets_what_it_would_have_got_without_it(case, tokens):
    """It shares exactly what was promised, and has a token of its own to compute."""
    held, _, _, env, _ = case
    held = replace(held, host=None)
    wanted = successor("new", (*held.tokens[:tokens], -2))
    env = replace(env, pays=lambda _tokens, _tier: True)
    full, kept = (certificate_of(one, wanted, env) for one in (held, promised(held, TokenCount(tokens), env.groups)))
    top = boundary(min(tokens, held.frontier_tokens), env.groups)
    if isinstance(full, Certificate) and full.tokens == top:
        assert kept == full
    assert isinstance(kept, Refusal) or kept.tokens <= top
