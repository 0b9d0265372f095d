"""Nothing is readable before it is written (invariant 3), and what goes wrong without that."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from harness.client import Streaming, http
from harness.server import Server
from retire import models
from tests.conftest import SHORT_PINS, TINY_FLAGS
from tests.support import clean_run, completion, fresh_salt, prefill_s, said, text_ids, wait_for_scope

BLOCK = 32
UNSAFE = '''
"""Takes the delayed publication out again: blocks are registered when their step is scheduled, as upstream does."""
import vllm_patches.kv_publication as kv_publication


def build(original):
    def allocate_slots(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    return allocate_slots


object.__setattr__(kv_publication.SEAM, "build", build)
'''


def stop_a_step_and_read_behind_it(server: Server, seed: int) -> tuple[str, str, bool]:
    """Stop a prefill without a successor, then let an ordinary request with its prompt go through the prefix cache.

    Returns what it says, what a clean run says that reuses what was written, and whether a step was stopped.
    """
    ids = text_ids(server.url, 4000, seed)
    salt = fresh_salt()
    scope = f"publication-{seed}-{time.monotonic_ns()}"
    whole_s = min(prefill_s(server.url, ids) for _ in range(2))
    stream = Streaming(server.url, completion(ids, cache_salt=salt), {"X-Retire-Scope": scope})
    wait_for_scope(server.url, scope)
    time.sleep(whole_s * (0.2 + 0.6 * ((seed * 0.618) % 1)))
    answer = http.post(
        f"{server.url}/supersede",
        json={"scope": scope, "expected_epoch": "*", "contract": {"inherit": "none"}},
        headers={"Prefer": "wait=fenced"},
        timeout=60,
    )
    stream.wait()
    record = http.get(f"{server.url}{answer.headers['location']}", timeout=60).json()
    spoken = said(server.url, completion(ids, cache_salt=salt))
    written = max((receipt["frontier_tokens"] for receipt in record["receipts"]), default=0)
    clean = clean_run(server.url, ids, min(written, len(ids) - 1) // BLOCK * BLOCK)
    return spoken, clean, any(receipt["stopped"] for receipt in record["receipts"])


@pytest.mark.engine
def test_a_reader_behind_a_stopped_step_equals_a_clean_run(server):
    """Scenario 14, the request after the step."""
    stops = 0
    for seed in range(20, 32):
        spoken, clean, stopped = stop_a_step_and_read_behind_it(server, seed)
        assert spoken == clean
        stops += stopped
        if stops == 3:
            return
    assert stops, "no step was stopped"


@pytest.mark.engine
@pytest.mark.slow
def test_without_publication_at_receipt_the_reader_answers_gibberish(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(UNSAFE)
    env = {**SHORT_PINS, "PYTHONPATH": str(tmp_path)}
    unsafe = Server(models.resolve("tiny-llama"), TINY_FLAGS, env=env, preforked=True)
    try:
        unsafe.start()
        for seed in range(40, 56):
            spoken, clean, stopped = stop_a_step_and_read_behind_it(unsafe, seed)
            if stopped and spoken[:12] != clean[:12]:  # wrong from the start, not a late near-tie
                return
        pytest.fail("the fault that publication at receipt prevents did not show")
    finally:
        unsafe.close()
