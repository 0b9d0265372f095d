"""How long things take on this engine, by what was measured, and whether reuse pays.

Owns: how long a computed prompt token and a step without prompts take here; the questions that ALIGN asks, and
whether a step is long enough to be watched.  Must not know: scopes.
"""

from __future__ import annotations

from collections.abc import Callable

from retire.core.types import Tier, TokenCount

WEIGHT = 0.2  # of the newest step in the running mean
DECODE_ROWS = 8  # of one request: a token, and a usual number of drafts
PROMPT_ROWS = 64  # of one request; fewer hardly take longer than one
LARGE = 0.75  # of the most rows that a step may have: so many take about as long for each


class Rates:
    """`restore_ns`: how long so many tokens take to come back from host memory, None while nobody knows.

    `min_tokens`: what is shorter is never worth a certificate.  `long_ns`: see `is_long`.  `drafts`: how many tokens
    are guessed for a request.  `largest`: how many rows a step may have.
    A step takes as long as its verification and its drafting do together.
    """

    def __init__(
        self,
        min_tokens: int,
        restore_ns: Callable[[int], float | None] | None,
        long_ns: int = 0,
        drafts: int = 0,
        largest: int = 0,
    ) -> None:
        self._min_tokens = min_tokens
        self._restore_ns = restore_ns
        self._long_ns = long_ns
        self._decode_rows = max(DECODE_ROWS, 1 + drafts)
        self._largest = largest
        self._large_ns_per_token: float | None = None
        self.ns_per_token: float | None = None
        self.decode_ns: float | None = None

    def ran(self, rows: int, most: int, took_ns: int) -> None:
        """A step of so many rows ran to its end, `most` of them one request's.

        That many tell a prompt from decodes, whoever else is in the step.  What lies between decoding (with drafts) and
        prompts says nothing about either.
        """
        if most <= self._decode_rows:
            self.decode_ns = _mixed(self.decode_ns, took_ns)
        elif most >= PROMPT_ROWS:
            self.ns_per_token = _mixed(self.ns_per_token, took_ns / rows)
            if rows >= LARGE * self._largest:
                self._large_ns_per_token = _mixed(self._large_ns_per_token, took_ns / rows)

    @property
    def largest_ns(self) -> float:
        """How long a step of the most rows takes, 0 while nobody knows.

        In a small step each token has a larger share of what every step costs: once a large one has run, small ones can
        only show that the largest takes less than was thought.
        """
        known = [ns for ns in (self.ns_per_token, self._large_ns_per_token) if ns is not None]
        return self._largest * min(known, default=0.0)

    @property
    def least_rows(self) -> int:
        """Fewer rows than this take as long as this many; 0 while nobody knows."""
        if not self.decode_ns or not self.ns_per_token:
            return 0
        return int(self.decode_ns / self.ns_per_token)

    def is_long(self, rows: int, most: int) -> bool:
        """Whether a step of so many rows, `most` of them one request's, is expected to take `long_ns` or more.

        What was never measured may.
        """
        known = self.decode_ns
        if most > self._decode_rows:
            known = None if self.ns_per_token is None else max(self.ns_per_token * rows, known or 0)
        return known is None or known >= self._long_ns

    def pays(self, tokens: TokenCount, tier: Tier) -> bool:
        """Whether reusing so many tokens from `tier` beats computing them.  What was never measured is tried."""
        if tokens < self._min_tokens:
            return False
        if tier is Tier.HBM or self.ns_per_token is None or self._restore_ns is None:
            return True
        restore_ns = self._restore_ns(tokens)
        return restore_ns is None or restore_ns < tokens * self.ns_per_token


def _mixed(known: float | None, newest: float) -> float:
    return newest if known is None else known + WEIGHT * (newest - known)
