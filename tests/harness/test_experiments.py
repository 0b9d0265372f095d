"""What the experiments make of measurements, with measurements made up."""

from __future__ import annotations

import json
from socket import create_server
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from vllm.utils.import_utils import resolve_obj_by_qualname

from harness.client import Frame, Reply
from harness.correctness import ANSWER_TOKENS, Arm, Config, Correctness, Measured, Mode, Said
from harness.faults import EXTENSION, PageFaults
from harness.inheritance import Inheritance
from harness.publication import ARMS, Consumer, Publication, RawReader, Trial, bound_frames, event_bytes
from harness.publication import Arm as Interrupted
from harness.session import Session
from harness.statistics import Verdict
from harness.workload import diverging

CONFIG = Config(seed=0, lcp_tokens=4095)
SAID = Said(tuple(range(ANSWER_TOKENS)), tuple(-n / 7 for n in range(ANSWER_TOKENS)))
OTHER = Said(SAID.token_ids, (*SAID.logprobs[:-1], -2.2857142857142856))


def runs(due, cold=SAID):
    return {
        Arm.COLD: [Measured(cold, 0)] * 2,
        Arm.CLEAN_PREFIX: [Measured(SAID, due)] * 2,
        Arm.COMPLETED_PREDECESSOR: [Measured(SAID, due, due)] * 2,
    }


def equal(mode, arms):
    return Correctness()._equal(mode, CONFIG, {CONFIG: arms})


def test_one_token_below_a_block_boundary_reuse_ends_at_the_block_before_or_at_the_grid():
    assert equal(Mode.MODE_MATCHED, runs(3968))
    assert equal(Mode.EXACT, runs(2048))
    assert not equal(Mode.MODE_MATCHED, runs(2048))
    assert not equal(Mode.EXACT, runs(3968))


def test_only_exact_compares_with_a_cold_run():
    assert equal(Mode.MODE_MATCHED, runs(3968, cold=OTHER))
    assert not equal(Mode.EXACT, runs(2048, cold=OTHER))


@pytest.mark.parametrize(
    "wrong",
    [
        Measured(OTHER, 3968, 3968),
        Measured(Said(SAID.token_ids[:-1], SAID.logprobs[:-1]), 3968, 3968),
        Measured(SAID, 3840, 3840),
        Measured(SAID, 0, None),
        Measured(SAID, 0, 3968),
    ],
    ids=["one logprob", "a token short", "a block short", "no certificate", "not adopted"],
)
def test_one_repetition_that_differs_makes_a_configuration_unequal(wrong):
    arms = runs(3968)
    arms[Arm.COMPLETED_PREDECESSOR] = [arms[Arm.COMPLETED_PREDECESSOR][0], wrong]
    assert not equal(Mode.MODE_MATCHED, arms)


@pytest.mark.parametrize("arm", Arm)
def test_a_missing_measurement_makes_a_configuration_unequal(arm):
    arms = runs(3968)
    arms[arm] = arms[arm][:1]
    assert not equal(Mode.MODE_MATCHED, arms)
    arms[arm] = []
    assert not equal(Mode.MODE_MATCHED, arms)


def trial(cold, certified, native):
    return {
        "cold": {"ttft_ms": cold},
        "certified": {"ttft_ms": certified, "fence_ms": 1.0},
        "native_full_hit": {"ttft_ms": native},
    }


def inherited(trials, planned):
    session = SimpleNamespace(checks={"equal": True}, seal={"pins": "abc"})
    return Inheritance(offsets=(4, 16))._result(session, trials, planned)


def test_speedup_and_full_hit_ratio_come_from_the_same_trials():
    found = inherited({4: [trial(4000, 100, 100), trial(4400, 110, 100)], 16: [trial(4200, 105, 105)]}, planned=3)
    assert found.summary["speedup"] == 4200 / 105
    assert found.summary["full_hit_ratio"] == 1.0
    assert found.summary["full_hit_ratio_ci95"] == [1.0, 1.1]
    assert found.summary["full_hit_ratio_by_offset"]["4"]["ratio"] == 1.05
    assert (found.summary["prefix_tokens"], found.summary["trials_counted"]) == (4096, 3)
    assert [target.verdict for target in found.targets] == [Verdict.REACHED, Verdict.OPEN]
    assert [cell.cell["offset_tokens"] for cell in found.cells] == [4, 16]
    assert found.cells[0].arms["certified"] == {"ttft_ms": [100, 110], "fence_ms": [1.0, 1.0]}


def test_when_no_trial_counts_there_is_no_figure_and_no_target_is_reached():
    found = inherited({4: [], 16: []}, planned=6)
    assert found.summary["speedup"] is None
    assert found.summary["full_hit_ratio_ci95"] is None
    assert found.summary["trials_counted"] == 0
    assert {target.verdict for target in found.targets} == {Verdict.NOT_REACHED}
    json.dumps(found.document({}))


def test_zeroed_pages_come_back_byte_for_byte_and_their_neighbours_never_change():
    worker = PageFaults()
    layers = [torch.randn(6, 2, 4, 8).to(torch.bfloat16) for _ in range(3)]
    before = [layer.clone() for layer in layers]
    worker.model_runner = SimpleNamespace(kv_caches=layers)
    saved, neighbours = worker.save_pages([1, 4]), worker.digest_pages([0, 2, 3, 5])
    assert worker.zero_pages([1, 4]) != saved
    assert all(not layer[[1, 4]].any() for layer in layers)
    assert worker.digest_pages([0, 2, 3, 5]) == neighbours
    assert worker.restore_pages([1, 4]) == saved
    assert all(torch.equal(*pair) for pair in zip(layers, before, strict=True))


def test_the_worker_extension_is_found_under_the_name_it_is_asked_for():
    assert resolve_obj_by_qualname(EXTENSION) is PageFaults


@pytest.mark.parametrize("seed", range(5))
def test_diverging_prompts_share_exactly_what_they_should(seed, monkeypatch):
    monkeypatch.setattr("harness.workload._corpus", lambda *_: (7, 7, 7, 7, 7, 7, 9))
    old, new = diverging("nowhere", "tiny", shared=20, tail=3, seed=seed)
    assert len(old) == len(new) == 23
    assert old[:20] == new[:20]
    assert old[20] != new[20]


def test_a_reply_tells_tokens_log_probabilities_and_what_was_cached():
    def frame(at, choices, usage=None):
        return Frame(at, None, "", {"choices": choices, "usage": usage})

    reply = Reply(
        frames=[
            frame(1.0, [{"text": "", "token_ids": []}]),
            frame(2.0, [{"token_ids": [5, 6], "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0]}}]),
            frame(3.0, [], {"prompt_tokens_details": {"cached_tokens": 128}}),
        ]
    )
    assert reply.token_ids == [5, 6]
    assert reply.first_token_at == 2.0
    assert reply.logprobs == [("a", -1.0), ("b", -2.0)]
    assert reply.cached_tokens == 128
    assert Said.by(reply) == Said((5, 6), (-1.0, -2.0))
    assert not Said.by(reply).whole


def told(*tokens, text="x", **more):
    return {"id": "cmpl-1", "choices": [{"text": text, "token_ids": list(tokens)}], **more}


def test_stale_is_what_was_taken_after_the_acceptance_and_carried_tokens():
    frames = [Frame(at, 1, "", told(*tokens)) for at, tokens in ((1.0, [5]), (2.0, [6]), (2.1, [7, 8]), (2.2, []))]
    found = Interrupted(frames, accepted_at=2.0, successor=())
    assert found.figures == {"stale_frames": 1, "stale_tokens": 2, "taken_tokens": 4}


def test_the_bound_counts_the_write_the_buffers_and_one_frame_that_had_begun():
    backlog = {"frames_in_transport": 1, "bytes_in_send_buffer": 1000}
    assert bound_frames(backlog, reader_bytes=99, frame_bytes=100) == 1 + 10 + 1
    assert bound_frames(backlog, reader_bytes=100, frame_bytes=100) == 1 + 11 + 1


def figures(stale):
    return {"stale_frames": stale, "stale_tokens": stale, "taken_tokens": 20, "published_tokens": 30}


def published(bound=12, **stale):
    session = Session.__new__(Session)
    session.checks, session.seal = {"equal": True}, {"pins": "abc"}
    counts = {"native_abort": (9, 1), "native_close": (2, 0), "retire_raw": (3, 7), "retire_client": (0, 0)} | stale
    trials = [Trial(pace_s, {arm: figures(counts[arm][n]) for arm in ARMS}) for n, pace_s in enumerate((None, 0.0))]
    return Publication()._result(session, trials, planned=2, bound=bound)


def test_publication_adds_up_tokens_and_takes_the_worst_backlog():
    found = published()
    assert found.correct
    wanted = {
        "trials": 2,
        "native_stale_tokens": 10,
        "retire_raw_stale_frames_max": 7,
        "client_stale_tokens": 0,
        "stated_bound_frames": 12,
    }
    assert found.summary.items() >= wanted.items()
    assert list(found.summary)[:5] == list(wanted)
    assert found.summary["client_dropped_tokens"] == 20
    assert found.summary["native_stale_tokens_by_pace"] == {"None": [9], "1.0": [], "0.1": [], "0.0": [1]}
    assert {target.verdict for target in found.targets} == {Verdict.REACHED}
    json.dumps(found.document({}))


@pytest.mark.parametrize(
    ("stale", "check"),
    [
        ({"retire_raw": (3, 13)}, "raw_backlog_within_the_stated_bound"),
        ({"retire_client": (0, 1)}, "nothing_old_through_the_client"),
    ],
)
def test_one_frame_too_many_makes_the_run_incorrect(stale, check):
    found = published(**stale)
    assert [name for name, holds in found.checks.items() if not holds] == [check]
    assert [target.verdict for target in found.targets].count(Verdict.NOT_REACHED) == 1


def test_without_a_trial_that_counts_no_claim_of_publication_holds():
    session = SimpleNamespace(checks={}, seal={}, check=lambda _name, holds: holds)
    found = Publication()._result(session, [], planned=4, bound=12)
    assert found.summary["retire_raw_stale_frames_max"] is None
    assert {target.verdict for target in found.targets} == {Verdict.NOT_REACHED}


def test_a_consumer_takes_one_frame_and_waits_until_it_is_told_to_hurry():
    consumer = Consumer(iter([told(), told(5), told(6), told(7)]), None)
    consumer.wait_for_token()
    assert len(consumer.frames) == 2, "what carries no token is not waited after"
    assert [frame.token_ids for frame in consumer.finish()] == [[], [5], [6], [7]]


def test_what_ends_a_stream_ends_the_wait_for_it():
    def broken():
        yield told(5)
        raise ConnectionError("gone")

    consumer = Consumer(broken(), 0.0)
    consumer.wait_for_token()
    with pytest.raises(ConnectionError):
        consumer.finish()


def test_a_raw_reader_finds_the_frames_between_the_chunks_of_http_and_leaves_the_rest_unread():
    bodies = [told(n, text="data: line\n\nbreak" * n) for n in range(40)]
    events = [b"data: " + json.dumps(body).encode() + b"\n\n" for body in bodies] + [b"data: [DONE]\n\n"]
    stream = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    stream += b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)
    with create_server(("127.0.0.1", 0)) as listening:

        def answer():
            connection, _ = listening.accept()
            with connection:
                connection.sendall(stream)
                connection.recv(1 << 16)  # until the reader is gone

        Thread(target=answer, daemon=True).start()
        reader = RawReader(f"http://127.0.0.1:{listening.getsockname()[1]}", {}, {})
        assert list(reader.bodies()) == bodies
    assert event_bytes(bodies[0]) < len(events[0]), "compact, as the server says it"
