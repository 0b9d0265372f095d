"""No scope means exactly vLLM's behaviour: the same requests against an unpatched server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support import completion, fresh_salt, said, text_ids

LENGTHS = (5, 31, 32, 33, 500, 2047, 2048, 2049, 5000)


@pytest.mark.engine
def test_sequential_greedy_outputs_equal_unpatched_vllm_token_for_token(server, plain_server):
    for seed, length in enumerate(LENGTHS):
        body = completion(text_ids(server.url, length, seed), 24, cache_salt=fresh_salt())
        assert said(server.url, body) == said(plain_server.url, body), f"{length} tokens"
        assert said(server.url, body) == said(plain_server.url, body), f"{length} tokens, from the prefix cache"


@pytest.mark.engine
def test_concurrent_runs_differ_no_more_than_two_native_runs_do(server, plain_server):
    rounds = 3

    def together(target, salt):
        bodies = [completion(text_ids(server.url, 400 + 150 * n, n), 24, cache_salt=f"{salt}-{n}") for n in range(8)]
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda body: said(target.url, body), bodies))

    def differing(one, other):
        return sum(a != b for a, b in zip(one, other, strict=True))

    native_native = native_ours = 0
    for _ in range(rounds):
        first, second = together(plain_server, fresh_salt()), together(plain_server, fresh_salt())
        native_native += differing(first, second)
        native_ours += differing(first, together(server, fresh_salt()))
    assert native_ours <= native_native + 3, f"of {8 * rounds}: {native_ours} against {native_native} natively"


@pytest.mark.engine
def test_a_scoped_request_that_nobody_supersedes_says_what_an_unscoped_one_says(server, plain_server, scope):
    for seed, length in enumerate(LENGTHS):
        body = completion(text_ids(server.url, length, 100 + seed), 24, cache_salt=fresh_salt())
        headers = {"X-Retire-Scope": f"{scope}-{seed}"}
        assert said(server.url, body, **headers) == said(plain_server.url, body)
