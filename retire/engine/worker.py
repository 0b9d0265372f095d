"""Worker side of FENCE: the armed step, its safe points, its receipt.

Owns: the decision to stop the running step.  Must not know: the scheduler, HTTP, what happens after.
Strategy: a safe point is one table load per request of the step; a stopped step leaves through `StepFenced`, which
never leaves the model's forward call.
"""

from __future__ import annotations

import functools
import time

from retire import seal
from retire.authority import home
from retire.authority.table import AuthorityTable
from retire.engine.plan import PlannedRows, Receipt, StepPlan


class StepFenced(BaseException):
    """Every row of the running step is obsolete.  Raised at a safe point, caught around the model's forward."""


def obsolete(table: AuthorityTable, rows: PlannedRows) -> bool:
    """Whether nobody can use these rows any more.

    A revoked request's rows are useful only below its row limit, which a promised prefix sets; without a promise
    they are not.  A current request's rows are obsolete when its client has gone (limit 0).
    """
    limit = table.limit(rows.ticket)
    if table.current(rows.ticket):
        return limit == 0
    return limit is None or limit <= rows.start


FINE_NS = 5_000_000  # a layer that takes longer is asked inside, too


class StepGuard:
    """One per worker process.

    `armed`: the attention layers' safe points are live.  `fine`: so are those of linear layers; never without `armed`.
    """

    def __init__(self, table: AuthorityTable) -> None:
        self._table = table
        self._plan: StepPlan | None = None
        self.armed = False
        self.fine = False
        self._stopped_ns = 0
        self._safe_points = 0
        self._last_ns = 0
        self._longest_ns = 0

    def begin(self, plan: StepPlan | None) -> None:
        """A step starts.  It is armed where its model's forward is: only there can a fence be caught."""
        self._plan = plan
        self.disarm()
        self._stopped_ns = self._safe_points = self._longest_ns = 0
        self._last_ns = time.monotonic_ns()

    def arm(self) -> None:
        """The model's forward begins: from here to its end the plan's safe points are live."""
        self.armed = self._plan is not None and self._plan.armed
        self._last_ns = time.monotonic_ns()

    def disarm(self) -> None:
        """No safe point is live until the next forward."""
        self.armed = self.fine = False

    def safe_point(self) -> None:
        """Raise StepFenced when every row of the armed step is obsolete."""
        now = time.monotonic_ns()
        self._safe_points += 1
        self._longest_ns = max(self._longest_ns, now - self._last_ns)
        self._last_ns = now
        self.fine = self._longest_ns >= FINE_NS
        assert self._plan is not None
        if all(obsolete(self._table, rows) for rows in self._plan.rows):
            self.disarm()
            self._stopped_ns = now
            raise StepFenced

    def end(self) -> Receipt | None:
        """The step is over; its receipt, or None when it held no scoped request."""
        plan, self._plan = self._plan, None
        self.disarm()
        if plan is None:
            return None
        return Receipt(
            seq=plan.seq,
            stopped=self._stopped_ns > 0,
            obsolete_closed_ns=self._stopped_ns or time.monotonic_ns(),
            safe_points=self._safe_points,
            longest_interval_ns=self._longest_ns,
        )


@functools.cache
def guard() -> StepGuard:
    """The guard of this worker process.  Raises SeamError when the process is not patched."""
    seal.require()
    return StepGuard(home.table())
