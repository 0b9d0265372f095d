"""POST /supersede and the routes around it, over TCP."""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.conftest import all_scopes
from tests.server.wire import (
    CHAT,
    COMPLETIONS,
    MODEL,
    SPOKE,
    SUPERSEDE,
    Stream,
    Told,
    at_epoch_1,
    chat,
    cpu_s,
    endless,
    epoch_of,
    eventually,
    http,
    long_prompt,
    record,
    refused,
    scope_info,
    scope_path,
    supersede,
    talking,
    work_a_while,
)

pytestmark = pytest.mark.engine


# -- with and without a successor --------------------------------------------------------------------------------------


def test_without_a_successor_the_answer_is_a_record_and_the_successor_comes_as_an_ordinary_request(server, scope):
    with talking(server.url, scope) as old:
        body = {"scope": scope, "expected_epoch": 1, "reason": "user_steering"}
        answer = http.post(server.url + SUPERSEDE, json=body)
        assert answer.status_code == 200
        told = answer.json()
        assert told == {
            "id": told["id"],
            "scope": scope,
            "old_epoch": 1,
            "new_epoch": 2,
            "reason": "user_steering",
            "accepted": True,
        }
        assert answer.headers["location"] == f"/transitions/{told['id']}"
        assert (answer.headers["x-retire-scope"], answer.headers["x-retire-epoch"]) == (scope, "2")
        ending = old.told().ending
    assert ending["retire"]["superseded_by"] == 2
    assert ending["choices"][0]["finish_reason"] == "length"
    successor = http.post(server.url + CHAT, json=chat(), headers={"X-Retire-Scope": scope, "X-Retire-Epoch": "2"})
    assert successor.json()["retire"] == {"scope": scope, "epoch": 2}
    assert record(server.url, answer.headers["location"])["reclaimed"]


def test_with_a_successor_the_answer_is_its_openai_response(server, scope):
    with talking(server.url, scope) as old:
        answer = supersede(server.url, scope, 1, successor={"endpoint": CHAT, "body": chat()})
        ending = old.told().ending
    assert answer.status_code == 200
    assert answer.json()["object"] == "chat.completion"
    assert answer.json()["retire"] == {"scope": scope, "epoch": 2}
    assert answer.json()["choices"] == http.post(server.url + CHAT, json=chat()).json()["choices"]
    assert (answer.headers["x-retire-scope"], answer.headers["x-retire-epoch"]) == (scope, "2")
    assert ending["retire"]["superseded_by"] == 2
    assert record(server.url, answer.headers["location"])["new_epoch"] == 2


def test_a_streamed_successor_streams_under_the_new_epoch(server, scope):
    at_epoch_1(server.url, scope)
    answer = supersede(server.url, scope, 1, successor={"endpoint": CHAT, "body": chat(stream=True)})
    assert answer.headers["content-type"].startswith("text/event-stream")
    told = Told(answer.status_code, dict(answer.headers), answer.content)
    assert [chunk["retire"] for chunk in told.chunks] == [{"scope": scope, "epoch": 2}] * len(told.chunks)
    assert told.text == http.post(server.url + CHAT, json=chat()).json()["choices"][0]["message"]["content"]


def test_the_successor_can_be_a_completion_and_chat_is_assumed(server, scope):
    at_epoch_1(server.url, scope)
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "temperature": 0}
    answer = supersede(server.url, scope, 1, successor={"endpoint": COMPLETIONS, "body": body})
    assert answer.json()["object"] == "text_completion"
    answer = supersede(server.url, scope, 2, successor={"body": chat(2)})
    assert answer.json()["object"] == "chat.completion"
    assert answer.json()["retire"]["epoch"] == 3


def test_star_advances_whatever_is_current(server, scope):
    at_epoch_1(server.url, scope)
    for epoch in range(1, 4):
        told = supersede(server.url, scope, "*").json()
        assert (told["old_epoch"], told["new_epoch"]) == (epoch, epoch + 1)


def test_a_superseded_predecessor_that_does_not_stream_gets_410(server, scope):
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(http.post, server.url + CHAT, json=endless(), headers={"X-Retire-Scope": scope})
        eventually(lambda: epoch_of(server.url, scope) and scope_info(server.url, scope)["live_requests"], "it runs")
        supersede(server.url, scope, 1)
        error = refused(old.result(), 410)
    assert error["current_epoch"] == 2
    assert "choices" not in old.result().text


def test_a_stale_supersede_gets_409_with_the_current_epoch_and_changes_nothing(server, scope):
    at_epoch_1(server.url, scope)
    supersede(server.url, scope, 1)
    for expected in (1, 3, 2**64 - 1):
        answer = supersede(server.url, scope, expected, successor={"body": chat()})
        assert refused(answer, 409)["current_epoch"] == 2
        assert answer.headers["x-should-retry"] == "false"
    assert epoch_of(server.url, scope) == 2


def test_superseding_an_unknown_scope_by_star_is_404(server, scope):
    refused(supersede(server.url, scope, "*"), 404)
    refused(http.get(server.url + scope_path(scope)), 404)
    refused(http.delete(server.url + scope_path(scope)), 404)
    refused(http.post(server.url + scope_path(scope) + "/pause"), 404)
    refused(http.post(server.url + scope_path(scope) + "/continue"), 404)
    refused(http.get(server.url + "/transitions/nobody"), 404)
    assert epoch_of(server.url, scope) is None


def test_a_scope_whose_request_has_finished_can_be_superseded(server, scope):
    done = http.post(server.url + CHAT, json=chat(4), headers={"X-Retire-Scope": scope}).json()
    answer = supersede(server.url, scope, 1, successor={"body": chat()})
    assert answer.json()["retire"]["epoch"] == 2
    told = record(server.url, answer.headers["location"])
    (published,) = told["published"]
    chars = len(done["choices"][0]["message"]["content"])
    assert published == {"epoch": 1, "choices": [{"index": 0, "tokens": 4, "chars": chars}]}


# -- what overtakes what -----------------------------------------------------------------------------------------------


def test_a_supersede_that_overtakes_its_predecessor_kills_it_on_arrival(server, scope):
    answer = supersede(server.url, scope, 1, successor={"body": chat()})
    assert answer.json()["retire"] == {"scope": scope, "epoch": 2}
    late = http.post(server.url + CHAT, json=chat(), headers={"X-Retire-Scope": scope, "X-Retire-Epoch": "1"})
    assert refused(late, 410)["current_epoch"] == 2
    again = http.post(server.url + CHAT, json=chat(), headers={"X-Retire-Scope": scope, "X-Retire-Epoch": "2"})
    assert again.status_code == 200


def test_of_two_runtimes_that_supersede_the_same_epoch_one_wins(server, scope):
    at_epoch_1(server.url, scope)
    with ThreadPoolExecutor(2) as pool:
        for epoch in range(1, 11):
            start = threading.Barrier(2)

            def race(epoch=epoch, start=start):
                start.wait()
                return supersede(server.url, scope, epoch)

            answers = sorted([f.result() for f in [pool.submit(race), pool.submit(race)]], key=lambda a: a.status_code)
            assert [answer.status_code for answer in answers] == [200, 409]
            assert answers[0].json()["new_epoch"] == epoch + 1
            assert refused(answers[1], 409)["current_epoch"] == epoch + 1
            assert answers[1].headers["x-should-retry"] == "false"


def test_a_request_superseded_while_it_is_queued_says_nothing_and_its_scope_is_usable_at_once(server, scope):
    prompts = [long_prompt(seed) for seed in range(3)]
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        body = {"model": MODEL, "max_tokens": 1, "cache_salt": uuid.uuid4().hex}
        busy = [pool.submit(http.post, server.url + COMPLETIONS, json={**body, "prompt": ids}) for ids in prompts]
        queued = pool.submit(http.post, server.url + CHAT, json=endless(), headers={"X-Retire-Scope": scope})
        eventually(lambda: epoch_of(server.url, scope), "it was admitted")
        answer = supersede(server.url, scope, 1, successor={"body": chat()})
        assert answer.json()["retire"]["epoch"] == 2
        refused(queued.result(), 410)
        assert all(future.result().status_code == 200 for future in busy)
    assert record(server.url, answer.headers["location"])["published"][0]["choices"] == [
        {"index": 0, "tokens": 0, "chars": 0}
    ]


def test_a_scope_reused_at_once_a_hundred_times_answers_in_every_newest_version(server, scope):
    with ExitStack() as open_streams:
        streams = []
        for epoch in range(1, 102):
            supersedes = {"X-Retire-Supersedes": str(epoch - 1)} if epoch > 1 else {}
            body = endless() if epoch < 101 else chat(8)
            streams.append(open_streams.enter_context(Stream(server.url, scope, body, **supersedes)))
            streams[-1].wait_for(SPOKE)  # it answers, while its predecessor is still being cleaned up
        versions = [stream.told() for stream in streams]
    for epoch, told in enumerate(versions, start=1):
        assert (told.status, told.headers["x-retire-epoch"], told.epochs) == (200, str(epoch), {epoch})
        if epoch < 101:
            assert told.ending["retire"]["superseded_by"] == epoch + 1
            assert told.ending["retire"]["published"]["chars"] == len(told.text)
    assert versions[-1].text == http.post(server.url + CHAT, json=chat(8)).json()["choices"][0]["message"]["content"]
    assert epoch_of(server.url, scope) == 101


def test_a_second_supersede_before_the_first_successor_has_spoken_wins(server, scope):
    with talking(server.url, scope) as old:
        prompt = {"model": MODEL, "prompt": long_prompt(17), "max_tokens": 1000, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            successor = {"endpoint": COMPLETIONS, "body": prompt}
            second = pool.submit(supersede, server.url, scope, 1, successor=successor)
            eventually(lambda: epoch_of(server.url, scope) == 2, "the first supersede was taken")
            third = supersede(server.url, scope, 2, successor={"body": chat()})
            answer = second.result()
            refused(answer, 410, "advanced")
            assert answer.headers["x-retire-epoch"] in ("2", "3")
            assert record(server.url, answer.headers["location"], until="accepted")["new_epoch"] == 2
        assert third.json()["retire"]["epoch"] == 3
        assert old.told().ending["retire"]["superseded_by"] == 2
    (published,) = record(server.url, third.headers["location"])["published"]
    assert published["epoch"] == 2, "what epoch 1 published stands in the first record"


def test_requests_that_share_an_id_of_the_clients_choice_share_no_fate(server, scope):
    body, same = endless(request_id="same"), {"X-Request-Id": "same"}
    with talking(server.url, f"{scope}-a", body, **same) as one, talking(server.url, f"{scope}-b", body, **same) as two:
        supersede(server.url, f"{scope}-a", 1, successor={"body": chat(1)})
        assert one.told().ending["retire"]["scope"] == f"{scope}-a"
        heard = two.heard()
        work_a_while(server.url, 20)
        assert two.heard() > heard
        supersede(server.url, f"{scope}-b", 1, successor={"body": chat(1)})
        assert two.told().ending["retire"]["scope"] == f"{scope}-b"


# -- contracts ---------------------------------------------------------------------------------------------------------


def test_a_contract_is_told_back_in_the_record(server, scope):
    at_epoch_1(server.url, scope)
    contract = {
        "inherit": "certified",
        "equivalence": "mode_matched",
        "keep_prefix": 6000,
        "deadline_ms": 2000,
        "retain": {"tier": "hbm", "ttl_s": 2.5},
    }
    answer = supersede(server.url, scope, 1, contract=contract, successor={"body": chat(1)})
    assert record(server.url, answer.headers["location"])["contract"] == contract


def test_the_same_contract_can_come_in_a_header(server, scope):
    at_epoch_1(server.url, scope)
    headers = {"X-Retire-Scope": scope, "X-Retire-Supersedes": "1", "X-Retire-Contract": '{"keep_prefix": 7}'}
    answer = http.post(server.url + CHAT, json=chat(1), headers=headers)
    assert record(server.url, answer.headers["location"])["contract"]["keep_prefix"] == 7


def test_inherit_none_starts_a_successor_cold_and_says_why(server, scope):
    text = "\n".join(map(str, long_prompt(23, 400)))
    with talking(server.url, scope, endless(text)):
        answer = supersede(server.url, scope, 1, contract={"inherit": "none"}, successor={"body": chat(4, text)})
    told = record(server.url, answer.headers["location"])
    assert (told["outcome"], told["refusal"], told["inherited_tokens"]) == ("cold", "not_wanted", 0)
    assert told["certificate"] is None
    assert answer.json()["choices"] == http.post(server.url + CHAT, json=chat(4, text)).json()["choices"]


@pytest.mark.parametrize("contract", [{}, {"keep_prefix": 300}])
def test_a_certified_successor_inherits_and_says_the_same(server, scope, contract):
    text = "\n".join(map(str, long_prompt(29 + len(contract), 400)))
    with talking(server.url, scope, endless(text)):
        answer = supersede(server.url, scope, 1, contract=contract, successor={"body": chat(4, text)})
    told = record(server.url, answer.headers["location"])
    assert (told["outcome"], told["refusal"]) == ("inherited", None)
    assert told["inherited_tokens"] == told["certificate"]["tokens"] > 300
    assert told["adopted_blocks"] == told["certificate"]["blocks"]
    assert answer.json()["choices"] == http.post(server.url + CHAT, json=chat(4, text)).json()["choices"]


@pytest.mark.parametrize(
    ("contract", "param"),
    [
        ({"retain": {"ttl_s": 1e9}}, "contract.retain.ttl_s"),
    ],
)
def test_a_contract_that_this_server_cannot_honour_is_422_and_changes_nothing(server, scope, contract, param):
    at_epoch_1(server.url, scope)
    assert refused(supersede(server.url, scope, 1, contract=contract), 422)["param"] == param
    assert epoch_of(server.url, scope) == 1


# -- records -----------------------------------------------------------------------------------------------------------


def test_prefer_wait_fenced_answers_when_no_obsolete_row_is_computed_any_more(server, scope):
    with talking(server.url, scope):
        answer = supersede(server.url, scope, 1, headers={"Prefer": "wait=fenced"})
    told = answer.json()
    assert told["fenced"] is True
    assert told["fence_ms"] >= 0
    assert answer.headers["preference-applied"] == "wait=fenced"
    found = http.get(server.url + answer.headers["location"]).json()
    assert found["fenced"]
    assert found["stages"]["fence"] == told["fence_ms"]


def test_preferences_may_come_in_a_list(server, scope):
    at_epoch_1(server.url, scope)
    assert supersede(server.url, scope, 1, headers={"Prefer": "respond-async, wait=fenced"}).json()["fenced"] is True


def test_published_tokens_that_are_not_known_are_not_called_zero(server, scope):
    body = chat(4, n=3, temperature=1.0)
    texts = [
        choice["message"]["content"]
        for choice in http.post(server.url + CHAT, json=body, headers={"X-Retire-Scope": scope}).json()["choices"]
    ]
    told = record(server.url, supersede(server.url, scope, 1, successor={"body": chat(1)}).headers["location"])
    (published,) = told["published"]
    assert [choice["chars"] for choice in published["choices"]] == [len(text) for text in texts]
    assert {choice["tokens"] for choice in published["choices"]} <= {4, None}


def test_every_answer_about_a_scope_names_it_and_its_epoch(server, scope):
    at_epoch_1(server.url, scope)

    def join(epoch):
        return http.post(server.url + CHAT, json=chat(1), headers={"X-Retire-Scope": scope, "X-Retire-Epoch": epoch})

    path = server.url + scope_path(scope)
    answers = {
        "supersede": supersede(server.url, scope, 1, successor={"body": chat(1)}),
        "join": join("2"),
        "stale supersede": supersede(server.url, scope, 1),
        "late": join("1"),
        "ahead": join("3"),
        "look": http.get(path),
        "pause": http.post(path + "/pause"),
        "continue": http.post(path + "/continue"),
        "cancel": http.delete(path),
        "cancelled": join("2"),
    }
    named = {at: (a.headers.get("x-retire-scope"), a.headers.get("x-retire-epoch")) for at, a in answers.items()}
    assert named == dict.fromkeys(answers, (scope, "2"))


def test_a_record_tells_what_was_published_and_accepted_fenced_reclaimed_are_separate_facts(server, scope):
    with talking(server.url, scope) as old:
        kept = {"retain": {"ttl_s": 60}}
        location = supersede(server.url, scope, 1, contract=kept).headers["location"]
        reply = old.told()
    waiting = record(server.url, location, until="fenced")
    assert waiting["accepted"]
    assert not waiting["reclaimed"], "its blocks wait for a successor"
    assert waiting["outcome"] is None
    http.post(server.url + CHAT, json=chat(2), headers={"X-Retire-Scope": scope})
    told = record(server.url, location)
    assert set(told) == {
        "id", "scope", "old_epoch", "new_epoch", "reason", "contract", "accepted", "fenced", "reclaimed", "closed",
        "outcome", "advance_ms", "stages", "receipts", "certificate", "refusal", "adopted_blocks", "inherited_tokens",
        "published",
    }  # fmt: skip
    (published,) = told["published"]
    assert published["epoch"] == 1
    assert published["choices"] == [{"index": 0, **reply.ending["retire"]["published"]}]
    assert published["choices"][0]["chars"] == len(reply.text)
    times = [told["stages"][stage] for stage in ("advance", "fence", "align", "reclaim")]
    assert times == sorted(times)
    assert {receipt["request"] for receipt in told["receipts"]}
    assert all(receipt["obsolete_closed_ms"] >= 0 for receipt in told["receipts"])


def test_a_transition_that_no_successor_follows_is_reclaimed_when_its_pins_expire(server, scope):
    with talking(server.url, scope):
        location = supersede(server.url, scope, 1).headers["location"]
    assert record(server.url, location)["outcome"] == "expired"
    later = http.post(server.url + CHAT, json=chat(), headers={"X-Retire-Scope": scope})
    assert later.json()["retire"]["epoch"] == 2


def test_how_long_the_store_took_is_in_the_record_and_counted(server, scope):
    def counted():
        lines = http.get(server.url + "/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("retire:advance_seconds_count "))

    before = counted()
    location = supersede(server.url, scope, 1).headers["location"]
    assert 0 < record(server.url, location, until="accepted")["advance_ms"] < 1000
    assert counted() == before + 1


def test_scopes_are_listed_with_what_runs_in_them(server, scope):
    with talking(server.url, scope):
        (found,) = [known for known in all_scopes(server) if known["scope"] == scope]
        assert found == scope_info(server.url, scope)
        assert found == {
            "scope": scope,
            "epoch": 1,
            "paused": False,
            "cancelled": False,
            "live_requests": 1,
            "transition": None,
        }
        told = supersede(server.url, scope, 1).json()
        assert scope_info(server.url, scope)["transition"] == told["id"]
    eventually(lambda: scope_info(server.url, scope)["live_requests"] == 0, "nothing runs any more")


# -- cancellation ------------------------------------------------------------------------------------------------------


def test_cancellation_is_terminal_until_a_higher_epoch_revives_the_scope(server, scope):
    with talking(server.url, scope) as old:
        answer = http.delete(server.url + scope_path(scope))
        assert answer.json()["cancelled"]
        assert answer.json()["epoch"] == 1
        told = old.told()
    assert told.ending["retire"]["cancelled"] is True
    assert told.ending["choices"][0]["finish_reason"] == "length"
    assert told.ending["retire"]["published"]["chars"] == len(told.text)

    def join(**headers):
        return http.post(server.url + CHAT, json=chat(), headers={"X-Retire-Scope": scope, **headers})

    refused(join(), 410)
    refused(join(**{"X-Retire-Epoch": "1"}), 410)
    refused(supersede(server.url, scope, 1), 410)
    refused(supersede(server.url, scope, "*", successor={"body": chat()}), 410)
    refused(http.post(server.url + scope_path(scope) + "/pause"), 410)
    assert http.delete(server.url + scope_path(scope)).json()["cancelled"]
    assert scope_info(server.url, scope)["epoch"] == 1
    assert join(**{"X-Retire-Epoch": "7"}).json()["retire"] == {"scope": scope, "epoch": 7}
    assert scope_info(server.url, scope) == {
        "scope": scope, "epoch": 7, "paused": False, "cancelled": False, "live_requests": 0, "transition": None,
    }  # fmt: skip
    assert supersede(server.url, scope, 7, successor={"body": chat()}).json()["retire"]["epoch"] == 8


def test_a_request_that_does_not_stream_gets_410_when_its_scope_is_cancelled(server, scope):
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(http.post, server.url + CHAT, json=endless(), headers={"X-Retire-Scope": scope})
        eventually(lambda: epoch_of(server.url, scope) and scope_info(server.url, scope)["live_requests"], "it runs")
        http.delete(server.url + scope_path(scope))
        refused(old.result(), 410)


def test_a_revived_scope_may_carry_the_highest_epoch_and_is_then_exhausted(server, scope):
    at_epoch_1(server.url, scope)
    http.delete(server.url + scope_path(scope))
    top = 2**64 - 1
    answer = http.post(server.url + CHAT, json=chat(), headers={"X-Retire-Scope": scope, "X-Retire-Epoch": str(top)})
    assert answer.json()["retire"]["epoch"] == top
    assert refused(supersede(server.url, scope, top), 409)["current_epoch"] == top
    assert epoch_of(server.url, scope) == top


# -- pause and continue ------------------------------------------------------------------------------------------------


def pause(server, scope, word="pause"):
    """Pause or continue the scope."""
    answer = http.post(f"{server.url}{scope_path(scope)}/{word}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def stand_still(server, stream):
    """Wait for what was in flight when the pause came; then say how much has come."""
    http.get(server.url + "/retire/status")  # answered by the engine between two steps
    work_a_while(server.url, 10)
    return stream.heard()


def test_a_paused_scope_publishes_nothing_and_keeps_its_authority_until_it_continues(server, scope):
    with talking(server.url, scope) as stream:
        told = pause(server, scope)
        assert (told["paused"], told["epoch"], told["live_requests"]) == (True, 1, 1)
        before = stand_still(server, stream)
        work_a_while(server.url, 60)
        assert stream.heard() == before, "sixty steps for others, none for the paused scope"
        assert pause(server, scope, "continue")["paused"] is False
        eventually(lambda: stream.heard() > before + 30, "it goes on")
        http.delete(server.url + scope_path(scope))
        told = stream.told()
    clean = http.post(server.url + CHAT, json=chat(before + 20)).json()["choices"][0]["message"]["content"]
    assert told.text.startswith(clean), "as if it had never been paused"
    assert told.epochs == {1}


def test_the_engine_idles_while_all_it_has_is_paused(server, scope):
    def used(seconds):
        before = cpu_s(server.children())
        time.sleep(seconds)
        return cpu_s(server.children()) - before

    with talking(server.url, scope):
        working = used(0.5)
        pause(server, scope)
        eventually(lambda: used(0.5) < 0.1 * working, "the engine has come to rest")


def test_a_new_request_of_a_paused_scope_waits_with_it(server, scope):
    at_epoch_1(server.url, scope)
    pause(server, scope)
    with Stream(server.url, scope, chat()) as stream:
        eventually(lambda: scope_info(server.url, scope)["live_requests"], "it has arrived")
        work_a_while(server.url)
        assert not stream.heard()
        pause(server, scope, "continue")
        said = http.post(server.url + CHAT, json=chat()).json()["choices"][0]["message"]["content"]
        assert stream.told().text == said


def test_superseding_a_paused_scope_ends_the_old_version_at_once_and_the_successor_waits_for_continue(server, scope):
    with talking(server.url, scope) as old:
        pause(server, scope)
        with Stream(server.url, scope, chat(), **{"X-Retire-Supersedes": "1"}) as new:
            assert old.told().ending["retire"]["superseded_by"] == 2
            eventually(lambda: scope_info(server.url, scope)["live_requests"] == 1, "the successor is here")
            told = scope_info(server.url, scope)
            assert (told["paused"], told["epoch"]) == (True, 2)
            assert record(server.url, f"/transitions/{told['transition']}", until="fenced")
            work_a_while(server.url)
            assert not new.heard()
            pause(server, scope, "continue")
            said = http.post(server.url + CHAT, json=chat()).json()["choices"][0]["message"]["content"]
            assert new.told().text == said


def test_a_paused_scope_can_be_cancelled(server, scope):
    with talking(server.url, scope) as old:
        pause(server, scope)
        assert http.delete(server.url + scope_path(scope)).json()["cancelled"]
        assert old.told().ending["retire"]["cancelled"] is True


def test_the_client_of_a_paused_request_may_leave(server, scope):
    with talking(server.url, scope):
        pause(server, scope)
    eventually(lambda: scope_info(server.url, scope)["live_requests"] == 0, "the server has noticed")


# -- idempotency -------------------------------------------------------------------------------------------------------


def test_one_key_is_one_transition_and_three_equal_answers(server, scope):
    at_epoch_1(server.url, scope)
    key = {"Idempotency-Key": uuid.uuid4().hex}
    start = threading.Barrier(2)

    def send():
        start.wait()
        return supersede(server.url, scope, 1, key, reason="tool_result")

    with ThreadPoolExecutor(2) as pool:
        answers = [future.result() for future in [pool.submit(send), pool.submit(send)]]
    http.post(server.url + CHAT, json=chat(1), headers={"X-Retire-Scope": scope})
    record(server.url, answers[0].headers["location"])
    answers.append(supersede(server.url, scope, 1, key, reason="tool_result"))
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert answers[0].json() == answers[1].json() == answers[2].json()
    assert len({answer.headers["location"] for answer in answers}) == 1
    assert epoch_of(server.url, scope) == 2


def test_one_key_with_another_body_is_422_and_changes_nothing(server, scope):
    at_epoch_1(server.url, scope)
    key = {"Idempotency-Key": uuid.uuid4().hex}
    supersede(server.url, scope, 1, key)
    assert refused(supersede(server.url, scope, 2, key), 422)["param"] == "Idempotency-Key"
    assert refused(supersede(server.url, f"{scope}-other", "*", key), 422)
    assert epoch_of(server.url, scope) == 2


def test_star_with_a_key_advances_once(server, scope):
    at_epoch_1(server.url, scope)
    key = {"Idempotency-Key": uuid.uuid4().hex}
    assert supersede(server.url, scope, "*", key).json() == supersede(server.url, scope, "*", key).json()
    assert epoch_of(server.url, scope) == 2


def test_a_replay_gives_the_record_and_never_frames(server, scope):
    at_epoch_1(server.url, scope)
    key = {"Idempotency-Key": uuid.uuid4().hex}
    first = supersede(server.url, scope, 1, key, successor={"body": chat(stream=True)})
    assert first.headers["content-type"].startswith("text/event-stream")
    replay = supersede(server.url, scope, 1, key, successor={"body": chat(stream=True)})
    assert replay.json()["new_epoch"] == 2
    assert replay.headers["location"] == first.headers["location"]
    assert "choices" not in replay.text


def test_a_key_whose_supersede_was_refused_can_be_used_again(server, scope):
    at_epoch_1(server.url, scope)
    key = {"Idempotency-Key": uuid.uuid4().hex}
    refused(supersede(server.url, scope, 2, key), 409)
    supersede(server.url, scope, 1)
    assert supersede(server.url, scope, 2, key).json()["new_epoch"] == 3
    assert supersede(server.url, scope, 2, key).json()["new_epoch"] == 3


# -- documentation -----------------------------------------------------------------------------------------------------


def test_openapi_describes_the_routes_with_examples(server):
    paths = http.get(server.url + "/openapi.json").json()["paths"]
    ours = {
        SUPERSEDE: ["post"],
        "/scopes": ["get"],
        "/scopes/{scope}": ["get", "delete"],
        "/scopes/{scope}/pause": ["post"],
        "/scopes/{scope}/continue": ["post"],
        "/transitions/{transition}": ["get"],
        "/retire/status": ["get"],
    }
    for path, methods in ours.items():
        for method in methods:
            assert paths[path][method]["description"], f"{method} {path}"
    documented = http.get(server.url + "/openapi.json").json()["components"]["schemas"]["SupersedeBody"]
    assert len(documented["examples"]) >= 2
    for example in documented["examples"]:
        assert {"scope", "expected_epoch"} <= set(example)
    assert {"400", "404", "409", "410", "422", "429", "503"} <= set(paths[SUPERSEDE]["post"]["responses"])


def test_the_documented_examples_are_accepted(server, scope):
    documented = http.get(server.url + "/openapi.json").json()["components"]["schemas"]["SupersedeBody"]
    for example in documented["examples"]:
        at = f"{scope}-{documented['examples'].index(example)}"
        at_epoch_1(server.url, at)
        body = {**example, "scope": at, "expected_epoch": 1}
        if "successor" in body:
            body["successor"] = {**body["successor"], "body": {**body["successor"]["body"], "model": MODEL}}
            body["successor"]["body"]["max_tokens"] = 1
        answer = http.post(server.url + SUPERSEDE, json=body)
        assert answer.status_code == 200, answer.text
