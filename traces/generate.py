"""Rows that nobody recorded.

Owns: drawing sessions, and the paper's window.  Must not know: logs, files.
Strategy: one generator, seeded, and nothing of it but `random()`, whose numbers are the same on every machine and
version.

- `sessions`: every measure is drawn from its published quantiles by itself.  What was not published is not made up:
  measures are independent, transitions of a scope follow each other with no other turn in between, and scopes begin
  anywhere in the span.
- `paper_window`: what the paper says of its densest 120 seconds and nothing else: 24 transitions in three bursts of
  eight, three scopes, inter-arrival coefficient of variation 3.568 (A.1.1), prompts of 8192 tokens that share nothing
  (7.4).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Final

from traces import measured
from traces.rows import AUTO_SUBMIT_S, Agent, Reason, StartKind, Transition

_Draw = Callable[[], float]
"""A number in [0, 1)."""

WINDOW_SCOPES: Final = 3
WINDOW_BURSTS: Final = 3
WINDOW_BURST_SIZE: Final = 8
WINDOW_VARIATION: Final = 3.568
WINDOW_PROMPT_TOKENS: Final = 8192


def sessions(seed: int, scopes: int, span_s: float) -> list[Transition]:
    """Transitions of `scopes` threads that begin within `span_s`, by the time of their start.

    The same arguments give the same rows.
    """
    draw = random.Random(seed).random  # noqa: S311 - nobody must be unable to guess these
    drawn = [row for scope in range(1, scopes + 1) for row in _thread(draw, scope, draw() * span_s)]
    return sorted(drawn, key=lambda row: (row.t_start_s, row.scope))


def _thread(draw: _Draw, scope: int, began_s: float) -> Iterator[Transition]:
    prompt = round(measured.PROMPT_TOKENS.at(draw()))
    for _ in range(round(measured.TRANSITIONS_PER_SCOPE.at(draw()))):
        lasted_s, gap_s = measured.ABORTED_TURN_S.at(draw()), measured.GAP_S.at(draw())
        output = round(measured.OUTPUT_TOKENS.at(draw()))
        after = max(1, prompt + round(measured.DELTA_TOKENS.at(draw())))
        kept = min(after, int(prompt * measured.KEPT_SHARE.at(draw())))
        yield Transition(
            source="S01",
            scope=scope,
            agent=Agent.GENERATED,
            start_kind=StartKind.USER_PROMPT,
            reason=Reason.INTERRUPTED if draw() < measured.INTERRUPTED_SHARE else Reason.TOOL_USE,
            t_abort_s=began_s + lasted_s,
            t_start_s=began_s + lasted_s + gap_s,
            gap_s=gap_s,
            aborted_turn_s=lasted_s,
            aborted_turn_calls=round(measured.ABORTED_TURN_CALLS.at(draw())),
            prompt_tokens_before=prompt,
            output_tokens_before=output,
            prompt_tokens_after=after,
            cached_tokens_after=kept,
            new_prompt_chars=round(measured.PROMPT_CHARS.at(draw())),
            auto_submit=gap_s < AUTO_SUBMIT_S,
            common_prefix_lb=kept,
        )
        began_s, prompt = began_s + lasted_s + gap_s, after


def paper_window(seed: int) -> list[Transition]:
    """The paper's densest 120 seconds as far as the paper describes them.

    Every scope has eight transitions, two or three in each burst: the paper counts nine final versions.
    """
    draw = random.Random(seed).random  # noqa: S311 - as above
    began_s = dict.fromkeys(range(1, WINDOW_SCOPES + 1), 0.0)
    rows = []
    for number, start_s in enumerate(_arrivals_s(draw)):
        scope = 1 + number % WINDOW_SCOPES
        gap_s = 0.001 * int(1 + 40 * draw())
        rows.append(
            Transition(
                source="S01",
                scope=scope,
                agent=Agent.GENERATED,
                start_kind=StartKind.TASK_STARTED,
                reason=Reason.INTERRUPTED,
                t_abort_s=start_s - gap_s,
                t_start_s=start_s,
                gap_s=gap_s,
                aborted_turn_s=start_s - gap_s - began_s[scope],
                prompt_tokens_before=WINDOW_PROMPT_TOKENS,
                prompt_tokens_after=WINDOW_PROMPT_TOKENS,
                cached_tokens_after=0,
                auto_submit=True,
                common_prefix_lb=0,
            )
        )
        began_s[scope] = start_s
    return rows


def _arrivals_s(draw: _Draw) -> list[float]:
    """Three bursts, some 1.5 s wide each, and between them two gaps that make the variation what it is said to be.

    With n gaps of sum T and sum of squares Q the squared variation is nQ/T² - 1.  T and the gaps inside bursts are
    drawn; the two others have a known sum and a known sum of squares, and therefore a known difference.
    """
    per_burst = WINDOW_BURST_SIZE - 1
    inside_s = [[0.05 + 0.35 * draw() for _ in range(per_burst)] for _ in range(WINDOW_BURSTS)]
    count = WINDOW_BURSTS * WINDOW_BURST_SIZE - 1
    total_s = 110 + 6 * draw()
    both_s = total_s - sum(map(sum, inside_s))
    squares = total_s**2 * (1 + WINDOW_VARIATION**2) / count - sum(
        gap_s**2 for burst_s in inside_s for gap_s in burst_s
    )
    apart_s = math.sqrt(2 * squares - both_s**2)
    between_s = [(both_s + apart_s) / 2, (both_s - apart_s) / 2]
    if draw() < 0.5:
        between_s.reverse()
    at_s = 1 + 2 * draw()
    arrivals_s = []
    for burst_s, after_s in zip(inside_s, [*between_s, 0.0], strict=True):
        for gap_s in [*burst_s, after_s]:
            arrivals_s.append(round(at_s, 3))
            at_s += gap_s
    return arrivals_s
