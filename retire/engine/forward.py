"""The forward passes of a step, guarded: the served model's, and a draft model's.

Owns: how guard, decoder loop and running pass come together around vLLM's calls.  Must not know: why rows go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from retire.engine.plan import Phase
from retire.engine.trim import (
    WATCHED_ROWS,
    Arguments,
    Batch,
    DecoderLoop,
    RunningPass,
    can_cut,
    draft_batch,
    target_batch,
)
from retire.engine.worker import StepFenced, StepGuard, guard

_loops: weakref.WeakKeyDictionary[Any, DecoderLoop] = weakref.WeakKeyDictionary()


def guarded(runner: Any, rows: int, run: Callable[[], Any], *, embedded: bool) -> Any:
    """Run the model's forward pass of so many rows; what it gives has as many, whatever became of them.

    `embedded`: it is given embeddings instead of token ids.  Models that take them (with pictures, say) may note rows
    beside the pass and clear them at its end, so these passes are neither stopped nor cut.
    """
    hidden = runner.model_config.get_hidden_size()
    try:
        return run() if embedded else _Guarded(runner, Phase.TARGET, runner.get_model(), hidden, rows, run)()
    except StepFenced:
        return torch.zeros(rows, hidden, dtype=runner.dtype, device=runner.device)


def draft_model(runner: Any) -> nn.Module | None:
    """The model that drafts for the runner's; None where nobody drafts, or without a model."""
    model = getattr(getattr(runner, "drafter", None), "model", None)
    return model if isinstance(model, nn.Module) else None


def drafted(runner: Any, propose: Callable[[], Any]) -> Any:
    """What the drafter proposes.  Its model's first pass, over all rows of the step, is guarded as the target's is.

    The passes behind it compute one guessed token of each request: they stop as a whole.  A stop leaves zeros: nobody
    of the step will ever verify them.
    """
    model, step = draft_model(runner), guard()
    if model is None:
        return propose()
    forward, passes = model.forward, 0

    def one(**inputs: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes > 1:
            return guesses(inputs)
        output = first(inputs)
        step.drafted()
        return output

    def first(inputs: dict[str, Any]) -> Any:
        if inputs["inputs_embeds"] is not None:
            return forward(**inputs)
        rows = inputs["input_ids"].shape[0]
        return _Guarded(runner, Phase.DRAFT, model, runner.drafter.hidden_size, rows, lambda: forward(**inputs))()

    def guesses(inputs: dict[str, Any]) -> Any:
        if not step.wanted:
            return forward(**inputs)
        try:
            step.arm_guesses()
            return forward(**inputs)
        finally:
            step.disarm()

    model.forward = one
    try:
        if not step.stopped:
            return propose()
    except StepFenced:
        pass
    finally:
        del model.forward
    return torch.zeros(runner.input_batch.num_reqs, runner.num_spec_tokens, dtype=torch.int64, device=runner.device)


class _Guarded:
    """One forward pass over the rows of the step.  Lets StepFenced out.  `run`: vLLM's own call."""

    def __init__(
        self, runner: Any, phase: Phase, model: nn.Module, hidden: int, rows: int, run: Callable[[], Any]
    ) -> None:
        self._runner, self._phase = runner, phase
        self._hidden, self._rows, self._run = hidden, rows, run
        self._loop = decoder_loop(model)
        if runner.vllm_config.compilation_config.mode:
            self._loop.give_up("it is compiled")

    def __call__(self) -> Any:
        step = guard()
        if not step.wanted:
            return self._uncut()
        try:
            return self._armed(step)
        finally:
            step.disarm()

    def _uncut(self) -> Any:
        """Run it whole; watch it if nobody knows the model and its rows cannot be taken for anything else."""
        if self._loop.understood is not None or self._rows < WATCHED_ROWS or self._rows == self._hidden:
            return self._run()
        with self._loop.watched(self._rows) as seen:
            output = self._run()
        seen(output)
        return output

    def _armed(self, step: StepGuard) -> Any:
        runner, loop = self._runner, self._loop
        if runner.use_aux_hidden_state_outputs:  # what comes out has another shape: nothing stops such a step
            return self._run()
        batch = self._batch()
        if not loop.understood or can_cut(runner, batch) is not None:
            step.arm(max(1, len(loop.layers)), phase=self._phase)
            return self._uncut()
        running = RunningPass(batch, loop, self._rows)

        def before(layer: int, arguments: Arguments) -> Arguments | None:
            step.layer_point(layer)
            return running.rest_of(arguments)

        step.arm(len(loop.layers), running, self._phase)
        try:
            with loop.before_each(before):
                return running.whole(self._run())
        except Exception as error:
            if not running.cut:
                raise
            loop.give_up(f"a pass of fewer rows failed: {error}")
        running.restore()
        step.uncut()
        return self._run()

    def _batch(self) -> Batch:
        return target_batch(self._runner) if self._phase is Phase.TARGET else draft_batch(self._runner)


def decoder_loop(model: nn.Module) -> DecoderLoop:
    """The model's, found once."""
    loop = _loops.get(model)
    if loop is None:
        loop = _loops[model] = DecoderLoop(model)
    return loop
