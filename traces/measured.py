"""Published quantiles of recorded interruptions.

Owns: the figures, and drawing from them.  Must not know: what is drawn.
Source: 905 sessions of Claude Code, Codex, OpenCode and Gemini CLI from 42 collections of logs, 5177 turns, 250 aborts,
205 of them followed by a turn within an hour; derived counts and times only.  A figure is a (share of values not above,
value) pair.
Strategy: between two figures a draw is interpolated.  Below the lowest (the tenth percentile, mostly) nothing was
published, so the lowest itself is drawn; the highest is the maximum.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import Final


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Figures in rising order, the last share 1."""

    figures: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        assert all(low <= high for low, high in pairwise(self.figures)), "figures rise"
        assert all(low[1] <= high[1] for low, high in pairwise(self.figures)), "values rise"
        assert self.figures[-1][0] == 1, "the maximum is the last"

    def at(self, share: float) -> float:
        """The value that a share in [0, 1] of all values is not above."""
        place = bisect_left(self.figures, share, key=lambda figure: figure[0])
        if place == 0:
            return self.figures[0][1]
        (below, low), (above, high) = self.figures[place - 1], self.figures[place]
        return min(high, low + (high - low) * (share - below) / (above - below))


INTERRUPTED_SHARE: Final = 132 / 205
"""Of transitions; the others were aborted while a tool ran."""

GAP_S: Final = Quantiles(
    (
        *((0.0, 0.0), (0.049, 0.25), (0.093, 2.0), (0.1, 2.225), (0.25, 6.786), (0.346, 10.0), (0.5, 16.297)),
        *((0.75, 45.24), (0.795, 60.0), (0.9, 179.604), (0.946, 300.0), (0.99, 600.579), (1.0, 1444.588)),
    )
)
"""From the abort to the next turn."""

ABORTED_TURN_S: Final = Quantiles(
    (
        *((0.1, 2.143), (0.25, 5.561), (0.5, 36.497), (0.75, 165.573), (0.9, 555.083)),
        *((0.99, 2465.22), (1.0, 2852.264)),
    )
)
"""From the start of the aborted turn to its abort."""

ABORTED_TURN_CALLS: Final = Quantiles(((0.25, 0), (0.5, 2), (0.75, 8), (0.9, 21), (0.99, 80), (1.0, 112)))
"""Calls of the model that the aborted turn had finished."""

TRANSITIONS_PER_SCOPE: Final = Quantiles(((0.5, 1), (0.75, 2), (0.9, 2), (0.99, 5), (1.0, 6)))
"""Of threads that have a transition."""

PROMPT_TOKENS: Final = Quantiles(
    ((0.1, 27405), (0.25, 49368), (0.5, 79221), (0.75, 109527), (0.9, 140212), (0.99, 176368), (1.0, 228661))
)
"""Of the last call before the abort."""

DELTA_TOKENS: Final = Quantiles(
    ((0.1, -1951), (0.25, 163), (0.5, 411), (0.75, 961), (0.9, 2282), (0.99, 19533), (1.0, 45876))
)
"""By how much the successor's prompt is larger."""

OUTPUT_TOKENS: Final = Quantiles(
    ((0.1, 50), (0.25, 69), (0.5, 185), (0.75, 434), (0.9, 894), (0.99, 4033), (1.0, 16118))
)
"""Of one call; Codex alone, because Claude Code's log states placeholders."""

KEPT_SHARE: Final = Quantiles(((0.1, 0.207), (0.25, 0.795), (0.304, 0.95), (0.5, 1.0), (1.0, 1.0)))
"""Of the old prompt's tokens, what the successor read from the provider's cache within four minutes; above 1 is counted
as 1.
"""

PROMPT_CHARS: Final = Quantiles(((0.1, 19), (0.25, 46), (0.5, 90), (0.75, 230), (0.9, 488), (0.99, 7454), (1.0, 49926)))
"""Of the message that started the successor."""
