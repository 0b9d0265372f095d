"""The same fence in vLLM's compiled mode: the safe point is inside an opaque attention op there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.server import Server
from tests.conftest import SHORT_PINS, TINY_FLAGS, leak_checked, served
from tests.support import clean_run, completion, supersede_inside_a_step, text_ids


@pytest.fixture(scope="module")
def compiled_server() -> Iterator[Server]:
    yield from served(
        "tiny-llama", tuple(f for f in TINY_FLAGS if f != "--enforce-eager"), env=SHORT_PINS, preforked=False
    )


@pytest.fixture
def compiled(compiled_server: Server) -> Iterator[Server]:
    yield from leak_checked(compiled_server)


@pytest.mark.engine
@pytest.mark.slow
def test_a_compiled_step_stops_at_a_safe_point_and_the_successor_says_what_a_clean_run_says(compiled, scope):
    def make(attempt):
        ids = text_ids(compiled.url, 7000, seed=300 + attempt)
        return completion([*ids, 1]), completion([*ids[:3000], 2, 3])

    found = supersede_inside_a_step(compiled.url, scope, make)
    assert found.record["adopted_blocks"] == found.record["certificate"]["blocks"]
    _, new = make(int(found.record["scope"].rsplit("-", 1)[1]))
    assert found.new.text == clean_run(compiled.url, new["prompt"], found.record["inherited_tokens"])
