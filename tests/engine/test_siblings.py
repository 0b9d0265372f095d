"""Publication at receipt keeps siblings of one step from sharing; holding them back a step gives it back."""

from __future__ import annotations

import pytest

from harness.client import http
from tests.support import complete, completion, fresh_salt, text_ids


def computed_prompt_tokens(server, ids, **headers):
    """Prompt tokens that eight identical requests really compute, from vLLM's own counters."""

    def computed():
        lines = http.get(f"{server.url}/metrics", timeout=60).text.splitlines()
        total = sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith("vllm:prompt_tokens_by_source_total") and "local_compute" in line
        )
        assert any(line.startswith("vllm:prompt_tokens_by_source_total") for line in lines)
        return total

    before = computed()
    complete(server.url, completion(ids, 8, n=8, temperature=1.0, cache_salt=fresh_salt()), **headers)
    return computed() - before


@pytest.mark.engine
def test_eight_identical_prompts_are_computed_once(server, plain_server, scope):
    ids = text_ids(server.url, 200, seed=12)  # all eight would fit one step
    native = computed_prompt_tokens(plain_server, ids)
    ours = computed_prompt_tokens(server, ids, **{"X-Retire-Scope": scope})
    assert ours <= native + 32, f"{ours} tokens computed, natively {native}"
