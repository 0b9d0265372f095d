"""Cutting rows out of a running forward pass, between two decoder layers.

Owns: where the loaded model's decoder layers are, whether they can be cut between, and what a pass computes on when
rows have gone.  Must not know: the table, why rows go.
Strategy: a model is known by the shape of its decoder loop, not by name.  One pass is watched: when every layer takes
what the one before it gave and else only what all of them get, rows can be cut out at any layer by slicing those
tensors.  Hooks are on the layers only in passes that are watched or armed, so other passes pay nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import CommonAttentionMetadata

from retire.core.types import RequestId

_log = logging.getLogger("vllm.retire")
WATCHED_ROWS = 16  # a pass with fewer says little: a dimension may have this size by accident

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class DecoderLoop:
    """The decoder layers of a model, in order.

    `understood`: whether rows can be cut out between them; None until a pass was watched.
    `common`: what every layer is given alike, by position or name, and along which dimension it has rows (None: it has
    none).  Tensors that are given under other names come from the layer before.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = _decoder_layers(model)
        self.understood: bool | None = None
        self.common: dict[Any, int | None] = {}
        if len(self.layers) < 2:
            self.give_up("no one list of modules holds every attention layer")

    def give_up(self, reason: str) -> None:
        """Never cut this model."""
        if self.understood is not False:
            _log.warning("retire: steps of this model stop or finish, rows are not cut out of them: %s", reason)
        self.understood = False

    @contextmanager
    def watched(self, rows: int) -> Iterator[Callable[[Any], None]]:
        """Watch a pass of so many rows; call what this gives with the pass's output."""
        watch = _Watch(rows, len(self.layers))
        with ExitStack() as stack:
            for number, layer in enumerate(self.layers):
                for hook in (
                    layer.register_forward_pre_hook(watch.before(number), with_kwargs=True),
                    layer.register_forward_hook(watch.after(number)),
                ):
                    stack.callback(hook.remove)
            yield lambda output: self._seen(watch, output)

    def _seen(self, watch: _Watch, output: Any) -> None:
        reason = watch.verdict(output)
        if reason is None:
            self.understood, self.common = True, watch.common
        else:
            self.give_up(reason)

    @contextmanager
    def before_each(self, call: Callable[[int, Arguments], Arguments | None]) -> Iterator[None]:
        """Call before each layer with its number and arguments; what it gives replaces them."""
        with ExitStack() as stack:
            for number, layer in enumerate(self.layers):

                def enter(_layer: nn.Module, args: Any, kwargs: Any, number: int = number) -> Arguments | None:
                    return call(number, (args, kwargs))

                stack.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
            yield


def _decoder_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    def attentions(module: nn.Module) -> set[int]:
        return {id(one) for one in module.modules() if isinstance(one, AttentionLayerBase)}

    wanted = attentions(model)
    for found in model.modules():  # the outermost list comes first
        if isinstance(found, nn.ModuleList) and wanted and all(attentions(layer) for layer in found):
            return tuple(found) if attentions(found) == wanted else ()
    return ()


class _Watch:
    """What the layers of one pass took and gave.  Holds on to the tensors, so that identity means something."""

    def __init__(self, rows: int, layers: int) -> None:
        self._rows, self._layers = rows, layers
        self.common: dict[Any, int | None] = {}
        self._passed = 0
        self._first: dict[Any, Any] = {}
        self._flowing: tuple[Any, ...] = ()
        self._reason: str | None = None

    def before(self, number: int) -> Callable[[nn.Module, Any, Any], None]:
        def enter(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            if number != self._passed:
                self._reason = "its decoder layers do not run one after the other"
            if number == 0:
                self._first = inputs
            elif self._reason is None:
                self._reason = self._judge(inputs)

        return enter

    def _judge(self, inputs: Mapping[Any, Any]) -> str | None:
        for key, value in inputs.items():
            if not isinstance(value, torch.Tensor) or any(value is one for one in self._flowing):
                continue
            if value is not self._first.get(key):
                return f"between its decoder layers something else happens to {key!r}"
            self.common[key] = _row_dimension(value, self._rows)
        if any(
            isinstance(inputs.get(key), torch.Tensor) and inputs[key] is not self._first[key] for key in self.common
        ):
            return "what every layer is given alike is sometimes something else"
        taken = [one for one in self._flowing if isinstance(one, torch.Tensor)]
        if not all(any(one is value for value in inputs.values()) for one in taken):
            return "a decoder layer does not take all that the one before it gave"
        return None

    def after(self, number: int) -> Callable[[nn.Module, Any, Any], None]:
        def leave(_layer: nn.Module, _args: Any, output: Any) -> None:
            self._flowing = output if isinstance(output, tuple) else (output,)
            if any(one is not None and _row_dimension(one, self._rows) != 0 for one in self._flowing):
                self._reason = f"decoder layer {number} gives other things than rows"
            self._passed += 1

        return leave

    def verdict(self, output: Any) -> str | None:
        """Why rows cannot be cut out, None if they can."""
        if self._passed != self._layers:
            return "its decoder layers do not each run once"
        if not isinstance(output, torch.Tensor) or _row_dimension(output, self._rows) != 0 or output.dim() != 2:
            return "it gives other things than one hidden state for each row"
        return self._reason


def _row_dimension(value: Any, rows: int) -> int | None:
    """Along which dimension a tensor has one entry a row; None for none.  Positions may come as [3, rows]."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return None
    if value.shape[0] == rows:
        return 0
    return value.dim() - 1 if value.dim() == 2 and value.shape[-1] == rows else None


@dataclass(frozen=True, slots=True)
class Batch:
    """Whose rows a pass of a V1 runner computes.  Those of one request stand together, in the order of its batch.

    `starts`: where each request's rows begin, and where the last one's end.  `groups`: of the attention layers that
    the pass is described to.
    """

    requests: tuple[RequestId, ...]
    starts: torch.Tensor
    groups: tuple[Any, ...]


def target_batch(runner: Any) -> Batch:
    """Of a pass of the served model.  Its layers are described together with a draft model's."""
    batch = runner.input_batch
    starts = runner.query_start_loc.cpu[: batch.num_reqs + 1]
    return Batch(tuple(batch.req_ids[: batch.num_reqs]), starts, tuple(chain.from_iterable(runner.attn_groups)))


def draft_batch(runner: Any) -> Batch:
    """Of a draft model's pass over the same rows: behind each request's come those it drafts from."""
    target, drafter = target_batch(runner), runner.drafter
    more = torch.arange(len(target.starts), dtype=target.starts.dtype) * drafter.net_num_new_slots_per_request
    return Batch(target.requests, target.starts + more, tuple(drafter.draft_attn_groups))


class RunningPass:
    """One forward pass; `retire.engine.worker.Pass`.  `rows`: as it began, with padding."""

    def __init__(self, batch: Batch, loop: DecoderLoop, rows: int) -> None:
        self._groups = batch.groups
        self._rows = rows
        self._requests: list[RequestId] = list(batch.requests)
        self._counts = [end - start for start, end in pairwise(batch.starts.tolist())]
        self._loop = loop
        self._alive = list(range(rows))  # which of the first rows are still computed
        self._cut: _Index | None = None  # from those before, where the coming layer has not been given them yet
        self._all: _Index | None = None  # from the first rows
        self._sliced: dict[int, tuple[Any, Any]] = {}  # what every layer gets, by its id: the tensor and its rest
        context = get_forward_context()
        self._context = context, context.attn_metadata, context.slot_mapping, context.is_padding

    @property
    def cut(self) -> bool:
        """Whether rows have gone."""
        return self._all is not None

    def keep(self, ends: Mapping[RequestId, int]) -> None:
        """From the coming layer on compute only so many leading rows of these requests, and all of the others."""
        counts = [min(ends.get(rid, count), count) for rid, count in zip(self._requests, self._counts, strict=True)]
        kept: list[int] = []
        first = 0
        for count, now in zip(self._counts, counts, strict=True):
            kept.extend(range(first, first + now))
            first += count
        self._cut = _Index(kept)
        self._alive = [self._alive[index] for index in kept]
        self._all = _Index(self._alive)
        self._sliced.clear()
        staying = [number for number, count in enumerate(counts) if count]
        self._cut_context(staying, counts, self._cut)
        self._requests = [self._requests[number] for number in staying]
        self._counts = [counts[number] for number in staying]

    def restore(self) -> None:
        """The forward context as the pass began."""
        context, *as_it_was = self._context
        context.attn_metadata, context.slot_mapping, context.is_padding = as_it_was

    def rest_of(self, arguments: Arguments) -> Arguments | None:
        """A layer's arguments without the rows that have gone."""
        if self._all is None:
            return None
        args, kwargs = arguments
        rest = (
            tuple(self._rest(key, value, self._all) for key, value in enumerate(args)),
            {key: self._rest(key, value, self._all) for key, value in kwargs.items()},
        )
        self._cut = None
        return rest

    def _rest(self, key: Any, value: Any, rows: _Index) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if key in self._loop.common:
            dimension = self._loop.common[key]
            if dimension is None:
                return value
            known = self._sliced.get(id(value))
            if known is None:
                known = self._sliced[id(value)] = value, rows.of(value, dimension)
            return known[1]
        if self._cut is not None:
            value = self._cut.of(value, 0)
        if value.shape[0] != len(self._alive):
            raise RuntimeError(f"a layer was given {value.shape[0]} rows under {key!r}, not {len(self._alive)}")
        return value

    def whole(self, output: torch.Tensor) -> torch.Tensor:
        """The pass's output with zeros for the rows that have gone: the runner's own indices stay valid."""
        if self._all is None:
            return output
        if output.shape[0] != len(self._alive):
            raise RuntimeError(f"{output.shape[0]} rows came out of a pass of {len(self._alive)}")
        full = output.new_zeros(self._rows, *output.shape[1:])
        full[self._all.rows] = output
        return full

    def _cut_context(self, staying: Sequence[int], counts: Sequence[int], rows: _Index) -> None:
        """Attention metadata of every group, and slot mappings, for the rows that stay."""
        context = get_forward_context()
        metadata: dict[str, Any] = dict(context.attn_metadata)
        starts = [0]
        for number in staying:
            starts.append(starts[-1] + counts[number])
        as_known = [0, *accumulate(self._counts)]
        for group in self._groups:
            old = metadata[group.layer_names[0]]
            if old.query_start_loc.tolist() != as_known:
                raise RuntimeError(_CUT_UP)
            device = old.query_start_loc.device
            gone = torch.tensor(
                [self._counts[number] - counts[number] for number in staying], dtype=old.seq_lens.dtype, device=device
            )
            requests = torch.tensor(staying, device=device)
            lengths = old.seq_lens[requests] - gone
            starts_cpu = torch.tensor(starts, dtype=old.query_start_loc.dtype)
            common = CommonAttentionMetadata(
                query_start_loc=starts_cpu.to(device),
                query_start_loc_cpu=starts_cpu,
                seq_lens=lengths,
                num_reqs=len(staying),
                num_actual_tokens=starts[-1],
                max_query_len=max(counts),
                max_seq_len=int(lengths.max()),
                block_table_tensor=old.block_table[requests],
                slot_mapping=rows.of(old.slot_mapping, 0),
                causal=old.causal,
            )
            new = group.get_metadata_builder().build(0, common)
            metadata.update(dict.fromkeys(group.layer_names, new))
        context.attn_metadata = metadata
        context.slot_mapping = {name: rows.of(slots, 0) for name, slots in context.slot_mapping.items()}
        if context.is_padding is not None:
            context.is_padding = rows.of(context.is_padding, 0)


def can_cut(runner: Any, batch: Batch) -> str | None:
    """Why rows cannot be cut out of this pass whatever the model is; None if nothing speaks against it."""
    context = get_forward_context()
    if context.cudagraph_runtime_mode != CUDAGraphMode.NONE:
        return "the pass is a captured graph"
    if not isinstance(context.attn_metadata, dict) or not isinstance(context.slot_mapping, dict):
        return "the step is split into micro-batches, or has no attention metadata"
    if runner.lora_config:
        return "adapters are chosen row by row"
    if runner.use_aux_hidden_state_outputs:
        return "hidden states of single layers are collected"
    if runner.is_mm_prefix_lm:
        return "attention is not causal everywhere"
    named = set(chain.from_iterable(group.layer_names for group in batch.groups))
    if named != set(context.attn_metadata):
        return "some attention layers belong to no KV group"
    for one in {id(one): one for one in context.attn_metadata.values()}.values():
        if getattr(one, "causal", None) is not True or not all(hasattr(one, name) for name in _NEEDED):
            return "an attention back end describes its steps in a way of its own"
        if _cuts_up(one.query_start_loc, batch.starts):
            return _CUT_UP
    return None


def _cuts_up(described: torch.Tensor, starts: torch.Tensor) -> bool:
    """Whether a back end describes other rows than one run for each request, as far as that can be seen in no time.

    Who reads a device's memory waits for the device.  What stands there is read when rows are cut out.
    """
    return described.shape != starts.shape or (described.is_cpu and not torch.equal(described, starts))


_CUT_UP = "an attention back end cuts requests up"
_NEEDED = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")


class _Index:
    """Rows to take out of a tensor; a run from its start is a view."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._count = len(rows)
        self._leading = not rows or rows[-1] == self._count - 1
        self.rows = torch.tensor(rows, dtype=torch.long)

    def of(self, value: torch.Tensor, dimension: int) -> torch.Tensor:
        if self._leading:
            return value.narrow(dimension, 0, self._count).contiguous()
        return value.index_select(dimension, self.rows.to(value.device))
