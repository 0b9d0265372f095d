"""`equivalence: exact` on the real engine: bit for bit what a cold run says, also while others are served."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.client import Streaming, http
from harness.server import Server
from tests.conftest import SHORT_PINS, TINY_FLAGS, leak_checked, served
from tests.support import TIMEOUT_S, complete, completion, fresh_salt, record_of, text_ids

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
GRID = 512  # tokens of a step; several chunks in a short prompt
EXACT = '{"equivalence": "exact"}'


@pytest.fixture(scope="module")
def small_steps() -> Iterator[Server]:
    """bfloat16 and short steps: chunk boundaries and company in a step show in the last bits."""
    yield from served(
        "tiny-llama", (*TINY_FLAGS, "--dtype", "bfloat16", "--max-num-batched-tokens", str(GRID)), env=SHORT_PINS
    )


@pytest.fixture
def server(small_steps: Server) -> Iterator[Server]:
    yield from leak_checked(small_steps)


def bits(answer: dict[str, Any]) -> tuple[str, list[float]]:
    choice = answer["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def ask(ids: list[int], tokens: int = 24, **more: Any) -> dict[str, Any]:
    return completion(ids, tokens, logprobs=0, **more)


def cold(url: str, ids: list[int]) -> tuple[str, list[float]]:
    return bits(complete(url, ask(ids, cache_salt=fresh_salt())))


def superseding(url: str, scope: str, epoch: int, ids: list[int]) -> tuple[tuple[str, list[float]], dict[str, Any]]:
    """What the successor of `epoch` says, and the record."""
    answer = http.post(
        f"{url}/v1/completions",
        json=ask(ids),
        headers={"X-Retire-Scope": scope, "X-Retire-Supersedes": str(epoch), "X-Retire-Contract": EXACT},
        timeout=TIMEOUT_S,
    )
    assert answer.status_code == 200, answer.text
    return bits(answer.json()), record_of(url, answer.headers["location"])


def handed_over(
    url: str, scope: str, old: list[int], new: list[int], *, first_exact: bool = True
) -> tuple[tuple[str, list[float]], dict[str, Any]]:
    """Supersede while the predecessor decodes; what the successor said, and the record."""
    headers = {"X-Retire-Scope": scope} | ({"X-Retire-Equivalence": "exact"} if first_exact else {})
    talking = Streaming(url, completion(old, 4000), headers)
    talking.wait_for_text(2)
    found = superseding(url, scope, 1, new)
    talking.wait()
    return found


@pytest.mark.parametrize("shared", [3 * GRID, 3 * GRID - 1, 2 * GRID + 100])
def test_the_successor_equals_a_cold_run_bit_for_bit(server: Server, scope: str, shared: int) -> None:
    old = text_ids(server.url, 1800, shared)
    new = [*old[:shared], *text_ids(server.url, 300, shared + 1)]
    said, record = handed_over(server.url, scope, old, new)
    assert (record["outcome"], record["inherited_tokens"]) == ("inherited", shared - shared % GRID)
    assert said == cold(server.url, new)


def test_it_does_so_while_others_prefill_and_decode(server: Server, scope: str) -> None:
    old = text_ids(server.url, 1800, 7)
    new = [*old[:1600], *text_ids(server.url, 300, 8)]
    expected = cold(server.url, new)
    company = [
        Streaming(server.url, completion(text_ids(server.url, 700, 50 + n), 3000, cache_salt=fresh_salt()))
        for n in range(3)
    ]
    for one in company:
        one.wait_for_text(2)
    said, record = handed_over(server.url, scope, old, new)
    for one in company:
        one.leave()
    assert (record["outcome"], record["inherited_tokens"]) == ("inherited", 3 * GRID)
    assert said == expected


def test_a_predecessor_that_shared_its_steps_is_refused_by_name_and_the_cold_successor_is_exact(
    server: Server, scope: str
) -> None:
    old = text_ids(server.url, 1800, 17)
    new = [*old[:1600], *text_ids(server.url, 300, 18)]
    company = Streaming(server.url, completion(text_ids(server.url, 100, 60), 3000, cache_salt=fresh_salt()))
    company.wait_for_text(2)
    said, record = handed_over(server.url, scope, old, new, first_exact=False)
    company.leave()
    assert (record["outcome"], record["refusal"], record["inherited_tokens"]) == ("cold", "off_grid", 0)
    assert said == cold(server.url, new)


def test_the_chain_of_versions_stays_exact(server: Server, scope: str) -> None:
    """A successor under `exact` can itself be superseded under `exact`."""
    first = text_ids(server.url, 1300, 27)
    second = [*first[:1100], *text_ids(server.url, 900, 28)]
    handed_over(server.url, scope, first, second)
    third = [*second[:1700], *text_ids(server.url, 100, 29)]
    said, record = superseding(server.url, scope, 2, third)
    assert (record["outcome"], record["inherited_tokens"]) == ("inherited", 3 * GRID)
    assert said == cold(server.url, third)


def test_exact_requests_and_others_take_turns(server: Server, scope: str) -> None:
    """Nobody starves: an exact request in a scope and ordinary ones finish side by side."""
    with ThreadPoolExecutor(4) as pool:
        ordinary = [
            pool.submit(
                complete, server.url, completion(text_ids(server.url, 900, 70 + n), 40, cache_salt=fresh_salt())
            )
            for n in range(3)
        ]
        exact = pool.submit(
            complete,
            server.url,
            completion(text_ids(server.url, 1500, 80), 40),
            **{"X-Retire-Scope": scope, "X-Retire-Equivalence": "exact"},
        )
        for one in [*ordinary, exact]:
            assert one.result(120)["usage"]["completion_tokens"] == 40


def test_an_unknown_equivalence_is_refused(server: Server, scope: str) -> None:
    answer = http.post(
        f"{server.url}/v1/completions",
        json=completion([1, 2, 3]),
        headers={"X-Retire-Scope": scope, "X-Retire-Equivalence": "roughly"},
        timeout=TIMEOUT_S,
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Retire-Equivalence")
