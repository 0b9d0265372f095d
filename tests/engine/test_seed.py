"""Upstream's CPU back end dies of a seeded request whose prefill is chunked; this server must not (scenario 18)."""

from __future__ import annotations

import pytest

from tests.support import completion, fresh_salt, said, text_ids


@pytest.mark.engine
def test_a_seed_with_a_chunked_prefill_is_served_and_equal_seeds_give_equal_output(server):
    ids = text_ids(server.url, 5000, seed=3)  # three prefill quanta

    def sampled(seed):
        return said(server.url, completion(ids, 24, temperature=1.0, seed=seed, cache_salt=fresh_salt()))

    assert sampled(1) == sampled(1)
    assert len({sampled(1), sampled(2), sampled(3)}) > 1


@pytest.mark.engine
def test_a_chunked_prefill_draws_the_same_tokens_as_one_that_fits_a_quantum(server):
    """The samples that chunks throw away must not advance the generator: reuse skips chunks, the draw stays equal."""
    ids = text_ids(server.url, 4128, seed=4)
    salt = fresh_salt()
    body = completion(ids, 24, temperature=1.0, seed=7, cache_salt=salt)
    chunked = said(server.url, body)  # 2048 + 2048 + 32
    assert said(server.url, body) == chunked  # one chunk: the rest comes from the prefix cache
