"""Worker side of FENCE: the armed step, its safe points, its receipt.

Owns: what becomes of the running step's rows.  Must not know: the scheduler, HTTP, what happens after, how rows are
cut out of a pass (`retire.engine.trim`).
Strategy: a safe point is one table load per request of the step.  Between two decoder layers rows can be cut out;
inside one, and where the pass cannot be cut, a step stops only as a whole: it leaves through `StepFenced`, which never
leaves the model's forward call.  A draft model's forward over the same rows is a second pass of the step: it begins
with the rows that the target's ended with, so that a row counts as written when it is in the layers of both.
Where the host runs ahead of a device (`retire.engine.ahead`), times are of what the device has done, never earlier.
"""

from __future__ import annotations

import functools
import time
from typing import NoReturn, Protocol

from retire import seal
from retire.authority import home
from retire.authority.table import AuthorityTable
from retire.core import fence
from retire.core.fence import Choice
from retire.core.types import RequestId
from retire.engine import notes
from retire.engine.ahead import RunAhead, run_ahead
from retire.engine.plan import Cut, Phase, PlannedRows, Receipt, StepPlan
from retire.settings import Settings

FINE_NS = 25_000_000  # from one safe point to the next, half a layer: longer ones are asked inside, too


class StepFenced(BaseException):
    """Every row of the running step is obsolete.  Raised at a safe point, caught around the model's forward."""


class Pass(Protocol):
    """The running forward pass, as far as rows can be cut out of it."""

    def keep(self, ends: dict[RequestId, int]) -> None:
        """From the coming layer on compute only so many leading rows of these requests."""


class Switch(Protocol):
    """Puts the safe points of "attention" or "linear" layers into the model's code, and takes them out."""

    def __call__(self, layers: str, *, live: bool) -> None:
        """`live`: they are in."""


class StepGuard:
    """One per worker process.  `patience`: for so many layers a row limit that nobody has set yet is waited for.
    `ahead`: None where the host is the device.  `switch`: called when safe points become live and when they no longer
    are; those that are not live need not be there.  None: they are always there.

    `armed`: the attention layers' safe points are live.  `fine`: so are those of linear layers; never without `armed`.
    `stopped`: the step has ended at a safe point.
    """

    def __init__(
        self,
        table: AuthorityTable,
        patience: int = 0,
        ahead: RunAhead | None = None,
        switch: Switch | None = None,
    ) -> None:
        self.armed = self.fine = True  # as installed
        self._switch = switch
        self._live(armed=False)
        self._table = table
        self._patience = patience
        self._ahead = ahead
        self._plan: StepPlan | None = None
        self._drafts = self._undrafted = False
        self._holes: dict[RequestId, int] = {}  # requests of the last step, cut: from here on nothing is written
        self._begin_rows(())

    def _begin_rows(self, rows: tuple[PlannedRows, ...]) -> None:
        self._pass: Pass | None = None
        self._phase = Phase.TARGET
        self._layers = self._layer = self._first = 0  # of all passes so far; the running one's first
        self._attention = ""
        self._ends = [one.end for one in rows]  # up to where each request's rows go on
        self._running = list(self._ends)  # the same, as the running pass was told
        self._before: tuple[list[int], int] = list(self._ends), 0  # ends and cuts when the running pass began
        self._wanted = list(self._ends)  # the last that was decided upon
        self._watch = self._table.watch(one.ticket for one in rows)
        self._news = True  # something of the table may not have been decided upon
        self._missed: list[int | None] = [None] * len(rows)  # before which layer a revoked one had no limit yet
        self._over = False  # whether nobody is current in a step that can only stop as a whole
        self._guesses = False  # whether the running pass is over guessed tokens
        self._cuts: list[Cut] = []
        self._ended_ns = self._safe_points = self._longest_ns = 0
        self.stopped = False
        self._last_ns = time.monotonic_ns()

    def begin(self, plan: StepPlan | None, *, drafts: bool = False) -> None:
        """A step starts.  It is armed where its model's forward is: only there can a fence be caught.

        `drafts`: it is complete only when a draft model has computed its rows as well.
        """
        self._plan = plan
        self._drafts = self._undrafted = drafts
        self.disarm()
        rows = plan.rows if plan is not None else ()
        self._holes = {one.request: self._holes[one.request] for one in rows if self._behind_a_hole(one)}
        self._begin_rows(rows)

    def _behind_a_hole(self, rows: PlannedRows) -> bool:
        """Whether the step was launched before the one was cut that it builds on: its rows count for nothing."""
        return self._holes.get(rows.request, rows.start) < rows.start

    def _live(self, *, armed: bool, fine: bool = False) -> None:
        """From here on these safe points are live: see the class."""
        if self._switch is not None:
            if armed != self.armed:
                self._switch("attention", live=armed)
            if fine != self.fine:
                self._switch("linear", live=fine)
        self.armed, self.fine = armed, fine

    @property
    def wanted(self) -> bool:
        """Whether the step's forward is to be armed."""
        return self._plan is not None and self._plan.armed

    def arm(self, layers: int, running: Pass | None = None, phase: Phase = Phase.TARGET) -> None:
        """The forward of a model with so many layers begins: from here to its end the plan's safe points are live.

        `running`: all rows of the step; None where none can be cut out.
        """
        self._live(armed=self.wanted)
        self._pass, self._phase, self._attention = running, phase, ""
        self._first = self._layer = self._layers
        self._layers += layers
        self._running = [rows.end for rows in self._plan.rows] if self._plan and running else self._ends.copy()
        self._before = self._ends.copy(), len(self._cuts)
        self._wanted, self._over = self._ends.copy(), False
        self._news = True
        self._begin_pass()

    def _begin_pass(self) -> None:
        """What lies between two passes, sampling above all, is an interval between safe points; not one of layers."""
        if self._ahead is None:  # else the device may be anywhere since the step began
            self._reached(time.monotonic_ns())

    def disarm(self) -> None:
        """No safe point is live until the next forward."""
        self._live(armed=False)
        self._guesses = False

    def layer_point(self, layer: int) -> None:
        """Before decoder layer number `layer` of the running pass: decide, and cut or raise StepFenced."""
        self._layer = self._first + layer
        self._pass_point()
        if self._looks():
            self._decide_before_layer()

    def safe_point(self) -> None:
        """Inside a layer: raise StepFenced when no row of the step is of any use."""
        self._pass_point(layer=False)
        if not self._looks():
            return
        if self._guesses:
            self._drop_guesses()
            return
        plan, wanted = self._armed_plan(), self._wanted_now()
        if plan.foreign_rows == 0 and wanted == [rows.start for rows in plan.rows]:
            self._decide(wanted)

    def attention_point(self, name: str) -> None:
        """Before an attention operation of that layer.  Where rows cannot be cut out, steps are decided upon here."""
        if self._pass is not None:
            self.safe_point()
            return
        before, self._attention = self._attention, name
        self._pass_point(layer=name != before)
        if before not in ("", name) and not self._guesses:
            self._layer = min(self._layer + 1, self._layers - 1)
        if not self._looks():
            return
        if self._guesses:
            self._drop_guesses()
            return
        self._decide_before_layer()

    def arm_guesses(self) -> None:
        """A pass over guessed tokens begins: now and until it ends, raise StepFenced when none of them is of any use.

        All rows of the plan are written by then, so the frontier stays where it is.
        """
        self._live(armed=True)
        self._guesses = True
        self._pass, self._attention = None, ""
        self._news = True
        self._begin_pass()
        self.safe_point()

    def _drop_guesses(self) -> None:
        plan = self._armed_plan()
        if plan.foreign_rows == 0 and not any(self._table.holds(rows.ticket) for rows in plan.rows):
            self._stop()

    def drafted(self) -> None:
        """The draft model has computed the step's rows."""
        self._undrafted = False

    def _pass_point(self, *, layer: bool = True) -> None:
        self._safe_points += 1
        if self._ahead is None:
            now_ns = time.monotonic_ns()
            if not self.fine and now_ns - self._last_ns >= FINE_NS:
                self._live(armed=self.armed, fine=True)
            self._reached(now_ns)
        elif layer and (reached_ns := self._ahead.layer_point()) is not None:
            self._reached(reached_ns)

    def _reached(self, now_ns: int) -> None:
        self._longest_ns = max(self._longest_ns, now_ns - self._last_ns)
        self._last_ns = now_ns

    def _closed_ns(self) -> int:
        """When nothing that was launched before this safe point is computed any more."""
        if self._ahead is not None:
            self._reached(self._ahead.catch_up())
        return self._last_ns

    def _armed_plan(self) -> StepPlan:
        assert self._plan is not None, "a safe point of a step without a plan"
        return self._plan

    def _looks(self) -> bool:
        """Whether there is anything to decide: most safe points find the table as the one before left it."""
        self._news |= self._watch.changed()
        return self._news

    def _decide_before_layer(self) -> None:
        waits = self._miss()
        self._decide(self._wanted_now())
        self._news = waits

    def _miss(self) -> bool:
        """Before a layer: note which revoked requests nobody has set a limit for.  Whether there is any."""
        waits = False
        for number, rows in enumerate(self._armed_plan().rows):
            unset = self._table.limit(rows.ticket) is None and not self._table.current(rows.ticket)
            waits |= unset
            if unset and self._missed[number] is None:
                self._missed[number] = self._layer
        return waits

    def _wanted_now(self) -> list[int]:
        return [self._wanted_of(number) for number in range(len(self._ends))]

    def _wanted_of(self, number: int) -> int:
        """Up to where the rows are of use, as far as is known now.

        A current request's rows all are, unless its client has gone (limit 0).  A revoked one's are below the limit
        that its successor sets; until that is known, or no longer waited for, they go on.  Behind a hole none are.
        """
        plan, end = self._armed_plan(), self._ends[number]
        rows = plan.rows[number]
        limit, current = self._table.limit(rows.ticket), self._table.current(rows.ticket)
        if limit == 0 or rows.request in self._holes:
            return rows.start
        if current:
            return end
        if limit is None:
            missed = self._missed[number]
            waited = 0 if missed is None else self._layer - missed
            return end if waited < self._patience else rows.start
        return fence.useful_end(rows.start, end, limit, plan.unit_tokens)

    def _decide(self, wanted: list[int]) -> None:
        plan = self._armed_plan()
        over = self._pass is None and all(not self._table.holds(rows.ticket) for rows in plan.rows)
        if wanted != self._wanted or over != self._over:
            self._decide_anew(wanted, over)
        if self._ends == self._running:
            return
        if plan.foreign_rows == 0 and all(end == rows.start for end, rows in zip(self._ends, plan.rows, strict=True)):
            self._stop()
        assert self._pass is not None, "what cannot be cut stops as a whole"
        self._running = self._ends.copy()
        self._pass.keep(
            {
                rows.request: end - rows.start
                for end, rows in zip(self._ends, plan.rows, strict=True)
                if end < rows.end  # of the others all, and what a draft model adds to them
            }
        )

    def _decide_anew(self, wanted: list[int], over: bool) -> None:
        changed = [number for number, end in enumerate(wanted) if end < self._wanted[number]]
        self._wanted, self._over = wanted, over
        if self._pass is None:
            self._decide_together(changed)
        else:
            for number in changed:
                self._decide_alone(number)

    def _stop(self) -> NoReturn:
        self.stopped = True
        self._ended_ns = self._closed_ns()
        self.disarm()
        raise StepFenced

    def _decide_alone(self, number: int) -> None:
        """Rows of one request; all others stay as they are."""
        plan = self._armed_plan()
        rows, end = plan.rows[number], self._ends[number]
        counts = [end - one.start for end, one in zip(self._ends, plan.rows, strict=True)]
        decided = fence.decide(
            fence.Rows(rows.start, end, self._wanted[number]),
            layers=self._layers,
            remaining=self._layers - self._layer,
            company=sum(counts) - counts[number] + plan.foreign_rows,
            least_rows=plan.least_rows,
            can_trim=True,
        )
        self._ends[number] = decided.end
        self._note(rows, decided.choice, decided.cost, decided.end)

    def _decide_together(self, changed: list[int]) -> None:
        """The step as a whole: it may stop when nobody is current in it any more."""
        plan = self._armed_plan()
        if plan.foreign_rows or not self._over:
            return
        useful = sum(end - rows.start for end, rows in zip(self._wanted, plan.rows, strict=True))
        decided = fence.decide(
            fence.Rows(0, sum(rows.end - rows.start for rows in plan.rows), useful),
            layers=self._layers,
            remaining=self._layers - self._layer,
            company=0,
            least_rows=plan.least_rows,
            can_trim=False,
        )
        if decided.choice is Choice.STOP:
            self._ends = [rows.start for rows in plan.rows]
        for number, rows in enumerate(plan.rows):
            if decided.choice is Choice.STOP or number in changed:
                self._note(rows, decided.choice, decided.cost, self._ends[number])

    def _note(self, rows: PlannedRows, choice: Choice, cost: dict[Choice, int], end: int) -> None:
        at_ns = self._last_ns if choice is Choice.KEEP else self._closed_ns()
        notes.cut(self._armed_plan(), rows, choice, end, self._layer, self._table)
        self._cuts.append(Cut(rows.request, choice, cost, self._layer, end, at_ns, self._phase))

    def uncut(self) -> None:
        """The forward starts again from its beginning, with all its rows and without safe points."""
        self.disarm()
        self._pass = None
        self._ends, cuts = self._before
        del self._cuts[cuts:]

    def end(self) -> Receipt | None:
        """The step is over; its receipt, or None when it held no scoped request.

        Where its output is still on the way from the device, it is over when that has come (`Receipt.arrived`).
        """
        plan, self._plan = self._plan, None
        self.disarm()
        self._pass = None
        if plan is None:
            return None
        nothing = [self._undrafted or rows.request in self._holes for rows in plan.rows]
        ends = [rows.start if none else end for none, rows, end in zip(nothing, plan.rows, self._ends, strict=True)]
        cut = {rows.request: end for rows, end in zip(plan.rows, self._ends, strict=True) if end < rows.end}
        self._holes = {**cut, **self._holes}
        ended_ns = self._ended_ns or self._over_ns(armed=plan.armed)
        return Receipt(
            seq=plan.seq,
            ends=tuple(ends),
            cuts=tuple(self._cuts),
            stopped=self.stopped,
            phase=self._phase,
            ended_ns=ended_ns,
            safe_points=self._safe_points,
            longest_interval_ns=self._longest_ns,
        )

    def _over_ns(self, *, armed: bool) -> int:
        """The target's pass is over, as its output shows; nothing shows that of a draft model's."""
        if self._ahead is not None and not self._drafts:
            return time.monotonic_ns()
        over_ns = time.monotonic_ns() if self._ahead is None else self._ahead.catch_up()
        if armed:
            self._reached(over_ns)
        return over_ns


@functools.cache
def guard() -> StepGuard:
    """The guard of this worker process.  Raises SeamError when the process is not patched."""
    seal.require()
    settings = Settings.from_env()
    return StepGuard(home.table(), settings.limit_patience, run_ahead(settings.window_layers), seal.switch)
