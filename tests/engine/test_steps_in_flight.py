"""Several steps in flight, as under asynchronous scheduling: a step is launched before the one before it has ended.

`Ahead` counts as vLLM's asynchronous scheduler does: a token that is still being sampled has a place already, and its
row is in the next step.  Blocks that go while a step may write them go back when it has ended (`defer_block_free`).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from retire.engine.rates import Rates
from retire.engine.scheduler import VersionedScheduler
from retire.engine.worker import StepGuard
from tests.engine.test_coordinator import (
    ALL_STAGES,
    AT_RANDOM,
    PROMPT,
    REVISED,
    Churn,
    FakeRequest,
    FakeStep,
    World,
    outcomes,
    stages,
    world_in,
)

POISON = -1


class Ahead(World):
    """`forgetful`: the worker does not know which of its earlier steps it has cut."""

    forgetful = False

    def __init__(self, folder: Path, **more: Any) -> None:
        super().__init__(folder, **more)
        self._one_guard = StepGuard(self.table, patience=self.patience)

    def arrive(self, request: FakeRequest, tag: Any) -> None:
        request.placeholders = request.in_flight = request.stale = 0
        super().arrive(request, tag)

    def _guard(self) -> StepGuard:
        return super()._guard() if self.forgetful else self._one_guard

    def _may_go_on(self, rid: str) -> bool:
        return not self.retire.is_scoped(rid) or self.retire.may_go_on(rid)

    def _may_start(self, request: FakeRequest) -> bool:
        return request.stale == 0  # upstream ends the step first that was in flight at its preemption

    def _may_preempt(self, rid: str) -> bool:
        return len(self.steps) < 2 and rid in self.requests  # it happens while the next step is scheduled

    def _known_tokens(self, request: FakeRequest) -> int:
        return request.num_tokens + request.placeholders

    def _launched(self, request: FakeRequest, count: int) -> None:
        request.in_flight += count
        if request.num_computed_tokens >= self._known_tokens(request):  # not a chunk with more of the prompt behind it
            request.placeholders += 1
            self._sampling.add(request.request_id)

    def schedule(self, budget: int = 16) -> FakeStep | None:
        self._sampling: set[str] = set()
        step = super().schedule(budget)
        if step is not None:
            step.samples = self._sampling
        return step

    def _sampled(self, step: FakeStep) -> None:
        """`update_from_output` and `_update_request_with_output` of the asynchronous scheduler."""
        for at, blocks in [one for one in self.deferred if one[0] is step]:
            self.pool.free_blocks(blocks)
            self.deferred.remove((at, blocks))
        for rid, count in step.num_scheduled_tokens.items():
            request = self.requests.get(rid)
            if request is None:
                continue
            request.in_flight -= count
            stale = request.stale > 0
            if stale:
                request.stale -= count
            if rid not in step.samples or self.retire.counts_for_nothing(rid):
                continue
            request.all_token_ids.append(len(request.all_token_ids) * 7 % 50)
            if not stale:
                request.placeholders -= 1
                assert request.placeholders >= 0
            if rid in self.running and self.retire.is_scoped(rid):
                self.publish(request, request.num_computed_tokens - request.placeholders)
            if request.full():
                self.finished.append(rid)
                self._free_request(rid)

    def preempt(self, rid: str) -> None:
        request = self.requests[rid]
        request.placeholders, request.stale = 0, request.in_flight
        super().preempt(rid)

    def step(self, budget: int = 16) -> bool:
        """Launch the next one before the oldest has ended."""
        made = self.schedule(budget)
        if made is None and not self.steps:
            return False
        if made is None or len(self.steps) == 2:
            self.finish_step()
        return True

    def _free_blocks(self, rid: str) -> None:
        if not self._in_flight(rid):
            super()._free_blocks(rid)
            return
        last = next(step for step in reversed(self.steps) if rid in step.num_scheduled_tokens)
        blocks = [b for group in self.tables.pop(rid, []) for b in reversed(group) if not b.is_null]
        self.deferred.append((last, blocks))

    def _write(self, request: FakeRequest, start: int, end: int, table: list[list[Any]]) -> None:
        """Rows that attend to what was never written are worth nothing, like those of a token nobody has sampled."""
        sound = end <= request.num_tokens
        for group, blocks in zip(self.groups, table, strict=True):
            block = blocks[(start - 1) // group.block_tokens] if start else None
            if block is not None and not block.is_null:
                sound &= self.content.get((block.block_id, (start - 1) % group.block_tokens)) == request.prefix(start)
        if sound:
            super()._write(request, start, end, table)
            return
        for group, blocks in zip(self.groups, table, strict=True):
            for position in range(start, end):
                block = blocks[position // group.block_tokens]
                if not block.is_null:
                    self.content[block.block_id, position % group.block_tokens] = POISON


class Forgetful(Ahead):
    forgetful = True


@pytest.fixture(params=[Ahead, Forgetful])
def make(request: pytest.FixtureRequest) -> type[Ahead]:
    return request.param


def test_a_token_has_a_row_before_it_is_known(tmp_path: Path) -> None:
    with world_in(tmp_path, make=Ahead) as world:
        rid = world.admit(world.scope(), PROMPT[:16])
        world.schedule()
        step = world.schedule()
        assert step.num_scheduled_tokens == {rid: 1}
        assert world.requests[rid].num_tokens == 16
        world.finish_step()
        assert world.published[rid] == 16
        world.finish_step()
        assert world.requests[rid].num_tokens == 18
        assert world.retire._requests[rid].frontier_tokens == 17


def test_everything_is_as_without_running_ahead(tmp_path: Path) -> None:
    said = []
    for number, kind in enumerate((World, Ahead)):
        (tmp_path / str(number)).mkdir()
        with world_in(tmp_path / str(number), make=kind) as world:
            rid = world.admit(world.scope(), PROMPT, max_tokens=9)
            request = world.requests[rid]
            world.run()
            said.append(request.all_token_ids)
            assert world.published[rid] >= 48
    assert said[0] == said[1]


def test_the_first_is_cut_and_the_second_counts_for_nothing(tmp_path: Path, make: type[Ahead]) -> None:
    with world_in(tmp_path, make=make) as world:
        scope = world.scope()
        old = world.admit(scope, PROMPT)
        world.step(8)
        world.finish_step()
        world.schedule(8)
        world.schedule(8)
        scope.store()
        world.table.lower(world.tags[old].ticket, 12)
        world.deliver()
        world.finish_step()
        world.pass_time(5)
        assert world.retire._requests[old].frontier_tokens == 12
        assert old in world.requests, "its second step is still computed"
        assert not world.facts("receipt")
        world.finish_step(stop=None if make is Ahead else False)
        receipt = world.one("receipt")
        assert (receipt["frontier_tokens"], receipt["choice"]) == (12, "trim")
        assert make is Ahead or receipt["obsolete_closed_ns"] == world.now_ns, "when the second had ended"
        world.admit(scope, REVISED)
        world.run()
        assert world.one("certificate")["tokens"] == 12


def test_the_first_is_kept_and_the_second_cut(tmp_path: Path, make: type[Ahead]) -> None:
    with world_in(tmp_path, make=make) as world:
        scope = world.scope()
        old = world.admit(scope, PROMPT)
        world.schedule(16)
        world.schedule(16)
        world.finish_step()
        transition = scope.store()
        world.table.lower(world.tags[old].ticket, 20)
        world.deliver()
        world.finish_step()
        assert world.one("receipt")["frontier_tokens"] == 20
        new = world.admit(scope, REVISED)
        world.run()
        assert world.started_at[new] == 20
        assert outcomes(world) == {transition: "inherited"}
        assert stages(world, transition) == ALL_STAGES


def test_a_token_sampled_from_nothing_is_seen_by_nobody(tmp_path: Path, make: type[Ahead]) -> None:
    """The prompt's last chunk is stopped, and the row of the token it would have given is in flight."""
    with world_in(tmp_path, make=make) as world:
        scope = world.scope()
        old = world.admit(scope, PROMPT[:32])
        request = world.requests[old]
        world.schedule(16)
        world.finish_step()
        world.schedule(16)
        assert world.schedule(16).num_scheduled_tokens == {old: 1}
        scope.supersede()
        world.finish_step(stop=True)
        assert world.retire.counts_for_nothing(old)
        assert request.num_tokens == 32
        assert world.published[old] == 16
        world.finish_step(stop=None if make is Ahead else False)
        assert world.one("receipt")["frontier_tokens"] == 16
        assert request.num_tokens == 32


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_a_version_ends_while_it_decodes_with_two_tokens_on_their_way(tmp_path: Path, ended: int) -> None:
    with world_in(tmp_path, make=Ahead, arm_rows=2) as world:
        scope = world.scope()
        old = world.admit(scope, PROMPT, max_tokens=20)
        for _ in range(8):
            world.step()
        world.schedule()
        known = world.requests[old].num_tokens
        for _ in range(ended):
            world.finish_step()
        scope.store()
        for _ in range(2 - ended):
            world.finish_step()
        world.deliver()
        assert old not in world.requests
        assert world.one("receipt")["frontier_tokens"] == known + min(ended, 1)
        world.admit(scope, REVISED)
        world.run()
        assert world.one("certificate")["tokens"] == 28


def test_a_preemption_between_takes_what_the_first_has_written(tmp_path: Path) -> None:
    with world_in(tmp_path, make=Ahead) as world:
        rid = world.admit(world.scope(), PROMPT[:16], max_tokens=6)
        world.step()
        world.preempt(rid)
        before = world.pool.get_num_free_blocks()
        assert world.deferred, "its step may still write them"
        world.finish_step()
        assert world.pool.get_num_free_blocks() == before + 4
        assert world.retire._requests[rid].frontier_tokens == 0
        assert world.requests[rid].num_tokens == 17, "the token was sampled, and is delivered"
        world.run()
        assert world.finished == [rid]


def test_who_finishes_by_itself_with_a_row_too_many_in_flight_can_be_inherited_from(tmp_path: Path) -> None:
    with world_in(tmp_path, make=Ahead) as world:
        scope = world.scope()
        old = world.admit(scope, PROMPT, max_tokens=1)
        for _ in range(2):
            world.schedule()
            world.finish_step()
        world.schedule()
        world.schedule()
        world.finish_step()
        assert world.finished == [old]
        assert world.deferred
        world.admit(scope, [9] * 20)
        transition = scope.supersede()
        new = world.admit(scope, REVISED)
        world.run()
        assert world.started_at[new] == 28
        assert outcomes(world) == {transition: "inherited"}


def test_a_step_takes_as_long_as_it_had_the_device_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    took: list[int] = []
    monkeypatch.setattr(Rates, "ran", lambda _self, _rows, _requests, took_ns: took.append(took_ns))
    with world_in(tmp_path, make=Ahead) as world:
        world.admit(world.scope(), PROMPT)
        world.schedule()
        world.pass_time(10)
        world.schedule()
        world.pass_time(20)
        world.finish_step()
        world.pass_time(5)
        world.finish_step()
        assert took == [30_000_000, 5_000_000]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_who_is_aborted_with_its_ticket_in_order_gets_no_further_step(tmp_path: Path, in_flight: int) -> None:
    """A stop string was seen.  The abort waits for the last step, so there must be a last one."""
    with world_in(tmp_path, make=Ahead) as world:
        rid = world.admit(world.scope(), PROMPT[:16], max_tokens=100)
        other = world.admit(None, PROMPT[:8], max_tokens=9)
        for _ in range(4):
            world.step()
        if in_flight == 2:
            world.schedule()
        world.abort(rid)
        for _ in range(in_flight):
            assert rid in world.requests, "a step computes it"
            assert set(world.schedule().num_scheduled_tokens) == {other}
            world.finish_step()
        assert rid not in world.requests
        world.run()
        assert world.finished == [other]


def test_who_is_aborted_after_a_preemption_does_not_start_over(tmp_path: Path) -> None:
    with world_in(tmp_path, make=Ahead) as world:
        rid = world.admit(world.scope(), PROMPT[:16], max_tokens=6)
        world.schedule()
        world.preempt(rid)
        world.abort(rid)
        assert not world.retire.may_run(world.requests[rid])
        world.finish_step()
        assert rid not in world.requests


class Upstream:
    def update_from_output(self, _scheduled: Any, output: Any) -> dict[int, Any]:
        self.seen = output.sampled_token_ids
        return {}


class Both(VersionedScheduler, Upstream):
    def __init__(self, over: set[str]) -> None:
        self._tier = None
        self.order: list[Any] = []
        self.retire: Any = SimpleNamespace(
            step_ended=lambda _output, receipt: self.order.append(receipt),
            scoped_requests=len(over),
            counts_for_nothing=lambda rid: self.order.append(rid) or rid in over,
            facts=SimpleNamespace(flush=lambda: None),
        )


@pytest.mark.parametrize("said", [[[7], [8]], [[7], []], []])
def test_upstream_is_shown_no_token_of_a_version_that_is_over(said: list[list[int]]) -> None:
    scheduler = Both({"old"})
    output = SimpleNamespace(
        sampled_token_ids=said,
        req_id_to_index={"old": 0, "other": 1},
        kv_connector_output=None,
        retire_receipt="receipt",
    )
    scheduler.update_from_output(SimpleNamespace(num_scheduled_tokens={"other": 3, "old": 1}), output)
    assert scheduler.order[0] == "receipt", "what has lost authority is closed first, if nothing computes it"
    assert scheduler.seen == ([[], *said[1:]] if said else [])


# -- at random --------------------------------------------------------------------------------------------------------


class ChurnAhead(Churn):
    """Denser than its parent where this file looks: versions end while their requests are in two steps."""

    make = Ahead

    @rule(count=st.integers(1, 5), budget=st.sampled_from([6, 16, 24]))
    def go_on(self, count: int, budget: int) -> None:
        for _ in range(count):
            self.world.step(budget)
        self.world.schedule(budget)

    @precondition(lambda self: self.in_flight())
    @rule(data=st.data(), tokens=st.none() | st.integers(0, 40), late=st.booleans())
    def supersede_in_flight(self, data: st.DataObject, tokens: int | None, late: bool) -> None:
        rid = data.draw(st.sampled_from(self.in_flight()))
        self.world.scope(self.world.tags[rid].scope).store()
        if tokens is not None:
            self.world.table.lower(self.world.tags[rid].ticket, tokens)
        self.world.finish_step()
        if late and self.world.steps:  # whatever it was launched on
            self.world.finish_step(stop=False)

    def in_flight(self) -> list[str]:
        """Requests of a current epoch that the oldest step computes."""
        found = self.world.steps[0].num_scheduled_tokens if self.world.steps else ()
        table, tags = self.world.table, self.world.tags
        return sorted(rid for rid in found if rid in tags and table.holds(tags[rid].ticket))


class ChurnForgetful(ChurnAhead):
    make = Forgetful


ChurnAhead.TestCase.settings = ChurnForgetful.TestCase.settings = AT_RANDOM
TestChurnAhead, TestChurnForgetful = ChurnAhead.TestCase, ChurnForgetful.TestCase
