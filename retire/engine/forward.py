"""One forward pass of the model, guarded.

Owns: how guard, decoder loop and running pass come together around vLLM's call.  Must not know: why rows go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from retire.engine.trim import WATCHED_ROWS, Arguments, DecoderLoop, RunningPass, can_cut
from retire.engine.worker import StepFenced, StepGuard, guard

_loops: weakref.WeakKeyDictionary[Any, DecoderLoop] = weakref.WeakKeyDictionary()


def guarded(runner: Any, rows: int, run: Callable[[], Any], *, embedded: bool) -> Any:
    """Run the model's forward pass of so many rows; what it gives has as many, whatever became of them.

    `embedded`: it is given embeddings instead of token ids.  Models that take them (with pictures, say) may note rows
    beside the pass and clear them at its end, so these passes are neither stopped nor cut.
    """
    if embedded:
        return run()
    step = guard()
    loop = _loop_of(runner)
    if not step.wanted:
        return _uncut(runner, loop, rows, run)
    try:
        return _armed(step, runner, loop, rows, run)
    except StepFenced:
        return torch.zeros(rows, runner.model_config.get_hidden_size(), dtype=runner.dtype, device=runner.device)
    finally:
        step.disarm()


def _loop_of(runner: Any) -> DecoderLoop:
    model = runner.get_model()
    loop = _loops.get(model)
    if loop is None:
        loop = _loops[model] = DecoderLoop(model)
        if runner.vllm_config.compilation_config.mode:
            loop.give_up("it is compiled")
    return loop


def _uncut(runner: Any, loop: DecoderLoop, rows: int, run: Callable[[], Any]) -> Any:
    """Run a pass whole; watch it if nobody knows the model and its rows cannot be taken for anything else."""
    if loop.understood is not None or rows < WATCHED_ROWS or rows == runner.model_config.get_hidden_size():
        return run()
    with loop.watched(rows) as seen:
        output = run()
    seen(output)
    return output


def _armed(step: StepGuard, runner: Any, loop: DecoderLoop, rows: int, run: Callable[[], Any]) -> Any:
    if runner.use_aux_hidden_state_outputs:  # what comes out has another shape: nothing stops such a step
        return run()
    if not loop.understood or can_cut(runner) is not None:
        step.arm(layers=max(1, len(loop.layers)))
        return _uncut(runner, loop, rows, run)
    running = RunningPass(runner, loop, rows)

    def before(layer: int, arguments: Arguments) -> Arguments | None:
        step.layer_point(layer)
        return running.rest_of(arguments)

    step.arm(len(loop.layers), running)
    try:
        with loop.before_each(before):
            return running.whole(run())
    except Exception as error:
        if not running.cut:
            raise
        loop.give_up(f"a pass of fewer rows failed: {error}")
    running.restore()
    step.uncut()
    return run()
