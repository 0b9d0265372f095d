"""On an accelerator, as vLLM runs there by default: asynchronous scheduling, compiled, with either model runner."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from harness.client import Streaming
from harness.server import Server
from tests.conftest import SHORT_PINS, leak_checked, served
from tests.support import clean_run, completion, fresh_salt, prefill_s, record_of, supersede, text_ids

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no device"),
]
FLAGS = ("--max-model-len", "8192", "--max-num-batched-tokens", "2048", "--served-model-name", "tiny")
ALWAYS_ARMED = {**SHORT_PINS, "RETIRE_POLICY": "always"}


@pytest.fixture(scope="module", params=["0", "1"], ids=["V1", "V2"])
def device_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    yield from served(
        "smollm2", FLAGS, env={**ALWAYS_ARMED, "VLLM_USE_V2_MODEL_RUNNER": request.param}, preforked=False
    )


@pytest.fixture
def device(device_server: Server) -> Iterator[Server]:
    yield from leak_checked(device_server)


def test_a_prefill_that_is_superseded_at_any_time_leaves_only_what_it_has_written(device, scope):
    shared, whole_s = 5000, prefill_s(device.url, text_ids(device.url, 7000, seed=1))
    stopped = 0
    for attempt in range(24):
        ids = text_ids(device.url, 7000, seed=10 + attempt)
        old, new = completion([*ids, 1], 64), completion([*ids[:shared], 2])
        found = supersede(device.url, f"{scope}-{attempt}", old, new, after_s=whole_s * attempt / 20)
        assert found.record["adopted_blocks"] == (found.record["certificate"] or {}).get("blocks")
        assert found.new.text == clean_run(device.url, new["prompt"], found.record["inherited_tokens"])
        stopped += found.choice == "stop"
    assert stopped, "no step was ever stopped"


def test_versions_that_end_while_they_decode_are_inherited_from(device, scope):
    for attempt in range(8):
        ids = text_ids(device.url, 900, seed=600 + attempt)
        stream = Streaming(device.url, completion([*ids, 1], 2000), {"X-Retire-Scope": f"{scope}-{attempt}"})
        stream.wait_for_text(3 + attempt)
        headers = {"X-Retire-Scope": f"{scope}-{attempt}", "X-Retire-Supersedes": "*"}
        reply = Streaming(device.url, completion([*ids, 2], 16), headers).wait()
        stream.wait()
        record = record_of(device.url, reply.headers["location"])
        assert record["inherited_tokens"] > 800
        assert reply.text == clean_run(device.url, [*ids, 2], record["inherited_tokens"])


def test_clients_that_leave_take_nothing_with_them(device, scope):
    ids = text_ids(device.url, 6000, seed=70)
    whole_s = prefill_s(device.url, ids)
    for attempt in range(8):
        body = completion([*ids, attempt], 64, cache_salt=fresh_salt())
        stream = Streaming(device.url, body, {"X-Retire-Scope": f"{scope}-{attempt}"})
        time.sleep(whole_s * 0.2 * attempt)
        stream.hang_up()
