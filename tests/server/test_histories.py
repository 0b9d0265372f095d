"""Runtimes supersede each other on a real server whose processes are stopped and killed; what they saw is judged."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.histories.checker import check
from harness.histories.history import Kind, Opening, Recorder, Via, read
from harness.histories.saboteur import Deed, Who, processes, tormented
from harness.histories.storm import Storm
from harness.server import Server
from retire import models
from tests.conftest import SHORT_PINS, TINY_FLAGS, leak_checked
from tests.server.wire import MODEL, http

pytestmark = pytest.mark.engine
SECONDS = 60.0
PLAN = (
    Deed(4.0, Who.API, 0.3),
    Deed(8.0, Who.ENGINE, 0.3),
    Deed(12.0, Who.API, None),
    Deed(32.0, Who.WORKER, 0.3),
    Deed(36.0, Who.ALL, 0.3),
    Deed(40.0, Who.ENGINE, None),
)


@pytest.fixture(scope="module")
def mortal(tmp_path_factory):
    """A server whose API process outlives its engine, so that it can be asked until it is started again."""
    env = {**SHORT_PINS, "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}
    state_dir = tmp_path_factory.mktemp("mortal") / "state"
    server = Server(models.resolve("tiny-llama"), TINY_FLAGS, env=env, state_dir=state_dir, preforked=True)
    try:
        server.start()
        yield from leak_checked(server)
    finally:
        server.close()


@pytest.mark.slow
def test_engine_and_worker_are_found_by_their_names(mortal):
    (engine,), (worker,) = processes(mortal, Who.ENGINE), processes(mortal, Who.WORKER)
    assert processes(mortal, Who.API) == [mortal.pid]
    assert {mortal.pid, engine, worker} <= set(processes(mortal, Who.ALL))
    assert mortal.pid not in (engine, worker)


@pytest.mark.slow
def test_what_clients_see_while_processes_are_stopped_and_killed_has_an_order_and_nothing_revoked(mortal, tmp_path):
    stated = http.get(f"{mortal.url}/retire/status").json()["stated_backlog"]["bytes_in_send_buffer"]
    file = tmp_path / "storm.jsonl"
    storm = Storm(mortal.url, MODEL, {"default": None}, seed=1, prefix="mortal", runtimes=6, scopes=3)
    with (
        Recorder(file, Opening(seed=1, backlog_bytes=stated)) as recorder,
        tormented(mortal, recorder, PLAN) as serving,
    ):
        storm.run(recorder, SECONDS, serving)
    history = read(file)
    verdict = check(history)
    assert verdict.findings == [], "\n".join([str(file), *map(str, verdict.findings)])
    told = verdict.summary()
    assert (told["kills"], told["pauses"], told["scopes"]) == (2, 4, 3), told
    accepted = Counter((one.call.kind, one.call.via) for one in history.operations if one.epoch is not None)
    read_frames = Counter(one.call.via for one in history.operations for _ in one.frames)
    for via in Via:
        assert accepted[Kind.SUPERSEDE, via] > 5, accepted
        assert read_frames[via] > 50, read_frames
