"""Prompts are cut to a quantum by upstream's own scheduler, which is told so for one step.

No model and no worker: `Steps` plays the engine around a scheduler of vLLM's, synchronous or asynchronous.
"""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from retire.core.errors import SeamError
from retire.core.quantum import HALVINGS, Policy, Selector
from retire.engine import configuration, coordinator
from retire.engine.quantum import cut_to
from retire.engine.rates import Rates
from retire.engine.scheduler import VersionedScheduler
from tests.core.test_quantum import seen
from tests.engine.test_coordinator import PROMPT, REVISED, world_in

LARGEST, UNIT = 512, 32
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    init_none_hash(sha256)
    cache = CacheConfig(block_size=UNIT, enable_prefix_caching=True)
    cache.num_gpu_blocks = 1000
    return VllmConfig(
        model_config=ModelConfig(str(folder), skip_tokenizer_init=True, max_model_len=4096, dtype="float32"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=32,
            max_num_batched_tokens=LARGEST,
            max_model_len=4096,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=cache,
    )


class Steps:
    """`ahead`: how many steps are launched before the oldest has ended.  `guesses`: of every decode."""

    def __init__(self, config: VllmConfig, kind: type[Scheduler] = Scheduler, *, guesses: int = 0) -> None:
        spec = FullAttentionSpec(block_size=UNIT, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks=1000, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)])
        self.scheduler: Any = kind(config, cache, MagicMock(), block_size=UNIT)
        self.scheduler.num_spec_tokens = self.guesses = guesses
        self.ahead = 2 if kind is AsyncScheduler else 1
        self.flying: list[Any] = []
        self.names = 0

    def add(self, tokens: int, answer: int = 400) -> str:
        self.names += 1
        self.scheduler.add_request(
            Request(
                request_id=str(self.names),
                prompt_token_ids=[self.names] * tokens,
                sampling_params=SamplingParams(max_tokens=answer, ignore_eos=True),
                pooling_params=None,
                block_hasher=get_request_block_hasher(UNIT, sha256),
            )
        )
        return str(self.names)

    def step(self, quantum: int = LARGEST) -> dict[str, int]:
        """What the next step has of whom.  The oldest step ends."""
        for request in self.scheduler.running:
            if self.guesses and not request.is_prefill_chunk and not request.spec_token_ids:
                request.spec_token_ids = [0] * self.guesses
        with cut_to(quantum, self.scheduler) if quantum < LARGEST else nullcontext():
            output = self.scheduler.schedule()
        self.flying.append(output)
        if len(self.flying) == self.ahead:
            self.end()
        return output.num_scheduled_tokens

    def end(self) -> None:
        output = self.flying.pop(0)
        ids = list(output.num_scheduled_tokens)
        said = []
        for request_id in ids:
            request = self.scheduler.requests.get(request_id)
            guessed = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            spoke = request is not None and (self.ahead > 1 or not request.is_prefill_chunk)
            if self.ahead > 1:  # whether the chunk was the prompt's last is known from the step itself
                spoke = request is not None and request_id in self._last_chunks(output)
            said.append([7] * (1 + guessed) if spoke else [])
        result = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={one: n for n, one in enumerate(ids)}, sampled_token_ids=said
        )
        self.scheduler.update_from_output(output, result)

    def _last_chunks(self, output: Any) -> set[str]:
        ends = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        ends |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return {
            one
            for one, start in ends.items()
            if one in self.scheduler.requests
            and start + output.num_scheduled_tokens[one] >= self.scheduler.requests[one].num_prompt_tokens
        }

    def decoding(self) -> list[str]:
        """Requests with nothing left of their prompts whose last token is not on its way."""
        return [
            request.request_id
            for request in self.scheduler.running
            if request.num_computed_tokens >= request.num_prompt_tokens
            and request.num_output_tokens + request.num_output_placeholders < request.max_tokens
        ]


@pytest.fixture(params=[Scheduler, AsyncScheduler], ids=["synchronous", "asynchronous"])
def steps(request: pytest.FixtureRequest, config: VllmConfig) -> Steps:
    return Steps(config, request.param)


def test_a_prompt_that_is_alone_is_cut_although_upstreams_threshold_spares_it(steps):
    one = steps.add(1000)
    assert [steps.step(64), steps.step(128), steps.step()] == [{one: 64}, {one: 128}, {one: 512}]


def test_afterwards_nothing_is_left_of_it(steps):
    scheduler = steps.scheduler
    steps.add(1000)
    steps.add(1000)
    before = scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.long_prefill_token_threshold
    with pytest.raises(ZeroDivisionError), cut_to(64, scheduler):
        raise ZeroDivisionError
    steps.step(64)
    assert (scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.long_prefill_token_threshold) == before
    assert all(one.next_decode_eligible_step <= scheduler.current_step for one in scheduler.running)


def test_prompts_are_served_in_their_order_and_what_is_left_goes_to_the_next(steps):
    one, two, three = steps.add(80), steps.add(500), steps.add(500)
    assert steps.step(64) == {one: 64}
    assert steps.step(64) == {one: 16, two: 48}
    assert steps.step(64) == {one: 1, two: 64}
    assert three not in steps.step(64)


@pytest.mark.parametrize("guesses", [0, 3])
def test_decodes_come_on_top_whoever_stands_before_them(config, guesses):
    steps = Steps(config, guesses=guesses)
    talking = [steps.add(20) for _ in range(20)]
    steps.step()
    prompts = [steps.add(1000), steps.add(1000)]
    steps.step(64)
    steps.step()
    running = steps.scheduler.running
    running.sort(key=lambda request: request.request_id not in prompts)  # prompts in front
    found = steps.step(64)
    assert {one: found[one] for one in talking} == dict.fromkeys(talking, 1 + guesses)
    assert sum(found.get(one, 0) for one in prompts) == 64


def test_a_threshold_of_the_servers_own_still_holds(config):
    steps = Steps(config)
    config.scheduler_config.long_prefill_token_threshold = 96
    try:
        one, two = steps.add(1000), steps.add(1000)
        assert steps.step(256) == {one: 96, two: 96}
    finally:
        config.scheduler_config.long_prefill_token_threshold = 0


@pytest.mark.parametrize(("quantum", "shares"), [(64, [64]), (256, [128, 128]), (448, [128, 128, 128, 64])])
def test_a_threshold_that_adapts_gives_no_less_than_upstreams_fair_share(config, quantum, shares):
    steps = Steps(config)
    config.scheduler_config.long_prefill_token_threshold = 32
    steps.scheduler.adaptive_long_prefill_threshold = True
    try:
        for _ in range(4):
            steps.add(1000)
        assert list(steps.step(quantum).values()) == shares
        assert config.scheduler_config.long_prefill_token_threshold == 32
        assert steps.scheduler.adaptive_long_prefill_threshold
    finally:
        config.scheduler_config.long_prefill_token_threshold = 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("kind", "guesses"), [(Scheduler, 0), (Scheduler, 3), (AsyncScheduler, 0)])
def test_at_random_no_decode_waits_and_everybody_ends(config, kind, guesses, seed):
    draw, steps, done = random.Random(seed), Steps(config, kind, guesses=guesses), {}
    waiting = [draw.randint(1, 500) for _ in range(draw.randint(2, 6))]
    for _ in range(200):
        if waiting and draw.random() < 0.4:
            steps.add(waiting.pop(), draw.randint(1, 12))
        quantum, due = draw.choice([UNIT, 64, 128, 256]), steps.decoding()
        prompts = {one.request_id: one.num_prompt_tokens for one in steps.scheduler.requests.values()}
        found = steps.step(quantum)
        assert set(due) <= set(found)
        for one, tokens in found.items():
            before, done[one] = done.get(one, 0), done.get(one, 0) + tokens
            assert tokens <= quantum or before >= prompts[one]
        assert sum(found[one] for one in set(found) - set(due)) < 2 * quantum + len(found) * (1 + guesses)
        if not waiting and not steps.scheduler.requests:
            return
    raise AssertionError("somebody waits for ever")


# -- who chooses ------------------------------------------------------------------------------------------------------


class Chooses(VersionedScheduler):
    """The mixin beside nothing: its `_quantum` alone."""

    def __init__(self, steps: Steps, chosen: int, turn: str | None = None) -> None:
        self.steps, self.asked = steps, []
        self._selector: Any = SimpleNamespace(choose=lambda step_s: self.asked.append(step_s) or chosen)
        self._rates: Any = SimpleNamespace(largest_ns=512e6)
        self._turn = turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["steps"].scheduler, name)


def test_the_selector_is_told_how_long_the_largest_step_takes(config):
    chooser = Chooses(Steps(config), LARGEST)
    with chooser._quantum():
        assert chooser.steps.scheduler.max_num_scheduled_tokens == LARGEST
    assert chooser.asked == [pytest.approx(0.512)]


def test_a_small_quantum_does_not_hold_itself_down():
    """The share of a step's fixed cost is large in its tokens, and says nothing about how long the largest takes."""
    selector, rates = seen(0.05, 8), Rates(0, None, largest=LARGEST)
    for rows in [LARGEST, *[LARGEST >> HALVINGS] * 50]:
        rates.ran(rows, rows, int((0.1 + 0.305 * rows / LARGEST) * 1e9))
    assert selector.choose(rates.largest_ns / 1e9) == LARGEST


def test_a_request_that_runs_alone_keeps_the_chunks_of_a_clean_run(config):
    chooser = Chooses(Steps(config), 64, turn="r1")
    with chooser._quantum():
        assert chooser.steps.scheduler.max_num_scheduled_tokens == LARGEST
    assert chooser.asked == []


def test_other_policies_ask_nobody(config):
    chooser = Chooses(Steps(config), 64)
    chooser._selector = None
    chooser._rates = None
    with chooser._quantum():
        assert chooser.steps.scheduler.max_num_scheduled_tokens == LARGEST


def test_revisions_of_live_scopes_count_and_those_of_idle_ones_do_not(tmp_path: Path):
    selector = Selector((16, 8, 4))
    with world_in(tmp_path, selector=selector) as world:
        scope = world.scope()
        scope.supersede()
        assert selector.pressure == 0
        world.admit(scope, PROMPT)
        world.pass_time(1000)
        world.step()
        world.pass_time(1000)
        scope.supersede()
        assert selector.pressure > 0
        world.admit(scope, REVISED)
        world.run()
        world.pass_time(1e6)
        world.step()
        assert selector.pressure == pytest.approx(0, abs=1e-9), "it has faded"


def its_first_step_stops(world: Any, scope: Any) -> None:
    """With nothing in common: no row of it is of use, no block is kept, and the step's end comes before the message."""
    world.admit(scope, PROMPT)
    world.schedule()
    scope.store()
    world.finish_step(stop=True)


def it_waits(world: Any, scope: Any) -> None:
    world.admit(scope, PROMPT)
    scope.store()
    world.schedule()


def its_abort_overtakes(world: Any, scope: Any) -> None:
    """Between two of its steps: vLLM's abort is carried out at once."""
    old = world.admit(scope, PROMPT, max_tokens=9)
    world.step()
    scope.store()
    world.client_leaves(old)


@pytest.mark.parametrize("gone", [its_first_step_stops, it_waits, its_abort_overtakes])
def test_a_revision_counts_although_its_request_is_gone_when_the_message_comes(tmp_path: Path, gone):
    selector = Selector((16, 8, 4))
    with world_in(tmp_path, selector=selector) as world:
        gone(world, world.scope())
        assert not world.requests
        assert selector.pressure == 0
        world.deliver()
        once = selector.pressure
        assert once > 0
        world.scope().supersede()
        assert selector.pressure == once, "it counts once"
        assert not world.retire._left_behind


def test_what_ended_before_it_was_superseded_or_came_after_does_not_count(tmp_path: Path):
    selector = Selector((16, 8, 4))
    with world_in(tmp_path, selector=selector) as world:
        world.client_leaves(world.admit(world.scope("left"), PROMPT))
        world.scope("left").supersede()
        late = world.scope("late")
        late.store()
        world.admit(late, REVISED)  # nothing of the old epoch ever was
        world.deliver()
        assert selector.pressure == 0


def test_revisions_that_nobody_tells_of_are_not_kept_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(coordinator, "LEFT_BEHIND", 3)
    with world_in(tmp_path, selector=Selector((16, 8, 4))) as world:
        for _ in range(5):
            it_waits(world, world.scope())
            world.messages.clear()
        assert [epoch for _, epoch in world.retire._left_behind] == [3, 4, 5]


@pytest.mark.parametrize("selector", [None, Selector((16, 8))])
def test_the_status_tells_how_many_steps_were_given_which_quantum(tmp_path: Path, selector):
    with world_in(tmp_path, selector=selector) as world:
        if selector is not None:
            selector.choose(0.0)
        assert world.retire.told({"kind": "status"})["quanta"] == ({} if selector is None else {"16": 1})


@pytest.mark.parametrize(
    ("chunked", "multimodal", "refused"),
    [(True, False, None), (False, False, "without chunked prefill"), (True, True, "multimodal")],
)
def test_where_prompts_cannot_be_cut_anywhere_there_is_no_quantum_to_choose(chunked, multimodal, refused):
    asked: Any = SimpleNamespace(scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked))
    asked.model_config = SimpleNamespace(is_multimodal_model=multimodal)
    with pytest.raises(SeamError, match=refused) if refused else nullcontext():
        configuration.check_policy(asked, Policy.RATE)
    for policy in (Policy.SELECTIVE, Policy.ALWAYS):
        configuration.check_policy(asked, policy)


def test_gemma_3_without_pictures_is_no_multimodal_model(tmp_path: Path):
    more = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 64}
    (tmp_path / "config.json").write_text(json.dumps(MODEL | more))
    model = ModelConfig(str(tmp_path), skip_tokenizer_init=True, max_model_len=4096, dtype="float32")
    asked = SimpleNamespace(scheduler_config=SimpleNamespace(enable_chunked_prefill=True), model_config=model)
    configuration.check_policy(asked, Policy.RATE)
