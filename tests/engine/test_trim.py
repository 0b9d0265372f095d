"""Rows cut out of a running pass: which models can be cut, and that the rest is what it would have been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from retire.core.types import RequestId
from retire.engine.trim import Arguments, DecoderLoop, RunningPass, can_cut, draft_batch, target_batch

HIDDEN, LAYERS = 24, 4
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


class Attention(nn.Module, AttentionLayerBase):
    """A layer that looks at who the context says its rows are."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        raise NotImplementedError

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        metadata = context.attn_metadata[self.name]
        assert context.slot_mapping[self.name].shape[0] == hidden.shape[0] == metadata.slot_mapping.shape[0]
        starts = metadata.query_start_loc.tolist()
        assert starts[-1] <= hidden.shape[0]
        out = torch.zeros_like(hidden)
        for start, end, blocks in zip(starts, starts[1:], metadata.block_table, strict=False):
            out[start:end] = hidden[start:end].cumsum(0) * blocks[0]  # causal, and its request's own
        return out


class Layer(nn.Module):
    """Residual style: positions for all, hidden state and residual from layer to layer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.attention = Attention(f"layers.{number}")
        self.scale = 1 + number / 10

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = positions if positions.dim() == 1 else positions[0]
        residual = hidden_states if residual is None else hidden_states + residual
        return self.attention(residual * self.scale + rows[:, None]) / 100, residual


class Model(nn.Module):
    """`between`: what the loop does with its rows after each layer."""

    def __init__(
        self, between: Callable[[int, torch.Tensor], torch.Tensor] | None = None, layers: int = LAYERS
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(layers))
        self._between = between

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        residual = None
        for number, layer in enumerate(self.layers):
            hidden, residual = layer(positions, hidden, residual)
            if self._between is not None:
                hidden = self._between(number, hidden)
        return hidden + residual


class Builder:
    def build(self, common_prefix_len: int, common: Any) -> Any:
        assert common_prefix_len == 0
        counts = common.query_start_loc.diff()
        assert (counts > 0).all()
        assert common.max_query_len == counts.max()
        assert common.max_seq_len == common.seq_lens.max()
        assert common.num_actual_tokens == common.query_start_loc[-1] == common.slot_mapping.shape[0]
        assert common.num_reqs == len(common.seq_lens) == len(common.block_table_tensor)
        return SimpleNamespace(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=True,
        )


class Step:
    """A step of three requests, their rows in the runner's order, two padding rows behind; two attention groups."""

    def __init__(self, model: Model, counts: dict[RequestId, int], *, mrope: bool = False) -> None:
        torch.manual_seed(0)
        total = sum(counts.values())
        self.rows = total + 2
        self.model = model
        self.counts = counts
        self.hidden = torch.randn(self.rows, HIDDEN)
        self.positions = torch.arange(self.rows)
        if mrope:
            self.positions = self.positions.expand(3, -1).clone()
        starts = torch.tensor([0, *torch.tensor(list(counts.values())).cumsum(0).tolist()], dtype=torch.int32)
        names = [f"layers.{number}" for number in range(len(model.layers))]
        groups = [names[::2], names[1::2]]
        self.runner = SimpleNamespace(
            input_batch=SimpleNamespace(num_reqs=len(counts), req_ids=list(counts)),
            query_start_loc=SimpleNamespace(cpu=torch.cat([starts, torch.full((5,), total, dtype=torch.int32)])),
            attn_groups=[[SimpleNamespace(layer_names=g, get_metadata_builder=Builder)] for g in groups],
            lora_config=None,
            is_mm_prefix_lm=False,
            use_aux_hidden_state_outputs=False,
        )
        metadata, slots = {}, {}
        for number, group in enumerate(groups):
            one = SimpleNamespace(
                query_start_loc=starts,
                seq_lens=torch.tensor([100 + count for count in counts.values()], dtype=torch.int32),
                block_table=torch.arange(1, len(counts) + 1)[:, None] * (number + 1),
                slot_mapping=torch.arange(self.rows) * (number + 1),
                causal=True,
            )
            metadata |= dict.fromkeys(group, one)
            slots |= dict.fromkeys(group, one.slot_mapping)
        self.context = ForwardContext(
            no_compile_layers={}, attn_metadata=metadata, slot_mapping=slots, cudagraph_runtime_mode=CUDAGraphMode.NONE
        )

    def run(self) -> torch.Tensor:
        with override_forward_context(self.context):
            found: torch.Tensor = self.model(self.hidden.clone(), self.positions)
        return found

    def understood(self) -> DecoderLoop:
        loop = DecoderLoop(self.model)
        with override_forward_context(self.context), loop.watched(self.rows) as seen:
            output = self.model(self.hidden.clone(), self.positions)
        seen(output)
        return loop

    @contextmanager
    def cutting(self, loop: DecoderLoop, at: dict[int, dict[RequestId, int]]) -> Iterator[RunningPass]:
        """Keep these leading rows from these layers on."""
        with override_forward_context(self.context):
            running = RunningPass(target_batch(self.runner), loop, self.rows)

            def before(layer: int, arguments: Arguments) -> Arguments | None:
                if layer in at:
                    running.keep(at[layer])
                return running.rest_of(arguments)

            with loop.before_each(before):
                yield running


COUNTS = {A: 7, B: 11, C: 1}


@pytest.mark.parametrize("mrope", [False, True])
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize(
    "kept",
    [
        {A: 3},
        {A: 0},
        {B: 4},
        {B: 0},
        {A: 3, B: 4, C: 0},
        {A: 0, B: 0},
        {A: 0, B: 11, C: 0},
        {B: 0, C: 0},
        {A: 99},  # more than there are
    ],
)
def test_the_rows_that_stay_are_what_they_would_have_been(kept: dict[RequestId, int], layer: int, mrope: bool) -> None:
    step = Step(Model(), COUNTS, mrope=mrope)
    loop = step.understood()
    assert loop.understood
    whole = step.run()
    with step.cutting(loop, {layer: kept}) as running:
        output = running.whole(step.model(step.hidden.clone(), step.positions))
    assert output.shape == whole.shape
    first = 0
    for rid, count in COUNTS.items():
        stay = min(kept.get(rid, count), count)
        assert torch.equal(output[first : first + stay], whole[first : first + stay]), rid
        assert not output[first + stay : first + count].any(), f"rows of {rid} that have gone are zeros"
        first += count


def test_rows_can_go_twice() -> None:
    step = Step(Model(), COUNTS)
    loop, whole = step.understood(), step.run()
    with step.cutting(loop, {1: {A: 5, C: 0}, 3: {A: 2, B: 9, C: 0}}) as running:
        output = running.whole(step.model(step.hidden.clone(), step.positions))
    assert torch.equal(output[:2], whole[:2])
    assert torch.equal(output[7:16], whole[7:16])
    assert not output[2:7].any()
    assert not output[16:].any()


def test_sequence_lengths_follow_the_rows() -> None:
    step = Step(Model(), COUNTS)
    loop = step.understood()
    with step.cutting(loop, {0: {A: 3, B: 0}}):
        step.model(step.hidden.clone(), step.positions)
        metadata = step.context.attn_metadata["layers.1"]
        assert metadata.seq_lens.tolist() == [103, 101]
        assert metadata.query_start_loc.tolist() == [0, 3, 4]
        assert metadata.slot_mapping.tolist() == [0, 2, 4, 36]


def test_a_pass_that_was_not_cut_gives_what_the_model_gave() -> None:
    step = Step(Model(), COUNTS)
    loop, whole = step.understood(), step.run()
    with step.cutting(loop, {}) as running:
        output = running.whole(step.model(step.hidden.clone(), step.positions))
    assert torch.equal(output, whole)
    assert not running.cut


def test_the_context_can_be_put_back() -> None:
    step = Step(Model(), COUNTS)
    loop, whole = step.understood(), step.run()
    before = step.context.attn_metadata, step.context.slot_mapping
    with step.cutting(loop, {1: {A: 0}}) as running:
        step.model(step.hidden.clone(), step.positions)
    assert step.context.attn_metadata is not before[0]
    running.restore()
    assert (step.context.attn_metadata, step.context.slot_mapping) == before
    assert torch.equal(step.run(), whole)


def test_hooks_are_gone_after_the_pass() -> None:
    step = Step(Model(), COUNTS)
    loop = step.understood()
    with step.cutting(loop, {1: {A: 0}}):
        step.model(step.hidden.clone(), step.positions)
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in loop.layers)


# -- which models are understood ---------------------------------------------------------------------------------


class Skipping(Model):
    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.layers[0](positions, hidden, None)
        return hidden + residual


class Shuffled(Model):
    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        residual = None
        for layer in reversed(self.layers):
            hidden, residual = layer(positions, hidden, residual)
        return hidden + residual


class LastRow(Model):
    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, positions)[-1:]


class Forgetful(Model):
    """The residual of one layer does not reach the next."""

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden, _ = layer(positions, hidden, None)
        return hidden


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Model(lambda _, hidden: hidden * 2), id="rows are changed between layers"),
        pytest.param(
            Model(lambda number, hidden: hidden.clone() if number == 2 else hidden), id="rows are replaced once"
        ),
        pytest.param(Skipping(), id="a layer is not run"),
        pytest.param(Shuffled(), id="another order"),
        pytest.param(LastRow(), id="not one state a row"),
        pytest.param(Forgetful(), id="something given is not taken"),
    ],
)
def test_another_loop_is_not_cut(model: Model) -> None:
    assert Step(model, COUNTS).understood().understood is False


def test_a_model_without_a_list_of_layers_is_not_cut() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention("layers.0")

    assert DecoderLoop(Single()).understood is False


def test_attention_outside_the_list_is_another_loop() -> None:
    model = Model()
    model.extra = Attention("extra")
    assert DecoderLoop(model).understood is False


@pytest.mark.parametrize("counts", [{A: 2, B: 40, C: 1}, {A: 1, B: 40, C: 2}, {A: 3, B: HIDDEN - 6, C: 1}])
def test_three_rows_of_positions_are_not_three_rows(counts: dict[RequestId, int]) -> None:
    """Positions may be [3, rows]: no size of what is left is taken for theirs, nor the hidden size for rows."""
    step = Step(Model(), counts, mrope=True)
    loop = Step(Model(), COUNTS, mrope=True).understood()
    loop.layers = DecoderLoop(step.model).layers
    whole = step.run()
    with step.cutting(loop, {1: {B: 2}, 2: {B: 0}}) as running:
        output = running.whole(step.model(step.hidden.clone(), step.positions))
    assert torch.equal(output[: counts[A]], whole[: counts[A]])
    last = counts[A] + counts[B]
    assert torch.equal(output[last : last + counts[C]], whole[last : last + counts[C]])


def test_a_model_that_nobody_has_watched_is_not_known() -> None:
    assert DecoderLoop(Model()).understood is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda step: setattr(step.runner, "lora_config", object()), "adapters"),
        (lambda step: setattr(step.runner, "use_aux_hidden_state_outputs", True), "single layers"),
        (lambda step: setattr(step.runner, "is_mm_prefix_lm", True), "not causal"),
        (
            lambda step: setattr(step.context.attn_metadata["layers.0"], "query_start_loc", torch.arange(9)),
            "cuts requests",
        ),
        (lambda step: setattr(step.context, "cudagraph_runtime_mode", CUDAGraphMode.FULL), "captured"),
        (lambda step: setattr(step.context, "attn_metadata", [step.context.attn_metadata]), "micro-batches"),
        (lambda step: step.runner.attn_groups.pop(), "no KV group"),
        (lambda step: setattr(step.context.attn_metadata["layers.1"], "causal", torch.ones(3)), "its own"),
        (lambda step: delattr(step.context.attn_metadata["layers.0"], "slot_mapping"), "its own"),
    ],
)
def test_what_no_pass_is_cut_for(change: Callable[[Step], None], reason: str) -> None:
    step = Step(Model(), COUNTS)
    with override_forward_context(step.context):
        assert can_cut(step.runner, target_batch(step.runner)) is None
        change(step)
        assert reason in (can_cut(step.runner, target_batch(step.runner)) or "")


def described_as(step: Step, starts: torch.Tensor) -> None:
    for metadata in step.context.attn_metadata.values():
        metadata.query_start_loc = starts


def test_what_an_attention_back_end_has_on_a_device_is_not_read_before_rows_are_cut() -> None:
    """It would be waited for, in every armed pass."""
    step = Step(Model(), COUNTS)
    described_as(step, torch.empty(len(COUNTS) + 1, device="meta", dtype=torch.int32))
    with override_forward_context(step.context):
        assert can_cut(step.runner, target_batch(step.runner)) is None
        described_as(step, torch.empty(9, device="meta", dtype=torch.int32))
        assert "cuts requests" in (can_cut(step.runner, target_batch(step.runner)) or "")


def test_it_is_read_when_rows_are_cut() -> None:
    step = Step(Model(), COUNTS)
    loop = step.understood()
    first, *rest = target_batch(step.runner).starts.tolist()
    described_as(step, torch.tensor([first, rest[0] + 1, *rest[1:]], dtype=torch.int32))
    with override_forward_context(step.context):
        running = RunningPass(target_batch(step.runner), loop, step.rows)
        with pytest.raises(RuntimeError, match="cuts requests"):
            running.keep({A: 1})
        assert running.cut, "the pass starts again, with all its rows"


# -- a draft model's pass over the same rows ---------------------------------------------------------------------------

BEHIND = 2  # rows that a draft model computes behind each request's


def drafting(counts: dict[RequestId, int]) -> Step:
    """A draft model's pass; the runner still says what the target's was."""
    step = Step(Model(), {rid: count + BEHIND for rid, count in counts.items()})
    starts = torch.tensor([0, *torch.tensor(list(counts.values())).cumsum(0).tolist()], dtype=torch.int32)
    groups = [group for groups in step.runner.attn_groups for group in groups]
    drafter = SimpleNamespace(net_num_new_slots_per_request=BEHIND, draft_attn_groups=groups)
    step.runner.query_start_loc, step.runner.drafter = SimpleNamespace(cpu=starts), drafter
    return step


def test_a_draft_models_pass_has_more_rows_and_can_be_cut_as_well() -> None:
    step = drafting(COUNTS)
    loop, whole = step.understood(), step.run()
    with override_forward_context(step.context):
        assert "cuts requests" in (can_cut(step.runner, target_batch(step.runner)) or "")
        assert can_cut(step.runner, draft_batch(step.runner)) is None
        running = RunningPass(draft_batch(step.runner), loop, step.rows)

        def before(layer: int, arguments: Arguments) -> Arguments | None:
            if layer == 0:
                running.keep({A: 3})
            return running.rest_of(arguments)

        with loop.before_each(before):
            output = running.whole(step.model(step.hidden.clone(), step.positions))
    assert torch.equal(output[:3], whole[:3])
    first = COUNTS[A] + BEHIND
    assert not output[3:first].any()
    assert torch.equal(output[first : step.rows - 2], whole[first : step.rows - 2]), "all rows of the others"
